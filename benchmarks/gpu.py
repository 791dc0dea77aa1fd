"""Measure steps, noise and accountants of private training on an accelerator.

    pip install -e '.[bench]' 'jax[cuda12]'
    python benchmarks/gpu.py [PART ...] [--small]

The parts are the networks (`mlp`, `cnn`, `wide_resnet`, and a transformer of GPT-2's
smallest sizes in bfloat16 at three sequence lengths, with all parameters trained as
`gpt2_256` and with adapters trained as `lora_256`), noise for 10⁶ to 10⁸ parameters
(`noise_6`), and `accountants`. Each part has its own process and its own result,
because a device reports the peak of memory of a process. On a CPU this script measures
nothing. With `--small` the script runs with tiny sizes as a rehearsal, also on a CPU,
and writes no result into `benchmarks/results`.
"""

import functools
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import _networks
import jax
import jax.numpy as jnp
import optax
from _results import FOLDER, OURS, Table, parser, print_tables, write
from _timing import compiled, said, take_turns

import dpjax
from dpjax import Adjacency, strategies
from dpjax.accounting import pld

CLIP_NORM, NOISE_MULTIPLIER, DELTA = 1.0, 1.1, 1e-5
ROUNDS, NUM_STEPS = 20, 4096
MEBIBYTE = 2**20
REFUSED = 2  # the exit status of argparse for wrong arguments
TINY = {"width": 32, "layers": 2, "vocabulary": 64, "heads": 2}


class Network(NamedTuple):
    """A loss of (parameters, example, *frozen), and its arrays or their types."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    frozen: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Return the number of examples in the batch."""
        return jax.tree.leaves(self.batch)[0].shape[0]


