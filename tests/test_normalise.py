"""Softmax and its relatives, variance and standard deviation: the rules with the numbers written out, the public cases,
autocast."""

import math

import pytest
import torch
from helpers import close, gradient, same

from fastops import (
    Segments,
    segment_log_softmax,
    segment_logsumexp,
    segment_mean,
    segment_prod,
    segment_softmax,
    segment_std,
    segment_sum,
    segment_var,
    testing,
)

NAN, INF = float("nan"), float("inf")


# ---- public cases ----


def test_iss_24_all_minus_infinity(make):
    data, offsets = make([-INF, -INF, 0.0, 1.0]), make([0, 2, 4])
    close(segment_logsumexp(data, offsets), [-INF, 1.31326169])
    close(gradient(segment_logsumexp, data, offsets), [0, 0, 0.26894142, 0.73105858])
    close(segment_softmax(data, offsets), [0, 0, 0.26894142, 0.73105858])
    close(segment_log_softmax(data, offsets), [-INF, -INF, -1.31326169, -0.31326169])
    weights = make([1.0, 2.0, 1.0, 0.0])
    close(gradient(segment_softmax, data, offsets, weights), [0, 0, 0.19661193, -0.19661193], rtol=1e-5)
    close(gradient(segment_log_softmax, data, offsets, weights), [0, 0, 0.73105858, -0.73105858], rtol=1e-5)


def test_iss_25_std_of_constant_and_single_rows(make):
    data, offsets = make([2.0, 2, 2, 1, 3, 5]), make([0, 3, 5, 6])
    close(segment_std(data, offsets), [0, 1.41421356, 0])
    close(gradient(segment_std, data, offsets), [0, 0, 0, -0.70710678, 0.70710678, 0])
    close(segment_std(data, offsets, correction=0), [0, 1, 0])
    close(gradient(segment_std, data, offsets, correction=0), [0, 0, 0, -0.5, 0.5, 0])
    same(segment_std(data, offsets, fill_value=NAN), [0, math.sqrt(2), NAN])


def test_iss_33_large_scores(make):
    data, offsets = make([1000.0, 1001, -1000, -1000]), make([0, 2, 4])
    close(segment_softmax(data, offsets), [0.26894142, 0.73105858, 0.5, 0.5])
    close(segment_log_softmax(data, offsets), [-1.3132617, -0.3132617, -0.6931472, -0.6931472])
    close(segment_logsumexp(data, offsets), [1001.3132617, -999.3068528])


def test_iss_35_logsumexp_of_nothing(make):
    segments = Segments.from_index(make([1, 1, 4]), 6)
    data = make([0.0, 1, 4])
    close(segment_logsumexp(data, segments), [-INF, 1.31326169, -INF, -INF, 4, -INF])
    weights = make([0.0, 1, 0, 0, 1, 0])
    close(gradient(segment_logsumexp, data, segments, weights), [0.26894142, 0.73105858, 1])
    assert not gradient(segment_logsumexp, data, segments).isnan().any()


def test_iss_45_gradient_of_softmax(make):
    segments = Segments.from_index(make([0, 0, 1]))
    data, weights = make([0, math.log(2), 5.0]), make([1.0, 0, 3])
    close(segment_softmax(data, segments), [1 / 3, 2 / 3, 1])
    close(gradient(segment_softmax, data, segments, weights), [2 / 9, -2 / 9, 0], atol=1e-7)


def test_iss_80_plus_infinity(make):
    data, offsets = make([0.0, INF, 1, 2]), make([0, 2, 4])
    close(segment_logsumexp(data, offsets), [INF, 2.31326169])
    close(segment_softmax(data, offsets), [NAN, NAN, 0.26894142, 0.73105858])  # as torch.softmax
    close(segment_log_softmax(data, offsets), [NAN, NAN, -1.31326169, -0.31326169])


@pytest.mark.parametrize("name", ("softmax", "log_softmax", "logsumexp", "var", "std"))
def test_iss_84_forward_mode(name, device):
    import fastops

    function = getattr(fastops, f"segment_{name}")
    segments = Segments.from_index(torch.tensor([0, 0, 2, 2, 2], device=device), 3)
    data = torch.tensor([2.0, 4, 6, 5, 1], dtype=torch.float64, device=device)
    tangent = torch.tensor([1.0, 3, 5, 0, -2], dtype=torch.float64, device=device)
    options = {"fill_value": 0} if name == "logsumexp" else {}
    _, derivative = torch.func.jvp(lambda x: function(x, segments, **options), (data,), (tangent,))
    jacobian = torch.autograd.functional.jacobian(lambda x: function(x, segments, **options), data)
    torch.testing.assert_close(derivative, jacobian @ tangent)
    assert derivative.isfinite().all()


