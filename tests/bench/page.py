# SPDX-License-Identifier: Apache-2.0
"""Format results of benchmarks: as tables for the terminal, and as docs/benchmarks.md."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from figures import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table
from suite import SUITE, Benchmark

_DISTRIBUTIONS = ("accelfn", "torch", "accelerate", "lightning-fabric", "torchdata")

_HEAD = """\
# Benchmarks

`python -m nox -s bench` writes this page. Run it to measure on your own machine.
To measure only some sections again, name them: `python -m nox -s bench -- step`.

The libraries run in turns in one process. Each round runs a block of steps of every library,
and every second round reverses the order.
A ratio compares the time of a library with the time of the first line in the same round. The
table shows the median over the rounds, and the range of the middle half of the rounds.
Each process has one torch thread. The garbage collector is off during a measurement.
The learning rate is 0, so that no parameter becomes a number that is slow to compute with.

![Bars: time per step of three small models with accelfn, Accelerate and \
Lightning Fabric. A line shows the time of a hand-written loop](pictures/benchmarks.svg)
"""


def table(benchmark: Benchmark, figures: Sequence[Figure]) -> Table:
    """Return a table with the figures of a benchmark, for the terminal."""
    made = Table(
        title=benchmark.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    header, *rows = cells(benchmark, figures)
    made.add_column(header[0], no_wrap=True)
    for name in header[1:]:
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def page(
    found: Mapping[Benchmark, Sequence[Figure]],
    rounds: Mapping[Benchmark, int],
    before: str = "",
) -> str:
    """Return the text of the page; sections that did not run are copied from `before`."""
    rows, sections = _parts(before)
    for benchmark, figures in found.items():
        contestant, _ = benchmark.targets[0]
        mine = next(f for f in figures if f.contestant == contestant)
        link = f"[{benchmark.title}](#{_anchor(benchmark.title)})"
        value = _number(mine.value, benchmark)
        row = _row((link, value, _verdict(benchmark, mine)))
        rows[benchmark.title] = row
        sections[benchmark.title] = (
            f"## {benchmark.title}\n\n"
            f"{benchmark.how} {rounds[benchmark]} rounds.\n\n"
            f"{_markdown(cells(benchmark, figures))}\n{machine()}\n"
        )
    names = [each.title for each in SUITE]
    # benchmarks of an accelerator follow those of the CPU
    listed = [
        *(title for title in names if title in sections),
        *(title for title in sections if title not in names),
    ]
    overview = _markdown([("benchmark", "accelfn", "target")])
    overview += "".join(rows[title] for title in listed)
    return "\n".join([_HEAD, overview, *(sections[title] for title in listed)])


def _parts(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Split a page into the rows of its overview and its sections, by title."""
    rows = {
        m[1]: m[0] for m in re.finditer(r"^\| \[(.+?)\]\(#.*\n", text, re.MULTILINE)
    }
    pieces = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    sections = {each.partition("\n")[0][3:]: f"{each.rstrip()}\n" for each in pieces}
    return rows, sections


def machine() -> str:
    """Return a sentence: when the benchmarks ran, on what machine, with what versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in _DISTRIBUTIONS)
    cores = len(os.sched_getaffinity(0))
    return (
        f"Taken on {datetime.now(tz=UTC):%Y-%m-%d}, on {platform.system()} "
        f"{platform.machine()} with {cores} cores: "
        f"Python {platform.python_version()}, {versions}."
    )


def cells(benchmark: Benchmark, figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Return the cells of a table: a header, and a row for each figure."""
    absolute = benchmark.figure == "itself"
    counted = [
        name
        for name in _COUNTED
        if any(getattr(figure, name) is not None for figure in figures)
    ]
    cost = _COSTS[benchmark.figure] if benchmark.unit == "ms" else benchmark.unit
    told = (benchmark.unit,) if absolute else (cost, benchmark.figure)
    header = ("", *told, "middle half", "target")
    rows = [header + tuple(_COUNTED[name][0] for name in counted)]
    for figure in figures:
        cost = f"{figure.milliseconds:.{0 if benchmark.figure == 'added' else 3}f}"
        row = (
            figure.contestant,
            *(() if absolute else (cost,)),
            _number(figure.value, benchmark),
            _middle_half(figure, benchmark),
            _verdict(benchmark, figure),
        )
        found = [(getattr(figure, name), _COUNTED[name][1]) for name in counted]
        rows.append(
            (*row, *("" if value is None else f"{value:{how}}" for value, how in found))
        )
    return rows


_COUNTED = {
    "all_reduces": ("all-reduces", "g"),
    "num_bytes": ("bytes", ",.0f"),
    "foreseen_bytes": ("predicted bytes", ",.0f"),
    "foreseen": ("predicted ms", ".3f"),
}
"""Columns of only some benchmarks: the heading, and the format of the numbers."""
_COSTS = {"ratio": "ms a step", "added": "ms", "itself": "ms"}


def _number(value: float, benchmark: Benchmark) -> str:
    match benchmark.figure:
        case "added":
            return f"{value:.0f} ms"
        case "itself":
            return f"{value:.2f} {benchmark.unit}"
        case "ratio":
            return f"{value:.3f}"


def _middle_half(figure: Figure, benchmark: Benchmark) -> str:
    digits = 0 if benchmark.figure == "added" else 2
    unit = "" if benchmark.figure == "ratio" else f" {benchmark.unit}"
    return f"{figure.low:.{digits}f} to {figure.high:.{digits}f}{unit}"


def _verdict(benchmark: Benchmark, figure: Figure) -> str:
    """Return whether a contestant met its target, as text; "" without a target."""
    target = dict(benchmark.targets).get(figure.contestant)
    if target is None:
        return ""
    met = "met" if figure.value <= target else "not met"
    unit = "" if benchmark.figure == "ratio" else f" {benchmark.unit}"
    return f"≤ {target:g}{unit}, {met}"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    header, *body = rows
    rule = ("---", *["---:"] * (len(header) - 1))
    return "".join(map(_row, (header, rule, *body)))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"
