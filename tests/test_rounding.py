"""Norms for clipping are never below those in exact arithmetic.

float32 products are exact in float64, whose sums are off by 1e-16 of their largest
term; the cancellations here leave 1e-7 of it, so references are good to 1e-9.
"""

import fractions
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core import rounding as _rounding
from dpjax.clipping._bookkeeping.factors import Factors, OneHot, square_norm

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rounding_margins_cover_gamma(dtype):
    u = fractions.Fraction(1, 2**24 if dtype == jnp.float32 else 2**53)
    for terms in (1, 7, 1000, 262_144):
        exact = terms * u / (1 - terms * u)
        # Plus a few percent, for roundings of the margin itself.
        assert exact * 102 / 100 < fractions.Fraction(_rounding.margin(terms, dtype))
    with pytest.raises(ValueError, match="float32"):
        _rounding.margin(300_000, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        ((), 0.3),
        ((1,), 1.0),
        ((2049,), 0.7),  # 3 · 683
        ((3, 3, 64, 65), 1.0),
        ((1, 5000), 3e-20),
        ((7, 0), 1.0),
        ((3, 4099), 1e15),  # a prime
        ((4_000_001,), 0.3),
    ],
)
@pytest.mark.parametrize("value", [0.1, 1 + 2.0**-12, None])
def test_sums_of_squares_are_tight_upper_bounds(shape, unit, value):
    x = np.full(shape, value or 0.0, np.float32)
    if value is None:
        x = np.random.default_rng(1).lognormal(0, 3, shape).astype(np.float32)
    unit = np.float32(unit)
    x = x * unit
    exact = np.sum(np.square(np.float64(x) / np.float64(unit)))
    got = float(jax.jit(lambda x: _rounding.square_sum(x, unit=unit))(x))
    assert exact <= got <= exact * (1 + 1e-3)


@pytest.mark.parametrize("shape", [(300, 1000), (9, 70, 70), (1_000_000,)])
def test_compiled_staged_sums_are_not_merged(shape):
    """Without the barrier the compiler would merge sums of sums."""
    terms = []

    def staged_total(x):
        result, count = _rounding.staged_sum(x)
        terms.append(count)
        return result

    given = jax.ShapeDtypeStruct((2, *shape), np.float32)
    compiled = jax.jit(jax.vmap(staged_total)).lower(given).compile().as_text()
    sums = re.findall(r"= f32\[([\d,]*)\]\S* reduce\(", compiled)
    assert len(sums) >= 2
    assert terms[0] < 4 * np.sqrt(np.prod(shape)) + 1024


def norm_by_rows(sites, clip_norm):
    square = jax.jit(lambda sites: square_norm(sites, clip_norm))(sites)
    return np.sqrt(np.asarray(square, np.float64)) * clip_norm


def exact_norm(sites, tables):
    total = 0.0
    for (left, right), size in zip(sites, tables, strict=True):
        if isinstance(left, OneHot):
            left = np.eye(size)[np.asarray(left.position)]
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        total = total + np.einsum("bgtn,bgtp->bgnp", left, right, optimize=True)
    return np.sqrt(np.sum(total**2, axis=(1, 2, 3)))


def cancelling_rows(kind, rng, b=40, g=2, t=6, n=130, p=90):
    """Rows whose products cancel in the sum, down to a few roundings."""

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    small = np.float32(2.0) ** -rng.integers(3, 24, (b, 1, 1, 1))
    left, right = normal(b, g, t, n), normal(b, g, t, p)
    if kind == "two sites":
        return [Factors(left, right), Factors(left, -right * (1 + small))], (n, n)
    if kind == "repeated":
        left = np.repeat(left[:, :, :1], t, axis=2) * (1 + small / 2)
        right -= np.mean(right, axis=2, keepdims=True)
        return [Factors(left, right)], (n,)
    if kind == "opposite":
        left[:, :, 1::2] = left[:, :, ::2]
        right[:, :, 1::2] = -right[:, :, ::2] * (1 + small)
        return [Factors(left, right)], (n,)
    if kind == "alike":  # one product, all of whose roundings are the same
        left, right = np.full_like(left, 1.1), np.full_like(right, 0.7)
        right[:, :, 1::2] *= -(1 + small)
        return [Factors(left, right)], (n,)
    if kind == "looked up":  # at few positions, by two lookups
        position = rng.integers(0, 3, (b, g, t))
        again = OneHot(np.roll(position, -1, axis=-1))
        rolled = np.roll(right, -1, axis=2) * (1 + small)
        return [Factors(OneHot(position), right), Factors(again, -rolled)], (n, n)
    # A table looked up, and multiplied by: the uses cancel.
    position = rng.integers(0, n, (b, g, t))
    looked_up = np.eye(n, dtype=np.float32)[position]
    one, other = OneHot(position), Factors(looked_up, -right * (1 + small))
    return [Factors(one, right), other], (n, n)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "kind", ["two sites", "repeated", "opposite", "alike", "looked up", "table"]
)
def test_norms_by_rows_are_upper_bounds_under_cancellation(kind):
    sites, sizes = cancelling_rows(kind, np.random.default_rng(3))
    exact = exact_norm(sites, sizes)
    got = norm_by_rows(sites, 0.5)
    assert np.all(exact <= got)
    # The excess is at most the uncertainty by cancellation.
    lengths = sum(
        np.sum(
            (1 if isinstance(a, OneHot) else np.linalg.norm(a, axis=-1))
            * np.linalg.norm(d, axis=-1),
            axis=(1, 2),
        )
        for a, d in sites
    )
    assert np.all(got**2 <= exact**2 + 3e-5 * lengths**2)


