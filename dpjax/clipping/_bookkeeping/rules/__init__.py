"""Rules that factor the gradient at one equation, given its input and cotangent.

A rule gives rows whose outer products add up to the gradient of one of the inputs.
"""
