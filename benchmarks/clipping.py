"""Measure time, memory and compilation of a clipped sum against a plain gradient.

    pip install -e '.[bench]'
    python benchmarks/clipping.py [mlp cnn wide_resnet transformer rematerialised]
        [--without-peers]

Each network has its own result. `opacus_ghost.py` measures Opacus in one separate
process, on all networks but the last. The whole script takes about 9 minutes on two
cores.
"""

import importlib
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import _networks
import jax
import jax.numpy as jnp
import optax
from _results import OURS, Table, parser, print_tables, require, write
from _timing import compiled, said, take_turns

import dpjax

CLIP_NORM = 1.0
NETWORKS = ["mlp", "cnn", "wide_resnet", "transformer", "rematerialised"]
ROUNDS = 5


def plain(loss: Any) -> Callable[..., Any]:
    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, batch))

    return jax.value_and_grad(mean_loss)


def optax_aggregate(loss: Any, size: int) -> Callable[..., Any]:
    aggregate = optax.contrib.differentially_private_aggregate(CLIP_NORM, 0.0, 0)

    def step(params: Any, batch: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        mean, _ = aggregate.update(grads, aggregate.init(params))
        return jax.tree.map(lambda x: x * size, mean)

    return step


def contenders(
    loss: Any, size: int, peers: list[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield names and functions, the plain gradient first; b is the batch size."""
    yield "plain gradient", plain(loss)
    for engine in ("bookkeeping", "ghost", "vmap"):
        fn = dpjax.clipped_grad(loss, CLIP_NORM, engine=engine)
        yield f"dpjax {engine}", fn
    yield (
        "dpjax bookkeeping, microbatches of b/4",
        dpjax.clipped_grad(
            loss, CLIP_NORM, engine="bookkeeping", microbatch_size=size // 4
        ),
    )
    yield "optax.contrib", optax_aggregate(loss, size)
    if "jax_privacy" not in peers:
        return
    jax_privacy = importlib.import_module("jax_privacy")
    microbatches = {None: "", size // 8: ", microbatches of b/8"}
    for micro, words in (microbatches | {1: ", microbatches of 1"}).items():
        yield (
            f"jax_privacy{words}",
            jax_privacy.clipped_grad(
                loss,
                l2_clip_norm=CLIP_NORM,
                keep_batch_dim=False,
                microbatch_size=micro,
            ),
        )


def measure(name: str, peers: list[str], seconds: float) -> list[Table]:
    """Measure time, memory and compilation of all functions on one network."""
    loss, params, batch = getattr(_networks, name)()
    size = jax.tree.leaves(batch)[0].shape[0]
    count = sum(x.size for x in jax.tree.leaves(params))
    programs, build = {}, {}
    for label, fn in contenders(loss, size, peers):
        programs[label], build[label] = compiled(fn, params, batch)
    times = take_turns(
        {label: lambda p=p: p(params, batch) for label, p in programs.items()},
        rounds=ROUNDS,
        seconds=seconds,
    )
    rows = []
    for label, timing in times.items():
        memory = programs[label].memory_analysis().temp_size_in_bytes / 1e6
        spread = [1e3 * timing.least, 1e3 * timing.most]
        rows.append(
            [label, 1e3 * timing.median, spread, timing.count, memory, build[label]]
        )
    by_rows, formed = (
        programs[f"dpjax {engine}"](params, batch)[1].norm
        for engine in ("bookkeeping", "vmap")
    )
    columns = {"": "{}", "ms": "{:.1f}", "minimum to maximum, ms": "{:.1f} to {:.1f}"}
    columns |= {"calls": "{}", "MB": "{:.1f}", "compile, s": "{:.1f}"}
    excess = "norms by rows exceed those of gradients by"
    network = {"parameters": "{:,}", "batch": "{}", excess: "{:.0e}"}
    return [
        Table("network", network, [[count, size, jnp.max(by_rows / formed) - 1]]),
        Table("contenders", columns, rows),
    ]


def main() -> None:
    """Measure the named networks, one after the other."""
    options = parser(__doc__)
    options.add_argument("networks", nargs="*", metavar="NETWORK", default=NETWORKS)
    options.add_argument("--seconds", type=float, default=4.0, help="for each function")
    options.add_argument("--without-peers", action="store_true")
    arguments = options.parse_args()
    beside_opacus = [name for name in arguments.networks if name != "rematerialised"]
    expected = ["jax_privacy", *(["opacus"] if beside_opacus else [])]
    peers = require(expected, arguments.without_peers)
    for name in arguments.networks:
        tables = measure(name, peers, arguments.seconds)
        print(f"\n{name}")
        print_tables(*tables)
        write(
            f"clipping.{name}",
            arguments,
            tables,
            packages=[*OURS, *(set(peers) - {"opacus"})],
            times=said(ROUNDS, arguments.seconds),
        )
    if "opacus" in peers:
        script = pathlib.Path(__file__).with_name("opacus_ghost.py")
        same = ["--results", arguments.results, "--seconds", str(arguments.seconds)]
        subprocess.run([sys.executable, script, *beside_opacus, *same], check=True)


if __name__ == "__main__":
    main()
