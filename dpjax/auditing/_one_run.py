"""Lower bounds on ε and μ from the scores of many canaries in a single run.

Canaries take part independently, with probability 1/2 each. The attack guesses that the
canaries with the highest scores took part, and that the canaries with the lowest scores
did not. For all other canaries, the attack makes no guess. The bounds depend on the
number of right guesses, and do not assume that scores are independent.

A number v of right guesses refutes a value of the parameter (ε or μ) if, for every
mechanism that is (ε, δ)-DP or μ-GDP with this value, v or more right guesses have a
probability of at most 1 − confidence. The code uses upper bounds on this probability.
The lower bound on the parameter is a refuted value, which bisection finds. This lower
bound is valid whether or not all smaller values are also refuted.

*Proof.* For each value x of the parameter, let n(x) be the minimum number of right
guesses that refutes x. All larger numbers also refute x. The mechanism is (ε, δ)-DP or
μ-GDP with the true value, and therefore with every larger value. Among the values above
the true value, let θ be a value with the smallest n(θ). Suppose that the lower bound x
exceeds the true value. Since x is refuted, the number of right guesses is at least
n(x), and therefore at least n(θ). Since the mechanism is (ε, δ)-DP or μ-GDP with the
value θ, the probability of n(θ) or more right guesses is at most 1 − confidence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from dpjax._core import validate
from dpjax._core.float64 import TINY, float64
from dpjax._core.typing import ArrayLike
from dpjax.auditing._scores import check_attack, find_refuted_value

# The upper end of the search, for ε and for μ. No number of guesses that fits into
# memory refutes this value.
_UPPER_END = 64.0
# A relative margin, far above the rounding error of the probabilities below.
_MARGIN = 1e-9
_STATIC = ("guess_in", "guess_out")


def _count_right(
    scores: jax.Array, included: jax.Array, guess_in: int, guess_out: int
) -> jax.Array:
    """Count the right guesses of an attack on canaries, i[].

    The attack guesses that the `guess_in` canaries with the highest scores took part,
    and that the `guess_out` canaries with the lowest scores did not. If scores are
    equal, the score with the larger index counts as higher. A NaN counts as the highest
    score.
    """
    ordered = included[jnp.argsort(scores)]
    right = jnp.sum(ordered[ordered.size - guess_in :] > 0)
    return right + jnp.sum(ordered[:guess_out] == 0)


@float64("down", static=_STATIC, vectors=(0, 1), elementwise=True)
def _epsilon64(
    scores: jax.Array,
    included: jax.Array,
    delta: jax.Array,
    confidence: jax.Array,
    *,
    guess_in: int,
    guess_out: int,
) -> jax.Array:
    from scipy.special import gammaln

    m, r = scores.size, guess_in + guess_out
    v, j = _count_right(scores, included, guess_in, guess_out), np.arange(r + 1)
    choose = gammaln(r + 1) - gammaln(j + 1) - gammaln(r - j + 1)  # log of r choose j

    def is_refuted(epsilon: jax.Array) -> jax.Array:
        right, wrong = jax.nn.log_sigmoid(epsilon), jax.nn.log_sigmoid(-epsilon)
        mass = jnp.exp(choose + j * right + (r - j) * wrong)
        tail = jnp.cumsum(mass[::-1])[::-1]  # P(B >= j), small terms first
        # Steinke, Nasr and Jagielski (2023), appendix D,
        # https://arxiv.org/abs/2305.08846: with B ~ Bin(r, e^ε / (1 + e^ε)),
        # the number W of right guesses satisfies
        # P(W >= v) <= P(B >= v) + 2mδ max_i P(v > B >= v − i) / i.
        i = jnp.maximum(v - j, 1)
        slope = jnp.max(jnp.where(j < v, (tail - tail[v]) / i, 0.0))
        p = tail[v] + 2 * m * delta * slope
        # TINY covers probabilities that underflowed.
        return p * (1 + _MARGIN) + TINY <= 1 - confidence

    return find_refuted_value(is_refuted, _UPPER_END, times=48)


@float64("down", static=_STATIC, vectors=(0, 1), elementwise=True)
def _mu64(
    scores: jax.Array,
    included: jax.Array,
    confidence: jax.Array,
    *,
    guess_in: int,
    guess_out: int,
) -> jax.Array:
    m, r = scores.size, guess_in + guess_out
    v, error = _count_right(scores, included, guess_in, guess_out), 1 - confidence

    def is_refuted(mu: jax.Array) -> jax.Array:
        # Mahloujifar, Melis and Chaudhuri (2025), Algorithm 3,
        # https://arxiv.org/abs/2410.22235, for two choices and the trade-off curve G_μ,
        # for which (1 − G_μ)⁻¹ is x ↦ Φ(Φ⁻¹(x) − μ). For i from v − 1 down to 0:
        # h ← (1 − G_μ)⁻¹(ρ), ρ ← ρ + (i / (r − i)) (h − the previous h).
        # The scan has the static length r. Steps with i >= v do not change the carry.
        def step(
            carry: tuple[jax.Array, jax.Array], i: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            h, rho = carry
            new_h = jnp.maximum(h, ndtr(ndtri(rho) - mu))
            new_rho = jnp.minimum(rho + i / (r - i) * (new_h - h), 1.0)
            is_active = i < v
            h, rho = jnp.where(is_active, new_h, h), jnp.where(is_active, new_rho, rho)
            return (h, rho), None

        start = (error * (r - v) / m, error * v / m)
        (h, rho), _ = jax.lax.scan(step, start, jnp.arange(r - 1.0, -1.0, -1.0))
        return h + rho >= r / m * (1 + _MARGIN)

    return find_refuted_value(is_refuted, _UPPER_END, times=48)


def _check_guesses(
    scores: ArrayLike,
    included: ArrayLike,
    guess_in: int,
    guess_out: int,
    confidence: ArrayLike,
    delta: ArrayLike = 0.0,
) -> dict[str, int]:
    """Check the arguments of a bound; return guess_in and guess_out in a dictionary."""
    check_attack(confidence, delta=delta, scores=scores, included=included)
    if jnp.shape(scores)[-1] != jnp.shape(included)[-1]:
        raise ValueError(
            "included must have one entry for each of the scores; got shape "
            f"{jnp.shape(included)} for scores of shape {jnp.shape(scores)}."
        )
    guess_in = validate.static_int("guess_in", guess_in, minimum=0)
    guess_out = validate.static_int("guess_out", guess_out, minimum=0)
    if not 1 <= guess_in + guess_out <= jnp.shape(scores)[-1]:
        raise ValueError(
            "guess_in + guess_out must be at least 1 and at most the number of "
            f"canaries, {jnp.shape(scores)[-1]}; got {guess_in} and {guess_out}."
        )
    return {"guess_in": guess_in, "guess_out": guess_out}


def one_run_epsilon_lower(
    scores: ArrayLike,
    included: ArrayLike,
    delta: ArrayLike,
    *,
    guess_in: int,
    guess_out: int,
    confidence: ArrayLike,
) -> jax.Array:
    """A lower confidence bound on ε, from the scores of canaries in one run.

    Args:
      scores: the attack's score of each of m canaries, f[*b, m]. A NaN counts as the
        largest score.
      included: whether each canary took part, bool[*b, m]. The entries are independent
        fair coins, which are drawn before the run and which the attack does not know.
        Pass the coins that the run used, and not coins that are drawn after the run.
      delta: δ, f[*b], in [0, 1).
      guess_in: the number of guesses of participation, static. The attack guesses that
        the `guess_in` canaries with the largest scores took part. Fix this number
        before you see the scores.
      guess_out: the number of guesses of absence, static. The attack guesses that the
        `guess_out` canaries with the smallest scores did not take part. Fix this number
        before you see the scores.
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound on ε, f[*b], rounded down. If you compute several bounds for
      different numbers of guesses and use the best bound, divide the error probability
      1 − confidence among these bounds.

    Raises:
      ValueError: an argument is out of range; scores and included have last axes of
        different lengths; or guess_in + guess_out is not from 1 to m.

    Privacy: the result bounds the mechanism's ε from below, and is no guarantee. Scores
    may depend on each other in any way. The bound is for the adjacency ADD_REMOVE or
    ZERO_OUT, since a canary is either present or absent.

    Reference: Steinke, Nasr and Jagielski (2023), appendix D.

    Example:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> included = rng.random(10_000) < 0.5
      >>> scores = 2.0 * included + rng.standard_normal(10_000)
      >>> found = one_run_epsilon_lower(
      ...     scores, included, 1e-5, guess_in=250, guess_out=250, confidence=0.99)
      >>> print(f"{found:.2f} of 10.00")
      3.44 of 10.00
    """
    guesses = _check_guesses(scores, included, guess_in, guess_out, confidence, delta)
    return _epsilon64(scores, included, delta, confidence, **guesses)


def one_run_mu_lower(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    guess_in: int,
    guess_out: int,
    confidence: ArrayLike,
) -> jax.Array:
    """A lower confidence bound on μ, from the scores of canaries in one run.

    Args:
      scores: the attack's score of each of m canaries, f[*b, m]. A NaN counts as the
        largest score.
      included: whether each canary took part, bool[*b, m]. The entries are independent
        fair coins, which are drawn before the run and which the attack does not know.
        Pass the coins that the run used, and not coins that are drawn after the run.
      guess_in: the number of guesses of participation, static. The attack guesses that
        the `guess_in` canaries with the largest scores took part. Fix this number
        before you see the scores.
      guess_out: the number of guesses of absence, static. The attack guesses that the
        `guess_out` canaries with the smallest scores did not take part. Fix this number
        before you see the scores.
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound μ, f[*b], rounded down: with this confidence, the mechanism is not
      μ′-GDP for any μ′ < μ. If the mechanism's guarantee is stated in GDP,
      `accounting.gdp.epsilon` converts μ to ε. If you compute several bounds for
      different numbers of guesses and use the best bound, divide the error probability
      1 − confidence among these bounds.

    Raises:
      ValueError: an argument is out of range; scores and included have last axes of
        different lengths; or guess_in + guess_out is not from 1 to m.

    Privacy: the result bounds the mechanism's μ from below, and is no guarantee. Scores
    may depend on each other in any way. The bound is for the adjacency ADD_REMOVE or
    ZERO_OUT, since a canary is either present or absent.

    Reference: Mahloujifar, Melis and Chaudhuri (2025), Algorithm 3.

    Example:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> included = rng.random(10_000) < 0.5
      >>> scores = 2.0 * included + rng.standard_normal(10_000)
      >>> found = one_run_mu_lower(
      ...     scores, included, guess_in=250, guess_out=250, confidence=0.99)
      >>> print(f"{found:.2f} of 2")
      1.18 of 2
    """
    guesses = _check_guesses(scores, included, guess_in, guess_out, confidence)
    return _mu64(scores, included, confidence, **guesses)
