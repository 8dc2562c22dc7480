"""Reductions: one result for each segment.

Every function takes `data` of shape `[N, *]` (rows along `dim`, which may be any dimension) and `segments`, and returns
`[S, *]`, contiguous and never an alias of `data`. What holds for all of them:

- `segments` is a `Segments`, or a 1-D tensor of offsets as a shorthand. Bare offsets are checked on the CPU; on CUDA
  they are not, since that would wait for the device: wrong ones give wrong results but are never used out of bounds.
- Arrays of NumPy stand in for tensors anywhere. Where `data` is one so are the results, which share the memory of what the
  kernel wrote, as the kernel reads that of the array; docs/numpy.md says what is copied.
- A segment without rows gets `fill_value`. No gradient flows to or from it.
- NaN propagates. Infinities are values.
- float16 and bfloat16 accumulate in float32 and round once. Sums of float32 are no less accurate than those of
  `torch.sum`. Integers are exact.
- The same inputs give the same bits, whatever the thread count, and rows in any order those of the same rows sorted.
- Gradients of first and second order, through `data`.
- Under `torch.func` transforms and in forward mode the same kernels answer; on devices without kernels `fastops.reference` does.

Errors are `TypeError` for types, `ValueError` for values and shapes, `IndexError` for `dim` and
`fastops.DeviceMismatchError` for tensors on different devices.
"""

from __future__ import annotations

from typing import Optional

from ._dispatch import operator, promoted
from ._typing import AnyArray, Array, DType, Flag, Grouping, Integer, Number, Operator, PairOperator, ValuesAndIndices, named
from ._weighted import weighted_mean, weighted_sum

__all__ = [
    "segment_sum",
    "segment_mean",
    "segment_prod",
    "segment_amax",
    "segment_amin",
    "segment_max",
    "segment_min",
    "segment_argmax",
    "segment_argmin",
    "segment_any",
    "segment_all",
]

# The default values, which are compared by identity: that is quick, and true for nothing but what must not be looked
# at.
_ZERO, _ONE, _NO_ROW = 0, 1, -1

_sum: Operator = operator("segment_sum", ("dtype", "fill_value"), promoted)
_mean: Operator = operator("segment_mean", ("dtype", "fill_value"))
_prod: Operator = operator("segment_prod", ("dtype", "fill_value"), promoted)
_amax: Operator = operator("segment_amax")
_amin: Operator = operator("segment_amin")
_max: PairOperator = operator("segment_max")
_min: PairOperator = operator("segment_min")
_argmax: Operator = operator("segment_argmax", result=int)
_argmin: Operator = operator("segment_argmin", result=int)
_any: Operator = operator("segment_any", result=bool)
_all: Operator = operator("segment_all", result=bool)
_named_max = named("max")
_named_min = named("min")


def segment_sum(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    dtype: Optional[DType] = None,
    fill_value: Number = 0,
    weight: Optional[AnyArray] = None,
) -> Array:
    """The sum of each segment.

    Equivalent to:
        >>> torch.zeros(segments.num_segments).index_add(0, segments.index, data)   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype; integers and bool give int64.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        dtype: data is converted to it first, as by `torch.sum`; it is the dtype of the result.
        fill_value: the result for a segment without rows.
        weight: factors of the rows, `[N]`, or `[N, H]` for data `[N, H, *]`, and so on: the shape of data from `dim` on, or
            the first dimensions of it (1 for any size but `N`). Each factor is for all that lies behind. The sum of
            `data * weight[..., None]` is taken without that product being written, in the dtype to which the two
            promote.

    Returns:
        `[S, *]`. The gradient of a row is that of its segment, times its weight; the gradient of a weight is that of the
        segment times the row, summed.

    Rules:
        Long segments are summed in blocks and the blocks in a fixed tree. An integer sum wraps modulo 2**64. A weight of
        0 does not hide NaN or an infinity, as 0 times those is NaN.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_sum(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 8.,  0., 17.])
        >>> heads = torch.ones(7, 2, 5)  # N, H, features
        >>> attention = torch.tensor([[1., 2.]]).expand(7, 2)
        >>> segment_sum(heads, torch.tensor([0, 3, 3, 7]), weight=attention)[:, :, 0]
        tensor([[3., 6.],
                [0., 0.],
                [4., 8.]])
    """
    if weight is not None:
        return weighted_sum(data, weight, segments, dim, dtype, fill_value)
    if dtype is None and fill_value is _ZERO:
        return _sum(data, segments, dim)
    return _sum(data, segments, dim, dtype, fill_value)


def segment_mean(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    dtype: Optional[DType] = None,
    fill_value: Number = 0,
    weight: Optional[AnyArray] = None,
) -> Array:
    """The mean of each segment.

    Equivalent to:
        >>> segment_sum(data, segments) / segments.lengths   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating; for integers pass `dtype`.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        dtype: data is converted to it first; it is the dtype of the result and must be floating.
        fill_value: the result for a segment without rows, 0 rather than the NaN of 0 / 0.
        weight: factors of the rows as in `segment_sum`; the result is `sum(weight * data) / sum(weight)`, as of
            `numpy.average`.

    Returns:
        `[S, *]`. The gradient of a row is that of its segment divided by the segment's length.

    Rules:
        The mean never overflows where its result does not; with weights, where neither sum does. Where the weights of a
        segment add up to 0 it is what dividing by 0 gives.

    Example:
        >>> data = torch.tensor([3., 1., 5., 1., 5., 9., 2.])
        >>> segment_mean(data, torch.tensor([0, 3, 3, 7]))
        tensor([3.0000, 0.0000, 4.2500])
        >>> segment_mean(data, torch.tensor([0, 3, 3, 7]), weight=torch.tensor([1., 1., 2., 0., 0., 1., 0.]))
        tensor([3.5000, 0.0000, 9.0000])
    """
    if weight is not None:
        return weighted_mean(data, weight, segments, dim, dtype, fill_value)
    if dtype is None and fill_value is _ZERO:
        return _mean(data, segments, dim)
    return _mean(data, segments, dim, dtype, fill_value)


