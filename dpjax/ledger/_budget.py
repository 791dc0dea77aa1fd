"""A privacy budget that is shared by all mechanisms that read the data."""

import dataclasses
import math
from typing import Any, Literal

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import scope
from dpjax._plan.plan import Plan
from dpjax._plan.solve import plan as make_plan
from dpjax.accounting import composition, gdp
from dpjax.accounting.composition import GaussianBound, add_up
from dpjax.accounting.events import Event

Composition = Literal["adaptive", "fixed"]
Unit = Literal["example", "user"]

# The allowance for rounding in a sum of squares. With this allowance, draws may take
# all of a budget. The budget's μ is rounded down by more than the allowance.
_ROUNDING = 1e-12
# The search for the noise of a plan tries at most this many plans. The search ends
# earlier if a plan's μ is below the target μ by at most this fraction.
_TRIALS, _UNUSED = 6, 2e-3


@dataclasses.dataclass(frozen=True)
class Draw:
    """One mechanism whose privacy cost was drawn from a budget.

    Attributes:
      name: a description of the released value.
      event: the description of the mechanism for accountants.
      cost: the mechanism's cost to a budget with adaptive composition: a GDP parameter
        `mu`; a `slack`, which is a part of δ for a mechanism without a GDP parameter;
        and a `total_variation`, the distance between the outputs with discrete and
        with continuous noise. In a budget with fixed composition, `mu` is NaN, and the
        other two numbers are 0.
    """

    name: str
    event: Event
    cost: GaussianBound


