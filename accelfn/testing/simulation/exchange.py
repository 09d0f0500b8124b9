# SPDX-License-Identifier: Apache-2.0
"""The exchange: it matches the collective calls of ranks, compares them and executes them."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import chain
from threading import current_thread
from typing import Any, TypeAlias

import attrs
import torch
from torch import _C
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

from accelfn.errors import (
    CollectiveMismatchError,
    DeadlockError,
    PeerFailedError,
    RankCrashedError,
    SimulationError,
)
from accelfn.plug import collectives, connection, devices
from accelfn.testing.simulation.calls import (
    Call,
    Crashed,
    Entry,
    Fault,
    Left,
    Members,
    Stall,
    Sums,
    Unwound,
    differing,
    entry_of,
    is_due,
    is_of_update,
    reduce_tensors,
    strike,
)
from accelfn.testing.simulation.turns import Regroup, Turns

# pyright: reportPrivateUsage=false

# Collectives as pure functions: from the tensors that all ranks send, they compute the tensors
# that each rank receives. The result of a reduction is the same on all ranks.

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Results: TypeAlias = list[Tensors]
"""For each rank, the values of the tensors that its call receives."""


def results(calls: Sequence[Call], sums: Sums) -> Results:
    """Compute the result of each rank. `calls` has the calls of all ranks, in rank order."""
    with _no_modes():
        results = _results(calls, sums)
    return [got if call.fills else () for call, got in zip(calls, results, strict=True)]


def _no_modes() -> AbstractContextManager[object]:
    """Disable the torch modes of the rank that called last: the results are for all ranks."""
    # torch has no public functions for these modes
    no_functions = _C.DisableTorchFunction()
    if not torch.is_inference_mode_enabled() and not _C._len_torch_dispatch_stack():
        return no_functions
    stack = ExitStack()
    stack.enter_context(no_functions)
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(_disable_current_modes())
    return stack


def _results(calls: Sequence[Call], sums: Sums) -> Results:
    """Compute the result of each rank, also of ranks that receive nothing."""
    sends = [call.sends for call in calls]
    op = str(calls[0].op)
    of_root = next((call.sends for call in calls if call.rank == call.root), ())
    same: Tensors
    match calls[0].kind.removesuffix("_single"):
        case "scatter":
            return [(part,) for part in of_root]
        case "reduce_scatter":
            shares = zip(*sends, strict=True)
            return [(reduce_tensors(op, share, sums),) for share in shares]
        case "all_to_all":
            return [*zip(*sends, strict=True)]
        case "all_reduce" | "reduce":
            same = (reduce_tensors(op, [send[0] for send in sends], sums),)
        case "all_gather" | "gather":
            same = tuple(send[0] for send in sends)
        case "broadcast":
            same = of_root
        case _:  # a message from the first rank to the second, or a barrier
            same = sends[0]
    return [same] * len(calls)


# Matching: which calls of different ranks belong to the same collective.
#
# The first call of each rank in a group matches the other ranks' first calls, and so on. A send
# and a recv match if sender, receiver and tag match; several such messages match in order.


@attrs.define(eq=False)
class Meeting:
    """The matching calls of one collective, or of a send and its recv.

    Attributes:
        calls: the calls of all ranks in rank order, or the send and its recv.
        results: the result of each call; empty until all ranks have called.
        ends_at: the virtual time when the results are there.
    """

    calls: list[Call] = attrs.field(factory=list["Call"])
    results: Results = attrs.field(factory=list[Tensors])
    ends_at: float = 0.0


class CallMatching:
    """The calls of one world that wait for matching calls of other ranks."""

    def __init__(self) -> None:
        """Initialize without calls."""
        self._num_joined: Counter[tuple[int, Members]] = Counter()
        self._waiting: dict[Hashable, Meeting] = {}

    def join(self, call: Call) -> tuple[Meeting, bool]:
        """Add a call to its `Meeting`. Return the meeting, and whether it is now complete."""
        place: Hashable
        if call.is_message:
            places = (
                k for k, m in self._waiting.items() if _is_message(m.calls[0], call)
            )
            place, size = next(places, object()), 2
        else:
            place = self._num_joined[call.rank, call.group], call.group
            self._num_joined[call.rank, call.group] += 1
            size = len(call.group.ranks)
        meeting = self._waiting.setdefault(place, Meeting())
        meeting.calls.append(call)
        if len(meeting.calls) < size:
            return meeting, False
        del self._waiting[place]
        meeting.calls.sort(key=lambda c: (c.kind == "recv", c.rank))
        return meeting, True

    def incomplete(self) -> list[Call]:
        """Return the calls that still wait for matching calls."""
        return [call for meeting in self._waiting.values() for call in meeting.calls]

    def forget(self, is_gone: Callable[[Members], object]) -> None:
        """Drop the waiting calls of all groups for which `is_gone` is true."""
        waiting = self._waiting.items()
        self._waiting = {k: m for k, m in waiting if not is_gone(m.calls[0].group)}


def _is_message(one: Call, other: Call) -> bool:
    """Whether two calls are a send and its recv, in any order."""
    send, recv = (other, one) if one.kind == "recv" else (one, other)
    return (
        (send.kind, recv.kind) == ("send", "recv")
        and send.peer == recv.rank
        and recv.peer in (None, send.rank)
        and send.tag == recv.tag
        and send.group == recv.group
    )


# Status: the last call of each simulated rank, for the tables in error messages.


@attrs.define
class RankStatus:
    """Each rank's last call, whether that call still runs, and how the rank ended.

    Attributes:
        last: the last call of each rank; None if the rank has not yet called a collective.
        inside: the ranks whose last call still runs.
        ends: for each rank that has ended, how it ended, for example "returned".
    """

    last: list[Call | None]
    inside: set[int] = attrs.field(factory=set[int])
    ends: dict[int, str] = attrs.field(factory=dict[int, str])

    def enter(self, call: Call) -> None:
        """Record that a rank has entered a call."""
        self.last[call.rank] = call
        self.inside.add(call.rank)

    def describe(self, rank: int) -> str:
        """Return a text with the rank's last call, and how the rank ended if it did."""
        last, how = self.last[rank], self.ends.get(rank)
        if last is None:
            return how or "has called no collective"
        place = "in" if rank in self.inside else "after"
        where = f"{place} #{last.index} {last.kind}"
        return where if how is None else f"{how} {where}"

    def __str__(self) -> str:
        """Return a table with one line per rank."""
        cells = [() if last is None else last.row()[1:] for last in self.last]
        return collectives.table(
            {rank: (self.describe(rank), *cells[rank]) for rank in range(len(cells))}
        )


