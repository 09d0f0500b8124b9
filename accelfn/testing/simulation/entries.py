# SPDX-License-Identifier: Apache-2.0
"""`Entry`: a collective that simulated ranks have made, as the log of a run keeps it."""

from collections.abc import Sequence

import attrs

from accelfn.testing.simulation.calls import Call


@attrs.frozen(kw_only=True)
class Entry:
    """One collective that was carried out, as the log keeps it.

    Attributes:
        kind: torch's name of it, as "all_reduce".
        label: what the ranks were doing, where accelfn's own collectives say it.
        step: the update at which it happened, where a state's step called it.
        num_bytes: how much one rank gave, the most of all ranks.
        shapes: of what the ranks have in common, with dtypes.
        op: the reduction, or None.
        root: the one rank that sends or receives, or None.
        ranks: who took part.
        group: the name of their group, as "tp"; empty where it is the world's own.
        site: file and line of the user's code, of the first of them, or of a sender.
        for_others: by rank, in the order of `ranks`, how many bytes of what it gave are for
            others to have, be it as they are or in a sum.
    """

    kind: str
    label: str | None
    step: int | None
    num_bytes: int
    shapes: str
    op: str | None
    root: int | None
    ranks: tuple[int, ...]
    site: str
    group: str = ""
    for_others: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Show it on a line."""
        label = "" if self.label is None else f" {self.label!r}"
        step = "" if self.step is None else f" at update {self.step}"
        what = " ".join(each for each in (self.kind, self.op, self.shapes) if each)
        among = f" among {_listed(self.ranks)} ({self.group})" if self.group else ""
        return f"{what}{among}, {self.num_bytes} bytes{label}{step} ({self.site})"


def entry_of(calls: Sequence[Call]) -> Entry:
    """Return the entry of calls that met."""
    first = calls[0]
    in_order = sorted(calls, key=lambda call: call.rank)
    return Entry(
        kind=first.kind,
        label=first.label,
        step=first.step,
        num_bytes=max(call.num_bytes for call in calls),
        shapes=first.shapes,
        op=first.op,
        root=first.root,
        ranks=tuple(call.rank for call in in_order),
        site=first.site,
        group=first.group.name,
        for_others=tuple(call.num_bytes_for_others for call in in_order),
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"
