"""Transform a loss into the sum of clipped per-example gradients.

The public functions are `dpjax.clipped_grad`, `dpjax.clip_and_sum`, `dpjax.explain` and
`dpjax.metrics`.

1. `_clip` scales one gradient, or a batch of gradients, to a bounded norm.
2. `_clipped_grad` defines `dpjax.clipped_grad`, which returns a function. The returned
   function splits its arguments into parameters and examples, and chooses an engine.
   The vmap engine forms all per-example gradients. The engines in `_bookkeeping`
   compute norms and sums from activations and cotangents, in one pass (book-keeping)
   or in two passes (ghost). The engines in `_bookkeeping` form per-example gradients
   only for parameters for which this method is not available, not accurate enough, or
   more costly.
3. `_microbatches` processes a batch in parts. `_metrics` summarises the losses, norms
   and clipping of a batch.
"""

from dpjax.clipping._clip import clip as clip
