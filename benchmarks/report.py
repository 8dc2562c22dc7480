"""One page with tables and plots from the JSON of runs, and the performance table of the README.

    python -m benchmarks.report                        # measures first, then writes
    python -m benchmarks.report --options="--threads 1"
    python -m benchmarks.report cpu.json cuda.json     # of runs with `pytest benchmarks --benchmark-json=cpu.json`

Of a measurement that several files hold, that of the last counts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional

from fastops import registry

ROOT = Path(__file__).resolve().parents[1]
MEASURE = "python -m benchmarks.report"

# What the README shows.
README_OPERATIONS = (
    "segment_sum",
    "segment_mean",
    "segment_amax",
    "segment_max",
    "segment_logsumexp",
    "segment_std",
    "segment_softmax",
    "segment_cumsum",
    "segment_sort",
    "segment_topk",
    "segment_median",
    "segment_broadcast",
)
README_CASES = ("uniform", "tiny", "long", "scalar", "skewed", "unsorted", "routes")
BEGIN, END = "<!-- performance -->\n", "<!-- performance end -->"

FALLS_BEHIND = 0.95  # a ratio below; between that and 1 there is only noise
FEWEST_DIGITS = 3
NUMBER = r"(?<![\d.])-?(?!0\.0(?!\d))\d+\.\d+(?:e[-+]?\d+)?"  # that is not 0.0, which is a result of its own
MOST_PEERS = 6  # lines of a plot beside ours

Record = dict[str, Any]


# What was measured ---------------------------------------------------------------------------------------------------


class Runs:
    """The measurements of one or more files, and the machines they come from."""

    def __init__(self, files: Iterable[Path]) -> None:
        found: dict[tuple, Record] = {}
        self.machines: list[dict] = []
        for file in files:
            run = json.loads(Path(file).read_text())
            self.machines.append({**run["machine_info"]["fastops"], "commit": run["commit_info"], "date": run["datetime"]})
            for entry in run["benchmarks"]:
                record = {**entry["extra_info"], "growth": "test_growth" in entry["fullname"]}
                found[tuple(record[key] for key in ("growth", "operation", "case", "dtype", "device", "direction", "elements"))] = record
        self.records = list(found.values())

    def select(self, growth: bool = False, **wanted: Any) -> list[Record]:
        return [r for r in self.records if r["growth"] == growth and all(r[key] == value for key, value in wanted.items())]

    def find(self, **wanted: Any) -> Optional[Record]:
        return next(iter(self.select(**wanted)), None)

    @property
    def devices(self) -> list[str]:
        return sorted({record["device"] for record in self.records})

    @property
    def cases(self) -> dict[str, str]:
        """What each case stresses."""
        return {name: text for machine in self.machines for name, text in machine["cases"].items()}


def operations(records: Iterable[Record]) -> list[str]:
    """In the order of the registry."""
    there = {record["operation"] for record in records}
    return [op.name for op in registry.OPS if op.name in there]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


# Words ---------------------------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    if value == 0:
        return "0"
    behind = max(FEWEST_DIGITS - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{behind}f}"


def times(ratio: Optional[float]) -> str:
    """A ratio, in two digits."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def ms(seconds: float) -> str:
    return digits(1e3 * seconds)


def megabytes(record: Record) -> str:
    return digits(record["bytes"] / 1e6)


