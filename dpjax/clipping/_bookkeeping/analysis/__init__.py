"""Find where parameters meet examples in a jaxpr, and choose the form of each norm."""
