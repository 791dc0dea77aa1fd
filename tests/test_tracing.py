"""What a traced loss may contain, and what becomes of it.

The reference is `vmap(grad(loss))`, clipped in NumPy (tests/test_bookkeeping.py).
"""

import collections
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from test_bookkeeping import MLP, MLP_BATCH, assert_same, mlp, normal

import dpjax

ENGINES = ("auto", "bookkeeping", "ghost", "vmap")


@jax.custom_vjp
def centred_backwards(x: jax.Array) -> jax.Array:
    return x


centred_backwards.defvjp(
    lambda x: (x, None), lambda _, g: (g - jax.lax.pmean(g, "batch"),)
)


@jax.custom_jvp
def centred_forwards(x: jax.Array) -> jax.Array:
    return x


@centred_forwards.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] - jax.lax.pmean(tangents[0], "batch")


def in_scan(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda h, _: (f(h) @ w, None), x @ w, length=2)[0])


def in_cond(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    branches = (lambda h: jnp.sum(f(h)), jnp.sum)
    return jax.lax.cond(x[0] > 0, *branches, x @ w)


PLACES = {
    "layer": lambda f, w, x: jnp.sum(jnp.sin(f(x @ w))),
    "parameter": lambda f, w, x: jnp.sum(jnp.sin(x @ f(w))),
    "call": lambda f, w, x: jnp.sum(jnp.sin(jax.jit(f)(x @ w))),
    "remat": lambda f, w, x: jnp.sum(jax.checkpoint(lambda h: jnp.sin(f(h)))(x @ w)),
    "rule": lambda f, w, x: jnp.sum(jax.nn.relu(f(x @ w))),
    "scan": in_scan,
    "cond": in_cond,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("f", [centred_backwards, centred_forwards])
@pytest.mark.parametrize("place", PLACES)
def test_derivatives_that_see_other_examples_are_refused(place, f, engine):
    def loss(w, x):
        return PLACES[place](f, w, x)

    w, x = normal(0, 3, 3), normal(1, 4, 3)
    fn = dpjax.clipped_grad(loss, 1.0, engine=engine)
    with pytest.raises(ValueError, match="named axis"):
        fn(w, x)
    with pytest.raises(ValueError, match="named axis"):
        jax.vmap(fn, in_axes=(None, 0), axis_name="batch")(w, x[None])


def test_derivatives_that_are_not_taken_may_communicate():
    """By the example alone nothing is differentiated."""

    def loss(w, x):
        return jnp.sum(jnp.sin(centred_backwards(x) @ w))

    assert_same(loss, normal(0, 3, 3), normal(1, 4, 3))


def operations(exported: Any) -> collections.Counter[str]:
    """How often each operation stands there, but for the choice by platform."""
    found = re.findall(r"stablehlo\.(\w+)", exported.mlir_module())
    counted = collections.Counter(found)
    for choosing in ("case", "constant", "return"):
        del counted[choosing]
    return counted


def test_auto_asks_for_the_platform_when_it_lowers():
    """Exported from a CPU, a TPU's program forms gradients: its products round more."""

    def exported(engine, *platforms):
        fn = jax.jit(dpjax.clipped_grad(mlp, 1.0, engine=engine))
        return operations(jax.export.export(fn, platforms=platforms)(MLP, MLP_BATCH))

    for platform, engine in (("tpu", "vmap"), ("cpu", "bookkeeping")):
        assert exported("auto", platform) == exported(engine, platform)
    assert exported("bookkeeping", "tpu") != exported("vmap", "tpu")
    # One program for both has both.
    parts = exported("auto", "cpu"), exported("auto", "tpu")
    products = sum(part["dot_general"] for part in parts)
    assert exported("auto", "cpu", "tpu")["dot_general"] >= products


def test_constants_of_numpy():
    """Rules of a loss index the times, which NumPy cannot by a traced number."""

    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        times = np.array([0.0, 0.5, 1.0])
        y = odeint(lambda y, t, rate: -rate * y, h, times, params["rate"])
        return jnp.sum(y[-1] ** 2)

    params = {"w": normal(0, 3, 4), "rate": jnp.ones(4)}
    for engine in ("bookkeeping", "vmap"):
        assert_same(loss, params, normal(1, 2, 3), engine=engine)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_aux_of_every_type_in_microbatches(engine):
    def loss(w, key):
        x = jax.random.normal(key, (3,))
        aux = {
            "key": jax.random.split(key)[0],
            "word": jax.random.bits(key, dtype=jnp.uint32),
            "flag": x[0] > 0,
            "none": None,
            "one": 1,
        }
        return jnp.sum(jnp.sin(x @ w)), aux

    w, keys = normal(0, 3, 4), jax.random.split(jax.random.key(1), 5)
    want_aux = jax.vmap(lambda key: loss(w, key)[1])(keys)
    outs = [
        jax.jit(
            dpjax.clipped_grad(
                loss, 0.3, has_aux=True, engine=engine, microbatch_size=size
            )
        )(w, keys)
        for size in (None, 1, 2)
    ]
    for grads, per_example in outs:
        np.testing.assert_allclose(grads, outs[0][0], rtol=1e-5, atol=1e-6)
        assert jax.tree.structure(per_example.aux) == jax.tree.structure(want_aux)
        for a, b in zip(
            *map(jax.tree.leaves, (per_example.aux, want_aux)), strict=True
        ):
            assert a.dtype == b.dtype
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(a, b)


def test_known_values_of_a_scan_stay_in_its_loop():
    length, width = 200, 4096

    def loss(w, x):
        def step(h, i):
            wave = jnp.sin(jax.lax.iota(jnp.float32, width) * i)
            return jnp.tanh(h @ w + jnp.mean(wave)), None

        return jnp.sum(jax.lax.scan(step, x, jnp.arange(1.0 * length))[0])

    w, x = normal(0, 4, 4), normal(1, 3, 4)
    fn = jax.jit(dpjax.clipped_grad(loss, 1.0, engine="bookkeeping"))
    used = fn.lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * width * length / 10
    assert_same(loss, w, x)


def test_effects_and_odd_losses():
    """Callbacks run once an example, weak types and NumPy's numbers are losses."""
    seen = []

    def loss(w, x):
        jax.debug.callback(lambda value: seen.append(float(value)), x[0])
        return jnp.sum(x @ w)

    w, x = normal(0, 3, 4), normal(1, 5, 3)
    for engine in ("bookkeeping", "vmap"):
        seen.clear()
        jax.block_until_ready(
            jax.jit(dpjax.clipped_grad(loss, 1.0, engine=engine))(w, x)
        )
        jax.effects_barrier()
        np.testing.assert_allclose(sorted(seen), np.sort(x[:, 0]), rtol=1e-6)
        for constant in (2.0, np.float32(2.0)):
            fn = dpjax.clipped_grad(lambda w, x: constant, 1.0, engine=engine)
            grads, per_example = jax.jit(fn)(w, x)
            np.testing.assert_array_equal(grads, 0.0)
            np.testing.assert_array_equal(per_example.loss, np.full(5, 2.0))


def test_policies_keys_and_tracers_in_closures():
    key = jax.random.key(3)

    def make(scale):
        def loss(params, x):
            @jax.checkpoint
            def block(h, w):
                keep = jax.random.bernoulli(key, 0.7, h.shape)
                return jnp.where(keep, jnp.tanh(h @ w) * scale, 0.0)

            policy = jax.checkpoint_policies.dots_saveable
            for w in params:
                x = jax.checkpoint(block, policy=policy)(x, w)
            return jnp.sum(x)

        return loss

    params, x = [normal(i, 6, 6) for i in range(2)], normal(5, 4, 6)
    assert_same(make(2.0), params, x)

    def summed(scale, engine):
        return dpjax.clipped_grad(make(scale), 0.3, engine=engine)(params, x)[0]

    got, want = (jax.jit(summed, static_argnums=1)(2.0, e) for e in ENGINES[1::2])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_custom_derivatives_with_integers():
    @jax.custom_vjp
    def pick(x, i):
        return x[i]

    pick.defvjp(
        lambda x, i: (x[i], (jnp.zeros_like(x), i)),
        lambda held, g: (2 * held[0].at[held[1]].set(g), None),
    )

    def loss(w, x):
        return pick(jnp.sin(x @ w), 2) + pick(jnp.sum(w, 0), 1) * x[0]

    assert_same(loss, normal(0, 3, 4), normal(1, 5, 3))


def test_many_blocks_are_traced_in_little_time():
    """In processor time, against per-example gradients of the same loss."""

    def loss(params, x):
        for w, b, gain in params:
            h = x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) * gain
            x = x + jax.nn.gelu(h @ w + b) @ w.T
        return jnp.sum(x)

    params = [(jnp.ones((8, 8)), jnp.ones(8), jnp.ones(8))] * 40
    x = jnp.ones((4, 8))

    def seconds(fn):
        start = time.process_time()
        jax.jit(fn).lower(params, x)
        return time.process_time() - start

    plain = jax.vmap(jax.grad(loss), (None, 0))
    # A target of three, and as much again for a machine that does other things.
    books = dpjax.clipped_grad(loss, 1.0, engine="bookkeeping")
    assert seconds(books) < 6 * seconds(plain)
