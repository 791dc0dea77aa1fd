"""Warnings for parameters that only noise moves, and misuse that raises."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax

KEY = jax.random.wrap_key_data(np.array([0, 5], np.uint32))


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
    """JAX's default, since losses of users broadcast."""
    with jax.numpy_rank_promotion("allow"):
        yield


_RANDOM = np.random.default_rng(0)
DATA = {
    name: _RANDOM.normal(size=(100, 4)).astype(np.float32) for name in ("x", "positive")
}
PARAMS = {
    "w": _RANDOM.normal(size=(4, 3)).astype(np.float32),
    "b": np.ones(3, np.float32),
    "scale": np.float32(0.3),
}


@functools.cache
def _make_plan(**others):
    setting = {"noise_multiplier": 1.0, "clip_norm": 1.0, **others}
    return dpjax.plan(
        num_examples=100,
        batch_size=20,
        num_steps=5,
        delta=1e-5,
        sampling="fixed",
        adjacency=dpjax.Adjacency.REPLACE,
        **setting,
    )


def _first_batch():
    return next(_make_plan().batches(DATA, key=KEY))


def _embed(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def info_nce(params, batch):
    one, other = (_embed(params, batch[name]) for name in ("x", "positive"))
    one, other = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (one, other))
    logits = one @ other.T * jnp.exp(params["scale"])
    labels = jnp.arange(len(logits))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def diagonal_info_nce(params, batch):
    logits = _embed(params, batch["x"]) @ _embed(params, batch["positive"]).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(params["scale"] * logits)))


def standardized(params, batch):
    h = batch["x"] @ params["w"]
    h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)
    return jnp.mean((jax.nn.relu(h) + params["b"]) ** 2) * params["scale"]


def centered_after_a_scan(params, batch):
    def body(h, _):
        return jnp.tanh(h @ params["w"] @ params["w"].T), None

    h, _ = jax.lax.scan(body, batch["x"], None, length=3)
    spread = jnp.mean((h - h.mean(0)) ** 2)
    return spread + jnp.sum(params["b"] ** 2) * params["scale"]


def frozen_loss(params, batch):
    h = batch["x"] @ jax.lax.stop_gradient(params["w"]) + params["b"]
    return jnp.mean(h**2)


def per_example_loss(params, batch):
    logits = jax.nn.gelu(_embed(params, batch["x"])) * params["scale"]
    labels = jnp.zeros(len(logits), int)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def outer_differences(params, batch):
    """Distances between the entries of one example, and between examples."""
    h = _embed(params, batch["x"])
    within = h[:, :, None] - h[:, None, :]
    between = h[:, None] - h[None]
    products = h[:, :, None] * batch["x"][:, None, :3]
    swapped = batch["x"][:, :3, None] * h[:, None, :]
    cross = jnp.mean((products - swapped) ** 2)
    return (jnp.mean(within**2) + cross) * params["scale"] + jnp.mean(between**2)


def in_batch_distances(params, batch):
    h = _embed(params, batch["x"])
    return jnp.mean((h[:, None] - h[None]) ** 2) + params["scale"] ** 2


