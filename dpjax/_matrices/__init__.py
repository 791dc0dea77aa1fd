"""Correlation matrices and workloads as plain data, for training and accounting.

1. `strategy`: strategies and workloads. A strategy is the matrix C of correlated noise
   C⁻¹z, where z is independent Gaussian noise. A workload is the linear map that an
   optimizer applies to the gradient sums of all steps. A `StrategySpec` is a strategy
   as plain numbers, for accountants and for JSON.
2. `streaming`: a strategy's noise, generated one step after the other.
"""
