"""`Plan`: a run's parameters, and methods for its batches, gradient and optimizer."""

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
    """The plan of a private run, made by `dpjax.plan`; immutable, and static under jit.

    The guarantee depends on the numbers and settings of a plan together. To change one,
    make another plan.

    Attributes:
      num_examples: n, the size of the data set.
      batch_size: b, the expected number of examples in a step, with four exceptions.
        With a batch schedule, the segments in `schedule` state the expected number. For
        "fixed" and "reshuffled" sampling, b is the size of every batch except the last
        batch of an epoch, which may be smaller. For "random_bins" and "fresh_bins"
        sampling, the expected number of examples in a step is n / ⌈n / b⌉. For
        "cyclic_poisson" sampling, the sizes of the groups may differ by one, and b is
        the mean of the expected batch size over the groups. An epoch of "fixed",
        "reshuffled", "random_bins" or "fresh_bins" sampling has ⌈n / b⌉ steps.
      num_steps: T, the step limit. The optimizer refuses steps after the first T.
      noise_multiplier: σ, the noise's standard deviation divided by the clip norm. For
        correlated noise C⁻¹z, σ refers to z. If quantile is not None, a step also
        releases a noisy count of the gradients whose norms are at most the clip norm.
        The sum and this count together cost as much as a sum alone with noise
        multiplier σ.
      clip_norm: the bound C on the L2 norm of one example's gradient.
      max_batch_size: the capacity, the maximum number of examples in a batch.
      epsilon: the ε of the whole run at delta, rounded up.
      delta: δ.
      sampling: "poisson", "fixed_size", "fixed", "reshuffled", "cyclic_poisson",
        "random_bins" or "fresh_bins".
      noise: "independent" or "correlated".
      adjacency: the relation between the data sets that the guarantee compares.
      solved_for: the name of the attribute that `dpjax.plan` computed from the other
        attributes: "epsilon", "noise_multiplier", "num_steps" or "batch_size".
      unit: the unit of privacy: "example", or "user" for data of `dpjax.by_user`.
      arithmetic: "real" for a guarantee in real arithmetic with ideal Gaussian noise;
        "discrete" for a guarantee for the bits that are released.
      schedule: the segments of the run in which the noise, the clip norm and the batch
        size are constant; () without schedules. A segment states its noise and its clip
        norm as multiples of noise_multiplier and clip_norm.
      quantile: the settings by which the clip norm follows a quantile of the gradient
        norms, starting from clip_norm; None if the clip norm follows no quantile.
      shape: the numbers that determine the matrix C of correlated noise C⁻¹z; None for
        independent noise.
      comparison: the mechanisms among which this plan's mechanism was chosen; None if
        the caller named the mechanism.
    """

    # Plans with the same numbers are equal, even if only one comes from a comparison.
    comparison: Comparison | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(cls, run: RunParameters) -> "Plan":
        """Make a plan from a run's parameters."""
        return cls(**vars(run))

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that draws the examples and gives the run's privacy event."""
        return mechanism_of(self)

    @property
    def guarantee(self) -> promises.RunGuarantee:
        """The privacy guarantee of the whole run, as a `RunGuarantee` to `print`."""
        return promises.RunGuarantee(self, self.num_steps)

    def batch(self, step: ArrayLike, key: jax.Array) -> samplers.Batch:
        """The positions of the examples of a step; also works under jit and in a scan.

        Args:
          step: the step's number, i[], from 0 to num_steps − 1. A traced step is not
            checked. If a traced step is outside this range, the batch belongs to no
            step of the plan, and the guarantee does not cover the use of the batch.
          key: one typed key for the whole run. The optimizer may have the same key.

        Returns:
          A `sampling.Batch` of positions i32[m] and a mask bool[m], where m is
          max_batch_size. `load` reads the examples at these positions.

        Raises:
          ValueError: step is not traced, and not an integer from 0 to num_steps − 1.
        """
        validate.step(step, self.num_steps)
        return loader.draw_batch(self, step, key)

    def load(self, data: Any, step: ArrayLike, key: jax.Array) -> loader.Examples:
        """The examples of a step, from arrays in memory; also under jit and in a scan.

        Args:
          data: a tree of arrays with a leading axis of length num_examples, indexed by
            position. With unit="user", the tree that the method `stacked` of a `Users`
            data set returns; `by_user` makes such a data set.
          step: as for `batch`; a traced step is not checked.
          key: one typed key for the whole run. The optimizer may have the same key.

        Returns:
          `Examples`, whose arrays have a leading axis of length m = max_batch_size.

        Raises:
          ValueError: data is not a tree of arrays, or has another unit or another
            number of examples than the plan; an array has masked entries; an array of
            another library than NumPy and JAX holds neither numbers nor booleans; step
            is out of range, as for `batch`.
        """
        loader.check(data, self)
        if not users.is_tree_of_arrays(data):
            raise ValueError(
                f"data must be a pytree of arrays in Plan.load; got {type(data)}. "
                "Plan.batches also reads users, and data sets indexed by integers."
            )
        examples = loader.take_examples(users.by_position(data), self.batch(step, key))
        return loader.attach_plan(self, examples, jnp.asarray(step, jnp.int32))

    def batches(
        self,
        data: Any,
        *,
        key: jax.Array,
        start: int = 0,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 0,
    ) -> Iterator[loader.Examples]:
        """Iterate over the examples of one step after the other, up to the step limit.

        Args:
          data: a tree of arrays with a leading axis of length num_examples, or one data
            set object. The arrays are arrays of NumPy (also files mapped into memory)
            or of JAX. Arrays of other libraries, such as pandas or torch, are read into
            memory once, by position and not by label. A data set object has `len` and
            integer indexing (a list, or a data set of torch, grain or Hugging Face),
            and its examples are trees of arrays and numbers. If the object has
            `__getitems__`, which returns the examples at a list of positions, one call
            reads a batch. With unit="user", data is the result of `by_user`.
          key: one typed key for the whole run. The optimizer may have the same key.
          start: the first step, from 0 to num_steps. To resume a run after k steps,
            pass k and restore the optimizer's state: a new state would draw the noise
            of the first steps again.
          sharding: how the leading axis of m slots is sharded over a mesh, such as
            `NamedSharding(mesh, P("data"))`. The shards must have equal sizes. Each
            process reads the examples of its own devices, and all processes must have
            the same key. None for one device or the host.
          prefetch: the number of batches that a thread reads before the caller asks for
            them; 0 for no thread.

        Yields:
          `Examples` for each step from start to num_steps − 1. Their arrays have a
          leading axis of length m = max_batch_size. The positions of the examples are
          drawn on the CPU. The same key gives the same batches.

        Raises:
          ValueError: data is neither a tree of arrays nor a data set object; data has
            another unit or another number of examples than the plan; an array has
            masked entries; an array of another library than NumPy and JAX holds neither
            numbers nor booleans; key is not a typed key; start or prefetch is out of
            range; sharding does not divide the m slots into equal shards. During the
            iteration: data does not return one example for each position.
        """
        return loader.batches(self, data, key, start, sharding, prefetch)

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
          loss_fn: `loss_fn(model, examples, *others)`, which returns a scalar, or
            (scalar, aux) with has_aux. loss_fn is called on one example at a time.
          has_aux: as in `jax.value_and_grad`.
          batched: whether loss_fn takes examples with a leading batch axis, as the loss
            of an ordinary training script does. If True, this axis has size 1. If
            False, loss_fn takes one example without a batch axis.
          engine: as for `clipped_grad`.
          microbatch_size: as for `clipped_grad`.

        Returns:
          `fn(model, examples, *others)`, which returns (value, grads), or
          ((value, aux), grads) with has_aux. model is a tree whose arrays of floats are
          trained, or a flax.nnx module whose `nnx.Param`s are trained. examples are
          `Examples` from `load` or `batches`. value is the mean loss of the valid
          examples, and aux has a leading axis of length max_batch_size. grads is the
          *sum* of clipped gradients, and is for the optimizer alone. If a schedule
          varies the clip norm, the sum is multiplied by plan.clip_norm and divided by
          the step's clip norm. grads is shaped like the model, with None for leaves
          that are not arrays of floats. For a flax.nnx module, grads is the state of
          the module's `nnx.Param`s.
          If the clip norm follows a quantile, fn also has the argument clip_norm, a
          result of `clip_norm_of`. Then grads is a `Bounded`: the sum divided by
          clip_norm, and the number of gradients whose norms are at most clip_norm,
          minus half of the number of valid examples.
          The arguments `others` may hold anything. Typed keys among these arguments,
          also within flax.nnx objects, are folded so that each example has its own key,
          for dropout.

        Raises:
          ValueError: when fn is called: examples is not an `Examples`, or is a batch of
            another plan; examples has no step, although a schedule varies the clip
            norm; the model has nothing to train, or is a tree that contains flax.nnx
            modules; the loss changes the model's state, as BatchNorm does in training
            mode; clip_norm is given for a plan without `QuantileClip`, or is missing
            for a plan with `QuantileClip`; or `clipped_grad`, or the function that it
            returns, raises a ValueError.
          RuntimeError: with arithmetic="discrete", when fn is lowered for GPUs and
            `XLA_FLAGS` contains neither of the flags that `clipped_grad` requires.

        Warns:
          UserWarning: the gradient with respect to a part of the model is zero for all
            data. For instance, `jax.lax.stop_gradient` freezes the part, or the loss
            compares the examples of a batch. Outside jit, fn also warns if no example
            of a batch has a finite gradient, and if the first batch's clipped sum is
            zero for a part of the model. Under jit, fn does not check these two cases,
            but the function of `metrics` reports both.

        Privacy: grads has L2 sensitivity plan.clip_norm. If the clip norm follows a
        quantile, the sum in grads has L2 sensitivity 1, and the count has sensitivity
        1/2. Under REPLACE, these numbers are doubled. value and aux are not private.
        Random keys that are passed to the loss (for dropout) must be secret and new in
        every step. The reason is that an example's key is derived from its position in
        the batch, and that adding or removing one example changes the positions of
        other examples.
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
        """Transform a loss into a function that returns the `Metrics` of a batch.

        `Metrics` has the mean loss, the fraction of clipped gradients, and quantiles of
        the gradient norms.

        Args:
          loss_fn: as for `value_and_grad`.
          has_aux: as for `value_and_grad`.
          batched: as for `value_and_grad`.
          engine: as for `value_and_grad`.
          microbatch_size: as for `value_and_grad`.

        Returns:
          `fn(model, examples, *others)`, which returns the `Metrics` of the valid
          examples. Each call computes the gradients again, so call fn in few steps.
          If the clip norm follows a quantile, fn also has the argument clip_norm, as
          for `value_and_grad`.

        Raises:
          ValueError: as for `value_and_grad`.
          RuntimeError: as for `value_and_grad`.

        Warns:
          UserWarning: as for `value_and_grad`.

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
        """Make the private optimizer: add noise, divide by the batch size, apply inner.

        Args:
          inner: an optax optimizer whose update needs only the gradients and the
            parameters, and which does not read the data.
          key: one typed key, from `dpjax.random_key`, for this run alone. The sampler
            of the run may use the same key.
          buffer: for correlated noise with arithmetic="real", as for
            `dpjax.correlated_noise`. In all other cases, buffer has no effect.

        Returns:
          An optax transformation of the grads that `value_and_grad` returns. Parameters
          that are not arrays of floats do not change. After num_steps steps, an update
          raises a ValueError outside jit, and gives NaN inside jit. For batches too
          large for the device use `dpjax.accumulate`, and not `optax.MultiSteps`.

        Raises:
          ValueError: key is not a typed key; the plan's strategy does not support
            buffer="regenerate". At init and update: a part of the tree is masked, as by
            `optax.masked` around this optimizer (put the mask into inner instead). At
            init, with arithmetic="discrete": the steps and parameters need more random
            numbers than the guarantee allows. At update: further arguments, such as
            value=, are given; the plan has a `QuantileClip`, and the updates are not a
            `Bounded`.

        Privacy: the updates of all steps, together with any function of these updates,
        have the plan's `guarantee`. The state of the optimizer holds the key, and is as
        secret as the data.
        """
        return release.optimizer(self, inner, key, buffer)

    def clip_norm_of(self, state: optax.OptState) -> jax.Array:
        """The clip norm of the next step, f32[], for a plan with a `QuantileClip`.

        Args:
          state: the state of this plan's `optimizer`.

        Returns:
          The clip norm, which is an argument of the function that `value_and_grad`
          returns.

        Raises:
          ValueError: the plan has no `QuantileClip`; state is not the state of the
            plan's optimizer.
        """
        if self.quantile is None:
            raise ValueError(
                "clip_norm_of must be called only for plans with a QuantileClip; this "
                f"plan has the clip norm {self.clip_norm!r}, and value_and_grad needs "
                "no clip_norm."
            )
        return release.clip_norm_of(state)
