"""What `test_devices.py` runs in a process of its own: every operation on a device that has no kernels."""

import device_of_python  # noqa: F401  (first: it makes the device)
import pytest
import torch
from helpers import first, further

import fastops
from fastops import Segments, registry, segment_broadcast, segment_mean, segment_softmax, segment_sum, testing

GROUPINGS = ("offsets", "unsorted32", "ignored")
LENGTHS = (3, 0, 1, 4)

every_op = pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
differentiable = pytest.mark.parametrize("op", [op for op in registry.OPS if op.differentiable], ids=lambda op: op.name)
every_grouping = pytest.mark.parametrize("grouping", GROUPINGS)


def both(op, grouping, dtype=torch.float32):
    """The same data and segments on the CPU and there."""
    segments = testing.make_segments(LENGTHS, grouping)
    rows = segments.num_segments if op.takes_values else segments.num_rows
    data = testing.make_data((rows, 2), dtype, kind="factors" if op.data_kind == "factors" else "distinct")
    return (data, segments), (data.to("npy"), segments.to("npy"))


def assert_same(one, other):
    one, other = (tuple(x) if isinstance(x, tuple) else (x,) for x in (one, other))
    for a, b in zip(one, other):
        assert a.device.type == "npy"
        torch.testing.assert_close(a.detach().cpu(), b, rtol=1e-6, atol=1e-6, equal_nan=True)


@every_grouping
@every_op
def test_value(op, grouping):
    here, there = both(op, grouping)
    expected = op.fn(*here)
    result = op.fn(*there)
    assert type(result) is type(expected)
    assert_same(result, expected)
    data, segments = there
    assert_same(op.overload(data, *segments._parts, *further(op, segments.num_rows, "npy"), 0), expected)
    for dim in (1, -1):
        assert_same(op.fn(data.t(), segments, dim=dim), op.fn(here[0].t(), here[1], dim=dim))


@every_op
def test_dtypes(op):
    for dtype in op.dtypes:
        here, there = both(op, "unsorted32", torch.float32)
        assert_same(op.fn(there[0].to(dtype), there[1]), op.fn(here[0].to(dtype), here[1]))


@every_grouping
@differentiable
def test_gradient(op, grouping):
    found = []
    for data, segments in both(op, grouping, torch.float64):
        leaf = data.detach().requires_grad_()
        options = {"fill_value": 0} if op.empty.startswith(("-inf", "nan")) else {}
        for call in (op.fn, lambda x, s, **_: op.overload(x, *s._parts, *further(op, s.num_rows, x.device), 0)):
            value = first(call(leaf, segments, **options))
            (gradient,) = torch.autograd.grad(torch.where(value.isfinite(), value, 0).square().sum(), leaf, create_graph=True)
            found += [gradient, torch.autograd.grad(gradient.square().sum(), leaf)[0]]
    for one, other in zip(found[4:], found[:4]):
        assert_same(one, other.detach())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.int64), ids=str)
@pytest.mark.parametrize("name", ("segment_sum", "segment_mean"))
def test_weights(name, dtype):
    op, results = registry.find(name), []
    if name == "segment_mean" and dtype == torch.int64:
        pytest.skip("takes floating data")
    for data, segments in both(op, "unsorted32", dtype):
        weight = (torch.arange(8, device="cpu") % 3 + 1).to(dtype).to(data.device)
        if dtype.is_floating_point:
            data, weight = data.requires_grad_(), weight.requires_grad_()
        result = op.fn(data, segments, weight=weight)
        results.append([result, *(torch.autograd.grad(result.sum(), (data, weight)) if dtype.is_floating_point else ())])
    for one, other in zip(results[1], results[0]):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-6)


