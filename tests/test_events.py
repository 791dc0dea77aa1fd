"""Events as pytrees and as JSON, and the accountants that interpret them."""

import json
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import dp_event as dp
from dp_accounting.pld import PLDAccountant

from dpjax import Adjacency
from dpjax._matrices.strategy import StrategySpec
from dpjax.accounting import correlated, events, gdp, pld, profiles, selection
from dpjax.strategies import geometric

EVENTS = [
    events.Gaussian(0.7),
    events.Gaussian(math.inf),
    events.PoissonGaussian(1.3, 0.02, Adjacency.ADD_REMOVE),
    events.TruncatedPoissonGaussian(1.3, 0.02, 1000, 40, Adjacency.REPLACE),
    events.FixedSizeGaussian(0.4, 0.1),
    events.RandomAllocation(0.9, 25, Adjacency.ZERO_OUT),
    events.CorrelatedGaussian(
        3.0, StrategySpec(denominator=(-0.5,)), 40, 10, "fixed", Adjacency.ZERO_OUT
    ),
    events.RandomBins(2.0, None, 40, 10, 100, 20, False, Adjacency.ADD_REMOVE),
    events.RandomBins(
        2.0,
        StrategySpec(numerator=(0.5, 0.25)),
        40,
        10,
        100,
        20,
        True,
        Adjacency.REPLACE,
    ),
    events.EpsilonDelta(0.5, 1e-6),
    events.Pure(0.5),
    events.Laplace(1.5),
    events.DiscreteLaplace(1.5, 3),
    events.DiscreteGaussian(1.5, 3),
    events.RandomizedResponse(0.4, 6),
    events.GaussianMixture(
        1.3, (0.0, 1.0, 2.5), (0.75, 0.125, 0.125), Adjacency.ADD_REMOVE
    ),
    events.Selection(events.Gaussian(0.5), selection.Geometric(4.0)),
    events.Selection(
        events.Selection(events.Gaussian(0.5), selection.Fixed(3)),
        selection.TruncatedNegativeBinomial(-0.5, 4.0),
    ),
    events.Repeated(events.Gaussian(0.2), 17),
    events.Composed(
        (
            events.Repeated(events.Gaussian(0.2), 17),
            events.Repeated(events.PoissonGaussian(0.8, 0.5, Adjacency.ADD_REMOVE)),
        )
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_round_trips_through_json(event):
    text = json.dumps(events.to_dict(event), allow_nan=False)
    again = events.from_dict(json.loads(text))
    assert again == event
    assert hash(again) == hash(event)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_leaves_are_its_numbers(event):
    leaves, structure = jax.tree.flatten(event)
    assert all(isinstance(x, int | float) for x in leaves)
    assert jax.tree.unflatten(structure, leaves) == event


def test_event_types_have_different_tree_structures():
    structures = [jax.tree.structure(event) for event in EVENTS]
    structures.append(jax.tree.structure(pld.PLD(EVENTS[-1].steps)))
    types = [type(event) for event in EVENTS] + [pld.PLD]
    for i, one in enumerate(structures):
        for j, other in enumerate(structures):
            if types[i] is not types[j]:
                assert one != other, (types[i], types[j])


@pytest.mark.slow
def test_jit_distinguishes_events_with_equal_numbers():
    epsilon = jax.jit(lambda x: pld.epsilon(x, 1e-5))
    poisson = events.PoissonGaussian(1.7, 0.1, Adjacency.ADD_REMOVE)
    allocation = events.RandomAllocation(1.7, 9, Adjacency.ADD_REMOVE)
    ratios = [
        epsilon(pld.of(x)) / pld.epsilon(pld.of(x), 1e-5) for x in (poisson, allocation)
    ]
    np.testing.assert_allclose(ratios, 1.0, rtol=1e-6)


def test_numpy_and_jax_scalars_are_serialised_as_plain_numbers():
    event = events.Repeated(events.Gaussian(np.float32(0.5)), np.int64(3))
    assert events.from_dict(events.to_dict(event)) == events.Repeated(
        events.Gaussian(0.5), 3
    )


def test_serialising_traced_or_batched_values_raises():
    with pytest.raises(ValueError, match="mu must be one concrete number"):
        events.to_dict(events.Gaussian(np.ones(2)))
    with pytest.raises(ValueError, match="mu must be one concrete number"):
        jax.eval_shape(lambda mu: events.to_dict(events.Gaussian(mu)), 1.0)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "event must be of type Gaussian"),
        ([], "event must be of type Gaussian"),
        ({"type": "Staircase", "scale": 1.0}, "event must be of type Gaussian"),
        ({"type": "Gaussian"}, "event must be of type Gaussian"),
        ({"type": "Gaussian", "mu": 1.0, "sigma": 2.0}, "event must be of type"),
        ({"type": "Gaussian", "mu": True}, "mu must be of type float; got True"),
        ({"type": "Gaussian", "mu": "1"}, "mu must be of type float; got '1'"),
        (
            {"type": "PoissonGaussian", "noise_multiplier": 1.0, "sampling_rate": 0.1}
            | {"adjacency": "NEITHER"},
            "adjacency must be of type Adjacency; got 'NEITHER'",
        ),
        (
            {"type": "Repeated", "event": {"type": "Composed", "steps": []}}
            | {"count": 2},
            "event must be of type Gaussian",
        ),
    ],
)
def test_invalid_event_values_raise(values, match):
    with pytest.raises(ValueError, match=match):
        events.from_dict(values)


