"""Reductions, softmax and sorting on the CPU beside what else does the same work: prints tables in Markdown.

    python benchmarks/cpu_reduce.py            # everything, about ten minutes and 4 GB
    python benchmarks/cpu_reduce.py --quick    # fewer and smaller cases, about one minute
    python benchmarks/cpu_reduce.py --only long,tiny

All ways to do the same work are checked against each other first, on numbers whose sums are exact, and then take turns
in one process; a time is the median of its turns. A peer that takes more than three times as long as the best is timed once.

`read` is `data.sum()` over the same bytes: what reading them costs. The share of it that an operation reaches counts the bytes
of the operation that have to move, input and output, per second, against those of `read`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import fastops
from fastops import Segments, _timing, registry, testing

try:
    import torch_scatter
except ImportError:
    torch_scatter = None

Ways = dict[str, Callable[[], Any]]

OPERATIONS = ("segment_sum", "segment_mean", "segment_amax", "segment_amin")
# What the same reduction is called by embedding_bag, scatter_reduce, and segment_reduce and torch_scatter.
NAMES = {
    "segment_sum": ("sum", "sum", "sum"),
    "segment_mean": ("mean", "mean", "mean"),
    "segment_amax": ("max", "amax", "max"),
    "segment_amin": (None, "amin", "min"),
}
SLOW = 3  # times the best peer


class Scale:
    """How much is measured."""

    def __init__(self, quick: bool) -> None:
        self.rows = 200_000 if quick else 1_000_000
        self.rows_scalar = 1_000_000 if quick else 4_000_000
        self.features = (16, 64) if quick else (16, 64, 256)
        self.lengths = (2, 16) if quick else (2, 16, 256)
        self.seconds = 0.3 if quick else 1.0


# Inputs --------------------------------------------------------------------------------------------------------------


def make_rows(rows: int, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[rows, features]`, or `[rows]` for one feature: dyadic numbers, few of them, repeated."""
    some = testing.make_data((min(rows, 10_000), features), dtype)
    data = some.repeat(-(-rows // some.size(0)), 1)[:rows].contiguous()
    return data[:, 0] if features == 1 else data


def uneven(rows: int, mean_length: int) -> Segments:
    """Segments of 1 to twice the mean length: peers disagree on empty ones."""
    generator = testing.make_generator()
    lengths = torch.randint(1, 2 * mean_length, (rows // mean_length + rows // 8 + 2,), generator=generator)
    ends = lengths.cumsum(0)
    ends = ends[ends < rows]
    return Segments.from_offsets(torch.cat((ends.new_zeros(1), ends, ends.new_tensor([rows]))))


def skewed(rows: int, mean_length: int) -> Segments:
    """One segment with 95 % of the rows, among others."""
    some = uneven(rows // 20, mean_length).lengths
    half = some.numel() // 2
    giant = some.new_tensor([rows - int(some.sum())])
    return Segments.from_lengths(torch.cat((some[:half], giant, some[half:])))


# Ways to do the same -------------------------------------------------------------------------------------------------


def peers(op: str, data: Tensor, segments: Segments, needs_grad: bool = False) -> Ways:
    """Rows in order, no segment empty."""
    bag, scatter, plain = NAMES[op]
    offsets, index, size = segments.offsets, segments.index, segments.num_segments
    shape = (size, *data.shape[1:])
    lengths = segments.lengths.to(data.dtype).reshape(-1, *[1] * (data.dim() - 1))
    ways: Ways = {}
    if bag is not None:
        table = data if data.dim() == 2 else data[:, None]
        kinds = (torch.int64,) if needs_grad else (torch.int64, torch.int32)
        for kind in kinds:
            rows, starts = torch.arange(data.size(0), dtype=kind), offsets.to(kind)

            def embedding_bag(rows: Tensor = rows, starts: Tensor = starts) -> Tensor:
                return F.embedding_bag(rows, table, starts, mode=bag, include_last_offset=True).reshape(shape)

            ways["embedding_bag" if kind == torch.int64 else "embedding_bag int32"] = embedding_bag
    if op == "segment_sum":
        ways["index_add"] = lambda: data.new_zeros(shape).index_add(0, index, data)
    elif op == "segment_mean":
        ways["index_add"] = lambda: data.new_zeros(shape).index_add(0, index, data) / lengths
    expanded = index.reshape(-1, *[1] * (data.dim() - 1)).expand_as(data)
    ways["scatter_reduce"] = lambda: data.new_zeros(shape).scatter_reduce(0, expanded, data, scatter, include_self=False)
    # unsafe leaves out a check of the arguments, which is not the work.
    ways["segment_reduce"] = lambda: torch.segment_reduce(data, plain, offsets=offsets, axis=0, unsafe=True)
    if torch_scatter is not None:
        ways["torch_scatter"] = lambda: torch_scatter.segment_csr(data, offsets, reduce=plain)
    return ways


def race(op: str, ours: Callable[[], Any], others: Ways, seconds: float, extra: Optional[Ways] = None) -> dict:
    """Seconds of each way, after a comparison of what they return. Results that differ are not timed."""
    expected = ours()
    exact = registry.find(op).exact
    times, wrong = {}, []
    for name, work in others.items():
        try:
            result = work()
            if not (exact and isinstance(result, Tensor) and torch.equal(result, expected)):  # which needs no memory
                dtype = expected[0].dtype if isinstance(expected, tuple) else expected.dtype
                testing.assert_matches(result, expected, dtype, exact=exact)
            del result
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{name}: {str(error).strip().splitlines()[0]}")
            continue
        times.update(_timing.medians({name: work}, rounds=1, seconds=0, warm=True))
    del expected
    best = min(times.values(), default=0.0)
    ways = {"fastops": ours, **(extra or {})}
    ways.update({name: others[name] for name in times if times[name] <= SLOW * best})
    times.update(_timing.medians(ways, rounds=5, seconds=seconds, limit=4 * seconds))
    return {"seconds": times, "wrong": wrong}


def best_peer(times: dict, leave_out: tuple = ()) -> tuple[str, float]:
    return min(((n, s) for n, s in times.items() if n not in ("fastops", *leave_out)), key=lambda item: item[1])


# Sections: each yields records, which have a row for the table. -------------------------------------------------------------


def long_rows(scale: Scale) -> Iterator[dict]:
    """float32, rows in order. At best: no slower than any peer, 85 % of the read bandwidth."""
    for features in scale.features:
        data = make_rows(scale.rows, features)
        for mean_length in scale.lengths:
            segments = uneven(scale.rows, mean_length)
            for op in OPERATIONS:
                yield beside_peers(op, data, segments, mean_length, scale)


def scalars(scale: Scale) -> Iterator[dict]:
    """float32, one element per row. At best: a third of segment_reduce's time, amax within 1.2 of sum."""
    data = make_rows(scale.rows_scalar, 1)
    for mean_length in scale.lengths:
        segments = uneven(scale.rows_scalar, mean_length)
        for op in OPERATIONS:
            yield beside_peers(op, data, segments, mean_length, scale)


def beside_peers(op: str, data: Tensor, segments: Segments, mean_length: int, scale: Scale) -> dict:
    run = registry.find(op).fn
    result = race(op, lambda: run(data, segments), peers(op, data, segments), scale.seconds, {"read": lambda: data.sum()})
    times = result["seconds"]
    name, peer = best_peer(times, ("read",))
    moved = registry.find(op).bytes_moved(data, segments) / times["fastops"]
    read = data.numel() * data.element_size() / times["read"]
    return {
        **result,
        "row": {
            "operation": op,
            "D": 1 if data.dim() == 1 else data.size(1),
            "mean length": mean_length,
            "ms": ms(times["fastops"]),
            "GB/s": f"{moved / 1e9:.1f}",
            "of read": f"{100 * moved / read:.0f} %",
            "best peer": name,
            "its ms": ms(peer),
            "ratio": ratio(peer, times["fastops"]),
            "segment_reduce": ratio(times["segment_reduce"], times["fastops"]) if "segment_reduce" in times else "",
        },
    }


def amax_and_sum(scale: Scale) -> Iterator[dict]:
    """amax beside sum in the same rounds. At best: within 1.2."""
    for features in (1, *scale.features):
        rows = scale.rows_scalar if features == 1 else scale.rows
        data = make_rows(rows, features)
        for mean_length in scale.lengths:
            segments = uneven(rows, mean_length)
            yield against(
                {"D": features, "mean length": mean_length},
                "amax", lambda: fastops.segment_amax(data, segments),
                "sum", lambda: fastops.segment_sum(data, segments),
                scale,
            )


def halves(scale: Scale) -> Iterator[dict]:
    """16-bit sums beside float32. At best: 0.75 of its time."""
    for features in [f for f in scale.features if f >= 64]:
        data = make_rows(scale.rows, features)
        for mean_length in scale.lengths:
            segments = uneven(scale.rows, mean_length)
            expected = fastops.segment_sum(data, segments)
            for dtype in (torch.float16, torch.bfloat16):
                short = data.to(dtype)
                testing.assert_matches(fastops.segment_sum(short, segments), expected, dtype, exact=True)
                yield against(
                    {"D": features, "mean length": mean_length},
                    str(dtype).removeprefix("torch."), lambda: fastops.segment_sum(short, segments),
                    "float32", lambda: fastops.segment_sum(data, segments),
                    scale,
                )


def giant(scale: Scale) -> Iterator[dict]:
    """One segment with 95 % of the rows beside even ones. At best: within 1.5."""
    for op in ("segment_sum", "segment_amax"):
        run = registry.find(op).fn
        for features in (1, 64):
            rows = scale.rows_scalar if features == 1 else scale.rows
            data = make_rows(rows, features)
            even, odd = uneven(rows, 16), skewed(rows, 16)
            yield against(
                {"operation": op, "D": features},
                "giant", lambda: run(data, odd),
                "even", lambda: run(data, even),
                scale,
            )


def threads(scale: Scale) -> Iterator[dict]:
    """One thread beside two. At best: 1.6 times as long."""
    for op in ("segment_sum", "segment_amax"):
        run = registry.find(op).fn
        for features in (1, 16, 64):
            rows = scale.rows_scalar if features == 1 else scale.rows
            data = make_rows(rows, features)
            segments = uneven(rows, 16)

            def with_threads(number: int) -> Tensor:
                torch.set_num_threads(number)
                return run(data, segments)

            before = torch.get_num_threads()
            try:
                yield against(
                    {"operation": op, "D": features},
                    "1 thread", lambda: with_threads(1),
                    "2 threads", lambda: with_threads(2),
                    scale,
                )
            finally:
                torch.set_num_threads(before)


def unsorted(scale: Scale) -> Iterator[dict]:
    """Rows in any order, grouped once, beside rows in order. At best: within 2 at D = 64."""
    for features in (16, 64):
        data = make_rows(scale.rows, features)
        for mean_length in scale.lengths:
            in_order = uneven(scale.rows, mean_length)
            index = shuffled(in_order.index)
            mixed = Segments.from_index(index, in_order.num_segments)
            yield against(
                {"D": features, "mean length": mean_length},
                "any order", lambda: fastops.segment_sum(data, mixed),
                "in order", lambda: fastops.segment_sum(data, in_order),
                scale,
            )


def one_shot(scale: Scale) -> Iterator[dict]:
    """Rows in any order, grouped for one sum, beside index_add. At best: no slower."""
    for features in (16, 64):
        data = make_rows(scale.rows, features)
        for mean_length in scale.lengths:
            in_order = uneven(scale.rows, mean_length)
            index, size = shuffled(in_order.index), in_order.num_segments

            def ours() -> Tensor:
                return fastops.segment_sum(data, Segments.from_index(index, size))

            others = {"index_add": lambda: data.new_zeros(size, features).index_add(0, index, data)}
            yield beside({"D": features, "mean length": mean_length}, "segment_sum", ours, others, scale)


def without_ties(number: int) -> Tensor:
    """Positive numbers, none twice within one segment: peers do not agree on what the gradient of ties is."""
    return torch.arange(number).mul_(7919).remainder_(8_388_593).add_(1)  # a prime below 2**24


def shuffled(index: Tensor) -> Tensor:
    return index[torch.randperm(index.numel(), generator=testing.make_generator())]


def backward(scale: Scale) -> Iterator[dict]:
    """The backward alone. At best: no slower than the best peer's."""
    for op in ("segment_sum", "segment_amax"):
        run = registry.find(op).fn
        for features in (16, 64):
            data = make_rows(scale.rows, features).requires_grad_()
            for mean_length in scale.lengths[:2]:
                segments = uneven(scale.rows, mean_length)
                grad = make_rows(segments.num_segments, features)

                def back(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
                    out = forward()
                    return lambda: torch.autograd.grad(out, data, grad, retain_graph=True)[0]

                if op == "segment_amax":
                    with torch.no_grad():
                        data.copy_(without_ties(data.numel()).reshape_as(data))
                others = {name: back(work) for name, work in peers(op, data, segments, needs_grad=True).items()}
                facts = {"operation": op, "D": features, "mean length": mean_length}
                yield beside(facts, op, back(lambda: run(data, segments)), others, scale)


def softmax(scale: Scale) -> Iterator[dict]:
    """Attention weights, [N, 8 heads] in segments of 50 rows, beside what PyG's softmax does: amax, subtract, exp, sum, divide.
    At best: 8 times as fast forward, 4 times backward."""
    rows, heads = scale.rows * 2 // 5, 8
    segments = uneven(rows, 50)
    data = torch.randn(rows, heads, generator=testing.make_generator()).requires_grad_()
    grad = 0.1 * torch.randn(rows, heads, generator=testing.make_generator(1))  # errors are compared without regard to it
    for name in ("segment_softmax", "segment_log_softmax"):
        op = registry.find(name)
        composite = lambda: op.peer(data, segments.index, segments.num_segments)  # noqa: E731
        with torch.no_grad():
            facts = {"operation": name, "direction": "forward"}
            yield beside(facts, name, lambda: op.fn(data, segments), {"composite": composite}, scale)
        ours, theirs = op.fn(data, segments), composite()
        yield beside(
            {"operation": name, "direction": "backward"},
            "segment_mean",  # as inexact
            lambda: torch.autograd.grad(ours, data, grad, retain_graph=True)[0],
            {"composite": lambda: torch.autograd.grad(theirs, data, grad, retain_graph=True)[0]},
            scale,
        )


def softmax_variants(scale: Scale) -> Iterator[dict]:
    """Softmax of the same [N, 8]: one segment with 95 % of the rows (at best within 1.5 of even ones), bfloat16 beside float32
    (at best no slower)."""
    rows, heads = scale.rows * 2 // 5, 8
    even, odd = uneven(rows, 50), skewed(rows, 50)
    data = torch.randn(rows, heads, generator=testing.make_generator())
    short = data.bfloat16()
    run = fastops.segment_softmax
    yield against({"D": heads}, "giant", lambda: run(data, odd), "even", lambda: run(data, even), scale)
    yield against({"D": heads}, "bfloat16", lambda: run(short, even), "float32", lambda: run(data, even), scale)


def weighted(scale: Scale) -> Iterator[dict]:
    """Attention pooling: [N, heads, features] in segments of 50 rows, each head with a weight, beside the product and then
    index_add, and beside our own sum of the product."""
    rows = scale.rows * 2 // 5
    segments = uneven(rows, 50)
    for heads, features in ((8, 8), (1, 64), (64, 1), (4, 32)):
        data = make_rows(rows, heads * features).reshape(rows, heads, features).requires_grad_()
        weight = testing.make_data((rows, heads), torch.float32, seed=1).requires_grad_()
        grad = testing.make_data((segments.num_segments, heads, features), torch.float32, seed=2)
        ways = {
            "fastops": lambda: fastops.segment_sum(data, segments, weight=weight),
            "index_add": lambda: grad.new_zeros(grad.shape).index_add(0, segments.index, data * weight.unsqueeze(-1)),
            "sum of product": lambda: fastops.segment_sum(data * weight.unsqueeze(-1), segments),
        }
        for direction in ("forward", "and backward"):
            facts = {"heads": heads, "features": features, "direction": direction}
            if direction == "forward":
                others = dict(ways)
                with torch.no_grad():
                    yield beside(facts, "segment_sum", others.pop("fastops"), others, scale)
                continue
            others = {name: lambda way=way: torch.autograd.grad(way(), (data, weight), grad)[1] for name, way in ways.items()}
            yield beside(facts, "segment_sum", others.pop("fastops"), others, scale)

def scans(scale: Scale) -> Iterator[dict]:
    """cumsum of one column beside torch.cumsum over the same flat array (at best within 1.5), of more columns beside torch.cumsum along
    the rows, and the other scans beside segment_cumsum."""
    for features in (1, 16, 64):
        rows = scale.rows_scalar if features == 1 else scale.rows
        data = make_rows(rows, features)
        for mean_length in (*scale.lengths, rows):
            segments = Segments.from_lengths(torch.tensor([rows])) if mean_length == rows else uneven(rows, mean_length)
            facts = {"D": features, "mean length": "all" if mean_length == rows else mean_length}
            ours = lambda: fastops.segment_cumsum(data, segments)  # noqa: E731
            yield against(facts, "segment_cumsum", ours, "torch.cumsum", lambda: data.cumsum(0), scale)
            if mean_length == scale.lengths[1]:
                for run in (fastops.segment_cumprod, fastops.segment_cummax, fastops.segment_logcumsumexp):
                    yield against(facts, run.__name__, lambda: run(data, segments), "segment_cumsum", ours, scale)
                values = make_rows(segments.num_segments, features)
                broadcast = lambda: fastops.segment_broadcast(values, segments)  # noqa: E731
                yield against(facts, "segment_cumsum", ours, "segment_broadcast", broadcast, scale)


def moments(scale: Scale) -> Iterator[dict]:
    """logsumexp and var beside amax. At best: within 1.6 at D of 16 and more. And one segment with 95 % of the rows beside even
    ones: within 1.5."""
    for features in scale.features:
        data = torch.randn(scale.rows, features, generator=testing.make_generator())
        for mean_length in scale.lengths:
            segments = uneven(scale.rows, mean_length)
            for run in (fastops.segment_logsumexp, fastops.segment_var):
                yield against(
                    {"D": features, "mean length": mean_length},
                    run.__name__, lambda: run(data, segments),
                    "segment_amax", lambda: fastops.segment_amax(data, segments),
                    scale,
                )
        even, odd = uneven(scale.rows, 16), skewed(scale.rows, 16)
        for run in (fastops.segment_logsumexp, fastops.segment_var):
            facts = {"D": features, "mean length": run.__name__}
            yield against(facts, "giant", lambda: run(data, odd), "even", lambda: run(data, even), scale)


def sort(scale: Scale) -> Iterator[dict]:
    """Sorting beside two sorts of everything, by value and then by segment; one segment beside torch.sort. At best: 4 times as fast,
    10 times for segments of 4 rows, no slower for one segment."""
    generator = testing.make_generator()
    for rows, segments, what in (
        (400_000, uneven(400_000, 50), "8e3 segments"),
        (scale.rows_scalar, Segments.from_offsets(torch.arange(0, scale.rows_scalar + 1, 4)), "segments of 4"),
        (scale.rows_scalar, Segments.from_offsets(torch.tensor([0, scale.rows_scalar])), "one segment"),
    ):
        data = torch.randperm(rows, generator=generator) - rows / 2  # no ties, which torch.sort leaves in any order
        ours, others = lambda: fastops.segment_sort(data, segments), {"torch.sort": lambda: data.sort()}
        if segments.num_segments > 1:
            others = {"two sorts": lambda: registry.find("segment_sort").peer(data, segments.index, segments.num_segments)}
        yield beside({"work": what, "N": rows, "D": 1}, "segment_sort", ours, others, scale)
    for features in (8, 64):
        data = torch.randn(scale.rows_scalar // features, features, generator=generator)
        segments = uneven(data.size(0), 50)
        others = {"two sorts": lambda: registry.find("segment_sort").peer(data, segments.index, segments.num_segments)}
        yield beside({"work": "mean length 50", "N": data.size(0), "D": features}, "segment_sort", lambda: fastops.segment_sort(data, segments), others, scale)


def sort_skewed(scale: Scale) -> Iterator[dict]:
    """One segment with 95 % of the rows beside even ones. At best: within 2."""
    for features, mean_length in ((1, 50), (1, 1000), (64, 50), (64, 1000)):
        data = torch.randn(scale.rows_scalar // features, features, generator=testing.make_generator())
        even, odd = uneven(data.size(0), mean_length), skewed(data.size(0), mean_length)
        run = fastops.segment_sort
        yield against({"D": features, "mean length": mean_length}, "giant", lambda: run(data, odd), "even", lambda: run(data, even), scale)


def sorted_median(data: Tensor, index: Tensor, num_segments: int) -> Tensor:
    lengths = torch.bincount(index, minlength=num_segments)
    by_value = data.sort(dim=0, stable=True).indices
    rows = by_value.gather(0, index.reshape(-1, *[1] * (data.dim() - 1)).expand_as(data).gather(0, by_value).sort(dim=0, stable=True).indices)
    return data.gather(0, rows[lengths.cumsum(0) - lengths + (lengths - 1) // 2])


def select(scale: Scale) -> Iterator[dict]:
    """The three greatest rows, the median, a quantile, how many values are different, and the mode, beside sorting all: by value,
    then stably by segment. At best: 5 times as fast for three rows at a mean length of 64 and more, and for what is counted, 3
    times for the median at 1024. And one segment with 95 % of the rows beside even ones: within 2."""
    run: dict[str, Callable[[Tensor, Segments], Any]] = {
        "segment_topk": lambda data, segments: fastops.segment_topk(data, segments, 3)[0],
        "segment_median": lambda data, segments: fastops.segment_median(data, segments)[0],
        "segment_quantile": lambda data, segments: fastops.segment_quantile(data, segments, 0.9),
        "segment_nunique": fastops.segment_nunique,
        "segment_mode": lambda data, segments: fastops.segment_mode(data, segments)[0],
    }
    sort: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
        "segment_topk": lambda *args: registry.find("segment_topk").peer(*args, k=3)[0],
        "segment_median": sorted_median,
        "segment_quantile": lambda *args: registry.find("segment_quantile").peer(*args, q=0.9),
        "segment_nunique": registry.find("segment_nunique").peer,
        "segment_mode": lambda *args: registry.find("segment_mode").peer(*args)[0],
    }
    for features in (1, 16):
        data = torch.randn((scale.rows // features, features)[: 1 + (features > 1)], generator=testing.make_generator())
        for mean_length in (4, 16, 64, 1024):
            segments = uneven(len(data), mean_length)
            for op, ours in run.items():
                others = {"two sorts": lambda: sort[op](data, segments.index, segments.num_segments)}
                facts = {"operation": op, "D": features, "mean length": mean_length}
                yield beside(facts, op, lambda: ours(data, segments), others, scale)
        even, odd = uneven(len(data), 64), skewed(len(data), 64)
        for op, ours in run.items():
            record = against({}, "giant", lambda: ours(data, odd), "even", lambda: ours(data, even), scale)
            this, beside_it, times = (record["row"][name] for name in ("ms", "its ms", "times as long"))
            facts = {"operation": op, "D": features, "mean length": "giant", "ms": this, "best peer": "even", "its ms": beside_it}
            yield {**record, "row": {**facts, "ratio": f"{times} times as long"}}


def tiny(scale: Scale) -> Iterator[dict]:
    """A call on 16 x 4 elements in 4 segments, beside index_add to fresh zeros. At best: no slower."""
    index = torch.arange(4).repeat_interleave(4)
    segments = Segments.from_index(index)
    grad = torch.ones(4, 4)
    for requires_grad in (False, True):
        data = make_rows(16, 4).requires_grad_(requires_grad)
        ways = {
            "forward": (
                lambda: fastops.segment_sum(data, segments),
                lambda: torch.zeros(4, 4).index_add(0, index, data),
            )
        }
        if requires_grad:
            ways["forward and backward"] = (
                lambda: torch.autograd.grad(fastops.segment_sum(data, segments), data, grad)[0],
                lambda: torch.autograd.grad(torch.zeros(4, 4).index_add(0, index, data), data, grad)[0],
            )
        for name, (ours, other) in ways.items():
            facts = {"call": name, "requires_grad": requires_grad}
            yield beside(facts, "segment_sum", ours, {"index_add": other}, scale)


def beside(facts: dict, op: str, ours: Callable[[], Any], others: Ways, scale: Scale) -> dict:
    result = race(op, ours, others, scale.seconds)
    name, peer = best_peer(result["seconds"])
    mine = result["seconds"]["fastops"]
    return {**result, "row": {**facts, "ms": ms(mine), "best peer": name, "its ms": ms(peer), "ratio": ratio(peer, mine)}}


def against(facts: dict, one: str, do_one: Callable, other: str, do_other: Callable, scale: Scale) -> dict:
    """Two of our own calls; the ratio is that of their times."""
    times = _timing.medians({one: do_one, other: do_other}, rounds=5, seconds=scale.seconds)
    quotient = f"{times[one] / times[other]:.2f}"
    row = {**facts, "this": one, "ms": ms(times[one]), "beside": other, "its ms": ms(times[other]), "times as long": quotient}
    return {"seconds": times, "wrong": [], "row": row}


SECTIONS: dict[str, Callable[[Scale], Iterator[dict]]] = {
    "long": long_rows,
    "scalars": scalars,
    "amax": amax_and_sum,
    "halves": halves,
    "giant": giant,
    "threads": threads,
    "unsorted": unsorted,
    "one_shot": one_shot,
    "backward": backward,
    "softmax": softmax,
    "softmax_variants": softmax_variants,
    "weighted": weighted,
    "scans": scans,
    "moments": moments,
    "sort": sort,
    "sort_skewed": sort_skewed,
    "select": select,
    "tiny": tiny,
}


# Output --------------------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4f}" if seconds < 1e-4 else f"{1e3 * seconds:.2f}"


def ratio(peer: float, ours: float) -> str:
    return f"{peer / ours:.2f}"


def machine() -> str:
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{processor}, {torch.get_num_threads()} threads, {fastops.build_info()['cpu_capability']}"


def commit() -> str:
    folder = Path(__file__).resolve().parent
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + (" and changes" if run("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments: Optional[list] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--only", help=f"some of the sections: {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of everything but the section threads")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--only: sections must be among {','.join(SECTIONS)}, but got {unknown[0]}")
    facts = {
        "machine": machine(),
        "torch": torch.__version__,
        "fastops": f"{fastops.__version__}, commit {commit()}",
        "peers": "torch, torch_scatter" if torch_scatter is not None else "torch (torch_scatter is not installed)",
        "command": " ".join(["python benchmarks/cpu_reduce.py", *(sys.argv[1:] if arguments is None else arguments)]),
    }
    report: dict[str, Any] = {**facts, "sections": {}}
    if not options.json:
        print(*(f"{name}: {value}  " for name, value in facts.items()), sep="\n", flush=True)
    for name in chosen:
        report["sections"][name] = records = []
        for number, record in enumerate(SECTIONS[name](Scale(options.quick))):
            records.append(record)
            if options.json:
                continue
            row = record["row"]
            if number == 0:
                print(f"\n**{name}**: {SECTIONS[name].__doc__}\n")
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        for wrong in sorted({words for record in records for words in record["wrong"]}):
            if not options.json:
                print(f"\nLeft out since its values differ: {wrong}", flush=True)
    if options.json:
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
