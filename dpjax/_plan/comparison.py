"""The choice of the mechanism that leaves the least noise in an optimizer's outputs.

A mechanism is a way to draw batches, together with a way to draw noise. (The class
`Mechanism` describes only the way to draw batches.) With random batches, an attacker
does not know in which steps an example took part. Random batches therefore need less
noise than batches in a fixed order (amplification). Correlated noise has another
advantage: later steps cancel some of the noise of earlier steps. So less noise remains
in sums over steps, which an optimizer computes. But the longer the correlation, the
smaller the amplification.

Which of the two advantages is larger depends on ε, on the number of epochs and on the
optimizer. So `best_plan` makes a plan for each mechanism at the same ε, and compares
the noise that each plan leaves in the optimizer's outputs. If the caller's data loader
cannot run every sampling, the caller names the samplings to compare. The choice costs
no privacy, since the comparison uses public numbers only.

`resolve_strategy` returns the matrix that correlates the noise of one plan: the matrix
that the caller passes, or the best matrix that a search finds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax import strategies, workloads
from dpjax._core import validate
from dpjax._matrices.strategy import (
    Strategy,
    StrategySpec,
    Tree,
    Workload,
    check_workload,
    spec_of,
)
from dpjax._plan.mechanisms import SAMPLINGS, Mechanism, mechanism_of
from dpjax._plan.parameters import QuantileClip, RunParameters
from dpjax.accounting import correlated
from dpjax.strategies import _amplified

# The decay that replaces 1, the decay of a plain sum over steps: `strategies.tree`
# needs a decay that is below 1, also in float32.
_MAX_DECAY = 1 - 2.0**-20
_NOISE_KINDS = {
    "auto": ("independent", "correlated", "tree"),
    "independent": ("independent",),
    "correlated": ("correlated", "tree"),
}
_NEEDS = {
    "poisson": "any examples in any step, batches of varying size",
    "fixed_size": "any examples in any step",
    "fixed": "the data in one order",
    "reshuffled": "a new order in each epoch",
    "cyclic_poisson": "any examples of a group in any step, batches of varying size",
    "random_bins": "one secret random order in bins, batches of varying size",
    "fresh_bins": "a new secret order in bins each epoch, batches of varying size",
}


class Candidate(NamedTuple):
    """One mechanism of a comparison, with its plan or the reason why it has no plan.

    Attributes:
      sampling: the argument `sampling` of `dpjax.plan`.
      noise: "independent"; "correlated", with the strategy that `dpjax.plan` chooses
        for the workload; "tree", with a strategy of `strategies.tree`; or "any" if the
        sampling does not allow the adjacency.
      needs: a phrase that describes in which order the data loader must read examples.
      plan: the plan that `dpjax.plan` makes for this sampling and noise; None if
        `dpjax.plan` makes no plan.
      error: the noise that the plan leaves in the optimizer's outputs, as the function
        `error` computes it; inf if there is no plan.
      reason: the error message that says why there is no plan; empty if plan is not
        None.
    """

    sampling: str
    noise: str
    needs: str
    plan: RunParameters | None = None
    error: float = math.inf
    reason: str = ""

    @property
    def strategy(self) -> str:
        """A description of the noise in a few words, for the table of mechanisms."""
        return self.noise if self.plan is None else _describe_strategy(self.plan.shape)


class Comparison(NamedTuple):
    """The mechanisms among which `dpjax.plan` chose; a comparison prints as a table.

    Attributes:
      candidates: the mechanisms, in the order of increasing noise in the optimizer's
        outputs. Mechanisms without a plan come last.
    """

    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        """A table with a row for each mechanism, in the order of `candidates`.

        The column "noise left" has the noise that a plan leaves in the optimizer's
        outputs, divided by the least noise of all plans if the least noise is not 0. A
        mechanism without a plan has "-" in this column.
        """
        header = ("noise left", "sampling", "noise", "multiplier", "batch (capacity)")
        cells: list[tuple[str, ...]] = [(*header, "needs")]
        min_error = self.candidates[0].error or 1.0  # 0 if no update has any noise
        for candidate in self.candidates:
            error = f"{candidate.error / min_error:.3f}"
            names, plan = (candidate.sampling, candidate.strategy), candidate.plan
            if plan is None:
                cells.append(("-", *names, "-", "-", candidate.reason))
                continue
            sigma, size = plan.noise_multiplier, plan.batch_size
            size = f"{size} ({plan.max_batch_size})"
            cells.append((error, *names, f"{sigma:.3f}", size, candidate.needs))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )


def best_plan(plan: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Plan a run for each mechanism, and return the plan with the least noise.

    A mechanism is a way to draw batches, together with a way to draw noise. The noise
    is measured in the outputs of the workload, the linear map that the optimizer
    applies to the mean gradients of all steps. The attribute `comparison` of the
    returned plan is the `Comparison` of all mechanisms.

    Args:
      plan: `dpjax.plan`, which makes the plan of each mechanism.
      arguments: the arguments that the caller passed to `dpjax.plan`, by name. At least
        one of `sampling` and `noise` leaves a choice, for example as "auto".

    Raises:
      ValueError: an argument that a comparison needs is missing; an argument is out of
        range, or is not allowed in a comparison; no mechanism has a plan.
    """
    names, workload = _check_options(arguments)

    def candidate(mechanism: Mechanism, sampling: str, kind: str) -> Candidate:
        # `plan` accepts a capacity only for batches of random size.
        capacity = arguments["max_batch_size"] if mechanism.overflows else None
        correlates = "independent" if kind == "independent" else "correlated"
        options: dict[str, Any] = {"sampling": sampling, "noise": correlates}
        options["max_batch_size"] = capacity
        options["workload"] = workload if kind == "correlated" else None
        try:
            if kind == "tree":
                options["strategy"] = _tree(mechanism, workload, arguments)
            run = plan(**{**arguments, **options})
            remaining = error(run, workload)
        except ValueError as problem:
            return Candidate(sampling, kind, _NEEDS[sampling], reason=str(problem))
        return Candidate(sampling, kind, _NEEDS[sampling], run, remaining)

    candidates: list[Candidate] = []
    n = arguments["num_examples"]
    for sampling in names:
        try:
            mechanism = SAMPLINGS[sampling](n, arguments["adjacency"])
        except ValueError as problem:  # the sampling does not allow the adjacency
            needs = _NEEDS[sampling]
            candidates.append(Candidate(sampling, "any", needs, reason=str(problem)))
            continue
        for kind in _noise_kinds(mechanism, sampling, arguments["noise"]):
            candidates.append(candidate(mechanism, sampling, kind))
    # The sort is stable: among candidates with equal errors, the first one is chosen.
    candidates.sort(key=lambda x: x.error)
    best = candidates[0].plan
    if best is None:
        reasons = " ".join(dict.fromkeys(x.reason for x in candidates))
        raise ValueError(f"none of the compared mechanisms has a plan: {reasons}")
    return dataclasses.replace(best, comparison=Comparison(tuple(candidates)))


