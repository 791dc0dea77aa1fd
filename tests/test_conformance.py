"""What every transformation, engine, sampler and solver promises, held to all of them.

The tables are in `conformance`. Each test is a class of bugs that this library or a
peer has shipped.
"""

import contextlib
import functools
import inspect
import itertools

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import ELSEWHERE, ENGINES, SAMPLERS, SOLVERS, TRANSFORMATIONS

import dpjax
from dpjax import auditing, clipped_grad, sampling, solvers

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
HALVES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def functions_of(module):
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and (module is dpjax or value.__module__.startswith(module.__name__))
    }


def names(table):
    return {name.split(",")[0] for name in table}


def test_every_public_function_is_in_a_table():
    assert functions_of(dpjax) == names(TRANSFORMATIONS) | ELSEWHERE["dpjax"]
    assert functions_of(sampling) == names(SAMPLERS) | ELSEWHERE["dpjax.sampling"]
    assert functions_of(auditing) == ELSEWHERE["dpjax.auditing"]
    public = {n for n, f in vars(solvers).items() if inspect.isfunction(f)}
    assert public == names(SOLVERS) | ELSEWHERE["dpjax.solvers"]


# --- transformations


def gradients(dtype="float32"):
    """Made by NumPy, which compiles nothing."""
    dtype = jnp.dtype(dtype)
    return {
        "b": np.linspace(-1, 1, 4).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "w": np.linspace(0.5, -2, 32).reshape(8, 4).astype(dtype),
        "w2": np.linspace(0.5, -2, 32).reshape(8, 4).astype(dtype),
    }


def steps_of(tx, grads, *, scales=(1.0, -0.3, 2.0), jitted=True):
    """The updates of a step for each scale from one start, the state donated."""
    update = jax.jit(tx.update, donate_argnums=1) if jitted else tx.update
    params = jax.tree.map(lambda x: jnp.asarray(x * 0), grads)
    state, out = tx.init(params), []
    for scale in scales:
        sums = jax.tree.map(lambda x: jnp.asarray(x * x.dtype.type(scale)), grads)
        updates, state = update(sums, state, params)
        out.append(jax.device_get(updates))
    return out


def close(one, other, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol
        ),
        one,
        other,
    )


@pytest.fixture(scope="module", params=TRANSFORMATIONS)
def transformation(request):
    """One of them, and what it does in the plainest setting."""
    make = TRANSFORMATIONS[request.param]
    tx = make(jax.random.key(3))
    return request.param, make, steps_of(tx, gradients(), jitted=False)


def mesh_of(kind):
    return jax.make_mesh((4,), ("x",), axis_types=(kind,))


@contextlib.contextmanager
def setting(name):
    """A configuration that a caller may have."""
    if name == "x64":
        with jax.enable_x64(True):
            yield
    elif name == "strict":
        with jax.numpy_dtype_promotion("strict"):
            yield
    else:
        kind = getattr(jax.sharding.AxisType, name.capitalize())
        with jax.set_mesh(mesh_of(kind)):
            yield


@pytest.mark.parametrize("name", ["x64", "strict", "explicit", "auto"])
def test_updates_are_the_same_in_every_configuration(transformation, name):
    which, make, expected = transformation
    if name == "strict" and which in ("dp_adam", "dp_adamw"):
        # The day optax's own Adam takes strict promotion ours is to take it too.
        with pytest.raises(jax.dtypes.TypePromotionError), setting(name):
            steps_of(optax.adam(0.1), gradients())
        return
    with setting(name):
        grads = gradients()
        if name in ("explicit", "auto"):
            rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P("x"))
            grads = grads | {k: jax.device_put(grads[k], rows) for k in ("b", "w")}
        tx = make(jax.random.key(3))
        close(steps_of(tx, grads), expected)
        close(steps_of(tx, grads), expected)  # donation took nothing that is reused


