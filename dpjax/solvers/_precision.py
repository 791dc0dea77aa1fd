"""Calibrated noise, rounded hyperparameters, and bounds on rounding errors.

Rounding is not Lipschitz: two arbitrarily close iterates may be rounded to different
numbers. Rounding can therefore add to the distance between two runs in every step.
Noise that is calibrated to the distance in real arithmetic is then too small, unless
this distance is far above the rounding error of an iterate. If one of n gradients of
norm at most C is replaced, a step of size η moves by at most 2ηC/n. For n = 1e5, this
distance is not far above a rounding error in float32.

**Model.** As in `_core.rounding`, u is the unit roundoff and γ_k = k u / (1 − k u). Let
C, M and R be bounds on the norms of gradients, on curvature and on the norms of
iterates. Let λ be the weight of the regulariser (λ/2)‖x‖², d the number of parameters,
and k = 2d + 64. In a step x ↦ prox(x − η(Σ g / n + λx)), the errors are then at most

- γ_k (C + M R) in an example's gradient, as if the parameters and the result each had
  the relative error γ_k. For a function of one linear score, γ_k bounds the error of a
  dot product of length d and sixteen roundings.
- γ_n C (1 + γ_k) in the mean of the computed gradients, in any order of summation. This
  bound assumes that the norm of a computed gradient is at most C (1 + γ_k).
- γ_k (R + η(C + λR)) in the step and the prox, where a far smaller k would suffice.

Let ε = η γ_{n+k} C + γ_k (R + η(C + (M + λ)R)), which bounds the rounding error of one
run in a step, and let s be the distance by which one example moves a step in real
arithmetic. Then a step moves two runs apart by at most s + 2ε, in place of s. Over many
steps with the contraction factor c, rounding multiplies the distance Σ_j c^j s by at
most 1 + 2ε/s.

The bound R follows from a recursion. With the initial parameters x₀, r = |1 − ηλ| and
a = ‖prox(x₀) − x₀‖,

    ‖x_{t+1} − x₀‖ <= r ‖x_t − x₀‖ + η(C + λ‖x₀‖) + a.

**Settings.** The training program and the accountant must use the same numbers. A
program in float32 cannot represent a decay of 0.999, and uses a nearby number with a
different guarantee. A solver therefore rounds every shared number to float32, and
passes the rounded number to the accountant and to the program. Float32 and float64
represent the rounded number exactly.

Bounds on gradients are rounded up, and step sizes, regularisation and decays are
rounded down. After rounding, a step size is still at most its upper limit, and a decay
is still below 1. The standard deviation of the noise is rounded up, so that a program
adds at least the noise that the accountant assumes.

**Noise.** The noise multiplier is a concrete number before training begins, also under
`jax.vmap` over keys. Calibration depends on no key. Solvers therefore calibrate in the
context manager `now`, where JAX evaluates operations immediately.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.dtypes import widen
from dpjax._core.float64 import scoped
from dpjax._core.rounding import MARGIN
from dpjax._core.typing import ArrayLike, DTypeLike, LossFn, Params, Tree
from dpjax.accounting import calibrate, iteration
from dpjax.accounting.iteration import Setting
from dpjax.clipping._bookkeeping.equations import aval, inner_jaxprs, is_real
from dpjax.solvers import _checks
from dpjax.solvers.prox import Prox

# The minimum normal float32. Processors may flush smaller numbers to zero.
_MIN_NORMAL = float(np.finfo(np.float32).tiny)


def _round_float32(value: ArrayLike, towards: float) -> float | np.ndarray:
    """Round finite positive numbers to float32; return all other numbers unchanged.

    `towards` is inf to round up, and −inf to round down. A positive number below the
    minimum normal float32 is rounded up to this minimum or down to 0. The result is a
    float or f64[...].
    """
    array = np.asarray(value, np.float64)
    with np.errstate(over="ignore"):
        nearest = array.astype(np.float32)
    # Conversion rounds to the nearest float32. Take the next float32 if the nearest one
    # is in the wrong direction.
    is_wrong = nearest < array if towards > 0 else nearest > array
    nearest = np.where(is_wrong, np.nextafter(nearest, np.float32(towards)), nearest)
    # Subnormal numbers become normal or zero, since processors treat them differently.
    replacement = _MIN_NORMAL if towards > 0 else 0.0
    nearest = np.where(array < _MIN_NORMAL, replacement, nearest.astype(np.float64))
    rounded = np.where((array > 0) & (array < np.inf), nearest, array)
    return float(rounded) if rounded.ndim == 0 else rounded


@overload
def round_up(value: float) -> float: ...
@overload
def round_up(value: ArrayLike) -> float | np.ndarray: ...
def round_up(value: ArrayLike) -> float | np.ndarray:
    """Round positive numbers up to float32, and store them as a float or f64[...]."""
    return _round_float32(value, np.inf)


@overload
def round_down(value: float) -> float: ...
@overload
def round_down(value: ArrayLike) -> float | np.ndarray: ...
def round_down(value: ArrayLike) -> float | np.ndarray:
    """Round positive numbers down to float32, and store them as a float or f64[...]."""
    return _round_float32(value, -np.inf)


def stddev(
    noise_multiplier: ArrayLike, bound: ArrayLike, divisor: float = 1.0
) -> float | np.ndarray:
    """The noise's standard deviation, noise_multiplier · bound / divisor, rounded up.

    The result is a float or f64[...], whose numbers float32 represents exactly. The
    function raises a ValueError if the result is negative or exceeds the range of
    float32.
    """
    value = round_up(np.asarray(noise_multiplier) * np.asarray(bound) / divisor)
    # A product above the range of float32 is rounded up to inf. The check refuses inf.
    name = "noise_multiplier times the bound on gradients (clip_norm or gradient_norm)"
    validate.nonnegative(name, value)
    return value


def number(value: ArrayLike) -> float:
    """Convert a scalar entry of a `Setting` to a Python float, without rounding."""
    return float(np.asarray(value))


def to_float32(values: Tree) -> Any:
    """Convert numbers to float32 arrays, rounded to the nearest float32.

    The conversion of results of `round_up` and `round_down` is exact.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)


