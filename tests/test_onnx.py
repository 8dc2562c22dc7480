"""torch.onnx.export makes models of standard operators only, and ONNX Runtime runs them to the same values."""

import inspect
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import further, kinds_of, run_page
from torch.utils import _pytree as pytree

import fastops
from fastops import Segments, nn, testing
from fastops import _onnx as forms
from fastops.registry import OPS

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DYNAMIC = torch.export.Dim.DYNAMIC
ROWS_OUTSIDE = "ignored"  # rows in any order, some of no segment
GROUPINGS = ("offsets", ROWS_OUTSIDE)


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


def export(model, *arguments, dims=None, **options):
    """A session of ONNX Runtime; sizes are dynamic along dimension 0 of every tensor, or along `dims`."""
    if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)):
        model = Calls(model)
    if dims is None:
        dims = pytree.tree_map(lambda _: 0, arguments)
    if isinstance(model, torch.nn.Module):
        shapes = tuple({dim: DYNAMIC} if isinstance(dim, int) else [{0: DYNAMIC} for _ in pytree.tree_leaves(dim)] for dim in dims)
        options.setdefault("dynamic_shapes", (shapes,) if isinstance(model, Calls) else shapes)
        model = model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, arguments, dynamo=True, verbose=False, **options)
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.domain for entry in proto.opset_import} == {""} and not proto.functions, "standard operators only"
    quiet = runtime.SessionOptions()
    quiet.log_severity_level = 4
    return runtime.InferenceSession(proto.SerializeToString(), quiet, providers=["CPUExecutionProvider"])


def run(session, *arguments):
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    assert len(leaves) == len(session.get_inputs())
    feed = {entry.name: leaf.detach().contiguous().numpy() for entry, leaf in zip(session.get_inputs(), leaves)}
    return tuple(torch.from_numpy(result.copy()) for result in session.run(None, feed))


