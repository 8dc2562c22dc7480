"""Loads the compiled part, or says in one sentence why it cannot be loaded and which command helps."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # before _C: it brings the libraries that _C is linked with

from . import _build

_PACKAGE = Path(__file__).resolve().parent


def _flavour(version: str, cuda: str | None) -> str:
    return f"torch {version} ({f'CUDA {cuda}' if cuda else 'without CUDA'})"


def rebuild_command(record: dict[str, Any] | None = None, *, cuda: bool = False) -> str:
    """The command that compiles fastops for the torch of this environment; `cuda` insists on CUDA kernels."""
    root = _build.source_root() or (record or _record() or {}).get("source")
    if root is None or not Path(root).is_dir():
        source = "<the source folder of fastops>"
    else:
        source = shlex.quote(str(root))
    editable = "-e " if _build.source_root() else ""
    prefix = "FASTOPS_CUDA=1 " if cuda else ""
    return f"{prefix}{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps {editable}{source}"


def _record() -> dict[str, Any] | None:
    try:
        return json.loads((_PACKAGE / _build.RECORD_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _mismatch(record: dict[str, Any]) -> str | None:
    """What differs between the torch that was built for and the one that runs, as a sentence."""
    abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
    built = (record["torch_built"].split("+")[0], record["torch_cuda"] or None, bool(record["cxx11_abi"]))
    running = (torch.__version__.split("+")[0], torch.version.cuda, abi)
    if built == running:
        return None
    note = "" if built[2] == running[2] else "; the C++ ABI differs too"
    return (
        f"fastops was built for {_flavour(record['torch_built'], record['torch_cuda'])}, but "
        f"{_flavour(torch.__version__, torch.version.cuda)} is running{note}"
    )


def _load() -> tuple[ModuleType, bool]:
    """The module, and whether it was compiled just now."""
    if os.environ.get("FASTOPS_JIT") == "1":
        from . import jit

        return jit.load(), True
    record = _record()
    compiled = _PACKAGE / _build.MODULE_NAME
    missing = next((path for path in (compiled, _PACKAGE / _build.LIBRARY_NAME) if not path.is_file()), None)
    if missing is not None:
        others = sorted(path.name for pattern in ("_C.*.so", "_C.*.pyd") for path in _PACKAGE.glob(pattern))
        found = f" (there is {', '.join(others)}, for another Python)" if others else ""
        hint = ", or set FASTOPS_JIT=1 to compile at import" if _build.source_root() else ""
        raise ImportError(
            f"fastops: the compiled part {missing.name} is missing from {_PACKAGE}{found}; build it with: "
            f"{rebuild_command(record)}{hint}"
        )
    if record is not None and (difference := _mismatch(record)):
        raise ImportError(f"{difference}; rebuild it with: {rebuild_command(record)}")
    try:
        module = importlib.import_module("fastops._C")
    except ImportError as error:
        built = _flavour(record["torch_built"], record["torch_cuda"]) if record else "an unknown torch (no record)"
        raise ImportError(
            f"fastops: {compiled} could not be loaded ({error}); it was built for {built}, and "
            f"{_flavour(torch.__version__, torch.version.cuda)} is running; rebuild it with: {rebuild_command(record)}"
        ) from None
    if record is None and (difference := _mismatch(module.build_info())):
        raise ImportError(f"{difference}; rebuild it with: {rebuild_command()}")
    return module, False


_C: Any
_C, _built_at_import = _load()
_facts = _C.build_info()


def build_info() -> dict[str, Any]:
    """What this fastops was built for and with, and what it runs with.

    `cuda` says whether the CUDA kernels are in; where they are not, `cuda_reason` says why. `architectures` are the
    compute capabilities they were compiled for, "+PTX" marking those that newer devices can use too. `cpu_capability`
    is the instruction set in use; the environment variable FASTOPS_CPU_CAPABILITY (default, avx2, avx512) lowers it.
    """
    architectures = _facts["architectures"]
    return {
        "version": _facts["version"],
        "torch_built": _facts["torch_built"],
        "torch_running": torch.__version__,
        "python": _facts["python"],
        "compiler": _facts["compiler"],
        "cuda": _facts["cuda"],
        "cuda_reason": _facts["cuda_reason"],
        "cuda_version": _facts["cuda_version"] or None,
        "architectures": architectures.split(", ") if architectures else [],
        "cpu_capability": _C.cpu_capability(),
        "cpu_capability_note": _C.cpu_capability_note(),
        "jit": _built_at_import,
        "library": library_path(),
    }


def library_path() -> str:
    """The shared library with all operators and kernels. It needs torch's C++ libraries, but no Python.

    A C++ program links it or opens it (`dlopen`) and then finds `fastops::segment_sum` and the others in PyTorch's
    dispatcher, or loads a TorchScript file that calls them. `torch.ops.load_library(path)` is enough for
    `torch.ops.fastops` in Python, without the functions of this package. A process loads one copy of it: torch ends the process
    that registers the operators of another.

    Example:
        >>> import os, fastops
        >>> os.path.isfile(fastops.library_path())
        True
    """
    return str(Path(_C.__file__).with_name(_build.LIBRARY_NAME))


if (_used := _C.library_in_use()) and not os.path.samefile(_used, library_path()):
    raise ImportError(
        f"fastops: {_C.__file__} needs the operators of {_build.LIBRARY_NAME} beside it, but those of {_used} are loaded already; "
        "import fastops first, or load the file that fastops.library_path() names"
    )
