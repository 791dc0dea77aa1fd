"""The numerics of `pld`, in stages that each give an upper bound on the stage before.

1. The losses of one step. A *discrete pair* is a pair of discrete distributions that
   are at least as easy to distinguish as the outputs of the mechanism on two
   neighbouring data sets. Each module makes such pairs for some mechanisms. `pairs`:
   mixtures of Gaussians, also for a Poisson batch that may exceed its capacity.
   `atoms`: mechanisms with few losses or with evenly spaced losses. `mechanisms` maps
   each type of event to its losses, and has the valid range of its numbers.
2. `tilt`: the tilt λ, at which moments E e^{λY} of the composed loss Y are computed,
   and the frequencies. An estimate of ε and δ determines both. A poor choice makes a
   bound loose, never invalid.
3. `inversion`: δ(ε) of the composed losses from their characteristic function.
4. `composition`: δ(ε) and ε(δ) with derivatives, for the worse order of the two data
   sets.

For lower bounds, `mechanisms` has the losses of post-processed outputs, and `lower`
subtracts all errors of the inversion.
"""
