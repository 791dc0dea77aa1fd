"""Find where parameters meet examples in a loss, and how to compute norms there."""
