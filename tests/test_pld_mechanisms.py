"""Mechanisms beside the sampled Gaussian, against closed forms and dp_accounting."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_pld as reference
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as peer
from scipy.optimize import brentq
from scipy.stats import binom, norm

from dpjax import Adjacency
from dpjax._core.float64 import scope
from dpjax.accounting import composition, events, pld, profiles, pure
from dpjax.accounting._numerics.pld import atoms

ADD = Adjacency.ADD_REMOVE


def test_one_laplace_step_matches_the_closed_form(x64):
    for scale in (0.3, 2.0, 50.0):
        epsilon = np.array([0.0, 0.3, 0.9]) / scale
        exact = -np.expm1((epsilon - 1 / scale) / 2)
        result = np.asarray(pld.delta(pld.laplace(scale), epsilon))
        assert np.all(result >= exact)
        # δ has a slope of 1/2 and a curvature of 1/4 in ε at most: the chord of an
        # interval of length h is at most h²/10 above it.
        h = 2 / scale / atoms.INTERVALS
        np.testing.assert_allclose(result, exact, rtol=1e-12, atol=h * h / 10)
        assert pld.delta(pld.laplace(scale), 1 / scale) < 1e-12


def noise_on_integers(kind, scale, sensitivity):
    """P's probabilities of integers, and the losses against noise that is shifted."""
    reach = int(40 * scale) + 2 * sensitivity
    z = np.arange(-reach, reach + 1.0)

    def exponent(z):
        return -np.abs(z) / scale if kind == "laplace" else -((z / scale) ** 2) / 2

    mass = np.exp(exponent(z))
    return mass / mass.sum(), exponent(z) - exponent(z - sensitivity)


@pytest.mark.parametrize(
    ("kind", "scale", "sensitivity"),
    [
        pytest.param("laplace", 0.4, 1, marks=pytest.mark.matrix),
        pytest.param("laplace", 6.0, 7, marks=pytest.mark.matrix),
        ("laplace", 3000.0, 5000),  # some of the integers are points of the pair
        pytest.param("gaussian", 0.6, 1, marks=pytest.mark.matrix),
        ("gaussian", 7.0, 20),
        # 13 integers in a group
        pytest.param("gaussian", 900.0, 1000, marks=pytest.mark.matrix),
    ],
)
def test_one_step_matches_a_sum_over_integers(kind, scale, sensitivity, x64):
    of = {"laplace": pld.discrete_laplace, "gaussian": pld.discrete_gaussian}[kind]
    mass, loss = noise_on_integers(kind, scale, sensitivity)
    epsilon = np.array([0.0, 0.2, 0.7]) * sensitivity / scale
    exact = np.sum(mass * np.maximum(-np.expm1(epsilon[:, None] - loss), 0), axis=1)
    result = np.asarray(pld.delta(of(scale, sensitivity), epsilon))
    assert np.all(result >= exact * (1 - 1e-12))
    np.testing.assert_allclose(result, exact, rtol=2e-5)


def test_one_coordinate_of_laplace_noise_is_the_worst(x64):
    """Every split of a change over two integers has a smaller δ at every ε."""
    for scale, total in ((0.7, 4), (3.0, 5)):
        whole, whole_loss = noise_on_integers("laplace", scale, total)
        epsilon = np.linspace(0, total / scale, 30)[:, None]
        worst = np.sum(whole * np.maximum(-np.expm1(epsilon - whole_loss), 0), axis=1)
        for first in range(1, total):
            p, x = noise_on_integers("laplace", scale, first)
            q, y = noise_on_integers("laplace", scale, total - first)
            joint, loss = np.outer(p, q).ravel(), np.add.outer(x, y).ravel()
            over = np.maximum(-np.expm1(epsilon - loss), 0)
            assert np.all(over @ joint <= worst + 1e-14)


def test_one_answer_matches_a_sum_over_buckets(x64):
    for parameter, buckets in ((0.3, 2), (0.6, 7), (0.9, 1000)):
        p, q = (np.full(buckets, parameter / buckets) for _ in range(2))
        p[0] += 1 - parameter
        q[1] += 1 - parameter
        for epsilon in (0.0, 0.1, 1.0):
            exact = np.sum(np.maximum(p - math.exp(epsilon) * q, 0))
            result = pld.delta(pld.randomized_response(parameter, buckets), epsilon)
            np.testing.assert_allclose(result, exact, rtol=1e-10, atol=1e-14)


