# SPDX-License-Identifier: Apache-2.0
"""One step, line by line as `explain` prints it, on two ranks side by side."""

import re
from contextlib import redirect_stdout
from io import StringIO

import runs
import svg

import accelfn as af

SETUP = af.chain(
    af.shard_data(),
    af.wrap_ddp(),
    af.autocast("bf16"),
    af.accumulate(num_micro_batches=4),
    af.clip_grad_norm(1.0),
    af.ema(0.999),
)
RANKS = 2
TITLE = (
    "One step on two ranks, line by line: each takes half of the samples in four"
    " micro-batches, gradients are averaged over the ranks once, and all after it is the"
    " same on both"
)
WIDE, EDGE, GAP, LANE = 760, 20, 20, 350
ROW, HIGH = 56, 24


def lines() -> list[str]:
    """Return what `explain` prints, below its first line."""
    with redirect_stdout(StringIO()) as printed:
        SETUP.explain()
    return [each.strip() for each in printed.getvalue().splitlines()[1:]]


def draw() -> str:
    """Return the picture."""
    found = runs.run(SETUP, ranks=RANKS)
    parts = [
        svg.text(_left(rank), 24, f"rank {rank}", weight="bold", size=13)
        for rank in range(RANKS)
    ]
    words, y = [], 44.0
    for said in lines():
        parts.append(svg.text(EDGE, y + 10, said, font=svg.MONO, size=11.5))
        if said.startswith("# engine"):
            for entry in runs.collectives(found):
                what = f"{entry.kind}, {entry.num_bytes:,} bytes: the ranks meet here"
                span = _left(RANKS - 1) + LANE - EDGE
                parts.append(svg.box(EDGE, y + 18, span, HIGH, what, fill=svg.ORANGE))
                words.append(f"{said}: {what}")
                y += HIGH + 4
            y += ROW - HIGH - 4
            continue
        for rank in range(RANKS):
            parts += _boxes(said, found.results[rank], _left(rank), y + 18)
        words.append(said)
        y += ROW
    return svg.picture(WIDE, y + 4, parts, title=TITLE, words=". ".join(words) + ".")


def _left(rank: int) -> float:
    return EDGE + rank * (LANE + GAP)


def _boxes(said: str, parts: list[list[int]], x: float, y: float) -> list[str]:
    """Return what a rank does in a line: with its samples, or with what all have alike."""
    if said.startswith("plan"):
        first = parts[0][0] - runs.SAMPLES
        last = parts[-1][-1] - runs.SAMPLES
        return [svg.box(x, y, LANE, HIGH, f"samples {first} to {last} of the batch")]
    if said.startswith("metrics"):
        wide = (LANE - 4 * (len(parts) - 1)) / len(parts)
        return [
            svg.box(
                x + i * (wide + 4),
                y,
                wide,
                HIGH,
                f"{', '.join(str(sample - runs.SAMPLES) for sample in part)}",
            )
            for i, part in enumerate(parts)
        ]
    done = re.findall(r"(\w+)(?:\.\w+)?\(", said)[0]
    return [svg.box(x, y, LANE, HIGH, f"{done}: the same on each rank", fill=svg.GREEN)]
