"""The numbers of a recipe against what its rules promise."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency
from dpjax.accounting import gdp
from dpjax.accounting.events import Gaussian

SIZES = {"num_examples": 2000, "num_features": 90}


@pytest.mark.parametrize("adjacency", [Adjacency.REPLACE, Adjacency.ZERO_OUT])
def test_noise_of_a_logit_is_as_stated(adjacency):
    result = dpjax.recipe(2.0, 1e-6, **SIZES, adjacency=adjacency)
    rest = float(gdp.mu(2.0, 1e-6)) * math.sqrt(1 - result.mean_share)
    # The noise of each step's mean gradient, by composition of T Gaussian mechanisms.
    factor = {Adjacency.REPLACE: 2, Adjacency.ZERO_OUT: 1}[adjacency]
    stddev = factor * result.clip_norm * math.sqrt(result.num_steps) / rest / 2000
    optimizer = result.optimizer()

    def end(noise):
        """The weight after steps whose gradients are noise alone."""

        def step(carry, gradient):
            weight, state = carry
            update, state = optimizer.update(gradient, state)
            return (weight + update, state), None

        weight = jnp.zeros(())
        return jax.lax.scan(step, (weight, optimizer.init(weight)), noise)[0][0]

    weights = jax.jit(jax.grad(end))(jnp.zeros(result.num_steps))
    # A sum over T steps in place of the integral: (T + 1) (2 T + 1) / (2 T²).
    np.testing.assert_allclose(
        stddev * np.linalg.norm(weights), 2 / math.sqrt(3), rtol=0.02
    )


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_mean_and_plan_take_the_whole_budget_and_no_more(epsilon):
    result = dpjax.recipe(epsilon, 1e-5, **SIZES, adjacency=Adjacency.REPLACE)
    account = dpjax.budget(epsilon, 1e-5, adjacency=Adjacency.REPLACE, slack=0)
    if result.mean_share:
        account = account.draw(Gaussian(2 / result.mean_noise_multiplier))
        spent = 1 - account.left.mu**2 / float(gdp.mu(epsilon, 1e-5)) ** 2
        np.testing.assert_allclose(spent, result.mean_share, rtol=1e-5)
    run = account.plan(
        num_examples=2000,
        batch_size=result.batch_size,
        num_steps=result.num_steps,
        clip_norm=result.clip_norm,
        sampling="fixed",
    )
    account = account.draw(run)
    assert account.epsilon_if_fixed <= epsilon
    assert account.epsilon_if_fixed > 0.99 * epsilon


def test_mean_is_left_out_where_its_noise_is_long():
    many = dpjax.recipe(1.0, 1e-5, **SIZES, adjacency=Adjacency.REPLACE)
    few = dpjax.recipe(
        1.0, 1e-5, num_examples=200, num_features=90, adjacency=Adjacency.REPLACE
    )
    assert many.mean_noise_multiplier * math.sqrt(90) / 2000 <= 0.5
    assert few.mean_share == 0
    assert few.mean_noise_multiplier == math.inf


def test_each_number_has_a_reason():
    result = dpjax.recipe(1.0, 1e-5, **SIZES, adjacency=Adjacency.REPLACE)
    names = {x.name for x in dataclasses.fields(result)} - {"reasons"}
    assert set(result.reasons) == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_steps = 3


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"num_examples": 0}, "num_examples"),
        ({"num_features": 1.5}, "num_features"),
        ({"adjacency": Adjacency.ADD_REMOVE}, "ADD_REMOVE"),
    ],
)
def test_invalid_argument_raises(changed, name):
    usual = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.REPLACE}
    with pytest.raises(ValueError, match=name):
        dpjax.recipe(**(usual | SIZES | changed))
