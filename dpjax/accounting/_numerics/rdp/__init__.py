"""What `rdp` computes with.

1. `integrand`: what a subsampled curve is the integral of. `quadrature`: that integral,
   at every order.
2. `curves`: curves for any numbers.
3. `conversion`: from a curve to δ(ε) and ε(δ).
"""
