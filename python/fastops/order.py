"""Order within segments, and what is seen of sorted rows: how many are different, and which is the most frequent.

The order is that of `torch.sort`: NaN is greater than all numbers and equals itself, -0.0 equals 0.0, and what is equal stays in
the order of its rows, in descending order too. Each column is sorted on its own. All dtypes are taken; nothing is padded, and
what is needed beside data and results is a few times as large as they are, however uneven the segments.
"""

from __future__ import annotations

from typing import Any


from ._dispatch import operator
from ._typing import Array, Flag, Grouping, Integer, Number, Operator, PairOperator, ValuesAndIndices, named
from .segments import Segments
from .select import _NAN

__all__ = ["segment_sort", "segment_argsort", "segment_nunique", "segment_mode"]

_ZERO = 0  # the default, compared by identity

_sort: PairOperator = operator("segment_sort", ("descending",))
_argsort: Operator = operator("segment_argsort", ("descending",))
_nunique: Operator = operator("segment_nunique", result=int)
_mode: PairOperator = operator("segment_mode")
_named_mode = named("mode")
_named_sort = named("sort")


def _trimmed(segments: Any) -> Any:
    """The segments; how many rows they have must be known, as so many rows has the result."""
    if isinstance(segments, Segments) and segments._tail_unknown:
        segments.order  # noqa: B018  (it finds out, and remembers)
    return segments


def segment_sort(data: Array, segments: Grouping, *, dim: Integer = 0, descending: Flag = False) -> ValuesAndIndices[Array]:
    """The rows of each segment in ascending order, and where they come from.

    Equivalent to:
        >>> [rows.sort(dim=0, stable=True) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    one after the other, with indices that count from the first row of `data`, not of the segment.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        descending: the greatest first.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.sort`: `[N, *]` of the dtype of `data`, and int64 row
        numbers along `dim`. Segment `s` is at `[offsets[s], offsets[s + 1])` along `dim`, in whatever order its rows
        stand in `data`. The gradient of a row is that of its value.

    Rules:
        Rows that are equal stay in the order of their numbers. NaN comes last, first when `descending`. Rows that belong to
        no segment are left out, so that `dim` is shorter by so many, and have the gradient 0. On CUDA, segments of an
        unchecked index are waited for once, as only they know by how many.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_sort(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([1., 3., 4., 1., 2., 5., 9.]), tensor([1, 0, 2, 3, 6, 4, 5]))
    """
    if descending is False:
        return _named_sort(_sort(data, _trimmed(segments), dim))
    return _named_sort(_sort(data, _trimmed(segments), dim, descending))


def segment_argsort(data: Array, segments: Grouping, *, dim: Integer = 0, descending: Flag = False) -> Array:
    """The row numbers of each segment, in the ascending order of their values.

    Equivalent to:
        >>> segment_sort(data, segments, descending=descending).indices   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        descending: the greatest first.

    Returns:
        `[N, *]`, int64 row numbers along `dim`, without those of no segment. They have no gradient.

    Rules:
        As `segment_sort`.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_argsort(data, torch.tensor([0, 3, 3, 7]), descending=True)
        tensor([2, 0, 1, 5, 4, 6, 3])
    """
    if descending is False:
        return _argsort(data, _trimmed(segments), dim)
    return _argsort(data, _trimmed(segments), dim, descending)


def segment_nunique(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Integer = 0) -> Array:
    """How many different values each segment has.

    Equivalent to:
        >>> [len(rows.unique()) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    for a single column, where all NaN are one value.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows, an int.

    Returns:
        int64 `[S, *]`. Counts have no gradient.

    Rules:
        Each column is counted on its own. NaN equals NaN, and -0.0 equals 0.0.

    Example:
        >>> data = torch.tensor([3., 1., 3., 1., 5., 9., 2.])
        >>> segment_nunique(data, torch.tensor([0, 3, 3, 7]))
        tensor([2, 0, 4])
    """
    if fill_value is _ZERO:
        return _nunique(data, segments, dim)
    return _nunique(data, segments, dim, fill_value)


def segment_mode(data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = _NAN) -> ValuesAndIndices[Array]:
    """The most frequent value of each segment and the first row that holds it.

    Equivalent to:
        >>> [rows.mode(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment, and always to the first row.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the value for a segment without rows; its index is -1. Where it is not given it is NaN, and 0 for integers
            and bool.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.mode`: `[S, *]` of the dtype of `data`, and int64 row
        numbers along `dim`. The gradient goes to the row that is returned.

    Rules:
        Of values that are equally frequent the smallest is returned. NaN is the largest value and equals NaN, and -0.0 equals
        0.0: a NaN is returned where it is more frequent than any number.

    Example:
        >>> data = torch.tensor([3., 1., 3., 1., 5., 9., 2.])
        >>> values, indices = segment_mode(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([3., nan, 1.]), tensor([ 0, -1,  3]))
    """
    if fill_value is _NAN:
        return _named_mode(_mode(data, segments, dim))
    return _named_mode(_mode(data, segments, dim, fill_value))
