# SPDX-License-Identifier: Apache-2.0
"""Gatherings: who makes the world of an elastic run, from one to the next."""

from itertools import count

from accelfn.errors import SimulationError
from accelfn.testing.simulation.faults import Left
from accelfn.testing.simulation.members import Members


class Gatherings:
    """Which ranks are there, which are gone, and which wait to come in.

    A world goes on until one of its ranks is gone or one waits to come in; then those that are
    left gather, with those that wait, and make the next.

    Attributes:
        lost: the ranks that crashed: the last world in which they were, and how they ended.
        reached: the largest update that any rank has begun.
    """

    def __init__(self, size: int, least: int | None) -> None:
        """Begin with all ranks; without a least number nobody goes on without one of them."""
        self._least = size if least is None else least
        self._members = set(range(size))
        self._came: set[int] = set()
        self._formed: dict[int, Members] = {}
        self._numbers = count(1)
        self._generation = 0
        self._coming: dict[int, int] = {}
        self._late: set[int] = set()
        self.lost: dict[int, tuple[int, str]] = {}
        self.reached = -1

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits who is not of the world."""
        return bool(self._came - self._members)

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is on the way who could wait."""
        return all(self.reached < update for update in self._coming.values())

    def lose(self, rank: int, how: str) -> bool:
        """Note that a rank has crashed; return whether the others may go on without it."""
        left = self._members - {rank}
        if rank in self._members and len(left) < self._least:
            return False
        self._members = left
        self._came.discard(rank)
        self.lost[rank] = self._generation, how
        self._coming.pop(rank, None)
        return True

    def leave(self, rank: int) -> None:
        """Note that a rank has ended, and nothing was wrong."""
        self._members.discard(rank)
        self._came.discard(rank)
        self._coming.pop(rank, None)

    def lost_of(self, group: Members) -> tuple[int, str] | None:
        """Return a rank of a group that crashed while it was in it, and how it did."""
        for rank in group.ranks if self.lost else ():
            last, how = self.lost.get(rank, (-1, ""))
            if group.generation <= last:
                return rank, how
        return None

    def is_broken(self, group: Members) -> bool:
        """Whether a rank of a group crashed while it was in it."""
        return self.lost_of(group) is not None

    def expect(self, rank: int, update: int) -> None:
        """Note that a rank that is gone comes back when others have begun an update."""
        self._coming[rank] = update

    def may_return(self, rank: int) -> bool:
        """Whether the others are where a rank comes back, or there are none."""
        return self.reached >= self._coming[rank] or not self._members

    def returns(self, rank: int) -> bool:
        """Whether there is a world to which a rank comes back."""
        return self.reached >= self._coming[rank] and bool(self._members)

    def check_returned(self) -> None:
        """Refuse a run in which a rank was to come back, and did not, or in vain.

        Raises:
            SimulationError: it names the first such rank.
        """
        for rank, update in self._coming.items():
            msg = (
                f"Rank {rank} did not come back: none of the others began update {update}. Plan"
                " it for one that they take."
            )
            raise SimulationError(msg)
        for rank in self._late:
            msg = (
                f"Rank {rank} came back, and the others ended without it: they did not meet"
                " again. Let them call af.regroup(state) after the update at which it returns."
            )
            raise SimulationError(msg)

    def alone(self, rank: int) -> Members:
        """Return the world of one in which a rank is that has come back."""
        self._generation = next(self._numbers)
        return Members("", (rank,), self._generation)

    def come(self, rank: int) -> None:
        """Note that a rank is there to make the next world."""
        self._came.add(rank)
        self._coming.pop(rank, None)

    def is_due(self, rank: int) -> bool:
        """Whether a rank need not wait: all have come that are left, or nobody is."""
        return rank in self._formed or (self._members <= self._came and self.is_quiet)

    def formed(self, rank: int) -> Members:
        """Return the next world, of all that have come; the first to ask forms it.

        Raises:
            Left: all others have ended, and there is nothing to go on with.
        """
        if rank not in self._formed:
            if not self._members:
                how = "came back when the others had ended,"
                self._late.add(rank)
                raise Left(how)
            self._generation = next(self._numbers)
            members = Members("", tuple(sorted(self._came)), self._generation)
            self._formed |= dict.fromkeys(members.ranks, members)
            self._members, self._came = set(members.ranks), set()
        return self._formed.pop(rank)
