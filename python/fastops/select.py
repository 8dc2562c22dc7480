"""Rows of given rank in each segment: the greatest and the least, the median, quantiles, the first and the last.

What `fastops.reduce` says of its functions holds for these too. Rows are selected, not sorted. NaN is the largest value, -0.0
equals 0.0, and row numbers count from the first row of `data`, not of the segment.
"""

from __future__ import annotations

import numbers
from typing import Any, Union

import torch
from torch import Tensor

from . import _numpy
from ._dispatch import (
    ALL_DTYPES,
    FLOATING,
    call,
    check,
    check_device,
    check_dtype,
    check_options,
    check_same_device,
    elsewhere,
    operator,
    reference,
)
from ._transforms import is_batched
from ._typing import AnyArray, Array, Flag, Grouping, Integer, Number, Operator, PairOperator, ValuesAndIndices, named
from .errors import kind, sentence
from .segments import _has_data, _integer, _is_number

__all__ = ["segment_topk", "segment_median", "segment_quantile", "segment_first", "segment_last"]

INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")

_NAN = float("nan")  # the default, compared by identity: integers cannot hold it
_ZERO = 0

_median: PairOperator = operator("segment_median")
_first: Operator = operator("segment_first")
_last: Operator = operator("segment_last")
_topk = torch.ops.fastops.segment_topk.default
_quantile = torch.ops.fastops.segment_quantile.default
_named_median = named("median")
_named_topk = named("topk")


def segment_topk(
    data: Array,
    segments: Grouping,
    k: Integer,
    *,
    dim: Integer = 0,
    largest: Flag = True,
    sorted: Flag = True,
    fill_value: Number = 0,
) -> ValuesAndIndices[Array]:
    """The `k` greatest rows of each segment, or the least, and where they are.

    Equivalent to:
        >>> [rows.topk(min(k, len(rows)), 0, largest) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with results of `k` rows for every segment and indices that count from the first row of `data`.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        k: how many rows of each segment, 0 or more.
        dim: the dimension of the rows.
        largest: the greatest rows, otherwise the least.
        sorted: the best row comes first, otherwise rows come in the order that they have in `data`.
        fill_value: the value of what a segment of fewer rows lacks, at its end; the index is -1.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.topk`: `[S, k, *]` of the dtype of `data`, and int64 row
        numbers along `dim`. The dimension of `k` comes right behind that of the segments. The gradient of an entry goes to
        its row.

    Rules:
        Of rows that tie, the first is taken, and comes first. NaN is the largest value, as in `torch.topk`.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_topk(data, torch.tensor([0, 3, 3, 7]), 2)
        >>> values
        tensor([[4., 3.],
                [0., 0.],
                [9., 5.]])
        >>> indices
        tensor([[ 2,  0],
                [-1, -1],
                [ 5,  4]])
    """
    op = "segment_topk"
    options = {"dim": dim, "largest": largest, "sorted": sorted, "fill_value": fill_value}
    answer = elsewhere(op, data, segments, k=k, **options)
    if answer is not NotImplemented:
        return answer
    segments, dim = check(op, data, segments, dim)
    k = check_topk(data, k, largest, sorted, fill_value)
    check_device(op, data)
    return _named_topk(call(_topk, data, *segments._parts, k, dim, largest, sorted, fill_value))


def check_topk(data: Any, k: Any, largest: Any, sorted: Any, fill_value: Any) -> int:
    """The number of rows, an int, after a check of what kernels and the reference check alike."""
    op = "segment_topk"
    check_dtype(op, data.dtype, ALL_DTYPES)
    k = _integer(op, "k", k)
    if _is_number(k) and not 0 <= k < 2**63:
        raise ValueError(sentence(op, "k", "be at least 0" if k < 0 else "be less than 2**63", k))
    if torch.compiler.is_compiling():
        torch._check(k >= 0)
    for name, flag in (("largest", largest), ("sorted", sorted)):
        if not isinstance(flag, bool):
            raise TypeError(sentence(op, name, "be a bool", kind(flag)))
    check_options(op, data, {"fill_value": fill_value})
    return k


def segment_median(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = _NAN) -> ValuesAndIndices[Array]:
    """The median of each segment and the row that holds it.

    Equivalent to:
        >>> [rows.median(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the value for a segment without rows; its index is -1. Where it is not given it is NaN, and 0 for integers
            and bool.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.median`: `[S, *]` of the dtype of `data`, and int64 row
        numbers along `dim`. The gradient goes to the row that is returned.

    Rules:
        Of an even number of rows it is the lower of the two in the middle; `segment_quantile` of 0.5 lies between them. Of
        rows that tie, the first is returned. The median of a segment with a NaN is NaN, and its row is the first NaN.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_median(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([3., nan, 2.]), tensor([ 0, -1,  6]))
    """
    if fill_value is _NAN:
        return _named_median(_median(data, segments, dim))
    return _named_median(_median(data, segments, dim, fill_value))