def check(results, expected, dtype):
    expected = tuple(expected) if isinstance(expected, (tuple, list)) else (expected,)
    assert len(results) == len(expected)
    for one, other in zip(results, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        testing.assert_matches(one, other.detach(), dtype)


# Every operation -----------------------------------------------------------------------------------------------------


# An export takes a second: every operation has one of the groupings here, and the other one where there is time.
EVERY = [
    pytest.param(op, grouping, marks=[pytest.mark.slow] if (place + turn) % 2 else [], id=f"{op.name}-{grouping}")
    for place, op in enumerate(OPS)
    for turn, grouping in enumerate(GROUPINGS)
]


@pytest.mark.parametrize(("op", "grouping"), EVERY)
def test_every_operation(op, grouping):
    """One model for any number of rows and segments, none included; NaN and infinities stay in their segments."""
    layout = "contiguous" if grouping == "offsets" else "dim1"

    def sample(pattern, kind=None):
        return testing.make_sample(op, pattern, 3, layout, grouping, torch.float32, kind=kind)

    traced = sample("canonical")
    dims = (traced.kwargs.get("dim", 0), [0] * len(pytree.tree_leaves(traced.args[1])))
    session = export(lambda data, segments: op.fn(data, segments, **traced.kwargs), *traced.args, dims=dims)
    for pattern, kind in (("canonical", "special"), ("many_tiny", "special"), ("around_32", "normal"), ("one_giant", None),
                          ("trailing_empties", "special"), ("all_empty", None), ("none", None)):  # fmt: skip
        data, segments = sample(pattern, kind if op.data_kind == "dyadic" else None).args
        check(run(session, data, segments), op.fn(data, segments, **traced.kwargs), torch.float32)


def test_every_operator_has_a_form():
    """But those that look at the segments when they are made, which no graph holds, and what autograd calls inside of it."""
    inside = {"_check_offsets", "_index_bounds", "_segment_logsumexp_wide", "_segment_moments", "_segment_amax_count",
              "_segment_amin_count", "_segment_prod_parts", "_segment_quantile"}  # fmt: skip
    prefix = "fastops::"
    every = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    assert {op.name for op in OPS} <= set(forms._FORMS)
    assert every - inside == set(forms._FORMS) | set(forms._DERIVATIVES)


@pytest.mark.parametrize("name", forms._FORMS)
def test_forms_take_what_operators_take(name):
    arguments = getattr(torch.ops.fastops, name).default._schema.arguments
    parameters = inspect.signature(forms._FORMS[name]).parameters.values()
    assert [parameter.name for parameter in parameters] == [argument.name for argument in arguments]
    for parameter, argument in zip(parameters, arguments):
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        else:
            assert parameter.default is inspect.Parameter.empty


# Dtypes and options, without a model: that ONNX Runtime runs a form is shown above, what it says of others can be asked directly.


@pytest.fixture
def stable(monkeypatch):
    """Sorts that keep rows which are equal in their order, as TopK does."""
    monkeypatch.setattr(forms, "_argsort", lambda rows, descending=False: rows.sort(dim=0, descending=descending, stable=True).indices)


def compare(op, data, segments, *options, dim=0):
    """A form and its operator; options come behind dim."""
    arguments = (data, *segments._parts, *further(op, segments.num_rows), dim, *options)
    results, expected = forms._FORMS[op.name](*arguments), op.overload(*arguments)
    check(results if isinstance(results, tuple) else (results,), expected, data.dtype)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_dtype(op, stable):
    for dtype in op.dtypes:
        for grouping in testing.GROUPINGS:
            for kind in (None, "special") if dtype.is_floating_point else (None,):
                sample = testing.make_sample(op, "trailing_empties", 3, "negative_dim", grouping, dtype, kind=kind)
                compare(op, *sample.args, **sample.kwargs)


FLOAT_OPTIONS = {
    "segment_sum": [(torch.float64, 2.5), (torch.int32, 7), (torch.bool, 1)],
    "segment_mean": [(torch.float64, 2.5)],
    "segment_prod": [(torch.float64, 2.5), (torch.int32, 7), (torch.bool, 0)],
    "segment_argmax": [(5,)],
    "segment_any": [(True,)],
    "segment_all": [(False,)],
    "segment_logsumexp": [(0.5,)],
    "segment_var": [(0.0, 3.0), (2.0, torch.nan)],
    "segment_std": [(0.0, 3.0), (2.5, -torch.inf)],
    "segment_cumsum": [(dtype, *flags) for dtype in (None, torch.int64, torch.bool) for flags in ((True, False), (False, True), (True, True))],
    "segment_cumprod": [(dtype, *flags) for dtype in (None, torch.int64, torch.bool) for flags in ((True, False), (False, True), (True, True))],
    "segment_cummax": [(True, False), (False, True), (True, True)],
    "segment_cummin": [(True, False), (False, True), (True, True)],
    "segment_logcumsumexp": [(True, False), (False, True), (True, True)],
    "segment_sort": [(True,)],
    "segment_argsort": [(True,)],
    "segment_topk": [(False, True, 3), (True, False, 3)],
    "segment_median": [(4,)],
    "segment_mode": [(4,)],
    "segment_nunique": [(4,)],
    "segment_quantile": [(way, 9.0) for way in ("linear", "lower", "higher", "midpoint", "nearest")],
    "segment_first": [(4,)],
}


@pytest.mark.parametrize("name", FLOAT_OPTIONS)
def test_options(name, stable):
    op = fastops.registry.find(name)
    for grouping in GROUPINGS:
        data, segments = testing.make_sample(op, "many_tiny", 3, "contiguous", grouping, torch.float32).args
        for options in FLOAT_OPTIONS[name]:
            compare(op, data, segments, *options)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_weights(grouping):
    segments = testing.make_segments((3, 0, 4, 2), grouping)
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.int64, torch.int64)):
        data = testing.make_data((5, segments.num_rows, 2, 3), dtype)
        for shape in ((segments.num_rows,), (segments.num_rows, 2), (segments.num_rows, 2, 3)):
            weight = testing.make_data(shape, weight_dtype, seed=1)
            for wide in (False, True):
                arguments = (data, weight, *segments._parts, 1, wide, 3)
                expected = torch.ops.fastops._segment_weighted_sum(*arguments)
                check((forms._segment_weighted_sum(*arguments),), expected, expected.dtype)


def test_sums_are_no_less_accurate():
    """They are taken row by row, in float64."""
    data = testing.make_data((200_000, 1), torch.float32, kind="normal").abs()
    offsets = torch.tensor([0, 200_000])
    exact = data.double().sum(0, keepdim=True)
    error = (forms.segment_sum(data, offsets, None, None) - exact).abs() / exact
    assert error.item() < 1e-7


def test_large_numbers_beside_small_ones():
    """A sum over all rows, less what came before, would lose the small ones."""
    data, offsets = torch.tensor([1e30, 1.0, 2.0]), torch.tensor([0, 1, 3])
    assert forms.segment_cumsum(data, offsets, None, None).tolist() == [data[0].item(), 1, 3]


