"""The book-keeping and ghost engines compute the same sums as the vmap engine.

The reference is written out here: per-example gradients by vmap, norms and sums in
NumPy's float64.
"""

import collections
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import programs

import dpjax
from dpjax.clipping._bookkeeping.equations import Comparable

# Norms are rounded up, by up to 1e-4 for the few rows and terms here
# (tests/test_rounding.py); float32 sums of a few hundred terms add some 1e-5.
RTOL = 1e-4


def reference_clipped_sum(
    loss: Any, params: Any, batch: Any, clip_norm: float, keep: Any
):
    """Clipped sum and norms in float64, from float32 per-example gradients."""
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    return clipped_sum_of(gradients, clip_norm, keep)


def clipped_sum_of(gradients: Any, clip_norm: float, keep: Any):
    leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
    flat = np.concatenate([g.reshape(len(g), -1) for g in leaves], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    usable = np.isfinite(norms) & keep
    weight = np.where(usable, np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300)), 0)
    sums = [
        np.tensordot(weight[usable], g[usable], axes=(0, 0)).reshape(g.shape[1:])
        for g in leaves
    ]
    return sums, norms


def assert_matches_reference(
    loss: Any,
    params: Any,
    batch: Any,
    *,
    clip_norm: float = 0.3,
    rtol: float = RTOL,
    keep: Any = True,
    engine: str = "bookkeeping",
    **options: Any,
) -> dpjax.PerExample:
    size = jax.tree.leaves(batch)[0].shape[0]
    keep = np.broadcast_to(keep, (size,))
    fn = dpjax.clipped_grad(loss, clip_norm, engine=engine, **options)

    @jax.jit
    def clipped_and_plain_gradients(params, batch, mask):
        plain = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        return fn(params, batch, mask=mask), plain

    (grads, per_example), plain = clipped_and_plain_gradients(params, batch, keep)
    sums, norms = clipped_sum_of(plain, clip_norm, keep)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    finite = np.isfinite(norms)
    result = np.asarray(per_example.norm)
    np.testing.assert_allclose(result[finite], norms[finite], rtol=rtol)
    total = np.sqrt(sum(np.sum(s**2) for s in sums))
    for got, want, param in zip(
        jax.tree.leaves(grads), sums, jax.tree.leaves(params), strict=True
    ):
        assert got.dtype == jnp.promote_types(param.dtype, jnp.float32)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * total / 10)
    return per_example


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """By NumPy, which compiles nothing."""
    drawn = scale * np.random.default_rng(seed).normal(size=shape)
    return np.asarray(drawn, np.float32)


def linear_params(*sizes: int) -> list[Any]:
    return [
        (normal(i, m, n, scale=m**-0.5), normal(100 + i, n))
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    ]


def mlp(params: Any, example: Any) -> jax.Array:
    x, y = example
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.sum((x - y) ** 2)


MLP = linear_params(12, 16, 16, 3)
MLP_BATCH = (normal(7, 6, 12), normal(8, 6, 3))


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs(), st.sampled_from(["bookkeeping", "ghost"]))
def test_random_programs_match_reference(program, engine):
    assert_matches_reference(*program, engine=engine)


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs(), st.sampled_from(["bookkeeping", "ghost"]))
def test_many_random_programs_match_reference(program, engine):
    assert_matches_reference(*program, engine=engine)


@pytest.mark.diagonal
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize(
    ("microbatch_size", "engine"),
    [(None, "bookkeeping"), (4, "bookkeeping"), (None, "ghost"), (4, "ghost")],
)
def test_mlp_sum_matches_reference_at_every_clip_norm(
    clip_norm, microbatch_size, engine
):
    keep = np.array([True, False, True, True, False, True])
    assert_matches_reference(
        mlp,
        MLP,
        MLP_BATCH,
        clip_norm=clip_norm,
        microbatch_size=microbatch_size,
        keep=keep,
        engine=engine,
    )