def segment_quantile(
    data: Array,
    segments: Grouping,
    q: Union[Number, AnyArray],
    *,
    dim: Integer = 0,
    interpolation: str = "linear",
    fill_value: Number = _NAN,
) -> Array:
    """The quantiles of each segment: what a share of `q` of its rows is not above.

    Equivalent to:
        >>> torch.stack([rows.quantile(q, 0) for rows in data.split(segments.lengths.tolist())], -1)   # doctest: +SKIP

    for a single column.

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        q: a number in [0, 1], or a floating tensor of such numbers with 0 or 1 dimensions, `[Q]`, on the device of `data`. The
            values of a tensor are looked at on the CPU; on CUDA, where that would wait, those out of range give `fill_value`.
        dim: the dimension of the rows.
        interpolation: what lies between two rows, at a share of the way from the lower to the higher: `linear` that share of
            both, `midpoint` their mean, `lower`, `higher`, or `nearest`, of which the one of even rank where both are as near.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, of the dtype of `data`, for a single number; `[Q, S, *]` for a tensor of one dimension.
        The gradient goes to the one or two rows, by their shares, and none to `q`.

    Rules:
        Segments may be of any length. The rank `q * (length - 1)` is computed in float64. The quantile of a segment with a NaN
        is NaN. Of rows that tie, the first has the lower rank. float16 and bfloat16 are interpolated in float32 and rounded
        once.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_quantile(data, torch.tensor([0, 3, 3, 7]), 0.5)
        tensor([3.0000,    nan, 3.5000])
        >>> segment_quantile(data, torch.tensor([0, 3, 3, 7]), torch.tensor([0., 0.9]), interpolation="nearest")
        tensor([[1., nan, 1.],
                [4., nan, 9.]])
    """
    op = "segment_quantile"
    options = {"dim": dim, "interpolation": interpolation, "fill_value": fill_value}
    answer = elsewhere(op, data, segments, q=q, **options)
    if answer is not NotImplemented:
        return answer
    segments, dim = check(op, data, segments, dim)
    check_quantile(data, q, interpolation, fill_value)
    check_device(op, data)
    if is_batched(q):  # kernels take all data for each q
        return reference().segment_quantile(data, segments, q, **options)
    fill = None if fill_value is _NAN else fill_value
    return call(_quantile, data, *segments._parts, as_tensor(q, data), dim, interpolation, fill)


def check_quantile(data: Any, q: Any, interpolation: Any, fill_value: Any) -> None:
    """What kernels and the reference check alike."""
    op = "segment_quantile"
    check_dtype(op, data.dtype, FLOATING)
    if not isinstance(interpolation, str) or interpolation not in INTERPOLATIONS:
        observed = interpolation if isinstance(interpolation, str) else kind(interpolation)
        raise (ValueError if isinstance(interpolation, str) else TypeError)(
            sentence(op, "interpolation", f"be one of {', '.join(INTERPOLATIONS)}", observed)
        )
    check_options(op, data, {"fill_value": fill_value})
    if isinstance(q, Tensor):
        check_same_device(op, "q", q.device, data)
        check_dtype(op, q.dtype, FLOATING, "q")
        if q.dim() > 1:
            raise ValueError(sentence(op, "q", "have at most 1 dimension", q.dim()))
        if q.is_cpu and _has_data(q) and not torch._C._are_functorch_transforms_active():
            wrong = q.detach()[~((q >= 0) & (q <= 1))].tolist() if q.dim() else [x for x in [q.item()] if not 0 <= x <= 1]
            if wrong:
                raise ValueError(sentence(op, "q", "be in [0, 1]", wrong[0]))
        return
    if isinstance(q, (torch.SymFloat, torch.SymInt)) or (isinstance(q, (int, float)) and not _is_number(q)):
        return
    if isinstance(q, bool) or not isinstance(q, numbers.Real):
        raise _numpy.no_tensor(op, "q", q, "be a number, ")
    if not 0 <= float(q) <= 1:
        raise ValueError(sentence(op, "q", "be in [0, 1]", q))


def as_tensor(q: Any, like: Any) -> Tensor:
    """q on the device of data: by filling, for which a device is not waited for."""
    if isinstance(q, Tensor):
        return q
    return torch.full((), float(q) if isinstance(q, numbers.Real) else q, dtype=torch.float64, device=like.device)


def segment_first(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> Array:
    """The first row of each segment.

    Equivalent to:
        >>> data[segments.offsets[:-1]]   # doctest: +SKIP

    for rows in order and segments that have rows.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, the dtype of `data`. The gradient goes to the row.

    Rules:
        Of rows in any order it is the one of the smallest number, whatever its value: a NaN is not passed over.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_first(data, torch.tensor([0, 3, 3, 7]))
        tensor([3., 0., 1.])
    """
    if fill_value is _ZERO:
        return _first(data, segments, dim)
    return _first(data, segments, dim, fill_value)


def segment_last(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = 0) -> Array:
    """The last row of each segment.

    Equivalent to:
        >>> data[segments.offsets[1:] - 1]   # doctest: +SKIP

    for rows in order and segments that have rows.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, the dtype of `data`. The gradient goes to the row.

    Rules:
        Of rows in any order it is the one of the greatest number, whatever its value: a NaN is not passed over.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_last(data, torch.tensor([0, 3, 3, 7]))
        tensor([4., 0., 2.])
    """
    if fill_value is _ZERO:
        return _last(data, segments, dim)
    return _last(data, segments, dim, fill_value)
