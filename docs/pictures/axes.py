# SPDX-License-Identifier: Apache-2.0
"""Draw four ranks with two axes, and their collectives in one update."""

import runs
import svg
from torch import nn

import accelfn as af
from accelfn.testing import Entry

AXES = {"dp_replicate": 2, "dp_shard": 2}
SETUP = af.chain(af.shard_data(), af.wrap_fsdp(units=nn.Linear), af.clip_grad_norm(1.0))
RANKS = 4
TITLE = (
    "Four ranks with the axes dp_replicate and dp_shard, and the collectives of one update"
    " from top to bottom: ranks along dp_shard gather and scatter the parts of a model,"
    " ranks along dp_replicate average them"
)
TOP, ROW, LABELS = 112, 38, 212
LANES = [32 + 50 * rank for rank in range(RANKS)]


def draw() -> str:
    """Return the picture."""
    rows = _rows(runs.collectives(runs.run(SETUP, ranks=RANKS, axes=AXES)))
    bottom = TOP + ROW * len(rows)
    parts = [*_ranks(), *(svg.line(x, 90, x, bottom) for x in LANES)]
    words = []
    for i, entries in enumerate(rows):
        y = TOP + ROW * i
        end, lower = 0, 0
        for entry in entries:  # bars that would cross are drawn below each other
            lower = lower + 6 if entry.ranks[0] < end else 0
            parts += _bar(entry.ranks, y + lower)
            end = entry.ranks[-1]
        call, detail = _describe(entries[0])
        parts.append(svg.text(LABELS, y, call, size=11.5))
        parts.append(svg.text(LABELS, y + 14, detail, size=11, color="pale"))
        words.append(f"{call}, {detail}")
    described = "In this order: " + "; ".join(words) + "."
    return svg.picture(bottom + 4, parts, title=TITLE, words=described)


def _rows(found: list[Entry]) -> list[list[Entry]]:
    """Return the collectives in rows; calls of several groups at the same time share a row."""
    rows: dict[tuple[object, ...], list[Entry]] = {}
    for entry in found:
        key = entry.kind, entry.label, entry.shapes, entry.group
        rows.setdefault(key, []).append(entry)
    return [sorted(row, key=lambda entry: entry.ranks) for row in rows.values()]


def _ranks() -> list[str]:
    """Return the heads of the lanes: the ranks, and the part and the copy of the model."""
    shards = AXES["dp_shard"]
    parts = []
    for rank, x in enumerate(LANES):
        copy, part = divmod(rank, shards)
        parts.append(svg.box(x - 23, 40, 46, 40, color="blue"))
        label = svg.text(x, 57, f"rank {rank}", anchor="middle", weight="bold", size=11)
        parts += [label, svg.text(x, 72, f"part {part}", anchor="middle", size=11)]
        if part == 0:
            middle = x + 50 * (shards - 1) / 2
            label = f"copy {copy} of model"
            parts.append(svg.text(middle, 22, label, anchor="middle", size=11))
            parts.append(svg.line(x - 20, 30, x + 50 * (shards - 1) + 20, 30))
    parts.append(svg.text(LABELS, 22, "dp_replicate: across copies", size=12))
    parts.append(svg.text(LABELS, 64, "dp_shard: within one copy", size=12))
    return parts


def _bar(ranks: tuple[int, ...], y: float) -> list[str]:
    ends = LANES[ranks[0]], LANES[ranks[-1]]
    drawn = svg.line(ends[0], y, ends[1], y, color="orange", width=4)
    return [drawn, *(svg.dot(LANES[rank], y) for rank in ranks)]


def _describe(entry: Entry) -> tuple[str, str]:
    """Return a collective and its ranks, and its size and purpose."""
    kind = entry.kind.removesuffix("_single")
    ranks = f"along {entry.group}" if entry.group else "of all ranks"
    purpose = entry.label or "norm of the gradients"
    return f"{kind} {ranks}", f"{entry.num_bytes:,} bytes, {purpose}"
