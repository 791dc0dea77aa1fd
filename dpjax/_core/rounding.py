"""Upper bounds of sums of squares that hold whatever the rounding.

**Model.** An operation's result is off by a factor 1 + δ with |δ| at most the unit
roundoff u (2⁻²⁴ in float32). Then a sum of k products, in whatever order it is taken
and with or without fused multiply-adds, is off by at most γ_k = k u / (1 − k u) times
the sum of their absolute values (Higham, *Accuracy and Stability of Numerical
Algorithms*, section 3.1); results that underflow to zero add less than 1e-30, in units
of the clip norm, where nothing needs clipping. CPUs and GPUs keep to it in element-wise
arithmetic, sums, and products at `Precision.HIGHEST`. TPUs compute such products from
six of bfloat16 parts, which is outside the model.

To keep k small whatever an array's size, sums are taken in stages of about a thousand
terms. XLA would merge the stages, but for the barriers between them. (A barrier after
each reshape is for speed: on CPUs a sum that a reshape is fused into is ten times
slower.)
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike, DTypeLike

# The bound on an example's influence rests on products: no reduced precision.
HIGHEST = jax.lax.Precision.HIGHEST

# Terms of one stage of a sum.
_STAGE = 1024


def margin(terms: int, dtype: DTypeLike) -> float:
    """At least γ_k for k terms, and for a few percent more of them.

    Raises:
      ValueError: so many terms that k u is above 1/64.
    """
    ku = terms * float(jnp.finfo(dtype).eps) / 2
    if ku > 1 / 64:
        raise ValueError(
            f"sums of {terms} terms in {jnp.dtype(dtype).name} are too inexact to "
            "bound a gradient's norm"
        )
    return ku * 1.05


def staged_sum(
    x: jax.Array,
    kept: int = 0,
    term: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, int]:
    """The sum of terms over all axes but the first ones, and how many a stage has.

    The second is k in the bound on the sum's error, over all stages together.
    """
    terms = 0
    while x.ndim > kept:
        last = x.shape[-1]
        if last > 2 * _STAGE:
            lengths = range(_STAGE // 4, 2 * _STAGE + 1)
            length = max((n for n in lengths if last % n == 0), default=_STAGE)
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -last % length)])
            x = jax.lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, length))
        axes = 1
        while x.ndim - axes > kept and math.prod(x.shape[-axes - 1 :]) <= _STAGE:
            axes += 1
        terms += math.prod(x.shape[-axes:])
        x = jnp.sum(term(x), axis=tuple(range(-axes, 0)))
        x, term = jax.lax.optimization_barrier(x), lambda x: x
    return term(x), terms


def square_sum(x: jax.Array, kept: int = 0, unit: ArrayLike = 1.0) -> jax.Array:
    """At least the sum of squares over all axes but the first ones, in units squared.

    The entries may be off by one rounding.
    """
    # A number of Python takes the array's dtype, as it does in an expression.
    return _square_sum(x, kept, np.asarray(unit, x.dtype) if _is_weak(unit) else unit)


@functools.partial(jax.jit, static_argnames="kept")  # traced once for equal shapes
def _square_sum(x: jax.Array, kept: int, unit: ArrayLike) -> jax.Array:
    total, terms = staged_sum(x, kept, lambda x: jnp.square(x / unit))
    return total * (1 + margin(terms + 8, x.dtype))


def _is_weak(unit: ArrayLike) -> bool:
    return isinstance(unit, int | float)


def upper_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """At least the sum of arrays that are not negative."""
    total = sum(parts, jnp.zeros((), jnp.float32))
    return total * (1 + margin(len(parts) + 2, total.dtype))
