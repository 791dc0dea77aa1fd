"""The result types that all solvers share."""

from typing import Generic, NamedTuple, TypeVar

import jax

from dpjax._core.typing import Params
from dpjax.accounting.profiles import Guarantee


class Curve(NamedTuple):
    """Values of every step of a run. They are not private: do not release them.

    Attributes:
      loss: the mean loss of the used examples of the step's batch before the update,
        f[T].
      left_out: the number of examples of the step's batch that contributed zero because
        they or their gradients are not finite, i[T].
      noise_norm: for solvers with a momentum, the root mean square L2 norm of the noise
        in the momentum, in the units of a mean gradient, f[T]. This norm depends on no
        data. None for solvers without a momentum.
      change_clipped: for `sensitivity_reduced_nsgd`, the share of the used examples
        for which the change of the gradient since the last epoch was clipped, f[T]; 0
        in the first epoch.
      drift_clipped: for `sensitivity_reduced_nsgd`, the share of the used examples
        for which the change of the gradient since the epoch's first iterate was
        clipped, f[T].

    `random_round_sgd` returns no value per step. Its loss, f[], is the mean loss of all
    rounds, and its left_out, i[], is the sum over all rounds.
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
      noise_multiplier: the noise's standard deviation divided by the bound on one
        example's gradient, f[], or f[T] for a schedule. `sensitivity_reduced_nsgd`
        returns `Terms` of f[], where the divisor is the bound on an example's terms in
        each tree. `output_perturbation` returns the noise's scale divided by the
        sensitivity.
      sensitivity: for `output_perturbation`, the maximum distance by which one example
        can move the last iterate, including rounding.
      scale: the scale of the noise that `output_perturbation` or
        `objective_perturbation` adds: its standard deviation per coordinate, or for
        δ = 0 the scale of `dpjax.noise._gaussian.gamma_norm_like`.
    """

    params: Params
    curve: Curve
    guarantee: Guarantee
    num_steps: int
    noise_multiplier: Noise
    sensitivity: float | None = None
    scale: float | None = None
