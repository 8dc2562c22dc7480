"""Tells `torch.onnx.export` of the forms of our operators in `_onnx.py`, which are imported when it asks.

It takes decompositions from `torch._decomp.decomposition_table` and from nowhere else. That table is no place for the forms, since
others read it too: Inductor calls no operator that has an entry where the environment variable CI is set, and fake tensors of
unknown sizes take the shapes of results from it. So the table that the exporter makes for itself is added to.
"""

from __future__ import annotations

import functools
from typing import Any

try:
    from torch.onnx._internal.exporter import _decomp

    _make_table = _decomp.create_onnx_friendly_decomposition_table
except (ImportError, AttributeError):  # a PyTorch whose exporter works otherwise: it names the operators that it does not know
    pass
else:

    @functools.wraps(_make_table)
    def _make_table_with_forms(onnx_registered_ops: Any) -> Any:
        from . import _onnx

        table = _make_table(onnx_registered_ops)
        for overload, form in _onnx.table().items():
            if overload not in onnx_registered_ops:  # a translation that the caller brought goes first
                table[overload] = form
        return table

    _decomp.create_onnx_friendly_decomposition_table = _make_table_with_forms
