"""The private optimizer, which passes noisy means to the user's optax optimizer.

`accumulate` sums gradients over the parts of a batch that does not fit on a device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import dtypes, keys, rounding, validate
from dpjax._core.typing import ArrayLike
from dpjax._matrices.strategy import Strategy
from dpjax._plan import modules, quantile
from dpjax._plan.loader import Examples
from dpjax._plan.parameters import RunParameters
from dpjax._plan.schedule import Segment, values_at
from dpjax.noise import _correlated_lattice, _discrete, _gaussian
from dpjax.noise._correlated import Buffer, correlated_noise
from dpjax.noise._gaussian import limit_steps, stddev_of_sum
from dpjax.noise._optimizers import cast_updates_to_float32


def optimizer(
    plan: RunParameters,
    inner: optax.GradientTransformation,
    key: jax.Array,
    buffer: Buffer,
) -> optax.GradientTransformationExtraArgs:
    """Chain the step limit, the noise, the division by b, and the optimizer `inner`.

    The chain transforms a sum of clipped gradients. `Plan.optimizer` describes the
    arguments.
    """
    strategy = plan.strategy
    # Each branch raises or gives NaN past num_steps, and ends with a division by b.
    if plan.schedule or plan.quantile:
        mean = optax.chain(limit_steps(plan.num_steps), _varying_mean(plan, key))
    elif strategy is not None and plan.arithmetic == "discrete":
        mean = _correlated_mean_on_lattice(plan, strategy, key)
    elif strategy is not None:
        stddev = stddev_of_sum(plan.clip_norm, plan.noise_multiplier, plan.batch_size)
        noise = correlated_noise(
            strategy, stddev, num_steps=plan.num_steps, key=key, buffer=buffer
        )
        mean = optax.chain(noise, optax.scale(1.0 / plan.batch_size))
    elif plan.arithmetic == "discrete":
        mean = _constant_mean(plan, key)
    else:
        mean = _gaussian.noisy_mean(
            clip_norm=plan.clip_norm,
            noise_multiplier=plan.noise_multiplier,
            expected_batch_size=plan.batch_size,
            key=key,
            num_steps=plan.num_steps,
        )
    return _allow_other_leaves(optax.chain(mean, cast_updates_to_float32(inner)))


class _StepNoise(NamedTuple):
    """Noise whose standard deviation is the plan's, times a factor for each step.

    Attributes:
      init: a function of the parameters that returns the state, which holds the key.
      add: a function of the sums, the state and the step's factor. It returns the noisy
        sums and the next state.
    """

    init: optax.TransformInitFn
    add: Callable[[Any, Any, ArrayLike], tuple[Any, Any]]


def _gaussian_noise(stddev: ArrayLike, key: jax.Array) -> _StepNoise:
    """Make Gaussian noise of standard deviation `stddev` times a step's noise factor.

    The noise factor of a step is the ratio of its noise multiplier to the plan's.
    """
    noise = _gaussian.add_gaussian_noise(stddev, key=key)

    def add(sums: Any, state: Any, factor: ArrayLike) -> tuple[Any, Any]:
        # The sums are divided by the factor, get the constant noise, and are multiplied
        # by the factor.
        noisy, state = noise.update(_scale_tree(sums, 1 / jnp.asarray(factor)), state)
        return _scale_tree(noisy, jnp.asarray(factor)), state

    return _StepNoise(noise.init, add)


def _on_lattice(
    plan: RunParameters, sensitivity: float, most: float, key: jax.Array
) -> _StepNoise:
    """Make discrete Gaussian noise for float sums that have the given sensitivity.

    `most` is the maximum noise factor of any step. The noise factor of a step is the
    ratio of its noise multiplier to the plan's.
    """
    z = plan.noise_multiplier

    def init(params: Any) -> _discrete.DiscreteGaussianNoiseState:
        _discrete.check_draws(optax.tree.size(params), plan.num_steps)
        return _discrete.DiscreteGaussianNoiseState(keys.stream(key, "discrete noise"))

    def add(sums: Any, state: Any, factor: ArrayLike) -> tuple[Any, Any]:
        following, current = jax.random.split(state.key)
        size = optax.tree.size(sums)
        noise = _discrete.lattice_noise(sensitivity, z * factor, size, most=z * most)
        noisy = _discrete.release_on_lattice(current, sums, noise)
        return noisy, _discrete.DiscreteGaussianNoiseState(following)

    return _StepNoise(init, add)


def _constant_mean(plan: RunParameters, key: jax.Array) -> optax.GradientTransformation:
    """Transform clipped sums into private means by discrete noise of constant scale."""
    noise = _on_lattice(plan, plan.clip_norm, 1.0, key)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return noise.add(updates, state, 1.0)

    return optax.chain(
        optax.GradientTransformation(noise.init, update),
        limit_steps(plan.num_steps, 1.0 / plan.batch_size),
    )


def _correlated_mean_on_lattice(
    plan: RunParameters, strategy: Strategy, key: jax.Array
) -> optax.GradientTransformation:
    """Transform clipped sums into private means by correlated noise on a lattice.

    A lattice is the set of all multiples of a spacing. Sums are rounded to the lattice,
    and the noise is a random multiple of the spacing; see `noise._correlated_lattice`.
    """
    # A sum of m clipped gradients is at most m C, and the spacing of the lattice is
    # about z C / 2²⁵.
    largest = plan.max_batch_size / plan.noise_multiplier * 2.0**25
    digits = min(max(math.ceil(math.log2(largest)) + 1, 24), _correlated_lattice.DIGITS)

    def noise(params: Any) -> optax.GradientTransformation:
        # The noise depends on the number of coordinates that are rounded.
        dimension = _correlated_lattice.effective_dimension(
            strategy, optax.tree.size(params), plan.num_steps, digits
        )
        stddev = _discrete.lattice_noise(
            plan.clip_norm,
            plan.noise_multiplier,
            dimension,
            most=plan.noise_multiplier,
            draws=_correlated_lattice.DRAWS,
        ).stddev
        return _correlated_lattice.correlated_lattice_noise(
            strategy, stddev, num_steps=plan.num_steps, key=key, digits=digits
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return noise(updates).update(updates, state, params)

    return optax.chain(
        optax.GradientTransformation(lambda params: noise(params).init(params), update),
        optax.scale(1.0 / plan.batch_size),
    )


class VaryingState(NamedTuple):
    """The optimizer state of a run whose noise, clip norm or batch size varies.

    Attributes:
      step: the number of steps done, i32[].
      clip_norm: the next step's clip norm if it follows a quantile, otherwise the
        plan's clip norm, f32[].
      noise: the state of the noise, with its key.
    """

    step: jax.Array
    clip_norm: jax.Array
    noise: optax.OptState


def clip_norm_of(state: Any) -> jax.Array:
    """The next step's clip norm, from an optimizer state with a `VaryingState` in it.

    Raises:
      ValueError: the state does not contain exactly one `VaryingState`.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, VaryingState))
    clip_norms = [x.clip_norm for x in nodes if isinstance(x, VaryingState)]
    if len(clip_norms) != 1:
        raise ValueError(
            "state must contain the state of exactly one optimizer of a plan with a "
            f"schedule or a QuantileClip; got {len(clip_norms)} such states in "
            f"{jax.tree.structure(state)}."
        )
    return clip_norms[0]


