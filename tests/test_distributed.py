"""Models on several ranks, and operations on distributed tensors. Two processes with gloo stand for any number with any backend."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import first, kinds_of, run_page
from ranks import COUNT, Ranks

import fastops
from fastops import Segments, segment_broadcast, segment_sum, testing
from fastops.registry import OPS, find

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


# Models ----------------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, sometimes=False):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = fastops.nn.SegmentNorm(4)
        self.attention = fastops.nn.SegmentAttentionPool(4, heads=2)
        self.pool = fastops.nn.SegmentPool(["sum", "amax", "std", "logsumexp"], fill_value=0)
        self.last = torch.nn.Linear(20, 1)
        self.extra = torch.nn.Linear(4, 4) if sometimes else None

    def forward(self, data, segments, with_extra=True):
        rows = self.norm(self.linear(data), segments).tanh()
        if self.extra is not None and with_extra:
            rows = rows + self.extra(rows)
        rows = rows + segment_broadcast(fastops.segment_median(rows, segments).values, segments)
        rows = rows * fastops.segment_softmax(rows, segments) + fastops.segment_cumsum(rows, segments)
        return self.last(torch.cat((self.attention(rows, segments), self.pool(rows, segments)), 1)).squeeze(1)


LENGTHS = ((3, 0, 4, 1), (2, 6, 1, 5))  # of each rank
WHOLE = tuple(range(COUNT))


def trained(sometimes=False, wrap=lambda model: model, parts=WHOLE):
    """A model after some steps on the data of those ranks."""
    torch.manual_seed(0)
    module = Model(sometimes).double()
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = [testing.make_data((sum(LENGTHS[part]), 3), torch.float64, kind="normal", seed=part) for part in parts]
    segments = [testing.make_segments(LENGTHS[part], "unsorted", seed=part) for part in parts]
    for _ in range(3):
        optimizer.zero_grad()
        # Only rank 0 uses all parameters. What others do not use gets no gradient from them.
        outputs = [model(x, s, not sometimes or part == 0) for x, s, part in zip(inputs, segments, parts)]
        torch.cat(outputs).square().mean().backward()
        optimizer.step()
    return module


def assert_same_weights(module, expected):
    for (name, one), other in zip(module.named_parameters(), expected.parameters()):
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def train_on_ranks(**options):
    def wrap(model):
        return torch.nn.parallel.DistributedDataParallel(model, **options)

    sometimes = "find_unused_parameters" in options
    module = trained(sometimes, wrap, parts=(dist.get_rank(),))
    assert_same_weights(module, trained(sometimes))


@pytest.mark.parametrize("option", (None, "static_graph", "find_unused_parameters", "gradient_as_bucket_view"))
def test_data_parallel(ranks, option):
    ranks.run(train_on_ranks, **({option: True} if option else {}))


def train_with_sharded_parameters():
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for part in (model.norm, model.attention, model):
            fully_shard(part, mesh=dist.device_mesh.init_device_mesh("cpu", (COUNT,)))
        return model

    module = trained(wrap=wrap, parts=(dist.get_rank(),))
    assert all(type(p).__name__ == "DTensor" for p in module.parameters())
    assert_same_weights(module, trained())


def test_fully_sharded(ranks):
    ranks.run(train_with_sharded_parameters)


def test_data_parallel_in_threads_is_refused():
    """torch.nn.DataParallel cuts data in the middle of segments, which it leaves whole."""
    data, segments = torch.ones(7, 2), testing.make_segments((3, 0, 4))
    with pytest.raises(ValueError, match="data must have 7 rows along dim 0, as the segments do, but got 4"):
        fastops.nn.SegmentPool()(data.chunk(2)[0], segments)


# Distributed tensors ---------------------------------------------------------------------------------------------------

# Of nine rows rank 0 has the first five.
GROUPINGS = {
    "whole": lambda: Segments.from_lengths(torch.tensor([3, 0, 2, 4])),
    "cut": lambda: Segments.from_lengths(torch.tensor([3, 0, 4, 2])),
    "unsorted": lambda: Segments.from_index(torch.tensor([2, 0, 2, 0, 2, 1, 4, 4, 1]), 5),
    "unsorted, cut": lambda: Segments.from_index(torch.tensor([2, 0, 2, 0, 4, 1, 0, 2, 2]), 5),
    "ignored": lambda: Segments.from_index(torch.tensor([2, -1, 2, 0, -1, 1, 4, -1, 1], dtype=torch.int32), 5, ignore_index=-1),
    "one row": lambda: Segments.from_lengths(torch.tensor([0, 1], dtype=torch.int32)),
    "no rows": lambda: Segments.from_lengths(torch.tensor([0, 0])),
}
# For each mesh; p stands for Partial.
PLACEMENTS = {
    (COUNT,): ("r", "0", "1", "2", "p"),
    (COUNT, 1): ("01", "p0", "00"),
    (1, COUNT): ("00", "20", "0p"),
}


def placed(name):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Shard(int(c)) if c.isdigit() else Partial() if c == "p" else Replicate() for c in name]


def distributed(data, mesh, name):
    """The data on the ranks of a mesh. Partial: each rank has a share of it."""
    from torch.distributed.tensor import DTensor

    local, placements = data.detach(), placed(name)
    for count, rank, p in zip(mesh.shape, mesh.get_coordinate(), placements):
        if p.is_partial():
            local = local * (0.25 if rank == 0 else 0.75) if count > 1 else local
        elif p.is_shard():
            parts = local.chunk(count, p.dim)
            local = parts[rank] if rank < len(parts) else local.narrow(p.dim, 0, 0)
    local = local.contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=data.shape, stride=data.stride())


def collected(result):
    """All of it on every rank; there is no sum of bool and int16 in gloo."""
    if result.dtype in (torch.bool, torch.int16):
        return result.to(torch.int32).full_tensor().to(result.dtype)
    return result.full_tensor()


@functools.cache
def meshes():
    from torch.distributed.device_mesh import init_device_mesh

    return {shape: init_device_mesh("cpu", shape) for shape in PLACEMENTS}


def every_placement(run):
    """Calls run(mesh, name of placements) and tells all that failed."""
    failed = []
    for shape, mesh in meshes().items():
        for name in PLACEMENTS[shape]:
            try:
                run(mesh, name)
            except Exception as error:
                failed.append(f"{shape} {name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def assert_same_results(results, expected, tolerance):
    several = isinstance(expected, tuple)
    assert not several or type(results) is type(expected)
    for one, other in zip(*((results, expected) if several else ((results,), (expected,)))):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(collected(one), other, rtol=tolerance, atol=tolerance, equal_nan=True)


def derivatives(results, leaves):
    """First and second: of a curved function of the results, and of their squares."""
    result = whole(first(results))
    factors = testing.make_data(result.shape, torch.float64, kind="normal", seed=3)
    gradients = torch.autograd.grad((result * factors).square().sum(), leaves, create_graph=True)
    for gradient in gradients:
        assert not any(p.is_partial() for p in getattr(gradient, "placements", ()))
    curvature = sum(whole(gradient).square().sum() for gradient in gradients)
    return [whole(x) for x in (*gradients, *torch.autograd.grad(curvature, leaves))]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(function, tensors, mesh, names, tolerance=1e-11, differentiable=True):
    """Values and derivatives of a function of distributed tensors are those of the same plain tensors."""
    plain = [tensor.clone().requires_grad_(differentiable) for tensor in tensors]
    leaves = [
        (distributed(tensor, mesh, name) if name else tensor.clone()).detach().requires_grad_(differentiable)
        for tensor, name in zip(tensors, names)
    ]
    results, expected = function(*leaves), function(*plain)
    assert_same_results(results, expected, tolerance)
    if differentiable:
        for one, other in zip(derivatives(results, leaves), derivatives(expected, plain)):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def check_operation(name, grouping):
    op = find(name)
    segments = GROUPINGS[grouping]()
    dim = -2 if grouping in ("cut", "ignored") else 0
    sizes = [3, 3, 3]
    sizes[dim] = segments.num_segments if op.takes_values else segments.num_rows
    kind = "distinct" if op.data_kind == "dyadic" else op.data_kind
    data = testing.make_data(tuple(sizes), torch.float64, kind=kind)
    # What segments without rows get must come once, and from nowhere else.
    options = {"fill_value": 7} if op.empty not in ("", "False", "True") else {}
    every_placement(
        lambda mesh, names: assert_same(
            lambda x: op.fn(x, segments, dim=dim, **options), [data], mesh, [names], differentiable=op.differentiable
        )
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_operation(ranks, op):
    for grouping in GROUPINGS:
        ranks.run(check_operation, op.name, grouping)


def check_dtypes(name):
    op = find(name)
    for dtype in op.dtypes:
        for grouping in ("whole", "cut"):
            segments = GROUPINGS[grouping]()
            rows = segments.num_segments if op.takes_values else segments.num_rows
            data = testing.make_data((rows, 3), dtype, kind=op.data_kind)
            mesh = meshes()[(COUNT,)]
            for names in ("r", "0", "1"):
                gathers = grouping == "cut" or op.takes_values or op.grouped
                if dtype == torch.int16 and names == "0" and gathers:
                    continue  # gloo moves no int16
                tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2 if dtype == torch.bfloat16 else 1e-5
                result, expected = op.fn(distributed(data, mesh, names), segments), op.fn(data, segments)
                assert_same_results(result, expected, tolerance)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_dtypes(ranks, op):
    ranks.run(check_dtypes, op.name)


def check_weights(name):
    op = find(name)
    for grouping in ("whole", "cut", "unsorted, cut"):
        segments = GROUPINGS[grouping]()
        data = testing.make_data((segments.num_rows, 3, 3), torch.float64, kind="normal")
        for heads in ((), (3,), (1,), (3, 3), (1, 3)):
            weight = testing.make_data((segments.num_rows, *heads), torch.float64, seed=1).abs() + 1
            for of_weight in (None, "r", "0"):

                def run(mesh, names, weight=weight, of_weight=of_weight, segments=segments):
                    names_of_weight = of_weight and of_weight * mesh.ndim
                    assert_same(
                        lambda x, w: op.fn(x, segments, weight=w, fill_value=3), [data, weight], mesh, [names, names_of_weight]
                    )

                every_placement(run)


@pytest.mark.parametrize("name", ("segment_sum", "segment_mean"))
def test_weights(ranks, name):
    ranks.run(check_weights, name)


def check_options():
    shares = torch.tensor([0.2, 0.7], dtype=torch.float64)
    calls = (
        lambda x, s, dim: fastops.segment_quantile(x, s, shares, dim=dim),
        lambda x, s, dim: fastops.segment_topk(x, s, 0, dim=dim),
        lambda x, s, dim: fastops.segment_topk(x, s, 3, dim=dim, largest=False, sorted=False, fill_value=-1),
        lambda x, s, dim: fastops.segment_cummax(x, s, dim=dim, exclusive=True, reverse=True),
        lambda x, s, dim: fastops.segment_sum(x, s, dim=dim, dtype=torch.bool, fill_value=True),
        lambda x, s, dim: fastops.segment_sum(x, s, dim=dim, dtype=torch.float32, fill_value=torch.nan),
        lambda x, s, dim: fastops.segment_argmin(x, s, dim=dim, fill_value=100),
        lambda x, s, dim: fastops.segment_all(x, s, dim=dim, fill_value=False),
        lambda x, s, dim: fastops.segment_any(x, s, dim=dim, fill_value=True),
        lambda x, s, dim: fastops.segment_var(x, s, dim=dim, correction=2, fill_value=-1),
        lambda x, s, dim: fastops.segment_amax(x, s if s.order is not None else s.offsets, dim=dim, fill_value=-torch.inf),
    )
    for grouping in ("whole", "cut", "unsorted"):
        segments = GROUPINGS[grouping]()
        for dim in (1, -3):
            sizes = [3, 3, 3]
            sizes[dim] = segments.num_rows
            data = testing.make_data(tuple(sizes), torch.float64, kind="special")
            data[data.isnan()] = 0
            for call in calls:

                def run(mesh, names, call=call, dim=dim, data=data, segments=segments):
                    given = data.clamp(-5, 5) if "p" in names else data
                    assert_same(lambda x: call(x, segments, dim), [given], mesh, [names], 1e-6, differentiable=False)

                every_placement(run)


def test_options(ranks):
    ranks.run(check_options)


def check_special_values():
    """NaN and infinities come through zeros that other ranks add."""
    mesh = meshes()[(COUNT,)]
    for grouping in ("whole", "cut", "unsorted"):
        segments = GROUPINGS[grouping]()
        for op in OPS:
            if not op.takes_values:
                data = testing.make_data((segments.num_rows, 20), torch.float64, kind="special")
                assert_same_results(op.fn(distributed(data, mesh, "0"), segments), op.fn(data, segments), 1e-12)


def test_special_values(ranks):
    ranks.run(check_special_values)


def check_modules():
    from torch.distributed.tensor import distribute_module

    nn = fastops.nn
    makers = (
        lambda: nn.SegmentPool(["sum", "mean", "prod", "amax", "amin", "var", "std", "logsumexp"]),
        lambda: nn.SegmentSoftmax(),
        lambda: nn.SegmentNorm(4, dtype=torch.float64),
        lambda: nn.SegmentAttentionPool(4, heads=2, dtype=torch.float64),
    )
    mesh = meshes()[(COUNT,)]
    for grouping in ("whole", "cut", "unsorted"):
        segments = GROUPINGS[grouping]()
        data = testing.make_data((segments.num_rows, 4), torch.float64, kind="distinct") / 10
        for make in makers:
            for names in ("r", "0", "1", "p"):
                torch.manual_seed(0)
                plain = make()
                torch.manual_seed(0)
                module = distribute_module(make(), mesh)
                leaf, plain_leaf = distributed(data, mesh, names).requires_grad_(), data.clone().requires_grad_()
                result, expected = module(leaf, segments), plain(plain_leaf, segments)
                torch.testing.assert_close(result.full_tensor(), expected)
                result.full_tensor().square().sum().backward()
                expected.square().sum().backward()
                pairs = zip((leaf, *module.parameters()), (plain_leaf, *plain.parameters()))
                for one, other in pairs:
                    torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_modules(ranks):
    ranks.run(check_modules)


# The table of docs/distributed.md: placements, what they become, and how many collectives that takes.
MOVES = (
    ("segment_amax", "cut", "r", "r", 0),
    ("segment_amax", "cut", "1", "1", 0),
    ("segment_sort", "unsorted, cut", "1", "1", 0),
    ("segment_broadcast", "cut", "1", "1", 0),
    ("segment_softmax", "whole", "0", "0", 0),
    ("segment_softmax", "unsorted", "0", "0", 0),
    ("segment_softmax", "cut", "0", "r", 1),
    ("segment_cumsum", "whole", "0", "0", 0),
    ("segment_cummax", "unsorted", "0", "0", 0),
    ("segment_sort", "whole", "0", "0", 0),
    ("segment_sort", "unsorted", "0", "r", 1),
    ("segment_amax", "whole", "0", "p", 0),
    ("segment_median", "unsorted", "0", "pr", 1),
    ("segment_argmax", "whole", "0", "r", 1),
    ("segment_sum", "cut", "0", "p", 0),
    ("segment_sum", "unsorted, cut", "0", "p", 0),
    ("segment_mean", "cut", "0", "p", 0),
    ("segment_any", "cut", "0", "r", 1),
    ("segment_all", "cut", "0", "r", 1),
    ("segment_amax", "cut", "0", "r", 1),
    ("segment_broadcast", "cut", "0", "r", 1),
    ("segment_broadcast", "cut", "p", "r", 1),
    ("segment_sum", "cut", "p", "p", 0),
    ("segment_mean", "unsorted", "p", "p", 0),
    ("segment_first", "cut", "p", "p", 0),
    ("segment_last", "cut", "p", "p", 0),
    ("segment_cumsum", "cut", "p", "r", 1),
    ("segment_amax", "cut", "p", "r", 1),
)


def check_moves():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = meshes()[(COUNT,)]
    for name, grouping, before, after, collectives in MOVES:
        op, segments = find(name), GROUPINGS[grouping]()
        rows = segments.num_segments if op.takes_values else segments.num_rows
        data = distributed(testing.make_data((rows, 4), torch.float32), mesh, before)
        with CommDebugMode() as counted:
            results = op.fn(data, segments)
        results = results if isinstance(results, tuple) else (results,)
        found = [list(result.placements) for result in results]
        expected = [placed(c) for c in (after if len(after) == len(results) else after * len(results))]
        assert found == expected, f"{name} of {grouping}, {before}: {found}"
        assert counted.get_total_counts() == collectives, f"{name} of {grouping}, {before}: {counted.get_total_counts()}"

    # Sums of 16 bits are rounded once, when all parts have been added.
    data = torch.tensor([2048.0, 1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float16)[:, None]
    result = segment_sum(distributed(data, mesh, "0"), torch.tensor([0, 9]))
    assert list(result.placements) == placed("r") and result.full_tensor().item() == 2056

    # Partial data of few bits is added up before anything else, as it was meant.
    for dtype, part, expected in ((torch.uint8, 200, 2 * 144), (torch.float16, 1024, 4096)):
        data = DTensor.from_local(torch.full((2, 1), part, dtype=dtype), mesh, placed("p"))
        result = segment_sum(data, torch.tensor([0, 2]))
        assert list(result.placements) == placed("r") and result.full_tensor().item() == expected


def test_what_moves(ranks):
    ranks.run(check_moves)


def check_repeated():
    mesh = meshes()[(COUNT,)]
    data = testing.make_data((9, 50), torch.float32, kind="normal")
    segments = GROUPINGS["unsorted, cut"]()
    for op in OPS:
        if not op.takes_values:
            results = [first(op.fn(distributed(data, mesh, "0"), segments)).full_tensor() for _ in range(3)]
            for result in results[1:]:
                torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


def test_the_same_bits(ranks):
    ranks.run(check_repeated)


def check_compiled():
    mesh = meshes()[(COUNT,)]
    segments = GROUPINGS["cut"]()
    data = testing.make_data((9, 4), torch.float32)
    for name, names in (("segment_sum", "0"), ("segment_softmax", "1"), ("segment_max", "r")):
        function = find(name).fn
        compiled = torch.compile(lambda x: first(function(x * 2, segments)), fullgraph=True, backend="aot_eager")
        leaves = [distributed(data, mesh, names).requires_grad_() for _ in range(2)]
        results = compiled(leaves[0]), first(function(leaves[1] * 2, segments))
        torch.testing.assert_close(results[0].full_tensor(), results[1].full_tensor(), rtol=0, atol=0)
        for result in results:
            result.full_tensor().square().sum().backward()
        torch.testing.assert_close(leaves[0].grad.full_tensor(), leaves[1].grad.full_tensor(), rtol=0, atol=0)


def test_compiled(ranks):
    ranks.run(check_compiled)


def check_errors():
    from torch.distributed.tensor import DTensor

    mesh = meshes()[(COUNT,)]
    segments = GROUPINGS["cut"]()
    plain = testing.make_data((9, 4), torch.float32)
    data, weight = distributed(plain, mesh, "0"), distributed(plain[:, 0], mesh, "0")
    offsets = distributed(segments.offsets, mesh, "r")
    uneven = DTensor.from_local(plain[:3] if dist.get_rank() == 0 else plain[3:], mesh, placed("0"), shape=(9, 4), stride=(4, 1))
    quantiles = distributed(torch.tensor([0.5]), mesh, "r")
    same = "be a plain tensor, the same on every rank, but got DTensor; pass its full_tensor()"
    for error, words, call in (
        (TypeError, f"segment_sum: offsets must {same}", lambda: segment_sum(plain, offsets)),
        (TypeError, f"segment_sum: offsets must {same}", lambda: segment_sum(data, offsets)),
        (TypeError, f"Segments.from_offsets: offsets must {same}", lambda: Segments.from_offsets(offsets)),
        (TypeError, f"Segments.from_index: index must {same}", lambda: Segments.from_index(offsets, 10)),
        (
            TypeError,
            "segment_sum: weight must be a plain tensor beside plain data, but got DTensor; pass weight.full_tensor()",
            lambda: segment_sum(plain, segments, weight=weight),
        ),
        (
            TypeError,
            "segment_quantile: q must be a number or a plain tensor, but got DTensor; pass q.full_tensor()",
            lambda: fastops.segment_quantile(data, segments, quantiles),
        ),
        (
            ValueError,
            f"segment_sum: data must have {5 - dist.get_rank()} rows on this rank, as torch.chunk shares them out, "
            f"but got {3 + 3 * dist.get_rank()}; shard it with distribute_tensor",
            lambda: segment_sum(uneven, segments),
        ),
        (
            ValueError,
            "segment_sum: data must have 9 rows along dim 1, as the segments do, but got 4",
            lambda: segment_sum(data, segments, dim=1),
        ),
        (
            TypeError,
            "segment_sum: data must be a plain tensor under torch.func transforms, but got DTensor; "
            "transform a function of what each rank has, data.to_local()",
            lambda: torch.func.grad(lambda x: segment_sum(x, segments).sum())(data),
        ),
        (IndexError, "segment_sum: dim must be in [-2, 1], but got 2", lambda: segment_sum(data, segments, dim=2)),
        (
            ValueError,
            "segment_sum: weight must have the shape of data from dim 0 on, [9], but got [4]",
            lambda: segment_sum(data, segments, weight=weight[:4]),
        ),
        (
            TypeError,
            "segment_amax: fill_value must be a number, but got str",
            lambda: fastops.segment_amax(data, segments, fill_value="0"),
        ),
        (
            fastops.DeviceMismatchError,
            "segment_sum: segments must be on the device of data (cpu), but got meta; move one of them with .to(device)",
            lambda: segment_sum(data, segments.to("meta")),
        ),
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == words
    with pytest.raises(ValueError, match="^segment_sum: weight must lie on the mesh of data, but got DeviceMesh"):
        segment_sum(data, segments, weight=distributed(plain[:, 0], meshes()[(COUNT, 1)], "rr"))


def test_errors(ranks):
    ranks.run(check_errors)


def test_on_cuda(cuda):
    """Everything is on the device of the mesh. One process is a group, too."""
    from torch.distributed.device_mesh import init_device_mesh

    with torch.cuda.device(0):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh(cuda, (1,))
            for grouping in ("cut", "unsorted", "ignored"):
                segments = GROUPINGS[grouping]().to(cuda)
                for op in OPS:
                    rows = segments.num_segments if op.takes_values else segments.num_rows
                    data = testing.make_data((rows, 2), torch.float32, kind=op.data_kind).to(cuda)
                    leaf = distributed(data, mesh, "0").requires_grad_(op.differentiable)
                    results = op.fn(leaf, segments)
                    assert_same_results(results, op.fn(data, segments), 1e-5)
                    if op.differentiable:
                        first(results).full_tensor().sum().backward()
                        assert leaf.grad.to_local().is_cuda
        finally:
            dist.destroy_process_group()


# docs/distributed.md -------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"


def test_the_page():
    assert kinds_of(PAGE) == {"python"}
    try:
        assert run_page(PAGE, "python") > 25
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_nothing_is_imported_for_it():
    code = "import sys, fastops; sys.exit('torch.distributed.tensor' in sys.modules or 'fastops._distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
