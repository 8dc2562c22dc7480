"""What is compiled, with which tools and which flags.

Standard library only, and torch is never imported: its version file and headers tell everything, also from inside pip's
isolated build. setup.py builds ahead of time through it and jit.py at import, so that both give the same binary.

The public steps: `make_plan()` decides everything, `build()` compiles, `write_record()` tells the import what it meets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

MINIMUM_TORCH = (2, 11)
# One for each family of machines in use, cut to what the toolkit knows; the last one's PTX runs on all that follow.
DEFAULT_ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0", "12.0")
# Bytes that one compiler process may need; it bounds the number of them where memory is short.
BYTES_PER_JOB = 2 << 30
TOOLKIT_PARENT = Path("/usr/local")
# Each CPU kernel is compiled once for each, and the copy is chosen at run time. The position is FASTOPS_CAPABILITY.
CAPABILITIES = ["default", "avx2", "avx512"]
RECORD_NAME = "_C.json"
# Operators and kernels, of which no part knows Python; and the module, which is linked with it and lies beside it.
LIBRARY_NAME = {"win32": "fastops.dll", "darwin": "libfastops.dylib"}.get(sys.platform, "libfastops.so")
IMPORT_LIBRARY_NAME = "fastops.lib"  # what is linked with on Windows
MODULE_NAME = "_C" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")


class BuildError(RuntimeError):
    """One sentence that says what is missing and what to do."""


def source_root() -> Path | None:
    """The checkout that this file lies in, or None in an installed package."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "csrc" / "ops.cpp").is_file() else None


def package_version(root: Path) -> str:
    return re.findall(r'^version = "(.+)"', (root / "pyproject.toml").read_text("utf-8"), re.M)[0]


# torch ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Torch:
    root: Path  # the folder of the package
    version: str  # "2.13.0+cpu"
    cuda: str | None  # "13.0"

    @property
    def include(self) -> Path:
        return self.root / "include"


def target_paths() -> list[str]:
    """Where packages of the environment that is installed into lie.

    In pip's isolated build they are not on sys.path, but sysconfig still names them.
    """
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return list(dict.fromkeys(paths))


def find_torch() -> Torch | None:
    """The torch on sys.path, else that of the target environment; None if there is none, or only one that is too old."""
    for find in (
        lambda: importlib.util.find_spec("torch"),
        lambda: importlib.machinery.PathFinder.find_spec("torch", target_paths()),
    ):
        spec = find()
        if spec is None or not spec.origin:
            continue
        root = Path(spec.origin).parent
        facts = runpy.run_path(str(root / "version.py"))
        torch = Torch(root, str(facts["__version__"]), facts.get("cuda"))
        if tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2]) >= MINIMUM_TORCH:
            return torch
    return None


def pip_limit() -> str:
    """",<=2.14.1" for the torch that pip is about to install, since fastops depends on it.

    pip keeps to the user's constraints there, but not when it fills the isolated build; asked, it tells.
    """
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which hides pip itself
    try:
        done = subprocess.run(
            [*pip, "--report", "-", f"torch>={'.'.join(map(str, MINIMUM_TORCH))}"], env=env, capture_output=True, text=True
        )
        return ",<=" + json.loads(done.stdout)["install"][0]["metadata"]["version"].split("+")[0]
    except (OSError, ValueError, KeyError, IndexError):
        return ""


def torch_requirements() -> list[str]:
    """What the build needs beside the static requirements: nothing if the target environment has a torch."""
    if find_torch() is not None:
        return []
    if "PIP_BUILD_TRACKER" in os.environ:
        return [f"torch>={'.'.join(map(str, MINIMUM_TORCH))}{pip_limit()}"]
    raise BuildError(
        "fastops must be compiled against the torch that it will run with, which this isolated build cannot see; install "
        "torch first and pass --no-build-isolation (uv pip install --no-build-isolation ., python -m build --no-isolation)"
    )


