"""Table lookups by indices of every integer dtype, in and out of bounds.

The reference uses Python's integers: a clipped index reads the nearest row; other
indices read no row if they are out of bounds.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

ROWS, CLIP_NORM = 300, 0.7
ROW = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
SIGNS = np.array([[1.0], [-0.5]], np.float32)


def make_gather_loss(mode: str) -> Any:
    def loss(table, ids):
        # Indexing would cast the indices first.
        looked_up = jax.lax.gather(table, ids[:, None], ROW, (1, 3), mode=mode)
        return jnp.sum(jnp.where(jnp.isnan(looked_up), 0.0, looked_up) * SIGNS)

    return loss


def slice_loss(table, ids):
    starts = [(i, jnp.zeros_like(i)) for i in ids]
    first, second = (
        jax.lax.dynamic_slice(table, at, (1, 3), allow_negative_indices=False)
        for at in starts
    )
    return jnp.sum(jnp.concatenate([first, second]) * SIGNS)


def index_loss(table, ids):
    first, second = (jax.lax.dynamic_index_in_dim(table, i, 0) for i in ids)
    return jnp.sum(jnp.concatenate([first, second]) * SIGNS)


def clip_index(i: int) -> int:
    return min(max(i, 0), ROWS - 1)


def wrap_negative_index(i: np.integer) -> int:
    with np.errstate(over="ignore"):
        return clip_index(int(i + np.array(ROWS).astype(i.dtype)) if i < 0 else int(i))


LOSSES = {
    make_gather_loss("clip"): clip_index,
    make_gather_loss("fill"): int,
    make_gather_loss("promise_in_bounds"): int,
    slice_loss: clip_index,
    index_loss: wrap_negative_index,
}


def index_pairs(dtype: Any) -> np.ndarray:
    """Pairs of indices in, at and beyond the bounds of a table and of the dtype."""
    info = np.iinfo(dtype)
    expected = [0, 1, ROWS - 1, ROWS, -1, -ROWS, -ROWS - 1, info.max, info.min]
    expected += [2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**32, 2**32 + 3, -(2**31) - 1]
    ids = sorted({i for i in expected if info.min <= i <= info.max})
    return np.array(list(itertools.product(ids, ids)), dtype)


def reference_clipped_gradients(
    pairs: np.ndarray, row_of: Any
) -> tuple[np.ndarray, np.ndarray]:
    tables = np.zeros((len(pairs), ROWS, 3))
    for table, pair in zip(tables, pairs, strict=True):
        for i, sign in zip(pair, SIGNS, strict=True):
            if 0 <= row_of(i) < ROWS:
                table[row_of(i)] += sign
    norms = np.linalg.norm(tables, axis=(1, 2))
    scale = np.minimum(1, CLIP_NORM / np.maximum(norms, 1e-9))
    return tables * scale[:, None, None], norms


def assert_engines_match_reference(dtype: Any, engines: Any) -> None:
    """Compare the clipped gradient of every single pair, by all engines."""
    pairs = index_pairs(dtype)
    table = np.ones((ROWS, 3), np.float32)
    cases = list(itertools.product(LOSSES.items(), engines))
    fns = [dpjax.clipped_grad(f, CLIP_NORM, engine=e) for (f, _), e in cases]

    @jax.jit
    def sums_of_single_pairs(pairs):
        return jax.lax.map(lambda pair: [fn(table, pair[None]) for fn in fns], pairs)

    result = jax.device_get(sums_of_single_pairs(pairs))
    for ((loss, row_of), engine), (total, per_example) in zip(
        cases, result, strict=True
    ):
        assert dpjax.explain(loss, table, pairs).rows[0].norm == "rows"
        expected, norms = reference_clipped_gradients(pairs, row_of)
        case = f"{loss.__name__} {engine} {dtype}"
        np.testing.assert_allclose(per_example.norm[:, 0], norms, 1e-4, err_msg=case)
        np.testing.assert_allclose(total, expected, 1e-4, 1e-6, err_msg=case)
        assert np.all(np.linalg.norm(np.float64(total), axis=(1, 2)) <= CLIP_NORM)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32"])
def test_out_of_bounds_indices_match_reference(dtype):
    assert_engines_match_reference(dtype, ("bookkeeping", "ghost", "vmap"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_64_bit_indices_match_reference(dtype, x64):
    assert_engines_match_reference(dtype, ("bookkeeping", "ghost", "vmap"))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_index_dtypes_narrower_than_the_table_match_reference(dtype):
    """Not by vmap, where XLA's result differs from program to program."""
    assert_engines_match_reference(dtype, ("bookkeeping", "ghost"))


def lookup_loss(table: Any, ids: Any) -> jax.Array:
    return jnp.sum(jnp.sin(table[ids]))


def tied_lookup_loss(table: Any, ids: Any) -> jax.Array:
    """A table looked up at many indices, and multiplied by in the last layer."""
    x = table[ids]
    return (
        lookup_loss(table, ids) - jax.nn.log_softmax(jnp.mean(x, 0) @ table.T)[ids[-1]]
    )


@pytest.mark.diagonal("engine")
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("loss", [lookup_loss, tied_lookup_loss])
@pytest.mark.parametrize("most", [3, 3000])
def test_long_inputs_match_reference(loss, engine, most):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(3000, 8)).astype(np.float32)
    ids = rng.integers(0, most, (3, 400))
    assert dpjax.explain(loss, table, ids).rows[0].norm == "rows"

    @jax.jit
    def clipped_and_plain_gradients(table, ids):
        plain = jax.vmap(jax.grad(loss), (None, 0))(table, ids)
        return dpjax.clipped_grad(loss, 0.7, engine=engine)(table, ids), plain

    (total, per_example), plain = jax.device_get(
        clipped_and_plain_gradients(table, ids)
    )
    formed = np.float64(plain)
    norms = np.linalg.norm(formed, axis=(1, 2))
    assert np.all(norms * (1 - 1e-6) <= per_example.norm)
    # 400 / most terms share a row: their roundings, and those of 16 other operations.
    rtol = 2.0**-23 * (400 / most + 30)
    np.testing.assert_allclose(per_example.norm, norms, rtol * 20)
    expected = np.tensordot(np.minimum(1, 0.7 / norms), formed, (0, 0))
    np.testing.assert_allclose(total, expected, 1e-3, 1e-4)


@pytest.mark.matrix
def test_memory_is_linear_in_the_input_length():
    length, width = 4096, 16
    table = np.zeros((32768, width), np.float32)
    ids = np.zeros((2, length), np.int32)
    assert dpjax.explain(lookup_loss, table, ids).rows[0].norm == "rows"
    for engine in ("bookkeeping", "ghost"):
        fn = jax.jit(dpjax.clipped_grad(lookup_loss, 1.0, engine=engine))
        memory = fn.lower(table, ids).compile().memory_analysis()
        # A few times the rows; pairs of them would be 256 times as many.
        assert memory.temp_size_in_bytes < 8 * 2 * length * width * 4
