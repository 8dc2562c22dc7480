"""The rules that hold for every operation, with the expected numbers written out.

Each test is named after what it decides. Nothing here is computed by the reference.
"""

import pytest
import torch
from helpers import gradient, same

import fastops
from fastops import (
    Segments,
    segment_all,
    segment_amax,
    segment_amin,
    segment_any,
    segment_argmax,
    segment_argmin,
    segment_broadcast,
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_sum,
)
from fastops.registry import OPS

NAN, INF = float("nan"), float("inf")


def test_canonical_example(make):
    offsets = make([0, 3, 3, 7])
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        data = make([3, 1, 4, 1, 5, 9, 2], dtype)
        same(segment_sum(data, offsets), [8, 0, 17])
        same(segment_prod(data, offsets), [12, 1, 90])
        same(segment_amax(data, offsets), [4, 0, 9])
        same(segment_amin(data, offsets), [1, 0, 1])
        same(segment_argmax(data, offsets), [2, -1, 5])
        same(segment_argmin(data, offsets), [1, -1, 3])
        same(segment_max(data, offsets).values, [4, 0, 9])
        same(segment_max(data, offsets).indices, [2, -1, 5])
        same(segment_min(data, offsets).values, [1, 0, 1])
        same(segment_min(data, offsets).indices, [1, -1, 3])
        same(segment_any(data - 3, offsets), [True, False, True])
        same(segment_all(data - 3, offsets), [False, True, True])
        same(segment_broadcast(make([8, 0, 17], dtype), offsets), [8, 8, 8, 17, 17, 17, 17])
    same(segment_mean(make([3.0, 1, 5, 1, 5, 9, 2]), offsets), [3, 0, 4.25])


def test_canonical_example_in_any_order(make):
    data = make([9.0, 3, 1, 5, 2, 4, 1])
    segments = Segments.from_index(make([2, 0, 2, 2, 2, 0, 0]), 3)
    same(segments.order, [1, 5, 6, 0, 2, 3, 4])
    same(segment_sum(data, segments), [8, 0, 17])
    same(segment_argmax(data, segments), [5, -1, 0])
    same(segment_argmin(data, segments), [6, -1, 2])
    same(segment_broadcast(make([8.0, 0, 17]), segments), [17, 8, 17, 17, 17, 8, 8])


# ---- 1: undefined for a segment -> fill_value ----


def test_rule_1_segments_without_rows_are_filled(make):
    data, offsets = make([1.0, 2.0]), make([0, 0, 2, 2])
    same(segment_sum(data, offsets), [0, 3, 0])
    same(segment_mean(data, offsets), [0, 1.5, 0])
    same(segment_prod(data, offsets), [1, 2, 1])
    same(segment_amax(data, offsets), [0, 2, 0])
    same(segment_amin(data, offsets), [0, 1, 0])
    same(segment_max(data, offsets).values, [0, 2, 0])
    same(segment_max(data, offsets).indices, [-1, 1, -1])
    same(segment_argmin(data, offsets), [-1, 0, -1])
    same(segment_any(data, offsets), [False, True, False])
    same(segment_all(data, offsets), [True, True, True])
    same(segment_sum(data, offsets, fill_value=-7), [-7, 3, -7])
    same(segment_mean(data, offsets, fill_value=NAN), [NAN, 1.5, NAN])
    same(segment_amax(data, offsets, fill_value=-INF), [-INF, 2, -INF])
    same(segment_max(data, offsets, fill_value=0.5).values, [0.5, 2, 0.5])
    same(segment_max(data, offsets, fill_value=0.5).indices, [-1, 1, -1])
    same(segment_argmax(data, offsets, fill_value=9), [9, 1, 9])
    same(segment_any(data, offsets, fill_value=True), [True, True, True])
    same(segment_all(data, offsets, fill_value=False), [False, True, False])


