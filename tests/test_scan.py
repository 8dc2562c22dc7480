"""Scans: options, literal values, what they mean row by row, derivatives with zeros and infinities, accuracy."""

import itertools
import os

import numpy as np
import pytest
import torch
from helpers import close, first, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fastops import (
    Segments,
    reference,
    segment_cummax,
    segment_cummin,
    segment_cumprod,
    segment_cumsum,
    segment_logcumsumexp,
    testing,
)
from fastops.registry import ALL_DTYPES, SCANS, find

INF, NAN = float("inf"), float("nan")
every_scan = pytest.mark.parametrize("op", [find(name) for name in SCANS], ids=SCANS)
every_option = pytest.mark.parametrize(
    "options",
    [{"exclusive": exclusive, "reverse": reverse} for exclusive in (False, True) for reverse in (False, True)],
    ids=("plain", "reverse", "exclusive", "exclusive_reverse"),
)


def test_written_out(make):
    data, offsets = make([3.0, 1, 4, 1, 5, 9, 2]), make([0, 3, 3, 7])
    same(segment_cumsum(data, offsets), [3, 4, 8, 1, 6, 15, 17])
    same(segment_cumsum(data, offsets, exclusive=True), [0, 3, 4, 0, 1, 6, 15])
    same(segment_cumsum(data, offsets, reverse=True), [8, 5, 4, 17, 16, 11, 2])
    same(segment_cumsum(data, offsets, exclusive=True, reverse=True), [5, 4, 0, 16, 11, 2, 0])
    same(segment_cumprod(data, offsets), [3, 3, 12, 1, 5, 45, 90])
    same(segment_cumprod(data, offsets, exclusive=True), [1, 3, 3, 1, 1, 5, 45])
    same(segment_cumprod(data, offsets, reverse=True), [12, 4, 4, 90, 90, 18, 2])
    for function, options, values, rows in (
        (segment_cummax, {}, [3, 3, 4, 1, 5, 9, 9], [0, 0, 2, 3, 4, 5, 5]),
        (segment_cummax, {"reverse": True}, [4, 4, 4, 9, 9, 9, 2], [2, 2, 2, 5, 5, 5, 6]),
        (segment_cummax, {"exclusive": True}, [-INF, 3, 3, -INF, 1, 5, 9], [-1, 0, 0, -1, 3, 4, 5]),
        (segment_cummin, {}, [3, 1, 1, 1, 1, 1, 1], [0, 1, 1, 3, 3, 3, 3]),
        (segment_cummin, {"reverse": True, "exclusive": True}, [1, 4, INF, 2, 2, 2, INF], [1, 2, -1, 6, 6, 6, -1]),
    ):
        result = function(data, offsets, **options)
        assert type(result) is getattr(torch.return_types, function.__name__.removeprefix("segment_"))
        same(result.values, values)
        assert result.indices.tolist() == rows
    two = float(np.log(2))
    close(segment_logcumsumexp(make([0.0, 0, -INF, -INF, 1]), make([0, 2, 5])), [0, two, -INF, -INF, 1])
    close(segment_logcumsumexp(make([0.0, 0]), make([0, 2]), exclusive=True), [-INF, 0])


def test_ties_go_to_the_smallest_row(make):
    data, offsets = make([2.0, 2, 1, 2, 0.0, -0.0]), make([0, 4, 6])
    assert segment_cummax(data, offsets).indices.tolist() == [0, 0, 0, 0, 4, 4]
    assert segment_cummax(data, offsets, reverse=True).indices.tolist() == [0, 1, 3, 3, 4, 5]
    assert segment_cummin(data, offsets).indices.tolist() == [0, 0, 2, 2, 4, 4]
    nans = make([1.0, NAN, 2, NAN])
    assert segment_cummax(nans, make([0, 4])).indices.tolist() == [0, 1, 1, 1]
    assert segment_cummin(nans, make([0, 4]), reverse=True).indices.tolist() == [1, 1, 3, 3]


def test_nothing_before_the_first_row(device):
    """What exclusive scans begin with, for every dtype."""
    offsets = torch.tensor([0, 1], device=device)
    for dtype in ALL_DTYPES:
        one = torch.ones(1, dtype=dtype, device=device)
        assert segment_cumsum(one, offsets, exclusive=True).item() == 0
        assert segment_cumprod(one, offsets, exclusive=True).item() == 1
        if dtype == torch.bool:
            least, greatest = False, True
        elif dtype.is_floating_point:
            least, greatest = -INF, INF
        else:
            least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        assert segment_cummax(one, offsets, exclusive=True).values.item() == least
        assert segment_cummin(one, offsets, exclusive=True).values.item() == greatest


