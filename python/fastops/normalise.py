"""Softmax and its relatives, variance and standard deviation: what takes all rows of a segment to know.

What `fastops.reduce` says of its functions holds for these too. They take floating data; float16 and bfloat16 are
computed in float32 and rounded once. exp and log err by at most 2 units in the last place.

Rows that belong to no segment (`ignore_index`) get 0 where the result has the rows of `data`, and no gradient.
"""

from __future__ import annotations



from ._dispatch import operator
from ._typing import Array, Grouping, Integer, Number, Operator

__all__ = ["segment_softmax", "segment_log_softmax", "segment_logsumexp", "segment_var", "segment_std"]

_MINUS_INFINITY = float("-inf")  # the default, compared by identity
_ONE, _ZERO = 1, 0

_softmax: Operator = operator("segment_softmax", ())
_log_softmax: Operator = operator("segment_log_softmax", ())
_logsumexp: Operator = operator("segment_logsumexp")
_var: Operator = operator("segment_var", ("correction", "fill_value"))
_std: Operator = operator("segment_std", ("correction", "fill_value"))


def segment_softmax(data: Array, segments: Grouping, *, dim: Integer = 0) -> Array:
    """The softmax within each segment: positive numbers that add up to 1.

    Equivalent to:
        >>> power = (data - data.max()).exp()   # doctest: +SKIP
        >>> power / segment_broadcast(segment_sum(power, segments), segments)   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.

    Returns:
        `[N, *]`, of the dtype of `data`. With `y` the result, the gradient of a row is `y * (g - sum(y * g))`.

    Rules:
        A segment is measured from its own maximum, so nothing overflows and no segment changes another. Where all rows
        are -inf the result is 0 and so is the gradient, as in torch's attention with all keys masked. Where a row is +inf
        or NaN the segment is NaN, as in `torch.softmax`.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_softmax(data, torch.tensor([0, 3, 3, 7]))
        tensor([2.5950e-01, 3.5119e-02, 7.0538e-01, 3.2933e-04, 1.7980e-02, 9.8170e-01,
                8.9523e-04])
    """
    return _softmax(data, segments, dim)


def segment_log_softmax(data: Array, segments: Grouping, *, dim: Integer = 0) -> Array:
    """The logarithm of the softmax within each segment.

    Equivalent to:
        >>> data - segment_broadcast(segment_logsumexp(data, segments), segments)   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.

    Returns:
        `[N, *]`, of the dtype of `data`. With `y` the result, the gradient of a row is `g - exp(y) * sum(g)`.

    Rules:
        Where all rows of a segment are -inf so is the result, and the gradient is 0. Where a row is +inf or NaN the segment
        is NaN, as in `torch.log_softmax`.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_log_softmax(data, torch.tensor([0, 3, 3, 7]))
        tensor([-1.3490, -3.3490, -0.3490, -8.0185, -4.0185, -0.0185, -7.0185])
    """
    return _log_softmax(data, segments, dim)


def segment_logsumexp(
    data: Array, segments: Grouping, *, dim: Integer = 0, fill_value: Number = _MINUS_INFINITY
) -> Array:
    """The logarithm of the sum of the exponentials of each segment.

    Equivalent to:
        >>> segment_sum(data.exp(), segments).log()   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        fill_value: the result for a segment without rows.

    Returns:
        `[S, *]`, of the dtype of `data`. The gradient of a row is that of its segment times its softmax.

    Rules:
        A segment is measured from its own maximum, so nothing overflows. Where all rows are -inf so is the result, and the
        gradient is 0, where that of `torch.logsumexp` is NaN. Where a row is +inf so is the result.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_logsumexp(data, torch.tensor([0, 3, 3, 7]))
        tensor([4.3490,   -inf, 9.0185])
    """
    if fill_value is _MINUS_INFINITY:
        return _logsumexp(data, segments, dim)
    return _logsumexp(data, segments, dim, fill_value)


def segment_var(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    correction: Number = 1,
    fill_value: Number = 0,
) -> Array:
    """The variance of each segment.

    Equivalent to:
        >>> centred = data - segment_broadcast(segment_mean(data, segments), segments)   # doctest: +SKIP
        >>> segment_sum(centred**2, segments) / (segments.lengths - correction)   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        correction: what is taken off the number of rows before dividing: 1 is Bessel's, 0 the variance of the rows
            themselves.
        fill_value: the result for a segment of `correction` rows or fewer.

    Returns:
        `[S, *]`, of the dtype of `data`. The gradient of a row is that of its segment times
        `2 * (row - mean) / (length - correction)`.

    Rules:
        One pass, by means and squared differences that are merged (Chan, Golub and LeVeque, 1979). The variance of equal
        rows is exactly 0. That of rows with an infinity is NaN.

    Example:
        >>> data = torch.tensor([3., 1., 5., 1., 5., 9., 1.])
        >>> segment_var(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 4.0000,  0.0000, 14.6667])
    """
    if correction is _ONE and fill_value is _ZERO:
        return _var(data, segments, dim)
    return _var(data, segments, dim, correction, fill_value)


def segment_std(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    correction: Number = 1,
    fill_value: Number = 0,
) -> Array:
    """The standard deviation of each segment.

    Equivalent to:
        >>> segment_var(data, segments, correction=correction).sqrt()   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        correction: what is taken off the number of rows before dividing: 1 is Bessel's, 0 the standard deviation of the
            rows themselves.
        fill_value: the result for a segment of `correction` rows or fewer.

    Returns:
        `[S, *]`, of the dtype of `data`. The gradient of a row is that of its segment times
        `(row - mean) / ((length - correction) * std)`, and 0 where the standard deviation is 0.

    Rules:
        Those of `segment_var`.

    Example:
        >>> data = torch.tensor([3., 1., 5., 1., 5., 9., 1.])
        >>> segment_std(data, torch.tensor([0, 3, 3, 7]))
        tensor([2.0000, 0.0000, 3.8297])
    """
    if correction is _ONE and fill_value is _ZERO:
        return _std(data, segments, dim)
    return _std(data, segments, dim, correction, fill_value)
