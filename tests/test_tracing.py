"""The contents of traced losses, and the programs that they compile to.

The reference is `vmap(grad(loss))`, clipped in NumPy (tests/test_bookkeeping.py).
"""

import collections
import enum
import re
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jax.interpreters import ad, batching, mlir
from test_bookkeeping import MLP, MLP_BATCH, assert_matches_reference, mlp, normal

import dpjax

ENGINES = ("auto", "bookkeeping", "ghost", "vmap")


@jax.custom_vjp
def centre_cotangents(x: jax.Array) -> jax.Array:
    return x


centre_cotangents.defvjp(
    lambda x: (x, None), lambda _, g: (g - jax.lax.pmean(g, "batch"),)
)


@jax.custom_jvp
def centre_tangents(x: jax.Array) -> jax.Array:
    return x


@centre_tangents.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] - jax.lax.pmean(tangents[0], "batch")


def loss_in_scan(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda h, _: (f(h) @ w, None), x @ w, length=2)[0])


def loss_in_cond(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    branches = (lambda h: jnp.sum(f(h)), jnp.sum)
    return jax.lax.cond(x[0] > 0, *branches, x @ w)


PLACES = {
    "layer": lambda f, w, x: jnp.sum(jnp.sin(f(x @ w))),
    "parameter": lambda f, w, x: jnp.sum(jnp.sin(x @ f(w))),
    "call": lambda f, w, x: jnp.sum(jnp.sin(jax.jit(f)(x @ w))),
    "remat": lambda f, w, x: jnp.sum(jax.checkpoint(lambda h: jnp.sin(f(h)))(x @ w)),
    "rule": lambda f, w, x: jnp.sum(jax.nn.relu(f(x @ w))),
    "scan": loss_in_scan,
    "cond": loss_in_cond,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("f", [centre_cotangents, centre_tangents])
@pytest.mark.parametrize("place", PLACES)
def test_custom_derivatives_using_other_examples_raise(place, f, engine):
    def loss(w, x):
        return PLACES[place](f, w, x)

    w, x = normal(0, 3, 3), normal(1, 4, 3)
    fn = dpjax.clipped_grad(loss, 1.0, engine=engine)
    with pytest.raises(ValueError, match="named axis"):
        jax.eval_shape(fn, w, x)
    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name="batch")
    with pytest.raises(ValueError, match="named axis"):
        jax.eval_shape(mapped, w, x[None])


@jax.custom_jvp
def mix_tangents(x: jax.Array) -> jax.Array:
    return x


@mix_tangents.defjvp
def _(primals: Any, tangents: Any) -> Any:
    mean = jax.lax.pmean(tangents[0], "data")
    return primals[0], jax.lax.pcast(mean, "data", to="varying")


def mix_values(x: jax.Array) -> jax.Array:
    return x - jax.lax.pmean(x, "data")


def trace_in_shard_map(loss, *args, engine, check_vma=True):
    """Trace a clipped sum over examples that are sharded over the axis "data"."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=auto)

    def local_sum(w, x):
        total, _ = dpjax.clipped_grad(loss, 1.0, engine=engine)(w, x)
        return jax.lax.psum(total, "data")

    with jax.sharding.use_abstract_mesh(mesh):
        summed = jax.shard_map(
            local_sum,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
            axis_names={"data"},
            check_vma=check_vma,
        )
        return jax.eval_shape(summed, *args)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", [None, mix_values, mix_tangents])
def test_shard_map_in_a_loss_hides_no_collective(f, check_vma, engine):
    """The loss may communicate along its own axis, but not along that of the batch."""

    def loss(w, x):
        def body(w, x):
            h = jax.lax.psum(jnp.sum(jnp.tanh(w * x)), "model")
            return h if f is None else f(h)

        shard = jax.P("model")
        return jax.shard_map(
            body,
            in_specs=(shard, shard),
            out_specs=jax.P(),
            axis_names={"model"},
            check_vma=check_vma,
        )(w, x)

    args, options = (normal(0, 4), normal(1, 6, 4)), {"check_vma": check_vma}
    if f is None:
        trace_in_shard_map(loss, *args, engine=engine, **options)
    else:
        with pytest.raises(ValueError, match="named axis"):
            trace_in_shard_map(loss, *args, engine=engine, **options)


@jax.custom_vjp
def scaled_product(v: jax.Array, x: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.sum(v * c)


def pull_back_mixed(residuals: Any, g: jax.Array) -> Any:
    _, x, c = residuals
    scale = jax.lax.pcast(jax.lax.psum(x[0], "data"), "data", to="varying")
    return g * scale * c, jnp.zeros_like(x), jnp.zeros_like(c)


scaled_product.defvjp(
    lambda v, x, c: (scaled_product(v, x, c), (v, x, c)), pull_back_mixed
)


def loss_with_constant_in_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    constant = jnp.ones_like(w)

    def step(total: jax.Array, _: Any) -> Any:
        return total + scaled_product(w * x, x, constant), None

    return jax.lax.scan(step, 0 * jnp.sum(w * x), length=2)[0]


@jax.custom_vjp
def round_to_one(w: jax.Array) -> jax.Array:
    """A value that does not vary over devices, with the derivative of the identity."""
    return jnp.ones(w.shape)


round_to_one.defvjp(lambda w: (round_to_one(w), None), lambda _, g: (g,))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "loss", [loss_with_constant_in_scan, lambda w, x: jnp.sum(round_to_one(w) * x)]
)
def test_derivatives_that_sum_over_devices_raise(loss, engine):
    with pytest.raises(ValueError, match="named axis"):
        trace_in_shard_map(loss, normal(0, 4), normal(1, 6, 4), engine=engine)


@jax.custom_vjp
def dot(w: jax.Array, x: jax.Array) -> jax.Array:
    return w @ x


dot.defvjp(lambda w, x: (dot(w, x), (w, x)), lambda r, g: (g * r[1], g * r[0]))


@pytest.mark.parametrize("engine", ENGINES)
def test_custom_derivatives_by_a_parameter_and_an_example_are_accepted(engine):
    def loss(w, x):
        return jnp.sin(dot(w, x))

    total = trace_in_shard_map(loss, normal(0, 4), normal(1, 6, 4), engine=engine)
    assert total.shape == (4,)


class Axis(enum.Enum):
    """A name of an axis that is not a string."""

    BATCH = 0


@pytest.mark.parametrize("engine", ENGINES)
def test_collectives_over_an_axis_with_any_name_raise(engine):
    def loss(w, x):
        return w @ (x - jax.lax.pmean(x, Axis.BATCH))

    fn = dpjax.clipped_grad(loss, 1.0, engine=engine)
    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name=Axis.BATCH)
    with pytest.raises(ValueError, match="named axis"):
        jax.eval_shape(mapped, normal(0, 3), normal(1, 2, 1, 3))


def mean_tangent(_: Any, y: jax.Array) -> jax.Array:
    return y - jax.lax.pmean(y, "batch")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", ["solve", "tangent_solve"])
def test_collectives_in_implicit_functions_raise(place, engine):
    solvers = {"solve": lambda f, y: y, "tangent_solve": lambda f, y: y}
    solvers[place] = mean_tangent

    def loss(w, x):
        root = jax.lax.custom_root(lambda y: y - w * x, w * x, **solvers)
        return jnp.sum(root**2)

    fn = dpjax.clipped_grad(loss, 1.0, engine=engine)
    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name="batch")
    with pytest.raises(ValueError, match="named axis"):
        jax.eval_shape(mapped, normal(0, 3), normal(1, 2, 1, 3))


def test_unused_derivatives_may_use_collectives():
    """No derivative by the example alone is taken."""

    def loss(w, x):
        return jnp.sum(jnp.sin(centre_cotangents(x) @ w))

    assert_matches_reference(loss, normal(0, 3, 3), normal(1, 4, 3))


BATCH, ROWS, WORDS, WIDTH, HIDDEN = 7, 5, 41, 31, 37


def tokens_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Lookups, a layer of several rows and one of a single row; all sizes differ."""
    h = jnp.tanh(params["table"][tokens] @ params["dense"])
    y = jnp.sin(jnp.sum(h, 0) @ params["head"] + params["bias"])
    return jnp.sum(y**2)


TOKEN_PARAMS = {
    "table": normal(0, WORDS, WIDTH),
    "dense": normal(1, WIDTH, HIDDEN),
    "head": normal(2, HIDDEN, WIDTH + 2),
    "bias": normal(3, WIDTH + 2),
}
TOKENS = np.arange(BATCH * ROWS).reshape(BATCH, ROWS) * 3 % WORDS


class ProgramFacts(NamedTuple):
    """Facts about a lowered program."""

    operations: collections.Counter[str]
    formed: set[str]
    rows_by_rows: bool
    products_over_batch: bool


def lower_program(engine: str, *platforms: str) -> ProgramFacts:
    fn = jax.jit(dpjax.clipped_grad(tokens_loss, 1.0, engine=engine))
    exported = jax.export.export(fn, platforms=platforms)(TOKEN_PARAMS, TOKENS)
    text = exported.mlir_module()
    counted = collections.Counter(re.findall(r"stablehlo\.(\w+)", text))
    for choosing in ("case", "constant", "return"):  # by platform
        del counted[choosing]
    formed = {
        name
        for name, x in TOKEN_PARAMS.items()
        if f"tensor<{'x'.join(map(str, (BATCH, *x.shape)))}xf32>" in text
    }
    products = re.findall(
        r"dot_general .* contracting_dims = \[([\d, ]*)\] x .*"
        r": \(tensor<(\S*)xf32>, .*\) -> tensor<(\S*)xf32>",
        text,
    )
    assert len(products) == counted["dot_general"]
    rows_by_rows = over_batch = False
    for contracted, left, out in products:
        sizes = [int(left.split("x")[int(i)]) for i in contracted.split(",")]
        over_batch |= BATCH in sizes
        rows_by_rows |= out.split("x").count(str(ROWS)) == 2
    return ProgramFacts(counted, formed, rows_by_rows, over_batch)


def test_auto_chooses_norms_by_lowering_platform():
    """Lowered for TPUs, whose products round more, the program forms gradients."""
    rows = dpjax.explain(tokens_loss, TOKEN_PARAMS, TOKENS).rows
    assert [r.parameter for r in rows if r.norm == "gradients"] == ["['bias']"]

    tpu, cpu = lower_program("auto", "tpu"), lower_program("auto", "cpu")
    assert tpu.formed == set(TOKEN_PARAMS)
    assert not tpu.rows_by_rows
    assert not tpu.products_over_batch
    # A program that takes norms and sums from rows shows the opposite.
    books = lower_program("bookkeeping", "tpu")
    assert books.formed == {"bias"}
    assert books.rows_by_rows
    assert books.products_over_batch
    assert cpu == lower_program("bookkeeping", "cpu")
    # One program for both platforms contains both.
    both = lower_program("auto", "cpu", "tpu").operations
    assert both["scatter"] >= cpu.operations["scatter"] + tpu.operations["scatter"] - 1
    assert both["dot_general"] > cpu.operations["dot_general"]


@pytest.mark.diagonal
@pytest.mark.parametrize("loss", ["tokens", "mlp", "odd"])
def test_auto_branch_for_tpu_matches_reference(loss, monkeypatch):
    """The TPU branch of the program, run on this machine."""

    def recurrent_loss(params, x):
        w = params["w"] / jnp.linalg.norm(params["w"])
        x = jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, length=3)[0]
        return jnp.sum(x @ params["w"].T @ params["v"])

    args = {
        "tokens": (tokens_loss, TOKEN_PARAMS, TOKENS),
        "mlp": (mlp, MLP, MLP_BATCH),
        "odd": (
            recurrent_loss,
            {"w": normal(0, 6, 6), "v": normal(1, 6, 9)},
            normal(2, 4, 6),
        ),
    }[loss]
    names = []

    def take_tpu_branch(name: str, there: Any, elsewhere: Any, *args: Any) -> Any:
        names.append(name)
        return there(*args)

    monkeypatch.setattr(
        "dpjax.clipping._bookkeeping.evaluate.engine.on_platform", take_tpu_branch
    )
    for name in ("row_squares", "sums_by_sites"):
        monkeypatch.setattr(
            f"dpjax.clipping._bookkeeping.evaluate.at_component.{name}", None
        )
    assert_matches_reference(*args, engine="auto")
    assert set(names) == {"tpu"}


