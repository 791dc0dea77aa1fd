"""Times of functions that take turns.

A shared machine is now fast, now slow. Functions that are compared are therefore
called in turn, so that whatever else it does falls on all of them alike, and a time is
a median. A call ends when its result is there. The first call, which may compile and
fills caches, is timed apart; of what can be jitted, `compiled` times just that.
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
    """Seconds: of the first call, and what all the later ones came to."""

    first: float
    median: float
    least: float
    most: float
    count: int


def compiled(
    fn: Callable[..., Any], *args: Any, donated: Sequence[int] = ()
) -> tuple[Any, float]:
    """The compiled function, and the seconds to trace and compile it."""
    start = time.perf_counter()
    program = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
    return program, time.perf_counter() - start


def once(fn: Callable[[], Any]) -> float:
    """The seconds until what fn() returns is there."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def take_turns(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float | None = None,
) -> dict[str, Times]:
    """Times of functions, each called without arguments, once to begin with.

    In each of the rounds every function has a turn: one call, or calls for its share
    of the seconds. One whose call takes longer than all of them is called once only.
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
            first[name], statistics.median(taken), min(taken), max(taken), len(taken)
        )
        for name, taken in calls.items()
    }


def steps_in_turn(
    candidates: Mapping[str, Any], states: dict[str, Any], size: int, rounds: int
) -> Table:
    """Times of a step of each transformation over the first one's, state donated."""
    gradient, functions = jnp.ones(size), {}
    for name, tx in candidates.items():
        update = jax.jit(tx.update, donate_argnums=1)

        def step(name=name, update=update):
            out, states[name] = update(gradient, states[name])
            return out, states[name]

        step()  # what comes out may be of other types than what went in
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
    """What `take_turns` does, for whom its times are shown."""
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
