"""Canaries: examples with known gradients, which an attack tries to detect.

A canary's loss is linear in the parameters, so its gradient is a fixed direction in
parameter space. If no other example moves the parameters along this direction, as with
`plant`, then one number, the release along this direction, contains everything that the
mechanism reveals about the canary.

A canary's score is that of a matched filter. Let y be white noise z of standard
deviation s, or h + z with a known signal h. Then ⟨h, y⟩ / ‖h‖ is a sufficient statistic
for whether y contains h. Its distribution is N(0, s²) without the signal and N(‖h‖, s²)
with the signal, as for a Gaussian mechanism of μ = ‖h‖ / s. Noise that a strategy or a
tree correlates is whitened first, by a linear map that depends on the mechanism alone.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
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
      slots: f[k]; slot i has a gradient at canary i alone.
    """

    params: Params
    slots: jax.Array


class Marked(NamedTuple):
    """A batch of examples, some of which are marked as canaries.

    Attributes:
      example: the examples that the loss takes. For a canary this may be any example at
        which the loss is finite.
      canary: the number of the canary, i32[*b]; −1 for an ordinary example.
    """

    example: Any
    canary: ArrayLike


def plant(loss_fn: LossFn, norm: ArrayLike) -> Callable[..., jax.Array]:
    """Add canaries to a loss, in extra coordinates that the model does not use.

    Every stage after the loss is audited unchanged: clipping, masks, the sum, noise.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a scalar.
      norm: the L2 norm of a canary's gradient, f[]: at least the clip norm, so that the
        gradient is clipped to the clip norm exactly.

    Returns:
      A loss of `Planted(params, slots)` and one `Marked(example, canary)`. A canary's
      gradient is `norm` along its slot and zero in all other coordinates. The gradient
      of any other example is unchanged, and zero along the slots. The released values
      along the slots of canaries that took no part are therefore noise alone.

    Raises:
      ValueError: norm is not positive.

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
        own = loss_fn(planted.params, marked.example)
        canary = jnp.asarray(marked.canary)
        # jnp.where evaluates both branches: −1 must not index from the end.
        slot = planted.slots[jnp.maximum(canary, 0)]
        return jnp.where(canary >= 0, norm * slot, own).astype(own.dtype)

    return loss


def plant_directions(loss_fn: LossFn, directions: Tree) -> Callable[..., jax.Array]:
    """Add canaries to a loss, along directions of its own parameters.

    Such canaries audit the noise of the model's own coordinates, and they change the
    model.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a scalar.
      directions: the canaries' gradients, a tree like the parameters with a leading
        axis k, whose norms are at least the clip norm. `random_directions` makes some.

    Returns:
      A loss of the parameters and one `Marked(example, canary)`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> key = jax.random.key(0)
      >>> directions = random_directions(jnp.zeros(5), 2, norm=3.0, key=key)
      >>> loss = plant_directions(lambda w, x: jnp.sum(w * x), directions)
      >>> found = jax.grad(loss)(jnp.zeros(5), Marked(jnp.ones(5), 1))
      >>> print(bool((found == directions[1]).all()))
      True
    """

    def loss(params: Tree, marked: Marked) -> jax.Array:
        own = loss_fn(params, marked.example)
        canary = jnp.asarray(marked.canary)
        # As in `plant`, an ordinary example reads row 0 and discards it.
        row = jnp.maximum(canary, 0)
        parts = jax.tree.map(lambda u, p: jnp.vdot(u[row], p), directions, params)
        linear = jax.tree.reduce(jnp.add, parts)
        return jnp.where(canary >= 0, linear, own).astype(own.dtype)

    return loss


def random_directions(params: Tree, num: int, *, norm: ArrayLike, key: Key) -> Tree:
    """Orthogonal directions in parameter space, uniformly at random.

    Args:
      params: the parameters, d numbers in all.
      num: k, the number of directions, static, from 1 to d. The result has k d numbers.
      norm: the L2 norm of each direction, f[].
      key: one typed key, used for nothing else.

    Returns:
      A tree like params, with a leading axis k, in float32.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
      >>> found = random_directions(params, 7, norm=2.0, key=jax.random.key(0))
      >>> print(found["a"].shape, found["b"].shape)
      (7, 2, 3) (7, 4)
    """
    validate.positive("norm", norm)
    num = validate.static_int("num", num, minimum=1)
    key = stream(validate.typed_key("key", key), "canary directions")
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), params)
    flat, unravel = ravel_pytree(zeros)
    if num > flat.size:
        raise ValueError(
            f"num must be at most the {flat.size} coordinates of params; got {num!r}."
        )
    # Orthonormalised Gaussian columns are uniformly distributed.
    q, _ = jnp.linalg.qr(jax.random.normal(key, (flat.size, num), jnp.float32))
    return jax.vmap(unravel)(jnp.asarray(norm * q.T, jnp.float32))


def project_on(directions: Tree, released: Tree) -> jax.Array:
    """The inner products ⟨u_i, y_t⟩ of each direction with each step's release.

    Args:
      directions: u, a tree of leaves f[k, ...].
      released: y, the released values of T steps, a tree of leaves f[T, ...].

    Returns:
      f[T, k].

    Example:
      >>> import jax.numpy as jnp
      >>> print(project_on(jnp.eye(3)[:2], jnp.arange(6.0).reshape(2, 3)))
      [[0. 1.]
       [3. 4.]]
    """

    def part(u: jax.Array, y: jax.Array) -> jax.Array:
        y, u = (x.reshape(len(x), -1) for x in (y, u))
        return jnp.matmul(y, u.T, precision="highest")

    return jax.tree.reduce(jnp.add, jax.tree.map(part, directions, released))


Whiten: TypeAlias = Callable[[jax.Array], jax.Array]
"""A linear map from the releases of T steps, f[T, k], to values with white noise."""


def released(transformation: optax.GradientTransformation, sums: Tree) -> Tree:
    """The values that a mechanism releases for given sums, step by step.

    Args:
      transformation: the mechanism, as made by `dpjax.add_gaussian_noise` or
        `dpjax.tree_momentum`.
      sums: the incoming sums of T steps, a tree of leaves f[T, ...].

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
        def step(state: optax.OptState, now: Tree) -> tuple[optax.OptState, Tree]:
            # `start` stands for the parameters, which these mechanisms do not read.
            updates, state = transformation.update(now, state, start)
            return state, updates

        start = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)
        return jax.lax.scan(step, transformation.init(start), sums)[1]

    return scan(sums)


