"""`Segments`: construction, checks, laziness, moving, copying, crossing processes."""

import copy
import io
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils import _pytree as pytree

from fastops import DeviceMismatchError, Segments, segment_broadcast, segment_sum, testing

OFFSETS = [0, 3, 3, 7]


@pytest.fixture(params=(torch.int64, torch.int32), ids=("i64", "i32"))
def dtype(request):
    return request.param


def parts(segments):
    return segments.offsets, segments.order, segments.index, segments.lengths


def lists(segments):
    return [None if part is None else part.tolist() for part in parts(segments)]


# ---- construction ----


def test_from_offsets(device, dtype):
    offsets = torch.tensor(OFFSETS, dtype=dtype, device=device)
    segments = Segments.from_offsets(offsets)
    assert segments.offsets is offsets, "the tensor is kept, not copied"
    assert lists(segments) == [OFFSETS, None, [0, 0, 0, 2, 2, 2, 2], [3, 0, 4]]
    assert (segments.num_segments, segments.num_rows, segments.device) == (3, 7, offsets.device)
    assert {part.dtype for part in parts(segments) if part is not None} == {dtype}


def test_from_lengths(device, dtype):
    lengths = torch.tensor([3, 0, 4], dtype=dtype, device=device)
    segments = Segments.from_lengths(lengths)
    assert segments.lengths is lengths
    assert lists(segments) == [OFFSETS, None, [0, 0, 0, 2, 2, 2, 2], [3, 0, 4]]
    assert segments.num_rows == 7 and segments.offsets.dtype == segments.index.dtype == dtype


def test_from_index_that_ascends(device, dtype):
    index = torch.tensor([0, 0, 0, 2, 2, 2, 2], dtype=dtype, device=device)
    segments = Segments.from_index(index, 3)
    assert segments.order is None, "rows in order are noticed"
    assert segments.index is index
    assert lists(segments) == [OFFSETS, None, index.tolist(), [3, 0, 4]]
    assert segments.num_rows == 7 and segments.offsets.dtype == dtype


def test_from_index_in_any_order(device, dtype):
    index = torch.tensor([2, 0, 2, 2, 0, 2, 0], dtype=dtype, device=device)
    segments = Segments.from_index(index, 4)
    assert segments.index is index
    assert lists(segments) == [[0, 3, 3, 7, 7], [1, 4, 6, 0, 2, 3, 5], index.tolist(), [3, 0, 4, 0]]
    assert (segments.num_segments, segments.num_rows) == (4, 7)
    assert {part.dtype for part in parts(segments)} == {dtype}, "no hidden 64-bit copy"


def test_order_is_a_stable_sort(device):
    for count, number in ((1000, 7), (5000, 3000), (300, 1)):
        index = torch.randint(0, number, (count,), generator=testing.make_generator(count))
        segments = Segments.from_index(index.to(device), number)
        if segments.order is not None:
            assert torch.equal(segments.order.cpu(), index.argsort(stable=True))
        assert torch.equal(segments.lengths.cpu(), index.bincount(minlength=number))


def test_num_segments_from_the_largest_entry(device):
    assert Segments.from_index(torch.tensor([1, 4, 0], device=device)).num_segments == 5
    assert Segments.from_index(torch.tensor([], dtype=torch.int64, device=device)).num_segments == 0
    everything_ignored = Segments.from_index(torch.tensor([-1, -1], device=device), ignore_index=-1)
    assert (everything_ignored.num_segments, everything_ignored.num_rows) == (0, 2)


def test_nothing(device, dtype):
    for segments in (
        Segments.from_offsets(torch.tensor([0], dtype=dtype, device=device)),
        Segments.from_lengths(torch.tensor([], dtype=dtype, device=device)),
        Segments.from_index(torch.tensor([], dtype=dtype, device=device), 0),
    ):
        assert lists(segments) == [[0], None, [], []]
        assert (segments.num_segments, segments.num_rows) == (0, 0)
    segments = Segments.from_index(torch.tensor([], dtype=dtype, device=device), 2)
    assert lists(segments) == [[0, 0, 0], None, [], [0, 0]]


