"""Every operation of the registry: values, gradients, layouts, determinism, errors, what torch's own checks say."""

import contextlib

import pytest
import torch
from helpers import first as floating
from helpers import further, without_nan

from fastops import Segments, testing
from fastops.registry import ALL_DTYPES, FLOATING, OPS, find

SHORT = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "bool",
}  # fmt: skip

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=SHORT.get)
every_floating_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=SHORT.get)
every_pattern = pytest.mark.parametrize("pattern", testing.PATTERNS)
differentiable = pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
takes_rows = pytest.mark.parametrize("op", [op for op in OPS if not op.takes_values], ids=lambda op: op.name)
reductions = pytest.mark.parametrize(
    "op", [op for op in OPS if not op.takes_values and not op.per_row], ids=lambda op: op.name
)


def skip_unless_taken(op, dtype):
    if dtype not in op.dtypes:
        pytest.skip(f"{op.name} does not take {dtype}: test_dtypes_that_are_not_taken has the error")


def number_of(pattern):
    return list(testing.PATTERNS).index(pattern)


def sample_of(op, device, dtype, pattern, requires_grad=False):
    return next(op.samples(device, dtype, requires_grad, patterns=[pattern]))


def bits(tensor):
    """A tensor whose entries are equal exactly if their bits are."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(integers[tensor.element_size()])


def all_bits(results):
    return [bits(result) for result in (results if isinstance(results, tuple) else (results,))]


def assert_same_bits(one, other):
    for a, b in zip(all_bits(one), all_bits(other)):
        assert torch.equal(a, b)


def call(op, sample):
    return op.fn(*sample.args, **sample.kwargs)


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- values ----


@every_pattern
@every_dtype
@every_op
def test_value(op, device, dtype, pattern):
    skip_unless_taken(op, dtype)
    sample = sample_of(op, device, dtype, pattern)
    result = call(op, sample)
    testing.assert_matches(result, testing.expected_result(op, sample), dtype, exact=op.exact)


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@every_op
def test_layout(op, device, layout, grouping):
    """Any strides, any dim, rows in any order; the result is contiguous and its own."""
    features = (5, 8)[testing.LAYOUTS.index(layout) % 2]
    sample = testing.make_sample(op, "many_tiny", features, layout, grouping, torch.float32, device)
    data = sample.args[0]
    before = data.clone()
    results = call(op, sample)
    testing.assert_matches(results, testing.expected_result(op, sample), torch.float32, exact=op.exact)
    assert torch.equal(data, before), "the input was changed"
    results = results if isinstance(results, tuple) else (results,)
    storages = {result.untyped_storage().data_ptr() for result in results}
    assert len(storages) == len(results) and data.untyped_storage().data_ptr() not in storages
    for result, dtype in zip(results, op.result_dtypes(data.dtype)):
        assert result.is_contiguous() and result.storage_offset() == 0
        assert result.dtype == dtype and result.device == data.device


@pytest.mark.parametrize("features", testing.FEATURES)
@every_floating_dtype
@every_op
def test_normal_numbers(op, device, dtype, features):
    """Numbers whose sums are not exact, so that an accumulator of the wrong width shows."""
    if op.name == "segment_prod":
        pytest.skip("products of many normal numbers leave the range of floats: test_value has exact ones")
    skip_unless_taken(op, dtype)
    sample = testing.make_sample(op, "around_128", features, "contiguous", "unsorted", dtype, device, kind="normal")
    expected = testing.expected_result(op, sample)
    result = call(op, sample)
    if op.name == "segment_sum":  # what cancels is lost: errors are relative to the terms, not to their sum
        rtol = testing.TOLERANCES[dtype][0]
        torch.testing.assert_close(result.cpu().double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    else:
        testing.assert_matches(result, expected, dtype)


@pytest.mark.parametrize("features", (127, 129, 255, 257, 513, 1025))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64, torch.bfloat16), ids=SHORT.get)
@every_op
def test_features_around_a_tile(op, device, dtype, features):
    """More features than a kernel takes at once, with one left over: kernels cut at 64 vectors of 16, 32 or 64 bytes."""
    skip_unless_taken(op, dtype)
    for grouping in ("offsets", "unsorted"):
        sample = testing.make_sample(op, "leading_empties", features, "contiguous", grouping, dtype, device)
        testing.assert_matches(call(op, sample), testing.expected_result(op, sample), dtype, exact=op.exact)


@pytest.mark.parametrize("features", (1, 2, 3, 4, 5, 8, 9, 15, 16, 17))
@every_op
def test_narrow_rows(op, features):
    """The CPU takes rows together that are narrower than a vector, and copies some numbers of features in loops of their own."""
    for pattern in ("many_tiny", "around_128", "1025"):  # several segments in a vector, blocks of one, chunks of one
        for grouping in ("offsets", "unsorted", "ignored"):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                sample = testing.make_sample(op, pattern, features, "contiguous", grouping, dtype, requires_grad=op.differentiable)
                testing.assert_matches(call(op, sample), testing.expected_result(op, sample), dtype, exact=op.exact)
                if op.differentiable:
                    check_derivatives(op, sample, "contiguous", dtype)


@pytest.mark.parametrize("name", ("segment_sum", "segment_amax"))
@pytest.mark.parametrize("features", (64, 256))
def test_results_larger_than_the_caches(name, features):
    """Where rows come in any order the CPU writes large results past its caches: the bits are those of small calls."""
    op = next(op for op in OPS if op.name == name)
    segments = testing.make_segments((2, 0, 1, 3) * (12_000_000 // (4 * features)), "unsorted")
    data = testing.make_data((1000, features), torch.float32, kind="normal")
    data = data.repeat(-(-segments.num_rows // 1000), 1)[: segments.num_rows]
    result = op.fn(data, segments)
    assert result.nbytes >= 2**25
    assert torch.equal(result, op.fn(data[segments.order], Segments.from_offsets(segments.offsets)))


@pytest.mark.parametrize("grouping", ("offsets", "unsorted", "ignored"))
@every_floating_dtype
@every_op
def test_special_numbers(op, device, dtype, grouping):
    """NaN, infinities and negative zeros are values like any other."""
    skip_unless_taken(op, dtype)
    sample = testing.make_sample(op, "uniform", 8, "contiguous", grouping, dtype, device, kind="special")
    testing.assert_matches(call(op, sample), testing.expected_result(op, sample), dtype, exact=op.exact)


@pytest.mark.parametrize("zeros", (0, 1, 2))
@every_floating_dtype
def test_long_products(device, dtype, zeros):
    op = next(op for op in OPS if op.name == "segment_prod")
    signs = testing.make_data((3000, 3), torch.int64, seed=1).sign().abs() * 2 - 1
    data = signs.to(dtype)
    data[[7, 2000], [1, 2]] = 2
    for row in (11, 2999)[:zeros]:
        data[row] = 0
    data = data.to(device).requires_grad_()
    segments = Segments.from_offsets(torch.tensor([0, 3000], device=device))
    result = op.fn(data, segments)
    result.sum().backward()
    other = data.detach().cpu().double().requires_grad_()
    expected = op.reference(other, segments.cpu())
    expected.sum().backward()
    testing.assert_matches(result, expected, dtype, exact=True)
    testing.assert_matches(data.grad, other.grad, dtype, exact=True)
    assert (other.grad != 0).any() == (zeros < 2)


@every_dtype
@every_op
def test_dtypes_that_are_not_taken(op, device, dtype):
    if dtype in op.dtypes:
        pytest.skip("taken")
    sample = testing.make_sample(op, "canonical", 3, "contiguous", "offsets", dtype, device)
    with pytest.raises(TypeError, match=f"{op.name}: data must be one of float16, .*, but got {str(dtype)[6:]}"):
        call(op, sample)


@every_dtype
@pytest.mark.parametrize(
    "op", [op for op in OPS if op.name in ("segment_sum", "segment_mean", "segment_prod")], ids=lambda op: op.name
)
@pytest.mark.parametrize("into", (torch.float16, torch.float32, torch.float64, torch.int32), ids=SHORT.get)
def test_dtype_argument(op, device, dtype, into):
    """dtype= converts the data first, as torch does."""
    if into not in op.dtypes:
        pytest.skip("the registry's errors have it")
    sample = testing.make_sample(op, "canonical", 3, "contiguous", "unsorted", dtype, device)
    result = op.fn(*sample.args, dtype=into)
    assert result.dtype == into
    converted = testing.Sample("", (sample.args[0].to(into), sample.args[1]), {"dtype": into})
    assert_same_bits(result, call(op, converted))
    same = op.reference(sample.args[0].cpu(), sample.args[1].cpu(), dtype=into)
    testing.assert_matches(result, same, into, exact=op.exact)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=SHORT.get)
@pytest.mark.parametrize("features", (4, 8, 16, 32, 64, 128))
@pytest.mark.parametrize("name", ("segment_sum", "segment_mean", "segment_prod"))
def test_half_into_float(device, name, features, dtype):
    """Rows in order of one vector and of several, which kernels have short ways for."""
    op = next(op for op in OPS if op.name == name)
    segments = testing.make_segments((4, 0, 1, 40, 3), device=device)
    data = testing.make_data((48, features), dtype, kind=op.data_kind).to(device)
    result = op.fn(data, segments, dtype=torch.float32)
    expected = op.reference(data.cpu().double(), segments.cpu())
    assert result.dtype == torch.float32
    testing.assert_matches(result, expected, torch.float32, exact=name == "segment_sum")


@every_op
def test_result_dtypes_are_those_of_torch(op):
    """The registry against the torch namesake, so that both are not wrong together."""
    if op.takes_values:
        pytest.skip("a broadcast keeps the dtype")
    namesake = getattr(torch, op.name.removeprefix("segment_"), None)
    if namesake is None:
        pytest.skip("torch has no first, last and nunique")
    for dtype in op.dtypes:
        if dtype == torch.bool and ("arg" in op.name or op.name in ("segment_median", "segment_topk")):
            continue  # torch has no argmax of bool
        if op.name == "segment_quantile" and dtype in (torch.float16, torch.bfloat16):
            continue  # nor a quantile of these
        results = namesake(torch.ones(2, dtype=dtype), *op.arguments, dim=0)
        results = tuple(results) if isinstance(results, tuple) else (results,)
        assert tuple(result.dtype for result in results) == op.result_dtypes(dtype)


@reductions
@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_fill_value(op, device, grouping):
    sample = testing.make_sample(op, "leading_empties", 3, "contiguous", grouping, torch.float32, device)
    if op.name in ("segment_any", "segment_all"):
        fills = (False, True)
    elif "arg" in op.name or op.name == "segment_nunique":
        fills = (-7, 3)
    else:
        fills = (-1.5, float("nan"), float("inf"), 2)
    for fill in fills:
        results = op.fn(*sample.args, fill_value=fill)
        testing.assert_matches(
            results, op.reference(sample.args[0].cpu(), sample.args[1].cpu(), fill_value=fill), torch.float32
        )
        filled = floating(results)[:4].cpu()
        torch.testing.assert_close(filled, torch.full_like(filled, fill), rtol=0, atol=0, equal_nan=True)
        if isinstance(results, tuple):
            assert (results.indices[:4] == -1).all()


SHAPES = [  # data shape, offsets, dim
    ((0, 6), [0, 0, 0], 0),
    ((5, 0), [0, 2, 5], 0),
    ((0, 3), [0], 0),
    ((0,), [0], 0),
    ((0,), [0, 0], 0),
    ((3, 0, 2), [0], 1),
    ((0, 4, 2), [0, 1, 4], 1),
    ((2, 4, 0), [0, 1, 4], -2),
]


@pytest.mark.parametrize("unsorted", (False, True), ids=("offsets", "index"))
@pytest.mark.parametrize("shape, offsets, dim", SHAPES, ids=lambda value: str(value).replace(" ", ""))
@every_op
def test_nothing_there(op, device, shape, offsets, dim, unsorted):
    """Zero rows, zero segments, zero features: shapes are right, and so are those of the gradients."""
    offsets = torch.tensor(offsets, device=device)
    segments = Segments.from_offsets(offsets)
    if unsorted:
        index = segments.index.flip(0)
        segments = Segments.from_index(index, segments.num_segments)
    rows_out = segments.num_segments
    shape, expected = list(shape), list(shape)
    if op.per_row:
        rows_out = shape[dim]
    if op.takes_values:
        rows_out = shape[dim]
        shape[dim] = segments.num_segments
    expected[dim] = rows_out
    at = dim % len(shape) + 1
    expected[at:at] = op.behind
    data = torch.zeros(shape, device=device, requires_grad=True)
    results = op.fn(data, segments, dim=dim)
    for result in results if isinstance(results, tuple) else (results,):
        assert list(result.shape) == expected
    if op.differentiable:
        result = floating(results)
        (gradient,) = torch.autograd.grad(result, data, torch.ones_like(result), create_graph=True)
        assert list(gradient.shape) == shape and not gradient.any()


# ---- gradients ----


@differentiable
def test_gradcheck(op, device):
    for sample in testing.small_inputs(op, device):
        data, segments = sample.args
        torch.autograd.gradcheck(lambda x: floating(op.fn(x, segments, **sample.kwargs)), (data,), raise_exception=True)


@differentiable
def test_gradgradcheck(op, device):
    for sample in testing.small_inputs(op, device):
        data, segments = sample.args
        torch.autograd.gradgradcheck(
            lambda x: floating(op.fn(x, segments, **sample.kwargs)), (data,), raise_exception=True
        )


def upstream_gradient(result, way, seed=3):
    """A gradient that arrives in some memory layout."""
    if way == "zero_stride":
        return torch.full((), 0.5, dtype=result.dtype, device=result.device).expand(result.shape)
    values = testing.make_data(tuple(result.shape), result.dtype, seed=seed).to(result.device)
    if way == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if way == "row_expanded":
        return values[:1].expand(result.shape) if result.size(0) else values
    return values


@pytest.mark.parametrize("way", ("contiguous", "zero_stride", "transposed", "row_expanded"))
@every_pattern
@differentiable
def test_gradient(op, device, pattern, way):
    """First and second derivative against those of the reference in float64, for gradients in any layout."""
    turn = number_of(pattern) + OPS.index(op)
    ways = ("contiguous", "zero_stride", "transposed", "row_expanded")
    if turn % 2 != ways.index(way) % 2:
        pytest.skip("every pattern meets some layouts of the gradient, every operation all of them")
    dtype = torch.float32
    sample = sample_of(op, device, dtype, pattern, requires_grad=True)
    check_derivatives(op, sample, way, dtype)


@pytest.mark.parametrize("pattern", ("canonical", "around_32", "many_tiny"))
@every_floating_dtype
@differentiable
def test_gradient_dtypes(op, device, dtype, pattern):
    skip_unless_taken(op, dtype)
    check_derivatives(op, sample_of(op, device, dtype, pattern, requires_grad=True), "contiguous", dtype)


# Their derivatives are differences of sums.
CANCELS = (
    "segment_prod",
    "segment_cumprod",
    "segment_logcumsumexp",
    "segment_softmax",
    "segment_log_softmax",
    "segment_logsumexp",
    "segment_var",
    "segment_std",
)


def check_derivatives(op, sample, way, dtype):
    data, segments = sample.args
    result = floating(call(op, sample))
    upstream = upstream_gradient(result, way).requires_grad_()
    (gradient,) = torch.autograd.grad(result, data, upstream, create_graph=True)
    assert gradient.shape == data.shape and gradient.dtype == data.dtype

    other_data = data.detach().cpu().double().requires_grad_()
    other_upstream = upstream.detach().cpu().double().requires_grad_()
    expected = floating(op.reference(other_data, segments.cpu(), **sample.kwargs))
    (other_gradient,) = torch.autograd.grad(expected, other_data, other_upstream, create_graph=True)
    if op.name in CANCELS[2:]:
        scale = float(other_upstream.detach().abs().max()) if other_upstream.numel() else 0.0
        rtol = testing.TOLERANCES[dtype][0] * 8
        torch.testing.assert_close(
            gradient.detach().cpu().double(), other_gradient.detach(), rtol=rtol, atol=rtol * scale
        )
    else:
        testing.assert_matches(gradient.detach(), other_gradient.detach(), dtype)

    if op.name in CANCELS[:2] and dtype in (torch.float16, torch.bfloat16):
        return  # what is between the two derivatives leaves the range of 16 bits
    # The derivative of the gradient in some direction, by upstream (linear) and by data (prod alone has one).
    direction = testing.make_data(tuple(gradient.shape), dtype, seed=4)
    second = torch.autograd.grad(gradient, (upstream, data), direction.to(gradient.device), allow_unused=True)
    other = torch.autograd.grad(other_gradient, (other_upstream, other_data), direction.double(), allow_unused=True)
    for one, reference in zip(second, other):
        if reference is None or not reference.any():
            assert one is None or not one.any()
        elif op.name in CANCELS and dtype != torch.float64:
            # Sums of products of both signs: what is lost to cancellation is relative to their size, not to the sum's.
            scale = float(reference.abs().max())
            if op.name not in CANCELS[:2]:
                scale = max(scale, float(direction.abs().max()) * max(1.0, float(other_upstream.detach().abs().max())))
            rtol = testing.TOLERANCES[dtype][0] * 8
            torch.testing.assert_close(one.cpu().double(), reference, rtol=rtol, atol=rtol * scale)
        else:
            testing.assert_matches(one, reference, dtype)


@pytest.mark.parametrize(
    "name", ("segment_sum", "segment_mean", "segment_amax", "segment_amin", "segment_max", "segment_min")
)
def test_gradient_of_special_numbers(device, name):
    """NaN ties with NaN, an infinity with its like; a gradient is never NaN because a value is."""
    op = next(op for op in OPS if op.name == name)
    for grouping in ("offsets", "ignored"):
        sample = testing.make_sample(
            op, "uniform", 4, "contiguous", grouping, torch.float64, device, kind="special", requires_grad=True
        )
        data, segments = sample.args
        floating(call(op, sample)).sum().backward()
        other = data.detach().cpu().requires_grad_()
        floating(op.reference(other, segments.cpu())).sum().backward()
        assert data.grad.isfinite().all()
        torch.testing.assert_close(data.grad.cpu(), other.grad, rtol=1e-15, atol=0)


@differentiable
@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
def test_saved_segments_changed_in_place(op, device, grouping):
    sample = testing.make_sample(op, "canonical", 2, "contiguous", grouping, torch.float32, device, requires_grad=True)
    result = floating(call(op, sample))
    segments = sample.args[1]
    for part in (segments.offsets, segments.order, segments.index if grouping == "unsorted" else None):
        if part is not None:
            part.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("name", ("segment_prod", "segment_amax", "segment_amin"))
def test_saved_data_changed_in_place(device, name):
    op = next(op for op in OPS if op.name == name)
    leaf = testing.make_data((7,), torch.float32).to(device).requires_grad_()
    data = leaf * 1
    result = op.fn(data, Segments.from_offsets(torch.tensor([0, 3, 3, 7], device=device)))
    data.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@every_op
def test_no_gradient_for_integers_and_detached_data(op, device):
    for dtype in (torch.int32, torch.float32):
        if dtype in op.dtypes:
            sample = testing.make_sample(op, "canonical", 2, "contiguous", "offsets", dtype, device)
            assert not floating(call(op, sample)).requires_grad
    sample = testing.make_sample(op, "canonical", 2, "contiguous", "offsets", torch.float32, device, requires_grad=True)
    assert floating(call(op, sample)).requires_grad == op.differentiable
    with torch.no_grad():
        assert not floating(call(op, sample)).requires_grad
    with torch.inference_mode():
        assert not floating(call(op, sample)).requires_grad


# ---- determinism ----


@pytest.mark.parametrize("grouping", ("offsets", "unsorted"))
@every_op
def test_same_bits_again(op, device, grouping):
    """Run after run, with deterministic algorithms asked for or not, and on the CPU for any number of threads."""
    features = 5 if device == "cpu" else 3
    sample = testing.make_sample(
        op, "one_giant", features, "contiguous", grouping, torch.float32, device, kind="normal"
    )
    data, segments = sample.args

    def run():
        leaf = data.detach().clone().requires_grad_(op.differentiable)
        results = op.fn(leaf, segments)
        if op.differentiable:
            floating(results).backward(upstream_gradient(floating(results), "contiguous"))
            return (*(results if isinstance(results, tuple) else (results,)), leaf.grad)
        return results

    first = run()
    torch.use_deterministic_algorithms(True)
    assert_same_bits(first, run())
    torch.use_deterministic_algorithms(False)
    if device == "cpu":
        for number in (1, 2, 3):
            with threads(number):
                assert_same_bits(first, run())


@pytest.mark.parametrize("pattern", ("one_giant", "around_128", "many_tiny"))
@every_floating_dtype
@takes_rows
def test_rows_in_any_order_give_the_bits_of_sorted_rows(op, device, dtype, pattern):
    skip_unless_taken(op, dtype)
    segments = testing.make_segments(testing.PATTERNS[pattern], "unsorted", device=device)
    data = testing.make_data((segments.num_rows, 3), dtype, kind="normal").to(device).requires_grad_(op.differentiable)
    in_order = data.detach()[segments.order].requires_grad_(op.differentiable)
    results, sorted_results = op.fn(data, segments), op.fn(in_order, Segments.from_offsets(segments.offsets))
    if "arg" in op.name:
        row = sorted_results.clone()
        results, sorted_results = results, torch.where(row < 0, row, segments.order[row.clamp(min=0)])
    else:
        if isinstance(results, tuple):
            row = sorted_results[1]
            found = results[1][segments.order] if op.per_row and not op.grouped else results[1]
            assert torch.equal(found, torch.where(row < 0, row, segments.order[row.clamp(min=0)]))
        results, sorted_results = floating(results), floating(sorted_results)
        results = results[segments.order] if op.per_row and not op.grouped else results
    assert_same_bits(results, sorted_results)
    if op.differentiable:
        upstream = upstream_gradient(results, "contiguous")
        results.backward(upstream)
        sorted_results.backward(upstream)
        assert_same_bits(data.grad[segments.order], in_order.grad)


@takes_rows
def test_bits_do_not_depend_on_the_neighbours(op, device):
    """A segment gives the same result alone and among others."""
    lengths = (700, 3, 1300, 0, 40)
    segments = testing.make_segments(lengths, device=device)
    data = testing.make_data((sum(lengths), 3), torch.float32, kind="normal").to(device)
    together = floating(op.fn(data, segments))
    if "arg" in op.name:
        begins = segments.offsets[:-1][segments.index] if op.per_row else segments.offsets[:-1]
        together = torch.where(together < 0, together, together - begins[:, None])
    if op.per_row:
        together = together.split(lengths)
    for number, rows in enumerate(data.split(lengths)):
        alone = floating(op.fn(rows, torch.tensor([0, len(rows)], device=device)))
        assert_same_bits(together[number], alone if op.per_row else alone[0])


# ---- relations between calls ----


@reductions
def test_permuting_segments_permutes_results(op, device):
    lengths = torch.tensor(testing.PATTERNS["many_tiny"])
    data = testing.make_data((int(lengths.sum()), 2), torch.float32, kind="normal")
    permutation = torch.randperm(len(lengths), generator=testing.make_generator(5))
    rows = data.split(lengths.tolist())
    permuted = torch.cat([rows[number] for number in permutation.tolist()])
    one = floating(op.fn(data.to(device), Segments.from_lengths(lengths.to(device))))
    other = floating(op.fn(permuted.to(device), Segments.from_lengths(lengths[permutation].to(device))))
    if "arg" in op.name:
        return  # row numbers change with the order: test_value has them
    assert_same_bits(one.cpu()[permutation], other)


@pytest.mark.parametrize(
    "name", ("segment_sum", "segment_prod", "segment_amax", "segment_amin", "segment_any", "segment_all")
)
def test_a_segment_in_two_parts_combines(device, name):
    """Reducing parts and then the parts' results is reducing the whole, for what is exact in any order."""
    op = next(op for op in OPS if op.name == name)
    data = testing.make_data((600, 3), torch.float32, kind=op.data_kind).to(device)
    parts = torch.arange(0, 601, 20, device=device)
    whole = torch.arange(0, 601, 100, device=device)
    of_parts = torch.arange(0, 31, 5, device=device)
    assert torch.equal(op.fn(op.fn(data, parts), of_parts), op.fn(data, whole))


