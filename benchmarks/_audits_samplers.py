"""Define audits of samplers and of a whole plan, correct and with deliberate errors.

The mechanism releases sums of 12 steps, in which each canary has a coordinate of its
own. A sampler of dpjax draws the steps in which a canary participates. The attack knows
the sampler's distribution, but not the sample. The score is the exact likelihood ratio
of all outputs. For independent noise and for cyclic Poisson sampling, the accountant
computes ε from the same pair of distributions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import Adjacency, auditing, sampling, strategies
from dpjax.accounting import allocation, correlated, pld

CLIP_NORM, STEPS, BINS, SIGMA = 0.7, 12, 4, 0.9
INDEPENDENT = strategies.independent()
GEOMETRIC = strategies.geometric(0.5)
BANDED = strategies.banded([1.0, 0.6, 0.3])
BANDS = 3
Draw = Callable[[jax.Array, jax.Array], sampling.Batch]


class Sampled(NamedTuple):
    """A sampler, and the attack on it.

    Attributes:
      draw: maps the number of examples to a function that maps a key and a step to a
        batch.
      score: maps whitened outputs f[T, k], in units of the clip norm, to scores f[k].
      reported: maps δ to the reported ε.
      strategy: the strategy that correlates the noise.
      every: the size of a group of examples; the first example of each group is a
        canary.
      tight: whether the accountant computes ε from exactly the pair of distributions
        that the attack distinguishes.
    """

    draw: Callable[[int], Draw]
    score: Callable[[jax.Array], jax.Array]
    reported: Callable[[float], Any]
    strategy: Any = INDEPENDENT
    every: int = 1
    tight: bool = True


def _room(count: int, rate: float) -> int:
    """Return a maximal batch size, exceeded with probability below 1e-15."""
    return min(count, int(count * rate + 8 * np.sqrt(count * rate) + 8))


def _poisson(count: int, rate: float = 1 / BINS, moves: int = 1) -> Draw:
    return lambda key, t: sampling.poisson(
        count, rate, max_batch_size=_room(count, rate), key=key, step=moves * t
    )


def _cyclic_poisson(count: int) -> Draw:
    return lambda key, t: sampling.cyclic_poisson(
        count,
        BANDS / STEPS * 2,
        num_groups=BANDS,
        max_batch_size=_room(count // BANDS + 1, BANDS / STEPS * 2),
        key=key,
        step=t,
    )


def _bins(count: int, fresh: bool) -> Draw:
    return lambda key, t: sampling.random_bins_step(
        count,
        BINS,
        max_batch_size=_room(count, 1 / BINS),
        key=key,
        epoch=t // BINS if fresh else 0 * t,
        step=t % BINS,
    )


def _in_order(count: int) -> Draw:
    return lambda key, t: sampling.cyclic_step(count, count // BINS, step=t % BINS)


def _mixture(
    cases: Any, rates: Any, sigma: float = SIGMA
) -> Callable[[jax.Array], jax.Array]:
    """Return the likelihood-ratio score of one block of steps."""
    cases, rates = (np.asarray(x, np.float32) for x in (cases, rates))
    return lambda y: auditing.mixture_scores(y, cases, rates, sigma)


def _blocks(
    size: int, score: Callable[[jax.Array], jax.Array], y: jax.Array
) -> jax.Array:
    """Sum the scores of blocks of steps; steps of different blocks are independent."""
    return jnp.sum(jax.vmap(score)(y.reshape(-1, size, y.shape[1])), axis=0)


def _now_or_not(
    column: Any, rate: float, sigma: float = SIGMA
) -> Callable[[jax.Array], jax.Array]:
    column = np.asarray(column)
    score = _mixture([0 * column, column], [1 - rate, rate], sigma)
    return functools.partial(_blocks, len(column), score)


def _patterns(strategy: Any) -> np.ndarray:
    """Return what each bin contributes to C x, f[bins, T].

    An example stays in the same bin in all epochs.
    """
    steps = np.tile(np.eye(BINS), STEPS // BINS).astype(np.float32)
    return np.asarray(auditing.white_by_strategy(strategy)(steps.T)).T


def _correlated(strategy: Any, way: str) -> Callable[[float], Any]:
    return lambda delta: correlated.epsilon(
        strategy,
        SIGMA,
        delta,
        num_steps=STEPS,
        steps_per_epoch=STEPS // 2 if way == "cyclic_poisson" else BINS,
        sampling=way,
        adjacency=Adjacency.ZERO_OUT,
    )


def _one_of_bins(strategy: Any) -> Callable[[jax.Array], jax.Array]:
    return _mixture(_patterns(strategy), np.full(BINS, 1 / BINS))


_POISSON = pld.poisson_gaussian(SIGMA, 1 / BINS, adjacency=Adjacency.ADD_REMOVE)
SAMPLED = {
    "poisson": Sampled(
        _poisson,
        _now_or_not([1.0], 1 / BINS),
        lambda delta: pld.epsilon(pld.compose(_POISSON, STEPS), delta),
    ),
    "cyclic_poisson, banded": Sampled(
        _cyclic_poisson,
        _now_or_not([1.0, 0.6, 0.3], BANDS / STEPS * 2),
        _correlated(BANDED, "cyclic_poisson"),
        BANDED,
        every=BANDS,
    ),
    "random_bins": Sampled(
        functools.partial(_bins, fresh=False),
        _one_of_bins(INDEPENDENT),
        _correlated(INDEPENDENT, "random_bins"),
    ),
    "random_bins, fresh": Sampled(
        functools.partial(_bins, fresh=True),
        functools.partial(
            _blocks, BINS, _mixture(np.eye(BINS), np.full(BINS, 1 / BINS))
        ),
        lambda delta: allocation.epsilon(
            SIGMA, delta, num_steps=BINS, num_epochs=STEPS // BINS
        ),
    ),
    "random_bins, geometric": Sampled(
        functools.partial(_bins, fresh=False),
        _one_of_bins(GEOMETRIC),
        _correlated(GEOMETRIC, "random_bins"),
        GEOMETRIC,
        tight=False,
    ),
}


def _all_ways(strategy: Any, rate: float) -> Callable[[jax.Array], jax.Array]:
    """Return the score for Poisson samples whose contributions overlap.

    The score is a mixture of all 2^T patterns of participation in the T steps.
    """
    bits = (np.arange(2**STEPS)[:, None] >> np.arange(STEPS) & 1).astype(np.float32)
    rates = np.prod(np.where(bits > 0, rate, 1 - rate), axis=1)
    cases = np.asarray(auditing.white_by_strategy(strategy)(bits.T)).T
    score = _mixture(cases, rates)

    def in_parts(y: jax.Array) -> jax.Array:
        one = functools.partial(jax.lax.map, lambda z: score(z[:, None])[0])
        return one(y.T, batch_size=2000)

    return in_parts


# By error: the sampler whose ε is claimed, the sampler that draws instead, and the
# attack that looks for the difference.
BROKEN = {
    "the same Poisson sample in every step": (
        "poisson",
        functools.partial(_poisson, moves=0),
        _mixture([np.zeros(STEPS), np.ones(STEPS)], [1 - 1 / BINS, 1 / BINS]),
    ),
    "cyclic Poisson sampling: each step samples all examples, not one group": (
        "cyclic_poisson, banded",
        functools.partial(_poisson, rate=BANDS / STEPS * 2),
        _all_ways(BANDED, BANDS / STEPS * 2),
    ),
    "batches in the data's order, not in bins": (
        "random_bins",
        _in_order,
        _mixture(_patterns(INDEPENDENT)[:1], [1.0]),
    ),
    "bins drawn once, not in each epoch": (
        "random_bins, fresh",
        functools.partial(_bins, fresh=False),
        _one_of_bins(INDEPENDENT),
    ),
    "batches in the data's order, with correlated noise": (
        "random_bins, geometric",
        _in_order,
        _mixture(_patterns(GEOMETRIC)[:1], [1.0]),
    ),
}


@functools.partial(jax.jit, static_argnames=("draw", "count"))
def _taking_part(draw: Draw, key: jax.Array, *, count: int) -> jax.Array:
    """Return the number of times each example is in each step's batch, f[T, count]."""

    def at(t: jax.Array) -> jax.Array:
        batch = draw(key, t)
        return jnp.zeros(count).at[batch.indices].add(batch.mask)

    return jax.lax.map(at, jnp.arange(STEPS))


