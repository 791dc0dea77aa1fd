"""Measure noise, memory and long sequences on a mesh of virtual devices of one CPU.

    python benchmarks/devices.py [--size 4194304]

The first table has, for each kind of noise, the computation and the memory of a step on
each of 1, 2, 4 and 8 devices, read from the compiled program, and the step's time. The
devices share the cores of one machine, so that the time cannot fall. The second table
has the memory of a device for 10⁸ parameters over 8 devices. The third table has the
temporaries of a clipped gradient at long sequences, divided by those of the plain
gradient.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from _results import Table, parser, print_tables, write
from _timing import said, take_turns
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dpjax import (
    add_gaussian_noise,
    clipped_grad,
    correlated_noise,
    strategies,
    tree_momentum,
)

jax.config.update("jax_num_cpu_devices", 8)
KEY = jax.random.key(0)
DEVICES = (1, 2, 4, 8)
ROUNDS = 11
MEBIBYTE = 2**20
_tree = functools.partial(tree_momentum, 0.99, 1.3, num_steps=4096, key=KEY)
_geometric = functools.partial(
    correlated_noise, strategies.geometric(0.99), 1.3, num_steps=4096, key=KEY
)
KINDS = {
    "independent": lambda: add_gaussian_noise(1.3, key=KEY),
    "tree, stored": lambda: _tree(buffer="stored"),
    "tree, regenerated": lambda: _tree(buffer="regenerate"),
    "one vector, stored": lambda: _geometric(buffer="stored"),
    "one vector, regenerated": lambda: _geometric(buffer="regenerate"),
}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def divided(count, size):
    """Return the type of a vector that is divided equally over `count` devices."""
    mesh = jax.make_mesh(
        (count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count]
    )
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)


def compiled_step(make, vector):
    """Return the compiled init and update of a noise transformation."""
    tx = make()
    init = jax.jit(tx.init).lower(vector).compile()

    def laid_out(x, sharding):  # counters and keys are not divided
        return x.update(sharding=sharding) if x.ndim else x

    state = jax.tree.map(
        laid_out, jax.eval_shape(tx.init, vector), init.output_shardings
    )
    update = jax.jit(tx.update, donate_argnums=1).lower(vector, state).compile()
    return init, update


def stepping(update, state, zeros):
    """Return a function that runs the next step of the noise."""
    held = [state]

    def step():
        out, held[0] = update(zeros, held[0])
        return out

    return step


def noise(size):
    """Measure the work of a device in a step, and compare the noise.

    The noise on each number of devices is compared with the noise on one device.
    """
    rows = []
    for kind, make in KINDS.items():
        values, functions, result = {}, {}, {}
        for count in DEVICES:
            vector = divided(count, size)
            init, update = compiled_step(make, vector)
            zeros = jax.device_put(jnp.zeros(size), vector.sharding)
            values[count] = np.asarray(update(zeros, init(zeros))[0])
            text = update.as_text()
            result[count] = (
                max(int(n) for n in re.findall(r"[uf]32\[(\d+)\]", text)),
                sum(text.count(f" {name}") for name in COLLECTIVES),
                update.memory_analysis().temp_size_in_bytes / MEBIBYTE,
            )
            functions[count] = stepping(update, init(zeros), zeros)
        times = take_turns(functions, rounds=ROUNDS)
        for count in DEVICES:
            same = "yes" if np.array_equal(values[count], values[1]) else "no"
            milliseconds = 1e3 * times[count].median
            rows.append([kind, count, *result[count], same, milliseconds])
    columns = {"noise": "{}", "devices": "{}", "numbers drawn by each device": "{:,}"}
    columns |= {"collectives": "{}", "temporaries of each device, MiB": "{:.1f}"}
    columns |= {"same values as on one device": "{}", "ms": "{:.0f}"}
    return Table("noise", columns, rows)


def memory(size=10**8, count=8):
    """Return the memory of each device; programs are compiled but not run."""
    rows = []
    for kind, make in KINDS.items():
        init, update = compiled_step(make, divided(count, size))
        stored = init.memory_analysis().output_size_in_bytes / MEBIBYTE
        temporary = update.memory_analysis().temp_size_in_bytes / MEBIBYTE
        rows.append([kind, size, count, stored, temporary])
    columns = {"noise": "{}", "parameters": "{:,}", "devices": "{}"}
    columns |= {
        "state of each device, MiB": "{:.1f}",
        "temporaries of each device, MiB": "{:.1f}",
    }
    return Table("memory", columns, rows)


WIDTH, HEADS, WORDS, LAYERS = 256, 4, 1000, 2


def attention(q, k, v, block=512):
    """Compute causal attention of f[h, t, d] with queries in blocks.

    No array has the size t x t.
    """
    heads, length, width = q.shape
    queries = q.reshape(heads, -1, block, width).swapaxes(0, 1)

    @jax.checkpoint
    def one(first, q):
        scores = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(width)
        before = first + jnp.arange(block)[:, None] >= jnp.arange(length)
        weights = jax.nn.softmax(jnp.where(before, scores, -1e9))
        return first + block, jnp.einsum("hqk,hkd->hqd", weights, v)

    _, out = jax.lax.scan(one, 0, queries)
    return out.swapaxes(0, 1).reshape(heads, length, width)


def transformer(params, ids, recompute=False):
    """Return the loss of one sequence i32[t].

    The derivative uses stored values of the layers, or recomputes the values.
    """

    def layer(x, w):
        y = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * w["gain"]
        parts = [(y @ w[n]).reshape(-1, HEADS, WIDTH // HEADS) for n in "qkv"]
        mixed = attention(*(part.swapaxes(0, 1) for part in parts)).swapaxes(0, 1)
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    layer = jax.checkpoint(layer) if recompute else layer
    x, _ = jax.lax.scan(layer, params["words"][ids], params["layers"])
    scores = jax.nn.log_softmax(x[:-1] @ params["head"])
    return -jnp.mean(jnp.take_along_axis(scores, ids[1:, None], 1))


def shapes():
    """Return the types of the transformer's parameters."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = dict.fromkeys(("q", "k", "v", "out"), array(LAYERS, WIDTH, WIDTH))
    layers["up"] = array(LAYERS, WIDTH, 4 * WIDTH)
    layers["down"] = array(LAYERS, 4 * WIDTH, WIDTH)
    layers["gain"] = array(LAYERS, 1, WIDTH)
    words = {"words": array(WORDS, WIDTH), "head": array(WIDTH, WORDS)}
    return words | {"layers": layers}


