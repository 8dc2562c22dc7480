"""Order within segments.

The order is that of `torch.sort`: NaN is greater than all numbers, -0.0 equals 0.0, and what is equal stays in the order of
its rows, in descending order too. Each column is sorted on its own. All dtypes are taken; nothing is padded, and what is
needed beside data and results is a few times as large as they are, however uneven the segments.
"""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

from ._dispatch import operator
from .segments import Segments

__all__ = ["segment_sort", "segment_argsort"]

_sort = operator("segment_sort", ("descending",))
_argsort = operator("segment_argsort", ("descending",))


def _trimmed(segments: Any) -> Any:
    """The segments; how many rows they have must be known, as so many rows has the result."""
    if isinstance(segments, Segments) and segments._tail_unknown:
        segments.order  # noqa: B018  (it finds out, and remembers)
    return segments


def segment_sort(data: Tensor, segments: Union[Segments, Tensor], *, dim: int = 0, descending: bool = False) -> Any:
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
        return torch.return_types.sort(_sort(data, _trimmed(segments), dim))
    return torch.return_types.sort(_sort(data, _trimmed(segments), dim, descending))


def segment_argsort(data: Tensor, segments: Union[Segments, Tensor], *, dim: int = 0, descending: bool = False) -> Tensor:
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