def error(plan: RunParameters, workload: Workload) -> float:
    """Return the root mean square, over steps, of the noise in a workload's outputs.

    The workload is the linear map A that the optimizer applies to the mean gradients of
    all T steps. A mean is a sum divided by the expected batch size b. Let σ be the
    noise multiplier, and C the matrix of the correlated noise C⁻¹z, where z is
    independent over steps. In units of the clip norm, the result is
    σ ‖A C⁻¹‖_F / (√T b).
    """
    strategy = strategies.independent() if plan.strategy is None else plan.strategy
    error_per_sigma = float(correlated.error(strategy, workload, plan.num_steps))
    size = mechanism_of(plan).expected_batch_size(plan.batch_size)
    return plan.noise_multiplier * error_per_sigma / size


def _check_options(arguments: dict[str, Any]) -> tuple[tuple[str, ...], Workload]:
    """Check the `arguments` of `dpjax.plan`, and return the samplings and the workload.

    Returns:
      The names of the samplings to compare, and the workload. If no workload is given
      and all noise is independent, the returned workload is the identity.

    Raises:
      ValueError: an argument is missing, is out of range, or is not allowed in a
        comparison.
    """
    numbers = {name: arguments[name] for name in ("epsilon", "num_steps", "batch_size")}
    sigma = arguments["noise_multiplier"]
    if None in numbers.values() or sigma is not None:
        raise ValueError(
            "epsilon, num_steps and batch_size must be given, and noise_multiplier "
            f"must be None, where mechanisms are compared; got {numbers} and {sigma!r}."
        )
    for name in ("noise_schedule", "clip_schedule", "batch_schedule", "strategy"):
        if arguments[name] is not None:
            raise ValueError(
                f"{name} must be None where mechanisms are compared; got "
                f"{arguments[name]!r}."
            )
    clip_norm, capacity = arguments["clip_norm"], arguments["max_batch_size"]
    if isinstance(clip_norm, QuantileClip):
        raise ValueError(
            f"clip_norm must be a number if mechanisms are compared; got {clip_norm!r}."
        )
    validate.adjacency(arguments["adjacency"])
    validate.static_int("num_examples", arguments["num_examples"], minimum=1)
    size = validate.static_int("batch_size", arguments["batch_size"], minimum=1)
    if capacity is not None:
        validate.static_int("max_batch_size", capacity, minimum=size)
    names, noise = arguments["sampling"], arguments["noise"]
    names = tuple(SAMPLINGS) if names == "auto" else names
    names = names if isinstance(names, tuple) else (names,)
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"sampling must name one or more samplings, each once; got {names!r}."
        )
    for name in names:
        validate.one_of("sampling", name, tuple(SAMPLINGS))
    validate.one_of("noise", noise, tuple(_NOISE_KINDS))
    workload = arguments["workload"]
    if workload is None and noise != "independent":
        raise ValueError(
            "workload must be given where mechanisms with correlated noise are "
            "compared, because their error depends on the optimizer (see "
            "dpjax.workloads); got None."
        )
    # If all candidates have independent noise, every workload ranks them in the same
    # order, so that the identity suffices.
    workload = workloads.toeplitz(np.ones(1)) if workload is None else workload
    return names, check_workload(workload, arguments["num_steps"])


