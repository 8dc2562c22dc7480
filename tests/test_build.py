"""The build: what it finds, what it decides, what it says when something is missing (ISS-01 to 05, 08 to 10, 79)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch

import fastops
from fastops import _build, _native

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(_native.__file__).parent
CPU_TORCH = _build.Torch(Path("/torch"), "2.13.0+cpu", None)
CUDA_TORCH = _build.Torch(Path("/torch"), "2.14.1", "13.0")

posix_only = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for tools are shell scripts")
pytestmark = posix_only


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_nvcc(path, release, *, top=None, codes="sm_75 sm_80 sm_90"):
    """An nvcc that only answers questions. `top`: the toolkit it says it belongs to."""
    dryrun = f"--dryrun) echo '#$ TOP={top}' >&2 ;;" if top else ""
    return script(
        path,
        f"case $1 in {dryrun} --list-gpu-code) printf '%s\\n' {codes} ;; "
        f"*) echo 'Cuda compilation tools, release {release}, V{release}.88' ;; esac",
    )


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without tools and without wishes."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FASTOPS_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(_build, "TOOLKIT_PARENT", tmp_path / "usr-local")
    return tmp_path


def run_python(code, *, cwd=None, path=None, timeout=300, options=(), **environ):
    """Runs code in a new interpreter. `path`: the PYTHONPATH; without it the package under test is imported."""
    env = {**os.environ, "PYTHONPATH": str(path or PACKAGE.parent), **environ}
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


# Toolkit -------------------------------------------------------------------------------------------------------------


def test_toolkit_behind_a_wrapper_script(bare):
    real = fake_nvcc(bare / "toolkit" / "bin" / "nvcc", "13.0", top=bare / "toolkit" / "bin" / "..")
    script(bare / "path" / "nvcc", f'exec {real} "$@"')
    toolkit, note = _build.choose_toolkit(CUDA_TORCH)
    assert (toolkit.home, toolkit.nvcc, toolkit.version, note) == (bare / "toolkit", real, "13.0", "")


def test_cuda_home_comes_before_path(bare, monkeypatch):
    fake_nvcc(bare / "path" / "nvcc", "13.1")
    fake_nvcc(bare / "mine" / "bin" / "nvcc", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(bare / "mine"))
    assert _build.choose_toolkit(CUDA_TORCH)[0].home == bare / "mine"


@pytest.mark.parametrize("wanted", ["", "1"])
def test_iss05_toolkit_of_another_version(bare, monkeypatch, wanted):
    fake_nvcc(bare / "path" / "nvcc", "10.1")
    monkeypatch.setenv("FASTOPS_CUDA", wanted)
    if wanted:
        with pytest.raises(_build.BuildError) as caught:
            _build.choose_toolkit(CUDA_TORCH)
        said = str(caught.value)
    else:
        toolkit, said = _build.choose_toolkit(CUDA_TORCH)
        assert toolkit is None
    for part in ("13.0", "10.1", str(bare), "CUDA_HOME", "CUDA 13"):
        assert part in said
    assert "\n" not in said


def test_iss05_the_matching_toolkit_is_found_behind_a_wrong_one(bare):
    fake_nvcc(bare / "path" / "nvcc", "10.1")
    fake_nvcc(bare / "usr-local" / "cuda-13.0" / "bin" / "nvcc", "13.0")
    toolkit, note = _build.choose_toolkit(CUDA_TORCH)
    assert toolkit.version == "13.0"
    assert "10.1" in note and "CUDA_HOME" in note


def test_iss05_a_torch_without_cuda_ignores_nvcc(bare):
    script(bare / "path" / "nvcc", f"touch {bare}/asked")
    toolkit, reason = _build.choose_toolkit(CPU_TORCH)
    assert toolkit is None
    assert reason == "torch 2.13.0+cpu is built without CUDA; install a CUDA build of torch"
    assert not (bare / "asked").exists()


def test_no_toolkit(bare, monkeypatch):
    assert "no nvcc is on PATH" in _build.choose_toolkit(CUDA_TORCH)[1]
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "CUDA_HOME=/nowhere holds no bin/nvcc" in _build.choose_toolkit(CUDA_TORCH)[1]


def test_fastops_cuda_switch(bare, monkeypatch):
    fake_nvcc(bare / "path" / "nvcc", "13.0")
    monkeypatch.setenv("FASTOPS_CUDA", "0")
    assert _build.choose_toolkit(CUDA_TORCH) == (None, "FASTOPS_CUDA=0 was set")
    monkeypatch.setenv("FASTOPS_CUDA", "yes")
    with pytest.raises(_build.BuildError, match="must be 0 or 1, but got yes"):
        _build.choose_toolkit(CUDA_TORCH)
    monkeypatch.setenv("FASTOPS_CUDA", "1")
    with pytest.raises(_build.BuildError, match="FASTOPS_CUDA=1 asks for CUDA, but torch 2.13.0.cpu is built without"):
        _build.choose_toolkit(CPU_TORCH)


# Architectures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def toolkit(bare):
    return _build.toolkit_of(fake_nvcc(bare / "toolkit" / "bin" / "nvcc", "13.0"))


def test_iss08_default_architectures_end_in_ptx(toolkit):
    assert _build.choose_architectures(toolkit) == ["7.5", "8.0", "9.0+PTX"]  # cut to what the toolkit knows


def test_architectures_of_the_gpus_that_are_here(toolkit, bare):
    script(bare / "path" / "nvidia-smi", "echo 9.0; echo 8.0; echo 9.0")
    assert _build.choose_architectures(toolkit) == ["8.0", "9.0+PTX"]
    script(bare / "path" / "nvidia-smi", "echo 14.2")  # newer than the toolkit: PTX serves it
    assert _build.choose_architectures(toolkit) == ["7.5", "8.0", "9.0+PTX"]
    script(bare / "path" / "nvidia-smi", "echo 'no devices were found'; exit 6")
    assert _build.choose_architectures(toolkit) == ["7.5", "8.0", "9.0+PTX"]


@pytest.mark.parametrize("text", ["7.5;8.0+PTX", "7.5 8.0+PTX", "7.5, 8.0+PTX;"])
def test_torch_cuda_arch_list(toolkit, monkeypatch, text):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert _build.choose_architectures(toolkit) == ["7.5", "8.0+PTX"]


@pytest.mark.parametrize("text, said", [("7.5;6.1", "6.1, but CUDA 13.0 at .* knows 7.5, 8.0, 9.0 only"), ("sm_80", "must")])
def test_bad_torch_cuda_arch_list(toolkit, monkeypatch, text, said):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(_build.BuildError, match=said):
        _build.choose_architectures(toolkit)


def test_architecture_flags():
    assert _build.architecture_flags(["8.0", "9.0a", "12.0+PTX"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


# torch ---------------------------------------------------------------------------------------------------------------


def fake_torch(folder, version):
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported by the build')")
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = None\n")
    return package


def test_iss02_torch_of_the_target_environment_is_found(monkeypatch, tmp_path):
    package = fake_torch(tmp_path, "2.12.1+cpu")
    monkeypatch.setattr(_build.importlib.util, "find_spec", lambda name: None)  # as in an isolated build
    monkeypatch.setattr(_build, "target_paths", lambda: [str(tmp_path)])
    assert _build.find_torch() == _build.Torch(package, "2.12.1+cpu", None)
    assert _build.torch_requirements() == []


def test_a_torch_that_is_too_old_is_none(monkeypatch, tmp_path):
    fake_torch(tmp_path, "2.9.1")
    monkeypatch.setattr(_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_build, "target_paths", lambda: [str(tmp_path)])
    assert _build.find_torch() is None


def test_iss02_without_torch_pip_is_asked_and_others_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(_build, "find_torch", lambda: None)
    monkeypatch.setenv("PIP_BUILD_TRACKER", str(tmp_path / "tracker"))
    report = {"install": [{"metadata": {"name": "torch", "version": "2.14.1+cu130"}}]}
    pip = script(tmp_path / "python", f"echo '{json.dumps(report)}'")
    monkeypatch.setattr(sys, "executable", str(pip))
    assert _build.torch_requirements() == ["torch>=2.11,<=2.14.1"]
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", "exit 1")))
    assert _build.torch_requirements() == ["torch>=2.11"]
    monkeypatch.delenv("PIP_BUILD_TRACKER")
    with pytest.raises(_build.BuildError, match="--no-build-isolation"):
        _build.torch_requirements()
    with pytest.raises(_build.BuildError, match="install torch first"):
        _build.make_plan(ROOT)


def test_iss02_metadata_needs_no_torch(tmp_path):
    code = (
        "import sys, runpy; sys.modules['torch'] = None; "
        f"sys.argv = ['setup.py', '-q', 'egg_info', '--egg-base', {str(tmp_path)!r}]; runpy.run_path('setup.py')"
    )
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    requires = (tmp_path / "fastops.egg-info" / "requires.txt").read_text()
    assert requires.startswith("torch>=2.11\nnumpy\n")


# Flags ---------------------------------------------------------------------------------------------------------------


def test_iss10_flags_of_the_compiler_in_use(monkeypatch):
    monkeypatch.delenv("CXXFLAGS", raising=False)
    plan = _build.make_plan(ROOT)
    for flags in (plan.kernel_flags, plan.host_flags, plan.module_flags):
        assert not [flag for flag in flags if re.match(r"-m(arch|avx|tune)|-Ofast|-ffast-math|-Wall", flag)]
        assert "-ffp-contract=off" in flags and "-fvisibility=hidden" in flags


def test_iss10_msvc_gets_its_own_flags(bare, monkeypatch):
    monkeypatch.setenv("CXX", str(script(bare / "cl", "exit 1")))
    plan = _build.make_plan(ROOT)
    assert plan.msvc and plan.capabilities == ["default"]
    for flags in (plan.kernel_flags, plan.host_flags, plan.module_flags, plan.link_flags):
        assert [flag for flag in flags if flag.startswith("-")] == []


def test_iss10_headers_stay_on_their_side():
    for path in [*ROOT.glob("csrc/cpu/*"), *ROOT.glob("csrc/cuda/*"), *ROOT.glob("csrc/*.h")]:
        includes = re.findall(r'#include\s+[<"]([^>"]+)', path.read_text())
        assert not [name for name in includes if re.match(r"(torch|ATen|c10|pybind11)/", name)], path
        if path.parent.name != "cuda":
            assert not [name for name in includes if re.match(r"cuda|cub/|thrust/", name)], path


def test_iss09_number_of_compilers(bare, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert _build.number_of_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(_build.BuildError, match="MAX_JOBS must be a positive number, but got many"):
        _build.number_of_jobs()
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= _build.number_of_jobs() <= os.cpu_count()
    monkeypatch.setattr(_build, "BYTES_PER_JOB", 1 << 60)
    assert _build.number_of_jobs() == 1


# Import --------------------------------------------------------------------------------------------------------------


def test_build_info():
    info = fastops.build_info()
    assert info["torch_running"] == torch.__version__
    assert info["torch_built"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["cpu_capability"] in ("default", "avx2", "avx512")
    assert info["cuda"] == (info["cuda_reason"] == "") == bool(info["architectures"]) == bool(info["cuda_version"])
    assert info["compiler"] and info["version"] and info["python"]


@pytest.mark.parametrize("where", ["elsewhere", "root"])
def test_iss79_import_is_silent_anywhere(tmp_path, where):
    code = "import sys; assert 'torch' not in sys.modules; import fastops; print(fastops.build_info()['torch_built'])"
    done = run_python(code, cwd=ROOT if where == "root" else tmp_path, options=["-W", "error"])
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.strip() == fastops.build_info()["torch_built"]


@pytest.fixture
def copied(tmp_path):
    """The Python files of the package, with a record and a library that is none."""
    package = tmp_path / "site" / "fastops"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_C*", _build.LIBRARY_NAME, "__pycache__"))
    record = {"torch_built": torch.__version__, "torch_cuda": torch.version.cuda, "cxx11_abi": True, "source": str(ROOT)}
    (package / _build.RECORD_NAME).write_text(json.dumps(record))
    for name in (_build.MODULE_NAME, _build.LIBRARY_NAME):
        (package / name).write_bytes(b"")
    return package


def import_error(package):
    done = run_python("import fastops", path=package.parent, FASTOPS_JIT="0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert "pip install --force-reinstall --no-deps" in last and str(ROOT) in last
    return last


@pytest.mark.parametrize("fact, value", [("torch_built", "1.13.1+cu117"), ("torch_cuda", "11.7"), ("cxx11_abi", False)])
def test_iss01_another_torch_than_built_for(copied, fact, value):
    record = copied / _build.RECORD_NAME
    record.write_text(json.dumps({**json.loads(record.read_text()), fact: value}))
    said = import_error(copied)
    assert "fastops was built for torch" in said and f"torch {torch.__version__} (" in said
    assert said.count("CUDA") >= 2 and "undefined symbol" not in said
    assert str(value) in said or "C++ ABI" in said


def test_iss01_the_loader_s_words_do_not_stand_alone(copied):
    said = import_error(copied)
    assert "could not be loaded" in said and said.count(f"torch {torch.__version__}") == 2


def test_iss79_missing_binary(copied):
    for name in (_build.LIBRARY_NAME, _build.MODULE_NAME):
        (copied / name).unlink()
        assert f"the compiled part {name} is missing from {copied}" in import_error(copied)
    (copied / "_C.cpython-37m-x86_64-linux-gnu.so").write_bytes(b"")
    assert "there is _C.cpython-37m-x86_64-linux-gnu.so, for another Python" in import_error(copied)


# Instruction sets ----------------------------------------------------------------------------------------------------


all_copies = pytest.mark.skipif(fastops.build_info()["jit"], reason="the development build holds one copy of the kernels")


@all_copies
@pytest.mark.parametrize("wanted", ["default", "avx2", "avx512", "sse9"])
def test_cpu_capability_override(wanted):
    code = (
        "import fastops, torch; info = fastops.build_info(); "
        "print(info['cpu_capability'], info['cpu_capability_note'], sep='|')"
    )
    done = run_python(code, FASTOPS_CPU_CAPABILITY=wanted)
    assert done.returncode == 0, done.stderr
    used, note = done.stdout.strip().split("|")
    if used == wanted:
        assert note == ""
    else:  # a wish that this processor or build cannot fulfil: lowered, and said
        assert wanted in note and used in note
    if wanted == "default":
        assert used == "default"


@all_copies
def test_only_the_kernels_of_an_instruction_set_use_it():
    """Templates that the linker merges must not bring one copy's instructions into another's."""
    if shutil.which("objdump") is None or _build.make_plan(ROOT).capabilities == ["default"]:
        pytest.skip("needs objdump and an x86-64 processor")
    listing = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", fastops.build_info()["library"]], capture_output=True, text=True
    ).stdout
    # VEX and EVEX instructions are those with a v; the others are of BMI.
    newer = re.compile(r":\t(v[a-z]+|shlx|shrx|sarx|rorx|mulx|andn|bzhi|bextr|blsr|pdep|pext)\b")
    users, users_of_zmm, function = set(), set(), ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif newer.search(line):
            users.add(function)
            if "%zmm" in line:
                users_of_zmm.add(function)
    assert users_of_zmm
    assert [name for name in users if "fastops::cpu::avx" not in name] == []
    assert [name for name in users_of_zmm if "fastops::cpu::avx512" not in name] == []


# JIT -----------------------------------------------------------------------------------------------------------------

KERNEL = """#include "cpu/capability.h"
namespace FASTOPS_CPU_NAMESPACE { int answer() { return ANSWER; } }
"""


MODULE = """#include <pybind11/pybind11.h>
#include "build_facts.h"
#include "cpu/capability.h"
PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] { return pybind11::dict(); });
  m.def("cpu_capability", &fastops::cpu::capability_name);
  m.def("library_in_use", [] { return ""; });
}
"""


@pytest.fixture
def small_tree(tmp_path):
    """A source tree of the real shape that compiles in seconds."""
    root = tmp_path / "tree"
    package = root / "python" / "fastops"
    package.mkdir(parents=True)
    for name in ("_build.py", "_native.py", "jit.py"):
        shutil.copy(PACKAGE / name, package)
    (package / "__init__.py").write_text("from . import _native\nfrom ._native import build_info\n")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "csrc" / "cpu").mkdir(parents=True)
    for name in ("capability.h", "capability.cpp"):
        shutil.copy(ROOT / "csrc" / "cpu" / name, root / "csrc" / "cpu")
    (root / "csrc" / "module.cpp").write_text(MODULE)
    (root / "csrc" / "python.cpp").write_text("\n")
    (root / "csrc" / "ops.cpp").write_text("\n")
    (root / "csrc" / "cpu" / "x.cpp").write_text(KERNEL.replace("ANSWER", "42"))
    return root


def jit_environment(root):
    cache = root.parent / "cache"
    return {"PYTHONPATH": str(root / "python"), "FASTOPS_JIT": "1", "TORCH_EXTENSIONS_DIR": str(cache), "FASTOPS_CUDA": "0"}


def jit_import(root, **environ):
    return run_python("import fastops", path=root / "python", **{**jit_environment(root), **environ})


def objects(root):
    return {path.name: path.stat().st_mtime_ns for path in (root.parent / "cache").rglob("*.o")}


def test_jit_rebuilds_what_changed(small_tree):
    done = jit_import(small_tree)
    assert done.returncode == 0, done.stderr
    first = objects(small_tree)
    assert sorted(first)[0] == "cpu_capability.o" and len(first) == 4  # and x for this processor, host, module
    done = jit_import(small_tree)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert objects(small_tree) == first

    (small_tree / "csrc" / "cpu" / "x.cpp").write_text(KERNEL.replace("ANSWER", "43"))
    (small_tree / "csrc" / "cpu" / "y.cpp").write_text(KERNEL.replace("answer", "other").replace("ANSWER", "1"))
    assert jit_import(small_tree).returncode == 0
    changed = {name for name, stamp in objects(small_tree).items() if first.get(name) != stamp}
    assert changed == {name for name in objects(small_tree) if name.startswith(("cpu_x_", "cpu_y_"))}

    (small_tree / "csrc" / "cpu" / "x.cpp").write_text("int broken() { return nonsense; }\n")
    done = jit_import(small_tree)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastops.jit: fastops could not be compiled: ")
    assert "x.cpp:1" in last and "nonsense" in last and "build.log" in last


def test_jit_library_that_cannot_be_loaded(small_tree):
    (small_tree / "csrc" / "ops.cpp").write_text("void missing(); static const int called = (missing(), 1);\n")
    last = jit_import(small_tree).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastops.jit: ") and "could not be loaded" in last and "missing" in last


def test_jit_two_processes_and_a_killed_one(small_tree):
    start = lambda: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", "import fastops"],
        env={**os.environ, **jit_environment(small_tree), "MAX_JOBS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killed = start()
    deadline = time.monotonic() + 60
    while not objects(small_tree) and time.monotonic() < deadline and killed.poll() is None:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    for process in [start(), start()]:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_iss04_no_compiler(small_tree, tmp_path):
    done = jit_import(small_tree, PATH=str(tmp_path / "empty"))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastops.jit: a C++ compiler must be there")
    for part in ("c++ or g++ or clang++ is not on PATH", str(tmp_path / "empty"), "pip install ."):
        assert part in last


def test_iss04_no_ninja(bare, monkeypatch):
    monkeypatch.setattr(_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(_build.BuildError) as caught:
        _build.find_ninja()
    said = str(caught.value)
    for part in ("ninja must be there", str(bare / "path"), sys.executable, "pip install ninja", "pip install ."):
        assert part in said
    assert "\n" not in said


def test_jit_outside_a_source_tree(copied):
    done = run_python("import fastops", path=copied.parent, FASTOPS_JIT="1")
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: fastops.jit: the sources must be there")


def test_jit_keys(monkeypatch):
    plan = _build.make_plan(ROOT)
    key = plan.key()
    assert key == _build.make_plan(ROOT).key()
    monkeypatch.setenv("CXXFLAGS", "-DSOMETHING")
    keys = {key, _build.make_plan(ROOT).key()}
    plan.torch = _build.Torch(plan.torch.root, "2.99.0", plan.torch.cuda)
    keys.add(plan.key())
    assert len(keys) == 3


# Documents -----------------------------------------------------------------------------------------------------------


def test_readme_has_two_setup_commands():
    """.ci/run runs what it finds there."""
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md yet")
    found = re.findall(r"^\s*(pip install .* && python -m .*)$", readme.read_text(), re.M)
    assert found == ["pip install . && python -m fastops", 'pip install ".[test]" && python -m pytest tests']


# Real installs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new virtual environment with the torch that is here, and a copy of the sources."""
    folder = tmp_path_factory.mktemp("install")
    venv.create(folder / "venv", with_pip=True)
    here = Path(torch.__file__).parents[1]
    other = re.compile(r"_*(fastops|editable|distutils|pip|setuptools)")
    there = next((folder / "venv").glob("lib/python*/site-packages"))
    for path in here.iterdir():
        if not (there / path.name).exists() and not other.match(path.name):
            (there / path.name).symlink_to(path)
    ignore = shutil.ignore_patterns("build", "*.so", "_C.json", "*.egg-info", "__pycache__", ".git")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["isolated", "editable", "not-isolated"])
def test_iss02_pip_install(environment, way):
    options = {"isolated": [], "editable": ["-e"], "not-isolated": ["--no-build-isolation"]}[way]
    python = environment / "venv" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FASTOPS_JIT")}
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "fastops"], env=env, check=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "-v", *options, "."],
        cwd=environment / "source",
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert not re.search(r"Downloading .*torch-", done.stdout)
    assert re.search(r"\[\d+/\d+\] compile |no work to do", done.stdout)  # progress is visible
    code = "import fastops, json; print(json.dumps(fastops.build_info()))"
    done = subprocess.run([python, "-W", "error", "-c", code], cwd=environment, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["torch_built"] == torch.__version__
    assert Path(info["library"]).is_relative_to(environment / ("source" if way == "editable" else "venv"))
