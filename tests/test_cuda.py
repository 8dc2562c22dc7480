"""What only a device can get wrong: grids, streams, waiting. Under the simulator or on a GPU."""

import pytest
import torch

from fastops import Segments, segment_amax, segment_broadcast, segment_max, segment_mean, segment_sum, testing
from fastops.registry import OPS

try:
    import cudasim

    SIMULATED = cudasim.active()
except ImportError:
    SIMULATED = False

simulated = pytest.mark.skipif(not SIMULATED, reason="the simulator counts launches and waits; it is not active")


def first(results):
    return results[0] if isinstance(results, tuple) else results


def test_more_outputs_than_a_full_grid_has_threads(cuda):
    """A grid that is capped and does not stride returns zeros past 132 * 8 * 1024 outputs."""
    count = 132 * 8 * 1024 + 4099
    data = (torch.arange(count) % 251 + 1).float()
    ends = torch.arange(count + 1, device=cuda)
    assert torch.equal(segment_sum(data.to(cuda), Segments.from_offsets(ends, check_invariants=False)).cpu(), data)


@pytest.mark.parametrize("name", ("segment_amax", "segment_max", "segment_broadcast", "features", "gradient"))
def test_large_outputs(cuda, name):
    count = 132 * 8 * 1024 + 4099
    data = (torch.arange(count) % 251 + 1).float()
    if name == "features":  # many columns of one row each
        result = segment_sum(data.reshape(1, -1).to(cuda), torch.tensor([0, 1], device=cuda))
        assert torch.equal(result.cpu()[0], data)
        return
    segments = Segments.from_offsets(torch.arange(count + 1, device=cuda), check_invariants=False)
    leaf = data.to(cuda).requires_grad_(name == "gradient")
    if name == "segment_amax":
        assert torch.equal(segment_amax(leaf, segments).cpu(), data)
    elif name == "segment_max":
        values, indices = segment_max(leaf, segments)
        assert torch.equal(values.cpu(), data) and torch.equal(indices.cpu(), torch.arange(count))
    elif name == "segment_broadcast":
        assert torch.equal(segment_broadcast(leaf, segments, num_rows=count).cpu(), data)
    else:
        segment_mean(leaf, segments).backward(leaf.detach())
        assert torch.equal(leaf.grad.cpu(), data)


def calls(op, cuda):
    for grouping in ("offsets", "unsorted"):
        segments = testing.make_segments((3, 0, 40, 1), grouping, device=cuda)
        rows = segments.num_segments if op.takes_values else segments.num_rows
        data = testing.make_data((rows, 3), torch.float32).to(cuda)
        yield data, segments


@simulated
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_launches_and_waits(cuda, op):
    """Few launches, and the host never waits: forward and backward."""
    most = 4 if op.name == "segment_mode" else 3  # to make elements, sort them, look at runs, and look up what was found
    for data, segments in calls(op, cuda):
        leaf = data.requires_grad_(op.differentiable)
        waits = cudasim.syncs()
        with cudasim.stats() as seen:
            result = first(op.fn(leaf, segments))
        assert 1 <= len(seen.launches) <= most
        if op.differentiable:
            upstream = torch.ones_like(result)
            waits += cudasim.syncs() - waits
            waits = cudasim.syncs()
            torch.autograd.grad(result, leaf, upstream)
        assert cudasim.syncs() == waits


@simulated
def test_bare_offsets_are_not_looked_at(cuda):
    data, offsets = torch.ones(7, device=cuda), torch.tensor([0, 3, 3, 7], device=cuda)
    waits = cudasim.syncs()
    segment_sum(data, offsets)
    segment_broadcast(torch.ones(3, device=cuda), offsets, num_rows=7)
    assert cudasim.syncs() == waits


@simulated
@pytest.mark.parametrize(
    "make, waits",
    (
        (lambda tensor: Segments.from_offsets(tensor), 1),
        (lambda tensor: Segments.from_offsets(tensor, check_invariants=False), 0),
        (lambda tensor: Segments.from_lengths(tensor), 1),
        (lambda tensor: Segments.from_lengths(tensor, check_invariants=False), 0),
        (lambda tensor: Segments.from_index(tensor, 9), 1),
        (lambda tensor: Segments.from_index(tensor), 1),
        (lambda tensor: Segments.from_index(tensor, 9, ignore_index=-1), 1),
        (lambda tensor: Segments.from_index(tensor, 9, check_invariants=False), 0),
    ),
    ids=(
        "offsets",
        "offsets_unchecked",
        "lengths",
        "lengths_unchecked",
        "index",
        "index_max",
        "index_ignore",
        "index_unchecked",
    ),
)
def test_construction_waits_once(cuda, make, waits):
    """Where a check is made, the device is waited for once. (torch's own operators run on the CPU under the simulator, so only
    those of fastops and copies to the host are counted.)"""
    tensor = torch.tensor([0, 3, 3, 7], device=cuda)
    before = cudasim.syncs()
    make(tensor)
    assert (cudasim.syncs() > before) == (waits > 0)


@simulated
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_run_on_the_current_stream(cuda, op):
    stream = torch.cuda.Stream()
    for data, segments in calls(op, cuda):
        leaf = data.requires_grad_(op.differentiable)
        with cudasim.stats() as seen, torch.cuda.stream(stream):
            result = first(op.fn(leaf, segments))
            if op.differentiable:
                torch.autograd.grad(result, leaf, torch.ones_like(result))
        assert seen.launches and all(launch["stream"] != 0 for launch in seen.launches)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cuda_gives_what_the_cpu_gives(cuda, op):
    """The same meaning on both, here bit for bit: dyadic numbers are exact in any order."""
    for data, segments in calls(op, cuda):
        result, other = op.fn(data, segments), op.fn(data.cpu(), segments.cpu())
        for one, two in zip(*[r if isinstance(r, tuple) else (r,) for r in (result, other)]):
            tolerance = 0 if op.exact else 1e-6
            torch.testing.assert_close(one.cpu(), two, rtol=tolerance, atol=tolerance, equal_nan=True)
