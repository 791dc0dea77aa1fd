"""Book-keeping equals the vmap engine on networks of four libraries and of none."""

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


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
    """The libraries rely on rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def init_with_numpy(make: Any) -> Any:
    """The result of `make`, with random numbers from NumPy: nothing is compiled."""
    rng = np.random.default_rng(0)

    def random_leaf(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        scale = np.sqrt(np.prod(x.shape[:-1]))
        return (rng.normal(size=x.shape) / scale).astype(x.dtype)

    return jax.tree.map(
        random_leaf, eqx.filter_eval_shape(lambda: make(jax.random.key(0)))
    )


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)


def images() -> tuple[np.ndarray, np.ndarray]:
    return normal(2, BATCH, 8, 8, 3), np.arange(BATCH)


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
    params = init_with_numpy(lambda key: net.init(key, x[0]))
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
    params = init_with_numpy(lambda key: net.init(key, ids[0]))
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
    params = init_with_numpy(lambda key: net.init(key, ids[0]))
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def flax_lstm() -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(VOCABULARY, WIDTH)(ids)
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
            return nn.Dense(VOCABULARY)(nn.RNN(nn.GRUCell(WIDTH))(x))

    net, ids = Net(), tokens()
    params = init_with_numpy(lambda key: net.init(key, ids[0]))
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def nnx_mlp() -> Any:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.one = nnx.Linear(12, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.two = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.two(nnx.relu(self.norm(self.one(x))))

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)
    params = init_with_numpy(lambda key: shapes)
    x = normal(0, BATCH, 12)

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(nnx.merge(graph, params)(x), y)

    return loss, params, (x, np.arange(BATCH) % 3)


def equinox_cnn() -> Any:
    def make(key: jax.Array) -> Any:
        layers = [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=key),
            eqx.nn.GroupNorm(4, 8),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.ConvTranspose2d(8, 4, 3, stride=2, key=key),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(324, 10, key=key),
        ]
        return eqx.nn.Sequential(layers)

    params, static = eqx.partition(init_with_numpy(make), eqx.is_inexact_array)
    x, y = images()

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(eqx.combine(params, static)(x), y)

    return loss, params, (x.transpose(0, 3, 1, 2), y)


def equinox_attention() -> Any:
    def make(key: jax.Array) -> Any:
        embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key)
        return embed, eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key)

    params, static = eqx.partition(init_with_numpy(make), eqx.is_inexact_array)

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
    params = init_with_numpy(lambda key: net.init(key, ids[0]))
    return lambda p, t: cross_entropy(net.apply(p, t), t), params, ids


def lora() -> Any:
    base = [normal(i, WIDTH, WIDTH) / 4 for i in range(3)]
    params = [
        {"a": normal(9 + i, WIDTH, 2), "b": normal(19 + i, 2, WIDTH) / 9}
        for i in range(3)
    ]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        # Adapters applied separately, and adapters merged into the weights.
        for i, (w, p) in enumerate(zip(base, params, strict=True)):
            if i < 2:
                x = jnp.tanh(x @ w + 0.5 * (x @ p["a"]) @ p["b"])
            else:
                x = jnp.tanh(x @ (w + 0.5 * p["a"] @ p["b"]))
        return jnp.sum(x**2)

    return loss, params, normal(30, BATCH, LENGTH, WIDTH)


def siamese() -> Any:
    params = {"conv": normal(0, 3, 3, 3, 5) / 5, "dense": normal(1, 320, 4) / 18}

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
    return loss, params, (x, np.roll(x, 1, axis=1))


def weight_standardised() -> Any:
    params = {"kernel": normal(0, 3, 3, 3, 6), "gain": np.ones(6, np.float32)}

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


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(flax_cnn, marks=pytest.mark.slow),
        pytest.param(flax_transformer, marks=pytest.mark.slow),
        pytest.param(flax_scanned_layers, marks=pytest.mark.slow),
        pytest.param(flax_lstm, marks=pytest.mark.slow),
        nnx_mlp,
        pytest.param(equinox_cnn, marks=pytest.mark.matrix),
        equinox_attention,
        pytest.param(haiku_lstm, marks=pytest.mark.slow),
        lora,
        pytest.param(siamese, marks=pytest.mark.matrix),
        pytest.param(weight_standardised, marks=pytest.mark.matrix),
    ],
    ids=lambda model: model.__name__,
)
def test_bookkeeping_matches_vmap_engine(model):
    loss, params, batch = model()
    mask = np.arange(BATCH) != 2

    @jax.jit
    def clipped_sums(clip_norm: float) -> Any:
        return [
            dpjax.clipped_grad(loss, clip_norm, engine=engine)(params, batch, mask=mask)
            for engine in ("vmap", "bookkeeping")
        ]

    clip_norm = float(np.median(clipped_sums(1.0)[0][1].norm))
    (want, by_hand), (got, per_example) = clipped_sums(clip_norm)
    # Norms are rounded up (tests/test_rounding.py); sums have 1e3 terms in float32.
    np.testing.assert_allclose(per_example.norm, by_hand.norm, rtol=1e-4)
    np.testing.assert_allclose(per_example.loss, by_hand.loss, rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-5 * clip_norm)


def test_norms_of_scanned_and_rematerialised_layers_use_rows():
    loss, params, ids = flax_scanned_layers()
    rows = dpjax.explain(loss, params, ids).rows
    matrices = [row for row in rows if "kernel" in row.parameter]
    assert len(matrices) == 6
    assert {row.norm for row in matrices} == {"rows"}


def test_norms_of_tied_embeddings_use_rows():
    loss, params, ids = flax_transformer()
    rows = {row.parameter: row for row in dpjax.explain(loss, params, ids).rows}
    embedding = rows["['params']['Embed_0']['embedding']"]
    assert embedding.sites == "gather (gather), dot_general (dense)"
    assert embedding.norm == "rows"