def wide_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


WIDE = 0.1 * normal(5, 128, 128)


def norm_kinds(fn: Any, rows: int, *platforms: str) -> set[str]:
    """Whether a lowered program takes norms by rows, by gradients or both."""
    args = WIDE, normal(6, 2, rows, 128)
    exported = jax.export.export(jax.jit(fn), platforms=platforms)(*args)
    types = {"rows": f"x{rows}x{rows}xf32>", "gradients": "<2x128x128xf32>"}
    text = exported.mlir_module()
    return {name for name, result in types.items() if result in text}


@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("bookkeeping", marks=pytest.mark.slow)]
)
def test_norm_kind_depends_on_rows_and_platform(engine):
    """T rows of 128 + 128 take 256 T² products, a gradient 3 · 128² numbers' traffic.

    At 16 products a number, rows are quicker for T < 56.
    """
    fn = dpjax.clipped_grad(wide_loss, 0.7, engine=engine)
    for rows, kind in [(50, "rows"), (60, "gradients")]:
        assert norm_kinds(fn, rows, "cpu", "cuda") == {kind}
    if engine == "auto":
        assert norm_kinds(fn, 50, "tpu") == {"gradients"}


@pytest.mark.parametrize(
    ("engine", "traced"),
    [
        ("bookkeeping", True),
        *(pytest.param(e, False, marks=pytest.mark.slow) for e in ENGINES[1::2]),
    ],
)
def test_numpy_constants_match_reference(engine, traced):
    """The loss indexes NumPy times, which NumPy cannot do by a traced number."""

    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        times = np.array([0.0, 0.5, 1.0])
        y = odeint(lambda y, t, rate: -rate * y, h, times, params["rate"])
        return jnp.sum(y[-1] ** 2)

    params = {"w": normal(0, 3, 4), "rate": np.ones(4, np.float32)}
    if traced:  # tracing is where it would fail
        fn = dpjax.clipped_grad(loss, 1.0, engine=engine)
        grads, _ = jax.eval_shape(fn, params, normal(1, 2, 3))
        assert {k: x.shape for k, x in grads.items()} == {"w": (3, 4), "rate": (4,)}
    else:
        assert_matches_reference(loss, params, normal(1, 2, 3), engine=engine)


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_aux_of_every_type_is_microbatch_invariant(engine):
    def loss(w, key):
        x = jax.random.normal(key, (3,))
        aux = {
            "key": jax.random.split(key)[0],
            "word": jax.random.bits(key, dtype=jnp.uint32),
            "flag": x[0] > 0,
            "none": None,
            "one": 1,
        }
        return jnp.sum(jnp.sin(x @ w)), aux

    @jax.jit
    def outputs_by_microbatch_size(w):
        keys = jax.random.split(jax.random.key(1), 5)
        options = {"has_aux": True, "engine": engine}
        outs = [
            dpjax.clipped_grad(loss, 0.3, microbatch_size=size, **options)(w, keys)
            for size in (None, 1, 2)
        ]
        return jax.vmap(lambda key: loss(w, key)[1])(keys), outs

    want_aux, outs = outputs_by_microbatch_size(normal(0, 3, 4))
    for grads, per_example in outs:
        np.testing.assert_allclose(grads, outs[0][0], rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_equal_shapes_and_dtypes(per_example.aux, want_aux)
        chex.assert_trees_all_equal(per_example.aux, want_aux)


def test_constants_in_a_scan_are_not_stacked():
    length, width = 200, 4096

    def loss(w, x):
        def step(h, i):
            wave = jnp.sin(jax.lax.iota(jnp.float32, width) * i)
            return jnp.tanh(h @ w + jnp.mean(wave)), None

        return jnp.sum(jax.lax.scan(step, x, jnp.arange(1.0 * length))[0])

    w, x = normal(0, 4, 4), normal(1, 3, 4)
    fn = jax.jit(dpjax.clipped_grad(loss, 1.0, engine="bookkeeping"))
    used = fn.lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * width * length / 10
    assert_matches_reference(loss, w, x)


def test_callbacks_run_once_per_example_and_constant_losses_work():
    """Losses may be weakly typed or NumPy numbers, too."""
    calls = []

    def loss(w, x):
        jax.debug.callback(lambda value: calls.append(float(value)), x[0])
        return jnp.sum(x @ w)

    w, x = normal(0, 3, 4), normal(1, 5, 3)
    for engine in ("bookkeeping", "vmap"):
        calls.clear()

        @jax.jit
        def run(w, x, engine=engine):
            # The last is NumPy's, the one before of a weak type.
            losses = (loss, lambda w, x: 2.0, lambda w, x: np.float32(2.0))
            return [dpjax.clipped_grad(f, 1.0, engine=engine)(w, x) for f in losses]

        _, *constants = jax.block_until_ready(run(w, x))
        jax.effects_barrier()
        np.testing.assert_allclose(sorted(calls), np.sort(x[:, 0]), rtol=1e-6)
        for grads, per_example in constants:
            np.testing.assert_array_equal(grads, 0.0)
            np.testing.assert_array_equal(per_example.loss, np.full(5, 2.0))


@pytest.mark.matrix
def test_checkpoint_policies_keys_and_closures_match_reference():
    def make_loss(scale, key):
        def loss(params, x):
            @jax.checkpoint
            def block(h, w):
                keep = jax.random.bernoulli(key, 0.7, h.shape)
                return jnp.where(keep, jnp.tanh(h @ w) * scale, 0.0)

            policy = jax.checkpoint_policies.dots_saveable
            for w in params:
                x = jax.checkpoint(block, policy=policy)(x, w)
            return jnp.sum(x)

        return loss

    params, x = [normal(i, 6, 6) for i in range(2)], normal(5, 4, 6)
    key = jax.random.key(3)
    assert_matches_reference(make_loss(2.0, key), params, x)

    @jax.jit
    def sums_by_engine(scale):
        loss = make_loss(scale, key)
        return [
            dpjax.clipped_grad(loss, 0.3, engine=engine)(params, x)[0]
            for engine in ENGINES[1::2]
        ]

    got, want = sums_by_engine(2.0)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_custom_derivatives_with_integer_arguments_match_reference():
    @jax.custom_vjp
    def pick(x, i):
        return x[i]

    pick.defvjp(
        lambda x, i: (x[i], (jnp.zeros_like(x), i)),
        lambda held, g: (2 * held[0].at[held[1]].set(g), None),
    )

    def loss(w, x):
        return pick(jnp.sin(x @ w), 2) + pick(jnp.sum(w, 0), 1) * x[0]

    assert_matches_reference(loss, normal(0, 3, 4), normal(1, 5, 3))


def test_equal_blocks_share_traces_and_match_reference():
    """The trace of one block is reused only where others differ in variables alone."""

    def loss(params, x):
        traces = []
        for i, (w, v, b) in enumerate(params):
            both = jnp.concatenate([w, v] if i % 2 else [v, w])
            h = jnp.tanh(x @ both + b)
            left, right = (h, x) if i in (1, 2) else (x, h)
            x = left * (0.5 if i < 4 else -0.25) - right
            traces.append(h)
        return jnp.sum(traces[1] * x) + jnp.sum(traces[4])

    params = [
        (normal(3 * i, 2, 4), normal(3 * i + 1, 2, 4), normal(3 * i + 2, 4))
        for i in range(8)
    ]
    assert_matches_reference(loss, params, normal(30, 5, 4))


def test_compiled_private_step_is_not_much_larger_than_the_plain_step():
    """On a CPU the compiler takes longest for products, of which there are no more."""
    params = [(normal(i, 31, 31), normal(9 + i, 31)) for i in range(6)]

    def loss(params, x):
        for w, b in params:
            x = x + jnp.tanh(x @ w + b)
        return jnp.sum(x**2)

    def mean(params, x):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, x))

    plain, private = (
        jax.jit(fn).lower(params, normal(99, 7, 31)).compile().as_text()
        for fn in (jax.grad(mean), dpjax.clipped_grad(loss, 0.7))
    )
    assert 0 < private.count(" dot(") <= plain.count(" dot(")
    assert private.count(" = ") < 5 * plain.count(" = ")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bookkeeping", "auto"])
