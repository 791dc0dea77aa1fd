"""arithmetic="discrete": attacks on released bits, and sums against exact arithmetic.

Each attack also runs against floats, where it succeeds, so that it can fail.
"""

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest

import dpjax
from dpjax import noise, strategies
from dpjax._core import platforms
from dpjax._matrices import streaming
from dpjax._plan import loader
from dpjax.accounting import profiles
from dpjax.clipping._bookkeeping.evaluate import float64_sums
from dpjax.noise import _discrete
from dpjax.sampling import Batch

KEY = jax.random.wrap_key_data(np.array([0, 17], np.uint32))
SIGMA = 3.7304  # (1, 1e-5)-DP for one release with sensitivity 1


# Attacks on the bits of an output.


@functools.cache
def reachable(stddev, start=0.0):
    """The sorted sums of a number and every draw of jax.random.normal times stddev.

    A draw is a function of 23 bits. All is one program, as it is where noise is added:
    XLA may combine the constants of a program.
    """

    @jax.jit
    def of(mantissas):
        unit = jax.lax.bitcast_convert_type(mantissas | 0x3F800000, jnp.float32) - 1
        low = jnp.nextafter(jnp.float32(-1), jnp.float32(0))
        uniform = jnp.maximum(low, unit * (jnp.float32(1) - low) + low)
        normal = jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)
        return start + jnp.asarray(stddev, jnp.float32) * normal

    return np.sort(np.asarray(of(jnp.arange(2**23, dtype=jnp.uint32))))


def is_in(ordered, values):
    places = np.minimum(np.searchsorted(ordered, values), ordered.size - 1)
    return ordered[places] == values


def outputs(make, sums):
    tx = make(SIGMA, key=KEY)
    noisy, _ = jax.jit(lambda x: tx.update(x, tx.init(x)))(sums)
    return np.asarray(noisy)


def multiples(values, q):
    """The integers k with float32(k q) equal to each value, where there is one."""
    numbers = np.rint(values.astype(np.float64) / q)
    return numbers, (numbers * q).astype(np.float32) == values


def is_reachable_on_lattice(values, q):
    numbers, exact = multiples(values, q)
    # X₁ + 256 X₂ takes every integer between the sums of the extremes.
    return exact & (numbers >= -8192 * 257) & (numbers <= 8191 * 257)


@pytest.mark.parametrize(
    "size", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)]
)
def test_outputs_of_one_coordinate(size):
    ordered = reachable(SIGMA)
    # Sorted values are looked up in a quarter of the time.
    without = np.sort(outputs(dpjax.add_gaussian_noise, np.zeros(size, np.float32)))
    assert np.all(is_in(ordered, without))  # the enumeration is of what JAX computes
    given = np.sort(outputs(dpjax.add_gaussian_noise, np.ones(size, np.float32)))
    share = 1 - np.mean(is_in(ordered, given))
    # All 2²³ draws with the example give the exact share, 88 %.
    exact = 1 - np.mean(is_in(ordered, reachable(SIGMA, 1.0)))
    assert 0.87 < exact < 0.9
    # z = 5.5: false alarm below 4e-8.
    assert abs(share - exact) < 5.5 * math.sqrt(exact * (1 - exact) / size)
    q = float(noise.lattice_spacing(SIGMA))
    for sums in (np.zeros(size, np.float32), np.ones(size, np.float32)):
        given = outputs(dpjax.add_discrete_gaussian_noise, sums)
        # An output beyond the table's support has probability below 1e-50.
        assert np.all(is_reachable_on_lattice(given, q))


@pytest.mark.slow  # the default suite attacks one coordinate, and whole runs
def test_outputs_of_a_thousand_coordinates():
    ordered, runs, d = reachable(SIGMA), 20, 1000
    example = np.full((runs, d), 1 / math.sqrt(d), np.float32)
    distinguishing = ~is_in(ordered, outputs(dpjax.add_gaussian_noise, example))
    # At least one coordinate distinguishes each run; on average, most coordinates do.
    assert np.all(distinguishing.any(axis=1))
    assert np.mean(distinguishing) > 0.5
    q = float(noise.lattice_spacing(SIGMA))
    given = outputs(dpjax.add_discrete_gaussian_noise, example)
    assert np.all(is_reachable_on_lattice(given, q))


@functools.cache
def first_step(arithmetic):
    """The plan, and its first step from zeros as a function of the data and a key."""
    run = dpjax.plan(
        num_examples=64, batch_size=16, num_steps=20, epsilon=3.0, delta=1e-5,
        sampling="fixed", adjacency=dpjax.Adjacency.ZERO_OUT,
        clip_norm=1.0, arithmetic=arithmetic,
    )  # fmt: skip
    gradient = run.value_and_grad(lambda w, x: jnp.vdot(w, x))

    @jax.jit
    def step(data, key):
        params, tx = jnp.zeros(data.shape[1]), run.optimizer(optax.sgd(1.0), key=key)
        _, grads = gradient(params, run.load(data, 0, key))
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    return run, step


