"""`python -m fastops`: what was built, and every operation checked and timed on every device that is here.

A further subcommand is a row in COMMANDS: its name and a function that adds its arguments to a parser and returns
what runs it, a function of the parsed arguments that returns the exit code. Without a subcommand, `check` runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

from . import _timing, placement, registry, testing
from ._native import build_info
from .errors import dtype_name
from .segments import Segments

# What the results are compared for; the tests go through all dtypes.
DTYPES = (torch.float32, torch.bfloat16, torch.int64)

FEATURES = 64
LONGEST = 32  # rows of a segment, which has half as many on average; some have none
# Rows that are timed: 25 MB on the CPU, 256 MB on CUDA, more than caches hold. Peers take many times that.
ROWS = {"cpu": 100_000, "cuda": 1_000_000}
ROWS_IN_LITTLE_MEMORY = 100_000
LITTLE_MEMORY = 8 * 2**30  # bytes
# An interpreter in the place of a GPU gets fewer. A GPU sums them in a hundredth of that time.
ROWS_OF_AN_INTERPRETER = 10_000
INTERPRETER = 1e-3  # seconds

SHOWN_FAILURES = 3  # of an operation; --json has all


def main(arguments: Optional[list[Any]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m fastops", description=__doc__.splitlines()[0])
    parser.set_defaults(run=add_check(parser))
    subparsers = parser.add_subparsers(metavar="command")
    for name, add in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=add.__doc__, description=add.__doc__)
        subparser.set_defaults(run=add(subparser))
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


# check ---------------------------------------------------------------------------------------------------------------


def add_check(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """check every operation against the reference, and time it beside plain PyTorch (the default)"""
    # Without a default, since that of the subcommand would overwrite what stands before the subcommand.
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of tables"
    )
    return lambda parsed: check(getattr(parsed, "json", False))


def check(as_json: bool = False) -> int:
    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    say("\n".join(build_lines()))
    report: dict[str, Any] = {"ok": True, "build": build_info(), "devices": []}
    for device, description, unusable in find_devices():
        entry: dict[str, Any] = {"device": device, "description": description, "unusable": unusable}
        report["devices"].append(entry)
        if unusable:
            say(f"\n{device}: {description}. Not used: {unusable}")
            continue
        with torch.cuda.device(device) if is_cuda(device) else nullcontext():
            inputs = Inputs(device)
            entry.update(inputs.facts())
            say(f"\n{device}: {description}. torch.sum reads {inputs.read_bandwidth:.1f} GB/s here.")
            say(inputs.description)
            say(heading(device))
            entry["operations"] = []
            for op in registry.OPS:
                result = examine(op, device, inputs)
                entry["operations"].append(result)
                say(line(result))
        for result in entry["operations"]:
            failures = result["failures"]
            report["ok"] = report["ok"] and not failures
            for failure in failures[:SHOWN_FAILURES]:
                say(f"FAILED {result['name']} on {device}: {failure}")
            if len(failures) > SHOWN_FAILURES:
                say(f"FAILED {result['name']} on {device}: {len(failures) - SHOWN_FAILURES} more")
    if as_json:
        print(json.dumps(report, indent=2))
    return 0 if report["ok"] else 1


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def build_lines() -> list[Any]:
    info = build_info()
    lines = [f"fastops {info['version']}, built for torch {info['torch_built']} with {info['compiler']}"]
    if info["cuda"]:
        lines.append(f"CUDA kernels: yes, CUDA {info['cuda_version']} for {', '.join(info['architectures'])}")
    else:
        lines.append(f"CUDA kernels: no. {info['cuda_reason']}")
    lines.append(f"CPU kernels: {info['cpu_capability']}")
    if info["cpu_capability_note"]:
        lines[-1] += f". {info['cpu_capability_note']}"
    return lines


def find_devices() -> list[Any]:
    """(name, description, why fastops cannot use it or "") of each device."""
    found = [("cpu", f"{torch.get_num_threads()} threads", "")]
    if torch.cuda.is_available():
        unusable = "" if build_info()["cuda"] else "this build has no CUDA kernels"
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            memory = facts.total_memory / 2**30
            found.append((f"cuda:{number}", f"{facts.name}, {facts.major}.{facts.minor}, {memory:.0f} GiB", unusable))
    return found


class Inputs:
    """What operations are timed with: float32 rows in segments of uneven lengths."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rows = ROWS[torch.device(device).type]
        if is_cuda(device):
            self.rows = min(self.rows, self._bearable_rows())
        generator = testing.make_generator()
        lengths = torch.randint(0, LONGEST + 1, (2 * self.rows // LONGEST,), generator=generator)
        self.segments = Segments.from_lengths(lengths.to(device))
        self.index = self.segments.index
        total = self.data("dyadic", self.segments.num_rows)
        seconds = _timing.medians({"sum": lambda: total.sum()}, device, seconds=0.1, limit=0.3)["sum"]
        self.read_bandwidth = total.numel() * total.element_size() / seconds / 1e9

    def _bearable_rows(self) -> int:
        rows = torch.ones(ROWS_OF_AN_INTERPRETER, FEATURES, device=self.device)
        segments = Segments.from_lengths(torch.full((rows.size(0) // 16,), 16, device=self.device))
        work = lambda: registry.find("segment_sum").fn(rows, segments)  # noqa: E731
        if _timing.medians({"sum": work}, self.device, rounds=3, seconds=0)["sum"] > INTERPRETER:
            return ROWS_OF_AN_INTERPRETER
        return ROWS["cuda"] if torch.cuda.mem_get_info()[0] >= LITTLE_MEMORY else ROWS_IN_LITTLE_MEMORY

    def data(self, kind: str, rows: int) -> Tensor:
        """Rows of few different numbers, which repeat: to make them would take longer than to reduce them."""
        some = testing.make_data((min(rows, 10_000), FEATURES), torch.float32, kind=kind).to(self.device)
        return some.repeat(-(-rows // some.size(0)), 1)[:rows].contiguous()

    def facts(self) -> dict[str, Any]:
        return {
            "rows": self.segments.num_rows,
            "segments": self.segments.num_segments,
            "features": FEATURES,
            "dtype": "float32",
            "read_bandwidth_gb_s": self.read_bandwidth,
        }

    @property
    def description(self) -> str:
        segments = self.segments
        text = (
            f"Timed: float32, {segments.num_rows:,} rows of {FEATURES} elements "
            f"in {segments.num_segments:,} segments of 0 to {LONGEST} rows."
        )
        if is_cuda(self.device):
            text += "\nCopy: what bringing the input there from the CPU costs beside, in ms and in kernels."
        return text


def examine(op: registry.Op, device: str, inputs: Inputs) -> dict[str, Any]:
    """Values first: what is wrong is not timed."""
    checks, failures = compare_with_reference(op, device)
    result: dict[str, Any] = {"name": op.name, "device": device, "checks": checks, "failures": failures}
    if failures:
        return result
    segments = inputs.segments
    rows = segments.num_segments if op.takes_values else segments.num_rows
    data = inputs.data(op.data_kind, rows)
    ways = {
        "fastops": lambda: op.fn(data, segments),
        "peer": lambda: op.peer(data, inputs.index, segments.num_segments),
    }
    try:
        assert_same(_as_tuple(ways["fastops"]()), _as_tuple(ways["peer"]()), data.dtype, op.exact)
    except Exception as error:
        failures.append(f"the timed input against plain PyTorch: {_first_line(error)}")
        return result
    seconds = _timing.medians(ways, device, rounds=5, seconds=0.1, limit=0.3, warm=True)
    result["seconds"] = seconds["fastops"]
    result["bandwidth_gb_s"] = op.bytes_moved(data, segments) / seconds["fastops"] / 1e9
    result["peer_seconds"] = seconds["peer"]
    result["peer_ratio"] = seconds["peer"] / seconds["fastops"]
    if is_cuda(device):
        here = data.cpu()
        copy = _timing.medians({"copy": lambda: here.to(device)}, device, rounds=3, seconds=0, limit=0.3)["copy"]
        result["copy_seconds"] = copy
        result["copy_ratio"] = copy / seconds["fastops"]
    return result


def compare_with_reference(op: registry.Op, device: str) -> tuple[Any, ...]:
    """How many calls were compared, and what is wrong with those that differ."""
    checks, failures = 0, []
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        with _one_thread():
            samples = [(sample, testing.expected_result(op, sample)) for sample in op.samples(device, dtype)]
        for sample, expected in samples:
            checks += 1
            try:
                result = op.fn(*sample.args, **sample.kwargs)
                with _one_thread():
                    assert_same(result, expected, dtype, op.exact)
            except Exception as error:  # whatever is wrong with one is no reason not to look at the others
                failures.append(f"{dtype_name(dtype)}-{sample.id}: {_first_line(error)}")
    return checks, failures


def assert_same(actual: Any, expected: Any, dtype: torch.dtype, exact: bool) -> None:
    """testing.assert_matches, which is asked only for the words where something differs: torch's comparison imports
    half of torch, for two seconds."""
    pairs = list(zip(_as_tuple(actual), _as_tuple(expected)))
    if type(actual) is not type(expected) or not all(_equal(one, other, exact) for one, other in pairs):
        testing.assert_matches(actual, expected, dtype, exact=exact)


def _equal(actual: Tensor, expected: Tensor, exact: bool) -> bool:
    expected = expected.to(actual.device, actual.dtype)
    if actual.shape != expected.shape:
        return False
    if exact or not actual.is_floating_point():
        return torch.equal(actual, expected)
    rtol, atol = testing.TOLERANCES[actual.dtype]
    return torch.allclose(actual, expected, rtol, atol)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors so small that threads would only wait for each other; much, where other programs keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def heading(device: str) -> str:
    text = f"{'operation':18} {'reference':>9} {'ms':>8} {'GB/s':>7} {'PyTorch ms':>11} {'ratio':>7}"
    if is_cuda(device):
        text += f" {'copy ms':>9} {'kernels':>8}"
    return text


def line(result: dict[str, Any]) -> str:
    if result["failures"]:
        return f"{result['name']:18} {'FAILED':>9}"
    text = (
        f"{result['name']:18} {result['checks']:>6} ok {1e3 * result['seconds']:8.3f} {result['bandwidth_gb_s']:7.1f} "
        f"{1e3 * result['peer_seconds']:11.2f} {result['peer_ratio']:6.1f}x"
    )
    if "copy_seconds" in result:
        text += f" {1e3 * result['copy_seconds']:9.2f} {result['copy_ratio']:8.1f}"
    return text


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "check": add_check,
    "copy-cost": placement.add_copy_cost,
}

if __name__ == "__main__":
    sys.exit(main())