# ---- rules ----


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("features", (1, 2, 3, 8, 20, 70))
@pytest.mark.parametrize("length", (1, 2, 7, 255, 257, 1024, 2049, 5000))
def test_against_torch(device, length, features, dtype):
    """One segment is the torch namesake along dim 0, however long and wide, among others."""
    if length * features > 20_000 and device != "cpu":
        pytest.skip("an interpreter takes long")
    offsets = torch.tensor([0, 3, 3 + length, 3 + length + 2], device=device)
    rows = testing.make_data((length + 5, features), dtype, kind="normal", seed=length + features)
    data, part = rows.to(device), rows[3:-2].double()
    tolerance = testing.TOLERANCES[dtype][0]
    for function, expected in (
        (segment_softmax, part.softmax(0)),
        (segment_log_softmax, part.log_softmax(0)),
        (segment_logsumexp, part.logsumexp(0)),
        (segment_var, part.var(0) if length > 1 else torch.zeros(features)),
        (segment_std, part.std(0) if length > 1 else torch.zeros(features)),
    ):
        result = function(data, offsets).cpu()
        result = result[3:-2] if len(result) == len(rows) else result[1]
        torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_probabilities(device):
    segments = testing.make_segments(testing.PATTERNS["one_giant"], "unsorted", device=device)
    data = testing.make_data((segments.num_rows, 3), torch.float32, kind="normal").to(device)
    result = segment_softmax(data * 5, segments)
    assert (result >= 0).all()
    total = segment_sum(result, segments)
    torch.testing.assert_close(total, (segments.lengths > 0).float()[:, None].expand_as(total))
    torch.testing.assert_close(segment_softmax(data + 100, segments), segment_softmax(data, segments), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", (0.1, -3.7e20, 1e-30, 65504.0))
@pytest.mark.parametrize("length", (2, 3, 33, 700, 5001))
def test_variance_of_equal_rows_is_zero(device, length, value):
    data = torch.full((length, 2), value, device=device, requires_grad=True)
    offsets = torch.tensor([0, length], device=device)
    for function in (segment_var, segment_std):
        result = function(data, offsets)
        assert result.tolist() == [[0, 0]]
        (grad,) = torch.autograd.grad(result.sum(), data)
        assert not grad.any()


def test_variance_does_not_cancel(device):
    """Far from zero the difference of the mean square and the squared mean has no digit left."""
    data = (torch.arange(1000).remainder(2).float() + 1e6).to(device)
    offsets = torch.tensor([0, 1000], device=device)
    close(segment_var(data, offsets, correction=0), [0.25], rtol=1e-2)  # a mean of floats is off by up to 0.03 there
    close(segment_std(data, offsets, correction=0), [0.5], rtol=1e-2)


@pytest.mark.parametrize("features", (1, 4, 20, 70))
@pytest.mark.parametrize("length", (20, 1000, 5000))
def test_variance_far_from_zero(device, length, features):
    """On the CPU rows are counted from the first of their segment; on CUDA means are floats, as torch's are there."""
    data = (torch.randn(length, features, dtype=torch.float64, generator=testing.make_generator(3)) * 0.01 + 100).float()
    expected = data.double().var(0)
    result = segment_var(data.to(device), torch.tensor([0, length], device=device))[0].cpu().double()
    torch.testing.assert_close(result, expected, rtol=2e-6 if device == "cpu" else 2e-3, atol=0)


def test_std_hides_no_nan(make):
    """Of a segment with a NaN no gradient is a number; of equal rows it is 0."""
    data = make([1.0, torch.nan, 2.0, 5.0, 5.0]).requires_grad_()
    segment_std(data, make([0, 3, 5])).sum().backward()
    same(data.grad, [torch.nan] * 3 + [0.0] * 2)
    change = torch.func.jvp(lambda x: segment_std(x, make([0, 3, 5])), (data.detach(),), (torch.ones_like(data),))[1]
    same(change, [torch.nan, 0.0])


def test_a_huge_value_changes_no_other_segment(device):
    data = testing.make_data((64, 3), torch.float32, kind="normal").to(device)
    offsets = torch.tensor([0, 20, 44, 64], device=device)
    other = data.clone()
    other[30] = 3e38
    for function in (segment_softmax, segment_log_softmax):
        one, two = function(data, offsets), function(other, offsets)
        assert torch.equal(one[:20], two[:20]) and torch.equal(one[44:], two[44:])
    for function in (segment_logsumexp, segment_var, segment_std):
        one, two = function(data, offsets), function(other, offsets)
        assert torch.equal(one[[0, 2]], two[[0, 2]])


def test_correction(make):
    data, offsets = make([1.0, 3, 5, 7, 2]), make([0, 4, 5, 5])
    same(segment_var(data, offsets, correction=0), [5, 0, 0])
    close(segment_var(data, offsets), [20 / 3, 0, 0])
    same(segment_var(data, offsets, correction=2, fill_value=-1), [10, -1, -1])
    same(segment_var(data, offsets, correction=4, fill_value=-1), [-1, -1, -1])
    same(segment_var(data, offsets, correction=1.5), [8, 0, 0])
    same(gradient(segment_var, data, offsets, correction=2), [-3, -1, 1, 3, 0])
    same(gradient(segment_var, data, offsets, correction=4), [0, 0, 0, 0, 0])


def test_rows_of_no_segment(make):
    segments = Segments.from_index(make([1, -1, 0, 1, -1]), 2, ignore_index=-1)
    data = make([1.0, NAN, 3, 1, INF])
    for function, expected in ((segment_softmax, [0.5, 0, 1, 0.5, 0]), (segment_log_softmax, [-math.log(2), 0, 0, -math.log(2), 0])):
        close(function(data, segments), expected)
        result = gradient(function, data, segments, make([1.0, 5, 2, 0, 7]))
        assert result[[1, 4]].tolist() == [0, 0] and result.isfinite().all()
    close(segment_logsumexp(data, segments), [3, 1 + math.log(2)])
    close(segment_var(data, segments), [0, 0])


def test_logsumexp_of_half_has_the_gradient_of_float(device):
    """exp(x - result) with the result rounded to 16 bits would be off by a fifth here."""
    data = torch.full((64,), 40.0, dtype=torch.bfloat16, device=device)
    grad = gradient(segment_logsumexp, data, torch.tensor([0, 64], device=device))
    close(grad, [1 / 64] * 64)


def second(function, data, offsets, upstream, direction):
    leaf = data.detach().clone().requires_grad_()
    upstream = upstream.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf, offsets), leaf, upstream, create_graph=True)
    return torch.autograd.grad(first, (upstream, leaf), direction)


