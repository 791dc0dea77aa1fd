"""Load images to train on: scikit-learn's digits and the test files of MNIST."""

import gzip

import jax.numpy as jnp
import numpy as np


def load_digits():
    """Load scikit-learn's digits, with pixels scaled by their known range, 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels, 1437


def load_mnist(folder):
    """Load the MNIST test files, with pixels scaled by their known range, 0 to 255."""

    def read(name, header):
        for path in (folder / name, folder / f"mnist-{name}"):
            if path.exists():
                return np.frombuffer(
                    gzip.decompress(path.read_bytes())[header:], np.uint8
                )
        raise SystemExit(f"{folder} has neither {name} nor mnist-{name}.")

    images = read("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784)
    return images.astype(np.float32) / 255, read("t10k-labels-idx1-ubyte.gz", 8), 8000


def load(folder):
    """Load train and test sets, split by a permutation that ignores the data."""
    images, labels, size = load_mnist(folder) if folder else load_digits()
    order = np.random.default_rng(0).permutation(len(images))
    data = jnp.asarray(images[order]), jnp.asarray(labels[order], jnp.int32)
    return tuple(x[:size] for x in data), tuple(x[size:] for x in data)
