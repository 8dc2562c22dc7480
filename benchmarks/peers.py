"""Other ways to do what the operations do: one row of PEERS for each, and what it takes for each operation.

A way gets a `Workload`, prepares what it likes (the grouping, its own kind of table) before the clock starts, and returns a call
without arguments. What that returns is compared before it is timed. A peer that groups anew in each call says so in `note`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Callable, Collection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastops import registry

from .base import Work, Workload

Way = Callable[[Workload], Work]

# Segments that a peer may go through in a Python loop; more take seconds.
LONGEST_LOOP = 10_000


@dataclass(frozen=True)
class Peer:
    """Another way to do the same.

    name, package: what it is called, and what has to be installed to import it, or "".
    ways: by operation.
    differentiable: whether it has a backward, too.
    cuda: whether it runs there; else only on the CPU.
    dtypes: of the data.
    takes: whether it has an answer for this workload (rows in order, no empty segments, ...).
    note: what a reader should know about it.
    """

    name: str
    ways: dict[str, Way]
    package: str = ""
    differentiable: bool = False
    cuda: bool = False
    dtypes: tuple = (torch.float32, torch.float64)
    takes: Callable[[Workload], bool] = field(default=lambda w: True)
    note: str = ""

    def __repr__(self) -> str:
        return self.name

    @property
    def missing(self) -> bool:
        return bool(self.package) and importlib.util.find_spec(self.package) is None

    def covers(self, w: Workload) -> bool:
        point = w.point
        return (
            not self.missing
            and point.op.name in self.ways
            and point.dtype in self.dtypes
            and (point.direction == "forward" or self.differentiable)
            and (self.cuda or torch.device(point.device).type == "cpu")
            and self.takes(w)
        )


def in_order(w: Workload) -> bool:
    return w.in_order


def none_empty(w: Workload) -> bool:
    return not w.has_empty


def scalar(w: Workload) -> bool:
    return w.data.dim() == 1


def _each(names: dict[str, Any], way: Callable[[Any], Way]) -> dict[str, Way]:
    """The same way under the peer's own names: `names` by operation, without the "segment_"."""
    return {f"segment_{op}": way(name) for op, name in names.items()}


# torch ---------------------------------------------------------------------------------------------------------------


def _index_add(mean: bool) -> Way:
    def way(w: Workload) -> Work:
        index, counts = w.index, w.counts
        if mean:
            return lambda: w.zeros().index_add(0, index, w.data) / counts
        return lambda: w.zeros().index_add(0, index, w.data)

    return way


def _scatter_reduce(name: str) -> Way:
    def way(w: Workload) -> Work:
        index, start = w.expanded, torch.ones_like if name == "prod" else torch.zeros_like
        return lambda: start(w.zeros()).scatter_reduce(0, index, w.data, name, include_self=False)

    return way


def _segment_reduce(name: str) -> Way:
    def way(w: Workload) -> Work:
        offsets = w.offsets  # unsafe leaves out a check of the arguments, which is not the work
        return lambda: torch.segment_reduce(w.data, name, offsets=offsets, axis=0, unsafe=True)

    return way


def _embedding_bag(kind: torch.dtype) -> Callable[[str], Way]:
    def named(mode: str) -> Way:
        def way(w: Workload) -> Work:
            rows, starts, shape = w.order.to(kind), w.offsets.to(kind), w.zeros().shape

            def work() -> Tensor:
                table = w.data if w.data.dim() == 2 else w.data[:, None]
                return F.embedding_bag(rows, table, starts, mode=mode, include_last_offset=True).reshape(shape)

            return work

        return way

    return named


def _end(last: bool) -> Way:
    def way(w: Workload) -> Work:
        place = w.offsets[1:] - 1 if last else w.offsets[:-1]
        rows, empty = w.order[place.clamp(0, w.num_rows - 1)], w.trailing(w.segments.lengths == 0)
        if w.has_empty:
            return lambda: w.data.index_select(0, rows).masked_fill(empty, 0)
        return lambda: w.data.index_select(0, rows)

    return way


def _broadcast(w: Workload) -> Work:
    index = w.index
    return lambda: w.data.index_select(0, index)


def _repeat(w: Workload) -> Work:
    lengths, size = w.segments.lengths, w.num_rows
    return lambda: w.data.repeat_interleave(lengths, 0, output_size=size)


