"""Canaries: examples with known gradients, which an attack tries to detect.

A canary's loss is linear in the parameters, so its gradient is a fixed direction in
parameter space. With `plant`, no other example moves the parameters along this
direction. The released value along the direction then contains everything that the
mechanism reveals about the canary.

A canary's score is that of a matched filter. Let h be the known contribution of a
canary to the released values y along its direction. Let y be h + z if the canary took
part, and z otherwise, where z is white noise of standard deviation s. Then the score
⟨h, y⟩ / ‖h‖ is a sufficient statistic for the canary's participation. The distribution
of the score is N(‖h‖, s²) with the canary and N(0, s²) without the canary, as for a
Gaussian mechanism with μ = ‖h‖ / s. If the mechanism correlates the noise of its steps,
a linear map that depends only on the mechanism first makes the noise white.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, LossFn, Params, Tree
from dpjax._matrices.strategy import Strategy, check_strategy


class Planted(NamedTuple, Generic[Params]):
    """Model parameters, with one extra coordinate for each canary.

    Attributes:
      params: the parameters of the model.
      slots: the extra coordinates, f[k], one for each of k canaries. Only canary i has
        a gradient along slot i.
    """

    params: Params
    slots: jax.Array


class Marked(NamedTuple):
    """A batch of examples, some of which are marked as canaries.

    Attributes:
      example: the examples that the loss takes. For a canary, this entry is a
        placeholder: an example with a finite loss.
      canary: the index of the canary, i32[*b]; −1 for an ordinary example.
    """

    example: Any
    canary: ArrayLike


def plant(loss_fn: LossFn, norm: ArrayLike) -> Callable[..., jax.Array]:
    """Add canaries to a loss, in extra coordinates that the model does not use.

    Clipping, masks, the sum and the noise treat a canary like any other example. An
    audit with canaries therefore covers all of these stages.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a scalar.
      norm: the L2 norm of a canary's gradient, f[]. If this norm is at least the clip
        norm, then clipping scales the gradient down to the clip norm.

    Returns:
      A loss, as a function of `Planted(params, slots)` and one `Marked(example,
      canary)`. Each canary has its own extra coordinate, called slot. A canary's
      gradient is `norm` along its slot and zero in all other coordinates. The gradient
      of any other example is unchanged, and zero along the slots. If a canary did not
      take part, the released value along its slot is therefore only noise.

    Raises:
      ValueError: norm is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> def loss(w, x):
      ...     return jnp.sum((w - x) ** 2)
      >>> gradient = dpjax.clipped_grad(plant(loss, 9.0), 0.5)
      >>> params = Planted(jnp.zeros(2), jnp.zeros(4))
      >>> batch = Marked(jnp.full((3, 2), 0.125), jnp.array([-1, 2, 0]))
      >>> total, _ = gradient(params, batch)
      >>> print(total.params, total.slots.round(2))
      [-0.25 -0.25] [0.5 0.  0.5 0. ]
    """
    validate.positive("norm", norm)

    def loss(planted: Planted, marked: Marked) -> jax.Array:
        own = loss_fn(planted.params, marked.example)
        canary = jnp.asarray(marked.canary)
        # jnp.where evaluates both branches, and −1 must not index from the end.
        slot = planted.slots[jnp.maximum(canary, 0)]
        return jnp.where(canary >= 0, norm * slot, own).astype(own.dtype)

    return loss


Whiten: TypeAlias = Callable[[jax.Array], jax.Array]
"""A linear map from the releases of T steps, f[T, k], to values with white noise."""


def released(transformation: optax.GradientTransformation, sums: Tree) -> Tree:
    """Run a mechanism on given sums of gradients, and return the released values.

    Args:
      transformation: the mechanism, as made by `dpjax.add_gaussian_noise` or
        `dpjax.tree_momentum`.
      sums: the inputs of the mechanism in T steps, a tree of leaves f[T, ...].

    Returns:
      The updates of all T steps, a tree of leaves f[T, ...].

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> tx = dpjax.tree_momentum(0.5, 0.0, num_steps=3, key=jax.random.key(0))
      >>> print(released(tx, jnp.ones((3, 1)))[:, 0])
      [0.5   0.75  0.875]
    """

    @jax.jit
    def scan(sums: Tree) -> Tree:
        def step(state: optax.OptState, now: Tree) -> tuple[optax.OptState, Tree]:
            # `start` stands for the parameters, which these mechanisms do not read.
            updates, state = transformation.update(now, state, start)
            return state, updates

        start = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)
        return jax.lax.scan(step, transformation.init(start), sums)[1]

    return scan(sums)


def white_by_strategy(strategy: Strategy) -> Whiten:
    """Return the linear map that makes the noise of `dpjax.correlated_noise` white.

    The noise of the mechanism is C⁻¹z, where C is the matrix of the strategy and z is
    white noise. The linear map is y ↦ C y.

    `dpjax.tree_momentum` with decay β releases the momentum m_t at step t. The value
    (m_t − β m_{t−1}) / (1 − β) is a sum with the noise of `strategies.tree(β)`. The map
    for `strategies.tree(β)` makes this noise white.

    Args:
      strategy: the strategy of the mechanism, as made by `dpjax.strategies`.

    Returns:
      A linear map of released values in T steps, from f[T, k] to f[T, k].

    Raises:
      ValueError: the map is called with a number T of steps that the strategy does not
        support.

    Reference: Denisov et al. (2022): for sums x, releasing x + C⁻¹z is equivalent to
    releasing C x + z.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpjax import strategies
      >>> white = white_by_strategy(strategies.geometric(0.5))
      >>> print(white(jnp.array([[1.0], [-0.5], [0.0]]))[:, 0])
      [1. 0. 0.]
    """

    def white(y: jax.Array) -> jax.Array:
        matrix = check_strategy(strategy, len(y)).matrix(len(y)).astype(y.dtype)
        # Denisov et al. (2022), https://arxiv.org/abs/2202.08312: C (x + C⁻¹z) is
        # C x + z.
        return jnp.tensordot(matrix, y, 1, precision="highest")

    return white


def matched_filter(
    seen: jax.Array, expected: jax.Array, whiten: Whiten | None = None
) -> jax.Array:
    """Compute a score for each canary from all releases of a Gaussian mechanism.

    Args:
      seen: the released values in T steps along the gradient directions of k canaries,
        f[T, k], such as the extra coordinates that `plant` adds to the parameters.
      expected: the contribution of a participating canary to seen, f[T, k] or f[T, 1].
        To compute the contribution, call `released` with the sums of the canary alone
        and with the mechanism for noise of standard deviation 0.
      whiten: a linear map that whitens the mechanism's noise; None if the noise is
        already white.

    Returns:
      Scores f[k]. Let s be the standard deviation of the noise after `whiten`, and let
      all steps in which a canary takes part be μ-GDP together. Then the canary's score
      is N(μ s, s²) if the canary took part, and N(0, s²) otherwise. From the scores,
      `gaussian_mu_lower` computes a lower bound on μ.

    Raises:
      ValueError: the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> sums = jnp.concatenate([jnp.ones((4, 5000)), jnp.zeros((4, 5000))], axis=1)
      >>> tx = dpjax.add_gaussian_noise(2.0, key=jax.random.key(0))
      >>> scores = matched_filter(released(tx, sums), jnp.ones((4, 1)))
      >>> mean, stddev = scores[:5000].mean(), scores[:5000].std()
      >>> print(f"{mean / stddev:.2f} for μ = √4 / 2")
      1.00 for μ = √4 / 2
    """
    seen, expected = jnp.asarray(seen), jnp.asarray(expected)
    if seen.ndim != 2 or expected.shape not in (seen.shape, (len(seen), 1)):
        raise ValueError(
            "expected must have the shape [T, k] of seen, or shape [T, 1]; got "
            f"shapes {expected.shape} and {seen.shape}."
        )
    whiten = whiten or (lambda y: y)
    signal, noisy = whiten(expected), whiten(seen)
    length = jnp.sqrt(jnp.sum(jnp.square(signal), axis=0))
    product = jnp.sum(signal * noisy, axis=0)
    # A canary without a signal gets the score 0 in place of 0 / 0.
    return jnp.where(length > 0, product / jnp.where(length > 0, length, 1.0), 0.0)


def mixture_scores(
    seen: jax.Array, cases: jax.Array, probabilities: ArrayLike, stddev: ArrayLike
) -> jax.Array:
    """Compute scores of canaries that took part in steps chosen at random.

    Args:
      seen: the released values in T steps along the gradient directions of k canaries,
        f[T, k], with white noise.
      cases: the possible contributions of a canary to seen, f[c, T]. A random choice
        decides in which steps a canary takes part. There is one row for each of the c
        possible choices.
      probabilities: the probability of each row of cases, f[c].
      stddev: s, the standard deviation of the noise, f[], positive.

    Returns:
      Scores f[k]. A score is the logarithm of a likelihood ratio: the likelihood of the
      seen values with the canary, divided by their likelihood without the canary. No
      attack on these values is better. If a canary takes part in each step
      independently, as under Poisson sampling, then the canary's score for all steps is
      the sum of the canary's scores for single steps.

    Raises:
      ValueError: the shapes do not match, or stddev is not positive.

    Reference: Neyman and Pearson (1933), https://doi.org/10.1098/rsta.1933.0009.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> noise = 2.0 * jax.random.normal(jax.random.key(0), (3, 10_000))
      >>> bins = jnp.eye(3)  # one of three steps, each with probability 1/3
      >>> place = jax.random.randint(jax.random.key(1), (5000,), 0, 3)
      >>> seen = noise.at[place, jnp.arange(5000)].add(1.0)
      >>> scores = mixture_scores(seen, bins, jnp.full(3, 1 / 3), 2.0)
      >>> ratios = jnp.exp(scores)  # E exp(score) is 1 without the canary
      >>> print(f"{ratios[:5000].mean():.2f} with it, {ratios[5000:].mean():.2f} not")
      1.09 with it, 1.00 not
    """
    validate.positive("stddev", stddev)
    seen, cases, weights = map(jnp.asarray, (seen, cases, probabilities))
    are_matrices = seen.ndim == 2 and cases.ndim == 2
    if not are_matrices or cases.shape != (*weights.shape, len(seen)):
        raise ValueError(
            "cases must have shape [c, T] for seen of shape [T, k] and probabilities "
            f"of shape [c]; got shapes {cases.shape}, {seen.shape} and "
            f"{weights.shape}."
        )
    # The score is log Σ_c p_c dN(h_c, s² I) / dN(0, s² I) at y. By Neyman and Pearson
    # (1933), a threshold on this ratio is the best test at its false-positive rate.
    products = jnp.matmul(cases, seen, precision="highest")
    squares = jnp.sum(jnp.square(cases), axis=1, keepdims=True)
    exponents = (products - squares / 2) / jnp.square(stddev)
    return logsumexp(exponents, axis=0, b=weights[:, None])
