"""Order within segments: the rules with the numbers written out, the public cases, any input against loops in NumPy."""

import numpy as np
import pytest
import torch
from helpers import gradient, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fastops import Segments, segment_argsort, segment_mode, segment_nunique, segment_sort, testing
from fastops.registry import ALL_DTYPES, FLOATING

NAN, INF = float("nan"), float("inf")


# ---- public cases ----


def test_iss_76_sorts_are_stable(make):
    data, offsets = make([1, 1, 1, 0, 1, 0]), make([0, 4, 6])
    for values in (data, data.float(), data.bool(), data.to(torch.uint8)):
        same(segment_argsort(values, offsets), [3, 0, 1, 2, 5, 4])
        same(segment_argsort(values, offsets, descending=True), [0, 1, 2, 3, 4, 5])
    same(segment_argsort(make([0.0, -0.0, 0.0, -0.0]), make([0, 4])), [0, 1, 2, 3])
    same(segment_argsort(make([0.0, -0.0, 0.0, -0.0]), make([0, 4]), descending=True), [0, 1, 2, 3])


@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_iss_76_equal_keys(device, dtype, descending):
    offsets = torch.tensor([0, 1, 3001], device=device)
    equal = torch.ones(3001, dtype=dtype, device=device)
    same(segment_argsort(equal, offsets, descending=descending), range(3001))
    two = (torch.arange(3001) % 2 == 0).to(dtype).to(device)
    rows = torch.arange(1, 3001)
    first, second = (rows[1::2], rows[::2]) if descending else (rows[::2], rows[1::2])
    same(segment_argsort(two, offsets, descending=descending)[1:], torch.cat((first, second)))


# ---- rules ----


def test_values_and_rows(make):
    data, offsets = make([3.0, 1, 4, 1, 5, 9, 2]), make([0, 3, 3, 7])
    result = segment_sort(data, offsets)
    assert type(result) is torch.return_types.sort
    same(result.values, [1, 3, 4, 1, 2, 5, 9])
    same(result.indices, [1, 0, 2, 3, 6, 4, 5])
    result = segment_sort(data, offsets, descending=True)
    same(result.values, [4, 3, 1, 9, 5, 2, 1])
    same(result.indices, [2, 0, 1, 5, 4, 6, 3])


def test_columns_are_sorted_each_on_its_own(make):
    data = make([[[3, 0], [1, 1], [2, 2]], [[0, 5], [0, 4], [9, 3]]])
    segments = Segments.from_offsets(make([0, 2, 3]))
    values, indices = segment_sort(data, segments, dim=1)
    same(values, [[[1, 0], [3, 1], [2, 2]], [[0, 4], [0, 5], [9, 3]]])
    same(indices, [[[1, 0], [0, 1], [2, 2]], [[0, 1], [1, 0], [2, 2]]])
    assert values.is_contiguous() and indices.is_contiguous()


def test_nan_is_the_greatest(make):
    data = make([NAN, 1.0, INF, -INF, NAN, -NAN, 0.0])
    offsets = make([0, 7])
    same(segment_sort(data, offsets).values, [-INF, 0, 1, INF, NAN, NAN, NAN])
    same(segment_sort(data, offsets).indices, [3, 6, 1, 2, 0, 4, 5])
    same(segment_sort(data, offsets, descending=True).values, [NAN, NAN, NAN, INF, 1, 0, -INF])
    same(segment_sort(data, offsets, descending=True).indices, [0, 4, 5, 2, 1, 6, 3])


def test_values_keep_their_bits(make):
    values = segment_sort(make([0.0, -0.0, -1.0, -0.0]), make([0, 4])).values
    same(values, [-1, 0, 0, 0])
    same(values.cpu().signbit(), [True, False, True, True])


def test_rows_in_any_order(make):
    """Positions are by segment, indices are rows of the data, and rows of no segment are not there."""
    segments = Segments.from_index(make([2, 0, -1, 2, 0, -1, 2]), 3, ignore_index=-1)
    data = make([5.0, 8, 100, 4, 7, 100, 5])
    values, indices = segment_sort(data, segments)
    same(values, [7, 8, 4, 5, 5])
    same(indices, [4, 1, 3, 0, 6])
    same(segment_argsort(data, segments, descending=True), [1, 4, 0, 6, 3])
    same(gradient(segment_sort, data, segments, make([1.0, 2, 3, 4, 5])), [4, 2, 0, 3, 1, 0, 5])


def test_equal_values_stand_by_row_and_not_by_place(make):
    segments = Segments.from_index(make([1, 0, 1, 0, 1]), 2)
    same(segment_argsort(make([1, 1, 1, 1, 1]), segments), [1, 3, 0, 2, 4])


