"""What `rdp` computes with: `quadrature`, for subsampled curves at every order."""
