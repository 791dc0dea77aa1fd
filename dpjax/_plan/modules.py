"""Models, split into what is trained and what is not.

A model is any tree. Its arrays of floats are trained; what else it holds goes along as
it is. Modules of flax.nnx are trees too, but of more than parameters: running
averages, keys and counters lie beside them and change while the loss runs. There the
`nnx.Param`s alone are trained, each example gets keys of its own, and whatever else
changes would carry one example to the others, and is refused.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model in parts.

    Attributes:
      trained: the tree that is differentiated by.
      merge: from such a tree and what one example brings along to the model, and to
        what raises if the loss has changed the model's state.
      of_examples: from a batch's size to what examples bring along, a leading axis.
      like_model: from gradients by `trained` to what the model's optimizer takes.
      advance: moves the model's own counters on, where it has any.
    """

    trained: Any
    merge: Callable[[Any, Any], tuple[Any, Callable[[], None]]]
    of_examples: Callable[[int], Any]
    like_model: Callable[[Any], Any]
    advance: Callable[[], None]


def split(model: Any) -> Parts:
    """The parts of a model.

    Raises:
      ValueError: there is nothing to train; modules of flax.nnx lie within a tree.
    """
    nnx = sys.modules.get("flax.nnx")
    is_module = nnx is not None and isinstance(model, nnx.Module)
    if nnx is not None and not is_module:
        leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Module))
        if any(isinstance(x, nnx.Module) for x in leaves):
            raise ValueError(
                "the model must be one flax.nnx module, or a tree without any; got "
                f"modules within {type(model)}. nnx.Dict and nnx.List hold several."
            )
    parts = _of_module(nnx, model) if is_module else _of_tree(model)
    if not jax.tree.leaves(parts.trained):
        raise ValueError(
            "the model must hold arrays of floats to train; got "
            f"{jax.tree.structure(model)}."
        )
    return parts


def _is_trained(leaf: Any) -> bool:
    array = isinstance(leaf, jax.Array | np.ndarray)
    return array and jnp.issubdtype(leaf.dtype, jnp.floating)


def _of_tree(model: Any) -> Parts:
    leaves, treedef = jax.tree.flatten(model)
    trained = [x if _is_trained(x) else None for x in leaves]

    def merge(trained: Any, of_example: Any) -> tuple[Any, Callable[[], None]]:
        del of_example
        full = [
            x if new is None else new for x, new in zip(leaves, trained, strict=True)
        ]
        return treedef.unflatten(full), lambda: None

    return Parts(trained, merge, lambda size: (), treedef.unflatten, lambda: None)


def _of_module(nnx: Any, model: Any) -> Parts:
    graph, trained, keys, counts, rest = nnx.split(
        model, nnx.Param, nnx.RngKey, nnx.RngCount, ...
    )

    def of_examples(size: int) -> Any:
        numbers = jnp.arange(size)
        return jax.tree.map(
            lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers), keys
        )

    def merge(trained: Any, of_example: Any) -> tuple[Any, Callable[[], None]]:
        whole = nnx.merge(graph, trained, of_example, counts, rest, copy=True)

        def unchanged() -> None:
            after = nnx.split(whole, nnx.Param, nnx.RngKey, nnx.RngCount, ...)[-1]
            before = dict(jax.tree.leaves_with_path(rest))
            changed = [
                jax.tree_util.keystr(path)
                for path, x in jax.tree.leaves_with_path(after)
                if before.get(path) is not x
            ]
            if changed:
                raise ValueError(
                    f"the loss changes the model's state {changed}, by which examples "
                    "would see each other, as BatchNorm does in training mode. Use "
                    "GroupNorm or LayerNorm, or BatchNorm with use_running_average."
                )

        return whole, unchanged

    def advance() -> None:
        if jax.tree.leaves(counts):
            nnx.update(model, jax.tree.map(lambda count: count + 1, counts))

    return Parts(trained, merge, of_examples, lambda grads: grads, advance)
