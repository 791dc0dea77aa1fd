"""Canaries: examples with known gradients, which an attack tries to detect.

A canary's loss is linear in the parameters, so its gradient is a fixed direction in
parameter space. If no other example moves the parameters along this direction, as with
`plant`, then one number, the release along this direction, contains everything that the
mechanism reveals about the canary.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree


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
    leaves, treedef = jax.tree.flatten(params)
    sizes = [jnp.size(x) for x in leaves]
    if num > sum(sizes):
        raise ValueError(
            f"num must be at most the {sum(sizes)} coordinates of params; got {num!r}."
        )
    # Orthonormalised Gaussian columns are uniformly distributed.
    q, _ = jnp.linalg.qr(jax.random.normal(key, (sum(sizes), num), jnp.float32))
    rows, parts, begin = (norm * q.T).astype(jnp.float32), [], 0
    for x, size in zip(leaves, sizes, strict=True):
        parts.append(rows[:, begin : begin + size].reshape(num, *jnp.shape(x)))
        begin += size
    return treedef.unflatten(parts)


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
        flat = (x.reshape(len(x), -1) for x in (y, u))
        y, u = flat
        return jnp.matmul(y, u.T, precision="highest")

    return jax.tree.reduce(jnp.add, jax.tree.map(part, directions, released))
