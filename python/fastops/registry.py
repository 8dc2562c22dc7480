"""One row per operation. Tests, benchmarks, the README's table and `python -m fastops` iterate it.

>>> find("segment_sum").description
'the sum of each segment'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Union

import torch
from torch import Tensor

from . import move, normalise, order, reduce, reference, scan, select
from ._dispatch import ALL_DTYPES, FLOATING, promoted
from .errors import DeviceMismatchError, dtype_name, kind
from .segments import Segments

if TYPE_CHECKING:
    from .testing import ErrorSample, Sample

__all__ = ["OPS", "Op", "find", "markdown_table"]


@dataclass(frozen=True)
class Op:
    """An operation and what is worth knowing about it.

    name: of the function and of the operator in `torch.ops.fastops`.
    fn, reference: the public function and its meaning in plain PyTorch; they take the same arguments. What a call has to say
        beside data and segments is bound.
    description: completes "it computes ...".
    result: the shape of the result, and what it consists of.
    empty: what a segment without rows gets.
    dtypes: of the data; anything else raises.
    result_dtypes: those of the results, given that of the data.
    differentiable: whether gradients of first and second order flow to the data.
    peer: the plain PyTorch way, `peer(data, index, S)` with index the segment of each row (rows in order, dim 0).
    takes_values: the first argument has one entry per segment, not per row.
    per_row: the result has the rows of the data.
    grouped: and they stand by segment, without those that belong to none.
    one_row: of each segment, only one row is read.
    data_kind: what `testing.make_data` fills samples with.
    exact: results for dyadic data are exact, whatever the order of accumulation.
    arguments: what is bound, in the order in which the operator takes it between the segments and dim; a floating number is a
        tensor there.
    behind: sizes of the dimensions that the result has behind that of the segments.
    row_numbers: which of the results holds row numbers, None if none does.
    """

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    description: str
    result: str
    empty: str
    dtypes: tuple[torch.dtype, ...]
    result_dtypes: Callable[[torch.dtype], tuple[torch.dtype, ...]]
    differentiable: bool
    peer: Callable[[Tensor, Tensor, int], Any]
    takes_values: bool = False
    per_row: bool = False
    grouped: bool = False
    one_row: bool = False
    data_kind: str = "dyadic"
    exact: bool = True
    arguments: tuple[Any, ...] = ()
    behind: tuple[int, ...] = ()
    row_numbers: Optional[int] = None

    def __repr__(self) -> str:
        return self.name

    @property
    def overload(self) -> Any:
        """The operator behind it, `torch.ops.fastops.<name>.default`."""
        return getattr(torch.ops.fastops, self.name).default

    def samples(self, device: Any, dtype: torch.dtype, requires_grad: bool = False, **options: Any) -> Iterator[Sample]:
        """Inputs, see `testing.sample_inputs`."""
        from . import testing

        return testing.sample_inputs(self, device, dtype, requires_grad, **options)

    def errors(self, device: Any) -> Iterator[ErrorSample]:
        """Calls that must fail, with the words that they fail with."""
        return _errors(self, device)

    def bytes_moved(self, data: Tensor, segments: Segments) -> int:
        """The least that has to cross the memory bus: every input that counts read once, every output written once."""
        rows_out = segments.num_rows if self.takes_values or self.per_row else segments.num_segments
        if self.grouped and segments.order is not None:
            rows_out = segments.order.numel()
        row = data[0].numel() if data.size(0) else 0
        rows_out *= math.prod(self.behind)
        rows_in = min(segments.num_segments, data.size(0)) if self.one_row else data.size(0)
        total = rows_in * row * data.element_size()
        total += sum(rows_out * row * dtype.itemsize for dtype in self.result_dtypes(data.dtype))
        return total + sum(part.numel() * part.element_size() for part in segments._parts if part is not None)


def _expanded(index: Tensor, data: Tensor) -> Tensor:
    return index.reshape(-1, *[1] * (data.dim() - 1)).expand_as(data)


def _zeros(data: Tensor, num_segments: int, **options: Any) -> Tensor:
    return data.new_zeros((num_segments, *data.shape[1:]), **options)


def _sum_peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
    return _zeros(data, num_segments).index_add(0, index, data)


def _mean_peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
    lengths = torch.bincount(index, minlength=num_segments).clamp(min=1)
    return _sum_peer(data, index, num_segments) / lengths.reshape(-1, *[1] * (data.dim() - 1))


def _scatter_peer(reduction: str) -> Callable[[Tensor, Tensor, int], Tensor]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
        out = _zeros(data, num_segments)
        if reduction == "prod":
            out = out + 1
        return out.scatter_reduce(0, _expanded(index, data), data, reduction, include_self=False)

    return peer


def _row_peer(reduction: str, with_values: bool) -> Callable[[Tensor, Tensor, int], Any]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Any:
        values = _scatter_peer(reduction)(data, index, num_segments)
        found = _first_row(data, index, values)
        return (values, found) if with_values else found

    return peer


def _first_row(data: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The first row of each segment that has its value."""
    rows = torch.arange(data.size(0), device=data.device).reshape(-1, *[1] * (data.dim() - 1))
    rows = torch.where(data == values[index], rows, data.size(0))
    none = values.new_full(values.shape, -1, dtype=torch.int64)
    return none.scatter_reduce(0, _expanded(index, data), rows, "amin", include_self=False)


