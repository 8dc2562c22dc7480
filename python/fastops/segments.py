"""`Segments`: which rows belong together. Group once, use with every operation."""

from __future__ import annotations

import json
import operator
import os
import sys
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor

from . import _native, _numpy, _transforms  # noqa: F401  (the first registers the operators used below)
from .errors import dtype_name, kind, sentence

__all__ = ["Segments"]

_check_offsets = torch.ops.fastops._check_offsets.default
_index_bounds = torch.ops.fastops._index_bounds.default
_group_index = torch.ops.fastops._group_index.default

_INDEX_DTYPES = (torch.int64, torch.int32)


class Segments:
    """A grouping of `N` rows into `S` segments, which knows nothing of the data.

    Made by one of

    - `Segments.from_offsets(offsets)`: rows stand in order, segment `s` is rows `offsets[s]` to `offsets[s + 1]`;
    - `Segments.from_lengths(lengths)`: rows stand in order, segment `s` has `lengths[s]` rows;
    - `Segments.from_index(index)`: row `i` belongs to segment `index[i]`, in any order;
    - `Segments.from_keys(keys)`: rows with equal keys belong together.

    The object is immutable: its attributes cannot be set, and `to`, `cpu`, `cuda` and `pin_memory` return a new object
    (or this one where nothing changes), as those of a tensor do and unlike those of a module. The tensors
    that it was made from are kept without a copy; changing one in place afterwards breaks the grouping, and a backward
    that needs the old one says so. Arrays of NumPy are tensors on their memory, of whose change nothing is noticed. What
    was not given is computed on first use and kept.

    It pickles, deep-copies, passes between processes and is a node of `torch.utils._pytree`, whose leaves are
    `offsets` and, for rows that do not stand in order, `order` and `index`. Two objects are equal if they are the
    same object.

    Checks happen at construction, once. They are left out where the entries cannot be known: on the meta device, for
    fake tensors and inside `torch.compile`.

    Example:
        >>> segments = Segments.from_offsets(torch.tensor([0, 3, 3, 7]))
        >>> segments
        Segments(num_segments=3, num_rows=7)
        >>> segments.lengths
        tensor([3, 0, 4])
        >>> segments.index
        tensor([0, 0, 0, 2, 2, 2, 2])
    """

    # _parts is what operations read, (offsets, order, index): order and index are None when rows stand in order.
    __slots__ = ("_parts", "_device", "_num_rows", "_lengths", "_index", "_tail_unknown", "__weakref__")

    _parts: tuple[Any, ...]
    _device: Any
    _num_rows: Optional[int]
    _lengths: Optional[Tensor]
    _index: Optional[Tensor]
    _tail_unknown: bool

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError("Segments is made by Segments.from_offsets, from_lengths, from_index or from_keys")

    # ---- construction ----

    @staticmethod
    def from_offsets(offsets: Union[Tensor, np.ndarray[Any, Any]], *, check_invariants: bool = True) -> Segments:
        """Segments of rows that stand in order, from where each starts (CSR).

        Args:
            offsets: int32 or int64 `[S + 1]`, ascending from 0 to the number of rows, a tensor or an array. An empty
                segment repeats a position.
            check_invariants: whether to check that. On CUDA the check waits for the device once; without it, wrong
                offsets give wrong results but are never used out of bounds.

        Raises:
            TypeError: `offsets` is no tensor or array, or neither int32 nor int64.
            ValueError: it has not one dimension, is empty, or does not ascend from 0. The message names the first bad
                entry.

        Example:
            >>> Segments.from_offsets(torch.tensor([0, 3, 3, 7])).num_rows
            7
        """
        return _from_offsets("Segments.from_offsets", offsets, check_invariants)

    @staticmethod
    def from_lengths(lengths: Union[Tensor, np.ndarray[Any, Any]], *, check_invariants: bool = True) -> Segments:
        """Segments of rows that stand in order, from the number of rows of each.

        Args:
            lengths: int32 or int64 `[S]`, not negative, a tensor or an array. `offsets` has the same dtype; only if the sum of
                int32 lengths passes 2**31 - 1 it is int64 (unchecked: the sum must fit).
            check_invariants: whether to check that no length is negative. On CUDA the check waits for the device once.

        Raises:
            TypeError: `lengths` is no tensor or array, or neither int32 nor int64.
            ValueError: it has not one dimension, or an entry is negative. The message names the first.

        Example:
            >>> Segments.from_lengths(torch.tensor([3, 0, 4])).offsets
            tensor([0, 3, 3, 7])
        """
        op = "Segments.from_lengths"
        lengths = _index_tensor(op, "lengths", lengths).contiguous()
        offsets = _offsets_of(lengths, lengths.dtype)
        num_rows = None
        if _has_data(offsets):
            if check_invariants:
                bad, num_rows = _check_offsets(offsets).tolist()
                if bad >= 0 and bool((lengths >= 0).all()):  # the sum does not fit
                    offsets = _offsets_of(lengths, torch.int64)
                    bad, num_rows = _check_offsets(offsets).tolist()
                if bad >= 0:
                    at = int((lengths < 0).nonzero()[0])
                    observed = f"{int(lengths[at])} at position {at}"
                    raise ValueError(sentence(op, "lengths", "be at least 0", observed))
            elif offsets.is_cpu:
                num_rows = int(offsets[-1])
        segments = _new(offsets, None, None, num_rows)
        segments._lengths = lengths
        return segments

    @staticmethod
    def from_index(
        index: Union[Tensor, np.ndarray[Any, Any]],
        num_segments: Optional[Union[int, np.integer[Any]]] = None,
        *,
        ignore_index: Optional[Union[int, np.integer[Any]]] = None,
        check_invariants: bool = True,
    ) -> Segments:
        """Segments of rows in any order, from the segment of each (COO).

        Rows are grouped by a stable counting sort, so results are bit for bit those of the same rows sorted. An index
        that ascends is noticed: `order` is None then, and operations take the way for rows in order.

        Args:
            index: int32 or int64 `[N]`, entries in `[0, num_segments)`, a tensor or an array.
            num_segments: `S`; None for the largest entry plus one, which on CUDA waits for the device.
            ignore_index: rows with this entry belong to no segment: they count in no reduction, get 0 where a result
                has the rows of `data`, and receive no gradient. Without it -1 is an error, never the last segment.
                The property `index` has -1 for such rows.
            check_invariants: whether to look at the entries. On CUDA that waits for the device once. Without it an
                index that ascends is not noticed, and rows with entries out of range belong to no segment.

        Raises:
            TypeError: `index` is no tensor or array or neither int32 nor int64; `num_segments` or `ignore_index` is no integer.
            ValueError: `index` has not one dimension or an entry out of range (the message names the first);
                `num_segments` is negative or too small.
            MemoryError: `num_segments` is so large that the offsets do not fit in memory.

        Example:
            >>> segments = Segments.from_index(torch.tensor([2, 0, 2, 0]), num_segments=3)
            >>> segments.order, segments.offsets
            (tensor([1, 3, 0, 2]), tensor([0, 2, 2, 4]))
        """
        op = "Segments.from_index"
        index = _index_tensor(op, "index", index)
        if num_segments is not None:
            num_segments = _integer(op, "num_segments", num_segments)
            if _known(num_segments < 0):
                raise ValueError(sentence(op, "num_segments", "be at least 0", num_segments))
            if torch.compiler.is_compiling():
                torch._check(num_segments >= 0)
        if ignore_index is not None:
            ignore_index = _integer(op, "ignore_index", ignore_index)
            limits = torch.iinfo(index.dtype)
            if not limits.min <= ignore_index <= limits.max:
                raise ValueError(sentence(op, "ignore_index", f"fit in {dtype_name(index.dtype)}", ignore_index))
        index = index.contiguous()
        if index.dtype == torch.int32 and index.size(0) > 2**31 - 1:
            index = index.long()  # row numbers do not fit in the index's own dtype
        given = index
        known = _has_data(index)

        if ignore_index is not None and ignore_index != -1:
            ignored = index == ignore_index
            # -1 stands for ignored rows from here on; where it was given as an entry it stays wrong, as -2.
            index = index.masked_fill(index == -1, -2).masked_fill_(ignored, -1)
        low, high, ascending, num_kept = 0, -1, False, None
        if known and (check_invariants or num_segments is None):
            if ignore_index is None:
                low, high, ascending = _index_bounds(index).tolist()
            elif index.numel():
                bounds = torch.stack((index.min(), index.max(), (index >= 0).sum().to(index.dtype)))
                low, high, num_kept = bounds.tolist()
                if low >= 0:
                    ascending = bool(_index_bounds(index)[2]) if index.is_cpu else False
            else:
                low, high, ascending, num_kept = 0, -1, True, 0
        elif num_segments is None:
            raise ValueError(sentence(op, "num_segments", "be given where the entries of index are unknown", None))

        if check_invariants and known:
            least = 0 if ignore_index is None else -1
            if low < least or (num_segments is not None and high >= num_segments):
                limit = high + 1 if num_segments is None else num_segments
                _raise_bad_index(op, given, index, least, limit, num_segments)
        if num_segments is None:
            num_segments = high + 1
        _check_offsets_fit(op, num_segments, index)

        offsets, order = _group_index(index, num_segments, bool(ascending) and low >= 0)
        if ascending and low >= 0:
            segments = _new(offsets, None, None, index.size(0))
            segments._index = index
            return segments
        if num_kept is None and index.is_cpu and known:
            num_kept = int(offsets[-1])
        if num_kept is not None:
            order = order.narrow(0, 0, num_kept)
        num_rows = None if torch.jit.is_tracing() else index.size(0)  # which would be a constant of the trace
        segments = _new(offsets, order, index, num_rows)
        may_lack = ignore_index is not None or not check_invariants
        segments._tail_unknown = num_kept is None and may_lack and (known or _in_graph())
        return segments

    @staticmethod
    def from_keys(
        keys: Any, *, sort: bool = True, dropna: bool = True, observed: bool = True
    ) -> tuple[Segments, Any]:
        """Segments of rows with equal keys, and the keys in the order of the segments.

        Equivalent to:
            >>> names, index = np.unique(keys, return_inverse=True)                     # doctest: +SKIP
            >>> Segments.from_index(torch.from_numpy(index), len(names)), names         # doctest: +SKIP

        but by hashing where that is faster, for more kinds of keys, and with room for missing ones.

        Args:
            keys: one key per row: a NumPy array, a pandas Series, Index or Categorical, a column of polars or pyarrow, a
                tensor, or a list of anything that can be hashed (strings, tuples, dates). Or several columns, of which
                a row has a key each: a DataFrame, a MultiIndex, an array with fields, a list of columns (row by row:
                the index of a Series is not looked at). A missing key is None, NaN, NaT or NA.
            sort: segments in the order of their keys: that of the categories of a Categorical, and that of appearance for
                keys that cannot be compared. Otherwise always in the order of appearance.
            dropna: rows with a missing key belong to no segment. Otherwise missing keys are one key, greater than others.
            observed: only categories that occur. Otherwise there are segments without rows for the others of a pandas
                Categorical; with several columns, for all combinations of what occurs in the other columns with them.

        The options and what they do are those of pandas' groupby.

        Returns:
            The segments (on the CPU, or on the device of a tensor) and their keys. These are of the same kind as `keys`:
            a list for a list, an array for an array (of objects for a column of polars or pyarrow with missing keys), an
            Index for a Series. Of several columns they are a MultiIndex if pandas has part in them, an array with fields
            for such an array, and otherwise a tuple of columns.

        Raises:
            TypeError: `keys` is no array-like, or a key cannot be hashed; an option is no bool.
            ValueError: `keys` has not one dimension, no columns, or columns of different lengths.

        Example:
            >>> segments, names = Segments.from_keys(["b", "a", "b", None])
            >>> names, segments.index
            (['a', 'b'], tensor([ 1,  0,  1, -1]))
        """
        from . import _keys  # it imports this one

        op = "Segments.from_keys"
        for option, value in (("sort", sort), ("dropna", dropna), ("observed", observed)):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(sentence(op, option, "be a bool", kind(value)))
        return _keys.group(op, keys, bool(sort), bool(dropna), bool(observed))

    # ---- what it consists of ----

    @property
    def offsets(self) -> Tensor:
        """`[S + 1]`: where each segment starts in the grouped sequence of rows, and where the last one ends."""
        return self._parts[0]

    @property
    def order(self) -> Optional[Tensor]:
        """`[<= N]`: the rows grouped by segment, ascending inside each; None when they already stand in order.
        Rows that belong to no segment are left out."""
        if self._tail_unknown:  # asked before the parts are read, which another thread may be about to replace
            offsets, order, index = self._parts
            kept = offsets[-1]
            if torch.jit.is_tracing():
                order = order[:kept]
            else:
                kept = kept.item()
                if torch.compiler.is_compiling():
                    torch._check(kept >= 0)
                    torch._check(kept <= order.size(0))
                order = order.narrow(0, 0, kept)
            self._parts = (offsets, order, index)
            self._tail_unknown = False
        return self._parts[1]

    @property
    def index(self) -> Tensor:
        """`[N]`: the segment of each row, -1 for rows that belong to none."""
        if self._parts[2] is not None:
            return self._parts[2]
        if torch.compiler.is_compiling():  # a graph is not to depend on what was asked for before
            return self._find_index()
        if self._index is None:
            with _transforms.outside_inference_mode():  # what is kept may be trained with, too
                index = self._find_index()
            if _is_traced(index) or _is_wrapped(index):
                return index
            self._index = index
        return self._index

    def _find_index(self) -> Tensor:
        offsets = self._parts[0]
        rows = torch.arange(self.num_rows, dtype=offsets.dtype, device=offsets.device)
        # A search rather than repeat_interleave, which writes out of bounds where unchecked offsets are wrong.
        found = torch.searchsorted(offsets, rows, right=True, out_int32=offsets.dtype == torch.int32) - 1
        return found.clamp_(max=offsets.size(0) - 2)

    @property
    def lengths(self) -> Tensor:
        """`[S]`: the number of rows of each segment."""
        if torch.compiler.is_compiling():
            return self._parts[0].diff()
        if self._lengths is None:
            with _transforms.outside_inference_mode():
                lengths = self._parts[0].diff()
            if _is_traced(lengths) or _is_wrapped(lengths):
                return lengths
            self._lengths = lengths
        return self._lengths

    @property
    def num_segments(self) -> int:
        """`S`."""
        return self._parts[0].size(0) - 1

    @property
    def num_rows(self) -> int:
        """`N`, rows that belong to no segment included. Of unchecked offsets on CUDA the first use waits for the device."""
        if self._parts[2] is not None:
            return self._parts[2].size(0)
        if self._num_rows is None:
            num_rows = self._parts[0][-1]
            if torch.jit.is_tracing():
                return num_rows
            num_rows = num_rows.item()
            if torch.compiler.is_compiling():
                torch._check(num_rows >= 0)
                return num_rows  # a number of the graph, which must not outlive it
            self._num_rows = num_rows
        return self._num_rows

    @property
    def device(self) -> torch.device:
        """Where the tensors of the grouping live."""
        return self._device

    def __repr__(self) -> str:
        offsets, order, _ = self._parts
        rows = "?" if self._num_rows is None else self._num_rows
        text = f"Segments(num_segments={offsets.size(0) - 1}, num_rows={rows}"
        if order is not None:
            text += ", in_order=False"
        if offsets.dtype != torch.int64:
            text += f", dtype={dtype_name(offsets.dtype)}"
        if self._device.type != "cpu":
            text += f", device='{self._device}'"
        return text + ")"

    # ---- moving ----

    def to(self, device: Any, non_blocking: bool = False) -> Segments:
        """These segments on `device`: a new object, or this one if it is there already."""
        device = _device("Segments.to", device)
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cpu(self) -> Segments:
        """These segments on the CPU: a new object, or this one if it is there already."""
        return self._map(Tensor.cpu)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Segments:
        """These segments on a CUDA device: a new object, or this one if it is there already."""
        return self._map(lambda tensor: tensor.cuda(device, non_blocking=non_blocking))

    def pin_memory(self) -> Segments:
        """These segments in page-locked memory: a new object, or this one if it is there already."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: Any) -> None:
        """Tells the allocator that a stream uses these tensors too, as `Tensor.record_stream` does: for segments that were made on
        another one."""
        for part in (*self._parts, self._lengths, self._index):
            if part is not None:
                part.record_stream(stream)

    def _map(self, function: Any) -> Segments:
        parts = (self._parts[0], self.order, self._parts[2])
        moved = [None if part is None else function(part) for part in parts]
        if all(new is old for new, old in zip(moved, parts)):
            return self
        offsets, order, index = moved
        return _new(offsets, order, index, self._num_rows)

    # ---- copying, pickling ----

    def __reduce__(self) -> tuple[Any, ...]:
        offsets, _, index = self._parts
        return _rebuild, (offsets, self.order, index, self._num_rows)

    def __copy__(self) -> Segments:
        return self  # immutable


def _new(offsets: Any, order: Any, index: Any, num_rows: Optional[int]) -> Segments:
    segments = object.__new__(Segments)
    segments._parts = (offsets, order, index)
    segments._device = getattr(offsets, "device", None)
    segments._num_rows = num_rows
    segments._lengths = None
    segments._index = None
    segments._tail_unknown = False
    return segments


def _rebuild(offsets: Tensor, order: Optional[Tensor], index: Optional[Tensor], num_rows: Optional[int]) -> Segments:
    return _new(offsets, order, index, num_rows)


def _from_offsets(op: str, offsets: Any, check_invariants: bool) -> Segments:
    offsets = _index_tensor(op, "offsets", offsets)
    if offsets.size(0) == 0:
        raise ValueError(sentence(op, "offsets", "have at least 1 entry", 0))
    offsets = offsets.contiguous()
    num_rows = None
    if _has_data(offsets):
        if check_invariants:
            bad, num_rows = _check_offsets(offsets).tolist()
            if bad >= 0:
                after = f" after {int(offsets[bad - 1])}" if bad > 0 else ""
                observed = f"{int(offsets[bad])}{after} at position {bad}"
                raise ValueError(sentence(op, "offsets", "ascend from 0", observed))
        elif offsets.is_cpu:
            num_rows = int(offsets[-1])
    return _new(offsets, None, None, num_rows)


# ---- checks ----


def _device(op: str, device: Any) -> Any:
    """What `.to` takes, which elsewhere takes a dtype, too: row numbers stay integers."""
    if isinstance(device, (torch.dtype, Tensor)):
        raise TypeError(sentence(op, "device", "be a device", kind(device)))
    return device


def _has_data(tensor: Tensor) -> bool:
    """Whether entries can be read: not in a graph that is being traced, nor of meta and fake tensors."""
    return tensor.device.type != "meta" and not _is_traced(tensor)


def _in_graph() -> bool:
    """Whether a graph is being made, for other numbers than those at hand."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _is_traced(tensor: Tensor) -> bool:
    """Whether a tensor stands for others in a graph, which it must not outlive."""
    if _in_graph():
        return True
    if type(tensor) is Tensor:
        return False
    return any(cls.__name__ in ("FakeTensor", "FunctionalTensor") for cls in type(tensor).__mro__)


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func, at whose end it is gone."""
    return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _known(condition: Any) -> bool:
    """Whether something holds; False where only the data of a graph can tell."""
    if torch.compiler.is_compiling():
        return torch.fx.experimental.symbolic_shapes.guard_or_false(condition)
    return condition


def _is_number(value: Any) -> bool:
    """Whether a number is known: one that a graph is given, or finds in data, is not while the graph is made."""
    return not torch.compiler.is_compiling() or torch.fx.experimental.symbolic_shapes.has_static_value(value)


def _is_distributed(value: object) -> bool:
    """Whether it is a DTensor. There is none before somebody has imported what defines them, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _index_tensor(op: str, argument: str, given: Any) -> Tensor:
    """A tensor of row or segment numbers, that of an array on its memory."""
    tensor, convert = given, ".long()"
    if isinstance(given, np.ndarray):
        tensor, convert = _numpy.as_tensor(op, argument, given), ".astype(numpy.int64)"
    if not isinstance(tensor, Tensor):
        raise _numpy.no_tensor(op, argument, tensor)
    if type(tensor) is not Tensor and _is_distributed(tensor):
        raise TypeError(sentence(op, argument, "be a plain tensor, the same on every rank", "DTensor", "pass its full_tensor()"))
    if tensor.dtype not in _INDEX_DTYPES:
        remedy = f"convert it with {convert}" if not tensor.is_complex() else ""
        raise TypeError(sentence(op, argument, "be int32 or int64", dtype_name(tensor.dtype), remedy))
    if _has_data(tensor) and torch._C._are_functorch_transforms_active() and _transforms.is_batched(tensor):
        _transforms.refuse_batch(op, argument)
    if tensor.dim() != 1:
        raise ValueError(sentence(op, argument, "have 1 dimension", tensor.dim()))
    return tensor


