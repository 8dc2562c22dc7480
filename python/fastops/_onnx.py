"""Operators in other words, for `torch.onnx.export`: those that standard ONNX operators exist for.

`torch.onnx.export(..., dynamo=True)` takes an operator that it has no translation of apart, by a function that `_exporter.py` tells
it of. Those below say with operators of ATen what an operator computes. There is no data-dependent control flow among them but
the loop of `_Rows.scan`, so that one model serves any number of rows and segments.

- Reductions are ScatterElements: ONNX Runtime goes through the rows one after the other, and sums are therefore taken in
  float64. (ScatterND, which its threads share, loses additions to one place.)
- Scans double: after step k of a Loop each row has combined 2**k rows. A CumSum over all rows, minus what it was where the
  segment starts, would let a NaN, an infinity or a large number of one segment into those behind it.
- Sorts are two TopK, which leaves rows that are equal in their order by definition. NaN, of which it says nothing, is a second key.

16 bits are computed in float32 and integers in int64: ONNX Runtime has few kernels for the narrower ones.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._dispatch import promoted
from .errors import sentence

Maybe = Optional[Tensor]

_HALF = (torch.float16, torch.bfloat16)


def segment_sum(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, dtype: Any = None, fill_value: Any = 0
) -> Tensor:
    dtype = dtype or promoted(data.dtype)
    call = _Rows(data.to(dtype), offsets, order, index, dim)
    if dtype == torch.bool:
        return call.finish(call.any(call.rows != 0), dtype, fill_value)
    return call.finish(call.sum(call.rows), dtype, fill_value)


def segment_mean(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, dtype: Any = None, fill_value: Any = 0
) -> Tensor:
    dtype = dtype or data.dtype
    call = _Rows(data.to(dtype), offsets, order, index, dim)
    lengths = call.per_row(call.lengths).clamp(min=1).double()
    mean = call.sum(call.rows) / lengths
    if dtype == torch.float64:
        # A sum that overflows, though the mean does not: rows are scaled by a power of two, which is exact, before they are added.
        scale = torch.exp2(-torch.ceil(torch.log2(lengths)))
        scaled = call.sum(call.rows * call.to_rows(scale)) / (lengths * scale)
        mean = torch.where(mean.isfinite(), mean, scaled)
    return call.finish(mean, dtype, fill_value)


def segment_prod(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, dtype: Any = None, fill_value: Any = 1
) -> Tensor:
    dtype = dtype or promoted(data.dtype)
    call = _Rows(data.to(dtype), offsets, order, index, dim)
    if dtype == torch.bool:
        return call.finish(~call.any(call.rows == 0), dtype, fill_value)
    if not dtype.is_floating_point:
        return call.finish(call.reduce(call.rows, "prod", 1), dtype, fill_value)
    product = call.reduce(call.rows.double(), "prod", 1)
    # 0 where an overflow met a zero; NaN only for an infinity or a NaN that stands in the data.
    product = product.masked_fill(call.any(call.rows == 0) & ~call.any(~call.rows.isfinite()), 0)
    return call.finish(product, dtype, fill_value)


def segment_amax(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Tensor:
    return _extremum(True, data, offsets, order, index, dim, fill_value)


def segment_amin(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Tensor:
    return _extremum(False, data, offsets, order, index, dim, fill_value)


def segment_max(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Any:
    return _extremum_and_row(True, data, offsets, order, index, dim, fill_value)


def segment_min(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Any:
    return _extremum_and_row(False, data, offsets, order, index, dim, fill_value)


def segment_argmax(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: int = -1) -> Tensor:
    return _extremal_row(True, data, offsets, order, index, dim, fill_value)


def segment_argmin(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: int = -1) -> Tensor:
    return _extremal_row(False, data, offsets, order, index, dim, fill_value)


def segment_any(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: bool = False) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(call.any(call.rows != 0), _truth_dtype(data), fill_value)


def segment_all(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: bool = True) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(~call.any(call.rows == 0), _truth_dtype(data), fill_value)


def segment_logsumexp(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = None) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    top = call.top()
    shift = top.masked_fill(top.isinf(), 0)
    total = call.sum((call.rows - call.to_rows(shift)).exp())
    return call.finish(shift + total.log(), data.dtype, -torch.inf if fill_value is None else fill_value)


def segment_var(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, correction: float = 1, fill_value: Any = 0
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(call.variance(correction), data.dtype, fill_value, correction)


def segment_std(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, correction: float = 1, fill_value: Any = 0
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(call.variance(correction).sqrt(), data.dtype, fill_value, correction)


def _segment_weighted_sum(
    data: Tensor, weight: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int, wide: bool, fill_value: Any
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    behind = data.dim() - call.dim - weight.dim()
    factors = weight.reshape(weight.shape[0], *[1] * call.dim, *weight.shape[1:], *[1] * behind)
    total = call.sum(call.rows * factors)
    return call.finish(total, torch.float32 if wide and data.dtype in _HALF else data.dtype, fill_value)


def segment_softmax(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    power = call.below_top().exp()
    total = call.sum(power).to(power.dtype)
    return call.of_segments(power / call.to_rows(total.masked_fill(total == 0, 1)), data.dtype)


def segment_log_softmax(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    below = call.below_top()
    total = call.sum(below.exp()).to(below.dtype)
    # All rows of a segment are -inf where the total is 0, and what is finite leaves them so.
    return call.of_segments(below - call.to_rows(total.masked_fill(total == 0, 1).log()), data.dtype)


def segment_cumsum(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    dim: int = 0,
    dtype: Any = None,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    dtype = dtype or promoted(data.dtype)
    call = _Rows(data.to(dtype), offsets, order, index, dim)
    (total,) = call.scan((call.grouped(),), (0,), lambda a, b: (a[0] + b[0],), exclusive, reverse)
    return call.give_back(total != 0 if dtype == torch.bool else total, dtype)


def segment_cumprod(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    dim: int = 0,
    dtype: Any = None,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    dtype = dtype or promoted(data.dtype)
    call = _Rows(data.to(dtype), offsets, order, index, dim)
    rows = call.grouped()
    if not dtype.is_floating_point:
        (product,) = call.scan((rows,), (1,), lambda a, b: (a[0] * b[0],), exclusive, reverse)
        return call.give_back(product != 0 if dtype == torch.bool else product, dtype)

    def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        return a[0] * b[0], torch.maximum(a[1], b[1]), torch.maximum(a[2], b[2])

    parts = (rows, (rows == 0).long(), (~rows.isfinite()).long())
    product, zero, wild = call.scan(parts, (1, 0, 0), combine, exclusive, reverse)
    # From a zero on the product is 0, whatever overflowed; an infinity or a NaN that stands in the data makes it NaN.
    return call.give_back(product.masked_fill(zero > wild, 0), dtype)


def segment_cummax(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    dim: int = 0,
    exclusive: bool = False,
    reverse: bool = False,
) -> Any:
    return _cumulative_extremum(True, data, offsets, order, index, dim, exclusive, reverse)


def segment_cummin(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    dim: int = 0,
    exclusive: bool = False,
    reverse: bool = False,
) -> Any:
    return _cumulative_extremum(False, data, offsets, order, index, dim, exclusive, reverse)


def segment_logcumsumexp(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    dim: int = 0,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)

    def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        top = torch.maximum(a[0], b[0])
        shift = top.masked_fill(top.isinf(), 0)
        return (shift + ((a[0] - shift).exp() + (b[0] - shift).exp()).log(),)

    (total,) = call.scan((call.grouped(),), (-torch.inf,), combine, exclusive, reverse)
    return call.give_back(total, data.dtype)


def segment_sort(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, descending: bool = False
) -> Any:
    call = _Rows(data, offsets, order, index, dim)
    place = call.ranked(descending)
    return call.put_back(call.grouped().gather(0, place), data.dtype), call.put_back(call.number_at(place))


def segment_argsort(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, descending: bool = False
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.put_back(call.number_at(call.ranked(descending)))


def segment_nunique(
    data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: int = 0
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    starts = call.starts_of_runs(call.ranked(False))
    return call.finish(call.reduce(starts.long(), "sum", 0, call.group), torch.int64, fill_value)


def segment_mode(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = None) -> Any:
    call = _Rows(data, offsets, order, index, dim)
    ranked = call.ranked(False)
    run = call.starts_of_runs(ranked).long().cumsum(0) - 1
    ones = torch.ones_like(run)
    length = torch.zeros_like(run).scatter_add(0, run, ones).gather(0, run)
    most = call.reduce(length, "amax", 0, call.group)
    # The first of the most frequent by value, and its first row, as equal ones are ranked by their numbers.
    place = call.per_row(torch.arange(run.size(0), device=data.device)).expand_as(run)
    place = place.masked_fill(length < most.index_select(0, call.group), run.size(0))
    place = call.reduce(place, "amin", run.size(0), call.group)
    row = call.number_at(_padded(ranked, ranked.size(0)).gather(0, place))
    return call.give_selected(row, _selection_fill(data, fill_value))


def segment_topk(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    k: Any,
    dim: int = 0,
    largest: bool = True,
    sorted: bool = True,
    fill_value: Any = 0,
) -> Any:
    call = _Rows(data, offsets, order, index, dim)
    row = call.row_of_rank(torch.arange(k, device=data.device).expand(call.num_segments, k), call.ranked(largest))
    if not sorted:  # in the order of the rows; what is lacking stays at the end
        row = row.masked_fill(row < 0, call.num_rows).sort(1).values
        row = row.masked_fill(row == call.num_rows, -1)
    values = call.values_at(row).masked_fill(row < 0, fill_value).to(data.dtype)
    return tuple(part.movedim((0, 1), (call.dim, call.dim + 1)).contiguous() for part in (values, row))


def segment_median(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = None) -> Any:
    call = _Rows(data, offsets, order, index, dim)
    rank = call.or_first_nan((call.lengths[:-1, None] - 1) // 2)
    median = call.values_at(call.row_of_rank(rank, call.ranked(False))[:, 0])
    return call.give_selected(call.first_row_with(_padded(median, 0)), _selection_fill(data, fill_value))


def segment_quantile(
    data: Tensor,
    offsets: Tensor,
    order: Maybe,
    index: Maybe,
    q: Tensor,
    dim: int = 0,
    interpolation: str = "linear",
    fill_value: Any = None,
) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    ranked = call.ranked(False)
    shares = q.double().reshape(1, -1)
    outside = ~((shares >= 0) & (shares <= 1))
    place = (call.lengths[:-1] - 1).clamp(min=0).double()[:, None] * shares.masked_fill(outside, 0)
    low, high = place.floor(), place.ceil()
    shares_of = {"linear": place - low, "midpoint": (high - low) / 2, "lower": low - low, "higher": high - low}
    share = shares_of.get(interpolation, place.round() - low)
    a, b = (call.values_at(call.row_of_rank(call.or_first_nan(rank.long()), ranked)) for rank in (low, high))
    share = call.with_features(share).to(a.dtype)
    gap = b - a
    near = torch.where(share < 0.5, a + share * gap, b - (1 - share) * gap)
    apart = torch.where(share == 0, a, torch.where(share == 1, b, (1 - share) * a + share * b))
    undefined = call.with_features((call.lengths[:-1, None] == 0) | outside)
    result = torch.where(gap.isfinite(), near, apart).masked_fill(undefined, torch.nan if fill_value is None else fill_value)
    result = result.to(data.dtype).movedim(1, 0)
    return (result[0].movedim(0, call.dim) if q.dim() == 0 else result.movedim(1, call.dim + 1)).contiguous()


def segment_first(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.end(call.offsets[:-1], fill_value)


def segment_last(data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int = 0, fill_value: Any = 0) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.end(call.offsets[1:] - 1, fill_value)


def segment_broadcast(
    values: Tensor, offsets: Tensor, order: Maybe, index: Maybe, num_rows: Any, dim: int = 0
) -> Tensor:
    dim = dim % values.dim()
    owner = _owners(offsets.long(), num_rows) if index is None else _valid(index.long(), values.size(dim))
    return _padded(values.movedim(dim, 0), 0).index_select(0, owner).movedim(0, dim).contiguous()


def _group_index(index: Tensor, num_segments: Any, sorted: bool) -> tuple[Tensor, Tensor]:
    owner = _valid(index.long(), num_segments)
    ends = owner.new_zeros(num_segments + 1).scatter_add(0, owner, torch.ones_like(owner)).cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends[:-1]))
    return offsets.to(index.dtype), _argsort(owner).to(index.dtype)


class _Rows:
    """The rows of a call, in front and wide, and what belongs to a segment: `[S + 1, *]`, the last for the rows of none."""

    def __init__(self, data: Tensor, offsets: Tensor, order: Maybe, index: Maybe, dim: int) -> None:
        self.dim = dim % data.dim()
        self.dtype = data.dtype
        self.rows = _widened(data.movedim(self.dim, 0))
        self.num_rows, self.num_segments = self.rows.size(0), offsets.size(0) - 1
        self.offsets = offsets.long()
        self.lengths = _padded(self.offsets.diff(), 0)
        self.order = None if order is None else order.long()
        # The segment of each row, and of each of the rows in the order of their segments.
        self.group = _owners(self.offsets, self.num_rows if self.order is None else self.order.size(0))
        self.owner = self.group if index is None else _valid(index.long(), self.num_segments)

    # ---- between rows and segments ----

    def per_row(self, values: Tensor) -> Tensor:
        """One number per row (or segment), with the trailing dimensions of the rows."""
        return values.reshape(-1, *[1] * (self.rows.dim() - 1))

    def with_features(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape, *[1] * (self.rows.dim() - 1))

    def to_rows(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.owner)

    def reduce(self, rows: Tensor, how: str, identity: Any, owner: Maybe = None) -> Tensor:
        owner = self.owner if owner is None else owner
        start = rows.new_full((self.num_segments + 1, *rows.shape[1:]), identity)
        return start.scatter_reduce(0, self.per_row(owner).expand_as(rows), rows, how)

    def sum(self, rows: Tensor) -> Tensor:
        return self.reduce(rows.double() if rows.is_floating_point() else rows, "sum", 0)

    def any(self, rows: Tensor) -> Tensor:
        return self.reduce(rows.long(), "amax", 0) > 0

    # ---- extrema ----

    def extremum(self, largest: bool) -> Tensor:
        """NaN wherever there is one: what ONNX Runtime makes of it depends on where it stands."""
        how, identity = ("amax", _least(self.rows.dtype)) if largest else ("amin", _greatest(self.rows.dtype))
        if not self.rows.is_floating_point():
            return self.reduce(self.rows, how, identity)
        nan = self.rows.isnan()
        numbers = self.reduce(self.rows.masked_fill(nan, identity), how, identity)
        return numbers.masked_fill(self.any(nan), torch.nan)

    def top(self) -> Tensor:
        """The maximum of the numbers of each segment, which a NaN is measured from as well as from itself."""
        return self.reduce(self.rows.masked_fill(self.rows.isnan(), -torch.inf), "amax", -torch.inf)

    def below_top(self) -> Tensor:
        top = self.top()
        return self.rows - self.to_rows(top.masked_fill(top == -torch.inf, 0))

    def first_row_with(self, values: Tensor) -> Tensor:
        """The number of the first row of each segment that equals its value; N where there is none."""
        wanted = self.to_rows(values)
        equal = self.rows == wanted
        if self.rows.is_floating_point():
            equal = equal | (self.rows.isnan() & wanted.isnan())
        number = self.per_row(torch.arange(self.num_rows, device=self.rows.device)).expand_as(self.rows)
        return self.reduce(number.masked_fill(~equal, self.num_rows), "amin", self.num_rows)

    def variance(self, correction: float) -> Tensor:
        """Measured from the first row, of which it does not depend: that of equal rows is exactly 0."""
        rows = self.rows.double()
        first = _padded(rows, 0).index_select(0, self.number_at(_padded(self.offsets[:-1], self.group.size(0))))
        rows = rows - self.to_rows(first)
        lengths = self.per_row(self.lengths).double()
        mean = self.sum(rows) / lengths.clamp(min=1)
        divisor = (lengths - correction).masked_fill(lengths <= correction, 1)
        return self.sum((rows - self.to_rows(mean)) ** 2) / divisor

    # ---- rows in the order of their segments ----

    def grouped(self) -> Tensor:
        return self.rows if self.order is None else self.rows.index_select(0, self.order)

    def number_at(self, place: Tensor) -> Tensor:
        """The numbers that rows have in data, from where they stand; N from behind the last."""
        if self.order is None:
            return place
        return _padded(self.order, self.num_rows).index_select(0, place.reshape(-1)).reshape(place.shape)

    def scan(
        self, parts: tuple[Any, ...], identities: tuple[Any, ...], combine: Callable[..., Any], exclusive: bool, reverse: bool
    ) -> tuple[Any, ...]:
        """Running results of the grouped rows; `combine` takes first what is met first."""
        number = torch.arange(self.group.size(0), device=self.offsets.device)
        limit = _padded(self.offsets[1:] - 1, 0) if reverse else self.offsets
        # What the loop reads is handed to it: what a closure holds would become a constant.
        read = (number, limit.index_select(0, self.group), self.lengths.amax(0))

        def before(parts: tuple[Any, ...], by: Any, number: Tensor, limit: Tensor) -> tuple[Any, ...]:
            place = number + by if reverse else number - by
            outside = place > limit if reverse else place < limit
            place, outside = torch.where(outside, 0, place), self.per_row(outside)
            return tuple(torch.where(outside, identity, part.index_select(0, place)) for part, identity in zip(parts, identities))

        def goes_on(by: Tensor, *rest: Tensor) -> Tensor:
            return by < rest[-1]

        def step(by: Tensor, *rest: Tensor) -> tuple[Any, ...]:
            parts, (number, limit, _) = rest[:-3], rest[-3:]
            return by * 2, *combine(before(parts, by, number, limit), parts)

        start = (torch.ones((), dtype=torch.int64, device=number.device), *(part.contiguous() for part in parts))
        parts = torch.ops.higher_order.while_loop(goes_on, step, start, read)[1:]
        return before(parts, 1, *read[:2]) if exclusive else tuple(parts)

    def ranked(self, descending: bool) -> Tensor:
        """Where the row of each rank stands among the grouped ones, segment by segment."""
        rows = self.grouped()
        key = self.per_row(2 * self.group).expand_as(rows)
        if rows.is_floating_point():
            nan = rows.isnan()
            key = key + (~nan if descending else nan).long()
            rows = rows.masked_fill(nan, torch.inf)
        by_value = _argsort(rows, descending)
        return by_value.gather(0, _argsort(key.gather(0, by_value)))

    def starts_of_runs(self, ranked: Tensor) -> Tensor:
        """Whether the row of each rank differs from the one before, or is the first of its segment."""
        rows = self.grouped().gather(0, ranked)
        previous = _behind(rows, 0)
        differ = rows != previous
        if rows.is_floating_point():
            differ = differ & ~(rows.isnan() & previous.isnan())
        return differ | self.per_row(self.group != _behind(self.group, -1))

    def or_first_nan(self, rank: Tensor) -> Tensor:
        """Ranks `[S, R]` for every column, that of the first NaN where a segment has one."""
        rank = self.with_features(rank)
        if not self.rows.is_floating_point():
            return rank
        nans = self.reduce(self.rows.isnan().long(), "sum", 0)[:-1, None]
        return torch.where(nans > 0, self.with_features(self.lengths[:-1, None]) - nans, rank)

    def row_of_rank(self, rank: Tensor, ranked: Tensor) -> Tensor:
        """Row numbers for ranks `[S, R]` or `[S, R, *]`; -1 where a segment is shorter."""
        if rank.dim() == 2:
            rank = self.with_features(rank)
        rank = rank.expand(*rank.shape[:2], *ranked.shape[1:])
        missing = (rank < 0) | (rank >= self.with_features(self.lengths[:-1, None]))
        place = (rank + self.with_features(self.offsets[:-1, None])).masked_fill(missing, ranked.size(0))
        place = _padded(ranked, ranked.size(0)).gather(0, place.flatten(0, 1)).reshape(rank.shape)
        return self.number_at(place).masked_fill(missing, -1)

    # ---- results ----

    def values_at(self, row: Tensor) -> Tensor:
        """What stands at row numbers `[S, *]` or `[S, R, *]`; whatever for those that are not in data."""
        row = row.masked_fill(row < 0, self.num_rows)
        flat = row if row.dim() == self.rows.dim() else row.flatten(0, 1)
        return _padded(self.rows, 0).gather(0, flat).reshape(row.shape)

    def end(self, place: Tensor, fill_value: Any) -> Tensor:
        row = self.number_at(place.masked_fill(self.lengths[:-1] == 0, self.group.size(0)))
        return self.finish(_padded(_padded(self.rows, 0).index_select(0, row), 0), self.dtype, fill_value)

    def give_selected(self, row: Tensor, fill_value: Any) -> tuple[Tensor, Tensor]:
        """Values and numbers of rows `[S + 1, *]`."""
        return self.finish(self.values_at(row), self.dtype, fill_value), self.finish(row, torch.int64, -1)

    def finish(self, values: Tensor, dtype: torch.dtype, fill_value: Any, least: float = 0) -> Tensor:
        """Fills segments of no more than `least` rows, rounds once, and puts the dimension back."""
        values = values.long() if values.dtype == torch.bool else values
        empty = self.per_row(self.lengths <= least)
        return self.put_back(values.masked_fill(empty, fill_value)[:-1], dtype)

    def of_segments(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows as they stand in data, 0 for those of no segment."""
        if self.order is not None:
            rows = rows.masked_fill(self.per_row(self.owner == self.num_segments), 0)
        return self.put_back(rows, dtype)

    def give_back(self, rows: Tensor, dtype: torch.dtype, nothing: int = 0) -> Tensor:
        """Grouped rows where they came from."""
        if self.order is not None:
            place = torch.full_like(self.owner, self.order.size(0))
            place = place.scatter(0, self.order, torch.arange(self.order.size(0), device=rows.device))
            place = place.masked_fill(self.owner == self.num_segments, self.order.size(0))
            rows = _padded(rows.to(rows.dtype), nothing).index_select(0, place)
        return self.put_back(rows, dtype)

    def put_back(self, values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        return values.to(dtype).movedim(0, self.dim).contiguous()


def _extremum(largest: bool, data: Tensor, offsets: Tensor, order: Any, index: Any, dim: int, fill_value: Any) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(call.extremum(largest), data.dtype, fill_value)


def _extremum_and_row(largest: bool, data: Tensor, offsets: Tensor, order: Any, index: Any, dim: int, fill_value: Any) -> tuple[Any, ...]:
    call = _Rows(data, offsets, order, index, dim)
    values = call.extremum(largest)
    return call.finish(values, data.dtype, fill_value), call.finish(call.first_row_with(values), torch.int64, -1)


def _extremal_row(largest: bool, data: Tensor, offsets: Tensor, order: Any, index: Any, dim: int, fill_value: int) -> Tensor:
    call = _Rows(data, offsets, order, index, dim)
    return call.finish(call.first_row_with(call.extremum(largest)), torch.int64, fill_value)


def _cumulative_extremum(
    largest: bool, data: Tensor, offsets: Tensor, order: Any, index: Any, dim: int, exclusive: bool, reverse: bool
) -> tuple[Any, ...]:
    call = _Rows(data, offsets, order, index, dim)
    rows = call.grouped()
    number = call.per_row(call.number_at(torch.arange(rows.size(0), device=rows.device))).expand_as(rows)

    def precedes(a: Tensor, b: Tensor) -> Tensor:
        ahead = a > b if largest else a < b
        return ahead | (a.isnan() & ~b.isnan()) if a.is_floating_point() else ahead

    def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:  # of rows that tie the smaller number wins
        tie = ~precedes(b[0], a[0]) & ~precedes(a[0], b[0])
        take = (b[1] >= 0) & ((a[1] < 0) | precedes(b[0], a[0]) | (tie & (b[1] < a[1])))
        return torch.where(take, b[0], a[0]), torch.where(take, b[1], a[1])

    least = _least(data.dtype) if largest else _greatest(data.dtype)
    values, number = call.scan((rows, number), (least, -1), combine, exclusive, reverse)
    return call.give_back(values, data.dtype), call.give_back(number, torch.int64, -1)


def _owners(offsets: Tensor, num_rows: Any) -> Tensor:
    """The segment of each of the rows in order: how many have ended by then; S behind the last."""
    ended = offsets.new_zeros(num_rows + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ended[:num_rows].cumsum(0)


def _argsort(rows: Tensor, descending: bool = False) -> Tensor:
    """Not the stable overload, of which the exporter has no translation: it makes this one a TopK, which is stable."""
    return rows.sort(0, descending).indices


def _valid(index: Tensor, num_segments: Any) -> Tensor:
    return index.masked_fill((index < 0) | (index >= num_segments), num_segments)


def _padded(rows: Tensor, value: Any) -> Tensor:
    return torch.cat((rows, rows.new_full((1, *rows.shape[1:]), value)))


def _behind(rows: Tensor, value: Any) -> Tensor:
    """Each row where the next one was, behind one of a value."""
    return torch.cat((rows.new_full((1, *rows.shape[1:]), value), rows))[:-1]


def _widened(rows: Tensor) -> Tensor:
    if rows.dtype in _HALF:
        return rows.float()
    return rows if rows.is_floating_point() else rows.long()


def _least(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -torch.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return torch.inf
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _truth_dtype(data: Tensor) -> torch.dtype:
    return torch.uint8 if data.dtype == torch.uint8 else torch.bool


def _selection_fill(data: Tensor, fill_value: Any) -> Any:
    if fill_value is None:
        return torch.nan if data.is_floating_point() else 0
    return fill_value


# ---- what the exporter finds ----

_FORMS = {
    name: form for name, form in globals().items() if name.startswith("segment_") or name in ("_segment_weighted_sum", "_group_index")
}

# A model that computes a derivative itself, of which nothing is left in others.
_DERIVATIVES = (
    "_segment_mean_backward",
    "_segment_select_backward",
    "_segment_extremum_backward",
    "_segment_prod_backward",
    "_segment_logsumexp_backward",
    "_segment_var_backward",
    "_segment_weighted_broadcast",
    "_segment_dot",
    "_segment_softmax_backward",
    "_segment_log_softmax_backward",
    "_segment_linear_scan",
    "_segment_end_backward",
    "_segment_place",
)


def _refusing(name: str) -> Callable[..., Any]:
    def form(*args: Any, **kwargs: Any) -> Any:
        remedy = "compute derivatives outside of the exported part, or pass custom_translation_table with a translation of it"
        observation = f"torch.ops.fastops.{name}, a derivative"
        raise NotImplementedError(sentence("torch.onnx.export", "the program", "consist of operators with an ONNX form", observation, remedy))

    return form


def table() -> dict[Any, Callable[..., Any]]:
    """The form of each operator, as decompositions are given to `torch.export`."""
    forms = {**_FORMS, **{name: _refusing(name) for name in _DERIVATIVES}}
    return {getattr(torch.ops.fastops, name).default: form for name, form in forms.items()}
