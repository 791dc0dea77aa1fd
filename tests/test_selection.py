"""The best of several runs: laws of their number, bounds, attacks and tuning."""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

import dpjax
from dpjax import Adjacency
from dpjax.accounting import events, gdp, pld, profiles, selection
from dpjax.accounting._selected import Selected

LAWS = [
    selection.Geometric(10.0),
    selection.Logarithmic(3.9),
    selection.Poisson(3.0),
    selection.TruncatedNegativeBinomial(-0.6, 4.0),
    selection.TruncatedNegativeBinomial(2.5, 7.0),
    selection.Fixed(3),
]
RANDOM = LAWS[:-1]
DELTA = 1e-5
# A base mechanism with ε = 1.
RUN = events.Gaussian(float(gdp.mu(1.0, DELTA)))
KEY = jax.random.wrap_key_data(np.array([0, 8], np.uint32))  # key(8), not compiled


@pytest.fixture(scope="module")
def attacks(import_benchmark):
    """Lower bounds by attacks on searches."""
    return import_benchmark("_search_bounds")


def first_probabilities(law, least=1e-22):
    result = []
    for k, p in law.probabilities():
        result.append((k, p))
        if k >= law.mean and p < least:
            return result
        if isinstance(law, selection.Fixed):
            return result
    raise AssertionError


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_generating_function_is_that_of_the_probabilities(law, attacks):
    pairs = first_probabilities(law)
    total = math.fsum(p for _, p in pairs)
    assert abs(total - 1) < law.total_variation + 1e-15
    np.testing.assert_allclose(math.fsum(k * p for k, p in pairs), law.mean, rtol=1e-12)
    for x in (0.0, 0.3, 0.9, 1.0):
        with mpmath.workdps(40):
            power = [mpmath.mpf(p) * mpmath.mpf(x) ** k for k, p in pairs]
            slope = [k * p * mpmath.mpf(x) ** (k - 1) for k, p in pairs if k]
            expected = float(mpmath.fsum(power)), float(mpmath.fsum(slope))
        result = attacks.generating_function(law, x), law.derivative(x)
        # 1e-12 of the total: a relative error of G(x) near 0 comes with γ.
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-14)


def test_probabilities_equal_closed_forms():
    def binomial(eta, gamma, k):  # Γ(k + η) / (Γ(η) k!) (1 − γ)^k, over 1 − γ^η
        weight = mpmath.rf(eta, k) / mpmath.factorial(k) * (1 - gamma) ** k
        return float(weight * gamma**eta / (1 - gamma**eta))

    for law in (LAWS[3], LAWS[4]):
        for k, p in first_probabilities(law)[:40]:
            np.testing.assert_allclose(p, binomial(law.shape, law.stop, k), rtol=1e-11)
    for k, p in first_probabilities(selection.Geometric(4.0))[:40]:
        np.testing.assert_allclose(p, 0.25 * 0.75 ** (k - 1), rtol=1e-13)
    law = selection.Logarithmic(3.9)
    for k, p in first_probabilities(law)[:40]:
        expected = (1 - law.stop) ** k / (k * math.log(1 / law.stop))
        np.testing.assert_allclose(p, expected, rtol=1e-12)
    for k, p in first_probabilities(selection.Poisson(900.0))[:1200:50]:
        expected = mpmath.exp(-900) * mpmath.mpf(900) ** k / mpmath.factorial(k)
        np.testing.assert_allclose(p, float(expected), rtol=1e-11)


def test_draws_follow_the_law():
    keys = jax.random.split(KEY, 400)
    # Each mean of 400 draws is within 4.5 standard errors: false alarms below 1e-4.
    for law in (LAWS[0], LAWS[2], LAWS[4]):
        pairs = first_probabilities(law)
        draws = np.array([law.sample(key) for key in keys])
        variance = sum(k * k * p for k, p in pairs) - law.mean**2
        assert abs(draws.mean() - law.mean) < 4.5 * math.sqrt(variance / 400)
        least = sum(p for k, p in pairs if k <= law.mean)
        share = np.mean(draws <= law.mean)
        assert abs(share - least) < 4.5 * math.sqrt(least * (1 - least) / 400)
    assert selection.Fixed(7).sample(KEY) == 7


