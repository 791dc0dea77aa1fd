"""From a component's leaves to its operands, and back."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from dpjax._core.dtypes import at_least_float32
from dpjax.clipping.bookkeeping.jaxpr.alike import of_function
from dpjax.clipping.bookkeeping.jaxpr.equations import (
    aval,
    bind,
    read,
)


class Path(NamedTuple):
    """Equations of parameters alone.

    Attributes:
      leaves: the variables of the leaves.
      others: those of what enters besides, without a derivative.
      eqns: the equations, in order.
      operands: the variables of the operands.
    """

    leaves: tuple[jex.Var, ...]
    others: tuple[jex.Var, ...]
    eqns: tuple[jex.JaxprEqn, ...]
    operands: tuple[jex.Var, ...]

    @property
    def inputs(self) -> tuple[jex.Var, ...]:
        """All that enters."""
        return (*self.leaves, *self.others)

    def features(self) -> Hashable:
        """What it computes."""
        computed = of_function(self.inputs, self.eqns, self.operands)
        return len(self.leaves), computed

    def forward(
        self, others: Sequence[jax.Array], *, widen_casts: bool
    ) -> Callable[..., list[jax.Array]]:
        """The function from leaves to operands.

        Args:
          others: the values of what enters besides.
          widen_casts: whether casts are to float32 at least.
        """

        def operands(*leaves: jax.Array) -> list[jax.Array]:
            values = dict(zip(self.inputs, (*leaves, *others), strict=True))
            for eqn in self.eqns:
                args = [read(v, values) for v in eqn.invars]
                if widen_casts and eqn.primitive.name == "convert_element_type":
                    dtype = at_least_float32(aval(eqn.outvars[0]).dtype)
                    out = [args[0].astype(dtype)]
                else:
                    out = bind(eqn, args)
                values.update(zip(eqn.outvars, out, strict=True))
            return [values[v] for v in self.operands]

        return operands

    def pull_back(
        self,
        inputs: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        *,
        moves: bool,
    ) -> list[jax.Array]:
        """Gradients of the leaves from those of the operands.

        Args:
          inputs: the values of all that enters.
          cotangents: of the operands.
          moves: whether entries only move: then in float32 at least, whatever the
            casts between.
        """
        leaves, others = inputs[: len(self.leaves)], inputs[len(self.leaves) :]
        if moves:
            leaves = [x.astype(at_least_float32(x.dtype)) for x in leaves]
        outs, vjp = jax.vjp(self.forward(others, widen_casts=moves), *leaves)
        matched = [
            c.astype(o.dtype).reshape(o.shape)
            for c, o in zip(cotangents, outs, strict=True)
        ]
        return list(vjp(matched))
