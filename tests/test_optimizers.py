"""The private optimizers, alone and in optax chains."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import (
    Adjacency,
    clipped_grad,
    dp_adam,
    dp_adamw,
    dp_nsgd,
    dp_sgd,
    noisy_mean,
)

KEY = jax.random.wrap_key_data(np.array([0, 3], np.uint32))
nsgd = functools.partial(dp_nsgd, decay=0.8, num_steps=50)
FACTORIES = {
    "dp_sgd": dp_sgd,
    "dp_adam": dp_adam,
    "dp_adamw": dp_adamw,
    "dp_nsgd": nsgd,
}


@pytest.mark.diagonal
@pytest.mark.parametrize("clip_norm", [0.2, 5.0])
@pytest.mark.parametrize("noise_multiplier", [0.7, 3.0])
def test_dp_sgd_step_is_a_noisy_mean_of_stated_scale(clip_norm, noise_multiplier):
    n = 200_000
    common = {
        "clip_norm": clip_norm,
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": 40,
        "key": KEY,
    }
    tx = dp_sgd(0.5, **common)
    mean = noisy_mean(**common)

    @jax.jit
    def first(sums):
        updates, _ = tx.update(sums, tx.init(sums))
        return updates, mean.update(sums, mean.init(None))[0]

    updates, means = jax.device_get(first(np.full(n, 8, np.float32)))
    np.testing.assert_allclose(-0.5 * means, updates, rtol=1e-6)
    scale = 0.5 * clip_norm * noise_multiplier / 40
    # z = 5 in 8 comparisons: false alarm below 5e-6
    assert abs(np.std(updates) / scale - 1) < 5 / np.sqrt(2 * n)
    assert abs(np.mean(updates) + 0.5 * 8 / 40) < 5 * scale / np.sqrt(n)


def test_noise_free_nsgd_steps_have_stated_length_and_direction():
    tx = nsgd(0.3, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=10, key=KEY)
    gradients = {"a": np.array([3, 0], np.float32), "b": np.array([[4]], np.float32)}
    update = jax.jit(lambda sums: tx.update(sums, tx.init(sums))[0])
    updates = jax.device_get(update(gradients))
    length = np.linalg.norm(np.concatenate([x.ravel() for x in updates.values()]))
    np.testing.assert_allclose(length, 0.3, rtol=1e-4)
    np.testing.assert_allclose(updates["a"], [-0.18, 0.0], rtol=1e-4)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion"])
def test_noise_free_optimizers_equal_optax(name):
    params = {"w": np.array([1, -2], np.float32), "b": np.float32(0.5)}
    total = jax.tree.map(lambda p: np.float32(12) * p, params)
    mean = jax.tree.map(lambda g: g / np.float32(4), total)
    common = {
        "clip_norm": 3.0, "noise_multiplier": 0.0, "expected_batch_size": 4, "key": KEY,
    }  # fmt: skip
    pairs = {
        "sgd": (
            dp_sgd(0.1, momentum=0.9, nesterov=True, **common),
            optax.sgd(0.1, 0.9, nesterov=True),
        ),
        "adam": (dp_adam(0.1, b1=0.8, **common), optax.adam(0.1, b1=0.8)),
        "adamw": (
            dp_adamw(0.1, b2=0.9, weight_decay=0.3, **common),
            optax.adamw(0.1, b2=0.9, weight_decay=0.3),
        ),
        "lion": (
            optax.chain(noisy_mean(**common), optax.lion(0.1)),
            optax.lion(0.1),
        ),
    }

    def three_updates(tx, sums):
        def step(state, _):
            updates, state = tx.update(sums, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), length=3)[1]

    private, plain = pairs[name]
    both = jax.jit(lambda: (three_updates(private, total), three_updates(plain, mean)))
    chex.assert_trees_all_close(*both(), rtol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FACTORIES)
def test_optimizers_train_under_jit_scan_donation_and_injection(name):
    params = {
        "w": np.ones((4, 3), jnp.bfloat16),
        "deep": [np.ones(3, np.float32), {"b": np.zeros((), np.float32)}],
    }

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"].astype(jnp.float32)) * params["deep"][0]
        return jnp.sum(hidden) + params["deep"][1]["b"]

    factory = FACTORIES[name]
    static = ("num_steps", "buffer", "key") if name == "dp_nsgd" else ("key",)
    injected = optax.inject_hyperparams(
        dp_nsgd if name == "dp_nsgd" else factory,
        static_args=static,
        hyperparam_dtype=jnp.float32,
    )
    extra = {"decay": 0.8, "num_steps": 50} if name == "dp_nsgd" else {}
    schedule = optax.linear_schedule(0.1, 0.01, 10)
    common = {
        "clip_norm": 0.5,
        "noise_multiplier": 1.2,
        "expected_batch_size": 6,
        "key": KEY,
    }
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    outcomes = []
    for tx in (
        factory(schedule, **common),
        injected(schedule, **common, **extra),
    ):
        chain = optax.chain(tx, optax.add_decayed_weights(1e-3))
        fn = clipped_grad(loss, 0.5)

        def step(carry, _, fn=fn, chain=chain):
            params, state = carry
            total, per_example = fn(params, x)
            updates, state = chain.update(total, state, params)
            return (optax.apply_updates(params, updates), state), per_example.loss

        run = jax.jit(
            lambda carry, step=step: jax.lax.scan(step, carry, length=5),
            donate_argnums=0,
        )
        copied = jax.tree.map(jnp.asarray, params)
        (trained, _), losses = run((copied, jax.jit(chain.init)(params)))
        trained = jax.device_get(trained)
        assert np.all(np.isfinite(losses))
        assert trained["w"].dtype == jnp.bfloat16
        assert np.any(trained["deep"][0] != params["deep"][0])
        outcomes.append(trained)
    chex.assert_trees_all_close(*outcomes, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("name", FACTORIES)
def test_invalid_arguments_raise(name):
    good = {
        "clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4, "key": KEY,
    }  # fmt: skip
    for argument, bad in [
        ("clip_norm", 0.0),
        ("noise_multiplier", -1.0),
        ("expected_batch_size", 0),
        ("key", None),
        # A schedule, values that are not numbers, and an array of several.
        *itertools.product(
            ("clip_norm", "noise_multiplier", "expected_batch_size"),
            (optax.constant_schedule(1.0), None, "1", 1j, True, np.ones(2)),
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{argument} must"):
            FACTORIES[name](0.1, **{**good, argument: bad})


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_adamw"])
def test_updates_beyond_num_steps_raise_or_are_nan(name):
    common = {"clip_norm": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 4}
    tx = FACTORIES[name](0.1, **common, key=KEY, num_steps=2)
    w = np.ones(3, np.float32)
    state, update = jax.jit(tx.init)(w), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(w, state, w)
        assert np.isfinite(updates).all()
    assert np.isnan(update(w, state, w)[0]).all()
    # The state is a concrete array, so this raises before anything is computed.
    with pytest.raises(ValueError, match="num_steps"):
        jax.eval_shape(lambda: tx.update(w, state, w))
    with pytest.raises(ValueError, match="num_steps"):
        FACTORIES[name](0.1, **common, key=KEY, num_steps=0)


@pytest.mark.diagonal("bounds")
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("bounds", [0.7, (0.3, 2.0)])
def test_optimizers_take_the_clip_norm_of_a_clipped_grad(name, bounds):
    fn = clipped_grad(lambda a, b, x: jnp.sum(a * b * x), bounds, argnums=(0, 1),
                      batch_argnums=2)  # fmt: skip
    w = np.zeros((30, 40), np.float32)
    same = np.linalg.norm(bounds) * (1 + 1e-12)
    common = {"noise_multiplier": 1.5, "expected_batch_size": 4, "key": KEY}
    result, expected = jax.jit(
        lambda w: [
            tx.update(w, tx.init(w), w)[0]
            for tx in (
                FACTORIES[name](0.1, clip_norm=clip_norm, **common)
                for clip_norm in (fn, same)
            )
        ]
    )(w)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert fn.sensitivity(Adjacency.ADD_REMOVE) >= np.linalg.norm(bounds)


def test_num_steps_that_overflow_the_counter_raise():
    common = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 1}
    with pytest.raises(ValueError, match="num_steps"):
        noisy_mean(**common, key=KEY, num_steps=2**31 - 1)
    noisy_mean(**common, key=KEY, num_steps=2**31 - 2)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [
        ("float16", (1e-4, 1e-4)),
        ("float16", (3e-4, 2e-4)),
        ("float32", (1e-23, 3e-23)),
        ("bfloat16", (0.6, 1.9)),
    ],
)
def test_sensitivity_of_several_clip_norms_is_rounded_up(dtype, bounds):
    bounds = jnp.asarray(bounds, dtype)
    exact = np.linalg.norm(np.asarray(bounds, np.float64))

    def sensitivity(bounds):
        fn = clipped_grad(lambda w, x: w[0] * x, [*bounds])
        return fn.sensitivity(Adjacency.ADD_REMOVE)

    for result in (sensitivity(bounds), jax.jit(sensitivity)(bounds)):
        assert exact <= float(result) <= exact * (1 + 2e-6)
