"""The generator ChaCha20: the vectors of RFC 8439, and its use as a generator of JAX.

The reference is the RFC's block function in Python's integers. Statistical tests have
fixed keys; each states how often it would fail for a generator of uniform bits.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import SAMPLERS, SOLVERS, TRANSFORMATIONS
from jax.sharding import AxisType
from scipy import stats

import dpjax
from dpjax import auditing, checkpoint, ledger, sampling
from dpjax._core import chacha, keys

WORDS = np.frombuffer(bytes(range(32)), "<u4").astype(np.uint32)
KEY = jax.random.wrap_key_data(WORDS, impl=chacha.PRNG)
BITS, SPLIT, FOLD_IN, SEED = range(4)  # word 14 of the state


def reference_block(key, low, high=0, use=0, detail=0):
    """RFC 8439, 2.3, in Python's integers: the 16 words of one block."""

    def rotate(x, n):
        return (x << n | x >> (32 - n)) & 0xFFFFFFFF

    def quarter(s, a, b, c, d):
        for i, j, k, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[i] = (s[i] + s[j]) & 0xFFFFFFFF
            s[k] = rotate(s[k] ^ s[i], by)

    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start += [*map(int, key), low, high, use, detail]
    state = list(start)
    for _ in range(10):
        for i in range(4):
            quarter(state, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(x + y) & 0xFFFFFFFF for x, y in zip(state, start, strict=True)]


def words_of(text):
    return [int(word, 16) for word in text.split()]


def little_endian(data):
    return np.frombuffer(data, "<u4").astype(np.uint32)


def test_quarter_round_of_rfc_8439_section_2_1_1():
    given = words_of("11111111 01020304 9b8d6f43 01234567")
    result = chacha.quarter_round(*(np.full(1, x, np.uint32) for x in given))
    expected = words_of("ea2a92f4 cb1cf8ce 4581472e 5881c4bb")
    assert [int(x[0]) for x in result] == expected


# Key, counter, nonce and state after the block function, as in the RFC.
VECTORS = {
    "2.3.2": (
        bytes(range(32)),
        1,
        bytes.fromhex("000000090000004a00000000"),
        """e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
        466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2""",
    ),
    "A.1 #1": (
        bytes(32),
        0,
        bytes(12),
        """ade0b876 903df1a0 e56a5d40 28bd8653 b819d2bd 1aed8da0 ccef36a8 c70d778b
        7c5941da 8d485751 3fe02477 374ad8b8 f4b8436a 1ca11815 69b687c3 8665eeb2""",
    ),
    "A.1 #2": (
        bytes(32),
        1,
        bytes(12),
        """bee7079f 7a385155 7c97ba98 0d082d73 a0290fcb 6965e348 3e53c612 ed7aee32
        7621b729 434ee69c b03371d5 d539d874 281fed31 45fb0a51 1f0ae1ac 6f4d794b""",
    ),
    "A.1 #3": (
        bytes(31) + b"\1",
        1,
        bytes(12),
        """2452eb3a 9249f8ec 8d829d9b ddd4ceb1 e8252083 60818b01 f38422b8 5aaa49c9
        bb00ca8e da3ba7b4 c4b592d1 fdf2732f 4436274e 2561b3c8 ebdd4aa6 a0136c00""",
    ),
    "A.1 #4": (
        b"\0\xff" + bytes(30),
        2,
        bytes(12),
        """fb4dd572 4bc42ef1 df922636 327f1394 a78dea8f 5e269039 a1bebbc1 caf09aae
        a25ab213 48a6b46c 1b9d9bcb 092c5be6 546ca624 1bec45d5 87f47473 96f0992e""",
    ),
    "A.1 #5": (
        bytes(32),
        0,
        bytes(11) + b"\2",
        """374dc6c2 3736d58c b904e24a cd3f93ef 88228b1a 96a4dfb3 5b76ab72 c727ee54
        0e0e978a f3145c95 1b748ea8 f786c297 99c28f5f 628314e8 398a19fa 6ded1b53""",
    ),
}


@jax.jit
def jax_blocks(key, words):
    return jnp.concatenate(chacha.block(key, tuple(words)))


@pytest.mark.parametrize("name", VECTORS)
def test_blocks_are_the_vectors_of_rfc_8439(name):
    key, counter, nonce, expected = VECTORS[name]
    expected, key = words_of(expected), little_endian(key)
    words = np.array([counter, *little_endian(nonce)], np.uint32)
    assert jax_blocks(key, words).tolist() == expected
    assert reference_block(key, *map(int, words)) == expected


SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for "
    b"the future, sunscreen would be it."
)
CIPHERTEXT = bytes.fromhex(
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
    "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
    "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
    "5af90bbf74a35be6b40b8eedf2785e42874d"
)


def test_blocks_in_order_are_the_key_stream_of_rfc_8439_section_2_4_2():
    nonce = little_endian(bytes.fromhex("000000000000004a00000000"))
    words = (np.array([1, 2], np.uint32), *nonce)
    blocks = np.concatenate(chacha.block(WORDS, words))
    stream = blocks.T.astype("<u4").tobytes()[: len(SUNSCREEN)]
    assert bytes(x ^ y for x, y in zip(SUNSCREEN, stream, strict=True)) == CIPHERTEXT


@pytest.mark.parametrize("widths", [(8, 16, 32), (64,)])
def test_random_bits_are_the_key_stream_in_little_endian_numbers(widths):
    shapes = [(), (5,), (2, 3, 7), (3, 64), (2, 0)]
    size = max(math.prod(shape) for shape in shapes)
    with jax.enable_x64(64 in widths):
        drawn = jax.jit(
            lambda key: {
                width: [jax.random.bits(key, shape, f"uint{width}") for shape in shapes]
                for width in widths
            }
        )(KEY)
    for width in widths:
        blocks = [
            reference_block(WORDS, i, 0, BITS, width)
            for i in range(size * width // 512)
        ]
        stream = np.array(blocks, "<u4").tobytes()
        for shape, result in zip(shapes, drawn[width], strict=True):
            count = math.prod(shape)
            expected = np.frombuffer(stream, f"<u{width // 8}", count).reshape(shape)
            assert result.dtype == f"uint{width}"
            np.testing.assert_array_equal(result, expected)


def test_new_keys_are_first_halves_of_blocks_of_their_own():
    @jax.jit
    def derived(key):
        return [
            jax.random.key_data(k)
            for k in (
                jax.random.split(key, (2, 3)),
                jax.random.fold_in(key, 2**32 - 1),
                jax.random.fold_in(key, 2),
            )
        ]

    split, last, second = derived(KEY)
    for i, result in enumerate(np.reshape(split, (6, 8))):
        assert result.tolist() == reference_block(WORDS, i, 0, SPLIT)[:8]
    assert last.tolist() == reference_block(WORDS, 2**32 - 1, 0, FOLD_IN)[:8]
    assert second.tolist() == reference_block(WORDS, 2, 0, FOLD_IN)[:8]
    assert not np.any(split[0, 2] == second)
    scalar = jax.eval_shape(lambda key: jax.random.split(key, ()), KEY)
    empty = jax.eval_shape(lambda key: jax.random.split(key, (0, 2)), KEY)
    assert (scalar.shape, empty.shape) == ((), (0, 2))


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [(7, 7, 0), (-1, 2**32 - 1, 0), (np.uint32(2**32 - 1), 2**32 - 1, 0)],
)
def test_seeds_give_keys_of_32_bits(seed, low, high):
    result = jax.random.key_data(jax.random.key(seed, impl=chacha.PRNG))
    start = [low, high, *[0] * 6]
    assert result.tolist() == reference_block(start, 0, 0, SEED)[:8]


def test_seeds_give_keys_of_64_bits_with_x64():
    with jax.enable_x64(True):
        for seed in (2**40 + 5, -3):
            result = jax.random.key_data(jax.random.key(seed, impl=chacha.PRNG))
            start = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *[0] * 6]
            assert result.tolist() == reference_block(start, 0, 0, SEED)[:8]
    with pytest.raises(TypeError, match="integer"):
        jax.random.key(0.5, impl=chacha.PRNG)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((), (1,)),
        ((33,), (3,)),
        ((5, 32), (5, 2)),
        ((5, 7, 4, 8), (5, 7, 2)),
        ((4, 2**34), (4, 2**30)),
        ((2**20, 2**8 + 1), (2**16 * 257,)),
    ],
)
def test_grids_have_the_blocks_of_a_draw_in_order(shape, grid):
    assert chacha.grid_of(shape, 16) == grid
    assert 16 * math.prod(grid) >= math.prod(shape)


