"""A table of what the engine does for each parameter, and why."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from dpjax.clipping.bookkeeping.analysis.plan import Plan


class Row(NamedTuple):
    """What happens to one parameter.

    Attributes:
      parameter: its path in the parameters.
      shape: its shape.
      sites: where it meets the example: primitives, each with its rule if it has one.
      norm: what the norms are taken from: "rows" of activations and cotangents,
        "gradients" of each example, or "none" where the loss does not depend on it.
      cost: of the norms and the sum, in multiplications an example; leaves that share
        a computation share the cost.
      vmap_cost: the same for the vmap engine.
      why: why gradients are formed for each example, if they are.
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
    """The rows, and the engine that engine="auto" takes; it prints as a table."""

    rows: tuple[Row, ...]
    auto: str

    def __repr__(self) -> str:
        """The table."""
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
    plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> Explanation:
    """The plan as a table, one row for each leaf."""
    rows = [
        Row(path, tuple(shape), "", "none", 0.0, 0.0, "")
        for path, shape in zip(paths, shapes, strict=True)
    ]
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
    return Explanation(tuple(rows), "bookkeeping" if plan.automatic else "vmap")
