"""Numbers, keys and arrays, on which every other package of dpjax builds.

No module of this package computes privacy.

1. `adjacency`: which pairs of data sets a guarantee compares. `typing`: type aliases.
2. `validate`: the checks of arguments, with messages that name argument and value.
3. `dtypes`, `rounding`, `outward`: precisions, bounds on float32's rounding errors, and
   numbers rounded to the safe side. `float64`: functions that compute in float64.
4. `keys`: typed random keys, and a separate random stream for every consumer of a key.
5. `records`: frozen dataclasses as pytrees. `platforms`, `meshes`, `placement`:
   backends, and arrays that are sharded over devices.
6. `searches`: roots of scalar functions, with derivatives.

This file imports nothing, so that the command line can read `adjacency` without JAX.
"""
