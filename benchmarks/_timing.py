"""Measure times of functions that are called in turn.

The speed of a shared machine changes with its load. The compared functions are
therefore called in turn, so that the load affects all of them equally, and a time is a
median. A call ends when its result is available. The first call may compile and fills
caches, so its time is separate. `compiled` measures only the time to trace and compile
a function that can be jitted.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _results import Table


class Times(NamedTuple):
    """Times in seconds: of the first call, and statistics of all later calls."""

    first: float
    median: float
    least: float
    most: float
    count: int


def compiled(
    fn: Callable[..., Any], *args: Any, donated: Sequence[int] = ()
) -> tuple[Any, float]:
    """Return the compiled function, and the seconds to trace and compile it."""
    start = time.perf_counter()
    program = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
    return program, time.perf_counter() - start


def once(fn: Callable[[], Any]) -> float:
    """Return the seconds until the result of fn() is available."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def take_turns(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float | None = None,
) -> dict[str, Times]:
    """Measure times of functions, each called without arguments.

    Each function is first called once. In each round every function then has a turn:
    one call, or as many calls as fit into its share of the seconds. A function whose
    call takes longer than all of the seconds is called only once after the first call.
    """
    share, limit = (0.0, math.inf) if seconds is None else (seconds / rounds, seconds)
    first = {name: once(fn) for name, fn in functions.items()}
    calls: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fn in functions.items():
            if calls[name] and calls[name][0] > limit:
                continue
            end = time.perf_counter() + share
            calls[name].append(once(fn))
            while time.perf_counter() < end:
                calls[name].append(once(fn))
    return {
        name: Times(
            first[name],
            statistics.median(durations),
            min(durations),
            max(durations),
            len(durations),
        )
        for name, durations in calls.items()
    }


def steps_in_turn(
    candidates: Mapping[str, Any], states: dict[str, Any], size: int, rounds: int
) -> Table:
    """Measure a step of each transformation, also relative to the first transformation.

    Each step donates the state's buffers.
    """
    gradient, functions = jnp.ones(size), {}
    for name, tx in candidates.items():
        update = jax.jit(tx.update, donate_argnums=1)

        def step(name=name, update=update):
            out, states[name] = update(gradient, states[name])
            return out, states[name]

        step()  # the types of the returned state may differ from the input's
        functions[name] = step
    times = take_turns(functions, rounds=rounds)
    base = next(iter(times.values())).median
    columns = {"transformation": "{}", "ms": "{:.3g}", "minimum, ms": "{:.3g}"}
    columns |= {"maximum, ms": "{:.3g}", "ratio to independent": "{:.2f}"}
    rows = [
        [name, 1e3 * t.median, 1e3 * t.least, 1e3 * t.most, t.median / base]
        for name, t in times.items()
    ]
    return Table("step", columns, rows)


def said(rounds: int, seconds: float | None = None) -> str:
    """Describe the method of `take_turns`, for readers of its times."""
    if seconds is None:
        return (
            f"A time is the median of {rounds} calls. The compared functions are "
            "called in turn, and the first call of each is not counted."
        )
    return (
        f"A time is the median of all calls of a function in {seconds:g} s. The "
        f"compared functions take {rounds} turns of equal length, and the first call "
        f"of each is not counted. If one call takes longer than {seconds:g} s, only "
        "one call is counted."
    )
