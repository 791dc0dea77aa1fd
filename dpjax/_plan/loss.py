"""A script's own loss, as the clipped sum of its gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._metrics import Metrics, masked_mean
from dpjax._metrics import metrics as of_examples
from dpjax._plan import modules
from dpjax._plan.loader import Examples
from dpjax._plan.users import OfUser, of_user
from dpjax._typing import Engine
from dpjax.per_example import PerExample, clipped_grad

_NOTE = (
    "dpjax: the loss is called on one example at a time, its batch axis "
    "{axis}. Per-example gradients are what privacy rests on."
)


def value_and_grad(
    loss_fn: Callable[..., Any], clip_norm: float, **options: Any
) -> Callable[..., Any]:
    """See `Plan.value_and_grad`."""
    has_aux = options["has_aux"]
    gradient = _gradient(loss_fn, clip_norm, **options)

    def fn(model: Any, examples: Examples, *others: Any) -> tuple[Any, Any]:
        grads, per_example, mask = gradient(model, examples, *others)
        value = masked_mean(per_example.loss, mask)
        return ((value, per_example.aux) if has_aux else value), grads

    return fn


def metrics(
    loss_fn: Callable[..., Any], clip_norm: float, **options: Any
) -> Callable[..., Metrics]:
    """See `Plan.metrics`."""
    gradient = _gradient(loss_fn, clip_norm, **options)

    def fn(model: Any, examples: Examples, *others: Any) -> Metrics:
        _, per_example, mask = gradient(model, examples, *others)
        return of_examples(per_example, clip_norm, mask=mask)

    return fn


def _gradient(
    loss_fn: Callable[..., Any],
    clip_norm: float,
    *,
    has_aux: bool,
    batched: bool,
    engine: Engine,
    microbatch_size: int | None,
) -> Callable[..., tuple[Any, PerExample, jax.Array]]:
    """The clipped sum, what each example gave, and which of them are there."""

    def fn(
        model: Any, examples: Examples, *others: Any
    ) -> tuple[Any, PerExample, jax.Array]:
        if not isinstance(examples, Examples):
            raise ValueError(
                "examples must be dpjax.Examples, as Plan.load and Plan.batches give "
                f"them, which know which places are empty; got {type(examples)}."
            )
        parts = modules.split(model)

        def of_one(trained: Any, data: Any, of_example: Any) -> tuple[Any, Any]:
            if batched:
                data = jax.tree.map(lambda x: jnp.asarray(x)[None], data)
            whole, unchanged = parts.merge(trained, of_example)
            try:
                out = loss_fn(whole, data, *others)
            except Exception as error:
                error.add_note(_NOTE.format(axis="is 1" if batched else "taken away"))
                raise
            unchanged()
            value, aux = out if has_aux else (out, None)
            return value, jax.tree.map(_row, aux) if batched else aux

        def loss_and_aux(trained: Any, unit: Any) -> tuple[Any, Any]:
            data, own = unit
            if isinstance(data, OfUser):
                return of_user(functools.partial(of_one, trained), data, own)
            return of_one(trained, data, own)

        gradient = clipped_grad(
            loss_and_aux,
            clip_norm,
            has_aux=True,
            engine=engine,
            microbatch_size=microbatch_size,
        )
        mask = jnp.asarray(examples.mask)
        batch = (examples.data, parts.of_examples(mask.size))
        grads, per_example = gradient(parts.trained, batch, mask=mask)
        grads = parts.like_model(grads)
        parts.advance()
        return grads, per_example, mask

    return fn


def _row(x: Any) -> Any:
    """What a batch of one has as its rows: the one."""
    return x[0] if jnp.ndim(x) and jnp.shape(x)[0] == 1 else x
