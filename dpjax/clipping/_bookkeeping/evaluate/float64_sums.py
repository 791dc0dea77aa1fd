"""Sums of clipped gradients in float64, with a bound on their rounding errors.

The guarantee of a mechanism on a lattice needs a bound on the change of the computed
sum by one example. A bound on the change of the exact sum does not suffice. Consider
two batches that have the same examples in all slots (indices of the leading axis)
except one. The terms of all other slots are then the same floats. This module bounds
the difference of the two sums' rounding errors, divided by the clip norm C. Here
γ_k = k u / (1 − k u) for the unit roundoff u (`dpjax._core.rounding`).

- **Blocks of rows.** The gradient of a matrix is a sum Σ a_t ⊗ d_t of outer products of
  rows of activations and cotangents. A product in float32 covers a block of at most
  `ROWS` rows, and the products of blocks are added in float64. Equal blocks have equal
  products. So the rounding errors differ only in blocks that contain the changed slot.
  The error of the product of a block with k rows is at most γ_k K, where K bounds the
  size Σ ‖a_t‖‖d_t‖ of the block's terms. If an example has one row, its terms have size
  at most C. If an example has more rows, its terms have size at most 512 C (`factors`).
- **Per-example gradients** are added in the same way: in float32 within blocks of
  `BLOCK` examples, and then in float64. A clipped gradient is a term of size at most C.
- **Products in float64** of float32 factors, with k terms, have an error of at most γ_k
  times the size of all terms, with the unit roundoff u of float64. The same bound holds
  for the sums of blocks.
- **The cast** of the sum of m gradients to float32 has an error of at most 2⁻²⁴ m C.

The bound on the difference of the two errors is the sum of the bounds for both batches.
An empty slot contributes only zeros. So if the changed slot is empty in one batch, a
block that has only rows of this slot has no rounding error in this batch.
"""

import jax
import jax.numpy as jnp

from dpjax._core.meshes import add_varying_axes, varying_axes
from dpjax._core.rounding import HIGHEST, margin
from dpjax.clipping._bookkeeping import factors as fac
from dpjax.clipping._bookkeeping.analysis.components import Component
from dpjax.clipping._bookkeeping.analysis.plan import Plan
from dpjax.clipping._bookkeeping.analysis.sites import RuledSite, Site
from dpjax.clipping._bookkeeping.rules import Dense
from dpjax.clipping._clip import BLOCK

# The maximum number of rows of a block. With more rows, products are faster but round
# more: with 128 rows the bound stays at 0.41 % of the clip norm.
ROWS = 128
# If an example has fewer rows, blocks of one example are too small to be fast, and the
# terms of a block of several examples could have size 512 C for each example.
_MIN_ROWS = 64
# Blocks whose products are small are multiplied together, up to this many entries at
# once. On CPUs, XLA takes four times longer for several larger matrices in one batch
# than for one matrix after the other.
_MAX_ENTRIES = 2**13


def uses_blocks(component: Component, site: Site) -> bool:
    """Whether a site's gradients are summed by products of blocks of rows.

    The products are in float32, and are then added in float64. Otherwise, the products
    or the sum are in float64.
    """
    if not isinstance(site, RuledSite) or not isinstance(site.rule, Dense):
        return False
    if site.size.rows == 1:
        # The size of the only row's term is the norm, unless a root has several sites.
        return all(len(root) == 1 for root in component.roots or ())
    return site.size.rows >= _MIN_ROWS


