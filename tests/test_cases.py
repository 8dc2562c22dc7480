"""What users of segment and scatter libraries ran into: the public cases, each with its number.

Inputs and right answers are those of the cases, worked out there independently of this library.
"""

import subprocess
import sys

import pytest
import torch
from helpers import first, further, gradient, same, without_nan

import fastops
from fastops import (
    DeviceMismatchError,
    Segments,
    segment_amax,
    segment_amin,
    segment_argmax,
    segment_argmin,
    segment_broadcast,
    segment_max,
    segment_mean,
    segment_median,
    segment_min,
    segment_prod,
    segment_quantile,
    segment_sum,
    segment_topk,
    testing,
)
from fastops.registry import OPS

NAN = float("nan")


def case(number, title):
    return pytest.mark.parametrize("case", [pytest.param(None, id=f"ISS-{number}-{title}")])


every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
reductions = pytest.mark.parametrize("op", [op for op in OPS if not op.takes_values], ids=lambda op: op.name)


def close(result, expected):
    torch.testing.assert_close(
        result.detach().cpu(), torch.as_tensor(expected, dtype=result.dtype), rtol=1e-6, atol=1e-7
    )


@case("03", "not_compiled_with_cuda")
def test_cuda_tensor_in_a_build_without_cuda(case, monkeypatch):
    """build_info says whether CUDA is in and why not; a call says the same and how to bring it in, for every operation."""
    info = fastops.build_info()
    assert isinstance(info["cuda"], bool)
    if info["cuda"]:
        return
    assert info["cuda_reason"]

    class ElsewhereTensor(torch.Tensor):  # as good as a CUDA tensor for all that is looked at before a kernel runs
        device = torch.device("cuda", 0)
        is_cuda, is_cpu, is_meta = True, False, False

    data = torch.ones(3).as_subclass(ElsewhereTensor)
    offsets = torch.tensor([0, 1, 2, 3]).as_subclass(ElsewhereTensor)
    segments = Segments.from_offsets(offsets, check_invariants=False)
    for op in OPS:
        options = {"num_rows": 3} if op.takes_values else {}
        with pytest.raises(RuntimeError) as error:
            op.fn(data, segments, **options)
        text = str(error.value)
        assert info["cuda_reason"] in text and op.name in text and "FASTOPS_CUDA=1" in text


@case("11", "group_id_out_of_range")
def test_index_out_of_range(case, device):
    data = torch.tensor([1.0, 2, 3], device=device)
    with pytest.raises(ValueError, match=r"index must be in \[0, 3\), but got 5 at position 1"):
        Segments.from_index(torch.tensor([0, 5, -100], device=device), 3)
    with pytest.raises(MemoryError, match="num_segments must fit in memory, but got 100000000001"):
        Segments.from_index(torch.tensor([0, 1, 10**11], device=device))
    unchecked = Segments.from_index(torch.tensor([0, 5, -100], device=device), 3, check_invariants=False)
    same(segment_sum(data, unchecked), [1, 0, 0])
    same(segment_sum(data, torch.tensor([0, 1, 3], device=device)), [1, 5])  # the device lives


@case("12", "half_sums_stall")
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_sums_of_many_halves(case, device, dtype):
    ones = torch.ones(4096, dtype=dtype, device=device)
    in_order = Segments.from_offsets(torch.tensor([0, 4096], device=device))
    by_index = Segments.from_index(torch.zeros(4096, dtype=torch.int64, device=device), 1)
    mixed = Segments.from_index((torch.arange(4096) % 2).to(device), 2)
    for segments in (in_order, by_index):
        same(segment_sum(ones, segments), [4096])
        same(segment_mean(ones, segments), [1])
    same(segment_sum(ones, mixed), [2048, 2048])
    if dtype == torch.float16:
        data = torch.randn(10000, generator=testing.make_generator(0)).half()
        mean = segment_mean(data.to(device), torch.tensor([0, 10000], device=device))
        assert abs(mean.item() - data.double().mean().item()) < 1e-4
        assert abs(data.double().mean().item() - -0.0107018) < 1e-7  # the very input of the case


