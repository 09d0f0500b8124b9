# SPDX-License-Identifier: Apache-2.0
"""The exchange: where the calls of ranks meet, are compared, and are carried out."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import current_thread
from typing import TYPE_CHECKING

from accelfn.base import accelerator
from accelfn.collectives.calls import table
from accelfn.errors import (
    CollectiveMismatchError,
    DeadlockError,
    PeerFailedError,
    RankCrashedError,
    SimulationError,
)
from accelfn.testing.simulation.calls import Call, differing
from accelfn.testing.simulation.entries import Entry, entry_of
from accelfn.testing.simulation.faults import (
    Crashed,
    Fault,
    Left,
    Unwound,
    delay,
    due,
    due_as_begins,
    is_of_update,
    strike,
)
from accelfn.testing.simulation.gatherings import Gatherings
from accelfn.testing.simulation.meetings import Meeting, Meetings
from accelfn.testing.simulation.members import Members
from accelfn.testing.simulation.operations import Tensors, results
from accelfn.testing.simulation.standings import Standings
from accelfn.testing.simulation.sums import Sums
from accelfn.world.activity import Activity

if TYPE_CHECKING:
    from accelfn.testing.simulation.turns import Turns

TIMEOUT = 1800.0
"""Virtual seconds that ranks wait for one another; torch's own default."""
_PATIENCE = 100
"""How often a rank may call after the world has broken, before it is unwound; and how often
ranks may ask whether a call is done while nothing happens, before that is a dead-lock."""


