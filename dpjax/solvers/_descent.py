"""Noisy gradient descent in one compiled program, and the results of all solvers.

A step of noisy gradient descent is x ↦ prox(x − η(mean gradient + λx + noise)), where x
are the parameters, η is the step size, λ is the weight of the regulariser (λ/2)‖x‖²,
and prox is a proximal operator.
"""

import functools
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import sampling
from dpjax._core.dtypes import widen
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree
from dpjax.accounting.profiles import Guarantee
from dpjax.clipping._clipped_grad import clipped_grad
from dpjax.noise._gaussian import gaussian_like
from dpjax.solvers import _checks
from dpjax.solvers._checks import Batches, Noise
from dpjax.solvers.prox import Prox


class Curve(NamedTuple):
    """Losses and counts of every step of a run, which no guarantee covers.

    Do not release the curve. T is the number of steps.

    A step does not use non-finite examples. With clipping, a step does not use examples
    with non-finite gradients either. (`dp_nsgd` checks only the gradients.) An example
    that a step does not use contributes zero. A mean or a share of no examples is NaN.

    Attributes:
      loss: the mean loss at the parameters before the update, f[T], over the used
        examples whose loss is finite.
      left_out: the number of examples of the batch, without padding, that the step does
        not use, i[T].
      noise_norm: for solvers with a momentum, the root mean square L2 norm of the noise
        in the momentum, in the units of a mean gradient, f[T]. This norm depends on no
        data. None for solvers without a momentum.
      change_clipped: for `sensitivity_reduced_nsgd`, the share of the used examples
        whose change was clipped, f[T]. The change is from the gradient at the first
        iterate of the previous epoch to the gradient at the first iterate of this
        epoch. The share is 0 in the first epoch. None for other solvers.
      drift_clipped: for `sensitivity_reduced_nsgd`, the share of the used examples
        whose drift was clipped, f[T]. The drift is the change from the gradient at the
        first iterate of this epoch to the gradient at the current iterate. None for
        other solvers.

    For `random_round_sgd` and `objective_perturbation`, loss and left_out have no axis
    of steps. `random_round_sgd` returns the mean loss of the used examples of all
    rounds, and the sum of left_out over all rounds. `objective_perturbation` returns
    the mean loss at the minimum.
    """

    loss: jax.Array
    left_out: jax.Array
    noise_norm: jax.Array | None = None
    change_clipped: jax.Array | None = None
    drift_clipped: jax.Array | None = None


class Result(NamedTuple, Generic[Params, Noise]):
    """Private parameters and their guarantee.

    Attributes:
      params: the trained parameters, shaped like the initial parameters.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee`, which names the released values that it covers.
      num_steps: T, the number of steps of the run, or 1 for `objective_perturbation`. T
        may be released.
      noise_multiplier: the standard deviation of the noise in a sum of gradients,
        divided by the bound on one example's gradient, f[], or f[T] if this quotient
        differs between steps. For `dp_nsgd`, the standard deviation is that of the
        independent draws from which the noise is computed. `objective_perturbation`
        returns scale divided by the bound on one example's gradient, and
        `output_perturbation` returns scale / sensitivity. `sensitivity_reduced_nsgd`
        returns three numbers f[], named anchor, change and drift, for three trees of
        noise. Each number is the standard deviation of a node's noise, divided by the
        bound on one example's term in the tree; inf for a tree that is not used.
      sensitivity: for `output_perturbation`, a bound on the distance by which one
        example can move the last iterate, including rounding. None for other solvers.
      scale: for `output_perturbation` with δ > 0, the standard deviation of each
        coordinate of the noise; with δ = 0, the number s for which the density of the
        noise z is proportional to e^{−‖z‖₂/s}. For `objective_perturbation`, the
        standard deviation of each coordinate of the random linear term. None for other
        solvers.
    """

    params: Params
    curve: Curve
    guarantee: Guarantee
    num_steps: int
    noise_multiplier: Noise
    sensitivity: float | None = None
    scale: float | None = None


def gradient_sum(
    loss_fn: LossFn,
    params: Tree,
    data: _checks.Data,
    *,
    clip_norm: ArrayLike | None,
    microbatch_size: int | None = None,
) -> tuple[Tree, jax.Array, jax.Array]:
    """Return a batch's sum of gradients, mean loss and number of used examples.

    The function clips each gradient unless clip_norm is None. The used examples are the
    examples for which `data.finite` is True. With clipping, examples with a non-finite
    gradient are not used either. The mean is over the used examples with a finite loss.
    """
    examples, mask = data
    if clip_norm is None:

        def total_loss(params: Tree) -> tuple[jax.Array, jax.Array]:
            losses = jax.vmap(loss_fn, (None, 0))(params, examples)
            return jnp.sum(losses, where=mask), losses

        # Without clipping, one backward pass gives the sum, and no per-example
        # gradients are formed.
        total, losses = jax.grad(total_loss, has_aux=True)(params)
        used = mask
    else:
        clipped_sum = clipped_grad(loss_fn, clip_norm, microbatch_size=microbatch_size)
        total, per_example = clipped_sum(params, examples, mask=mask)
        losses, used = per_example.loss, mask & jnp.isfinite(per_example.norm)
    # The mean excludes a loss that is infinite although its gradient is finite.
    is_counted = used & jnp.isfinite(losses)
    num_used = jnp.sum(used, dtype=jnp.int32)
    return widen(total), jnp.mean(losses, where=is_counted), num_used