def _truth_peer(every: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
        hits = (data == 0) if every else (data != 0)
        count = _zeros(data, num_segments, dtype=torch.int32).index_add(0, index, hits.int())
        return count == 0 if every else count > 0

    return peer


def _broadcast_peer(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    return values.index_select(0, index)


def _softmax_peer(log: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
        below = data - _scatter_peer("amax")(data.detach(), index, num_segments)[index]
        power = below.exp()
        total = _sum_peer(power, index, num_segments)
        return below - total.log()[index] if log else power / total[index]

    return peer


def _logsumexp_peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
    top = _scatter_peer("amax")(data.detach(), index, num_segments)
    return top + _sum_peer((data - top[index]).exp(), index, num_segments).log()


def _spread_peer(root: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
        lengths = torch.bincount(index, minlength=num_segments).reshape(-1, *[1] * (data.dim() - 1))
        centred = data - _mean_peer(data, index, num_segments)[index]
        variance = _sum_peer(centred * centred, index, num_segments) / (lengths - 1).clamp(min=1)
        return variance.sqrt() if root else variance

    return peer


def _scan_peer(name: str) -> Callable[[Tensor, Tensor, int], Any]:
    """Segment after segment: torch has nothing else."""

    def peer(data: Tensor, index: Tensor, num_segments: int) -> Any:
        parts = data.split(torch.bincount(index, minlength=num_segments).tolist())
        if name not in ("cummax", "cummin"):
            return torch.cat([getattr(torch, name)(part, 0) for part in parts])
        # The first of rows that tie, not the last: that of the maximum of the same rows in the other direction.
        values, rows, first = [], [], 0
        for part in parts:
            found = getattr(torch, name)(part, 0).values
            fresh = torch.ones_like(part, dtype=torch.bool)
            if len(part):
                fresh[1:] = (found[1:] != found[:-1]) & ~((found[1:] != found[1:]) & (found[:-1] != found[:-1]))
            number = torch.arange(first, first + len(part), device=data.device).reshape(-1, *[1] * (data.dim() - 1))
            rows.append(torch.where(fresh, number, -1).cummax(0).values if len(part) else number.expand_as(part))
            values.append(found)
            first += len(part)
        return getattr(torch.return_types, name)((torch.cat(values), torch.cat(rows)))

    return peer


def _ranked_rows(data: Tensor, index: Tensor, descending: bool = False) -> Tensor:
    """The rows of each segment and column in the order of their elements, by two stable sorts."""
    by_value = data.sort(dim=0, descending=descending, stable=True).indices
    return by_value.gather(0, _expanded(index, data).gather(0, by_value).sort(dim=0, stable=True).indices)


def _starts(index: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    lengths = torch.bincount(index, minlength=num_segments)
    return lengths.cumsum(0) - lengths, lengths


def _topk_peer(data: Tensor, index: Tensor, num_segments: int, k: int) -> Any:
    starts, lengths = _starts(index, num_segments)
    number = torch.arange(k, device=data.device)
    place = _within(starts[:, None] + number, data)
    rows = _ranked_rows(data, index, descending=True)[place]
    values = data.gather(0, rows.flatten(0, 1)).reshape(rows.shape)
    missing = (number >= lengths[:, None]).reshape(*place.shape, *[1] * (data.dim() - 1))
    return values.masked_fill(missing, 0), rows.masked_fill(missing, -1)


def _median_peer(data: Tensor, index: Tensor, num_segments: int) -> Any:
    starts, lengths = _starts(index, num_segments)
    rows = _ranked_rows(data, index)[_within(starts + (lengths - 1) // 2, data)]
    values = data.gather(0, rows).masked_fill(_trailing(lengths == 0, data), torch.nan)
    return values, _first_row(data, index, values)


def _runs(data: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows by segment in the order of their elements, their segments, and where another element begins, or another segment."""
    rows, index = _ranked_rows(data, index), index.sort().values
    values = data.gather(0, rows)
    begins = torch.ones_like(values, dtype=torch.bool)
    begins[1:] = (values[1:] != values[:-1]) | _trailing(index[1:] != index[:-1], data)
    return rows, index, begins


def _nunique_peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
    _, index, begins = _runs(data, index)
    return _zeros(data, num_segments, dtype=torch.int64).index_add(0, index, begins.long())


def _mode_peer(data: Tensor, index: Tensor, num_segments: int) -> Any:
    rows, index, begins = _runs(data, index)
    place = torch.arange(len(data), device=data.device)
    length = _trailing(place, data) - torch.where(begins, _trailing(place, data), 0).cummax(0).values
    longest = _scatter_peer("amax")(length, index, num_segments)
    last = _first_row(length, index, longest)
    rows = rows.gather(0, (last - longest).clamp(min=0))
    missing = last < 0
    return torch.return_types.mode((data.gather(0, rows).masked_fill(missing, torch.nan), rows.masked_fill(missing, -1)))


def _quantile_peer(data: Tensor, index: Tensor, num_segments: int, q: float) -> Tensor:
    starts, lengths = _starts(index, num_segments)
    place = (lengths - 1).clamp(min=0).double() * q
    rows = _ranked_rows(data, index)
    a, b = (data.gather(0, rows[_within(starts + rank.long(), data)]) for rank in (place.floor(), place.ceil()))
    between = torch.lerp(a, b, _trailing((place - place.floor()).to(data.dtype), data))
    return between.masked_fill(_trailing(lengths == 0, data), torch.nan)


def _end_peer(last: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
        starts, lengths = _starts(index, num_segments)
        rows = data[_within(starts + (lengths - 1 if last else 0), data)]
        return rows.masked_fill(_trailing(lengths == 0, data), 0)

    return peer


def _sort_peer(with_values: bool) -> Callable[[Tensor, Tensor, int], Any]:
    def peer(data: Tensor, index: Tensor, num_segments: int) -> Any:
        values, by_value = data.sort(dim=0, stable=True)
        by_segment = index[by_value].sort(dim=0, stable=True).indices
        indices = by_value.gather(0, by_segment)
        return torch.return_types.sort((values.gather(0, by_segment), indices)) if with_values else indices

    return peer


def _within(place: Tensor, data: Tensor) -> Tensor:
    """Where segments have no rows, some row."""
    return place.clamp(0, data.size(0) - 1)


def _trailing(values: Tensor, data: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (data.dim() - 1))


def _same(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype,)


def _reduction(name: str, description: str, empty: str, peer: Callable[..., Any], **options: Any) -> Op:
    defaults: dict[str, Any] = {"result": "`[S, *]`", "dtypes": ALL_DTYPES, "result_dtypes": _same, "differentiable": True}
    options = {**defaults, **options}
    function = next(getattr(module, name) for module in (reduce, normalise, scan, order, select) if hasattr(module, name))
    return Op(name, function, getattr(reference, name), description, empty=empty, peer=peer, **options)


_TOTAL = {"result_dtypes": lambda dtype: (promoted(dtype),)}
_WITH_ROWS: dict[str, Any] = {
    "result": "(values, row numbers) `[S, *]`",
    "result_dtypes": lambda dtype: (dtype, torch.int64),
    "row_numbers": 1,
}
_ROWS = {
    "result": "row numbers `[S, *]`",
    "result_dtypes": lambda dtype: (torch.int64,),
    "differentiable": False,
    "row_numbers": 0,
}
_COUNTS = {**_ROWS, "result": "counts `[S, *]`", "row_numbers": None}
_TRUTH = {
    "result": "bool `[S, *]`",
    "result_dtypes": lambda dtype: (torch.uint8 if dtype == torch.uint8 else torch.bool,),
    "differentiable": False,
}

_TOP, _SHARE = 2, 0.3  # what samples ask for

_INEXACT = {"dtypes": FLOATING, "exact": False}
_PER_ROW = {"result": "`[N, *]`", "per_row": True}
_RUNNING_ROWS = {**_WITH_ROWS, "result": "(values, row numbers) `[N, *]`", "per_row": True}
_GROUPED = {"per_row": True, "grouped": True}
_SORTED = {**_WITH_ROWS, "result": "(values, row numbers) `[N, *]` by segment", **_GROUPED}
_SORTED_ROWS = {**_ROWS, "result": "row numbers `[N, *]` by segment", **_GROUPED}

OPS: list[Op] = [
    _reduction("segment_sum", "the sum of each segment", "0", _sum_peer, **_TOTAL),
    _reduction("segment_mean", "the mean of each segment", "0", _mean_peer, dtypes=FLOATING, exact=False),
    _reduction(
        "segment_prod",
        "the product of each segment",
        "1",
        _scatter_peer("prod"),
        data_kind="factors",
        exact=False,
        **_TOTAL,
    ),
    _reduction("segment_amax", "the maximum, ties share the gradient", "0", _scatter_peer("amax")),
    _reduction("segment_amin", "the minimum, ties share the gradient", "0", _scatter_peer("amin")),
    _reduction("segment_max", "the maximum and its first row", "0, -1", _row_peer("amax", True), **_WITH_ROWS),
    _reduction("segment_min", "the minimum and its first row", "0, -1", _row_peer("amin", True), **_WITH_ROWS),
    _reduction("segment_argmax", "the first row with the maximum", "-1", _row_peer("amax", False), **_ROWS),
    _reduction("segment_argmin", "the first row with the minimum", "-1", _row_peer("amin", False), **_ROWS),
    _reduction("segment_any", "whether a row is not zero", "False", _truth_peer(False), **_TRUTH),
    _reduction("segment_all", "whether no row is zero", "True", _truth_peer(True), **_TRUTH),
    _reduction("segment_logsumexp", "log of the sum of exponentials", "-inf", _logsumexp_peer, **_INEXACT),
    _reduction("segment_var", "the variance, less `correction` rows", "0", _spread_peer(False), **_INEXACT),
    _reduction("segment_std", "the standard deviation", "0", _spread_peer(True), **_INEXACT),
    _reduction("segment_softmax", "softmax within each segment", "", _softmax_peer(False), **_INEXACT, **_PER_ROW),
    _reduction("segment_log_softmax", "its logarithm", "", _softmax_peer(True), **_INEXACT, **_PER_ROW),
    _reduction("segment_cumsum", "the sum up to each row", "", _scan_peer("cumsum"), **_TOTAL, **_PER_ROW),
    _reduction(
        "segment_cumprod",
        "the product up to each row",
        "",
        _scan_peer("cumprod"),
        data_kind="factors",
        exact=False,
        **_TOTAL,
        **_PER_ROW,
    ),
    _reduction("segment_cummax", "the maximum so far and its first row", "", _scan_peer("cummax"), **_RUNNING_ROWS),
    _reduction("segment_cummin", "the minimum so far and its first row", "", _scan_peer("cummin"), **_RUNNING_ROWS),
    _reduction("segment_logcumsumexp", "log of the sum of exponentials so far", "", _scan_peer("logcumsumexp"), **_INEXACT, **_PER_ROW),
    _reduction("segment_sort", "each segment sorted, stably", "", _sort_peer(True), **_SORTED),
    _reduction("segment_argsort", "the rows in that order", "", _sort_peer(False), **_SORTED_ROWS),
    Op(
        "segment_topk",
        partial(select.segment_topk, k=_TOP),
        partial(reference.segment_topk, k=_TOP),
        "the `k` greatest or least rows",
        empty="0, -1",
        dtypes=ALL_DTYPES,
        differentiable=True,
        peer=partial(_topk_peer, k=_TOP),
        arguments=(_TOP,),
        behind=(_TOP,),
        **{**_WITH_ROWS, "result": "(values, row numbers) `[S, k, *]`"},
    ),
    _reduction("segment_median", "the lower median and its first row", "nan, -1", _median_peer, **_WITH_ROWS),
    _reduction("segment_nunique", "how many values are different", "0", _nunique_peer, **_COUNTS),
    _reduction("segment_mode", "the most frequent value and its first row", "nan, -1", _mode_peer, **_WITH_ROWS),
    Op(
        "segment_quantile",
        partial(select.segment_quantile, q=_SHARE),
        partial(reference.segment_quantile, q=_SHARE),
        "quantiles, by five interpolations",
        result="`[S, *]`, `[Q, S, *]`",
        empty="nan",
        dtypes=FLOATING,
        result_dtypes=_same,
        differentiable=True,
        peer=partial(_quantile_peer, q=_SHARE),
        exact=False,
        arguments=(_SHARE,),
    ),
    _reduction("segment_first", "the first row", "0", _end_peer(False), one_row=True),
    _reduction("segment_last", "the last row", "0", _end_peer(True), one_row=True),
    Op(
        "segment_broadcast",
        move.segment_broadcast,
        reference.segment_broadcast,
        "each row gets its segment's value",
        result="`[N, *]`",
        empty="",
        dtypes=ALL_DTYPES,
        result_dtypes=_same,
        differentiable=True,
        peer=_broadcast_peer,
        takes_values=True,
    ),
]

SCANS = ("segment_cumsum", "segment_cumprod", "segment_cummax", "segment_cummin", "segment_logcumsumexp")

_BY_NAME = {op.name: op for op in OPS}


def find(op: Union[str, Op]) -> Op:
    return _BY_NAME[op] if isinstance(op, str) else op


def markdown_table() -> str:
    """The table of operations as it stands in the README."""
    lines = [
        "| operation | computes | result | empty segment | data | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for op in OPS:
        dtypes = (
            "all"
            if op.dtypes == ALL_DTYPES
            else "floating"
            if op.dtypes == FLOATING
            else ", ".join(map(dtype_name, op.dtypes))
        )
        gradients = "1st, 2nd" if op.differentiable else ""
        lines.append(f"| `{op.name}` | {op.description} | {op.result} | {op.empty} | {dtypes} | {gradients} |")
    return "\n".join(lines)


def _errors(op: Op, device: Any) -> Iterator[ErrorSample]:
    from .testing import CANONICAL_DATA, CANONICAL_OFFSETS, ErrorSample

    offsets = torch.tensor(CANONICAL_OFFSETS, device=device)
    segments = Segments.from_offsets(offsets)
    first = "values" if op.takes_values else "data"
    numbers = (8, 0, 17) if op.takes_values else CANONICAL_DATA
    data = torch.tensor(numbers, dtype=torch.float32, device=device)
    size, why = (3, "one for each segment") if op.takes_values else (7, "as the segments do")
    name, cpu = op.name, data.is_cpu
    wrong: Any

    def error(id: str, exception: type, words: str, *args: Any, **kwargs: Any) -> ErrorSample:
        return ErrorSample(id, lambda: op.fn(*args, **kwargs), exception, f"^{name}: {words}")

    yield error("data_is_a_list", TypeError, f"{first} must be a torch.Tensor or a NumPy array, but got list", list(numbers), segments)
    yield error(
        "segments_is_a_list",
        TypeError,
        "segments must be a Segments, or offsets as a torch.Tensor or a NumPy array, but got list",
        data,
        list(CANONICAL_OFFSETS),
    )
    yield error(
        "data_without_dimensions", ValueError, f"{first} must have at least 1 dimension, but got 0", data[0], segments
    )
    yield error("dim_too_large", IndexError, r"dim must be in \[-2, 1\], but got 5", data[:, None], segments, dim=5)
    yield error("dim_too_small", IndexError, r"dim must be in \[-1, 0\], but got -2", data, segments, dim=-2)
    yield error("dim_is_a_string", TypeError, "dim must be an int, but got str", data, segments, dim="0")
    yield error("dim_is_a_float", TypeError, "dim must be an int, but got float", data, segments, dim=0.0)
    words = f"{first} must have {size} rows along dim 0, {why}, but got {size + 1}"
    yield error("one_row_too_many", ValueError, words, torch.cat((data, data[:1])), segments)
    words = f"{first} must have {size} rows along dim 1, {why}, but got {size - 1}"
    yield error("one_row_too_few", ValueError, words, data[None, :-1], segments, dim=-1)
    yield error(
        "complex_data",
        TypeError,
        f"{first} must be one of {', '.join(map(dtype_name, op.dtypes))}, but got complex64",
        data.to(torch.complex64),
        segments,
    )
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16):
        words = f"offsets must be int32 or int64, but got {dtype_name(dtype)}"
        yield error(f"offsets_of_{dtype_name(dtype)}", TypeError, words, data, offsets.to(dtype))
    yield error(
        "offsets_of_two_dimensions", ValueError, "offsets must have 1 dimension, but got 2", data, offsets[None]
    )
    yield error(
        "offsets_of_five_dimensions",
        ValueError,
        "offsets must have 1 dimension, but got 5",
        data,
        offsets.new_empty((5, 0, 0, 9, 2)),
    )
    yield error(
        "offsets_without_entries", ValueError, "offsets must have at least 1 entry, but got 0", data, offsets[:0]
    )
    if cpu:  # elsewhere bare offsets are not looked at
        words = "offsets must ascend from 0, but got 2 after 5 at position 2"
        yield error("offsets_descend", ValueError, words, data, offsets.new_tensor([0, 5, 2, 7]))
        words = "offsets must ascend from 0, but got 2 at position 0"
        yield error("offsets_start_late", ValueError, words, data, offsets.new_tensor([2, 3, 3, 7]))
    elsewhere = "meta" if cpu else "cpu"
    words = rf"segments must be on the device of {first} \({data.device}\), but got {elsewhere}; move one of them with .to\(device\)"
    yield error("segments_elsewhere", DeviceMismatchError, words, data, Segments.from_offsets(offsets.to(elsewhere)))
    words = rf"offsets must be on the device of {first} \({data.device}\), but got {elsewhere}; move one of them with .to\(device\)"
    yield error("offsets_elsewhere", DeviceMismatchError, words, data, offsets.to(elsewhere))
    if op.takes_values:
        yield error(
            "num_rows_differ",
            ValueError,
            "num_rows must be 7, as the segments say, but got 8",
            data,
            segments,
            num_rows=8,
        )
        yield error(
            "num_rows_is_a_float", TypeError, "num_rows must be an integer, but got float", data, segments, num_rows=7.0
        )
        return
    if op.dtypes == FLOATING and op.name != "segment_mean":
        words = "data must be one of float16, bfloat16, float32, float64, but got int64$"
        yield error("integer_data", TypeError, words, data.long(), segments)
    if op.name in ("segment_var", "segment_std"):
        for wrong in (-1, float("nan"), -float("inf")):
            words = f"correction must be at least 0, but got {wrong}"
            yield error(f"correction_{wrong}", ValueError, words, data, segments, correction=wrong)
        for wrong in ("1", None, True):
            words = f"correction must be a number, but got {kind(wrong)}"
            yield error(f"correction_is_{kind(wrong)}", TypeError, words, data, segments, correction=wrong)
    if op.name in SCANS:
        for option in ("exclusive", "reverse"):
            for wrong in (1, None, "yes"):
                words = f"{option} must be a bool, but got {kind(wrong)}"
                yield error(f"{option}_is_{kind(wrong)}", TypeError, words, data, segments, **{option: wrong})
    if op.name in ("segment_sum", "segment_mean", "segment_prod", "segment_cumsum", "segment_cumprod"):
        yield error(
            "dtype_is_a_string", TypeError, "dtype must be a torch.dtype, but got str", data, segments, dtype="float32"
        )
        yield error(
            "dtype_is_complex",
            TypeError,
            f"dtype must be one of {', '.join(map(dtype_name, op.dtypes))}, but got complex64",
            data,
            segments,
            dtype=torch.complex64,
        )
    if op.grouped:
        for wrong in (1, None, "yes"):
            words = f"descending must be a bool, but got {kind(wrong)}"
            yield error(f"descending_is_{kind(wrong)}", TypeError, words, data, segments, descending=wrong)
    if op.name == "segment_topk":
        yield error("k_is_negative", ValueError, "k must be at least 0, but got -1", data, segments, k=-1)
        yield error("k_too_large", ValueError, rf"k must be less than 2\*\*63, but got {2**63}", data, segments, k=2**63)
        for wrong in (1.0, True, "1", None):
            yield error(f"k_is_{kind(wrong)}", TypeError, f"k must be an integer, but got {kind(wrong)}", data, segments, k=wrong)
        words = "k must be an integer, but got float32 of 1 dimensions"
        yield error("k_is_a_tensor", TypeError, words, data, segments, k=torch.ones(1))
        for flag in ("largest", "sorted"):
            yield error(f"{flag}_is_an_int", TypeError, f"{flag} must be a bool, but got int", data, segments, **{flag: 1})
    if op.name == "segment_quantile":
        for wrong in (-0.1, 1.5, float("nan"), 2):
            words = rf"q must be in \[0, 1\], but got {wrong}$"
            yield error(f"q_{wrong}", ValueError, words, data, segments, q=wrong)
        for wrong in ([0.5], "0.5", None, True, 0.5j):
            words = f"q must be a number, a torch.Tensor or a NumPy array, but got {kind(wrong)}"
            yield error(f"q_is_{kind(wrong)}", TypeError, words, data, segments, q=wrong)
        many = torch.tensor([0.5, 1.5], device=device)
        if cpu:  # elsewhere they are not looked at
            words = r"q must be in \[0, 1\], but got "
            yield error("q_has_a_wrong_entry", ValueError, words + "1.5", data, segments, q=many)
            yield error("q_has_a_nan", ValueError, words + "nan", data, segments, q=many[1] * torch.nan)
        yield error("q_of_two_dimensions", ValueError, "q must have at most 1 dimension, but got 2", data, segments, q=many[None] / 2)
        words = "q must be one of float16, bfloat16, float32, float64, but got int64"
        yield error("q_of_integers", TypeError, words, data, segments, q=many.long())
        words = rf"q must be on the device of data \({data.device}\), but got {elsewhere}; move one of them with .to\(device\)"
        yield error("q_elsewhere", DeviceMismatchError, words, data, segments, q=many.to(elsewhere))
        words = "data must be one of float16, bfloat16, float32, float64, but got bool"
        yield error("bool_data", TypeError, words, data.bool(), segments)
        words = "interpolation must be one of linear, lower, higher, midpoint, nearest, but got "
        yield error("interpolation_is_unknown", ValueError, words + "cubic", data, segments, interpolation="cubic")
        yield error("interpolation_is_none", TypeError, words + "NoneType", data, segments, interpolation=None)
    if op.per_row:
        return
    if op.name in ("segment_any", "segment_all"):
        yield error(
            "fill_value_is_an_int", TypeError, "fill_value must be a bool, but got int", data, segments, fill_value=1
        )
    elif op.name in ("segment_argmax", "segment_argmin", "segment_nunique"):
        for wrong in (1.0, True, "1"):
            words = f"fill_value must be an int, but got {kind(wrong)}"
            yield error(f"fill_value_is_a_{kind(wrong)}", TypeError, words, data, segments, fill_value=wrong)
    else:
        yield error(
            "fill_value_is_a_string",
            TypeError,
            "fill_value must be a number, but got str",
            data,
            segments,
            fill_value="0",
        )
        yield error(
            "fill_value_is_a_tensor",
            TypeError,
            "fill_value must be a number, but got torch.Tensor",
            data,
            segments,
            fill_value=data[0],
        )
        yield error(
            "fill_value_too_large",
            ValueError,
            r"fill_value must fit in float32, but got 1e\+60",
            data,
            segments,
            fill_value=1e60,
        )
        if torch.int64 in op.dtypes:
            yield error(
                "fill_value_is_no_integer",
                ValueError,
                "fill_value must fit in int64, but got 0.5",
                data.long(),
                segments,
                fill_value=0.5,
            )
            yield error(
                "fill_value_is_nan",
                ValueError,
                "fill_value must fit in int64, but got nan",
                data.long(),
                segments,
                fill_value=float("nan"),
            )
    if op.name in ("segment_sum", "segment_mean"):
        weight, rows = torch.ones_like(data), torch.stack((data, data), 1)
        yield error("weight_is_a_list", TypeError, "weight must be a torch.Tensor or a NumPy array, but got list", data, segments, weight=[1.0] * 7)
        yield error("weight_is_a_number", TypeError, "weight must be a torch.Tensor or a NumPy array, but got float", data, segments, weight=2.0)
        words = r"weight must have the shape of data from dim 0 on, \[7\], but got \[6\]"
        yield error("weight_too_short", ValueError, words, rows, segments, weight=weight[:6])
        yield error("weight_of_one_row", ValueError, words.replace("6", "1"), rows, segments, weight=weight[:1])
        words = r"weight must have the shape of data from dim 0 on, \[7, 2\], but got \[7, 3\]"
        yield error("weight_of_other_heads", ValueError, words, rows, segments, weight=weight[:, None].expand(7, 3))
        words = r"weight must have the shape of data from dim 1 on, \[7\], but got \[2\]"
        yield error("weight_of_the_wrong_dim", ValueError, words, rows.t(), segments, dim=1, weight=weight[:2])
        words = "weight must have between 1 and 1 dimensions, but got "
        yield error("weight_of_two_dimensions", ValueError, words + "2", data, segments, weight=weight[:, None])
        yield error("weight_without_dimensions", ValueError, words + "0", data, segments, weight=weight[0])
        words = f"weight must be one of {', '.join(map(dtype_name, ALL_DTYPES))}, but got complex64"
        yield error("complex_weight", TypeError, words, data, segments, weight=weight.to(torch.complex64))
        words = rf"weight must be on the device of data \({data.device}\), but got {elsewhere}; move one of them with .to\(device\)"
        yield error("weight_elsewhere", DeviceMismatchError, words, data, segments, weight=weight.to(elsewhere))
        yield error("weighted_fill_value", ValueError, "fill_value must fit in float32, but got 1e\\+60", data, segments, weight=weight, fill_value=1e60)
        yield error("weighted_dtype", TypeError, "dtype must be a torch.dtype, but got str", data, segments, weight=weight, dtype="float32")
    if op.name == "segment_mean":
        yield error("integer_data_and_weight", TypeError, "data must be one of float16, bfloat16, float32, float64, but got int64; pass dtype=torch.float32", data.long(), segments, weight=weight.long())
        words = "data must be one of float16, bfloat16, float32, float64, but got int64; pass dtype=torch.float32"
        yield error("integer_data", TypeError, words, data.long(), segments)
        words = "dtype must be one of float16, bfloat16, float32, float64, but got int64"
        yield error("dtype_is_integer", TypeError, words, data, segments, dtype=torch.int64)