def test_broadcast_and_sum_are_adjoint(device):
    """<broadcast(v), x> = <v, sum(x)>, exactly for dyadic numbers."""
    from fastops import segment_broadcast, segment_sum

    for grouping in testing.GROUPINGS:
        segments = testing.make_segments(testing.PATTERNS["many_tiny"], grouping, device=device)
        rows = testing.make_data((segments.num_rows, 3), torch.float64, seed=1).to(device)
        values = testing.make_data((segments.num_segments, 3), torch.float64, seed=2).to(device)
        left = (segment_broadcast(values, segments) * rows).sum()
        right = (values * segment_sum(rows, segments)).sum()
        assert float(left) == float(right)


# ---- accuracy ----


def relative_error(result, exact):
    return float((result.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("features", (1, 4, 16))
@pytest.mark.parametrize("unsorted", (False, True), ids=("offsets", "index"))
def test_long_float32_sums_are_as_accurate_as_torch_sum(device, features, unsorted):
    from fastops import segment_mean, segment_sum

    rows = (1_000_000 if device == "cpu" else 16_000) // features
    data = torch.rand((rows, features), generator=testing.make_generator(1)).to(device)
    offsets = torch.tensor([0, 10, rows], device=device)
    segments = Segments.from_offsets(offsets)
    part = data[10:]
    if unsorted:
        order = torch.randperm(rows, generator=testing.make_generator(2))
        segments = Segments.from_index(segments.index.cpu()[order].to(device), 2)
        part = data[(segments.index == 1)]
    exact = part.double().sum(0)
    torch_error = relative_error(part.sum(0), exact)
    assert relative_error(segment_sum(data, segments)[1], exact) <= max(torch_error, 2**-22)
    assert relative_error(segment_mean(data, segments)[1], exact / part.size(0)) <= max(torch_error, 2**-22)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=SHORT.get)
def test_half_sums_round_once(device, dtype):
    """The result is the float64 sum of the given numbers, rounded: bit for bit where float32 holds the sum exactly."""
    from fastops import segment_mean, segment_sum

    segments = testing.make_segments((3000, 7, 0, 900), "unsorted", device=device)
    data = testing.make_data((segments.num_rows, 2), dtype, seed=9).to(device)
    exact = [data.cpu().double()[segments.index.cpu() == number].sum(0) for number in range(4)]
    assert torch.equal(segment_sum(data, segments).cpu(), torch.stack(exact).to(dtype))
    lengths = segments.lengths.cpu().clamp(min=1)[:, None]
    assert torch.equal(segment_mean(data, segments).cpu(), (torch.stack(exact) / lengths).to(dtype))


# ---- errors ----


ERRORS = [(op, error.id) for op in OPS for error in op.errors("cpu")]


@pytest.mark.parametrize("op, id", ERRORS, ids=lambda value: str(value))
def test_error(op, id, device):
    found = [error for error in op.errors(device) if error.id == id]
    if not found:
        pytest.skip("bare offsets are not looked at on CUDA")
    with pytest.raises(found[0].exception, match=found[0].pattern):
        found[0].call()


@pytest.mark.parametrize("op, id", ERRORS, ids=lambda value: str(value))
def test_error_of_the_reference(op, id):
    """The reference, which stands in for operators, fails in the same words."""
    import dataclasses

    stand_in = dataclasses.replace(op, fn=op.reference)
    error = next(error for error in stand_in.errors("cpu") if error.id == id)
    if id.startswith("num_rows"):
        pytest.skip("checked before the reference is called")
    with pytest.raises(error.exception, match=error.pattern):
        error.call()


@pytest.mark.parametrize(
    "wrong", ([0, 100, 50, 7], [-5, 3, 3, 7], [0, 2**40, -(2**40), 7], [7, 3, 0, 0], [0, 0, 0, 2**62]), ids=str
)
@every_op
def test_unchecked_offsets_are_never_used_out_of_bounds(op, device, wrong):
    """Wrong offsets give wrong results or an error, but results of the right shape, and touch nothing that is not theirs."""
    segments = Segments.from_offsets(torch.tensor(wrong, device=device), check_invariants=False)
    rows = segments.num_segments if op.takes_values else 7
    arena = torch.full((rows + 200, 3), float("nan"), device=device)
    data = arena[100 : 100 + rows]
    data.copy_(testing.make_data((rows, 3), torch.float32))
    data = data.detach().requires_grad_(op.differentiable)
    try:
        results = op.fn(data, segments, **({"num_rows": 7} if op.takes_values else {}))
    except ValueError as error:
        assert device == "cpu" and wrong[-1] != 7, error  # the last offset is all that gives them away
        return
    for result in results if isinstance(results, tuple) else (results,):
        assert result.shape == ((7, 3) if op.takes_values or op.per_row else (3, *op.behind, 3))
        if device == "cpu":  # on CUDA what no segment claims may stay unwritten; a read out of bounds is an error there
            expected = op.empty.startswith("nan")
            assert expected or not result.is_floating_point() or not result.isnan().any(), "it read past the data"
            most = 7 if op.name == "segment_nunique" else 6  # rows, or the number of one
            assert result.is_floating_point() or int(result.max()) <= most
    if op.differentiable:
        floating(results).sum().backward()
        assert data.grad.shape == data.shape
        assert device == "cuda" or not data.grad.isnan().any(), "it read past the gradient"
    if device == "cuda":
        torch.cuda.synchronize()
    assert arena[:100].isnan().all() and arena[100 + rows :].isnan().all()
    if not op.takes_values and wrong[-1] == 7 and device == "cpu":
        assert segments.index.shape == (7,) and int(segments.index.max()) < 3


@every_op
def test_unchecked_index_is_never_used_out_of_bounds(op, device):
    index = torch.tensor([5, -3, 1, 2**40, 0, 2, 1], device=device)
    segments = Segments.from_index(index, 3, check_invariants=False)
    rows = 3 if op.takes_values else 7
    data = testing.make_data((rows, 2), torch.float32).to(device).requires_grad_(op.differentiable)
    results = op.fn(data, segments)
    kept = Segments.from_index(torch.tensor([-1, -1, 1, -1, 0, 2, 1]), 3, ignore_index=-1)
    expected = op.reference(data.detach().cpu(), kept)
    testing.assert_matches(results, expected, torch.float32)
    if op.differentiable:
        floating(results).sum().backward()
        assert data.grad.isfinite().all()
    for features in (1, 3, 64):  # several slices, with rows of no segment between them
        data = testing.make_data((4, rows, features), torch.float32)
        results = op.fn(data.to(device), segments, dim=1, **({"num_rows": 7} if op.takes_values else {}))
        testing.assert_matches(results, op.reference(data, kept, dim=1), torch.float32)


# ---- what torch asks of an operator ----


OPCHECK_GROUPINGS = ("offsets", "offsets32", "unsorted", "ignored")


@pytest.mark.parametrize("grouping", OPCHECK_GROUPINGS)
@every_op
def test_opcheck(op, device, grouping):
    """torch.library.opcheck: schema, autograd registration, fake kernels, compilation. With single rows, with
    nothing there, without contiguity and with gradients."""
    requires_grad = op.differentiable
    patterns = {"offsets": ("canonical", "singles", "all_empty", "none"), "unsorted": ("canonical", "one_row")}
    layouts = ("transposed", "contiguous", "dim1", "contiguous")
    for pattern, layout in zip(patterns.get(grouping, ("canonical",)), layouts):
        sample = testing.make_sample(
            op, pattern, 3, layout, grouping, torch.float32, device, requires_grad=requires_grad
        )
        data, segments = sample.args
        dim = sample.kwargs.get("dim", 0)
        torch.library.opcheck(op.overload, (data, *segments._parts, *further(op, segments.num_rows, device), dim), without_nan(op))


@every_op
def test_opcheck_of_integers(op):
    dtype = torch.int32 if torch.int32 in op.dtypes else torch.float16
    sample = testing.make_sample(op, "canonical", 3, "contiguous", "offsets", dtype)
    data, segments = sample.args
    torch.library.opcheck(op.overload, (data, *segments._parts, *further(op, segments.num_rows)), without_nan(op))


@every_dtype
@every_op
def test_meta_tensors(op, dtype):
    """On the meta device: the shapes, dtypes and strides of the real thing, and its errors about data."""
    if dtype not in op.dtypes:
        pytest.skip("not taken")
    for layout, grouping in (("contiguous", "offsets"), ("transposed", "unsorted"), ("dim1", "offsets32")):
        sample = testing.make_sample(op, "canonical", 3, layout, grouping, dtype)
        real = call(op, sample)
        data, segments = sample.args
        fake = op.fn(data.to("meta"), segments.to("meta"), **sample.kwargs)
        for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (real, fake)]):
            assert other.is_meta
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@differentiable
def test_torch_func(op, device):
    """vmap, grad, jvp and jacrev in short; test_func.py has them at length."""
    segments = testing.make_segments((2, 0, 3), "unsorted", device=device)
    rows = segments.num_segments if op.takes_values else segments.num_rows
    data = testing.make_data((4, rows), torch.float64, kind="distinct", seed=3).to(device)

    def f(x):
        return floating(op.fn(x, segments))

    one_by_one = torch.stack([f(x) for x in data])
    torch.testing.assert_close(torch.vmap(f)(data), one_by_one, equal_nan=True)
    leaf = data.clone().requires_grad_()
    torch.vmap(f)(leaf).sum().backward()
    other = data.clone().requires_grad_()
    torch.stack([f(x) for x in other]).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, equal_nan=True)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(data[0]), other.grad[0])
    jacobian = torch.func.jacrev(f)(data[0])
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(f, data[0]))
    tangent = testing.make_data((rows,), torch.float64, seed=5).to(device)
    _, derivative = torch.func.jvp(f, (data[0],), (tangent,))
    torch.testing.assert_close(derivative, jacobian @ tangent)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(data[0], tangent)
        derivative = torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
    torch.testing.assert_close(derivative, jacobian @ tangent)


def test_types_of_named_results():
    data, offsets = torch.arange(7.0), torch.tensor([0, 3, 3, 7])
    for name in ("max", "min", "median", "mode", "topk"):
        kind = getattr(torch.return_types, name)
        result = find(f"segment_{name}").fn(data, offsets)
        assert type(result) is kind
        assert result.values is result[0] and torch.equal(result.indices, result[1])
