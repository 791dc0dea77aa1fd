"""Factors, gradients and sums of one site, traced once for identical sites.

Each function takes the site, the recorded values of the equation's other inputs, and
the cotangent at the site. These arrays have a batch axis and then one axis for each
scan around the site.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.meshes import like
from dpjax.clipping.bookkeeping.analysis.sites import RuledSite
from dpjax.clipping.bookkeeping.jaxpr.alike import Alike
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, bind
from dpjax.clipping.bookkeeping.rules import factors as fac
from dpjax.clipping.bookkeeping.rules.factors import Factors, OneHot

Out = TypeVar("Out")


@functools.partial(jax.jit, static_argnums=0)
def canonicalize(
    alike: Alike[RuledSite], records: Sequence[jax.Array], cotangent: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The records and the cotangent in the rule's canonical form.

    Norms and sums both start from these arrays, so they describe the same gradient.
    """
    site = alike.part
    return _map_rule(site, site.rule.canonicalize)(records, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def factors_of(
    alike: Alike[RuledSite], records: Sequence[jax.Array], cotangent: jax.Array
) -> Factors:
    """The factors f[b, g, t, ...] of a site, over all iterations of its scans."""
    site = alike.part
    function = _map_rule(site, site.rule.factors)

    def merged(rows: jax.Array | OneHot) -> jax.Array | OneHot:
        if isinstance(rows, OneHot):
            # Positions have no feature axis; _merge expects one.
            return OneHot(_merge(site, rows.position[..., None])[..., 0])
        return _merge(site, rows)

    left, right = function(widen_floats(records), fac.wide(cotangent))
    return Factors(merged(left), merged(right))


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(
    alike: Alike[RuledSite], records: Sequence[jax.Array], cotangent: jax.Array
) -> jax.Array:
    """The operand's gradient for each example and each iteration."""
    site = alike.part
    function = _map_rule(site, site.rule.gradient)
    return function(widen_floats(records), fac.wide(cotangent))


def _map_rule(
    site: RuledSite,
    function: Callable[[jex.JaxprEqn, int, Sequence[jax.Array], jax.Array], Out],
) -> Callable[[Sequence[jax.Array], jax.Array], Out]:
    """A rule's method for one example, mapped over the batch and all iterations."""

    def one(others: Sequence[jax.Array], cotangent: jax.Array) -> Out:
        return function(site.eqn, site.position, others, cotangent)

    # One vmap for each scan around the site, and one for the batch.
    for _ in range(len(site.loops) + 1):
        one = jax.vmap(one)
    return one


def _merge(site: RuledSite, x: jax.Array) -> jax.Array:
    """The rows x, f[b, iterations..., g, t, n], as f[b, g, t, n].

    Iterations that share one operand become rows t. Iterations that have an operand
    each become groups g.
    """
    # From the innermost scan outwards, so that the axes of outer scans do not move.
    for depth in reversed(range(len(site.loops))):
        axis = 1 + depth
        if site.loops[depth].shared:
            x = jnp.moveaxis(x, axis, -3)
            x = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
        else:
            x = jnp.moveaxis(x, axis, -4)
            x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return x


@functools.partial(jax.jit, static_argnums=0)
def transpose_sum(
    alike: Alike[RuledSite], others: Sequence[jax.Array], cotangent: jax.Array
) -> jax.Array:
    """The operand's gradient, summed over the batch by the equation's transpose.

    `cotangent` has been scaled. It and all floating-point arrays in `others` have one
    dtype, and the sum is computed in that dtype.
    """
    site, dtype = alike.part, cotangent.dtype
    eqn = site.eqn
    # The loss may ask for bfloat16 or TF32 products; the sensitivity bound rests on
    # products that round as the arrays' dtype does.
    exact = {"preferred_element_type": dtype, "precision": fac.HIGHEST}
    changed = {name: exact[name] for name in exact if name in eqn.params}

    def forward(operand: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
        inputs = list(others)
        # The equation is linear in the operand, with the other inputs fixed.
        inputs.insert(site.position, operand)
        return bind(eqn, inputs, **changed)[0]

    # Mapping with in_axes=None makes the transpose sum over that axis: over the
    # iterations that share the operand, and over the batch.
    lengths = ()
    for loop in reversed(site.loops):
        forward = jax.vmap(forward, in_axes=(None if loop.shared else 0, 0))
        if not loop.shared:
            lengths = (loop.length, *lengths)
    forward = jax.vmap(forward, in_axes=(None, 0))
    operand = aval(site.operand)
    operand = like(operand, (*lengths, *operand.shape), dtype)
    transpose = jax.linear_transpose(lambda w: forward(w, others), operand)
    return transpose(cotangent)[0]


def widen_floats(xs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays, with floating-point arrays widened to float32 at least."""
    return tuple(fac.wide(x) if is_real(x) else x for x in xs)


def is_real(x: jax.Array) -> bool:
    """Whether x is an array of floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)
