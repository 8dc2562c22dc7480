"""Top-k, median, quantile, first and last: numbers written out, and loops in NumPy over any segments."""

import math

import numpy as np
import pytest
import torch
from helpers import gradient, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fastops import Segments, segment_first, segment_last, segment_median, segment_quantile, segment_topk, testing
from fastops.registry import ALL_DTYPES, FLOATING
from fastops.select import INTERPOLATIONS

OFFSETS = [0, 3, 3, 7]
DATA = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
NAN, INF = math.nan, math.inf


# ---- top-k ----


def test_topk(make):
    values, indices = segment_topk(make(DATA), make(OFFSETS), 3)
    same(values, [[4, 3, 1], [0, 0, 0], [9, 5, 2]])
    assert indices.tolist() == [[2, 0, 1], [-1, -1, -1], [5, 4, 6]]


def test_topk_of_the_least(make):
    values, indices = segment_topk(make(DATA), make(OFFSETS), 2, largest=False)
    same(values, [[1, 3], [0, 0], [1, 2]])
    assert indices.tolist() == [[1, 0], [-1, -1], [3, 6]]


def test_topk_of_more_than_there_are(make):
    values, indices = segment_topk(make(DATA), make(OFFSETS), 5, fill_value=-INF)
    same(values, [[4, 3, 1, -INF, -INF], [-INF] * 5, [9, 5, 2, 1, -INF]])
    assert indices.tolist() == [[2, 0, 1, -1, -1], [-1] * 5, [5, 4, 6, 3, -1]]


def test_topk_of_none(make):
    leaf = make([DATA, DATA], requires_grad=True)
    values, indices = segment_topk(leaf, make(OFFSETS), 0, dim=1)
    assert values.shape == indices.shape == (2, 3, 0)
    values.sum().backward()
    assert not leaf.grad.any()


def test_topk_in_the_order_of_rows(make):
    """Which rows does not depend on `sorted`."""
    values, indices = segment_topk(make(DATA), make(OFFSETS), 3, sorted=False)
    same(values, [[3, 1, 4], [0, 0, 0], [5, 9, 2]])
    assert indices.tolist() == [[0, 1, 2], [-1, -1, -1], [4, 5, 6]]


def test_topk_of_ties(make):
    data, offsets = make([2.0, 0.0, 2.0, -0.0, 2.0, 0.0]), make([0, 6])
    assert segment_topk(data, offsets, 4).indices.tolist() == [[0, 2, 4, 1]]
    assert segment_topk(data, offsets, 4, largest=False).indices.tolist() == [[1, 3, 5, 0]]
    assert segment_topk(data, offsets, 2, largest=False, sorted=False).indices.tolist() == [[1, 3]]


def test_topk_of_special_numbers(make):
    """NaN is the largest value, as in torch.topk; infinities are values."""
    data, offsets = make([1.0, NAN, -INF, INF, NAN]), make([0, 5])
    assert segment_topk(data, offsets, 4).indices.tolist() == [[1, 4, 3, 0]]
    assert segment_topk(data, offsets, 3, largest=False).indices.tolist() == [[2, 0, 3]]
    values, indices = segment_topk(make([-INF, -INF]), make([0, 2]), 3)
    same(values, [[-INF, -INF, 0]])
    assert indices.tolist() == [[0, 1, -1]]


@pytest.mark.parametrize("k", (np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)), ids=repr)
def test_k_from_what_stands_for_an_int(make, k):
    assert segment_topk(make(DATA), make(OFFSETS), k).values.shape == (3, 2)