@case("13", "dtypes")
@pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
)
def test_every_operation_and_dtype(case, device, dtype):
    data = torch.tensor([1, 2, 3, 5], dtype=dtype, device=device)
    offsets = torch.tensor([0, 1, 2, 2, 4], device=device)
    same(segment_sum(data, offsets), [1, 2, 0, 8])
    same(segment_prod(data, offsets), [1, 2, 1, 15])
    same(segment_amax(data, offsets), [1, 2, 0, 5])
    same(segment_amin(data, offsets), [1, 2, 0, 3])
    same(segment_max(data, offsets).indices, [0, 1, -1, 3])
    same(segment_argmin(data, offsets), [0, 1, -1, 2])
    if dtype.is_floating_point:
        same(segment_mean(data, offsets), [1, 2, 0, 4])
    else:
        with pytest.raises(TypeError, match="data must be one of float16, bfloat16, float32, float64, but got"):
            segment_mean(data, offsets)


@case("14", "mean_of_an_empty_group")
def test_empty_group(case, device):
    data = torch.tensor([1.0, 2, 3, 5], device=device)
    offsets = torch.tensor([0, 1, 2, 2, 4], device=device)
    same(segment_mean(data, offsets), [1, 2, 0, 4])
    same(segment_sum(data, offsets), [1, 2, 0, 8])
    same(gradient(segment_mean, data, offsets), [1, 1, 0.5, 0.5])


@case("16", "memory_of_the_index")
def test_no_index_as_wide_as_the_data(case):
    """The index is never spread over the features: a sum takes the memory of its result and little more."""
    code = """
import resource, torch, fastops
data = torch.ones(400_000, 80)
index = torch.randint(0, 1000, (400_000,))
segments = fastops.Segments.from_index(index, 1000)
fastops.segment_sum(data[:10], torch.tensor([0, 10]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastops.segment_sum(data, segments)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    extra = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert extra < 64  # MB; a (400000, 80) int64 index takes 244


@case("17", "torch_compile")
@every_op
def test_compile(case, op, device):
    data = testing.make_data((10, 3), torch.float32).to(device).requires_grad_(op.differentiable)
    index = (torch.arange(10) * 7 % 10).to(device)

    def f(x, index):
        return op.fn(x, Segments.from_index(index, 10))

    torch._dynamo.reset()  # one function for all operations would meet the limit of recompilations
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results, expected = compiled(data, index), f(data, index)
    for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (results, expected)]):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    if op.differentiable:
        (compiled_gradient,) = torch.autograd.grad(first(results).square().sum(), data)
        (eager_gradient,) = torch.autograd.grad(first(expected).square().sum(), data)
        assert torch.equal(compiled_gradient, eager_gradient)


@case("18", "no_rows")
@every_op
def test_no_rows_at_all(case, op, device):
    for shape, offsets in (((0, 6), [0, 0, 0]), ((5, 0), [0, 2, 5]), ((0, 3), [0])):
        offsets = torch.tensor(offsets, device=device)
        rows = len(offsets) - 1 if op.takes_values else shape[0]
        data = torch.zeros((rows, shape[1]), device=device, requires_grad=op.differentiable)
        result = first(op.fn(data, offsets, **({"num_rows": shape[0]} if op.takes_values else {})))
        assert result.shape == (shape[0] if op.takes_values or op.per_row else len(offsets) - 1, *op.behind, shape[1])
        if op.differentiable:
            result.sum().backward()
            assert data.grad.shape == data.shape and not data.grad.any()
    segments = Segments.from_index(torch.tensor([], dtype=torch.int64, device=device))
    assert first(op.fn(torch.zeros(0, 3, device=device), segments)).shape == (0, *op.behind, 3)
    same(segment_sum(torch.zeros(0, 6, device=device), torch.tensor([0, 0, 0], device=device)), torch.zeros(2, 6))


@case("19", "determinism")
@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_the_same_bits_every_time(case, op, device):
    rows, runs = (200_000, 5) if device == "cpu" else (5_000, 2)
    index = torch.randint(0, 10, (rows,), generator=testing.make_generator(1)).to(device)
    segments = Segments.from_index(index, 10)
    count = 10 if op.takes_values else rows
    data = torch.randn(count, generator=testing.make_generator(2)).to(device).requires_grad_()
    torch.use_deterministic_algorithms(True)
    seen = []
    for run in range(runs):
        torch.set_num_threads(1 + run % 2)
        result = first(op.fn(data, segments))
        (grad,) = torch.autograd.grad(result, data, result.detach())
        seen.append((result.detach(), grad))
    for result, grad in seen[1:]:
        assert torch.equal(result.view(torch.int32), seen[0][0].view(torch.int32))
        assert torch.equal(grad.view(torch.int32), seen[0][1].view(torch.int32))


@case("22", "skewed_groups")
def test_skewed_groups_are_right(case, device):
    """The right values and the same bits where one group has 95 % of the rows. Times are the benchmarks' matter."""
    total = 40_000 if device == "cpu" else 5_000
    big = total * 95 // 100
    lengths = torch.cat((torch.tensor([big]), torch.ones(total - big, dtype=torch.int64)))
    data = testing.make_data((total, 4), torch.float32)
    expected = torch.cat((data[:big].double().sum(0, keepdim=True), data[big:].double())).float()
    assert torch.equal(segment_sum(data.to(device), Segments.from_lengths(lengths.to(device))).cpu(), expected)