def _integer(op: str, argument: str, value: Any) -> int:
    """An int from what stands for one: an int, a NumPy integer, an integer tensor without dimensions."""
    if type(value) is int or isinstance(value, torch.SymInt):  # a size of a graph passes as an int where Dynamo looks
        return value  # type: ignore[return-value]
    acceptable = not isinstance(value, bool)
    if isinstance(value, Tensor):
        acceptable = value.dim() == 0 and value.dtype != torch.bool
    try:
        if acceptable:
            return operator.index(value)
    except TypeError:
        pass
    observed = f"{dtype_name(value.dtype)} of {value.dim()} dimensions" if isinstance(value, Tensor) else kind(value)
    raise TypeError(sentence(op, argument, "be an integer", observed))


def _raise_bad_index(
    op: str, given: Tensor, index: Tensor, least: int, limit: int, num_segments: Optional[int]
) -> None:
    wrong = index < least
    if num_segments is not None:
        wrong |= index >= num_segments
    at = int(wrong.nonzero()[0])
    value = int(given[at])
    remedy = ""
    if value == -1 and least == 0:
        remedy = "pass ignore_index=-1 to leave such rows out"
    elif num_segments is not None and value >= num_segments:
        remedy = f"num_segments must be at least {int(index.max()) + 1} for this index"
    raise ValueError(sentence(op, "index", f"be in [0, {max(limit, 0)})", f"{value} at position {at}", remedy))


