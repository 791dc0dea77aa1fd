"""The privacy cost of a search that makes K runs and releases only the best run.

A search for settings runs a mechanism K times, and releases the run with the best
score. The settings of each run are drawn independently of the data. K is a fixed number
(`Fixed`), which may be public, or is drawn independently of the data and not released.
The score of a run is part of its output, so that the guarantee of a run must cover the
score. No output or score of another run may be released.

`epsilon` and `delta` are proven upper bounds (`_selected`). `dpjax.tune` runs such a
search.
"""

import jax
from jax.core import Tracer

from dpjax._core.typing import ArrayLike
from dpjax.accounting import _repetitions, composition, events, profiles
from dpjax.accounting._repetitions import Fixed as Fixed
from dpjax.accounting._repetitions import Geometric as Geometric
from dpjax.accounting._repetitions import Logarithmic as Logarithmic
from dpjax.accounting._repetitions import Poisson as Poisson
from dpjax.accounting._repetitions import Repetitions
from dpjax.accounting._repetitions import (
    TruncatedNegativeBinomial as TruncatedNegativeBinomial,
)
from dpjax.accounting._selected import Profile, Selected


def _best_run(mechanism: events.Event | Profile, repetitions: Repetitions) -> Selected:
    """The profile of the best of K runs, given the event or the profile of one run."""
    _repetitions.check(repetitions)
    if callable(getattr(mechanism, "epsilon", None)):
        return Selected(mechanism, repetitions)  # pyright: ignore
    # The numbers that `jax.grad` traces cannot be checked.
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(mechanism)):
        composition.check_event(mechanism)  # pyright: ignore
    return Selected(profiles.of(mechanism), repetitions)  # pyright: ignore


def epsilon(
    mechanism: events.Event | Profile, delta: ArrayLike, *, repetitions: Repetitions
) -> jax.Array:
    """An ε at which the best of K runs of a mechanism is (ε, δ)-DP.

    Args:
      mechanism: the event of one run that releases its output with its score, or the
        profile of such a run. `jax.grad` computes first derivatives with respect to the
        event's numbers, but no second derivatives. `jax.jit` and `jax.vmap` must not
        trace the event's numbers.
      delta: f[*b], strictly between 0 and 1, not traced.
      repetitions: the distribution of K, such as `Geometric(10.0)`.

    Returns:
      ε, f[*b], rounded up; inf where the code finds no finite bound. In the examples of
      docs/selection.md with Gaussian noise, truncated negative binomial K and δ = 1e-5,
      ε is within 1 % of the ε that an attack achieves. For larger δ, such as 0.01, the
      difference can be several per cent. The derivative is the derivative of the
      returned bound.

    Raises:
      ValueError: an argument is out of range; `jax.jit` or `jax.vmap` traces a number
        of the event; repetitions is not a distribution of this module.
      TypeError: delta is traced.

    Privacy: K is drawn from `repetitions`, independently of the data. The runs are
    independent of each other, and the output of each run, with its score, has the
    privacy of the mechanism. Only the run with the best score is released. If several
    runs have the best score, the released run is chosen uniformly at random from these
    runs. If K = 0, the released output does not depend on the data.

    Reference: docs/selection.md has the proof of the bound. The bound is never above
    the bounds of Papernot and Steinke (2022), Theorem 2, and of Koskela, Redberg and
    Wang (2024), in the settings of these papers.

    Example:
      >>> from dpjax.accounting import gdp
      >>> run = events.Gaussian(float(gdp.mu(1.0, 1e-5)))
      >>> print(f"{epsilon(run, 1e-5, repetitions=Geometric(10.0)):.3f}")
      1.541
    """
    return _best_run(mechanism, repetitions).epsilon(delta)


def delta(
    mechanism: events.Event | Profile, epsilon: ArrayLike, *, repetitions: Repetitions
) -> jax.Array:
    """A δ at which the best of K runs of a mechanism is (ε, δ)-DP.

    Args:
      mechanism: the event or the profile of one run that releases its output with its
        score. JAX must not trace the event's numbers. The result has no derivatives.
      epsilon: f[*b], at least 0, not traced.
      repetitions: the distribution of K, such as `Geometric(10.0)`.

    Returns:
      δ, f[*b], rounded up.

    Raises:
      ValueError: an argument is out of range, or repetitions is not a distribution of
        this module.
      TypeError: a number of the event or epsilon is traced.

    Privacy: the conditions are those of `selection.epsilon`.

    Example:
      >>> bound = delta(events.Gaussian(0.5), 2.0, repetitions=Geometric(10.0))
      >>> print(f"{bound:.1e}")
      1.3e-02
    """
    return _best_run(mechanism, repetitions).delta(epsilon)
