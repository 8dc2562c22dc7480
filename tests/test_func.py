"""torch.func and forward mode: every operation under every transform gives what it gives without, one call at a time."""

import functools
from pathlib import Path

import pytest
import torch
from helpers import first, kinds_of, run_page, same
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from fastops import Segments, registry, segment_amax, segment_mean, segment_quantile, segment_softmax, segment_sum, testing
from fastops import _transforms as transforms

GROUPINGS = ("offsets", "unsorted32", "ignored")
LENGTHS = (2, 0, 3, 1)

every_op = pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
differentiable = pytest.mark.parametrize("op", [op for op in registry.OPS if op.differentiable], ids=lambda op: op.name)
every_grouping = pytest.mark.parametrize("grouping", GROUPINGS)

# Options that take another way than the defaults.
OPTIONS = [
    ("segment_sum", {"dtype": torch.float64, "fill_value": 3}),
    ("segment_mean", {"fill_value": torch.nan}),
    ("segment_max", {"fill_value": -torch.inf}),
    ("segment_std", {"correction": 1.5}),
    ("segment_cumsum", {"exclusive": True, "reverse": True}),
    ("segment_cumprod", {"exclusive": True}),
    ("segment_logcumsumexp", {"reverse": True}),
    ("segment_sort", {"descending": True}),
    ("segment_topk", {"k": 2, "largest": False, "sorted": False}),
    ("segment_quantile", {"q": torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), "interpolation": "midpoint"}),
]
with_options = pytest.mark.parametrize("name, options", OPTIONS, ids=[f"{name}-{'-'.join(x)}" for name, x in OPTIONS])


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def function_of(op, grouping="offsets", device="cpu", **options):
    """The operation as a function of `data [N, 2]`, or `[S, 2]`, and such data, in float64."""
    op = registry.find(op)
    segments = testing.make_segments(LENGTHS, grouping, device=device)
    rows = segments.num_segments if op.takes_values else segments.num_rows
    kind = "factors" if op.data_kind == "factors" else "distinct"
    data = testing.make_data((rows, 2), torch.float64, kind=kind, seed=1).to(device)
    if op.empty.startswith(("-inf", "nan")):
        options = {"fill_value": 0, **options}
    run = op.fn
    if {"k", "q"} & options.keys():
        run = run.func  # without what the registry has bound
    return lambda x, dim=0: run(x, segments, dim=dim, **options), data


def as_tuple(results):
    return tuple(results) if isinstance(results, tuple) else (results,)


def batches(data, size=3):
    """Different data for each call of a batch: the same numbers in other places, so that none of them tie."""
    return torch.stack([data.roll(number, 0) for number in range(size)])


# ---- vmap ----


@every_grouping
@every_op
def test_vmap(op, grouping, device):
    """Over any dimension of data whose rows are in any dimension, into any of the results."""
    f, data = function_of(op, grouping, device)
    batch = batches(torch.stack((data, data * 2)).movedim(0, -1))  # [3, rows, 2, 2]
    for dim in (0, 1, -1):
        samples = batch.movedim(1, dim % 3 + 1)
        expected = [torch.stack(parts) for parts in zip(*(as_tuple(f(sample, dim)) for sample in samples))]
        for in_dim in (0, 2, -1):
            for out_dim in (0, 1, -1):
                run = vmap(functools.partial(f, dim=dim), in_dims=in_dim, out_dims=out_dim)
                for result, wanted in zip(as_tuple(run(samples.movedim(0, in_dim))), expected):
                    close(result, wanted.movedim(0, out_dim))


@every_op
def test_vmap_of_vmap(op, device):
    f, data = function_of(op, "unsorted", device)
    samples = torch.stack((batches(data), batches(-data)))  # [2, 3, rows, 2]
    expected = zip(*[[torch.stack(results) for results in zip(*[as_tuple(f(x)) for x in row])] for row in samples])
    expected = list(map(torch.stack, expected))
    for result, wanted in zip(as_tuple(vmap(vmap(f))(samples)), expected):
        close(result, wanted)
    moved = samples.permute(2, 3, 0, 1)  # [rows, 2, 2, 3]
    for result, wanted in zip(as_tuple(vmap(vmap(f, in_dims=2, out_dims=1), in_dims=2)(moved)), expected):
        close(result.movedim(2, 1), wanted)