def test_mlp_forms_no_per_example_gradient():
    explanation = dpjax.explain(mlp, MLP, MLP_BATCH)
    norms = {row.parameter: row.norm for row in explanation.rows}
    assert [norms[f"[{i}][0]"] for i in range(3)] == ["rows"] * 3
    assert explanation.auto == "bookkeeping"

    wide = linear_params(256, 512, 512, 10)
    batch = (np.zeros((64, 256), np.float32), np.zeros((64, 10), np.float32))
    # One copy of the parameters for each example would be 64 · 0.4e6 · 4 bytes.
    assert temporary_bytes(mlp, wide, batch, "auto") < 5e6


def temporary_bytes(loss: Any, params: Any, batch: Any, engine: str) -> int:
    fn = jax.jit(dpjax.clipped_grad(loss, 1.0, engine=engine))
    return fn.lower(params, batch).compile().memory_analysis().temp_size_in_bytes


def penalised_mlp(params: Any, example: Any) -> jax.Array:
    """A loss with a penalty, for whose matrices no rule applies."""
    return mlp(params, example) + sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_ghost_engine_keeps_no_per_example_gradient():
    wide = linear_params(256, 512, 512, 10)
    batch = (np.zeros((64, 256), np.float32), np.zeros((64, 10), np.float32))
    copies = 64 * 4 * sum(x.size for x in jax.tree.leaves(wide))
    assert temporary_bytes(penalised_mlp, wide, batch, "bookkeeping") > copies / 2
    assert temporary_bytes(penalised_mlp, wide, batch, "ghost") < copies / 10
    assert_matches_reference(penalised_mlp, MLP, MLP_BATCH, engine="ghost")


def test_auto_uses_bookkeeping_where_a_rule_covers_a_parameter():
    assert dpjax.explain(mlp, MLP, MLP_BATCH).auto == "bookkeeping"
    assert dpjax.explain(penalised_mlp, MLP, MLP_BATCH).auto == "vmap"
    for loss, engine in ((mlp, "bookkeeping"), (penalised_mlp, "vmap")):
        result = [
            count_operations(
                jax.jit(dpjax.clipped_grad(loss, 1.0, engine=e)).lower(MLP, MLP_BATCH)
            )
            for e in ("auto", engine)
        ]
        # "auto" shares a few more of the helpers of jnp.
        auto, named = result
        assert auto <= named
        for name in ("dot_general", "reduce", "transpose", "multiply"):
            assert auto[name] == named[name]


def count_operations(lowered: Any) -> collections.Counter[str]:
    """Number of each StableHLO operation, without those that choose the platform."""
    result = collections.Counter(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))
    for choosing in ("case", "constant", "return"):
        del result[choosing]
    return result


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_nonlinear_custom_derivatives_match_reference(engine):
    """Sums of gradients cannot be pulled back through a nonlinear derivative."""

    @jax.custom_vjp
    def limited(w):
        return w

    limited.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(3 * g, -0.1, 0.1),))

    def loss(w, x):
        return jnp.sum(jnp.sin(limited(x @ limited(w))))

    assert_matches_reference(loss, normal(0, 12, 16), MLP_BATCH[0], engine=engine)


def test_aux_and_unbatched_arguments_match_across_engines():
    def loss(frozen, params, x, temperature, y):
        logits = (x @ frozen["w"]) @ params["v"] / temperature
        return -jax.nn.log_softmax(logits)[y], {"logits": logits, "one": 1.0}

    frozen, params = {"w": normal(0, 5, 9)}, {"v": normal(1, 9, 4)}
    x, y = normal(2, 6, 5), np.arange(6) % 4

    @jax.jit
    def all_engines(*args):
        options = {"argnums": 1, "batch_argnums": (2, 4), "has_aux": True}
        return [
            dpjax.clipped_grad(loss, 0.1, engine=engine, **options)(*args)
            for engine in ("vmap", "bookkeeping", "ghost")
        ]

    outs = all_engines(frozen, params, x, 2.0, y)
    for out in outs[1:]:
        chex.assert_trees_all_close(out, outs[0], rtol=2e-5, atol=1e-7)


