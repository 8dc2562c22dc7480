"""What fastops is tested with, published so that others can test against it: length patterns, inputs, tolerances.

>>> [sample.id for sample in sample_inputs("segment_sum", "cpu", torch.float32)][:2]
['none-D1-contiguous-offsets', 'one_empty-D3-transposed-offsets32']
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Iterator, Optional, Union

import numpy as np
import torch
from torch import Tensor

from . import registry
from .segments import Segments

# One example everywhere; the empty middle segment is the point.
CANONICAL_DATA = (3, 1, 4, 1, 5, 9, 2)
CANONICAL_OFFSETS = (0, 3, 3, 7)

# Lengths of segments that once broke something, here or elsewhere. Every operation meets each of them on every device.
# The lengths around powers of two are where a warp, a block or a vector loop ends.
PATTERNS: dict[str, tuple[int, ...]] = {
    "none": (),
    "one_empty": (0,),
    "all_empty": (0,) * 5,
    "one_row": (1,),
    "canonical": (3, 0, 4),
    "around_32": (31, 32, 33),
    "around_128": (127, 128, 129),
    "1023": (1023,),
    "1024": (1024,),
    "1025": (1025,),
    "uniform": (5,) * 40,
    "one_giant": (1, 0, 2, 3, 5000, 1, 0, 2),
    "giant_first": (3000, 1, 1, 1),
    "giant_last": (1, 1, 1, 3000),
    "many_tiny": (0, 1, 2, 0, 1, 3, 1, 1) * 40,
    "singles": (1,) * 70,
    "leading_empties": (0, 0, 0, 0, 3, 2),
    "trailing_empties": (3, 0, 4, 0, 0, 0, 0),
}

# Elements per row: scalars, less than a 16-byte load, one, two, a warp's worth twice, and an odd number past that.
FEATURES = (1, 3, 4, 8, 64, 129)

# How data lies in memory.
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded", "dim1", "negative_dim", "channels")

# What the segments are made from.
GROUPINGS = ("offsets", "offsets32", "lengths", "index", "unsorted", "unsorted32", "ignored")

# Relative and absolute tolerance of a result against the reference in float64.
TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (8e-3, 1e-5),
    torch.float32: (2e-6, 1e-6),
    torch.float64: (1e-12, 1e-12),
}

# Elements of a sample: tests have to end in time where the device is an interpreter.
MAX_ELEMENTS = 100_000


@dataclass(frozen=True)
class Sample:
    """One call: `op.fn(*args, **kwargs)`."""

    id: str
    args: tuple[Tensor, Segments]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.id


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise `exception`, whose words match `pattern`."""

    id: str
    call: Callable[[], Any]
    exception: type
    pattern: str

    def __repr__(self) -> str:
        return self.id


def make_generator(seed: int = 0) -> torch.Generator:
    """A source of random numbers of its own: the global state is left alone."""
    return torch.Generator().manual_seed(seed)


