"""Adapters of frozen half-precision weights, in microbatches and in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax

WIDTH, RANK, LAYERS, SIZE = 16, 2, 3, 40
CLIP = 0.3


def normal(seed, *shape):
    drawn = np.random.default_rng(seed).normal(size=shape) / 3
    return drawn.astype(np.float32)


BASE = normal(0, LAYERS, WIDTH, WIDTH).astype(jnp.bfloat16)
ADAPTERS = {"A": normal(1, LAYERS, WIDTH, RANK), "B": normal(2, LAYERS, RANK, WIDTH)}
X = np.asarray(normal(3, SIZE, 5, WIDTH))


def loss(adapters, x, base):
    """Loss of one sequence, by a scan over layers in bfloat16."""

    def layer(x, weights):
        frozen, beside = weights
        a, b = (beside[name].astype(x.dtype) for name in "AB")
        return jnp.tanh(x @ frozen + (x @ a) @ b), None

    x, _ = jax.lax.scan(layer, x.astype(base.dtype), (base, adapters))
    return jnp.sum(x.astype(jnp.float32) ** 2)


@functools.cache
def make_plan():
    return dpjax.plan(
        num_examples=SIZE,
        batch_size=12,
        num_steps=3,
        noise_multiplier=1.7,
        delta=1e-3,
        clip_norm=CLIP,
        max_batch_size=20,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_get_clipped_sums_and_noise(dtype):
    """Microbatched sums match per-example gradients, and noise has the plan's scale."""
    plan, key = make_plan(), jax.random.key(7)
    params = jax.tree.map(lambda x: x.astype(dtype), ADAPTERS)
    tx = plan.optimizer(optax.identity(), key=key)
    parts = plan.value_and_grad(loss, batched=False, microbatch_size=6)

    @jax.jit
    def step(params, base):
        examples = plan.load(X, 0, key)
        _, sums = parts(params, examples, base)
        noisy, _ = tx.update(sums, tx.init(params), params)
        each = jax.vmap(jax.grad(loss), (None, 0, None))(params, examples.data, base)
        return sums, noisy, each, examples.mask

    sums, noisy, each, mask = step(params, BASE)
    assert jax.tree.structure(noisy) == jax.tree.structure(params)
    assert {x.dtype.name for x in jax.tree.leaves((sums, noisy))} == {"float32"}

    def flatten(tree, lead=()):
        leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
        return np.concatenate([x.reshape(*lead, -1) for x in leaves], axis=-1)

    rows = flatten(each, (20,))
    norms = np.linalg.norm(rows, axis=1)
    assert (norms > CLIP).any()
    clipped = rows * np.minimum(1, CLIP / norms)[:, None]
    expected = clipped[np.asarray(mask)].sum(0)
    # A gradient has bfloat16's rounding, 2⁻⁸ of it, through some ten operations.
    error = np.linalg.norm(flatten(sums) - expected)
    assert error < 10 * 2**-8 * CLIP * mask.sum()
    noise = flatten(noisy) * 12 - flatten(sums)
    # The mean square of n normals is within 5 √(2/n) of 1, with 1e-5 false alarms.
    stddev, within = 1.7 * CLIP, 5 * np.sqrt(2 / noise.size)
    assert abs(np.mean(noise**2) / stddev**2 - 1) < within
    assert within < 0.6  # would detect a σ² or a missing clip norm
