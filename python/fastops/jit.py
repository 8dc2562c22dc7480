"""The development build: compiles from the source tree at import and again what has changed.

`FASTOPS_JIT=1 python ...` does it on `import fastops`; from a checkout that is not installed, add its folder `python` to
PYTHONPATH. It needs ninja and a C++ compiler. To save time, the CPU kernels are compiled for the instruction set in use
only: that of this processor, or a lower one that FASTOPS_CPU_CAPABILITY names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Iterator

import torch  # before the library: it brings what that is linked with

from . import _build


def cache_folder() -> Path:
    """Holds one folder of objects for each combination of torch, Python, compiler, flags and source tree."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder) / "fastops"
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fastops"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. The operating system drops the lock with the process that holds it, so none goes stale."""
    with (folder / "lock").open("a+b") as stream:
        if sys.platform == "win32":
            import msvcrt

            while True:
                stream.seek(0)
                try:
                    msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    time.sleep(0.1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def load(verbose: bool = False) -> ModuleType:
    """Compiles what changed since the last time and returns the module `fastops._C`.

    Operators register once in a process: where a library is loaded already, what is compiled here serves the next process
    that sets FASTOPS_JIT=1, and the loaded module is returned.

    Raises ImportError, one sentence, if a tool is missing or the sources do not compile. `verbose` shows the commands' output.
    """
    try:
        root = _build.source_root()
        if root is None:
            raise _build.BuildError(
                f"the sources must be there to compile fastops, but {Path(__file__).parent} is not in a source tree; "
                "unset FASTOPS_JIT, or put the folder python of a checkout on PYTHONPATH"
            )
        plan = _build.make_plan(root, this_processor=True)
        if plan.torch.version != torch.__version__:
            raise _build.BuildError(f"torch {torch.__version__} is running, but {plan.torch.root} holds {plan.torch.version}")
        folder = cache_folder() / plan.key()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if verbose or not (folder / _build.MODULE_NAME).is_file():
                print(*plan.summary(), f"fastops: compiling in {folder}", sep="\n", file=sys.stderr, flush=True)
            compiled = _build.build(plan, folder, verbose=verbose)
            _build.write_record(plan, folder)
            if (loaded := sys.modules.get("fastops._C")) is not None:
                return loaded
            spec = importlib.util.spec_from_file_location("fastops._C", compiled)
            assert spec is not None and spec.loader is not None  # as for all files with the suffix of a module
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise _build.BuildError(
                    f"{compiled}, compiled for torch {torch.__version__}, could not be loaded ({error}); is a source missing?"
                ) from None
            sys.modules["fastops._C"] = module
            return module
    except _build.BuildError as error:
        raise ImportError(f"fastops.jit: {error}") from None
