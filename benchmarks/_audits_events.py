"""Define attacks on mechanisms known by an event, and on private statistics.

Each mechanism runs many times on two neighbouring data sets that are a hard case for
its privacy. Where dpjax implements a mechanism, the attack calls dpjax. dpjax only
accounts for Laplace noise, randomised response and selections, so this module
implements these mechanisms by their definitions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import Adjacency, auditing, sampling, statistics
from dpjax.accounting import events, gdp, profiles
from dpjax.noise import _discrete

DELTA = 1e-2


class Mechanism(NamedTuple):
    """A mechanism, the event that accounts for it, and an attack.

    Attributes:
      event: the claimed event.
      score: runs the mechanism once: maps a data set, a key and a factor of the noise
        to a score.
      inside: the data set under which scores are large.
      outside: the neighbour of `inside`.
      threshold: the attack's threshold, fixed before any run; None where scores are
        Gaussian with one variance; inf where the audit tries all thresholds.
      delta: the δ at which ε is computed.
    """

    event: events.Event
    score: Callable[[Any, jax.Array, float], jax.Array]
    inside: Any
    outside: Any
    threshold: float | None
    delta: float = DELTA


# --- noise on a number: the sensitivity on one data set, 0 on its neighbour

SCALE, STDDEV, CHANGE = 0.7, 1.3, 700


def _laplace(x: float, key: jax.Array, factor: float) -> jax.Array:
    return x + factor * SCALE * jax.random.laplace(key)


def _discrete_laplace(x: float, key: jax.Array, factor: float) -> jax.Array:
    # An exponential variable rounded down is geometric. The difference of two geometric
    # variables is discrete Laplace.
    two = jnp.floor(factor * 2 * SCALE * jax.random.exponential(key, (2,)))
    return x + two[0] - two[1]


def _discrete_gaussian(x: float, key: jax.Array, factor: float) -> jax.Array:
    # The noise comes from dpjax's table with σ = 512. The noise times the factor is
    # rounded down to a whole number.
    return x + jnp.floor(factor * _discrete.draw_table(key, ()))


def _gaussian(x: jax.Array, key: jax.Array, factor: float) -> jax.Array:
    noise = dpjax.add_gaussian_noise(factor * STDDEV, key=key)
    return auditing.released(noise, jnp.reshape(x, 1))[0]


# --- the Gaussian mechanism on a random batch of examples

SIZE, BATCH, RATE, USER_RATE = 8, 3, 0.9, 0.3


def _on_sample(draw: Callable[[jax.Array], sampling.Batch]):
    def score(values: np.ndarray, key: jax.Array, factor: float) -> jax.Array:
        keys = jax.random.split(key)
        batch = draw(keys[0])
        selected = jnp.where(batch.mask, jnp.asarray(values)[batch.indices], 0)
        return _gaussian(jnp.sum(selected), keys[1], factor)

    return score


def _poisson(rate: float, size: int):
    return lambda key: sampling.poisson(
        SIZE, rate, max_batch_size=size, key=key, step=0
    )


def _fixed_size(key: jax.Array) -> sampling.Batch:
    return sampling.fixed_size(SIZE, BATCH, key=key, step=0)


def _examples(count: int, others: float) -> np.ndarray:
    """Return SIZE values: the first `count` are 1, the rest equal `others`."""
    return np.where(np.arange(SIZE) < count, 1, others).astype(np.float32)


# --- responses: the score is whether the data set `True` makes the answer likely

PARAMETER, BUCKETS, EPSILON = 0.5, 4, 1.5


def _response(own: bool, key: jax.Array, factor: float) -> jax.Array:
    keys = jax.random.split(key)
    anything = jax.random.uniform(keys[0]) < factor * PARAMETER
    answer = jax.random.randint(keys[1], (), 0, BUCKETS)
    return jnp.where(anything, answer, jnp.where(own, 0, 1)) == 0


def _two_answers(own: bool, key: jax.Array, factor: float) -> jax.Array:
    honest = jax.random.bernoulli(key, jax.nn.sigmoid(EPSILON / factor))
    return honest == own


def _four_answers(own: bool, key: jax.Array, factor: float) -> jax.Array:
    # With probability δ the answer has no noise.
    keys = jax.random.split(key)
    open_ = jax.random.bernoulli(keys[0], DELTA)
    return jnp.where(open_, own, _two_answers(own, keys[1], factor))


# --- selections at temperature 1: the attack's score is whether option 0 is selected.
# All options' scores change by 1 between the two data sets: the score of option 0
# falls, and all other scores rise.


def _exponential(scores: np.ndarray, key: jax.Array, factor: float) -> jax.Array:
    return jax.random.categorical(key, scores / factor) == 0


def _permute_and_flip(scores: np.ndarray, key: jax.Array, factor: float) -> jax.Array:
    # The mechanism selects the first option, in a random order, whose coin shows heads.
    # The coin of the best option always shows heads.
    order, coins = jax.random.split(key)
    rank = jax.random.permutation(order, len(scores))
    heads = jax.random.uniform(coins, len(scores)) < jnp.exp(
        (scores - jnp.max(scores)) / factor
    )
    return jnp.argmin(jnp.where(heads, rank, len(scores))) == 0


def _noisy_max(draw: Callable[..., jax.Array]):
    def score(scores: np.ndarray, key: jax.Array, factor: float) -> jax.Array:
        return jnp.argmax(scores + factor * draw(key, scores.shape)) == 0

    return score


def _scores(gap: float, options: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of all options on two neighbouring data sets.

    The first option's score is below the other scores by gap on one data set, and by
    gap + 2 on the other.
    """
    first = np.arange(options) == 0
    return tuple(np.where(first, -x, x) / 2.0 for x in (gap, gap + 2))


