# SPDX-License-Identifier: Apache-2.0
"""`Crew`: the processes of an elastic run, of which some are killed and others take their place.

torch's agent ends all ranks where one fails. Here one that a signal ended is taken out of its
hands before it looks, and another process is put in its place; the rest stays the agent's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attrs import frozen
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
)

from accelfn.world.regrouping import VARIABLE, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch.distributed.elastic.agent.server.api import Worker
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

_KILLED = os.CLD_KILLED, os.CLD_DUMPED


@frozen
class _Ending:
    """How a process ended: by which signal, or with which code."""

    is_by_signal: bool
    status: int


class Crew:
    """Which processes make the world of a run, and which wait to come in.

    Attributes:
        gone: the places of those that the run does without: nobody asks how they ended.
    """

    def __init__(
        self,
        context: SubprocessContext,
        workers: Sequence[Worker],
        *,
        least: int,
        store: dist.Store,
        say: Callable[[str], None],
    ) -> None:
        """Take the processes, torch's records of them, and how few may go on."""
        self._context: Any = context
        self._workers, self._least, self._say = workers, least, say
        self._words = Words.at(store)
        self._lives = dict.fromkeys(range(len(workers)), 0)
        self._members = set(self._lives)
        self._newcomers: set[int] = set()
        self.gone: set[int] = set()
        self._number = 0

    def look(self) -> None:
        """See who has ended, and let the others go on; what they cannot, torch's agent sees."""
        for place in sorted(self._members | self._newcomers):
            ending = _ending(self._pid(place))
            if ending is None:
                continue
            if ending.is_by_signal:
                self._lose(place, ending.status)
            elif not ending.status:
                self._words.lose(self._name(place))
                self._members.discard(place)
        if self._members:
            self._gather()
        else:
            self._dismiss()

    def _lose(self, place: int, number: int) -> None:
        """Go on without a process, if enough are left, and start another."""
        left = self._members - {place}
        is_member = place in self._members
        if is_member and len(left) < self._least:
            return
        name, pid = self._name(place), self._pid(place)
        self._words.lose(name)
        self._handlers[place].proc.wait()
        said = f"the process at place {place} (pid {pid}) was killed by"
        said += f" {signal.Signals(number).name}"
        if is_member:
            self._members = left
            self._start(place)
            self._say(
                f"{said}; {len(left)} go on, and another takes its place (pid"
                f" {self._pid(place)})."
            )
        else:
            if self._words.waits(name):
                self._words.take_in(name, None)
            self._forget(place)
            self._say(f"{said} before it had come in; none takes its place.")

    def _start(self, place: int) -> None:
        context = self._context
        self._lives[place] += 1
        Path(context.error_files[place]).unlink(missing_ok=True)
        handler = _Follower(
            (context.entrypoint, *map(str, context.args[place])),
            {**os.environ, **context.envs[place], VARIABLE: f"{self._lives[place]}"},
            (context.stdouts[place], context.stderrs[place]),
            place,
        )
        for stream in (self._handlers[place]._stdout, self._handlers[place]._stderr):
            if stream is not None:
                stream.close()
        self._handlers[place] = handler
        self._workers[place].id = handler.proc.pid
        self._newcomers.add(place)

    def _gather(self) -> None:
        """Say who makes the next world, once all have come who can."""
        number = self._number + 1
        names = {place: self._name(place) for place in self._members | self._newcomers}
        if not all(self._words.has_come(number, names[each]) for each in self._members):
            return
        waiting = {each for each in self._newcomers if self._words.waits(names[each])}
        self._members |= waiting
        self._newcomers -= waiting
        self._number = number
        self._words.call(number, [names[each] for each in sorted(self._members)])
        for each in waiting:
            self._words.take_in(names[each], number)

    def _dismiss(self) -> None:
        """Let torch's agent end those that came too late: the others are done."""
        for place in sorted(self._newcomers):
            self._say(
                f"the process at place {place} (pid {self._pid(place)}) had not come in when"
                " the others were done, and is ended."
            )
            self._forget(place)

    def _forget(self, place: int) -> None:
        """Take a process out of what the agent waits for."""
        self._newcomers.discard(place)
        self.gone.add(place)
        self._context._running_local_ranks.discard(place)

    @property
    def _handlers(self) -> dict[int, Any]:
        return cast("dict[int, Any]", self._context.subprocess_handlers)

    def _pid(self, place: int) -> int:
        return self._handlers[place].proc.pid

    def _name(self, place: int) -> str:
        return f"{place}.{self._lives[place]}"


class _Follower(SubprocessHandler):
    """A process whose output goes where that of another went before, behind it."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        outputs: tuple[str, str],
        place: int,
    ) -> None:
        """Start it; an empty name of a file is the launcher's own stream."""
        self._stdout, self._stderr = (
            open(each, "a") if each else None  # noqa: PTH123, SIM115 - torch closes them
            for each in outputs
        )
        self.local_rank_id = place
        self.proc = self._popen(tuple(command), env)


def _ending(pid: int) -> _Ending | None:
    """Return how a child ended; None while it runs. It stays to be waited for."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch's agent has waited for it
        return _Ending(is_by_signal=False, status=0)
    if found is None:
        return None
    return _Ending(found.si_code in _KILLED, found.si_status)
