"""Every accountant at the corners of its domain, against closed forms in mpmath.

A line of the table is a function of arrays, the corners, and a reference for each
value: an independent lower bound on an upper bound, or the other way round. References
are the definition at hundreds of digits, or the case of one step.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from dpjax import Adjacency
from dpjax._core.float64 import cast
from dpjax.accounting import (
    fdp,
    gdp,
    iteration,
    pld,
    pure,
    random_rounds,
    rdp,
    tree,
    truncation,
)

LEAST = 5e-324  # the least subnormal float64, which compiled code flushes to zero
ALMOST_ONE = 1 - 2.0**-53
MUS = [0, 1e-300, 1e-160, 1e-20, 1e-5, 0.1, 1, 3, 30, 300, 1e5, 1e10, 1e100, 1e300]
EPSILONS = [0, 1e-300, 1e-20, 1e-5, 0.1, 1, 3.75, 30, 100, 700, 1e5, 1e20, 1e308]
DELTAS = [LEAST, 1e-310, 1e-300, 1e-30, 1e-5, 0.3, 0.5, 0.9, 1 - 1e-10, ALMOST_ONE]
ALPHAS = [0, 1e-300, 1e-20, 1e-3, 0.3, 0.5, 0.9, ALMOST_ONE, 1]
NOISES = [1e-300, 1e-20, 0.3, 1, 1e7, 1e17, 1e100, 1e200, 1e300, 1.7e308, np.inf]

SETTING: Any = {
    "step_size": 0.3,
    "gradient_norm": 2.0,
    "clipped": False,
    "generalised_linear": False,
    "smoothness": 2.0,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.0,
    "diameter": np.inf,
    "adjacency": Adjacency.REPLACE,
}


def gaussian_delta(mu, epsilon):
    """The exact δ, or a close lower bound on it where digits do not suffice."""
    with mp.workdps(700):
        mu, epsilon = mp.mpf(float(mu)), mp.mpf(float(epsilon))
        if mu == 0:
            return mp.mpf(0)
        a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        if abs(a) > 1e6:  # positive, or 1 to a million digits
            return mp.mpf(10) ** -(10**6) if a > 0 else 1 - mp.mpf(10) ** -600
        if b > 1e6:  # R(b) < 1/b
            return mp.ncdf(-a) - mp.npdf(a) / b
        return mp.ncdf(-a) - mp.exp(epsilon) * mp.ncdf(-b)


def normal_quantile(p):
    """Φ⁻¹(p)."""
    with mp.workdps(60):
        tail = min(mp.mpf(p), 1 - mp.mpf(p))
        if tail == mp.mpf("0.5"):
            return mp.mpf(0)
        start = -mp.sqrt(-2 * mp.log(tail))
        z = mp.findroot(lambda z: mp.log(mp.ncdf(z) / tail), (start, start + 0.1))
        return z if p < 0.5 else -z


QUANTILES = {p: normal_quantile(p) for p in ALPHAS if 0 < p < 1}


def gaussian_tradeoff(mu, alpha):
    if alpha in (0, 1):
        return mp.mpf(1 - alpha)
    x = -QUANTILES[float(alpha)] - mp.mpf(float(mu))
    return mp.ncdf(x) if x > -1e5 else mp.mpf(0)


def pure_delta(pure_epsilon, epsilon):
    p, e = mp.mpf(float(pure_epsilon)), mp.mpf(float(epsilon))
    with mp.workdps(400):
        return mp.mpf(0) if e >= p else -mp.expm1(e - p) / (1 + mp.exp(-p))


def pure_mu(p):
    with mp.workdps(60):
        p = mp.mpf(float(p))
        if p > 100:  # φ(x)/(x + 1/x) < Φ(−x), at its root's lower side
            return 2 * mp.sqrt(2 * p - 2 * mp.log(4 * p))
        # The series of erf⁻¹(tanh) begins with its tangent and is convex.
        return mp.sqrt(8) * (
            p / 4 * mp.sqrt(mp.pi) if p < 1e-6 else mp.erfinv(mp.tanh(p / 2))
        )


def one_step_mu(noise):
    """μ of one step with a sensitivity of two clip norms."""
    return mp.mpf(2) / mp.mpf(float(noise)) if noise < np.inf else mp.mpf(0)


def poisson_rdp_of_order_2(noise, rate):
    """The divergence of order 2: log (1 + q² (e^{1/σ²} − 1))."""
    with mp.workdps(700):
        if noise == np.inf:
            return mp.mpf(0)
        v = 1 / mp.mpf(float(noise)) ** 2
        q = mp.mpf(float(rate))
        if v > 1e6:  # the exponential alone
            return v + 2 * mp.log(q) if q > 0 else mp.mpf(0)
        return mp.log1p(q * q * mp.expm1(v))


def converted_epsilon(rho, order, delta):
    rho, a, d = (mp.mpf(float(x)) for x in (rho, order, delta))
    if mp.sqrt(min(rho / 2, -mp.expm1(-rho))) <= d:
        return mp.mpf(0)
    return rho + mp.log1p(-1 / a) - (mp.log(d) + mp.log(a)) / (a - 1)


def converted_delta(rho, order, epsilon):
    rho, a, e = (mp.mpf(float(x)) for x in (rho, order, epsilon))
    total_variation = mp.sqrt(min(rho / 2, -mp.expm1(-rho)))
    exponent = (a - 1) * (rho - e + mp.log1p(-1 / a)) - mp.log(a)
    return (
        min(total_variation, mp.exp(exponent))
        if exponent > -1e30
        else min(total_variation, mp.mpf(0))
    )


def tree_mu(noise, decay):
    """Five steps, epochs of two in a fixed order: nodes 1, 3, 5, [1, 2], [1, 4]."""
    b = mp.mpf(float(decay))
    odd = 3 + b**2 + (b**3 + b) ** 2
    even = 1 + (1 + b**2) ** 2
    return mp.sqrt(max(odd, even)) * one_step_mu(noise)


def exponential_mechanism_mu(lipschitz, strong, diameter):
    L, m, D = (mp.mpf(float(x)) for x in (lipschitz, strong, diameter))
    if L == 0:
        return L
    if m > 0 and m * D >= L:
        return L / mp.sqrt(m)
    return mp.inf if mp.isinf(D) else mp.sqrt(D * (2 * L - m * D))


def step_lipschitz(eta, smoothness):
    eta, M = mp.mpf(float(eta)), mp.mpf(float(smoothness))
    return max(mp.mpf(1), eta * M - 1)


def clipped_step_lipschitz(eta, smoothness):
    half = mp.mpf(float(eta)) * mp.mpf(float(smoothness)) / 2
    inner = half * (2 - half)
    if inner > 0 and abs(1 - half) * half <= inner:
        return mp.sqrt(1 + half**2 / inner)
    return max(mp.mpf(1), 2 * half - 1)


def momentum_mu(noise, decay, order):
    return tree.momentum_mu(
        noise,
        num_steps=5,
        decay=decay,
        steps_per_epoch=2,
        order=order,
        adjacency=Adjacency.REPLACE,
    )


def reduced_momentum_mu(anchor, change, drift):
    return tree.reduced_momentum_mu(
        (anchor, change, drift),
        num_steps=5,
        decay=0.9,
        steps_per_epoch=2,
        adjacency=Adjacency.REPLACE,
    )


def one_step_descent_mu(name, noise, diameter=np.inf, norm=2.0):
    """An accountant of noisy descent for one step on one batch."""
    setting = SETTING | {"diameter": diameter, "gradient_norm": norm}
    shape = {"num_epochs": 1, "batches_per_epoch": 1, "batch_size": 5.0}
    if name == "gd":
        return iteration.noisy_gd_mu(noise, num_steps=1, num_examples=5.0, **setting)
    if name == "cyclic":
        return iteration.noisy_cyclic_gd_mu(noise, order="fixed", **shape, **setting)
    if name == "rdp":
        return iteration.last_iterate_rdp(
            noise, 3.0, order="reshuffled", **shape, **setting
        )
    setting = setting | {"step_size": np.array([0.3])}

    def scheduled_mu(noise):
        return iteration.scheduled_cyclic_gd_mu(
            noise, batches_per_epoch=1, batch_size=5.0, **setting
        )

    if isinstance(noise, np.ndarray):
        return np.stack([scheduled_mu(x) for x in noise])
    return jax.vmap(scheduled_mu)(noise) if noise.ndim else scheduled_mu(noise)


def descent_sensitivity(norm, count):
    return iteration.gradient_descent_sensitivity(
        num_steps=count, num_examples=7.0, **SETTING | {"gradient_norm": norm}
    )


class Line(NamedTuple):
    """One accountant, the corners, and a check that its values are on the safe side."""

    fn: Any
    grid: tuple[list, ...]
    safe: Any  # a predicate of the value and the arguments


def is_at_least(truth):
    return lambda value, *args: value >= truth(*args)


def is_at_most(truth):
    return lambda value, *args: value <= truth(*args)


def meets_delta(delta_fn):
    """Whether δ at ε = value is at most the last argument."""
    return lambda value, *args: (
        value == mp.inf or delta_fn(*args[:-1], value) <= mp.mpf(float(args[-1]))
    )


def stack_pair(x, y):
    stack = jnp.stack if isinstance(x, jax.Array) else np.stack
    return stack([x, y], axis=-1)


TABLE = {
    "gdp.delta": Line(gdp.delta, (MUS, EPSILONS), is_at_least(gaussian_delta)),
    "gdp.epsilon": Line(gdp.epsilon, (MUS, DELTAS), meets_delta(gaussian_delta)),
    "gdp.mu": Line(
        gdp.mu,
        (EPSILONS, DELTAS),
        lambda value, e, d: gaussian_delta(value, e) <= mp.mpf(float(d)),
    ),
    "gdp.tradeoff": Line(gdp.tradeoff, (MUS, ALPHAS), is_at_most(gaussian_tradeoff)),
    "gdp.compose": Line(
        lambda x, y: gdp.compose(stack_pair(x, y)),
        (MUS, MUS),
        is_at_least(
            lambda x, y: mp.sqrt(mp.mpf(float(x)) ** 2 + mp.mpf(float(y)) ** 2)
        ),
    ),
    "pure.delta": Line(pure.delta, (EPSILONS, EPSILONS), is_at_least(pure_delta)),
    "pure.epsilon": Line(
        pure.epsilon, (EPSILONS, [0, *DELTAS, 1]), meets_delta(pure_delta)
    ),
    "pure.mu": Line(pure.mu, (EPSILONS,), is_at_least(pure_mu)),
    "rdp.gaussian": Line(
        lambda s, a: rdp.gaussian(s, a[..., None])[..., 0],
        (NOISES, [1 + 1e-6, 2.0, 1e6, 1e300]),
        is_at_least(lambda s, a: mp.mpf(float(a)) / 8 * one_step_mu(s) ** 2),
    ),
    "rdp.poisson_gaussian": Line(
        lambda s, q: rdp.poisson_gaussian(s, q, np.array([2.0]))[..., 0],
        (NOISES, [0, 1e-300, 1e-12, 0.5, ALMOST_ONE, 1]),
        is_at_least(poisson_rdp_of_order_2),
    ),
    "rdp.compose": Line(
        lambda x, n: rdp.compose(x[..., None], count=n)[..., 0],
        ([0, 1e-300, 1.0, 1e300], [0, 1, 1e6, 1e36, 1e300]),
        is_at_least(lambda x, n: mp.mpf(float(x)) * mp.mpf(float(n))),
    ),
    "rdp.epsilon": Line(
        lambda x, a, d: rdp.epsilon(x[..., None], a[..., None], d),
        ([0, 1e-300, 1.0, 1e300], [1 + 1e-9, 2.0, 1e6], DELTAS),
        is_at_least(converted_epsilon),
    ),
    "rdp.delta": Line(
        lambda x, a, e: rdp.delta(x[..., None], a[..., None], e),
        ([0, 1e-300, 1.0, 1e300], [1 + 1e-9, 2.0, 1e6, 1e300], EPSILONS),
        is_at_least(converted_delta),
    ),
    "fdp.tradeoff": Line(
        lambda alpha: fdp.tradeoff(
            lambda e: gdp.delta(1.0, e), alpha, epsilons=np.array([0, 1, 800, 1e300])
        ),
        (ALPHAS,),
        is_at_most(lambda alpha: gaussian_tradeoff(1.0, alpha)),
    ),
    "fdp.true_positive_rate": Line(
        lambda alpha: fdp.true_positive_rate(lambda e: gdp.delta(1.0, e), alpha),
        (ALPHAS,),
        is_at_least(lambda alpha: 1 - gaussian_tradeoff(1.0, alpha)),
    ),
    "fdp.advantage": Line(
        lambda mu: fdp.advantage(lambda e: gdp.delta(mu, e)),
        (MUS,),
        is_at_least(lambda mu: gaussian_delta(mu, 0)),
    ),
    "tree.momentum_mu, fixed": Line(
        lambda s, b: momentum_mu(s, b, "fixed"),
        (NOISES, [0, 1e-300, 0.9, ALMOST_ONE]),
        is_at_least(tree_mu),
    ),
    "tree.momentum_mu, reshuffled": Line(
        lambda s, b: momentum_mu(s, b, "reshuffled"),
        (NOISES, [0, 1e-300, 0.9, ALMOST_ONE]),
        is_at_least(tree_mu),
    ),
    "reduced_momentum_mu": Line(
        reduced_momentum_mu,
        (NOISES, NOISES, NOISES),
        is_at_least(lambda a, _, d: max(one_step_mu(a), one_step_mu(d))),
    ),
    "pld.delta of Gaussians": Line(
        lambda mu, e: pld.delta(pld.gaussian(mu), e),
        ([mu for mu in MUS if mu == 0 or 1e-150 < mu < 1e150], EPSILONS),
        is_at_least(lambda mu, e: gaussian_delta(mu, e) * (1 - mp.mpf(1e-12))),
    ),
    "iteration.optimal_shift_mu": Line(
        lambda s, tau: iteration.optimal_shift_mu(
            0.5, s[..., None], tau[..., None], diameter=np.inf
        ),
        ([0, 1e-300, 1e-20, 1.0, 1e300], [1e-300, 1e-20, 1.0, 1e300]),
        is_at_least(lambda s, tau: mp.mpf(float(s)) / mp.mpf(float(tau))),
    ),
    "iteration.noisy_gd_mu": Line(
        lambda s: one_step_descent_mu("gd", s), (NOISES,), is_at_least(one_step_mu)
    ),
    "iteration.noisy_cyclic_gd_mu": Line(
        lambda s, norm: one_step_descent_mu("cyclic", s, 1e300, norm),
        (NOISES, [1e-300, 1.0, 1e300]),
        is_at_least(lambda s, _: one_step_mu(s)),
    ),
    "iteration.scheduled_cyclic_gd_mu": Line(
        lambda s: one_step_descent_mu("scheduled", s),
        (NOISES,),
        is_at_least(one_step_mu),
    ),
    "iteration.last_iterate_rdp": Line(
        lambda s: one_step_descent_mu("rdp", s),
        (NOISES,),
        is_at_least(lambda s: mp.mpf(1.5) * one_step_mu(s) ** 2),
    ),
    "iteration.langevin_mu": Line(
        lambda L, eta: iteration.langevin_mu(
            L,
            step_size=eta,
            num_steps=1,
            smoothness=1e-300,
            strong_convexity=0.0,
            diameter=np.inf,
        ),
        ([0, 1e-300, 1.0, 1e300], [1e-300, 1.0, 1e300]),
        is_at_least(lambda L, eta: mp.mpf(float(L)) * mp.sqrt(mp.mpf(float(eta)) / 2)),
    ),
    "iteration.exponential_mechanism_mu": Line(
        lambda L, m, D: iteration.exponential_mechanism_mu(
            L, strong_convexity=m, diameter=D
        ),
        (
            [0, 1e-300, 1.0, 1e300],
            [0, 1e-300, 1.0, 1e300],
            [1e-300, 1.0, 1e300, np.inf],
        ),
        is_at_least(exponential_mechanism_mu),
    ),
    "iteration.step_lipschitz": Line(
        lambda eta, M: iteration.step_lipschitz(eta, smoothness=M),
        ([1e-300, 1.0, 2.0, 1e300], [0, 1e-300, 1.0, ALMOST_ONE, 1e300]),
        is_at_least(step_lipschitz),
    ),
    "iteration.clipped_step_lipschitz": Line(
        lambda eta, M: iteration.clipped_step_lipschitz(
            eta, weak_convexity=0.0, smoothness=M
        ),
        ([1e-300, 1.0, 2.0, 1e300], [0, 1e-300, 1.0, ALMOST_ONE, 1e300]),
        is_at_least(clipped_step_lipschitz),
    ),
    "iteration.gradient_descent_sensitivity": Line(
        descent_sensitivity,
        ([1e-300, 1.0, 1e300], [1, 1e6, 1e15]),
        is_at_least(
            lambda norm, n: mp.mpf("0.6") * mp.mpf(float(norm)) * mp.mpf(n) / 7
        ),
    ),
    "iteration.random_assignment_delta": Line(
        lambda x, e: iteration.random_assignment_delta(stack_pair(x, 0 * x), e),
        ([0, 1e-300, 0.1, 1.0, 30.0], EPSILONS),
        is_at_least(lambda x, e: gaussian_delta(x, e) / 2),
    ),
    "iteration.random_assignment_epsilon": Line(
        lambda x, d: iteration.random_assignment_epsilon(stack_pair(x, x), d),
        ([0, 1e-300, 0.1, 1.0, 30.0], DELTAS),
        meets_delta(gaussian_delta),
    ),
    "truncation.overflow_delta": Line(
        lambda e: truncation.overflow_delta(
            e, num_examples=2, sampling_rate=1e-100, max_batch_size=1, num_steps=3
        ),
        ([0, 1e-300, 1.0, 700.0],),
        is_at_least(
            lambda e: min(mp.mpf(1), 3 * (1 + mp.exp(e)) * mp.mpf(1e-100) ** 2)
        ),
    ),
}


def grid_points(line):
    points = list(itertools.product(*line.grid))
    return [np.array(column, np.float64) for column in zip(*points, strict=True)]


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.parametrize("name", TABLE)
def test_values_bound_exact_values_from_the_safe_side(name):
    line = TABLE[name]
    args = grid_points(line)
    for wide in (True, False):
        with jax.enable_x64(wide):
            arrays = [jnp.asarray(x) for x in args] if wide else args
            if wide:
                value = np.asarray(jax.jit(line.fn)(*arrays))
            else:  # NumPy arrays are taken exactly
                value = np.asarray(line.fn(*arrays), np.float64)
        assert not np.any(np.isnan(value))
        for v, *point in zip(value.tolist(), *args, strict=True):
            with mp.workdps(60):
                assert line.safe(mp.mpf(v), *point), (point, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_float32_values_and_derivatives_are_never_nan(name):
    line = TABLE[name]
    with np.errstate(over="ignore", under="ignore"):
        args = [jnp.asarray(x.astype(np.float32)) for x in grid_points(line)]
    positions = tuple(range(len(args)))

    def total(*args):
        return jnp.sum(line.fn(*args))

    assert not np.any(np.isnan(jax.jit(line.fn)(*args)))
    for slope in jax.jit(jax.grad(total, positions))(*args):
        assert not np.any(np.isnan(slope))


# Calls with a known value.
LIMITS = {
    0.0: {  # nothing is released
        "gdp.delta": lambda: gdp.delta(0.0, 0.0),
        "gdp.delta at inf": lambda: gdp.delta(1.0, np.inf),
        "gdp.epsilon": lambda: gdp.epsilon(0.0, 1e-300),
        "gdp.tradeoff": lambda: gdp.tradeoff(np.inf, 0.0),
        "pure.delta": lambda: pure.delta(0.0, 0.0),
        "pure.epsilon": lambda: pure.epsilon(0.0, 0.0),
        "pure.mu": lambda: pure.mu(0.0),
        "rdp.delta": lambda: rdp.delta(np.zeros(2), np.array([2.0, 3.0]), 0.0),
        "rdp.epsilon": lambda: rdp.epsilon(np.zeros(2), np.array([2.0, 3.0]), 1e-300),
        "rdp.gaussian": lambda: rdp.gaussian(np.inf, np.array([2.0]))[0],
        "rdp.poisson_gaussian": lambda: rdp.poisson_gaussian(
            np.inf, 1.0, np.array([2.0])
        )[0],
        "no rate": lambda: rdp.poisson_gaussian(1e-300, 0.0, np.array([2.0]))[0],
        "momentum": lambda: momentum_mu(np.inf, 0.5, "fixed"),
        "reduced": lambda: reduced_momentum_mu(np.inf, np.inf, np.inf),
        "assignment": lambda: iteration.random_assignment_delta(np.zeros(3), 0.0),
    },
    np.inf: {  # nothing is promised
        "gdp.epsilon": lambda: gdp.epsilon(np.inf, 0.5),
        "gdp.mu": lambda: gdp.mu(np.inf, 0.5),
        "pure.mu": lambda: pure.mu(np.inf),
        "rdp.gaussian": lambda: rdp.gaussian(0.0, np.array([2.0]))[0],
        "momentum": lambda: momentum_mu(0.0, 0.5, "fixed"),
        "reduced": lambda: reduced_momentum_mu(1.0, 0.0, 1.0),
        "traced noise": lambda: jax.jit(one_step_descent_mu, static_argnums=0)(
            "gd", -1.0
        ),
        "traced delta": lambda: jax.jit(gdp.epsilon)(1.0, 0.0),
        "traced stddev": lambda: jax.jit(iteration.optimal_shift_mu)(
            np.ones(2), np.ones(2), np.zeros(2)
        ),
    },
}


@pytest.mark.diagonal("call")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    ("call", "value"),
    [
        pytest.param(call, value, id=f"{name}, {value}")
        for value, calls in LIMITS.items()
        for name, call in calls.items()
    ],
)
def test_values_at_limits_are_exact(call, value, wide):
    with jax.enable_x64(wide):
        assert float(call()) == value


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gdp.delta(np.nan, 1.0), "mu"),
        (lambda: gdp.delta([[1.0], [1.0, 2.0]], 1.0), "mu"),
        (lambda: gdp.epsilon(1.0, LEAST / 2), "delta"),
        (lambda: pure.delta(-1.0, 1.0), "pure_epsilon"),
        (lambda: pure.epsilon(1.0, 1.5), "delta"),
        (lambda: rdp.compose(np.ones(2), count=10**400), "count"),
        (lambda: rdp.compose(np.ones(2), count="three"), "count"),
        (lambda: rdp.gaussian(1.0, np.array([np.inf])), "orders"),
        (lambda: momentum_mu(1.0, 1.0, "fixed"), "decay"),
        (lambda: reduced_momentum_mu(1.0, -1.0, 1.0), "noise_multipliers"),
        (lambda: one_step_descent_mu("gd", np.nan), "noise_multiplier"),
        (lambda: one_step_descent_mu("cyclic", 1.0, 0.0), "diameter"),
        (lambda: descent_sensitivity(np.inf, 1), "gradient_norm"),
        (lambda: descent_sensitivity(1.0, 0.5), "num_steps"),
        (lambda: iteration.random_assignment_delta(np.array([-1.0]), 1.0), "mus"),
        (lambda: iteration.step_lipschitz(0.0, smoothness=1.0), "step_size"),
    ],
)
def test_arguments_outside_the_domain_raise(call, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()


def test_directed_casts_round_to_their_side():
    """Also beyond the range of float32, and below its least normal number."""
    least, most = (float(getattr(np.finfo(np.float32), x)) for x in ("tiny", "max"))
    values = np.array([1e-300, 1e-46, 1e-40, 0.3, 16777217.0, most * (1 + 1e-9), 1e300])
    values = np.concatenate([-values, values])
    with jax.enable_x64(True):
        up, down = (
            np.asarray(cast(jnp.array(values), np.dtype(np.float32), way), np.float64)
            for way in ("up", "down")
        )
    assert np.all((down <= values) & (values <= up))
    assert up[7] == up[9] == -down[0] == least
    assert up[-1] == -down[6] == np.inf
    assert down[-1] == -up[6] == most


def test_huge_counts_compose_without_overflow():
    with jax.enable_x64(True):
        for count in (10**18, 10**36, 10**300):
            total = rdp.compose(np.array([1.0, 0.3]), count=count)
            assert mp.mpf(float(np.asarray(total)[0])) >= count
            np.testing.assert_allclose(
                total, float(count) * np.array([1.0, 0.3]), 1e-14
            )


@pytest.mark.slow
def test_mixture_delta_does_not_underflow():
    """Sixteen rounds that are equally likely."""
    rounds = random_rounds.group(np.full(16, 1 / 16), groups=4)
    delta = random_rounds.delta(1e3, 50.0, rounds=rounds, sampling_rate=0.01)
    delta = float(delta)
    assert 0 < delta <= 1e-30 * (1 + 1e-5)  # δ is not resolved below, nor rounded less