def test_ignored_rows(device, dtype):
    index = torch.tensor([-1, 0, 2, -1, 0], dtype=dtype, device=device)
    segments = Segments.from_index(index, 3, ignore_index=-1)
    assert lists(segments) == [[0, 2, 2, 3], [1, 4, 2], [-1, 0, 2, -1, 0], [2, 0, 1]]
    assert (segments.num_segments, segments.num_rows) == (3, 5)
    other = Segments.from_index(torch.tensor([255, 0, 2, 255, 0], dtype=dtype, device=device), ignore_index=255)
    assert lists(other) == lists(segments), "ignored entries become -1"
    low = Segments.from_index(torch.tensor([-100, 0, 2, -100, 0], dtype=dtype, device=device), ignore_index=-100)
    assert lists(low) == lists(segments)
    ascending = Segments.from_index(torch.tensor([-1, 0, 1], dtype=dtype, device=device), ignore_index=-1)
    assert lists(ascending) == [[0, 1, 2], [1, 2], [-1, 0, 1], [1, 1]], "order is there wherever rows are left out"


def test_ignore_index_that_does_not_occur(device):
    index = torch.tensor([0, 2, 1], device=device)
    assert lists(Segments.from_index(index, 3, ignore_index=-1)) == lists(Segments.from_index(index, 3))


def test_ignoring_one_entry_does_not_excuse_others():
    for index, ignored in (([255, -1, 0], 255), ([-100, -1, 0], -100), ([-1, -2, 0], -1)):
        bad = next(entry for entry in index if entry < 0 and entry != ignored)
        with pytest.raises(ValueError, match=rf"index must be in \[0, .\), but got {bad} at position 1"):
            Segments.from_index(torch.tensor(index), 3, ignore_index=ignored)


def test_strided_tensors(device):
    wide = torch.tensor([[2, 9], [0, 9], [2, 9]], device=device)
    segments = Segments.from_index(wide[:, 0], 3)
    assert segments.order.tolist() == [1, 0, 2]
    offsets = torch.tensor([0, 9, 3, 9, 7, 9], device=device)[::2]
    assert Segments.from_offsets(offsets).lengths.tolist() == [3, 4]
    lengths = torch.tensor([3, 9, 4, 9], device=device)[::2]
    assert Segments.from_lengths(lengths).offsets.tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    "count", (3, np.int32(3), np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)), ids=repr
)
def test_what_stands_for_an_integer(count):
    assert Segments.from_index(torch.tensor([0, 1]), count).num_segments == 3


@pytest.mark.parametrize(
    "count, observed",
    (
        (3.0, "float"),
        (True, "bool"),
        ("3", "str"),
        (np.float64(3), "numpy.float64"),
        (np.bool_(True), "numpy.bool"),
        (torch.tensor(3.0), "float32 of 0 dimensions"),
        (torch.tensor(True), "bool of 0 dimensions"),
        (torch.tensor([3]), "int64 of 1 dimensions"),
    ),
    ids=repr,
)
def test_what_does_not(count, observed):
    for argument in ("num_segments", "ignore_index"):
        with pytest.raises(TypeError, match=f"Segments.from_index: {argument} must be an integer, but got {observed}"):
            Segments.from_index(torch.tensor([0, 1]), **{argument: count})


def test_sum_of_int32_lengths_past_int32():
    segments = Segments.from_lengths(torch.tensor([2**31 - 1, 5, 2**31 - 1], dtype=torch.int32))
    assert segments.offsets.dtype == torch.int64
    assert segments.num_rows == 2**32 + 3


# ---- checks ----


def check_words(call, exception, words):
    with pytest.raises(exception, match=words):
        call()


@pytest.mark.parametrize(
    "offsets, words",
    (
        ([0, 5, 2, 7], "but got 2 after 5 at position 2"),
        ([0, 3, 3, 7, 6, 5], "but got 6 after 7 at position 4"),
        ([1, 3], "but got 1 at position 0"),
        ([-1, 3], "but got -1 at position 0"),
        ([0, -3], "but got -3 after 0 at position 1"),
        ([7], "but got 7 at position 0"),
    ),
    ids=str,
)
def test_bad_offsets(device, dtype, offsets, words):
    offsets = torch.tensor(offsets, dtype=dtype, device=device)
    check_words(
        lambda: Segments.from_offsets(offsets),
        ValueError,
        f"Segments.from_offsets: offsets must ascend from 0, {words}",
    )