@case("26", "index_dtype")
def test_index_dtypes(case, device):
    data = torch.tensor([3.0, 1, 4], device=device)
    results = []
    for dtype in (torch.int64, torch.int32):
        index = torch.tensor([1, 0, 1], dtype=dtype, device=device)
        segments = Segments.from_index(index, 2)
        assert segments.index is index and segments.order.dtype == dtype and segments.offsets.dtype == dtype
        results.append(segment_sum(data, segments))
        results.append(segment_sum(data, torch.tensor([0, 1, 3], dtype=dtype, device=device)))
    same(results[0], [1, 7])
    same(results[1], [3, 5])
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    for dtype in (torch.float32, torch.bool, torch.uint8):
        for make in (Segments.from_index, Segments.from_offsets):
            with pytest.raises(TypeError, match="must be int32 or int64, but got"):
                make(torch.tensor([0, 1, 1], dtype=dtype, device=device))


@case("27", "more_than_2_31_elements")
def test_more_than_2_31_elements(case):
    """int8, 2.1 GB: the last row must count, and rows on either side of 2**31 elements."""
    available = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) * 1024
    if available < 8 * 2**30:
        pytest.skip(f"takes 6 GiB of memory, and {available / 2**30:.1f} GiB are free")
    rows, features = 2**25 + 3, 64
    data = torch.zeros((rows, features), dtype=torch.int8)
    edge = 2**31 // features
    data[[0, edge - 1, edge, rows - 1]] = torch.tensor([[1], [2], [3], [5]], dtype=torch.int8)
    offsets = torch.tensor([0, 1, rows])
    same(segment_sum(data, offsets), torch.tensor([[1], [10]]).expand(2, features))
    same(segment_amax(data, offsets), torch.tensor([[1], [5]]).expand(2, features))
    same(segment_argmax(data, offsets), torch.tensor([[0], [rows - 1]]).expand(2, features))
    last = Segments.from_offsets(torch.tensor([0, edge, rows - 1, rows]))
    same(segment_amax(data, last), torch.tensor([[2], [3], [5]]).expand(3, features))
    spread = segment_broadcast(torch.tensor([[1], [2], [3]], dtype=torch.int8).expand(3, features), last)
    same(spread[[0, edge - 1, edge, rows - 2, rows - 1], 0], [1, 1, 2, 2, 3])


