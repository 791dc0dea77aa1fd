"""Where parameters meet examples in a jaxpr, and how each norm is computed."""
