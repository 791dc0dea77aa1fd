"""The transformation that adds noise correlated by a strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import strategies
from dpjax.strategies import Scaled, Toeplitz, Tree

NUM_STEPS = 12
STDDEV = 2.5
STRATEGIES = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.7),
    "one pole": strategies.rational([0.3], [0.9]),
    "two poles": strategies.rational([0.3, 0.5], [0.8, 0.95]),
    "banded": strategies.banded([1.0, 0.5, 0.2]),
    "inverse": strategies.banded_inverse([1.0, -0.5, -0.1]),
    "scaled": strategies.scaled(strategies.geometric(0.7), np.linspace(0.5, 3.0, 12)),
    "tree": strategies.tree(0.8),
}
REGENERATED = ("independent", "geometric", "inverse", "scaled", "tree")
KEY = jax.random.wrap_key_data(np.array([0, 3], np.uint32))  # key(3), not compiled


def mark_others_as_matrix(default, names):
    """Each name compiles a program: names not in `default` are marked `matrix`."""
    return [
        x if x in default else pytest.param(x, marks=pytest.mark.matrix) for x in names
    ]


def make_transformation(name, buffer="stored", **changed):
    given = {"stddev": STDDEV, "num_steps": NUM_STEPS, "key": KEY, **changed}
    return dpjax.correlated_noise(STRATEGIES[name], buffer=buffer, **given)


def run(tx, sums, state=None, length=NUM_STEPS):
    def step(state, _):
        updates, state = tx.update(sums, state)
        return state, updates

    state = jax.jit(tx.init)(sums) if state is None else state
    return jax.jit(lambda s: jax.lax.scan(step, s, length=length))(state)


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "name", mark_others_as_matrix(("two poles", "scaled", "tree"), STRATEGIES)
)
def test_noise_covariance_equals_that_of_the_inverse_matrix(name):
    """Each of 78 entries is normal with deviation sqrt(1 + ρ²) / sqrt(n) of its scale.

    Six deviations: false alarms in 1e-6 of the keys.
    """
    draws = 40_000
    _, noise = run(make_transformation(name), {"a": ones(draws), "b": ones(draws)})
    dense = jax.jit(lambda: STRATEGIES[name].matrix(NUM_STEPS))()
    inverse = np.linalg.inv(np.asarray(dense, np.float64))
    want = STDDEV**2 * inverse @ inverse.T
    a, b = (np.asarray(noise[x], np.float64) - 1 for x in "ab")
    scale = np.sqrt(np.outer(np.diag(want), np.diag(want)) * 2 / draws)
    assert np.all(np.abs(a @ a.T / draws - want) < 6 * scale)
    assert np.all(np.abs(b @ b.T / draws - want) < 6 * scale)
    # Leaves share no noise, at any two steps.
    assert np.all(np.abs(a @ b.T / draws) < 6 * scale)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "name", mark_others_as_matrix(("geometric", "tree"), REGENERATED)
)
def test_buffered_and_recomputed_noise_are_equal(name):
    sums = {"a": ones(3, 5), "b": 0 * ones(7)}
    state, stored = run(make_transformation(name), sums)
    again, drawn = run(make_transformation(name, "regenerate"), sums)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), stored, drawn
    )
    assert jax.tree.leaves(again.memory) == []
    rows = {"independent": set(), "inverse": {2}, "tree": {3}}.get(name, {1})
    assert {x.shape[0] for x in jax.tree.leaves(state.memory)} == rows


@pytest.mark.diagonal
@pytest.mark.parametrize("num_steps", [1, 2, 7, 16])
def test_tree_noise_matches_inverse_matrix_at_any_length(num_steps):
    """Buffered noise equals C⁻¹ z for the draws z of the same key."""

    def run_on_zeros(*how):
        tx = make_transformation(*how, num_steps=num_steps)
        return np.asarray(run(tx, 0 * ones(5), length=num_steps)[1])

    noise, z = (
        run_on_zeros("tree"),
        run_on_zeros("independent"),
    )  # whose noise is the draws
    dense = jax.jit(lambda: STRATEGIES["tree"].matrix(num_steps))()
    np.testing.assert_allclose(noise, np.linalg.solve(dense, z), atol=1e-5)
    np.testing.assert_allclose(run_on_zeros("tree", "regenerate"), noise, atol=1e-5)


@pytest.mark.diagonal("arithmetic")
@pytest.mark.parametrize("stddev", [1.3, 2.0**-90])
@pytest.mark.parametrize("arithmetic", ["real", "discrete"])
def test_changed_stddev_gives_nan_updates(arithmetic, stddev):
    factory = optax.inject_hyperparams(
        dpjax.correlated_noise,
        static_args=("strategy", "num_steps", "key", "arithmetic"),
    )
    tx = factory(
        strategies.geometric(0.5), stddev, num_steps=4, key=KEY, arithmetic=arithmetic
    )
    sums = stddev * ones(3)
    update = jax.jit(tx.update)
    out, state = update(sums, jax.jit(tx.init)(sums))
    assert np.all(np.isfinite(out))
    injected = state.hyperparams["stddev"]
    for changed in (np.nextafter(injected, 0, dtype=np.float32), 2 * injected):
        other = state._replace(hyperparams={**state.hyperparams, "stddev": changed})
        assert np.all(np.isnan(update(sums, other)[0]))
    assert np.all(np.isfinite(update(sums, state)[0]))


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["geometric", "two poles", "scaled", "tree"])
def test_run_in_two_parts_equals_uninterrupted_run(name):
    tx, sums = make_transformation(name), ones(9)
    _, whole = run(tx, sums)
    state, first = run(tx, sums, length=5)
    _, second = run(tx, sums, state, length=NUM_STEPS - 5)
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))


def test_noise_in_sums_cancels_to_closed_form_variance():
    """Sums over all steps: λ = .7 leaves the last draw and .3 of those before."""
    _, noise = run(make_transformation("geometric"), 0 * ones(20_000))
    variance = STDDEV**2 * (1 + 0.3**2 * (NUM_STEPS - 1))
    np.testing.assert_allclose(
        np.var(np.asarray(noise).sum(0)), variance, rtol=6 * 0.01
    )


def test_noise_is_added_before_casting_down():
    sums = 256 * ones(5_000)
    _, noisy = run(make_transformation("two poles"), sums.astype(jnp.bfloat16))
    _, wide = run(make_transformation("two poles"), sums)
    assert noisy.dtype == jnp.bfloat16
    np.testing.assert_array_equal(noisy, np.asarray(wide).astype(jnp.bfloat16))


def test_updates_beyond_num_steps_raise_or_are_nan():
    tx, sums = make_transformation("geometric"), ones(3)
    update = jax.jit(tx.update)
    state, _ = run(tx, sums)
    with pytest.raises(ValueError, match="num_steps is 12"):
        tx.update(sums, state)
    updates, state = update(sums, state)
    assert np.isnan(updates).all()
    assert np.isnan(update(sums, state)[0]).all()
    louder = run(tx, sums, length=3)[0]._replace(stddev=np.float32(1.0))
    assert np.isnan(update(sums, louder)[0]).all()


def transformations_with_stored_shapes():
    """The transformations whose states have an array for each parameter."""
    for name in ("geometric", "tree", "one pole", "inverse"):
        for arithmetic in ("real", "discrete"):
            yield make_transformation(name, arithmetic=arithmetic)
    for buffer in ("stored", "regenerate"):
        for num_steps in (1, NUM_STEPS):
            yield dpjax.tree_momentum(
                0.7, STDDEV, num_steps=num_steps, key=KEY, buffer=buffer
            )


@pytest.mark.parametrize("shape", [(2, 3), (1,), ()])
def test_updates_of_other_shapes_raise(shape):
    # An update of shape (1,) would be broadcast: on a lattice, three coordinates of the
    # earlier sums would get the same noise, and their differences would be exact.
    for tx in transformations_with_stored_shapes():
        state = jax.eval_shape(tx.init, ones(3))
        with pytest.raises(ValueError, match="shapes"):
            jax.eval_shape(tx.update, ones(*shape), state)


def test_float64_updates_do_not_change_the_state_dtypes(x64):
    tx = make_transformation("two poles")
    state = jax.eval_shape(tx.init, ones(3))
    wide, narrow = (
        jax.eval_shape(tx.update, ones(3).astype(dtype), state)
        for dtype in (np.float64, np.float32)
    )
    assert wide[0].dtype == np.float64
    assert wide[1] == narrow[1]


@pytest.mark.parametrize(
    ("strategy", "changed", "named"),
    [
        (strategies.geometric(0.5), {"num_steps": 0}, "num_steps"),
        (strategies.geometric(0.5), {"stddev": -1.0}, "stddev"),
        (strategies.geometric(0.5), {"stddev": np.nan}, "stddev"),
        (strategies.geometric(0.5), {"key": np.zeros(2, np.uint32)}, "key"),
        (strategies.geometric(0.5), {"buffer": "recompute"}, "buffer"),
        (strategies.rational([0.3], [0.9]), {"buffer": "regenerate"}, "buffer"),
        (strategies.banded(np.eye(1, 14)[0]), {}, "num_steps"),
        (Toeplitz(np.array([0.1]), np.zeros(0)), {}, "float32"),
        (Toeplitz(np.array([np.nan]), np.zeros(0)), {}, "float32"),
        (Toeplitz(np.zeros((1, 1)), np.zeros(0)), {}, "vector"),
        (strategies.scaled(strategies.geometric(0.5), [1.0, 2.0]), {}, "num_steps"),
        (Scaled(strategies.geometric(0.5), np.full(12, 0.1)), {}, "float32"),
        (Scaled(strategies.geometric(0.5), np.zeros(12)), {}, "factors"),
        (Tree(np.float64(0.1)), {}, "float32"),
        (Tree(1.5), {}, "decay"),
        (
            strategies.scaled(strategies.rational([0.3], [0.9]), np.ones(12)),
            {"buffer": "regenerate"},
            "buffer",
        ),
    ],
)
def test_invalid_arguments_raise(strategy, changed, named):
    given = {"stddev": 1.0, "num_steps": NUM_STEPS, "key": KEY, **changed}
    with pytest.raises(ValueError, match=named):
        dpjax.correlated_noise(strategy, **given)


def test_one_stored_vector_takes_no_temporaries_beyond_independent_noise():
    """The draw is stored once, and the memory is overwritten without a copy."""
    sums = jax.ShapeDtypeStruct((100_000,), np.float32)

    def temporary_bytes(tx):
        update = jax.jit(tx.update, donate_argnums=1)
        compiled = update.lower(sums, jax.eval_shape(tx.init, sums)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    independent = temporary_bytes(dpjax.add_gaussian_noise(STDDEV, key=KEY))
    one_vector = temporary_bytes(make_transformation("geometric"))
    # Scalars of the step take some bytes; a vector takes 400,000.
    assert one_vector < independent + 4_000
