"""A plan's parts against the functions they combine, and the misuse that raises."""

import functools
import json
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flax import nnx
from jax.sharding import AxisType

import dpjax
from dpjax import Adjacency
from dpjax._core.plain import from_plain
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import events, gdp, pld, truncation

N, B, T = 400, 50, 12
FIXED = {
    "num_examples": N,
    "delta": 1e-5,
    "clip_norm": 0.7,
    "sampling": "fixed",
    "adjacency": Adjacency.ZERO_OUT,
}
DATA = (
    np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32),
    np.random.default_rng(1).normal(size=N).astype(np.float32),
)
KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
W = np.linspace(-1, 1, 5, dtype=np.float32)


@functools.cache
def make_fixed_plan(**changed):
    given = {"batch_size": B, "num_steps": T, "noise_multiplier": 1.6, **changed}
    return dpjax.plan(**{**FIXED, **given})


def loss(w, examples):
    x, y = examples
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def numpy_loss(w, data):
    x, y = data
    return np.mean((np.tanh(x @ w) - y) ** 2)


# --- solving


@pytest.fixture(scope="module")
def poisson_plan():
    return dpjax.plan(
        num_examples=10_000,
        batch_size=100,
        num_steps=500,
        epsilon=2.0,
        delta=1e-5,
        clip_norm=0.3,
    )


def test_target_epsilon_is_met_tightly(poisson_plan):
    """dp_accounting agrees without overflow, which costs next to nothing."""
    assert 1.99 < poisson_plan.epsilon <= 2.0
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(poisson_plan.noise_multiplier))
    # A grid of 1e-3 moves the peer's ε by less than 5e-4.
    peer = (
        PLDAccountant(value_discretization_interval=1e-3)
        .compose(SelfComposedDpEvent(step, 500))
        .get_epsilon(1e-5)
    )
    assert abs(poisson_plan.epsilon - peer) < 5e-3


def test_capacity_is_the_least_that_meets_the_target(poisson_plan):
    def epsilon_at_capacity(room):
        step = truncation.poisson_gaussian(
            poisson_plan.noise_multiplier,
            0.01,
            num_examples=10_000,
            max_batch_size=room,
            adjacency=Adjacency.ADD_REMOVE,
        )
        return pld.epsilon(pld.compose(step, 500), 1e-5)

    assert poisson_plan.epsilon == epsilon_at_capacity(poisson_plan.max_batch_size)
    assert poisson_plan.max_batch_size >= 100 + 3 * np.sqrt(100 * 0.99)
    assert epsilon_at_capacity(poisson_plan.max_batch_size - 1) > 2.0


@pytest.mark.slow  # the capacity is searched for
def test_overflow_at_little_noise_hardly_increases_epsilon():
    """ε with full or sufficient capacity is close to ε without overflow."""
    given = {"num_examples": 1000, "batch_size": 10, "delta": 1e-5, "clip_norm": 1.0}
    step = pld.poisson_gaussian(0.2, 0.01, adjacency=Adjacency.ADD_REMOVE)
    ideal = pld.epsilon(pld.compose(step, 100), 1e-5)
    run = dpjax.plan(num_steps=100, noise_multiplier=0.2, **given)
    # One per cent of δ may go to batches that overflow.
    assert ideal * (1 - 1e-6) <= run.epsilon < ideal * 1.005
    run = dpjax.plan(num_steps=100, noise_multiplier=0.2, max_batch_size=1000, **given)
    assert ideal * (1 - 1e-6) <= run.epsilon < ideal * (1 + 1e-6)


@pytest.mark.slow  # noise is solved for
def test_huge_target_epsilon_is_met_tightly():
    run = dpjax.plan(
        num_examples=10_000,
        batch_size=100,
        num_steps=1000,
        epsilon=1e4,
        delta=1e-5,
        clip_norm=1.0,
    )
    assert 0.999e4 < run.epsilon <= 1e4


