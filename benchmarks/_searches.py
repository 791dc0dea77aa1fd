"""Attack the best of several runs, of which only the best run's output is released.

A run releases a number with Gaussian noise of standard deviation 1. The mean is shifted
by μ if the example participates. The attacker chooses the score, which is an order of
the outputs for which the best run reveals most, and bets on some of the outputs. The
dynamic programme of `_search_bounds` computes the order and the bets.
"""

import functools
from typing import NamedTuple

import _search_bounds
import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import auditing
from dpjax._core import keys
from dpjax.accounting import events, selection


class Attack(NamedTuple):
    """An order of outputs and a bet.

    Attributes:
      edges: the boundaries between the atoms of the outputs, f64[n − 1].
      rank: the place of each atom in the order, f64[n]; the last place has the best
        score.
      bets: whether the attacker bets on each atom, bool[n].
      rates: the probabilities of winning the bet with the example and without the
        example.
    """

    edges: np.ndarray
    rank: np.ndarray
    bets: np.ndarray
    rates: tuple[float, float]


def best_attack(mu: float, epsilon: float, law: selection.Geometric) -> Attack:
    """Return the attack of largest δ at one ε, by the recursion of `delta_lower`."""
    (pair,) = _search_bounds.pairs_of(events.Gaussian(mu))
    # Entry [i, j] is G at the probability of the atoms i, …, j − 1.
    first, second = (
        _search_bounds.generating_function(law, np.maximum(x - x[:, None], 0))
        for x in pair
    )
    score = first - np.exp(epsilon) * second
    n = len(score) - 1
    above = np.maximum(score[:, 1:] - score[:, :-1], 0)  # the next atom is j
    below = np.maximum(score[:-1] - score[1:], 0)  # the next atom is i − 1
    value, goes_up = np.zeros(1), {}
    for size in range(n - 1, -1, -1):
        up, down = np.full((2, n - size + 1), -np.inf)
        up[:-1] = np.diagonal(above, size) + value
        down[1:] = np.diagonal(below, size + 1) + value
        value, goes_up[size] = np.maximum(up, down), up >= down
    # Start at the best first atom, and take the better of both steps.
    low = high = int(np.argmax(value))
    rank, bets, rates = np.zeros(n), np.zeros(n, bool), np.zeros(2)
    for size in range(n):
        old = low, high
        low, high = (low, high + 1) if goes_up[size][low] else (low - 1, high)
        atom = high - 1 if low == old[0] else low
        rank[atom] = size
        won = np.array([x[low, high] - x[old] for x in (first, second)])
        bets[atom] = won[0] > np.exp(epsilon) * won[1]
        rates += won * bets[atom]
    # The atoms of `pairs_of` have these edges.
    width = _search_bounds._WIDTH
    edges = np.linspace(-width, mu + width, n - 1)
    return Attack(edges, rank, bets, (float(rates[0]), float(rates[1])))


def search(
    attack: Attack, law: selection.Geometric, mean: float, key: jax.Array
) -> float:
    """Return the output that `dpjax.tune` releases, for the attack's score."""
    best = dpjax.tune(
        [None],
        lambda setting, key: mean + jax.random.normal(key),
        lambda output, key: attack.rank[np.searchsorted(attack.edges, float(output))],
        repetitions=law,
        event=events.Gaussian(1.0),
        delta=1e-2,
        key=key,
    )
    return float(best.output)


@functools.partial(jax.jit, static_argnames="num_runs")
def _outputs(key: jax.Array, mean: float, *, num_runs: int) -> jax.Array:
    """Return the outputs of the first runs of a search, from the key of `tune`."""
    of_runs = jax.random.fold_in(keys.stream(key, "tune"), 2)

    def output(run: jax.Array) -> jax.Array:
        return mean + jax.random.normal(jax.random.fold_in(of_runs, run))

    return jax.vmap(output)(jnp.arange(num_runs))


@jax.jit
def _bits(key: jax.Array) -> jax.Array:
    """Return the bits from which `tune` draws the number of runs."""
    of_count = jax.random.fold_in(keys.stream(key, "tune"), 0)
    return jax.random.bits(of_count, (4,), jnp.uint32)


def many_searches(
    attack: Attack, law: selection.Geometric, mean: float, of_searches: jax.Array
) -> np.ndarray:
    """Return the output of `search` for each key, f32[n], computed together."""
    words = np.asarray(jax.vmap(_bits)(of_searches)).astype(np.float64)
    uniform = (words[:, 3] * 2.0**32 + words[:, 2]) / 2.0**64
    # P(K <= k) is 1 − (1 − 1/mean)^k.
    counts = 1 + np.floor(np.log1p(-uniform) / np.log1p(-1 / law.mean)).astype(int)
    result, size = [], 20_000
    for i in range(0, len(counts), size):
        part = counts[i : i + size]
        run = functools.partial(_outputs, num_runs=int(8 * np.ceil(part.max() / 8)))
        outputs = np.asarray(jax.vmap(run, (0, None))(of_searches[i : i + size], mean))
        ranks = attack.rank[np.searchsorted(attack.edges, outputs.astype(np.float64))]
        ranks[np.arange(ranks.shape[1]) >= part[:, None]] = -1
        best = np.argmax(ranks, axis=1)  # the first run of equal scores
        result.append(outputs[np.arange(len(part)), best])
    return np.concatenate(result)


def of_searches(
    attack: Attack, law: selection.Geometric, mu: float, *, num: int, key: jax.Array
) -> auditing.Outputs:
    """Return whether each of the searches wins the bet.

    There are num searches with the example and num searches without the example.
    """
    sides = []
    for mean, of_side in zip((mu, 0.0), jax.random.split(key), strict=True):
        released = many_searches(attack, law, mean, jax.random.split(of_side, num))
        sides.append(attack.bets[np.searchsorted(attack.edges, released)])
    return auditing.Outputs(*(np.asarray(x, np.float32) for x in sides))
