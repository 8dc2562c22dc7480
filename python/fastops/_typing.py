"""What the public functions take and return, for type checkers and for those who read signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Generic, Protocol, Tuple, TypeVar, Union

import numpy as np
import torch
from torch import Tensor

from .segments import Segments

# Tensors give tensors, and NumPy arrays give NumPy arrays.
Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])
Grouping = Union[Segments, Tensor, np.ndarray[Any, Any]]
AnyArray = Union[Tensor, np.ndarray[Any, Any]]
Number = Union[int, float, np.number[Any]]
Integer = Union[int, np.integer[Any]]
Flag = Union[bool, np.bool_]
DType = Union[torch.dtype, type, str, np.dtype[Any]]  # the last three for arrays

if TYPE_CHECKING:

    class ValuesAndIndices(Tuple[Array, Array], Generic[Array]):
        """One of the named tuples of `torch.return_types`."""

        @property
        def values(self) -> Array: ...

        @property
        def indices(self) -> Array: ...

else:
    ValuesAndIndices = Tuple


class Operator(Protocol):
    """`_dispatch.operator` gives it for one result."""

    def __call__(self, data: Array, segments: Any, dim: Any, *options: Any) -> Array: ...


class PairOperator(Protocol):
    """And this one for values and indices, before they get their names."""

    def __call__(self, data: Array, segments: Any, dim: Any, *options: Any) -> Tuple[Array, Array]: ...


def named(name: str) -> Callable[[Tuple[Array, Array]], ValuesAndIndices[Array]]:
    """The named tuple that the function `name` of torch returns."""
    constructor: Callable[[Any], Any] = getattr(torch.return_types, name)
    return constructor
