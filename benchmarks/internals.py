"""Our own ways beside each other, and what no row of the registry says: skew, threads, dtypes, weights, tiny calls.

    python -m benchmarks.internals                       # everything, some minutes and 2 GB
    python -m benchmarks.internals --quick               # smaller, about a minute
    python -m benchmarks.internals --only skew,tiny

For one who changes a kernel. "times as long" is the time of `this` by that of `beside`, the medians of turns in one process; each
section says what is good.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

import fastops
from fastops import Segments, _timing, registry, testing
from fastops.errors import dtype_name

from . import base, report

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    elements: int = 2**24
    seconds: float = 1.0

    def rows(self, features: int) -> int:
        """Of one column there are fewer elements: each takes longer."""
        return self.elements // 4 if features == 1 else self.elements // features

    def data(self, features: int, kind: str = "dyadic", seed: int = 0) -> Tensor:
        rows = self.rows(features)
        return base.make_data(kind, (rows, features) if features > 1 else (rows,), torch.float32, seed)


def against(facts: Row, this: str, do_this: base.Work, beside: str, do_beside: base.Work, scale: Scale) -> Row:
    """Two calls that need not return the same."""
    taken = _timing.medians({"this": do_this, "beside": do_beside}, rounds=5, seconds=scale.seconds)
    quotient = report.times(taken["this"] / taken["beside"])
    return {**facts, "this": this, "ms": report.ms(taken["this"]), "beside": beside, "its ms": report.ms(taken["beside"]), "times as long": quotient}


def contest(facts: Row, ours: base.Work, others: dict[str, base.Work], scale: Scale) -> Row:
    """Ours and others, which must return the same."""
    found = base.Contest(ours, others, ours(), torch.float32, seconds=scale.seconds).run()
    wrong = "; ".join(f"{name}: {why}" for name, why in found.left_out.items())
    taken, best = found.seconds, found.best_peer
    if not best:
        return {**facts, "this": base.OURS, "ms": report.ms(taken[base.OURS]), "beside": wrong, "its ms": "", "times as long": ""}
    quotient = report.times(taken[base.OURS] / taken[best])
    return {**facts, "this": base.OURS, "ms": report.ms(taken[base.OURS]), "beside": best, "its ms": report.ms(taken[best]), "times as long": quotient}


# Sections: each yields rows of a table. ------------------------------------------------------------------------------------

# What each operation is given beside one giant segment, and the data it is about.
SKEWED = {
    "segment_sum": ("dyadic", (1, 64)),
    "segment_amax": ("dyadic", (1, 64)),
    "segment_logsumexp": ("normal", (16, 64)),
    "segment_var": ("normal", (16, 64)),
    "segment_softmax": ("normal", (8,)),
    "segment_sort": ("normal", (1, 64)),
    "segment_topk": ("normal", (1, 16)),
    "segment_median": ("normal", (1, 16)),
    "segment_quantile": ("normal", (1, 16)),
}


def skew(scale: Scale) -> Iterator[Row]:
    """One segment with 95 % of the rows beside even ones. Good: 1.5, of sorting and selecting 2."""
    for name, (kind, widths) in SKEWED.items():
        for features in widths:
            data, run = scale.data(features, kind), registry.find(name).fn
            even, odd = base.even(50)(len(data)), base.skewed(50)(len(data))
            yield against({"operation": name, "D": features}, "giant", lambda: run(data, odd), "even", lambda: run(data, even), scale)


def kinds(scale: Scale) -> Iterator[Row]:
    """Operations beside simpler ones that read the same. Good: amax 1.2, logsumexp and var 1.6, scans 1.5."""
    pairs = (
        ("segment_amax", "segment_sum"),
        ("segment_logsumexp", "segment_amax"),
        ("segment_var", "segment_amax"),
        ("segment_cumprod", "segment_cumsum"),
        ("segment_cummax", "segment_cumsum"),
        ("segment_logcumsumexp", "segment_cumsum"),
    )
    for features in (1, 16, 64):
        data = scale.data(features, "normal")
        for mean in (2, 16, 256):
            segments = base.even(mean, shortest=1)(len(data))
            for this, beside in pairs:
                one, other = registry.find(this).fn, registry.find(beside).fn
                yield against({"D": features, "mean length": mean}, this, lambda: one(data, segments), beside, lambda: other(data, segments), scale)


def one_segment(scale: Scale) -> Iterator[Row]:
    """All rows in one segment, beside torch over the same array. Good: 1.5 of cumsum, 1 of sort and sum."""
    data = base.make_data("normal", (scale.rows(1),), torch.float32)
    segments = Segments.from_lengths(torch.tensor([data.numel()]))
    yield against({}, "segment_cumsum", lambda: fastops.segment_cumsum(data, segments), "cumsum", lambda: data.cumsum(0), scale)
    yield against({}, "segment_sort", lambda: fastops.segment_sort(data, segments), "sort", lambda: data.sort(), scale)
    yield against({}, "segment_sum", lambda: fastops.segment_sum(data, segments), "sum", lambda: data.sum(), scale)


def dtypes(scale: Scale) -> Iterator[Row]:
    """16-bit data beside float32. Good: 0.75 of sum, 1 of softmax."""
    for run, features in ((fastops.segment_sum, 64), (fastops.segment_sum, 256), (fastops.segment_softmax, 8)):
        data = scale.data(features)
        segments = base.even(16)(len(data))
        for dtype in (torch.float16, torch.bfloat16):
            short = data.to(dtype)
            facts = {"operation": run.__name__, "D": features}
            yield against(facts, dtype_name(dtype), lambda: run(short, segments), "float32", lambda: run(data, segments), scale)


def threads(scale: Scale) -> Iterator[Row]:
    """One thread beside two. Good: 1.6."""
    before = torch.get_num_threads()

    def with_threads(number: int, work: base.Work) -> Any:
        torch.set_num_threads(number)
        return work()

    try:
        for name in ("segment_sum", "segment_amax", "segment_softmax", "segment_sort"):
            run = registry.find(name).fn
            for features in (1, 16, 64):
                data = scale.data(features, "normal")
                segments = base.even(16)(len(data))
                work = lambda: run(data, segments)  # noqa: E731
                facts = {"operation": name, "D": features}
                yield against(facts, "1 thread", lambda: with_threads(1, work), "2 threads", lambda: with_threads(2, work), scale)
    finally:
        torch.set_num_threads(before)


def order(scale: Scale) -> Iterator[Row]:
    """Sums of rows in any order beside rows in order (good: 2), and with the grouping made for one sum beside index_add (good: 1)."""
    for features in (16, 64):
        data = scale.data(features)
        for mean in (2, 16, 256):
            in_order, mixed = (make(len(data)) for make in (base.even(mean, shortest=1), base.any_order(base.even(mean, shortest=1))))
            index, size, facts = mixed.index, mixed.num_segments, {"D": features, "mean length": mean}
            yield against(facts, "any order", lambda: fastops.segment_sum(data, mixed), "in order", lambda: fastops.segment_sum(data, in_order), scale)
            others = {"index_add": lambda: data.new_zeros(size, features).index_add(0, index, data)}
            yield contest(facts, lambda: fastops.segment_sum(data, Segments.from_index(index, size)), others, scale)


def weighted(scale: Scale) -> Iterator[Row]:
    """Attention pooling: [N, heads, features] in segments of 50 rows, each head with a weight, beside the product and then
    index_add, and beside our own sum of the product. Good: 0.3."""
    for heads, features in ((8, 8), (1, 64), (64, 1), (4, 32)):
        flat = scale.data(heads * features)
        data = flat.reshape(len(flat), heads, features).requires_grad_()
        segments = base.even(50)(len(flat))
        weight = testing.make_data((len(flat), heads), torch.float32, seed=1).requires_grad_()
        grad = testing.make_data((segments.num_segments, heads, features), torch.float32, seed=2)
        ours = lambda: fastops.segment_sum(data, segments, weight=weight)  # noqa: E731
        others: dict[str, base.Work] = {
            "product, index_add": lambda: grad.new_zeros(grad.shape).index_add(0, segments.index, data * weight.unsqueeze(-1)),
            "product, segment_sum": lambda: fastops.segment_sum(data * weight.unsqueeze(-1), segments),
        }
        back: Callable[[base.Work], base.Work] = lambda way: lambda: torch.autograd.grad(way(), (data, weight), grad)  # noqa: E731
        facts = {"heads": heads, "features": features}
        with torch.no_grad():
            yield contest({**facts, "direction": "forward"}, ours, others, scale)
        yield contest({**facts, "direction": "and backward"}, back(ours), {name: back(way) for name, way in others.items()}, scale)


def tiny(scale: Scale) -> Iterator[Row]:
    """A call on 16 x 4 elements in 4 segments, beside index_add to fresh zeros. Good: 1."""
    index = torch.arange(4).repeat_interleave(4)
    segments, grad = Segments.from_index(index), torch.ones(4, 4)
    for requires_grad in (False, True):
        data = base.make_data("dyadic", (16, 4), torch.float32).requires_grad_(requires_grad)
        ours = lambda: fastops.segment_sum(data, segments)  # noqa: E731
        other = lambda: torch.zeros(4, 4).index_add(0, index, data)  # noqa: E731
        yield contest({"call": "forward", "requires_grad": requires_grad}, ours, {"index_add": other}, scale)
    back: Callable[[base.Work], base.Work] = lambda way: lambda: torch.autograd.grad(way(), data, grad)  # noqa: E731
    yield contest({"call": "and backward", "requires_grad": True}, back(ours), {"index_add": back(other)}, scale)


SECTIONS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    section.__name__: section for section in (skew, kinds, one_segment, dtypes, threads, order, weighted, tiny)
}


def main(arguments: Optional[list] = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.internals", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller data")
    parser.add_argument("--only", help=f"some of the sections: {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=2, help="of everything but the section threads, 2 by default")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--only: sections must be among {','.join(SECTIONS)}, but got {unknown[0]}")
    base.set_threads(options.threads)
    facts = base.machine()
    print(f"{facts['processor']}, {facts['threads']} threads, {facts['kernels']} kernels, torch {facts['torch']}")
    scale = Scale(2**20, 0.1) if options.quick else Scale()
    for name in chosen:
        rows = list(SECTIONS[name](scale))
        print(f"\n**{name}**: {' '.join(SECTIONS[name].__doc__.split())}\n")
        print(report.markdown(list(rows[0]), [list(row.values()) for row in rows]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
