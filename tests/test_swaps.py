"""One example among thousands moves the sum by no more than its sensitivity.

Its terms may be huge and cancel, between rows, between uses of a weight, or on the way
from operands to leaves; the other examples are small, so that any loss of theirs shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

pytestmark = [pytest.mark.rounding, pytest.mark.optimized]

BATCH, WIDTH, CLIP_NORM = 4000, 24, 0.7


def make_cast_loss(*dtypes: str) -> Any:
    """A loss of twice the matrix, cast to these dtypes and back."""

    def loss(w, example):
        x, d, _ = example
        for dtype in dtypes:
            w = w.astype(dtype)
        return jnp.sum((x @ (2 * w.astype(jnp.float32))) * d)

    return loss


def rounded_mantissa_loss(w, example):
    x, d, _ = example
    return jnp.sum((x @ (2 * jax.lax.reduce_precision(w, 8, 7))) * d)


def bfloat16_tanh_loss(w, example):
    x, d, _ = example
    return jnp.sum((x @ jnp.tanh(w.astype(jnp.bfloat16)).astype(jnp.float32)) * d)


def two_uses_loss(w, example):
    x, d, cancel = example
    return jnp.sum((x @ w) * d) - cancel * jnp.sum((d @ w.T) * x)


def penalised_loss(w, example):
    """The penalty's gradient is a matrix of ones, which the rows may cancel."""
    x, d, cancel = example
    return jnp.sum((x @ w) * d) - cancel * x[0, 0] * d[0, 0] * jnp.sum(w**2) / 2


def normalised_loss(w, example):
    x, d, _ = example
    scale = jax.lax.rsqrt(jnp.sum(w**2, axis=0, keepdims=True))
    return jnp.sum((x @ (w * scale)) * d)


def make_narrow_product_loss(dtype: str) -> Any:
    def loss(w, example):
        x, d, _ = example
        h = jnp.dot(
            x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32
        )
        return jnp.sum(h * d)

    return loss


def lookup_loss(w, example):
    x, d, cancel = example
    h = jnp.take(w, jnp.array([1, 5]), axis=0) - cancel * jnp.take(
        w, jnp.array([5, 1]), axis=0
    )
    return jnp.sum(h * d) * x[0, 0]


LOSSES = {
    "bfloat16 between": make_cast_loss("bfloat16"),
    "float16 between": make_cast_loss("float16", "bfloat16"),
    "float8 between": make_cast_loss("float8_e4m3fn", "bfloat16"),
    "rounded mantissa": rounded_mantissa_loss,
    "tanh in bfloat16": bfloat16_tanh_loss,
    "two uses": two_uses_loss,
    "penalised": penalised_loss,
    "normalised": normalised_loss,
    "bfloat16": make_narrow_product_loss("bfloat16"),
    "float16": make_narrow_product_loss("float16"),
    "float8": make_narrow_product_loss("float8_e5m2"),
    "table": lookup_loss,
}


def make_other_examples() -> Any:
    """Small and equal examples, which all lose the same by rounding."""
    x = np.full((BATCH, 2, WIDTH), 0.03, np.float32)
    return x, np.full_like(x, 0.03), np.zeros(BATCH, np.float32)


def make_swapped_examples() -> Any:
    """Examples of all sizes, whose rows, uses and paths cancel or do not."""
    x, d, cancels = [], [], []
    for size in (1e-3, 1e4, 1e12):
        for sign in (0.0, -1.0 - 2.0**-20):
            for cancel in (0.0, 1.0, 1.0 + 2.0**-20):
                one = np.ones((2, WIDTH))
                x.append(one)
                d.append(size * np.array([[1.0], [sign]]) * one)
                cancels.append(cancel)
    return tuple(np.array(part, np.float32) for part in (x, d, cancels))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_swapped_example_moves_the_sum_within_sensitivity(engine):
    w = jnp.ones((WIDTH, WIDTH))
    fns = [dpjax.clipped_grad(f, CLIP_NORM, engine=engine) for f in LOSSES.values()]

    @jax.jit
    def sums_with_swaps(batch, swapped):
        # One program computes all sums of a loss: another program might round the other
        # examples' gradients in another way.
        def sum_with(case):
            one, present = case
            examples = jax.tree.map(lambda x, y: x.at[0].set(y), batch, one)
            mask = jnp.ones(BATCH, bool).at[0].set(present)
            return [fn(w, examples, mask=mask)[0] for fn in fns]

        ones = jax.tree.map(lambda x, y: jnp.concatenate([x[:2], y]), batch, swapped)
        return jax.lax.map(sum_with, (ones, jnp.arange(len(ones[0])) > 0))

    result = sums_with_swaps(
        jax.tree.map(jnp.asarray, make_other_examples()), make_swapped_examples()
    )
    for name, sums in zip(LOSSES, result, strict=True):
        without, total, *changed = np.float64(sums) / CLIP_NORM
        changed = np.stack(changed)
        added = np.linalg.norm(changed - without, axis=(1, 2))
        replaced = np.linalg.norm(changed - total, axis=(1, 2))
        # The rounding error in float32 of a sum of 4000 equal terms, in any order.
        rounded = BATCH * 2.0**-24 * np.linalg.norm(total)
        assert rounded < 0.15
        assert np.max(added) <= 1 + rounded, name
        assert np.max(replaced) <= 2 + rounded, name