def make_data(shape: tuple[int, ...], dtype: torch.dtype, *, kind: str = "dyadic", seed: int = 0) -> Tensor:
    """Numbers on the CPU, of one kind:

    - dyadic: multiples of 1/8 in [-4, 4], with many ties; their sums are exact in every dtype that accumulates in
      float32
    - factors: of +-1, +-2 and +-1/2, rarely 0; their products are exact as long as they do not overflow
    - normal: any float, with no ties to speak of
    - distinct: no two within 1/4, so that a numerical derivative does not cross a tie
    - special: dyadic with NaN, infinities and negative zeros among them
    """
    generator = make_generator(seed)
    numel = 1
    for size in shape:
        numel *= size
    if dtype == torch.bool:
        return torch.randint(0, 4, shape, generator=generator) == 0
    if kind == "normal" and dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "distinct":
        return (torch.randperm(numel, generator=generator).reshape(shape) / 4 - numel / 8 + 1 / 16).to(dtype)
    if kind == "factors":
        if not dtype.is_floating_point:
            few = torch.tensor([1, 1, 1, 2, 3] if dtype == torch.uint8 else [1, -1, 1, 2, -3])
            return few[torch.randint(0, 5, shape, generator=generator)].to(dtype)
        values = torch.tensor([1.0, -1.0, 1.0, 2.0, 0.5, -2.0, -0.5, 1.0])[
            torch.randint(0, 8, shape, generator=generator)
        ]
        zeros = torch.randint(0, 50, shape, generator=generator) == 0
        return torch.where(zeros, 0.0, values).to(dtype)
    low = 0 if dtype == torch.uint8 else -32
    values = torch.randint(low, 33, shape, generator=generator)
    if not dtype.is_floating_point:
        return values.to(dtype)
    values = values / 8
    if kind == "special":
        which = torch.randint(0, 24, shape, generator=generator)
        for number, special in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
            values = torch.where(which == number, special, values)
    return values.to(dtype)


