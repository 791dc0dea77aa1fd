"""Find the sites of a loss, and choose how to compute its gradient norms."""
