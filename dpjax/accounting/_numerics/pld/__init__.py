"""The numerics of `pld`: each stage gives an upper bound on the stage before.

1. `pairs`: discrete losses of one step, whose two distributions are easier to
   distinguish than the outputs of the mechanism. `overflow`: such losses for a Poisson
   batch that may exceed its capacity. `mixture`: for a random sensitivity. `atoms`: for
   mechanisms with few losses, or a lattice of them. `mechanisms`: the losses and the
   domain of each type of event.
2. `tilt`: the tilt λ and the grid of frequencies, chosen from an estimate of ε and δ. A
   poor choice makes a bound loose, never invalid.
3. `inversion`: δ(ε) of the composed losses from their characteristic function.
4. `composition`: δ(ε) and ε(δ) with derivatives, in the worse direction.

Lower bounds have losses of their own, in `merged`: of outputs that were post-processed.
`lower` subtracts all errors of their inversion.
"""
