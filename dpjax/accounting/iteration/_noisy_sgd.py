"""The last iterate of noisy gradient descent on random batches of fixed size.

Of t steps the last n are accounted for as subsampled releases with more sensitivity
than composition gives them, and a Gaussian covers what the steps before them leave:

- without a set, two interpolated processes follow the two runs. Each step that uses the
  differing example moves them apart by 2r standard deviations, the steps before the
  last n leave 2r Σ_{n<i<t} c^i, and the noise of the last step is split into parts of
  variance 1/α² and 1/β² (Theorem C.13 at its choice for Theorem 4.9, any c);
- from a distance Δ, n steps before the end, one process interpolates, and the noise of
  each step is split. The shifts that close the distance are the minorant's:
  Δ c^n / sqrt(Σ_{i<n} c^{2i}) (Theorem 4.10, there for c = 1).

Every n and every split with 1/α² + 1/β² = 1 gives a valid bound. A Gaussian
approximation picks the splits. The reported ε never rests on it.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._float64 import ULP, broadcast_batch, float64
from dpjax.accounting import pld
from dpjax.accounting.iteration import _setting
from dpjax.accounting.iteration._periodic import geometric
from dpjax.accounting.iteration._setting import Bounds, Setting
from dpjax.adjacency import Adjacency

_AROUND = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # numbers of steps, relatively
_SPLITS = 1 + np.logspace(-3, 1, 200)  # candidates for β
_STATIC = ("output", "bound", "steps", "keeps", "bounded", "factor", "convex")


def _left(y: jax.Array, shift: jax.Array, start: jax.Array, n: jax.Array, steps: int):
    """What the Gaussian has to cover, over α, of both bounds, for n steps."""
    down, up = jnp.where(y <= 0, y, 0.0), jnp.where(y <= 0, 0.0, y)
    before = steps - 1 - jnp.minimum(n, steps - 1)
    # Sums of powers of c <= 1 as they are, and of c > 1 from their largest.
    falling = jnp.exp((n + 1) * down) * geometric(down, before)
    rising = jnp.exp((steps - 1) * up) * geometric(-up, before)
    later = 2 * shift * jnp.where(y <= 0, falling, rising)
    count = jnp.maximum(n, 1.0)
    falling = jnp.exp(n * down) / jnp.sqrt(geometric(2 * down, count))
    rising = jnp.exp(up) / jnp.sqrt(geometric(-2 * up, count))
    return later, start * jnp.where(y <= 0, falling, rising)


def _subsampled_variance(mu: jax.Array, rate: jax.Array) -> jax.Array:
    """Of the Gaussian that composed C_p(G_μ) tend to, per step."""
    square = jnp.minimum(mu * mu, 500.0)
    cdf = jax.scipy.special.ndtr
    inside = jnp.exp(square) * cdf(1.5 * mu) + 3 * cdf(-0.5 * mu) - 2
    return 2 * rate * rate * jnp.maximum(inside, 0.0)


def _cost(bound: str, step: _setting.Step, n, rate, steps: int) -> jax.Array:
    """μ² in the Gaussian approximation, for all of _SPLITS."""
    later, distance = _left(step.log_lipschitz, step.shift, step.diameter, n, steps)
    beta = jnp.asarray(_SPLITS)
    use = _subsampled_variance(2 * beta * step.shift, rate)
    if bound == "contraction":
        covered, uses = later, use + n * _subsampled_variance(2 * step.shift, rate)
    else:
        covered, uses = distance, n * use
    return covered * covered * beta * beta / (beta * beta - 1) + uses


def _best_n(bound: str, step: _setting.Step, rate, steps: int) -> jax.Array:
    n = jnp.asarray(np.unique(np.geomspace(1, steps, 200).astype(int)), jnp.float64)
    cost = jax.vmap(lambda n: jnp.min(_cost(bound, step, n, rate, steps)))(n)
    return jnp.min(jnp.where(cost == jnp.min(cost), n, steps))


def _best_split(bound: str, step: _setting.Step, n, rate, steps: int) -> jax.Array:
    cost = _cost(bound, step, n, rate, steps)
    return jnp.min(jnp.where(cost == jnp.min(cost), jnp.asarray(_SPLITS), _SPLITS[-1]))


def _scalars(core):
    """The core on batches, element by element."""

    def vectorized(*args, **static):
        args = broadcast_batch(args, ())
        return jnp.vectorize(lambda *scalars: core(*scalars, **static))(*args)

    vectorized.__name__ = core.__name__
    return vectorized


@float64("up", static=_STATIC)
@_scalars
def _number(n, beta, rate, *arrays, output, bound, steps, keeps, factor, **_):
    """The output of that name of one bound, for n steps and the split β."""
    step = _setting.step(arrays, keeps=keeps, factor=factor)
    margin = 1 + 64 * ULP
    if output == "n":
        return _best_n(bound, jax.lax.stop_gradient(step), rate, steps)
    if output == "beta":
        return _best_split(bound, jax.lax.stop_gradient(step), n, rate, steps)
    if output == "shift":  # β times that of one use
        return jnp.where(step.valid, beta * step.shift * margin, jnp.inf)
    later, distance = _left(step.log_lipschitz, step.shift, step.diameter, n, steps)
    covered = later if bound == "contraction" else distance
    applies = step.known if bound == "contraction" else step.bounded
    alpha = beta / jnp.sqrt((beta - 1) * (beta + 1))
    return jnp.where(step.valid & applies, covered * alpha * margin, jnp.inf)


def noisy_sgd_bounds(
    noise_multiplier: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
    *,
    num_steps: int,
    batch_size: jax.typing.ArrayLike,
    num_examples: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on ε of the last iterate of noisy descent on random batches.

    The arguments are those of `noisy_sgd_epsilon`, the least of these bounds.

    Example:
      >>> from dpjax import Adjacency
      >>> noisy_sgd_bounds(
      ...     3.0, 1e-5, num_steps=20000, batch_size=100, num_examples=1000,
      ...     step_size=0.05, gradient_norm=1.0, clipped=True, generalised_linear=True,
      ...     smoothness=1.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.0, diameter=0.01, adjacency=Adjacency.REPLACE).winner
      'diameter'
    """
    steps = _validate.static_int("num_steps", num_steps, minimum=1)
    _validate.open_unit("delta", delta)
    for name, value in (("batch_size", batch_size), ("num_examples", num_examples)):
        _validate.positive(name, value)
    size, examples = _validate.concrete(batch_size), _validate.concrete(num_examples)
    if size is not None and examples is not None and np.any(size > examples):
        raise ValueError(
            f"batch_size must be at most num_examples; got {batch_size!r}."
        )
    arrays, static = _setting.check(noise_multiplier, batch_size, **setting)
    if setting["adjacency"] is not Adjacency.REPLACE:
        raise ValueError(
            "adjacency must be REPLACE for random batches of fixed size; "
            f"got {setting['adjacency']!r}."
        )
    static = static | {"steps": steps}
    rate = batch_size / num_examples

    batch = max(jnp.ndim(x) for x in (*arrays, rate, delta))
    around = np.array(_AROUND).reshape(-1, *[1] * batch)

    def number(output: str, bound: str, n, beta) -> jax.Array:
        return _number(n, beta, rate, *arrays, output=output, bound=bound, **static)

    def shift(beta) -> jax.Array:
        return number("shift", "", 1.0, beta)

    # Numbers of steps, along a first axis, and their splits.
    def candidates(bound: str, most: int) -> tuple[jax.Array, jax.Array]:
        best = jax.lax.stop_gradient(number("n", bound, 1.0, 1.0))
        n = jnp.clip(jnp.floor(best * around), 1, most)
        return n, jax.lax.stop_gradient(number("beta", bound, n, 1.0))

    def composition() -> jax.Array:
        one = pld.subsampled_gdp(shift(1.0), rate)
        return pld.epsilon(pld.compose(one, steps), delta)

    def contraction() -> jax.Array:
        n, beta = candidates("contraction", steps - 1)
        before = pld.compose(pld.subsampled_gdp(shift(2.0), rate), n)
        last = pld.subsampled_gdp(shift(2 * beta), rate)
        rest = pld.gaussian(number("covered", "contraction", n, beta))
        all_of_it = pld.convolve(rest, pld.convolve(last, before))
        return jnp.min(pld.epsilon(all_of_it, delta), axis=0)

    def diameter() -> jax.Array:
        n, beta = candidates("diameter", steps)
        each = pld.subsampled_gdp(shift(2 * beta), rate)
        rest = pld.gaussian(number("covered", "diameter", n, beta))
        all_of_it = pld.convolve(rest, pld.compose(each, n))
        return jnp.min(pld.epsilon(all_of_it, delta), axis=0)

    composed = composition()
    never = jnp.full_like(composed, jnp.inf)
    contracted = contraction() if steps > 1 else never
    return Bounds(composed, contracted, diameter() if static["bounded"] else never)


