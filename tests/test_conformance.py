"""Properties that every transformation, engine, sampler and solver has.

The tables are in `conformance`. Each test is a class of bugs that this library or a
another one has shipped.
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
from conformance import (
    CLIPPED_SUMS,
    ELSEWHERE,
    ENGINES,
    MECHANISMS,
    SAMPLERS,
    SOLVERS,
    TRANSFORMATIONS,
)

import dpjax
from dpjax import auditing, clipped_grad, sampling, solvers
from dpjax._core.keys import generator_of

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg", "chacha20")
HALVES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def functions_of(module):
    return {
        name
        for name in dir(module)  # including names that are loaded at their first use
        if inspect.isfunction(value := getattr(module, name))
        and not name.startswith("_")
        and (module is dpjax or value.__module__.startswith(module.__name__))
    }


def base_names(table):
    return {name.split(",")[0] for name in table}


def test_every_public_function_is_in_a_conformance_table():
    assert functions_of(dpjax) == base_names(TRANSFORMATIONS) | ELSEWHERE["dpjax"]
    assert functions_of(sampling) == base_names(SAMPLERS) | ELSEWHERE["dpjax.sampling"]
    assert functions_of(auditing) == ELSEWHERE["dpjax.auditing"]
    public = {n for n in dir(solvers) if inspect.isfunction(getattr(solvers, n))}
    assert public == base_names(SOLVERS) | ELSEWHERE["dpjax.solvers"]


# --- transformations

OF_MECHANISMS = [x for x in TRANSFORMATIONS if x in MECHANISMS]
# With these the default suite compiles programs: each kind of noise once.
QUICK = (
    "add_discrete_gaussian_noise",
    "tree_momentum, regenerated",
    "dp_nsgd, correlated",
)


def pairs_of(arguments, first):
    """Each mechanism with each argument, and each other transformation with the first.

    The others share the mechanisms' code.
    """
    return [
        pytest.param(x, argument, marks=[] if x in QUICK else [pytest.mark.matrix])
        for x in TRANSFORMATIONS
        for argument in (arguments if x in MECHANISMS else [first])
    ]


def make_gradients(dtype="float32"):
    """Made by NumPy, which compiles nothing."""
    dtype = jnp.dtype(dtype)
    return {
        "b": np.linspace(-1, 1, 4).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "w": np.linspace(0.5, -2, 32).reshape(8, 4).astype(dtype),
        "w2": np.linspace(0.5, -2, 32).reshape(8, 4).astype(dtype),
    }


SCALES = np.array([1.0, -0.3, 2.0], np.float32)


def make_step_loop(make, impl=None):
    """A function of gradients: one step's updates for each scale, in one scan."""

    def updates_by_scale(grads, scales):
        tx = make(jax.random.key(3, impl=generator_of(impl)))
        params = jax.tree.map(jnp.zeros_like, grads)

        def step(state, scale):
            sums = jax.tree.map(lambda x: x * scale.astype(x.dtype), grads)
            updates, state = tx.update(sums, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), scales)[1]

    return updates_by_scale


def run_step_by_step(tx, grads):
    """The same with only the step itself jitted, and the state donated."""
    update = jax.jit(tx.update, donate_argnums=1)
    params = jax.tree.map(lambda x: jnp.asarray(x * 0), grads)
    state, out = tx.init(params), []
    for scale in SCALES:
        sums = jax.tree.map(lambda x, s=scale: jnp.asarray(x * s), grads)
        updates, state = update(sums, state, params)
        out.append(jax.device_get(updates))
    return jax.tree.map(lambda *x: np.stack(x), *out)


def assert_close(one, other, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol
        ),
        one,
        other,
    )


@functools.cache
def default_updates(name):
    return jax.device_get(
        jax.jit(make_step_loop(TRANSFORMATIONS[name]))(make_gradients(), SCALES)
    )


def mesh_of(kind):
    return jax.make_mesh((4,), ("x",), axis_types=(kind,))


@contextlib.contextmanager
def configuration(name):
    """Set a JAX configuration that a caller may use."""
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