def binomial_delta(one, lost, count, epsilon):
    """δ of composed (ε, δ)-DP mechanisms: Kairouz, Oh and Viswanath, Theorem 3.3."""
    above = np.arange(count + 1)
    mass = binom.pmf(above, count, 1 / (1 + math.exp(-one)))
    over = np.maximum(-np.expm1(epsilon - (2 * above - count) * one), 0)
    return 1 - (1 - lost) ** count * (1 - np.sum(mass * over))


@pytest.mark.parametrize(
    ("one", "lost", "count", "delta"),
    [
        (0.1, 0.0, 100, 1e-5),
        (0.1, 1e-8, 100, 1e-5),
        (0.5, 0.0, 10, 1e-5),
        (1.0, 0.0, 5, 1e-3),
        (0.01, 0.0, 10_000, 1e-6),
        (2.0, 1e-9, 30, 1e-6),
    ],
)
def test_composed_known_epsilon_matches_the_binomial_formula(
    one, lost, count, delta, x64
):
    run = pld.compose(pld.epsilon_delta(one, lost) if lost else pld.pure(one), count)
    epsilon = float(pld.epsilon(run, delta))
    below = epsilon * (1 - 1e-7)
    above = binomial_delta(one, lost, count, epsilon)
    assert above <= delta <= binomial_delta(one, lost, count, below)
    assert above <= pld.delta(run, epsilon) <= delta * (1 + 1e-5)


MIXTURE = (2.0, (0.0, 1.0, 2.5), (0.81, 0.18, 0.01))
PEERS = {
    "laplace": (pld.laplace(3.0), peer.from_laplace_mechanism, (3.0,)),
    "discrete laplace": (
        pld.discrete_laplace(5.0, 3),
        peer.from_discrete_laplace_mechanism,
        (0.2, 3),
    ),
    "discrete gaussian": (
        pld.discrete_gaussian(4.0, 3),
        peer.from_discrete_gaussian_mechanism,
        (4.0, 3),
    ),
    "response": (
        pld.randomized_response(0.7, 5),
        peer.from_randomized_response,
        (0.7, 5),
    ),
    "mixture": (
        pld.gaussian_mixture(*MIXTURE, adjacency=ADD),
        peer.from_mixture_gaussian_mechanism,
        MIXTURE,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        x
        if x in ("laplace", "discrete gaussian")
        else pytest.param(x, marks=pytest.mark.slow)
        for x in PEERS
    ],
)
def test_bounds_agree_with_dp_accounting(name, x64):
    """Between dp_accounting's bounds, up to its grid's error; never below the lower."""
    ours, of, numbers = PEERS[name]
    grid = 1e-3 if name == "mixture" else 1e-4  # it takes a minute with 1e-4
    steps = [
        of(*numbers, pessimistic_estimate=x, value_discretization_interval=grid)
        for x in (False, True)
    ]
    for count, delta in ((1, 1e-4), (8, 1e-6)):
        low, high = (
            step.self_compose(count).get_epsilon_for_delta(delta) for step in steps
        )
        epsilon = float(pld.epsilon(pld.compose(ours, count), delta))
        assert low <= epsilon * (1 + 1e-9)
        assert epsilon <= high + 1e-3


def test_one_mixture_matches_its_tail_probabilities(x64):
    """δ = P[z > t] − e^ε Q[z > t], with t where the ratio is e^ε, or below −t."""
    noise, sensitivities, weights = MIXTURE
    mean, weight = np.array(sensitivities) / noise, np.array(weights)
    step = pld.gaussian_mixture(*MIXTURE, adjacency=ADD)

    def loss(z):
        return math.log(np.sum(weight * np.exp(mean * z - mean * mean / 2)))

    for epsilon in (0.01, 0.1, 0.5, 2.0):
        up = brentq(lambda z: loss(z) - epsilon, -40, 80)
        remove = np.sum(weight * norm.sf(up - mean)) - math.exp(epsilon) * norm.sf(up)
        add = 0.0
        if loss(-40) < -epsilon:
            low = brentq(lambda z: loss(z) + epsilon, -40, 80)
            mixed = np.sum(weight * norm.cdf(low - mean))
            add = norm.cdf(low) - math.exp(epsilon) * mixed
        exact, result = max(remove, add), pld.delta(step, epsilon)
        assert exact <= result
        np.testing.assert_allclose(result, exact, rtol=3e-4)


