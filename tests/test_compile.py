"""torch.compile, compiled autograd and make_fx see the operators, with sizes that change. test_export.py: what is saved."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import first, kinds_of, run_page
from torch._dynamo.testing import CompileCounterWithBackend

import fastops
from fastops import (
    Segments,
    nn,
    segment_amax,
    segment_broadcast,
    segment_cumsum,
    segment_logsumexp,
    segment_max,
    segment_mean,
    segment_prod,
    segment_quantile,
    segment_softmax,
    segment_sort,
    segment_sum,
    segment_topk,
    segment_var,
    testing,
)
from fastops.registry import OPS, SCANS, find

LENGTHS = ((3, 0, 4), (10, 2, 5, 8), (6, 7, 8, 9, 10))  # other numbers of rows and of segments in every call

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Inductor keeps graphs by what they call, not by what that does: those of another build of fastops must not be found."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def parts_of(results):
    return results if isinstance(results, tuple) else (results,)


def assert_same(results, expected):
    """The bits, sizes and strides of eager, and its named tuples."""
    assert type(results) is type(expected)
    for one, other in zip(parts_of(results), parts_of(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert one.stride() == other.stride()
        else:
            assert one == other


def assert_same_gradients(results, expected, data):
    gradients = [torch.autograd.grad(first(r).nan_to_num().square().sum(), data)[0] for r in (results, expected)]
    assert torch.equal(*gradients)


def check(function, calls, compilations=2, **options):
    """Compiled into whole graphs, `function` gives what it gives otherwise for all the calls, by so many compilations at most."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for arguments in calls:
        assert_same(compiled(*arguments), function(*arguments))
    assert counter.frame_count <= compilations


def rows(lengths, features=3, dtype=torch.float32, kind="dyadic"):
    return testing.make_data((sum(lengths), features), dtype, kind=kind)


def weighted(function, data, segments):
    return function(data, segments, weight=data[:, 0].abs())


CALLS = {op.name: (op, op.fn) for op in OPS}
for _name in SCANS:
    CALLS[f"{_name}-options"] = (find(_name), partial(find(_name).fn, exclusive=True, reverse=True))
for _name in ("segment_sort", "segment_argsort"):
    CALLS[f"{_name}-descending"] = (find(_name), partial(find(_name).fn, descending=True))
for _name in ("segment_sum", "segment_mean"):
    CALLS[f"{_name}-weight"] = (find(_name), partial(weighted, find(_name).fn))
CALLS["segment_sum-dtype"] = (find("segment_sum"), partial(segment_sum, dtype=torch.float64, fill_value=0.5))
CALLS["segment_topk-options"] = (find("segment_topk"), partial(segment_topk, k=3, largest=False, sorted=False))
CALLS["segment_quantile-tensor"] = (find("segment_quantile"), partial(segment_quantile, q=torch.tensor([0.2, 0.9])))

every_call = pytest.mark.parametrize("name", CALLS)


def samples_of(op, grouping):
    for lengths in LENGTHS:
        segments = testing.make_segments(lengths, grouping)
        size = segments.num_segments if op.takes_values else segments.num_rows
        data = testing.make_data((5, size), torch.float32, kind=op.data_kind).t()
        yield data.requires_grad_(op.differentiable), segments


@pytest.mark.parametrize(("grouping", "dynamic"), (("offsets", None), ("unsorted", True)))
@every_call
def test_segments_made_outside(name, grouping, dynamic):
    """Segments are an argument of the compiled function; forward and backward are those of eager."""
    op, call = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: call(x * 2, s), fullgraph=True, backend=counter, dynamic=dynamic)
    for data, segments in samples_of(op, grouping):
        results, expected = compiled(data, segments), call(data * 2, segments)
        assert_same(results, expected)
        if op.differentiable:
            assert_same_gradients(results, expected, data)
    assert counter.frame_count <= 2


@every_call
def test_segments_made_inside(name):
    """Of an index with rows that belong to none: how many is not known while the graph is made."""
    op, call = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(x, index, size):
        return call(x * 2, Segments.from_index(index, size, ignore_index=-1))

    for data, segments in samples_of(op, "ignored"):
        results, expected = compiled(data, segments.index, segments.num_segments), call(data * 2, segments)
        assert_same(results, expected)
        if op.differentiable:
            assert_same_gradients(results, expected, data)
    assert counter.frame_count <= 2


