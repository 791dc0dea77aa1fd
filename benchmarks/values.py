"""Compare values of the library bit for bit before and after a change of its code.

    python benchmarks/values.py --write before.json
    python benchmarks/values.py --against before.json [--except PREFIX ...]

The command calls accountants, plans and strategies at fixed arguments, and trains tiny
models with fixed keys. `--write` records the results: a number as `float.hex`, and an
array of several numbers as the digest of its bytes. `--against` computes the values
again, prints each value that differs, and ends with status 1 if a value differs. The
same machine and versions give the same bits; other machines or versions may give other
bits. For a call that raises an error, the value is the name of the exception. The
command takes a few minutes, and needs no extra.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

# Nearly all of the time goes into compiling programs that run once. XLA stops at
# unknown flags, so these flags are set only for versions that know them.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

RAISES = "raises "
# Arrays of at most FEW numbers are written number by number.
FEW = 3


@contextlib.contextmanager
def configured(x64: bool, optimized: bool) -> Iterator[None]:
    """Set 64 or 32 bits, and whether XLA optimises programs or compiles quickly."""
    if optimized:
        jax.clear_caches()  # drop programs that were compiled quickly
    jax.config.update("jax_disable_most_optimizations", not optimized)
    with jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def written(value: Any) -> list[str]:
    """Write a result as strings that are equal if and only if all bits are equal."""
    strings = []
    for part in jax.tree.leaves(value):
        array = np.asarray(part)
        if array.dtype == object:
            raise TypeError(f"no numbers: {type(part).__name__}")
        if (array.dtype == np.float64 and array.size <= FEW) or array.ndim == 0:
            strings += [float(x).hex() for x in array.ravel()]
        else:
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            strings.append(f"{array.dtype}{list(array.shape)} {digest}")
    return strings


def computed(call: Callable[[], Any]) -> list[str]:
    """Return the written result of a call, or the name of the exception it raises."""
    try:
        return written(call())
    except Exception as error:
        return [f"{RAISES}{type(error).__name__}"]


def all_values() -> dict[str, list[str]]:
    """Return the values of all calls by name, and print the times."""
    # These modules make arrays, so their import must follow the setting of the flags.
    import _values_accountants as accountants
    import _values_mechanisms as mechanisms
    import _values_runs as training

    # Plans run their programs so often that optimised programs take less time in total.
    groups = {
        "accountants": (accountants.accountants, True, False),
        "accountants in float32": (accountants.in_float32, False, False),
        "strategies, audits, solvers": (mechanisms.mechanisms, True, False),
        "runs": (training.runs, False, False),
        "plans": (mechanisms.plans, True, True),
    }
    values: dict[str, list[str]] = {}
    for group, (calls, x64, optimized) in groups.items():
        start, before = time.perf_counter(), len(values)
        with configured(x64, optimized):
            for name, call in calls():
                if name in values:
                    raise ValueError(f"two calls are named {name!r}")
                values[name] = computed(call)
        seconds = time.perf_counter() - start
        print(f"{group}: {len(values) - before} calls, {seconds:.0f} s", flush=True)
    raised = sum("".join(value).startswith(RAISES) for value in values.values())
    print(f"{len(values)} calls, {raised} of which raise")
    return values


def differences(
    before: Mapping[str, list[str]],
    after: Mapping[str, list[str]],
    left_out: tuple[str, ...] = (),
) -> list[str]:
    """Return a line for each value that differs, except for names left out."""
    names = [name for name in {**before, **after} if not name.startswith(left_out)]
    return [
        f"{name}: {before.get(name, 'absent')} before, {after.get(name, 'absent')} now"
        for name in names
        if before.get(name) != after.get(name)
    ]


def main() -> None:
    """Compute all values, and write or compare them."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=pathlib.Path, help="write values to this file")
    what.add_argument("--against", type=pathlib.Path, help="compare with this file")
    options.add_argument(
        "--except",
        dest="left_out",
        metavar="PREFIX",
        action="append",
        default=[],
        help="leave out names that begin so; may be repeated",
    )
    arguments = options.parse_args()
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    after = all_values()
    if arguments.write:
        arguments.write.write_text(json.dumps(after, indent=1) + "\n")
        return
    left_out = tuple(arguments.left_out)
    different = differences(before, after, left_out)
    if different:
        print("\n".join(different))
        raise SystemExit(1)
    count = sum(not name.startswith(left_out) for name in after)
    print(f"{count} values are equal bit for bit")


if __name__ == "__main__":
    main()