class Discrete:
    """The exact profile of two laws on atoms, in the worse direction."""

    mu = None

    def __init__(self, p, q):
        self.p, self.q = p, q

    def delta(self, epsilon):
        gaps = (a - math.exp(epsilon) * b for a, b in self.pairs())
        return max(np.maximum(gap, 0).sum() for gap in gaps)

    def pairs(self):
        return (self.p, self.q), (self.q, self.p)

    def epsilon(self, delta):
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, 60.0
        for _ in range(80):
            middle = (low + high) / 2
            meets = self.delta(middle) <= delta
            low, high = (low, middle) if meets else (middle, high)
        return high if self.delta(high) <= delta else math.inf


def deltas_of_orders(law, p, q, orders, epsilons):
    """The exact δ(ε) of the best of K runs, for each ε and each order of the atoms.

    In an order, later atoms have larger scores.
    """
    k, probability = np.array(first_probabilities(law)).T
    first, second = (
        np.diff(np.minimum(below, 1)[..., None] ** k @ probability)
        for below in (np.cumsum(np.insert(x[orders], 0, 0.0, 1), 1) for x in (p, q))
    )
    rates = np.exp(epsilons)[:, None, None]
    return np.maximum(first - rates * second, 0).sum(2)


def random_pairs():
    rng = np.random.default_rng(0)
    yield np.array([0.7, 0.3]), np.array([0.3, 0.7])  # randomised response
    yield np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.1, 0.25, 0.6, 0.05])
    for n in (3, 4, 5, 5):
        p, q = rng.dirichlet(np.ones(n), 2)
        yield p, q


@pytest.mark.matrix
def test_brute_force_over_all_orders_lies_between_the_bounds(attacks):
    epsilons = 0.0, 0.7, 1.6
    for p, q in random_pairs():
        profile = Discrete(p, q)
        orders = np.array(list(itertools.permutations(range(len(p)))))
        for law in LAWS:
            deltas = [
                deltas_of_orders(law, a, b, orders, epsilons)
                for a, b in profile.pairs()
            ]
            largest = np.max(deltas, axis=(0, 2))
            for epsilon, exact in zip(epsilons, largest, strict=True):
                whole = divided = 0.0
                for a, b in profile.pairs():
                    ratio = np.argsort(a / b)
                    below = [np.append(0, np.cumsum(x[ratio])) for x in (a, b)]
                    pair = attacks.Pair(*below)
                    whole = max(whole, attacks.delta_lower(pair, epsilon, law))
                    # An independent random number divides each atom into 24.
                    fine = np.linspace(0, len(p), 24 * len(p) + 1)
                    below = (np.interp(fine, np.arange(len(p) + 1), x) for x in below)
                    pair = attacks.Pair(*below)
                    divided = max(divided, attacks.delta_lower(pair, epsilon, law))
                assert whole <= exact
                # With divided atoms the dynamic programme is better than all orders.
                assert divided >= 0.98 * exact
                if law in (LAWS[0], LAWS[2], LAWS[5]) and epsilon == 0.7:
                    upper = Selected(profile, law).delta(epsilon)
                    assert max(exact, divided) <= upper


def test_bounds_meet_for_pure_mechanisms(attacks):
    for law in (LAWS[0], LAWS[1]):
        run = events.EpsilonDelta(0.8, 0.0)
        lower = attacks.epsilon_lower(run, 1e-6, law)
        upper = selection.epsilon(profiles.Pure(0.8), 1e-6, repetitions=law)
        assert 0.98 * upper < lower <= upper
        # Papernot and Steinke (2022), Corollary 3: (2 + η) ε.
        assert upper <= (2 + law.shape) * 0.8
        # The pair (ε, δ) with a tiny δ has about the same cost.
        other = selection.epsilon(
            events.EpsilonDelta(0.8, 1e-12), 1e-6, repetitions=law
        )
        np.testing.assert_allclose(other, upper, rtol=1e-3)


def published_epsilon(law, mu, delta):
    """Papernot and Steinke (2022), Theorem 2, at the best of many orders."""
    a = 1 + np.geomspace(0.05, 500, 400)[:, None]
    other = 1 + np.geomspace(0.05, 500, 400)
    curve = mu**2 * a / 2 + np.log(law.mean) / (a - 1)
    eta = law.shape
    curve = curve + (1 + eta) * (
        (1 - 1 / other) * mu**2 * other / 2 + np.log(1 / law.stop) / other
    )
    curve = np.min(curve, axis=1, keepdims=True)
    return np.min(curve + np.log1p(-1 / a) - (np.log(delta) + np.log(a)) / (a - 1))


