"""How long several ways to do the same work take: in turns within one process, and the median of each."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Callable, Optional

import torch

Work = Callable[[], Any]

# Of work that is shorter, several calls are measured together. Seconds.
_SHORTEST_MEASUREMENT = 1e-3


def stopwatch(device: Any) -> Callable[..., float]:
    """`measure(work, calls=1)`: seconds of one call, the mean of `calls` in a row. On CUDA it reads the device's clock."""
    if torch.device(device).type != "cuda":

        def measure(work: Work, calls: int = 1) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                work()
            return (time.perf_counter() - start) / calls

        return measure

    def measure_on_device(work: Work, calls: int = 1) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls

    return measure_on_device


def medians(
    ways: dict[str, Work],
    device: Any = "cpu",
    *,
    rounds: int = 5,
    seconds: float = 0.5,
    limit: Optional[float] = None,
    warm: bool = False,
) -> dict[str, float]:
    """Seconds that one call takes, for each of `ways`: the median over rounds in which every way has its turn, so that a
    machine that is slow for a while is slow for all of them.

    There are `rounds` rounds, more until `seconds` have passed, and fewer, but at least one, once `limit` seconds have.
    `warm`: they were all called before, so that no page and no kernel is touched for the first time.
    """
    measure = stopwatch(device)
    if not warm:
        for work in ways.values():
            work()
    start, done = time.perf_counter(), 1
    taken = {name: [measure(work)] for name, work in ways.items()}
    calls = {name: math.ceil(_SHORTEST_MEASUREMENT / max(times[0], 1e-9)) for name, times in taken.items()}
    for name, number in calls.items():
        if number > 1:
            taken[name] = [measure(ways[name], number)]
    while done < rounds or time.perf_counter() - start < seconds:
        if limit is not None and time.perf_counter() - start >= limit:
            break
        for name, work in ways.items():
            taken[name].append(measure(work, calls[name]))
        done += 1
    return {name: statistics.median(times) for name, times in taken.items()}
