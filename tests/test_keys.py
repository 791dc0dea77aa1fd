"""Keys of draws: no two consumers, leaves, steps or tree parts share any.

Where possible keys are compared: a generator based on Threefry records every key that
it draws from or derives others from. Threefry is one-to-one in the block under one key,
and draws of two keys are as if independent. Where noise is compared instead, a
correlation of n normals has standard deviation 1 / sqrt(n).
"""

import collections
import functools
from itertools import chain

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import sampling
from dpjax._core import keys
from dpjax._core.rounding import round_up_float32
from dpjax.noise import _gaussian as noise
from dpjax.noise import tree

KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
IMPLS = ["threefry2x32", "rbg", "unsafe_rbg", "chacha20"]
# The words of a key of any generator.
WORDS = {
    "threefry2x32": np.array([0, 5], np.uint32),
    "rbg": np.array([0, 5, 0, 5], np.uint32),
    "unsafe_rbg": np.array([0, 5, 0, 5], np.uint32),
    "chacha20": np.arange(8, dtype=np.uint32),
}
RECORD = {"drawn": [], "derived": []}


def record_key(what, key):
    jax.debug.callback(lambda k: RECORD[what].append(tuple(np.asarray(k))), key)
    return jax.random.wrap_key_data(key, impl="threefry2x32")


@functools.cache
def recording_prng_impl():
    def split(key, shape):
        return jax.random.key_data(jax.random.split(record_key("derived", key), shape))

    def fold_in(key, data):
        return jax.random.key_data(jax.random.fold_in(record_key("derived", key), data))

    def random_bits(key, width, shape):
        return jax.random.bits(record_key("drawn", key), shape, f"uint{width}")

    def seed(number):
        return jax.random.key_data(jax.random.key(number, impl="threefry2x32"))

    return jax.extend.random.define_prng_impl(
        key_shape=(2,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name="recorded_threefry",
        tag="rec",
    )


def run_on_zeros(tx, number=4):
    params = {"a": jnp.zeros(3), "b": [jnp.zeros(3), jnp.zeros((0,))]}

    def step(state, _):
        updates, state = tx.update(params, state)
        return state, updates

    return jax.lax.scan(step, tx.init(params), length=number)


def draw_four(sample):
    return jax.lax.map(sample, jnp.arange(4))


CONSUMERS = {
    "independent noise": lambda key: run_on_zeros(
        dpjax.add_gaussian_noise(1.0, key=key)
    ),
    "tree noise": lambda key: run_on_zeros(
        dpjax.tree_momentum(0.9, 1.0, num_steps=4, key=key)
    ),
    "gamma noise": lambda key: noise.gamma_norm_like(key, [jnp.zeros(3)] * 2, 1.0),
    "reshuffled": lambda key: draw_four(
        lambda i: sampling.reshuffled(10, 5, key=key, epoch=i)
    ),
    "fixed_size": lambda key: draw_four(
        lambda i: sampling.fixed_size(10, 5, key=key, step=i)
    ),
    "poisson": lambda key: draw_four(
        lambda i: sampling.poisson(10, 0.5, max_batch_size=9, key=key, step=i)
    ),
}


def keys_by_consumer():
    """For every consumer the keys that it draws from, and the keys that it derives."""
    words = np.array([0, 11], np.uint32)
    key, root = (
        jax.random.wrap_key_data(words, impl=recording_prng_impl()),
        tuple(words),
    )
    drawn, derived = {}, {}
    for name, consume in CONSUMERS.items():
        for recorded in RECORD.values():
            recorded.clear()
        jax.jit(consume)(key)
        jax.effects_barrier()
        drawn[name] = list(RECORD["drawn"])
        derived[name] = set(RECORD["derived"]) - {root}
    return drawn, derived


def test_consumers_never_share_a_key():
    drawn, derived = keys_by_consumer()
    for name, keys_drawn in drawn.items():
        own = set(keys_drawn)
        assert len(own) == len(keys_drawn) >= 4, name  # and never twice from one key
        for other in drawn:
            if other != name:
                assert not own & set(drawn[other]), (name, other)
                assert not derived[name] & derived[other], (name, other)
            # 64 bits drawn from a key are the key derived from it.
            assert not own & derived[other], (name, other)


def test_epoch_order_is_independent_of_the_noise():
    n = 50
    tx = dpjax.dp_sgd(
        1.0, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, key=KEY
    )

    @jax.jit
    def noise_and_order():
        zeros = [jnp.zeros(n)] * 2
        updates, _ = tx.update(zeros, tx.init(zeros))
        return updates, sampling.reshuffled(n, n, key=KEY, epoch=1).indices[0]

    updates, order = jax.device_get(noise_and_order())
    # Independent orders agree at a position with chance 1/50: at 10 of 50 with 5e-8.
    for x in (*updates, *(-x for x in updates)):
        assert np.sum(np.argsort(x) == order) < 10


def noise_of_steps(tx, params, number):
    """The updates of some steps on zero gradients, [step][leaf]."""
    state, out = jax.jit(tx.init)(params), []
    update = jax.jit(tx.update)
    for _ in range(number):
        updates, state = update(params, state)
        out.append([np.asarray(x) for x in jax.tree.leaves(updates)])
    return out


def assert_uncorrelated(vectors):
    """Pairwise uncorrelated: z = 6, false alarm below 2e-9 for each pair."""
    correlations = np.corrcoef(np.stack(vectors))[np.triu_indices(len(vectors), 1)]
    assert np.max(np.abs(correlations)) < 6 / np.sqrt(len(vectors[0]))


@pytest.mark.matrix  # `test_conformance` has it for each generator
@pytest.mark.parametrize("impl", IMPLS)
def test_noise_of_steps_leaves_and_mechanisms_is_uncorrelated(impl):
    n, key = 2000, jax.random.wrap_key_data(WORDS[impl], impl=keys.generator_of(impl))
    params = {"a": np.zeros(n, np.float32), "b": np.zeros(n, np.float32)}
    independent = noise_of_steps(dpjax.add_gaussian_noise(1.0, key=key), params, 3)
    # Without decay a step of the tree has one node, at a coefficient of 1.
    tx = dpjax.tree_momentum(0.0, 1.0, num_steps=12, key=key)
    assert_uncorrelated([*chain(*independent, *noise_of_steps(tx, params, 12))])


def test_tree_nodes_get_distinct_noise():
    level, index = np.mgrid[0:6, 1:65]
    inside = index << level <= 64

    @jax.jit
    @jax.vmap
    def draw(k, i):
        return tree.node_noise(KEY, k, i, jnp.zeros(()), 1.0)

    drawn = draw(level[inside], index[inside])
    # 126 normals of 2^23 values that differ: chance of two alike below 2e-3.
    assert len(np.unique(drawn)) == np.sum(inside)


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["masked", "partition", "prefix"])
def test_masked_transformations_share_no_noise(where):
    n = 2000
    zeros = np.zeros(n, np.float32)
    params = {"a": {"w": zeros}, "b": {"w": zeros}}
    for make in (
        functools.partial(dpjax.add_gaussian_noise, 1.0, key=KEY),
        functools.partial(dpjax.tree_momentum, 0.0, 1.0, num_steps=4, key=KEY),
    ):
        if where == "partition":
            tx = optax.partition({"x": make(), "y": make()}, {"a": "x", "b": "y"})
        else:
            mask = {"a": {"w": True}, "b": {"w": False}}
            if where == "prefix":
                mask = {"a": True, "b": False}
            flipped = jax.tree.map(lambda x: not x, mask)
            tx = optax.chain(optax.masked(make(), mask), optax.masked(make(), flipped))
        parts = noise_of_steps(tx, params, 2)
        whole = noise_of_steps(make(), params, 2)
        assert_uncorrelated([*chain(*parts)])
        np.testing.assert_array_equal(parts, whole)