def languages() -> dict[str, tuple[Callable[..., Any], dict, dict]]:
    """Return the transformers; each batch has 8,192 tokens at full size."""
    result = {}
    for name, make in (("gpt2", _networks.gpt2), ("lora", _networks.adapters)):
        for length in (256, 512, 1024):
            full = {"batch": 8192 // length, "length": length}
            small = {"batch": 4, "length": length // 32} | TINY
            result[f"{name}_{length}"] = make, full, small
    return result


NETWORKS = {  # the function that makes the network, its full sizes, its small sizes
    "mlp": (_networks.mlp, {"batch": 1024}, {"batch": 8, "sizes": (16, 32, 10)}),
    "cnn": (_networks.cnn, {"batch": 512}, {"batch": 4, "channels": (3, 8, 8)}),
    "wide_resnet": (
        _networks.wide_resnet,
        {"batch": 256},
        {"batch": 2, "depth": 10, "width": 1},
    ),
    **languages(),
}


def network(name: str, small: bool = False) -> Network:
    """Return a network with its arrays."""
    make, *sizes = NETWORKS[name]
    loss, params, batch, *frozen = make(**sizes[small])
    return Network(loss, params, batch, tuple(frozen))


def outline(name: str, small: bool = False) -> Network:
    """Return a network with types in place of arrays; nothing is computed."""
    losses = []

    def arrays() -> Any:
        loss, *rest = network(name, small)
        losses.append(loss)
        return rest

    rest = jax.eval_shape(arrays)
    return Network(losses[0], *rest)


class Step(NamedTuple):
    """An optimizer's init, and a step of (parameters, state, batch, *frozen)."""

    init: Callable[..., Any]
    step: Callable[..., Any]

    def example_arguments(self, net: Network) -> tuple[Any, ...]:
        """Return the types of the step's arguments."""
        state = jax.eval_shape(self.init, net.params)
        return net.params, state, net.batch, *net.frozen


def plain_step(net: Network) -> Step:
    """Return a step of Adam with the gradient of the mean loss."""
    tx = optax.adam(1e-3)

    def mean_loss(params: Any, batch: Any, *frozen: Any) -> jax.Array:
        axes = None, 0, *(None for _ in frozen)
        return jnp.mean(jax.vmap(net.loss, axes)(params, batch, *frozen))

    def step(params: Any, state: Any, batch: Any, *frozen: Any) -> Any:
        grads = jax.grad(mean_loss)(params, batch, *frozen)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Step(tx.init, step)


def private_step(net: Network, noisy: bool = True) -> Step:
    """Return a step of Adam with the clipped sum and noise.

    The step has the mask of a sampled batch. Without noise, which serves only for
    counting, the gradient is the clipped sum divided by the number of examples.
    """
    clipped = dpjax.clipped_grad(net.loss, CLIP_NORM)
    mean = dpjax.noisy_mean(
        clip_norm=clipped,
        noise_multiplier=NOISE_MULTIPLIER,
        expected_batch_size=net.size,
        key=jax.random.key(0),
    )
    tx = optax.chain(mean if noisy else optax.scale(1 / net.size), optax.adam(1e-3))

    def step(params: Any, state: Any, batch: Any, *frozen: Any) -> Any:
        mask = jnp.ones(net.size, bool)
        grads, _ = clipped(params, batch, *frozen, mask=mask)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Step(tx.init, step)


def peak() -> float | None:
    """Return the device's peak MiB in this process; None if JAX does not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    used = stats.get("peak_bytes_in_use")
    return None if used is None else used / MEBIBYTE


def in_place(program: Callable[..., Any], held: list[Any], *rest: Any) -> Any:
    """Return a call that replaces the arrays in `held` by the program's results."""

    def call() -> Any:
        held[:] = program(*held, *rest)
        return held

    return call


def start(step: Step, net: Network) -> list[Any]:
    """Return new parameters and state on the device, for a step that donates both."""
    params = jax.tree.map(jnp.array, net.params)
    return [params, step.init(params)]


def measure_network(name: str, small: bool, rounds: int) -> list[Table]:
    """Measure time, memory and compilation of the plain and the private step."""
    net = network(name, small)
    net = net._replace(params=jax.device_get(net.params))  # each step has a copy
    given = net.batch, *net.frozen
    steps = {"plain": plain_step(net), "private": private_step(net)}
    programs, build, peaks = {}, {}, {}
    for label, step in steps.items():
        held = start(step, net)
        program, build[label] = compiled(step.step, *held, *given, donated=(0, 1))
        programs[label] = program
        jax.block_until_ready(in_place(program, held, *given)())
        peaks[label] = peak()
        del held
    times = take_turns(
        {
            label: in_place(program, start(steps[label], net), *given)
            for label, program in programs.items()
        },
        rounds=rounds,
    )
    rows = []
    for label, timing in times.items():
        temporary = programs[label].memory_analysis().temp_size_in_bytes / MEBIBYTE
        cells = [1e3 * x for x in (timing.median, timing.least, timing.most)]
        cells += [net.size / timing.median, times["plain"].median / timing.median]
        cells += [timing.count, temporary, peaks[label], build[label]]
        rows.append([name, label, *cells])
    columns = {"network": "{}", "step": "{}"} | times_columns()
    columns |= {"examples/s": "{:,.0f}", "throughput over plain": "{:.2f}"}
    columns |= {"calls": "{}", "temporaries, MiB": "{:,.0f}"}
    columns |= {"peak, MiB": "{:,.0f}", "compile, s": "{:.1f}"}
    count = sum(x.size for x in jax.tree.leaves(net.params))
    frozen = sum(x.size for x in jax.tree.leaves(net.frozen))
    said_of = ("network", "{}"), ("parameters", "{:,}"), ("frozen", "{:,}")
    sizes = dict(said_of) | {"batch": "{:,}"}
    return [
        Table("networks", sizes, [[name, count, frozen, net.size]]),
        Table("steps", columns, rows),
    ]


def times_columns() -> dict[str, str]:
    """Return the columns of median, minimum and maximum."""
    return {"ms": "{:.3g}", "least": "{:.3g}", "most": "{:.3g}"}


def normal() -> optax.GradientTransformation:
    """Add `jax.random.normal` to the updates; each kind of noise needs normals."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        drawn = jax.random.normal(
            jax.random.fold_in(jax.random.key(0), state), updates.shape
        )
        return updates + drawn, state + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def kinds() -> Mapping[str, Any]:
    """Return all kinds of noise; the other kinds are compared with the first kind."""
    given = {"num_steps": NUM_STEPS, "key": jax.random.key(0)}
    one = strategies.rational([0.5], [0.95])
    correlated = functools.partial(dpjax.correlated_noise, **given)
    tree = functools.partial(dpjax.tree_momentum, 0.99, 1.3, **given)
    geometric = strategies.geometric(0.99)
    return {
        "jax.random.normal": normal(),
        "independent": dpjax.add_gaussian_noise(1.3, key=jax.random.key(0)),
        "rational, one stored vector": correlated(one, 1.3),
        "geometric, one stored vector": correlated(geometric, 1.3),
        "geometric, regenerated": correlated(geometric, 1.3, buffer="regenerate"),
        "tree, stored": tree(buffer="stored"),
        "tree, regenerated": tree(buffer="regenerate"),
    }


def measure_noise(size: int, rounds: int) -> list[Table]:
    """Measure the time of a step and the stored state of each kind of noise."""
    zeros = jnp.zeros(size)
    functions, stored = {}, {}
    for label, tx in kinds().items():
        state = tx.init(zeros)
        stored[label] = sum(x.nbytes for x in jax.tree.leaves(state)) / MEBIBYTE
        update = jax.jit(tx.update, donate_argnums=1)
        held = [state]

        def call(update: Any = update, held: list[Any] = held) -> Any:
            out, held[0] = update(zeros, held[0])
            return out, held[0]

        functions[label] = call
        call()  # the output state may have other types than the first state
    times = take_turns(functions, rounds=rounds)
    base = times["jax.random.normal"].median
    rows = [
        [
            *(size, label),
            *(1e3 * x for x in (timing.median, timing.least, timing.most)),
            *(timing.median / base, size / timing.median / 1e9),
            *(timing.count, stored[label]),
        ]
        for label, timing in times.items()
    ]
    columns = {"parameters": "{:,}", "noise": "{}"} | times_columns()
    columns |= {"over jax.random.normal": "{:.2f}", "1e9 numbers/s": "{:.3g}"}
    columns |= {"calls": "{}", "state, MiB": "{:,.0f}"}
    return [Table("noise", columns, rows)]


def epsilon(noise_multiplier: jax.Array) -> jax.Array:
    """Return ε of 1,000 Poisson batches at rate 0.01, by privacy-loss distributions."""
    step = pld.poisson_gaussian(noise_multiplier, 0.01, adjacency=Adjacency.ADD_REMOVE)
    return pld.epsilon(pld.compose(step, 1_000), DELTA)


def several(noise_multipliers: jax.Array) -> jax.Array:
    """Return ε of many noise multipliers, at most 100 at a time.

    A thousand at a time would need 25 GiB.
    """
    most = min(100, noise_multipliers.size)
    return jax.lax.map(epsilon, noise_multipliers, batch_size=most)


def measure_accountants(count: int, rounds: int) -> list[Table]:
    """Measure the time of ε, of its derivative, and of ε for many noise multipliers."""
    many = jnp.linspace(0.6, 3.0, count)
    cases = {
        "ε": (1, epsilon, jnp.float32(1.0)),
        "dε/dσ": (1, jax.grad(epsilon), jnp.float32(1.0)),
        "ε, vmapped": (count, several, many),
    }
    functions, build = {}, {}
    for label, (_, fn, x) in cases.items():
        program, build[label] = compiled(fn, x)
        functions[label] = functools.partial(program, x)
    rows = []
    for label, timing in take_turns(functions, rounds=rounds).items():
        number = cases[label][0]
        cells = [1e3 * x for x in (timing.median, timing.least, timing.most)]
        each = 1e3 * timing.median / number
        rows.append([label, number, *cells, each, timing.count, build[label]])
    columns = {"pld": "{}", "noise multipliers": "{:,}"} | times_columns()
    columns |= {"ms each": "{:.3g}", "calls": "{}", "compile, s": "{:.1f}"}
    return [Table("accountants", columns, rows)]


NOISE = {f"noise_{power}": 10**power for power in (6, 7, 8)}
PARTS = [*NETWORKS, *NOISE, "accountants"]


def measure(part: str, small: bool, rounds: int) -> list[Table]:
    """Measure the tables of a part."""
    if part in NETWORKS:
        return measure_network(part, small, rounds)
    if part in NOISE:
        return measure_noise(NOISE[part] // 1000 if small else NOISE[part], rounds)
    return measure_accountants(10 if small else 1_000, rounds)


def about_device() -> Table:
    """Return a table of the device, with the names that JAX gives."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    version = device.client.platform_version.splitlines()[0]
    columns = {"device": "{}", "platform": "{}", "memory for JAX, MiB": "{:,.0f}"}
    cells = [device.device_kind, version, limit and limit / MEBIBYTE]
    return Table("device", columns, [cells])


def drivers() -> list[str]:
    """Return the installed packages by which JAX uses an accelerator."""
    starts = ("jax-cuda", "jax-rocm", "nvidia-cudnn", "libtpu")
    names = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return sorted(name for name in names if name and name.startswith(starts))


def measure_apart(parts: list[str], given: list[str]) -> None:
    """Measure each part in its own process; other parts run even if a part fails."""
    failed = []
    for part in parts:
        status = subprocess.run([sys.executable, __file__, part, *given]).returncode
        if status == REFUSED:
            raise SystemExit(REFUSED)
        failed += [part] if status else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    """Measure one part in this process, or several parts in a process each."""
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", default=PARTS)
    options.add_argument("--rounds", type=int, default=ROUNDS, help="at least 10")
    options.add_argument("--small", action="store_true", help="a rehearsal on a CPU")
    arguments = options.parse_args()
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        options.error(f"unknown: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if arguments.rounds < 10:
        options.error(f"--rounds must be at least 10, not {arguments.rounds}")
    if len(arguments.parts) > 1:
        given = ["--results", str(arguments.results), "--rounds", f"{arguments.rounds}"]
        measure_apart(arguments.parts, given + ["--small"] * arguments.small)
        return
    if jax.default_backend() == "cpu" and not arguments.small:
        options.error(
            "JAX found no accelerator, and times of a CPU are not what this measures. "
            "Install JAX for your device (as 'jax[cuda12]'), or rehearse with --small."
        )
    (part,) = arguments.parts
    tables = [about_device(), *measure(part, arguments.small, arguments.rounds)]
    print_tables(*tables)
    if arguments.small and arguments.results == FOLDER:
        return
    write(
        f"gpu.{part}",
        arguments,
        tables,
        packages=[*OURS, *drivers()],
        times=said(arguments.rounds),
    )


if __name__ == "__main__":
    main()
