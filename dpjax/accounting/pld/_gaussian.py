"""Privacy-loss distributions of Gaussian noise, with and without sampling."""

from collections.abc import Sequence

import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.pld.mechanisms import WEIGHTS_TOLERANCE
from dpjax.accounting.pld._distribution import PLD, of


def gaussian(mu: ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism.

    Args:
      mu: the GDP parameter, f[*b], at least 0. For a Gaussian mechanism, μ is the
        sensitivity over the noise standard deviation.

    Returns:
      A `PLD`. If all events of a PLD are Gaussian mechanisms, its δ and ε are exactly
      those of `gdp`.

    Raises:
      ValueError: a static μ is negative.

    Reference: Dong, Roth and Su (2022), Definition 6.

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.compose(pld.gaussian(0.1), 100), 1e-5):.4f}")
      4.3772
    """
    validate.nonnegative("mu", mu, finite=False)
    return of(events.Gaussian(mu))


def poisson_gaussian(
    noise_multiplier: ArrayLike,
    sampling_rate: ArrayLike,
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of the Gaussian mechanism on a Poisson sample.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: the probability that an example takes part, f[*b], in [0, 1].
      adjacency: which data sets are compared. Under ADD_REMOVE and ZERO_OUT, one
        example is present in one data set, and is absent or contributes zero in the
        other one. Under REPLACE, another example replaces it.

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: every example takes part independently of all others and of other steps,
    and contributes at most one clip norm. Under ADD_REMOVE and ZERO_OUT the dominating
    pair is N(0, σ²) against (1 − q) N(0, σ²) + q N(1, σ²), in the worse of both
    directions. Under REPLACE the dominating pair is (1 − q) N(0, σ²) + q N(1, σ²)
    against (1 − q) N(0, σ²) + q N(−1, σ²). This pair dominates all contributions in the
    unit ball (docs/accounting.md has the proof).

    Reference: Zhu, Dong and Wang (2022), Theorem 11, for ADD_REMOVE.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> step = pld.poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{pld.epsilon(pld.compose(step, 1000), 1e-5):.3f}")
      1.828
    """
    validate.positive("noise_multiplier", noise_multiplier)
    validate.closed_unit("sampling_rate", sampling_rate)
    validate.adjacency(adjacency)
    return of(events.PoissonGaussian(noise_multiplier, sampling_rate, adjacency))


def subsampled_gdp(mu: ArrayLike, sampling_rate: ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism on a batch of fixed size.

    Args:
      mu: the GDP parameter of the mechanism on its batch, f[*b], at least 0. Under
        REPLACE, μ is twice the clip norm over the noise standard deviation.
      sampling_rate: batch size over number of examples, f[*b], in [0, 1].

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the adjacency is REPLACE. Each batch is a uniformly random subset of fixed
    size, drawn without replacement and anew in each step.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4, for the trade-off curve
    C_p(G_μ).

    Example:
      >>> from dpjax.accounting import pld
      >>> run = pld.compose(pld.subsampled_gdp(0.5, 0.01), 1000)
      >>> print(f"{pld.epsilon(run, 1e-5):.3f}")
      0.719
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.closed_unit("sampling_rate", sampling_rate)
    return of(events.FixedSizeGaussian(mu, sampling_rate))


def gaussian_mixture(
    noise_multiplier: ArrayLike,
    sensitivities: Sequence[ArrayLike],
    weights: Sequence[ArrayLike],
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of a Gaussian mechanism with a random sensitivity.

    Args:
      noise_multiplier: noise standard deviation over the unit of sensitivities, f[*b],
        positive.
      sensitivities: the possible norms of an example's contribution, each f[*b], finite
        and at least 0. An example that does not take part contributes 0.
      weights: the probability of each sensitivity, f[*b] each, at least 0. The sum must
        be 1 up to 1e-6, and the function divides the weights by this sum.
      adjacency: ADD_REMOVE or ZERO_OUT.

    Returns:
      A `PLD` of one step. Its ε is infinite if traced weights do not add up to 1.

    Raises:
      ValueError: a static argument is out of range; adjacency is not ADD_REMOVE or
        ZERO_OUT.

    Privacy: the contribution is drawn independently of all other examples and steps. If
    only a bound on the contribution's norm is known, then P[norm > s] must be at most
    P[sensitivity > s] for each s. The dominating pair is N(0, σ²) against Σ w_i N(s_i,
    σ²), in the worse of both directions. This pair on a line dominates vector
    contributions of any directions, too. No such statement is proven for REPLACE.

    Reference: Choquette-Choo, Ganesh, Steinke and Thakurta (2024), Corollary 4.7.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> twice = pld.gaussian_mixture(  # two draws, each of which takes the example
      ...     1.0, (0.0, 1.0, 2.0), (0.9801, 0.0198, 0.0001),
      ...     adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{pld.epsilon(pld.compose(twice, 1000), 1e-5):.3f}")
      3.979
    """
    validate.positive("noise_multiplier", noise_multiplier)
    if len(sensitivities) != len(weights) or not sensitivities:
        raise ValueError(
            "weights must have one entry for each of the sensitivities, and at least "
            f"one entry; got {weights!r} for {sensitivities!r}."
        )
    for one in sensitivities:
        validate.nonnegative("sensitivities", one)
    for one in weights:
        validate.nonnegative("weights", one)
    known = [validate.concrete(one) for one in weights]
    if not any(one is None for one in known):
        total = sum(np.asarray(one, np.float64) for one in known if one is not None)
        if not np.all(np.abs(total - 1) <= WEIGHTS_TOLERANCE):
            raise ValueError(f"weights must add up to one; got {weights!r}.")
    if validate.adjacency(adjacency) is Adjacency.REPLACE:
        raise ValueError(
            f"adjacency must be ADD_REMOVE or ZERO_OUT; got {adjacency!r}."
        )
    return of(
        events.GaussianMixture(
            noise_multiplier, tuple(sensitivities), tuple(weights), adjacency
        )
    )