@dataclasses.dataclass(frozen=True)
class Budget:
    """A privacy budget, and all mechanisms that have drawn from the budget.

    `dpjax.budget` makes a budget. A budget is immutable: `draw` returns a new one.

    Attributes:
      epsilon: the limit on the ε of all mechanisms together, past and future ones.
      delta: the limit on the δ of all mechanisms together, past and future ones.
      adjacency: the relation between the data sets that the guarantee compares.
      composition: "adaptive" if outputs of earlier mechanisms may determine a later
        mechanism; "fixed" if all mechanisms are fixed before any output is seen.
      slack: the share of δ that is reserved for mechanisms without a GDP parameter.
      unit: the unit of privacy, "example" or "user".
      draws: the mechanisms that have drawn from the budget.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    composition: Composition
    slack: float
    unit: Unit
    draws: tuple[Draw, ...] = ()

    @property
    def left(self) -> GaussianBound:
        """The part of an adaptive budget that remains for further mechanisms.

        `mu` is the largest GDP parameter that one further mechanism may have. `slack`
        is the remaining part of δ for mechanisms without a GDP parameter. For a
        mechanism with discrete noise, `slack` must also cover the distance, in total
        variation, of the outputs from the outputs with continuous noise.
        `total_variation` is the largest distance that `slack` covers.

        Raises:
          ValueError: composition is "fixed". Such a budget does not add up the squares
            of GDP parameters.
        """
        if self.composition == "fixed":
            raise ValueError("composition must be 'adaptive' for left; got 'fixed'.")
        squares, probability = self._spent
        mu = math.sqrt(max(self._mu**2 - squares, 0.0))
        # The margin for rounding allows a draw to take all of the rest.
        reserved = self.slack * self.delta * (1 - _ROUNDING)
        slack = max(reserved - probability, 0.0)
        return GaussianBound(mu, slack, slack / self._of_total_variation)

    @property
    def epsilon_if_fixed(self) -> float:
        """The ε of all draws so far, if they were all fixed before any output was seen.

        This ε is rounded up. In an adaptive budget, this ε is usually below the
        budget's `epsilon`, but can exceed `epsilon` if many draws have no GDP
        parameter. If an earlier output determined a draw, only the budget's `epsilon`
        holds.
        """
        return self._total()

    def draw(
        self, release: Any, *, slack: float | None = None, name: str = ""
    ) -> "Budget":
        """Return the budget after one more mechanism.

        Call `draw` before the mechanism runs.

        Args:
          release: an event of `accounting.events`, or a record that contains an event:
            a `Plan`, a plan's `guarantee`, or a result of `dpjax.statistics`. Pass the
            record if you have one, since a Gaussian event states no adjacency. If
            `jax.vmap` makes n releases, call `draw` n times. `draw` checks the unit
            only for plans, since an event states no unit.
          slack: for adaptive composition, the amount of δ, such as 1e-7, that a
            mechanism without a GDP parameter takes from the budget; None for half of
            `left.slack`. The larger this amount, the smaller the GDP parameter that the
            mechanism also takes. `slack` is an amount of δ, whereas `Budget.slack` is a
            share of δ. An `EpsilonDelta` event takes its own δ instead.
          name: a description of the released value; "" for the type of the event.

        Returns:
          The new budget; the old one is unchanged.

        Raises:
          ValueError: the mechanism takes more than the rest of the budget, has no
            finite cost, or is stated for another adjacency or unit; release has no
            event; composition is "adaptive", and slack is not in [0, 1).
        """
        event = self._check(release)
        name = name or type(event).__name__
        if self.composition == "fixed":
            cost = GaussianBound(math.nan, 0.0, 0.0)
            total = self._total(event)
            if not total <= self.epsilon:
                raise ValueError(
                    f"release must keep the total ε at most {self.epsilon:g}; with "
                    f"{name!r} ({event!r}) the total ε would be {total:.6g}."
                )
        else:
            cost = self._cost(event, slack)
        return dataclasses.replace(self, draws=(*self.draws, Draw(name, event, cost)))

    def plan(
        self, *, share: float = 1.0, slack: float | None = None, **arguments: Any
    ) -> Plan:
        """Make a plan for a run that takes the rest of the budget, or a share of it.

        Args:
          share: the share that the run takes, in (0, 1], of `left.mu`², the square of
            the remaining GDP parameter; must be 1 with composition "fixed".
          slack: as for `draw`.
          **arguments: the arguments of `dpjax.plan`, except epsilon, delta, adjacency
            and unit, which the budget determines. The plan's epsilon is the ε of this
            run alone, at the budget's δ.

        Returns:
          The plan, which `draw` accepts with the same slack. The plan's GDP parameter
          is usually at least 99.8 % of the largest that the share allows, and then at
          most 0.4 % of the share remains unused. With composition "fixed", these
          percentages refer instead to the GDP parameter of the Gaussian mechanism that
          has the same ε, at the budget's δ, as the run and all draws together.

        Raises:
          ValueError: share is out of range, or is too small for a plan with these
            arguments; nothing remains of the budget; composition is "adaptive", and
            `left.slack` does not cover the slack and the plan's discrete noise; an
            argument is given that the budget determines; or an argument is invalid for
            `dpjax.plan`.

        Example:
          >>> import dpjax
          >>> from dpjax.accounting.events import Gaussian
          >>> account = dpjax.budget(2.0, 1e-5, adjacency=dpjax.Adjacency.ZERO_OUT)
          >>> account = account.draw(Gaussian(0.1), name="mean of the features")
          >>> run = account.plan(num_examples=1000, batch_size=1000, num_steps=50,
          ...                    clip_norm=1.0, sampling="fixed")
          >>> print(f"{run.guarantee.mu:.4f}")
          0.4886
          >>> account = account.draw(run, name="training")
          >>> print(account.left.mu < 1e-3)
          True
        """
        for name in ("epsilon", "delta", "adjacency", "unit"):
            if name in arguments:
                raise ValueError(
                    f"{name} must not be given to Budget.plan, which takes this value "
                    f"from the budget; got {arguments[name]!r}."
                )
        validate.scalar("share", share)
        fixed = self.composition == "fixed"
        if not 0 < share <= 1 or (share < 1 and fixed):
            raise ValueError(
                f"share must be in (0, 1], and 1 for 'fixed' draws; got {share!r}."
            )
        goal = self._mu if fixed else math.sqrt(share) * self.left.mu
        aim = goal
        best: Plan | None = None
        for _ in range(_TRIALS):
            with scope():
                target = float(gdp.epsilon(aim, self.delta)) if aim > 0 else 0.0
            if not target > 0:
                break
            trial = make_plan(
                **arguments,
                epsilon=target,
                delta=self.delta,
                adjacency=self.adjacency,
                unit=self.unit,
            )
            mu = self._used(trial.guarantee.event, slack)
            # The run's part of μ² changes almost like that of a Gaussian mechanism.
            if mu <= goal:
                best = trial
                if mu >= goal * (1 - _UNUSED) or mu == 0:
                    break
            aim = aim * (goal * (1 - _UNUSED / 2) / mu)
        if best is None:
            raise ValueError(
                "share must be large enough for a plan with the given arguments; got "
                f"{share!r}. What remains is reported by print(budget)."
            )
        if not fixed:
            self._cost(best.guarantee.event, slack)  # raises what `draw` would raise
        return best

    def __str__(self) -> str:
        """The budget in words.

        For composition "adaptive", squares of GDP parameters μ add up. For each
        mechanism and for the rest of the budget, the text then states the share of the
        budget's μ², and the share of δ unless this share is 0. The share of δ of a
        mechanism does not include the part that the mechanism takes for discrete noise.
        For "fixed", the text states the event of each mechanism, and the ε of all
        mechanisms so far.
        """
        lines = [
            f"(ε = {self.epsilon:g}, δ = {self.delta:g})-DP under "
            f"{self.adjacency.name} of one {self.unit}, {self.composition} draws:"
        ]
        if self.composition == "fixed":
            lines += [f"  {x.name}: {x.event}" for x in self.draws]
            return "\n".join([*lines, f"  ε so far: {self.epsilon_if_fixed:.4g}"])
        rows = [(x.name, x.cost) for x in self.draws] + [("left", self.left)]
        lines += [
            f"  {name}: {cost.mu**2 / self._mu**2:.1%} of μ²"
            + (f", {cost.slack / self.delta:.1%} of δ" if cost.slack else "")
            for name, cost in rows
        ]
        return "\n".join(lines)

    @property
    def _mu(self) -> float:
        """The limit on the GDP parameter μ of all draws together, rounded down."""
        # For fixed draws, the total uses all of δ.
        reserved = 0.0 if self.composition == "fixed" else self.slack
        with scope():
            mu = float(gdp.mu(self.epsilon, self.delta * (1 - reserved)))
        return mu * (1 - 2 * _ROUNDING)

    @property
    def _of_total_variation(self) -> float:
        """The factor 1 + e^ε for the budget's ε, rounded up; at most 1 + e^700.

        If noise on a lattice moves a mechanism's outputs by τ in total variation, the
        mechanism takes (1 + e^ε) τ of the budget's δ.
        """
        return (1 + math.exp(min(self.epsilon, 700.0))) * (1 + _ROUNDING)

    @property
    def _spent(self) -> tuple[float, float]:
        """The sum of μ² over all draws, and the part of δ that the draws have taken.

        Both numbers are rounded up. Here μ is the GDP parameter of a draw.
        """
        costs = [x.cost for x in self.draws]
        squares = add_up(x.mu**2 for x in costs)
        return squares, add_up(map(self._probability, costs))

    def _probability(self, cost: GaussianBound) -> float:
        """The part of δ that a mechanism takes from the budget.

        `cost.slack` is the part for a mechanism without a GDP parameter. Discrete noise
        that moves the outputs by τ in total variation adds the part (1 + e^ε) τ.
        """
        return cost.slack + self._of_total_variation * cost.total_variation

    def _total(self, *more: Event) -> float:
        """The ε of all draws so far and of the events `more` together.

        This ε holds if all of these events were fixed before any output was seen.
        """
        events = [*(x.event for x in self.draws), *more]
        with scope():
            return composition.epsilon(events, self.delta)

    def _used(self, event: Event, slack: float | None) -> float:
        """The GDP parameter that `plan` compares with its target.

        With adaptive composition, the result is the GDP parameter of the event alone.
        With fixed composition, the result is the μ of the Gaussian mechanism that has
        the same ε, at the budget's δ, as the event and all draws together. The event
        and the draws need not be μ-GDP for this μ.
        """
        if self.composition == "adaptive":
            return self._bound(event, slack).mu
        with scope():
            return float(gdp.mu(self._total(event), self.delta))

    def _bound(self, event: Event, slack: float | None) -> GaussianBound:
        """The cost of an event with the given slack.

        The slack is the amount of δ that a mechanism without a GDP parameter takes. If
        `slack` is None, the slack is half of `left.slack`.
        """
        slack = self.left.slack / 2 if slack is None else slack
        return composition.gaussian_bound(event, slack)

    def _cost(self, event: Event, slack: float | None) -> GaussianBound:
        """Return an event's cost to an adaptive budget.

        Raises:
          ValueError: the cost is infinite, or exceeds the rest of the budget.
        """
        squares, probability = self._spent
        cost = self._bound(event, slack)
        if not math.isfinite(cost.mu):
            # The slack of the cost is 0 for a mechanism that has a GDP parameter.
            given = self.left.slack / 2 if slack is None else slack
            raise ValueError(
                f"release must have a finite μ; got {event!r}, whose μ is infinite "
                f"with a slack of {given:g}. A mechanism without a GDP parameter "
                "needs a slack above 0 (dpjax.budget(..., slack=0.1))."
            )
        if not squares + cost.mu**2 <= self._mu**2 * (1 + _ROUNDING):
            raise ValueError(
                f"release must have a μ of at most the remaining {self.left.mu:.6g}; "
                f"got {event!r} with a μ of {cost.mu:.6g}."
            )
        reserved = self.slack * self.delta
        if not probability + self._probability(cost) <= reserved:
            raise ValueError(
                "release must use at most the remaining slack of δ, "
                f"{self.left.slack:.6g}; got {event!r}, which uses "
                f"{self._probability(cost):.6g}."
            )
        return cost

    def _check(self, release: Any) -> Event:
        """Return the event that a release states.

        Raises:
          ValueError: the release has another adjacency or unit than the budget, or
            states no event.
        """
        if isinstance(release, Plan):
            release = release.guarantee
        stated = getattr(release, "plan", release)
        for name, expected in (("adjacency", self.adjacency), ("unit", self.unit)):
            values = {getattr(x, name, None) for x in (release, stated)} - {None}
            if values - {expected}:
                raise ValueError(
                    f"{name} must be the budget's {name}, {expected!r}; got "
                    f"{', '.join(map(repr, values))} in {release!r}."
                )
        is_event = isinstance(release, Event)
        event = release if is_event else getattr(release, "event", release)
        _check_adjacency(event, self.adjacency)
        return event


def _check_adjacency(event: Any, adjacency: Adjacency) -> None:
    """Check the adjacency of an event, and of all events inside the event.

    The check accepts an event that states no adjacency.

    Raises:
      ValueError: an event has another adjacency, or `event` is not an event.
    """
    if not isinstance(event, Event):
        raise ValueError(
            "release must be an event of dpjax.accounting.events, a plan or a record "
            f"with an event; got {event!r}."
        )
    if getattr(event, "adjacency", adjacency) is not adjacency:
        raise ValueError(f"release must hold for {adjacency!r}; got {event!r}.")
    inner = getattr(event, "steps", None) or [getattr(event, "event", None)]
    for x in inner:
        if x is not None:
            _check_adjacency(x, adjacency)


def budget(
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency,
    composition: Composition = "adaptive",
    slack: float = 0.1,
    unit: Unit = "example",
) -> Budget:
    """Make a privacy budget (ε, δ) for all mechanisms that read the data.

    Statistics, searches, plans and evaluations draw from the budget: before a mechanism
    runs, `Budget.draw` subtracts the mechanism's cost.

    Args:
      epsilon: the ε of all draws together, positive.
      delta: the δ of all draws together, in (0, 1).
      adjacency: the relation between the data sets that the guarantee compares. The
        privacy cost of every draw must be for this adjacency.
      composition: "adaptive" if outputs of earlier mechanisms may determine a later
        mechanism, its noise, its number of steps, or whether the mechanism runs.
        "fixed" if all mechanisms are fixed before any output is seen.
      slack: the share of δ, in [0, 1), that is reserved for mechanisms without a GDP
        parameter, such as plans with Poisson batches or noise on a lattice. Only
        composition "adaptive" uses this share. With slack 0, the mechanisms with a GDP
        parameter have all of δ, and the only other mechanisms that can draw are `Pure`
        events, and `EpsilonDelta` events with δ = 0.
      unit: the unit of privacy, "example" or "user".

    Returns:
      A `Budget`.

    Raises:
      ValueError: a number is out of range; composition or unit is unknown; adjacency is
        not an `Adjacency`.

    Privacy: all draws together are (ε, δ)-DP. With "adaptive", the budget is a privacy
    filter: the squares of the GDP parameters of all draws add up to at most μ², where
    μ is the largest number for which μ-GDP implies (ε, (1 − slack) δ)-DP. A mechanism
    without a GDP parameter is treated as μ'-GDP, for some μ', except with a small
    probability, which is subtracted from the reserved share of δ
    (`accounting.composition.gaussian_bound`). With "fixed",
    `accounting.composition.epsilon` computes the total ε. This ε is usually smaller
    than with "adaptive", but does not hold if an earlier output determined a draw. The
    noise of each draw must be independent of all other noise. The guarantee does not
    cover mechanisms that read the data without a draw.

    Reference: Smith and Thakurta (2022), https://arxiv.org/abs/2210.17520; Koskela,
    Tobaben and Honkela (2023), https://arxiv.org/abs/2209.15596.

    Example:
      >>> import dpjax
      >>> from dpjax.accounting.events import Gaussian
      >>> account = budget(3.0, 1e-5, adjacency=dpjax.Adjacency.ADD_REMOVE)
      >>> account = account.draw(Gaussian(0.2), name="mean of the features")
      >>> print(account)
      (ε = 3, δ = 1e-05)-DP under ADD_REMOVE of one example, adaptive draws:
        mean of the features: 7.8% of μ²
        left: 92.2% of μ², 10.0% of δ
    """
    epsilon = validate.positive_float("epsilon", epsilon)
    delta = validate.positive_float("delta", delta)
    validate.open_unit("delta", delta)
    validate.one_of("composition", composition, ("adaptive", "fixed"))
    validate.one_of("unit", unit, ("example", "user"))
    validate.scalar("slack", slack)
    validate.half_open_unit("slack", slack)
    return Budget(
        epsilon, delta, validate.adjacency(adjacency), composition, float(slack), unit
    )
