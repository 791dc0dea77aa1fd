"""How far one example moves C x, over all patterns of the steps that it takes part in.

An example that takes part at the steps π, each time by at most 1, moves C x by at most
the root of Σ_{s,t∈π} |(CᵀC)_st|, and by exactly that where CᵀC >= 0 and all its
contributions align. Here are the squares of those, at the worst of the patterns that an
order allows. C is a Toeplitz matrix whose columns have weights, f[T], or f[1] for all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import ULP
from dpjax._matrices.toeplitz import Toeplitz

# Points of a filter's state. Between them the value is bounded by its chords.
_GRID = 129
# Places within an epoch are told apart up to this many.
_BUCKETS = 256


def fixed(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """The same place in every epoch: exact for C >= 0."""
    c = strategy.coefficients(num_steps)
    if weights.size > 1:
        return jnp.max(by_place(c, weights, n_b))
    ones = jnp.ones_like(c)
    return jnp.square(weights[0]) * jax.lax.cond(
        jnp.all(c >= 0),
        lambda: _comb(c, n_b),
        lambda: jnp.max(by_place(c, ones, n_b)),
    )


def fixed_bound(strategy: Toeplitz, num_steps: int, n_b: int) -> jax.Array:
    """The same place in every epoch: as `fixed`, for |C| in place of C."""
    return _comb(jnp.abs(strategy.coefficients(num_steps)), n_b)


def separated(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """At least n_b steps apart: exact for coefficients that do not grow, unscaled.

    For C >= 0 with coefficients that do not grow, (CᵀC)_st = Σ_{j<T−t} c_j c_{j+t−s}
    grows neither with the gap nor with t, so that nothing is worse than steps 0, n_b,
    2 n_b, ... Others are below such a matrix.
    """
    c = _majorant(strategy.coefficients(num_steps))
    return jnp.square(jnp.max(weights)) * _comb(c, n_b)


def reshuffled(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """At any one step of each epoch, where the epoch's largest column is everywhere."""
    columns = jnp.broadcast_to(weights, (num_steps,))
    largest = jnp.max(_by_epoch(columns, n_b), axis=1)
    if strategy.num_vectors <= 1:
        return _by_state(strategy, largest, num_steps, n_b)
    c = _majorant(strategy.coefficients(num_steps))
    return _by_pairs(c, largest, n_b)


def _majorant(c: jax.Array) -> jax.Array:
    """The least coefficients above |c| that do not grow."""
    return jax.lax.cummax(jnp.abs(c), reverse=True)


def _by_epoch(x: jax.Array, n_b: int) -> jax.Array:
    """f[T] as f[E, n_b], with zeros at the end."""
    return jnp.pad(x, (0, -x.size % n_b)).reshape(-1, n_b)


def _comb(c: jax.Array, n_b: int) -> jax.Array:
    """Σ_i (Σ_e c_{i−e n_b})²: at the first place, the worst for C >= 0."""
    moved = jnp.cumsum(_by_epoch(c, n_b), axis=0).ravel()[: c.size]
    return moved @ moved


