"""`Segments.from_keys` of several columns and with options, beside what pandas' groupby says."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastops import Segments, segment_broadcast, segment_mean, segment_sum

NAN = float("nan")


def sums(segments, values):
    return segment_sum(np.asarray(values, dtype=np.int64), segments)


def keys_of(column):
    return [None if pd.isna(key) else key for key in pd.Series(column)]


# ---- random frames, by pandas and by us ----


def column_of(kind, codes):
    """Keys of one kind from small numbers, of which -1 says that the key is missing."""
    if kind == "float":
        return np.array([NAN if code < 0 else code / 4 for code in codes], dtype=np.float64)
    if kind == "date":
        return np.array(["NaT" if code < 0 else f"2024-01-0{code + 1}" for code in codes], dtype="M8[ns]")
    if kind == "int":
        return np.array(codes, dtype=np.int32)
    return np.array([None if code < 0 else "zyxw"[code] for code in codes], dtype=object)


def series_of(kind, codes):
    if kind == "nullable":
        return pd.array([None if code < 0 else code for code in codes], dtype="Int64")
    if kind in ("category", "ordered"):
        return pd.Categorical.from_codes(codes, list("wabzyx")[:5], ordered=kind == "ordered")
    if kind == "text":
        return pd.array([None if code < 0 else "zyxw"[code] for code in codes], dtype="str")
    return column_of(kind, codes)


@st.composite
def frames(draw, kinds):
    rows = draw(st.integers(0, 12))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    return [(kind, draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))) for kind in chosen]


OPTIONS = {"sort": st.booleans(), "dropna": st.booleans()}


@given(columns=frames(("float", "date", "int", "object", "nullable", "category", "ordered", "text")), observed=st.booleans(), **OPTIONS)
@settings(max_examples=60)
def test_frames_as_pandas_groups_them(columns, observed, sort, dropna):
    frame = pd.DataFrame({f"k{number}": series_of(*column) for number, column in enumerate(columns)})
    frame.index = pd.Index([7] * len(frame))  # which rows are is no matter
    values = 2 ** np.arange(len(frame), dtype=np.int64)
    expected = frame.assign(values=values).groupby([*frame], sort=sort, dropna=dropna, observed=observed)["values"].sum()
    for keys in (frame, [frame[name] for name in frame]):
        segments, index = Segments.from_keys(keys, sort=sort, dropna=dropna, observed=observed)
        if len(frame):
            pd.testing.assert_index_equal(index, expected.index)
        assert sums(segments, values).tolist() == expected.tolist()
        assert segments.num_rows == len(frame)


@given(columns=frames(("float", "date", "int", "object")), **OPTIONS)
@settings(max_examples=60)
def test_arrays_as_pandas_groups_them(columns, sort, dropna):
    arrays = [column_of(*column) for column in columns]
    values = 2 ** np.arange(len(arrays[0]), dtype=np.int64)
    frame = pd.DataFrame(dict(enumerate(arrays)))
    groups = frame.assign(values=values).groupby([*frame], sort=sort, dropna=dropna)["values"].sum().reset_index()

    def check(segments, unique):
        assert sums(segments, values).tolist() == groups["values"].tolist()
        for number, (column, array) in enumerate(zip(unique, arrays)):
            assert type(column) is np.ndarray and column.dtype == array.dtype
            assert keys_of(column) == keys_of(groups[number])

    check(*Segments.from_keys(arrays, sort=sort, dropna=dropna))
    if len(arrays) == 1:
        segments, unique = Segments.from_keys(arrays[0], sort=sort, dropna=dropna)
        check(segments, [unique])
        segments, unique = Segments.from_keys(arrays[0].tolist(), sort=sort, dropna=dropna)
        assert type(unique) is list and segments.index.tolist() == Segments.from_keys(arrays[0], sort=sort, dropna=dropna)[0].index.tolist()
    fields = np.empty(len(values), [(f"f{number}", array.dtype) for number, array in enumerate(arrays)])
    for number, array in enumerate(arrays):
        fields[f"f{number}"] = array
    segments, unique = Segments.from_keys(fields, sort=sort, dropna=dropna)
    assert unique.dtype == fields.dtype
    check(segments, [unique[name] for name in fields.dtype.names])


# ---- by hand ----

LISTS = {  # of the keys b, missing, a, b: the numbers of rows and the keys
    "default": ({}, [1, -1, 0, 1], ["a", "b"]),
    "missing": ({"dropna": False}, [1, 2, 0, 1], ["a", "b", None]),
    "appearance": ({"sort": False}, [0, -1, 1, 0], ["b", "a"]),
    "both": ({"sort": False, "dropna": False}, [0, 1, 2, 0], ["b", None, "a"]),
}


@pytest.mark.parametrize("options, numbers, names", LISTS.values(), ids=LISTS)
def test_options(options, numbers, names):
    for keys in (["b", None, "a", "b"], np.array(["b", None, "a", "b"], dtype=object)):
        segments, unique = Segments.from_keys(keys, **options)
        assert segments.index.tolist() == numbers and list(unique) == names and type(unique) is type(keys)
    segments, index = Segments.from_keys(pd.Series(["b", None, "a", "b"], name="k", dtype=object), **options)
    assert segments.index.tolist() == numbers and index.name == "k"
    assert keys_of(index) == names


@pytest.mark.parametrize("options, numbers, names", LISTS.values(), ids=LISTS)
def test_options_of_tensors(device, options, numbers, names):
    keys = torch.tensor([2.0, NAN, 1.0, 2.0], device=device)
    segments, unique = Segments.from_keys(keys, **options)
    assert segments.index.tolist() == numbers and segments.device == unique.device == keys.device
    expected = [{"a": 1.0, "b": 2.0}.get(name, NAN) for name in names]
    torch.testing.assert_close(unique.cpu(), torch.tensor(expected), equal_nan=True)


def test_columns_of_tensors(device):
    columns = [torch.tensor(column, device=device) for column in ([1, 0, 1, 0], [5, 6, 5, 5])]
    segments, (first, second) = Segments.from_keys(columns)
    assert segments.index.tolist() == [2, 1, 2, 0]
    assert (first.tolist(), second.tolist(), first.device.type) == ([0, 0, 1], [5, 6, 5], device)


def test_kinds_of_missing_keys_are_one_key():
    segments, unique = Segments.from_keys([NAN, "a", None, pd.NaT, pd.NA], dropna=False)
    assert segments.index.tolist() == [1, 0, 1, 1, 1] and unique[0] == "a" and unique[1] is not None
    segments, unique = Segments.from_keys([None, None], dropna=False)
    assert segments.index.tolist() == [0, 0] and unique == [None]


def test_categories():
    keys = pd.Series(pd.Categorical(["b", None, "a", "b"], categories=["z", "b", "a"]), name="letter")
    values = [1, 10, 100, 1000]
    for options, names, expected in (
        ({}, ["b", "a"], [1001, 100]),
        ({"observed": False}, ["z", "b", "a"], [0, 1001, 100]),
        ({"observed": False, "sort": False}, ["b", "a", "z"], [1001, 100, 0]),
    ):
        segments, index = Segments.from_keys(keys, **options)
        assert index.tolist() == names and sums(segments, values).tolist() == expected
        assert isinstance(index, pd.CategoricalIndex) and index.name == "letter"
        assert index.categories.tolist() == ["z", "b", "a"]
    segments, index = Segments.from_keys(keys, observed=False, dropna=False)
    assert segments.lengths.tolist() == [0, 2, 1, 1] and pd.isna(index[-1])
    _, unique = Segments.from_keys(keys.array)
    assert isinstance(unique, pd.Categorical), "of the kind of the keys"


def test_combinations_that_do_not_occur():
    frame = pd.DataFrame({"n": [2, 1, 2], "c": pd.Categorical(["a", "b", "a"], categories=["a", "b", "c"])})
    segments, index = Segments.from_keys(frame, observed=False)
    assert index.tolist() == [(1, "a"), (1, "b"), (1, "c"), (2, "a"), (2, "b"), (2, "c")]
    assert segments.lengths.tolist() == [0, 1, 0, 2, 0, 0] and index.names == ["n", "c"]


def test_columns_of_several_kinds():
    """The index of a Series says nothing: columns meet row by row."""
    series = pd.Series(["b", "a", "b", None], index=[3, 2, 1, 0], name="letter")
    keys = [series, np.array([1, 2, 1, 1]), torch.tensor([0, 0, 0, 0]), ["x", "y", "x", "x"]]
    segments, index = Segments.from_keys(keys[:3])
    assert index.tolist() == [("a", 2, 0), ("b", 1, 0)] and index.names == ["letter", None, None]
    assert segments.index.tolist() == [1, 0, 1, -1]
    with pytest.raises(TypeError, match="^Segments.from_keys: keys must be hashable, but got pandas.Series at position 0"):
        Segments.from_keys(keys)  # keys of a list, which could be of one row


def test_levels_of_an_index():
    index = pd.MultiIndex.from_arrays([["b", "a", "b", "a"], [1.0, NAN, 1.0, 2.0]], names=["x", "y"])
    segments, unique = Segments.from_keys(index)
    assert segments.index.tolist() == [1, -1, 1, 0], "a key of which a part is missing is missing"
    assert unique.tolist() == [("a", 2.0), ("b", 1.0)] and unique.names == ["x", "y"]


def test_many_combinations():
    """More than an int64 could number."""
    generator = np.random.default_rng(0)
    columns = [generator.permutation(1000) for _ in range(8)]
    segments, unique = Segments.from_keys(columns)
    assert segments.num_segments == 1000 and np.array_equal(unique[0], np.arange(1000))
    segments, unique = Segments.from_keys([column % 2 for column in columns] + columns)
    order = np.lexsort([column for column in reversed(unique)])
    assert np.array_equal(order, np.arange(1000)) and np.array_equal(unique[8][segments.index], columns[0])


def test_columns_of_polars():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": ["y", "x", "y", None], "n": [2**62 + 1, 2**62, 2**62 + 1, 2**62]})
    segments, unique = Segments.from_keys(frame)
    assert segments.index.tolist() == [1, 0, 1, -1] and [part.tolist() for part in unique] == [["x", "y"], [2**62, 2**62 + 1]]
    segments, unique = Segments.from_keys(frame["n"])
    assert segments.index.tolist() == [1, 0, 1, 0] and unique.dtype == np.int64
    missing = polars.Series([2**62 + 1, None, 2**62], dtype=polars.Int64)  # which differ as integers only
    segments, unique = Segments.from_keys(missing, dropna=False)
    assert segments.index.tolist() == [1, 2, 0] and unique.tolist() == [2**62, 2**62 + 1, None]
    dates = polars.Series([datetime.date(2024, 1, 2), datetime.date(2024, 1, 1)])
    assert Segments.from_keys(dates)[0].index.tolist() == [1, 0]


def test_columns_of_pyarrow():
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"a": ["y", "x", "y", None], "n": [2**62 + 1, 2**62, 2**62 + 1, 2**62]})
    segments, unique = Segments.from_keys(table)
    assert segments.index.tolist() == [1, 0, 1, -1] and [part.tolist() for part in unique] == [["x", "y"], [2**62, 2**62 + 1]]
    missing = pyarrow.array([2**62 + 1, None, 2**62])
    segments, unique = Segments.from_keys(missing)
    assert segments.index.tolist() == [1, -1, 0] and unique.tolist() == [2**62, 2**62 + 1]


@pytest.mark.parametrize(
    "keys, options, exception, words",
    (
        ([np.zeros(3), np.zeros(4)], {}, ValueError, "keys must have columns of one length, but got 3 and 4"),
        ([pd.Series([1, 2]), np.zeros(4)], {}, ValueError, "keys must have columns of one length, but got 2 and 4"),
        ([np.zeros(3), np.zeros((3, 2))], {}, ValueError, "keys must have 1 dimension, but got 2"),
        ([pd.Series([1, 2]), np.zeros((2, 2))], {}, ValueError, "keys must have 1 dimension, but got 2"),
        (pd.DataFrame(index=[0, 1]), {}, ValueError, "keys must have at least 1 column, but got 0"),
        (pd.Series([[1], [2]]), {}, TypeError, "keys must be hashable, but got some of which pandas says: unhashable type: 'list'"),
        (np.ma.array([1, 2]), {}, TypeError, r"keys must be an array without a mask, but got numpy.*MaskedArray; pass .filled"),
        (["a"], {"sort": 1}, TypeError, "sort must be a bool, but got int"),
        (["a"], {"dropna": None}, TypeError, "dropna must be a bool, but got NoneType"),
        (["a"], {"observed": "no"}, TypeError, "observed must be a bool, but got str"),
    ),
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused(keys, options, exception, words):
    with pytest.raises(exception, match=f"^Segments.from_keys: {words}"):
        Segments.from_keys(keys, **options)


def test_a_frame_there_and_back():
    frame = pd.DataFrame({"g": ["b", "a", None, "b"], "x": [1.0, 2.0, 3.0, 5.0]}, index=[30, 10, 20, 40])
    segments, index = Segments.from_keys(frame["g"])
    means = segment_mean(frame["x"].to_numpy(), segments)
    pd.testing.assert_series_equal(pd.Series(means, index, name="x"), frame.groupby("g")["x"].mean())
    centred = frame["x"] - segment_broadcast(means, segments)
    expected = frame["x"] - frame.groupby("g")["x"].transform("mean")
    pd.testing.assert_series_equal(centred[frame["g"].notna()], expected[frame["g"].notna()])


def test_tensors_without_dimensions():
    """As the labels of a data set come: equal ones are one key, though each is an object of its own."""
    segments, keys = Segments.from_keys([torch.tensor(1), torch.tensor(1), torch.tensor(2)])
    assert segments.index.tolist() == [0, 0, 1] and keys == [1, 2]