def test_first_of_many_bad_offsets(device):
    offsets = torch.arange(100_000 if device == "cpu" else 5000, device=device)
    offsets[[777, 1500, 4000]] = 3
    words = "Segments.from_offsets: offsets must ascend from 0, but got 3 after 776 at position 777"
    check_words(lambda: Segments.from_offsets(offsets), ValueError, words)


def test_negative_lengths(device, dtype):
    lengths = torch.tensor([3, -2, 4, -1], dtype=dtype, device=device)
    words = "Segments.from_lengths: lengths must be at least 0, but got -2 at position 1"
    check_words(lambda: Segments.from_lengths(lengths), ValueError, words)


@pytest.mark.parametrize(
    "index, options, words",
    (
        (
            [0, 1, 3, 7],
            {"num_segments": 3},
            r"index must be in \[0, 3\), but got 3 at position 2; num_segments must be at least 8",
        ),
        ([0, -1, 3], {"num_segments": 4}, r"index must be in \[0, 4\), but got -1 at position 1; pass ignore_index=-1"),
        ([0, -1, 3], {}, r"index must be in \[0, 4\), but got -1 at position 1; pass ignore_index=-1"),
        ([0, -5, 9], {"num_segments": 4}, r"index must be in \[0, 4\), but got -5 at position 1"),
        ([0, 9, -5], {"num_segments": 4, "ignore_index": -1}, r"index must be in \[0, 4\), but got 9 at position 1"),
        ([0], {"num_segments": 0}, r"index must be in \[0, 0\), but got 0 at position 0"),
        ([0], {"num_segments": -1}, r"num_segments must be at least 0, but got -1"),
    ),
    ids=str,
)
def test_bad_index(device, dtype, index, options, words):
    index = torch.tensor(index, dtype=dtype, device=device)
    check_words(lambda: Segments.from_index(index, **options), ValueError, f"Segments.from_index: {words}")


@pytest.mark.parametrize("name", ("offsets", "lengths", "index"))
def test_types(device, name):
    make = getattr(Segments, f"from_{name}")
    start = rf"Segments.from_{name}: {name} must"
    for dtype in (torch.float32, torch.float16, torch.bool, torch.uint8, torch.int16, torch.complex64):
        observed = str(dtype).removeprefix("torch.")
        words = f"{start} be int32 or int64, but got {observed}"
        check_words(lambda: make(torch.zeros(3, dtype=dtype, device=device)), TypeError, words)
    for wrong, observed in (([0, 3], "list"), (3, "int"), (None, "NoneType")):
        check_words(lambda: make(wrong), TypeError, f"{start} be a torch.Tensor or a NumPy array, but got {observed}$")
    for shape in ((), (2, 3), (5, 0, 0, 9, 2)):
        words = f"{start} have 1 dimension, but got {len(shape)}"
        check_words(lambda: make(torch.zeros(shape, dtype=torch.int64, device=device)), ValueError, words)


def test_offsets_without_entries(device):
    words = "Segments.from_offsets: offsets must have at least 1 entry, but got 0"
    check_words(lambda: Segments.from_offsets(torch.tensor([], dtype=torch.int64, device=device)), ValueError, words)


@pytest.mark.parametrize("count", (2**62, 2**63, 10**30))
def test_huge_num_segments(device, count):
    words = "Segments.from_index: num_segments must fit in memory, but got .*, whose offsets take"
    check_words(lambda: Segments.from_index(torch.tensor([0], device=device), count), MemoryError, words)


def test_huge_entry_without_num_segments(device):
    words = "num_segments must fit in memory, but got 10000000000000001"
    check_words(lambda: Segments.from_index(torch.tensor([0, 10**16], device=device)), MemoryError, words)


def test_unchecked(device):
    bad = torch.tensor([0, 5, 2, 7], device=device)
    assert Segments.from_offsets(bad, check_invariants=False).offsets is bad
    index = torch.tensor([0, 7, -3, 1, 0], device=device)
    segments = Segments.from_index(index, 2, check_invariants=False)
    assert segments.order.tolist() == [0, 4, 3], "rows out of range belong to no segment"
    assert segments.lengths.tolist() == [2, 1]
    assert Segments.from_lengths(torch.tensor([1, 2], device=device), check_invariants=False).num_rows == 3


def test_a_failed_construction_changes_nothing(device):
    index = torch.tensor([255, 0, -1, 2], device=device)
    before = index.clone()
    with pytest.raises(ValueError):
        Segments.from_index(index, 3, ignore_index=255)
    assert torch.equal(index, before)
    Segments.from_index(index, 3, ignore_index=255, check_invariants=False)
    assert torch.equal(index, before)


