"""Private statistics: sensitivities, noise, values, events, and arguments."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

import dpjax
from dpjax import Adjacency, auditing, statistics
from dpjax.accounting import events, gdp, profiles
from dpjax.statistics import _moments, _release

KEY = jax.random.wrap_key_data(np.array([0, 23], np.uint32))
NAN = np.full(3, np.nan)
# Norms 1, 1/2, 4 (clipped), and rows that are not finite.
ROWS = np.array(
    [
        *([1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0.6, -0.8, 0], [-0.5, 0.75**0.5, 0]),
        *([0.3, 0, 0.4], [4, 0, 0], [0, 0, 0], [np.inf, 0, 0], NAN),
    ]
)
C = 3.0  # a clip norm that is not 1
RELEASES = {
    "sum": functools.partial(statistics.sum, clip_norm=C),
    "mean": functools.partial(statistics.mean, clip_norm=C, num_examples=7),
    "variance": functools.partial(statistics.variance, clip_norm=C, num_examples=7),
    "variance about a center": functools.partial(
        statistics.variance, clip_norm=C, num_examples=7, center=0.0
    ),
    "covariance": functools.partial(statistics.covariance, clip_norm=C, num_examples=7),
    "covariance about a center": functools.partial(
        statistics.covariance, clip_norm=C, num_examples=7, center=np.zeros(3)
    ),
    "histogram": lambda x, **k: statistics.histogram(
        x[:, 0], edges=[-1, 0, 0.5, 2], **k
    ),
    "quantile": lambda x, **k: statistics.quantile(
        x[:, 0], [0.1, 0.5], lower=-2, upper=2, num_steps=3, **k
    ),
    "loss": lambda x, **k: statistics.loss(x[:, 0], bound=0.7, num_examples=7, **k),
    "accuracy": lambda x, **k: statistics.accuracy(
        x[:, 0] > 0, x[:, 1] > 0, num_examples=7, **k
    ),
    "auc": lambda x, **k: statistics.auc(
        x[:, 0], x[:, 1] > 0, edges=[-1, 0, 0.5, 1], **k
    ),
}
# μ times the noise multiplier under REPLACE; it is 1 under the other adjacencies.
REPLACED = {
    "sum": 2,
    "mean": 2,
    "variance": 1.5,
    "covariance": 1.5,
    "loss": 2,
    "accuracy": 2,
    "histogram": 2**0.5,
    "auc": 2**0.5,
    "variance about a center": 2**0.5,
    "covariance about a center": 2**0.5,
    "quantile": 2**0.5 / math.hypot(0.9, 0.5),
}


def sums_in_units(name, monkeypatch, batches):
    """The sums that a statistic would add noise to, for each batch, f64[b, k].

    A statistic that asks for several noisy sums gets the same noise alone for all
    batches, so that its later sums have the same thresholds.
    """

    def spied(statistic_name, statistic, data, params, key, stddev, *static):
        sums_ = []

        class Spy(_release.Noise):
            def __call__(self, sums, step=0):
                sums_.append(sums)
                return jnp.zeros_like(sums) + (-1.0) ** len(sums_)

        def widen(x):
            return jnp.asarray(x).astype(jnp.float64)

        data, params = jax.tree.map(widen, (data, params))
        with jax.disable_jit():  # a scan is a loop in Python
            statistic(data, params, Spy(key, widen(stddev), "real"))
        return jnp.concatenate([x.reshape(-1) for x in sums_])

    monkeypatch.setattr(_release, "_run", spied)

    def of_batch(batch):
        terms = {"noise_multiplier": 1.0, "key": KEY, "adjacency": Adjacency.ADD_REMOVE}
        return RELEASES[name](batch, **terms).value

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(of_batch))(batches))


@pytest.mark.parametrize("name", RELEASES)
def test_sums_never_move_farther_than_the_event_says(name, monkeypatch):
    """Over all pairs of examples, beside others, for each adjacency."""
    rng = np.random.default_rng(1)
    others = C * rng.normal(size=(4, 3)) / 2
    # A row of NaN contributes zero: it stands for no example.
    rows = C * np.concatenate([NAN[None], ROWS, rng.normal(size=(6, 3))])
    batches = np.array([np.concatenate([others, row[None]]) for row in rows])
    # In units of the largest contribution; the quantile has three sums.
    sums = sums_in_units(name, monkeypatch, batches)
    sums = sums / math.sqrt(3 if name == "quantile" else 1)
    distances = np.linalg.norm(sums[1:] - sums[0], axis=1)
    between = np.linalg.norm(sums[:, None] - sums[None, :], axis=2)
    if name in ("loss", "accuracy"):  # there a NaN is the worst loss
        distances = distances / 2
    assert distances.max() <= 1
    assert between.max() <= REPLACED[name]
    # Rows attain the bounds, but for the slack of clipping, and where the proof of the
    # bound for the variance is not tight. Quantiles of all thresholds do not at once.
    attained = {"variance": 0.95, "quantile": 0.75}.get(name, 0.99)
    assert distances.max() >= attained
    assert between.max() >= attained * REPLACED[name]


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["variance", "covariance"])
def test_a_center_can_be_a_list(name):
    data = np.array([[0.5, -0.2], [0.1, 0.3]], np.float32)

    def release(center):
        return getattr(statistics, name)(
            data,
            clip_norm=1.0,
            noise_multiplier=2.0,
            key=KEY,
            adjacency=Adjacency.REPLACE,
            center=center,
        ).value

    expected = release(np.array([0.1, 0.2], np.float32))
    np.testing.assert_array_equal(release([0.1, 0.2]), expected)


@pytest.mark.parametrize(
    "arithmetic", ["real", pytest.param("discrete", marks=pytest.mark.slow)]
)
def test_noise_has_the_stated_scale(arithmetic):
    keys = jax.random.split(KEY, 4_000)
    x = np.array([0.5, -0.2], np.float32)
    shared = {"adjacency": Adjacency.ZERO_OUT, "arithmetic": arithmetic}
    z, n = 1.7, 2

    @jax.jit
    @jax.vmap
    def draw(key):
        result = {
            "mean": statistics.mean(
                x, clip_norm=C, noise_multiplier=z, key=key, **shared
            ),
            "variance": statistics.variance(
                x, clip_norm=C, noise_multiplier=z, key=key, center=0.0, **shared
            ),
            "covariance": statistics.covariance(
                np.eye(2),
                clip_norm=C,
                noise_multiplier=z,
                key=key,
                center=0.0,
                **shared,
            ),
            "histogram": statistics.histogram(
                x, edges=[-1, 0, 1], noise_multiplier=z, key=key, **shared
            ),
            "loss": statistics.loss(x, bound=C, noise_multiplier=z, key=key, **shared),
        }
        return {name: r.value for name, r in result.items()}

    result = {name: np.asarray(x, float) for name, x in draw(keys).items()}
    off = C**2 * z / (n * 2**0.5)
    expected = {
        "mean": (x.mean(), C * z / n),
        "variance": (np.mean(x**2), C**2 * z / n),
        "covariance": (
            np.eye(2) / 2,
            np.array([[C**2 * z / n, off], [off, C**2 * z / n]]),
        ),
        "histogram": (np.ones(2), z),
        "loss": (0.25, C / 2 * z / n),
    }
    # The noise of the lattice is larger, by what rounding adds.
    slack = 1e-4 if arithmetic == "discrete" else 0
    for name, (center, stddev) in expected.items():
        stddev = np.broadcast_to(stddev, np.shape(center))
        mean, spread = result[name].mean(0), result[name].std(0)
        # z = 5.5 in 22 comparisons for each arithmetic: false alarms below 2e-6.
        assert np.all(
            np.abs(mean - center) <= 5.5 * stddev / math.sqrt(len(keys)) + 1e-5
        )
        error = 5.5 / math.sqrt(2 * len(keys))
        assert np.all(np.abs(spread / stddev - 1) <= error + slack)
    if arithmetic == "discrete":
        spacing = dpjax.noise.lattice_spacing(z * (1 + 1e-4))
        assert np.all(np.abs(result["histogram"]) < 2**23 * spacing)


@pytest.mark.parametrize("arithmetic", ["real", "discrete"])
def test_noise_of_a_bisection_grows_with_its_steps(arithmetic):
    def is_in_lower_half(key):
        released = statistics.quantile(
            [0.1, 0.1, 0.1], 0.5, lower=0.0, upper=1.0, num_steps=16,
            noise_multiplier=1.0, key=key, adjacency=Adjacency.REPLACE,
            arithmetic=arithmetic,
        )  # fmt: skip
        return released.value < 0.5

    keys = jax.random.split(KEY, 2_000)
    result = np.asarray(jax.jit(jax.vmap(is_in_lower_half))(keys)).mean()
    # The first count is 3 / 2, with noise of standard deviation 1/2 · √16.
    expected = 0.5 + 0.5 * math.erf(1.5 / 2 / math.sqrt(2))
    # z = 5.5: a false alarm below 4e-8 for each arithmetic.
    error = 5.5 * math.sqrt(expected * (1 - expected) / len(keys))
    assert abs(result - expected) < error


def test_estimates_are_unbiased_and_agree_with_numpy_at_little_noise():
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, size=(3_000, 3)) @ np.array(
        [[1, 0.5, 0], [0, 1, 0], [0.2, 0, 0.3]]
    )

    def released(z, key):
        shared = {
            "noise_multiplier": z,
            "key": key,
            "adjacency": Adjacency.REPLACE,
            "clip_norm": C,
        }
        result = (
            statistics.mean(x, **shared),
            statistics.variance(x, **shared),
            statistics.covariance(x, **shared),
        )
        return [r.value for r in result]

    exact = [x.mean(0), x.var(0), np.cov(x.T, ddof=0)]
    run = jax.jit(jax.vmap(released, (None, 0)))
    quiet = run(1e-3, KEY[None])
    for got, true in zip(quiet, exact, strict=True):
        # Noise below 1e-3 sqrt(2) C² / n = 5e-6, at z = 6; the float32 of the data.
        np.testing.assert_allclose(got[0], true, atol=4e-5)
    # The square of a noisy mean is too large on average by its variance, which at this
    # noise is 2 (200 C / n)² = .08: more than 6 errors of the mean over keys.
    loud = run(200.0, jax.random.split(KEY, 5_000))
    for got, true in zip(map(np.asarray, loud), exact, strict=True):
        spread = got.std(0) / math.sqrt(5_000)
        assert np.all(np.abs(got.mean(0) - true) <= 6 * spread)
        assert np.all(spread < 0.013)


def test_counts_and_quantiles_agree_with_numpy_at_little_noise():
    rng = np.random.default_rng(4)
    x = rng.normal(size=2_001)
    shared = {"noise_multiplier": 1e-3, "key": KEY, "adjacency": Adjacency.ADD_REMOVE}
    edges = np.array([-2, -0.5, 0.25, 3])
    x[:4] = [-2, 3, 0.25, 7]  # on the edges, and outside
    counts = statistics.histogram(x, edges=edges, **shared).value
    assert np.array_equal(np.rint(counts), np.histogram(x, edges)[0])
    counts = statistics.histogram([0, 2, 2, 5, -1], num_categories=3, **shared).value
    assert np.array_equal(np.rint(counts), [1, 0, 2])
    shares = [0.1, 0.5, 0.95]
    result = statistics.quantile(
        x, shares, lower=-8.0, upper=8.0, num_steps=20, **shared
    ).value
    np.testing.assert_allclose(
        result, np.quantile(x, shares, method="inverted_cdf"), atol=17 / 2**20
    )
    low, high = (
        statistics.quantile(x, 0.5, lower=a, upper=b, num_steps=20, **shared).value
        for a, b in ((5.0, 6.0), (-6.0, -5.0))
    )
    assert low.shape == ()
    np.testing.assert_allclose([low, high], [5.0, -5.0], atol=1e-5)


def test_evaluation_agrees_with_scikit_learn_at_little_noise():
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 500)
    scores = np.round(rng.normal(size=500) + labels, 1)
    shared = {"noise_multiplier": 1e-3, "key": KEY, "adjacency": Adjacency.REPLACE}
    # One value of the scores in each bin, so that ties are the same.
    edges = np.arange(-60, 61) / 10 + 0.05
    area = statistics.auc(scores, labels, edges=edges, **shared).value
    np.testing.assert_allclose(area, roc_auc_score(labels, scores), atol=1e-4)
    right = statistics.accuracy(scores > 0.5, labels, **shared).value
    np.testing.assert_allclose(right, np.mean((scores > 0.5) == labels), atol=2e-5)
    losses = np.array([0.2, 5.0, np.inf, np.nan, -1.0, -np.inf])
    value = statistics.loss(losses, bound=2.0, **shared).value
    np.testing.assert_allclose(value, (0.2 + 2 + 2 + 2) / 6, atol=2e-3)


def test_standardization_centers_and_scales_features():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(20_000, 3)) * [0.3, 0.05, 0.1] + [0.5, 0, -0.2]
    released = statistics.standardize(
        x, clip_norm=4.0, noise_multiplier=0.01, key=KEY, adjacency=Adjacency.REPLACE
    )
    standard = np.asarray(released.value(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(standard.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(standard.std(0), 1, atol=0.01)
    assert released.event == events.Gaussian(200.0)
    loud = statistics.standardize(
        x, clip_norm=4.0, noise_multiplier=1e6, key=KEY, adjacency=Adjacency.REPLACE
    )
    # Where noise drowns the variance, the scale is that of the noise: z C² / (n √2)
    # for half of μ² and the factor √2 in place of 2.
    least = 1e6 * 2**0.5 / 2**0.5 * 16 / 20_000
    assert np.all(loud.value.scale >= math.sqrt(least) * (1 - 1e-6))


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
def test_center_and_scale_share_the_cost_of_standardization(adjacency, monkeypatch):
    mus = []

    def spied(function):
        def run(*args, **kwargs):
            released = function(*args, **kwargs)
            mus.append(released.event.mu)
            return released

        return run

    for name in ("mean", "variance"):
        monkeypatch.setattr(_moments, name, spied(getattr(statistics, name)))
    terms = {"clip_norm": C, "noise_multiplier": 1.9, "key": KEY, "share": 0.3}
    released = statistics.standardize(ROWS, adjacency=adjacency, **terms)
    total = Fraction(released.event.mu) ** 2
    parts = [Fraction(mu) ** 2 for mu in mus]
    assert sum(parts) <= total <= sum(parts) * (1 + Fraction(1, 10**13))
    assert abs(parts[0] / total - Fraction(3, 10)) < 1e-12


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_events_are_those_of_the_gaussian_mechanism(adjacency):
    for name, release in RELEASES.items():
        event = jax.eval_shape(
            lambda release=release: release(
                ROWS, noise_multiplier=1.3, key=KEY, adjacency=adjacency
            )
        ).event
        factor = REPLACED[name] if adjacency is Adjacency.REPLACE else 1
        assert factor / 1.3 * (1 - 1e-15) <= event.mu <= factor / 1.3 * (1 + 1e-11), (
            name
        )
    expected = gdp.epsilon(factor / 1.3, 1e-5)
    np.testing.assert_allclose(profiles.of(event).epsilon(1e-5), expected, rtol=1e-6)


def test_discrete_events_count_all_draws():
    event = statistics.quantile(
        ROWS[:, 0], [0.2, 0.5], lower=0, upper=1, num_steps=5, noise_multiplier=2.0,
        key=KEY, adjacency=Adjacency.ZERO_OUT, arithmetic="discrete",
    ).event  # fmt: skip
    # Two draws for each of five sums of two numbers, each within 2⁻⁹⁷, times two.
    assert event == events.OnLattice(events.Gaussian(0.5), 2 * 2 * 5 * 2 * 2.0**-97)
    assert profiles.of(event).epsilon(1e-5) >= gdp.epsilon(0.5, 1e-5)


def test_released_passes_through_jit_without_rounding_its_event():
    def release(x, z):
        return statistics.sum(
            x, clip_norm=C, noise_multiplier=z, key=KEY, adjacency=Adjacency.REPLACE
        )

    fixed = jax.jit(lambda x: release(x, 3.7))(jnp.ones(3))
    # The quotient 2 / 3.7 is rounded down.
    assert fixed.event == events.Gaussian(math.nextafter(2 / 3.7, 1))
    traced = jax.jit(release)(jnp.ones(3), 3.7)
    assert 2 / float(np.float32(3.7)) <= traced.event.mu <= 2 / 3.7 * (1 + 3e-7)
    # The noise, at most four deviations here, differs by the same factor.
    np.testing.assert_allclose(traced.value, fixed.value, atol=4 * 3.7 * C * 3e-7)


@pytest.mark.matrix
def test_values_agree_for_kinds_of_data():
    def release(x):
        return statistics.mean(
            x, clip_norm=C, noise_multiplier=0.5, key=KEY, adjacency=Adjacency.ZERO_OUT
        ).value

    x = np.array([[1, 0, 1], [0, 1, 0]])
    expected = release(x)
    assert expected.dtype == jnp.float32
    kinds = [x.tolist(), pd.DataFrame(x), x.astype(bool), x.astype(np.float64)]
    kinds += [jnp.asarray(x, jnp.bfloat16), jnp.asarray(x, jnp.float16)]
    for kind in kinds:
        assert np.array_equal(release(kind), expected)
    np.testing.assert_array_equal(jax.jit(release)(jnp.asarray(x)), expected)
    with jax.enable_x64(True):
        wide = release(x)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, expected, rtol=1e-6)


def test_rows_that_are_not_finite_contribute_zero():
    def released(name, rows):
        return RELEASES[name](
            rows, noise_multiplier=0.0, key=KEY, adjacency=Adjacency.ADD_REMOVE
        ).value

    for name in ("sum", "covariance", "histogram", "quantile"):
        with_nan = np.concatenate([ROWS[:4], np.array([NAN, [np.nan, 0.1, 1]])])
        np.testing.assert_array_equal(
            released(name, with_nan),
            released(name, np.concatenate([ROWS[:4], [NAN] * 2])),
        )
    np.testing.assert_allclose(released("sum", with_nan), ROWS[:4].sum(0), atol=1e-5)


def test_blocks_of_rows_give_the_same_sum(monkeypatch):
    x = np.random.default_rng(8).normal(size=(23, 3))

    def total():
        return np.asarray(
            jax.jit(lambda x: _release.sum_exactly(lambda rows: rows / 8, x))(x)
        )

    with jax.enable_x64(True):
        once = total()
        monkeypatch.setattr(_release, "_BLOCK", 12)
        assert np.array_equal(once, total())
    expected = np.trunc(x / 8 * 2**32).sum(0) / 2**32
    assert np.array_equal(once, expected)


@pytest.mark.diagonal
@pytest.mark.parametrize("axis", list(jax.sharding.AxisType)[:2])
def test_values_are_identical_on_a_mesh(axis, monkeypatch):
    monkeypatch.setattr(_release, "_BLOCK", 24)  # several blocks of rows
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis,))
    x = np.random.default_rng(10).normal(size=(64, 3)).astype(np.float32)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
    terms = {"noise_multiplier": 0.5, "key": KEY, "adjacency": Adjacency.ZERO_OUT}

    def values(x):
        return (
            statistics.covariance(x, clip_norm=C, **terms).value,
            statistics.histogram(x[:, 0], edges=[-1, 0, 1], **terms).value,
        )

    once, again = jax.jit(values)(x), jax.jit(values)(sharded)
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


def test_functions_of_one_key_have_separate_noise():
    zeros = np.zeros((2, 1))
    shared = {
        "noise_multiplier": 1.0,
        "key": KEY,
        "adjacency": Adjacency.ZERO_OUT,
        "num_examples": 1,
    }
    clipped = shared | {"clip_norm": 1.0}
    counted = {k: v for k, v in shared.items() if k != "num_examples"}

    def noises():
        standard = statistics.standardize(zeros, **clipped).value
        released = [
            statistics.mean(zeros, **clipped),
            statistics.sum(zeros, clip_norm=1.0, **counted),
            statistics.variance(zeros, center=0.0, **clipped),
            statistics.covariance(zeros, center=0.0, **clipped),
            statistics.histogram([5.0], num_categories=1, **counted),
        ]
        loss = statistics.loss(np.ones(2), bound=2.0, **shared).value - 1
        accuracy = 2 * (statistics.accuracy([0, 0], [0, 1], **shared).value - 0.5)
        result = [r.value.reshape(()) for r in released]
        return jnp.stack([*result, loss, accuracy, standard.center[0] / 2**0.5])

    result = np.abs(np.asarray(jax.jit(noises)()))
    gaps = np.abs(result[:, None] - result[None]) + np.eye(len(result))
    # Eight independent normals: two within 1e-4 with probability 2e-3 in all.
    assert gaps.min() > 1e-4


INVALID = {
    "clip_norm": (statistics.mean, {"clip_norm": 0.0}),
    "noise_multiplier": (statistics.mean, {"noise_multiplier": -1.0}),
    "key": (statistics.mean, {"key": 3}),
    "adjacency": (statistics.mean, {"adjacency": "replace"}),
    "arithmetic": (statistics.mean, {"arithmetic": "exact"}),
    "num_examples": (statistics.mean, {"adjacency": Adjacency.ADD_REMOVE}),
    "data": (statistics.mean, {"data": [["a"], ["b"]]}),
    "share": (statistics.standardize, {"share": 1.0}),
    "2 axes": (statistics.covariance, {"data": np.zeros(3)}),
    "num_examples must be positive": (statistics.variance, {"num_examples": 0}),
}


@pytest.mark.parametrize("words", INVALID)
def test_invalid_argument_raises(words):
    function, changed = INVALID[words]
    valid = {
        "data": np.zeros((3, 2)),
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "key": KEY,
        "adjacency": Adjacency.REPLACE,
    }
    with pytest.raises(ValueError, match=words):
        function(**(valid | changed))


def test_invalid_counts_raise():
    shared = {"noise_multiplier": 1.0, "key": KEY, "adjacency": Adjacency.REPLACE}
    x = np.zeros(3)
    with pytest.raises(ValueError, match="one of edges and num_categories"):
        statistics.histogram(x, **shared)
    with pytest.raises(ValueError, match="edges must be increasing"):
        statistics.histogram(x, edges=[0, 0, 1], **shared)
    with pytest.raises(ValueError, match="lower and upper"):
        statistics.quantile(x, 0.5, lower=1.0, upper=0.0, **shared)
    with pytest.raises(ValueError, match="shares"):
        statistics.quantile(x, 1.0, lower=0.0, upper=1.0, **shared)
    with pytest.raises(ValueError, match="the same length"):
        statistics.accuracy(x, np.zeros(2), **shared)
    discrete = shared | {"arithmetic": "discrete", "noise_multiplier": 1e-7}
    with pytest.raises(ValueError, match="must have at most 0 rows"):
        statistics.histogram(x, num_categories=2, **discrete)


@pytest.mark.parametrize(
    "arithmetic", ["real", pytest.param("discrete", marks=pytest.mark.slow)]
)
def test_likelihood_ratio_attacks_stay_below_the_event(arithmetic):
    """The best attack on a mean and a histogram proves most of μ, and no more."""
    keys = jax.random.split(jax.random.fold_in(KEY, 1), 16_000)
    shared = {"adjacency": Adjacency.REPLACE, "arithmetic": arithmetic}
    direction = np.array([0.6, 0.8])

    def scores(key, x, y):
        mean = statistics.mean(x, clip_norm=C, noise_multiplier=1.5, key=key, **shared)
        counts = statistics.histogram(
            y, num_categories=3, noise_multiplier=1.5, key=key, **shared
        )
        bins = counts.value[1] - counts.value[0]
        return jnp.stack([mean.value @ direction, bins]), (mean, counts)

    run = jax.jit(jax.vmap(scores, (0, None, None)))
    rows = 9 * direction
    inside, result = run(keys[::2], np.stack([rows, -rows]), np.array([1, 2]))
    outside, _ = run(keys[1::2], np.stack([-rows, -rows]), np.array([0, 2]))
    for i, released in enumerate(result):
        event = released.event
        mu = event.event.mu if arithmetic == "discrete" else event.mu
        lower = auditing.gaussian_mu_lower(
            inside[:, i], outside[:, i], confidence=1 - 1e-6
        )
        assert 0.88 * mu < lower <= mu
