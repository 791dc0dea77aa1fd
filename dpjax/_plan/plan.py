"""`Plan`: the numbers of a run, and the batches, gradient and optimizer from them."""

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
from dpjax._plan import loader, loss, users
from dpjax._plan import optimizer as release
from dpjax._plan.comparison import Comparison
from dpjax._plan.mechanisms import Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax.clipping._metrics import Metrics
from dpjax.noise._correlated import Buffer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan(RunParameters):
    """A private run, as `dpjax.plan` makes it: immutable, and static under jit.

    The guarantee depends on all numbers of a plan together. To change one of them, make
    another plan.

    Attributes:
      num_examples: n, the size of the data set.
      batch_size: b, how many examples a step takes, in expectation.
      num_steps: T, the step limit: the optimizer refuses further steps.
      noise_multiplier: noise standard deviation over clip norm.
      clip_norm: the bound C on the L2 norm of one example's gradient.
      max_batch_size: the capacity of a batch, the most examples that it can hold.
      epsilon: the ε of the whole run at delta, rounded up.
      delta: δ.
      sampling: "poisson", "fixed_size", "fixed", "reshuffled", "cyclic_poisson",
        "random_bins" or "fresh_bins".
      noise: "independent" or "correlated".
      adjacency: which data sets the guarantee compares.
      solved_for: the name of the number that was solved for from the others.
      unit: the unit of privacy: "example", or "user" for data of `dpjax.by_user`.
      arithmetic: "real" for a guarantee in real arithmetic with ideal Gaussian noise;
        "discrete" for a guarantee for the bits that are released.
      schedule: the segments of steps with constant numbers; () if no number varies.
      quantile: how the clip norm follows a quantile, with clip_norm as the first step's
        value; None if it is constant.
      shape: the numbers of the strategy that correlates the noise; None for independent
        noise.
      comparison: the mechanisms that this one was chosen from; None if the caller named
        the mechanism.
    """

    # Plans with the same numbers are equal, whether or not a comparison chose them.
    comparison: Comparison | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(cls, run: RunParameters, comparison: Comparison | None = None) -> "Plan":
        """The plan with the numbers of a record, and with a comparison or None."""
        names = [field.name for field in dataclasses.fields(RunParameters)]
        return cls(**{x: getattr(run, x) for x in names}, comparison=comparison)

    @property
    def mechanism(self) -> Mechanism:
        """The sampling mechanism: how examples are drawn, and the privacy cost."""
        return mechanism_of(self)

    @property
    def guarantee(self) -> promises.RunGuarantee:
        """The privacy guarantee of the whole run, a `RunGuarantee` to `print`."""
        return promises.RunGuarantee(self, self.num_steps)

    def batch(self, step: ArrayLike, key: jax.Array) -> samplers.Batch:
        """The positions of a step's examples, under jit and in a scan too.

        Args:
          step: the step's number, i[], from 0 to T − 1. A traced step cannot be
            checked: outside this range it draws a batch that belongs to no step of the
            plan, and the guarantee does not cover the use of that batch.
          key: one typed key for the whole run, which may be the optimizer's.

        Returns:
          A `sampling.Batch` of i32[m] and bool[m], m = max_batch_size. `load` reads the
          examples at these positions.

        Raises:
          ValueError: step is not traced and is not an integer from 0 to T − 1.
        """
        validate.step(step, self.num_steps)
        return loader.draw_batch(self, step, key)

    def load(self, data: Any, step: ArrayLike, key: jax.Array) -> loader.Examples:
        """The examples of a step from arrays in memory, under jit and in a scan too.

        Args:
          data: a tree of arrays with a leading axis n, indexed by position; with
            unit="user", the result of the method `stacked` of a `Users` data set, as
            `by_user` makes it.
          step: as for `batch`; a traced step is not checked.
          key: one typed key for the whole run, which may be the optimizer's.

        Returns:
          `Examples` with leading axes m = max_batch_size.

        Raises:
          ValueError: data does not have num_examples examples, or as for `batch`.
        """
        loader.check(data, self)
        examples = loader.take_examples(users.by_position(data), self.batch(step, key))
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
        """Iterate over the examples of one step after the other, up to the step limit.

        Args:
          data: a tree of arrays with a leading axis n, or one data set object. Arrays
            are NumPy's, JAX's or files mapped into memory; those of other libraries,
            such as pandas or torch, are read into memory once, by position and not by
            label. A data set object has `len` and integer indexing (a list, data sets
            of torch, grain or Hugging Face), and its examples are trees of numbers. If
            it has `__getitems__`, from a list of positions to a list of examples, one
            call reads a batch. With unit="user", data is the result of `by_user`.
          key: one typed key for the whole run, which may be the optimizer's.
          start: the first step, from 0 to T. A run that resumes after k steps passes k
            and restores the optimizer's state: a new state would repeat its noise.
          progress: whether to show a progress bar, where tqdm is installed.
          sharding: how the leading axis m is sharded over a mesh, such as
            `NamedSharding(mesh, P("data"))`. It must divide m evenly. Each process
            reads the examples of its own devices, and all processes must have the same
            key. None for one device or the host.
          prefetch: how many batches a thread reads ahead of their use.

        Yields:
          `Examples` with leading axes m = max_batch_size, T − start times. The same key
          gives the same batches. They are drawn on the CPU.

        Raises:
          ValueError: data does not have num_examples examples; start is out of range;
            sharding does not divide m.
        """
        return loader.batches(self, data, key, start, progress, sharding, prefetch)

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        batched: bool = True,
        engine: Engine = "auto",
        microbatch_size: int | None = None,
    ) -> Callable[..., Any]:
        """Transform a loss into its mean value and the sum of its clipped gradients.

        Args:
          loss_fn: `loss_fn(model, examples, *others)`, a scalar, or (scalar, aux) with
            has_aux. It is called on one example at a time.
          has_aux: as in `jax.value_and_grad`.
          batched: whether loss_fn takes examples with a leading batch axis, as the loss
            of an ordinary training script does. That axis then has size 1. If False,
            loss_fn takes one example without a batch axis.
          engine: as for `clipped_grad`.
          microbatch_size: as for `clipped_grad`.

        Returns:
          `fn(model, examples, *others)` for `Examples` from `load` or `batches`, which
          returns (value, grads), or ((value, aux), grads). model is any tree of arrays.
          grads is for the optimizer alone: the *sum* of clipped gradients, shaped like
          the model, None where a leaf is not an array of floats; for a flax.nnx module,
          the state of its `nnx.Param`s. Where the clip norm follows a quantile, fn also
          takes clip_norm, from `clip_norm_of`, and grads is a `Bounded` sum. value is
          the mean over the valid examples, and aux has a leading axis m. others may
          hold anything; typed keys among them, also within objects of flax.nnx, are
          folded so that each example has its own key, for dropout.

        Raises:
          ValueError: when called: examples are not `Examples`, or are another plan's;
            the model has nothing to train, or the loss changes its state, as BatchNorm
            does in training mode; or as for `clipped_grad`.

        Warns:
          UserWarning: the gradient with respect to a part of the model is zero for all
            data, for example where `jax.lax.stop_gradient` freezes the part, or where
            the loss compares the examples of a batch. Outside jit there is also a
            warning if no example of a batch has a finite gradient, and if the first
            batch's clipped sum is zero for a part of the model. Under jit, see
            `metrics`.

        Privacy: grads has L2 sensitivity clip_norm, twice that under REPLACE. value and
        aux are not private. Random keys that are passed to the loss (dropout) must be
        secret and new in every step. An example's key is derived from its position in
        the batch, and one example more or less changes the positions of others.
        """
        options = loss.Options(has_aux, batched, engine, microbatch_size)
        return loss.value_and_grad(loss_fn, self, options)

    def metrics(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        batched: bool = True,
        engine: Engine = "auto",
        microbatch_size: int | None = None,
    ) -> Callable[..., Metrics]:
        """Transform a loss into metrics: mean loss, clipped share and gradient norms.

        Args:
          loss_fn: as for `value_and_grad`.
          has_aux: as for `value_and_grad`.
          batched: as for `value_and_grad`.
          engine: as for `value_and_grad`.
          microbatch_size: as for `value_and_grad`.

        Returns:
          `fn(model, examples, *others)`, which returns the `Metrics` of the valid
          examples. Each call computes the gradients again, so call it in few steps.

        Raises:
          ValueError: as for `value_and_grad`.

        Privacy: the metrics are not private; see `dpjax.metrics`.
        """
        options = loss.Options(has_aux, batched, engine, microbatch_size)
        return loss.metrics(loss_fn, self, options)

    def optimizer(
        self,
        inner: optax.GradientTransformation,
        *,
        key: jax.Array,
        buffer: Buffer = "stored",
    ) -> optax.GradientTransformationExtraArgs:
        """The private optimizer: it adds noise, divides by b, and then applies inner.

        Args:
          inner: any optax optimizer. It must not read the data.
          key: one typed key, from `dpjax.random_key`, for this run alone. The sampler
            of the run may use the same key.
          buffer: for correlated noise, as for `dpjax.correlated_noise`.

        Returns:
          An optax transformation of the grads that `value_and_grad` returns. Leaves of
          the parameters that are not arrays of floats do not change. Past num_steps it
          refuses: a ValueError outside jit, NaN updates inside. For batches too large
          for the device use `dpjax.accumulate`, and not `optax.MultiSteps`.

        Raises:
          ValueError: key is not a typed key; buffer asks for recomputed noise, and the
            noise cannot be recomputed. At init and update: a part of the tree is
            masked, as by `optax.masked` around this optimizer (masks go inside, into
            inner). At update: further arguments, such as value=, are given.

        Privacy: the updates of all steps, together with any function of them, have the
        plan's `guarantee`. The state holds the key and is as secret as the data.
        """
        return release.optimizer(self, inner, key, buffer)

    def clip_norm_of(self, state: optax.OptState) -> jax.Array:
        """The next step's clip norm, f32[], where it follows a quantile.

        Args:
          state: the state of this plan's `optimizer`.

        Returns:
          The argument clip_norm of the function that `value_and_grad` returns.

        Raises:
          ValueError: the clip norm follows no quantile; state is not that of such a
            plan's optimizer.
        """
        if self.quantile is None:
            raise ValueError(
                "clip_norm_of is for plans with a QuantileClip; this one's clip norm "
                f"is {self.clip_norm!r}, which need not be said again."
            )
        return release.clip_norm_of(state)
