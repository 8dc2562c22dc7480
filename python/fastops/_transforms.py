"""Operators under `torch.func` and in forward mode, which autograd functions that are written in C++ do not take part in.

Columns know nothing of each other, so a batch of calls is one call with one more dimension. `vmap` puts it in front of all tensors,
or right behind the rows: where it is there already, and where weights have it, whose dimensions are those of the data from the rows
on. Each operator has a rule for that, and where nothing but vmap is active, autograd goes on below as it does elsewhere.

Other transforms and forward mode see a `_Kernels`, a function of tensors that runs below all of them. What it is made of are operators
and derivatives that autograd takes there: its own derivatives are of the same kind, any number of times.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Iterator, Optional, Sequence, Union

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import coerce_cinterpreter
from torch.autograd import forward_ad

from . import _native  # noqa: F401  (registers the operators)
from .errors import sentence

# Arguments that are the same for all of a batch. `q` is a number, or a dimension in front of the result.
_SHARED = ("offsets", "order", "index", "q")

_ALL = sorted(name.removeprefix("fastops::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastops::"))
PUBLIC = tuple(name for name in _ALL if name.startswith("segment_"))
_INTERNAL = tuple(name for name in _ALL if name.startswith("_segment_"))

_library = torch.library.Library("fastops", "IMPL")


def differentiated() -> bool:
    """Whether there may be a derivative to take that C++ autograd functions do not know of: of a transform that is not vmap, or in
    forward mode."""
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    derivatives = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
    return any(layer.key() in derivatives for layer in _functorch.get_interpreter_stack())


def traceable() -> bool:
    """Whether `torch.compile`, which looks at the innermost transform only, may put an operator into its graph."""
    if not torch._C._are_functorch_transforms_active():
        return forward_ad._current_level < 0
    innermost = coerce_cinterpreter(_functorch.peek_interpreter_stack())
    return innermost.level() == 1 and innermost.key() == _functorch.TransformType.Vmap


def is_batched(tensor: Any) -> bool:
    """Whether a vmap, the innermost or one around it, goes over a tensor. A graph that is being made does not tell."""
    if torch.compiler.is_dynamo_compiling():
        return False
    while isinstance(tensor, Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def outside_inference_mode() -> Any:
    """Where tensors are made that autograd may save. A graph that is being made has no such mode."""
    return nullcontext() if torch.compiler.is_compiling() else _outside_inference_mode()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    forward = torch._C._is_fwd_grad_enabled()  # to stay as it is: leaving inference mode also turns it on
    with torch.inference_mode(False), forward_ad._set_fwd_grad_enabled(forward):
        yield


def refuse_batch(op: str, argument: str) -> None:
    remedy = "join the groupings into one, Segments.from_lengths of all lengths, for the rows of all one after another"
    raise ValueError(sentence(op, argument, "be the same for all calls of a vmap", "one for each", remedy))


@dataclass(frozen=True)
class _Signature:
    """Where an operator takes what: tensors with columns, tensors that are the same for all columns, the dimension of the rows."""

    name: str
    operands: tuple[int, ...]
    shared: tuple[int, ...]
    dim: int
    defaults: tuple[Any, ...]
    weight: Optional[int]
    weight_dim: Optional[int]
    takes_q: bool
    takes_k: bool
    plain: bool  # the rows of all operands are in one dimension, and so are those of the results but for k
    num_results: int


_signatures: dict[Any, _Signature] = {}


def _signature(overload: Any) -> _Signature:
    if overload not in _signatures:
        _signatures[overload] = _read_schema(overload)
    return _signatures[overload]


def _read_schema(overload: Any) -> _Signature:
    schema = overload._schema
    names = [argument.name for argument in schema.arguments]

    def at(name: str) -> Optional[int]:
        return names.index(name) if name in names else None

    tensors = [number for number, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
    shared = tuple(number for number in tensors if names[number] in _SHARED)
    return _Signature(
        name=schema.name.partition("::")[2],
        operands=tuple(number for number in tensors if number not in shared),
        shared=shared,
        dim=names.index("dim"),
        defaults=tuple(argument.default_value for argument in schema.arguments),
        weight=at("weight"),
        weight_dim=at("weight_dim"),
        takes_q="q" in names,
        takes_k="k" in names,
        plain="q" not in names and not schema.name.endswith("_place"),
        num_results=len(schema.returns),
    )


# ---- vmap ----


def _rule_of(overload: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
        signature = _signature(overload)
        arguments = [*given, *signature.defaults[len(given) :]]  # those that have their defaults are left out
        in_dims = (*in_dims, *[None] * (len(arguments) - len(given)))
        for number in signature.shared:
            if in_dims[number] is not None:
                argument = overload._schema.arguments[number].name
                refuse_batch(signature.name, argument)
        first = signature.operands[0]
        rank = arguments[first].dim() - (in_dims[first] is not None)
        dim = arguments[signature.dim]
        dim = dim + rank if -rank <= dim < 0 else dim

        of_weights = signature.weight_dim is not None
        if of_weights:
            behind = True
        elif signature.weight is not None:
            behind = in_dims[signature.weight] is not None
        else:  # where it is, rather than by a copy
            behind = signature.plain and in_dims[first] is not None and in_dims[first] > dim
        for number in signature.operands:
            if number == signature.weight and not behind:
                continue
            place = 0 if not behind else 1 if number == signature.weight else dim + 1
            arguments[number] = _with_batch(arguments[number], in_dims[number], place, info.batch_size)
        if of_weights and signature.weight_dim is not None:
            arguments[signature.weight_dim] += 1
        arguments[signature.dim] = dim if behind else dim + 1
        results = overload(*arguments)

        if behind:
            place = 1 if of_weights else dim + 1 + signature.takes_k
        else:
            place = _in_front(signature, arguments[signature.shared[-1]] if signature.shared else None)
        return results, (place,) * signature.num_results if signature.num_results > 1 else place

    return rule


for _name in (*PUBLIC, *_INTERNAL):
    torch.library.register_vmap(f"fastops::{_name}", _rule_of(getattr(torch.ops.fastops, _name).default), lib=_library)


def _in_front(signature: _Signature, q: Any) -> int:
    """Where in the results a batch is that stands in front of the data: behind several quantiles, which come first."""
    return int(signature.takes_q and q.dim() == 1)


def _with_batch(tensor: Tensor, at: Optional[int], place: int, size: int) -> Tensor:
    """With the dimension of the batch, which is at `at` now or nowhere, at `place`."""
    if at is not None:
        return tensor.movedim(at, place)
    return tensor.unsqueeze(place).expand(*tensor.shape[:place], size, *tensor.shape[place:])


# ---- derivatives ----


@torch._disable_dynamo  # which compiles no function that has a rule for forward mode
def call(overload: Any, *arguments: Any) -> Any:
    """What an operator gives, where derivatives that it does not know of may be taken."""
    if not differentiated():
        return overload(*arguments)
    signature = _signature(overload)
    tensors = [arguments[number] for number in (*signature.operands, *signature.shared)]
    if not any(tensor.is_floating_point() for tensor in tensors[: len(signature.operands)]):
        return overload(*arguments)
    rest = [*arguments, *signature.defaults[len(arguments) :]]
    for number in (*signature.operands, *signature.shared):
        rest[number] = None
    results = _Kernels.apply(_Operator(overload, signature, tuple(rest)), *tensors)
    return results if signature.num_results > 1 else results[0]


@dataclass(frozen=True)
class _Operator:
    """An operator as a function of its tensors: first those with columns, then those that are the same for all columns."""

    overload: Any
    signature: _Signature
    arguments: tuple[Any, ...]  # the others, and None for tensors

    @property
    def operands(self) -> int:
        return len(self.signature.operands)

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        arguments = list(self.arguments)
        for number, tensor in zip((*self.signature.operands, *self.signature.shared), tensors):
            arguments[number] = tensor
        results = self.overload(*arguments)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    @property
    def num_results(self) -> int:
        return self.signature.num_results

    @property
    def differentiable(self) -> int:
        return 1

    def batched(self, tensors: Sequence[Any]) -> tuple[_Operator, tuple[Any, ...], tuple[Any, ...]]:
        """The same of one more dimension, and where that is in each operand and result."""
        dim = self.arguments[self.signature.dim]
        if self.signature.weight is not None:
            return self, (dim + 1, 1), (dim + 1,)
        arguments = list(self.arguments)
        arguments[self.signature.dim] = dim + 1
        return replace(self, arguments=tuple(arguments)), (0,), (_in_front(self.signature, tensors[-1]),)


@dataclass(frozen=True)
class _Vjp:
    """The gradients of a function's operands, given its operands and the gradients of its results."""

    function: _Function

    @property
    def operands(self) -> int:
        return self.function.operands + self.function.differentiable

    @property
    def num_results(self) -> int:
        return self.function.operands

    @property
    def differentiable(self) -> int:
        return self.num_results

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        n, further = self.function.operands, torch.is_grad_enabled()
        with outside_inference_mode(), torch.enable_grad():
            tensors = _recordable(tensors)
            primals = _as_inputs(tensors[:n], further)
            results = self.function(*primals, *tensors[self.operands :])[: self.function.differentiable]
            return _gradients(results, primals, tensors[n : self.operands], further)

    def batched(self, tensors: Sequence[Any]) -> tuple[_Vjp, tuple[Any, ...], tuple[Any, ...]]:
        function, operands, results = self.function.batched(tensors)
        return _Vjp(function), (*operands, *results[: function.differentiable]), operands


