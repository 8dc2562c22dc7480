"""Threads, processes, copies: operations and `Segments` are used by many threads, forked, spawned, sent, copied and stored."""

import copy
import functools
import io
import pickle
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import first
from torch.utils.data import DataLoader, Dataset

import fastops
from fastops import Segments, nn, segment_sum, segment_topk, testing
from fastops.registry import OPS, find

THREADS = 8
every_context = pytest.mark.parametrize("context", ("fork", "spawn", "forkserver"))
every_grouping = pytest.mark.parametrize("grouping", testing.GROUPINGS)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def in_threads(function):
    """What the function makes of each thread's number, in threads that begin at the same time."""
    begin = threading.Barrier(THREADS)

    def run(number):
        begin.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def bits(tensor):
    return zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())


def forward(name, data, segments, options):
    results = find(name).fn(data, segments, **options)
    return [bits(result) for result in (results if isinstance(results, tuple) else (results,))]


def both_ways(name, data, segments, options):
    """The bits of the results and of the gradient, if there is one."""
    if not (find(name).differentiable and data.is_floating_point()):
        return forward(name, data, segments, options)
    leaf = data.detach().requires_grad_()
    results = find(name).fn(leaf, segments, **options)
    value = first(results)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return [bits(tensor) for tensor in (*(results if isinstance(results, tuple) else (results,)), gradient)]


def random_calls(number, device="cpu", patterns=tuple(testing.PATTERNS)):
    """Of operations, dtypes, lengths, layouts and groupings; new tensors and segments every time, which are the same."""
    generator = np.random.default_rng(0)

    def choose(known):
        return known[generator.integers(len(known))]

    def call():
        op = choose(OPS)
        how = choose(patterns), choose((1, 3, 8)), choose(testing.LAYOUTS), choose(testing.GROUPINGS), choose(op.dtypes)
        sample = testing.make_sample(op, *how, device)
        return op.name, *sample.args, sample.kwargs

    return [call() for _ in range(number)]


# ---- threads ----