def executed_setting(setting: Setting) -> Setting:
    """Round step size and regularisation down, and gradient norm up, to float32."""
    return {
        **setting,
        # Rounding down preserves an upper limit on step sizes.
        "step_size": round_down(setting["step_size"]),
        "gradient_norm": round_up(setting["gradient_norm"]),
        "regularization": round_down(setting["regularization"]),
    }


# jax.ensure_compile_time_eval does not suffice: in this context, jax.vmap still maps
# functions that have custom derivatives.
now = jax.core.eval_context


def solve_noise(
    bound_of: Callable[[jax.Array], jax.Array],
    goal: float,
    target: _checks.Target,
    start: float = 1.0,
) -> float:
    """Find the minimum noise multiplier for which ε (or δ) is at most `goal`.

    The result includes a margin for rounding errors. `bound_of` is a function that
    returns the ε (or δ) of a run with a given noise multiplier. The search begins at
    the noise multiplier `start`. If no noise reaches the goal, the error states
    `target`, the (ε, δ) for which the caller of the solver asked.
    """
    try:
        with now():
            noise = float(calibrate.solve(bound_of, goal, start=start))
        # The margin covers the roundings to float32 in the accountant and after it.
        return round_up(noise * MARGIN)
    except ValueError as error:
        raise ValueError(
            "epsilon must be attainable with some noise; got epsilon "
            f"{target.epsilon!r} at delta {target.delta!r}: {error}"
        ) from error


# A run is refused if rounding could add more than this fraction to its sensitivity.
MAX_FRACTION = 0.05


def margin(terms: float, dtype: DTypeLike = np.float64) -> float:
    """Bound the relative error of k roundings by γ_k = k u / (1 − k u).

    The argument `terms` is k, and u is the unit roundoff of the dtype. For k u >= 1/64
    the result is inf.
    """
    # γ_k is meaningless if k u is near 1. The caller refuses a run with infinite γ_k.
    ku = terms * float(jnp.finfo(dtype).eps) / 2
    return ku / (1 - ku) if ku < 1 / 64 else np.inf


class Rounding(NamedTuple):
    """A bound on the distance that rounding adds between two runs in one step.

    Attributes:
      fraction: 2ε/s, the added distance relative to the shift, where ε bounds the
        rounding error of one run in one step.
      shift: s, the distance by which one example moves a step in real arithmetic.
    """

    fraction: float
    shift: float


