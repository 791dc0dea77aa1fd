"""Compute the norms, clipping factors and clipped sums of a batch."""