@pytest.mark.matrix  # as the test above in its last line
@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": 5.0, "num_steps": 100},
        {"noise_multiplier": 5.0, "num_steps": 100, "batch_size": 900},
        pytest.param(
            {"batch_size": 10, "num_steps": 10, "epsilon": 100.0},
            marks=pytest.mark.slow,
        ),
        {"delta": 0.999, "noise_multiplier": 1.0},
    ],
)
@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_capacity_is_never_below_the_batch_size(changed, adjacency):
    """A capacity of a few examples would cost little, but train nothing."""
    given = {"batch_size": 100, "num_steps": 10, "delta": 1e-5, **changed}
    run = dpjax.plan(num_examples=1000, clip_norm=1.0, adjacency=adjacency, **given)
    rate = run.batch_size / 1000
    # Overflow is the exception.
    deviation = np.sqrt(1000 * rate * (1 - rate))
    assert run.max_batch_size >= min(1000, run.batch_size + 3 * deviation)
    assert run.batch_size <= run.max_batch_size <= 1000


@pytest.mark.slow
def test_extreme_target_epsilon_is_met_or_refused():
    sizes = {"num_examples": 1000, "batch_size": 20, "num_steps": 50}
    sizes |= {"delta": 1e-5, "clip_norm": 1.0}
    for epsilon in (1e-40, 1e-300):
        assert dpjax.plan(**sizes, epsilon=epsilon).epsilon <= epsilon
    with pytest.raises(ValueError, match="smaller epsilon"):
        dpjax.plan(**sizes, epsilon=1e30)


def test_epochs_are_counted_exactly_for_huge_data_sets():
    """Beyond 2**24 float32 would round them."""
    n, sigma = 2**25 + 3, 3.0
    for steps, times in ((n, 1), (n + 1, 2), (2 * n, 2), (2 * n + 1, 3)):
        run = make_fixed_plan(
            num_examples=n, batch_size=1, num_steps=steps, noise_multiplier=sigma
        )
        assert run.epsilon == gdp.epsilon(np.sqrt(times) / sigma, 1e-5)


@pytest.fixture(scope="module")
def solved_plans():
    """A plan solved for each number in turn, using the noise that is found first."""
    run = make_fixed_plan(noise_multiplier=None, epsilon=1.7)
    sigma = run.noise_multiplier
    steps = make_fixed_plan(num_steps=None, epsilon=1.7, noise_multiplier=sigma)
    batch = make_fixed_plan(
        batch_size=None, epsilon=1.7, noise_multiplier=sigma, num_steps=16
    )
    return run, steps, batch, make_fixed_plan(noise_multiplier=sigma)


def test_plan_solves_for_any_one_number(solved_plans):
    run, steps, batch, spent = solved_plans
    # Eight batches an epoch: twice is as often as an example takes part in 12 steps.
    np.testing.assert_allclose(
        run.noise_multiplier, np.sqrt(2) / gdp.mu(1.7, 1e-5), rtol=1e-6
    )
    assert steps.num_steps == 16  # two epochs
    assert batch.batch_size == 57  # the largest with eight batches an epoch
    assert spent.epsilon <= 1.7
    assert {r.solved_for for r in (run, steps, batch, spent)} == {
        "noise_multiplier",
        "num_steps",
        "batch_size",
        "epsilon",
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": None},
        {"epsilon": 1.0},
        {"batch_size": N + 1},
        {"num_steps": 0},
        {"num_steps": 2.5},
        {"delta": 0.0},
        {"delta": 1.0},
        {"clip_norm": 0.0},
        {"clip_norm": float("nan")},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"sampling": "sequential"},
        {"noise": "none"},
        {"adjacency": Adjacency.ADD_REMOVE},
        {"adjacency": "replace"},
        {"sampling": "fixed_size"},  # under ZERO_OUT
        {"sampling": "reshuffled", "adjacency": Adjacency.ADD_REMOVE},
        {"max_batch_size": 60},
        {"max_batch_size": 49, "sampling": "poisson", "adjacency": Adjacency.REPLACE},
        {"max_batch_size": N + 1, "sampling": "poisson"},
    ],
)
def test_invalid_arguments_raise(changed):
    with pytest.raises(ValueError, match=next(iter(changed))):
        make_fixed_plan(**changed)


# --- batches


