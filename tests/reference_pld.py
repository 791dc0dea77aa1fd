"""δ of composed privacy losses by other means: exact for one step, else to 1e-10.

Nothing here rounds losses or adds noise: the characteristic function of the continuous
loss is integrated by Gauss's rule, and δ(ε) is the inverse transform, cut off where it
has vanished. That needs many steps or much noise, which the cases of the tests have.
"""

import mpmath as mp
import numpy as np
import scipy.optimize
from scipy.stats import norm

KINDS = ("remove", "add", "replace", "fixed")


def single_delta(kind, mu, q, epsilon):
    """δ(ε) of one step to 40 digits."""
    mu, q, epsilon = mp.mpf(mu), mp.mpf(q), mp.mpf(epsilon)
    e = mp.exp(epsilon)

    def first(z):
        return (1 - q) * mp.ncdf(-z) + q * mp.ncdf(mu - z)

    def likelihood(v):  # the z at which 1 − q + q e^{μz − μ²/2} is v
        return (mp.log((v - 1 + q) / q) + mu**2 / 2) / mu if v > 1 - q else -mp.inf

    if kind in ("remove", "fixed"):
        z = likelihood(e)
        return first(z) - e * mp.ncdf(-z)
    if kind == "add":
        z = likelihood(1 / e)
        return mp.ncdf(z) - e * (1 - first(z)) if z > -mp.inf else mp.mpf(0)

    def ratio(z):
        up, down = mp.exp(mu * z - mu**2 / 2), mp.exp(-mu * z - mu**2 / 2)
        return (1 - q + q * up) / (1 - q + q * down)

    low, high = mp.mpf(0), epsilon / mu + mu + 60
    for _ in range(160):
        middle = (low + high) / 2
        low, high = (low, middle) if ratio(middle) > e else (middle, high)
    second = (1 - q) * mp.ncdf(-low) + q * mp.ncdf(-mu - low)
    return first(low) - e * second


def two_step_delta(kind, mu, q, epsilon):
    """δ(ε) of two steps: E δ₁(ε − L₂) over the loss L₂ of the second, by Gauss's rule.

    All terms are positive, so that even tiny δ has relative precision.
    """
    other = {"remove": "add", "add": "remove"}.get(kind, kind)

    def delta_of_one_step(e):
        if e >= 0:
            return single_delta(kind, mu, q, e)
        return -mp.expm1(e) + mp.exp(e) * single_delta(other, mu, q, -e)

    x, p = losses(kind, mu, q, panels=25, reach=30)
    return mp.fsum(
        w * delta_of_one_step(epsilon - loss) for loss, w in zip(x, p, strict=True)
    )


def losses(kind, mu, q, panels=60, order=32, reach=14):
    """Quadrature nodes and weights for the distribution of one step's loss."""
    x, w = np.polynomial.legendre.leggauss(order)

    def composite_rule(a, b):
        edges = np.linspace(a, b, panels + 1)
        half = np.diff(edges)[:, None] / 2
        return (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()

    def mixture_density(z):
        return (1 - q) * norm.pdf(z) + q * norm.pdf(z - mu)

    def loss_at(z):
        return np.log1p(q * np.expm1(mu * z - mu * mu / 2))

    if kind == "fixed":
        z, w = composite_rule(mu / 2, mu + reach)
        at_zero = (1 - q) * (2 * norm.cdf(mu / 2) - 1)
        return np.concatenate([loss_at(z), -loss_at(z), [0.0]]), np.concatenate(
            [w * mixture_density(z), w * norm.pdf(z), [at_zero]]
        )
    z, w = composite_rule(-mu - reach, mu + reach)
    if kind == "replace":
        return loss_at(z) - loss_at(-z), w * mixture_density(z)
    if kind == "remove":
        return loss_at(z), w * mixture_density(z)
    return -loss_at(z), w * norm.pdf(z)


def composed_delta(parts, epsilon, variance=0.0, frequencies=1500):
    """δ(ε) of several (kind, μ, q, count), composed with a Gaussian loss."""
    nodes = [(*losses(kind, mu, q), count) for kind, mu, q, count in parts]

    def cumulant(s):
        total = variance * (s * s + s) / 2
        for x, p, count in nodes:
            top = np.max(np.real(s) * x)
            total = total + count * (np.log(np.sum(p * np.exp(s * x - top))) + top)
        return total

    tilt = np.exp(
        scipy.optimize.minimize_scalar(
            lambda u: cumulant(np.exp(u)) - np.exp(u) * epsilon - u,
            bounds=(-3, 7),
            method="bounded",
        ).x
    )
    h = 1e-3 * tilt
    spread = np.sqrt(
        (cumulant(tilt + h) - 2 * cumulant(tilt) + cumulant(tilt - h)) / h**2
    )
    step = 2 * np.pi / (24 * spread + 40 / tilt)
    s = tilt + 1j * step * np.arange(frequencies)
    real = cumulant(tilt)
    exponent = np.array([cumulant(v) for v in s]) - real
    assert exponent[-1].real < -45, "the transform has not vanished"
    terms = np.exp(exponent - 1j * s.imag * epsilon) / (s * (s + 1))
    total = (terms[0].real + 2 * np.sum(terms[1:].real)) * step / (2 * np.pi)
    return total * np.exp(real - tilt * epsilon)


def convolved_delta(mu, q, count, epsilon, top, points):
    """An upper bound on δ(ε) of Poisson-sampled steps ("remove"), with an O(h²) error.

    Losses are on a grid from log(1 − q) to top, each cell's mass at its ends such that
    both distributions keep theirs, and convolved term by term: a sum of positive terms,
    so that even tiny δ has relative precision. What is beyond top is left out.
    """
    least, h = np.log1p(-q), (top - np.log1p(-q)) / (points - 1)
    x = least + h * np.arange(points)
    with np.errstate(divide="ignore"):
        z = (np.log(np.exp(least) * np.expm1(x - least) / q) + mu**2 / 2) / mu

    def cell_masses(mean):
        above, below = norm.sf(z - mean), norm.cdf(z - mean)
        return np.where(z[:-1] > mean, -np.diff(above), np.diff(below))

    idle, touched = cell_masses(0.0), cell_masses(mu)
    mass = (1 - q) * idle + q * touched
    excess = q * touched - np.exp(least) * np.expm1(x[:-1] - least) * idle
    up = np.clip(excess / -np.expm1(-h), 0, mass)
    step, total = np.append(mass - up, 0) + np.append(0, up), np.eye(1, points)[0]
    for bit in reversed(bin(count)[2:]):
        if bit == "1":
            total = np.convolve(total, step)[:points]
        step = np.convolve(step, step)[:points]
    y = count * least + h * np.arange(points)
    return np.sum(total * np.maximum(-np.expm1(epsilon - y), 0))


def epsilon_of(delta_fn, target, low, high):
    return scipy.optimize.brentq(
        lambda e: np.log(delta_fn(e)) - np.log(target), low, high, xtol=1e-13
    )