def make_batches(
    batches: Batches, num_examples: int, batch_size: int, key: Key, epoch: jax.Array
) -> sampling.Batch | None:
    """Return the batches of an epoch, stacked along a first axis.

    If `batches` is "random", an epoch has one batch. If `batches` is "full", the result
    is None.
    """
    sizes = num_examples, batch_size
    if batches == "fixed":
        return sampling.cyclic(*sizes)
    if batches == "reshuffled":
        return sampling.reshuffled(*sizes, key=key, epoch=epoch)
    if batches == "random":
        batch = sampling.fixed_size(*sizes, key=key, step=epoch)
        # The inner scan has one step, so the batch needs a leading axis of length 1.
        return jax.tree.map(lambda x: x[None], batch)
    return None


_STATIC = "loss_fn", "prox", "clipped", "batches", "batch_size", "microbatch_size"


@functools.partial(jax.jit, static_argnames=_STATIC)
def descend(
    params: Tree,
    data: _checks.Data,
    step_sizes: jax.Array,
    stddevs: jax.Array,
    gradient_norm: jax.Array,
    regularization: jax.Array,
    key: Key,
    *,
    loss_fn: LossFn,
    prox: Prox,
    clipped: bool,
    batches: Batches,
    batch_size: int,
    microbatch_size: int | None,
) -> tuple[Tree, Curve]:
    """Run noisy gradient descent, and return the last iterate and the `Curve`.

    step_sizes and stddevs are f[E, l]: one row for each of the E epochs, and one column
    for each of the l steps of an epoch. stddevs are the standard deviations of the
    noise in the mean gradient, which is the sum of gradients divided by batch_size.

    All iterates, including the last one, are in float32 or float64. A step that rounds
    its iterate to fewer bits is not a contraction.
    """
    num_examples = data.finite.shape[0]
    noise_key, batch_key = stream(key, "noise"), stream(key, "batches")
    period = step_sizes.shape[1]

    def step(params: Tree, inputs: tuple[Any, ...]) -> tuple[Tree, Curve]:
        batch, step_size, stddev, number = inputs
        if batch is None:
            batch_data, num_valid = data, num_examples
        else:
            batch_data = data.select(batch)
            num_valid = jnp.sum(batch.mask, dtype=jnp.int32)
        total, loss, used = gradient_sum(
            loss_fn,
            params,
            batch_data,
            clip_norm=gradient_norm if clipped else None,
            microbatch_size=microbatch_size,
        )
        # With the step number in its key, each step draws independent noise.
        noise = gaussian_like(jax.random.fold_in(noise_key, number), total, stddev)

        # Bok, Su and Altschuler (2024), (2.1), https://arxiv.org/abs/2403.00278. The
        # gradient of the regulariser λ/2 ‖x‖² is not clipped, since it depends on no
        # data. The divisor is b also for a batch with padding, as the accountant
        # assumes.
        def update(x: jax.Array, g: jax.Array, z: jax.Array) -> jax.Array:
            eta, ridge = step_size.astype(x.dtype), regularization.astype(x.dtype)
            return x - eta * (g / batch_size + ridge * x + z)

        params = prox(jax.tree.map(update, params, total, noise), step_size)
        return params, Curve(loss, num_valid - used)

    def epoch(
        params: Tree, inputs: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[Tree, Curve]:
        number, step_sizes, stddevs = inputs
        # Step numbers continue from epoch to epoch, so that no key of noise repeats.
        numbers = number * period + jnp.arange(period)
        batch = make_batches(batches, num_examples, batch_size, batch_key, number)
        return jax.lax.scan(step, params, (batch, step_sizes, stddevs, numbers))

    epochs = jnp.arange(step_sizes.shape[0])
    # Two nested scans save memory: a step of the outer scan makes one epoch's batches.
    last, curve = jax.lax.scan(epoch, widen(params), (epochs, step_sizes, stddevs))
    return last, jax.tree.map(jnp.ravel, curve)


def cast_like(wide: Tree, params: Params) -> Params:
    """Cast parameters of wider dtypes to the dtypes of the parameters `params`."""
    # The code does not use jnp.result_type(p): for a weakly typed float32, its result
    # depends on whether 64-bit types are enabled in this scope.
    return jax.tree.map(lambda x, p: x.astype(jnp.asarray(p).dtype), wide, params)