def _noise_kinds(mechanism: Mechanism, sampling: str, noise: str) -> list[str]:
    """List the kinds of noise that a comparison combines with one sampling.

    The result has the kinds "independent", "correlated" and "tree" (as in
    `Candidate.noise`) that the sampling supports and the argument `noise` selects. For
    cyclic Poisson sampling, "correlated" includes independent noise, so the result
    omits "independent". If these rules leave no kind, the result is `[noise]`.
    """
    kinds = ["correlated"] if mechanism.supports_correlation else []
    # Here "correlated" includes independent noise, which is a strategy with one band.
    if sampling != "cyclic_poisson":
        kinds = ["independent", *kinds]
    if mechanism.order is not None:
        kinds.append("tree")
    # If no kind remains, `plan` gets the noise that the caller named. If `plan` raises
    # an error, the error's message becomes the candidate's reason.
    return [kind for kind in kinds if kind in _NOISE_KINDS[noise]] or [noise]


def _tree(mechanism: Mechanism, workload: Workload, arguments: dict[str, Any]) -> Tree:
    """Return the best of a few tree strategies for a workload.

    A tree strategy is the binary tree mechanism for momentum with a given decay. The
    workload applies momentum to the gradient sums, and may then add up the results over
    steps, also with a decay (`keep`). Each decay of the workload gives one candidate:
    the tree strategy for momentum with this decay. The best candidate is the one that,
    at equal privacy, leaves the least noise in the workload's outputs.
    """
    # The poles of 1 / D are the decays of the momentum. The mean of keep is the decay
    # of the sum over steps: 1 for a plain sum, and 0 if the workload has no such sum.
    poles = np.abs(np.roots(np.append(1.0, np.asarray(workload.denominator))))
    poles = np.append(poles, np.mean(np.asarray(workload.keep)))
    steps, size = arguments["num_steps"], arguments["batch_size"]

    def product(tree: Tree) -> float:
        # μ at σ = 1 times the error at σ = 1 is the error at the σ that gives μ = 1.
        mu = correlated.mu(
            tree,
            1.0,
            num_steps=steps,
            steps_per_epoch=mechanism.steps_per_epoch(size),
            order=mechanism.order or "fixed",
            adjacency=mechanism.adjacency,
        )
        return float(mu) * float(correlated.error(tree, workload, steps))

    trees = [strategies.tree(x) for x in np.unique(np.minimum(poles, _MAX_DECAY))]
    return min(trees, key=product)


