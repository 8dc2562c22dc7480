"""What several test modules say."""

import doctest
import re

import torch


def first(results):
    """The result that gradients belong to."""
    return results[0] if isinstance(results, tuple) else results


def further(op, num_rows, device="cpu"):
    """What an operator takes between the segments and dim."""
    if op.takes_values:
        return (num_rows,)
    return tuple(torch.tensor(x, dtype=torch.float64, device=device) if isinstance(x, float) else x for x in op.arguments)


def without_nan(op):
    """Options for opcheck, to which a NaN differs from itself."""
    return {"fill_value": 0} if op.empty.startswith("nan") else {}


def close(result, expected, rtol=2e-6, atol=0.0):
    """Equal to numbers that are written out, NaN to NaN."""
    expected = torch.as_tensor(expected, dtype=result.dtype)
    torch.testing.assert_close(result.detach().cpu(), expected, rtol=rtol, atol=atol, equal_nan=True)


def same(result, expected):
    close(result, expected, rtol=0)


def gradient(function, data, segments, weights=None, **options):
    """That of the sum of the results, or of their products with the weights."""
    leaf = data.detach().clone().requires_grad_()
    result = first(function(leaf, segments, **options))
    result.backward(torch.ones_like(result) if weights is None else weights)
    assert leaf.grad.shape == data.shape
    return leaf.grad


def blocks_of(path):
    """All blocks of a page: what kind they say they are, and their code."""
    text = path.read_text()
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    assert text.count("```") == 2 * len(blocks)
    return blocks


def kinds_of(path):
    return {kind for kind, _ in blocks_of(path)}


def run_page(path, *kinds, clear_globs=True):
    """Runs the blocks of a page of these kinds as one session, from top to bottom, and returns how many examples there were."""
    blocks = blocks_of(path)
    assert all(code.startswith(">>> ") for _, code in blocks), "what has no prompt would not be run"
    session = "\n".join(code for kind, code in blocks if kind in kinds)
    parsed = doctest.DocTestParser().get_doctest(session, {}, path.name, str(path), 0)
    said = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(parsed, out=said.append, clear_globs=clear_globs)
    assert runner.failures == 0, "".join(said)
    return runner.tries