def test_sampled_gaussian_is_a_mixture_of_two(x64):
    mixed = pld.gaussian_mixture(0.9, (0.0, 1.0), (0.97, 0.03), adjacency=ADD)
    usual = pld.poisson_gaussian(0.9, 0.03, adjacency=ADD)
    result, expected = (pld.epsilon(pld.compose(x, 200), 1e-6) for x in (mixed, usual))
    np.testing.assert_allclose(result, expected, rtol=1e-5)


EVENTS = (
    events.Laplace(4.0),
    events.DiscreteLaplace(6.0, 2),
    events.DiscreteGaussian(7.0, 2),
    events.GaussianMixture(2.0, (0.0, 1.0), (0.8, 0.2), ADD),
    events.Pure(0.2),
    events.EpsilonDelta(0.2, 1e-9),
    events.PoissonGaussian(1.5, 0.1, ADD),
    events.Gaussian(0.3),
)


def test_different_mechanisms_compose(x64):
    """Against the convolution of dp_accounting's distributions."""
    run = pld.PLD(tuple(events.Repeated(event, 2) for event in EVENTS))
    known = common.DifferentialPrivacyParameters
    parts = [
        peer.from_laplace_mechanism(4.0),
        peer.from_discrete_laplace_mechanism(1 / 6, 2),
        peer.from_discrete_gaussian_mechanism(7.0, 2),
        peer.from_gaussian_mechanism(2.0, sampling_prob=0.2),
        peer.from_privacy_parameters(known(0.2)),
        peer.from_privacy_parameters(known(0.2, 1e-9)),
        peer.from_gaussian_mechanism(1.5, sampling_prob=0.1),
        peer.from_gaussian_mechanism(1 / 0.3),
    ]
    together = parts[0]
    for part in (*parts[1:], *parts):
        together = together.compose(part)
    theirs = together.get_epsilon_for_delta(1e-6)
    assert theirs - 5e-3 <= float(pld.epsilon(run, 1e-6)) <= theirs + 1e-3