def _describe_strategy(shape: StrategySpec | None) -> str:
    """Describe a strategy in a few words, for the table of mechanisms."""
    if shape is None:
        return "independent"
    if shape.tree_decay is not None:
        return f"tree {shape.tree_decay:.3g}"
    if not any(shape):
        return "no correlation"  # the search found no better strategy
    by_step = " by step" if shape.factors else ""
    if not shape.denominator:
        return f"{1 + len(shape.numerator)} bands{by_step}"
    if not shape.numerator and len(shape.denominator) == 1:
        return f"geometric {-shape.denominator[0]:.3g}{by_step}"
    count = max(map(len, shape[:2]))
    return f"{count} stored vector{'s' * (count > 1)}{by_step}"


def resolve_strategy(
    run: RunParameters,
    mechanism: Mechanism,
    workload: Workload | None,
    strategy: Strategy | None,
) -> tuple[StrategySpec | None, _amplified.Start | None]:
    """Return the caller's strategy, or find the best strategy for the workload.

    A strategy is the matrix that correlates the noise. The workload is the linear map
    that the optimizer applies to the gradient sums of all steps.

    Returns:
      strategy: the numbers of the strategy; None for independent noise.
      start: an estimate of the noise multiplier, at which the search for the noise
        multiplier starts. None if the noise is independent, if the caller passes the
        strategy, if the batches are in order, or if the search for the best strategy
        returns independent noise.

    Raises:
      ValueError: for independent noise, workload or strategy is given. For correlated
        noise, workload and strategy are both given or both missing; the sampling does
        not allow correlated noise or the strategy; epsilon is missing, and the best
        strategy depends on epsilon.
    """
    if run.noise == "independent":
        if workload is not None or strategy is not None:
            raise ValueError(
                "workload and strategy must be None unless noise is 'correlated'; "
                f"got {workload!r} and {strategy!r}."
            )
        return None, None
    if not mechanism.supports_correlation:
        raise ValueError(
            "sampling must not be 'poisson' or 'fixed_size' with noise='correlated', "
            "because no bound on the privacy cost is known for these samplings."
        )
    estimate = None
    if strategy is None and workload is not None:
        strategy, estimate = _find_best_strategy(run, mechanism, workload)
    elif strategy is None or workload is not None:
        raise ValueError(
            "either workload or strategy must be given with noise='correlated'; got "
            f"{workload!r} and {strategy!r}."
        )
    shape = spec_of(strategy, run.num_steps)
    mechanism.check_strategy(shape, run.batch_size)
    return shape, estimate


def _find_best_strategy(
    run: RunParameters, mechanism: Mechanism, workload: Workload
) -> tuple[Strategy, _amplified.Start | None]:
    """Find the best strategy for a workload, and estimate its noise multiplier.

    A strategy is the matrix that correlates the noise. The workload is the linear map
    that the optimizer applies to the gradient sums of all steps.

    For batches in order, `strategies.optimize` searches for the strategy, among the
    strategies of kind "rational" that store one vector in the optimizer's state. If the
    workload varies by step, the strategy also varies by step. For random batches,
    `strategies.amplified` searches for the strategy.

    Returns:
      The strategy, and the estimate. The estimate is None if the batches are in order,
      or if the best strategy is independent noise.

    Raises:
      ValueError: epsilon is missing, and the batches are random, so that the best
        strategy depends on epsilon.
    """
    sizes: dict[str, Any] = {
        "num_steps": run.num_steps,
        "steps_per_epoch": mechanism.steps_per_epoch(run.batch_size),
    }
    if mechanism.order is None:
        if run.solved_for == "epsilon":
            raise ValueError(
                "epsilon or strategy must be given with sampling 'cyclic_poisson', "
                "'random_bins' or 'fresh_bins', because the best strategy for a "
                "workload depends on epsilon."
            )
        best, estimate = _amplified.estimate(
            workload,
            **sizes,
            epsilon=run.epsilon,
            delta=run.delta,
            sampling=run.sampling,  # pyright: ignore
            adjacency=run.adjacency,
        )
        # If the best strategy is independent noise, there is no estimate, as if the
        # caller had named independent noise. A comparison of "correlated" and
        # "independent" noise then computes no ε twice.
        return best.strategy, estimate if any(map(np.any, best.strategy)) else None
    sizes["order"] = mechanism.order
    optimized = strategies.optimize("rational", workload, **sizes)
    # If the workload's rates or sums vary by step, the strategy's factors also do.
    if all(np.size(x) == 1 for x in workload[2:]):
        return optimized, None
    return strategies.scheduled(optimized, workload, **sizes), None
