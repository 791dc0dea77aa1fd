"""Independent and tree noise: variances, keys, and the two buffers.

Statistical tests use fixed keys. A sample variance of n normals has relative standard
deviation sqrt(2/n); each comparison allows z of them, with the chance of a false alarm
over all comparisons of a test stated beside z.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import add_gaussian_noise, tree_momentum
from dpjax.noise import tree
from dpjax.noise._gaussian import gamma_norm_like

KEY = jax.random.wrap_key_data(np.array([0, 20], np.uint32))


def covering_intervals(start, end):
    """Minimal dyadic cover by exhaustive search, the reference for `compose`."""
    dyadic = {
        (a * 2**k + 1, (a + 1) * 2**k)
        for k in range(end.bit_length())
        for a in range(end)
    }
    cover, position = [], start
    while position <= end:
        best = max(z for y, z in dyadic if y == position and z <= end)
        cover.append((position, best))
        position = best + 1
    return tuple(cover)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60))
def test_compose_returns_the_minimal_dyadic_cover(start, length):
    assert tree.compose(start, start + length) == covering_intervals(
        start, start + length
    )


def test_compose_of_invalid_interval_raises():
    for start, end in [(0, 3), (4, 3), (1.0, 2)]:
        with pytest.raises(ValueError, match="must be"):
            tree.compose(start, end)


@pytest.mark.parametrize("decay", [0.0, 0.7, 0.99])
def test_prefix_variance_equals_sum_over_cover(decay):
    steps = np.array([1, 2, 3, 7, 8, 9, 100, 1023, 1024, 1025])
    expected = [
        sum(decay ** (2 * (int(t) - z)) for _, z in tree.compose(1, int(t)))
        for t in steps
    ]
    np.testing.assert_allclose(tree.prefix_variance(steps, decay), expected, rtol=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize("stddev", [0.3, 25.0])
def test_gaussian_noise_has_the_stated_scale(stddev):
    n = 400_000
    tx = add_gaussian_noise(stddev, key=KEY)
    zeros = {"a": np.zeros(n, np.float32), "b": np.zeros((n // 2, 2), np.float32)}

    @jax.jit
    def two_updates(zeros):
        first, state = tx.update(zeros, tx.init(zeros))
        return first, tx.update(zeros, state)[0]

    first, second = jax.device_get(two_updates(zeros))
    samples = [first["a"], first["b"].ravel(), second["a"]]
    for x in samples:  # z = 5 in 6 comparisons: false alarm below 4e-6
        assert abs(np.var(x) / stddev**2 - 1) < 5 * np.sqrt(2 / n)
        assert abs(np.mean(x)) < 5 * stddev / np.sqrt(n)
    correlations = np.corrcoef(np.stack(samples))[np.triu_indices(3, 1)]
    assert np.all(np.abs(correlations) < 5 / np.sqrt(n))  # independent keys


def test_noise_is_added_before_casting_down():
    tx = add_gaussian_noise(1e-3, key=KEY)
    update = jax.jit(lambda sums: tx.update(sums, tx.init(None))[0])
    wide = np.asarray(update(np.zeros(4096, np.float32)))
    narrow = update(np.ones(4096, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, (1 + wide).astype(jnp.bfloat16))


def run_updates(tx, updates, steps):
    def step(state, _):
        out, state = tx.update(updates, state)
        return state, out

    return jax.jit(lambda: jax.lax.scan(step, tx.init(updates), length=steps)[1])()


@pytest.mark.diagonal
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.97])
@pytest.mark.parametrize("stddev", [0.4, 12.0])
def test_tree_noise_has_the_stated_variance_at_every_step(decay, stddev):
    n, num_steps = 20_000, 33
    tx = tree_momentum(decay, stddev, num_steps=num_steps, key=KEY)
    noise = np.asarray(run_updates(tx, np.zeros(n, np.float32), num_steps), np.float64)
    steps = np.arange(1, num_steps + 1)
    variance = (stddev * (1 - decay)) ** 2 * tree.prefix_variance(steps, decay)
    # z = 5.5 at 33 steps: false alarm below 2e-6. Among them 2^k − 1, 2^k, 2^k + 1.
    relative = noise.var(axis=1) / variance - 1
    assert np.max(np.abs(relative)) < 5.5 * np.sqrt(2 / n)


@pytest.mark.slow
def test_tree_noise_has_the_stated_variance_over_1025_steps():
    n, num_steps, decay, stddev = 20_000, 1025, 0.97, 2.5
    tx = tree_momentum(decay, stddev, num_steps=num_steps, key=KEY)

    def step(state, _):
        out, state = tx.update(jnp.zeros(n), state)
        return state, jnp.var(out)

    _, measured = jax.lax.scan(step, tx.init(jnp.zeros(n)), length=num_steps)
    steps = np.arange(1, num_steps + 1)
    variance = (stddev * (1 - decay)) ** 2 * tree.prefix_variance(steps, decay)
    # z = 5.5 at 1025 steps: false alarm below 4e-5
    assert np.max(np.abs(measured / variance - 1)) < 5.5 * np.sqrt(2 / n)


def test_tree_noise_has_the_covariance_of_shared_nodes():
    n, num_steps, decay, stddev = 100_000, 12, 0.8, 3.0
    tx = tree_momentum(decay, stddev, num_steps=num_steps, key=KEY)
    noise = np.asarray(run_updates(tx, np.zeros(n, np.float32), num_steps), np.float64)
    weights = np.zeros((num_steps, 200))
    nodes = {}
    for t in range(1, num_steps + 1):
        for node in tree.compose(1, t):
            place = nodes.setdefault(node, len(nodes))
            weights[t - 1, place] = (1 - decay) * stddev * decay ** (t - node[1])
    assert len(nodes) == num_steps  # one new node a step
    expected = weights @ weights.T
    scale = np.sqrt(np.diag(expected))
    error = (noise @ noise.T / n - expected) / np.outer(scale, scale)
    # An entry has standard deviation at most sqrt(2/n); z = 6 in 78: below 2e-7.
    assert np.max(np.abs(error)) < 6 * np.sqrt(2 / n)


@pytest.mark.matrix  # `test_correlated_noise` has one
@pytest.mark.parametrize(
    ("num_steps", "decay"),
    [
        pytest.param(1, 0.5, marks=pytest.mark.matrix),
        pytest.param(2, 0.0, marks=pytest.mark.matrix),
        (37, 0.9),
        pytest.param(64, 0.99, marks=pytest.mark.matrix),
    ],
)
def test_buffered_and_recomputed_noise_are_equal(num_steps, decay):
    params = {
        "a": np.zeros((3, 2), np.float32),
        "b": [np.zeros(4, jnp.bfloat16), np.zeros((), np.float32)],
    }
    out = [
        run_updates(
            tree_momentum(decay, 1.7, num_steps=num_steps, key=KEY, buffer=buffer),
            params,
            num_steps,
        )
        for buffer in ("stored", "regenerate")
    ]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.asarray(x, np.float32),
            np.asarray(y, np.float32),
            rtol=1e-2 if x.dtype == jnp.bfloat16 else 1e-5,
            atol=1e-5,
        ),
        *out,
    )
    assert out[0]["b"][0].dtype == jnp.bfloat16


def test_noise_free_momentum_equals_the_weighted_sum():
    gradients = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    tx = tree_momentum(0.8, 0.0, num_steps=20, key=KEY)

    def step(state, g):
        out, state = tx.update(g, state)
        return state, out

    out = jax.jit(lambda gs: jax.lax.scan(step, tx.init(gs[0]), gs)[1])(gradients)
    out = np.asarray(out)
    for t in range(1, 21):
        weights = 0.2 * 0.8 ** (t - np.arange(1, t + 1))
        np.testing.assert_allclose(out[t - 1], weights @ gradients[:t], atol=1e-6)


def test_equal_leaves_get_uncorrelated_noise():
    params = [np.zeros(1000, np.float32)] * 2
    for tx in (
        add_gaussian_noise(2.0, key=KEY),
        tree_momentum(0.5, 2.0, num_steps=4, key=KEY),
    ):
        a, b = jax.jit(lambda params: tx.update(params, tx.init(params))[0])(params)
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(1000)


@pytest.mark.diagonal
@pytest.mark.parametrize("buffer", ["stored", "regenerate"])
def test_updates_beyond_num_steps_raise_or_are_nan(buffer):
    tx = tree_momentum(0.5, 1.0, num_steps=3, key=KEY, buffer=buffer)
    ones = np.ones(2, np.float32)
    out = np.asarray(run_updates(tx, ones, 6))
    assert np.all(np.isfinite(out[:3]))
    assert np.all(np.isnan(out[3:]))
    state, update = jax.jit(tx.init)(ones), jax.jit(tx.update)
    for _ in range(3):
        _, state = update(ones, state)
    # The state is a concrete array, so this raises before anything is computed.
    with pytest.raises(ValueError, match="num_steps is 3"):
        jax.eval_shape(lambda: tx.update(ones, state))


@pytest.mark.diagonal
@pytest.mark.parametrize("buffer", ["stored", "regenerate"])
def test_changed_hyperparameters_give_nan_updates(buffer):
    factory = optax.inject_hyperparams(
        tree_momentum, static_args=("num_steps", "buffer", "key")
    )
    tx = factory(0.9, 1.3, num_steps=8, key=KEY, buffer=buffer)
    ones = np.ones(2, np.float32)
    state = jax.jit(tx.init)(ones)
    update = jax.jit(tx.update)
    plain = tree_momentum(0.9, 1.3, num_steps=8, key=KEY, buffer=buffer)
    out, state = update(ones, state, ones)
    expected = jax.jit(lambda ones: plain.update(ones, plain.init(ones))[0])(ones)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    for name in ("decay", "stddev"):
        half = np.asarray(state.hyperparams[name]) * np.float32(0.5)
        changed = {**state.hyperparams, name: half}
        out, _ = update(ones, state._replace(hyperparams=changed), ones)
        assert np.all(np.isnan(out))


@pytest.mark.matrix  # `test_conformance` has meshes
@pytest.mark.parametrize("buffer", ["stored", "regenerate"])
def test_noise_does_not_depend_on_the_sharding(buffer):
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,))
    params = np.zeros((8, 3), np.float32)
    spread = jax.device_put(params, jax.NamedSharding(mesh, jax.P("model")))
    tx = tree_momentum(0.9, 1.3, num_steps=5, key=KEY, buffer=buffer)
    np.testing.assert_allclose(
        run_updates(tx, params, 5), run_updates(tx, spread, 5), rtol=1e-6
    )


def test_keys_survive_donation_and_are_required():
    key, ones = jax.random.wrap_key_data(np.arange(2, dtype=np.uint32)), np.ones(3)
    ones = ones.astype(np.float32)
    for make in (
        lambda k: add_gaussian_noise(1.0, key=k),
        lambda k: tree_momentum(0.5, 1.0, num_steps=9, key=k),
    ):
        tx = make(key)
        init, update = jax.jit(tx.init), jax.jit(tx.update, donate_argnums=1)
        _, state = update(ones, init(ones))
        update(ones, state)
        update(ones, init(ones))
        assert not key.is_deleted()
        words = np.zeros((2, 2), np.uint32)
        for bad in (None, 0, jnp.asarray(words[0]), jax.random.wrap_key_data(words)):
            with pytest.raises(ValueError, match="^key must be one typed JAX key"):
                make(bad)


def test_invalid_arguments_raise():
    schedule = optax.constant_schedule(1.0)
    for bad in (
        -1.0,
        np.inf,
        np.nan,
        schedule,
        None,
        "1",
        1j,
        jnp.asarray(np.ones(2, np.float32)),
        1e-40,
        1e40,
    ):
        with pytest.raises(ValueError, match="^stddev must"):
            add_gaussian_noise(bad, key=KEY)
        with pytest.raises(ValueError, match="^stddev must"):
            tree_momentum(0.5, bad, num_steps=3, key=KEY)
    for bad in (-0.1, 1.0, 2.0, np.nan, schedule, None, "0.9", np.ones(2) / 2):
        with pytest.raises(ValueError, match="^decay must"):
            tree_momentum(bad, 1.0, num_steps=3, key=KEY)
    for bad in (0, -3, 2.0, True, 2**31):
        with pytest.raises(ValueError, match="^num_steps must"):
            tree_momentum(0.5, 1.0, num_steps=bad, key=KEY)
    with pytest.raises(ValueError, match="^buffer must"):
        tree_momentum(0.5, 1.0, num_steps=3, key=KEY, buffer="none")
    injected = optax.inject_hyperparams(tree_momentum)(0.5, 1.0, num_steps=3, key=KEY)
    with pytest.raises(ValueError, match="^num_steps must be a static"):
        injected.init(np.ones(2, np.float32))
    for dtype in (jnp.complex64, jnp.int32, bool):
        with pytest.raises(ValueError, match="^gradients must be real"):
            gamma_norm_like(KEY, np.ones(2, dtype), 1.0)
        for tx in (
            add_gaussian_noise(1.0, key=KEY),
            tree_momentum(0.5, 1.0, num_steps=3, key=KEY),
        ):
            with pytest.raises(ValueError, match="^gradients must be real"):
                jax.eval_shape(
                    lambda u, w, tx=tx: tx.update(u, tx.init(w)),
                    np.ones(2, dtype),
                    np.ones(2, np.float32),
                )


@pytest.mark.matrix
def test_float64_parameters_get_float64_noise(x64):
    params = np.zeros(10)
    for tx in (
        add_gaussian_noise(1.0, key=KEY),
        tree_momentum(0.5, 1.0, num_steps=2, key=KEY),
    ):
        out = jax.jit(lambda params: tx.update(params, tx.init(params))[0])(params)
        assert out.dtype == jnp.float64
        assert np.any(np.asarray(out) != np.asarray(out, np.float32))
