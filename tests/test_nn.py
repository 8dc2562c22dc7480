"""The modules: what they compute, and that they are modules as torch's are."""

import copy
import io
import pickle

import pytest
import torch

import fastops
from fastops import Segments, nn, testing
from fastops.nn import SegmentAttentionPool, SegmentNorm, SegmentPool, SegmentSoftmax

MODULES = {
    "softmax": lambda **options: SegmentSoftmax(),
    "pool": lambda **options: SegmentPool(["sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod"], fill_value=0),
    "attention": lambda **options: SegmentAttentionPool(8, heads=2, **options),
    "norm": lambda **options: SegmentNorm(8, **options),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@pytest.fixture
def segments(device):
    return testing.make_segments((3, 0, 4, 1), "unsorted", device=device)


@pytest.fixture
def data(device):
    return testing.make_data((8, 8), torch.float64, kind="normal").to(device)


@every_module
def test_gradients(make, data, segments, device):
    module = make(device=device, dtype=torch.float64)
    leaf = data.clone().requires_grad_()
    torch.autograd.gradcheck(lambda x, *_: module(x, segments), (leaf, *module.parameters()))


@every_module
def test_copies_compute_the_same(make, data, segments, device):
    module = make(device=device, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter))
    expected = module(data, segments)
    assert torch.equal(copy.deepcopy(module)(data, segments), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(data, segments), expected)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = make(device=device, dtype=torch.float64)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(data, segments), expected)


@every_module
def test_offsets_are_segments(make, data, device):
    module = make(device=device, dtype=torch.float64)
    offsets = torch.tensor([0, 3, 3, 8], device=device)
    assert torch.equal(module(data, offsets), module(data, Segments.from_offsets(offsets)))


@every_module
def test_device_and_dtype_are_those_asked_for(make, device):
    module = make(device=device, dtype=torch.float16)
    for parameter in module.parameters():
        assert parameter.device.type == device and parameter.dtype == torch.float16
    segments = Segments.from_offsets(torch.tensor([0, 5], device="meta"))
    on_meta = make(device="meta", dtype=torch.float32)
    assert on_meta(torch.empty(5, 8, device="meta"), segments).is_meta


def test_what_they_print():
    assert repr(SegmentSoftmax(dim=-2)) == "SegmentSoftmax(dim=-2)"
    assert repr(SegmentPool("mean")) == "SegmentPool('mean')"
    assert repr(SegmentPool(("mean", "amax"), fill_value=-1)) == "SegmentPool(['mean', 'amax'], fill_value=-1)"
    assert repr(SegmentNorm(5, affine=False)) == "SegmentNorm(5, eps=1e-05, affine=False)"
    assert repr(SegmentAttentionPool(6, heads=3)).startswith("SegmentAttentionPool(\n  6, heads=3\n")


def test_softmax(data, segments):
    assert torch.equal(SegmentSoftmax()(data, segments), fastops.segment_softmax(data, segments))
    assert torch.equal(SegmentSoftmax(dim=-1)(data.t(), segments), fastops.segment_softmax(data.t(), segments, dim=1))


def test_pool(data, segments):
    assert torch.equal(SegmentPool()(data, segments), fastops.segment_sum(data, segments))
    both = SegmentPool(["amax", "std"], fill_value=-7)(data, segments)
    assert torch.equal(both[:, :8], fastops.segment_amax(data, segments, fill_value=-7))
    assert torch.equal(both[:, 8:], fastops.segment_std(data, segments, fill_value=-7))
    assert both[1].tolist() == [-7] * 16


def test_attention_pool(data, segments, device):
    """Head by head, segment by segment."""
    module = SegmentAttentionPool(8, heads=2, device=device, dtype=torch.float64)
    result = module(data, segments)
    scores, values = module.score(data), module.value(data)
    for number in range(4):
        rows = segments.index == number
        if not rows.any():
            assert not result[number].any()
            continue
        weights = scores[rows].softmax(0)
        expected = [weights[:, head] @ values[rows, 4 * head : 4 * head + 4] for head in range(2)]
        torch.testing.assert_close(result[number], torch.cat(expected))


