"""`python -m fastops`: what it prints, what it returns, and that it finds what is wrong."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastops
from fastops import _timing, registry, testing
from fastops import __main__ as command


@pytest.fixture
def small(monkeypatch):
    """The same in a second, where the device may be an interpreter: few operations, patterns and rows."""
    monkeypatch.setattr(registry, "OPS", [registry.find(name) for name in ("segment_max", "segment_mean", "segment_broadcast")])
    monkeypatch.setattr(testing, "PATTERNS", {name: testing.PATTERNS[name] for name in ("canonical", "many_tiny")})
    monkeypatch.setattr(command, "ROWS", {"cpu": 2_000, "cuda": 2_000})


@pytest.fixture
def only(monkeypatch):
    """Makes one device the only one."""

    def choose(device):
        found = [entry for entry in command.find_devices() if entry[0].startswith(device)]
        monkeypatch.setattr(command, "find_devices", lambda: found[:1])

    return choose


def test_as_a_newcomer_runs_it(tmp_path):
    folder = str(Path(fastops.__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "fastops"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"fastops {fastops.__version__}, built for torch {torch.__version__}")
    assert any(line.startswith("cpu: ") for line in lines)
    for op in registry.OPS:
        assert re.search(rf"^{op.name} +\d+ ok( +[0-9.]+){{4}}x$", done.stdout, re.M), op.name
    # The lines of the build quote versions and reasons, which may be long.
    assert all(len(line) <= 100 for line in lines[4:]), max(lines[4:], key=len)


def test_json(small, only, device, capsys):
    only(device)
    assert command.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["build"] == fastops.build_info()
    (entry,) = report["devices"]
    assert entry["device"].startswith(device)
    assert [result["name"] for result in entry["operations"]] == [op.name for op in registry.OPS]
    for result in entry["operations"]:
        dtypes = sum(dtype in registry.find(result["name"]).dtypes for dtype in command.DTYPES)
        assert result["checks"] == 2 * dtypes and result["failures"] == []
        for number in ("seconds", "bandwidth_gb_s", "peer_seconds", "peer_ratio"):
            assert result[number] > 0
        # What copying costs is a question only where the input is not in the memory of the CPU.
        assert ("copy_seconds" in result) == ("copy_ratio" in result) == (device == "cuda")


def test_table(small, only, device, capsys):
    only(device)
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("operation"))
    assert ("copy ms" in heading) == (device == "cuda")
    for op in registry.OPS:
        (line,) = [line for line in lines if line.startswith(op.name)]
        assert len(line) == len(heading) <= 100


def break_op(monkeypatch, name, function):
    op = registry.find(name)
    broken = [dataclasses.replace(other, fn=function) if other is op else other for other in registry.OPS]
    monkeypatch.setattr(registry, "OPS", broken)


def off_by_one(data, segments, *, dim=0):
    return fastops.segment_mean(data, segments, dim=dim) + 1


def raises(data, segments, *, dim=0):
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize("function, words", [(off_by_one, "AssertionError: Tensor-likes"), (raises, "RuntimeError: no kernel image")])
def test_exit_code_of_a_wrong_operation(small, only, monkeypatch, capsys, function, words):
    only("cpu")
    break_op(monkeypatch, "segment_mean", function)
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^segment_mean +FAILED$", out, re.M) and re.search(r"^segment_max +6 ok", out, re.M)
    assert re.search(rf"^FAILED segment_mean on cpu: float32-canonical-\S+: {words}", out, re.M)
    assert "is available" not in out and "segment_mean on cpu: 1 more" in out  # of four, three are shown

    assert command.main(["check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    wrong = {result["name"]: result for result in report["devices"][0]["operations"]}["segment_mean"]
    assert report["ok"] is False and len(wrong["failures"]) == 4
    assert "seconds" not in wrong, "what is wrong is not timed"


def test_exit_code_of_a_wrong_timed_input(small, only, monkeypatch, capsys):
    """Right on all samples, wrong on the large input that is timed."""

    def wrong_when_large(data, segments, *, dim=0):
        return fastops.segment_mean(data, segments, dim=dim) + (segments.num_rows > 1500)

    only("cpu")
    break_op(monkeypatch, "segment_mean", wrong_when_large)
    assert command.main([]) == 1
    assert "FAILED segment_mean on cpu: the timed input against plain PyTorch: " in capsys.readouterr().out


def test_a_device_that_this_build_cannot_use(small, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_devices", lambda: [("cuda:0", "A GPU, 9.0, 80 GiB", "this build has no CUDA kernels")])
    assert command.main([]) == 0
    assert "cuda:0: A GPU, 9.0, 80 GiB. Not used: this build has no CUDA kernels" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--json", "check"], ["check", "--json"], ["--json"]])
def test_json_before_and_after_the_subcommand(monkeypatch, arguments):
    asked = []
    monkeypatch.setattr(command, "check", lambda as_json: asked.append(as_json) or 0)
    assert command.main(arguments) == 0 and asked == [True]


def test_a_further_subcommand(monkeypatch, capsys):
    def add(parser):
        """say a number"""
        parser.add_argument("number", type=int)
        return lambda parsed: parsed.number

    monkeypatch.setitem(command.COMMANDS, "say", add)
    assert command.main(["say", "3"]) == 3
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0 and "say a number" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main(["nonsense"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("name", list(command.COMMANDS))
def test_every_subcommand_says_what_it_does(name, capsys):
    for arguments in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
        words = " ".join(capsys.readouterr().out.split())
        assert name in words and " ".join(command.COMMANDS[name].__doc__.split()) in words


def test_medians_take_turns():
    log = []
    times = _timing.medians({name: lambda name=name: log.append(name) for name in "ab"}, rounds=3, seconds=0)
    assert set(times) == {"a", "b"} and all(0 < seconds < 1e-3 for seconds in times.values())
    turns = [name for at, name in enumerate(log) if at == 0 or log[at - 1] != name]
    assert "".join(turns).startswith("ab" * 4) and len(log) > 100, "short work is measured many times together"


def test_medians_end_in_time():
    import time

    start = time.perf_counter()
    times = _timing.medians({"a": lambda: time.sleep(0.05)}, rounds=1000, seconds=1000, limit=0.1, warm=True)
    assert 0.05 <= times["a"] and time.perf_counter() - start < 10
