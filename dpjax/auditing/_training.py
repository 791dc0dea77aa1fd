"""Many runs of an algorithm, and the scores of attacks on their results.

The runs are on a data set and a neighbouring data set, or on random halves of one data
set. Runs on random halves are for membership inference with shadow models, which are
models that are trained in the same way as the attacked model.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import Key, Tree


class Outputs(NamedTuple):
    """The outputs of runs on two neighbouring data sets, or the scores of the outputs.

    Attributes:
      inside: the outputs of the runs on the data set with the audited example, stacked
        along a leading axis.
      outside: the outputs of the runs on the neighbouring data set, stacked along a
        leading axis.
    """

    inside: Tree
    outside: Tree


def train_many(
    run: Callable[[Tree, Key], Tree],
    data: Tree,
    neighbour: Tree,
    *,
    num_runs: int,
    key: Key,
    batch_size: int | None = None,
) -> Outputs:
    """Run an algorithm many times on a data set, and as many times on its neighbour.

    Args:
      run: a function from a data set and one typed key to the released values, a tree
        of arrays, such as the last iterate or all updates of `jax.lax.scan`.
        `train_many` vmaps the function over keys. Make the optimizer inside the
        function, since the key is a tracer. The function may call any solver of
        `dpjax.solvers`, and the solver then calibrates the noise in each call. Jit the
        expensive parts.
      data: the data set with the audited example.
      neighbour: the data set without this example, or with another in its place. Its
        shapes may differ from those of data.
      num_runs: the number of runs on each data set, static.
      key: one typed key, from which `train_many` derives a key for each run.
      batch_size: the number of runs that a compiled loop computes at the same time;
        None for all runs, without a loop. The loop traces everything that a run does.
        If a run calibrates a solver's noise, batch_size must be None, since calibration
        cannot be traced.

    Returns:
      `Outputs`, with leading axes of length num_runs.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def run(data, key):
      ...     return jnp.sum(data) + jax.random.normal(key)
      >>> outputs = train_many(
      ...     run, jnp.ones(3), jnp.ones(2), num_runs=4000, key=jax.random.key(0))
      >>> print(f"{outputs.inside.mean() - outputs.outside.mean():.1f}")
      1.0
    """
    num_runs = validate.static_int("num_runs", num_runs, minimum=1)
    if batch_size is not None:
        batch_size = validate.static_int("batch_size", batch_size, minimum=1)
    key = stream(validate.typed_key("key", key), "audited runs")
    keys = jax.random.split(key, 2 * num_runs)

    def many(data: Tree, keys: jax.Array) -> Tree:
        # The data are constants and not tracers: solvers check their values.
        one = functools.partial(run, data)
        if batch_size is None:
            # Without jit, JAX traces only values that depend on a key. Calibration
            # depends on no key.
            return jax.vmap(one)(keys)
        size = min(batch_size, num_runs)
        return jax.jit(functools.partial(jax.lax.map, one, batch_size=size))(keys)

    return Outputs(many(data, keys[:num_runs]), many(neighbour, keys[num_runs:]))


def linear_scores(outputs: Outputs) -> Outputs:
    """Compute scores of half of the runs, by a linear test fitted to the other half.

    Args:
      outputs: the outputs of n runs on each data set, trees with leading axes n, at
        least 4.

    Returns:
      Scores f[n − n // 2] of the runs to which the test was not fitted. For outputs of
      any distribution, these scores are independent, as `epsilon_lower` and `mu_lower`
      require. The test is Fisher's discriminant, the best test for Gaussian outputs
      with a common covariance.

    Raises:
      ValueError: there are fewer than 4 runs.

    Example:
      >>> import jax
      >>> noise = jax.random.normal(jax.random.key(0), (2, 1000, 3))
      >>> scores = linear_scores(Outputs(noise[0] + 1.0, noise[1]))
      >>> gap = scores.inside.mean() - scores.outside.mean()
      >>> print(f"{gap / scores.outside.std():.1f}")  # the best linear test gives √3
      1.6
    """
    inside, outside = (jax.vmap(lambda tree: ravel_pytree(tree)[0])(x) for x in outputs)
    if min(len(inside), len(outside)) < 4:
        raise ValueError(
            "outputs must contain at least 4 runs inside and 4 runs outside; got "
            f"{len(inside)} and {len(outside)}."
        )
    # The test is fitted to the first half, so that scores of the second half are
    # independent.
    (fit_in, score_in), (fit_out, score_out) = (
        (x[: len(x) // 2], x[len(x) // 2 :]) for x in (inside, outside)
    )
    mean_in, mean_out = fit_in.mean(axis=0), fit_out.mean(axis=0)
    spread = jnp.concatenate([fit_in - mean_in[None], fit_out - mean_out[None]])
    scale = jnp.std(spread, axis=0)
    # A constant coordinate is not scaled.
    scale = jnp.where(scale > 0, scale, 1.0)
    # Fisher's discriminant Σ⁻¹(m₁ − m₀), in units of each coordinate's standard
    # deviation. A small multiple of I is added to Σ, which is singular for few runs.
    unit = spread / scale[None]
    covariance = unit.T @ unit / len(unit) + 1e-3 * jnp.eye(len(scale))
    direction = jnp.linalg.solve(covariance, (mean_in - mean_out) / scale) / scale
    return Outputs(score_in @ direction, score_out @ direction)


# The minimum variance. Without it, rounding would decide for a constant statistic.
_LEAST = 1e-12
# The minimum loss, which is half an ulp of the probability 1 in float32.
_LEAST_LOSS = 2.0**-24


class Shadows(NamedTuple):
    """Models trained in the same way, each on a random half of the same examples.

    Attributes:
      included: whether each of s models was trained on each of n examples, bool[s, n].
        Independent fair coins decided this.
      outputs: the retained outputs of each model, a tree of arrays with leading axes s.
    """

    included: jax.Array
    outputs: Tree


def train_shadows(
    run: Callable[[jax.Array, Key], Tree],
    num_examples: int,
    *,
    num_models: int,
    key: Key,
    batch_size: int | None = None,
) -> Shadows:
    """Train many models in the same way, each on a random half of the examples.

    A fair coin decides for each model and each example whether the model is trained on
    the example.

    Args:
      run: a function from two arguments to the retained outputs of a model, such as its
        losses on all n examples. The arguments are a mask bool[n] of the examples to
        train on, and one typed key. `train_shadows` vmaps and jits the function.
      num_examples: n, static, at least 1.
      num_models: s, static, at least 1. For instance, the first model is the attacked
        model, and the attacker has trained all other models.
      key: one typed key, used for nothing else.
      batch_size: the number of models that are trained at the same time; None for all.

    Returns:
      `Shadows`. The coins of different models are independent, as `one_run_mu_lower`
      requires.

    Raises:
      ValueError: an argument is out of range.

    Reference: Carlini et al. (2022), section V. Here coins decide, whereas in the paper
    exactly half of the models are trained on each example.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (30,))
      >>> def run(mask, key):  # a "model" that remembers a noisy mean
      ...     mean = jnp.mean(x, where=mask) + 0.1 * jax.random.normal(key)
      ...     return (x - mean) ** 2
      >>> shadows = train_shadows(run, 30, num_models=8, key=jax.random.key(1))
      >>> shadows.included.shape, shadows.outputs.shape
      ((8, 30), (8, 30))
    """
    num_examples = validate.static_int("num_examples", num_examples, minimum=1)
    num_models = validate.static_int("num_models", num_models, minimum=1)
    size = num_models if batch_size is None else batch_size
    size = validate.static_int("batch_size", size, minimum=1)
    key = stream(validate.typed_key("key", key), "shadow models")
    coins, runs = jax.random.split(key)
    included = jax.random.bernoulli(coins, 0.5, (num_models, num_examples))
    # lax.map over batches of models bounds the memory of training.
    train = functools.partial(
        jax.lax.map, lambda given: run(*given), batch_size=min(size, num_models)
    )
    outputs = jax.jit(train)((included, jax.random.split(runs, num_models)))
    return Shadows(included, outputs)


def log_odds(losses: jax.Array) -> jax.Array:
    """The log-odds of the probability p that a model assigns to the true label.

    Args:
      losses: the cross-entropy −log p of each example, f[*b], at least 0.

    Returns:
      log(p / (1 − p)), f[*b], for `likelihood_ratios`. Over repeated trainings, the
      log-odds are closer to a Gaussian than the loss is. A loss below 2⁻²⁴ counts as
      2⁻²⁴, since float32 cannot tell e^{−ℓ} from 1 for such losses ℓ.

    Reference: Carlini et al. (2022), section V.A.

    Example:
      >>> import jax.numpy as jnp
      >>> print(log_odds(-jnp.log(jnp.array([0.5, 0.9]))).round(3))
      [0.    2.197]
    """
    losses = jnp.maximum(jnp.asarray(losses, float), _LEAST_LOSS)
    # p = e^{−ℓ}: log(p / (1 − p)) = −log(e^ℓ − 1) = −ℓ − log(1 − e^{−ℓ}).
    return -losses - jnp.log(-jnp.expm1(-losses))


def likelihood_ratios(statistic: jax.Array, included: jax.Array) -> jax.Array:
    """Compute a log-likelihood ratio of membership for each model and each example.

    The function attacks each model with the help of all other models. For each example,
    it fits one Gaussian to the statistics of the other models that were trained on the
    example, and one to those of the other models that were not.

    Args:
      statistic: a statistic of each of s models at each of n examples, f[s, n]: the
        loss, or `log_odds` of the loss, which is closer to a Gaussian.
      included: whether the example was in the model's training data, bool[s, n].

    Returns:
      Scores f[s, n]. Pass scores[included] and scores[~included] to `auroc` or
      `true_positive_rate`. A score is the logarithm of a likelihood ratio. A score is 0
      if fewer than two other models were trained with the example, or fewer than two
      without it. Since the scores depend on each other, no bound for independent scores
      applies. `one_run_mu_lower` and `one_run_epsilon_lower` allow dependent scores:
      pass one model's row of the scores and of `included`. This row of `included` must
      be independent of all other rows of `included`, as in `train_shadows`.

    Raises:
      ValueError: the shapes differ.

    Reference: Carlini et al. (2022), Algorithm 1, without the augmentation of examples.
    The other models have the role of the shadow models.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import auditing
      >>> included = jax.random.bernoulli(jax.random.key(0), 0.5, (40, 30))
      >>> hard = jnp.linspace(0.0, 9.0, 30)  # some examples have large losses anyway
      >>> noise = jax.random.normal(jax.random.key(1), (40, 30))
      >>> losses = hard[None] - 2.0 * included + noise
      >>> ratios = likelihood_ratios(losses, included)
      >>> for scores in (-losses, ratios):
      ...     print(f"{auditing.auroc(scores[included], scores[~included]):.2f}")
      0.72
      0.92
    """
    if jnp.ndim(statistic) != 2 or jnp.shape(statistic) != jnp.shape(included):
        raise ValueError(
            "included must have the shape [s, n] of statistic; got "
            f"{jnp.shape(included)} for {jnp.shape(statistic)}."
        )
    x = jnp.asarray(statistic, float)
    x = x - jnp.mean(x, axis=0, keepdims=True)  # so that E x² − (E x)² cancels little
    included = jnp.asarray(included, bool)

    def log_density(those: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A Gaussian is fitted to the values of all other models in the mask `those`.
        # The results are the log-density of each model's value under this Gaussian, up
        # to a constant, and whether the mask has at least two other models.

        # A sum over all other models is the whole sum minus the model's own value.
        def others(values: jax.Array) -> jax.Array:
            values = jnp.where(those, values, 0.0)
            return jnp.sum(values, axis=0, keepdims=True) - values

        count = others(jnp.ones_like(x))
        safe = jnp.maximum(count, 1.0)
        mean = others(x) / safe
        variance = jnp.maximum(others(x * x) / safe - mean * mean, _LEAST)
        return -((x - mean) ** 2) / (2 * variance) - jnp.log(variance) / 2, count >= 2

    # Carlini et al. (2022), Algorithm 1, https://arxiv.org/abs/2112.03570:
    # p(x | N(μ_in, σ²_in)) / p(x | N(μ_out, σ²_out)).
    (inside, known), (outside, also) = log_density(included), log_density(~included)
    return jnp.where(known & also, inside - outside, 0.0)