@every_op
def test_vmap_of_integers(op, device):
    if torch.int32 not in op.dtypes:
        pytest.skip("takes floating data only")
    f, data = function_of(op, "unsorted", device)
    samples = batches((data * 4).int())
    for result, wanted in zip(as_tuple(vmap(f)(samples)), zip(*(as_tuple(f(sample)) for sample in samples))):
        assert torch.equal(result, torch.stack(wanted))


@with_options
def test_vmap_with_options(name, options, device):
    options = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    f, data = function_of(name, "unsorted", device, **options)
    samples = batches(data)
    for in_dim in (0, 1, 2):
        results = as_tuple(vmap(f, in_dims=in_dim)(samples.movedim(0, in_dim)))
        for result, wanted in zip(results, zip(*(as_tuple(f(sample)) for sample in samples))):
            close(result, torch.stack(wanted))


@differentiable
def test_gradients_of_what_is_outside(op, device):
    """Data that requires a gradient outside of one vmap or two gets that of the calls one by one, and so does a second derivative."""
    f, data = function_of(op, "unsorted", device)
    samples = torch.stack((batches(data), batches(data + 1)))
    for run in (vmap(vmap(lambda x: first(f(x)))), lambda x: torch.stack([vmap(lambda y: first(f(y)))(y) for y in x])):
        found = []
        for way in (run, lambda x: torch.stack([torch.stack([first(f(z)) for z in y]) for y in x])):
            leaf = samples.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(way(leaf).square().sum(), leaf, create_graph=True)
            found += [gradient, torch.autograd.grad(gradient.square().sum(), leaf)[0]]
        close(found[0], found[2])
        close(found[1], found[3])


def test_vmap_by_hand():
    offsets = torch.tensor([0, 2, 3])
    ones = torch.ones(4, 3, requires_grad=True)
    result = vmap(lambda row: segment_sum(row, offsets))(ones)
    same(result, [[2.0, 1.0]] * 4)
    result.sum().backward()
    same(ones.grad, torch.ones(4, 3))
    same(vmap(lambda row: segment_sum(row, offsets), chunk_size=3)(ones), [[2.0, 1.0]] * 4)
    column = vmap(lambda row: segment_amax(row, offsets), in_dims=1, out_dims=1)(torch.tensor([[1.0, 6.0], [5.0, 2.0], [3.0, 4.0]]))
    same(column, [[5.0, 6.0], [3.0, 4.0]])


@every_op
def test_vmap_runs_the_kernels_once(op, monkeypatch):
    """One call of the operator for the whole batch, and none of the reference."""
    for name in transforms.PUBLIC:
        monkeypatch.setattr(f"fastops.reference.{name}", None)
    f, data = function_of(op)
    with torch.profiler.profile() as profile:
        vmap(vmap(f))(torch.stack((batches(data), batches(data))))
    assert [event.name for event in profile.events()].count(f"fastops::{op.name}") >= 1
    assert len({event.name for event in profile.events() if event.name.startswith("fastops::")}) <= 2


# ---- vmap over weights, quantiles and segments ----


def weighted(device, name="segment_sum", heads=True):
    segments = testing.make_segments(LENGTHS, "unsorted", device=device)
    data = testing.make_data((segments.num_rows, 2, 3), torch.float64, kind="normal").to(device)
    weight = testing.make_data((segments.num_rows, 2) if heads else (segments.num_rows,), torch.float64, kind="normal", seed=2).to(device)
    run = registry.find(name).fn
    return lambda x, w, dim=0: run(x, segments, dim=dim, weight=w), data, weight