@every_option
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@every_scan
def test_value(op, device, dtype, options):
    if dtype not in op.dtypes:
        pytest.skip("test_ops has the error")
    turn = ALL_DTYPES.index(dtype) + 2 * SCANS.index(op.name) + 3 * options["reverse"]
    for number, pattern in enumerate(testing.PATTERNS):
        if device == "cuda" and (number + turn) % 3:
            continue  # every pattern meets some types
        sample = testing.make_sample(
            op,
            pattern,
            testing.FEATURES[(number + turn) % len(testing.FEATURES)] if number % 2 else (1, 5, 16)[turn % 3],
            testing.LAYOUTS[(number + turn) % len(testing.LAYOUTS)],
            testing.GROUPINGS[(number + 2 * turn) % len(testing.GROUPINGS)],
            dtype,
            device,
        )
        if sample.args[0].numel() > testing.MAX_ELEMENTS:
            continue
        sample.kwargs.update(options)
        testing.assert_matches(op.fn(*sample.args, **sample.kwargs), testing.expected_result(op, sample), dtype, exact=op.exact)


@every_option
@every_scan
def test_special_numbers(op, device, options):
    for features, grouping in ((1, "offsets"), (8, "ignored")):
        sample = testing.make_sample(op, "uniform", features, "contiguous", grouping, torch.float32, device, kind="special")
        sample.kwargs.update(options)
        testing.assert_matches(op.fn(*sample.args, **sample.kwargs), testing.expected_result(op, sample), torch.float32)


@every_option
@every_scan
def test_gradcheck(op, device, options):
    for sample in testing.small_inputs(op, device):
        data, segments = sample.args
        if "offsets32" in sample.id or "lengths" in sample.id:
            continue  # the same kernels as others
        if op.name == "segment_logcumsumexp" and options["exclusive"]:

            def f(x):
                y = op.fn(x, segments, **sample.kwargs, **options)  # noqa: B023
                return torch.where(y.isinf(), 0, y)  # a difference of infinities is no derivative
        else:

            def f(x):
                y = first(op.fn(x, segments, **sample.kwargs, **options))  # noqa: B023
                return torch.where(y.isinf(), 0, y)

        torch.autograd.gradcheck(f, (data,))
        torch.autograd.gradgradcheck(f, (data,))


@every_option
@pytest.mark.parametrize("zeros", (0, 1, 2, 5))
def test_gradient_of_products_with_zeros(device, zeros, options):
    """Against the reference, which multiplies and never divides; so do the kernels."""
    data = testing.make_data((12, 3), torch.float64, kind="factors", seed=zeros)
    data[data == 0] = 1.5
    data[[1, 3, 4, 8, 11][:zeros]] = 0
    offsets = torch.tensor([0, 6, 7, 12])
    results = []
    for where, function in ((device, segment_cumprod), ("cpu", reference.segment_cumprod)):
        x = data.to(where).requires_grad_()
        y = function(x, offsets.to(where), **options)
        v = testing.make_data((12, 3), torch.float64, seed=7).to(where)
        (gradient,) = torch.autograd.grad(y, x, v, create_graph=True)
        (second,) = torch.autograd.grad(gradient, x, v)
        results.append((gradient.detach().cpu(), second.cpu()))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
        assert other.any()


def test_gradient_of_extrema_goes_to_the_row(make):
    data = make([1.0, 3, 3, 2, 5]).requires_grad_()
    offsets, weights = make([0, 4, 5]), make([1.0, 10, 100, 1000, 10000])
    (segment_cummax(data, offsets).values * weights).sum().backward()
    same(data.grad, [1, 1110, 0, 0, 10000])
    data.grad = None
    values = segment_cummax(data, offsets, exclusive=True).values
    (torch.where(values.isinf(), 0, values) * weights).sum().backward()
    same(data.grad, [10, 1100, 0, 0, 0])
    data.grad = None
    (segment_cummax(data, offsets, reverse=True).values * weights).sum().backward()
    same(data.grad, [0, 11, 100, 1000, 10000])


def test_no_gradient_is_nan_for_rows_of_minus_infinity(make):
    data = make([-INF, -INF, 1.0, -INF, 2.0, -INF]).requires_grad_()
    for options in ({}, {"exclusive": True}, {"reverse": True}):
        result = segment_logcumsumexp(data, make([0, 5, 6]), **options)
        (gradient,) = torch.autograd.grad(torch.where(result.isinf(), 0, result).sum(), data, create_graph=True)
        assert gradient.isfinite().all() and gradient[[0, 1, 3, 5]].tolist() == [0, 0, 0, 0]
        (second,) = torch.autograd.grad(gradient.sum(), data)
        assert second.isfinite().all()


