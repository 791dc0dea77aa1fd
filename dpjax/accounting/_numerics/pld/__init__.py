"""The numerics of `pld`: upper and lower bounds on the δ(ε) and ε(δ) of compositions.

Upper bounds are computed in these stages. All errors make the bounds larger.

1. The losses of one step. A *discrete pair* is a pair of discrete distributions that
   are at least as easy to distinguish as the outputs of the mechanism on two
   neighbouring data sets. `pairs` has the discrete pairs of mixtures of Gaussians, also
   for a Poisson sample that may exceed a batch's capacity. `atoms` has the discrete
   pairs of mechanisms with few losses or with evenly spaced losses. `mechanisms` maps
   each type of event to its losses, and checks the numbers of an event.
2. `tilt`: the choice of the tilt λ and of the frequencies t. The inversion uses the
   moments E e^{(λ + it)Y} of the composed loss Y. The choice depends on an estimate of
   ε and δ. A poor choice makes a bound loose, but never invalid.
3. `inversion`: δ(ε) of the composed losses from their characteristic function.
4. `composition`: δ(ε) and ε(δ) with derivatives, as the maximum over the two orders of
   the data sets.

For lower bounds, `mechanisms` has the losses of post-processed outputs, and `lower`
subtracts all errors of the inversion.
"""
