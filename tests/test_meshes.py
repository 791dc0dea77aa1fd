"""Every engine gives the same sums on a mesh as on one device, for all axis types.

The loss is written as JAX requires for explicit axes: plain `vmap(grad)`
runs it, which the reference shows.
"""

import contextlib
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import dpjax

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
CLIP_NORM = 0.5
MASK = np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
IDS = np.random.default_rng(9).integers(0, 10, (8, 5))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


PARAMS = {
    "table": normal(0, 10, 8),
    "up": normal(1, 8, 16),
    "bias": normal(2, 16),
    "down": normal(3, 16, 8),
    "gain": normal(4, 8),
    "layers": normal(5, 3, 8, 8),
}
TENSOR_PARALLEL = {
    "up": jax.P(None, "model"),
    "bias": jax.P("model"),
    "down": jax.P("model", None),
}


def loss(params: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
    mesh = jax.typeof(params["up"]).sharding.mesh
    explicit = mesh.explicit_axes
    whole = {"out_sharding": jax.NamedSharding(mesh, jax.P())} if explicit else {}
    x = params["table"].at[ids].get(**whole)
    x = jnp.tanh(x @ params["up"] + params["bias"][None])
    x = jnp.dot(x, params["down"], **whole) * params["gain"][None]
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jax.nn.log_softmax(x)[:, 0] ** 2), {"x": x[0], "id": ids[0]}


def reference_clipped_sum() -> tuple[Any, np.ndarray]:
    gradients = jax.jit(jax.vmap(jax.grad(loss, has_aux=True), (None, 0)))(PARAMS, IDS)
    wide = jax.tree.map(lambda g: np.asarray(g, np.float64), gradients[0])
    squares = [np.sum(g.reshape(8, -1) ** 2, 1) for g in jax.tree.leaves(wide)]
    norms = np.sqrt(sum(squares))
    weights = np.where(MASK, np.minimum(1, CLIP_NORM / norms), 0)
    return jax.tree.map(lambda g: np.tensordot(weights, g, 1), wide), norms


@pytest.fixture(scope="module")
def expected_sum():
    return reference_clipped_sum()


def assert_expected(grads: Any, per_example: dpjax.PerExample, expected: Any) -> None:
    sums, norms = expected
    # Norms are rounded up by up to 1e-4 (tests/test_rounding.py).
    np.testing.assert_allclose(per_example.norm, norms, rtol=1e-4)
    chex.assert_trees_all_close(grads, sums, rtol=1e-4, atol=8 * CLIP_NORM * 1e-5)
    np.testing.assert_array_equal(per_example.aux["id"], IDS[:, 0])


def place_on_mesh(mesh: Any, tensor_parallel: bool) -> tuple[Any, jax.Array]:
    specs = {k: jax.P() for k in PARAMS}
    if tensor_parallel:
        specs |= TENSOR_PARALLEL
    shardings = {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}
    ids = jax.device_put(IDS, jax.NamedSharding(mesh, jax.P("data")))
    return jax.device_put(PARAMS, shardings), ids


ALL_ENGINES = [
    ("bookkeeping", None),
    ("bookkeeping", 4),
    ("bookkeeping", 3),
    ("ghost", None),
    ("vmap", None),
    ("vmap", 4),
    ("vmap", 3),
]
SOME = [("bookkeeping", None), ("vmap", 4)]
CASES = [
    *(((EXPLICIT, EXPLICIT), True, *engine) for engine in ALL_ENGINES),
    *(((EXPLICIT, EXPLICIT), False, *engine) for engine in SOME),
    *(((EXPLICIT, AUTO), True, *engine) for engine in SOME),
    *(((AUTO, EXPLICIT), True, *engine) for engine in SOME),
    *(((AUTO, AUTO), True, *engine) for engine in SOME),
]
# `test_conformance` runs each engine on explicit axes, without tensor parallelism, and
# `test_clipping` on meshes without explicit axes.
DEFAULT = [((AUTO, EXPLICIT), True, "bookkeeping", None)]


