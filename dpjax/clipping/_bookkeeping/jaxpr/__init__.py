"""A loss as a jaxpr: tracing, refusing losses that mix examples, sharing of traces."""