def gradients(loss):
    """Return the plain gradient of the mean loss, and clipped gradients, by name."""
    return {
        "plain": jax.grad(lambda p, i: jax.vmap(loss, (None, 0))(p, i).mean()),
        "auto": clipped_grad(loss, 1.0),
        "auto, one example at a time": clipped_grad(loss, 1.0, microbatch_size=1),
        "ghost": clipped_grad(loss, 1.0, engine="ghost"),
        "vmap": clipped_grad(loss, 1.0, engine="vmap"),
        "vmap, one example at a time": clipped_grad(
            loss, 1.0, engine="vmap", microbatch_size=1
        ),
    }


def sequences():
    """Compare the temporaries of clipped gradients with those of the plain gradient."""
    rows = []
    for length, batch, recompute in [
        (2048, 2, False),
        (8192, 2, False),
        (8192, 8, False),
        (8192, 2, True),
        (8192, 8, True),
    ]:
        loss = functools.partial(transformer, recompute=recompute)
        ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        plain = None
        for name, fn in gradients(loss).items():
            program = jax.jit(fn).lower(shapes(), ids).compile()
            used = program.memory_analysis().temp_size_in_bytes / MEBIBYTE
            plain = plain or used
            layers = "recomputed" if recompute else "kept"
            rows.append([length, batch, layers, name, used, used / plain])
    columns = {"tokens": "{:,}", "batch": "{}", "layers": "{}", "gradient": "{}"}
    columns |= {"temporaries, MiB": "{:.0f}", "ratio to plain": "{:.2f}"}
    return Table("sequences", columns, rows)


def main():
    """Run the three measurements."""
    options = parser(__doc__)
    options.add_argument("--size", type=int, default=1 << 22)
    arguments = options.parse_args()
    tables = [noise(arguments.size), memory(), sequences()]
    print_tables(*tables)
    write("devices", arguments, tables, times=said(ROUNDS))


if __name__ == "__main__":
    main()