TIMEOUT = 1800.0
"""How many virtual seconds ranks wait for each other. It is torch's default timeout."""
_PATIENCE = 100
"""How many collectives a rank may call after its world has failed, before accelfn stops the
rank. Also how often ranks may poll without progress, before accelfn raises an error."""


class Exchange:
    """The collective calls of all ranks of one world.

    At the first mismatch, deadlock or error of a rank, the world fails ("breaks"). Then every
    later call of any rank raises the same error.
    """

    def __init__(
        self, size: int, faults: Sequence[Fault], sums: Sums, least: int | None
    ) -> None:
        """Initialize without calls. `least` is the smallest size of an elastic world."""
        self.size = size
        self.regroup = Regroup(size, least)
        self.is_elastic = least is not None
        self.shared = SharedValues()
        self._sums: Sums = sums
        self.log: list[Entry] = []
        self.faults = list(faults)
        self.clocks = [0.0] * size
        self.turns: Turns | None = None
        self._matching = CallMatching()
        self._status = RankStatus([None] * size)
        self._num_called = [0] * size
        self._gone: dict[int, Unwound] = {}
        self._failure: Callable[[int], Exception] | None = None
        self._raised: dict[int, list[Exception]] = {rank: [] for rank in range(size)}
        self._given_up: dict[Members, tuple[int, str]] = {}
        self._asking: set[int] = set()
        self._num_asked = 0

    def post(self, call: Call) -> Meeting:
        """Add a rank's call to its meeting, and return the meeting.

        If this call is the last of the meeting, execute the collective.

        Raises:
            SimulationError, PeerFailedError: the world has failed or ended.
        """
        self._check(call)
        call.index = self._num_called[call.rank]
        self._num_called[call.rank] += 1
        self._num_asked = 0
        self._status.enter(call)
        self._strike(call.rank, partial(is_due, call=call, has_result=False))
        call.at = self.clocks[call.rank]
        meeting, is_complete = self._matching.join(call)
        if is_complete:
            self._carry_out(meeting)
        self._status.inside.discard(call.rank)
        return meeting

    def wait(self, call: Call, meeting: Meeting) -> Tensors:
        """Let other ranks run until the results are there, and return this call's result.

        Raises:
            SimulationError, PeerFailedError: the world has failed or ended.
        """
        self._let_run(call, lambda: bool(meeting.results))
        if not meeting.results:
            self._check(call)
        self.clocks[call.rank] = max(self.clocks[call.rank], meeting.ends_at)
        return meeting.results[meeting.calls.index(call)]

    def is_done(self, call: Call, meeting: Meeting) -> bool:
        """Let other ranks run, and return whether the results are there.

        Returns True when the results are there, and False when no other rank can continue.

        Raises:
            SimulationError, PeerFailedError: the world has failed.
        """
        rank = call.rank
        self._asking.add(rank)
        self._let_run(call, lambda: bool(meeting.results) or rank not in self._asking)
        self._asking.discard(rank)
        if not meeting.results:
            self._check(call)
        return bool(meeting.results)

    def give_up(self, rank: int, group: Members) -> None:
        """Make all calls of one group fail on all ranks."""
        if group not in self._given_up:
            self._given_up[group] = rank, "has closed this process group."
            self._matching.forget(lambda members: members == group)

    def receive(self, call: Call) -> None:
        """Apply planned faults that change the tensors that a rank has received."""
        self._strike(call.rank, partial(is_due, call=call, has_result=True), call)

    def stuck(self) -> None:
        """Let ranks that poll a call continue. Without such a rank, raise a deadlock error."""
        if self._asking and self._num_asked < _PATIENCE:
            self._num_asked += 1
            self._asking.clear()
            return
        text = f" waits, and no rank can continue:\n{self._status}\n{self._recent()}"
        self._break(DeadlockError, text)

    def end_rank(self, rank: int, error: BaseException | None) -> BaseException | None:
        """Record how a rank ended; return its error, or None.

        Ranks that wait for this rank, now or later, raise `PeerFailedError`.
        """
        error = self._gone.get(rank, error)
        if error is None or isinstance(error, Left):
            self.regroup.leave(rank)
            self._status.ends[rank] = "returned" if error is None else error.how
            return None
        is_crash = isinstance(error, Crashed)
        self._status.ends[rank] = error.how if is_crash else f"raised {_repr(error)}"
        how = self._status.describe(rank)
        if is_crash and self.regroup.lose(rank, how):
            self._matching.forget(self.regroup.lost_of)
            return None
        text = f": rank {rank} {how}, so the others cannot continue.\n{self._status}"
        self._break(PeerFailedError, text)
        if not is_crash:
            return error
        crash = RankCrashedError(f"Rank {rank} of {self.size} {how}.")
        crash.__cause__ = error.__cause__
        return crash

    def close(self) -> Exception | None:
        """Release all tensors. Return an error that no rank has raised yet, or None.

        An error that no rank has raised belongs to a call that no rank waited for.
        """
        failure = None
        waiting = self._matching.incomplete()
        if self._failure is not None:
            failure = None if any(self._raised.values()) else self._failure(0)
        elif waiting:
            rows = {call.rank: call.row() for call in reversed(waiting)}
            failure = CollectiveMismatchError(
                "All ranks have ended, but some calls were not completed: other ranks did not"
                " make the matching calls. The first such call of each rank:\n"
                f"{collectives.table(rows)}\n{self._recent()}"
            )
        self.turns = self._failure = None
        self._matching, self._status = CallMatching(), RankStatus([None] * self.size)
        self._gone.clear()
        self._raised.clear()
        self._given_up.clear()
        return failure

    def has_raised(self, error: BaseException) -> bool:
        """Whether ranks raised this error because the world had failed."""
        return any(error is e for errors in self._raised.values() for e in errors)

    def _check(self, call: Call) -> None:
        """Raise an error if the world has failed, the rank ended, or another thread calls."""
        rank = call.rank
        self._turns_of(call)
        if self._failure is None:
            self._check_group(call)
            return
        self._raised[rank].append(self._failure(rank))
        if len(self._raised[rank]) > _PATIENCE:
            how = (
                "kept calling collectives after an error of its world, and was stopped"
            )
            self._gone[rank] = Crashed(how)
            raise self._gone[rank] from self._raised[rank][0]
        raise self._raised[rank][-1]

    def _check_group(self, call: Call) -> None:
        """Raise an error if a rank has closed the call's group, or crashed in the group."""
        end = self._lost_of(call.group)
        if end is not None:
            peer, why = end
            msg = (
                f"Rank {call.rank} of {self.size} called {call.kind} from {call.site}, but"
                f" rank {peer} {why}"
            )
            raise PeerFailedError(msg)

    def _lost_of(self, group: Members) -> tuple[int, str] | None:
        """Return a rank that has closed a group or crashed in it, and the reason; or None."""
        crash = self.regroup.lost_of(group)
        if crash is None:
            return self._given_up.get(group)
        rank, how = crash
        return rank, f"{how}. Continue with the remaining ranks: af.regroup(state)."

    def _turns_of(self, call: Call) -> Turns:
        """Return the turns of the ranks, after a check that this rank may call."""
        rank = call.rank
        if self.turns is None:
            msg = (
                f"Rank {rank} of {self.size} called {call.kind} after its simulated world had"
                " ended. Call collectives only in the function that you pass to simulate."
            )
            raise SimulationError(msg)
        if not self.turns.has_turn(rank):
            msg = (
                f"Rank {rank} of {self.size} called {call.kind} in another thread:"
                f" {current_thread().name}. Call collectives in the thread that simulate started"
                " for the rank. Simulated ranks share modules and classes, so do not keep a group"
                " or a DTensor in a global variable or class attribute."
            )
            raise SimulationError(msg)
        if rank in self._gone:
            raise self._gone[rank]
        return self.turns

    def _let_run(self, call: Call, ready: Callable[[], bool]) -> None:
        """Let other ranks run until `ready()`, or until the world has failed."""
        turns = self._turns_of(call)
        self._status.enter(call)
        turns.wait(
            call.rank,
            lambda: (
                ready()
                or self._failure is not None
                or self._lost_of(call.group) is not None
            ),
        )
        self._status.inside.discard(call.rank)

    def activity(self, rank: int) -> connection.Activity:
        """Create a rank's activity: the record of its current update and collective label."""
        return connection.Activity(on_update=partial(self.begin_update, rank))

    def begin_update(self, rank: int, update: int) -> None:
        """Apply the faults that are planned for the beginning of an update."""
        self.regroup.reached = max(self.regroup.reached, update)
        place = rank, update
        self._strike(rank, lambda f: is_of_update(f) and (f.rank, f.step) == place)

    def check_reached(self) -> None:
        """Raise an error if a fault was planned for an update that its rank did not begin.

        Raises:
            SimulationError: there is such a fault. The message names the first.
        """
        faults = [fault for fault in self.faults if is_of_update(fault)]
        if faults:
            msg = (
                f"{faults[0]!r} did not happen: rank {faults[0].rank} of {self.size} did not begin"
                f" update {faults[0].step}. Plan the fault for an update that the rank makes."
            )
            raise SimulationError(msg)
        self.regroup.check_returned()

    def let_others(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let other ranks run until `ready()`.

        Raises:
            SimulationError, PeerFailedError: the world has failed.
        """
        if self.turns is not None:
            self.turns.wait(rank, lambda: ready() or self._failure is not None)
        if self._failure is not None:
            raise self._failure(rank)

    def await_return(self, rank: int) -> bool:
        """Let other ranks run until a crashed rank comes back. Return whether it comes back."""
        unwind, regroup = self._gone.get(rank), self.regroup
        if not isinstance(unwind, Crashed) or unwind.returns is None:
            return False
        regroup.expect(rank, unwind.returns)
        with suppress(Exception):  # the other ranks raise the world's error
            self.let_others(rank, lambda: regroup.returns(rank) is not None)
            if regroup.returns(rank):
                del self._gone[rank]
                return True
        return False

    def _strike(
        self, rank: int, happens: Callable[[Fault], bool], call: Call | None = None
    ) -> None:
        """Apply the due faults to a rank, or to the tensors that its call has received."""
        faults = [fault for fault in self.faults if happens(fault)]
        for fault in faults:
            self.faults.remove(fault)
        for fault in faults:
            if isinstance(fault, Stall):
                self.clocks[rank] += fault.seconds
            try:
                strike(fault, call)
            except Unwound as gone:
                self._gone[rank] = gone
                raise

    def _carry_out(self, meeting: Meeting) -> None:
        calls = meeting.calls
        wrong = differing(calls)
        if wrong:
            rows = collectives.table({call.rank: call.row() for call in calls})
            text = f"{', '.join(wrong)}:\n{rows}\n{self._recent()}"
            text = f": the ranks' calls do not match in {text}"
            self._break(CollectiveMismatchError, text)
            return
        late = max(calls, key=lambda call: call.at)
        delay = late.at - min(call.at for call in calls)
        if delay > TIMEOUT:
            text = (
                f": rank {late.rank} did not arrive within {TIMEOUT:.0f} s (it stalled for"
                f" {delay:.0f} s).\n{self._status}"
            )
            self._break(PeerFailedError, text)
            return
        meeting.ends_at = late.at
        # ranks use separate device streams, which do not wait for each other
        devices.wait_for_all(chain.from_iterable(call.sends for call in calls))
        meeting.results = results(calls, self._sums)
        devices.wait_for_all(chain.from_iterable(meeting.results))
        self.log.append(entry_of(calls))

    def _break(self, kind: type[Exception], text: str) -> None:
        """Make every later call raise this error, unless the world has already failed."""
        if self._failure is None:
            self._failure = lambda rank: kind(f"Rank {rank} of {self.size}{text}")

    def _recent(self) -> str:
        if not self.log:
            return "No collective was completed before."
        lines = "".join(f"\n  {entry}" for entry in self.log[-5:])
        return f"Collectives completed before, the latest last:{lines}"


def _repr(error: BaseException) -> str:
    """Return the first line of an error's repr, or its type if the repr fails."""
    with suppress(Exception):
        return repr(error).partition("\n")[0][:200]
    return type(error).__name__


# Values that must be equal on all ranks. Ranks compare them in memory, without a collective.


class SharedValues:
    """The values that ranks have passed, by label and by the count of the rank's calls."""

    def __init__(self) -> None:
        """Initialize without values."""
        self._first: dict[Hashable, tuple[int, list[str]]] = {}
        self._counts: Counter[Hashable] = Counter()

    def compare(
        self, group: Members, rank: int, label: str, lines: list[str]
    ) -> tuple[int, list[str]] | None:
        """Compare a value with the first rank's. Return that rank and value if they differ."""
        self._counts[group, label, "of", rank] += 1
        place = group, label, self._counts[group, label, "of", rank]
        first = self._first.setdefault(place, (rank, lines))
        self._counts[place] += 1
        if self._counts[place] == len(group.ranks):
            del self._first[place], self._counts[place]
        return None if first[1] == lines else first


# A simulated collective writes its result only when the rank waits for the work object.
#
# Before that, the tensors have invalid values such as NaN, so a forgotten wait is detected.


class SimulatedWork(Work):
    """The work object of a simulated collective."""

    def __init__(
        self,
        exchange: Exchange,
        calls: Sequence[Call],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Post the calls. The future of this work object has `outputs` as its value."""
        super().__init__()
        self._exchange = exchange
        self._posted = [(call, exchange.post(call)) for call in calls]
        self._num_written = 0
        self._returned = list(outputs)
        for call in calls:
            for target in call.fills:
                _write(target, _poison)

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until the result is there, and write the result."""
        del timeout  # simulated ranks use `TIMEOUT`, in virtual time
        while self._num_written < len(self._posted):
            call, meeting = self._posted[self._num_written]
            parts = self._exchange.wait(call, meeting)
            for target, part in zip(call.fills, parts, strict=True):
                _write(target, lambda plain, part=part: plain.copy_(part))
            # wait, because the source of the copy may be freed on another rank's stream
            devices.wait_for_all(call.fills)
            self._exchange.receive(call)
            self._num_written += 1
        return True

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def is_completed(self) -> bool:
        """Let other ranks run. Return whether the result is there, and write it if so."""
        pending = self._posted[self._num_written :]
        return all(self._exchange.is_done(*pair) for pair in pending) and self.wait()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Wait here, and return a completed future: other ranks cannot run while C++ waits."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._returned)
        return future

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors of the result."""
        self.wait()
        return self._returned

    def _source_rank(self) -> int:
        """Return the sender of the message that a `recv` received."""
        self.wait()
        call, meeting = self._posted[0]
        return call.group.ranks.index(meeting.calls[0].rank)


def _write(target: torch.Tensor, how: Callable[[torch.Tensor], object]) -> None:
    """Write to a tensor without autograd, in inference mode if the tensor needs it."""
    if target.is_inference():
        with torch.inference_mode():
            how(target)
    elif target.layout is not torch.strided:  # detach() would copy the indices
        with torch.no_grad():
            how(target)
    else:
        how(target.detach())


def _poison(target: torch.Tensor) -> None:
    """Fill a tensor with invalid values: NaN, an extreme integer, or inverted booleans."""
    if target.layout is not torch.strided:
        target.zero_()
    elif target.dtype.is_floating_point or target.dtype.is_complex:
        target.fill_(math.nan)
    elif target.dtype is torch.bool:
        target.logical_not_()
    else:
        limits = torch.iinfo(target.dtype)
        target.fill_(limits.min or limits.max)
