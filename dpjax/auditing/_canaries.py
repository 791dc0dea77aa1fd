"""Canaries: examples whose gradient is known, so that it is known what to look for.

A canary's loss is linear in the parameters, and its gradient is a direction of them
that nothing else moves along. Then an attack that reads one number sees all that the
mechanism gives away of the canary.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree


class Planted(NamedTuple, Generic[Params]):
    """Parameters, and beside them a coordinate for each canary.

    Attributes:
      params: those of the model.
      slots: f[k], which no example moves but the canary of that number.
    """

    params: Params
    slots: jax.Array


class Marked(NamedTuple):
    """Examples, some of which are canaries.

    Attributes:
      example: what the loss takes; where a canary is, any example that it is finite at.
      canary: which canary it is, i32[*b], and −1 for none.
    """

    example: Any
    canary: ArrayLike


def plant(loss_fn: LossFn, norm: ArrayLike) -> Callable[..., jax.Array]:
    """Give a loss canaries in coordinates of their own, so that no model learns them.

    What comes after the loss is audited as it is: clipping, masks, the sum, noise.

    Args:
      loss_fn: of parameters and ONE example to a scalar.
      norm: the length of a canary's gradient, f[]: at least the clip norm, so that it
        is clipped to just that.

    Returns:
      A loss of `Planted(params, slots)` and one `Marked(example, canary)`. A canary's
      gradient is norm along its slot and zero elsewhere; that of any other example is
      its own, and zero along the slots. So slots without a canary show the noise alone.

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
        slot = planted.slots[jnp.maximum(canary, 0)]
        return jnp.where(canary >= 0, norm * slot, own).astype(own.dtype)

    return loss


def plant_directions(loss_fn: LossFn, directions: Tree) -> Callable[..., jax.Array]:
    """Give a loss canaries along directions of the parameters that it has.

    They audit the noise of these very coordinates, and they move the model.

    Args:
      loss_fn: of parameters and ONE example to a scalar.
      directions: the canaries' gradients, a tree as the parameters with a leading axis
        k; of a norm that is at least the clip norm. `random_directions` makes some.

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
        row = jnp.maximum(canary, 0)
        parts = jax.tree.map(lambda u, p: jnp.vdot(u[row], p), directions, params)
        linear = jax.tree.reduce(jnp.add, parts)
        return jnp.where(canary >= 0, linear, own).astype(own.dtype)

    return loss


def random_directions(params: Tree, num: int, *, norm: ArrayLike, key: Key) -> Tree:
    """Orthogonal directions of the parameters, uniformly at random.

    Args:
      params: the parameters, d numbers in all.
      num: k, how many, static, from 1 to d. They take k d numbers.
      norm: their length, f[].
      key: one typed key, for this alone.

    Returns:
      A tree as params, with a leading axis k, in float32.

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
    # Of Gaussian columns, what Gram and Schmidt make is uniform.
    q, _ = jnp.linalg.qr(jax.random.normal(key, (sum(sizes), num), jnp.float32))
    rows, parts, begin = (norm * q.T).astype(jnp.float32), [], 0
    for x, size in zip(leaves, sizes, strict=True):
        parts.append(rows[:, begin : begin + size].reshape(num, *jnp.shape(x)))
        begin += size
    return treedef.unflatten(parts)


def project_on(directions: Tree, released: Tree) -> jax.Array:
    """How far each step's release goes along each direction, ⟨u_i, y_t⟩.

    Args:
      directions: a tree of leaves f[k, ...].
      released: what T steps released, a tree of leaves f[T, ...].

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
