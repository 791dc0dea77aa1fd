"""Measure the cost of a guarantee for released bits: noise, steps and accuracy.

    python benchmarks/bits.py [noise] [steps] [accuracy]

The table `noise` compares noise on a lattice (`dpjax.add_discrete_gaussian_noise`) with
JAX's normal numbers and with `dpjax.add_gaussian_noise`. The table `steps` compares
clipped sums whose floats have a proven sensitivity with clipped sums in real
arithmetic, on four networks. The functions in a table are called in turn. The table
`accuracy` trains with the plans of `train.py` on handwritten digits, with the settings
that `tune.py` chose in real arithmetic.
"""

import functools
import math
import os

import _networks
import jax
import jax.numpy as jnp
import numpy as np
from _images import load
from _results import FOLDER, Table, parser, print_tables, write
from _timing import compiled, said, take_turns
from _train_methods import WAYS, planned
from _train_methods import accuracy as test_accuracy
from train import settings

import dpjax
from dpjax.clipping._bookkeeping import relative_error
from dpjax.noise._discrete import lattice_noise

ROUNDS = 15
SEEDS = 16
# By number of parameters: the number of table draws for one draw of the noise.
SIZES = {10**4: 2, 10**6: 2, 10**7: 3, 10**8: 3}
NETWORKS = "mlp", "transformer", "cnn", "wide_resnet"
CLIP_NORM = 1.0


def normal_numbers(key, zeros):
    """Return as many normal numbers as there are zeros."""
    return jax.random.normal(key, zeros.shape, zeros.dtype)


def noise_step(make, key, zeros):
    """Run one step of a transformation that adds noise."""
    tx = make(1.0, key=key)
    return tx.update(zeros, tx.init(zeros))[0]


def noise():
    """Measure times of noise by number of parameters."""
    rows = []
    for size, draws in SIZES.items():
        discrete = functools.partial(dpjax.add_discrete_gaussian_noise, draws=draws)
        contenders = {
            "jax.random.normal": normal_numbers,
            "add_gaussian_noise": functools.partial(
                noise_step, dpjax.add_gaussian_noise
            ),
            f"add_discrete_gaussian_noise, {draws} draws": functools.partial(
                noise_step, discrete
            ),
        }
        programs, seconds = {}, {}
        given = jax.random.key(0), jnp.zeros(size)
        for name, function in contenders.items():
            program, seconds[name] = compiled(function, *given)
            programs[name] = functools.partial(program, *given)
        times = take_turns(programs, rounds=ROUNDS)
        base = times["jax.random.normal"].median
        rows += [
            [
                f"{size:,}",
                name,
                1e3 * t.median,
                1e3 * t.least,
                t.median / base,
                seconds[name],
            ]
            for name, t in times.items()
        ]
    columns = {"parameters": "{}", "": "{}", "ms": "{:.2f}", "minimum, ms": "{:.2f}"}
    columns |= {"ratio to jax.random.normal": "{:.1f}", "compile, s": "{:.2f}"}
    return Table("noise", columns, rows)


def steps():
    """Measure times of clipped sums in both arithmetics.

    The table also shows the noise that discrete arithmetic requires.
    """
    rows = []
    for name in NETWORKS:
        loss, params, batch = getattr(_networks, name)()[:3]
        size = jax.tree.leaves(batch)[0].shape[0]
        programs, temporaries = {}, {}
        for arithmetic in ("real", "discrete"):
            fn = dpjax.clipped_grad(loss, CLIP_NORM, arithmetic=arithmetic)
            program, _ = compiled(fn, params, batch)
            programs[arithmetic] = functools.partial(program, params, batch)
            temporaries[arithmetic] = program.memory_analysis().temp_size_in_bytes
        times = take_turns(programs, rounds=ROUNDS)
        real, discrete = (times[x].median for x in ("real", "discrete"))
        plan = dpjax.clipped_grad(loss, CLIP_NORM).plan(params, batch)
        dimension = sum(x.size for x in jax.tree.leaves(params))
        on_lattice = lattice_noise(CLIP_NORM, 1.0, dimension, maximum=1.0)
        loss_of_accuracy = (
            (1 + relative_error(plan, size)) * float(on_lattice.stddev) / CLIP_NORM
        )
        memory = temporaries["discrete"] / temporaries["real"]
        cells = 1e3 * real, 1e3 * discrete, discrete / real, memory, loss_of_accuracy
        rows.append([name, f"{dimension:,}", size, *cells])
    columns = {"network": "{}", "parameters": "{}", "batch": "{}", "real, ms": "{:.1f}"}
    columns |= {
        "discrete, ms": "{:.1f}",
        "ratio": "{:.2f}",
        "ratio of memory": "{:.2f}",
    }
    columns |= {"noise over clip norm, at a multiplier of 1": "{:.4f}"}
    return Table("steps", columns, rows)


def accuracy():
    """Compare test accuracies of the same plans in both arithmetics."""
    data, test = load(None)
    rows = []
    for name, target, shape, momentum, rate in settings(FOLDER / "tuned.json", None):
        if WAYS[name].runner is not planned:
            continue
        scores = []
        for arithmetic in ("real", "discrete"):
            way = WAYS[name]._replace(arithmetic=arithmetic)
            run, noise = planned(way, data, shape, target)
            # The noise multiplier is a constant, because the lattice depends on it.
            train = jax.jit(functools.partial(run, noise_multiplier=noise))
            keys = [jax.random.key(seed) for seed in range(SEEDS)]
            params = [train(key, momentum=momentum, learning_rate=rate) for key in keys]
            scores.append([float(test_accuracy(p, test)) for p in params])
        real, discrete = (np.mean(x) for x in scores)
        error = math.sqrt(sum(np.var(x, ddof=1) for x in scores) / SEEDS)
        rows.append([name, target, real, discrete, [discrete - real, error]])
        print(*rows[-1], flush=True)
    columns = {"training": "{}", "ε": "{:g}", "real": "{:.3f}", "discrete": "{:.3f}"}
    columns |= {"difference ± standard error": "{:+.3f} ± {:.3f}"}
    return Table("accuracy", columns, rows)


def main():
    """Run the measurements, and write how busy the machine was."""
    tables = {"noise": noise, "steps": steps, "accuracy": accuracy}
    options = parser(__doc__)
    options.add_argument("tables", nargs="*", metavar="TABLE", default=list(tables))
    arguments = options.parse_args()
    for name in arguments.tables:
        before = os.getloadavg()[0]
        table = tables[name]()
        print_tables(table)
        if name == "accuracy":
            times = f"Means over {SEEDS} seeds."
        else:
            times = f"{said(ROUNDS)} The load average was {before:.1f} before and "
            times += f"{os.getloadavg()[0]:.1f} after."
        write(f"bits.{name}", arguments, [table], times=times)


if __name__ == "__main__":
    main()
