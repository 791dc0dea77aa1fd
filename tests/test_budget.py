"""Budgets: draws that are fixed beforehand, and draws chosen by earlier outputs."""

import math

import jax
import numpy as np
import pytest
from scipy.stats import binom, norm

import dpjax
from dpjax import Adjacency, ledger, statistics
from dpjax.accounting import composition, events, gdp, pld, profiles

ADD, ZERO = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT
RUN = events.Repeated(events.PoissonGaussian(1.1, 0.02, ADD), 200)


def exact_delta(mu, epsilon):
    """δ of μ-GDP at any ε, also below 0."""
    first = norm.cdf(mu / 2 - epsilon / mu)
    return first - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def poisson_delta(noise, rate, epsilon):
    """δ of one Poisson step under removal, by quadrature, at any ε."""
    y = np.linspace(-8 * noise, 8 * noise + 1, 2_001)
    idle = np.exp(-0.5 * (y / noise) ** 2)
    present = np.exp(-0.5 * ((y - 1) / noise) ** 2)
    mixed = (1 - rate) * idle + rate * present
    gap = mixed - np.exp(np.asarray(epsilon))[..., None] * idle
    width = (y[1] - y[0]) / (noise * math.sqrt(2 * math.pi))
    return np.sum(np.maximum(gap, 0.0), axis=-1) * width


# --- a mechanism as a Gaussian one


@pytest.mark.matrix
def test_bound_covers_randomised_response():
    """Of p = 0.7: the truth with probability 0.85, so that e^ε₀ = 17 / 3."""
    response, slack = events.RandomizedResponse(0.3, 2), 1e-3
    bound = composition.gaussian_bound(response, slack)
    epsilons = np.linspace(1e-6, math.log(17 / 3), 500)
    deltas = 0.85 - np.exp(epsilons) * 0.15
    covered = slack + (1 - slack) * exact_delta(bound.mu, epsilons)
    assert np.all(deltas <= covered * (1 + 1e-6))
    # A μ that is 2 % smaller does not cover the profile.
    less = slack + (1 - slack) * exact_delta(bound.mu * 0.98, epsilons)
    assert np.any(deltas > less)


@pytest.mark.diagonal
@pytest.mark.parametrize("slack", [1e-9, 1e-3])
def test_bound_from_few_points_equals_bound_from_all(slack, monkeypatch):
    response = events.RandomizedResponse(0.3, 2)
    few = composition.gaussian_bound(response, slack).mu
    monkeypatch.setattr(composition, "_SKIP", 1)
    every = composition.gaussian_bound(response, slack).mu
    np.testing.assert_allclose(few, every, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("slack", [1e-7, 1e-3])
def test_bound_covers_the_whole_profile(slack):
    bound = composition.gaussian_bound(RUN, slack)
    assert (bound.slack, bound.total_variation) == (slack, 0.0)
    with jax.enable_x64(True):
        epsilons = np.concatenate([[0.0], np.geomspace(1e-3, 6.0, 60)])
        deltas = np.asarray(profiles.of(RUN).delta(epsilons))
        covered = slack + (1 - slack) * exact_delta(bound.mu, epsilons + 1e-300)
        assert np.all(deltas <= covered * (1 + 1e-6))
        # A μ that is 2 % smaller does not cover the profile.
        less = slack + (1 - slack) * exact_delta(bound.mu * 0.98, epsilons + 1e-300)
        assert np.any(deltas > less)


def test_bound_of_events_with_known_numbers():
    assert composition.gaussian_bound(events.Gaussian(0.7), 0.0).mu == 0.7
    on_lattice = events.OnLattice(events.Gaussian(0.7), 1e-12)
    assert composition.gaussian_bound(on_lattice, 0.0) == (0.7, 0.0, 1e-12)
    one, delta = composition.gaussian_bound(events.EpsilonDelta(0.8, 1e-6), 0.0)[:2]
    assert delta == 1e-6
    # Randomised response tells a pair apart with probability e^ε / (1 + e^ε), and a
    # Gaussian mechanism with Φ(μ / 2): a smaller μ would not cover it.
    np.testing.assert_allclose(norm.cdf(one / 2), 1 / (1 + math.exp(-0.8)), rtol=1e-6)
    assert composition.gaussian_bound(RUN, 0.0).mu == math.inf
    for slack in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="slack"):
            composition.gaussian_bound(RUN, slack)


# --- a total that is fixed, and a choice that spoils it

# With these numbers the totals of both second mechanisms are at most 1.126.
FIRST, DELTA = events.Gaussian(1 / 4), 1.05e-5
SECOND = events.Gaussian(1 / 6.08)
RARE = events.PoissonGaussian(0.1, 1e-5, ADD)