def assert_same_program_under_strict_promotion(fn, *args):
    """Compare the traced programs alone: equal operations compute equal values."""
    plain = str(jax.make_jaxpr(fn)(*args))
    with configuration("strict"):
        assert str(jax.make_jaxpr(fn)(*args)) == plain


@pytest.mark.diagonal("transformation")
@pytest.mark.parametrize(
    ("transformation", "name"), pairs_of(["x64", "explicit", "auto"], "x64")
)
def test_updates_do_not_depend_on_the_configuration(transformation, name):
    expected = default_updates(transformation)
    with configuration(name):
        grads = make_gradients()
        if name in ("explicit", "auto"):
            rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P("x"))
            grads = grads | {k: jax.device_put(grads[k], rows) for k in ("b", "w")}
        run = jax.jit(make_step_loop(TRANSFORMATIONS[transformation]))
        assert_close(run(grads, SCALES), expected)


@pytest.mark.parametrize(
    "transformation",
    [
        pytest.param(
            x, marks=[] if x in (*MECHANISMS, "dp_adam") else [pytest.mark.matrix]
        )
        for x in TRANSFORMATIONS
    ],
)
def test_updates_have_the_same_program_under_strict_promotion(transformation):
    run = make_step_loop(TRANSFORMATIONS[transformation])
    if transformation in ("dp_adam", "dp_adamw"):
        # The day optax's own Adam takes strict promotion ours is to take it too.
        adam = make_step_loop(lambda key: optax.adam(0.1))
        with pytest.raises(jax.dtypes.TypePromotionError), configuration("strict"):
            jax.eval_shape(adam, make_gradients(), SCALES)
        return
    assert_same_program_under_strict_promotion(run, make_gradients(), SCALES)


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [*OF_MECHANISMS, "dp_adam"])
def test_updates_step_by_step_equal_those_of_a_scan(transformation):
    tx = TRANSFORMATIONS[transformation](jax.random.key(3))
    expected = default_updates(transformation)
    assert_close(run_step_by_step(tx, make_gradients()), expected)
    # Donation took no array that is used again.
    assert_close(run_step_by_step(tx, make_gradients()), expected)


@pytest.mark.diagonal  # test_placement has one of each way to draw
@pytest.mark.parametrize("transformation", OF_MECHANISMS)
def test_shards_of_a_manual_mesh_get_independent_noise(transformation):
    make = TRANSFORMATIONS[transformation]
    mesh, rows = mesh_of(jax.sharding.AxisType.Auto), jax.P("x")

    def noisy(grads):
        tx = make(jax.random.key(3))
        return tx.update(grads, tx.init(grads), grads)[0]

    grads = np.zeros((16, 16), np.float32)
    over = {"mesh": mesh, "in_specs": rows, "out_specs": rows}
    shards = np.sign(jax.jit(jax.shard_map(noisy, **over))(grads)).reshape(4, -1)
    for one, other in itertools.combinations(shards, 2):
        # 64 fair signs: outside 12..52 with probability 2e-7, on each of six pairs.
        assert 12 <= np.sum(one == other) <= 52
    with pytest.raises(ValueError, match="check_vma"):
        jax.eval_shape(jax.shard_map(noisy, **over, check_vma=False), grads)


@pytest.mark.diagonal("impl")
@pytest.mark.parametrize(
    ("transformation", "impl"),
    [
        *((x, "threefry2x32") for x in TRANSFORMATIONS),
        *((x, "chacha20") for x in OF_MECHANISMS),
        *itertools.product(["tree_momentum", "dp_sgd"], ["rbg", "unsafe_rbg"]),
    ],
)
def test_leaves_and_steps_get_independent_noise(transformation, impl):
    zeros = {k: np.zeros((8, 8), np.float32) for k in ("a", "b")}
    if transformation == "dp_nsgd":  # steps of fixed length: signs carry the noise
        zeros["b"] = zeros["b"] + np.float32(1e-3)
    run = jax.jit(make_step_loop(TRANSFORMATIONS[transformation], impl))
    steps = jax.device_get(run(zeros, SCALES))
    signs = [np.sign(steps[k][0]).ravel() for k in zeros]
    # Momentum and correlated noise correlate steps by design: the second step's part
    # along the first one is removed. What remains would vanish if noise were repeated.
    one, two = (x.ravel().astype(np.float64) for x in steps["a"][:2])
    rest = two - (one @ two) / (one @ one) * one
    assert np.std(rest) > 0.05 * np.std(one)
    signs.append(np.sign(rest))
    for one, other in itertools.combinations(signs, 2):
        assert 10 <= np.sum(one == other) <= 54  # fair signs: outside at 2e-8