def profile_epsilon(law, mu, delta):
    """Koskela, Redberg and Wang (2024): E[K] δ(ε − (1 + η) log(e^ε₁ + …)) at ε₁."""
    first = np.linspace(0.01, 2, 100)
    with jax.enable_x64(True):
        deltas = np.asarray(gdp.delta(mu, first))
        base = float(gdp.epsilon(mu, delta / law.mean))
    ratio = np.exp(first) + (1 - law.stop) / law.stop * deltas
    return base + (1 + law.shape) * np.log(np.min(ratio))


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("law", "base", "published", "attack"),
    [
        (selection.Geometric(10.0), 1.0, 2.310, 1.539),
        (selection.Logarithmic(3.9), 1.0, 1.716, 1.284),
        (selection.Poisson(10.0), 1.0, 2.046, 1.969),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                (selection.Geometric(10.0), 0.5, 1.216, 0.784),
                (selection.Geometric(10.0), 2.0, 4.331, 3.020),
                (selection.Poisson(3.0), 1.0, 1.405, 1.320),
                (selection.Poisson(30.0), 1.0, 3.618, 3.458),
            )
        ),
    ],
    ids=str,
)
def test_bound_is_below_published_bounds_and_near_the_attack(
    law, base, published, attack, attacks
):
    mu = float(gdp.mu(base, DELTA))
    run = events.Gaussian(mu)
    lower = attacks.epsilon_lower(run, DELTA, law)
    upper = selection.epsilon(run, DELTA, repetitions=law)
    assert lower <= upper
    np.testing.assert_allclose(lower, attack, rtol=2e-3)
    assert upper <= (1.004 if law.mean < 10.1 else 1.04) * lower
    assert upper <= published
    shape = getattr(law, "shape", math.inf)
    if shape < math.inf:
        np.testing.assert_allclose(
            published_epsilon(law, mu, DELTA), published, rtol=2e-3
        )
        assert upper <= profile_epsilon(law, mu, DELTA)
    # dp-accounting has the same published bounds.
    event = dp_event.RepeatAndSelectDpEvent(
        dp_event.GaussianDpEvent(1 / mu), law.mean, shape
    )
    theirs = RdpAccountant().compose(event).get_epsilon(DELTA)
    assert upper <= theirs


def test_one_run_costs_what_the_mechanism_costs(attacks):
    once = selection.Fixed(1)
    upper = selection.epsilon(RUN, DELTA, repetitions=once)
    np.testing.assert_allclose(upper, 1.0, rtol=1e-5)
    assert upper >= 1.0 - 1e-6
    assert attacks.epsilon_lower(RUN, DELTA, once) <= upper


@pytest.mark.slow
def test_bounded_repetitions_cost_at_most_the_composition(attacks):
    for count in (2, 10):
        law = selection.Fixed(count)
        together = gdp.epsilon(RUN.mu * math.sqrt(count), DELTA)
        upper = selection.epsilon(RUN, DELTA, repetitions=law)
        assert attacks.epsilon_lower(RUN, DELTA, law) <= upper
        assert upper <= together * (1 + 1e-6)
    assert upper < 0.95 * together


def test_delta_inverts_epsilon():
    law = selection.Geometric(5.0)
    epsilon = selection.epsilon(RUN, DELTA, repetitions=law)
    delta = selection.delta(RUN, epsilon, repetitions=law)
    # Each of them has its own chords.
    np.testing.assert_allclose(delta, DELTA, rtol=0.05)
    assert epsilon.dtype == delta.dtype == jnp.float32
    many = selection.epsilon(RUN, np.array([DELTA, 1e-3]), repetitions=law)
    assert many.shape == (2,)
    assert many[0] == epsilon > many[1]


