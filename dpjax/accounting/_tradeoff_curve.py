"""The trade-off curve of a privacy profile, at enough points for a plot."""

import jax.numpy as jnp
import numpy as np

from dpjax.accounting import fdp, gdp
from dpjax.accounting.profiles import Gaussian, Profile, Pure

# The number of pairs (ε, δ) from which a curve is computed, if no exact form is known.
_PAIRS = 24


def curve(profile: Profile, rates: np.ndarray) -> np.ndarray:
    """Lower bounds on an attack's false-negative rates, f64[k].

    The argument `rates` has the attack's false-positive rates, f64[k].
    """
    if isinstance(profile, Gaussian):
        return np.asarray(gdp.tradeoff(profile.mu, rates), np.float64)
    if isinstance(profile, Pure):
        epsilons, deltas = np.array([float(np.asarray(profile.pure_epsilon))]), [0.0]
    else:
        epsilons, deltas = _points(profile)
    # If no ε is finite, the only bound is that rates are at least 0.
    if not epsilons.size:
        return np.zeros_like(rates)
    # `fdp.tradeoff` asks for δ at these ε alone, and the δ at these ε are known.
    powers = fdp.tradeoff(lambda _: jnp.asarray(deltas), rates, epsilons=epsilons)
    return np.asarray(powers, np.float64)


def _points(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (ε, δ) that a privacy profile proves, as two arrays f64[k].

    The function computes ε for one δ at a time, so that all pairs share one compiled
    program.
    """
    most = float(profile.delta(0.0))
    if most == 0.0:
        return np.zeros(1), np.zeros(1)
    # The values of δ are those of a Gaussian mechanism with the same δ(0), at equally
    # spaced ε: then the pairs cover the range in which the curve bends.
    mu = float(gdp.mu(0.0, min(most, 1 - 1e-6)))
    steps = mu * np.linspace(0.0, mu / 2 + 4, _PAIRS)[1:]
    deltas = np.asarray(gdp.delta(mu, steps), np.float64)
    epsilons = np.array([float(profile.epsilon(float(delta))) for delta in deltas])
    known = np.isfinite(epsilons)
    return np.append(epsilons[known], 0.0), np.append(deltas[known], most)
