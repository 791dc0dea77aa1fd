"""Numbers, keys and arrays: what every room builds on. Nothing here computes privacy.

1. `adjacency`: which pairs of data sets a guarantee compares. `typing`: type aliases.
2. `validate`: the checks of arguments, with messages that name argument and value.
3. `dtypes`, `rounding`, `outward`: precisions, bounds on what float32 rounds, and
   numbers rounded to the safe side. `float64`: functions that compute in float64.
4. `keys`: typed random keys, and a stream of its own for every consumer of a key.
5. `records`: frozen dataclasses as pytrees. `platforms`, `meshes`, `placement`:
   backends, and arrays that devices share.
6. `searches`: roots of scalar functions, with derivatives.

This file imports nothing: the command line reads `adjacency` without JAX.
"""
