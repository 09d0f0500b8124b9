# SPDX-License-Identifier: Apache-2.0
"""Run the ranks of one machine with torch's elastic agent.

Processes, rendezvous, environment and restarts work as in torchrun. accelfn adds three things. It
reports the ranks that failed before a restart. It does not restart a run that ended because of a
signal. And it finds and ends ranks that a signal such as SIGSTOP stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousError

from accelfn.errors import LaunchError
from accelfn.launching.machines import NumberedRendezvous, handler_of
from accelfn.launching.script import (
    PREFIX,
    Ended,
    Watch,
    WholeLines,
    by_cause,
    returncode,
    say,
)
from accelfn.plug import Words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    from accelfn.launching.machines import Machines, Plan

# `Crew`: the processes of an elastic run, with replacements for killed processes.
#
# torch's agent ends all ranks if one fails. So before the agent checks its processes, `Crew`
# removes each process that a signal killed, and starts a new process instead.


class Crew:
    """The processes of an elastic run: those in the world, and those that wait to join.

    Processes are numbered like the local ranks at the start; a replacement keeps the number.

    Attributes:
        gone: the numbers of processes that are not replaced, and whose exit is ignored.
    """

    def __init__(
        self,
        context: SubprocessContext,
        workers: Sequence[Worker],
        *,
        least: int,
        store: dist.Store,
    ) -> None:
        """Start with torch's processes as the members of the world.

        Args:
            context: torch's context of the processes.
            workers: torch's records of the processes.
            least: the minimum number of ranks for the run to continue.
            store: the rendezvous store, where ranks and launcher exchange messages.
        """
        self._context: Any = context
        self._handlers: dict[int, Any] = context.subprocess_handlers
        self._workers, self._least = workers, least
        self._words = Words.at(store)
        self._lives = dict.fromkeys(range(len(workers)), 0)
        self._members = set(self._lives)
        self._newcomers: set[int] = set()
        self.gone: set[int] = set()
        self._number = 0

    def look(self) -> None:
        """Replace killed processes; torch's agent handles all other failures."""
        for place in sorted(self._members | self._newcomers):
            status = returncode(self._pid(place))
            if status == 0:
                self._words.lose(self._name(place))
                self._members.discard(place)
            elif status is not None and status < 0:
                self._lose(place, signal.Signals(-status).name)
        if self._members:
            self._gather()
        else:
            self._dismiss()

    def _lose(self, place: int, signal_name: str) -> None:
        """Start a replacement for a killed process, if at least `least` ranks are left."""
        members = self._members - {place}
        is_member = place in self._members
        if is_member and len(members) < self._least:
            return
        name, pid = self._name(place), self._pid(place)
        self._words.lose(name)
        self._handlers[place].proc.wait()
        message = f"process {place} (pid {pid}) was killed by {signal_name}"
        if is_member:
            self._members = members
            self._start(place)
            say(
                f"{message}; {len(members)} continue, and a new process replaces it (pid"
                f" {self._pid(place)})."
            )
        else:
            if self._words.waits(name):
                self._words.take_in(name, None)
            self._forget(place)
            say(f"{message} before it joined the run; it is not replaced.")

    def _start(self, place: int) -> None:
        """Start a process, which appends its output to the killed process's files."""
        context, handler = self._context, self._handlers[place]
        self._lives[place] += 1
        Path(context.error_files[place]).unlink(missing_ok=True)
        command = context.entrypoint, *map(str, context.args[place])
        variables = {**context.envs[place], Words.VARIABLE: f"{self._lives[place]}"}
        handler.proc = handler._popen(command, {**os.environ, **variables})
        self._workers[place].id = handler.proc.pid
        self._newcomers.add(place)

    def _gather(self) -> None:
        """Announce the next world when all members of the world have called `af.regroup`."""
        words, number = self._words, self._number + 1
        if not all(words.has_come(number, self._name(m)) for m in self._members):
            return
        waiting = {n for n in self._newcomers if words.waits(self._name(n))}
        self._members |= waiting
        self._newcomers -= waiting
        self._number = number
        words.call(number, [self._name(member) for member in sorted(self._members)])
        for newcomer in waiting:
            words.take_in(self._name(newcomer), number)

    def _dismiss(self) -> None:
        """After the members have finished, let torch's agent end the waiting processes."""
        for place in sorted(self._newcomers):
            say(
                f"process {place} (pid {self._pid(place)}) had not joined the run when the"
                " others finished, and is ended."
            )
            self._forget(place)

    def _forget(self, place: int) -> None:
        """Remove a process from the processes that torch's agent waits for."""
        self._newcomers.discard(place)
        self.gone.add(place)
        self._context._running_local_ranks.discard(place)

    def _pid(self, place: int) -> int:
        return self._handlers[place].proc.pid

    def _name(self, place: int) -> str:
        return f"{place}.{self._lives[place]}"


_EVERY_SECONDS = 0.1


