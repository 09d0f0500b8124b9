# SPDX-License-Identifier: Apache-2.0
"""Draw bars of the time per step, from the figures in docs/benchmarks.md."""

import re
import textwrap
from pathlib import Path

import svg

PAGE = Path(__file__).parents[1] / "benchmarks.md"
SECTION = "## A step on batches in memory"
TITLE = (
    "Bars: time per step of three small models with accelfn, Accelerate and Lightning"
    " Fabric. A line shows the time of a hand-written loop"
)
LEFT = 120
COLORS = {"accelfn": "orange"}


def ratios() -> dict[str, dict[str, float]]:
    """Return the time of a step over that of the hand-written loop, by model and library."""
    rows: dict[str, dict[str, float]] = {}
    row = re.compile(r"^\| (\w+): ([\w ]+) \| [\d.,]+ \| ([\d.]+) \|", re.MULTILINE)
    for model, library, ratio in row.findall(_section()):
        rows.setdefault(model, {})[library] = float(ratio)
    return rows


def _section() -> str:
    return PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]


def _conditions() -> str:
    """Return when and where the section was measured."""
    lines = _section().splitlines()
    return next(line for line in lines if line.startswith("Taken on"))


def draw() -> str:
    """Return the picture."""
    models = ratios()
    scale = (svg.WIDTH - LEFT - 50) / max(
        max(times.values()) for times in models.values()
    )
    by_hand = LEFT + scale
    parts, words, y = [], [], 30.0
    for model, times in models.items():
        parts.append(svg.text(svg.EDGE, y + 12, model, weight="bold"))
        y += 20
        for library, ratio in times.items():
            if library == "by hand":
                continue
            color = COLORS.get(library, "grey")
            parts.append(svg.text(LEFT - 8, y + 13, library, anchor="end"))
            parts.append(svg.box(LEFT, y, scale * ratio, 18, color=color))
            end = LEFT + scale * max(ratio, 1) + 6
            parts.append(svg.text(end, y + 13, f"{ratio:.2f}"))
            words.append(f"{model}, {library}: {ratio:.2f}")
            y += 23
        y += 8
    parts.append(svg.line(by_hand, 26, by_hand, y - 6, color="ink"))
    parts.append(svg.text(by_hand, 18, "hand-written loop: 1.00", anchor="middle"))
    caption = "Time of a step, relative to a hand-written loop. Less is better."
    parts.append(svg.text(svg.EDGE, y + 12, caption, size=11))
    y += 12
    for line in textwrap.wrap(_conditions(), 66):
        y += 15
        parts.append(svg.text(svg.EDGE, y, line, size=10.5, color="pale"))
    described = f"Relative to a hand-written loop: {'; '.join(words)}. {_conditions()}"
    return svg.picture(y + 10, parts, title=TITLE, words=described)
