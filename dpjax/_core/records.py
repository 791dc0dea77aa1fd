"""Frozen dataclasses as pytrees, where different classes have different structures."""

import dataclasses
from typing import Any, TypeVar

import jax

T = TypeVar("T")

# The metadata of a field that is not a number and is part of the pytree's structure.
STATIC = {"static": True}


def register_record(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree of the fields that are not static.

    `jax.tree_util.register_dataclass` is not used: the structures of two classes that
    it registered are equal if their static fields are equal (JAX 0.10 to 0.12), so that
    a compiled function would confuse two mechanisms. Here the class is part of the
    structure.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore
    static = [x.name for x in fields if x.metadata.get("static")]
    names = [x.name for x in fields if x.name not in static]

    def flatten(event: T) -> tuple[list[Any], Any]:
        children = [(jax.tree_util.GetAttrKey(x), getattr(event, x)) for x in names]
        return children, (cls, tuple(getattr(event, x) for x in static))

    def unflatten(structure: Any, children: Any) -> T:
        # JAX unflattens placeholders, too, which the checks of __init__ would refuse. A
        # frozen dataclass allows no assignment but by object.__setattr__.
        event = object.__new__(cls)
        for name, value in zip(names + static, (*children, *structure[1]), strict=True):
            object.__setattr__(event, name, value)
        return event

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
