"""Correlation matrices and workloads as plain data, for training and accounting.

1. `toeplitz`: lower-triangular Toeplitz matrices and their power series.
2. `strategy`: strategies, which are the matrices C of correlated noise C⁻¹z, and
   workloads, which are the linear maps that an optimizer applies to the sums of all
   steps.
3. `spec`: a strategy as plain numbers, for accountants and records.
4. `streaming`: a strategy's noise, generated one step after the other.
"""
