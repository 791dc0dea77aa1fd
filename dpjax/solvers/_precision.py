"""How far floating-point rounding moves two runs of gradient descent apart.

Rounding is not Lipschitz: two iterates as close as one likes may be rounded apart. So
it adds to the distance in every step, and noise that is calibrated to the distance in
real arithmetic hides too little where that distance is not far above a rounding of the
iterate. It is 2ηC/n a step, so in float32 an n of 1e5 is too many.

**Model.** As in `_core.rounding`, with unit roundoff u and γ_k = k u / (1 − k u). In a
step x ↦ prox(x − η(Σ g / n + λx)) with gradients bounded by C, curvature by M, and
iterates by R, these are the errors at most:
  an example's gradient: γ_k (C + M R), as if parameters and result were off by γ_k,
    with k = 2d + 64 for d parameters; for one linear score and a function of it this is
    the bound for a dot product of length d and sixteen roundings;
  their sum in any order, divided by n: γ_n C, up to the same γ_k;
  the step and the prox: γ_k (R + η(C + λR)), of which k is far more than they need.
So two runs, each off by ε = η γ_{n+k} C + γ_k (R + η(C + (M + λ)R)), move apart by 2ε
more than the s that one example moves them, and Σ c^k steps of it make the distance
(1 + 2ε/s) times what it was. The iterates are bounded by what the gradients can add up
to: with r = |1 − ηλ| and a = ‖prox(x₀) − x₀‖,

    ‖x_{t+1} − x₀‖ <= r ‖x_t − x₀‖ + η(C + λ‖x₀‖) + a.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core.dtypes import widen
from dpjax._core.float64 import scoped
from dpjax._core.typing import DTypeLike, LossFn, Params, Tree
from dpjax.accounting import iteration
from dpjax.accounting.iteration import Setting
from dpjax.solvers import _data
from dpjax.solvers._numbers import number
from dpjax.solvers.prox import Prox

MOST = 0.05  # that rounding may add to a sensitivity, as a part of it


def _margin(terms: float, dtype: DTypeLike) -> float:
    """γ_k for k terms."""
    ku = terms * float(jnp.finfo(dtype).eps) / 2
    return ku / (1 - ku) if ku < 1 / 64 else np.inf


class Rounding(NamedTuple):
    """What rounding adds in a step.

    Attributes:
      share: 2ε/s.
      shift: s, how far one example moves a step in real arithmetic.
    """

    share: float
    shift: float


def rounding(
    params: Tree,
    prox: Prox,
    *,
    num_steps: int,
    num_examples: int,
    setting: Setting,
    dtype: DTypeLike = np.float64,
) -> Rounding:
    """How much further rounding in that dtype can move two runs apart in a step."""
    eta, added = number(setting["step_size"]), number(setting["regularization"])
    bound, size = number(setting["gradient_norm"]), num_examples
    curvature = max(number(setting["smoothness"]), number(setting["weak_convexity"]))
    start = float(optax.tree.norm(params))
    moved = prox(params, jnp.asarray(eta, jnp.float32))
    jump = float(optax.tree.norm(jax.tree.map(jnp.subtract, moved, params)))

    # The twentieth is for rounding, which adds less than that where it may run.
    pull = abs(1 - eta * added)
    step = 1.05 * (eta * (bound + added * start) + jump)
    steps = num_steps if pull == 1 else (1 - pull**num_steps) / (1 - pull)
    diameter = number(setting["diameter"])
    radius = start + min(step * steps, 1.05 * (diameter + jump))

    dimension = sum(x.size for x in jax.tree.leaves(params))
    few, many = (_margin(2 * dimension + 64 + k, dtype) for k in (0, size))
    update = radius + eta * (bound + (curvature + added) * radius)
    error = eta * many * bound + few * update
    shift = setting["adjacency"].sensitivity_factor * eta * bound / size
    return Rounding(2 * error / shift, shift)


def to_float64(params: Params) -> Params:
    """Real parameters in float64, where that is enabled."""
    return jax.tree.map(lambda x: x.astype(jnp.float64), widen(params))


def equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """All equations that hold no others, at any depth."""
    for equation in jaxpr.eqns:
        inner = list(_bodies(equation.params))
        if not inner:
            yield equation
        for body in inner:
            yield from equations(body)


def _bodies(params: Mapping[str, object]) -> Iterator[jex.Jaxpr]:
    """The programs among an equation's parameters."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jex.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jex.Jaxpr):
                yield part


@scoped
def narrowing(loss_fn: LossFn, params: Tree, data: Tree) -> str | None:
    """What in the gradient at float64 parameters goes on in less, or None."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)

    def floats(variables: Sequence[Any]) -> set[np.dtype]:
        dtypes = {jnp.dtype(v.aval.dtype) for v in variables}
        return {t for t in dtypes if jnp.issubdtype(t, jnp.floating)}

    gradient = jax.make_jaxpr(jax.grad(loss_fn))(to_float64(params), example)
    for equation in equations(gradient.jaxpr):
        wide = jnp.dtype(jnp.float64) in floats(equation.invars)
        if wide and any(t.itemsize < 8 for t in floats(equation.outvars)):
            return str(equation.primitive)
    return None


def sensitivity(
    loss_fn: LossFn,
    params: Tree,
    data: _data.Data,
    prox: Prox,
    *,
    num_steps: int,
    num_examples: int,
    setting: Setting,
) -> float:
    """How far one example can move the last iterate as it is computed in float64."""
    real = float(
        iteration.gradient_descent_sensitivity(
            num_steps=num_steps, num_examples=num_examples, **setting
        )
    )
    if not real < math.inf:
        raise ValueError(
            "epsilon must be one that some noise reaches: one example can move the "
            f"last iterate without bound, for smoothness {setting['smoothness']!r} and "
            f"{num_steps} steps."
        )
    narrow = narrowing(loss_fn, params, data.examples)
    if narrow is not None:
        raise ValueError(
            "loss_fn must not leave the precision of its parameters, which is float64 "
            "here: rounding could move the last iterate further than one example does; "
            f"got one whose gradient is narrowed by {narrow}."
        )
    share, shift = rounding(
        widen(params),
        prox,
        num_steps=num_steps,
        num_examples=num_examples,
        setting=setting,
    )
    if share > MOST:
        raise ValueError(
            "num_steps must be fewer, or the examples, or the parameters smaller: with "
            f"{num_steps} steps on {num_examples} examples float64 may round two runs "
            f"apart by {share:.0%} of what one example does, and at most {MOST:.0%} is "
            "allowed for."
        )
    # Of Σ c^k steps as of one, and of a set's diameter that is less than a step.
    return real + share * max(real, shift)
