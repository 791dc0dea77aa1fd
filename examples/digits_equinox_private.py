"""Train on handwritten digits with equinox.

digits_equinox.py trains without privacy. digits_equinox_private.py is the same program
with differential privacy.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpjax


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.layers = [
            eqx.nn.Conv2d(1, 16, kernel_size=3, stride=2, padding=1, key=first),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(16 * 4 * 4, 10, key=last),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, batch):
    x, y = batch
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    sizes = {"num_examples": len(y), "batch_size": batch_size, "num_steps": num_steps}
    plan = dpjax.plan(**sizes, epsilon=4.0, delta=1e-5, clip_norm=1.0)
    model = CNN(jax.random.key(0))
    optim = plan.optimizer(optax.adam(5e-3), key=dpjax.random_key())
    opt_state = optim.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        loss, grads = plan.value_and_grad(loss_fn)(model, batch)
        params, _ = eqx.partition(model, eqx.is_array)
        updates, opt_state = optim.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    for batch in plan.batches((x, y), key=dpjax.random_key()):
        model, opt_state, _ = make_step(model, opt_state, batch)

    logits = jax.vmap(model)(x_test)
    accuracy = np.mean(logits.argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    print(plan.guarantee)
    return eqx.filter(model, eqx.is_array)


if __name__ == "__main__":
    main()
