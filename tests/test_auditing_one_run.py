"""Bounds from one run against the worst possible mechanism, found by brute force.

With few canaries a mechanism is a table: the probability of each vector of guesses for
each vector of coins. Privacy constraints on it are linear, and so is the probability of
at least v correct guesses: a linear programme gives its maximum, p. A bound at any
confidence above 1 − p must then not exceed the true ε or μ.
"""

import itertools

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import scipy.stats

from dpjax import auditing
from dpjax.accounting import gdp


def max_success_probability(m, r, v, profile):
    """Maximum of P(W >= v) for m canaries, r guesses, subject to all pairs (ε, δ)."""
    coins = list(itertools.product((0, 1), repeat=m))
    answers = [
        y for y in itertools.product((-1, 0, 1), repeat=m) if m - y.count(0) == r
    ]
    shape = (len(coins), len(answers))
    table = np.arange(shape[0] * shape[1]).reshape(shape)
    neighbours = [
        (i, j)
        for (i, x), (j, z) in itertools.product(enumerate(coins), repeat=2)
        if sum(a != b for a, b in zip(x, z, strict=True)) == 1
    ]
    # Variables: the table, and of each pair, each (ε, δ) and each guess what exceeds
    # e^ε times the neighbour's probability; together these are at most δ.
    rows, limits, count = [], [], table.size
    for (i, j), (epsilon, delta) in itertools.product(neighbours, profile):
        beyond = range(count, count + shape[1])
        rows += [
            {table[i, y]: 1.0, table[j, y]: -np.exp(epsilon), s: -1.0}
            for y, s in enumerate(beyond)
        ]
        limits += [0.0] * shape[1] + [delta]
        rows.append(dict.fromkeys(beyond, 1.0))
        count += shape[1]
    entries = [(k, c, x) for k, row in enumerate(rows) for c, x in row.items()]
    at, column, value = zip(*entries, strict=True)
    sums = scipy.sparse.kron(scipy.sparse.eye(shape[0]), np.ones(shape[1]))
    sums = scipy.sparse.hstack(
        [sums, scipy.sparse.csr_matrix((shape[0], count - table.size))]
    )
    aim = np.zeros(count)
    for i, x in enumerate(coins):
        for k, y in enumerate(answers):
            right = sum(g == 2 * c - 1 for c, g in zip(x, y, strict=True))
            aim[table[i, k]] = -(right >= v) / len(coins)
    result = scipy.optimize.linprog(
        aim,
        A_ub=scipy.sparse.csr_matrix((value, (at, column)), (len(rows), count)),
        b_ub=limits,
        A_eq=sums,
        b_eq=np.ones(shape[0]),
    )
    assert result.success
    return -result.fun


# Canaries and guesses, all of them correct: a bound needs p below a half.
CASES = [(2, 2), (3, 2), (3, 3), (4, 2), (4, 3)]


def all_correct_guesses(m, r):
    """Scores and coins for which the r largest scores are guessed, all correctly."""
    return (np.arange(m, dtype=float), np.arange(m) >= m - r), {
        "guess_in": r,
        "guess_out": 0,
    }


@pytest.mark.diagonal
@pytest.mark.parametrize(("m", "r"), CASES)
def test_epsilon_bound_error_rate_holds_for_worst_mechanism(m, r, x64):
    epsilon, (scores, guesses) = 0.4, all_correct_guesses(m, r)
    for delta in (0.0, 0.03):
        p = max_success_probability(m, r, r, [(epsilon, delta)])
        assert 0.1 < p < 0.5

        def bound(error, delta=delta):
            return auditing.one_run_epsilon_lower(
                *scores, delta, **guesses, confidence=1 - error
            )

        assert bound(p * (1 - 1e-6)) <= epsilon
        if delta == 0:  # attained by randomised response, so no bound is larger
            honest = 1 / (1 + np.exp(-epsilon))
            np.testing.assert_allclose(p, honest**r, rtol=1e-6)
            assert bound(p * (1 + 1e-5)) > epsilon - 1e-4


@pytest.mark.diagonal
@pytest.mark.parametrize(("m", "r"), CASES[:3])
def test_mu_bound_error_rate_holds_for_worst_mechanism(m, r, x64):
    """The curve is imposed at 24 pairs, which raises p by less than a thousandth.

    So p equals the bound's error rate: no bound of this kind is better.
    """
    mu, (scores, guesses) = 0.5, all_correct_guesses(m, r)
    profile = [(e, float(gdp.delta(mu, e))) for e in np.linspace(0.0, 1.2, 24)]
    p = max_success_probability(m, r, r, profile)
    # More than Gaussian noise on every coin, and guesses by its sign.
    assert scipy.stats.norm.cdf(mu / 2) ** r < p < 0.5
    low, high = (
        auditing.one_run_mu_lower(*scores, **guesses, confidence=1 - p * factor)
        for factor in (1 - 1e-3, 1 + 1e-3)
    )
    assert low <= mu < high