def _check_offsets_fit(op: str, num_segments: int, index: Tensor) -> None:
    """Refuses what cannot be allocated, before the system hands out memory that it does not have and kills the process."""
    if not isinstance(num_segments, int) or not _known(num_segments >= 2**27):
        return
    needed = (num_segments + 1) * index.element_size()
    there_is = 2**42
    if index.is_cuda and _has_data(index):
        _, there_is = torch.cuda.mem_get_info(index.device)
    elif index.is_cpu:
        try:
            there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            with open("/proc/meminfo") as lines:  # counts what the system would drop to make room
                there_is = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        except (AttributeError, OSError, StopIteration, ValueError):
            pass  # another system: the allocator has the last word
    if needed > there_is:
        observed = f"{num_segments}, whose offsets take {needed / 2**30:.1f} of {there_is / 2**30:.1f} GiB"
        raise MemoryError(sentence(op, "num_segments", "fit in memory", observed))


def _offsets_of(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=dtype), (1, 0))


# ---- pytree ----


class _Context:
    """What a Segments is beside its tensors. The number of rows is carried along but is no part of the structure, so that a program
    exported for one number of rows takes others."""

    __slots__ = ("in_order", "num_rows")

    def __init__(self, in_order: bool, num_rows: Optional[int]) -> None:
        self.in_order = in_order
        self.num_rows = num_rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.in_order == other.in_order

    def __hash__(self) -> int:
        return hash(self.in_order)

    def __repr__(self) -> str:
        return f"in_order={self.in_order}"


