"""Checks of arguments: a failed check raises ValueError with the argument's name.

The message also has the argument's value. A check of an array concerns every entry.
Unless a docstring says otherwise, a check of a number accepts every traced number,
whose value is not available. The docstring of the function that calls the check says
how this function treats an invalid traced number.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike, Key


def concrete(value: object) -> np.ndarray | None:
    """The value as a NumPy array; None if the value is traced."""
    if isinstance(value, Tracer):
        return None
    array = np.asarray(value)
    # For integers beyond 64 bits, NumPy has the dtype object. Accountants use floats.
    return array.astype(np.float64) if array.dtype == object else array


def concrete_numbers(name: str, value: object) -> None:
    """Raise if a number in the value, a pytree, is traced."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
        raise ValueError(
            f"{name} must be concrete numbers, not traced values; got {value!r}."
        )


def _check(
    name: str, value: object, rule: str, holds: Callable[[np.ndarray], ArrayLike]
) -> None:
    try:
        array = concrete(value)
        ok = array is None or np.all(holds(array))
    except (OverflowError, TypeError, ValueError):
        # The value is not a number, is beyond the range of floats, or is a ragged list.
        ok = False
    if not ok:
        raise ValueError(f"{name} must be {rule}; got {value!r}.")


def positive(name: str, value: object) -> None:
    """Raise unless value > 0 and value is finite."""
    _check(name, value, "positive and finite", lambda x: (x > 0) & np.isfinite(x))


def positive_float(name: str, value: object) -> float:
    """Return a concrete, positive and finite number as a Python float, or raise."""
    scalar(name, value)
    concrete_numbers(name, value)
    positive(name, value)
    return float(np.asarray(value))


def nonnegative(name: str, value: object, *, finite: bool = True) -> None:
    """Raise unless value >= 0 (and value is finite, unless `finite` is False)."""
    rule = "non-negative and finite" if finite else "non-negative"
    _check(name, value, rule, lambda x: (x >= 0) & (np.isfinite(x) | (not finite)))


def open_unit(name: str, value: object) -> None:
    """Raise unless 0 < value < 1."""
    _check(name, value, "strictly between 0 and 1", lambda x: (x > 0) & (x < 1))


def closed_unit(name: str, value: object) -> None:
    """Raise unless 0 <= value <= 1."""
    _check(name, value, "between 0 and 1", lambda x: (x >= 0) & (x <= 1))


def above_one(name: str, value: object) -> None:
    """Raise unless value > 1 and value is finite."""
    _check(name, value, "above 1 and finite", lambda x: (x > 1) & np.isfinite(x))


def whole_count(name: str, value: ArrayLike) -> ArrayLike:
    """The value, if it is a non-negative whole number; a traced value is rounded up.

    More steps cost more privacy. So the next whole number is on the safe side.
    Differentiation treats the rounding as the identity: the derivative of a function
    with respect to the original value is the function's derivative at the rounded
    number. A traced negative number stays negative; infinity and NaN give NaN.

    Raises:
      ValueError: a concrete value is negative, not whole or not finite.
    """
    _check(
        name,
        value,
        "a whole number, 0 or more",
        lambda x: (x >= 0) & (x == np.floor(x)) & np.isfinite(x),
    )
    if not isinstance(value, Tracer) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    # The rounding is in the caller's dtype, in which it is exact. A negative value is
    # not rounded: −0.5 must stay invalid, but would become 0.
    whole = jnp.where(value < 0, value, jnp.ceil(value))
    # The second term is zero (NaN for an infinite value), and its derivative is 1.
    return jax.lax.stop_gradient(whole) + (value - jax.lax.stop_gradient(value))


def step(value: object, num_steps: int) -> None:
    """Raise unless value is a step number, an integer from 0 to num_steps - 1."""
    _check(
        "step",
        value,
        f"an integer from 0 to {num_steps - 1}, since num_steps is {num_steps}",
        lambda x: x.dtype.kind in "iu" and x.ndim == 0 and 0 <= x < num_steps,
    )


