"""Where chance decides who takes part: samplers, a whole plan, and solvers as they are.

None gives away more than is reported, and where an attack sees all there is, it proves
most of that. False alarms: a bound here exceeds what is reported with probability 1e-4
at most; keys are fixed. What is broken, one thing each, is found.
"""

import importlib
import pathlib

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpjax import auditing, solvers
from dpjax.accounting import gdp

CONFIDENCE, DELTA = 0.9999, 1e-2


@pytest.fixture(scope="module")
def benchmark():
    """Imports what the benchmark has, too; the benchmarks are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(pathlib.Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module


@pytest.fixture(scope="module")
def samplers(benchmark):
    return benchmark("_audits_samplers")


@pytest.fixture(scope="module")
def of_solvers(benchmark):
    return benchmark("_audits_solvers")


def test_scores_are_likelihood_ratios(x64):
    rng = np.random.default_rng(0)
    seen, cases = rng.standard_normal((3, 7)), rng.standard_normal((4, 3))
    rates, stddev = np.array([0.1, 0.2, 0.0, 0.7]), 1.7
    density = [
        scipy.stats.norm.logpdf(seen, case[:, None], stddev).sum(axis=0)
        for case in (*cases, np.zeros(3))
    ]
    expected = scipy.special.logsumexp(density[:-1], axis=0, b=rates[:, None])
    found = jax.jit(auditing.mixture_scores)(seen, cases, rates, stddev)
    np.testing.assert_allclose(found, expected - density[-1], rtol=1e-9)
    with pytest.raises(ValueError, match="cases"):
        auditing.mixture_scores(seen, cases.T, rates, stddev)
    with pytest.raises(ValueError, match="stddev"):
        auditing.mixture_scores(seen, cases, rates, 0.0)


SAMPLED = {
    "poisson": 0.6,
    "cyclic_poisson, banded": 0.6,
    "random_bins": 0.6,
    "random_bins, fresh": 0.6,
    "random_bins, geometric": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_who_takes_part_by_chance_is_hidden_as_well_as_reported(name, samplers):
    assert list(samplers.SAMPLED) == list(SAMPLED)
    sampled = samplers.SAMPLED[name]
    scores = samplers.of_sampled(sampled, num=60_000, key=jax.random.key(4))
    found = auditing.epsilon_lower(*scores, DELTA, confidence=CONFIDENCE)
    said = float(sampled.reported(DELTA))
    assert SAMPLED[name] * said < found <= said


@pytest.mark.slow
def test_a_whole_plan_gives_away_what_it_reports_and_no_more(samplers):
    scores = samplers.of_plan(num_runs=100, key=jax.random.key(5))
    found = auditing.epsilon_lower(*scores, DELTA, confidence=CONFIDENCE)
    said = samplers.whole_plan().guarantee.epsilon(DELTA)
    assert 0.6 * said < found <= said
    scores = samplers.of_plan(num_runs=20, key=jax.random.key(6), in_order=True)
    mu = auditing.gaussian_mu_lower(*scores, confidence=0.99)
    assert gdp.epsilon(mu, DELTA) > said


# How many canaries find each; Poisson samples of all take 8,000, and the benchmark.
BROKEN = {
    "the same Poisson sample in every step": 4000,
    "batches in the data's order, not in bins": 2000,
    "bins drawn once, not in each epoch": 50_000,
    "batches in the data's order, with correlated noise": 2000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_other_ways_of_taking_part_than_are_claimed_are_found(name, samplers):
    assert BROKEN.keys() <= samplers.BROKEN.keys()
    claimed = samplers.SAMPLED[samplers.BROKEN[name][0]].reported(DELTA)
    scores = samplers.of_broken(name, num=BROKEN[name], key=jax.random.key(7))
    if "order" in name:  # of known steps: scores are Gaussians
        mu = auditing.gaussian_mu_lower(*scores, confidence=0.99)
        assert gdp.epsilon(mu, DELTA) > claimed
    else:
        assert auditing.epsilon_lower(*scores, DELTA, confidence=0.99) > claimed


# What 4,000 runs prove at least of what is reported: all where scores are Gaussians.
SOLVERS = {
    "solvers.noisy_gd": 0.9,
    "solvers.noisy_cyclic_gd": 0.85,
    "solvers.noisy_sgd": 0.1,
    "solvers.output_perturbation": 0.85,
    "solvers.output_perturbation, δ = 0": 0.7,
    "solvers.random_round_sgd": 0.2,
    "solvers.dp_nsgd": 0.5,
    "solvers.sensitivity_reduced_nsgd": 0.4,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_gives_away_no_more_than_it_reports(name, of_solvers):
    """And where its noise is halved, or its batches are not random, that is found."""
    assert list(of_solvers.SOLVERS) == list(SOLVERS)
    solver, said = of_solvers.SOLVERS[name], of_solvers.reported(name)
    at = {"num_runs": 4000, "key": jax.random.key(3)}

    def proven(confidence, **how):
        scores = of_solvers.of_solver(name, **at, **how)
        found = auditing.epsilon_lower(*scores, solver.delta, confidence=confidence)
        if not solver.gaussian:
            return found
        mu = auditing.gaussian_mu_lower(*scores, confidence=confidence)
        return max(found, gdp.epsilon(mu, solver.delta))

    assert SOLVERS[name] * said < proven(CONFIDENCE) <= said
    assert proven(0.99, broken=True) > said


def test_every_solver_is_attacked(of_solvers):
    names = {name.split(",")[0].removeprefix("solvers.") for name in SOLVERS}
    assert names <= set(dir(solvers))
    of_data = {
        name
        for name in dir(solvers)
        if "Result" in str(getattr(getattr(solvers, name), "__annotations__", {}))
        and name[0].islower()
    }
    assert names == of_data
