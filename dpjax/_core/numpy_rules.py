"""Rules by which NumPy evaluates a jaxpr's operations on arrays.

A rule makes a function of NumPy arrays from an operation's parameters. `RULES` has the
rule of each operation under its name. The rules for loops and branches, whose
parameters are jaxprs, are in `interpret`, which evaluates jaxprs by all these rules.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# A function of NumPy arrays that returns one array, or a sequence of arrays if the
# operation has several results.
Function = Callable[..., Any]
# A function of an operation's parameters, which returns a function for its evaluation.
Rule = Callable[[Mapping[str, Any]], Function]


class NotEvaluatedError(NotImplementedError):
    """NumPy cannot evaluate an operation of a jaxpr, or would take too long."""


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "fc":
        return x / y
    quotient = ((x - np.fmod(x, y)) // y).astype(x.dtype)  # XLA rounds towards zero
    return np.where(y == 0, ~np.zeros_like(x), quotient)  # as XLA divides by zero


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.fmod(x, y) if x.dtype.kind == "f" else np.where(y == 0, x, np.fmod(x, y))


def _integer_pow(params: Mapping[str, Any]) -> Function:
    def power(x: np.ndarray) -> np.ndarray:
        # By squaring, as XLA does, so that there are few roundings.
        result, base, y = np.ones_like(x), x, abs(params["y"])
        while y:
            result, base, y = (result * base if y & 1 else result), base * base, y >> 1
        return 1 / result if params["y"] < 0 else result

    return power


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if not which.ndim:
        return cases[int(which)]
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _broadcast(params: Mapping[str, Any]) -> Function:
    shape, axes = params["shape"], params["broadcast_dimensions"]

    def broadcast(x: np.ndarray) -> np.ndarray:
        # `np.broadcast_to` does the same, but takes ten times as long for small arrays.
        x = x if x.flags.c_contiguous else x.copy()
        strides = [0] * len(shape)
        for axis, size, stride in zip(axes, x.shape, x.strides, strict=True):
            strides[axis] = stride if size > 1 else 0
        return np.ndarray(shape, x.dtype, x, 0, strides)

    return broadcast


def _dot(params: Mapping[str, Any]) -> Function:
    (left, right), (batch, other) = params["dimension_numbers"]
    usual = len(left) == 1 and tuple(right) == (0,) and not batch

    def dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if usual and x.ndim <= 2 and y.ndim <= 2 and left[0] == x.ndim - 1:
            return x @ y
        # The order of axes is: batch, own, contracted. Each kind is flattened into one.
        free = [i for i in range(x.ndim) if i not in (*left, *batch)]
        its = [i for i in range(y.ndim) if i not in (*right, *other)]
        shape = [x.shape[i] for i in (*batch, *free)] + [y.shape[i] for i in its]
        inner, batches = (math.prod(x.shape[i] for i in axes) for axes in (left, batch))
        x = x.transpose(*batch, *free, *left).reshape(batches, -1, inner)
        y = y.transpose(*other, *right, *its).reshape(batches, inner, -1)
        return np.matmul(x, y).reshape(shape)

    return dot


def _slice(params: Mapping[str, Any]) -> Function:
    start, stop = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or [1] * len(start)
    return lambda x: x[tuple(map(slice, start, stop, steps))]


def _window(x: np.ndarray, sizes: Sequence[int], starts: Iterable[Any]) -> Any:
    # A window that would extend beyond the array is moved inside, as XLA does.
    first = [
        min(max(int(start), 0), length - size)
        for start, length, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(i, i + size) for i, size in zip(first, sizes, strict=True))


def _dynamic_slice(params: Mapping[str, Any]) -> Function:
    return lambda x, *starts: x[_window(x, params["slice_sizes"], starts)]


def _dynamic_update(x: np.ndarray, part: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[_window(x, part.shape, starts)] = part
    return x


def _gather(params: Mapping[str, Any]) -> Function:
    """Make a NumPy function for a gather, the operation to which JAX lowers `x[index]`.

    `params` has the parameters of the gather's equation in a jaxpr.
    """
    dims, sizes = params["dimension_numbers"], params["slice_sizes"]
    batched = _pairs(dims.operand_batching_dims, dims.start_indices_batching_dims)
    fills = "FILL" in str(params["mode"]).upper()
    mapped, axes = dims.start_index_map, range(len(sizes))
    left_out = (*dims.collapsed_slice_dims, *batched)
    retained = [axis for axis in axes if axis not in left_out]
    indexed = [axis for axis in axes if axis in left_out or axis in mapped]
    # The axes along which a window slides. The windows become new axes at the end.
    wide = tuple(axis for axis in retained if axis in mapped)
    windows = tuple(sizes[axis] for axis in wide)
    into = [len(axes) + wide.index(axis) if axis in wide else axis for axis in retained]
    # A slice along any other axis begins at 0.
    first = tuple(slice(None if i in indexed else sizes[i]) for i in axes)

    def gather(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        *batch, _ = rows.shape
        x, index, inside = x[first], [], np.ones(batch, bool)
        for axis in indexed:
            start = _starts(axis, rows, mapped, batched)
            last = x.shape[axis] - sizes[axis]
            if fills:
                inside &= (start >= 0) & (start <= last)
            index.append(np.minimum(np.maximum(start, 0), last))
        # A window is copied as a whole, which is faster than copying its entries.
        if wide:
            x = np.lib.stride_tricks.sliding_window_view(x, windows, wide)
        out = x.transpose(*indexed, *into)[tuple(index)]
        if fills and not inside.all():
            fill = params["fill_value"]
            fill = np.nan if fill is None else fill
            out = np.where(inside.reshape(*batch, *[1] * len(retained)), out, fill)
        # The window's axes go to the positions that the operation's parameters give.
        out = out.astype(x.dtype, copy=False)
        return np.moveaxis(out, range(len(batch), out.ndim), dims.offset_dims)

    return gather


def _pairs(axes: Iterable[int], values: Iterable[int]) -> dict[int, int]:
    return dict(zip(axes, values, strict=True))


def _starts(
    axis: int, rows: np.ndarray, mapped: Sequence[int], batched: Mapping[int, int]
) -> np.ndarray:
    """For each slice of a gather or scatter, the slice's first index along one axis.

    Args:
      axis: an axis of the array from which slices are read, or to which they are added.
      rows: the start indices, i[..., k], as in `jax.lax.gather`. A row has a
        slice's first indices along k axes.
      mapped: the k axes, in the order of a row's entries.
      batched: for each batch axis of the array, the same batch axis of `rows`.

    Returns:
      The first indices, i[...]: the entries of `rows` if `axis` is in `mapped`, the
      indices along the batch axis if `axis` is a batch axis, and 0 for any other axis.
    """
    shape = rows.shape[:-1]
    if axis in mapped:
        return rows[..., mapped.index(axis)].astype(np.int64)
    if axis in batched:  # the batch's number
        at = batched[axis]
        return np.broadcast_to(_count_along(at, shape[at], len(shape)), shape)
    return np.zeros(shape, np.int64)


def _count_along(axis: int, size: int, ndim: int) -> np.ndarray:
    """The indices 0, ..., size − 1 along one of ndim axes; other axes have length 1."""
    return np.arange(size).reshape([-1 if i == axis else 1 for i in range(ndim)])


def _scatter(combine: Callable[[np.ndarray, Any, np.ndarray], object]) -> Rule:
    """Make the rule of a scatter, to which JAX lowers `x.at[index].add(updates)`.

    `combine(array, indices, updates)` combines the updates with the array's entries in
    place. A slice that extends beyond the array is not updated.
    """

    def rule(params: Mapping[str, Any]) -> Function:
        if "CLIP" in str(params["mode"]).upper():
            raise NotEvaluatedError("scatter whose indices are clipped")
        dims = params["dimension_numbers"]
        batched = _pairs(dims.operand_batching_dims, dims.scatter_indices_batching_dims)

        def scatter(x: np.ndarray, rows: np.ndarray, updates: np.ndarray) -> np.ndarray:
            x, (*batch, _) = x.copy(), rows.shape
            outer = [i for i in range(updates.ndim) if i not in dims.update_window_dims]
            updates = updates.transpose(*outer, *dims.update_window_dims)
            left_out = (*dims.inserted_window_dims, *batched)
            retained = [i for i in range(x.ndim) if i not in left_out]
            window = _pairs(retained, updates.shape[len(batch) :])
            # Indices into the flattened array, with which NumPy is much faster.
            flat, inside = np.zeros((), np.int64), np.ones((), bool)
            for axis, length in enumerate(x.shape):
                start = _starts(axis, rows, dims.scatter_dims_to_operand_dims, batched)
                start = np.reshape(start, (*batch, *[1] * len(retained)))
                # A window that extends beyond the array is dropped as a whole.
                last = length - window.get(axis, 1)
                inside = inside & (start >= 0) & (start <= last)
                if axis in window:
                    at = len(batch) + retained.index(axis)
                    start = start + _count_along(at, window[axis], start.ndim)
                flat = flat * length + start
            if not inside.all():
                inside = np.broadcast_to(inside, flat.shape)
                flat, updates = flat[inside], updates[inside]
            combine(x.reshape(-1), flat.reshape(-1), updates.reshape(-1))
            return x

        return scatter

    return rule


def _convolution(params: Mapping[str, Any]) -> Function:
    """Make a NumPy function for a convolution along one axis.

    `params` has the parameters of the convolution's equation in a jaxpr. JAX lowers
    `jax.numpy.convolve` to such an equation.
    """
    dilations = (*params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    left, right, out = params["dimension_numbers"]
    if (*dilations, *params["window_strides"], *groups) != (1,) * 5:
        raise NotEvaluatedError("convolution along several axes")
    ((before, after),) = params["padding"]
    if min(before, after) < 0:
        raise NotEvaluatedError("convolution with negative padding")

    def convolve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = x.transpose(left), y.transpose(right)
        x = np.pad(x, ((0, 0), (0, 0), (before, after)))
        if x.shape[:2] == y.shape[:2] == (1, 1):
            sums = np.correlate(x[0, 0], y[0, 0], "valid")[None, None]
        else:
            windows = np.lib.stride_tricks.sliding_window_view(x, y.shape[2], axis=2)
            sums = np.einsum("ncwk,ock->now", windows, y)
        return sums.transpose(np.argsort(out))

    return convolve


def _pad(params: Mapping[str, Any]) -> Function:
    widths = [(low, high) for low, high, _ in params["padding_config"]]
    if any(inside for *_, inside in params["padding_config"]):
        raise NotEvaluatedError("pad with interior widths")

    def pad(x: np.ndarray, value: np.ndarray) -> np.ndarray:
        out = np.full([n + sum(w) for n, w in zip(x.shape, widths, strict=True)], value)
        # The slices of the entries that stay. A negative width removes entries.
        before, after = [], []
        for n, (low, high) in zip(x.shape, widths, strict=True):
            first, end = max(-low, 0), n + min(high, 0)
            before.append(slice(first, end))
            after.append(slice(first + low, end + low))
        out[tuple(after)] = x[tuple(before)]
        return out

    return pad


def _sort(params: Mapping[str, Any]) -> Function:
    axis, keys = params["dimension"], params["num_keys"]

    def sort(*arrays: np.ndarray) -> list[np.ndarray]:
        order = np.lexsort(arrays[:keys][::-1], axis=axis)
        return [np.take_along_axis(x, order, axis) for x in arrays]

    return sort


def _fft(params: Mapping[str, Any]) -> Function:
    kind, (length,) = str(params["fft_type"].name).lower(), params["fft_lengths"]
    return functools.partial(getattr(np.fft, kind), n=length)


def _iota(params: Mapping[str, Any]) -> Function:
    shape, axis = params["shape"], params["dimension"]
    row = _count_along(axis, shape[axis], len(shape)).astype(params["dtype"])
    numbers = np.broadcast_to(row, shape)
    return lambda: numbers


def _split(params: Mapping[str, Any]) -> Function:
    return lambda x: np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _round(params: Mapping[str, Any]) -> Function:
    if params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint
    return lambda x: np.trunc(x) + np.copysign(np.abs(x - np.trunc(x)) >= 0.5, x)


def _reduce_precision(params: Mapping[str, Any]) -> Function:
    if (params["exponent_bits"], params["mantissa_bits"]) != (8, 23):
        raise NotEvaluatedError("rounding to another precision than that of float32")
    return lambda x: x.astype(np.float32).astype(x.dtype)


def _count_leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = 8 * x.dtype.itemsize
    left, zeros = x.view(f"u{x.dtype.itemsize}"), np.full(x.shape, bits, x.dtype)
    # Halve the bits. If the upper half is not zero, continue with the upper half.
    while bits > 1:
        bits //= 2
        upper = left >> bits
        zeros = np.where(upper > 0, zeros - bits, zeros).astype(x.dtype)
        left = np.where(upper > 0, upper, left)
    return zeros - left.astype(x.dtype)


def _total_order(compare: Function) -> Function:
    """Make `compare` follow IEEE 754's total order of floats, in which −0 is below 0.

    A NaN whose sign bit is set is below all numbers, and any other NaN is above them.
    """

    def key(x: np.ndarray) -> np.ndarray:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        bits = x.view(f"i{x.dtype.itemsize}")
        return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)

    return lambda x, y: compare(key(x), key(y))


def _polynomial(x: np.ndarray, *coefficients: np.ndarray) -> np.ndarray:
    # Horner's rule. The last coefficient belongs to the highest power.
    return functools.reduce(lambda total, c: total * x + c, reversed(coefficients))


def _count_ones(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)


def _elementwise(fn: Function) -> Rule:
    return lambda params: fn


def _scipy(name: str) -> Rule:
    def rule(params: Mapping[str, Any]) -> Function:
        import scipy.special  # here, so that `import dpjax` does not wait for SciPy

        return getattr(scipy.special, name)

    return rule


def _reduction(fn: Function) -> Rule:
    def rule(params: Mapping[str, Any]) -> Function:
        axes = params["axes"]

        def reduce(x: np.ndarray) -> np.ndarray:
            # Along axes of length 1 there is nothing to reduce.
            alone = all(x.shape[axis] == 1 for axis in axes)
            return x.squeeze(axes) if alone else fn(x, axis=axes)

        return reduce

    return rule


def _cumulative(fn: np.ufunc) -> Rule:
    def rule(params: Mapping[str, Any]) -> Function:
        axis = params["axis"]

        def accumulate(x: np.ndarray) -> np.ndarray:
            return fn.accumulate(x, axis=axis, dtype=x.dtype)

        if not params["reverse"]:
            return accumulate
        return lambda x: np.flip(accumulate(np.flip(x, axis)), axis)

    return rule


def _convert(params: Mapping[str, Any]) -> Function:
    dtype = np.dtype(params["new_dtype"])

    def convert(x: np.ndarray) -> np.ndarray:
        if x.dtype == dtype:
            return x
        if x.dtype.kind != "f" or dtype.kind not in "iu":
            return x.astype(dtype)
        # As XLA does: NaN becomes 0, and a number out of range the nearest integer.
        wide, ends = np.nan_to_num(x.astype(np.float64), nan=0.0), np.iinfo(dtype)
        inside = np.where((wide > ends.min) & (wide < ends.max), wide, 0.0)
        out = np.where(wide >= ends.max, ends.max, inside.astype(dtype))
        return np.where(wide <= ends.min, ends.min, out).astype(dtype)

    return convert


def _shift_right(x: np.ndarray, by: np.ndarray, kind: str) -> np.ndarray:
    """Shift the bits of integers to the right.

    With the kind "i" the integers are signed, so that copies of the sign bit fill the
    free bits. With the kind "u" the integers are unsigned, and zeros fill these bits.
    """
    bits = 8 * x.dtype.itemsize
    shifted = x.view(f"{kind}{x.dtype.itemsize}") >> np.minimum(by, bits - 1)
    return np.where(by < bits, shifted, shifted >> 1).astype(x.dtype)


# Operations that NumPy has under the same name, and then under another name. For
# scalars, Python's operators are ten times as fast as the functions of NumPy that they
# call.
_SAME_NAMES = (
    "ceil conj cos exp exp2 expm1 floor log log1p log2 nextafter sign sin sqrt tanh"
)
_OTHER_NAMES: dict[str, Function] = {
    "abs": operator.abs,
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "square": lambda x: x * x,
    "neg": operator.neg,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "atan2": np.arctan2,
    "is_finite": np.isfinite,
    "asinh": np.arcsinh,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt_to": _total_order(np.less),
    "le_to": _total_order(np.less_equal),
    "shift_left": np.left_shift,
    "shift_right_logical": functools.partial(_shift_right, kind="u"),
    "shift_right_arithmetic": functools.partial(_shift_right, kind="i"),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "clz": _count_leading_zeros,
    "population_count": _count_ones,
    "polynomial": _polynomial,
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "optimization_barrier": lambda *xs: xs,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "dynamic_update_slice": _dynamic_update,
}
# For every operation, the rule that makes its function.
RULES: dict[str, Rule] = {
    **{name: _elementwise(getattr(np, name)) for name in _SAME_NAMES.split()},
    **{name: _elementwise(fn) for name, fn in _OTHER_NAMES.items()},
    "erf": _scipy("erf"),
    "erfc": _scipy("erfc"),
    "erf_inv": _scipy("erfinv"),
    "lgamma": _scipy("gammaln"),
    "logistic": _scipy("expit"),
    "integer_pow": _integer_pow,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "iota": _iota,
    "fft": _fft,
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "bitcast_convert_type": lambda params: lambda x: x.view(params["new_dtype"]),
    "reshape": lambda params: lambda x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params: lambda x: x.squeeze(params["dimensions"]),
    "transpose": lambda params: lambda x: np.transpose(x, params["permutation"]),
    "rev": lambda params: lambda x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params: lambda *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params: lambda *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params: lambda x: np.moveaxis(x, params["axis"], 0),
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "sort": _sort,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "scatter": _scatter(operator.setitem),  # pyright: ignore
    "scatter-add": _scatter(np.add.at),
    "scatter-max": _scatter(np.maximum.at),
    "conv_general_dilated": _convolution,
    "reduce_sum": _reduction(lambda x, axis: np.add.reduce(x, axis, x.dtype)),
    "reduce_max": _reduction(np.maximum.reduce),
    "reduce_min": _reduction(np.minimum.reduce),
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "cumsum": _cumulative(np.add),
    "cummax": _cumulative(np.maximum),
}