@pytest.mark.parametrize("order", ["fixed", "random"])
def test_only_the_listed_orders_are_read(order):
    values = events.to_dict(EVENTS[6]) | {"order": order}
    if order == "fixed":
        assert events.from_dict(values) == EVENTS[6]
        return
    with pytest.raises(ValueError, match="order must be of type"):
        events.from_dict(values)


def test_event_profile_matches_its_accountant():
    assert profiles.of(events.Gaussian(0.7)).epsilon(1e-5) == gdp.epsilon(0.7, 1e-5)
    event = events.CorrelatedGaussian(
        3.0, StrategySpec(denominator=(-0.5,)), 40, 10, "fixed", Adjacency.ZERO_OUT
    )
    mu = correlated.mu(
        geometric(0.5),
        3.0,
        num_steps=40,
        steps_per_epoch=10,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    assert profiles.of(event).mu == mu
    several = events.Composed((events.Repeated(events.Gaussian(0.2), 17),))
    for profile in (profiles.of(several), profiles.of(several.steps[0])):
        assert isinstance(profile, pld.PLD)
        assert profile.delta(0.3) == gdp.delta(math.sqrt(17) * 0.2, 0.3)


def test_total_variation_takes_more_of_a_small_delta():
    """Where 2⁻¹⁰ of δ does not suffice, ε is still close to that of the Gaussian."""
    gaussian, on_lattice = (
        profiles.of(event)
        for event in (
            events.Gaussian(0.3),
            events.OnLattice(events.Gaussian(0.3), 2.0**-46),
        )
    )
    delta = np.array([1e-6, 1e-8, 1e-10, 1e-12, 1e-13])
    result = np.asarray(on_lattice.epsilon(delta), np.float64)
    least = np.asarray(gaussian.epsilon(delta), np.float64)
    np.testing.assert_array_equal(np.isfinite(result), [True] * 4 + [False])
    assert np.all(result[:4] > least[:4])
    np.testing.assert_allclose(result[:4], least[:4], rtol=2e-2)
    held = np.asarray(on_lattice.delta(result[:4]), np.float64)
    assert np.all(held <= delta[:4] * (1 + 1e-5))


def test_profile_of_a_pair_holds_from_its_numbers_on():
    """Rounded up to float32: 0.1 and 1e-6 are between two float32 numbers."""
    profile = profiles.of(events.EpsilonDelta(0.1, 1e-6))
    np.testing.assert_array_equal(
        profile.epsilon([9e-7, 1e-6, 0.5]), np.float32([np.inf, 0.1, 0.1])
    )
    result = np.asarray(profile.delta([0.09, 0.1, 3.0]), np.float64)
    np.testing.assert_allclose(result, [1.0, 1e-6, 1e-6], rtol=2.0**-22)
    assert np.all(result[1:] >= 1e-6)
    assert float(profile.epsilon(0.5)) >= 0.1


@pytest.mark.parametrize(
    ("known_epsilon", "known_delta"),
    [(-1.0, 1e-6), (math.nan, 1e-6), (0.1, -1.0), (0.1, math.nan), (0.1, 2.0)],
)
def test_profile_of_an_invalid_pair_is_vacuous(known_epsilon, known_delta):
    profile = profiles.of(events.EpsilonDelta(known_epsilon, known_delta))
    assert (profile.epsilon(0.5), profile.delta(3.0)) == (np.inf, 1.0)


def test_profile_with_a_negative_total_variation_raises():
    with pytest.raises(ValueError, match="^total_variation must be non-negative"):
        profiles.of(events.OnLattice(events.Gaussian(1.0), -0.1))


# --- dp-accounting

ADD, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE
STEP = events.PoissonGaussian(1.3, 0.02, ADD)
DP_STEP = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.3))
PAIRS = [
    (events.Gaussian(0.5), ADD, dp.GaussianDpEvent(2.0)),
    (events.Gaussian(0.5), REPLACE, dp.GaussianDpEvent(4.0)),
    (events.Gaussian(0.0), ADD, dp.NoOpDpEvent()),
    (events.Gaussian(math.inf), ADD, dp.GaussianDpEvent(0.0)),
    (STEP, ADD, DP_STEP),
    (
        events.TruncatedPoissonGaussian(1.3, 0.02, 1000, 40, REPLACE),
        REPLACE,
        dp.TruncatedSubsampledGaussianDpEvent(1000, 0.02, 40, 1.3),
    ),
    (
        events.GaussianMixture(1.3, (0.0, 2.0), (0.75, 0.25), ADD),
        ADD,
        dp.MixtureOfGaussiansDpEvent(1.3, (0.0, 2.0), (0.75, 0.25)),
    ),
    (events.Laplace(1.5), ADD, dp.LaplaceDpEvent(1.5)),
    (events.Laplace(1.5), REPLACE, dp.LaplaceDpEvent(3.0)),
    (events.DiscreteLaplace(4.0, 6), ADD, dp.DiscreteLaplaceDpEvent(0.25, 6)),
    (events.DiscreteLaplace(4.0, 6), REPLACE, dp.DiscreteLaplaceDpEvent(0.25, 3)),
    (
        events.RandomizedResponse(0.4, 6),
        REPLACE,
        dp.RandomizedResponseDpEvent(0.4, 6),
    ),
    *(
        (
            events.Selection(events.Repeated(STEP, 17), law),
            ADD,
            dp.RepeatAndSelectDpEvent(
                dp.SelfComposedDpEvent(DP_STEP, 17), law.mean, shape
            ),
        )
        for law, shape in (
            (selection.Geometric(10.0), 1),
            (selection.Logarithmic(3.9), 0),
            (selection.Poisson(3.0), math.inf),
            (selection.TruncatedNegativeBinomial(0.5, 7.0), 0.5),
        )
    ),
    (events.Repeated(STEP, 17), ADD, dp.SelfComposedDpEvent(DP_STEP, 17)),
    (
        events.Composed(
            (events.Repeated(STEP, 17), events.Repeated(events.Gaussian(0.25), 2))
        ),
        ADD,
        dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(DP_STEP, 17),
                dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 2),
            ]
        ),
    ),
]