def test_several_argnums_share_one_norm():
    def loss(w, x, b):
        return jnp.sum(jnp.sin(x @ w + b))

    w, b, x = normal(0, 8, 9), normal(1, 9), normal(2, 5, 8)

    @jax.jit
    def sums_by_engine(*args):
        return [
            dpjax.clipped_grad(loss, 0.2, argnums=(0, 2), engine=engine)(*args)
            for engine in ("bookkeeping", "vmap")
        ]

    got, want = sums_by_engine(w, x, b)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    assert isinstance(got[0], tuple)


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_nonfinite_examples_contribute_zero(engine):
    x, y = normal(7, 9, 12), normal(8, 9, 3)
    for i, bad in enumerate((np.nan, np.inf, 3e38)):
        x[i, 1] = bad
        y[3 + i, 0] = bad
    linear = [(w / 100, b) for w, b in MLP]
    per_example = assert_matches_reference(mlp, linear, (x, y), engine=engine)
    assert np.isfinite(per_example.norm[6:]).all()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squared_norms_neither_overflow_nor_underflow(scale):
    def loss(w, x):
        return jnp.sum((x * scale) @ w / scale * jnp.arange(1.0, 33.0)[None])

    assert_matches_reference(loss, normal(0, 40, 32), normal(1, 3, 4, 40))


def weighted_sums(w, example):
    x, weights = example
    return jnp.sum((x @ w) * weights)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("engine", "arithmetic"),
    [("auto", "real"), ("ghost", "real"), ("vmap", "real"), ("auto", "discrete")],
)
def test_huge_activations_move_the_sum_by_at_most_the_clip_norm(engine, arithmetic):
    # XLA flushes subnormal numbers to zero. If this happens to the reciprocal of an
    # activation, its norm is 0. If it happens to one of two scaled cotangents whose
    # terms nearly cancel, the other one remains. Both moved sums by over 100 C.
    count = 500
    r = np.geomspace(1e-3, 0.5, count)
    x, weights = np.zeros((2, 2, count, 1, 2, 64), np.float32)
    x[..., 0] = np.array([8e37, 1e34, 1e22, 9e37])[[0, 1]].reshape(2, 1, 1, 1)
    weights[..., 0, 0], weights[..., 1, 0] = 1e-22 * (1 + r)[:, None], 0
    weights[..., 1, 0] = -1e-22 * (1 - r)[:, None]

    @jax.jit
    def sums(clip_norms):
        def of(clip_norm, x, weights):
            fn = dpjax.clipped_grad(
                weighted_sums, clip_norm, engine=engine, arithmetic=arithmetic
            )
            return fn(jnp.zeros((64, 64)), (x, weights))[0]  # a batch of one example

        one_each = jax.vmap(of, in_axes=(None, 0, 0))
        return jax.vmap(one_each)(clip_norms, jnp.asarray(x), jnp.asarray(weights))

    clip_norms = np.array([0.1, 1e-6], np.float32)
    norms = np.linalg.norm(np.asarray(sums(clip_norms), np.float64), axis=(-2, -1))
    assert np.all(norms <= clip_norms[:, None])


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_activations_beyond_the_range_of_reciprocals_are_left_out(engine):
    @jax.jit
    def result(clip_norm, x):
        fn = dpjax.clipped_grad(weighted_sums, clip_norm, engine=engine)
        grads, per_example = fn(jnp.zeros((64, 64)), (x, jnp.full((1, 1, 64), 1e-20)))
        return jnp.linalg.norm(grads), per_example.norm[0]

    x = np.zeros((1, 1, 64), np.float32)
    x[..., 0] = 9e37
    length, norm = result(1.0, x)
    assert length <= 1
    assert norm > 1 or not np.isfinite(norm)
    # The reciprocal of a clip norm of 1e38 is 0, too.
    assert result(1e38, x)[0] == 0
    # A large activation alone changes nothing.
    length, norm = result(1.0, x * 1e-12)
    np.testing.assert_allclose(norm, 9e25 * 1e-20 * 8, rtol=1e-4)
    np.testing.assert_allclose(length, 1, rtol=1e-4)


