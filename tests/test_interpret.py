"""Functions of concrete numbers that NumPy evaluates in place of XLA."""

import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
from conformance import ACCOUNTANTS
from jax import lax

from dpjax._core import interpret
from dpjax._core.interpret import NotEvaluatedError, evaluator, without_compiler

RNG = np.random.default_rng(7)
X = RNG.normal(size=(3, 4))
POSITIVE = np.exp(X)
SMALL = 0.9 * np.tanh(X)
WHOLE = RNG.integers(-9, 9, size=(3, 4))
ROWS = np.array([2, 0, 2, -1])

# One function for each kind of operation, with the arguments to evaluate it at.
FUNCTIONS = {
    "arithmetic": (lambda x, y: (x + y) * x - x / y + -abs(x), X, POSITIVE),
    "integer division": (lambda x: (x // 4, lax.div(x, 4), lax.rem(x, -3)), WHOLE),
    "integer powers": (lambda x: (x**3, x**-2, x**7, jnp.square(x)), X),
    "bits": (lambda x: (x << 2, x >> 1, ~x & 5 | 1, lax.clz(x)), WHOLE),
    "shifts": (lambda x: lax.shift_right_logical(x, np.uint32(3)), np.uint32([9, 81])),
    "shifts of signs": (
        lambda x: (
            [lax.shift_right_logical(x, np.int32(k)) for k in (3, 31, 32)]
            + [lax.shift_right_arithmetic(x, np.int32(k)) for k in (3, 40)]
        ),
        np.int32([-1, -9, 7]),
    ),
    "division by zero": (lambda x: (lax.div(x, 0 * x), lax.rem(x, 0 * x)), WHOLE),
    "sums that wrap": (
        lambda x: (jnp.cumsum(x), lax.cumsum(x, reverse=True)),
        np.uint32([0, 1, 2**32 - 1, 5]),
    ),
    "bitwise reductions": (
        lambda x: (jnp.bitwise_or.reduce(x), jnp.bitwise_and.reduce(x)),
        np.int32([3, 6, 2]),
    ),
    "casts out of range": (
        lambda x: [x.astype(d) for d in (jnp.int32, jnp.uint32, jnp.int64)],
        np.array([np.nan, np.inf, -np.inf, -1.0, 3.7, 2.0**31, 1e20]),
    ),
    "popcount": (lax.population_count, WHOLE),
    "exponentials": (lambda x: (jnp.exp(x), jnp.exp2(x), jnp.expm1(x)), X),
    "logarithms": (lambda x: (jnp.log(x), jnp.log1p(x), jnp.sqrt(x)), POSITIVE),
    "powers": (lambda x: x**0.3, POSITIVE),
    "waves": (lambda x: (jnp.sin(x), jnp.cos(x), jnp.arctan2(x, 0.3)), X),
    "hyperbolic": (lambda x: (jnp.tanh(x), jnp.arcsinh(x)), X),
    "special": (lambda x: (lax.erf(x), lax.erfc(x), jax.nn.sigmoid(x)), X),
    "more special": (lambda x: lax.lgamma(x), POSITIVE),
    "inverse of erf": (lax.erf_inv, SMALL),
    "rounding": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x)), X),
    "away from zero": (
        lambda x: lax.round(x),
        np.float32([0.5, -0.5, 1.5, 2.4, 0.49999997, 8388609.0, np.inf]),
    ),
    "next": (lambda x: jnp.nextafter(x, jnp.inf), X),
    "comparisons": (lambda x, y: ((x < y) | (x >= y), x == y, x != y), X, POSITIVE),
    "searches": (
        lambda x, y: [jnp.searchsorted(x, y, side=side) for side in ("left", "right")],
        np.array([-np.inf, -2.0, -1.0, 0.0, 0.0, 1.0, np.inf]),
        np.array([-1.5, -1.0, -0.0, 0.0, 0.5, 1.0, -np.inf, np.inf, np.nan]),
    ),
    "choices": (lambda x: (jnp.where(x > 0, x, 0), jnp.clip(x, -1, 1)), X),
    "case": (lambda i, x: lax.select_n(i, x, 2 * x, 3 * x), WHOLE % 3, WHOLE),
    "casts": (lambda x: (x.astype(jnp.float32), x.astype(jnp.int32), x > 0), X),
    "less precision": (
        lambda x: lax.reduce_precision(x, 8, 23),
        np.array([0.1, -1 / 3, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e-39, 1e39, np.inf]),
    ),
    "complex": (lambda x: jnp.abs(jnp.conj(jnp.fft.fft(x))), X),
    "transform": (lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x))), X),
    "products": (lambda x, y: (x @ y.T, jnp.einsum("ij,ij->i", x, y)), X, POSITIVE),
    "batched products": (
        lambda x: jnp.einsum("bij,bkj->bik", x, x),
        X[None] * ROWS[:, None, None],
    ),
    "sums": (
        lambda x: (x.sum(0), x.max(), x.min(1)),
        X,
    ),
    "truth": (lambda x: ((x > 0).any(0), (x > -9).all()), X),
    "running sums": (lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 0, reverse=True)), X),
    "shapes": (
        lambda x: (x.T[::-1, 1:], x.reshape(2, -1), x[:, None], x[1:2].squeeze(0)),
        X,
    ),
    "joins": (
        lambda x: (
            jnp.concatenate([x, x], 1),
            jnp.stack([x, 2 * x]),
            jnp.split(x, 2, 1),
        ),
        X,
    ),
    "padding": (lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0), X),
    "numbers": (
        lambda x: x * jnp.arange(4)[None] + lax.broadcasted_iota(int, (3, 4), 0),
        X,
    ),
    "sorting": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), jnp.median(x, 1)), X),
    "several keys": (lambda x, y: lax.sort((x, y), num_keys=2), WHOLE[0] % 2, X[0]),
    "rows": (lambda x, i: (x[i], x[:, i], x[i % 3, i]), X, ROWS),
    "rows beyond": (
        lambda x, i: (x.at[i].get(mode="fill"), x.at[i].get(mode="clip")),
        X,
        3 * ROWS,
    ),
    "rows of a batch": (jax.vmap(lambda x, i: x[i]), X, np.array([3, 0, 2])),
    "slices": (
        lambda x, i: (
            lax.dynamic_slice(x, (i, 1), (2, 2)),
            lax.dynamic_update_slice(x, x[:2], (i, 2)),
        ),
        X,
        np.array(2),
    ),
    "windows": (
        lambda x, i: (
            jax.vmap(lambda i: lax.dynamic_slice(x, (i, 1), (2, 2)))(i),
            jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (2,)))(x, i[:3]),
        ),
        X,
        3 * ROWS,
    ),
    "updates": (
        lambda x, i: (x.at[i].add(1.0), x.at[i].set(2.0), x.at[i, 1].max(0.5)),
        X,
        ROWS,
    ),
    "updates beyond": (lambda x, i: x.at[3 * i].add(x[i], mode="drop"), X, ROWS),
    "updates of a batch": (
        jax.vmap(lambda x, i: x.at[i].max(9.0)),
        X,
        np.array([3, 0, 2]),
    ),
    "convolution": (
        lambda x, y: (jnp.convolve(x, y), jnp.convolve(x, y, "valid")),
        X.ravel(),
        X[0],
    ),
    "convolutions": (jax.vmap(lambda x: jnp.convolve(x, jnp.ones(2), "same")), X),
    "loops": (lambda x: lax.fori_loop(0, 5, lambda i, y: y * x + i, x), X),
    "loops that end": (
        lambda x: lax.while_loop(lambda y: y < 9, lambda y: 2 * y, x),
        np.array(0.3),
    ),
    "loops of a batch": (
        jax.vmap(lambda x: lax.while_loop(lambda y: y < 9, lambda y: 2 * y, x)),
        POSITIVE[0],
    ),
    "scans": (
        lambda x: lax.scan(
            lambda c, y: (c + y, (c, 2 * y)), 0.0 * x[0], x, reverse=True
        ),
        X,
    ),
    "maps": (lambda x: lax.map(lambda y: jnp.sort(y) @ y, x), X),
    "branches": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x),
        np.array(2),
        X,
    ),
    "calls": (lambda x: jax.checkpoint(jax.jit(jnp.sin))(x) + jax.nn.relu(x), X),
    "derivatives": (
        jax.grad(lambda x: jnp.sum(jax.nn.softplus(x) ** 2 / (1 + x * x))),
        X,
    ),
    "barriers": (lambda x: lax.optimization_barrier((x, lax.stop_gradient(x))), X),
}