def make_segments(
    lengths: tuple[int, ...], grouping: str = "offsets", *, device: Any = "cpu", seed: int = 0
) -> Segments:
    """Segments of these lengths. `ignored` has two more rows for every five, which belong to none."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    if grouping == "offsets":
        return Segments.from_offsets(offsets.to(device))
    if grouping == "offsets32":
        return Segments.from_offsets(offsets.int().to(device))
    if grouping == "lengths":
        return Segments.from_lengths(counts.to(device))
    index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    if grouping == "index":
        return Segments.from_index(index.to(device), len(lengths))
    generator = make_generator(seed)
    if grouping == "ignored":
        index = torch.cat((index, index.new_full((index.numel() * 2 // 5 + 1,), -1)))
        index = index[torch.randperm(index.numel(), generator=generator)]
        return Segments.from_index(index.to(device), len(lengths), ignore_index=-1)
    index = index[torch.randperm(index.numel(), generator=generator)]
    if grouping == "unsorted32":
        index = index.int()
    elif grouping != "unsorted":
        raise ValueError(f"make_segments: grouping must be one of {', '.join(GROUPINGS)}, but got {grouping}")
    return Segments.from_index(index.to(device), len(lengths))


def lay_out(data: Tensor, layout: str, device: Any = "cpu") -> tuple[Tensor, int]:
    """The same `[N, D]` numbers in another memory layout, and the dimension that its rows are in then.

    `expanded` repeats the first feature with stride 0, so there the numbers are not all the same.
    """
    if layout == "contiguous":
        return data.to(device), 0
    if layout == "transposed":
        return data.t().contiguous().to(device).t(), 0
    if layout == "sliced":
        wide = torch.stack((data, torch.full_like(data, 1)), 1).reshape(2 * data.size(0), data.size(1))
        return wide.to(device)[::2], 0
    if layout == "offset":  # starts where no vector load may
        flat = torch.cat((data.new_ones(3), data.reshape(-1))).to(device)
        return flat[3:].view(data.shape), 0
    if layout == "expanded":
        return data[:, :1].contiguous().to(device).expand(data.shape), 0
    if layout == "dim1":
        return data.t().contiguous().to(device), 1
    if layout == "negative_dim":
        return data.reshape(1, *data.shape).to(device), -2
    if layout == "channels":
        return data.reshape(*data.shape, 1, 1).to(device).contiguous(memory_format=torch.channels_last), 0
    raise ValueError(f"lay_out: layout must be one of {', '.join(LAYOUTS)}, but got {layout}")


def make_sample(
    op: Union[str, registry.Op],
    pattern: str,
    features: int,
    layout: str,
    grouping: str,
    dtype: torch.dtype,
    device: Any = "cpu",
    *,
    kind: Optional[str] = None,
    requires_grad: bool = False,
) -> Sample:
    op = registry.find(op)
    segments = make_segments(PATTERNS[pattern], grouping, device=device)
    rows = segments.num_segments if op.takes_values else segments.num_rows
    data = make_data((rows, features), dtype, kind=kind or op.data_kind)
    data, dim = lay_out(data, layout, device)
    if requires_grad:
        data = data.detach().requires_grad_()
    kwargs = {"dim": dim} if dim != 0 else {}
    return Sample(f"{pattern}-D{features}-{layout}-{grouping}", (data, segments), kwargs)


def sample_inputs(
    op: Union[str, registry.Op],
    device: Any,
    dtype: torch.dtype,
    requires_grad: bool = False,
    patterns: Optional[Collection[str]] = None,
) -> Iterator[Sample]:
    """Every length pattern (or those named), each with its own choice of features, layout and grouping, which differ
    with op and dtype so that all of them meet in the end. Always the same ones for the same arguments."""
    op = registry.find(op)
    shift = registry.OPS.index(op) + 2 * registry.ALL_DTYPES.index(dtype)
    if op.name == "segment_sum" and dtype == torch.float32:
        shift = 0  # the one that documentation shows
    for number, (pattern, lengths) in enumerate(PATTERNS.items()):
        if patterns is not None and pattern not in patterns:
            continue
        turn = number + shift
        layout = LAYOUTS[turn % len(LAYOUTS)]
        grouping = GROUPINGS[(turn + turn // len(GROUPINGS)) % len(GROUPINGS)]
        features = FEATURES[(turn + turn // len(FEATURES)) % len(FEATURES)]
        while sum(lengths) * features > MAX_ELEMENTS and features > 1:
            features = FEATURES[FEATURES.index(features) - 1]
        yield make_sample(op, pattern, features, layout, grouping, dtype, device, requires_grad=requires_grad)


def small_inputs(op: Union[str, registry.Op], device: Any, requires_grad: bool = True) -> Iterator[Sample]:
    """float64 inputs for numerical derivatives: few numbers, with empty segments, several layouts and all groupings."""
    op = registry.find(op)
    for number, grouping in enumerate(GROUPINGS):
        segments = make_segments((3, 0, 1, 4, 0), grouping, device=device)
        rows = segments.num_segments if op.takes_values else segments.num_rows
        kind = "distinct" if op.data_kind == "dyadic" else "factors"
        data = make_data((rows, 2), torch.float64, kind=kind, seed=number)
        layout = ("contiguous", "transposed", "sliced", "offset", "dim1", "negative_dim", "contiguous")[number]
        data, dim = lay_out(data, layout, device)
        data = data.detach().requires_grad_(requires_grad)
        kwargs = {"dim": dim} if dim != 0 else {}
        if op.empty.startswith(("-inf", "nan")):
            kwargs["fill_value"] = 0  # a difference of infinities is no derivative
        yield Sample(f"{layout}-{grouping}", (data, segments), kwargs)


def assert_matches(actual: Any, expected: Any, dtype: torch.dtype, *, exact: bool = False) -> None:
    """Whether a result is that of the reference in float64: bit for bit for integers and where `exact`, else within TOLERANCES.
    NaN matches NaN, and 0.0 matches -0.0."""
    if isinstance(expected, tuple):
        assert type(actual) is type(expected), f"got {type(actual)}, not {type(expected)}"
        for one, other in zip(actual, expected):
            assert_matches(one, other, dtype, exact=exact)
        return
    rtol, atol = (0, 0) if exact or not actual.is_floating_point() else TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu().to(actual.dtype), rtol=rtol, atol=atol, equal_nan=True)


def expected_result(op: Union[str, registry.Op], sample: Sample) -> Any:
    """What the reference makes of a sample on the CPU, in float64 where the data is floating."""
    op = registry.find(op)
    data, segments = sample.args
    data = data.detach().cpu()
    if data.is_floating_point():
        data = data.double()
    return op.reference(data, segments.cpu(), **sample.kwargs)
