"""The assumptions of bounds on a last iterate, and the Lipschitz constant of a step.

The Lipschitz constants are exact under the assumptions on the loss. The loss of one
example has curvature between a and M (a = −m for a weakly convex loss). The step is
x ↦ x − η (mean gradient), with the step size η. Without clipping, the Lipschitz
constant of the step is max(|1 − ηa|, |1 − ηM|).

With clipping, the constant can be larger than this value. Clipping is the proximal map
of a convex function. Let two points differ by d, and let the gradients at the two
points differ by Δ before clipping. The difference of the clipped gradients is then in
the ball whose diameter is the segment from 0 to Δ. The difference Δ itself is in a
second ball, with the centre (M − m)/2 · d and the radius (M + m)/2 · ‖d‖. For a given
Δ, the largest distance ‖d − η (clipped difference)‖ is half of the sum of the distances
from ηΔ to 0 and from ηΔ to 2d. The points with the same sum are an ellipse with the
foci 0 and 2d. The Lipschitz constant is therefore given by the largest ellipse that
meets η times the second ball. Let ‖d‖ = 1, κ = η(M − m)/2 and ρ = η(M + m)/2. If this
ellipse touches the ball outside the line through the foci, the constant is
sqrt(1 + ρ²/(κ(2 − κ))), which is above 1 even for convex losses. Otherwise, the
constant is max(1 + ηm, ηM − 1) (`clipped_step_lipschitz`).

A gradient of the form (scalar function of ⟨w, x⟩) · x has a fixed direction. The
clipped gradient is the gradient of another loss of the same form, with curvature
between min(a, 0) and M. Clipping therefore removes only strong convexity: where a
gradient is clipped, the curvature is 0.
"""

from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike

_Number = TypeVar("_Number")


class Setting(TypedDict):
    """The assumptions of a bound on the last iterate, as required keyword arguments.

    A step maps the parameters w to Π(w − η(mean of the batch's gradients + λ w +
    noise)), where Π is the proximal map of a convex function or the projection onto a
    convex set. Π does not depend on the data.

    Attributes:
      step_size: η, f[*b], positive. If smoothness is finite, η must be at most
        2 / (smoothness + regularization), because a larger step can increase distances
        even for a convex loss. This limit is not checked if one of the three numbers is
        traced. The bounds are valid above the limit, too.
      gradient_norm: a bound C on the norm of one example's gradient, f[*b], positive:
        the clip norm, or the Lipschitz constant of the loss.
      clipped: whether gradients are clipped to gradient_norm. If false, gradient_norm
        is an assumption on the loss.
      generalised_linear: whether one example's loss is a function of one linear score
        ⟨w, x⟩ of its features x, or w is a single number. The flag matters only with
        clipping. If the flag is false, clipping can raise the Lipschitz constant of a
        step.
      smoothness: the largest curvature of one example's loss without the regulariser,
        f[*b]; inf if unknown.
      weak_convexity: m, f[*b], where −m is the least curvature of one example's loss
        without the regulariser. m is 0 for a convex loss.
      strong_convexity: the least curvature of one example's loss without the
        regulariser, f[*b], or 0 if that curvature is not positive. strong_convexity
        must be 0 with clipping, because a clipped loss is not strongly convex, and
        under ADD_REMOVE, because a batch may have fewer than batch_size examples. In
        these two cases, a traced strong_convexity raises a ValueError.
      regularization: λ, f[*b], at least 0. The gradient of the regulariser (λ/2)‖w‖² is
        added without clipping. With clipping, λ must be below 1 / η if
        generalised_linear is false.
      diameter: the diameter of the set onto which Π projects, f[*b], positive; inf
        without such a set.
      adjacency: which data sets are compared. Under ADD_REMOVE, no batch of either data
        set may have more than batch_size examples, and the choice of batches must not
        depend on the examples.
    """

    step_size: ArrayLike
    gradient_norm: ArrayLike
    clipped: bool
    generalised_linear: bool
    smoothness: ArrayLike
    weak_convexity: ArrayLike
    strong_convexity: ArrayLike
    regularization: ArrayLike
    diameter: ArrayLike
    adjacency: Adjacency


