"""Measure the batches of a plan from data sets that do not fit into memory.

    python benchmarks/streaming.py [--rows 1000000000] [--batch 1024]

The script measures the time to read a batch and to run a step that trains for 20 ms on
another device, with and without reading ahead. The script also measures by how much the
memory of a process grows from the first batch to the last batch, as Linux reports. The
files are sparse and have ten numbers in each row, so that nothing is read from a disk:
the measured work is drawing, looking up, copying and stacking rows. If the libraries
are installed, a data set of Hugging Face (mapped into memory by Arrow) and a data set
of grain over the same rows are measured too. Each case has its own process.
"""

import importlib.util
import json
import mmap
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from _results import Table, parser, print_tables, write

import dpjax

WIDTH, STEPS, TRAINING = 10, 12, 0.02
FEW, SOME = 10**4, 10**6
FILES = 8
PROCESS = pathlib.Path("/proc/self")


class OneByOne:
    """Rows of several files as one data set, as in docs/howto/streaming.md."""

    def __init__(self, files):
        self.files, self.ends = files, np.cumsum([len(file) for file in files])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, i):
        file = int(np.searchsorted(self.ends, i, side="right"))
        return self.files[file][i - self.ends[file]]


class InOneCall(OneByOne):
    """The same data set, with a method that reads a whole batch in one call."""

    def __getitems__(self, positions):
        return [self[i] for i in positions]


def sparse(path, rows, random=True):
    """Map a file of zeros into memory; the file takes no space on the disk."""
    with open(path, "wb") as file:
        file.truncate(4 * WIDTH * rows)
    mapped = np.memmap(path, np.float32, "r", shape=(rows, WIDTH))
    if random:
        mapped.base.madvise(mmap.MADV_RANDOM)
    return mapped


def split(folder, rows):
    """Return `FILES` mapped files with `rows` rows in total."""
    return [sparse(folder / f"{i}", rows // FILES) for i in range(FILES)]


def of_hugging_face(folder, rows):
    import datasets

    datasets.disable_progress_bars()
    x = np.zeros((rows, WIDTH), np.float32)
    datasets.Dataset.from_dict({"x": x}).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow").with_format("numpy")


def of_grain(folder, rows):
    import grain

    return grain.MapDataset.source(OneByOne(split(folder, rows))).map(lambda x: 2 * x)


def in_memory(folder, rows):
    return np.zeros((rows, WIDTH), np.float32)


def mapped(folder, rows):
    return sparse(folder / "rows", rows)


def read_ahead(folder, rows):
    return sparse(folder / "rows", rows, random=False)


SOURCES = {
    "an array in memory": in_memory,
    "a mapped file, `MADV_RANDOM`": mapped,
    "a mapped file, as the system reads": read_ahead,
    f"{FILES} mapped files, example by example": lambda *a: OneByOne(split(*a)),
    f"{FILES} mapped files, `__getitems__`": lambda *a: InOneCall(split(*a)),
    "Hugging Face, Arrow": of_hugging_face,
    "grain, `MapDataset`": of_grain,
}


def resident(name):
    """Return the current (VmRSS) or the maximum (VmHWM) MiB of this process."""
    (line,) = re.findall(rf"{name}:\s+(\d+) kB", PROCESS.joinpath("status").read_text())
    return int(line) / 2**10


def seconds(batches, training):
    """Return the median seconds of a step that trains for `training` seconds."""
    times = []
    for _ in batches:
        time.sleep(training)
        times.append(time.perf_counter())
    return statistics.median(np.diff(times[1:]))


def case(name, rows, batch):
    """Measure one source.

    Returns the seconds to make the plan, the three times of a batch in milliseconds,
    and the growth of the process in MiB.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = SOURCES[name](pathlib.Path(folder), rows)
        setting = {"num_examples": rows, "batch_size": batch, "num_steps": STEPS}
        noise = {"noise_multiplier": 1.3, "delta": 1e-12, "clip_norm": 1.0}
        start = time.perf_counter()
        plan = dpjax.plan(**setting, **noise)
        planned = time.perf_counter() - start
        keys = jax.random.split(jax.random.key(0), 4)  # each key draws other rows
        next(plan.batches(data, key=keys[3]))  # to compile
        ways = [(0, 0.0), (0, TRAINING), (2, TRAINING)]
        PROCESS.joinpath("clear_refs").write_text("5")  # resets VmHWM
        before = resident("VmRSS")
        result = [
            1e3 * seconds(plan.batches(data, key=key, prefetch=ahead), training)
            for key, (ahead, training) in zip(keys, ways, strict=False)
        ]
        return [planned, *result, resident("VmHWM") - before]


def main():
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10**9)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--case", nargs=2, help="a source and its rows: that alone")
    arguments = options.parse_args()
    if arguments.case:
        name, rows = arguments.case
        print(json.dumps(case(name, int(rows), arguments.batch)))
        return
    rows = []
    for name, size in [
        ("an array in memory", FEW),
        ("an array in memory", SOME),
        *((name, arguments.rows) for name in list(SOURCES)[1:5]),
        ("Hugging Face, Arrow", SOME),
        ("grain, `MapDataset`", arguments.rows),
    ]:
        library = {"H": "datasets", "g": "grain"}.get(name[0])
        if library and not importlib.util.find_spec(library):
            continue
        command = [sys.executable, __file__, "--batch", str(arguments.batch)]
        done = subprocess.run(
            [*command, "--case", name, str(size)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        result = json.loads(done.stdout.splitlines()[-1])
        rows.append([name, size, 4 * WIDTH * size / 1e9, *result])
        print(rows[-1], flush=True)
    columns = {
        "data": "{}",
        "examples": "{:,}",
        "GB": "{:.3g}",
        "making the plan, s": "{:.1f}",
    }
    columns |= {"reading a batch, ms": "{:.1f}", "step, ms": "{:.1f}"}
    columns |= {"step with prefetch, ms": "{:.1f}", "memory growth, MiB": "{:.0f}"}
    table = Table("sources", columns, rows)
    print_tables(table)
    del arguments.case
    peers = [p for p in ("datasets", "grain") if importlib.util.find_spec(p)]
    write(
        "streaming",
        arguments,
        [table],
        packages=("jax", "jaxlib", "numpy", *peers),
        times=f"Times are medians of {STEPS - 2} steps.",
    )


if __name__ == "__main__":
    main()