def test_norms_by_rows_are_tight_without_cancellation():
    rng = np.random.default_rng(5)
    left = rng.normal(size=(3, 1, 128, 256)).astype(np.float32)
    right = rng.normal(size=(3, 1, 128, 600)).astype(np.float32)
    sites = [Factors(left, right)]
    exact = exact_norm(sites, (256,))
    got = norm_by_rows(sites, 7.0)
    assert np.all(exact <= got)
    assert np.all(got <= exact * (1 + 1e-3))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_contribution_of_cancelling_rows_is_within_clip_norm(engine):
    """For rows that cancel to any degree."""

    def loss(params, rows):
        x, d = rows
        # In two uses, so that sites cancel too.
        return jnp.sum((x @ params) * d) + jnp.sum((d @ params.T) * x)

    sites, _ = cancelling_rows("opposite", np.random.default_rng(7), b=32, g=1)
    rows = tuple(x[:, 0] for x in sites[0])
    w = np.zeros((130, 90), np.float32)
    assert dpjax.explain(loss, w, rows).rows[0].norm == "rows"
    clip_norm = np.float32(0.3)
    fn = dpjax.clipped_grad(loss, clip_norm, engine=engine)
    one = jax.tree.map(lambda x: x[:, None], rows)
    totals, _ = jax.jit(lambda rows: jax.lax.map(lambda r: fn(w, r), rows))(one)
    norms = np.linalg.norm(np.asarray(totals, np.float64), axis=(1, 2))
    sums = np.einsum("btn,btp->bnp", *(np.asarray(x, np.float64) for x in rows))
    exact = 2 * np.linalg.norm(sums, axis=(1, 2))
    assert np.all(norms <= clip_norm)
    clipped = exact > clip_norm
    assert 4 < np.sum(clipped) < 28
    # Norms of sums that cancel to a hundredth are still accurate to a tenth.
    assert np.all(norms[exact > 10] > 0.9 * clip_norm)
    assert np.sum(exact > 10) > 3


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_network_contribution_attains_the_clip_norm(engine):
    def loss(params, example):
        x, y = example
        h = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.sum((h @ params["v"] - y) ** 2)

    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(12, 16), "b": np.zeros(16, np.float32), "v": normal(16, 3)}
    x, y = normal(6, 12), normal(6, 3)
    fn = dpjax.clipped_grad(loss, 0.7, engine=engine)
    one = jax.tree.map(lambda x: x[:, None], (x, y))
    totals = jax.jit(lambda one: jax.lax.map(lambda e: fn(params, e)[0], one))(one)
    leaves = [np.asarray(x, np.float64).reshape(6, -1) for x in jax.tree.leaves(totals)]
    norms = np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)
    assert np.all(norms <= np.float32(0.7))
    assert np.all(norms >= 0.7 * (1 - 1e-4))


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_float64_norms_have_only_float64_margins(x64, engine):
    rng = np.random.default_rng(3)
    shapes = {"w": (6, 9), "g": (9,), "b": (9,), "v": (9, 70), "o": (70, 80), "s": (5,)}
    params = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    batch = rng.normal(size=(8, 3, 6)), rng.normal(size=(8, 3))

    def loss(params, example):
        x, y = example
        # Gradients formed and pulled back, a checkpointed block, and norms by rows.
        h = jnp.tanh(x @ (params["w"] * params["g"][None]) + params["b"][None])
        h = jax.checkpoint(lambda h: jnp.tanh(h @ params["v"]))(h)
        h = jnp.sum(jnp.tanh(h @ params["o"]), axis=-1)
        return jnp.mean((h - y) ** 2) + jnp.sum(params["s"][:3] * x[0, :3])

    fn = dpjax.clipped_grad(loss, 0.7, engine=engine)

    @jax.jit
    def norms_and_gradients(params, batch):
        plain = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        return fn(params, batch)[1].norm, plain

    norms, gradients = jax.device_get(norms_and_gradients(params, batch))
    flat = [np.reshape(g, (8, -1)) for g in jax.tree.leaves(gradients)]
    exact = np.linalg.norm(np.concatenate(flat, axis=1).astype(np.longdouble), axis=1)
    # Every margin here is of fewer than 200 terms, and is taken twice at most of terms
    # whose sizes add up to less than ten times the norm: 4000 roundings of 1.1e-16.
    assert np.all(norms <= exact * (1 + 1e-12))
    # The reference rounds by a few units, too.
    assert np.all(norms >= exact * (1 - 2e-15))