@pytest.mark.parametrize("heads", (False, True), ids=("rows", "heads"))
@pytest.mark.parametrize("name", ("segment_sum", "segment_mean"))
def test_vmap_over_weights(device, name, heads):
    f, data, weight = weighted(device, name, heads)
    for dim in (0, 1):
        at = functools.partial(f, dim=dim)
        rows = batches(data if dim == 0 else torch.stack((data, -data)))
        weights = batches(weight)
        close(vmap(at, (0, None))(rows, weight), torch.stack([at(x, weight) for x in rows]))
        close(vmap(at, (None, 0))(rows[0], weights), torch.stack([at(rows[0], w) for w in weights]))
        for in_dims in ((0, 0), (-1, -1), (1, 1)):
            result = vmap(at, in_dims)(*(x.movedim(0, to) for x, to in zip((rows, weights), in_dims)))
            close(result, torch.stack([at(x, w) for x, w in zip(rows, weights)]))
        nested = vmap(vmap(at, (None, 0)), (0, None))(rows, weights)
        close(nested, torch.stack([torch.stack([at(x, w) for w in weights]) for x in rows]))


@pytest.mark.parametrize("heads", (False, True), ids=("rows", "heads"))
@pytest.mark.parametrize("name", ("segment_sum", "segment_mean"))
def test_derivatives_by_weights(device, name, heads):
    f, data, weight = weighted(device, name, heads)
    rows, weights = batches(data), batches(weight)

    def loss(x, w):
        return f(x, w).square().sum()

    def expected(x, w):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(loss(*leaves), leaves)

    for one, other in zip(grad(loss, (0, 1))(data, weight), expected(data, weight)):
        close(one, other)
    ways = ((0, 0), zip(rows, weights)), ((0, None), ((x, weight) for x in rows)), ((None, 0), ((data, w) for w in weights))
    for in_dims, calls in ways:
        found = vmap(grad(loss, (0, 1)), in_dims)(rows if in_dims[0] == 0 else data, weights if in_dims[1] == 0 else weight)
        for one, other in zip(found, zip(*(expected(x, w) for x, w in calls))):
            close(one, torch.stack(other))
    leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    shared = torch.autograd.grad(vmap(f, (0, None))(*leaves).square().sum(), leaves)
    close(shared[1], sum(expected(x, weight)[1] for x in rows))
    matrices = torch.autograd.functional.jacobian(f, (data, weight))
    for transform in (jacrev, jacfwd):
        for one, other in zip(transform(f, (0, 1))(data, weight), matrices):
            close(one, other)
    wanted = torch.autograd.functional.hessian(loss, (data, weight))
    for one, other in zip(hessian(loss, (0, 1))(data, weight), wanted):
        for a, b in zip(one, other):
            close(a, b)


def test_vmap_over_quantiles(device):
    segments = testing.make_segments((3, 0, 4), "unsorted", device=device)
    data = testing.make_data((7, 2), torch.float64, kind="distinct").to(device)
    q = torch.tensor([[0.0, 0.5], [0.3, 1.0], [0.25, 0.75]], dtype=torch.float64, device=device)
    samples = batches(data)

    def f(x, q):
        return segment_quantile(x, segments, q, fill_value=0)

    close(vmap(f, (None, 0))(data, q), torch.stack([f(data, row) for row in q]))
    close(vmap(f)(samples, q[:, 0]), torch.stack([f(x, one) for x, one in zip(samples, q[:, 0])]))
    close(vmap(f, (0, None))(samples, q[0]), torch.stack([f(x, q[0]) for x in samples]))
    gradients = [grad(lambda x, q: f(x, q).sum())(x, one) for x, one in zip(samples, q)]
    close(vmap(grad(lambda x, q: f(x, q).sum()))(samples, q), torch.stack(gradients))
    same(grad(lambda q: f(data, q).sum())(q[0]), [0.0, 0.0])


