"""The maximum change of C x by one example, over the steps that an order allows.

C is the matrix that correlates the noise, and x are the sums of T steps. A pattern π is
the set of steps in which an example takes part. The example's contribution to each of
these steps has norm at most 1. The example moves C x by at most the square root of
Σ_{s,t∈π} |(CᵀC)_st|. The bound is attained where CᵀC >= 0 and all contributions of the
example have the same direction. The functions for each order return the square of this
bound, or a larger number, at the worst pattern π that the order allows. C is a Toeplitz
matrix with the coefficients c_0, …, c_{T−1}, and each column is scaled by a weight. The
weights are f[T], or f[1] if all weights are equal. The function `mu_of` computes the
GDP parameter μ from the bound.

If an example takes part at most k times, then π is any subset of at most k steps of a
pattern that the order allows. Let c be non-negative and non-increasing, and let all
weights be 1. For s <= t, (CᵀC)_st = Σ_{j<T−t} c_j c_{j+t−s} increases neither with the
gap t − s nor with t. The bound therefore never decreases if steps of π move to earlier
steps and no gap grows. The steps of π are counted from 0.

- Let the steps of an example be at least n_b apart, as in a fixed order. The i-th step
  is then at step i n_b or later, and the gap of the i-th and the j-th step is at least
  (j − i) n_b. The worst subset is therefore 0, n_b, …, (k − 1) n_b.
- Let an example take part in any one step of each epoch. Then the i-th element of π is
  in epoch i or later. Move this element to epoch i, and keep its position within the
  epoch. Then no element moves to a later step, and no gap between elements grows. The
  worst subset is therefore in the first k epochs.

For a limit k and weights other than 1, each weight is replaced by the largest weight at
the same step or later. If a step moves to an earlier step, its weight then does not
decrease. Any other sequence c is replaced by the least non-increasing sequence that is
at least |c|. The replacements never reduce the bound.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import ULP
from dpjax._matrices.strategy import Toeplitz, lower, series_error
from dpjax.accounting._schedule import Schedule, mu_of_sensitivity

# Grid points of a filter's state. The value function is convex, so that its chords
# between grid points are upper bounds.
_GRID_POINTS = 129
# The approximate maximum of (grid points) x (steps of an epoch) computed at once.
_MAX_ENTRIES = 2**16
# Steps of an epoch are grouped into at most this many intervals.
_MAX_INTERVALS = 256


def fixed_order(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """The squared sensitivity of C x if an example has the same position in all epochs.

    C is the matrix that correlates the noise, and x are the sums of the steps. The
    value is exact if C has no negative entry, and otherwise an upper bound.

    Args:
      strategy: the Toeplitz matrix whose columns are scaled to give C.
      weights: the factors of the columns, f[T], or one factor, f[1].
      num_steps: T.
      n_b: the number of steps in an epoch.
    """
    c = strategy.coefficients(num_steps)
    if weights.size > 1:
        return jnp.max(squares_by_position(c, weights, n_b))
    return jnp.square(weights[0]) * jax.lax.cond(
        jnp.all(c >= 0),
        lambda: _first_position_square(c, n_b),
        lambda: jnp.max(squares_by_position(c, jnp.ones_like(c), n_b)),
    )


def fixed_order_bound(strategy: Toeplitz, num_steps: int, n_b: int) -> jax.Array:
    """An upper bound on `fixed_order` for weights of 1.

    The coefficients of the matrix are replaced by their absolute values.
    """
    return _first_position_square(jnp.abs(strategy.coefficients(num_steps)), n_b)


def separated_steps(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """An upper bound on the squared sensitivity of C x for steps at least n_b apart.

    C is the Toeplitz matrix `strategy` with columns scaled by `weights`, f[T] or f[1],
    and x are the sums of the steps. If the coefficients are non-negative and
    non-increasing and all weights are equal, the worst steps of an example are 0, n_b,
    2 n_b, … (see the module's docstring), and the bound is exact. Otherwise, the
    function replaces C by a matrix with these properties, whose entries are at least
    the absolute values of the entries of C.
    """
    c = _majorant(strategy.coefficients(num_steps))
    return jnp.square(jnp.max(weights)) * _first_position_square(c, n_b)


def reshuffled_order(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """An upper bound on the squared sensitivity of C x for one step in each epoch.

    C is the Toeplitz matrix `strategy` with columns scaled by `weights`, f[T] or f[1],
    and x are the sums of the steps. An example takes part in one step of each epoch,
    which may be any step. The function replaces each weight by the largest weight of
    the same epoch.
    """
    columns = jnp.broadcast_to(weights, (num_steps,))
    largest = jnp.max(_by_epoch(columns, n_b), axis=1)
    if strategy.num_vectors <= 1:
        return _bound_by_state(strategy, largest, num_steps, n_b)
    return _bound_by_pairs(_majorant(strategy.coefficients(num_steps)), largest, n_b)


def few_separated_steps(
    strategy: Toeplitz, largest: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """An upper bound on the squared sensitivity of C x for k steps at least n_b apart.

    C is the Toeplitz matrix `strategy` with each column scaled by the weight of its
    step, and x are the sums of the steps. The bound also holds for fewer than k steps,
    and for a fixed order, in which an example has the same position in all epochs. The
    argument `largest`, f[E], has an entry for each of the E epochs, and determines k.
    For the first k epochs, the entry is the largest weight of any step from the
    beginning of the epoch on. For all other epochs, the entry is 0.
    """
    c = _majorant(strategy.coefficients(num_steps))
    # Σ_i (Σ_e W_e c_{i−e n_b})² for the steps 0, n_b, 2 n_b, …, where W is `largest`.
    column = (lower(largest) @ _by_epoch(c, n_b)).ravel()[:num_steps]
    return column @ column


def few_reshuffled_steps(
    strategy: Toeplitz, largest: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """An upper bound on the squared sensitivity of C x for k steps in distinct epochs.

    C and x are those of `few_separated_steps`. The bound also holds for fewer than k
    steps. An example may take part in any step of an epoch. The argument `largest`, as
    for `few_separated_steps`, determines k.
    """
    c = jnp.abs(strategy.coefficients(num_steps))
    if strategy.num_vectors > 1:
        return _bound_by_pairs(_majorant(c), largest, n_b)
    return jax.lax.cond(
        jnp.all(c == _majorant(c)),
        lambda: _bound_by_state(strategy, largest, num_steps, n_b),
        lambda: _bound_by_pairs(_majorant(c), largest, n_b),
    )


def _majorant(c: jax.Array) -> jax.Array:
    """The least non-increasing sequence that is at least |c|, f[n], for c, f[n]."""
    return jax.lax.cummax(jnp.abs(c), reverse=True)


def _by_epoch(x: jax.Array, n_b: int) -> jax.Array:
    """Reshape f[T] to one row for each epoch, f[E, n_b], padded with zeros."""
    return jnp.pad(x, (0, -x.size % n_b)).reshape(-1, n_b)


def _first_position_square(c: jax.Array, n_b: int) -> jax.Array:
    """The squared sensitivity of C x to an example at the steps 0, n_b, 2 n_b, ….

    C is the Toeplitz matrix with the coefficients c, and x are the sums of the steps.
    The result is Σ_i (Σ_e c_{i−e n_b})², a sum over steps i and epochs e. If c is
    non-negative, no other position in the epoch has a larger sensitivity.
    """
    column = jnp.cumsum(_by_epoch(c, n_b), axis=0).ravel()[: c.size]
    return column @ column


def squares_by_position(c: jax.Array, weights: jax.Array, n_b: int) -> jax.Array:
    """The squared sensitivity of C x for each position of an example, f[n_b].

    A is the Toeplitz matrix with the coefficients c, f[T]. C is A with each column
    scaled by an entry of the weights w, f[T]. The sums of the steps are x. The steps π
    of an example have the same position in every epoch. The entry for a position is
    Σ_{s,t∈π} w_s w_t |(AᵀA)_st|, an upper bound where AᵀA has negative entries.
    """
    steps = jnp.arange(c.size)

    def add_gap(total: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        # (AᵀA)_st = Σ_{j<T−t} c_j c_{j+t−s} for t − s = k n_b.
        shifted = jnp.where(steps < c.size - k * n_b, jnp.roll(c, -k * n_b), 0.0)
        # Products of either sign may cancel, so the error bound is absolute: a sum of T
        # terms has T rounding errors, each of at most one ulp of ‖c‖².
        entry = jnp.abs(jnp.cumsum(c * shifted)[::-1]) + c.size * ULP * (c @ c)
        entry = entry * weights * jnp.roll(weights, k * n_b)
        entry = jnp.where(steps >= k * n_b, entry, 0.0)
        multiplicity = jnp.where(k == 0, 1.0, 2.0)
        return total + multiplicity * jnp.sum(_by_epoch(entry, n_b), axis=0), None

    gaps = jnp.arange(-(-c.size // n_b))
    return jax.lax.scan(add_gap, jnp.zeros(n_b, c.dtype), gaps)[0]


def _bound_by_state(
    strategy: Toeplitz, weights: jax.Array, num_steps: int, n_b: int
) -> jax.Array:
    """The bound of `reshuffled_order` for a first-order filter, by dynamic programming.

    Let the matrix C have the coefficients c_0 = 1 and c_k = ρ b^{k−1}. Then C maps an
    input u to the output w_t = u_t + ρ v_{t−1}, with the state v_t = b v_{t−1} + u_t.
    In the step of an epoch in which the example takes part, u_t is the epoch's entry of
    `weights`, f[E]. In all other steps, u_t is 0. The function replaces ρ and b by
    their absolute values, which never reduces the sensitivity. The value function maps
    the state v to the maximum of Σ w_t² over the remaining steps t. For v >= 0, the
    value function is a maximum of increasing convex quadratics. The value function is
    therefore convex, and linear interpolation between grid points is an upper bound.
    """
    a, b = (
        -jnp.sum(jnp.asarray(x, jnp.float64))  # one coefficient, or none: then 0
        for x in (strategy.numerator, strategy.denominator)
    )
    rho, b = jnp.abs(b - a), jnp.abs(b)
    num_epochs = weights.size
    grid = jnp.linspace(0.0, 1.0, _GRID_POINTS)
    powers = jnp.power(b, jnp.arange(n_b + 1))
    sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.square(powers))])
    # The largest v before each epoch. The example then took part in the last step of
    # the previous epoch, or in the first step of that epoch if the state grows.
    max_gain = jnp.maximum(powers[n_b - 1], 1.0)
    _, tops = jax.lax.scan(
        lambda top, u: (powers[n_b] * top + u * max_gain, top),
        jnp.zeros(()),
        jnp.append(weights, 0.0),
    )

    def start_value(
        value: jax.Array, top: jax.Array, end: jax.Array, u: jax.Array, size: int
    ) -> jax.Array:
        """The value function at the start of an epoch, on the grid from 0 to top.

        The value function maps a state of the filter to the largest sum of squares of
        all later outputs. `value` is the value function at the end of the epoch, on the
        grid from 0 to `end`. The epoch has `size` steps and the weight u.
        """
        r = jnp.arange(size)
        after = sums[size - 1 - r]
        # Σ_{t≠r} (ρ b^t v + [t > r] ρ b^{t−1−r} u)² + (u + ρ b^r v)²
        square = rho**2 * sums[size]
        linear = 2 * rho * u * (powers[r] + rho * powers[r + 1] * after)
        constant = u * u * (1 + rho**2 * after)

        def value_at(v: jax.Array) -> jax.Array:
            end_state = powers[size] * v + u * powers[size - 1 - r]
            # If b is 0, an epoch of weight 0 ends in the state 0.
            index = end_state / jnp.where(end > 0, end, 1.0)
            index = jnp.clip(index, 0.0, 1.0) * (_GRID_POINTS - 1)
            low = jnp.minimum(index.astype(jnp.int32), _GRID_POINTS - 2)
            chord = value[low] + (index - low) * (value[low + 1] - value[low])
            return jnp.max(square * v * v + linear * v + constant + chord)

        batch_size = max(1, min(_GRID_POINTS, _MAX_ENTRIES // size))
        return jax.lax.map(value_at, grid * top, batch_size=batch_size)

    last_size = num_steps - (num_epochs - 1) * n_b
    *_, u = weights
    value = start_value(
        jnp.zeros(_GRID_POINTS), tops[num_epochs - 1], tops[num_epochs], u, last_size
    )
    value, _ = jax.lax.scan(
        lambda value, ends: (start_value(value, *ends, n_b), None),
        value,
        (tops[: num_epochs - 1], tops[1:num_epochs], weights[:-1]),
        reverse=True,
    )
    return value[0]


def _bound_by_pairs(c: jax.Array, weights: jax.Array, n_b: int) -> jax.Array:
    """The bound of `reshuffled_order` for C with non-increasing coefficients c.

    C is the Toeplitz matrix that correlates the noise. An example takes part in one
    step of each epoch. The squared sensitivity is a sum of one term for each ordered
    pair of epochs. The term is (CᵀC)_st for the example's steps s and t in the two
    epochs, multiplied by the entries of `weights`, f[E], for both epochs. Let g(k)
    bound (CᵀC)_st for the gap k = |t − s|. If the steps have the positions r_e and r_f
    in epochs e < f, their gap is (f − e) n_b + r_f − r_e.

    The positions are divided into at most _MAX_INTERVALS intervals. For adjacent
    epochs, the bound uses the least gap for r_e and r_f in two given intervals. For
    e <= f − 2, one bound uses the least gap for r_e in a given interval and any r_f.
    Another bound uses the least gap for any r_e and r_f in a given interval. The
    function uses the mean of the two bounds, in which each summand depends on the
    interval of one epoch. A dynamic program can therefore find the worst intervals.
    """
    num_steps = c.size
    epochs = jnp.arange(weights.size)
    cuts = np.unique(np.linspace(0, n_b, min(_MAX_INTERVALS, n_b) + 1).astype(int))
    first, last = jnp.asarray(cuts[:-1]), jnp.asarray(cuts[1:] - 1)
    spectrum = jnp.fft.rfft(c, 2 * num_steps)

    def gram(epoch: jax.Array) -> jax.Array:
        """Upper bounds on (CᵀC)_st, f[T + 1], for t in the given epoch or later.

        Entry k is the bound for t − s = k. The last entry is 0.
        """
        truncated = jnp.where(jnp.arange(num_steps) < num_steps - epoch * n_b, c, 0.0)
        truncated = jnp.conj(jnp.fft.rfft(truncated, 2 * num_steps))
        g = jnp.fft.irfft(spectrum * truncated, 2 * num_steps)[:num_steps]
        # A bound on the rounding errors of the Fourier transforms. The appended 0 is
        # for gaps beyond the run.
        error = 64 * ULP * jnp.log2(2.0 * num_steps) * jnp.sum(jnp.square(c))
        return jnp.append(g + error, 0.0)

    def entry_at(g: jax.Array, gap: jax.Array) -> jax.Array:
        return g[jnp.minimum(gap, num_steps)]

    def distant(f: jax.Array, bounds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Bounds on the terms of the pairs of epoch f and each epoch e <= f − 2.

        The result has a row for each epoch e and a column for each interval of
        positions. The rows for e > f − 2 are 0. The term of a pair is an entry of CᵀC,
        multiplied by the weights of both epochs. The function `bounds` maps the
        distances f − e, an array of shape (E, 1) for E epochs, to upper bounds on the
        entry of CᵀC for each interval.
        """
        distance = (f - epochs)[:, None]
        terms = (weights[f] * weights)[:, None] * bounds(jnp.maximum(distance, 2))
        return jnp.where(distance >= 2, terms, 0.0)

    def add_later_epoch(total: jax.Array, f: jax.Array) -> tuple[jax.Array, None]:
        g = gram(f)
        more = distant(f, lambda distance: entry_at(g, distance * n_b - last[None]))
        return total + more, None

    def add_epoch(
        best: jax.Array, inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        f, later = inputs
        g = gram(f)
        # The least gap of two intervals is from the last step of the earlier interval
        # to the first step of the later interval. g does not increase with the gap.
        gaps = n_b + first[None, :] - last[:, None]
        pair_weights = weights[f] * weights[f - 1]
        adjacent = jnp.max(best[:, None] + 2 * pair_weights * entry_at(g, gaps), axis=0)
        earlier = distant(
            f, lambda distance: entry_at(g, (distance - 1) * n_b + 1 + first[None])
        )
        terms = jnp.square(weights[f]) * g[0] + later + jnp.sum(earlier, axis=0)
        return terms + jnp.where(f == 0, 0.0, adjacent), None

    zeros = jnp.zeros((epochs.size, first.size))
    later, _ = jax.lax.scan(add_later_epoch, zeros, epochs)
    best, _ = jax.lax.scan(add_epoch, zeros[0], (epochs, later))
    return jnp.max(best)


SQUARED_SENSITIVITY = {
    "fixed": fixed_order,
    "reshuffled": reshuffled_order,
    "separated": separated_steps,
}


def mu_of(
    strategy: Toeplitz,
    factors: jax.Array,
    noise_multiplier: jax.Array,
    *,
    schedule: Schedule,
) -> jax.Array:
    """An upper bound on the GDP parameter μ of a run with correlated noise.

    The caller must enable float64: the arguments are float64 arrays.

    Args:
      strategy: the matrix C, which turns white noise z into the correlated noise C⁻¹z.
      factors: the factor by which the noise of each step is multiplied, f[T], or one
        factor for all steps, f[1].
      noise_multiplier: the standard deviation of z divided by the clip norm, f[].
      schedule: the steps in which an example may take part, static.

    Returns:
      μ, f[]; inf if a factor or the noise multiplier is not positive, or if
      coefficients overflow.
    """
    # μ² = max_π Σ_{s,t∈π} |(CᵀC)_st| / σ², because releasing x + C⁻¹z is equivalent to
    # releasing C x + z: Denisov et al. (2022), https://arxiv.org/abs/2202.08312. This
    # also holds if sums depend on earlier releases, because an example moves C x by at
    # most μσ for all values of these releases.
    weights = 1 / factors
    num_steps, n_b, order, factor, max_participations = schedule
    square = SQUARED_SENSITIVITY[order](strategy, weights, num_steps, n_b)
    participations = -(-num_steps // n_b)
    if max_participations is not None and max_participations < participations:
        largest = jax.lax.cummax(jnp.broadcast_to(weights, (num_steps,)), reverse=True)
        used = jnp.arange(participations) < max_participations
        largest = jnp.where(used, largest[::n_b], 0.0)
        few = few_reshuffled_steps if order == "reshuffled" else few_separated_steps
        # The bound for a whole pattern also holds for every subset of the pattern.
        square = jnp.minimum(square, few(strategy, largest, num_steps, n_b))
        participations = max_participations
    # Sums have at most T terms. The rounding errors of the coefficients are like the
    # coefficients of a second strategy, whose C x an example moves by at most `error`
    # for each step in which it takes part.
    constant = jax.lax.stop_gradient(strategy)
    error = series_error(constant, constant.coefficients(num_steps))
    error = participations * error * jnp.max(weights)
    sensitivity = jnp.sqrt(square) * (1 + (256 + 8 * num_steps) * ULP) + error
    mu = mu_of_sensitivity(factor * sensitivity * (1 + 8 * ULP), noise_multiplier)
    return jnp.where(jnp.isfinite(sensitivity) & jnp.all(factors > 0), mu, jnp.inf)