def test_topk_lets_the_gradient_go_to_its_rows(make):
    data, offsets = make(DATA), make(OFFSETS)
    weights = make([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for sorted in (True, False):
        got = gradient(segment_topk, data, offsets, weights, k=2, sorted=sorted)
        expected = [2, 0, 1, 0, 6, 5, 0] if sorted else [1, 0, 2, 0, 5, 6, 0]
        assert got.tolist() == expected


def test_topk_behind_any_dim(make):
    data = make([DATA, DATA[::-1]])[:, :, None]
    values, indices = segment_topk(data, make(OFFSETS), 1, dim=1)
    assert values.shape == (2, 3, 1, 1)
    assert values.flatten().tolist() == [4, 0, 9, 9, 0, 4]
    assert indices.flatten().tolist() == [2, -1, 5, 1, -1, 4]


# ---- median ----


def test_median(make):
    values, indices = segment_median(make(DATA), make(OFFSETS))
    same(values, [3, NAN, 2])
    assert indices.tolist() == [0, -1, 6]


def test_median_of_integers(make):
    values, indices = segment_median(make([3, 1, 4, 1, 5, 9, 2]), make(OFFSETS))
    assert values.tolist() == [3, 0, 2] and indices.tolist() == [0, -1, 6]
    assert segment_median(make([3, 1]), make([0, 0, 2]), fill_value=-7).values.tolist() == [-7, 1]
    with pytest.raises(ValueError, match="segment_median: fill_value must fit in int64, but got nan"):
        segment_median(make([3, 1]), make([0, 2]), fill_value=math.nan)


def test_median_of_ties_and_nans(make):
    """Of rows that tie the first; of NaNs too."""
    data = make([5.0, 1.0, 1.0, 1.0, 0.0, 2.0, NAN, 1.0, NAN, 1.0])
    values, indices = segment_median(data, make([0, 5, 10]))
    same(values, [1, NAN])
    assert indices.tolist() == [1, 6]
    assert gradient(lambda *a: segment_median(*a).values, data, make([0, 5, 10])).tolist() == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]


def test_extreme_integers(make):
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        limits = torch.iinfo(dtype)
        data = make([limits.max, limits.min, limits.max, 1, limits.min], dtype)
        assert segment_median(data, make([0, 5])).values.tolist() == [1]
        assert segment_topk(data, make([0, 5]), 2).indices.tolist() == [[0, 2]]
        assert segment_topk(data, make([0, 5]), 2, largest=False).indices.tolist() == [[1, 4]]


# ---- quantile ----


def test_quantile(make):
    data, offsets = make(DATA), make(OFFSETS)
    same(segment_quantile(data, offsets, 0.5), [3, NAN, 3.5])
    same(segment_quantile(data, offsets, make([0.0, 0.5, 1.0])), [[1, NAN, 1], [3, NAN, 3.5], [4, NAN, 9]])
    same(segment_quantile(data, offsets, make(0.5), fill_value=-1), [3, -1, 3.5])
    assert segment_quantile(data, offsets, make([])).shape == (0, 3)


@pytest.mark.parametrize("q", (0, 1, np.float32(0.5), np.float64(0.25), np.int64(1), True), ids=repr)
def test_q_from_what_stands_for_a_number(make, q):
    if q is True:
        with pytest.raises(TypeError, match="segment_quantile: q must be a number, a torch.Tensor or a NumPy array, but got bool"):
            segment_quantile(make(DATA), make(OFFSETS), q)
    else:
        expected = torch.tensor(DATA[:3]).quantile(float(q))
        assert segment_quantile(make(DATA), make(OFFSETS), q)[0].cpu() == expected


@pytest.mark.parametrize("dtype", FLOATING)
def test_q_of_any_floating_dtype(make, dtype):
    same(segment_quantile(make(DATA), make(OFFSETS), make([0.25, 0.5], dtype)), [[2, NAN, 1.75], [3, NAN, 3.5]])


def test_quantile_behind_any_dim(make):
    data = make([DATA, DATA[::-1]])[:, :, None]
    result = segment_quantile(data, make(OFFSETS), make([0.5, 1.0]), dim=1)
    assert result.shape == (2, 2, 3, 1) and result.is_contiguous()
    same(result[0, 0, :, 0], [3, NAN, 3.5])
    assert segment_quantile(data, make(OFFSETS), 0.5, dim=-2).shape == (2, 3, 1)


def test_quantile_of_special_numbers(make):
    """NaN propagates. An infinity that counts is the result, and one that does not count changes nothing."""
    data = make([1.0, NAN, 3.0, -INF, 1.0, 2.0, INF, INF, INF, -INF, INF, 1.0, 2.0, INF])
    offsets = make([0, 3, 6, 9, 11, 14])
    same(segment_quantile(data, offsets, 0.5), [NAN, 1, INF, NAN, 2])
    same(segment_quantile(data, offsets, 0.25), [NAN, -INF, INF, NAN, 1.5])
    same(segment_quantile(data, offsets, 0.75), [NAN, 1.5, INF, NAN, INF])
    assert gradient(segment_quantile, data, offsets, q=0.75).isfinite().all()
    same(segment_quantile(make([-3e38, 3e38]), make([0, 2]), 0.5), [0])


def test_quantile_lets_the_gradient_go_by_shares(make):
    data, offsets = make([1.0, 2.0, 4.0, 8.0]), make([0, 4])
    weights = make([1.0])
    assert gradient(segment_quantile, data, offsets, weights, q=0.25).tolist() == [0.25, 0.75, 0, 0]
    for interpolation, expected in {
        "lower": [1, 0, 0, 0], "higher": [0, 1, 0, 0], "nearest": [0, 1, 0, 0], "midpoint": [0.5, 0.5, 0, 0]
    }.items():  # fmt: skip
        assert gradient(segment_quantile, data, offsets, weights, q=0.25, interpolation=interpolation).tolist() == expected


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_shares_of_a_row_are_added_before_they_are_rounded(make, dtype):
    """A row that many quantiles select receives the sum of their gradients, rounded once."""
    data, offsets = make([1.0, 2.0], dtype), make([0, 2])
    q = torch.cat((torch.zeros(1), torch.full((512,), 2.0**-12))).to(data.device)
    got = gradient(segment_quantile, data, offsets, q=q)
    exact = torch.tensor([1 + 512 * (1 - 2.0**-12), 512 * 2.0**-12]).to(dtype)
    assert torch.equal(got.cpu(), exact)


def test_quantile_of_half_rounds_once(make):
    """1 + 0.3 * (2049 - 1) in float32, then float16."""
    data = make([1.0, 2048.0], torch.float16)
    same(segment_quantile(data, make([0, 2]), 0.3), torch.tensor([1 + 0.3 * 2047]).half())


def test_quantile_of_more_rows_than_float32_counts():
    """torch.quantile refuses so many; a rank in float32 would be an even number."""
    rows = 2**24 + 3
    data = torch.arange(rows, dtype=torch.float64).flip(0)
    result = segment_quantile(data, torch.tensor([0, rows]), torch.tensor([0.5, 1.0], dtype=torch.float64))
    assert result[:, 0].tolist() == [2**23 + 1, 2**24 + 2]
    assert segment_median(data, torch.tensor([0, rows])).indices.item() == rows - 1 - (2**23 + 1)


# ---- first and last ----


def test_first_and_last(make):
    segments = Segments.from_index(make([2, 0, 2, 0, -1, 2]), 3, ignore_index=-1)
    data = make([1.0, NAN, 3.0, 4.0, 5.0, 6.0])
    same(segment_first(data, segments), [NAN, 0, 1])
    same(segment_last(data, segments, fill_value=-1), [4, -1, 6])
    assert gradient(segment_first, data, segments).tolist() == [1, 1, 0, 0, 0, 0]
    assert gradient(segment_last, data, segments).tolist() == [0, 0, 0, 1, 0, 1]


# ---- loops in NumPy ----


def order_of(rows, descending=False):
    """Ranks of a column: NaN is the largest and equals itself, and so does -0.0 equal 0.0; stable."""
    codes = np.unique(rows, return_inverse=True)[1].reshape(rows.shape)
    return np.argsort(-codes if descending else codes, kind="stable")


def columns(data, segments):
    """Each segment's row numbers and each of its columns, as NumPy has them."""
    data, index = data.cpu(), segments.index.cpu().numpy()
    data = data.double().numpy() if data.is_floating_point() else data.long().numpy()
    for number in range(segments.num_segments):
        members = np.flatnonzero(index == number)
        for column in range(data.shape[1]):
            yield number, column, members, data[members, column]


def check_topk(data, segments, k, largest, sorted):
    values, indices = [part.cpu() for part in segment_topk(data, segments, k, largest=largest, sorted=sorted, fill_value=1)]
    for number, column, members, rows in columns(data, segments):
        chosen = order_of(rows, largest)[:k]
        if not sorted:
            chosen = np.sort(chosen)
        short = max(k - len(chosen), 0)
        assert indices[number, :, column].tolist() == [*members[chosen], *[-1] * short]
        np.testing.assert_array_equal(values[number, :, column].to(torch.float64), [*rows[chosen], *[1] * short])


def check_median(data, segments):
    values, indices = [part.cpu() for part in segment_median(data, segments, fill_value=1)]
    for number, column, members, rows in columns(data, segments):
        value, index = values[number, column].item(), indices[number, column].item()
        if len(rows) == 0:
            assert (value, index) == (1, -1)
        else:
            has_nan = rows.dtype == np.float64 and np.isnan(rows).any()
            expected = np.nan if has_nan else np.sort(rows)[(len(rows) - 1) // 2]
            np.testing.assert_array_equal(value, expected)
            assert index == members[np.flatnonzero(np.isnan(rows) if has_nan else rows == expected)[0]]


def check_quantile(data, segments, q, interpolation):
    result = segment_quantile(data, segments, torch.tensor(q, dtype=torch.float64, device=data.device), interpolation=interpolation)
    assert result.shape == (len(q), segments.num_segments, data.size(1))
    rtol, atol = testing.TOLERANCES[data.dtype]
    for number, column, _, rows in columns(data, segments):
        expected = np.full(len(q), np.nan) if len(rows) == 0 else np.quantile(rows, q, method=interpolation)
        np.testing.assert_allclose(result[:, number, column].cpu().double(), expected, rtol=rtol, atol=atol)


LENGTHS = {
    "short": (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 0),
    "vectors": (31, 32, 33, 64, 65, 127, 129, 300),
    "long": (8191, 0, 8192, 8193, 3),
    "several_threads": (65536, 1, 65537, 70001),
}


@pytest.mark.parametrize("grouping", ("offsets", "unsorted32", "ignored"))
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("pattern", LENGTHS)
def test_against_numpy(device, pattern, dtype, grouping):
    if device == "cuda" and pattern in ("long", "several_threads"):
        pytest.skip("an interpreter takes long: test_long_segments_on_cuda has fewer rows")
    segments = testing.make_segments(LENGTHS[pattern], grouping, device=device)
    features = {"several_threads": 1 + (grouping == "ignored"), "long": 3}.get(pattern, 5)
    for kind in ("normal", "special") if dtype.is_floating_point else ("dyadic",):
        data = testing.make_data((segments.num_rows, features), dtype, kind=kind).to(device)
        check_topk(data, segments, 3, True, True)
        check_topk(data, segments, 9, False, False)
        check_median(data, segments)
        if dtype.is_floating_point and kind == "normal":
            check_quantile(data, segments, [0.0, 0.1, 0.5, 0.999, 1.0], "linear")


def test_long_segments_on_cuda(cuda):
    for dtype in (torch.float32, torch.int16, torch.float64):
        segments = testing.make_segments((3, 2500, 0, 1100, 40, 3000), "unsorted", device=cuda)
        data = testing.make_data((segments.num_rows, 2), dtype, kind="special").to(cuda)
        check_topk(data, segments, 3, True, True)
        check_topk(data, segments, 5, False, False)
        check_median(data, segments)
    data = testing.make_data((segments.num_rows, 2), torch.float32, kind="normal").to(cuda)
    check_quantile(data, segments, [0.1, 0.9], "linear")


lengths = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 40)), max_size=8)


