"""Compute norms, gradients and scaled sums of one component from recorded values.

A component is a set of parameter leaves, with its sites. A site is an equation that
combines two values: an operand, which is computed from these leaves, and a value that
depends on the example. One forward and backward pass over a batch records the inputs
and cotangents of these equations.

Some functions here are for one component. Their first arguments are the component and
its `Records`. Other functions are for one site. Their arguments are the site, the
recorded values of the equation's inputs except the operand, and the cotangent of the
equation's output. The recorded values and the cotangent have a batch axis and then one
axis for each scan around the equation. Jitted functions expect the component or the
site wrapped in `Comparable`, so that JAX traces the function once for all components or
sites with the same computation. The factors of a site are the rows whose outer products
add up to the operand's gradient (`factors`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import widen
from dpjax._core.meshes import like
from dpjax._core.typing import ArrayLike, Arrays
from dpjax.clipping import _clip
from dpjax.clipping._bookkeeping import factors as fac
from dpjax.clipping._bookkeeping.analysis.components import Component
from dpjax.clipping._bookkeeping.analysis.plan import match_sites
from dpjax.clipping._bookkeeping.analysis.sites import BlockSite, RuledSite, Site
from dpjax.clipping._bookkeeping.equations import Comparable, aval, bind, is_real
from dpjax.clipping._bookkeeping.evaluate.float64_sums import sum_in_blocks, uses_blocks
from dpjax.clipping._bookkeeping.evaluate.run import Records
from dpjax.clipping._bookkeeping.rules import Rule

# A component whose compiled program is shared by all components with equal equations.
Shared = Comparable[Component]

Out = TypeVar("Out")


def canonicalize(
    site: Site, records: Arrays, cotangent: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Apply the rule's `canonicalize` to the recorded arrays and cotangent of a site.

    The rule may change the arrays and the cotangent, for example by clamping the
    indices of a lookup, but not the gradient. Norms and sums are both computed from the
    results, so that norms and sums are those of the same gradients. For a site without
    a rule, the arrays and the cotangent are returned unchanged.
    """
    # Most rules change no arrays. Then there is nothing to trace.
    ruled = isinstance(site, RuledSite)
    if not ruled or type(site.rule).canonicalize is Rule.canonicalize:
        return tuple(records), cotangent
    return _canonicalize(Comparable(site), records, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def _canonicalize(
    comparable: Comparable[RuledSite], records: Arrays, cotangent: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    site = comparable.part
    return _map_rule(site, site.rule.canonicalize)(records, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def factors_of(
    comparable: Comparable[RuledSite], records: Arrays, cotangent: jax.Array
) -> fac.Factors:
    """The rows f[b, g, t, ...] whose outer products sum to each example's gradient.

    The gradient is that of a site's operand. Here b is the batch, and g are the groups,
    each with its own sum over the rows t. If the site is in a scan, each iteration of
    the scan gives rows. If all iterations use the same operand, their rows are in the
    same groups. If each iteration has its own operand, each iteration has its own
    groups.
    """
    site = comparable.part
    function = _map_rule(site, site.rule.factors)
    left, right = function(widen_floats(records), widen(cotangent))
    if isinstance(left, fac.OneHot):
        # Positions have no feature axis, but _merge_iterations expects one.
        left = fac.OneHot(_merge_iterations(site, left.position[..., None])[..., 0])
    else:
        left = _merge_iterations(site, left)
    return fac.Factors(left, _merge_iterations(site, right))


def _map_rule(
    site: RuledSite, function: Callable[[Arrays, jax.Array], Out]
) -> Callable[[Arrays, jax.Array], Out]:
    """Map a method of a site's rule over the batch, and over the scans around the site.

    The method is for one example and one iteration.
    """
    # One vmap for each scan around the site, and one for the batch.
    for _ in range(len(site.loops) + 1):
        function = jax.vmap(function)
    return function


def _merge_iterations(site: RuledSite, x: jax.Array) -> jax.Array:
    """Reshape rows f[b, iterations..., g, t, n] to f[b, g, t, n].

    Here b is the batch, g are the groups, t are the rows of a group, and n is the
    length of a row. The other axes are the iterations of the scans around the site. If
    the iterations of a scan share one operand, their axis is merged with the rows t. If
    each iteration has its own operand, the axis is merged with the groups g.
    """
    # Start with the innermost scan, so that the axes of outer scans do not move.
    for depth in reversed(range(len(site.loops))):
        # The iterations join the rows t, which are axis -2, or the groups g, axis -3.
        axis = -3 if site.loops[depth].shared else -4
        x = jnp.moveaxis(x, 1 + depth, axis)
        merged_size = x.shape[axis] * x.shape[axis + 1]
        x = x.reshape(*x.shape[:axis], merged_size, *x.shape[axis + 2 :])
    return x


def transpose_sum(site: RuledSite, others: Arrays, cotangent: jax.Array) -> jax.Array:
    """The sum over the batch of a site's gradients, by the transpose of its equation.

    The sum is computed in the cotangent's dtype.

    Args:
      site: the equation and its operand, the input whose gradient is computed.
      others: the recorded values of the equation's inputs except the operand. All
        floating-point arrays have the cotangent's dtype.
      cotangent: the cotangent of the equation's output, already scaled for each
        example.
    """
    eqn, dtype = site.rule.eqn, cotangent.dtype
    # The loss may ask for bfloat16 or TF32 products. But the sensitivity bound assumes
    # products that round as the arrays' dtype does.
    exact = {"preferred_element_type": dtype, "precision": fac.HIGHEST}
    changed = {name: exact[name] for name in exact if name in eqn.params}

    def forward(operand: jax.Array, others: Arrays) -> jax.Array:
        inputs = list(others)
        # The equation is linear in the operand, with the other inputs fixed.
        inputs.insert(site.position, operand)
        return bind(eqn, inputs, **changed)[0]

    # With in_axes=None the transpose sums over an axis: here over the batch, and over
    # the iterations that share the operand.
    for loop in reversed(site.loops):
        forward = jax.vmap(forward, in_axes=(None if loop.shared else 0, 0))
    forward = jax.vmap(forward, in_axes=(None, 0))
    lengths = [loop.length for loop in site.loops if not loop.shared]
    operand = aval(site.operand)
    operand = like(operand, (*lengths, *operand.shape), dtype)
    return jax.linear_transpose(lambda w: forward(w, others), operand)(cotangent)[0]


def _product_of_blocks(
    site: RuledSite, others: Arrays, cotangent: jax.Array
) -> jax.Array:
    """The sum over the batch of the gradients of a dot_general's operand, in float64.

    A gradient is a sum of outer products of rows (`factors_of`). The rows are divided
    into blocks, and the products of the blocks are added in float64 (`float64_sums`).
    The arguments are those of `transpose_sum`, which computes the same sum in the
    cotangent's dtype.
    """
    left, right = factors_of(Comparable(site), others, cotangent)
    product = sum_in_blocks(left, right)
    # The groups are the iterations with separate operands, then the rule's own groups.
    lengths = [loop.length for loop in site.loops if not loop.shared]
    product = product.reshape(*lengths, -1, *product.shape[1:])
    reorder = site.rule.reorder
    for _ in lengths:
        reorder = jax.vmap(reorder)
    return reorder(product)


def widen_floats(xs: Arrays) -> tuple[jax.Array, ...]:
    """Widen floating-point arrays to at least float32; leave other arrays unchanged."""
    return tuple(widen(x) if is_real(x) else x for x in xs)


@functools.partial(jax.jit, static_argnums=0)
def row_squares(
    comparable: Shared, recorded: Records, clip_norm: ArrayLike
) -> list[jax.Array]:
    """For each root, bounds f[b] of ‖gradient‖² / C², from inner products of rows.

    A root is an array that one or more equations of the component combine with the
    example. An equation may use the root with its axes in another order, with axes of
    size one added or removed, or in another dtype. For each of the b examples, the
    gradient with respect to the root is the sum of outer products of rows of
    activations and cotangents. The list has an upper bound for each root, which is
    infinite or NaN if the rows exceed the limit of `factors.mark_large`. The list is
    empty if the component has no roots, or if the rows of several equations cannot be
    combined.

    Args:
      comparable: the component: parameter leaves, and the equations that use them.
      recorded: the recorded inputs and cotangents of these equations.
      clip_norm: the clip norm C of the leaves.
    """
    squares = []
    for root in match_sites(comparable.part) or ():
        rows = []
        for k, site, swapped in root:
            record, cotangent = recorded.records[k], recorded.cotangents[k]
            factors = factors_of(Comparable(site), record, cotangent)
            left, right = fac.mark_large(factors, clip_norm, swapped)
            # If a site uses the transposed matrix, its left and right rows are
            # exchanged, so that they can be added to those of the root's other sites.
            if swapped and not isinstance(left, fac.OneHot):
                left, right = right, left
            rows.append(fac.Factors(left, right))
        squares.append(fac.square_norm(rows, clip_norm))
    return squares


@functools.partial(jax.jit, static_argnums=0)
def form_gradients(
    comparable: Shared, recorded: Records, clip_norms: Sequence[ArrayLike]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Per-example gradients of a component's leaves, and bounds of their squared norms.

    Args:
      comparable: the component: parameter leaves, and the equations that use them.
      recorded: the recorded inputs and cotangents of these equations.
      clip_norms: for each group of the leaves that are clipped together, the clip norm
        C.

    Returns:
      For each leaf, the gradients f[b, ...]. For each group, an upper bound f[b] of
      ‖gradient‖² / C².
    """
    gradients = per_example_gradients(comparable, recorded)
    groups = comparable.part.group_indices
    squares = _clip.group_squares(gradients, groups, clip_norms, num_batch_axes=1)
    return gradients, squares


@functools.partial(jax.jit, static_argnums=0)
def per_example_gradients(comparable: Shared, recorded: Records) -> list[jax.Array]:
    """Per-example gradients f[b, ...] of the parameter leaves of a component.

    `comparable` holds the leaves and the equations that use them. `recorded` holds the
    recorded inputs and cotangents of these equations.
    """
    component, at_operands = comparable.part, []
    for site, others, gradient in zip(
        component.sites, recorded.records, recorded.cotangents, strict=True
    ):
        # If the tap is on the operand, the cotangent is the operand's gradient.
        if isinstance(site, RuledSite):
            function = _map_rule(site, site.rule.gradient)
            gradient = function(widen_floats(others), widen(gradient))
        # All iterations of a shared loop use one operand, whose gradient is the sum
        # over the iterations.
        shared = [1 + k for k, loop in enumerate(site.loops) if loop.shared]
        at_operands.append(jnp.sum(gradient, axis=shared) if shared else gradient)

    def pull_back(cotangents: list[jax.Array]) -> list[jax.Array]:
        return component.pull_back(recorded.inputs, cotangents)

    return widen(jax.vmap(pull_back)(at_operands))


@functools.partial(jax.jit, static_argnums=0)
def sums_of_gradients(
    comparable: Shared, recorded: Records, scales: Arrays, finite: jax.Array
) -> list[jax.Array]:
    """The sum of scaled gradients for each leaf, from per-example gradients.

    Args:
      comparable: the component: parameter leaves, and the equations that use them.
      recorded: the recorded inputs and cotangents of these equations.
      scales: for each group of the leaves that are clipped together, the examples'
        clipping factors f[b].
      finite: whether each example's gradient is finite, bool[b]. An example whose
        gradient is not finite contributes zero.
    """
    gradients = per_example_gradients(comparable, recorded)
    return [
        _clip.sum_with_scales(x, scales[group], finite)
        for x, group in zip(gradients, comparable.part.group_indices, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0, static_argnames="wide")
def sums_by_sites(
    comparable: Shared,
    recorded: Records,
    scales: Arrays,
    finite: jax.Array,
    *,
    wide: bool = False,
) -> list[jax.Array]:
    """The sum of scaled gradients for each leaf, pulled back from sums at the sites.

    A site is an equation that combines two values: one that is computed from the
    leaves, and one that depends on the example. If the site has a rule, the sum at the
    site is computed for the whole batch at once (`transpose_sum`), or in blocks of rows
    (`_product_of_blocks`). At a checkpointed block, the recorded cotangent is already
    the sum. At other sites, the recorded cotangents are per-example gradients, which
    are scaled and added.

    Args:
      comparable: the component: parameter leaves and their sites.
      recorded: the recorded inputs and cotangents of the sites' equations.
      scales: for each group of the leaves that are clipped together, the examples'
        clipping factors f[b].
      finite: whether each example's gradient is finite, bool[b]. An example whose
        gradient is not finite contributes zero.
      wide: whether the sum is computed in float64 (`float64_sums`).
    """
    # A pull-back gives the sums of all leaves, but with the factors of one group. So
    # each group has its own pull-back.
    sums = [
        _sums_by_sites(comparable.part, recorded, s, finite, wide=wide) for s in scales
    ]
    return [sums[group][k] for k, group in enumerate(comparable.part.group_indices)]


def _sums_by_sites(
    component: Component,
    recorded: Records,
    scale: jax.Array,
    finite: jax.Array,
    *,
    wide: bool,
) -> list[jax.Array]:
    """The sum of scaled gradients for each leaf, with the same factors for all leaves.

    `scale` has the examples' clipping factors f[b]. The other arguments are those of
    `sums_by_sites`.
    """
    records = [
        [_clip.zero_if_not_finite(x, finite) if is_real(x) else x for x in others]
        for others in recorded.records
    ]
    # The dtype in which the norms were computed, at least float32.
    arrays = filter(is_real, sum(records, list(recorded.cotangents)))
    dtype = jnp.result_type(jnp.float32, *widen(list(arrays)))
    sums = []
    for site, others, cotangent in zip(
        component.sites, records, recorded.cotangents, strict=True
    ):
        # The backward pass of a checkpointed block has already scaled and summed.
        if isinstance(site, BlockSite):
            sums.append(cotangent)
            continue
        scaled = _clip.apply_scales(cotangent.astype(dtype), scale, finite)
        if isinstance(site, RuledSite):
            blocks = wide and uses_blocks(component, site)
            # The product of two float32 numbers is exact in float64.
            cast_dtype = jnp.float64 if wide and not blocks else dtype
            others = [x.astype(cast_dtype) if is_real(x) else x for x in others]
            sum_over_batch = _product_of_blocks if blocks else transpose_sum
            sums.append(sum_over_batch(site, others, scaled.astype(cast_dtype)))
        else:
            sums.append(jnp.sum(scaled.astype(jnp.float64 if wide else dtype), axis=0))
    min_dtype = jnp.float64 if wide else jnp.float32
    sums_of_leaves = component.pull_back(recorded.inputs, sums, min_dtype)
    if component.is_leaf:
        return sums_of_leaves
    # If no example has a finite gradient, the sum is zero by definition. The pull-back
    # of zeros may still be NaN, because parameters on the path may be infinite.
    return [jnp.where(jnp.any(finite), x, 0.0) for x in sums_of_leaves]
