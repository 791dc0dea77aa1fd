"""A loss as a jaxpr: how it is traced, refused, shared and pulled back."""