def _varying_mean(plan: RunParameters, key: jax.Array) -> optax.GradientTransformation:
    """Transform clipped sums into private means, with numbers that vary by step.

    If a schedule varies the clip norm, `value_and_grad` has rescaled the sums to the
    plan's clip norm. If the clip norm follows a quantile, `value_and_grad` has divided
    the sums by it. So the sensitivity is constant. If a step's noise multiplier is r
    times the plan's, the step divides the sum by r, adds the plan's noise, and
    multiplies the result by r.
    """
    constant = (Segment(0, 1.0, 1.0, plan.batch_size),)
    schedule, follows = plan.schedule or constant, plan.quantile
    sigma, clip_norm = plan.noise_multiplier, plan.clip_norm
    of_count = 1.0
    if follows:
        sigma, of_count = quantile.noise_of(follows, sigma, plan.batch_size)
    unit = 1.0 if follows else clip_norm
    # The count is scaled by σ / σ_b, so that noise σ on the scaled count is noise σ_b
    # on the count. The scale is rounded down, which only lowers the sensitivity.
    weight = rounding.round_down_float32(sigma / of_count)
    noise = _gaussian_noise(stddev_of_sum(unit, sigma, plan.batch_size), key)
    if plan.arithmetic == "discrete":
        # With few digits, the product with a count (a multiple of 1/2) is exact.
        weight = _keep_bits(float(weight), 22 - plan.max_batch_size.bit_length())
        # The distance by which an example moves the sum and the scaled count together.
        reach = sigma * unit / plan.noise_multiplier * (1 + 2.0**-50)
        most = max(piece.noise for piece in schedule)
        noise = _on_lattice(plan, reach, most, key)

    def init(params: Any) -> VaryingState:
        start = jnp.asarray(clip_norm, jnp.float32)
        return VaryingState(jnp.zeros((), jnp.int32), start, noise.init(params))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, VaryingState]:
        if follows and not isinstance(updates, quantile.Bounded):
            raise ValueError(
                "updates must be a dpjax.Bounded sum from value_and_grad of this "
                "plan, because the clip norm follows a quantile; got "
                f"{type(updates)}. flax.nnx.Optimizer discards the Bounded: call the "
                "update function of plan.optimizer directly."
            )
        now = values_at(schedule, state.step)
        released = dtypes.widen(updates)
        if follows:
            # The sum and the scaled count are one Gaussian mechanism.
            released = released._replace(within=released.within * weight)
        noisy, noise_state = noise.add(released, state.noise, now.noise)
        scale, following = jnp.asarray(now.clip), state.clip_norm
        if follows:
            # The mean is multiplied by the clip norm of this step's gradients.
            count, noisy = noisy.within / weight, noisy.total
            scale = state.clip_norm
            following = quantile.next_clip_norm(follows, scale, count, now.batch_size)
        mean = _scale_tree(noisy, scale / jnp.asarray(now.batch_size, jnp.float32))
        return mean, VaryingState(state.step + 1, following, noise_state)

    return optax.GradientTransformation(init, update)


