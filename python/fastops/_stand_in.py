"""The reference behind the operators, for devices that have no kernels: mps, xpu, and what others bring along as PrivateUse1.

It stands where kernels and derivatives of other devices do, under the backend's key and that of its autograd, so that
the device's own autograd takes the derivatives. Devices that torch was built for get it at import, others when they are met.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from . import _transforms
from ._dispatch import reference
from .segments import _new

_library = torch.library.Library("fastops", "IMPL")
_keys: set[str] = set()
_lock = threading.Lock()


def register(device_type: str) -> None:
    """Lets the reference answer on a kind of device."""
    key = torch._C._dispatch_key_for_device(device_type)
    with _lock:
        if key in _keys:
            return
        for name in (*_transforms.PUBLIC, "_segment_weighted_sum"):
            answer = _answer_of(name)
            _library.impl(name, answer, key)
            _library.impl(name, _with_gradient(name, answer), f"Autograd{key}")
        for name, function in (("_check_offsets", _check_offsets), ("_index_bounds", _index_bounds), ("_group_index", _group_index)):
            _library.impl(name, function, key)
        _keys.add(key)


def _with_gradient(name: str, answer: Any) -> Any:
    """Where a gradient is wanted the device's autograd sees what the answer is made of. Elsewhere a kernel may be there, of who brought
    the device, or the fake kernel, which a graph is made with."""
    overload = getattr(torch.ops.fastops, name).default

    def answer_or_below(*given: Any) -> Any:
        if _wants_gradient(given):
            return answer(*given)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*given)

    return answer_or_below


def _answer_of(name: str) -> Any:
    overload = getattr(torch.ops.fastops, name).default
    names = [argument.name for argument in overload._schema.arguments]

    def answer(*given: Any) -> Any:
        data, *rest = given
        options = dict(zip(names[1:], rest))  # without those that have their defaults
        offsets, order, index = (options.pop(part) for part in ("offsets", "order", "index"))
        segments = _new(offsets, order, index, int(offsets[-1]) if index is None else index.size(0))
        segments._tail_unknown = order is not None  # rows of no segment may stand at its end
        if options.get("fill_value", 0) is None:
            del options["fill_value"]
        if "weight" in options:
            options["dtype"] = options["weight"].dtype if options.pop("wide") else data.dtype
        function = getattr(reference(), name.replace("_segment_weighted", "segment"))
        result = function(data, segments, **options)
        return tuple(result) if isinstance(result, tuple) else result

    return answer


def _wants_gradient(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in arguments)


# ---- grouping ----


def _check_offsets(offsets: Tensor) -> Tensor:
    """[the first position that lies below the one before it, else -1; the last offset], on the CPU."""
    ends = offsets.cpu().long()
    before = torch.nn.functional.pad(ends, (1, 0))[:-1]
    wrong = ends < before
    wrong[:1] |= ends[:1] != 0
    bad = wrong.nonzero()[:1, 0].tolist() or [-1]
    return torch.tensor([*bad, *(ends[-1:].tolist() or [0])])


def _index_bounds(index: Tensor) -> Tensor:
    """[the smallest entry, the largest, whether they ascend], on the CPU."""
    if index.numel() == 0:
        return torch.tensor([0, -1, 1])
    ascending = bool((index[1:] >= index[:-1]).all())
    return torch.tensor([int(index.min()), int(index.max()), int(ascending)])


def _group_index(index: Tensor, num_segments: int, sorted: bool) -> tuple[Tensor, Tensor]:
    """Offsets, and the rows by segment; those of no segment come last."""
    group = torch.where((index < 0) | (index >= num_segments), num_segments, index)
    group, order = group.sort(stable=True)
    offsets = torch.searchsorted(group, torch.arange(num_segments + 1, dtype=group.dtype, device=group.device))
    return offsets.to(index.dtype), order[: 0 if sorted else None].to(index.dtype)


for _device_type, _built in (("privateuseone", True), ("mps", torch.backends.mps.is_built()), ("xpu", torch.xpu._is_compiled())):
    if _built:
        register(_device_type)
