"""Audits of random participation: samplers, a whole plan, and the solvers.

No lower bound exceeds the reported ε, and where an attack observes everything, it is
close to it. False alarms: a bound here exceeds the reported ε with probability 1e-4 at
most; keys are fixed. Mechanisms with one defect each are detected.
"""

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpjax import auditing, solvers
from dpjax.accounting import gdp

CONFIDENCE, DELTA = 0.9999, 1e-2


@pytest.fixture(scope="module")
def sampler_audits(import_benchmark):
    return import_benchmark("_audits_samplers")


@pytest.fixture(scope="module")
def solver_audits(import_benchmark):
    return import_benchmark("_audits_solvers")


def test_mixture_scores_are_log_likelihood_ratios(x64):
    rng = np.random.default_rng(0)
    observed, cases = rng.standard_normal((3, 7)), rng.standard_normal((4, 3))
    rates, stddev = np.array([0.1, 0.2, 0.0, 0.7]), 1.7
    density = [
        scipy.stats.norm.logpdf(observed, case[:, None], stddev).sum(axis=0)
        for case in (*cases, np.zeros(3))
    ]
    expected = scipy.special.logsumexp(density[:-1], axis=0, b=rates[:, None])
    result = jax.jit(auditing.mixture_scores)(observed, cases, rates, stddev)
    np.testing.assert_allclose(result, expected - density[-1], rtol=1e-9)
    with pytest.raises(ValueError, match="cases"):
        auditing.mixture_scores(observed, cases.T, rates, stddev)
    with pytest.raises(ValueError, match="stddev"):
        auditing.mixture_scores(observed, cases, rates, 0.0)


SAMPLED = {
    "poisson": 0.6,
    "cyclic_poisson, banded": 0.6,
    "random_bins": 0.6,
    "random_bins, fresh": 0.6,
    "random_bins, geometric": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_sampler_audit_is_close_to_and_at_most_reported_epsilon(name, sampler_audits):
    assert list(sampler_audits.SAMPLED) == list(SAMPLED)
    sampled = sampler_audits.SAMPLED[name]
    scores = sampler_audits.of_sampled(sampled, num=60_000, key=jax.random.key(4))
    result = auditing.epsilon_lower(*scores, DELTA, confidence=CONFIDENCE)
    reported = float(sampled.reported(DELTA))
    assert SAMPLED[name] * reported < result <= reported


@pytest.mark.slow
def test_plan_audit_is_close_to_and_at_most_reported_epsilon(sampler_audits):
    scores = sampler_audits.of_plan(num_runs=100, key=jax.random.key(5))
    result = auditing.epsilon_lower(*scores, DELTA, confidence=CONFIDENCE)
    reported = sampler_audits.whole_plan().guarantee.epsilon(DELTA)
    assert 0.6 * reported < result <= reported
    scores = sampler_audits.of_plan(num_runs=20, key=jax.random.key(6), in_order=True)
    mu = auditing.gaussian_mu_lower(*scores, confidence=0.99)
    assert gdp.epsilon(mu, DELTA) > reported


# How many canaries detect each defect. One in Poisson samples of the whole data set
# takes 8,000, and is in the benchmark.
BROKEN = {
    "the same Poisson sample in every step": 4000,
    "batches in the data's order, not in bins": 2000,
    "bins drawn once, not in each epoch": 50_000,
    "batches in the data's order, with correlated noise": 2000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_audit_detects_sampling_other_than_claimed(name, sampler_audits):
    assert BROKEN.keys() <= sampler_audits.BROKEN.keys()
    claimed = sampler_audits.SAMPLED[sampler_audits.BROKEN[name][0]].reported(DELTA)
    scores = sampler_audits.of_broken(name, num=BROKEN[name], key=jax.random.key(7))
    if "order" in name:  # of known steps: scores are Gaussians
        mu = auditing.gaussian_mu_lower(*scores, confidence=0.99)
        assert gdp.epsilon(mu, DELTA) > claimed
    else:
        assert auditing.epsilon_lower(*scores, DELTA, confidence=0.99) > claimed


# The least fraction of the reported ε that 4,000 runs prove.
SOLVERS = {
    "solvers.noisy_gd": 0.9,
    "solvers.noisy_cyclic_gd": 0.85,
    "solvers.noisy_sgd": 0.1,
    "solvers.output_perturbation": 0.85,
    "solvers.output_perturbation, δ = 0": 0.7,
    "solvers.objective_perturbation": 0.8,
    "solvers.random_round_sgd": 0.2,
    "solvers.dp_nsgd": 0.5,
    "solvers.sensitivity_reduced_nsgd": 0.4,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_solver_audit_is_close_to_and_at_most_reported_epsilon(name, solver_audits):
    """Halved noise or batches that are not random are detected."""
    assert list(solver_audits.SOLVERS) == list(SOLVERS)
    solver, reported = solver_audits.SOLVERS[name], solver_audits.reported(name)
    at = {"num_runs": 4000, "key": jax.random.key(3)}

    def epsilon_lower_bound(confidence, **how):
        scores = solver_audits.of_solver(name, **at, **how)
        result = auditing.epsilon_lower(*scores, solver.delta, confidence=confidence)
        if not solver.gaussian:
            return result
        mu = auditing.gaussian_mu_lower(*scores, confidence=confidence)
        return max(result, gdp.epsilon(mu, solver.delta))

    assert SOLVERS[name] * reported < epsilon_lower_bound(CONFIDENCE) <= reported
    assert epsilon_lower_bound(0.99, broken=True) > reported


def test_every_solver_is_audited(solver_audits):
    names = {name.split(",")[0].removeprefix("solvers.") for name in SOLVERS}
    assert names <= set(dir(solvers))
    of_data = {
        name
        for name in dir(solvers)
        if "Result" in str(getattr(getattr(solvers, name), "__annotations__", {}))
        and name[0].islower()
    }
    assert names == of_data
