"""Random streams that never meet.

In JAX `split(key)[i]` and `fold_in(key, i)` are one key (Threefry), so that consumers
which number their draws share them as soon as they share a key: a sampler's order was
once the order of the noise. So each consumer first goes to a stream of its own, named
by a string; its steps, leaves and levels are numbered within it.
"""

import hashlib

import jax


def words(name: str) -> tuple[int, int]:
    """64 bits of a name, as two 32-bit numbers that nobody counts up to."""
    digest = hashlib.sha256(name.encode()).digest()
    high, low = (int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))
    return high | 1 << 31, low | 1 << 31


def stream(key: jax.Array, consumer: str) -> jax.Array:
    """The key from which this consumer, and no other, draws."""
    for word in words(f"dpjax {consumer}"):
        key = jax.random.fold_in(key, word)
    return key
