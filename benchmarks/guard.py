"""Whether a ratio to the best peer has fallen below its bound.

    python -m benchmarks.guard            # exit code 1 if one has
    python -m benchmarks.guard --write    # new bounds, from what is measured now

Absolute times differ from machine to machine and from hour to hour; ratios measured in turns hardly do. The bounds, in
bounds.json, are MARGIN of what was measured. What falls is measured again before it counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Optional

from fastops import registry

from . import base, peers, report

BOUNDS = Path(__file__).with_name("bounds.json")

MARGIN = 0.6  # guess: two runs on a busy machine differ by less
AGAIN = 2  # times
THREADS = 1  # two that wait for each other on a busy machine tell how busy it is
SECONDS = 0.3
ELEMENTS = 2**18
TOO_SLOW = ("polars", "ONNX Runtime")  # to be the best, or to get ready

# One of each kind of kernel, and of each way that the work is split.
SUBSET = (
    ("segment_sum", "uniform", "forward"),
    ("segment_sum", "scalar", "forward"),
    ("segment_sum", "unsorted", "forward"),
    ("segment_mean", "tiny", "forward"),
    ("segment_amax", "skewed", "forward"),
    ("segment_amax", "uniform", "backward"),
    ("segment_max", "long", "forward"),
    ("segment_var", "wide", "forward"),
    ("segment_softmax", "uniform", "forward"),
    ("segment_softmax", "uniform", "backward"),
    ("segment_cumsum", "long", "forward"),
    ("segment_sort", "uniform", "forward"),
    ("segment_topk", "zipf", "forward"),
    ("segment_broadcast", "uniform", "forward"),
)


def points() -> list[base.Point]:
    return [base.Point(registry.find(op), base.find_case(case), direction=direction, elements=ELEMENTS) for op, case, direction in SUBSET]


def measure(point: base.Point) -> tuple[Optional[float], str]:
    """The ratio, and the peer that it is to."""
    _, contest = base.enter(point, peers.without(TOO_SLOW), SECONDS)
    contest.run()
    return contest.ratio, contest.best_peer


def check(bounds: dict[str, float]) -> list[str]:
    """Prints a line for each point, and returns the names of those that fell."""
    fallen = []
    for point in points():
        bound = bounds.get(point.id)
        if bound is None:
            print(f"{point.id:52} has no bound; python -m benchmarks.guard --write")
            continue
        found, peer = measure(point)
        for _ in range(AGAIN):
            if found is None or found >= bound:
                break
            found, peer = max((found, peer), measure(point))
        verdict = "no peer" if found is None else "ok" if found >= bound else "FELL"
        print(f"{point.id:52} {report.times(found):>5}, at least {report.times(bound):>5}  {verdict:7} {peer}", flush=True)
        if verdict == "FELL":
            fallen.append(point.id)
    return fallen


def main(arguments: Optional[list] = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.guard", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write new bounds instead of checking the old ones")
    parser.add_argument("--bounds", type=Path, default=BOUNDS, help="the file that holds them")
    options = parser.parse_args(arguments)
    base.set_threads(THREADS)
    if options.write:
        ratios = {point.id: measure(point)[0] for point in points()}
        bounds = {name: round(MARGIN * ratio, 2) for name, ratio in ratios.items() if ratio is not None}
        options.bounds.write_text(json.dumps(bounds, indent=2) + "\n")
        print(f"guard: wrote {len(bounds)} bounds to {options.bounds}")
        return 0
    fallen = check(json.loads(options.bounds.read_text()))
    print(f"guard: {len(fallen)} of {len(SUBSET)} ratios fell below their bounds" + (f": {', '.join(fallen)}" if fallen else ""))
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