@contextlib.contextmanager
def count_programs():
    """Yield a list that gets an entry for each program that XLA compiles."""
    result = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            result.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield result
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_evaluation_equals_compiled_function(name):
    fn, *args = FUNCTIONS[name]
    with jax.enable_x64(True):
        evaluator(jax.make_jaxpr(fn)(*args))  # raises if an operation has no rule
        with count_programs() as programs:
            values = without_compiler(fn)(*args)
        assert not programs
        expected = jax.jit(fn)(*args)

    def compare(x, y):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12, strict=True)

    jax.tree.map(compare, values, expected)


def test_operation_without_rule_is_compiled():
    def draw(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    with pytest.raises(NotEvaluatedError, match="random"):
        evaluator(jax.make_jaxpr(draw)(np.float32(1)))
    value = without_compiler(draw)(np.ones(3, np.float32))
    np.testing.assert_array_equal(value, jax.jit(draw)(np.ones(3, np.float32)))


@pytest.mark.parametrize(
    ("fn", "arg", "message"),
    [
        (lambda x: x.T @ x, np.zeros((0, 3), np.float32), "empty"),
        (jnp.exp, np.ones(2, np.float16), "float16"),
        (jnp.exp, jnp.ones(2, jnp.bfloat16), "bfloat16"),
        (lambda x: lax.bitcast_convert_type(x, jnp.uint8), np.ones(2, np.int32), "bit"),
        (
            lambda x: x.at[np.r_[0, 9]].set(3.0, mode="clip"),
            np.zeros(8, "f4"),
            "clipped",
        ),
    ],
)
def test_arrays_and_modes_without_rule_are_compiled(fn, arg, message):
    with pytest.raises(NotEvaluatedError, match=message):
        evaluator(jax.make_jaxpr(fn)(arg))


def test_function_above_the_time_limit_is_compiled():
    fn = jax.jit(lambda x: x + x)
    with count_programs() as programs:
        assert without_compiler(fn)(np.ones(3, np.float32)).tolist() == [2, 2, 2]
        assert not programs
        assert without_compiler(fn, max_seconds=0.0)(np.float32(1)) == 2
    assert programs


def test_traced_arguments_call_the_function_itself():
    fn = without_compiler(lambda x, *, power: x**power)
    assert fn(np.float32(3), power=2) == 9
    assert float(jax.jit(lambda x: fn(x, power=2))(3.0)) == 9
    assert float(jax.grad(lambda x: fn(x, power=3))(2.0)) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["erf", "erfc", "erfinv", "exp", "expm1", "log1p", "tanh"]
)
def test_numpy_function_is_as_accurate_as_the_compiled_one(name):
    x = np.linspace(-0.9995, 0.9995, 400) * (1 if name in ("erfinv", "log1p") else 20)
    compiled = {"erfinv": lax.erf_inv, "erf": lax.erf, "erfc": lax.erfc}.get(name)
    compiled = compiled or getattr(jnp, name)
    own = getattr(np, name, None) or getattr(scipy.special, name)
    with mpmath.workdps(40), jax.enable_x64(True):
        exact = [getattr(mpmath, name)(mpmath.mpf(float(y))) for y in x]

        def error(values):
            """The largest relative error in units of the last place."""
            pairs = zip(np.asarray(values).tolist(), exact, strict=True)
            return max(float(abs(v / y - 1)) / 2**-52 for v, y in pairs)

        # Two units more, since either may be off by its last bit.
        assert error(own(x)) <= error(jax.jit(compiled)(x)) + 2


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_accountant_of_concrete_numbers_runs_without_compiler(name, monkeypatch):
    def refuse(fn, *args, **kwargs):
        pytest.fail(f"{fn} has an operation without a rule")

    monkeypatch.setattr(interpret, "_compile", refuse)
    fn, x = ACCOUNTANTS[name]
    fn(x)
