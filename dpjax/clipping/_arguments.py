"""Split a loss's arguments into parameters and examples, and flatten both to leaves."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.meshes import like
from dpjax._core.typing import ArrayLike, Arrays, LossOfLeaves


class Groups(NamedTuple):
    """A partition of the parameter leaves into groups that are clipped separately.

    Attributes:
      numbers: for each parameter leaf, the number of its group.
      clip_norms: for each group, the bound on the norm of its part of a gradient.
    """

    numbers: list[int]
    clip_norms: list[ArrayLike]


class Arguments(NamedTuple):
    """The positions of parameters and of examples among the arguments of a loss.

    Attributes:
      argnums: the argument or arguments that are parameters.
      batch_argnums: the arguments that hold a batch of examples.
    """

    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]

    @property
    def differentiated_argnums(self) -> tuple[int, ...]:
        """The numbers of the arguments by which the loss is differentiated."""
        return as_tuple(self.argnums)

    def examples(self, args: Sequence[object]) -> tuple[object, ...]:
        """The batch arguments of a call, which hold the examples.

        Raises:
          ValueError: the call has too few arguments.
        """
        used = max((*self.batch_argnums, *self.differentiated_argnums))
        if used >= len(args):
            raise ValueError(
                f"argnums {self.argnums} and batch_argnums {self.batch_argnums} name "
                f"argument {used}, but the call has {len(args)} positional arguments."
            )
        return tuple(args[i] for i in self.batch_argnums)

    def parameters(self, args: Sequence[object]) -> object:
        """The parameters of a call: one argument, or a tuple if argnums is a tuple."""
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return tuple(args[i] for i in self.argnums)

    def leaves(self, args: Sequence[object]) -> list[jax.Array]:
        """The leaves of a call's parameters, as JAX arrays.

        Raises:
          ValueError: a leaf is not a real floating-point array.
        """
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(self.parameters(args))]
        for x in leaves:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(
                    "the arguments in argnums must be real floating-point arrays; got "
                    f"a leaf of dtype {x.dtype} and shape {x.shape}."
                )
        return leaves

    def by_leaves(
        self, function: Callable[..., tuple[ArrayLike, object]], args: Sequence[object]
    ) -> tuple[LossOfLeaves, list[jax.Array], list[jax.ShapeDtypeStruct]]:
        """Turn a loss into a function of lists of leaves, and return the leaves too.

        Args:
          function: a function of all arguments, with one example in each batch
            argument, that returns the loss and aux.
          args: the arguments of a call. Arguments that are neither parameters nor
            batches are passed to the function unchanged.

        Returns:
          A function of the list of parameter leaves and the list of one example's
          leaves, which returns the loss and aux; the parameter leaves of the call; and
          the types of one example's leaves.
        """
        types = [
            jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(self.examples(args))
        ]
        one = [like(t, t.shape[1:], t.dtype) for t in types]
        numbers = *self.differentiated_argnums, *self.batch_argnums
        treedef = jax.tree.structure([args[i] for i in numbers])

        def loss_and_aux(leaves: Arrays, example: Arrays) -> tuple[ArrayLike, object]:
            full = list(args)
            values = treedef.unflatten([*leaves, *example])
            for i, value in zip(numbers, values, strict=True):
                full[i] = value
            return function(*full)

        return loss_and_aux, self.leaves(args), one

    def groups(self, clip_norm: object, args: Sequence[object]) -> Groups:
        """The groups of leaves that are clipped together, and the groups' clip norms.

        Args:
          clip_norm: one number, which puts all leaves into one group; or a prefix tree
            of the arguments in argnums. Each number of the tree is the clip norm of one
            group, which has the leaves below this number.
          args: the arguments of a call.

        Raises:
          ValueError: clip_norm is not a prefix of the arguments in argnums.
        """
        clip_norms, treedef = jax.tree.flatten(clip_norm)
        numbers = treedef.unflatten(range(len(clip_norms)))
        parameters = self.parameters(args)
        try:
            groups = jax.tree.broadcast(numbers, parameters)
        except ValueError as error:
            raise ValueError(
                "clip_norm must be a number or a prefix of the arguments in argnums; "
                f"got {clip_norm!r} for {jax.tree.structure(parameters)}."
            ) from error
        return Groups(jax.tree.leaves(groups), clip_norms)


def as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Convert one argument number, or a sequence of argument numbers, to a tuple."""
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
