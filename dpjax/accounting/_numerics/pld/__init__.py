"""The numerics of `pld`, in stages that each give an upper bound on the stage before.

1. `pairs`: discrete losses of one step, whose two distributions are easier to
   distinguish than the outputs of the mechanism. `overflow`: such losses for a Poisson
   batch that may exceed its capacity. `atoms`: such losses for mechanisms with few
   losses, or with a lattice of losses.
   `mechanisms`: the losses of each type of event, and the valid range of its numbers.
2. `tilt`: the tilt λ and the grid of frequencies, chosen from an estimate of ε and δ. A
   poor choice makes a bound loose, never invalid.
3. `inversion`: δ(ε) of the composed losses from their characteristic function.
4. `composition`: δ(ε) and ε(δ) with derivatives, in the worse direction.

For lower bounds, `merged` has the losses of post-processed outputs, and `lower`
subtracts all errors of the inversion.
"""
