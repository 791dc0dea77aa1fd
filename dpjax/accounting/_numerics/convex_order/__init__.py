"""Distributions of likelihood ratios, bounded in convex order.

Let P and Q be the output distributions of a mechanism on two neighbouring data sets,
and L = dP/dQ their likelihood ratio, as a random variable under Q. The mean of L is
then one. The δ(ε) of P against Q is E(L − e^ε)₊, and the δ(ε) of Q against P is E(1 −
e^ε L)₊. Both values are means of convex functions of L. A distribution of L that is
larger in convex order therefore gives upper bounds on both values, and a smaller
distribution gives lower bounds. Averages and products of independent ratios preserve
the convex order (Shaked and Shanthikumar, 2007, section 3.A). In this package a "law"
is the distribution of a likelihood ratio.

1. `spread`: upper bounds. The masses are on a grid that is evenly spaced in log L. Mass
   between two grid points moves to both points, such that the mean stays the same.
2. `cells`: lower bounds. The mass in a cell (an interval of likelihood ratios) moves to
   the conditional mean of the cell. The lower bound on ε of random allocation uses this
   module.
3. `grid`: functions that compute the distribution of the average of two independent
   ratios, from all pairs of grid points, and the distribution of the average or product
   of many independent ratios. Let h be the spacing of the grid in log L. The mean of
   the points e^{hi} and e^{hj} is e^{hi} times a factor that depends on j − i alone.
   The pairs with the same difference j − i are therefore added together, by products of
   whole arrays.

All sums have nonnegative terms, so that the rounding error of each mass is small
relative to the mass.
"""