def bound_rounding(
    params: Tree,
    prox: Prox,
    *,
    num_steps: int,
    num_examples: int,
    setting: Setting,
    dtype: DTypeLike = np.float64,
) -> Rounding:
    """Bound the distance that rounding in a dtype adds between two runs in one step.

    params are the initial parameters. The bound is from the module's docstring.
    """
    eta, regularization = map(number, (setting["step_size"], setting["regularization"]))
    bound, size = number(setting["gradient_norm"]), num_examples
    curvature = max(number(setting["smoothness"]), number(setting["weak_convexity"]))
    start = float(optax.tree.norm(params))
    prox_start = prox(params, jnp.asarray(eta, jnp.float32))
    change = jax.tree.map(jnp.subtract, prox_start, params)
    prox_distance = float(optax.tree.norm(change))

    # The bounds on the iterates must include rounding. The factor 1.05 covers it: in a
    # run that `MAX_FRACTION` permits, rounding adds less than a twentieth.
    r = abs(1 - eta * regularization)
    step = 1.05 * (eta * (bound + regularization * start) + prox_distance)
    steps = num_steps if r == 1 else (1 - r**num_steps) / (1 - r)
    diameter = number(setting["diameter"])
    # prox(x₀) and all later iterates are in a set of this diameter.
    radius = start + min(step * steps, 1.05 * (diameter + prox_distance))

    # example_error is γ_k, for one example, and sum_error is γ_{n+k}, for the sum over
    # all examples.
    k = 2 * optax.tree.size(params) + 64
    example_error, sum_error = margin(k, dtype), margin(size + k, dtype)
    update = radius + eta * (bound + (curvature + regularization) * radius)
    error = eta * sum_error * bound + example_error * update
    shift = setting["adjacency"].sensitivity_factor * eta * bound / size
    return Rounding(2 * error / shift, shift)


def to_float64(params: Params) -> Params:
    """Cast real parameters to float64; the caller must enable 64-bit types."""
    return jax.tree.map(lambda x: x.astype(jnp.float64), widen(params))


def innermost_equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield all equations of a jaxpr, at any depth, that contain no inner jaxpr."""
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation))
        if not inner:
            yield equation
        for body in inner:
            yield from innermost_equations(body)


@scoped
def find_narrowing_primitive(loss_fn: LossFn, params: Tree, data: Tree) -> str | None:
    """Name the first primitive that narrows float64 in a loss's gradient, or None.

    The function traces the gradient of one example at float64 parameters. A primitive
    narrows float64 if one of its inputs is float64 and one of its outputs is a float of
    fewer bits.
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    gradient = jax.make_jaxpr(jax.grad(loss_fn))(to_float64(params), example)
    for equation in innermost_equations(gradient.jaxpr):
        wide = any(aval(v).dtype == jnp.float64 for v in equation.invars)
        floats = filter(is_real, equation.outvars)
        if wide and any(aval(v).dtype != jnp.float64 for v in floats):
            return str(equation.primitive)
    return None


def sensitivity(
    loss_fn: LossFn,
    params: Tree,
    data: _checks.Data,
    prox: Prox,
    *,
    num_steps: int,
    setting: Setting,
) -> float:
    """Bound the distance by which one example moves the last iterate in float64.

    The bound is the sensitivity in real arithmetic plus the distance that rounding can
    add. The function raises a ValueError if the sensitivity is inf, if the loss narrows
    float64, or if `fraction` in the result of `bound_rounding` is above MAX_FRACTION.
    """
    num_examples = len(data.finite)
    sizes = {"num_steps": num_steps, "num_examples": num_examples}
    exact = float(iteration.gradient_descent_sensitivity(**sizes, **setting))
    if not exact < math.inf:
        raise ValueError(
            "epsilon must be attainable with some noise, but one example can move "
            f"the last iterate without bound for smoothness {setting['smoothness']!r} "
            f"and {num_steps} steps."
        )
    primitive = find_narrowing_primitive(loss_fn, params, data.examples)
    if primitive is not None:
        raise ValueError(
            "loss_fn must not reduce the precision of its parameters, which is "
            "float64, because rounding could move the last iterate further than one "
            "example does; got a loss whose gradient is rounded to a narrower dtype "
            f"by {primitive}."
        )
    start = widen(params)
    fraction, shift = bound_rounding(
        start, prox, num_steps=num_steps, num_examples=num_examples, setting=setting
    )
    if fraction > MAX_FRACTION:
        raise ValueError(
            "num_steps, the number of examples, or the number or norm of the "
            f"parameters must be smaller: with {num_steps} steps on {num_examples} "
            f"examples, rounding in float64 may add {fraction:.0%} to the sensitivity, "
            f"and at most {MAX_FRACTION:.0%} is allowed."
        )
    # Rounding adds the same fraction to a sum Σ_j c^j of steps as to a single step. If
    # a set's diameter makes the sensitivity less than one shift, add the fraction of
    # the shift.
    return exact + fraction * max(exact, shift)