def test_a_batch_of_segments_is_refused():
    rows, offsets = torch.ones(2, 3), torch.tensor([[0, 2, 3], [0, 1, 3]])
    words = "offsets must be the same for all calls of a vmap, but got one for each; join the groupings into one, Segments.from_lengths"
    with pytest.raises(ValueError, match=f"segment_sum: {words}"):
        vmap(segment_sum)(rows, offsets)
    with pytest.raises(ValueError, match=f"segment_sum: {words}"):
        grad(lambda x: vmap(segment_sum)(x, offsets).sum())(rows)
    with pytest.raises(ValueError, match=f"segment_sum: {words}"):
        vmap(lambda x, ends: torch.ops.fastops.segment_sum(x, ends, None, None))(rows, offsets)
    with pytest.raises(ValueError, match=f"Segments.from_offsets: {words}"):
        vmap(lambda x, ends: segment_sum(x, Segments.from_offsets(ends)))(rows, offsets)
    with pytest.raises(ValueError, match=words.replace("offsets", "index", 1)):
        vmap(lambda x, index: segment_sum(x, Segments.from_index(index, 2)))(rows, torch.zeros(2, 3, dtype=torch.int64))
    segments = Segments.from_offsets(offsets[0])
    with pytest.raises(ValueError, match=words.replace("offsets", "segment_sum: segments", 1)):
        vmap(segment_sum)(torch.ones(3, 3), segments)
    same(vmap(segment_sum, (0, None))(rows, segments), [[2.0, 1.0]] * 2)
    joined = Segments.from_lengths(offsets.diff().flatten())  # what the message says
    same(segment_sum(rows.flatten(), joined).reshape(2, 2), [[2.0, 1.0], [1.0, 2.0]])


# ---- derivatives ----


@every_grouping
@differentiable
def test_derivatives(op, grouping, device):
    f, data = function_of(op, grouping, device)
    check_derivatives(lambda x: first(f(x)), data)


@with_options
def test_derivatives_with_options(name, options, device):
    options = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    f, data = function_of(name, "unsorted", device, **options)
    check_derivatives(lambda x: first(f(x)), data)


def check_derivatives(f, data):
    def loss(x):
        return f(x).square().sum()

    tangent = testing.make_data(tuple(data.shape), data.dtype, kind="normal", seed=5).to(data.device)
    matrix = torch.autograd.functional.jacobian(f, data)
    curvature = torch.autograd.functional.hessian(loss, data)
    upstream = torch.ones_like(f(data)).cumsum(0)
    change = (matrix * tangent).sum((-2, -1))

    gradient, value = torch.func.grad_and_value(loss)(data)
    close(value, loss(data))
    close(gradient, torch.autograd.functional.jacobian(loss, data))
    result, back = vjp(f, data)
    close(result, f(data))
    close(back(upstream)[0], torch.tensordot(upstream, matrix, upstream.dim()))
    close(jacrev(f)(data), matrix)
    close(jacrev(f, chunk_size=2)(data), matrix)
    close(jacfwd(f)(data), matrix)
    result, forth = jvp(f, (data,), (tangent,))
    close(result, f(data))
    close(forth, change)
    close(linearize(f, data)[1](tangent), change)
    close(hessian(loss)(data), curvature)
    close(jacrev(jacrev(loss))(data), curvature)
    close(jacrev(jacfwd(loss))(data), curvature)
    samples = batches(data)
    close(vmap(grad(loss))(samples), torch.stack([grad(loss)(sample) for sample in samples]))
    close(vmap(grad(loss), in_dims=2, out_dims=1)(samples.movedim(0, 2)), vmap(grad(loss))(samples).movedim(0, 1))
    close(grad(lambda x: vmap(loss)(x).sum())(samples), vmap(grad(loss))(samples))
    close(vmap(vmap(jacrev(f)))(samples[None])[0], torch.stack([jacrev(f)(sample) for sample in samples]))


@differentiable
def test_third_derivatives(op, device):
    """What forward mode has to take for a second one: of a product's and a variance's too."""
    for grouping in GROUPINGS:
        f, data = function_of(op, grouping, device)
        segments = testing.make_segments(LENGTHS, grouping, device=device)
        options = {"fill_value": 0} if op.empty.startswith(("-inf", "nan")) else {}
        weights = testing.make_data(tuple(data.shape), data.dtype, kind="normal", seed=3).to(device)
        found = []
        for function in (f, lambda x: op.reference(x, segments, **options)):
            leaf = data.where(data != 0, 2).requires_grad_()
            result = first(function(leaf)).pow(3).sum()
            for _ in range(3):
                (gradient,) = torch.autograd.grad(result, leaf, create_graph=True, allow_unused=True, materialize_grads=True)
                result = (gradient * weights).sum()
            found.append(gradient)
        close(*found)


