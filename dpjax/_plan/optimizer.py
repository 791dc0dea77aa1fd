"""The private optimizer, which passes noisy mean gradients to the user's optimizer.

If a batch does not fit on a device, `accumulate` computes the sum of clipped gradients
in parts of the batch.
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
from dpjax._plan import modules, parameters
from dpjax._plan.loader import Examples
from dpjax._plan.parameters import RunParameters
from dpjax.noise import _correlated, _discrete, _gaussian
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

    The chain transforms a sum of clipped gradients. The number b is `plan.batch_size`,
    or the step's batch size in `plan.schedule`. `Plan.optimizer` describes the
    arguments.
    """
    validate.typed_key("key", key)
    strategy = plan.strategy
    division = limit_steps(plan.num_steps, 1.0 / plan.batch_size)
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
        mean = optax.chain(_on_lattice(plan, plan.clip_norm, 1.0, key), division)
    else:
        stddev = stddev_of_sum(plan.clip_norm, plan.noise_multiplier, plan.batch_size)
        mean = optax.chain(_gaussian.add_gaussian_noise(stddev, key=key), division)
    return _allow_untrained_leaves(optax.chain(mean, cast_updates_to_float32(inner)))


def _gaussian_noise(
    stddev: ArrayLike, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that adds Gaussian noise to a step's sum.

    The transformation takes a keyword argument `factor`: the noise multiplier of the
    step, divided by the noise multiplier of the plan. The standard deviation of the
    noise is `stddev` times this factor.
    """
    noise = _gaussian.add_gaussian_noise(stddev, key=key)

    def update(
        updates: Any, state: Any, params: Any = None, *, factor: ArrayLike = 1.0
    ) -> tuple[Any, Any]:
        # The sums are divided by the factor, get the constant noise, and are multiplied
        # by the factor.
        scaled: Any = _scale_tree(updates, 1 / jnp.asarray(factor))
        noisy, state = noise.update(scaled, state)
        return _scale_tree(noisy, jnp.asarray(factor)), state

    return optax.GradientTransformationExtraArgs(noise.init, update)


def _on_lattice(
    plan: RunParameters, sensitivity: float, top: float, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that adds discrete Gaussian noise to a step's sum.

    The transformation takes a keyword argument `factor`: the noise multiplier of the
    step, divided by the noise multiplier of the plan.

    Args:
      plan: the numbers of the run.
      sensitivity: the maximum L2 distance by which adding one example moves a step's
        sum, before rounding to the lattice.
      top: the maximum of `factor` over all steps.
      key: one typed key for the run.
    """
    z = plan.noise_multiplier

    def init(params: Any) -> _gaussian.IndependentNoiseState:
        _discrete.check_draws(optax.tree.size(params), plan.num_steps)
        return _gaussian.IndependentNoiseState(keys.stream(key, "discrete noise"))

    def update(
        updates: Any, state: Any, params: Any = None, *, factor: ArrayLike = 1.0
    ) -> tuple[Any, Any]:
        next_key, noise_key = jax.random.split(state.key)
        size = optax.tree.size(updates)
        noise = _discrete.lattice_noise(sensitivity, z * factor, size, maximum=z * top)
        noisy = _discrete.release_on_lattice(noise_key, updates, noise)
        return noisy, _gaussian.IndependentNoiseState(next_key)

    return optax.GradientTransformationExtraArgs(init, update)


def _correlated_mean_on_lattice(
    plan: RunParameters, strategy: Strategy, key: jax.Array
) -> optax.GradientTransformation:
    """Make a transformation of clipped sums into private means, with discrete noise.

    Let s_t be the sum of step t, and C the matrix of `strategy`. The combination
    (C s)_t of sums is rounded to a lattice, the set of all multiples of a small number.
    Discrete Gaussian noise z_t on the lattice is then added. The multiplication by C⁻¹
    gives s_t + (C⁻¹z)_t up to rounding. This vector is divided by the batch size.
    """
    # A sum of m clipped gradients is at most m C, and the spacing of the lattice is
    # about z C / 2²⁵.
    z = plan.noise_multiplier
    max_ratio = plan.max_batch_size / z * 2.0**25
    digits = min(max(math.ceil(math.log2(max_ratio)) + 1, 24), _discrete.DIGITS)

    def noise(params: Any) -> optax.GradientTransformation:
        # The noise depends on the number of coordinates that are rounded.
        dimension = _correlated.effective_dimension(
            strategy, optax.tree.size(params), plan.num_steps, digits
        )
        stddev = _discrete.lattice_noise(
            plan.clip_norm, z, dimension, maximum=z, draws=_correlated.DRAWS
        ).stddev
        return _correlated.correlated_lattice_noise(
            strategy, stddev, num_steps=plan.num_steps, key=key, digits=digits
        )

    add_noise = _gaussian.transformation(
        lambda params: noise(params).init(params),
        lambda updates, state: noise(updates).update(updates, state),
    )
    return optax.chain(add_noise, optax.scale(1.0 / plan.batch_size))


class VaryingState(NamedTuple):
    """The optimizer state of a run whose noise, clip norm or batch size varies.

    Attributes:
      step: the number of completed steps, i32[].
      clip_norm: the next step's clip norm if the clip norm follows a quantile,
        otherwise the plan's clip norm, f32[].
      noise: the state of the transformation that adds noise, with the noise's key.
    """

    step: jax.Array
    clip_norm: jax.Array
    noise: optax.OptState


def clip_norm_of(state: Any) -> jax.Array:
    """The next step's clip norm, for a plan whose clip norm follows a quantile.

    The function reads the clip norm from the `VaryingState` in an optimizer state.

    Raises:
      ValueError: the state does not contain exactly one `VaryingState`.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, VaryingState))
    clip_norms = [x.clip_norm for x in nodes if isinstance(x, VaryingState)]
    if len(clip_norms) != 1:
        raise ValueError(
            "state must be the state of the plan's optimizer, which has one clip norm; "
            f"got {len(clip_norms)} clip norms in {jax.tree.structure(state)}."
        )
    return clip_norms[0]


def _varying_mean(plan: RunParameters, key: jax.Array) -> optax.GradientTransformation:
    """Make a transformation of sums of clipped gradients into private means.

    The clip norm, the noise or the batch size of the plan varies from step to step. If
    a schedule varies the clip norm, `Plan.value_and_grad` rescales each sum to the
    plan's clip norm. If the clip norm follows a quantile, `Plan.value_and_grad` divides
    each sum by the step's clip norm. So the sums of all steps have the same
    sensitivity. A schedule of the noise multiplier multiplies the standard deviation of
    the noise on these sums.
    """
    quantile, clip_norm = plan.quantile, plan.clip_norm
    sigma, count_noise = plan.noise_multiplier, 1.0
    if quantile:
        sigma, count_noise = parameters.noise_of(quantile, sigma, plan.batch_size)
    bound = 1.0 if quantile else clip_norm
    # The count is multiplied by σ / σ_b. Noise of standard deviation σ on the product
    # is noise of standard deviation σ_b on the count. The factor is rounded down, which
    # only lowers the sensitivity.
    weight = rounding.round_down_float32(sigma / count_noise)
    noise: Any = _gaussian_noise(stddev_of_sum(bound, sigma, plan.batch_size), key)
    if plan.arithmetic == "discrete":
        # With few digits, the product with a count (a multiple of 1/2) is exact.
        weight = _truncate(float(weight), 22 - plan.max_batch_size.bit_length())
        # The distance by which an example moves the sum and the scaled count together.
        sensitivity = sigma * bound / plan.noise_multiplier * (1 + 2.0**-50)
        top = max(segment.noise for segment in plan.segments)
        noise = _on_lattice(plan, sensitivity, top, key)

    def init(params: Any) -> VaryingState:
        start = jnp.asarray(clip_norm, jnp.float32)
        return VaryingState(jnp.zeros((), jnp.int32), start, noise.init(params))

    def update(updates: Any, state: Any) -> tuple[Any, VaryingState]:
        if quantile and not isinstance(updates, parameters.Bounded):
            raise ValueError(
                "updates must be a dpjax.Bounded sum from value_and_grad of this "
                "plan, because the clip norm follows a quantile; got "
                f"{type(updates)}. flax.nnx.Optimizer discards the Bounded: call the "
                "update function of plan.optimizer directly."
            )
        values = plan.values_at(state.step)
        released = dtypes.widen(updates)
        if quantile:
            # The sum and the scaled count are one Gaussian mechanism.
            released = released._replace(within=released.within * weight)
        noisy, noise_state = noise.update(released, state.noise, factor=values.noise)
        scale, next_norm = jnp.asarray(values.clip), state.clip_norm
        if quantile:
            # The mean is multiplied by the clip norm of this step's gradients.
            count, noisy, scale = noisy.within / weight, noisy.total, state.clip_norm
            size = values.batch_size
            next_norm = parameters.next_clip_norm(quantile, scale, count, size)
        mean = _scale_tree(noisy, scale / jnp.asarray(values.batch_size, jnp.float32))
        return mean, VaryingState(state.step + 1, next_norm, noise_state)

    return _gaussian.transformation(init, update)


def _truncate(x: float, bits: int) -> float:
    """Round a positive number down to `bits` significant binary digits.

    If bits is below 1, the result has one binary digit.
    """
    fraction, exponent = math.frexp(x)
    bits = max(bits, 1)
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


def _scale_tree(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _allow_untrained_leaves(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer for models in which some leaves are not arrays of floats.

    For a leaf that is not an array of floats, the gradient is None, and the optimizer
    `inner` gets None instead of the leaf. If `update` gets the parameters, the update
    of such a leaf is zero for an array of numbers or booleans, and None otherwise.
    Without the parameters, the update is None.
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
            _fill_missing_update, inner_updates, params, is_leaf=lambda x: x is None
        )
        return filled, state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_masks(name: str, tree: Any) -> None:
    """Raise if `optax.masked` masks a part of a tree: this part would get no noise."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            f"{name} must be the whole pytree; got a pytree with optax.MaskedNode. "
            "Around a plan's optimizer, optax.masked and optax.partition "
            "(multi_transform) pass the masked parts of the clipped sum on without "
            "noise. Put the mask inside: plan.optimizer(optax.masked(inner, mask), "
            "key=key), or plan.optimizer(optax.partition(...), key=key)."
        )


