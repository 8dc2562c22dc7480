"""Operations on rows that stay in host memory: they come to the device in chunks of whole segments.

Bytes are counted before anything runs: those of the rows of a chunk and of their results, on the way there and back. On CUDA
two chunks are on their way, each with its stream and its page-locked buffer:

    chunk 0   | gather | copy there | kernel | copy back | store |
    chunk 1            | gather     | copy there | kernel        | copy back | store |
    chunk 2                                                 | gather | ...      in the buffer of chunk 0

A stream does its copies and its kernel one after the other, so one event says when a buffer is free again. The CPU takes one
chunk at a time, where it stands unless it has to be gathered.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Generator, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from . import _numpy
from ._dispatch import check
from .errors import DeviceMismatchError, kind, sentence
from .segments import Segments, _check_offsets, _integer, _new

if TYPE_CHECKING:
    from .registry import Op

__all__ = ["offload"]

_OFFLOAD = "offload"


# Bytes of a chunk unless it is said. Guess: copies of a few MB and more run at full speed, and so much is nothing to a computer.
MAX_BYTES = 256 * 2**20
# And no more than this part of the memory that is free on a CUDA device: two chunks, a workspace, and as much left alone.
FREE_SHARE = 8
# Bytes that sorting on CUDA works with, for each element (csrc/cuda/sort.cu).
SORT_BYTES = 24
# What selecting on the CPU works with (csrc/cpu/select.cpp): a thread makes keys, of so many bytes at least, of so many bytes
# of each row of a segment.
KEY_BYTES = 4
TILE_BYTES = 64
SELECTIONS = ("segment_topk", "segment_median", "segment_quantile")
# And sorting without sorted rows as a result (csrc/cpu/sort.cpp): elements of so many bytes, twice as many for data of 8 bytes, of
# so many columns at once and one more.
ELEMENT_BYTES = 8
SORT_COLUMNS = 16
COUNTS = ("segment_nunique", "segment_mode")
# Tensors start at multiples of so many bytes in a buffer.
ALIGNMENT = 16
# Seconds after which a bar appears.
PATIENCE = 1.0


def offload(
    op: Union[str, Callable[..., Any]],
    data: Any,
    segments: Union[Segments, Tensor],
    *,
    device: Any,
    max_bytes: Optional[int] = None,
    progress: bool = True,
    **kwargs: Any,
) -> Any:
    """The result of an operation on rows that are too many for the device, or for memory.

    Equivalent to:
        >>> op(data.to(device), segments.to(device), **kwargs).cpu()   # doctest: +SKIP

    bit for bit, but for the sums of segments that have to be cut, see below. Data and result stay in host memory, and chunks
    of whole segments travel, so that copies and kernels overlap.

    Args:
        op: any operation of this package: `segment_sum`, its name, or a `functools.partial` of it.
        data: what the operation takes, in host memory: a tensor, a NumPy array, or a `numpy.memmap` of a file that may be larger
            than memory.
        segments: `S` segments, or offsets `[S + 1]`, on the CPU. Rows may stand in any order: those of a chunk are gathered
            in host memory, and what has the rows of `data` is put back in their places. Of a file they are read at random.
        device: where the kernels run, a CUDA device or `"cpu"`. The latter bounds the memory that is needed beside data and
            result, which is then all that this is for.
        max_bytes: bytes of a chunk: its rows, its results, and what a sort on CUDA, a selection on the CPU and parts of a segment
            need to work with. At most 2.5 times as many are allocated beside data and result, in host memory and on the device.
            On CUDA it is rounded down to a power of two, as page-locked memory comes in such (torch keeps it, for the next
            call). None for 256 MiB, on CUDA for an eighth of the free memory if that is less.
        progress: whether to show a bar on stderr if it takes longer than a second.
        kwargs: what the operation takes beside, `dim` included. `weight` of sum and mean travels with its rows; it may be
            an array, too.

    Returns:
        What the operation returns, new tensors on the CPU: nothing is written anywhere else, so that a run that is interrupted
        leaves nothing behind. What has the rows of `data` takes as much memory as they do; what has one entry for each
        segment takes little, however many rows there are.

    Rules:
        A segment that is larger than `max_bytes` is cut where results of its parts can be joined: for sum and mean (not with
        `weight`), amin, amax, min, max, any, all and logsumexp. Extrema, truth and whole numbers are the same then; the rest is
        rounded in other places, in float64 and once from there. Other operations refuse it before anything runs. On CUDA the call
        itself may round a sum otherwise where its data does not start at a multiple of 16 bytes; that of a new tensor does.
        There is no gradient: data that requires one is refused unless `torch.no_grad()` is on.

    Raises:
        TypeError, ValueError, IndexError: as the operation; also for a segment that is too large.
        DeviceMismatchError: data, weight or segments are not in host memory.
        RuntimeError: there is no such device, or a gradient is asked for.

    Example:
        >>> data = np.array([3., 1., 4., 1., 5., 9., 2.], dtype=np.float32)
        >>> offload(segment_sum, data, torch.tensor([0, 3, 3, 7]), device="cpu")
        tensor([ 8.,  0., 17.])
        >>> offload("segment_max", data, torch.tensor([0, 3, 3, 7]), device="cpu", max_bytes=128).indices
        tensor([ 2, -1,  5])
    """
    device = _there(find_device(_OFFLOAD, device, ("cpu", "cuda"), "be the CPU or a CUDA device"))
    call = _Call(op, data, segments, kwargs)
    budget = _find_budget(max_bytes, device)
    chunks = call.plan(budget, device)
    through = _through_cuda(call, chunks, device) if device.type == "cuda" else _through_cpu(call, chunks)
    with torch.no_grad(), _bar(call, progress) as bar, closing(through):
        for chunk, results in through:
            call.store(chunk, results)
            del results  # before there are the next ones
            bar.update(chunk.num_rows)
    return call.result()


# ---- what is asked for ----


@dataclass(frozen=True)
class _Chunk:
    """Segments [first, last), whose rows are those at positions [begin, end): all of them, or a part of one segment."""

    first: int
    last: int
    begin: int
    end: int
    num_bytes: int
    is_part: bool = False
    is_last_part: bool = False

    @property
    def num_rows(self) -> int:
        return self.end - self.begin

    @property
    def num_segments(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class _Costs:
    """Bytes that a chunk has for itself, for each of its segments and for each of its rows."""

    fixed: int
    segment: int
    row: int

    def of(self, segments: int, rows: int) -> int:
        return self.fixed + segments * self.segment + rows * self.row


class _Call:
    """An operation, what it is called with, and its result as far as it is known."""

    def __init__(self, op: Any, data: Any, segments: Any, options: dict[str, Any]) -> None:
        self.op, self.function, options = _find_operation(op, options)
        name, first = self.op.name, "values" if self.op.takes_values else "data"
        data = _in_host_memory(name, first, data)
        self.segments, self.dim = check(name, data, segments, options.pop("dim", 0), first)
        self.offsets = self.segments.offsets.numpy()
        self.order = self.segments.order
        bad, num_positions = _check_offsets(self.segments.offsets).tolist()
        if bad >= 0 or num_positions != (self.segments.num_rows if self.order is None else self.order.numel()):
            raise ValueError(sentence(name, "offsets", "ascend from 0 to the number of rows", "others that were not checked"))

        weight = options.pop("weight", None)
        self.weight = None if weight is None else _in_host_memory(name, "weight", weight)
        self.data = data.detach()
        self.options = {key: _in_host_memory(name, key, value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
        self.expected = self._ask()
        self.joined: Optional[tuple[Any, ...]] = None  # of the parts of a segment so far: rows and results

    def _ask(self) -> list[Tensor]:
        """What the results will be. The operation itself says so, and what is wrong with its arguments, when it is asked on
        the device that has no data."""
        weight = None if self.weight is None else self.weight.to("meta")
        meta = self.run(self.data.to("meta"), self.segments.to("meta"), weight, self.options_on("meta"))
        self.options.pop("num_rows", None)  # those of all chunks
        self.kind = type(meta)
        results = list(meta) if isinstance(meta, tuple) else [meta]
        self.result_dim = self.dim + results[0].dim() - self.data.dim() - len(self.op.behind)  # behind that of several quantiles
        return results

    @functools.cached_property
    def totals(self) -> list[Tensor]:
        """The results, at first without what is in them."""
        totals = [torch.empty(result.shape, dtype=result.dtype, device="cpu") for result in self.expected]
        if not self._by_segment and not self.op.grouped and self.order is not None and self.order.numel() < self.segments.num_rows:
            for number, total in enumerate(totals):  # rows of no segment
                total.fill_(-1 if number == self.op.row_numbers else 0)
        return totals

    @property
    def _by_segment(self) -> bool:
        """Whether the result has an entry for each segment, not for each row."""
        return not self.op.per_row and not self.op.takes_values

    def options_on(self, device: Any) -> dict[str, Any]:
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.options.items()}

    def run(self, data: Tensor, segments: Segments, weight: Optional[Tensor], options: dict[str, Any]) -> Any:
        weighted = {} if weight is None else {"weight": weight}
        return self.function(data, segments, dim=self.dim, **options, **weighted)

    # ---- chunks ----

    def plan(self, budget: int, device: torch.device) -> list[_Chunk]:
        """All chunks, in order, each of at most `budget` bytes. Without segments there is one without rows: arguments are
        looked at there."""
        costs, of_parts = self._costs(device), self._costs(device, parts=True)
        cut = self.op.name in _JOIN and not (self.op.name == "segment_mean" and self.weight is not None)
        offsets, chunks, first, count = self.offsets, [], 0, self.segments.num_segments
        if count == 0:
            return [_Chunk(0, 0, 0, 0, costs.of(0, 0))]
        while first < count:
            begin = int(offsets[first])

            def cost(last: int) -> int:
                return costs.of(last - first, int(offsets[last]) - begin)

            last = bisect.bisect_right(range(count + 1), budget, lo=first + 1, key=cost) - 1
            if last > first:
                chunks.append(_Chunk(first, last, begin, int(offsets[last]), cost(last)))
                first = last
                continue
            end = int(offsets[first + 1])
            rows = (budget - of_parts.of(1, 0)) // max(of_parts.row, 1)
            if rows < 1 or not cut:
                self._refuse(first, end - begin, of_parts.of(1, 1) if cut else costs.of(1, end - begin), budget, device, cut)
            for at in range(begin, end, rows):
                chunks.append(_Chunk(first, first + 1, at, min(at + rows, end), of_parts.of(1, rows), True, at + rows >= end))
            first += 1
        return chunks

    def _refuse(self, segment: int, rows: int, needed: int, budget: int, device: torch.device, cut: bool) -> None:
        if device.type == "cuda":
            needed = _power_of_two(2 * needed - 1)
        what = "a row and a result" if cut else f"the rows and results of segment {segment}, which has {rows} rows"
        raise ValueError(sentence(self.op.name, "max_bytes", f"be at least {needed}, for {what}", budget))

    def _costs(self, device: torch.device, parts: bool = False) -> _Costs:
        of_row, of_segment = 0, self.segments.offsets.element_size()
        elements = _bytes_along(self.data, self.dim) // self.data.element_size()
        wide = torch.float64.itemsize if parts and self._widens else 0
        if self.op.takes_values:
            of_segment += _bytes_along(self.data, self.dim)
        else:
            of_row += _bytes_along(self.data, self.dim) + elements * wide
        if self.weight is not None:
            of_row += _bytes_along(self.weight, 0) + _bytes_along(self.weight, 0) // self.weight.element_size() * wide
        if self.weight is not None or self.options.get("dtype") is not None:
            of_row += elements * self.expected[0].element_size()  # rows are converted first
        if (self.op.grouped or self.op.name in COUNTS) and device.type == "cuda":
            of_row += elements * SORT_BYTES
        if self.op.name in SELECTIONS and device.type == "cpu":
            size = self.data.element_size()
            of_row += min(elements, TILE_BYTES // size * torch.get_num_threads()) * max(size, KEY_BYTES)
        if self.op.name in COUNTS and device.type == "cpu":
            columns = min(elements + 1, (SORT_COLUMNS + 1) * torch.get_num_threads())
            of_row += columns * ELEMENT_BYTES * (2 if self.data.element_size() == 8 else 1)
        for number, total in enumerate(self.expected):
            count = _bytes_along(total, self.result_dim) // total.element_size()
            if self._by_segment:
                of_segment += count * max(total.element_size(), wide)
            else:
                of_row += count * total.element_size()
            if number == self.op.row_numbers:  # those of `data` are worked out beside those of a chunk
                of_segment += count * 8 * self._by_segment
                of_row += count * 8 * (not self._by_segment)
        tensors = 2 + (self.weight is not None) + len(self.expected)
        return _Costs(self.segments.offsets.element_size() + tensors * ALIGNMENT, of_segment, of_row)

    def bring(self, chunk: _Chunk, buffer: Optional[_Buffer]) -> list[Tensor]:
        """Offsets, data, and weight where there is one: in the buffer, or without one where they stand."""
        offsets = self.segments.offsets[chunk.first : chunk.last + 1].clamp(chunk.begin, chunk.end)
        offsets -= chunk.begin
        brought = [_bring(buffer, offsets, 0, 0, offsets.size(0), None)]
        if self.op.takes_values:
            brought.append(_bring(buffer, self.data, self.dim, chunk.first, chunk.num_segments, None))
        else:
            brought.append(_bring(buffer, self.data, self.dim, chunk.begin, chunk.num_rows, self.order))
        if self.weight is not None:
            brought.append(_bring(buffer, self.weight, 0, chunk.begin, chunk.num_rows, self.order))
        return brought

    def results_of(self, chunk: _Chunk, inputs: list[Tensor], options: dict[str, Any]) -> tuple[Any, ...]:
        offsets, data = inputs[:2]
        weight = inputs[2] if len(inputs) > 2 else None
        if chunk.is_part and self._widens:
            data, weight, options = self._widen(data, weight, options)
        results = self.run(data, _new(offsets, None, None, chunk.num_rows), weight, options)
        return results if isinstance(results, tuple) else (results,)

    @property
    def _widens(self) -> bool:
        """Whether parts are taken in a wider dtype than that of the result, to be rounded when all are joined."""
        return self.op.name in _WIDE and self.expected[0].dtype in (torch.float16, torch.bfloat16, torch.float32)

    def _widen(self, data: Tensor, weight: Optional[Tensor], options: dict[str, Any]) -> tuple[Any, ...]:
        """What a part is called with. Its rows become what the operation makes of them first, and only then float64."""
        data, weight = data.to(self.expected[0].dtype).double(), None if weight is None else weight.float()
        return data, weight, {name: value for name, value in options.items() if name != "dtype"}

    # ---- results ----

    def store(self, chunk: _Chunk, results: list[Tensor]) -> None:
        """Puts the results of a chunk, which may be overwritten, where they belong."""
        if self.op.row_numbers is not None:
            self._count_from_the_first_row(chunk, results[self.op.row_numbers])
        if chunk.is_part:
            part = chunk.num_rows, [result.clone() for result in results]
            self.joined = part if self.joined is None else _join(self, self.joined, part)
            if not chunk.is_last_part:
                return
            (_, results), self.joined = self.joined, None
        for total, result in zip(self.totals, results):
            if self._by_segment:
                total.narrow(self.result_dim, chunk.first, chunk.num_segments).copy_(result)
            elif self.op.grouped or self.order is None:
                total.narrow(self.dim, chunk.begin, chunk.num_rows).copy_(result)
            else:
                total.index_copy_(self.dim, self.order[chunk.begin : chunk.end].long(), result)

    def _count_from_the_first_row(self, chunk: _Chunk, numbers: Tensor) -> None:
        """Turns row numbers of a chunk, which count from its first row, into those of the data."""
        array = numbers.numpy()
        if chunk.num_rows > 0:
            if self.order is None:
                np.add(array, chunk.begin, out=array, where=array >= 0)
            else:
                rows = self.order[chunk.begin : chunk.end].numpy()
                np.copyto(array, np.take(rows, array, mode="clip"), where=array >= 0)
        fill = self.options.get("fill_value", -1)
        if self.op.row_numbers == 0 and fill >= 0 and self._by_segment:  # it only looks like one
            empty = np.flatnonzero(np.diff(self.offsets[chunk.first : chunk.last + 1]) == 0)
            numbers.index_fill_(self.result_dim, torch.from_numpy(empty), fill)

    def result(self) -> Any:
        return self.kind(self.totals) if issubclass(self.kind, tuple) else self.totals[0]


def _find_operation(op: Any, options: dict[str, Any]) -> tuple[Op, Callable[..., Any], dict[str, Any]]:
    """The row of the operation, its function, and all that it is called with by name."""
    from . import registry

    bound: dict[str, Any] = {}
    if isinstance(op, registry.Op):
        op = op.fn
    if isinstance(op, functools.partial):
        if op.args:
            raise TypeError(sentence(_OFFLOAD, "op", "be a partial of named arguments only", f"{len(op.args)} without a name"))
        op, bound = op.func, op.keywords
    for row in registry.OPS:
        function = getattr(row.fn, "func", row.fn)
        if op is function or (isinstance(op, str) and op == row.name):
            return row, function, {**bound, **options}
    raise (ValueError if isinstance(op, str) else TypeError)(
        sentence(_OFFLOAD, "op", "be an operation of fastops, its name, or a partial of it", _described(op))
    )


def _described(op: Any) -> str:
    """What was given for an operation, and where it comes from: other modules have a `segment_sum`, too."""
    if isinstance(op, str):
        return repr(op)
    name = getattr(op, "__qualname__", None)
    return kind(op) if name is None else ".".join(filter(None, (getattr(op, "__module__", None), name)))


def _in_host_memory(op: str, argument: str, data: Any) -> Tensor:
    """A tensor of what is a tensor or an array, without a copy."""
    if isinstance(data, np.ndarray):
        _numpy.check_no_mask(op, argument, data)
        try:
            return _numpy.share(data)
        except (TypeError, ValueError) as error:  # dtypes that torch lacks, negative strides
            observed = f"one of {data.dtype}: {error}"
            raise type(error)(sentence(op, argument, "be an array that torch can read", observed)) from None
    if not isinstance(data, Tensor):
        raise _numpy.no_tensor(op, argument, data)
    if not data.is_cpu:
        remedy = "call the operation itself where it is"
        raise DeviceMismatchError(sentence(op, argument, "be in host memory", data.device, remedy))
    if data.requires_grad and torch.is_grad_enabled():
        remedy = "pass .detach() of it, or call under torch.no_grad()"
        raise RuntimeError(sentence(op, argument, "need no gradient to be offloaded", "a tensor that requires one", remedy))
    return data


def find_device(op: str, device: Any, types: tuple[Any, ...], requirement: str, remedy: str = "") -> torch.device:
    """The device that is meant, of one of these types; whether it is there is not asked."""
    try:
        found = torch.device(device)
    except TypeError:
        raise TypeError(sentence(op, "device", requirement, kind(device), remedy)) from None
    except (RuntimeError, OverflowError):  # no such type, or number
        raise ValueError(sentence(op, "device", requirement, repr(device), remedy)) from None
    if found.type not in types:
        raise ValueError(sentence(op, "device", requirement, found, remedy))
    return found


def _there(device: torch.device) -> torch.device:
    """The device, with its number."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(sentence(_OFFLOAD, "device", "be there", f"{device}, and torch sees no CUDA device"))
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def _find_budget(max_bytes: Optional[int], device: torch.device) -> int:
    if max_bytes is None:
        budget = MAX_BYTES
        if device.type == "cuda":
            budget = min(budget, torch.cuda.mem_get_info(device)[0] // FREE_SHARE)
    else:
        budget = _integer(_OFFLOAD, "max_bytes", max_bytes)
        if budget < 1:
            raise ValueError(sentence(_OFFLOAD, "max_bytes", "be at least 1", budget))
    return _power_of_two(budget) if device.type == "cuda" else budget


def _power_of_two(number: int) -> int:
    """The greatest one that is not above the number."""
    return 1 << (number.bit_length() - 1)


def _bytes_along(tensor: Tensor, dim: int) -> int:
    """Bytes of all that has one number along dim."""
    return math.prod(tensor.shape[:dim]) * math.prod(tensor.shape[dim + 1 :]) * tensor.element_size()


def _bar(call: _Call, progress: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    total = int(call.offsets[-1])
    return tqdm(total=total, desc=call.op.name, unit=" rows", unit_scale=True, delay=PATIENCE, disable=not progress)


# ---- parts of a segment that is too large ----


def _join(call: _Call, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows and results of two parts, of which the second has the later rows."""
    (rows, results), (more, others) = one, other
    pairs = [torch.cat(pair, call.dim) for pair in zip(results, others)]
    return rows + more, _JOIN[call.op.name](call, pairs, rows / (rows + more))


def _pair() -> Tensor:
    """The offsets of two rows that are one segment."""
    return torch.tensor([0, 2], device="cpu")


def _join_by_itself(call: _Call, pairs: list[Tensor], share: float) -> list[Tensor]:
    return [call.function(pairs[0], _pair(), dim=call.dim)]


def _join_totals(call: _Call, pairs: list[Tensor], share: float) -> list[Tensor]:
    return [pairs[0].sum(call.dim, keepdim=True)]


def _join_means(call: _Call, pairs: list[Tensor], share: float) -> list[Tensor]:
    one, other = pairs[0].split(1, call.dim)
    return [share * one + (1 - share) * other]


def _join_logarithms(call: _Call, pairs: list[Tensor], share: float) -> list[Tensor]:
    return [torch.logaddexp(*pairs[0].split(1, call.dim))]


def _join_with_rows(call: _Call, pairs: list[Tensor], share: float) -> list[Tensor]:
    best, at = call.function(pairs[0], _pair(), dim=call.dim)
    return [best, pairs[1].gather(call.dim, at)]


_JOIN: dict[str, Callable[[_Call, list[Tensor], float], list[Tensor]]] = {
    "segment_sum": _join_totals,
    "segment_mean": _join_means,
    "segment_amin": _join_by_itself,
    "segment_amax": _join_by_itself,
    "segment_min": _join_with_rows,
    "segment_max": _join_with_rows,
    "segment_any": _join_by_itself,
    "segment_all": _join_by_itself,
    "segment_logsumexp": _join_logarithms,
}
_WIDE = ("segment_sum", "segment_mean", "segment_logsumexp")  # floating results of parts come in float64


# ---- the ways to the device and back ----


class _Buffer:
    """Memory for what a chunk consists of, used again by the next one."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        self.used = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = begin + math.prod(shape) * dtype.itemsize
        return self.memory[begin : self.used].view(dtype).view(shape)


def _bring(buffer: Optional[_Buffer], tensor: Tensor, dim: int, begin: int, count: int, order: Optional[Tensor]) -> Tensor:
    """`count` rows along dim from position `begin` on. What CUDA can read where it stands is left there."""
    if order is None:
        rows = tensor.narrow(dim, begin, count)
        if buffer is None or (rows.is_contiguous() and rows.is_pinned()):
            return rows
        return buffer.allocate(rows.shape, rows.dtype).copy_(rows)
    assert buffer is not None
    out = buffer.allocate((*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]), tensor.dtype)
    return torch.index_select(tensor, dim, order[begin : begin + count], out=out)


def _through_cpu(call: _Call, chunks: list[_Chunk]) -> Generator[tuple[Any, ...], None, None]:
    buffer = None if call.order is None else _Buffer(_largest(chunks), pinned=False)
    for chunk in chunks:
        if buffer is not None:
            buffer.used = 0
        yield chunk, call.results_of(chunk, call.bring(chunk, buffer), call.options)


def _through_cuda(call: _Call, chunks: list[_Chunk], device: torch.device) -> Generator[tuple[Any, ...], None, None]:
    """(chunk, results) of each chunk, in order. The results are in a buffer, until the next ones are asked for."""
    options = call.options_on(device)
    ways = [_Way(device, _largest(chunks)) for _ in chunks[:2]]
    busy: deque[_Way] = deque()
    try:
        for number, chunk in enumerate(chunks):
            if len(busy) == len(ways):
                yield busy.popleft().finish()
            way = ways[number % 2]
            way.start(call, chunk, options)
            busy.append(way)
        while busy:
            yield busy.popleft().finish()
    finally:
        for way in ways:  # nobody writes to a buffer that is gone
            way.stream.synchronize()


def _largest(chunks: list[_Chunk]) -> int:
    return max((chunk.num_bytes for chunk in chunks), default=0)


class _Way:
    """A stream, and the page-locked buffer for what goes to the device and back on it."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # on which options were copied
        self.done = torch.cuda.Event()
        with torch.cuda.device(device):
            self.buffer = _Buffer(num_bytes, pinned=True)

    def start(self, call: _Call, chunk: _Chunk, options: dict[str, Any]) -> None:
        self.chunk, self.buffer.used = chunk, 0
        here = call.bring(chunk, self.buffer)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            there = [tensor.to(self.device, non_blocking=True) for tensor in here]
            results = call.results_of(chunk, there, options)
            self.back = [self.buffer.allocate(result.shape, result.dtype) for result in results]
            for back, result in zip(self.back, results):
                back.copy_(result, non_blocking=True)
            self.done.record(self.stream)

    def finish(self) -> tuple[Any, ...]:
        self.done.synchronize()
        return self.chunk, self.back
