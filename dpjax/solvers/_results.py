"""The result types that all solvers share."""

from typing import Generic, NamedTuple, TypeVar

import jax

from dpjax._core.typing import Params
from dpjax.accounting.profiles import Guarantee


class Curve(NamedTuple):
    """The course of a run, step by step. The curve is not private: do not release it.

    Attributes:
      loss: the mean loss over the step's batch before the update, f[T], over the
        examples that were used.
      left_out: how many examples of the step's batch contributed zero because they or
        their gradients are not finite, i[T].
      noise_norm: for solvers with a momentum, the root mean square L2 norm of the noise
        in the momentum, in the units of a mean gradient, f[T]. This norm depends on no
        data. None for solvers without a momentum.
      change_clipped: in `sensitivity_reduced_nsgd` the share of the used examples whose
        change since the last epoch was clipped, f[T]; 0 in the first epoch.
      drift_clipped: the share of the used examples whose drift since the anchor was
        clipped, f[T].

    `random_round_sgd` has no row for each step: it gives the mean loss, f[], and
    left_out, i[], over all of its rounds together.
    """

    loss: jax.Array
    left_out: jax.Array
    noise_norm: jax.Array | None = None
    change_clipped: jax.Array | None = None
    drift_clipped: jax.Array | None = None


Noise = TypeVar("Noise")


class Result(NamedTuple, Generic[Params, Noise]):
    """Private parameters and their guarantee.

    Attributes:
      params: the trained parameters, shaped like the initial parameters.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee`, which names the released values that it covers.
      num_steps: T, the number of steps taken. T may be released.
      noise_multiplier: the noise's standard deviation over the bound on one example's
        gradient, f[], or f[T] where a schedule was given. In `sensitivity_reduced_nsgd`
        the bound is on an example's terms in each tree, `Terms` of f[]. In
        `output_perturbation` this is the noise's scale over the sensitivity.
      sensitivity: in `output_perturbation` how far one example can move the last
        iterate, rounding included.
      scale: in `output_perturbation` the scale of the noise: the standard deviation per
        coordinate, or for δ = 0 the scale of `dpjax.noise._gaussian.gamma_norm_like`.
    """

    params: Params
    curve: Curve
    guarantee: Guarantee
    num_steps: int
    noise_multiplier: Noise
    sensitivity: float | None = None
    scale: float | None = None
