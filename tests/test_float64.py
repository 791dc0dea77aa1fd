"""Float64 functions compile once for all types of numbers, to small programs."""

import contextlib
import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Adjacency
from dpjax._core.float64 import float64
from dpjax.accounting import calibrate, fdp, gdp, pld, rdp

pytestmark = pytest.mark.rounding


@contextlib.contextmanager
def record_compilations(name):
    """Yield a list that gets a message for each compilation of the named function."""
    result = []

    class Handler(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith(f"Compiling jit({name})"):
                result.append(message)

    handler = Handler()
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield result
    finally:
        logger.removeHandler(handler)


def device_array(x, dtype=None):
    """Like `jnp.asarray`, but made by NumPy, which compiles nothing."""
    return jax.device_put(np.asarray(x, dtype))


def all_scalar_types():
    """The number two in every type, including NumPy's and weak ones."""
    with jax.enable_x64(True):
        doubles = device_array(2.0), jnp.asarray(2.0)
    singles = (
        device_array(2, np.float32),
        jnp.asarray(2.0),
        device_array(2, jnp.bfloat16),
        device_array(2),
    )
    return (2.0, 2, np.float64(2), np.float32(2), np.array(2), *singles, *doubles)


def test_float64_function_is_traced_once_for_all_argument_types():
    traces = []

    @float64("up")
    def double_product(a, b):
        traces.append(a.dtype)
        return 2 * a * b

    with record_compilations("double_product") as result:
        for x64 in (False, True):
            with jax.enable_x64(x64):
                for x in all_scalar_types():
                    for y in (1.5, device_array(1.5, np.float32)):
                        assert float(double_product(x, y)) == 6
        with jax.numpy_dtype_promotion("strict"):
            assert float(double_product(device_array(2, np.float32), 1.5)) == 6
    assert traces == [np.float64]
    assert not result  # NumPy evaluates concrete numbers


def test_derivatives_are_traced_once_for_varying_arguments():
    traces = []

    @float64("up")
    def product(a, b, c):
        traces.append([isinstance(x.aval, jax.core.ShapedArray) for x in (a, b, c)])
        return a * b * c

    args = [device_array(x, np.float32) for x in (2, 3, 5)]
    for x in (2.0, args[0], jax.device_put(2.0)):  # the last one's type is weak
        assert float(jax.grad(product)(x, *args[1:])) == 15
    assert len(traces) == 2  # the function and its derivative by the first argument
    by_others = [float(x) for x in jax.grad(product, (1, 2))(*args)]
    assert by_others == [10, 6]
    assert len(traces) == 4  # one derivative by each of the other arguments


def test_large_batches_are_compiled_and_small_ones_are_not():
    @float64("up", one_by_one=True)
    def triple(a):
        return 3 * a

    with record_compilations("triple") as result:
        for size in (1, 1000, 2**20):
            np.testing.assert_array_equal(
                triple(np.arange(size, dtype=np.float32)), 3 * np.arange(size)
            )
    assert len(result) == 1


def subsampled_pld(sigma, kind="poisson"):
    if kind == "fixed":
        return pld.compose(pld.subsampled_gdp(2 / sigma, 0.01), 1000)
    adjacency = Adjacency.REPLACE if kind == "replace" else Adjacency.ADD_REMOVE
    step = pld.poisson_gaussian(sigma, 0.01, adjacency=adjacency)
    return pld.compose(step, 1000)


def epsilon_by_pld(sigma, kind="poisson"):
    return pld.epsilon(subsampled_pld(sigma, kind), 1e-5)


@pytest.mark.matrix  # outside `jax.jit` a search is some twenty small programs
def test_calibration_compiles_its_function_once():
    @jax.jit
    def epsilon_here(sigma):
        return gdp.epsilon(3 / sigma, 1e-5)

    with record_compilations("epsilon_here") as result:
        calibrate.solve(epsilon_here, 2.0)
        calibrate.solve(epsilon_here, 4)
    assert len(result) == 1


def count_operations(f, *args):
    """Number of operations given to XLA, which its time is about proportional to.

    Constants and broadcasts are left out: versions of JAX differ in how often they
    emit the same one, and XLA merges them.
    """
    names = re.findall(r' = "?stablehlo\.(\w+)', jax.jit(f).lower(*args).as_text())
    return sum(name not in ("constant", "broadcast_in_dim") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "replace", "fixed"])