def test_shards_of_a_manual_mesh_have_noise_of_their_own(transformation):
    _, make, _ = transformation
    mesh, rows = mesh_of(jax.sharding.AxisType.Auto), jax.P("x")

    def noisy(grads):
        tx = make(jax.random.key(3))
        return tx.update(grads, tx.init(grads), grads)[0]

    grads = jnp.zeros((16, 16))
    over = {"mesh": mesh, "in_specs": rows, "out_specs": rows}
    shards = np.sign(jax.jit(jax.shard_map(noisy, **over))(grads)).reshape(4, -1)
    for one, other in itertools.combinations(shards, 2):
        # 64 fair signs: outside 12..52 with probability 2e-7, on each of six pairs.
        assert 12 <= np.sum(one == other) <= 52
    with pytest.raises(ValueError, match="check_vma"):
        jax.jit(jax.shard_map(noisy, **over, check_vma=False))(grads)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_leaves_and_steps_have_noise_of_their_own(transformation, impl):
    name, make, _ = transformation
    tx = make(jax.random.key(3, impl=impl))
    zeros = {k: jnp.zeros((8, 8)) for k in ("a", "b")}
    if name == "dp_nsgd":  # steps of fixed length: signs carry the noise
        zeros["b"] = zeros["b"] + 1e-3
    steps = steps_of(tx, zeros)
    signs = [np.sign(s[k]).ravel() for s in steps[:1] for k in zeros]
    signs.append(np.sign(steps[1]["a"] - 0.5 * steps[0]["a"]).ravel())
    for one, other in itertools.combinations(signs, 2):
        assert 10 <= np.sum(one == other) <= 54  # fair signs: outside at 2e-8


@pytest.mark.parametrize("dtype", HALVES)
def test_noise_is_added_before_a_cast(transformation, dtype):
    name, make, _ = transformation
    low = gradients(dtype)
    first = {"scales": (1.0,), "jitted": False}
    (got,) = steps_of(make(jax.random.key(3)), low, **first)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    (expected,) = steps_of(make(jax.random.key(3)), wide, **first)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(np.asarray(g, np.float32)).all()
        if name.startswith(("add_gaussian_noise", "tree_momentum")):
            assert g.dtype == dtype
            np.testing.assert_array_equal(g, e.astype(g.dtype))


# --- engines


C = 0.37
VOCABULARY, WIDTH = 300, 4


def looked_up(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def multiplied(table, ids):
    """On explicit axes JAX's own gradients refuse a gather."""
    return jax.nn.one_hot(ids, VOCABULARY, dtype=table.dtype) @ table


def network(params, example, read=looked_up):
    """A table, a kernel, a scan and dense layers; all rules of the engines."""
    ids, x = example
    rows = read(params["table"], ids)
    wide = rows.dtype
    image = jax.lax.conv(
        x.astype(wide)[None, None], params["kernel"].astype(wide), (1,), "SAME"
    )

    def body(h, _):
        return jnp.tanh(h @ params["w"].astype(wide)), ()

    h, _ = jax.lax.scan(body, rows.sum(0) + image[0, 0, :WIDTH], length=2)
    low = params["scale"].astype(jnp.bfloat16).astype(wide)
    return jnp.sum((h * low).astype(jnp.float32)) * 50


def weights(dtype="float32"):
    def part(*shape):
        count = int(np.prod(shape))
        return jnp.cos(jnp.arange(float(count))).reshape(shape).astype(dtype)

    return {
        "kernel": part(1, 1, 3),
        "scale": part(WIDTH),
        "table": part(VOCABULARY, WIDTH),
        "w": part(WIDTH, WIDTH) * jnp.asarray(0.3, dtype),
    }


def batch(size, dtype="int32"):
    ids = (np.arange(size * 5) * 37 % 120).reshape(size, 5)
    return jnp.asarray(ids, dtype), jnp.sin(jnp.arange(size * 6.0)).reshape(size, 6)


def reference(loss, params, examples, clip_norm):
    """Clipped and summed in float64 from plain per-example gradients."""
    per_example = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, examples)
    leaves, treedef = jax.tree.flatten(per_example)
    leaves = [np.asarray(x.astype(jnp.float32), np.float64) for x in leaves]
    squares = sum(np.sum(x.reshape(len(x), -1) ** 2, axis=1) for x in leaves)
    scale = np.minimum(1, clip_norm / np.sqrt(squares))
    return treedef.unflatten([np.tensordot(scale, x, axes=1) for x in leaves])


@functools.cache
def of_the_network():
    return reference(network, weights(), batch(8), C)


def distance(one, other):
    parts = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return np.sqrt(
        sum(
            np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)
            for a, b in parts
        )
    )