@pytest.mark.parametrize(
    "function", (segment_sum, segment_mean, segment_prod, segment_amax, segment_amin, segment_max, segment_min)
)
def test_rule_1_no_gradient_flows_to_a_filled_entry(make, function):
    data, offsets = make([1.0, 2.0]), make([0, 0, 2, 2])
    upstream = make([NAN, 0.0, INF])  # whatever arrives at a filled entry stays there
    same(gradient(function, data, offsets, upstream), [0, 0])


# ---- 2: NaN propagates ----


def test_rule_2_nan_propagates(make):
    data, offsets = make([1, NAN, 2, 3, 4, 0, NAN]), make([0, 3, 5, 7])
    for function in (segment_sum, segment_mean, segment_prod):
        assert function(data, offsets).isnan().tolist() == [True, False, True]
    same(segment_amax(data, offsets), [NAN, 4, NAN])
    same(segment_amin(data, offsets), [NAN, 3, NAN])
    same(segment_max(data, offsets).indices, [1, 4, 6])
    same(segment_min(data, offsets).indices, [1, 3, 6])
    same(segment_argmax(data, offsets), [1, 4, 6])
    same(segment_argmin(data, offsets), [1, 3, 6])
    same(segment_any(make([NAN, 0.0]), make([0, 1, 2])), [True, False])
    same(segment_all(make([NAN, 0.0]), make([0, 1, 2])), [True, False])


def test_rule_2_the_first_nan_is_returned_and_all_share_the_gradient(make):
    data, offsets = make([1, NAN, INF, NAN]), make([0, 4])
    same(segment_argmax(data, offsets), [1])
    same(segment_argmin(data, offsets), [1])
    same(gradient(segment_amax, data, offsets), [0, 0.5, 0, 0.5])
    same(gradient(segment_amin, data, offsets), [0, 0.5, 0, 0.5])
    same(gradient(segment_max, data, offsets), [0, 1, 0, 0])


# ---- 3: ties ----


def test_rule_3_the_smallest_row_number_wins(make):
    data = make([2.0, 7, 7, 1, 1, 0.0, -0.0, -0.0, 0.0])
    offsets = make([0, 5, 7, 9])
    same(segment_argmax(data, offsets), [1, 5, 7])
    same(segment_argmin(data, offsets), [3, 5, 7])
    unsorted = Segments.from_index(make([1, 0, 1, 0, 1]), 2)
    same(segment_argmax(make([5.0, 5, 5, 5, 5]), unsorted), [1, 0])
    same(segment_argmin(make([5, 5, 5, 5, 5]), unsorted), [1, 0])


