"""Define the networks for measurements of clipping: loss, parameters and a batch."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _normal(seed: int, *shape: int, fan_in: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / jnp.sqrt(fan_in)


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[label]


def mlp(batch: int = 256, sizes: tuple[int, ...] = (784, 1024, 1024, 10)) -> Any:
    """Return a network of dense layers with relu."""
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


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x[None],
        kernel,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0]


def _kernel(seed: int, size: int, m: int, n: int) -> jax.Array:
    return _normal(seed, size, size, m, n, fan_in=size * size * m)


def _affine(n: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(n), "bias": jnp.zeros(n)}


def _group_norm(x: jax.Array, affine: Any, groups: int) -> jax.Array:
    grouped = x.reshape(x.shape[0] * x.shape[1], groups, x.shape[2] // groups)
    mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
    var = jnp.var(grouped, axis=(0, 2), keepdims=True)
    x = ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)
    return x * affine["scale"] + affine["bias"]


def cnn(batch: int = 64, channels: tuple[int, ...] = (3, 32, 64, 64)) -> Any:
    """Return three convolutions, GroupNorm of 8 groups, relu, pooling; 32x32 images."""
    blocks = [
        {"kernel": _kernel(i, 3, m, n), **_affine(n)}
        for i, (m, n) in enumerate(itertools.pairwise(channels))
    ]
    features = channels[-1] * (32 >> len(blocks)) ** 2
    head = {"w": _normal(8, features, 10, fan_in=features), "b": jnp.zeros(10)}

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        for block in params["blocks"]:
            x = jax.nn.relu(_group_norm(_convolve(x, block["kernel"]), block, 8))
            x = jax.lax.reduce_window(
                x, 0.0, jax.lax.add, (2, 2, 1), (2, 2, 1), "VALID"
            )
            x = x / 4
        logits = x.reshape(-1) @ params["head"]["w"] + params["head"]["b"]
        return _cross_entropy(logits, label)

    x = jax.random.normal(jax.random.key(9), (batch, 32, 32, channels[0]))
    return loss, {"blocks": blocks, "head": head}, (x, jnp.arange(batch) % 10)


def wide_resnet(batch: int = 16, depth: int = 16, width: int = 4) -> Any:
    """Return a wide residual network with GroupNorm of 16 groups, for 32x32 images.

    GroupNorm precedes relu. WRN-16-4, of 2.7e6 parameters, is the usual network for
    private training on CIFAR-10 (De et al., *Unlocking High-Accuracy Differentially
    Private Image Classification through Scale*, 2022). This network omits the weight
    standardisation of De et al.
    """
    stages = [16, *(width * c for c in (16, 32, 64))]
    seeds = itertools.count()
    blocks = []
    for stage, (m, n) in enumerate(itertools.pairwise(stages)):
        for i in range((depth - 4) // 6):
            inside = m if i == 0 else n
            block = {
                "norms": [_affine(inside), _affine(n)],
                "kernels": [
                    _kernel(next(seeds), 3, inside, n),
                    _kernel(next(seeds), 3, n, n),
                ],
            }
            if i == 0:
                block["skip"] = _kernel(next(seeds), 1, inside, n)
            blocks.append((block, 2 if i == 0 and stage > 0 else 1))
    params = {
        "first": _kernel(next(seeds), 3, 3, 16),
        "blocks": [block for block, _ in blocks],
        "norm": _affine(stages[-1]),
        "w": _normal(next(seeds), stages[-1], 10, fan_in=stages[-1]),
        "b": jnp.zeros(10),
    }
    strides = [stride for _, stride in blocks]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        x = _convolve(x, params["first"])
        for block, stride in zip(params["blocks"], strides, strict=True):
            y = jax.nn.relu(_group_norm(x, block["norms"][0], 16))
            if "skip" in block:
                x = _convolve(y, block["skip"], stride)
            y = _convolve(y, block["kernels"][0], stride)
            y = jax.nn.relu(_group_norm(y, block["norms"][1], 16))
            x = x + _convolve(y, block["kernels"][1])
        x = jax.nn.relu(_group_norm(x, params["norm"], 16))
        logits = jnp.mean(x, axis=(0, 1)) @ params["w"] + params["b"]
        return _cross_entropy(logits, label)

    x = jax.random.normal(jax.random.key(9), (batch, 32, 32, 3))
    return loss, params, (x, jnp.arange(batch) % 10)


def transformer(
    batch: int = 8,
    width: int = 256,
    layers: int = 4,
    length: int = 128,
    vocabulary: int = 8000,
    heads: int = 4,
    scanned: bool = False,
    dtype: Any = jnp.float32,
) -> Any:
    """Return a causal language model with pre-norm blocks and tied embeddings.

    The blocks are separate, or one block that is scanned over and rematerialised.
    Matrix products are in `dtype`; norms, softmax and the loss are in float32.
    """

    def narrow(x: jax.Array) -> jax.Array:
        return x.astype(dtype)

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
    if scanned:
        params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *params["blocks"])
    causal = np.tril(np.ones((length, length), bool))

    def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        mean = jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.var(x, axis=-1, keepdims=True)
        return narrow((x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + shift)

    def project(x: jax.Array, p: Any, name: str) -> jax.Array:
        y = jnp.einsum("td,dhk->htk", x, narrow(p[name]))
        if f"{name}_in" in p:  # an adapter is added to the weight
            low = x @ narrow(p[f"{name}_in"])
            y = y + jnp.einsum("tr,rhk->htk", low, narrow(p[f"{name}_out"]))
        return y

    def attention(x: jax.Array, p: Any) -> jax.Array:
        query, key, value = (project(x, p, name) for name in ("query", "key", "value"))
        scores = jnp.einsum("htk,hsk->hts", query, key).astype(jnp.float32)
        scores = scores / jnp.sqrt(query.shape[-1])
        scores = jax.nn.softmax(jnp.where(causal[None], scores, -1e9))
        mixed = jnp.einsum("hts,hsk->htk", narrow(scores), value)
        return jnp.einsum("htk,hkd->td", mixed, narrow(p["out"]))

    def apply(x: jax.Array, p: Any) -> jax.Array:
        x = x + attention(layer_norm(x, p["scales"][0], p["shifts"][0]), p)
        y = layer_norm(x, p["scales"][1], p["shifts"][1])
        y = jax.nn.gelu(y @ narrow(p["up"]) + narrow(p["up_bias"]))
        return x + y @ narrow(p["down"]) + narrow(p["down_bias"])

    @jax.checkpoint
    def again(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return apply(x, p), None

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = narrow(params["embedding"][ids] + params["position"])
        if scanned:
            x, _ = jax.lax.scan(again, x, params["blocks"])
        else:
            x = functools.reduce(apply, params["blocks"], x)
        x = layer_norm(x, params["scale"], params["shift"])
        logits = (x @ narrow(params["embedding"]).T).astype(jnp.float32)
        logits = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logits[:-1], ids[1:, None], axis=1))

    ids = jax.random.randint(jax.random.key(9), (batch, length), 0, vocabulary)
    return loss, params, ids


def gpt2(batch: int = 8, length: int = 1024, **smaller: int) -> Any:
    """Return GPT-2's smallest size: 124e6 float32 parameters, bfloat16 products."""
    sizes = {"width": 768, "layers": 12, "vocabulary": 50_257, "heads": 12}
    sizes |= {"batch": batch, "length": length} | smaller
    return transformer(dtype=jnp.bfloat16, **sizes)


def adapters(rank: int = 8, **sizes: int) -> Any:
    """Return GPT-2, frozen in bfloat16, with trained adapters (LoRA).

    The adapters act on queries and values. Hu et al., *LoRA: Low-Rank Adaptation of
    Large Language Models*, 2022. The frozen parameters are an additional argument of
    the loss, and the fourth returned value.
    """
    whole, base, ids = gpt2(**sizes)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    trained = []
    for i, block in enumerate(base["blocks"]):
        added = {}
        for j, name in enumerate(("query", "value")):
            width, *head = block[name].shape
            added[f"{name}_in"] = _normal(1000 + 2 * i + j, width, rank, fan_in=width)
            added[f"{name}_out"] = jnp.zeros((rank, *head))
        trained.append(added)

    def loss(trained: Any, ids: jax.Array, base: Any) -> jax.Array:
        pairs = zip(base["blocks"], trained, strict=True)
        return whole({**base, "blocks": [a | b for a, b in pairs]}, ids)

    return loss, trained, ids, base


def rematerialised() -> Any:
    """Return a deeper `transformer` with scanned blocks and a small vocabulary."""
    return transformer(layers=12, vocabulary=1000, scanned=True)
