"""Sums and means whose rows have weights: `weight=` of `segment_sum` and `segment_mean`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _numpy
from ._dispatch import ALL_DTYPES, FLOATING, call, check, check_device, check_dtype, check_options, check_same_device, elsewhere, promoted
from .errors import sentence
from .segments import Segments, _is_distributed

_weighted_sum = torch.ops.fastops._segment_weighted_sum.default
_sum = torch.ops.fastops.segment_sum.default


def weighted_sum(
    data: Any, weight: Any, segments: Any, dim: Any, dtype: Any, fill_value: Any
) -> Any:
    op = "segment_sum"
    answer = elsewhere(op, data, segments, dim=dim, dtype=dtype, fill_value=fill_value, weight=weight)
    if answer is not NotImplemented:
        return answer
    segments, dim, result = prepare(op, data, weight, segments, dim, dtype, fill_value)
    check_device(op, data)
    return _run(data, weight, segments, dim, result, fill_value)


def weighted_mean(
    data: Any, weight: Any, segments: Any, dim: Any, dtype: Any, fill_value: Any
) -> Any:
    op = "segment_mean"
    answer = elsewhere(op, data, segments, dim=dim, dtype=dtype, fill_value=fill_value, weight=weight)
    if answer is not NotImplemented:
        return answer
    segments, dim, result = prepare(op, data, weight, segments, dim, dtype, fill_value)
    check_device(op, data)
    # Both sums in the type that is computed in, so that the quotient is rounded once; fill_value / 1 where there are no rows.
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    total = _run(data, weight, segments, dim, wide, fill_value)
    total_weight = call(_sum, weight.to(wide), *segments._parts, 0, None, 1)
    return (total / expand(total_weight, data, dim)).to(result)


def prepare(
    op: str, data: Any, weight: Any, segments: Any, dim: Any, dtype: Any, fill_value: Any
) -> tuple[Segments, int, torch.dtype]:
    """What the kernels and the reference check alike: (segments, dim, dtype of the result)."""
    accepted = FLOATING if op == "segment_mean" else ALL_DTYPES
    segments, dim = check(op, data, segments, dim)
    check_dtype(op, data.dtype, ALL_DTYPES)
    if not isinstance(weight, Tensor):
        raise _numpy.no_tensor(op, "weight", weight)
    if _is_distributed(weight) and not _is_distributed(data):
        raise TypeError(sentence(op, "weight", "be a plain tensor beside plain data", "DTensor", "pass weight.full_tensor()"))
    check_same_device(op, "weight", weight.device, data)
    check_dtype(op, weight.dtype, ALL_DTYPES, "weight")
    sizes = data.shape[dim:]
    if not 1 <= weight.dim() <= len(sizes):
        raise ValueError(sentence(op, "weight", f"have between 1 and {len(sizes)} dimensions", weight.dim()))
    if not torch.compiler.is_compiling():  # as of the rows: a graph is not to be tied to their number
        for number, (size, wanted) in enumerate(zip(weight.shape, sizes)):
            if size != wanted and (size != 1 or number == 0):
                requirement = f"have the shape of data from dim {dim} on, {list(sizes[: weight.dim()])}"
                raise ValueError(sentence(op, "weight", requirement, list(weight.shape)))
    check_options(op, data, {"dtype": dtype}, promoted)
    result = dtype if dtype is not None else promoted(torch.promote_types(data.dtype, weight.dtype))
    remedy = "pass dtype=torch.float32" if dtype is None and op == "segment_mean" else ""
    check_dtype(op, result, accepted, "data" if dtype is None else "dtype", remedy)
    check_options(op, data, {"dtype": result, "fill_value": fill_value})
    return segments, dim, result


def expand(of_heads: Tensor, data: Tensor, dim: int) -> Tensor:
    """A weight, or a sum of weights, with as many dimensions behind as the data."""
    return of_heads.reshape(*of_heads.shape, *[1] * (data.dim() - dim - of_heads.dim()))


def _run(data: Tensor, weight: Tensor, segments: Segments, dim: int, result: torch.dtype, fill_value: float) -> Tensor:
    if result.is_floating_point:
        is_short = data.dtype in (torch.float16, torch.bfloat16)
        if not (is_short and result == torch.float32):  # which the kernel makes of 16 bits
            data = data.to(result)
        weight = weight.to(torch.float64 if result == torch.float64 else torch.float32)
        into = result
    else:  # exact modulo 2**64, from which narrower results follow
        data, weight, into = data.to(result).long(), weight.to(result).long(), torch.int64
    heads = data.shape[dim + 1 : dim + weight.dim()]
    if weight.shape[1:] != heads:
        weight = weight.expand(weight.shape[0], *heads)
    wide = data.dtype != into
    total = call(_weighted_sum, data, weight, *segments._parts, dim, wide, fill_value)
    return total if into == result else total.to(result)  # under autocast 16 bits may have become float32
