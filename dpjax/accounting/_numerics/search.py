"""The search for the parameter at which a monotone function crosses zero.

It walks until the function has changed its sign, and then closes in. Over concrete
numbers it calls the function as it is, which may be compiled; what lies between is
compiled here, once, and not operation by operation.
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
_LEAST_STRIDE = 1e-3  # of the logarithm; ten squares of it are far


class Point(NamedTuple):
    """A parameter, and by how much its ε is too large."""

    at: jax.Array
    excess: jax.Array


class _Walk(NamedTuple):
    """Two points one after the other, and by which factor to go on."""

    before: Point
    now: Point
    stride: jax.Array
    moved: jax.Array


class _Bracket(NamedTuple):
    """A point where the excess is positive, and one where it is not.

    Attributes:
      bad: the former.
      good: the latter.
      radius: half the width that bisection would have left by now, on the logarithm.
      curvature: how far from the secant's zero to ask, over the square of the width.
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
    """A loop that compiles nothing when its state is concrete."""
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

    The first stride is by two, or less where little is missing: log ε seldom falls more
    slowly than the root of the parameter grows.

    Returns the last two points, the last one at an end if the sign never changed.
    """

    def body(walk: _Walk) -> _Walk:
        further = _next_point(walk, increasing, ends)
        return _walk(walk, Point(further, excess(further)))

    first = Point(start, excess(start))
    stride = jnp.exp(jnp.clip(2 * jnp.abs(first.excess), _LEAST_STRIDE, math.log(2)))
    walk = _while(_goes_on, body, _Walk(first, first, stride, stride > 1))
    return walk.before, walk.now


@jax.jit
def _goes_on(walk: _Walk) -> jax.Array:
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
    """Whether the excess changed its sign, and the bad and the good end.

    Without a crossing the search ended at an end, and any closed bracket will do.
    """
    crossed = (first.excess > 0) != (second.excess > 0)

    def pick(x: jax.Array, y: jax.Array, spare: float) -> jax.Array:
        return jnp.where(crossed, jnp.where(first.excess > 0, x, y), spare)

    bad = Point(*map(pick, first, second, (1.0, 1.0)))
    good = Point(*map(pick, second, first, (1.0, -1.0)))
    return crossed, bad, good


def close(excess: _Function, bad: Point, good: Point, tolerance: float) -> jax.Array:
    """The good end of the bracket once its relative width is at most the tolerance.

    The ITP method on the logarithm, on which most accountants are nearly straight. The
    good end is always a point at which the excess was asked for, and at most 0.

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
    # Their radius ρ: the widest half bracket that bisection would leave before each
    # step, and one more.
    halvings = jnp.ceil(jnp.log2(jnp.maximum(width / tolerance, 1.0)))
    curvature = 0.2 / jnp.maximum(width, tolerance)
    return _Bracket(bad, good, tolerance * jnp.exp2(halvings), curvature)


@functools.partial(jax.jit, static_argnums=1)
def _is_open(bracket: _Bracket, tolerance: float) -> jax.Array:
    return jnp.abs(jnp.log(bracket.good.at) - jnp.log(bracket.bad.at)) > tolerance


@functools.partial(jax.jit, static_argnums=1)
def _aim(bracket: _Bracket, tolerance: float) -> jax.Array:
    """Where to ask: near the secant's zero, and no further off than bisection."""
    high, low = bracket.bad.excess, bracket.good.excess
    a, b = jnp.log(bracket.bad.at), jnp.log(bracket.good.at)
    width, half = jnp.abs(b - a), (a + b) / 2
    secant = a + (b - a) * high / (high - low)
    # Half a tolerance past the secant's zero at least, so that both ends move.
    nudge = jnp.maximum(bracket.curvature * width * width, 0.5 * tolerance)
    nudge = jnp.minimum(nudge, jnp.abs(half - secant))
    aim = secant + jnp.sign(half - secant) * nudge
    reach = jnp.maximum(bracket.radius - width / 2, 0.0)
    return jnp.exp(jnp.clip(aim, half - reach, half + reach))


@jax.jit
def _narrower(bracket: _Bracket, middle: Point) -> _Bracket:
    ok = middle.excess <= 0

    def better(x: Point, y: Point) -> Point:
        return Point(*(jnp.where(ok, *pair) for pair in zip(x, y, strict=True)))

    bad, good = better(bracket.bad, middle), better(middle, bracket.good)
    return _Bracket(bad, good, bracket.radius / 2, bracket.curvature)
