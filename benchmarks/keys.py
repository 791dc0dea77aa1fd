"""Measure the time of normal numbers by generator, and of noise on many leaves.

    python benchmarks/keys.py

A compiled function of a key draws 10,000 to 10 million normal numbers in float32. A
step of `dpjax.add_gaussian_noise` derives a key for each of 50 leaves of different
shapes, with a million numbers in total. The generators are called in turn. The compile
time is the time of one compilation.
"""

import functools
import os

import jax
import jax.numpy as jnp
from _results import Table, parser, print_tables, write
from _timing import compiled, said, take_turns

import dpjax
from dpjax._core.keys import generator_of

ROUNDS = 21
SIZES = 10**4, 10**6, 10**7
GENERATORS = "threefry2x32", "rbg", "chacha20"
# The shapes of 50 leaves, from 64 by 64 to 64 by 554.
SHAPES = [(64, 64 + 10 * i) for i in range(50)]


def draw(size, key):
    """Draw `size` normal numbers in float32."""
    return jax.random.normal(key, (size,), jnp.float32)


def noise_step(key):
    """Run one step of independent noise on leaves of zeros."""
    zeros = [jnp.zeros(shape) for shape in SHAPES]
    tx = dpjax.add_gaussian_noise(1.0, key=key)
    return tx.update(zeros, tx.init(zeros))[0]


def measured(what, function):
    """Measure a function of a key; return a row of the table for each generator."""
    programs, seconds, temporaries = {}, {}, {}
    for name in GENERATORS:
        key = jax.random.key(0, impl=generator_of(name))
        program, seconds[name] = compiled(function, key)
        programs[name] = functools.partial(program, key)
        temporaries[name] = program.memory_analysis().temp_size_in_bytes / 2**20
    times = take_turns(programs, rounds=ROUNDS)
    base = times[GENERATORS[0]].median
    rows = []
    for name, t in times.items():
        cells = 1e3 * t.median, 1e3 * t.least, t.median / base
        rows.append([what, name, *cells, seconds[name], temporaries[name]])
    return rows


def generators():
    """Measure times and compilations of all draws."""
    rows = []
    for size in SIZES:
        rows += measured(f"{size:,} normals", functools.partial(draw, size))
    rows += measured(f"noise on {len(SHAPES)} leaves", noise_step)
    columns = {"": "{}", "generator": "{}", "ms": "{:.2f}", "minimum, ms": "{:.2f}"}
    columns |= {"ratio to Threefry": "{:.1f}", "compile, s": "{:.2f}"}
    columns |= {"temporaries, MiB": "{:.1f}"}
    return Table("generators", columns, rows)


def main():
    """Measure, and record the load average of the machine."""
    arguments = parser(__doc__).parse_args()
    before = os.getloadavg()[0]
    table = generators()
    print_tables(table)
    load = (
        f"The load average was {before:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    write("keys", arguments, [table], times=f"{said(ROUNDS)} {load}")


if __name__ == "__main__":
    main()
