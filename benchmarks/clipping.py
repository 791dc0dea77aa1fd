"""What a clipped sum costs: time, memory and compilation beside a plain gradient.

Run `python benchmarks/clipping.py [mlp|cnn|wide_resnet|transformer ...]`; peers that
are not installed are left out. Opacus is measured by `benchmarks/opacus_ghost.py` in a
process of its own, in ratios to PyTorch's plain step. All of it takes about 7 minutes
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
SECONDS, ROUNDS = 4.0, 5  # of repetitions for each function, in so many turns


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


class Subject:
    """A compiled function, its seconds to trace and compile, and its repetitions."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        start = time.perf_counter()
        self.compiled = jax.jit(fn).lower(*args).compile()
        self.build = time.perf_counter() - start
        memory = self.compiled.memory_analysis()
        self.megabytes = memory.temp_size_in_bytes / 1e6
        self.args = args
        self.times: list[float] = []
        self()  # the first call is not counted

    def __call__(self) -> Any:
        """What the function returns, when it is there."""
        return jax.block_until_ready(self.compiled(*self.args))

    def repeat(self, seconds: float) -> None:
        """Repetitions for a while: one at least, but one in all if it is slow."""
        if self.times and self.times[0] > SECONDS:
            return
        end = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            self()
            self.times.append(time.perf_counter() - start)
            if time.perf_counter() > end:
                return

    def numbers(self) -> list[float]:
        """Median milliseconds a call, megabytes of temporaries, seconds to build."""
        return [1e3 * statistics.median(self.times), self.megabytes, self.build]


def main(names: list[str]) -> None:
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "optax", "jax_privacy")
        if importlib.util.find_spec(name)
    ]
    device = jax.devices()[0]
    print(f"{device.device_kind} ({platform.machine()}); {', '.join(versions)}")
    print("medians of n repetitions, in turn; in brackets the ratio to the plain step")
    for name in names:
        loss, params, batch = getattr(networks, name)()
        size = jax.tree.leaves(batch)[0].shape[0]
        count = sum(x.size for x in jax.tree.leaves(params))
        print(f"\n{name}: {count / 1e6:.2f}e6 parameters, batch {size}")
        header = f"{'':36}{'ms':>9}{'':8}{'MB':>9}{'':8}{'compile s':>9}{'':8}{'n':>4}"
        print(header)
        subjects = {
            label: Subject(fn, params, batch) for label, fn in contenders(loss, batch)
        }
        # In turn, so that what else the machine does meets all of them.
        for _ in range(ROUNDS):
            for subject in subjects.values():
                subject.repeat(SECONDS / ROUNDS)
        base = subjects["plain gradient"].numbers()
        for label, subject in subjects.items():
            cells = "".join(
                f"{x:9.1f} ({x / b:5.1f})"
                for x, b in zip(subject.numbers(), base, strict=True)
            )
            print(f"{label:36}{cells}{len(subject.times):4}", flush=True)
        rows, formed = (
            subjects[f"dpjax {engine}"]()[1].norm for engine in ("bookkeeping", "vmap")
        )
        excess = jnp.max(rows / formed) - 1
        print(
            f"norms by book-keeping exceed norms of gradients by {excess:.1e} at most"
        )
    print(flush=True)
    if importlib.util.find_spec("opacus"):
        script = pathlib.Path(__file__).with_name("opacus_ghost.py")
        subprocess.run([sys.executable, script, *names], check=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NETWORKS)
