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


class Race:
    """Several ways to do the same work, in turns: a machine that is slow for a while is slow for all of them.

    `taken` has the seconds of one call in each turn so far, for each of `ways`; making a race is its first turn. Short work is
    called several times in a turn, and the mean counts.

    Args:
        warm: they were all called before, so that no page and no kernel is touched for the first time.
        before: called before each call, while no clock runs, to empty a cache; then a turn is one call.
    """

    def __init__(
        self, ways: dict[str, Work], device: Any = "cpu", *, warm: bool = False, before: Optional[Work] = None
    ) -> None:
        self.ways = ways
        self._measure = stopwatch(device)
        self._before = before
        if not warm:
            for work in ways.values():
                work()
        self.calls = dict.fromkeys(ways, 1)
        self.taken = {name: [self._time(name)] for name in ways}
        if before is None:
            self.calls = {name: math.ceil(_SHORTEST_MEASUREMENT / max(times[0], 1e-9)) for name, times in self.taken.items()}
        for name, number in self.calls.items():
            if number > 1:
                self.taken[name] = [self._time(name)]

    def _time(self, name: str) -> float:
        if self._before is not None:
            self._before()
        return self._measure(self.ways[name], self.calls[name])

    def turn(self) -> None:
        """Every way is measured once more."""
        for name, times in self.taken.items():
            times.append(self._time(name))

    def medians(self) -> dict[str, float]:
        """Seconds of one call, for each way: the median of its turns."""
        return {name: statistics.median(times) for name, times in self.taken.items()}


def medians(
    ways: dict[str, Work],
    device: Any = "cpu",
    *,
    rounds: int = 5,
    seconds: float = 0.5,
    limit: Optional[float] = None,
    warm: bool = False,
) -> dict[str, float]:
    """Seconds that one call takes, for each of `ways`: the median over the turns of a `Race`.

    There are `rounds` turns, more until `seconds` have passed, and fewer, but at least one, once `limit` seconds have.
    `warm`: they were all called before.
    """
    if not warm:
        for work in ways.values():
            work()
    start, done = time.perf_counter(), 1
    race = Race(ways, device, warm=True)
    while done < rounds or time.perf_counter() - start < seconds:
        if limit is not None and time.perf_counter() - start >= limit:
            break
        race.turn()
        done += 1
    return race.medians()
