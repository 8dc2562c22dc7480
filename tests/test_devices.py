"""Devices that fastops has no kernels for, and tensors without data: shapes, dtypes and strides of every operation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastops import registry, testing

HERE = Path(__file__).parent


def test_a_device_that_comes_from_elsewhere():
    """`cases_of_device.py`, in another process: a backend can be named once, and for good."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "cases_of_device.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed, 1 skipped", run.stdout), run.stdout  # the mean of integers by integers


def test_where_the_reference_stands():
    """Under both keys of the device, for every operation."""
    for op in registry.OPS:
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastops::{op.name}", key)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastops::{op.name}", "SparseCPU")


@pytest.mark.parametrize("grouping", ("offsets", "unsorted32"))
@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_fake_tensors(op, grouping):
    for layout, dim in (("contiguous", 0), ("transposed", 0), ("dim1", 1)):
        sample = testing.make_sample(op, "canonical", 3, layout, grouping, torch.float32)
        real = op.fn(*sample.args, **sample.kwargs)
        with FakeTensorMode() as mode:
            fake = op.fn(mode.from_tensor(sample.args[0]), sample.args[1]._map(mode.from_tensor), **sample.kwargs)
        meta = op.fn(*(x.to("meta") for x in sample.args), **sample.kwargs)
        assert sample.kwargs.get("dim", 0) == dim
        for one, other, third in zip(*[r if isinstance(r, tuple) else (r,) for r in (real, fake, meta)]):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            assert (one.shape, one.dtype, one.stride()) == (third.shape, third.dtype, third.stride())
            assert other.device.type == "cpu" and third.is_meta