def _cumsum_less_base(w: Workload) -> Work:
    index, starts, order, inverse = w.index[w.order], w.offsets[:-1], w.order, w.inverse

    def work() -> Tensor:
        data = w.data if w.in_order else w.data[order]
        total = data.cumsum(0)
        base = (total - data).index_select(0, starts.clamp(max=w.num_rows - 1))
        running = total - base.index_select(0, index)
        return running if w.in_order else running[inverse]

    return work


def _composite(op: registry.Op) -> Way:
    def way(w: Workload) -> Work:
        if op.name not in registry.SCANS or w.in_order:
            index, size = w.index, w.num_segments
            return lambda: op.peer(w.data, index, size)
        index, order, inverse = w.index[w.order], w.order, w.inverse

        def work() -> Any:
            result = op.peer(w.data[order], index, w.num_segments)
            if isinstance(result, Tensor):
                return result[inverse]
            return result[0][inverse], order[result[1]][inverse]

        return work

    return way


_REDUCTIONS = {name: name for name in ("sum", "mean", "prod", "amax", "amin")}
_PLAIN = ("segment_sum", "segment_mean", "segment_prod", "segment_amax", "segment_amin", "segment_first", "segment_last", "segment_broadcast")
_COMPOSITES = {op.name: _composite(op) for op in registry.OPS if op.name not in _PLAIN}

# Others -------------------------------------------------------------------------------------------------------------------


def _torch_scatter(name: str) -> Way:
    def way(w: Workload) -> Work:
        import torch_scatter

        if w.in_order:
            return lambda: torch_scatter.segment_csr(w.data, w.offsets, reduce=name)
        return lambda: torch_scatter.scatter(w.data, w.index, 0, dim_size=w.num_segments, reduce=name)

    return way


def _torch_scatter_rows(name: str, rows_only: bool = False) -> Way:
    def way(w: Workload) -> Work:
        import torch_scatter

        if w.in_order:
            reduce = getattr(torch_scatter, f"segment_{name}_csr")
            work = lambda: reduce(w.data, w.offsets)  # noqa: E731
        else:
            reduce = getattr(torch_scatter, f"scatter_{name}")
            work = lambda: reduce(w.data, w.index, 0, dim_size=w.num_segments)  # noqa: E731
        return (lambda: work()[1]) if rows_only else work

    return way


def _torch_scatter_composite(name: str) -> Way:
    def way(w: Workload) -> Work:
        from torch_scatter import composite

        index, size, function = w.index, w.num_segments, getattr(composite, f"scatter_{name}")
        return lambda: function(w.data, index, dim=0, dim_size=size)

    return way


def _torch_scatter_gather(w: Workload) -> Work:
    import torch_scatter

    return lambda: torch_scatter.gather_csr(w.data, w.offsets)


def _pyg(name: str) -> Way:
    def way(w: Workload) -> Work:
        from torch_geometric import utils

        if w.in_order:
            return lambda: utils.segment(w.data, w.offsets, reduce=name)
        return lambda: utils.scatter(w.data, w.index, 0, w.num_segments, reduce=name)

    return way


def _pyg_softmax(w: Workload) -> Work:
    from torch_geometric import utils

    if w.in_order:
        return lambda: utils.softmax(w.data, ptr=w.offsets)
    return lambda: utils.softmax(w.data, w.index, num_nodes=w.num_segments)


def _pyg_quantile(w: Workload) -> Work:
    from torch_geometric.nn.aggr import QuantileAggregation

    aggregate = QuantileAggregation(registry.find("segment_quantile").arguments[0])
    rows = w.data if w.data.dim() == 2 else w.data[:, None]
    return lambda: aggregate(rows, w.index, dim_size=w.num_segments, dim=0)


def _reduceat(name: str) -> Way:
    def way(w: Workload) -> Work:
        array, starts, counts = w.array, w.starts_array, w.counts.numpy()
        if name == "mean":
            return lambda: np.add.reduceat(array, starts, axis=0) / counts
        return lambda: getattr(np, name).reduceat(array, starts, axis=0)

    return way


def _bincount(mean: bool) -> Way:
    def way(w: Workload) -> Work:
        array, index, size, counts = w.array, w.index_array, w.num_segments, w.counts.numpy()
        if mean:
            return lambda: np.bincount(index, array, size) / counts
        return lambda: np.bincount(index, array, size)

    return way


