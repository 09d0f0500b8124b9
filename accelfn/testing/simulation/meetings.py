# SPDX-License-Identifier: Apache-2.0
"""Meetings: which calls of ranks belong together.

The collectives of a group's ranks meet by their order; messages by sender, receiver and tag,
and among equal ones by their order. Each group has an order of its own.
"""

from collections import Counter
from collections.abc import Callable

import attrs

from accelfn.testing.simulation.calls import Call
from accelfn.testing.simulation.members import Members
from accelfn.testing.simulation.operations import Results, Tensors


@attrs.define(eq=False)
class Meeting:
    """Calls that belong together, until all are there and the results are known.

    Attributes:
        calls: of all ranks in their order, or of a send and its recv.
        results: what each call gets, once it is known.
        ends_at: when, in virtual time.
    """

    calls: list[Call] = attrs.field(factory=list["Call"])
    results: Results | None = None
    ends_at: float = 0.0

    def result_of(self, call: Call) -> Tensors:
        """Return what a call gets."""
        assert self.results is not None  # noqa: S101 - whoever asks has waited
        return self.results[self.calls.index(call)]


class Meetings:
    """All meetings of one world that are not complete."""

    def __init__(self) -> None:
        """Begin with none."""
        self._num_joined: Counter[tuple[int, Members]] = Counter()
        self._by_order: dict[tuple[int, Members], Meeting] = {}
        self._messages: list[Meeting] = []

    def join(self, call: Call) -> tuple[Meeting, bool]:
        """Return where a call belongs, and whether it was the last one awaited there."""
        if call.is_message:
            return self._join_message(call)
        place = self._num_joined[call.rank, call.group], call.group
        self._num_joined[call.rank, call.group] += 1
        meeting = self._by_order.setdefault(place, Meeting())
        meeting.calls.append(call)
        if len(meeting.calls) < len(call.group.ranks):
            return meeting, False
        del self._by_order[place]
        meeting.calls.sort(key=lambda each: each.rank)
        return meeting, True

    def incomplete(self) -> list[Call]:
        """Return the calls that wait for others."""
        waiting = [*self._by_order.values(), *self._messages]
        return [call for meeting in waiting for call in meeting.calls]

    def forget(self, is_gone: Callable[[Members], bool]) -> None:
        """Drop the calls of groups that wait for others."""
        collectives, messages = self._by_order, self._messages
        self._by_order = {k: m for k, m in collectives.items() if not is_gone(k[1])}
        self._messages = [m for m in messages if not is_gone(m.calls[0].group)]

    def _join_message(self, call: Call) -> tuple[Meeting, bool]:
        for meeting in self._messages:
            pair = sorted((*meeting.calls, call), key=lambda each: each.kind == "recv")
            if _is_message(*pair):
                self._messages.remove(meeting)
                meeting.calls = pair
                return meeting, True
        meeting = Meeting([call])
        self._messages.append(meeting)
        return meeting, False


def _is_message(send: Call, recv: Call) -> bool:
    return (
        (send.kind, recv.kind) == ("send", "recv")
        and send.peer == recv.rank
        and recv.peer in (None, send.rank)
        and send.tag == recv.tag
        and send.group == recv.group
    )
