"""A table that explains how the engine computes the norms for each parameter."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from dpjax._core.typing import Engine
from dpjax.clipping.bookkeeping.analysis.plan import Plan


class Row(NamedTuple):
    """How the engine computes the norms and the sum for one parameter.

    Attributes:
      parameter: the parameter's path in the tree of parameters.
      shape: the parameter's shape.
      sites: the primitives in which the parameter meets the example, each with the name
        of its rule if it has one.
      norm: the source of the norms: "rows" of activations and cotangents, "gradients"
        of each example, or "none" where the loss does not depend on the parameter.
      cost: the estimated cost of the norms and the sum, in multiplications an example.
        Parameters that share a computation all show its whole cost.
      vmap_cost: the estimated cost of the vmap engine, in the same unit.
      why: the reason for forming per-example gradients; empty where rows are used.
    """

    parameter: str
    shape: tuple[int, ...]
    sites: str
    norm: str
    cost: float
    vmap_cost: float
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows of a table, and the engine that engine="auto" takes.

    The explanation prints as a table.
    """

    rows: tuple[Row, ...]
    auto: Engine

    def __repr__(self) -> str:
        """The table as text."""
        head = ("parameter", "shape", "sites", "norm from", "cost", "vmap", "why")
        cells: list[tuple[str, ...]] = [head]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            costs = (f"{row.cost:.1e}", f"{row.vmap_cost:.1e}")
            cells.append((row.parameter, shape, row.sites, row.norm, *costs, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, f"auto: {self.auto}"])


def explanation(
    plan: Plan,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    auto: Engine,
) -> Explanation:
    """The plan as a table with one row for each parameter leaf.

    Args:
      plan: the plan.
      paths: the path of each leaf in the tree of parameters.
      shapes: the shape of each leaf.
      auto: the engine that engine="auto" takes.
    """
    rows = [
        Row(path, tuple(shape), "", "none", 0.0, 0.0, "")
        for path, shape in zip(paths, shapes, strict=True)
    ]
    # The engine chooses a form by the platform that the code is lowered for. The table
    # shows the choice for JAX's default backend.
    forms = plan.forms_on_gpu if jax.default_backend() == "gpu" else plan.forms
    for component, form in zip(plan.components, forms, strict=True):
        for i in component.leaves:
            rows[i] = rows[i]._replace(
                sites=", ".join(plan.sites[k].name for k in component.operands),
                norm="rows" if form.gram else "gradients",
                cost=form.cost,
                vmap_cost=form.vmap_cost,
                why="" if form.gram else component.reason or "cheaper than rows",
            )
    return Explanation(tuple(rows), auto)
