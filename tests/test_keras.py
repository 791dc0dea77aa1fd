"""Models of Keras on JAX, as docs/howto/keras.md says to train them."""

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
def library():
    """Imported where it is used: that takes seconds."""
    global keras
    keras = pytest.importorskip("keras")


NUM_FEATURES = 24
RATE = 0.5
PLAN = {"num_examples": 40, "batch_size": 40, "num_steps": 3, "sampling": "fixed"}
PLAN |= {"adjacency": dpjax.Adjacency.REPLACE, "noise_multiplier": 1.0}
PLAN |= {"delta": 1e-5, "clip_norm": 1.0}


@pytest.fixture(autouse=True)
def rank_promotion():
    """As it is for users: layers of Keras rest on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def build(*layers):
    """A model of layers, whose last has one output."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((NUM_FEATURES,)), *layers])
    return model, [variable.value for variable in model.trainable_variables]


@pytest.fixture(scope="module")
def example():
    """The private example, whose way to make seeds is tested for other models."""
    path = pathlib.Path(__file__).parents[1] / "examples" / "digits_keras_private.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def state_with_seeds(example, monkeypatch):
    """The example's function, for any model."""

    def function(model, key):
        monkeypatch.setattr(example, "model", model)
        return example.state_with_seeds(key)

    return function


def test_dropout_masks_are_those_of_keys_of_examples_and_steps(state_with_seeds):
    """Each example and each layer has the mask that JAX draws for a key of its own."""
    scale = keras.layers.Dense(NUM_FEATURES, "linear", False, "identity")
    model, params = build(scale, keras.layers.Dropout(RATE), keras.layers.Dropout(RATE))
    plan = dpjax.plan(**PLAN)

    def loss(params, x, key):
        state = state_with_seeds(model, key)
        outputs, _ = model.stateless_call(params, state, x, training=True)
        return outputs.mean(), outputs

    gradient = jax.jit(plan.value_and_grad(loss, has_aux=True))
    ones = np.ones((40, NUM_FEATURES), np.float32)
    secret, kept = jax.random.key(7), []
    for step, batch in enumerate(plan.batches(ones, key=jax.random.key(1))):
        of_step = jax.random.fold_in(secret, step)
        (_, outputs), _ = gradient(params, batch, of_step)
        kept.append(np.asarray(outputs) != 0)

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

        np.testing.assert_array_equal(kept[-1], expected(np.arange(40)))
    # No two of the 120 masks are the same. A quarter of 24 numbers stay: two masks are
    # the same with probability (10 / 16) ** 24, any two of 120 in 0.09 of all keys, and
    # the keys are fixed.
    assert len(np.unique(np.concatenate(kept), axis=0)) == 120
    assert abs(np.mean(kept) - (1 - RATE) ** 2) < 0.05  # 6 standard deviations


def test_the_state_that_keras_carries_gives_all_examples_one_mask():
    """That is why the page draws seeds from keys."""
    model, params = build(keras.layers.Dropout(RATE), keras.layers.Dense(1))
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


def test_batch_normalization_sees_one_example_and_does_not_change_the_model(
    state_with_seeds,
):
    model, params = build(
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

    def outputs_and_state(x):
        batch = next(plan.batches(x, key=jax.random.key(1)))
        (_, (outputs, state)), _ = gradient(params, batch, jax.random.key(2))
        return np.asarray(outputs), [np.asarray(one) for one in state]

    # Nothing before the normalization, and not its scale, can be trained.
    with pytest.warns(UserWarning, match=r"'\[0\]', '\[1\]', '\[2\]'.*batch of one"):
        outputs, state = outputs_and_state(x)
    # A batch of one has no variance: the layer gives its bias, whatever the example.
    assert np.ptp(outputs) < 1e-5
    # The averages that come back are those of single examples: one a row.
    dense = x @ np.asarray(params[0]) + np.asarray(params[1])
    np.testing.assert_allclose(state[0], 0.01 * dense, rtol=1e-4, atol=1e-6)
    # Another first example leaves the others as they were.
    _, other = outputs_and_state(np.concatenate([x[:1] + 9, x[1:]]))
    for one, two in zip(state, other, strict=True):
        np.testing.assert_array_equal(one[1:], two[1:])
    assert (state[0][0] != other[0][0]).all()
    after = [np.asarray(variable.value) for variable in model.non_trainable_variables]
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)


def test_frozen_batch_normalization_uses_its_averages(state_with_seeds):
    layer = keras.layers.BatchNormalization()
    model, _ = build(layer, keras.layers.Dense(1))
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
