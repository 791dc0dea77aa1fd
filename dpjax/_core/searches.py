"""Search for the root of a function, and end on the side on which a bound holds.

A search ends near the root, but not exactly at the root, and a privacy bound holds only
on one side of the root, called the good side. `bisect`, `nudge` and `close` end on the
good side, despite rounding errors. JAX does not differentiate through the searches.
Instead, the implicit function theorem gives the derivatives of a root from the function
at the root.

`bracket` and `close` find the parameter at which a monotone function crosses zero.
`bracket` takes steps until the function has changed its sign. `close` then narrows the
interval between the last two points. With concrete numbers, both call the function
directly, so that a caller may compile the function, and NumPy evaluates the search's
own arithmetic. `secants` needs few evaluations for functions that are nearly linear in
the log of the parameter. `minimize` minimizes a function.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core.float64 import TINY, ULP, scoped
from dpjax._core.interpret import without_compiler
from dpjax._core.typing import ArrayLike

# A cap in case rounding errors prevent convergence, which takes far fewer steps.
_MAX_NEWTON_STEPS = 100
_Function = Callable[[jax.Array], jax.Array]


def newton(fn: _Function, start: jax.Array) -> jax.Array:
    """The zero of a concave function of x >= 0, by Newton's method.

    The function is at most 0 at `start`. The tangents of a concave function are never
    below the function. So the iterates approach the zero from the side on which the
    function is negative, and never cross the zero. The search ends early if a step is
    not finite or would lead to a negative x.
    """

    def cond(state):
        steps, x, previous = state
        return (steps < _MAX_NEWTON_STEPS) & (jnp.abs(x - previous) > 2 * ULP * x)

    def body(state):
        steps, x, _ = state
        value, slope = jax.jvp(fn, (x,), (jnp.ones_like(x),))
        new = x - value / slope
        # Instead of a step that is not finite or leads below 0, x remains, and the loop
        # ends.
        return (steps + 1, jnp.where(jnp.isfinite(new) & (new >= 0), new, x), x)

    _, x, _ = jax.lax.while_loop(cond, body, (0, start, jnp.full_like(start, jnp.inf)))
    return x


def nudge(holds: _Function, x: jax.Array, direction: float) -> jax.Array:
    """Move x up or down until the condition `holds` is true at x.

    The first step is a few units in the last place, and each further step is twice as
    long. The direction is 1.0 or −1.0. x and the result are at least 0. If the steps
    become infinite, the search ends, and the condition may be false at the result.
    """

    def cond(state):
        x, bump = state
        return ~holds(x) & jnp.isfinite(bump)

    def body(state):
        x, bump = state
        return jnp.maximum(x + direction * bump, 0.0), 2 * bump

    # The addition of TINY moves even x = 0. The loop also ends at an infinite step.
    bump = 2 * ULP * x + TINY
    return jax.lax.while_loop(cond, body, (x, bump))[0]


def bisect(
    holds: _Function, fails: jax.Array, good: jax.Array, times: int
) -> jax.Array:
    """Halve a bracket `times` times, and return its good end.

    The condition `holds` must be true at `good`, and is then also true at the result.
    The other end, `fails`, may be any number. Arrays of brackets are halved
    elementwise.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]):
        fails, good = ends
        middle = (fails + good) / 2
        ok = holds(middle)
        return jnp.where(ok, fails, middle), jnp.where(ok, middle, good)

    return jax.lax.fori_loop(0, times, halve, (fails, good))[1]


