"""The options of `pytest benchmarks`, what it measures by default, and what it prints."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

import fastops
from fastops import registry

from . import base, peers, report

QUICK_CASES = ("uniform", "unsorted", "empty")
# In the default run other dtypes meet one case, and these operations: one of each kind of kernel.
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64)
SEVERAL_DTYPES = ("segment_sum", "segment_amax", "segment_softmax", "segment_cumsum", "segment_sort", "segment_broadcast")
# Elements of the case "uniform", for time over size; base.ELEMENTS come with the cases.
SIZES = tuple(2**power for power in (10, 12, 14, 16, 18))

THREADS = 2
MEASURED = pytest.StashKey[list]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastops benchmarks")
    group.addoption("--quick", action="store_true", help="few and small cases, only to see that everything works")
    group.addoption("--full", action="store_true", help="every dtype on every case; hours")
    group.addoption("--size", type=int, help=f"elements of the data of a case, {base.ELEMENTS:,} by default")
    group.addoption("--threads", type=int, help=f"of operations and peers on the CPU, {THREADS} by default, 1 with --quick")
    group.addoption("--seconds", type=float, help=f"of turns for one measurement, {base.SECONDS} by default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Two threads that wait for each other on a busy machine, as one that tests has often enough, take minutes.
    base.set_threads(config.getoption("threads") or (1 if config.getoption("quick") else THREADS))
    config.option.benchmark_quiet = True  # our own table says more
    config.stash[MEASURED] = []


def devices() -> tuple[list, str]:
    """Those that are measured, and why CUDA is not, or ""."""
    if not torch.cuda.is_available():
        return ["cpu"], "torch sees no CUDA device"
    if not fastops.build_info()["cuda"]:
        return ["cpu"], f"this build left CUDA out: {fastops.build_info()['cuda_reason']}"
    return ["cpu", "cuda"], ""


def size(config: pytest.Config) -> int:
    return config.getoption("size") or (base.FEWEST_ELEMENTS if config.getoption("quick") else base.ELEMENTS)


def points(config: pytest.Config) -> Iterator[base.Point]:
    """Case after case, since what is made for one is kept for its neighbours."""
    elements, quick, full = size(config), config.getoption("quick"), config.getoption("full")
    for device in devices()[0]:
        for case in base.CASES:
            if case.missing or (quick and case.name not in QUICK_CASES):
                continue
            for op in registry.OPS:
                directions = base.DIRECTIONS if op.differentiable else base.DIRECTIONS[:1]
                several = full or (case.name == "uniform" and op.name in SEVERAL_DTYPES and not quick)
                for dtype in (torch.float32, *(DTYPES if several else ())):
                    for direction in directions if full or dtype == torch.float32 else directions[:1]:
                        if dtype in op.dtypes and (direction == "forward" or dtype.is_floating_point):
                            yield base.Point(op, case, dtype, device, direction, elements)


def growth(config: pytest.Config) -> Iterator[base.Point]:
    quick = config.getoption("quick")
    for device in devices()[0]:
        for elements in SIZES[: 1 if quick else None]:
            for op in registry.OPS[: 1 if quick else None]:
                yield base.Point(op, base.find_case("uniform"), device=device, elements=elements)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        chosen = list((growth if metafunc.function.__name__ == "test_growth" else points)(metafunc.config))
        metafunc.parametrize("point", chosen, ids=[f"{point.id}-{point.elements}" for point in chosen])


@pytest.fixture
def measure(benchmark, request):
    """Measures a point: pytest-benchmark gets the times of our own turns, its `extra_info` the rest."""
    config = request.config

    def run(point: base.Point) -> None:
        seconds = config.getoption("seconds") or (0 if config.getoption("quick") else base.SECONDS)
        workload, contest = base.enter(point, peers.PEERS, seconds)
        benchmark.pedantic(contest.turn, rounds=contest.turns)
        found = base.facts(workload, contest, bandwidth(config, point.device))
        benchmark.extra_info.update(found)
        config.stash[MEASURED].append(found)

    return run


def bandwidth(config: pytest.Config, device: str) -> float:
    return base.copy_bandwidth(device, 4 * size(config))


def left_out() -> list[str]:
    """One line for each."""
    why_not = devices()[1]
    lines = [f"cuda: left out, since {why_not}"] if why_not else []
    lines += [f"case {case.name}: left out, since {case.missing}" for case in base.CASES if case.missing]
    return lines + peers.missing()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.stash[MEASURED]:
        return
    terminalreporter.section("benchmarks")
    facts = base.machine()
    load = f", load {facts['load'][0]:.1f}" if facts["load"] else ""
    lines = [f"fastops {fastops.__version__}, torch {facts['torch']}, {facts['processor']}, {facts['threads']} threads{load}"]
    lines += [f"{device}: copying reads and writes {bandwidth(config, device) / 1e9:.1f} GB/s" for device in devices()[0]]
    for line in (*lines, *left_out(), "", report.plain_table(config.stash[MEASURED])):
        terminalreporter.write_line(line)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    here = devices()[0]
    machine_info["fastops"] = {
        **base.machine(),
        "devices": {device: base.machine(device)["device"] for device in here},
        "copy_bandwidth": {device: bandwidth(config, device) for device in here},
        "elements": size(config),
        "version": fastops.__version__,
        "packages": {peer.package: base.version(peer.package) for peer in peers.PEERS if peer.package and not peer.missing},
        "left_out": left_out(),
        "arguments": list(config.invocation_params.args),
        "cases": {case.name: case.stresses for case in base.CASES},
        "notes": {peer.name: peer.note for peer in peers.PEERS if peer.note},
    }