@pytest.mark.parametrize(("event", "adjacency", "expected"), PAIRS)
def test_event_converts_to_dp_accounting_and_back(event, adjacency, expected):
    assert events.to_dp_event(event, adjacency) == expected
    assert events.from_dp_event(expected, adjacency) == event


def test_more_dp_events_are_read():
    batch = dp.SampledWithoutReplacementDpEvent(1000, 50, dp.GaussianDpEvent(4.0))
    assert events.from_dp_event(batch, REPLACE) == events.FixedSizeGaussian(0.5, 0.05)
    for exact in (dp.LaplaceDpEvent(0.0), dp.DiscreteLaplaceDpEvent(0.0, 2)):
        assert events.from_dp_event(exact, ADD) == events.Gaussian(math.inf)
    nothing = dp.NonPrivateDpEvent()
    assert events.from_dp_event(nothing, ADD) == events.Gaussian(math.inf)
    nested = dp.SelfComposedDpEvent(
        dp.ComposedDpEvent([DP_STEP, dp.SelfComposedDpEvent(dp.NoOpDpEvent(), 3)]), 5
    )
    expected = events.Composed(
        (events.Repeated(STEP, 5), events.Repeated(events.Gaussian(0.0), 15))
    )
    assert events.from_dp_event(nested, ADD) == expected


@pytest.mark.parametrize("count", [0.5, 2.5, math.inf, -1])
def test_counts_of_dp_events_must_be_whole_numbers(count):
    with pytest.raises(ValueError, match="^count must be"):
        events.from_dp_event(dp.SelfComposedDpEvent(DP_STEP, count), ADD)


def test_count_of_an_event_converts_if_it_is_whole():
    run = events.Repeated(STEP, np.float32(3.0))
    assert events.to_dp_event(run, ADD) == dp.SelfComposedDpEvent(DP_STEP, 3)
    for count in (2.5, math.inf):
        with pytest.raises(ValueError, match="event must have an equivalent"):
            events.to_dp_event(events.Repeated(STEP, count), ADD)


def test_integers_without_noise_do_not_convert():
    with pytest.raises(ValueError, match="event must have an equivalent"):
        events.to_dp_event(events.DiscreteLaplace(0.0, 1), ADD)