@pytest.mark.slow
def test_unknown_divergences_have_no_finite_bound():
    law = selection.Geometric(5.0)
    # δ grows by the mean number of runs, at the most.
    run = events.EpsilonDelta(0.3, 1e-6)
    assert np.isfinite(selection.epsilon(run, 1.2e-5, repetitions=law))
    assert selection.epsilon(run, 1e-6, repetitions=law) == np.inf
    assert selection.epsilon(events.Gaussian(math.inf), 0.1, repetitions=law) == np.inf
    assert selection.epsilon(events.Gaussian(0.0), 1e-6, repetitions=law) < 1e-3
    # The cells of the region's boundary cost about 1e-3 of ε.
    assert selection.delta(events.Gaussian(0.0), 0.0, repetitions=law) < 2e-3


@pytest.mark.matrix
def test_events_of_searches_have_profiles():
    event = events.Selection(RUN, selection.Geometric(10.0))
    profile = profiles.of(event)
    expected = selection.epsilon(RUN, DELTA, repetitions=event.repetitions)
    assert profile.epsilon(DELTA) == expected
    assert profile.mu is None
    again = selection.epsilon(profiles.of(RUN), DELTA, repetitions=event.repetitions)
    assert again == expected


@pytest.mark.slow
def test_bounds_of_sampled_mechanisms_hold(attacks, compiled):
    step = events.PoissonGaussian(1.1, 0.1, Adjacency.ADD_REMOVE)
    law = selection.Geometric(10.0)
    lower = attacks.epsilon_lower(step, DELTA, law)
    upper = selection.epsilon(step, DELTA, repetitions=law)
    assert 0.9 * upper < lower <= upper
    run = pld.compose(pld.of(events.PoissonGaussian(1.5, 0.05, step.adjacency)), 60)
    assert 1.905 <= selection.epsilon(run, DELTA, repetitions=law) < 2.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, int])
def test_laws_of_narrow_numbers_compute_in_float64(dtype):
    for law in (selection.Geometric, selection.Logarithmic, selection.Poisson):
        assert law(dtype(10)) == law(10.0)
        assert type(law(dtype(10)).mean) is float
    narrow = selection.TruncatedNegativeBinomial(dtype(2), dtype(10))
    wide = selection.TruncatedNegativeBinomial(2.0, 10.0)
    assert narrow.stop == wide.stop
    assert narrow.total_variation == wide.total_variation


def test_simulated_search_attains_the_attack():
    # Randomised response on four atoms; the order is the best one.
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    law, epsilon, n = selection.Geometric(6.0), 0.9, 200_000
    orders = np.array(list(itertools.permutations(range(4))))
    (deltas,) = deltas_of_orders(law, p, q, orders, [epsilon])
    order, exact = orders[np.argmax(deltas)], np.max(deltas)
    rng = np.random.default_rng(1)
    counts = rng.geometric(1 / law.mean, n)
    searches = []
    for law_of_run in (p, q):
        ends = np.cumsum(law_of_run[order])
        runs = np.searchsorted(ends, rng.uniform(size=counts.sum()) * ends[-1])
        starts = np.append(0, np.cumsum(counts)[:-1])
        best = np.maximum.reduceat(np.minimum(runs, 3), starts)
        searches.append(np.bincount(best, minlength=4) / n)
    gaps = searches[0] - math.exp(epsilon) * searches[1]
    # 5 standard errors of a sum of four differences.
    assert abs(np.maximum(gaps, 0).sum() - exact) < 5 * (1 + math.exp(epsilon)) / (
        2 * math.sqrt(n)
    )
    assert exact <= Selected(Discrete(p, q), law).delta(epsilon)


