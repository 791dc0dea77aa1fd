"""The guarantee of a run, as a statement for a paper and as a record for a machine.

The guarantee also lists the papers to cite for a run, as BibTeX entries.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.resources
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import scope
from dpjax._core.plain import to_plain
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax._plan.mechanisms import mechanism_of, released_event
from dpjax._plan.parameters import RunParameters, noise_of
from dpjax.accounting import events, fdp, gdp, profiles
from dpjax.noise._discrete import RUN_TOTAL_VARIATION

_ADJACENCY = {
    Adjacency.ADD_REMOVE: "one data set has one {unit} more",
    Adjacency.ZERO_OUT: "one {unit}'s contribution is replaced by zero",
    Adjacency.REPLACE: "one {unit} is replaced by another one",
}
_UNITS = {
    "example": (
        "each example is one unit of privacy, and all data of one person are in one "
        "example"
    ),
    "user": (
        "each user is one unit of privacy: a bounded number of each user's examples "
        "is used, the choice of these examples does not depend on other users, and "
        "the data of one user do not change the positions of other users in the data "
        "set"
    ),
}
_RELEASED = (
    "the parameters after every step, and everything that is computed from these "
    "parameters alone, but not losses, gradient norms, auxiliary outputs, or the "
    "optimizer's state with its key"
)
_ASSUMPTIONS = (
    "the number of {unit}s is public",
    "the batches, gradients and updates are computed by the plan, which is run once "
    "with one secret key",
    "the loss is computed for one example at a time, and its random keys are secret "
    "and new in every step",
    "the hyperparameters were not chosen on these data, or the privacy cost of this "
    "choice was accounted for",
)
_ARITHMETIC = {
    "real": (
        "arithmetic is real, Gaussian noise is ideal and random bits are uniform "
        "(floating-point numbers only approximate real arithmetic and ideal noise; "
        'arithmetic="discrete" removes this approximation)'
    ),
    "discrete": (
        "the generator's bits are uniform, the compiler computes integers exactly "
        "and floats by the standard model of rounding, and an example's contribution "
        "depends on its slot and on no other example"
    ),
}
# The words before the released values.
_RELEASED_BITS = {
    "real": "",
    "discrete": (
        "the bits that are released, with the total variation of the discrete noise "
        f"({RUN_TOTAL_VARIATION:.1e}) included in δ: "
    ),
}
_LIBRARY = """@misc{{dpjax,
  author = {{{{The dpjax authors}}}},
  title = {{{{dpjax: differentially private training in JAX}}}},
  note = {{Version {version}}},
}}"""
_FALSE_POSITIVES = (0.001, 0.01, 0.1)
# The values of δ at which the profile is evaluated to bound the power of attacks. Each
# point (ε, δ) alone gives a valid bound.
_DELTAS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3)


@dataclasses.dataclass(frozen=True)
class RunGuarantee:
    """The privacy guarantee of a planned run after a given number of its steps.

    The arguments of its methods must be concrete numbers, not traced ones.

    Attributes:
      plan: the numbers of the run.
      num_steps: the number of steps that are released.

    Example:
      >>> import dpjax
      >>> run = dpjax.plan(num_examples=1000, batch_size=100, num_steps=100,
      ...                  noise_multiplier=1.5, delta=1e-5, clip_norm=1.0)
      >>> print(f"{run.guarantee.epsilon(1e-5):.3f}")
      3.538
      >>> print(f"{run.guarantee.at(10).epsilon(1e-5):.3f}")
      1.298
    """

    plan: RunParameters
    num_steps: int

    @property
    def event(self) -> events.Event:
        """The privacy event of the released steps, from which accountants compute ε."""
        return released_event(self.plan.parameters(num_steps=self.num_steps))

    @property
    def profile(self) -> profiles.Profile:
        """The privacy profile: the functions ε(δ) and δ(ε), both rounded up."""
        with scope():  # as for the plan's ε: only ε is rounded to float32, and not μ
            return profiles.of(self.event)

    @property
    def mu(self) -> float | None:
        """The GDP parameter μ of a run with batches in a fixed or reshuffled order.

        With arithmetic="real", such a run is one Gaussian mechanism. For every other
        sampling, and with arithmetic="discrete", the value is None.
        """
        mu = self.profile.mu
        return None if mu is None else float(np.asarray(mu))

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε of the guarantee at a given δ, rounded up.

        Args:
          delta: δ, f[*b], in (0, 1).

        Returns:
          ε, f[*b]; inf if no finite ε is proven.

        Raises:
          ValueError: delta is not in (0, 1).
        """
        validate.open_unit("delta", delta)
        return self.profile.epsilon(delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ of the guarantee at a given ε, rounded up.

        Args:
          epsilon: ε, f[*b], non-negative.

        Returns:
          δ, f[*b].

        Raises:
          ValueError: epsilon is negative or NaN.
        """
        return self.profile.delta(epsilon)

    def tradeoff(self, alpha: ArrayLike) -> jax.Array:
        """A proven lower bound on the false-negative rate of every attack.

        Args:
          alpha: the attack's false-positive rate, f[*b], in [0, 1].

        Returns:
          The bound, f[*b], rounded down. If `mu` is not None, the bound is the
          trade-off curve of the Gaussian mechanism with this μ. Otherwise the bound
          follows from ε at a few values of δ. More values could only increase the
          bound.

        Raises:
          ValueError: alpha is not in [0, 1].
        """
        if self.mu is not None:
            return gdp.tradeoff(self.mu, alpha)
        deltas, epsilons = _compute_epsilons(self)
        # If no ε is finite, the only lower bound on the rate is 0.
        if not epsilons.size:
            return gdp.tradeoff(math.inf, alpha)
        return fdp.tradeoff(lambda _: jnp.asarray(deltas), alpha, epsilons=epsilons)

    def at(self, num_steps: int) -> "RunGuarantee":
        """The guarantee of a run that stops early.

        Args:
          num_steps: the number of steps of this run, from 1 to the plan's num_steps.
            The number must be fixed before the run. If the choice of the last step
            depends on values that the run released, only the guarantee of the whole
            plan holds. If the choice depends on values that the run did not release,
            such as a training loss, no guarantee holds.

        Raises:
          ValueError: num_steps is not an integer from 1 to the plan's num_steps.
        """
        steps = validate.static_int("num_steps", num_steps, minimum=1)
        validate.at_most(
            "num_steps", num_steps, self.plan.num_steps, "the plan's num_steps, "
        )
        return dataclasses.replace(self, num_steps=steps)

    def record(self) -> dict[str, Any]:
        """The facts about the run that a report must state, as plain values.

        A report must also state facts that are not in this record, such as other uses
        of the data, and people other than the data's holder who see the keys.
        """
        plan = self.plan
        # An attack's power, its true-positive rate, is 1 minus its false-negative rate.
        powers = 1 - np.asarray(self.tradeoff(np.array(_FALSE_POSITIVES)), np.float64)
        return {
            "epsilon": float(self.epsilon(plan.delta)),
            "delta": plan.delta,
            "mu": self.mu,
            "num_steps": self.num_steps,
            "event": to_plain(self.event),
            "plan": to_plain(plan.parameters()),
            "adjacency_means": _ADJACENCY[plan.adjacency].format(unit=plan.unit),
            "unit_of_privacy": f"one {plan.unit}",
            "sampling_means": _describe_sampling(plan),
            "clip_norm_follows": plan.quantile and _quantile_settings(plan),
            "attack_true_positive_rate_at_most": dict(
                zip(map(str, _FALSE_POSITIVES), powers.tolist(), strict=True)
            ),
            "released": _RELEASED,
            "assumptions": [
                _UNITS[plan.unit],
                *(line.format(unit=plan.unit) for line in _ASSUMPTIONS),
                _ARITHMETIC[plan.arithmetic],
            ],
            "versions": {
                name: importlib.metadata.version(name) for name in ("dpjax", "jax")
            },
        }

    def to_json(self) -> str:
        """Return the `record` as JSON, in which an infinite ε is the string "inf"."""
        return json.dumps(to_plain(self.record()), indent=2, ensure_ascii=False)

    def citations(self) -> str:
        r"""BibTeX entries for this library and for the methods that the run uses.

        Example:
          >>> import dpjax
          >>> run = dpjax.plan(num_examples=1000, batch_size=100, num_steps=20,
          ...                  noise_multiplier=4.0, delta=1e-5, clip_norm=1.0,
          ...                  sampling="fixed", adjacency=dpjax.Adjacency.REPLACE)
          >>> import re
          >>> re.findall(r"{(\w+),\n", run.guarantee.citations())
          ['dpjax', 'abadi2016', 'balle2018', 'dong2022']
        """
        # An entry is included if one of its keywords names an event, a record, a
        # sampling or a kind of strategy of the run.
        run = self.plan.parameters()
        words = {run.sampling, *_type_names(to_plain(self.event))}
        words |= set(_type_names(to_plain(run)))
        if run.shape is not None:
            tree, poles = run.shape.tree_decay is not None, run.shape.denominator
            words.add("tree" if tree else "rational" if poles else "banded")
        entries = [_LIBRARY.format(version=importlib.metadata.version("dpjax"))]
        papers = importlib.resources.files("dpjax._plan").joinpath("papers.bib")
        for entry in papers.read_text("utf-8").strip().split("\n\n"):
            entry, keywords, _ = re.split(r"  keywords = {(.*)},\n", entry)
            if words & {*keywords.split(", ")}:
                entries.append(entry + "}")
        return "\n\n".join(entries)

    def _repr_markdown_(self) -> str:
        """The statement of the guarantee in Markdown, for notebooks."""
        # Markdown needs an empty line between paragraphs.
        return str(self).replace("\n", "\n\n")

    def __str__(self) -> str:
        """The statement of the guarantee for a paper, as plain text."""
        record = self.record()
        gdp_text = "" if record["mu"] is None else f" ({up(record['mu'], 4)}-GDP)"
        rates = ", ".join(
            f"{up(power, 4)} at a false-positive rate of {alpha}"
            for alpha, power in record["attack_true_positive_rate_at_most"].items()
        )
        return (
            f"({up(record['epsilon'])}, {record['delta']})-differential privacy"
            f"{gdp_text} where "
            f"{record['adjacency_means']} ({self.plan.adjacency.name}), for "
            f"{_RELEASED_BITS[self.plan.arithmetic]}{record['released']}.\n"
            f"Training: {record['num_steps']} steps; {record['sampling_means']}. Each "
            f"{self.plan.unit}'s gradient is clipped to an L2 norm of "
            f"{self.plan.clip_norm}; {_describe_noise(self.plan)}.\n"
            f"No attack on {record['unit_of_privacy']} has a true-positive rate above "
            f"{rates}.\n"
            f"Assumptions: {'; '.join(record['assumptions'])}.\n"
            f"dpjax {record['versions']['dpjax']}, jax {record['versions']['jax']}."
        )


@functools.lru_cache(maxsize=64)
def _compute_epsilons(guarantee: RunGuarantee) -> tuple[np.ndarray, np.ndarray]:
    """Compute ε at the values of δ that `RunGuarantee.tradeoff` uses.

    Returns:
      The k values of δ at which ε is finite, and the values of ε, both f64[k].
    """
    deltas = np.array([guarantee.plan.delta, *_DELTAS])
    epsilons = np.array([float(guarantee.epsilon(delta)) for delta in deltas])
    finite = epsilons < np.inf
    return deltas[finite], epsilons[finite]


def _quantile_settings(plan: RunParameters) -> dict[str, float]:
    """Two settings of the plan's `QuantileClip`, and two noise multipliers.

    One noise multiplier is for the sum of clipped gradients. The other noise multiplier
    is for the count of gradients whose norms are at most the clip norm.
    """
    assert plan.quantile is not None
    sigma, of_count = noise_of(plan.quantile, plan.noise_multiplier, plan.batch_size)
    return {
        "quantile": plan.quantile.quantile,
        "learning_rate": plan.quantile.learning_rate,
        "noise_multiplier_of_gradients": sigma,
        "noise_multiplier_of_count": of_count,
    }


def _describe_sampling(plan: RunParameters) -> str:
    """Describe the sampling in words; the letter b stands for a varying batch size."""
    sizes = {segment.batch_size for segment in plan.segments}
    size = str(sizes.pop()) if len(sizes) == 1 else "b"
    words = mechanism_of(plan).describe(size, plan.max_batch_size)
    return words.replace("example", plan.unit)


def _describe_noise(plan: RunParameters) -> str:
    """Describe in words the noise that is added to the sums of clipped gradients."""
    gaussian = "discrete Gaussian" if plan.arithmetic == "discrete" else "Gaussian"
    if plan.quantile:
        settings = _quantile_settings(plan)
        words = (
            "this norm follows a noisy count of the gradients within it "
            f"({plan.quantile}), with {gaussian} noise of standard deviation "
            f"{_format_down(settings['noise_multiplier_of_gradients'], 6)} times the "
            "norm on each sum and "
            f"{_format_down(settings['noise_multiplier_of_count'], 6)} on each count"
        )
    elif plan.shape is not None:
        return (
            f"noise C⁻¹z is added to the sums of all steps, where z is {gaussian} "
            f"noise of standard deviation {_format_down(plan.noise_multiplier, 6)} "
            "times this norm, drawn independently in every step, and C is "
            f"{plan.shape}"
        )
    else:
        words = (
            f"{gaussian} noise of standard deviation "
            f"{_format_down(plan.noise_multiplier, 6)} times this norm is added to "
            "each sum"
        )
    if plan.schedule:
        words += ", with the factors of the schedule "
        words += ", ".join(
            f"(noise {p.noise:g}, norm {p.clip:g}, b = {p.batch_size} from step "
            f"{p.start})"
            for p in plan.schedule
        )
    return f"{words}, drawn independently in every step"


def up(x: float, decimals: int = 3) -> str:
    """Format a number, rounded up to `decimals` decimals; "∞" for infinity."""
    if x == math.inf:
        return "∞"
    return f"{math.ceil(x * 10**decimals) / 10**decimals:.{decimals}f}"


def _format_down(x: float, decimals: int) -> str:
    """Format a noise multiplier, rounded down to `decimals` decimals."""
    return f"{math.floor(x * 10**decimals) / 10**decimals:.{decimals}f}"


def _type_names(plain: Any) -> Iterator[str]:
    """Yield `d["type"]` for every dictionary d in nested dictionaries and lists."""
    if isinstance(plain, dict):
        yield plain["type"]
        plain = [*plain.values()]
    if isinstance(plain, list):
        for value in plain:
            yield from _type_names(value)