@pytest.mark.matrix
def test_fields_of_a_mixture_may_be_in_axes_of_vmap():
    noise = jnp.array([1.0, 2.0])
    rest = (0.0, 1.0), (0.5, 0.5), ADD
    axes = events.GaussianMixture(0, None, None, ADD)
    deltas = jax.vmap(lambda x: pld.delta(pld.of(x), 1.0), in_axes=(axes,))(
        events.GaussianMixture(noise, *rest)
    )
    each = [pld.delta(pld.of(events.GaussianMixture(x, *rest)), 1.0) for x in noise]
    np.testing.assert_allclose(deltas, each, rtol=1e-6)


def test_search_with_a_negative_shape_does_not_convert():
    law = selection.TruncatedNegativeBinomial(-0.5, 7.0)
    with pytest.raises(
        ValueError, match="event must have an equivalent in dp-accounting"
    ):
        events.to_dp_event(events.Selection(STEP, law), ADD)


def has_fixed_count(event):
    """Whether a search, or one inside it, has `Fixed` repetitions."""
    if not isinstance(event, events.Selection):
        return False
    return isinstance(event.repetitions, selection.Fixed) or has_fixed_count(
        event.event
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_that_dp_accounting_lacks_raise(event):
    adjacency = getattr(event, "adjacency", ADD)
    expressible = events.Laplace | events.DiscreteLaplace | events.RandomizedResponse
    expressible |= events.GaussianMixture
    expressible |= events.Gaussian | events.PoissonGaussian | events.Repeated
    expressible |= events.TruncatedPoissonGaussian | events.Composed
    if isinstance(event, events.Selection) and not has_fixed_count(event):
        expressible |= events.Selection
    if isinstance(event, expressible):
        again = events.from_dp_event(events.to_dp_event(event, adjacency), adjacency)
        leaves = map(jax.tree.leaves, (again, event))
        assert jax.tree.structure(again) == jax.tree.structure(event)
        np.testing.assert_allclose(*leaves, rtol=1e-15)
    else:
        with pytest.raises(ValueError, match=f"event must .* {type(event).__name__}"):
            events.to_dp_event(event, adjacency)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (dp.RandomizedResponseDpEvent(0.5, 3), ADD),
        (dp.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0]), REPLACE),
        (dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(1.0)), ADD),
        (dp.SelfComposedDpEvent(dp.ZCDpEvent(0.1), 3), ADD),
        (dp.SampledWithoutReplacementDpEvent(9, 3, dp.GaussianDpEvent(1.0)), ADD),
        # A composition of searches has no distribution of losses.
        (dp.SelfComposedDpEvent(dp.RepeatAndSelectDpEvent(DP_STEP, 3.0, 1), 2), ADD),
        (None, ADD),
    ],
)
def test_dp_events_that_dpjax_lacks_raise(event, adjacency):
    with pytest.raises(ValueError, match="event must have an equivalent in dpjax"):
        events.from_dp_event(event, adjacency)


def test_event_of_another_adjacency_does_not_convert():
    with pytest.raises(ValueError, match=r"adjacency Adjacency\.REPLACE; got Poisson"):
        events.to_dp_event(events.Repeated(STEP, 2), REPLACE)


def test_odd_integers_do_not_convert_under_replacement():
    with pytest.raises(
        ValueError, match="event must have an equivalent in dp-accounting"
    ):
        events.to_dp_event(events.DiscreteLaplace(4.0, 3), REPLACE)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("kind", ["gaussian", "poisson", "truncated"])
def test_accountants_agree_on_a_converted_event(adjacency, kind):
    """Of dp-accounting, the accountant by PLDs, on a grid of 1e-3 for each step."""
    step = {
        "gaussian": events.Gaussian(0.05),
        "poisson": events.PoissonGaussian(1.3, 0.05, adjacency),
        "truncated": events.TruncatedPoissonGaussian(1.3, 0.05, 1000, 90, adjacency),
    }[kind]
    event = events.Repeated(step, 100)
    relation = {
        Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Adjacency.REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    peer = PLDAccountant(relation, value_discretization_interval=1e-3)
    peer.compose(events.to_dp_event(event, adjacency))
    epsilon = float(profiles.of(event).epsilon(1e-5))
    assert epsilon == pytest.approx(peer.get_epsilon(1e-5), abs=1e-2)


def test_counts_of_numpy_do_not_wrap():
    event = dp_accounting.GaussianDpEvent(np.float16(3))
    for n in (np.int8(100), np.int32(100_000)):
        twice = dp_accounting.SelfComposedDpEvent(event, n)
        nested = dp_accounting.SelfComposedDpEvent(twice, n)
        result = events.from_dp_event(nested, ADD)
        assert result == events.Repeated(events.Gaussian(1 / 3), int(n) ** 2)