@pytest.mark.parametrize(
    ("shape", "mean"), [(1e6, 1.5), (1e8, 3.0), (-0.98, 5.0), (-0.99, 3.0)]
)
def test_total_variation_covers_extreme_shapes(shape, mean):
    law = selection.TruncatedNegativeBinomial(shape, mean)
    pairs = list(itertools.islice(law.probabilities(), 400))
    with mpmath.workdps(60):
        stop, eta = mpmath.mpf(law.stop), mpmath.mpf(shape)
        # P(K = k) = (1 − γ)^k Γ(k + η) / (k! Γ(η) (γ^−η − 1))
        exact = (1 - stop) * mpmath.gamma(1 + eta) / mpmath.gamma(eta)
        exact /= stop**-eta - 1
        distance = mpmath.mpf(0)
        for k, probability in pairs:
            distance += abs(probability - exact) / 2
            exact *= (1 - stop) * (k + eta) / (k + 1)
    assert 1e-20 < distance < law.total_variation / 2


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: selection.Geometric(1.0), "mean"),
        (lambda: selection.Poisson(0.0), "mean"),
        (lambda: selection.Fixed(0), "count"),
        (lambda: selection.TruncatedNegativeBinomial(-1.0, 3.0), "shape"),
        (lambda: selection.TruncatedNegativeBinomial(-0.999, 5.0), "shape"),
        (lambda: selection.TruncatedNegativeBinomial(1e6, 800.0), "shape"),
        (lambda: selection.TruncatedNegativeBinomial(math.nan, 5.0), "shape"),
        (lambda: selection.epsilon(RUN, 0.0, repetitions=LAWS[0]), "delta"),
        (lambda: selection.epsilon(RUN, DELTA, repetitions=10), "repetitions"),
        (lambda: selection.delta(RUN, -1.0, repetitions=LAWS[0]), "epsilon"),
        (
            lambda: selection.epsilon(
                events.EpsilonDelta(-1.0, 0.0), DELTA, repetitions=LAWS[0]
            ),
            ".epsilon of EpsilonDelta must be non-negative",
        ),
        (
            lambda: selection.delta(
                events.OnLattice(RUN, -0.1), 1.0, repetitions=LAWS[0]
            ),
            ".total_variation of OnLattice must be non-negative",
        ),
    ],
)
def test_invalid_arguments_raise(call, match):
    with pytest.raises(ValueError, match=f"^{match}"):
        call()


@pytest.mark.rounding
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "law", [LAWS[0], LAWS[2], LAWS[4], selection.Fixed(3)], ids=str
)
def test_derivative_by_noise_equals_differences(law, count):
    """Of the whole search by the noise of one run; `Fixed` is the composition's."""

    def epsilon(sigma):
        run = events.Repeated(events.Gaussian(1 / sigma), count)
        return selection.epsilon(run, DELTA, repetitions=law)

    sigma, step = 3.7, 4e-6
    result = jax.grad(epsilon)(sigma)
    assert result.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = jax.grad(epsilon)(sigma)
        expected = (epsilon(sigma + step) - epsilon(sigma - step)) / (2 * step)
    np.testing.assert_allclose(wide, expected, rtol=1e-6)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.slow
def test_derivative_has_the_shape_of_delta_and_one_entry_for_each_number(x64, compiled):
    deltas = np.array([1e-3, 1e-6])

    def epsilon(mus):
        run = events.Composed(tuple(events.Repeated(events.Gaussian(x)) for x in mus))
        return selection.epsilon(run, deltas, repetitions=LAWS[0])

    mus, step = np.array([0.2, 0.4]), 1e-6
    result = jax.jacobian(lambda x: epsilon(list(x)))(jnp.asarray(mus))
    expected = [
        (epsilon(mus + step * e) - epsilon(mus - step * e)) / (2 * step)
        for e in np.eye(2)
    ]
    np.testing.assert_allclose(result, np.transpose(expected), rtol=1e-6)


def test_traced_numbers_without_derivative_raise():
    def epsilon(mu):
        return selection.epsilon(events.Gaussian(mu), DELTA, repetitions=LAWS[0])

    for traced in (jax.jit(epsilon), jax.jit(jax.grad(epsilon))):
        with pytest.raises(
            ValueError, match="^mechanism must have numbers that jax.jit"
        ):
            traced(0.3)
    with pytest.raises(ValueError, match="^mechanism must have numbers that jax.jit"):
        jax.vmap(epsilon)(np.array([0.3, 0.4]))


def train(setting, key):
    return {"w": setting["rate"] * jnp.ones(2) + 0.1 * jax.random.normal(key, (2,))}


def score(output, key):
    value = -jnp.abs(output["w"][0] - 2.0) + 0.01 * jax.random.normal(key)
    return jnp.where(output["w"][0] > 3.5, jnp.inf, value)  # counts as the worst


def train_on_host(setting, key):
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return {"w": setting + 0.1 * rng.normal(size=2)}


def score_on_host(output, key):
    del key
    value = -abs(output["w"][0] - 2.0)
    return math.inf if output["w"][0] > 3.5 else value


