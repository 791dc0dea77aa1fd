"""Convert records to plain values that JSON can represent, and read them back.

A record is a frozen dataclass or a `NamedTuple` whose fields are numbers, strings,
members of an enum, None, other records, or tuples or dictionaries of such values. The
annotations of a record's fields determine the plain values from which the record can be
read. All code of dpjax that writes or reads records as JSON uses this module.
"""

import dataclasses
import enum
import functools
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dpjax._core import validate

# For each type, the types of its values in JSON, which may write 1.0 as 1.
_PLAIN = {float: (float, int), int: (int,), str: (str,), bool: (bool,)}


@functools.cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """The types of the fields of a dataclass or named tuple, by the fields' names.

    The result is None for any other type.
    """
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return get_type_hints(kind) if hasattr(kind, "_fields") else None


def to_plain(value: Any, name: str = "value") -> Any:
    """A value as plain dictionaries, lists, strings, numbers and None.

    A record becomes a dictionary, with the name of its class under "type". Plus
    infinity becomes the string "inf", since JSON has no literal for it. Minus infinity
    and NaN remain floats. A member of an enum becomes its name.

    Args:
      value: None, a bool, a string, a concrete number, a member of an enum, a record,
        or a dictionary, list or tuple of such values.
      name: the name of the value in error messages.

    Raises:
      ValueError: a number is traced, or an array does not contain exactly one number.
    """
    fields = _fields(type(value))
    if fields is not None:
        plain = {field: to_plain(getattr(value, field), field) for field in fields}
        return {"type": type(value).__name__} | plain
    if isinstance(value, dict):
        return {key: to_plain(x, key) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(x, name) for x in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | str):
        return value
    number = validate.concrete(value)
    if number is None or number.size != 1:
        raise ValueError(f"{name} must be one concrete number; got {value!r}.")
    number = number.item()
    return "inf" if number == math.inf else number


def from_plain(kind: Any, value: Any, name: str) -> Any:
    """Read a value of a given type from plain dictionaries, lists, strings and numbers.

    This function is the inverse of `to_plain` for values of the given type.

    Args:
      kind: the type, such as a record's class, `int`, a tuple whose entries have one
        type, or a union of types. A union that contains `float` is read as a number, or
        as None if the union contains None.
      value: a result of `to_plain`, or a copy of such a result read from JSON.
      name: the name of the value in error messages.

    Raises:
      ValueError: the plain value does not describe a value of this type.
    """
    kind = getattr(kind, "__value__", kind)  # the type for which a named alias stands
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None and types.NoneType in kinds:
        return None
    # Of all types of numbers and arrays that a field may hold, JSON has only floats.
    kinds = (float,) if float in kinds else kinds
    for one in kinds:
        of, parts, fields = get_origin(one), get_args(one), _fields(one)
        if fields is not None and isinstance(value, dict):
            if value.keys() == {"type", *fields} and value["type"] == one.__name__:
                return one(**{x: from_plain(fields[x], value[x], x) for x in fields})
        elif of is tuple and isinstance(value, list):
            return tuple(from_plain(parts[0], x, name) for x in value)
        elif of is dict and isinstance(value, dict):
            return {key: from_plain(parts[1], x, key) for key, x in value.items()}
        elif isinstance(one, enum.EnumMeta) and isinstance(value, str):
            if value in one.__members__:
                return one[value]
        elif one is float and value == "inf":
            return math.inf
        elif value in parts if of is Literal else type(value) in _PLAIN.get(one, ()):
            return value
    expected = " or ".join(getattr(x, "__name__", str(x)) for x in kinds)
    raise ValueError(f"{name} must be of type {expected}; got {value!r}.")
