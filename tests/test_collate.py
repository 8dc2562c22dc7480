"""`collate` and `Batch`: items of a data set become rows and segments, in this process and in a DataLoader's."""

import collections
import copy
import dataclasses
import functools
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from fastops import Batch, Segments, collate, segment_sum

LENGTHS = (3, 0, 4)
CANONICAL = torch.tensor([3.0, 1, 4, 1, 5, 9, 2])
PARTS = CANONICAL.split(LENGTHS)

Point = collections.namedtuple("Point", ["data", "label"])


@dataclasses.dataclass
class Item:
    data: Any
    label: Any


def assert_canonical(batch, names=("data", "label", "segments")):
    assert type(batch) is Batch and batch.keys() == names
    data, *_, segments = batch
    assert torch.equal(data, CANONICAL) and data.is_contiguous()
    assert segments.offsets.tolist() == [0, 3, 3, 7] and segments.order is None and segments._num_rows == 7
    assert segment_sum(data, segments).tolist() == [8, 0, 17]


# ---- what items may be ----


def test_tensors():
    assert_canonical(collate(PARTS), ("data", "segments"))


def test_arrays():
    arrays = [part.numpy() for part in PARTS]
    arrays[2].setflags(write=False)
    assert_canonical(collate(arrays), ("data", "segments"))
    assert_canonical(collate([arrays[0], *PARTS[1:]]), ("data", "segments"))


@pytest.mark.parametrize(
    "make, names",
    (
        (lambda data, label: {"data": data, "label": label}, ("data", "label")),
        (lambda data, label: collections.UserDict(data=data, label=label), ("data", "label")),
        (Point, ("data", "label")),
        (Item, ("data", "label")),
        (lambda data, label: (data, label), (0, 1)),
        (lambda data, label: [data, label], (0, 1)),
    ),
    ids=("dict", "mapping", "named_tuple", "dataclass", "tuple", "list"),
)
def test_containers(make, names):
    batch = collate([make(part, number) for number, part in enumerate(PARTS)])
    assert_canonical(batch, (*names, "segments"))
    data, label, segments = batch
    assert batch[0] is batch[names[0]] is data and batch[-1] is batch.segments is segments and len(batch) == 3
    assert label.tolist() == [0, 1, 2]


def test_the_order_of_a_mapping_is_that_of_item_0():
    batch = collate([{"data": PARTS[0], "label": 1}, {"label": 2, "data": PARTS[2]}])
    assert batch.keys() == ("data", "label", "segments") and batch.label.tolist() == [1, 2]


def test_what_is_stacked():
    """As default_collate does it."""
    parts = {"number": 1, "float": 0.5, "truth": True, "text": "a", "scalar": torch.tensor(2.0), "array": np.float32(3), "shape": np.array(4)}
    items = [{"data": part, **parts} for part in PARTS]
    batch = collate(items)
    expected = torch.utils.data.default_collate([parts] * 3)
    for name, part in expected.items():
        assert type(batch[name]) is type(part)
        if name == "text":
            assert batch.text == part == ["a"] * 3
        else:
            assert batch[name].dtype == part.dtype and torch.equal(batch[name], part)


@pytest.mark.parametrize("stack", ("image", ["image"], {"image"}))
def test_stack(stack):
    """What has dimensions but is no rows; sizes that happen to agree change nothing."""
    items = [{"data": torch.ones(2, 5), "image": torch.full((2, 4), number)} for number in range(3)]
    batch = collate(items, stack=stack)
    assert batch.image.shape == (3, 2, 4) and batch.data.shape == (6, 5) and batch.segments.num_segments == 3
    assert collate(items).image.shape == (6, 4)


def test_stack_by_number():
    batch = collate([(torch.ones(2), torch.zeros(4)), (torch.ones(3), torch.zeros(4))], stack=1)
    assert batch[0].shape == (5,) and batch[1].shape == (2, 4)


def graph(nodes, sources, targets, label):
    edges = {"source": torch.tensor(sources, dtype=torch.int64), "target": torch.tensor(targets, dtype=torch.int32)}
    return {"nodes": {"x": torch.arange(2.0 * nodes).reshape(nodes, 2), "kind": "atom"}, "edges": edges, "label": label}


GRAPHS = [graph(3, [0, 2, 1], [1, 0, -1], 5), graph(0, [], [], 6), graph(1, [0], [0], 7), graph(2, [1, 0], [0, -1], 8)]
SHIFT = {"edges.source": "nodes.x", "edges.target": "nodes.x"}


