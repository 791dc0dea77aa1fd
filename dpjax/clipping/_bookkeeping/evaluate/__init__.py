"""The norms, clipping weights and sums of a batch."""
