"""The registry against what is there: operators, kernels, source files, the README."""

from pathlib import Path

import pytest
import torch

import fastops
from fastops import registry

ROOT = Path(__file__).resolve().parent.parent


def operators():
    """Names of all operators in torch.ops.fastops, from the dispatcher."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("fastops::") for name in names if name.startswith("fastops::"))


def test_every_operator_has_a_row():
    public = [name for name in operators() if not name.startswith("_")]
    assert public == sorted(op.name for op in registry.OPS)


def test_every_row_is_public():
    for op in registry.OPS:
        assert getattr(fastops, op.name) is getattr(op.fn, "func", op.fn)
        assert getattr(op.reference, "func", op.reference) is getattr(fastops.reference, op.name)
    functions = {name for name in fastops.__all__ if name.startswith("segment_")}
    assert functions == {op.name for op in registry.OPS}


@pytest.mark.parametrize("name", operators())
def test_every_operator_has_its_kernels(name):
    keys = ["CPU", "Meta"]
    if fastops.build_info()["cuda"]:
        keys.append("CUDA")
    if not name.startswith("_"):
        keys.append("Autograd")
    for key in keys:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastops::{name}", key), f"{name} has no {key} kernel"


def test_every_operator_has_one_overload():
    for name in operators():
        assert getattr(torch.ops.fastops, name).overloads() == ["default"]


def test_schemas_are_functional():
    for name in operators():
        schema = getattr(torch.ops.fastops, name).default._schema
        assert not schema.is_mutable
        assert all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def test_every_cpu_kernel_file_has_its_cuda_twin():
    here = {path.stem for path in (ROOT / "csrc" / "cpu").glob("*.cpp")} - {"capability"}
    there = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert here and here == there


def test_kernels_do_without_torch_headers():
    for folder in ("cpu", "cuda"):
        for path in (ROOT / "csrc" / folder).iterdir():
            for line in path.read_text().splitlines():
                assert not line.startswith(("#include <torch", "#include <ATen", "#include <c10")), (
                    f"{path.name}: {line}"
                )


def test_the_table_of_the_readme():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    assert registry.markdown_table() in readme.read_text(), "paste fastops.registry.markdown_table() into README.md"


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_peers_compute_the_same(op):
    """What benchmarks compare with does the same work, where no segment is empty."""
    segments = fastops.testing.make_segments((3, 1, 4), "offsets")
    data = fastops.testing.make_data((3 if op.takes_values else 8, 2), torch.float32)
    results, expected = op.peer(data, segments.index, 3), op.fn(data, segments)
    for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (results, expected)]):
        torch.testing.assert_close(one, other)


def test_bytes_moved():
    segments = fastops.testing.make_segments((3, 0, 4))
    data = torch.zeros(7, 5)
    assert registry.find("segment_sum").bytes_moved(data, segments) == 7 * 20 + 3 * 20 + 4 * 8
    assert registry.find("segment_max").bytes_moved(data, segments) == 7 * 20 + 3 * 20 + 3 * 40 + 4 * 8
    assert registry.find("segment_topk").bytes_moved(data, segments) == 7 * 20 + 2 * 3 * 20 + 2 * 3 * 40 + 4 * 8
    assert registry.find("segment_any").bytes_moved(data, segments) == 7 * 20 + 3 * 5 + 4 * 8
    assert registry.find("segment_first").bytes_moved(data, segments) == 3 * 20 + 3 * 20 + 4 * 8
    assert registry.find("segment_broadcast").bytes_moved(data[:3], segments) == 3 * 20 + 7 * 20 + 4 * 8


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_samples_are_the_same_every_time(op):
    for one, other in zip(op.samples("cpu", op.dtypes[0]), op.samples("cpu", op.dtypes[0])):
        assert one.id == other.id and torch.equal(one.args[0], other.args[0])
    assert len(list(op.samples("cpu", op.dtypes[0]))) == len(fastops.testing.PATTERNS)


def test_samples_cover_layouts_groupings_and_features():
    ids = [sample.id for op in registry.OPS[:3] for sample in op.samples("cpu", torch.float32)]
    for part in (*fastops.testing.LAYOUTS, *fastops.testing.GROUPINGS, *(f"D{d}" for d in fastops.testing.FEATURES)):
        assert any(part in id.split("-") for id in ids), part
