"""The build backend: setuptools', which is asked for torch where the environment that is installed into has none."""

import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).resolve().parent / "python" / "fastops"))
import _build  # noqa: E402

del sys.path[0]


def _torch():
    try:
        return _build.torch_requirements()
    except _build.BuildError as error:
        raise SystemExit(f"error: {error}") from None


def get_requires_for_build_wheel(config_settings=None):
    return _torch() + build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _torch() + build_meta.get_requires_for_build_editable(config_settings)
