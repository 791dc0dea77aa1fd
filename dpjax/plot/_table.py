"""The table of `dpjax.explain` as a plot."""

from typing import TYPE_CHECKING, Any

from dpjax.clipping.bookkeeping import Explanation
from dpjax.plot._style import GREY, axes, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The marker for each source of per-example norms.
_MARKERS = {"rows": "s", "gradients": "o"}


def explain(explanation: Explanation, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the cost of the book-keeping engine and of the vmap engine, by parameter.

    Args:
      explanation: the result of `dpjax.explain`.
      ax: the matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes: a row for each parameter, with the estimated multiplications per
      example. A filled marker stands for the book-keeping engine: a square where norms
      come from rows of activations and cotangents, and a disc where norms come from
      each example's gradients. A hollow diamond stands for the vmap engine. The
      legend's title names the engine that engine="auto" takes.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: explanation is not an `Explanation`, or has no parameters.

    Example:
      >>> import dpjax, jax.numpy as jnp
      >>> found = dpjax.explain(lambda w, x: jnp.sum(jnp.tanh(x @ w)),
      ...                       jnp.ones((3, 2)), jnp.ones((4, 3)))
      >>> explain(found).get_legend().get_title().get_text()
      'engine="auto" takes "bookkeeping"'
    """
    if not isinstance(explanation, Explanation) or not explanation.rows:
        raise ValueError(
            f"explanation must be that of dpjax.explain; got {explanation!r}."
        )
    rows = explanation.rows
    ax = axes(ax, (7.0, 1.6 + 0.34 * len(rows)))
    for place, row in enumerate(rows):
        if row.norm in _MARKERS:
            ax.plot([row.cost, row.vmap_cost], [place, place], color=GREY, linewidth=1)
    for norm, marker in _MARKERS.items():
        of = [(row.cost, i) for i, row in enumerate(rows) if row.norm == norm]
        label = f"book-keeping by {norm}"
        _points(ax, of, marker, label, color="black", markersize=7)
    of = [(row.vmap_cost, i) for i, row in enumerate(rows) if row.norm in _MARKERS]
    hollow = {"markerfacecolor": "none", "markersize": 11}
    _points(ax, of, "D", "vmap", color="#0072b2", **hollow)
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), [_label(row.parameter, row.shape) for row in rows])
    # Inverted, so that the first parameter is on top.
    ax.set_ylim(len(rows) - 0.5, -0.5)
    for place, row in enumerate(rows):
        note = row.why if row.norm in _MARKERS else "the loss does not depend on it"
        at = {"xycoords": ("axes fraction", "data"), "va": "center"}
        ax.annotate(f"  {note}", (1.0, place), **at, fontsize="small")
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        title=f'engine="auto" takes "{explanation.auto}"',
        alignment="left",
        ncols=3,
        frameon=False,
        fontsize="small",
    )
    return finish(ax, "multiplications an example, estimated", "")


def _points(
    ax: "Axes",
    points: list[tuple[float, int]],
    marker: str,
    label: str,
    **style: Any,
) -> None:
    """Draw all points with one marker and one legend entry, if there are any points."""
    if points:
        costs, places = zip(*points, strict=True)
        ax.plot(costs, places, linestyle="", marker=marker, label=label, **style)


def _label(parameter: str, shape: tuple[int, ...]) -> str:
    return f"{parameter}  {'×'.join(map(str, shape)) or 'scalar'}"