@dataclass(frozen=True)
class _Jvp:
    """What a function's results change by, given its operands and what those change by: the gradient of a gradient, which is linear."""

    function: _Function

    @property
    def operands(self) -> int:
        return 2 * self.function.operands

    @property
    def num_results(self) -> int:
        return self.function.differentiable

    @property
    def differentiable(self) -> int:
        return self.num_results

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        n, further = self.function.operands, torch.is_grad_enabled()
        with outside_inference_mode(), torch.enable_grad():
            tensors = _recordable(tensors)
            primals = _as_inputs(tensors[:n], further)
            results = self.function(*primals, *tensors[2 * n :])[: self.differentiable]
            seeds = [torch.zeros_like(result).requires_grad_() for result in results]
            return _gradients(_gradients(results, primals, seeds, True), seeds, tensors[n : 2 * n], further)

    def batched(self, tensors: Sequence[Any]) -> tuple[_Jvp, tuple[Any, ...], tuple[Any, ...]]:
        function, operands, results = self.function.batched(tensors)
        return _Jvp(function), (*operands, *operands), results[: function.differentiable]


_Function = Union[_Operator, _Vjp, _Jvp]


def _recordable(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors, but copies of those of inference mode, which autograd does not save."""
    return tuple(x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in tensors)


def _as_inputs(tensors: Sequence[Tensor], further: bool) -> list[Tensor]:
    """What gradients are asked of: where derivatives of those follow, the tensors themselves, which then have one."""
    return [tensor if further and tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors]


def _gradients(results: Sequence[Any], inputs: Sequence[Any], upstream: Sequence[Any], further: bool) -> tuple[Any, ...]:
    pairs = [(result, gradient) for result, gradient in zip(results, upstream) if result.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, inputs))
    results, upstream = zip(*pairs)
    found = torch.autograd.grad(results, inputs, upstream, create_graph=further, allow_unused=True, materialize_grads=True)
    return found if further else tuple(x.detach() if x.requires_grad else x for x in found)


class _Kernels(torch.autograd.Function):
    """`function(*tensors)`, below all transforms."""

    @staticmethod
    def forward(function: _Function, *tensors: Any) -> tuple[Any, ...]:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)  # the grouping too: in forward mode a change in place is found out
        ctx.save_for_forward(*tensors)
        ctx.has_derivative = output[0].is_floating_point()  # row numbers and counts have none
        ctx.mark_non_differentiable(*(x for n, x in enumerate(output) if n >= ctx.function.differentiable or not x.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        n, tensors = ctx.function.operands, ctx.saved_tensors
        gradients = gradients[: ctx.function.differentiable]
        back = _Kernels.apply(_Vjp(ctx.function), *tensors[:n], *gradients, *tensors[n:])
        return None, *back, *[None] * (len(tensors) - n)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
        if not ctx.has_derivative:
            return (None,) * ctx.function.num_results
        n, tensors = ctx.function.operands, ctx.saved_tensors
        known = [torch.zeros_like(a) if b is None else b for a, b in zip(tensors[:n], tangents)]
        forth = _Kernels.apply(_Jvp(ctx.function), *tensors[:n], *known, *tensors[n:])
        return *forth, *[None] * (ctx.function.num_results - len(forth))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: _Function, *tensors: Any) -> tuple[Any, ...]:
        n = function.operands
        if any(at is not None for at in in_dims[n + 1 :]):
            refuse_batch("segments", "segments")
        function, places, of_results = function.batched(tensors)
        operands = [_with_batch(x, at, place, info.batch_size) for x, at, place in zip(tensors, in_dims[1:], places)]
        results = _Kernels.apply(function, *operands, *tensors[n:])
        return results, tuple(of_results[min(number, len(of_results) - 1)] for number in range(len(results)))
