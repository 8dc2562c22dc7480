"""The reference itself, against torch's own operations on one segment at a time."""

import numpy as np
import pytest
import torch

from fastops import reference, testing
from fastops.registry import FLOATING, OPS

FILLS = {
    "sum": 0,
    "mean": 0,
    "prod": 1,
    "amax": 0,
    "amin": 0,
    "max": 0,
    "min": 0,
    "argmax": -1,
    "argmin": -1,
    "any": False,
    "all": True,
    "logsumexp": -float("inf"),
    "var": 0,
    "std": 0,
    "median": float("nan"),
    "nunique": 0,
    "mode": float("nan"),
    "quantile": float("nan"),
    "first": 0,
    "last": 0,
}


def top_rows(part, members, k):
    """The greatest rows in their order, the first of ties first, and what they lack at the end."""
    order = part.sort(dim=0, descending=True, stable=True).indices[:k]
    values = torch.zeros((k, *part.shape[1:]), dtype=part.dtype)
    rows = torch.full(values.shape, -1)
    values[: len(order)] = part.gather(0, order)
    rows[: len(order)] = members[order]
    return values, rows


def different(part):
    """Of each column: how many values are different, the most frequent one, and its first row. torch takes no NaN for equal."""
    counts, modes, rows = [], [], []
    for column in part.T.numpy():
        values, first, number = np.unique(column, return_index=True, return_counts=True, equal_nan=True)
        counts.append(len(values))
        modes.append(values[number.argmax()])
        rows.append(first[number.argmax()])
    return torch.tensor(counts), torch.from_numpy(np.array(modes)), torch.tensor(rows)


def one_at_a_time(name, data, segments, arguments=()):
    """The reduction by a loop over segments with the torch namesake."""
    index = segments.index
    if name == "topk":
        members = [(index == number).nonzero()[:, 0] for number in range(segments.num_segments)]
        return tuple(torch.stack(parts) for parts in zip(*[top_rows(data[rows], rows, *arguments) for rows in members]))
    functions = {
        "first": lambda part, dim: part[0],
        "last": lambda part, dim: part[-1],
        "nunique": lambda part, dim: different(part)[0],
    }
    function = functions.get(name) or getattr(torch, name)
    if "softmax" in name:
        out = torch.zeros_like(data)
        for number in range(segments.num_segments):
            part = data[index == number]
            masked = (part == -torch.inf).all(0)  # torch has NaN there
            result = function(part, 0) if len(part) else part
            out[index == number] = torch.where(masked, -torch.inf if name == "log_softmax" else 0.0, result)
        return out
    if "cum" in name:
        out, numbers = None, torch.full(data.shape, -1)
        for number in range(segments.num_segments):
            members = (index == number).nonzero()[:, 0]
            result = function(data[members], 0)
            values = result[0] if isinstance(result, tuple) else result
            out = torch.zeros(data.shape, dtype=values.dtype) if out is None else out
            out[members] = values
            if isinstance(result, tuple):  # torch returns the last of rows that tie
                for at, best in enumerate(values):
                    equal = (data[members[: at + 1]] == best) | ((data[members[: at + 1]] != data[members[: at + 1]]) & (best != best))
                    numbers[members[at]] = members[equal.int().cumsum(0).eq(0).sum(0)]
        return (out, numbers) if name in ("cummax", "cummin") else out
    if "sort" in name:
        values, rows = torch.zeros_like(data[:0]), torch.zeros(0, *data.shape[1:], dtype=torch.int64)
        for number in range(segments.num_segments):
            members = (index == number).nonzero()[:, 0]
            part = data[members].sort(dim=0, stable=True)
            values, rows = torch.cat((values, part.values)), torch.cat((rows, members[part.indices]))
        return rows if name == "argsort" else (values, rows)
    results, rows = [], []
    for number in range(segments.num_segments):
        members = (index == number).nonzero()[:, 0]
        if len(members) <= (name in ("var", "std")):  # which torch makes NaN for one row
            shape = data.shape[1:]
            dtype = function(data[:1], *arguments, dim=0)
            dtype = (dtype[0] if isinstance(dtype, tuple) else dtype).dtype
            fill = FILLS[name] if dtype.is_floating_point or name not in ("median", "mode") else 0
            results.append(torch.full(shape, fill, dtype=dtype))
            rows.append(torch.full(shape, -1))
            continue
        part = data[members]
        if name == "mode":
            _, mode, first = different(part)
            results.append(mode)
            rows.append(members[first])
        elif name in ("max", "min", "argmax", "argmin", "median"):
            # torch promises the first of ties for none of these: the first row that equals the extremum is looked up.
            best = part.median(0).values if name == "median" else part.amax(0) if "max" in name else part.amin(0)
            equal = (part == best) | ((part != part) & (best != best))
            first = members[equal.int().cumsum(0).eq(0).sum(0)]
            results.append(first if "arg" in name else best)
            rows.append(first)
        else:
            results.append(function(part, *arguments, dim=0))
    if name in ("max", "min", "median", "mode"):
        return torch.stack(results), torch.stack(rows)
    return torch.stack(results)