@pytest.mark.diagonal("transformation")
@pytest.mark.parametrize(("transformation", "dtype"), pairs_of(HALVES, "bfloat16"))
def test_noise_is_added_before_casting_down(transformation, dtype):
    low = make_gradients(dtype)
    wide = {name: x.astype(np.float32) for name, x in low.items()}
    run = make_step_loop(TRANSFORMATIONS[transformation])
    both = jax.jit(lambda *each: [run(grads, SCALES[:1]) for grads in each])
    got, expected = jax.device_get(both(low, wide))
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(np.asarray(g, np.float32)).all()
        if not transformation.startswith("dp_"):
            np.testing.assert_array_equal(g, e.astype(g.dtype))
        elif jnp.finfo(dtype).bits == 16:
            # These continue after the cast: each number, the norm or the root that it
            # is divided by, and a quotient in the narrow dtype are rounded by half of
            # eps.
            roundings = 3 if g.dtype == dtype else 2
            rtol = 1.001 * roundings / 2 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(g, e, rtol=rtol)
        else:  # of eight bits, small numbers are rounded by more than that
            np.testing.assert_array_equal(np.sign(g), np.sign(e) * (g != 0))
        if transformation.startswith(("add_gaussian_noise", "tree_momentum")):
            assert g.dtype == dtype


# --- engines


C = 0.37
VOCABULARY, WIDTH = 300, 4


def read_by_take(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def read_by_product(table, ids):
    """A lookup by a product, as JAX has no gradient of a gather on explicit axes."""
    return jax.nn.one_hot(ids, VOCABULARY, dtype=table.dtype) @ table


def network(params, example, read=read_by_take):
    """A table, a kernel, a scan and dense layers: every rule of the engines applies."""
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


def make_weights(dtype="float32"):
    dtype = jnp.dtype(dtype)

    def cosines(*shape):
        return np.cos(np.arange(np.prod(shape))).reshape(shape).astype(dtype)

    return {
        "kernel": cosines(1, 1, 3),
        "scale": cosines(WIDTH),
        "table": cosines(VOCABULARY, WIDTH),
        "w": cosines(WIDTH, WIDTH) * dtype.type(0.3),
    }


def make_batch(size, dtype="int32"):
    ids = (np.arange(size * 5) * 37 % 120).reshape(size, 5)
    return ids.astype(dtype), np.sin(np.arange(size * 6.0)).reshape(size, 6)


def reference_clipped_sum(loss, params, examples, clip_norm):
    """The clipped sum in float64, from plain per-example gradients."""
    per_example = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, examples)
    return clip_and_sum(per_example, clip_norm)


def clip_and_sum(per_example, clip_norm):
    leaves, treedef = jax.tree.flatten(per_example)
    leaves = [np.asarray(x).astype(np.float64) for x in leaves]
    squares = sum(np.sum(x.reshape(len(x), -1) ** 2, axis=1) for x in leaves)
    scale = np.minimum(1, clip_norm / np.sqrt(squares))
    return treedef.unflatten([np.tensordot(scale, x, axes=1) for x in leaves])


@functools.cache
def network_clipped_sum():
    return reference_clipped_sum(network, make_weights(), make_batch(8), C)


def distance(one, other):
    parts = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return np.sqrt(
        sum(
            np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)
            for a, b in parts
        )
    )


