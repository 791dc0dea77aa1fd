"""Keras models on JAX, trained as docs/howto/keras.md describes."""

import importlib.util
import os
import pathlib

import jax
import numpy as np
import pytest

import dpjax

pytestmark = pytest.mark.whole

os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported


@pytest.fixture(scope="module", autouse=True)
def _import_keras():
    """Import Keras only for these tests: it takes seconds."""
    global keras
    keras = pytest.importorskip("keras")


NUM_FEATURES = 24
RATE = 0.5
PLAN = {"num_examples": 40, "batch_size": 40, "num_steps": 3, "sampling": "fixed"}
PLAN |= {"adjacency": dpjax.Adjacency.REPLACE, "noise_multiplier": 1.0}
PLAN |= {"delta": 1e-5, "clip_norm": 1.0}


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
    """JAX's default, on which layers of Keras rely."""
    with jax.numpy_rank_promotion("allow"):
        yield


def build_model(*layers):
    """A sequential model of these layers, and its trainable values."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((NUM_FEATURES,)), *layers])
    return model, [variable.value for variable in model.trainable_variables]


@pytest.fixture(scope="module")
def private_example():
    """The private example, whose function for seeds is tested with other models."""
    path = pathlib.Path(__file__).parents[1] / "examples" / "digits_keras_private.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def state_with_seeds(private_example, monkeypatch):
    """The example's `state_with_seeds`, for any model."""

    def function(model, key):
        monkeypatch.setattr(private_example, "model", model)
        return private_example.state_with_seeds(key)

    return function


def test_dropout_masks_differ_by_example_layer_and_step(state_with_seeds):
    """Each example and layer has the mask that JAX draws for its own key."""
    scale = keras.layers.Dense(NUM_FEATURES, "linear", False, "identity")
    model, params = build_model(
        scale, keras.layers.Dropout(RATE), keras.layers.Dropout(RATE)
    )
    plan = dpjax.plan(**PLAN)

    def loss(params, x, key):
        state = state_with_seeds(model, key)
        outputs, _ = model.stateless_call(params, state, x, training=True)
        return outputs.mean(), outputs

    gradient = jax.jit(plan.value_and_grad(loss, has_aux=True))
    ones = np.ones((40, NUM_FEATURES), np.float32)
    secret, retained = jax.random.key(7), []
    for step, batch in enumerate(plan.batches(ones, key=jax.random.key(1))):
        of_step = jax.random.fold_in(secret, step)
        (_, outputs), _ = gradient(params, batch, of_step)
        retained.append(np.asarray(outputs) != 0)

        @jax.jit
        @jax.vmap
        def expected(number, of_step=of_step):
            of_example = jax.random.fold_in(of_step, number)
            masks = [
                jax.random.bernoulli(
                    jax.random.fold_in(of_example, layer), 1 - RATE, (1, NUM_FEATURES)
                )[0]
                for layer in range(2)
            ]
            return masks[0] & masks[1]

        np.testing.assert_array_equal(retained[-1], expected(np.arange(40)))
    # All 120 masks differ. A quarter of 24 numbers are kept: two masks are equal with
    # probability (10 / 16) ** 24, any two of 120 for 9 % of all keys, and the keys are
    # fixed.
    assert len(np.unique(np.concatenate(retained), axis=0)) == 120
    assert abs(np.mean(retained) - (1 - RATE) ** 2) < 0.05  # 6 standard deviations


def test_carried_keras_state_gives_all_examples_the_same_mask():
    """This is why the page draws seeds from keys."""
    model, params = build_model(keras.layers.Dropout(RATE), keras.layers.Dense(1))
    state = [variable.value for variable in model.non_trainable_variables]
    plan = dpjax.plan(**PLAN)

    def loss(params, x, state):
        outputs, state = model.stateless_call(params, state, x, training=True)
        return outputs.mean(), (outputs, state)

    ones = np.ones((40, NUM_FEATURES), np.float32)
    batch = next(plan.batches(ones, key=jax.random.key(1)))
    gradient = jax.jit(plan.value_and_grad(loss, has_aux=True))
    (_, (outputs, (seeds,))), _ = gradient(params, batch, state)
    assert np.ptp(outputs) < 1e-5
    assert seeds.shape == (40, 2)
    assert (seeds == seeds[0]).all()


def test_batch_normalization_uses_single_examples_and_keeps_the_model(
    state_with_seeds,
):
    model, params = build_model(
        keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    )
    before = [np.asarray(variable.value) for variable in model.non_trainable_variables]
    plan = dpjax.plan(**PLAN)

    def loss(params, x, key):
        state = state_with_seeds(model, key)
        outputs, state = model.stateless_call(params, state, x, training=True)
        return outputs.mean(), (outputs, state)

    x = np.random.default_rng(0).normal(size=(40, NUM_FEATURES)).astype(np.float32)
    gradient = jax.jit(plan.value_and_grad(loss, has_aux=True))

    def run_on(x):
        batch = next(plan.batches(x, key=jax.random.key(1)))
        (_, (outputs, state)), _ = gradient(params, batch, jax.random.key(2))
        return np.asarray(outputs), [np.asarray(one) for one in state]

    # Nothing before the normalization, and not its scale, can be trained.
    with pytest.warns(UserWarning, match=r"'\[0\]', '\[1\]', '\[2\]'.*batch of one"):
        outputs, state = run_on(x)
    # A batch of one has no variance: the layer returns its bias for every example.
    assert np.ptp(outputs) < 1e-5
    # The averages that come back are those of single examples: one a row.
    dense = x @ np.asarray(params[0]) + np.asarray(params[1])
    np.testing.assert_allclose(state[0], 0.01 * dense, rtol=1e-4, atol=1e-6)
    # Changing the first example does not change the rows of the others.
    _, other = run_on(np.concatenate([x[:1] + 9, x[1:]]))
    for one, two in zip(state, other, strict=True):
        np.testing.assert_array_equal(one[1:], two[1:])
    assert (state[0][0] != other[0][0]).all()
    after = [np.asarray(variable.value) for variable in model.non_trainable_variables]
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)


def test_frozen_batch_normalization_uses_its_averages(state_with_seeds):
    layer = keras.layers.BatchNormalization()
    model, _ = build_model(layer, keras.layers.Dense(1))
    layer.moving_mean.assign(np.full(NUM_FEATURES, 3.0))
    layer.trainable = False
    params = [variable.value for variable in model.trainable_variables]
    assert len(params) == 2  # those of the dense layer
    plan = dpjax.plan(**PLAN)

    def loss(params, x, key):
        state = state_with_seeds(model, key)
        outputs, state = model.stateless_call(params, state, x, training=True)
        return outputs.mean(), (outputs, state)

    x = np.random.default_rng(0).normal(size=(40, NUM_FEATURES)).astype(np.float32)
    batch = next(plan.batches(x, key=jax.random.key(1)))
    gradient = jax.jit(plan.value_and_grad(loss, has_aux=True))
    (_, (outputs, state)), _ = gradient(params, batch, jax.random.key(2))
    normalised = (x - 3) / np.sqrt(1 + layer.epsilon)
    expected = normalised @ np.asarray(params[0]) + np.asarray(params[1])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    for one, variable in zip(state, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(one, np.broadcast_to(variable.value, one.shape))
