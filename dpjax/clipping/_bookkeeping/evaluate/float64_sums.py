"""Sums of clipped gradients in float64, and how far rounding can move them.

A mechanism on a lattice releases functions of floats. Its guarantee needs a bound on
how much the computed sum changes with one example, and not only the exact sum. Consider
two batches with the same examples in the same slots, but for one slot. Every other
slot's terms are then the same floats. This module bounds the difference of the two
sums' rounding errors, relative to the clip norm:

- **Blocks of rows.** A product in float32 covers at most `ROWS` rows at a time, and the
  blocks' products are added up in float64. Equal blocks have equal products, so only
  the blocks with the changed slot count. The product of a block with k rows is off by
  at most γ_k K, where K bounds the size of the block's terms Σ ‖a_t‖‖d_t‖
  (`dpjax._core.rounding`). An example of one row has terms of size at most C. An
  example of more rows has terms of size at most 512 C (`rules.factors`).
- **Per-example gradients** are added up in the same way: in float32 in blocks of
  `BLOCK`, and then in float64. A gradient is a term of size at most C.
- **Products in float64** of float32 factors are off by at most γ_k of the size of all
  terms, with the γ of float64. So are the sums of blocks.
- **The cast** of the sum of m gradients to float32 is off by at most 2⁻²⁴ m C.

A bound for two batches is twice the bound for one. A block that holds one slot is all
zero where the slot is empty, so that its error counts once.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dpjax._core.meshes import add_varying_axes, varying_axes
from dpjax._core.rounding import HIGHEST, margin
from dpjax.clipping._bookkeeping.analysis.components import Component
from dpjax.clipping._bookkeeping.analysis.sites import RuledSite, Site
from dpjax.clipping._bookkeeping.rules import factors as fac
from dpjax.clipping._bookkeeping.rules.products import Dense
from dpjax.clipping._clip import BLOCK

if TYPE_CHECKING:
    from dpjax.clipping._bookkeeping.analysis.plan import Plan

# The most rows of a block. With more rows, products are faster and round more: 128 rows
# keep the bound at 0.41 % of the clip norm.
ROWS = 128
# With fewer rows than this in an example, blocks of one example are too small to be
# fast, and blocks of several examples would round by up to 512 C for each of them.
_FEWEST_ROWS = 64
# Blocks whose products are small are multiplied together, up to this many entries at
# once. XLA on CPUs multiplies several larger matrices in one batch four times slower
# than one after the other.
_AT_ONCE = 2**13


def uses_blocks(component: Component, site: Site) -> bool:
    """Whether the site's sum is made of float32 products of blocks of rows."""
    if not isinstance(site, RuledSite) or not isinstance(site.rule, Dense):
        return False
    if site.size.rows == 1:
        # The size of a single row's term is the norm, unless sites add up.
        return all(len(root.members) == 1 for root in component.roots or ())
    return site.size.rows >= _FEWEST_ROWS


def relative_error(plan: "Plan | None", batch: int) -> float:
    """A bound on the rounding of a float64 sum, cast to float32, over the clip norm.

    Args:
      plan: the analysis of the loss; None for sums of per-example gradients alone.
      batch: the number of slots m of the whole batch.

    Returns:
      η / C: for two batches that differ in one slot, the computed sums differ by at
      most the exact difference plus η in L2 norm, and by 2 C + 2 η for a replaced
      example.
    """
    # More terms than these are in no sum: all rows of a component, in all slots.
    rows, of_rows = 1, 0.0
    pairs = zip(plan.components, plan.forms, strict=True) if plan else ()
    for component, form in pairs:
        # Elsewhere the sum is made of per-example gradients.
        if not form.gram:
            continue
        ruled = [site for site in component.sites if isinstance(site, RuledSite)]
        rows = max(rows, sum(site.size.rows for site in ruled))
        for site in ruled:
            if uses_blocks(component, site) and site.size.rows > 1:
                of_rows = max(of_rows, _error_of_rows(site.size.rows))
    # A term's size is at most 512 times that of the clipped gradient.
    size = 1 / fac.CANCELLED if rows > 1 else 1.0
    in_float64 = 2 * margin(rows * batch + 8, jnp.float64) * size * batch
    cast = 2 * margin(1, jnp.float32) * batch
    # Sixteen roundings of float32 for the products with this number.
    return of_rows + _error_of_examples(batch) + in_float64 + cast + 2.0**-20


def _error_of_examples(batch: int) -> float:
    """The error of blocks with one row, or one gradient, of each of several examples.

    A block holds a term of each of up to `BLOCK` examples, for one part of the
    gradient. The block's error is at most γ times the sum of the examples' norms in
    that part. The squares of one example's norms in all parts add up to at most C². By
    the triangle inequality the errors of all parts together have at most the norm that
    one block with terms of size C has: γ times the number of examples, times C. This
    error occurs in each of the two batches, which gives the factor 2.
    """
    examples = min(BLOCK, batch)
    return 2 * margin(examples, jnp.float32) * examples


def _error_of_rows(rows: int) -> float:
    """The error of blocks with rows of one example.

    The bound adds to that of `_error_of_examples`, where other examples of the block
    may have their whole norm in another part of the gradient than this example.
    """
    return margin(min(ROWS, rows), jnp.float32) / fac.CANCELLED


def sum_in_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """Σ_b Σ_t left ⊗ right, f64[g, n, p], from float32 products of blocks of rows.

    Args:
      left: rows f[b, g, t, n].
      right: rows f[b, g, t, p].
    """
    blocks = _cut(left), _cut(right)
    count, groups, _, n = blocks[0].shape
    entries = groups * n * right.shape[-1]
    at_once = max(1, min(count, _AT_ONCE // max(entries, 1)))

    def add(
        total: jax.Array, chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        product = jnp.einsum("cgtn,cgtp->cgnp", *chunk, precision=HIGHEST)
        return total + jnp.sum(product.astype(jnp.float64), axis=0), None

    def chunks(x: jax.Array) -> jax.Array:
        return _pad(x, 0, -count % at_once).reshape(-1, at_once, *x.shape[1:])

    axes = varying_axes(jax.typeof(left)) | varying_axes(jax.typeof(right))
    zeros = jnp.zeros((groups, n, right.shape[-1]), jnp.float64)
    # A scan's carry must vary over the same mesh axes in every iteration.
    start = add_varying_axes(zeros, axes)
    total, _ = jax.lax.scan(add, start, (chunks(blocks[0]), chunks(blocks[1])))
    return total


def _cut(x: jax.Array) -> jax.Array:
    """The rows f[b, g, t, n] as blocks f[block, g, row, n], padded with zeros."""
    batch, groups, rows, size = x.shape
    if rows == 1:
        held = min(BLOCK, batch)
        x = _pad(x, 0, -batch % held).reshape(-1, held, groups, size)
        return x.swapaxes(1, 2)
    pieces = -(-rows // ROWS)
    x = _pad(x, 2, -rows % pieces).reshape(batch, groups, pieces, -1, size)
    return x.swapaxes(1, 2).reshape(batch * pieces, groups, -1, size)


def _pad(x: jax.Array, axis: int, more: int) -> jax.Array:
    """The array with `more` zeros at the end of an axis."""
    widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if more else x