def test_first_parameters_of_a_float_run():
    run, step = first_step("real")
    # From zeros, SGD releases −(0 + σ normal) / b, and b = 16 divides exactly.
    ordered = reachable(run.noise_multiplier * run.clip_norm)
    for seed in range(10):
        for level in (0.0, 0.01, 0.02):
            data = np.full((64, 50), level, np.float32)
            params = np.asarray(step(data, jax.random.key(seed)))
            # 50 numbers that all happen to be reachable have probability below 1e-20.
            assert np.all(is_in(ordered, -params * 16)) == (level == 0)


def test_first_parameters_of_a_discrete_run():
    run, step = first_step("discrete")
    z = run.noise_multiplier
    stddev = _discrete.lattice_noise(run.clip_norm, z, 50, maximum=z).stddev
    q = float(noise.lattice_spacing(stddev))
    for seed in range(10):
        data = np.random.default_rng(seed).standard_normal((64, 50)) * 10.0 ** (
            seed - 5
        )
        params = step(data.astype(np.float32), jax.random.key(seed))
        numbers, exact = multiples(np.asarray(params) * np.float32(-16), q)
        assert np.all(exact)
        assert np.max(np.abs(numbers)) < 2**24  # float32 holds every integer below it
        assert np.any(numbers % 2)


@pytest.mark.slow
def test_each_step_of_a_schedule_has_a_lattice_of_its_own():
    factors = np.array([1.5, 1.0, 0.7, 0.7])
    run = dpjax.plan(
        num_examples=64, batch_size=16, num_steps=4, epsilon=3.0, delta=1e-5,
        sampling="fixed", adjacency=dpjax.Adjacency.ZERO_OUT, clip_norm=0.7,
        noise_schedule=lambda step: factors[step], arithmetic="discrete",
    )  # fmt: skip
    tx, zeros = run.optimizer(optax.sgd(1.0), key=KEY), jnp.zeros(20_000)
    update, state = jax.jit(tx.update), tx.init(zeros)
    for factor in factors:
        updates, state = update(zeros, state, zeros)
        released = np.asarray(updates) * np.float32(-16)
        # The levels of a schedule are rounded up by less than 1 %, and 20,000 draws
        # give their deviation to 1 % with five standard errors to spare on each side.
        ideal = run.noise_multiplier * run.clip_norm * factor
        assert 0.97 * ideal <= np.std(released) <= 1.04 * ideal
        # About 160 released numbers are among the 2,600 lattice points next to zero, so
        # that some are neighbours, at the distance of the lattice's spacing.
        near = np.unique(released[np.abs(released) < 0.01 * ideal].astype(np.float64))
        q = np.min(np.diff(near))
        np.testing.assert_allclose(np.std(released) / q, 131_072, rtol=0.03)
        np.testing.assert_allclose(near / q, np.rint(near / q), atol=0.2)


# The floats of a sum with and without one example.


def dense(w, e):
    return jnp.vdot(e["x"] @ w["w"], e["y"])


def tied(w, e):
    return jnp.vdot(e["x"][0] @ w["w"], e["y"][0]) + jnp.vdot(
        e["y"][1] @ w["w"].T, e["x"][1]
    )


def convolution(w, e):
    dims = ("NWC", "WIO", "NWC")
    out = jax.lax.conv_general_dilated(
        e["x"][None].astype(w["w"].dtype), w["w"], (1,), "VALID", dimension_numbers=dims
    )
    return jnp.vdot(out[0], e["y"][2:])


def embedding(w, e):
    return jnp.vdot(w["w"][e["i"]], e["y"])


def bias(w, e):
    return jnp.vdot(w["w"], e["y"][0]) + jnp.vdot(w["s"] * e["x"][0], e["y"][0])


def two_layers(w, e):
    return jnp.vdot(jnp.tanh(e["x"][0] @ w["w"] + w["s"]) @ w["v"], e["y"][0])