def test_groups():
    batch = collate(GRAPHS)
    assert batch.keys() == ("nodes", "edges", "label") and batch.nodes.keys() == ("x", "kind", "segments")
    assert torch.equal(batch.nodes.x, torch.cat([item["nodes"]["x"] for item in GRAPHS]))
    assert batch.nodes.segments.lengths.tolist() == [3, 0, 1, 2] and batch.edges.segments.lengths.tolist() == [3, 0, 1, 2]
    assert batch.nodes.kind == ["atom"] * 4 and batch.label.tolist() == [5, 6, 7, 8]
    assert batch.edges.source.tolist() == [0, 2, 1, 0, 1, 0]


def test_shift():
    batch = collate(GRAPHS, shift=SHIFT)
    assert batch.edges.source.tolist() == [0, 2, 1, 3, 5, 4] and batch.edges.source.dtype == torch.int64
    assert batch.edges.target.tolist() == [1, 0, -1, 3, 4, -1] and batch.edges.target.dtype == torch.int32
    assert GRAPHS[3]["edges"]["source"].tolist() == [1, 0], "the items are left as they were"
    pairs = [(torch.ones(n), torch.zeros(n - 1, 2, dtype=torch.int64)) for n in (3, 2)]
    batch = collate([{"a": (x,), "b": (numbers,)} for x, numbers in pairs], shift={"b.0": "a.0"})
    assert batch.b[0].tolist() == [[0, 0], [0, 0], [3, 3]]


def test_rows_within_a_group_share_segments():
    batch = collate([(part, part.long()) for part in PARTS])
    assert batch.keys() == (0, 1, "segments") and torch.equal(batch[1], CANONICAL.long())


def test_gradients():
    leaves = [part.clone().requires_grad_() for part in PARTS]
    batch = collate(leaves)
    segment_sum(batch.data, batch.segments).pow(2).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[16] * 3, [], [34] * 4]


def test_no_rows_at_all():
    batch = collate([torch.empty(0, 3), torch.empty(0, 3)])
    assert batch.data.shape == (0, 3) and segment_sum(*batch).tolist() == [[0] * 3] * 2


def test_device_of_the_rows():
    batch = collate([part.to("meta") for part in PARTS])
    assert batch.data.is_meta and batch.segments.device.type == "meta" and batch.segments.num_rows == 7


# ---- errors ----


