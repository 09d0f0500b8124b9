# SPDX-License-Identifier: Apache-2.0
"""Four ranks with two axes, and which of them meet when in one update."""

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
WIDE, TOP, ROW = 760, 130, 30
LANES = [40 + 70 * rank for rank in range(RANKS)]


def draw() -> str:
    """Return the picture."""
    rows = _rows(runs.collectives(runs.run(SETUP, ranks=RANKS, axes=AXES)))
    bottom = TOP + ROW * len(rows)
    parts = [*_ranks(), *(svg.line(x, 110, x, bottom) for x in LANES)]
    words = []
    for i, together in enumerate(rows):
        y = TOP + ROW * i
        ends, lower = 0, 0
        for entry in together:  # those that cross are drawn below each other
            lower = lower + 6 if entry.ranks[0] < ends else 0
            parts += _bar(entry.ranks, y + lower)
            ends = entry.ranks[-1]
        said = _said(together[0])
        parts.append(svg.text(300, y + 6, said, size=12))
        words.append(said)
    told = "In turn: " + "; ".join(words) + "."
    return svg.picture(WIDE, bottom + 4, parts, title=TITLE, words=told)


def _rows(found: list[Entry]) -> list[list[Entry]]:
    """Return the collectives, those that groups of ranks make beside each other together."""
    rows: dict[tuple[object, ...], list[Entry]] = {}
    for entry in found:
        key = entry.kind, entry.label, entry.shapes, entry.group
        rows.setdefault(key, []).append(entry)
    return [sorted(row, key=lambda entry: entry.ranks) for row in rows.values()]


def _ranks() -> list[str]:
    """Return the heads of the lanes: ranks, and who holds what along which axis."""
    shards = AXES["dp_shard"]
    parts = []
    for rank, x in enumerate(LANES):
        copy, part = divmod(rank, shards)
        parts.append(svg.box(x - 30, 60, 60, 40, fill=svg.BLUE))
        parts.append(svg.text(x, 77, f"rank {rank}", anchor="middle", weight="bold"))
        parts.append(svg.text(x, 93, f"part {part}", anchor="middle", size=11))
        if part == 0:
            middle = x + 70 * (shards - 1) / 2
            copied = f"copy {copy} of the model"
            parts.append(svg.text(middle, 44, copied, anchor="middle", size=11))
            parts.append(svg.line(x - 30, 50, x + 70 * (shards - 1) + 30, 50))
    parts.append(svg.text(300, 44, "along dp_replicate: other copies", size=12))
    parts.append(svg.text(300, 84, "along dp_shard: other parts of one copy", size=12))
    return parts


def _bar(ranks: tuple[int, ...], y: float) -> list[str]:
    ends = LANES[ranks[0]], LANES[ranks[-1]]
    drawn = svg.line(ends[0], y, ends[1], y, ink=svg.ORANGE, wide=4)
    return [drawn, *(svg.dot(LANES[rank], y) for rank in ranks)]


def _said(entry: Entry) -> str:
    kind = entry.kind.removesuffix("_single")
    among = f"along {entry.group}" if entry.group else "of all ranks"
    label = f" ({entry.label})" if entry.label else " (norm of the gradients)"
    return f"{kind} {among}, {entry.num_bytes:,} bytes{label}"
