"""The numerics of the accountants.

1. `gaussian`: the Gaussian mechanism, with functions that are precise in the tails of
   the normal distribution.
2. `pld`: privacy-loss distributions.
3. `convex_order`: distributions of averages of likelihood ratios. These averages occur
   if examples are assigned to steps at random (balls in bins), with independent or
   correlated noise.
4. `rdp`: the Rényi divergences of a Poisson-subsampled Gaussian mechanism at every
   order, computed by an integral, and their conversion to δ(ε) and ε(δ).
"""
