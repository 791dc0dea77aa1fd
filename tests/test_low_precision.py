"""All engines agree on narrow, wide and mixed dtypes, and on empty arrays.

The reference is plain `vmap(grad)` in NumPy's float64.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

pytestmark = pytest.mark.rounding

ENGINES = ("bookkeeping", "ghost", "vmap")
CLIP_NORM = 0.7


def normal(seed: int, *shape: int, dtype: Any = "float32") -> np.ndarray:
    """By NumPy, which compiles nothing."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    return drawn.astype(np.float32).astype(jnp.dtype(dtype))


def reference_clipped_sum(gradients: Any) -> tuple[list[np.ndarray], np.ndarray]:
    leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
    flat = np.concatenate([g.reshape(len(g), -1) for g in leaves], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    scale = np.minimum(1.0, CLIP_NORM / np.maximum(norms, 1e-300))
    return [np.tensordot(scale, g, (0, 0)) for g in leaves], norms


def assert_engines_match_reference(
    loss: Any, params: Any, batch: Any, *, rtol: float, **options: Any
) -> None:
    @jax.jit
    def sums_and_gradients(params, batch):
        result = [
            dpjax.clipped_grad(loss, CLIP_NORM, engine=e, **options)(params, batch)
            for e in ENGINES
        ]
        return result, jax.vmap(jax.grad(loss), (None, 0))(params, batch)

    result, plain = jax.device_get(sums_and_gradients(params, batch))
    sums, norms = reference_clipped_sum(plain)
    for total, per_example in result:
        np.testing.assert_allclose(per_example.norm, norms, rtol)
        for got, want, x in zip(
            jax.tree.leaves(total), sums, jax.tree.leaves(params), strict=True
        ):
            wide = np.float64 if x.dtype == np.float64 else np.float32
            assert got.dtype == wide
            np.testing.assert_allclose(got, want, rtol, rtol * len(norms) * CLIP_NORM)


def make_dense_loss(precise: Any, inside: Any) -> Any:
    def loss(params, x):
        rows = x.astype(inside) if inside else x
        w = params["w"].astype(inside) if inside else params["w"]
        contracted = (((1,), (0,)), ((), ()))
        y = jax.lax.dot_general(rows, w, contracted, preferred_element_type=precise)
        scale = params["s"].astype(y.dtype)
        return jnp.sum(jnp.sin(y * scale[None]).astype(jnp.float32))

    return loss


def rows_and_width(form: str) -> tuple[int, int]:
    return (4, 40) if form == "rows" else (4, 6)


@pytest.mark.diagonal("form")
@pytest.mark.parametrize("form", ["rows", "gradients"])
@pytest.mark.parametrize(
    ("leaf", "inside", "out"),
    [
        ("float8_e4m3fn", None, "float32"),
        ("float8_e5m2", None, "bfloat16"),
        ("float8_e4m3fn", None, None),
        ("float32", "float8_e4m3fn", "float32"),
        ("bfloat16", "float8_e5m2", "float32"),
        ("float16", "bfloat16", None),
        ("float16", None, "float32"),
    ],
)
def test_narrow_floats_match_reference(leaf, inside, out, form):
    rows, width = rows_and_width(form)
    params = {"w": normal(0, width, width, dtype=leaf), "s": normal(1, width) / 8}
    batch = normal(2, 5, rows, width, dtype=leaf)
    loss = make_dense_loss(out, inside)
    assert dpjax.explain(loss, params, batch).rows[1].norm == form
    narrowest = min(
        (jnp.finfo(d) for d in (leaf, inside, out) if d), key=lambda info: info.bits
    )
    # Engines differ in what autodiff rounds to the narrowest dtype.
    assert_engines_match_reference(loss, params, batch, rtol=4 * float(narrowest.eps))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "gradients"])