def test_draws_beyond_the_counter_raise():
    def lower(size):
        return jax.jit(lambda key: jax.random.bits(key, (size,))).trace(KEY).lower()

    assert "tensor<4294967296x" in lower(2**36).as_text()  # 2³² blocks
    with pytest.raises(ValueError, match=r"^shape must need at most 2\*\*32 blocks"):
        lower(2**36 + 1)
    with pytest.raises(ValueError, match=r"^bit_width must be 8, 16, 32 or 64; got 1"):
        chacha.random_bits(WORDS, 1, (3,))


# --- statistics


def test_bytes_and_normals_have_their_distributions():
    """Each of the four statistics is beyond its bound with probability 1e-6."""
    n = 2**18

    @jax.jit
    def draw(key):
        return jax.random.bits(key, (n,), jnp.uint8), jax.random.normal(key, (n,))

    octets, normals = jax.device_get(draw(KEY))
    counts = np.bincount(octets, minlength=256)
    assert np.sum((counts - n / 256) ** 2) / (n / 256) < stats.chi2.isf(1e-6, 255)
    assert stats.kstest(normals, "norm").pvalue > 1e-6
    # Neighbours, and numbers at the same place of neighbouring blocks.
    for lag in (1, 16):
        r = np.mean(normals[lag:] * normals[:-lag])
        assert abs(r) * math.sqrt(n) < stats.norm.isf(5e-7)


def test_draws_of_related_keys_are_uncorrelated():
    """Of 28 correlations each is beyond z = 6 with probability 2e-9."""
    n = 20_000

    @jax.jit
    def draw(key):
        parts = [key, *jax.random.split(key), jax.random.split(key, 3)[2]]
        parts += [jax.random.fold_in(key, i) for i in range(2)]
        one_bit = jax.random.key_data(key).at[7].set(WORDS[7] ^ np.uint32(1 << 31))
        parts.append(jax.random.wrap_key_data(one_bit, impl=chacha.PRNG))
        drawn = [jax.random.normal(k, (n,)) for k in parts]
        signs = jnp.sign(jax.random.bits(key, (n,), jnp.uint8).astype(jnp.int8))
        return jnp.stack([*drawn, signs.astype(jnp.float32)])

    correlations = np.corrcoef(draw(KEY))[np.triu_indices(8, 1)]
    assert np.max(np.abs(correlations)) < 6 / math.sqrt(n)


def test_no_two_keys_of_a_tree_share_a_word_pair():
    """64 bits of two of the 219 keys agree with probability below 1e-13."""

    @jax.jit
    def tree(key):
        def children(parent):
            folded = jax.vmap(lambda i: jax.random.fold_in(parent, i))(jnp.arange(4))
            return jnp.concatenate([jax.random.split(parent, 4), folded])

        levels = [key.reshape(1)]
        for _ in range(2):
            levels.append(jax.vmap(children)(levels[-1]).reshape(-1))
        data = jax.random.key_data(jnp.concatenate(levels))
        bits = [jax.random.bits(key, (8,), f"uint{w}") for w in (8, 16, 32)]
        return data, bits

    data, bits = tree(KEY)
    pairs = {tuple(row) for row in np.reshape(data, (-1, 2)).tolist()}
    assert len(pairs) == data.size // 2 == 4 * 73
    # Draws of different widths have blocks of their own.
    for narrow, wide in itertools.pairwise(bits):
        assert np.any(wide.astype(narrow.dtype) != narrow)


# --- as a generator of JAX


def test_vmap_scan_and_arrays_of_keys_draw_as_each_key_alone():
    numbers = np.arange(6, dtype=np.uint32).reshape(2, 3)

    @jax.jit
    def draw(key):
        tree = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(numbers)
        mapped = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (5,))))(tree)
        split = jax.vmap(jax.vmap(lambda k: jax.random.split(k, 2)))(tree)
        _, scanned = jax.lax.scan(
            lambda c, k: (c, jax.random.normal(k, (5,))), 0, tree.reshape(6)
        )
        alone = [jax.random.normal(tree[i, j], (5,)) for i in (0, 1) for j in range(3)]
        return mapped, scanned, jnp.stack(alone), split, jax.random.key_data(tree)

    mapped, scanned, alone, split, data = jax.device_get(draw(KEY))
    np.testing.assert_allclose(mapped.reshape(6, 5), alone, rtol=1e-6)
    np.testing.assert_allclose(scanned, alone, rtol=1e-6)
    assert split.shape == (2, 3, 2)
    assert data.shape == (2, 3, 8)
    for i, result in enumerate(data.reshape(6, 8)):
        assert result.tolist() == reference_block(WORDS, i, 0, FOLD_IN)[:8]


