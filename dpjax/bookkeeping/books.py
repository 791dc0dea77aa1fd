"""The books of a batch: what one forward and one backward pass leave at the sites."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpjax._meshes import explicit_mesh, leading_axis, varying_axes, zeros_like
from dpjax.bookkeeping import at_site
from dpjax.bookkeeping.alike import Alike
from dpjax.bookkeeping.components import Component
from dpjax.bookkeeping.plan import Plan
from dpjax.bookkeeping.run import Ran, run
from dpjax.bookkeeping.sites import RuledSite
from dpjax.bookkeeping.trace import aval


class Books(NamedTuple):
    """What one forward and one backward pass leave, each with a leading axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: by site number, the other inputs of the site's equation.
      cotangents: by site number, of what was tapped.
    """

    outputs: list[jax.Array]
    records: dict[int, tuple[jax.Array, ...]]
    cotangents: list[jax.Array]

    def seen_by(self, component: Component) -> "Seen":
        """What a component's operands left."""
        return Seen(
            [self.records.get(i, ()) for i in component.operands],
            [self.cotangents[i] for i in component.operands],
        )

    def without_aux(self) -> "Books":
        """The same with the loss as only output."""
        return self._replace(outputs=self.outputs[:1])


class Seen(NamedTuple):
    """The part of the books that is of some sites, in their order."""

    records: list[tuple[jax.Array, ...]]
    cotangents: list[jax.Array]


def keep_books(
    plan: Plan,
    leaves: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    batch: int,
) -> Books:
    """Run the loss on the batch and back to the taps."""
    numbers = {site: i for i, site in enumerate(plan.sites)}
    axes = tuple(sorted(varying_axes(plan.scope.closed.out_avals[0])))
    leading, mesh = leading_axis(examples), explicit_mesh((leaves, examples))

    @functools.cache  # many taps are of one type
    def zeros(kind: jax.core.ShapedArray, lengths: tuple[int, ...]) -> jax.Array:
        shape = (batch, *lengths, *kind.shape)
        return zeros_like(kind, shape, leading=leading, mesh=mesh)

    taps = [
        zeros(aval(site.tapped), tuple(loop.length for loop in site.loops))
        for site in plan.sites
    ]
    # Each device's own, or derivatives by them would be sums over devices.
    taps = jax.lax.pcast(taps, axes, to="varying")

    def forward(taps: Sequence[jax.Array]) -> tuple[jax.Array, Ran]:
        def one(example: Sequence[jax.Array], taps: Sequence[jax.Array]) -> Ran:
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
        if isinstance(site, RuledSite):
            seen = at_site.settled(Alike(site), records[i], cotangents[i])
            records[i], cotangents[i] = seen
    return books._replace(records=records, cotangents=cotangents)