@pytest.mark.parametrize("kind", ("dyadic", "special", "factors"))
@pytest.mark.parametrize("grouping", ("offsets", "unsorted32", "ignored"))
@pytest.mark.parametrize("op", [op for op in OPS if not op.takes_values], ids=lambda op: op.name)
def test_against_torch(op, grouping, kind):
    segments = testing.make_segments((3, 0, 5, 1, 2, 0, 17), grouping)
    for dtype in (torch.float64, torch.int32):
        if dtype not in op.dtypes:
            continue
        data = testing.make_data((segments.num_rows, 4), dtype, kind=kind)
        if op.name == "segment_quantile" and kind == "special":
            data = data.masked_fill(data.isinf(), 5)  # torch has NaN on either side of an infinity: test_select has them
        expected = one_at_a_time(op.name.removeprefix("segment_"), data, segments, op.arguments)
        results = op.reference(data, segments)
        for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (results, expected)]):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_derivatives(op):
    for sample in testing.small_inputs(op, "cpu"):
        if sample.id not in ("contiguous-offsets", "dim1-unsorted", "contiguous-ignored"):
            continue
        data, segments = sample.args

        def f(x):
            result = op.reference(x, segments, **sample.kwargs)
            return result[0] if isinstance(result, tuple) else result

        torch.autograd.gradcheck(f, (data,), check_forward_ad=True, check_batched_grad=True)
        torch.autograd.gradgradcheck(f, (data,))


@pytest.mark.parametrize("dtype", FLOATING)
def test_half_goes_through_float32(dtype):
    ones = torch.ones(4096, dtype=dtype)
    offsets = torch.tensor([0, 4096])
    assert reference.segment_sum(ones, offsets).item() == 4096
    assert reference.segment_mean(ones * 100, offsets).item() == 100


def test_products_keep_zero_from_overflow():
    data = torch.tensor([1e30, 1e30, 0.0, 0.0, 1e30, 1e30, 1e30, 1e30], requires_grad=True)
    offsets = torch.tensor([0, 3, 6, 8])
    result = reference.segment_prod(data, offsets)
    assert result.tolist() == [0, 0, float("inf")]
    (gradient,) = torch.autograd.grad(result[:2].sum(), data)
    assert gradient[[0, 1, 4, 5]].tolist() == [0, 0, 0, 0]
    assert reference.segment_prod(torch.tensor([0.0, float("inf")]), torch.tensor([0, 2])).isnan().all()


def test_pairwise_sums_are_accurate():
    data = torch.rand(1_000_000, generator=testing.make_generator(1))
    total = reference.segment_sum(data, torch.tensor([0, 1_000_000]))
    exact = data.double().sum()
    assert abs(total.double().item() - exact.item()) / exact.item() < 2**-23
