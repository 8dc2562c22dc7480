"""Builds fastops._C by the rules of python/fastops/_build.py. All else is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python" / "fastops"))  # as a lone module: the package needs what is built here
import _build  # noqa: E402

del sys.path[0]


class BuildWithNinja(build_ext):
    def build_extension(self, ext):
        try:
            self.plan = _build.make_plan(ROOT)
            print(*self.plan.summary(), sep="\n", flush=True)
            # Not build_temp, which is new for each editable install: what is up to date is not compiled again.
            module = _build.build(self.plan, ROOT / "build" / self.plan.key(), verbose=True)
        except _build.BuildError as error:
            raise SystemExit(f"error: {error}") from None
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, target)
        self.library = module.with_name(_build.LIBRARY_NAME)
        self.put_beside(target.parent)

    def put_beside(self, package):
        shutil.copyfile(self.library, package / _build.LIBRARY_NAME)
        _build.write_record(self.plan, package)

    def copy_extensions_to_source(self):  # of an editable install, whose package is the source folder
        super().copy_extensions_to_source()
        self.put_beside(ROOT / "python" / "fastops")


setup(ext_modules=[Extension("fastops._C", sources=[])], cmdclass={"build_ext": BuildWithNinja})