def test_overflow_before_a_masked_parameter_gives_no_nan():
    # Each example's gradient at the masked matrix is finite, but their sum is not. The
    # pull-back through the mask would multiply it by zero.
    def loss(w, example):
        x, y = example
        return jnp.sum((x @ (w * np.zeros((1, 1), np.float32))) * y)

    @jax.jit
    def total(x, y):
        return dpjax.clipped_grad(loss, 1.0, engine="ghost")(jnp.zeros((1, 1)), (x, y))

    rows = np.ones((2, 1, 1), np.float32)
    assert total(1e19 * rows, 2e19 * rows)[0] == 0


def test_huge_activations_of_a_transposed_matrix_are_left_out():
    # The second use of w exchanges the rows: its activations are y, not q.
    def loss(w, example):
        x, p, y, q = example
        return jnp.sum((x @ w) * p) + jnp.sum((y @ w.T) * q)

    @jax.jit
    def total(*batch):
        grads, per_example = dpjax.clipped_grad(loss, 1e-6)(jnp.zeros((64, 64)), batch)
        return jnp.linalg.norm(grads), per_example.norm

    x, p, y, q = np.zeros((4, 2, 2, 64), np.float32)
    y[..., 0] = np.array([4e33, 1e16])[:, None]
    q[..., 0] = 1e-28
    length, norm = total(x, p, y, q)
    assert not np.isfinite(norm[0])
    assert 0 < length <= 1e-6


def test_lookups_in_a_computed_table_have_a_limit():
    # Scaled cotangents that underflow would be multiplied by 2⁹⁰ in the pull-back.
    def loss(w, example):
        index, weights = example
        return jnp.sum((w * 2.0**90)[index] * weights)

    @jax.jit
    def norms(clip_norms):
        batch = np.zeros((1, 3), np.int32), np.full((1, 3, 4), 1e-28, np.float32)

        def norm(clip_norm):
            fn = dpjax.clipped_grad(loss, clip_norm, engine="ghost")
            return fn(jnp.ones((5, 4)), batch)[1].norm[0]

        return jax.vmap(norm)(clip_norms)

    tiny, usual = norms(np.array([1e-6, 1.0], np.float32))
    assert not np.isfinite(tiny)
    np.testing.assert_allclose(usual, 2.0**90 * 1e-28 * 6, rtol=0.01)


@pytest.mark.parametrize("clip_norm", [1e15, np.float32(1e15)])
def test_large_clip_norms_do_not_overflow(clip_norm):
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ (params["w"] * 2.0) + params["b"][None] * 3.0))

    params = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
    x = np.full((2, 1, 3), 0.1, np.float32)
    fn = dpjax.clipped_grad(loss, clip_norm, engine="ghost")
    grads, per_example = jax.jit(fn)(params, x)
    assert np.all(np.isfinite(per_example.norm))
    expected = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, x))))
    chex.assert_trees_all_close(grads, expected(params), rtol=1e-4)


def test_keys_as_examples_match_reference():
    def loss(w, key):
        return jnp.sum(jnp.sin(jax.random.normal(key, (7,)) @ w))

    assert_matches_reference(
        loss, normal(0, 7, 5), jax.random.split(jax.random.key(3), 4)
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_half_precision_sums_in_float32(engine):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MLP)
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MLP_BATCH)
    # bfloat16 rounds to 2⁻⁹, here in the layers' cotangents.
    assert_matches_reference(mlp, params, batch, rtol=3e-2, engine=engine)


@pytest.mark.matrix
def test_mixed_precision_matches_reference():
    def loss(params, example):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        x, y = example
        return mlp(half, (x.astype(jnp.bfloat16), y)).astype(jnp.float32)

    assert_matches_reference(loss, MLP, MLP_BATCH, rtol=3e-2)
    assert {row.norm for row in dpjax.explain(loss, MLP, MLP_BATCH).rows[::2]} == {
        "rows"
    }