# ---- immutable, lazy ----


def test_immutable():
    segments = testing.make_segments((3, 0, 4), "unsorted")
    for name in ("offsets", "lengths", "index", "order", "num_segments", "num_rows", "device", "anything"):
        with pytest.raises(AttributeError):
            setattr(segments, name, None)
        with pytest.raises(AttributeError):
            delattr(segments, name)
    assert not hasattr(segments, "__dict__")
    with pytest.raises(TypeError, match="made by Segments.from_offsets"):
        Segments(torch.tensor([0, 1]))


def test_what_is_computed_is_kept():
    segments = Segments.from_offsets(torch.tensor(OFFSETS))
    assert segments.lengths is segments.lengths
    assert segments.index is segments.index
    unsorted = testing.make_segments((3, 0, 4), "unsorted")
    assert unsorted.order is unsorted.order and unsorted.lengths is unsorted.lengths


def test_equality_is_identity():
    one, other = (Segments.from_offsets(torch.tensor(OFFSETS)) for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2


def test_repr():
    assert repr(testing.make_segments((3, 0, 4))) == "Segments(num_segments=3, num_rows=7)"
    assert repr(testing.make_segments((3, 0, 4), "unsorted32")) == (
        "Segments(num_segments=3, num_rows=7, in_order=False, dtype=int32)"
    )
    assert repr(testing.make_segments((3, 0, 4)).to("meta")) == "Segments(num_segments=3, num_rows=7, device='meta')"


# ---- moving ----


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
def test_moving_to_where_it_is_gives_itself(device, grouping):
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    assert segments.to(device) is segments
    assert segments.to(segments.device, non_blocking=True) is segments
    assert (segments.cpu() is segments) == (device == "cpu")


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
def test_moving_makes_a_new_object(device, grouping):
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    moved = segments.to("meta")
    assert moved is not segments and moved.device.type == "meta" and segments.device.type == device
    assert (moved.num_segments, moved.num_rows) == (segments.num_segments, segments.num_rows)


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
def test_there_and_back(cuda, grouping):
    segments = testing.make_segments((3, 0, 4), grouping)
    there = segments.cuda()
    assert there.device.type == "cuda" and there.num_rows == segments.num_rows
    assert lists(there) == lists(segments) == lists(there.cpu()) == lists(segments.to("cuda:0", non_blocking=True))
    assert lists(segments.pin_memory()) == lists(segments)
    assert segments.pin_memory().offsets.is_pinned()


def test_devices_must_agree():
    segments = testing.make_segments((3, 0, 4)).to("meta")
    with pytest.raises(DeviceMismatchError, match=r"segments must be on the device of data \(cpu\), but got meta"):
        segment_sum(torch.zeros(7), segments)


# ---- copying ----


def same(one, other):
    assert lists(one) == lists(other) and one.num_rows == other.num_rows and one.offsets.dtype == other.offsets.dtype


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
def test_copies(device, grouping):
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    same(pickle.loads(pickle.dumps(segments)), segments)
    deep = copy.deepcopy(segments)
    same(deep, segments)
    assert deep.offsets.data_ptr() != segments.offsets.data_ptr()
    assert copy.copy(segments) is segments
    file = io.BytesIO()
    torch.save({"segments": segments}, file)
    file.seek(0)
    same(torch.load(file)["segments"], segments)  # with weights_only, the default


@pytest.mark.parametrize("grouping", testing.GROUPINGS)
def test_pytree(device, grouping):
    segments = testing.make_segments((3, 0, 4), grouping, device=device)
    leaves, spec = pytree.tree_flatten({"a": segments})
    assert len(leaves) == (1 if segments.order is None else 3)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    back = pytree.tree_unflatten(leaves, spec)["a"]
    assert type(back) is Segments and back.offsets is segments.offsets
    same(back, segments)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    shapes = pytree.tree_map(lambda leaf: leaf.shape, segments)  # leaves need not be tensors
    assert shapes.offsets == segments.offsets.shape
    moved = pytree.tree_map(lambda leaf: leaf.to("meta"), segments)
    assert moved.device.type == "meta"
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(segments)[0]]
    assert keys == [".offsets", ".order", ".index"][: len(keys)]