# Losses with their shapes of parameters, and with rows, inputs and outputs of examples.
LOSSES = {
    "one row": (dense, {"w": (6, 5)}, (1, 6, 5)),
    "few rows": (dense, {"w": (40, 30)}, (9, 40, 30)),
    "two rows": (dense, {"w": (6, 5)}, (2, 6, 5)),
    "63 rows": (dense, {"w": (90, 80)}, (63, 90, 80)),
    "64 rows": (dense, {"w": (90, 80)}, (64, 90, 80)),
    "200 rows": (dense, {"w": (200, 100)}, (200, 200, 100)),
    "tied": (tied, {"w": (6, 5)}, (2, 6, 5)),
    "convolution": (convolution, {"w": (3, 16, 8)}, (30, 16, 8)),
    "embedding": (embedding, {"w": (7, 5)}, (9, 6, 5)),
    "bias": (bias, {"w": (5,), "s": (5,)}, (1, 5, 5)),
    "two layers": (two_layers, {"w": (6, 5), "v": (5, 5), "s": (5,)}, (1, 6, 5)),
}
KINDS = ("normal", "alike", "spread", "cancelling")


def bad_examples(kind, batch, rows, n, p, seed=0):
    """Examples whose gradients' sums round a lot."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((batch, rows, n)), rng.standard_normal((batch, rows, p))
    if kind == "alike":  # all partial sums round in the same way
        x, y = np.ones_like(x), np.ones_like(y) * (1 + 2.0**-11 + 2.0**-23)
    elif kind == "spread":  # magnitudes from 2⁻²⁴ to 1
        x *= 2.0 ** rng.integers(-12, 1, (batch, rows, 1))
        y *= 2.0 ** rng.integers(-12, 1, (batch, rows, 1))
    elif kind == "cancelling":  # what is left is 1/512 of the terms' size
        half = rows // 2
        x[:, half : 2 * half] = x[:, :half]
        y[:, half : 2 * half] = -y[:, :half] * (1 - 2.0**-8)
    x, y = (v.astype(np.float32) for v in (x, y))
    # Most gradients are longer than C.
    i = rng.integers(0, 7, (batch, rows)).astype(np.int32)
    return {"x": 10 * x, "y": 10 * y, "i": i}


def distance(a, b):
    """The L2 norm of the difference of two trees of floats, to 19 digits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    gaps = [
        np.asarray(x, np.longdouble) - np.asarray(y, np.longdouble) for x, y in pairs
    ]
    return float(np.sqrt(sum(np.sum(np.square(g)) for g in gaps)))


