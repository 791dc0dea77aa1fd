"""Plots of the privacy cost of runs, and of noise by step and by frequency.

A shape describes the noise of T steps. The shape is a linear map from white noise to
the noise of the steps: a matrix f[T, k], or the coefficients f[T] of a filter.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._plan import parameters
from dpjax._plan.guarantee import up
from dpjax._plan.plan import Plan
from dpjax.ledger import Budget
from dpjax.plot._style import GREY, axes, finish, names, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The maximum numbers of steps at which ε is computed. The first number is for runs that
# are Gaussian mechanisms. The second number is for other runs, for which one ε takes as
# long to compute as in `plan`.
_POINTS_OF_GAUSSIAN, _POINTS = 400, 30


def epsilon_by_step(
    *plans: Plan,
    delta: float | None = None,
    labels: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw ε against the number of steps, for runs that stop early.

    Args:
      *plans: the plans of the runs.
      delta: δ, in (0, 1); None for each plan's own δ.
      labels: a name for each plan.
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, which show ε after t steps against t.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no plan is given, or an argument is not a plan; the number of labels
        is not the number of plans; or delta is out of range.

    Privacy: the ε after t steps is the ε of `plan.guarantee.at(t)`. If
    `plan.guarantee.mu` is a number, the function computes ε at up to 400 steps. Between
    two of these steps, the line shows the ε of the later step, which is an upper bound.
    If `plan.guarantee.mu` is None, the function computes ε at up to 30 steps, which
    have markers. The straight lines between markers are not bounds. The ε after t steps
    holds if t was fixed before the run. If the run's results determined t, only the ε
    of the whole plan holds.

    Example:
      >>> import dpjax
      >>> run = dpjax.plan(num_examples=1000, batch_size=100, num_steps=20, epsilon=2.0,
      ...                  delta=1e-5, clip_norm=1.0, sampling="fixed",
      ...                  adjacency=dpjax.Adjacency.ZERO_OUT)
      >>> line, = epsilon_by_step(run).lines
      >>> print([round(float(y), 3) for y in line.get_ydata()[[0, 10, 19]]])
      [1.361, 2.0, 2.0]
    """
    _check_plans(plans)
    if delta is not None:
        delta = validate.positive_float("delta", delta)
        validate.open_unit("delta", delta)
    deltas = [plan.delta if delta is None else delta for plan in plans]
    legend = names(labels, [_name(plan) for plan in plans])
    ax = axes(ax, (5.4, 3.6))
    for number, (plan, plan_delta, name) in enumerate(
        zip(plans, deltas, legend, strict=True)
    ):
        steps = _choose_steps(plan)
        costs = [float(plan.guarantee.at(int(t)).epsilon(plan_delta)) for t in steps]
        style = strokes(number)
        # Without μ, markers show where ε was computed. With μ, the line between two
        # steps has the ε of the later step.
        if plan.guarantee.mu is None:
            style["markersize"] = 3.5
        else:
            style |= {"drawstyle": "steps-pre", "markevery": [-1]}
        ax.plot(steps, costs, **style, label=f"{name}: ε = {up(costs[-1], 2)}")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small")
    has_markers = any(plan.guarantee.mu is None for plan in plans)
    x_label = "steps taken" + has_markers * " (ε is computed at the markers)"
    return finish(ax, x_label, f"ε {_describe_deltas(deltas)}")


