"""Inside every solver: the effect of one example, the noise that covers it, its keys.

The noise, or the momentum, is replaced by one that records its inputs and cancels them.
So two runs on neighbouring data have the same iterates, and their sums can be compared
step by step.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from dpjax import Adjacency, solvers
from dpjax._core.keys import stream
from dpjax.accounting import iteration
from dpjax.accounting.tree import momentum_mu, reduced_momentum_mu
from dpjax.noise import _optimizers as optimizers
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.solvers import (
    _descent,
    _output_perturbation,
    _random_round_sgd,
    losses,
)

# The key of seed 17, made without compiling anything.
KEY = jax.random.wrap_key_data(np.array([0, 17], np.uint32))
LOGISTIC = losses.logistic(feature_norm=1.1)
N, BATCH, C, SIGMA = 8, 3, 0.37, 2.9
COMMON = {"adjacency": Adjacency.REPLACE, "batch_size": BATCH, "clip_norm": C}
SETTING = {
    **LOGISTIC.setting,
    "step_size": 0.3,
    "gradient_norm": C,
    "clipped": True,
    "regularization": 0.1,
    "diameter": math.inf,
    "adjacency": Adjacency.REPLACE,
}
MOMENTUM = COMMON | {
    "epsilon": 2.0,
    "delta": 1e-3,
    "num_epochs": 3,
    "learning_rate": 0.1,
    "decay": 0.9999,
}
BOUNDS = {"refresh": 0.3, "change_clip_norm": 0.11, "drift_clip_norm": 0.07}
ROUNDS = COMMON | {"max_rounds": 6, "step_size": 0.5, "smoothness": 0.4}
NOISE = {"noise_multiplier": SIGMA}

SOLVERS: dict[str, dict[str, Any]] = {
    "noisy_gd": {"num_steps": 2, **NOISE, **SETTING},
    "noisy_cyclic_gd": {
        "num_epochs": 3,
        "batch_size": BATCH,
        "order": "fixed",
        **NOISE,
        **SETTING,
    },
    "noisy_sgd": {"num_steps": 7, "batch_size": BATCH, **NOISE, **SETTING},
    "random_round_sgd": ROUNDS | NOISE,
    "output_perturbation": {
        "epsilon": 2.0,
        "delta": 1e-3,
        "num_steps": 6,
        **SETTING,
    },
    "dp_nsgd": MOMENTUM | {"order": "fixed"},
    "sensitivity_reduced_nsgd": MOMENTUM | BOUNDS,
}
DIVISORS = {"noisy_gd": N, "random_round_sgd": 1}  # of a sum and of its noise
BOUND = float(np.float32(C))  # the next float32 above C, which is executed
# Several tests of the default suite use the runs in float32.
DTYPES = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.matrix),
    pytest.param("float64", marks=pytest.mark.matrix),
]


def oscillating_loss(params, example):
    """A loss whose gradient changes with every step, opposite for opposite labels."""
    x, y = example
    return 0.5 * y * jnp.sum(jnp.sin(40.0 * params + x))


def make_neighbours():
    """Two data sets that differ in one example by opposite labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3)).astype(np.float32)
    y = np.sign(x[:, 0]).astype(np.float32)
    x[4] = [0.0, 3.0, 0.0]
    other = y.copy()
    y[4], other[4] = 1.0, -1.0
    return (x, y), (x, other)


class Record(NamedTuple):
    """The inputs of one draw of noise."""

    keys: np.ndarray
    sums: np.ndarray
    stddevs: np.ndarray
    decay: np.ndarray


class Run(NamedTuple):
    result: Any
    records: list[Record]


def make_recorder(records):
    def record(keys, sums, stddevs, decay=0.0):
        def append(*values):
            records.append(Record(*(np.asarray(v) for v in values)))

        data = jax.tree.map(jax.random.key_data, keys)
        jax.debug.callback(append, data, sums, stddevs, decay, ordered=True)

    return record