def test_norm(data, segments, device):
    module = SegmentNorm(8, device=device, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.arange(1, 9))
        module.bias.fill_(3)
    result = module(data, segments)
    for number in (0, 2):
        rows = segments.index == number
        # torch's instance norm takes [1, features, rows]
        expected = torch.nn.functional.instance_norm(data[rows].t()[None], eps=module.eps)[0].t() * module.weight + 3
        torch.testing.assert_close(result[rows], expected)
    module.reset_parameters()
    assert module.weight.tolist() == [1] * 8 and module.bias.tolist() == [0] * 8
    assert SegmentNorm(8, affine=False).state_dict() == {}


def test_norm_of_half_has_statistics_in_float(device):
    data = (testing.make_data((40, 4), torch.float32, kind="normal") * 300).half().to(device)
    offsets = torch.tensor([0, 30, 40], device=device)
    expected = SegmentNorm(4, affine=False)(data.float(), offsets)
    result = SegmentNorm(4, affine=False)(data, offsets)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.float(), expected, rtol=1e-3, atol=1e-3)


def test_errors(data, segments):
    for make, exception, words in (
        (lambda: SegmentPool("median"), ValueError, "SegmentPool: reduce must be among sum, .*, but got median"),
        (lambda: SegmentPool([]), ValueError, "SegmentPool: reduce must have at least 1 entry, but got 0"),
        (lambda: SegmentAttentionPool(6, heads=4), ValueError, r"dim must be a multiple of heads \(4\), but got 6"),
        (lambda: SegmentAttentionPool(0), ValueError, "dim must be at least 1, but got 0"),
        (lambda: SegmentAttentionPool(8, heads=2.0), TypeError, "heads must be an int, but got float"),
        (lambda: SegmentPool(5), TypeError, "SegmentPool: reduce must be a string or a list of strings, but got int"),
        (lambda: SegmentPool(["sum"])(data[:, 0], segments), ValueError, "data must have at least 2 dimensions"),
        (lambda: SegmentAttentionPool(8)(data[None], segments), ValueError, r"data must be \[N, 8\], but got \[1, 8, 8\]"),
        (lambda: SegmentNorm(5)(data, segments), ValueError, r"SegmentNorm: data must be \[N, \*, 5\], but got \[8, 8\]"),
        (lambda: SegmentSoftmax()(data[:5], segments), ValueError, "segment_softmax: data must have 8 rows"),
    ):
        with pytest.raises(exception, match=words):
            make()


def scriptable_modules():
    return [
        nn.SegmentSoftmax(),
        nn.SegmentPool("mean"),
        nn.SegmentPool(list(nn._REDUCTIONS), fill_value=2.0),
        nn.SegmentPool(["prod", "logsumexp"]),
        nn.SegmentAttentionPool(4, heads=2),
        nn.SegmentAttentionPool(4, dtype=torch.bfloat16),
        nn.SegmentNorm(4),
        nn.SegmentNorm(4, affine=False),
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("number", range(len(scriptable_modules())))
def test_script(number, device, tmp_path):
    """A scripted module takes bare offsets, gives the same numbers and gradients, and can be saved; eager ones are left alone."""
    torch.manual_seed(0)
    module = scriptable_modules()[number].to(device)
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    data = testing.make_data((7, 4), dtype, kind="normal").to(device).requires_grad_()
    offsets = torch.tensor([0, 3, 3, 7], device=device)
    model = torch.nn.Sequential(module)
    scripted = torch.jit.script(module)
    torch.jit.save(scripted, str(tmp_path / "module.pt"))
    expected = module(data, offsets)
    (gradient,) = torch.autograd.grad(expected.sum(), data, retain_graph=True)
    for way in (scripted, torch.jit.load(str(tmp_path / "module.pt"))):
        result = way(data, offsets)
        assert torch.equal(result, expected)
        assert torch.equal(torch.autograd.grad(result.sum(), data)[0], gradient)
    assert torch.equal(model[0](data, Segments.from_offsets(offsets)), expected)
