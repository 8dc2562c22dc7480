"""Segments of keys, for `Segments.from_keys`.

What belongs to pandas is grouped by pandas itself. Of everything else each column is numbered, in the order of its keys, and rows
with the same numbers in all columns belong together. The unique keys are those of the first row of each group.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import count
from typing import Any, Iterable, Optional

import numpy as np
import torch
from torch import Tensor

from . import _numpy
from .errors import kind, sentence
from .segments import Segments


def group(op: str, keys: Any, sort: bool, dropna: bool, observed: bool) -> tuple[Segments, Any]:
    """The segments and their keys."""
    pandas = sys.modules.get("pandas")  # who has pandas' objects has imported it
    if pandas is not None and isinstance(keys, _columns_of(pandas)):
        segments, index = _group_pandas(op, pandas, [keys], sort, dropna, observed)
        return segments, index.array if isinstance(keys, pandas.api.extensions.ExtensionArray) else index
    if isinstance(keys, (list, tuple)) and keys and all(isinstance(key, Tensor) and key.dim() == 0 for key in keys):
        keys = [key.item() for key in keys]  # which as tensors would be equal to themselves only
    columns = _split(op, pandas, keys)
    if columns is None:
        keys = _column(op, keys)
        segments, first = _group([_number(op, keys)], sort, dropna)
        return segments, _rows(keys, first)
    if not columns:
        raise ValueError(sentence(op, "keys", "have at least 1 column", 0))
    if pandas is not None and any(isinstance(column, (pandas.DataFrame, *_columns_of(pandas))) for column in columns):
        return _group_pandas(op, pandas, columns, sort, dropna, observed)
    columns = [_column(op, column) for column in columns]
    _check_lengths(op, columns)
    segments, first = _group([_number(op, column) for column in columns], sort, dropna)
    if isinstance(keys, np.ndarray):  # with fields
        return segments, _rows(keys, first)
    return segments, tuple(_rows(column, first) for column in columns)


# ---- columns ----


def _columns_of(pandas: Any) -> tuple[Any, ...]:
    return pandas.Series, pandas.Index, pandas.Categorical, pandas.api.extensions.ExtensionArray


def _split(op: str, pandas: Any, keys: Any) -> Optional[list[Any]]:
    """The columns of what has several; None of what is one itself."""
    if pandas is not None and isinstance(keys, pandas.DataFrame):
        return [keys.iloc[:, number] for number in range(keys.shape[1])]
    if isinstance(keys, np.ndarray):
        return None if keys.dtype.names is None else [keys[name] for name in keys.dtype.names]
    if isinstance(keys, (list, tuple)):
        return [*keys] if keys and all(map(_is_column, keys)) else None
    for method in ("get_columns", "itercolumns"):  # a data frame of polars, a table of pyarrow
        if hasattr(keys, method):
            return [*getattr(keys, method)()]
    return None


def _is_column(key: Any) -> bool:
    """Whether it stands for the keys of all rows, not for that of one."""
    if isinstance(key, (np.ndarray, Tensor)):
        return key.ndim > 0
    return hasattr(key, "__array__") and hasattr(key, "__len__")


def _column(op: str, keys: Any) -> Any:
    """One column as an array, a tensor or a list."""
    if isinstance(keys, (str, bytes, dict)) or not isinstance(keys, Iterable):
        raise TypeError(sentence(op, "keys", "be an array or a list of keys", kind(keys)))
    if not isinstance(keys, (np.ndarray, Tensor)):
        if isinstance(keys, (list, tuple)) or not hasattr(keys, "__array__"):
            return [*keys]
        keys = _array_of(keys)
    if isinstance(keys, np.ndarray):
        _numpy.check_no_mask(op, "keys", keys)
    if keys.ndim != 1:
        raise ValueError(sentence(op, "keys", "have 1 dimension", keys.ndim))
    return keys


def _array_of(column: Any) -> np.ndarray:
    """That of a column of another library; of objects where some are missing, as NumPy has no missing integers."""
    num_missing = getattr(column, "null_count", 0)
    if not (num_missing() if callable(num_missing) else num_missing):
        return np.asarray(column)
    keys = column.to_pylist() if hasattr(column, "to_pylist") else column.to_list()
    array = np.empty(len(keys), dtype=object)
    array[:] = keys
    return array


def _check_lengths(op: str, columns: list[Any]) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(sentence(op, "keys", "have columns of one length", " and ".join(map(str, lengths))))


def _rows(keys: Any, rows: Tensor) -> Any:
    if isinstance(keys, Tensor):
        return keys[rows]
    return keys[rows.cpu().numpy()] if isinstance(keys, np.ndarray) else [keys[row] for row in rows.tolist()]


# ---- numbers ----


def _number(op: str, keys: Any) -> tuple[Tensor, int]:
    """The rank of each key among the different ones, -1 for one that is missing, and how many there are."""
    if isinstance(keys, Tensor):
        return _number_tensor(keys)
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "biufcmMV":
        return _number_numbers(keys)
    return _number_hashed(op, keys.tolist() if isinstance(keys, np.ndarray) else keys)


def _number_tensor(keys: Tensor) -> tuple[Tensor, int]:
    present = keys == keys
    unique, inverse = keys[present].unique(return_inverse=True)
    numbers = torch.full(keys.shape, -1, dtype=torch.int64, device=keys.device)
    numbers[present] = inverse
    return numbers, len(unique)


def _number_numbers(keys: np.ndarray) -> tuple[Tensor, int]:
    unique, numbers = np.unique(keys, return_inverse=True)
    num_present = len(unique)
    if keys.dtype.kind in "fcmM":  # NaN and NaT sort last, so that the numbers before them stay
        num_present -= int((unique != unique).sum())
    numbers = np.where(numbers < num_present, numbers, -1) if num_present < len(unique) else numbers
    return torch.from_numpy(np.ascontiguousarray(numbers.reshape(-1), dtype=np.int64)), num_present


def _number_hashed(op: str, keys: list[Any]) -> tuple[Tensor, int]:
    first_seen: defaultdict[Any, Any] = defaultdict(count().__next__)
    try:
        numbers = np.fromiter(map(first_seen.__getitem__, keys), dtype=np.int64, count=len(keys))
    except TypeError as error:
        at = next(i for i, key in enumerate(keys) if not _hashable(key))
        observed = f"{kind(keys[at])} at position {at}"
        raise TypeError(sentence(op, "keys", "be hashable", observed)) from error
    present = [key for key in first_seen if not _missing(key)]
    try:
        present.sort()
    except TypeError:
        pass  # keys that have no order stay in the order of appearance
    rank = np.full(len(first_seen), -1, dtype=np.int64)
    rank[np.fromiter((first_seen[key] for key in present), dtype=np.int64, count=len(present))] = np.arange(
        len(present)
    )
    return torch.from_numpy(rank[numbers]), len(present)


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _missing(key: Any) -> bool:
    """None, and what is not equal to itself: NaN and NaT; pandas.NA has no truth."""
    if key is None:
        return True
    try:
        return bool(key != key)
    except TypeError:
        return True


# ---- groups ----


def _group(columns: list[tuple[Tensor, int]], sort: bool, dropna: bool) -> tuple[Segments, Tensor]:
    """The segments of rows whose keys have the same numbers, and the first row of each."""
    numbers, total = columns[0] if dropna else _with_missing(*columns[0])
    for column in columns[1:]:
        more, count = column if dropna else _with_missing(*column)
        if total * count >= 2**63:
            numbers, total = _renumbered(numbers, total)
        numbers = torch.where((numbers < 0) | (more < 0), -1, numbers * count + more)
        total *= count
    if len(columns) > 1:  # of all combinations of keys only some occur
        numbers, total = _renumbered(numbers, total)
    segments = _segments(numbers, total)
    first = segments.offsets[:-1] if segments.order is None else segments.order[segments.offsets[:-1]]
    if not sort:
        first, groups = first.sort()
        rank = torch.empty_like(groups)
        rank[groups] = torch.arange(total, device=numbers.device)
        segments = _segments(_mapped(rank, numbers), total)
    return segments, first


def _segments(numbers: Tensor, total: int) -> Segments:
    """Those of rows with the same number; a row with -1 is in none."""
    ignored = -1 if bool((numbers < 0).any()) else None
    return Segments.from_index(numbers, total, ignore_index=ignored)


def _with_missing(numbers: Tensor, count: int) -> tuple[Tensor, int]:
    """A missing key is one like any other, the last."""
    missing = numbers < 0
    return numbers.masked_fill(missing, count), count + int(missing.any())


def _renumbered(numbers: Tensor, total: int) -> tuple[Tensor, int]:
    """Numbers that all occur, in the same order."""
    if total > 4 * len(numbers):  # more than one would make a table of
        unique, inverse = numbers.unique(return_inverse=True)
        missing = int((unique < 0).any())
        return inverse - missing, len(unique) - missing
    occurs = torch.zeros(total + 1, dtype=torch.bool, device=numbers.device)
    occurs[numbers] = True  # the last for -1
    rank = occurs[:-1].cumsum(0) - 1
    return _mapped(rank, numbers), int(occurs[:-1].sum())


def _mapped(table: Tensor, numbers: Tensor) -> Tensor:
    """What the table has for each number, -1 for -1."""
    return torch.cat((table, table.new_full((1,), -1)))[numbers]


def _group_pandas(op: str, pandas: Any, columns: list[Any], sort: bool, dropna: bool, observed: bool) -> tuple[Segments, Any]:
    """The segments of pandas' own groups and their index."""
    if len(columns) == 1 and isinstance(columns[0], pandas.MultiIndex):
        columns = [columns[0].get_level_values(level) for level in range(columns[0].nlevels)]
    names = [getattr(column, "name", None) for column in columns]
    # Without the index of a Series, by which pandas would put rows of different columns together.
    arrays = [column.array if isinstance(column, (pandas.Series, pandas.Index)) else _pandas_column(op, pandas, column) for column in columns]
    _check_lengths(op, arrays)
    named = {**{f"key {number}": array for number, array in enumerate(arrays)}, "row": np.arange(len(arrays[0]))}
    frame = pandas.DataFrame(named, copy=False)
    try:
        numbers, index = _pandas_groups(frame, sort, dropna, observed)
    except TypeError:  # keys of several types, which have no order
        try:
            numbers, index = _pandas_groups(frame, False, dropna, observed)
        except TypeError as error:
            raise TypeError(sentence(op, "keys", "be hashable", f"some of which pandas says: {error}")) from error
    index.names = names
    return _segments(torch.from_numpy(numbers), len(index)), index


def _pandas_column(op: str, pandas: Any, column: Any) -> Any:
    if isinstance(column, pandas.api.extensions.ExtensionArray):
        return column
    column = _column(op, column)
    return column.numpy() if isinstance(column, Tensor) else column


def _pandas_groups(frame: Any, sort: bool, dropna: bool, observed: bool) -> tuple[np.ndarray, Any]:
    groups = frame.groupby([*frame.columns[:-1]], sort=sort, dropna=dropna, observed=observed)
    first = groups["row"].min()
    numbers = groups.ngroup().fillna(-1).to_numpy(np.int64, copy=True)
    # Groups are numbered without those that do not occur, and not always in the order of the index.
    places = np.flatnonzero(first.notna())
    place_of = np.full(len(places) + 1, -1)
    place_of[numbers[first.to_numpy()[places].astype(np.int64)]] = places
    return place_of[numbers], first.index