def markdown(heading: list, rows: Iterable[list]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def plain_table(records: list[Record]) -> str:
    """For a terminal."""
    heading = ("operation", "case", "dtype", "device", "direction", "N", "MB", "ms", "GB/s", "of copy", "best peer", "its ms", "ratio")
    rows = [heading] + [
        (
            r["operation"], r["case"], r["dtype"], r["device"], r["direction"], str(r["rows"]), megabytes(r), ms(r["seconds"]),
            f"{r['bandwidth'] / 1e9:.1f}", f"{100 * r['share_of_copy']:.0f} %", r["best_peer"] or "none",
            ms(r["peers"][r["best_peer"]]) if r["best_peer"] else "", times(r["ratio"]),
        )
        for r in records
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def threads(machine: dict) -> str:
    return f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"


def machine_lines(machine: dict) -> list[str]:
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    commit = machine["commit"]
    load = f"{machine['load'][0]:.1f}" if machine["load"] else "unknown"
    lines = [
        f"- {machine['processor']}, {machine['cores']} cores, {threads(machine)}, {machine['kernels']} kernels, "
        f"load {load} at the start",
        f"- Python {machine['python']}, torch {machine['torch']}, fastops {machine['version']}, commit {commit['id'][:10]}"
        + (" and changes" if commit["dirty"] else ""),
        f"- peers: torch, {packages}" if packages else "- peers: torch",
        f"- `pytest {' '.join(machine['arguments'])}`, {machine['date'][:10]}",
    ]
    for device, bandwidth in machine["copy_bandwidth"].items():
        lines.append(f"- copying reads and writes {bandwidth / 1e9:.1f} GB/s on {device} ({machine['devices'][device]}), "
                     f"measured with {machine['elements']:,} elements of float32, as many as the data of a case has")
    return lines + [f"- {line}" for line in machine["left_out"]]


# The page ------------------------------------------------------------------------------------------------------------


def page(runs: Runs, images: dict[str, str]) -> str:
    parts = [
        "# Benchmarks",
        f"Written by `{MEASURE}`, not by hand. `benchmarks/README.md` says how each number is made. A ratio is how many times as long as "
        "fastops the best other way takes: above 1, fastops is faster.",
        "## The machine",
        *("\n".join(machine_lines(machine)) for machine in runs.machines),
    ]
    for device in runs.devices:
        parts += [f"## Results on {device}", *_images(images, device), *_behind(runs, device)]
        parts += [part for case in runs.cases for part in _case(runs, device, case)]
        parts += _dtypes(runs, device)
    return "\n\n".join([*parts, *_peers(runs)]) + "\n"


def _images(images: dict[str, str], device: str) -> Iterator[str]:
    for name, caption in images.items():
        if name.startswith(f"benchmarks-{device}-"):
            yield f"![{caption}]({name})\n\n{caption}"


def _behind(runs: Runs, device: str) -> list[str]:
    behind = sorted((r for r in runs.select(device=device) if r["ratio"] is not None and r["ratio"] < FALLS_BEHIND), key=lambda r: r["ratio"])
    compared = [r for r in runs.select(device=device) if r["ratio"] is not None]
    rows = [
        [f"`{r['operation']}`", r["case"], r["dtype"], r["direction"], ms(r["seconds"]), r["best_peer"], ms(r["peers"][r["best_peer"]]), times(r["ratio"])]
        for r in behind
    ]
    text = f"### Where a peer is faster\n\n{len(behind)} of {len(compared)} comparisons have a ratio below {FALLS_BEHIND}."
    if not behind:
        return [text]
    return [text, markdown(["operation", "case", "dtype", "direction", "ms", "best peer", "its ms", "ratio"], rows)]


def _case(runs: Runs, device: str, case: str) -> list[str]:
    forward = {r["operation"]: r for r in runs.select(case=case, device=device, dtype="float32", direction="forward")}
    backward = {r["operation"]: r for r in runs.select(case=case, device=device, dtype="float32", direction="backward")}
    if not forward:
        return []
    rows = []
    for name in operations(forward.values()):
        rows.append([f"`{name}`", megabytes(forward[name]), *_cells(forward[name]), *(_cells(backward[name]) if name in backward else [""] * 5)])
    some = next(r for r in forward.values() if r["operation"] != "segment_broadcast" or len(forward) == 1)
    heading = ["operation", "MB", "ms", "GB/s", "of copy", "best peer", "ratio", "backward, ms", "GB/s", "of copy", "best peer", "ratio"]
    facts = f"{some['rows']:,} rows of {some['features']} in {some['segments']:,} segments, float32."
    return [f"### {case}: {runs.cases[case]}", facts, markdown(heading, rows)]


def _cells(record: Record) -> list[str]:
    return [
        ms(record["seconds"]),
        f"{record['bandwidth'] / 1e9:.1f}",
        f"{100 * record['share_of_copy']:.0f} %",
        record["best_peer"] or "none",
        times(record["ratio"]),
    ]


def _dtypes(runs: Runs, device: str) -> list[str]:
    others = [r for r in runs.select(device=device) if r["dtype"] != "float32"]
    if not others:
        return []
    rows = []
    for r in others:
        whole = runs.find(operation=r["operation"], case=r["case"], device=device, direction=r["direction"], dtype="float32")
        beside = f"{r['seconds'] / whole['seconds']:.2f}" if whole else ""
        rows.append([f"`{r['operation']}`", r["case"], r["dtype"], r["direction"], *_cells(r), beside])
    heading = ["operation", "case", "dtype", "direction", "ms", "GB/s", "of copy", "best peer", "ratio", "time, of float32's"]
    return ["### Other dtypes", markdown(heading, rows)]


def _peers(runs: Runs) -> list[str]:
    """What each one does, and where its values differ."""
    covered: dict[str, set] = defaultdict(set)
    differs: dict[tuple, tuple[list, set, set]] = defaultdict(lambda: ([], set(), set()))
    for r in runs.records:
        for name in r["peers"]:
            covered[name].add(r["operation"])
        for name, reason in r["left_out"].items():
            example = re.sub(r"^\d+ of \d+ values, | at \[.*\]$", "", reason)
            examples, names, cases = differs[name, re.sub(NUMBER, "x", example)]
            examples.append(example)
            names.add(r["operation"])
            cases.add(r["case"])
    notes = {name: note for machine in runs.machines for name, note in machine["notes"].items()}
    parts = ["## Peers", markdown(["peer", "operations", "note"], [[name, len(covered[name]), notes.get(name, "")] for name in covered])]
    if differs:
        rows = [
            [name, ", ".join(map(_short, sorted(names))), ", ".join(case for case in runs.cases if case in cases), examples[0].replace("|", "\\|")]
            for (name, _), (examples, names, cases) in sorted(differs.items())
        ]
        parts += ["### Left out where they return something else", markdown(["peer", "operations", "cases", "for example"], rows)]
    return parts


# Plots ---------------------------------------------------------------------------------------------------------------


def draw(runs: Runs, folder: Path) -> dict[str, str]:
    """PNG files in a folder: name and caption of each."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = {}
    for device in runs.devices:
        for suffix, caption, figure in (
            ("ratios", f"Ratio to the best peer on {device}, float32: the bar is the geometric mean of the cases, a dot is one case.", ratios_figure),
            ("peers", f"How many times as long as fastops each peer takes on {device}, float32: the geometric mean of all that it does.", peers_figure),
        ):
            if runs.select(device=device, dtype="float32"):
                drawn[f"benchmarks-{device}-{suffix}.png"] = caption
                _save(figure(runs, device), folder / f"benchmarks-{device}-{suffix}.png")
        for family, names in _families(runs, device).items():
            name = f"benchmarks-{device}-size-{family}.png"
            drawn[name] = f"Time over the number of rows on {device}, 64 elements of float32 in a row, segments of 16 rows on average."
            _save(growth_figure(runs, device, names), folder / name)
    return drawn


def _save(figure: Any, file: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(file, dpi=100, bbox_inches="tight")
    plt.close(figure)


def _families(runs: Runs, device: str) -> dict[str, list[str]]:
    """The operations of each module, for one figure each."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in operations(runs.select(growth=True, device=device)):
        function = registry.find(name).fn
        family = getattr(function, "func", function).__module__.rsplit(".", 1)[1]
        found["order" if family in ("select", "move") else family].append(name)
    return found


def _short(name: str) -> str:
    return name.removeprefix("segment_")


def ratios_figure(runs: Runs, device: str) -> Any:
    import matplotlib.pyplot as plt

    names = operations(runs.select(device=device, dtype="float32"))
    figure, axes = plt.subplots(1, 2, figsize=(13, 0.3 * len(names) + 1.6), sharey=True, layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward")):
        for row, name in enumerate(names):
            found = [r["ratio"] for r in runs.select(operation=name, device=device, dtype="float32", direction=direction) if r["ratio"]]
            if not found:
                continue
            mean = geometric_mean(found)
            axis.barh(row, mean - 1, left=1, color="#7fb0d8" if mean >= 1 else "#e9a3a0", height=0.7)
            axis.scatter(found, [row] * len(found), s=14, color=["#1f4e79" if ratio >= 1 else "#c0392b" for ratio in found], zorder=3)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(xscale="log", title=direction, xlabel="time of the best peer / time of fastops (above 1: fastops is faster)")
        _plain_numbers(axis.xaxis)
        axis.grid(axis="x", which="major", color="#dddddd")
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(names)), list(map(_short, names)))
    axes[0].invert_yaxis()
    axes[0].margins(y=0.01)
    return figure


def peers_figure(runs: Runs, device: str) -> Any:
    import matplotlib.pyplot as plt

    found: dict[tuple, list] = defaultdict(list)
    for r in runs.select(device=device, dtype="float32"):
        for name, seconds in r["peers"].items():
            found[name, r["direction"]].append(seconds / r["seconds"])
    names = sorted({name for name, _ in found}, key=lambda name: geometric_mean(found.get((name, "forward")) or found[name, "backward"]))
    figure, axis = plt.subplots(figsize=(10, 0.42 * len(names) + 1.4), layout="constrained")
    for shift, direction, color in ((-0.2, "forward", "#1f77b4"), (0.2, "backward", "#ff7f0e")):
        rows = [row for row, name in enumerate(names) if (name, direction) in found]
        means = [geometric_mean(found[names[row], direction]) for row in rows]
        axis.barh([row + shift for row in rows], [mean - 1 for mean in means], left=1, height=0.38, color=color, label=direction)
        for row, mean in zip(rows, means):
            axis.text(max(mean, 1) * 1.04, row + shift, f"{times(mean)}  ({len(found[names[row], direction])})", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xscale="log", xlabel="time of the peer / time of fastops (in brackets: how many measurements)")
    axis.set_xlim(right=axis.get_xlim()[1] * 1.6)
    _plain_numbers(axis.xaxis)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.legend(loc="upper right")
    axis.margins(y=0.01)
    axis.grid(axis="x", which="major", color="#dddddd")
    axis.set_axisbelow(True)
    return figure


def growth_figure(runs: Runs, device: str, names: list[str]) -> Any:
    import matplotlib.pyplot as plt

    columns = min(len(names), 3)
    lines = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.2 * lines + 0.8), squeeze=False, layout="constrained")
    styles = _styles(runs, device, names)
    for axis, name in zip(axes.flat, names):
        records = sorted(
            runs.select(growth=True, operation=name, device=device)
            + runs.select(operation=name, device=device, case="uniform", dtype="float32", direction="forward"),
            key=lambda r: r["elements"],
        )
        by_peer: dict[str, list] = defaultdict(list)
        for r in records:
            for peer, seconds in r["peers"].items():
                by_peer[peer].append((r["elements"] // r["features"], 1e3 * seconds))
        best = sorted(by_peer, key=lambda peer: by_peer[peer][-1][1])[:MOST_PEERS]
        for peer in best:
            axis.plot(*zip(*by_peer[peer]), label=peer, linewidth=1.2, markersize=3, **styles[peer])
        ours = [(r["elements"] // r["features"], 1e3 * r["seconds"]) for r in records]
        axis.plot(*zip(*ours), color="black", linewidth=2.4, marker="o", markersize=4, label="fastops")
        axis.set(xscale="log", yscale="log", title=_short(name), xlabel="rows", ylabel="ms")
        axis.grid(which="major", color="#dddddd")
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    entries = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    labels = ["fastops", *(name for name in styles if name in entries)]
    figure.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize=9)
    return figure


def _styles(runs: Runs, device: str, names: list[str]) -> dict[str, dict]:
    """The same color and marker for a peer in all panels."""
    import matplotlib

    there = {peer for name in names for r in runs.select(growth=True, operation=name, device=device) for peer in r["peers"]}
    colors = matplotlib.colormaps["tab20"].colors
    return {peer: {"color": colors[2 * k % 20 + 2 * k // 20], "marker": "sv^D<>PX"[k % 8]} for k, peer in enumerate(sorted(there))}


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# The README ----------------------------------------------------------------------------------------------------------


def readme_block(runs: Runs) -> str:
    """What stands between the markers."""
    machine = runs.machines[-1]
    lines = [
        f"How many times as long as fastops the best of {len(_peer_names(runs))} other ways takes, forward / backward, float32; above 1 fastops is faster.",
        f"{threads(machine)}, {machine['processor']} ({machine['kernels']}), commit {machine['commit']['id'][:10]}, `{MEASURE}`.",
        "`docs/benchmarks.md` has all numbers, plots, and what the cases are.",
    ]
    for device in runs.devices:
        cases = [case for case in README_CASES if runs.select(case=case, device=device)]
        rows = [
            [f"`{_short(name)}`", *(_pair(runs, operation=name, case=case, device=device, dtype="float32") for case in cases)]
            for name in README_OPERATIONS
            if runs.select(operation=name, device=device)
        ]
        lines += ["", markdown([f"on {device}", *cases], rows)]
    return "\n".join(lines) + "\n"


def _peer_names(runs: Runs) -> set[str]:
    return {name for r in runs.records for name in r["peers"]}


def _pair(runs: Runs, **wanted: Any) -> str:
    found = [runs.find(direction=direction, **wanted) for direction in ("forward", "backward")]
    return " / ".join((times(r["ratio"]) or "none") for r in found if r)


def fill(text: str, block: str) -> str:
    """A README with its performance table renewed."""
    if BEGIN not in text or END not in text:
        raise SystemExit(f"report: README.md must hold {BEGIN.strip()} and {END}")
    before, rest = text.split(BEGIN, 1)
    return before + BEGIN + block + END + rest.split(END, 1)[1]


# -------------------------------------------------------------------------------------------------------------------------


def measure(options: list[str]) -> Path:
    """A run of everything, as JSON; `options` are those of `pytest benchmarks`."""
    file = ROOT / "build" / "benchmarks" / "run.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", *options, f"--benchmark-json={file.relative_to(ROOT)}"]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"report: the benchmarks must pass, but pytest ended with {done.returncode}")
    return file


def main(arguments: Optional[list] = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="JSON of pytest-benchmark; without one, everything is measured now")
    parser.add_argument("--options", default="", help="of the `pytest benchmarks` that measures")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="for the page and its plots, docs by default")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="whose table is filled")
    options = parser.parse_args(arguments)
    if options.files and options.options:
        parser.error(f"with files nothing is measured, but got --options={options.options}")
    runs = Runs(options.files or [measure(shlex.split(options.options))])
    options.folder.mkdir(parents=True, exist_ok=True)
    images = draw(runs, options.folder)
    (options.folder / "benchmarks.md").write_text(page(runs, images))
    options.readme.write_text(fill(options.readme.read_text(), readme_block(runs)))
    print(f"report: wrote {options.folder / 'benchmarks.md'}, {len(images)} plots and the table of {options.readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
