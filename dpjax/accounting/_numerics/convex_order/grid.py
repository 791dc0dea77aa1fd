"""Grids that are evenly spaced in log L, and the lognormal distribution in their cells.

Grids are not differentiated: a grid determines how tight a bound is, not its validity.
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
# The composite rule for a cell [0, 1]: the nodes of all panels, and their weights,
# which add up to one.
NODES = np.ravel((_NODES + 1) / 2 + np.arange(_PANELS)[:, None])[:, None] / _PANELS
_WEIGHTS = np.tile(_WEIGHTS / 2 / _PANELS, _PANELS)[:, None]


class Grid(NamedTuple):
    """The likelihood ratios e^{h (first + i)}, i = 0, 1, ….

    Attributes:
      first: the index of the first point, a whole number, f[].
      spacing: h, the spacing in log L, f[].
    """

    first: jax.Array
    spacing: jax.Array

    def log(self, n: int) -> jax.Array:
        """The values of log L at the first n points, f[n]."""
        return self.spacing * (self.first + jnp.arange(n))


class Normal(NamedTuple):
    """The masses of log L ~ N(−v/2, v) in m cells and outside them.

    Each attribute is a pair: Q's mass, then P's mass.

    Attributes:
      nodes: the mass at each of the k nodes of Gauss's rule in each cell, f[k, m].
      below: the mass below the first cell, f[].
      above: the mass above the last cell, f[].
    """

    nodes: tuple[jax.Array, jax.Array]
    below: tuple[jax.Array, jax.Array]
    above: tuple[jax.Array, jax.Array]


def make_grid(variance: jax.Array, tail: jax.Array, n: int) -> Grid:
    """A grid of n points for log L ~ N(−v/2, v), with about tail of Q and P outside."""
    variance = jax.lax.stop_gradient(variance)
    end = variance / 2 + jnp.sqrt(variance) * tail_quantile(tail)
    spacing = 2 * end / (n - 2)
    return Grid(jnp.floor(-end / spacing), spacing)


def normal(variance: jax.Array, start: jax.Array, cells: int, spacing: jax.Array):
    """The masses of log L ~ N(−v/2, v) in cells of equal width from start: a `Normal`.

    The error of Gauss's rule with 8 nodes is 1.7e-23 times the 16th power of the
    panel's width times the 16th derivative. For a cell of width at most one σ, which is
    at most 16 σ away from both means, this error is at most 1e-12 of the mass. Under P,
    log L has mean v/2 and the same variance.
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
    """A bound on the relative error of masses after means of count copies in total.

    Each doubling sums over 2n pairs, and the errors of the factors of a product add up.
    """
    # At most one half, so that 1 − error stays positive in `cells.delta`.
    return jnp.minimum(ULP * (4.0 * n + 128) * count, 0.5)


# A bound on the error of log L after a hundred sums of logarithms below 1e3.
OFF = 1e-11