def test_gradient_around_infinities(make):
    """As torch's: rows before an infinity have theirs, and those after it none."""
    for values in ([1.0, INF, 2], [0.0, 3, INF, 1, -INF]):
        data, other = make(values).requires_grad_(), make(values).requires_grad_()
        segment_logcumsumexp(data, make([0, len(values)])).sum().backward()
        other.logcumsumexp(0).sum().backward()
        torch.testing.assert_close(data.grad, other.grad, equal_nan=True)


@pytest.mark.parametrize("features", (1, 8))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_does_not_saturate(device, dtype, features):
    """ISS-44: a running value kept in 16 bits stops at 2048 or 256."""
    ones = torch.ones((5000, features), dtype=dtype, device=device)
    for options, expected in (({}, torch.arange(1, 5001)), ({"exclusive": True}, torch.arange(5000))):
        result = segment_cumsum(ones, torch.tensor([0, 5000], device=device), **options)
        assert torch.equal(result.cpu(), expected.to(dtype)[:, None].expand(5000, features))
        halves = segment_cumsum(ones, torch.tensor([0, 2500, 5000], device=device), **options)
        assert torch.equal(halves.cpu(), (torch.cat((expected[:2500], expected[:2500]))).to(dtype)[:, None].expand(5000, features))


@pytest.mark.parametrize("features", (1, 4))
def test_float32_sums_are_as_accurate_as_torch_cumsum(device, features):
    rows = 1_000_000 if device == "cpu" else 20_000
    data = torch.rand((rows // features, features), generator=testing.make_generator(1))
    exact = data.double().cumsum(0)
    offsets = torch.tensor([0, len(data)], device=device)
    error = (segment_cumsum(data.to(device), offsets).cpu().double() - exact).abs().max()
    others = (data.to(device).cumsum(0).cpu().double() - exact).abs().max()
    assert float(error) <= float(others) * 1.01


@every_scan
def test_last_row_is_the_reduction(op, device):
    """A running result ends where the reduction of the same name does."""
    name = op.name.replace("segment_cum", "segment_").replace("segment_logcum", "segment_log")
    whole = find(name)
    segments = testing.make_segments((5000, 1, 3, 700, 2), device=device)
    data = testing.make_data((segments.num_rows, 3), torch.float32, kind=op.data_kind).to(device)
    last = first(op.fn(data, segments))[segments.offsets[1:] - 1]
    testing.assert_matches(last, first(whole.fn(data, segments)).cpu(), torch.float32, exact=op.exact)


@pytest.fixture
def order_of_threads(device):
    """Sets the order in which the simulator of CUDA takes threads and blocks, where there is one; None is its own."""
    simulated = None
    if device == "cuda":
        try:
            import cudasim

            simulated = cudasim if cudasim.active() else None
        except ImportError:
            pass
    yield lambda seed: simulated and simulated.set_seed(seed)
    if simulated:
        simulated.set_seed(os.environ.get("CUDASIM_SEED"))


@pytest.mark.parametrize("reverse", (False, True), ids=("plain", "reverse"))
def test_segments_of_very_many_chunks(device, reverse):
    """More than two of the largest groups of chunks that are joined at a time: 1024 chunks of 128 rows. What is joined does
    not commute: y_i = x_i + f_i * y_(i - 1), where f is 1 or -1 and x a small number, so that all is exact."""
    rows, columns, before, after = 128 * 2100 + 5, 3, 70, 9
    generator = testing.make_generator(1)
    factors = torch.randint(0, 2, (before + rows + after, columns), generator=generator).double() * 2 - 1
    data = torch.randint(-3, 4, factors.shape, generator=generator).double()
    offsets = torch.tensor([0, before, before + rows, before + rows + after])
    found = torch.ops.fastops._segment_linear_scan(factors.to(device), data.to(device), offsets.to(device), None, None, 0, reverse)
    for begin, end in itertools.pairwise(offsets.tolist()):
        f, x, y = (t[begin:end].flip(0) if reverse else t[begin:end] for t in (factors, data, found.cpu()))
        sign = f.cumprod(0)
        expected = sign * (x * sign).cumsum(0)
        assert torch.equal(y[1:], expected[:-1]) and not y[0].any()


@every_option
@every_scan
def test_bits_depend_on_nothing_but_the_segment(op, device, options, order_of_threads):
    """A long segment has the same bits in whatever order its tiles come along, and wherever it stands."""
    long = 6000
    for features, lengths in ((8, (37, long, 1, 0, 700)), (1, (3, 1100, 2 * long, 5))):
        segments = testing.make_segments(lengths, device=device)
        data = testing.make_data((segments.num_rows, features), torch.float32, kind=op.data_kind).to(device)
        order_of_threads(None)
        expected = first(op.fn(data, segments, **options))
        number = max(range(len(lengths)), key=lengths.__getitem__)
        begin, end = sum(lengths[:number]), sum(lengths[: number + 1])
        alone = first(op.fn(data[begin:end], torch.tensor([0, end - begin], device=device), **options))
        assert torch.equal(alone, expected[begin:end])
        for seed in range(2):
            order_of_threads(seed)
            assert torch.equal(first(op.fn(data, segments, **options)), expected)


lengths = st.lists(st.integers(0, 40), min_size=0, max_size=12)


@settings(max_examples=60)
@given(lengths=lengths, features=st.integers(1, 9), seed=st.integers(0, 99), exclusive=st.booleans(), reverse=st.booleans())
def test_loops_of_numpy(lengths, features, seed, exclusive, reverse):
    segments = testing.make_segments(tuple(lengths), "unsorted", seed=seed)
    data = testing.make_data((segments.num_rows, features), torch.float64, seed=seed)
    options = {"exclusive": exclusive, "reverse": reverse}
    sums, products = np.zeros(data.shape), np.zeros(data.shape)
    tops, rows = np.full(data.shape, -INF), np.full(data.shape, -1)
    step = -1 if reverse else 1
    for s in range(segments.num_segments):
        of_segment = [r for r in range(segments.num_rows) if int(segments.index[r]) == s]
        for c in range(features):
            total, product, top, row = 0.0, 1.0, -INF, -1
            for r in of_segment[::step]:
                before = total, product, top, row
                x = float(data[r, c])
                total, product = total + x, product * x
                if x > top or (x == top and r < row):
                    top, row = x, r
                sums[r, c], products[r, c], tops[r, c], rows[r, c] = before if exclusive else (total, product, top, row)
    same(segment_cumsum(data, segments, **options), sums)
    close(segment_cumprod(data, segments, **options), products, rtol=1e-12)
    found = segment_cummax(data, segments, **options)
    same(found.values, tops)
    assert found.indices.tolist() == rows.tolist()


DTYPES = [(torch.int8, None, torch.int64), (torch.bool, None, torch.int64), (torch.uint8, torch.int32, torch.int32),
          (torch.float16, torch.float32, torch.float32), (torch.int64, torch.float32, torch.float32),
          (torch.float64, torch.float32, torch.float32), (torch.float32, torch.int64, torch.int64)]  # fmt: skip


@pytest.mark.parametrize("dtype, into, expected", DTYPES, ids=str)
def test_dtype_argument(device, dtype, into, expected):
    """As torch's: data is converted first, and integers promote."""
    data = testing.make_data((7, 2), dtype)
    for function, name in ((segment_cumsum, "cumsum"), (segment_cumprod, "cumprod")):
        result = function(data.to(device), torch.tensor([0, 3, 3, 7], device=device), dtype=into)
        parts = [getattr(part, name)(0, dtype=into) for part in data.split([3, 0, 4])]
        assert result.dtype == expected
        assert torch.equal(result.cpu(), torch.cat(parts))


def test_linear_scan_opcheck(device):
    for grouping, reverse in itertools.product(("offsets", "unsorted"), (False, True)):
        segments = testing.make_segments((3, 0, 4), grouping, device=device)
        factors, data = (torch.randn(7, 3, device=device, requires_grad=True) for _ in range(2))
        torch.library.opcheck(torch.ops.fastops._segment_linear_scan.default, (factors, data, *segments._parts, 0, reverse))


@every_scan
def test_wrong_segments_stay_in_bounds(op, device):
    segments = Segments.from_offsets(torch.tensor([5, 100, -3, 7], device=device), check_invariants=False)
    for options in ({}, {"exclusive": True, "reverse": True}):
        for features in (1, 3, 64):
            data = torch.ones((7, features), device=device)
            assert first(op.fn(data, segments, **options)).shape == data.shape
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("wrong", ([0, 2999, 100, 2900, 3000], [2999, 0, 2000, 0, 3000], [-5, 2**40, 1, 2000, 3000]), ids=str)
def test_wrong_long_segments_come_to_an_end(device, wrong):
    """A chunk that waits for others waits for none that nobody has."""
    segments = Segments.from_offsets(torch.tensor(wrong, device=device), check_invariants=False)
    for reverse in (False, True):
        for features in (1, 8):
            data = torch.ones((3000, features), device=device)
            assert segment_cumsum(data, segments, reverse=reverse).cpu().shape == data.shape


def test_autocast(cuda):
    """In float32 there, as torch.cumsum and torch.cumprod are."""
    segments = testing.make_segments((3, 0, 4), device=cuda)
    with torch.autocast("cuda"):
        for function in (segment_cumsum, segment_cumprod):
            assert function(torch.ones(7, dtype=torch.float16, device=cuda), segments).dtype == torch.float32
