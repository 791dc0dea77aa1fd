"""The grey-box check passes what is right, and finds what is broken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency, auditing

CLIP_NORM = 0.3
X = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
DATA = (X, np.sign(X[:, 0]))
W = np.array([0.3, -0.2, 0.0, 0.1], np.float32)


def loss(w, example):
    x, y = example
    return jax.nn.softplus(-y * (x @ w)) + 0.05 * jnp.sum((w - x) ** 2)


def sums_of(clipped):
    return jax.jit(lambda data, mask: clipped(W, data, mask=mask)[0])


RIGHT = sums_of(dpjax.clipped_grad(loss, CLIP_NORM, engine="vmap"))


def report_of(fn, adjacency=Adjacency.ADD_REMOVE, data=DATA):
    sensitivity = CLIP_NORM * adjacency.sensitivity_factor
    return auditing.check(fn, data, sensitivity=sensitivity, adjacency=adjacency)


# `check` itself compiles some thirty operations on a batch, one by one. So the default
# suite has its reports from one fixture, and the rest is one configuration more.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("engine", "microbatch_size"), [("vmap", 2), ("bookkeeping", None), ("ghost", 4)]
)
def test_every_engine_passes(engine, microbatch_size):
    clipped = dpjax.clipped_grad(
        loss, CLIP_NORM, engine=engine, microbatch_size=microbatch_size
    )
    report = report_of(sums_of(clipped))
    assert report.passed, report
    # The claim is attained: the check would find anything above it.
    assert report.worst.distance > 0.99 * CLIP_NORM


@pytest.mark.matrix
def test_a_whole_step_passes_under_its_key():
    """dp-SGD divides by a constant: one example moves the step by lr · C / size."""

    @jax.jit
    def step(data, mask):
        tx = dpjax.dp_sgd(
            2.0,
            clip_norm=CLIP_NORM,
            noise_multiplier=3.0,
            expected_batch_size=5,
            key=jax.random.key(0),
        )
        updates, _ = tx.update(RIGHT(data, mask), tx.init(W))
        return updates

    claim = {"adjacency": Adjacency.ZERO_OUT}
    report = auditing.check(step, DATA, sensitivity=2 * CLIP_NORM / 5, **claim)
    assert report.passed, report
    assert not auditing.check(
        step, DATA, sensitivity=1.9 * CLIP_NORM / 5, **claim
    ).passed


@pytest.mark.matrix
def test_a_replaced_example_moves_twice_as_far():
    report = report_of(RIGHT, Adjacency.REPLACE)
    assert report.passed, report
    assert not auditing.check(
        RIGHT, DATA, sensitivity=1.5 * CLIP_NORM, adjacency=Adjacency.REPLACE
    ).passed


def gradients(data):
    return jax.vmap(jax.grad(loss), (None, 0))(W, data)


def scaled(data, mask, bound=CLIP_NORM, finite=True):
    g = gradients(data)
    norm = jnp.linalg.norm(g, axis=1, keepdims=True)
    there = mask[:, None] & (jnp.isfinite(norm) | (not finite))
    return jnp.where(there, g * jnp.minimum(1, bound / norm), 0)


def no_clipping(data, mask):
    return jnp.sum(gradients(data), axis=0, where=mask[:, None])


def as_it_should_be(data, mask):
    return scaled(data, mask).sum(axis=0)


def a_tenth_too_much(data, mask):
    return scaled(data, mask, 1.1 * CLIP_NORM).sum(axis=0)


def mask_ignored(data, mask):
    return scaled(data, jnp.ones_like(mask)).sum(axis=0)


def mean_of_those_there(data, mask):
    return len(mask) * scaled(data, mask).sum(axis=0) / jnp.maximum(mask.sum(), 1)


def order_leaked(data, mask):
    """The first place weighs more, within the clip norm."""
    weights = jnp.where(jnp.arange(len(mask)) == 0, 1.0, 0.5)
    return weights @ scaled(data, mask)


def not_a_number_let_through(data, mask):
    return scaled(data, mask, finite=False).sum(axis=0)


def batch_normalised(data, mask):
    x, y = data
    return scaled((x - x.mean(axis=0, keepdims=True), y), mask).sum(axis=0)


def clipped_as_a_whole(data, mask):
    total = no_clipping(data, mask)
    return total * jnp.minimum(1, len(mask) * CLIP_NORM / jnp.linalg.norm(total))


BROKEN = {
    no_clipping: "huge",
    a_tenth_too_much: "huge",
    mask_ignored: "masked",
    mean_of_those_there: "left out",
    order_leaked: "order",
    not_a_number_let_through: "not finite",
    batch_normalised: "masked",
    clipped_as_a_whole: "huge",
}


FEW = 5


@functools.cache
def report_of_few(fn):
    return report_of(jax.jit(fn), data=(X[:FEW], DATA[1][:FEW]))


@pytest.fixture
def report(broken):
    return report_of_few(broken)


@pytest.mark.diagonal
@pytest.mark.parametrize("broken", BROKEN, ids=lambda fn: fn.__name__)
def test_what_is_broken_is_found(broken, report):
    assert not report.passed
    wrong = [x.change for x in report.findings if x.distance > x.allowed]
    assert any(BROKEN[broken] in change for change in wrong), report
    assert "<-" in repr(report)


@pytest.fixture(scope="module")
def reports():
    return {fn: report_of_few(fn) for fn in (as_it_should_be, *ONE_THING)}


ONE_THING = (a_tenth_too_much, order_leaked)


def test_one_thing_that_is_broken_is_all_that_is_found(reports):
    report = reports[as_it_should_be]
    assert report.passed, report
    # The claim is attained: the check would find anything above it.
    assert report.worst.distance > 0.99 * CLIP_NORM
    assert 1.09 < reports[a_tenth_too_much].worst.distance / CLIP_NORM < 1.11
    assert reports[order_leaked].worst.change == "the order"


@pytest.mark.matrix
def test_examples_without_floats_are_replaced_by_others():
    table = np.float32(np.eye(4) * np.arange(4)[:, None])

    @jax.jit
    def fn(tokens, mask):
        return jnp.sum(jnp.asarray(table)[tokens], axis=0, where=mask[:, None])

    claim = functools.partial(
        auditing.check, fn, np.arange(4), adjacency=Adjacency.ADD_REMOVE
    )
    assert claim(sensitivity=3.0).passed
    assert claim(sensitivity=2.9).worst.distance == 3.0


def test_an_argument_out_of_range_is_named():
    with pytest.raises(ValueError, match="sensitivity"):
        auditing.check(RIGHT, DATA, sensitivity=0.0, adjacency=Adjacency.REPLACE)
    with pytest.raises(ValueError, match="adjacency"):
        auditing.check(RIGHT, DATA, sensitivity=1.0, adjacency="replace")
    with pytest.raises(ValueError, match="data"):
        auditing.check(RIGHT, X[:1], sensitivity=1.0, adjacency=Adjacency.REPLACE)
