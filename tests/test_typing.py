"""The annotations, as a type checker reads them."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fastops

USAGE = Path(__file__).parent / "typing" / "usage.py"
PACKAGES = Path(fastops.__file__).parents[1]


def test_what_is_typed_runs():
    runpy.run_path(str(USAGE))


@pytest.mark.slow
@pytest.mark.parametrize("what", (["-p", "fastops"], ["--follow-imports", "silent", USAGE]), ids=("package", "usage"))
def test_annotations_under_mypy_strict(what, tmp_path):
    pytest.importorskip("mypy")
    # A checkout is put on mypy's path; an installed package is found, as it has the file py.typed.
    path = {} if PACKAGES.name == "site-packages" else {"MYPYPATH": str(PACKAGES)}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", tmp_path, *what]
    if what[0] == "-p":  # what torch itself leaves without annotations, or exports silently, is no matter of the package
        command += ["--allow-untyped-calls", "--no-warn-return-any", "--implicit-reexport"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **path})
    assert done.returncode == 0, done.stdout + done.stderr
