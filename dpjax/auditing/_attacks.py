"""Attacks on a mechanism, which give scores to canaries or to whole runs.

**Canaries** are examples with known gradients, which an attack tries to detect. A
canary's loss is linear in the parameters, so its gradient is a fixed direction in
parameter space. With `plant`, no other example moves the parameters along this
direction. If the mechanism releases only noisy sums of clipped gradients, the released
values along the direction then contain everything that these sums reveal about the
canary.

A matched filter computes a canary's score. Let y be the released values along the
canary's direction, and let h be the canary's contribution to these values. The attack
computes h from the mechanism. If the canary took part, y is h + z, and otherwise y is
z, where z is white noise of standard deviation s. The score ⟨h, y⟩ / ‖h‖ is a
sufficient statistic for the canary's participation. The distribution of the score is
N(‖h‖, s²) with the canary and N(0, s²) without the canary, as for a Gaussian mechanism
with μ = ‖h‖ / s. If the mechanism correlates the noise of its steps, a linear map that
depends only on the mechanism first makes the noise white.

**Many runs.** Other attacks run an algorithm many times: on a data set and a
neighbouring data set, or on random halves of one data set. Runs on random halves are
for membership inference with shadow models. A shadow model is a model that is trained
in the same way as the attacked model.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree
from dpjax._matrices.strategy import Strategy, check_strategy


class Planted(NamedTuple, Generic[Params]):
    """Model parameters, with one extra coordinate for each canary.

    Attributes:
      params: the parameters of the model.
      slots: the extra coordinates, f[k], one for each of k canaries. Only canary i has
        a non-zero gradient along slot i.
    """

    params: Params
    slots: jax.Array


class Marked(NamedTuple):
    """A batch of ordinary examples and canaries.

    Attributes:
      example: the examples, for the original loss. For a canary, this entry is a
        placeholder: any example at which the original loss and its gradient are finite.
      canary: the index of the canary, i32[*b]; −1 for an ordinary example.
    """

    example: Any
    canary: ArrayLike


def plant(loss_fn: LossFn, norm: ArrayLike) -> Callable[..., jax.Array]:
    """Add canaries to a loss, in extra coordinates that the model does not use.

    Clipping, masks, the sum and the noise treat a canary like any other example. An
    audit with canaries therefore covers all of these stages.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a scalar.
      norm: the L2 norm of a canary's gradient, f[]. If this norm is at least the clip
        norm, then clipping scales the gradient down to the clip norm.

    Returns:
      A loss, as a function of `Planted(params, slots)` and one `Marked(example,
      canary)`. Each canary has its own extra coordinate, called slot. A canary's
      gradient is `norm` along its slot and zero in all other coordinates. The gradient
      of an ordinary example is the same as without `plant`, and is zero along the
      slots. If a canary did not take part, the released value along its slot is
      therefore only noise.

    Raises:
      ValueError: norm is not positive and finite.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> def loss(w, x):
      ...     return jnp.sum((w - x) ** 2)
      >>> gradient = dpjax.clipped_grad(plant(loss, 9.0), 0.5)
      >>> params = Planted(jnp.zeros(2), jnp.zeros(4))
      >>> batch = Marked(jnp.full((3, 2), 0.125), jnp.array([-1, 2, 0]))
      >>> total, _ = gradient(params, batch)
      >>> print(total.params, total.slots.round(2))
      [-0.25 -0.25] [0.5 0.  0.5 0. ]
    """
    validate.positive("norm", norm)

    def loss(planted: Planted, marked: Marked) -> jax.Array:
        ordinary_loss = loss_fn(planted.params, marked.example)
        canary = jnp.asarray(marked.canary)
        # jnp.where evaluates both branches, and −1 must not index from the end.
        slot = planted.slots[jnp.maximum(canary, 0)]
        loss = jnp.where(canary >= 0, norm * slot, ordinary_loss)
        return loss.astype(ordinary_loss.dtype)

    return loss


Whiten: TypeAlias = Callable[[jax.Array], jax.Array]
"""A linear map from the releases of T steps, f[T, k], to values with white noise."""


def released(transformation: optax.GradientTransformation, sums: Tree) -> Tree:
    """Run a mechanism on given sums of gradients, and return the released values.

    Args:
      transformation: a mechanism that does not read the parameters, such as the result
        of `dpjax.add_gaussian_noise` or `dpjax.tree_momentum`.
      sums: the inputs of the mechanism in T steps, a tree of leaves f[T, ...].

    Returns:
      The updates of all T steps, a tree of leaves f[T, ...].

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> tx = dpjax.tree_momentum(0.5, 0.0, num_steps=3, key=jax.random.key(0))
      >>> print(released(tx, jnp.ones((3, 1)))[:, 0])
      [0.5   0.75  0.875]
    """

    @jax.jit
    def scan(sums: Tree) -> Tree:
        def step(state: optax.OptState, step_sums: Tree) -> tuple[optax.OptState, Tree]:
            # The mechanism does not read the parameters.
            updates, state = transformation.update(step_sums, state, placeholder)
            return state, updates

        placeholder = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)
        return jax.lax.scan(step, transformation.init(placeholder), sums)[1]

    return scan(sums)


def white_by_strategy(strategy: Strategy) -> Whiten:
    """Return the linear map that makes the noise of `dpjax.correlated_noise` white.

    The noise of the mechanism is C⁻¹z, where C is the matrix of the strategy and z is
    white noise. The linear map is y ↦ C y.

    The releases of `dpjax.tree_momentum` with decay β are the momenta m_t. To make the
    noise of these releases white, first compute (m_t − β m_{t−1}) / (1 − β) for each
    step t, where the momentum before the first step is 0. Each of these values is a sum
    of gradients with the noise of `strategies.tree(β)`. Then apply the map for
    `strategies.tree(β)` to these values.

    Args:
      strategy: the strategy of the mechanism, from `dpjax.strategies`.

    Returns:
      A linear map of released values in T steps, from f[T, k] to f[T, k].

    Raises:
      ValueError: from the returned map, if the strategy does not support T steps.

    Reference: Denisov et al. (2022): for sums x, releasing x + C⁻¹z is equivalent to
    releasing C x + z.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpjax import strategies
      >>> white = white_by_strategy(strategies.geometric(0.5))
      >>> print(white(jnp.array([[1.0], [-0.5], [0.0]]))[:, 0])
      [1. 0. 0.]
    """

    def white(y: jax.Array) -> jax.Array:
        matrix = check_strategy(strategy, len(y)).matrix(len(y)).astype(y.dtype)
        # Denisov et al. (2022), https://arxiv.org/abs/2202.08312: for sums x,
        # C (x + C⁻¹z) is C x + z.
        return jnp.tensordot(matrix, y, 1, precision="highest")

    return white


def matched_filter(
    seen: jax.Array, expected: jax.Array, whiten: Whiten | None = None
) -> jax.Array:
    """Compute a score for each canary from all releases of a Gaussian mechanism.

    Args:
      seen: the released values in T steps along the gradient directions of k canaries,
        f[T, k], such as the entry `slots` of the updates of `Planted` parameters.
      expected: the contribution of a participating canary to seen, f[T, k] or f[T, 1].
        To compute the contribution, call `released` with the canary's clipped gradients
        as sums, and with a mechanism whose noise has standard deviation 0.
      whiten: a linear map that whitens the mechanism's noise; None if the noise is
        already white.

    Returns:
      Scores f[k]. Let s be the standard deviation of the noise after `whiten`, and let
      h be the canary's contribution after `whiten`. The canary's score has the
      distribution N(‖h‖, s²) if the canary took part, and N(0, s²) otherwise, as for a
      Gaussian mechanism with μ = ‖h‖ / s. If h is zero, the score is 0. From the
      scores, `gaussian_mu_lower` computes a lower bound on μ.

    Raises:
      ValueError: the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> sums = jnp.concatenate([jnp.ones((4, 5000)), jnp.zeros((4, 5000))], axis=1)
      >>> tx = dpjax.add_gaussian_noise(2.0, key=jax.random.key(0))
      >>> scores = matched_filter(released(tx, sums), jnp.ones((4, 1)))
      >>> mean, stddev = scores[:5000].mean(), scores[:5000].std()
      >>> print(f"{mean / stddev:.2f} for μ = √4 / 2")
      1.00 for μ = √4 / 2
    """
    seen, expected = jnp.asarray(seen), jnp.asarray(expected)
    if seen.ndim != 2 or expected.shape not in (seen.shape, (len(seen), 1)):
        raise ValueError(
            "expected must have the shape [T, k] of seen, or shape [T, 1]; got "
            f"shapes {expected.shape} and {seen.shape}."
        )
    whiten = whiten or (lambda y: y)
    signal, whitened = whiten(expected), whiten(seen)
    signal_norm = jnp.sqrt(jnp.sum(jnp.square(signal), axis=0))
    product = jnp.sum(signal * whitened, axis=0)
    # A canary without a signal gets the score 0 in place of 0 / 0.
    safe_norm = jnp.where(signal_norm > 0, signal_norm, 1.0)
    return jnp.where(signal_norm > 0, product / safe_norm, 0.0)


def mixture_scores(
    seen: jax.Array, cases: jax.Array, probabilities: ArrayLike, stddev: ArrayLike
) -> jax.Array:
    """Compute scores of canaries that took part in steps chosen at random.

    Args:
      seen: the released values in T steps along the gradient directions of k canaries,
        f[T, k], with white noise.
      cases: the possible contributions of a canary to seen, f[c, T]. A random choice
        decides in which steps a canary takes part. There is one row for each of the c
        possible choices.
      probabilities: the probability of each row of cases, f[c].
      stddev: s, the standard deviation of the noise, f[], positive.

    Returns:
      Scores f[k]. A score is the logarithm of a likelihood ratio: the likelihood of the
      released values with the canary, divided by the likelihood of the same values
      without the canary. At the same false-positive rate, no other attack on these
      values has a higher true-positive rate than a threshold on the score. If a canary
      takes part in each step independently, as under Poisson sampling, then the
      canary's score for all steps is the sum of the canary's scores for single steps.

    Raises:
      ValueError: the shapes do not match, or stddev is not positive and finite.

    Reference: Neyman and Pearson (1933), https://doi.org/10.1098/rsta.1933.0009.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> noise = 2.0 * jax.random.normal(jax.random.key(0), (3, 10_000))
      >>> bins = jnp.eye(3)  # one of three steps, each with probability 1/3
      >>> step = jax.random.randint(jax.random.key(1), (5000,), 0, 3)
      >>> seen = noise.at[step, jnp.arange(5000)].add(1.0)
      >>> scores = mixture_scores(seen, bins, jnp.full(3, 1 / 3), 2.0)
      >>> ratios = jnp.exp(scores)  # E exp(score) is 1 without the canary
      >>> print(f"{ratios[:5000].mean():.2f} with it, {ratios[5000:].mean():.2f} not")
      1.09 with it, 1.00 not
    """
    validate.positive("stddev", stddev)
    seen, cases, weights = map(jnp.asarray, (seen, cases, probabilities))
    are_matrices = seen.ndim == 2 and cases.ndim == 2
    if not are_matrices or cases.shape != (*weights.shape, len(seen)):
        raise ValueError(
            "cases must have shape [c, T] for seen of shape [T, k] and probabilities "
            f"of shape [c]; got shapes {cases.shape}, {seen.shape} and "
            f"{weights.shape}."
        )
    # The score is log Σ_c p_c dN(h_c, s² I) / dN(0, s² I) at the released values y,
    # where h_c is row c of cases and p_c is the probability of row c. By Neyman and
    # Pearson (1933), a threshold on this ratio is the best test at its false-positive
    # rate.
    products = jnp.matmul(cases, seen, precision="highest")
    squares = jnp.sum(jnp.square(cases), axis=1, keepdims=True)
    exponents = (products - squares / 2) / jnp.square(stddev)
    return logsumexp(exponents, axis=0, b=weights[:, None])


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
        function, since the key is a tracer. If batch_size is None, the function may
        call any solver of `dpjax.solvers`. In this case, jit the expensive parts of
        the function.
      data: the data set with the audited example.
      neighbour: the data set without the audited example, or with another example in
        place of the audited one. The shapes of neighbour and data may differ.
      num_runs: the number of runs on each data set, static.
      key: one typed key, from which `train_many` derives a key for each run.
      batch_size: the number of runs that a compiled loop computes at the same time.
        With None, `train_many` computes all runs at the same time, without a loop and
        without jit. If run calls a solver that calibrates its noise, batch_size must be
        None, since the loop traces all of run, and calibration cannot be traced.

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

    def run_all(data: Tree, keys: jax.Array) -> Tree:
        # The data are constants and not tracers, since solvers check the data's values.
        run_on_data = functools.partial(run, data)
        if batch_size is None:
            # Without jit, JAX traces only values that depend on a key. Calibration
            # depends on no key.
            return jax.vmap(run_on_data)(keys)
        size = min(batch_size, num_runs)
        run_all = functools.partial(jax.lax.map, run_on_data, batch_size=size)
        return jax.jit(run_all)(keys)

    return Outputs(run_all(data, keys[:num_runs]), run_all(neighbour, keys[num_runs:]))


def linear_scores(outputs: Outputs) -> Outputs:
    """Compute scores for half of the runs, by a linear test fitted to the other half.

    Args:
      outputs: the outputs of n independent runs with the canary, and of m independent
        runs without the canary: two trees of arrays with leading axes n and m, each at
        least 4.

    Returns:
      `Outputs` with scores f[n − n // 2] and f[m − m // 2], for the runs to which the
      test was not fitted. Given the fitted test, these scores are independent, whatever
      the distribution of the outputs. `epsilon_lower` and `mu_lower` require
      independent scores. The test is Fisher's discriminant with a regularized
      covariance. With the true means and the true covariance, Fisher's discriminant is
      the best test for Gaussian outputs with a common covariance.

    Raises:
      ValueError: there are fewer than 4 runs with the canary, or fewer than 4 runs
        without the canary.

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
    deviations = jnp.concatenate([fit_in - mean_in[None], fit_out - mean_out[None]])
    scale = jnp.std(deviations, axis=0)
    # A constant coordinate is not scaled.
    scale = jnp.where(scale > 0, scale, 1.0)
    # Fisher's discriminant Σ⁻¹(m₁ − m₀), in units of each coordinate's standard
    # deviation. A small multiple of I is added to Σ, which is singular for few runs.
    scaled = deviations / scale[None]
    covariance = scaled.T @ scaled / len(scaled) + 1e-3 * jnp.eye(len(scale))
    direction = jnp.linalg.solve(covariance, (mean_in - mean_out) / scale) / scale
    return Outputs(score_in @ direction, score_out @ direction)


# The minimum variance. Without a minimum, rounding errors would determine the scores of
# a constant statistic.
_MIN_VARIANCE = 1e-12
# The minimum loss. The largest float32 number below the probability 1 is 1 − 2⁻²⁴.
_MIN_LOSS = 2.0**-24


class Shadows(NamedTuple):
    """Models trained in the same way, each on a random half of the same examples.

    Attributes:
      included: whether each of s models was trained on each of n examples, bool[s, n].
        The entries are independent fair coins.
      outputs: the result of the function `run` of `train_shadows` for each model, such
        as the model's losses on all n examples, a tree of arrays f[s, ...].
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
      run: a function that trains one model, and returns outputs of the model, such as
        the model's losses on all n examples. The arguments are a mask bool[n] of the
        examples to train on, and one typed key. `train_shadows` vmaps and jits the
        function.
      num_examples: n, static, at least 1.
      num_models: s, static, at least 1. For instance, the first model is the attacked
        model, and the attacker has trained all other models.
      key: one typed key, used only for this call.
      batch_size: the number of models that are trained at the same time; None for all
        models.

    Returns:
      `Shadows`. All coins are independent. So an attack that knows the coins of the
      other models does not know those of the attacked model, as `one_run_mu_lower`
      requires.

    Raises:
      ValueError: an argument is out of range.

    Reference: Carlini et al. (2022), section V. In the paper, exactly half of the
    models are trained on each example. In `train_shadows`, the number of these models
    is random.

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
    coins_key, runs_key = jax.random.split(key)
    included = jax.random.bernoulli(coins_key, 0.5, (num_models, num_examples))
    # lax.map over batches of models bounds the memory of training.
    train = functools.partial(
        jax.lax.map, lambda arguments: run(*arguments), batch_size=min(size, num_models)
    )
    outputs = jax.jit(train)((included, jax.random.split(runs_key, num_models)))
    return Shadows(included, outputs)


def log_odds(losses: jax.Array) -> jax.Array:
    """The log-odds of the probability p that a model assigns to the true label.

    Args:
      losses: the cross-entropy −log p of each example, f[*b], at least 0.

    Returns:
      log(p / (1 − p)), f[*b], for `likelihood_ratios`. Over repeated trainings, the
      log-odds are closer to a Gaussian than the loss is. A loss below 2⁻²⁴ counts as
      2⁻²⁴, since 1 − 2⁻²⁴ is the largest probability below 1 in float32.

    Reference: Carlini et al. (2022), section V.A.

    Example:
      >>> import jax.numpy as jnp
      >>> print(log_odds(-jnp.log(jnp.array([0.5, 0.9]))).round(3))
      [0.    2.197]
    """
    losses = jnp.maximum(jnp.asarray(losses, float), _MIN_LOSS)
    # For the loss ℓ, p = e^{−ℓ} and log(p / (1 − p)) = −ℓ − log(1 − e^{−ℓ}).
    return -losses - jnp.log(-jnp.expm1(-losses))


def likelihood_ratios(statistic: jax.Array, included: jax.Array) -> jax.Array:
    """Compute a log-likelihood ratio of membership for each model and each example.

    The function attacks each model with the help of all other models. For each example,
    the function fits two Gaussians: one Gaussian to the statistics of the other models
    that were trained on the example, and one Gaussian to the statistics of the other
    models that were not trained on the example. The ratio is the density of the
    attacked model's statistic under the first Gaussian, divided by its density under
    the second Gaussian.

    Args:
      statistic: a statistic of each of s models at each of n examples, f[s, n]: the
        loss, or `log_odds` of the loss, which is closer to a Gaussian.
      included: whether the example was in the model's training data, bool[s, n].

    Returns:
      Scores f[s, n], the logarithms of the ratios. Pass scores[included] and
      scores[~included] to `auroc` or `true_positive_rate`. A score is 0 if fewer than
      two other models were trained on the example, or if fewer than two other models
      were not trained on the example. Since the scores depend on each other, no bound
      for independent scores applies. `one_run_mu_lower` and `one_run_epsilon_lower`
      allow dependent scores: pass one model's row of the scores and the same row of
      `included`. This row of `included` must be independent of all other rows of
      `included`, as in `train_shadows`.

    Raises:
      ValueError: the shapes differ.

    Reference: Carlini et al. (2022), Algorithm 1, without the augmentation of examples.
    The other models are the paper's shadow models.

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

    def log_density(selected: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Fit a Gaussian to the values of all other models in the mask `selected`.
        # Return the log-density of each model's value under this Gaussian, up to a
        # constant, and whether the mask has at least two other models.

        # A sum over all other models is the whole sum minus the model's own value.
        def sum_over_others(values: jax.Array) -> jax.Array:
            values = jnp.where(selected, values, 0.0)
            return jnp.sum(values, axis=0, keepdims=True) - values

        count = sum_over_others(jnp.ones_like(x))
        divisor = jnp.maximum(count, 1.0)
        mean = sum_over_others(x) / divisor
        variance = sum_over_others(x * x) / divisor - mean * mean
        variance = jnp.maximum(variance, _MIN_VARIANCE)
        return -((x - mean) ** 2) / (2 * variance) - jnp.log(variance) / 2, count >= 2

    # Carlini et al. (2022), Algorithm 1, https://arxiv.org/abs/2112.03570:
    # p(x | N(μ_in, σ²_in)) / p(x | N(μ_out, σ²_out)).
    inside, enough_inside = log_density(included)
    outside, enough_outside = log_density(~included)
    return jnp.where(enough_inside & enough_outside, inside - outside, 0.0)
