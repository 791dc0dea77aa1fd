"""Faults during a run, and the results that are still correct.

Full disks, killed processes and changed meshes are in `test_checkpoint`, reading errors
in `test_plan_batches`.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TRANSFORMATIONS
from jax.sharding import AxisType

import dpjax
from dpjax import sampling

KEY = jax.random.wrap_key_data(np.array([0, 23], np.uint32))
CLIP_NORM = 0.7
W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


# --- examples that are not finite

BROKEN = {"one example": [3], "one device's": [4, 5], "all": list(range(8))}
MESHES = {
    "explicit": (AxisType.Explicit, False),
    "auto": (AxisType.Auto, False),
    "manual": (AxisType.Explicit, True),
}


@functools.cache
def make_sum_on_mesh(engine, mesh):
    kind, manual = MESHES[mesh]
    over = jax.make_mesh((4,), ("data",), (kind,))
    fn = dpjax.clipped_grad(loss, CLIP_NORM, engine=engine)

    def local_sum(w, x, mask):
        return jax.lax.psum(fn(w, x, mask=mask)[0], "data")

    whole = lambda w, x, mask: fn(w, x, mask=mask)[0]  # noqa: E731
    if manual:
        divided = jax.P("data")
        whole = jax.shard_map(
            local_sum,
            mesh=over,
            in_specs=(jax.P(), divided, divided),
            out_specs=jax.P(),
        )

    @jax.jit
    def run(w, x, mask):
        return whole(w, x, mask)

    def run_on_mesh(x, mask):
        with jax.set_mesh(over):
            split = jax.NamedSharding(over, jax.P("data"))
            w = jax.device_put(W, jax.NamedSharding(over, jax.P()))
            return np.asarray(run(w, *jax.device_put((x, mask), split)))

    return run_on_mesh


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_nan_in_a_shard_contributes_zero(engine, mesh):
    """The result is bit for bit the sum of the other examples."""
    run = make_sum_on_mesh(engine, mesh)
    for value in (np.nan, np.inf):
        for examples in BROKEN.values():
            x, invalid = X.copy(), np.isin(np.arange(8), examples)
            x[invalid] = value
            result = run(x, np.ones(8, bool))
            expected = run(np.where(invalid[:, None], 0, X), ~invalid)
            np.testing.assert_array_equal(result, expected)
            assert np.isfinite(result).all()


def normalised_loss(w, x):
    return jnp.sum(x @ (w * jax.lax.rsqrt(jnp.sum(w**2, axis=0, keepdims=True))))


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_nonfinite_gradients_of_all_examples_give_zero_sum(engine):
    """At parameters without a derivative, no example's gradient is finite."""
    fn = jax.jit(dpjax.clipped_grad(normalised_loss, CLIP_NORM, engine=engine))
    total, per_example = fn(np.zeros_like(W), X)
    assert not np.any(np.isfinite(per_example.norm))
    np.testing.assert_array_equal(total, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_nan_between_clipping_and_noise_stays_in_its_entry(name):
    """A user's own transformation may make it. Finite entries keep their noise."""
    sums = jnp.linspace(-1.0, 1.0, 12)
    tx = TRANSFORMATIONS[name](KEY)
    step = jax.jit(lambda u, state: tx.update(u, state, sums))
    start = tx.init(sums)
    clean, _ = step(sums, start)
    elsewhere = np.arange(12) != 5
    for value in (np.nan, np.inf):
        broken, after = step(sums.at[5].set(value), start)
        assert not np.isfinite(broken[5])
        if "nsgd" in name:  # divides by the norm of the whole: NaN or infinite
            expected = np.nan if np.isnan(value) else 0
            np.testing.assert_array_equal(broken[elsewhere], np.full(11, expected))
            continue
        np.testing.assert_array_equal(broken[elsewhere], clean[elsewhere])
        again, _ = step(sums, after)  # a sum without it
        assert np.isfinite(again[elsewhere]).all()
        # A state of noise alone does not contain the NaN. Momentum of sums keeps it,
        # and so does the recursion of (C s)_t on a lattice.
        recursion_of_sums = name.startswith("correlated_noise, discrete")
        of_noise = name.startswith(("add", "noisy", "correlated"))
        assert np.isfinite(again[5]) == (of_noise and not recursion_of_sums)


# --- empty and overflowing batches

N, ROOM, RATE, STEPS = 40, 6, 0.05, 200


def make_plan(room, noise_multiplier=1.3):
    return dpjax.plan(
        num_examples=N,
        batch_size=round(N * RATE),
        num_steps=STEPS,
        noise_multiplier=noise_multiplier,
        delta=1e-3,
        clip_norm=CLIP_NORM,
        max_batch_size=room,
    )


@pytest.mark.slow
def test_empty_and_overflowing_batches_contain_the_drawn_examples():
    """All drawn examples up to the capacity, none twice; empty batches get noise.

    The capacity is six: of 40 examples at a rate of 1/20 the seventh and later ones are
    left out in 0.4 % of steps.
    """
    run = make_plan(ROOM)
    steps = jnp.arange(2_000)

    def draw_batches(room):
        draw = functools.partial(sampling.poisson, N, RATE, key=KEY)
        return jax.jit(jax.vmap(lambda i: draw(step=i, max_batch_size=room)))(steps)

    reference, batches = draw_batches(N).mask.sum(1), draw_batches(ROOM)
    np.testing.assert_array_equal(batches.mask.sum(1), np.minimum(reference, ROOM))
    empty, over = int(np.argmin(reference)), int(np.argmax(reference))
    assert reference[empty] == 0
    assert reference[over] > ROOM

    data = np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32)
    fn = dpjax.clipped_grad(loss, CLIP_NORM)
    each = jax.jit(lambda x: fn(W, x[None])[0])
    grads = jax.jit(lambda x, mask: fn(W, x, mask=mask)[0])
    tx = dpjax.noisy_mean(
        clip_norm=CLIP_NORM,
        noise_multiplier=1.3,
        expected_batch_size=N * RATE,
        key=KEY,
    )
    for step in (empty, over):
        indices, mask = batches.indices[step], np.asarray(batches.mask[step])
        sampled = np.asarray(indices)[mask]
        assert len(set(sampled)) == len(sampled)
        total = grads(data[indices], mask)
        expected = sum((np.asarray(each(data[i])) for i in sampled), np.zeros_like(W))
        np.testing.assert_allclose(total, expected, atol=1e-6)
        released, _ = tx.update(total, tx.init(W))
        noise, _ = tx.update(jnp.zeros_like(W), tx.init(W))
        np.testing.assert_allclose(released - noise, expected / 2, atol=1e-6)
    # A smaller capacity costs privacy: overflow is part of the guarantee.
    assert run.epsilon > make_plan(N).epsilon


