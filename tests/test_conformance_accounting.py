"""Properties that every accountant has; the table is in `conformance`."""

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
    found = set()
    for wing in WINGS:
        module = importlib.import_module(f"dpjax.accounting.{wing}")
        found |= {
            f"{wing}.{name}"
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__name__ == name  # no deprecated alias
            and not name.startswith("_")
            and value.__module__.startswith(module.__name__)
        }
    assert found == set(ACCOUNTANTS) | ELSEWHERE["dpjax.accounting"]
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
# Slow to compile, or compiling many operations outside `jax.jit`.
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


def value_in_float64(fn, x):
    """The value in float64."""
    with jax.enable_x64(True):
        return np.asarray(fn(float(x)))


def as_float32(x):
    return jax.device_put(np.float32(x))


def under_strict_promotion(fn):
    def strict_call(x):
        with jax.numpy_dtype_promotion("strict"):
            return fn(x)

    return strict_call


# Ways to call an accountant, and the type of the number that it is given.
WAYS = {
    "of a number": (lambda fn: fn, float),
    "of an array": (lambda fn: fn, as_float32),
    "compiled": (jax.jit, as_float32),
    "compiled of a number": (jax.jit, float),
    "strict": (under_strict_promotion, as_float32),
}


@pytest.mark.diagonal("name")
@BY_NAME
@pytest.mark.parametrize("way", WAYS)
def test_values_do_not_depend_on_the_configuration(wing, name, way):
    fn, x = ACCOUNTANTS[name]
    transform, number = WAYS[way]
    x = np.float32(x)
    value = value_in_float64(fn, x)
    assert value.dtype == np.float64
    assert np.isfinite(value).all()
    with jax.enable_x64(True):
        for wide in (np.float64(x), jax.device_put(np.float64(x))):
            np.testing.assert_array_equal(np.asarray(fn(wide)), value)
    found = transform(fn)(number(x))
    assert found.dtype == np.float32
    # One rounding to float32, in the direction of more privacy loss: two at most apart.
    # (A sum of five numbers that float32 holds adds 24 for itself.)
    rtol = 2.0**-18 if wing == "random_rounds" else 2.0**-22
    np.testing.assert_allclose(np.asarray(found), value, rtol=rtol, atol=0)
    # The dtype under strict promotion, by shapes alone.
    assert jax.eval_shape(under_strict_promotion(fn), as_float32(x)).dtype == np.float32


@pytest.mark.diagonal
@BY_NAME
def test_derivatives_match_finite_differences(wing, name):
    fn, x = ACCOUNTANTS[name]
    value, searched = value_in_float64(fn, x), name.startswith(SEARCHED)

    @jax.jit
    def slope_at(x):
        return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]

    with jax.enable_x64(True):
        slope = np.asarray(slope_at(np.float64(x)))
    step = (1e-2 if searched else 1e-4) * x
    difference = (value_in_float64(fn, x + step) - value_in_float64(fn, x - step)) / (
        2 * step
    )
    scale = np.abs(value) / x + np.abs(difference)
    # The third derivative over the second scale is at most about a hundred here, and
    # values are exact to 1e-9 or so: (1e-4)² 100 + 1e-9 / 1e-4, or (1e-2)² 100 + 1e-3.
    limit = 1.1e-2 if searched else 2e-5
    assert np.all(np.abs(slope - difference) <= limit * scale)
    found = under_strict_promotion(slope_at)(as_float32(x))
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.asarray(found), slope, rtol=1e-3, atol=1e-30)


@pytest.mark.diagonal
@BY_NAME
def test_vmapped_values_equal_single_values(wing, name):
    fn, x = ACCOUNTANTS[name]
    xs = np.asarray([0.9 * x, x], np.float32)
    got = np.asarray(jax.jit(jax.vmap(fn))(xs))
    for one, each in zip(got, xs, strict=True):
        alone = np.asarray(fn(as_float32(each)))
        np.testing.assert_allclose(one, alone, rtol=2.0**-22)