def relative_error(plan: Plan | None, batch: int) -> float:
    """A bound on the difference of neighbouring batches' rounding errors, divided by C.

    The terms of a block are added in float32 or float64, and the sums of blocks are
    added in float64. The result is then cast to float32. C is the clip norm.

    Args:
      plan: the analysis of the loss; None for sums of per-example gradients alone.
      batch: the number of slots of the whole batch, with or without an example.

    Returns:
      η / C, for a bound η on the difference. If two batches are equal except for one
      slot, which is empty in one of the batches, the L2 distance of the computed sums
      is at most the distance of the exact sums plus η. If the slot has another example
      instead, the distance of the computed sums is at most 2 C + 2 η.
    """
    # The rounding error η of two neighbouring batches has four parts.
    #
    # 1. Float32 sums over several examples. A block is a sum, for one parameter leaf,
    # of the clipped gradients of k = min(BLOCK, batch) examples; blocks are added in
    # float64. Only one block of each leaf has the differing example. The error of a
    # block is at most γ_k = k u / (1 − k u), with u the unit roundoff of float32, times
    # the sum of the norms of the k gradients of the leaf. One example's squared norms
    # in all leaves add up to at most C². By the triangle inequality over examples, the
    # errors in all leaves together have at most the norm γ_k k C. The two batches give
    # the factor 2.
    examples = min(BLOCK, batch)
    of_examples = 2 * margin(examples, jnp.float32) * examples
    # 2. Float32 sums over rows of one example, in blocks of up to ROWS rows. Of two
    # neighbouring batches, only one has the example. The bounds of the first and second
    # part are added, since other examples may have their whole norm in parameters whose
    # blocks have several examples.
    rows, of_rows = 1, 0.0
    pairs = zip(plan.components, plan.forms, strict=True) if plan else ()
    for component, form in pairs:
        # For other components the sum is made of per-example gradients.
        if not form.gram:
            continue
        rows = max(rows, sum(site.size.rows for site in component.ruled_sites))
        for site in component.ruled_sites:
            if uses_blocks(component, site) and site.size.rows > 1:
                block = margin(min(ROWS, site.size.rows), jnp.float32)
                of_rows = max(of_rows, block / fac.MIN_NORM_RATIO)
    # 3. Sums in float64. No sum has more terms than these: all rows of a component, in
    # all slots. A term's size is at most 512 times that of the clipped gradient.
    size = 1 / fac.MIN_NORM_RATIO if rows > 1 else 1.0
    in_float64 = 2 * margin(rows * batch + 8, jnp.float64) * size * batch
    # 4. The cast to float32.
    cast = 2 * margin(1, jnp.float32) * batch
    # 2⁻²⁰ is sixteen float32 roundings. They cover the caller's products with the
    # returned number.
    return of_rows + of_examples + in_float64 + cast + 2.0**-20


def sum_in_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """The sum over b and t of outer products left ⊗ right, f64[g, n, p].

    The sum is made of float32 products of blocks of rows, which are added in float64.

    Args:
      left: rows f[b, g, t, n], for each example b and group g.
      right: rows f[b, g, t, p].
    """
    blocks = _split_into_blocks(left), _split_into_blocks(right)
    count, groups, _, n = blocks[0].shape
    entries = groups * n * right.shape[-1]
    chunk_size = max(1, min(count, _MAX_ENTRIES // max(entries, 1)))

    def add(
        total: jax.Array, chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        product = jnp.einsum("cgtn,cgtp->cgnp", *chunk, precision=HIGHEST)
        return total + jnp.sum(product.astype(jnp.float64), axis=0), None

    def chunks(x: jax.Array) -> jax.Array:
        return _pad(x, 0, -count % chunk_size).reshape(-1, chunk_size, *x.shape[1:])

    axes = varying_axes(jax.typeof(left)) | varying_axes(jax.typeof(right))
    zeros = jnp.zeros((groups, n, right.shape[-1]), jnp.float64)
    # A scan's carry must vary over the same mesh axes in all iterations.
    start = add_varying_axes(zeros, axes)
    total, _ = jax.lax.scan(add, start, (chunks(blocks[0]), chunks(blocks[1])))
    return total


def _split_into_blocks(x: jax.Array) -> jax.Array:
    """Cut rows f[b, g, t, n] into blocks f[block, g, row, n], padded with zeros.

    x has t rows f[n] for each example b and group g. A block has at most `ROWS` rows of
    one example. But if each example has one row, a block has the rows of up to `BLOCK`
    examples.
    """
    batch, groups, rows, size = x.shape
    if rows == 1:
        block_size = min(BLOCK, batch)
        x = _pad(x, 0, -batch % block_size).reshape(-1, block_size, groups, size)
        return x.swapaxes(1, 2)
    num_blocks = -(-rows // ROWS)
    x = _pad(x, 2, -rows % num_blocks).reshape(batch, groups, num_blocks, -1, size)
    return x.swapaxes(1, 2).reshape(batch * num_blocks, groups, -1, size)


def _pad(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Append `count` zeros to x along an axis."""
    widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if count else x
