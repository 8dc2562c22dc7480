"""Numbers for keys: what `Segments.from_keys` does before it makes segments."""

from __future__ import annotations

import sys
from itertools import count
from collections import defaultdict
from typing import Any, Iterable

import numpy as np
import torch
from torch import Tensor

from .errors import kind, sentence


def factorize(op: str, keys: Any) -> tuple[Tensor, Any, bool]:
    """The number of each key, the unique keys in that order, and whether a key is missing (its number is -1)."""
    pandas = sys.modules.get("pandas")  # who has pandas' objects has imported it
    if isinstance(keys, Tensor):
        _check_dimensions(op, keys.dim())
        return _factorize_tensor(keys)
    if pandas is not None and isinstance(
        keys, (pandas.Series, pandas.Index, pandas.Categorical, pandas.api.extensions.ExtensionArray)
    ):
        return _factorize_pandas(pandas, keys)
    if isinstance(keys, np.ndarray):
        _check_dimensions(op, keys.ndim)
        if keys.dtype.kind in "biufcmMV":
            return _factorize_numbers(keys)
        numbers, unique, any_missing = _factorize_hashed(op, keys.tolist())
        array = np.empty(len(unique), dtype=keys.dtype)
        array[:] = unique if keys.dtype != object else [*unique]
        return numbers, array, any_missing
    if isinstance(keys, (str, bytes, dict)) or not isinstance(keys, Iterable):
        raise TypeError(sentence(op, "keys", "be an array or a list of keys", kind(keys)))
    if hasattr(keys, "__array__") and not isinstance(keys, (list, tuple)):  # a column of another library
        return factorize(op, np.asarray(keys))
    return _factorize_hashed(op, list(keys))


def _check_dimensions(op: str, dimensions: int) -> None:
    if dimensions != 1:
        raise ValueError(sentence(op, "keys", "have 1 dimension", dimensions))


def _factorize_tensor(keys: Tensor) -> tuple[Tensor, Tensor, bool]:
    if keys.is_floating_point():
        present = keys == keys
        unique, inverse = keys[present].unique(return_inverse=True)
        numbers = torch.full(keys.shape, -1, dtype=torch.int64, device=keys.device)
        numbers[present] = inverse
        return numbers, unique, inverse.numel() < keys.numel()
    unique, numbers = keys.unique(return_inverse=True)
    return numbers, unique, False


def _factorize_pandas(pandas: Any, keys: Any) -> tuple[Tensor, Any, bool]:
    try:
        numbers, unique = pandas.factorize(keys, sort=True)
    except TypeError:  # keys of several types, which have no order
        numbers, unique = pandas.factorize(keys)
    numbers = _tensor(numbers)
    return numbers, unique, bool((numbers < 0).any())


def _factorize_numbers(keys: np.ndarray) -> tuple[Tensor, np.ndarray, bool]:
    unique, numbers = np.unique(keys, return_inverse=True)
    missing = unique != unique if keys.dtype.kind in "fcmM" else np.zeros(len(unique), dtype=bool)
    if not missing.any():
        return _tensor(numbers), unique, False
    # NaN and NaT sort last, so that the numbers before them stay.
    num_present = len(unique) - int(missing.sum())
    return _tensor(np.where(numbers < num_present, numbers, -1)), unique[:num_present], True


def _factorize_hashed(op: str, keys: list) -> tuple[Tensor, list, bool]:
    first_seen: defaultdict = defaultdict(count().__next__)
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
    return torch.from_numpy(rank[numbers]), present, len(present) < len(first_seen)


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


def _tensor(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers.reshape(-1), dtype=np.int64))