class Bounds(NamedTuple):
    """The bounds for a run, f[*b] each; inf where a bound does not apply.

    The bounds are values of ε from `noisy_sgd_bounds`, and GDP parameters μ from all
    other functions. A shift reduces the distance of two coupled runs on neighbouring
    data sets, at a cost in μ.

    Attributes:
      composition: the bound that treats every step as released.
      contraction: the last-iterate bound that uses no diameter. A bound on μ has
        shifts in all steps from the first step that uses the differing example.
      diameter: the last-iterate bound that uses a diameter. The bound has shifts only
        in the last steps, before which the distance of the two runs is at most the
        diameter of the set of all iterates.
    """

    composition: jax.Array
    contraction: jax.Array
    diameter: jax.Array

    @property
    def best(self) -> jax.Array:
        """The minimum of the bounds, f[*b]."""
        return jnp.min(jnp.stack(self), axis=0)

    @property
    def winner(self) -> str:
        """The name of the smallest bound, for scalar bounds.

        Of several equal smallest bounds, the result names the first in field order.
        """
        values = [float(x) for x in self]
        return self._fields[values.index(min(values))]


class Numbers(NamedTuple, Generic[_Number]):
    """The numbers of a run that are arguments of compiled functions.

    The numbers are the noise multiplier, the batch size and the numeric fields of
    `Setting`, with the same names.
    """

    noise_multiplier: _Number
    batch_size: _Number
    step_size: _Number
    gradient_norm: _Number
    smoothness: _Number
    weak_convexity: _Number
    strong_convexity: _Number
    regularization: _Number
    diameter: _Number


class Assumed(NamedTuple):
    """The static assumptions of a `Setting`.

    Attributes:
      preserves_lipschitz: whether clipping never increases the Lipschitz constant of a
        step, for losses that are not strongly convex. `preserves_lipschitz` is true if
        gradients are not clipped, or if each example's gradient has a fixed direction.
      bounded: whether the diameter can be finite.
      factor: the sensitivity of a sum of gradients, divided by gradient_norm.
      convex: whether losses are assumed to be convex and `preserves_lipschitz` is true.
        A step with step_size at most 2 / (smoothness + regularization) then never
        increases a distance.
    """

    preserves_lipschitz: bool
    bounded: bool
    factor: float
    convex: bool


class Step(NamedTuple):
    """The numbers of a step, with distances in standard deviations of the step's noise.

    Attributes:
      log_lipschitz: the log of the step's Lipschitz constant, f64[]; 0 where
        `finite_lipschitz` is false.
      finite_lipschitz: whether the Lipschitz constant is known, because smoothness is
        finite and the numbers of the run are in range, bool[].
      shift: the distance by which one differing example moves two coupled runs apart in
        the step, f64[].
      diameter: the diameter of the set that contains the iterates, f64[]; 1 where
        `bounded` is false.
      bounded: whether `finite_lipschitz` is true, the diameter is finite, and the
        standard deviation of the step's noise is positive and finite, bool[].
      valid: whether the numbers of the run are in range, bool[].
    """

    log_lipschitz: jax.Array
    finite_lipschitz: jax.Array
    shift: jax.Array
    diameter: jax.Array
    bounded: jax.Array
    valid: jax.Array


class SettingError(TypeError, ValueError):
    """An error for an assumption that is missing, or for an unknown argument.

    The error is a TypeError, like the error for a missing argument of a Python
    function, and a ValueError, like the error for an argument out of range.
    """


def check_curvature(smoothness, weak_convexity, strong_convexity) -> None:
    """Raise a ValueError if curvatures are out of range or contradict each other."""
    validate.nonnegative("smoothness", smoothness, finite=False)
    validate.nonnegative("weak_convexity", weak_convexity)
    validate.nonnegative("strong_convexity", strong_convexity)
    curvatures = smoothness, weak_convexity, strong_convexity
    M, weak, strong = map(validate.concrete, curvatures)
    if strong is not None and weak is not None and np.any((strong > 0) & (weak > 0)):
        raise ValueError(
            "weak_convexity must be 0 for a strongly convex loss; "
            f"got {weak_convexity!r} and strong_convexity {strong_convexity!r}."
        )
    if strong is not None and M is not None and np.any(strong > M):
        raise ValueError(
            "strong_convexity must be at most smoothness; "
            f"got {strong_convexity!r} and smoothness {smoothness!r}."
        )


