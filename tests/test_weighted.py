"""weight= of sum and mean: what it means, gradients to both, dtypes, and that no product of the data's size is written."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastops import Segments, reference, segment_mean, segment_sum, testing

# Shape of the data with N for its rows, dim, dimensions of the weight.
SHAPES = [
    (("N",), 0, 1),
    (("N", 4), 0, 1),
    (("N", 4), 0, 2),
    (("N", 5), 0, 2),
    (("N", 3, 5), 0, 1),
    (("N", 3, 5), 0, 2),
    (("N", 2, 8), 0, 2),
    (("N", 2, 35), 0, 2),
    (("N", 33, 4), 0, 2),
    (("N", 2, 3, 2), 0, 3),
    ((2, "N"), 1, 1),
    ((2, "N", 3, 4), 1, 2),
    ((3, "N", 64), -2, 1),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
FUNCTIONS = [(segment_sum, reference.segment_sum), (segment_mean, reference.segment_mean)]
both = pytest.mark.parametrize("function, meaning", FUNCTIONS, ids=("sum", "mean"))


def make_inputs(shape, segments, dtype, device, *, weight_dtype=None, kind="dyadic", requires_grad=False, seed=0):
    sizes, dim, weight_dim = shape
    sizes = tuple(segments.num_rows if size == "N" else size for size in sizes)
    data = testing.make_data(sizes, dtype, kind=kind, seed=seed)
    front = dim % len(sizes)
    weight = testing.make_data(sizes[front : front + weight_dim], weight_dtype or dtype, kind=kind, seed=seed + 1)
    if (weight_dtype or dtype).is_floating_point:
        weight = weight.abs() + 0.5  # a mean over weights of both signs is another number with every rounding
    data, weight = data.to(device), weight.to(device)
    return data.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), dim


def double(tensor):
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64), ids=str)
@every_shape
@both
def test_value(function, meaning, device, shape, dtype):
    if function is segment_mean and dtype == torch.int64:
        pytest.skip("a mean of integers wants dtype=")
    turn = SHAPES.index(shape) + FUNCTIONS.index((function, meaning))
    for number, pattern in enumerate(testing.PATTERNS):
        if device == "cuda" and number % 3 != turn % 3:
            continue  # every pattern meets some shapes
        segments = testing.make_segments(
            testing.PATTERNS[pattern], testing.GROUPINGS[(number + turn) % len(testing.GROUPINGS)], device=device
        )
        data, weight, dim = make_inputs(shape, segments, dtype, device)
        result = function(data, segments, dim=dim, weight=weight)
        expected = meaning(double(data), segments.cpu(), dim=dim, weight=double(weight))
        assert result.dtype == dtype and result.is_contiguous() and result.device == data.device
        testing.assert_matches(result, expected, dtype, exact=function is segment_sum)


@both
def test_written_out(function, meaning, make):
    data = make([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    offsets = make([0, 2, 2, 3])
    by_row, by_entry = make([1.0, 3.0, 2.0]), make([[1.0, 0.0], [3.0, 1.0], [2.0, 2.0]])
    mean = function is segment_mean
    rows = make([[10.0, 14.0], [0.0, 0.0], [10.0, 12.0]]) / (make([[4.0], [1.0], [2.0]]) if mean else 1)
    entries = make([[10.0, 4.0], [0.0, 0.0], [10.0, 12.0]]) / (make([[4.0, 1.0], [1.0, 1.0], [2.0, 2.0]]) if mean else 1)
    for way in (function, meaning):
        torch.testing.assert_close(way(data, offsets, weight=by_row), rows)
        torch.testing.assert_close(way(data, offsets, weight=by_row[:, None]), rows)
        torch.testing.assert_close(way(data, offsets, weight=by_entry), entries)
        assert way(data, offsets, weight=by_row, fill_value=7)[1].tolist() == [7, 7]
        torch.testing.assert_close(way(data.t(), offsets, dim=1, weight=by_row), rows.t())


@pytest.mark.parametrize("grouping", ("offsets", "unsorted", "ignored"))
@every_shape
@both
def test_gradient(function, meaning, device, shape, grouping):
    """First and second derivative, to data, weight and what comes from above, against the reference in float64."""
    for lengths in ((4, 0, 1, 40, 3), (600, 2)):
        segments = testing.make_segments(lengths, grouping, device=device)
        data, weight, dim = make_inputs(shape, segments, torch.float32, device, requires_grad=True)
        results = []
        for way, kind, where in ((function, torch.float32, device), (meaning, torch.float64, "cpu")):
            x, w = (part.detach().to(where, kind).requires_grad_() for part in (data, weight))
            y = way(x, segments.to(where), dim=dim, weight=w)
            v = testing.make_data(tuple(y.shape), kind, seed=5).to(where).requires_grad_()
            first = torch.autograd.grad(y, (x, w), v, create_graph=True)
            towards = [testing.make_data(tuple(part.shape), kind, seed=6 + n).to(where) for n, part in enumerate(first)]
            second = torch.autograd.grad(first, (x, w, v), towards)
            results.append([y, *first, *second])
        for one, other in zip(*results):
            assert one.dtype == torch.float32 and one.shape == other.shape
            scale = float(other.detach().abs().max())
            torch.testing.assert_close(one.detach().cpu().double(), other.detach(), rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@both
def test_more_columns_than_a_tile(function, meaning, device, grouping):
    """A tile may begin within the columns of one weight."""
    segments = testing.make_segments((3, 0, 5), grouping, device=device)
    data, weight, dim = make_inputs((("N", 3, 700), 0, 2), segments, torch.float64, device, requires_grad=True)
    found = []
    for way, where in ((function, device), (meaning, "cpu")):
        x, w = (part.detach().to(where).requires_grad_() for part in (data, weight))
        y = way(x, segments.to(where), dim=dim, weight=w)
        v = testing.make_data(tuple(y.shape), torch.float64, seed=5).to(where)
        found.append([part.detach().cpu() for part in (y, *torch.autograd.grad(y, (x, w), v))])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 5, 11)], ids=str)
@both
def test_gradcheck(function, meaning, device, shape):
    for grouping in ("offsets", "ignored"):
        segments = testing.make_segments((3, 0, 1, 2), grouping, device=device)
        data, weight, dim = make_inputs(shape, segments, torch.float64, device, kind="distinct", requires_grad=True)
        weight = (weight.detach() * 0.1 + 1).requires_grad_()

        def f(x, w):
            return function(x, segments, dim=dim, weight=w)  # noqa: B023

        torch.autograd.gradcheck(f, (data, weight))
        torch.autograd.gradgradcheck(f, (data, weight))
        torch.autograd.gradcheck(lambda w: f(data.detach(), w), (weight,))
        torch.autograd.gradcheck(lambda x: f(x, weight.detach()), (data,))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@both
def test_short_data_with_float_weights(function, meaning, device, dtype):
    """What a softmax under autocast gives: the result is float32, as of `data * weight`, and gradients have each its dtype."""
    for shape in SHAPES:
        segments = testing.make_segments((4, 0, 1, 40, 3), "unsorted", device=device)
        data, weight, dim = make_inputs(shape, segments, dtype, device, weight_dtype=torch.float32, requires_grad=True)
        result = function(data, segments, dim=dim, weight=weight)
        assert result.dtype == torch.float32
        expected = meaning(double(data), segments.cpu(), dim=dim, weight=double(weight))
        testing.assert_matches(result.detach(), expected, torch.float32, exact=function is segment_sum)
        result.sum().backward()
        assert (data.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
        other, factors = double(data).requires_grad_(), double(weight).requires_grad_()
        meaning(other, segments.cpu(), dim=dim, weight=factors).sum().backward()
        testing.assert_matches(data.grad, other.grad, dtype)
        torch.testing.assert_close(weight.grad.cpu().double(), factors.grad, rtol=1e-5, atol=1e-4)


DTYPES = [  # data, weight, dtype=, result of the sum
    (torch.float16, torch.float16, None, torch.float16),
    (torch.float16, torch.bfloat16, None, torch.float32),
    (torch.float16, torch.float16, torch.float32, torch.float32),
    (torch.float32, torch.float16, None, torch.float32),
    (torch.float32, torch.float64, None, torch.float64),
    (torch.float64, torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bool, None, torch.float32),
    (torch.float32, torch.int64, None, torch.float32),
    (torch.int32, torch.float32, None, torch.float32),
    (torch.int8, torch.int16, None, torch.int64),
    (torch.uint8, torch.bool, None, torch.int64),
    (torch.bool, torch.bool, None, torch.int64),
    (torch.int64, torch.int64, torch.int32, torch.int32),
    (torch.int64, torch.int64, torch.float32, torch.float32),
]


@pytest.mark.parametrize("data_dtype, weight_dtype, dtype, expected", DTYPES, ids=str)
def test_promotion(device, data_dtype, weight_dtype, dtype, expected):
    """As of the product, and as of torch.sum after it."""
    segments = testing.make_segments((3, 0, 4), device=device)
    data = testing.make_data((7, 3), data_dtype).to(device)
    weight = testing.make_data((7,), weight_dtype, seed=1).to(device)
    result = segment_sum(data, segments, weight=weight, dtype=dtype)
    assert result.dtype == expected
    assert dtype is not None or expected == (data[:1] * weight[:1, None]).sum(0).dtype
    exact = reference.segment_sum(double(data).double() * double(weight).double()[:, None], segments.cpu())
    testing.assert_matches(result, exact.to(expected), expected, exact=True)
    written = reference.segment_sum(data.cpu(), segments.cpu(), weight=weight.cpu(), dtype=dtype)
    assert written.dtype == expected
    testing.assert_matches(result, written, expected, exact=True)
    if expected.is_floating_point:
        assert segment_mean(data, segments, weight=weight, dtype=dtype).dtype == expected


def test_integers_wrap(device):
    data = torch.tensor([2**62, 2**62, 5], device=device)
    result = segment_sum(data, torch.tensor([0, 2, 3], device=device), weight=torch.tensor([2, 2, -3], device=device))
    assert result.tolist() == [0, -15]


@pytest.mark.parametrize("features", (1, 3, 64))
def test_rows_in_any_order_give_the_same_bits(device, features):
    segments = testing.make_segments((3000, 1, 0, 33, 5), "unsorted", device=device)
    data = testing.make_data((segments.num_rows, features), torch.float32, kind="normal").to(device)
    weight = testing.make_data((segments.num_rows,), torch.float32, kind="normal", seed=1).to(device)
    order, offsets = segments.order, segments.offsets
    results = []
    for x, w, s in ((data, weight, segments), (data[order], weight[order], Segments.from_offsets(offsets))):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = segment_sum(x, s, weight=w)
        y.backward(testing.make_data(tuple(y.shape), torch.float32, kind="normal", seed=2).to(device))
        results.append((y, x.grad, w.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][order], results[1][1]) and torch.equal(results[0][2][order], results[1][2])


class Operators(TorchDispatchMode):
    """Which operators write how many numbers."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_the_product_is_never_written(device):
    segments = testing.make_segments((500, 0, 300), "unsorted", device=device)
    data = torch.ones((800, 4, 16), device=device, requires_grad=True)
    weight = torch.ones((800, 4), device=device, requires_grad=True)
    with Operators() as forward:
        result = segment_sum(data, segments, weight=weight)
    assert forward.largest == result.numel() and not any("mul" in name for name in forward.names)
    with Operators() as mean:
        segment_mean(data, segments, weight=weight)
    assert mean.largest == result.numel()
    with Operators() as backward:
        (towards,) = torch.autograd.grad(result.sum(), weight, retain_graph=True)
    assert towards.shape == weight.shape and backward.largest <= weight.numel()