@pytest.mark.diagonal("engine")
@pytest.mark.parametrize(
    ("engine", "size", "arithmetic", "name"),
    [
        pytest.param(*x, name, marks=[pytest.mark.slow] if x[1] else [])
        for x in CLIPPED_SUMS
        # Microbatches meet the mesh where its axes are explicit.
        for name in (["explicit"] if x[1] else ["x64", "explicit", "auto", "manual"])
    ],
)
def test_clipped_sums_do_not_depend_on_the_configuration(
    engine, size, arithmetic, name
):
    expected = network_clipped_sum()
    read = read_by_product if name == "explicit" else read_by_take
    loss = functools.partial(network, read=read)
    fn = clipped_grad(
        loss, C, engine=engine, microbatch_size=size, arithmetic=arithmetic
    )
    if name == "manual":
        mesh = mesh_of(jax.sharding.AxisType.Auto)
        whole, rows = jax.P(), jax.P("x")

        def local_sum(params, examples):
            return jax.lax.psum(fn(params, examples)[0], "x")

        run = jax.shard_map(
            local_sum, mesh=mesh, in_specs=(whole, rows), out_specs=whole
        )
        total = jax.jit(run)(make_weights(), make_batch(8))
    else:
        with configuration(name):
            examples = make_batch(8)
            if name in ("explicit", "auto"):
                rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P("x"))
                examples = jax.device_put(examples, rows)
            # On explicit axes JAX's own gradients want parameters that are on the mesh.
            total, _ = jax.jit(fn)(jax.tree.map(jnp.asarray, make_weights()), examples)
    # Clipping aims 2⁻²⁰ under C, and sums of eight round by less than that. Discrete
    # arithmetic clips to less, by a share of C that is below 3e-5 for eight examples.
    share = 4e-5 if arithmetic == "discrete" else 1e-5
    assert distance(total, expected) < share * 8 * C


@pytest.mark.diagonal("engine")
@pytest.mark.parametrize(("engine", "size", "arithmetic"), CLIPPED_SUMS)
def test_clipped_sums_have_the_same_program_under_strict_promotion(
    engine, size, arithmetic
):
    fn = clipped_grad(
        network, C, engine=engine, microbatch_size=size, arithmetic=arithmetic
    )
    assert_same_program_under_strict_promotion(fn, make_weights(), make_batch(8))


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_indices_of_every_integer_dtype_match_reference(engine, bits):
    """The sums follow what each mode reads for indices out of range."""
    rows = 120
    modes = ["clip", "fill", "wrap"]

    def index_pairs(dtype):
        limits = np.iinfo(dtype)
        middle = limits.max // 2 + 6
        values = [0, 5, 119, limits.min, limits.max, limits.max - 4, middle]
        return np.array(list(itertools.permutations(values, 2)), dtype)

    def loss_of_one_dtype(tables, ids, weight):
        read = [
            jnp.take(tables[mode], ids, axis=0, mode=mode, fill_value=0)
            for mode in modes
        ]
        read.append(jax.lax.dynamic_index_in_dim(tables["at"], ids[0], keepdims=False))
        read.append(tables["indexed"][ids])
        return sum(jnp.sum(jnp.sin(r) * weight[: r.ndim].sum()) for r in read) * 9

    def loss(tables, example):
        ids, weight = example
        return sum(loss_of_one_dtype(tables[k], ids[k], weight) for k in ids)

    ids = {dtype: index_pairs(dtype) for dtype in (f"int{bits}", f"uint{bits}")}
    tables = {
        dtype: {
            name: np.cos(np.arange(rows * 3.0) + i).reshape(rows, 3).astype(np.float32)
            for i, name in enumerate([*modes, "at", "indexed"])
        }
        for dtype in ids
    }
    size = len(ids[f"int{bits}"])

    @jax.jit
    def clipped_and_plain_gradients(tables, examples):
        plain = jax.vmap(jax.grad(loss), (None, 0))(tables, examples)
        return clipped_grad(loss, C, engine=engine)(tables, examples)[0], plain

    with jax.enable_x64(bits == 64):
        total, plain = clipped_and_plain_gradients(
            tables, (ids, np.ones((size, 2), np.float32))
        )
    # Signed and unsigned indices both contribute.
    for dtype in ids:
        squares = [np.sum(np.square(x)) for x in jax.tree.leaves(plain[dtype])]
        assert sum(squares) > 1
    assert distance(total, clip_and_sum(plain, C)) < 1e-5 * size * C


