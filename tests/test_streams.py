"""Streams, a second GPU, graphs and memory that runs out: operations behave as torch's own do.

Under the simulator what needs several devices or little memory runs in a process of its own, which has them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import first
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastops import Segments, registry, segment_broadcast, segment_mean, segment_softmax, segment_sum, segment_topk, testing

try:
    import cudasim

    SIMULATED = cudasim.active()
except ImportError:
    SIMULATED = False

HERE = Path(__file__).parent
SMALL = "FASTOPS_TEST_SMALL_DEVICES"  # set in that process

simulated = pytest.mark.skipif(not SIMULATED, reason="the simulator counts launches and waits; it is not active")
every_op = pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
differentiable = pytest.mark.parametrize("op", [op for op in registry.OPS if op.differentiable], ids=lambda op: op.name)


def sample(op, device, grouping="unsorted", requires_grad=True):
    segments = testing.make_segments((3, 0, 40, 1), grouping, device=device)
    rows = segments.num_segments if op.takes_values else segments.num_rows
    data = testing.make_data((rows, 3), torch.float64, kind=op.data_kind).to(device)
    return data.requires_grad_(requires_grad and op.differentiable), segments


def derivatives(op, data, segments):
    """The result, its gradient, and the gradient of that."""
    result = first(op.fn(data, segments))
    if not op.differentiable:
        return [result]
    (gradient,) = torch.autograd.grad(result, data, torch.ones_like(result), create_graph=True)
    if not gradient.requires_grad:
        return [result, gradient]
    return [result, gradient, torch.autograd.grad(gradient, data, torch.ones_like(gradient), allow_unused=True)[0]]


def assert_on_cpu_too(op, data, segments, found):
    other = data.detach().cpu().requires_grad_(data.requires_grad)
    for one, two in zip(found, derivatives(op, other, segments.cpu())):
        if one is not None and two is not None:
            torch.testing.assert_close(one.detach().cpu(), two.detach(), rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- streams ----


@simulated
@every_op
def test_everything_is_launched_on_the_current_stream(cuda, op):
    """Second derivatives and grouping too; backward runs on the stream of its forward, whichever is current then."""
    stream = torch.cuda.Stream()
    with cudasim.stats() as seen, torch.cuda.stream(stream):
        data, segments = sample(op, cuda)
        derivatives(op, data, segments)
    assert seen.launches and all(launch["stream"] != 0 for launch in seen.launches)
    assert len({launch["stream"] for launch in seen.launches}) == 1
    if op.differentiable:
        with torch.cuda.stream(stream):
            result = first(op.fn(data, segments))
        with cudasim.stats() as back:
            torch.autograd.grad(result.sum(), data)
        assert {launch["stream"] for launch in back.launches} <= {launch["stream"] for launch in seen.launches}


def test_work_of_two_streams(cuda):
    """What one stream makes another one uses, once it has been told to wait."""
    data = testing.make_data((44, 8), torch.float32).to(cuda)
    makes, uses = torch.cuda.Stream(), torch.cuda.Stream()
    makes.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(makes):
            segments = testing.make_segments((3, 0, 40, 1), "unsorted", device=cuda)
            doubled = data * 2
        uses.wait_stream(makes)
        with torch.cuda.stream(uses):
            result = segment_sum(doubled, segments)
        segments.record_stream(uses)
        doubled.record_stream(uses)
        del segments, doubled
    torch.cuda.current_stream().wait_stream(uses)
    expected = segment_sum(data.cpu() * 2, testing.make_segments((3, 0, 40, 1), "unsorted"))
    assert torch.equal(result.cpu(), expected)


# ---- graphs ----


class Watch(TorchDispatchMode):
    """The operators of torch that look at values on the host, or copy from it or to it."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        devices = {x.device.type for x in pytree.tree_leaves((args, kwargs, results)) if isinstance(x, torch.Tensor) and x.dim()}
        looks = function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
        self.seen += 1
        self.found += [str(function)] if looks or len(devices) > 1 else []
        return results


@every_op
def test_what_a_graph_may_not_do(device, op):
    """Forward, backward and its backward are made of nothing that waits for the device. (What the simulator counts in second
    derivatives are torch's conversions, which are kernels on a GPU; test_cuda.py counts the others.)"""
    for grouping in ("offsets", "unsorted32"):
        data, segments = sample(op, device, grouping)
        with Watch() as watch:
            derivatives(op, data, segments)
        assert watch.seen and not watch.found


