# SPDX-License-Identifier: Apache-2.0
"""Standings: where each rank of a simulated world is, for the tables in errors."""

from accelfn.collectives.calls import table
from accelfn.testing.simulation.calls import Call


class Standings:
    """What each rank called last, whether it is still in there, and how it ended."""

    def __init__(self, size: int) -> None:
        """Begin with ranks that have called nothing."""
        self._last: list[Call | None] = [None] * size
        self._inside: set[int] = set()
        self._ends: dict[int, str] = {}

    def enters(self, call: Call) -> None:
        """Note that a rank is in a call."""
        self._last[call.rank] = call
        self._inside.add(call.rank)

    def goes_on(self, rank: int) -> None:
        """Note that a rank has left its last call."""
        self._inside.discard(rank)

    def ends(self, rank: int, how: str) -> None:
        """Note how a rank ended: that it returned, raised something, ..."""
        self._ends[rank] = how

    def of(self, rank: int) -> str:
        """Say where a rank is, or how it ended."""
        last, how = self._last[rank], self._ends.get(rank)
        if last is None:
            return how or "has called no collective"
        place = "in" if rank in self._inside else "after"
        where = f"{place} #{last.index} {last.kind}"
        return where if how is None else f"{how} {where}"

    def __str__(self) -> str:
        """Show a table of all ranks."""
        cells = [() if last is None else last.row()[1:] for last in self._last]
        return table(
            {rank: (self.of(rank), *cells[rank]) for rank in range(len(cells))}
        )
