"""Operations on `torch.distributed.tensor.DTensor`: the data lies on the ranks of a mesh, and each of them knows the grouping.

Every rank calls the public function on what it has, and the results become one DTensor. docs/distributed.md has the table; for
each dimension of the mesh:

- Replicated data: every rank computes the same.
- Sharded along another dimension than that of the rows: every rank computes its share, and the result is sharded alike.
- Rows sharded: they stay where they are if no segment has rows on two ranks, or if what is asked for is a sum, or any
  or all. Results of rows are sharded as the rows. Those of segments are `Partial("sum")`: a rank adds 0 for segments that it
  has no rows of, which is exact. Otherwise the rows are gathered first.
- Partial data is added up first, but for what is linear.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import fastops

from . import _transforms, registry
from ._dispatch import check, promoted
from ._weighted import prepare
from .errors import sentence
from .segments import Segments, _has_data, _is_distributed, _new

_SUMS = ("segment_sum", "segment_mean")
_LINEAR = (*_SUMS, "segment_first", "segment_last")

# How results for one segment from several ranks become one, and what a rank gives that has no rows of it.
_ADDED = (Partial("sum"), 0)
_JOINED = {"segment_any": (Partial("max"), 0), "segment_all": (Partial("min"), 1)}

_SENT_AS = {torch.bool: torch.int32, torch.int16: torch.int32}  # not every backend reduces these


def answer(op: str, data: DTensor, segments: Any, *, dim: Any, **options: Any) -> Any:
    """What the function `op` gives for distributed data: a DTensor, or the named tuple of several."""
    row = registry.find(op)
    argument = "values" if row.takes_values else "data"
    weight, result = options.get("weight"), None
    if weight is None:
        segments, dim = check(op, data, segments, dim, argument)
    else:
        segments, dim, result = prepare(op, data, weight, segments, dim, options["dtype"], options["fill_value"])
    if _is_distributed(options.get("q")):
        raise TypeError(sentence(op, "q", "be a number or a plain tensor", "DTensor", "pass q.full_tensor()"))
    if data.device_mesh.get_coordinate() is None:
        raise ValueError(sentence(op, argument, "lie on a mesh that this rank is part of", data.device_mesh))

    call = _Call(row, data, segments, dim, options)
    if call.is_cut and op in _SUMS:
        result = result or options.get("dtype") or promoted(data.dtype)
        if result in (torch.float16, torch.bfloat16):
            return call.run({**options, "dtype": torch.float32}, rounded_to=result)
    return call.run(options)


class _Rows(NamedTuple):
    """Which rows a rank has."""

    first: int
    segments: Segments  # all of them, with the rows that are here
    is_cut: bool  # whether some segment has rows on several ranks


class _Call:
    """An operation whose data has been brought to where it is worked on."""

    def __init__(self, op: registry.Op, data: DTensor, segments: Segments, dim: int, options: dict[str, Any]) -> None:
        self.op, self.segments, self.dim = op, segments, dim
        self.mesh = data.device_mesh
        is_linear = (
            op.name in _LINEAR
            and data.dtype in (torch.float32, torch.float64)
            and options.get("weight") is None
            and options.get("dtype") is None
        )
        placements = [
            p if type(p) is Shard or (is_linear and p == Partial("sum")) else Replicate() for p in data.placements
        ]
        self.rows: Optional[_Rows] = None  # None where the rank has all
        if Shard(dim) in placements:
            if not op.takes_values:
                self.rows = _rows_here(op.name, data, segments, dim, placements)
            if not self.stay_in_place(options):
                self.rows = None
                placements = [Replicate() if p == Shard(dim) else p for p in placements]
        self.is_cut = self.rows is not None and self.rows.is_cut
        self.data = data if data.placements == tuple(placements) else data.redistribute(placements=placements)

    def stay_in_place(self, options: dict[str, Any]) -> bool:
        """Whether rows are worked on where they are."""
        if self.rows is None:
            return False
        if not self.rows.is_cut:
            return not self.op.grouped or self.segments.order is None  # sorted rows of another order lie elsewhere
        if self.op.name in _JOINED:
            return True
        return self.op.name == "segment_sum" or (self.op.name == "segment_mean" and options.get("weight") is None)

    def run(self, options: dict[str, Any], rounded_to: Optional[torch.dtype] = None) -> Any:
        if options.get("weight") is not None:
            options = {**options, "weight": self.weight_here(options["weight"])}
        here = self.segments if self.rows is None else self.rows.segments
        results = getattr(fastops, self.op.name)(_here(self.data), here, dim=self.dim, **options)
        # Quantiles of several shares have a dimension of those in front.
        front = int(isinstance(options.get("q"), Tensor) and options["q"].dim() == 1)
        if not isinstance(results, tuple):
            return self.joined(results, front, self.op.row_numbers == 0, rounded_to)
        number = self.op.row_numbers
        return type(results)([self.joined(result, front, n == number) for n, result in enumerate(results)])

    def weight_here(self, weight: Any) -> Tensor:
        """The weight of what this rank has of the data. A plain one is the same on every rank."""
        if not isinstance(weight, DTensor):
            everywhere = [Replicate()] * self.mesh.ndim
            weight = _Whole.apply(weight, self.mesh, everywhere, weight.shape, everywhere)
        elif weight.device_mesh != self.mesh:
            raise ValueError(
                sentence(self.op.name, "weight", "lie on the mesh of data", weight.device_mesh, "pass weight.full_tensor()")
            )
        placements: list[Placement] = []
        gradients: list[Placement] = []
        for p in self.data.placements:
            along = p.dim - self.dim if type(p) is Shard else -1
            if 0 <= along < weight.dim() and weight.shape[along] == self.data.shape[self.dim + along]:
                placements.append(Shard(along))
                gradients.append(Shard(along))
            else:  # features of several ranks have it in common, and each gives it a part of its gradient
                placements.append(Replicate())
                gradients.append(Partial("sum") if type(p) is Shard else Replicate())
        return _Here.apply(weight.redistribute(placements=placements), gradients)

    def joined(
        self, result: Tensor, front: int, has_row_numbers: bool, rounded_to: Optional[torch.dtype] = None
    ) -> DTensor:
        """One of the results of all ranks, from that of this one. `front` dimensions stand before those of the data."""
        partial, nothing = _JOINED.get(self.op.name, _ADDED)
        placements: list[Placement] = []
        shape = list(result.shape)
        for p in self.data.placements:
            if type(p) is Shard and (p.dim != self.dim or self.op.per_row):
                along = p.dim + front + (len(self.op.behind) if p.dim > self.dim else 0)
                shape[along] = self.data.shape[p.dim]
                placements.append(Shard(along))
            else:
                placements.append(partial if type(p) is Shard else p)

        if self.rows is not None and has_row_numbers:
            result = torch.where(result >= 0, result + self.rows.first, result)
        if not any(p.is_partial() for p in placements):
            return _Whole.apply(result, self.mesh, placements, shape, placements)
        dtype = rounded_to or result.dtype
        part = self.part(result.to(_SENT_AS.get(result.dtype, result.dtype)), placements, self.dim + front, nothing)
        # Ranks that have rows get of a gradient what belongs to those; if the data is partial, all of it.
        seconds = [Replicate() if p.is_partial() else of_result for p, of_result in zip(self.data.placements, placements)]
        whole = _Whole.apply(part, self.mesh, placements, shape, seconds)
        if dtype.is_floating_point and rounded_to is None:
            return whole
        return whole.redistribute(placements=_replicated(placements)).to(dtype)

    def part(self, result: Tensor, placements: Sequence[Placement], along: int, nothing: int) -> Tensor:
        """What this rank gives to the result: nothing for segments that it has no rows of. Those that nobody has rows of get
        their fill_value from the first."""
        lengths = self.segments.lengths
        here = lengths if self.rows is None else self.rows.segments.lengths
        gives = here > 0
        if all(n == 0 for n, p in zip(_place_in(self.mesh), placements) if p.is_partial()):
            gives |= lengths == 0
        if self.is_cut and self.op.name == "segment_mean":
            share = torch.where(lengths > 0, here.double() / lengths, 1)
            result = result * _along(share.to(result.dtype), result, along)
        return torch.where(_along(gives, result, along), result, nothing)


def _place_in(mesh: Any) -> Sequence[int]:
    """Where this rank stands, of which `answer` has seen that it stands somewhere."""
    place: Sequence[int] = mesh.get_coordinate()
    return place


def _along(values: Tensor, result: Tensor, dim: int) -> Tensor:
    return values.reshape(-1, *[1] * (result.dim() - dim - 1))


# Of segments that are used again: to find out whether one is cut waits for the device.
_known: WeakKeyDictionary[Segments, dict[tuple[Any, ...], _Rows]] = WeakKeyDictionary()


def _rows_here(op: str, data: DTensor, segments: Segments, dim: int, placements: Sequence[Placement]) -> _Rows:
    ranks = zip(data.device_mesh.shape, _place_in(data.device_mesh), placements)
    over = tuple((count, rank) for count, rank, p in ranks if p == Shard(dim))
    known = _known.setdefault(segments, {})
    if over not in known:
        bounds, place = _bounds(data.shape[dim], over)
        first, last = bounds[place], bounds[place + 1]
        with _transforms.outside_inference_mode():  # what is kept may be trained with, too
            known[over] = _Rows(first, _narrowed(segments, first, last), _cuts(segments, bounds))
    rows = known[over]
    count = data.to_local().shape[dim]
    if count != rows.segments.num_rows:
        requirement = f"have {rows.segments.num_rows} rows on this rank, as torch.chunk shares them out"
        raise ValueError(sentence(op, "data", requirement, count, "shard it with distribute_tensor"))
    return rows


def _bounds(num_rows: int, over: tuple[Any, ...]) -> tuple[list[int], int]:
    """Where the rows of each shard start, and where the last ends; which of the shards is here. The shards of a dimension of
    the mesh are sharded again by those behind it."""
    bounds, place = [0, num_rows], 0
    for count, rank in over:
        starts = []
        for start, end in zip(bounds, bounds[1:]):
            step = -(-(end - start) // count)
            starts += [min(start + number * step, end) for number in range(count)]
        bounds, place = [*starts, num_rows], place * count + rank
    return bounds, place


def _narrowed(segments: Segments, first: int, last: int) -> Segments:
    if segments.order is None:
        return _new(segments.offsets.clamp(first, last) - first, None, None, last - first)
    index = segments.index[first:last]
    return Segments.from_index(index, segments.num_segments, ignore_index=-1, check_invariants=False)


def _cuts(segments: Segments, bounds: list[int]) -> bool:
    """Whether a segment has rows on both sides of a bound."""
    offsets = segments.offsets
    if not _has_data(offsets):
        return True
    at = torch.tensor(bounds[1:-1], dtype=offsets.dtype, device=offsets.device)
    if segments.order is None:
        return bool((offsets[torch.searchsorted(offsets, at)] != at).any())
    numbers = torch.arange(segments.num_rows, dtype=offsets.dtype, device=offsets.device)
    rank = torch.bucketize(numbers, at, right=True, out_int32=True)
    return bool((fastops.segment_amin(rank, segments) != fastops.segment_amax(rank, segments)).any())


def _replicated(placements: Sequence[Placement]) -> list[Placement]:
    """With what is partial added up. So are gradients of what is partial: each part gets the whole."""
    return [Replicate() if p.is_partial() else p for p in placements]


def _here(data: DTensor) -> Tensor:
    return _Here.apply(data, _replicated(data.placements))


# DTensor.to_local and from_local, but that the derivatives of their derivatives know of the other ranks, too.


class _Here(torch.autograd.Function):
    """What this rank has of a DTensor. `gradients`: how those that the ranks have for it make up that of the whole."""

    @staticmethod
    def forward(ctx: Any, data: DTensor, gradients: Sequence[Placement]) -> Tensor:
        ctx.placements, ctx.gradients, ctx.mesh, ctx.shape = data.placements, gradients, data.device_mesh, data.shape
        local = data.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Whole.apply(grad, ctx.mesh, ctx.gradients, ctx.shape, ctx.placements), None


class _Whole(torch.autograd.Function):
    """The DTensor of what the ranks have. `gradients`: the same for the gradient of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: Any,
        placements: Sequence[Placement],
        shape: Sequence[int],
        gradients: Sequence[Placement],
    ) -> DTensor:
        ctx.placements, ctx.gradients = placements, gradients
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        stride = tuple(reversed(strides))
        return DTensor.from_local(
            local.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        grad = grad.redistribute(placements=_replicated(ctx.placements))
        return _Here.apply(grad, ctx.gradients), None, None, None, None