@pytest.mark.diagonal
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "fixed", "reshuffled"])
def test_host_batches_equal_those_of_a_scan(sampling):
    capacity = {"max_batch_size": 80} if sampling == "poisson" else {}
    run = make_fixed_plan(sampling=sampling, adjacency=Adjacency.REPLACE, **capacity)
    assert run.max_batch_size == capacity.get("max_batch_size", B)
    host = list(run.batches(DATA, key=KEY))
    assert len(host) == T

    def step(_, i):
        return None, run.load(jax.tree.map(jnp.asarray, DATA), i, KEY)

    _, scanned = jax.jit(lambda: jax.lax.scan(step, None, jnp.arange(T)))()
    scanned = jax.tree.map(np.asarray, scanned)
    for i, one in enumerate(host):
        other = jax.tree.map(lambda x, i=i: x[i], scanned)
        jax.tree.map(np.testing.assert_array_equal, one, other)
    later = next(iter(run.batches(DATA, key=KEY, start=9)))
    jax.tree.map(np.testing.assert_array_equal, later, host[9])


@pytest.fixture(scope="module")
def host_examples():
    return make_fixed_plan().load(DATA, 3, KEY)


def test_load_takes_numpy_data_under_jit(host_examples):
    run, host = make_fixed_plan(), host_examples
    inside = jax.jit(lambda t: run.load(DATA, t, KEY))(3)
    assert isinstance(host.data[0], np.ndarray)
    chex.assert_trees_all_equal(host, inside)


def test_each_epoch_has_every_example_once():
    for sampling in ("fixed", "reshuffled"):
        batch = jax.jit(make_fixed_plan(sampling=sampling, num_steps=16).batch)
        for epoch in range(2):
            epoch_indices = [batch(8 * epoch + i, KEY).indices for i in range(8)]
            assert sorted(np.concatenate(epoch_indices).tolist()) == list(range(N))


def test_batches_accept_mapped_indexed_and_list_data(tmp_path):
    run = make_fixed_plan(sampling="poisson", max_batch_size=80, num_steps=2)
    expected = list(run.batches(DATA, key=KEY))
    np.save(tmp_path / "x.npy", DATA[0])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")

    class Indexed:
        def __len__(self):
            return N

        def __getitem__(self, i):
            return DATA[0][i], DATA[1][i]

    for data in ((mapped, DATA[1]), Indexed(), list(zip(*DATA, strict=True))):
        for one, other in zip(run.batches(data, key=KEY), expected, strict=True):
            valid = np.asarray(other.mask)
            np.testing.assert_array_equal(one.mask, valid)
            for a, b in zip(one.data, other.data, strict=True):
                np.testing.assert_array_equal(a[valid], b[valid])


def test_data_of_another_size_or_invalid_start_raise():
    run = make_fixed_plan()
    short = jax.tree.map(lambda x: x[:-1], DATA)
    for data in (short, (DATA[0], DATA[1][:-1]), [1, 2, 3]):
        with pytest.raises(ValueError, match="num_examples"):
            run.batches(data, key=KEY)
        with pytest.raises(ValueError, match="num_examples"):
            run.load(data, 0, KEY)
    with pytest.raises(ValueError, match="start"):
        run.batches(DATA, key=KEY, start=T + 1)
    with pytest.raises(ValueError, match="key"):
        run.batches(DATA, key=0)
    assert list(run.batches(DATA, key=KEY, start=T)) == []


# --- gradients


def clipped_sum(w, examples, clip_norm):
    """In NumPy, over the examples that the mask includes."""
    valid = np.asarray(examples.mask)
    x, y = (np.asarray(leaf, np.float64)[valid] for leaf in examples.data)
    out = np.tanh(x @ w)
    each = (2 * (out - y) * (1 - out**2))[:, None] * x
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    return np.sum(each * np.minimum(1, clip_norm / norms), axis=0)