def test_no_nan_comes_from_what_is_filled_or_left_out(make):
    data, offsets = make([1.0, 2, NAN, 1, 2]), make([0, 2, 3, 5])
    for function in (segment_var, segment_std):
        to_upstream, to_data = second(function, data, offsets, make([1.0, NAN, 1]), torch.ones_like(data))
        assert to_upstream.isfinite().all() and to_data.isfinite().all()
    segments = Segments.from_index(make([0, -1, 0, 1, 1]), 2, ignore_index=-1)
    for function in (segment_var, segment_std, segment_softmax, segment_log_softmax, segment_logsumexp):
        upstream = torch.ones_like(function(make([1.0, 5, 2, 1, 3]), segments))
        for row in second(function, make([1.0, NAN, 2, 1, 3]), segments, upstream, make([1.0, NAN, 2, 1, 1])):
            assert row.isfinite().all()


def test_second_derivative_of_half_logsumexp_stays_in_range(device):
    """Products of 16-bit numbers on the way leave their range, the result does not."""
    data, offsets = torch.linspace(-1, 1, 7, device=device).half()[:, None], torch.tensor([0, 7], device=device)
    upstream, direction = torch.full((1, 1), 300.0, device=device), torch.linspace(-300, 300, 7, device=device)[:, None]
    exact = second(segment_logsumexp, data.double(), offsets, upstream.double(), direction.double())
    for result, expected in zip(second(segment_logsumexp, data, offsets, upstream.half(), direction.half()), exact):
        torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=1e-3 * float(expected.abs().max()))


# ---- autocast ----


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(device, dtype):
    """softmax, log_softmax, logsumexp and prod run in float32, sum as torch's does on the device, the rest as it comes."""
    data = testing.make_data((7, 2), dtype, kind="normal").to(device)
    offsets = torch.tensor([0, 3, 3, 7], device=device)
    with torch.autocast(device, dtype=dtype):
        for function in (segment_softmax, segment_log_softmax, segment_logsumexp, segment_prod):
            result = function(data, offsets)
            assert result.dtype == torch.float32
            assert torch.equal(result, function(data.float(), offsets))
        assert segment_sum(data, offsets).dtype == (data.sum().dtype if device == "cuda" else dtype)
        for function in (segment_mean, segment_var, segment_std):
            assert function(data, offsets).dtype == dtype
        assert segment_softmax(data.double(), offsets).dtype == torch.float64
    assert segment_softmax(data, offsets).dtype == dtype


def test_autocast_gives_parameters_gradients_of_their_own_dtype(device):
    linear = torch.nn.Linear(3, 2, device=device)
    data = testing.make_data((7, 3), torch.float32, kind="normal").to(device)
    segments = Segments.from_offsets(torch.tensor([0, 3, 3, 7], device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = segment_softmax(linear(data), segments)
        pooled = segment_sum(scores * linear(data), segments)
    pooled.sum().backward()
    assert linear.weight.grad.dtype == torch.float32 and linear.weight.grad.isfinite().all()