def test_segments():
    offsets = torch.tensor([0, 3, 3, 7])
    index = torch.tensor([2, 0, 2, 0])
    ignored = torch.tensor([2, -1, 0, -1])
    for make, tensor in (
        (Segments.from_offsets, offsets),
        (Segments.from_lengths, offsets.diff()),
        (Segments.from_index, index),
        (Segments.from_index, index.int()),
        (Segments.from_index, index.sort().values),
        (lambda x: Segments.from_index(x, 5, check_invariants=False), ignored),
        (lambda x: Segments.from_index(x, ignore_index=-1), ignored),
    ):
        one, other = make(tensor.to("npy")), make(tensor)
        assert one.device.type == "npy" and (one.num_rows, one.num_segments) == (other.num_rows, other.num_segments)
        for name in ("offsets", "order", "index", "lengths"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a.cpu(), b)), name
    assert torch.equal(one.cpu().offsets, other.offsets)
    rows = segment_broadcast(torch.ones(3, device="cpu").to("npy"), offsets.to("npy"))
    assert rows.shape == (7,)


def test_errors():
    data, segments = torch.ones(7), Segments.from_offsets(torch.tensor([0, 3, 3, 7]))
    there = r"segment_sum: segments must be on the device of data \(npy:0\), but got cpu; move one of them with .to\(device\)"
    with pytest.raises(fastops.DeviceMismatchError, match=there):
        segment_sum(data.to("npy"), segments)
    with pytest.raises(fastops.DeviceMismatchError, match=r"segment_sum: segments must be on the device of data \(cpu\), but got npy:0"):
        segment_sum(data, segments.to("npy"))
    with pytest.raises(fastops.DeviceMismatchError, match=there):
        torch.ops.fastops.segment_sum(data.to("npy"), segments.offsets, None, None)
    for call in (segment_sum, lambda x, s: torch.ops.fastops.segment_sum(x, s.offsets, None, None)):  # and by the operator itself
        with pytest.raises(ValueError, match="segment_sum: data must have 7 rows along dim 0, as the segments do, but got 6"):
            call(data[:6].to("npy"), segments.to("npy"))
    with pytest.raises(TypeError, match="segment_softmax: data must be one of float16, bfloat16, float32, float64, but got int64"):
        segment_softmax(data.long().to("npy"), segments.to("npy"))
    with pytest.raises(ValueError, match="Segments.from_offsets: offsets must ascend from 0, but got 2 after 5 at position 2"):
        Segments.from_offsets(torch.tensor([0, 5, 2, 7]).to("npy"))
    with pytest.raises(ValueError, match=r"Segments.from_index: index must be in \[0, 2\), but got 2 at position 1"):
        Segments.from_index(torch.tensor([0, 2, 1]).to("npy"), 2)


def test_transforms():
    segments = Segments.from_offsets(torch.tensor([0, 2, 3]).to("npy"))
    data = testing.make_data((4, 3), torch.float64, kind="normal")
    there = data.to("npy")
    for transform in (
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        lambda f: lambda x: torch.func.vjp(f, x)[1](x)[0],
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.vmap(torch.func.grad(lambda x: f(x).square().sum())),
    ):
        one = transform(lambda x: segment_softmax(x, segments, dim=-1))(there)
        other = transform(lambda x: segment_softmax(x, segments.cpu(), dim=-1))(data)
        assert_same(one, other)


def test_graphs_have_the_operator():
    """Not what the reference does, which looks at lengths; where a gradient is wanted, the graph has a break."""
    segments = Segments.from_offsets(torch.tensor([0, 3, 3, 7]).to("npy"))
    data = torch.arange(7.0).to("npy")
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    result = torch.compile(lambda x: segment_mean(x * 2, segments), fullgraph=True, backend=backend)(data)
    assert_same(result, torch.tensor([2.0, 0.0, 9.0]))
    assert any("fastops.segment_mean" in target for target in seen)
    leaf = data.clone().requires_grad_()
    torch._dynamo.reset()
    torch.compile(lambda x: segment_mean(x * 2, segments), backend="eager")(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), torch.tensor([2 / 3] * 3 + [0.5] * 4))