@pytest.mark.parametrize(
    ("types", "tensor_parallel", "engine", "microbatch_size"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT else [pytest.mark.matrix])
        for case in CASES
    ],
)
def test_sums_on_axes_of_every_type_equal_one_device(
    types, tensor_parallel, engine, microbatch_size, expected_sum
):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    fn = dpjax.clipped_grad(
        loss,
        CLIP_NORM,
        has_aux=True,
        engine=engine,
        microbatch_size=microbatch_size,
    )
    with jax.set_mesh(mesh):
        params, ids = place_on_mesh(mesh, tensor_parallel)
        grads, per_example = jax.jit(fn)(params, ids, mask=MASK)
    assert_expected(grads, per_example, expected_sum)
    if microbatch_size is None:
        for got, param in zip(*map(jax.tree.leaves, (grads, params)), strict=True):
            assert got.sharding.is_equivalent_to(param.sharding, param.ndim)
        spread = jax.NamedSharding(mesh, jax.P("data"))
        assert per_example.norm.sharding.is_equivalent_to(spread, 1)


@pytest.mark.matrix
def test_sums_without_a_mesh_in_context_equal_one_device(expected_sum):
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    params, ids = place_on_mesh(mesh, tensor_parallel=True)
    fn = dpjax.clipped_grad(loss, CLIP_NORM, has_aux=True)
    assert_expected(*jax.jit(fn)(params, ids, mask=MASK), expected_sum)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "check_vma", "other"),
    [
        *(("bookkeeping", True, other) for other in (EXPLICIT, AUTO, None)),
        ("bookkeeping", False, EXPLICIT),
        ("ghost", True, EXPLICIT),
        ("ghost", False, None),
        ("vmap", True, EXPLICIT),
        ("vmap", False, AUTO),
    ],
)
def test_sums_inside_shard_map_equal_one_device(engine, check_vma, other, expected_sum):
    """Local sums in shard_map, with one axis or with another axis of any type."""
    size = 4 if engine == "ghost" else 3  # microbatches divide the local batch, or not
    shape, names = ((4,), ("data",)) if other is None else ((2, 2), ("data", "model"))
    types = (EXPLICIT, other or EXPLICIT)[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=types)
    fn = dpjax.clipped_grad(
        loss, CLIP_NORM, has_aux=True, engine=engine, microbatch_size=size
    )

    def local_sum(params, ids, mask):
        grads, per_example = fn(params, ids, mask=mask)
        return jax.lax.psum(grads, "data"), per_example

    with jax.set_mesh(mesh) if other else contextlib.nullcontext():
        summed = jax.shard_map(
            local_sum,
            mesh=mesh if other is None else None,
            in_specs=(jax.P(), jax.P("data"), jax.P("data")),
            out_specs=(jax.P(), jax.P("data")),
            axis_names={"data"},
            check_vma=check_vma,
        )
        params, ids = place_on_mesh(mesh, tensor_parallel=other is EXPLICIT)
        mask = jax.device_put(MASK, ids.sharding)
        out = jax.jit(summed)(params, ids, mask)
    assert_expected(*out, expected_sum)


COLLECTIVE = re.compile(
    r"= (\S+|\([^)]*\)) (all-reduce|all-gather|all-to-all|collective-permute"
    r"|reduce-scatter)(?:-start)?\("
)
ROWS = {"4", "4,1,5", "4,1,5,5"}  # f[b], f[b, t] and f[b, t, t] of one device


def all_reduced_shapes(fn: Any, *args: Any) -> list[set[str]]:
    """The shapes in each all-reduce of the compiled program, its only collectives.

    So devices exchange neither whole weights nor per-example gradients.
    """
    text = jax.jit(fn).lower(*args).compile().as_text()
    result = COLLECTIVE.findall(text)
    assert {name for _, name in result} <= {"all-reduce"}
    return [set(re.findall(r"\w+\[([\d,]*)\]", types)) for types, _ in result]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_norms_of_sharded_weights_need_few_all_reduces(kind):
    """Norms of gradients take one all-reduce for all leaves; those by rows take three.

    By rows: one for the largest entries of rows, one for squared norms and inner
    products, and one for numbers of each example. In addition there are those of
    `vmap(grad)`, and one for the batch's sum.
    """
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    def loss_without_aux(params, ids):
        return loss(params, ids)[0]

    with jax.set_mesh(mesh):
        args = place_on_mesh(mesh, tensor_parallel=True)
        plain = all_reduced_shapes(
            jax.vmap(jax.grad(loss_without_aux), (None, 0)), *args
        )
        for engine, norms in (("vmap", 1), ("bookkeeping", 3)):
            fn = dpjax.clipped_grad(loss_without_aux, CLIP_NORM, engine=engine)
            result = all_reduced_shapes(fn, *args)
            assert len([shapes for shapes in result if shapes & ROWS]) == norms
            assert len(result) <= len(plain) + norms + 1