def white_by_strategy(strategy: Strategy) -> Whiten:
    """The linear map y ↦ C y, which whitens the noise C⁻¹z of `dpjax.correlated_noise`.

    Args:
      strategy: C, as made by `dpjax.strategies`.

    Returns:
      A linear map of f[T, k].

    Raises:
      ValueError: the map is called with a number T of steps that the strategy does not
        support.

    Reference: Denisov et al. (2022): releasing x + C⁻¹z is equivalent to releasing
    C x + z.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpjax import strategies
      >>> white = white_by_strategy(strategies.geometric(0.5))
      >>> print(white(jnp.array([[1.0], [-0.5], [0.0]]))[:, 0])
      [1. 0. 0.]
    """

    def white(y: jax.Array) -> jax.Array:
        matrix = check_strategy(strategy, len(y)).matrix(len(y)).astype(y.dtype)
        # Denisov et al. (2022), https://arxiv.org/abs/2202.08312: C (x + C⁻¹z) is
        # C x + z.
        return jnp.tensordot(matrix, y, 1, precision="highest")

    return white


def white_by_tree(decay: ArrayLike) -> Whiten:
    """The linear map that whitens the noise of `dpjax.tree_momentum`.

    Args:
      decay: β, f[], in [0, 1).

    Returns:
      A linear map of f[T, k]: from the momentum of each step to the tree node that this
      step completed, times 1 − β. Each step completes one node, and the noises of nodes
      are independent.

    Raises:
      ValueError: decay is outside [0, 1).

    Reference: Tran and Cutkosky (2022), Algorithm 1.

    Example:
      >>> import jax.numpy as jnp
      >>> momentum = jnp.array([[0.5], [0.75], [0.875]])
      >>> print(white_by_tree(0.5)(momentum)[:, 0])  # nodes [1, 1], [1, 2], [3, 3]
      [0.5  0.75 0.5 ]
    """
    validate.decay("decay", decay)

    def white(y: jax.Array) -> jax.Array:
        step = np.arange(1, len(y) + 1)
        # Clearing the lowest bit 2^j of t gives t − 2^j.
        before = step & (step - 1)
        # Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328: the
        # sum of step t is the sum of the new node that ends at t, plus the sum of step
        # t − 2^j times β to the node's length 2^j, where j is the lowest set bit of t.
        fade = jnp.power(jnp.asarray(decay, y.dtype), step - before)
        earlier = jnp.concatenate([jnp.zeros_like(y[:1]), y])[before]
        return y - fade.reshape(-1, *(1,) * (y.ndim - 1)) * earlier

    return white


