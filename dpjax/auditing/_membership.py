"""Who was in the training data of a model, by what others trained alike do."""

import jax
import jax.numpy as jnp

_LEAST = 1e-12  # of a variance, so that what never varies decides nothing by rounding


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
      independent scores is for them.

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