NUMBERS = {
    "laplace": (pld.laplace, 2.0),
    "discrete laplace": (lambda x: pld.discrete_laplace(x, 2), 5.0),
    "discrete gaussian": (lambda x: pld.discrete_gaussian(x, 2), 5.0),
    "response": (lambda x: pld.randomized_response(x, 6), 0.6),
    "pure": (pld.pure, 0.4),
    "weights": (
        lambda x: pld.gaussian_mixture(
            1.5, (0.0, 1.0, x), (0.8, 0.1, 0.1), adjacency=ADD
        ),
        1.7,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_batches_and_derivatives_match_single_values(name, x64):
    of, x = NUMBERS[name]

    def epsilon(x):
        return pld.epsilon(pld.compose(of(x), 5), 1e-4)

    # The losses of integers are a lattice, of which ε feels each point.
    h = 1e-3 * x
    at = jnp.array([x - h, x, x + h])
    low, middle, high = np.asarray(jax.vmap(epsilon)(at))
    np.testing.assert_allclose(middle, epsilon(x), rtol=1e-6)
    slope = jax.grad(epsilon)(x)
    np.testing.assert_allclose(slope, (high - low) / (2 * h), rtol=2e-3)


def test_mechanisms_without_privacy_or_without_loss():
    """The domain's ends: silent mechanisms cost nothing, unknown ones everything."""
    silent = [
        events.Laplace(math.inf),
        events.DiscreteLaplace(2.0, 0),
        events.DiscreteGaussian(2.0, 0),
        events.RandomizedResponse(1.0, 5),
        events.RandomizedResponse(0.0, 1),
        events.GaussianMixture(2.0, (0.0, 1.0), (1.0, 0.0), ADD),
        events.Pure(0.0),
        events.EpsilonDelta(0.0, 0.0),
    ]
    run = pld.PLD(tuple(map(events.Repeated, silent)))
    assert pld.epsilon(run, 1e-5) == 0
    assert pld.delta(run, 0.5) == 0
    for event in (
        events.Laplace(0.0),
        events.Laplace(math.nan),
        events.DiscreteLaplace(-1.0, 2),
        events.DiscreteGaussian(1e9, 2),
        events.RandomizedResponse(0.0, 3),
        events.RandomizedResponse(0.5, 2.5),
        events.GaussianMixture(2.0, (0.0, 1.0), (0.9, 0.2), ADD),
        events.GaussianMixture(2.0, (0.0, -1.0), (0.5, 0.5), ADD),
        events.Pure(math.inf),
        events.EpsilonDelta(1.0, 1.0),
        events.EpsilonDelta(1.0, -0.1),
    ):
        assert pld.epsilon(pld.of(event), 1e-5) == np.inf, event
    for event in (events.Laplace(math.nan), events.DiscreteGaussian(1e9, 2)):
        assert pld.delta(pld.of(event), 0.5) == 1, event


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pld.laplace(0.0), "scale must be positive"),
        (lambda: pld.discrete_laplace(1.0, 0.5), "sensitivity must be an integer"),
        (lambda: pld.discrete_gaussian(1.0, -1), "sensitivity must be at least 0"),
        (lambda: pld.randomized_response(0.0, 2), "noise_parameter must be positive"),
        (lambda: pld.randomized_response(0.1, 2.5), "num_buckets must be a whole"),
        (lambda: pld.pure(-1.0), "epsilon must be non-negative"),
        (lambda: pld.epsilon_delta(1.0, 2.0), "delta must be between 0 and 1"),
        (
            lambda: pld.gaussian_mixture(1.0, (1.0,), (0.9,), adjacency=ADD),
            "weights must add up to one",
        ),
        (
            lambda: pld.gaussian_mixture(1.0, (1.0, 2.0), (1.0,), adjacency=ADD),
            "weights must be as many as sensitivities",
        ),
        # An event does not broadcast one sensitivity either: ε would be too small.
        (
            lambda: events.GaussianMixture(1.0, (1.0,), (0.5, 0.5), ADD),
            "weights must be as many as sensitivities",
        ),
        (
            lambda: pld.gaussian_mixture(1.0, (), (), adjacency=ADD),
            "weights must add up to one",
        ),
        (
            lambda: events.GaussianMixture(1.0, (1.0,), (1.0,), Adjacency.REPLACE),
            "adjacency must be ADD_REMOVE or ZERO_OUT",
        ),
        (
            lambda: events.PoissonGaussian(1.0, 0.1, "REPLACE"),
            "adjacency must be a dpjax.Adjacency",
        ),
        (
            lambda: pld.gaussian_mixture(1.0, (-1.0,), (1.0,), adjacency=ADD),
            "sensitivities must be non-negative",
        ),
        (
            lambda: pld.gaussian_mixture(
                1.0, (1.0,), (1.0,), adjacency=Adjacency.REPLACE
            ),
            "adjacency must be ADD_REMOVE or ZERO_OUT",
        ),
    ],
)
def test_invalid_numbers_raise(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    "event",
    [
        events.TruncatedPoissonGaussian(1.0, 0.1, 100, 0, ADD),
        events.TruncatedPoissonGaussian(1.0, 0.1, math.nan, 12, ADD),
        events.RandomAllocation(1.0, 2.5, ADD),
    ],
    ids=["capacity", "examples", "steps"],
)
def test_event_with_an_invalid_size_has_no_finite_bound(event):
    assert pld.epsilon(pld.of(event), 1e-5) == math.inf
    with pytest.raises(ValueError, match=f"{type(event).__name__} must be"):
        composition.epsilon([event], 1e-5)


@pytest.mark.parametrize("reach", [1, 100, 2047, 2048, 4096, 10_000])
def test_groups_cover_every_integer_of_the_noise(reach):
    tail = 1e-20
    stddev = max((reach - 1.5) / -norm.ppf(tail), 1e-3)
    with scope():
        groups = jax.jit(atoms._groups)(stddev, 0.5, tail)
        groups = jax.tree.map(np.asarray, groups)
    first, last = groups.start[0], groups.start[-1] + groups.size - 1
    assert groups.reach >= reach
    assert first == -groups.reach
    assert last >= groups.reach


def test_profile_of_pure_privacy_holds_at_delta_zero():
    profile = profiles.of(events.Pure(0.7))
    assert profile.epsilon(0.0) == pure.epsilon(0.7, 0.0)
    assert isinstance(profiles.of(events.Laplace(0.7)), pld.PLD)


# --- lower bounds


@pytest.mark.parametrize(
    "case",
    [
        ("poisson", 1.0, 0.01, 1_000, 1e-5),
        pytest.param(("replace", 0.4, 0.2, 50, 1e-10), marks=pytest.mark.slow),
        pytest.param(("poisson", 2.0, 0.02, 2_000, 1e-8), marks=pytest.mark.slow),
    ],
)
def test_lower_bound_is_below_exact_and_within_a_percent(case, x64):
    kind, mu, rate, count, delta = case
    adjacency = Adjacency.REPLACE if kind == "replace" else ADD
    step = pld.poisson_gaussian(1 / mu, rate, adjacency=adjacency)
    run = pld.compose(step, count)
    low, high = float(pld.epsilon_lower(run, delta)), float(pld.epsilon(run, delta))
    assert low <= high <= low * 1.01
    kinds = ("remove", "add") if kind == "poisson" else (kind,)

    def exact(epsilon):
        return max(
            reference.composed_delta([(x, mu, rate, count)], epsilon) for x in kinds
        )

    # ε(δ) is the ε at which the exact δ falls to δ.
    assert exact(high) <= delta <= exact(low)
    middle = exact((low + high) / 2)
    assert 0.9 * middle <= pld.delta_lower(run, (low + high) / 2) <= middle


