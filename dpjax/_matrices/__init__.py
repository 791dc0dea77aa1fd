"""Correlation matrices and workloads as plain data, read by training and accounting.

1. `toeplitz`: lower-triangular Toeplitz matrices and their power series.
2. `strategy`: the strategies of noise that is correlated between steps.
3. `workload`: what an optimizer makes of the noise of all steps.
4. `spec`: a strategy as the numbers that accountants read.
5. `streaming`: a strategy's noise, one step after the other.
"""