RATES = [0.5, 2.0, 4.0]
SEARCH = {
    "repetitions": selection.Geometric(6.0),
    "event": RUN,
    "delta": DELTA,
    "key": jax.random.wrap_key_data(np.array([0, 11], np.uint32)),
}


def test_search_resumes_to_the_same_result(tmp_path):
    runs, stop = [], 0

    def counted(setting, key):
        runs.append(setting)
        if len(runs) == stop:
            raise KeyboardInterrupt
        return train_on_host(setting, key)

    result = dpjax.tune(RATES, counted, score_on_host, **SEARCH)
    total = len(runs)
    assert total > 3
    assert result.setting == 2.0
    assert np.isfinite(result.score)
    assert result.event == events.Selection(RUN, SEARCH["repetitions"])
    expected = selection.epsilon(RUN, DELTA, repetitions=SEARCH["repetitions"])
    assert result.epsilon == expected

    path, runs[:], stop = tmp_path / "search", [], 3
    with pytest.raises(KeyboardInterrupt):
        dpjax.tune(RATES, counted, score_on_host, **SEARCH, checkpoint=path)
    assert path.stat().st_mode & 0o777 == 0o600
    stop = 0
    again = dpjax.tune(RATES, counted, score_on_host, **SEARCH, checkpoint=path)
    assert len(runs) == total + 1  # the interrupted run is computed again
    np.testing.assert_array_equal(again.output["w"], result.output["w"])
    assert again._replace(output=None) == result._replace(output=None)
    other = SEARCH | {"key": KEY}
    with pytest.raises(ValueError, match="^checkpoint"):
        dpjax.tune(RATES, train_on_host, score_on_host, **other, checkpoint=path)


@pytest.mark.slow
def test_vectorised_search_equals_a_loop():
    settings = {"rate": np.array(RATES, np.float32)}
    loop = dpjax.tune(settings, train, score, **SEARCH)
    chunks = dpjax.tune(settings, train, score, **SEARCH, chunk_size=3)
    np.testing.assert_allclose(chunks.score, loop.score, rtol=1e-5)
    np.testing.assert_allclose(chunks.output["w"], loop.output["w"], rtol=1e-6)
    assert chunks.setting == loop.setting == {"rate": 2.0}


def test_search_in_many_chunks_compiles_once():
    """The suite limits the number of programs, of which a chunk would have several."""
    result = dpjax.tune(
        jnp.arange(10.0),
        lambda rate, key: rate,
        lambda output, key: output,
        repetitions=selection.Fixed(40),
        event=RUN,
        delta=DELTA,
        key=KEY,
        chunk_size=2,
    )
    assert result.setting == 9.0


@pytest.mark.matrix
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_setting_is_that_of_the_best_run_in_chunks(impl):
    for seed in range(5):
        result = dpjax.tune(
            jnp.arange(10.0),
            lambda rate, key: (rate, jax.random.normal(key)),
            lambda output, key: output[0],
            repetitions=selection.Fixed(3),
            event=RUN,
            delta=DELTA,
            key=jax.random.key(seed, impl=impl),
            chunk_size=4,
        )
        assert result.setting == result.output[0]


def test_search_without_runs_or_finite_scores_releases_no_data():
    never = SEARCH | {"repetitions": selection.Poisson(1e-9)}
    result = dpjax.tune([1, 2], None, None, **never)
    assert (result.setting, result.output, result.score) == (None, None, -math.inf)
    twice = SEARCH | {"repetitions": selection.Fixed(2)}
    result = dpjax.tune([7], lambda x, key: x, lambda x, key: math.nan, **twice)
    assert (result.setting, int(result.output), result.score) == (7, 7, -math.inf)


@pytest.mark.parametrize(
    ("settings", "changes", "match"),
    [
        ([], {}, "settings"),
        ({"a": np.ones(2), "b": np.ones(3)}, {}, "settings"),
        ([1.0], {"chunk_size": 2}, "settings"),
        (np.ones(3), {"chunk_size": 0}, "chunk_size"),
        (RATES, {"repetitions": 3}, "repetitions"),
        (RATES, {"key": 3}, "key"),
        (RATES, {"delta": 0.0}, "delta"),
    ],
)
def test_invalid_searches_raise_before_any_run(settings, changes, match):
    with pytest.raises(ValueError, match=f"^{match}"):
        dpjax.tune(settings, None, None, **SEARCH | changes)
