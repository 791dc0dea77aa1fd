"""Choose the settings of every training method in `train.py` by the same search.

    python benchmarks/tune.py [--data FOLDER] [--seeds 2] [--results FOLDER]

The search holds out a fifth of the training images, and reads no test images. At each
ε, the grids of all methods have the same size: 6 pairs of batch size and epochs (for
full batches, 6 numbers of epochs), 2 momenta, and 6 learning rates at a factor of about
two (`WAYS` in `_train_methods.py`). The search chooses the setting with the best mean
accuracy over seeds on the held-out images, and the first of equally good settings.

The search reads the private images hundreds of times. No stated ε counts the search.
"""

import itertools
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from _images import load
from _results import Table, parser, print_tables, write
from _train_methods import NON_PRIVATE, WAYS, accuracy, designed, solved

HELD_OUT = 1 / 5
# Compiling takes longer than running, so the compiler optimises less.
QUICKLY = {"xla_backend_optimization_level": 1}


def over_all(score, keys, *axes):
    """Return the scores of all combinations, by one program.

    The result has one axis for each of `axes`, and then an axis for the keys.
    """
    every = jax.vmap(score, (0, *[None] * len(axes)))
    for place in reversed(range(len(axes))):
        axis = [None] * (len(axes) + 1)
        axis[place + 1] = 0
        every = jax.vmap(every, axis)
    return jax.jit(every, compiler_options=QUICKLY)(keys, *map(jnp.asarray, axes))


def scores(way, shape, epsilons, keys, data, held_out):
    """Return held-out accuracies f[ε, momentum, learning rate, seed]."""
    if way.runner is solved:
        rows = itertools.product(epsilons, way.momenta, way.learning_rates, keys)
        result = [
            accuracy(solved(data, shape, eps, key, momentum, rate).params, held_out)
            for eps, momentum, rate, key in rows
        ]
        sizes = map(len, (epsilons, way.momenta, way.learning_rates, keys))
        return np.reshape(np.array(result), tuple(sizes))
    if way.runner is designed and len(way.momenta) > 1:  # each has other noise
        ways = [way._replace(momenta=(momentum,)) for momentum in way.momenta]
        parts = [scores(w, shape, epsilons, keys, data, held_out) for w in ways]
        return np.concatenate(parts, axis=1)

    # One program serves every ε, with the noise multiplier of that ε. The program has
    # the capacity of the first plan's batches. If the plan of another ε has a larger
    # capacity, overflowing batches lose examples here that training would not lose.
    runs = [way.runner(way, data, shape, epsilon) for epsilon in epsilons]
    run, noise = runs[0][0], [multiplier for _, multiplier in runs]

    def score(key, *numbers):
        return accuracy(run(key, *numbers), held_out)

    return np.asarray(over_all(score, keys, noise, way.momenta, way.learning_rates))


def best(way, found):
    """Return the best setting at one ε, and the mean and spread of its accuracy."""
    shape, momentum, rate = np.unravel_index(
        np.argmax(found.mean(-1)), found.shape[:-1]
    )
    chosen = found[shape, momentum, rate]
    spread = float(np.std(chosen, ddof=1)) if len(chosen) > 1 else 0.0
    setting = *way.shapes[shape], way.momenta[momentum], way.learning_rates[rate]
    return [*setting, [float(chosen.mean()), spread]]


def search(name, epsilons, keys, data, held_out):
    """Search for one method; return a row for each ε, and the seconds of the search."""
    way, start, result = WAYS[name], time.perf_counter(), []
    targets = [math.inf] if name == NON_PRIVATE else epsilons
    for shape in way.shapes:
        result.append(scores(way, shape, targets, keys, data, held_out))
        seconds = time.perf_counter() - start
        print(f"{name}: {shape} after {seconds:.0f} s", flush=True)
    by_epsilon = np.stack(result, axis=1)
    rows = [
        [name, None if math.isinf(epsilon) else epsilon, *best(way, by_shape)]
        for epsilon, by_shape in zip(targets, by_epsilon, strict=True)
    ]
    return rows, time.perf_counter() - start


def listed(values):
    """Return the tried values as text, each value once."""
    values = dict.fromkeys("all" if value is None else value for value in values)
    return ", ".join(map(str, values))


def space(name, seconds):
    """Return a row with the tried values, their number, and the seconds."""
    way = WAYS[name]
    sizes, epochs = zip(*way.shapes, strict=True)
    tried = sizes, epochs, way.momenta, way.learning_rates
    count = math.prod(map(len, (way.shapes, way.momenta, way.learning_rates)))
    return [name, *map(listed, tried), count, seconds]


def main():
    """Search, and print and write the chosen settings."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, help="folder with MNIST files")
    options.add_argument("--epsilons", type=float, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--seeds", type=int, default=2)
    arguments = options.parse_args()

    images, _ = load(arguments.data)
    size = len(images[0]) - round(HELD_OUT * len(images[0]))
    data, held_out = (
        tuple(x[part] for x in images) for part in (np.s_[:size], np.s_[size:])
    )
    keys = jax.random.split(jax.random.key(2026), arguments.seeds)
    rows, spaces = [], []
    for name in WAYS:
        result, seconds = search(name, arguments.epsilons, keys, data, held_out)
        rows += result
        spaces.append(space(name, seconds))

    chosen = {"training": "{}", "target ε": "{:g}", "batch": "{}", "epochs": "{}"}
    chosen |= {"momentum": "{:g}", "learning rate": "{:g}"}
    chosen |= {"held-out accuracy": "{:.3f} ± {:.3f}"}
    tried = dict.fromkeys(["training", "batch", "epochs", "momentum"], "{}")
    tried |= {"learning rate": "{}", "settings at each ε": "{}", "seconds": "{:.0f}"}
    tables = [Table("settings", chosen, rows), Table("space", tried, spaces)]
    print_tables(*tables)
    write("tuned.mnist" if arguments.data else "tuned", arguments, tables)


if __name__ == "__main__":
    main()
