"""Transform a loss into the sum of clipped per-example gradients.

The entries are `dpjax.clipped_grad`, `dpjax.clip_and_sum`, `dpjax.explain` and
`dpjax.metrics`.

1. `_clip` scales one gradient, or a batch of gradients, to a bounded norm.
2. `_arguments` splits the arguments of a loss into parameters and examples.
3. `_clipped_grad` has `dpjax.clipped_grad` and the function that it returns. This
   function chooses one of two engines. The vmap engine forms all per-example gradients.
   `_bookkeeping` forms per-example gradients only for parameters that no rule covers,
   or where they are cheaper.
4. `_microbatches` processes a batch in parts. `_metrics` summarises the losses, norms
   and clipping of a batch.
"""

from dpjax.clipping._clip import clip as clip