def matched_filter(
    seen: jax.Array, expected: jax.Array, whiten: Whiten | None = None
) -> jax.Array:
    """Scores of canaries from all releases of a Gaussian mechanism.

    Args:
      seen: the released values along each canary's direction, f[T, k]: the slots of
        `plant`, or the result of `project_on`.
      expected: the noiseless contribution of a participating canary to seen, f[T, k] or
        f[T, 1]: `released` for the canary's sums and a mechanism with zero noise.
      whiten: a linear map that whitens the mechanism's noise; None if the noise is
        white already.

    Returns:
      Scores f[k]. For a mechanism with white noise of standard deviation s that is
      μ-GDP at the canary's steps, a score is N(0, s²) where the canary did not take
      part, and N(μ s, s²) where the canary did. `gaussian_mu_lower` turns scores into a
      bound.

    Raises:
      ValueError: the shapes do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, dpjax
      >>> sums = jnp.concatenate([jnp.ones((4, 5000)), jnp.zeros((4, 5000))], axis=1)
      >>> tx = dpjax.add_gaussian_noise(2.0, key=jax.random.key(0))
      >>> scores = matched_filter(released(tx, sums), jnp.ones((4, 1)))
      >>> mean, stddev = scores[:5000].mean(), scores[:5000].std()
      >>> print(f"{mean / stddev:.2f} for μ = √4 / 2")
      1.00 for μ = √4 / 2
    """
    if jnp.ndim(seen) != 2 or jnp.shape(expected) not in (
        jnp.shape(seen),
        (jnp.shape(seen)[0], 1),
    ):
        raise ValueError(
            "expected must be f[T, k] as seen, or f[T, 1]; got shapes "
            f"{jnp.shape(expected)} and {jnp.shape(seen)}."
        )
    whiten = whiten or (lambda y: y)
    signal, noisy = whiten(jnp.asarray(expected)), whiten(jnp.asarray(seen))
    length = jnp.sqrt(jnp.sum(jnp.square(signal), axis=0))
    product = jnp.sum(signal * noisy, axis=0)
    # A canary without any signal has the score 0, and not 0 / 0.
    return jnp.where(length > 0, product / jnp.where(length > 0, length, 1.0), 0.0)


def mixture_scores(
    seen: jax.Array, cases: jax.Array, probabilities: ArrayLike, stddev: ArrayLike
) -> jax.Array:
    """Scores of canaries that took part in one of several ways, chosen at random.

    Args:
      seen: the released values along each canary's direction, f[T, k], in white noise.
      cases: the possible contributions of a canary to seen, f[c, T]: a row for each way
        of taking part.
      probabilities: the probability of each way, f[c].
      stddev: s, the standard deviation of the noise, f[], positive.

    Returns:
      f[k]: the logarithm of the likelihood ratio of the seen values, with the canary
      against without the canary. No attack on these values does better. Scores of steps
      in which the canary takes part independently add up, as under Poisson sampling.

    Raises:
      ValueError: the shapes do not fit, or stddev is not positive.

    Reference: Neyman and Pearson (1933), https://doi.org/10.1098/rsta.1933.0009.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> noise = 2.0 * jax.random.normal(jax.random.key(0), (3, 10_000))
      >>> bins = jnp.eye(3)  # one of three steps, each with probability 1/3
      >>> place = jax.random.randint(jax.random.key(1), (5000,), 0, 3)
      >>> seen = noise.at[place, jnp.arange(5000)].add(1.0)
      >>> scores = mixture_scores(seen, bins, jnp.full(3, 1 / 3), 2.0)
      >>> ratios = jnp.exp(scores)  # E exp(score) is 1 without the canary
      >>> print(f"{ratios[:5000].mean():.2f} with it, {ratios[5000:].mean():.2f} not")
      1.09 with it, 1.00 not
    """
    validate.positive("stddev", stddev)
    fits = jnp.ndim(seen) == 2 and jnp.ndim(cases) == 2
    if not fits or (
        jnp.shape(cases) != (*jnp.shape(probabilities), jnp.shape(seen)[0])
    ):
        raise ValueError(
            "cases must be f[c, T] for seen f[T, k] and probabilities f[c]; got shapes "
            f"{jnp.shape(cases)}, {jnp.shape(seen)} and {jnp.shape(probabilities)}."
        )
    cases, weights = jnp.asarray(cases), jnp.asarray(probabilities)
    # log Σ_c p_c dN(h_c, s² I) / dN(0, s² I) at y: Neyman and Pearson (1933), by
    # whom a threshold on this ratio is the best test at its false-positive rate.
    products = jnp.matmul(cases, seen, precision="highest")
    squares = jnp.sum(jnp.square(cases), axis=1, keepdims=True)
    exponents = (products - squares / 2) / jnp.square(stddev)
    return logsumexp(exponents, axis=0, b=weights[:, None])
