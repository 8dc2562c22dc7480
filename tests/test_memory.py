"""Memory: nothing leaks, derivatives keep no more than they need, and nothing of the size of the data is made on the way."""

import gc
import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import first
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fastops import segment_mean, segment_sum, testing
from fastops.registry import OPS

differentiable = pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
reads_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")


# ---- leaks ----

LEAKS = """
import ctypes, ctypes.util, gc, json, pickle
import torch
import fastops
from fastops import registry, testing

torch.set_num_threads(1)

def memory():
    gc.collect()
    ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def growth(step):
    for number in range(2000):
        step(number)
    before = memory()
    for number in range(10_000):
        step(number)
    return (memory() - before) / 2**20

# Whatever a call makes has 25 KB and more: a tensor lost in each call of one operation would make 8 MB.
calls = []
for op in registry.OPS:
    segments = testing.make_segments((2, 0, 1) * 22, "unsorted")
    data = testing.make_data((66, 96), torch.float32)
    calls.append((op, data.requires_grad_(op.differentiable), segments))

def call(number):
    op, data, segments = calls[number % len(calls)]
    result = op.fn(data, segments)
    result = result[0] if isinstance(result, tuple) else result
    if op.differentiable:
        torch.autograd.grad(result, data, result.detach())

errors = [error for op in registry.OPS for error in op.errors("cpu")]

def fail(number):
    error = errors[number % len(errors)]
    try:
        error.call()
    except error.exception:
        return
    raise AssertionError(error.id)

def group(number):
    grouping = testing.GROUPINGS[number % len(testing.GROUPINGS)]
    segments = testing.make_segments((3,) * 100, grouping)
    segments.lengths, segments.index, segments.to("meta")
    if number % 10 == 0:
        pickle.loads(pickle.dumps(fastops.collate([torch.ones(3), torch.ones(number % 5)])))

print(json.dumps({"calls": growth(call), "errors": growth(fail), "segments": growth(group)}))
"""