def patch_noise(monkeypatch, solver, record):
    """Replace the solver's noise by the recorder."""
    divisor = DIVISORS.get(solver, BATCH)

    def record_and_cancel(key, tree, stddev):
        record(key, ravel_pytree(tree)[0], stddev)
        return jax.tree.map(lambda x: -x / divisor, tree)

    def record_and_omit(key, tree, stddev):
        record(key, ravel_pytree(tree)[0], stddev)
        return jax.tree.map(jnp.zeros_like, tree)

    def recording_nsgd(learning_rate, *, clip_norm, noise_multiplier, key, decay, **_):
        def update(updates, state, params=None):
            sums = ravel_pytree(updates)[0]
            record(key, sums, noise_multiplier * clip_norm, decay)
            return jax.tree.map(lambda x: jnp.full_like(x, 0.1), updates), state

        return optax.GradientTransformation(optax.init_empty_state, update)

    def recording_momentum(state, step, terms, *, decay, stddevs, keys, **_):
        record(jnp.stack(keys), jnp.stack(terms), jnp.stack(stddevs), decay)
        return jnp.arange(1.0, 1.0 + terms.drift.size, dtype=terms.drift.dtype), state

    if solver == "dp_nsgd":
        monkeypatch.setattr(optimizers, "dp_nsgd", recording_nsgd)
    elif solver == "sensitivity_reduced_nsgd":
        monkeypatch.setattr(reduced_momentum, "update", recording_momentum)
    elif solver == "output_perturbation":
        monkeypatch.setattr(_output_perturbation, "gaussian_like", record_and_omit)
    elif solver == "random_round_sgd":
        monkeypatch.setattr(_random_round_sgd, "gaussian_like", record_and_cancel)
    else:
        monkeypatch.setattr(_descent, "gaussian_like", record_and_cancel)


def run_solver(solver, loss, data, dtype, **changed):
    params = jax.device_put(np.zeros(3, jnp.dtype(dtype)))
    return getattr(solvers, solver)(
        loss, params, data, key=KEY, **SOLVERS[solver] | changed
    )


@functools.cache
def neighbouring_runs(solver: str, dtype: str) -> tuple[Run, Run]:
    """The same run on two neighbouring data sets."""

    inner = oscillating_loss if "nsgd" in solver else LOGISTIC

    def loss(params, example):  # a new function, for which nothing was compiled
        return inner(params, example)

    out = []
    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as m:
        records: list[Record] = []
        patch_noise(m, solver, make_recorder(records))
        for data in make_neighbours():
            result = run_solver(solver, loss, data, dtype)
            jax.effects_barrier()
            out.append(Run(result, records.copy()))
            records.clear()
    return out[0], out[1]


def make_runs_fixture(solver):
    """A fixture of both runs, so that their compilations are not counted for a test."""

    @pytest.fixture
    def recorded(dtype):
        return neighbouring_runs(solver, dtype)

    return recorded


random_round_runs = make_runs_fixture("random_round_sgd")
output_runs = make_runs_fixture("output_perturbation")
momentum_runs = make_runs_fixture("dp_nsgd")
reduced_momentum_runs = make_runs_fixture("sensitivity_reduced_nsgd")


@pytest.fixture
def step_runs(solver, dtype):
    return neighbouring_runs(solver, dtype)


@pytest.fixture(scope="module")
def float32_runs():
    return {solver: neighbouring_runs(solver, "float32")[0] for solver in SOLVERS}


def sum_distances(solver, dtype):
    one, other = neighbouring_runs(solver, dtype)
    assert len(one.records) == len(other.records) > 0
    pairs = zip(one.records, other.records, strict=True)
    return np.array(
        [np.linalg.norm(np.float64(a.sums) - b.sums, axis=-1) for a, b in pairs]
    )