@pytest.mark.parametrize(
    "name",
    [
        x if x == "laplace" else pytest.param(x, marks=pytest.mark.slow)
        for x in PEERS
        if x != "mixture"
    ],
)
def test_lower_bounds_agree_with_dp_accounting(name, x64):
    ours, of, numbers = PEERS[name]
    for count, delta in ((8, 1e-6),):
        high = of(*numbers).self_compose(count).get_epsilon_for_delta(delta)
        run = pld.compose(ours, count)
        low = float(pld.epsilon_lower(run, delta))
        assert low <= high + 1e-9
        assert low <= float(pld.epsilon(run, delta)) <= low * 1.01


@pytest.mark.parametrize(
    ("one", "lost", "count", "delta"),
    [(0.1, 1e-8, 100, 1e-5), (0.01, 0.0, 10_000, 1e-6), (2.0, 1e-9, 30, 1e-6)],
)
def test_lower_bound_of_known_epsilon_is_below_the_binomial_formula(
    one, lost, count, delta, x64
):
    run = pld.compose(pld.epsilon_delta(one, lost), count)
    low = float(pld.epsilon_lower(run, delta))
    assert binomial_delta(one, lost, count, low) >= delta
    assert float(pld.epsilon(run, delta)) <= low * 1.005
    for epsilon in (0.5 * low, low):
        exact = binomial_delta(one, lost, count, epsilon)
        assert pld.delta_lower(run, epsilon) <= exact


@pytest.mark.parametrize(
    "steps",
    [
        (events.Gaussian(0.7),),
        pytest.param(
            (events.TruncatedPoissonGaussian(1.1, 0.01, 1000, 40, ADD),),
            marks=pytest.mark.slow,
        ),
        pytest.param(EVENTS, marks=pytest.mark.slow),
        pytest.param(
            (events.GaussianMixture(*MIXTURE, ADD), events.DiscreteLaplace(4e3, 3000)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gaussian", "truncated", "all", "groups"],
)
def test_brackets_of_batches_and_compositions_contain_the_bound(steps):
    """In float32, for an entry of a batch of δ each."""
    delta = np.array([1e-4, 1e-6])
    run = pld.PLD(tuple(events.Repeated(event, 3) for event in steps))
    low, high = (np.asarray(of(run, delta)) for of in (pld.epsilon_lower, pld.epsilon))
    assert np.all(low <= high)
    # The shift c of ε is some thousandths for a few steps.
    assert np.all(high <= low * 1.01 + 5e-3)
    assert np.all(np.asarray(pld.delta_lower(run, low)) <= pld.delta(run, low))


def test_lower_bound_of_fixed_batches_is_that_of_poisson_batches(x64):
    """Of two data sets that differ in one example's sign, all others opposed to it."""
    fixed = pld.compose(pld.subsampled_gdp(0.8, 0.05), 100)
    poisson = pld.compose(pld.poisson_gaussian(1.25, 0.05, adjacency=ADD), 100)
    low = pld.epsilon_lower(fixed, 1e-5)
    np.testing.assert_allclose(low, pld.epsilon_lower(poisson, 1e-5), rtol=1e-3)
    assert low <= pld.epsilon(fixed, 1e-5)


def test_lower_bound_that_is_not_available_raises():
    with pytest.raises(ValueError, match="RandomAllocation has no lower bound"):
        pld.epsilon_lower(pld.of(events.RandomAllocation(1.0, 9, ADD)), 1e-5)
    with pytest.raises(ValueError, match="not traced values"):
        jax.eval_shape(lambda x: pld.delta_lower(pld.laplace(x), 0.1), 1.0)
    with pytest.raises(ValueError, match="not traced values"):
        jax.eval_shape(lambda x: pld.epsilon_lower(pld.laplace(2.0), x), 0.1)
    assert pld.epsilon_lower(pld.of(events.Laplace(math.nan)), 1e-5) == 0
    assert pld.delta_lower(pld.of(events.Pure(0.0)), 0.0) == 0
