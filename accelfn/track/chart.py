# SPDX-License-Identifier: Apache-2.0
"""The curves of a run, drawn by matplotlib: one as SVG for a page, or all in one picture.

Colours of the SVG are those of the page around it, which has a light and a dark dress. One
curve is in one diagram, so that no colour tells curves apart, and what is not finite has a
mark of another shape.
"""

import math
import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from accelfn.track.log import Log
from accelfn.track.packages import package

_INK, _LINE, _MARK, _GRID = "#010101", "#020202", "#030303", "#040404"
_OF_THE_PAGE = {
    _INK: "currentColor",
    _LINE: "var(--line)",
    _MARK: "var(--mark)",
    _GRID: "var(--grid)",
}
_ON_WHITE = {_INK: "#1a1a1a", _LINE: "#0072b2", _MARK: "#b34700", _GRID: "#d0d0d0"}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_FIRST = (
    re.compile("loss"),
    re.compile(r"\blr\b|learning.rate"),
    re.compile("grad.?norm"),
    re.compile("per.second|throughput|speed"),
    re.compile("memory"),
)
_RATE = "updates per second"
_LARGE = 1e300


@attrs.frozen
class Curve:
    """A metric over the steps.

    Attributes:
        name: of the metric.
        points: steps and values, finite or not.
        resumed: the last step before each resume.
    """

    name: str
    points: dict[int, float]
    resumed: tuple[int, ...] = ()

    @property
    def finite(self) -> dict[int, float]:
        """The points that have a place in a diagram."""
        return {step: y for step, y in self.points.items() if math.isfinite(y)}


def curves(log: Log) -> list[Curve]:
    """Return what to draw: loss, lr, gradient norm, throughput and memory first.

    Without a metric of throughput it is taken from the times of the records.
    """
    points = dict(log.metrics)
    if not any(_FIRST[3].search(name.lower()) for name in points):
        rate = _rate(log)
        points |= {_RATE: rate} if rate else {}
    order = {name: i for i, name in enumerate(points)}
    ordered = sorted(points, key=lambda name: (_place(name), order[name]))
    return [Curve(name, points[name], log.resumed) for name in ordered]


def _place(name: str) -> int:
    found = (i for i, each in enumerate(_FIRST) if each.search(name.lower()))
    return next(found, len(_FIRST))


def _rate(log: Log) -> dict[int, float]:
    """Return updates per second between records that no resume parts."""
    steps, found = list(log.times), dict[int, float]()
    for last, step in pairwise(steps):
        seconds = log.times[step] - log.times[last]
        if seconds > 0 and not any(last <= each < step for each in log.resumed):
            found[step] = (step - last) / seconds
    return found


def as_svg(curve: Curve, number: int) -> str:
    """Return a curve as an `<svg>` element; `number` tells it from others on its page."""
    figure, (axes,) = _figure(1)
    text = StringIO()
    with _style():
        _draw(axes, curve, {each: each for each in _OF_THE_PAGE})
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    for colour, of_the_page in _OF_THE_PAGE.items():
        drawn = drawn.replace(colour, of_the_page)
    drawn = re.sub(r'(\bid="|url\(#|href="#)', rf"\1c{number}-", drawn)
    return drawn.replace("<svg", '<svg aria-hidden="true"', 1)


def save_png(path: Path, drawn: list[Curve]) -> None:
    """Write all curves into one picture."""
    figure, axes = _figure(len(drawn))
    with _style():
        for place, curve in zip(axes, drawn, strict=True):
            _draw(place, curve, _ON_WHITE)
            title = curve.name.encode("utf-8", "replace").decode()
            place.set_title(title, parse_math=False)
        figure.savefig(path, format="png", dpi=150, facecolor="white")


def _figure(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with so many diagrams, at most two in a row."""
    columns = min(2, count)
    rows = math.ceil(count / columns)
    made = package("matplotlib.figure", extra="report").Figure
    figure = made(figsize=(6 * columns, 3 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _style() -> Any:
    """Return a context in which text stays text, and the same run gives the same bytes."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "accelfn"}
    return package("matplotlib", extra="report").rc_context(settings)


def _unit(curve: Curve) -> float:
    """Return what heights are divided by: differences of the largest floats overflow."""
    largest = max(map(abs, curve.finite.values()), default=0)
    return _LARGE if largest > _LARGE else 1


def _draw(axes: Any, curve: Curve, colours: dict[str, str]) -> None:
    steps, values = list(curve.points), list(curve.points.values())
    unit = _unit(curve)
    heights = [y / unit if math.isfinite(y) else math.nan for y in values]
    alone = "o" if len(curve.finite) == 1 else "none"
    (line,) = axes.plot(steps, heights, color=colours[_LINE], linewidth=1.6)
    line.set(gid="curve", marker=alone)
    wrong = [step for step, y in curve.points.items() if not math.isfinite(y)]
    if wrong:
        foot, at_the_foot = [0.03] * len(wrong), axes.get_xaxis_transform()
        axes.scatter(
            wrong, foot, marker="x", color=colours[_MARK], transform=at_the_foot
        )
    for step in curve.resumed:
        axes.axvline(step, color=colours[_INK], linestyle="--", linewidth=0.8)
    axes.grid(color=colours[_GRID], linewidth=0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step", color=colours[_INK])
    if unit != 1:
        axes.set_ylabel(f"in units of {unit:g}", color=colours[_INK])
    axes.tick_params(colors=colours[_INK])
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(colours[_INK])
    axes.spines[["top", "right"]].set_visible(False)
