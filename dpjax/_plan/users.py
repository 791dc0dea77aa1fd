"""Examples grouped by user, for user-level privacy.

A user's gradient is the gradient of the mean loss over the user's retained examples.
This gradient is clipped as a whole, so that all examples of one user together move a
sum by at most the clip norm. The sampler draws users, not examples.

The functions of this module index data by position. But a `pandas.Series` is indexed by
labels. In a shuffled table, label i is not in row i. So arrays of libraries other than
NumPy and JAX are first converted to NumPy arrays.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree
from dpjax._plan.modules import keys_of_examples
from dpjax.clipping._metrics import masked_mean


def is_tree_of_arrays(data: Any) -> bool:
    """Whether data is a tree of one or more leaves, all arrays with a leading axis.

    The result is False for an iterator, and for a list, since a list as data is a list
    of examples. A list inside the tree is allowed.
    """
    if isinstance(data, list | Iterator):
        return False
    leaves = jax.tree.leaves(data)
    arrays = (hasattr(x, "dtype") or hasattr(x, "__array__") for x in leaves)
    return bool(leaves) and all(arrays) and all(map(np.ndim, leaves))


def by_position(data: Any) -> Any:
    """Convert the leaves of a tree of arrays to NumPy or JAX arrays.

    Raises:
      ValueError: an array of a library other than NumPy and JAX has entries that are
        neither numbers nor booleans; a NumPy array has masked entries.
    """
    leaves, treedef = jax.tree.flatten_with_path(data)
    return treedef.unflatten([_convert_array(path, x) for path, x in leaves])


def _convert_array(path: Any, x: Any) -> np.ndarray | jax.Array:
    name = jax.tree_util.keystr(path) or "data"
    if np.ma.is_masked(x):
        raise ValueError(
            "arrays must not have masked entries, because the masked values would be "
            f"used; got {name}."
        )
    if isinstance(x, np.ndarray | jax.Array):
        return x
    array = np.asarray(x)
    # jnp.issubdtype also accepts bfloat16. In NumPy, time spans (kind "m") are numbers.
    numbers = jnp.issubdtype(array.dtype, np.number) and array.dtype.kind != "m"
    if not (numbers or array.dtype == np.bool_):
        raise ValueError(
            "arrays of other libraries than NumPy and JAX must hold numbers or "
            f"booleans; got {name}, a {type(x).__module__}.{type(x).__name__} that "
            f"becomes an array of dtype {array.dtype}. Convert it to a NumPy array "
            "first."
        )
    return array


class OfUser(NamedTuple):
    """The examples of one user, padded to a constant number k of examples.

    For several users, all arrays have one more leading axis.

    Attributes:
      examples: a tree of arrays with a leading axis k. Padding repeats an example of
        the user.
      mask: bool[k], False for padding.
    """

    examples: Tree
    mask: ArrayLike


class Users:
    """A data set of users, made by `by_user`.

    `len(data)` is the number of users, and `data[i]` has the examples of user i.
    """

    def __init__(self, data: Tree, rows: np.ndarray, mask: np.ndarray) -> None:
        """Store the examples, and the positions of each user's examples.

        Args:
          data: a tree of arrays, whose leading axis is over all examples.
          rows: the positions of each user's examples in this axis, i[n, k], for n users
            with k examples each. Padding repeats one of the user's positions.
          mask: bool[n, k], False for padding.
        """
        self._data, self._rows, self._mask = data, rows, mask

    def __len__(self) -> int:
        """The number of users."""
        return len(self._rows)

    def __getitem__(self, user: int) -> OfUser:
        """The examples of one user, by the user's index from 0 to `len` − 1."""
        rows = self._rows[user]
        return OfUser(jax.tree.map(lambda x: x[rows], self._data), self._mask[user])

    def stacked(self) -> OfUser:
        """The examples of all n users, with a leading axis n, for `Plan.load`."""
        examples = jax.tree.map(lambda x: x[self._rows], self._data)
        return OfUser(examples, jnp.asarray(self._mask))

    def __repr__(self) -> str:
        """The number of users, and the maximum number of examples of one user."""
        max_count = self._rows.shape[1]
        return f"Users({len(self)} users, at most {max_count} examples of each)"


