"""Trace a loss to a jaxpr, refuse a loss that mixes examples, and compare equations."""
