"""Estimates of ε, compared with the accountant that they start."""

import numpy as np
import pytest

from dpjax import Adjacency
from dpjax.accounting import _estimates, events, profiles


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [(0.8, 0.01, 1000, 1e-5), (3.0, 0.2, 60, 1e-9), (1.2, 0.9, 5, 1e-3)],
)
def test_estimate_is_close_to_the_accountant(adjacency, noise, rate, steps, delta):
    step = events.PoissonGaussian(noise, rate, adjacency)
    run = events.Composed((events.Repeated(step, steps),))
    bound = float(profiles.of(run).epsilon(delta))
    # The search's first guess may be wrong by a third.
    for about in (bound / 1.5, bound, 1.5 * bound):
        result = _estimates.epsilon(run, delta, about)
        np.testing.assert_allclose(result, bound, rtol=3e-5)


def test_estimate_of_several_steps_is_close_to_the_accountant():
    steps = [events.PoissonGaussian(z, 0.05, Adjacency.ADD_REMOVE) for z in (0.9, 2.0)]
    run = events.Composed(tuple(events.Repeated(step, 100) for step in steps))
    bound = float(profiles.of(run).epsilon(1e-6))
    np.testing.assert_allclose(_estimates.epsilon(run, 1e-6, bound), bound, rtol=3e-5)


def test_probability_of_a_full_batch_is_close_to_the_spared_share():
    from scipy.stats import binom

    n, rate, steps, delta, share = 5_000, 0.05, 100, 1e-5, 0.01
    ideal = events.PoissonGaussian(0.9, rate, Adjacency.ADD_REMOVE)
    run = events.Composed((events.Repeated(ideal, steps),))
    epsilon = float(profiles.of(run).epsilon((1 - share) * delta))
    about = _estimates.overflow(run, epsilon, delta, share)

    def suffices(capacity):
        step = events.TruncatedPoissonGaussian(
            0.9, rate, n, capacity, Adjacency.ADD_REMOVE
        )
        whole = events.Composed((events.Repeated(step, steps),))
        return float(profiles.of(whole).epsilon(delta)) <= epsilon

    # The first capacity that other examples fill at most as probably as estimated.
    capacity = next(
        c
        for c in range(250, n)
        if binom.logsf(c - 1, n - 1, rate) <= about.log_probability
    )
    assert suffices(capacity + 1)
    assert not suffices(capacity - 2)
