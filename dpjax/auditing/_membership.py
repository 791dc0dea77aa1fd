"""Who was in the training data of a model, by what others trained alike do."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import Key, Tree

_LEAST = 1e-12  # of a variance, so that what never varies decides nothing by rounding
_LEAST_LOSS = 2.0**-24  # half an ulp of a probability of one in float32


class Shadows(NamedTuple):
    """Models trained alike on random halves of the same examples.

    Attributes:
      included: which examples each was trained on, bool[s, n], by fair coins.
      outputs: what was kept of each, a tree of arrays with leading axes s.
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
    """Train models alike, each on the examples that fair coins of its own chose.

    Args:
      run: from a mask bool[n] of the examples to train on and one typed key to what is
        kept of a model: say, its losses on all n examples. It is vmapped and jitted.
      num_examples: n, static, at least 1.
      num_models: s, static, at least 1. The first may be thought of as the one that is
        attacked, and all others as the attacker's.
      key: one typed key, for this alone.
      batch_size: how many models are trained at once; None for all of them.

    Returns:
      `Shadows`. The coins of a model are independent of those of all others, as
      `one_run_mu_lower` asks for.

    Raises:
      ValueError: an argument is out of range.

    Reference: Carlini et al. (2022), section V, with coins in place of exact halves.

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
    size = validate.static_int("batch_size", batch_size or num_models, minimum=1)
    key = stream(validate.typed_key("key", key), "shadow models")
    coins, runs = jax.random.split(key)
    included = jax.random.bernoulli(coins, 0.5, (num_models, num_examples))

    def one(given: tuple[jax.Array, Key]) -> Tree:
        return run(*given)

    train = functools.partial(jax.lax.map, one, batch_size=min(size, num_models))
    outputs = jax.jit(train)((included, jax.random.split(runs, num_models)))
    return Shadows(included, outputs)


def log_odds(losses: jax.Array) -> jax.Array:
    """The logarithm of the odds that a model gave to what is true, from its losses.

    Args:
      losses: cross-entropies −log p, f[*b], at least 0.

    Returns:
      log(p / (1 − p)), f[*b]: nearer to a Gaussian than the loss, from one training to
      another, for `likelihood_ratios`. A loss that rounded to 0 counts as 2⁻²⁴.

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
    """For each model and example, how much likelier the example was in its data.

    Each model in turn is attacked by all others: of what they say of an example, those
    with it in their data give one Gaussian, and those without it another.

    Args:
      statistic: what each of s models says of each of n examples, f[s, n]: its loss, or
        the logarithm of its confidence's odds, which is nearer to a Gaussian.
      included: whether the example was in its training data, bool[s, n].

    Returns:
      Logarithms of likelihood ratios, f[s, n], for `auroc` and `true_positive_rate` of
      scores[included] and scores[~included]; 0 where fewer than two other models had
      the example, or had it not. They depend on each other, so that no bound of
      independent scores is for them. Those of one model, with its coins, are for
      `one_run_mu_lower` and `one_run_epsilon_lower`, which allow that, if its coins
      have nothing to do with those of others, as of `train_shadows`.

    Raises:
      ValueError: the shapes differ.

    Reference: Carlini et al. (2022), Algorithm 1, on the models themselves, and without
    the augmentation of examples.

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
            "included must have the shape f[s, n] of statistic; got "
            f"{jnp.shape(included)} for {jnp.shape(statistic)}."
        )
    x = jnp.asarray(statistic, float)
    x = x - jnp.mean(x, axis=0, keepdims=True)  # squares of what is left do not cancel
    included = jnp.asarray(included, bool)

    def log_density(those: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each model's value, by all others of those, and whether these suffice."""

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