def test_rule_3_the_smallest_row_number_wins_in_long_segments(make):
    """Where several threads, lanes or blocks each hold one of the equal rows."""
    for length in (64, 1000, 5000):
        data = torch.zeros(length + 1, 2)
        data[17:, 0] = 1
        data[length // 2 :, 1] = 1
        data = data.to(make([0]).device)
        offsets = make([0, length, length + 1])
        same(segment_argmax(data, offsets), [[17, length // 2], [length, length]])
        same(segment_max(data, offsets).indices, [[17, length // 2], [length, length]])
        same(segment_argmin(data, offsets), [[0, 0], [length, length]])


def test_rule_3_negative_zero_equals_zero(make):
    data, offsets = make([-0.0, 0.0]), make([0, 2])
    same(gradient(segment_amax, data, offsets), [0.5, 0.5])
    same(gradient(segment_max, data, offsets), [1, 0])
    same(segment_any(data, offsets), [False])


def test_rule_3_gradients_of_ties(make):
    data, offsets = make([3.0, 3, 1, 7, 2, 2, 2]), make([0, 3, 4, 7])
    third = 1 / 3
    expected = torch.tensor([0.5, 0.5, 0, 1, third, third, third])
    torch.testing.assert_close(gradient(segment_amax, data, offsets).cpu(), expected)
    same(gradient(segment_max, data, offsets), [1, 0, 0, 1, 1, 0, 0])
    same(gradient(segment_min, data, offsets), [0, 0, 1, 1, 1, 0, 0])
    same(gradient(segment_amax, data, offsets, make([-1.0, -1, -3])), [-0.5, -0.5, 0, -1, -1, -1, -1])


# ---- 4: infinities are values ----


def test_rule_4_infinities_are_values(make):
    data, offsets = make([-INF, -INF, 0, 1, INF, -INF]), make([0, 2, 4, 6, 6])
    same(segment_sum(data, offsets), [-INF, 1, NAN, 0])
    same(segment_mean(data, offsets), [-INF, 0.5, NAN, 0])
    same(segment_amax(data, offsets), [-INF, 1, INF, 0])
    same(segment_amin(data, offsets), [-INF, 0, -INF, 0])
    same(segment_argmax(data, offsets), [0, 3, 4, -1])
    same(segment_argmin(data, offsets), [0, 2, 5, -1])
    same(segment_max(data, offsets).values, [-INF, 1, INF, 0])
    same(segment_prod(data, offsets), [INF, 0, -INF, 1])
    for function in (segment_sum, segment_mean, segment_amax, segment_amin, segment_max, segment_min):
        assert gradient(function, data, offsets).isfinite().all()


def test_rule_4_the_lowest_numbers_are_values(make):
    """Emptiness is decided by length: the number that a sentinel would be is as good as any other."""
    offsets = make([0, 2, 2])
    for dtype in (torch.float16, torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        same(segment_amax(make([limits.min] * 2, dtype), offsets), [limits.min, 0])
        same(segment_amin(make([limits.max] * 2, dtype), offsets), [limits.max, 0])
        same(segment_argmax(make([limits.min] * 2, dtype), offsets), [0, -1])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        for value in (limits.min, limits.max):
            same(segment_amax(make([value] * 2, dtype), offsets), [value, 0])
            same(segment_amin(make([value] * 2, dtype), offsets), [value, 0])
            same(segment_max(make([value] * 2, dtype), offsets).indices, [0, -1])


# ---- 5: accumulation ----


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_rule_5_half_accumulates_in_float32(make, dtype):
    data = torch.ones(4096, dtype=dtype).to(make([0]).device)
    same(segment_sum(data, make([0, 4096])), [4096])
    same(segment_mean(data, make([0, 4096])), [1])
    # 2048 + 1 + 1: neither type has 2049, so that rounding after each step would stop at 2048.
    same(segment_sum(make([2048, 1, 1], torch.float16), make([0, 3])), [2050])
    same(segment_prod(make([256, 256, 0.5, 0.0078125], torch.float16), make([0, 4])), [256])


def test_rule_5_integers_are_exact(make):
    same(segment_sum(make([2**53, 1, 1]), make([0, 3])), [9007199254740994])
    same(segment_sum(make([2**62, 2**62]), make([0, 2])), [-(2**63)])  # wraps, as torch.sum
    same(segment_prod(make([3] * 39), make([0, 39])), [4052555153018976267])
    same(segment_amax(make([2**53, 2**53 + 1]), make([0, 2])), [2**53 + 1])
    same(segment_argmax(make([2**62, 2**62 + 1, 2**62]), make([0, 3])), [1])
    same(segment_amin(make([-(2**31), -(2**31) + 1], torch.int32), make([0, 2])), [-(2**31)])


def test_rule_5_mean_does_not_overflow_where_its_result_does_not(make):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        big = torch.finfo(dtype).max
        same(segment_mean(make([big, big, big, -big, -big], dtype), make([0, 3, 5])), [big, -big])
        assert gradient(segment_mean, make([big] * 4, dtype), make([0, 4])).tolist() == [0.25] * 4
    same(segment_mean(make([100.0] * 1000, torch.float16), make([0, 1000])), [100])
    same(segment_sum(make([100.0] * 1000, torch.float16), make([0, 1000])), [INF])


def test_rule_5_a_product_with_a_zero_is_zero(make):
    data = make([1e30, 1e30, 0, 0, 1e30, 1e30, 1e30, 0, 1e30])
    same(segment_prod(data, make([0, 3, 6, 9])), [0, 0, 0])
    same(segment_prod(make([INF, 0.0, NAN, 0.0]), make([0, 2, 4])), [NAN, NAN])
    long = torch.full((3000,), 10.0)
    long[1234] = 0
    same(segment_prod(long.to(data.device), make([0, 3000])), [0])


def test_rule_5_gradient_of_products_with_zeros(make):
    data, offsets = make([0.0, 2, 3, 0, 0, 5, 4, 5]), make([0, 3, 6, 8])
    same(segment_prod(data, offsets), [0, 0, 20])
    same(gradient(segment_prod, data, offsets), [6, 0, 0, 0, 0, 0, 5, 4])
    hessian = torch.autograd.functional.hessian(lambda x: segment_prod(x, make([0, 3])).sum(), make([0.0, 2, 3]))
    same(hessian, [[0, 3, 2], [3, 0, 0], [2, 0, 0]])
    hessian = torch.autograd.functional.hessian(lambda x: segment_prod(x, make([0, 3])).sum(), make([0.0, 0, 3]))
    same(hessian, [[0, 3, 0], [3, 0, 0], [0, 0, 0]])


# ---- 6: dtypes ----


def test_rule_6_integer_sums_and_products_are_int64(make):
    same(segment_sum(make([100] * 200, torch.int8), make([0, 200])), [20000])
    same(segment_sum(make([200] * 200, torch.uint8), make([0, 200])), [40000])
    same(segment_sum(make([True] * 3), make([0, 3])), [3])
    assert segment_sum(make([1], torch.int16), make([0, 1])).dtype == torch.int64
    assert segment_prod(make([True]), make([0, 1])).dtype == torch.int64
    assert segment_sum(make([1], torch.int64), make([0, 1]), dtype=torch.int32).dtype == torch.int32
    same(segment_sum(make([100, 100, 100], torch.uint8), make([0, 3]), dtype=torch.uint8), [44])
    same(segment_sum(make([1, 2], torch.int32), make([0, 2]), dtype=torch.float16), [3])
    same(segment_mean(make([1, 2], torch.int32), make([0, 2]), dtype=torch.float32), [1.5])
    same(segment_amax(make([True, False]), make([0, 2])), [True])
    same(segment_amin(make([True, False]), make([0, 2])), [False])


def test_rule_6_any_and_all_are_bool(make):
    for dtype in (torch.float16, torch.int64, torch.bool):
        assert segment_any(make([1], dtype), make([0, 1])).dtype == torch.bool
    assert segment_all(make([1], torch.uint8), make([0, 1])).dtype == torch.uint8  # as torch.all
    same(segment_any(make([0, 0, 5, 0], torch.uint8), make([0, 2, 4])), [0, 1])
    same(segment_any(make([0, 2**40]), make([0, 1, 2])), [False, True])
    same(segment_any(make([1e-300], torch.float64), make([0, 1])), [True])


# ---- 8 to 10: gradients, layouts, sizes ----


def test_rule_8_second_derivative_of_a_square(make):
    offsets = make([0, 2, 3])
    hessian = torch.autograd.functional.hessian(lambda x: segment_sum(x, offsets).square().sum(), make([0.0, 1, 2]))
    same(hessian, [[2, 2, 0], [2, 2, 0], [0, 0, 2]])


def test_rule_9_any_strides(make):
    data = make([[1, 2, 3], [4, 5, 6]]).t()
    same(segment_sum(data, Segments.from_index(make([0, 1, 0]), 2)), [[4, 10], [2, 5]])
    row = make([1.0, 2.0]).expand(5, 2)
    same(segment_sum(row, make([0, 3, 5])), [[3, 6], [2, 4]])
    same(segment_sum(make(2.5).expand(4), make([0, 1, 4])), [2.5, 7.5])


def test_rule_10_nothing_there(make):
    empty = make([]).reshape(0, 2)
    same(segment_sum(empty, make([0, 0])), [[0, 0]])
    same(segment_max(empty, make([0, 0])).indices, [[-1, -1]])
    assert segment_sum(empty, make([0])).shape == (0, 2)
    assert segment_broadcast(make([[1.0, 2.0]]), make([0, 0])).shape == (0, 2)


# ---- rows that belong to no segment ----


def test_ignored_rows_count_in_nothing(make):
    index = make([-1, 0, 2, -1, 0, -1])
    segments = Segments.from_index(index, 3, ignore_index=-1)
    data = make([100.0, 1, 5, NAN, 2, INF])
    same(segment_sum(data, segments), [3, 0, 5])
    same(segment_mean(data, segments), [1.5, 0, 5])
    same(segment_prod(data, segments), [2, 1, 5])
    same(segment_max(data, segments).values, [2, 0, 5])
    same(segment_argmax(data, segments), [4, -1, 2])
    same(segment_any(data, segments), [True, False, True])
    same(segment_all(make([0.0, 1, 1, 0, 1, 0]), segments), [True, True, True])
    same(segment_broadcast(make([7.0, 8, 9]), segments), [0, 7, 9, 0, 7, 0])
    for function in (segment_sum, segment_mean, segment_prod, segment_amax, segment_amin, segment_max, segment_min):
        found = gradient(function, data, segments)
        same(found[[0, 3, 5]], [0, 0, 0])
    same(gradient(segment_broadcast, make([7.0, 8, 9]), segments), [2, 0, 1])


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable and not op.takes_values], ids=lambda op: op.name)
def test_no_derivative_sees_ignored_rows(op, device):
    """Whatever stands there, finite or not, those of first and second order are what they are without."""
    index = torch.tensor([1, -1, 0, 1, -1, 1, 0, -1], device=device)
    segments = Segments.from_index(index, 2, ignore_index=-1)
    belongs = index >= 0

    def derivatives(odd):
        leaf = torch.tensor([0.5, odd, 2.0, -1.0, odd, 1.5, 0.25, odd], dtype=torch.float64, device=device).requires_grad_()
        result = op.fn(leaf, segments)
        result = result[0] if isinstance(result, tuple) else result
        back = torch.linspace(1, 2, result.numel(), dtype=result.dtype, device=device).reshape(result.shape).requires_grad_()
        (first,) = torch.autograd.grad(result, leaf, back, create_graph=True)
        square = first.pow(2).sum()
        second = torch.autograd.grad(square, (leaf, back), allow_unused=True, materialize_grads=True) if square.requires_grad else ()
        return [first.detach(), *second]

    plain = derivatives(1.0)
    same(plain[0][~belongs], [0, 0, 0])
    for odd in (100.0, 1e300, NAN, INF, -INF):
        for found, expected in zip(derivatives(odd), plain):
            assert torch.equal(found, expected), odd


def test_all_rows_ignored(make):
    """`order` has no entries then, which is not the same as no order."""
    segments = Segments.from_index(make([-1, -1, -1]), 2, ignore_index=-1)
    assert segments.order.tolist() == []
    data = make([1.0, NAN, INF])
    same(segment_sum(data, segments), [0, 0])
    same(segment_prod(data, segments), [1, 1])
    same(segment_argmax(data, segments), [-1, -1])
    same(segment_broadcast(make([1.0, 2.0]), segments), [0, 0, 0])
    for function in (segment_sum, segment_mean, segment_prod, segment_amax, segment_max):
        same(gradient(function, data, segments), [0, 0, 0])
    same(gradient(segment_broadcast, make([1.0, 2.0]), segments), [0, 0])


# ---- 12: errors leave everything as it was ----


def test_rule_12_a_failed_call_changes_nothing(make):
    data, offsets = make([3.0, 1, 4]), make([0, 2, 5])
    kept = data.clone(), offsets.clone()
    for bad in (
        lambda: segment_sum(data, Segments.from_offsets(offsets)),
        lambda: segment_mean(data.long(), make([0, 3])),
    ):
        with pytest.raises((ValueError, TypeError)):
            bad()
    assert torch.equal(data, kept[0]) and torch.equal(offsets, kept[1])
    same(segment_sum(data, make([0, 3])), [8])


def test_the_module_has_what_it_promises():
    for name in fastops.__all__:
        assert getattr(fastops, name).__doc__
    assert issubclass(fastops.DeviceMismatchError, RuntimeError)
