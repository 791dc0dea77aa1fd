"""ChaCha20 (RFC 8439) as a generator of JAX, with keys of 256 bits.

**A key is a function.** Under a key, the block function maps the four words of a
counter and a nonce to a block of 16 words. If ChaCha20 is a pseudorandom function, as
is commonly assumed, an adversary without the key cannot tell the blocks of different
counters or nonces from independent uniform words. The last two nonce words name what a
block is used for, so that no block has two uses:

| use | word 12 | word 13 | word 14 | word 15 | words used |
| --- | --- | --- | --- | --- | --- |
| random bits | block number, low | high | 0 | bits of a number | all 16 |
| split | number of the child, low | high | 1 | 0 | the first 8 |
| fold_in | the number folded in | 0 | 2 | 0 | the first 8 |
| seed | 0 | 0 | 3 | 0 | the first 8 |

Split and fold_in give the key of a child, and the children of different numbers or uses
have keys that are as if independent. Keys of keys form a tree, and the key of a node is
a pseudorandom function of the path to the node (Goldreich et al.).

**Random bits** are the key stream of RFC 8439, 2.4, read as little-endian numbers of 8,
16, 32 or 64 bits. So a number depends on its place in row-major order and on no other
size of the array, and each device computes the blocks of its own shard.

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

from dpjax._core.typing import ArrayLike, Bits

NAME = "chacha20"
_BITS, _SPLIT, _FOLD_IN, _SEED = range(4)  # what a block is used for, in word 14
# RFC 8439, 2.3: the first four words of the state, "expand 32-byte k" in ASCII.
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)
_ROUNDS = 20

# The state of 16 words as its four rows, each u32[4, *grid], for a grid of blocks.
Rows = tuple[Bits, Bits, Bits, Bits]


def quarter_round(a: Bits, b: Bits, c: Bits, d: Bits) -> Rows[Bits]:
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


def _rotate(x: Bits, by: int) -> Bits:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _numpy_of(x: Bits) -> Any:
    """The module whose functions take this array: `jax.numpy` or `numpy`."""
    return np if isinstance(x, np.ndarray) else jnp


def _turn(row: Bits, by: int) -> Bits:
    """A row of the state, with word (i + by) modulo 4 at place i."""
    return _numpy_of(row).concatenate([row[by:], row[:by]])


def double_round(rows: Rows[Bits]) -> Rows[Bits]:
    """A column round and a diagonal round (RFC 8439, 2.3)."""
    # The four quarter rounds of a column round are one on whole rows.
    a, b, c, d = quarter_round(*rows)
    # Turned rows have the state's diagonals, (0, 5, 10, 15) and so on, as columns.
    a, b, c, d = quarter_round(a, _turn(b, 1), _turn(c, 2), _turn(d, 3))
    return a, _turn(b, 3), _turn(c, 2), _turn(d, 1)


def block(key: Bits, words: tuple[Bits | np.uint32, ...]) -> Rows[Bits]:
    """The blocks of one key, for the counters and nonces of a grid (RFC 8439, 2.3).

    Args:
      key: u32[8].
      words: the counter and the three words of the nonce, each u32[*grid] or a scalar.

    Returns:
      The 16 words of each block as four rows, each u32[4, *grid].
    """
    xp = _numpy_of(key)
    # Zeros of the grid's shape, made of all inputs: inside `jax.shard_map`, all parts
    # of a loop's carry must vary over the mesh as the key and the words do.
    zero = functools.reduce(operator.xor, words, key[0]) & np.uint32(0)
    columns = 4, *(1 for _ in zero.shape)
    start: Any = (
        _CONSTANTS.reshape(columns) ^ zero[None],
        key[:4].reshape(columns) ^ zero[None],
        key[4:].reshape(columns) ^ zero[None],
        xp.stack([word ^ zero for word in words]),
    )
    rows = start
    if xp is np:
        for _ in range(_ROUNDS // 2):
            rows = double_round(rows)
    else:
        # Written out, the rounds take XLA six times as long to compile on CPUs, and
        # their program is no faster.
        rows = jax.lax.fori_loop(
            0, _ROUNDS // 2, lambda _, rows: double_round(rows), start
        )
    a, b, c, d = (x + y for x, y in zip(rows, start, strict=True))
    return a, b, c, d


def _child(rows: Rows[Bits]) -> Bits:
    """New keys, u32[*grid, 8], from the first half of each block."""
    xp = _numpy_of(rows[0])
    return xp.moveaxis(xp.concatenate(rows[:2]), 0, -1)


def fold_in_words(key: Bits, number: Bits) -> Bits:
    """The key data of `jax.random.fold_in(key, number)` for a number u32[]."""
    return _child(block(key, (number, np.uint32(0), np.uint32(_FOLD_IN), np.uint32(0))))


def product(x: Bits, factor: int) -> tuple[Bits, Bits]:
    """The low and high words of x times a factor, modulo 2⁶⁴, for words u32[...].

    JAX has no 64-bit integers by default, so the factor's low word is multiplied in
    halves of 16 bits.
    """
    low, high = np.uint32(factor & 0xFFFFFFFF), np.uint32(factor >> 32 & 0xFFFFFFFF)
    x0, x1 = x & np.uint32(0xFFFF), x >> np.uint32(16)
    f0, f1 = low & np.uint32(0xFFFF), low >> np.uint32(16)
    # (x1 f0 2¹⁶ + x0 f0) / 2¹⁶ is below 2³², and so is the next sum.
    middle = x1 * f0 + (x0 * f0 >> np.uint32(16))
    other = x0 * f1 + (middle & np.uint32(0xFFFF))
    carried = x1 * f1 + (middle >> np.uint32(16)) + (other >> np.uint32(16))
    return x * low, carried + x * high


def weighted_sum(places: list[Bits], strides: list[int]) -> tuple[Bits, Bits]:
    """The low and high words of Σ places[i] strides[i] modulo 2⁶⁴, each u32[...]."""
    low, high = product(places[0], strides[0])
    for place, stride in zip(places[1:], strides[1:], strict=True):
        more, above = product(place, stride)
        low = low + more
        # The sum of two low words has overflowed if it is below one of them.
        high = high + above + (low < more).astype(np.uint32)
    return low, high


def numbers_of(grid: tuple[int, ...]) -> tuple[jax.Array, jax.Array | np.uint32]:
    """The row-major numbers of a grid's blocks, as low and high words u32[*grid]."""
    if any(n > 2**32 for n in grid) or math.prod(grid) > 2**64:
        raise ValueError(
            "shape must need at most 2**64 blocks, and at most 2**32 along one axis; "
            f"got one that needs {grid}."
        )
    # Sums over the axes, not a reshaped range: each device computes its own part.
    axes = range(len(grid))
    places = [jax.lax.broadcasted_iota(jnp.uint32, grid, axis) for axis in axes]
    strides = [math.prod(grid[axis + 1 :]) for axis in axes]
    if math.prod(grid) > 2**32:
        return weighted_sum(places, strides)
    low = jnp.zeros(grid, jnp.uint32)
    for place, stride in zip(places, strides, strict=True):
        # A stride of 2³² is that of an axis of length 1, whose place is 0.
        low = low + place * np.uint32(stride % 2**32)
    return low, np.uint32(0)


