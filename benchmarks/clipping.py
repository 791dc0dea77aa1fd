"""What a clipped sum costs: time, memory and compilation beside a plain gradient.

Run `python benchmarks/clipping.py [mlp|cnn|wide_resnet|transformer ...]`; peers that
are not installed are left out. Opacus is measured by `benchmarks/opacus_ghost.py` in a
process of its own, in ratios to PyTorch's plain step. All of it takes about 5 minutes
on two cores.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import networks
import optax

import dpjax

CLIP_NORM = 1.0
NETWORKS = ["mlp", "cnn", "wide_resnet", "transformer"]
SECONDS = 3.0  # of repetitions for each measurement


def plain(loss: Any, batch: Any) -> Callable[..., Any]:
    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, batch))

    return jax.value_and_grad(mean_loss)


def optax_aggregate(loss: Any, batch: Any) -> Callable[..., Any]:
    size = jax.tree.leaves(batch)[0].shape[0]
    aggregate = optax.contrib.differentially_private_aggregate(CLIP_NORM, 0.0, 0)

    def step(params: Any, batch: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        mean, _ = aggregate.update(grads, aggregate.init(params))
        return jax.tree.map(lambda x: x * size, mean)

    return step


def contenders(loss: Any, batch: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The plain step first."""
    size = jax.tree.leaves(batch)[0].shape[0]
    yield "plain gradient", plain(loss, batch)
    for engine in ("bookkeeping", "ghost", "vmap"):
        fn = dpjax.clipped_grad(loss, CLIP_NORM, engine=engine)
        yield f"dpjax {engine}", fn
    yield (
        f"dpjax bookkeeping, microbatch {size // 4}",
        dpjax.clipped_grad(
            loss, CLIP_NORM, engine="bookkeeping", microbatch_size=size // 4
        ),
    )
    yield "optax.contrib", optax_aggregate(loss, batch)
    try:
        jax_privacy = importlib.import_module("jax_privacy")
    except ImportError:
        return
    for micro in dict.fromkeys((None, size // 8, 1)):
        yield (
            f"jax_privacy, microbatch {micro or 'none'}",
            jax_privacy.clipped_grad(
                loss,
                l2_clip_norm=CLIP_NORM,
                keep_batch_dim=False,
                microbatch_size=micro,
            ),
        )


def measure(fn: Callable[..., Any], *args: Any) -> tuple[list[float], int, Any]:
    """Median seconds a call, megabytes of temporaries, seconds to trace and compile.

    Then the repetitions, three at least but one if it takes longer than `SECONDS`, and
    what the function returned.
    """
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    build = time.perf_counter() - start
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    out = jax.block_until_ready(compiled(*args))
    times: list[float] = []
    while sum(times) < SECONDS or (len(times) < 3 and max(times) < SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return [statistics.median(times), megabytes, build], len(times), out


def main(names: list[str]) -> None:
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "optax", "jax_privacy")
        if importlib.util.find_spec(name)
    ]
    device = jax.devices()[0]
    print(f"{device.device_kind} ({platform.machine()}); {', '.join(versions)}")
    print("median of n repetitions; in brackets the ratio to the plain gradient")
    for name in names:
        loss, params, batch = getattr(networks, name)()
        size = jax.tree.leaves(batch)[0].shape[0]
        count = sum(x.size for x in jax.tree.leaves(params))
        print(f"\n{name}: {count / 1e6:.2f}e6 parameters, batch {size}")
        header = f"{'':36}{'ms':>9}{'':8}{'MB':>9}{'':8}{'compile s':>9}{'':8}{'n':>4}"
        print(header)
        base, norms = None, {}
        for label, fn in contenders(loss, batch):
            numbers, n, out = measure(fn, params, batch)
            base = base or numbers
            if label.startswith("dpjax"):
                norms[label] = out[1].norm
            cells = "".join(
                f"{x * unit:9.1f} ({x / b:5.1f})"
                for x, b, unit in zip(numbers, base, (1e3, 1, 1), strict=True)
            )
            print(f"{label:36}{cells}{n:4}", flush=True)
        excess = jnp.max(norms["dpjax bookkeeping"] / norms["dpjax vmap"]) - 1
        print(
            f"norms by book-keeping exceed norms of gradients by {excess:.1e} at most"
        )
    print(flush=True)
    if importlib.util.find_spec("opacus"):
        script = pathlib.Path(__file__).with_name("opacus_ghost.py")
        subprocess.run([sys.executable, script, *names], check=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NETWORKS)
