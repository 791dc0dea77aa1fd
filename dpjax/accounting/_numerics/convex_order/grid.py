"""Grids that are even in log L, and the lognormal law in their cells.

Grids are not differentiated: they decide how tight a bound is, not whether it is one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import ULP
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI
from dpjax.accounting._numerics.pld.pairs import tail_quantile

_PANELS = 4
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
# Of a cell: every panel's nodes, and their weights, which add up to one.
NODES = np.ravel((_NODES + 1) / 2 + np.arange(_PANELS)[:, None])[:, None] / _PANELS
_WEIGHTS = np.tile(_WEIGHTS / 2 / _PANELS, _PANELS)[:, None]


class Grid(NamedTuple):
    """The points e^{h (first + i)}.

    Attributes:
      first: a whole number, f[].
      spacing: h, f[].
    """

    first: jax.Array
    spacing: jax.Array

    def log(self, n: int) -> jax.Array:
        """Log L at the first n points, f[n]."""
        return self.spacing * (self.first + jnp.arange(n))


class Normal(NamedTuple):
    """Of log L ~ N(−v/2, v), in and around cells, each as (Q's mass, P's mass).

    Attributes:
      nodes: what Gauss's rule takes for each cell, f[k, m] twice.
      below: before the first cell, f[].
      above: after the last one.
    """

    nodes: tuple[jax.Array, jax.Array]
    below: tuple[jax.Array, jax.Array]
    above: tuple[jax.Array, jax.Array]


def make_grid(variance: jax.Array, tail: jax.Array, n: int) -> Grid:
    """Points about log L ~ N(−v/2, v) that leave out about tail of Q and of P."""
    variance = jax.lax.stop_gradient(variance)
    end = variance / 2 + jnp.sqrt(variance) * tail_quantile(tail)
    spacing = 2 * end / (n - 2)
    return Grid(jnp.floor(-end / spacing), spacing)


def normal(variance: jax.Array, start: jax.Array, cells: int, spacing: jax.Array):
    """Log L ~ N(−v/2, v) in cells of an even width from start on: a `Normal`.

    Gauss's rule with 8 nodes errs by 1.7e-23 of its panel's width to the power 16 times
    the 16th derivative, at most 1e-12 of it for the 16 σ that a cell of at most one
    σ can be away from both means. P has the same law about v/2.
    """
    deviation = jnp.sqrt(variance)
    ends = (start + spacing * jnp.arange(cells + 1) + variance / 2) / deviation
    width = spacing / deviation
    z = ends[None, :-1] + width * NODES

    def mass(z: jax.Array) -> jax.Array:
        return width * _WEIGHTS * jnp.exp(-z * z / 2 - LOG_SQRT_2PI)

    first, last = ends[0], ends[-1]
    return Normal(
        (mass(z), mass(z - deviation)),
        (ndtr(first), ndtr(first - deviation)),
        (ndtr(-last), ndtr(deviation - last)),
    )


def rounding(n: int, count: jax.Array) -> jax.Array:
    """By how much masses are off, relatively, after means of count copies in all.

    A sum over 2n pairs at each doubling; and the errors of a product's factors add up.
    """
    return jnp.minimum(ULP * (4.0 * n + 128) * count, 0.5)


# How far log L is off after a hundred sums: each is of logarithms below 1e3.
OFF = 1e-11
