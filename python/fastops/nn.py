"""Modules for models whose rows come in segments. `Segments` travel beside the data: `module(data, segments)`.

They hold parameters and options only, so one module serves any number of segments of any lengths, on any device.
`torch.jit.script` makes modules that take bare offsets, since TorchScript knows no `Segments`.

>>> pool = SegmentPool(["mean", "amax"])
>>> pool(torch.ones(7, 3), torch.tensor([0, 3, 3, 7])).shape
torch.Size([3, 6])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from . import _numpy, normalise, reduce
from .errors import kind, sentence
from .move import segment_broadcast
from .segments import Segments

__all__ = ["SegmentSoftmax", "SegmentPool", "SegmentAttentionPool", "SegmentNorm"]

_REDUCTIONS = {
    "sum": reduce.segment_sum,
    "mean": reduce.segment_mean,
    "prod": reduce.segment_prod,
    "amax": reduce.segment_amax,
    "amin": reduce.segment_amin,
    "var": normalise.segment_var,
    "std": normalise.segment_std,
    "logsumexp": normalise.segment_logsumexp,
}


if TYPE_CHECKING:
    Grouping = Union[Segments, Tensor]
else:
    Grouping = Tensor  # TorchScript reads the annotations


# What modules are made of, for Python and for TorchScript.


def _check_tensor(module: str, data: Any) -> None:
    """Modules are torch's: they take no arrays, as functions do."""
    if not isinstance(data, (Tensor, torch.fx.Proxy)):
        raise _numpy.no_tensor(module, "data", data, only_tensors=True)


def _mean(data: Tensor, segments: Grouping) -> Tensor:
    if not torch.jit.is_scripting():
        return reduce.segment_mean(data, segments)
    return torch.ops.fastops.segment_mean(data, segments, None, None)


def _variance(data: Tensor, segments: Grouping) -> Tensor:
    if not torch.jit.is_scripting():
        return normalise.segment_var(data, segments, correction=0)
    return torch.ops.fastops.segment_var(data, segments, None, None, 0, 0.0)


def _handed_down(values: Tensor, segments: Grouping, num_rows: int) -> Tensor:
    if not torch.jit.is_scripting():
        return segment_broadcast(values, segments, num_rows=num_rows)
    return torch.ops.fastops.segment_broadcast(values, segments, None, None, num_rows)


def _reduced(name: str, data: Tensor, segments: Grouping, fill_value: Optional[float]) -> Tensor:
    if not torch.jit.is_scripting():
        function = _REDUCTIONS[name]
        return function(data, segments) if fill_value is None else function(data, segments, fill_value=fill_value)
    fill = 0.0 if fill_value is None else fill_value
    if name == "sum":
        return torch.ops.fastops.segment_sum(data, segments, None, None, 0, None, fill)
    if name == "mean":
        return torch.ops.fastops.segment_mean(data, segments, None, None, 0, None, fill)
    if name == "prod":
        return torch.ops.fastops.segment_prod(data, segments, None, None, 0, None, 1.0 if fill_value is None else fill)
    if name == "amax":
        return torch.ops.fastops.segment_amax(data, segments, None, None, 0, fill)
    if name == "amin":
        return torch.ops.fastops.segment_amin(data, segments, None, None, 0, fill)
    if name == "var":
        return torch.ops.fastops.segment_var(data, segments, None, None, 0, 1.0, fill)
    if name == "std":
        return torch.ops.fastops.segment_std(data, segments, None, None, 0, 1.0, fill)
    return torch.ops.fastops.segment_logsumexp(data, segments, None, None, 0, fill_value)


