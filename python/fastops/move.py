"""Movement between segments and rows."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn import Parameter

from ._dispatch import _HAS_CUDA, builtin_of, call, check, check_device, differ, elsewhere, reference, untransformed
from ._typing import Array, Grouping, Integer
from .errors import sentence
from .segments import Segments, _integer, _is_number

__all__ = ["segment_broadcast"]

_NAME = "segment_broadcast"
_overload = torch.ops.fastops.segment_broadcast.default
_function = builtin_of(_overload)


def segment_broadcast(
    values: Array, segments: Grouping, *, dim: Integer = 0, num_rows: Optional[Integer] = None
) -> Array:
    """Each row gets the value of its segment.

    Equivalent to:
        >>> values.repeat_interleave(segments.lengths, dim)   # doctest: +SKIP
        >>> values.index_select(dim, segments.index)          # doctest: +SKIP

    the first for rows that stand in order, the second for any.

    Args:
        values: `[S, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]` (checked on the CPU, not on CUDA).
        dim: the dimension of the segments in `values`, of the rows in the result.
        num_rows: `N`, for bare offsets on CUDA: without it the device has to be waited for to size the result.

    Returns:
        `[N, *]`, contiguous and never an alias of `values`. The gradient of a segment is the sum of those of its rows.

    Rules:
        Rows that belong to no segment get 0. Values of segments without rows go nowhere and receive the gradient 0.

    Raises:
        TypeError, ValueError, IndexError: for types, sizes and `dim`.
        DeviceMismatchError: `values` and `segments` live on different devices.

    Example:
        >>> segment_broadcast(torch.tensor([8., 0., 17.]), torch.tensor([0, 3, 3, 7]))
        tensor([ 8.,  8.,  8., 17., 17., 17., 17.])
    """
    if (
        num_rows is None
        and type(segments) is Segments
        and (type(values) is Tensor or type(values) is Parameter)
        and not torch.compiler.is_dynamo_compiling()
        and segments._num_rows is not None
        and values.device == segments._device
        and (values.is_cpu or (values.is_cuda and _HAS_CUDA))
        and untransformed()
    ):
        offsets, order, index = segments._parts
        try:
            if values.shape[dim] == offsets.shape[0] - 1:
                return _function(values, offsets, order, index, segments._num_rows, dim)
        except (IndexError, TypeError):
            pass  # check says what is wrong with dim

    answer = elsewhere(_NAME, values, segments, dim=dim, num_rows=num_rows)
    if answer is not NotImplemented:
        return answer
    if torch.jit.is_tracing():  # which takes the numbers that operators of libraries are given for constants
        return reference().segment_broadcast(values, segments, dim=dim)
    if num_rows is not None:
        num_rows = _integer(_NAME, "num_rows", num_rows)
    segments, dim = check(_NAME, values, segments, dim, "values")
    known = segments._num_rows
    if num_rows is None:
        num_rows = segments.num_rows
    elif known is not None and differ(num_rows, known):
        raise ValueError(sentence(_NAME, "num_rows", f"be {known}, as the segments say", num_rows))
    elif _is_number(num_rows) and num_rows < 0:
        raise ValueError(sentence(_NAME, "num_rows", "be at least 0", num_rows))
    check_device(_NAME, values)
    return call(_overload, values, *segments._parts, num_rows, dim)
