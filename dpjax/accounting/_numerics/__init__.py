"""The numerics of the accountants.

1. `gaussian`: the normal distribution in its tails. `batches`: scalar functions mapped
   over batches of arguments, one after the other.
2. `pld`: privacy-loss distributions. `rdp`: Rényi divergences.
3. `convex_order`: averages of likelihood ratios, for random assignment to steps (balls
   in bins), with independent noise or noise that is correlated between steps.
4. `search`: the parameter at which a monotone function crosses zero.
"""
