"""From a loss to the sum of clipped per-example gradients.

The entries are `dpjax.clipped_grad`, `dpjax.clip_and_sum`, `dpjax.explain` and
`dpjax.metrics`.

1. `_clip`: one gradient, or a batch of gradients, scaled to a bounded norm.
2. `_arguments`: the arguments of a loss, split into parameters and examples.
3. `_clipped_grad`: the function that `dpjax.clipped_grad` returns, which chooses one
   of two engines: `_vmap` forms per-example gradients, `bookkeeping` does not.
4. `_microbatches`: a batch in parts. `_metrics`: what clipping did to a batch.
5. `_explain`: how a loss is differentiated, parameter by parameter.
"""

from dpjax.clipping import bookkeeping as bookkeeping
from dpjax.clipping._clip import clip as clip
from dpjax.clipping._clipped_grad import ENGINES as ENGINES
from dpjax.clipping._clipped_grad import ClippedGrad as ClippedGrad
