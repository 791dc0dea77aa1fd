"""What a step of private training asks of a GPU, counted without one.

The networks are those that benchmarks/gpu.py measures, in the sizes that it measures:
to lower a program takes only the types of its arrays. The counts are of products and
convolutions, which on a GPU are kernels of their own that read and write memory, and of
their precision. Element-wise operations are left out, since the compiler fuses them.
XLA's own count of a program (`cost_analysis`) takes the body of a loop once.
"""

import collections
import importlib
import math
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir.dialects import stablehlo as hlo

from dpjax.accounting import gdp

ROOT = pathlib.Path(__file__).parents[1]


class Bounds(NamedTuple):
    """At most so much of the private step, over the plain step; as counted."""

    flops: float  # of products
    memory: float  # bytes that products read and write
    exact: float  # flops of float32 at the highest precision, over all of the plain's


# Norms and clipped sums are float32 products at the highest precision, where the plain
# step has bfloat16, or float32 at the default precision, for which a GPU has faster
# units. They are the products for the gradients of parameters, a third of a plain step,
# and those for norms by rows. Operands of bfloat16 take twice the memory there.
BOUNDS = {
    "mlp": Bounds(1.001, 1.001, 0.39),
    # Gradients of kernels are formed for each example, for one position of the kernel
    # after the other: each of the 9 products reads the cotangent again.
    "cnn": Bounds(1.001, 4.5, 0.35),
    "wide_resnet": Bounds(1.04, 3.3, 0.34),
    # At 256 tokens some norms are by rows, and those of the embedding by parts of rows.
    "gpt2_256": Bounds(1.1, 2.2, 0.42),
    "gpt2_512": Bounds(1.001, 1.6, 0.31),
    "gpt2_1024": Bounds(1.001, 1.3, 0.29),
    # Only the adapters have norms and sums, and they are narrow.
    "lora_256": Bounds(1.001, 1.05, 0.002),
    "lora_1024": Bounds(1.001, 1.03, 0.001),
}
NETWORKS = [
    name if name == "mlp" else pytest.param(name, marks=pytest.mark.matrix)
    for name in BOUNDS
]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with jax.numpy_rank_promotion("allow"):
        yield importlib.import_module("gpu")


def lower_for_gpu(fn, *args, donated=()):
    traced = jax.jit(fn, donate_argnums=donated).trace(*args)
    return traced.lower(lowering_platforms=("cuda",))


def lower_step(net, step):
    return lower_for_gpu(step.step, *step.example_arguments(net), donated=(0, 1))


class Work(NamedTuple):
    flops: int
    memory: int
    exact: int


def find_products(module):
    """The work of all products of a module, as often as they run."""
    functions = {f.attributes["sym_name"].value: f for f in module.body.operations}
    result = collections.Counter()

    def visit(region, times):
        for op in (o.operation for block in region.blocks for o in block.operations):
            if op.name == "func.call":
                called = functions[op.attributes["callee"].value]
                visit(called.regions[0], times)
            elif op.name == "stablehlo.while":
                condition, body = op.regions
                visit(body, times * count_iterations(condition))
            elif op.name in ("stablehlo.dot_general", "stablehlo.convolution"):
                for name, number in work_of(op)._asdict().items():
                    result[name] += times * number
            else:  # of a choice between platforms, one branch is left
                for inner in op.regions:
                    visit(inner, times)

    visit(functions["main"].regions[0], 1)
    return Work(**result)


def count_iterations(condition):
    """The constant that a loop of JAX's with a counter ends at."""
    (text,) = map(str, condition.blocks)
    (end,) = re.findall(r"stablehlo.constant dense<(\d+)>", text)
    assert "stablehlo.compare" in text
    assert "LT" in text
    return int(end)


def work_of(op):
    """A product's multiplications and additions, padding included, and its bytes."""
    left, right = (x.type for x in op.operands)
    (out,) = (x.type for x in op.results)
    if op.name == "stablehlo.dot_general":
        numbers = hlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        dims = numbers.lhs_contracting_dimensions
        terms = math.prod(left.shape[i] for i in dims)
    else:
        numbers = hlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        features = right.shape[numbers.kernel_output_feature_dimension]
        terms = math.prod(right.shape) // features
    flops = 2 * math.prod(out.shape) * terms
    types = left, right, out
    memory = sum(math.prod(t.shape) * t.element_type.width // 8 for t in types)
    exact = "HIGHEST" in str(op.attributes["precision_config"])
    return Work(flops, memory, flops if exact else 0)


def test_products_are_counted_as_often_as_they_run():
    @jax.jit
    def called(x, w):
        return jnp.dot(x, w, precision="highest")

    def fn(x, image, w, kernel):
        x, _ = jax.lax.scan(lambda x, _: (called(x, w), None), x, length=7)
        return x @ w, jax.lax.conv(image, kernel, (1, 1), "VALID")

    shapes = (3, 5), (2, 4, 9, 9), (5, 5), (6, 4, 3, 3)
    args = [np.ones(shape, np.float32) for shape in shapes]
    convolution = 2 * 2 * 6 * 7 * 7 * 4 * 3 * 3
    assert find_products(lower_for_gpu(fn, *args).compiler_ir("stablehlo")) == Work(
        flops=8 * 2 * 3 * 5 * 5 + convolution,
        memory=8 * 4 * (15 + 25 + 15) + 4 * (648 + 216 + 588),
        exact=7 * 2 * 3 * 5 * 5,
    )


def test_callbacks_and_float64_are_visible_in_lowered_text():
    def with_callback(x):
        jax.debug.callback(lambda x: None, x)
        return x

    x = np.float32(1.3)
    # JAX refuses to lower a callback for a platform that this machine does not have.
    assert "custom_call" in jax.jit(with_callback).lower(x).as_text()
    assert "f64" in lower_for_gpu(lambda x: gdp.epsilon(x, 1e-6), x).as_text()


@pytest.mark.parametrize("name", NETWORKS)
def test_private_step_needs_no_callbacks_or_float64_and_few_more_products(gpu, name):
    net = gpu.outline(name)
    steps = [lower_step(net, make(net)) for make in (gpu.plain_step, gpu.private_step)]
    for step in steps:
        text = step.as_text()
        assert "dot_general" in text
        assert "custom_call" not in text
        assert "f64" not in text
    plain, private = (find_products(x.compiler_ir("stablehlo")) for x in steps)
    bounds = BOUNDS[name]
    assert bounds.flops <= 1.15
    assert plain.exact == 0
    assert plain.flops <= private.flops <= bounds.flops * plain.flops
    assert private.memory <= bounds.memory * plain.memory
    assert private.exact <= bounds.exact * plain.flops