@case("30", "different_devices")
@every_op
def test_devices_that_differ(case, op):
    data = torch.zeros(2 if op.takes_values else 3, 2)
    offsets = torch.tensor([0, 2, 3], device="meta")
    for segments, argument in ((offsets, "offsets"), (Segments.from_offsets(offsets), "segments")):
        name = "values" if op.takes_values else "data"
        words = rf"{op.name}: {argument} must be on the device of {name} \(cpu\), but got meta"
        with pytest.raises(DeviceMismatchError, match=words):
            op.fn(data, segments)
    with pytest.raises(RuntimeError, match=r"but got cpu"):
        op.fn(data.to("meta"), torch.tensor([0, 2, 3]))
    with pytest.raises(RuntimeError, match=rf"{op.name}: offsets must be on the device of"):  # and below the wrapper
        op.overload(data, offsets, None, None, *further(op, 3))


@case("31", "argmax_of_an_empty_group")
def test_argmax_of_empty_groups(case, device):
    data = torch.tensor([5.0, 7, 1], device=device)
    segments = Segments.from_index(torch.tensor([0, 0, 2], device=device), 4)
    same(segment_max(data, segments).values, [7, 0, 1, 0])
    same(segment_max(data, segments).indices, [1, -1, 2, -1])
    same(segment_argmax(data, segments), [1, -1, 2, -1])
    same(gradient(segment_max, data, segments), [0, 1, 1])
    same(gradient(segment_amax, data, segments), [0, 1, 1])


@case("32", "uninitialised_memory")
@reductions
def test_no_rows_give_the_fill_and_no_old_memory(case, op, device):
    data = torch.zeros(0, 64, device=device)
    segments = Segments.from_index(torch.tensor([], dtype=torch.int64, device=device), 1)
    fills = {"segment_prod": 1, "segment_all": 1, "segment_argmax": -1, "segment_argmin": -1, "segment_logsumexp": -torch.inf}
    for _ in range(5 if device == "cpu" else 1):
        junk = torch.full((2**24 if device == "cpu" else 2**10,), 1e30, device=device)
        del junk
        junk = [torch.full((64,), 1e30, device=device) for _ in range(100 if device == "cpu" else 1)]
        del junk
        fill = NAN if op.empty.startswith("nan") else fills.get(op.name, 0)
        expected = torch.full((0 if op.per_row else 1, *op.behind, 64), fill)
        same(first(op.fn(data, segments)), expected)


@case("36", "nan_in_max_and_min")
def test_nan_in_max_and_min(case, device):
    data = torch.tensor([1, NAN, 2, 3, 4], device=device)
    for segments in (
        torch.tensor([0, 3, 5], device=device),
        Segments.from_index(torch.tensor([0, 0, 0, 1, 1], device=device), 2),
    ):
        same(segment_amax(data, segments), [NAN, 4])
        same(segment_amin(data, segments), [NAN, 3])
        same(segment_max(data, segments).values, [NAN, 4])
        same(segment_argmax(data, segments), [1, 4])
    unsorted = Segments.from_index(torch.tensor([1, 0, 0, 1, 0], device=device), 2)
    shuffled = torch.tensor([3, 1, NAN, 4, 2], device=device)
    same(segment_amax(shuffled, unsorted), [NAN, 4])
    same(segment_argmin(shuffled, unsorted), [2, 0])
    same(segment_amax(torch.tensor([NAN, 5], device=device), torch.tensor([0, 2], device=device)), [NAN])


@case("38", "gradient_at_ties")
def test_gradient_at_ties(case, device):
    data = torch.tensor([3.0, 3, 1, 7], device=device)
    offsets = torch.tensor([0, 3, 4], device=device)
    same(gradient(segment_amax, data, offsets), [0.5, 0.5, 0, 1])
    same(gradient(segment_max, data, offsets), [1, 0, 0, 1])


@case("40", "product_gradient_with_zeros")
def test_product_gradient_with_zeros(case, device):
    data = torch.tensor([0.0, 2, 3, 0, 0, 5, 4, 5], device=device)
    offsets = torch.tensor([0, 3, 6, 8], device=device)
    same(segment_prod(data, offsets), [0, 0, 20])
    same(gradient(segment_prod, data, offsets), [6, 0, 0, 0, 0, 0, 5, 4])


