"""Clipped sums against a loop over examples in NumPy float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import Adjacency, clip_and_sum, clipped_grad
from dpjax.clipping._clip import clip


def loss(params, example):
    x, y = example
    hidden = jnp.tanh(x @ params["w"].astype(x.dtype))
    return jnp.sum((hidden * params["v"]["u"] - y) ** 2)


def make_problem(batch, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(5, 3)), dtype),
        "v": {"u": jnp.asarray(rng.normal(size=3), jnp.float32)},
    }
    x = jnp.asarray(rng.normal(size=(batch, 5)) * rng.uniform(0.01, 3, (batch, 1)))
    return params, (x, jnp.asarray(rng.normal(size=batch)))


def reference(params, data, clip_norm, keep):
    """The clipped sum, one example after the other."""
    total = jax.tree.map(lambda p: np.zeros(p.shape), params)
    norms = []
    for i in range(len(keep)):
        gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[i], data))
        gradient = jax.tree.map(lambda g: np.asarray(g, np.float64), gradient)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
        norms.append(norm)
        if keep[i] and np.isfinite(norm):
            scale = min(1.0, clip_norm / norm)
            total = jax.tree.map(lambda t, g: t + scale * g, total, gradient)
    return total, np.array(norms)


def assert_close(tree, other, tolerance):
    chex.assert_trees_all_close(tree, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("clip_norm", [0.05, 1.7, 1e4])
def test_sum_of_clipped_gradients(clip_norm, microbatch_size):
    params, data = make_problem(7)
    keep = np.array([1, 1, 0, 1, 1, 0, 1], bool)
    fn = jax.jit(clipped_grad(loss, clip_norm, microbatch_size=microbatch_size))
    total, per_example = fn(params, data, mask=jnp.asarray(keep))
    expected, norms = reference(params, data, clip_norm, keep)
    # float32 rounding of gradients and norms, which are rounded up.
    assert_close(total, expected, 7 * min(clip_norm, norms.max()) * 3e-5)
    np.testing.assert_allclose(per_example.norm, norms, rtol=1e-5)
    losses = jax.vmap(loss, (None, 0))(params, data)
    np.testing.assert_allclose(per_example.loss, losses, rtol=1e-6)
    assert per_example.aux == ()


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_microbatches_of_any_size_agree(batch, microbatch_size):
    params, data = make_problem(batch)
    whole = clipped_grad(loss, 0.7)(params, data)
    parts = clipped_grad(loss, 0.7, microbatch_size=microbatch_size)(params, data)
    assert_close(whole, parts, 1e-5)


def test_memory_is_bounded_by_the_microbatch():
    def big(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    shape = (64, 256), (256, 512)
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shape)

    def temporaries(microbatch_size):
        fn = clipped_grad(big, 1.0, microbatch_size=microbatch_size, engine="vmap")
        fn = jax.jit(fn)
        analysis = fn.lower(w, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    per_example = 4 * 256 * 512
    assert temporaries(4) < (4 + 8) * per_example
    assert temporaries(None) > 32 * per_example


@settings(max_examples=40, deadline=None)
@given(
    st.integers(-12, 12).map(lambda e: 10.0**e),
    st.integers(-18, 18).map(lambda e: 10.0**e),
    st.integers(0, 2**31),
)
def test_a_clipped_norm_never_exceeds_the_bound(clip_norm, scale, seed):
    rng = np.random.default_rng(seed)
    gradient = [(rng.normal(size=n) * scale).astype(np.float32) for n in (1, 17, 3000)]
    bounded, _ = jax.jit(clip)(gradient, clip_norm)
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in bounded))
    assert norm <= np.float32(clip_norm)
    if np.max(np.abs(gradient[2])) / clip_norm < 1e17:
        raw = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in gradient))
        assert norm >= min(raw, clip_norm) * (1 - 1e-4)


def test_a_large_flat_gradient_stays_within_the_bound():
    gradient = jnp.full(4_000_000, 0.1, jnp.float32)
    bounded, _ = clip(gradient, 3.0)
    assert np.linalg.norm(np.asarray(bounded, np.float64)) <= 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_bad_example_contributes_zero(bad, microbatch_size):
    params, (x, y) = make_problem(5)
    fn = clipped_grad(loss, 1.3, microbatch_size=microbatch_size)
    good, _ = fn(params, (x, y), mask=jnp.array([True, True, False, True, True]))
    poisoned, per_example = fn(params, (x.at[2].set(bad), y.at[2].set(bad)))
    assert_close(poisoned, good, 1e-6)
    assert not np.isfinite(per_example.norm[2])


def test_zero_gradients_stay_zero():
    fn = clipped_grad(lambda w, x: jnp.sum(0.0 * w * x), 1.0)
    total, _ = fn(jnp.ones(3), jnp.ones((4, 3)))
    np.testing.assert_array_equal(total, 0)


def test_half_precision_sums_in_float32():
    # 4096 contributions of 2⁻⁹ would stop growing at 1 in bfloat16.
    def tiny(w, x):
        return (w * x).astype(jnp.float32)

    fn = clipped_grad(tiny, 1.0)
    total, _ = fn(jnp.ones((), jnp.bfloat16), jnp.full(4096, 2.0**-9, jnp.bfloat16))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, 8.0)


def test_several_arguments_share_one_norm_and_aux_comes_along():
    def pair(a, example, b):
        return jnp.dot(a, example["x"]) + b * example["y"], example["y"] * 2

    example = {"x": jnp.array([[3.0, 0.0], [0.1, 0.0]]), "y": jnp.array([4.0, 0.0])}
    fn = clipped_grad(pair, 1.0, argnums=(0, 2), has_aux=True)
    (a, b), per_example = fn(jnp.zeros(2), example, jnp.zeros(()))
    np.testing.assert_allclose(per_example.norm, [5.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(a, [0.7, 0.0], atol=1e-4)
    np.testing.assert_allclose(b, 0.8, atol=1e-4)
    np.testing.assert_allclose(per_example.aux, [8.0, 0.0])


def test_keys_are_batch_arguments():
    def noisy(w, x, key):
        return jnp.sum(w * x * jax.random.bernoulli(key, 0.5, x.shape))

    keys = jax.random.split(jax.random.key(0), 5)
    arguments = (jnp.ones(3), jnp.ones((5, 3)), keys)
    fn = [
        clipped_grad(noisy, 0.9, batch_argnums=(1, 2), microbatch_size=m)
        for m in (None, 2)
    ]
    assert_close(fn[0](*arguments), fn[1](*arguments), 1e-6)


def test_sensitivity_travels_with_the_function():
    fn = clipped_grad(loss, 2.5)
    assert fn.sensitivity(Adjacency.ADD_REMOVE) == 2.5
    assert fn.sensitivity(Adjacency.ZERO_OUT) == 2.5
    assert fn.sensitivity(Adjacency.REPLACE) == 5.0
    with pytest.raises(ValueError, match="^adjacency must"):
        fn.sensitivity("replace")


def test_sensitivity_is_attained_and_never_exceeded():
    # One example flipped from one side to the other moves the sum by 2C.
    fn = jax.jit(clipped_grad(lambda w, x: jnp.dot(w, x), 0.3))
    x = jnp.array([[10.0, 0.0], [0.0, 1.0]])
    moved = fn(jnp.zeros(2), x)[0] - fn(jnp.zeros(2), x.at[0].multiply(-1))[0]
    distance = float(jnp.linalg.norm(moved))
    assert 0.6 * (1 - 1e-4) < distance <= 0.6


def test_clip_and_sum_is_the_same_sum_and_composes():
    params, data = make_problem(6)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, data)
    tx = optax.chain(clip_and_sum(0.4), optax.scale(2.0))
    total, _ = jax.jit(tx.update)(gradients, tx.init(params))
    expected, _ = clipped_grad(loss, 0.4)(params, data)
    assert_close(total, jax.tree.map(lambda g: 2 * g, expected), 1e-5)


def test_clip_norm_may_be_traced():
    params, data = make_problem(3)
    traced = jax.jit(lambda c: clipped_grad(loss, c)(params, data)[0])
    assert_close(traced(0.6), clipped_grad(loss, 0.6)(params, data)[0], 1e-6)
    injected = optax.inject_hyperparams(clip_and_sum)(clip_norm=0.6)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, data)
    total, _ = injected.update(gradients, injected.init(params), params)
    assert_close(total, traced(0.6), 1e-6)


@pytest.mark.parametrize(
    ("engine", "microbatch_size"),
    [
        ("bookkeeping", None),
        ("bookkeeping", 4),
        ("ghost", None),
        ("vmap", None),
        ("vmap", 4),
        ("vmap", 3),
    ],
)
def test_a_batch_may_be_spread_over_devices(engine, microbatch_size):
    params, data = make_problem(8)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    fn = jax.jit(
        clipped_grad(loss, 0.7, microbatch_size=microbatch_size, engine=engine)
    )
    here, _ = fn(params, data)
    shards = jax.device_put(params, everywhere), jax.device_put(data, spread)
    there, per_example = fn(*shards)
    assert_close(here, there, 1e-5)
    if microbatch_size is None:
        # Devices send the sums alone.
        assert per_example.norm.sharding.is_equivalent_to(spread, 1)
        compiled = fn.lower(*shards).compile().as_text()
        assert "all-reduce" in compiled
        assert "all-gather" not in compiled


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_devices_may_sum_their_parts(engine):
    """In shard_map a derivative by shared parameters would be a sum over devices."""
    params, data = make_problem(8)
    keep = np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    fn = clipped_grad(loss, 0.7, engine=engine)

    def part(params, data, mask):
        total, per_example = fn(params, data, mask=mask)
        return jax.lax.psum(total, "data"), per_example.norm

    spread = jax.P("data")
    summed = jax.shard_map(
        part, mesh=mesh, in_specs=(jax.P(), spread, spread), out_specs=(jax.P(), spread)
    )
    total, norm = jax.jit(summed)(params, data, jnp.asarray(keep))
    expected, norms = reference(params, data, 0.7, keep)
    assert_close(total, expected, 8 * 0.7 * 3e-5)
    np.testing.assert_allclose(norm, norms, rtol=1e-5)


def test_static_mistakes_name_the_argument():
    params, (x, y) = make_problem(4)
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="^clip_norm must"):
            clipped_grad(loss, bad)
        with pytest.raises(ValueError, match="^clip_norm must"):
            clip_and_sum(bad)
    with pytest.raises(ValueError, match="^engine must"):
        clipped_grad(loss, 1.0, engine="magic")
    with pytest.raises(ValueError, match="^microbatch_size must"):
        clipped_grad(loss, 1.0, microbatch_size=0)
    with pytest.raises(ValueError, match="^batch_argnums must"):
        clipped_grad(loss, 1.0, batch_argnums=0)
    with pytest.raises(ValueError, match="^argnums must"):
        clipped_grad(loss, 1.0, argnums=(0, 0))
    fn = clipped_grad(loss, 1.0)
    for data in ((x, y[:3]), (x[:0], y[:0]), (x, 1.0), ()):
        with pytest.raises(ValueError, match=r"^the batch arguments \(1,\) must"):
            fn(params, data)
    with pytest.raises(ValueError, match="argument 1"):
        fn(params)
    for mask in (jnp.ones(3, bool), jnp.ones(4)):
        with pytest.raises(ValueError, match="^mask must"):
            fn(params, (x, y), mask=mask)
    for bad_loss in (
        lambda p, e: e[0],
        lambda p, e: (loss(p, e), 1),
        lambda p, e: jnp.argmax(e[0]),
        lambda p, e: 1j * loss(p, e),
    ):
        with pytest.raises(ValueError, match="^loss_fn must return one"):
            clipped_grad(bad_loss, 1.0)(params, (x, y))
    tx = clip_and_sum(1.0)
    with pytest.raises(ValueError, match="^updates must"):
        tx.update({"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))}, tx.init(None))
    with pytest.raises(ValueError, match="^gradients must be real"):
        tx.update(jnp.ones((2, 3), jnp.complex64), tx.init(None))
