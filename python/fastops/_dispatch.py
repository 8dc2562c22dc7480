"""The way from a public function to its operator: what is checked in Python, and who answers.

Checks of the grouping and of what it has to do with the data happen here; those of the data (dtype, rank) in C++, in
the same words. Operators answer on devices that have kernels, also under `torch.func` transforms and in forward mode, by the
rules of `_transforms`. On other devices the reference stands behind the operators, see `_stand_in`.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import _native, _numpy, _transforms
from .errors import DeviceMismatchError, dtype_name, kind, sentence
from .segments import (
    _INDEX_DTYPES,
    Segments,
    _check_offsets,
    _from_offsets,
    _has_data,
    _index_tensor,
    _is_distributed,
    _is_number,
)

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL_DTYPES = (*FLOATING, *INTEGERS, torch.bool)

_HAS_CUDA = bool(_native.build_info()["cuda"])
_transforms_active = torch._C._are_functorch_transforms_active


def operator(name: str, options: tuple[Any, ...] = ("fill_value",), result: Any = None) -> Callable[..., Any]:
    """`run(data, segments, dim)` or `run(data, segments, dim, *options)` for one operation over rows.

    Small calls cost as much as what is done before the kernel, so what every call passes is few attribute reads, and
    whatever needs a closer look takes the slow way. `result` is what fill_value must fit, see check_options.
    """
    overload = getattr(torch.ops.fastops, name).default
    function = builtin_of(overload)
    direct = getattr(_native._C, name, _no_direct_way)

    def run(data: Any, segments: Any, dim: Any, *given: Any) -> Any:
        if (
            (type(data) is Tensor or type(data) is Parameter)
            and not torch.compiler.is_dynamo_compiling()  # comparing sizes would tie the graph to them, see differ
            and forward_ad._current_level < 0
            and not _transforms_active()
        ):
            parts = None
            try:
                if type(segments) is Segments:
                    if (
                        data.shape[dim] == segments._num_rows  # None where it is not known
                        and data.device == segments._device
                        and (data.is_cpu or (data.is_cuda and _HAS_CUDA))
                    ):
                        parts = segments._parts
                elif type(segments) is Tensor and segments.is_cpu and data.is_cpu and segments.dtype in _INDEX_DTYPES:
                    if segments.dim() == 1 and segments.size(0) > 0:
                        bad, num_rows = _check_offsets(segments).tolist()
                        if bad < 0 and data.shape[dim] == num_rows:
                            parts = (segments, None, None)
            except (IndexError, TypeError):
                pass  # the slow way says what is wrong with dim
            if parts is not None:
                if not given:
                    reduced = direct(data, *parts, dim)
                    return function(data, *parts, dim) if reduced is NotImplemented else reduced
                if not any(map(_numpy.is_number, given)):  # which the slow way turns into those of Python
                    check_options(name, data, dict(zip(options, given)), result)
                    return function(data, *parts, dim, *given)

        named = dict(zip(options, given)) if given else {}
        answer = elsewhere(name, data, segments, dim=dim, **named)
        if answer is not NotImplemented:
            return answer
        segments, dim = check(name, data, segments, dim)
        check_device(name, data)
        if given:
            check_options(name, data, named, result)
        return call(overload, data, *segments._parts, dim, *given)

    return run


def _no_direct_way(*_: Any) -> Any:
    return NotImplemented


def builtin_of(overload: Any) -> Any:
    """The built-in function that an overload calls: a twelfth of a tiny call is saved by not calling it from Python."""
    return getattr(overload, "_op", overload)


def call(overload: Any, *arguments: Any) -> Any:
    """The operator, also where transforms take derivatives of it. A graph that cannot have it has a break there."""
    if torch.compiler.is_dynamo_compiling():
        data = arguments[0]
        by_reference = not (data.is_cpu or data.is_cuda or data.is_meta)
        if _transforms.traceable() and not (by_reference and torch.is_grad_enabled() and data.requires_grad):
            return overload(*arguments)
    elif not _transforms.differentiated():
        return overload(*arguments)
    return _transforms.call(overload, *arguments)


def untransformed() -> bool:
    return forward_ad._current_level < 0 and not _transforms_active()


def reference() -> Any:
    from . import reference as module  # it imports this one

    return module


def elsewhere(op: str, data: Any, segments: Any, **options: Any) -> Any:
    """What the function `op` gives for data that is no plain tensor; NotImplemented where that is none of those known."""
    if _numpy.concerns(data, options):
        return _numpy.answer(op, data, segments, options)
    if type(data) is Tensor:
        if _transforms_active() and not torch.compiler.is_compiling() and _is_distributed(_unwrapped(data)):
            remedy = "transform a function of what each rank has, data.to_local()"
            raise TypeError(sentence(op, "data", "be a plain tensor under torch.func transforms", "DTensor", remedy))
        return NotImplemented
    if _is_distributed(data):
        from . import _distributed  # takes long, as does what it imports

        return _distributed.answer(op, data, segments, **options)
    if isinstance(data, torch.fx.Proxy):
        return _symbolically(op, data, segments, options)
    return NotImplemented


def _unwrapped(data: Tensor) -> Tensor:
    """What transforms are applied to."""
    while torch._C._functorch.is_functorch_wrapped_tensor(data):
        data = torch._C._functorch.get_unwrapped(data)
    return data


def _symbolically(op: str, data: Any, segments: Any, options: dict[str, Any]) -> Any:
    """The call as one node of the graph that `torch.fx.symbolic_trace` makes; segments that it does not take itself are made there."""
    if isinstance(segments, Segments):
        segments = data.tracer.create_proxy("call_function", *segments.__reduce__(), {})
    result = data.tracer.create_proxy("call_function", getattr(sys.modules[__package__], op), (data, segments), options)
    if len(getattr(torch.ops.fastops, op).default._schema.returns) == 1:
        return result
    return getattr(torch.return_types, op.removeprefix("segment_"))((result[0], result[1]))


def check(op: str, data: Any, segments: Any, dim: Any, argument: str = "data") -> tuple[Segments, int]:
    """The segments, made of bare offsets if need be, and dim counted from the front."""
    if not isinstance(data, Tensor):
        raise _numpy.no_tensor(op, argument, data)
    given = "segments"
    if not isinstance(segments, Segments):
        given = "offsets"
        if isinstance(segments, np.ndarray):
            segments = _index_tensor(op, given, segments)
        if not isinstance(segments, Tensor):
            raise _numpy.no_tensor(op, "segments", segments, "be a Segments, or offsets as ")
        if segments.device == data.device:
            segments = _from_offsets(op, segments, segments.is_cpu)
    if _transforms_active() and _transforms.is_batched(segments._parts[0]):
        _transforms.refuse_batch(op, given)
    check_same_device(op, given, segments.device, data, argument)
    dim = check_dim(op, data, dim, argument)
    expected, why = segments._num_rows, "as the segments do"
    if argument == "values":
        expected, why = segments.num_segments, "one for each segment"
    if expected is not None and differ(data.shape[dim], expected):
        requirement = f"have {expected} rows along dim {dim}, {why}"
        raise ValueError(sentence(op, argument, requirement, data.shape[dim]))
    return segments, dim


def check_same_device(op: str, argument: str, device: torch.device, data: Tensor, of: str = "data") -> None:
    if device != data.device:
        remedy = "move one of them with .to(device)"
        raise DeviceMismatchError(sentence(op, argument, f"be on the device of {of} ({data.device})", device, remedy))


def check_dim(op: str, data: Tensor, dim: Any, argument: str = "data") -> int:
    if isinstance(dim, bool) or not hasattr(dim, "__index__") or getattr(dim, "ndim", 0) > 0:
        raise TypeError(sentence(op, "dim", "be an int", kind(dim)))
    rank = data.dim()
    if rank == 0:
        raise ValueError(sentence(op, argument, "have at least 1 dimension", 0))
    if not -rank <= dim < rank:
        raise IndexError(sentence(op, "dim", f"be in [{-rank}, {rank - 1}]", dim))
    return dim + rank if dim < 0 else dim


def differ(a: Any, b: Any) -> bool:
    """Whether two sizes differ, as far as that is known: a graph for any number of rows is not to be tied to one."""
    if torch.compiler.is_compiling():
        return torch.fx.experimental.symbolic_shapes.statically_known_true(a != b)
    return a != b


def check_device(op: str, data: Any) -> None:
    """Raises where there would be kernels if only the build were another, and lets the reference answer where there are none."""
    if data.is_cpu or (data.is_cuda and _HAS_CUDA):
        return
    if data.is_cuda and _has_data(data):
        reason = _native.build_info()["cuda_reason"]
        observation = f"{data.device}, and CUDA was left out of this build: {reason}"
        remedy = f"rebuild it with: {_native.rebuild_command(cuda=True)}"
        raise RuntimeError(sentence(op, "data", "be on a device that fastops was built for", observation, remedy))
    if not (data.is_meta or data.is_cuda or torch.compiler.is_dynamo_compiling()):
        from . import _stand_in  # it imports what imports this

        _stand_in.register(data.device.type)


def check_dtype(op: str, dtype: torch.dtype, accepted: tuple[Any, ...], argument: str = "data", remedy: str = "") -> None:
    if dtype not in accepted:
        names = ", ".join(map(dtype_name, accepted))
        raise TypeError(sentence(op, argument, f"be one of {names}", dtype_name(dtype), remedy))


def check_options(op: str, data: Tensor, options: dict[str, Any], result: Any = None) -> None:
    """dtype, correction, descending and fill_value where they are given. `result` says what fill_value must fit: `bool` and `int` want just that,
    `promoted` the dtype of a sum, None that of data."""
    dtype, fill_value = options.get("dtype"), options.get("fill_value", 0)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(sentence(op, "dtype", "be a torch.dtype", kind(dtype)))
    correction = options.get("correction", 1)
    if isinstance(correction, bool) or not isinstance(correction, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(sentence(op, "correction", "be a number", kind(correction)))
    if isinstance(correction, (int, float)) and _is_number(correction) and not correction >= 0:
        raise ValueError(sentence(op, "correction", "be at least 0", correction))
    for option in ("exclusive", "reverse", "descending"):
        if not isinstance(options.get(option, False), bool):
            raise TypeError(sentence(op, option, "be a bool", kind(options[option])))
    if result is bool:
        if not isinstance(fill_value, bool):
            raise TypeError(sentence(op, "fill_value", "be a bool", kind(fill_value)))
        return
    if result is int:
        if isinstance(fill_value, bool) or not isinstance(fill_value, (int, torch.SymInt)):
            raise TypeError(sentence(op, "fill_value", "be an int", kind(fill_value)))
        into = torch.int64
    else:
        if not isinstance(fill_value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(sentence(op, "fill_value", "be a number", kind(fill_value)))
        into = dtype or (promoted(data.dtype) if result is promoted else data.dtype)
    if into in ALL_DTYPES and isinstance(fill_value, (int, float)) and _is_number(fill_value) and not _fits(fill_value, into):
        raise ValueError(sentence(op, "fill_value", f"fit in {dtype_name(into)}", fill_value))


def promoted(dtype: torch.dtype) -> torch.dtype:
    """What a sum or product is returned in."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _fits(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, int) and value.bit_length() > 1024:  # no float, and too large for math.isfinite
        return False
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if not math.isfinite(value) or int(value) != value:
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max
