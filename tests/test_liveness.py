"""Engines differentiate exactly the operations that JAX differentiates.

Every loss here computes something that plain JAX leaves out of the gradient, or that it
differentiates in each iteration; the engines must not change that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

DIM, LAYERS, BATCH = 3, 2, 4


def _parameters():
    """The weights of a LoRA network. B = 0, where the norm of B has no derivative."""
    random = np.random.default_rng(0)
    return {
        "w": random.normal(size=(LAYERS, DIM, DIM)).astype(np.float32) / 2,
        "a": random.normal(size=(LAYERS, DIM, 1)).astype(np.float32),
        "b": np.zeros((LAYERS, 1, DIM), np.float32),
    }


def _examples():
    shape = (BATCH, DIM)
    random = np.random.default_rng(1)
    return tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))


def _layer(h, layer):
    h = jnp.tanh(h @ layer["w"] + h @ layer["a"] @ layer["b"])
    return h, jnp.linalg.norm(layer["b"])


def _loss_with_scan_logs(params, example):
    """Norms of B: stacked, carried with the example, and behind zero derivatives."""
    x, y = example

    def body(carried, layer):
        h, log = carried
        h, norm = _layer(h, layer)
        return (h, log + norm * jnp.sum(h)), (norm, norm * 2, norm * 3)

    (h, log), (norms, halted, floored) = jax.lax.scan(body, (x, 0.0), params)
    constant = jnp.sum(jax.lax.stop_gradient(halted)) + jnp.sum(jnp.floor(floored))
    return jnp.sum((h - y) ** 2) + constant, (norms, log)


def _loss_with_block_logs(params, example):
    """Outputs of a rematerialised block, with and without the example, some unread."""
    x, y = example

    @jax.checkpoint
    def block(h, layer):
        h, norm = _layer(h, layer)
        frozen = layer["w"] - jax.lax.stop_gradient(layer["w"])
        distance = jnp.linalg.norm(frozen)
        return h, (norm, jnp.sum(h) * distance, jnp.log(jnp.sum(layer["w"] * 0)))

    h, logs = x, []
    for i in range(LAYERS):
        h, log = block(h, jax.tree.map(lambda p, i=i: p[i], params))
        logs.append(log)
    scanned, log = jax.lax.scan(block, h, params)
    return jnp.sum((scanned - y) ** 2), (logs, log)


def _loss_with_aux_log(params, example):
    """An auxiliary output in which parameters meet the example."""
    x, y = example
    h = jnp.tanh(x @ params["w"][0] @ params["a"][0] @ params["b"][0])
    log = jnp.sum(x) * jnp.linalg.norm(params["b"])
    return jnp.sum((h - y) ** 2), log


@jax.custom_vjp
def _bound_gradient(w):
    return w


_bound_gradient.defvjp(
    lambda w: (w, None), lambda _, gradient: (jnp.clip(gradient, -0.05, 0.05),)
)


def _loss_with_bounded_gradients(params, example):
    """A nonlinear derivative of parameters in a scan, and in a scan within a scan."""
    x, y = example

    def step(h, shift):
        return jnp.tanh(h @ _bound_gradient(params["w"][0]) + shift), None

    @jax.checkpoint
    def epoch(h, _):
        def inner(h, w):
            return jnp.tanh(h @ _bound_gradient(w).T + y), None

        return jax.lax.scan(inner, h, params["w"])[0], None

    h, _ = jax.lax.scan(step, x, jnp.stack([y] * 3))
    h, _ = jax.lax.scan(epoch, h, None, length=2)
    return jnp.sum(h**2), ()


LOSSES = [
    _loss_with_scan_logs,
    _loss_with_block_logs,
    _loss_with_aux_log,
    _loss_with_bounded_gradients,
]


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            x, marks=[pytest.mark.matrix] if x is _loss_with_block_logs else []
        )
        for x in LOSSES
    ],
    ids=lambda loss: loss.__name__,
)
def test_engines_differentiate_what_jax_differentiates(loss):
    params, examples = _parameters(), _examples()

    @jax.jit
    def results(params, examples):
        gradients = jax.vmap(jax.grad(lambda p, e: loss(p, e)[0]), in_axes=(None, 0))(
            params, examples
        )
        # Nothing is clipped at 100: the sums are those of the plain gradients.
        private = {
            engine: dpjax.clipped_grad(loss, 100.0, has_aux=True, engine=engine)(
                params, examples
            )
            for engine in ("bookkeeping", "ghost")
        }
        return gradients, private

    gradients, private = results(params, examples)
    squares = [np.sum(np.square(g).reshape(BATCH, -1), 1) for g in gradients.values()]
    norms = np.sqrt(sum(squares))
    assert np.all(norms > 0.01)
    for sums, per_example in private.values():
        # Sums of some hundred products of float32, each rounded to 6e-8.
        np.testing.assert_allclose(per_example.norm, norms, rtol=2e-5)
        for name, result in sums.items():
            expected = np.sum(gradients[name], axis=0)
            np.testing.assert_allclose(result, expected, atol=2e-5 * np.max(norms))