def test_value_and_grad_ignores_padding():
    run = make_fixed_plan(sampling="poisson", max_batch_size=80)
    examples = next(iter(run.batches(DATA, key=KEY)))
    w = W
    value, grads = jax.jit(run.value_and_grad(loss))(w, examples)
    np.testing.assert_allclose(grads, clipped_sum(w, examples, 0.7), rtol=1e-5)
    valid = np.asarray(examples.mask)
    assert not valid.all()
    rows = jax.tree.map(lambda x: x[valid], examples.data)
    np.testing.assert_allclose(value, numpy_loss(w, rows), rtol=1e-5)

    def one(w, example):  # the same without a batch axis, and with aux
        x, y = example
        return (jnp.tanh(x @ w) - y) ** 2, {"prediction": x @ w}

    fn = jax.jit(run.value_and_grad(one, batched=False, has_aux=True))
    (same, aux), grads_too = fn(w, examples)
    np.testing.assert_allclose(same, value, rtol=1e-5)
    np.testing.assert_allclose(grads_too, grads, rtol=1e-5)
    np.testing.assert_allclose(aux["prediction"], examples.data[0] @ w, rtol=1e-5)


def test_aux_of_a_batched_loss_has_one_row_per_example():
    run = make_fixed_plan()

    def with_aux(w, examples):
        x, _ = examples
        return loss(w, examples), (x @ w, jnp.sum(x))

    examples = next(iter(run.batches(DATA, key=KEY)))
    w = W
    fn = jax.jit(run.value_and_grad(with_aux, has_aux=True))
    (_, (logits, total)), _ = fn(w, examples)
    np.testing.assert_allclose(logits, examples.data[0] @ w, rtol=1e-5)
    np.testing.assert_allclose(total, examples.data[0].sum(1), rtol=1e-4)


def test_batch_without_mask_raises():
    run = make_fixed_plan()
    with pytest.raises(ValueError, match="Examples"):
        run.value_and_grad(loss)(W, DATA)


def test_loss_errors_get_a_note_on_single_examples():
    run = make_fixed_plan()
    examples = next(iter(run.batches(DATA, key=KEY)))
    with pytest.raises(TypeError) as caught:
        run.value_and_grad(lambda w, e: loss(w[:4], e))(W, examples)
    assert any("one example at a time" in note for note in caught.value.__notes__)


# --- optimizers


def test_update_noise_has_the_accounted_scale():
    run = make_fixed_plan()
    w = np.zeros(100_000, np.float32)
    tx = run.optimizer(optax.sgd(1.0), key=KEY)

    @jax.jit
    def two_updates(sums):
        first, state = tx.update(sums, tx.init(sums), sums)
        return first, tx.update(sums, state, sums)[0]

    first, second = map(np.asarray, two_updates(w + 35))
    stddev = 1.6 * 0.7 / B
    for updates in (first, second):
        noise = (updates + 35.0 / B) / stddev
        assert abs(noise.mean()) < 5 / np.sqrt(w.size)  # false alarm: 6e-7
        assert abs(noise.var() - 1) < 5 * np.sqrt(2 / w.size)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(w.size)


def test_updates_beyond_num_steps_raise_or_are_nan():
    run = make_fixed_plan(num_steps=2)
    tx = run.optimizer(optax.adam(0.1), key=KEY)
    w = np.ones(3, np.float32)
    state, update = jax.jit(tx.init)(w), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(w, state, w)
        assert np.isfinite(updates).all()
    assert np.isnan(update(w, state, w)[0]).all()
    # The state is a concrete array, so this raises before anything is computed.
    with pytest.raises(ValueError, match="num_steps"):
        jax.eval_shape(lambda: tx.update(w, state, w))


# --- models


@pytest.mark.slow
def test_models_with_leaves_that_are_not_arrays_train():
    run = make_fixed_plan()
    model = eqx.filter_jit(eqx.nn.MLP)(5, 1, 8, 1, key=KEY)
    examples = next(iter(run.batches(DATA, key=KEY)))

    def squares(model, examples):
        x, y = examples
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    value, grads = eqx.filter_jit(run.value_and_grad(squares))(model, examples)
    trained = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(grads) == jax.tree.structure(trained)
    tx = run.optimizer(optax.adamw(0.1), key=KEY)

    @eqx.filter_jit
    def squares_after(model, grads, trained):
        updates, _ = tx.update(grads, tx.init(trained), trained)
        return squares(eqx.apply_updates(model, updates), examples.data)

    assert squares_after(model, grads, trained) < value
    with pytest.raises(ValueError, match="to train"):
        run.value_and_grad(squares)({"n": 3, "f": jnp.tanh}, examples)


