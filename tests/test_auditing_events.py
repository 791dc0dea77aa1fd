"""Mechanisms known by their events, private statistics and searches under attack.

No lower bound exceeds the ε of the event, and each comes close to it. False alarms: a
bound here exceeds the true ε with probability 1e-4 at most, so that one of all 27 does
with probability below 3e-3; keys are fixed. A twin with half of the noise is detected
at 99 %.
"""

import typing

import jax
import numpy as np
import pytest

from dpjax import auditing, statistics
from dpjax.accounting import events, gdp, selection


@pytest.fixture(scope="module")
def audits(import_benchmark):
    return import_benchmark("_audits_events")


# The least fraction of ε that 50,000 runs on each data set prove. An attack on one
# outcome of many steps has less than the best test of all of them.
MECHANISMS = {
    "Laplace": 0.9,
    "DiscreteLaplace": 0.9,
    "DiscreteGaussian": 0.7,
    "RandomizedResponse": 0.9,
    "GaussianMixture, Poisson samples of a user's two examples": 0.7,
    "TruncatedPoissonGaussian": 0.7,
    "FixedSizeGaussian": 0.7,
    "Pure, randomised response": 0.9,
    "EpsilonDelta, randomised response that may fail": 0.9,
    "Pure, exponential mechanism": 0.8,
    "Pure, permute-and-flip": 0.9,
    "Pure, report-noisy-max, exponential noise": 0.9,
    "Pure, report-noisy-max, Laplace noise": 0.85,
    "Pure, sparse vector": 0.45,
    "statistics.sum": 0.9,
    "statistics.mean": 0.9,
    "statistics.mean, discrete": 0.9,
    "statistics.variance": 0.7,
    "statistics.variance about a center": 0.9,
    "statistics.covariance": 0.7,
    "statistics.covariance about a center": 0.9,
    "statistics.standardize": 0.7,
    "statistics.histogram": 0.9,
    "statistics.quantile": 0.45,
    "statistics.loss": 0.9,
    "statistics.accuracy": 0.9,
    "statistics.auc": 0.7,
}
# Of other audits: `test_auditing_mechanisms.py` and `test_auditing_samplers.py`.
ELSEWHERE = {"Gaussian", "PoissonGaussian", "RandomAllocation"}


def test_every_step_and_every_statistic_is_audited(audits):
    assert list(audits.all_mechanisms()) == list(MECHANISMS)
    names = {name.split(",")[0].split(" about")[0] for name in MECHANISMS}
    steps = {x.__name__ for x in typing.get_args(events.Step)}
    released = {
        f"statistics.{name}"
        for name in dir(statistics)
        if getattr(getattr(statistics, name), "__annotations__", {}).get("return")
        is statistics.Released
    }
    assert len(released) >= 9
    assert names | ELSEWHERE == steps | released


def audited(name, audits, num=50_000):
    """The bounds of the mechanism and of its broken twin, and the ε of the event."""
    whole = audits.of_event(name, num=num, key=jax.random.key(1))
    broken = audits.of_event(name, num=num, key=jax.random.key(2), broken=True)
    return (
        audits.proven(name, whole, confidence=0.9999),
        audits.proven(name, broken, confidence=0.99),
        audits.reported(name),
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("name", [x for x in MECHANISMS if "discrete" not in x])
def test_audit_is_close_to_and_at_most_epsilon_of_the_event(name, audits):
    result, found_of_twin, reported = audited(name, audits)
    assert MECHANISMS[name] * reported < result <= reported
    assert found_of_twin > reported


@pytest.mark.slow
def test_audit_of_a_statistic_on_a_lattice(audits):
    result, found_of_twin, reported = audited(
        "statistics.mean, discrete", audits, num=10_000
    )
    assert 0.9 * reported < result <= reported < found_of_twin
    # The lattice costs next to nothing.
    np.testing.assert_allclose(reported, audits.reported("statistics.mean"), rtol=1e-3)


@pytest.mark.slow
def test_audit_of_a_search_proves_most_of_its_epsilon(import_benchmark):
    """Of `tune` with geometric K of mean 10, by the worst known score.

    The outputs of all searches are computed together, and are those of `tune`.
    """
    searches, bounds = map(import_benchmark, ("_searches", "_search_bounds"))
    law, mu, delta = selection.Geometric(10.0), 0.5, 1e-2
    run = events.Gaussian(mu)
    known = bounds.epsilon_lower(run, delta, law)
    attack = searches.best_attack(mu, 0.95 * known, law)
    # The recursion that finds the attack has the rates of the one of the bounds.
    inside, outside = attack.rates
    (pair,) = bounds.pairs_of(run)
    exact = bounds.delta_lower(pair, 0.95 * known, law)
    np.testing.assert_allclose(
        inside - np.exp(0.95 * known) * outside, exact, rtol=1e-6
    )
    keys = jax.random.split(jax.random.key(4), 4)
    alone = [searches.search(attack, law, mu, key) for key in keys]
    together = searches.many_searches(attack, law, mu, keys)
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-6)

    scores = searches.of_searches(attack, law, mu, num=50_000, key=jax.random.key(5))
    # Five standard errors: a false alarm below 1e-6 on each side.
    for rate, won in zip(attack.rates, scores, strict=True):
        assert abs(won.mean() - rate) < 5 * np.sqrt(rate / len(won))
    result = auditing.epsilon_at(*scores, delta, threshold=0.5, confidence=0.99)
    reported = selection.epsilon(run, delta, repetitions=law)
    assert 0.85 * reported < result <= reported
    # Nobody may report the ε of one run for the search.
    assert result > 1.8 * gdp.epsilon(mu, delta)
