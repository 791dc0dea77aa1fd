"""Lower bounds from scores against closed forms, jax_privacy and a thousand audits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from dpjax import auditing
from dpjax._core.float64 import scope
from dpjax.accounting import gdp
from dpjax.auditing import _scores

AUDITS = 1000
# If bounds fail with probability 1 % each, as many fail in a thousand with probability
# below 1e-6: the false alarm of every test here that counts failures.
TOO_MANY = int(scipy.stats.binom.isf(1e-6, AUDITS, 0.01)) + 1


def count_failures(bounds, truth):
    return int(np.sum(np.asarray(bounds, np.float64) > truth))


@pytest.mark.diagonal
@pytest.mark.parametrize("trials", [1, 7, 400, 20_000])
def test_binomial_bounds_are_clopper_pearson(trials):
    k = np.unique(np.clip([0, 1, 2, trials // 3, trials - 1, trials], 0, trials))
    both = jax.jit(
        lambda error: [
            f(k, trials, error) for f in (_scores.lower_bound, _scores.upper_bound)
        ]
    )
    for error in (0.2, 0.01, 1e-7):
        with scope():
            low, high = map(np.asarray, both(error))
        with np.errstate(invalid="ignore"):
            expected = scipy.stats.beta.ppf(error, k, trials - k + 1)
            expected_high = scipy.stats.beta.isf(error, k + 1, trials - k)
        np.testing.assert_allclose(low, np.where(k > 0, expected, 0), rtol=1e-7)
        np.testing.assert_allclose(
            high, np.where(k < trials, expected_high, 1), rtol=1e-7
        )
        # The margin is on the safe side.
        tail = scipy.stats.binom.sf(k - 1, trials, low)
        assert np.all(tail[k > 0] <= error)


def test_threshold_counts_cover_all_scores_densely():
    for n in (1, 2, 30, 1000, 10_000):
        k = _scores.choose_ranks(n)
        assert k[0] == 1
        assert k[-1] == n
        deviation = np.sqrt(k * (1 - k / n))
        assert np.all(np.diff(k) <= deviation[:-1] / 2 + 2)
        assert len(k) <= 2 * math.pi * math.sqrt(n) + 3


def best_threshold_bounds(scores_in, scores_out, delta, confidence):
    """Bounds on ε and μ at the best threshold, by trying all scores one by one."""
    n, m = len(scores_in), len(scores_out)
    of_in, of_out = _scores.choose_ranks(n), _scores.choose_ranks(m)
    a_in = (1 - confidence) / 2 / len(of_in)
    a_out = (1 - confidence) / 2 / len(of_out)
    best, best_mu = 0.0, 0.0
    for k in of_out:
        t = np.sort(scores_out)[::-1][k - 1]
        a = scipy.stats.beta.isf(a_out, k, m - k + 1)  # of k − 1 successes
        reached = [j for j in of_in if np.sort(scores_in)[::-1][j - 1] > t]
        b = (
            scipy.stats.beta.ppf(a_in, max(reached), n - max(reached) + 1)
            if (reached)
            else 0.0
        )
        for ratio in ((b - delta) / a, (1 - a - delta) / (1 - b)):
            best = max(best, math.log(max(ratio, 1.0)))
        if b > 0:
            gap = scipy.stats.norm.ppf(b) - scipy.stats.norm.ppf(a)
            best_mu = max(best_mu, gap)
    return best, best_mu


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "m"), [(200, 90), (35, 200)])
def test_bounds_over_all_thresholds_match_definition(n, m, x64):
    rng = np.random.default_rng(0)
    scores_in, scores_out = rng.standard_normal(n) * 2 + 2.5, rng.standard_normal(m)
    scores_in[:5] = scores_out[:5]  # ties
    epsilon, mu = best_threshold_bounds(scores_in, scores_out, 1e-3, 0.95)
    assert epsilon > 0.5
    result = auditing.epsilon_lower(scores_in, scores_out, 1e-3, confidence=0.95)
    np.testing.assert_allclose(result, epsilon, rtol=1e-7)
    result = auditing.mu_lower(scores_in, scores_out, confidence=0.95)
    np.testing.assert_allclose(result, mu, rtol=1e-7)


def test_bound_at_one_threshold_matches_definition(x64):
    rng = np.random.default_rng(1)
    scores_in, scores_out = rng.standard_normal(150) + 2, rng.standard_normal(120)
    b = scipy.stats.beta.ppf(0.01, np.sum(scores_in > 1.5), 151 - sum(scores_in > 1.5))
    alarms = sum(scores_out > 1.5)
    a = scipy.stats.beta.isf(0.01, alarms + 1, 120 - alarms)
    expected = max(math.log((b - 0.02) / a), math.log((1 - a - 0.02) / (1 - b)))
    result = auditing.epsilon_at(
        scores_in, scores_out, 0.02, threshold=1.5, confidence=0.98
    )
    np.testing.assert_allclose(result, expected, rtol=1e-7)


def gaussian_scores(mu, count, audits=AUDITS, stddev=3.0, seed=0):
    noise = np.random.default_rng(seed).standard_normal((2, audits, count))
    return stddev * (noise[0] + mu), stddev * noise[1]


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.0, 1.3])
def test_bounds_on_gaussian_scores_fail_at_most_at_stated_rate(mu):
    scores = gaussian_scores(mu, 400)
    epsilon = 0.0 if mu == 0 else float(gdp.epsilon(mu, 1e-3))
    bounds = {
        "epsilon": (auditing.epsilon_lower(*scores, 1e-3, confidence=0.99), epsilon),
        "mu": (auditing.mu_lower(*scores, confidence=0.99), mu),
        "gaussian": (auditing.gaussian_mu_lower(*scores, confidence=0.99), mu),
    }
    for name, (bound, truth) in bounds.items():
        assert count_failures(bound, truth) < TOO_MANY, name
    if mu:  # and are not vacuous
        assert np.median(bounds["gaussian"][0]) > 0.8 * mu
        assert np.median(bounds["mu"][0]) > 0.6 * mu


def test_gaussian_bound_fails_at_exactly_the_stated_rate():
    bounds = auditing.gaussian_mu_lower(*gaussian_scores(0.7, 100), confidence=0.8)
    # Outside with probability 1e-6.
    low, high = scipy.stats.binom.ppf([5e-7, 1 - 5e-7], AUDITS, 0.2)
    assert low <= count_failures(bounds, 0.7) <= high


def test_bounds_on_randomised_response_fail_at_most_at_stated_rate():
    """Two values, so that all scores tie, and a mechanism that is tight at δ = 0."""
    rng, epsilon = np.random.default_rng(2), 1.7
    honest = 1 / (1 + math.exp(-epsilon))
    scores_in = (rng.random((AUDITS, 300)) < honest).astype(float)
    scores_out = (rng.random((AUDITS, 300)) > honest).astype(float)
    result = auditing.epsilon_lower(scores_in, scores_out, 0.0, confidence=0.99)
    assert count_failures(result, epsilon) < TOO_MANY
    assert np.median(result) > 0.6 * epsilon
    included = rng.random((AUDITS, 300)) < 0.5
    guesses = np.where(rng.random((AUDITS, 300)) < honest, included, ~included) * 1.0
    result = auditing.one_run_epsilon_lower(
        guesses, included, 0.0, guess_in=100, guess_out=100, confidence=0.99
    )
    assert count_failures(result, epsilon) < TOO_MANY
    assert np.median(result) > 0.6 * epsilon


@pytest.mark.slow
def test_bound_at_held_out_threshold_fails_at_most_at_stated_rate():
    others = gaussian_scores(1.3, 300, seed=3)
    scores = gaussian_scores(1.3, 300, seed=4)
    at = {"confidence": 0.99}
    threshold = auditing.best_threshold(*others, 1e-3, **at)
    result = auditing.epsilon_at(*scores, 1e-3, threshold=threshold, **at)
    assert count_failures(result, float(gdp.epsilon(1.3, 1e-3))) < TOO_MANY
    # No other threshold gives a larger bound on the same scores.
    bound_elsewhere = auditing.epsilon_at(*others, 1e-3, threshold=threshold, **at)
    for other in (-1.0, 2.0, 5.0):
        assert np.all(
            bound_elsewhere
            >= auditing.epsilon_at(*others, 1e-3, threshold=other, **at) - 1e-6
        )


def test_gaussian_bound_inverts_noncentral_t(x64):
    for n, m, gap, confidence in ((30, 20, 1.0, 0.99), (400, 900, 0.3, 0.9)):
        rng = np.random.default_rng(n)
        scores_in, scores_out = rng.standard_normal(n) + gap, rng.standard_normal(m)
        pooled = np.sqrt((n * scores_in.var() + m * scores_out.var()) / (n + m - 2))
        unit = math.sqrt(1 / n + 1 / m)
        t = (scores_in.mean() - scores_out.mean()) / pooled / unit
        theta = scipy.optimize.brentq(
            lambda c: scipy.stats.nct.sf(t, n + m - 2, c) - (1 - confidence), 0, 2 * t
        )
        result = auditing.gaussian_mu_lower(
            7 * scores_in, 7 * scores_out, confidence=confidence
        )
        np.testing.assert_allclose(result, theta * unit, rtol=1e-6)
        assert result <= theta * unit * (1 + 1e-9)


def one_run_scores(mu, count, audits=AUDITS, seed=5):
    rng = np.random.default_rng(seed)
    included = rng.random((audits, count)) < 0.5
    return 2.5 * (rng.standard_normal((audits, count)) + mu * included), included


@pytest.mark.slow
def test_one_run_bounds_fail_at_most_at_stated_rate():
    scores, included = one_run_scores(2.0, 300)
    at = {"guess_in": 40, "guess_out": 20, "confidence": 0.99}
    epsilon = auditing.one_run_epsilon_lower(scores, included, 1e-5, **at)
    assert count_failures(epsilon, float(gdp.epsilon(2.0, 1e-5))) < TOO_MANY
    assert np.median(epsilon) > 2
    mu = auditing.one_run_mu_lower(scores, included, **at)
    assert count_failures(mu, 2.0) < TOO_MANY
    assert np.median(mu) > 0.6


def test_delta_probability_disclosure_is_not_refuted_at_that_delta():
    """The mechanism is (0, δ)-DP, and its canaries' scores depend on each other."""
    rng, delta = np.random.default_rng(6), 0.05
    included = rng.random((200, 100)) < 0.5
    telling = rng.random((200, 1)) < delta
    scores = np.where(telling, included, rng.random((200, 100)))
    at = {"guess_in": 20, "guess_out": 20, "confidence": 0.96}
    result = np.asarray(auditing.one_run_epsilon_lower(scores, included, delta, **at))
    assert telling.sum() > 3
    assert np.all(result == 0)
    result = np.asarray(auditing.one_run_epsilon_lower(scores, included, 0.0, **at))
    assert np.all(result[telling[:, 0]] > 2)


