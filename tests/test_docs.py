"""Examples in docstrings run and print what they say; docstrings have the parts they should."""

import doctest
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import blocks_of, kinds_of, run_page

import fastops

MODULES = (
    "fastops",
    "fastops._collate",
    "fastops._offload",
    "fastops.move",
    "fastops.order",
    "fastops.placement",
    "fastops.reduce",
    "fastops.registry",
    "fastops.segments",
    "fastops.select",
    "fastops.testing",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    names = {"torch": torch, "np": np, **{key: getattr(fastops, key) for key in fastops.__all__}}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("op", fastops.registry.OPS, ids=lambda op: op.name)
def test_docstrings_have_their_parts(op):
    text = inspect.getdoc(getattr(fastops, op.name))
    assert text.splitlines()[0].endswith(".") and not text.splitlines()[1], "one line first"
    for part in ("Equivalent to:", "Args:", "Returns:", "Example:", "[S + 1]"):
        assert part in text, part
    for argument in list(inspect.signature(op.fn).parameters):
        assert f"{argument}:" in text, argument


def test_signatures():
    """data, segments, and nothing else by position."""
    for op in fastops.registry.OPS:
        kinds = [parameter.kind for parameter in inspect.signature(op.fn).parameters.values()]
        assert kinds[:2] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
        assert set(kinds[2:]) == {inspect.Parameter.KEYWORD_ONLY}
        reference = inspect.signature(op.reference).parameters
        assert list(inspect.signature(op.fn).parameters) == list(reference)


# docs/devices.md -----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[1] / "docs" / "devices.md"
EVERYWHERE, WITH_CUDA, WITH_TWO = "python", "python cuda", "python cuda:1"


def test_every_block_of_the_page_is_run():
    assert kinds_of(PAGE) == {EVERYWHERE, WITH_CUDA, WITH_TWO}
    assert all(code.startswith(">>> ") for _, code in blocks_of(PAGE)), "what has no prompt would not be run"


def test_devices_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_page(PAGE, EVERYWHERE) > 25


def test_devices(cuda):
    assert run_page(PAGE, EVERYWHERE, WITH_CUDA) > 35


def test_two_devices(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device; CUDASIM_DEVICES=2 makes two")
    assert run_page(PAGE, EVERYWHERE, WITH_CUDA, WITH_TWO) > 40


def test_the_readme_leads_there():
    assert "(docs/devices.md)" in (PAGE.parents[1] / "README.md").read_text()