def _at(name: str) -> Way:
    def way(w: Workload) -> Work:
        array, index, shape = w.array, w.index_array, tuple(w.zeros().shape)
        start = {"add": 0, "maximum": -np.inf, "minimum": np.inf}[name]

        def work() -> np.ndarray:
            out = np.full(shape, start, array.dtype)
            getattr(np, name).at(out, index, array)
            return out

        return work

    return way


def _lexsort(with_values: bool) -> Way:
    def way(w: Workload) -> Work:
        array, index = w.array, w.index_array

        def work() -> Any:
            rows = np.lexsort((array, index))
            return (array[rows], rows) if with_values else rows

        return work

    return way


def _repeat_array(w: Workload) -> Work:
    array, lengths = w.array, w.segments.lengths.numpy()
    return lambda: np.repeat(array, lengths, axis=0)


def _pandas(name: str, *arguments: Any) -> Way:
    def way(w: Workload) -> Work:
        import pandas

        keys = pandas.Categorical.from_codes(w.index_array, categories=range(w.num_segments))
        grouped = pandas.DataFrame(w.array).groupby(keys, observed=False)
        grouped.ngroups  # groups are found when they are asked for
        return lambda: getattr(grouped, name)(*arguments)

    return way


def _polars(name: str, *arguments: Any, per_row: bool = False) -> Way:
    def way(w: Workload) -> Work:
        import polars

        columns = w.array.reshape(w.num_rows, -1)
        frame = polars.DataFrame({"g": w.index_array, **{str(k): columns[:, k] for k in range(columns.shape[1])}})
        values = polars.exclude("g")
        if per_row:
            return lambda: frame.select(getattr(values, name)(*arguments).over("g"))
        asked = getattr(values, name)(*arguments)
        # By the number of the segment, as everywhere else; in order that is the order of appearance.
        if w.in_order:
            return lambda: frame.group_by("g", maintain_order=True).agg(asked).drop("g")
        return lambda: frame.group_by("g").agg(asked).sort("g").drop("g")

    return way


def _groupies(name: str, **options: Any) -> Way:
    def way(w: Workload) -> Work:
        import numpy_groupies

        array, index, size = w.array, w.index_array, w.num_segments
        return lambda: numpy_groupies.aggregate(index, array, func=name, size=size, axis=0, **options)

    return way


class _Graph(torch.nn.Module):
    """Plain PyTorch as a graph; the number of segments is the size of an input, so that one export serves every case."""

    def __init__(self, op: registry.Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, data: Tensor, index: Tensor, segments: Tensor) -> Tensor:
        return self.op.peer(data, index, segments.size(0))