@case("43", "half_mean_overflows")
def test_half_mean_does_not_overflow(case, device):
    data = torch.full((1000,), 100.0, dtype=torch.float16, device=device)
    offsets = torch.tensor([0, 1000], device=device)
    same(segment_mean(data, offsets), [100])
    same(segment_sum(data, offsets), [float("inf")])
    same(segment_sum(data, offsets, dtype=torch.float32), [100000])


@case("46", "second_derivative")
def test_second_derivative(case, device):
    offsets = torch.tensor([0, 2, 3], device=device)
    data = torch.tensor([0.0, 1, 2], dtype=torch.float64, device=device, requires_grad=True)

    def f(x):
        return segment_sum(x, offsets).square().sum()

    (grad,) = torch.autograd.grad(f(data), data, create_graph=True)
    same(grad, [2, 2, 4])
    hessian = torch.stack([torch.autograd.grad(entry, data, retain_graph=True)[0] for entry in grad])
    same(hessian, [[2, 2, 0], [2, 2, 0], [0, 0, 2]])
    torch.autograd.gradgradcheck(lambda x: segment_sum(x, offsets) ** 2, (data,))
    torch.autograd.gradgradcheck(lambda x: segment_mean(x, offsets) ** 2, (data,))


@case("48", "max_started_from_zero")
def test_all_negative_data(case, device):
    data = torch.tensor([-2.0, -1, -4], device=device)
    segments = Segments.from_index(torch.tensor([0, 0, 1], device=device), 2)
    for numbers in (data, data.long()):
        same(segment_max(numbers, segments).values, [-1, -4])
        same(segment_max(numbers, segments).indices, [1, 2])
        same(segment_min(numbers, segments).values, [-2, -4])
        same(segment_min(numbers, segments).indices, [0, 2])


@case("49", "unsorted_ids")
def test_unsorted_ids_are_right(case, device):
    data = torch.tensor([1.0, 2, 4], device=device)
    same(segment_sum(data, Segments.from_index(torch.tensor([0, 1, 0], device=device), 2)), [5, 2])
    with pytest.raises(ValueError, match="offsets must ascend from 0"):
        Segments.from_offsets(torch.tensor([0, 1, 0], device=device))


@case("50", "malformed_offsets")
def test_malformed_offsets(case, device):
    data = torch.ones(3, device=device)
    for offsets, exception, words in (
        (torch.zeros(5, 0, 0, 9, 2, dtype=torch.int64), ValueError, "offsets must have 1 dimension, but got 5"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, "offsets must have 1 dimension, but got 2"),
        (torch.zeros(0, dtype=torch.int64), ValueError, "offsets must have at least 1 entry, but got 0"),
        (torch.zeros(2), TypeError, "offsets must be int32 or int64, but got float32"),
        (torch.zeros(2, dtype=torch.bool), TypeError, "offsets must be int32 or int64, but got bool"),
    ):
        offsets = offsets.to(device)
        for call in (lambda: segment_sum(data, offsets), lambda: Segments.from_offsets(offsets)):
            with pytest.raises(exception, match=words):
                call()
        with pytest.raises(exception, match=words):  # and below the wrapper
            torch.ops.fastops.segment_sum(data, offsets, None, None)
    with pytest.raises(ValueError, match="data must have at least 1 dimension, but got 0"):
        segment_sum(torch.tensor(1.0, device=device), torch.tensor([0, 1], device=device))


