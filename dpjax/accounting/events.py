"""Events: typed and nested records that describe the mechanisms that ran on data.

An event states the mechanism and its parameters, but no privacy loss. `pld` and
`profiles` compute the privacy loss from events. Events are pytrees of their numbers, so
that they pass through `jax.jit`, `jax.vmap` and `jax.grad`. An event of plain numbers
can be compared, hashed and written as JSON (`to_dict`, `from_dict`).
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar, dataclass_transform

import jax

from dpjax._core import plain, validate
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax._matrices.strategy import StrategySpec
from dpjax.accounting import _repetitions

if TYPE_CHECKING:
    from dp_accounting import DpEvent

T = TypeVar("T")

# The metadata of a field that is not a number and is part of the pytree's structure.
STATIC = {"static": True}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree.

    The children of the pytree are the fields without the metadata `STATIC`. The class
    and the fields with the metadata `STATIC` form the structure of the pytree.

    `jax.tree_util.register_dataclass` is not used, because the structures of two
    registered classes are equal if their static fields are equal (JAX 0.10 to 0.12). A
    compiled function would then confuse two mechanisms.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore
    static = [x.name for x in fields if x.metadata.get("static")]
    names = [x.name for x in fields if x.name not in static]

    def flatten(event: T) -> tuple[list[Any], Any]:
        children = [(jax.tree_util.GetAttrKey(x), getattr(event, x)) for x in names]
        return children, (cls, tuple(getattr(event, x) for x in static))

    def unflatten(structure: Any, children: Any) -> T:
        values = (*children, *structure[1])
        return cls(**dict(zip(names + static, values, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


Order = Literal["fixed", "reshuffled"]


@record
class Gaussian:
    """A Gaussian mechanism on all of the data.

    Attributes:
      mu: sensitivity over noise standard deviation, f[*b], at least 0.
    """

    mu: ArrayLike


class _HasAdjacency:
    def __post_init__(self: Any) -> None:
        validate.adjacency(self.adjacency)


@record
class PoissonGaussian(_HasAdjacency):
    """The Gaussian mechanism on a Poisson sample.

    Attributes:
      noise_multiplier: noise standard deviation over clip norm, f[*b].
      sampling_rate: the probability that an example takes part, f[*b].
      adjacency: which data sets are compared.
    """

    noise_multiplier: ArrayLike
    sampling_rate: ArrayLike
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)


@record
class TruncatedPoissonGaussian(_HasAdjacency):
    """The Gaussian mechanism on a Poisson sample, truncated to a batch of fixed shape.

    Attributes:
      noise_multiplier: noise standard deviation over clip norm, f[*b].
      sampling_rate: the probability that an example takes part, f[*b].
      num_examples: the size of the larger data set, f[*b], a whole number, at least 1.
      max_batch_size: the capacity of a batch, f[*b], a whole number, at least 1. If the
        sample has more examples, a uniformly random subset of max_batch_size examples
        takes part.
      adjacency: which data sets are compared.
    """

    noise_multiplier: ArrayLike
    sampling_rate: ArrayLike
    num_examples: ArrayLike
    max_batch_size: ArrayLike
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)


@record
class FixedSizeGaussian:
    """A Gaussian mechanism on a random batch of fixed size, under REPLACE.

    REPLACE is the only adjacency of this event, because the bound for this event
    (`pld.subsampled_gdp`) is proven for the replacement of one example. Under REPLACE,
    both data sets have the same size, and therefore the same sampling rate.

    Attributes:
      mu: the GDP parameter of the mechanism if one example of the batch is replaced,
        f[*b], at least 0. For a clipped sum, mu is 2 over the noise multiplier.
      sampling_rate: batch size over number of examples, f[*b].
    """

    mu: ArrayLike
    sampling_rate: ArrayLike
    adjacency = Adjacency.REPLACE  # one value for all events, not a field


@record
class RandomAllocation(_HasAdjacency):
    """An epoch in which each example takes part in one step, chosen at random.

    Attributes:
      noise_multiplier: noise standard deviation over clip norm, f[*b].
      num_steps: the number of steps in the epoch, f[*b], a whole number, at least 1.
      adjacency: which data sets are compared.
    """

    noise_multiplier: ArrayLike
    num_steps: ArrayLike
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)


@record
class CorrelatedGaussian(_HasAdjacency):
    """A run with correlated noise, and with batches whose order need not be secret.

    Attributes:
      noise_multiplier: the standard deviation of the independent noise z, divided by
        the clip norm, f[*b].
      strategy: the matrix C of the correlated noise C⁻¹z.
      num_steps: the number of steps of the run.
      steps_per_epoch: the number of steps in an epoch. Every example takes part in at
        most one step of each epoch.
      order: "fixed" if an example takes part in the same step of every epoch, and
        "reshuffled" if this step can differ between epochs.
      adjacency: which data sets are compared.
    """

    noise_multiplier: ArrayLike
    strategy: StrategySpec = dataclasses.field(metadata=STATIC)
    num_steps: int = dataclasses.field(metadata=STATIC)
    steps_per_epoch: int = dataclasses.field(metadata=STATIC)
    order: Order = dataclasses.field(metadata=STATIC)
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)


@record
class RandomBins(_HasAdjacency):
    """A run in which every example takes part in one random step of each epoch.

    Each step of an epoch is a bin. An example picks a bin uniformly at random, and
    independently of the other examples.

    Attributes:
      noise_multiplier: the standard deviation of the independent noise z, divided by
        the clip norm.
      strategy: the matrix C of the correlated noise C⁻¹z; None for independent noise.
      num_steps: the number of steps of the run.
      steps_per_epoch: the number of steps in an epoch.
      num_examples: the size of the larger data set.
      max_batch_size: the capacity of a batch. If more than max_batch_size examples pick
        a step, only max_batch_size of these examples take part.
      fresh: True if examples pick a new step in every epoch; False if they pick a step
        once, and take part in this step of every epoch.
      adjacency: which data sets are compared.
    """

    noise_multiplier: float
    strategy: StrategySpec | None = dataclasses.field(metadata=STATIC)
    num_steps: int = dataclasses.field(metadata=STATIC)
    steps_per_epoch: int = dataclasses.field(metadata=STATIC)
    num_examples: int = dataclasses.field(metadata=STATIC)
    max_batch_size: int = dataclasses.field(metadata=STATIC)
    fresh: bool = dataclasses.field(metadata=STATIC)
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)


@record
class GaussianMixture(_HasAdjacency):
    """The Gaussian mechanism with a random sensitivity.

    Attributes:
      noise_multiplier: noise standard deviation in the units of `sensitivities`, f[*b].
      sensitivities: the possible norms of an example's contribution, each f[*b] and at
        least 0.
      weights: the probability of each sensitivity, f[*b] each. If only a bound on the
        contribution's norm is known, the sensitivities and weights must satisfy
        P[norm > s] <= P[sensitivity > s] for each s.
      adjacency: which data sets are compared, ADD_REMOVE or ZERO_OUT.

    Raises:
      ValueError: adjacency is not ADD_REMOVE or ZERO_OUT, or there are not as many
        weights as sensitivities.
    """

    noise_multiplier: ArrayLike
    sensitivities: tuple[ArrayLike, ...]
    weights: tuple[ArrayLike, ...]
    adjacency: Adjacency = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        if validate.adjacency(self.adjacency) is Adjacency.REPLACE:
            raise ValueError(f"adjacency must be ADD_REMOVE or ZERO_OUT; got {self!r}.")
        # In a tree for the in_axes of jax.vmap, a field may be None.
        fields = self.sensitivities, self.weights
        if len({len(x) for x in fields if isinstance(x, tuple | list)}) > 1:
            raise ValueError(f"weights must be as many as sensitivities; got {self!r}.")


@record
class Laplace:
    """The Laplace mechanism on all of the data.

    Attributes:
      scale: the scale of the noise over the L1 sensitivity, f[*b].
    """

    scale: ArrayLike


@record
class DiscreteLaplace:
    """The Laplace mechanism on integers: P(z) ∝ e^{−|z|/scale} for the noise z.

    Attributes:
      scale: the scale of the noise, f[*b].
      sensitivity: the L1 sensitivity, a whole number.
    """

    scale: ArrayLike
    sensitivity: int = dataclasses.field(metadata=STATIC)


@record
class DiscreteGaussian:
    """Discrete Gaussian noise z added to an integer, with P(z) ∝ e^{−z²/(2 stddev²)}.

    Attributes:
      stddev: the parameter of the noise, f[*b]. The standard deviation of z is at most
        stddev.
      sensitivity: the largest difference of the integer between two neighbouring data
        sets, a whole number.
    """

    stddev: ArrayLike
    sensitivity: int = dataclasses.field(metadata=STATIC)


@record
class RandomizedResponse:
    """Randomised response: the answer is the true bucket or a uniformly random bucket.

    The number of answers reveals the number of examples. So REPLACE is the only
    adjacency of this event.

    Attributes:
      noise_parameter: the probability that the answer is the random bucket, f[*b].
      num_buckets: the number of buckets, f[*b], a whole number.
    """

    noise_parameter: ArrayLike
    num_buckets: ArrayLike
    adjacency = Adjacency.REPLACE  # one value for all events, not a field


@record
class Pure:
    """A mechanism of which only ε-DP is known, that is (ε, δ)-DP with δ = 0.

    Attributes:
      epsilon: ε, f[*b], at least 0.
    """

    epsilon: ArrayLike


@record
class EpsilonDelta:
    """A mechanism of which only one pair (ε, δ) is known, such as an external release.

    Attributes:
      epsilon: ε, f[*b], at least 0.
      delta: the δ for which epsilon holds, f[*b], in [0, 1). `pld` also allows δ = 1.
    """

    epsilon: ArrayLike
    delta: ArrayLike


# The types of events that have a privacy-loss distribution. `Repeated` and `Composed`
# contain only such events.
Step = (
    Gaussian
    | PoissonGaussian
    | TruncatedPoissonGaussian
    | FixedSizeGaussian
    | RandomAllocation
    | GaussianMixture
    | Laplace
    | DiscreteLaplace
    | DiscreteGaussian
    | RandomizedResponse
    | Pure
    | EpsilonDelta
)


@record
class Repeated:
    """An event that runs several times.

    Attributes:
      event: the event that runs.
      count: the number of times that the event runs, f[*b], a whole number.
    """

    event: Step
    count: ArrayLike = 1


@record
class Composed:
    """A sequence of events on the same data.

    A mechanism may use the outputs of earlier mechanisms. All numbers of the events,
    such as noise multipliers and sampling rates, must be fixed before any output is
    seen.

    Attributes:
      steps: the events in their order, each as a `Repeated` event with its count.
    """

    steps: tuple[Repeated, ...]


@record
class OnLattice:
    """A run with discrete noise, on sums that are rounded to a lattice.

    The lattice is the set of multiples of one number. In total variation, the run's
    outputs are close to a post-processing of a run with Gaussian noise.

    Attributes:
      event: the run with Gaussian noise.
      total_variation: a bound, for any data set, on the total variation distance
        between the run's outputs and the outputs of the post-processing.
    """

    event: "Event"
    total_variation: float


@record
class Selection:
    """The best of K runs of a mechanism, by the score that each run outputs.

    K is a fixed number, or is drawn independently of the data. Only the best run is
    released. The other runs, and a random K, stay secret.

    Attributes:
      event: one run, whose output includes its score.
      repetitions: the distribution of K, such as `accounting.selection.Poisson`.
    """

    event: "Event"
    repetitions: _repetitions.Repetitions = dataclasses.field(metadata=STATIC)


Event = (
    Step | Repeated | Composed | CorrelatedGaussian | RandomBins | OnLattice | Selection
)


def to_dict(event: Event) -> dict[str, Any]:
    """Convert an event to a dictionary of plain values, for JSON and `from_dict`.

    Args:
      event: the event. Each of its numbers must be a concrete scalar.

    Returns:
      A dictionary with the name of the event's type under "type", and the event's
      fields. The number inf becomes the string "inf".

    Raises:
      ValueError: a number is traced, or is an array of several numbers.

    Example:
      >>> to_dict(Repeated(Gaussian(0.5), 3))
      {'type': 'Repeated', 'event': {'type': 'Gaussian', 'mu': 0.5}, 'count': 3}
    """
    return plain.to_plain(event, "event")


def from_dict(values: dict[str, Any]) -> Event:
    """Restore an event from the dictionary that `to_dict` returned.

    Args:
      values: the dictionary, or a copy of the dictionary read from JSON.

    Returns:
      The event.

    Raises:
      ValueError: no event has these values.

    Example:
      >>> from_dict({"type": "Gaussian", "mu": 0.5})
      Gaussian(mu=0.5)
    """
    return plain.from_plain(Event, values, "event")


def _dp_accounting() -> Any:
    """Import and return `dp_accounting.dp_event`, from an optional dependency."""
    from dp_accounting import dp_event

    return dp_event


def to_dp_event(event: Event, adjacency: Adjacency) -> "DpEvent":
    """Convert an event to a `DpEvent` of dp-accounting, which must be installed.

    Args:
      event: the event. Each of its numbers must be a concrete scalar.
      adjacency: the adjacency of the accountant that will read the result, since a
        `DpEvent` does not state an adjacency. dp-accounting's REPLACE_SPECIAL is
        ZERO_OUT.

    Returns:
      The `DpEvent`. The noise multiplier of a `GaussianDpEvent` is the noise standard
      deviation divided by the clip norm, as dp-accounting defines noise multipliers.
      Under REPLACE, the sensitivity is twice the clip norm. dp-accounting's
      PLDAccountant uses this sensitivity, but its RdpAccountant (0.6.0) uses the clip
      norm.

    Raises:
      ValueError: dp-accounting has no equivalent event; the adjacency of the event
        differs from `adjacency`; a number is traced, or is an array of several numbers.

    Example:
      >>> to_dp_event(Repeated(Gaussian(0.5), 3), Adjacency.ADD_REMOVE)
      SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=3)
    """
    dp = _dp_accounting()
    validate.adjacency(adjacency)
    if adjacency is not getattr(event, "adjacency", adjacency):
        raise ValueError(f"event must have adjacency {adjacency!r}; got {event!r}.")
    match from_dict(to_dict(event)):  # with Python numbers
        case Composed(steps):
            return dp.ComposedDpEvent([to_dp_event(x, adjacency) for x in steps])
        case Repeated(one, float() | int() as count) if count >= 0 and count % 1 == 0:
            return dp.SelfComposedDpEvent(to_dp_event(one, adjacency), int(count))
        case Gaussian(mu):
            # μ is sensitivity over noise standard deviation; μ = 0 releases nothing.
            factor = adjacency.sensitivity_factor
            return dp.GaussianDpEvent(factor / mu) if mu else dp.NoOpDpEvent()
        case PoissonGaussian(noise, rate):
            return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
        case TruncatedPoissonGaussian(noise, rate, size, capacity):
            return dp.TruncatedSubsampledGaussianDpEvent(size, rate, capacity, noise)
        case GaussianMixture(noise, sensitivities, weights):
            return dp.MixtureOfGaussiansDpEvent(noise, sensitivities, weights)
        case Laplace(math.inf) | DiscreteLaplace(math.inf):
            return dp.NoOpDpEvent()
        case Laplace(scale):
            return dp.LaplaceDpEvent(adjacency.sensitivity_factor * scale)
        case DiscreteLaplace(scale, sensitivity):
            norm = sensitivity / adjacency.sensitivity_factor
            if scale and norm == int(norm):
                return dp.DiscreteLaplaceDpEvent(1 / scale, int(norm))
        case RandomizedResponse(parameter, buckets):
            return dp.RandomizedResponseDpEvent(parameter, buckets)
        case Selection(one, law) if not isinstance(law, _repetitions.Fixed):
            # In dp-accounting, the Poisson distribution has an infinite shape, and no
            # distribution has a negative shape.
            shape = getattr(law, "shape", math.inf)
            if shape >= 0:
                one = to_dp_event(one, adjacency)
                return dp.RepeatAndSelectDpEvent(one, law.mean, shape)
    # For a batch of fixed size, a `DpEvent` needs the size of the batch and the size of
    # the data set. The event has only the ratio of both sizes.
    raise ValueError(f"event must have an equivalent in dp-accounting; got {event!r}.")


def from_dp_event(event: "DpEvent", adjacency: Adjacency) -> Event:
    """Convert a `DpEvent` of dp-accounting to an event.

    Args:
      event: a `DpEvent` of a mechanism that dpjax supports: Gaussian noise on all of
        the data, on a Poisson sample (truncated or not), on a random batch of fixed
        size, or with a random sensitivity; Laplace or discrete Laplace noise;
        randomised response; the release of nothing (`NoOpDpEvent`); or the release of
        the data (`NonPrivateDpEvent`). dpjax also supports a composition of these
        mechanisms, and the best of several runs of one mechanism or composition.
      adjacency: the adjacency of the dp-accounting accountant that would read `event`,
        since a `DpEvent` does not state an adjacency. dp-accounting's REPLACE_SPECIAL
        is ZERO_OUT.

    Returns:
      The event. A composition of compositions becomes one `Composed`. If `to_dp_event`
      made the `DpEvent`, the result is equivalent to the original event, and has the
      same numbers up to rounding. The result may have another type: Laplace noise of
      infinite scale becomes `Gaussian(0.0)`.

    Raises:
      ValueError: dpjax has no equivalent event under this adjacency.

    Example:
      >>> import dp_accounting
      >>> from_dp_event(dp_accounting.GaussianDpEvent(4.0), Adjacency.REPLACE)
      Gaussian(mu=0.5)
    """
    dp = _dp_accounting()
    validate.adjacency(adjacency)
    match event:
        case dp.RepeatAndSelectDpEvent(event=one, mean=mean, shape=shape):
            laws = {
                0: _repetitions.Logarithmic,
                1: _repetitions.Geometric,
                math.inf: _repetitions.Poisson,
            }
            binomial = functools.partial(_repetitions.TruncatedNegativeBinomial, shape)
            law = laws.get(shape, binomial)(mean)
            return Selection(from_dp_event(one, adjacency), law)
    steps = tuple(_steps(event, 1, adjacency))
    if isinstance(event, dp.ComposedDpEvent) or len(steps) != 1:
        return Composed(steps)
    return steps[0] if isinstance(event, dp.SelfComposedDpEvent) else steps[0].event


def _steps(event: Any, count: int, adjacency: Adjacency) -> list[Repeated]:
    """Convert `count` runs of a `DpEvent` to events, without nested compositions."""
    dp = _dp_accounting()
    if isinstance(event, dp.ComposedDpEvent):
        return [x for part in event.events for x in _steps(part, count, adjacency)]
    if isinstance(event, dp.SelfComposedDpEvent):
        count *= validate.static_int("count", event.count, minimum=0)
        return _steps(event.event, count, adjacency)
    return [Repeated(_convert_step(event, adjacency), count)]


def _convert_step(event: Any, adjacency: Adjacency) -> Step:
    """Convert a `DpEvent` that is not a composition to an event."""
    dp, factor = _dp_accounting(), adjacency.sensitivity_factor
    match event:
        case dp.NoOpDpEvent():
            return Gaussian(0.0)
        case (
            dp.NonPrivateDpEvent()
            | dp.GaussianDpEvent(noise_multiplier=0)
            | dp.LaplaceDpEvent(noise_multiplier=0)
            # dp-accounting's accountant also counts this event as non-private: the
            # probabilities of all integers are 0.
            | dp.DiscreteLaplaceDpEvent(noise_parameter=0)
        ):
            return Gaussian(math.inf)
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return Gaussian(factor / float(noise))
        case dp.LaplaceDpEvent(noise_multiplier=noise):
            return Laplace(float(noise) / factor)
        case dp.DiscreteLaplaceDpEvent(noise_parameter=noise, sensitivity=norm):
            return DiscreteLaplace(1 / float(noise), int(factor) * norm)
        case dp.RandomizedResponseDpEvent() if adjacency is Adjacency.REPLACE:
            return RandomizedResponse(event.noise_parameter, event.num_buckets)
        case dp.MixtureOfGaussiansDpEvent() if adjacency is not Adjacency.REPLACE:
            return GaussianMixture(
                event.standard_deviation,
                tuple(event.sensitivities),
                tuple(event.sampling_probs),
                adjacency,
            )
        case dp.PoissonSampledDpEvent(event=dp.GaussianDpEvent(noise_multiplier=noise)):
            return PoissonGaussian(noise, event.sampling_probability, adjacency)
        case dp.SampledWithoutReplacementDpEvent(
            event=dp.GaussianDpEvent(noise_multiplier=noise)
        ) if adjacency is Adjacency.REPLACE and noise:
            rate = event.sample_size / event.source_dataset_size
            return FixedSizeGaussian(factor / float(noise), rate)
        case dp.TruncatedSubsampledGaussianDpEvent():
            return TruncatedPoissonGaussian(
                event.noise_multiplier,
                event.sampling_probability,
                event.dataset_size,
                event.truncated_batch_size,
                adjacency,
            )
    raise ValueError(
        f"event must have an equivalent in dpjax under {adjacency!r}; got {event!r}."
    )