@pytest.fixture(scope="module")
def grown():
    """MB by which a process grows in 10,000 steps of each kind."""
    done = subprocess.run([sys.executable, "-c", LEAKS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@reads_proc
@pytest.mark.parametrize("steps", ("calls", "errors", "segments"))
def test_nothing_leaks(grown, steps):
    assert grown[steps] < 5


# ---- what derivatives keep ----

# Beside the grouping. `result` and `row numbers` are what is returned; what is made for the derivative alone is described.
SAVED = {
    "segment_sum": (),
    "segment_mean": (),
    "segment_prod": ("data",),
    "segment_amax": ("data", "result", "int64 [S, D]"),  # how many rows share the gradient
    "segment_amin": ("data", "result", "int64 [S, D]"),
    "segment_max": ("row numbers",),
    "segment_min": ("row numbers",),
    "segment_logsumexp": ("data", "result"),
    "segment_var": ("data", "float32 [S, D]"),  # the mean
    "segment_std": ("data", "float32 [S, D]", "result"),
    "segment_softmax": ("result",),
    "segment_log_softmax": ("result",),
    "segment_cumsum": (),
    "segment_cumprod": ("data",),
    "segment_cummax": ("row numbers",),
    "segment_cummin": ("row numbers",),
    "segment_logcumsumexp": ("data", "result"),
    "segment_sort": ("row numbers",),
    "segment_topk": ("row numbers",),
    "segment_median": ("row numbers",),
    "segment_mode": ("row numbers",),
    "segment_quantile": ("int64 [S, 2, D]", "float32 [S, 2]"),  # the rows around it, and what they count for
    "segment_first": (),
    "segment_last": (),
    "segment_broadcast": (),
}
# Where a result that was rounded would not do.
SAVED_OF_16_BITS = {
    "segment_logsumexp": ("data", "float32 [S, D]"),
    "segment_logcumsumexp": ("data",),
}
SIZES = {7: "N", 3: "S", 5: "D"}


def saved_by(function, named):
    """The names of what a call saves for its derivative."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        results = function()
    results = results if isinstance(results, tuple) else (results,)
    named = {**named, **dict(zip(("result", "row numbers"), results))}
    names = {tensor.data_ptr(): name for name, tensor in named.items() if tensor is not None}

    def describe(tensor):
        sizes = ", ".join(str(SIZES.get(size, size)) for size in tensor.shape)
        return names.get(tensor.data_ptr(), f"{str(tensor.dtype).removeprefix('torch.')} [{sizes}]")

    return [describe(tensor) for tensor in saved]


def sample(op, grouping, dtype, device):
    """(leaf, what the call gets, segments)"""
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    leaf = testing.make_data((3 if op.takes_values else 7, 5), dtype, kind="normal").to(device).requires_grad_()
    return leaf, leaf * 1, segments


def expected_of(op, dtype):
    return (SAVED_OF_16_BITS if dtype.itemsize == 2 else {}).get(op.name, SAVED[op.name])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@differentiable
def test_what_is_saved(op, grouping, dtype, device):
    _, data, segments = sample(op, grouping, dtype, device)
    names = dict(zip(("offsets", "order", "index"), segments._parts))
    parts = [name for name, part in names.items() if part is not None]
    expected = [*expected_of(op, dtype), *parts]
    assert saved_by(lambda: op.fn(data, segments), {"data": data, **names}) == expected


def test_every_derivative_is_in_the_table():
    assert list(SAVED) == [op.name for op in OPS if op.differentiable]


@differentiable
def test_data_that_is_not_saved_is_not_kept(op, device):
    leaf, data, segments = sample(op, "unsorted", torch.float32, device)
    there = StorageWeakRef(data.untyped_storage())
    result = first(op.fn(data, segments))
    del data
    assert there.expired() == ("data" not in SAVED[op.name])
    result.sum().backward()
    assert leaf.grad.shape == leaf.shape
    del result
    gc.collect()  # the operators of torch that backward calls may run in Python, which leaves cycles
    assert there.expired()


@pytest.mark.parametrize("wanted", (("data",), ("weight",), ("data", "weight")), ids="_and_".join)
@pytest.mark.parametrize("function", (segment_sum, segment_mean), ids=lambda function: function.__name__)
def test_data_and_weight_are_saved_for_each_other(function, wanted, device):
    segments = testing.make_segments((3, 0, 4), device=device)
    data, weight = (testing.make_data((7, *more), torch.float32, seed=len(more)).to(device) + 5 for more in ((5,), ()))
    for name, tensor in (("data", data), ("weight", weight)):
        tensor.requires_grad_(name in wanted)
    names = {"data": data, "weight": weight, "offsets": segments.offsets}
    saved = saved_by(lambda: function(data, segments, weight=weight), names)
    kept = {"data": "weight", "weight": "data"}
    assert set(saved) & {"data", "weight"} == {kept[name] for name in wanted}
    leaves = [names[name] for name in wanted]
    gradients = torch.autograd.grad(function(data, segments, weight=weight).sum(), leaves)
    others = {name: names[name].detach().requires_grad_() for name in kept}
    result = function(others["data"], segments, weight=others["weight"])
    expected = torch.autograd.grad(result.sum(), [others[name] for name in wanted])
    assert all(map(torch.equal, gradients, expected))


# ---- what others do with what is saved ----


def gradient_of(function, leaf):
    (gradient,) = torch.autograd.grad(first(function(leaf * 1)).square().sum(), leaf)
    return gradient


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@differentiable
def test_saved_tensors_may_be_moved_and_stored(op, grouping, device):
    leaf, _, segments = sample(op, grouping, torch.float32, device)
    call = partial(op.fn, segments=segments)
    expected = gradient_of(call, leaf)
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        assert torch.equal(gradient_of(call, leaf), expected)
    with torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads):
        assert torch.equal(gradient_of(call, leaf), expected)


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@differentiable
def test_checkpoint(op, grouping, device):
    """The forward that backward runs again keeps what the first one would have."""
    leaf, data, segments = sample(op, grouping, torch.float32, device)
    checkpointed = partial(checkpoint, lambda data, grouping: first(op.fn(data, grouping)), use_reentrant=False)
    assert saved_by(lambda: checkpointed(data, segments), {"data": data}) == ["data"]
    gradient = gradient_of(lambda data: checkpointed(data, segments), leaf)
    assert torch.equal(gradient, gradient_of(partial(op.fn, segments=segments), leaf))


# ---- what is made on the way ----

PEAKS = """
import gc
import json
import os
import torch
from fastops import registry, testing

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

rows, features, shares = 500_000, 8, {}
for grouping in ("offsets", "unsorted"):
    segments = testing.make_segments((100,) * (rows // 100), grouping)
    data = testing.make_data((rows, features), torch.float32)
    for op in registry.OPS:
        given = data[: segments.num_segments] if op.takes_values else data
        given = given.detach().requires_grad_(op.differentiable)
        op.fn(given, segments)
        before = memory("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        results = op.fn(given, segments)
        results = results if isinstance(results, tuple) else (results,)
        extra = memory("VmHWM") - before - sum(result.nbytes for result in results)
        shares[f"{op.name}-{grouping}"] = extra / data.nbytes
        del results
print(json.dumps(shares))
"""


@reads_proc
def test_nothing_of_the_size_of_the_data_is_made_beside_the_result():
    """With what is kept for the derivative, which is [S, *]: a hundredth of the data for each number of a segment."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once, or it would hide what is made
    done = subprocess.run([sys.executable, "-c", PEAKS], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shares = json.loads(done.stdout)
    assert len(shares) == 2 * len(OPS)
    assert {name: share for name, share in shares.items() if share > 0.1} == {}
