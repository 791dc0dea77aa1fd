"""Distributions of likelihood ratios, bounded in convex order.

Let L = dP/dQ be the likelihood ratio under Q, where its mean is one. Then E(L − e^ε)₊
is δ(ε) for one order of the data sets, and E(1 − e^ε L)₊ is δ(ε) for the other. Both
values are means of convex functions of L. A distribution of L that is larger in convex
order therefore bounds both values from above, and a smaller distribution bounds both
from below. Averages and products of independent ratios preserve the convex order
(Shaked and Shanthikumar, 2007, section 3.A). In this package a "law" is the
distribution of a likelihood ratio.

1. `spread`: a bound from above, on a grid that is evenly spaced in log L. Mass between
   two points moves to both points, such that the mean stays the same.
2. `cells`: a bound from below, which replaces the mass in a cell by a mass at its
   conditional mean. The lower bound on ε of random allocation uses this bound.
3. `grid`: the means of all pairs of points of a grid, and the mean or product of many
   independent copies, by doubling. The mean of e^{hi} and e^{hj} is e^{hi} times a
   factor that depends on j − i alone. A sum over pairs is therefore a sum of products
   of shifted rows.

All terms are positive, so that rounding errors are relative to each mass.
"""
