"""The library without the package: torch.ops.load_library in Python, and a C++ program."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastops

ROOT = Path(__file__).resolve().parents[1]


def test_it_needs_no_python():
    if not sys.platform.startswith("linux") or shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    dynamic, symbols = (
        subprocess.run(["readelf", "-W", what, fastops.library_path()], capture_output=True, text=True, check=True).stdout
        for what in ("--dynamic", "--dyn-syms")
    )
    assert re.search(r"NEEDED.*libtorch_cpu", dynamic)
    assert not re.search(r"NEEDED.*(libtorch_python|libpython)", dynamic)
    assert not re.search(r"UND _?Py[A-Z_]", symbols)


def test_load_library_is_enough_for_operators():
    code = """if True:
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        assert "fastops" not in sys.modules
        data = torch.tensor([3., 1., 4., 1., 5., 9., 2.], requires_grad=True)
        offsets = torch.tensor([0, 3, 3, 7])
        result = torch.ops.fastops.segment_sum(data, offsets, None, None)
        result.sum().backward()
        assert result.tolist() == [8, 0, 17] and data.grad.tolist() == [1] * 7
        assert torch.ops.fastops.segment_sum(data.to("meta"), offsets.to("meta"), None, None).shape == (3,)
        import fastops  # finds what is loaded already
        assert torch.equal(fastops.segment_sum(data, offsets), result)
        """
    done = subprocess.run([sys.executable, "-c", code, fastops.library_path()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_copy_is_not_taken_for_its_own(tmp_path):
    copy = shutil.copy(fastops.library_path(), tmp_path)
    code = "import sys, torch; torch.ops.load_library(sys.argv[1]); import fastops"
    done = subprocess.run([sys.executable, "-c", code, copy], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastops: ") and f"those of {copy} are loaded already" in last


@pytest.mark.slow
def test_a_cpp_program(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake on PATH")
    # The program is one for the CPU, so a toolkit need not be there, for which torch's own files look in a build with CUDA.
    if torch.version.cuda is not None:
        pytest.skip("torch's CMake files want a CUDA toolkit that has all of its parts")
    environment = {**os.environ, "CXXFLAGS": ""}
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path, prefix], ["cmake", "--build", tmp_path]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    program = next(path for path in (tmp_path / "segment_sum", tmp_path / "segment_sum.exe") if path.is_file())
    done = subprocess.run([program, fastops.library_path()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = [float(word) for word in re.findall(r"^ *(\d+)$", done.stdout, re.M)]
    assert numbers == [8, 0, 17, 16, 16, 16, 34, 34, 34, 34]
    assert subprocess.run([program], capture_output=True).returncode == 2