def of_sampled(
    sampled: Sampled,
    *,
    num: int,
    key: jax.Array,
    draw: Callable[[int], Draw] | None = None,
    score: Callable[[jax.Array], jax.Array] | None = None,
) -> auditing.Outputs:
    """Score num canaries that participate and num that do not, in one run."""
    keys = jax.random.split(key)
    count = num * sampled.every
    drawn = (draw or sampled.draw)(count)
    part = _taking_part(drawn, keys[0], count=count)[:, :: sampled.every]
    sums = CLIP_NORM * jnp.concatenate([part, jnp.zeros_like(part)], axis=1)
    noise = dpjax.correlated_noise(
        sampled.strategy, SIGMA * CLIP_NORM, num_steps=STEPS, key=keys[1]
    )
    white = auditing.white_by_strategy(sampled.strategy)
    observed = white(auditing.released(noise, sums)) / CLIP_NORM
    scores = (score or sampled.score)(observed)
    return auditing.Outputs(scores[:num], scores[num:])


def of_broken(name: str, *, num: int, key: jax.Array) -> auditing.Outputs:
    """Score canaries as `of_sampled`, with a sampler other than the claimed one."""
    claimed, draw, score = BROKEN[name]
    # Where batches are in the data's order, the attack knows the first batch. Only the
    # first 1/BINS of the examples are in that batch.
    result = of_sampled(
        SAMPLED[claimed],
        num=num * (BINS if draw is _in_order else 1),
        key=key,
        draw=draw,
        score=score,
    )
    return auditing.Outputs(*(x[:num] for x in result))