@pytest.mark.diagonal("solver")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", ["noisy_gd", "noisy_cyclic_gd", "noisy_sgd"])
def test_step_noise_covers_a_replaced_example(step_runs, solver, dtype):
    distances = sum_distances(solver, dtype)
    # A sum of eight terms in float32 has an error of at most 8 u of their sizes.
    assert distances.max() <= 2 * BOUND + 2 * N * 2**-24 * N * BOUND
    assert distances.max() >= 2 * C * (1 - 1e-5)
    for record in step_runs[0].records:
        assert record.sums.dtype == ("float64" if dtype == "float64" else "float32")
        stddev = np.float64(record.stddevs) * DIVISORS.get(solver, BATCH)
        assert SIGMA * BOUND <= stddev * (1 + 2**-50) <= SIGMA * BOUND * (1 + 2**-22)
    if solver == "noisy_cyclic_gd":  # the example is in the second of three steps
        np.testing.assert_array_equal(distances > 0, np.arange(9) % 3 == 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_round_noise_covers_a_replaced_example(random_round_runs, dtype):
    distances = sum_distances("random_round_sgd", dtype)
    run = random_round_runs[0]
    assert len(distances) == int(run.result.num_steps)
    assert distances.max() <= 2 * C * (1 + 1e-6)
    for record in run.records:
        assert np.float64(record.stddevs) >= SIGMA * BOUND * (1 - 2**-50)
    # R is drawn from a stream of its own.
    key = stream(stream(KEY, "solvers.random_round_sgd"), "rounds")
    data = np.asarray(jax.random.key_data(key))
    assert all(np.any(data != r.keys) for r in run.records)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_noise_covers_a_replaced_example(output_runs, dtype):
    (distances,) = sum_distances("output_perturbation", dtype)
    result, (record,) = output_runs[0]
    assert record.sums.dtype == np.float64  # nothing is cast before noise is added
    real = iteration.gradient_descent_sensitivity(
        num_steps=6, num_examples=N, **SETTING
    )
    assert 0.5 * float(real) <= distances <= float(result.sensitivity)
    np.testing.assert_allclose(result.sensitivity, real, rtol=3e-7)
    spent = float(result.sensitivity) / float(record.stddevs)
    assert spent <= float(result.guarantee.mu) <= spent * (1 + 1e-6)
    assert result.params.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_momentum_noise_covers_a_replaced_example(momentum_runs, dtype):
    distances = sum_distances("dp_nsgd", dtype)
    assert 2 * C * (1 - 1e-5) <= distances.max() <= 2 * C * (1 + 1e-6)
    np.testing.assert_array_equal(distances > 0, np.arange(9) % 3 == 1)
    result, records = momentum_runs[0]
    account = functools.partial(
        momentum_mu, num_steps=9, steps_per_epoch=3, order="fixed"
    )
    with jax.enable_x64(True):
        decay = float(records[0].decay)
        spent = float(
            account(
                float(records[0].stddevs) / BOUND,
                decay=decay,
                adjacency=Adjacency.REPLACE,
            )
        )
    assert decay == float(np.float32(decay)) < 0.9999  # exact in any precision
    assert spent <= float(result.guarantee.mu) <= spent * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_momentum_noise_covers_a_replaced_example(reduced_momentum_runs, dtype):
    distances = sum_distances("sensitivity_reduced_nsgd", dtype)
    mixed = 0.7 * 0.11 + 0.3 * C
    bounds = np.array([C, mixed, 0.07])
    assert np.all(distances <= 2 * bounds * (1 + 1e-6))
    assert np.all(distances.max(axis=0) >= 2 * bounds * [0.99, 0.3, 0.3])
    np.testing.assert_array_equal(distances[:, 0] > 0, np.arange(9) % 3 == 1)
    result, records = reduced_momentum_runs[0]
    with jax.enable_x64(True):
        spent = float(
            reduced_momentum_mu(
                tuple(np.float64(records[0].stddevs) / bounds),
                num_steps=9,
                decay=float(records[0].decay),
                steps_per_epoch=3,
                adjacency=Adjacency.REPLACE,
            )
        )
    # The bounds above are in float64: those executed are up to a rounding larger.
    assert spent * (1 - 2**-23) <= float(result.guarantee.mu) <= spent * (1 + 1e-6)


def test_solver_draws_never_share_a_key(float32_runs):
    drawn = [
        tuple(key)
        for run in float32_runs.values()
        for record in run.records
        for key in np.unique(record.keys.reshape(-1, 2), axis=0)
    ]
    # Momentum draws by node from one key per tree, so that its key recurs every step.
    trees = [k for k in set(drawn) if drawn.count(k) > 1]
    assert len(trees) == 1 + 3
    # Keys that other code may derive from the user's key: splits and folds.

    @jax.jit
    def derived_keys():
        keys = jnp.concatenate([KEY[None], jax.random.split(KEY, 3)])
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        folds = jax.vmap(fold, (0, None))(keys, jnp.arange(64)).ravel()
        return jax.random.key_data(jnp.concatenate([KEY[None], folds]))

    made = {tuple(k) for k in np.asarray(derived_keys())}
    assert len(made) == 1 + 4 * 64
    assert not made & set(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_returns_the_same_report(solver):
    result = neighbouring_runs(solver, "float32")[0].result
    assert type(result) is solvers.Result
    assert type(result.curve) is solvers.Curve
    guarantee = result.guarantee
    assert guarantee.adjacency is Adjacency.REPLACE
    assert guarantee.mu is None or guarantee.mu > 0
    # It has a profile, and its last assumption is the one of every guarantee.
    assert 0 < guarantee.epsilon(1e-3) < math.inf
    assert guarantee.assumptions[-1] == "arithmetic is real and Gaussian noise ideal"
    steps = 1 if solver == "random_round_sgd" else result.num_steps
    assert result.curve.loss.size == result.curve.left_out.size == steps
    assert np.all(np.asarray(result.curve.left_out) == 0)
