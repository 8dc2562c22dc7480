"""Batches for a `DataLoader`: the rows of many items one behind the other, and the `Segments` that tell them apart."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Collection, Iterable, Iterator, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate, get_worker_info

from . import _numpy
from ._offload import _in_host_memory
from .errors import dtype_name, kind, sentence
from .move import segment_broadcast
from .segments import _INDEX_DTYPES, Segments, _device

__all__ = ["Batch", "collate"]

_OP = "collate"


class Batch:
    """Parts that belong together and move together: what `collate` makes of items.

    A part is found by its name or its place: `batch.data`, `batch["data"]`, `batch[0]`. Iteration is over the parts, as it is
    over those of a named tuple, so that `data, label, segments = batch` takes a batch apart; `dict(batch)` and
    `model(**batch)` work, too. Names of methods (`to`, `keys`, `pin_memory`) and those with `_` in front need brackets.

    It is immutable and a node of `torch.utils._pytree`, pickles, and passes between processes without a copy of its tensors.

    Args:
        parts: each part by its name.

    Example:
        >>> batch = Batch({"data": torch.ones(7, 2), "segments": Segments.from_lengths(torch.tensor([3, 0, 4]))})
        >>> batch
        Batch(data=float32[7, 2], segments=Segments(num_segments=3, num_rows=7))
        >>> batch.to("meta").data.device
        device(type='meta')
    """

    __slots__ = ("_parts", "__weakref__")

    segments: Segments

    def __init__(self, parts: Union[Mapping[Any, Any], Iterable[tuple[Any, ...]]]) -> None:
        self._parts = dict(parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while there are no parts yet
            raise AttributeError(name)
        if name not in self._parts:
            raise AttributeError(self._without(name))
        return self._parts[name]

    def __getitem__(self, name: Union[str, int]) -> Any:
        if name in self._parts:
            return self._parts[name]
        if isinstance(name, int) and -len(self) <= name < len(self):
            return list(self)[name]
        raise (IndexError if isinstance(name, int) else KeyError)(self._without(name))

    def _without(self, name: Any) -> str:
        return sentence("Batch", "part", f"be one of {_listed(self._parts)}", repr(name))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        """The number of parts."""
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._parts if isinstance(name, str))]

    def keys(self) -> tuple[Any, ...]:
        """The names of the parts."""
        return tuple(self._parts)

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """All tensors on `device`, as a new object. Copies with `non_blocking=True` overlap with the program if they come
        from pinned memory."""
        device = _device("Batch.to", device)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def pin_memory(self) -> Batch:
        """All tensors in page-locked memory, as a new object. `DataLoader(pin_memory=True)` calls it."""
        return pytree.tree_map_only(Tensor, Tensor.pin_memory, self)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={_described(part)}' for name, part in self._parts.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self._parts,)

    def __copy__(self) -> Batch:
        return self  # immutable


def _described(part: Any) -> str:
    return f"{dtype_name(part.dtype)}{list(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"


pytree.register_pytree_node(
    Batch,
    lambda batch: (list(batch), batch.keys()),
    lambda parts, names: Batch(zip(names, parts)),
    serialized_type_name="fastops.Batch",
    to_dumpable_context=lambda names: json.dumps(names),
    from_dumpable_context=lambda text: tuple(json.loads(text)),
    flatten_with_keys_fn=lambda batch: ([(pytree.MappingKey(name), batch[name]) for name in batch.keys()], batch.keys()),
)
# torch.load(weights_only=True), its default, takes a Batch too.
torch.serialization.add_safe_globals([Batch])


def collate(
    items: Sequence[Any], *, stack: Union[str, int, Collection[Any]] = (), shift: Optional[Mapping[str, str]] = None
) -> Batch:
    """One batch of items whose numbers of rows differ, for `DataLoader(dataset, collate_fn=fastops.collate)`.

    An item is a tensor or a NumPy array `[L, *]`, or has several as parts: a tuple, a list, a named tuple, a dict or another
    mapping, or a dataclass. What becomes of a part depends on what it is, never on the sizes of the other items:

    - Tensors and arrays with dimensions are rows. Those of all items are concatenated along dimension 0, in one copy. All that
      stand in the same container have the same number of rows, and the part `segments`, behind the others, has a
      segment for each item. An item without rows is an empty segment.
    - A container is a group with rows and segments of its own, and becomes a `Batch` in the batch: nodes and edges, words and
      sentences, questions and answers.
    - All else (numbers, strings, tensors without dimensions) and what `stack` names goes to
      `torch.utils.data.default_collate`, which stacks it: one entry for each item.

    A single tensor is a part named `data`. Parts of tuples and lists are numbered; make a tensor of a list of numbers.

    Options are bound with `functools.partial(fastops.collate, stack="label")`. In a worker process rows are
    concatenated in shared memory, so the batch is not copied again on its way to the main process.

    Args:
        items: at least one. They have the same parts; the rows of a part have one dtype and the same sizes but for the first.
        stack: the name of a part of one size, or several names: a label `[C]`, an image. A part of a group is named
            with the group: `"nodes.label"`.
        shift: for a part of row numbers (int32 or int64) the part whose rows they are numbers of:
            `{"edges.source": "nodes.x"}`. They are counted within the item and become those in the batch. Negative
            ones stand for no row and stay.

    Returns:
        A `Batch` of the same parts, and the `Segments` of each group with rows, on the device of the rows.

    Raises:
        TypeError: `items` is no list; a part of an item cannot be collated, or has another dtype than that of item 0.
        ValueError: there are no items; an item has other parts than item 0, rows of another size, or parts that disagree about
            their number; no part has rows; a name is not there; a row number is too large.

    Example:
        >>> items = [
        ...     {"data": torch.tensor([3., 1., 4.]), "label": 5},
        ...     {"data": torch.tensor([]), "label": 6},
        ...     {"data": torch.tensor([1., 5., 9., 2.]), "label": 7},
        ... ]
        >>> for batch in torch.utils.data.DataLoader(items, batch_size=3, collate_fn=collate):
        ...     batch
        ...     segment_sum(batch.data, batch.segments), batch.label
        Batch(data=float32[7], label=int64[3], segments=Segments(num_segments=3, num_rows=7))
        (tensor([ 8.,  0., 17.]), tensor([5, 6, 7]))

        Graphs, whose edges number the nodes of their own graph:

        >>> graph = {"nodes": {"x": torch.ones(3, 2)}, "edges": {"source": torch.tensor([0, 2])}, "label": "ring"}
        >>> batch = collate([graph, graph], shift={"edges.source": "nodes.x"})
        >>> batch.edges.source, batch.nodes.segments.offsets, batch.label
        (tensor([0, 2, 3, 5]), tensor([0, 3, 6]), ['ring', 'ring'])
    """
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(sentence(_OP, "items", "be a list of items", kind(items)))
    if not items:
        raise ValueError(sentence(_OP, "items", "have at least 1 entry", 0))
    if _parts_of(items[0]) is None:
        items = [{"data": item} for item in items]
    if not isinstance(stack, (str, int, Collection)):
        raise TypeError(sentence(_OP, "stack", "be the name of a part or a collection of names", kind(stack)))
    if shift is not None and not isinstance(shift, Mapping):
        raise TypeError(sentence(_OP, "shift", "be a dict of names of parts", kind(shift)))
    collation = _Collation({str(name) for name in ((stack,) if isinstance(stack, (str, int)) else stack)})
    batch = collation.group(items, "")
    collation.check()
    for part, numbered in (shift or {}).items():
        collation.shift(str(part), str(numbered))
    return batch


@dataclasses.dataclass
class _Rows:
    """Those of all items, and where those of each begin."""

    data: Tensor
    offsets: list[int]
    segments: Segments


class _Collation:
    """One call. A part is known by its path, the names of the groups around it and its own."""

    def __init__(self, stack: set[str]) -> None:
        self.stack = stack
        self.paths: list[str] = []
        self.rows: dict[str, _Rows] = {}

    def group(self, items: Sequence[Any], within: str) -> Batch:
        """`within` ends in a point, unless it is empty."""
        parts_of_items: list[Any] = [_parts_of(item) for item in items]
        names = list(parts_of_items[0])
        for number, parts in enumerate(parts_of_items):
            if parts is None or parts.keys() != parts_of_items[0].keys():
                where = f"{within[:-1]} of item {number}" if within else f"item {number}"
                observed = kind(items[number]) if parts is None else _listed(parts)
                raise ValueError(sentence(_OP, where, f"have the parts {_listed(names)}, as in item 0", observed))
        spelled = [str(name) for name in names]
        if len(set(spelled)) < len(names) or any("." in name for name in spelled):  # of which paths would not tell them apart
            where = within[:-1] or "items"
            raise ValueError(sentence(_OP, where, "have parts with different names that hold no point", _listed(map(repr, names))))
        collated: dict[str, Any] = {}
        first: Optional[str] = None
        for name in names:
            path, values = f"{within}{name}", [parts[name] for parts in parts_of_items]
            self.paths.append(path)
            if path in self.stack:
                collated[name] = _stacked(path, values)
            elif _has_rows(values[0]):
                self.rows[path] = _concatenated(path, values, first, self.rows[first] if first else None)
                collated[name] = self.rows[path].data
                first = first or path
            elif _parts_of(values[0]) is not None:
                collated[name] = self.group(values, f"{path}.")
            else:
                for number, value in enumerate(values):
                    if _has_rows(value):
                        requirement = f"have no dimensions, as the {kind(values[0])} in item 0"
                        raise ValueError(sentence(_OP, f"{path} of item {number}", requirement, value.ndim))
                collated[name] = _stacked(path, values)
        if first is not None:
            if "segments" in collated:
                remedy = "call it something else"
                raise ValueError(sentence(_OP, f"{within}segments", "be the name of what is added", "a part of the items", remedy))
            collated["segments"] = self.rows[first].segments
        return Batch(collated)

    def check(self) -> None:
        for path in sorted(self.stack - set(self.paths)):
            raise ValueError(sentence(_OP, "stack", f"be among the parts {_listed(self.paths)}", path))
        if not self.rows:
            observed = f"only {_listed(self.paths)}"
            remedy = "use torch.utils.data.default_collate"
            raise ValueError(sentence(_OP, "items", "have a part with rows, [L, *], that is not stacked", observed, remedy))

    def shift(self, path: str, numbered: str) -> None:
        for name in (path, numbered):
            if name not in self.rows:
                raise ValueError(sentence(_OP, "shift", f"name parts with rows, {_listed(self.rows)}", name))
        numbers, offsets = self.rows[path].data, self.rows[numbered].offsets
        if numbers.dtype not in _INDEX_DTYPES:
            raise TypeError(sentence(_OP, path, "be int32 or int64 to be shifted", dtype_name(numbers.dtype)))

        def for_each(of_items: Tensor) -> Tensor:
            handed = segment_broadcast(of_items.to(numbers.device), self.rows[path].segments)
            return handed.reshape(-1, *[1] * (numbers.dim() - 1))

        starts = torch.tensor(offsets, device="cpu")
        if numbers.is_cpu:  # elsewhere it would have to be waited for
            wrong = (numbers >= for_each(starts.diff())).nonzero()
            if len(wrong):
                at = wrong[0].tolist()
                item = int(self.rows[path].segments.index[at[0]])
                requirement = f"be below {offsets[item + 1] - offsets[item]}, the number of rows of {numbered}"
                raise ValueError(sentence(_OP, f"{path} of item {item}", requirement, int(numbers[tuple(at)])))
        numbers += for_each(starts[:-1]) * (numbers >= 0)


def _parts_of(item: Any) -> Optional[dict[Any, Any]]:
    """The parts of a container by their names; None of anything else."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item))
    if isinstance(item, (tuple, list)):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def _has_rows(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _stacked(path: str, values: list[Any]) -> Any:
    try:
        return default_collate(values)
    except (TypeError, ValueError, RuntimeError) as error:
        observed = f"{', '.join(dict.fromkeys(map(kind, values)))}: {error}"
        requirement = "be rows, or what torch.utils.data.default_collate stacks"
        raise type(error)(sentence(_OP, path, requirement, observed)) from None


def _concatenated(path: str, values: list[Any], beside: Optional[str], known: Optional[_Rows]) -> _Rows:
    """`beside` is a part of the same items with as many rows, if there is one, and `known` what became of it."""
    tensors = [_tensor_of(f"{path} of item {number}", value) for number, value in enumerate(values)]
    like, features = tensors[0], tensors[0].shape[1:]
    for number, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            requirement = f"be {dtype_name(like.dtype)}, as in item 0"
            raise TypeError(sentence(_OP, f"{path} of item {number}", requirement, dtype_name(tensor.dtype)))
        if tensor.shape[1:] != features:
            requirement = f"be [{', '.join(map(str, ('*', *features)))}], as in item 0"
            raise ValueError(sentence(_OP, f"{path} of item {number}", requirement, list(tensor.shape)))
    offsets = [0, *accumulate(map(len, tensors))]
    if known is None:
        from_zero = torch.tensor(offsets, dtype=torch.int64, device="cpu")
        segments = Segments.from_offsets(from_zero, check_invariants=False).to(like.device)
        return _Rows(_cat(tensors, offsets[-1]), offsets, segments)
    for number, (end, expected) in enumerate(zip(offsets[1:], known.offsets[1:])):
        if end != expected:
            requirement = f"have {expected - known.offsets[number]} rows, as {beside} has"
            remedy = "put it into a container of its own, or stack it"
            raise ValueError(sentence(_OP, f"{path} of item {number}", requirement, len(tensors[number]), remedy))
    return _Rows(_cat(tensors, offsets[-1]), offsets, known.segments)


def _tensor_of(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        try:
            value = _in_host_memory(_OP, name, value)
        except ValueError:
            value = _in_host_memory(_OP, name, _numpy.copied(value))
    if not isinstance(value, Tensor):
        raise TypeError(sentence(_OP, name, "be rows, as in item 0", kind(value)))
    if value.dim() == 0:
        raise ValueError(sentence(_OP, name, "have at least 1 dimension, as in item 0", 0))
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(sentence(_OP, name, "be a dense tensor", f"one that is {'nested' if value.is_nested else dtype_name(value.layout)}"))
    return value


def _cat(tensors: list[Tensor], num_rows: int) -> Tensor:
    like = tensors[0]
    if get_worker_info() is None or not like.is_cpu:
        return torch.cat(tensors)
    shape = (num_rows, *like.shape[1:])
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * like.element_size())
    return torch.cat(tensors, out=torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, shape))  # type: ignore[call-overload]