@pytest.mark.rounding
@pytest.mark.diagonal("engine")
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(
    ("engine", "arithmetic"),
    [
        ("vmap", "real"),
        ("bookkeeping", "real"),
        ("ghost", "real"),
        ("vmap", "discrete"),
        ("bookkeeping", "discrete"),
    ],
)
def test_one_example_moves_a_large_sum_by_at_most_the_clip_norm(
    engine, arithmetic, dtype
):
    """The gradients align, so that a rounding error of the sum is relative to n C."""
    n = 2048
    fn = jax.jit(clipped_grad(network, C, engine=engine, arithmetic=arithmetic))
    ids, x = (np.broadcast_to(a[:1], (n, *a.shape[1:])) for a in make_batch(1))
    params, everyone = make_weights(dtype), np.ones(n, bool)
    full, _ = fn(params, (ids, x), mask=everyone)
    # The sum itself rounds by at most γ_n n C (float32), but discrete arithmetic clips
    # to so much less than C that the floats differ by at most C.
    allowed = n * 2.0**-24 * n * C if arithmetic == "real" else 0.0
    for i in (0, n - 1):
        one = (np.arange(n) == i)[:, None]
        swapped = np.where(one, 7, ids).astype(ids.dtype), np.where(one, -3.0, x)
        other, per_example = fn(params, swapped, mask=everyone)
        assert np.asarray(per_example.norm)[i] > C
        assert distance(full, other) <= 2 * C + allowed
        less, _ = fn(params, (ids, x), mask=~one[:, 0])
        assert distance(full, less) <= C + allowed


@pytest.mark.diagonal("engine")
@pytest.mark.parametrize(("engine", "size"), ENGINES)
def test_axes_of_size_zero_match_reference(engine, size):
    def loss(params, example):
        x, ids = example
        nothing = x[:0] @ params["no rows"]  # a contraction over nothing
        return jnp.sum(jnp.tanh(x @ params["w"]) + nothing) + jnp.sum(
            params["table"][ids[:0]]
        )

    params = {
        "no rows": np.zeros((0, 4), np.float32),
        "table": np.ones((5, 4), np.float32),
        "unused": np.zeros((3, 0), np.float32),
        "w": np.full((3, 4), 0.1, np.float32),
    }
    examples = np.sin(np.arange(15.0)).reshape(5, 3) * 9, np.zeros((5, 2), int)
    fn = clipped_grad(loss, C, engine=engine, microbatch_size=size)
    total, _ = jax.jit(fn)(params, examples)
    assert (
        distance(total, reference_clipped_sum(loss, params, examples, C)) < 1e-5 * 5 * C
    )


# --- samplers


def make_batch_loop(sampler, impl=None):
    """A function of seeds and steps: their batches, one after the other."""

    def run(seeds, steps):
        def one(numbers):
            seed, step = numbers
            return SAMPLERS[sampler](
                jax.random.key(seed, impl=generator_of(impl)), step
            )

        return jax.lax.map(one, (seeds, steps))

    return run


STEPS = np.array([5, 5], np.uint32), np.array([0, 7], np.int32)


# One of each way to draw.
QUICK_SAMPLERS = ("reshuffled_step", "poisson", "random_bins_step")
BY_SAMPLER = [
    pytest.param(x, marks=[] if x in QUICK_SAMPLERS else [pytest.mark.matrix])
    for x in SAMPLERS
]
RANDOM_SAMPLERS = [x for x in BY_SAMPLER if not x.values[0].startswith("cyclic")]


