"""torch.export, AOTInductor and TorchScript: programs for any number of rows and segments, saved, and run where only fastops is imported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastops
from fastops import (
    Segments,
    nn,
    segment_amax,
    segment_broadcast,
    segment_max,
    segment_mean,
    segment_quantile,
    segment_softmax,
    segment_sort,
    segment_sum,
    segment_topk,
    testing,
)

LENGTHS = ((3, 0, 4), (5, 1, 2, 9), (4, 4, 4, 4, 4))

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler"
)
scripting_is_old = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Modules of fastops.nn and operations of every family."""

    def __init__(self):
        super().__init__()
        self.norm = nn.SegmentNorm(4)
        self.pool = nn.SegmentPool(["sum", "amax", "logsumexp"], fill_value=0.0)
        self.attention = nn.SegmentAttentionPool(4, heads=2)

    def forward(self, x, s):
        y = self.norm(x, s)
        values, numbers = segment_topk(y, s, 2)
        shares = torch.tensor([0.2, 0.7])
        down = segment_broadcast(segment_mean(y, s), s, num_rows=x.shape[0])
        return self.pool(y, s), self.attention(y, s), segment_softmax(y, s), segment_sort(y, s)[0], values, numbers, segment_quantile(y, s, shares), down


class OfIndex(Model):
    def forward(self, x, index, like):
        return super().forward(x, Segments.from_index(index, like.shape[0]))


class OfIgnored(Model):
    def forward(self, x, index, like):
        return super().forward(x, Segments.from_index(index, like.shape[0], ignore_index=-1))


class OfLengths(Model):
    def forward(self, x, lengths):
        return super().forward(x, Segments.from_lengths(lengths))


class Properties(torch.nn.Module):
    def forward(self, x, s):
        return x / s.lengths.clamp(min=1)[s.index][:, None], s.offsets * 2, s.num_segments, s.num_rows


class Several(torch.nn.Module):
    def forward(self, x, listed, named):
        return segment_sum(x, listed[0]) + segment_sum(x, listed[1]), segment_amax(x, named["a"])


def made(lengths, grouping):
    segments = testing.make_segments(lengths, grouping)
    return testing.make_data((segments.num_rows, 4), torch.float32), segments


def of(grouping):
    return lambda lengths: made(lengths, grouping)


def bare(lengths):
    x, segments = made(lengths, "offsets")
    return x, segments.offsets


def indexed(grouping):
    def make(lengths):
        x, segments = made(lengths, grouping)
        return x, segments.index, torch.zeros(len(lengths))

    return make


def with_lengths(lengths):
    return testing.make_data((sum(lengths), 4), torch.float32), torch.tensor(lengths)


def in_containers(lengths):
    x, segments = made(lengths, "offsets")
    other = testing.make_segments(lengths, "unsorted")
    return x, [segments, other], {"a": other}


PROGRAMS = {
    "segments": (Model, of("offsets")),
    "segments_unsorted": (Model, of("unsorted")),
    "segments_ignored": (Model, of("ignored")),
    "bare_offsets": (Model, bare),
    "made_of_index": (OfIndex, indexed("unsorted")),
    "made_of_ignored": (OfIgnored, indexed("ignored")),
    "made_of_lengths": (OfLengths, with_lengths),
    "properties": (Properties, of("offsets")),
    "properties_unsorted": (Properties, of("unsorted")),
    "containers": (Several, in_containers),
}


