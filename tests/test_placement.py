"""`fastops.placement`: what follows from times is computed here from made-up ones; what is measured has to be there, whatever it is."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fastops
from fastops import Segments, placement, registry, testing
from fastops import __main__ as command
from fastops.placement import BreakEven, PlacementReport, Times

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = ("cuda", "copy_pageable", "copy_pinned", "copy_back", "overlapped")


def line(rows, *, cpu=1e-7, start=0.0, cuda=1e-9, launch=1e-5, pageable=1e-6, pinned=1e-9, back=0.0, overlapped=None):
    """Times that are a constant and so much for each row."""
    return Times(
        rows,
        rows // 10,
        8 * rows,
        cpu=start + rows * cpu,
        cuda=launch + rows * cuda,
        copy_pageable=rows * pageable,
        copy_pinned=rows * pinned,
        copy_back=back,
        overlapped=overlapped if overlapped is None else rows * overlapped,
    )


def report(*rows, **options):
    return PlacementReport.of("segment_sum", [line(number, **options) for number in rows], device="cuda:0, a GPU", threads=2)


# What follows from times ---------------------------------------------------------------------------------------------


def test_a_crossing_lies_where_lines_cross():
    """Straight lines in logarithms: 1e-7 * rows against a constant cross at 100 rows, wherever they were measured."""
    for rows in ((10, 1000), (10, 99, 1e6), (50, 150), (1, 7, 90, 1e5)):
        found = report(*(int(number) for number in rows), cuda=0.0, pageable=1.0).there
        assert found.verdict == "from" and found.rows == pytest.approx(100) and found.bytes == pytest.approx(800)
    assert str(found) == "from 100 rows (800 B) on"


def test_a_measured_size_where_both_are_as_fast():
    assert report(10, 100, 1000, cuda=0.0).there.rows == pytest.approx(100)


def test_nothing_is_extrapolated():
    assert report(1, 10, 99, cuda=0.0).there == BreakEven("never")
    assert report(101, 1000, cuda=0.0).there == BreakEven("always")
    assert report(50, cuda=0.0).there == BreakEven("never")
    assert report(500, cuda=0.0).there == BreakEven("always")
    assert [str(BreakEven(verdict)) for verdict in ("always", "never", "unknown")] == [
        "at every size that was measured",
        "at no size that was measured",
        "unknown",
    ]


def test_lines_that_cross_several_times():
    """What counts is from where on the GPU stays faster."""
    gains = {10: 2.0, 100: 0.5, 1000: 2.0, 10_000: 0.5, 100_000: 2.0}
    times = [Times(rows, 1, rows, cpu=gain, cuda=1.0, copy_pageable=0.0, copy_pinned=0.0, copy_back=0.0) for rows, gain in gains.items()]
    found = PlacementReport.of("segment_sum", times, device="a GPU", threads=1).there
    assert found.rows == pytest.approx(10**4.5)


def test_the_order_of_sizes_does_not_matter():
    assert report(1000, 10, 100) == report(10, 100, 1000)


def test_copies_there_and_back():
    found = report(10, 1_000_000, cuda=0.0, pageable=1e-6, pinned=5e-8, back=1e-5)
    assert found.there.rows == pytest.approx(100) and found.pageable == BreakEven("never")
    # 2e-5 + 5e-8 * rows against 1e-7 * rows
    assert found.pinned.verdict == "from" and 100 < found.pinned.rows < 1_000_000
    (times,) = report(100, launch=1.0, cuda=0.0, pageable=2.0, pinned=3.0, back=4.0).times
    assert times.with_pageable == 205.0 and times.with_pinned == 305.0
    assert report(10, 1000, overlapped=1e-8).overlapped == BreakEven("always")


def test_operations_that_pay_for_a_copy():
    # 1000 rows: the CPU takes 1e-4, the GPU 1e-5: each operation saves 9e-5, and copies take 1e-3 + 1e-5.
    found = report(10, 1000, cuda=0.0, pageable=1e-6, pinned=7e-8, back=1e-5)
    assert found.pays_after_pageable == 12 and found.pays_after_pinned == 1
    assert report(10, cuda=0.0).pays_after_pageable is None, "the CPU is faster"


def test_without_a_gpu_nothing_is_invented():
    times = [Times(rows, 1, 4 * rows, cpu=rows * 1e-6) for rows in (10, 1000)]
    found = PlacementReport.of("segment_sum", times, missing="torch sees none", threads=2)
    assert {where.verdict for where in (found.there, found.pageable, found.pinned, found.overlapped)} == {"unknown"}
    assert found.pays_after_pageable is None and found.pays_after_pinned is None and found.device is None
    assert all(getattr(one, number) is None for one in found.times for number in NUMBERS)
    assert found.advice.startswith("Only the CPU was measured, where segment_sum of 1,000 rows takes 1 ms")
    text = str(found)
    assert "no CUDA device: torch sees none" in text and "1 ms         -         -         -         -          -" in text
    assert "faster" not in text and "paid" not in text


def test_sizes_that_the_gpu_could_not_hold():
    """They are left out of what follows, not guessed."""
    large = Times(10**6, 1, 10**6, cpu=1.0, overlapped=0.5)
    found = PlacementReport.of("segment_sum", [line(10, cuda=0.0), line(1000, cuda=0.0), large], device="a GPU", threads=1)
    assert found.there.rows == pytest.approx(100) and found.overlapped == BreakEven("always")
    assert found.pays_after_pageable == 12 and "1,000 rows" in found.advice


def test_advice():
    never = report(10, 50, launch=1.0)
    assert never.advice == "Leave segment_sum on the CPU: up to 50 rows the GPU takes longer, even if the data is there already."
    moved = report(10, 1000, cuda=0.0, pageable=1e-9)
    assert moved.advice.startswith("Move the data to the GPU from 105 rows (840 B) on, even for a single segment_sum")
    stays = report(10, 1000, cuda=0.0, back=1e-5, pinned=1e-6)
    assert stays.advice == (
        "If the data is there already, use the GPU for segment_sum from 100 rows (800 B) on, but do not move it there for a single "
        "one: copying 1,000 rows takes 10.1 times as long as the whole operation takes on the CPU, and has paid after 12 operations "
        "on the same data."
    )
    pinned = report(10, 1000, cuda=0.0, pinned=1e-9)
    assert pinned.advice.endswith("(from pinned memory even a single one pays from 105 rows (840 B) on).")
    for one in (never, moved, stays, pinned):
        lines = str(one).splitlines()
        assert all(len(line) <= placement.WIDTH for line in lines) and one.advice == " ".join(str(one).split())[-len(one.advice) :]


@pytest.mark.parametrize("seconds, words", [(None, "-"), (0.0, "0 us"), (1.234e-6, "1.23 us"), (0.0123, "12.3 ms"), (2.0, "2 s"), (1234.5, "1234 s")])
def test_words_for_seconds(seconds, words):
    assert placement._as_seconds(seconds) == words


# Measuring -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_every_operation_without_a_gpu(op, no_gpu):
    segments = testing.make_segments((3, 0, 4, 1) * 20, "ignored")
    data = testing.make_data((segments.num_segments if op.takes_values else segments.num_rows, 3), torch.float32)
    found = placement.measure(op, data, segments, seconds=1e-4)
    assert found.op == op.name and found.missing == "torch sees none" and found.threads == torch.get_num_threads()
    assert len(found.times) >= 3 and all(one.cpu > 0 for one in found.times)
    assert [one.rows for one in found.times] == sorted({one.rows for one in found.times})
    assert found.times[-1].rows == segments.num_rows and found.times[-1].bytes == data.numel() * 4


def test_every_number_with_a_gpu(cuda):
    segments = testing.make_segments((3, 0, 4, 1) * 20, "unsorted")
    data = testing.make_data((160, 3), torch.float32)
    for op in (fastops.segment_max, functools.partial(fastops.segment_topk, k=3), "segment_broadcast"):
        values = data[:80] if op == "segment_broadcast" else data
        found = placement.measure(op, values, segments, seconds=1e-3, rows=[20, 160])
        assert found.device.startswith(f"{cuda}:0, ") and found.missing == ""
        assert len(found.times) == 2 and all(getattr(one, number) > 0 for one in found.times for number in NUMBERS)
        assert "unknown" not in {found.there.verdict, found.pageable.verdict, found.pinned.verdict, found.overlapped.verdict}


def test_arguments_travel(cuda):
    data, weight = np.ones((2, 100), dtype=np.float32), torch.ones(100)
    offsets = torch.arange(0, 101, 10)
    found = placement.measure("segment_sum", data, offsets, seconds=1e-3, dim=1, weight=weight, device=cuda)
    assert found.times[-1].bytes == 100 * 4 * 3 and found.times[-1].cuda > 0
    found = placement.measure("segment_quantile", data, offsets, seconds=1e-3, dim=1, q=torch.tensor([0.5]))
    assert found.times[-1].overlapped > 0


@pytest.mark.parametrize("grouping", ["offsets32", "unsorted", "ignored"])
def test_sizes_are_whole_segments(grouping, no_gpu, monkeypatch):
    """The first of them, in their places: every operation gives what it gives of the whole."""
    segments = testing.make_segments((5, 0, 2, 8, 1) * 8, grouping)
    data = testing.make_data((segments.num_rows, 2), torch.float32)
    whole = placement._Input(registry.find("segment_sum"), data, segments, 0, data[:, 0])
    kept = int(segments.offsets[-1])
    assert whole.sizes([kept]) == [40] and whole.sizes([1]) == [1] and whole.sizes([10**9, 17, 15, 16]) == [4, 5, 40]
    expected = fastops.segment_sum(data, segments, weight=data[:, 0])
    for count in whole.sizes([7, 16, 70, kept]):
        some = whole.of_first(count)
        assert some.segments.num_segments == count and some.data.size(0) == some.segments.num_rows
        assert torch.equal(fastops.segment_sum(some.data, some.segments, weight=some.weight), expected[:count])


def test_words(no_gpu):
    data, segments = torch.ones(7), torch.tensor([0, 3, 3, 7])
    with pytest.raises(RuntimeError, match="^measure: device must be there, but got cuda, and torch sees none$"):
        placement.measure("segment_sum", data, segments, device="cuda")
    with pytest.raises(ValueError, match="^measure: device must be a CUDA device, but got cpu; the CPU is always measured$"):
        placement.measure("segment_sum", data, segments, device="cpu")
    with pytest.raises(ValueError, match="^measure: segments must have rows, but got none in 1 segments$"):
        placement.measure("segment_sum", data[:0], torch.tensor([0, 0]))
    with pytest.raises(TypeError, match="^measure: rows must be a list of integers, but got int$"):
        placement.measure("segment_sum", data, segments, rows=7)
    with pytest.raises(ValueError, match="^segment_sum: data must have 7 rows along dim 0"):
        placement.measure("segment_sum", data[:5], segments)
    with pytest.raises(TypeError, match="^offload: op must be an operation of fastops"):
        placement.measure(torch.sum, data, segments)
    with pytest.raises(TypeError, match="^segment_sum: data must be an array without a mask"):
        placement.measure("segment_sum", np.ma.masked_array(data.numpy()), segments)


@pytest.mark.parametrize(
    "error, words, options",
    [
        (TypeError, "seconds must be a number, but got str", {"seconds": "1"}),
        (TypeError, "seconds must be a number, but got NoneType", {"seconds": None}),
        (TypeError, "seconds must be a number, but got bool", {"seconds": True}),
        (ValueError, "seconds must be above 0 and finite, but got 0", {"seconds": 0}),
        (ValueError, "seconds must be above 0 and finite, but got -1", {"seconds": -1}),
        (ValueError, "seconds must be above 0 and finite, but got nan", {"seconds": float("nan")}),
        (ValueError, "seconds must be above 0 and finite, but got inf", {"seconds": float("inf")}),
        (ValueError, "seconds must be above 0 and finite, but got 10{400}", {"seconds": 10**400}),
        (ValueError, "rows must name at least one size, but got none", {"rows": []}),
        (ValueError, "rows must be at least 1, but got 0", {"rows": [5, 0]}),
        (ValueError, "device must be a CUDA device, but got 'gpu'; the CPU is always measured", {"device": "gpu"}),
        (TypeError, "device must be a CUDA device, but got float; the CPU is always measured", {"device": 1.5}),
    ],
)
def test_words_of_what_is_measured(error, words, options, no_gpu):
    with pytest.raises(error, match=f"^measure: {words}$"):
        placement.measure("segment_sum", torch.ones(7), torch.tensor([0, 3, 3, 7]), **options)


@pytest.mark.parametrize(
    "weight, words",
    [
        (torch.tensor(1.0), "weight must have between 1 and 1 dimensions, but got 0"),
        (torch.ones(6), r"weight must have the shape of data from dim 0 on, \[7\], but got \[6\]"),
        (torch.ones(8), r"weight must have the shape of data from dim 0 on, \[7\], but got \[8\]"),
    ],
)
def test_a_weight_is_looked_at_before_it_is_narrowed(weight, words, no_gpu):
    with pytest.raises(ValueError, match=f"^segment_sum: {words}$"):
        placement.measure("segment_sum", torch.ones(7), torch.tensor([0, 3, 3, 7]), weight=weight, rows=[3], seconds=1e-4)


def test_sizes_that_there_are_not(no_gpu):
    """The next one that there is stands for them."""
    data, offsets = torch.ones(7), torch.tensor([0, 0, 0, 3, 7])
    found = placement.measure("segment_sum", data, offsets, rows=[1, 10**30], seconds=1e-4)
    assert [(one.rows, one.segments) for one in found.times] == [(3, 3), (7, 4)]


def test_a_number_of_rows_for_all(no_gpu):
    """That of the whole, which the sizes do not have."""
    offsets = torch.arange(0, 101, 10)
    for op in ("segment_broadcast", functools.partial(fastops.segment_broadcast, num_rows=100)):
        options = {"num_rows": 100} if isinstance(op, str) else {}
        found = placement.measure(op, torch.ones(10, 3), offsets, seconds=1e-4, **options)
        assert found.times[0].rows < found.times[-1].rows == 100
    with pytest.raises(ValueError, match="^segment_broadcast: num_rows must be 100, as the segments say, but got 99$"):
        placement.measure("segment_broadcast", torch.ones(10, 3), offsets, seconds=1e-4, num_rows=99)


@pytest.mark.parametrize("grouping", ["offsets", "unsorted", "ignored"])
def test_another_default_device(grouping, no_gpu):
    segments = testing.make_segments((5, 0, 2, 8, 1) * 8, grouping)
    data = testing.make_data((segments.num_rows, 2), torch.float32)
    torch.set_default_device("meta")
    try:
        found = placement.measure("segment_sum", data, segments, seconds=1e-4)
    finally:
        torch.set_default_device(None)
    assert found.times[-1].rows == data.size(0) and len(found.times) > 1


# The subcommand ------------------------------------------------------------------------------------------------------

FEW = ["copy-cost", "--sizes", "30", "300", "--features", "3", "--seconds", "1e-4"]


def test_tables_and_json(device, capsys, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([*FEW, "--ops", "sum", "segment_broadcast"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Medians.") and "rows of 3 elements in segments of 0 to 32 rows" in " ".join(out.split())
    assert out.count("segment_sum: ") == 1 and out.count("segment_broadcast: ") == 1 and "segment_mean" not in out
    assert ("no CUDA device: torch sees none" in out) == (device == "cpu") and ("The GPU is faster" in out) == (device == "cuda")
    assert all(len(line) <= placement.WIDTH for line in out.splitlines())

    assert command.main([*FEW, "--ops", "sum", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["reports"]
    assert found["op"] == "segment_sum" and len(found["times"]) == 2
    for number in NUMBERS:
        assert (found["times"][0][number] is None) == (device == "cpu")
    assert set(found) == {field.name for field in dataclasses.fields(PlacementReport)}


def test_all_operations_by_default(no_gpu, capsys):
    assert command.main(["--json", *FEW]) == 0
    reports = json.loads(capsys.readouterr().out)["reports"]
    assert [found["op"] for found in reports] == [op.name for op in registry.OPS]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--ops", "nonsense"], "there is no operation nonsense"),
        (["--sizes", "0"], "sizes and features must be at least 1"),
        (["--features", "0"], "sizes and features must be at least 1"),
        (["--sizes", str(10**15)], "the data of the largest size must fit in the memory of this computer"),
        (["--sizes", "10", "--features", str(10**30)], "the data of the largest size must fit in the memory of this computer"),
        *((["--seconds", seconds], "seconds must be above 0 and finite") for seconds in ("0", "-1", "nan", "inf")),
    ],
)
def test_wrong_arguments(wrong, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["copy-cost", *wrong])
    assert stopped.value.code == 2 and capsys.readouterr().err.endswith(f": error: {words}\n")


def test_the_script_is_the_subcommand():
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "copy_cost.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--png FILE" in done.stdout, done.stderr


# The picture ---------------------------------------------------------------------------------------------------------


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    crossing = report(10, 1000, cuda=0.0, pinned=1e-9, overlapped=2e-8)
    without = PlacementReport.of("segment_mean", [Times(10, 1, 80, cpu=1e-6)], missing="torch sees none", threads=2)
    placement.draw([crossing, without, crossing, without], tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot(xscale="log", yscale="log")
    placement._draw_one(axes, report(10, 1000, cuda=0.0, pinned=1e-9, overlapped=2e-8))
    labels = [one.get_label() for one in axes.get_lines()]
    assert labels[:7] == [label for label, _, _ in placement._LINES]
    assert [text.get_text() for text in axes.texts] == [" there: 800 B", " pinned: 840 B"]
    assert list(axes.get_lines()[0].get_xdata()) == [80, 8000]

    axes = figure.add_subplot(xscale="log", yscale="log")
    placement._draw_one(axes, PlacementReport.of("segment_mean", [Times(10, 1, 80, cpu=1e-6)], threads=2))
    assert len(axes.get_lines()) == 1 and not axes.texts


def refused_picture(path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*FEW, "--ops", "sum", "--png", str(path)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "", "nothing is measured first"
    return err.rpartition(": error: ")[2]


def test_pictures_that_cannot_be_drawn(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "nowhere" / "some.png", tmp_path / "nowhere" / "some", tmp_path / "folder.png"):
        assert refused_picture(path, capsys).startswith(str(path)) and not path.is_file()
    words = refused_picture(tmp_path / "some.nonsense", capsys)
    assert words.startswith("a picture must be one of ") and words.endswith(f"but {tmp_path / 'some.nonsense'} is none\n")
    monkeypatch.setattr(placement.os, "access", lambda path, mode: False)  # the root of a system may write anywhere
    assert refused_picture(tmp_path / "some.png", capsys) == f"{tmp_path / 'some.png'} cannot be written\n"


def test_a_picture_of_the_subcommand(tmp_path, no_gpu, capsys):
    pytest.importorskip("matplotlib")
    assert command.main([*FEW, "--ops", "sum", "--png", str(tmp_path / "some.PNG")]) == 0
    assert (tmp_path / "some.PNG").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="^draw: matplotlib must be installed, but it is not; pip install matplotlib$"):
        placement.draw([report(10)], tmp_path / "some.png")
    words = "draw: matplotlib must be installed, but it is not; pip install matplotlib\n"
    assert refused_picture(tmp_path / "some.png", capsys) == words
