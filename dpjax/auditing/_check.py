"""A grey-box check: how far does one example move what a user's own function returns?

Noise is no matter here: the function is deterministic, or has its key inside, so that
the same noise is in both results and goes away in their difference. What is left is the
sensitivity, which is measured on neighbouring batches: with an example and without it,
or with another in its place, ordinary and extreme ones, among others and alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike, Tree

_BATCHES = 3
_MOST = 12  # of the batch's examples, spread over it, are tried
# What an example is replaced by: its floats times these.
_FACTORS = {"huge": 1e6, "huge, negated": -1e6, "zero": 0.0, "not finite": np.nan}


class Finding(NamedTuple):
    """How far one kind of change moves the result, at worst.

    Attributes:
      change: what was changed.
      distance: the L2 distance between the results.
      allowed: how far it may be, rounding included.
      example: of which of the batch's examples.
    """

    change: str
    distance: float
    allowed: float
    example: int


class Report(NamedTuple):
    """What `check` found; it prints as a table.

    Attributes:
      findings: of each kind of change the worst one.
    """

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Finding:
        """The finding that goes farthest beyond what is allowed."""
        return max(self.findings, key=lambda x: x.distance / max(x.allowed, 1e-300))

    @property
    def passed(self) -> bool:
        """Whether no change moved the result farther than allowed."""
        return self.worst.distance <= self.worst.allowed

    def __repr__(self) -> str:
        """A line for each kind of change."""
        width = max(len(x.change) for x in self.findings)
        return "\n".join(
            f"{x.change:{width}}  moves by {x.distance:.6g}, allowed {x.allowed:.6g}"
            f"{'' if x.distance <= x.allowed else f'  <- example {x.example}'}"
            for x in self.findings
        )

    __str__ = __repr__


def check(
    fn: Callable[[Any, jax.Array], Tree],
    data: Any,
    *,
    sensitivity: ArrayLike,
    adjacency: Adjacency,
) -> Report:
    """Measure how far one example moves a function's result, against what is claimed.

    Args:
      fn: from a batch and a mask bool[b] of what is there to a tree of arrays: a
        clipped sum, or a whole step. Two calls with the same arguments must agree, so
        that a key is fixed inside. Jit it, since it is called some hundred times.
      data: a batch, a tree of arrays with a leading axis b, at least 2.
      sensitivity: the claim: the L2 distance that one example moves the result by.
      adjacency: what the claim compares. Under REPLACE the result with one example is
        compared to that with another one, else to that without it.

    Returns:
      A `Report`: `assert report.passed, report` is a test. Changes are: an example left
      out, or another or an extreme one in its place, in the whole batch, in halves of
      it and alone; what stands in masked places, which must not matter, nor must more
      of them; and the order of the batch, which must not either.

    Raises:
      ValueError: sensitivity is not positive, or the batch has fewer than 2 examples.

    Privacy: it measures some neighbours, and so bounds the sensitivity from below: what
    passes is not thereby private. It knows nothing of noise. A sum of b terms may be
    rounded, and by how much is added to what is allowed.

    Reference: the idea of running on neighbours under the same randomness is that of
    "Re:cord-play", https://arxiv.org/abs/2602.17454.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> def loss(w, x):
      ...     return jnp.sum((w - x) ** 2)
      >>> sums = jax.jit(dpjax.clipped_grad(loss, 0.5))
      >>> x = jax.random.normal(jax.random.key(0), (8, 3))
      >>> def fn(data, mask):
      ...     return sums(jnp.zeros(3), data, mask=mask)[0]
      >>> claim = {"sensitivity": 0.5, "adjacency": dpjax.Adjacency.ZERO_OUT}
      >>> check(fn, x, **claim).passed
      True
      >>> def mean(data, mask):  # of those there: without one, others weigh more
      ...     return 8 * fn(data, mask) / jnp.maximum(mask.sum(), 1)
      >>> check(mean, x, **claim).passed
      False
    """
    validate.positive_float("sensitivity", sensitivity)
    adjacency = validate.adjacency(adjacency)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if len(sizes) != 1 or not next(iter(sizes)) or next(iter(sizes))[0] < 2:
        raise ValueError(
            "data must have one leading axis of 2 examples at least; got "
            f"{sorted(sizes)}."
        )
    data = jax.tree.map(jnp.asarray, data)
    claimed = float(np.asarray(sensitivity))
    worst: dict[str, Finding] = {}
    for finding in _findings(fn, data, claimed, adjacency):
        known = worst.get(finding.change)
        if known is None or finding.distance > known.distance:
            worst[finding.change] = finding
    return Report(tuple(worst.values()))


def _findings(
    fn: Callable[[Any, jax.Array], Tree],
    data: Any,
    claimed: float,
    adjacency: Adjacency,
) -> Iterator[Finding]:
    """Every neighbour's finding."""
    size = len(jax.tree.leaves(data)[0])
    tried = np.unique(np.linspace(0, size - 1, min(size, _MOST)).astype(int))
    rng = np.random.default_rng(0)

    def finding(change: str, one: Tree, other: Tree, claim: float, i: int) -> Finding:
        # A sum of b terms, each of which may be rounded by an ulp of what is added up.
        length = min(_norm(one), _norm(other))
        length = length if np.isfinite(length) else 0.0
        rounding = 4 * size * _epsilon(one) * (claimed + length)
        return Finding(change, _norm(_minus(one, other)), claim + rounding, int(i))

    halves = {f"half {k}": rng.random(size) < 0.5 for k in range(1, _BATCHES)}
    for i in tried:
        alone = np.arange(size) == i
        for name, others in {"all": alone | True, **halves, "alone": alone}.items():
            there = jnp.asarray(others | alone)
            whole = fn(data, there)
            less = fn(data, there & ~alone)
            yield finding(f"{name}: left out", whole, less, claimed, i)
            for what, changed in _change_one_example(data, i):
                now = fn(changed, there)
                before = whole if adjacency is Adjacency.REPLACE else less
                yield finding(f"{name}: {what}", now, before, claimed, i)
                masked = fn(changed, there & ~alone)
                yield finding("masked: its values", masked, less, 0.0, i)
    whole = fn(data, jnp.ones(size, bool))
    order = rng.permutation(size)
    moved = fn(jax.tree.map(lambda x: x[order], data), jnp.ones(size, bool))
    yield finding("the order", moved, whole, 0.0, 0)
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), data)
    padded = fn(longer, jnp.arange(size + 2) < size)
    yield finding("masked: two more places", padded, whole, 0.0, size)


def _change_one_example(data: Any, i: int) -> Iterator[tuple[str, Any]]:
    """Batches with something else in place i."""
    leaves, treedef = jax.tree.flatten(data)
    size, floats = (
        len(leaves[0]),
        [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves],
    )
    yield "another", treedef.unflatten([x.at[i].set(x[(i + 1) % size]) for x in leaves])
    for name, factor in _FACTORS.items() if any(floats) else ():
        yield (
            name,
            treedef.unflatten(
                x.at[i].multiply(jnp.asarray(factor, x.dtype)) if is_float else x
                for x, is_float in zip(leaves, floats, strict=True)
            ),
        )


def _minus(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), one, other
    )


def _norm(tree: Tree) -> float:
    """The L2 norm of all leaves, infinite where something is not finite."""
    squares = sum(
        float(np.sum(np.square(np.asarray(x, np.float64))))
        for x in jax.tree.leaves(tree)
    )
    return float(np.sqrt(squares)) if np.isfinite(squares) else float("inf")


def _epsilon(tree: Tree) -> float:
    """The coarsest rounding of all leaves."""
    floats = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    found = [float(jnp.finfo(x).eps) for x in floats if jnp.issubdtype(x, jnp.floating)]
    return max(found, default=0.0)