def compare(
    plans: Sequence[Plan],
    *,
    labels: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the noise, the ε and the signal-to-noise ratio of several plans.

    Args:
      plans: the plans of the runs.
      labels: a name for each plan.
      ax: the matplotlib Axes that contain the three panels; None for the Axes of a new
        figure.

    Returns:
      The Axes, whose `child_axes` are three panels with a bar for each plan: the noise
      multiplier σ of the sums of clipped gradients, ε, and the signal-to-noise ratio of
      a run. The texts at the bars give σ and ε rounded up. The signal is the norm of a
      batch's sum of clipped gradients, if all gradients have the clip norm and the same
      direction. The noise is the standard deviation of the noise along this direction.
      With batch size b, the ratio is b / σ for one step, and √T b / σ for T steps. If b
      and σ vary from step to step, the ratio is the square root of the sum of (b / σ)²
      over steps. For correlated noise C⁻¹z, the noise in this ratio is the independent
      noise z.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: plans is empty, or contains an object that is not a plan; or the
        number of labels is not the number of plans.

    Example:
      >>> import dpjax
      >>> setting = dict(num_examples=1000, batch_size=100, num_steps=20, delta=1e-5,
      ...                clip_norm=1.0, sampling="fixed",
      ...                adjacency=dpjax.Adjacency.ZERO_OUT)
      >>> ax = compare([dpjax.plan(**setting, epsilon=e) for e in (1.0, 2.0)])
      >>> [panel.get_title("left") for panel in ax.child_axes]
      ['noise multiplier', 'ε at δ = 1e-05', 'signal to noise']
    """
    _check_plans(plans)
    legend = names(labels, [_name(plan) for plan in plans])
    epsilon = f"ε {_describe_deltas([plan.delta for plan in plans])}"
    # Each panel shows one number of each plan, in the given format.
    panels = {
        "noise multiplier": ([_sums_noise_multiplier(plan) for plan in plans], up),
        epsilon: ([plan.epsilon for plan in plans], up),
        "signal to noise": ([_signal_to_noise(plan) for plan in plans], _format_number),
    }
    ax = axes(ax, (5.4, 1.5 + len(plans)))
    ax.set_axis_off()
    for number, (title, (values, write)) in enumerate(panels.items()):
        panel = ax.inset_axes((0.0, 0.7 - number * 0.35, 1.0, 0.22))
        panel.set_title(title, fontsize="medium", loc="left")
        _draw_bars(panel, values, [write(x) for x in values], legend)
    return ax


def comparison(run: Plan, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the noise of all mechanisms that `dpjax.plan` compared for a plan.

    Args:
      run: a plan whose mechanism `dpjax.plan` chose among several mechanisms, for
        example a plan with `sampling="auto"`.
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, with a row for each mechanism. If `dpjax.plan` can make a plan with the
      mechanism, the row has a bar. Let e be the root mean square, over steps, of the
      mechanism's noise in the output of the plan's workload. The bar's length is e
      divided by the least e of all mechanisms. The bar's label gives the bar's length
      and the noise multiplier σ. If `dpjax.plan` cannot make a plan with the mechanism,
      the row has the text "no plan" in place of a bar.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: run is not a plan, or the caller of `dpjax.plan` chose the mechanism.

    Example:
      >>> import dpjax
      >>> run = dpjax.plan(num_examples=1000, batch_size=100, num_steps=20, epsilon=2.0,
      ...                  delta=1e-5, clip_norm=1.0, sampling="fixed", noise="auto",
      ...                  workload=dpjax.workloads.momentum_sum(0.9),
      ...                  adjacency=dpjax.Adjacency.ZERO_OUT)
      >>> for bar in comparison(run).patches:
      ...     print(f"{bar.get_width():.2f}")
      1.00
      1.30
      2.13
    """
    _check_plans([run])
    if run.comparison is None:
        raise ValueError(
            "run must be a plan that compared mechanisms, such as a plan with "
            f"sampling='auto'; got {run!r}."
        )
    candidates = run.comparison.candidates
    min_error = candidates[0].error or 1.0  # 0 if no update has any noise
    ax = axes(ax, (6.0, 1.0 + 0.35 * len(candidates)))
    values = [candidate.error / min_error for candidate in candidates]
    texts = [
        "no plan"
        if candidate.plan is None
        else f"{value:.2f} (σ = {_format_number(candidate.plan.noise_multiplier)})"
        for candidate, value in zip(candidates, values, strict=True)
    ]
    _draw_bars(ax, values, texts, [f"{x.sampling}, {x.strategy}" for x in candidates])
    ax.axvline(1.0, color=GREY, linewidth=0.8)
    ax.set_title("noise left in the workload, least = 1", fontsize="medium", loc="left")
    return ax


def _draw_bars(
    panel: "Axes", values: list[float], texts: list[str], labels: list[str]
) -> None:
    """Draw one panel with a bar for each value, and a text at the end of each bar."""
    positions = np.arange(len(values))
    # An infinite value has a text but no bar.
    lengths = [value if math.isfinite(value) else 0.0 for value in values]
    style = {"height": 0.6, "color": "#c9d7e3", "edgecolor": "black"}
    bars = panel.barh(positions, lengths, **style)
    panel.bar_label(bars, texts, padding=3, fontsize="small")
    # Leave space for the texts at the ends of the bars.
    panel.set_xlim(0, 1.35 * (max(lengths) or 1.0))
    # The first plan is on top.
    panel.invert_yaxis()
    panel.set_yticks(positions, labels)
    panel.set_xticks([])
    panel.tick_params(length=0)
    panel.grid(visible=False)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.spines["left"].set_color(GREY)


def _signal_to_noise(plan: Plan) -> float:
    """The signal-to-noise ratio of a plan: the square root of Σ (b / σ)² over steps.

    For each step, b is the batch size, and σ is the standard deviation of the noise in
    the sum of clipped gradients, divided by the clip norm. For correlated noise C⁻¹z, σ
    refers to the independent noise z.
    """
    # In every step, σ exceeds the noise multiplier by the same factor.
    factor = _sums_noise_multiplier(plan) / plan.noise_multiplier
    squares = [
        run.num_steps * (run.batch_size / (factor * run.noise_multiplier)) ** 2
        for run in plan.constant_runs()
    ]
    return math.sqrt(sum(squares))


def _sums_noise_multiplier(plan: Plan) -> float:
    """The noise multiplier of a plan's sums of clipped gradients.

    The result is the standard deviation of the noise in a sum, divided by the clip
    norm. A plan with `QuantileClip` also releases noisy counts, so that the result
    exceeds the noise multiplier of the plan.
    """
    if plan.quantile is None:
        return plan.noise_multiplier
    return parameters.noise_of(plan.quantile, plan.noise_multiplier, plan.batch_size)[0]


def _choose_steps(plan: Plan) -> np.ndarray:
    """Choose the steps at which `epsilon_by_step` computes ε, i64[k].

    In a short run, the function chooses all steps. In a longer run, the distance
    between neighbouring steps grows (up to rounding) from the start of the run to its
    end.
    """
    count = _POINTS if plan.guarantee.mu is None else _POINTS_OF_GAUSSIAN
    if plan.num_steps <= count:
        return np.arange(1, plan.num_steps + 1)
    # Squares are closest together at the start of a run.
    fractions = np.linspace(0.0, 1.0, count) ** 2
    return np.unique(np.ceil(1 + (plan.num_steps - 1) * fractions).astype(int))


def _format_number(value: float) -> str:
    """Format a value: an integer from 100 up, three significant digits below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _check_plans(plans: Sequence[Plan]) -> None:
    if not plans or not all(isinstance(plan, Plan) for plan in plans):
        raise ValueError(
            f"plans, or run of comparison, must be dpjax.Plan objects; got {plans!r}."
        )


def _name(plan: Plan) -> str:
    return f"{plan.sampling}, b = {plan.batch_size}, T = {plan.num_steps}"


def _describe_deltas(deltas: Sequence[float]) -> str:
    """The words "at δ = ..." if all δ are equal; otherwise "at the δ of each plan"."""
    return f"at δ = {deltas[0]:g}" if len(set(deltas)) == 1 else "at the δ of each plan"


def budget(account: Budget, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the share of a budget that each mechanism has used, and the unused share.

    Args:
      account: a budget from `dpjax.budget` with adaptive composition.
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, with a bar for each mechanism. The bar's length is the mechanism's share
      of the budget's μ². Each bar begins where the previous bar ends. The last bar is
      the unused share.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the budget's composition is "fixed", for which mechanisms have no
        shares.

    Example:
      >>> import dpjax
      >>> account = dpjax.budget(1.0, 1e-5, adjacency=dpjax.Adjacency.REPLACE)
      >>> mean = dpjax.accounting.events.Gaussian(0.1)
      >>> ax = budget(account.draw(mean, name="mean"))
      >>> print([x.get_text() for x in ax.get_yticklabels()])
      ['mean', 'left']
    """
    # For composition "fixed", `account.left` raises.
    squares = np.array([*(x.cost.mu for x in account.draws), account.left.mu]) ** 2
    rows = [*(x.name for x in account.draws), "left"]
    ax = axes(ax, (5.4, 1.0 + 0.35 * len(rows)))
    shares = squares / squares.sum()
    starts = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    colors = [strokes(1)["color"]] * len(account.draws) + [GREY]
    bars = ax.barh(range(len(rows)), shares, left=starts, color=colors)
    ax.bar_label(bars, [f"{share:.1%}" for share in shares], padding=3)
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.15)
    total = f"(ε = {account.epsilon:g}, δ = {account.delta:g})"
    return finish(ax, f"share of the μ² of {total}", "")