# What ONNX Runtime has no kernel for is wide by then


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
                         ids=lambda dtype: str(dtype).removeprefix("torch."))  # fmt: skip
def test_dtypes_in_models(dtype):
    def f(data, segments):
        top = fastops.segment_amax(data, segments)
        return top, fastops.segment_broadcast(top, segments), fastops.segment_cumsum(data, segments)

    segments = testing.make_segments((3, 0, 4), ROWS_OUTSIDE)
    session = export(f, testing.make_data((segments.num_rows, 2), dtype), segments)
    segments = testing.make_segments((5, 0, 40, 1), ROWS_OUTSIDE, seed=3)
    data = testing.make_data((segments.num_rows, 2), dtype, seed=2)
    check(run(session, data, segments), f(data, segments), dtype)


def test_bfloat16_inside():
    def f(data, offsets):
        return fastops.segment_sum(data.bfloat16(), offsets).float(), fastops.segment_softmax(data.bfloat16(), offsets).float()

    data, offsets = testing.make_data((7, 2), torch.float32), torch.tensor([0, 3, 3, 7])
    check(run(export(f, data, offsets), data, offsets), f(data, offsets), torch.bfloat16)


# Models --------------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(3, 8)
        self.norm = nn.SegmentNorm(8)
        self.attention = nn.SegmentAttentionPool(8, heads=2)
        self.pool = nn.SegmentPool(["mean", "amax", "std"])
        self.softmax = nn.SegmentSoftmax()
        self.head = torch.nn.Linear(32, 2)

    def forward(self, data, segments):
        rows = self.norm(self.embed(data).relu(), segments)
        pooled = torch.cat((self.attention(rows, segments), self.pool(rows, segments)), dim=1)
        return self.head(pooled), self.softmax(rows, segments)


@pytest.mark.parametrize("given", ("bare offsets", ROWS_OUTSIDE))
def test_a_model_of_modules(given):
    model = Model()

    def arguments(lengths, seed):
        segments = testing.make_segments(lengths, "offsets" if given == "bare offsets" else given, seed=seed)
        data = testing.make_data((segments.num_rows, 3), torch.float32, kind="normal", seed=seed)
        return data, segments.offsets if given == "bare offsets" else segments

    session = export(model, *arguments((3, 0, 4), 0))
    for lengths in ((3, 0, 4), (1, 30, 0, 2, 5), (2,)):
        data, segments = arguments(lengths, 1)
        for result, expected in zip(run(session, data, segments), model(data, segments)):
            torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-5)


def test_segments_made_inside():
    def f(data, lengths, index):
        rows = Segments.from_lengths(lengths)
        mixed = Segments.from_index(index, 4)
        centred = data - fastops.segment_broadcast(fastops.segment_mean(data, rows), rows, num_rows=data.size(0))
        return centred, fastops.segment_sum(data, mixed), fastops.segment_cumsum(data, mixed), rows.lengths

    session = export(f, torch.ones(7, 2), torch.tensor([3, 0, 4]), torch.tensor([0, 3, 1, 0, 1, 3, 0]))
    arguments = (testing.make_data((9, 2), torch.float32), torch.tensor([2, 0, 3, 4]), torch.tensor([1, 3, 1, 0, 0, 0, 3, 3, 1]))
    check(run(session, *arguments), f(*arguments), torch.float32)


def test_a_program_exported_before():
    """It keeps the operators, and is a model of ONNX all the same."""
    data, offsets = testing.make_data((7, 2), torch.float32), torch.tensor([0, 3, 3, 7])
    program = torch.export.export(Calls(fastops.segment_softmax), (data, offsets), dynamic_shapes=(({0: DYNAMIC}, {0: DYNAMIC}),))
    assert any("segment_softmax" in str(node.target) for node in program.run_decompositions().graph.nodes)
    data, offsets = testing.make_data((12, 2), torch.float32), torch.tensor([0, 5, 12])
    check(run(export(program), data, offsets), fastops.segment_softmax(data, offsets), torch.float32)


def test_static_sizes():
    data, offsets = testing.make_data((7,), torch.float32), torch.tensor([0, 3, 3, 7])
    session = export(lambda x, o: fastops.segment_cumsum(x, o, reverse=True), data, offsets, dynamic_shapes=None)
    check(run(session, data, offsets), fastops.segment_cumsum(data, offsets, reverse=True), torch.float32)


