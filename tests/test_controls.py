"""Tests of noise, run against deliberately broken noise: they must fail.

A test that passes for any noise shows nothing. Each line here patches one defect into
the library and names a test that must detect it. The default suite has one test for
each defect.
"""

import jax
import jax.numpy as jnp
import pytest
import test_keys
import test_noise
import test_plan
import test_plan_schedules
import test_random_rounds
import test_reduced_momentum

from dpjax._core import keys
from dpjax._plan import parameters
from dpjax.noise import _gaussian as noise
from dpjax.solvers import _random_round_sgd


def halve_noise(monkeypatch):
    whole = noise.normal_like
    monkeypatch.setattr(
        noise, "normal_like", lambda *args: whole(*args) * jnp.float32(0.5)
    )


def square_noise_scale(monkeypatch):
    """Square the noise multiplier, a bug of another library, invisible at 1."""
    whole = noise.round_up_float32
    monkeypatch.setattr(
        noise,
        "round_up_float32",
        lambda name, *factors: whole(name, *factors, *factors),
    )


def share_key_among_leaves(monkeypatch):
    monkeypatch.setattr(
        keys, "leaf_keys", lambda key, tree: [key] * len(jax.tree.leaves(tree))
    )


def repeat_noise_each_step(monkeypatch):
    monkeypatch.setattr(jax.random, "split", lambda key, num=2: (key,) * num)


def omit_noise_cost_of_count(monkeypatch):
    """Leave the gradients' noise as if the count had no privacy cost."""
    monkeypatch.setattr(parameters, "noise_of", lambda clip, sigma, size: (sigma, 1.0))


def add_noise_after_cast(monkeypatch):
    """Cast down before the noise is added, instead of after."""
    monkeypatch.setattr(noise, "widen", lambda tree: tree)
    monkeypatch.setattr(noise, "at_least_float32", lambda dtype: dtype)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (halve_noise, lambda: test_noise.test_gaussian_noise_has_the_stated_scale(25)),
        pytest.param(
            halve_noise,
            lambda: test_noise.test_tree_noise_has_the_stated_variance_at_every_step(
                stddev=12.0, decay=0.6
            ),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            halve_noise,
            test_noise.test_tree_noise_has_the_stated_variance_over_1025_steps,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            halve_noise,
            test_plan.test_update_noise_has_the_accounted_scale,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            halve_noise,
            test_plan_schedules.test_smooth_noise_schedule_is_rounded_up_to_levels,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            halve_noise,
            test_reduced_momentum.test_noise_has_stated_variance_and_differs_by_node,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            square_noise_scale,
            lambda: test_noise.test_gaussian_noise_has_the_stated_scale(0.3),
            marks=pytest.mark.matrix,
        ),
        (square_noise_scale, test_plan.test_update_noise_has_the_accounted_scale),
        (share_key_among_leaves, test_noise.test_equal_leaves_get_uncorrelated_noise),
        pytest.param(
            share_key_among_leaves,
            lambda: test_keys.test_masked_transformations_share_no_noise("masked"),
            marks=pytest.mark.matrix,
        ),
        (
            repeat_noise_each_step,
            test_plan.test_update_noise_has_the_accounted_scale,
        ),
        pytest.param(
            repeat_noise_each_step,
            test_plan_schedules.test_smooth_noise_schedule_is_rounded_up_to_levels,
            marks=pytest.mark.matrix,
        ),
        (
            omit_noise_cost_of_count,
            lambda: (
                test_plan_schedules
                .test_gradient_and_count_noise_compose_to_the_plan_noise(30.0)
            ),
        ),
        (
            add_noise_after_cast,
            test_noise.test_noise_is_added_before_casting_down,
        ),
    ],
)  # fmt: skip
def test_noise_test_fails_on_broken_noise(broken, test, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test()


@pytest.mark.slow
def test_noise_test_of_random_rounds_fails_on_halved_noise(
    monkeypatch, request, compiled
):
    """The calibration of this run evaluates its accountant often (see `compiled`)."""
    halve_noise(monkeypatch)
    # A program that an earlier test compiled has the whole noise, and a program that
    # this test compiles has half of it.
    _random_round_sgd._train.clear_cache()
    request.addfinalizer(_random_round_sgd._train.clear_cache)
    with pytest.raises(AssertionError):
        test_random_rounds.test_run_noise_has_the_scale_of_the_guarantee(compiled)
