"""Real networks of four libraries and of none: book-keeping is the vmap engine."""

import functools
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpjax

WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 16, 4, 7, 40, 4
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _library_habits():
    """The libraries promote ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)


def images() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(2), (BATCH, 8, 8, 3)), jnp.arange(BATCH)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


def flax_cnn() -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (8, 16):
                x = nn.Conv(features, (3, 3))(x)
                x = nn.relu(nn.GroupNorm(num_groups=4)(x))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            x = nn.Conv(16, (3, 3), strides=2, feature_group_count=4)(x)
            return nn.Dense(10)(x.reshape(-1))

    net = Net()
    x, y = images()
    params = net.init(KEY, x[0])
    return lambda p, e: cross_entropy(net.apply(p, e[0]), e[1]), params, (x, y)


def flax_transformer() -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            embed = nn.Embed(VOCABULARY, WIDTH)
            position = self.param(
                "position", nn.initializers.normal(0.1), (LENGTH, WIDTH)
            )
            x = embed(ids) + position
            y = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(ids)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(y, y, mask=mask)
            y = nn.gelu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(x)))
            return embed.attend(x + nn.Dense(WIDTH)(y))

    net, ids = Net(), tokens()
    params = net.init(KEY, ids[0])
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def flax_scanned_layers() -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            y = nn.RMSNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(y, y)
            return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(3 * WIDTH)(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            embed = nn.Embed(VOCABULARY, WIDTH)
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return embed.attend(layers()(embed(ids), None)[0])

    net, ids = Net(), tokens()
    params = net.init(KEY, ids[0])
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def flax_lstm() -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(VOCABULARY, WIDTH)(ids)
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
            return nn.Dense(VOCABULARY)(nn.RNN(nn.GRUCell(WIDTH))(x))

    net, ids = Net(), tokens()
    params = net.init(KEY, ids[0])
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def nnx_mlp() -> Any:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.one = nnx.Linear(12, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.two = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.two(nnx.relu(self.norm(self.one(x))))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    x = jax.random.normal(KEY, (BATCH, 12))

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(nnx.merge(graph, params)(x), y)

    return loss, params, (x, jnp.arange(BATCH) % 3)


def equinox_cnn() -> Any:
    keys = jax.random.split(KEY, 4)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            eqx.nn.GroupNorm(4, 8),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.ConvTranspose2d(8, 4, 3, stride=2, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(324, 10, key=keys[2]),
        ]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)
    x, y = images()

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(eqx.combine(params, static)(x), y)

    return loss, params, (x.transpose(0, 3, 1, 2), y)


def equinox_attention() -> Any:
    embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=KEY)
    attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=KEY)
    params, static = eqx.partition((embed, attention), eqx.is_inexact_array)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        embed, attention = eqx.combine(params, static)
        x = jax.vmap(embed)(ids)
        x = x + attention(x, x, x)
        return cross_entropy(x @ embed.weight.T, ids)

    return loss, params, tokens()


def haiku_lstm() -> Any:
    def forward(ids: jax.Array) -> jax.Array:
        x = hk.Embed(VOCABULARY, WIDTH)(ids)
        core = hk.LSTM(WIDTH)
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))

    net, ids = hk.without_apply_rng(hk.transform(forward)), tokens()
    params = net.init(KEY, ids[0])
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def lora() -> Any:
    base = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 4 for i in range(3)]
    params = [
        {
            "a": jax.random.normal(jax.random.key(9 + i), (WIDTH, 2)),
            "b": jax.random.normal(jax.random.key(19 + i), (2, WIDTH)) / 9,
        }
        for i in range(3)
    ]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        # Adapters beside the weights, and adapters merged into them.
        for i, (w, p) in enumerate(zip(base, params, strict=True)):
            if i < 2:
                x = jnp.tanh(x @ w + 0.5 * (x @ p["a"]) @ p["b"])
            else:
                x = jnp.tanh(x @ (w + 0.5 * p["a"] @ p["b"]))
        return jnp.sum(x**2)

    return loss, params, jax.random.normal(KEY, (BATCH, LENGTH, WIDTH))


def siamese() -> Any:
    kernel = jax.random.normal(KEY, (3, 3, 3, 5)) / 5
    params = {"conv": kernel, "dense": jax.random.normal(KEY, (320, 4)) / 18}

    def tower(params: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x[None],
            params["conv"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.tanh(y).reshape(-1) @ params["dense"]

    def loss(params: Any, pair: Any) -> jax.Array:
        one, other = pair
        return jnp.sum((tower(params, one) - tower(params, other)) ** 2)

    x, _ = images()
    return loss, params, (x, jnp.roll(x, 1, axis=1))


def weight_standardised() -> Any:
    params = {"kernel": jax.random.normal(KEY, (3, 3, 3, 6)), "gain": jnp.ones(6)}

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        k = params["kernel"]
        mean, var = k.mean((0, 1, 2), keepdims=True), k.var((0, 1, 2), keepdims=True)
        k = (k - mean) * jax.lax.rsqrt(var + 1e-4) * params["gain"]
        y_hat = jax.lax.conv_general_dilated(
            x[None], k, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return cross_entropy(jnp.mean(y_hat, axis=(0, 1, 2)), y)

    return loss, params, images()


@pytest.mark.parametrize(
    "model",
    [
        flax_cnn,
        pytest.param(flax_transformer, marks=pytest.mark.slow),
        flax_scanned_layers,
        pytest.param(flax_lstm, marks=pytest.mark.slow),
        nnx_mlp,
        equinox_cnn,
        equinox_attention,
        pytest.param(haiku_lstm, marks=pytest.mark.slow),
        lora,
        siamese,
        weight_standardised,
    ],
    ids=lambda model: model.__name__,
)
def test_same_function_as_the_vmap_engine(model):
    loss, params, batch = model()
    mask = jnp.arange(BATCH) != 2

    @functools.partial(jax.jit, static_argnums=0)
    def run(engine: str, clip_norm: float) -> Any:
        fn = dpjax.clipped_grad(loss, clip_norm, engine=engine)
        return fn(params, batch, mask=mask)

    norms = run("vmap", 1.0)[1].norm
    clip_norm = float(jnp.median(norms))
    got, per_example = run("bookkeeping", clip_norm)
    want, by_hand = run("vmap", clip_norm)
    # Norms are rounded up (tests/test_rounding.py); sums have 1e3 terms in float32.
    np.testing.assert_allclose(per_example.norm, by_hand.norm, rtol=1e-4)
    np.testing.assert_allclose(per_example.loss, by_hand.loss, rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-5 * clip_norm)


def test_scanned_and_rematerialised_layers_take_rows():
    loss, params, ids = flax_scanned_layers()
    rows = dpjax.explain(loss, params, ids).rows
    matrices = [row for row in rows if "kernel" in row.parameter]
    assert len(matrices) == 6
    assert {row.norm for row in matrices} == {"rows"}


def test_tied_embeddings_take_rows():
    loss, params, ids = flax_transformer()
    rows = {row.parameter: row for row in dpjax.explain(loss, params, ids).rows}
    embedding = rows["['params']['Embed_0']['embedding']"]
    assert embedding.sites == "gather (gather), dot_general (dense)"
    assert embedding.norm == "rows"