def test_key_data_is_wrapped_again_and_keys_may_be_donated():
    key = dpjax.random_key("chacha20")
    impl = jax.random.key_impl(key)
    back = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)), impl=impl)
    assert back.dtype == key.dtype
    assert hash(back.dtype) == hash(key.dtype)
    assert keys.generator_name(key) == "chacha20"
    step = jax.jit(lambda key: jax.random.split(key)[0], donate_argnums=0)
    expected = reference_block(np.asarray(jax.random.key_data(back)), 0, 0, SPLIT)[:8]
    assert jax.random.key_data(step(key)).tolist() == expected


def test_other_names_of_generators_raise():
    with pytest.raises(
        ValueError, match=r"^impl must be 'chacha20' .*got 'salsa20'\.$"
    ):
        dpjax.random_key("salsa20")


@pytest.mark.diagonal
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, "x")], ids=str)
def test_each_device_draws_its_own_part(axis_type, spec):
    """The same values as on one device, computed without communication."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    sharding, shape = jax.NamedSharding(mesh, spec), (64, 128)

    def draw(key, out_sharding=None):
        return jax.random.bits(key, shape, jnp.uint32, out_sharding=out_sharding)

    expected = jax.jit(draw)(KEY)
    if axis_type == AxisType.Auto:
        sharded = jax.jit(draw, out_shardings=sharding).lower(KEY).compile()
        text = sharded.as_text()
        assert not re.search(r"all-gather|all-to-all|all-reduce|permute\(", text)
        sizes = [
            math.prod(map(int, x.split(",")))
            for x in re.findall(r"u32\[([\d,]+)", text)
        ]
        assert max(sizes) == math.prod(shape) / 4
        result = sharded(KEY)
    else:
        with jax.set_mesh(mesh):
            result = jax.jit(draw, static_argnums=1)(KEY, sharding)
    assert result.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.matrix
def test_shards_of_shard_map_draw_with_keys_of_their_own():
    mesh = jax.make_mesh((4,), ("x",))

    def draw(key):
        own = jax.random.fold_in(key, jax.lax.axis_index("x"))
        first = jax.random.split(own)[0]
        return (
            jax.random.bits(own, (1, 40)),
            jax.random.bits(first, (1, 3)),
            (jax.random.bits(key, (3,))),
        )

    sharded = jax.shard_map(
        draw, mesh=mesh, in_specs=jax.P(), out_specs=(jax.P("x"), jax.P("x"), jax.P())
    )

    @jax.jit
    def alone(key):
        own = [jax.random.fold_in(key, i) for i in range(4)]
        first = [jax.random.split(k)[0] for k in own]
        return (
            jnp.stack([jax.random.bits(k, (40,)) for k in own]),
            jnp.stack([jax.random.bits(k, (3,)) for k in first]),
            jax.random.bits(key, (3,)),
        )

    for one, other in zip(jax.jit(sharded)(KEY), alone(KEY), strict=True):
        np.testing.assert_array_equal(one, other)


def test_draws_lower_for_gpu_and_tpu():
    def draw(words):
        key = jax.random.wrap_key_data(words, impl=chacha.PRNG)
        tx = dpjax.add_gaussian_noise(1.0, key=key)
        zeros = {"a": jnp.zeros((3, 32)), "b": jnp.zeros(7, jnp.bfloat16)}
        batch = sampling.poisson(100, 0.1, max_batch_size=30, key=key, step=3)
        return tx.update(zeros, tx.init(zeros))[0], batch

    exported = jax.export.export(jax.jit(draw), platforms=("cuda", "tpu"))(WORDS)
    text = exported.mlir_module()
    assert "func.func public @main" in text
    assert "custom_call" not in text
    assert "f64" not in text
    # Keys cross the border of a program, too.
    traced = jax.jit(lambda key: jax.random.normal(key, (64,))).trace(KEY)
    assert "stablehlo.while" in traced.lower(lowering_platforms=("tpu",)).as_text()


# --- consumers


def run_of_plan(plan, key, steps, run=None):
    w = jnp.asarray(np.linspace(-1, 1, 5, dtype=np.float32))
    tx = plan.optimizer(optax.adam(0.1), key=key)
    run = run or checkpoint.Run(key, 0, w, jax.jit(tx.init)(w))

    @jax.jit
    def step(w, state):
        updates, state = tx.update(jnp.ones_like(w), state, w)
        return w + updates, state

    while run.step < steps:
        w, state = step(run.params, run.opt_state)
        run = checkpoint.Run(run.key, run.step + 1, w, state)
    return run


@pytest.fixture(scope="module")
def plan():
    return dpjax.plan(
        num_examples=100,
        batch_size=10,
        num_steps=6,
        delta=1e-3,
        noise_multiplier=1.0,
        clip_norm=1.0,
        sampling="fixed",
        adjacency=dpjax.Adjacency.REPLACE,
    )


@pytest.mark.matrix
def test_checkpoints_restore_and_ledgers_record_runs(plan, tmp_path):
    key = dpjax.random_key("chacha20")
    middle = run_of_plan(plan, key, 3)
    folder, book = tmp_path / "run", tmp_path / "ledger.jsonl"
    checkpoint.save(folder, plan, middle)
    result = checkpoint.restore(folder, plan, run_of_plan(plan, key, 0))
    assert result.key.dtype == key.dtype
    one, other = (run_of_plan(plan, run.key, 6, run=run) for run in (result, middle))
    np.testing.assert_array_equal(one.params, other.params)
    threefry = run_of_plan(plan, jax.random.key(0), 0)
    with pytest.raises(ValueError, match="chacha20"):
        checkpoint.restore(folder, plan, threefry)
    ledger.release(book, plan, one)
    assert [x.run for x in ledger.read(book).entries] == [ledger.run_name(key)]


def test_known_and_traced_keys_have_the_same_streams():
    known = keys.stream(KEY, "some consumer")
    traced = jax.jit(lambda key: keys.stream(key, "some consumer"))(KEY)
    high, low = keys.words("dpjax some consumer")
    child = reference_block(WORDS, high, 0, FOLD_IN)[:8]
    expected = reference_block(child, low, 0, FOLD_IN)[:8]
    assert jax.random.key_data(known).tolist() == expected
    assert jax.random.key_data(traced).tolist() == expected
    assert known.dtype == traced.dtype == KEY.dtype


# Independent and discrete noise, and correlated noise in both forms.
NOISE = (
    "add_gaussian_noise",
    "add_discrete_gaussian_noise",
    "tree_momentum",
    "tree_momentum, regenerated",
    "correlated_noise, regenerated",
)


@pytest.mark.matrix  # `test_conformance` draws all noise with such keys
@pytest.mark.parametrize("name", NOISE)
def test_noise_is_the_same_in_a_scan_and_step_by_step(name):
    """With a known key and eager steps on one side, a traced key on the other."""
    gradients = {"w": np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)}

    @jax.jit
    def scan(key):
        tx = TRANSFORMATIONS[name](key)

        def step(state, _):
            updates, state = tx.update(gradients, state)
            return state, updates

        return jax.lax.scan(step, tx.init(gradients), length=3)[1]

    tx = TRANSFORMATIONS[name](KEY)
    update, state, steps = jax.jit(tx.update, donate_argnums=1), None, []
    state = tx.init(gradients)
    for _ in range(3):
        updates, state = update(gradients, state)
        steps.append(updates["w"])
    result = np.stack(jax.device_get(steps))
    np.testing.assert_allclose(result, scan(KEY)["w"], rtol=1e-5, atol=1e-6)
    assert np.std(result[2] - result[1]) > 0.1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [n for n in SAMPLERS if n in ("poisson", "random_bins_step", "reshuffled")]
)
def test_batches_are_the_same_for_known_and_traced_keys(name):
    known = jax.jit(lambda: SAMPLERS[name](KEY, np.uint32(2)))()
    traced = jax.jit(SAMPLERS[name])(KEY, np.uint32(2))
    np.testing.assert_array_equal(known.indices, traced.indices)
    np.testing.assert_array_equal(known.mask, traced.mask)


@pytest.mark.matrix
def test_audits_take_such_keys():
    scores = jnp.arange(20.0)
    quantiles = auditing.bootstrap_quantiles(
        lambda a, b: jnp.mean(a) - jnp.mean(b),
        scores + 5,
        scores,
        jnp.array([0.1, 0.9]),
        num_samples=50,
        key=KEY,
    )
    # The difference of means has a standard deviation of about 1.8.
    assert 1 < quantiles[0] < quantiles[1] < 9


@pytest.mark.matrix
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_take_such_keys(name):
    out = SOLVERS[name](KEY)[0]
    assert np.all(np.isfinite(out))
    assert np.std(out) > 0