def test_memory_comes_from_torch():
    """Kernels and host code allocate nothing of their own, copy nothing and wait for nothing."""
    sources = HERE.parent / "csrc"
    if not sources.is_dir():
        pytest.skip("there are no sources beside the tests")
    files = [path for path in sources.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        assert not re.search(r"cuda(Malloc|Free|Memcpy|\w*Synchronize|StreamCreate|EventCreate)", path.read_text()), path


@every_op
def test_capture_and_replay(cuda, op):
    if SIMULATED:
        pytest.skip("the simulator captures no graphs: cudaStreamBeginCapture fails there")
    data, segments = sample(op, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        derivatives(op, data, segments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = derivatives(op, data, segments)
    for seed in (1, 2):
        with torch.no_grad():
            data.copy_(testing.make_data(tuple(data.shape), torch.float64, kind=op.data_kind, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_on_cpu_too(op, data, segments, found)


# ---- a second device, and memory that runs out ----


def test_in_a_process_with_two_small_devices(cuda):
    if not SIMULATED:
        pytest.skip("on a real GPU the tests below run here, where there are two of them")
    environment = {**os.environ, SMALL: "1", "CUDASIM_DEVICES": "2", "CUDASIM_MEM_MB": "64", "CUDASIM_STATS": ""}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "cuda", "-k", "second_device or out_of_memory"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout) and "skipped" not in run.stdout, run.stdout


@pytest.fixture
def second(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device only; under the simulator another process has two")
    torch.cuda.set_device(0)
    yield "cuda:1"
    assert torch.cuda.current_device() == 0, "the current device was changed"


@every_op
def test_second_device(second, op):
    """Tensors of one device while another is current: kernels run where the tensors are."""
    for grouping in ("offsets", "unsorted32"):
        data, segments = sample(op, second, grouping)
        found = derivatives(op, data, segments)
        assert torch.cuda.current_device() == 0
        assert all(tensor is None or tensor.device == torch.device(second) for tensor in found)
        assert_on_cpu_too(op, data, segments, found)


def test_second_device_with_weights_and_transforms(second):
    segments = testing.make_segments((3, 0, 4), "unsorted", device=second)
    data = testing.make_data((7, 4), torch.float32).to(second).requires_grad_()
    weight = torch.full((7,), 0.5, device=second).requires_grad_()
    results = [segment_mean(data, segments, weight=weight), torch.vmap(lambda x: segment_softmax(x, segments), 1, 1)(data)]
    for result in results:
        result.square().sum().backward()
        assert result.device == torch.device(second) and torch.cuda.current_device() == 0
    assert data.grad.device == weight.grad.device == torch.device(second)
    with pytest.raises(RuntimeError, match=r"segments must be on the device of data \(cuda:0\), but got cuda:1"):
        segment_sum(data.detach().to("cuda:0"), segments)


@pytest.fixture
def little(cuda):
    """A device with less than 100 MB left for tensors."""
    if SIMULATED and SMALL not in os.environ:
        pytest.skip("another process has small devices")
    if not SIMULATED:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    yield cuda
    if not SIMULATED:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory(little):
    """The error is torch's; what comes after is right."""
    data = testing.make_data((7, 4), torch.float32).to(little)
    segments = testing.make_segments((3, 0, 4), "unsorted", device=little)
    expected = segment_sum(data.cpu(), segments.cpu())
    for call in (
        lambda: segment_topk(data, segments, 2**24),
        lambda: segment_broadcast(data[:3], Segments.from_offsets(torch.tensor([0, 2**25, 2**25, 2**25], device=little)), num_rows=2**25),
        lambda: Segments.from_index(torch.zeros(7, dtype=torch.int64, device=little), 2**26),
    ):
        with pytest.raises((RuntimeError, MemoryError), match="out of memory|fit in memory"):
            call()
        assert torch.equal(segment_sum(data, segments).cpu(), expected)


def test_out_of_memory_in_backward(little):
    """Forward needs little, and its gradient more than there is, for now."""
    rows = 2**20
    data = torch.ones(rows, device=little, requires_grad=True)
    segments = Segments.from_offsets(torch.tensor([0, rows], device=little))
    result = segment_mean(data, segments)
    hogs = []
    for size in (2**22, 2**19):  # the large ones first, which leave no room for the gradient's 4 MB
        with pytest.raises(RuntimeError, match="out of memory"):
            while True:
                hogs.append(torch.empty(size, dtype=torch.uint8, device=little))
    hogs.pop()
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.autograd.grad(result, data, torch.ones_like(result), retain_graph=True)
    assert data.grad is None
    hogs.clear()
    (gradient,) = torch.autograd.grad(result, data, torch.ones_like(result))
    assert torch.equal(gradient.cpu(), torch.full((rows,), 1 / rows))


def test_out_of_memory_on_the_cpu():
    data, segments = testing.make_data((7, 4), torch.float32), testing.make_segments((3, 0, 4))
    expected = segment_sum(data, segments)
    for call in (
        lambda: segment_topk(data, segments, 2**44),
        lambda: torch.ops.fastops.segment_topk(data, segments.offsets, None, None, 2**44),
        lambda: segment_sum(data[:, :1].expand(7, 2**44), segments),
        lambda: Segments.from_index(torch.zeros(7, dtype=torch.int64), 2**50),
    ):
        with pytest.raises((RuntimeError, MemoryError), match="allocate|fit in memory"):
            call()
        assert torch.equal(segment_sum(data, segments), expected)


def test_an_error_in_backward_leaves_the_library_usable(device):
    data = testing.make_data((7, 4), torch.float32).to(device).requires_grad_()
    segments = testing.make_segments((3, 0, 4), "unsorted", device=device)
    result = segment_softmax(data, segments)
    result.register_hook(lambda gradient: gradient[:, :2])
    with pytest.raises(RuntimeError):
        result.sum().backward()
    again = segment_softmax(data, segments)
    again.square().sum().backward()
    other = data.detach().cpu().requires_grad_()
    segment_softmax(other, segments.cpu()).square().sum().backward()
    torch.testing.assert_close(data.grad.cpu(), other.grad)