def check_threads(number, *how):
    expected = [both_ways(*call) for call in random_calls(number, *how)]
    shared = random_calls(number, *how)

    def differing(thread):
        order = np.random.default_rng(thread).permutation(number)[: number // 2]
        return [at for at in order if both_ways(*shared[at]) != expected[at]]

    assert in_threads(differing) == [[]] * THREADS


def test_threads_compute_what_one_thread_does():
    """200 calls each, forward and backward, of data and segments that all of them use."""
    check_threads(400)


def test_threads_on_cuda(cuda):
    check_threads(10, cuda, ("canonical", "one_empty", "leading_empties"))


@every_grouping
def test_first_use_of_properties_in_threads(grouping):
    """What is computed on first use is the same for all who ask at once."""

    def fresh():
        segments = testing.make_segments((3, 0, 4), grouping)
        if segments.order is None:
            segments._num_rows = None  # as of unchecked ones on CUDA; there an order is cut late, too
        else:
            others = torch.zeros(segments.num_rows - len(segments.order), dtype=segments.order.dtype)
            segments._parts = (segments.offsets, torch.cat((segments.order, others)), segments.index)
            segments._tail_unknown = True
        return segments

    def seen(segments, thread=0):
        names = ("order", "index", "lengths", "num_rows")
        values = {name: getattr(segments, name) for name in names[thread % 4 :] + names[: thread % 4]}
        return [value.tolist() if isinstance(value, torch.Tensor) else value for _, value in sorted(values.items())]

    expected = seen(testing.make_segments((3, 0, 4), grouping))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            assert in_threads(functools.partial(seen, fresh())) == [expected] * THREADS
    finally:
        sys.setswitchinterval(interval)


def test_an_order_that_another_thread_cuts(monkeypatch):
    """What belongs to no segment is cut off on first use; here that is between two steps of somebody else's use."""
    segments = Segments.from_index(torch.tensor([2, -1, 0, 0]), 3, ignore_index=-1)
    segments._parts = (segments.offsets, torch.tensor([2, 3, 0, 1]), segments.index)
    slot = Segments._tail_unknown
    slot.__set__(segments, True)

    class Between:
        meets = True

        def __get__(self, one, _):
            if self.meets:
                self.meets = False
                assert one.order.tolist() == [2, 3, 0]
            return slot.__get__(one)

        def __set__(self, one, value):
            slot.__set__(one, value)

    monkeypatch.setattr(Segments, "_tail_unknown", Between())
    assert segments.order.tolist() == [2, 3, 0]


FIRST_USE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import numpy, torch  # their own first imports are not to be tried

sys.setswitchinterval(1e-5)
begin = threading.Barrier(8)
offsets = torch.tensor([0, 3, 3, 7])
data = torch.tensor([3.0, 1, 4, 1, 5, 9, 2])

def use(number):
    begin.wait()
    import fastops
    from fastops.registry import OPS
    found = {}
    for op in OPS[number * 3 :] + OPS[: number * 3]:
        given = data[:3] if op.takes_values else data
        leaf = given.clone().requires_grad_(op.differentiable)
        results = op.fn(leaf, offsets)
        results = results if isinstance(results, tuple) else (results,)
        found[op.name] = [result.tolist() for result in results]
        if op.differentiable:
            results[0].sum().backward()
            found[op.name].append(leaf.grad.tolist())
    found["vmap"] = torch.vmap(lambda row: fastops.segment_sum(row, offsets))(data[None]).tolist()
    return found

with ThreadPoolExecutor(8) as pool:
    one, *others = pool.map(use, range(8))
assert len(one) > 30 and one["segment_sum"] == [[8, 0, 17], [1] * 7] and one["vmap"] == [[8, 0, 17]]
assert all(repr(sorted(other.items())) == repr(sorted(one.items())) for other in others)
"""


def test_first_calls_of_a_process_in_threads():
    """Import, the loading of operators and the first call of each, by all threads at once."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def counted_during(call):
    """How often another thread had its turn. It has none unless the call lets go: the interpreter takes the lock from nobody."""
    count, done = 0, False

    def take_turns():
        nonlocal count
        while not done:
            count += 1
            time.sleep(0)  # lets go

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        before = count
        call()
        return count - before
    finally:
        done = True
        thread.join()
        sys.setswitchinterval(interval)


@every_op
def test_python_goes_on_while_a_kernel_runs(op):
    segments = testing.make_segments((5,) * 20_000, "unsorted")
    data = testing.make_data((segments.num_segments if op.takes_values else segments.num_rows, 4), torch.float32)
    deadline = time.monotonic() + 30  # on a busy machine a turn may come late
    while counted_during(lambda: op.fn(data, segments)) == 0:
        assert time.monotonic() < deadline


def test_python_stands_still_where_the_lock_is_held():
    """What the test before relies on."""
    numbers = list(range(300_000))
    assert [counted_during(lambda: sorted(numbers, key=abs)) for _ in range(5)] == [0] * 5


# ---- processes ----


class Results(Dataset):
    """An item is the bits of an operation's results for a million rows."""

    def __init__(self):
        lengths = np.random.default_rng(0).multinomial(1_000_000, [1 / 100_000] * 100_000)
        self.segments = Segments.from_lengths(torch.from_numpy(lengths))
        self.data = testing.make_data((1_000_000,), torch.float32, kind="normal")

    def __len__(self):
        return len(OPS)

    def __getitem__(self, number):
        data = self.data[: self.segments.num_segments] if OPS[number].takes_values else self.data
        return forward(OPS[number].name, data, self.segments, {})


def test_fork_after_use():
    """Workers compute what the process computed with two threads before it was forked."""
    torch.set_num_threads(2)
    results = Results()
    expected = [results[number] for number in range(len(OPS))]
    loader = DataLoader(results, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=30)
    assert list(loader) == expected


def call_all(calls):
    return [both_ways(*call) for call in calls]


@every_context
def test_pool_of_processes(context):
    calls = random_calls(100)
    # A forked process has none of its parent's threads, whatever library it uses them with.
    how = {"mp_context": torch.multiprocessing.get_context(context), "initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(1, **how) as pool:
        assert pool.submit(call_all, calls).result(timeout=120) == call_all(calls)


def serve(inbox, outbox):
    torch.set_num_threads(1)
    data, segments = inbox.get()
    before = segment_sum(data, segments).tolist()
    data[0] = 10
    segments.offsets[1:3] = 1  # nobody should: it shows whose memory it is
    outbox.put((before, segments, data * 2))
    inbox.get()  # what was sent is there as long as its sender is


@every_context
def test_queues_share_memory(context):
    """Data and Segments that are sent are not copied, there or back."""
    processes = torch.multiprocessing.get_context(context)
    inbox, outbox = processes.Queue(), processes.Queue()
    process = processes.Process(target=serve, args=(inbox, outbox), daemon=True)
    process.start()
    try:
        data = torch.tensor([3.0, 1, 4, 1, 5, 9, 2])
        segments = Segments.from_offsets(torch.tensor([0, 3, 3, 7]))
        inbox.put((data, segments))
        before, back, doubled = outbox.get(timeout=120)
        assert before == [8, 0, 17] and data[0] == 10 and doubled[0] == 20
        assert segments.offsets.tolist() == back.offsets.tolist() == [0, 1, 1, 7] and back.num_rows == 7
        segments.offsets[1] = 0
        assert back.offsets.tolist() == [0, 0, 1, 7]
    finally:
        inbox.put(None)
        process.join(60)
        process.kill()


# ---- copies ----


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "oldest_pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "file": through_file,
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def with_properties(segments):
    assert len(segments.lengths) == segments.num_segments and len(segments.index) == segments.num_rows
    return segments


SEGMENTS = {
    **{grouping: functools.partial(testing.make_segments, (3, 0, 4), grouping) for grouping in testing.GROUPINGS},
    "used": lambda: with_properties(testing.make_segments((3, 0, 4))),
    "used_unsorted": lambda: with_properties(testing.make_segments((3, 0, 4), "unsorted")),
    "unchecked": lambda: Segments.from_offsets(torch.tensor([0, 3, 3, 7]), check_invariants=False),
    "unchecked_index": lambda: Segments.from_index(torch.tensor([2, 0, 5, 0]), 3, check_invariants=False),
    "meta": lambda: testing.make_segments((3, 0, 4)).to("meta"),
    "meta_unsorted": lambda: testing.make_segments((3, 0, 4), "unsorted").to("meta"),
}


@every_copy
@pytest.mark.parametrize("make", SEGMENTS.values(), ids=SEGMENTS)
def test_copies_of_segments(make, copied):
    segments = make()
    other = copied(segments)
    assert type(other) is Segments and repr(other) == repr(segments) and other.device == segments.device
    for one, part in zip(other._parts, segments._parts):
        assert (one is None) == (part is None)
        if part is not None:
            assert one.dtype == part.dtype and one.shape == part.shape and (part.is_meta or torch.equal(one, part))
    assert (other is segments) == (copied is copy.copy)
    if segments.device.type == "cpu":
        assert other.lengths.tolist() == segments.lengths.tolist() and other.index.tolist() == segments.index.tolist()


def test_properties_are_not_stored():
    """They can be computed again; a file is as large before their first use as after it."""
    segments = testing.make_segments((3, 0, 4))
    before = len(pickle.dumps(segments))
    assert len(pickle.dumps(with_properties(segments))) == before


def test_deepcopy_keeps_what_is_one_tensor():
    offsets = torch.tensor([0, 3, 3, 7])
    other, segments = copy.deepcopy([offsets, Segments.from_offsets(offsets)])
    assert segments.offsets is other and other is not offsets


@pytest.mark.parametrize("copied", (COPIES["pickle"], copy.deepcopy, copy.copy), ids=("pickle", "deepcopy", "copy"))
@every_op
def test_copies_of_operations(op, copied):
    other = copied(op.fn)
    if isinstance(op.fn, functools.partial):
        assert other.func is op.fn.func and other.keywords == op.fn.keywords
    else:
        assert other is op.fn
    bound = copied(functools.partial(op.fn, dim=1))
    data = testing.make_data((2, 3 if op.takes_values else 7), torch.float32)
    results = (bound(data, torch.tensor([0, 3, 3, 7])), op.fn(data, torch.tensor([0, 3, 3, 7]), dim=1))
    for one, expected in zip(*[r if isinstance(r, tuple) else (r,) for r in results]):
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)


class Model(torch.nn.Module):
    """One that knows its segments, as of a graph that does not change."""

    def __init__(self, segments):
        super().__init__()
        self.segments = segments
        self.pools = torch.nn.ModuleList([nn.SegmentPool(["mean", "amax"]), nn.SegmentAttentionPool(4, heads=2)])
        self.steps = torch.nn.Sequential(nn.SegmentNorm(4))
        self.top = functools.partial(segment_topk, k=1)

    def forward(self, data):
        data = self.steps[0](data, self.segments)
        return torch.cat([*(pool(data, self.segments) for pool in self.pools), self.top(data, self.segments).values[:, 0]], 1)


@every_grouping
@pytest.mark.parametrize("copied", (COPIES["pickle"], copy.deepcopy), ids=("pickle", "deepcopy"))
def test_copies_of_a_module_with_segments(grouping, copied):
    model = Model(testing.make_segments((3, 0, 4), grouping))
    data = testing.make_data((model.segments.num_rows, 4), torch.float32, kind="normal")
    other = copied(model)
    assert other.segments is not model.segments and torch.equal(other(data), model(data))


def test_a_module_leaves_its_segments_alone():
    """They are no parameter and no buffer: they are in no state_dict and stay where they are when a module moves in place."""
    model = Model(testing.make_segments((3, 0, 4)))
    assert set(model.state_dict()) == {f"{name}" for name, _ in model.named_parameters()}
    segments = model.segments
    assert model.double().to("meta").segments is segments and segments.device.type == "cpu"
    assert segments.offsets.dtype == torch.int64
