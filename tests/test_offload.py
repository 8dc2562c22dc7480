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
    same(offload(fastops.segment_sum, DATA, OFFSETS, device="cpu", max_bytes=80), [8.0, 0.0, 17.0])
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
    with pytest.raises(TypeError, match="^offload: op must be an operation of fastops"):
        offload(torch.sum, DATA, OFFSETS, device="cpu")
    with pytest.raises(TypeError, match="^offload: op must be a partial of named arguments only, but got 1 without a name"):
        offload(functools.partial(fastops.segment_sum, DATA), DATA, OFFSETS, device="cpu")


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


def test_no_gradient_where_none_is_wanted():
    leaf = DATA.clone().requires_grad_()
    with torch.no_grad():
        result = offload("segment_sum", leaf, OFFSETS, device="cpu")
    assert not result.requires_grad
    close(result, [8.0, 0.0, 17.0])


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
data = np.memmap(path, dtype=np.float32, mode="r", shape=(rows, 16))
offsets = torch.arange(0, rows + 1, 50)
segments = fastops.Segments.from_offsets(offsets)
if unsorted:
    segments = fastops.Segments.from_index(torch.randperm(rows) % (rows // 50))

def memory():  # bytes of the process's own pages: those of the file can be dropped, and are
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024

op = registry.find(name)
fastops.offload(op, data[:5000], fastops.Segments.from_offsets(offsets[:101]), device="cpu")  # loads what is loaded late
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("unsorted", [False, True], ids=["in_order", "unsorted"])
@pytest.mark.parametrize("name", ["segment_sum", "segment_softmax", "segment_sort", "segment_topk"])
def test_peak_memory(tmp_path, name, unsorted):
    """A file of eight chunks: at most 2.5 of them are in memory beside the result, in a process of its own."""
    rows, max_bytes = 2_000_000, 2**24
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(rows * 64)  # zeros
    folder = str(Path(fastops.__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    # Freed blocks go back at once: glibc keeps up to 64 MB of them, whatever the size of a chunk.
    env = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    arguments = [name, str(tmp_path / "rows"), str(rows), str(max_bytes), str(unsorted)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 2.5


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
