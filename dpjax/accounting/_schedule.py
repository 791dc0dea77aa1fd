"""The steps in which an example may take part, and the GDP parameter of a run."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import TINY
from dpjax._core.typing import Adjacency

Order = Literal["fixed", "reshuffled", "separated"]


class Schedule(NamedTuple):
    """The static parameters of a run that determine its sensitivity to one example.

    Attributes:
      num_steps: T, the number of steps of the run.
      steps_per_epoch: n_b, the number of steps in an epoch.
      order: "fixed" if an example takes part in the same step of every epoch.
        "reshuffled" if an example takes part in at most one step of each epoch, which
        can be any step. "separated" if the steps of an example are at least n_b apart.
      factor: the sensitivity of a sum of clipped gradients, divided by the clip norm: 2
        under REPLACE, and otherwise 1.
      max_participations: the maximum number of steps in which an example takes part;
        None if only the order limits these steps.
    """

    num_steps: int
    steps_per_epoch: int
    order: Order
    factor: float
    max_participations: int | None = None


def check_schedule(
    num_steps: int, steps_per_epoch: int, order: Order, adjacency: Adjacency
) -> Schedule:
    """Check a run's parameters and return the `Schedule`.

    In the result, `max_participations` is None.

    Raises:
      ValueError: a number is out of range, or adjacency is not an `Adjacency`. The
        function does not check `order`.
    """
    return Schedule(
        validate.static_int("num_steps", num_steps, minimum=1),
        validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1),
        order,
        validate.adjacency(adjacency).sensitivity_factor,
    )


def mu_of_sensitivity(sensitivity: jax.Array, noise_multiplier: jax.Array) -> jax.Array:
    """The GDP parameter μ, which is the sensitivity divided by the noise multiplier.

    The result is inf if the noise multiplier is not positive. For a finite noise
    multiplier, the result is at least TINY, the least positive normal float.
    """
    noiseless = ~(noise_multiplier > 0)
    mu = sensitivity / jnp.where(noiseless, 1.0, noise_multiplier)
    # An underflow must not report perfect privacy.
    mu = jnp.where(noise_multiplier < jnp.inf, jnp.maximum(mu, TINY), mu)
    return jnp.where(noiseless, jnp.inf, mu)
