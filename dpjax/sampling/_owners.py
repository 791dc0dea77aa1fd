"""Select examples such that each owner has at most a given number of them.

An owner is a person or another unit whose examples are protected together.
"""

from collections.abc import Collection, Hashable, Sequence

import jax
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import Key
from dpjax.sampling import _order

_permutation = jax.jit(_order.permutation, static_argnums=1)


def bound_contributions_of_fixed_graph(
    owners: Sequence[Collection[Hashable]] | np.ndarray,
    max_contributions: int,
    *,
    key: Key,
) -> np.ndarray:
    """Select examples such that each owner has at most max_contributions of them.

    The examples are considered in a uniformly random order. An example is selected if
    each of its owners has fewer than max_contributions selected examples so far. So
    every example that is not selected has an owner with max_contributions selected
    examples.

    Args:
      owners: the owners of each example, at least one: n sequences of numbers, strings
        or other hashable names, or an array [n, w]. If an example names an owner twice,
        the owner counts once.
      max_contributions: k, the maximum number of selected examples of one owner, at
        least 1.
      key: a typed JAX key. The order depends only on the key and on n.

    Returns:
      The indices of the selected examples in increasing order, i[m].

    Raises:
      ValueError: the owners of an example are a string or not a collection; an example
        has no owner, or an owner that is not equal to itself, such as NaN; owners has
        masked entries; max_contributions is not an integer of at least 1; key is not
        one typed key.

    Privacy: the guarantee assumes that the owners of each example are public and fixed.
    Neighbouring data sets have the same examples with the same owners, and differ in
    the contents of all examples of one owner: under ZERO_OUT these examples contribute
    zero in one of the data sets, and under REPLACE they have other contents. The
    selection depends only on the owners, on k and on the key. So the selection is the
    same for both data sets, and at most k of the selected examples differ. The sums of
    clipped gradients then differ by at most k clip norms (2k under REPLACE), and an
    accountant's result for one example becomes that of a group of k examples
    (`accounting.group`). The guarantee hides neither whether an owner is present, nor
    which owners share an example. If an owner is removed with all of its examples, the
    selection among other owners' examples may change, and the two selections may differ
    in any number of examples.

    Reference: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622, for fixed-graph
    differential privacy and the greedy selection.

    Example:
      >>> owners = [["eva"], ["eva", "jo"], ["jo"], ["eva", "kim"]]
      >>> bound_contributions_of_fixed_graph(owners, 1, key=jax.random.key(3))
      array([2, 3])
    """
    validate.typed_key("key", key)
    most = validate.static_int("max_contributions", max_contributions, minimum=1)
    if np.ma.is_masked(owners):
        raise ValueError(
            "owners must have no masked entries: their values would be used."
        )
    given = np.asarray(owners).tolist() if hasattr(owners, "__array__") else owners
    # A row names an owner only once, so that a repeated name counts only once.
    rows = [set(_check_row(row)) for row in given]
    if not all(rows):
        empty = next(i for i, row in enumerate(rows) if not row)
        raise ValueError(
            "owners must have at least one owner for each example; got none for "
            f"example {empty}. The guarantee would protect no owner of this example."
        )
    order = _permutation(keys.stream(key, "bound_contributions"), len(rows))
    left = dict.fromkeys(set().union(*rows), most)
    selected = np.zeros(len(rows), bool)
    for i in np.asarray(order).tolist():
        if all(left[owner] for owner in rows[i]):
            selected[i] = True
            for owner in rows[i]:
                left[owner] -= 1
    return np.flatnonzero(selected)


def _check_row(row: Collection[Hashable]) -> Collection[Hashable]:
    """Return the owners of one example, or raise ValueError if `row` is invalid."""
    # A string is refused, since each of its letters would count as an owner.
    if isinstance(row, str | bytes) or not hasattr(row, "__iter__"):
        raise ValueError(
            f"owners must be a sequence of owners for each example; got {row!r}."
        )
    if any(map(validate.is_missing, row)):
        raise ValueError(
            f"owners must not contain NaN or a value unequal to itself; got {row!r}."
        )
    return row
