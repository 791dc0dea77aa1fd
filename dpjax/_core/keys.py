"""Random streams that never meet, and where a key comes from.

In JAX `split(key)[i]` and `fold_in(key, i)` are one key (Threefry), so that consumers
which number their draws share them as soon as they share a key: a sampler's order was
once the order of the noise. So each consumer first goes to a stream of its own, named
by a string; its steps, leaves and levels are numbered within it. A consumer opens its
stream once, where it is given the user's key: in a transformation's `init`, or at the
head of a function. It serves one use: two transformations of one kind, on the same
tree and with the same key, draw the same noise.
"""

import collections
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from dpjax._core.typing import ArrayLike, Key


def random_key(impl: str | None = None) -> Key:
    """A new typed key from the operating system's entropy, of the full width.

    The key is the secret of a private run: who has it, or guesses it, draws the same
    noise and subtracts it. `jax.random.key(seed)` keeps 32 bits of its seed without
    `jax_enable_x64` (the key's high word is 0): few enough to try them all. Use it for
    what must be repeated, and this for what is to be released.

    Args:
      impl: one of JAX's generators, as for `jax.random.key`; JAX's default if None.

    Returns:
      A key. Store it as secretly as the data, or not at all; a program compiled with it
      inside holds it (so call `init` outside jit). Of several processes let one make it
      and send it to the others.

    Raises:
      ValueError: it is called under `jax.jit` or another trace, where one key would
        become a constant of the compiled function.

    Example:
      >>> key = random_key()
      >>> key.shape, bool((jax.random.key_data(key) == 0).all())
      ((), False)
    """
    like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    entropy = os.urandom(like.size * like.dtype.itemsize)
    words = np.frombuffer(entropy, like.dtype).reshape(like.shape)
    key = jax.random.wrap_key_data(jnp.asarray(words), impl=impl)
    if isinstance(key, Tracer):
        raise ValueError(
            "random_key must be called outside jax.jit: compiled, it would be the same "
            "key in every call."
        )
    return key


def words(name: str) -> tuple[int, int]:
    """64 bits of a name, as two 32-bit numbers that nobody counts up to."""
    digest = hashlib.sha256(name.encode()).digest()
    high, low = (int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))
    return high | 1 << 31, low | 1 << 31


def stream(key: Key, consumer: str) -> Key:
    """The key from which this consumer, and no other, draws."""
    return _fold(_ordered(key), np.array(words(f"dpjax {consumer}"), np.uint32))


def _ordered(key: Key) -> Key:
    """The same key, folding numbers so that their order matters.

    unsafe_rbg folds by exclusive or: 1 and 2 is 2 and 1, and 1 and 1 is nothing. The
    generator rbg draws the same from the same key, and folds by Threefry.
    """
    if jax.random.key_impl(key) != "unsafe_rbg":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg")


def generator_name(key: Key) -> str:
    """The name of the generator that a key's streams are drawn with.

    Keys with equal data and equal generator names draw the same in all of dpjax.
    """
    return str(jax.random.key_impl(_ordered(key)))


def _fold(key: Key, pair: ArrayLike) -> Key:
    high, low = jnp.asarray(pair)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def leaf_keys(key: Key, tree: object) -> list[Key]:
    """A key for each leaf, from its path in the whole tree: 64 bits of a hash of it.

    `optax.masked` and the like take leaves away, and the others keep their paths: parts
    of a tree share no noise, nor does the order of a dictionary change any.
    """
    paths, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_masked)
    seen: collections.Counter[str] = collections.Counter()
    pairs = []
    for path, leaf in paths:
        name = jax.tree_util.keystr(path)
        seen[name] += 1  # a node of one's own may give two leaves one name
        if not _is_masked(leaf):
            pairs.append(words(f"leaf {seen[name]} {name}"))
    if not pairs:
        return []
    # All at once: a program that folds leaf by leaf takes long to compile.
    keys = jax.vmap(_fold, (None, 0))(key, np.array(pairs, np.uint32))
    return [keys[i] for i in range(len(pairs))]


def _is_masked(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
