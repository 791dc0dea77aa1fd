"""Tools for numbers, keys and arrays, for all other packages of dpjax.

No module of this package computes a privacy cost.

1. `adjacency`: the data sets that a guarantee compares. `typing`: type aliases.
2. `validate`: checks of arguments, whose messages name the argument and its value.
3. `dtypes`, `rounding`: precisions, bounds on float32's rounding errors, and numbers
   rounded in the direction in which privacy bounds still hold. `float64`: functions
   that compute in float64. `interpret`: functions that NumPy evaluates without a
   compiler, by the rules in `numpy_rules`.
4. `keys`: typed random keys, and a separate random stream for every consumer of a key.
   `chacha`: the random generator ChaCha20.
5. `platforms`, `meshes`: backends, and arrays that are sharded over devices.
6. `searches`: roots of functions, with derivatives, and minima of functions. `plain`:
   records as values that JSON can represent.

This file imports nothing, so that the command line can read `adjacency` without JAX.
"""
