"""Models, split into trained parameters and other leaves.

A model is any tree. Its arrays of floats are trained, and all other leaves are passed
to the loss unchanged. Modules of flax.nnx are trees that hold more than parameters:
running averages, keys and counters, which may change while the loss runs. In these
modules only the `nnx.Param`s are trained, and each example gets its own random keys. A
change of a running average, or of other state, would pass one example's data to other
examples. So `Parts.check_unchanged` raises if the loss changes any state except
parameters, keys and counters.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model, or another argument of the loss, split into parts.

    Attributes:
      merge: a function of a tree shaped like `trained` and of one example's random
        keys. The function returns the whole model, or the whole argument. For an
        argument that is not the model, the function ignores the tree.
      trained: the tree of trained parameters, by which the loss is differentiated. For
        an argument that is not the model, this attribute is not used.
      names: the path in the model of each leaf of `trained`.
      of_examples: a function from the examples' positions in the batch, i[m], to each
        example's random keys, with a leading axis m.
      check_unchanged: a function of a model that `merge` returned before the loss ran.
        The function raises if the loss changed any state of the model except
        parameters, keys and counters.
      advance: a function that adds 1 to the model's counters, from which flax.nnx
        derives random keys.
      like_model: a function that converts gradients shaped like `trained` to the
        structure that the model's optimizer needs.
    """

    merge: Callable[[Any, Any], Any]
    trained: Any = ()
    names: Sequence[str] = ()
    of_examples: Callable[[jax.Array], Any] = lambda numbers: ()
    check_unchanged: Callable[[Any], None] = lambda model: None
    advance: Callable[[], None] = lambda: None
    like_model: Callable[[Any], Any] = lambda grads: grads


def split(model: Any) -> Parts:
    """Split a model into trained parameters and other leaves.

    Raises:
      ValueError: the model has no trained parameters, or is a tree that contains
        modules of flax.nnx but is not a module itself.
    """
    if not is_module(model) and any(
        map(is_module, jax.tree.leaves(model, is_leaf=is_module))
    ):
        raise ValueError(
            "the model must be one flax.nnx module, or a pytree without modules; got "
            f"a {type(model)} that contains modules. Combine several modules in an "
            "nnx.Dict or nnx.List."
        )
    parts = _split_module(model) if is_module(model) else _split_tree(model)
    if not jax.tree.leaves(parts.trained):
        raise ValueError(
            "the model must contain floating-point arrays to train; got "
            f"{jax.tree.structure(model)}."
        )
    return parts


def split_argument(x: Any) -> Parts:
    """Split an argument of the loss that is not the model.

    The argument x is a flax.nnx object or a leaf of a tree. The loss is not
    differentiated by x, even if x contains `nnx.Param`s. If x holds random keys, each
    example gets its own keys. Otherwise, all examples get the whole of x.
    """
    if is_nnx(x):
        parts = _split_module(x)
        return dataclasses.replace(
            parts, merge=lambda _, keys: parts.merge(parts.trained, keys)
        )
    if is_key(x):
        return Parts(
            lambda _, keys: keys,
            of_examples=lambda numbers: keys_of_examples(x, numbers),
        )
    return Parts(lambda _, keys: x)


def is_module(x: Any) -> bool:
    """Whether x is a module of flax.nnx."""
    # If flax was never imported, x cannot be a module, and flax need not be installed.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def is_nnx(x: Any) -> bool:
    """Whether x is a flax.nnx object: a module, or a holder of keys like `nnx.Rngs`."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def is_trained(leaf: Any) -> bool:
    """Whether a leaf of a model is trained, which holds for arrays of floats."""
    array = isinstance(leaf, jax.Array | np.ndarray)
    return array and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    array = isinstance(leaf, jax.Array)
    return array and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def keys_of_examples(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Fold each example's number into the keys, so that each example has its own keys.

    Args:
      keys: typed keys of any shape.
      numbers: a distinct number for each example, i[m].

    Returns:
      Typed keys with a leading axis m before the axes of keys.
    """
    # fold_in has one key and one number as arguments. So fold_in is mapped over each
    # axis of the keys, and then over the examples.
    fold = jax.random.fold_in
    for axis in range(keys.ndim):
        fold = jax.vmap(fold, (axis, None), axis)
    return jax.vmap(fold, (None, 0))(keys, numbers)


def _split_tree(model: Any) -> Parts:
    paths, treedef = jax.tree.flatten_with_path(model)
    leaves = [x for _, x in paths]
    trained = [x if is_trained(x) else None for x in leaves]
    names = [jax.tree_util.keystr(path) for path, x in paths if is_trained(x)]

    def merge(trained: Any, keys: Any) -> Any:
        del keys
        # None marks the leaves that are not trained.
        all_leaves = [
            x if new is None else new for x, new in zip(leaves, trained, strict=True)
        ]
        return treedef.unflatten(all_leaves)

    return Parts(merge, trained, names, like_model=treedef.unflatten)


def _split_module(model: Any) -> Parts:
    nnx: Any = sys.modules["flax.nnx"]
    graph, trained, keys, counters, other_state = nnx.split(
        model, nnx.Param, nnx.RngKey, nnx.RngCount, ...
    )

    def of_examples(numbers: jax.Array) -> Any:
        return jax.tree.map(lambda key: keys_of_examples(key, numbers), keys)

    def merge(trained: Any, keys: Any) -> Any:
        # A copy, so that the loss cannot change the caller's model.
        return nnx.merge(graph, trained, keys, counters, other_state, copy=True)

    def check_unchanged(merged: Any) -> None:
        after = nnx.split(merged, nnx.Param, nnx.RngKey, nnx.RngCount, ...)[-1]
        # If the loss does not change a leaf, the leaf is the same array object.
        before = dict(jax.tree.leaves_with_path(other_state))
        changed = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree.leaves_with_path(after)
            if before.get(path) is not x
        ]
        if changed:
            raise ValueError(
                "the loss must not change the model's state, but the loss changes "
                f"{changed}. One example could then affect the gradients of others, "
                "as with BatchNorm in training mode. Use GroupNorm or LayerNorm, or "
                "BatchNorm with use_running_average."
            )

    def advance() -> None:
        # Without this step, dropout would draw the same masks in the next step.
        if jax.tree.leaves(counters):
            nnx.update(model, jax.tree.map(lambda count: count + 1, counters))

    names = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(trained)]
    return Parts(merge, trained, names, of_examples, check_unchanged, advance)
