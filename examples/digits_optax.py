"""Train on handwritten digits with optax alone.

digits_optax.py trains without privacy. digits_optax_private.py is the same program
with differential privacy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def init_layer(key, fan_in, fan_out):
    weights = jax.random.normal(key, (fan_in, fan_out)) / np.sqrt(fan_in)
    return {"weights": weights, "biases": jnp.zeros(fan_out)}


def init_params(key):
    first, last = jax.random.split(key)
    return {"first": init_layer(first, 64, 64), "last": init_layer(last, 64, 10)}


def predict(params, x):
    first, last = params["first"], params["last"]
    hidden = jnp.tanh(x @ first["weights"] + first["biases"])
    return hidden @ last["weights"] + last["biases"]


def loss_fn(params, batch):
    x, y = batch
    logits = predict(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    params = init_params(jax.random.key(0))
    optimizer = optax.adam(5e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = rng.choice(len(y), batch_size, replace=False)
        batch = x[rows], y[rows]
        params, opt_state, _ = step(params, opt_state, batch)

    accuracy = np.mean(predict(params, x_test).argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    return params


if __name__ == "__main__":
    main()
