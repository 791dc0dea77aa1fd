"""Actions of several processes that succeed in all of them or fail in all of them.

Every process runs the same program and calls the same functions. An action for a single
process, such as writing a record, runs in the first process, and the other processes
receive the result. If one process raises an exception, all processes raise exceptions,
so that no process waits for a process that has stopped.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax.checkpoint._record import digest_of

T = TypeVar("T")
# If an exception in one process has one of the first three types, the other processes
# raise an exception of the same type. Otherwise, they raise a RuntimeError.
_KINDS = (ValueError, OSError, ImportError, RuntimeError)


def everywhere(do: Callable[[], T]) -> T:
    """Call the function `do` in every process, and return this process's result.

    The function must not communicate with other processes. If the function fails in
    this process, `everywhere` raises the function's exception. If the function fails
    only in other processes, `everywhere` raises a new exception. The new message has
    the number of the first process that failed, and the message of that process's
    exception. The new exception is a ValueError, an OSError or an ImportError if that
    process raised such an exception, and a RuntimeError otherwise.
    """
    if jax.process_count() == 1:
        return do()
    result, failed = None, None
    try:
        result = do()
    except Exception as error:
        failed = error
    # The index −1 of an exception of any other type is that of the last type.
    number = next((i for i, x in enumerate(_KINDS) if isinstance(failed, x)), -1)
    said = gather_values(failed and [number, str(failed)])
    if failed is not None:
        raise failed
    for process, words in enumerate(said):
        if words is not None:
            number, message = words
            raise _KINDS[number](f"process {process} of {len(said)}: {message}")
    return result  # pyright: ignore[reportReturnType]


def on_primary_process(do: Callable[[], T]) -> T:
    """Call `do` only in the first process, and return its result in every process.

    JSON must be able to represent the result.
    """
    result = everywhere(lambda: do() if jax.process_index() == 0 else None)
    return gather_values(result)[0]


def gather_values(what: Any) -> list[Any]:
    """Return the values that all processes pass, in the order of the processes.

    JSON must be able to represent the values.
    """
    if jax.process_count() == 1:
        return [what]
    text = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # The gather needs arrays of equal shape from all processes, and is compiled once
    # for each shape. Padding to a power of two therefore saves compilations.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def check_equal_across_processes(values: dict[str, Any]) -> None:
    """Raise a ValueError if the named values differ between processes."""
    # Records may be long, so that only their digests are compared.
    marks = {name: digest_of(x) for name, x in values.items()}
    every = gather_values(marks)
    unlike = [name for name in marks if len({x[name] for x in every}) > 1]
    if unlike:
        raise ValueError(
            f"run must be identical in all {len(every)} processes, including the key; "
            f"the processes differ in {', '.join(unlike)}."
        )