@given(
    lengths, st.sampled_from(testing.GROUPINGS), st.sampled_from(ALL_DTYPES), st.sampled_from(("normal", "special", "dyadic")),
    st.integers(0, 45), st.booleans(), st.booleans(), st.integers(1, 4), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=150)
def test_any_topk_and_median(counts, grouping, dtype, kind, k, largest, sorted, features, seed):
    segments = testing.make_segments(tuple(counts), grouping, seed=seed)
    data = testing.make_data((segments.num_rows, features), dtype, kind=kind, seed=seed)
    check_topk(data, segments, k, largest, sorted)
    check_median(data, segments)


@given(
    lengths, st.sampled_from(testing.GROUPINGS), st.sampled_from(FLOATING), st.sampled_from(INTERPOLATIONS),
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), max_size=4),
    st.integers(1, 4), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=150)
def test_any_quantile(counts, grouping, dtype, interpolation, q, features, seed):
    segments = testing.make_segments(tuple(counts), grouping, seed=seed)
    data = testing.make_data((segments.num_rows, features), dtype, seed=seed)
    check_quantile(data, segments, q, interpolation)


@given(lengths.filter(len), st.sampled_from(INTERPOLATIONS), st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_gradient_of_any_quantile_is_that_of_torch(counts, interpolation, q, seed):
    segments = testing.make_segments(tuple(counts), "unsorted", seed=seed)
    data = testing.make_data((segments.num_rows,), torch.float64, kind="distinct", seed=seed)
    got = gradient(segment_quantile, data, segments, q=q, interpolation=interpolation)
    leaf = data.clone().requires_grad_()
    for number in range(segments.num_segments):
        part = leaf[segments.index == number]
        if len(part):
            part.quantile(q, interpolation=interpolation).backward()
    expected = torch.zeros_like(data) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_derivatives_of_every_interpolation(device, interpolation):
    q = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64, device=device)
    for sample in list(testing.small_inputs("segment_quantile", device))[::3]:
        data, segments = sample.args

        def f(x):
            return segment_quantile(x, segments, q, interpolation=interpolation, **sample.kwargs)

        torch.autograd.gradcheck(f, (data,))
        torch.autograd.gradgradcheck(f, (data,))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.int64))