@case("52", "offsets_cover_part_of_the_rows")
def test_offsets_that_cover_part_of_the_rows(case, device):
    data = torch.arange(1.0, 9.0, device=device)
    with pytest.raises(ValueError, match="data must have 7 rows along dim 0, as the segments do, but got 8"):
        segment_mean(data, Segments.from_offsets(torch.tensor([0, 3, 7], device=device)))
    with pytest.raises(ValueError, match="offsets must ascend from 0, but got 2 at position 0"):
        Segments.from_offsets(torch.tensor([2, 3, 7], device=device))
    # What was meant: rows that belong to no segment.
    rest = Segments.from_index(torch.tensor([-1, -1, 0, 1, 1, 1, 1, -1], device=device), 2, ignore_index=-1)
    same(segment_mean(data, rest), [3, 5.5])
    same(gradient(segment_mean, data, rest), [0, 0, 1, 0.25, 0.25, 0.25, 0.25, 0])


@case("54", "huge_or_negative_group_counts")
def test_huge_and_negative_group_counts(case, device):
    index = torch.tensor([2], device=device)
    with pytest.raises(MemoryError, match="num_segments must fit in memory"):
        Segments.from_index(index, 2**62)
    with pytest.raises(ValueError, match="num_segments must be at least 0, but got -1"):
        Segments.from_index(index, -1)
    with pytest.raises(
        ValueError, match=r"index must be in \[0, 2\), but got 2 at position 0; num_segments must be at least 3"
    ):
        Segments.from_index(index, 2)
    same(segment_sum(torch.ones(1, device=device), Segments.from_index(index, 3)), [0, 0, 1])


@case("55", "index_and_sources_of_other_lengths")
def test_index_is_one_per_row(case, device):
    segments = Segments.from_index(torch.tensor([1, 0, 1, 1], device=device), 2)
    data = torch.arange(12.0, device=device).reshape(4, 3)
    same(segment_sum(data, segments), [[3, 4, 5], [15, 18, 21]])
    same(gradient(segment_sum, data, segments), torch.ones(4, 3))
    for wrong, grouping in (
        (torch.ones(1, device=device), segments),
        (torch.ones(2, 3, device=device), Segments.from_index(torch.tensor([0], device=device), 1)),
    ):
        with pytest.raises(ValueError, match="data must have . rows along dim 0, as the segments do, but got"):
            segment_sum(wrong, grouping)


@case("56", "dim")
def test_which_axis(case, device):
    data = torch.arange(12, device=device).reshape(2, 3, 2)
    segments = Segments.from_index(torch.tensor([0, 1, 0], device=device), 2)
    for dim in (1, -2):
        result = segment_sum(data, segments, dim=dim)
        assert result.shape == (2, 2, 2)
        same(result[:, 0], [[4, 6], [16, 18]])
        same(result[:, 1], [[2, 3], [8, 9]])
    with pytest.raises(IndexError, match=r"dim must be in \[-3, 2\], but got 5"):
        segment_sum(data, segments, dim=5)


@case("58", "strided_input")
def test_strided_input(case, device):
    segments = Segments.from_index(torch.tensor([0, 9, 1, 9, 0, 9], device=device)[::2], 2)
    data = torch.tensor([[1.0, 2, 3], [4, 5, 6]], device=device).t()
    same(segment_sum(data, segments), [[4, 10], [2, 5]])
    same(gradient(segment_sum, data, segments), gradient(segment_sum, data.contiguous(), segments).cpu())
    image = torch.arange(24.0, device=device).reshape(3, 2, 2, 2)
    last = image.contiguous(memory_format=torch.channels_last)
    same(segment_sum(last, segments), segment_sum(image, segments).cpu())
    same(gradient(segment_amax, last, segments), gradient(segment_amax, image, segments).cpu())
    offset = torch.arange(7.0, device=device)[1:4]
    same(segment_sum(offset, segments), [4, 2])


@case("62", "integer_data")
def test_integer_data(case, device):
    offsets = torch.tensor([0, 3], device=device)
    same(segment_sum(torch.tensor([2**53, 1, 1], device=device), offsets), [9007199254740994])
    same(segment_amax(torch.tensor([-5, -3], device=device), torch.tensor([0, 2], device=device)), [-3])
    ones = torch.ones(200, dtype=torch.int8, device=device)
    same(segment_sum(ones, torch.tensor([0, 200], device=device)), [200])
    with pytest.raises(TypeError, match="but got int64; pass dtype=torch.float32"):
        segment_mean(torch.tensor([-3, -4], device=device), torch.tensor([0, 2], device=device))
    pair = torch.tensor([-3, -4], device=device)
    same(segment_mean(pair, torch.tensor([0, 2], device=device), dtype=torch.float64), [-3.5])