# Blocks in a row of the grid of a draw with more than 2³² blocks along one axis.
_ROW = 2**16


def grid_of(shape: tuple[int, ...], in_block: int) -> tuple[int, ...]:
    """A grid of blocks, in the row-major order of a draw's numbers.

    If the last axes of the draw hold a whole number of blocks, all axes before them are
    axes of the grid. A device that has a part of these axes then has whole blocks.
    """
    for axis in reversed(range(len(shape))):
        blocks, left = divmod(math.prod(shape[axis:]), in_block)
        if not left and blocks <= 2**32:
            return *shape[:axis], blocks
    blocks = -(-math.prod(shape) // in_block)
    return (blocks,) if blocks <= 2**32 else (-(-blocks // _ROW), _ROW)


def _read(rows: Rows[jax.Array], width: int) -> jax.Array:
    """The numbers of `width` bits in each block, u[*grid, ...], in the RFC's order."""
    # Row by row, XLA fuses this with what is done with the numbers on CPUs. A transpose
    # of all 16 words at once makes normal numbers take four times as long.
    words = jnp.stack([jnp.moveaxis(row, 0, -1) for row in rows], -2)
    dtype = jnp.dtype(f"uint{width}")
    if width == 32:
        return words
    if width == 64:
        low, high = words[..., 0::2].astype(dtype), words[..., 1::2].astype(dtype)
        return low | high << np.uint64(32)
    # Little-endian: the first number of a word is in its lowest bits.
    parts = [(words >> np.uint32(at)).astype(dtype) for at in range(0, 32, width)]
    return jnp.stack(parts, -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    if width not in (8, 16, 32, 64):
        raise ValueError(f"bit_width must be 8, 16, 32 or 64; got {width!r}.")
    size = math.prod(shape)
    if not size:
        return jnp.zeros(shape, f"uint{width}")
    grid = grid_of(shape, 512 // width)
    use = np.uint32(_BITS), np.uint32(width)
    drawn = _read(block(key, (*numbers_of(grid), *use)), width)
    # The last block may have more numbers than are asked for.
    if drawn.size > size:
        drawn = jax.lax.slice(drawn.reshape(-1), (0,), (size,))
    return drawn.reshape(shape)


@functools.partial(jax.jit, static_argnums=1)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _child(block(key, (*numbers_of(shape), np.uint32(_SPLIT), np.uint32(0))))


@jax.jit
def _fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    return fold_in_words(key, number)


@jax.jit
def _from_seed(seed: jax.Array) -> jax.Array:
    # As for Threefry, the seed is its 64 bits, of which the upper are 0 where the
    # seed's dtype is narrower.
    high = jax.lax.shift_right_logical(seed, jnp.asarray(32, seed.dtype))
    words = jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])
    key = jnp.concatenate([words, jnp.zeros(6, jnp.uint32)])
    nothing = np.uint32(0)
    return _child(block(key, (nothing, nothing, np.uint32(_SEED), nothing)))


def random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Uniform numbers of `bit_width` bits, u[*shape], from a key u32[8]."""
    return _random_bits(key, bit_width, tuple(shape))


def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Keys of children, u32[*shape, 8], which differ from those of `fold_in`."""
    return _split(key, tuple(shape))


def fold_in(key: jax.Array, number: ArrayLike) -> jax.Array:
    """The key u32[8] of the child with a number, which is taken modulo 2³²."""
    return _fold_in(key, jnp.asarray(number).astype(jnp.uint32))


def seed(number: ArrayLike) -> jax.Array:
    """A key u32[8] from an integer, which has 32 bits, or 64 under `jax_enable_x64`.

    Such a key is no harder to find than the integer.
    """
    number = jnp.asarray(number)
    if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"seed must be one integer; got {number.dtype}{number.shape}.")
    return _from_seed(number)


# The generator, for the argument `impl` of JAX's functions of keys.
PRNG = jax.extend.random.define_prng_impl(
    key_shape=(8,),
    seed=seed,
    split=split,
    random_bits=random_bits,
    fold_in=fold_in,
    name=NAME,
    tag=NAME,
)
