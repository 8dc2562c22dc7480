"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, without torch: `pytest -m slow tests/test_sanitizer.py`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fastops import _build

ROOT = Path(__file__).resolve().parents[1]

@pytest.mark.slow
def test_kernels_under_the_sanitizers(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no c++ on PATH")
    # AVX2 has conversions of its own; AVX-512 has the same ones, twice as wide.
    number, namespace = (1, "avx2") if _build.processor_capability() in ("avx2", "avx512") else (0, "default_")
    source = tmp_path / "all.cpp"
    files = sorted(path.name for path in (ROOT / "csrc" / "cpu").glob("*.cpp") if path.name != "capability.cpp")
    source.write_text("".join(f'#include "cpu/{file}"\n' for file in files))
    flags = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-pthread"]
    includes = [f"-I{ROOT / 'csrc'}"]
    objects = []
    for file, defines in (
        (source, [f"-DFASTOPS_CAPABILITY={number}"]),
        (ROOT / "tests" / "sanitizer" / "patterns.cpp", [f"-DFASTOPS_CPU_NAMESPACE=fastops::cpu::{namespace}"]),
    ):
        objects.append(tmp_path / f"{file.stem}.o")
        command = [compiler, *flags, *defines, *includes, "-c", str(file), "-o", str(objects[-1])]
        built = subprocess.run(command, capture_output=True, text=True)
        if "libasan" in built.stderr:
            pytest.skip(f"this compiler has no sanitizers: {built.stderr.splitlines()[0]}")
        assert built.returncode == 0, built.stderr
    linked = subprocess.run([compiler, *flags, *map(str, objects), "-o", str(tmp_path / "patterns")], capture_output=True, text=True)
    assert linked.returncode == 0, linked.stderr
    done = subprocess.run([str(tmp_path / "patterns")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("0 wrong")
