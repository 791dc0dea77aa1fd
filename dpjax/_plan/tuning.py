"""A private hyperparameter search, whose ε includes the cost of the search.

All runs of a search read the data. `tune` draws the number of runs and the setting of
each run independently of the data, and releases only the best run. So the guarantee of
`accounting.selection` holds. This guarantee assumes that all runs with the largest
score have the same probability of being chosen as the best run. `tune` chooses the
first run with the largest score. The assumption holds, since the runs are independent
and identically distributed.
"""

import hashlib
import math
import os
import pathlib
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
    """The best run of a search. You may release nothing else of the search.

    Attributes:
      setting: the setting of the best run; None if the number of runs is 0.
      output: the output of `train` in the best run; None if the number of runs is 0.
      score: the score of the best run; -inf if the number of runs is 0, or if no score
        is finite.
      event: the event of the whole search, for a ledger or a composition.
      epsilon: the ε of the release, for the given delta.
      delta: δ.
    """

    setting: Any
    output: Any
    score: float
    event: events.Selection
    epsilon: float
    delta: float


class _Best(NamedTuple):
    """The best run so far.

    Attributes:
      run: the position of the best run in the sequence of all runs, from 0; -1 before
        the first run.
      score: the score of the best run; -inf if the score is not finite.
      output: the output of `train` in the best run.
    """

    run: int
    score: float
    output: Any


def tune(
    settings: Any,
    train: Callable[[Any, Key], Any],
    score: Callable[[Any, Key], ArrayLike],
    *,
    repetitions: Repetitions,
    event: events.Event,
    delta: float,
    key: Key,
    chunk_size: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Tuned:
    """Train with random settings, a random number of times, and return the best run.

    Args:
      settings: the possible settings: a list or tuple of any values, or a pytree of
        arrays whose entries along axis 0 are the settings. Each run draws a setting
        uniformly and with replacement, so that two runs may have the same setting.
      train: a function from a setting and a key to the private output of a run, a
        pytree of arrays. The function must derive its noise from the key.
      score: a function from the output of train and a key to a number. The best run has
        the largest score. A score that is not finite counts as -inf. If the function
        reads private data, then event must include the cost of score.
      repetitions: the distribution of the number of runs, from `accounting.selection`.
      event: the event of one run of train and score, for every setting. If the cost
        depends on the setting, pass the event of the most expensive setting.
      delta: the δ of the release, in (0, 1).
      key: a typed key, as secret as the data. Equal keys give equal searches.
      chunk_size: the number of runs that one `jax.vmap` computes together; None for
        runs one after another. With chunks, settings must be a pytree of arrays, and
        JAX must be able to trace train and score.
      checkpoint: a file in which `tune` saves the search after each run or chunk except
        the last; None saves nothing. The same call with an existing file resumes the
        search. The file is as secret as the data, since it reveals the number of runs.

    Returns:
      A `Tuned`.

    Raises:
      ValueError: an argument is out of range; the file of checkpoint is from a search
        with another key, event, repetitions or number of settings, or has outputs of
        other shapes than train returns. A change of train, of score, or of the values
        in settings is not noticed.

    Privacy: the setting, output and score of the best run together are
    (epsilon, delta)-DP under the adjacency for which event holds, on two conditions.
    First, each run of train and score, with any setting, is as private as event says.
    Second, settings, event and repetitions were fixed without looking at the data.
    The guarantee covers nothing else about the search: not the number of runs, the
    duration, the other outputs and scores, the values that train prints or saves, or
    the file of checkpoint.

    Reference: `accounting.selection` computes epsilon. Theorem 2 of Papernot and
    Steinke (2022) bounds the Rényi divergences of this search, if the number of runs
    has a truncated negative binomial distribution.

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
    count, pick = _index_settings(settings, chunk_size)
    # This computes ε before anything reads the data.
    epsilon = float(selection.epsilon(event, delta, repetitions=repetitions))
    search = events.Selection(event, repetitions)
    # Each kind of draw has its own key.
    for_count, for_settings, for_runs, for_scores = (
        jax.random.fold_in(key, i) for i in range(4)
    )
    total = repetitions.sample(for_count)
    digest = _hash_search(key, search, count)

    def index_of(run: ArrayLike) -> jax.Array:
        return jax.random.randint(jax.random.fold_in(for_settings, run), (), 0, count)

    def run_once(run: ArrayLike, index: jax.Array) -> tuple[jax.Array, Any]:
        output = train(pick(index), jax.random.fold_in(for_runs, run))
        return jnp.asarray(score(output, jax.random.fold_in(for_scores, run))), output

    chunk, done, best, saved = chunk_size or 1, 0, _Best(-1, -math.inf, None), None
    path = None if checkpoint is None else pathlib.Path(checkpoint)
    if path is not None and path.exists():
        done, best, saved = _read_checkpoint(path, digest)
    run_chunk = None if chunk_size is None else jax.jit(jax.vmap(run_once))
    # Unlike jax.vmap, lax.map draws the same number alone, for every generator.
    indices_of = jax.jit(lambda runs: jax.lax.map(index_of, runs))
    while done < total:
        first, done = done, min(total, done + chunk)
        if run_chunk is None:
            value, outputs = run_once(first, index_of(first))
            scores = [value]
        else:
            # All chunks have the same size. Excess runs of the last chunk are not used.
            runs = first + np.arange(chunk)
            scores, outputs = run_chunk(runs, indices_of(runs))

        def output_of(i: int) -> Any:
            single = run_chunk is None
            return outputs if single else jax.tree.map(lambda x: x[i], outputs)

        if saved is not None:
            best, saved = best._replace(output=_restore(saved, output_of(0))), None
        for i in range(done - first):
            value = float(scores[i])
            value = value if math.isfinite(value) else -math.inf
            if best.run < 0 or value > best.score:
                best = _Best(first + i, value, output_of(i))
        # After the last run, the search is not saved. So a resumed search computes at
        # least one run, and this run gives the structure of the outputs.
        if path is not None and done < total:
            _write_checkpoint(path, digest, done, best)
    setting = pick(index_of(best.run)) if best.run >= 0 else None
    return Tuned(setting, best.output, best.score, search, epsilon, float(delta))


def _index_settings(
    settings: Any, chunk_size: int | None
) -> tuple[int, Callable[[Any], Any]]:
    """Check the settings and the chunk size, and count the settings.

    Returns:
      The number of settings, and a function from an index to the setting at this index.

    Raises:
      ValueError: settings or chunk_size is invalid.
    """
    if chunk_size is not None:
        validate.static_int("chunk_size", chunk_size, minimum=1)
    if isinstance(settings, Sequence):
        if chunk_size is not None:
            raise ValueError(
                f"settings must be a tree of arrays with chunk_size; got {settings!r}."
            )
        if not settings:
            raise ValueError(f"settings must not be empty; got {settings!r}.")
        return len(settings), lambda i: settings[int(i)]
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(settings)}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ValueError(
            "settings must be a non-empty sequence, or a pytree of arrays that all "
            f"have the same size along axis 0, at least 1; got {settings!r}."
        )
    return sizes.pop()[0], lambda i: jax.tree.map(lambda x: jnp.asarray(x)[i], settings)


def _hash_search(key: Key, event: events.Selection, count: int) -> str:
    """A hash of the key, the privacy event and the number of settings of a search.

    Two searches with the same hash draw the same indices of settings, and have the same
    event. The hash does not depend on the settings themselves.
    """
    words = np.asarray(jax.random.key_data(key)).tobytes().hex()
    text = f"{jax.random.key_impl(key)} {words} {event!r} {count}"
    return hashlib.sha256(text.encode()).hexdigest()


def _write_checkpoint(path: pathlib.Path, digest: str, done: int, best: _Best) -> None:
    """Save the search in a file.

    If the process stops, the file has either its complete old or its complete new
    content.

    Args:
      path: the file.
      digest: the hash that identifies the search.
      done: the number of completed runs.
      best: the best of these runs.
    """
    leaves = {f"leaf{i}": x for i, x in enumerate(jax.tree.leaves(best.output))}
    new = path.with_name(path.name + ".unfinished")
    # Only the file's owner can read it.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        fields = {"search": digest, "done": done, "run": best.run, "score": best.score}
        np.savez(file, allow_pickle=False, **fields, **leaves)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _read_checkpoint(
    path: pathlib.Path, digest: str
) -> tuple[int, _Best, list[np.ndarray] | None]:
    """Read a file that `_write_checkpoint` has saved.

    Args:
      path: the file.
      digest: the hash that identifies the search.

    Returns:
      The number of completed runs, a `_Best` whose `output` is None, and the leaves of
      the best run's output.

    Raises:
      ValueError: the file belongs to a search with another hash.
    """
    with np.load(path, allow_pickle=False) as file:
        if str(file["search"]) != digest:
            raise ValueError(
                f"checkpoint must be a file of this search; got {str(path)!r}, which "
                "is from a search with another key, event, repetitions or number of "
                "settings."
            )
        best = _Best(int(file["run"]), float(file["score"]), None)
        leaves = [file[f"leaf{i}"] for i in range(len(file.files) - 4)]
        return int(file["done"]), best, leaves


def _restore(leaves: list[np.ndarray], output: Any) -> Any:
    """Arrange the saved leaves of an output in the structure of another output.

    Raises:
      ValueError: the shapes of the saved leaves are not those of the other output.
    """
    template, structure = jax.tree.flatten(output)
    saved, new = ([np.shape(x) for x in of] for of in (leaves, template))
    if saved != new:
        raise ValueError(
            f"checkpoint must have outputs of the shapes that train returns, {new}; "
            f"got arrays of shapes {saved}."
        )
    return structure.unflatten([jnp.asarray(x) for x in leaves])
