"""NumPy arrays in and out: the values of tensors, in the same memory, and a sentence where that cannot be."""

import functools
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import run_page
from torch.utils._python_dispatch import TorchDispatchMode

import fastops
from fastops import (
    DeviceMismatchError,
    Segments,
    nn,
    offload,
    segment_any,
    segment_broadcast,
    segment_cumsum,
    segment_max,
    segment_mean,
    segment_nunique,
    segment_quantile,
    segment_sort,
    segment_sum,
    segment_topk,
    segment_var,
    testing,
)
from fastops.registry import OPS

OFFSETS = np.array([0, 3, 3, 7])
DATA = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.float32)
SUMS = np.array([8, 0, 17], dtype=np.float32)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.fixture(autouse=True)
def no_warnings():
    """Not even the one of torch about arrays that cannot be written, which it gives once in a process."""
    once = not torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.set_warn_always(True)
        yield
        torch.set_warn_always(not once)


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def rows_of(op, dtype=np.float32):
    """Three values, or seven rows, of two columns."""
    data = np.stack((DATA, DATA[::-1]), 1)
    return np.ascontiguousarray(data[:3] if op.takes_values else data).astype(dtype)


class Seen(TorchDispatchMode):
    """The pointers of what operators of this package are given, and of what they return."""

    def __init__(self):
        super().__init__()
        self.given, self.returned = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "fastops::" in str(function._schema):
            self.given |= {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
            self.returned |= {x.data_ptr() for x in parts(result) if isinstance(x, torch.Tensor)}
        return result


# ---- values and memory ----


@every_op
@pytest.mark.parametrize("grouping", ("segments", "arrays"))
def test_what_tensors_give(op, grouping):
    for dtype in op.dtypes:
        if dtype == torch.bfloat16:
            continue
        data = testing.make_data((3 if op.takes_values else 7, 2), dtype)
        segments = Segments.from_offsets(torch.from_numpy(OFFSETS)) if grouping == "segments" else OFFSETS
        result, expected = op.fn(data.numpy(), segments), op.fn(data, segments)
        assert type(result) is (np.ndarray if isinstance(expected, torch.Tensor) else type(expected))
        for one, other in zip(parts(result), parts(expected)):
            assert type(one) is np.ndarray and isinstance(other, torch.Tensor)
            np.testing.assert_array_equal(one, other.numpy(), strict=True)


@every_op
def test_memory_is_shared(op):
    data, offsets = rows_of(op), OFFSETS.copy()
    with Seen() as seen:
        result = op.fn(data, offsets)
    assert {data.ctypes.data, offsets.ctypes.data} <= seen.given
    if op.name != "segment_argsort":  # whose operator returns more
        assert {part.ctypes.data for part in parts(result)} <= seen.returned
    assert not any(np.shares_memory(part, data) for part in parts(result))


@pytest.mark.parametrize("name", ("weight", "q"))
def test_memory_of_options_is_shared(name):
    option = np.full(7, 0.5) if name == "weight" else np.array([0.1, 0.5])
    data = DATA.astype(np.float64)
    with Seen() as seen:
        result = segment_sum(data, OFFSETS, weight=option) if name == "weight" else segment_quantile(data, OFFSETS, option)
    assert option.ctypes.data in seen.given and type(result) is np.ndarray


def test_memory_of_segments_is_shared():
    index = np.array([2, 0, 2, 0])
    assert Segments.from_offsets(OFFSETS).offsets.data_ptr() == OFFSETS.ctypes.data
    assert Segments.from_index(index).index.data_ptr() == index.ctypes.data
    lengths = np.array([3, 0, 4], dtype=np.int32)
    segments = Segments.from_lengths(lengths)
    assert segments.lengths.data_ptr() == lengths.ctypes.data and segments.offsets.tolist() == [0, 3, 3, 7]
    assert segments.offsets.dtype == torch.int32


def test_a_result_is_an_array_like_any_other():
    result = segment_sum(DATA, OFFSETS)
    result[0] = -1
    result.sort()
    assert result.tolist() == [-1, 0, 17] and result.flags.c_contiguous and result.flags.aligned


def test_named_tuples_print_and_unpack():
    values, indices = result = segment_max(DATA, OFFSETS)
    assert values is result.values and indices is result.indices
    assert repr(result).splitlines()[1] == "values=array([4., 0., 9.], dtype=float32),"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the memory from /proc")
def test_peak_of_memory():
    code = """if True:
        import numpy as np
        from fastops import Segments, segment_cumsum, segment_sum

        def peak():
            with open("/proc/self/status") as lines:
                return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

        data = np.ones((1 << 20, 16), np.float32)  # 64 MiB
        data.flags.writeable = False
        segments = Segments.from_lengths(np.full(1 << 16, 16))
        segment_sum(data[:16], np.array([0, 16]))
        segment_cumsum(data[:16], np.array([0, 16]))
        before = peak()
        segment_sum(data, segments)
        assert peak() - before < 16, peak() - before  # 4 MiB are the result
        segment_cumsum(data, segments)
        assert 64 <= peak() - before < 90, peak() - before
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# ---- arrays of all kinds ----


def not_aligned(data):
    array = np.zeros(data.nbytes + 1, np.uint8)[1:].view(data.dtype).reshape(data.shape)
    array[:] = data
    assert not array.flags.aligned
    return array


def read_only(data):
    array = data.copy()
    array.flags.writeable = False
    return array


def field(data):
    array = np.zeros(data.shape, [("a", np.int8), ("b", data.dtype)])
    array["b"] = data
    return array["b"]


class Subclass(np.ndarray):
    pass


TAKEN = {  # and whether the memory is that of the array
    "plain": (lambda data: data, True),
    "read only": (read_only, True),
    "fortran order": (np.asfortranarray, True),
    "every other row": (lambda data: np.repeat(data, 2, axis=0)[::2], True),
    "zero strides": (lambda data: np.broadcast_to(data[:, :1], data.shape), True),
    "subclass": (lambda data: data.view(Subclass), True),
    "recarray field": (lambda data: np.rec.fromarrays([data], names=["b"]).b, True),
    "negative strides": (lambda data: data[::-1, ::-1].copy()[::-1, ::-1], False),
    "foreign bytes": (lambda data: data.astype(data.dtype.newbyteorder("S")), False),
    "foreign bytes, read only": (lambda data: read_only(data.astype(data.dtype.newbyteorder("S"))), False),
    "field": (field, False),
    "not aligned": (not_aligned, False),
}


@pytest.mark.parametrize("make, shared", TAKEN.values(), ids=TAKEN)
def test_arrays_that_are_taken(make, shared):
    data = np.stack((DATA, DATA + 1), 1)
    array = make(data)
    before = array.copy()
    with Seen() as seen:
        result = segment_sum(array, OFFSETS)
    np.testing.assert_array_equal(result, np.add.reduceat(before, [0, 3], 0)[[0, 0, 1]] * [[1], [0], [1]])
    assert type(result) is np.ndarray and result.dtype == np.float32
    assert (array.ctypes.data in seen.given) == shared
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("make, shared", [TAKEN[name] for name in TAKEN if name not in ("fortran order", "zero strides")])
def test_offsets_that_are_taken(make, shared):
    offsets = make(OFFSETS[:, None])[:, 0]
    np.testing.assert_array_equal(segment_sum(DATA, offsets), SUMS)
    assert Segments.from_lengths(offsets).num_rows == 13
    assert Segments.from_index(offsets).num_segments == 8


def test_memory_map(tmp_path):
    DATA.tofile(tmp_path / "rows")
    rows = np.memmap(tmp_path / "rows", dtype=np.float32, mode="r")
    with Seen() as seen:
        result = segment_sum(rows, OFFSETS)
    assert type(result) is np.ndarray and result.tolist() == SUMS.tolist()
    assert rows.ctypes.data in seen.given


def test_a_matrix_is_an_array_of_two_dimensions():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = np.matrix(DATA)
    result = segment_sum(matrix, OFFSETS, dim=1)
    assert type(result) is np.ndarray and result.tolist() == [SUMS.tolist()]


@every_op
def test_nothing_in_the_array(op):
    for shape in ((0, 3), (0,)):
        for part in parts(op.fn(np.zeros(shape, np.float32), np.array([0]))):
            assert part.shape == (0, *op.behind, *shape[1:]) and type(part) is np.ndarray
    for part in parts(op.fn(rows_of(op)[:, :0], OFFSETS)):
        assert part.size == 0


ALL = "float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool"
REFUSED = {
    "float128": (DATA.astype(np.longdouble), f"be one of {ALL}, but got {np.dtype(np.longdouble)}; convert it with .astype"),
    "complex": (DATA.astype(np.complex64), f"be one of {ALL}, but got complex64$"),
    "uint16": (DATA.astype(np.uint16), f"be one of {ALL}, but got (?i:uint16)$"),
    "uint32": (DATA.astype(np.uint32), f"be one of {ALL}, but got (?i:uint32)$"),
    "uint64": (DATA.astype(np.uint64), f"be one of {ALL}, but got (?i:uint64)$"),
    "object": (DATA.astype(object), f"be one of {ALL}, but got object; convert it with .astype"),
    "strings": (DATA.astype(str), f"be one of {ALL}, but got <U32$"),
    "bytes": (DATA.astype(bytes), rf"be one of {ALL}, but got \|S32$"),
    "dates": (DATA.astype("M8[s]"), rf"be one of {ALL}, but got datetime64\[s\]; pass .view\('int64'\) of it"),
    "spans": (DATA.astype("m8[D]"), rf"be one of {ALL}, but got timedelta64\[D\]; pass .view\('int64'\) of it"),
    "structured": (np.zeros(7, "f4,i4"), rf"be one of {ALL}, but got \[.*\]; pass its fields one by one"),
    "masked": (np.ma.masked_greater(DATA, 4), r"be an array without a mask, but got numpy.*MaskedArray; pass .filled\(value\)"),
    "number": (np.float32(3), "be a torch.Tensor or a NumPy array, but got numpy.float32$"),
    "list": (DATA.tolist(), "be a torch.Tensor or a NumPy array, but got list$"),
    "tuple": (tuple(DATA), "be a torch.Tensor or a NumPy array, but got tuple$"),
    "Series": (pd.Series(DATA), r"be a torch.Tensor or a NumPy array, but got pandas.Series; pass .to_numpy\(\) of it$"),
    "DataFrame": (pd.DataFrame({"a": DATA}), r"be .*, but got pandas.DataFrame; pass .to_numpy\(\) of it$"),
    "Index": (pd.Index(DATA), r"be .*, but got pandas.Index; pass .to_numpy\(\) of it$"),
    "ExtensionArray": (pd.array([1, 2, 3, 4, 5, 6, None]), r"be .*, but got pandas.*IntegerArray; pass .to_numpy\(\) of it$"),
    "nothing": (None, "be a torch.Tensor or a NumPy array, but got NoneType$"),
}


@pytest.mark.parametrize("data, words", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(data, words):
    with pytest.raises(TypeError, match=f"^segment_sum: data must {words}"):
        segment_sum(data, OFFSETS)


def test_columns_of_polars():
    polars = pytest.importorskip("polars")
    for column in (polars.Series(DATA), polars.DataFrame({"a": DATA})):
        with pytest.raises(TypeError, match=r"^segment_sum: data must be .*, but got polars.\w+; pass .to_numpy\(\) of it$"):
            segment_sum(column, OFFSETS)


def test_an_array_of_no_dimensions():
    with pytest.raises(ValueError, match="^segment_sum: data must have at least 1 dimension, but got 0"):
        segment_sum(np.array(3.0), OFFSETS)


INDEX_REFUSED = {
    "float": (OFFSETS.astype(float), r"be int32 or int64, but got float64; convert it with .astype\(numpy.int64\)"),
    "uint64": (OFFSETS.astype(np.uint64), r"be int32 or int64, but got uint64; convert it with .astype\(numpy.int64\)"),
    "object": (OFFSETS.astype(object), r"be int32 or int64, but got object; convert it with .astype"),
    "strings": (OFFSETS.astype(str), "be int32 or int64, but got <U21"),
    "masked": (np.ma.array(OFFSETS), "be an array without a mask"),
    "Series": (pd.Series(OFFSETS), r"be .*a torch.Tensor or a NumPy array, but got pandas.Series; pass .to_numpy\(\) of it"),
    "list": (OFFSETS.tolist(), "be .*a torch.Tensor or a NumPy array, but got list"),
}


@pytest.mark.parametrize("offsets, words", INDEX_REFUSED.values(), ids=INDEX_REFUSED)
def test_offsets_that_are_refused(offsets, words):
    for name in ("offsets", "lengths", "index"):
        with pytest.raises(TypeError, match=f"^Segments.from_{name}: {name} must {words}"):
            getattr(Segments, f"from_{name}")(offsets)
    for data in (DATA, torch.from_numpy(DATA)):
        with pytest.raises(TypeError, match=f"^segment_sum: (offsets|segments) must {words}"):
            segment_sum(data, offsets)


def test_wrong_offsets():
    for wrong, words in (([0, 5, 2, 7], "ascend from 0, but got 2 after 5"), ([], "have at least 1 entry"), ([[0]], "have 1 dimension")):
        with pytest.raises(ValueError, match=f"^segment_sum: offsets must {words}"):
            segment_sum(DATA, np.array(wrong, dtype=np.int64))


# ---- arrays and tensors together ----


def test_data_decides_what_is_returned():
    tensor, segments = torch.from_numpy(DATA), Segments.from_offsets(OFFSETS)
    for grouping in (OFFSETS, torch.from_numpy(OFFSETS), segments):
        assert type(segment_sum(DATA, grouping)) is np.ndarray
        assert type(segment_sum(tensor, grouping)) is torch.Tensor
        assert type(segment_sum(DATA, grouping, weight=tensor)) is np.ndarray
        assert type(segment_sum(tensor, grouping, weight=DATA)) is torch.Tensor
        assert type(segment_quantile(DATA, grouping, torch.tensor([0.5]))) is np.ndarray
        assert type(segment_quantile(tensor, grouping, np.array([0.5]))) is torch.Tensor
        assert type(segment_broadcast(DATA[:3], grouping)) is np.ndarray
        assert type(segment_broadcast(tensor[:3], grouping)) is torch.Tensor


def test_gradients_with_offsets_and_weights_of_numpy():
    leaf = torch.from_numpy(DATA.copy()).requires_grad_()
    segment_sum(leaf, OFFSETS, weight=DATA).sum().backward()
    assert leaf.grad.tolist() == DATA.tolist()


def test_no_gradient_is_lost():
    weight = torch.from_numpy(DATA.copy()).requires_grad_()
    words = r"^segment_sum: data must be a torch.Tensor for a result with a gradient or .*, but got numpy.ndarray; pass torch.from_numpy"
    with pytest.raises(TypeError, match=words):
        segment_sum(DATA, OFFSETS, weight=weight)
    with pytest.raises(TypeError, match=words):
        torch.func.vmap(lambda w: segment_sum(DATA, OFFSETS, weight=w))(torch.ones(2, 7))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match=words):
        dual = torch.autograd.forward_ad.make_dual(weight.detach(), torch.ones(7))
        segment_sum(DATA, Segments.from_offsets(OFFSETS), weight=dual)
    with torch.no_grad():
        assert segment_sum(DATA, OFFSETS, weight=weight).tolist() == [26, 0, 111]
    constant = torch.func.vmap(lambda x: x.sum() + torch.from_numpy(segment_sum(DATA, OFFSETS)))(torch.ones(2, 7))
    assert constant.tolist() == [[15, 7, 24]] * 2


def test_results_that_numpy_cannot_hold():
    for call in (
        lambda: segment_sum(DATA, OFFSETS, dtype=torch.bfloat16),
        lambda: segment_sum(DATA.astype(np.int32), OFFSETS, weight=torch.ones(7, dtype=torch.bfloat16)),
    ):
        with pytest.raises(TypeError, match="^segment_sum: data must be a torch.Tensor for a result in bfloat16, which NumPy lacks"):
            call()


def test_devices():
    segments = Segments.from_offsets(OFFSETS)
    with pytest.raises(DeviceMismatchError, match=r"^segment_sum: segments must be on the device of data \(cpu\), but got meta"):
        segment_sum(DATA, segments.to("meta"))
    with pytest.raises(DeviceMismatchError, match=r"^segment_sum: weight must be on the device of data \(cpu\), but got meta"):
        segment_sum(DATA, segments, weight=torch.ones(7, device="meta"))
    with pytest.raises(DeviceMismatchError, match=r"^segment_sum: offsets must be on the device of data \(meta\), but got cpu"):
        segment_sum(torch.ones(7, device="meta"), OFFSETS)
    with torch.device("meta"):  # which says where new tensors are made
        assert segment_sum(DATA, OFFSETS).tolist() == SUMS.tolist()
        assert segment_quantile(DATA, OFFSETS, 0.5, fill_value=0).tolist() == [3, 0, 3.5]


def test_segments_on_cuda(cuda):
    segments = Segments.from_offsets(OFFSETS).to(cuda)
    with pytest.raises(DeviceMismatchError, match=r"segments must be on the device of data \(cpu\), but got cuda:0; move one of them"):
        segment_sum(DATA, segments)
    with pytest.raises(DeviceMismatchError, match=r"offsets must be on the device of data \(cuda:0\), but got cpu; move one of them"):
        segment_sum(torch.from_numpy(DATA).to(cuda), OFFSETS)
    with pytest.raises(DeviceMismatchError, match=r"weight must be on the device of data \(cuda:0\), but got cpu; move one of them"):
        segment_sum(torch.from_numpy(DATA).to(cuda), segments, weight=DATA)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(TypeError, match="data must be a torch.Tensor for a result that is a torch.FakeTensor"):
        segment_sum(DATA, OFFSETS)


# ---- options ----


@pytest.fixture(params=("array", "tensor"))
def either(request):
    return DATA if request.param == "array" else torch.from_numpy(DATA)


@pytest.mark.parametrize("segments", (OFFSETS, Segments.from_offsets(OFFSETS)), ids=("offsets", "segments"))
def test_numbers_of_numpy_as_options(either, segments):
    def same(result, expected):
        assert all(type(part) is type(either) for part in parts(result))
        for one, other in zip(parts(result), parts(expected)):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    same(segment_sum(either, segments, dim=np.int64(0)), SUMS)
    same(segment_sum(either, segments, dim=np.int8(-1)), SUMS)
    for fill in (np.float32(0.5), np.float16(0.5), np.float64(0.5), np.array(0.5)):
        same(segment_sum(either, segments, fill_value=fill), [8, 0.5, 17])
        same(segment_max(either, segments, fill_value=fill), ([4, 0.5, 9], [2, -1, 5]))
        same(segment_sum(either, segments, weight=either, fill_value=fill), [26, 0.5, 111])
        same(segment_quantile(either, segments, fill, fill_value=fill), [3, 0.5, 3.5])
    for fill in (np.uint8(7), np.int64(7), np.array(7)):
        same(segment_sum(either, segments, fill_value=fill), [8, 7, 17])
        same(segment_nunique(either, segments, fill_value=fill), [3, 7, 4])
    for number in (np.int64(2), np.uint8(2), np.array(2)):
        same(segment_topk(either, segments, number), segment_topk(either, segments, 2))
        same(segment_topk(either, segments, k=number, largest=np.bool_(False)), segment_topk(either, segments, 2, largest=False))
    for zero in (np.int64(0), np.float32(0)):
        same(segment_var(either, segments, correction=zero), segment_var(either, segments, correction=0))
    same(segment_any(either, segments, fill_value=np.bool_(True)), [True, True, True])
    same(segment_sort(either, segments, descending=np.bool_(True)), segment_sort(either, segments, descending=True))
    same(segment_sort(either, segments, descending=np.bool_(False)), segment_sort(either, segments))
    same(segment_cumsum(either, segments, exclusive=np.bool_(True), reverse=np.bool_(True)), [5, 4, 0, 16, 11, 2, 0])
    same(segment_broadcast(either[:3], segments, num_rows=np.int32(7)), either[:3][[0, 0, 0, 2, 2, 2, 2]])


def test_numbers_of_numpy_for_segments():
    index = np.array([1, -1, 0])
    segments = Segments.from_index(index, np.int64(3), ignore_index=np.int32(-1))
    assert (segments.num_segments, segments.index.tolist()) == (3, [1, -1, 0])


@pytest.mark.parametrize(
    "options, words",
    (
        ({"fill_value": np.longdouble(1)}, "fill_value must be a number, but got numpy.longdouble"),
        ({"fill_value": np.timedelta64(1, "D")}, "fill_value must be a number, but got numpy.timedelta64"),
        ({"fill_value": np.complex64(1)}, "fill_value must be a number, but got numpy.complex64"),
        ({"fill_value": np.str_("1")}, "fill_value must be a number, but got numpy.str_"),
        ({"fill_value": np.ones(3)}, "fill_value must be a number, but got numpy.ndarray"),
        ({"dim": np.float32(0)}, "dim must be an int, but got float"),
        ({"dim": np.array([0, 1])}, "dim must be an int, but got numpy.ndarray"),
        ({"weight": np.float32(2)}, "weight must be a torch.Tensor or a NumPy array, but got float"),
        ({"weight": DATA.astype(object)}, f"weight must be one of {ALL}, but got object"),
        ({"weight": np.ma.array(DATA)}, "weight must be an array without a mask"),
        ({"dtype": object}, "dtype must be a dtype that torch has, but got object"),
        ({"dtype": 3}, "dtype must be a dtype that torch has, but got int"),
        ({"dtype": "no such"}, "dtype must be a dtype that torch has, but got no such"),
        ({"dtype": np.dtype("M8[s]")}, r"dtype must be a dtype that torch has, but got datetime64\[s\]"),
        ({"dtype": np.complex64}, f"dtype must be one of {ALL}, but got complex64"),
    ),
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_are_refused(options, words):
    with pytest.raises(TypeError, match=f"^segment_sum: {words}"):
        segment_sum(DATA, OFFSETS, **options)


@pytest.mark.parametrize("dtype", (np.float64, "f8", np.dtype(">f8"), float, torch.float64), ids=repr)
def test_dtypes_of_numpy(dtype):
    result = segment_mean(DATA, OFFSETS, dtype=dtype, weight=DATA)
    assert result.dtype == np.float64 and result.dtype.isnative
    assert segment_cumsum(DATA.astype(np.int8), OFFSETS, dtype=dtype).dtype == np.float64


def test_a_tensor_takes_dtypes_of_torch_only():
    with pytest.raises(TypeError, match="^segment_sum: dtype must be a torch.dtype, but got numpy.float64"):
        segment_sum(torch.from_numpy(DATA), OFFSETS, dtype=np.float64)


# ---- neighbours ----


@pytest.mark.parametrize("make", (nn.SegmentSoftmax, nn.SegmentPool, lambda: nn.SegmentAttentionPool(2), lambda: nn.SegmentNorm(2)))
def test_modules_are_of_torch(make):
    module, data = make(), np.stack((DATA, DATA), 1)
    words = rf"^{type(module).__name__}: data must be a torch.Tensor, but got numpy.ndarray; pass torch.from_numpy\(...\) of it$"
    with pytest.raises(TypeError, match=words):
        module(data, OFFSETS)
    with pytest.raises(TypeError, match=r"data must be a torch.Tensor, but got pandas.DataFrame; pass .to_numpy\(\) of it$"):
        module(pd.DataFrame(data), OFFSETS)
    assert torch.equal(module(torch.from_numpy(data), OFFSETS), module(torch.from_numpy(data), torch.from_numpy(OFFSETS)))


def test_the_reference_is_of_torch():
    words = r"^segment_sum: data must be a torch.Tensor, but got numpy.ndarray; pass torch.from_numpy\(...\) of it$"
    with pytest.raises(TypeError, match=words):
        fastops.reference.segment_sum(DATA, OFFSETS)
    assert fastops.reference.segment_sum(torch.from_numpy(DATA), OFFSETS).tolist() == SUMS.tolist()


def test_offload_takes_arrays_and_returns_tensors():
    options = {"device": "cpu", "progress": False}
    assert offload(segment_sum, DATA, OFFSETS, **options).tolist() == SUMS.tolist()
    assert type(offload(segment_sum, read_only(DATA), OFFSETS, weight=read_only(DATA), **options)) is torch.Tensor
    many = offload(functools.partial(segment_quantile, q=np.array([0.0, 1.0])), DATA, OFFSETS, fill_value=np.float32(0), **options)
    assert many.tolist() == [[1, 0, 1], [4, 0, 9]]
    counts = offload("segment_argmax", DATA, OFFSETS, fill_value=np.int64(9), **options)
    assert counts.tolist() == [2, 9, 5]


def test_the_page():
    assert run_page(Path(__file__).resolve().parents[1] / "docs" / "numpy.md", "python") > 20


# ---- torch.compile, which traces NumPy itself ----


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(fresh):
    return functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


def test_one_graph_of_arrays(compiled):
    segments = Segments.from_offsets(OFFSETS)

    def f(data, segments, lengths):
        top = segment_max(data[::-1], segments)
        weighted = segment_sum(data, segments, weight=data, dtype=np.float64)
        return top.values, top.indices, weighted, segment_quantile(data, Segments.from_lengths(lengths), np.array([0.5]))

    arguments = read_only(DATA), segments, np.array([3, 0, 4])
    results = compiled(f)(*arguments)
    for one, other in zip(results, f(*arguments)):
        assert type(one) is np.ndarray
        np.testing.assert_array_equal(one, other, strict=True)


def test_gradients_through_offsets_of_numpy(compiled):
    leaf = torch.from_numpy(DATA.copy()).requires_grad_()
    compiled(lambda data, offsets: segment_sum(data * 2, offsets))(leaf, OFFSETS).sum().backward()
    assert leaf.grad.tolist() == [2] * 7


def test_what_breaks_the_graph_gives_the_same(fresh):
    """Numbers of NumPy, which would be tensors in it, and arrays that torch cannot read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data, call in (
            (torch.from_numpy(DATA), lambda data: segment_sum(data, OFFSETS, fill_value=np.float32(3), dim=np.int64(0))),
            (DATA, lambda data: segment_sort(data, OFFSETS, descending=np.bool_(True)).values),
            (DATA.astype(">f4"), lambda data: segment_sum(data, OFFSETS)),
            (DATA[::-1].copy()[::-1], lambda data: segment_sum(data, OFFSETS)),
        ):
            torch._dynamo.reset()
            result = torch.compile(call, backend="aot_eager")(data)
            assert type(result) is type(data)
            np.testing.assert_array_equal(np.asarray(result), np.asarray(call(data)))
        with pytest.raises(TypeError, match="^segment_sum: data must be one of .*, but got datetime64"):
            torch.compile(segment_sum, backend="aot_eager")(DATA.astype("M8[s]"), OFFSETS)
