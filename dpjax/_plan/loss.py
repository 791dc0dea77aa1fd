"""A script's own loss, as the clipped sum of its gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._meshes import like, numbered
from dpjax._plan import modules
from dpjax._plan.loader import Examples
from dpjax._typing import Engine
from dpjax.per_example import clipped_grad

_NOTE = (
    "dpjax: the loss is called on one example at a time, its batch axis "
    "{axis}. Per-example gradients are what privacy rests on."
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    clip_norm: float,
    *,
    has_aux: bool,
    batched: bool,
    engine: Engine,
    microbatch_size: int | None,
) -> Callable[..., Any]:
    """See `Plan.value_and_grad`."""
    looked = False

    def fn(model: Any, examples: Examples, *others: Any) -> tuple[Any, Any]:
        if not isinstance(examples, Examples):
            raise ValueError(
                "examples must be dpjax.Examples, as Plan.load and Plan.batches give "
                f"them, which know which places are empty; got {type(examples)}."
            )
        parts = modules.split(model)
        mask = jnp.asarray(examples.mask)
        leaves, treedef = jax.tree.flatten(others, is_leaf=modules.is_nnx)
        along = [modules.along(x) for x in leaves]

        def loss_and_aux(trained: Any, example: Any) -> tuple[Any, Any]:
            data, *of_example = example
            if batched:
                data = jax.tree.map(lambda x: jnp.asarray(x)[None], data)
            merged = [
                part.merge(trained, own)
                for part, own in zip((parts, *along), of_example, strict=True)
            ]
            whole, *given = [x for x, _ in merged]
            try:
                out = loss_fn(whole, data, *treedef.unflatten(given))
            except Exception as error:
                error.add_note(_NOTE.format(axis="is 1" if batched else "taken away"))
                raise
            for _, unchanged in merged:
                unchanged()
            value, aux = out if has_aux else (out, None)
            return value, jax.tree.map(_row, aux) if batched else aux

        gradient = clipped_grad(
            loss_and_aux,
            clip_norm,
            has_aux=True,
            engine=engine,
            microbatch_size=microbatch_size,
        )
        numbers = numbered(mask.size, [examples.data, mask])
        own = [part.of_examples(numbers) for part in (parts, *along)]
        batch = (examples.data, *own)
        grads, per_example = gradient(parts.trained, batch, mask=mask)
        nonlocal looked
        if not looked:  # once is enough, for a loop outside jit too
            looked = True
            _warn_of_idle(loss_and_aux, parts, batch)
        value = masked_mean(per_example.loss, mask)
        grads = parts.like_model(grads)
        for part in (parts, *along):
            part.advance()
        return ((value, per_example.aux) if has_aux else value), grads

    return fn


def _warn_of_idle(
    loss_and_aux: Callable[..., Any], parts: modules.Parts, batch: Any
) -> None:
    """Say which parameters get noise and nothing else."""
    kinds = jax.tree.map(lambda x: jax.typeof(jnp.asarray(x)), batch)
    one = jax.tree.map(lambda kind: like(kind, kind.shape[1:], kind.dtype), kinds)
    gradient = jax.grad(loss_and_aux, has_aux=True)
    closed = jax.make_jaxpr(lambda *args: gradient(*args)[0])(parts.trained, one)
    made_by = {v: eqn for eqn in closed.eqns for v in eqn.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, jex.Literal):
            return not np.any(atom.val)
        eqn = made_by.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return is_zero(eqn.invars[0])

    gradients = zip(parts.names, closed.jaxpr.outvars, strict=True)
    idle = [name for name, atom in gradients if is_zero(atom)]
    if idle:
        warnings.warn(
            f"the loss's gradient by {idle} of the model is zero whatever the data, "
            "and noise is added to it in every step: what is frozen or unused would "
            "move at random. Hand it to the loss as a further argument in place of a "
            "part of the model.",
            stacklevel=3,
        )


def _row(x: Any) -> Any:
    """What a batch of one has as its rows: the one."""
    return x[0] if jnp.ndim(x) and jnp.shape(x)[0] == 1 else x


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of those that are there; 0 if none is."""
    total = jnp.sum(jnp.where(mask, values, 0.0))
    return total / jnp.maximum(jnp.sum(mask), 1)