def same(results, expected):
    for one, other in zip(results, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def sizes_of(argument, size):
    """Any size for the first dimension of each tensor; segments are one tensor or three."""
    if isinstance(argument, Segments):
        return [{0: size}] * (1 if argument.order is None else 3)
    if isinstance(argument, list):
        return [sizes_of(each, size) for each in argument]
    if isinstance(argument, dict):
        return {key: sizes_of(each, size) for key, each in argument.items()}
    return {0: size}


def exported(name, strict, size=torch.export.Dim.DYNAMIC):
    make_model, make = PROGRAMS[name]
    torch.manual_seed(0)
    model, arguments = make_model(), make(LENGTHS[0])
    shapes = tuple(sizes_of(argument, size) for argument in arguments)
    return model, make, torch.export.export(model, arguments, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", (False, True), ids=("lenient", "strict"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_export(name, strict, tmp_path):
    """For any number of rows and of segments, saved and loaded. DYNAMIC raises where something ties a size to a number."""
    model, make, program = exported(name, strict)
    assert any("fastops.segment_" in str(node.target) for node in program.graph.nodes) or name.startswith("properties")
    torch.export.save(program, tmp_path / "model.pt2")
    for way in (program.module(), torch.export.load(tmp_path / "model.pt2").module()):
        for lengths in LENGTHS:
            same(way(*make(lengths)), model(*make(lengths)))


class Grouped(torch.nn.Module):
    def __init__(self, segments):
        super().__init__()
        self.segments = segments

    def forward(self, x):
        shares = segment_softmax(x, self.segments) * self.segments.lengths[self.segments.index][:, None]
        return shares, segment_sort(x, self.segments)[1]


@pytest.mark.parametrize("strict", (False, True), ids=("lenient", "strict"))
@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_segments_of_a_module_are_constants(grouping, strict, tmp_path):
    data, segments = made(LENGTHS[0], grouping)
    model = Grouped(segments)
    program = torch.export.export(model, (data,), strict=strict)
    assert segments._lengths is None and segments._index is None, "what tracing computed did not leak out of it"
    torch.export.save(program, tmp_path / "model.pt2")
    same(torch.export.load(tmp_path / "model.pt2").module()(data), model(data))


# TorchScript ---------------------------------------------------------------------------------------------------------


def scripted(x: torch.Tensor, offsets: torch.Tensor):
    shares = torch.ops.fastops.segment_softmax(x, offsets, None, None)
    total = torch.ops.fastops.segment_sum(x * shares, offsets, None, None)
    values, numbers = torch.ops.fastops.segment_topk(x, offsets, None, None, 2)
    return total, torch.ops.fastops.segment_broadcast(total, offsets, None, None, x.size(0)), values, numbers


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.SegmentNorm(4)
        self.pool = nn.SegmentPool(["sum", "std"])
        self.attention = nn.SegmentAttentionPool(4)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor):
        y = self.norm(x, offsets)
        return self.pool(y, offsets), self.attention(y, offsets), torch.ops.fastops.segment_cumsum(y, offsets, None, None)


@scripting_is_old
@pytest.mark.parametrize("what", (scripted, Scripted()), ids=("function", "module"))
def test_script(what, tmp_path):
    torch.jit.save(torch.jit.script(what), str(tmp_path / "scripted.pt"))
    loaded = torch.jit.load(str(tmp_path / "scripted.pt"))
    ways = [loaded, torch.jit.freeze(loaded.eval())] if isinstance(what, torch.nn.Module) else [loaded]
    for lengths in LENGTHS:
        for way in ways:
            same(way(*bare(lengths)), what(*bare(lengths)))


def several(x, s):
    down = segment_broadcast(segment_mean(x, s), s)
    return segment_sum(x - down, s), segment_softmax(x, s), *segment_max(x, s), segment_sort(x, s)[0], segment_topk(x, s, 2)[0]


TRACED = {
    "bare_offsets": (several, bare),
    "from_lengths": (lambda x, lengths: several(x, Segments.from_lengths(lengths)), with_lengths),
    "from_index": (lambda x, index, _: several(x, Segments.from_index(index, 3)), indexed("unsorted")),
    "from_ignored": (lambda x, index, _: several(x, Segments.from_index(index, 3, ignore_index=-1)), indexed("ignored")),
    "module": (Scripted(), bare),
}


@scripting_is_old
@pytest.mark.parametrize("name", TRACED)
def test_trace(name, tmp_path):
    """Neither sizes nor whether an index ascends become constants; a number of segments that is given is one."""
    function, make = TRACED[name]
    several_segments = LENGTHS if make in (bare, with_lengths) else ((3, 0, 4), (2, 5, 2), (0, 0, 1))
    traced = torch.jit.trace(function, make(several_segments[0]))
    torch.jit.save(traced, str(tmp_path / "traced.pt"))
    for way in (traced, torch.jit.load(str(tmp_path / "traced.pt"))):
        for lengths in several_segments:
            same(way(*make(lengths)), function(*make(lengths)))


@scripting_is_old
def test_trace_of_an_index_that_ascends():
    data, index = testing.make_data((4, 2), torch.float32), torch.tensor([0, 0, 1, 2])
    traced = torch.jit.trace(lambda x, index: several(x, Segments.from_index(index, 3)), (data, index))
    same(traced(data, index.flip(0)), several(data, Segments.from_index(index.flip(0), 3)))
    with pytest.raises(ValueError, match="num_segments must be given where the entries of index are unknown"):
        torch.jit.trace(lambda x, index: several(x, Segments.from_index(index)), (data, index))


# Another process -----------------------------------------------------------------------------------------------------

ELSEWHERE = """
import fastops, torch
data, offsets = torch.load("inputs.pt")
segments = fastops.Segments.from_offsets(offsets)
loaded = {
    "segments": lambda: torch.export.load("segments.pt2").module()(data, segments),
    "bare_offsets": lambda: torch.export.load("bare_offsets.pt2").module()(data, offsets),
    "scripted": lambda: torch.jit.load("scripted.pt")(data, offsets),
    "traced": lambda: torch.jit.load("traced.pt")(data, offsets),
    "package": lambda: torch._inductor.aoti_load_package("package.pt2")(data, segments),
}
torch.save([loaded[name]() for name in {names}], "outputs.pt")
"""


def run_elsewhere(names, folder, lengths=LENGTHS[1]):
    torch.save(bare(lengths), folder / "inputs.pt")
    command = [sys.executable, "-c", ELSEWHERE.replace("{names}", str(names))]
    environment = {**os.environ, "PYTHONPATH": str(Path(fastops.__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "outputs.pt")


@scripting_is_old
def test_loaded_where_only_fastops_is_imported(tmp_path):
    names = ["segments", "bare_offsets", "scripted", "traced"]
    models = []
    for name in names[:2]:
        model, _, program = exported(name, strict=False)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        models.append(model)
    model = Scripted()
    torch.jit.save(torch.jit.script(model), str(tmp_path / "scripted.pt"))
    torch.jit.save(torch.jit.trace(several, bare(LENGTHS[0])), str(tmp_path / "traced.pt"))
    outputs = run_elsewhere(names, tmp_path)
    for results, function in zip(outputs, [*models, model, several], strict=True):
        same(results, function(*bare(LENGTHS[1])))


class Packaged(torch.nn.Module):
    def forward(self, x, s):
        values, numbers = segment_topk(x, s, 2)
        return segment_sum(segment_softmax(x.sin(), s), s), values, numbers, segment_quantile(x, s, 0.3)


@needs_compiler
def test_package(tmp_path):
    """AOTInductor: machine code that calls the operators, for any number of rows and segments."""
    arguments = made(LENGTHS[0], "offsets")
    shapes = tuple(sizes_of(argument, torch.export.Dim.DYNAMIC) for argument in arguments)
    with torch.no_grad():
        program = torch.export.export(Packaged(), arguments, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
        package = torch._inductor.aoti_load_package(str(tmp_path / "package.pt2"))
        for lengths in LENGTHS:
            results, expected = package(*made(lengths, "offsets")), Packaged()(*made(lengths, "offsets"))
            torch.testing.assert_close(tuple(results), expected, equal_nan=True)
        (results,) = run_elsewhere(["package"], tmp_path)
    torch.testing.assert_close(tuple(results), Packaged()(*made(LENGTHS[1], "offsets")), equal_nan=True)