# Tools ---------------------------------------------------------------------------------------------------------------

AHEAD_OF_TIME = "to build ahead of time instead: pip install . in the source folder"


def find_ninja() -> str:
    found = shutil.which("ninja")
    if found is None and (spec := importlib.util.find_spec("ninja")) is not None and spec.origin:
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
    if found is None:
        raise BuildError(
            f"ninja must be there to compile fastops, but it is neither on PATH ({os.environ.get('PATH', '')}) nor a Python "
            f"package of {sys.executable}; pip install ninja; {AHEAD_OF_TIME}"
        )
    return found


def find_compiler() -> list[str]:
    """The C++ compiler as a command: $CXX, or the first of the usual names on PATH."""
    if command := shlex.split(os.environ.get("CXX", "")):
        names = [command[0]]
    else:
        names = ["cl"] if os.name == "nt" else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return [found, *command[1:]]
    raise BuildError(
        f"a C++ compiler must be there to compile fastops, but {' or '.join(names)} is not on PATH "
        f"({os.environ.get('PATH', '')}); install one or set CXX; {AHEAD_OF_TIME}"
    )


def output_of(*command: str) -> str:
    """stdout and stderr of a command; empty if it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


# CUDA ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toolkit:
    home: Path
    nvcc: Path
    version: str  # "13.0"

    def __str__(self) -> str:
        return f"CUDA {self.version} at {self.home}"


def toolkit_of(nvcc: Path) -> Toolkit | None:
    """The toolkit that an nvcc belongs to, asked of nvcc itself: the one on PATH may be a script that calls it."""
    version = re.search(r"release (\d+\.\d+)", output_of(str(nvcc), "--version"))
    if version is None:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", output_of(str(nvcc), "--dryrun", "x.cu"), re.M)
    home = Path(top[1].strip()) if top else nvcc.resolve().parent.parent
    real = home.resolve() / "bin" / nvcc.name
    return Toolkit(home.resolve(), real if real.is_file() else nvcc, version[1])


def find_toolkits(torch_cuda: str) -> list[Toolkit]:
    """CUDA_HOME alone if it is set; else nvcc on PATH, then the usual folders."""
    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        candidates = [Path(home) / "bin" / name]
    else:
        candidates = [Path(found)] if (found := shutil.which("nvcc")) else []
        for folder in (f"cuda-{torch_cuda}", f"cuda-{torch_cuda.split('.')[0]}", "cuda"):
            candidates.append(TOOLKIT_PARENT / folder / "bin" / name)
    toolkits = [toolkit_of(nvcc) for nvcc in candidates if nvcc.is_file()]
    return list(dict.fromkeys(toolkit for toolkit in toolkits if toolkit))


def choose_toolkit(torch: Torch) -> tuple[Toolkit | None, str]:
    """The toolkit to use, and why none is used or which ones were passed over. FASTOPS_CUDA=0|1 decides, where set."""
    wanted = os.environ.get("FASTOPS_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"FASTOPS_CUDA must be 0 or 1, but got {wanted}")
    if wanted == "0":
        return None, "FASTOPS_CUDA=0 was set"
    toolkit = None
    if torch.cuda is None:
        reason = f"torch {torch.version} is built without CUDA; install a CUDA build of torch"
    else:
        major = torch.cuda.split(".")[0]
        toolkits = find_toolkits(torch.cuda)
        toolkit = next((each for each in toolkits if each.version.split(".")[0] == major), None)
        passed_over = ", ".join(str(each) for each in toolkits if each.version.split(".")[0] != major)
        if toolkit is not None:
            return toolkit, f"passed over {passed_over}; CUDA_HOME chooses another" if passed_over else ""
        if passed_over:
            reason = f"torch is built for CUDA {torch.cuda}, but the toolkit found is {passed_over}"
        elif home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
            reason = f"torch is built for CUDA {torch.cuda}, but CUDA_HOME={home} holds no bin/nvcc"
        else:
            reason = f"torch is built for CUDA {torch.cuda}, but no nvcc is on PATH or in {TOOLKIT_PARENT / 'cuda'}"
        reason += f"; point CUDA_HOME to a toolkit of CUDA {major}"
    if wanted == "1":
        raise BuildError(f"FASTOPS_CUDA=1 asks for CUDA, but {reason}")
    return None, reason


def visible_architectures() -> list[str]:
    """Compute capabilities of the GPUs of this machine, ascending."""
    if shutil.which("nvidia-smi") is None:
        return []
    lines = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    found = {line for line in lines if re.fullmatch(r"\d+\.\d", line)}
    return sorted(found, key=lambda text: tuple(map(int, text.split("."))))


def choose_architectures(toolkit: Toolkit) -> list[str]:
    """TORCH_CUDA_ARCH_LIST as it stands; else the GPUs of this machine; else the default list. The last two end in PTX."""
    numbers = re.findall(r"^sm_(\d+)(\d)$", output_of(str(toolkit.nvcc), "--list-gpu-code"), re.M)
    known = {f"{major}.{minor}" for major, minor in numbers}
    wanted = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ;,"))
    if wanted == [""]:
        chosen = [arch for arch in visible_architectures() or DEFAULT_ARCHITECTURES if arch in known]
        chosen = chosen or [arch for arch in DEFAULT_ARCHITECTURES if arch in known]
        if not chosen:
            raise BuildError(f"{toolkit} knows none of the architectures {', '.join(DEFAULT_ARCHITECTURES)}; update it")
        return [*chosen[:-1], chosen[-1] + "+PTX"]
    for arch in wanted:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise BuildError(f"TORCH_CUDA_ARCH_LIST must read like 8.0;9.0+PTX, but got {arch}")
        if re.findall(r"\d+\.\d", arch)[0] not in known:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {arch}, but {toolkit} knows {', '.join(sorted(known, key=float))} only"
            )
    return wanted


def architecture_flags(architectures: list[str]) -> list[str]:
    flags = []
    for arch in architectures:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


# The plan ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plan:
    """Everything that decides what the binary will be."""

    root: Path
    torch: Torch
    compiler: list[str]
    compiler_version: str
    toolkit: Toolkit | None
    cuda_note: str  # why CUDA is left out, or which toolkits were passed over
    architectures: list[str]
    kernel_flags: list[str]
    host_flags: list[str]
    module_flags: list[str]
    nvcc_flags: list[str]
    link_flags: list[str]
    module_link_flags: list[str]
    capabilities: list[str]  # instruction sets that the CPU kernels are compiled for

    @property
    def msvc(self) -> bool:
        return is_msvc(self.compiler)

    def facts(self) -> dict[str, Any]:
        """What the binary and the record beside it tell."""
        return {
            "version": package_version(self.root),
            "torch_built": self.torch.version,
            "torch_cuda": self.torch.cuda,
            "cxx11_abi": True,  # the only one since torch 2.7
            "python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
            "compiler": self.compiler_version,
            "cuda": self.toolkit is not None,
            "cuda_reason": "" if self.toolkit else self.cuda_note,
            "cuda_version": self.toolkit.version if self.toolkit else None,
            "architectures": self.architectures,
        }

    def key(self) -> str:
        """Names a folder of objects: what has another key never shares them. Sources are left to ninja."""
        parts = [
            self.facts(),
            str(self.root),
            self.compiler,
            str(self.toolkit),
            self.kernel_flags,
            self.host_flags,
            self.nvcc_flags,
            self.link_flags,
            self.module_link_flags,
            os.environ.get("NVCC_PREPEND_FLAGS"),
            os.environ.get("NVCC_APPEND_FLAGS"),
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        return f"torch-{self.torch.version}-{self.facts()['python']}-{digest}"

    def summary(self) -> list[str]:
        lines = [f"fastops: torch {self.torch.version} at {self.torch.root}, {self.compiler_version}"]
        if self.toolkit is None:
            lines.append(f"fastops: CUDA is left out: {self.cuda_note}")
        else:
            lines.append(f"fastops: {self.toolkit} for {', '.join(self.architectures)} {self.cuda_note}".rstrip())
        return lines


def is_msvc(compiler: list[str]) -> bool:
    return Path(compiler[0]).stem.lower() == "cl"


def has_openmp(compiler: list[str]) -> bool:
    """GCC has it always, clang only where its runtime library is installed."""
    if "clang" not in output_of(*compiler, "--version"):
        return True
    probe = [*compiler, "-fopenmp", "-x", "c++", "-", "-shared", "-fPIC", "-o", os.devnull]
    return subprocess.run(probe, input="#include <omp.h>\n", text=True, capture_output=True).returncode == 0


def pybind11_include(torch: Torch) -> str:
    """pybind11's headers; the copy that torch brings where the package is not installed."""
    try:
        import pybind11
    except ImportError:
        return str(torch.include)
    return pybind11.get_include()


