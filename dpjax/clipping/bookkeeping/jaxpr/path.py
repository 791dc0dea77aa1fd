"""The computation from a component's leaves to its operands, and its transpose."""

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
    """The batch-invariant computation from parameter leaves to the sites' operands.

    Attributes:
      leaves: the variables of the leaves.
      others: the variables of the other inputs, by which nothing is differentiated.
      eqns: the equations, in order.
      operands: the variables of the operands.
    """

    leaves: tuple[jex.Var, ...]
    others: tuple[jex.Var, ...]
    eqns: tuple[jex.JaxprEqn, ...]
    operands: tuple[jex.Var, ...]

    @property
    def inputs(self) -> tuple[jex.Var, ...]:
        """The variables of all inputs, the leaves first."""
        return (*self.leaves, *self.others)

    def features(self) -> Hashable:
        """A description of the computation without its variables."""
        computed = of_function(self.inputs, self.eqns, self.operands)
        return len(self.leaves), computed

    def forward(
        self, others: Sequence[jax.Array], *, widen_casts: bool
    ) -> Callable[..., list[jax.Array]]:
        """The function from leaves to operands.

        Args:
          others: the values of the other inputs.
          widen_casts: whether a cast to a narrower dtype becomes a cast to float32.
        """

        def operands(*leaves: jax.Array) -> list[jax.Array]:
            values = dict(zip(self.inputs, (*leaves, *others), strict=True))
            for eqn in self.eqns:
                args = [read(v, values) for v in eqn.invars]
                # A cast to bfloat16 would round its cotangents to bfloat16 as well.
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
        """Gradients of the leaves from the gradients of the operands.

        Args:
          inputs: the values of all inputs, the leaves first.
          cotangents: the gradients of the operands.
          moves: whether the path only moves entries. The pull-back is then computed in
            float32 at least, whatever casts are on the path.
        """
        leaves, others = inputs[: len(self.leaves)], inputs[len(self.leaves) :]
        if moves:
            leaves = [x.astype(at_least_float32(x.dtype)) for x in leaves]
        outs, vjp = jax.vjp(self.forward(others, widen_casts=moves), *leaves)
        # The vjp expects each cotangent in the dtype and shape of its output.
        matched = [
            c.astype(o.dtype).reshape(o.shape)
            for c, o in zip(cotangents, outs, strict=True)
        ]
        return list(vjp(matched))
