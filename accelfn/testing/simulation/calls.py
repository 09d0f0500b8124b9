# SPDX-License-Identifier: Apache-2.0
"""A call: what one rank posts when it enters a collective, and how calls of ranks compare."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import typing_extensions

if TYPE_CHECKING:
    from types import FrameType


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
    def is_message(self) -> bool:
        """Whether it is one rank's to another, and not of all."""
        return self.kind in ("send", "recv")

    @property
    def num_bytes(self) -> int:
        """How much this rank gives."""
        return sum(_num_bytes(each) for each in self.sends)

    @property
    def shapes(self) -> str:
        """Shapes and dtypes: of what ranks have in common, or of all that this one has."""
        if not self.kind.startswith("all_to_all"):
            return _listed(self._common())
        return f"gives {_listed(self.sends)}, takes {_listed(self.fills)}"

    def agreed(self) -> tuple[Any, ...]:
        """Return what must be the same on all ranks, in the order of `AGREED`."""
        common = [(each.shape, each.dtype, each.layout) for each in self._common()]
        return self.kind, self.op, self.root, common, self.label

    def row(self) -> tuple[str, ...]:
        """Return what a table shows of it."""
        root = None if self.root is None else f"root {self.root}"
        peer = {"send": "to", "recv": "from"}.get(self.kind)
        if peer is not None:
            peer = f"{peer} {'any rank' if self.peer is None else f'rank {self.peer}'}"
        tag = f"tag {self.tag}" if self.tag else None
        said = (self.op, root, peer, tag, self.shapes)
        return (
            f"#{self.index} {self.kind}",
            " ".join(each for each in said if each),
            "" if self.label is None else repr(self.label),
            "" if self.step is None else f"update {self.step}",
            self.site,
        )

    def _common(self) -> tuple[torch.Tensor, ...]:
        if self.kind.startswith("all_to_all"):  # compared pair by pair
            return ()
        return self.sends if self.kind in _ONE_SENT else self.fills


AGREED = ("kind", "reduction", "root", "shape or dtype", "label")
_ONE_SENT = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "send"),
        *("all_gather", "all_gather_single", "gather"),
    }
)


def differing(calls: Sequence[Call]) -> list[str]:
    """Return the names of what must be the same in calls that met, and is not."""
    first, *others = [call.agreed() for call in calls]
    if calls[0].is_message:
        return [] if all(each[3] == first[3] for each in others) else ["shape or dtype"]
    found = [
        name
        for i, name in enumerate(AGREED)
        if any(each[i] != first[i] for each in others)
    ]
    return found or _unequal_splits(calls)


def _unequal_splits(calls: Sequence[Call]) -> list[str]:
    """Compare what each rank of an all_to_all gives to what each takes."""
    if not calls[0].kind.startswith("all_to_all"):
        return []
    ranks = range(len(calls))
    same = all(
        shown(calls[i].sends[j]) == shown(calls[j].fills[i])
        for i in ranks
        for j in ranks
    )
    return [] if same else ["splits"]


def shown(tensor: torch.Tensor) -> str:
    """Name a tensor's shape and dtype, and its layout if that is not the common one."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}".replace("torch.", "")


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.sparse_coo:
        return tensor.numel() * tensor.element_size()
    return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())


def _listed(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(shown(each) for each in tensors)


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


_NOT_USERS = (
    str(Path(__file__).parents[2]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    typing_extensions.__file__,  # its decorator calls what torch deprecates
    contextlib.__file__,
    functools.__file__,
    "<attrs",
    "<frozen",
)


def site() -> str:
    """Return file and line of the innermost frame that is neither torch's nor accelfn's."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_users(path):
            return f"{path.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_users(path: str) -> bool:
    return not path.startswith(_NOT_USERS)
