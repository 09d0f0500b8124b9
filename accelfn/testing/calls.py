# SPDX-License-Identifier: Apache-2.0
"""A call: what one rank posts when it enters a collective, and how calls of ranks compare."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

_HERE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


@attrs.define(kw_only=True, eq=False)
class Call:
    """One rank's part in a collective.

    Attributes:
        rank: who called.
        index: how many collectives this rank called before.
        kind: torch's name of it, as "all_reduce".
        sends: copies of what this rank gives.
        fills: the tensors that the result is written to.
        op: the reduction, or None.
        root: the one rank that sends or receives, or None.
        peer: the other rank of a send or recv; None for any.
        tag: that of a send or recv.
        label: what the ranks are doing, as accelfn's collectives say.
        step: the update at which a state's step called, where one did.
        site: file and line of the user's code.
        at: the rank's virtual time in seconds.
    """

    rank: int
    kind: str
    index: int = 0
    sends: tuple[torch.Tensor, ...] = ()
    fills: tuple[torch.Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    label: str | None = None
    step: int | None = None
    site: str = ""
    at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """How much this rank gives."""
        return sum(each.numel() * each.element_size() for each in self.sends)

    def agreed(self) -> tuple[Any, ...]:
        """Return what must be the same on all ranks, in the order of `AGREED`."""
        common = [(each.shape, each.dtype) for each in self._common()]
        return self.kind, self.op, self.root, common, self.label

    def row(self) -> tuple[str, ...]:
        """Return what a table shows of it."""
        shapes = self.shapes
        return (
            f"#{self.index} {self.kind}",
            " ".join(
                each
                for each in (
                    self.op,
                    None if self.root is None else f"root {self.root}",
                    None if self.peer is None else f"rank {self.peer}",
                    shapes,
                )
                if each
            ),
            "" if self.label is None else repr(self.label),
            "" if self.step is None else f"update {self.step}",
            self.site,
        )

    @property
    def shapes(self) -> str:
        """Shapes and dtypes of the part that ranks have in common."""
        return ", ".join(shown(each) for each in self._common())

    def _common(self) -> tuple[torch.Tensor, ...]:
        if self.kind.startswith("all_to_all"):  # compared pair by pair
            return ()
        return self.sends if self.kind in _ONE_SENT else self.fills


AGREED = ("kind", "reduction", "root", "shapes", "label")
_ONE_SENT = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "send"),
        *("all_gather", "all_gather_into_tensor", "gather"),
    }
)


def shown(tensor: torch.Tensor) -> str:
    """Name a tensor's shape and dtype."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def differing(calls: Iterable[Call]) -> list[str]:
    """Return the names of what must be the same in these calls and is not."""
    first, *others = [call.agreed() for call in calls]
    return [
        name
        for i, name in enumerate(AGREED)
        if any(each[i] != first[i] for each in others)
    ]


def table(rows: Mapping[int, tuple[str, ...]]) -> str:
    """Return one aligned line a rank."""
    width = max(len(row) for row in rows.values())
    padded = {rank: (*row, *[""] * (width - len(row))) for rank, row in rows.items()}
    widths = [max(len(row[i]) for row in padded.values()) for i in range(width)]
    lines: list[str] = []
    for rank, row in padded.items():
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w]
        lines.append(f"  rank {rank}: {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def site() -> str:
    """Return file and line of the innermost frame that is neither torch's nor accelfn's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_HERE, _TORCH)) and not path.startswith(
            ("<attrs", "<frozen")
        ):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