def one_run_epsilon(m, r, v, delta, error):
    """Steinke, Nasr and Jagielski (2023), appendix D, number by number."""

    def p_value(epsilon):
        q = scipy.special.expit(epsilon)
        beta = scipy.stats.binom.sf(v - 1, r, q)
        steps = [
            (scipy.stats.binom.sf(v - i - 1, r, q) - beta) / i for i in range(1, v + 1)
        ]
        return beta + 2 * m * delta * max(steps)

    return scipy.optimize.brentq(lambda e: p_value(e) - error, 0, 30)


def one_run_mu(m, r, v, error):
    """Mahloujifar, Melis and Chaudhuri (2025), Algorithm 3, number by number."""

    def excess(mu):
        h, rho = error * (r - v) / m, error * v / m
        for i in range(v - 1, -1, -1):
            new = max(h, scipy.special.ndtr(scipy.special.ndtri(rho) - mu))
            h, rho = new, min(rho + i / (r - i) * (new - h), 1)
        return h + rho - r / m

    return scipy.optimize.brentq(excess, 0, 30)


@pytest.mark.diagonal
@pytest.mark.parametrize(("m", "right", "wrong"), [(300, 55, 5), (1000, 60, 0)])
def test_one_run_bounds_match_published_algorithms(m, right, wrong, x64):
    scores = np.arange(m, dtype=float)
    r = right + wrong
    included = scores >= m - right  # the r largest are guessed, `wrong` of them wrongly
    at = {"guess_in": r, "guess_out": 0, "confidence": 0.95}
    result = auditing.one_run_epsilon_lower(scores, included, 1e-4, **at)
    expected = one_run_epsilon(m, r, right, 1e-4, 0.05)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert result <= expected * (1 + 1e-12)
    result = auditing.one_run_mu_lower(scores, included, **at)
    expected = one_run_mu(m, r, right, 0.05)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_guesses_are_made_at_both_ends_of_the_scores():
    scores = np.arange(100.0)
    included = scores >= 50
    both = functools.partial(
        auditing.one_run_epsilon_lower, scores, delta=0.0, confidence=0.95
    )
    low, high = both(included, guess_in=40, guess_out=0), 0.0
    assert both(included, guess_in=20, guess_out=20) == low > 2
    assert both(~included, guess_in=20, guess_out=20) == high