def several(x, s):
    down = segment_broadcast(segment_mean(x, s), s)
    return segment_sum(x, s), segment_softmax(x - down, s), *segment_sort(x, s), segment_amax(x, s)


def test_segments_in_containers():
    def f(x, listed, named):
        return segment_sum(x, listed[1]), segment_amax(x, named["a"]), segment_softmax(x, listed[0])

    calls = []
    for lengths in LENGTHS:
        one, other = (testing.make_segments(lengths, grouping) for grouping in ("offsets", "unsorted"))
        calls.append((rows(lengths), [one, other], {"a": other}))
    check(f, calls)


class Grouped(torch.nn.Module):
    def __init__(self, segments):
        super().__init__()
        self.segments = segments

    def forward(self, x):
        return several(x, self.segments)


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_segments_kept(grouping):
    """By a closure and as an attribute of a module."""
    segments = testing.make_segments(LENGTHS[0], grouping)
    data = rows(LENGTHS[0])
    check(lambda x: several(x, segments), [(data,), (data * 2,)], compilations=1)
    check(Grouped(segments), [(data,), (data * 2,)], compilations=1)


FRESH = {
    "from_offsets": lambda x, s: several(x, Segments.from_offsets(s.offsets)),
    "from_lengths": lambda x, s: several(x, Segments.from_lengths(s.lengths)),
    "from_index": lambda x, s: several(x, Segments.from_index(s.index, s.num_segments)),
    "from_unchecked_index": lambda x, s: several(x, Segments.from_index(s.index, s.num_segments, check_invariants=False)),
    "bare_offsets": lambda x, s: several(x, s.offsets),
}


@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("way", FRESH)
def test_every_way_of_making_segments(way, dynamic):
    calls = [(rows(lengths), testing.make_segments(lengths)) for lengths in LENGTHS]
    check(FRESH[way], calls, compilations=1 if dynamic else 2, dynamic=dynamic)


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
        return centred / s.lengths[s.index].clamp(min=1)[:, None], s.offsets * 2, s.num_segments, s.num_rows, s.device.type

    for grouping in ("offsets", "unsorted"):
        calls = [(rows(lengths), testing.make_segments(lengths, grouping)) for lengths in LENGTHS]
        check(f, calls)
        assert torch.equal(calls[0][1].lengths, torch.tensor(LENGTHS[0])), "what tracing computed did not leak out of it"


def test_what_was_asked_for_before_does_not_matter():
    """Lengths and index are kept by segments outside of graphs: that is no reason to compile again."""
    segments = testing.make_segments((3, 0, 4))
    check(lambda s: (s.lengths * 2, s.index * 2), [(segments,), (segments,)], compilations=1)


def test_order_of_rows_that_belong_to_none():
    def f(index, size):
        segments = Segments.from_index(index, size, ignore_index=-1)
        return segments.order * 1, segments.offsets * 1

    check(f, [(s.index, s.num_segments) for s in (testing.make_segments(lengths, "ignored") for lengths in LENGTHS)])


def kept_rows(x, index, mask):
    return several(x[mask], Segments.from_index(index[mask], 4))


def largest_index(x, index, mask):
    segments = Segments.from_index(index, num_segments=int(index.max()) + 1)
    return *several(x, segments), segments.lengths * 1, segments.num_segments


def kept_lengths(x, index, mask):
    segments = Segments.from_lengths(torch.bincount(index, minlength=4)[mask[:4]])
    return several(x[: segments.num_rows], segments)


@pytest.mark.parametrize("function", (kept_rows, largest_index, kept_lengths), ids=lambda f: f.__name__)
def test_sizes_that_are_found_in_data(function):
    data, index = rows((9,)), torch.tensor([0, 3, 2, 0, 0, 1, 3, 2, 0])
    masks = torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0, 1]]).bool()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        check(function, [(data, index, mask) for mask in masks], compilations=1)


