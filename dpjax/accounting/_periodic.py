"""The minorant in closed form where every step is alike and one batch in l differs.

One of every l steps uses the differing example: it moves two runs apart by r noise
standard deviations. All steps are c-Lipschitz, and the last use has m steps from it to
the end, itself included. Between two uses the points of the minorant rise only once, so
that the last n uses make n blocks of l steps (the last one of m). Started at distance Δ
just after an earlier use, there is a block of l − 1 steps before them.

For c <= 1 the slopes of the blocks between the first and the last fall, so they are
pooled, and what is left is a minorant of three blocks. For c > 1 they grow: each is a
block of its own, save those that the distance Δ at the start absorbs.

Everything is in noise standard deviations of one step, with y = log c, and Σ_{i<k} e^{iy}
is evaluated so that it and its derivatives are right at c = 1.
"""

import jax
import jax.numpy as jnp
import numpy as np

_TINY = np.finfo(np.float64).tiny


def _expm1_ratio(t: jax.Array) -> jax.Array:
    """(e^t − 1)/t for t <= 0, with all derivatives at 0."""
    near = jnp.abs(t) < 1e-2
    small, large = jnp.where(near, t, 0.0), jnp.where(near, -1.0, t)
    series = jnp.ones_like(t)
    for i in range(9, 1, -1):
        series = 1 + series * small / i
    return jnp.where(near, series, jnp.expm1(large) / large)


def geometric(y: jax.Array, count: jax.Array) -> jax.Array:
    """Σ_{i<count} e^{iy} for y <= 0."""
    return count * _expm1_ratio(count * y) / _expm1_ratio(y)


def _edge(d: jax.Array, v: jax.Array) -> jax.Array:
    """d²/v; a rise without a run costs everything, and nothing costs nothing."""
    noisy = v > 0
    return jnp.where(
        noisy, d * d / jnp.where(noisy, v, 1.0), jnp.where(d > 0, jnp.inf, 0)
    )


def _two(a: tuple, b: tuple) -> jax.Array:
    """The sum of rise²/run over the minorant of two blocks."""
    pooled = _edge(a[0] + b[0], a[1] + b[1])
    return jnp.where(a[0] * b[1] >= b[0] * a[1], pooled, _edge(*a) + _edge(*b))


def _three(a: tuple, b: tuple, c: tuple) -> jax.Array:
    """The sum of rise²/run over the minorant of three blocks."""
    ab, bc = (a[0] + b[0], a[1] + b[1]), (b[0] + c[0], b[1] + c[1])
    first = a[0] * b[1] >= b[0] * a[1]
    second = b[0] * c[1] >= c[0] * b[1]
    apart = _edge(*a) + _edge(*b) + _edge(*c)
    return jnp.where(first, _two(ab, c), jnp.where(second, _two(a, bc), apart))


def _contracting(y, r, start, l, m, n):  # noqa: E741
    """c <= 1: the energy of the last n uses, started with a distance unless it is 0."""
    last = r * jnp.exp((m - 1) * y), geometric(2 * y, m)
    between = jnp.maximum(n - 1, 0)
    middle = (
        r * jnp.exp((m - 1 + l) * y) * geometric(l * y, between),
        jnp.exp(2 * m * y) * geometric(2 * y, l * between),
    )
    before = (
        start * jnp.exp((m - 1 + n * l) * y),
        jnp.exp(2 * (m + (n - 1) * l) * y) * geometric(2 * y, l - 1),
    )
    unused = _edge(start * jnp.exp((m - 1) * y), geometric(2 * y, m - 1))
    return jnp.where(n > 0, _three(before, middle, last), unused)


def _expanding(y, r, start, l, m, n):  # noqa: E741
    """c >= 1: the same with a distance, where it absorbs all uses but the last."""
    z = -y  # the weights fall: e^{iz} after i steps
    runs = geometric(2 * z, l)

    def absorbed(k: jax.Array) -> tuple:
        """The distance and the k uses after it."""
        rise = start + r * jnp.exp(l * z) * geometric(l * z, k)
        return rise, jnp.exp(2 * z) * geometric(2 * z, l * (k + 1) - 1)

    def takes(a: tuple, k: jax.Array, run: jax.Array) -> jax.Array:
        """Whether a is steeper than the k-th use with that run."""
        return a[0] * jnp.exp(l * k * z) * run >= r * a[1]

    before = absorbed(jnp.maximum(n - 2, 0))
    reached = (n < 2) | takes(before, n - 1, runs)
    a, run, weight = (
        absorbed(jnp.maximum(n - 1, 0)),
        geometric(2 * z, m),
        jnp.exp(l * n * z),
    )
    pooled = _edge(a[0] + r * weight, a[1] + weight * weight * run)
    used = jnp.where(takes(a, n, run), pooled, _edge(*a) + _edge(r, run))
    unused = _edge(start, jnp.exp(2 * z) * geometric(2 * z, m - 1))
    return jnp.where(n > 0, jnp.where(reached, used, jnp.inf), unused)


def contraction(y, r, m, *, period: int, epochs: int, reshuffled: bool) -> jax.Array:
    """μ² of all uses, of one setting.

    If batches are reshuffled, m has to be 1. For c <= 1 moving a use to a later step
    never lowers the bound, so that the last step of each epoch is the worst. For c > 1
    a use with g steps to the next one costs r² / Σ_{i<g} c^{−2i}, which is convex in g,
    so that the worst places alternate between the last and the first of an epoch.
    """
    down, up = jnp.minimum(y, 0.0), jnp.maximum(y, 0.0)
    one, zero = jnp.ones_like(y), jnp.zeros_like(y)
    falling = _contracting(down, r, zero, period * one, m, epochs * one)
    last = 1 / geometric(-2 * up, m)
    if reshuffled:
        far = epochs // 2
        rest = epochs - 1 - far + far / geometric(-2 * up, (2 * period - 1) * one)
    else:
        rest = (epochs - 1) / geometric(-2 * up, period * one)
    return jnp.where(y <= 0, falling, r * r * (rest + last))


def restarted(
    y, r, start, m, *, period: int, epochs: int, reshuffled: bool
) -> jax.Array:
    """μ² from the best step at which the distance is at most `start`, of one setting.

    Candidates are the steps right after a use, and for reshuffled batches with c > 1
    the last step alone.
    """
    down, up = jnp.minimum(y, 0.0), jnp.maximum(y, 0.0)
    n = jnp.arange(epochs, dtype=y.dtype)
    one = jnp.ones_like(n)
    falling = jnp.min(_contracting(down * one, r, start, period, m, n))
    if reshuffled:
        growing = jnp.square(jnp.exp(up) * start + r)
    else:
        growing = jnp.min(_expanding(up * one, r, start, period, m, n))
    return jnp.where(y <= 0, falling, growing)