def test_epsilon_lowers_to_a_small_program(kind):
    assert count_operations(lambda s: epsilon_by_pld(s, kind), 1.0) < 1600
    assert (
        count_operations(lambda s: pld.delta(subsampled_pld(s, kind), 1.0), 1.0) < 1600
    )


@pytest.mark.slow
def test_derivative_lowers_to_a_small_program():
    def epsilon(sigma, rate, steps):
        step = pld.poisson_gaussian(sigma, rate, adjacency=Adjacency.ADD_REMOVE)
        return pld.epsilon(pld.compose(step, steps), 1e-5)

    # The value, and its derivative by the noise multiplier alone. JAX 0.12 writes
    # 3,620 operations, a tenth more than JAX 0.10 does for the same functions.
    assert count_operations(jax.grad(epsilon), 1.0, 0.01, 1000.0) < 3700
    assert count_operations(lambda t: calibrate.solve(epsilon_by_pld, t), 2.0) < 3700


def epsilon_by_rdp(sigma):
    curve = rdp.poisson_gaussian(sigma, 0.01, rdp.ORDERS)
    return rdp.epsilon(rdp.compose(curve, count=1000), rdp.ORDERS, 1e-5)


FUNCTIONS = {
    "gdp": lambda sigma: gdp.epsilon(1 / sigma, 1e-5),
    "pld": epsilon_by_pld,
    "rdp": epsilon_by_rdp,
    "mu": lambda sigma: gdp.mu(sigma, 1e-5),
    "compose": lambda sigma: gdp.compose(jnp.stack([sigma, sigma])),
    "fdp": lambda sigma: fdp.tradeoff(lambda e: gdp.delta(1 / sigma, e), 0.3),
    "delta": lambda sigma: pld.delta(subsampled_pld(sigma), 1.0),
}


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "name",
    ["gdp", *(pytest.param(x, marks=pytest.mark.matrix) for x in [*FUNCTIONS][1:])],
)
def test_values_and_derivatives_agree_under_strict_promotion(name, x64):
    f = FUNCTIONS[name]
    sigma = jnp.float32(1.1)  # in float64 code too: NumPy rules would promote it
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        value, slope = jax.jit(jax.value_and_grad(f))(sigma)
    with jax.enable_x64(x64):
        expected = jax.jit(jax.value_and_grad(f))(sigma)
    np.testing.assert_allclose((value, slope), expected, rtol=1e-6)


@pytest.mark.diagonal("name")
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", ["pld", "rdp", "fdp"])
def test_accountants_trace_under_strict_promotion(name, x64):
    sigma = jax.ShapeDtypeStruct((), np.float32)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        value, slope = jax.eval_shape(jax.value_and_grad(FUNCTIONS[name]), sigma)
    assert value.dtype == (np.float64 if x64 else np.float32)
    assert slope.dtype == np.float32


class Pair(NamedTuple):
    base: float
    power: float


@float64("nearest", vectors=(1,), elementwise=True)
def weighted_power(pair, x):
    assert pair.base.shape == pair.power.shape == x.shape[1:] == ()
    return pair.base**pair.power * jnp.sum(x)


def test_elementwise_float64_function_takes_named_tuples_and_batches():
    base = np.array([[2.0], [3.0]], np.float32)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    expected = np.array([[4.0], [9.0]]) * np.array([1.0, 5.0, 9.0])
    np.testing.assert_allclose(weighted_power(Pair(base, 2), x), expected)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def summed_gradients(base, x):
        return jnp.sum(weighted_power(Pair(base, 2), x))

    by_base, by_x = summed_gradients(base, x)
    np.testing.assert_allclose(by_base, [[60.0], [90.0]])
    np.testing.assert_allclose(by_x, np.full((3, 2), 13.0))


def test_subnormal_float32_counts_as_zero_in_compiled_programs():
    for mu in (1e-45, 1e-40, 1.1e-38):
        delta = jax.jit(gdp.delta)(jnp.float32(mu), jnp.float32(0.5))
        assert delta == 0
    assert jax.jit(gdp.delta)(jnp.float32(1.2e-38), jnp.float32(0.5)) > 0
