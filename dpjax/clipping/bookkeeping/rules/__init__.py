"""From an equation's input and output cotangent to the rows of its gradient."""
