"""Running results within each segment: each row gets what the rows up to it come to.

What `fastops.reduce` says of its functions holds for these too. Every function takes `data` of shape `[N, *]` and returns
as many rows, in the places of their own. Options of all of them:

- `exclusive=True` leaves the row itself out. The first row of a segment then gets the result of no rows: 0 for a sum, 1 for
  a product, -inf for a logarithm, and for extrema what all numbers beat, with row number -1.
- `reverse=True` goes from the last row of a segment to the first.

float16 and bfloat16 are scanned in float32 and rounded once; on the CPU sums and products of float32 run in float64, as in
`torch.cumsum`. Rows that belong to no segment (`ignore_index`) get 0, row number -1, and no gradient.
"""

from __future__ import annotations

from typing import Any, Optional

from ._dispatch import operator
from ._typing import Array, DType, Flag, Grouping, Integer, Operator, PairOperator, ValuesAndIndices, named

__all__ = ["segment_cumsum", "segment_cumprod", "segment_cummax", "segment_cummin", "segment_logcumsumexp"]

_cumsum: Operator = operator("segment_cumsum", ("dtype", "exclusive", "reverse"))
_cumprod: Operator = operator("segment_cumprod", ("dtype", "exclusive", "reverse"))
_cummax: PairOperator = operator("segment_cummax", ("exclusive", "reverse"))
_cummin: PairOperator = operator("segment_cummin", ("exclusive", "reverse"))
_logcumsumexp: Operator = operator("segment_logcumsumexp", ("exclusive", "reverse"))
_named_cummax = named("cummax")
_named_cummin = named("cummin")


def segment_cumsum(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    dtype: Optional[DType] = None,
    exclusive: Flag = False,
    reverse: Flag = False,
) -> Array:
    """The sum of the rows up to each row of a segment.

    Equivalent to:
        >>> torch.cat([rows.cumsum(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype; integers and bool give int64.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        dtype: data is converted to it first, as by `torch.cumsum`; it is the dtype of the result.
        exclusive: leave the row itself out.
        reverse: add up from the last row.

    Returns:
        `[N, *]`. The gradient of a row is the sum of those at and after it.

    Rules:
        Sums of float32 are no less accurate than those of `torch.cumsum`. An integer sum wraps modulo 2**64.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_cumsum(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 3.,  4.,  8.,  1.,  6., 15., 17.])
        >>> segment_cumsum(data, torch.tensor([0, 3, 3, 7]), exclusive=True)
        tensor([ 0.,  3.,  4.,  0.,  1.,  6., 15.])
    """
    if dtype is None and exclusive is False and reverse is False:
        return _cumsum(data, segments, dim)
    return _cumsum(data, segments, dim, dtype, exclusive, reverse)


def segment_cumprod(
    data: Array,
    segments: Grouping,
    *,
    dim: Integer = 0,
    dtype: Optional[DType] = None,
    exclusive: Flag = False,
    reverse: Flag = False,
) -> Array:
    """The product of the rows up to each row of a segment.

    Equivalent to:
        >>> torch.cat([rows.cumprod(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, any dtype; integers and bool give int64.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        dtype: data is converted to it first, as by `torch.cumprod`; it is the dtype of the result.
        exclusive: leave the row itself out.
        reverse: multiply from the last row.

    Returns:
        `[N, *]`. The gradient of a row is the sum over the rows at and after it of theirs times the product of the other
        factors: nothing is divided, so it is right where rows are zero.

    Rules:
        From a zero on the product is 0 whatever overflowed before, and NaN if there is an infinity or a NaN, as in
        `segment_prod`. An integer product wraps modulo 2**64.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> segment_cumprod(data, torch.tensor([0, 3, 3, 7]))
        tensor([ 3.,  3., 12.,  1.,  5., 45., 90.])
    """
    if dtype is None and exclusive is False and reverse is False:
        return _cumprod(data, segments, dim)
    return _cumprod(data, segments, dim, dtype, exclusive, reverse)


