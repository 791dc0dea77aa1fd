"""Separate random streams for the consumers of one key, and new keys.

In JAX `split(key)[i]` and `fold_in(key, i)` are the same key (Threefry). A consumer of
a key, such as a sampler or a noise transformation, usually derives a key for each step
or leaf from the number of the step or leaf. Two consumers of the same key would then
draw the same random numbers, so that a sampler's order could depend on the noise. So
each consumer first derives a separate key, called a stream, from the user's key and the
consumer's name. From this stream, the consumer derives the keys of its steps and
leaves. A consumer derives its stream once, where it receives the user's key: in a
transformation's `init`, or at the beginning of a function. Streams separate types of
consumers only. Two transformations of one type, on the same tree and with the same key,
draw the same noise.
"""

import collections
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from dpjax._core import chacha
from dpjax._core.interpret import without_compiler
from dpjax._core.typing import ArrayLike, Bits, Key, Shaped


def random_key(impl: str | None = None) -> Key:
    """A new typed key, all of whose bits come from the operating system's entropy.

    The key is the secret of a private run: anyone who has or guesses the key can draw
    the same noise and subtract it. Without `jax_enable_x64`, `jax.random.key(seed)`
    uses only 32 bits of its seed (the key's high word is 0), so that all keys can be
    tried. Use `jax.random.key` for runs that must be reproducible, and `random_key` for
    runs whose results are to be released.

    With `impl="chacha20"` the key has 256 bits, and `jax.random` draws from it by
    ChaCha20, the stream cipher of RFC 8439. JAX's default, Threefry-2x32, has keys of
    64 bits and is no standardised cipher. Two samplers compute the order of many
    examples by faster functions, which are no standardised ciphers either:
    `sampling.random_bins` for more than 2¹⁶ examples, and `sampling.reshuffled` for
    more than 2¹⁴ examples. These functions get their keys from the key's generator.

    Args:
      impl: "chacha20", or one of JAX's generators, as for `jax.random.key`. None
        stands for JAX's default: "threefry2x32" unless JAX is configured otherwise.

    Returns:
      A key. Store the key as secretly as the data, or not at all. Call the `init` of an
      optimizer outside jit. Inside jit, the optimizer's key would become a constant of
      the compiled program, and anyone with the program could read the key. If there are
      several processes, let one process make the key and send it to the others. JAX
      does not know the name "chacha20". To make further ChaCha20 keys by
      `jax.random.key` or `jax.random.wrap_key_data`, pass `jax.random.key_impl(key)` as
      `impl`.

    Raises:
      ValueError: impl names no generator, or the call is under `jax.jit`, where the key
        would become a constant of the compiled function. A call under `jax.vmap` does
        not raise, and gives all elements the same key.

    Privacy: the guarantees of dpjax assume uniform random bits. The guarantees hold
    against an adversary who cannot distinguish the generator's bits from uniform bits.
    That no adversary can distinguish ChaCha20's bits is a common assumption of
    cryptography.

    Reference: Nir and Langley (2018), https://www.rfc-editor.org/rfc/rfc8439.

    Example:
      >>> key = random_key()
      >>> key.shape, bool((jax.random.key_data(key) == 0).all())
      ((), False)
      >>> jax.random.key_data(random_key("chacha20")).shape
      (8,)
    """
    generator = generator_of(impl)
    # The key's shape and dtype depend on the generator. No key is drawn to find them.
    try:
        like = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=generator))
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"impl must be {chacha.NAME!r} or the name of one of JAX's generators, "
            f"such as 'threefry2x32'; got {impl!r}."
        ) from error
    entropy = os.urandom(like.size * like.dtype.itemsize)
    words = np.frombuffer(entropy, like.dtype).reshape(like.shape)
    key = jax.random.wrap_key_data(jnp.asarray(words), impl=generator)
    if isinstance(key, Tracer):
        raise ValueError(
            "random_key must be called outside jax.jit, because a compiled call "
            "would return the same key every time."
        )
    return key


def generator_of(name: str | None) -> Any:
    """Convert a generator's name to the argument `impl` of JAX's functions for keys.

    None stands for the default generator of JAX.
    """
    # JAX has no public function to register the name of a generator.
    return chacha.PRNG if name == chacha.NAME else name


def words(name: str) -> tuple[int, int]:
    """A hash of a name, as two 32-bit numbers, each at least 2³¹.

    So neither of these numbers equals a number below 2³¹, such as the number of a step.
    """
    digest = hashlib.sha256(name.encode()).digest()
    high, low = (int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))
    return high | 1 << 31, low | 1 << 31


def stream(key: Key, consumer: str) -> Key:
    """Derive a key from the user's key and the name of a consumer of random numbers.

    A consumer is a function or transformation that draws random numbers, for example
    "correlated noise". Consumers with different names get different keys.
    """
    pair = np.array(words(f"dpjax {consumer}"), np.uint32)
    key = _order_dependent_key(key)
    data = jax.random.key_data(key)
    fold = _NUMPY_FOLDS.get(generator_name(key))
    if not is_on_one_device(data) or key.ndim or not fold:
        return _fold(key, pair)
    # For a concrete key, NumPy folds without compiling a program. The result is on the
    # device of the key, as JAX's result would be.
    folded = np.asarray(jax.device_get(data))
    for word in pair:
        folded = fold(folded, word)
    put = jax.device_put(folded, data.sharding if data.committed else None)
    return jax.random.wrap_key_data(put, impl=jax.random.key_impl(key))