def _fill_missing_update(update: Any, param: Any) -> Any:
    """Return the update, or zeros if there is no update for an array.

    If the update is None, and the parameter is an array of numbers or booleans, the
    result is an array of zeros. The reason is that `optax.apply_updates` cannot add
    None to an array.
    """
    if update is None and isinstance(param, jax.Array | np.ndarray):
        number = jnp.issubdtype(param.dtype, jnp.number)
        if number or param.dtype == jnp.bool_:
            return jnp.zeros_like(param)
    return update


def _add_trees(total: Any, more: Any, *, wide: bool) -> Any:
    """Add two trees of arrays; if `wide`, in float64 even without `jax_enable_x64`."""
    if not wide:
        return optax.tree.add(total, more)
    with jax.enable_x64(True):
        return jax.tree.map(
            lambda x, y: x.astype(jnp.float64) + y.astype(jnp.float64), total, more
        )


def accumulate(loss_and_grad: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Make a function that sums the clipped gradients of a large batch part by part.

    A loop on the host adds the sums of the parts. The optimizer then adds noise once,
    to the total. Do not use `optax.MultiSteps`, which accumulates ordinary gradients:
    `optax.MultiSteps` would divide the sum by the number of parts, but not the noise.
    Inside one jitted call, the argument `microbatch_size` of `Plan.value_and_grad` has
    the same effect as this function.

    Args:
      loss_and_grad: the function that `Plan.value_and_grad` returns, with or without
        `jax.jit`. All parts have the same size, so that jit compiles only once.
      size: the number of slots in a part, for examples and padding. The device gets one
        part at a time.

    Returns:
      `fn(model, examples, *others)`, which cannot be jitted. The results of fn are the
      results of loss_and_grad for the whole batch, up to rounding, with one exception:
      each part increments the counters of a flax.nnx model, so that dropout draws other
      masks. Keyword arguments of fn, such as clip_norm, are passed to loss_and_grad.

    Raises:
      ValueError: size is not an integer of at least 1.

    Privacy: the results of fn have the sensitivity of the results of loss_and_grad.

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
        model: Any, examples: Examples, *others: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        counts, values, auxes, grads, total = [], [], [], None, None
        plan = examples.plan
        wide = plan is not None and plan.arithmetic == "discrete"
        for part in examples.parts(size):
            out, grads = loss_and_grad(model, part, *others, **kwargs)
            value, *aux = out if isinstance(out, tuple) else (out,)
            counts.append(np.sum(part.mask))
            values.append(value)
            auxes.append(aux)
            total = grads if total is None else _add_trees(total, grads, wide=wide)
        if wide:
            with jax.enable_x64(True):
                total = jax.tree.map(lambda x, g: x.astype(g.dtype), total, grads)
        # The mean of the batch weights each part by its number of valid examples.
        weights = np.array(counts) / max(sum(counts), 1)
        value = sum(w * v for w, v in zip(weights, values, strict=True))
        if not auxes[0]:
            return value, total
        # Remove the padding of the last part, which is beyond the end of the batch.
        rows = np.size(examples.mask)
        aux = jax.tree.map(
            lambda *xs: jnp.concatenate(xs)[:rows], *(aux for (aux,) in auxes)
        )
        return (value, aux), total

    return fn
