# SPDX-License-Identifier: Apache-2.0
"""A chart of traffic: milliseconds per update against the bandwidth of a link.

Each line has its own dash and marker, so that readers do not need colors. A description in the
picture, and for the caller, has the same numbers in words.
"""

import os
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import attrs
from matplotlib import rc_context
from matplotlib.figure import Figure

from accelfn.testing import Link, Traffic
from tests.internals import Algorithm

_MEGABIT = 125_000
_COLOURS = "#0072b2", "#b34700", "#00735a", "#8a3a6b", "#4d4d4d", "#000000"
_DASHES = "-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3))
_MARKERS = "o", "s", "^", "D", "v", "P"


def draw_traffic(
    methods: Mapping[str, Traffic],
    path: str | os.PathLike[str],
    *,
    ranks: int,
    link: Link,
    megabits: Iterable[float] = (1, 3, 10, 30, 100, 300, 1000),
    algorithm: Algorithm = "ring",
    compute: float = 0.0,
    overlap: float = 0.0,
    measured: Mapping[str, Mapping[float, float]] | None = None,
) -> str:
    """Draw milliseconds per update against bandwidth, a line a method, and return it in words.

    In an SVG, the text is also the title and the description of the picture.

    Args:
        methods: the traffic of each method, by name.
        path: the file of the picture; its suffix is the format, such as .svg or .png.
        ranks: the number of ranks.
        link: the link between the ranks. Its latency and overhead are used; its bandwidth is not.
        megabits: the bandwidths, in megabits per second.
        algorithm: as in `Traffic.seconds`.
        compute: as in `Traffic.seconds`.
        overlap: as in `Traffic.seconds`.
        measured: measured milliseconds, by method and megabits per second; drawn as markers.
    """
    widths, marks = list(megabits), {} if measured is None else measured

    def milliseconds(traffic: Traffic, width: float) -> float:
        one = attrs.evolve(link, bandwidth=width * _MEGABIT)
        taken = traffic.seconds(
            one, ranks=ranks, algorithm=algorithm, compute=compute, overlap=overlap
        )
        return 1000 * taken

    lines = {
        name: {width: milliseconds(traffic, width) for width in widths}
        for name, traffic in methods.items()
    }
    title = (
        f"Milliseconds per update against the bandwidth of the link, on {ranks} ranks"
    )
    words = _in_words(title, lines, marks)
    _save(Path(path), title, words, lines, marks)
    return words


def _in_words(
    title: str,
    lines: Mapping[str, Mapping[float, float]],
    marks: Mapping[str, Mapping[float, float]],
) -> str:
    widths = list(next(iter(lines.values())))
    ends = list(dict.fromkeys([min(widths), max(widths)]))
    told = [
        f"At {end:g} Mbit/s: "
        + ", ".join(f"{name} {line[end]:.3g}" for name, line in lines.items())
        for end in ends
    ]
    for width in sorted({width for mark in marks.values() for width in mark}):
        found = [f"{name} {m[width]:.3g}" for name, m in marks.items() if width in m]
        told.append(f"Measured at {width:g} Mbit/s: {', '.join(found)}")
    return ". ".join([title, *told]) + "."


def _save(
    path: Path,
    title: str,
    words: str,
    lines: Mapping[str, Mapping[float, float]],
    marks: Mapping[str, Mapping[float, float]],
) -> None:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "accelfn"}):
        drawn = Figure(figsize=(5, 3.9), layout="constrained")
        _draw(drawn.add_subplot(), lines, marks)
        kind = path.suffix.removeprefix(".") or "svg"
        # without a date, so that the same traffic always creates the same file
        told = {"Date": None} if kind == "svg" else {}
        drawn.savefig(path, format=kind, facecolor="white", metadata=told)
    if kind == "svg":
        _tell(path, title, words)


def _draw(
    axes: Any,
    lines: Mapping[str, Mapping[float, float]],
    marks: Mapping[str, Mapping[float, float]],
) -> None:
    styles = zip(cycle(_COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)
    for (name, line), (colour, dash, marker) in zip(
        lines.items(), styles, strict=False
    ):
        widths, taken = list(line), list(line.values())
        style = {"color": colour, "linestyle": dash, "linewidth": 1.6}
        axes.plot(widths, taken, label=name, **style)
        found = marks.get(name, {})
        axes.scatter(list(found), list(found.values()), color=colour, marker=marker)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("bandwidth of the link, Mbit/s")
    axes.set_ylabel("ms per update")
    axes.legend(handlelength=3.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="#d0d0d0", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _tell(path: Path, title: str, words: str) -> None:
    """Add a title and a description to an SVG file, for screen readers."""
    text = path.read_text(encoding="utf-8")
    start = text.index("<svg")
    opened = text.index(">", start) + 1
    head = text[start:opened].replace(
        "<svg", '<svg role="img" aria-labelledby="t d"', 1
    )
    said = f'\n <title id="t">{title}</title>\n <desc id="d">{escape(words)}</desc>'
    path.write_text(text[:start] + head + said + text[opened:], encoding="utf-8")
