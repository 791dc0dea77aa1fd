"""Random losses: chains of layers that use parameters in every known way."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

ROWS, WIDTH, VOCABULARY = 4, 6, 9


@dataclasses.dataclass
class Program:
    """A loss under construction: its parameters and its layers."""

    rng: np.random.Generator
    params: list[np.ndarray] = dataclasses.field(default_factory=list)
    layers: list[Any] = dataclasses.field(default_factory=list)

    def param(self, *shape: int, dtype: Any = jnp.float32) -> int:
        scale = 1.0 / np.sqrt(shape[-1] if shape else 1)
        value = self.rng.normal(size=shape) * scale
        self.params.append(np.asarray(value, jnp.dtype(dtype)))
        return len(self.params) - 1

    def loss(self, params: list[Any], example: Any) -> jax.Array:
        x, ids, target = example
        for layer in self.layers:
            x = layer(params, x, ids)
        return jnp.mean((x - target) ** 2)


def dense(p: Program, draw: Any) -> Any:
    w, b = p.param(WIDTH, WIDTH), p.param(WIDTH)
    return lambda q, x, ids: x @ q[w] + q[b][None]


def reused_weight(p: Program, draw: Any) -> Any:
    square = [i for i, w in enumerate(p.params) if w.shape == (WIDTH, WIDTH)]
    w = draw(st.sampled_from(square)) if square else p.param(WIDTH, WIDTH)
    if draw(st.booleans()):
        return lambda q, x, ids: x @ q[w].T
    return lambda q, x, ids: jnp.tanh(x @ q[w])


def elementwise(p: Program, draw: Any) -> Any:
    s, b = p.param(WIDTH), p.param(ROWS, 1)
    return lambda q, x, ids: x * q[s][None] + jnp.sin(q[b])


def norm(p: Program, draw: Any) -> Any:
    s, b = p.param(WIDTH), p.param(WIDTH)

    def layer(q: Any, x: Any, ids: Any) -> Any:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 0.1)
        return (x - mean) * scale * (1 + q[s][None]) + q[b][None]

    return layer


def attention(p: Program, draw: Any) -> Any:
    w, o = p.param(WIDTH, 2, 3), p.param(2, 3, WIDTH)

    def layer(q: Any, x: Any, ids: Any) -> Any:
        y = jnp.einsum("td,dhk->htk", x, q[w])
        a = jax.nn.softmax(jnp.einsum("htk,hsk->hts", y, y))
        return x + jnp.einsum("htk,hkd->td", jnp.einsum("hts,hsk->htk", a, y), q[o])

    return layer


def grouped_matrices(p: Program, draw: Any) -> Any:
    w = p.param(ROWS, WIDTH, WIDTH)
    if draw(st.booleans()):
        return lambda q, x, ids: jnp.einsum("td,tdp->tp", x, q[w])
    return lambda q, x, ids: jnp.einsum("tpd,td->tp", q[w], x)


def embedding(p: Program, draw: Any) -> Any:
    w = p.param(VOCABULARY, WIDTH)
    mode = draw(st.sampled_from(["clip", "fill", "wrap"]))

    def layer(q: Any, x: Any, ids: Any) -> Any:
        x = x + jnp.take(q[w], ids, axis=0, mode=mode, fill_value=0.0)
        return jnp.tanh(x @ q[w].T) @ q[w]

    return layer


def convolution(p: Program, draw: Any) -> Any:
    groups = draw(st.sampled_from([1, 2, 3]))
    dilation = draw(st.integers(1, 2))
    stride = draw(st.integers(1, 2))
    size = draw(st.integers(1, 3))
    window = (size - 1) * dilation
    low = draw(st.integers(-1, 2))
    w = p.param(size, WIDTH // groups, WIDTH)
    # With input dilation the output has as many rows as the input.
    high = stride * (ROWS - 1) + 1 + window - ((ROWS - 1) * 2 + 1) - low

    def layer(q: Any, x: Any, ids: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x[None],
            q[w],
            window_strides=(stride,),
            padding=[(low, high)],
            lhs_dilation=(2,),
            rhs_dilation=(dilation,),
            feature_group_count=groups,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[0]
        return x + jnp.tanh(y)

    return layer


def recurrence(p: Program, draw: Any) -> Any:
    w, u, b = p.param(WIDTH, WIDTH), p.param(WIDTH, WIDTH), p.param(WIDTH)
    start = p.param(WIDTH)
    reverse = draw(st.booleans())

    def layer(q: Any, x: Any, ids: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ q[w] + h @ q[u] + q[b])
            return h, h

        return jax.lax.scan(step, q[start], x, reverse=reverse)[1]

    return layer


def stacked_layers(p: Program, draw: Any) -> Any:
    w, s, shared = p.param(3, WIDTH, WIDTH), p.param(3, WIDTH), p.param(WIDTH, WIDTH)

    def layer(q: Any, x: Any, ids: Any) -> Any:
        def step(x: Any, layer: Any) -> Any:
            w, s = layer
            x = jnp.tanh(x @ w.T @ q[shared]) * s[None]
            return x, None

        return jax.lax.scan(step, x, (q[w], q[s]))[0]

    return layer


def nested_scans(p: Program, draw: Any) -> Any:
    w, u, b = p.param(2, WIDTH, WIDTH), p.param(WIDTH, WIDTH), p.param(2, WIDTH)

    def layer(q: Any, x: Any, ids: Any) -> Any:
        def outer(x: Any, layer: Any) -> Any:
            w, b = layer

            def inner(h: Any, x: Any) -> Any:
                h = jnp.tanh(x @ w + h @ q[u] + b)
                return h, h

            return jax.lax.scan(inner, x[0], x)[1], None

        return jax.lax.scan(outer, x, (q[w], q[b]))[0]

    return layer


def normalised_weight(p: Program, draw: Any) -> Any:
    v, g = p.param(WIDTH, WIDTH), p.param(WIDTH)

    def layer(q: Any, x: Any, ids: Any) -> Any:
        w = q[g][None] * q[v] / jnp.sqrt(jnp.sum(q[v] ** 2, axis=0, keepdims=True))
        return x @ w

    return layer


def matrix_slices(p: Program, draw: Any) -> Any:
    whole, half = p.param(WIDTH, 2 * WIDTH), p.param(WIDTH, WIDTH)
    kind = draw(st.integers(0, 3))
    places = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))

    def layer(q: Any, x: Any, ids: Any) -> Any:
        if kind == 3:
            layers = q[whole].reshape(2, WIDTH, WIDTH)
            for i in places:
                x = jnp.tanh(x @ layers[i])
            return x
        if kind == 0:
            a, b = q[whole][:, :WIDTH], q[whole][:, WIDTH:]
            return jnp.tanh(x @ a) * (x @ b)
        if kind == 1:
            joint = x @ jnp.concatenate([q[whole], q[half]], axis=1)
            return sum(jnp.split(joint, 3, axis=1))
        return x @ q[whole][:, 2 : 2 + WIDTH] + x @ q[half].reshape(-1).reshape(
            WIDTH, WIDTH
        )

    return layer


def called_functions(p: Program, draw: Any) -> Any:
    w, s = p.param(WIDTH, WIDTH), p.param(WIDTH)
    kind = draw(st.integers(0, 3))

    @jax.custom_vjp
    def doubled(w: Any, x: Any) -> Any:
        return x @ w

    # A custom derivative that differs from the function's own: inlining would lose it.
    doubled.defvjp(
        lambda w, x: (x @ w, (w, x)),
        lambda residuals, g: (2 * residuals[1].T @ g, g @ residuals[0].T),
    )

    def layer(q: Any, x: Any, ids: Any) -> Any:
        if kind == 0:
            return jax.checkpoint(lambda w, x: jnp.sin(x @ w) @ w)(q[w], x)
        if kind == 1:
            return doubled(q[w], x)
        if kind == 2:
            return jax.jit(lambda w, x: jax.nn.silu(x @ w) + jax.nn.relu(w[0])[None])(
                q[w], x
            )
        return jax.lax.cond(
            ids[0] > 4, lambda w, x: x @ w, lambda w, x: x * q[s][None], q[w], x
        )

    return layer


def penalty(p: Program, draw: Any) -> Any:
    w = p.param(WIDTH, WIDTH)
    frozen = draw(st.booleans())

    def layer(q: Any, x: Any, ids: Any) -> Any:
        v = jax.lax.stop_gradient(q[w]) if frozen else q[w]
        return x @ q[w] + 0.1 * jnp.sum(v**2)

    return layer


def looked_up_weights(p: Program, draw: Any) -> Any:
    w, scale, table = (
        p.param(VOCABULARY, WIDTH, WIDTH),
        p.param(),
        p.param(VOCABULARY, WIDTH),
    )
    kind = draw(st.integers(0, 2))

    def layer(q: Any, x: Any, ids: Any) -> Any:
        x = jnp.tanh(q[scale] * x)
        if kind == 0:
            return x @ q[w][ids[0]]
        if kind == 1:
            rows = jax.lax.dynamic_slice_in_dim(q[table].T, ids[0] + 2, 1, axis=1)
            return x + rows.T + jax.lax.dynamic_slice_in_dim(q[table], ids[1], ROWS)
        looked_up = jax.vmap(lambda table, i: table[i], in_axes=(None, 0))
        return x * looked_up(q[table], ids) + jnp.where(x > q[scale], x, 0.0)

    return layer


LAYERS = (
    dense,
    reused_weight,
    elementwise,
    norm,
    attention,
    grouped_matrices,
    embedding,
    convolution,
    recurrence,
    stacked_layers,
    nested_scans,
    normalised_weight,
    matrix_slices,
    called_functions,
    penalty,
    looked_up_weights,
)


def rematerialise(layer: Any) -> Any:
    def checkpointed(q: Any, x: Any, ids: Any) -> Any:
        return jax.checkpoint(lambda x, ids: layer(q, x, ids))(x, ids)

    return checkpointed


@st.composite
def programs(draw: Any, *, batch: int = 3, most: int = 4) -> tuple[Any, Any, Any]:
    """Strategy for a random loss, its parameters and a batch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    program = Program(rng)
    for make in draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=most)):
        layer = make(program, draw)
        again = draw(st.booleans())
        program.layers.append(rematerialise(layer) if again else layer)
    examples = (
        rng.normal(size=(batch, ROWS, WIDTH)).astype(np.float32),
        rng.integers(0, VOCABULARY, size=(batch, ROWS)),
        rng.normal(size=(batch, ROWS, WIDTH)).astype(np.float32),
    )
    return program.loss, program.params, examples
