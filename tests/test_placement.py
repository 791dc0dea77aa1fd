"""Noise and states on meshes: equal values, independent shards, and shardings.

Shards are compared by correlations: that of n normals has standard deviation
1 / sqrt(n), and exceeds z = 6 with chance 2e-9.
"""

import contextlib
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import dpjax
from dpjax import strategies
from dpjax.noise._optimizers import cast_updates_to_float32

COMMON = {"clip_norm": 2.0, "noise_multiplier": 0.7, "expected_batch_size": 3.0}


def root_key():
    """`jax.random.key(17)`, without compiling programs for it."""
    return jax.random.wrap_key_data(np.array([0, 17], np.uint32))


def make_tree_momentum(**options):
    return dpjax.tree_momentum(0.9, 1.3, num_steps=6, key=root_key(), **options)


MAKE = {
    "noise": lambda: dpjax.add_gaussian_noise(1.3, key=root_key()),
    "discrete": lambda: dpjax.add_discrete_gaussian_noise(1.3, key=root_key()),
    "stored": lambda: make_tree_momentum(buffer="stored"),
    "regenerate": lambda: make_tree_momentum(buffer="regenerate"),
    "dp_sgd": lambda: dpjax.dp_sgd(0.1, momentum=0.9, key=root_key(), **COMMON),
    "dp_adam": lambda: dpjax.dp_adam(0.1, key=root_key(), **COMMON),
    "dp_adamw": lambda: dpjax.dp_adamw(0.1, key=root_key(), **COMMON),
    "dp_nsgd": lambda: dpjax.dp_nsgd(
        0.1, decay=0.9, num_steps=6, key=root_key(), **COMMON
    ),
}
DRAWING = ["noise", "discrete", "stored", "regenerate"]


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("rows", "columns"), (kind, kind))


def make_parameters():
    return {
        "cut": np.linspace(-1, 1, 32).reshape(8, 4).astype(np.float32),
        "half": np.linspace(0, 1, 12).reshape(4, 3).astype(jnp.bfloat16),
        "whole": np.linspace(1, 2, 5).astype(np.float32),
    }


SPECS = {"cut": jax.P("rows", "columns"), "half": jax.P("columns"), "whole": jax.P()}


def shard_params(params, mesh):
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.device_put(params, shardings)


def train(make, params, compiled):
    tx, out = make(), []
    init, update = (
        (jax.jit(f) for f in (tx.init, tx.update)) if compiled else (tx.init, tx.update)
    )
    state = init(params)
    # In float32, as clipped sums are: XLA rounds bfloat16 differently on meshes.
    total = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    for _ in range(2):
        updates, state = update(total, state, params)
        out.append(updates)
    return out, state


@functools.cache
def single_device_updates(name):
    return train(MAKE[name], make_parameters(), True)[0]


def assert_updates_close(out, expected):
    # A few roundings, in any order that the compiler chooses.
    chex.assert_trees_all_close(out, expected, rtol=32 * 2.0**-23, atol=32 * 2.0**-23)


# Auto meshes are the easier case, and `test_conformance` has them.
@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_updates_on_a_mesh_equal_one_device(name):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        out, _ = train(MAKE[name], shard_params(make_parameters(), mesh), True)
    assert_updates_close(out, single_device_updates(name))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("inside", [True, False])
def test_eager_updates_are_sharded_like_the_parameters(kind, inside):
    mesh = mesh_of(kind)
    for name in DRAWING:
        with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
            params = shard_params(make_parameters(), mesh)
            out, _ = train(MAKE[name], params, False)
        assert_updates_close(out, single_device_updates(name))
        for x, p in zip(jax.tree.leaves(out[1]), jax.tree.leaves(params), strict=True):
            assert x.sharding.is_equivalent_to(p.sharding, p.ndim)


def assert_sharded_like(state, params, mesh):
    for tree in (state.momentum, state.noise.memory):
        for leaf, spec in SPECS.items():
            x = tree[leaf]
            spec = spec if tree is state.momentum else jax.P(None, *spec)
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


PLACES = ("eager", "shapes", "mesh set", "jit, mesh set")