def noisy_sgd_epsilon(
    noise_multiplier: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
    *,
    num_steps: int,
    batch_size: jax.typing.ArrayLike,
    num_examples: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """ε of the last iterate of noisy gradient descent on random batches of fixed size.

    Args:
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, static, at least 1.
      batch_size: b, f[*b]: each batch is a uniformly random subset of that size, drawn
        anew in each step.
      num_examples: n, f[*b], at least b.
      **setting: the assumptions, all of them: see `Setting`. Adjacency is REPLACE.

    Returns:
      ε, f[*b], rounded up: the least of composition, and of both last-iterate bounds
      over 9 numbers of last steps, each with a split of the noise, composed numerically
      (`accounting.pld`).

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing.

    Privacy: the last iterate alone is (ε, δ)-DP under REPLACE, and whatever is computed
    from it. Nobody learns the batches.

    Reference: Bok, Su and Altschuler (2024), Theorems 4.8 to 4.10 and C.13.

    Example:
      >>> from dpjax import Adjacency
      >>> epsilon = noisy_sgd_epsilon(
      ...     3.0, 1e-5, num_steps=2000, batch_size=1500, num_examples=60000,
      ...     step_size=0.05, gradient_norm=5.0, clipped=True, generalised_linear=True,
      ...     smoothness=16.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.002, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{epsilon:.2f}")
      4.44
    """
    return noisy_sgd_bounds(
        noise_multiplier,
        delta,
        num_steps=num_steps,
        batch_size=batch_size,
        num_examples=num_examples,
        **setting,
    ).best
