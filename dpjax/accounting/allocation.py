"""Random allocation: every example takes part in one random step of each epoch.

Each example picks its step uniformly, independently of all others and of other epochs,
as balls are thrown into bins. Consider the likelihood ratio of the outputs with and
without one example. In convex order this ratio is at most the mean of independent
lognormal variables, one for each step (docs/amplification.md has the proof). The mean
is bounded from above and, to show how tight that bound is, from below;
`_numerics.convex_order` has both bounds.
"""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import ULP, float64
from dpjax._core.searches import bisect, implicit_derivative
from dpjax.accounting import events, gdp
from dpjax.accounting import pld as _pld
from dpjax.accounting._numerics.convex_order import cells

_POINTS = 1024
_BISECTIONS = 50
# The mass that the distribution of the likelihood ratio may leave outside its grid at
# each end. In the lower bound this mass is merged into the end cells, not lost.
_TAIL = 1e-12


def _check_sizes(
    noise_multiplier: jax.typing.ArrayLike, num_steps: int, num_epochs: int
):
    validate.positive("noise_multiplier", noise_multiplier)
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    return num_steps, validate.static_int("num_epochs", num_epochs, minimum=1)


def pld(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_steps: int,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> _pld.PLD:
    """The privacy-loss distribution of one epoch of random allocation.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      num_steps: the number of steps in the epoch, at least 1.
      adjacency: the relation between the data sets, as for `epsilon`.

    Returns:
      A `pld.PLD` of all steps of the epoch together. If examples are allocated anew in
      each epoch, `pld.compose` gives the PLD of several epochs.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the assumptions and the guarantee are those of `epsilon`.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the pair.

    Example:
      >>> from dpjax.accounting import allocation, pld
      >>> epochs = pld.compose(allocation.pld(1.0, num_steps=100), 5)
      >>> both = pld.convolve(epochs, pld.gaussian(0.1))
      >>> print(f"{pld.epsilon(both, 1e-5):.2f}")
      1.26
    """
    num_steps, _ = _check_sizes(noise_multiplier, num_steps, 1)
    validate.adjacency(adjacency)
    return _pld.of(events.RandomAllocation(noise_multiplier, num_steps, adjacency))


def _run(
    noise_multiplier: jax.typing.ArrayLike,
    num_steps: int,
    num_epochs: int,
    adjacency: Adjacency,
) -> tuple[_pld.PLD, jax.Array]:
    """The PLD of all epochs, and a GDP parameter that also holds for known steps.

    The GDP parameter holds for an attacker who knows the steps of the example.
    """
    num_steps, num_epochs = _check_sizes(noise_multiplier, num_steps, num_epochs)
    one = pld(noise_multiplier, num_steps=num_steps, adjacency=adjacency)
    told = _known_steps_mu64(noise_multiplier, num_epochs, adjacency.sensitivity_factor)
    return _pld.compose(one, num_epochs), told


@float64("up")
def _known_steps_mu64(
    noise_multiplier: jax.Array, num_epochs: jax.Array, factor: jax.Array
) -> jax.Array:
    usable = noise_multiplier > 0
    # If the steps are known, an epoch is one Gaussian mechanism with μ = factor / σ,
    # and the squares of μ add up over epochs.
    mu = factor * jnp.sqrt(num_epochs) / jnp.where(usable, noise_multiplier, 1.0)
    return jnp.where(usable, mu * (1 + 8 * ULP), jnp.inf)


def epsilon(
    noise_multiplier: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> jax.Array:
    """An upper bound on the ε of Gaussian steps with random allocation of examples.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, the number of steps in an epoch, at least 1.
      num_epochs: the number of epochs, each with an allocation of its own.
      adjacency: which data sets are compared. Under ADD_REMOVE no other example's step
        may depend on the added example.

    Returns:
      ε, f[*b], rounded up. In most cases ε is within 0.2 % of `epsilon_lower`. The
      bound is piecewise linear, so that its derivatives differ by a few percent from
      those of the exact ε. A traced δ at or below 0, or a NaN, gives inf.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: every example takes part in one step of each epoch, uniformly at random and
    independently of all others, and contributes at most one clip norm there, which may
    depend on all earlier steps. Under ADD_REMOVE and ZERO_OUT the bound is exact up to
    its distance from `epsilon_lower`. Under REPLACE the bound assumes the worst joint
    distribution of two likelihood ratios: the new example's ratio is as small as
    possible where the old example's ratio is large (docs/amplification.md).

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the pair.

    Example:
      >>> print(f"{epsilon(1.0, 1e-5, num_steps=100):.4f}")
      0.6211
      >>> print(f"{epsilon_lower(1.0, 1e-5, num_steps=100):.4f}")
      0.6208
    """
    # Both are upper bounds. The second needs no grid, and may be tighter if there is
    # little noise.
    run, told = _run(noise_multiplier, num_steps, num_epochs, adjacency)
    return jnp.minimum(_pld.epsilon(run, delta), gdp.epsilon(told, delta))


def delta(
    noise_multiplier: jax.typing.ArrayLike,
    epsilon: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> jax.Array:
    """An upper bound on the δ of Gaussian steps with random allocation of examples.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      epsilon: f[*b], at least 0.
      num_steps: t, the number of steps in an epoch, at least 1.
      num_epochs: the number of epochs, each with an allocation of its own.
      adjacency: the relation between the data sets, as for `epsilon`.

    Returns:
      δ, f[*b], rounded up. A traced ε below 0, or a NaN, gives 1.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the assumptions and the guarantee are those of `epsilon`.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the pair.

    Example:
      >>> print(f"{delta(1.0, 0.62, num_steps=100):.1e}")
      1.0e-05
    """
    run, told = _run(noise_multiplier, num_steps, num_epochs, adjacency)
    return jnp.minimum(_pld.delta(run, epsilon), gdp.delta(told, epsilon))


def _law(noise_multiplier: jax.Array, num_steps: jax.Array, num_epochs: jax.Array):
    """A lower bound in convex order on the likelihood ratio of all epochs.

    The result is a pair: whether the noise multiplier is positive and finite, and the
    distribution of the ratio.
    """
    known = (noise_multiplier > 0) & (noise_multiplier < jnp.inf)
    variance = 1 / jnp.where(known, noise_multiplier, 1.0) ** 2
    tail = jnp.asarray(_TAIL)
    one = cells.mean(cells.lognormal(variance, tail, _POINTS), num_steps, tail)
    return known, cells.product(one, num_epochs, tail)


def _delta_lower(
    noise_multiplier: jax.Array,
    epsilon: jax.Array,
    num_steps: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    known, law = _law(noise_multiplier, num_steps, num_epochs)
    value = cells.delta(law, epsilon, num_steps * num_epochs)
    return jnp.where(known & (epsilon >= 0), value, 0.0)


def _epsilon_lower(
    noise_multiplier: jax.Array,
    delta: jax.Array,
    num_steps: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    known, law = _law(noise_multiplier, num_steps, num_epochs)
    known &= (delta > 0) & (delta < 1)
    target = jnp.log(jnp.where(known, delta, 0.5))

    def excess(epsilon: jax.Array) -> jax.Array:
        return cells.log_delta(law, epsilon, num_steps * num_epochs) - target

    # At the end that bisect returns, δ(ε) is above δ, so that ε(δ) is not below it.
    zero, top = jnp.zeros_like(target), cells.largest_epsilon(law)
    solution = bisect(lambda e: excess(e) > 0, top, zero, _BISECTIONS)
    solution = jnp.where(excess(zero) > 0, solution, 0.0)
    return implicit_derivative(
        excess, jnp.where(known, solution, 0.0), known & (solution > 0)
    )


_delta_lower64 = float64("down", one_by_one=True)(_delta_lower)
_epsilon_lower64 = float64("down", one_by_one=True)(_epsilon_lower)


def epsilon_lower(
    noise_multiplier: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
) -> jax.Array:
    """A lower bound on the exact ε that `epsilon` bounds from above.

    No valid analysis can report a smaller ε.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, the number of steps in an epoch, at least 1.
      num_epochs: the number of epochs, each with an allocation of its own.

    Returns:
      ε, f[*b], rounded down. Traced values out of range give 0.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling.

    Example:
      >>> print(f"{epsilon_lower(1.0, 1e-5, num_steps=1000):.4f}")
      0.1388
    """
    num_steps, num_epochs = _check_sizes(noise_multiplier, num_steps, num_epochs)
    validate.open_unit("delta", delta)
    return _epsilon_lower64(noise_multiplier, delta, num_steps, num_epochs)


def delta_lower(
    noise_multiplier: jax.typing.ArrayLike,
    epsilon: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
) -> jax.Array:
    """A lower bound on the exact δ that `delta` bounds from above.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      epsilon: f[*b], at least 0.
      num_steps: t, the number of steps in an epoch, at least 1.
      num_epochs: the number of epochs, each with an allocation of its own.

    Returns:
      δ, f[*b], rounded down. Traced values out of range give 0.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling.

    Example:
      >>> print(f"{delta_lower(1.0, 0.62, num_steps=100):.1e}")
      1.0e-05
    """
    num_steps, num_epochs = _check_sizes(noise_multiplier, num_steps, num_epochs)
    validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta_lower64(noise_multiplier, epsilon, num_steps, num_epochs)
