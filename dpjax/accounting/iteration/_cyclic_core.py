"""Bounds on the last iterate of noisy descent on cyclic batches, however many."""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._float64 import TINY, ULP, float64
from dpjax.accounting.iteration import _periodic, _setting
from dpjax.accounting.iteration._minorant import HUGE
from dpjax.accounting.iteration._setting import Setting

Order = Literal["fixed", "reshuffled"]
_STATIC = (
    "bound",
    "period",
    "epochs",
    "reshuffled",
    "keeps",
    "bounded",
    "factor",
    "convex",
)


def _finish(square: jax.Array, shift: jax.Array) -> jax.Array:
    """μ from μ² in units of shift, rounded up, and 0 for no shift alone."""
    regular = (square > 0) & (square < jnp.inf)
    root = jnp.sqrt(jnp.where(regular, square, 1.0)) * (1 + 256 * ULP)
    root = jnp.where(regular, root, jnp.where(square == 0, 0.0, jnp.inf))  # NaN is inf
    some = shift > 0
    mu = jnp.where(some, shift, 1.0) * root
    return jnp.where(some, jnp.maximum(mu, TINY), 0.0)


def _one(
    tail: jax.Array,
    *arrays: jax.Array,
    bound: str,
    period: int,
    epochs: int,
    reshuffled: bool,
    keeps: bool,
    bounded: bool,
    factor: float,
    convex: bool,
) -> jax.Array:
    """One bound, or the best, for an example with `tail` steps from its last use on."""
    step = _setting.step(arrays, keeps=keeps, factor=factor)
    y, r = step.log_lipschitz, step.shift
    one = jnp.ones_like(r)  # the bounds are homogeneous in shift and diameter
    place = jnp.clip(tail, 1, period).astype(jnp.int32)
    slack = 1 + (period + epochs) * ULP
    shape = {
        "period": period,
        "epochs": epochs,
        "reshuffled": reshuffled,
        "convex": convex,
    }

    def composition() -> jax.Array:
        return r * np.sqrt(epochs) * (1 + 4 * ULP)

    def contraction() -> jax.Array:
        square = slack * _periodic.contraction(y, one, place, **shape)
        return jnp.where(step.known, _finish(square, r), jnp.inf)

    def diameter() -> jax.Array:
        if not bounded:
            return jnp.full_like(r, jnp.inf)
        # Squares of it neither overflow nor underflow. A larger diameter is valid.
        start = step.diameter / jnp.where(r > 0, r, 1.0)
        near = step.bounded & (start < HUGE)
        start = jnp.maximum(jnp.where(near, start, 1.0), 1 / HUGE)
        square = slack * _periodic.restarted(y, one, start, place, **shape)
        return jnp.where(near, _finish(square, r), jnp.inf)

    bounds = {
        "composition": composition,
        "contraction": contraction,
        "diameter": diameter,
    }
    if bound == "best":
        # Contraction is composition at its worst, so that a tie has its derivatives.
        least = contraction()
        least = jnp.where(least < jnp.inf, least, composition())
        least = jnp.minimum(least, diameter())
    else:
        least = bounds[bound]()
    return jnp.where(step.valid, least, jnp.inf)


@float64("up", static=_STATIC)
def mu(*arrays: jax.Array, **static) -> jax.Array:
    core = jnp.vectorize(lambda *scalars: _one(*scalars, **static))
    return core(*arrays)


@float64("up", static=_STATIC)
def rdp(orders: jax.Array, *arrays: jax.Array, **static) -> jax.Array:
    core = jnp.vectorize(lambda *scalars: _one(*scalars, **static))
    mu = core(*arrays)
    finite = mu < jnp.inf
    value = orders * jnp.square(jnp.where(finite, mu, 1.0)) / 2 * (1 + 4 * ULP)
    value = jnp.where(mu > 0, jnp.maximum(value, TINY), 0.0)
    return jnp.where((orders > 0) & finite, value, jnp.inf)


def arguments(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    order: Order,
    **setting: Unpack[Setting],
) -> tuple[tuple, dict]:
    """What the cores take: their arrays but for the first, and what is static."""
    epochs = _validate.static_int("num_epochs", num_epochs, minimum=1)
    period = _validate.static_int("batches_per_epoch", batches_per_epoch, minimum=1)
    _validate.positive("batch_size", batch_size)
    _validate.one_of("order", order, ("fixed", "reshuffled"))
    arrays, static = _setting.check(noise_multiplier, batch_size, **setting)
    shape = {"period": period, "epochs": epochs, "reshuffled": order == "reshuffled"}
    return arrays, static | shape