@pytest.mark.parametrize("name", ["x64", "strict", "explicit", "auto", "manual"])
@pytest.mark.parametrize(
    ("engine", "size"),
    [pytest.param(*x, marks=[pytest.mark.slow] if x[1] else []) for x in ENGINES],
)
def test_sums_are_the_same_in_every_configuration(engine, size, name):
    expected = of_the_network()
    read = multiplied if name == "explicit" else looked_up
    loss = functools.partial(network, read=read)
    fn = clipped_grad(loss, C, engine=engine, microbatch_size=size)
    if name == "manual":
        mesh = mesh_of(jax.sharding.AxisType.Auto)
        whole, rows = jax.P(), jax.P("x")

        def local(params, examples):
            return jax.lax.psum(fn(params, examples)[0], "x")

        run = jax.shard_map(local, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
        total = jax.jit(run)(weights(), batch(8))
    else:
        with setting(name):
            examples = batch(8)
            if name in ("explicit", "auto"):
                rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P("x"))
                examples = jax.device_put(examples, rows)
            total, _ = jax.jit(fn)(weights(), examples)
    # Clipping aims 2⁻²⁰ under C, and sums of eight round by less than that.
    assert distance(total, expected) < 1e-5 * 8 * C


INDICES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", INDICES)
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_indices_of_every_width_and_sign(engine, dtype):
    """Out of range, each mode reads what it reads; the sum must know it."""
    limits = jnp.iinfo(dtype)
    values = [0, 5, 119, limits.min, limits.max, limits.max - 4, limits.max // 2 + 6]
    rows = 120
    modes = ["clip", "fill", "wrap"]

    def loss(tables, example):
        ids, weight = example
        read = [
            jnp.take(tables[mode], ids, axis=0, mode=mode, fill_value=0)
            for mode in modes
        ]
        read.append(jax.lax.dynamic_index_in_dim(tables["at"], ids[0], keepdims=False))
        read.append(tables["indexed"][ids])
        return sum(jnp.sum(jnp.sin(r) * weight[: r.ndim].sum()) for r in read) * 9

    with jax.enable_x64(dtype.endswith("64")):
        ids = jnp.asarray(list(itertools.permutations(values, 2)), dtype)
        names = [*modes, "at", "indexed"]
        tables = {
            k: jnp.cos(jnp.arange(rows * 3.0, dtype=jnp.float32) + i).reshape(rows, 3)
            for i, k in enumerate(names)
        }
        examples = ids, jnp.ones((len(ids), 2), jnp.float32)
        expected = reference(loss, tables, examples, C)
        total, _ = jax.jit(clipped_grad(loss, C, engine=engine))(tables, examples)
    assert distance(total, expected) < 1e-5 * len(ids) * C


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("engine", ["vmap", "bookkeeping", "ghost"])
def test_no_example_moves_a_large_sum_by_more_than_the_clip_norm(engine, dtype):
    """Gradients that align, so that a rounding of the sum would be one of n C."""
    n = 2048
    fn = jax.jit(clipped_grad(network, C, engine=engine))
    ids, x = (jnp.broadcast_to(a[:1], (n, *a.shape[1:])) for a in batch(1))
    params = weights(dtype)
    full, _ = fn(params, (ids, x), mask=jnp.ones(n, bool))
    # The sum itself rounds by at most γ_n n C (float32).
    allowed = n * 2.0**-24 * n * C
    for i in (0, n - 1):
        swapped = ids.at[i].set(7), x.at[i].set(-3.0)
        other, per_example = fn(params, swapped, mask=jnp.ones(n, bool))
        assert per_example.norm[i] > C
        assert distance(full, other) <= 2 * C + allowed
        less, _ = fn(params, (ids, x), mask=jnp.arange(n) != i)
        assert distance(full, less) <= C + allowed


@pytest.mark.parametrize(("engine", "size"), ENGINES)
def test_axes_of_size_zero(engine, size):
    def loss(params, example):
        x, ids = example
        nothing = x[:0] @ params["no rows"]  # a contraction over nothing
        return jnp.sum(jnp.tanh(x @ params["w"]) + nothing) + jnp.sum(
            params["table"][ids[:0]]
        )

    params = {
        "no rows": jnp.zeros((0, 4)),
        "table": jnp.ones((5, 4)),
        "unused": jnp.zeros((3, 0)),
        "w": jnp.ones((3, 4)) * 0.1,
    }
    examples = jnp.sin(jnp.arange(15.0)).reshape(5, 3) * 9, jnp.zeros((5, 2), int)
    fn = clipped_grad(loss, C, engine=engine, microbatch_size=size)
    total, _ = jax.jit(fn)(params, examples)
    assert distance(total, reference(loss, params, examples, C)) < 1e-5 * 5 * C


# --- samplers


@pytest.mark.parametrize("name", ["x64", "strict", "explicit"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_are_the_same_in_every_configuration(sampler, name):
    sample = SAMPLERS[sampler]
    expected = jax.device_get([sample(jax.random.key(5), step) for step in (0, 7)])
    with setting(name):
        key = jax.random.key(5)
        jitted = jax.jit(lambda step: sample(key, step))
        got = jax.device_get([jitted(0), jitted(7)])
        if sampler != "cyclic":
            together = jax.vmap(lambda step: sample(key, step))(jnp.array([0, 7]))
            got[1] = jax.tree.map(lambda x: np.asarray(x)[1], together)
    for one, other in zip(got, expected, strict=True):
        assert one.indices.dtype == np.int32
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_array_equal(one.mask, other.mask)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if not s.startswith("cyclic")])
def test_batches_depend_on_key_and_step(sampler, impl):
    sample = SAMPLERS[sampler]
    keys = [jax.random.key(seed, impl=impl) for seed in (5, 6)]
    drawn = [sample(key, step) for key in keys for step in (0, 1)]
    for one, other in itertools.combinations(drawn, 2):
        # Equal by chance with probability below 1e-7 (Poisson: both may be empty).
        assert not np.array_equal(one.indices, other.indices)
    for each in drawn:
        present = np.asarray(each.indices)[np.asarray(each.mask)]
        assert len(set(present.tolist())) == present.size
        assert present.min(initial=0) >= 0
        assert present.max(initial=0) < 400


# --- streams


THREEFRY = jax.extend.random.threefry_prng_impl
DRAWN: list[tuple[int, ...]] = []


def _record(data):
    rows = np.asarray(data).reshape(-1, 2)
    DRAWN.extend(tuple(map(int, row)) for row in rows)


def _random_bits(data, bit_width, shape):
    jax.debug.callback(_record, data)
    return THREEFRY.random_bits(data, bit_width, shape)


RECORDED = jax.extend.random.define_prng_impl(
    key_shape=THREEFRY.key_shape,
    seed=THREEFRY.seed,
    split=THREEFRY.split,
    fold_in=THREEFRY.fold_in,
    random_bits=_random_bits,
    name="threefry that tells what it draws from",
    tag="recorded",
)


def keys_drawn_from(consumer):
    """Every key that bits are drawn from, as often as they are."""
    DRAWN.clear()
    jax.block_until_ready(jax.tree.leaves(consumer(jax.random.key(9, impl=RECORDED))))
    jax.effects_barrier()
    return list(DRAWN)


def consumers():
    """What draws under a key, by name."""
    return {
        **{f"transformation {k}": in_steps(v) for k, v in TRANSFORMATIONS.items()},
        **{
            f"sampler {k}": in_batches(v)
            for k, v in SAMPLERS.items()
            if "cyclic" not in k
        },
        **{f"solver {k}": v for k, v in SOLVERS.items()},
    }


@functools.cache
def keys_of(name):
    return keys_drawn_from(consumers()[name])


def in_steps(make):
    zeros = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": {"a": jnp.zeros(2)}}
    return lambda key: steps_of(make(key), zeros, jitted=False)


def in_batches(sample):
    return lambda key: [sample(key, step) for step in range(4)]


@pytest.mark.slow
def test_streams_of_one_key_never_meet():
    """Samplers, noises and solvers under one key, their first steps and all leaves."""
    # Two names of one mechanism draw the same: only one of them is in a run.
    same = [
        {"add_gaussian_noise", "noisy_mean", "dp_sgd", "dp_adam", "dp_adamw"},
        {"tree_momentum", "tree_momentum, regenerated", "dp_nsgd"},
        {name for name in TRANSFORMATIONS if "correlated" in name},
        {"reshuffled", "reshuffled_step"},
        {"random_bins", "random_bins_step"},
    ]
    drawn = {name: keys_of(name) for name in consumers()}
    root = tuple(map(int, jax.random.key_data(jax.random.key(9))))
    for name, keys in drawn.items():
        assert keys, name
        assert root not in keys, name
        if "regenerated" not in name and "reshuffled" not in name:
            assert len(set(keys)) == len(keys), f"{name} draws twice from one key"
    for one, other in itertools.combinations(drawn, 2):
        bare = {n.split(" ", 1)[1] for n in (one, other)}
        if not any(bare <= group for group in same):
            assert not set(drawn[one]) & set(drawn[other]), (one, other)


@pytest.mark.parametrize(
    "kind", ["transformation", pytest.param("solver", marks=pytest.mark.slow)]
)
def test_children_of_the_key_itself_are_no_stream(kind):
    """A user may split the key, or fold numbers into it, for purposes of his own."""
    key = jax.random.key(9, impl=RECORDED)
    children = {
        tuple(map(int, jax.random.key_data(child)))
        for child in [*jax.random.split(key, 64), key]
    }
    for name in consumers():
        if name.startswith(kind):
            assert not children & set(keys_of(name)), name
