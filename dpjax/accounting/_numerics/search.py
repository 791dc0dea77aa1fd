"""The search for the parameter at which a monotone function crosses zero.

The search walks until the function has changed its sign, and then narrows the bracket.
With concrete numbers the search calls the function directly, so that a caller may
compile it. The search's own arithmetic between two calls is compiled once, as one
program, and not operation by operation.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

_Function = Callable[[jax.Array], jax.Array]
_State = TypeVar("_State")
_LEAST_STRIDE = 1e-3  # the least log of a first stride; ten squarings exceed e


class Point(NamedTuple):
    """A parameter, and the excess of log ε over the log of its target there."""

    at: jax.Array
    excess: jax.Array


class _Walk(NamedTuple):
    """The last two points of the walk, and the factor of the next stride.

    Attributes:
      before: the point before the last one.
      now: the last point.
      stride: the factor by which the parameter changes next.
      moved: whether the last stride changed the parameter.
    """

    before: Point
    now: Point
    stride: jax.Array
    moved: jax.Array


class _Bracket(NamedTuple):
    """A point where the excess is positive, and one where it is not.

    Attributes:
      bad: the point where the excess is positive.
      good: the point where the excess is at most zero.
      radius: half the width, in the log of the parameter, of the bracket that bisection
        would have after as many steps.
      curvature: the distance from the secant's zero at which to evaluate, over the
        square of the width.
    """

    bad: Point
    good: Point
    radius: jax.Array
    curvature: jax.Array


def _while(
    cond: Callable[[_State], jax.Array],
    body: Callable[[_State], _State],
    state: _State,
) -> _State:
    """A while loop: `jax.lax.while_loop` if the state is traced, else a Python loop."""
    # A Python loop avoids compiling the function again within a larger program.
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        return jax.lax.while_loop(cond, body, state)
    while bool(cond(state)):
        state = body(state)
    return state


def bracket(
    excess: _Function,
    start: jax.Array,
    increasing: bool,
    ends: tuple[float, float],
) -> tuple[Point, Point]:
    """Walk from start, squaring the stride, until the sign of the excess changes.

    The first stride is at most a factor of two. It is smaller if the first excess is
    small, because log ε seldom falls more slowly than the log of the square root of the
    parameter grows.

    Args:
      excess: the function, positive where the target is missed.
      start: the first parameter.
      increasing: whether the function grows with the parameter.
      ends: the smallest and the largest parameter to evaluate.

    Returns:
      The last two points. If the sign never changed, the last one is at an end.
    """

    def body(walk: _Walk) -> _Walk:
        further = _next_point(walk, increasing, ends)
        return _walk(walk, Point(further, excess(further)))

    # The excess is in log ε: if ε fell like the root of the parameter, the log of the
    # parameter would have to move by twice the excess.
    first = Point(start, excess(start))
    stride = jnp.exp(jnp.clip(2 * jnp.abs(first.excess), _LEAST_STRIDE, math.log(2)))
    walk = _while(_goes_on, body, _Walk(first, first, stride, stride > 1))
    return walk.before, walk.now


@jax.jit
def _goes_on(walk: _Walk) -> jax.Array:
    # A stride that changes nothing has reached an end.
    return ((walk.before.excess > 0) == (walk.now.excess > 0)) & walk.moved


@functools.partial(jax.jit, static_argnums=(1, 2))
def _next_point(walk: _Walk, increasing: bool, ends: tuple[float, float]) -> jax.Array:
    x, stride = walk.now.at, walk.stride
    up = (walk.now.excess > 0) != increasing
    return jnp.clip(jnp.where(up, x * stride, x / stride), *ends)


@jax.jit
def _walk(walk: _Walk, reached: Point) -> _Walk:
    stride, moved = walk.stride * walk.stride, reached.at != walk.now.at
    return _Walk(walk.now, reached, stride, moved)


@jax.jit
def crossing(first: Point, second: Point) -> tuple[jax.Array, Point, Point]:
    """Whether the excess changed its sign, and the bad and the good end of the bracket.

    If the excess did not change its sign, the walk stopped at an end of the range. The
    bracket is then a fixed one of width zero, whose result is not used.
    """
    crossed = (first.excess > 0) != (second.excess > 0)

    def pick(x: jax.Array, y: jax.Array, spare: float) -> jax.Array:
        return jnp.where(crossed, jnp.where(first.excess > 0, x, y), spare)

    bad = Point(*map(pick, first, second, (1.0, 1.0)))
    good = Point(*map(pick, second, first, (1.0, -1.0)))
    return crossed, bad, good


def close(excess: _Function, bad: Point, good: Point, tolerance: float) -> jax.Array:
    """The good end of the bracket once its relative width is at most the tolerance.

    The method is ITP in the log of the parameter, in which most accountants are nearly
    linear. The good end is always a point where the excess was evaluated and found to
    be at most 0.

    Reference: Oliveira and Takahashi (2020), https://doi.org/10.1145/3423597, with
    κ₁ (b − a) = 0.2, κ₂ = 2, n₀ = 1.
    """

    def cond(bracket: _Bracket) -> jax.Array:
        return _is_open(bracket, tolerance)

    def body(bracket: _Bracket) -> _Bracket:
        middle = _aim(bracket, tolerance)
        return _narrower(bracket, Point(middle, excess(middle)))

    return _while(cond, body, _open_bracket(bad, good, tolerance)).good.at


@functools.partial(jax.jit, static_argnums=2)
def _open_bracket(bad: Point, good: Point, tolerance: float) -> _Bracket:
    width = jnp.abs(jnp.log(good.at) - jnp.log(bad.at))
    # The radius ρ of the reference: the largest half-width that bisection would have
    # before each step, with one step to spare.
    halvings = jnp.ceil(jnp.log2(jnp.maximum(width / tolerance, 1.0)))
    curvature = 0.2 / jnp.maximum(width, tolerance)
    return _Bracket(bad, good, tolerance * jnp.exp2(halvings), curvature)


@functools.partial(jax.jit, static_argnums=1)
def _is_open(bracket: _Bracket, tolerance: float) -> jax.Array:
    return jnp.abs(jnp.log(bracket.good.at) - jnp.log(bracket.bad.at)) > tolerance


@functools.partial(jax.jit, static_argnums=1)
def _aim(bracket: _Bracket, tolerance: float) -> jax.Array:
    """The next parameter to evaluate: near the secant's zero, clipped by ITP's radius.

    The clip keeps the number of steps within one of bisection's.
    """
    high, low = bracket.bad.excess, bracket.good.excess
    a, b = jnp.log(bracket.bad.at), jnp.log(bracket.good.at)
    width, half = jnp.abs(b - a), (a + b) / 2
    secant = a + (b - a) * high / (high - low)
    # Evaluate at least half a tolerance past the secant's zero, so that both ends of
    # the bracket move.
    nudge = jnp.maximum(bracket.curvature * width * width, 0.5 * tolerance)
    nudge = jnp.minimum(nudge, jnp.abs(half - secant))
    aim = secant + jnp.sign(half - secant) * nudge
    reach = jnp.maximum(bracket.radius - width / 2, 0.0)
    return jnp.exp(jnp.clip(aim, half - reach, half + reach))


@jax.jit
def _narrower(bracket: _Bracket, middle: Point) -> _Bracket:
    # The new point replaces the end whose sign it shares, so the bracket stays valid.
    ok = middle.excess <= 0

    def better(x: Point, y: Point) -> Point:
        return Point(*(jnp.where(ok, *pair) for pair in zip(x, y, strict=True)))

    bad, good = better(bracket.bad, middle), better(middle, bracket.good)
    return _Bracket(bad, good, bracket.radius / 2, bracket.curvature)
