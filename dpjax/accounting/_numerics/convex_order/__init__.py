"""Distributions of likelihood ratios, bounded in convex order.

Let L = dP/dQ be the likelihood ratio of two distributions P and Q, as a random variable
under Q. The mean of L is then one. The output distributions of a mechanism on two
neighbouring data sets are P and Q. The δ(ε) of P against Q is E(L − e^ε)₊, and the δ(ε)
of Q against P is E(1 − e^ε L)₊. Both values are means of convex functions of L. A
distribution of L that is larger in convex order therefore bounds both values from
above, and a smaller distribution bounds both from below. Averages and products of
independent ratios preserve the convex order (Shaked and Shanthikumar, 2007, section
3.A). In this package a "law" is the distribution of a likelihood ratio.

1. `spread`: an upper bound, with masses on a grid that is evenly spaced in log L. Mass
   between two grid points moves to both points, such that the mean stays the same.
2. `cells`: a lower bound, which replaces the mass in a cell (an interval of likelihood
   ratios) by a mass at its conditional mean. The lower bound on ε of random allocation
   uses this bound.
3. `grid`: the means of all pairs of points of a grid, and the mean or product of many
   independent ratios. Let h be the spacing of the grid. The mean of the points e^{hi}
   and e^{hj} is e^{hi} times a factor that depends on j − i alone. The pairs with the
   same difference j − i are therefore added together, by products of whole arrays.

All terms are positive, so that rounding errors are relative to each mass.
"""