def test_bounds_agree_with_jax_privacy():
    """jax_privacy's auditor at one threshold and in one run, on the same scores."""
    peer = pytest.importorskip("jax_privacy.auditing")
    rng = np.random.default_rng(7)
    scores_in, scores_out = rng.standard_normal(500) + 2, rng.standard_normal(500)
    theirs = peer.CanaryScoreAuditor(scores_in, scores_out)
    for t in (0.5, 2.0, 2.5):
        # Theirs has scores at the threshold above it, and both rates at half the error.
        expected = theirs.epsilon_clopper_pearson(
            0.05, 1e-3, one_sided=False, threshold_strategy=peer.Explicit(t)
        )
        result = auditing.epsilon_at(
            scores_in, scores_out, 1e-3, threshold=t, confidence=0.95
        )
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    # At all thresholds, of which they count those on a convex hull of their choosing.
    expected = theirs.epsilon_clopper_pearson(0.05, 1e-3, one_sided=False)
    result = auditing.epsilon_lower(scores_in, scores_out, 1e-3, confidence=0.95)
    assert abs(result - expected) < 0.15 * expected
    # Theirs is the area below the curve's convex hull.
    assert 0 <= theirs.attack_auroc() - auditing.auroc(scores_in, scores_out) < 0.01
    scores = np.concatenate([scores_in, scores_out])
    included = np.arange(1000) < 500
    t, at = np.sort(scores)[-100], {"guess_in": 100, "guess_out": 0}
    of_theirs = {"threshold_strategy": peer.Explicit(t)}
    result = auditing.one_run_epsilon_lower(
        scores, included, 1e-5, confidence=0.95, **at
    )
    expected = theirs.epsilon_one_run(0.05, 1e-5, **of_theirs)
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    result = auditing.one_run_mu_lower(scores, included, confidence=0.95, **at)
    expected = theirs.epsilon_one_run_fdp(0.05, 1e-5, **of_theirs)
    np.testing.assert_allclose(gdp.epsilon(result, 1e-5), expected, rtol=1e-4)


