"""The book-keeping engine: clipped sums without most per-example gradients.

**Idea.** An equation of the loss combines a parameter W with an example, for example
h = x W, where x has rows x_t. The gradient of W is Σ_t x_t ⊗ d_t, where d is the
cotangent of h, with rows d_t. The squared norm of this gradient is
Σ_ts ⟨x_t, x_s⟩⟨d_t, d_s⟩, which needs only x and d. The norms of all parameters give
the clipping factor c_i of each example i. The clipped sum Σ_i c_i Σ_t x_it ⊗ d_it is
then one product over the whole batch, as in a plain backward pass. For parameters in
such equations, a step costs one forward pass, one backward pass to activations, the
norms, and the products. No array has the size of batch times parameters. Other
frameworks use hooks on layers for this method. This engine reads the loss's jaxpr
instead, and so works for any function.

**Steps**, in the order of the data:

1. `tracing.trace` traces the loss of one example to a jaxpr. `trace` refuses the loss
   if the loss or its derivative communicates along a named axis. `tracing.inline`
   inlines the calls that a parameter enters, except custom derivatives and the
   checkpointed blocks of step 8. `equations` reads and evaluates single equations.
   `equations.Comparable` identifies parts of a loss that compute the same function, so
   that JAX traces this function only once.
2. `analysis.sites` finds the sites. A value is *batch-invariant* when no example enters
   it; the code calls such values invariant. A *site* is an equation that combines two
   values: the *operand*, a batch-invariant value that depends on a parameter, and a
   value that depends on the example. Scans also have sites in their bodies, where an
   operand is either the same in all iterations or different in each. An equation has a
   site only if the loss is differentiated through the equation's output. At any other
   equation, the output's cotangent would be zero, and zero times an infinite derivative
   is NaN.
3. `evaluate.run` evaluates the loss under vmap, which leaves batch-invariant values
   unmapped. `run` adds an array of zeros, called a *tap*, at every site. One vjp with
   respect to the taps gives all cotangents. At sites with a rule (step 4), the forward
   pass records the inputs of the equation, except the operand.
4. `rules` are for products, convolutions and lookups. A rule takes the recorded inputs
   and the cotangent of an equation, and returns rows x_t and d_t (`factors`). At an
   equation without a rule the tap is added to the *operand*. The tap's cotangent is
   then the operand's per-example gradient, formed by the same backward pass. For biases
   and scales no method is cheaper. Other operands without a rule cost as much as in the
   vmap engine.
5. `analysis.components` groups leaves and operands that computations on parameters
   connect, for example a transpose, a cast or weight normalisation. Such a group is a
   *component*, and these computations are its *path*. Where the path only moves
   entries, norms at the operands are norms of the leaves, and the sum of gradients can
   be pulled back to the leaves once. Elsewhere each example's gradient at the operands
   is pulled back to the leaves. If a leaf has several sites (tied embeddings,
   recurrences), the gradients from all sites are added before squaring, so that the
   norm includes the cross terms.
6. `analysis.plan` chooses the form of each component's norm. The norm comes from rows
   (the Gram form) under five conditions: the leaves are clipped together, and the path
   only moves entries; all sites have rules, and the rows of sites that use the same
   array can be combined; there are at most `factors.MAX_ROWS` rows; the rows need less
   memory than a gradient; and they cost less than the gradient or need less than half
   of its memory. Otherwise the norm comes from per-example gradients (the direct form).
   These gradients are stored until the sum is made, unless the sum has its own pass.
   The Gram form and the direct form are exact except for rounding. In the Gram form,
   inner products are computed for all pairs of rows. But one-hot rows x_t need no
   pairs: the rows d_t of equal one-hot rows are added up.
7. `evaluate.engine` computes norms, clipping factors and sums from the recorded inputs
   and cotangents of a batch. `evaluate.at_component` has the functions for one
   component. These computations are in float32 or wider and at the highest precision,
   because the bound on an example's influence relies on the norms. The sum comes from
   the same pass (book-keeping) or from a second pass (ghost, `evaluate.two_passes`).
   With a second pass, no activations or cotangents of the first pass are stored.
8. `evaluate.two_passes` also handles rematerialised blocks (`jax.checkpoint`). A block
   whose parameters enter no other part of the loss is treated as a loss of its own. The
   activations and cotangents inside the block are in memory only while the norms, or
   the sums, of the block are computed. The book-keeping engine needs all recorded
   arrays at the end of its one pass. So this engine stores the values inside blocks,
   and does not compute these values again.
9. `evaluate.reach` bounds the rounding errors of pull-backs. The ghost engine pulls the
   sum of gradients back once if the maps from leaves to operands follow the rounding
   model. The norm then includes a bound on the rounding errors of the pull-back.

**Rounding.** The Gram form adds terms ⟨x_t, x_s⟩⟨d_t, d_s⟩ of both signs. The sum of
these terms may be much smaller than the terms. `factors.square_norm` adds a bound on
the rounding error, by the model in `_core.rounding`, so that a norm is never
underestimated. `square_norm` also scales rows, so that no square overflows unless the
squared gradient overflows. Some clipped sums are not made of the gradients from which
the norms were computed. For these sums, a norm is also at least 1/512 of the size of
the gradient's terms, such as Σ_t ‖x_t‖‖d_t‖. Without this minimum, large terms that
cancel could make a partial sum so large that rounding removes the contributions of
other examples. docs/clipping.md says how much accuracy these bounds cost. Products on
TPUs are outside the rounding model. So on TPUs engine="auto" computes all norms from
per-example gradients, and makes the sum of the same gradients. The choice is made at
lowering, when the platform is determined.

**Limits.** The engine forms per-example gradients for a parameter inside cond,
while_loop or a custom derivative. The engine also forms per-example gradients for a
parameter that enters the loss without an example, as in a penalty on weights. A penalty
on weights belongs in the optimizer.
"""

from dpjax.clipping._bookkeeping.analysis.plan import Explanation as Explanation
from dpjax.clipping._bookkeeping.analysis.plan import Plan as Plan
from dpjax.clipping._bookkeeping.analysis.plan import explanation as explanation
from dpjax.clipping._bookkeeping.analysis.plan import plan as plan
from dpjax.clipping._bookkeeping.evaluate.engine import clipped_sum as clipped_sum
from dpjax.clipping._bookkeeping.evaluate.float64_sums import (
    relative_error as relative_error,
)
from dpjax.clipping._bookkeeping.evaluate.two_passes import (
    clipped_sum_in_two_passes as clipped_sum_in_two_passes,
)
from dpjax.clipping._bookkeeping.tracing import trace as trace