# --- sparse vector: five low scores, then two high scores

THRESHOLD_SCALE, SCORE_SCALE, POSITIVE = 1.5, 4.0, 2
LOW_THEN_HIGH = np.array([0.0] * 5 + [2.0] * POSITIVE)


def _sparse_vector(scores: np.ndarray, key: jax.Array, factor: float) -> jax.Array:
    """Return whether all low scores get `no` and all high scores `yes`."""
    keys = jax.random.split(key)
    threshold = factor * THRESHOLD_SCALE * jax.random.laplace(keys[0])
    noise = factor * SCORE_SCALE * jax.random.laplace(keys[1], scores.shape)
    yes = scores + noise > threshold
    # The mechanism ends at the second `yes`, which here is the last score.
    return jnp.all(yes == (LOW_THEN_HIGH > 0))


def _mechanisms() -> dict[str, Mechanism]:
    """Return the mechanisms that dpjax knows only by an event."""
    # None, one or both of a user's two examples participate.
    weights = (
        (1 - USER_RATE) ** 2,
        2 * USER_RATE * (1 - USER_RATE),
        USER_RATE**2,
    )
    alone, nobody = _examples(1, -1), _examples(0, -1)
    truncated = events.TruncatedPoissonGaussian(
        STDDEV, RATE, SIZE, BATCH, Adjacency.ADD_REMOVE
    )
    mixture = events.GaussianMixture(
        STDDEV, (0.0, 1.0, 2.0), weights, Adjacency.ADD_REMOVE
    )
    selection = {"threshold": 0.5, "delta": 0.0}
    noise = functools.partial(Mechanism, events.Pure(2.0), **selection)
    two, many = _scores(0.0, 2), _scores(0.0, 8)
    spent = 1 / THRESHOLD_SCALE + 2 * POSITIVE / SCORE_SCALE
    changed = np.where(LOW_THEN_HIGH > 0, -1.0, 1.0)
    return {
        "Laplace": Mechanism(
            events.Laplace(SCALE), _laplace, 1.0, 0.0, threshold=0.9, delta=1e-4
        ),
        "DiscreteLaplace": Mechanism(
            events.DiscreteLaplace(2 * SCALE, 2),
            _discrete_laplace,
            2.0,
            0.0,
            threshold=1.5,
            delta=1e-4,
        ),
        "DiscreteGaussian": Mechanism(
            events.DiscreteGaussian(512.0, CHANGE),
            _discrete_gaussian,
            float(CHANGE),
            0.0,
            threshold=np.inf,
        ),
        "RandomizedResponse": Mechanism(
            events.RandomizedResponse(PARAMETER, BUCKETS),
            _response,
            True,
            False,
            threshold=0.5,
            delta=1e-4,
        ),
        "GaussianMixture, Poisson samples of a user's two examples": Mechanism(
            mixture,
            _on_sample(_poisson(USER_RATE, SIZE)),
            _examples(2, 0),
            _examples(0, 0),
            threshold=np.inf,
        ),
        "TruncatedPoissonGaussian": Mechanism(
            truncated,
            _on_sample(_poisson(RATE, BATCH)),
            alone,
            nobody,
            threshold=np.inf,
        ),
        "FixedSizeGaussian": Mechanism(
            events.FixedSizeGaussian(2 / STDDEV, BATCH / SIZE),
            _on_sample(_fixed_size),
            alone,
            nobody,
            threshold=np.inf,
        ),
        "Pure, randomised response": Mechanism(
            events.Pure(EPSILON), _two_answers, True, False, **selection
        ),
        "EpsilonDelta, randomised response that may fail": Mechanism(
            events.EpsilonDelta(EPSILON, DELTA), _four_answers, True, False, 0.5
        ),
        "Pure, exponential mechanism": noise(_exponential, *_scores(2.0, 2)),
        "Pure, permute-and-flip": noise(_permute_and_flip, *two),
        "Pure, report-noisy-max, exponential noise": noise(
            _noisy_max(jax.random.exponential), *two
        ),
        "Pure, report-noisy-max, Laplace noise": noise(
            _noisy_max(jax.random.laplace), *many
        ),
        "Pure, sparse vector": Mechanism(
            events.Pure(spent),
            _sparse_vector,
            LOW_THEN_HIGH,
            LOW_THEN_HIGH + changed,
            **selection,
        ),
    }


