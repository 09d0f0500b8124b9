# SPDX-License-Identifier: Apache-2.0
"""Keep the collectives of a pass in one order on all ranks.

A collective needs all ranks at once, so they follow one plan, the order of the last pass. A
rank that needs another call first takes part in the planned one with nothing to add. At the end
of the plan the ranks ask one another what they still need, until no rank needs anything.
"""

import itertools
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import attrs
import torch

from accelfn.base.devices import readable
from accelfn.collectives.packed import all_gather, gather_text, sum_
from accelfn.errors import CollectiveMismatchError
from accelfn.world import World

_LABEL = "order of calls"
_END = -1
"""Marks the end of the pass. Lower numbers are calls that need all ranks."""


class CallOrder:
    """The order of the collectives of a pass on the ranks of a world.

    Cost: one all-gather of 24 bytes per pass. If ranks differ, one more for each call missing
    from the plan, and an all-reduce to drop unneeded calls.
    """

    def __init__(self, ranks: World, calls: Mapping[str, Callable[[], object]]) -> None:
        """Take the ranks, and by label the function that takes part in a call."""
        self._ranks = attrs.evolve(ranks, group=ranks.connection, checked=False)
        self._labels, self._takes = list(calls), list(calls.values())
        self._turns = {label: turn for turn, label in enumerate(calls)}
        host = torch.device("cpu")  # reading does not wait for a device
        joins_host = ranks.size > 1 and ranks.connection.joins(host)
        self._device = host if joins_host else readable(ranks.device)
        self._plans: dict[bool, list[int]] = {}
        self._plan, self._at = list[int](), 0
        self._needed: dict[int, str] = {}

    @contextmanager
    def begins(self, *, kind: bool = False) -> Generator[None]:
        """Begin a pass; each kind of pass has a separate plan."""
        self._plan = self._plans.setdefault(kind, [])
        self._at, self._needed = 0, {}
        with self.goes_on():
            yield

    @contextmanager
    def goes_on(self) -> Generator[None]:
        """Make collectives of the loss wait for their turn."""
        activity = self._ranks.connection.activity
        activity.before_call = self.reach
        try:
            yield
        finally:
            activity.before_call = None

    def reach(self, label: str, world: World | None = None) -> None:
        """Take part in earlier calls of other ranks; return at the call's turn.

        Raises:
            CollectiveMismatchError: the call needs all ranks, and ranks make different calls.
        """
        if world is not None and world.group is not self._ranks.group:
            return
        if label in self._turns:
            self._reach(self._turns[label])
        else:
            turn = -2 - zlib.crc32(label.encode())
            self._reach(turn, words=f"calls {label!r}")
            if self._plan[self._at : self._at + 1] != [turn]:
                self._plan.insert(self._at, turn)
            self._at += 1
        self._needed[self._at - 1] = label

    def end(self, note: int = 0) -> list[int]:
        """End the pass on all ranks; return each rank's note."""
        rows = self._reach(_END, note, "ends its pass")
        del self._plan[self._at :]
        if all(idle for _, idle, _ in rows):  # otherwise one rank needed the whole plan
            needed = [i in self._needed for i in range(self._at)]
            uses = torch.tensor(needed, dtype=torch.int64, device=self._device)
            sum_(uses, self._ranks, label=_LABEL)
            self._plan[:] = itertools.compress(self._plan, uses.tolist())
        return [note for *_, note in rows]

    def refuse(self, words: str) -> NoReturn:
        """Raise an error with each rank's words on all ranks.

        Raises:
            CollectiveMismatchError: always.
        """
        said = gather_text(words, self._ranks, label=_LABEL)
        each = "; ".join(f"rank {rank} {words}" for rank, words in enumerate(said))
        msg = (
            f"Rank {self._ranks.rank} of {self._ranks.size}: all ranks must make the same"
            f" collectives in a loss, in the same order, but {each}. Make these calls on all"
            " ranks, in no branch that depends on the samples."
        )
        raise CollectiveMismatchError(msg)

    def _reach(self, turn: int, note: int = 0, words: str = "") -> list[list[int]]:
        """Make the calls before a turn; return all ranks' rows if the turn needs all ranks."""
        while True:
            while self._at < len(self._plan) and self._plan[self._at] >= 0:
                call = self._plan[self._at]
                self._at += 1
                self._ranks.connection.activity.label = self._labels[call]
                if call == turn:
                    return []
                self._takes[call]()
            values = [turn, self._at - len(self._needed), note]
            row = torch.tensor(values, device=self._device)
            rows = torch.stack(all_gather(row, self._ranks, label=_LABEL)).tolist()
            turns = {turn for turn, *_ in rows}
            if any(turn >= 0 for turn in turns):
                wanted = sorted(turn for turn in turns if turn >= 0)
                self._plan[self._at : self._at] = wanted
            elif len(turns) == 1:
                return rows
            else:
                self.refuse(words)
