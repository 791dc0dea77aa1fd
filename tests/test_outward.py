"""Noise and decay as executed in float32 are at least as private as accounted."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Adjacency
from dpjax._core.float64 import cast
from dpjax._core.rounding import round_down_float32, round_up_float32
from dpjax.accounting import tree as accounting
from dpjax.noise._gaussian import gaussian_like

pytestmark = pytest.mark.rounding

KEY = jax.random.wrap_key_data(np.array([0, 29], np.uint32))
NUMBERS = [0.1, 0.7, 0.99, 0.999, 1 / 3, 0.5, 1 - 2.0**-30, 2.0**-90, 7e-20]


@pytest.fixture(params=[False, True], ids=["float32", "x64"])
def precision(request):
    with jax.enable_x64(request.param):
        yield request.param


def as_fraction(x):
    return Fraction(float(x))


SLACK = 1 + Fraction(4, 2**23)


def assert_encloses(low, x, high):
    assert as_fraction(np.float32(low)) == as_fraction(low)  # it is float32
    assert as_fraction(np.float32(high)) == as_fraction(high)
    assert as_fraction(x) / SLACK <= as_fraction(low) <= as_fraction(x)
    assert as_fraction(x) <= as_fraction(high) <= as_fraction(x) * SLACK


def test_eager_array_is_rounded_to_the_safe_side(precision):
    for x in NUMBERS:
        high = round_up_float32("x", jnp.asarray(np.float32(x)))
        assert_encloses(round_down_float32(np.float32(x)), x, high)


def test_numbers_and_products_are_rounded_to_the_safe_side(precision):
    up = jax.jit(round_up_float32, static_argnums=0)
    for x in NUMBERS:
        for low, high in (
            (round_down_float32(x), round_up_float32("x", x)),
            (jax.jit(round_down_float32)(x), up("x", x)),
        ):
            assert_encloses(low, x, high)
        for y in (3, 0.3, 123.4):
            product = as_fraction(x) * as_fraction(y)
            for high in (
                round_up_float32("x", x, y),
                up("x", x, y),
                up("x", x, 1.0 * y),
            ):
                assert product <= as_fraction(high) <= product * SLACK
    assert round_up_float32("x", 0.5) == round_down_float32(0.5) == 0.5
    numbers = np.array([1, 2, 3]), np.array([2**40 + 1]), np.array(7)
    products = jax.jit(lambda: [round_up_float32("x", n, 1.5) for n in numbers])()
    for integers, result in zip(numbers, map(np.float64, products), strict=True):
        assert result.shape == integers.shape
        assert np.all(result >= 1.5 * integers)
        np.testing.assert_allclose(result, 1.5 * integers, rtol=1e-6)
    assert (
        round_up_float32("x", 0.0)
        == round_down_float32(0.0)
        == round_up_float32("x", 3, 0)
        == 0
    )
    assert float(up("x", 0.0)) == float(up("x", 0.3, 0)) == 0
    assert float(jax.jit(round_down_float32)(0.0)) == 0


def test_wide_integers_of_numpy_are_rounded_like_integers_of_python():
    # JAX keeps the lowest 32 bits of an integer: 2³³ would become 0, without any noise.
    for x in (2**33, 2**32 + 1, 2**63 - 1):
        for wide in (np.int64(x), np.uint64(x), np.array(x)):
            assert round_up_float32("x", wide) == round_up_float32("x", x) >= x
            assert round_up_float32("x", wide, 0.5) == round_up_float32("x", x, 0.5)


def test_rounding_does_not_rest_on_a_cast_and_back(x64):
    # For GPUs, XLA replaces a cast from float64 to float32 and back by the identity.
    casts = {
        "round down": round_down_float32,
        "round up": functools.partial(round_up_float32, "x"),
        "up": lambda x: cast(x, np.dtype("float32"), "up"),
        "down": lambda x: cast(x, np.dtype("float32"), "down"),
    }
    for name, fn in casts.items():
        traced = jax.jit(fn).trace(jnp.float64(0.1))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "reduce_precision" in text, name
        assert "(tensor<f32>) -> tensor<f64>" not in text, name


def test_numbers_outside_float32_range_raise_or_are_nan():
    for factors in [(1e-31,), (1e31,), (1e-20, 1e-20), (1e20, 1e20)]:
        with pytest.raises(ValueError, match="^noise must be 0 or from"):
            round_up_float32("noise", *factors)
        assert np.isnan(jax.jit(round_up_float32, static_argnums=0)("noise", *factors))


@pytest.mark.diagonal("precision")
@pytest.mark.parametrize("decay", [0.1, 0.7, 0.99, 0.999, 1 - 2.0**-26])
def test_momentum_decay_is_rounded_down(precision, decay):
    dtypes = [jnp.float32, jnp.float64] if precision else [jnp.float32]
    tx = dpjax.tree_momentum(decay, 0.0, num_steps=3, key=KEY)

    @jax.jit
    def after_two_steps(zeros, ones):
        _, state = tx.update(ones, tx.init(zeros))
        return tx.update(zeros, state)[1]

    zeros, ones = ([f(2, d) for d in dtypes] for f in (np.zeros, np.ones))
    state = jax.device_get(after_two_steps(zeros, ones))
    for m in state.momentum:  # β · 1 + 0, without rounding
        assert as_fraction(state.decay) == as_fraction(m[0]) <= as_fraction(decay)


def test_drawn_noise_is_at_least_the_accounted_noise(precision):
    zeros = np.zeros(1000, np.float32)
    draw = functools.partial(gaussian_like, KEY, jnp.asarray(zeros))
    unit = np.asarray(draw(1.0))
    least = np.nextafter(np.float32(0.7), np.float32(1))
    assert Fraction(7, 10) > as_fraction(np.float32(0.7))
    np.testing.assert_array_equal(draw(0.7), unit * least)
    tx = dpjax.add_gaussian_noise(0.7, key=KEY)
    out = jax.jit(lambda sums: tx.update(sums, tx.init(None))[0])(zeros)
    near = dpjax.add_gaussian_noise(float(np.float32(0.7)), key=KEY)
    less = jax.jit(lambda sums: near.update(sums, near.init(None))[0])(zeros)
    out, less = np.asarray(out), np.asarray(less)
    assert np.all(np.abs(out) >= np.abs(less))
    assert np.any(np.abs(out) > np.abs(less))


@pytest.mark.diagonal
@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
def test_accounted_mu_covers_the_rounded_parameters(order, x64):
    mu = functools.partial(
        accounting.momentum_mu,
        num_steps=300,
        steps_per_epoch=7,
        order=order,
        adjacency=Adjacency.ZERO_OUT,
    )
    decays = np.random.default_rng(0).uniform(0.5, 1.0, 40)
    noises = np.random.default_rng(1).uniform(0.5, 5.0, 40)
    running = [
        dpjax.tree_momentum(b, s, num_steps=300, key=KEY).init(None)
        for b, s in zip(decays, noises, strict=True)
    ]
    promised = mu(noises, decay=decays)
    runs = mu(
        np.array([s.noise.stddev for s in running], np.float64),
        decay=np.array([s.decay for s in running], np.float64),
    )
    assert np.all(runs <= promised)
    # Rounding to the nearest float32 would exceed the guarantee.
    nearest = mu(noises, decay=decays.astype(np.float32).astype(np.float64))
    assert np.any(nearest > promised)


def test_injected_low_precision_parameters_are_safely_rounded():
    params = np.zeros(3, jnp.bfloat16)
    tx = optax.inject_hyperparams(
        dpjax.tree_momentum, static_args=("num_steps", "key", "buffer")
    )(0.991, 0.7, num_steps=3, key=KEY)
    state = jax.jit(tx.init)(params)
    inner = state.inner_state
    assert 0.98 < float(inner.decay) <= 0.991 < float(jnp.bfloat16(0.991))
    assert 0.7 <= float(inner.noise.stddev) < 0.71
    out, _ = jax.jit(tx.update)(params, state)
    assert np.all(np.isfinite(np.asarray(out, np.float32)))