def check_names(setting: Setting) -> None:
    """Raise a SettingError unless the setting has all assumptions and no other key."""
    required = Setting.__annotations__.keys()
    missing = [name for name in required if name not in setting]
    if missing:
        raise SettingError(
            f"{', '.join(missing)} must be given, because the guarantee depends on "
            "these assumptions and they have no defaults (see "
            "dpjax.accounting.iteration.Setting)."
        )
    unknown = [name for name in setting if name not in required]
    if unknown:
        raise SettingError(
            f"{', '.join(unknown)} must not be given: no argument and no assumption "
            "has that name."
        )


def _raise_value_error(numbers: Numbers[ArrayLike], name: str, rule: str) -> None:
    raise ValueError(f"{name} must be {rule}; got {getattr(numbers, name)!r}.")


def _check_step(numbers: Numbers[ArrayLike], preserves_lipschitz: bool) -> None:
    values = numbers.step_size, numbers.smoothness, numbers.regularization
    eta, M, regularization = map(validate.concrete, values)
    if eta is None or regularization is None:
        return
    M = np.inf if M is None else M  # a traced smoothness cannot be checked
    finite = np.isfinite(M)
    curvature = np.where(finite, eta * (np.where(finite, M, 0) + regularization), 0)
    if np.any(curvature > 2 * (1 + 4 * ULP)):
        _raise_value_error(
            numbers,
            "step_size",
            "at most 2 / (smoothness + regularization), because a larger step can "
            "increase distances even on a convex loss",
        )
    if not preserves_lipschitz and np.any(eta * regularization >= 1):
        _raise_value_error(
            numbers,
            "regularization",
            "below 1 / step_size if clipped gradients may change direction",
        )


def check(
    noise_multiplier: ArrayLike, batch_size: ArrayLike, setting: Setting
) -> tuple[Numbers[ArrayLike], Assumed]:
    """Check the arguments of a run, and return its numbers and static assumptions.

    The caller checks batch_size.

    Raises:
      ValueError: a number is out of range, or an assumption fails.
      SettingError: an assumption is missing, or an argument is unknown.
    """
    check_names(setting)
    given: dict[str, Any] = {**setting}
    fields = {name: given[name] for name in Numbers._fields if name in given}
    numbers = Numbers[ArrayLike](noise_multiplier, batch_size, **fields)
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.positive("step_size", numbers.step_size)
    validate.positive("gradient_norm", numbers.gradient_norm)
    validate.nonnegative("regularization", numbers.regularization)
    weak_convexity, strong_convexity = numbers.weak_convexity, numbers.strong_convexity
    check_curvature(numbers.smoothness, weak_convexity, strong_convexity)
    bounded = validate.diameter(numbers.diameter)
    adjacency = validate.adjacency(setting["adjacency"])
    clipped = validate.flag("clipped", setting["clipped"])
    linear = validate.flag("generalised_linear", setting["generalised_linear"])
    preserves_lipschitz = linear or not clipped
    weak, strong = map(validate.concrete, (weak_convexity, strong_convexity))
    # A traced value is treated as positive, since the number is unknown during tracing.
    if strong is None or np.any(strong > 0):
        if clipped:
            _raise_value_error(
                numbers,
                "strong_convexity",
                "0 with clipped gradients, because the clipped loss has no curvature "
                "where the clip is active (for a regulariser outside the clip, use "
                "regularization)",
            )
        if adjacency is Adjacency.ADD_REMOVE:
            _raise_value_error(
                numbers,
                "strong_convexity",
                "0 under ADD_REMOVE, because a batch may have fewer than batch_size "
                "examples",
            )
    _check_step(numbers, preserves_lipschitz)
    assumed = Assumed(
        preserves_lipschitz=preserves_lipschitz,
        bounded=bounded,
        factor=adjacency.sensitivity_factor,
        convex=preserves_lipschitz and weak is not None and not np.any(weak > 0),
    )
    return numbers, assumed


def excess(
    step_size: jax.Array, lower: jax.Array, upper: jax.Array, scale: jax.Array
) -> jax.Array:
    """The Lipschitz constant of a gradient step without clipping, minus 1, rounded up.

    If step_size · upper is above 2 by at most 8 times the float64 machine epsilon, the
    product counts as 2.

    The curvature of the loss is between `lower` and `upper`. `lower` is a sum of terms.
    The rounding error of `lower` is bounded by means of `scale`, the sum of the terms'
    absolute values.
    """
    # Bok, Su and Altschuler (2024), Lemma 2.8, https://arxiv.org/abs/2403.00278:
    # max(|1 − η lower|, |1 − η upper|) − 1, without the cancellation of a subtraction
    # from 1, so that the result is precise for small step sizes.
    tolerance = 4 * ULP * step_size
    low = -step_size * lower + tolerance * scale
    high = step_size * upper - 2
    # For a step size of 2/M the product with M may be rounded to slightly above 2. The
    # product must still count as at most 2.
    large = high > 8 * ULP
    high = high + tolerance * upper
    return jnp.maximum(low, jnp.where(large, high, jnp.minimum(high, 0.0)))


