"""`offload`: the bits of the direct call, in bounded memory, whatever happens on the way."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import close, same

import fastops
from fastops import Segments, _offload, offload, registry, testing

OFFSETS = torch.tensor([0, 3, 3, 7])
DATA = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
SMALL = 2_000  # bytes of a chunk: several chunks for most samples, and parts of segments for some
EXACT_IN_PARTS = ("segment_amin", "segment_amax", "segment_min", "segment_max", "segment_any", "segment_all")


def as_tuple(results):
    return tuple(results) if isinstance(results, tuple) else (results,)


def on(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


def assert_same_bits(results, expected):
    assert type(results) is type(expected)
    for one, other in zip(as_tuple(results), as_tuple(expected)):
        other = other.cpu()
        assert one.is_cpu and one.is_contiguous() and (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def chunks_of(op, data, segments, max_bytes, device="cpu", **options):
    call = _offload._Call(op, data, segments, options)
    return call.plan(_offload._find_budget(max_bytes, torch.device(device)), torch.device(device))


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_the_bits_of_the_direct_call(op, device):
    """Whole segments in chunks: every operation, layout and grouping; less of it where the device may be an interpreter."""
    several = 0
    for dtype in op.dtypes if device == "cpu" else {op.dtypes[0], op.dtypes[-1], torch.float32}:
        patterns = None if device == "cpu" or dtype == torch.float32 else ("canonical", "around_32", "many_tiny", "trailing_empties")
        for sample in testing.sample_inputs(op, "cpu", dtype, patterns=patterns):
            direct = op.fn(*on(device, *sample.args), **sample.kwargs)
            least = SMALL
            while any(chunk.is_part for chunk in plan_or_parts(op, sample, least, device)):
                least *= 2
            several += len(plan_or_parts(op, sample, least, device)) > 1
            assert_same_bits(offload(op, *sample.args, device=device, max_bytes=least, **sample.kwargs), direct)
            assert_same_bits(offload(op, *sample.args, device=device, **sample.kwargs), direct)
    assert several >= (15 if device == "cpu" else 2)


def plan_or_parts(op, sample, max_bytes, device):
    """The chunks of a sample; where it would be refused, chunks that are parts."""
    try:
        return chunks_of(op, *sample.args, max_bytes, device, **sample.kwargs)
    except ValueError as error:
        assert "max_bytes must be at least" in str(error)
        return [_offload._Chunk(0, 1, 0, 1, 0, is_part=True)]


@pytest.mark.parametrize("name", sorted(_offload._JOIN))
def test_parts_of_a_long_segment(name, device):
    """Segments of more rows than a chunk holds, among others. Sums of dyadic numbers are exact wherever they are cut."""
    op = registry.find(name)
    rows = 4000 if device == "cpu" else 400
    for number, dtype in enumerate(op.dtypes):
        grouping = testing.GROUPINGS[number % len(testing.GROUPINGS)]
        segments = testing.make_segments((1, 0, 2, rows, 1, rows // 2, 0), grouping)
        kind = "special" if name in EXACT_IN_PARTS and dtype.is_floating_point else "dyadic"
        data = testing.make_data((segments.num_rows, 3), dtype, kind=kind)
        max_bytes = rows // 4 * 3 * dtype.itemsize + 300
        chunks = chunks_of(op, data, segments, max_bytes, device)
        assert sum(chunk.is_part for chunk in chunks) >= 5 and sum(chunk.is_last_part for chunk in chunks) == 2
        result = offload(op, data, segments, device=device, max_bytes=max_bytes)
        direct = op.fn(*on(device, data, segments))
        rtol = 0.0
        if name in ("segment_logsumexp", "segment_mean"):
            rtol = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        for one, other in zip(as_tuple(result), as_tuple(direct)):
            torch.testing.assert_close(one, other.cpu(), rtol=rtol, atol=rtol, equal_nan=True)


def cut(op, data, device, **options):
    """The direct call for one segment of all rows, and what comes of parts of it."""
    data, rows = data.contiguous(), torch.tensor([0, data.size(0)])
    max_bytes = 600 if device == "cpu" else 1024
    assert len(chunks_of(op, data, rows, max_bytes, device, **options)) >= 3
    there = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    direct = getattr(fastops, op)(*on(device, data, rows), **there)
    return direct.cpu(), offload(op, data, rows, device=device, max_bytes=max_bytes, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logarithms_of_many_parts(dtype, device):
    """They are rounded once: joined in 16 bits, a sum stops growing where a part no longer moves it."""
    rows = 20_000 if device == "cpu" else 1_000
    _, joined = cut("segment_logsumexp", torch.zeros(rows, dtype=dtype), device)
    assert_same_bits(joined, torch.tensor([rows], dtype=torch.float64).log().to(dtype))
    _, joined = cut("segment_logsumexp", torch.full((1000,), -torch.inf, dtype=dtype), device)
    assert joined.tolist() == [-torch.inf]
    for special in (torch.inf, torch.nan):
        data = torch.zeros(1000, dtype=dtype)
        data[-1] = special
        close(cut("segment_logsumexp", data, device)[1], [special])


@pytest.mark.parametrize("op", ["segment_sum", "segment_mean"])
def test_parts_of_rows_that_are_converted(op, device):
    """First to the dtype that is asked for, as in the call itself: what overflows there is infinite."""
    data = torch.tensor([1e5, -1e5]).repeat(500)
    direct, joined = cut(op, data, device, dtype=torch.float16)
    assert direct.isnan().all() and joined.isnan().all()
    for given in (torch.full((1000,), 2049, dtype=torch.int64), torch.full((1000,), 1e-8), torch.full((1000,), 257.0)):
        for dtype in (torch.float16, torch.bfloat16):
            direct, joined = cut(op, given, device, dtype=dtype)
            torch.testing.assert_close(joined, direct)
    weight = torch.full((1000,), 1e39, dtype=torch.float64)
    if op == "segment_sum":  # the factors of float32 are of float32
        direct, joined = cut(op, torch.ones(1000), device, dtype=torch.float32, weight=weight)
        assert direct.tolist() == joined.tolist() == [torch.inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_that_are_larger_than_the_whole(dtype, device):
    """Halves that are infinite in float32."""
    data = torch.tensor([2.0**125, -(2.0**125)]).repeat_interleave(500).to(dtype)
    for options in ({}, {"dtype": torch.float32}):
        assert cut("segment_sum", data, device, **options)[1].tolist() == [0.0]
        assert abs(cut("segment_mean", data, device, **options)[1].item()) < 2.0**125 * 1e-14
    assert cut("segment_sum", data, device, weight=torch.ones(1000))[1].tolist() == [0.0]


def test_options(device):
    data = testing.make_data((500, 3), torch.float32, kind="normal")
    weight = testing.make_data((500,), torch.float64, kind="normal")
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    lengths = (7, 0, 3, 12, 1, 0, 20) * 9 + (42,)
    for grouping in ("offsets", "unsorted32", "ignored"):
        segments = testing.make_segments(lengths, grouping)
        rows = segments.num_rows
        given = data.repeat(2, 1)[:rows]
        calls = [
            (fastops.segment_sum, {"weight": weight.repeat(2)[:rows]}),
            (fastops.segment_sum, {"weight": given, "dim": 0}),
            (fastops.segment_mean, {"weight": weight.repeat(2)[:rows].abs(), "dtype": torch.float64}),
            (fastops.segment_sum, {"dtype": torch.float64, "fill_value": 3}),
            (fastops.segment_argmax, {"fill_value": 5}),
            (fastops.segment_argmin, {"fill_value": -7}),
            (fastops.segment_max, {"fill_value": 1e6}),
            (fastops.segment_cummax, {"exclusive": True, "reverse": True}),
            (fastops.segment_sort, {"descending": True}),
            (functools.partial(fastops.segment_topk, k=5), {"largest": False}),
            ("segment_topk", {"k": 3, "sorted": False}),
            (fastops.segment_quantile, {"q": shares, "interpolation": "nearest"}),
            (functools.partial(functools.partial(fastops.segment_quantile, q=0.2), interpolation="lower"), {}),
            (fastops.segment_var, {"correction": 0}),
        ]
        for op, options in calls:
            direct = op if callable(op) else getattr(fastops, op)
            there = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
            expected = direct(*on(device, given, segments), **there)
            assert_same_bits(offload(op, given, segments, device=device, max_bytes=8192, **options), expected)
            for name in ("q", "weight"):
                if isinstance(options.get(name), torch.Tensor):  # of one segment for each row, so to say
                    break
            else:
                turned = given.t().contiguous()
                expected = direct(*on(device, turned, segments), dim=-1, **there)
                assert_same_bits(offload(op, turned, segments, device=device, max_bytes=8192, dim=-1, **options), expected)


def test_quantiles_of_the_last_dimension(device):
    q, data = torch.tensor([0.25, 0.5]), testing.make_data((2, 7, 3), torch.float64)
    expected = fastops.segment_quantile(*on(device, data, OFFSETS), q.to(device), dim=1)
    assert_same_bits(offload(fastops.segment_quantile, data, OFFSETS, device=device, max_bytes=600, q=q, dim=1), expected)


def test_by_hand():
    same(offload(fastops.segment_sum, DATA, OFFSETS, device="cpu", max_bytes=100), [8.0, 0.0, 17.0])
    mixed = Segments.from_index(torch.tensor([2, 0, 2, 0, -1]), 3, ignore_index=-1)
    values, rows = offload("segment_cummax", torch.tensor([1, 5, 4, 2, 9]), mixed, device="cpu", max_bytes=200)
    assert values.tolist() == [1, 5, 4, 5, 0] and rows.tolist() == [0, 1, 2, 1, -1]
    values, rows = offload("segment_sort", torch.tensor([1, 5, 4, 2, 9]), mixed, device="cpu", max_bytes=200)
    assert values.tolist() == [2, 5, 1, 4] and rows.tolist() == [3, 1, 0, 2]
    assert offload("segment_argmax", DATA, OFFSETS, device="cpu", max_bytes=96, fill_value=1).tolist() == [2, 1, 5]


def test_every_name_of_an_operation():
    op = registry.find("segment_topk")
    for given in (op, op.fn, functools.partial(fastops.segment_topk, k=2)):
        assert offload(given, DATA, OFFSETS, device="cpu").indices.tolist() == [[2, 0], [-1, -1], [5, 4]]
    with pytest.raises(ValueError, match="^offload: op must be an operation of fastops, its name, or a partial of it, but got 'sum'"):
        offload("sum", DATA, OFFSETS, device="cpu")
    for given, words in ((torch.sum, "torch._VariableFunctionsClass.sum"), (fastops.reference.segment_sum, "fastops.reference.segment_sum"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"^offload: op must be an operation of fastops, .*, but got {words}$"):
            offload(given, DATA, OFFSETS, device="cpu")
    with pytest.raises(TypeError, match="^offload: op must be a partial of named arguments only, but got 1 without a name"):
        offload(functools.partial(fastops.segment_sum, DATA), DATA, OFFSETS, device="cpu")


def test_another_default_device():
    """What is made in host memory is made there, whatever torch makes tensors on by default."""
    index = Segments.from_index(torch.tensor([1, 0, 1, 0, 1, 1, 0]), 2)
    long, whole = torch.arange(100.0), torch.tensor([0, 100])
    torch.set_default_device("meta")
    try:
        results = [
            offload("segment_sum", DATA, OFFSETS, device="cpu"),
            offload("segment_sort", DATA, index, device="cpu", max_bytes=500).values,
            *(offload(op, long, whole, device="cpu", max_bytes=300) for op in ("segment_amax", "segment_mean")),
            offload("segment_max", long, whole, device="cpu", max_bytes=300).indices,
        ]
    finally:
        torch.set_default_device(None)
    assert all(result.is_cpu for result in results)
    assert [result.tolist() for result in results] == [[8, 0, 17], [1, 1, 2, 3, 4, 5, 9], [99], [49.5], [99]]


# Arrays and files ----------------------------------------------------------------------------------------------------


def test_arrays_and_files(tmp_path, device, recwarn):
    numbers = testing.make_data((500, 4), torch.float32).numpy()
    np.save(tmp_path / "rows.npy", numbers)
    segments = testing.make_segments((10, 0, 30, 60) * 5, "unsorted")
    read_only = np.load(tmp_path / "rows.npy", mmap_mode="r")
    weight = np.memmap(tmp_path / "weight", dtype=np.float64, mode="w+", shape=(500,))
    weight[:] = np.arange(500)
    expected = fastops.segment_sum(*on(device, torch.from_numpy(numbers), segments))
    weighted = fastops.segment_sum(*on(device, torch.from_numpy(numbers), segments), weight=torch.arange(500.0, device=device).double())
    for array in (numbers, read_only, np.asfortranarray(numbers)):
        assert_same_bits(offload("segment_sum", array, segments, device=device, max_bytes=3000), expected)
        assert_same_bits(offload("segment_sum", array, segments, device=device, max_bytes=8000, weight=weight), weighted)
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]
    with pytest.raises(ValueError, match="^segment_sum: data must be an array that torch can read, but got one of float32: .*stride"):
        offload("segment_sum", numbers[::-1], segments, device="cpu")
    with pytest.raises(TypeError, match="^segment_sum: data must be an array that torch can read, but got one of <U1: "):
        offload("segment_sum", np.array(["a"]), segments, device="cpu")


@pytest.mark.parametrize("argument", ["data", "weight"])
def test_masks_are_not_left_out(argument):
    words = f"^segment_sum: {argument} must be an array without a mask, but got numpy.*MaskedArray; pass .filled\\(value\\) of it"
    with pytest.raises(TypeError, match=words):
        offload("segment_sum", **{"data": DATA, "segments": OFFSETS, "device": "cpu", argument: np.ma.masked_array(DATA.numpy())})


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_segment_that_is_too_large():
    words = (
        "^segment_softmax: max_bytes must be at least 1[0-9]{3}, for the rows and results of segment 1, which has 100 rows, "
        "but got 600$"
    )
    segments = testing.make_segments((2, 100, 3), "offsets")
    data = testing.make_data((105, 2), torch.float32)
    with pytest.raises(ValueError, match=words) as refused:
        offload("segment_softmax", data, segments, device="cpu", max_bytes=600)
    enough = int(re.search(r"at least (\d+)", str(refused.value))[1])
    assert_same_bits(offload("segment_softmax", data, segments, device="cpu", max_bytes=enough), fastops.segment_softmax(data, segments))
    with pytest.raises(ValueError, match=f"at least {enough}"):
        offload("segment_softmax", data, segments, device="cpu", max_bytes=enough - 1)
    with pytest.raises(ValueError, match="^segment_sum: max_bytes must be at least [0-9]+, for a row and a result, but got 20$"):
        offload("segment_sum", data, segments, device="cpu", max_bytes=20)
    with pytest.raises(ValueError, match="^segment_mean: max_bytes must be at least"):  # with weights, parts are not joined
        offload("segment_mean", data, segments, device="cpu", max_bytes=600, weight=torch.ones(105))


def test_words_of_a_cuda_budget(cuda):
    """Page-locked memory comes in powers of two, and so does what is asked for."""
    segments, data = testing.make_segments((2, 100, 3), "offsets"), testing.make_data((105, 2), torch.float32)
    with pytest.raises(ValueError, match="^segment_softmax: max_bytes must be at least 2048, .* but got 1024$"):
        offload("segment_softmax", data, segments, device=cuda, max_bytes=2000)
    expected = fastops.segment_softmax(*on(cuda, data, segments))
    assert_same_bits(offload("segment_softmax", data, segments, device=cuda, max_bytes=2048), expected)


@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, "offload: max_bytes must be at least 1, but got 0", {"max_bytes": 0}),
        (TypeError, "offload: max_bytes must be an integer, but got str", {"max_bytes": "1 GB"}),
        (ValueError, "offload: device must be the CPU or a CUDA device, but got meta", {"device": "meta"}),
        (ValueError, "offload: device must be the CPU or a CUDA device, but got 'gpu'$", {"device": "gpu"}),
        (TypeError, "offload: device must be the CPU or a CUDA device, but got NoneType$", {"device": None}),
        (TypeError, "offload: device must be the CPU or a CUDA device, but got float$", {"device": 1.5}),
        (ValueError, "offload: device must be the CPU or a CUDA device, but got -1$", {"device": -1}),
        (TypeError, "segment_sum: data must be a torch.Tensor or a NumPy array, but got list", {"data": [1.0]}),
        (ValueError, "segment_sum: data must have 7 rows along dim 0, as the segments do, but got 6", {"data": DATA[:6]}),
        (IndexError, r"segment_sum: dim must be in \[-1, 0\], but got 1", {"dim": 1}),
        (TypeError, "segment_sum: dtype must be a torch.dtype, but got str", {"dtype": "float32"}),
        (ValueError, r"segment_sum: weight must have the shape of data from dim 0 on, \[7\], but got \[6\]", {"weight": DATA[:6]}),
        (fastops.DeviceMismatchError, "segment_sum: data must be in host memory, but got meta; call the operation itself where it is", {"data": DATA.to("meta")}),
        (fastops.DeviceMismatchError, r"segment_sum: offsets must be on the device of data \(cpu\)", {"segments": OFFSETS.to("meta")}),
        (RuntimeError, "segment_sum: data must need no gradient to be offloaded", {"data": DATA.clone().requires_grad_()}),
        (RuntimeError, "segment_sum: weight must need no gradient to be offloaded", {"weight": DATA.clone().requires_grad_()}),
    ],
)
def test_words(error, words, arguments):
    with pytest.raises(error, match=f"^{words}"):
        offload("segment_sum", **{"data": DATA, "segments": OFFSETS, "device": "cpu", **arguments})


def test_values_that_are_wrong_where_there_are_no_segments():
    with pytest.raises(ValueError, match=r"^segment_quantile: q must be in \[0, 1\], but got 2.0$"):
        offload("segment_quantile", DATA[:0], torch.tensor([0]), device="cpu", q=torch.tensor([2.0]))


def test_no_segments(device):
    nothing = {"data": DATA[:0], "segments": torch.tensor([0]), "device": device}
    assert offload("segment_quantile", **nothing, q=torch.tensor([0.5])).shape == (1, 0)
    assert offload("segment_max", **nothing).indices.shape == (0,)
    unsorted = Segments.from_index(torch.tensor([-1, -1]), 0, ignore_index=-1)
    assert offload("segment_cumsum", DATA[:2], unsorted, device=device).tolist() == [0, 0]
    assert offload("segment_sum", DATA[:2], unsorted, device=device, weight=DATA[:2]).tolist() == []


def test_no_gradient_where_none_is_wanted():
    leaf = DATA.clone().requires_grad_()
    with torch.no_grad():
        result = offload("segment_sum", leaf, OFFSETS, device="cpu")
    assert not result.requires_grad
    close(result, [8.0, 0.0, 17.0])


def test_a_number_of_a_device(monkeypatch):
    """torch takes it for the CUDA device of that number, where there are any."""
    if torch.cuda.is_available():
        assert _offload.find_device("offload", 0, ("cuda",), "be there") == torch.device("cuda:0")
    else:
        with pytest.raises(ValueError, match="^offload: device must be the CPU or a CUDA device, but got 0$"):
            offload("segment_sum", DATA, OFFSETS, device=0)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="^offload: device must be there, but got cuda, and torch sees no CUDA device"):
        offload("segment_sum", DATA, OFFSETS, device="cuda")


def test_offsets_that_nobody_checked():
    for wrong in ([0, 5, 3, 7], [1, 3, 7], [0, 3, 900]):
        segments = Segments.from_offsets(torch.tensor(wrong), check_invariants=False)
        data = torch.ones(wrong[-1])
        if wrong[-1] == 900:
            segments, data = Segments.from_offsets(torch.tensor(wrong)), torch.ones(7)
        with pytest.raises(ValueError, match="segment_sum: "):
            offload("segment_sum", data, segments, device="cpu")


# Memory --------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, threading, time
import numpy as np, torch
import fastops
from fastops import registry

name, path, rows, max_bytes, unsorted = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True"
dtype, row, length = sys.argv[6], int(sys.argv[7]), int(sys.argv[8])
data = np.memmap(path, dtype=dtype, mode="r", shape=(rows, row))
offsets = torch.arange(0, rows + 1, length)
segments = fastops.Segments.from_offsets(offsets)
if unsorted:
    segments = fastops.Segments.from_index(torch.randperm(rows) % (rows // length))

def memory():  # bytes of the process's own pages: those of the file can be dropped, and are
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024

op = registry.find(name)
fastops.offload(op, data[:5000], torch.arange(0, 5001, 50), device="cpu")  # loads what is loaded late
before, most, done = memory(), 0, False
def watch():
    global most
    while not done:
        most = max(most, memory())
        time.sleep(2e-4)
watcher = threading.Thread(target=watch)
watcher.start()
result = fastops.offload(op, data, segments, device="cpu", max_bytes=max_bytes, progress=False)
done = True
watcher.join()
results = result if isinstance(result, tuple) else (result,)
own = sum(one.numel() * one.element_size() for one in results)
print((most - before - own) / max_bytes)
"""


