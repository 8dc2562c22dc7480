"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, without torch: `pytest -m slow tests/test_sanitizer.py`."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
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
    flags = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-pthread"]
    units = [(ROOT / "tests" / "sanitizer" / "patterns.cpp", f"-DFASTOPS_CPU_NAMESPACE=fastops::cpu::{namespace}")]
    kernels = (path for path in (ROOT / "csrc" / "cpu").glob("*.cpp") if path.name != "capability.cpp")
    units += [(path, f"-DFASTOPS_CAPABILITY={number}") for path in sorted(kernels, key=lambda path: -path.stat().st_size)]

    def compile(unit):
        path, define = unit
        command = [compiler, *flags, define, f"-I{ROOT / 'csrc'}", "-c", str(path), "-o", str(tmp_path / f"{path.stem}.o")]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        for built in pool.map(compile, units):
            if "libasan" in built.stderr:
                pytest.skip(f"this compiler has no sanitizers: {built.stderr.splitlines()[0]}")
            assert built.returncode == 0, built.stderr
    objects = [tmp_path / f"{path.stem}.o" for path, _ in units]
    linked = subprocess.run([compiler, *flags, *map(str, objects), "-o", str(tmp_path / "patterns")], capture_output=True, text=True)
    assert linked.returncode == 0, linked.stderr
    done = subprocess.run([str(tmp_path / "patterns")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("0 wrong")
