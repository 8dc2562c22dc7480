"""What somebody finds who looks around: names, signatures, help; and what an import costs."""

import inspect
import pydoc
import subprocess
import sys
import typing

import pytest

import fastops
from fastops.registry import OPS

MODULES = ("nn", "placement", "reference", "registry", "testing")


def test_all_names_are_there_and_sorted():
    assert sorted(fastops.__all__) == fastops.__all__
    assert len(set(fastops.__all__)) == len(fastops.__all__)
    assert {op.name for op in OPS} <= set(fastops.__all__)
    for name in fastops.__all__:
        assert getattr(fastops, name).__module__.split(".")[0] == "fastops"
    everything: dict = {}
    exec("from fastops import *", everything)
    assert set(fastops.__all__) <= set(everything)


def test_completion_shows_what_is_offered():
    shown = [name for name in dir(fastops) if not name.startswith("__")]
    assert set(fastops.__all__) | set(MODULES) <= set(shown)
    assert set(shown) <= set(fastops.__all__) | set(MODULES) | {"jit"}
    assert all(hasattr(fastops, name) for name in dir(fastops))
    for name in MODULES:
        module = getattr(fastops, name)
        assert set(getattr(module, "__all__", ())) <= set(vars(module)), name


def test_completion_of_segments():
    public = {name for name in dir(fastops.Segments) if not name.startswith("_")}
    made = {"from_offsets", "from_lengths", "from_index", "from_keys"}
    assert public >= made | {"offsets", "lengths", "index", "order", "num_segments", "num_rows", "device"}
    for name in public:
        assert inspect.getdoc(getattr(fastops.Segments, name)), f"Segments.{name} has no docstring"


@pytest.mark.parametrize("name", fastops.__all__)
def test_help_reads_well(name):
    it = getattr(fastops, name)
    text = pydoc.plain(pydoc.render_doc(it))
    first = inspect.getdoc(it).splitlines()[0]
    assert first.endswith((".", ":")) and first in text
    assert all(len(line) <= 140 for line in inspect.getdoc(it).splitlines())
    if name.startswith("segment_"):
        signature = inspect.signature(it)
        assert list(signature.parameters)[0] == ("values" if name == "segment_broadcast" else "data")
        assert list(signature.parameters)[1] == "segments"
        assert all(f"{option}" in it.__doc__ for option in signature.parameters), "an argument has no word"
        for part in ("Args:", "Returns:", "Example:"):
            assert part in it.__doc__
        hints = typing.get_type_hints(it)
        assert set(hints) == {*signature.parameters, "return"}


def test_import_is_quick_and_brings_no_more_than_it_needs():
    code = """if True:
        import sys, time, torch
        before, start = set(sys.modules), time.process_time()
        import fastops
        print(time.process_time() - start, *(set(sys.modules) - before))
        """
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        took, *brought = done.stdout.split()
        seconds.append(float(took))
        if not fastops.build_info()["jit"]:  # which looks for what has changed
            names = {name.split(".")[0] for name in brought if not name.startswith("torch.onnx")}  # which is told of our forms
            others = {name for name in names if name not in sys.stdlib_module_names and not name.startswith("_sysconfigdata")}
            assert others == {"fastops"}
    if not fastops.build_info()["jit"]:
        assert min(seconds) <= 0.4, "seconds beyond torch's own"
