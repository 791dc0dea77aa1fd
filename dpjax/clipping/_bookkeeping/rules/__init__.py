"""Rules that write the gradient at one equation as a sum of outer products of rows.

A rule takes the equation's other inputs and the cotangent of its output.
"""