def test_noise_depends_on_leaf_names_and_not_their_order():
    tx = dpjax.add_gaussian_noise(1.0, key=KEY)
    names, zeros = ["u", "v"], np.zeros(5, np.float32)
    update = jax.jit(lambda params: tx.update(params, tx.init(params))[0])
    out = []
    for order in (names, names[::-1]):
        out.append(update(collections.OrderedDict((name, zeros) for name in order)))
    for name in names:
        np.testing.assert_array_equal(out[0][name], out[1][name])


@functools.total_ordering
class Nameless:
    """A dictionary key whose repr does not identify it."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "key"

    def __lt__(self, other):
        return self.number < other.number


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    def __init__(self, one, other):
        self.children = one, other

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), c) for c in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.matrix
def test_leaves_with_equal_names_share_no_noise():
    zeros = np.zeros(2000, np.float32)
    tx = dpjax.add_gaussian_noise(1.0, key=KEY)

    def noise_leaves(tx, params):
        update = jax.jit(lambda params: tx.update(params, tx.init(params))[0])
        return jax.tree.leaves(update(params))

    for params in ({Nameless(0): zeros, Nameless(1): zeros}, Twins(zeros, zeros)):
        assert_uncorrelated(noise_leaves(tx, params))
        masks = jax.tree.map(lambda _: True, params)
        first, second = jax.tree.structure(masks).unflatten([True, False]), None
        second = jax.tree.map(lambda x: not x, first)
        both = optax.chain(optax.masked(tx, first), optax.masked(tx, second))
        assert_uncorrelated(noise_leaves(both, params))


def test_empty_parameter_trees_are_accepted():
    empty = np.zeros((0, 3), np.float32)
    for tx in (
        dpjax.add_gaussian_noise(1.0, key=KEY),
        dpjax.tree_momentum(0.5, 1.0, num_steps=2, key=KEY),
    ):
        update = jax.jit(lambda params: tx.update(params, tx.init(params))[0])
        for params in ({}, None, {"a": None}, {"a": empty}):
            out = update(params)
            assert jax.tree.structure(out) == jax.tree.structure(params)


@pytest.mark.parametrize("impl", [None, *IMPLS])
def test_random_key_fills_all_words(impl):
    result = [np.asarray(jax.random.key_data(dpjax.random_key(impl))) for _ in range(8)]
    like = jax.random.key(0, impl=keys.generator_of(impl))
    assert dpjax.random_key(impl).dtype == like.dtype
    assert result[0].shape == jax.random.key_data(like).shape
    # A word is equal in all eight keys with chance 2^-224.
    assert np.all(np.any(np.stack(result) != result[0], axis=0))
    dpjax.add_gaussian_noise(1.0, key=dpjax.random_key(impl)).init(None)


def test_random_key_under_jit_raises():
    with pytest.raises(ValueError, match="^random_key must be called outside"):
        jax.jit(lambda: jax.random.normal(dpjax.random_key()))()


@pytest.mark.diagonal
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "make",
    [
        lambda key: dpjax.add_gaussian_noise(1.0, key=key),
        lambda key: dpjax.tree_momentum(0.5, 1.0, num_steps=4, key=key),
    ],
    ids=["independent", "tree"],
)
def test_restored_state_continues_the_noise(make, impl):
    params = {"a": np.zeros(6, np.float32)}
    key = jax.random.wrap_key_data(WORDS[impl], impl=keys.generator_of(impl))
    tx = make(key)
    update = jax.jit(tx.update)
    _, state = update(params, jax.jit(tx.init)(params))

    def is_key(x):
        return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)

    def restore(x, like):
        if is_key(like):
            impl = jax.random.key_impl(like)
            return jax.random.wrap_key_data(jnp.asarray(x), impl=impl)
        return jnp.asarray(x)

    stored = jax.tree.map(
        lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), state
    )
    back = jax.tree.map(restore, stored, state)
    for other in (back, jax.device_get(state)):
        out, expected = update(params, other), update(params, state)
        np.testing.assert_array_equal(out[0]["a"], expected[0]["a"])


@pytest.mark.matrix
def test_vmapped_noise_equals_noise_of_each_key():
    keys = jax.random.split(KEY, 2)

    def draw(key):
        tx = dpjax.add_gaussian_noise(1.0, key=key)
        return tx.update(jnp.zeros(5), tx.init(None))[0]

    together, alone = jax.jit(jax.vmap(draw))(keys), jax.jit(draw)
    for key, out in zip(keys, np.asarray(together), strict=True):
        np.testing.assert_allclose(out, alone(key), rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_stream_of_a_known_key_is_that_of_a_traced_key(impl):
    key = jax.random.wrap_key_data(WORDS[impl], impl=keys.generator_of(impl))
    known = keys.stream(key, "some consumer")
    traced = jax.jit(lambda key: keys.stream(key, "some consumer"))(key)
    assert known.dtype == traced.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(known), jax.random.key_data(traced)
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 4)])
def test_word_pairs_are_both_words_of_each_hash(shape):
    # JAX makes the data of new keys of Threefry from the same hashes.
    key = jax.random.key(5, impl="threefry2x32")
    data = jax.random.key_data(jax.random.split(key, shape))
    first, second = jax.jit(lambda key: keys.word_pairs(key, shape))(key)
    np.testing.assert_array_equal(first, data[..., 0])
    np.testing.assert_array_equal(second, data[..., 1])


@pytest.mark.diagonal("impl")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 37)])
def test_random_words_are_those_of_jax(impl, shape):
    key = jax.random.wrap_key_data(WORDS[impl], impl=keys.generator_of(impl))
    result = jax.jit(lambda key: keys.random_words(key, shape))(key)
    np.testing.assert_array_equal(result, jax.random.bits(key, shape, jnp.uint32))


@pytest.mark.rounding
def test_eager_step_adds_the_noise_of_single_operations():
    sums = np.linspace(-1, 1, 999, dtype=np.float32)
    tx = dpjax.add_gaussian_noise(0.7, key=KEY)
    state = tx.init(sums)
    noisy, after = tx.update(jnp.asarray(sums), state)
    following, current = jax.random.split(state.key)
    (key,) = jax.jit(lambda key: keys.leaf_keys(key, sums))(current)
    stddev = round_up_float32("stddev", 0.7)
    expected = jax.random.normal(key, sums.shape) * jnp.float32(stddev) + sums
    np.testing.assert_array_equal(noisy, expected)
    np.testing.assert_array_equal(
        jax.random.key_data(after.key), jax.random.key_data(following)
    )