def distances(name, engine, batch, kinds=KINDS, micro=None, dtype=np.float32):
    """The largest ‖ŝ − ŝ′‖ / C with an example left out, and with one replaced."""
    loss, shapes, sizes = LOSSES[name]
    rng = np.random.default_rng(1)
    params = {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}
    # One program serves all inputs: the clip norm is traced, too.
    total = jax.jit(
        lambda c, e, m: dpjax.clipped_grad(
            loss, c, engine=engine, microbatch_size=micro, arithmetic="discrete"
        )(params, e, mask=m)[0]
    )
    without = replaced = 0.0
    for kind, c in zip(kinds, np.float32([1, 1.1, 0.37, 3e-3]), strict=False):
        examples = bad_examples(kind, batch, *sizes)
        mask = np.ones(batch, bool)
        mask[batch // 3] = batch < 4  # an empty slot in either batch
        whole = total(c, examples, mask)
        for slot in sorted({0, batch // 2, batch - 1}):
            left_out = mask & (np.arange(batch) != slot)
            fewer = total(c, examples, left_out)
            without = max(without, distance(whole, fewer) / float(c))
            other = dict(examples, y=examples["y"].copy())
            other["y"][slot] *= -1.25
            neighbour = total(c, other, mask)
            replaced = max(replaced, distance(whole, neighbour) / float(c))
            # What the empty slot holds does not matter at all.
            assert distance(fewer, total(c, other, left_out)) == 0.0
    return without, replaced


DEFAULT = [
    ("one row", "vmap"),
    ("two layers", "vmap"),
    ("tied", "bookkeeping"),
    ("64 rows", "bookkeeping"),
    ("convolution", "bookkeeping"),
    ("embedding", "bookkeeping"),
    ("bias", "auto"),
]


@pytest.mark.diagonal
@pytest.mark.rounding
@pytest.mark.parametrize(("name", "engine"), DEFAULT)
def test_floats_of_a_sum_move_by_at_most_the_clip_norm(name, engine):
    large = "rows" in name and name != "one row"
    without, replaced = distances(name, engine, 20 if large else 129)
    assert 0.9 < without <= 1.0
    assert 1.8 < replaced <= 2.0


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.parametrize("engine", ["vmap", "bookkeeping", "auto"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("batch", "micro", "dtype"),
    [
        (1, None, np.float32),
        (2, None, np.float32),
        (127, None, np.float32),
        (128, 32, np.float32),
        (129, None, jnp.bfloat16),
        (300, 100, np.float32),
        (300, None, np.float32),
        (130, 7, np.float64),
    ],
)
def test_floats_of_every_sum_move_by_at_most_the_clip_norm(
    name, engine, batch, micro, dtype
):
    with jax.enable_x64(dtype is np.float64):
        without, replaced = distances(name, engine, batch, micro=micro, dtype=dtype)
    assert 0.5 < without <= 1.0
    assert replaced <= 2.0


def lower_for(platform, arithmetic):
    total = dpjax.clipped_grad(embedding, 1.0, arithmetic=arithmetic)
    params = {"w": np.ones((7, 5), np.float32)}
    batch = {"i": np.zeros((2, 9), np.int32), "y": np.ones((2, 9, 5), np.float32)}
    return jax.jit(total).trace(params, batch).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_sums_in_varying_order_are_refused_on_gpus(platform, monkeypatch):
    for flags in (None, "", f"{EXCLUDE}=false", f"{EXCLUDE}=true {EXCLUDE}=0"):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        if flags is not None:
            monkeypatch.setenv("XLA_FLAGS", flags)
        with pytest.raises(RuntimeError, match=f"^arithmetic.* XLA_FLAGS={EXCLUDE}=tr"):
            lower_for(platform, "discrete")
    lower_for(platform, "real")
    lower_for("cpu", "discrete")
    for flag in (f"{EXCLUDE}=true", f"{DETERMINISTIC}=True", DETERMINISTIC):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false {flag}")
        lower_for(platform, "discrete")


@pytest.mark.slow
def test_the_order_of_additions_is_checked_where_the_sums_are_computed(monkeypatch):
    devices = []
    primitive = platforms._needs_one_order
    monkeypatch.setattr(primitive, "impl", lambda x: devices.append(x.devices()) or x)
    first, second = jax.devices()[:2]
    # Uncommitted arrays follow committed ones. A mask of the default device says
    # nothing about the device of the sums.
    params, batch = jax.device_put(
        ({"w": np.ones((7, 5), np.float32)}, np.ones((2, 5), np.float32)), second
    )

    def loss(p, x):
        return jnp.sum(p["w"] @ x)

    with jax.default_device(first):
        sums, _ = dpjax.clipped_grad(loss, 1.0, arithmetic="discrete")(params, batch)
    assert sums["w"].devices() == {second}
    assert devices == [{second}]


def near_a_power_of_two():
    """Gradients whose float32 sum passes 2,048 with one example only, and its slot.

    Small negative ones follow, of .75 of the distance 2⁻¹³ of floats below 2,048. Each
    is added as one such distance below it, and as none above it.
    """
    x = np.full(4096, -0.75 * 2.0**-13, np.float32)
    x[:2056] = 1 - 2.0**-8  # 2047.97 together, without rounding
    x[2056] = 3
    return x[:, None], 2056


def excess(arithmetic, clip_norm=1.0, micro=1):
    """How far beyond 1 the float sum moves."""
    total = jax.jit(
        lambda x, m: dpjax.clipped_grad(
            jnp.vdot, clip_norm, microbatch_size=micro, arithmetic=arithmetic
        )(np.ones(1, np.float32), x, mask=m)[0]
    )
    x, slot = near_a_power_of_two()
    mask = np.ones(x.size, bool)
    without = np.arange(x.size) != slot
    return distance(total(x, mask), total(x, without)) - 1


@pytest.mark.rounding
def test_a_float32_sum_moves_by_more_than_the_clip_norm():
    # 2,039 small gradients of 2⁻¹³ are added or not: a quarter of the clip norm.
    assert excess("real") > 0.2
    # All that arithmetic="discrete" reserves is not enough for a float32 sum.
    h = float64_sums.relative_error(None, 4096)
    assert 0.001 < h < 0.003
    assert excess("real", 1 / (1 + h)) > 0.2
    for micro in (1, 128, None):
        assert -2 * h < excess("discrete", micro=micro) <= 0


EXCLUDE, DETERMINISTIC = (
    f"--xla_gpu_{what}_ops" for what in ("exclude_nondeterministic", "deterministic")
)

# A small lattice, exhaustively: every input and every random word.

WIDTH, COLUMN_BITS, FIRST_BITS = (
    4,
    6,
    10,
)  # −32, ..., 31, and 2¹⁶ equally probable words


@pytest.fixture
def small_table(monkeypatch):
    """The module's own table for a width of 4, whose thresholds have 10 bits."""
    of_module = _discrete.alias_table
    of_module.cache_clear()
    # The first 26 bits of a threshold are packed with 6 of the alias; 32 and 48 follow.
    constants = {"WIDTH": WIDTH, "SCALE": 1, "_COLUMN_BITS": COLUMN_BITS}
    constants |= {"_COLUMNS": 2**COLUMN_BITS, "_THRESHOLD_BITS": FIRST_BITS}
    for name, value in constants.items():
        monkeypatch.setattr(_discrete, name, value)
    weights = _discrete.integer_weights()
    assert sum(weights) == 2 ** (COLUMN_BITS + FIRST_BITS)
    unused = 32 - COLUMN_BITS + 32 + 48 - FIRST_BITS
    monkeypatch.setattr(_discrete, "_THRESHOLD_BITS", FIRST_BITS + unused)
    monkeypatch.setattr(
        _discrete, "integer_weights", lambda: [w << unused for w in weights]
    )
    yield weights
    of_module.cache_clear()


def all_draws(monkeypatch):
    """The draw for each word that the table can tell apart, i32[2¹⁶]."""
    k = np.arange(2 ** (COLUMN_BITS + FIRST_BITS), dtype=np.uint32)
    column, first = k % 2**COLUMN_BITS, k >> COLUMN_BITS
    words = first << (32 - FIRST_BITS) | column

    def all_words(key, shape):
        del key
        return jnp.asarray(words), jnp.zeros(shape, jnp.uint32)

    monkeypatch.setattr(_discrete, "word_pairs", all_words)
    # Ties of the first bits are decided by the last bits of thresholds, all zero.
    monkeypatch.setattr(
        _discrete, "_compare_tied_draws", lambda key, below, tied, column: below
    )
    return np.asarray(jax.jit(lambda: _discrete.draw_table(KEY, words.shape))())


def histogram(numbers):
    values, counts = np.unique(numbers, return_counts=True)
    size = len(numbers)
    return {int(v): Fraction(int(c), size) for v, c in zip(values, counts, strict=True)}


def hockey_stick(p, q, factor):
    """Σ max(p − e^ε q, 0) exactly, for a rational factor e^ε."""
    return sum(max(p[z] - factor * q.get(z, 0), Fraction(0)) for z in p)


def gaussian_delta(mu, factor):
    with mpmath.workdps(40):
        epsilon = mpmath.log(mpmath.mpf(factor.numerator) / factor.denominator)
        upper = mpmath.ncdf(mu / 2 - epsilon / mu)
        return upper - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def total_variation(p, variance):
    with mpmath.workdps(40):
        masses = {
            z: mpmath.exp(-mpmath.mpf(z * z) / (2 * variance)) for z in range(-99, 100)
        }
        total = mpmath.fsum(masses.values())
        result = {z: mpmath.mpf(f.numerator) / f.denominator for z, f in p.items()}
        gaps = [abs(m / total - result.get(z, 0)) for z, m in masses.items()]
        return mpmath.fsum(gaps) / 2


def worst_excess(release, draws, variance, tau):
    """The largest exact δ(ε) less the stated one, over a grid of inputs and ε.

    The statement is that of one coordinate: a Gaussian mechanism of variance σ² − 4
    and sensitivity S + q, and (1 + e^ε) τ.
    """
    inputs = np.arange(-2, 2.01, 0.25)
    laws = {x: histogram(release(x, draws)) for x in inputs}
    worst = -1.0
    for x, y in itertools.permutations(inputs, 2):
        mu = (abs(x - y) + 1) / math.sqrt(variance - 4)
        for factor in (Fraction(1), Fraction(3, 2), Fraction(3), Fraction(8)):
            exact = hockey_stick(laws[x], laws[y], factor)
            stated = gaussian_delta(mu, factor) + (1 + float(factor)) * tau
            worst = max(worst, float(exact) - float(stated))
    return worst


@jax.jit
def _released(sums, draws):
    return _discrete._release(sums, draws, 0.5)


def released_integers(x, draws):
    """What the library releases for a sum of x lattice spacings, with each draw."""
    sums = np.full(draws.shape, x * 0.5, np.float32)
    return np.asarray(_released(sums, draws), float) / 0.5


def test_exact_delta_of_a_small_lattice(small_table, monkeypatch):
    draws = all_draws(monkeypatch)
    law = histogram(draws)
    expected = zip(range(-32, 32), small_table, strict=True)
    assert law == {z: Fraction(w, 2**16) for z, w in expected if w}
    tau = total_variation(law, WIDTH**2)
    assert tau < 2e-4  # 64 weights, rounded to 2⁻¹⁶
    assert worst_excess(released_integers, draws, WIDTH**2, tau) <= 0
    # The true sensitivity is reached: S alone, without rounding, would not do.
    assert worst_excess(released_integers, draws, WIDTH**2 + 10, 0) > 0


def test_broken_twins_of_a_small_lattice_are_found(small_table, monkeypatch):
    draws = all_draws(monkeypatch)
    tau = total_variation(histogram(draws), WIDTH**2)

    def not_rounded(x, draws):
        return np.round((x + draws) * 4)  # the input's fraction remains in the output

    assert worst_excess(not_rounded, draws, WIDTH**2, tau) > 0.5

    def depends_on_input(x, draws):
        return np.rint(x) + draws * (1 + (x > 0))  # noise of another width

    assert worst_excess(depends_on_input, draws, WIDTH**2, tau) > 0.01
    # A table whose thresholds are off by one in the last place has another law.
    table = _discrete.alias_table()
    off = table._replace(packed=table.packed + (1 << 22))
    monkeypatch.setattr(_discrete, "alias_table", lambda: off)
    assert histogram(all_draws(monkeypatch)) != histogram(draws)


# Batches, plans and their accounting.


@pytest.mark.parametrize("m", [3, 4])
def test_every_injection_into_slots_is_equally_probable(m):
    orders = math.factorial(m)
    size = 600 * orders
    batch = Batch(jnp.arange(m), jnp.arange(m) < m - 1)
    shuffled = jax.jit(jax.vmap(lambda step: loader._shuffle_slots(batch, step, KEY)))(
        np.arange(size)
    )
    indices, masks = (np.asarray(x) for x in shuffled)
    assert np.all(np.sort(indices) == np.arange(m))
    assert np.all(masks == (indices < m - 1))  # examples move with their masks
    _, counts = np.unique(indices @ m ** np.arange(m), return_counts=True)
    assert counts.size == orders
    statistic = np.sum((counts - 600) ** 2 / 600)
    # Chi-square with 5 or 23 degrees of freedom: above 90 with probability 9e-10.
    assert statistic < 90


def test_batches_with_and_without_an_example_differ_in_one_slot():
    # The coupling, exactly: leaving one of k examples out of a uniformly random
    # injection gives every injection of the others equally often.
    m, k = 5, 3
    without = [order[: k - 1] for order in itertools.permutations(range(m), k)]
    expected = list(itertools.permutations(range(m), k - 1))
    assert sorted(without) == sorted(expected * (m - k + 1))


class _Items:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return np.float32(range(100)[i])


def test_examples_of_data_sets_stay_in_their_random_slots():
    indices = np.array([0, 7, 0, 0, 93, 41], np.int32)
    mask = np.array([0, 1, 0, 0, 1, 1], bool)
    examples = loader._read_items(_Items(), Batch(indices, mask))
    np.testing.assert_array_equal(examples.mask, mask)
    np.testing.assert_array_equal(examples.data[mask], [7, 93, 41])


@pytest.mark.parametrize("dimension", [1, 10**4, 10**9])
@pytest.mark.parametrize("z", [0.5, 3.0, 40.0])
def test_noise_covers_the_rounded_sums(dimension, z):
    drawn = _discrete.lattice_noise(2.0, z, dimension, maximum=z)
    q = Fraction(float(noise.lattice_spacing(*drawn)))
    # The table's σ² is 512² (1 + 256² + ...), and 4 of it makes up for the rounding.
    variance = 512**2 * sum(256 ** (2 * i) for i in range(drawn.draws)) - 4
    with mpmath.workdps(40):
        reach = 2 + mpmath.sqrt(dimension) * (1 + mpmath.mpf(2) ** -11) * (
            mpmath.mpf(q.numerator) / q.denominator
        )
        held = mpmath.sqrt(variance) * q.numerator / q.denominator
        assert z * reach <= held <= z * reach * (1 + 1e-5)


def test_delta_of_a_lattice_includes_its_total_variation():
    tau, mu = 1e-11, 0.7
    profile = profiles.LatticeProfile(profiles.Gaussian(mu), tau)
    for epsilon in (0.0, 0.5, 2.0, 5.0):
        with mpmath.workdps(40):
            ideal = gaussian_delta(mpmath.mpf(mu), _exponential(epsilon))
            exact = float(ideal + (1 + mpmath.exp(epsilon)) * tau)
        assert exact <= float(profile.delta(epsilon)) <= exact * (1 + 1e-4) + 1e-30
    for delta in (1e-3, 1e-5):
        epsilon = float(profile.epsilon(delta))
        ideal = gaussian_delta(mpmath.mpf(mu), _exponential(epsilon))
        assert float(ideal + (1 + mpmath.exp(epsilon)) * tau) <= delta
        assert epsilon < float(profile.gaussian.epsilon(delta)) * 1.001
    assert profile.epsilon(1e-10) == math.inf


def test_a_delta_below_the_total_variation_is_refused():
    settings = {"num_examples": 99, "batch_size": 9, "num_steps": 5, "clip_norm": 0.7}
    settings |= {"epsilon": 1.0, "sampling": "fixed", "arithmetic": "discrete"}
    make = functools.partial(dpjax.plan, **settings, adjacency=dpjax.Adjacency.REPLACE)
    assert 0 < make(delta=6e-14).epsilon <= 1.0
    with pytest.raises(ValueError, match="delta must be at least 5.7e-14"):
        make(delta=5e-14)


def _exponential(epsilon):
    with mpmath.workdps(40):
        return Fraction(str(mpmath.exp(mpmath.mpf(epsilon))))


def test_a_run_with_too_many_draws_is_refused():
    _discrete.check_draws(2**20, 2**28)
    with pytest.raises(ValueError, match="50"):
        _discrete.check_draws(2**30, 2**20)
    tx = dpjax.correlated_noise(
        strategies.geometric(0.9), 1.0, num_steps=2**20, key=KEY, arithmetic="discrete"
    )
    shape = jax.ShapeDtypeStruct((2**30,), jnp.float32)
    with pytest.raises(ValueError, match="50"):
        jax.eval_shape(tx.init, shape)


@pytest.mark.parametrize("slots", [2, 37, 5000])
def test_the_count_of_a_quantile_clip_is_exact(slots):
    from dpjax._plan.optimizer import _truncate

    for weight in (0.3, 1 / 3, 0.99999994, 1e-3):
        held = _truncate(weight, 22 - slots.bit_length())
        assert weight * (1 - 2.0 ** -(21 - slots.bit_length())) <= held <= weight
        counts = np.arange(-slots, slots + 1, dtype=np.float32) / 2
        product = counts * np.float32(held)
        assert all(
            Fraction(float(p)) == Fraction(float(c)) * Fraction(held)
            for p, c in zip(product[::7], counts[::7], strict=True)
        )


# Correlated noise.

STEPS, SHAPE = 21, (3,)
STRATEGIES = {
    "geometric": strategies.geometric(0.9),
    "banded": strategies.banded([1.0, 0.5, -0.3, 0.2]),
    "banded_inverse": strategies.banded_inverse([1.0, -0.6, 0.25]),
    "rational": strategies.rational([0.3, 0.8], [0.95, 0.5]),
    "tree": strategies.tree(0.9),
    "scaled": strategies.scaled(
        strategies.geometric(0.9), 2.0 ** np.linspace(-1, 2, STEPS).round()
    ),
}


def dense_matrix(name, steps=STEPS):
    """C as exact fractions, by its definition and not by the library's streams."""
    strategy = STRATEGIES[name]
    if name == "tree":
        # C⁻¹: step t subtracts β^{2^i} times the latest node of each level i below its.
        inverse = [[Fraction(int(i == j)) for j in range(steps)] for i in range(steps)]
        weights = streaming.tree_weights(strategy.decay, steps)
        for t in range(1, steps + 1):
            for i in range(min((t & -t).bit_length() - 1, len(weights))):
                inverse[t - 1][t - 2**i - 1] = Fraction(float(weights[i]))
    else:
        toeplitz = strategy.strategy if name == "scaled" else strategy
        n, d = ([Fraction(1), *map(Fraction, map(float, x))] for x in toeplitz)
        row = []  # the coefficients of D / N
        for k in range(steps):
            term = d[k] if k < len(d) else Fraction(0)
            row.append(
                term - sum(n[i] * row[k - i] for i in range(1, min(k + 1, len(n))))
            )
        inverse = [
            [row[i - j] if i >= j else Fraction(0) for j in range(steps)]
            for i in range(steps)
        ]
    c = [[Fraction(0)] * steps for _ in range(steps)]
    for j in range(steps):
        for i in range(steps):
            known = sum(inverse[i][k] * c[k][j] for k in range(j, i))
            c[i][j] = (int(i == j) - known) / inverse[i][i]
    if name == "scaled":
        factors = [Fraction(float(f)) for f in strategy.factors]
        c = [[x / factors[j] for j, x in enumerate(row)] for row in c]
    return c


def bad_sums(kind, most):
    rng = np.random.default_rng(3)
    if kind == "alternating":
        sums = np.outer((-1.0) ** np.arange(STEPS), np.full(3, most * (1 - 2.0**-40)))
    elif kind == "spread":
        sums = (
            most
            * rng.uniform(-1, 1, (STEPS, 3))
            * 2.0 ** rng.integers(-30, 1, (STEPS, 3))
        )
    else:
        sums = np.full((STEPS, 3), most / 3)
    return sums


@pytest.mark.parametrize("name", STRATEGIES)
def test_recursion_on_sums_is_exact_to_its_stated_rounding(name):
    strategy, c = STRATEGIES[name], dense_matrix(name)
    stream = streaming.forward_stream(strategy, STEPS)
    gain, most = streaming.rounding_gain(strategy, STEPS), 2.0**40
    with jax.enable_x64(True):

        @jax.jit
        def run(sums):
            def step(memory, x):
                t, s = x
                return stream.generate(lambda _: s, t, memory)[::-1]

            memory = jnp.zeros((stream.rows, 3))
            return jax.lax.scan(step, memory, (jnp.arange(1, STEPS + 1), sums))[1]

        for kind in ("alternating", "spread", "constant"):
            sums = bad_sums(kind, most)
            rows = np.asarray(run(sums))
            for i in range(STEPS):
                for j in range(3):
                    exact = sum(c[i][k] * Fraction(sums[k, j]) for k in range(i + 1))
                    off = abs(Fraction(rows[i, j]) - exact)
                    assert off <= Fraction(gain) * Fraction(most) / 2**53


def correlated(name, num_steps=STEPS, stddev=1.0):
    return dpjax.correlated_noise(
        STRATEGIES[name], stddev, num_steps=num_steps, key=KEY, arithmetic="discrete"
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if x == "rational" else [pytest.mark.matrix])
        for x in STRATEGIES
    ],
)
def test_correlated_releases_are_integers_of_the_lattice_after_the_strategy(name):
    tx, q = correlated(name), float(noise.lattice_spacing(1.0, 3))
    c = np.array([[float(x) for x in row] for row in dense_matrix(name)])
    with jax.enable_x64(True):
        size = 4000

        @jax.jit
        def run(sums):
            def step(state, s):
                out, state = tx.update(s, state)
                return state, out

            return jax.lax.scan(step, tx.init(sums[0]), sums)[1]

        sums = np.random.default_rng(0).standard_normal((STEPS, size)) * 100
        released = np.asarray(run(sums))
        numbers = c @ released / q
        # Float64 rounds a number below 2⁴⁰ with a gain of less than 2⁸ by 2⁻⁵ at most.
        assert np.max(np.abs(numbers)) < 2**40
        assert np.max(np.abs(numbers - np.rint(numbers))) < 2.0**-5
        # Without C⁻¹ the noise is white: z = 5.5 for each of 231 products.
        z = c @ (released - sums)
        covariance = z @ z.T / size
        off = np.abs(covariance - np.eye(STEPS)) * math.sqrt(size / 2)
        # False alarm below 231 · 4e-8 for each strategy.
        assert np.max(off) < 5.5


@pytest.mark.matrix
def test_correlated_state_has_no_float64_and_refuses_further_steps():
    tx = correlated("geometric", 3)
    params = {"w": np.zeros((4, 5), np.float32), "v": np.zeros(2, np.float32)}
    update = jax.jit(tx.update, donate_argnums=1)
    state, outputs = jax.jit(tx.init)(params), []
    for _ in range(5):
        out, state = update(params, state)
        outputs.append(np.asarray(out["w"]))
        assert all(x.dtype.itemsize <= 4 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                   for x in jax.tree.leaves(state))  # fmt: skip
        assert out["w"].dtype == jnp.float32
    assert all(np.all(np.isfinite(x)) for x in outputs[:3])
    assert all(np.all(np.isnan(x)) for x in outputs[3:])


@pytest.mark.matrix
def test_correlated_noise_on_a_mesh_is_that_of_one_device():
    """Independent noise is in `test_placement`."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = correlated("geometric")
    sums = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    run = jax.jit(lambda s: tx.update(s, tx.init(s))[0])
    spread = jax.device_put(sums, jax.NamedSharding(mesh, jax.P("x")))
    np.testing.assert_array_equal(run(spread), run(sums))


def test_plan_refuses_a_strategy_whose_recursion_rounds_too_much():
    strategy = strategies.rational([0.5, 0.6], [0.9999, 0.999])
    assert noise.lattice_roundings(strategy, 1000) > 1e6
    plan = dpjax.plan(
        num_examples=100,
        batch_size=10,
        num_steps=1000,
        noise_multiplier=1.0,
        delta=1e-5,
        clip_norm=1.0,
        sampling="fixed",
        adjacency=dpjax.Adjacency.ZERO_OUT,
        noise="correlated",
        strategy=strategy,
        arithmetic="discrete",
    )
    with pytest.raises(ValueError, match="must be smaller for a lattice"):
        plan.optimizer(optax.sgd(0.1), key=KEY).init(jnp.zeros(1000))
