"""What the accountants compute with.

1. `gaussian`: the normal distribution in its tails. `batches`: sizes of batches.
2. `pld`: privacy-loss distributions. `rdp`: Rényi divergences.
3. `convex_order`: likelihood ratios that are averaged, and random bins with noise that
   is correlated between steps.
4. `search`: the parameter at which a monotone function crosses zero.
"""