def implicit_derivative(
    residual: Callable[..., jax.Array], root: jax.Array, met: ArrayLike = True
) -> jax.Array:
    """Return `root`, a root of the function `residual`, with its derivatives.

    By the implicit function theorem, the root has derivatives with respect to the
    values that `residual` captures. The function `residual` is evaluated only for
    derivatives. If `met` is false, `root` is not a root, and the derivatives are zero.
    The derivatives are also zero if the derivative of `residual` with respect to the
    root is 0 or not finite. For residual(x) = x − f(), the result is `root` with the
    derivatives of f().
    """
    # JAX's custom rules see explicit arguments only. So captured tracers become
    # arguments.
    residual, constants = jax.closure_convert(residual, root)

    @jax.custom_jvp
    def differentiable_root(
        root: jax.Array, met: jax.Array, *constants: jax.Array
    ) -> jax.Array:
        return root

    @differentiable_root.defjvp
    @scoped
    def _(
        primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        root, met, *constants = primals
        # This calls the function instead of using `root`, so that second derivatives
        # see that the root moves. If there is no root, x is 1, so that derivatives are
        # finite.
        x = jnp.where(met, differentiable_root(*primals), jnp.ones_like(root))
        by_x = jax.jvp(lambda x: residual(x, *constants), (x,), (jnp.ones_like(x),))[1]
        shift = jax.jvp(
            lambda *c: residual(x, *c), tuple(constants), tuple(tangents[2:])
        )[1]
        # dx = −(∂residual/∂c · dc) / (∂residual/∂x). The inner `where` prevents a
        # division by zero in second derivatives.
        moves = met & (by_x != 0) & jnp.isfinite(by_x)
        return root, jnp.where(moves, -shift / jnp.where(moves, by_x, 1.0), 0.0)

    # stop_gradient: derivatives must not go through the search that made the root.
    return differentiable_root(jax.lax.stop_gradient(root), met, *constants)


class Seen(NamedTuple):
    """A point x at which `secants` evaluated the function whose zero it searches for.

    Attributes:
      log: log x.
      excess: the value of the function at x, clipped to the interval from −2 to 2.
      slope: an estimate of the function's mean derivative with respect to log x,
        between x and the zero.
      next: the log of the next x at which to evaluate the function.
    """

    log: float
    excess: float
    slope: float
    next: float


_STEEPEST, _FLATTEST = -8.0, -0.7  # a range wider than that of slopes of log ε in log σ


def secants(
    excess: Callable[[float], float], start: float, slope: float
) -> Iterator[Seen]:
    """Yield the points of a search for the zero of a function that falls with log x.

    `slope` determines the second point. Each later point is near the zero of the
    parabola through the three points before it, or of the secant through the two points
    before it. The bracket is the interval between the last point with a positive value
    and the last point with another value. A new point outside the bracket is replaced
    by the bracket's middle in log x. The caller decides when to stop.

    Args:
      excess: the function of x, nearly linear in log x. The values may be infinite.
      start: the first x, positive.
      slope: an estimate of the derivative with respect to log x at the start, negative.
    """
    log, points, secant = math.log(start), [], slope
    low, high = -math.inf, math.inf
    while True:
        value = min(max(excess(math.exp(log)), -_FAR), _FAR)
        low, high = (log, high) if value > 0 else (low, log)
        if points and log != points[-1].log:
            last, before = points[-1], secant
            secant = slope = (value - last.excess) / (log - last.log)
            if len(points) > 1 and secant < 0 and log != points[-2].log:
                # Newton's form of the parabola, at the zero of the secant.
                bend = (secant - before) / (log - points[-2].log)
                slope += bend * (log - last.log - value / secant)
                slope = min(max(slope, 1.5 * secant), secant / 1.5)
            # Rounding, or a value clipped to ±_FAR, may give a wrong slope.
            slope = min(max(slope, _STEEPEST), _FLATTEST)
        following = log - value / slope
        following = following if low <= following <= high else (low + high) / 2
        points.append(Seen(log, value, slope, following))
        yield points[-1]
        log = following


# A cap on the iterations, in case a descent does not converge.
_ITERATIONS = 300


def minimize(
    value_and_grad: Callable[..., tuple[jax.Array, jax.Array]],
    x: np.ndarray,
    *args: Any,
    **kwargs: Any,
) -> np.ndarray:
    """Minimize a function by L-BFGS-B from x, f64[k]; return the last point, f64[k].

    `value_and_grad` returns a function's value and gradient at x. All further arguments
    are passed to `value_and_grad`. The method stops after at most 300 iterations.
    """
    from scipy.optimize import minimize

    def usable(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = map(np.asarray, value_and_grad(x, *args, **kwargs))
        # If a value or a gradient overflows, an infinite value makes the line search
        # take a shorter step. The zero gradient keeps NaN out of scipy's updates.
        is_finite = np.isfinite(value) and np.isfinite(slope).all()
        return (float(value), slope) if is_finite else (np.inf, np.zeros_like(slope))

    minimum = minimize(
        usable, x, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}
    )
    return minimum.x


_State = TypeVar("_State")
_FAR = 2.0  # an excess beyond ±_FAR is clipped to ±_FAR, which limits the steps
_LEAST_STRIDE = 1e-3  # the minimum log of a first stride; ten squarings exceed e


class Point(NamedTuple):
    """A parameter and a function's value at it, in a search for the function's zero.

    Attributes:
      at: the parameter.
      excess: the value of the function at this parameter.
    """

    at: jax.Array
    excess: jax.Array


class _Walk(NamedTuple):
    """The state of the function `bracket` between two evaluations.

    Attributes:
      before: the point at which the function was evaluated before `now`.
      now: the last point at which the function was evaluated.
      stride: the factor by which the parameter is multiplied or divided next.
    """

    before: Point
    now: Point
    stride: jax.Array


class _Bracket(NamedTuple):
    """The state of the search in `close` for a zero of the function `excess`.

    The state is a bracket, and two parameters of the method ITP (interpolate, truncate,
    project). The zero of `excess` is between the ends of the bracket.

    Attributes:
      bad: the end of the bracket at which `excess` is positive.
      good: the end of the bracket at which `excess` is at most zero.
      radius: an upper bound on half the width of the bracket. The bound halves in each
        step, and the choice of the next point ensures that the bound holds.
      curvature: κ₁ of ITP. Unless another limit applies, the next point is at the
        distance κ₁ · width² from the zero of the secant.
    """

    bad: Point
    good: Point
    radius: jax.Array
    curvature: jax.Array


def _while(
    cond: Callable[[_State], jax.Array], body: Callable[[_State], _State], state: _State
) -> _State:
    """A while loop: `jax.lax.while_loop` if the state is traced, else a Python loop."""
    # A Python loop avoids compiling the function again within a larger program.
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        return jax.lax.while_loop(cond, body, state)
    while bool(cond(state)):
        state = body(state)
    return state


def bracket(
    excess: _Function, start: jax.Array, increasing: bool, ends: tuple[float, float]
) -> tuple[Point, Point]:
    """Find two parameters between which a monotone function changes its sign.

    From `start`, the parameter is multiplied or divided by a factor, which is squared
    after each step. The first factor is at most 2, and closer to 1 if the function is
    nearly 0 at `start`.

    Args:
      excess: the monotone function. The caller searches for a parameter at which the
        function is at most 0.
      start: the first parameter.
      increasing: whether the function grows with the parameter.
      ends: the minimum and the maximum parameter to evaluate.

    Returns:
      The last two points. If the sign never changed, the last point is at an end.
    """

    def body(walk: _Walk) -> _Walk:
        following = _next_point(walk, increasing, ends)
        reached = Point(following, excess(following))
        return _Walk(walk.now, reached, walk.stride * walk.stride)

    walk = _while(_goes_on, body, _begin(Point(start, excess(start))))
    return walk.before, walk.now


@without_compiler
def _begin(first: Point) -> _Walk:
    # The function usually is log ε minus the log of a target. If ε were proportional to
    # 1 / parameter, the log of the parameter would have to move by the excess.
    stride = jnp.exp(jnp.clip(jnp.abs(first.excess), _LEAST_STRIDE, math.log(2)))
    # No parameter equals NaN. So the walk continues from the first point.
    return _Walk(first._replace(at=jnp.full_like(first.at, jnp.nan)), first, stride)


@without_compiler
def _goes_on(walk: _Walk) -> jax.Array:
    # If a stride changes nothing, the walk has reached an end of the range.
    same_sign = (walk.before.excess > 0) == (walk.now.excess > 0)
    return same_sign & (walk.before.at != walk.now.at)


@without_compiler
def _next_point(
    walk: _Walk, increasing: ArrayLike, ends: tuple[ArrayLike, ArrayLike]
) -> jax.Array:
    x, stride = walk.now.at, walk.stride
    up = (walk.now.excess > 0) != increasing
    return jnp.clip(jnp.where(up, x * stride, x / stride), *ends)


@without_compiler
def find_bracket(
    first: Point, second: Point
) -> tuple[jax.Array, jax.Array, Point, Point]:
    """Tell which of the two points that `bracket` returned is bad, and which is good.

    Returns:
      Four values: whether the function changes its sign between the points; whether the
      function is at most 0 at one of the points; the bad point, at which the function
      is positive; and the good point, at which the function is at most 0. If the sign
      does not change, the bad and the good point are both at the second point's
      parameter. `close` then returns this parameter.
    """
    crossed = (first.excess > 0) != (second.excess > 0)

    def pick(x: jax.Array, y: jax.Array, spare: ArrayLike) -> jax.Array:
        return jnp.where(crossed, jnp.where(first.excess > 0, x, y), spare)

    bad = Point(*map(pick, first, second, (second.at, 1.0)))
    good = Point(*map(pick, second, first, (second.at, -1.0)))
    return crossed, crossed | (second.excess <= 0), bad, good


def close(
    excess: _Function,
    bad: Point,
    good: Point,
    tolerance: ArrayLike,
    *,
    log: bool = False,
) -> jax.Array:
    """Narrow an interval around a zero (a bracket), and return its good end.

    The method is ITP (interpolate, truncate, project), which evaluates the function
    near the zero of the secant. For any function, ITP needs hardly more steps than
    bisection. The result is the parameter of the given good end, or a parameter at
    which the function was evaluated and is at most 0.

    Args:
      excess: the function.
      bad: the end of the bracket at which the function is positive. The values of the
        function in `bad` and `good` may be estimates, which only affect the speed.
      good: the end of the bracket at which the function is at most 0.
      tolerance: the maximum width of the result's bracket, relative if `log` is true.
      log: whether to search in the log of the parameter, in which most accountants are
        nearly linear.

    Reference: Oliveira and Takahashi (2020), https://doi.org/10.1145/3423597, with
    κ₁ (b − a) = 0.01, κ₂ = 2 and n₀ = 1, for the first bracket [a, b].
    """

    def cond(bracket: _Bracket) -> jax.Array:
        return _is_open(bracket, tolerance, log=log)

    def body(bracket: _Bracket) -> _Bracket:
        middle = _aim(bracket, tolerance, log=log)
        return _narrow(bracket, Point(middle, excess(middle)))

    return _while(cond, body, _open_bracket(bad, good, tolerance, log=log)).good.at


@without_compiler
def _open_bracket(
    bad: Point, good: Point, tolerance: ArrayLike, *, log: bool
) -> _Bracket:
    width = _width(bad, good, log)
    # The radius ρ of the reference: the maximum half-width that bisection would have
    # before each step, with one step to spare.
    halvings = jnp.ceil(jnp.log2(jnp.maximum(width / tolerance, 1.0)))
    # κ₁ is small. The excess is smooth, so that the secant's zero is near the root.
    curvature = 0.01 / jnp.maximum(width, tolerance)
    return _Bracket(bad, good, jnp.exp2(halvings) * tolerance, curvature)


def _width(bad: Point, good: Point, log: bool) -> jax.Array:
    to = jnp.log if log else jnp.asarray
    return jnp.abs(to(good.at) - to(bad.at))


@without_compiler
def _is_open(bracket: _Bracket, tolerance: ArrayLike, *, log: bool) -> jax.Array:
    return _width(bracket.bad, bracket.good, log) > tolerance


@without_compiler
def _aim(bracket: _Bracket, tolerance: ArrayLike, *, log: bool) -> jax.Array:
    """The next parameter at which `close` evaluates the function.

    This parameter is near the zero of the secant through the ends of the bracket, and
    divides the bracket into two parts whose widths are at most the bracket's `radius`.
    Hence `close` needs at most one step more than bisection.
    """
    high, low = bracket.bad.excess, bracket.good.excess
    ends = bracket.bad.at, bracket.good.at
    a, b = map(jnp.log, ends) if log else ends
    width, half = jnp.abs(b - a), (a + b) / 2
    secant = a + (b - a) * high / (high - low)
    # Evaluate at least half a tolerance past the secant's zero, so that both ends of
    # the bracket move.
    nudge = jnp.maximum(bracket.curvature * width * width, 0.5 * tolerance)
    nudge = jnp.minimum(nudge, jnp.abs(half - secant))
    aim = secant + jnp.sign(half - secant) * nudge
    reach = jnp.maximum(bracket.radius - width / 2, 0.0)
    middle = jnp.clip(aim, half - reach, half + reach)
    return jnp.exp(middle) if log else middle


@without_compiler
def _narrow(bracket: _Bracket, middle: Point) -> _Bracket:
    # The new point replaces the end with the same sign. So the bracket stays valid.
    ok = middle.excess <= 0

    def pick(x: Point, y: Point) -> Point:
        return Point(*(jnp.where(ok, *pair) for pair in zip(x, y, strict=True)))

    bad, good = pick(bracket.bad, middle), pick(middle, bracket.good)
    return _Bracket(bad, good, bracket.radius / 2, bracket.curvature)