NUMBERS = {
    "k": (lambda x, o, n: segment_topk(x, o, n), (1, 2, 3)),
    "k_in_data": (lambda x, o, n: segment_topk(x, o, n.item()), map(torch.tensor, (1, 2, 3))),
    "k_as_a_tensor": (lambda x, o, n: segment_topk(x, o, n), map(torch.tensor, (1, 2, 3))),
    "q_in_data": (lambda x, o, n: segment_quantile(x, o, n.item()), map(torch.tensor, (0.25, 0.5, 0.75))),
    "q_as_a_tensor": (lambda x, o, n: segment_quantile(x, o, n), map(torch.tensor, (0.25, 0.5, 0.75))),
    "num_rows": (lambda x, o, n: segment_broadcast(x[: o.shape[0] - 1], o, num_rows=n), (7, 7)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name):
    """A number that a graph is given, or finds in data, does not tie it to one value."""
    function, numbers = NUMBERS[name]
    data, offsets = rows((3, 0, 4)), torch.tensor([0, 3, 3, 7])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(function, [(data, offsets, number) for number in numbers])


def test_numbers_that_specialise():
    """What an operator takes as a scalar is a part of the graph: right, at the price of a compilation for each, and of finding that out."""
    data, offsets = rows((3, 0, 4)), torch.tensor([0, 3, 3, 7])
    check(lambda x, n: segment_sum(x, offsets, fill_value=n), [(data, n) for n in (0.25, 0.5, 0.75)], compilations=4)
    check(lambda x, n: segment_quantile(x, offsets, n), [(data, n) for n in (0.25, 0.5, 0.75)], compilations=4)
    check(lambda x, n: segment_var(x, offsets, correction=n), [(data, n) for n in (0.25, 0.5, 0.75)], compilations=4)


@pytest.mark.parametrize("dynamic", (None, True))
def test_none_and_one(dynamic):
    """Sizes 0 and 1 are constants to Dynamo; results are right all the same."""
    lengths = ((3, 0, 4), (2, 1), (5,), (), (0,), (1,), (0, 0), (1, 1))
    check(several, [(rows(each), testing.make_segments(each)) for each in lengths], len(lengths), dynamic=dynamic)


LAID_OUT = {
    "int32": lambda lengths: (rows(lengths), testing.make_segments(lengths, "offsets32")),
    "int32_unsorted": lambda lengths: (rows(lengths), testing.make_segments(lengths, "unsorted32")),
    "ignored": lambda lengths: (lambda s: (rows((s.num_rows,)), s))(testing.make_segments(lengths, "ignored")),
    "transposed": lambda lengths: (testing.make_data((3, sum(lengths)), torch.float32).t(), testing.make_segments(lengths)),
    "sliced": lambda lengths: (rows(lengths * 2)[::2], testing.make_segments(lengths)),
    "other_features": lambda lengths: (rows(lengths, len(lengths)), testing.make_segments(lengths)),
    "bfloat16": lambda lengths: (rows(lengths, dtype=torch.bfloat16), testing.make_segments(lengths, "unsorted")),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_layout(name):
    check(several, [LAID_OUT[name](lengths) for lengths in LENGTHS])


def test_other_dims():
    def f(x, s):
        down = segment_broadcast(segment_mean(x, s, dim=1), s, dim=-2)
        return segment_sum(x, s, dim=1), segment_softmax(x - down, s, dim=-2), *segment_sort(x, s, dim=1)

    check(f, [(rows(lengths * 2, 3).view(2, -1, 3), testing.make_segments(lengths, "unsorted")) for lengths in LENGTHS])


def test_one_graph_for_any_number_of_rows():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: segment_amax(x, s), fullgraph=True, backend=counter, dynamic=True)
    for lengths in ((3, 0, 4), (10, 2, 5, 8), (1, 30), (6, 7, 8, 9, 10)):
        segments = testing.make_segments(lengths, "unsorted")
        data = testing.make_data((sum(lengths), 3), torch.float32)
        assert torch.equal(compiled(data, segments), segment_amax(data, segments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_sizes_marked_dynamic(grouping):
    """Of which Dynamo says where something ties them to a number."""

    def f(x, s):
        down = segment_broadcast(segment_mean(x, s), s, num_rows=x.shape[0])
        return segment_sum(x, s), segment_softmax(x, s), down

    calls = []
    for features, lengths in zip((3, 5, 2), LENGTHS):
        segments = testing.make_segments(lengths, grouping)
        calls.append((rows(lengths, features), segments))
        for tensor in (calls[-1][0], *(part for part in segments._parts if part is not None)):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(calls[-1][0], 1)
    check(f, calls)


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


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_compiled_autograd_of_eager_forwards(op):
    """The backward alone becomes a graph, also of what returns row numbers beside values."""
    sample = testing.make_sample(op, "canonical", 3, "transposed", "unsorted", torch.float64, requires_grad=True)
    data, segments = sample.args
    loss = first(op.fn(data, segments)).square().sum()
    (expected,) = torch.autograd.grad(loss, data, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    torch.testing.assert_close(data.grad, expected, equal_nan=True)


def test_autocast():
    def f(x, s):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t() @ x
            return y, segment_softmax(y, s), segment_logsumexp(y, s), segment_sum(y, s), segment_prod(y, s), segment_cumsum(y, s)

    segments = testing.make_segments((3, 0, 4), "unsorted")
    check(f, [(rows((7,)), segments)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(lambda x, s: (segment_softmax(x @ x.t(), s), segment_prod(x @ x.t(), s)), [(rows((7,)), segments)])


def test_changes_in_place():
    def f(x, s):
        total = segment_sum(x, s)
        total.add_(1)
        total[0] = 0
        shares = segment_softmax(x, s).mul_(2).clamp_(max=1)
        other = x.clone()
        other[1:] += 1
        return total, shares, segment_amax(other, s)

    check(f, [(rows(lengths), testing.make_segments(lengths)) for lengths in LENGTHS])

    def changed(x, offsets):
        x.mul_(2)
        before = segment_sum(x, offsets)
        offsets[1] = 2
        return before, segment_sum(x, offsets)

    compiled = torch.compile(changed, fullgraph=True, backend="aot_eager")
    calls = [(rows((3, 0, 4)), torch.tensor([0, 3, 3, 7])) for _ in range(2)]
    assert_same(compiled(*calls[0]), changed(*calls[1]))
    for one, other in zip(*calls):
        assert torch.equal(one, other)


@pytest.mark.parametrize("grouping", ("unsorted", "bare"))
@pytest.mark.parametrize(
    "module",
    (
        nn.SegmentSoftmax(),
        nn.SegmentPool(list(nn._REDUCTIONS), fill_value=2.0),
        nn.SegmentAttentionPool(4, heads=2),
        nn.SegmentNorm(4),
    ),
    ids=lambda module: type(module).__name__,
)
def test_modules(module, grouping):
    calls = []
    for lengths in LENGTHS:
        segments = testing.make_segments(lengths, "offsets" if grouping == "bare" else grouping)
        calls.append((rows(lengths, 4), segments.offsets if grouping == "bare" else segments))
    check(module, calls)


def test_left_out_of_graphs():
    """torch.compiler.disable, and a graph break between two operations."""

    @torch.compiler.disable
    def outside(x, s):
        return segment_softmax(x, s)

    def f(x, s):
        return segment_sum(outside(x * 2, s), s)

    data, segments = rows((7,)), testing.make_segments((3, 0, 4), "unsorted")
    assert_same(torch.compile(f, backend="aot_eager")(data, segments), f(data, segments))


def all_operations(x, s):
    y = x.sin() * 2
    values = segment_mean(y, s)
    return [first(call(values if op.takes_values else y, s)) for op, call in CALLS.values()]


def total_of(results):
    return sum(result.nan_to_num(neginf=0).square().sum() for result in results if result.requires_grad)


@needs_compiler
@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_inductor(grouping, own_cache):
    """Every operation, forward and backward, for any number of rows. All in one graph, which Inductor schedules."""
    compiled = torch.compile(all_operations, fullgraph=True, dynamic=True)
    for lengths in LENGTHS[:2]:
        segments = testing.make_segments(lengths, grouping)
        data = rows(lengths, kind="normal").requires_grad_()
        results, expected = compiled(data, segments), all_operations(data, segments)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        gradients = [torch.autograd.grad(total_of(r), data)[0] for r in (results, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_reduce_overhead(own_cache):
    """What is a CUDA graph elsewhere is nothing special on the CPU."""
    compiled = torch.compile(several, fullgraph=True, mode="reduce-overhead")
    data, segments = rows((7,)), testing.make_segments((3, 0, 4), "unsorted")
    for _ in range(3):
        torch.testing.assert_close(compiled(data, segments), several(data, segments))


CACHED = """
import json, torch
from fastops import Segments, segment_max, segment_softmax, segment_sort, segment_sum, testing
from torch._dynamo.utils import counters
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = True

@torch.compile(fullgraph=True)
def f(x, s, index):
    inside = Segments.from_index(index, 3, ignore_index=-1)
    return segment_sum(segment_softmax(x, s), s, weight=x[:, 0]), segment_sort(x, s)[0], segment_max(x, inside)[0]

segments = testing.make_segments((3, 0, 4), "unsorted")
results = f(torch.ones(7, 2, requires_grad=True), segments, segments.index)
torch.autograd.backward(results, [torch.ones_like(result) for result in results])
found = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps([found.get(key, 0) for key in (
    "fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass", "autograd_cache_hit", "autograd_cache_bypass")]))
"""


@needs_compiler
def test_caches(own_cache, monkeypatch):
    """The second process takes both graphs, forward and backward, from the files of the first."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fastops.__file__).parents[1]))
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found == [[2, 0, 0, 0, 0], [0, 2, 0, 1, 0]]


def energy(x, s):
    return (segment_softmax(x, s) * segment_mean(x, s).square().sum()).sum() + segment_sum(x, s).pow(3).sum()


def force(x, s):
    return torch.autograd.grad(energy(x, s), x, create_graph=True)[0]


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch takes no derivative inside")
@pytest.mark.parametrize("dynamic", (False, True))
def test_second_derivatives(dynamic):
    """torch.autograd.grad inside the compiled function: what is trained by forces, whole or with the backward outside."""

    def curvature(x, s):
        return torch.autograd.grad(force(x, s).square().sum(), x)[0]

    segments = testing.make_segments((3, 0, 4), "unsorted")
    data = testing.make_data((7, 2), torch.float64, kind="normal").requires_grad_()
    expected = curvature(data, segments)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        options = {"fullgraph": True, "backend": "aot_eager", "dynamic": dynamic}
        assert torch.equal(torch.compile(curvature, **options)(data, segments), expected)
        loss = torch.compile(lambda x, s: force(x, s).square().sum(), **options)(data, segments)
        torch.testing.assert_close(torch.autograd.grad(loss, data)[0], expected)


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
    """For any number of rows, and to be compiled."""

    def curvature(x, s):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(force(x, s).square().sum(), x)[0]

    calls = []
    for lengths in LENGTHS[:2]:
        segments = testing.make_segments(lengths, "unsorted")
        calls.append((testing.make_data((sum(lengths), 2), torch.float64, kind="normal"), segments))
    graph = traced(curvature, *calls[0])
    check(graph, calls)
    for call in calls:
        assert torch.equal(graph(*call), curvature(*call))


def test_symbolic_trace():
    """torch.fx.symbolic_trace has one node for each operation, and takes segments that a module keeps."""

    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.SegmentPool(["sum", "amax"])
            self.segments = testing.make_segments((3, 0, 4), "unsorted")

        def forward(self, x, s):
            shares = segment_softmax(x, s)
            values, _ = segment_topk(x, s, k=2)
            down = segment_broadcast(segment_mean(x, s, weight=x[:, 0]), s)
            last = segment_sort(x, self.segments, descending=True).values, segment_max(x, s)[0]
            return self.pool(shares, s), values, down, segment_quantile(x, s, 0.5), segment_cumsum(x, s, exclusive=True), *last

    module = Traced()
    graph = torch.fx.symbolic_trace(module)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert segment_softmax in targets and segment_topk in targets and fastops.segment_amax in targets
    for grouping in ("offsets", "unsorted"):
        segments = testing.make_segments((1, 2, 4), grouping)
        assert_same(graph(rows((7,)), segments), module(rows((7,)), segments))


def test_symbolic_trace_of_every_operation():
    data, segments = rows((7,)), testing.make_segments((3, 0, 4), "unsorted")
    values = segment_mean(data, segments)
    graph = torch.fx.symbolic_trace(lambda x, v, s: tuple(first(call(v if op.takes_values else x, s)) for op, call in CALLS.values()))
    expected = tuple(first(call(values if op.takes_values else data, segments)) for op, call in CALLS.values())
    assert_same(graph(data, values, segments), expected)


def test_the_page():
    page = Path(__file__).resolve().parents[1] / "docs" / "compile.md"
    assert kinds_of(page) == {"python"}
    assert run_page(page, "python", clear_globs=False) > 5  # Dynamo has to be done with them first
    torch._dynamo.reset()
