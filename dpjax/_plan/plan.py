"""The plan of a run: its numbers, each held once, and what is made from them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpjax import sampling as samplers
from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Engine
from dpjax._plan import guarantee as promises
from dpjax._plan import loader, loss
from dpjax._plan import optimizer as release
from dpjax._plan.arrays import by_position
from dpjax._plan.comparison import Comparison
from dpjax._plan.mechanisms import Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax.clipping._metrics import Metrics
from dpjax.noise._correlated import Buffer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan(RunParameters):
    """A private run, as `dpjax.plan` makes it: immutable, and static under jit.

    Its numbers belong together. For another number make another plan.

    Attributes:
      num_examples: n, the size of the data set.
      batch_size: b, how many examples a step takes, in expectation.
      num_steps: T, after which the optimizer refuses.
      noise_multiplier: noise standard deviation over clip norm.
      clip_norm: the bound C on the L2 norm of one example's gradient.
      max_batch_size: how many examples a batch has room for.
      epsilon: what the whole run costs at delta, rounded up.
      delta: δ.
      sampling: "poisson", "fixed_size", "fixed", "reshuffled", "cyclic_poisson",
        "random_bins" or "fresh_bins".
      noise: "independent" or "correlated".
      adjacency: which data sets the guarantee compares.
      solved_for: which number the others gave.
      unit: whose privacy it is: "example", or "user" for data of `dpjax.by_user`.
      schedule: the pieces of what varies from step to step, () if nothing does.
      quantile: how the clip norm follows a quantile, clip_norm being the first one.
      shape: the numbers of the strategy that correlates the noise; None if none does.
      comparison: the mechanisms that this one was chosen from; None if it was named.
    """

    # Plans of the same numbers are the same, however they were found.
    comparison: Comparison | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(cls, run: RunParameters, comparison: Comparison | None = None) -> "Plan":
        """The plan with these numbers."""
        names = [field.name for field in dataclasses.fields(RunParameters)]
        return cls(**{x: getattr(run, x) for x in names}, comparison=comparison)

    @property
    def mechanism(self) -> Mechanism:
        """How examples are drawn, and what that costs."""
        return mechanism_of(self)

    @property
    def guarantee(self) -> promises.RunGuarantee:
        """What the whole run promises; `print` it, or see `RunGuarantee`."""
        return promises.RunGuarantee(self, self.num_steps)

    def batch(self, step: ArrayLike, key: jax.Array) -> samplers.Batch:
        """The positions of a step's examples, under jit and in a scan too.

        Args:
          step: the step's number, i[], from 0 to T − 1. A traced step cannot be
            checked: out of this range it draws a batch that belongs to no step of the
            plan, and the guarantee does not cover its use.
          key: one typed key for the whole run, which may be the optimizer's.

        Returns:
          A `sampling.Batch` of i32[m] and bool[m], m = max_batch_size. `load` reads it.

        Raises:
          ValueError: step is not traced and is not an integer from 0 to T − 1.
        """
        validate.step(step, self.num_steps)
        return loader.draw_batch(self, step, key)

    def load(self, data: Any, step: ArrayLike, key: jax.Array) -> loader.Examples:
        """The examples of a step from arrays in memory, under jit and in a scan too.

        Args:
          data: a tree of arrays with a leading axis n, indexed by position; with
            unit="user", what `stacked` of `by_user` gives.
          step: as for `batch`; a traced step is not checked.
          key: one typed key for the whole run, which may be the optimizer's.

        Returns:
          `Examples` with leading axes m = max_batch_size.

        Raises:
          ValueError: data does not have num_examples examples, or as for `batch`.
        """
        loader.check(data, self)
        examples = loader.take_examples(by_position(data), self.batch(step, key))
        return loader.attach_plan(self, examples, jnp.asarray(step, jnp.int32))

    def batches(
        self,
        data: Any,
        *,
        key: jax.Array,
        start: int = 0,
        progress: bool = False,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 0,
    ) -> Iterator[loader.Examples]:
        """The examples of one step after the other, until the budget ends.

        Args:
          data: a tree of arrays with a leading axis n (NumPy's, JAX's or files mapped
            into memory; others, as of pandas or torch, are read into memory once, by
            position and not by label), or one object with `len` and integer indexing
            (a list, data sets of torch, grain or Hugging Face), whose examples are
            trees of numbers. Where it has `__getitems__`, from a list of positions to a
            list of examples, one call reads a batch. With unit="user", what `by_user`
            gives.
          key: one typed key for the whole run, which may be the optimizer's.
          start: the first step, from 0 to T. A run that resumes after k steps says k,
            and restores the optimizer's state: a new one would repeat its noise.
          progress: whether to show a progress bar, where tqdm is installed.
          sharding: how the leading axis m lies on a mesh, which must divide it evenly,
            as `NamedSharding(mesh, P("data"))`. Each process reads what its own devices
            hold, and all must have the same key. None for one device or the host.
          prefetch: how many batches are read before they are asked for, by a thread.

        Yields:
          `Examples` with leading axes m = max_batch_size, T − start times. The same
          key gives the same. They are drawn on the CPU.

        Raises:
          ValueError: data does not have num_examples examples; start is out of range;
            sharding does not divide m.
        """
        return loader.batches(
            self,
            data,
            key=key,
            start=start,
            progress=progress,
            sharding=sharding,
            prefetch=prefetch,
        )

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        batched: bool = True,
        engine: Engine = "auto",
        microbatch_size: int | None = None,
    ) -> Callable[..., Any]:
        """A loss's mean value, and the clipped sum of its gradients.

        Args:
          loss_fn: `loss_fn(model, examples, *others)`, a scalar, or (scalar, aux) with
            has_aux. It is called on one example at a time.
          has_aux: as in `jax.value_and_grad`.
          batched: whether loss_fn takes examples with a leading axis, as a training
            script's own does; it is then 1. Otherwise there is none.
          engine: as for `clipped_grad`.
          microbatch_size: as for `clipped_grad`.

        Returns:
          `fn(model, examples, *others)` for `Examples` as `load` and `batches` give
          them: (value, grads), or ((value, aux), grads). grads is for the optimizer
          alone: the *sum* of clipped gradients, shaped like the model, None where a
          leaf is not an array of floats; for a flax.nnx module, the state of its
          `nnx.Param`s. Where the clip norm follows a quantile, fn takes clip_norm too,
          from `clip_norm_of`, and grads is a `Bounded` sum. value is the mean over the
          examples that are there, aux has a leading axis m. model is any tree of
          arrays. others may hold anything; typed keys among them, also within objects
          of flax.nnx, are folded so that each example has its own, for dropout.

        Raises:
          ValueError: when called: examples are not `Examples`, or are another plan's;
            the model has nothing to train, or the loss changes its state, as BatchNorm
            does in training mode; or as for `clipped_grad`.

        Warns:
          UserWarning: the gradient with respect to a part of the model is zero whatever
            the data, as where `jax.lax.stop_gradient` freezes it, or where the loss
            compares the examples of a batch. Outside jit there is also a warning if no
            example of a batch has a finite gradient, and if the first batch's clipped
            sum is zero for a part of the model. Under jit, see `metrics`.

        Privacy: grads has L2 sensitivity clip_norm, twice that under REPLACE. value and
        aux are not private. Random keys that the loss is given (dropout) must be secret
        and new in every step: an example more or less moves others to other places,
        and with them their keys.
        """
        return loss.value_and_grad(
            loss_fn,
            self,
            has_aux=has_aux,
            batched=batched,
            engine=engine,
            microbatch_size=microbatch_size,
        )

    def metrics(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        batched: bool = True,
        engine: Engine = "auto",
        microbatch_size: int | None = None,
    ) -> Callable[..., Metrics]:
        """What to watch: mean loss, how many gradients are clipped, and their norms.

        Args:
          loss_fn: as for `value_and_grad`, and so are the others.
          has_aux: as there.
          batched: as there.
          engine: as there.
          microbatch_size: as there.

        Returns:
          `fn(model, examples, *others)`, with the `Metrics` of the examples that are
          there. It costs a gradient of its own: call it now and then.

        Raises:
          ValueError: as `value_and_grad`.

        Privacy: none; see `dpjax.metrics`.
        """
        return loss.metrics(
            loss_fn,
            self,
            has_aux=has_aux,
            batched=batched,
            engine=engine,
            microbatch_size=microbatch_size,
        )

    def optimizer(
        self,
        inner: optax.GradientTransformation,
        *,
        key: jax.Array,
        buffer: Buffer = "stored",
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer on private means: noise, division by b, and then inner.

        Args:
          inner: any optax optimizer. It must not read the data.
          key: one typed key, as `dpjax.random_key` makes, for this run alone. A sampler
            may share it.
          buffer: for correlated noise, as for `dpjax.correlated_noise`.

        Returns:
          An optax transformation of what `value_and_grad` gives. Leaves of the
          parameters that are not arrays of floats stay as they are. Past num_steps it
          refuses: a ValueError outside jit, NaN updates inside. Batches too large for
          the device are not for `optax.MultiSteps` (see `dpjax.accumulate`).

        Raises:
          ValueError: key is not a typed key; the noise cannot be drawn again. At init
            and update: a part of the tree is masked, as by `optax.masked` around this
            optimizer (masks go inside, into inner). At update: further arguments, such
            as value=, are given.

        Privacy: the updates of all steps, and all that is made of them, together have
        the plan's `guarantee`. The state holds the key and is as secret as the data.
        """
        return release.optimizer(self, inner, key, buffer)

    def clip_norm_of(self, state: optax.OptState) -> jax.Array:
        """The next step's clip norm, f32[], where it follows a quantile.

        Args:
          state: the state of this plan's `optimizer`.

        Returns:
          What the function of `value_and_grad` takes as clip_norm.

        Raises:
          ValueError: the clip norm follows no quantile; state is another one.
        """
        if self.quantile is None:
            raise ValueError(
                "clip_norm_of is for plans with a QuantileClip; this one's clip norm "
                f"is {self.clip_norm!r}, which need not be said again."
            )
        return release.clip_norm_of(state)
