"""The books of a batch: what one forward and one backward pass leave at the sites."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._meshes import explicit_mesh, leading_axis, varying_axes, zeros_like
from dpjax.bookkeeping.alike import Alike
from dpjax.bookkeeping.at_site import by_rule
from dpjax.bookkeeping.plan import Plan
from dpjax.bookkeeping.run import run
from dpjax.bookkeeping.trace import aval


class Books(NamedTuple):
    """What one forward and one backward pass leave, each with a leading axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: by site number, the other inputs of the site's equation.
      cotangents: by site number, of what was tapped.
    """

    outputs: list[Any]
    records: dict[int, tuple[Any, ...]]
    cotangents: list[Any]

    def without_aux(self) -> "Books":
        """The same with the loss as only output."""
        return self._replace(outputs=self.outputs[:1])


def keep_books(
    plan: Plan, leaves: Sequence[Any], examples: Sequence[Any], batch: int
) -> Books:
    """Run the loss on the batch and back to the taps."""
    numbers = {site: i for i, site in enumerate(plan.sites)}
    axes = tuple(sorted(varying_axes(plan.scope.closed.out_avals[0])))
    taps = [
        zeros_like(
            aval(s.tapped),
            (batch, *(loop.length for loop in s.loops), *aval(s.tapped).shape),
            leading=leading_axis(examples),
            mesh=explicit_mesh((leaves, examples)),
        )
        for s in plan.sites
    ]
    # Each device's own, or derivatives by them would be sums over devices.
    taps = jax.lax.pcast(taps, axes, to="varying")

    def forward(taps: list[Any]) -> tuple[Any, Any]:
        def one(example: Sequence[Any], taps: Sequence[Any]) -> tuple[Any, Any]:
            inputs = [*leaves, *example]
            return run(plan.scope, inputs, dict(enumerate(taps)), numbers)

        outputs, records = jax.vmap(one, axis_size=batch)(examples, taps)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(forward, taps, has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(loss))
    return Books(outputs, records, cotangents)


def settled(plan: Plan, books: Books) -> Books:
    """The books with what sites saw settled, for norms and sums alike."""
    records, cotangents = dict(books.records), list(books.cotangents)
    for i, site in enumerate(plan.sites):
        if site.rule is not None:
            records[i], cotangents[i] = by_rule(
                Alike(site), "settled", records[i], cotangents[i]
            )
    return books._replace(records=records, cotangents=cotangents)
