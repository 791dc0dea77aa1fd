"""Tests of noise, run against noise that is broken: they must fail.

A test that passes whatever the noise does shows nothing. Each line here breaks one
thing from outside, and names a test that is there to find it. The default suite has one
test for each way of breaking.
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

from dpjax._plan import quantile
from dpjax.noise import _gaussian as noise


def half_as_much(monkeypatch):
    whole = noise.normal_like
    monkeypatch.setattr(
        noise, "normal_like", lambda *args: whole(*args) * jnp.float32(0.5)
    )


def squared(monkeypatch):
    """Right where it is 1, as a peer had it."""
    whole = noise.round_up_float32
    monkeypatch.setattr(
        noise,
        "round_up_float32",
        lambda name, *factors: whole(name, *factors, *factors),
    )


def one_key_for_all_leaves(monkeypatch):
    monkeypatch.setattr(
        noise, "leaf_keys", lambda key, tree: [key] * len(jax.tree.leaves(tree))
    )


def the_same_in_every_step(monkeypatch):
    monkeypatch.setattr(jax.random, "split", lambda key, num=2: (key,) * num)


def none_for_the_count(monkeypatch):
    """The gradients' noise is as if it cost nothing to count."""
    monkeypatch.setattr(quantile, "noise_of", lambda clip, sigma, size: (sigma, 1.0))


def added_in_the_dtype_of_the_sum(monkeypatch):
    """A cast down before the noise is added, and not after."""
    monkeypatch.setattr(noise, "widen", lambda tree: tree)
    monkeypatch.setattr(noise, "at_least_float32", lambda dtype: dtype)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (half_as_much, lambda: test_noise.test_gaussian_noise_has_the_stated_scale(25)),
        pytest.param(
            half_as_much,
            lambda: test_noise.test_tree_noise_has_the_stated_variance_at_every_step(
                stddev=12.0, decay=0.6
            ),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            half_as_much,
            test_noise.test_tree_noise_variance_over_a_thousand_steps,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            half_as_much,
            test_plan.test_the_noise_of_an_update_is_what_was_accounted_for,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            half_as_much,
            test_plan_schedules.test_smooth_schedules_are_rounded_up_to_levels_which_run,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            half_as_much,
            test_random_rounds.test_the_noise_of_a_run_is_what_the_guarantee_rests_on,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            half_as_much,
            test_reduced_momentum.test_the_noise_has_the_stated_variance_and_every_node_its_own,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            squared,
            lambda: test_noise.test_gaussian_noise_has_the_stated_scale(0.3),
            marks=pytest.mark.matrix,
        ),
        (squared, test_plan.test_the_noise_of_an_update_is_what_was_accounted_for),
        (one_key_for_all_leaves, test_noise.test_equal_leaves_get_unequal_noise),
        pytest.param(
            one_key_for_all_leaves,
            lambda: test_keys.test_parts_of_a_tree_share_no_noise("masked"),
            marks=pytest.mark.matrix,
        ),
        (
            the_same_in_every_step,
            test_plan.test_the_noise_of_an_update_is_what_was_accounted_for,
        ),
        pytest.param(
            the_same_in_every_step,
            test_plan_schedules.test_smooth_schedules_are_rounded_up_to_levels_which_run,
            marks=pytest.mark.matrix,
        ),
        (
            none_for_the_count,
            lambda: (
                test_plan_schedules
                .test_gradients_and_count_are_one_mechanism_of_the_plans_noise(30.0)
            ),
        ),
        (
            added_in_the_dtype_of_the_sum,
            test_noise.test_noise_is_added_before_casting_down,
        ),
    ],
)  # fmt: skip
def test_a_test_finds_what_it_is_for(broken, test, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test()