def test_nan_scores_never_raise_the_bound():
    scores_in, scores_out = (x[0] for x in gaussian_scores(3.0, 60, audits=1))
    known = auditing.mu_lower(scores_in, scores_out, confidence=0.9)
    for i in range(2):
        scores = [scores_in.copy(), scores_out.copy()]
        scores[i][:20] = np.nan
        assert auditing.mu_lower(*scores, confidence=0.9) < known
        assert auditing.gaussian_mu_lower(*scores, confidence=0.9) == 0
    scores[0][:], scores[1][:] = np.inf, -np.inf
    assert auditing.epsilon_lower(*scores, 0.0, confidence=0.9) > 1.5


def test_gaussian_bound_of_noise_free_scores_is_infinite():
    assert auditing.gaussian_mu_lower(
        np.ones(20), np.zeros(20), confidence=0.9
    ) == float("inf")
    assert auditing.gaussian_mu_lower(np.ones(20), np.ones(20), confidence=0.9) == 0


@pytest.mark.diagonal
@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_equal_up_to_rounding_give_zero_bound(dtype):
    """For any values, numbers of scores and order of summation."""
    rng = np.random.default_rng(5)
    for n, m in ((20, 20), (17, 30)):
        scores_in, scores_out = [], []
        for value in (1.0, 0.1, -0.3, 1e8, -1e30, 1e-30):
            above = np.nextafter(dtype(value), dtype(np.inf))
            for high in (dtype(value), above):
                scores_in.append(np.full(n, high))
                scores_out.append(np.full(m, dtype(value)))
            # A spread of one unit in the last place.
            scores_in.append(np.where(rng.random(n) < 0.8, above, dtype(value)))
            scores_out.append(np.where(rng.random(m) < 0.2, above, dtype(value)))
        result = auditing.gaussian_mu_lower(
            np.stack(scores_in), np.stack(scores_out), confidence=0.9
        )
        np.testing.assert_array_equal(result, 0)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_offset_changes_gaussian_bound_only_by_rounding(dtype, x64):
    """The bound is at most SciPy's for Student's t, and close to it."""
    for offset in (0.0, 1e8 if dtype is np.float64 else 1e3, -1e3):
        given = [dtype(x[0] + offset) for x in gaussian_scores(1.5, 40, audits=1)]
        result = float(auditing.gaussian_mu_lower(*given, confidence=0.9))
        # The offset's rounding is in the scores; what is left is exact in float64.
        a, b = (np.float64(x) - np.float64(given[1][0]) for x in given)
        n, m = a.size, b.size
        pooled = np.sqrt((n * a.var() + m * b.var()) / (n + m - 2))
        unit = np.sqrt(1 / n + 1 / m)

        def student_t_bound(gap, spread, freedom=n + m - 2, unit=unit):
            t = gap / (spread * unit)
            theta = scipy.optimize.brentq(
                lambda x: scipy.stats.nct.sf(t, freedom, x) - 0.1, 1e-3, t, xtol=1e-13
            )
            return theta * unit

        exact = student_t_bound(a.mean() - b.mean(), pooled)
        # Two scores' means and the deviation, each off by four units of the largest.
        error = 4.1 * np.finfo(dtype).eps * max(np.abs(x).max() for x in given)
        least = student_t_bound(a.mean() - b.mean() - error, pooled + error)
        assert least * (1 - 1e-8) <= result <= exact * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.diagonal
