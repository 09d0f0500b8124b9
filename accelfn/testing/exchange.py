# SPDX-License-Identifier: Apache-2.0
"""The exchange: where the calls of ranks meet, are compared, and are carried out."""

from collections.abc import Callable, Sequence

import attrs
import torch

from accelfn.errors import (
    CollectiveMismatchError,
    DeadlockError,
    PeerFailedError,
)
from accelfn.testing.calls import Call, differing, shown, table
from accelfn.testing.faults import Crashed, Fault, Left, Unwound
from accelfn.testing.operations import Results, results
from accelfn.testing.turns import Turns

TIMEOUT = 1800.0
"""Virtual seconds that ranks wait for one another; torch's own default."""
_PATIENCE = 100
"""Calls that a rank may make after the world has broken, before its thread is unwound."""


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
        site: file and line of the user's code, of the first of them.
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

    def __str__(self) -> str:
        """Show it on a line."""
        label = "" if self.label is None else f" {self.label!r}"
        step = "" if self.step is None else f" at update {self.step}"
        what = " ".join(each for each in (self.kind, self.op, self.shapes) if each)
        return f"{what}, {self.num_bytes} bytes{label}{step} ({self.site})"


class Meeting:
    """Calls that belong together, until all are there and the results are known."""

    def __init__(self) -> None:
        """Begin empty."""
        self.calls: dict[int, Call] = {}
        self.results: Results | None = None
        self.ends_at = 0.0

    def result_of(self, rank: int) -> tuple[torch.Tensor, ...]:
        """Return what a rank gets."""
        assert self.results is not None  # noqa: S101 - whoever asks has waited
        return self.results[sorted(self.calls).index(rank)]