# --- private statistics. Most scores are linear in the noise, and so Gaussian. Where a
# score is only nearly linear, the audit tries all thresholds. A row of NaN contributes
# zero, as an absent example does.

Z, CLIP_NORM, SHARE = 1.3, 0.7, 0.3
REPLACE = {"adjacency": Adjacency.REPLACE}
ZERO_OUT = {"adjacency": Adjacency.ZERO_OUT}
CLIP = {"clip_norm": CLIP_NORM}


def _rows(
    first: tuple[float, ...], *others: tuple[float, ...], times: int = 1
) -> np.ndarray:
    """Return `first` and `times` copies of `others`, in units of the clip norm."""
    rows = np.concatenate([[first], np.tile(others, (times, 1))])
    return (CLIP_NORM * rows).astype(np.float32)


def _statistic(
    release: Callable[..., statistics.Released],
    score: Callable[[Any], jax.Array],
    inside: Any,
    outside: Any,
    threshold: float | None = None,
) -> Mechanism:
    """Return a statistic as a mechanism whose event is the one that it reports."""

    def one(data: Any, key: jax.Array, factor: float) -> jax.Array:
        return score(release(data, noise_multiplier=factor * Z, key=key).value)

    shapes = jax.eval_shape(
        lambda: release(inside, noise_multiplier=Z, key=jax.random.key(0))
    )
    return Mechanism(shapes.event, one, inside, outside, threshold)


