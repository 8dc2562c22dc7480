"""What the CUDA kernels read, write and execute, counted without a GPU by the simulator `cudasim`:

    cudasim-run python benchmarks/cuda_traffic.py                 # sums
    cudasim-run python benchmarks/cuda_traffic.py --all           # and every other operation and dtype below

It stands in for a stopwatch, and does not depend on the machine. One table for each operation, in Markdown:

- l2 / ideal: bytes of all 32-byte sectors that the launches ask for, by the bytes of the inputs read once and the
  results written once. Caches are not simulated, so what one warp reads again counts again. A normalisation has to read
  the rows of one giant segment twice, which makes 1.48 of softmax and 1.63 of its backward the least that there can be.
- instructions: of all threads, in PTX, by elements of the larger of input and output.
- longest warp: instructions of the warp that has most; of skewed inputs also by that of the uniform input above.
- launches, and whether the host waited for the device.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Callable, Iterable

import cudasim
import torch
from torch import Tensor

import fastops  # noqa: F401  registers the operators

OPS = torch.ops.fastops


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    columns: int
    length: int  # of the segments, but for one
    giant: float = 0.0  # share of the rows that stand in one segment
    uniform: str = ""  # the case to compare the longest warp with

    def lengths(self) -> Tensor:
        giant = int(self.rows * self.giant)
        count = (self.rows - giant) // self.length
        lengths = torch.full((count,), self.length)
        if giant:
            lengths[-1] += self.rows - giant - count * self.length
            lengths = torch.cat((lengths[: count // 2], torch.tensor([giant]), lengths[count // 2 :]))
        return lengths


CASES = (
    Case("D = 64, L = 16", 40_000, 64, 16),
    Case("D = 4, L = 16", 40_000, 4, 16),
    Case("D = 1, L = 16", 160_000, 1, 16),
    Case("D = 1, L = 2", 160_000, 1, 2),
    Case("D = 1, 95 % in one", 160_000, 1, 16, 0.95, "D = 1, L = 16"),
    Case("D = 64, 95 % in one", 40_000, 64, 16, 0.95, "D = 64, L = 16"),
)
LONG_CASES = (  # the longest segments of a normalisation that are read once
    Case("D = 1, L = 1024", 163_840, 1, 1024),
    Case("D = 64, L = 128", 40_960, 64, 128),
)


def reduction(name: str) -> Callable:
    def prepare(data: Tensor, values: Tensor, offsets: Tensor):
        return (data, offsets), lambda: getattr(OPS, name)(data, offsets, None, None)

    return prepare


def broadcast(data: Tensor, values: Tensor, offsets: Tensor):
    return (values, offsets), lambda: OPS.segment_broadcast(values, offsets, None, None, len(data))


def mean_backward(data: Tensor, values: Tensor, offsets: Tensor):
    return (values, offsets), lambda: OPS._segment_mean_backward(values, offsets, None, None, len(data), 0)


def select_backward(data: Tensor, values: Tensor, offsets: Tensor):
    rows = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    inputs = (values, rows, offsets)
    return inputs, lambda: OPS._segment_select_backward(values, rows, offsets, None, None, len(data), 0)


def extremum_backward(data: Tensor, values: Tensor, offsets: Tensor):
    result, counts = OPS._segment_amax_count(data, offsets, None, None, 0, 0)
    inputs = (values, data, result, counts, offsets)
    return inputs, lambda: OPS._segment_extremum_backward(values, data, result, counts, offsets, None, None, 0)


def var(data: Tensor, values: Tensor, offsets: Tensor):
    return (data, offsets), lambda: OPS.segment_var(data, offsets, None, None, 0)


def normalisation_backward(name: str) -> Callable:
    def prepare(data: Tensor, values: Tensor, offsets: Tensor):
        result = getattr(OPS, f"segment_{name}")(data, offsets, None, None)
        backward = getattr(OPS, f"_segment_{name}_backward")
        return (data, result, offsets), lambda: backward(data, result, offsets, None, None, 0)

    return prepare


def weighted(data: Tensor, values: Tensor, offsets: Tensor):
    weight = data[:, 0].float().contiguous()
    return (data, weight, offsets), lambda: OPS._segment_weighted_sum(data, weight, offsets, None, None, 0, False, 0)


def weighted_broadcast(data: Tensor, values: Tensor, offsets: Tensor):
    weight, values = data[:, 0].float().contiguous(), values.float()
    return (values, weight, offsets), lambda: OPS._segment_weighted_broadcast(values, weight, offsets, None, None, 0, data.dtype)


def dot(data: Tensor, values: Tensor, offsets: Tensor):
    values = values.float()
    return (values, data, offsets), lambda: OPS._segment_dot(values, data, offsets, None, None, 0, 1)


def linear_scan(data: Tensor, values: Tensor, offsets: Tensor):
    factors = torch.rand_like(data)
    return (factors, data, offsets), lambda: OPS._segment_linear_scan(factors, data, offsets, None, None, 0, False)


NORMALISATIONS: dict[str, Callable] = {
    "softmax": reduction("segment_softmax"),
    "log_softmax": reduction("segment_log_softmax"),
    "softmax_backward": normalisation_backward("softmax"),
    "log_softmax_backward": normalisation_backward("log_softmax"),
}

OPERATIONS: dict[str, Callable] = {
    **{name: reduction(f"segment_{name}") for name in ("sum", "mean", "prod", "amax", "max", "any", "logsumexp")},
    "var": var,
    "amax_count": lambda data, values, offsets: (
        (data, offsets),
        lambda: OPS._segment_amax_count(data, offsets, None, None, 0, 0),
    ),
    "broadcast": broadcast,  # the backward of sum
    "mean_backward": mean_backward,
    "weighted_sum": weighted,
    "weighted_broadcast": weighted_broadcast,  # its backward, to the data
    "dot": dot,  # and to the weights
    "select_backward": select_backward,  # of max
    "extremum_backward": extremum_backward,  # of amax
    **{name: reduction(f"segment_{name}") for name in ("cumsum", "cumprod", "cummax", "logcumsumexp")},
    "linear_scan": linear_scan,  # in the backward of all but cumsum
    "topk": lambda data, values, offsets: ((data, offsets), lambda: OPS.segment_topk(data, offsets, None, None, 3)),
    "median": lambda data, values, offsets: ((data, offsets), lambda: OPS.segment_median(data, offsets, None, None)),
    **NORMALISATIONS,
}

TABLES = tuple((name, torch.float32) for name in OPERATIONS) + tuple(
    (name, dtype) for dtype in (torch.float16, torch.bfloat16) for name in ("sum", "max", "broadcast", "softmax", "weighted_sum")
)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(operation: Callable, dtype: torch.dtype, case: Case) -> dict[str, float]:
    lengths = case.lengths()
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).cuda()
    data = torch.randn(case.rows, case.columns).to(dtype).cuda()
    values = torch.randn(len(lengths), case.columns).to(dtype).cuda()
    inputs, run = operation(data, values, offsets)
    waits = cudasim.syncs()
    with cudasim.stats() as statistics:
        results = run()
    waits = cudasim.syncs() - waits
    results = results if isinstance(results, (tuple, list)) else (results,)
    launches = [launch for launch in statistics.launches if "fastops" in launch["kernel"]]
    elements = max(tensor.numel() for tensor in (*inputs, *results))
    return {
        "bytes": sum(launch["l2_bytes"] for launch in launches) / num_bytes((*inputs, *results)),
        "instructions": sum(launch["thread_instructions"] for launch in launches) / elements,
        "longest": max(launch["longest_warp"] for launch in launches),
        "launches": len(launches),
        "waits": waits,
    }


def table(name: str, dtype: torch.dtype) -> None:
    print(f"\n### {name}, {str(dtype).removeprefix('torch.')}\n")
    print("| case | l2 / ideal | instructions | longest warp | launches | waits |")
    print("|---|---|---|---|---|---|")
    longest: dict[str, float] = {}
    for case in CASES + (LONG_CASES if name in NORMALISATIONS else ()):
        found = measure(OPERATIONS[name], dtype, case)
        longest[case.name] = found["longest"]
        ratio = f" ({found['longest'] / longest[case.uniform]:.2f})" if case.uniform else ""
        print(
            f"| {case.name} | {found['bytes']:.3f} | {found['instructions']:.2f} | {found['longest']:.0f}{ratio} "
            f"| {found['launches']} | {found['waits']} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--all", action="store_true", help="every operation and dtype")
    parser.add_argument("operations", nargs="*", help=f"of {', '.join(OPERATIONS)}; float32")
    arguments = parser.parse_args()
    if unknown := set(arguments.operations) - set(OPERATIONS):
        parser.error(f"operations must be of {', '.join(OPERATIONS)}, but got {', '.join(sorted(unknown))}")
    if not cudasim.active():
        raise SystemExit("cuda_traffic: the simulator must be active; start this with cudasim-run")
    torch.manual_seed(0)
    tables = TABLES if arguments.all else [(name, torch.float32) for name in arguments.operations or ("sum",)]
    for name, dtype in tables:
        table(name, dtype)


if __name__ == "__main__":
    main()
