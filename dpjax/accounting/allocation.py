"""Random allocation: every example takes part in random steps of each epoch.

In each epoch, each example picks one step uniformly at random. The choice is
independent of all other examples and of other epochs. Consider the likelihood ratio of
the outputs with and without one example. In convex order this ratio is at most the mean
of independent lognormal variables, one for each step (docs/amplification.md has the
proof). `_numerics.convex_order` bounds the distribution of this mean from above. A
lower bound on the distribution shows how tight the upper bound is.

**Several steps in an epoch.** An example may pick a uniformly random set of k of the t
steps. Divide the steps at random into k groups, of ⌊t/k⌋ or ⌈t/k⌉ steps, and pick one
step of each group. By symmetry, the set of the picked steps is uniformly random. The
groups have the same distribution for both data sets. By joint convexity, δ(ε) is at
most the δ(ε) against an attacker who also learns the groups, averaged over the random
groups. For given groups, let M_j be the mean of independent lognormal variables, one
for each step of group j, and let M_1, …, M_k be independent. In convex order, the
likelihood ratio is at most the product of all M_j (Kahane 1986, for the comparison of
Gaussian processes). This bound holds for any order of the steps, and for gradients
that depend on all earlier releases. So k of t steps cost at most the composition of k
allocations of one step among ⌊t/k⌋ or ⌈t/k⌉ steps, under each adjacency.
"""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events, gdp
from dpjax.accounting import pld as _pld
from dpjax.accounting._numerics.convex_order import cells


def _check_epoch(
    noise_multiplier: ArrayLike, num_steps: int, num_selected: int
) -> tuple[int, int]:
    validate.positive("noise_multiplier", noise_multiplier)
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    num_selected = validate.static_int("num_selected", num_selected, minimum=1)
    validate.at_most("num_selected", num_selected, num_steps, "num_steps, ")
    return num_steps, num_selected