@pytest.mark.diagonal("how")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        # Explicit axes under jit are not among them: JAX itself requires jax.set_mesh.
        (AxisType.Auto, "jit"),
        *itertools.product((AxisType.Auto, AxisType.Explicit), PLACES),
    ],
)
def test_state_is_sharded_like_the_parameters(kind, how):
    mesh, tx = mesh_of(kind), make_tree_momentum()
    params = shard_params(make_parameters(), mesh)
    if how == "shapes":
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding),
            params,
        )
    init = jax.jit(tx.init) if "jit" in how else tx.init
    if "set" in how:
        with jax.set_mesh(mesh):
            state = init(params)
    else:
        state = init(params)
    assert_sharded_like(state, params, mesh)
    assert all(not np.any(np.asarray(x)) for x in jax.tree.leaves(state.noise.memory))


CORRELATED = {
    "none": strategies.independent(),
    "one": strategies.geometric(0.5),
    "three": strategies.banded_inverse([1.0, -0.3, -0.2, -0.1]),
    "tree": strategies.tree(0.9),
}
WITH_STATE = {
    **{name: MAKE[name] for name in MAKE if name != "regenerate"},
    **{
        f"correlated, {name}": lambda strategy=strategy: dpjax.correlated_noise(
            strategy, 1.3, num_steps=6, key=root_key()
        )
        for name, strategy in CORRELATED.items()
    },
    "inner": lambda: cast_updates_to_float32(optax.adam(0.1)),  # of a plan
}
# Whole, fully divided, by tensor parallelism, and mixed.
PLACED = {
    "fully": jax.P(("rows", "columns")),
    "both": jax.P("rows", "columns"),
    "tensor": jax.P(None, "columns"),
    "half": jax.P("rows"),
    "whole": jax.P(),
}
TYPES = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.parametrize("types", TYPES)
def test_every_state_is_created_sharded(types, compiled):
    """Under jit by the program's outputs: no array is created whole, then divided."""
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), TYPES[types])
    params = {
        name: jax.device_put(
            np.ones((4, 8), jnp.bfloat16 if name == "half" else np.float32),
            NamedSharding(mesh, spec),
        )
        for name, spec in PLACED.items()
    }

    def init(params):
        return {name: make().init(params) for name, make in WITH_STATE.items()}

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init, params)
        if compiled:
            program = jax.jit(init).lower(params).compile()
            shardings = program.output_shardings
            assert not re.search(
                r" (all-|collective-|reduce-scatter)", program.as_text()
            )
        else:
            shardings = jax.tree.map(lambda x: x.sharding, init(params))
    result = jax.tree_util.tree_flatten_with_path(shapes)[0]
    count = 0
    for (path, x), sharding in zip(result, jax.tree.leaves(shardings), strict=True):
        if x.ndim >= 2:
            spec = jax.P(*[None] * (x.ndim - 2), *PLACED[path[-1].key])
            expected = NamedSharding(mesh, spec)
            assert sharding.is_equivalent_to(expected, x.ndim), path
            count += 1
    assert count == len(PLACED) * 14


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_clipped_sums_on_a_mesh_equal_one_device(kind):
    mesh, tx = mesh_of(kind), dpjax.clip_and_sum(0.7)
    gradients = np.random.default_rng(17).normal(size=(8, 6)).astype(np.float32)
    expected, _ = jax.jit(tx.update)(gradients, tx.init(None))
    for spec in (
        jax.P("rows", "columns"),
        jax.P(("rows", "columns")),
        jax.P(None, "rows"),
    ):
        cut = jax.device_put(gradients, NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            out, _ = jax.jit(tx.update)(cut, tx.init(None))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def run_inside_shard_map(name, check_vma=True, steps=3):
    """Noise of some steps inside shard_map, of a sharded leaf and a replicated one."""
    mesh = jax.make_mesh((4,), ("pieces",), (AxisType.Auto,))
    specs = {"cut": jax.P("pieces"), "whole": jax.P()}
    tx = MAKE[name]()

    def body(params):
        def step(state, _):
            updates, state = tx.update(params, state)
            return state, updates

        state, out = jax.lax.scan(step, tx.init(params), length=steps)
        return state, out

    params = {
        "cut": np.zeros(4 * 2000, np.float32),
        "whole": np.zeros(2000, np.float32),
    }
    stacked = {k: jax.P(None, *spec) for k, spec in specs.items()}
    state = jax.eval_shape(tx.init, params)
    state_specs = jax.tree.map(lambda _: jax.P(), state)
    if name not in ("noise", "discrete"):
        state_specs = state_specs._replace(
            momentum=specs,
            noise=state_specs.noise._replace(
                memory=stacked if name == "stored" else ()
            ),
        )
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(state_specs, stacked),
        check_vma=check_vma,
    )
    return jax.jit(run)(params)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", DRAWING)
