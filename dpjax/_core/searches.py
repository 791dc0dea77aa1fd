"""Roots from the side on which a bound holds, and their derivatives.

A search is off by up to its last step, but a bound must hold exactly. So every search
of this module ends on the side that its caller calls good, despite rounding errors on
the way. JAX does not differentiate through the searches. The implicit function theorem
gives the derivatives of a root from the function at the root alone.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dpjax._core.float64 import TINY, ULP, scoped

# A cap in case rounding errors prevent convergence, which takes far fewer steps.
_MAX_NEWTON_STEPS = 100
_Condition = Callable[[jax.Array], jax.Array]


def newton(fn: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Newton's method for a zero of a concave function, from the function's good side.

    A tangent of a concave function is nowhere below the function. So the iterates
    approach the zero from the side on which the function is negative, and never cross
    the zero.
    """

    def cond(state):
        steps, x, previous = state
        return (steps < _MAX_NEWTON_STEPS) & (jnp.abs(x - previous) > 2 * ULP * x)

    def body(state):
        steps, x, _ = state
        value, slope = jax.jvp(fn, (x,), (jnp.ones_like(x),))
        moved = x - value / slope
        # A step that is not finite, or leads below 0, is not taken. This ends the loop.
        return steps + 1, jnp.where(jnp.isfinite(moved) & (moved >= 0), moved, x), x

    _, x, _ = jax.lax.while_loop(cond, body, (0, start, jnp.full_like(start, jnp.inf)))
    return x


def nudge(holds: _Condition, x: jax.Array, direction: float) -> jax.Array:
    """Move x in a direction, by steps that double from a few ulps, until holds(x).

    The direction is 1.0 or −1.0; the result is at least 0.
    """

    def cond(state):
        x, bump = state
        return ~holds(x) & jnp.isfinite(bump)

    def body(state):
        x, bump = state
        return jnp.maximum(x + direction * bump, 0.0), 2 * bump

    # TINY moves x = 0, too. The loop also ends once the step is infinite.
    bump = 2 * ULP * x + TINY
    return jax.lax.while_loop(cond, body, (x, bump))[0]


def bisect(
    holds: _Condition, fails: jax.Array, good: jax.Array, times: int
) -> jax.Array:
    """The good end of a bracket that is halved `times` times.

    The condition holds at the good end on input, and so at the result. Nothing is
    assumed about the other end. Arrays of brackets are halved elementwise.
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
    """The root, with derivatives by the implicit function theorem.

    The residual is evaluated only for derivatives. Where `met` is false, the search
    found no root, and the derivatives are zero.
    """
    # JAX's custom rules see explicit arguments only, so captured tracers become some.
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
        # `found`, not `root`: second derivatives then see that the root moves. Where no
        # root was met, 1 keeps the residual's derivatives finite.
        x = jnp.where(met, found(*primals), jnp.ones_like(root))
        by_x = jax.jvp(lambda x: residual(x, *constants), (x,), (jnp.ones_like(x),))[1]
        moved = jax.jvp(
            lambda *c: residual(x, *c), tuple(constants), tuple(tangents[2:])
        )[1]
        # dx = −(∂residual/∂c · dc) / (∂residual/∂x). The inner `where` keeps a division
        # by zero out of second derivatives.
        moves = met & (by_x != 0) & jnp.isfinite(by_x)
        return root, jnp.where(moves, -moved / jnp.where(moves, by_x, 1.0), 0.0)

    # stop_gradient: nothing may differentiate through the search that made the root.
    return found(jax.lax.stop_gradient(root), met, *constants)


def attach_derivative(fn: Callable[[], jax.Array], value: jax.Array) -> jax.Array:
    """The value, with the derivatives of fn(), which is evaluated only for these."""
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

    # stop_gradient: the value's own derivatives must not add to those of fn().
    return known(jax.lax.stop_gradient(value), *constants)