@pytest.mark.parametrize(
    ("leaf", "other"),
    [("float64", "float64"), ("float32", "float64"), ("float64", "float32")],
)
def test_float64_dense_layers_match_reference(leaf, other, form, x64):
    rows, width = rows_and_width(form)
    params = {"w": normal(0, width, width, dtype=leaf), "s": normal(1, width) / 8}
    batch = normal(2, 5, rows, width, dtype=other)
    assert_engines_match_reference(
        make_dense_loss("float64", None), params, batch, rtol=1e-4
    )
    assert_engines_match_reference(
        make_dense_loss("float32", None), params, batch, rtol=1e-4
    )


def make_convolution_loss(rank: int) -> Any:
    space = "DHW"[-rank:]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

    def loss(params, x):
        y = jax.lax.conv_general_dilated(
            x[None], params["w"], (1,) * rank, "SAME", dimension_numbers=numbers
        )
        return jnp.sum(jnp.sin(y))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("form", ["rows", "gradients"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_convolutions_under_x64_match_reference(rank, form, dtype, x64):
    size, features = (2, 24) if form == "rows" else (4, 3)
    w = normal(0, *(2,) * rank, features, features, dtype=dtype)
    batch = normal(1, 3, *(size,) * rank, features, dtype=dtype)
    assert (
        dpjax.explain(make_convolution_loss(rank), {"w": w}, batch).rows[0].norm == form
    )
    assert_engines_match_reference(
        make_convolution_loss(rank), {"w": w}, batch, rtol=1e-4
    )


@pytest.mark.matrix
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_recurrent_network_under_x64_matches_reference(microbatch_size, x64):
    def loss(params, ids):
        def step(h, x):
            h = jnp.tanh((x + h) @ params["u"])
            return h, jnp.sum(h)

        looked_up = params["table"][ids]
        return jnp.sum(jax.lax.scan(step, looked_up[0], looked_up)[1])

    params = {"table": normal(0, 50, 9), "u": normal(1, 9, 9)}
    ids = np.random.default_rng(2).integers(0, 50, (5, 4))
    assert_engines_match_reference(
        loss, params, ids, rtol=1e-4, microbatch_size=microbatch_size
    )


@pytest.mark.slow
def test_empty_arrays_match_reference():
    """An axis that is contracted, summed over or looked up may have size zero."""
    losses = {
        "dense": lambda w, x: jnp.sum(jnp.sin(x @ w)),
        "other side": lambda w, x: jnp.sum(jnp.sin(w @ x.T)),
        "scan": lambda w, x: jax.lax.scan(
            lambda h, row: (h + jnp.sum(row @ w), None), 0.0, x
        )[0],
        "table": lambda w, x: jnp.sum(
            jnp.take(w, jnp.arange(x.shape[0]) % max(w.shape[0], 1), 0, mode="clip")
        ),
    }
    sizes = [s for s in itertools.product((0, 3), repeat=3) if 0 in s]
    cases = [
        (part, *size)
        for (name, part), size in itertools.product(losses.items(), sizes)
        # NumPy refuses to look anything up in an empty table.
        if not (name == "table" and size[1] == 0 and size[0])
    ]
    params = {"b": normal(1, 4), "empty": normal(2, 0, 5)}
    for i, (part, _, left, right) in enumerate(cases):
        shape = (right, left) if part is losses["other side"] else (left, right)
        params[f"w{i}"] = normal(0, *shape)
    batch = [normal(3, 2, rows, left) for _, rows, left, _ in cases]

    def loss(params, xs):
        parts = [f(params[f"w{i}"], xs[i]) for i, (f, *_) in enumerate(cases)]
        return sum(parts) + jnp.sum(params["b"]) + jnp.sum(params["empty"])

    assert_engines_match_reference(loss, params, batch, rtol=1e-5)


def test_scans_without_iterations_match_reference():
    def loss(params, x):
        def step(h, row):
            return jnp.tanh(h @ params["w"] + row), None

        return jnp.sum(jax.lax.scan(step, params["h"], x)[0] @ params["w"])

    params = {"w": normal(0, 20, 20), "h": normal(1, 20)}
    assert_engines_match_reference(loss, params, normal(2, 3, 0, 20), rtol=1e-4)
