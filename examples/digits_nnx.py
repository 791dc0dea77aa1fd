"""Train on handwritten digits with flax.nnx.

digits_nnx.py trains without privacy. digits_nnx_private.py is the same program
with differential privacy.
"""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1)))


def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(num_steps=200, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)

    model = CNN(nnx.Rngs(params=0, dropout=1))
    tx = optax.adam(5e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = rng.choice(len(y), batch_size, replace=False)
        batch = x[rows], y[rows]
        train_step(model, optimizer, batch)

    model.eval()
    accuracy = np.mean(jax.jit(model)(x_test).argmax(1) == y_test)
    print(f"test accuracy {accuracy:.3f}")
    return nnx.state(model, nnx.Param)


if __name__ == "__main__":
    main()