def directional(f, data, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(data, tangent))).tangent


@differentiable
def test_forward_mode(op, device):
    f, data = function_of(op, "ignored", device)
    tangent = testing.make_data(tuple(data.shape), data.dtype, kind="normal", seed=5).to(device)

    def value(x):
        return first(f(x))

    def loss(x):
        return value(x).square().sum()

    change = (torch.autograd.functional.jacobian(value, data) * tangent).sum((-2, -1))
    close(directional(value, data, tangent), change)
    close(jvp(lambda x: x * 2, (directional(value, data, tangent),), (change,))[1], change * 2)
    curvature = torch.autograd.functional.hessian(loss, data)

    def slope(x):  # a gradient that is taken in forward mode
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(loss(x), x, create_graph=True)[0]

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(data.clone().requires_grad_(), tangent)
        along = forward_ad.unpack_dual(torch.autograd.grad(loss(dual), dual, create_graph=True)[0]).tangent
        close(value(data), first(f(data)))  # what has no tangent has none after
    close(torch.zeros_like(data) if along is None else along.detach(), (curvature * tangent).sum((-2, -1)))
    close(jvp(lambda x: jvp(loss, (x,), (tangent,))[1], (data,), (tangent,))[1], (curvature * tangent * tangent[..., None, None]).sum())
    with forward_ad.dual_level():  # a transform inside of a level
        dual = forward_ad.make_dual(data, tangent)
        close(forward_ad.unpack_dual(grad(loss)(dual)).tangent, (curvature * tangent).sum((-2, -1)))
    for strategy in ("forward-mode", "reverse-mode"):
        outer = torch.autograd.functional.hessian(loss, data, vectorize=True, outer_jacobian_strategy=strategy)
        close(outer, curvature)


@differentiable
def test_gradcheck_in_forward_mode(op, device):
    for grouping in GROUPINGS:
        f, data = function_of(op, grouping, device)
        leaf = data.requires_grad_()
        modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(lambda x: first(f(x)), (leaf,), **modes)
        assert torch.autograd.gradgradcheck(lambda x: first(f(x)), (leaf,), check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("name", ("segment_softmax", "segment_log_softmax", "segment_logsumexp", "segment_logcumsumexp"))
def test_segments_of_minus_infinity(name, device):
    """Their derivatives are 0, never NaN."""
    f, data = function_of(name, "offsets", device)
    data[:2] = -torch.inf

    def value(x):
        return first(f(x))

    finite = lambda x: torch.where(value(x).isfinite(), value(x), 0).square().sum()  # noqa: E731
    gradient = grad(finite)(data)
    assert gradient.isfinite().all() and not gradient[:2].any() and (name == "segment_log_softmax" or gradient[2:].any())
    leaf = data.clone().requires_grad_()
    close(gradient, torch.autograd.grad(finite(leaf), leaf)[0])
    result, change = jvp(value, (data,), (torch.ones_like(data),))
    assert change.isfinite().all()
    close(jacfwd(value)(data), jacrev(value)(data))
    assert not jacrev(value)(data)[..., :2, :].any()
    close(hessian(finite)(data), torch.autograd.functional.hessian(finite, data))
    close(vmap(grad(finite))(torch.stack((data, data))), torch.stack((gradient, gradient)))


def test_derivatives_by_hand():
    data, offsets = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]), torch.tensor([0, 3, 3, 7])
    same(grad(lambda x: segment_sum(x, offsets).square().sum())(data), [16.0] * 3 + [34.0] * 4)
    same(jacrev(lambda x: segment_amax(x, offsets))(data), [[0, 0, 1, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 0, 0, 1, 0]])
    same(jvp(lambda x: segment_sum(x, offsets), (data,), (data,))[1], [8.0, 0.0, 17.0])
    same(hessian(lambda x: segment_sum(x, offsets).square().sum())(data)[0], [2.0] * 3 + [0.0] * 4)
    same(vmap(grad(lambda x: segment_sum(x, torch.tensor([0, 2, 3])).sum()))(torch.ones(4, 3)), torch.ones(4, 3))


