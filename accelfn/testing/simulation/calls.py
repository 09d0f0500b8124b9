# SPDX-License-Identifier: Apache-2.0
"""A call: what one rank posts when it enters a collective, and how calls of ranks compare."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from accelfn.collectives.calls import shown
from accelfn.testing.simulation.members import Members


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
        structure: the containers of the tree that the call is for, as those say.
        step: the update at which a state's step called, where one did.
        site: file and line of the user's code.
        at: the rank's virtual time in seconds.
        group: the ranks among which it is made.
    """

    rank: int
    kind: str
    group: Members
    index: int = 0
    sends: tuple[torch.Tensor, ...] = ()
    fills: tuple[torch.Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    label: str | None = None
    structure: str | None = None
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
    def num_bytes_for_others(self) -> int:
        """How much of it others are to have, as it is or in a sum."""
        is_root = self.rank == self.root
        if self.kind in _FROM_ROOT and not is_root:
            return 0
        if self.kind == "gather" and is_root:
            return 0
        if self.kind in _PART_FOR_EACH:
            mine = self.group.place_of(self.rank)
            return sum(
                _num_bytes(part) for i, part in enumerate(self.sends) if i != mine
            )
        return self.num_bytes

    @property
    def shapes(self) -> str:
        """Shapes and dtypes: of what ranks have in common, or of all that this one has."""
        if not self.kind.startswith("all_to_all"):
            return _listed(self._common())
        return f"gives {_listed(self.sends)}, takes {_listed(self.fills)}"

    def agreed(self) -> tuple[Any, ...]:
        """Return what must be the same on all ranks, in the order of `AGREED`."""
        common = [(each.shape, each.dtype, each.layout) for each in self._common()]
        return self.kind, self.op, self.root, common, self.structure, self.label

    def row(self) -> tuple[str, ...]:
        """Return what a table shows of it."""
        root = None if self.root is None else f"root {self.root}"
        peer = {"send": "to", "recv": "from"}.get(self.kind)
        if peer is not None:
            peer = f"{peer} {'any rank' if self.peer is None else f'rank {self.peer}'}"
        tag = f"tag {self.tag}" if self.tag else None
        tree = None if self.structure == "*" else self.structure
        among = f"among {self.group}" if self.group.name else None
        said = (self.op, root, peer, tag, self.shapes, tree, among)
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


AGREED = ("kind", "reduction", "root", "shape or dtype", "structure", "label")
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_PART_FOR_EACH = frozenset({"scatter", "all_to_all", "all_to_all_single"})
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


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.sparse_coo:
        return tensor.numel() * tensor.element_size()
    return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())


def _listed(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(shown(each) for each in tensors)