@case("63", "not_the_first_gpu")
@every_op
def test_on_the_second_gpu(case, op, cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device; CUDASIM_DEVICES=2 makes two")
    assert torch.cuda.current_device() == 0
    for grouping in ("offsets", "unsorted"):
        segments = testing.make_segments((3, 0, 4), grouping)
        data = testing.make_data((segments.num_segments if op.takes_values else 7, 2), torch.float32)
        results = []
        for place in ("cuda:0", "cuda:1"):
            leaf = data.to(place).requires_grad_(op.differentiable)
            result = first(op.fn(leaf, segments.to(place)))
            assert result.device == torch.device(place)
            if op.differentiable:
                result.sum().backward()
                assert leaf.grad.device == torch.device(place)
            results.append((result.cpu(), leaf.grad.cpu() if op.differentiable else None))
        for one, other in zip(*results):
            assert one is other is None or torch.equal(one, other)
        assert torch.cuda.current_device() == 0, "the current device is put back"
        with pytest.raises(DeviceMismatchError, match=r"\(cuda:1\), but got cuda:0"):
            op.fn(data.to("cuda:1"), segments.to("cuda:0"))


@case("65", "cuda_graphs")
@every_op
def test_no_operation_waits_for_the_device(case, op, cuda):
    """A call that waits cannot be captured. On a GPU it is captured and replayed; the simulator counts the waits."""
    segments = testing.make_segments((3, 0, 4), "unsorted", device=cuda)
    data = testing.make_data((segments.num_segments if op.takes_values else 7, 2), torch.float32).to(cuda)
    data = data.requires_grad_(op.differentiable)
    upstream = torch.ones_like(first(op.fn(data, segments)))

    def step():
        result = first(op.fn(data, segments))
        if op.differentiable:
            return result, torch.autograd.grad(result, data, upstream)[0]
        return (result,)

    try:
        import cudasim

        simulated = cudasim.active()
    except ImportError:
        simulated = False
    if simulated:
        before = cudasim.syncs()
        step()
        assert cudasim.syncs() == before
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        data.copy_(data.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, step()):
        assert torch.equal(one, other)


@case("67", "opcheck_and_aliases")
@every_op
def test_opcheck_and_aliases(case, op, device):
    lengths = {"normal": (3, 0, 4), "ones": (1,) * 6, "empty": ()}
    for name in lengths:
        segments = testing.make_segments(lengths[name], device=device)
        rows = segments.num_segments if op.takes_values else segments.num_rows
        data = testing.make_data((2, rows), torch.float32).t().to(device).requires_grad_(op.differentiable)
        more = further(op, segments.num_rows, device)
        if device == "cpu" or name == "normal":
            torch.library.opcheck(op.overload, (data, *segments._parts, *more), without_nan(op))
        for grouping in (segments, Segments.from_index(segments.index, segments.num_segments)):
            results = op.fn(data, grouping)
            results = list(results) if isinstance(results, tuple) else [results]
            results = [tensor for tensor in results if tensor.numel()]
            storages = [tensor.untyped_storage().data_ptr() for tensor in (*results, *([data] if results else []))]
            assert len(set(storages)) == len(storages)


def sum_in_a_worker(rows):
    return float(segment_sum(torch.ones(rows), torch.tensor([0, rows // 2, rows]))[0])


class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return sum_in_a_worker(1_000_000)


@case("71", "fork_after_threads")
def test_fork_after_threads(case):
    torch.set_num_threads(2)
    assert sum_in_a_worker(1_000_000) == 500_000
    loader = torch.utils.data.DataLoader(Sums(), num_workers=2, multiprocessing_context="fork", timeout=30)
    assert [float(value) for value in loader] == [500_000] * 4


@case("81", "overflow_meets_zero")
def test_overflow_meets_zero(case, device):
    for group in ([1e30, 1e30, 0], [0, 1e30, 1e30], [1e30, 0, 1e30]):
        data = torch.tensor(group, device=device)
        same(segment_prod(data, torch.tensor([0, 3], device=device)), [0])
        assert not gradient(segment_prod, data, torch.tensor([0, 3], device=device)).isnan().any()


@case("75", "padding_of_topk")
def test_padding_of_topk(case, device):
    """A short segment yields its rows and then what is documented, never a row of another segment."""
    data, offsets = torch.tensor([-5.0, -6, 1, 2, 3], device=device), torch.tensor([0, 2, 5], device=device)
    values, indices = segment_topk(data, offsets, 2)
    same(values, [[-5, -6], [3, 2]])
    assert indices.tolist() == [[0, 1], [4, 3]]
    values, indices = segment_topk(data, offsets, 3)
    same(values, [[-5, -6, 0], [3, 2, 1]])
    assert indices.tolist() == [[0, 1, -1], [4, 3, 2]]
    values, indices = segment_topk(torch.full_like(data, -torch.inf), offsets, 4)
    assert indices.tolist() == [[0, 1, -1, -1], [2, 3, 4, -1]]
    same(values, [[-torch.inf] * 2 + [0] * 2, [-torch.inf] * 3 + [0]])
    assert segment_topk(data, offsets, 0).values.shape == (2, 0)


@case("77", "median_and_quantile")
def test_median_and_quantile(case, device):
    data, offsets = torch.tensor([1.0, 2, 3, 4, 0, 10, 20], device=device), torch.tensor([0, 4, 7], device=device)
    for interpolation, expected in {"linear": [2.5, 10], "lower": [2, 10], "higher": [3, 10], "nearest": [3, 10]}.items():
        same(segment_quantile(data, offsets, 0.5, interpolation=interpolation), expected)
    same(segment_quantile(data, offsets, 0.25), [1.75, 5])
    same(segment_median(data, offsets).values, [2, 10])
    unknown, offsets = torch.tensor([1.0, NAN, 3], device=device), torch.tensor([0, 3], device=device)
    same(segment_median(unknown, offsets).values, [NAN])
    same(segment_quantile(unknown, offsets, 0.5), [NAN])


@case("83", "dtypes_that_differ")
def test_dtypes_that_differ(case, device):
    """Results have the dtype that is documented or asked for: nothing is reinterpreted."""
    data = torch.tensor([1, 2, 3], device=device)
    offsets = torch.tensor([0, 2, 3], device=device)
    same(segment_sum(data, offsets, dtype=torch.float32), [3, 3])
    assert segment_sum(data, offsets, dtype=torch.float32).dtype == torch.float32
    same(segment_broadcast(data[:2], offsets), [1, 1, 2])
    with pytest.raises(TypeError, match="order and index must have the dtype of offsets"):
        torch.ops.fastops.segment_sum(
            data,
            offsets,
            torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
            torch.tensor([0, 0, 1], dtype=torch.int32, device=device),
        )


# ---- cases that concern reductions though the issue does not name them ----


@case("69", "vmap")
def test_vmap(case, device):
    offsets = torch.tensor([0, 2, 3], device=device)
    data = torch.ones(4, 3, device=device, requires_grad=True)
    result = torch.vmap(lambda row: segment_sum(row, offsets))(data)
    same(result, [[2, 1]] * 4)
    result.sum().backward()
    same(data.grad, torch.ones(4, 3))


@case("84", "forward_mode")
def test_forward_mode(case, device):
    segments = Segments.from_index(torch.tensor([0, 0, 2], device=device), 3)
    data, tangent = torch.tensor([2.0, 4, 6], device=device), torch.tensor([1.0, 3, 5], device=device)
    result, derivative = torch.func.jvp(lambda x: segment_mean(x, segments), (data,), (tangent,))
    same(result, [3, 0, 6])
    same(derivative, [2, 0, 5])
