"""Tables looked up by indices of every integer dtype, wherever these point.

The reference is plain `vmap(grad)`, whose transposed equation says what an index that
is out of bounds adds to.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

ENGINES = ("auto", "bookkeeping", "ghost", "vmap")
MODES = ("clip", "fill", "promise_in_bounds")
SIGNS = np.array([[1.0], [-0.5]], np.float32)


def take(mode: str) -> Any:
    def loss(table, ids):
        looked_up = table.at[ids].get(mode=mode, wrap_negative_indices=False)
        return jnp.sum(jnp.where(jnp.isnan(looked_up), 0.0, looked_up) * SIGNS)

    return loss


def one_slice(table, ids):
    first, second = (
        jax.lax.dynamic_slice(
            table,
            (i, jnp.zeros_like(i)),
            (1, table.shape[1]),
            allow_negative_indices=False,
        )
        for i in ids
    )
    return jnp.sum(jnp.concatenate([first, second]) * SIGNS)


def one_index(table, ids):
    first, second = (jax.lax.dynamic_index_in_dim(table, i, 0) for i in ids)
    return jnp.sum(jnp.concatenate([first, second]) * SIGNS)


LOSSES = [*map(take, MODES), one_slice, one_index]


def pairs_of(dtype: Any, rows: int) -> np.ndarray:
    """Pairs of indices in, at and beyond the bounds of a table and of the dtype."""
    info = np.iinfo(dtype)
    wanted = [0, 1, rows - 1, rows, -1, -rows, -rows - 1, info.max, info.min]
    wanted += [2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**32, 2**32 + 3, -(2**31) - 1]
    ids = sorted({i for i in wanted if info.min <= i <= info.max})
    return np.array(list(itertools.product(ids, ids)), dtype)


def check(dtype: Any, rows: int) -> None:
    """Every pair's clipped gradient on its own, by all engines."""
    pairs = jnp.asarray(pairs_of(dtype, rows))
    table = jnp.ones((rows, 3), jnp.float32)
    clip_norm = 0.7

    @jax.jit
    def everything(pairs):
        out = []
        for loss in LOSSES:
            formed = jax.vmap(jax.grad(loss), (None, 0))(table, pairs)
            sums = []
            for engine in ENGINES[1:]:
                fn = dpjax.clipped_grad(loss, clip_norm, engine=engine)
                one = lambda pair: fn(table, pair[None])
                (total, per_example) = jax.lax.map(one, pairs)
                sums.append((total, per_example.norm[:, 0]))
            out.append((formed, sums))
        return out

    for loss, (formed, sums) in zip(LOSSES, everything(pairs), strict=True):
        formed = np.asarray(formed, np.float64)
        norms = np.linalg.norm(formed, axis=(1, 2))
        scale = np.minimum(1.0, clip_norm / np.maximum(norms, 1e-9))
        expected = formed * scale[:, None, None]
        for engine, (total, norm) in zip(ENGINES[1:], sums, strict=True):
            said = f"{loss.__name__} {engine} {np.dtype(dtype)}"
            np.testing.assert_allclose(norm, norms, rtol=1e-4, err_msg=said)
            np.testing.assert_allclose(
                total, expected, rtol=1e-4, atol=1e-6, err_msg=said
            )
            assert np.all(np.linalg.norm(np.float64(total), axis=(1, 2)) <= clip_norm)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"]
)
def test_indices_that_are_out_of_bounds(dtype):
    check(dtype, 300)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_indices_of_64_bits(dtype, x64):
    check(dtype, 300)
