"""A private hyperparameter search, whose ε includes the cost of the search.

All runs of a search read the data. `tune` draws their number and their settings
independently of the data, and releases the best run alone, so that the guarantee of
`accounting.selection` holds. Of runs with equal scores the first one is the best: the
runs are independent and have one law, so that the first one of several equal runs is
any of them with the same probability, whatever the data are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key
from dpjax.accounting import events, selection
from dpjax.accounting._repetitions import Repetitions


class Tuned(NamedTuple):
    """The best run of a search, which is all that may be released of the search.

    Attributes:
      setting: the setting of the best run; None if there was no run.
      output: what training returned in the best run; None if there was no run.
      score: the score of the best run; -inf if there was no run, or if no score was
        finite.
      event: the search as an event, for a ledger or a composition with other events.
      epsilon: the ε of the release, with δ = delta.
      delta: δ.
    """

    setting: Any
    output: Any
    score: float
    event: events.Selection
    epsilon: float
    delta: float


def tune(
    settings: Any,
    train: Callable[[Any, Key], Any],
    score: Callable[[Any, Key], ArrayLike],
    *,
    repetitions: Repetitions,
    event: events.Event,
    delta: float,
    key: Key,
) -> Tuned:
    """Train with random settings, a random number of times, and return the best run.

    Args:
      settings: the settings to choose from: a list or tuple of any values, or a pytree
        of arrays whose entries along axis 0 are the settings. Each run draws one of
        them, uniformly and with replacement, so that a setting may be drawn twice.
      train: a function from a setting and a key to the private output of a run, a
        pytree of arrays. Its noise must come from the key.
      score: a function from that output and a key to a number; the best run has the
        largest. If the function reads private data, then event includes its cost. A
        score that is not finite is worse than any finite one.
      repetitions: the law of the number of runs, from `accounting.selection`.
      event: one run of train and score, for every setting. Where runs differ in cost,
        this is the event of the most expensive one.
      delta: δ of the release, strictly between 0 and 1.
      key: a typed key, as secret as the data. Equal keys give equal searches.

    Returns:
      `Tuned`.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the setting, output and score of the best run together are
    (epsilon, delta)-DP under the adjacency for which event holds, if each run of train
    and score, with any of the settings, is private as event says, and if settings,
    event and repetitions were fixed without looking at the data. The guarantee does not
    cover anything else about the search: the number of runs, its duration, the other
    outputs and scores, and what train prints or saves.

    Reference: `accounting.selection` has the bound; Papernot and Steinke (2022),
    Theorem 2, is the first for this search.

    Example:
      >>> from dpjax.accounting import gdp
      >>> best = tune(
      ...     jnp.array([0.1, 1.0, 10.0]),
      ...     lambda rate, key: rate + jax.random.normal(key),
      ...     lambda output, key: -abs(output - 10.0),
      ...     repetitions=selection.Geometric(10.0),
      ...     event=events.Gaussian(float(gdp.mu(1.0, 1e-5))),
      ...     delta=1e-5,
      ...     key=jax.random.key(0),
      ... )
      >>> print(best.setting, f"{best.epsilon:.2f}")
      10.0 1.54
    """
    key = keys.stream(validate.typed_key("key", key), "tune")
    count, pick = _settings(settings)
    # ε is known before anything reads the data.
    epsilon = float(selection.epsilon(event, delta, repetitions=repetitions))
    chosen = events.Selection(event, repetitions)
    # One stream of the user's key for each kind of draw.
    for_count, *for_runs = [jax.random.fold_in(key, i) for i in range(4)]
    best = Tuned(None, None, -math.inf, chosen, epsilon, float(delta))
    for run in range(repetitions.sample(for_count)):
        of_setting, of_run, of_score = (jax.random.fold_in(k, run) for k in for_runs)
        setting = pick(jax.random.randint(of_setting, (), 0, count))
        output = train(setting, of_run)
        value = float(jnp.asarray(score(output, of_score)))
        value = value if math.isfinite(value) else -math.inf
        # The first run is better than none, whatever its score.
        if run == 0 or value > best.score:
            best = best._replace(setting=setting, output=output, score=value)
    return best


def _settings(settings: Any) -> tuple[int, Callable[[Any], Any]]:
    """The number of settings, and a function from a number to its setting."""
    if isinstance(settings, Sequence):
        if not settings:
            raise ValueError(f"settings must not be empty; got {settings!r}.")
        return len(settings), lambda i: settings[int(i)]
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(settings)}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ValueError(
            "settings must be a non-empty sequence, or arrays that all have the same "
            f"size along axis 0; got {settings!r}."
        )
    return sizes.pop()[0], lambda i: jax.tree.map(lambda x: jnp.asarray(x)[i], settings)