def test_pytree_of_another_number_of_rows_has_the_same_structure():
    """A program exported for one batch takes the next."""
    specs = [pytree.tree_structure(testing.make_segments(lengths)) for lengths in ((3, 0, 4), (1, 1, 1))]
    assert specs[0] == specs[1]
    assert specs[0] != pytree.tree_structure(testing.make_segments((3, 0, 4), "unsorted"))


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        segments = testing.make_segments((3, number, 4), "unsorted" if number % 2 else "offsets", seed=number)
        return torch.arange(7.0 + number), segments


def first(batch):
    return batch[0]


@pytest.mark.parametrize("context", ("fork", "spawn"))
def test_dataloader(context):
    loader = torch.utils.data.DataLoader(Batches(), num_workers=1, multiprocessing_context=context, collate_fn=first)
    for number, (data, segments) in enumerate(loader):
        expected = testing.make_segments((3, number, 4), "unsorted" if number % 2 else "offsets", seed=number)
        same(segments, expected)
        assert torch.equal(segment_sum(data, segments), segment_sum(data, expected))


def test_dataloader_pins(cuda):
    for data, segments in torch.utils.data.DataLoader(Batches(), collate_fn=first, pin_memory=True):
        assert segments.offsets.is_pinned()
        assert segment_sum(data.cuda(non_blocking=True), segments.cuda(non_blocking=True)).shape == (3,)


# ---- keys ----


def test_keys_of_a_list():
    segments, names = Segments.from_keys(["b", "a", "c", "a", "b"])
    assert names == ["a", "b", "c"]
    assert segments.index.tolist() == [1, 0, 2, 0, 1]
    assert segment_sum(torch.tensor([1.0, 2, 3, 4, 5]), segments).tolist() == [6, 6, 3]


def test_keys_that_stand_in_order():
    segments, names = Segments.from_keys(["a", "a", "b"])
    assert segments.order is None and names == ["a", "b"]


@pytest.mark.parametrize(
    "keys",
    (
        np.array([30, 10, 20, 10]),
        np.array([3.5, 1.5, 2.5, 1.5]),
        np.array(["c", "a", "b", "a"]),
        np.array(["c", "a", "b", "a"], dtype=object),
        np.array(["2024-03", "2024-01", "2024-02", "2024-01"], dtype="datetime64[M]"),
        np.array([True, False, True, False]),
        np.array([b"c", b"a", b"b", b"a"]),
        np.array([3, 1, 2, 1], dtype=np.uint8),
    ),
    ids=lambda keys: str(keys.dtype),
)
def test_keys_of_an_array(keys):
    segments, unique = Segments.from_keys(keys)
    expected, index = np.unique(keys, return_inverse=True)
    assert isinstance(unique, np.ndarray) and unique.dtype == keys.dtype
    assert (unique == expected).all() and segments.index.tolist() == index.tolist()


@pytest.mark.parametrize(
    "keys, missing",
    (
        (["b", None, "a", float("nan"), "b"], [1, 3]),
        (np.array([2.0, np.nan, 1.0, np.nan, 2.0]), [1, 3]),
        (np.array(["2024-02", "NaT", "2024-01", "NaT", "2024-02"], dtype="datetime64[M]"), [1, 3]),
        (np.array(["b", None, "a", np.nan, "b"], dtype=object), [1, 3]),
        (["b", pd.NA, "a", pd.NaT, "b"], [1, 3]),
        (pd.Series(["b", None, "a", np.nan, "b"]), [1, 3]),
        (pd.Series([2, None, 1, None, 2], dtype="Int64"), [1, 3]),
        (pd.Categorical(["b", None, "a", None, "b"]), [1, 3]),
        (torch.tensor([2.0, float("nan"), 1.0, float("nan"), 2.0]), [1, 3]),
    ),
    ids=lambda value: type(value).__name__,
)
def test_missing_keys_belong_to_no_segment(keys, missing):
    segments, unique = Segments.from_keys(keys)
    assert len(unique) == 2 and segments.num_rows == 5
    assert segments.index.tolist() == [1, -1, 0, -1, 1]
    assert segment_sum(torch.tensor([1.0, 10, 100, 1000, 10000]), segments).tolist() == [100, 10001]
    assert (segments.index < 0).nonzero()[:, 0].tolist() == missing