def _auc_data(place: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and labels with one negative example at the score `place`.

    Each of the two bins contains 200 further negative examples. There are 20,000
    positive examples, so that the noise of the positive counts hardly changes the area
    under the curve. The area then grows with the count of negative examples in the
    first bin as it falls with the count of negative examples in the second bin.
    """
    scores = np.concatenate([[place], np.repeat([0.2, 0.7], 200), np.full(20_000, 0.7)])
    labels = np.concatenate([np.zeros(401, int), np.ones(20_000, int)])
    return scores.astype(np.float32), labels


def _statistics() -> dict[str, Mechanism]:
    """Return the functions of `dpjax.statistics` as mechanisms."""
    absent, x, y = np.nan, (1.0, 0.0), (0.0, 1.0)
    diagonal, other_diagonal = (0.5**0.5, 0.5**0.5), (0.5**0.5, -(0.5**0.5))
    mean = functools.partial(statistics.mean, **CLIP, **REPLACE)
    # Without a center, a row u adds S(u) − 2 m u to the variance, where S(u) holds
    # products of u's entries and m is the mean. At m = 1/2 the row −1 adds 2, of which
    # both terms contribute 1.
    beside_half = {"times": 2000}
    variance = functools.partial(statistics.variance, **CLIP, **ZERO_OUT)
    covariance = functools.partial(statistics.covariance, **CLIP, **ZERO_OUT)
    standardize = functools.partial(statistics.standardize, **CLIP, **ZERO_OUT)

    def center_and_scale(scaling: statistics.Standardization) -> jax.Array:
        # The matched filter weights both estimates by their shares of μ².
        first, second = scaling.center[0] / CLIP_NORM, scaling.scale[0] / CLIP_NORM
        return SHARE * first + (1 - SHARE) * second**2

    return {
        "sum": _statistic(
            functools.partial(statistics.sum, **CLIP, **ZERO_OUT),
            lambda value: value[0],
            _rows(x, y),
            _rows((absent, 0.0), y),
        ),
        "mean": _statistic(
            mean, lambda value: value[0], _rows(x, y), _rows((-1.0, 0.0), y)
        ),
        "mean, discrete": _statistic(
            functools.partial(mean, arithmetic="discrete"),
            lambda value: value[0],
            _rows(x, y),
            _rows((-1.0, 0.0), y),
        ),
        "variance": _statistic(
            variance,
            lambda value: value[0],
            _rows((-1.0,), (0.5,), **beside_half),
            _rows((absent,), (0.5,), **beside_half),
            threshold=np.inf,
        ),
        "variance about a center": _statistic(
            functools.partial(statistics.variance, center=0.0, **CLIP, **REPLACE),
            lambda value: value[0] - value[1],
            _rows(x, y),
            _rows(y, y),
        ),
        "covariance": _statistic(
            covariance,
            lambda value: value[0, 0],
            _rows((-1.0, 0.0), (0.5, 0.0), **beside_half),
            _rows((absent, 0.0), (0.5, 0.0), **beside_half),
            threshold=np.inf,
        ),
        "covariance about a center": _statistic(
            functools.partial(
                statistics.covariance, center=np.zeros(2), **CLIP, **REPLACE
            ),
            lambda value: value[0, 1],
            _rows(diagonal, y),
            _rows(other_diagonal, y),
        ),
        "standardize": _statistic(
            functools.partial(standardize, share=SHARE),
            center_and_scale,
            _rows((2.0,), (0.5,), (-0.5,), times=1000),
            _rows((absent,), (0.5,), (-0.5,), times=1000),
            threshold=np.inf,
        ),
        "histogram": _statistic(
            functools.partial(statistics.histogram, num_categories=3, **REPLACE),
            lambda value: value[0] - value[2],
            np.array([0, 1, 1, 2]),
            np.array([2, 1, 1, 2]),
        ),
        # The example moves all four bisection steps in the same direction.
        "quantile": _statistic(
            lambda data, **terms: statistics.quantile(
                data, 0.5, lower=0.0, upper=1.0, num_steps=4, **REPLACE, **terms
            ),
            lambda value: value,
            np.array([1.0, 0, 1]),
            np.array([0.0, 0, 1]),
            threshold=0.95,
        ),
        "loss": _statistic(
            functools.partial(statistics.loss, bound=CLIP_NORM, **REPLACE),
            lambda value: value,
            CLIP_NORM * np.array([1.0, 0, 1]),
            CLIP_NORM * np.array([0.0, 0, 1]),
        ),
        "accuracy": _statistic(
            lambda data, **terms: statistics.accuracy(*data, **REPLACE, **terms),
            lambda value: value,
            (np.array([1, 2, 0]), np.array([1, 2, 2])),
            (np.array([0, 2, 0]), np.array([1, 2, 2])),
        ),
        "auc": _statistic(
            lambda data, **terms: statistics.auc(
                *data, edges=np.array([0.0, 0.5, 1.0]), **REPLACE, **terms
            ),
            lambda value: value,
            _auc_data(0.2),
            _auc_data(0.7),
            threshold=np.inf,
        ),
    }


@functools.cache
def all_mechanisms() -> dict[str, Mechanism]:
    """Return all mechanisms that are audited, by name."""
    statistics_by_name = {f"statistics.{k}": v for k, v in _statistics().items()}
    return _mechanisms() | statistics_by_name


@functools.partial(jax.jit, static_argnames=("score", "factor", "num"))
def _runs(score: Any, factor: float, num: int, data: Any, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, num)
    scores = jax.vmap(lambda key: score(data, key, factor))(keys)
    return scores.astype(jnp.float32)


def of_event(
    name: str, *, num: int, key: jax.Array, broken: bool = False
) -> auditing.Outputs:
    """Score num runs on each of the two data sets.

    If broken, the mechanism has half of the noise.
    """
    mechanism = all_mechanisms()[name]
    factor = 0.5 if broken else 1.0
    return auditing.Outputs(
        *(
            _runs(mechanism.score, factor, num, data, of_side)
            for data, of_side in zip(
                (mechanism.inside, mechanism.outside),
                jax.random.split(key),
                strict=True,
            )
        )
    )


def reported(name: str) -> float:
    """Return the ε of the event."""
    mechanism = all_mechanisms()[name]
    return float(profiles.of(mechanism.event).epsilon(mechanism.delta))


def proven(name: str, scores: auditing.Outputs, *, confidence: float) -> float:
    """Return a lower bound on ε that holds with the given confidence."""
    mechanism = all_mechanisms()[name]
    threshold, delta = mechanism.threshold, mechanism.delta
    if threshold is None:
        mu = auditing.gaussian_mu_lower(*scores, confidence=confidence)
        return float(gdp.epsilon(mu, delta)) if mu > 0 else 0.0
    if threshold == np.inf:
        return float(auditing.epsilon_lower(*scores, delta, confidence=confidence))
    return float(
        auditing.epsilon_at(*scores, delta, threshold=threshold, confidence=confidence)
    )