def by_place(c: jax.Array, weights: jax.Array, n_b: int) -> jax.Array:
    """Σ_{s,t∈π} |(CᵀC)_st| for each place in the epoch, f[n_b]; weights f[T]."""
    steps = jnp.arange(c.size)

    def with_gap(total: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        # (CᵀC)_st = Σ_{j<T−t} c_j c_{j+t−s} for t − s = k n_b.
        later = jnp.where(steps < c.size - k * n_b, jnp.roll(c, -k * n_b), 0.0)
        # Products of any sign cancel, and sums of T err by T roundings of ‖c‖² each.
        entry = jnp.abs(jnp.cumsum(c * later)[::-1]) + c.size * ULP * (c @ c)
        entry = entry * weights * jnp.roll(weights, k * n_b)
        entry = jnp.where(steps >= k * n_b, entry, 0.0)
        both = jnp.where(k == 0, 1.0, 2.0)
        return total + both * jnp.sum(_by_epoch(entry, n_b), axis=0), None

    gaps = jnp.arange(-(-c.size // n_b))
    return jax.lax.scan(with_gap, jnp.zeros(n_b, c.dtype), gaps)[0]


def _by_state(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """A dynamic programme over the one number that a filter of first order remembers.

    With c_k = ρ b^{k−1} the filter is w_t = u_t + ρ v_{t−1}, v_t = b v_{t−1} + u_t, and
    u_t is the epoch's weight f[E] at the steps of the pattern. The most that Σ w² can
    still become is, as a function of v >= 0, a maximum of quadratic functions that
    grow: it is convex, and its chords are above it.
    """
    a, b = (
        -jnp.sum(jnp.asarray(x, jnp.float64))  # of one or none
        for x in (strategy.numerator, strategy.denominator)
    )
    rho, b = jnp.abs(b - a), jnp.abs(b)
    num_epochs = weights.size
    places = jnp.linspace(0.0, 1.0, _GRID)
    powers = jnp.power(b, jnp.arange(n_b + 1))
    sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.square(powers))])
    # The largest v before each epoch, the latest step having been the epoch's last, or
    # its first where the filter grows.
    latest = jnp.maximum(powers[n_b - 1], 1.0)
    _, tops = jax.lax.scan(
        lambda top, u: (powers[n_b] * top + u * latest, top),
        jnp.zeros(()),
        jnp.append(weights, 0.0),
    )

    def epoch(
        value: jax.Array, top: jax.Array, end: jax.Array, u: jax.Array, size: int
    ) -> jax.Array:
        """The most from the beginning of an epoch on, for v on the grid up to top."""
        r = jnp.arange(size)
        after = sums[size - 1 - r]
        # Σ_{t≠r} (ρ b^t v + [t > r] ρ b^{t−1−r} u)² + (u + ρ b^r v)²
        square = rho**2 * sums[size]
        linear = 2 * rho * u * (powers[r] + rho * powers[r + 1] * after)
        constant = u * u * (1 + rho**2 * after)

        def best(v: jax.Array) -> jax.Array:
            left = powers[size] * v + u * powers[size - 1 - r]
            at = jnp.clip(left / end, 0.0, 1.0) * (_GRID - 1)
            low = jnp.minimum(at.astype(jnp.int32), _GRID - 2)
            chord = value[low] + (at - low) * (value[low + 1] - value[low])
            return jnp.max(square * v * v + linear * v + constant + chord)

        return jax.lax.map(best, places * top)

    last = num_steps - (num_epochs - 1) * n_b
    *_, u = weights
    value = epoch(jnp.zeros(_GRID), tops[num_epochs - 1], tops[num_epochs], u, last)
    value, _ = jax.lax.scan(
        lambda value, ends: (epoch(value, *ends, n_b), None),
        value,
        (tops[: num_epochs - 1], tops[1:num_epochs], weights[:-1]),
        reverse=True,
    )
    return value[0]


def _by_pairs(c: jax.Array, weights: jax.Array, n_b: int) -> jax.Array:
    """An upper bound for coefficients that do not grow: neighbouring epochs exactly.

    With g(k) for (CᵀC)_st at gap k, times both epochs' weights f[E], a pair of epochs
    e < f has the gap (f − e) n_b + r_f − r_e. For neighbours the worst places r are
    found by a dynamic programme. For others g is at most what either place alone
    allows, and so at most half of both, which are sums over epochs.
    """
    num_steps = c.size
    epochs = jnp.arange(weights.size)
    cuts = np.unique(np.linspace(0, n_b, min(_BUCKETS, n_b) + 1).astype(int))
    first, last = jnp.asarray(cuts[:-1]), jnp.asarray(cuts[1:] - 1)
    spectrum = jnp.fft.rfft(c, 2 * num_steps)

    def gram(f: jax.Array) -> jax.Array:
        """By the gap, where the later step is in epoch f or after it."""
        kept = jnp.where(jnp.arange(num_steps) < num_steps - f * n_b, c, 0.0)
        kept = jnp.conj(jnp.fft.rfft(kept, 2 * num_steps))
        g = jnp.fft.irfft(spectrum * kept, 2 * num_steps)[:num_steps]
        # What the transforms round by, and gaps beyond the run.
        error = 64 * ULP * jnp.log2(2.0 * num_steps) * jnp.sum(jnp.square(c))
        return jnp.append(g + error, 0.0)

    def at(g: jax.Array, gap: jax.Array) -> jax.Array:
        return g[jnp.minimum(gap, num_steps)]

    def far(f: jax.Array, by_place: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """For all epochs two or more before f, f[E, places]."""
        apart = (f - epochs)[:, None]
        both = (weights[f] * weights)[:, None]
        return jnp.where(apart >= 2, both * by_place(jnp.maximum(apart, 2)), 0.0)

    def owed(total: jax.Array, f: jax.Array) -> tuple[jax.Array, None]:
        g = gram(f)
        return total + far(f, lambda apart: at(g, apart * n_b - last[None])), None

    def epoch(
        best: jax.Array, now: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        f, ahead = now
        g = gram(f)
        gaps = n_b + first[None, :] - last[:, None]
        both = weights[f] * weights[f - 1]
        near = jnp.max(best[:, None] + 2 * both * at(g, gaps), axis=0)
        behind = far(f, lambda apart: at(g, (apart - 1) * n_b + 1 + first[None]))
        own = jnp.square(weights[f]) * g[0] + ahead + jnp.sum(behind, axis=0)
        return own + jnp.where(f == 0, 0.0, near), None

    nothing = jnp.zeros((epochs.size, first.size))
    ahead, _ = jax.lax.scan(owed, nothing, epochs)
    best, _ = jax.lax.scan(epoch, nothing[0], (epochs, ahead))
    return jnp.max(best)