@pytest.mark.parametrize("kind", ("strings", "numbers", "categorical", "dates", "tuples"))
def test_keys_as_pandas_groups_them(kind):
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 30, 500)
    keys = {
        "strings": lambda: pd.Series([f"k{n}" for n in numbers]),
        "numbers": lambda: pd.Series(numbers / 7),
        "categorical": lambda: pd.Series(
            pd.Categorical([f"k{n}" for n in numbers], categories=[f"k{n}" for n in range(29, -1, -1)])
        ),
        "dates": lambda: pd.Series(pd.Timestamp("2024-01-01") + pd.to_timedelta(numbers, unit="D")),
        "tuples": lambda: pd.MultiIndex.from_arrays([numbers % 3, numbers % 5]),
    }[kind]()
    values = pd.Series(generator.standard_normal(500))
    segments, unique = Segments.from_keys(keys)
    if kind == "tuples":
        expected = values.groupby([keys.get_level_values(0), keys.get_level_values(1)]).sum()
    else:
        expected = values.groupby(keys, observed=True).sum()
    assert list(unique) == list(expected.index)
    torch.testing.assert_close(segment_sum(torch.tensor(values.to_numpy()), segments).numpy(), expected.to_numpy())


def test_keys_of_a_tensor(device):
    segments, unique = Segments.from_keys(torch.tensor([30, 10, 20, 10], device=device))
    assert unique.tolist() == [10, 20, 30] and unique.device.type == device == segments.device.type
    assert segments.index.tolist() == [2, 0, 1, 0]


def test_keys_of_several_types_stay_in_the_order_of_appearance():
    segments, unique = Segments.from_keys(["b", 1, "a", 1, (2, 3)])
    assert unique == ["b", 1, "a", (2, 3)] and segments.index.tolist() == [0, 1, 2, 1, 3]


def test_no_keys():
    for keys in ([], np.array([]), pd.Series([], dtype=object), torch.tensor([], dtype=torch.int64)):
        segments, unique = Segments.from_keys(keys)
        assert (segments.num_segments, segments.num_rows, len(unique)) == (0, 0, 0)
    segments, unique = Segments.from_keys([None, None])
    assert (segments.num_segments, segments.num_rows, unique) == (0, 2, [])


@pytest.mark.parametrize(
    "keys, exception, words",
    (
        ("abc", TypeError, "keys must be an array or a list of keys, but got str"),
        (3, TypeError, "keys must be an array or a list of keys, but got int"),
        ({"a": 1}, TypeError, "keys must be an array or a list of keys, but got dict"),
        (["a", ["b"]], TypeError, "keys must be hashable, but got list at position 1"),
        (np.zeros((2, 3)), ValueError, "keys must have 1 dimension, but got 2"),
        (torch.zeros(2, 3), ValueError, "keys must have 1 dimension, but got 2"),
    ),
    ids=lambda value: type(value).__name__,
)
def test_bad_keys(keys, exception, words):
    check_words(lambda: Segments.from_keys(keys), exception, f"Segments.from_keys: {words}")


def test_many_string_keys_are_fast():
    import time

    numbers = np.random.default_rng(0).integers(0, 4000, 336_776)
    for keys in (
        np.char.add("N", numbers.astype(str)),
        [f"N{n}" for n in numbers],
        pd.Series([f"N{n}" for n in numbers]),
    ):
        start = time.perf_counter()
        segments, _ = Segments.from_keys(keys)
        assert time.perf_counter() - start < 1.0
        assert segments.num_rows == 336_776


# ---- fake tensors ----


def test_fake_tensors():
    """Where entries cannot be known, checks of entries are left out and sizes are right."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        segments = Segments.from_offsets(torch.tensor(OFFSETS))
        assert segments.num_segments == 3 and segments._num_rows is None
        assert segment_sum(torch.ones(7, 2), segments).shape == (3, 2)
        index = Segments.from_index(torch.zeros(7, dtype=torch.int64), 3)
        assert (index.num_segments, index.num_rows) == (3, 7)
        assert segment_broadcast(torch.ones(3, 2), index).shape == (7, 2)
        with pytest.raises(
            ValueError, match="segment_sum: data must have 7 rows along dim 0, as the segments do, but got 8"
        ):
            segment_sum(torch.ones(8, 2), index)
        with pytest.raises(ValueError, match="num_segments must be given where the entries of index are unknown"):
            Segments.from_index(torch.zeros(7, dtype=torch.int64))
