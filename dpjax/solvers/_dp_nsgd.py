"""Private normalised SGD with tree-aggregated momentum (Tran and Cutkosky 2022)."""

import functools

import jax
import jax.numpy as jnp
import optax

from dpjax import sampling, workloads
from dpjax._core import keys, validate
from dpjax._core.rounding import MARGIN
from dpjax._core.typing import Adjacency, Key, LossFn, Params, ScalarOrSchedule, Tree
from dpjax._matrices.strategy import Scaled, StrategySpec, Toeplitz, spec_of
from dpjax._matrices.strategy import Tree as TreeStrategy
from dpjax.accounting import correlated, gdp
from dpjax.accounting.correlated._error import variances
from dpjax.accounting.profiles import Gaussian, Guarantee
from dpjax.noise import _optimizers as optimizers
from dpjax.noise.tree import prefix_variance
from dpjax.solvers import _checks, _descent, _precision
from dpjax.solvers._checks import Epochs, Order
from dpjax.solvers._descent import Curve, Result


def _variance(spec: StrategySpec | None, decay: float, run: Epochs) -> jax.Array:
    """The variance of a coordinate of the noise in the momentum, for unit draws.

    The result is f[T], one variance for each of the T steps of the run. Unit draws are
    independent draws of variance 1, which the strategy or the tree correlates between
    steps.
    """
    if spec is None:
        steps = jnp.arange(1, run.num_steps + 1)
        return (1 - decay) ** 2 * prefix_variance(steps, decay)
    workload, factors = workloads.momentum(decay), jnp.asarray(spec.factors or (1.0,))
    num_steps = run.num_steps
    return variances(spec.toeplitz(num_steps), factors, workload, num_steps)


_Carry = tuple[Tree, optax.OptState]
_STATIC = "loss_fn", "order", "run", "microbatch_size", "spec"


@functools.partial(jax.jit, static_argnames=_STATIC)
def _train(
    params: Tree,
    data: Tree,
    key: Key,
    stddev: jax.Array,
    decay: jax.Array,
    clip_norm: jax.Array,
    learning_rate: ScalarOrSchedule,
    *,
    loss_fn: LossFn,
    order: Order,
    run: Epochs,
    microbatch_size: int | None,
    spec: StrategySpec | None,
) -> tuple[Tree, Curve]:
    """Train, and return the last parameters and the `Curve`.

    Runs that differ only in the values of traced arguments share one compiled program.

    Reference: Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328.
    """
    num_examples = jax.tree.leaves(data)[0].shape[0]
    # Clipping leaves out the examples whose gradients are not finite.
    examples = _checks.Data(data, jnp.ones(num_examples, bool))
    # The last three lines of Algorithm 1: m_t, m̂_t = m_t + NOISE and
    # w_{t+1} = w_t − η m̂_t / ‖m̂_t‖.
    optimizer = optimizers.dp_nsgd(
        learning_rate,
        # stddev is already the noise multiplier times the clip norm, rounded up once.
        clip_norm=1.0,
        noise_multiplier=stddev,
        expected_batch_size=run.batch_size,
        key=keys.stream(key, "noise"),
        decay=decay,
        num_steps=run.num_steps,
        strategy=None if spec is None else spec.strategy(run.num_steps),
    )

    def step(carry: _Carry, batch: sampling.Batch) -> tuple[_Carry, Curve]:
        params, state = carry
        total, loss, used = _descent.gradient_sum(
            loss_fn,
            params,
            examples.select(batch),
            clip_norm=clip_norm,
            microbatch_size=microbatch_size,
        )
        updates, state = optimizer.update(total, state, params)
        left_out = jnp.sum(batch.mask, dtype=jnp.int32) - used
        return (optax.apply_updates(params, updates), state), Curve(loss, left_out)

    def epoch(carry: _Carry, number: jax.Array) -> tuple[_Carry, Curve]:
        order_key = keys.stream(key, "batches")
        batches = _descent.make_batches(
            order, num_examples, run.batch_size, order_key, number
        )
        return jax.lax.scan(step, carry, batches)

    carry = params, optimizer.init(params)
    (params, _), curve = jax.lax.scan(epoch, carry, jnp.arange(run.num_epochs))
    return params, jax.tree.map(jnp.ravel, curve)