def memory_of_chunks(tmp_path, name, max_bytes, unsorted, rows, dtype, row, length):
    """Chunks that are in memory at once, beside the result, in a process of its own."""
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(rows * row * np.dtype(dtype).itemsize)  # zeros
    folder = str(Path(fastops.__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    # Freed blocks go back at once: glibc keeps up to 64 MB of them, whatever the size of a chunk.
    env = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    arguments = map(str, [name, tmp_path / "rows", rows, max_bytes, unsorted, dtype, row, length])
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


reads_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


@reads_proc
@pytest.mark.parametrize("unsorted", [False, True], ids=["in_order", "unsorted"])
@pytest.mark.parametrize("name", ["segment_sum", "segment_softmax", "segment_sort", "segment_topk"])
def test_peak_memory(tmp_path, name, unsorted):
    """A file of eight chunks: at most 2.5 of them are in memory beside the result."""
    assert memory_of_chunks(tmp_path, name, 2**24, unsorted, 2_000_000, "float32", 16, 50) <= 2.5


@reads_proc
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
@pytest.mark.parametrize("name", ["segment_median", "segment_topk"])
def test_peak_memory_of_keys(tmp_path, name, dtype):
    """What is selected among narrow elements is looked for among keys of 4 bytes each."""
    length = 2**22
    rows, data = 3 * length, torch.zeros(length, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match="max_bytes must be at least") as refused:
        offload(registry.find(name), data, torch.tensor([0, length]), device="cpu", max_bytes=1000)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    assert memory_of_chunks(tmp_path, name, least, False, rows, dtype, 1, length) <= 2.5


@reads_proc
@pytest.mark.parametrize("name", ["segment_sum", "segment_logsumexp"])
def test_peak_memory_of_parts(tmp_path, name):
    assert memory_of_chunks(tmp_path, name, 2**22, False, 2**22, "float16", 4, 2**22) <= 2.5


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_buffers_hold_what_was_counted(op, cuda, monkeypatch):
    """Two page-locked buffers and no more, each filled with no more than was planned."""
    buffers, most = [], []

    class Way(_offload._Way):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            buffers.append(self.buffer)

        def finish(self):
            assert self.buffer.used <= self.chunk.num_bytes <= 4096
            most.append(self.buffer.used)
            return super().finish()

    monkeypatch.setattr(_offload, "_Way", Way)
    for grouping in ("offsets32", "unsorted"):
        segments = testing.make_segments((3, 0, 1, 4, 0, 5) * 20, grouping)
        data = testing.make_data((segments.num_segments if op.takes_values else segments.num_rows, 5), torch.float32)
        offload(op, data, segments, device=cuda, max_bytes=4096)
        one, other = (buffer.memory for buffer in buffers[-2:])
        assert one.is_pinned() and other.is_pinned() and one.data_ptr() != other.data_ptr()
    assert len(buffers) == 4 and max(most) > 800


# What happens on the way ---------------------------------------------------------------------------------------------


def test_an_interrupted_run(device, monkeypatch):
    """It ends, nothing is left running, and the next one works."""
    segments = testing.make_segments((5,) * 100, "offsets")
    data = testing.make_data((500, 3), torch.float32)
    store, seen = _offload._Call.store, []

    def interrupted(self, chunk, results):
        store(self, chunk, results)
        seen.append(chunk)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_offload._Call, "store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offload("segment_sum", data, segments, device=device, max_bytes=512)
    assert len(seen) == 3 and torch.is_grad_enabled()
    expected = fastops.segment_sum(*on(device, data, segments))
    assert_same_bits(offload("segment_sum", data, segments, device=device, max_bytes=512), expected)


def test_a_failing_chunk(device, monkeypatch):
    run, seen = _offload._Call.results_of, []

    def failing(self, chunk, *arguments):
        seen.append(chunk)
        if len(seen) == 4:
            raise RuntimeError("out of memory")
        return run(self, chunk, *arguments)

    monkeypatch.setattr(_offload._Call, "results_of", failing)
    segments, data = testing.make_segments((5,) * 100, "offsets"), testing.make_data((500, 3), torch.float32)
    with pytest.raises(RuntimeError, match="out of memory"):
        offload("segment_sum", data, segments, device=device, max_bytes=512)


def test_streams_and_waits(cuda, monkeypatch):
    """Chunks alternate between two streams, neither of which is the caller's."""
    streams, run = [], _offload._Call.results_of

    def noting(self, chunk, inputs, options):
        streams.append(torch.cuda.current_stream().cuda_stream)
        assert all(part.is_cuda for part in inputs)
        return run(self, chunk, inputs, options)

    monkeypatch.setattr(_offload._Call, "results_of", noting)
    segments, data = testing.make_segments((5,) * 100, "offsets"), testing.make_data((500, 3), torch.float32)
    offload("segment_sum", data, segments, device=cuda, max_bytes=512)
    assert len(set(streams)) == 2 and torch.cuda.current_stream().cuda_stream not in streams
    assert len(streams) > 4 and all(one != other for one, other in zip(streams, streams[1:]))


def test_the_second_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device; CUDASIM_DEVICES=2 makes two")
    segments, data = testing.make_segments((5,) * 100, "unsorted"), testing.make_data((500, 3), torch.float32)
    q = torch.tensor([0.2, 0.4])
    expected = fastops.segment_quantile(data, segments, q)
    same(offload("segment_quantile", data, segments, device="cuda:1", max_bytes=2048, q=q), expected)
    assert torch.cuda.current_device() == 0


def test_data_that_is_pinned_already(cuda, monkeypatch):
    """It goes from where it stands: in the buffer there is room for offsets and results only."""
    used, finish = [], _offload._Way.finish

    def noting(self):
        used.append(self.buffer.used)
        return finish(self)

    monkeypatch.setattr(_offload._Way, "finish", noting)
    segments, data = testing.make_segments((50,) * 10, "offsets"), testing.make_data((500, 3), torch.float32)
    expected = fastops.segment_sum(*on(cuda, data, segments))
    for given, most in ((data, 2048), (data.pin_memory(), 200)):
        used.clear()
        assert_same_bits(offload("segment_sum", given, segments, device=cuda, max_bytes=2048), expected)
        assert len(used) > 3 and max(used) <= most and (max(used) > 1000) == (given is data)


def test_the_bar(capsys, monkeypatch):
    segments, data = testing.make_segments((5,) * 100, "offsets"), testing.make_data((500, 3), torch.float32)
    offload("segment_sum", data, segments, device="cpu", max_bytes=512)
    assert capsys.readouterr().err == "", "a short run shows none"
    monkeypatch.setattr(_offload, "PATIENCE", 0.0)
    offload("segment_sum", data, segments, device="cpu", max_bytes=512)
    shown = capsys.readouterr().err
    assert "segment_sum: 100%" in shown and "500/500" in shown
    offload("segment_sum", data, segments, device="cpu", max_bytes=512, progress=False)
    assert capsys.readouterr().err == ""
