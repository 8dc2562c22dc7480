"""Every operation in plain PyTorch: slow, obvious, differentiable any number of times and in forward mode.

It defines what the operations mean and is what tests compare with. It also answers in place of the kernels on devices
that have none. The functions take what the public ones take and check it in the
same words.

Segments are reduced by halving: rows `2k` and `2k + 1` of each segment become one, until one is left. The loop has
`log2(longest)` steps, not one for each segment. It never adds to one place from several rows, so it is deterministic on
every device, in the backward too, and its sums have the accuracy of pairwise summation.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor

from ._dispatch import ALL_DTYPES, FLOATING, check, check_dtype, check_options, promoted
from ._weighted import prepare
from .segments import Segments
from .select import _NAN, as_tensor, check_quantile, check_topk

Grouping = Union[Segments, Tensor]


def segment_sum(
    data: Tensor,
    segments: Grouping,
    *,
    dim: int = 0,
    dtype: Optional[torch.dtype] = None,
    fill_value: float = 0,
    weight: Optional[Tensor] = None,
) -> Tensor:
    if weight is not None:
        segments, dim, result = prepare("segment_sum", data, weight, segments, dim, dtype, fill_value)
        call = _Call("segment_sum", data, segments, dim)
        return call.finish(call.sum(call.weighted(weight, result)[0]), result, fill_value)
    call = _Call("segment_sum", data, segments, dim)
    result = _result_dtype(call.op, data, dtype)
    check_options(call.op, data, {"dtype": dtype, "fill_value": fill_value}, promoted)
    rows = call.rows.to(result)
    if result == torch.bool:
        total = call.sum((rows != 0).long()) != 0
    else:
        total = call.sum(_widened(rows))
    return call.finish(total, result, fill_value)


def segment_mean(
    data: Tensor,
    segments: Grouping,
    *,
    dim: int = 0,
    dtype: Optional[torch.dtype] = None,
    fill_value: float = 0,
    weight: Optional[Tensor] = None,
) -> Tensor:
    if weight is not None:
        segments, dim, result = prepare("segment_mean", data, weight, segments, dim, dtype, fill_value)
        call = _Call("segment_mean", data, segments, dim)
        rows, factors = call.weighted(weight, result)
        total_weight = call.sum(factors)
        total_weight = torch.where(call.per_segment(call.lengths) > 0, total_weight, 1)  # no 0 / 0 whose derivative is NaN
        return call.finish(call.sum(rows) / total_weight, result, fill_value)
    call = _Call("segment_mean", data, segments, dim, FLOATING if dtype is None else ALL_DTYPES)
    check_options(call.op, data, {"dtype": dtype, "fill_value": fill_value})
    result = dtype or data.dtype
    check_dtype(call.op, result, FLOATING, "dtype")
    rows = _widened(call.rows.to(result))
    lengths = call.per_segment(call.lengths).clamp(min=1).to(rows.dtype)
    plain = call.sum(rows) / lengths
    # A sum that overflows, though the mean does not: rows are scaled by a power of two, which is exact, before they
    # are added.
    scale = torch.exp2(-torch.ceil(torch.log2(lengths)))
    scaled = call.sum(rows * call.to_rows(scale)) / (lengths * scale)
    return call.finish(torch.where(plain.isfinite(), plain, scaled), result, fill_value)


def segment_prod(
    data: Tensor,
    segments: Grouping,
    *,
    dim: int = 0,
    dtype: Optional[torch.dtype] = None,
    fill_value: float = 1,
) -> Tensor:
    call = _Call("segment_prod", data, segments, dim)
    result = _result_dtype(call.op, data, dtype)
    check_options(call.op, data, {"dtype": dtype, "fill_value": fill_value}, promoted)
    rows = call.rows.to(result)
    if result == torch.bool:
        return call.finish(call.sum((rows == 0).long()) == 0, result, fill_value)
    rows = _widened(rows)
    if not result.is_floating_point:
        return call.finish(call.halve((rows,), (1,), lambda a, b: (a[0] * b[0],))[0], result, fill_value)
    product = call.halve((rows,), (1,), lambda a, b: (_Times.apply(a[0], b[0]),))[0]
    # Where an overflow met a zero the product is 0 by now; an infinity or a NaN that stands in the data makes it NaN.
    zeros = call.sum((rows == 0).long())
    wild = call.sum((~rows.isfinite()).long())
    poison = torch.where((zeros > 0) & (wild > 0), torch.nan, 1.0).to(rows.dtype)
    return call.finish(product * poison, result, fill_value)


def segment_amax(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Tensor:
    return _extremum("segment_amax", torch.gt, data, segments, dim, fill_value)


def segment_amin(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Tensor:
    return _extremum("segment_amin", torch.lt, data, segments, dim, fill_value)


def segment_max(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Any:
    values, indices = _extremum_and_row("segment_max", torch.gt, data, segments, dim, fill_value)
    return torch.return_types.max((values, indices))


def segment_min(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Any:
    values, indices = _extremum_and_row("segment_min", torch.lt, data, segments, dim, fill_value)
    return torch.return_types.min((values, indices))


def segment_argmax(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: int = -1) -> Tensor:
    return _extremal_row("segment_argmax", torch.gt, data, segments, dim, fill_value)


def segment_argmin(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: int = -1) -> Tensor:
    return _extremal_row("segment_argmin", torch.lt, data, segments, dim, fill_value)


def segment_any(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: bool = False) -> Tensor:
    call = _Call("segment_any", data, segments, dim)
    check_options(call.op, data, {"fill_value": fill_value}, bool)
    result = torch.uint8 if data.dtype == torch.uint8 else torch.bool
    return call.finish(call.sum((call.rows != 0).long()) > 0, result, fill_value)


def segment_all(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: bool = True) -> Tensor:
    call = _Call("segment_all", data, segments, dim)
    check_options(call.op, data, {"fill_value": fill_value}, bool)
    result = torch.uint8 if data.dtype == torch.uint8 else torch.bool
    return call.finish(call.sum((call.rows == 0).long()) == 0, result, fill_value)


def segment_softmax(data: Tensor, segments: Grouping, *, dim: int = 0) -> Tensor:
    call = _Call("segment_softmax", data, segments, dim, FLOATING)
    rows = _widened(call.rows)
    power = (rows - call.to_rows(_finite_below(call.top(rows)))).exp()
    total = call.sum(power)
    return call.give_back(power / call.to_rows(torch.where(total == 0, 1, total)), data.dtype)


def segment_log_softmax(data: Tensor, segments: Grouping, *, dim: int = 0) -> Tensor:
    call = _Call("segment_log_softmax", data, segments, dim, FLOATING)
    rows = _widened(call.rows)
    below = rows - call.to_rows(_finite_below(call.top(rows)))
    total = call.sum(below.exp())
    masked = total == 0  # all rows are -inf
    result = below - call.to_rows(torch.where(masked, 1, total).log())
    return call.give_back(torch.where(call.to_rows(masked), -torch.inf, result), data.dtype)


def segment_logsumexp(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = -torch.inf) -> Tensor:
    call = _Call("segment_logsumexp", data, segments, dim, FLOATING)
    check_options(call.op, data, {"fill_value": fill_value})
    rows = _widened(call.rows)
    top = call.top(rows)
    shift = torch.where(top.isinf(), 0, top)
    total = call.sum((rows - call.to_rows(shift)).exp())
    masked = total == 0
    result = torch.where(masked, -torch.inf, shift + torch.where(masked, 1, total).log())
    return call.finish(result, data.dtype, fill_value)


def segment_var(
    data: Tensor, segments: Grouping, *, dim: int = 0, correction: float = 1, fill_value: float = 0
) -> Tensor:
    return _spread("segment_var", data, segments, dim, correction, fill_value)


def segment_std(
    data: Tensor, segments: Grouping, *, dim: int = 0, correction: float = 1, fill_value: float = 0
) -> Tensor:
    return _spread("segment_std", data, segments, dim, correction, fill_value)


def segment_cumsum(
    data: Tensor,
    segments: Grouping,
    *,
    dim: int = 0,
    dtype: Optional[torch.dtype] = None,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    return _cumulative("segment_cumsum", data, segments, dim, dtype, exclusive, reverse, 0, torch.add)


def segment_cumprod(
    data: Tensor,
    segments: Grouping,
    *,
    dim: int = 0,
    dtype: Optional[torch.dtype] = None,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    return _cumulative("segment_cumprod", data, segments, dim, dtype, exclusive, reverse, 1, torch.mul)


def segment_cummax(
    data: Tensor, segments: Grouping, *, dim: int = 0, exclusive: bool = False, reverse: bool = False
) -> Any:
    values, indices = _cumulative_extremum("segment_cummax", torch.gt, data, segments, dim, exclusive, reverse)
    return torch.return_types.cummax((values, indices))


def segment_cummin(
    data: Tensor, segments: Grouping, *, dim: int = 0, exclusive: bool = False, reverse: bool = False
) -> Any:
    values, indices = _cumulative_extremum("segment_cummin", torch.lt, data, segments, dim, exclusive, reverse)
    return torch.return_types.cummin((values, indices))


def segment_logcumsumexp(
    data: Tensor, segments: Grouping, *, dim: int = 0, exclusive: bool = False, reverse: bool = False
) -> Tensor:
    call = _Call("segment_logcumsumexp", data, segments, dim, FLOATING)
    check_options(call.op, data, {"exclusive": exclusive, "reverse": reverse})

    def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        top = torch.maximum(a[0], b[0]).detach()
        shift = torch.where(top.isinf(), 0, top)
        total = (a[0] - shift).exp() + (b[0] - shift).exp()
        masked = total == 0
        return (torch.where(masked, -torch.inf, shift + torch.where(masked, 1, total).log()),)

    rows = call.double((_widened(call.rows),), (-torch.inf,), combine, exclusive, reverse)[0]
    return call.give_back(rows, data.dtype)


def segment_sort(data: Tensor, segments: Grouping, *, dim: int = 0, descending: bool = False) -> Any:
    call, place = _sorted("segment_sort", data, segments, dim, descending)
    return torch.return_types.sort((call.put_back(call.rows.gather(0, place)), call.put_back(call.numbers[place])))


def segment_argsort(data: Tensor, segments: Grouping, *, dim: int = 0, descending: bool = False) -> Tensor:
    call, place = _sorted("segment_argsort", data, segments, dim, descending)
    return call.put_back(call.numbers[place])


def segment_topk(
    data: Tensor,
    segments: Grouping,
    k: int,
    *,
    dim: int = 0,
    largest: bool = True,
    sorted: bool = True,
    fill_value: float = 0,
) -> Any:
    call = _Call("segment_topk", data, segments, dim)
    k = check_topk(data, k, largest, sorted, fill_value)
    number = torch.arange(k, device=data.device)
    row = call.row_of_rank(number.expand(call.lengths.size(0), k), call.ranked(largest))
    if not sorted:  # what is lacking stays at the end
        row = torch.where(row < 0, call.data.size(0), row).sort(1).values
        row = torch.where(row == call.data.size(0), -1, row)
    return torch.return_types.topk(call.give_several(row, fill_value))


def segment_median(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = _NAN) -> Any:
    call = _Call("segment_median", data, segments, dim)
    fill_value = call.checked_fill(fill_value)
    ranked = call.ranked(False)
    row = call.row_of_rank(call.or_first_nan((call.lengths[:, None] - 1) // 2), ranked)[:, 0]
    value, rows = call.to_rows(call.take(row)), call.rows
    # Of the rows that tie, the first: its rank is the number of those that are less.
    less = call.sum(((rows < value) | ((rows == rows) & (value != value))).detach().long())
    row = call.row_of_rank(less[:, None], ranked)[:, 0]
    return torch.return_types.median((call.finish(call.take(row), data.dtype, fill_value), call.finish(row, torch.int64, -1)))


def segment_nunique(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: int = 0) -> Tensor:
    call = _Call("segment_nunique", data, segments, dim)
    check_options(call.op, data, {"fill_value": fill_value}, int)
    return call.finish(call.sum(call.starts_of_runs(call.ranked(False)).long()), torch.int64, fill_value)


def segment_mode(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = _NAN) -> Any:
    call = _Call("segment_mode", data, segments, dim)
    fill_value = call.checked_fill(fill_value)
    ranked = call.ranked(False)
    starts = call.starts_of_runs(ranked)
    place = call.per_segment(torch.arange(starts.size(0), device=data.device)).expand_as(starts)
    start = torch.where(starts, place, 0).cummax(0).values
    # Of rows in their order the last one of a run knows how long it is, and the first one to know of the most ends the mode's.
    start = call.halve(
        (place - start, start), (-1, 0), lambda a, b: tuple(torch.where(b[0] > a[0], two, one) for one, two in zip(a, b))
    )[1]
    row = call.row_of_rank((start - call.per_segment(call.offsets[:-1]))[:, None], ranked)[:, 0]
    return torch.return_types.mode((call.finish(call.take(row), data.dtype, fill_value), call.finish(row, torch.int64, -1)))


def segment_quantile(
    data: Tensor,
    segments: Grouping,
    q: Any,
    *,
    dim: int = 0,
    interpolation: str = "linear",
    fill_value: float = _NAN,
) -> Tensor:
    call = _Call("segment_quantile", data, segments, dim, FLOATING)
    check_quantile(data, q, interpolation, fill_value)
    q = as_tensor(q, data)
    ranked = call.ranked(False)
    place = (call.lengths - 1).clamp(min=0).double()[:, None] * q.double().reshape(1, -1)
    low, high = place.floor(), place.ceil()
    share = {"linear": place - low, "midpoint": (high - low) / 2, "lower": place * 0, "higher": (high > low).double()}
    share = share.get(interpolation, place.round() - low)

    def take(ranks: Tensor) -> Tensor:
        ranks = call.or_first_nan(ranks.long())
        return _widened(call.give_several(call.row_of_rank(ranks, ranked), fill_value, put_back=False)[0])

    a, b = take(low), take(high)
    share = share.to(a.dtype).reshape(*share.shape, *[1] * (a.dim() - 2))
    gap = b - a
    apart = torch.where(share == 0, a, torch.where(share == 1, b, (1 - share) * a + share * b))
    result = torch.where(gap.isfinite(), torch.lerp(a, b, share), apart).to(data.dtype).movedim(1, 0)
    result = result[0].movedim(0, call.dim) if q.dim() == 0 else result.movedim(1, call.dim + 1)
    return result.contiguous()


def segment_first(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Tensor:
    return _end("segment_first", data, segments, dim, fill_value)


def segment_last(data: Tensor, segments: Grouping, *, dim: int = 0, fill_value: float = 0) -> Tensor:
    return _end("segment_last", data, segments, dim, fill_value)


def segment_broadcast(values: Tensor, segments: Grouping, *, dim: int = 0, num_rows: Optional[int] = None) -> Tensor:
    op = "segment_broadcast"
    segments, dim = check(op, values, segments, dim, "values")
    check_dtype(op, values.dtype, ALL_DTYPES, "values")
    values = values.movedim(dim, 0)
    nothing = values.new_zeros((1, *values.shape[1:]))
    index = segments.index
    source = torch.where(index < 0, values.size(0), index)
    return torch.cat((values, nothing)).index_select(0, source).movedim(0, dim).contiguous()


class _Call:
    """The rows of a call in the order of their segments, and the way back."""

    def __init__(self, op: str, data: Tensor, segments: Grouping, dim: int, accepted: tuple[Any, ...] = ALL_DTYPES) -> None:
        segments, self.dim = check(op, data, segments, dim)
        remedy = "pass dtype=torch.float32" if op == "segment_mean" and data.dtype in ALL_DTYPES else ""
        check_dtype(op, data.dtype, accepted, remedy=remedy)
        self.op = op
        self.data = data.movedim(self.dim, 0)
        self.offsets = segments.offsets.long()
        self.lengths = self.offsets.diff()
        self.order = order = segments.order
        # The number that each of the ordered rows has in data.
        self.numbers = torch.arange(self.data.size(0), device=data.device) if order is None else order.long()
        self.rows = self.data if order is None else self.data.index_select(0, order)

    def per_segment(self, values: Tensor) -> Tensor:
        """One number per segment (or row), with the trailing dimensions of the rows."""
        return values.reshape(-1, *[1] * (self.data.dim() - 1))

    def to_rows(self, values: Tensor) -> Tensor:
        """Each of the ordered rows gets what belongs to its segment."""
        return values.index_select(0, _owners(self.offsets[:-1], self.rows.size(0)))

    def halve(self, rows: tuple[Any, ...], identities: tuple[Any, ...], combine: Callable[..., Any]) -> tuple[Any, ...]:
        """Reduces each segment to one row by combining neighbours. A segment without rows becomes the identity."""
        starts, lengths = self.offsets[:-1], self.lengths
        while True:
            num_rows = rows[0].size(0)
            padded = [torch.cat((part, _one_row(part, identity))) for part, identity in zip(rows, identities)]
            if lengths.numel() == 0 or int(lengths.max()) <= 1:
                place = torch.where(lengths > 0, starts, num_rows)
                return tuple(part.index_select(0, place) for part in padded)
            halves = (lengths + 1) // 2
            new_starts = halves.cumsum(0) - halves
            owner = _owners(new_starts, int(halves.sum()))
            pair = torch.arange(owner.size(0), device=halves.device) - new_starts[owner]
            first = starts[owner] + 2 * pair
            second = torch.where(2 * pair + 1 < lengths[owner], first + 1, num_rows)  # num_rows: the identity
            rows = combine(
                tuple(part.index_select(0, first) for part in padded),
                tuple(part.index_select(0, second) for part in padded),
            )
            starts, lengths = new_starts, halves

    def double(
        self, rows: tuple[Any, ...], identities: tuple[Any, ...], combine: Callable[..., Any], exclusive: bool, reverse: bool
    ) -> tuple[Any, ...]:
        """Running results, by doubling: after step k each row has combined 2**k rows, those that are met before it first."""
        num_rows, step = rows[0].size(0), -1 if reverse else 1
        number = torch.arange(num_rows, device=self.offsets.device)
        owner = _owners(self.offsets[:-1], num_rows)
        first, last = self.offsets[owner], self.offsets[owner + 1]
        longest = int(self.lengths.max()) if self.lengths.numel() else 0

        def before(parts: tuple[Any, ...], by: int) -> tuple[Any, ...]:
            at = number - step * by
            at = torch.where((at >= first) & (at < last), at, num_rows)  # num_rows: the identity
            return tuple(
                torch.cat((part, _one_row(part, identity))).index_select(0, at) for part, identity in zip(parts, identities)
            )

        by = 1
        while by < longest:
            rows = combine(before(rows, by), rows)
            by *= 2
        return before(rows, 1) if exclusive else rows

    def sum(self, rows: Tensor) -> Tensor:
        return self.halve((rows,), (0,), lambda a, b: (a[0] + b[0],))[0]

    def finish(self, values: Tensor, dtype: torch.dtype, fill_value: Any, least: float = 0) -> Tensor:
        """Rounds once, fills segments of no more than `least` rows, and puts the dimension back."""
        fill = torch.full((), fill_value, dtype=dtype, device=values.device)
        empty = self.per_segment(self.lengths <= least)
        return self.put_back(torch.where(empty, fill, values.to(dtype)))

    def put_back(self, values: Tensor) -> Tensor:
        """With the dimension of the rows where it was."""
        return values.movedim(0, self.dim).contiguous()

    def give_back(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Ordered rows where they came from, rounded once; 0 for rows of no segment."""
        nothing = self.numbers.new_full((self.data.size(0),), rows.size(0))
        place = nothing.index_copy(0, self.numbers, torch.arange(rows.size(0), device=rows.device))
        rows = torch.cat((rows.to(dtype), _one_row(rows, 0).to(dtype))).index_select(0, place)
        return self.put_back(rows)

    def weighted(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows times their weights, and the weights, in the type that `dtype` is computed in."""
        behind = self.data.dim() - self.dim - weight.dim()
        factors = weight.reshape(weight.size(0), *[1] * self.dim, *weight.shape[1:], *[1] * behind)
        if self.order is not None:
            factors = factors.index_select(0, self.order)
        rows, factors = (_widened(part.to(dtype)) if dtype.is_floating_point else part.to(dtype).long() for part in (self.rows, factors))
        return rows * factors, factors

    def top(self, rows: Tensor) -> Tensor:
        """The maximum of each segment, as a constant; 0 without rows."""
        return _widened(self.take(self.best_row(torch.gt)).detach())

    def best_row(self, better: Callable[..., Any]) -> Tensor:
        """The row number of each segment's extremum, -1 for segments without rows."""

        def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
            take = (b[1] >= 0) & (better(b[0], a[0]) | ((b[0] != b[0]) & (a[0] == a[0])))
            return torch.where(take, b[0], a[0]), torch.where(take, b[1], a[1])

        rows = self.rows.detach()
        numbers = self.per_segment(self.numbers).expand_as(rows)
        return self.halve((rows, numbers), (0, -1), combine)[1]

    def take(self, row: Tensor) -> Tensor:
        """The elements of data at row numbers; whatever for -1."""
        padded = torch.cat((self.data, _one_row(self.data, 0)))
        return padded.gather(0, torch.where(row < 0, self.data.size(0), row))


    def ranked(self, descending: bool) -> Tensor:
        """Where the element of each rank stands among the ordered rows, segment by segment: two stable sorts."""
        rows = self.rows.detach()
        by_value = (rows.byte() if rows.dtype == torch.bool else rows).sort(dim=0, descending=descending, stable=True).indices
        owner = self.per_segment(_owners(self.offsets[:-1], rows.size(0))).expand_as(rows)
        return by_value.gather(0, owner.gather(0, by_value).sort(dim=0, stable=True).indices)

    def checked_fill(self, fill_value: float) -> float:
        """That of selections: where it is not given, 0 of what knows no NaN."""
        if fill_value is _NAN and not self.data.is_floating_point():
            fill_value = 0
        check_options(self.op, self.data, {"fill_value": fill_value})
        return fill_value

    def starts_of_runs(self, ranked: Tensor) -> Tensor:
        """Whether the element of each rank differs from the one before, or is the first of its segment."""
        rows = self.rows.detach().gather(0, ranked)
        a, b = rows[:-1], rows[1:]
        owner = self.per_segment(_owners(self.offsets[:-1], rows.size(0)))
        differ = (a != b) & ((a == a) | (b == b)) | (owner[:-1] != owner[1:])
        return torch.cat((torch.ones_like(rows[:1], dtype=torch.bool), differ))

    def or_first_nan(self, rank: Tensor) -> Tensor:
        """Ranks `[S, R]` for every column, in ascending order that of the first NaN where a segment has one."""
        nans = self.sum((self.rows != self.rows).long())
        first = self.per_segment(self.lengths) - nans
        return torch.where(nans[:, None] > 0, first[:, None], rank.reshape(*rank.shape, *[1] * (nans.dim() - 1)))

    def row_of_rank(self, rank: Tensor, ranked: Tensor) -> Tensor:
        """Row numbers for ranks `[S, R]` or `[S, R, *]`; -1 where a segment is shorter."""
        rank = rank.reshape(*rank.shape, *[1] * (ranked.dim() + 1 - rank.dim())).expand(*rank.shape[:2], *ranked.shape[1:])
        missing = (rank < 0) | (rank >= self.per_segment(self.lengths)[:, None])
        place = torch.where(missing, 0, self.per_segment(self.offsets[:-1])[:, None] + rank)
        if ranked.size(0) == 0:
            return torch.full_like(rank, -1)
        position = ranked.gather(0, place.flatten(0, 1)).reshape(rank.shape)
        return torch.where(missing, -1, self.numbers[position])

    def give_several(self, row: Tensor, fill_value: Any, put_back: bool = True) -> tuple[Tensor, Tensor]:
        """The elements at row numbers `[S, R, *]` and those numbers, the segments where the rows are in data."""
        fill = torch.full((), fill_value, dtype=self.data.dtype, device=row.device)
        values = torch.where(row < 0, fill, self.take(row.flatten(0, 1)).reshape(row.shape))
        if not put_back:
            return values, row
        values, row = (part.movedim((0, 1), (self.dim, self.dim + 1)).contiguous() for part in (values, row))
        return values, row


class _Times(torch.autograd.Function):
    """a * b, where 0 times infinity is 0: the infinity is a product that overflowed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.where((a == 0) | (b == 0), 0, a * b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        return _Times.apply(gradient, b), _Times.apply(gradient, a)

    @staticmethod
    def jvp(ctx: Any, a_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return _Times.apply(a_tangent, b) + _Times.apply(a, b_tangent)


def _finite_below(top: Tensor) -> Tensor:
    """What rows are measured from, where all of them may be -inf."""
    return torch.where(top == -torch.inf, 0, top)


def _spread(
    op: str, data: Tensor, segments: Grouping, dim: int, correction: float, fill_value: float
) -> Tensor:
    call = _Call(op, data, segments, dim, FLOATING)
    check_options(op, data, {"correction": correction, "fill_value": fill_value})
    rows = _widened(call.rows)
    lengths = call.per_segment(call.lengths).to(rows.dtype)
    # Measured from the first row, of which a variance does not depend: that of equal rows is exactly 0.
    first = torch.cat((rows, _one_row(rows, 0))).index_select(0, torch.where(call.lengths > 0, call.offsets[:-1], rows.size(0)))
    rows = rows - call.to_rows(first.detach())
    rows = torch.where(call.to_rows(lengths <= correction), 0, rows)  # no gradient flows from what is filled
    mean = call.sum(rows) / lengths.clamp(min=1)
    divisor = torch.where(lengths > correction, lengths - correction, 1)
    result = call.sum((rows - call.to_rows(mean)) ** 2) / divisor
    if op == "segment_std":
        some = result != 0
        result = torch.where(some, torch.where(some, result, 1).sqrt(), 0)
    return call.finish(result, data.dtype, fill_value, correction)


def _cumulative(
    op: str,
    data: Tensor,
    segments: Grouping,
    dim: int,
    dtype: Optional[torch.dtype],
    exclusive: bool,
    reverse: bool,
    identity: int,
    combine: Callable[..., Any],
) -> Tensor:
    call = _Call(op, data, segments, dim)
    result = _result_dtype(op, data, dtype)
    check_options(op, data, {"dtype": dtype, "exclusive": exclusive, "reverse": reverse})
    rows = call.rows.to(result)
    rows = _widened(rows) if result.is_floating_point else rows.long()
    zero_times_infinity = combine is torch.mul and result.is_floating_point
    if zero_times_infinity:
        # From a zero on the product is 0; an infinity or a NaN that stands in the data makes it NaN.
        combine = _Times.apply
        wild, zeros = call.double(
            ((~rows.isfinite()).long(), (rows == 0).long()), (0, 0), lambda a, b: (a[0] + b[0], a[1] + b[1]), exclusive, reverse
        )
    total = call.double((rows,), (identity,), lambda a, b: (combine(a[0], b[0]),), exclusive, reverse)[0]
    if zero_times_infinity:
        total = total * torch.where((zeros > 0) & (wild > 0), torch.nan, 1.0).to(total.dtype)
    if result == torch.bool:
        total = total != 0
    return call.give_back(total, result)


def _cumulative_extremum(
    op: str, better: Callable[..., Any], data: Tensor, segments: Grouping, dim: int, exclusive: bool, reverse: bool
) -> tuple[Tensor, Tensor]:
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"exclusive": exclusive, "reverse": reverse})

    def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:  # a is met first; of rows that tie the smaller number wins
        ahead = better(b[0], a[0]) | ((b[0] != b[0]) & (a[0] == a[0]))
        behind = better(a[0], b[0]) | ((a[0] != a[0]) & (b[0] == b[0]))
        take = (b[1] >= 0) & ((a[1] < 0) | ahead | (~behind & (b[1] < a[1])))
        return torch.where(take, b[0], a[0]), torch.where(take, b[1], a[1])

    rows = call.rows.detach()
    numbers = call.per_segment(call.numbers).expand_as(rows)
    numbers = call.double((rows, numbers), (0, -1), combine, exclusive, reverse)[1]
    if data.dtype.is_floating_point:
        least = -torch.inf if better is torch.gt else torch.inf
    elif data.dtype == torch.bool:
        least = better is torch.lt
    else:
        limits = torch.iinfo(data.dtype)
        least = limits.min if better is torch.gt else limits.max
    values = torch.where(numbers < 0, torch.full((), least, dtype=data.dtype, device=data.device), call.take(numbers))
    indices = call.give_back(numbers + 1, torch.int64) - 1  # -1 for rows of no segment
    return call.give_back(values, data.dtype), indices


def _sorted(op: str, data: Tensor, segments: Grouping, dim: int, descending: bool) -> tuple[_Call, Tensor]:
    """Which of the ordered rows stands where: sorted by value, and then by segment, each time without moving what is equal."""
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"descending": descending})
    by_value = call.rows.detach().sort(dim=0, descending=descending, stable=True).indices
    owner = _owners(call.offsets[:-1], call.rows.size(0))
    by_segment = owner[by_value].sort(dim=0, stable=True).indices
    return call, by_value.gather(0, by_segment)


def _owners(starts: Tensor, num_rows: int) -> Tensor:
    """The segment of each row, from where segments start: how many have started by then, but the first."""
    started = starts.new_zeros(num_rows + 1).index_add(0, starts[1:], torch.ones_like(starts[1:]))
    return started[:num_rows].cumsum(0)


def _one_row(rows: Tensor, value: float) -> Tensor:
    return rows.new_full((1, *rows.shape[1:]), value)


def _widened(rows: Tensor) -> Tensor:
    """What rows are accumulated in."""
    if rows.dtype in (torch.float16, torch.bfloat16):
        return rows.float()
    return rows if rows.is_floating_point() else rows.long()


def _result_dtype(op: str, data: Tensor, dtype: Optional[torch.dtype]) -> torch.dtype:
    if dtype is None:
        return promoted(data.dtype)
    if isinstance(dtype, torch.dtype):
        check_dtype(op, dtype, ALL_DTYPES, "dtype")
    return dtype


def _extremum(op: str, better: Callable[..., Any], data: Tensor, segments: Grouping, dim: int, fill_value: float) -> Tensor:
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"fill_value": fill_value})
    best = call.take(call.best_row(better)).detach()
    if not data.is_floating_point():
        return call.finish(best, data.dtype, fill_value)
    best, rows = _widened(best), _widened(call.rows)
    best_of_row = call.to_rows(best)
    ties = (rows == best_of_row) | ((rows != rows) & (best_of_row != best_of_row))
    num_ties = call.to_rows(call.sum(ties.long()))
    # Nothing is added to a finite best, and an infinite one (or NaN) to itself: the sum is there for its derivative.
    change = torch.where(rows.isfinite(), rows - rows.detach(), rows)
    share = torch.where(ties, change, 0) / num_ties.clamp(min=1)
    return call.finish(best + call.sum(share), data.dtype, fill_value)


def _extremum_and_row(
    op: str, better: Callable[..., Any], data: Tensor, segments: Grouping, dim: int, fill_value: float
) -> tuple[Tensor, Tensor]:
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"fill_value": fill_value})
    row = call.best_row(better)
    return call.finish(call.take(row), data.dtype, fill_value), call.finish(row, torch.int64, -1)


def _end(op: str, data: Tensor, segments: Grouping, dim: int, fill_value: float) -> Tensor:
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"fill_value": fill_value})
    place = call.offsets[:-1] if op == "segment_first" else call.offsets[1:] - 1
    numbers = torch.cat((call.numbers, call.numbers.new_full((1,), -1)))  # without rows there is a place for none
    row = numbers[torch.where(call.lengths > 0, place, -1)]
    shape = (row.size(0), *call.data.shape[1:])
    return call.finish(call.take(call.per_segment(row).expand(shape)), data.dtype, fill_value)


def _extremal_row(op: str, better: Callable[..., Any], data: Tensor, segments: Grouping, dim: int, fill_value: int) -> Tensor:
    call = _Call(op, data, segments, dim)
    check_options(op, data, {"fill_value": fill_value}, int)
    return call.finish(call.best_row(better), torch.int64, fill_value)