def dp_nsgd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    order: Order,
    num_epochs: int,
    batch_size: int,
    learning_rate: ScalarOrSchedule,
    decay: float,
    clip_norm: float,
    key: Key,
    microbatch_size: int | None = None,
    strategy: Toeplitz | Scaled | None = None,
) -> Result[Params, jax.Array]:
    """Train by normalised SGD with momentum, and with correlated noise in the momentum.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        non-finite gradient contributes zero, and curve.left_out counts it.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: `ZERO_OUT` or `REPLACE`.
      order: "fixed" for the data's order in every epoch, or "reshuffled" for a new
        random order in each epoch. A reshuffled order never needs less noise.
      num_epochs: E, at least 1.
      batch_size: b, at least 1. An epoch has n_b = ⌈n / b⌉ steps.
      learning_rate: the length of a step, a number or an optax schedule. A step is
        shorter if the norm of the momentum is near or below 1e-6.
      decay: the momentum coefficient β, in [0, 1).
      clip_norm: the bound C on a per-example gradient's L2 norm, positive.
      key: one typed key, for the noise and the order.
      microbatch_size: as for `clipped_grad`.
      strategy: the correlation of the noise between steps, a Toeplitz or scaled
        strategy from `dpjax.strategies`. None for tree noise.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier.

    Raises:
      ValueError: an argument is out of range, or adjacency is ADD_REMOVE, under which
        an added example would move other examples to other batches. The solver raises
        the error before any training.

    Privacy: params and all earlier iterates together are μ-GDP under the adjacency,
    where μ is guarantee.mu. This μ is at most `accounting.gdp.mu(epsilon, delta)`, so
    guarantee.epsilon(delta) is at most epsilon. The guarantee assumes that n, the
    shapes, the initial parameters and the hyperparameters are public. The guarantee
    does not cover the curve.

    Reference: Tran and Cutkosky (2022), Algorithm 1, with exact accounting. For
    strategies other than tree noise, Denisov et al. (2022),
    https://arxiv.org/abs/2202.08312.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> y = x @ jnp.array([1.0, -1.0, 0.5])
      >>> def loss(w, example):
      ...     return 0.5 * (example[0] @ w - example[1]) ** 2
      >>> result = dp_nsgd(
      ...     loss, jnp.zeros(3), (x, y), epsilon=5.0, delta=1e-5,
      ...     adjacency=Adjacency.REPLACE, order="fixed", num_epochs=4, batch_size=16,
      ...     learning_rate=0.1, decay=0.9, clip_norm=1.0, key=jax.random.key(1))
      >>> result.params.shape, bool(result.guarantee.epsilon(1e-5) <= 5.0)
      ((3,), True)
    """
    target = _checks.check_target(epsilon, delta)
    validate.one_of("order", order, ("fixed", "reshuffled"))
    validate.half_open_unit("decay", decay)
    # Rounding comes first: accountant and program must use the same float32 numbers.
    decay, clip_norm = _precision.round_down(decay), _precision.round_up(clip_norm)
    validate.positive("clip_norm", clip_norm)
    run = _checks.check_epochs(loss_fn, data, adjacency, num_epochs, batch_size, key)
    if not isinstance(strategy, Toeplitz | Scaled | None):
        raise ValueError(
            f"strategy must be a Toeplitz or scaled strategy; got {strategy!r}."
        )
    # The strategy's numbers are hashable, so that equal strategies share one compiled
    # program.
    spec = None if strategy is None else spec_of(strategy, run.num_steps)

    steps = {"num_steps": run.num_steps, "steps_per_epoch": run.steps_per_epoch}
    matrix = TreeStrategy(decay) if spec is None else spec.strategy(run.num_steps)
    mu_of = functools.partial(
        correlated.mu, matrix, **steps, order=order, adjacency=adjacency
    )
    with _precision.now():
        goal = float(gdp.mu(target.epsilon, target.delta))
        # μ is proportional to 1/σ, so one evaluation at σ = 1 determines σ.
        noise_multiplier = _precision.round_up(float(mu_of(1.0)) / goal * MARGIN)
        profile = Gaussian(mu_of(noise_multiplier))

    # A schedule is a tree without arrays, and so static in the compiled program. A
    # number is traced, so that another number needs no new compilation.
    if callable(learning_rate):
        learning_rate = jax.tree_util.Partial(learning_rate)
    stddev = _precision.stddev(noise_multiplier, clip_norm)
    trained, curve = _train(
        *jax.tree.map(jnp.asarray, (params, data)),
        keys.stream(key, "solvers.dp_nsgd"),
        *_precision.to_float32((stddev, decay, clip_norm)),
        learning_rate,
        loss_fn=loss_fn,
        order=order,
        run=run,
        microbatch_size=microbatch_size,
        spec=spec,
    )

    variance = _variance(spec, decay, run)
    dimension = optax.tree.size(trained)
    # The noise in one coordinate of a mean gradient, before the momentum.
    coordinate = clip_norm * noise_multiplier / run.batch_size
    curve = curve._replace(noise_norm=coordinate * jnp.sqrt(dimension * variance))
    momentum = "tree-aggregated momentum" if spec is None else f"momentum, C {spec}"
    mechanism = f"all {run.num_steps} iterates of {momentum}"
    assumptions = _checks.assume_every_step(order)
    guarantee = Guarantee(mechanism, profile, adjacency, assumptions)
    # Rounding down ensures that the reported noise never exceeds the added noise.
    reported = _precision.to_float32(_precision.round_down(noise_multiplier))
    return Result(trained, curve, guarantee, run.num_steps, reported)
