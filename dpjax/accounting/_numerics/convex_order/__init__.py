"""Laws of likelihood ratios, bounded in convex order.

With L = dP/dQ under Q, which has mean one, E(L − e^ε)₊ and E(1 − e^ε L)₊ are the δ(ε)
of one order of the data sets and of the other. Both are means of convex functions of L.
So a law that is larger in convex order is a bound on both from above, one that is
smaller is a bound from below, and averages and products of independent ones keep the
order (Shaked and Shanthikumar, 2007, section 3.A).

1. `spread`: a law on a grid that is even in log L, from above: what falls between two
   points goes to both so that the mean stays.
2. `cells`: the same from below: what falls in a cell is replaced by its mean.
3. `pairing`: all pairs of two grids at once. The place of the mean of e^{hi} and
   e^{hj}, beyond hi, depends on j − i alone, so that a sum over pairs is a sum of
   products of shifted rows.
4. `fold`: many independent copies, by doubling.

All terms are positive, so that rounding is relative to each mass.
"""