class Counted(eqx.Module):
    weights: jax.Array
    counts: jax.Array
    flag: np.ndarray
    name: str = eqx.field(static=True)


@pytest.mark.diagonal
@pytest.mark.parametrize("apply", [optax.apply_updates, eqx.apply_updates])
def test_integer_and_bool_leaves_are_unchanged(apply):
    run = make_fixed_plan()
    counts = np.arange(3, dtype=np.int32)
    model = Counted(W, counts, np.array([True, False]), "counted")
    examples = next(iter(run.batches(DATA, key=KEY)))
    fn = run.value_and_grad(lambda m, e: loss(m.weights, e))
    _, grads = jax.jit(fn)(model, examples)
    assert grads.counts is None
    assert grads.flag is None
    tx = run.optimizer(optax.adam(0.1), key=KEY)
    alone = Counted(W, None, None, "counted")

    @jax.jit
    def two_steps(model, alone, grads):
        state, state_alone = tx.init(model), tx.init(alone)
        assert jax.tree.structure(state) == jax.tree.structure(state_alone)
        for _ in range(2):
            updates, state = tx.update(grads, state, model)
            model = apply(model, updates)
            updates, state_alone = tx.update(grads, state_alone, alone)
            alone = eqx.apply_updates(alone, updates)
        return model, alone

    model, alone = two_steps(model, alone, grads)
    np.testing.assert_array_equal(model.weights, alone.weights)
    assert model.counts.dtype == counts.dtype
    np.testing.assert_array_equal(model.counts, [0, 1, 2])
    np.testing.assert_array_equal(model.flag, [True, False])
    # Also without parameters, where the inner optimizer needs none.
    updates, _ = jax.eval_shape(lambda: tx.update(grads, tx.init(model)))
    assert updates.counts is None


def test_parameters_without_gradient_are_named_in_a_warning():
    run = make_fixed_plan()
    examples = next(iter(run.batches(DATA, key=KEY)))

    def partly_used_loss(p, examples):
        x, y = examples
        frozen = jax.lax.stop_gradient(jnp.tanh(x @ p["frozen"]))
        h = jnp.concatenate([x @ p["used"][0], frozen], axis=1)
        return jnp.mean((jnp.sum(h, axis=1) + p["bias"] - y) ** 2)

    p = {
        "used": [np.ones((5, 2), np.float32)],
        "frozen": np.ones((5, 3), np.float32),
        "unused": np.ones((), np.float32),
        "half": np.ones(2, jnp.bfloat16),
        "count": np.ones(2, np.int32),
        "bias": np.zeros((), np.float32),
    }
    fn = run.value_and_grad(partly_used_loss)
    names = re.escape("[\"['frozen']\", \"['half']\", \"['unused']\"]")
    with pytest.warns(UserWarning, match=names):
        _, grads = jax.jit(fn)(p, examples)
    assert not np.asarray(grads["frozen"]).any()
    assert np.asarray(grads["bias"]) != 0
    # Traced once more, with no second warning: warnings are errors here.
    jax.eval_shape(lambda p, e: fn(p, e), p, examples)

    def loss_with_frozen_argument(p, examples, frozen):
        return partly_used_loss({**p, "frozen": frozen}, examples)

    p = {"used": p["used"], "bias": p["bias"]}
    fn = run.value_and_grad(loss_with_frozen_argument)
    jax.jit(fn)(p, examples, np.ones((5, 3), np.float32))