def lookups_and_integers(params, batch):
    """Constants computed by indices, integers and bit operations."""
    index = jnp.round(jnp.abs(batch["x"][:, 0])).astype(jnp.int32) + 4
    outside = 1 - jnp.ones(5).at[index].get(mode="fill", fill_value=0)
    small = (index % 2 + 1).astype(jnp.uint8) * jnp.uint8(100)
    wrapped = small.astype(jnp.int32) * small.astype(jnp.int32) - small * small
    fraction = index.astype(jnp.float32) / 3 - (index // 3).astype(jnp.float32)
    bits = (~jnp.ones((), jnp.int32)).astype(jnp.float32)
    h = _embed(params, batch["x"])
    factors = outside * 2 + wrapped.astype(jnp.float32) + fraction
    return jnp.mean((factors + bits) * h[:, 0] * params["scale"])


def quotients_of_unsigned_integers(params, batch):
    """Factors (−u) / v + u / v, which are not zero for unsigned integers."""
    factors = _embed(params, batch["x"])[:, 0]
    for dtype in (jnp.uint8, jnp.uint4):
        u = 1 + jnp.round(jnp.abs(batch["x"][:, 0])).astype(jnp.int32)
        u, v = u.astype(dtype), jnp.full(u.shape, 2).astype(dtype)
        quotients = jax.lax.div(-u, v) + jax.lax.div(u, v)
        factors *= quotients.astype(jnp.float32)
    return jnp.mean(factors) * params["scale"]


def _names_of_zero_gradients(gradient):
    """Names of gradients below 1e-6: cancelling terms may leave a rounding error."""
    return {name for name, g in gradient.items() if np.max(np.abs(g)) < 1e-6}


ALL, BATCH, FROZEN = {"w", "b", "scale"}, "in a batch of one", "frozen or unused"


@pytest.mark.parametrize(
    ("loss", "zero", "reason"),
    [
        pytest.param(info_nce, ALL, BATCH, marks=pytest.mark.matrix),
        (diagonal_info_nce, ALL, BATCH),
        pytest.param(standardized, {"w"}, BATCH, marks=pytest.mark.matrix),
        pytest.param(centered_after_a_scan, {"w"}, BATCH, marks=pytest.mark.matrix),
        (frozen_loss, {"w", "scale"}, FROZEN),
        pytest.param(per_example_loss, set(), None, marks=pytest.mark.matrix),
        pytest.param(outer_differences, set(), None, marks=pytest.mark.matrix),
        pytest.param(in_batch_distances, {"w", "b"}, BATCH, marks=pytest.mark.matrix),
        (lookups_and_integers, set(), None),
        pytest.param(
            quotients_of_unsigned_integers, set(), None, marks=pytest.mark.matrix
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_warning_names_every_parameter_with_zero_gradient(loss, zero, reason):
    batch = _first_batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, sums = jax.jit(_make_plan().value_and_grad(loss))(PARAMS, batch)
    # The names are those whose gradient by plain JAX is zero.
    one = jax.tree.map(lambda x: x[:1], DATA)
    gradient = jax.jit(jax.grad(loss))(PARAMS, one)
    assert zero == _names_of_zero_gradients(gradient)
    assert zero == _names_of_zero_gradients(sums)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == bool(zero)
    for message in messages:
        assert {name for name in ALL if f"['{name}']" in message} == zero
        assert reason in message


def _norm_at_zero_loss(params, batch):
    h = jnp.mean(batch["x"] @ params["w"]) * params["scale"]
    return h + jnp.linalg.norm(params["b"])


def _linear_loss(params, batch):
    return jnp.mean(batch["x"] @ params["w"] + params["b"]) * params["scale"]


def _dead_relu_loss(params, batch):
    h = jax.nn.relu(batch["x"] @ params["w"] - 1e6)
    return jnp.mean((h + params["b"]) ** 2) * params["scale"]


_WITHOUT_BIAS = {**PARAMS, "b": np.zeros(3, np.float32)}


@pytest.fixture(scope="module")
def eager_warnings():
    """The warnings of each loss, in successive calls outside `jax.jit`.

    There every operation is a program of its own: the fixture compiles them once for
    all tests.
    """
    batch = _first_batch()
    empty = batch._replace(mask=np.zeros_like(batch.mask))
    calls = {
        _norm_at_zero_loss: [(_WITHOUT_BIAS, batch)],
        _dead_relu_loss: [(PARAMS, empty), (PARAMS, batch), (PARAMS, batch)],
    }
    messages = {}
    with jax.numpy_rank_promotion("allow"):
        for loss, arguments in calls.items():
            gradient = _make_plan().value_and_grad(loss)
            messages[loss] = []
            for params, examples in arguments:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    gradient(params, examples)
                messages[loss].append([str(warning.message) for warning in caught])
    return messages


def test_batch_without_contributing_examples_warns(eager_warnings):
    ((message,),) = eager_warnings[_norm_at_zero_loss]
    assert re.search("none of the examples .* contributes", message)
    metrics = jax.jit(_make_plan().metrics(_norm_at_zero_loss))(
        _WITHOUT_BIAS, _first_batch()
    )
    assert metrics.num_contributing == 0
    assert all(bool(metrics.zero_sums[name]) for name in ("w", "b"))


def test_zero_gradient_sums_warn_once_and_are_in_metrics(eager_warnings):
    _, (message,), second = eager_warnings[_dead_relu_loss]
    assert re.search(r"sum for .*'w'.* is exactly zero", message)
    assert second == []
    batch = _first_batch()
    metrics = jax.jit(_make_plan().metrics(_dead_relu_loss))(PARAMS, batch)
    assert metrics.num_contributing == np.sum(batch.mask)
    zero = {name: bool(x) for name, x in metrics.zero_sums.items()}
    assert zero == {"w": True, "b": False, "scale": False}


def _loss_with_extreme_constants(params, batch):
    huge = jnp.prod(jnp.full(2000, 2.0))
    no_number = jnp.power(jnp.full((), -8.0), jnp.full((), 1 / 3))
    infinite = jax.lax.integer_pow(jnp.zeros(()), -1)
    h = jnp.mean(batch["x"] @ params["w"] + params["b"]) * params["scale"]
    return h + jax.lax.stop_gradient(huge * no_number * infinite)


def test_overflowing_constants_do_not_break_a_loss():
    gradient = jax.jit(_make_plan().value_and_grad(_loss_with_extreme_constants))
    _, sums = gradient(PARAMS, _first_batch())
    assert all(np.any(np.asarray(x)) for x in sums.values())


def test_empty_batch_does_not_warn(eager_warnings):
    assert eager_warnings[_dead_relu_loss][0] == []


MASK = {"w": True, "b": False, "scale": True}
LABELS = {"w": "private", "b": "public", "scale": "private"}


def _wrap_optimizer(wrapper, optimizer):
    if wrapper == "masked":
        return optax.masked(optimizer, MASK)
    return optax.partition({"private": optimizer, "public": optax.sgd(0.1)}, LABELS)


@pytest.mark.parametrize("wrapper", ["masked", "partition"])
def test_mask_around_a_plan_optimizer_raises(wrapper):
    optimizer = _wrap_optimizer(
        wrapper, _make_plan().optimizer(optax.sgd(0.1), key=KEY)
    )
    with pytest.raises(ValueError, match=r"Put the mask inside"):
        optimizer.init(PARAMS)


def test_masked_updates_raise():
    optimizer = _make_plan().optimizer(optax.sgd(0.1), key=KEY)
    sums = {**PARAMS, "b": optax.MaskedNode()}
    with pytest.raises(ValueError, match="updates must be the whole pytree"):
        optimizer.update(sums, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize("wrapper", ["masked", "partition"])
def test_mask_inside_a_plan_optimizer_keeps_noise_everywhere(wrapper):
    optimizer = _make_plan().optimizer(
        _wrap_optimizer(wrapper, optax.sgd(0.1)), key=KEY
    )
    sums = jax.tree.map(np.zeros_like, PARAMS)
    update = jax.jit(lambda u, p: optimizer.update(u, optimizer.init(p), p)[0])
    updates = jax.device_get(update(sums, PARAMS))
    assert all(np.all(x != 0) for x in jax.tree.leaves(updates))  # noise is everywhere


@pytest.mark.parametrize("chained", [False, True])
def test_extra_update_arguments_raise(chained):
    optimizer = _make_plan().optimizer(optax.polyak_sgd(), key=KEY)
    if chained:
        optimizer = optax.chain(optimizer, optax.contrib.reduce_on_plateau())
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=r"no further arguments.*\['value'\]"):
        optimizer.update(PARAMS, state, PARAMS, value=np.float32(1.0))


def test_batch_of_another_plan_raises():
    other = _make_plan(noise_multiplier=0.5)
    batch = next(other.batches(DATA, key=KEY))
    gradient = jax.jit(_make_plan().value_and_grad(_linear_loss))
    with pytest.raises(ValueError, match=r"noise_multiplier \(0.5 and 1.0\)"):
        gradient(PARAMS, batch)
    for part in batch.parts(8):
        with pytest.raises(ValueError, match="noise_multiplier"):
            gradient(PARAMS, part)
    gradient(PARAMS, batch._replace(plan=None))  # a batch of the user's own


def test_batch_of_an_equal_plan_is_accepted():
    again = _make_plan.__wrapped__()
    assert again is not _make_plan()
    batch = next(again.batches(DATA, key=KEY))
    jax.jit(_make_plan().value_and_grad(_linear_loss))(PARAMS, batch)