def test_tracing_many_blocks_is_fast(engine):
    """In processor time at most twice per-example gradients of the same loss."""

    def loss(params, x):
        for w, b, gain in params:
            h = x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) * gain
            x = x + jax.nn.gelu(h @ w + b) @ w.T
        return jnp.sum(x)

    one = np.ones(8, np.float32)
    params = [(np.ones((8, 8), np.float32), one, one)] * 50
    x = np.ones((4, 8), np.float32)

    def tracing_seconds(fn):
        start = time.process_time()
        # A new function each time, as otherwise it would be traced only once.
        jax.jit(lambda *args: fn(*args)).lower(params, x)
        return time.process_time() - start

    plain = jax.vmap(jax.grad(loss), (None, 0))
    books = dpjax.clipped_grad(loss, 1.0, engine=engine)
    # The best of three, as the machine may be busy.
    least = [min(tracing_seconds(fn) for _ in range(3)) for fn in (books, plain)]
    assert least[0] < 2 * least[1]


def test_blocks_with_unequal_constants_are_distinguished():
    """In Python 0.0 == -0.0 and 1 == True; blocks that differ so are not equal."""
    product = jex.Primitive("a product and more")
    product.def_impl(lambda x, c: x * np.copysign(1.0 + isinstance(c, bool), c))
    product.def_abstract_eval(lambda x, c: x)
    mlir.register_lowering(
        product, mlir.lower_fun(product.impl, multiple_results=False)
    )
    ad.deflinear2(product, lambda ct, x, c: [product.bind(ct, c=c)])
    batching.primitive_batchers[product] = lambda xs, dims, c: (
        product.bind(xs[0], c=c),
        dims[0],
    )

    for constants in ((0.0, -0.0, 0.0), (1, True, 1)):

        def loss(ws, x, constants=constants):
            for w, c in zip(ws, constants, strict=True):
                x = product.bind(jnp.tanh(x @ w), c=c)
            return jnp.sum(jnp.sin(x))

        assert_matches_reference(
            loss, [normal(i, 3, 3) for i in range(3)], normal(9, 4, 3)
        )