@pytest.mark.parametrize(
    "bound",
    [
        functools.partial(auditing.mu_lower, confidence=0.9),
        functools.partial(auditing.epsilon_lower, delta=1e-2, confidence=0.9),
        functools.partial(auditing.gaussian_mu_lower, confidence=0.9),
    ],
)
def test_bounds_work_under_jit_and_vmap(bound):
    scores = [np.float32(x) for x in gaussian_scores(1.0, 40, audits=6)]
    at_once = jax.jit(bound)(*scores)
    assert at_once.shape == (6,)
    assert at_once.dtype == jnp.float32
    np.testing.assert_array_equal(at_once, jax.vmap(bound)(*scores))


def test_estimates_match_definition():
    rng = np.random.default_rng(8)
    scores_in, scores_out = rng.integers(0, 9, (2, 50)).astype(float)
    pairs = np.sign(scores_in[:, None] - scores_out[None]) / 2 + 0.5
    np.testing.assert_allclose(
        auditing.auroc(scores_in, scores_out), pairs.mean(), rtol=1e-6
    )
    for rate in (0.0, 0.1, 0.5, 1.0):
        best = max(
            np.mean(scores_in > t)
            for t in [-1.0, *scores_out]
            if np.mean(scores_out > t) <= rate + 1e-12
        )
        result = auditing.true_positive_rate(scores_in, scores_out, rate)
        np.testing.assert_allclose(result, best, rtol=1e-6)


def test_estimates_match_gaussian_closed_forms():
    """Within five standard deviations of a binomial: false alarms below 1e-5."""
    scores_in, scores_out = (x[0] for x in gaussian_scores(1.5, 20_000, audits=1))
    expected = scipy.stats.norm.sf(scipy.stats.norm.isf(0.05) - 1.5)
    result = float(auditing.true_positive_rate(scores_in, scores_out, 0.05))
    assert abs(result - expected) < 5 * math.sqrt(2 * 0.25 / 20_000)
    area = scipy.stats.norm.cdf(1.5 / math.sqrt(2))
    result = float(auditing.auroc(scores_in, scores_out))
    assert abs(result - area) < 5 * math.sqrt(2 * 0.25 / 20_000)


def test_bootstrap_quantiles_match_standard_error():
    """The spread of a mean over resamples is its standard error, to five of its own."""
    scores = np.random.default_rng(9).standard_normal((2, 400)) * 3

    @jax.jit
    def quantiles():
        return auditing.bootstrap_quantiles(
            lambda a, b: a.mean() - b.mean(),
            *scores,
            [0.159, 0.841],  # one standard deviation on either side
            num_samples=2000,
            key=jax.random.key(0),
        )

    low, high = map(float, quantiles())
    expected = math.sqrt((scores[0].var() + scores[1].var()) / 400)
    assert abs((high - low) / 2 - expected) < 5 * expected / math.sqrt(2000)