def test_a_choice_between_equal_totals_exceeds_them():
    totals = [composition.epsilon([FIRST, x], DELTA) for x in (SECOND, RARE)]
    assert 1.09 < min(totals) <= max(totals) < 1.126
    epsilon = max(totals)
    # Output y of the first mechanism has loss y / 4 + 1 / 32 where y is normal without
    # the example; the second is chosen to have the larger δ at what is left of ε.
    y = np.linspace(-9.0, 9.0, 601)
    left = epsilon - (y / 4 + 1 / 32)
    worst = np.maximum(exact_delta(SECOND.mu, left), poisson_delta(0.1, 1e-5, left))
    chosen = np.sum(worst * np.exp(-(y**2) / 2)) * (y[1] - y[0]) / math.sqrt(2 * np.pi)
    assert chosen > 1.5 * DELTA
    account = dpjax.budget(epsilon, DELTA, adjacency=ADD, slack=0.2).draw(FIRST)
    with pytest.raises(ValueError, match="the remaining"):
        account.draw(SECOND)


@pytest.mark.slow
def test_a_budget_that_allows_either_choice_allows_for_the_choice():
    account = dpjax.budget(1.35, DELTA, adjacency=ADD, slack=0.2).draw(FIRST)
    account.draw(SECOND)
    with pytest.raises(ValueError, match="the remaining"):
        account.draw(RARE)
    account = dpjax.budget(1.35, 2.5e-5, adjacency=ADD, slack=0.6).draw(FIRST)
    account.draw(SECOND), account.draw(RARE, slack=1.2e-5)


def test_twenty_adaptive_draws_spend_the_planned_epsilon():
    epsilon, delta = 1.7, 3e-6
    account = dpjax.budget(epsilon, delta, adjacency=ZERO, slack=0.0)
    outputs = np.random.default_rng(0)
    for _ in range(19):
        share = outputs.uniform(0.01, 0.2)  # as an output might choose it
        account = account.draw(events.Gaussian(share * account.left.mu))
    account = account.draw(events.Gaussian(account.left.mu))
    with jax.enable_x64(True):
        mus = [x.event.mu for x in account.draws]
        total = float(gdp.epsilon(math.sqrt(math.fsum(m**2 for m in mus)), delta))
    np.testing.assert_allclose(total, epsilon, rtol=1e-9)
    assert account.left.mu < 1e-6
    with pytest.raises(ValueError, match="the remaining"):
        account.draw(events.Gaussian(1e-3))
    assert len(account.draws) == 20
    np.testing.assert_allclose(account.epsilon_if_fixed, epsilon, rtol=1e-6)


def test_fixed_draws_are_totalled_by_privacy_loss_distributions():
    account = dpjax.budget(2.0, 1e-5, adjacency=ADD, composition="fixed")
    drawn = account.draw(events.Gaussian(0.2)).draw(RUN, name="training")
    both = pld.convolve(pld.gaussian(0.2), profiles.of(RUN))
    assert drawn.epsilon_if_fixed >= float(pld.epsilon(both, 1e-5)) * (1 - 1e-6)
    np.testing.assert_allclose(
        drawn.epsilon_if_fixed, pld.epsilon(both, 1e-5), rtol=1e-5
    )
    with pytest.raises(ValueError, match="total ε"):
        drawn.draw(events.Gaussian(0.5))
    assert "training" in str(drawn)
    with pytest.raises(ValueError, match="composition"):
        _ = drawn.left
    assert account.draws == ()


def randomised_response_delta(epsilon_each, count, epsilon):
    """δ of several randomised responses (Kairouz, Oh and Viswanath 2015)."""
    positive = np.arange(count + 1)
    mass = binom.pmf(positive, count, 1 / (1 + math.exp(-epsilon_each)))
    loss = (2 * positive - count) * epsilon_each
    return np.sum(mass * np.maximum(0.0, -np.expm1(epsilon - loss)))


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_pure_events_are_composed_by_their_own_losses(count, epsilon):
    total = composition.epsilon([events.Pure(epsilon)] * count, 1e-5)
    assert randomised_response_delta(epsilon, count, total) <= 1e-5
    assert randomised_response_delta(epsilon, count, total * (1 - 1e-3)) > 1e-5


def test_composition_computes_with_all_digits_of_a_half_precision_delta():
    """In float16, 1e-5 − 3e-6 is rounded up, and the groups would get too much δ."""
    delta = np.float16(1e-5)
    run = [events.Gaussian(1.0), events.EpsilonDelta(0.5, 3e-6)]
    expected = composition.epsilon(run, float(delta))
    assert composition.epsilon(run, delta) == expected


