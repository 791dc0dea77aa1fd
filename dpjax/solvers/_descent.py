"""Noisy gradient descent x ↦ prox(x − η(mean gradient + λx + noise)), in one scan."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate, sampling
from dpjax._dtypes import widen
from dpjax.accounting import calibrate
from dpjax.adjacency import Adjacency
from dpjax.noise import gaussian_like
from dpjax.per_example import clipped_grad
from dpjax.solvers import _data
from dpjax.solvers.guarantee import Guarantee
from dpjax.solvers.prox import Prox

Batches = Literal["full", "fixed", "reshuffled", "random"]


class Curve(NamedTuple):
    """What a run looked like, step by step. It is not private: keep it in house.

    Attributes:
      loss: the mean loss over the step's batch before the update, f[T], over the
        examples that were used.
      left_out: how many examples of the step's batch contributed zero because they or
        their gradients are not finite, i[T].
    """

    loss: jax.Array
    left_out: jax.Array


class Result(NamedTuple):
    """Private parameters and what is promised about them.

    Attributes:
      params: the last iterate, shaped like the initial parameters.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee` for params alone.
      noise_multiplier: standard deviation of the noise on a batch's sum of gradients
        over gradient_norm, f[] or f[T] as given.
    """

    params: Any
    curve: Curve
    guarantee: Guarantee
    noise_multiplier: jax.Array


def gradient_sum(
    loss_fn: Any,
    params: Any,
    examples: Any,
    mask: jax.Array,
    *,
    clip_norm: Any,
    microbatch_size: int | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Sum of gradients (clipped unless clip_norm is None), mean loss, how many used."""
    if clip_norm is None:

        def total_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            losses = jax.vmap(loss_fn, (None, 0))(params, examples)
            return jnp.sum(losses, where=mask), losses

        total, losses = jax.grad(total_loss, has_aux=True)(params)
        used = mask
    else:
        fn = clipped_grad(loss_fn, clip_norm, microbatch_size=microbatch_size)
        total, per_example = fn(params, examples, mask=mask)
        losses, used = per_example.loss, mask & jnp.isfinite(per_example.norm)
    counted = used & jnp.isfinite(losses)
    return widen(total), jnp.mean(losses, where=counted), jnp.sum(used)


@functools.partial(
    jax.jit,
    static_argnames=(
        "loss_fn",
        "prox",
        "clipped",
        "batches",
        "batch_size",
        "microbatch_size",
    ),
)
def descend(
    params: Any,
    data: _data.Data,
    step_sizes: jax.Array,
    stddevs: jax.Array,
    gradient_norm: jax.Array,
    regularization: jax.Array,
    key: jax.Array,
    *,
    loss_fn: Any,
    prox: Prox,
    clipped: bool,
    batches: Batches,
    batch_size: int,
    microbatch_size: int | None,
) -> tuple[Any, Curve]:
    """The last iterate; step sizes and noise have one row for each epoch, f[E, l].

    Iterates stay in float32 at least: a cast in every step would not be a contraction.
    """
    num_examples = data.finite.shape[0]
    noise_key, batch_key = jax.random.split(key)
    period = step_sizes.shape[1]

    def batches_of(epoch: jax.Array) -> sampling.Batch | None:
        if batches == "fixed":
            return sampling.cyclic(num_examples, batch_size)
        if batches == "reshuffled":
            return sampling.reshuffled(
                num_examples, batch_size, key=batch_key, epoch=epoch
            )
        if batches == "random":
            batch = sampling.fixed_size(
                num_examples, batch_size, key=batch_key, step=epoch
            )
            return jax.tree.map(lambda x: x[None], batch)
        return None

    def take(batch: sampling.Batch | None) -> tuple[Any, jax.Array, jax.Array]:
        if batch is None:
            return data.examples, data.finite, jnp.asarray(num_examples)
        examples = jax.tree.map(lambda x: x[batch.indices], data.examples)
        return examples, batch.mask & data.finite[batch.indices], batch.mask.sum()

    def step(params: Any, inputs: Any) -> tuple[Any, Curve]:
        batch, step_size, stddev, number = inputs
        examples, mask, size = take(batch)
        total, loss, used = gradient_sum(
            loss_fn,
            params,
            examples,
            mask,
            clip_norm=gradient_norm if clipped else None,
            microbatch_size=microbatch_size,
        )
        noise = gaussian_like(jax.random.fold_in(noise_key, number), total, stddev)

        def move(x: jax.Array, g: jax.Array, z: jax.Array) -> jax.Array:
            return x - step_size * (g / batch_size + regularization * x + z)

        params = prox(jax.tree.map(move, params, total, noise), step_size)
        return params, Curve(loss, size - used)

    def epoch(params: Any, inputs: Any) -> tuple[Any, Curve]:
        number, step_sizes, stddevs = inputs
        numbers = number * period + jnp.arange(period)
        return jax.lax.scan(
            step, params, (batches_of(number), step_sizes, stddevs, numbers)
        )

    epochs = jnp.arange(step_sizes.shape[0])
    last, curve = jax.lax.scan(epoch, widen(params), (epochs, step_sizes, stddevs))
    last = jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), last, params)
    return last, jax.tree.map(jnp.ravel, curve)


def check(
    loss_fn: Any,
    data: Any,
    *,
    noise_multiplier: Any,
    epsilon: Any,
    delta: Any,
    prox: Any,
    key: jax.Array,
    setting: dict[str, Any],
) -> int:
    """The number of examples, or a ValueError for what no solver here can take."""
    num_examples = _data.check(loss_fn, data)
    _validate.typed_key("key", key)
    if _validate.adjacency(setting["adjacency"]) is Adjacency.ADD_REMOVE:
        raise ValueError(
            f"adjacency must be ZERO_OUT or REPLACE; got {setting['adjacency']!r}: "
            "sums are divided by sizes that one example more would change."
        )
    if np.any(np.asarray(setting["diameter"]) < np.inf) and prox is None:
        raise ValueError(
            "diameter must be inf without a prox that keeps iterates in a set; got "
            f"{setting['diameter']!r}."
        )
    strong = np.any(np.asarray(setting["strong_convexity"]) > 0)
    if strong and not bool(jnp.all(_data.prepare(data).finite)):
        raise ValueError(
            "data must be finite where strong_convexity is above 0: an example that is "
            "left out has no curvature (a regulariser of its own is named "
            "regularization, and allows it)."
        )
    check_noise(noise_multiplier, epsilon, delta)
    return num_examples


def check_noise(noise_multiplier: Any, epsilon: Any, delta: Any) -> None:
    """Raise unless the noise is given either by itself or by what it has to reach."""
    if noise_multiplier is None:
        if epsilon is None or delta is None:
            raise ValueError(
                "noise_multiplier must be given, or epsilon and delta; got epsilon "
                f"{epsilon!r} and delta {delta!r}."
            )
        _validate.positive("epsilon", epsilon)
        _validate.open_unit("delta", delta)
    elif epsilon is not None or delta is not None:
        raise ValueError(
            "noise_multiplier must be None where epsilon and delta set the noise; got "
            f"{noise_multiplier!r}."
        )


def solve_noise(
    loss_of: Callable[[Any], jax.Array], goal: float, epsilon: float, delta: float
) -> float:
    """The least noise multiplier that meets a goal, with a margin for float32."""
    try:
        return float(calibrate.solve(loss_of, goal)) * (1 + 1e-6)
    except ValueError as error:
        raise ValueError(
            f"epsilon {epsilon!r} at delta {delta!r} must be one that some noise "
            f"reaches: {error}"
        ) from error


def constant(values: np.ndarray) -> bool:
    """Whether a schedule is none."""
    return bool(np.all(values == values[0]))


def rows(values: np.ndarray, period: int) -> jax.Array:
    """A value for each step as the rows of epochs that `descend` takes."""
    return jnp.asarray(values.reshape(-1, period), float)


ASSUMPTIONS = (
    "nothing but the last iterate is released: no other iterate, loss or count",
    "what the setting says of the loss (convexity, smoothness, and the norm of "
    "gradients unless they are clipped) is true of every possible example",
    "prox does not depend on the data and never moves two points apart",
    "n, all shapes, the initial parameters and the hyperparameters are public",
    "arithmetic is real and Gaussian noise ideal",
)


def assumptions(*more: str, setting: dict[str, Any]) -> tuple[str, ...]:
    """What the guarantee of a run rests on."""
    if np.any(np.asarray(setting["diameter"]) < np.inf):
        more += ("prox maps into a set of the stated diameter",)
    if np.any(np.asarray(setting["strong_convexity"]) > 0):
        more += ("every possible example is finite",)
    return more + ASSUMPTIONS