def _keep_bits(x: float, bits: int) -> float:
    """Round a positive number down to its first `bits` binary digits, at least one."""
    fraction, exponent = math.frexp(x)
    bits = max(bits, 1)
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


def _scale_tree(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _allow_other_leaves(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer for models in which some leaves are not arrays of floats.

    Such a leaf has None as its gradient, and inner gets None in place of the parameter.
    The leaf's update is zero for an array of numbers or booleans, and None otherwise.
    """

    def trained_leaves(params: Any) -> Any:
        return jax.tree.map(lambda x: x if modules.is_trained(x) else None, params)

    def init(params: Any) -> Any:
        _refuse_masks("params", params)
        return inner.init(trained_leaves(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _refuse_masks("updates", updates)
        if extra_args:
            raise ValueError(
                "a plan's optimizer takes no further arguments: a value computed from "
                "the data, such as the loss for reduce_on_plateau or polyak_sgd, would "
                f"enter the update without noise; got {sorted(extra_args)}."
            )
        # Without the parameters, it is unknown which missing updates must be zeros.
        if params is None:
            return inner.update(updates, state)
        inner_updates, state = inner.update(updates, state, trained_leaves(params))
        filled = jax.tree.map(
            _zero_updates, inner_updates, params, is_leaf=lambda x: x is None
        )
        return filled, state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_masks(name: str, tree: Any) -> None:
    """Raise if a part of a tree is masked, since it would be released without noise."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            f"{name} must be the whole pytree; got a pytree with optax.MaskedNode. "
            "Around a plan's optimizer, optax.masked and optax.partition "
            "(multi_transform) pass the masked parts of the clipped sum on without "
            "noise. Put the mask inside: plan.optimizer(optax.masked(inner, mask), "
            "key=key), or plan.optimizer(optax.partition(...), key=key)."
        )


def _zero_updates(update: Any, param: Any) -> Any:
    """Return the update, or zeros if it is None and the parameter a numeric array.

    optax.apply_updates cannot add None to an array.
    """
    if update is None and isinstance(param, jax.Array | np.ndarray):
        number = jnp.issubdtype(param.dtype, jnp.number)
        if number or param.dtype == jnp.bool_:
            return jnp.zeros_like(param)
    return update


def _add(total: Any, more: Any, *, wide: bool) -> Any:
    """The sum of two trees; if `wide`, in float64 even without `jax_enable_x64`."""
    if not wide:
        return optax.tree.add(total, more)
    with jax.enable_x64(True):
        return jax.tree.map(
            lambda x, y: x.astype(jnp.float64) + y.astype(jnp.float64), total, more
        )


def accumulate(loss_and_grad: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Compute the clipped sum of a large batch in parts, one part at a time.

    A loop on the host adds the sums of the parts. The optimizer then adds noise once,
    to the total. Do not use `optax.MultiSteps`, which accumulates ordinary gradients:
    it would divide the sum by the number of parts, but not the noise. Inside one jitted
    call, `microbatch_size` of `Plan.value_and_grad` has the same effect.

    Args:
      loss_and_grad: the function that `Plan.value_and_grad` returns, with or without
        `jax.jit`. All parts have the same size, so that jit compiles only once.
      size: the number of examples in a part, which the device gets at a time.

    Returns:
      `fn(model, examples, *others)`, which cannot be jitted. Its results are those of
      loss_and_grad up to rounding. Each part increments the counters of a flax.nnx
      model, so that dropout then differs from one call with the whole batch.

    Raises:
      ValueError: size is below 1.

    Privacy: the results have the same sensitivity as those of loss_and_grad.

    Example:
      >>> import dpjax, jax, jax.numpy as jnp, numpy as np
      >>> plan = dpjax.plan(num_examples=100, batch_size=50, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0)
      >>> whole = jax.jit(plan.value_and_grad(lambda w, x: jnp.mean(x @ w)))
      >>> in_parts = dpjax.accumulate(whole, 16)
      >>> data = np.linspace(0.0, 1.0, 200).reshape(100, 2).astype(np.float32)
      >>> batch = plan.load(data, 0, jax.random.key(0))
      >>> w = jnp.ones(2)
      >>> bool(jnp.allclose(whole(w, batch)[1], in_parts(w, batch)[1]))
      True
    """
    size = validate.static_int("size", size, minimum=1)

    def fn(
        model: Any, examples: Examples, *others: Any, **named: Any
    ) -> tuple[Any, Any]:
        counts, values, auxes, grads, total = [], [], [], None, None
        plan = examples.plan
        wide = plan is not None and plan.arithmetic == "discrete"
        for part in examples.parts(size):
            out, grads = loss_and_grad(model, part, *others, **named)
            value, *aux = out if isinstance(out, tuple) else (out,)
            counts.append(np.sum(part.mask))
            values.append(value)
            auxes.append(aux)
            total = grads if total is None else _add(total, grads, wide=wide)
        if wide:
            with jax.enable_x64(True):
                total = jax.tree.map(lambda x, g: x.astype(g.dtype), total, grads)
        # The mean of the batch weights each part by its number of valid examples.
        weights = np.array(counts) / max(sum(counts), 1)
        value = sum(w * v for w, v in zip(weights, values, strict=True))
        if not auxes[0]:
            return value, total
        # The last part may have padding beyond the end of the batch. It is cut off.
        rows = np.size(examples.mask)
        aux = jax.tree.map(
            lambda *xs: jnp.concatenate(xs)[:rows], *(aux for (aux,) in auxes)
        )
        return (value, aux), total

    return fn
