"""Random batches against composition, a published table, and an exact instance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpjax import Adjacency
from dpjax.accounting import gdp, iteration, pld

SETTING = {
    "step_size": 0.05,
    "gradient_norm": 5.0,
    "clipped": True,
    "generalised_linear": True,
    "smoothness": 16.0,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.0,
    "diameter": np.inf,
    "adjacency": Adjacency.REPLACE,
}


def sgd_bounds(num_steps, noise_multiplier=3.0, **changes):
    return iteration.noisy_sgd_bounds(
        noise_multiplier,
        1e-5,
        num_steps=num_steps,
        batch_size=1500,
        num_examples=60000,
        **SETTING | changes,
    )


@pytest.mark.slow
def test_composition_matches_published_table(compiled):
    """Table 4 of Bok, Su and Altschuler (2024), to its digits."""
    for epochs, printed in ((50, 4.44), (100, 6.65), (200, 10.11)):
        result = sgd_bounds(40 * epochs).composition
        assert round(float(result), 2) == printed


@pytest.mark.slow
def test_epsilon_of_long_convex_runs_converges(compiled):
    convex = {"diameter": 0.02, "regularization": 0.1}
    short, long = sgd_bounds(20_000, **convex), sgd_bounds(80_000, **convex)
    assert long.composition > 2 * short.composition
    assert long.diameter == pytest.approx(float(short.diameter), rel=1e-2)
    strong = sgd_bounds(80_000, regularization=0.5)
    assert strong.winner == "contraction"
    assert strong.best < 6
    assert sgd_bounds(80_000, smoothness=np.inf).contraction == np.inf


@pytest.mark.slow
def test_contraction_bound_is_at_most_published_candidates():
    """The reported bound is at most each candidate with other last steps."""
    result = sgd_bounds(4000, regularization=0.5).contraction
    c, r, share = 1 - 0.05 * 0.5, 2 / 3, 1 / 40

    @jax.vmap
    def published_epsilon(n):
        rest = 2 * np.sqrt(2) * r * (c ** (n + 1) - c**4000) / (1 - c)
        last = pld.subsampled_gdp(2 * np.sqrt(2) * r, share)
        before = pld.compose(pld.subsampled_gdp(2 * r, share), n)
        whole = pld.convolve(pld.gaussian(rest), pld.convolve(last, before))
        return pld.epsilon(whole, 1e-5)

    best = np.min(published_epsilon(np.array([50.0, 150.0, 400.0])))
    assert 0.5 * best < result <= best


def delta_of_mixtures(centres_p, weights_p, centres_q, weights_q, variance, epsilon):
    """δ of one mixture of Gaussians against another, by quadrature."""
    std = np.sqrt(variance)
    x = np.linspace(-12, 12, 6001)[:, None] * std + np.mean(centres_p)
    p = norm.pdf(x, centres_p, std) @ weights_p
    q = norm.pdf(x, centres_q, std) @ weights_q
    step = x[1, 0] - x[0, 0]
    sides = (
        np.sum(np.maximum(a - np.exp(epsilon) * b, 0)) for a, b in ((p, q), (q, p))
    )
    return step * max(sides)


@pytest.mark.slow  # a program that searches is large
def test_epsilon_bounds_exact_delta_of_quadratics():
    """Three examples, batches of one: the last iterate mixes 2^t Gaussians."""
    c, steps, noise_multiplier = 0.8, 8, 2.0
    used = (np.arange(2**steps)[:, None] >> np.arange(steps)) % 2
    weights = np.prod(np.where(used == 1, 1 / 3, 2 / 3), axis=1)
    # Units of the noise of a step; gradients of one example differ by twice the norm.
    powers = c ** np.arange(steps)[::-1]
    centres = used @ powers / noise_multiplier
    variance = np.sum(powers**2)
    setting = SETTING | {
        "gradient_norm": 1.0,
        "clipped": False,
        "smoothness": 4.0,
        "strong_convexity": 4.0,
    }

    @jax.jit
    def bound(noise_multiplier):
        return iteration.noisy_sgd_epsilon(
            noise_multiplier,
            1e-2,
            num_steps=steps,
            batch_size=1,
            num_examples=3,
            **setting,
        )

    epsilon = float(bound(noise_multiplier))
    truth = delta_of_mixtures(centres, weights, -centres, weights, variance, epsilon)
    assert 0 < truth <= 1e-2


@pytest.mark.slow
def test_derivatives_match_finite_differences(x64):
    def epsilon(noise_multiplier):
        return sgd_bounds(3000, noise_multiplier, regularization=0.5).contraction

    h = 1e-4
    difference = (epsilon(3.0 + h) - epsilon(3.0 - h)) / (2 * h)
    slope = jax.jit(jax.grad(epsilon))(3.0)
    assert slope == pytest.approx(float(difference), rel=1e-3)


@pytest.mark.slow
def test_epsilon_of_one_step_equals_composition():
    one = sgd_bounds(1, diameter=1e-6)
    assert one.best <= one.composition
    alone = iteration.noisy_sgd_epsilon(
        3.0, 1e-5, num_steps=1, batch_size=10, num_examples=10, **SETTING
    )
    np.testing.assert_allclose(alone, gdp.epsilon(2 / 3, 1e-5), rtol=1e-5)


def epsilon_of_sizes(batch_size, num_examples, num_steps=1):
    return iteration.noisy_sgd_epsilon(
        1.0,
        1e-5,
        num_steps=num_steps,
        batch_size=batch_size,
        num_examples=num_examples,
        **SETTING,
    )


@pytest.mark.parametrize(
    "transform", [lambda f: f, pytest.param(jax.jit, marks=pytest.mark.slow)]
)
def test_sampling_rate_of_short_floats_is_not_rounded_down(transform):
    """Both numbers are exact in 16 bits, and their quotient is not."""
    size, examples = 17, 97
    numbers = jnp.asarray([size, examples], jnp.bfloat16)
    result = transform(epsilon_of_sizes)(*numbers)

    def excess(epsilon):  # of the delta of 2-GDP
        above = norm.sf(epsilon / 2 - 1) - np.exp(epsilon) * norm.sf(epsilon / 2 + 1)
        return above - 1e-5 * examples / size

    full = brentq(excess, 1.0, 20.0, xtol=1e-12)
    exact = np.log1p(size / examples * np.expm1(full))
    assert exact <= result <= exact * (1 + 2e-6)


@pytest.mark.slow
def test_traced_sizes_out_of_range_give_infinity():
    epsilon = jax.jit(functools.partial(epsilon_of_sizes, num_steps=9))
    for sizes in [(0, 10), (-1, 10), (np.nan, 10), (11, 10), (2, np.inf)]:
        assert epsilon(*map(float, sizes)) == np.inf


def test_bounds_are_float32_scalars():
    result = jax.eval_shape(lambda x: sgd_bounds(4000, x), 3.0)
    best = jax.eval_shape(
        lambda x: iteration.noisy_sgd_epsilon(
            x, 1e-5, num_steps=9, batch_size=2, num_examples=9, **SETTING
        ),
        3.0,
    )
    for x in (best, *result):
        assert (x.shape, x.dtype) == ((), np.float32)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"adjacency": Adjacency.ZERO_OUT}, "adjacency"),
        ({"num_steps": 1.5}, "num_steps"),
        ({"batch_size": 20}, "batch_size"),
        ({"num_examples": 0}, "num_examples"),
        ({"delta": 1.0}, "delta"),
        ({"step_size": 0.2}, "step_size"),
    ],
)
def test_invalid_arguments_raise(changes, name):
    arguments = {"delta": 1e-5, "num_steps": 5, "batch_size": 2, "num_examples": 10}
    with pytest.raises(ValueError, match=f"^{name} must"):
        iteration.noisy_sgd_epsilon(3.0, **arguments | SETTING | changes)