def test_gradients_of_each_sample():
    """Of the parameters of a module for every graph of a batch, with functional_call."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2, dtype=torch.float64)
            self.register_buffer("offsets", torch.tensor([0, 2, 2, 5]))

        def forward(self, x):
            rows = self.linear(x)
            return segment_mean(rows * segment_softmax(rows, self.offsets), self.offsets)

    model = Model()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    samples = testing.make_data((4, 5, 3), torch.float64, kind="normal")

    def loss(parameters, buffers, x):
        return functional_call(model, (parameters, buffers), (x,)).square().sum()

    found = vmap(grad(loss), (None, None, 0))({name: p.detach() for name, p in parameters.items()}, buffers, samples)
    for number, sample in enumerate(samples):
        model.zero_grad()
        model(sample).square().sum().backward()
        for name, parameter in parameters.items():
            close(found[name][number], parameter.grad)


@differentiable
def test_half_precision(op):
    """The same dtypes come back, as from autograd."""
    f, data = function_of(op)
    data = data.half()
    assert grad(lambda x: first(f(x)).sum())(data).dtype == torch.float16
    assert jvp(lambda x: first(f(x)), (data,), (data,))[1].dtype == first(f(data)).dtype
    assert vmap(grad(lambda x: first(f(x)).sum()))(batches(data)).dtype == torch.float16


def test_a_change_in_place_is_found_out():
    offsets, data = torch.tensor([0, 2, 3]), torch.ones(3, requires_grad=True)
    with forward_ad.dual_level():
        result = segment_softmax(forward_ad.make_dual(data, torch.ones(3)), offsets)
        offsets.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_errors_are_those_without_transforms():
    segments = Segments.from_offsets(torch.tensor([0, 2, 3]))
    for transform in (grad, vmap, jacfwd):
        data = torch.ones(2, 4) if transform is vmap else torch.ones(4)
        with pytest.raises(ValueError, match="segment_sum: data must have 3 rows along dim 0, as the segments do, but got 4"):
            transform(lambda x: segment_sum(x, segments).sum())(data)
        with pytest.raises(IndexError, match=r"segment_sum: dim must be in \[-1, 0\], but got 1"):
            transform(lambda x: segment_sum(x, segments, dim=1).sum())(data)
        with pytest.raises(ValueError, match="segment_sum: fill_value must fit in float32, but got 1e"):
            transform(lambda x: segment_sum(x[:3], segments, fill_value=1e60).sum())(data)
        with pytest.raises(TypeError, match="segment_softmax: data must be one of float16, bfloat16, float32, float64, but got int64"):
            transform(lambda x: segment_softmax(x[:3].long(), segments).sum())(data)


def test_every_operator_has_a_rule():
    there = torch._C._dispatch_get_registrations_for_dispatch_key
    names = {name for name in there("Meta") if name.startswith(("fastops::segment_", "fastops::_segment_"))}
    assert names == {name for name in there("FuncTorchBatched") if name.startswith("fastops::")}
    assert {op.name for op in registry.OPS} == set(transforms.PUBLIC)


def test_compiled():
    """vmap becomes part of the graph; where derivatives are taken, the graph has a break there."""
    segments = testing.make_segments((2, 0, 3), "unsorted")
    data = testing.make_data((4, 5), torch.float64, kind="normal")

    def soft(x):
        return segment_softmax(x, segments)

    torch._dynamo.reset()
    leaf, other = data.clone().requires_grad_(), data.clone().requires_grad_()
    compiled = torch.compile(lambda x: vmap(soft)(x), fullgraph=True, backend="aot_eager")
    compiled(leaf).square().sum().backward()
    vmap(soft)(other).square().sum().backward()
    close(leaf.grad, other.grad)
    for f in (vmap(grad(lambda x: soft(x).square().sum())), lambda x: jvp(soft, (x[0],), (x[1],))[1]):
        torch._dynamo.reset()
        close(torch.compile(lambda x: f(x), backend="aot_eager")(data), f(data))
    torch._dynamo.reset()


def test_page():
    page = Path(__file__).parents[1] / "docs" / "transforms.md"
    assert kinds_of(page) == {"python"}
    assert run_page(page, "python") > 12


def test_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    segments = testing.make_segments((2, 0, 3), "unsorted")
    data = testing.make_data((5,), torch.float64, kind="normal")
    f = grad(lambda x: segment_softmax(x, segments).square().sum())
    graph = make_fx(f)(data)
    assert any("fastops." in str(node.target) for node in graph.graph.nodes)
    close(graph(data * 2), f(data * 2))


@pytest.mark.parametrize("made_inside", (False, True))
def test_inference_mode(device, made_inside):
    segments = testing.make_segments((3, 0, 4), device=device)
    data = testing.make_data((7,), torch.float64).to(device)
    energy = lambda x: segment_softmax(x, segments).square().sum() + segment_sum(x, segments).pow(3).sum()  # noqa: E731
    expected = grad(energy)(data), hessian(energy)(data), jvp(energy, (data,), (data,))[1]
    with torch.inference_mode():
        x = data.clone() if made_inside else data
        found = grad(energy)(x), hessian(energy)(x), jvp(energy, (x,), (x,))[1]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad


@pytest.mark.parametrize("op", [op for op in registry.OPS if not op.differentiable], ids=lambda op: op.name)
def test_results_without_a_derivative(op, device):
    """Row numbers, counts and truths change by nothing, as torch's own do."""
    segments = testing.make_segments((3, 0, 4), device=device)
    data = testing.make_data((7,), torch.float64).to(device)
    result, change = jvp(lambda x: op.fn(x, segments), (data,), (data,))
    assert torch.equal(result, op.fn(data, segments)) and not change.any()
    with forward_ad.dual_level():
        dual = op.fn(forward_ad.make_dual(data, data), segments)
        assert forward_ad.unpack_dual(dual).tangent is None
    weigh = lambda x: (op.fn(x, segments).double().sum() * x.square()).sum()  # noqa: E731
    torch.testing.assert_close(hessian(weigh)(data), 2 * op.fn(data, segments).sum() * torch.eye(7, dtype=data.dtype, device=device))


