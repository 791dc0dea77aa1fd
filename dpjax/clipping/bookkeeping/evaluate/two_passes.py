"""The clipped sum from two passes: one for the norms, and one for the scaled sum.

The first pass retains the loss, aux and the norms, but no records of the sites.
"""

from collections.abc import Sequence

import jax

from dpjax._core.meshes import compiler_sharded, leading_axis
from dpjax._core.typing import ArrayLike
from dpjax.clipping._clip import Scales, Summed, clip_scales
from dpjax.clipping.bookkeeping.analysis.plan import Plan
from dpjax.clipping.bookkeeping.evaluate.blocks import Wanted, process_blocks
from dpjax.clipping.bookkeeping.evaluate.books import SiteRecords, keep_books
from dpjax.clipping.bookkeeping.evaluate.engine import squares_alone, sums_alone


def clipped_sum_twice(
    plan: Plan,
    clip_norms: Sequence[ArrayLike],
    leaves: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    mask: jax.Array,
) -> Summed:
    """The sum of clipped gradients from two passes, with checkpointed blocks.

    The arguments are those of `engine.clipped_sum`. Rematerialised blocks whose
    parameters enter nothing else stay checkpointed.
    """
    batch = mask.shape[0]

    def weigh(
        books: SiteRecords,
        leaves: Sequence[jax.Array],
        clip_norms: Sequence[ArrayLike],
        mask: jax.Array,
    ) -> Scales:
        squares = squares_alone(plan, books, leaves, clip_norms)
        return clip_scales(squares, clip_norms, mask)

    def add_up(
        books: SiteRecords,
        leaves: Sequence[jax.Array],
        scales: Sequence[jax.Array],
        finite: jax.Array,
    ) -> list[jax.Array]:
        return sums_alone(plan, books, leaves, leaves, scales, finite)

    in_blocks = process_blocks(plan.blocks, Wanted(clip_norms))
    books = keep_books(plan, leaves, examples, batch, in_blocks)
    loss, *aux = books.outputs
    arrays = (leaves, examples)
    weighed = compiler_sharded(weigh, arrays, jax.P(leading_axis(examples)))
    finite, scales, norm = weighed(books.without_aux(), leaves, clip_norms, mask)
    # The barrier makes the second pass another computation to XLA. Otherwise XLA could
    # reuse values of the first pass, and so would have to store them.
    leaves, scales = jax.lax.optimization_barrier((leaves, scales))
    in_blocks = process_blocks(plan.blocks, Wanted(clip_norms, scales, [finite]))
    books = keep_books(plan, leaves, examples, batch, in_blocks).without_aux()
    shardings = [jax.typeof(x).sharding.spec for x in leaves]
    summed = compiler_sharded(add_up, arrays, shardings)
    return Summed(summed(books, leaves, scales, finite), loss, norm, aux)