def clipped_excess(
    step_size: jax.Array, weak: jax.Array, upper: jax.Array
) -> jax.Array:
    """The Lipschitz constant of a step along clipped gradients, minus 1, rounded up.

    The curvature of the loss before clipping is between −weak and upper.
    """
    # This constant replaces Kong and Ribero (2024), Proposition 3.4(b),
    # https://arxiv.org/abs/2407.05237, whose L_λ(0, M) = 1 is not valid. The constant
    # is sqrt(1 + ρ²/(κ(2 − κ))) if the ellipse touches the ball outside the line
    # through the foci (see the module's docstring), and otherwise
    # max(1 + ηm, ηM − 1).
    rho, kappa = step_size * (upper + weak) / 2, step_size * (upper - weak) / 2
    inner = kappa * (2 - kappa)
    touches = (inner > 0) & (jnp.abs(1 - kappa) * rho <= inner)
    square = jnp.where(touches, rho, 0.0) ** 2 / jnp.where(touches, inner, 1.0)
    # At the boundary of the two cases the two formulas have the same value, so that
    # rounding errors in `touches` have little effect. x/(1 + sqrt(1 + x)) is
    # sqrt(1 + x) − 1 without cancellation.
    ellipse = square * (1 + 16 * ULP) / (1 + jnp.sqrt(1 + square))
    excess = jnp.maximum(step_size * weak, step_size * upper - 2)
    excess = excess + 4 * ULP * step_size * (weak + upper)
    bound = jnp.where(touches, jnp.maximum(ellipse, excess), excess)
    return jnp.where(jnp.isfinite(rho), bound, jnp.inf)


def step(numbers: Numbers[jax.Array], assumed: Assumed) -> Step:
    """The `Step` for the numbers and the static assumptions of a run.

    The field `valid` is False for numbers out of range. Callers then return inf.
    """
    noise, batch, eta, norm, M, weak, strong, regularization, diameter = numbers
    valid = (noise > 0) & (batch > 0) & (eta > 0) & (norm > 0) & (diameter > 0)
    valid = valid & (batch < jnp.inf) & (eta < jnp.inf) & (norm < jnp.inf)
    valid = valid & (M >= 0) & (weak >= 0) & (strong >= 0) & (regularization >= 0)
    valid = valid & (strong <= M) & (weak + strong + regularization < jnp.inf)
    if not assumed.preserves_lipschitz:
        valid = valid & (eta * regularization < 1)
    finite_lipschitz = valid & (jnp.inf > M)
    bounded = finite_lipschitz & (diameter < jnp.inf)
    noise, batch, eta, norm = (
        jnp.where(valid, x, 1.0) for x in (noise, batch, eta, norm)
    )
    M, weak, strong, regularization = (
        jnp.where(finite_lipschitz, x, 0.0) for x in (M, weak, strong, regularization)
    )
    # c is the Lipschitz constant of a step without noise. For a gradient step, the
    # curvature is between strong + λ − m and M + λ. A clipped step with the regulariser
    # is x ↦ (1 − ηλ)(x − η/(1 − ηλ) clipped mean). The proximal map and the projection
    # have the constant 1 (Bok, Su and Altschuler 2024, Lemma 2.9).
    if assumed.preserves_lipschitz:
        lower, scale = strong + regularization - weak, strong + regularization + weak
        lipschitz_excess = excess(eta, lower, M + regularization, scale)
        log_c = jnp.log1p(jnp.maximum(lipschitz_excess, -1 + ULP))
    else:
        shrinkage = 1 - eta * regularization
        lipschitz_excess = clipped_excess(eta / shrinkage, weak, M)
        log_c = jnp.log1p(lipschitz_excess) + jnp.log1p(-eta * regularization)
        log_c = log_c + 8 * ULP * eta * (regularization + weak + M)
    log_c = log_c + 4 * ULP * jnp.abs(log_c)  # rounded up, also where it is negative
    # Bok, Su and Altschuler (2024), (2.1), https://arxiv.org/abs/2403.00278: the noise
    # of a step has the standard deviation ησ', where σ' = noise · norm / batch is that
    # of the noise on the mean gradient. One example moves the step by
    # η · factor · norm / batch, which is ησ' · factor / noise.
    unit = noise * norm * eta / batch
    bounded = bounded & (unit > 0) & (unit < jnp.inf)
    diameter = jnp.where(bounded, diameter, 1.0) / jnp.where(bounded, unit, 1.0)
    shift = jnp.maximum(assumed.factor / noise, jnp.where(noise < jnp.inf, TINY, 0.0))
    return Step(log_c, finite_lipschitz, shift, diameter, bounded, valid)