def processor_capability() -> str | None:
    """The best instruction set of this processor, lowered by FASTOPS_CPU_CAPABILITY; None if it cannot be told."""
    try:
        flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)[0].split())
    except (OSError, IndexError):
        return None
    best = 0
    if flags >= {"avx2", "fma", "f16c", "bmi1", "bmi2"}:
        best = 2 if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"} else 1
    wanted = os.environ.get("FASTOPS_CPU_CAPABILITY")
    return CAPABILITIES[min(best, CAPABILITIES.index(wanted)) if wanted in CAPABILITIES else best]


def make_plan(root: Path, *, this_processor: bool = False) -> Plan:
    """Decides. `this_processor`: compile the CPU kernels for its instruction set only, a third of the work."""
    torch = find_torch()
    if torch is None:
        raise BuildError(
            f"torch {'.'.join(map(str, MINIMUM_TORCH))} or newer must be there to compile fastops, but {sys.executable} has "
            f"none; install torch first, or let pip bring it by leaving out --no-build-isolation"
        )
    compiler = find_compiler()
    toolkit, cuda_note = choose_toolkit(torch)
    architectures = choose_architectures(toolkit) if toolkit else []
    sources = [str(root / "csrc")]
    torch_includes = [str(torch.include), str(torch.include / "torch" / "csrc" / "api" / "include")]
    if toolkit:
        torch_includes.append(str(toolkit.home / "include"))
    python_include = sysconfig.get_path("include")
    if is_msvc(compiler):
        flags = ["/nologo", "/O2", "/EHsc", "/MD", "/permissive-", "/Zc:__cplusplus", "/fp:precise", "/bigobj"]
        kernel_flags = [*flags, "/std:c++20", *(f"/I{path}" for path in sources)]
        host_flags = [*flags, "/std:c++20", "/openmp", *(f"/I{path}" for path in [*sources, *torch_includes])]
        module_flags = [*host_flags, f"/I{pybind11_include(torch)}", f"/I{python_include}"]
        torch_link = ["/nologo", "/dll", f"/LIBPATH:{torch.root / 'lib'}", "c10.lib", "torch_cpu.lib", "torch.lib"]
        link_flags = [*torch_link, f"/implib:{IMPORT_LIBRARY_NAME}"]
        if toolkit:
            link_flags += [f"/LIBPATH:{toolkit.home / 'lib' / 'x64'}", "c10_cuda.lib", "torch_cuda.lib", "cudart.lib"]
        module_link_flags = [*torch_link, f"/LIBPATH:{Path(sys.base_prefix) / 'libs'}", "torch_python.lib"]
        nvcc_host_flags = ["-Xcompiler=/MD,/EHsc,/Zc:__cplusplus"]
    else:
        # No flag here names a processor: capability.h opens target regions inside the files. Products and sums stay
        # apart (fp-contract), so that every copy of a kernel gives the same bits.
        flags = ["-g0", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        # The inner loops are written in vectors; -O3 would double the time to compile and gain nothing measurable. GCC
        # leaves the plain loops of move.cpp alone at -O2, unless told that trip counts may be worth a check.
        gcc = "Free Software Foundation" in output_of(*compiler, "--version")
        kernel_flags = ["-O2", *(["-fvect-cost-model=dynamic"] if gcc else []), "-std=c++20", *flags]
        kernel_flags += [*(f"-I{path}" for path in sources), *extra]
        host_flags = ["-O2", "-std=c++20", *flags, f"-I{sources[0]}", *(f"-isystem{path}" for path in torch_includes)]
        if sys.platform == "linux":
            host_flags += ["-D_GLIBCXX_USE_CXX11_ABI=1"]
            config = torch.include / "ATen" / "Config.h"
            if "#define AT_PARALLEL_OPENMP 1" in config.read_text("utf-8") and has_openmp(compiler):
                host_flags += ["-fopenmp"]  # without it at::parallel_for runs on one thread
        host_flags += extra
        module_flags = [f"-isystem{pybind11_include(torch)}", f"-isystem{python_include}", *host_flags, "-O1"]
        # Each is found by its bare name in the folder of what wants it; torch's own libraries are loaded by then.
        if sys.platform == "darwin":
            library = ["-dynamiclib", "-install_name", f"@rpath/{LIBRARY_NAME}"]
            module = ["-bundle", "-undefined", "dynamic_lookup", "-Wl,-rpath,@loader_path"]
        else:
            library, module = ["-shared", f"-Wl,-soname,{LIBRARY_NAME}"], ["-shared", "-Wl,-rpath,$ORIGIN"]
        torch_link = [f"-L{torch.root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        link_flags, module_link_flags = [*library, *torch_link], [*module, *torch_link, "-ltorch_python"]
        if "-fopenmp" in host_flags:
            link_flags.insert(0, "-fopenmp")
        if toolkit:
            folder = next((each for each in ("lib64", "lib") if (toolkit.home / each).is_dir()), "lib64")
            link_flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{toolkit.home / folder}", "-lcudart"]
        for each in (link_flags, module_link_flags):
            each += shlex.split(os.environ.get("LDFLAGS", ""))
        nvcc_host_flags = ["-Xcompiler=-fPIC,-fvisibility=hidden"]
        if os.environ.get("CXX") and len(compiler) == 1:
            nvcc_host_flags.append(f"-ccbin={compiler[0]}")
    x86 = platform.machine().lower() in ("x86_64", "amd64") and not is_msvc(compiler)
    capabilities = CAPABILITIES if x86 else CAPABILITIES[:1]
    if x86 and this_processor and (only := processor_capability()) is not None:
        capabilities = [only]
        for each in (kernel_flags, host_flags):
            each.append(f"-DFASTOPS_ONLY_CAPABILITY={CAPABILITIES.index(only)}")
    nvcc_flags = []
    if toolkit:
        nvcc_flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", *nvcc_host_flags, *(f"-I{path}" for path in sources)]
        nvcc_flags += architecture_flags(architectures)
    version = output_of(*compiler, "--version").splitlines() if not is_msvc(compiler) else []
    return Plan(
        root=root,
        torch=torch,
        compiler=compiler,
        compiler_version=version[0].strip() if version else Path(compiler[0]).name,
        toolkit=toolkit,
        cuda_note=cuda_note,
        architectures=architectures,
        kernel_flags=kernel_flags,
        host_flags=host_flags,
        module_flags=module_flags,
        nvcc_flags=nvcc_flags,
        link_flags=link_flags,
        module_link_flags=module_link_flags,
        capabilities=capabilities,
    )


# Generated files -----------------------------------------------------------------------------------------------------


def c_string(text: str | None) -> str:
    return json.dumps(text or "", ensure_ascii=True)


def facts_header(plan: Plan) -> str:
    facts = plan.facts()
    lines = ["// Written by python/fastops/_build.py.", "#pragma once"]
    if facts["cuda"]:
        lines.append("#define FASTOPS_WITH_CUDA 1")
    for name, value in {
        "VERSION": facts["version"],
        "TORCH_VERSION": facts["torch_built"],
        "TORCH_CUDA": facts["torch_cuda"],
        "PYTHON": facts["python"],
        "COMPILER": facts["compiler"],
        "CUDA_REASON": facts["cuda_reason"],
        "CUDA_VERSION": facts["cuda_version"],
        "CUDA_ARCHITECTURES": ", ".join(facts["architectures"]),
    }.items():
        lines.append(f"#define FASTOPS_{name} {c_string(value)}")
    lines.append(f"#define FASTOPS_CXX11_ABI {int(facts['cxx11_abi'])}")
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Unit:
    """A translation unit: its kind of flags, the file that is compiled, the name of the object and what a person reads."""

    kind: str  # kernel, host, module or cuda
    source: Path
    object: str
    label: str


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time stamp, by which ninja decides, where nothing changed."""
    if not path.is_file() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def generate(plan: Plan, folder: Path) -> list[Unit]:
    """Writes the generated sources and returns all translation units, those that take longest first."""
    csrc, generated = plan.root / "csrc", folder / "generated"
    write_if_changed(generated / "build_facts.h", facts_header(plan))
    # One unit for all that includes ATen: its headers cost far more than our code.
    host = ["build_facts.h", "ops.cpp", *(f"host/{path.name}" for path in sorted((csrc / "host").glob("*.cpp")))]
    write_if_changed(generated / "host.cpp", "".join(f'#include "{name}"\n' for name in host))
    units = [Unit("host", generated / "host.cpp", "host", "ops.cpp host/*.cpp")]
    if plan.toolkit:
        for path in sorted((csrc / "cuda").glob("*.cu")):
            units.append(Unit("cuda", path, f"cuda_{path.stem}", f"cuda/{path.name}"))
    for path in sorted((csrc / "cpu").glob("*.cpp")):
        if path.stem == "capability":
            units.append(Unit("kernel", path, "cpu_capability", "cpu/capability.cpp"))
            continue
        parts = re.search(r"FASTOPS_PARTS (\d+)", path.read_text(encoding="utf-8"))
        for name, part in itertools.product(plan.capabilities, range(int(parts[1]) if parts else 1)):
            level = CAPABILITIES.index(name)
            text = f'#define FASTOPS_CAPABILITY {level}\n#define FASTOPS_PART {part}\n#include "cpu/{path.name}"\n'
            if level:  # clang wants the region of capability.h closed
                text += "#if defined(__clang__)\n#pragma clang attribute pop\n#endif\n"
            stem = f"cpu_{path.stem}_{name}" + (f"_{part}" if parts else "")
            source = generated / f"{stem}.cpp"
            write_if_changed(source, text)
            label = f"cpu/{path.name} ({name}{f', part {part + 1} of {parts[1]}' if parts else ''})"
            units.append(Unit("kernel", source, stem, label))
    write_if_changed(generated / "python_module.cpp", '#include "module.cpp"\n#include "python.cpp"\n')
    units.append(Unit("module", generated / "python_module.cpp", "module", "module.cpp python.cpp"))
    return units


def ninja_path(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def command_line(words: list[str]) -> str:
    line = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return line.replace("$", "$$")


def ninja_file(plan: Plan, folder: Path, units: list[Unit]) -> str:
    suffix = ".obj" if plan.msvc else ".o"
    flags = {"kernel": plan.kernel_flags, "host": plan.host_flags, "module": plan.module_flags, "cuda": plan.nvcc_flags}
    include = f"{'/I' if plan.msvc else '-I'}{folder / 'generated'}"
    lines = ["ninja_required_version = 1.5"]
    for kind, words in flags.items():
        if kind == "cuda":
            if plan.toolkit is None:
                continue
            command = command_line([str(plan.toolkit.nvcc), "-DFASTOPS_WITH_CUDA=1", *words, f"-I{folder / 'generated'}"])
            tail, deps = "-MMD -MF $out.d -c $in -o $out", ["depfile = $out.d", "deps = gcc"]
        elif plan.msvc:
            command = command_line([*plan.compiler, *words, include])
            tail, deps = "/showIncludes /c $in /Fo$out", ["deps = msvc"]
        else:
            command = command_line([*plan.compiler, *words, include])
            tail, deps = "-MMD -MF $out.d -c $in -o $out", ["depfile = $out.d", "deps = gcc"]
        lines += [f"rule {kind}", f"  command = {command} {tail}", *(f"  {line}" for line in deps)]
        lines.append("  description = compile $label")
    for rule, words in (("link", plan.link_flags), ("link_module", plan.module_link_flags)):
        link = command_line(words)
        if plan.msvc:
            lines += [f"rule {rule}", f"  command = link $in {link} /out:$out"]
        else:
            lines += [f"rule {rule}", f"  command = {command_line(plan.compiler)} $in -o $out {link}"]
        lines.append("  description = link $out")
    of_library: list[str] = []
    of_module: list[str] = []
    for unit in units:
        name = f"{unit.object}{suffix}"
        (of_module if unit.kind == "module" else of_library).append(name)
        lines += [f"build {name}: {unit.kind} {ninja_path(unit.source)}", f"  label = {unit.label}"]
    linked_with, beside = (IMPORT_LIBRARY_NAME, f" | {IMPORT_LIBRARY_NAME}") if plan.msvc else (LIBRARY_NAME, "")
    lines += [f"build {LIBRARY_NAME}{beside}: link {' '.join(of_library)}"]
    lines += [f"build {MODULE_NAME}: link_module {' '.join(of_module)} {linked_with}", f"default {MODULE_NAME}"]
    return "\n".join(lines) + "\n"


# Building ------------------------------------------------------------------------------------------------------------


def number_of_jobs() -> int:
    """MAX_JOBS; else as many compilers as there are processors and memory for."""
    if wanted := os.environ.get("MAX_JOBS"):
        if not wanted.isdigit() or int(wanted) < 1:
            raise BuildError(f"MAX_JOBS must be a positive number, but got {wanted}")
        return int(wanted)
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return jobs
    return max(1, min(jobs, memory // BYTES_PER_JOB))


def build(plan: Plan, folder: Path, *, verbose: bool) -> Path:
    """Compiles what is out of date in `folder` and returns the module in it, beside which the library lies.

    `verbose` lets the tools print. Otherwise their output goes to a file, which the error names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ninja = find_ninja()
    write_if_changed(folder / "build.ninja", ninja_file(plan, folder.resolve(), generate(plan, folder.resolve())))
    command = [ninja, "-C", str(folder), "-j", str(number_of_jobs())]
    if verbose:
        if subprocess.run(command).returncode != 0:
            raise BuildError("fastops could not be compiled; the compiler's own words stand above")
    else:
        log = folder / "build.log"
        with log.open("w", encoding="utf-8") as stream:
            failed = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode != 0
        if failed:
            lines = log.read_text("utf-8", errors="replace").splitlines()
            first = next((line.strip() for line in lines if re.search(r"\berror\b|not found", line)), lines[-1])
            raise BuildError(f"fastops could not be compiled: {first} (all that was printed: {log})")
    return folder / MODULE_NAME


def write_record(plan: Plan, package: Path) -> None:
    """Writes beside the library what it was built for, so that this can be read when the library cannot be loaded."""
    facts = {**plan.facts(), "source": str(plan.root)}
    (package / RECORD_NAME).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