@lru_cache(maxsize=None)
def _exported(op: registry.Op, dims: int) -> bytes:
    sample = (torch.ones((6, 3)[:dims]), torch.tensor([0, 0, 1, 2, 2, 3]), torch.ones(4))
    dynamic = ({dim: torch.export.Dim.DYNAMIC for dim in range(dims)}, *({0: torch.export.Dim.DYNAMIC},) * 2)
    program = torch.onnx.export(_Graph(op).eval(), sample, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    return program.model_proto.SerializeToString()


def _onnx(op: registry.Op) -> Way:
    def way(w: Workload) -> Work:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        graph = _exported(op, w.data.dim())
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        feed = dict(zip(names, (w.array, w.index_array, np.ones(w.num_segments, np.float32))))
        return lambda: session.run(None, feed)

    return way


_ONNX = ("segment_sum", "segment_amax", "segment_amin", "segment_prod", "segment_softmax")
_QUANTILE = registry.find("segment_quantile").arguments[0]
_MODES = {"sum": "sum", "mean": "mean", "amax": "max"}
_NAMES = {**_MODES, "amin": "min"}
_TABLE = {**_NAMES, "var": "var", "std": "std", "first": "first", "last": "last"}
_FRAME = {**_TABLE, "prod": "prod", "any": "any", "all": "all", "cumsum": "cumsum", "cumprod": "cumprod", "argmax": "idxmax", "argmin": "idxmin"}
_TORCH = {"differentiable": True, "cuda": True, "dtypes": registry.ALL_DTYPES}

PEERS = (
    Peer("index_add", {"segment_sum": _index_add(False), "segment_mean": _index_add(True)}, **_TORCH),
    Peer("scatter_reduce", _each(_REDUCTIONS, _scatter_reduce), **_TORCH),
    Peer(
        "segment_reduce",
        _each({**_NAMES, "prod": "prod"}, _segment_reduce),
        differentiable=True,
        cuda=True,
        dtypes=registry.FLOATING,
        takes=in_order,
    ),
    Peer("embedding_bag", _each(_MODES, _embedding_bag(torch.int64)), differentiable=True, cuda=True, dtypes=registry.FLOATING),
    Peer("embedding_bag int32", _each(_MODES, _embedding_bag(torch.int32)), cuda=True, dtypes=registry.FLOATING, note="row numbers in int32"),
    Peer("index_select", {"segment_broadcast": _broadcast, "segment_first": _end(False), "segment_last": _end(True)}, **_TORCH),
    Peer("repeat_interleave", {"segment_broadcast": _repeat}, takes=in_order, **_TORCH),
    Peer("cumsum less base", {"segment_cumsum": _cumsum_less_base}, note="loses digits that earlier segments use up", **_TORCH),
    Peer(
        "torch composite",
        _COMPOSITES,
        takes=lambda w: w.op.name not in registry.SCANS or w.num_segments <= LONGEST_LOOP,
        note=f"`registry.Op.peer`; scans loop over the segments, up to {LONGEST_LOOP:,} of them",
        **_TORCH,
    ),
    Peer(
        "torch_scatter",
        {
            **_each(_NAMES, _torch_scatter),
            **_each({"max": "max", "min": "min"}, _torch_scatter_rows),
            "segment_argmax": _torch_scatter_rows("max", rows_only=True),
            "segment_argmin": _torch_scatter_rows("min", rows_only=True),
            **_each({name: name for name in ("softmax", "log_softmax", "logsumexp", "std")}, _torch_scatter_composite),
            "segment_broadcast": _torch_scatter_gather,
        },
        package="torch_scatter",
        takes=lambda w: w.in_order or not w.op.takes_values,
        **_TORCH,
    ),
    Peer(
        "torch_geometric",
        {**_each(_NAMES, _pyg), "segment_softmax": _pyg_softmax, "segment_quantile": _pyg_quantile},
        package="torch_geometric",
        **_TORCH,
    ),
    Peer(
        "NumPy reduceat",
        _each({"sum": "add", "mean": "mean", "prod": "multiply", "amax": "maximum", "amin": "minimum", "any": "logical_or", "all": "logical_and"}, _reduceat),
        takes=lambda w: w.in_order and not w.has_empty,
    ),
    Peer("NumPy bincount", {"segment_sum": _bincount(False), "segment_mean": _bincount(True)}, takes=scalar, note="adds in float64"),
    Peer("NumPy at", _each({"sum": "add", "amax": "maximum", "amin": "minimum"}, _at), takes=none_empty),
    Peer("NumPy lexsort", {"segment_sort": _lexsort(True), "segment_argsort": _lexsort(False)}, takes=scalar),
    Peer("NumPy repeat", {"segment_broadcast": _repeat_array}, takes=in_order),
    Peer("pandas", {**_each(_FRAME, _pandas), "segment_quantile": _pandas("quantile", _QUANTILE)}, package="pandas"),
    Peer(
        "polars",
        {
            **_each({**_TABLE, "prod": "product"}, _polars),
            "segment_quantile": _polars("quantile", _QUANTILE, "linear"),
            "segment_cumsum": _polars("cum_sum", per_row=True),
            "segment_cumprod": _polars("cum_prod", per_row=True),
        },
        package="polars",
        takes=none_empty,
        note="groups anew in each call",
    ),
    Peer(
        "numpy-groupies",
        {
            **_each({**_TABLE, "prod": "prod", "any": "any", "all": "all", "argmax": "argmax", "argmin": "argmin", "cumsum": "cumsum"}, _groupies),
            "segment_var": _groupies("var", ddof=1),
            "segment_std": _groupies("std", ddof=1),
        },
        package="numpy_groupies",
    ),
    Peer("ONNX Runtime", {name: _onnx(registry.find(name)) for name in _ONNX}, package="onnxruntime", dtypes=(torch.float32,), note="the composite, exported"),
)


def missing() -> list[str]:
    """One line for each peer that is not installed."""
    return [f"{peer.name}: left out, since {peer.package} is not installed" for peer in PEERS if peer.missing]


def without(names: Collection[str]) -> tuple[Peer, ...]:
    """All others."""
    return tuple(peer for peer in PEERS if peer.name not in names)