def test_a_pure_event_and_a_run_are_composed_by_their_losses():
    total = composition.epsilon([events.Pure(0.3), RUN], 1e-5)
    sequence = pld.convolve(pld.pure(0.3), profiles.of(RUN))
    np.testing.assert_allclose(total, pld.epsilon(sequence, 1e-5), rtol=1e-4)


# --- plans that spend what is left

SIZES = {"num_examples": 500, "batch_size": 50, "num_steps": 60, "clip_norm": 0.7}


@pytest.mark.parametrize(
    ("way", "sampling"),
    [
        ("adaptive", "reshuffled"),
        ("fixed", "reshuffled"),
        pytest.param("adaptive", "poisson", marks=pytest.mark.slow),
        pytest.param("fixed", "poisson", marks=pytest.mark.slow),
    ],
)
def test_a_plan_spends_what_is_left(way, sampling, monkeypatch):
    if sampling == "poisson":
        # The bound on the profile is a little looser with half the points.
        monkeypatch.setattr(composition, "_POINTS", 16)
    adjacency = ZERO
    account = dpjax.budget(2.0, 1e-5, adjacency=adjacency, composition=way)
    account = account.draw(events.Gaussian(0.2))
    run = account.plan(**SIZES, sampling=sampling)
    after = account.draw(run, name="training")
    if way == "adaptive":
        assert after.left.mu**2 < 0.005 * account.left.mu**2
    assert 0.97 * 2.0 < after.epsilon_if_fixed <= 2.0
    # Less noise does not fit.
    less = dpjax.plan(
        **SIZES, sampling=sampling, adjacency=adjacency, delta=1e-5,
        noise_multiplier=0.99 * run.noise_multiplier,
    )  # fmt: skip
    with pytest.raises(ValueError, match="release must"):
        account.draw(less)


def test_plans_on_a_lattice_and_of_shares_draw():
    account = dpjax.budget(2.0, 1e-5, adjacency=ZERO)
    half = account.plan(**SIZES, sampling="fixed", share=0.5, arithmetic="discrete")
    account = account.draw(half)
    total = account.draws[0].cost.total_variation
    assert 0 < total < 1e-12
    np.testing.assert_allclose(
        account.draws[0].cost.mu ** 2, account.left.mu**2, rtol=1e-2
    )


# --- what is refused


def test_wrong_draws_raise():
    account = dpjax.budget(2.0, 1e-5, adjacency=ADD)
    other = events.PoissonGaussian(1.0, 0.1, ZERO)
    run = dpjax.plan(**SIZES, epsilon=0.5, delta=1e-5, sampling="fixed", adjacency=ZERO)
    wrong = [other, events.Repeated(other, 3), run, run.guarantee]
    wrong += [events.Composed((events.Repeated(other, 3),))]
    for release in wrong:
        with pytest.raises(ValueError, match="ZERO_OUT"):
            account.draw(release)
    for release in (events.Gaussian(math.inf), events.Gaussian(math.nan)):
        with pytest.raises(ValueError, match="release must|mu"):
            account.draw(release)
    with pytest.raises(ValueError, match="slack"):
        dpjax.budget(2.0, 1e-5, adjacency=ADD, slack=0.0).draw(RUN)
    with pytest.raises(ValueError, match="event"):
        account.draw(0.3)
    whole = dpjax.budget(2.0, 1e-5, adjacency=Adjacency.REPLACE)
    small = events.RandomizedResponse(0.9, 2)
    whole = whole.draw(small, slack=whole.left.slack)
    assert 0 <= whole.left.slack < 1e-15
    with pytest.raises(ValueError, match="of δ"):
        account.draw(events.EpsilonDelta(0.1, 1.1e-6))
    with pytest.raises(ValueError, match="unit"):
        dpjax.budget(2.0, 1e-5, adjacency=ZERO, unit="user").draw(run)
    for arguments in ({"epsilon": 0.0}, {"delta": 1.0}, {"slack": 1.0}):
        given = {"epsilon": 1.0, "delta": 1e-5, "adjacency": ADD, **arguments}
        with pytest.raises(ValueError, match=next(iter(arguments))):
            dpjax.budget(**given)
    for name in ("epsilon", "delta", "adjacency"):
        with pytest.raises(ValueError, match=name):
            account.plan(**SIZES, **{name: 1.0})
    with pytest.raises(ValueError, match="share"):
        account.plan(**SIZES, share=1.5)
    spent = account.draw(events.Gaussian(account.left.mu))
    with pytest.raises(ValueError, match="share"):
        spent.plan(**SIZES)


