"""NumPy arrays in place of tensors: on the way to a kernel and back they share memory.

An array is read where it lies. One copy is made of what no tensor can stand for: negative strides, foreign byte order, memory that
is not aligned, and fields of wider structures. It is in the order that kernels want, so that it replaces the copy which they would
make of a tensor that is not contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from .errors import dtype_name, kind, sentence

# Type codes of NumPy's numbers that a Python number can stand for: not long double, nor a span of time, which is an integer to NumPy.
_NUMBERS = frozenset("?efd" + np.typecodes["AllInteger"])
_OF_NUMPY = (np.ndarray, np.generic)


def concerns(data: Any, options: dict[str, Any]) -> bool:
    """Whether a call is one for `answer`: it has arrays, or numbers of NumPy. Offsets alone are no matter, see `_dispatch.check`."""
    if isinstance(data, np.ndarray):
        return True
    for name, value in options.items():  # every call that is not the shortest comes by, and a generator takes as long as the rest
        if isinstance(value, _OF_NUMPY) and (_is_array(name, value) or is_number(value)):
            return True
    return False


def answer(op: str, data: Any, segments: Any, options: dict[str, Any]) -> Any:
    """The function `op` on tensors; its results as arrays again if the data was one."""
    if torch.compiler.is_compiling() and any(is_number(value) and not _is_array(name, value) for name, value in options.items()):
        return _answer_outside(op, data, segments, options)  # a number would be a tensor in the graph
    return _answer(op, data, segments, options)


def _answer(op: str, data: Any, segments: Any, options: dict[str, Any]) -> Any:
    import fastops

    named = {name: _plain(op, name, value) for name, value in options.items()}
    function = getattr(fastops, op)
    if not isinstance(data, np.ndarray):
        return function(data, segments, **named)
    if "dtype" in named:
        named["dtype"] = _torch_dtype(op, named["dtype"])
    data = as_tensor(op, "values" if op == "segment_broadcast" else "data", data)
    result = function(data, segments, **named)
    return type(result)([_array(op, part) for part in result]) if isinstance(result, tuple) else _array(op, result)


# Not torch.compiler.disable, which imports the compiler at once.
_answer_outside = torch._disable_dynamo(_answer)


def is_number(value: Any) -> bool:
    """Whether it stands for a Python number: one of NumPy's, or an array of no dimensions."""
    if not isinstance(value, _OF_NUMPY) or value.ndim > 0:
        return False
    return torch.compiler.is_compiling() or value.dtype.char in _NUMBERS


def _is_array(name: str, value: Any) -> bool:
    return name in ("weight", "q") and isinstance(value, np.ndarray)


def _plain(op: str, name: str, value: Any) -> Any:
    """An option as a function of tensors takes it."""
    if _is_array(name, value):
        return as_tensor(op, name, value)
    return value.item() if is_number(value) else value


def as_tensor(op: str, argument: str, array: np.ndarray) -> Tensor:
    """A tensor on the memory of an array, or on that of a copy where no tensor is like the array."""
    if torch.compiler.is_compiling():
        return torch.from_numpy(array)
    check_no_mask(op, argument, array)
    try:
        return share(array)
    except ValueError:
        return torch.from_numpy(copied(array))
    except TypeError:
        requirement = _dtypes_of(op, argument)
        raise TypeError(sentence(op, argument, requirement, array.dtype, _number_in(array.dtype))) from None


def share(array: np.ndarray) -> Tensor:
    """A tensor on the memory of an array; TypeError for a dtype that torch lacks, ValueError for a layout that it lacks."""
    if not array.flags.aligned:
        raise ValueError("its memory is not aligned")
    if not array.flags.writeable:  # of which torch would warn, but nothing is written to what is given
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy in a layout and byte order that tensors have."""
    return array.astype(array.dtype.newbyteorder("="), order="C", subok=False)


class _Writable:
    """The memory of an array as NumPy is told of it, but writable."""

    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self.array = array  # whose memory it is
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def check_no_mask(op: str, argument: str, array: np.ndarray) -> None:
    if isinstance(array, np.ma.MaskedArray):
        remedy = "pass .filled(value) of it, or the rows that count"
        raise TypeError(sentence(op, argument, "be an array without a mask", kind(array), remedy))


def no_tensor(op: str, argument: str, value: Any, be: str = "be ", only_tensors: bool = False) -> TypeError:
    """The error for what is neither a tensor nor an array, with the way from there."""
    only_tensors = only_tensors or isinstance(value, np.ndarray)
    requirement, remedy = be + "a torch.Tensor" + ("" if only_tensors else " or a NumPy array"), ""
    if isinstance(value, np.ndarray):
        remedy = "pass torch.from_numpy(...) of it"
    elif hasattr(value, "to_numpy"):
        remedy = "pass .to_numpy() of it"
    elif hasattr(value, "__dlpack__"):
        remedy = "pass torch.from_dlpack(...) of it"
    elif hasattr(value, "__array__") and not isinstance(value, np.generic):
        remedy = "pass numpy.asarray(...) of it"
    return TypeError(sentence(op, argument, requirement, kind(value), remedy))


def _torch_dtype(op: str, dtype: Any) -> Any:
    """The dtype that is meant, by torch's name or one of NumPy's."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if torch.compiler.is_compiling():
        return torch.from_numpy(np.empty(0, dtype)).dtype
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError:
        observed = dtype if isinstance(dtype, (str, np.dtype)) else kind(dtype)
        raise TypeError(sentence(op, "dtype", "be a dtype that torch has", observed)) from None


def _array(op: str, result: Tensor) -> np.ndarray:
    """A result as an array, which never has a gradient nor anything else that only tensors have."""
    if torch.compiler.is_compiling():
        return result.numpy()
    why = ""
    if type(result) is not Tensor:  # a fake tensor
        why = f"for a result that is a {kind(result)}"
    elif result.dtype == torch.bfloat16:
        why = "for a result in bfloat16, which NumPy lacks"
    elif result.requires_grad or is_functorch_wrapped_tensor(result) or _has_tangent(result):
        why = "for a result with a gradient or under a transform of torch.func"
    if why:
        raise TypeError(sentence(op, "data", f"be a torch.Tensor {why}", "numpy.ndarray", "pass torch.from_numpy(...) of it"))
    return result.numpy()


def _has_tangent(result: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(result).tangent is not None


def _dtypes_of(op: str, argument: str) -> str:
    from . import registry
    from ._dispatch import ALL_DTYPES, FLOATING

    if argument in ("offsets", "lengths", "index"):
        return "be int32 or int64"
    accepted = {"weight": ALL_DTYPES, "q": FLOATING}.get(argument) or registry.find(op).dtypes
    return "be one of " + ", ".join(map(dtype_name, accepted))


def _number_in(dtype: np.dtype) -> str:
    """The way from a dtype that torch lacks to numbers."""
    if dtype.names is not None:
        return "pass its fields one by one"
    if dtype.kind in "mM":
        return "pass .view('int64') of it"
    return "convert it with .astype(...)" if dtype.kind in "Ofc" else ""