@pytest.mark.parametrize(
    "items, options, exception, words",
    (
        ([], {}, ValueError, "items must have at least 1 entry, but got 0"),
        (CANONICAL, {}, TypeError, "items must be a list of items, but got torch.Tensor"),
        ("ab", {}, TypeError, "items must be a list of items, but got str"),
        ([1, 2], {}, ValueError, r"items must have a part with rows, \[L, \*\], that is not stacked, but got only data; use torch.utils.data.default_collate"),
        ([(PARTS[0],)], {"stack": 0}, ValueError, r"items must have a part with rows, .*, but got only 0; use"),
        ([(PARTS[0], PARTS[0]), (PARTS[0], PARTS[2])], {}, ValueError, "1 of item 1 must have 3 rows, as 0 has, but got 4; put it into a container of its own, or stack it"),
        ([{"g": {"a": PARTS[0], "b": PARTS[2]}}], {}, ValueError, "g.b of item 0 must have 3 rows, as g.a has, but got 4"),
        ([PARTS[0], PARTS[2].double()], {}, TypeError, "data of item 1 must be float32, as in item 0, but got float64"),
        ([torch.ones(2, 5), torch.ones(2, 4)], {}, ValueError, r"data of item 1 must be \[\*, 5\], as in item 0, but got \[2, 4\]"),
        ([torch.ones(2, 5), torch.ones(0)], {}, ValueError, r"data of item 1 must be \[\*, 5\], as in item 0, but got \[0\]"),
        ([(PARTS[0],), (3,)], {}, TypeError, "0 of item 1 must be rows, as in item 0, but got int"),
        ([(PARTS[0],), (torch.tensor(3.0),)], {}, ValueError, "0 of item 1 must have at least 1 dimension, as in item 0, but got 0"),
        ([(torch.ones(2).to_sparse(),)], {}, TypeError, "0 of item 0 must be a dense tensor, but got one that is sparse_coo"),
        ([(torch.nested.nested_tensor([PARTS[0]], layout=torch.jagged),)], {}, TypeError, "0 of item 0 must be a dense tensor, but got one that is nested"),
        ([(np.array(["a"]),)], {}, TypeError, "0 of item 0 must be an array that torch can read, but got one of <U1"),
        ([{"a": PARTS[0]}, {"b": PARTS[0]}], {}, ValueError, "item 1 must have the parts a, as in item 0, but got b"),
        ([{"g": (PARTS[0],)}, {"g": PARTS[0]}], {}, ValueError, "g of item 1 must have the parts 0, as in item 0, but got torch.Tensor"),
        ([(PARTS[0], None)], {}, TypeError, "1 must be rows, or what torch.utils.data.default_collate stacks, but got NoneType: default_collate: batch must"),
        ([(PARTS[0], 1), (PARTS[0], None)], {}, RuntimeError, "1 must be rows, or what torch.utils.data.default_collate stacks, but got int, NoneType: "),
        ([(PARTS[0], Segments.from_lengths(torch.tensor([3])))], {}, TypeError, "1 must be rows, .*, but got fastops.Segments"),
        ([PARTS[0], PARTS[2]], {"stack": "data"}, RuntimeError, r"data must be rows, .*, but got torch.Tensor: stack expects .* but got \[3\] at entry 0 and \[4\] at entry 1"),
        ([{"data": PARTS[0], "segments": 1}], {}, ValueError, "segments must be the name of what is added, but got a part of the items; call it something else"),
        ([{"data": PARTS[0]}], {"stack": ("data", "label")}, ValueError, "stack must be among the parts data, but got label"),
        (GRAPHS, {"shift": {"edges.label": "nodes.x"}}, ValueError, "shift must name parts with rows, nodes.x, edges.source, edges.target, but got edges.label"),
        (GRAPHS, {"shift": {"edges.source": "nodes"}}, ValueError, "shift must name parts with rows, .*, but got nodes"),
        (GRAPHS, {"shift": {"nodes.x": "nodes.x"}}, TypeError, "nodes.x must be int32 or int64 to be shifted, but got float32"),
        ([*GRAPHS, graph(2, [0, 2], [0, 0], 9)], {"shift": SHIFT}, ValueError, "edges.source of item 4 must be below 2, the number of rows of nodes.x, but got 2"),
    ),
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_errors(items, options, exception, words):
    with pytest.raises(exception, match=f"^collate: {words}"):
        collate(items, **options)


def test_a_part_that_is_not_there():
    batch = collate(PARTS)
    for find, exception in ((lambda: batch.label, AttributeError), (lambda: batch["label"], KeyError), (lambda: batch[2], IndexError)):
        with pytest.raises(exception, match="Batch: part must be one of data, segments, but got ('label'|2)"):
            find()
    assert "data" in batch and "label" not in batch and not hasattr(batch, "_label")


# ---- the batch ----


@pytest.fixture
def batch():
    return collate(GRAPHS, shift=SHIFT)


def assert_same_batch(one, other):
    assert type(one) is type(other) is Batch and one.keys() == other.keys()
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    assert spec == other_spec
    for a, b in zip(leaves, others):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_it_prints(batch):
    assert repr(batch.nodes) == (
        "Batch(x=float32[6, 2], kind=['atom', 'atom', 'atom', 'atom'], segments=Segments(num_segments=4, num_rows=6))"
    )


def test_it_is_immutable(batch):
    with pytest.raises(AttributeError):
        batch.label = 3
    with pytest.raises(TypeError):
        batch["label"] = 3
    assert batch.label.tolist() == [5, 6, 7, 8]


def test_names_for_others(batch):
    assert dict(batch.edges).keys() == {"source", "target", "segments"}
    assert (lambda source, target, segments: segments)(**batch.edges) is batch.edges.segments


def test_copies(batch):
    assert copy.copy(batch) is batch
    deep = copy.deepcopy(batch)
    assert_same_batch(deep, batch)
    assert deep.nodes.x.data_ptr() != batch.nodes.x.data_ptr()
    assert_same_batch(pickle.loads(pickle.dumps(batch)), batch)
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    assert_same_batch(torch.load(file), batch)  # with weights_only, the default


def test_pytree(batch):
    leaves, spec = pytree.tree_flatten(batch)
    assert_same_batch(pytree.tree_unflatten(leaves, spec), batch)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert keys[0] == "['nodes']['x']" and "['edges']['segments'].offsets" in keys


def test_compile(batch):
    def total(batch):
        return segment_sum(batch.nodes.x, batch.nodes.segments) * batch["label"][:, None]

    compiled = torch.compile(total, fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch), total(batch))


def test_to(batch):
    there = batch.to("meta")
    assert all(leaf.is_meta for leaf in pytree.tree_leaves(there) if isinstance(leaf, torch.Tensor))
    assert there.nodes.segments.device.type == "meta" and there.nodes.kind == batch.nodes.kind
    assert there.edges.keys() == batch.edges.keys() and not batch.nodes.x.is_meta
    assert batch.to("cpu").nodes.x is batch.nodes.x


