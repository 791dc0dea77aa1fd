"""Clipped sums against a loop over examples in NumPy float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import Adjacency, clip_and_sum, clipped_grad
from dpjax.clipping._clip import clip, clip_scales


def loss(params, example):
    x, y = example
    hidden = jnp.tanh(x @ params["w"].astype(x.dtype))
    return jnp.sum((hidden * params["v"]["u"] - y) ** 2)


def make_problem(batch, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": rng.normal(size=(5, 3)).astype(dtype),
        "v": {"u": rng.normal(size=3).astype(np.float32)},
    }
    x = rng.normal(size=(batch, 5)) * rng.uniform(0.01, 3, (batch, 1))
    return params, (x.astype(np.float32), rng.normal(size=batch).astype(np.float32))


@jax.jit
def gradients_and_losses(params, data):
    """One example after the other, without `jax.vmap`."""

    def one(example):
        value, gradient = jax.value_and_grad(loss)(params, example)
        return gradient, value

    return jax.lax.map(one, data)


def reference_clipped_sum(params, data, clip_norm, keep):
    """The clipped sum, one example after the other."""
    total = jax.tree.map(lambda p: np.zeros(p.shape), params)
    gradients = jax.device_get(gradients_and_losses(params, data)[0])
    norms = []
    for i in range(len(keep)):
        gradient = jax.tree.map(lambda g: np.asarray(g[i], np.float64), gradients)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
        norms.append(norm)
        if keep[i] and np.isfinite(norm):
            scale = min(1.0, clip_norm / norm)
            total = jax.tree.map(lambda t, g: t + scale * g, total, gradient)
    return total, np.array(norms)


def assert_close(tree, other, tolerance):
    chex.assert_trees_all_close(tree, other, atol=tolerance, rtol=0)


@pytest.mark.diagonal("microbatch_size")
@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("clip_norm", [0.05, 1.7, 1e4])
def test_sum_of_clipped_gradients_matches_reference(clip_norm, microbatch_size):
    params, data = make_problem(7)
    keep = np.array([1, 1, 0, 1, 1, 0, 1], bool)
    fn = jax.jit(clipped_grad(loss, clip_norm, microbatch_size=microbatch_size))
    total, per_example = fn(params, data, mask=keep)
    expected, norms = reference_clipped_sum(params, data, clip_norm, keep)
    # float32 rounding of gradients and norms, which are rounded up.
    assert_close(total, expected, 7 * min(clip_norm, norms.max()) * 3e-5)
    np.testing.assert_allclose(per_example.norm, norms, rtol=1e-5)
    losses = gradients_and_losses(params, data)[1]
    np.testing.assert_allclose(per_example.loss, losses, rtol=1e-6)
    assert per_example.aux == ()


@pytest.mark.diagonal("microbatch_size")
@pytest.mark.parametrize("batch", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_sum_is_invariant_to_microbatch_size(batch, microbatch_size):
    params, data = make_problem(batch)

    @jax.jit
    def whole_and_microbatched(params, data):
        return [
            clipped_grad(loss, 0.7, microbatch_size=size)(params, data)
            for size in (None, microbatch_size)
        ]

    whole, parts = whole_and_microbatched(params, data)
    assert_close(whole, parts, 1e-5)


def test_memory_is_bounded_by_the_microbatch():
    def tanh_loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    shape = (64, 256), (256, 512)
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shape)

    def temporaries(microbatch_size):
        fn = clipped_grad(
            tanh_loss, 1.0, microbatch_size=microbatch_size, engine="vmap"
        )
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
def test_clipped_norm_never_exceeds_clip_norm(clip_norm, scale, seed):
    rng = np.random.default_rng(seed)
    gradient = [(rng.normal(size=n) * scale).astype(np.float32) for n in (1, 17, 3000)]
    bounded, _ = jax.jit(clip)(gradient, clip_norm)
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in bounded))
    assert norm <= np.float32(clip_norm)
    if np.max(np.abs(gradient[2])) / clip_norm < 1e17:
        raw = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in gradient))
        assert norm >= min(raw, clip_norm) * (1 - 1e-4)


def test_clip_norm_may_be_an_integer_beyond_32_bits():
    params, data = make_problem(3)

    def sums():
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, data)
        for bound in (2**31, 10**25, float(2**31)):
            transform = clip_and_sum(bound)
            yield clipped_grad(loss, bound)(params, data)[0]
            yield transform.update(gradients, transform.init(params), params)[0]

    *totals, expected, _ = jax.jit(lambda: list(sums()))()
    for total in totals:
        assert_close(total, expected, 1e-6)


def test_narrow_clip_norm_reserves_a_part_for_rounding():
    # In bfloat16, C / (1 + h) would be rounded to C.
    def sums(bound):
        fn = clipped_grad(jnp.vdot, bound, arithmetic="discrete", engine="vmap")
        return fn(np.ones(1, np.float32), np.float32([[1e3], [1.0]]))[0]

    bounds = jnp.bfloat16(1.5), np.float16(1.5), jnp.float16(1.5), 1.5
    *totals, expected = jax.jit(lambda: [sums(bound) for bound in bounds])()
    assert expected < 2.5 - 4e-6
    for total in totals:
        np.testing.assert_allclose(total, expected, rtol=4e-7)


def test_integer_clip_norm_does_not_widen_the_computation():
    params, data = make_problem(3)
    with jax.enable_x64(True):
        for bound in (2, np.int64(2), np.array(2), jnp.asarray(2, jnp.int4)):
            fn = clipped_grad(loss, bound)
            _, per_example = jax.eval_shape(lambda *x: fn(*x), params, data)
            assert per_example.norm.dtype == jnp.float32


def test_clipped_norm_of_large_constant_gradient_is_within_bound():
    gradient = np.full(4_000_000, 0.1, np.float32)
    bounded, _ = jax.jit(clip)(gradient, 3.0)
    assert np.linalg.norm(np.asarray(bounded, np.float64)) <= 3.0


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_nonfinite_example_contributes_zero(microbatch_size):
    params, (x, y) = make_problem(5)
    fn = jax.jit(clipped_grad(loss, 1.3, microbatch_size=microbatch_size))
    good, _ = fn(params, (x, y), mask=np.array([True, True, False, True, True]))
    for bad in (np.nan, np.inf, -np.inf, 1e38):
        x[2], y[2] = bad, bad
        poisoned, per_example = fn(params, (x, y), mask=np.ones(5, bool))
        assert_close(poisoned, good, 1e-6)
        assert not np.isfinite(np.asarray(per_example.norm)[2])


def test_zero_gradients_stay_zero():
    fn = clipped_grad(lambda w, x: jnp.sum(0.0 * w * x), 1.0)
    total, _ = jax.jit(fn)(np.ones(3, np.float32), np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(total, 0)


def test_half_precision_sums_in_float32():
    # 4096 contributions of 2⁻⁹ would stop growing at 1 in bfloat16.
    def product_loss(w, x):
        return (w * x).astype(jnp.float32)

    fn = clipped_grad(product_loss, 1.0)
    one, examples = np.ones((), jnp.bfloat16), np.full(4096, 2.0**-9, jnp.bfloat16)
    total, _ = jax.jit(fn)(one, examples)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, 8.0)


def test_several_arguments_share_one_norm_and_aux_is_returned():
    def pair(a, example, b):
        return jnp.dot(a, example["x"]) + b * example["y"], example["y"] * 2

    x = np.array([[3.0, 0.0], [0.1, 0.0]], np.float32)
    example = {"x": x, "y": np.array([4.0, 0.0], np.float32)}
    fn = clipped_grad(pair, 1.0, argnums=(0, 2), has_aux=True)
    start = np.zeros(2, np.float32), example, np.zeros((), np.float32)
    (a, b), per_example = jax.jit(fn)(*start)
    np.testing.assert_allclose(per_example.norm, [5.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(a, [0.7, 0.0], atol=1e-4)
    np.testing.assert_allclose(b, 0.8, atol=1e-4)
    np.testing.assert_allclose(per_example.aux, [8.0, 0.0])


def test_keys_may_be_batch_arguments():
    def noisy(w, x, key):
        return jnp.sum(w * x * jax.random.bernoulli(key, 0.5, x.shape))

    @jax.jit
    def whole_and_microbatched(w, x):
        keys = jax.random.split(jax.random.key(0), 5)
        return [
            clipped_grad(noisy, 0.9, batch_argnums=(1, 2), microbatch_size=m)(
                w, x, keys
            )
            for m in (None, 2)
        ]

    assert_close(
        *whole_and_microbatched(np.ones(3, np.float32), np.ones((5, 3), np.float32)),
        1e-6,
    )


def test_clipped_grad_states_its_sensitivity():
    fn = clipped_grad(loss, 2.5)
    assert fn.sensitivity(Adjacency.ADD_REMOVE) == 2.5
    assert fn.sensitivity(Adjacency.ZERO_OUT) == 2.5
    assert fn.sensitivity(Adjacency.REPLACE) == 5.0
    with pytest.raises(ValueError, match="^adjacency must"):
        fn.sensitivity("replace")


def test_sensitivity_is_attained_and_never_exceeded():
    # One example flipped from one side to the other moves the sum by 2C.
    fn = jax.jit(clipped_grad(lambda w, x: jnp.dot(w, x), 0.3))
    x = np.array([[10.0, 0.0], [0.0, 1.0]], np.float32)
    w, flipped = np.zeros(2, np.float32), x * np.array([[-1], [1]], np.float32)
    difference = np.asarray(fn(w, x)[0]) - np.asarray(fn(w, flipped)[0])
    distance = float(np.linalg.norm(difference))
    assert 0.6 * (1 - 1e-4) < distance <= 0.6


def test_clip_and_sum_equals_clipped_grad_and_chains():
    params, data = make_problem(6)
    tx = optax.chain(clip_and_sum(0.4), optax.scale(2.0))

    @jax.jit
    def chained_and_clipped_sums(params, data):
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, data)
        total, _ = tx.update(gradients, tx.init(params))
        return total, clipped_grad(loss, 0.4)(params, data)[0]

    total, expected = jax.device_get(chained_and_clipped_sums(params, data))
    assert_close(total, jax.tree.map(lambda g: 2 * g, expected), 1e-5)


def test_group_without_leaves_changes_nothing():
    params, data = make_problem(5)
    clip_norm = {"v": 0.5, "w": 0.2}
    more = clip_norm | {"frozen": 1.0}

    @jax.jit
    def sums(params, data):
        total, _ = clipped_grad(loss, clip_norm, engine="vmap")(params, data)
        frozen = params | {"frozen": {}}
        return total, clipped_grad(loss, more, engine="vmap")(frozen, data)

    total, (result, per_example) = sums(params, data)
    assert_close(total | {"frozen": {}}, result, 1e-6)
    assert per_example.norm.shape == (5,)


def test_clip_norm_may_be_traced():
    params, data = make_problem(3)
    injected = optax.inject_hyperparams(clip_and_sum)(clip_norm=0.6)

    @jax.jit
    def traced_static_and_injected(c):
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, data)
        total, _ = injected.update(gradients, injected.init(params), params)
        traced, static = (clipped_grad(loss, x)(params, data)[0] for x in (c, 0.6))
        return traced, static, total

    traced, static, total = traced_static_and_injected(0.6)
    assert_close(traced, static, 1e-6)
    assert_close(total, traced, 1e-6)


@pytest.mark.diagonal  # `test_conformance` has each engine in the default suite
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
def test_sharded_batch_gives_the_same_sum(engine, microbatch_size):
    params, data = make_problem(8)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    fn = jax.jit(
        clipped_grad(loss, 0.7, microbatch_size=microbatch_size, engine=engine)
    )
    local, _ = fn(params, data)
    shards = jax.device_put(params, everywhere), jax.device_put(data, spread)
    compiled = fn.lower(*shards).compile()
    sharded, per_example = compiled(*shards)
    assert_close(local, sharded, 1e-5)
    if microbatch_size is None:
        # Devices send the sums alone.
        assert per_example.norm.sharding.is_equivalent_to(spread, 1)
        text = compiled.as_text()
        assert "all-reduce" in text
        assert "all-gather" not in text


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_local_sums_in_shard_map_add_up_to_the_clipped_sum(engine):
    """In shard_map a gradient by replicated parameters would be summed over devices."""
    params, data = make_problem(8)
    keep = np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    fn = clipped_grad(loss, 0.7, engine=engine)

    def local_sum(params, data, mask):
        total, per_example = fn(params, data, mask=mask)
        return jax.lax.psum(total, "data"), per_example.norm

    spread = jax.P("data")
    summed = jax.shard_map(
        local_sum,
        mesh=mesh,
        in_specs=(jax.P(), spread, spread),
        out_specs=(jax.P(), spread),
    )
    total, norm = jax.jit(summed)(params, data, keep)
    expected, norms = reference_clipped_sum(params, data, 0.7, keep)
    assert_close(total, expected, 8 * 0.7 * 3e-5)
    np.testing.assert_allclose(norm, norms, rtol=1e-5)


def test_invalid_arguments_raise():
    params, (x, y) = make_problem(4)
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="^clip_norm must"):
            clipped_grad(loss, bad)
        with pytest.raises(ValueError, match="^clip_norm must"):
            clip_and_sum(bad)
    # With one example, an array would be broadcast, and the example would count thrice.
    for bad in (np.ones(3), np.ones((1, 1))):
        for make in (functools.partial(clipped_grad, loss), clip_and_sum):
            with pytest.raises(ValueError, match="^clip_norm must be one real number"):
                make(bad)
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
    for mask in (np.ones(3, bool), np.ones(4, np.float32)):
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
        tx.update({"a": np.ones((3, 2)), "b": np.ones((2, 2))}, tx.init(None))
    with pytest.raises(ValueError, match="^gradients must be real"):
        tx.update(np.ones((2, 3), np.complex64), tx.init(None))


@pytest.mark.parametrize("size", [1e-25, 0.7, 1e25])
def test_norm_of_groups_is_finite_and_positive_where_its_square_is_not(size):
    squares = [jnp.float32(3.0), jnp.float32(1.0)]  # in units of the squared bound
    norm = jax.jit(lambda x: clip_scales(x, [size, size], True).norm)(squares)
    np.testing.assert_allclose(norm, 2 * size, rtol=1e-6)


def test_norm_of_groups_is_infinite_if_the_norm_of_a_group_is():
    squares = [jnp.float32(np.inf), jnp.float32(1.0)]
    norm = jax.jit(lambda x: clip_scales(x, [1e-20, 1e20], True).norm)(squares)
    assert np.isinf(norm)
