# SPDX-License-Identifier: Apache-2.0
"""Where a parameter's elements lie over the ranks, and how they go from one place to another.

Of each parameter, flat, a rank has one run of elements: its rows in a state, and what ZeRO cut
for it in DeepSpeed. Both follow from shapes alone, so every rank knows what every other one has,
and nothing but elements crosses the ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from accelfn.collectives import all_to_all
from accelfn.world import World

Run: TypeAlias = tuple[int, int]
"""Where a rank's elements of a parameter begin, and where they end."""
Runs: TypeAlias = Mapping[str, Sequence[Run]]
"""By parameter, the run of each rank."""

_AT_ONCE = 2**25
"""Bytes of whole tensors that are moved in one call."""


def cut_of(run: Run, within: Run) -> Run:
    """Return what of a run lies within another; nothing is an empty run."""
    begin = max(run[0], within[0])
    return begin, max(begin, min(run[1], within[1]))


def evenly(count: int, part: int, ranks: int) -> list[Run]:
    """Return the runs of ranks that have so many elements each, of a count in all."""
    return [cut_of((r * part, (r + 1) * part), (0, count)) for r in range(ranks)]


def moved(
    pieces: Mapping[str, torch.Tensor],
    have: Runs,
    want: Runs,
    among: World,
    *,
    label: str,
) -> dict[str, torch.Tensor]:
    """Return the elements of this rank's runs, in memory of their own.

    Args:
        pieces: by name, flat, what this rank has; of one dtype on all ranks.
        have: which elements those are, on each rank. Of what several have, the first sends.
        want: which each rank is to have.
        among: these ranks; a collective.
        label: what they are doing.
    """
    found: dict[str, torch.Tensor] = {}
    for names in _by_calls(pieces, have):
        sent = [
            {
                name: _overlap(pieces[name], have[name], among.rank, want[name][to])
                for name in names
            }
            for to in range(among.size)
        ]
        got = all_to_all(sent, among, label=label)
        for name in names:
            parts = [each[name] for each in got if each[name].numel()]
            found[name] = torch.cat(parts) if parts else got[0][name]
    return found


def _overlap(
    piece: torch.Tensor, runs: Sequence[Run], rank: int, want: Run
) -> torch.Tensor:
    """Return what this rank gives of its piece to who wants a run."""
    begin, end = runs[rank]
    for earlier in runs[:rank]:  # who has it too, and sends it
        if earlier[0] < earlier[1] and begin < end:
            begin = max(begin, min(end, earlier[1]))
    low, high = cut_of(want, (begin, end))
    return (
        piece[low - runs[rank][0] : high - runs[rank][0]] if low < high else piece[:0]
    )


def _by_calls(pieces: Mapping[str, torch.Tensor], have: Runs) -> Iterator[list[str]]:
    """Yield names of what goes in one call, the same on all ranks."""
    names: list[str] = []
    total = 0
    for name, piece in pieces.items():
        size = have[name][-1][1] * piece.element_size()
        if names and total + size > _AT_ONCE:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
