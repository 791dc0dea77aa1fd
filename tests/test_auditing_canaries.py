"""Canaries move sums as documented, and matched filters attain the accountant's μ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency, auditing, strategies
from dpjax.accounting import correlated
from dpjax.accounting import tree as tree_accounting

CLIP_NORM = 0.7
X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


def loss(params, example):
    return jnp.sum(jnp.tanh(params["w"] @ example) ** 2) + params["b"] ** 2


PARAMS = {
    "b": np.float32(0.4),
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
}
CANARY = np.array([-1, 3, -1, 0, -1, 4], np.int32)


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["vmap", "bookkeeping"])
def test_canaries_move_their_own_slots_by_the_clip_norm(engine):
    planted = dpjax.clipped_grad(
        auditing.plant(loss, 5.0), CLIP_NORM, engine=engine, microbatch_size=4
    )
    params = auditing.Planted(PARAMS, np.zeros(7, np.float32))
    total, per_example = jax.jit(planted)(params, auditing.Marked(X, CANARY))
    expected = CLIP_NORM * np.isin(np.arange(7), [0, 3, 4])
    np.testing.assert_allclose(total.slots, expected, rtol=1e-5)
    assert np.all(np.asarray(total.slots) <= expected)  # just under
    np.testing.assert_allclose(per_example.norm[CANARY >= 0], 5.0, rtol=1e-5)
    own, _ = jax.jit(dpjax.clipped_grad(loss, CLIP_NORM))(PARAMS, X, mask=CANARY < 0)
    for ours, theirs in zip(
        jax.tree.leaves(total.params), jax.tree.leaves(own), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


STEPS, EPOCH = 12, 4
STRATEGIES = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.6),
    "rational": strategies.rational([0.2, 0.4], [0.3, 0.9]),
    "banded": strategies.banded([1.0, 0.5, 0.2]),
    "scaled": strategies.scaled(
        strategies.geometric(0.6), np.linspace(0.5, 3, 12).astype(np.float32)
    ),
    "tree": strategies.tree(0.6),
}


def white_by_tree(decay):
    """The whitening map of `tree_momentum`: that of its strategy, for the sums."""
    white = auditing.white_by_strategy(strategies.tree(decay))

    def of_momentum(m):
        return white(m - decay * jnp.concatenate([jnp.zeros_like(m[:1]), m[:-1]]))

    return of_momentum


def participation(offset):
    return (np.arange(STEPS) % EPOCH == offset).astype(np.float32)[:, None]


ALL_OFFSETS = np.stack([participation(offset) for offset in range(EPOCH)])


@pytest.mark.diagonal
@pytest.mark.parametrize("name", STRATEGIES)
def test_matched_filter_on_correlated_noise_attains_accountant_mu(name):
    """With equality at the worst offset: accountant and attack agree."""
    white = auditing.white_by_strategy(STRATEGIES[name])
    observed = jax.jit(
        lambda: jnp.stack([white(x) for x in jnp.asarray(ALL_OFFSETS)])
    )()
    lengths = np.linalg.norm(observed, axis=(1, 2))
    mu = correlated.mu(
        STRATEGIES[name],
        1.0,
        num_steps=STEPS,
        steps_per_epoch=EPOCH,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    np.testing.assert_allclose(max(lengths), mu, rtol=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.95])
def test_matched_filter_on_tree_noise_attains_accountant_mu(decay):
    white = white_by_tree(decay)

    @jax.jit
    @jax.vmap
    def whitened_signal(sums):
        key = jax.random.key(0)
        silent = dpjax.tree_momentum(decay, 0.0, num_steps=STEPS, key=key)
        return white(auditing.released(silent, sums))

    lengths = np.linalg.norm(whitened_signal(ALL_OFFSETS), axis=(1, 2)) / (1 - decay)
    mu = tree_accounting.momentum_mu(
        1.0,
        num_steps=STEPS,
        decay=decay,
        steps_per_epoch=EPOCH,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    np.testing.assert_allclose(max(lengths), mu, rtol=1e-4)


def whitened_noise(name, key, num):
    """A mechanism's noise after its whitening filter, with standard deviation 1."""
    zeros = jnp.zeros((STEPS, num))
    if name == "tree momentum":
        tx = dpjax.tree_momentum(0.6, 1.0, num_steps=STEPS, key=key)
        return white_by_tree(0.6)(auditing.released(tx, zeros)) / 0.4
    tx = dpjax.correlated_noise(STRATEGIES[name], 1.0, num_steps=STEPS, key=key)
    return auditing.white_by_strategy(STRATEGIES[name])(auditing.released(tx, zeros))


