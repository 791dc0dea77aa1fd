"""ChaCha20 (RFC 8439) as a JAX random generator, with keys of 256 bits.

A word is a number of 32 bits. ChaCha20's state has 16 words. Words 0 to 3 are constants
and words 4 to 11 are the key. Word 12 is the counter, and words 13 to 15 are the nonce.

**A key is a function.** For a given key, ChaCha20's block function maps a counter and a
nonce to a block of 16 words. It is commonly assumed that ChaCha20 is a pseudorandom
function. Then an adversary without the key cannot distinguish the blocks of different
counters or nonces from independent uniform words. The last two words of the nonce
determine the use of a block, so that no block has two uses:

| use | word 12 | word 13 | word 14 | word 15 | output words used |
| --- | --- | --- | --- | --- | --- |
| random bits | number of the block | 0 | 0 | bits per random number | all 16 |
| split | number of the child | 0 | 1 | 0 | the first 8 |
| fold_in | the number folded in | 0 | 2 | 0 | the first 8 |
| seed | 0 | 0 | 3 | 0 | the first 8 |

Split and fold_in derive new keys, the children of a key. Under the same assumption, an
adversary cannot distinguish the keys of children with different numbers or uses from
independent keys. A key, its children, their children and so on form a tree. The key of
a node of this tree is a pseudorandom function of the path to the node (Goldreich et
al.).

**Random bits** are the key stream of RFC 8439, 2.4, read as little-endian numbers of 8,
16, 32 or 64 bits. A number depends only on its position in row-major order, and not on
the array's size. So each device computes the blocks of its own shard. As in the RFC, a
block's number has 32 bits, so that one draw has at most 2³² blocks, or 256 GiB.

Reference: Nir and Langley (2018), https://www.rfc-editor.org/rfc/rfc8439;
Goldreich, Goldwasser and Micali (1986), https://doi.org/10.1145/6490.6503.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

NAME = "chacha20"
_BITS, _SPLIT, _FOLD_IN, _SEED = range(4)  # the uses of a block, in word 14
# RFC 8439, 2.3: the first four words of the state, "expand 32-byte k" in ASCII.
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)
_ROUNDS = 20

# The 16 words of the state as four rows, each u32[4, *grid], for a grid of blocks.
Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def quarter_round(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Rows:
    """The quarter round of RFC 8439, 2.1, on each element of four arrays of words."""
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(x: jax.Array, by: int) -> jax.Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def double_round(rows: Rows) -> Rows:
    """Apply a column round and a diagonal round to ChaCha20's state (RFC 8439, 2.3).

    The argument and the result are the four rows of the state, each with four words.
    """
    # The four quarter rounds of a column round are one quarter round of whole rows.
    a, b, c, d = quarter_round(*rows)
    # In rolled rows, the columns are the state's diagonals, (0, 5, 10, 15) and so on.
    roll = functools.partial(jnp.roll, axis=0)
    a, b, c, d = quarter_round(a, roll(b, -1), roll(c, -2), roll(d, -3))
    return a, roll(b, 1), roll(c, 2), roll(d, 3)


def block(key: jax.Array, words: tuple[jax.Array | np.uint32, ...]) -> Rows:
    """Compute an array of ChaCha20 blocks of 16 words with one key (RFC 8439, 2.3).

    `grid` is the shape of this array of blocks.

    Args:
      key: u32[8].
      words: the counter and the three words of the nonce, each u32[*grid] or a scalar.

    Returns:
      The 16 words of each block as four rows, each u32[4, *grid].
    """
    # These zeros have the grid's shape, and are computed from all inputs. Inside
    # `jax.shard_map`, a loop's carry must vary over the mesh as the inputs do.
    zero = functools.reduce(operator.xor, words, key[0]) & np.uint32(0)
    columns = 4, *(1 for _ in zero.shape)
    start: Any = (
        _CONSTANTS.reshape(columns) ^ zero[None],
        key[:4].reshape(columns) ^ zero[None],
        key[4:].reshape(columns) ^ zero[None],
        jnp.stack([word ^ zero for word in words]),
    )
    # If the rounds are written out, XLA takes six times as long to compile them on
    # CPUs, and the program is no faster.
    rows = jax.lax.fori_loop(0, _ROUNDS // 2, lambda _, rows: double_round(rows), start)
    a, b, c, d = (x + y for x, y in zip(rows, start, strict=True))
    return a, b, c, d


def _children(key: jax.Array, numbers: jax.Array | np.uint32, use: int) -> jax.Array:
    """Derive a new key, u32[8], from a key and each of the given numbers, u32[*grid].

    The result is u32[*grid, 8]. The use is `_SPLIT`, `_FOLD_IN` or `_SEED`. A new key
    is the first 8 words of the ChaCha20 block whose counter is the number, and whose
    nonce contains the use.
    """
    zero = np.uint32(0)
    rows = block(key, (numbers, zero, np.uint32(use), zero))
    return jnp.moveaxis(jnp.concatenate(rows[:2]), 0, -1)


def numbers_of(grid: tuple[int, ...]) -> jax.Array:
    """The row-major indices u32[*grid] of the entries of an array with shape `grid`.

    Raises:
      ValueError: the array has more than 2³² entries.
    """
    if math.prod(grid) > 2**32:
        raise ValueError(
            "shape must need at most 2**32 blocks of random bits; got a shape that "
            f"needs a grid of {grid} blocks."
        )
    # The sum over axes, unlike a reshaped range, lets each device compute its own
    # shard.
    numbers = jnp.zeros(grid, jnp.uint32)
    for axis in range(len(grid)):
        index = jax.lax.broadcasted_iota(jnp.uint32, grid, axis)
        # A stride of 2³² belongs to an axis of length 1, along which the position is 0.
        numbers += index * np.uint32(math.prod(grid[axis + 1 :]) % 2**32)
    return numbers


def grid_of(shape: tuple[int, ...], in_block: int) -> tuple[int, ...]:
    """The shape of the array of ChaCha20 blocks from which random numbers are read.

    The random numbers have the given shape. Each block contains `in_block` consecutive
    numbers in row-major order. Let k be the least number of last axes whose lengths
    have a product that is a multiple of `in_block`. The result has the earlier axes,
    and one axis of whole blocks in place of the last k axes. If the random numbers are
    sharded only along the earlier axes, each device computes whole blocks. If there is
    no such k, the result has one axis with all blocks, and the last block is used in
    part.
    """
    for axis in reversed(range(len(shape))):
        blocks, remainder = divmod(math.prod(shape[axis:]), in_block)
        if not remainder:
            return *shape[:axis], blocks
    return (-(-math.prod(shape) // in_block),)


def _read(rows: Rows, width: int) -> jax.Array:
    """Read the numbers of `width` bits in each block, in the order of RFC 8439.

    The blocks are four rows of words, each u32[4, *grid], where `grid` is the shape of
    the array of blocks. The result is u[*grid, ...], where the axes after `grid` have
    the numbers of a block.
    """
    # On CPUs, XLA fuses this code with the use of the numbers if it goes row by row. A
    # transpose of all 16 words at once makes normal draws take four times as long.
    words = jnp.stack([jnp.moveaxis(row, 0, -1) for row in rows], -2)
    dtype = jnp.dtype(f"uint{width}")
    if width == 32:
        return words
    if width == 64:
        low, high = words[..., 0::2].astype(dtype), words[..., 1::2].astype(dtype)
        return low | high << np.uint64(32)
    # Numbers are little-endian: the first number of a word is in its lowest bits.
    parts = [(words >> np.uint32(at)).astype(dtype) for at in range(0, 32, width)]
    return jnp.stack(parts, -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Uniform numbers of 8, 16, 32 or 64 bits, u[*shape], from a key u32[8]."""
    if bit_width not in (8, 16, 32, 64):
        raise ValueError(f"bit_width must be 8, 16, 32 or 64; got {bit_width!r}.")
    size = math.prod(shape)
    if not size:
        return jnp.zeros(shape, f"uint{bit_width}")
    grid = grid_of(shape, 512 // bit_width)
    use = np.uint32(0), np.uint32(_BITS), np.uint32(bit_width)
    drawn = _read(block(key, (numbers_of(grid), *use)), bit_width)
    # The last block may have more numbers than are needed.
    if drawn.size > size:
        drawn = jax.lax.slice(drawn.reshape(-1), (0,), (size,))
    return drawn.reshape(shape)


@functools.partial(jax.jit, static_argnums=1)
def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Derive new keys, u32[*shape, 8], from a key u32[8].

    The new keys are parts of ChaCha20 blocks that `fold_in` does not use.
    """
    return _children(key, numbers_of(shape), _SPLIT)


@jax.jit
def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """Derive a new key, u32[8], from a key and a number, which is used modulo 2³²."""
    return _children(key, number.astype(jnp.uint32), _FOLD_IN)


@jax.jit
def seed(number: jax.Array) -> jax.Array:
    """A key u32[8] from an integer of up to 32 bits (64 under `jax_enable_x64`).

    Such a key is as easy to guess as the integer.
    """
    if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"seed must be one integer; got {number.dtype}{number.shape}.")
    # As in Threefry, the seed is a number of 64 bits. The upper 32 bits are 0 if the
    # seed's dtype is narrower.
    high = jax.lax.shift_right_logical(number, jnp.asarray(32, number.dtype))
    words = jnp.stack([number.astype(jnp.uint32), high.astype(jnp.uint32)])
    key = jnp.concatenate([words, jnp.zeros(6, jnp.uint32)])
    return _children(key, np.uint32(0), _SEED)


# The generator, which is a value for the argument `impl` of JAX's functions of keys.
PRNG = jax.extend.random.define_prng_impl(
    key_shape=(8,),
    seed=seed,
    split=split,
    random_bits=random_bits,
    fold_in=fold_in,
    name=NAME,
    tag=NAME,
)
