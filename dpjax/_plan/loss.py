"""The transformation of a training loss into the sum of its clipped gradients.

`Alerts` warns of parameters whose gradients are zero. Only the noise would change these
parameters.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.meshes import are_concrete, example_numbers, like
from dpjax._core.rounding import margin
from dpjax._core.typing import ArrayLike, Engine
from dpjax._plan import modules, parameters, users
from dpjax._plan.loader import Examples
from dpjax._plan.modules import Parts
from dpjax._plan.parameters import RunParameters
from dpjax._plan.zero_gradients import are_outputs_zero
from dpjax.clipping._clipped_grad import PerExample, clipped_grad
from dpjax.clipping._metrics import Metrics, masked_mean
from dpjax.clipping._metrics import metrics as of_examples

_FROZEN = (
    "Noise alone would change a frozen or unused parameter. Pass such a parameter to "
    "the loss as a further argument, not as a part of the model."
)
_BATCH_OF_ONE = (
    "The loss is called on one example at a time, and in a batch of one these "
    "gradients vanish. A loss that compares the examples of a batch, as contrastive "
    "losses, batch statistics and BatchNorm in training mode do, has no per-example "
    "gradients. Compare each example with fixed or public values instead."
)


class Alerts:
    """Warnings about zero gradients, each of which is issued at most once.

    Each function that `Plan.value_and_grad` or `Plan.metrics` returns has one `Alerts`,
    which remembers the checks that the function has already made.
    """

    def __init__(self) -> None:
        """Start in a state in which no warning has been issued."""
        # The parameters of which `warn_of_loss` warned; None before its first call.
        self._warned: list[str] | None = None
        self._sum_checked = False

    def warn_of_loss(
        self,
        loss_and_aux: Callable[..., Any],
        loss_of_two: Callable[..., Any] | None,
        parts: Parts,
        batch: Any,
    ) -> None:
        """At the first call, warn of parameters whose gradients are zero for all data.

        Args:
          loss_and_aux: the loss, a function of the trained parameters and of a pair:
            one example and its random keys.
          loss_of_two: the loss of a batch of two examples, a function of the trained
            parameters and of a pair: the two examples, and the random keys of one
            example. With this function, the warning also says if the loss compares
            examples. None if the loss has no batch axis, or if users are the examples.
          parts: the model, split into trained parameters and other leaves.
          batch: a pair: all examples, and their random keys. Both have a leading axis m
            of slots.
        """
        if self._warned is not None:
            return
        # Shapes and dtypes suffice: the analysis traces the loss and runs nothing.
        avals = jax.tree.map(lambda x: jax.typeof(jnp.asarray(x)), batch)
        example_and_keys = jax.tree.map(lambda x: like(x, x.shape[1:], x.dtype), avals)
        zero = _are_gradients_zero(loss_and_aux, parts.trained, example_and_keys)
        self._warned = [x for x, y in zip(parts.names, zero, strict=True) if y]
        if not self._warned:
            return
        reason = _FROZEN
        # If the gradients are not zero in a batch of two, the loss compares examples.
        if loss_of_two is not None:
            pair = jax.tree.map(lambda x: like(x, (2, *x.shape[1:]), x.dtype), avals[0])
            unit = pair, example_and_keys[1]
            # A loss that works only for batches of one example may raise here.
            with contextlib.suppress(Exception):
                if _are_gradients_zero(loss_of_two, parts.trained, unit) != zero:
                    reason = _BATCH_OF_ONE
        # Level 4 of the stack calls the function that `Plan.value_and_grad` returned.
        warnings.warn(
            f"the gradient of the loss with respect to {self._warned} of the "
            "model is zero for all data, but noise is added to this gradient in every "
            f"step. {reason}",
            stacklevel=4,
        )

    def warn_of_sum(
        self, sums: Any, norms: jax.Array, mask: jax.Array, names: Sequence[str]
    ) -> None:
        """Warn if a parameter's sum of clipped gradients is zero in the first batch.

        Here the first batch is the first one with a valid example whose gradient is
        finite. Later batches are not checked. A parameter of which `warn_of_loss` has
        warned is left out. Under jit the values are unknown, so that no warning is
        issued.

        Args:
          sums: the sum of clipped gradients, a tree shaped like the trained parameters.
          norms: the gradient's norm for each of the m slots, f[m].
          mask: the mask of valid examples, bool[m].
          names: the path in the model of each leaf of sums.
        """
        arrays = [*jax.tree.leaves(sums), norms, mask]
        if self._sum_checked or not are_concrete(arrays):
            return
        if not np.any(np.asarray(mask) & np.isfinite(norms)):
            return
        self._sum_checked = True
        pairs = zip(names, jax.tree.leaves(sums), strict=True)
        warned = self._warned or []
        zero = [x for x, total in pairs if x not in warned and not jnp.any(total)]
        if zero:
            warnings.warn(
                f"the clipped sum for {zero} of the model is exactly zero in the "
                "first batch, so noise alone moves these parameters in this step. "
                "This is expected for the matrix A of LoRA while B is zero. In all "
                "other cases, check the loss.",
                stacklevel=4,
            )


def _are_gradients_zero(
    loss_and_aux: Callable[..., Any], trained: Any, examples: Any
) -> list[bool]:
    """Tell for each leaf of `trained` whether its gradient is proven to be zero."""
    gradient = jax.grad(loss_and_aux, has_aux=True)
    closed = jax.make_jaxpr(lambda *args: gradient(*args)[0])(trained, examples)
    return are_outputs_zero(closed)


_NOTE = (
    "dpjax: the loss is called on one example at a time, and the batch axis {axis}. "
    "The guarantee depends on per-example gradients."
)


class Options(NamedTuple):
    """The keyword arguments of the methods `value_and_grad` and `metrics` of `Plan`."""

    has_aux: bool
    batched: bool
    engine: Engine
    microbatch_size: int | None


def value_and_grad(
    loss_fn: Callable[..., Any], plan: RunParameters, options: Options
) -> Callable[..., Any]:
    """Transform a loss as the method `Plan.value_and_grad` documents."""
    gradient = _make_gradient(loss_fn, plan, options)

    def fn(
        model: Any, examples: Examples, *others: Any, clip_norm: ArrayLike | None = None
    ) -> tuple[Any, Any]:
        grads, per_example, mask, bound = gradient(model, examples, others, clip_norm)
        value = masked_mean(per_example.loss, mask)
        if plan.quantile:
            # The sum is divided by the clip norm. After adding noise, the optimizer
            # multiplies by the clip norm from its own state.
            total = jax.tree.map(lambda g: g / bound, grads)
            within = parameters.count_within_clip_norm(per_example.norm, mask, bound)
            grads = parameters.Bounded(total, within)
        elif plan.schedule:
            # The sum is rescaled to the plan's clip norm, so that every step's sum has
            # the same sensitivity. The optimizer undoes the factor after the noise.
            grads = jax.tree.map(lambda g: g * (plan.clip_norm / bound), grads)
        return ((value, per_example.aux) if options.has_aux else value), grads

    return fn


def metrics(
    loss_fn: Callable[..., Any], plan: RunParameters, options: Options
) -> Callable[..., Metrics]:
    """Transform a loss as the method `Plan.metrics` documents."""
    gradient = _make_gradient(loss_fn, plan, options)

    def fn(
        model: Any, examples: Examples, *others: Any, clip_norm: ArrayLike | None = None
    ) -> Metrics:
        grads, per_example, mask, bound = gradient(model, examples, others, clip_norm)
        return of_examples(per_example, bound, mask=mask, grads=grads)

    return fn


def _step_clip_norm(
    plan: RunParameters, examples: Examples, clip_norm: ArrayLike | None
) -> ArrayLike:
    """The clip norm of a step.

    If the clip norm follows a quantile, the result is the argument clip_norm. Otherwise
    the result is the plan's clip norm times the factor of the plan's schedule.

    Raises:
      ValueError: clip_norm is None although the clip norm follows a quantile, or
        clip_norm is given although the clip norm follows no quantile; or a schedule
        varies the clip norm, and the examples do not record their step.
    """
    if (clip_norm is None) == (plan.quantile is not None):
        raise ValueError(
            "clip_norm must be plan.clip_norm_of(state) for a plan with a "
            f"QuantileClip, and None for other plans; got {clip_norm!r}."
        )
    if clip_norm is not None:
        return clip_norm
    if all(segment.clip == 1.0 for segment in plan.segments):
        return plan.clip_norm
    if examples.step is None:
        raise ValueError(
            "examples must record their step, because the clip norm depends on the "
            "step; use examples of Plan.load or Plan.batches, which record the step."
        )
    return plan.clip_norm * plan.values_at(examples.step).clip


def _make_gradient(
    loss_fn: Callable[..., Any], plan: RunParameters, options: Options
) -> Callable[..., tuple[Any, PerExample, jax.Array, ArrayLike]]:
    """Return a function that sums the clipped gradients of a batch.

    The returned function takes the model, the examples, a tuple of the loss's other
    arguments, and the clip norm (None unless the clip norm follows a quantile).

    The results of the returned function are the sum of the clipped gradients, the
    `PerExample` results of the examples (loss, gradient norm and auxiliary output), the
    mask of valid examples, and the clip norm of the step.
    """
    alerts = Alerts()

    def fn(
        model: Any, examples: Examples, others: Any, clip_norm: ArrayLike | None
    ) -> tuple[Any, PerExample, jax.Array, ArrayLike]:
        if not isinstance(examples, Examples):
            raise ValueError(
                "examples must be dpjax.Examples of Plan.load or Plan.batches, which "
                f"record the empty slots of a batch; got {type(examples)}."
            )
        # A batch that the caller assembled has no plan, and is accepted.
        if examples.plan is not None and examples.plan != plan:
            raise ValueError(
                "examples must be a batch of the same plan as the gradient, because "
                "the guarantee covers the batches, the gradient and the optimizer of "
                "one plan together; got a batch of a plan that differs in "
                f"{_differences(examples.plan, plan)}."
            )
        bound = _step_clip_norm(plan, examples, clip_norm)
        mask = jnp.asarray(examples.mask)
        leaves, treedef = jax.tree.flatten(others, is_leaf=modules.is_nnx)
        parts = (modules.split(model), *(modules.split_argument(x) for x in leaves))

        def loss_of_batch(trained: Any, unit: Any) -> tuple[Any, Any]:
            data, own_keys = unit
            merged = [
                part.merge(trained, x) for part, x in zip(parts, own_keys, strict=True)
            ]
            merged_model, *arguments = merged
            try:
                out = loss_fn(merged_model, data, *treedef.unflatten(arguments))
            except Exception as error:
                # A note on the batch axis helps to understand an error about shapes.
                axis = "has length 1" if options.batched else "is removed"
                error.add_note(_NOTE.format(axis=axis))
                raise
            # A changed state would pass one example's data to other examples.
            for part, x in zip(parts, merged, strict=True):
                part.check_unchanged(x)
            return out if options.has_aux else (out, None)

        def loss_of_example(trained: Any, data: Any, own_keys: Any) -> tuple[Any, Any]:
            if not options.batched:
                return loss_of_batch(trained, (data, own_keys))
            # The loss expects a batch axis, so that it gets a batch of one example.
            data = jax.tree.map(lambda x: jnp.asarray(x)[None], data)
            value, aux = loss_of_batch(trained, (data, own_keys))
            return value, jax.tree.map(_remove_unit_axis, aux)

        def loss_and_aux(trained: Any, unit: Any) -> tuple[Any, Any]:
            data, own_keys = unit
            if isinstance(data, users.OfUser):
                loss = functools.partial(loss_of_example, trained)
                return users.user_loss(loss, data, own_keys)
            return loss_of_example(trained, data, own_keys)

        gradient = clipped_grad(
            loss_and_aux,
            _reduce_clip_norm(plan, bound, mask.size),
            has_aux=True,
            engine=options.engine,
            microbatch_size=options.microbatch_size,
            arithmetic=plan.arithmetic,
        )
        numbers = example_numbers(mask.size, [examples.data, mask])
        # A key is folded with the position in the whole batch, even if only a part of
        # the batch is processed.
        if examples.first is not None:
            numbers = numbers + jnp.asarray(examples.first, numbers.dtype)
        batch = (examples.data, [part.of_examples(numbers) for part in parts])
        grads, per_example = gradient(parts[0].trained, batch, mask=mask)
        has_batch_axis = options.batched and not isinstance(examples.data, users.OfUser)
        loss_of_two = loss_of_batch if has_batch_axis else None
        alerts.warn_of_loss(loss_and_aux, loss_of_two, parts[0], batch)
        alerts.warn_of_sum(grads, per_example.norm, mask, parts[0].names)
        grads = parts[0].like_model(grads)
        for part in parts:
            part.advance()
        return grads, per_example, mask, bound

    return fn


def _reduce_clip_norm(plan: RunParameters, bound: ArrayLike, slots: int) -> ArrayLike:
    """Return a clip norm C at which sums have sensitivity `bound` despite rounding.

    Under REPLACE, the sensitivity is twice `bound`. With arithmetic="real", C is
    `bound`. With arithmetic="discrete", C is slightly smaller, because `accumulate`
    rounds the total of m clipped gradients to float32. Here m is the number of slots,
    or the plan's capacity if the capacity is larger. For a plan with a schedule or a
    `QuantileClip`, the total is also rescaled, and rounded again. Each rounding changes
    the total by at most 2⁻²⁴ m C. So for two neighbouring data sets, each rounding
    changes the difference of the totals by at most 2⁻²³ m C.
    """
    if plan.arithmetic == "real":
        return bound
    roundings = 2 if plan.schedule or plan.quantile else 1
    max_slots = max(plan.max_batch_size, slots)
    return bound * (1 / (1 + 2 * margin(roundings, jnp.float32) * max_slots))


def _differences(other: RunParameters, plan: RunParameters) -> str:
    """List the fields in which the plan `other` differs from `plan`, as text."""
    expected, actual = vars(plan.parameters()), vars(other.parameters())
    names = [name for name in expected if actual[name] != expected[name]]
    return ", ".join(f"{x} ({actual[x]!r} and {expected[x]!r})" for x in names)


def _remove_unit_axis(x: Any) -> Any:
    """Remove the leading axis of an array if the axis has size 1."""
    return x[0] if jnp.ndim(x) and jnp.shape(x)[0] == 1 else x
