"""What several processes do as one: in all of them, or in none.

Each runs the same program and calls the same functions. What one alone may do, such as
to write a record, the first does, and the others hear what came of it. What one of them
refuses, all refuse, so that none waits for another that has gone.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax.checkpoint._fingerprint import canonical

T = TypeVar("T")
# What is raised elsewhere as what it was; the last stands for all others.
_KINDS = (ValueError, OSError, ImportError, RuntimeError)


def everywhere(do: Callable[[], T]) -> T:
    """What it gives here, if it fails nowhere. The processes do not meet within it."""
    if jax.process_count() == 1:
        return do()
    found, failed = None, None
    try:
        found = do()
    except Exception as error:
        failed = error
    said = told(failed and [_number(failed), str(failed)])
    if failed is not None:
        raise failed
    for process, words in enumerate(said):
        if words is not None:
            number, message = words
            raise _KINDS[number](f"process {process} of {len(said)}: {message}")
    return found  # pyright: ignore[reportReturnType]


def _number(error: Exception) -> int:
    """Of its kind."""
    of_these = [isinstance(error, kind) for kind in _KINDS[:-1]]
    return [*of_these, True].index(True)


def on_primary_process(do: Callable[[], T]) -> T:
    """What it gives in the first process, which alone calls it: plain values."""
    if jax.process_count() == 1:
        return do()
    return told(everywhere(lambda: do() if jax.process_index() == 0 else None))[0]


def told(what: Any) -> list[Any]:
    """What each process says, in their order: plain values."""
    if jax.process_count() == 1:
        return [what]
    text = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # By powers of two, so that few programs are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def check_equal_across_processes(found: dict[str, Any]) -> None:
    """Refuse to be one run where the processes have different ones."""
    marks = {
        name: hashlib.sha256(canonical(x).encode()).hexdigest()
        for name, x in found.items()
    }
    every = told(marks)
    unlike = [name for name in marks if len({x[name] for x in every}) > 1]
    if unlike:
        raise ValueError(
            f"run must be the same in all {len(every)} processes, with one key; what "
            f"differs: {', '.join(unlike)}."
        )