def noise(
    *shapes: ArrayLike, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw the standard deviation of noise in the optimizer's update at each step.

    Args:
      *shapes: for each line of the plot, a linear map from independent standard
        Gaussians z to the noise of T steps, which have the indices t = 0, …, T − 1. A
        matrix A, f[T, k], stands for the noise Σ_j A[t, j] z_j. Coefficients c, f[T],
        stand for the noise Σ_{j<=t} c_j z_{t−j}. The numbers A and c include the scale
        of the noise, such as the noise multiplier times the clip norm, divided by the
        batch size.
      labels: a name for each shape.
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, which show the square root of Σ_j A[t, j]², or of Σ_{j<=t} c_j², against
      t + 1.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no shape is given; a shape is neither a matrix nor a vector; a shape
        is empty, or contains a NaN or an infinity; or the number of labels is not the
        number of shapes.

    Example:
      >>> ax = noise(0.1 * 0.9 ** np.arange(200), labels=["momentum of 0.9"])
      >>> print(f"{ax.lines[0].get_ydata()[-1]:.4f}")  # sqrt(0.1 / 1.9)
      0.2294
    """
    checked, legend = _check_shapes(shapes, labels)
    ax = axes(ax, (5.4, 3.6))
    for number, (shape, name) in enumerate(zip(checked, legend, strict=True)):
        steps = np.arange(1, len(shape) + 1)
        style = _sparse_style(number, len(steps))
        if len(steps) > 300:  # oscillations are legible with thin lines
            style["linewidth"] = 0.8
        ax.plot(steps, deviations(shape), **style, label=name)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small")
    return finish(ax, "step", "standard deviation of the noise")


def spectrum(
    *shapes: ArrayLike, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw the power of noise in the optimizer's update by frequency.

    At equal power, noise of a lower frequency moves the parameters farther.

    Args:
      *shapes: for each line of the plot, a linear map from independent standard
        Gaussians to the noise of T steps: a matrix f[T, k] or coefficients f[T], with
        the same meaning as in `noise`.
      labels: a name for each shape.
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, which show the exact expected periodogram E |Σ_t x_t e^{−2πi f t}|² / T
      of the noise x of T steps, at f = 1/T, 2/T, …, up to 1/2 cycles per step. The mean
      of the periodogram over all frequencies 0, 1/T, …, (T − 1)/T is the mean of the
      steps' variances.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no shape is given; a shape is neither a matrix nor a vector; a shape
        is empty, or contains a NaN or an infinity; a shape has only one step; or the
        number of labels is not the number of shapes.

    Example:
      >>> ax = spectrum(np.eye(8), labels=["independent noise"])
      >>> print(ax.lines[0].get_ydata())
      [1. 1. 1. 1.]
    """
    checked, legend = _check_shapes(shapes, labels)
    if any(len(shape) < 2 for shape in checked):
        raise ValueError(f"shapes must have at least two steps; got {shapes!r}.")
    ax = axes(ax, (5.4, 3.6))
    for number, (shape, name) in enumerate(zip(checked, legend, strict=True)):
        count = len(shape)
        frequencies = np.arange(1, count // 2 + 1) / count
        powers = power(shape)[1 : count // 2 + 1]
        ax.loglog(frequencies, powers, **_sparse_style(number, len(powers)), label=name)
    ax.legend(frameon=False, fontsize="small")
    return finish(ax, "frequency, cycles a step", "power of the noise")


def deviations(shape: np.ndarray) -> np.ndarray:
    """Compute the standard deviation of noise at each of T steps, f64[T].

    `shape` is a linear map from white noise to the noise of T steps: a matrix f[T, k],
    or the coefficients f[T] of a filter.
    """
    if shape.ndim == 1:
        return np.sqrt(np.cumsum(shape**2))
    return np.sqrt(np.sum(shape**2, axis=1))


def power(shape: np.ndarray) -> np.ndarray:
    """Compute the expected periodogram of the noise of T steps, f64[T].

    `shape` is a linear map from white noise to the noise of T steps: a matrix f[T, k],
    or the coefficients f[T] of a filter. The frequencies are 0, 1/T, …, (T − 1)/T
    cycles per step.
    """
    count = len(shape)
    if shape.ndim == 2:
        return np.sum(np.abs(np.fft.fft(shape, axis=0)) ** 2, axis=1) / count
    # Let x be the noise and c the coefficients. For a lag l >= 0, the sum
    # Σ_t E[x_t x_{t+l}] = Σ_j c_j (T − j − l) c_{j+l} is a correlation. The periodogram
    # is the Fourier transform of these sums over all lags, divided by T. The lags l and
    # −l have equal sums. Transforms of length 2T avoid circular overlap.
    weighted = shape * (count - np.arange(count))
    product = np.conj(np.fft.rfft(shape, 2 * count)) * np.fft.rfft(weighted, 2 * count)
    sums = np.fft.irfft(product, 2 * count)[:count]
    # Rounding may make a zero negative.
    return np.maximum((2 * np.fft.fft(sums).real - sums[0]) / count, 0.0)


def _sparse_style(number: int, count: int) -> dict:
    """The style of line `number` of a plot, with markers at a few of `count` points.

    If all lines have the same number of points, at least 30, the markers of the first
    five lines are at different points.
    """
    every = max(1, count // 6)
    return {**strokes(number), "markevery": (number * every // 5 % every, every)}


def _check_shapes(
    shapes: Sequence[ArrayLike], labels: Sequence[str] | None
) -> tuple[list[np.ndarray], list[str]]:
    """Check the argument `shapes` of a plot; return float64 arrays, and their labels.

    A shape is a linear map from white noise to the noise of T steps: a matrix f[T, k],
    or the coefficients f[T] of a filter.

    Raises:
      ValueError: no shape is given; a shape is neither a matrix nor a vector; a shape
        is empty, or contains a NaN or an infinity; or the number of labels is not the
        number of shapes.
    """
    if not shapes:
        raise ValueError("shapes must contain at least one shape; got none.")
    checked = [np.asarray(shape, np.float64) for shape in shapes]
    for shape, argument in zip(checked, shapes, strict=True):
        if shape.ndim not in (1, 2) or not shape.size or not np.isfinite(shape).all():
            raise ValueError(
                "shapes must have finite numbers: the coefficients f[T], or the "
                f"matrix f[T, k]; got {argument!r}."
            )
    defaults = [f"shape {number}" for number in range(1, len(checked) + 1)]
    return checked, names(labels, defaults)
