"""One style for all plots, which are as readable in grey as in colour."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each colour has enough contrast on white. The numbers of colours, strokes and markers
# are pairwise coprime. So no two of the first 210 lines have the same colour, stroke
# and marker.
_COLOURS = ("#000000", "#0072b2", "#b34700", "#00775a", "#8a4173", "#5c5c00")
_STROKES = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 3, 4)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6e6e6e"
# The settings of matplotlib are a dictionary, so that this module need not import it.
style: dict[str, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": (
        f"cycler('color', {list(_COLOURS)}) + "
        f"cycler('linestyle', {[*_STROKES, _STROKES[0]]})"
    ),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    # On a telephone with a width of 360 pixels, letters are at least 8 pixels high.
    "figure.dpi": 160,
    "figure.figsize": (5.4, 3.6),
    "font.size": 11,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 160,
}
"""The style of the plots of `dpjax.plot`, for `matplotlib.pyplot.style.use`.

Lines differ in colour and in stroke. The colours are dark enough on white, and
differ for the colour-blind.
"""


def axes(ax: "Axes | None", size: tuple[float, float]) -> "Axes":
    """The given Axes, or the Axes of a new figure of the given size in inches."""
    if ax is not None:
        return ax
    # The import is here, since matplotlib is an optional dependency.
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "dpjax.plot needs matplotlib, which the extra 'plot' of dpjax installs. In "
            "a checkout of dpjax: pip install '.[plot]'."
        ) from error
    _, ax = plt.subplots(figsize=size, layout="constrained")
    return ax


def strokes(number: int) -> dict[str, Any]:
    """Matplotlib's keyword arguments for the style of line `number`, counted from 0."""
    return {
        "linestyle": _STROKES[number % len(_STROKES)],
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 5,
        "linewidth": 1.6,
    }


def names(labels: Sequence[str] | None, defaults: Sequence[str]) -> list[str]:
    """The labels as a list, or `defaults` if labels is None.

    Raises:
      ValueError: the number of labels is not the number of defaults.
    """
    if labels is None:
        return list(defaults)
    if isinstance(labels, str) or len(labels) != len(defaults):
        raise ValueError(
            f"labels must contain {len(defaults)} labels, one for each plan, "
            f"guarantee or shape; got {labels!r}."
        )
    return [str(label) for label in labels]


def finish(ax: "Axes", x: str, y: str) -> "Axes":
    """Label the axes, draw a light grid, and remove the top and right of the frame."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax
