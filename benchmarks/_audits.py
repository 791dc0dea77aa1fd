"""Define the mechanisms that audits attack, and versions with a deliberate error.

Each mechanism releases sums of 12 steps, which are three epochs. Each canary has a
coordinate of its own. A canary participates at the first step of each epoch, where the
mechanism attains the accountant's bound.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import Adjacency, auditing, strategies
from dpjax._core import keys
from dpjax._matrices import streaming
from dpjax.accounting import correlated, gdp
from dpjax.accounting.tree import momentum_mu
from dpjax.noise import _gaussian as noise

CLIP_NORM, STEPS, EPOCH, DECAY = 0.7, 12, 4, 0.9
PART = (np.arange(STEPS) % EPOCH == 0).astype(np.float32)
RUN = {"num_steps": STEPS, "steps_per_epoch": EPOCH, "order": "fixed"}
RUN = {**RUN, "adjacency": Adjacency.ZERO_OUT}
MEAN = {"clip_norm": CLIP_NORM, "expected_batch_size": 8}
STRATEGIES = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.8),
    "rational": strategies.rational([0.2, 0.4], [0.3, 0.9]),
    "banded": strategies.banded([1.0, 0.6, 0.3]),
    # The noise grows from step to step, so that participation in the first step of an
    # epoch costs most privacy.
    "scaled": strategies.scaled(strategies.geometric(0.8), np.linspace(0.5, 3, STEPS)),
    "tree": strategies.tree(DECAY),
}


class Mechanism(NamedTuple):
    """How a mechanism is constructed, attacked and accounted for.

    Attributes:
      make: maps a noise multiplier and a key to the gradient transformation.
      mu: maps a noise multiplier to the reported μ.
      white: the linear map that makes the mechanism's noise white; None if no map does.
    """

    make: Callable[[float, jax.Array], Any]
    mu: Callable[[float], jax.Array]
    white: auditing.Whiten | None


def _mu(name: str) -> Callable[[float], jax.Array]:
    return lambda sigma: correlated.mu(STRATEGIES[name], sigma, **RUN)


def _correlated(name: str, buffer: str) -> Mechanism:
    def make(sigma: float, key: jax.Array) -> Any:
        return dpjax.correlated_noise(
            STRATEGIES[name],
            sigma * CLIP_NORM,
            num_steps=STEPS,
            key=key,
            buffer=buffer,
        )

    return Mechanism(make, _mu(name), auditing.white_by_strategy(STRATEGIES[name]))


def white_by_tree(decay: float) -> auditing.Whiten:
    """Return a linear map that whitens the noise of `tree_momentum`."""
    white = auditing.white_by_strategy(strategies.tree(decay))

    def of_momentum(m: jax.Array) -> jax.Array:
        return white(m - decay * jnp.concatenate([jnp.zeros_like(m[:1]), m[:-1]]))

    return of_momentum


def _tree(buffer: str) -> Mechanism:
    def make(sigma: float, key: jax.Array) -> Any:
        return dpjax.tree_momentum(
            DECAY, sigma * CLIP_NORM, num_steps=STEPS, key=key, buffer=buffer
        )

    return Mechanism(
        make,
        lambda sigma: momentum_mu(sigma, decay=DECAY, **RUN),
        white_by_tree(DECAY),
    )


def _independent(chain: Callable[..., Any], white: Any, **options: Any) -> Mechanism:
    def make(sigma: float, key: jax.Array) -> Any:
        return chain(**options, **MEAN, noise_multiplier=sigma, key=key)

    return Mechanism(make, _mu("independent"), white)


_AS_IT_IS = auditing.white_by_strategy(STRATEGIES["independent"])
# Invert momentum's recursion m_t = 0.9 m_{t−1} + y_t: y_t = m_t − 0.9 m_{t−1}.
_WITHOUT_MOMENTUM = auditing.white_by_strategy(strategies.banded([1.0, -0.9]))
MECHANISMS = {
    "add_gaussian_noise": Mechanism(
        lambda sigma, key: dpjax.add_gaussian_noise(sigma * CLIP_NORM, key=key),
        _mu("independent"),
        _AS_IT_IS,
    ),
    # Rounding a coordinate to the lattice changes μ by about 1e-5 of μ.
    "add_discrete_gaussian_noise": Mechanism(
        lambda sigma, key: dpjax.add_discrete_gaussian_noise(
            sigma * CLIP_NORM, key=key
        ),
        _mu("independent"),
        _AS_IT_IS,
    ),
    "noisy_mean": _independent(dpjax.noisy_mean, _AS_IT_IS),
    "dp_sgd": _independent(dpjax.dp_sgd, _AS_IT_IS, learning_rate=0.3),
    "dp_sgd, momentum": _independent(
        dpjax.dp_sgd, _WITHOUT_MOMENTUM, learning_rate=0.3, momentum=0.9
    ),
    "dp_adam": _independent(dpjax.dp_adam, None, learning_rate=0.3),
    "dp_adamw": _independent(dpjax.dp_adamw, None, learning_rate=0.3),
    "dp_nsgd": Mechanism(
        lambda sigma, key: dpjax.dp_nsgd(
            0.3, decay=DECAY, num_steps=STEPS, **MEAN, noise_multiplier=sigma, key=key
        ),
        lambda sigma: momentum_mu(sigma, decay=DECAY, **RUN),
        None,
    ),
    "dp_nsgd, correlated": Mechanism(
        lambda sigma, key: dpjax.dp_nsgd(
            0.3,
            decay=DECAY,
            num_steps=STEPS,
            strategy=STRATEGIES["geometric"],
            **MEAN,
            noise_multiplier=sigma,
            key=key,
        ),
        _mu("geometric"),
        None,
    ),
    "tree_momentum": _tree("stored"),
    "tree_momentum, regenerated": _tree("regenerate"),
    "correlated_noise, geometric": _correlated("geometric", "stored"),
    "correlated_noise, geometric regenerated": _correlated("geometric", "regenerate"),
    "correlated_noise, rational": _correlated("rational", "stored"),
    "correlated_noise, banded": _correlated("banded", "stored"),
    "correlated_noise, scaled": _correlated("scaled", "stored"),
    "correlated_noise, tree": _correlated("tree", "stored"),
    "correlated_noise, tree regenerated": _correlated("tree", "regenerate"),
}


def canary_sums(num_in: int, num_out: int) -> jax.Array:
    """Return the sums of all steps, f[T, k].

    The first num_in canaries participate; the other num_out do not.
    """
    present = np.arange(num_in + num_out) < num_in
    return jnp.asarray(CLIP_NORM * PART[:, None] * present, jnp.float32)


def white_box(
    mechanism: Mechanism, mu: float, *, num_in: int, num_out: int, key: jax.Array
) -> auditing.Outputs:
    """Score canaries by all outputs of one run of a μ-GDP mechanism."""
    sigma = float(mechanism.mu(1.0)) / mu
    make = functools.partial(mechanism.make, sigma)
    observed = auditing.released(make(key), canary_sums(num_in, num_out))
    if mechanism.white is None:
        # Adam and normalised steps move against the gradient where the canary
        # participates.
        scores = auditing.matched_filter(observed, -jnp.asarray(PART)[:, None])
    else:
        silent = mechanism.make(0.0, key)
        expected = auditing.released(silent, canary_sums(1, 0))
        scores = auditing.matched_filter(observed, expected, mechanism.white)
    return auditing.Outputs(scores[:num_in], scores[num_in:])


# --- deliberate errors, mostly introduced by a patch


def _same_for_all_leaves(key: jax.Array, of: Any) -> list[jax.Array]:
    return [key] * len(jax.tree.leaves(of))


def _half(whole: Callable[..., Any], *args: Any) -> Any:
    return whole(*args) * jnp.float32(0.5)


def _same_in_a_level(whole: Callable[..., Any], weights: Any) -> Any:
    """Return the tree's noise stream with equal noise in all nodes of a level."""
    stream = whole(weights)

    def noise(draw: Callable[..., Any], step: jax.Array, memory: Any) -> Any:
        # The first node of a level ends at the step whose only bit is the lowest bit
        # of t.
        return stream.generate(lambda t: draw(t & -t), step, memory)

    return stream._replace(generate=noise)


def _independent_scores(factor: float, sums: float = 1.0) -> Callable[..., jax.Array]:
    """Return a function that scores canaries under independent noise.

    The standard deviation of the noise is multiplied by `factor`, and each canary's
    gradient by `sums`.
    """

    def scores(sigma: float, key: jax.Array, num: int) -> jax.Array:
        tx = dpjax.add_gaussian_noise(factor * sigma * CLIP_NORM, key=key)
        observed = auditing.released(tx, sums * canary_sums(num, num))
        return auditing.matched_filter(observed, jnp.asarray(PART)[:, None])

    return scores


def _of_two_leaves(sigma: float, key: jax.Array, num: int) -> jax.Array:
    """Score canaries along (1, −1) / √2 in two leaves by the leaves' difference."""
    tx = dpjax.add_gaussian_noise(sigma * CLIP_NORM, key=key)
    half = canary_sums(num, num) / np.sqrt(2)
    observed = auditing.released(tx, {"a": half, "b": -half})
    return auditing.matched_filter(
        (observed["a"] - observed["b"]) / np.sqrt(2), jnp.asarray(PART)[:, None]
    )


def _of_two_nodes(sigma: float, key: jax.Array, num: int) -> jax.Array:
    """Score canaries by the node of step 1 minus the node of step 3.

    A canary contributes to the node of step 1.
    """
    tx = _tree("stored").make(sigma, key)
    white = white_by_tree(DECAY)
    nodes = white(auditing.released(tx, canary_sums(num, num)))
    return nodes[0] - nodes[2]


def _of_a_resumed_run(sigma: float, key: jax.Array, num: int) -> jax.Array:
    """Score canaries by step 1 minus step 3.

    After step 2 the transformation's state is initialized again.
    """
    tx = dpjax.add_gaussian_noise(sigma * CLIP_NORM, key=key)
    sums = canary_sums(num, num)
    first, second = (auditing.released(tx, x) for x in (sums[:2], sums[2:]))
    return first[0] - second[0]


class Twin(NamedTuple):
    """A mechanism with one deliberate error, and the scores that detect the error.

    Attributes:
      mechanism: the mechanism whose noise multiplier and μ are claimed.
      scores: returns the scores of num canaries that participate, followed by the
        scores of num canaries that do not.
      patch: the patch that introduces the error: a module, a name in the module, and
        the replacement. None if `scores` contains the error.
    """

    mechanism: Mechanism
    scores: Callable[[float, jax.Array, int], jax.Array]
    patch: tuple[Any, str, Callable[..., Any]] | None = None


_PLAIN = MECHANISMS["add_gaussian_noise"]
TWINS = {
    "noise halved": Twin(
        _PLAIN,
        _independent_scores(1.0),
        (noise, "normal_like", functools.partial(_half, noise.normal_like)),
    ),
    "clipping skipped, a gradient of three clip norms": Twin(
        _PLAIN, _independent_scores(1.0, sums=3.0)
    ),
    "the sum of 8 noised as if it were their mean": Twin(
        _PLAIN, _independent_scores(1 / 8)
    ),
    "one key for two leaves": Twin(
        _PLAIN, _of_two_leaves, (keys, "leaf_keys", _same_for_all_leaves)
    ),
    "one key for two nodes of a level": Twin(
        MECHANISMS["tree_momentum"],
        _of_two_nodes,
        (
            streaming,
            "buffered_tree",
            functools.partial(_same_in_a_level, streaming.buffered_tree),
        ),
    ),
    "noise repeated after a resume": Twin(_PLAIN, _of_a_resumed_run),
}


def of_twin(
    twin: Twin, mu: float, *, num: int, key: jax.Array, broken: bool = True
) -> auditing.Outputs:
    """Score canaries in one run of a mechanism that is claimed to be μ-GDP."""
    sigma = float(twin.mechanism.mu(1.0)) / mu
    patched = contextlib.nullcontext()
    if broken and twin.patch:
        patched = mock.patch.object(*twin.patch)
    with patched:
        scores = twin.scores(sigma, key, num)
    return auditing.Outputs(scores[:num], scores[num:])


def canaries_needed(twin: Twin, mu: float, sizes: list[int], key: jax.Array) -> int:
    """Return the least size from which on an audit refutes the claim.

    The audit has confidence 99 %, and refutes the claim at this and all larger `sizes`.
    """
    inside, outside = of_twin(twin, mu, num=max(sizes), key=key)
    result = [
        auditing.gaussian_mu_lower(inside[:n], outside[:n], confidence=0.99) > mu
        for n in sizes
    ]
    return next(n for i, n in enumerate(sizes) if all(result[i:]))


# --- deliberate errors that `auditing.check` detects, without noise


def _clipped(data: jax.Array, mask: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(data, axis=1, keepdims=True)
    valid = mask[:, None] & jnp.isfinite(norm)
    return jnp.where(valid, data * jnp.minimum(1, CLIP_NORM / norm), 0)


def _first_counts_more(data: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(len(mask)) == 0, 1.0, 0.5) @ _clipped(data, mask)


CHECKED = {
    "as it should be": lambda x, mask: _clipped(x, mask).sum(axis=0),
    "clipping skipped": lambda x, mask: jnp.sum(x, axis=0, where=mask[:, None]),
    "the mask ignored": lambda x, mask: _clipped(x, mask | True).sum(axis=0),
    "divided by the actual batch size": lambda x, mask: (
        8 * _clipped(x, mask).sum(axis=0) / jnp.maximum(mask.sum(), 1)
    ),
    "a result that depends on the order of the batch": _first_counts_more,
}


def checked(name: str) -> tuple[auditing.Report, int]:
    """Return the check's report on a sum of clipped rows, and the number of calls."""
    calls = 0

    def counted(data: Any, mask: jax.Array) -> jax.Array:
        nonlocal calls
        calls += 1
        return fn(data, mask)

    fn = jax.jit(CHECKED[name])
    rows = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    report = auditing.check(
        counted, rows, sensitivity=CLIP_NORM, adjacency=Adjacency.ADD_REMOVE
    )
    return report, calls


def epsilon(mu: Any, delta: float) -> float:
    """Return ε of a μ-GDP Gaussian mechanism at δ."""
    return float(gdp.epsilon(mu, delta)) if mu > 0 else 0.0