@float64("up")
def _step64(step_size, smoothness, weak, strong):
    lipschitz_excess = excess(step_size, strong - weak, smoothness, strong + weak)
    c = jnp.maximum((1 + lipschitz_excess) * (1 + 2 * ULP), 0.0)
    valid = (step_size >= 0) & (weak >= 0) & (strong >= 0) & (strong <= smoothness)
    return jnp.where(valid & jnp.isfinite(step_size * smoothness), c, jnp.inf)


@float64("up")
def _clipped_step64(step_size, weak, smoothness):
    c = (1 + clipped_excess(step_size, weak, smoothness)) * (1 + 2 * ULP)
    return jnp.where((step_size >= 0) & (weak >= 0) & (smoothness >= 0), c, jnp.inf)


def step_lipschitz(
    step_size: ArrayLike,
    *,
    smoothness: ArrayLike,
    weak_convexity: ArrayLike = 0.0,
    strong_convexity: ArrayLike = 0.0,
) -> jax.Array:
    """The Lipschitz constant of a gradient step without clipping.

    Args:
      step_size: η, f[*b], positive.
      smoothness: M, the largest curvature of one example's loss, f[*b], at least 0.
      weak_convexity: m, f[*b], at least 0. The curvature is at least −m.
      strong_convexity: s, f[*b], from 0 to M. If s is positive, the curvature is at
        least s, and m must be 0.

    Returns:
      max(|1 − η (s − m)|, |1 − ηM|), f[*b], rounded up. The result is inf if M is inf,
      and for traced arguments out of range. A traced step_size of 0 is accepted.

    Raises:
      ValueError: a static argument is out of range or contradicts another.

    Reference: Bok, Su and Altschuler (2024), Lemma 2.8.

    Example:
      >>> print(f"{step_lipschitz(0.1, smoothness=4.0, strong_convexity=1.0):.2f}")
      0.90
    """
    validate.positive("step_size", step_size)
    check_curvature(smoothness, weak_convexity, strong_convexity)
    return _step64(step_size, smoothness, weak_convexity, strong_convexity)


def clipped_step_lipschitz(
    step_size: ArrayLike, *, weak_convexity: ArrayLike, smoothness: ArrayLike
) -> jax.Array:
    """The Lipschitz constant of a step along the mean of clipped gradients.

    The constant is at least 1, and is above 1 if smoothness is positive, even for
    convex losses. For a generalised linear loss, which is a function of one score
    ⟨w, x⟩ of the features x, use `step_lipschitz` with strong_convexity=0 instead,
    because the gradients of such a loss have a fixed direction.

    Args:
      step_size: η, f[*b], positive.
      weak_convexity: m, f[*b], at least 0; 0 for a convex loss.
      smoothness: M, the largest curvature of one example's loss, f[*b], at least 0.

    Returns:
      The constant, f[*b], rounded up. Let κ = η(M − m)/2 and ρ = η(M + m)/2. The
      constant is sqrt(1 + ρ²/(κ(2 − κ))) if κ > 0 and |1 − κ|ρ <= κ(2 − κ), and
      max(1 + ηm, ηM − 1) otherwise. The result is inf if M is inf, and for traced
      arguments out of range. A traced step_size of 0 is accepted.

    Raises:
      ValueError: a static argument is out of range.

    Reference: the docstring of `dpjax.accounting.iteration._setting` has the
    derivation. The constant replaces Kong and Ribero (2024), Proposition 3.4(b).

    Example:
      >>> c = clipped_step_lipschitz(0.5, weak_convexity=0.0, smoothness=1.0)
      >>> print(f"{c:.6f}")
      1.069045
    """
    validate.positive("step_size", step_size)
    check_curvature(smoothness, weak_convexity, 0.0)
    return _clipped_step64(step_size, weak_convexity, smoothness)
