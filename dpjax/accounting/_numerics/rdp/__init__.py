"""The numerics of `rdp`.

1. `integrand`: the integrand of a subsampled mechanism's Rényi curve. `quadrature`: its
   integral at every order.
2. `curves`: Rényi curves for arguments of any value, and their conversion to δ(ε) and
   ε(δ).
"""