def by_user(data: Tree, users: ArrayLike, *, max_examples: int) -> Users:
    """Group examples by user, and retain a bounded number of examples of each user.

    Args:
      data: a tree of arrays with a leading axis n. Arrays of libraries other than NumPy
        and JAX are read into memory once, by position: the labels of a `pandas.Series`
        are ignored.
      users: the user of each example, [n], as numbers, strings or hashable objects. All
        NaNs in an array of floats are one user.
      max_examples: the maximum number of examples retained of a user, at least 1. The
        first examples of a user in the data's order are retained. To retain other
        examples, shuffle the data and users before the call.

    Returns:
      `Users`, a data set for a plan with `unit="user"`. The plan's num_examples must be
      `len` of the data set.

    Raises:
      ValueError: data is not a tree of arrays; users and data differ in length, or have
        no examples; an object in users is or contains NaN; an array has masked entries;
        an array of another library than NumPy and JAX, in data, holds neither numbers
        nor booleans; max_examples is not an integer of at least 1.

    Privacy: the choice of a user's retained examples depends on the examples of this
    user alone. The guarantee assumes that the number of users is public. The data set
    has the users in the order of first appearance if the users are tuples or entries of
    a structured array, or if `numpy.asarray(users)` has dtype object, as for strings in
    a pandas column. Otherwise, the data set has the users in sorted order. A plan with
    sampling="fixed", or with correlated noise and sampling="cyclic_poisson", uses the
    positions of the users in the data set. The guarantee of this plan assumes that
    replacing one user leaves the positions of all other users unchanged.

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
    limit = validate.static_int("max_examples", max_examples, minimum=1)
    if not is_tree_of_arrays(data):
        raise ValueError(f"data must be a pytree of arrays; got {type(data)}.")
    data, owner = by_position(data), _convert_users(users)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if owner.ndim != 1 or owner.size == 0 or sizes != {owner.shape}:
        raise ValueError(
            "users must have shape [n], with one owner for each of the n >= 1 "
            f"examples of data; got shape {owner.shape} for data with leading axes "
            f"{sorted(sizes)}."
        )
    user_numbers = _number_users(owner)
    # A stable sort keeps each user's examples in the data's order.
    order = np.argsort(user_numbers, kind="stable")
    counts = np.bincount(user_numbers)
    starts = np.cumsum(counts) - counts
    positions = np.arange(min(limit, int(counts.max())))
    mask = positions < counts[:, None]
    # Padding repeats the user's first example.
    return Users(data, order[starts[:, None] + np.where(mask, positions, 0)], mask)


def _convert_users(users: Any) -> np.ndarray:
    """Convert the argument `users` of `by_user` to an array [n].

    If `users` is a list of tuples or a structured array, the result is an array of
    tuples, with dtype object.

    Raises:
      ValueError: users has masked entries.
    """
    if np.ma.is_masked(users):
        raise ValueError(
            "users must not have masked entries. Replace missing owners by a name."
        )
    owner = np.asarray(users)
    if owner.dtype.names is not None or (owner.ndim > 1 and isinstance(users, list)):
        names = owner.tolist() if owner.dtype.names is not None else users
        # The array is filled item by item, since np.asarray makes a matrix of tuples.
        owner = np.empty(len(names), object)
        owner[:] = names
    return owner


def _number_users(owner: np.ndarray) -> np.ndarray:
    """Number the distinct users from 0, and return the number of each example's user.

    Args:
      owner: the user of each example, [n].

    Returns:
      The numbers, i[n].

    Raises:
      ValueError: an object in owner is NaN, or contains NaN.
    """
    if owner.dtype != object:
        if jnp.issubdtype(owner.dtype, np.floating):
            owner = owner.astype(np.float64)  # np.unique joins no NaNs of bfloat16
        return np.unique(owner, return_inverse=True)[1]
    # Objects may have no total order. np.unique sorts them, and could then give one
    # user several numbers.
    if any(map(validate.is_missing, owner.tolist())):
        raise ValueError(
            "users must not contain a value that differs from itself, such as NaN in "
            "a tuple or an object array, because each such value would count as a "
            "separate user. Replace missing owners by a name."
        )
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(x, len(numbers)) for x in owner.tolist()])


def user_loss(
    loss: Callable[[Any, Any], tuple[jax.Array, Any]], user: OfUser, keys: Any
) -> tuple[jax.Array, Any]:
    """Compute the mean loss over a user's valid examples.

    Args:
      loss: a function from one example and its random keys to the example's loss and
        auxiliary output.
      user: the user's examples, with a leading axis k.
      keys: the user's random keys, from which each example gets its own keys.

    Returns:
      The mean loss, and the auxiliary outputs with a leading axis k.
    """
    mask = jnp.asarray(user.mask)
    numbers = jnp.arange(mask.size)
    # The k examples of a user must not share one dropout mask.
    keys = jax.tree.map(lambda key: keys_of_examples(key, numbers), keys)
    losses, aux = jax.vmap(loss)(user.examples, keys)
    return masked_mean(losses, mask), aux
