# SPDX-License-Identifier: Apache-2.0
"""What a step costs beside a loop by hand, as docs/benchmarks.md has measured it."""

import re
from pathlib import Path

import svg

PAGE = Path(__file__).parents[1] / "benchmarks.md"
SECTION = "## A step on batches that are there already"
TITLE = (
    "Bars of the time of a step of three small models with accelfn, Accelerate and"
    " Lightning Fabric, beside a line at that of a loop by hand"
)
WIDE, LEFT, SCALE = 760, 250, 190
FILLS = {"accelfn": svg.ORANGE}


def ratios() -> dict[str, dict[str, float]]:
    """Return by model and contestant the time of a step over that of the loop by hand."""
    section = PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    found: dict[str, dict[str, float]] = {}
    row = re.compile(r"^\| (\w+): ([\w ]+) \| [\d.,]+ \| ([\d.]+) \|", re.MULTILINE)
    for model, contestant, ratio in row.findall(section):
        found.setdefault(model, {})[contestant] = float(ratio)
    return found


def taken() -> str:
    """Return when and where the section was measured, as it says."""
    section = PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    return next(each for each in section.splitlines() if each.startswith("Taken on"))


def draw() -> str:
    """Return the picture."""
    parts, words, y = [], [], 46.0
    for model, contestants in ratios().items():
        parts.append(svg.text(20, y + 13, model, weight="bold"))
        for contestant, ratio in contestants.items():
            if contestant == "by hand":
                continue
            fill = FILLS.get(contestant, svg.GREY)
            parts.append(svg.text(LEFT - 10, y + 13, contestant, anchor="end"))
            parts.append(svg.box(LEFT, y, SCALE * ratio, 18, fill=fill))
            beyond = LEFT + SCALE * max(ratio, 1) + 6
            parts.append(svg.text(beyond, y + 13, f"{ratio:.2f}"))
            words.append(f"{model}, {contestant}: {ratio:.2f}")
            y += 23
        y += 12
    hand = LEFT + SCALE
    parts.append(svg.line(hand, 32, hand, y - 10, ink=svg.INK))
    parts.append(svg.text(hand, 24, "a loop by hand: 1.00", anchor="middle"))
    when, _, versions = taken().partition(": ")
    parts.append(
        svg.text(20, y + 10, f"Time of a step; less is better. {when}.", size=11)
    )
    parts.append(svg.text(20, y + 26, versions, size=11, ink=svg.PALE))
    told = f"Over the time of a loop by hand: {'; '.join(words)}. {taken()}"
    return svg.picture(WIDE, y + 38, parts, title=TITLE, words=told)
