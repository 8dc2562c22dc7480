"""What a type checker makes of fastops. tests/test_typing.py has mypy read this file strictly, where an ignored error that is none
is an error too, and runs it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import fastops
from fastops import Segments

data = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
offsets = torch.tensor([0, 3, 3, 7])
segments = Segments.from_offsets(offsets)

# Segments.
assert_type(segments, Segments)
assert_type(segments.offsets, Tensor)
assert_type(segments.lengths, Tensor)
assert_type(segments.num_rows, int)
assert_type(segments.device, torch.device)
assert_type(segments.to("cpu", non_blocking=True), Segments)
assert_type(Segments.from_index(torch.tensor([0, 2]), num_segments=3, ignore_index=-1), Segments)

# One result.
assert_type(fastops.segment_sum(data, segments), Tensor)
assert_type(fastops.segment_sum(data, offsets, dim=0, dtype=torch.float64, fill_value=1, weight=data), Tensor)
assert_type(fastops.segment_any(data, segments, fill_value=True), Tensor)
assert_type(fastops.segment_softmax(torch.nn.Parameter(data), segments), Tensor)
assert_type(fastops.segment_cumsum(data, segments, exclusive=True, reverse=True), Tensor)
assert_type(fastops.segment_quantile(data, segments, 0.5, interpolation="lower"), Tensor)
assert_type(fastops.segment_broadcast(fastops.segment_mean(data, segments), segments), Tensor)

# Two, by name and unpacked.
found = fastops.segment_max(data, segments)
assert_type(found.values, Tensor)
assert_type(found.indices, Tensor)
values, indices = fastops.segment_sort(data, segments, descending=True)
assert_type(values, Tensor)
assert_type(indices, Tensor)

# NumPy arrays give NumPy arrays.
array = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
assert_type(fastops.segment_sum(array, np.array([0, 3, 3, 7])), np.ndarray[Any, Any])
assert_type(fastops.segment_topk(array, segments, 2).values, np.ndarray[Any, Any])
assert_type(fastops.segment_mean(array, segments, weight=np.ones(7), dtype=np.float64), np.ndarray[Any, Any])
assert_type(fastops.segment_mean(data, segments, weight=np.ones(7, dtype=np.float32), dim=np.int64(0)), Tensor)
assert_type(fastops.segment_sort(data, segments, descending=np.bool_(True)).values, Tensor)
assert_type(Segments.from_lengths(np.array([3, 0, 4])), Segments)
assert_type(Segments.from_index(np.array([0, 2]), np.int64(3)), Segments)


# Modules, and what is passed on.
class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = fastops.nn.SegmentPool(["sum", "amax"])

    def forward(self, data: Tensor, segments: Segments) -> Tensor:
        pooled: Tensor = self.pool(data, segments)
        return pooled


assert_type(Model().forward(data[:, None], segments), Tensor)
assert_type(fastops.library_path(), str)


def wrong() -> None:
    fastops.segment_sum([3.0, 1.0], segments)  # type: ignore[type-var]
    fastops.segment_sum(data, segments, axis=0)  # type: ignore[call-arg]
    fastops.segment_sum(data, segments, 0)  # type: ignore[call-arg]
    fastops.segment_quantile(data, segments, "half")  # type: ignore[arg-type]
    Segments.from_lengths([3, 0, 4])  # type: ignore[arg-type]
    Segments(offsets).num_rows = 3  # type: ignore[misc]
