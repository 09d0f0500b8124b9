# SPDX-License-Identifier: Apache-2.0
"""Draw one step, line by line as `explain` prints it, on two ranks."""

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
    "One step on two ranks, line by line: each rank takes half of the samples in four"
    " micro-batches, gradients are averaged over the ranks once, and the lines after the"
    " average are the same on both ranks"
)
GAP = 10
LANE = (svg.WIDTH - 2 * svg.EDGE - GAP) / RANKS
HEIGHT, LINE_HEIGHT, MAX_CHARS = 24, 14, 56


def lines() -> list[str]:
    """Return the lines that `explain` prints, without the first."""
    with redirect_stdout(StringIO()) as printed:
        SETUP.explain()
    return [line.strip() for line in printed.getvalue().splitlines()[1:]]


def draw() -> str:
    """Return the picture."""
    run = runs.run(SETUP, ranks=RANKS)
    parts = [
        svg.text(_left(rank), 20, f"rank {rank}", weight="bold", size=13)
        for rank in range(RANKS)
    ]
    words, y = [], 42.0
    for code in lines():
        for part in _wrap(code):
            parts.append(svg.text(svg.EDGE, y, part, font=svg.MONO, size=10.5))
            y += LINE_HEIGHT
        y -= 6
        if code.startswith("# engine"):
            for entry in runs.collectives(run):
                label = (
                    f"{entry.kind} of {entry.num_bytes:,} bytes: the ranks communicate"
                )
                width = svg.WIDTH - 2 * svg.EDGE
                parts.append(svg.box(svg.EDGE, y, width, HEIGHT, label, color="orange"))
                words.append(f"{code}: {label}")
                y += HEIGHT + 4
            y += 16
            continue
        for rank in range(RANKS):
            parts += _boxes(code, run.results[rank], _left(rank), y)
        words.append(code)
        y += HEIGHT + 20
    legend = "blue: samples of one rank; green: the same on both ranks"
    parts.append(svg.text(svg.EDGE, y, legend, size=11, color="pale"))
    return svg.picture(y + 12, parts, title=TITLE, words=". ".join(words) + ".")


def _left(rank: int) -> float:
    return svg.EDGE + rank * (LANE + GAP)


def _wrap(code: str) -> list[str]:
    """Return a line of code as lines that fit, divided after spaces and brackets."""
    wrapped = [""]
    for piece in re.findall(r"[^ (]*[ (]?", code):
        if len(wrapped[-1] + piece.rstrip()) > MAX_CHARS:
            wrapped.append("    ")
        wrapped[-1] += piece
    return wrapped


def _boxes(code: str, micro_batches: list[list[int]], x: float, y: float) -> list[str]:
    """Return the boxes of a line on one rank: its samples, or the transform that acts."""
    shares = [[sample - runs.SAMPLES for sample in part] for part in micro_batches]
    if code.startswith("plan"):
        samples = f"samples {shares[0][0]} to {shares[-1][-1]}"
        return [svg.box(x, y, LANE, HEIGHT, samples)]
    if code.startswith("metrics"):
        width = (LANE - 4 * (len(shares) - 1)) / len(shares)
        return [
            svg.box(x + i * (width + 4), y, width, HEIGHT, ", ".join(map(str, share)))
            for i, share in enumerate(shares)
        ]
    name = re.findall(r"(\w+)(?:\.\w+)?\(", code)[0]
    return [svg.box(x, y, LANE, HEIGHT, name, color="green")]
