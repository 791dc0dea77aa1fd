"""Plans for users with several examples, batches in parts, and metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpjax
from dpjax import Adjacency

KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
SIZES = [1, 5, 2, 9, 3, 1, 4, 2]  # examples of each of eight users
OWNER = np.random.default_rng(3).permutation(np.repeat(np.arange(8), SIZES))
X = np.random.default_rng(0).normal(size=(OWNER.size, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=OWNER.size).astype(np.float32)
W = np.linspace(-1, 1, 5, dtype=np.float32)
C = 0.7


@functools.cache
def make_plan(**changed):
    given = {
        "num_examples": 8,
        "batch_size": 4,
        "num_steps": 6,
        "noise_multiplier": 1.6,
        "delta": 1e-3,
        "clip_norm": C,
        "sampling": "fixed",
        "adjacency": Adjacency.ZERO_OUT,
        "unit": "user",
    }
    return dpjax.plan(**{**given, **changed})


def loss(w, examples):
    x, y = examples
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def clipped_sum_over_users(w, users, most):
    """Mean loss and clipped sum over users by NumPy, of their first `most` examples."""
    total, values = np.zeros(5), []
    for user in users:
        rows = np.flatnonzero(user == OWNER)[:most]
        x, y = X[rows].astype(np.float64), Y[rows].astype(np.float64)
        out = np.tanh(x @ w)
        grad = np.mean((2 * (out - y) * (1 - out**2))[:, None] * x, axis=0)
        total += grad * min(1, C / np.linalg.norm(grad))
        values.append(np.mean((out - y) ** 2))
    return np.mean(values), total


# --- users


@pytest.mark.diagonal("name")
@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize("name", ["streamed", "in memory"])
def test_user_gradient_is_the_clipped_gradient_of_the_mean(most, name):
    users = dpjax.by_user((X, Y), OWNER, max_examples=most)
    run = make_plan()
    fn = jax.jit(run.value_and_grad(loss))
    load = jax.jit(lambda step: run.load(users.stacked(), step, KEY))
    for step in range(2):
        if name == "streamed":
            examples = next(run.batches(users, key=KEY, start=step))
        else:
            examples = load(step)
        value, grads = fn(W, examples)
        expected = clipped_sum_over_users(W, range(4 * step, 4 * step + 4), most)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(grads, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("unit", "data"),
    [
        ("user", dpjax.by_user((X, Y), OWNER, max_examples=2)),
        ("example", list(zip(X[:8], Y[:8], strict=True))),
    ],
)
def test_load_refuses_data_sets_that_are_no_tree_of_arrays(unit, data):
    with pytest.raises(ValueError, match="data must be a pytree of arrays"):
        make_plan(unit=unit).load(data, 0, KEY)
    next(make_plan(unit=unit).batches(data, key=KEY))


def test_one_user_moves_the_sum_by_at_most_the_clip_norm():
    run = make_plan(batch_size=8)
    loss_and_grad = run.value_and_grad(loss)
    fn = jax.jit(lambda data: loss_and_grad(W, run.load(data, 0, KEY)))

    def clipped_sum(x, y):
        users = dpjax.by_user((x, y), OWNER, max_examples=9)
        return np.asarray(fn(users.stacked())[1])

    own = OWNER == 3
    before = clipped_sum(X, Y)
    other = clipped_sum(np.where(own[:, None], 50 * X, X), np.where(own, -1e3, Y))
    nothing = clipped_sum(np.where(own[:, None], np.nan, X), Y)
    assert np.linalg.norm(before - other) <= 2 * C * (1 + 1e-6)
    assert np.linalg.norm(before - other) > 0.1 * C
    assert np.linalg.norm(before - nothing) <= C * (1 + 1e-6)
    assert np.isfinite(nothing).all()


def test_by_user_takes_string_owners_without_repeating_examples():
    names = np.array(["b", "a", "c", "a", "a", "b"])
    users = dpjax.by_user(np.arange(6.0), names, max_examples=2)
    retained = [u.examples[u.mask].tolist() for u in map(users.__getitem__, range(3))]
    assert retained == [[1.0, 3.0], [0.0, 5.0], [2.0]]
    assert len(users) == 3
    assert "3 users" in repr(users)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dpjax.by_user(X, OWNER[:-1], max_examples=2),
        lambda: dpjax.by_user(X, OWNER, max_examples=0),
        lambda: dpjax.by_user(X[:0], OWNER[:0], max_examples=2),
        lambda: next(make_plan().batches((X[:8], Y[:8]), key=KEY)),
        lambda: make_plan().load((X[:8], Y[:8]), 0, KEY),
        lambda: make_plan(unit="example").load(
            dpjax.by_user((X, Y), OWNER, max_examples=2).stacked(), 0, KEY
        ),
        lambda: next(
            make_plan(num_examples=9).batches(
                dpjax.by_user((X, Y), OWNER, max_examples=2), key=KEY
            )
        ),
        lambda: make_plan(unit="person"),
    ],
)
def test_invalid_units_and_sizes_raise(call):
    with pytest.raises(ValueError, match=r"users|max_examples|data|unit"):
        call()


def test_guarantee_names_the_unit():
    result = make_plan().guarantee
    assert result.record()["unit_of_privacy"] == "one user"
    text = str(result)
    assert "one user's contribution is replaced" in text
    assert "No attack on one user" in text
    assert "of the 8 examples" not in text
    assert "one example" in str(make_plan(unit="example").guarantee)


def test_dropout_masks_differ_between_examples_of_a_user():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(64))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    users = dpjax.by_user(np.ones((4, 64), np.float32), [0, 0, 1, 1], max_examples=2)
    run = make_plan(num_examples=2, batch_size=2, clip_norm=1e3)

    def masked_sum(model, x):
        masked = model.drop(x)
        return jnp.sum(masked @ model.w[...]), masked

    loss_and_grad = run.value_and_grad(masked_sum, has_aux=True)

    @nnx.jit
    def kept_entries():
        examples = run.load(users.stacked(), 0, KEY)
        return loss_and_grad(Model(nnx.Rngs(3)), examples)[0][1]

    rows = {tuple(row.tolist()) for row in np.asarray(kept_entries()).reshape(4, 64)}
    assert len(rows) == 4


# --- parts of a batch


@pytest.fixture(scope="module")
def poisson_plan():
    return make_plan(
        unit="example",
        num_examples=OWNER.size,
        sampling="poisson",
        adjacency=Adjacency.ADD_REMOVE,
        batch_size=9,
        max_batch_size=20,
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_accumulated_parts_equal_the_whole_batch(poisson_plan, size):
    run = poisson_plan
    examples = next(iter(run.batches((X, Y), key=KEY)))
    assert 0 < np.sum(examples.mask) < 20

    def with_aux(w, batch):
        return loss(w, batch), batch[0] @ w

    fn = jax.jit(run.value_and_grad(with_aux, has_aux=True))
    (value, aux), grads = fn(W, examples)
    parts = list(examples.parts(size))
    assert {np.size(p.mask) for p in parts} == {size}
    assert sum(np.sum(p.mask) for p in parts) == np.sum(examples.mask)
    (same, rows), total = dpjax.accumulate(fn, size)(W, examples)
    np.testing.assert_allclose(same, value, rtol=1e-5)
    np.testing.assert_allclose(total, grads, rtol=1e-5)
    np.testing.assert_allclose(rows, aux, rtol=1e-5)
    plain = jax.jit(run.value_and_grad(loss, microbatch_size=size))(W, examples)
    np.testing.assert_allclose(plain[1], grads, rtol=1e-5)


def test_optax_multi_steps_weakens_the_signal():
    """The docstrings warn of it: the sum is divided by k, and its noise is not."""
    common = {"clip_norm": 1.0, "expected_batch_size": 40, "key": KEY}
    n, k = 50_000, 4

    once = dpjax.dp_sgd(1.0, noise_multiplier=2.0, **common)
    several = optax.MultiSteps(once, k)

    @jax.jit
    def last_updates(sums, w):
        state = several.init(w)
        for _ in range(k):
            updates, state = several.update(sums, state, w)
        return updates, once.update(sums * k, once.init(w))[0]

    updates = last_updates(np.full(n, 10, np.float32), np.zeros(n, np.float32))
    wrong, right = map(np.asarray, updates)
    # Of 50,000 draws; false alarm below 1e-6 each.
    np.testing.assert_allclose(np.std(right), np.std(wrong), rtol=0.03)
    np.testing.assert_allclose(np.mean(right), k * np.mean(wrong), rtol=0.03)


# --- metrics


def test_metrics_ignore_padding():
    per_example = dpjax.PerExample(
        loss=np.array([1, 3, 1e9, 2], np.float32),
        norm=np.array([0.2, 5, 1e9, np.nan], np.float32),
        aux=(),
    )
    mask = np.array([True, True, False, True])
    metrics = jax.jit(lambda p, m: dpjax.metrics(p, 1.0, mask=m))
    result = metrics(per_example, mask)
    assert result.num_examples == 3
    np.testing.assert_allclose(result.loss, 2.0)
    np.testing.assert_allclose(result.fraction_clipped, 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(
        result.norm_quantiles, np.quantile([0.2, 5.0], [0.1, 0.5, 0.9]), rtol=1e-6
    )
    empty = metrics(per_example, mask & False)
    assert (empty.num_examples, empty.loss, empty.fraction_clipped) == (0, 0, 0)
    with pytest.raises(ValueError, match="mask"):
        dpjax.metrics(per_example, 1.0, mask=mask[:2])
    with pytest.raises(ValueError, match="clip_norm"):
        dpjax.metrics(per_example, 0.0)


def test_plan_metrics_match_per_example_norms():
    run = make_plan(unit="example", num_examples=OWNER.size, batch_size=9)
    examples = next(run.batches((X, Y), key=KEY, start=2))
    result = jax.jit(run.metrics(loss))(W, examples)
    rows = jax.jit(jax.vmap(lambda x, y: jax.grad(loss)(W, (x[None], y[None]))))
    norms = np.linalg.norm(rows(*examples.data), axis=1)[np.asarray(examples.mask)]
    np.testing.assert_allclose(result.fraction_clipped, np.mean(norms > C), rtol=1e-5)
    np.testing.assert_allclose(
        result.norm_quantiles, np.quantile(norms, [0.1, 0.5, 0.9]), rtol=1e-4
    )


def test_unsortable_owners_are_grouped_by_equality():
    result = dpjax.by_user(
        np.arange(5.0), np.array([3, "a", 3, 1.5, "a"], object), max_examples=9
    )
    assert len(result) == 3
    retained = [u.examples[u.mask].tolist() for u in map(result.__getitem__, range(3))]
    assert retained == [[0.0, 2.0], [1.0, 4.0], [3.0]]
    missing = np.array([3, np.nan, 1, 3, np.nan, 1, 3], object)
    with pytest.raises(ValueError, match="differs from itself"):
        dpjax.by_user(np.arange(7.0), missing, max_examples=9)
    for dtype in (np.float64, np.float16, jnp.bfloat16):
        names = np.array([1.0, np.nan, np.nan, 1.0], dtype)
        assert len(dpjax.by_user(np.arange(4.0), names, max_examples=9)) == 2


def test_keys_of_accumulated_parts_equal_those_of_the_batch():
    run = make_plan(unit="example", num_examples=OWNER.size, batch_size=9)
    examples = next(run.batches((X, Y), key=KEY))
    key = jax.random.wrap_key_data(np.array([0, 3], np.uint32))

    def loss_with_random_bits(w, batch, key):
        x, _ = batch
        return jnp.sum(x @ w) + 0 * jnp.sum(x), jax.random.bits(key, (1,))

    fn = jax.jit(run.value_and_grad(loss_with_random_bits, has_aux=True))
    (_, whole), _ = fn(W, examples, key)
    (_, parts), _ = dpjax.accumulate(fn, 4)(W, examples, key)
    np.testing.assert_array_equal(whole, parts)
    assert len(set(np.asarray(whole).ravel().tolist())) == 9