def test_bits_for_any_number_of_threads(dtype):
    """A segment that all threads take, among short ones."""
    segments = testing.make_segments((3, 200_000, 0, 7, 66_000), "unsorted")
    data = testing.make_data((segments.num_rows, 2), dtype, kind="normal")
    results = []
    before = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append((*segment_topk(data, segments, 20), *segment_median(data, segments, fill_value=0)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other))


def test_compiled_with_another_k():
    compiled = torch.compile(lambda x, s, k: segment_topk(x, s, k).values, fullgraph=True, backend="aot_eager")
    for k in (1, 2, 4):
        data, offsets = torch.tensor(DATA), torch.tensor(OFFSETS)
        assert torch.equal(compiled(data, offsets, k), segment_topk(data, offsets, k).values)


def test_nothing_waits_for_the_device(cuda):
    """Neither of long segments nor of several quantiles."""
    cudasim = pytest.importorskip("cudasim")
    lengths = (3, 0, 1500, 4)
    segments = testing.make_segments(lengths, device=cuda)
    data = testing.make_data((sum(lengths),), torch.float32).to(cuda)
    q = torch.tensor([0.1, 0.5], device=cuda, dtype=torch.float64)
    before = cudasim.syncs()
    tops = [segment_topk(data, segments, k) for k in (2, 1600)]
    segment_median(data, segments)
    segment_first(data, segments)
    segment_quantile(data, segments, 0.3)
    segment_quantile(data, segments, q, interpolation="nearest")
    assert cudasim.syncs() == before
    assert tops[1].values[2, :1500].tolist() == sorted(data[3:1503].tolist(), reverse=True)


def test_quantile_beside_infinities(make):
    """A share that is rounded to 1 is all of the row, not 1 of it and 0 times an infinity."""
    for infinity in (-INF, INF):
        data = make([infinity] * 101)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert segment_quantile(data.to(dtype), make([0, 101]), 0.29).tolist() == [infinity]
    assert segment_quantile(make([-INF, 1.0]), make([0, 2]), 1 - 1e-9).tolist() == [1]