def segment_cummax(
    data: Array, segments: Grouping, *, dim: Integer = 0, exclusive: Flag = False, reverse: Flag = False
) -> ValuesAndIndices[Array]:
    """The maximum of the rows up to each row of a segment, and the row that holds it.

    Equivalent to:
        >>> [rows.cummax(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment, and the first of rows that tie.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        exclusive: leave the row itself out.
        reverse: go from the last row.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.cummax`: `[N, *]` of the dtype of `data`, and int64 row
        numbers along `dim`.

    Rules:
        Of rows that tie, the one with the smallest number is returned and receives the gradient (`torch.cummax` returns the
        last). NaN is the largest value. Where there is no row yet the value is -inf, the least integer or False, with
        index -1.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_cummax(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([3., 3., 4., 1., 5., 9., 9.]), tensor([0, 0, 2, 3, 4, 5, 5]))
    """
    return _named_cummax(_run(_cummax, data, segments, dim, exclusive, reverse))


def segment_cummin(
    data: Array, segments: Grouping, *, dim: Integer = 0, exclusive: Flag = False, reverse: Flag = False
) -> ValuesAndIndices[Array]:
    """The minimum of the rows up to each row of a segment, and the row that holds it.

    Equivalent to:
        >>> [rows.cummin(0) for rows in data.split(segments.lengths.tolist())]   # doctest: +SKIP

    with indices that count from the first row of `data`, not of the segment, and the first of rows that tie.

    Args:
        data: `[N, *]`, any dtype.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        exclusive: leave the row itself out.
        reverse: go from the last row.

    Returns:
        `(values, indices)`, the named tuple `torch.return_types.cummin`: `[N, *]` of the dtype of `data`, and int64 row
        numbers along `dim`.

    Rules:
        Of rows that tie, the one with the smallest number is returned and receives the gradient (`torch.cummin` returns the
        last). A NaN is returned before any number. Where there is no row yet the value is inf, the greatest integer or True,
        with index -1.

    Example:
        >>> data = torch.tensor([3., 1., 4., 1., 5., 9., 2.])
        >>> values, indices = segment_cummin(data, torch.tensor([0, 3, 3, 7]))
        >>> values, indices
        (tensor([3., 1., 1., 1., 1., 1., 1.]), tensor([0, 1, 1, 3, 3, 3, 3]))
    """
    return _named_cummin(_run(_cummin, data, segments, dim, exclusive, reverse))


def segment_logcumsumexp(
    data: Array, segments: Grouping, *, dim: Integer = 0, exclusive: Flag = False, reverse: Flag = False
) -> Array:
    """The logarithm of the sum of exponentials of the rows up to each row of a segment.

    Equivalent to:
        >>> torch.cat([rows.logcumsumexp(0) for rows in data.split(segments.lengths.tolist())])   # doctest: +SKIP

    Args:
        data: `[N, *]`, floating.
        segments: `S` segments of `N` rows, or offsets `[S + 1]`.
        dim: the dimension of the rows.
        exclusive: leave the row itself out.
        reverse: add up from the last row.

    Returns:
        `[N, *]`, of the dtype of `data`. With `y` the result, the gradient of row `j` is the sum of `exp(x_j - y_i) * g_i`
        over the rows `i` at and after it.

    Rules:
        Nothing overflows and no segment changes another. While all rows are -inf so is the result, and no gradient flows.

    Example:
        >>> data = torch.tensor([0., 0., 0., -torch.inf, 1.])
        >>> segment_logcumsumexp(data, torch.tensor([0, 3, 5]))
        tensor([0.0000, 0.6931, 1.0986,   -inf, 1.0000])
    """
    return _run(_logcumsumexp, data, segments, dim, exclusive, reverse)


def _run(operation: Any, data: Array, segments: Grouping, dim: Integer, exclusive: Flag, reverse: Flag) -> Any:
    if exclusive is False and reverse is False:
        return operation(data, segments, dim)
    return operation(data, segments, dim, exclusive, reverse)
