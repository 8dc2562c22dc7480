"""Any lengths, dtypes, strides and layouts against the reference: hypothesis looks for what nobody thought of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastops import Segments, testing
from fastops.registry import FLOATING, OPS

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)

lengths = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 40), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 300])),
    max_size=12,
)
shapes = st.lists(st.integers(0, 5), max_size=3)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def strided(draw, shape):
    """How a tensor of a shape may lie in memory: an order of dimensions, gaps between entries, an offset, repetition."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    repeated = [draw(st.integers(0, 9)) == 0 for _ in shape]
    return order, steps, repeated, draw(st.integers(0, 5))


def place(values, layout):
    """The same shape in that memory layout. Where an entry is repeated the first takes the place of all."""
    order, steps, repeated, offset = layout
    strides, extent = [0] * values.dim(), 1
    for dim in order:
        if not repeated[dim]:
            strides[dim] = extent * steps[dim]
            extent = strides[dim] * max(values.size(dim), 1)
    for dim, same in enumerate(repeated):
        if same and values.size(dim) > 0:
            values = values.narrow(dim, 0, 1).expand(values.shape)
    storage = torch.zeros(offset + extent, dtype=values.dtype, device=values.device)
    out = storage.as_strided(values.shape, strides, offset)
    if values.numel():
        storage.as_strided([1 if same else size for same, size in zip(repeated, values.shape)], strides, offset).copy_(
            values[tuple(slice(0, 1) if same else slice(None) for same in repeated)]
        )
    return out


@st.composite
def calls(draw, op, dtypes, special=True):
    dtype = draw(st.sampled_from(dtypes))
    segments = testing.make_segments(tuple(draw(lengths)), draw(st.sampled_from(testing.GROUPINGS)), seed=draw(seeds))
    around = draw(shapes)
    dim = draw(st.integers(0, len(around)))
    shape = [*around[:dim], segments.num_segments if op.takes_values else segments.num_rows, *around[dim:]]
    kinds = [op.data_kind, "special"] if special and op.name != "segment_prod" else [op.data_kind]
    values = testing.make_data(tuple(shape), dtype, kind=draw(st.sampled_from(kinds)), seed=draw(seeds))
    if draw(st.booleans()):
        dim -= len(shape)
    return values, segments, dim, draw(strided(shape))


def examples(device, number):
    return settings(max_examples=number if device == "cpu" else max(number // 10, 3))


@every_op
def test_value(op, device):
    @examples(device, 60)
    @given(calls(op, op.dtypes))
    def check(call):
        values, segments, dim, layout = call
        data = place(values.to(device), layout)
        sample = testing.Sample("", (data, segments.to(device)), {"dim": dim})
        results = op.fn(*sample.args, dim=dim)
        testing.assert_matches(results, testing.expected_result(op, sample), values.dtype, exact=op.exact)
        for result in results if isinstance(results, tuple) else (results,):
            assert result.is_contiguous()

    check()


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_gradient(op, device):
    # Products with an infinity and a zero are NaN, and what a NaN's derivative is depends on the way; tests of scans have the rest.
    special = op.name not in ("segment_cumprod", "segment_logcumsumexp")

    @examples(device, 30)
    @given(calls(op, (torch.float64,), special), st.data())
    def check(call, more):
        values, segments, dim, layout = call
        leaf = place(values.to(device), layout).requires_grad_()
        other = leaf.detach().cpu().requires_grad_()
        result, expected = op.fn(leaf, segments.to(device), dim=dim), op.reference(other, segments, dim=dim)
        result, expected = [r[0] if isinstance(r, tuple) else r for r in (result, expected)]
        upstream = testing.make_data(tuple(result.shape), torch.float64, seed=more.draw(seeds))
        upstream = place(upstream, more.draw(strided(list(result.shape))))
        result.backward(upstream.to(device))
        expected.backward(upstream)
        torch.testing.assert_close(leaf.grad.cpu(), other.grad, rtol=1e-12, atol=1e-12, equal_nan=True)

    check()


@pytest.mark.parametrize("op", [op for op in OPS if not op.takes_values], ids=lambda op: op.name)
def test_rows_in_any_order_are_rows_in_order(op, device):
    @examples(device, 30)
    @given(lengths, st.sampled_from(sorted(set(FLOATING) & set(op.dtypes), key=str)), st.integers(1, 9), seeds)
    def check(counts, dtype, features, seed):
        segments = testing.make_segments(tuple(counts), "unsorted", device=device, seed=seed)
        data = testing.make_data((segments.num_rows, features), dtype, kind="normal", seed=seed).to(device)
        sorted_data = data if segments.order is None else data[segments.order]
        results = op.fn(data, segments)
        in_order = op.fn(sorted_data, Segments.from_offsets(segments.offsets))
        results, in_order = [r[0] if isinstance(r, tuple) else r for r in (results, in_order)]
        if "arg" in op.name:
            if segments.order is not None and segments.num_rows:
                in_order = torch.where(in_order < 0, in_order, segments.order[in_order.clamp(min=0)])
            assert torch.equal(results, in_order)
        else:
            if op.per_row and not op.grouped and segments.order is not None:
                results = results[segments.order]
            torch.testing.assert_close(results, in_order, rtol=0, atol=0, equal_nan=True)

    check()


@given(st.lists(st.integers(-2, 6), max_size=60), st.sampled_from((torch.int64, torch.int32)), st.booleans())
def test_grouping(index, dtype, give_count):
    """offsets, order, index and lengths say the same, for whatever entries."""
    tensor = torch.tensor(index, dtype=dtype)
    kept = [entry for entry in index if entry != -1]
    count = max(kept, default=-1) + 1 if not give_count else 7
    if any(entry < 0 for entry in kept):
        with pytest.raises(ValueError, match=r"index must be in \[0, "):
            Segments.from_index(tensor, count if give_count else None, ignore_index=-1)
        return
    segments = Segments.from_index(tensor, count if give_count else None, ignore_index=-1)
    assert (segments.num_segments, segments.num_rows) == (count, len(index))
    assert segments.index.tolist() == index
    members = [[row for row, entry in enumerate(index) if entry == s] for s in range(count)]
    assert segments.lengths.tolist() == [len(rows) for rows in members]
    order = list(range(len(index))) if segments.order is None else segments.order.tolist()
    assert order == [row for rows in members for row in rows]
    offsets = segments.offsets.tolist()
    assert offsets == [sum(map(len, members[:s])) for s in range(count + 1)]
    same = [Segments.from_offsets(segments.offsets), Segments.from_lengths(segments.lengths)]
    assert all(torch.equal(other.offsets, segments.offsets) for other in same)


@given(st.lists(st.one_of(st.none(), st.integers(0, 5), st.text(max_size=2), st.floats()), max_size=40))
def test_keys(keys):
    """Equal keys and only those share a segment; what is not equal to itself has none."""
    segments, unique = Segments.from_keys(keys)
    assert len(set(unique)) == len(unique) == segments.num_segments
    for key, number in zip(keys, segments.index.tolist()):
        if key is None or key != key:
            assert number == -1
        else:
            assert unique[number] == key
    assert (segments.lengths > 0).all()
