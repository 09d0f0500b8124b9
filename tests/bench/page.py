# SPDX-License-Identifier: Apache-2.0
"""Figures as a table in the terminal, and as the page docs/benchmarks.md."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from figures import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table
from suite import Benchmark

_DISTRIBUTIONS = ("accelfn", "torch", "accelerate", "lightning-fabric", "torchdata")

_HEAD = """\
# Benchmarks

This page is written by `python -m nox -s bench`; run it to have the figures of your machine.

Contestants run in turn in one process: each round runs a block of every one,
in an order that turns round every other time.
A ratio is the median, over the rounds, of a contestant's time
over that of the first line's in the same round;
the middle half of the rounds lies between the two figures beside it.
Each process has one torch thread, the garbage collector is off while time is taken,
and the learning rate is 0, so that no weight drifts to where numbers are slow.
"""


def table(benchmark: Benchmark, figures: Sequence[Figure]) -> Table:
    """Return one benchmark's figures for the terminal."""
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
    found: Mapping[Benchmark, Sequence[Figure]], rounds: Mapping[Benchmark, int]
) -> str:
    """Return the page."""
    overview = [("benchmark", "accelfn", "target")]
    for benchmark, figures in found.items():
        contestant, _ = benchmark.targets[0]
        mine = next(f for f in figures if f.contestant == contestant)
        link = f"[{benchmark.title}](#{_anchor(benchmark.title)})"
        value = _number(mine.value, benchmark)
        overview.append((link, value, _verdict(benchmark, mine)))
    parts = [_HEAD, f"{machine()}\n", _markdown(overview)]
    for benchmark, figures in found.items():
        parts += [
            f"## {benchmark.title}\n",
            f"{benchmark.how} {rounds[benchmark]} rounds.\n",
            _markdown(cells(benchmark, figures)),
        ]
    return "\n".join(parts)


def machine() -> str:
    """Return when and on what the figures were taken."""
    versions = ", ".join(f"{name} {version(name)}" for name in _DISTRIBUTIONS)
    cores = len(os.sched_getaffinity(0))
    return (
        f"Taken on {datetime.now(tz=UTC):%Y-%m-%d}, on {platform.system()} "
        f"{platform.machine()} with {cores} cores: "
        f"Python {platform.python_version()}, {versions}."
    )


def cells(benchmark: Benchmark, figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Return a header and a row for each figure."""
    absolute = benchmark.figure == "itself"
    counted = any(figure.all_reduces is not None for figure in figures)
    told = (
        (benchmark.unit,) if absolute else (_COSTS[benchmark.figure], benchmark.figure)
    )
    header = ("", *told, "middle half", "target")
    rows = [header + (("all-reduces",) if counted else ())]
    for figure in figures:
        cost = f"{figure.milliseconds:.{0 if benchmark.figure == 'added' else 3}f}"
        row = (
            figure.contestant,
            *(() if absolute else (cost,)),
            _number(figure.value, benchmark),
            _middle_half(figure, benchmark),
            _verdict(benchmark, figure),
        )
        rows.append(row + ((f"{figure.all_reduces:g}",) if counted else ()))
    return rows


_COSTS = {"ratio": "ms a step", "added": "ms"}


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
    """Say whether a contestant reached its target; nothing of one that has none."""
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
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *body))