def _flatten(segments: Segments) -> tuple[list[Any], _Context]:
    offsets, order, index = segments._parts[0], segments.order, segments._parts[2]
    context = _Context(order is None, segments._num_rows)
    return [offsets] if order is None else [offsets, order, index], context


def _flatten_with_keys(segments: Segments) -> tuple[list[Any], _Context]:
    leaves, context = _flatten(segments)
    names = ("offsets", "order", "index")
    return [(torch.utils._pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves)], context


def _unflatten(leaves: Any, context: _Context) -> Segments:
    offsets, order, index = (*leaves, None, None) if context.in_order else leaves
    num_rows = context.num_rows
    if not isinstance(offsets, Tensor) or not _has_data(offsets):
        num_rows = None  # a traced program takes it from the tensors that it is given
    return _new(offsets, order, index, num_rows)


torch.utils._pytree.register_pytree_node(
    Segments,
    _flatten,
    _unflatten,
    serialized_type_name="fastops.Segments",
    to_dumpable_context=lambda context: json.dumps([context.in_order, context.num_rows]),
    from_dumpable_context=lambda text: _Context(*json.loads(text)),
    flatten_with_keys_fn=_flatten_with_keys,
)
# torch.load(weights_only=True), its default, takes Segments too.
torch.serialization.add_safe_globals([Segments, _rebuild])