class Exchange:
    """The calls of all ranks of one world.

    The world breaks at the first mismatch, dead-lock or error of a rank: from then on every
    call raises, in each rank an error of its own that says the same.
    """

    def __init__(
        self,
        size: int,
        faults: Sequence[Fault] = (),
        sums: Sums = "ranks",
        *,
        least: int | None = None,
    ) -> None:
        """Begin with nothing called; the world is elastic where a least size is given."""
        self.size = size
        self.gatherings = Gatherings(size, least)
        self._sums: Sums = sums
        self.log: list[Entry] = []
        self.faults = list(faults)
        self.clocks = [0.0] * size
        self.turns: Turns | None = None
        self._meetings = Meetings()
        self._standings = Standings(size)
        self._num_called = [0] * size
        self._gone: dict[int, Unwound] = {}
        self._failure: Callable[[int], Exception] | None = None
        self._told: dict[int, list[Exception]] = {rank: [] for rank in range(size)}
        self._given_up: dict[Members, int] = {}
        self._asking: set[int] = set()
        self._num_asked = 0

    def post(self, call: Call) -> Meeting:
        """Take a rank's call, and carry it out if it was the last one awaited.

        It gets its index and time, and is returned with where it meets the others'.

        Raises:
            SimulationError, PeerFailedError: the world is broken, or has ended.
        """
        self._check(call)
        call.index = self._num_called[call.rank]
        self._num_called[call.rank] += 1
        self._num_asked = 0
        self._standings.enters(call)
        if self.faults:
            self._strike(call.rank, due(self.faults, call, received=False))
        call.at = self.clocks[call.rank]
        meeting, is_complete = self._meetings.join(call)
        if is_complete:
            self._carry_out(meeting)
        self._standings.goes_on(call.rank)
        return meeting

    def wait(self, call: Call, meeting: Meeting) -> Tensors:
        """Let others run until the results are there, and return the caller's.

        Raises:
            SimulationError, PeerFailedError: they will never be.
        """
        self._let_run(call, lambda: meeting.results is not None)
        if meeting.results is None:
            self._check(call)
        self.clocks[call.rank] = max(self.clocks[call.rank], meeting.ends_at)
        return meeting.result_of(call)

    def is_done(self, call: Call, meeting: Meeting) -> bool:
        """Let others run until the results are there or none can go on; say which.

        Raises:
            SimulationError, PeerFailedError: the world is broken.
        """
        rank = call.rank
        self._asking.add(rank)
        self._let_run(
            call, lambda: meeting.results is not None or rank not in self._asking
        )
        self._asking.discard(rank)
        if meeting.results is None:
            self._check(call)
        return meeting.results is not None

    def give_up(self, rank: int, group: Members) -> None:
        """Let all calls of a group fail on all ranks; the rest goes on."""
        if group not in self._given_up:
            self._given_up[group] = rank
            self._meetings.forget(lambda each: each == group)

    def receive(self, call: Call) -> None:
        """Let faults change what a rank has received."""
        if self.faults:
            for fault in due(self.faults, call, received=True):
                strike(fault, call)

    def stuck(self) -> None:
        """Let those go on that only ask, or break the world: no other rank can go on."""
        if self._asking and self._num_asked < _PATIENCE:
            self._num_asked += 1
            self._asking.clear()
            return
        text = f"{self._standings}\n{self._recent()}"
        self._break(
            lambda rank: DeadlockError(
                f"Rank {rank} of {self.size} waits, and no rank can go on:\n{text}"
            )
        )

    def ended(self, rank: int, error: BaseException | None) -> BaseException | None:
        """Note how a rank ended; return the error that it ended by, or None.

        All that wait for it, or come to, are told.
        """
        error = self._gone.get(rank, error)
        if error is None or isinstance(error, Left):
            self.gatherings.leave(rank)
            self._standings.ends(rank, "returned" if error is None else error.how)
            return None
        crashed = isinstance(error, Crashed)
        self._standings.ends(rank, error.how if crashed else f"raised {_repr(error)}")
        how = self._standings.of(rank)
        if crashed and self.gatherings.lose(rank, how):
            self._meetings.forget(self.gatherings.is_broken)
            return None
        text = f"rank {rank} {how}, so the others cannot go on.\n{self._standings}"
        self._break(lambda peer: PeerFailedError(f"Rank {peer} of {self.size}: {text}"))
        if not crashed:
            return error
        crash = RankCrashedError(f"Rank {rank} of {self.size} {how}.")
        crash.__cause__ = error.__cause__
        return crash

    def close(self) -> Exception | None:
        """Let go of all that ranks gave; return what went wrong and no rank was told.

        It may be in a call that no rank waited for.
        """
        failure = None
        left = self._meetings.incomplete()
        if self._failure is not None:
            failure = None if any(self._told.values()) else self._failure(0)
        elif left:
            rows = table({call.rank: call.row() for call in reversed(left)})
            failure = CollectiveMismatchError(
                "All ranks have ended, and these calls were neither joined by others nor"
                f" waited for; the first of each rank:\n{rows}\n{self._recent()}"
            )
        self.turns = self._failure = None
        self._meetings, self._standings = Meetings(), Standings(self.size)
        self._gone.clear()
        self._told.clear()
        self._given_up.clear()
        return failure

    def has_told(self, error: BaseException) -> bool:
        """Whether an error is one that this world's ranks get when it is broken."""
        return any(error is told for each in self._told.values() for told in each)

    def _check(self, call: Call) -> None:
        """Refuse a call of a broken world, of a rank that is gone, or from outside."""
        rank = call.rank
        self._check_place(call)
        if rank in self._gone:
            raise self._gone[rank]
        if self._failure is None:
            self._check_group(call)
            return
        self._told[rank].append(self._failure(rank))
        if len(self._told[rank]) > _PATIENCE:
            how = "went on calling after the world had broken, and was unwound"
            self._gone[rank] = Crashed(how)
            raise self._gone[rank] from self._told[rank][0]
        raise self._told[rank][-1]

    def _check_group(self, call: Call) -> None:
        """Refuse a call of a group that a rank has given up, or crashed in."""
        lost = self.gatherings.lost_of(call.group)
        if lost is not None:
            msg = (
                f"Rank {call.rank} of {self.size} called {call.kind} from {call.site}, but"
                f" rank {lost[0]} {lost[1]}. Go on with those that are left:"
                " af.regroup(state)."
            )
            raise PeerFailedError(msg)
        peer = self._given_up.get(call.group)
        if peer is not None:
            msg = (
                f"Rank {call.rank} of {self.size} called {call.kind} from {call.site}, but"
                f" rank {peer} has given up the process group."
            )
            raise PeerFailedError(msg)

    def _check_place(self, call: Call) -> None:
        rank = call.rank
        if self.turns is None:
            msg = (
                f"{call.kind} by rank {rank} of {self.size}: its simulated world has"
                " ended. Call collectives inside the function that simulate was given."
            )
            raise SimulationError(msg)
        if not self.turns.has_turn(rank):
            msg = (
                f"{call.kind} by rank {rank} of {self.size}, in a thread that is not the"
                f" rank's: {current_thread().name}. A rank calls collectives in the thread"
                " that simulate gave it, and in no other that it started. Ranks share what"
                " modules and classes hold: keep no group or DTensor there."
            )
            raise SimulationError(msg)

    def _let_run(self, call: Call, ready: Callable[[], bool]) -> None:
        """Let others run until `ready()`, or until the world has broken."""
        turns = self.turns
        if turns is None or not turns.has_turn(call.rank) or call.rank in self._gone:
            self._check(call)
            return
        self._standings.enters(call)
        turns.wait(
            call.rank,
            lambda: (
                ready()
                or self._failure is not None
                or call.group in self._given_up
                or self.gatherings.is_broken(call.group)
            ),
        )
        self._standings.goes_on(call.rank)

    def activity(self, rank: int) -> Activity:
        """Return what a rank is doing as it begins, of which the updates are heard."""
        activity = Activity()
        if self.faults or self._gone:
            activity.on_update = partial(self.begins, rank)
        return activity

    def begins(self, rank: int, update: int) -> None:
        """Let faults happen as a rank begins an update, with a collective or without."""
        self.gatherings.reached = max(self.gatherings.reached, update)
        self._strike(rank, due_as_begins(self.faults, rank, update))

    def check_reached(self) -> None:
        """Refuse a run in which an update was planned to fail, and none began it.

        Raises:
            SimulationError: it names the first such fault.
        """
        missed = [fault for fault in self.faults if is_of_update(fault)]
        if missed:
            msg = (
                f"{missed[0]!r} did not happen: rank {missed[0].rank} of {self.size} began no"
                f" update {missed[0].step}. Plan it for an update that the rank takes."
            )
            raise SimulationError(msg)
        self.gatherings.check_returned()

    def let_others(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let others run until `ready()`.

        Raises:
            SimulationError, PeerFailedError: the world has broken.
        """
        if self.turns is not None:
            self.turns.wait(rank, lambda: ready() or self._failure is not None)
        if self._failure is not None:
            raise self._failure(rank)

    def takes_back(self, rank: int) -> bool:
        """Let others run until a rank that crashed comes back; return whether it does."""
        gone, gatherings = self._gone.get(rank), self.gatherings
        if not isinstance(gone, Crashed) or gone.returns is None:
            return False
        gatherings.expect(rank, gone.returns)
        with suppress(Exception):  # whatever broke the world, they have told it
            self.let_others(rank, lambda: gatherings.may_return(rank))
            if gatherings.returns(rank):
                del self._gone[rank]
                return True
        return False

    def _strike(self, rank: int, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.clocks[rank] += delay(fault)
            try:
                strike(fault)
            except Unwound as gone:
                self._gone[rank] = gone
                raise

    def _carry_out(self, meeting: Meeting) -> None:
        calls = meeting.calls
        wrong = differing(calls)
        if wrong:
            self._break_by_mismatch(calls, wrong)
            return
        late = max(calls, key=lambda call: call.at)
        waited = late.at - min(call.at for call in calls)
        if waited > TIMEOUT:
            self._break_by_stall(late, waited)
            return
        meeting.ends_at = late.at
        # ranks call on streams of their own, of which none waits for another's
        accelerator.wait_for_all(chain.from_iterable(call.sends for call in calls))
        meeting.results = results(calls, self._sums)
        accelerator.wait_for_all(chain.from_iterable(meeting.results))
        self.log.append(entry_of(calls))

    def _break(self, failure: Callable[[int], Exception]) -> None:
        """Let every call raise what this returns for its rank; the first break counts."""
        if self._failure is None:
            self._failure = failure

    def _break_by_mismatch(self, calls: Sequence[Call], wrong: Sequence[str]) -> None:
        rows = table({call.rank: call.row() for call in calls})
        text = f"{', '.join(wrong)}:\n{rows}\n{self._recent()}"
        self._break(
            lambda rank: CollectiveMismatchError(
                f"Rank {rank} of {self.size}: the ranks met in calls of different {text}"
            )
        )

    def _break_by_stall(self, late: Call, waited: float) -> None:
        text = (
            f"rank {late.rank} did not arrive within {TIMEOUT:.0f} s (it stalled for"
            f" {waited:.0f} s).\n{self._standings}"
        )
        self._break(lambda rank: PeerFailedError(f"Rank {rank} of {self.size}: {text}"))

    def _recent(self) -> str:
        if not self.log:
            return "No collective was completed before."
        lines = "".join(f"\n  {entry}" for entry in self.log[-5:])
        return f"Completed before, latest last:{lines}"


def _repr(error: BaseException) -> str:
    """Show an error on a line, also one that cannot show itself."""
    with suppress(Exception):
        return repr(error).partition("\n")[0][:200]
    return type(error).__name__
