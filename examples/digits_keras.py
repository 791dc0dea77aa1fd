"""Train on handwritten digits with Keras on JAX.

digits_keras.py trains without privacy. digits_keras_private.py is the same program
with differential privacy.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)


def state_with_seeds(key):
    """The model's non-trainable variables, with dropout seeds derived from a key."""
    return [
        jax.random.key_data(jax.random.fold_in(key, i))
        if variable.name == "seed_generator_state"
        else variable.value
        for i, variable in enumerate(model.non_trainable_variables)
    ]


def loss_fn(params, batch, key):
    x, y = batch
    logits, _ = model.stateless_call(params, state_with_seeds(key), x, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    key = jax.random.key(1)
    params = [variable.value for variable in model.trainable_variables]
    optimizer = optax.adam(5e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, key, batch):
        key, dropout_key = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, dropout_key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = rng.choice(len(y), batch_size, replace=False)
        batch = x[rows], y[rows]
        params, opt_state, key, _ = train_step(params, opt_state, key, batch)

    for variable, value in zip(model.trainable_variables, params, strict=True):
        variable.assign(value)
    accuracy = np.mean(model.predict(x_test, verbose=0).argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    return [variable.value for variable in model.trainable_variables]


if __name__ == "__main__":
    main()
