"""Properties that every accountant has; the table is in `conformance`."""

import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ACCOUNTANTS, ELSEWHERE

from dpjax import accounting

WINGS = (
    "allocation",
    "calibrate",
    "correlated",
    "fdp",
    "gdp",
    "iteration",
    "pld",
    "pure",
    "random_rounds",
)
WINGS += ("objective", "rdp", "tree", "truncation")


def test_every_public_accountant_is_in_the_table():
    result = set()
    for wing in WINGS:
        module = importlib.import_module(f"dpjax.accounting.{wing}")
        result |= {
            f"{wing}.{name}"
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__name__ == name  # no deprecated alias
            and not name.startswith("_")
            and value.__module__.startswith(module.__name__)
        }
    assert result == set(ACCOUNTANTS) | ELSEWHERE["dpjax.accounting"]
    public = {m.name for m in pkgutil.iter_modules(accounting.__path__)}
    interpreted = {"events", "profiles"}  # records, which accountants interpret
    # A search outside of jit, and states of a run: in test_group and test_individual.
    interpreted |= {"group", "individual"}
    # Functions of events and profiles: in test_selection and test_budget.
    interpreted |= {"selection", "composition"}
    assert {*WINGS} | interpreted == {x for x in public if not x.startswith("_")}


# These search for their value: as functions of a parameter they have jumps of 1e-5.
SEARCHED = (
    "allocation.",
    "correlated.epsilon",
    "pld.",
    "random_rounds.",
    "truncation.poisson",
    "iteration.noisy_sgd",
)
# Slow to compile, or compiling many operations outside `jax.jit`. These are evaluated
# less often: the code that converts numbers of each kind is shared by all accountants.
HEAVY = {
    "allocation.delta",
    "allocation.epsilon",
    "calibrate.solve",
    "correlated.epsilon",
    "iteration.noisy_sgd_epsilon",
    "iteration.optimal_shift_mu",
    "iteration.random_assignment_epsilon",
    "iteration.scheduled_cyclic_gd_mu",
    "pld.compose",
    "pld.convolve",
    "pld.delta",
    "pld.discrete_gaussian",
    "pld.discrete_laplace",
    "pld.epsilon",
    "pld.epsilon_delta",
    "pld.gaussian_mixture",
    "pld.laplace",
    "pld.poisson_gaussian",
    "pld.pure",
    "pld.randomized_response",
    "pld.subsampled_gdp",
    "random_rounds.delta",
    "rdp.best_order",
    "truncation.poisson_gaussian",
}
# NumPy needs a second or more for each of the values at neighbouring numbers.
COMPILED = {
    "iteration.noisy_sgd_epsilon",
    "random_rounds.delta",
    "truncation.poisson_gaussian",
}
BY_NAME = pytest.mark.parametrize(
    ("wing", "name"),
    [
        pytest.param(
            name.split(".")[0],
            name,
            marks=[pytest.mark.slow] if name in HEAVY else [],
            id=name,
        )
        for name in ACCOUNTANTS
    ],
)


@functools.cache  # the tests of one accountant share its values
def value_in_float64(name, x):
    """The value in float64, computed once for each x."""
    with jax.enable_x64(True):
        return np.asarray(ACCOUNTANTS[name][0](jax.device_put(np.float64(x))))


@functools.cache
def value_in_float32(name, x):
    """The value under strict promotion and otherwise by default, at x in float32."""
    return np.asarray(under_strict_promotion(ACCOUNTANTS[name][0])(as_float32(x)))


def as_float32(x):
    return jax.device_put(np.float32(x))


def under_strict_promotion(fn):
    def strict_call(x):
        with jax.numpy_dtype_promotion("strict"):
            return fn(x)

    return strict_call


@BY_NAME
def test_values_are_the_rounded_values_in_float64(wing, name):
    fn, x = ACCOUNTANTS[name]
    x = float(np.float32(x))
    value = value_in_float64(name, x)
    assert value.dtype == np.float64
    assert np.isfinite(value).all()
    if name not in HEAVY:
        with jax.enable_x64(True):
            for number in (x, np.float64(x)):
                np.testing.assert_array_equal(np.asarray(fn(number)), value)
    assert_rounded(value_in_float32(name, x), value, wing)
    # The dtypes of other calls, by shapes alone.
    for call, number in (
        (under_strict_promotion(fn), as_float32(x)),
        (fn, float(x)),
    ):
        assert jax.eval_shape(call, number).dtype == np.float32


def assert_rounded(found, value, wing):
    """One rounding to float32, in the direction of more privacy loss: two at most.

    (A sum of five numbers that float32 holds adds 24 for itself.)
    """
    assert found.dtype == np.float32
    rtol = 2.0**-18 if wing == "random_rounds" else 2.0**-22
    np.testing.assert_allclose(np.asarray(found), value, rtol=rtol, atol=0)


@pytest.mark.diagonal
@BY_NAME
def test_values_do_not_depend_on_the_call(wing, name):
    fn, x = ACCOUNTANTS[name]
    x = float(np.float32(x))
    value = value_in_float64(name, x)
    assert_rounded(jax.jit(fn)(as_float32(x)), value, wing)
    if name not in HEAVY:
        assert_rounded(fn(as_float32(x)), value, wing)
    assert_rounded(fn(x), value, wing)


@pytest.mark.diagonal
@BY_NAME
def test_batches_and_derivatives_match_single_values_and_differences(
    wing, name, request
):
    if name in COMPILED:
        request.getfixturevalue("compiled")
    fn, x = ACCOUNTANTS[name]
    searched = name.startswith(SEARCHED)
    xs = np.asarray([0.9 * x, x], np.float32)

    @jax.jit
    @jax.vmap
    def value_and_slope(x):
        return jax.jvp(fn, (x,), (jnp.ones_like(x),))

    values, slopes = jax.device_get(under_strict_promotion(value_and_slope)(xs))
    assert values.dtype == slopes.dtype == np.float32
    for result, slope, each in zip(values, slopes, xs, strict=True):
        at, step = float(each), (1e-2 if searched else 1e-4) * float(each)
        np.testing.assert_allclose(result, value_in_float32(name, at), rtol=2.0**-22)
        low, high = (value_in_float64(name, at + s) for s in (-step, step))
        difference = (high - low) / (2 * step)
        scale = np.abs(low + high) / (2 * at) + np.abs(difference)
        # The third derivative over the second scale is at most about a hundred here,
        # and values are exact to 1e-9 or so: (1e-4)² 100 + 1e-9 / 1e-4, or
        # (1e-2)² 100 + 1e-3.
        limit = 1.1e-2 if searched else 2e-5
        assert np.all(np.abs(slope - difference) <= limit * scale)
