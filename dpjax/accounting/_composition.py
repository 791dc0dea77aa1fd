"""δ(ε) and ε(δ) of composed mechanisms, each given by its kind and five numbers.

The numbers are those of `pld.Mechanism`: μ or the noise multiplier, the sampling rate,
the count, and the sizes of the data set and of a batch that may overflow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._float64 import float64
from dpjax.accounting import _inversion, _overflow, _pairs, gdp
from dpjax.accounting._implicit import with_derivative

_PAIRS = {
    "poisson": lambda s, q, tail: _pairs.poisson(1 / s, q, tail),
    "poisson_replace": lambda s, q, tail: _pairs.poisson_replace(1 / s, q, tail),
    "fixed_size": _pairs.fixed_size,
}
_TRUNCATED = {"truncated": "poisson", "truncated_replace": "poisson_replace"}
NUMBERS = 5
_BISECTIONS = 44
_GLANCE = 1536  # frequencies that show about where ε or δ is
_LOST = 3e-5  # the share of δ that infinite losses may take
_SMALLEST = 1e-30  # the δ below which δ(ε) is no longer tight


def _composed(
    kinds: Sequence[str], parameters: Sequence[jax.Array], delta: jax.Array
) -> tuple[_inversion.Parts, jax.Array, int]:
    """Discrete losses with their counts, the Gaussian variance, and the directions.

    They are made for a δ of about that size, or larger.
    """
    variance, parts = jnp.zeros(()), []
    for i, kind in enumerate(kinds):
        x, rate, count, *sizes = parameters[NUMBERS * i : NUMBERS * (i + 1)]
        if kind == "gaussian":
            variance += count * x * x
        else:
            share = _LOST * delta / (len(kinds) * jnp.maximum(count, 1.0))
            pair = _PAIRS[_TRUNCATED.get(kind, kind)](x, rate, share)
            if kind in _TRUNCATED:
                pair = _overflow.truncated(pair, 1 / x, rate, share, *sizes)
            parts.append((pair, count))
    directions = max((losses.lost.size for losses, _ in parts), default=1)
    return parts, variance, directions


def _worst_direction(
    bound: Callable[..., jax.Array],
    parts: _inversion.Parts,
    directions: int,
) -> jax.Array:
    """The larger of a bound on δ or ε with the data sets in one order or the other."""

    def one(rows: Any) -> jax.Array:
        return bound(
            [
                (losses._replace(loss=x, log_mass=m, lost=p), count)
                for (losses, count), (x, m, p) in zip(parts, rows, strict=True)
            ]
        )

    rows = [
        tuple(
            jnp.broadcast_to(a, (directions, *a.shape[1:]))
            for a in (losses.loss, losses.log_mass, losses.lost)
        )
        for losses, _ in parts
    ]
    return jnp.max(jax.lax.map(one, rows))


def _checked(core: Callable[..., jax.Array], worst: float) -> Callable[..., jax.Array]:
    """The core for batches, one after the other, with 0 and `worst` where they belong.

    It answers 0 if nothing is released, `worst` if a parameter is out of range.
    """

    def scalar(asked: jax.Array, *parameters: jax.Array, kinds: Sequence[str]):
        nothing, valid, safe = jnp.array(True), ~jnp.isnan(asked), []
        for i, kind in enumerate(kinds):
            x, rate, count, *sizes = parameters[NUMBERS * i : NUMBERS * (i + 1)]
            silent = x == 0 if kind in ("gaussian", "fixed_size") else x == jnp.inf
            idle = silent | (rate == 0) | (count == 0)
            whole = (count >= 0) & (count == jnp.floor(count)) & (count < jnp.inf)
            valid &= (x >= 0) & (rate >= 0) & (rate <= 1) & whole
            usable = valid & ~idle & (x > 0) & (x < jnp.inf)
            nothing &= idle
            safe += [
                jnp.where(usable, x, 1.0),
                jnp.where(usable, rate, 0.5),
                jnp.where(usable, count, 0.0),
                *sizes,
            ]
            valid &= usable | idle
        value = core(asked, *safe, kinds=kinds)
        value = jnp.where(jnp.isnan(value), worst, value)
        return jnp.where(valid, jnp.where(nothing, 0.0, value), worst)

    def batched(*args: jax.Array, kinds: Sequence[str]) -> jax.Array:
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        if shape == ():
            return scalar(*args, kinds=kinds)
        flat = [jnp.broadcast_to(x, shape).ravel() for x in args]
        return jax.lax.map(lambda xs: scalar(*xs, kinds=kinds), flat).reshape(shape)

    return batched


def _delta(epsilon: jax.Array, *parameters: jax.Array, kinds: Sequence[str]):
    inside = (epsilon >= 0) & (epsilon < jnp.inf)
    asked = jnp.where(inside, epsilon, 1.0)
    fixed, at = jax.lax.stop_gradient((parameters, asked))
    parts, variance, directions = _composed(kinds, fixed, jnp.asarray(_SMALLEST))

    if not parts:
        return gdp._delta(jnp.sqrt(variance), epsilon)

    def glance(parts: _inversion.Parts) -> jax.Array:
        look, cumulants = _looker(parts, variance)
        about = _inversion.markov_log_delta(cumulants, at)
        about = jnp.minimum(about, _inversion.log_delta_apart(parts, variance, at))
        about = jnp.clip(about, jnp.log(_SMALLEST), 0.0)
        wave = look((at, at), about, glance=True)
        about = jnp.minimum(_inversion.log_delta(wave, at), about)
        return jnp.maximum(about, jnp.log(_SMALLEST))

    # What is lost may be a share of δ: with that much, tilted sums are much smaller. A
    # glance may be far above δ.
    about = jax.lax.stop_gradient(_worst_direction(glance, parts, directions))
    parts, total_variance, _ = _composed(kinds, parameters, jnp.exp(about) / 100)

    def bound(parts: _inversion.Parts) -> jax.Array:
        look, _ = _looker(parts, total_variance)
        together = _inversion.log_delta(look((at, at), about), asked)
        apart = _inversion.log_delta_apart(parts, total_variance, asked)
        return jnp.exp(jnp.minimum(jnp.minimum(together, apart), 0.0))

    value = _worst_direction(bound, parts, directions)
    return jnp.where(inside, value, jnp.where(epsilon == jnp.inf, 0.0, 1.0))


def _epsilon(delta: jax.Array, *parameters: jax.Array, kinds: Sequence[str]):
    inside = (delta > 0) & (delta < 1)
    asked = jnp.where(inside, delta, 0.5)
    target = jnp.log(asked)
    about = jax.lax.stop_gradient(asked)
    parts, variance, directions = _composed(kinds, parameters, about)

    if not parts:
        return gdp._epsilon(jnp.sqrt(variance), delta)

    def bound(parts: _inversion.Parts) -> jax.Array:
        look, cumulants = _looker(parts, variance)
        fixed = jax.lax.stop_gradient(target)

        def apart(epsilon: jax.Array) -> jax.Array:
            return _inversion.log_delta_apart(parts, variance, epsilon) - target

        def together(epsilon: jax.Array) -> jax.Array:
            return _inversion.log_delta(wave, epsilon) - target

        about = _inversion.markov_epsilon(cumulants, fixed)
        naive = _root(apart, about)
        seen = look((jnp.zeros(()), about), fixed, glance=True)
        found = _least(lambda e: _inversion.log_delta(seen, e) - fixed, about)
        about = jnp.minimum(found, about)
        wave = look((about, about), fixed)

        return jnp.minimum(naive, _root(together, about + wave.tilt.period / 4))

    value = _worst_direction(bound, parts, directions)
    return jnp.where(inside, value, jnp.where(delta >= 1, 0.0, jnp.inf))


def _root(excess: Callable[[jax.Array], jax.Array], top: jax.Array) -> jax.Array:
    """`_least`, with derivatives."""
    root = _least(excess, top)
    return with_derivative(excess, root, (root > 0) & (root < jnp.inf))


def _looker(parts: _inversion.Parts, variance: jax.Array):
    """How to get a spectrum for some ε and δ, and the cumulants that decide where.

    Markov's inequality alone may be far off, so callers glance first. Where one looks
    is not differentiated.
    """
    fixed, fixed_variance = jax.lax.stop_gradient((parts, variance))
    cumulants = _inversion.cumulants(fixed, fixed_variance)

    def look(
        epsilon: tuple[jax.Array, jax.Array], log_delta: jax.Array, glance: bool = False
    ) -> _inversion.Spectrum:
        frequencies = _GLANCE if glance else _inversion.FREQUENCIES
        tilt = _inversion.choose(
            cumulants, fixed_variance, epsilon, log_delta, frequencies
        )
        if glance:
            return _inversion.spectrum(fixed, fixed_variance, tilt, frequencies)
        return _inversion.spectrum(parts, variance, tilt, frequencies)

    return look, cumulants


def _least(excess: Callable[[jax.Array], jax.Array], top: jax.Array) -> jax.Array:
    """An ε in [0, top] without excess, by bisection the least; inf if top has some."""

    def met(epsilon: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(excess(epsilon)) <= 0

    def halve(_: int, ends: tuple[jax.Array, jax.Array]):
        low, high = ends
        middle = (low + high) / 2
        ok = met(middle)
        return jnp.where(ok, low, middle), jnp.where(ok, middle, high)

    _, found = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.zeros(()), top))
    found = jnp.where(met(found), found, jnp.inf)
    return jnp.where(met(jnp.zeros(())), 0.0, found)


delta = float64("up", static=("kinds",))(_checked(_delta, 1.0))
epsilon = float64("up", static=("kinds",))(_checked(_epsilon, np.inf))
