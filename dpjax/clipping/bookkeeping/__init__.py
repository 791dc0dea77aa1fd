"""The engine that never forms a per-example gradient.

**Idea.** A parameter W enters a loss where it meets the example: in h = x W, say, with
rows x_t of one example. Its gradient is Σ_t x_t ⊗ d_t, d the cotangent of h. From x
and d alone follow the gradient's norm, Σ_ts ⟨x_t, x_s⟩⟨d_t, d_s⟩, and, once all norms
and so all clipping weights c_i are known, the clipped sum Σ_i c_i Σ_t x_it ⊗ d_it: one
product over the whole batch, as in a plain backward pass. So a private step costs one
forward pass, one backward pass to activations, the norms, and the products; nothing
has the size of batch times parameters. Layers with hooks do this in other frameworks;
here it is read off the loss's jaxpr, for any function.

**Steps**, in the order of the data:

1. `jaxpr.trace`: the one-example loss as a jaxpr, in which calls are inlined where a
   parameter may meet the example; custom derivatives are not. `jaxpr.collectives`
   refuses a loss that communicates along a named axis, or whose derivative does.
   `jaxpr.equations` reads and evaluates single equations.
2. `analysis.sites`: values that no example enters are *known*. A site is an equation
   where a known value that depends on a parameter, the operand, meets one that depends
   on the example. Scans are entered: operands are the same in all iterations or one for
   each. `analysis.liveness` finds the values through which the loss is differentiated.
   Only equations that compute such values have sites: elsewhere a zero cotangent times
   an infinite derivative would be NaN.
3. `evaluate.run`: the loss under vmap, which leaves known values unmapped, with a zero,
   a tap, added at every site. One vjp by the taps gives all cotangents; the other
   inputs of the sites' equations are recorded on the way. `evaluate.segments` of
   equations that repeat, as a deep net's do, are traced once.
4. `rules`: how an equation's input and output cotangent turn into rows x_t and d_t
   (`rules.factors`), for products (`dense`), convolutions and gathers. An equation that
   no rule knows is tapped at its *operand*: the cotangent is then the operand's
   per-example gradient, formed by the same backward pass. For biases and scales nothing
   is cheaper; for the rest it is what the vmap engine does, for that operand alone.
5. `analysis.components`: between leaves and operands lies a `jaxpr.path`, computations
   on parameters (a transpose, a cast, weight normalisation). Where it only moves
   entries, norms at the operand are norms of the leaf, and the sum is pulled back once.
   Elsewhere each example's gradient at the operands is pulled back to the leaves. Sites
   of one leaf (tied embeddings, recurrences) are added up before squaring: cross terms
   included.
6. `analysis.plan`: for each component the norm comes from rows (the Gram form) where
   storing them takes less than a gradient, from per-example gradients elsewhere (the
   direct form), which are then small and kept for the sum. Both are exact. One-hot rows
   are added up by position instead of in pairs.
7. `evaluate.engine`: from `evaluate.books` (the records and cotangents of a batch) and
   what becomes of them `at_site` and `at_component`, the norms, weights and sums, in
   float32 at least and at the highest precision, since the bound on an influence rests
   on the norms. The sum comes from the same pass (book-keeping) or from another one
   (ghost: `evaluate.two_passes`), for which nothing is kept. What is `jaxpr.alike`
   shares what is traced.
8. `evaluate.blocks`: in two passes a rematerialised block (`jax.checkpoint`) whose
   parameters enter nothing else is a loss of its own: its books are kept while its
   share of the norms, or of the sums, is made of them. In one pass all books are needed
   at the end: there rematerialisation is given up.
9. `evaluate.reach`: ghost pulls the sum of gradients back once where the maps between
   leaves and operands round by the model, and the norm then includes what the terms can
   do there.

**Rounding.** Rows may cancel: then the Gram form is a small difference of large terms.
`rules.factors.square_norm` adds a bound of what they round, by the model in
`_core.rounding`, so that a norm is never underestimated; and rows are brought to a
common scale, so that no square overflows. Wherever the sum is not made of the gradients
whose norms were taken, a norm is also at least 1/512 of its terms' size: larger terms
that cancel would push other examples out of the sum. docs/clipping.md says what that
costs. TPUs' products are outside the model: for them engine="auto" takes all norms of
gradients, and the sum of the same ones. Which of the two is lowered is decided last.

**What it does not do.** A parameter inside cond, while_loop or a custom derivative has
its per-example gradients formed; so has one that also enters the loss without an
example, as a penalty on weights does (put that in the optimizer).
"""

from dpjax.clipping.bookkeeping.analysis.explain import Explanation as Explanation
from dpjax.clipping.bookkeeping.analysis.explain import explanation as explanation
from dpjax.clipping.bookkeeping.analysis.plan import Plan as Plan
from dpjax.clipping.bookkeeping.analysis.plan import plan as plan
from dpjax.clipping.bookkeeping.evaluate.engine import clipped_sum as clipped_sum
from dpjax.clipping.bookkeeping.evaluate.two_passes import (
    clipped_sum_twice as clipped_sum_twice,
)
from dpjax.clipping.bookkeeping.jaxpr.trace import trace as trace
