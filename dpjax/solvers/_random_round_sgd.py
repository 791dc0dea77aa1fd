"""SGD with a random number of rounds (Zhang, Zheng, Mou and Wang 2017, RRPSGD)."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax import sampling
from dpjax._core import dtypes, keys, validate
from dpjax._core.typing import Adjacency, Key, LossFn, Params, ScalarOrSchedule, Tree
from dpjax.accounting import profiles, random_rounds
from dpjax.noise._gaussian import gaussian_like
from dpjax.solvers import _checks, _descent, _precision
from dpjax.solvers._descent import Curve, Result


def round_probabilities(step_sizes: np.ndarray, smoothness: float) -> np.ndarray:
    """The distribution of the number of rounds R of `random_round_sgd`.

    P(R = k + 1) ∝ 2η_k − βη_k² for k from 0 to N − 1.

    Args:
      step_sizes: η_k, f[N], positive and below 2 / smoothness.
      smoothness: β, positive.

    Returns:
      The probabilities of 1 to N rounds, f64[N], whose sum is 1.

    Raises:
      ValueError: a step size is out of range, or smoothness is not positive.

    Reference: Zhang, Zheng, Mou and Wang (2017), Theorem 5.

    Example:
      >>> print(round_probabilities(np.array([0.5, 1.0]), 1.0).round(4))
      [0.4286 0.5714]
    """
    validate.positive("smoothness", smoothness)
    validate.positive("step_size", step_sizes)
    step_sizes = np.asarray(step_sizes, np.float64)
    if np.any(step_sizes >= 2 / smoothness):
        raise ValueError(
            f"step_size must be below 2 / smoothness, {2 / smoothness!r}; got "
            f"{np.max(step_sizes)!r}."
        )
    # Zhang et al. (2017), Theorem 5, https://arxiv.org/abs/1703.09947.
    weights = 2 * step_sizes - smoothness * step_sizes**2
    return weights / np.sum(weights)


def thresholds(probabilities: np.ndarray) -> np.ndarray:
    """The cumulative distribution of the number of rounds R, in units of 2⁻³².

    The results are P(R <= k) for k from 1 to N, rounded down, u64[N]. The last
    threshold is exactly 2³². `random_round_sgd` draws a uniform 32-bit number, and R is
    the rank of the first threshold that exceeds this number.
    """
    cumulative = np.cumsum(probabilities) / np.sum(probabilities)
    edges = np.floor(cumulative * 2.0**32).astype(np.uint64)
    # If a sum were rounded to less than 1, some 32-bit numbers would give no result.
    edges[-1] = 2**32
    return edges


_STATIC = "loss_fn", "batch_size", "microbatch_size"


@functools.partial(jax.jit, static_argnames=_STATIC)
def _train(
    params: Params,
    data: _checks.Data,
    rounds: jax.Array,
    step_sizes: jax.Array,
    clip_norm: jax.Array,
    stddev: jax.Array,
    key: Key,
    *,
    loss_fn: LossFn,
    batch_size: int,
    microbatch_size: int | None,
) -> tuple[Params, Curve]:
    """Train for `rounds` rounds, and return the last iterate and the `Curve`."""
    noise_key, batch_key = keys.stream(key, "noise"), keys.stream(key, "batches")

    # `sums` has the sum of losses and the number of unused examples so far.
    def step(k: jax.Array, carry: tuple[Any, Curve]) -> tuple[Any, Curve]:
        params, sums = carry
        batch = sampling.fixed_size(
            data.finite.shape[0], batch_size, key=batch_key, step=k
        )
        total, loss, used = _descent.gradient_sum(
            loss_fn,
            params,
            data.select(batch),
            clip_norm=clip_norm,
            microbatch_size=microbatch_size,
        )
        # Zhang et al. (2017), Algorithm 2, https://arxiv.org/abs/1703.09947:
        # w_{t+1} = w_t − η_t (∇f(w_t, ξ) + z_t), where a batch replaces the single ξ.
        noise = gaussian_like(jax.random.fold_in(noise_key, k), total, stddev)
        scale = step_sizes[k] / batch_size
        params = jax.tree.map(
            lambda x, g, z: x - scale.astype(x.dtype) * (g + z), params, total, noise
        )
        # The mean loss of no examples is NaN, and counts as 0.
        losses = jnp.where(used > 0, loss * used, 0.0).astype(jnp.float32)
        return params, Curve(sums.loss + losses, sums.left_out + batch_size - used)

    # The loop ends after R rounds. Its running time may reveal R, which is public.
    start = dtypes.widen(params), Curve(jnp.float32(0), jnp.int32(0))
    last, sums = jax.lax.fori_loop(0, rounds, step, start)
    loss = sums.loss / (rounds * batch_size - sums.left_out)
    return _descent.cast_like(last, params), sums._replace(loss=loss)


def random_round_sgd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    adjacency: Adjacency,
    max_rounds: int,
    batch_size: int,
    step_size: ScalarOrSchedule | np.ndarray,
    smoothness: float,
    clip_norm: float,
    key: Key,
    microbatch_size: int | None = None,
) -> Result[Params, jax.Array]:
    """Train by noisy SGD on random batches, and stop after a random number of rounds.

    Each round is one step on a new random batch. The number R of rounds has
    P(R = k + 1) ∝ 2η_k − βη_k² for k from 0 to N − 1, step sizes η_k and smoothness β.
    For smooth losses, convex or not, the expected norm of the gradient after R rounds
    is small.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity, in its numbers or in its gradient, contributes zero, and
        curve.left_out counts it.
      epsilon: the target ε, positive; epsilon and delta replace noise_multiplier.
      delta: the target δ, in (0, 1).
      noise_multiplier: the standard deviation of the noise in a batch's sum of
        gradients, divided by clip_norm; positive. None if epsilon and delta are given.
      adjacency: must be `REPLACE`.
      max_rounds: N, the maximum of R, at least 1. Zhang et al. (2017) use N = n².
      batch_size: b, from 1 to n. Zhang et al. (2017) use b = 1.
      step_size: η_k, positive and below 2 / smoothness. A number, an optax schedule or
        f[N].
      smoothness: β, positive, which determines the distribution of R. The guarantee
        does not assume that the loss has this smoothness.
      clip_norm: the bound C on a per-example gradient's L2 norm, positive.
      key: one typed key, for R, the batches and the noise.
      microbatch_size: as for `clipped_grad`.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier.
      num_steps is R, and may be released.

    Raises:
      ValueError: an argument is out of range, or no noise reaches the target. The
        solver raises the error before any training.

    Privacy: params, all earlier iterates and num_steps together are (ε, δ)-DP under
    REPLACE, by `accounting.random_rounds.delta`. R does not depend on the data, and
    given R, the mechanism is a composition of R rounds. The guarantee assumes that
    nobody learns the batches. The guarantee does not cover the curve, which has no
    noise: do not release the curve. The accountant computes no GDP parameter, so
    guarantee.mu is None.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 2, with exact accounting.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (500, 3))
      >>> result = random_round_sgd(
      ...     losses.logistic(feature_norm=1.0), jnp.zeros(3), (x, jnp.sign(x[:, 0])),
      ...     epsilon=2.0, delta=1e-5, adjacency=Adjacency.REPLACE, max_rounds=4,
      ...     batch_size=5, step_size=1.0, smoothness=0.25, clip_norm=1.0,
      ...     key=jax.random.key(1))
      >>> bool(result.guarantee.delta(2.0) <= 1e-5), bool(result.num_steps <= 4)
      (True, True)
    """
    noise = _checks.check_noise(noise_multiplier, epsilon, delta)
    validate.adjacency_without_removal(adjacency)
    max_rounds = validate.static_int("max_rounds", max_rounds, minimum=1)
    clip_norm = _precision.round_up(clip_norm)
    validate.positive("clip_norm", clip_norm)
    num_examples = _checks.check_examples(loss_fn, data, key)
    size = _checks.check_batch_size(batch_size, num_examples)
    step_sizes = _checks.evaluate_schedule("step_size", step_size, max_rounds)
    edges = thresholds(round_probabilities(step_sizes, smoothness))

    # The accountant uses the exact distribution of R that 32 random bits give.
    realised = np.diff(edges.astype(np.float64), prepend=0.0) / 2.0**32
    rounds = random_rounds.group(realised)
    terms: dict[str, Any] = {"rounds": rounds, "sampling_rate": size / num_examples}
    if isinstance(noise, _checks.Target):
        delta_of = functools.partial(
            random_rounds._compiled_delta, epsilon=np.float64(noise.epsilon), **terms
        )
        start = random_rounds._estimate_parameter(*noise, **terms)
        noise = _precision.solve_noise(delta_of, noise.delta, noise, start)
    validate.positive("noise_multiplier", noise)

    key = keys.stream(key, "solvers.random_round_sgd")
    bits = jax.random.bits(keys.stream(key, "rounds"), (), jnp.uint32)
    # Thresholds of 2³² exceed every 32-bit number, and do not fit into uint32.
    edges = edges[edges < 2**32].astype(np.uint32)
    rounds = 1 + jnp.searchsorted(edges, bits, side="right").astype(jnp.int32)
    stddev = _precision.stddev(noise, clip_norm)
    last, curve = _train(
        jax.tree.map(jnp.asarray, params),
        _checks.mask_nonfinite(data),
        rounds,
        *_precision.to_float32((step_sizes, clip_norm, stddev)),
        key,
        loss_fn=loss_fn,
        batch_size=size,
        microbatch_size=microbatch_size,
    )

    guarantee = profiles.Guarantee(
        f"all iterates of a random number of rounds, at most {max_rounds}, and that "
        "number",
        profiles.FunctionProfile(
            functools.partial(random_rounds.epsilon, noise, **terms),
            functools.partial(random_rounds.delta, noise, **terms),
        ),
        adjacency,
        _checks.assume_every_step("random"),
    )
    # Under jax.vmap over keys, the number of rounds is a tracer with one value per run.
    num_rounds = cast(int, rounds) if isinstance(rounds, Tracer) else int(rounds)
    reported = _precision.to_float32(_precision.round_down(noise))
    return Result(last, curve, guarantee, num_rounds, reported)
