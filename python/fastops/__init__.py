"""Reductions, softmax, scans and sorting over groups of rows whose lengths differ, on the CPU and on CUDA.

>>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
>>> segments = Segments.from_offsets(torch.tensor([0, 3, 3, 7]))
>>> segment_sum(data, segments)
tensor([ 8.,  0., 17.])
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch  # noqa: F401  (first: the binary needs its libraries)

from . import _exporter, _native, _stand_in  # noqa: F401  (the first and the last tell the exporter and torch of what they look up)
from ._collate import Batch, collate
from ._native import build_info, library_path
from ._offload import offload
from .errors import DeviceMismatchError
from .move import segment_broadcast
from .normalise import segment_log_softmax, segment_logsumexp, segment_softmax, segment_std, segment_var
from .order import segment_argsort, segment_mode, segment_nunique, segment_sort
from .reduce import (
    segment_all,
    segment_amax,
    segment_amin,
    segment_any,
    segment_argmax,
    segment_argmin,
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_sum,
)
from .scan import segment_cummax, segment_cummin, segment_cumprod, segment_cumsum, segment_logcumsumexp
from .segments import Segments
from .select import segment_first, segment_last, segment_median, segment_quantile, segment_topk

__all__ = [
    "Batch",
    "DeviceMismatchError",
    "Segments",
    "build_info",
    "collate",
    "library_path",
    "offload",
    "segment_all",
    "segment_amax",
    "segment_amin",
    "segment_any",
    "segment_argmax",
    "segment_argmin",
    "segment_argsort",
    "segment_broadcast",
    "segment_cummax",
    "segment_cummin",
    "segment_cumprod",
    "segment_cumsum",
    "segment_first",
    "segment_last",
    "segment_log_softmax",
    "segment_logcumsumexp",
    "segment_logsumexp",
    "segment_max",
    "segment_mean",
    "segment_median",
    "segment_min",
    "segment_mode",
    "segment_nunique",
    "segment_prod",
    "segment_quantile",
    "segment_softmax",
    "segment_sort",
    "segment_std",
    "segment_sum",
    "segment_topk",
    "segment_var",
]

if TYPE_CHECKING:
    from . import jit, nn, placement, reference, registry, testing

_LAZY = ("jit", "nn", "placement", "reference", "registry", "testing")


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        return build_info()["version"]
    if name in _LAZY:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is offered: none of the modules that it is imported from."""
    return sorted({*__all__, *_LAZY, "__version__", *(name for name in globals() if name.startswith("__"))})