class Network(nnx.Module):
    def __init__(self, rngs, norm=None):
        self.first = nnx.Linear(5, 64, rngs=rngs)
        self.norm = norm(64, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        h = h if self.norm is None else self.norm(h)
        self.sown = None
        return self.last(self.dropout(jnp.tanh(h)))[:, 0]


def squared_error(model, examples):
    x, y = examples
    out = model(x)
    return jnp.mean((out - y) ** 2), out


@pytest.mark.slow
def test_nnx_module_trains_with_dropout_keys_per_example():
    run = make_fixed_plan()
    private = run.optimizer(optax.adam(0.02), key=KEY)

    @nnx.jit
    def make_model():
        model = Network(nnx.Rngs(0), nnx.LayerNorm)
        return model, nnx.Optimizer(model, private, wrt=nnx.Param)

    model, tx = make_model()
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape).copy(), DATA)

    @nnx.jit
    def step(model, tx, examples):
        result, grads = run.value_and_grad(squared_error, has_aux=True)(model, examples)
        tx.update(model, grads)
        return result

    outs = []
    for examples in run.batches(same, key=KEY):
        _, out = step(model, tx, examples)
        outs.append(np.asarray(out))
    # Dropout keys differ by example and by step.
    assert np.unique(outs[0]).size == B
    assert not np.isclose(outs[0], outs[1]).any()
    assert outs[-1].mean() != outs[0].mean()


def noisy_loss(w, examples, keys, rngs, others):
    noise = jax.random.normal(keys["dropout"][1])
    noise = jnp.stack([noise, jax.random.normal(rngs())])
    return loss(w, examples) * others["scale"], noise[None]


def test_each_example_gets_its_own_keys():
    run = make_fixed_plan()
    examples = next(iter(run.batches(DATA, key=KEY)))
    words = np.arange(4, dtype=np.uint32).reshape(2, 2)
    w, keys = W, {"dropout": jax.random.wrap_key_data(words)}
    rngs = nnx.Rngs(3)
    fn = nnx.jit(run.value_and_grad(noisy_loss, has_aux=True))
    others = {"scale": 2.0, "none": None}
    (value, first), grads = fn(w, examples, keys, rngs, others)
    (_, second), _ = fn(w, examples, keys, rngs, others)
    first, second = np.asarray(first), np.asarray(second)
    # A key that is passed in is the same in each step; those of nnx advance.
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    draws = np.concatenate([first[:, 0], first[:, 1], second[:, 1]])
    assert np.unique(draws).size == 3 * B
    np.testing.assert_allclose(value, 2 * numpy_loss(w, examples.data), rtol=1e-5)
    _, expected = jax.jit(run.value_and_grad(lambda w, e: 2 * loss(w, e)))(w, examples)
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_example_keys_do_not_depend_on_the_sharding(kind):
    run = make_fixed_plan(batch_size=40)
    examples = next(iter(run.batches(DATA, key=KEY)))
    w = W

    def noisy(w, examples, key):
        noise = jax.random.normal(key)
        return loss(w, examples) * (1 + noise**2), noise[None]

    fn = jax.jit(run.value_and_grad(noisy, has_aux=True))
    expected = fn(w, examples, KEY)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P("data"))
        result = fn(w, jax.device_put(examples, rows), KEY)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), result, expected)


def test_running_averages_raise():
    run = make_fixed_plan()

    @nnx.jit
    def make_models():
        rngs = nnx.Rngs(0)
        return nnx.BatchNorm(5, rngs=rngs), Network(rngs, nnx.BatchNorm)

    norm, model = make_models()
    within = {"norm": norm, "w": W}
    with pytest.raises(ValueError, match="one flax.nnx module"):
        run.value_and_grad(loss)(within, next(iter(run.batches(DATA, key=KEY))))
    examples = next(iter(run.batches(DATA, key=KEY)))
    gradient = nnx.jit(run.value_and_grad(squared_error, has_aux=True))
    with pytest.raises(ValueError, match=r"norm.*mean.*running"):
        gradient(model, examples)
    model.eval()
    _, grads = gradient(model, examples)
    assert np.isfinite(jax.tree.leaves(grads)[0]).all()