def test_unused_and_frozen_leaves_match_reference():
    def loss(params, x):
        h = x @ jax.lax.stop_gradient(params["frozen"])
        h = h + jnp.sum(x @ params["w"]) + params["unused"] * 0
        return jnp.sum(h) + jnp.argmax(params["w"])

    params = {
        "frozen": normal(0, 5, 4),
        "w": normal(1, 5, 4),
        "unused": np.ones(4, np.float32),
    }
    assert_matches_reference(loss, params, normal(2, 3, 5))


def test_losses_independent_of_one_argument_match_reference():
    assert_matches_reference(lambda w, x: jnp.sum(w**2), normal(0, 4), normal(1, 3, 5))
    assert_matches_reference(lambda w, x: jnp.sum(x**2), normal(0, 4), normal(1, 3, 5))


def test_while_loops_without_gradients_match_reference():
    def loss(w, x):
        scale = jax.lax.while_loop(
            lambda s: s < jnp.sum(jnp.abs(x)), lambda s: s * 2, jnp.float32(1)
        )
        return jnp.sum(jnp.tanh(x @ w)) / jax.lax.stop_gradient(scale)

    assert_matches_reference(loss, normal(0, 5, 4), normal(1, 3, 5))


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "ghost", "vmap"])
def test_losses_using_other_examples_raise(engine):
    def loss(w, x):
        h = x @ w
        return jnp.sum(h - jax.lax.pmean(h, "batch"))

    def scanned(w, x):
        return jax.lax.scan(lambda c, _: (c + loss(w, x), None), 0.0, length=2)[0]

    w, x = normal(0, 5, 4), normal(1, 3, 5)
    for fn in (loss, scanned):
        clipped = dpjax.clipped_grad(fn, 1.0, engine=engine)
        with pytest.raises(ValueError, match="named axis"):
            jax.eval_shape(clipped, w, x)
        mapped = jax.vmap(clipped, in_axes=(None, 0), axis_name="batch")
        with pytest.raises(ValueError, match="named axis"):
            jax.eval_shape(mapped, w, x[None])


def test_named_axes_within_one_example_match_reference():
    def loss(w, x):
        def centred(row):
            h = row @ w
            return h - jax.lax.pmean(h, "rows")

        return jnp.sum(jax.vmap(centred, axis_name="rows")(x) ** 2)

    assert_matches_reference(loss, normal(0, 5, 4), normal(1, 3, 6, 5))


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "ghost", "vmap"])
def test_integer_parameters_raise(engine):
    fn = dpjax.clipped_grad(lambda w, x: jnp.sum(x * w), 1.0, engine=engine)
    with pytest.raises(ValueError, match="int32"):
        fn(np.arange(3, dtype=np.int32), np.ones((2, 3), np.float32))


def test_sums_agree_under_jit_vmap_and_scan():
    x, y = MLP_BATCH
    fn = dpjax.clipped_grad(mlp, 0.3, engine="bookkeeping")
    models = jax.tree.map(lambda p: np.stack([p, 2 * p]), MLP)

    def step(params, batch):
        return params, fn(params, batch)[0]

    @jax.jit
    def plain_mapped_and_scanned(models, x, y):
        mapped, _ = jax.vmap(fn, in_axes=(0, None))(models, (x, y))
        _, scanned = jax.lax.scan(step, MLP, (x[None], y[None]))
        return fn(MLP, (x, y))[0], mapped, scanned

    once, mapped, scanned = jax.device_get(plain_mapped_and_scanned(models, x, y))
    for several in (mapped, scanned):
        first = jax.tree.map(lambda x: x[0], several)
        chex.assert_trees_all_close(first, once, rtol=1e-5, atol=1e-7)


def test_traced_clip_norm_equals_static():
    @jax.jit
    def totals(clip_norm):
        traced = dpjax.clipped_grad(mlp, clip_norm, engine="bookkeeping")
        static = dpjax.clipped_grad(mlp, 0.3, engine="vmap")
        return traced(MLP, MLP_BATCH)[0], static(MLP, MLP_BATCH)[0]

    got, want = totals(0.3)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vmap"])
