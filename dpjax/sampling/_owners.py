"""A bound on the contributions of owners, for examples with several owners each."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _order


class Rows(Protocol):
    """Compressed sparse rows, such as a `scipy.sparse.csr_array`.

    Row i has the entries indices[indptr[i]] to indices[indptr[i + 1] − 1].
    """

    indices: Any
    indptr: Any


Owners = Sequence[Sequence[Hashable]] | ArrayLike | Rows


_permutation = jax.jit(_order.permutation, static_argnums=1)


def bound_contributions_of_fixed_graph(
    owners: Owners, max_contributions: int, *, key: Key
) -> np.ndarray:
    """Select examples such that no owner owns more than a given number of them.

    The examples are considered in a uniformly random order. An example is selected if
    each of its owners has fewer than max_contributions selected examples so far. No
    further example could be added to the selection.

    Args:
      owners: the owners of each example, at least one: n sequences of numbers, strings
        or other hashable names; an array [n], with one owner each, or [n, w]; or
        compressed sparse rows, of which every stored entry of a row is an owner. An
        owner that is named twice for one example counts once.
      max_contributions: k, the most selected examples of one owner, at least 1.
      key: a typed JAX key. The order depends on the key and on n alone.

    Returns:
      The indices of the selected examples in increasing order, i[m].

    Raises:
      ValueError: an example has no owner, or an owner that is not equal to itself, such
        as NaN; max_contributions is below 1.

    Privacy: the guarantee assumes that who owns which example is public and fixed.
    Neighbouring data sets have the same examples with the same owners, and differ in
    the contents of all examples of one owner (under ZERO_OUT these contribute nothing).
    Since the selection depends on the owners, on k and on the key alone, it is the same
    for both data sets, which then differ in at most k selected examples: a sum of
    clipped gradients moves by k clip norms, and an accountant's result for one example
    becomes that of a group of k examples (`accounting.group`). The guarantee does not
    hold for owners whose presence or whose examples' co-owners are private. If an owner
    is removed with all of its examples, the selection of others' examples changes, and
    the two selections may differ in any number of examples.

    Reference: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622, for fixed-graph
    differential privacy and the greedy selection.

    Example:
      >>> owners = [["eva"], ["eva", "jo"], ["jo"], ["eva", "kim"]]
      >>> bound_contributions_of_fixed_graph(owners, 1, key=jax.random.key(3))
      array([2, 3])
    """
    most = validate.static_int("max_contributions", max_contributions, minimum=1)
    numbers, ends = _rows(owners)
    n = len(ends) - 1
    # A row names an owner once, so that a repeated name counts as one contribution.
    rows = [set(numbers[a:b]) for a, b in itertools.pairwise(ends)]
    if not all(rows):
        empty = next(i for i, row in enumerate(rows) if not row)
        raise ValueError(
            "owners must have at least one owner for each example; got none for "
            f"example {empty}. An example that nobody owns is protected for nobody."
        )
    order = _permutation(keys.stream(key, "bound_contributions"), n)
    left = dict.fromkeys(numbers, most)
    selected = np.zeros(n, bool)
    for i in np.asarray(order).tolist():
        if all(left[owner] for owner in rows[i]):
            selected[i] = True
            for owner in rows[i]:
                left[owner] -= 1
    return np.flatnonzero(selected)


def _rows(owners: Any) -> tuple[list[Hashable], list[int]]:
    """All owners, one example after another, and where each example's owners begin."""
    if hasattr(owners, "indptr"):
        flat, ends = np.asarray(owners.indices), np.asarray(owners.indptr)
        valid = ends.ndim == 1 and ends.size and ends[0] == 0 and ends[-1] == flat.size
        if not valid or np.any(np.diff(ends) < 0):
            raise ValueError(
                "owners must have non-decreasing indptr from 0 to the number of "
                f"indices, {flat.size}; got {ends}."
            )
        names, ends = flat.tolist(), ends.tolist()
    elif isinstance(owners, np.ndarray | jax.Array):
        array = np.asarray(owners)
        if array.ndim not in (1, 2) or np.ma.is_masked(owners):
            raise ValueError(
                "owners must be an array [n] or [n, w] without masked entries; got "
                f"shape {array.shape}."
            )
        width = array.shape[1] if array.ndim == 2 else 1
        names, ends = array.ravel().tolist(), [i * width for i in range(len(array) + 1)]
    else:
        names, ends = [], [0]
        for row in owners:
            # The letters of a string would be taken for owners.
            if isinstance(row, str | bytes) or not hasattr(row, "__iter__"):
                raise ValueError(
                    "owners must be a sequence of owners for each example; got "
                    f"{row!r}. For one owner each, pass an array."
                )
            names += row
            ends.append(len(names))
    if any(name != name for name in names):
        raise ValueError("owners must be equal to themselves, and no owner NaN.")
    return names, ends