def segment_prod(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    dtype: Optional[DType] = None,
    fill_value: Number = 1,
) -> Array:
    """The product of each segment.

    Equivalent to:
        >>> torch.stack([rows.prod(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype; integers and bool give int64.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        dtype: data is converted to it first, as by `torch.prod`; it is the dtype of the result.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`. The gradient of a row is that of its segment times the product of the other rows.

    Rules:
        A segment with a zero has the product 0 whatever overflows on the way, and NaN if it also has an infinity or a
        NaN. The gradient is right where rows are zero. An integer product wraps modulo 2**64.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_prod(data, torch.tensor([0, 3, 3, 7]))
        tensor([12.,  1., 90.])
    """
    if dtype is None and fill_value is _ONE:
        return _prod(data, segments, dim)
    return _prod(data, segments, dim, dtype, fill_value)


def segment_amax(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> Array:
    """The maximum of each segment; rows that tie share the gradient.

    Equivalent to:
        >>> torch.stack([rows.amax(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, the dtype of `data`.

    Rules:
        A segment with a NaN has the maximum NaN. The gradient is spread evenly over the rows that equal the maximum
        (over the NaN rows if it is NaN), as by `torch.amax`; `segment_max` sends it to one.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_amax(data, torch.tensor([0, 3, 3, 7]))
        tensor([4., 0., 9.])
    """
    if fill_value is _ZERO:
        return _amax(data, segments, dim)
    return _amax(data, segments, dim, fill_value)


def segment_amin(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> Array:
    """The minimum of each segment; rows that tie share the gradient.

    Equivalent to:
        >>> torch.stack([rows.amin(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, the dtype of `data`.

    Rules:
        A segment with a NaN has the minimum NaN. The gradient is spread evenly over the rows that equal the minimum
        (over the NaN rows if it is NaN), as by `torch.amin`; `segment_min` sends it to one.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_amin(data, torch.tensor([0, 3, 3, 7]))
        tensor([1., 0., 1.])
    """
    if fill_value is _ZERO:
        return _amin(data, segments, dim)
    return _amin(data, segments, dim, fill_value)


def segment_max(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> ValuesAndIndices[Array]:
    """The maximum of each segment and the row that holds it.

    Equivalent to:
        >>> [rows.max(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the value for a segment without rows; its index is -1.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.max`: `[S, *]` of the dtype of `data`, and int64 row
        numbers along `dim`.

    Rules:
        Of rows that tie, the first is returned and receives the gradient. NaN is the largest value.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_max(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([4., 0., 9.]), tensor([ 2, -1,  5]))
    """
    if fill_value is _ZERO:
        return _named_max(_max(data, segments, dim))
    return _named_max(_max(data, segments, dim, fill_value))


def segment_min(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> ValuesAndIndices[Array]:
    """The minimum of each segment and the row that holds it.

    Equivalent to:
        >>> [rows.min(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the value for a segment without rows; its index is -1.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.min`: `[S, *]` of the dtype of `data`, and int64 row
        numbers along `dim`.

    Rules:
        Of rows that tie, the first is returned and receives the gradient. A NaN is returned before any number.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_min(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([1., 0., 1.]), tensor([ 1, -1,  3]))
    """
    if fill_value is _ZERO:
        return _named_min(_min(data, segments, dim))
    return _named_min(_min(data, segments, dim, fill_value))


def segment_argmax(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Integer = -1) -> Array:
    """The row that holds the maximum of each segment.

    Equivalent to:
        >>> segment_max(data, segments).indices   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows, an int.

    Returns:
        int64 `[S, *]`: row numbers of `data` along `dim`.

    Rules:
        Of rows that tie, the first is returned. NaN is the largest value.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_argmax(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 2, -1,  5])
    """
    if fill_value is _NO_ROW:
        return _argmax(data, segments, dim)
    return _argmax(data, segments, dim, fill_value)


def segment_argmin(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Integer = -1) -> Array:
    """The row that holds the minimum of each segment.

    Equivalent to:
        >>> segment_min(data, segments).indices   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows, an int.

    Returns:
        int64 `[S, *]`: row numbers of `data` along `dim`.

    Rules:
        Of rows that tie, the first is returned. A NaN is returned before any number.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_argmin(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 1, -1,  3])
    """
    if fill_value is _NO_ROW:
        return _argmin(data, segments, dim)
    return _argmin(data, segments, dim, fill_value)


def segment_any(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Flag = False) -> Array:
    """Whether a segment has a row that is not zero.

    Equivalent to:
        >>> torch.stack([rows.any(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype. NaN is not zero.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows, a bool.

    Returns:
        bool `[S, *]` (uint8 for uint8, as `torch.any`).

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_any(data > 4, torch.tensor([0, 3, 3, 7]))
        tensor([False, False,  True])
    """
    if fill_value is False:
        return _any(data, segments, dim)
    return _any(data, segments, dim, fill_value)


def segment_all(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Flag = True) -> Array:
    """Whether no row of a segment is zero.

    Equivalent to:
        >>> torch.stack([rows.all(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype. NaN is not zero.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows, a bool.

    Returns:
        bool `[S, *]` (uint8 for uint8, as `torch.all`).

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_all(data > 1, torch.tensor([0, 3, 3, 7]))
        tensor([False,  True, False])
    """
    if fill_value is True:
        return _all(data, segments, dim)
    return _all(data, segments, dim, fill_value)
