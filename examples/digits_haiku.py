"""Train on handwritten digits with haiku.

digits_haiku.py trains without privacy. digits_haiku_private.py is the same program
with differential privacy.
"""

import haiku as hk
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def net_fn(x, train):
    x = jax.nn.relu(hk.Conv2D(16, kernel_shape=3, stride=2)(x))
    x = hk.Flatten()(x)
    x = hk.dropout(hk.next_rng_key(), 0.2, x) if train else x
    return hk.Linear(10)(x)


network = hk.transform(net_fn)


def loss_fn(params, batch, rng):
    x, y = batch
    logits = network.apply(params, rng, x, train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    params = network.init(jax.random.key(0), x[:1], train=True)
    rngs = hk.PRNGSequence(jax.random.key(1))
    optimizer = optax.adam(5e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params, opt_state, batch, rng):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = rng.choice(len(y), batch_size, replace=False)
        batch = x[rows], y[rows]
        params, opt_state, _ = update(params, opt_state, batch, next(rngs))

    predict = jax.jit(lambda params: network.apply(params, None, x_test, train=False))
    accuracy = np.mean(predict(params).argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    return params


if __name__ == "__main__":
    main()