def test_shard_map_noise_differs_on_shards_and_agrees_on_replicas(name):
    # The out_specs of "whole" already require equal copies; this compares them.
    state, out = run_inside_shard_map(name)
    assert jax.tree.structure(state) == jax.tree.structure(
        jax.eval_shape(lambda out: MAKE[name]().init(out), out)
    )
    shards = [np.asarray(s.data) for s in out["whole"].addressable_shards]
    assert len(shards) == 4
    assert all(np.array_equal(s, shards[0]) for s in shards)
    cut, whole = np.asarray(out["cut"]), np.asarray(out["whole"])
    for step in range(3):
        all_of_them = np.stack([*cut[step].reshape(4, 2000), whole[step]])
        correlations = np.corrcoef(all_of_them)[np.triu_indices(5, 1)]
        assert np.max(np.abs(correlations)) < 6 / np.sqrt(2000)


@pytest.mark.matrix
def test_buffered_and_recomputed_noise_agree_inside_shard_map():
    stored, regenerated = (
        run_inside_shard_map(name)[1] for name in ("stored", "regenerate")
    )
    np.testing.assert_allclose(stored["cut"], regenerated["cut"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DRAWING)
def test_noise_without_check_vma_raises(name):
    with pytest.raises(ValueError, match="^check_vma must be True"):
        run_inside_shard_map(name, check_vma=False)
    tx = MAKE[name]()
    with pytest.raises(ValueError, match="^check_vma must be True"):
        jax.pmap(lambda u: tx.update(u, tx.init(u))[0])(np.zeros((4, 3), np.float32))


@pytest.mark.matrix  # the test of shard_map has one axis
def test_shards_of_two_axes_get_independent_noise():
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Explicit))
    tx = dpjax.add_gaussian_noise(1.0, key=root_key())

    def body(u):
        return tx.update(u, tx.init(u))[0]

    for names in ({"a", "b"}, {"a"}):
        spec = jax.P("a", "b") if len(names) == 2 else jax.P("a")
        run = jax.shard_map(
            body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names
        )
        zeros = np.zeros((2, 4000), np.float32)
        zeros = jax.device_put(zeros, NamedSharding(mesh, jax.P("a", "b")))
        with jax.set_mesh(mesh):
            out = np.asarray(jax.jit(run)(zeros)).reshape(4, 2000)
        correlations = np.corrcoef(out)[np.triu_indices(4, 1)]
        assert np.max(np.abs(correlations)) < 6 / np.sqrt(2000)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", DRAWING)
def test_devices_draw_their_own_shards_without_communication(name):
    """The compiled program has no collectives, and its values equal one device's.

    Discrete noise exchanges single numbers: whether any draw of the array is a tie, and
    then the tie's place.
    """
    size, values = 4096, {}
    for count in (1, 4):
        mesh = jax.make_mesh(
            (count,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:count]
        )
        zeros = np.zeros(size, np.float32)
        zeros = jax.device_put(zeros, NamedSharding(mesh, jax.P("rows")))
        tx = MAKE[name]()
        state = jax.jit(tx.init)(zeros)
        program = jax.jit(tx.update).lower(zeros, state).compile()
        values[count], _ = program(zeros, state)
        text = program.as_text()
        drawn = [int(n) for n in re.findall(r"[uf]32\[(\d+)\]", text)]
        # The table of discrete noise has 2¹⁴ columns, and every device holds it.
        assert max(n for n in drawn if n != 2**14) == size // count
        result = re.findall(r"= (\S+) (?:all-|collective-|reduce-scatter)", text)
        # A number, or one number of each device.
        assert all(re.match(rf"\w+\[{count}?\]", kind) for kind in result)
        assert not result or name == "discrete"
    np.testing.assert_array_equal(values[4], values[1])
