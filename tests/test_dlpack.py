"""Arrays of other libraries come and go by DLPack, in the same memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run_page

from fastops import Segments, segment_max, segment_softmax, segment_sum
from fastops.registry import OPS

OFFSETS = np.array([0, 3, 3, 7])


class Exported:
    """What is known of an array of any library: that it hands out its memory."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_operations_name_the_way(op, device):
    data = Exported(torch.ones(3 if op.takes_values else 7, device=device))
    words = r"^{}: {} must be a torch.Tensor or a NumPy array, but got test_dlpack.Exported; pass torch.from_dlpack\(...\) of it$"
    with pytest.raises(TypeError, match=words.format(op.name, "values" if op.takes_values else "data")):
        op.fn(data, torch.from_numpy(OFFSETS).to(device))


def test_arguments_name_the_way():
    foreign = Exported(torch.from_numpy(OFFSETS))
    for name in ("offsets", "lengths", "index"):
        with pytest.raises(TypeError, match=rf"^Segments.from_{name}: {name} must be .*; pass torch.from_dlpack\(...\) of it$"):
            getattr(Segments, f"from_{name}")(foreign)
    with pytest.raises(TypeError, match=r"^segment_sum: segments must be .*; pass torch.from_dlpack\(...\) of it$"):
        segment_sum(torch.ones(7), foreign)
    with pytest.raises(TypeError, match=r"^segment_sum: weight must be .*; pass torch.from_dlpack\(...\) of it$"):
        segment_sum(torch.ones(7), OFFSETS, weight=foreign)


def test_in_and_out(device):
    memory = torch.tensor([3.0, 1, 4, 1, 5, 9, 2], device=device)
    data = torch.from_dlpack(Exported(memory))
    assert data.data_ptr() == memory.data_ptr() and data.device == memory.device
    result = segment_sum(data, Segments.from_offsets(OFFSETS).to(device))
    back = torch.from_dlpack(Exported(result))
    assert back.data_ptr() == result.data_ptr() and back.tolist() == [8, 0, 17]


def test_out_to_numpy():
    result = segment_max(torch.tensor([3.0, 1, 4, 1, 5, 9, 2]), OFFSETS)
    for part in result:
        array = np.from_dlpack(part)
        assert array.ctypes.data == part.data_ptr() and array.tolist() == part.tolist()
    array = np.from_dlpack(segment_sum(np.ones(7), OFFSETS))
    assert array.tolist() == [3, 0, 4]


def test_jax():
    jax = pytest.importorskip("jax")
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.int32):
        rows = jax.numpy.array([3, 1, 4, 1, 5, 9, 2], dtype)
        data = torch.from_dlpack(rows)
        assert data.data_ptr() == rows.unsafe_buffer_pointer()
        for result in (segment_sum(data, OFFSETS, dtype=data.dtype), *segment_max(data, OFFSETS)[:1]):
            back = jax.numpy.from_dlpack(result)
            assert back.unsafe_buffer_pointer() == result.data_ptr()
            assert back.dtype == dtype and back.tolist() == result.tolist()
    grouped = Segments.from_lengths(torch.from_dlpack(jax.numpy.array([3, 0, 4])))
    shares = jax.numpy.from_dlpack(segment_softmax(torch.from_dlpack(jax.numpy.ones(7)), grouped))
    assert shares.tolist() == pytest.approx([1 / 3] * 3 + [1 / 4] * 4)
    assert segment_sum(np.asarray(rows), OFFSETS).tolist() == [8, 0, 17], "which NumPy sees as a read-only array"
    with pytest.raises(TypeError, match=r"^segment_sum: data must be .*, but got jax.*; pass torch.from_dlpack\(...\) of it$"):
        segment_sum(rows, OFFSETS)


def test_the_page():
    pytest.importorskip("jax")
    pytest.importorskip("pandas")
    run_page(Path(__file__).resolve().parents[1] / "docs" / "numpy.md", "python", "python jax")