def test_two_loops():
    def f(data, offsets):
        return fastops.segment_cumsum(fastops.segment_cumprod(data, offsets), offsets)

    data, offsets = testing.make_data((7, 2), torch.float32, kind="factors"), torch.tensor([0, 3, 3, 7])
    check(run(export(f, data, offsets), data, offsets), f(data, offsets), torch.float32)


# What does not go ----------------------------------------------------------------------------------------------------


def test_derivatives_are_named():
    def f(data, offsets):
        data = data.detach().requires_grad_()
        return torch.autograd.grad(fastops.segment_mean(data, offsets).square().sum(), data)[0]

    words = "torch.ops.fastops._segment_mean_backward, a derivative; compute derivatives outside of the exported part"
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=words):
        export(f, torch.ones(7, 2), torch.tensor([0, 3, 3, 7]))


def test_a_translation_of_ones_own_goes_first():
    op = pytest.importorskip("onnxscript").opset18

    def translation(grad, offsets, order, index, num_rows, dim):
        return op.Neg(grad)

    def f(data, offsets):
        return torch.ops.fastops._segment_mean_backward(data, offsets, None, None, 3, 0)

    data, offsets = testing.make_data((3, 2), torch.float32), torch.tensor([0, 1, 1, 3])
    overload = torch.ops.fastops._segment_mean_backward.default
    session = export(f, data, offsets, dynamic_shapes=None, custom_translation_table={overload: translation})
    (result,) = run(session, data, offsets)
    assert torch.equal(result, -data)


def test_the_old_exporter_names_the_operator():
    arguments = (torch.ones(7, 2), torch.tensor([0, 3, 3, 7]))
    with warnings.catch_warnings(), pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="fastops::segment_sum"):
        warnings.simplefilter("ignore")
        torch.onnx.export(Calls(fastops.segment_sum), arguments, io.BytesIO(), dynamo=False, verbose=False)


# Nobody else takes the forms -----------------------------------------------------------------------------------------


def test_the_tables_of_torch_hold_none():
    """Others read them: Inductor, fake tensors, and who passes them on to `make_fx`."""
    for table in torch._decomp.global_decomposition_table.values():
        assert not [op for op in table if str(op).startswith("fastops.")]


def test_inductor_calls_the_operators_in_continuous_integration():
    """Where the variable CI is set, it refuses those that the tables have a decomposition of."""
    code = """
import torch, fastops
f = torch.compile(lambda x, o: fastops.segment_softmax(x, o).cos(), fullgraph=True)
print(f(torch.ones(3, 2), torch.tensor([0, 1, 3])).shape)
"""
    environment = {**os.environ, "CI": "true", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == "torch.Size([3, 2])\n", result.stderr[-4000:]


def test_fake_tensors_ask_the_operators():
    """Sizes that are not known included, where torch asks decompositions first if there are some."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    data, offsets = (
        mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.dim()))
        for tensor in (torch.ones(7, 2), torch.tensor([0, 3, 3, 7]))
    )
    with mode:
        assert type(data.shape[0]) is torch.SymInt
        assert torch.ops.fastops.segment_sum(data, offsets, None, None).shape == (3, 2)
        with pytest.raises(TypeError, match="segment_softmax: data must be one of float16"):
            torch.ops.fastops.segment_softmax(data.long(), offsets, None, None)


def test_graphs_keep_the_operators():
    from torch.fx.experimental.proxy_tensor import make_fx

    data, offsets = torch.ones(7, 2), torch.tensor([0, 3, 3, 7])
    program = torch.export.export(Calls(fastops.segment_amax), (data, offsets), dynamic_shapes=(({0: DYNAMIC}, {0: DYNAMIC}),))
    graphs = (program.graph, program.run_decompositions().graph, make_fx(lambda x, o: fastops.segment_amax(x, o), tracing_mode="symbolic")(data, offsets).graph)
    for graph in graphs:
        assert any("fastops.segment_amax" in str(node.target) for node in graph.nodes)
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(lambda x, o: fastops.segment_amax(x, o), fullgraph=True, backend=backend, dynamic=True)
        assert torch.equal(compiled(data, offsets), fastops.segment_amax(data, offsets))
    torch._dynamo.reset()


# docs/onnx.md --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[1] / "docs" / "onnx.md"


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kinds_of(PAGE) == {"python"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_page(PAGE, "python") > 8


def test_the_page_names_every_operation():
    text = PAGE.read_text()
    for op in OPS:
        assert f"`{op.name}`" in text or f"`{op.name.removeprefix('segment_')}`" in text, op.name