class Agent(LocalElasticAgent):
    """torch's elastic agent, which here also records failures and replaces killed ranks."""

    def __init__(
        self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, least: int | None = None
    ) -> None:
        """Create an agent.

        Args:
            spec: the command, the number of ranks, and the rendezvous.
            logs_specs: which output to write to files and to show.
            least: the minimum number of ranks of an elastic run; None without replacements.
        """
        super().__init__(spec, logs_specs, log_line_prefix_template=PREFIX)
        self._lines = WholeLines(sys.stdout), WholeLines(sys.stderr)
        self._started = time.time()
        self._watch: Watch | None = None
        self._least, self._crew = least, cast("Crew | None", None)
        self.ended: Ended | None = None

    @property
    def has_ranks(self) -> bool:
        """Whether ranks were started, after a successful rendezvous."""
        return self._pcontext is not None

    # torch wraps the overridden methods in a decorator without types
    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        start: Any = super()._start_workers
        out, err = cast("tuple[TextIO, TextIO]", self._lines)
        # torch stores sys.stdout and sys.stderr now, and later writes the ranks' output there
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            pids = start(worker_group)
        handler = worker_group.spec.rdzv_handler
        if self._least is not None and isinstance(handler, NumberedRendezvous):
            self._crew = Crew(
                cast("Any", self._pcontext),
                worker_group.workers,
                least=self._least,
                store=handler.store,
            )
        return pids

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        watch = self._watching()
        may_end = watch.may_end()
        # call the crew after the watch: the watch must see a killed process before the crew
        # removes it
        if self._crew is not None:
            self._crew.look()
        if not may_end or self._watching() is not watch:
            return RunResult(state=WorkerState.HEALTHY)
        watch.question()
        monitor: Any = super()._monitor_workers
        result: RunResult = monitor(worker_group)
        if not result.failures and result.state is not WorkerState.SUCCEEDED:
            return result
        self._end_lines()
        failures = by_cause(result.failures, watch)
        ranks = [worker_group.workers[local].global_rank for local in watch.pids]
        many = (worker_group.group_world_size or 1) > 1
        self.ended = outcome = Ended(failures, ranks, self._started, many)
        if failures and outcome.left_on_signal:
            self._remaining_restarts = 0
        elif failures and self._remaining_restarts:
            most = self._worker_group.spec.max_restarts
            number = most - self._remaining_restarts + 1
            say(f"{outcome.report}\nrestart {number} of {most} follows")
            self._started = time.time()
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        super()._shutdown(*args, **kwargs)
        self._end_lines()
        # torch does not close the files of the ranks' output
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        for handler in handlers.values():
            for stream in (handler._stdout, handler._stderr):
                if stream is not None:
                    stream.close()

    def _end_lines(self) -> None:
        for line in self._lines:
            line.end()

    def _watching(self) -> Watch:
        """Return the `Watch` for the current processes; create it if they changed."""
        context = self._pcontext
        assert context is not None  # noqa: S101 - torch's agent starts its ranks first
        dead = self._crew.gone if self._crew is not None else frozenset[int]()
        pids = {n: pid for n, pid in context.pids().items() if n not in dead}
        if self._watch is None or self._watch.pids != pids:
            self._watch = Watch(pids, context.error_files)
        return self._watch


def run_ranks(
    command: Sequence[str], plan: Plan, *, log_dir: str, follow_all: bool
) -> Ended:
    """Run a Python command in several processes on this machine, and wait until they end.

    Args:
        command: the arguments after `python`.
        plan: the number of processes, and the machines of the run.
        log_dir: an empty directory, for files with the ranks' output.
        follow_all: whether this process also copies the output of the first rank; otherwise
            that rank writes to the terminal directly.

    Raises:
        LaunchError: the machines did not connect, or lost the connection.
        SignalException: this process received a signal to end; the ranks have ended.
    """
    machines, nproc = plan.machines, plan.nproc
    try:
        handler = handler_of(machines)
    except (ValueError, dist.DistError, RendezvousError) as error:
        raise _not_met(machines, error) from error
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(map(_as_template, command)),
        rdzv_handler=handler,
        max_restarts=plan.max_restarts,
        monitor_interval=_EVERY_SECONDS,
        local_addr=machines.address,
    )
    tee = dict.fromkeys(range(0 if follow_all else 1, nproc), Std.ALL)
    agent = Agent(spec, DefaultLogsSpecs(log_dir=log_dir, tee=tee), plan.least)
    try:
        agent.run()
    except (dist.DistError, RendezvousError) as error:
        if agent.has_ranks:
            msg = f"lost the connection to {machines.endpoint}: {_first_line(error)}"
            raise LaunchError(msg) from error
        raise _not_met(machines, error) from error
    # only now: after a signal to this machine, other machines can still use the rendezvous
    handler.shutdown()
    if agent.ended is None:
        msg = f"the run {machines.run_id!r} at {machines.endpoint} has already ended."
        raise LaunchError(msg)
    return agent.ended


def _not_met(machines: Machines, error: Exception) -> LaunchError:
    return LaunchError(
        f"the machines did not connect at {machines.endpoint} within"
        f" {machines.join_seconds:g} s: {_first_line(error)}. Check that `accelfn launch` runs"
        " on every machine, with the same address and a different --machine-rank on each."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _as_template(arg: str) -> str:
    """Escape an argument, because torch's launcher replaces `${local_rank}` in it."""
    return arg.replace("$", "$$")