# --- sources of randomness other than the key

DRAWS = """
import random, sys, time
seed = int(sys.argv[1])
time.time = time.monotonic = time.perf_counter = lambda: 1e9 * seed
time.time_ns = lambda: 10**18 * seed
random.seed(seed)
import numpy as np
np.random.seed(seed)
import jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[2])
from conformance import SAMPLERS, TRANSFORMATIONS
before = random.getstate(), str(np.random.get_state())
def draw(key, w):
    found = {name: draw(key, 3) for name, draw in SAMPLERS.items()}
    for name, make in TRANSFORMATIONS.items():
        tx = make(key)
        found[name] = tx.update(w, tx.init(w), w)[0]
    return found
found = jax.jit(draw)(jax.random.key(7), jnp.zeros(5))
assert before == (random.getstate(), str(np.random.get_state()))
for name, value in found.items():
    print(name, [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(value)])
"""


@pytest.mark.slow
def test_clocks_and_global_seeds_do_not_change_draws():
    """Nor do the hash seed and the time zone."""
    folder = os.path.dirname(__file__)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": os.environ["DPJAX_TESTS_CACHE"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    outputs = [
        subprocess.run(
            [sys.executable, "-c", DRAWS, str(seed), folder],
            env=os.environ | settings | {"PYTHONHASHSEED": str(seed), "TZ": f"X{seed}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) > 12
