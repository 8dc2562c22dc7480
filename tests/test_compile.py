"""torch.compile, torch.export and compiled autograd see the operators, with sizes that change."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastops import Segments, segment_amax, segment_broadcast, segment_max, segment_mean, segment_sum, testing
from fastops.registry import OPS


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def first(results):
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_segments_made_outside(op, grouping):
    """Segments are an argument of the compiled function; forward and backward are those of eager."""
    sample = testing.make_sample(
        op, "canonical", 3, "transposed", grouping, torch.float32, requires_grad=op.differentiable
    )
    data, segments = sample.args
    compiled = torch.compile(lambda x, s: op.fn(x * 2, s), fullgraph=True, backend="aot_eager")
    results, expected = compiled(data, segments), op.fn(data * 2, segments)
    assert type(results) is type(expected)
    for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (results, expected)]):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()
    if op.differentiable:
        gradients = [torch.autograd.grad(first(r).square().sum(), data)[0] for r in (results, expected)]
        assert torch.equal(*gradients)


def test_bare_offsets_made_inside():
    def f(x, lengths):
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return segment_sum(x, offsets), segment_mean(x, Segments.from_lengths(lengths))

    data, lengths = torch.randn(7, 2, generator=testing.make_generator()), torch.tensor([3, 0, 4])
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(data, lengths), f(data, lengths)):
        assert torch.equal(one, other)


def test_properties_inside():
    def f(x, s):
        centred = x - segment_broadcast(segment_mean(x, s), s)
        return centred / s.lengths[s.index].clamp(min=1)[:, None], s.num_segments, s.num_rows

    for grouping in ("offsets", "unsorted"):
        segments = testing.make_segments((3, 0, 4), grouping)
        data = testing.make_data((7, 2), torch.float32)
        result, *counts = torch.compile(f, fullgraph=True, backend="aot_eager")(data, segments)
        assert torch.equal(result, f(data, testing.make_segments((3, 0, 4), grouping))[0])
        assert counts == [3, 7]
        assert torch.equal(segments.lengths, torch.tensor([3, 0, 4])), "what tracing computed did not leak out of it"


def test_one_graph_for_any_number_of_rows():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: segment_amax(x, s), fullgraph=True, backend=counter, dynamic=True)
    for lengths in ((3, 0, 4), (10, 2, 5, 8), (1, 30), (6, 7, 8, 9, 10)):
        segments = testing.make_segments(lengths, "unsorted")
        data = testing.make_data((sum(lengths), 3), torch.float32)
        assert torch.equal(compiled(data, segments), segment_amax(data, segments))
    assert counter.frame_count == 1


def test_rows_marked_dynamic():
    compiled = torch.compile(lambda x, s: segment_sum(x, s), fullgraph=True, backend="aot_eager")
    for lengths in ((3, 0, 4), (10, 2, 5)):
        data = testing.make_data((sum(lengths), 3), torch.float32)
        torch._dynamo.mark_dynamic(data, 0)
        segments = testing.make_segments(lengths)
        assert torch.equal(compiled(data, segments), segment_sum(data, segments))


def test_a_wrong_number_of_rows_is_found():
    compiled = torch.compile(lambda x, s: segment_sum(x, s), backend="aot_eager")
    with pytest.raises(ValueError, match="data must have 7 rows along dim 0, as the segments do, but got 8"):
        compiled(torch.ones(8, 2), testing.make_segments((3, 0, 4)))


def test_compiled_autograd():
    segments = testing.make_segments((3, 0, 4), "unsorted")

    def step(x):
        total = (
            segment_sum(x, segments).square().sum()
            + segment_amax(x, segments).sum()
            + segment_max(x, segments)[0].sum()
        )
        total.backward()

    eager, compiled = (testing.make_data((7, 2), torch.float32).requires_grad_() for _ in range(2))
    step(eager)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(compiled)
    assert torch.equal(eager.grad, compiled.grad)


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    def f(x, s):
        return segment_sum(x.sin(), s) * 2 + segment_amax(x, s).exp(), segment_broadcast(segment_mean(x, s), s)

    segments = testing.make_segments((3, 0, 4), "unsorted")
    data = testing.make_data((7, 4), torch.float32).requires_grad_()
    results, expected = torch.compile(f, fullgraph=True)(data, segments), f(data, segments)
    torch.testing.assert_close(results, expected)
    gradients = [torch.autograd.grad(sum(part.square().sum() for part in r), data)[0] for r in (results, expected)]
    torch.testing.assert_close(*gradients)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, dtype=torch.float64)
        torch.nn.init.constant_(self.linear.weight, 0.5)
        torch.nn.init.constant_(self.linear.bias, 0.25)

    def forward(self, x, segments):
        return segment_sum(self.linear(x), segments) + segment_mean(x, segments)


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_export_for_any_number_of_rows(grouping):
    segments = testing.make_segments((3, 0, 4), grouping)
    data = testing.make_data((7, 2), torch.float64)
    rows, places = torch.export.Dim("rows", min=2), torch.export.Dim("places", min=3)
    shapes = [{0: places}] if segments.order is None else [{0: places}, {0: rows}, {0: rows}]
    model = Model()
    program = torch.export.export(model, (data, segments), dynamic_shapes=({0: rows}, shapes), strict=False)
    assert any("fastops.segment_sum" in str(node.target) for node in program.graph.nodes)
    for lengths in ((3, 0, 4), (5, 1, 2, 9)):
        segments = testing.make_segments(lengths, grouping)
        data = testing.make_data((sum(lengths), 2), torch.float64, seed=2)
        assert torch.equal(program.module()(data, segments), model(data, segments))


def traced(function, *arguments):
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="symbolic")(*arguments)
    assert any("fastops." in str(node.target) for node in graph.graph.nodes)
    return graph


def test_make_fx():
    segments = testing.make_segments((3, 0, 4), "unsorted")
    data = testing.make_data((7, 2), torch.float32)
    graph = traced(lambda x, s: segment_sum(x, s) + segment_amax(x, s), data, segments)
    assert torch.equal(graph(data * 2, segments), segment_sum(data * 2, segments) + segment_amax(data * 2, segments))


def test_make_fx_of_a_second_derivative():
    segments = testing.make_segments((3, 0, 4), "unsorted")
    data = testing.make_data((7,), torch.float64)

    def curvature(x):
        x = x.detach().requires_grad_()
        energy = segment_sum(x, segments).pow(3).sum() + segment_mean(x, segments).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.autograd.grad(force.square().sum(), x)[0]

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(curvature)(data)
    assert torch.equal(graph(data * 2), curvature(data * 2))
