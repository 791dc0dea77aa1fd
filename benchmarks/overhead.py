"""Compare a plan's step with the same script by hand, and time batches of large data.

    python benchmarks/overhead.py

The script by hand combines the parts of a plan: `sampling.poisson`, `clipped_grad`,
`noisy_mean` and optax's Adam, for an MLP of 784, 256 and 10 units. One step is a jitted
function, and so is a scan of 20 steps. The two versions are called in turn. Then, for
each sampler, the script times a jitted step that draws 1,000 examples out of a million,
a billion and 2^31 - 1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import Table, parser, print_tables, write
from _timing import said, take_turns

import dpjax
from dpjax import sampling

ROUNDS, SCANNED = 101, 20
KEY = jax.random.key(0)
N, BATCH, NOISE, CLIP_NORM = 20_000, 256, 1.1, 1.0
SAMPLED = 1_000


def loss(params, batch):
    """Return the mean loss of a batch; `clipped_grad` uses batches of one example."""
    x, y = batch
    x = jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()


def problem():
    """Return random parameters and data; only the shapes matter for the times."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 784)).astype(np.float32)
    w, v = (0.05 * rng.normal(size=s) for s in ((784, 256), (256, 10)))
    params = {"w": w, "b": np.zeros((1, 256)), "v": v}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    return params, (jnp.asarray(x), jnp.asarray(rng.integers(0, 10, N)))


def by_plan(plan):
    """Return the optimizer's init and a step, made by a plan."""
    tx = plan.optimizer(optax.adam(1e-3), key=KEY)
    value_and_grad = plan.value_and_grad(loss)

    def step(data, carry, number):
        params, state = carry
        _, grads = value_and_grad(params, plan.load(data, number, KEY))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def by_hand(plan):
    """Return the optimizer's init and the same step, made of dpjax's parts."""

    def of_one(params, example):
        x, y = example
        return loss(params, (x[None], y[None]))

    clipped = dpjax.clipped_grad(of_one, CLIP_NORM)
    tx = optax.chain(
        dpjax.noisy_mean(
            clip_norm=clipped,
            noise_multiplier=NOISE,
            expected_batch_size=BATCH,
            key=KEY,
        ),
        optax.adam(1e-3),
    )
    draw = functools.partial(
        sampling.poisson, N, BATCH / N, max_batch_size=plan.max_batch_size, key=KEY
    )

    def step(data, carry, number):
        params, state = carry
        indices, mask = draw(step=number)
        batch = jax.tree.map(lambda x: x[indices], data)
        grads, _ = clipped(params, batch, mask=mask)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def overhead():
    """Time the plan's script and the script by hand in turn."""
    plan = dpjax.plan(
        num_examples=N,
        batch_size=BATCH,
        num_steps=100_000,
        noise_multiplier=NOISE,
        delta=1e-5,
        clip_norm=CLIP_NORM,
    )
    params, data = problem()
    rows = []
    for kind in ("a jitted step", f"a scan of {SCANNED} steps"):
        functions, temporaries = {}, {}
        for name, make in {"by hand": by_hand, "by a plan": by_plan}.items():
            init, step = make(plan)

            def scanned(data, carry, number, step=step):
                def body(carry, i):
                    return step(data, carry, i), None

                return jax.lax.scan(body, carry, number + jnp.arange(SCANNED))[0]

            jitted = jax.jit(step if kind == "a jitted step" else scanned)
            start = params, init(params)
            program = jitted.lower(data, start, np.int32(3)).compile()
            used = program.memory_analysis().temp_size_in_bytes
            temporaries[name] = used / 2**20
            functions[name] = functools.partial(jitted, data, start, np.int32(3))
        rounds = ROUNDS if kind == "a jitted step" else ROUNDS // 10
        times = take_turns(functions, rounds=rounds)
        for name, t in times.items():
            ratio = t.median / times["by hand"].median
            cells = [1e3 * x for x in (t.median, t.least, t.most)]
            rows.append([kind, name, *cells, ratio, temporaries[name], t.count])
    columns = {"": "{}", "script": "{}", "ms": "{:.1f}", "minimum, ms": "{:.1f}"}
    columns |= {"maximum, ms": "{:.1f}", "ratio to by hand": "{:.3f}"}
    columns |= {"temporaries, MiB": "{:.1f}", "calls": "{}"}
    return Table("overhead", columns, rows)


def samplers(n):
    """Return functions of a step that draw about 1,000 of n examples."""
    capacity = SAMPLED + 200
    common = {"max_batch_size": capacity, "key": KEY}
    poisson = functools.partial(sampling.poisson, n, SAMPLED / n, **common)
    bins = functools.partial(sampling.random_bins_step, n, n // SAMPLED, **common)
    epoch = functools.partial(sampling.reshuffled_step, n, SAMPLED, key=KEY, epoch=1)
    return {
        "poisson": lambda i: poisson(step=i),
        "fixed_size": lambda i: sampling.fixed_size(n, SAMPLED, key=KEY, step=i),
        "reshuffled_step": lambda i: epoch(step=i),
        "random_bins_step": lambda i: bins(epoch=1, step=i),
    }


def batches():
    """Measure time and memory of drawing the examples of a step."""
    rows = []
    for n in (10**6, 10**9, 2**31 - 1):
        functions, used = {}, {}
        for name, draw in samplers(n).items():
            program = jax.jit(draw).lower(np.int32(5)).compile()
            used[name] = program.memory_analysis().temp_size_in_bytes / 2**20
            functions[name] = functools.partial(program, np.int32(5))
        for name, t in take_turns(functions, rounds=ROUNDS).items():
            rows.append([name, n, 1e3 * t.median, used[name]])
    rows.sort(key=lambda row: row[0])
    columns = {"sampler": "{}", "examples": "{:,}", "ms": "{:.2f}"}
    columns |= {"temporaries, MiB": "{:.2f}"}
    return Table("batches", columns, rows)


def main():
    """Run both measurements."""
    arguments = parser(__doc__).parse_args()
    tables = [overhead(), batches()]
    print_tables(*tables)
    times = f"{said(ROUNDS)} For a scan, there are {ROUNDS // 10} calls."
    write("overhead", arguments, tables, times=times)


if __name__ == "__main__":
    main()
