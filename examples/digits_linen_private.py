"""Train on handwritten digits with flax.linen.

digits_linen.py trains without privacy. digits_linen_private.py is the same program
with differential privacy.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpjax


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, kernel_size=(3, 3), strides=2)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


def loss_fn(params, batch, key):
    x, y = batch
    logits = CNN().apply({"params": params}, x, train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    sizes = {"num_examples": len(y), "batch_size": batch_size, "num_steps": num_steps}
    plan = dpjax.plan(**sizes, epsilon=4.0, delta=1e-5, clip_norm=1.0)
    params = CNN().init(jax.random.key(0), x[:1], train=False)["params"]
    dropout_key = dpjax.random_key()
    tx = plan.optimizer(optax.adam(5e-3), key=dpjax.random_key())
    state = TrainState.create(apply_fn=CNN().apply, params=params, tx=tx)

    @jax.jit
    def train_step(state, batch):
        key = jax.random.fold_in(dropout_key, state.step)
        grad_fn = plan.value_and_grad(loss_fn)
        loss, grads = grad_fn(state.params, batch, key)
        return state.apply_gradients(grads=grads), loss

    for batch in plan.batches((x, y), key=dpjax.random_key()):
        state, _ = train_step(state, batch)

    predict = jax.jit(lambda params: CNN().apply({"params": params}, x_test, False))
    accuracy = np.mean(predict(state.params).argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    print(plan.guarantee)
    return state.params


if __name__ == "__main__":
    main()
