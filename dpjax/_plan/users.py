"""Examples by the person they belong to, where a person is the unit of privacy.

A user's gradient is that of the mean loss over the examples which are kept of that
user. It is clipped as one, so that all of a user's examples together move a sum by no
more than the clip norm; and users are drawn, not examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree
from dpjax._plan.arrays import by_position, is_tree_of_arrays
from dpjax._plan.modules import keys_of_examples
from dpjax.clipping._metrics import masked_mean


class OfUser(NamedTuple):
    """One user's examples, or those of many users with one leading axis more.

    Attributes:
      examples: a tree of arrays with a leading axis k. An empty place holds another of
        the user's examples, for the shape alone.
      mask: bool[k], False where a place is empty.
    """

    examples: Tree
    mask: ArrayLike


class Users:
    """A data set of users, as `by_user` makes it: `len`, indexing, and `stacked`."""

    def __init__(self, data: Tree, rows: np.ndarray, mask: np.ndarray) -> None:
        """Rows i[n, k] of the data for each user, and which of them are there."""
        self._data, self._rows, self._mask = data, rows, mask

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._rows)

    def __getitem__(self, user: int) -> OfUser:
        """One user's examples."""
        rows = self._rows[user]
        return OfUser(jax.tree.map(lambda x: x[rows], self._data), self._mask[user])

    def stacked(self) -> OfUser:
        """All of them in memory: what `Plan.load` takes, under jit too."""
        return OfUser(
            jax.tree.map(lambda x: x[self._rows], self._data), jnp.asarray(self._mask)
        )

    def __repr__(self) -> str:
        """The sizes."""
        most = self._rows.shape[1]
        return f"Users({len(self)} users, at most {most} examples of each)"


def by_user(data: Tree, users: ArrayLike, *, max_examples: int) -> Users:
    """Group examples by user, and keep a bounded number of each.

    Args:
      data: a tree of arrays with a leading axis n. Arrays of other libraries than NumPy
        and JAX are read into memory once, by position: a label in a `pandas.Series`
        means nothing here.
      users: whose example it is, [n]: numbers, strings or hashable objects.
      max_examples: how many examples are kept of a user, at least 1: the first ones in
        the data's order. Shuffle the data before for others.

    Returns:
      `Users`, a data set for a plan with `unit="user"` and num_examples = `len` of it.

    Raises:
      ValueError: users has another length than the data, or is of objects among which
        is NaN; max_examples is below 1.

    Privacy: which examples are kept of a user depends on that user's alone. How many
    users there are is taken to be public. They are numbered in the order of their
    names, objects as they first appear; sampling="fixed" takes them in this order, so
    that there a user who is replaced must leave the others their numbers.

    Example:
      >>> import numpy as np
      >>> users = by_user(np.arange(5.0), ["eva", "jo", "eva", "eva", "kim"],
      ...                 max_examples=2)
      >>> users
      Users(3 users, at most 2 examples of each)
      >>> users[0]
      OfUser(examples=array([0., 2.]), mask=array([ True,  True]))
      >>> users[1]
      OfUser(examples=array([1., 1.]), mask=array([ True, False]))
    """
    most = validate.static_int("max_examples", max_examples, minimum=1)
    if not is_tree_of_arrays(data):
        raise ValueError(f"data must be a tree of arrays; got {type(data)}.")
    data, owner = by_position(data), _owners(users)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if owner.ndim != 1 or owner.size == 0 or sizes != {owner.shape}:
        raise ValueError(
            "users must name the owner of each example, [n] for data with leading axes "
            f"n >= 1; got shape {owner.shape} for data of {sorted(sizes)}."
        )
    number = _numbers(owner)
    order = np.argsort(number, kind="stable")
    counts = np.bincount(number)
    starts = np.cumsum(counts) - counts
    places = np.arange(min(most, int(counts.max())))
    mask = places < counts[:, None]
    rows = order[starts[:, None] + np.where(mask, places, 0)]
    return Users(data, rows, mask)


def _owners(users: Any) -> np.ndarray:
    """The owner of each example, [n]; tuples and records are objects."""
    if np.ma.is_masked(users):
        raise ValueError("users must not be masked. Give missing owners a name.")
    owner = np.asarray(users)
    if owner.dtype.names is not None or (owner.ndim > 1 and isinstance(users, list)):
        names = owner.tolist() if owner.dtype.names is not None else users
        owner = np.empty(len(names), object)
        owner[:] = names
    return owner


def _numbers(owner: np.ndarray) -> np.ndarray:
    """A number for each user, i[n]."""
    if owner.dtype != object:
        return np.unique(owner, return_inverse=True)[1]
    # Sorting objects that have no order would take one user for several.
    if any(map(_is_missing, owner.tolist())):
        raise ValueError(
            "users must be equal to themselves: among objects, also within tuples, NaN "
            "is a user of its own each time. Give missing owners a name."
        )
    found: dict[object, int] = {}
    return np.array([found.setdefault(x, len(found)) for x in owner.tolist()])


def _is_missing(owner: Any) -> bool:
    """Whether an owner is, or holds, what is not equal to itself, as NaN is not."""
    if isinstance(owner, tuple | frozenset):
        return any(map(_is_missing, owner))
    if dataclasses.is_dataclass(owner):
        fields = dataclasses.fields(owner)
        return any(_is_missing(getattr(owner, field.name)) for field in fields)
    try:
        return bool(owner != owner)
    except TypeError:  # as of pandas.NA
        return True


def user_loss(
    of_one: Callable[[Any, Any], tuple[jax.Array, Any]], user: OfUser, own: Any
) -> tuple[jax.Array, Any]:
    """A user's mean loss, and aux with a leading axis k."""
    mask = jnp.asarray(user.mask)
    numbers = jnp.arange(mask.size)
    # Each example has random keys of its own.
    keys = jax.tree.map(lambda key: keys_of_examples(key, numbers), own)
    losses, aux = jax.vmap(of_one)(user.examples, keys)
    return masked_mean(losses, mask), aux
