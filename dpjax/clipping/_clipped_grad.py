"""Transform a loss of one example into the sum of clipped per-example gradients.

`explain` shows how the book-keeping engine treats each parameter of a loss.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, NamedTuple, overload

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.dtypes import cast_like, widen
from dpjax._core.float64 import default_float
from dpjax._core.meshes import add_varying_axes, are_concrete, like, varying_axes
from dpjax._core.platforms import needs_one_order, on_platform
from dpjax._core.typing import Arithmetic, ArrayLike, Arrays, Engine, Params, Tree
from dpjax.clipping import _bookkeeping as bookkeeping
from dpjax.clipping import _clip
from dpjax.clipping._bookkeeping.equations import evaluate
from dpjax.clipping._clip import Inputs, PerExample, Summed
from dpjax.clipping._microbatches import in_microbatches

ENGINES = ("auto", "bookkeeping", "ghost", "vmap")


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad(Generic[Params]):
    """The function that `clipped_grad` makes: it sums clipped gradients over a batch.

    The fields are the arguments of `clipped_grad`.
    """

    loss_fn: Callable[..., Any]
    clip_norm: Any
    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]
    has_aux: bool
    engine: Engine
    microbatch_size: int | None
    arithmetic: Arithmetic

    def __repr__(self) -> str:
        """The call of `clipped_grad` that makes this function, as text."""
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "loss_fn"
        ]
        return f"clipped_grad({name}, {', '.join(arguments)})"

    def sensitivity(self, adjacency: Adjacency) -> ArrayLike:
        """The L2 sensitivity of the sum: the clip norm C, or 2C under REPLACE.

        With several clip norms, C is the square root of the sum of their squares.
        """
        factor = validate.adjacency(adjacency).sensitivity_factor
        clip_norms = jax.tree.leaves(self.clip_norm)
        if len(clip_norms) == 1:
            return factor * clip_norms[0]
        if all(isinstance(c, int | float) for c in clip_norms):
            # The factor exceeds 1 by two units in the last place. math.hypot and the
            # products can round down by less.
            return factor * math.hypot(*clip_norms) * (1 + 2.0**-51)
        bounds = widen([jnp.asarray(c) for c in clip_norms])
        largest = functools.reduce(jnp.maximum, bounds)
        # Division by the largest bound prevents overflow and underflow of the sum of
        # squares.
        squares = sum(jnp.square(c / largest) for c in bounds)
        # The relative rounding error of k quotients, their squares and the sum is less
        # than 2⁻²² k / 2.
        slack = 1 + 2.0**-22 * (len(clip_norms) + 1)
        return factor * slack * largest * jnp.sqrt(squares)

    def __call__(
        self, *args: Any, mask: jax.Array | None = None
    ) -> tuple[Params, PerExample]:
        """Return the sum of clipped gradients, and the `PerExample` of the batch."""
        batched = self._examples(args)
        size = _clip.batch_size(f"the batch arguments {self.batch_argnums}", batched)
        mask = _clip.check_mask(mask, (size,))
        args = self._add_varying_axes(args)
        inputs = Inputs(self._leaves(args), batched, mask)
        closed, aux_tree = self._trace(args)
        groups = self._groups(args)
        if self.arithmetic == "discrete":
            grads, per_example = self._sum_in_float64(closed, groups, inputs)
        else:
            clip_norms = jax.tree.leaves(self.clip_norm)
            sum_of = partial(self._engine_for(closed, groups).sum, clip_norms)
            grads, per_example = in_microbatches(sum_of, self.microbatch_size, inputs)
        _warn_if_none_contributes(per_example.norm, mask)
        treedef = jax.tree.structure(self.parameters(args))
        aux = aux_tree.unflatten(per_example.aux)
        return treedef.unflatten(grads), per_example._replace(aux=aux)

    def _sum_in_float64(
        self, closed: jex.ClosedJaxpr, groups: Sequence[int], inputs: Inputs
    ) -> Summed:
        """Sum the clipped gradients in float64, and collect the per-example results.

        The method is for arithmetic="discrete". Each gradient is clipped to C / (1 +
        h), where C is the clip norm, and h is such that one example changes the
        rounding error of the sum by at most h C / (1 + h). So the computed floats of
        the sum have sensitivity C.

        Args:
          closed: the loss's jaxpr.
          groups: for each parameter leaf, the number of the leaf's clipping group. The
            leaves of a clipping group are clipped together.
          inputs: the parameters, the examples and the mask of the batch.
        """
        x64 = bool(default_float() == jnp.float64)
        with jax.enable_x64(True):
            engine = self._engine_for(closed, groups)
            h = bookkeeping.relative_error(engine.plan, inputs.mask.size)
            clip_norms = [c * (1 / (1 + h)) for c in jax.tree.leaves(self.clip_norm)]
            sum_of = partial(engine.sum, clip_norms, x64=x64)
            sums, per_example = in_microbatches(
                sum_of, self.microbatch_size, inputs, wide=True
            )
            # The bound h assumes that equal blocks of examples have equal sums. The
            # sums are checked, and not the mask, because only the sums are always on
            # the devices that computed them.
            sums = [needs_one_order(x) for x in sums]
            return cast_like(sums, widen(inputs.leaves)), per_example

    def _engine_for(
        self, closed: jex.ClosedJaxpr, groups: Sequence[int]
    ) -> "_SelectedEngine":
        """Choose the engine for a call with this loss.

        Args:
          closed: the loss's jaxpr.
          groups: for each parameter leaf, the number of the leaf's clipping group. The
            leaves of a clipping group are clipped together.
        """
        vmap_engine = _SelectedEngine(partial(_vmap_sum, closed, groups), None)
        if self.engine == "vmap":
            return vmap_engine
        is_auto, is_discrete = self.engine == "auto", self.arithmetic == "discrete"
        # Two passes require that two evaluations agree, which no compiler guarantees.
        keep_blocks = self.engine != "bookkeeping" and not is_discrete
        plan = bookkeeping.plan(closed, groups, keep_blocks=keep_blocks)
        engine = plan.automatic if is_auto else self.engine
        if engine == "vmap":
            return vmap_engine
        two_passes = partial(bookkeeping.clipped_sum_in_two_passes, plan)
        if self.engine == "ghost":
            return _SelectedEngine(two_passes, plan)
        # Products on TPUs are outside of the rounding model. So for "auto" and for sums
        # in float64, per-example gradients replace rows on TPUs.
        one_pass = partial(bookkeeping.clipped_sum, by_platform=is_auto or is_discrete)
        if engine == "bookkeeping":
            return _SelectedEngine(partial(one_pass, plan), plan)
        inlined_plan = bookkeeping.plan(closed, groups)

        def sum_by_platform(clip_norms: Sequence[ArrayLike], inputs: Inputs) -> Summed:
            from_gradients = partial(one_pass, inlined_plan, clip_norms)
            otherwise = partial(two_passes, clip_norms)
            return on_platform("tpu", from_gradients, otherwise, inputs)

        return _SelectedEngine(sum_by_platform, plan)

    def _add_varying_axes(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Mark the parameters as varying along the axes along which the loss varies.

        In `jax.shard_map`, each device has a part of the batch. Without the marks, the
        derivative would be a sum over the devices, and would be clipped as if it were
        the gradient of one example.
        """
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return args
        axes = varying_axes(self._trace(args, search=False)[0].out_avals[0])
        numbers = _as_tuple(self.argnums)
        return tuple(
            add_varying_axes(x, axes) if i in numbers else x for i, x in enumerate(args)
        )

    def _trace(
        self, args: Sequence[object], search: bool = True
    ) -> tuple[jex.ClosedJaxpr, Any]:
        """The loss's jaxpr for the arguments of a call, and the structure of aux.

        The inputs of the jaxpr are the leaves of the parameters and the leaves of one
        example. The outputs are the loss and the leaves of aux. `search` is as for
        `bookkeeping.trace`.
        """
        types = map(jax.typeof, self._examples(args))
        example_types = [like(t, t.shape[1:], t.dtype) for t in types]
        numbers = *_as_tuple(self.argnums), *self.batch_argnums
        treedef = jax.tree.structure([args[i] for i in numbers])

        def loss_and_aux(leaves: Arrays, example: Arrays) -> tuple[jax.Array, object]:
            # Arguments that are neither parameters nor batches are passed unchanged.
            all_args = list(args)
            values = treedef.unflatten([*leaves, *example])
            for i, value in zip(numbers, values, strict=True):
                all_args[i] = value
            out = self.loss_fn(*all_args)
            loss, aux = out if self.has_aux else (out, ())
            _check_scalar(loss)
            return loss, aux

        return bookkeeping.trace(
            loss_and_aux, self._leaves(args), example_types, search=search
        )

    def _examples(self, args: Sequence[object]) -> list[jax.Array]:
        """The leaves of a call's batch arguments, as JAX arrays.

        Raises:
          ValueError: the call has too few arguments.
        """
        largest = max(*self.batch_argnums, *_as_tuple(self.argnums))
        if largest >= len(args):
            raise ValueError(
                f"argnums {self.argnums} and batch_argnums {self.batch_argnums} name "
                f"argument {largest}, but the call has {len(args)} positional "
                "arguments."
            )
        examples = [args[i] for i in self.batch_argnums]
        return [jnp.asarray(x) for x in jax.tree.leaves(examples)]

    def parameters(self, args: Sequence[object]) -> object:
        """The parameters of a call: one argument, or a tuple if argnums is a tuple."""
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return tuple(args[i] for i in self.argnums)

    def _leaves(self, args: Sequence[object]) -> list[jax.Array]:
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

    def _groups(self, args: Sequence[object]) -> list[int]:
        """For each parameter leaf, the number of the leaf's clipping group.

        The leaves of a clipping group are clipped together. If `clip_norm` is one
        number, all leaves are in one group. If `clip_norm` is a prefix tree of the
        parameters, each number of the tree is the clip norm of one group. This group
        has the leaves of the subtree at this number.

        Raises:
          ValueError: clip_norm is not a prefix tree of the arguments in argnums.
        """
        treedef, parameters = jax.tree.structure(self.clip_norm), self.parameters(args)
        numbers = treedef.unflatten(range(treedef.num_leaves))
        try:
            return jax.tree.leaves(jax.tree.broadcast(numbers, parameters))
        except ValueError as error:
            raise ValueError(
                "clip_norm must be a number or a prefix tree of the arguments in "
                f"argnums; got {self.clip_norm!r} for {jax.tree.structure(parameters)}."
            ) from error

    def plan(self, *args: object, keep_blocks: bool = False) -> bookkeeping.Plan:
        """The book-keeping engine's analysis of the loss.

        Args:
          *args: the arguments of a call.
          keep_blocks: whether blocks of `jax.checkpoint` stay checkpointed, as with
            engine="ghost".
        """
        closed, _ = self._trace(self._add_varying_axes(args))
        return bookkeeping.plan(closed, self._groups(args), keep_blocks=keep_blocks)