# --- guarantees


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fixed", ("(1.761, 1e-05)", "-GDP)", "of 100", "ZERO_OUT")),
        pytest.param(
            "poisson",
            ("(2.000, 1e-05)", "100/10000", "ADD_REMOVE"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_guarantee_states_the_run(name, words, request):
    if name == "poisson":
        run = request.getfixturevalue("poisson_plan")
    else:
        size = {"num_examples": 10_000, "batch_size": 100, "num_steps": 500}
        run = make_fixed_plan(**size, noise_multiplier=5.0, clip_norm=0.3)
    promise = run.guarantee
    result = json.loads(promise.to_json())
    assert result["epsilon"] == run.epsilon
    assert from_plain(RunParameters, result["plan"], "plan") == run.parameters()
    assert events.from_dict(result["event"]) == promise.event
    assert result["num_steps"] == 500
    text = str(promise)
    for word in (*words, "500 steps", "0.3"):
        assert word in text
    assert ("GDP" in text) == (promise.mu is not None)
    shown = re.findall(r"([0-9.]+) at a false-positive rate", text)
    proven = result["attack_true_positive_rate_at_most"].values()
    for rounded, power in zip(map(float, shown), proven, strict=True):
        assert power <= rounded <= power + 1e-4
    noise = float(re.search(r"deviation ([0-9.]+) times", text)[1])
    assert 0.999 * run.noise_multiplier < noise <= run.noise_multiplier
    powers = result["attack_true_positive_rate_at_most"]
    for alpha, power in powers.items():
        # (ε, δ) alone bounds it by this much; the whole profile is tighter.
        allowed = np.exp(run.epsilon) * float(alpha) + 1e-5
        assert float(alpha) < power <= min(allowed * (1 + 1e-6), 1)


def test_guarantee_of_a_stopped_run_is_smaller(poisson_plan):
    early = poisson_plan.guarantee.at(50)
    again = dpjax.plan(
        num_examples=10_000,
        batch_size=100,
        num_steps=50,
        noise_multiplier=poisson_plan.noise_multiplier,
        max_batch_size=poisson_plan.max_batch_size,
        delta=1e-5,
        clip_norm=0.3,
    )
    assert early.epsilon(1e-5) == again.epsilon < 0.6 * poisson_plan.epsilon
    for steps in (0, 501):
        with pytest.raises(ValueError, match="num_steps"):
            poisson_plan.guarantee.at(steps)


def test_plan_is_a_static_jit_argument():
    run = make_fixed_plan()
    assert hash(run) == hash(make_fixed_plan.__wrapped__())
    assert jax.jit(lambda run, x: x * run.clip_norm)(run, 2.0) == pytest.approx(1.4)


def test_guarantee_has_mu_only_where_it_is_gaussian(poisson_plan):
    run = make_fixed_plan()
    mu = Adjacency.ZERO_OUT.sensitivity_factor * np.sqrt(2) / 1.6  # two epochs
    assert run.guarantee.mu == pytest.approx(mu, rel=1e-6)
    assert "-GDP)" in str(run.guarantee)
    assert poisson_plan.guarantee.mu is None


@pytest.mark.parametrize(("delta", "epsilon"), [(1e-8, 8.0), (1e-6, 20.0)])
def test_epsilon_on_a_lattice_is_finite_and_at_most_the_target(delta, epsilon):
    run = make_fixed_plan(
        noise_multiplier=None, epsilon=epsilon, delta=delta, arithmetic="discrete"
    )
    assert float(run.guarantee.epsilon(delta)) <= run.epsilon <= epsilon
    assert run.epsilon > 0.8 * epsilon
    for outside in (0.0, 1.0, 1.0005):
        with pytest.raises(ValueError, match="delta must be"):
            run.guarantee.epsilon(outside)


@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": 1e-200},
        pytest.param(
            {
                "noise_multiplier": 1e-6,
                "batch_size": 5,
                "sampling": "poisson",
                "adjacency": Adjacency.ADD_REMOVE,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fixed", "poisson"],
)
def test_infinite_epsilon_is_reported(changed, request):
    if "sampling" in changed:
        request.getfixturevalue("compiled")
    sizes = {"num_examples": 10, "batch_size": 10, "num_steps": 10}
    run = make_fixed_plan(delta=1e-9, **sizes | changed)
    assert run.epsilon == np.inf
    assert "∞" in str(run.guarantee)
    assert json.loads(run.guarantee.to_json())["epsilon"] == "inf"
    assert float(run.guarantee.tradeoff(0.1)) == 0.0
    for alpha in (-0.1, 2.0, np.nan):
        with pytest.raises(ValueError, match="alpha"):
            run.guarantee.tradeoff(alpha)