@pytest.mark.diagonal
@pytest.mark.parametrize("name", [*STRATEGIES, "tree momentum"])
def test_whitening_filters_give_white_noise(name):
    """Within five standard deviations of 4,000 draws: false alarms below 1e-4."""
    num = 4000
    z = np.float64(jax.jit(lambda: whitened_noise(name, jax.random.key(2), num))())
    covariance = z @ z.T / num
    np.testing.assert_allclose(covariance, np.eye(STEPS), atol=5 * np.sqrt(2 / num))


def test_audit_of_one_pipeline_run_gives_close_lower_bound():
    """One step with the real loss, clipping, noise and optimizer; 4,000 canaries."""
    inside, everywhere, mu = 4000, 12_000, 2.0
    gradient = dpjax.clipped_grad(auditing.plant(loss, 2.0), CLIP_NORM)

    @jax.jit
    def step(batch):
        optimizer = dpjax.dp_sgd(
            0.1,
            clip_norm=CLIP_NORM,
            noise_multiplier=1 / mu,
            expected_batch_size=5,
            key=jax.random.key(7),
        )
        params = auditing.Planted(PARAMS, jnp.zeros(everywhere))
        total, _ = gradient(params, batch)
        observed = optimizer.update(total, optimizer.init(params), params)[0].slots
        scores = auditing.matched_filter(observed[None], jnp.full((1, 1), -1.0))
        return scores[:inside], scores[inside:]

    examples = np.concatenate([X, np.zeros((inside, 3), np.float32)])
    canary = np.concatenate([np.full(6, -1), np.arange(inside)])
    scores = step(auditing.Marked(examples, canary))
    result = auditing.gaussian_mu_lower(*scores, confidence=0.9999)
    assert 0.9 * mu < result <= mu


def test_matched_filter_scores_match_definition():
    rng = np.random.default_rng(3)
    observed, expected = rng.standard_normal((2, 5, 8)).astype(np.float32)
    expected[:, 2] = 0
    with np.errstate(invalid="ignore"):
        by_hand = np.sum(observed * expected, axis=0) / np.linalg.norm(expected, axis=0)
    result = jax.jit(auditing.matched_filter)(observed, expected)
    np.testing.assert_allclose(result, np.nan_to_num(by_hand), rtol=1e-5)
    with pytest.raises(ValueError, match="expected"):
        auditing.matched_filter(observed, expected[:, :3])


SILENT = functools.partial(dpjax.dp_sgd, 0.5, clip_norm=1.0, expected_batch_size=2)


def train(data, key):
    """Three DP-SGD steps towards the mean of the data."""
    tx = SILENT(noise_multiplier=2.0, key=key)

    def step(carry, _):
        w, state = carry
        total, _ = dpjax.clipped_grad(lambda w, x: jnp.sum((w - x) ** 2) / 2, 1.0)(
            w, data
        )
        updates, state = tx.update(total, state, w)
        return (w + updates, state), updates

    w = jnp.zeros(2)
    (w, _), updates = jax.lax.scan(step, (w, tx.init(w)), None, length=3)
    return {"last": w, "all": updates}


@pytest.mark.slow
def test_train_many_gives_each_run_its_own_key():
    data = np.array([[3.0, 0.0], [-3.0, 0.0]], np.float32)

    @jax.jit
    def train_runs():
        key = jax.random.key(0)
        return auditing.train_many(train, data, data[1:], num_runs=1000, key=key)

    outputs = train_runs()
    assert outputs.inside["all"].shape == (1000, 3, 2)
    everything = np.concatenate([outputs.inside["last"], outputs.outside["last"]])
    assert len(np.unique(everything, axis=0)) == 2000
    mu = 0.5 * np.sqrt(3)  # of three steps
    linear_scores = jax.jit(auditing.linear_scores)
    for part in ("all", "last"):
        scores = linear_scores(auditing.Outputs(*(x[part] for x in outputs)))
        assert len(scores.inside) == 500
        # It fails with probability 1e-4; the runs' keys are fixed.
        result = auditing.mu_lower(*scores, confidence=0.9999)
        assert 0.3 * mu < result < mu


def test_train_many_is_batch_invariant():
    def add_noise(data, key):
        return data + jax.random.normal(key)

    def train_in_batches(size):
        key = jax.random.key(0)
        return auditing.train_many(
            add_noise, 1.0, 0.0, num_runs=20, key=key, batch_size=size
        )

    at_once, in_parts = jax.jit(
        lambda: [train_in_batches(size) for size in (None, 7)]
    )()
    np.testing.assert_array_equal(at_once.inside, in_parts.inside)
    np.testing.assert_array_equal(at_once.outside, in_parts.outside)


def test_too_few_runs_raise():
    with pytest.raises(ValueError, match="num_runs"):
        auditing.train_many(train, X, X, num_runs=0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="outputs"):
        auditing.linear_scores(auditing.Outputs(X[:3], X))
