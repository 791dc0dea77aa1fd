"""Measure CPU seconds, compiled programs and memory of the first calls of a process.

    pip install -e .
    python benchmarks/first_calls.py [calls] [steps]

Each call is the first call of its kind in a process of its own. A program counts as
compiled if XLA compiles the program; nothing is read from a cache. For each network of
`clipping.py` but the last, and for a network of 48 equal blocks, the script then
measures the CPU seconds to trace and lower the private step, and the CPU seconds to
compile the step, compared with the plain step. CPU seconds are summed over all threads.
The whole script takes about 5 minutes on two cores.
"""

import json
import statistics
import subprocess
import sys
import time

from _results import Table, parser, print_tables, write

ROUNDS = 3

PLD = """
def epsilon(noise):
    step = pld.poisson_gaussian(noise, 0.01, adjacency=dpjax.Adjacency.ADD_REMOVE)
    return pld.epsilon(pld.compose(step, 1000), 1e-5)
"""
SIZES = "sizes = dict(num_examples=5_000, batch_size=250, num_steps=100)\n"
PLAN = SIZES + "plan = dpjax.plan(**sizes, epsilon=3.0, delta=1e-5, clip_norm=1.0)\n"
OTHER = "dpjax.plan(**sizes, epsilon=2.0, delta=1e-6, clip_norm=1.0)\n"
LOSS = """
import numpy as np

x = np.random.default_rng(0).normal(size=(5_000, 20)).astype(np.float32)
data = x, (x[:, 0] > 0).astype(np.float32)

def loss(w, batch):
    x, y = batch
    return optax.sigmoid_binary_cross_entropy(x @ w, y).mean()

key, w = dpjax.random_key(), jnp.zeros(20)
optimizer = plan.optimizer(optax.adam(0.1), key=key)
loss_and_grad = jax.jit(plan.value_and_grad(loss))
"""
INIT = "state = optimizer.init(w)\n"
BATCH = "batch = next(iter(plan.batches(data, key=key)))\n"
GRADIENT = "value, grads = jax.block_until_ready(loss_and_grad(w, batch))\n"
UPDATE = "updates, state = optimizer.update(grads, state, w)\n"
TRAIN = """
state = optimizer.init(w)
for batch in plan.batches(data, key=key):
    value, grads = loss_and_grad(w, batch)
    updates, state = optimizer.update(grads, state, w)
    w = optax.apply_updates(w, updates)
print(plan.guarantee)
"""
# For each row, the code before the clock starts, and the measured code.
CALLS = {
    "import dpjax.plan, beyond optax": ("import optax", "import dpjax; dpjax.plan"),
    "gdp.epsilon": ("", "gdp.epsilon(1.0, 1e-5)"),
    "pld.epsilon": (PLD, "epsilon(1.0)"),
    "its gradient": (PLD, "jax.grad(epsilon)(1.0)"),
    "calibrate.solve": (PLD, "calibrate.solve(epsilon, 2.0)"),
    "plan": ("", PLAN),
    "another plan": (PLAN, OTHER),
    "print(plan.guarantee)": (PLAN, "print(plan.guarantee)"),
    "optimizer.init": (PLAN + LOSS, INIT),
    "first batch": (PLAN + LOSS, BATCH),
    "value_and_grad": (PLAN + LOSS + BATCH, GRADIENT),
    "optimizer.update, Adam": (PLAN + LOSS + INIT + BATCH + GRADIENT, UPDATE),
    "the README's program": ("", PLAN + LOSS + TRAIN),
}
IMPORTS = """
import dpjax, jax, optax
import jax.numpy as jnp
from dpjax.accounting import calibrate, gdp, pld
"""
PROBE = """
import contextlib, io, json, resource, sys, time
before, measured = json.loads(sys.stdin.read())
names = {}
exec(before, names)
import jax
programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: programs.append(event)
    if event == "/jax/core/compile/backend_compile_duration" else None
)
start = time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    exec(measured, names)
seconds = time.process_time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
print(json.dumps([seconds, len(programs), peak]))
"""


def first_call(before: str, measured: str) -> list[float]:
    """Return CPU seconds, number of programs and peak MiB of one fresh process."""
    if not measured.startswith("import"):
        before = IMPORTS + before
    out = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps([before, measured]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


def calls() -> Table:
    """Measure the first call of each kind: medians of `ROUNDS` processes."""
    rows = []
    for name, code in CALLS.items():
        result = [first_call(*code) for _ in range(ROUNDS)]
        rows.append([name, *map(statistics.median, zip(*result, strict=True))])
    columns = {"first call": "{}", "CPU seconds": "{:.2f}"}
    columns |= {"programs": "{:.0f}", "peak memory, MiB": "{:.0f}"}
    return Table("calls", columns, rows)


def equal_blocks(blocks: int = 48, width: int = 128, batch: int = 64):
    """Return loss, parameters and batch of a residual network of dense blocks."""
    import jax
    import jax.numpy as jnp
    from _networks import _normal

    params = [
        (_normal(i, width, width, fan_in=width), jnp.zeros(width))
        for i in range(blocks)
    ]

    def loss(params, example):
        x, y = example
        for w, b in params:
            x = x + jnp.tanh(x @ w + b)
        return jnp.sum((x - y) ** 2)

    x = jax.random.normal(jax.random.key(9), (batch, width))
    return loss, params, (x, x)


def steps() -> Table:
    """Measure CPU seconds to trace, lower and compile a private and a plain step."""
    import _networks
    import jax
    from clipping import CLIP_NORM, plain

    import dpjax

    networks = {
        "MLP": _networks.mlp,
        "CNN": _networks.cnn,
        "WRN-16-4": _networks.wide_resnet,
        "transformer": _networks.transformer,
        "48 equal blocks": equal_blocks,
    }

    def build(fn, args):
        jax.clear_caches()
        start = time.process_time()
        lowered = jax.jit(fn).lower(*args)
        traced = time.process_time()
        lowered.compile()
        return traced - start, time.process_time() - traced

    rows = []
    for name, make in networks.items():
        loss, *args = make()
        both = [], []
        # The first round fills JAX's own caches and is not counted.
        for _ in range(ROUNDS + 1):
            for result, fn in zip(
                both, (plain(loss), dpjax.clipped_grad(loss, CLIP_NORM)), strict=True
            ):
                result.append(build(fn, args))
        mine, other = (
            [statistics.median(x) for x in zip(*result[1:], strict=True)]
            for result in (both[1], both[0])
        )
        cells = [x for a, b in zip(mine, other, strict=True) for x in (b, a, a / b)]
        rows.append([name, *cells])
    columns = {"network": "{}"}
    for part in ("trace and lower", "compile"):
        columns |= {f"{part}: plain, s": "{:.2f}", f"{part}: private, s": "{:.2f}"}
        columns |= {f"{part}: ratio": "{:.1f}"}
    return Table("steps", columns, rows)


def main() -> None:
    """Measure the named tables; each table has its own result."""
    tables = {"calls": calls, "steps": steps}
    options = parser(__doc__)
    options.add_argument("tables", nargs="*", metavar="TABLE", default=list(tables))
    arguments = options.parse_args()
    for name in arguments.tables:
        table = tables[name]()
        print_tables(table)
        times = f"CPU seconds are medians of {ROUNDS} "
        times += "processes." if name == "calls" else "rounds."
        write(f"first_calls.{name}", arguments, [table], times=times)


if __name__ == "__main__":
    main()