def test_statistics_draw_under_their_own_adjacency():
    mean = statistics.mean(
        np.ones((9, 2)), clip_norm=2.0, noise_multiplier=20.0, key=jax.random.key(0),
        adjacency=ZERO,
    )  # fmt: skip
    account = dpjax.budget(2.0, 1e-5, adjacency=ZERO)
    assert account.draw(mean).draws[0].event == events.Gaussian(0.05)
    with pytest.raises(ValueError, match="ZERO_OUT"):
        dpjax.budget(2.0, 1e-5, adjacency=ADD).draw(mean)


@pytest.mark.parametrize("way", ["adaptive", "fixed"])
def test_numbers_of_no_mechanism_are_no_credit(way):
    account = dpjax.budget(2.0, 1e-5, adjacency=ADD, composition=way)
    for release, named in [
        (events.EpsilonDelta(-50.0, 1e-9), "epsilon"),
        (events.EpsilonDelta(0.01, -0.5), "delta"),
        (events.EpsilonDelta(0.1, math.nan), "delta"),
        (events.EpsilonDelta(0.1, 1.0), "delta"),
        (events.OnLattice(FIRST, -1.0), "total_variation"),
        (events.OnLattice(FIRST, math.nan), "total_variation"),
        (events.Gaussian(-0.1), "mu"),
        (events.Gaussian("0.1"), "mu"),
        (events.Gaussian(np.array([0.1, 0.2])), "mu"),
        (events.Repeated(events.Gaussian(0.1), -5), "count"),
        (events.Repeated(events.OnLattice(FIRST, 1e-30), 3), "event"),
        (events.Composed((FIRST,)), "event"),
        (events.Selection(FIRST, 3), "repetitions"),
        (events.PoissonGaussian(1.0, 1.5, ADD), "sampling_rate"),
        (events.FixedSizeGaussian(1.0, 1.5), "sampling_rate"),
        (events.RandomizedResponse(1.5, 3), "noise_parameter"),
        (events.RandomizedResponse(0.5, 2.5), "num_buckets"),
        (events.DiscreteLaplace(1.0, 1.5), "sensitivity"),
        (events.Repeated(events.Gaussian(0.1), 1.5), "count"),
    ]:
        with pytest.raises(ValueError, match=named):
            account.draw(release)


@pytest.mark.parametrize(
    ("share_of_rest", "arithmetic"),
    [
        (5e5, "real"),
        pytest.param(2.0, "real", marks=pytest.mark.matrix),
        pytest.param(1.0, "discrete", marks=pytest.mark.matrix),
    ],
)
def test_plan_beyond_the_remaining_slack_raises(share_of_rest, arithmetic):
    account = dpjax.budget(2.0, 1e-5, adjacency=ADD)
    sizes = {**SIZES, "num_steps": 1, "max_batch_size": SIZES["num_examples"]}
    slack = share_of_rest * account.left.slack
    with pytest.raises(ValueError, match="the remaining slack"):
        account.plan(**sizes, slack=slack, arithmetic=arithmetic)


def test_an_event_in_the_wrong_place_is_named_with_its_container():
    step = events.Gaussian(0.5)
    wrong = (events.Composed((step,)), events.Repeated(events.Composed(()), 2))
    for event in wrong:
        with pytest.raises(ValueError, match=rf"got {type(event).__name__}\("):
            composition.epsilon([events.OnLattice(event, 0.0)], 1e-5)


def test_ledger_spends_a_budget(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for epsilon in (0.1, 0.2):
        ledger.other(path, "a sum", epsilon=epsilon, delta=1e-7, adjacency=ADD)
    account = dpjax.budget(2.0, 1e-5, adjacency=ADD)
    after = ledger.read(path).spend(account)
    assert [x.name for x in after.draws] == ["a sum"] * 2
    assert after.left.mu < account.left.mu
    with pytest.raises(ValueError, match="the remaining"):
        ledger.read(path).spend(dpjax.budget(0.2, 1e-5, adjacency=ADD))
    with pytest.raises(ValueError, match="adjacency"):
        ledger.read(path).spend(dpjax.budget(2.0, 1e-5, adjacency=ZERO))


def test_error_about_infinite_mu_states_the_given_slack():
    account = dpjax.budget(3.0, 1e-5, adjacency=Adjacency.REPLACE, slack=0.1)
    with pytest.raises(ValueError, match="with a slack of 2e-07"):
        account.draw(events.Gaussian(np.inf), slack=2e-7)
