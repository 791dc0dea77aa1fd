"""The networks that clipping is measured on: loss, parameters and a batch."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp


def _normal(seed: int, *shape: int, fan_in: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / jnp.sqrt(fan_in)


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[label]


def mlp(batch: int = 256, sizes: tuple[int, ...] = (784, 1024, 1024, 10)) -> Any:
    """Dense layers with relu."""
    params = [
        (_normal(i, m, n, fan_in=m), jnp.zeros(n))
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    ]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return _cross_entropy(x @ w + b, label)

    x = jax.random.normal(jax.random.key(9), (batch, sizes[0]))
    return loss, params, (x, jnp.arange(batch) % sizes[-1])


def cnn(batch: int = 64, channels: tuple[int, ...] = (3, 32, 64, 64)) -> Any:
    """3x3 convolutions, GroupNorm of 8 groups, relu, pooling; 32x32 images."""
    blocks = [
        {
            "kernel": _normal(i, 3, 3, m, n, fan_in=9 * m),
            "scale": jnp.ones(n),
            "bias": jnp.zeros(n),
        }
        for i, (m, n) in enumerate(itertools.pairwise(channels))
    ]
    features = channels[-1] * (32 >> len(blocks)) ** 2
    head = {"w": _normal(8, features, 10, fan_in=features), "b": jnp.zeros(10)}

    def group_norm(x: jax.Array, block: Any) -> jax.Array:
        grouped = x.reshape(x.shape[0] * x.shape[1], 8, x.shape[2] // 8)
        mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
        var = jnp.var(grouped, axis=(0, 2), keepdims=True)
        x = ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)
        return x * block["scale"] + block["bias"]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        for block in params["blocks"]:
            x = jax.lax.conv_general_dilated(
                x[None],
                block["kernel"],
                window_strides=(1, 1),
                padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )[0]
            x = jax.nn.relu(group_norm(x, block))
            x = jax.lax.reduce_window(
                x, 0.0, jax.lax.add, (2, 2, 1), (2, 2, 1), "VALID"
            )
            x = x / 4
        logits = x.reshape(-1) @ params["head"]["w"] + params["head"]["b"]
        return _cross_entropy(logits, label)

    x = jax.random.normal(jax.random.key(9), (batch, 32, 32, channels[0]))
    return loss, {"blocks": blocks, "head": head}, (x, jnp.arange(batch) % 10)


def transformer(
    batch: int = 8,
    width: int = 256,
    layers: int = 4,
    length: int = 128,
    vocabulary: int = 8000,
    heads: int = 4,
) -> Any:
    """A causal language model with pre-norm blocks and tied embeddings."""

    def block(i: int) -> dict[str, jax.Array]:
        head = (width, heads, width // heads)
        return {
            "query": _normal(i, *head, fan_in=width),
            "key": _normal(i + 1, *head, fan_in=width),
            "value": _normal(i + 2, *head, fan_in=width),
            "out": _normal(i + 3, *head[1:], width, fan_in=width),
            "up": _normal(i + 4, width, 4 * width, fan_in=width),
            "up_bias": jnp.zeros(4 * width),
            "down": _normal(i + 5, 4 * width, width, fan_in=4 * width),
            "down_bias": jnp.zeros(width),
            "scales": jnp.ones((2, width)),
            "shifts": jnp.zeros((2, width)),
        }

    params = {
        "embedding": _normal(1, vocabulary, width, fan_in=width),
        "position": _normal(2, length, width, fan_in=width),
        "blocks": [block(10 * i) for i in range(1, layers + 1)],
        "scale": jnp.ones(width),
        "shift": jnp.zeros(width),
    }
    causal = jnp.tril(jnp.ones((length, length), bool))

    def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.var(x, axis=-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + shift

    def attention(x: jax.Array, p: Any) -> jax.Array:
        query, key, value = (
            jnp.einsum("td,dhk->htk", x, p[name]) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("htk,hsk->hts", query, key) / jnp.sqrt(query.shape[-1])
        scores = jax.nn.softmax(jnp.where(causal[None], scores, -1e9))
        mixed = jnp.einsum("hts,hsk->htk", scores, value)
        return jnp.einsum("htk,hkd->td", mixed, p["out"])

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embedding"][ids] + params["position"]
        for p in params["blocks"]:
            x = x + attention(layer_norm(x, p["scales"][0], p["shifts"][0]), p)
            y = layer_norm(x, p["scales"][1], p["shifts"][1])
            y = jax.nn.gelu(y @ p["up"] + p["up_bias"])
            x = x + y @ p["down"] + p["down_bias"]
        x = layer_norm(x, params["scale"], params["shift"])
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits[:-1], ids[1:, None], axis=1))

    ids = jax.random.randint(jax.random.key(9), (batch, length), 0, vocabulary)
    return loss, params, ids
