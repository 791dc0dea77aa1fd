"""Correlation matrices and workloads as plain data, read by training and accounting.

1. `toeplitz`: lower-triangular Toeplitz matrices and their power series.
2. `strategy`: the strategies of noise that is correlated between steps.
3. `workload`: the linear map by which an optimizer turns all steps' noise into outputs.
4. `spec`: a strategy as the numbers that accountants read.
5. `streaming`: a strategy's noise, generated one step after the other.
"""