def pld(
    noise_multiplier: ArrayLike,
    *,
    num_steps: int,
    num_selected: int = 1,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> _pld.PLD:
    """The privacy-loss distribution of one epoch of random allocation.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      num_steps: the number of steps in the epoch, at least 1, static.
      num_selected: the number of steps in which an example takes part, as for
        `epsilon`.
      adjacency: the relation between the data sets, as for `epsilon`.

    Returns:
      A `pld.PLD` of all steps of the epoch together. If every epoch has a new
      allocation, `pld.compose` gives the PLD of several epochs.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the assumptions and the guarantee are those of `epsilon`.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the dominating pair of distributions.

    Example:
      >>> from dpjax.accounting import allocation, pld
      >>> epochs = pld.compose(allocation.pld(1.0, num_steps=100), 5)
      >>> both = pld.convolve(epochs, pld.gaussian(0.1))
      >>> print(f"{pld.epsilon(both, 1e-5):.2f}")
      1.26
    """
    t, k = _check_epoch(noise_multiplier, num_steps, num_selected)
    validate.adjacency(adjacency)
    # Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202: k of t steps cost
    # at most k compositions of 1 of ⌊t/k⌋ steps. Here t mod k of the groups have one
    # step more.
    size, num_larger = divmod(t, k)
    groups = ((size, k - num_larger), (size + 1, num_larger))
    steps = (
        events.Repeated(events.RandomAllocation(noise_multiplier, n, adjacency), count)
        for n, count in groups
        if count
    )
    return _pld.PLD(tuple(steps))


def _run(
    noise_multiplier: ArrayLike,
    num_steps: int,
    num_epochs: int,
    num_selected: int,
    adjacency: Adjacency,
) -> tuple[_pld.PLD, jax.Array]:
    """The PLD of all epochs of a run, and a GDP parameter of the same run.

    The GDP parameter also holds against an attacker who knows in which steps the
    example takes part.
    """
    t, k = _check_epoch(noise_multiplier, num_steps, num_selected)
    num_epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    epoch = pld(noise_multiplier, num_steps=t, num_selected=k, adjacency=adjacency)
    factor = adjacency.sensitivity_factor
    mu = _known_steps_mu64(noise_multiplier, k * num_epochs, factor)
    return _pld.compose(epoch, num_epochs), mu


@float64("up")
def _known_steps_mu64(
    noise_multiplier: jax.Array, participations: jax.Array, factor: jax.Array
) -> jax.Array:
    valid = noise_multiplier > 0
    # For an attacker who knows the example's steps, each of these steps is a Gaussian
    # mechanism with μ = factor / σ, and the squares of μ add up over steps.
    mu = factor * jnp.sqrt(participations) / jnp.where(valid, noise_multiplier, 1.0)
    return jnp.where(valid, mu * (1 + 8 * ULP), jnp.inf)


def epsilon(
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
    num_selected: int = 1,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> jax.Array:
    """An upper bound on the ε of Gaussian steps with random allocation of examples.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, the number of steps in an epoch, at least 1, static.
      num_epochs: the number of epochs, each with a new allocation, at least 1, static.
      num_selected: k, the number of steps in which an example takes part in an epoch,
        from 1 to t, static.
      adjacency: which data sets are compared. Under ADD_REMOVE, the steps of other
        examples must not depend on the added example.

    Returns:
      ε, f[*b], rounded up. For k = 1, under ADD_REMOVE and ZERO_OUT, ε is mostly within
      0.2 % of `epsilon_lower`. The bound on δ is piecewise linear in e^ε, so that the
      derivatives of the result differ by a few percent from the derivatives of the
      exact ε. The result is 0 for a traced δ of 1 or more, and for a traced noise
      multiplier of inf with a δ of at least 0. Otherwise, the result is inf for a
      traced noise multiplier or δ at or below 0, and for a NaN.

    Raises:
      ValueError: a static argument is out of range, or a noise_multiplier or delta
        that is not traced.

    Privacy: every example takes part in a uniformly random set of k steps of each
    epoch, independently of all other examples and epochs. In each of its steps, an
    example contributes at most one clip norm, and the contribution may depend on all
    earlier steps. For k = 1, under ADD_REMOVE and ZERO_OUT, the exact ε is between
    `epsilon_lower` and this bound. For k > 1 the bound also holds against an attacker
    who knows k groups of steps, where the example takes part in one step of each group
    (proof in the module's docstring). Under REPLACE, the old and the new example each
    have a likelihood ratio: the density of the outputs with this example, divided by
    the density with neither example. The bound assumes the worst joint distribution of
    both ratios: the ratio of the new example is as small as possible where the ratio of
    the old example is large (docs/amplification.md).

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the dominating pair of distributions.

    Example:
      >>> print(f"{epsilon(1.0, 1e-5, num_steps=100):.4f}")
      0.6211
      >>> print(f"{epsilon_lower(1.0, 1e-5, num_steps=100):.4f}")
      0.6208
    """
    # Both values are upper bounds. The second value needs no grid, and may be smaller
    # for small noise multipliers.
    run, mu = _run(noise_multiplier, num_steps, num_epochs, num_selected, adjacency)
    return jnp.minimum(_pld.epsilon(run, delta), gdp.epsilon(mu, delta))


def delta(
    noise_multiplier: ArrayLike,
    epsilon: ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
    num_selected: int = 1,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> jax.Array:
    """An upper bound on the δ of Gaussian steps with random allocation of examples.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      epsilon: f[*b], at least 0.
      num_steps: t, the number of steps in an epoch, at least 1, static.
      num_epochs: the number of epochs, each with a new allocation, at least 1, static.
      num_selected: the number of steps in which an example takes part in an epoch, from
        1 to t, static.
      adjacency: which data sets are compared. Under ADD_REMOVE, the steps of other
        examples must not depend on the added example.

    Returns:
      δ, f[*b], rounded up. The result is 1 for a traced ε that is NaN or below 0, and,
      at a finite ε, for a traced noise multiplier that is NaN or at most 0.

    Raises:
      ValueError: a static argument is out of range, or a noise_multiplier or epsilon
        that is not traced.

    Privacy: the assumptions and the guarantee are those of `allocation.epsilon`.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling; Kahane (1986) for the dominating pair of distributions.

    Example:
      >>> print(f"{delta(1.0, 0.62, num_steps=100):.1e}")
      1.0e-05
    """
    run, mu = _run(noise_multiplier, num_steps, num_epochs, num_selected, adjacency)
    return jnp.minimum(_pld.delta(run, epsilon), gdp.delta(mu, epsilon))


@float64("up")
def _noise_of_sum64(
    noise_multiplier: jax.Array, t: jax.Array, k: jax.Array, num_epochs: jax.Array
) -> jax.Array:
    # The sum of an epoch's t outputs contains k contributions, which may all be equal,
    # and noise of variance t σ². The μ² of this sum is k² / (t σ²). The μ² of all
    # epochs add up.
    return noise_multiplier * (jnp.sqrt(t / num_epochs) / k * (1 + 8 * ULP))


def _single_run(
    noise_multiplier: ArrayLike, t: int, k: int, num_epochs: int
) -> tuple[ArrayLike, int, int]:
    """The parameters of a run in which each example takes part once in an epoch.

    The results are the run's noise multiplier, its number of steps in an epoch and its
    number of epochs. The exact ε of this run is at most the exact ε of the given run,
    in which each example takes part in k of t steps of an epoch.
    """
    if k == 1:
        return noise_multiplier, t, num_epochs
    # An attacker who reads only the sums sees one Gaussian mechanism.
    return _noise_of_sum64(noise_multiplier, t, k, num_epochs), 1, 1


def epsilon_lower(
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    *,
    num_steps: int,
    num_epochs: int = 1,
    num_selected: int = 1,
) -> jax.Array:
    """A lower bound on the exact ε that `epsilon` bounds from above.

    No valid analysis can report an ε below this bound. The bound holds under every
    adjacency, but may be far below the exact ε under REPLACE. For num_selected > 1 the
    bound is the ε against an attacker who sees only the sum of each epoch's outputs.
    Under ADD_REMOVE and ZERO_OUT, this attacker's ε is the exact ε for num_selected =
    num_steps. If num_selected is between 1 and num_steps, the bound is close to the
    exact ε for large noise multipliers, and far below the exact ε for small ones.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, the number of steps in an epoch, at least 1, static.
      num_epochs: the number of epochs, each with a new allocation, at least 1, static.
      num_selected: the number of steps in which an example takes part in an epoch, from
        1 to t, static.

    Returns:
      ε, f[*b], rounded down. The result is 0 for traced values out of range.

    Raises:
      ValueError: a static argument is out of range, or a noise_multiplier or delta
        that is not traced.

    Reference: Feldman and Shenfeld (2025), https://arxiv.org/abs/2502.08202, for the
    sampling.

    Example:
      >>> print(f"{epsilon_lower(1.0, 1e-5, num_steps=1000):.4f}")
      0.1388
    """
    t, k = _check_epoch(noise_multiplier, num_steps, num_selected)
    num_epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    validate.open_unit("delta", delta)
    noise_multiplier, t, num_epochs = _single_run(noise_multiplier, t, k, num_epochs)
    return cells.epsilon_lower64(noise_multiplier, delta, t, num_epochs)
