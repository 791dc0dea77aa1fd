"""The grey-box check passes correct sums and fails broken ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency, auditing
from dpjax.auditing import _check as check

CLIP_NORM = 0.3
X = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
DATA = (X, np.sign(X[:, 0]))
W = np.array([0.3, -0.2, 0.0, 0.1], np.float32)


def loss(w, example):
    x, y = example
    return jax.nn.softplus(-y * (x @ w)) + 0.05 * jnp.sum((w - x) ** 2)


def jit_sum(clipped):
    return jax.jit(lambda data, mask: clipped(W, data, mask=mask)[0])


RIGHT = jit_sum(dpjax.clipped_grad(loss, CLIP_NORM, engine="vmap"))


def report_of(fn, adjacency=Adjacency.ADD_REMOVE, data=DATA):
    sensitivity = CLIP_NORM * adjacency.sensitivity_factor
    return auditing.check(fn, data, sensitivity=sensitivity, adjacency=adjacency)


# `check` itself compiles some thirty operations on a batch, one by one. So in the
# default suite all reports come from one fixture; the other tests are marked `matrix`.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("engine", "microbatch_size"), [("vmap", 2), ("bookkeeping", None), ("ghost", 4)]
)
def test_every_engine_passes_the_check(engine, microbatch_size):
    clipped = dpjax.clipped_grad(
        loss, CLIP_NORM, engine=engine, microbatch_size=microbatch_size
    )
    report = report_of(jit_sum(clipped))
    assert report.passed, report
    # The claim is attained: the check would find anything above it.
    assert report.worst.distance > 0.99 * CLIP_NORM


def test_report_keeps_the_finding_with_the_largest_ratio(monkeypatch):
    # The first finding moves the result farther, but is allowed to.
    findings = (
        check.Finding("left out", 5.0, 6.0, 0),
        check.Finding("left out", 2, 1, 3),
    )
    monkeypatch.setattr(check, "_findings", lambda *_: iter(findings))
    report = report_of(None)
    assert report.findings == findings[1:]
    assert not report.passed


@pytest.mark.matrix
def test_noisy_step_with_fixed_key_passes_the_check():
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
def test_replaced_example_moves_sum_by_two_clip_norms():
    report = report_of(RIGHT, Adjacency.REPLACE)
    assert report.passed, report
    assert not auditing.check(
        RIGHT, DATA, sensitivity=1.5 * CLIP_NORM, adjacency=Adjacency.REPLACE
    ).passed


def gradients(data):
    return jax.vmap(jax.grad(loss), (None, 0))(W, data)


def clipped_gradients(data, mask, bound=CLIP_NORM, finite=True):
    g = gradients(data)
    norm = jnp.linalg.norm(g, axis=1, keepdims=True)
    present = mask[:, None] & (jnp.isfinite(norm) | (not finite))
    return jnp.where(present, g * jnp.minimum(1, bound / norm), 0)


def no_clipping(data, mask):
    return jnp.sum(gradients(data), axis=0, where=mask[:, None])


def correct_sum(data, mask):
    return clipped_gradients(data, mask).sum(axis=0)


def clip_norm_exceeded_by_a_tenth(data, mask):
    return clipped_gradients(data, mask, 1.1 * CLIP_NORM).sum(axis=0)


def ignored_mask(data, mask):
    return clipped_gradients(data, jnp.ones_like(mask)).sum(axis=0)


def mean_over_mask(data, mask):
    return (
        len(mask)
        * clipped_gradients(data, mask).sum(axis=0)
        / jnp.maximum(mask.sum(), 1)
    )


def order_dependent_sum(data, mask):
    """The first position has a larger weight, within the clip norm."""
    weights = jnp.where(jnp.arange(len(mask)) == 0, 1.0, 0.5)
    return weights @ clipped_gradients(data, mask)


def unfiltered_nan(data, mask):
    return clipped_gradients(data, mask, finite=False).sum(axis=0)


def batch_normalised_inputs(data, mask):
    x, y = data
    return clipped_gradients((x - x.mean(axis=0, keepdims=True), y), mask).sum(axis=0)


def clipped_total(data, mask):
    total = no_clipping(data, mask)
    return total * jnp.minimum(1, len(mask) * CLIP_NORM / jnp.linalg.norm(total))


BROKEN = {
    no_clipping: "huge",
    clip_norm_exceeded_by_a_tenth: "huge",
    ignored_mask: "masked",
    mean_over_mask: "left out",
    order_dependent_sum: "order",
    unfiltered_nan: "not finite",
    batch_normalised_inputs: "masked",
    clipped_total: "huge",
}


FEW = 5


@functools.cache
def small_report(fn):
    return report_of(jax.jit(fn), data=(X[:FEW], DATA[1][:FEW]))


@pytest.fixture
def report(broken):
    return small_report(broken)


@pytest.mark.diagonal
@pytest.mark.parametrize("broken", BROKEN, ids=lambda fn: fn.__name__)
def test_broken_sum_fails_the_check(broken, report):
    assert not report.passed
    wrong = [x.change for x in report.findings if x.distance > x.allowed]
    assert any(BROKEN[broken] in change for change in wrong), report
    assert "<-" in repr(report)


@pytest.fixture(scope="module")
def reports():
    return {fn: small_report(fn) for fn in (correct_sum, *ONE_THING)}


ONE_THING = (clip_norm_exceeded_by_a_tenth, order_dependent_sum)


def test_check_reports_only_the_broken_property(reports):
    report = reports[correct_sum]
    assert report.passed, report
    # The claim is attained: the check would find anything above it.
    assert report.worst.distance > 0.99 * CLIP_NORM
    assert (
        1.09 < reports[clip_norm_exceeded_by_a_tenth].worst.distance / CLIP_NORM < 1.11
    )
    assert reports[order_dependent_sum].worst.change == "the order"


@pytest.mark.matrix
def test_integer_examples_are_replaced_by_other_examples():
    table = np.float32(np.eye(4) * np.arange(4)[:, None])

    @jax.jit
    def fn(tokens, mask):
        return jnp.sum(jnp.asarray(table)[tokens], axis=0, where=mask[:, None])

    claim = functools.partial(
        auditing.check, fn, np.arange(4), adjacency=Adjacency.ADD_REMOVE
    )
    assert claim(sensitivity=3.0).passed
    assert claim(sensitivity=2.9).worst.distance == 3.0


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="sensitivity"):
        auditing.check(RIGHT, DATA, sensitivity=0.0, adjacency=Adjacency.REPLACE)
    with pytest.raises(ValueError, match="adjacency"):
        auditing.check(RIGHT, DATA, sensitivity=1.0, adjacency="replace")
    with pytest.raises(ValueError, match="data"):
        auditing.check(RIGHT, X[:1], sensitivity=1.0, adjacency=Adjacency.REPLACE)