def _fold_threefry(data: np.ndarray, word: np.uint32) -> np.ndarray:
    return np.concatenate(threefry(list(data[:, None]), np.full(1, word)))


# For each generator, the function that does `jax.random.fold_in` on key data in NumPy.
_NUMPY_FOLDS = {
    "threefry2x32": _fold_threefry,
    chacha.NAME: without_compiler(chacha.fold_in),
}


def is_on_one_device(x: jax.Array) -> bool:
    """Whether the array is not traced, and is on one device of this process."""
    if isinstance(x, Tracer) or not x.is_fully_addressable:
        return False
    return len(x.sharding.device_set) == 1


# Rotation constants of Threefry-2x32, for even and for odd groups of four rounds.
_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)


def threefry(key: Sequence[Bits], x: Bits) -> tuple[Bits, Bits]:
    """The two output words of Threefry-2x32 for each counter (0, x), shaped like x.

    Threefry-2x32 is the default generator of JAX. The two output words for the counter
    (0, number) are the key data of `jax.random.fold_in(key, number)`. The rounds of
    Threefry are written out here, so that XLA fuses them with the code around them.

    Args:
      key: the two words of the key's data.
      x: the second words of the counters, u32[...].

    Reference: Salmon et al. (2011), https://doi.org/10.1145/2063384.2063405.
    """
    words = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    a, b = words[0] + (x ^ x), x + words[1]
    for i in range(5):
        for turn in _TURNS[i % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(turn)) | (b >> np.uint32(32 - turn)))
        a = a + words[(i + 1) % 3]
        b = b + (words[(i + 2) % 3] + np.uint32(i + 1))
    return a, b


def random_words(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """The words of `jax.random.bits(key, shape, uint32)`, by code that compiles faster.

    On CPUs, XLA takes four times as long to compile JAX's own Threefry.
    """
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore
    if not partitionable or key.ndim or not _has_word_pairs(key, shape):
        return jax.random.bits(key, shape, jnp.uint32)
    high, low = word_pairs(key, shape)
    return high ^ low


def word_pairs(key: Key, shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Draw two independent arrays of random 32-bit words, u32[*shape] each.

    With Threefry, both words of an entry come from the same hash of the entry's index.
    `jax.random.bits` would combine these two words into one.
    """
    if not _has_word_pairs(key, shape):
        first, second = jax.random.bits(key, (2, *shape), jnp.uint32)
        return first, second
    data = jax.random.key_data(key)
    return threefry((data[0], data[1]), chacha.numbers_of(tuple(shape)))


def _has_word_pairs(key: Key, shape: Sequence[int]) -> bool:
    """Whether the key is a Threefry key, and arrays of the shape have < 2³² entries."""
    return generator_name(key) == "threefry2x32" and math.prod(shape) < 2**32


def two_keys(key: Key) -> jax.Array:
    """Derive two keys whose draws are the same with and without `jax.vmap`.

    A key of JAX's generators rbg and unsafe_rbg draws other bits under `jax.vmap`. The
    result is an array of two ChaCha20 keys if the given key is a ChaCha20 key, and of
    two Threefry keys otherwise.
    """
    if generator_name(key) == chacha.NAME:
        return jax.random.split(key)
    words = jax.random.bits(key, (2, 2), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _order_dependent_key(key: Key) -> Key:
    """Replace the generator unsafe_rbg of a key by rbg; any other key is unchanged.

    The generator unsafe_rbg folds numbers in by exclusive or. So folding in 1 and 2
    equals folding in 2 and 1, and folding in 1 twice changes nothing. The generator rbg
    draws the same numbers from the same key data, and folds numbers in by Threefry.
    """
    if jax.random.key_impl(key) != "unsafe_rbg":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg")


def generator_name(key: Key) -> str:
    """The name of the generator with which dpjax draws from a key.

    The name is "rbg" for keys of unsafe_rbg (`_order_dependent_key`). Keys with equal
    data and equal generator names draw the same numbers in all of dpjax.
    """
    return str(jax.random.key_impl(_order_dependent_key(key)))


def _fold(key: Key, pair: ArrayLike) -> Key:
    # fold_in takes 32 bits, too few for hashes of names that must not collide.
    high, low = jnp.asarray(pair)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def leaf_keys(key: Key, tree: object) -> list[Key]:
    """A key for each leaf, derived from a hash of the leaf's path in the whole tree.

    `optax.masked` and similar wrappers remove leaves, but do not change the paths of
    the remaining leaves. So disjoint parts of a tree share no noise. The order of a
    dictionary's entries does not change the noise.
    """
    paths, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_masked)
    counts: collections.Counter[str] = collections.Counter()
    pairs = []
    for path, leaf in paths:
        name = jax.tree_util.keystr(path)
        counts[name] += 1  # a user-defined pytree node may give two leaves one path
        if not _is_masked(leaf):
            pairs.append(words(f"leaf {counts[name]} {name}"))
    if not pairs:
        return []
    # One vmap covers all leaves, since folding leaf by leaf takes long to compile.
    keys = jax.vmap(_fold, (None, 0))(key, np.array(pairs, np.uint32))
    return [keys[i] for i in range(len(pairs))]


def map_with_keys(
    function: Callable[[Key, jax.Array], jax.Array], key: Key, tree: Shaped
) -> Shaped:
    """The tree of function(key, leaf), in which each leaf has its own key."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(function, leaf_keys(key, tree), leaves))


def _is_masked(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
