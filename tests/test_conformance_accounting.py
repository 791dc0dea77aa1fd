"""What every accountant promises; the table is in `conformance`."""

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
WINGS += ("rdp", "tree", "truncation")


def test_every_public_accountant_is_in_the_table():
    found = set()
    for wing in WINGS:
        module = importlib.import_module(f"dpjax.accounting.{wing}")
        found |= {
            f"{wing}.{name}"
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__name__ == name  # else a former one
            and not name.startswith("_")
            and value.__module__.startswith(module.__name__)
        }
    assert found == set(ACCOUNTANTS) | ELSEWHERE["dpjax.accounting"]
    public = {m.name for m in pkgutil.iter_modules(accounting.__path__)}
    interpreted = {"events", "profiles"}  # records, which accountants interpret
    assert {*WINGS} | interpreted == {x for x in public if not x.startswith("_")}


# Found by a search: as a function of a parameter these have jumps of 1e-5.
SEARCHED = (
    "allocation.",
    "correlated.epsilon",
    "pld.",
    "random_rounds.",
    "truncation.poisson",
    "iteration.noisy_sgd",
)
# They compile for long. The others of a wing stay with the quick tests.
HEAVY = {
    "allocation.delta",
    "correlated.epsilon",
    "iteration.noisy_sgd_epsilon",
    "iteration.optimal_shift_mu",
    "iteration.random_assignment_epsilon",
    "iteration.scheduled_cyclic_gd_mu",
    "pld.compose",
    "pld.convolve",
    "pld.delta",
    "pld.poisson_gaussian",
    "pld.subsampled_gdp",
    "random_rounds.delta",
    "truncation.poisson_gaussian",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else [])
        for name in ACCOUNTANTS
    ],
)
def accountant(request):
    """A function of one number, where, its value there and its slope."""
    fn, x = ACCOUNTANTS[request.param]
    with jax.enable_x64(True):
        value = np.asarray(fn(x))
        slope = np.asarray(jax.jvp(fn, (jnp.asarray(x),), (jnp.ones(()),))[1])
    return request.param, fn, x, value, slope


def test_results_do_not_depend_on_the_configuration(accountant):
    name, fn, x, value, _ = accountant
    assert value.dtype == np.float64
    assert np.isfinite(value).all()
    # One rounding to float32, in the direction of more privacy loss: two at most apart.
    # (A sum of five numbers that float32 holds adds 24 for itself.)
    near = {"rtol": 2.0**-18 if "random_rounds" in name else 2.0**-22, "atol": 0}
    single = fn(x)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, value, **near)
    np.testing.assert_array_equal(np.asarray(fn(np.float64(x))), single)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(np.asarray(fn(jnp.asarray(x))), value)
    # From here on x is a float32, and the function's value there.
    x32 = jnp.asarray(x, jnp.float32)
    eager = np.asarray(fn(x32))
    np.testing.assert_allclose(np.asarray(jax.jit(fn)(x32)), eager, **near)
    np.testing.assert_allclose(np.asarray(jax.jit(fn)(float(x32))), eager, **near)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(np.asarray(fn(x32)), eager, **near)


def test_slopes_are_those_of_the_values(accountant):
    name, fn, x, value, slope = accountant
    searched = name.startswith(SEARCHED)
    step = (1e-2 if searched else 1e-4) * x
    with jax.enable_x64(True):
        difference = (np.asarray(fn(x + step)) - np.asarray(fn(x - step))) / (2 * step)
    scale = np.abs(value) / x + np.abs(difference)
    # The third derivative over the second scale is at most about a hundred here, and
    # values are exact to 1e-9 or so: (1e-4)² 100 + 1e-9 / 1e-4, or (1e-2)² 100 + 1e-3.
    limit = 1.1e-2 if searched else 2e-5
    assert np.all(np.abs(slope - difference) <= limit * scale)
    with jax.numpy_dtype_promotion("strict"):
        single = jax.jvp(fn, (jnp.asarray(x, jnp.float32),), (jnp.ones(()),))[1]
    np.testing.assert_allclose(np.asarray(single), slope, rtol=1e-3, atol=1e-30)


def test_batches_are_element_by_element(accountant):
    name, fn, x, _, _ = accountant
    xs = jnp.asarray([0.9 * x, x], jnp.float32)
    got = np.asarray(jax.jit(jax.vmap(fn))(xs))
    for one, each in zip(got, xs, strict=True):
        np.testing.assert_allclose(
            one, np.asarray(fn(each)), rtol=2.0**-22, err_msg=name
        )
