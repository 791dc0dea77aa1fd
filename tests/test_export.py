"""Programs for GPUs and TPUs, lowered on a machine that has neither.

A CPU can show that every operation has a lowering rule there, and that none calls a
library: such calls differ between platforms, or are missing on some.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import ACCOUNTANTS, ENGINES, MECHANISMS, SAMPLERS, TRANSFORMATIONS

import dpjax
from dpjax._core.platforms import host
from dpjax.accounting import gdp

GPU, TPU = "cuda", "tpu"
# Accountants take seconds to trace; these few cover every kind of operation.
QUICK = {"gdp.epsilon", "rdp.epsilon", "pure.mu", "correlated.error"}


def lower_portably(fn, *args):
    """The module for both platforms, asserting that it calls no library."""
    lowered = jax.export.export(jax.jit(fn), platforms=(GPU, TPU))(*args).mlir_module()
    assert "func.func public @main" in lowered
    assert "custom_call" not in lowered
    return lowered


PARAMS = {
    "table": np.ones((11, 4), np.float32),
    "kernel": np.ones((3, 4, 8), np.float32),
    "dense": np.ones((8, 6), jnp.bfloat16),
    "layers": np.ones((2, 6, 6), np.float32),
}


def loss(params, ids):
    """A lookup, a convolution, a narrow product and a scan."""
    x = params["table"][ids][None]
    x = jax.lax.conv_general_dilated(
        x, params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    x = jnp.tanh(x[0]).astype(jnp.bfloat16) @ params["dense"]
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), x.astype(jnp.float32), params["layers"]
    )
    return jnp.sum(x**2)


@pytest.mark.diagonal("engine")
@pytest.mark.parametrize(("engine", "microbatch_size"), ENGINES)
def test_clipped_gradients_lower_for_gpu_and_tpu(engine, microbatch_size):
    fn = dpjax.clipped_grad(loss, 0.7, engine=engine, microbatch_size=microbatch_size)
    mask = np.arange(6) < 5
    ids = np.zeros((6, 5), np.int32)
    lowered = lower_portably(lambda p, ids: fn(p, ids, mask=mask), PARAMS, ids)
    for operation in ("gather", "convolution", "while"):
        assert f"stablehlo.{operation}" in lowered
    assert "f64" not in lowered


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "name",
    [
        n if n in MECHANISMS else pytest.param(n, marks=pytest.mark.matrix)
        for n in TRANSFORMATIONS
    ],
)
def test_noise_lowers_for_gpu_and_tpu(name):
    def two_steps(seed, params):
        tx = TRANSFORMATIONS[name](jax.random.key(seed))
        state = tx.init(params)
        for _ in range(2):
            params, state = tx.update(params, state, params)
        return params

    lowered = lower_portably(two_steps, 3, {k: PARAMS[k] for k in ("table", "dense")})
    # Sums are rounded to the lattice in float64.
    assert ("f64" in lowered) == ("discrete" in name)


def random_bins_of_many(key, step):
    """Random bins beyond 2¹⁶ examples, which a different algorithm finds."""
    sizes = {"max_batch_size": 30, "key": key, "epoch": step, "step": 2}
    return dpjax.sampling.random_bins_step(100_000, 5_000, **sizes)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", [*SAMPLERS, "random_bins_step, many"])
def test_batches_lower_for_gpu_and_tpu_without_floats(name):
    sample = SAMPLERS.get(name, random_bins_of_many)
    lowered = lower_portably(
        lambda seed, step: sample(jax.random.key(seed), step), 3, 5
    )
    # No platform rounds integers: every machine draws the same examples.
    assert not any(f"{kind}>" in lowered for kind in ("f16", "f32", "f64"))


@pytest.mark.slow
def test_plan_step_lowers_for_gpu_and_tpu():
    plan = dpjax.plan(
        num_examples=300,
        batch_size=8,
        num_steps=20,
        noise_multiplier=1.3,
        delta=1e-5,
        clip_norm=0.7,
        max_batch_size=24,
    )
    data = np.zeros((300, 5), np.int32)

    def step(seed, params, state, number):
        key = jax.random.key(seed)
        batch = plan.batch(number, key)
        examples = dpjax.Examples(jnp.asarray(data)[batch.indices], batch.mask)
        _, grads = plan.value_and_grad(loss, batched=False)(params, examples)
        tx = plan.optimizer(optax.adam(0.1), key=key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def start(params):
        return plan.optimizer(optax.adam(0.1), key=jax.random.key(3)).init(params)

    lowered = lower_portably(step, 3, PARAMS, jax.eval_shape(start, PARAMS), 5)
    assert "f64" not in lowered


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ACCOUNTANTS],
)
def test_accountants_lower_for_gpu_and_raise_for_tpu(name):
    fn, x = ACCOUNTANTS[name]
    for each in (fn, lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]):
        traced = jax.jit(each).trace(np.float32(x))  # once for both platforms
        if "f64" not in traced.lower(lowering_platforms=(GPU,)).as_text():
            continue  # The slope of the best order is 0.
        with pytest.raises(NotImplementedError, match="accountants need float64"):
            traced.lower(lowering_platforms=(TPU,))


# CPU devices stand for both kinds: the first of them is the host. Results that are not
# committed to a device may move, so that one program can take all of them.
summed = jax.jit(lambda *found: sum(jnp.sum(x) for x in found))


@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(lambda f: f, id="value"),
        pytest.param(jax.grad, id="slope", marks=pytest.mark.slow),
        pytest.param(
            lambda f: lambda *x: jax.vmap(f)(*(jnp.asarray(a)[None] for a in x)),
            id="several",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eager_accountants_run_on_the_cpu(transformed):
    other = jax.devices()[1]
    with jax.default_device(other):
        mu = jnp.asarray(1.3)
        result = transformed(gdp.epsilon)(mu, 1e-6)
        assert mu.devices() == {other}
        if transformed is not jax.grad:  # a cotangent is on the device of its primal
            assert result.devices() == {host()}
        assert summed(mu, result).devices() == {other}


def test_eager_accountants_run_on_the_cpu_when_a_mesh_is_set():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[1:3])
    laid_out = jax.device_put(np.float32(1.3), jax.NamedSharding(mesh, jax.P()))
    expected = float(gdp.epsilon(1.3, 1e-6))
    with jax.set_mesh(mesh):
        for given in (1.3, laid_out):
            result = gdp.epsilon(given, 1e-6)
            np.testing.assert_allclose(result, expected, rtol=2.0**-22)
            assert result.devices() == {host()}
            assert summed(laid_out, result).devices() == set(mesh.devices.flat)