def test_the_gradient_goes_to_the_row(make):
    data, weights = make([2.0, 2.0, 1.0, 7.0], torch.float64), make([1.0, 10.0, 100.0, 1000.0], torch.float64)
    same(gradient(segment_sort, data, make([0, 3, 4]), weights), [10, 100, 1, 1000])
    same(gradient(segment_sort, data, make([0, 3, 4]), weights, descending=True), [1, 10, 100, 1000])
    leaf = data.clone().requires_grad_()
    values, indices = segment_sort(leaf, make([0, 3, 4]))
    assert values.requires_grad and not indices.requires_grad
    (first,) = torch.autograd.grad((values**3 * weights).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    same(second, [120, 1200, 6, 42000])


@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_ends_of_the_range(device, dtype, descending):
    if dtype == torch.bool:
        ends = [True, False, True, False]
    elif dtype in FLOATING:
        info = torch.finfo(dtype)
        ends = [INF, -INF, info.max, info.min, info.smallest_normal, -info.smallest_normal, info.eps, 0.0, -0.0, 1, NAN, -1]
    else:
        info = torch.iinfo(dtype)
        ends = [info.max, info.min, 0, 1, info.max - 1, info.min + 1, info.max // 2, info.min]
    data = torch.tensor(ends * 3, dtype=dtype)
    expected = data.sort(stable=True, descending=descending)
    result = segment_sort(data.to(device), torch.tensor([0, len(data)], device=device), descending=descending)
    same(result.values, expected.values)
    same(result.indices, expected.indices)


def test_arguments(make):
    data, offsets = make([1.0, 2.0]), make([0, 2])
    for function in (segment_sort, segment_argsort):
        for wrong in (1, 0, None, np.int64(1), torch.tensor(True)):
            with pytest.raises(TypeError, match=f"^{function.__name__}: descending must be a bool, but got "):
                function(data, offsets, descending=wrong)


# ---- different values and the most frequent one ----


def test_mode_and_nunique(make):
    data, offsets = make([3.0, 1, 3, 1, 5, 9, 2]), make([0, 3, 3, 7])
    result = segment_mode(data, offsets)
    assert type(result) is torch.return_types.mode
    same(result.values, [3, NAN, 1])
    same(result.indices, [0, -1, 3])
    same(segment_nunique(data, offsets), [2, 0, 4])
    for dtype in (torch.int64, torch.uint8, torch.float16):
        values, indices = segment_mode(data.to(dtype), offsets, fill_value=7)
        same(values, [3, 7, 1])
        same(indices, [0, -1, 3])
        same(segment_nunique(data.to(dtype), offsets, fill_value=-7), [2, -7, 4])
    same(segment_mode(data.long(), offsets).values, [3, 0, 1])


def test_mode_of_values_that_are_equally_frequent(make):
    """The least of them, at its first row."""
    data, offsets = make([5, -2, 5, -2, 7, 7, 0, 3, 3, 1, 1]), make([0, 7, 11])
    for dtype in (torch.int32, torch.int8, torch.float32, torch.float64, torch.bfloat16):
        values, indices = segment_mode(data.to(dtype), offsets)
        same(values, [-2, 1])
        same(indices, [1, 9])
    same(segment_nunique(data, offsets), [4, 2])


def test_mode_of_bool(make):
    data, offsets = make([True, False, False, True, True, True, False]), make([0, 4, 6, 6, 7])
    values, indices = segment_mode(data, offsets)
    assert values.tolist() == [False, True, False, False] and values.dtype == torch.bool
    same(indices, [1, 4, -1, 6])
    same(segment_nunique(data, offsets), [2, 1, 0, 1])


def test_equal_bits_are_not_what_counts(make):
    """NaN equals NaN whatever its bits, and -0.0 equals 0.0. The value is that of the row."""
    data, offsets = make([NAN, 1.0, -NAN, 2.0, -0.0, 0.0, 3.0, 0.0, -INF, -INF, INF, NAN, NAN]), make([0, 4, 8, 13])
    for dtype in FLOATING:
        values, indices = segment_mode(data.to(dtype), offsets)
        same(values, [NAN, 0, -INF])
        same(indices, [0, 4, 8])
        assert values.cpu().signbit()[1]
        same(segment_nunique(data.to(dtype), offsets), [3, 2, 3])


def test_mode_of_columns_and_of_rows_in_any_order(make):
    segments = Segments.from_index(make([2, 0, -1, 2, 0, -1, 2]), 4, ignore_index=-1)
    data = make([[5.0, 1], [8, 2], [9, 9], [4, 1], [7, 2], [9, 9], [4, 3]])
    values, indices = segment_mode(data, segments, fill_value=-1)
    same(values, [[7, 2], [-1, -1], [4, 1], [-1, -1]])
    same(indices, [[4, 1], [-1, -1], [3, 0], [-1, -1]])
    same(segment_nunique(data, segments), [[2, 1], [0, 0], [2, 2], [0, 0]])
    values, indices = segment_mode(data.t(), segments, dim=1, fill_value=-1)
    same(values, [[7, -1, 4, -1], [2, -1, 1, -1]])
    same(indices, [[4, -1, 3, -1], [1, -1, 0, -1]])
    same(segment_nunique(data.t(), segments, dim=-1), [[2, 0, 2, 0], [1, 0, 2, 0]])


def test_rows_of_no_segment_are_left_out_of_an_unchecked_index(make):
    segments = Segments.from_index(make([1, 9, 0, -5, 1, 0]), 2, check_invariants=False)
    data = make([4, 4, 4, 4, 2, 3])
    same(segment_mode(data, segments).values, [3, 2])
    same(segment_mode(data, segments).indices, [5, 4])
    same(segment_nunique(data, segments), [2, 2])


def test_the_gradient_of_the_mode_goes_to_its_row(make):
    data, weights = make([2.0, 5.0, 2.0, 7.0, 7.0, 1.0], torch.float64), make([1.0, 10.0, 100.0], torch.float64)
    same(gradient(segment_mode, data, make([0, 3, 3, 6]), weights), [1, 0, 0, 100, 0, 0])
    leaf = data.clone().requires_grad_()
    values, indices = segment_mode(leaf, make([0, 3, 3, 6]), fill_value=0)
    assert values.requires_grad and not indices.requires_grad
    (first,) = torch.autograd.grad((values**3 * weights).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    same(second, [12, 0, 0, 4200, 0, 0])
    assert not segment_nunique(leaf, make([0, 3, 3, 6])).requires_grad


def test_what_is_wrong_with_fill_value(make):
    data, offsets = make([1, 2]), make([0, 2])
    for wrong in (0.0, None, True, np.float32(0), np.bool_(True)):
        with pytest.raises(TypeError, match="^segment_nunique: fill_value must be an int, but got "):
            segment_nunique(data, offsets, fill_value=wrong)
    with pytest.raises(ValueError, match="^segment_mode: fill_value must fit in int64, but got nan"):
        segment_mode(data, offsets, fill_value=float("nan"))


# ---- sizes that the ways to sort depend on ----


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int16, torch.uint8), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("columns", (1, 3, 20))
def test_every_length(device, dtype, columns):
    if device == "cpu":
        lengths = (*range(70), 95, 96, 97, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 5000)
    else:
        lengths = (1, 2, 33, 300)
    for kind in ("normal", "dyadic"):
        data = testing.make_data((sum(lengths), columns), dtype, kind=kind)
        for descending in (False, True):
            values, indices = segment_sort(data.to(device), Segments.from_lengths(torch.tensor(lengths, device=device)), descending=descending)
            begin = 0
            for part, value, row in zip(data.split(lengths), values.cpu().split(lengths), indices.cpu().split(lengths)):
                expected = part.sort(dim=0, stable=True, descending=descending)
                same(value, expected.values)
                same(row - begin, expected.indices)
                begin += len(part)
        check_runs(data, Segments.from_lengths(torch.tensor(lengths)), device)


@pytest.mark.parametrize("kind", ("normal", "few", "equal", "periodic", "ascending", "descending"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64, torch.int16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("lengths", ((5, 200_000, 0, 70_000, 3), (300_000,)), ids=("among_others", "alone"))
def test_long_segments(lengths, dtype, kind):
    """What all threads sort together, whatever the values are."""
    number = torch.arange(sum(lengths))
    data = {
        "normal": testing.make_data((sum(lengths),), torch.float32, kind="normal") * 1000,
        "few": number * 7919 % 3,
        "equal": number * 0,
        "periodic": number % 73,
        "ascending": number,
        "descending": -number,
    }[kind].to(dtype)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for descending in (False, True):
            values, indices = segment_sort(data, Segments.from_lengths(torch.tensor(lengths)), descending=descending)
            begin = 0
            for part, value, row in zip(data.split(lengths), values.split(lengths), indices.split(lengths)):
                expected = part.sort(stable=True, descending=descending)
                assert torch.equal(value, expected.values) and torch.equal(row - begin, expected.indices)
                begin += len(part)
        check_runs(data[:, None], Segments.from_lengths(torch.tensor(lengths)))


@pytest.mark.parametrize("runs", ((60_000, 60_001, 30_000), (90_000, 89_999, 1), (1, 149_999, 1, 1), (50_000,) * 3), ids=str)
def test_runs_of_long_segments(runs):
    """They go on over the ends of buckets, and the longest may not be that of a single bucket."""
    data = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))[:, None] * 1.5 - 2
    check_runs(data, Segments.from_lengths(torch.tensor([len(data)])))
    mixed = data[torch.randperm(len(data), generator=testing.make_generator(1))]
    check_runs(mixed, Segments.from_lengths(torch.tensor([len(data)])))
    check_runs(mixed.double(), Segments.from_lengths(torch.tensor([5, len(data) - 5])))


@pytest.mark.parametrize("columns", (2, 9, 33))
def test_long_segments_of_several_columns(columns):
    data = testing.make_data((90_000, columns), torch.float32, kind="normal")
    segments = Segments.from_index((torch.arange(90_000) * 7919 % 90_000 > 15_000).long(), 2)
    values, indices = segment_sort(data, segments)
    counts = segments.lengths.tolist()
    for rows, value, row in zip(segments.order.split(counts), values.split(counts), indices.split(counts)):
        expected = data[rows].sort(dim=0, stable=True)
        assert torch.equal(value, expected.values) and torch.equal(row, rows[expected.indices])
    check_runs((data * 4).round(), segments)


def runs_by_loops(data, index, num_segments):
    """Of segments and columns, one after the other: how many values are different, the most frequent one, its first row."""
    counts = np.zeros((num_segments, data.shape[1]), np.int64)
    modes, rows = np.full(counts.shape, -1.0), np.full(counts.shape, -1)
    for number in range(num_segments):
        members = np.flatnonzero(index == number)
        for column in range(data.shape[1] if len(members) else 0):
            values, first, lengths = np.unique(data[members, column], return_index=True, return_counts=True, equal_nan=True)
            best = lengths.argmax()
            counts[number, column] = len(values)
            modes[number, column], rows[number, column] = values[best], members[first[best]]
    return counts, modes, rows


def check_runs(data, segments, device="cpu"):
    counts, modes, rows = runs_by_loops(data.numpy(), segments.index.numpy(), segments.num_segments)
    for threads in (1, 2, 3) if device == "cpu" and len(data) > 70_000 else (torch.get_num_threads(),):
        torch.set_num_threads(threads)
        there = segments.to(device)
        values, indices = segment_mode(data.to(device), there, fill_value=1)
        np.testing.assert_array_equal(indices.cpu().numpy(), rows)
        np.testing.assert_array_equal(values.cpu().numpy().astype(modes.dtype), np.where(rows < 0, 1, modes))
        np.testing.assert_array_equal(segment_nunique(data.to(device), there).cpu().numpy(), counts)


# ---- any input, against loops in NumPy ----


def sort_by_loops(data, index, num_segments, descending):
    """Segments and columns one after the other, a stable sort of (whether NaN, value)."""
    values, rows = [], []
    for number in range(num_segments):
        members = np.flatnonzero(index == number)
        columns = []
        for column in range(data.shape[1]):
            part = data[members, column].astype(np.float64)
            nan = np.isnan(part)
            keys = (-np.where(nan, 0, part), ~nan) if descending else (np.where(nan, 0, part), nan)
            columns.append(members[np.lexsort(keys)])
        rows.append(np.stack(columns, 1))
        values.append(np.take_along_axis(data, rows[-1], 0))
    return np.concatenate(values or [data[:0]]), np.concatenate(rows or [np.zeros((0, data.shape[1]), np.int64)])


@st.composite
def calls(draw):
    index = draw(st.lists(st.integers(-1, draw(st.integers(0, 5))), max_size=draw(st.sampled_from((8, 80, 300)))))
    dtype = draw(st.sampled_from([dtype for dtype in ALL_DTYPES if dtype != torch.bfloat16]))  # which NumPy has not
    kind = draw(st.sampled_from(("dyadic", "special", "normal")))
    data = testing.make_data((len(index), draw(st.integers(1, 5))), dtype, kind=kind, seed=draw(st.integers(0, 2**32 - 1)))
    return data, torch.tensor(index, dtype=draw(st.sampled_from((torch.int64, torch.int32)))), draw(st.booleans())


def test_any_input(device):
    @settings(max_examples=200 if device == "cpu" else 10)
    @given(calls())
    def check(call):
        data, index, descending = call
        segments = Segments.from_index(index.to(device), 6, ignore_index=-1)
        values, indices = segment_sort(data.to(device), segments, descending=descending)
        expected_values, expected_rows = sort_by_loops(data.numpy(), index.numpy(), 6, descending)
        np.testing.assert_array_equal(values.cpu().numpy(), expected_values)
        np.testing.assert_array_equal(indices.cpu().numpy(), expected_rows)
        assert torch.equal(segment_argsort(data.to(device), segments, descending=descending), indices)
        check_runs(data, segments.cpu(), device)

    check()