def test_groups_of_leaves_are_clipped_separately(engine):
    def loss(params, example):
        x, y = example
        # One product for leaves of two groups.
        both = jnp.concatenate([params["a"]["w"], params["b"]], axis=1)
        return mlp([(both, params["a"]["bias"]), (params["c"], 0.0)], (x, y))

    params = {
        "a": {"w": normal(0, 12, 20), "bias": normal(1, 25)},
        "b": normal(2, 12, 5),
        "c": normal(3, 25, 3),
    }
    keep = np.array([True, False, True, True, True, True])
    x, y = MLP_BATCH
    x = x.copy()
    x[3, 0] = np.nan
    bounds = {"a": 0.3, "b": 0.05, "c": 2.0}
    fn = dpjax.clipped_grad(loss, bounds, engine=engine)

    @jax.jit
    def clipped_and_plain_gradients(params, batch, mask):
        plain = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        return fn(params, batch, mask=mask), plain

    (grads, per_example), plain = clipped_and_plain_gradients(params, (x, y), keep)
    _, norms = clipped_sum_of(plain, 1.0, keep)
    good = np.isfinite(norms)
    assert not good.all()
    # Of 12 x 20 squares the margin enlarges a norm by (12 x 20 + 8) / 2 roundings of
    # 2^-24, 8e-6 in all. Engine and reference each compute 1 - tanh^2 in float32, whose
    # cancellation leaves up to 8e-6 of a norm here: compilers decide which way. Ghost
    # norms include the rounding of fewer than as many terms, formed twice.
    margin = 1.05 * (12 * 20 + 8) / 2 * 2.0**-24
    rtol = (3 if engine == "ghost" else 1) * margin + 2 * 8e-6
    np.testing.assert_allclose(np.asarray(per_example.norm)[good], norms[good], rtol)
    for name, bound in bounds.items():
        sums, _ = clipped_sum_of(plain[name], bound, keep)
        for got, want in zip(jax.tree.leaves(grads[name]), sums, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    expected = np.sqrt(0.3**2 + 0.05**2 + 2.0**2)
    np.testing.assert_allclose(
        fn.sensitivity(dpjax.Adjacency.ADD_REMOVE), expected, rtol=1e-6
    )


def test_invalid_clip_norm_trees_raise():
    with pytest.raises(ValueError, match="clip_norm"):
        dpjax.clipped_grad(mlp, {"a": 1.0, "b": -1.0})
    fn = dpjax.clipped_grad(lambda w, x: jnp.sum(w["a"] * x), {"b": 1.0})
    with pytest.raises(ValueError, match="prefix"):
        fn({"a": np.ones(3, np.float32)}, np.ones((2, 3), np.float32))


def test_parts_without_hashable_description_equal_only_themselves():
    class Part:
        def __init__(self, description):
            self.description = description

    def fails():
        raise TypeError("a literal has no bytes")

    for description in (fails, lambda: [1]):
        one, other = Part(description), Part(description)
        assert Comparable(one) == Comparable(one)
        assert Comparable(one) != Comparable(other)
        assert hash(Comparable(one)) == hash(Comparable(one))


def test_gradients_of_a_reused_weight_are_summed_before_squaring():
    def tied(params, ids):
        x = params["table"][ids]
        x = x + jnp.tanh(x @ params["tower"]) @ params["tower"].T
        return -jnp.mean(jax.nn.log_softmax(x @ params["table"].T)[:, 3])

    def recurrent(w, x):
        def step(h, x):
            h = jnp.tanh(x @ w[:20] + h @ w[20:])
            return h, jnp.sum(h)

        return jnp.sum(jax.lax.scan(step, jnp.zeros(30), x)[1])

    params = {"table": normal(0, 40, 16), "tower": normal(1, 16, 64, scale=0.3)}
    ids = np.random.default_rng(2).integers(0, 6, (5, 4))
    assert_matches_reference(tied, params, ids)
    rows = dpjax.explain(tied, params, ids).rows
    assert [row.norm for row in rows] == ["rows", "rows"]

    x = normal(3, 5, 4, 20)
    # Two slices of one matrix in separate products; then the matrix in one product.
    assert_matches_reference(recurrent, normal(4, 50, 30, scale=0.2), x)

    def joint(w, x):
        def step(h, x):
            h = jnp.tanh(jnp.concatenate([x, h]) @ w)
            return h, jnp.sum(h)

        return jnp.sum(jax.lax.scan(step, jnp.zeros(30), x)[1])

    w = normal(4, 50, 30, scale=0.2)
    assert_matches_reference(joint, w, x)
    assert dpjax.explain(joint, w, x).rows[0].norm == "rows"


@pytest.mark.matrix
@pytest.mark.parametrize("reverse", [False, True])
def test_nested_scans_match_reference(reverse):
    """Layers by one scan, each a recurrence by another.

    Weights differ between layers, between times, or are the same everywhere; a matrix
    made of two leaves has a gradient for each layer and example.
    """
    width, length, layers = 24, 3, 2

    def loss(params, x):
        def layer(x, weights):
            w, u, gain = weights

            def step(h, at):
                x, scale = at
                h = jnp.tanh(jnp.concatenate([x, h]) @ w * scale + h @ (u * gain))
                h = h @ params["shared"].T
                return h, h

            start = params["start"]
            _, y = jax.lax.scan(step, start, (x, params["times"]), reverse=reverse)
            return y, jnp.sum(x)

        weights = params["w"], params["u"], params["gain"]
        x, sums = jax.lax.scan(layer, x, weights, reverse=reverse)
        return jnp.sum(x) + jnp.sum(sums**2)

    params = {
        "w": normal(0, layers, 2 * width, width, scale=0.2),
        "u": normal(1, layers, width, width, scale=0.2),
        "gain": 1 + normal(2, layers, scale=0.1),
        "times": normal(3, length, width),
        "shared": normal(4, width, width, scale=0.2),
        "start": normal(5, width),
    }
    x = normal(6, 4, length, width)
    assert_matches_reference(
        loss, params, x, engine="ghost" if reverse else "bookkeeping"
    )
    rows = {row.parameter: row for row in dpjax.explain(loss, params, x).rows}
    assert rows["['w']"].norm == rows["['shared']"].norm == "rows"
    assert rows["['u']"].why == "made by mul"


@pytest.mark.matrix
def test_slices_of_one_parameter_match_reference():
    """Layers stacked in one array: norms by rows where slices do not overlap."""
    w = normal(0, 3, 16, 16, scale=0.25)
    x = normal(1, 5, 2, 16)

    def stacked(w, x):
        for i in range(3):
            x = jnp.tanh(x @ w[i])
        return jnp.sum(x @ w[1].T)

    def split(w, x):
        first, second, third = jnp.split(w.reshape(48, 16).T, (16, 24), axis=1)
        x = jnp.tanh(x @ first) @ second
        return jnp.sum(jnp.tanh(x @ third[:8]))

    def strided(w, x):
        return jnp.sum(jnp.tanh(x @ w[0, ::2].T) * (x @ w[0, 1::2].T))

    def other_strides(w, x):
        # From and to the same rows, and as many.
        return jnp.sum((x @ w[0, 0:5:3].T) * (x @ w[0, 0:5:4].T))

    def overlapping(w, x):
        return jnp.sum(jnp.tanh(x @ w[0, :12].T)[:, :8] @ w[0, 8:])

    def whole_and_part(w, x):
        return jnp.sum(jnp.einsum("td,ldp->tlp", x, w)[:, 0] @ w[2])

    others = (strided, other_strides, overlapping, whole_and_part)
    for loss in (stacked, split, *others):
        rows = loss not in others
        assert_matches_reference(loss, w, x)
        (row,) = dpjax.explain(loss, w, x).rows
        assert row.norm == ("rows" if rows else "gradients"), loss.__name__
        assert rows or row.why == "used in several forms"


@pytest.mark.matrix
def test_slices_of_one_parameter_in_a_scan_match_reference():
    w = normal(0, 4, 2, 16, 16, scale=0.25)

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w[0]) @ w[1].T, None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    assert_matches_reference(loss, w, normal(1, 5, 2, 16))
    (row,) = dpjax.explain(loss, w, normal(1, 5, 2, 16)).rows
    assert row.norm == "rows"