@both
def test_special_numbers(function, meaning, device):
    """A weight is a factor like any other: 0 does not hide NaN, and what is beside does not see it."""
    data = torch.tensor([[1.0, float("nan")], [2.0, float("inf")], [3.0, 1.0], [4.0, 2.0]], device=device)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    result = function(data, torch.tensor([0, 2, 4], device=device), weight=weight)
    assert result[:, 1].isnan().tolist() == [True, False] and result[:, 0].isfinite().all()
    zeros = function(data[2:], torch.tensor([0, 1, 2], device=device), weight=torch.zeros(2, device=device))
    assert zeros.isnan().all() if function is segment_mean else not zeros.any()


@both
@pytest.mark.parametrize("shape", ((0, 3), (4, 0), (0,), (4, 0, 2), (4, 2, 0)), ids=str)
def test_nothing_there(function, meaning, device, shape):
    rows = shape[0]
    groupings = [torch.tensor(offsets, device=device) for offsets in (([0, rows], [0, 0, rows]) if rows else ([0], [0, 0]))]
    groupings.append(Segments.from_index(torch.arange(rows, device=device).flip(0) // 2, 2))
    for grouping in groupings:
        data = torch.zeros(shape, device=device, requires_grad=True)
        weight = torch.ones(shape[:2], device=device, requires_grad=True)
        result = function(data, grouping, weight=weight)
        size = grouping.num_segments if isinstance(grouping, Segments) else len(grouping) - 1
        assert result.shape == (size, *shape[1:])
        result.sum().backward()
        assert data.grad.shape == data.shape and weight.grad.shape == weight.shape and not weight.grad.any()


def test_unchecked_segments_are_never_used_out_of_bounds(device):
    for wrong in ([0, 100, 50, 7], [-5, 3, 3, 7], [0, 2**40, -(2**40), 7]):
        segments = Segments.from_offsets(torch.tensor(wrong, device=device), check_invariants=False)
        for shape in ((7,), (7, 3), (7, 2, 8)):
            data = torch.ones(shape, device=device, requires_grad=True)
            weight = torch.ones(shape[:2], device=device, requires_grad=True)
            result = segment_sum(data, segments, weight=weight)
            assert result.shape == (3, *shape[1:])
            result.sum().backward()
            assert weight.grad.shape == weight.shape
    index = torch.tensor([5, -3, 1, 2**40, 0, 2, 1], device=device)
    segments = Segments.from_index(index, 3, check_invariants=False)
    kept = Segments.from_index(torch.tensor([-1, -1, 1, -1, 0, 2, 1]), 3, ignore_index=-1)
    for shape in ((7,), (7, 2), (7, 2, 16)):
        data = testing.make_data(shape, torch.float32).to(device).requires_grad_()
        weight = testing.make_data(shape[:2], torch.float32, seed=1).to(device).requires_grad_()
        result = segment_sum(data, segments, weight=weight)
        assert torch.equal(result.detach().cpu(), reference.segment_sum(double(data).float(), kept, weight=double(weight).float()))
        result.sum().backward()
        outside = [0, 1, 3]
        assert not data.grad[outside].any() and not weight.grad[outside].any() and weight.grad[4].any()


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_opcheck(device, grouping):
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    ops = torch.ops.fastops
    for shape in ((7, 3), (7, 2, 3)):
        data = torch.randn(shape, device=device, requires_grad=True)
        weight = torch.rand(shape[:2], device=device, requires_grad=True)
        values = torch.randn((3, *shape[1:]), device=device, requires_grad=True)
        torch.library.opcheck(ops._segment_weighted_sum.default, (data, weight, *segments._parts, 0, False, 0))
        torch.library.opcheck(ops._segment_weighted_broadcast.default, (values, weight, *segments._parts, 0, torch.float32))
        torch.library.opcheck(ops._segment_dot.default, (values, data, *segments._parts, 0, 2))


@both
def test_compiled(function, meaning):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, s, w: function(x * 2, s, weight=w), fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 0, 4), (5, 6, 7, 0, 1)):
        for grouping in ("offsets", "unsorted"):
            segments = testing.make_segments(lengths, grouping)
            data, weight, _ = make_inputs((("N", 2, 3), 0, 2), segments, torch.float32, "cpu", requires_grad=True)
            one, other = compiled(data, segments, weight), function(data * 2, segments, weight=weight)
            assert torch.equal(one, other)
            for a, b in zip(*(torch.autograd.grad(y.square().sum(), (data, weight)) for y in (one, other))):
                assert torch.equal(a, b)
    torch._dynamo.reset()


@both
def test_torch_func(function, meaning, device):
    segments = testing.make_segments((2, 0, 3), "unsorted", device=device)
    data = torch.randn((4, 5, 2), dtype=torch.float64, device=device)
    weight = torch.rand((4, 5), dtype=torch.float64, device=device)
    one_by_one = torch.stack([function(x, segments, weight=w) for x, w in zip(data, weight)])
    torch.testing.assert_close(torch.vmap(lambda x, w: function(x, segments, weight=w))(data, weight), one_by_one)
    leaf = weight[0].clone().requires_grad_()
    function(data[0], segments, weight=leaf).sum().backward()
    derivative = torch.func.grad(lambda w: function(data[0], segments, weight=w).sum())(weight[0])
    torch.testing.assert_close(derivative, leaf.grad)


def test_autocast(cuda):
    """Sums run in float32 there, as torch.sum does; on the CPU they keep the dtype of the product."""
    segments = testing.make_segments((3, 0, 4), device=cuda)
    data, weight = (torch.ones(shape, dtype=torch.float16, device=cuda) for shape in ((7, 2), (7,)))
    with torch.autocast("cuda"):
        assert segment_sum(data, segments, weight=weight).dtype == torch.float32
