"""Whether moving data to the GPU pays, measured where it is asked: `measure`, and `python -m fastops copy-cost`.

What is compared with the kernel on the CPU is the kernel on CUDA when the data is there already, when data and segments have to be
copied there and the result back (from ordinary, "pageable" memory or from pinned memory, one after the other), and when copies and
kernels overlap (`fastops.offload`). What was not measured is None. Break-even sizes lie between sizes that were.

>>> times = [Times(rows, 10, 4 * rows, cpu=rows * 1e-9, cuda=1e-5, copy_pageable=1.0, copy_pinned=1.0, copy_back=0.0)
...          for rows in (1_000, 100_000)]
>>> summary = PlacementReport.of("segment_sum", times, device="cuda:0, a GPU", threads=1)
>>> str(summary.there), str(summary.pageable), summary.pays_after_pageable
('from 10,000 rows (40.0 kB) on', 'at no size that was measured', 11112)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import numbers
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from . import _timing, registry, testing
from ._native import build_info
from ._offload import _Call, find_device, offload
from .errors import kind, sentence
from .segments import Segments, _integer

__all__ = ["BreakEven", "PlacementReport", "Times", "draw", "measure"]

_NAME = "measure"

# Sizes that are measured unless it is said: all rows, and so many times a fourth of them.
FOURTHS = 4
# Seconds that are spent on one number, unless a single call takes longer.
SECONDS = 0.3

WIDTH = 100  # of what is printed


@dataclass(frozen=True)
class Times:
    """Seconds, medians, for one size. None is what was not measured.

    rows, segments: how many.
    bytes: of the data, and of the weight where there is one.
    cpu, cuda: the operation, the data being there.
    copy_pageable, copy_pinned: data and segments from host memory to the GPU.
    copy_back: the result from there to host memory.
    overlapped: `fastops.offload`, all of it, from host memory and back.
    """

    rows: int
    segments: int
    bytes: int
    cpu: float
    cuda: Optional[float] = None
    copy_pageable: Optional[float] = None
    copy_pinned: Optional[float] = None
    copy_back: Optional[float] = None
    overlapped: Optional[float] = None

    @property
    def with_pageable(self) -> Optional[float]:
        """There, the operation, and back."""
        return _sum(self.copy_pageable, self.cuda, self.copy_back)

    @property
    def with_pinned(self) -> Optional[float]:
        return _sum(self.copy_pinned, self.cuda, self.copy_back)


@dataclass(frozen=True)
class BreakEven:
    """The size from which on the GPU stays faster than the CPU.

    verdict: `from` a size between two that were measured; `always` or `never`, in what was measured; `unknown` without a GPU.
    rows, bytes: that size, interpolated between logarithms of sizes and times; None for other verdicts.
    """

    verdict: str
    rows: Optional[float] = None
    bytes: Optional[float] = None

    def __str__(self) -> str:
        if self.rows is None or self.bytes is None:
            words = {"always": "at every size that was measured", "never": "at no size that was measured"}
            return words.get(self.verdict, "unknown")
        return f"from {_round(self.rows):,} rows ({_as_bytes(self.bytes)}) on"


@dataclass(frozen=True)
class PlacementReport:
    """What was measured of one operation, and what follows from it.

    op: its name.
    device: the CUDA device, with its name; None if there is none.
    missing: then, why.
    threads: of the CPU.
    times: for each size, the smallest first; the last is the whole of the data.
    there, pageable, pinned, overlapped: from which size on the GPU is faster if the data is there already; if it has to be
        copied from pageable or from pinned memory, and the result back; if copies and kernels overlap.
    pays_after_pageable, pays_after_pinned: operations on the whole of the data, each as long as this one, after which one copy of it
        there, and of one result back, has paid for itself. None if it never does, or without a GPU.
    advice: all that in a sentence.
    """

    op: str
    device: Optional[str]
    missing: str
    threads: int
    times: tuple[Times, ...]
    there: BreakEven
    pageable: BreakEven
    pinned: BreakEven
    overlapped: BreakEven
    pays_after_pageable: Optional[int]
    pays_after_pinned: Optional[int]
    advice: str

    @staticmethod
    def of(
        op: str, times: Sequence[Times], *, device: Optional[str] = None, missing: str = "", threads: int
    ) -> PlacementReport:
        """What follows from times, in any order."""
        ascending = tuple(sorted(times, key=lambda one: one.rows))
        there, pageable, pinned, overlapped = (
            _break_even(ascending, seconds)
            for seconds in (
                lambda one: one.cuda,
                lambda one: one.with_pageable,
                lambda one: one.with_pinned,
                lambda one: one.overlapped,
            )
        )
        known = [one for one in ascending if one.with_pageable is not None]
        after_pageable, after_pinned = (
            _operations(known[-1], copy(known[-1])) if known else None
            for copy in (lambda one: one.copy_pageable, lambda one: one.copy_pinned)
        )
        report = PlacementReport(
            op, device, missing, threads, ascending, there, pageable, pinned, overlapped, after_pageable, after_pinned, ""
        )
        return dataclasses.replace(report, advice=_advice(report, known[-1] if known else ascending[-1]))

    def __str__(self) -> str:
        where = self.device or f"no CUDA device: {self.missing}"
        heading = f"{'rows':>11} {'data':>8} {'CPU':>9} {'CUDA':>9} {'copy':>9} {'pinned':>9} {'back':>9} {'overlapped':>10}"
        lines = [f"{self.op}: {self.threads} threads of the CPU, and {where}", heading]
        for one in self.times:
            copies = (one.cuda, one.copy_pageable, one.copy_pinned, one.copy_back)
            columns = " ".join(f"{_as_seconds(seconds):>9}" for seconds in (one.cpu, *copies))
            lines.append(f"{one.rows:>11,} {_as_bytes(one.bytes):>8} {columns} {_as_seconds(one.overlapped):>10}")
        if self.device is None:
            lines.append("What stands as - needs a GPU, and so does what follows from it.")
        else:
            lines += [
                "The GPU is faster",
                f"- where the data is there already: {self.there}",
                f"- with a copy there and back: {self.pageable}",
                f"- the same from pinned memory: {self.pinned}",
                f"- where copies and kernels overlap (fastops.offload): {self.overlapped}",
                f"One copy has paid after {_as_count(self.pays_after_pageable)} (pinned: {_as_count(self.pays_after_pinned)}).",
            ]
        return "\n".join([*lines, textwrap.fill(self.advice, WIDTH)])


# ---- what follows from times ----


def _sum(*seconds: Optional[float]) -> Optional[float]:
    return None if None in seconds else sum(seconds)  # type: ignore[arg-type]


def _break_even(times: Sequence[Times], seconds: Callable[[Times], Optional[float]]) -> BreakEven:
    known = [(one, math.log(one.cpu / there)) for one in times if (there := seconds(one)) is not None]
    if not known:
        return BreakEven("unknown")
    losses = [number for number, (_, gain) in enumerate(known) if gain <= 0]
    if not losses:
        return BreakEven("always")
    if losses[-1] == len(known) - 1:
        return BreakEven("never")
    (below, loss), (above, gain) = known[losses[-1]], known[losses[-1] + 1]
    share = -loss / (gain - loss)

    def between(a: int, b: int) -> float:
        return a * (b / a) ** share

    return BreakEven("from", between(below.rows, above.rows), between(below.bytes, above.bytes))


def _operations(times: Times, copy: Optional[float]) -> Optional[int]:
    copies = _sum(copy, times.copy_back)
    if copies is None or times.cuda is None or times.cpu <= times.cuda:
        return None
    return math.ceil(copies / (times.cpu - times.cuda))


def _advice(report: PlacementReport, whole: Times) -> str:
    op, rows = report.op, f"{whole.rows:,} rows"
    if report.there.verdict == "unknown":
        return (
            f"Only the CPU was measured, where {op} of {rows} takes {_as_seconds(whole.cpu)}: whether a GPU would pay, only a "
            f"computer with one can tell."
        )
    if report.there.verdict == "never":
        return f"Leave {op} on the CPU: up to {rows} the GPU takes longer, even if the data is there already."
    if report.pageable.verdict in ("from", "always"):
        return (
            f"Move the data to the GPU {_words(report.pageable)}, even for a single {op}: there it is so much faster that the copy "
            f"pays."
        )
    copies = (whole.copy_pageable or 0.0) + (whole.copy_back or 0.0)
    text = (
        f"If the data is there already, use the GPU for {op} {_words(report.there)}, but do not move it there for a single one: "
        f"copying {rows} takes {copies / whole.cpu:.1f} times as long as the whole operation takes on the CPU"
    )
    if report.pays_after_pageable is not None:
        text += f", and has paid after {_as_count(report.pays_after_pageable)} on the same data"
    if report.pinned.verdict in ("from", "always"):
        text += f" (from pinned memory even a single one pays {_words(report.pinned)})"
    return text + "."


def _words(where: BreakEven) -> str:
    return str(where) if where.verdict == "from" else "at any size that was measured"


# ---- measuring ----


def measure(
    op: Union[str, registry.Op, Callable[..., Any]],
    data: Any,
    segments: Union[Segments, Tensor],
    *,
    device: Any = None,
    rows: Optional[Sequence[int]] = None,
    seconds: float = SECONDS,
    **kwargs: Any,
) -> PlacementReport:
    """How long an operation takes on the CPU and on a GPU, what the copies between them cost, and so where it should run.

    Args:
        op: any operation of this package: `segment_sum`, its name, or a `functools.partial` of it.
        data: what the operation takes, in host memory: a tensor or an array.
        segments: `S` segments, or offsets `[S + 1]`, on the CPU.
        device: the CUDA device; None for the current one, or for none if there is none that this build has kernels for.
        rows: the sizes to measure, each the first segments with about so many rows; None for all rows, a fourth, a
            sixteenth and so on. Each is at least the first segment that has rows, at most all of them.
        seconds: that are spent on one number at most, unless a single call takes longer. Above 0, and finite.
        kwargs: what the operation takes beside.

    Only the operation is timed, not its gradient.

    Returns:
        A `PlacementReport`. `print` shows it as a table with a sentence of advice. Without a GPU, what needs one is None.

    Rules:
        Times are medians of calls after a first one. Data that fits in a cache is read from there, as it is by a program that uses
        it twice. Where the memory of the GPU does not hold a size, only what overlaps is measured of it.

    Raises:
        TypeError, ValueError, IndexError: as the operation, before anything is measured; or there are no rows, or no sizes.
        RuntimeError: the device is not there.

    Example:
        >>> report = measure(segment_sum, data, segments)   # doctest: +SKIP
        >>> report.advice                                   # doctest: +SKIP
    """
    device, missing = _find_device(device)
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(sentence(_NAME, "seconds", "be a number", kind(seconds)))
    if not _can_pass(seconds):
        raise ValueError(sentence(_NAME, "seconds", "be above 0 and finite", seconds))
    with torch.no_grad():
        call = _Call(op, data, segments, kwargs)
        whole = _Input(call.op, call.data, call.segments, call.dim, call.weight)
        parts = (whole.of_first(count) for count in whole.sizes(rows))
        times = [_measure_one(call.function, part, call.options, device, seconds) for part in parts]
    described = f"{device}, {torch.cuda.get_device_name(device)}" if device is not None else None
    return PlacementReport.of(call.op.name, times, device=described, missing=missing, threads=torch.get_num_threads())


def _can_pass(seconds: Any) -> bool:
    try:
        return 0 < float(seconds) < math.inf
    except OverflowError:
        return False


def _find_device(device: Any) -> tuple[Optional[torch.device], str]:
    """The CUDA device, or None and why there is none."""
    missing = ""
    if not torch.cuda.is_available():
        missing = "torch sees none"
    elif not build_info()["cuda"]:
        missing = "this build of fastops has no CUDA kernels"
    if device is None:
        return (None, missing) if missing else (torch.device("cuda", torch.cuda.current_device()), "")
    device = find_device(_NAME, device, ("cuda",), "be a CUDA device", "the CPU is always measured")
    if missing:
        raise RuntimeError(sentence(_NAME, "device", "be there", f"{device}, and {missing}"))
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device, ""


@dataclass(frozen=True)
class _Input:
    """What an operation is called with."""

    op: registry.Op
    data: Tensor
    segments: Segments
    dim: int
    weight: Optional[Tensor] = None

    def sizes(self, rows: Optional[Sequence[int]]) -> list[int]:
        """Numbers of segments, ascending."""
        offsets, total = self.segments.offsets.numpy(), int(self.segments.offsets[-1])
        if rows is None:
            rows = [max(total >> 2 * fourth, 1) for fourth in range(FOURTHS + 1)]
        elif not isinstance(rows, (list, tuple)):
            raise TypeError(sentence(_NAME, "rows", "be a list of integers", kind(rows)))
        wanted = [_integer(_NAME, "rows", number) for number in rows]
        if not wanted:
            raise ValueError(sentence(_NAME, "rows", "name at least one size", "none"))
        if min(wanted) < 1:
            raise ValueError(sentence(_NAME, "rows", "be at least 1", min(wanted)))
        if total == 0:
            raise ValueError(sentence(_NAME, "segments", "have rows", f"none in {self.segments.num_segments} segments"))
        fewest = np.searchsorted(offsets, 0, side="right")  # those that have any rows
        counts = np.searchsorted(offsets, [min(number, total) for number in wanted], side="right") - 1
        return sorted(set(np.maximum(counts, fewest).tolist()))

    def of_first(self, count: int) -> _Input:
        """The first segments, and their rows in the order in which they stand."""
        whole, offsets = self.segments, self.segments.offsets
        if count == whole.num_segments:
            return self
        if whole.order is None:
            segments, rows = Segments.from_offsets(offsets[: count + 1]), slice(0, int(offsets[count]))
            take = lambda tensor, dim: tensor.narrow(dim, 0, rows.stop)  # noqa: E731
        else:
            chosen = whole.order[: int(offsets[count])].sort().values
            segments = Segments.from_index(whole.index[chosen.long()], count)
            take = lambda tensor, dim: tensor.index_select(dim, chosen)  # noqa: E731
        data = self.data.narrow(self.dim, 0, count) if self.op.takes_values else take(self.data, self.dim)
        weight = None if self.weight is None else take(self.weight, 0)
        return _Input(self.op, data.contiguous(), segments, self.dim, weight)

    def map(self, function: Callable[[Any], Any]) -> _Input:
        weight = None if self.weight is None else function(self.weight)
        return _Input(self.op, function(self.data), function(self.segments), self.dim, weight)

    @property
    def num_bytes(self) -> int:
        weight = 0 if self.weight is None else self.weight.numel() * self.weight.element_size()
        return self.data.numel() * self.data.element_size() + weight

    def arguments(self) -> dict[str, Any]:
        return {"dim": self.dim} if self.weight is None else {"dim": self.dim, "weight": self.weight}


def _measure_one(
    function: Callable[..., Any], here: _Input, options: dict[str, Any], device: Optional[torch.device], seconds: float
) -> Times:
    def median(work: Callable[[], Any], clock: Any = "cpu") -> float:
        return _timing.medians({"": work}, clock, seconds=seconds / 2, limit=seconds)[""]

    def call(where: _Input, options: dict[str, Any]) -> Any:
        return function(where.data, where.segments, **where.arguments(), **options)

    times = Times(
        here.segments.num_rows, here.segments.num_segments, here.num_bytes, cpu=median(lambda: call(here, options))
    )
    if device is None:
        return times
    try:
        with torch.cuda.device(device):
            pinned, there = here.map(lambda part: part.pin_memory()), here.map(lambda part: part.to(device))
            of_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
            result = call(there, of_device)
            results = result if isinstance(result, tuple) else (result,)
            times = dataclasses.replace(
                times,
                cuda=median(lambda: call(there, of_device), device),
                copy_pageable=median(lambda: here.map(lambda part: part.to(device)), device),
                copy_pinned=median(lambda: pinned.map(lambda part: part.to(device, non_blocking=True)), device),
                copy_back=median(lambda: [one.cpu() for one in results], device),
            )
            del pinned, there, result, results
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    try:
        work = lambda: offload(function, here.data, here.segments, device=device, progress=False, **here.arguments(), **options)  # noqa: E731
        return dataclasses.replace(times, overlapped=median(work))
    except ValueError as error:
        if "max_bytes" not in str(error):
            raise
        return times  # a segment that is too large for a chunk


# ---- words and numbers ----


def _round(number: float) -> int:
    """To three digits: an interpolation has no more."""
    digits = 3 - len(str(int(number)))
    return int(round(number, digits))


def _as_seconds(seconds: Optional[float]) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _as_bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def _as_count(operations: Optional[int]) -> str:
    if operations is None:
        return "no number of operations"
    return "one operation" if operations == 1 else f"{operations:,} operations"


# ---- python -m fastops copy-cost ----

# Rows that are measured: 256 kB to 256 MB of float32 by default.
ROWS = (1_000, 10_000, 100_000, 1_000_000)
FEATURES = 64
LONGEST = 32  # rows of a segment, which has half as many on average; some have none

LEGEND = (
    "Medians. CPU, CUDA: the operation, where the data is there already. copy: data and segments to the GPU, from ordinary "
    "memory; pinned: from pinned memory. back: the result to the CPU. overlapped: all of that by fastops.offload. "
    "Data: float32, rows of {features} elements in segments of 0 to {longest} rows."
)


def add_copy_cost(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """measure what copies to the GPU cost beside each operation, and from which size on they pay"""
    parser.add_argument("--ops", nargs="+", metavar="OP", default=None, help="names of operations (default: all)")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="ROWS", default=ROWS, help="numbers of rows")
    parser.add_argument("--features", type=int, default=FEATURES, help="float32 elements of a row")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one number may take")
    parser.add_argument("--png", metavar="FILE", help="draw time over size (needs matplotlib)")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of tables")

    def run(parsed: argparse.Namespace) -> int:
        names = {op.name for op in registry.OPS}
        for name in parsed.ops or ():
            if name not in names and f"segment_{name}" not in names:
                parser.error(f"there is no operation {name}")
        if min(parsed.sizes) < 1 or parsed.features < 1:
            parser.error("sizes and features must be at least 1")
        if max(parsed.sizes) * parsed.features * torch.float32.itemsize > _memory():
            parser.error("the data of the largest size must fit in the memory of this computer")
        if not _can_pass(parsed.seconds):
            parser.error("seconds must be above 0 and finite")
        if parsed.png and (reason := _why_not_drawn(parsed.png)):
            parser.error(reason)
        return copy_cost(parsed.ops, parsed.sizes, parsed.features, parsed.seconds, parsed.png, getattr(parsed, "json", False))

    return run


def _memory() -> int:
    """Bytes of it that this computer has, as far as it says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def copy_cost(
    names: Optional[Sequence[str]], sizes: Sequence[int], features: int, seconds: float, png: Optional[str], as_json: bool
) -> int:
    ops = [op for op in registry.OPS if names is None or op.name in names or op.name.removeprefix("segment_") in names]
    lengths = torch.randint(0, LONGEST + 1, (2 * max(sizes) // LONGEST + 1,), generator=testing.make_generator(), device="cpu")
    segments = Segments.from_lengths(lengths)
    if not as_json:
        print(textwrap.fill(LEGEND.format(features=features, longest=LONGEST), WIDTH), end="\n\n")
    reports = []
    for op in ops:
        count = segments.num_segments if op.takes_values else segments.num_rows
        some = testing.make_data((min(count, 10_000), features), torch.float32, kind=op.data_kind)
        data = some.repeat(-(-count // some.size(0)), 1)[:count].contiguous()
        reports.append(measure(op, data, segments, rows=list(sizes), seconds=seconds))
        if not as_json:
            print(f"{reports[-1]}\n", flush=True)
    if as_json:
        print(json.dumps({"build": build_info(), "reports": [dataclasses.asdict(report) for report in reports]}, indent=2))
    if png:
        draw(reports, png)
    return 0


def draw(reports: Sequence[PlacementReport], path: Any) -> None:
    """A picture for each report, in one file: seconds over bytes of data, with the sizes from which on the GPU is faster.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns = min(len(reports), 3)
    rows = -(-len(reports) // columns)
    figure = _figure(figsize=(5.2 * columns, 4 * rows), layout="constrained")
    for number, report in enumerate(reports):
        axes = figure.add_subplot(rows, columns, number + 1, xscale="log", yscale="log")
        _draw_one(axes, report)
        if number == 0:
            axes.legend(fontsize="x-small")
    figure.suptitle(f"{reports[0].threads} threads of the CPU, and {reports[0].device or 'no CUDA device'}", fontsize="medium")
    figure.savefig(path, dpi=110)


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("draw: matplotlib must be installed, but it is not; pip install matplotlib") from None
    return Figure(**options)


def _why_not_drawn(path: str) -> str:
    """What will keep `draw` from writing a picture there, as far as it can be told before: "" for nothing."""
    try:
        formats = _figure().canvas.get_supported_filetypes()
    except ImportError as error:
        return str(error)
    suffix = Path(path).suffix[1:].lower()
    if suffix and suffix not in formats:
        return f"a picture must be one of {', '.join(sorted(formats))}, but {path} is none"
    target = Path(path) if suffix else Path(f"{path}.png")  # as matplotlib does
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        return f"{target} cannot be written"
    return ""


_LINES: tuple[tuple[str, str, Callable[[Times], Optional[float]]], ...] = (
    ("kernel on the CPU", "C0-o", lambda one: one.cpu),
    ("kernel on CUDA", "C2-o", lambda one: one.cuda),
    ("copy to the GPU", "C3--s", lambda one: one.copy_pageable),
    ("the same, pinned", "C1--s", lambda one: one.copy_pinned),
    ("copy of the result back", "C4:^", lambda one: one.copy_back),
    ("copy, kernel, copy", "C5-", lambda one: one.with_pageable),
    ("the same, overlapped", "C6-", lambda one: one.overlapped),
)


def _draw_one(axes: Any, report: PlacementReport) -> None:
    for label, style, seconds in _LINES:
        points = [(one.bytes, value) for one in report.times if (value := seconds(one)) is not None]
        if points:
            axes.plot(*zip(*points), style, label=label, markersize=3.5, linewidth=1.2)
    for label, where, colour in (("there", report.there, "C2"), ("copied", report.pageable, "C5"), ("pinned", report.pinned, "C1")):
        if where.bytes is not None:
            axes.axvline(where.bytes, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
            note = f" {label}: {_as_bytes(where.bytes)}"
            axes.annotate(note, (where.bytes, 0.02), xycoords=("data", "axes fraction"), fontsize="x-small", rotation=90)
    axes.set(title=report.op, xlabel="bytes of data", ylabel="seconds")
    axes.grid(alpha=0.3)