def half_open_unit(name: str, value: object) -> None:
    """Raise unless 0 <= value < 1."""
    _check(name, value, "in [0, 1)", lambda x: (x >= 0) & (x < 1))


def scalar(name: str, value: object) -> None:
    """Raise unless value is one real number.

    For a schedule, the message says how to pass it with `optax.inject_hyperparams`.
    """
    if callable(value):
        raise ValueError(
            f"{name} must be a number, not a schedule; got {value!r}. To use a "
            "schedule, wrap the factory in optax.inject_hyperparams."
        )
    if (
        not isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
        or not jnp.issubdtype(jnp.result_type(value), jnp.number)
        or jnp.iscomplexobj(value)
        or jnp.ndim(value)
    ):
        raise ValueError(f"{name} must be one real number; got {value!r}.")


def is_missing(value: Any) -> bool:
    """Whether a value, or a part of the value, is missing, like NaN or pandas.NA.

    A number is missing if it differs from itself. The parts of a value are the entries
    of a tuple or frozenset, and the fields of a dataclass.
    """
    if isinstance(value, tuple | frozenset):
        return any(map(is_missing, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return any(is_missing(getattr(value, field.name)) for field in fields)
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA, for instance, has no truth value
        return True


def real_vector(name: str, value: object) -> np.ndarray | None:
    """Return a vector of real numbers in float64; None for a traced vector.

    Raises:
      ValueError: the value is not a vector of real numbers, or is a traced vector of
        integers.
    """
    if isinstance(value, Tracer):
        # A traced value has a shape and a dtype, which can be checked.
        if value.ndim != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{name} must be a vector of floats; got {value!r}.")
        return None
    try:
        array = concrete(value)
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be a vector of real numbers; got {value!r}.")
    return array.astype(np.float64)


def static_int(name: str, value: object, *, minimum: int) -> int:
    """Return an integer as an int; raise unless value is an integer >= minimum.

    A static integer determines shapes of the program. So the value cannot be a JAX
    array. True and False are not integers here.
    """
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be a static Python integer; got the array {value!r}. Under "
            f'optax.inject_hyperparams, list this argument in static_args=("{name}", '
            "...)."
        )
    # bool is a subclass of int, but True is not a count.
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer; got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value!r}.")
    return int(value)


def at_most(name: str, value: int, most: int, which: str = "") -> None:
    """Raise unless value <= most; the phrase `which` precedes `most` in the message."""
    if value > most:
        raise ValueError(f"{name} must be at most {which}{most}; got {value!r}.")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}; got {value!r}.")


def flag(name: str, value: object) -> bool:
    """Return the value as a bool; raise unless value is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def diameter(value: object) -> bool:
    """Raise unless value, a set's diameter, is > 0; return whether it can be finite.

    An infinite diameter means that the set is not bounded. A traced value can be
    finite.
    """
    rule = "positive, or inf if the set is not bounded"
    _check("diameter", value, rule, lambda x: x > 0)
    array = concrete(value)
    return array is None or not np.all(array == np.inf)


def adjacency(value: object) -> Adjacency:
    """Return the value, or raise if it is not an Adjacency."""
    if not isinstance(value, Adjacency):
        raise ValueError(f"adjacency must be a dpjax.Adjacency; got {value!r}.")
    return value


def adjacency_without_removal(value: object) -> None:
    """Raise unless value is `Adjacency.REPLACE`, as batches of fixed size require."""
    if adjacency(value) is not Adjacency.REPLACE:
        raise ValueError(
            f"adjacency must be REPLACE for batches of fixed size; got {value!r}."
        )


def typed_key(name: str, value: object) -> Key:
    """Return a scalar typed JAX key, or raise an error that says how to make one."""
    if (
        not isinstance(value, jax.Array)
        or not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        or value.shape != ()
    ):
        raise ValueError(
            f"{name} must be one typed JAX key, such as jax.random.key(seed); got "
            f"{value!r}."
        )
    return value
