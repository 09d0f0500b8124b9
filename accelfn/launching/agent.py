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
from attrs import frozen
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from accelfn.errors import LaunchError
from accelfn.launching.machines import NumberedRendezvous, handler_of
from accelfn.launching.script import (
    PREFIX,
    Failure,
    Watch,
    WholeLines,
    all_left_on_signal,
    by_cause,
    report,
)
from accelfn.plug import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    from accelfn.launching.machines import Machines, Plan

# `Crew`: the processes of an elastic run, with replacements for killed processes.
#
# torch's agent ends all ranks if one fails. So before the agent checks its processes, `Crew`
# removes each process that a signal killed, and starts a new process instead.


_KILLED = os.CLD_KILLED, os.CLD_DUMPED


@frozen
class _Ending:
    """How a process ended: `status` is a signal's number, or an exit code."""

    is_by_signal: bool
    status: int


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
        say: Callable[[str], None],
    ) -> None:
        """Start with torch's processes as the members of the world.

        Args:
            context: torch's context of the processes.
            workers: torch's records of the processes.
            least: the minimum number of ranks for the run to continue.
            store: the rendezvous store, where ranks and launcher exchange messages.
            say: prints a message of the launcher.
        """
        self._context: Any = context
        self._workers, self._least, self._say = workers, least, say
        self._words = Words.at(store)
        self._lives = dict.fromkeys(range(len(workers)), 0)
        self._members = set(self._lives)
        self._newcomers: set[int] = set()
        self.gone: set[int] = set()
        self._number = 0

    def look(self) -> None:
        """Replace killed processes; torch's agent handles all other failures."""
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
        """Start a replacement for a killed process, if at least `least` ranks are left."""
        members = self._members - {place}
        is_member = place in self._members
        if is_member and len(members) < self._least:
            return
        name, pid = self._name(place), self._pid(place)
        self._words.lose(name)
        self._handlers[place].proc.wait()
        message = f"process {place} (pid {pid}) was killed by"
        message += f" {signal.Signals(number).name}"
        if is_member:
            self._members = members
            self._start(place)
            self._say(
                f"{message}; {len(members)} continue, and a new process replaces it (pid"
                f" {self._pid(place)})."
            )
        else:
            if self._words.waits(name):
                self._words.take_in(name, None)
            self._forget(place)
            self._say(f"{message} before it joined the run; it is not replaced.")

    def _start(self, place: int) -> None:
        context = self._context
        self._lives[place] += 1
        Path(context.error_files[place]).unlink(missing_ok=True)
        handler = _Follower(
            (context.entrypoint, *map(str, context.args[place])),
            {
                **os.environ,
                **context.envs[place],
                Words.VARIABLE: f"{self._lives[place]}",
            },
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
        """Announce the next world when all members of the world have called `af.regroup`."""
        number = self._number + 1
        names = {place: self._name(place) for place in self._members | self._newcomers}
        if not all(
            self._words.has_come(number, names[member]) for member in self._members
        ):
            return
        waiting = {
            newcomer
            for newcomer in self._newcomers
            if self._words.waits(names[newcomer])
        }
        self._members |= waiting
        self._newcomers -= waiting
        self._number = number
        self._words.call(number, [names[member] for member in sorted(self._members)])
        for worker in waiting:
            self._words.take_in(names[worker], number)

    def _dismiss(self) -> None:
        """After the members have finished, let torch's agent end the waiting processes."""
        for place in sorted(self._newcomers):
            self._say(
                f"process {place} (pid {self._pid(place)}) had not joined the run when the"
                " others finished, and is ended."
            )
            self._forget(place)

    def _forget(self, place: int) -> None:
        """Remove a process from the processes that torch's agent waits for."""
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
    """A replacement process, which appends its output to the killed process's files."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        outputs: tuple[str, str],
        place: int,
    ) -> None:
        """Start the process; an empty output name means the launcher's own stream."""
        self._stdout, self._stderr = (
            open(output, "a") if output else None  # noqa: PTH123, SIM115 - torch closes them
            for output in outputs
        )
        self.local_rank_id = place
        self.proc = self._popen(tuple(command), env)


def _ending(pid: int) -> _Ending | None:
    """Return how a child process ended, without reaping it; None while it is running."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the process succeeded, and torch's agent reaped it
        return _Ending(is_by_signal=False, status=0)
    if status is None:
        return None
    return _Ending(status.si_code in _KILLED, status.si_status)


_EVERY_SECONDS = 0.1


@frozen
class Ended:
    """The outcome of this machine's ranks; `failures` is empty after success."""

    failures: tuple[Failure, ...]
    ranks: tuple[int, ...]
    started: float
    has_other_machines: bool

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that failed first; 0 after success."""
        return self.failures[0].exit_code if self.failures else 0

    @property
    def report(self) -> str:
        """The report about the failures, as text."""
        text = report(self.failures, ranks=self.ranks, start=self.started)
        if self.has_other_machines and all(
            failure.lost_peer for failure in self.failures
        ):
            text += (
                "\nEvery rank of this machine lost its connection to another rank. The cause"
                " is on another machine (see the report there), or in the network."
            )
        return text


class Agent(LocalElasticAgent):
    """torch's elastic agent, which here also records failures and replaces killed ranks."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: DefaultLogsSpecs,
        say: Callable[[str], None],
        least: int | None = None,
    ) -> None:
        """Create an agent.

        Args:
            spec: the command, the number of ranks, and the rendezvous.
            logs_specs: which output to write to files and to show.
            say: prints a message of the launcher.
            least: the minimum number of ranks of an elastic run; None without replacements.
        """
        super().__init__(spec, logs_specs, log_line_prefix_template=PREFIX)
        self._say = say
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
                say=self._say,
            )
        return pids

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        watch = self._look()
        if watch is None:
            return RunResult(state=WorkerState.HEALTHY)
        watch.question()
        monitor: Any = super()._monitor_workers
        result: RunResult = monitor(worker_group)
        if result.failures or result.state is WorkerState.SUCCEEDED:
            self._end_lines()
        ranks = tuple(worker_group.workers[pid].global_rank for pid in watch.pids)
        if result.failures:
            failures = tuple(by_cause(result.failures, watch))
            many = (worker_group.group_world_size or 1) > 1
            self.ended = Ended(failures, ranks, self._started, many)
            if all_left_on_signal(failures):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self._say(f"{self.ended.report}\n{self._next_attempt()}")
                self._started = time.time()
        elif result.state is WorkerState.SUCCEEDED:
            self.ended = Ended((), ranks, self._started, has_other_machines=False)
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

    def _next_attempt(self) -> str:
        most = self._worker_group.spec.max_restarts
        return f"restart {most - self._remaining_restarts + 1} of {most} follows"

    def _look(self) -> Watch | None:
        """Look for ended processes; return the watch if torch's agent should also look."""
        watch = self._watching()
        may_end = watch.may_end()
        # call the crew after the watch: the watch must see a killed process before the crew
        # removes it
        if self._crew is not None:
            self._crew.look()
        return watch if may_end and self._watching() is watch else None

    def _watching(self) -> Watch:
        """Return the `Watch` for the current processes; create it if they changed."""
        context = self._pcontext
        if context is None:
            msg = "torch's agent checked its ranks before it had started them."
            raise LaunchError(msg)
        dead = self._crew.gone if self._crew is not None else frozenset[int]()
        pids = {
            local: pid for local, pid in context.pids().items() if local not in dead
        }
        if self._watch is None or self._watch.pids != pids:
            self._watch = Watch(pids, context.error_files)
        return self._watch


def run_ranks(
    command: Sequence[str],
    plan: Plan,
    *,
    log_dir: str,
    follow_all: bool,
    say: Callable[[str], None],
) -> Ended:
    """Run a Python command in several processes on this machine, and wait until they end.

    Args:
        command: the arguments after `python`.
        plan: the number of processes, and the machines of the run.
        log_dir: an empty directory, for files with the ranks' output.
        follow_all: whether this process also copies the output of the first rank; otherwise
            that rank writes to the terminal directly.
        say: prints a message of the launcher.

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
    first = 0 if follow_all else 1
    tee = dict.fromkeys(range(first, nproc), Std.ALL)
    agent = Agent(spec, DefaultLogsSpecs(log_dir=log_dir, tee=tee), say, plan.least)
    is_over = False
    try:
        agent.run()
        is_over = True
    except (dist.DistError, RendezvousError) as error:
        if agent.has_ranks:
            msg = f"lost the connection to {machines.endpoint}: {_first_line(error)}"
            raise LaunchError(msg) from error
        raise _not_met(machines, error) from error
    finally:
        # after a signal to this machine, other machines can still use the rendezvous
        if is_over:
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
