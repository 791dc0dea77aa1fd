"""Compute clipped sums from the recorded activations and cotangents of a batch.

`clipped_sum` computes norms and sums from one forward and one backward pass. The ghost
engine runs the loss forward and backward twice. The ghost engine calls `squares_alone`
for the norms after the first run, and `sums_alone` for the sums after the second run.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32, narrowest_float, widen
from dpjax._core.platforms import on_platform
from dpjax._core.rounding import margin, square_sum, staged_sum, upper_sum
from dpjax._core.typing import ArrayLike, Arrays
from dpjax.clipping import _clip
from dpjax.clipping._bookkeeping import factors as fac
from dpjax.clipping._bookkeeping.analysis.components import Component
from dpjax.clipping._bookkeeping.analysis.plan import Plan
from dpjax.clipping._bookkeeping.analysis.sites import RuledSite
from dpjax.clipping._bookkeeping.equations import Comparable
from dpjax.clipping._bookkeeping.evaluate import at_component as at
from dpjax.clipping._bookkeeping.evaluate.reach import PullBackBounds, bound_pull_back
from dpjax.clipping._bookkeeping.evaluate.run import Records, record_sites
from dpjax.clipping._clip import Inputs, PerExample, Summed


class Part(NamedTuple):
    """A component of a loss, with the arrays that one pass recorded for it.

    Attributes:
      component: parameter leaves, and the sites, which are the equations that combine
        values computed from these leaves with the example.
      recorded: the inputs of the sites' equations, the cotangents at the sites, and the
        inputs of the computation from the leaves to the sites.
      rows: whether the component's norms come from rows of activations and cotangents.
        If not, the norms come from per-example gradients or from checkpointed blocks.
      pull_back_bounds: bounds for the pull-back from the sites to the leaves. With
        bounds, the sum is pulled back once for the batch. The value is None in four
        cases: the engine has one pass; the norms come from rows; a site has more than
        `MAX_ROWS` rows; `evaluate.reach` has no bound for the pull-back.
    """

    component: Component
    recorded: Records
    rows: bool
    pull_back_bounds: PullBackBounds | None


def clipped_sum(
    plan: Plan,
    clip_norms: Sequence[ArrayLike],
    inputs: Inputs,
    *,
    by_platform: bool,
    x64: bool | None = None,
) -> Summed:
    """The sum of clipped gradients, and per-example results, from one pass.

    The pass runs the loss forward and backward once.

    Args:
      plan: the analysis of the loss.
      clip_norms: for each group of leaves that are clipped together, the bound on the
        norm.
      inputs: the parameters, the examples and the mask of the batch.
      by_platform: whether code that is lowered for a TPU computes norms and sums from
        per-example gradients alone. Products on a TPU are outside the rounding model of
        `dpjax._core.rounding`.
      x64: None for sums in float32. For sums in float64 (`float64_sums`), a boolean:
        whether the caller's own `jax_enable_x64` is on.
    """
    # If no component uses rows, the branch for TPUs would be the same code.
    by_platform = by_platform and any(form.gram for form in plan.forms)
    wide = x64 is not None

    def sum_on_platform(
        recorded: Records, clip_norms: Sequence[ArrayLike], mask: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        def in_one_pass(
            recorded: Records, mask: jax.Array, *, rows: bool = True
        ) -> tuple[list[jax.Array], jax.Array]:
            parts = _collect_parts(plan, recorded, rows=rows)
            squares, gradients = _bound_squares(parts, clip_norms, mask.shape)
            finite, scales, norm = _clip.clip_scales(squares, clip_norms, mask)
            sums = _sums(parts, gradients, recorded.inputs, scales, finite, wide=wide)
            return sums, norm

        if not by_platform:
            return in_one_pass(recorded, mask)
        # The platform is chosen at lowering: one trace may serve several platforms.
        from_gradients = partial(in_one_pass, rows=False)
        return on_platform("tpu", from_gradients, in_one_pass, recorded, mask)

    with _clip.loss_scope(x64):
        (loss, *aux), recorded = record_sites(plan, inputs.leaves, inputs.examples)
    sum_batch = inputs.let_compiler_shard(sum_on_platform)
    grads, norm = sum_batch(recorded, clip_norms, inputs.mask)
    return grads, PerExample(loss, norm, aux)


def squares_alone(
    plan: Plan,
    batch: tuple[int, ...],
    recorded: Records,
    clip_norms: Sequence[ArrayLike],
) -> list[jax.Array]:
    """Upper bounds of squared gradient norms, in the first of two passes over a batch.

    The second pass computes the sums (`sums_alone`).

    Args:
      plan: the analysis of the loss.
      batch: the shape of the batch, (b,).
      recorded: the inputs and cotangents that the first pass recorded at all sites,
        the equations that combine parameters with the example.
      clip_norms: for each group of leaves that are clipped together, the bound C.

    Returns:
      For each group, an upper bound f[b] of ‖gradient‖² / C².
    """
    parts = _collect_parts(plan, recorded, two_passes=True)
    return _bound_squares(parts, clip_norms, batch)[0]


def sums_alone(
    plan: Plan, recorded: Records, scales: Arrays, finite: jax.Array
) -> list[jax.Array]:
    """The sum of scaled gradients for each leaf, in the second of two passes.

    Args:
      plan: the analysis of the loss.
      recorded: the inputs and cotangents that the second pass recorded at all sites,
        the equations that combine parameters with the example.
      scales: for each group of leaves that are clipped together, the clipping factors
        f[b].
      finite: whether each example's gradient is finite, bool[b]. An example whose
        gradient is not finite contributes zero.
    """
    parts = _collect_parts(plan, recorded, two_passes=True)
    leaves = recorded.inputs[: plan.num_leaves]
    return _sums(parts, [None] * len(parts), leaves, scales, finite)


def _collect_parts(
    plan: Plan, recorded: Records, *, rows: bool = True, two_passes: bool = False
) -> list[Part]:
    """Collect each component's recorded arrays, and choose the source of its norms.

    A component is a set of parameter leaves together with its sites. At a site, an
    equation combines the example with a value that is computed from these leaves alone.
    The result has the arrays that `at_component.canonicalize` makes from the recorded
    arrays.

    Args:
      plan: the analysis of the loss.
      recorded: the recorded inputs and cotangents of all sites.
      rows: whether norms come from rows of activations and cotangents where the plan
        chose rows. If False, all norms come from per-example gradients.
      two_passes: whether norms and sums are computed in two separate passes, each of
        which calls this function. Only then can a part have `pull_back_bounds`.
    """
    parts = []
    for component, inputs, form in zip(
        plan.components, plan.inputs(recorded.inputs), plan.forms, strict=True
    ):
        canonical = [
            at.canonicalize(plan.sites[i], recorded.records[i], recorded.cotangents[i])
            for i in component.operands
        ]
        records, cotangents = zip(*canonical, strict=True)
        # With more than MAX_ROWS rows, the bound on the rounding errors of their sum
        # would increase the norms too much.
        few_rows = all(site.size.rows <= fac.MAX_ROWS for site in component.ruled_sites)
        gram = rows and form.gram
        bounded = two_passes and few_rows and not gram
        bound = bound_pull_back(component, inputs) if bounded else None
        component_records = Records(records, cotangents, inputs)
        parts.append(Part(component, component_records, gram, bound))
    return parts


def _bound_squares(
    parts: Sequence[Part], clip_norms: Sequence[ArrayLike], batch: tuple[int, ...]
) -> tuple[list[jax.Array], list[list[jax.Array] | None]]:
    """Upper bounds of squared norms, and the per-example gradients, if they are formed.

    Returns:
      For each group of leaves that are clipped together, an upper bound f[b] of
      ‖gradient / clip norm‖². For each component, the per-example gradients of its
      leaves, or None if these gradients are not formed.
    """
    # With these zeros, a group without a component has norm zero.
    squares = [[jnp.zeros(batch, jnp.float32)] for _ in clip_norms]
    gradients: list[list[jax.Array] | None] = []
    for part in parts:
        component, recorded, formed = part.component, part.recorded, None
        bounds = [clip_norms[group] for group in component.distinct_groups]
        if component.is_in_blocks:
            # The cotangents of a checkpointed block's taps are its squared norms, with
            # an axis for each scan around the block. These squares are added here.
            sums = (staged_sum(x, kept=1) for x in recorded.cotangents)
            by_group = [[x * (1 + margin(terms + 2, x.dtype)) for x, terms in sums]]
        elif part.rows:
            by_group = [at.row_squares(Comparable(component), recorded, *bounds)]
        else:
            formed, totals = at.form_gradients(Comparable(component), recorded, bounds)
            pairs = zip(totals, bounds, strict=True)
            by_group = [[_enlarge(part, square, bound)] for square, bound in pairs]
        gradients.append(formed)
        for group, component_squares in zip(
            component.distinct_groups, by_group, strict=True
        ):
            squares[group] += component_squares
    return [upper_sum(group_squares) for group_squares in squares], gradients


def _enlarge(part: Part, square: jax.Array, clip_norm: ArrayLike) -> jax.Array:
    """Enlarge squared norms f[b] to cover the rounding errors of a component's sum.

    The norms are those of per-example gradients, in units of `clip_norm`. If
    `Part.pull_back_bounds` is not None, the sum is not made of these gradients: sums
    over the batch at the sites are pulled back to the leaves. These sums and the
    pull-back have rounding errors of their own. If `Part.pull_back_bounds` is None, the
    norms are returned unchanged.
    """
    if part.pull_back_bounds is None:
        return square
    (records, cotangents, _), bounds = part.recorded, part.pull_back_bounds.norms
    terms = []
    for site, others, cotangent, norm_bound in zip(
        part.component.sites, records, cotangents, bounds, strict=True
    ):
        if isinstance(site, RuledSite):
            factors = at.factors_of(Comparable(site), others, cotangent)
            # The limit on activations, in `size`, must hold after the pull-back, too.
            large = jnp.maximum(norm_bound, 1.0)
            size = norm_bound / large * fac.size(factors, clip_norm / large)
            rows = factors.rows
        else:
            # If the tap is on the operand, the gradient is the tap's cotangent, which
            # is a sum of one term.
            square_of_one = square_sum(widen(cotangent), 1, clip_norm)
            size, rows = norm_bound * jnp.sqrt(square_of_one), 1
            # An underflow of a scaled cotangent must not be large after the pull-back.
            scale = 2.0**94 / (cotangent.size / len(cotangent) + 1) ** 0.5
            limit = jnp.asarray(clip_norm, jnp.float32) * scale
            size = jnp.where(norm_bound > limit, jnp.inf, size)
        terms.append(fac.Terms(size, rows + part.pull_back_bounds.terms))
    # The bound on rounding errors assumes the least precise dtype of all arrays.
    arrays = [*cotangents, *(x for xs in records for x in xs)]
    dtype = narrowest_float([part.pull_back_bounds.dtype, *(x.dtype for x in arrays)])
    return jnp.square(fac.upper_norm(jnp.sqrt(square), terms, dtype))


def _sums(
    parts: Sequence[Part],
    gradients: Sequence[list[jax.Array] | None],
    leaves: Arrays,
    scales: Arrays,
    finite: jax.Array,
    *,
    wide: bool = False,
) -> list[jax.Array]:
    """The sum of the examples' scaled gradients for each leaf.

    `finite` says whether each example's gradient is finite, bool[b]. An example whose
    gradient is not finite contributes zero. `wide` says whether the sums are in
    float64. The sum for a component's leaves has one of three sources:

    - the component's per-example gradients in `gradients`, unless the entry is None;
    - sums over the batch at the sites, which are pulled back to the leaves, if the
      norms come from rows, or if `Part.pull_back_bounds` is not None;
    - otherwise per-example gradients, which are formed again.
    """
    total = {}
    for part, formed in zip(parts, gradients, strict=True):
        component = part.component
        # The gradients from which the norms were computed are summed. So the norms need
        # not include a bound on the rounding errors of products over the batch.
        if formed is not None:
            sums = [
                _clip.sum_in_memory(x, scales[group], finite, wide=wide)
                for x, group in zip(formed, component.groups, strict=True)
            ]
        else:
            sum_scaled = at.sums_of_gradients
            if part.rows or part.pull_back_bounds is not None:
                sum_scaled = partial(at.sums_by_sites, wide=wide)
            group_scales = [scales[group] for group in component.distinct_groups]
            shared = Comparable(component)
            sums = sum_scaled(shared, part.recorded, group_scales, finite)
        total.update(zip(component.leaves, sums, strict=True))
    dtypes = [jnp.float64 if wide else at_least_float32(x.dtype) for x in leaves]
    # A leaf that no component contains does not enter the loss. Its sum is zero.
    return [
        total[i].astype(dtype) if i in total else jnp.zeros(x.shape, dtype)
        for i, (x, dtype) in enumerate(zip(leaves, dtypes, strict=True))
    ]