@pytest.mark.diagonal("sampler")
@pytest.mark.parametrize("name", ["x64", "explicit"])
@pytest.mark.parametrize("sampler", BY_SAMPLER)
def test_batches_do_not_depend_on_the_configuration(sampler, name):
    expected = jax.device_get(jax.jit(make_batch_loop(sampler))(*STEPS))
    with configuration(name):
        key = jax.random.key(5)
        together = jax.vmap(lambda step: SAMPLERS[sampler](key, step), axis_size=2)
        got = jax.device_get(jax.jit(together)(STEPS[1]))
    assert got.indices.dtype == np.int32
    np.testing.assert_array_equal(got.indices, expected.indices)
    np.testing.assert_array_equal(got.mask, expected.mask)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_have_the_same_program_under_strict_promotion(sampler):
    assert_same_program_under_strict_promotion(make_batch_loop(sampler), *STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_drawn_one_by_one_equal_those_of_a_map(sampler):
    sample, key = SAMPLERS[sampler], jax.random.key(5)
    jitted = jax.jit(lambda step: sample(key, step))
    expected = jax.device_get(jax.jit(make_batch_loop(sampler))(*STEPS))
    for i, step in enumerate(STEPS[1]):
        for got in (sample(key, int(step)), jitted(step)):
            np.testing.assert_array_equal(got.indices, expected.indices[i])
            np.testing.assert_array_equal(got.mask, expected.mask[i])


@pytest.mark.diagonal("sampler")
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sampler", RANDOM_SAMPLERS)
def test_batches_differ_between_keys_and_steps(sampler, impl):
    seeds, steps = np.array([5, 5, 6, 6], np.uint32), np.array([0, 1, 0, 1], np.int32)
    together = jax.device_get(jax.jit(make_batch_loop(sampler, impl))(seeds, steps))
    drawn = [jax.tree.map(lambda x, i=i: x[i], together) for i in range(4)]
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
    """Every key that bits are drawn from, once for each draw."""
    DRAWN.clear()
    jax.block_until_ready(jax.tree.leaves(consumer(jax.random.key(9, impl=RECORDED))))
    jax.effects_barrier()
    return list(DRAWN)


def consumers():
    """Functions of a key that draw random numbers, by name."""
    return {
        **{
            f"transformation {k}": make_noise_consumer(v)
            for k, v in TRANSFORMATIONS.items()
        },
        **{
            f"sampler {k}": make_batch_consumer(v)
            for k, v in SAMPLERS.items()
            if "cyclic" not in k
        },
        **{f"solver {k}": v for k, v in SOLVERS.items()},
    }


@functools.cache
def consumed_keys(name):
    return keys_drawn_from(consumers()[name])


def make_noise_consumer(make):
    zeros = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    zeros["c"] = {"a": zeros["a"]}
    # Of the transformation's key alone: the recorded one.
    return jax.jit(lambda key: make_step_loop(lambda _: make(key))(zeros, SCALES))


def make_batch_consumer(sample):
    return lambda key: [sample(key, step) for step in range(4)]


@pytest.mark.slow
def test_consumers_of_one_key_never_share_a_stream():
    """Samplers, noise and solvers under one key, their first steps and all leaves."""
    # Variants of one mechanism draw the same numbers: a run contains only one of them.
    same = [
        {"add_gaussian_noise", "noisy_mean", "dp_sgd", "dp_adam", "dp_adamw"},
        {"tree_momentum", "tree_momentum, regenerated", "dp_nsgd"},
        {name for name in TRANSFORMATIONS if "correlated" in name},
        {"reshuffled", "reshuffled_step"},
        {"random_bins", "random_bins_step"},
    ]
    drawn = {name: consumed_keys(name) for name in consumers()}
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


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "kind",
    [
        "transformation add_gaussian_noise",
        "transformation correlated_noise, tree regenerated",
        pytest.param("transformation", marks=pytest.mark.slow),
        pytest.param("solver", marks=pytest.mark.slow),
    ],
)
def test_no_consumer_draws_from_children_of_the_key(kind):
    """A user may split the key, or fold numbers into it, for other purposes."""
    key = jax.random.key(9, impl=RECORDED)
    children = {
        tuple(map(int, jax.random.key_data(child)))
        for child in [*jax.random.split(key, 64), key]
    }
    for name in consumers():
        if kind in (name, name.split(" ")[0]):
            assert not children & set(consumed_keys(name)), name
