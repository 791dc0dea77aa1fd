"""Roots from the side on which a bound holds, and their derivatives.

A search errs by its last step, and a bound must not: so every search here ends on the
side that its caller calls good, whatever was rounded on the way. Searches are not
differentiated. The implicit function theorem gives a root's derivatives, from the
function at the root alone.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dpjax._core.float64 import TINY, ULP, scoped

_MAX_NEWTON_STEPS = 100
_Condition = Callable[[jax.Array], jax.Array]


def newton(fn: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Newton's method for a zero of a concave function, from its good side.

    A tangent of a concave function lies above it, so the iterates approach the zero
    from the side on which the function is negative, and never cross it.
    """

    def cond(state):
        steps, x, previous = state
        return (steps < _MAX_NEWTON_STEPS) & (jnp.abs(x - previous) > 2 * ULP * x)

    def body(state):
        steps, x, _ = state
        value, slope = jax.jvp(fn, (x,), (jnp.ones_like(x),))
        moved = x - value / slope
        return steps + 1, jnp.where(jnp.isfinite(moved) & (moved >= 0), moved, x), x

    _, x, _ = jax.lax.while_loop(cond, body, (0, start, jnp.full_like(start, jnp.inf)))
    return x


def nudge(holds: _Condition, x: jax.Array, direction: float) -> jax.Array:
    """Move x by a few ulps, doubling, until holds(x)."""

    def cond(state):
        x, bump = state
        return ~holds(x) & jnp.isfinite(bump)

    def body(state):
        x, bump = state
        return jnp.maximum(x + direction * bump, 0.0), 2 * bump

    bump = 2 * ULP * x + TINY
    return jax.lax.while_loop(cond, body, (x, bump))[0]


def bisect(
    holds: _Condition, fails: jax.Array, good: jax.Array, times: int
) -> jax.Array:
    """The good end of a bracket, halved so often: what holds there is never lost.

    At the other end nothing is asked. Several brackets are halved side by side.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]):
        fails, good = ends
        middle = (fails + good) / 2
        ok = holds(middle)
        return jnp.where(ok, fails, middle), jnp.where(ok, middle, good)

    return jax.lax.fori_loop(0, times, halve, (fails, good))[1]


def implicit_derivative(
    residual: Callable[..., jax.Array], root: jax.Array, met: jax.Array
) -> jax.Array:
    """The root with the derivatives that the implicit function theorem gives it.

    The residual is evaluated for them alone. Where it was not met there are none.
    """
    residual, constants = jax.closure_convert(residual, root)

    @jax.custom_jvp
    def found(root: jax.Array, met: jax.Array, *constants: jax.Array) -> jax.Array:
        return root

    @found.defjvp
    @scoped
    def _(
        primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        root, met, *constants = primals
        x = jnp.where(met, found(*primals), jnp.ones_like(root))
        by_x = jax.jvp(lambda x: residual(x, *constants), (x,), (jnp.ones_like(x),))[1]
        moved = jax.jvp(
            lambda *c: residual(x, *c), tuple(constants), tuple(tangents[2:])
        )[1]
        moves = met & (by_x != 0) & jnp.isfinite(by_x)
        return root, jnp.where(moves, -moved / jnp.where(moves, by_x, 1.0), 0.0)

    return found(jax.lax.stop_gradient(root), met, *constants)


def attach_derivative(fn: Callable[[], jax.Array], value: jax.Array) -> jax.Array:
    """The value with the derivatives of fn(), which is evaluated for them alone."""
    fn, constants = jax.closure_convert(fn)

    @jax.custom_jvp
    def known(value: jax.Array, *constants: jax.Array) -> jax.Array:
        return value

    @known.defjvp
    @scoped
    def _(
        primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        value, *constants = primals
        return value, jax.jvp(fn, tuple(constants), tuple(tangents[1:]))[1]

    return known(jax.lax.stop_gradient(value), *constants)