def test_to_cuda(cuda, batch):
    there = batch.pin_memory().to(cuda, non_blocking=True)
    assert there.nodes.x.is_cuda and there.edges.segments.device.type == "cuda" and there.edges.segments._num_rows == 6
    result = segment_sum(there.nodes.x, there.nodes.segments)
    assert torch.equal(result.cpu(), segment_sum(batch.nodes.x, batch.nodes.segments))
    assert_same_batch(there.to("cpu"), batch)


def test_rows_on_cuda(cuda):
    batch = collate([part.to(cuda) for part in PARTS])
    assert batch.data.is_cuda and segment_sum(*batch).tolist() == [8, 0, 17]
    there = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(cuda), GRAPHS)
    assert_same_batch(collate(there, shift=SHIFT).to("cpu"), collate(GRAPHS, shift=SHIFT))


# ---- in a DataLoader ----


def collate_where_it_is_shared(items):
    batch = collate(items, shift=SHIFT)
    assert all(rows.is_shared() for rows in (batch.nodes.x, batch.edges.source, batch.edges.target))
    return batch


@pytest.mark.parametrize("context", ("fork", "spawn"))
def test_workers(context):
    """The rows of a batch are concatenated where the main process reads them."""
    loader = DataLoader(GRAPHS * 2, 3, num_workers=1, multiprocessing_context=context, collate_fn=collate_where_it_is_shared, timeout=60)
    batches = list(loader)
    assert len(batches) == 3
    for number, batch in enumerate(batches):
        assert_same_batch(batch, collate((GRAPHS * 2)[3 * number : 3 * number + 3], shift=SHIFT))
        assert batch.nodes.x.is_shared()


def test_empty_rows_in_a_worker():
    items = [torch.empty(0, 3), torch.empty(0, 3)]
    (batch,) = DataLoader(items, 2, num_workers=1, multiprocessing_context="fork", collate_fn=collate, timeout=60)
    assert batch.data.shape == (0, 3) and batch.segments.num_rows == 0


def test_errors_in_a_worker_say_what_is_wrong():
    loader = DataLoader([torch.ones(2), torch.ones(2).double()], 2, num_workers=1, multiprocessing_context="fork", collate_fn=collate)
    with pytest.raises(TypeError, match="collate: data of item 1 must be float32, as in item 0, but got float64"):
        list(loader)


def test_options_are_bound():
    function = functools.partial(collate, stack="image")
    assert pickle.loads(pickle.dumps(function)).keywords == {"stack": "image"}
    items = [{"data": part, "image": torch.ones(2, 2)} for part in PARTS]
    (batch,) = DataLoader(items, 3, collate_fn=function)
    assert batch.image.shape == (3, 2, 2)
    assert_canonical(batch, ("data", "image", "segments"))


@pytest.mark.parametrize("workers", (0, 1))
def test_pinned(cuda, workers):
    for batch in DataLoader(GRAPHS, 2, num_workers=workers, collate_fn=collate, pin_memory=True):
        assert batch.nodes.x.is_pinned() and batch.nodes.segments.offsets.is_pinned() and batch.label.is_pinned()
        assert_same_batch(batch.to(cuda, non_blocking=True).to("cpu"), batch.to("cpu"))


def test_names_that_paths_do_not_tell_apart():
    item = {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"collate: items must have parts with different names that hold no point, but got 'a\.b', 'a'"):
        collate([item, item])
    with pytest.raises(ValueError, match="collate: items must have parts with different names that hold no point, but got 1, '1'"):
        collate([{1: torch.ones(1), "1": torch.ones(1)}])


def test_wrong_options():
    items = [{"a": torch.ones(1)}] * 2
    with pytest.raises(TypeError, match="collate: stack must be the name of a part or a collection of names, but got None"):
        collate(items, stack=None)
    with pytest.raises(TypeError, match="collate: shift must be a dict of names of parts, but got str"):
        collate(items, shift="a")


def test_rows_in_some_items_only():
    items = [{"a": torch.ones(1), "b": 1}, {"a": torch.ones(1), "b": torch.tensor([5.0])}]
    for some in (items, items[::-1]):
        with pytest.raises((TypeError, ValueError), match="collate: b of item . must"):
            collate(some)


def test_arrays_that_no_tensor_is_like():
    batch = collate([np.arange(3)[::-1], np.arange(2).astype(">i8")])
    assert batch.data.tolist() == [2, 1, 0, 0, 1]


def test_completion():
    assert {"data", "segments", "to", "keys"} <= set(dir(collate([torch.ones(2)])))


@pytest.mark.parametrize("place", (torch.float64, torch.ones(1)), ids=("dtype", "tensor"))
def test_numbers_of_rows_stay_integers(place):
    batch = collate([torch.ones(2)])
    for it in (batch, batch.segments):
        with pytest.raises(TypeError, match=r"\.to: device must be a device, but got torch\."):
            it.to(place)