def test_likelihood_ratios_use_only_the_other_models():
    rng = np.random.default_rng(10)
    included = rng.random((9, 4)) < 0.5
    included[:, 3] = np.arange(9) < 2  # one other model at most has it
    x = rng.standard_normal((9, 4)) + 100
    expected = np.zeros((9, 4))
    for s in range(9):
        for n in range(4):
            others = np.arange(9) != s
            worlds = [x[others & (included[:, n] == w), n] for w in (True, False)]
            if min(map(len, worlds)) >= 2:
                inside, outside = (
                    scipy.stats.norm.logpdf(x[s, n], w.mean(), w.std()) for w in worlds
                )
                expected[s, n] = inside - outside
    with scope():
        result = jax.jit(auditing.likelihood_ratios)(x, included)
    assert np.any(expected[:, :3] != 0)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9)


def test_auroc_of_perfect_attack_is_one():
    for m in (15, 30, 45):
        assert auditing.auroc(np.ones(30), np.zeros(m)) == 1
        assert auditing.auroc(np.zeros(30), np.ones(m)) == 0


def test_log_odds_match_logit_of_probability(x64):
    p = np.array([1e-9, 0.1, 0.5, 0.99, 1 - 1e-7])
    result = auditing.log_odds(-np.log(p))
    np.testing.assert_allclose(result, scipy.special.logit(p), rtol=1e-7)
    assert np.isfinite(auditing.log_odds(jnp.zeros(2))).all()


def test_shadow_models_are_trained_on_their_included_examples():
    """Each has a key of its own, and the coins are fair within 5 standard deviations.

    A false alarm has probability below 1e-6.
    """
    x = np.arange(50, dtype=np.float32)

    def run(mask, key):
        return jnp.sum(x * mask), jax.random.normal(key)

    @functools.partial(jax.jit, static_argnums=0)
    def train_shadows(batch_size):
        key, count = jax.random.key(0), {"num_models": 40}
        return auditing.train_shadows(run, 50, **count, key=key, batch_size=batch_size)

    included, (sums, noise) = jax.device_get(train_shadows(None))
    np.testing.assert_allclose(sums, included @ x, rtol=1e-6)
    assert len(np.unique(noise)) == 40
    assert abs(included.mean() - 0.5) < 5 * 0.5 / np.sqrt(included.size)
    assert len(np.unique(included, axis=0)) == 40
    np.testing.assert_allclose(train_shadows(7).outputs[0], sums, rtol=1e-6)


def test_one_model_judged_by_others_gives_valid_bound():
    """Models reveal a coin with probability p; bounds fail with probability 1 %."""
    rng, n, p = np.random.default_rng(9), 60, 0.75
    included = rng.random((AUDITS, 12, n)) < 0.5
    guesses = np.where(rng.random(included.shape) < p, included, ~included)
    statistic = guesses + 0.1 * rng.standard_normal(guesses.shape)
    ratios = jax.jit(jax.vmap(auditing.likelihood_ratios))(statistic, included)
    result = auditing.one_run_epsilon_lower(
        ratios[:, 0], included[:, 0], 0.0, guess_in=20, guess_out=20, confidence=0.99
    )
    assert count_failures(result, math.log(p / (1 - p))) < TOO_MANY
    assert np.median(result) > 0.1


SOME = np.linspace(0, 1, 40)
WRONG = {
    "scores_in": lambda: auditing.mu_lower(1.0, SOME, confidence=0.9),
    "scores_out": lambda: auditing.auroc(SOME, np.zeros(0)),
    "delta": lambda: auditing.epsilon_lower(SOME, SOME, 1.0, confidence=0.9),
    "confidence": lambda: auditing.mu_lower(SOME, SOME, confidence=0.4),
    "in total": lambda: auditing.gaussian_mu_lower(SOME[:9], SOME[:9], confidence=0.9),
    "included": lambda: auditing.one_run_mu_lower(
        SOME, SOME[:9] > 0, guess_in=1, guess_out=1, confidence=0.9
    ),
    "guess_in": lambda: auditing.one_run_mu_lower(
        SOME, SOME > 0, guess_in=30, guess_out=11, confidence=0.9
    ),
    "included must have the shape": lambda: auditing.likelihood_ratios(
        SOME[None], SOME[:9] > 0
    ),
    "false_positive_rate": lambda: auditing.true_positive_rate(SOME, SOME, 1.1),
    "quantiles": lambda: auditing.bootstrap_quantiles(
        auditing.auroc, SOME, SOME, [2.0], num_samples=3, key=jax.random.key(0)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_raise(name):
    with pytest.raises(ValueError, match=name):
        WRONG[name]()
