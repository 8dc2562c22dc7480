"""The CUDA sources pass torch's hipify as they are: nothing is left that only CUDA has.

That they are translated does not mean that they run: kernels count on warps of 32 lanes, and HIP wants masks of 64 bits.
"""

import re
import shutil
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "csrc"

ONLY_CUDA = {
    "runtime": r"\bcuda[A-Z]\w*",  # cudaStream_t, cudaGetLastError, cudaDevAttr..., cudaError...
    "driver": r"\bCU(?:stream|context|device|function|module|event|deviceptr)\w*",
    "headers": r"#\s*include\s*[<\"](?:cuda|cub/|c10/cuda|ATen/cuda|cooperative_groups|nv|thrust)[^>\"]*",
    "CUB": r"\bcub::\w+",
    "torch": r"\bat::cuda\w*",  # c10::cuda stays: torch for ROCm has it under that name
    "libcu++": r"(?<!\w)::cuda::\w+",
    "types": r"\b(?:__nv_\w+|nv_\w+|__nv\w+)",
    "profiler": r"\bnvtx\w*",
}
# Of the namespace that sort.cu names for HIP.
KNOWN = {"cub::DoubleBuffer"}


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """Text of each file that HIP would be given, without comments, by its path."""
    hipify_python = pytest.importorskip("torch.utils.hipify.hipify_python")
    root = tmp_path_factory.mktemp("hipify").resolve()
    if not SOURCES.is_dir():
        pytest.skip("there are no sources beside the tests")
    shutil.copytree(SOURCES, root / "csrc")
    files = [str(path) for path in (root / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    results = hipify_python.hipify(
        project_directory=str(root),
        output_directory=str(root),
        includes=[str(root / "csrc" / "*")],
        header_include_dirs=[str(root / "csrc")],
        extra_files=files,
        is_pytorch_extension=True,
    )
    texts = {}
    for name in files:
        path = Path(results[name].hipified_path or name)
        texts[path.relative_to(root).as_posix()] = as_hip_reads_it(path.read_text())
    return texts


def as_hip_reads_it(text):
    """Without comments and what is for CUDA alone."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"#ifdef __HIP_PLATFORM_AMD__\n(.*?)(?:#else\n.*?)?#endif", r"\1", text, flags=re.DOTALL)
    return re.sub(r"#ifndef __HIP_PLATFORM_AMD__\n.*?#endif", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("kind", ONLY_CUDA)
def test_nothing_of_cuda_is_left(translated, kind):
    left = [f"{path}: {found}" for path, text in translated.items() for found in re.findall(ONLY_CUDA[kind], text) if found not in KNOWN]
    assert not left


def test_what_was_translated(translated):
    """Every kernel file, and those of the host that see torch's CUDA headers."""
    assert {Path(path).stem for path in translated if path.endswith(".hip")} == {path.stem for path in (SOURCES / "cuda").glob("*.cu")}
    checks = next(text for path, text in translated.items() if Path(path).name.startswith("checks"))
    assert "#include <c10/hip/HIPGuard.h>" in checks and "hipStream_t" in checks
    assert "hipcub::DeviceRadixSort::SortPairs" in translated["csrc/hip/sort.hip"]
    assert "namespace cub = hipcub;" in translated["csrc/hip/sort.hip"]
    kernels = next(text for path, text in translated.items() if Path(path).name.startswith("kernels"))
    assert "struct ihipStream_t;" in kernels  # what hipStream_t points to


def test_instructions_of_nvidia_are_guarded(translated):
    """PTX stands only where CUDA compiles for the device, with something else for others."""
    for path, text in translated.items():
        inside = re.sub(r"#ifdef __CUDA_ARCH__.*?#else", "", text, flags=re.DOTALL)
        assert not re.search(r"\basm\b", inside), path
    assert any("asm(" in text for text in translated.values())
