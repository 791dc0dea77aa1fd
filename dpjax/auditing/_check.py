"""A test of a function's sensitivity: the distance by which one example moves a result.

Noise does not affect this test. The function must be deterministic: if the function
draws noise, it must use a fixed key. Two results then contain the same noise, which
cancels in the difference of the results. For neighbouring batches, the norm of the
difference is a lower bound on the sensitivity. To make neighbouring batches, the test
removes an example from a batch, or replaces the example by another example or by an
extreme example. The test makes each change in the whole batch, in parts of the batch,
and in a batch of the changed example alone.

The test also makes changes that must not move the result at all: other values at masked
positions, more masked positions, and another order of the batch.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike, Tree

# The number of larger batches: the whole batch and the random halves of it. The test
# also makes a batch of each example alone.
_BATCHES = 3
# The test changes at most this many examples, evenly spaced over the batch.
_MAX_CHANGED = 12
# An extreme example has the floats of the original example times one of these factors.
_FACTORS = {"huge": 1e6, "huge, negated": -1e6, "zero": 0.0, "not finite": np.nan}


class Finding(NamedTuple):
    """A change that `check` makes to a batch, and its effect on a function's result.

    Attributes:
      change: a description of the change.
      distance: the L2 distance between the two results that `check` compares for this
        change; inf if an entry of the difference is not finite.
      allowed: the maximum allowed distance, which includes a bound on rounding errors.
      example: the index in the batch of the changed example. For a change of the order
        or of the number of masked positions, this index has no meaning.
    """

    change: str
    distance: float
    allowed: float
    example: int


class Report(NamedTuple):
    """The result of `check`, which prints as a table.

    Attributes:
      findings: for each kind of change of the batch, the change of this kind with the
        largest ratio of its distance to its allowed distance.
    """

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Finding:
        """The finding with the largest ratio of distance to allowed distance."""
        # The allowed distance may be 0 for a change that must not move the result.
        return max(self.findings, key=lambda x: x.distance / max(x.allowed, 1e-300))

    @property
    def passed(self) -> bool:
        """Whether no finding's distance exceeds the finding's allowed distance."""
        return self.worst.distance <= self.worst.allowed

    def __repr__(self) -> str:
        """A table with a line for each kind of change."""
        width = max(len(x.change) for x in self.findings)
        return "\n".join(
            f"{x.change:{width}}  moves by {x.distance:.6g}, allowed {x.allowed:.6g}"
            f"{'' if x.distance <= x.allowed else f'  <- example {x.example}'}"
            for x in self.findings
        )


def check(
    fn: Callable[[Any, jax.Array], Tree],
    data: Any,
    *,
    sensitivity: ArrayLike,
    adjacency: Adjacency,
) -> Report:
    """Test a claimed sensitivity of a function, by changing examples of one batch.

    `check` compares the claim with the distance by which one example moves the result.

    Args:
      fn: a function from a batch and the mask bool[b] of its valid examples to a tree
        of arrays: a clipped sum, or the result of a whole training step. Two calls with
        equal arguments must give equal results: if the function draws noise, it must
        use a fixed key. Jit the function, since `check` calls it several hundred times.
      data: a batch, a tree of arrays with a leading axis b, at least 2.
      sensitivity: the claimed sensitivity, which is the maximum L2 distance by which
        one example moves the result.
      adjacency: the relation between the data sets that the claim compares. Under
        REPLACE, `check` compares the result for a changed example with the result for
        the original example. Under ADD_REMOVE and ZERO_OUT, `check` compares the result
        for a changed example with the result without the example. Under all three
        adjacencies, `check` also compares the results with and without the original
        example.

    Returns:
      A `Report`. In a test, write `assert report.passed, report`. `check` changes at
      most 12 examples of the batch, one at a time. `check` removes the example, or
      replaces it by another example of the batch or by an extreme example: the example
      with its floats multiplied by 10⁶, −10⁶, 0 or NaN. `check` makes each change in
      the whole batch, in random halves of the batch, and in a batch of the changed
      example alone. `check` also makes three kinds of changes that must not move the
      result: other values at masked positions, more masked positions, and another order
      of the batch.

    Raises:
      ValueError: sensitivity is not positive and finite, the batch has fewer than 2
        examples, or the leaves of data do not share a leading axis.

    Privacy: `check` compares some pairs of neighbouring batches, and therefore bounds
    the sensitivity from below. A passed check is no proof of privacy, and says nothing
    about noise. For neighbouring batches, the allowed distance is the claimed
    sensitivity plus a bound on the rounding errors of a sum of b terms. For changes
    that must not move the result, the allowed distance is the bound on rounding errors
    alone. Under REPLACE, the batches with and without an example are not neighbours,
    but `check` allows the same distance between the results for these batches. A
    clipped sum moves by no more than this distance. A mean over the valid examples may
    move farther.

    Reference: "Re:cord-play", https://arxiv.org/abs/2602.17454, compares runs on
    neighbouring data sets under the same randomness.

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
      >>> def mean(data, mask):  # the divisor depends on the data
      ...     return 8 * fn(data, mask) / jnp.maximum(mask.sum(), 1)
      >>> check(mean, x, **claim).passed
      False
    """
    claimed = validate.positive_float("sensitivity", sensitivity)
    adjacency = validate.adjacency(adjacency)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if len(sizes) != 1 or min(sizes) < (2,):  # a scalar has the shape ()
        raise ValueError(
            "data must have one leading axis with at least 2 examples, which all "
            f"leaves share; got lengths {sorted(sizes)}."
        )
    data = jax.tree.map(jnp.asarray, data)
    worst: dict[str, Finding] = {}
    for finding in _findings(fn, data, claimed, adjacency):
        previous = worst.get(finding.change, finding)
        worst[finding.change] = Report((previous, finding)).worst
    return Report(tuple(worst.values()))


def _findings(
    fn: Callable[[Any, jax.Array], Tree],
    data: Any,
    claimed: float,
    adjacency: Adjacency,
) -> Iterator[Finding]:
    """Change the batch in many ways, and yield a `Finding` for each change.

    If an example is replaced, the new result is compared with the original result under
    REPLACE, and with the result without the example under any other adjacency. The
    allowed distance is `claimed` plus a bound on rounding errors, or this bound alone
    for a change that must not move the result.
    """
    size = len(jax.tree.leaves(data)[0])
    indices = np.unique(np.linspace(0, size - 1, min(size, _MAX_CHANGED)).astype(int))
    # With a fixed seed, the test gives the same result in every run.
    rng = np.random.default_rng(0)
    full_mask = jnp.ones(size, bool)
    epsilon = _largest_machine_epsilon(fn(data, full_mask))

    def run(batch: Any, mask: jax.Array) -> Tree:
        # Differences between float64 numbers add no relevant rounding error.
        return jax.tree.map(lambda x: np.asarray(x, np.float64), fn(batch, mask))

    def measure_change(
        change: str, result: Tree, reference: Tree, claim: float, i: int
    ) -> Finding:
        # Each of the b terms of a sum may be rounded by an ulp of the partial sum. The
        # bound uses the smaller norm, so that a huge result does not allow a huge
        # distance.
        smaller_norm = min(_norm(result), _norm(reference))
        smaller_norm = smaller_norm if np.isfinite(smaller_norm) else 0.0
        rounding = 4 * size * epsilon * (claimed + smaller_norm)
        distance = _norm(jax.tree.map(np.subtract, result, reference))
        return Finding(change, distance, claim + rounding, int(i))

    # In smaller batches, a wrong divisor has a larger effect on the result.
    halves = {f"half {k}": rng.random(size) < 0.5 for k in range(1, _BATCHES)}
    for i in indices:
        alone = np.arange(size) == i
        for name, others in {"all": alone | True, **halves, "alone": alone}.items():
            present = jnp.asarray(others | alone)
            original = run(data, present)
            without = run(data, present & ~alone)
            yield measure_change(f"{name}: left out", original, without, claimed, i)
            # Except under REPLACE, one of two neighbours does not have the example.
            for kind, changed in _change_one_example(data, i):
                result = run(changed, present)
                neighbour = original if adjacency is Adjacency.REPLACE else without
                yield measure_change(f"{name}: {kind}", result, neighbour, claimed, i)
                # The values of a masked example must not move the result.
                masked = run(changed, present & ~alone)
                yield measure_change("masked: its values", masked, without, 0.0, i)
    original = run(data, full_mask)
    order = rng.permutation(size)
    reordered_result = run(jax.tree.map(lambda x: x[order], data), full_mask)
    yield measure_change("the order", reordered_result, original, 0.0, 0)
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), data)
    padded = run(longer, jnp.arange(size + 2) < size)
    yield measure_change("masked: two more slots", padded, original, 0.0, size)


def _change_one_example(data: Any, i: int) -> Iterator[tuple[str, Any]]:
    """Change example i in several ways, and yield each change's name and batch."""

    def scale(x: jax.Array, factor: float) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.at[i].multiply(jnp.asarray(factor, x.dtype)) if is_float else x

    yield "another", jax.tree.map(lambda x: x.at[i].set(x[(i + 1) % len(x)]), data)
    if any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(data)):
        for name, factor in _FACTORS.items():
            yield name, jax.tree.map(lambda x, by=factor: scale(x, by), data)


def _norm(tree: Tree) -> float:
    """The L2 norm over all leaves; infinite if any entry is not finite."""
    squares = sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree))
    return float(np.sqrt(squares)) if np.isfinite(squares) else float("inf")


def _largest_machine_epsilon(tree: Tree) -> float:
    """The largest machine epsilon of the floating-point leaves; 0 if there are none."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    return max((float(jnp.finfo(x).eps) for x in floats), default=0.0)