@pytest.mark.parametrize("context", (torch.inference_mode, torch.no_grad), ids=lambda context: context.__name__)
def test_what_segments_keep_outlives_where_it_was_asked_for(context, device):
    segments = testing.make_segments((3, 0, 4), device=device)
    with context():
        assert segments.index.numel() == 7 and segments.lengths.numel() == 3
    data = torch.ones(3, 2, device=device, requires_grad=True)
    (data * segments.lengths[:, None]).index_select(0, segments.index).sum().backward()  # both are saved
    assert data.grad[:, 0].tolist() == [9, 0, 16]


@pytest.mark.parametrize("transform", (grad, torch.func.functionalize), ids=("grad", "functionalize"))
def test_what_segments_keep_is_of_no_transform(transform, device):
    segments = testing.make_segments((3, 0, 4), device=device)
    transform(lambda x: (x.sum() * segments.index.sum() * segments.lengths.sum()))(torch.ones(2, device=device))
    assert segments.index.data_ptr() != 0 and segments.index.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert segments.lengths.data_ptr() != 0 and segments.lengths.tolist() == [3, 0, 4]


@pytest.mark.parametrize("op", [op for op in registry.OPS if op.differentiable], ids=lambda op: op.name)
def test_batches_of_gradients(op, device):
    """vmap over the vector of a vector-Jacobian product."""
    segments = testing.make_segments((3, 0, 4), device=device)
    shape = (3,) if op.takes_values else (7,)
    data = testing.make_data(shape, torch.float64, kind=op.data_kind).to(device).requires_grad_()
    result = first(op.fn(data, segments))
    vectors = testing.make_data((4, *result.shape), torch.float64).to(device)
    back = lambda v: torch.autograd.grad(result, data, v, retain_graph=True)[0]  # noqa: E731
    torch.testing.assert_close(vmap(back)(vectors), torch.stack([back(v) for v in vectors]), equal_nan=True)
