"""The numerics of the accountants.

1. `gaussian`: the Gaussian mechanism, with functions that are precise in the tails of
   the normal distribution.
2. `pld`: privacy-loss distributions.
3. `convex_order`: averages of likelihood ratios, for random assignment of examples to
   steps (balls in bins), with independent or correlated noise.
4. `rdp`: the Rényi divergences of a subsampled mechanism at every order, by an
   integral, for arguments of any value, and their conversion to δ(ε) and ε(δ).
"""
