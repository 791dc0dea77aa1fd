"""One example among thousands moves the sum by no more than its sensitivity.

Its terms may be huge and cancel, between rows, between uses of a weight, or on the way
from operands to leaves; the other examples are small, so that what they lose shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

pytestmark = [pytest.mark.rounding, pytest.mark.optimized]

BATCH, WIDTH, CLIP_NORM = 4000, 24, 0.7


def through(*dtypes: str) -> Any:
    """Twice the matrix, cast to and fro."""

    def loss(w, example):
        x, d, _ = example
        for dtype in dtypes:
            w = w.astype(dtype)
        return jnp.sum((x @ (2 * w.astype(jnp.float32))) * d)

    return loss


def rounded_mantissa(w, example):
    x, d, _ = example
    return jnp.sum((x @ (2 * jax.lax.reduce_precision(w, 8, 7))) * d)


def low_tanh(w, example):
    x, d, _ = example
    return jnp.sum((x @ jnp.tanh(w.astype(jnp.bfloat16)).astype(jnp.float32)) * d)


def two_uses(w, example):
    x, d, cancel = example
    return jnp.sum((x @ w) * d) - cancel * jnp.sum((d @ w.T) * x)


def penalised(w, example):
    """The penalty's gradient is the matrix of ones that the rows may make, too."""
    x, d, cancel = example
    return jnp.sum((x @ w) * d) - cancel * x[0, 0] * d[0, 0] * jnp.sum(w**2) / 2


def normalised(w, example):
    x, d, _ = example
    scale = jax.lax.rsqrt(jnp.sum(w**2, axis=0, keepdims=True))
    return jnp.sum((x @ (w * scale)) * d)


def narrow(dtype: str) -> Any:
    def loss(w, example):
        x, d, _ = example
        h = jnp.dot(
            x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32
        )
        return jnp.sum(h * d)

    return loss


def table(w, example):
    x, d, cancel = example
    h = jnp.take(w, jnp.array([1, 5]), axis=0) - cancel * jnp.take(
        w, jnp.array([5, 1]), axis=0
    )
    return jnp.sum(h * d) * x[0, 0]


LOSSES = {
    "bfloat16 between": through("bfloat16"),
    "float16 between": through("float16", "bfloat16"),
    "float8 between": through("float8_e4m3fn", "bfloat16"),
    "rounded mantissa": rounded_mantissa,
    "tanh in bfloat16": low_tanh,
    "two uses": two_uses,
    "penalised": penalised,
    "normalised": normalised,
    "bfloat16": narrow("bfloat16"),
    "float16": narrow("float16"),
    "float8": narrow("float8_e5m2"),
    "table": table,
}


def others() -> Any:
    """Small and alike: each loses what all lose."""
    x = np.full((BATCH, 2, WIDTH), 0.03, np.float32)
    return x, np.full_like(x, 0.03), np.zeros(BATCH, np.float32)


def intruders() -> Any:
    """Of every size, with rows, uses and paths that cancel or do not."""
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
def test_swaps(engine):
    w = jnp.ones((WIDTH, WIDTH))
    fns = [dpjax.clipped_grad(f, CLIP_NORM, engine=engine) for f in LOSSES.values()]

    @jax.jit
    def sums(batch, swapped):
        def swap(one):
            return jax.tree.map(lambda x, y: x.at[0].set(y), batch, one)

        mask = jnp.arange(BATCH) > 0
        return [
            (
                fn(w, batch, mask=mask)[0],
                fn(w, batch)[0],
                jax.lax.map(lambda one: fn(w, swap(one))[0], swapped),
            )
            for fn in fns
        ]

    found = sums(jax.tree.map(jnp.asarray, others()), intruders())
    for name, parts in zip(LOSSES, found, strict=True):
        without, total, changed = (np.float64(x) / CLIP_NORM for x in parts)
        added = np.linalg.norm(changed - without, axis=(1, 2))
        replaced = np.linalg.norm(changed - total, axis=(1, 2))
        # What float32 makes of sums of 4000 terms alike, in whatever order.
        rounded = BATCH * 2.0**-24 * np.linalg.norm(total)
        assert rounded < 0.15
        assert np.max(added) <= 1 + rounded, name
        assert np.max(replaced) <= 2 + rounded, name