class Exchange:
    """The calls of all ranks of one world."""

    def __init__(self, size: int, faults: Sequence[Fault]) -> None:
        """Begin with nothing called."""
        self.size = size
        self.log: list[Entry] = []
        self.turns: Turns | None = None
        self.clocks = [0.0] * size
        self._faults = list(faults)
        self._num_called = [0] * size
        self._num_met = [0] * size  # sends and receives not counted
        self._meetings: dict[int, Meeting] = {}
        self._pairs: list[Meeting] = []
        self._standing: list[Call | str] = ["has not called a collective"] * size
        self._blocked: set[int] = set()
        self._failure: Callable[[int], Exception] | None = None
        self._refused = [0] * size

    @property
    def failure(self) -> Callable[[int], Exception] | None:
        """What makes the error of a rank, once the world is broken."""
        return self._failure

    def post(self, call: Call) -> Meeting:
        """Take a rank's call, and carry it out if it was the last one awaited.

        It gets its index and time, and is returned with where it meets the others'.
        """
        self._check_alive(call.rank)
        call.index = self._num_called[call.rank]
        self._num_called[call.rank] += 1
        self._standing[call.rank] = call
        planned = self._faults and self._take_faults(call, on_receipt=False)
        for fault in planned:
            self.clocks[call.rank] += fault.delay()
            fault.strike(call)
        call.at = self.clocks[call.rank]
        return self._join(call)

    def wait(self, rank: int, meeting: Meeting, call: Call) -> tuple[torch.Tensor, ...]:
        """Let others run until the results are there, and return this rank's.

        Raises:
            SimulationError, PeerFailedError: they will never be.
        """
        assert self.turns is not None  # noqa: S101 - set before any rank runs
        self._standing[rank] = call
        self._blocked.add(rank)
        try:
            self.turns.wait(
                rank,
                lambda: meeting.results is not None or self._failure is not None,
            )
        finally:
            self._blocked.discard(rank)
        if meeting.results is None:
            self._check_alive(rank)
        self.clocks[rank] = max(self.clocks[rank], meeting.ends_at)
        return meeting.result_of(rank)

    def touch(self, call: Call) -> None:
        """Let faults change what the rank received."""
        for fault in self._take_faults(call, on_receipt=True):
            fault.touch(call)

    def ended(self, rank: int, error: BaseException | None) -> None:
        """Note how a rank ended; all that wait for it, or come to, are told."""
        if error is None:
            self._standing[rank] = "returned"
        elif isinstance(error, Left):
            self._standing[rank] = error.how
        else:
            how = error.how if isinstance(error, Unwound) else f"raised {error!r}"
            before = self._standing[rank]
            where = (
                f" in {before.kind} #{before.index}" if isinstance(before, Call) else ""
            )
            self._standing[rank] = how
            if self._failure is None:
                crashed = isinstance(error, Crashed)
                self._failure = lambda peer: PeerFailedError(
                    f"Rank {peer} of {self.size}: rank {rank}"
                    f" {how}{'' if crashed else where}, so the others cannot go on.\n"
                    f"{self.standings()}"
                )

    def stuck(self) -> None:
        """Break the world: every rank waits or has ended, and none can go on."""
        standings = self.standings()
        self._failure = lambda rank: DeadlockError(
            f"Rank {rank} of {self.size} waits, and no rank can go on:\n{standings}"
            f"\n{self._recent()}"
        )

    def standings(self) -> str:
        """Return a table of where each rank is."""
        return table({rank: self._row(rank) for rank in range(self.size)})

    def _take_faults(self, call: Call, *, on_receipt: bool) -> list[Fault]:
        """Return the faults planned for this call; each happens once."""
        found = [
            fault
            for fault in self._faults
            if fault.on_receipt is on_receipt and fault.fits(call)
        ]
        for fault in found:
            self._faults.remove(fault)
        return found

    def _row(self, rank: int) -> tuple[str, ...]:
        standing = self._standing[rank]
        if isinstance(standing, str):
            return (standing,)
        first, *others = standing.row()
        return (f"{'in' if rank in self._blocked else 'after'} {first}", *others)

    def _recent(self) -> str:
        if not self.log:
            return "No collective was completed before."
        lines = "".join(f"\n  {entry}" for entry in self.log[-5:])
        return f"Completed before, latest last:{lines}"

    def _check_alive(self, rank: int) -> None:
        if self._failure is None:
            return
        self._refused[rank] += 1
        if self._refused[rank] > _PATIENCE:
            how = f"called {_PATIENCE} collectives after the world had broken"
            raise Crashed(how)
        raise self._failure(rank)

    def _join(self, call: Call) -> Meeting:
        if call.kind in ("send", "recv"):
            return self._join_pair(call)
        place = self._num_met[call.rank]
        self._num_met[call.rank] += 1
        meeting = self._meetings.setdefault(place, Meeting())
        meeting.calls[call.rank] = call
        if len(meeting.calls) == self.size:
            del self._meetings[place]
            self._complete(meeting)
        return meeting

    def _join_pair(self, call: Call) -> Meeting:
        """Join a send to the first recv that waits for it, or the other way round."""
        for meeting in self._pairs:
            (other,) = meeting.calls.values()
            if _paired(call, other) or _paired(other, call):
                self._pairs.remove(meeting)
                meeting.calls[call.rank] = call
                self._complete(meeting)
                return meeting
        meeting = Meeting()
        meeting.calls[call.rank] = call
        self._pairs.append(meeting)
        return meeting

    def _complete(self, meeting: Meeting) -> None:
        calls = [meeting.calls[rank] for rank in sorted(meeting.calls)]
        if calls[0].kind in ("send", "recv"):
            wrong = _pair_differences(calls)
        else:
            wrong = differing(calls) or _unequal_splits(calls)
        if wrong:
            self._break_by_mismatch(calls, wrong)
            return
        late = max(calls, key=lambda call: call.at)
        waited = late.at - min(call.at for call in calls)
        if waited > TIMEOUT:
            self._failure = lambda rank: PeerFailedError(
                f"Rank {rank} of {self.size}: rank {late.rank} did not arrive within"
                f" {TIMEOUT:.0f} s (it stalled for {waited:.0f} s).\n{self.standings()}"
            )
            return
        meeting.ends_at = late.at
        with torch.inference_mode(mode=False), torch.no_grad():
            meeting.results = _results(calls)
        self.log.append(_entry(calls))

    def _break_by_mismatch(self, calls: Sequence[Call], wrong: Sequence[str]) -> None:
        rows = table({call.rank: call.row() for call in calls})
        self._failure = lambda rank: CollectiveMismatchError(
            f"Rank {rank} of {self.size}: the ranks met in calls of different"
            f" {' and '.join(wrong)}:\n{rows}\n{self._recent()}"
        )


def _entry(calls: Sequence[Call]) -> Entry:
    first = calls[0]
    return Entry(
        kind="send" if first.kind == "recv" else first.kind,
        label=first.label,
        step=first.step,
        num_bytes=max(call.num_bytes for call in calls),
        shapes=first.shapes,
        op=first.op,
        root=first.root,
        ranks=tuple(call.rank for call in calls),
        site=first.site,
    )


def _results(calls: Sequence[Call]) -> Results:
    if calls[0].kind in ("send", "recv"):
        sent = next(call.sends for call in calls if call.kind == "send")
        return [sent if call.kind == "recv" else () for call in calls]
    return results(calls)


def _paired(send: Call, recv: Call) -> bool:
    return (
        (send.kind, recv.kind) == ("send", "recv")
        and send.peer == recv.rank
        and recv.peer in (None, send.rank)
        and send.tag == recv.tag
    )


def _pair_differences(calls: Sequence[Call]) -> list[str]:
    return ["shapes"] if len({call.shapes for call in calls}) > 1 else []


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