class SegmentSoftmax(nn.Module):
    """Softmax within each segment, see `fastops.segment_softmax`.

    Args:
        dim: the dimension of the rows.

    Shape:
        data `[N, *]` (rows along `dim`) and `S` segments of `N` rows -> `[N, *]`.

    Example:
        >>> SegmentSoftmax()(torch.zeros(7), torch.tensor([0, 2, 3, 7]))
        tensor([0.5000, 0.5000, 1.0000, 0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, data: Tensor, segments: Grouping) -> Tensor:
        if not torch.jit.is_scripting():
            _check_tensor("SegmentSoftmax", data)
            return normalise.segment_softmax(data, segments, dim=self.dim)
        return torch.ops.fastops.segment_softmax(data, segments, None, None, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class SegmentPool(nn.Module):
    """Each segment becomes one row: a reduction of its rows, or several side by side.

    Args:
        reduce: `sum`, `mean`, `prod`, `amax`, `amin`, `var`, `std` or `logsumexp`, or a list of them, whose results are
            concatenated along the last dimension.
        fill_value: the result for a segment without rows; None for the default of each reduction.

    Shape:
        data `[N, *, D]` and `S` segments of `N` rows -> `[S, *, R * D]` for `R` reductions. With a list, data has at least
        two dimensions.

    Raises:
        ValueError: a reduction is not among those above, or the list is empty.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> SegmentPool(["sum", "amax"])(data[:, None], torch.tensor([0, 3, 3, 7]))
        tensor([[ 8.,  4.],
                [ 0.,  0.],
                [17.,  9.]])
    """

    def __init__(self, reduce: Union[str, Sequence[str]] = "sum", *, fill_value: Optional[float] = None) -> None:
        super().__init__()
        if not isinstance(reduce, (str, list, tuple)) or not all(isinstance(name, str) for name in reduce):
            raise TypeError(sentence("SegmentPool", "reduce", "be a string or a list of strings", kind(reduce)))
        self.reduce = reduce if isinstance(reduce, str) else tuple(reduce)
        self.names: List[str] = [reduce] if isinstance(reduce, str) else list(reduce)
        for name in self.names:
            if name not in _REDUCTIONS:
                raise ValueError(sentence("SegmentPool", "reduce", f"be among {', '.join(_REDUCTIONS)}", name))
        if not self.names:
            raise ValueError(sentence("SegmentPool", "reduce", "have at least 1 entry", 0))
        self.fill_value = fill_value

    def forward(self, data: Tensor, segments: Grouping) -> Tensor:
        if not torch.jit.is_scripting():
            _check_tensor("SegmentPool", data)
            if not isinstance(self.reduce, str) and isinstance(data, Tensor) and data.dim() < 2:
                raise ValueError(sentence("SegmentPool", "data", "have at least 2 dimensions for several reductions", data.dim()))
            if isinstance(segments, Tensor):
                segments = Segments.from_offsets(segments, check_invariants=segments.is_cpu)
        results = [_reduced(name, data, segments, self.fill_value) for name in self.names]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)

    def extra_repr(self) -> str:
        names = repr(self.reduce if isinstance(self.reduce, str) else list(self.reduce))
        return names if self.fill_value is None else f"{names}, fill_value={self.fill_value}"


class SegmentAttentionPool(nn.Module):
    """Each segment becomes the mean of its rows by learned weights, which are a softmax within the segment.

    A row `x` has for each head the score `w . x + b` and the value `V x + c`; the scores of a segment go through a softmax
    and weight its values, head by head (Li, Tarlow, Brockschmidt and Zemel, "Gated Graph Sequence Neural Networks", 2016,
    section 3.2, without the hyperbolic tangents).

    Args:
        dim: features `D` of a row, a multiple of `heads`.
        heads: how many sets of weights; each has `D / heads` of the values.
        bias: whether scores and values have one.
        device, dtype: of the parameters.

    Shape:
        data `[N, D]` and `S` segments of `N` rows -> `[S, D]`. A segment without rows becomes 0. Rows of no segment must
        be finite, as they go through the linear maps like any other.

    Raises:
        ValueError: `dim` is no multiple of `heads`, or one of them is not positive.

    Example:
        >>> SegmentAttentionPool(8, heads=2)(torch.ones(7, 8), torch.tensor([0, 3, 3, 7])).shape
        torch.Size([3, 8])
    """

    def __init__(self, dim: int, heads: int = 1, *, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        for argument, value in (("dim", dim), ("heads", heads)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(sentence("SegmentAttentionPool", argument, "be an int", kind(value)))
            if value < 1:
                raise ValueError(sentence("SegmentAttentionPool", argument, "be at least 1", value))
        if dim % heads != 0:
            raise ValueError(sentence("SegmentAttentionPool", "dim", f"be a multiple of heads ({heads})", dim))
        self.dim, self.heads = dim, heads
        self.score = nn.Linear(dim, heads, bias=bias, device=device, dtype=dtype)
        self.value = nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.score.reset_parameters()
        self.value.reset_parameters()

    def forward(self, data: Tensor, segments: Grouping) -> Tensor:
        if not torch.jit.is_scripting():
            _check_tensor("SegmentAttentionPool", data)
            if data.dim() != 2 or data.size(1) != self.dim:
                raise ValueError(sentence("SegmentAttentionPool", "data", f"be [N, {self.dim}]", list(data.shape)))
        scores, values = self.score(data), self.value(data).reshape(-1, self.heads, self.dim // self.heads)
        if not torch.jit.is_scripting():
            weights = normalise.segment_softmax(scores, segments)
            return reduce.segment_sum(values, segments, weight=weights).reshape(-1, self.dim)
        weights = torch.ops.fastops.segment_softmax(scores, segments, None, None, 0)
        if values.dtype == torch.float16 or values.dtype == torch.bfloat16:  # such values take weights in float32
            weights = weights.to(torch.float32)
        pooled = torch.ops.fastops._segment_weighted_sum(values, weights, segments, None, None, 0, False, 0)
        return pooled.reshape(-1, self.dim)

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}"


class SegmentNorm(nn.Module):
    """Each feature of a segment gets mean 0 and variance 1, then a learned scale and shift.

        y = (x - mean) / sqrt(var + eps) * weight + bias

    with the mean and the variance (correction 0) over the rows of the segment: instance normalisation for segments of
    different lengths (Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016).

    Args:
        num_features: `D`, the last dimension of the data.
        eps: what is added to the variance.
        affine: whether there are a weight and a bias of shape `[D]`, 1 and 0 at first.
        device, dtype: of the parameters.

    Shape:
        data `[N, *, D]` and `S` segments of `N` rows -> `[N, *, D]`. Finite rows of no segment become the bias.

    Example:
        >>> norm = SegmentNorm(1, affine=False)
        >>> norm(torch.tensor([[1.], [3.], [5.], [5.]]), torch.tensor([0, 2, 4])).flatten()
        tensor([-1.0000,  1.0000,  0.0000,  0.0000])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.affine = num_features, eps, affine
        if affine:
            self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, data: Tensor, segments: Grouping) -> Tensor:
        if not torch.jit.is_scripting():
            _check_tensor("SegmentNorm", data)
            if data.dim() < 2 or data.size(-1) != self.num_features:
                raise ValueError(sentence("SegmentNorm", "data", f"be [N, *, {self.num_features}]", list(data.shape)))
            if isinstance(segments, Tensor):
                segments = Segments.from_offsets(segments, check_invariants=segments.is_cpu)
        dtype, rows = data.dtype, data.size(0)
        if dtype == torch.float16 or dtype == torch.bfloat16:  # a variance may leave their range, and is needed more exactly
            data = data.float()
        scale = (_variance(data, segments) + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        result = (data - _handed_down(_mean(data, segments), segments, rows)) * _handed_down(scale, segments, rows)
        if self.bias is not None:
            result = result + self.bias
        return result.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"