# --- a whole plan: batches, gradients, optimizer


PLAN_SIGMA = 1.0
PLAN = {"num_examples": 400, "batch_size": 100, "num_steps": 8, "clip_norm": CLIP_NORM}


@functools.cache
def whole_plan() -> dpjax.Plan:
    """Return a plan with Poisson samples and independent noise."""
    return dpjax.plan(**PLAN, noise_multiplier=PLAN_SIGMA, delta=1e-2)


def of_plan(*, num_runs: int, key: jax.Array, in_order: bool = False):
    """Score all examples in num_runs runs of a plan; each example is a canary.

    If in_order, a loop over the data in order draws the batches, instead of the plan.
    """
    plan = whole_plan()
    n, steps = plan.num_examples, plan.num_steps
    loss = auditing.plant(lambda w, x: jnp.vdot(w, x), 10.0)
    # The loss takes one example at a time, without a batch axis.
    gradient = plan.value_and_grad(loss, batched=False)
    data = auditing.Marked(jnp.ones((n, 2)), jnp.arange(n))

    def run(key: jax.Array) -> jax.Array:
        optimizer = plan.optimizer(optax.sgd(1.0), key=key)
        params = auditing.Planted(jnp.zeros(2), jnp.zeros(2 * n))

        def step(carry: Any, t: jax.Array) -> Any:
            params, state = carry
            examples = plan.load(data, t, key)
            if in_order:
                places = sampling.cyclic_step(n, plan.batch_size, step=t % BINS)
                rows = jax.tree.map(lambda x: x[places.indices], data)
                capacity = plan.max_batch_size - plan.batch_size
                examples = examples._replace(
                    data=jax.tree.map(
                        lambda x: jnp.pad(x, [(0, capacity)] + [(0, 0)] * (x.ndim - 1)),
                        rows,
                    ),
                    mask=jnp.arange(plan.max_batch_size) < plan.batch_size,
                )
            _, grads = gradient(params, examples)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), updates.slots

        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jnp.arange(steps))[1]

    updates = jax.jit(functools.partial(jax.lax.map, run, batch_size=20))(
        jax.random.split(key, num_runs)
    )
    # An update is −(sum + noise) / b, where b is the batch size.
    observed = -updates * plan.batch_size / CLIP_NORM
    if in_order:  # the canaries are the examples of the first batch
        inside = (
            observed[:, :, : plan.batch_size],
            observed[:, :, n : n + plan.batch_size],
        )
        score = _mixture([np.arange(steps) % BINS == 0], [1.0], PLAN_SIGMA)
    else:
        inside = observed[:, :, :n], observed[:, :, n:]
        score = _now_or_not([1.0], plan.batch_size / n, PLAN_SIGMA)
    return auditing.Outputs(*(jnp.ravel(jax.vmap(score)(x)) for x in inside))