class _SelectedEngine(NamedTuple):
    """The engine for a call.

    Attributes:
      sum: a function of the clip norms and `Inputs`. It returns the sum of clipped
        gradients, and the results for each example.
      plan: the analysis of the loss; None for the vmap engine.
    """

    sum: Callable[..., Summed]
    plan: bookkeeping.Plan | None


def _vmap_sum(
    closed: jex.ClosedJaxpr,
    groups: Sequence[int],
    clip_norms: Sequence[ArrayLike],
    inputs: Inputs,
    *,
    x64: bool | None = None,
) -> Summed:
    """The sum of clipped gradients from the vmap engine, and per-example results.

    The engine forms all per-example gradients and clips them.

    Args:
      closed: the loss's jaxpr, which maps the parameter leaves and one example to the
        loss and aux.
      groups: for each parameter leaf, the number of its group. The leaves of a group
        are clipped together.
      clip_norms: for each group, the bound on the norm.
      inputs: the parameters, the examples and the mask of the batch.
      x64: None for sums in float32. For sums in float64, a boolean: whether the
        caller's own `jax_enable_x64` is on.
    """

    def differentiate(
        *example: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        def loss_and_aux(leaves: Arrays) -> tuple[jax.Array, list[jax.Array]]:
            loss, *aux = evaluate(closed, [*leaves, *example])
            return loss, aux

        value_and_grad = jax.value_and_grad(loss_and_aux, has_aux=True)
        (loss, aux), gradient = value_and_grad(list(inputs.leaves))
        # In float32 or wider, so that norms and sums are not rounded to narrow dtypes.
        return widen(gradient), loss, aux

    with _clip.loss_scope(x64):
        gradients, loss, aux = jax.vmap(differentiate)(*inputs.examples)

    sum_clipped = partial(_clip.sum_clipped, groups, wide=x64 is not None)
    sharded_sum = inputs.let_compiler_shard(sum_clipped)
    grads, norm = sharded_sum(gradients, clip_norms, inputs.mask)
    return grads, PerExample(loss, norm, aux)


def _warn_if_none_contributes(norm: jax.Array, mask: jax.Array) -> None:
    """Warn if no example whose mask is True has a finite gradient.

    The function does not warn inside jit, nor if the mask is False for all examples.
    """
    if not are_concrete([norm, mask]):
        return
    present, finite = np.asarray(mask), np.isfinite(norm)
    if np.any(present) and not np.any(present & finite):
        warnings.warn(
            "none of the examples of this batch contributes to the sum, because no "
            "gradient is finite, so noise alone moves the parameters. Look for an "
            "infinite derivative in the loss, such as that of a norm or a square "
            "root at zero, and for infinities in the data.",
            stacklevel=3,
        )


def _as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Convert one argument number, or a sequence of argument numbers, to a tuple."""
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _check_scalar(loss: Any) -> None:
    if not hasattr(loss, "shape") and not isinstance(loss, float):
        raise ValueError(
            "loss_fn must return one scalar for one example; got "
            f"{type(loss).__name__} (for a pair (loss, aux), pass has_aux=True)."
        )
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            "loss_fn must return one real scalar for one example, which has no batch "
            f"axis; got shape {jnp.shape(loss)} and dtype {jnp.result_type(loss)}."
        )


@overload
def clipped_grad(
    loss_fn: Callable[Concatenate[Params, ...], Any],
    clip_norm: Any,
    *,
    argnums: Literal[0] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    arithmetic: Arithmetic = "real",
) -> ClippedGrad[Params]: ...


@overload
def clipped_grad(
    loss_fn: Callable[..., Any],
    clip_norm: Any,
    *,
    argnums: int | Sequence[int],
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    arithmetic: Arithmetic = "real",
) -> ClippedGrad[Any]: ...


def clipped_grad(
    loss_fn: Callable[..., Any],
    clip_norm: Any,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    arithmetic: Arithmetic = "real",
) -> ClippedGrad[Any]:
    """Make a function that sums clipped per-example gradients over a batch.

    Args:
      loss_fn: a function of ONE example (no batch axis) in each batch argument. It
        returns a scalar loss, or (loss, aux) with has_aux.
      clip_norm: the bound C on the L2 norm of each example's gradient, over all the
        arguments in argnums together. It is positive and may be traced. A prefix tree
        of these arguments (of their tuple, if argnums is a tuple) gives a bound for
        each part, and each part is then clipped separately.
      argnums: the argument or arguments to differentiate by, as in `jax.grad`.
      batch_argnums: the argument or arguments that hold examples. They are pytrees
        whose leaves all have the same leading axis b. A leaf may be an array of typed
        keys.
      has_aux: whether loss_fn returns (loss, aux).
      engine: the method of computation. All engines agree up to rounding, and up to the
        increase of norms that covers rounding errors (docs/clipping.md).
        "vmap" forms all per-example gradients.
        "bookkeeping" computes norms and the sum from activations and cotangents of one
        backward pass, and is often many times faster. It forms per-example gradients
        only for parameters for which this method is not available, not accurate
        enough, or more costly (see `explain`). It does not retain rematerialisation
        (jax.checkpoint).
        "ghost" works like "bookkeeping" but in two passes, one for the norms and one
        for the sum. It retains the rematerialisation of a block whose parameters enter
        the loss only once, in this block. So it is for losses that rematerialise blocks
        to save memory. It is also for losses whose per-example gradients must be
        formed, because it does not store these gradients between the passes. It makes
        an assumption (see Privacy).
        "auto" is "bookkeeping" if at least one parameter is combined with the example
        only in matrix products, convolutions or lookups, and "vmap" otherwise. But if
        "ghost" would retain the rematerialisation of a block, "auto" is "ghost" or
        "vmap", which both retain it. In this case "auto" is "vmap" if two conditions
        hold: no parameter is sharded along an explicit mesh axis, and the gradient of
        one example has no more entries than the activations and cotangents of this
        example that "ghost" stores at once. On a TPU, "auto" computes all norms from
        per-example gradients. A program for which "auto" would be "ghost" on another
        device takes one pass on a TPU, and does not retain rematerialisation.
      microbatch_size: the maximum number of examples to process at a time. Any size
        works with any b; the result is the same up to rounding.
      arithmetic: "real" for a sum whose sensitivity holds in real arithmetic.
        "discrete" for a sum whose floats have this sensitivity, as mechanisms on a
        lattice need (`add_discrete_gaussian_noise`). The sum is then computed in
        float64, even if `jax_enable_x64` is off. Products of float32 cover at most 128
        rows at a time, where rows are, for example, the positions of a sequence.
        Gradients are clipped to C / (1 + h), where h bounds the effect of one example
        on the sum's rounding. h depends on shapes alone, and is about the sum of four
        terms (docs/bits.md): 2⁻²³ b; up to .0021; up to .0041 if an example has 64 rows
        or more; and the rounding of float64, which is 2e-4 for 4,000 examples of 128
        rows. "auto" is then "bookkeeping" or "vmap", and "ghost" is not available.

    Returns:
      A function `fn(*args, mask=None)` that returns `(grads, per_example)`. grads is
      the *sum* of clipped gradients, shaped like the arguments in argnums, in float32
      or wider. per_example is a `PerExample(loss f[b], norm f[b], aux)`. mask is
      bool[b]: an example whose mask is False contributes zero to grads, but its loss
      and norm are reported unchanged. An example contributes zero if its gradient is
      not finite, if the norm overflows (in float32 beyond about 1e19 C), or if its
      activations are so large that underflows could change the sum (docs/clipping.md,
      "What is assumed"). With a clip norm above 2¹⁰⁰, every example contributes zero.
      `fn.sensitivity(adjacency)` is the L2 sensitivity of grads. The function may be
      jitted, scanned and sharded.

    Raises:
      ValueError: a clip norm is not one positive number; argnums and batch_argnums
        overlap or are otherwise invalid; the engine or the arithmetic is unknown; the
        engine is "ghost" with arithmetic="discrete"; microbatch_size is given, but
        is not a positive integer. When the function is called: argnums or batch_argnums
        name an argument that the call lacks; the batch arguments have no leaves, or
        their leading axes differ, are missing or are empty; the mask has another shape
        or dtype; clip_norm is no prefix tree of the arguments in argnums; an argument
        in argnums has a leaf that is not a real floating-point array; the loss is not a
        real floating-point scalar; the loss or its derivative communicates along a
        named axis that the loss does not bind itself, and so depends on other examples,
        as BatchNorm in training mode does.
      RuntimeError: with arithmetic="discrete", when the sum is lowered for GPUs, or
        computed on a GPU, and the environment variable `XLA_FLAGS` contains neither
        `--xla_gpu_exclude_nondeterministic_ops=true` nor
        `--xla_gpu_deterministic_ops=true`. Without these flags, the order of additions
        may vary from run to run, and the bound on their rounding does not hold.

    Warns:
      UserWarning: in a call outside jit, the mask is True for at least one example, but
        no example whose mask is True has a finite gradient. Under jit, use
        `dpjax.metrics` to count the examples that contribute.

    Privacy: grads has L2 sensitivity C under ADD_REMOVE and ZERO_OUT, and 2C under
    REPLACE. With several bounds, C² is the sum of their squares. This holds for every
    loss, as long as loss_fn sees one example at a time (without a side channel to other
    examples). Norms are rounded up to cover rounding errors (docs/clipping.md), with
    two exceptions. "ghost", also if "auto" selects it, assumes that two evaluations of
    one function agree, although a compiler may round them differently. On TPUs, the
    bounds on rounding errors are not proven for norms from activations and cotangents,
    which engine="bookkeeping" with arithmetic="real" and engine="ghost" compute.
    per_example is not private.

    With arithmetic="discrete", consider two batches that differ in one slot, which is
    one index of the leading axis: every other slot has the same example in both. The
    computed floats of their sums have an L2 distance of at most C, or 2C if the
    example in the slot is replaced. This bound suffices for the batches of a
    `dpjax.Plan`, which puts the examples of randomly drawn batches into uniformly
    random slots. Inside `jax.shard_map` the bound is for the sum of one device, and not
    for a sum over devices. The bound assumes that a slot's gradient depends on no other
    slot's example, and that equal blocks of rows have equal products.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss(w, example):
      ...     x, y = example
      ...     return 0.5 * (x @ w - y) ** 2
      >>> fn = clipped_grad(loss, 1.0)
      >>> x, y = jnp.array([[3.0, 4.0], [0.5, 0.0]]), jnp.array([-1.0, -1.0])
      >>> grads, per_example = fn(jnp.zeros(2), (x, y))
      >>> print(grads.round(3), per_example.norm.round(3))
      [1.1 0.8] [5.  0.5]
      >>> float(fn.sensitivity(Adjacency.REPLACE))
      2.0
    """
    for bound in jax.tree.leaves(clip_norm):
        validate.scalar("clip_norm", bound)
        validate.positive("clip_norm", bound)
    validate.one_of("engine", engine, ENGINES)
    validate.one_of("arithmetic", arithmetic, ("real", "discrete"))
    if engine == "ghost" and arithmetic == "discrete":
        raise ValueError(
            "engine must not be 'ghost' with arithmetic='discrete', because the "
            "bound on the rounding of the sum does not hold for two backward passes."
        )
    if microbatch_size is not None:
        validate.static_int("microbatch_size", microbatch_size, minimum=1)
    parameters, batch_numbers = _as_tuple(argnums), _as_tuple(batch_argnums)
    if not parameters or min(parameters) < 0 or len(set(parameters)) < len(parameters):
        raise ValueError(
            f"argnums must be one or more distinct integers >= 0; got {argnums!r}."
        )
    if (
        not batch_numbers
        or min(batch_numbers) < 0
        or set(parameters) & set(batch_numbers)
    ):
        raise ValueError(
            "batch_argnums must be one or more non-negative integers, none of which is "
            f"in argnums; got {batch_argnums!r} with argnums {argnums!r}."
        )
    return ClippedGrad(
        loss_fn=loss_fn,
        clip_norm=jax.tree.map(_clip.widen_bound, clip_norm),
        argnums=argnums if isinstance(argnums, int) else parameters,
        batch_argnums=batch_numbers,
        has_aux=has_aux,
        engine=engine,
        microbatch_size=microbatch_size,
        arithmetic=arithmetic,
    )


def explain(
    loss_fn: Callable[..., Any],
    *args: Tree,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
) -> bookkeeping.Explanation:
    """Show how engine="bookkeeping" treats each parameter of a loss.

    Args:
      loss_fn: as for `clipped_grad`.
      *args: the arguments of a call, with parameters and a batch. Only the shapes and
        dtypes of the parameters and the batch matter, and not their values.
      argnums: as for `clipped_grad`.
      batch_argnums: as for `clipped_grad`.
      has_aux: as for `clipped_grad`.

    Returns:
      An `Explanation` with one row for each parameter. A row has the parameter's path
      and shape, and the equations that combine the parameter with values that depend
      on the example. The row also states how the norm is computed: "rows" for rows of
      activations and cotangents, "gradients" for per-example gradients, or "none" if
      the loss has no derivative by the parameter. A row with "gradients" gives the
      reason. Each row has the estimated costs per example of this engine and of the
      vmap engine. `print` shows a table. `.auto` is the engine that engine="auto"
      selects with arithmetic="real".

    Raises:
      ValueError: as for `clipped_grad` and for a call of its result. But the leading
        axes of the batch arguments are not checked.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"]) * params["scale"])
      >>> params = {"w": jnp.ones((30, 20)), "scale": jnp.ones(20)}
      >>> print(explain(loss, params, jnp.ones((8, 30))))
      parameter  shape  sites                norm from  cost     vmap     why
      ['scale']  20     mul                  gradients  9.6e+02  9.6e+02  no rule
      ['w']      30x20  dot_general (dense)  rows       6.5e+02  2.9e+04
      auto: bookkeeping
    """
    fn = clipped_grad(
        loss_fn, 1.0, argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux
    )
    named = jax.tree_util.tree_flatten_with_path(fn.parameters(args))[0]
    parameters = [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in named]
    auto = fn.plan(*args, keep_blocks=True).automatic
    return bookkeeping.explanation(fn.plan(*args), parameters, auto)
