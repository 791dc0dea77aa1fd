"""What every solver hands back."""

from typing import Generic, NamedTuple, TypeVar

import jax

from dpjax._core.typing import Params
from dpjax.accounting.profiles import Guarantee


class Curve(NamedTuple):
    """What a run looked like, step by step. It is not private: keep it in house.

    Attributes:
      loss: the mean loss over the step's batch before the update, f[T], over the
        examples that were used.
      left_out: how many examples of the step's batch contributed zero because they or
        their gradients are not finite, i[T].
      noise_norm: with a momentum the root mean square L2 norm of the noise in it, in
        the units of a mean gradient, f[T]. It depends on no data. None without.
      change_clipped: in `sensitivity_reduced_nsgd` the share of the used examples whose
        change since the last epoch was clipped, f[T]; 0 in the first epoch.
      drift_clipped: the share of them whose drift since the anchor was clipped, f[T].

    A random number of rounds has no such rows: `random_round_sgd` gives loss, f[], and
    left_out, i[], of all its draws together.
    """

    loss: jax.Array
    left_out: jax.Array
    noise_norm: jax.Array | None = None
    change_clipped: jax.Array | None = None
    drift_clipped: jax.Array | None = None


Noise = TypeVar("Noise")


class Result(NamedTuple, Generic[Params, Noise]):
    """Private parameters and what is promised about them.

    Attributes:
      params: what the solver trained, shaped like the initial parameters.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee`; it says for what.
      num_steps: T, how many steps were taken. It may be released.
      noise_multiplier: the noise's standard deviation over a bound: on one example's
        gradient, f[], or f[T] where a schedule was given; in `sensitivity_reduced_nsgd`
        on its terms in each tree, `Terms` of f[]; in `output_perturbation` its scale
        over the sensitivity.
      sensitivity: in `output_perturbation` how far one example can move the last
        iterate, rounding included.
      scale: in `output_perturbation` that of the noise: the standard deviation per
        coordinate, or for δ = 0 the scale of `dpjax.noise._gaussian.gamma_norm_like`.
    """

    params: Params
    curve: Curve
    guarantee: Guarantee
    num_steps: int
    noise_multiplier: Noise
    sensitivity: float | None = None
    scale: float | None = None

    # What single solvers called these.

    @property
    def rounds(self) -> int:
        """`num_steps`, where it was drawn."""
        return self.num_steps

    @property
    def left_out(self) -> jax.Array:
        """`curve.left_out`."""
        return self.curve.left_out

    @property
    def noise_multipliers(self) -> Noise:
        """`noise_multiplier`, where there are three."""
        return self.noise_multiplier
