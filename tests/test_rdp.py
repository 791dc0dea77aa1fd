"""Rényi curves against mpmath and dp-accounting."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting import _renyi_quadrature, rdp

ORDERS = rdp.ORDERS


def exact_poisson(sigma, q, a):
    """The divergence by the trapezoidal rule around every place where mass can be.

    The integrand is analytic for |Im u| < πσ, so that a step h has a relative error of
    about exp(d²/2 − 2πd/h) for any d below that: 1e-19 at d = 3σ or 6.
    """
    with mp.workdps(30):
        sigma, q, a = (mp.mpf(float(x)) for x in (sigma, q, a))
        d = min(3 * sigma, mp.mpf(6))
        h = 2 * mp.pi * d / (45 + d * d / 2)

        def term(i):
            u = i * h
            y = q * mp.expm1(u / sigma - 1 / (2 * sigma**2))
            if abs(a * y) < mp.mpf("1e-8"):
                small = 1 + (a - 2) * y / 3 * (
                    1 + (a - 3) * y / 4 * (1 + (a - 4) * y / 5)
                )
                value = a * (a - 1) / 2 * y * y * small
            else:
                value = mp.expm1(a * mp.log1p(y)) - a * y
            return value * mp.exp(-u * u / 2)

        reach = 12 + 6 * mp.sqrt(sigma)  # two merged bumps are as wide as √σ
        places = set()
        peaks = (_peak(sigma, q, a, start) for start in (0, a / sigma))
        for centre in (mp.mpf(0), 2 / sigma, *peaks):
            first, last = (int((centre + end) / h) for end in (-reach, reach))
            places.update(range(first, last + 1))
        terms = [term(i) for i in places]
        excess = h * mp.fsum(terms) / mp.sqrt(2 * mp.pi)
        return mp.log1p(excess) / (a - 1)


def _peak(sigma, q, a, u):
    """A stationary point of a log(1 + y) − u²/2, by fixed-point iteration from u."""
    for _ in range(100):
        odds = q / (1 - q) * mp.exp(u / sigma - 1 / (2 * sigma**2)) if q < 1 else mp.inf
        u = a / sigma / (1 + 1 / odds)
    return u


POINTS = np.array(
    [  # σ, q, order; corners of the promised ranges, then where two bumps compete
        (0.1, 1e-6, 1.01), (0.1, 1e-6, 1e4), (0.1, 1.0, 1.01), (0.1, 0.5, 2.0),
        (0.1, 1.0, 1e4), (1e3, 1e-6, 1.01), (1e3, 1e-6, 1e4), (1e3, 1.0, 1.01),
        (1e3, 1.0, 1e4), (1e3, 0.5, 300.5), (0.1, 0.9, 1.3), (0.15, 1e-3, 1.2),
        (0.33, 1e-6, 1.5), (0.4, 1e-6, 3.0), (0.5859, 1.04e-6, 1.188),
        (0.7622, 2.136e-6, 14.7546), (0.8407, 0.7989, 1.0105), (1.0, 0.01, 2.0),
        (1.0, 0.01, 32.5), (1.0, 0.3, 1.7), (1.372, 0.001505, 25.7175),
        (2.0, 0.02, 64.0), (2.994, 0.0007922, 127.889), (3.0, 1e-6, 250.0),
        (4.764, 4.507e-6, 558.366), (5.0, 0.3, 100.0), (7.13, 0.003631, 571.553),
        (9.845, 3.009e-5, 2017.96), (10.0, 0.12, 400.0), (19.0, 1e-6, 1e4),
        (21.7, 0.1248, 1704.09), (24.0, 1e-6, 1e4), (40.62, 0.0426, 1e4),
        (49.75, 0.1144, 1e4), (50.0, 0.12, 1e4), (70.0, 0.3, 1e4), (0.6, 1e-4, 4.5),
    ]
)  # fmt: skip


def test_reference_against_closed_forms():
    for sigma, a in [(0.3, 1.5), (4.0, 80.0)]:
        exact = mp.mpf(a) / (2 * mp.mpf(sigma) ** 2)
        assert abs(exact_poisson(sigma, 1.0, a) / exact - 1) < 1e-15
    for sigma, q in [(0.7, 0.2), (30.0, 1e-5)]:  # order 2
        exact = mp.log1p(mp.mpf(q) ** 2 * mp.expm1(1 / mp.mpf(sigma) ** 2))
        assert abs(exact_poisson(sigma, q, 2.0) / exact - 1) < 1e-15


def test_poisson_gaussian_from_above(x64):
    sigma, q, a = POINTS.T
    ours = np.asarray(
        jax.vmap(rdp.poisson_gaussian)(*map(jnp.array, (sigma, q, a[:, None])))
    )
    for point, value in zip(POINTS, ours[:, 0].tolist(), strict=True):
        relative = mp.mpf(value) / exact_poisson(*point) - 1
        assert 0 <= relative <= 2e-10, (point, float(relative))
