"""Examples in docstrings run and print what they say; docstrings have the parts they should."""

import doctest
import importlib
import inspect

import numpy as np
import pytest
import torch

import fastops

MODULES = ("fastops", "fastops.move", "fastops.order", "fastops.reduce", "fastops.registry", "fastops.segments", "fastops.select", "fastops.testing")


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
