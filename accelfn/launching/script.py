# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run on this machine, and report the rank that failed first.

`agent` runs the processes. This file serves the person at the terminal: rank 0 owns the
terminal, lines of other ranks have a prefix, and a failed run ends with a report that begins
with the cause.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from io import TextIOWrapper
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attrs import evolve, frozen

from accelfn.errors import LaunchError
from accelfn.launching.machines import Machines, Plan, interface_of
from accelfn.launching.worker import ASKS_WHERE, LEADS, where_file
from accelfn.plug import Words, arguments, axes, connection, system

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from accelfn.launching.agent import Ended

_WORKER = str(Path(__file__).with_name("worker.py"))
_ALONE = "the ranks of one machine talk on its loopback"
_ASKED = "the axes that were asked for"
_MAY_GO = "ranks may be killed, and others take their places"


def launch_script(
    script: str,
    args: Sequence[str],
    plan: Plan,
    *,
    module: bool = False,
) -> int:
    """Run a script in several processes on this machine, one rank each.

    Each process runs it as `python script args…` would, with the environment that
    torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …).
    If a rank fails, the launcher ends the other ranks, and writes a report to standard error
    that begins with the rank that failed first.

    Args:
        script: the path of a Python file, or the name of a module.
        args: the script's `sys.argv[1:]`.
        plan: the number of processes, and the machines of the run.
        module: whether `script` is a module's name, as after `python -m`.

    Returns:
        The exit code for the command: 0; that of the rank that failed first; or
        128 + n, where signal n ended that rank or this process.

    Raises:
        LaunchError: `script` cannot be, or the machines did not meet; no
            process was started.
    """
    _check(script, module=module)
    # Here, not above: help and mistakes need none of torch's launcher.
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415
        SignalException,
    )

    # Rank 0 writes to the terminal itself, so that progress bars see one. What the
    # others write is followed line by line, and this process must not hold it back.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    command = [*(["-m"] if module else []), script, *args]
    try:
        result = run_here(command, plan)
    except SignalException as error:
        say(f"ended by {error.sigval.name}, and its workers with it.")
        return 128 + error.sigval
    if result.failures:
        say(result.report)
    return result.exit_code


def check_system() -> None:
    """Raise if the system cannot say how a child process ended without reaping it.

    Raises:
        LaunchError: the system is Windows, or macOS with Python 3.12 or earlier.
    """
    if not hasattr(os, "waitid"):
        msg = (
            "af.launch and `accelfn launch` need Linux, or macOS with Python 3.13 or later. Start"
            " the script with torchrun, or simulate ranks: accelfn.testing.simulate(2, fn)."
        )
        raise LaunchError(msg)


def run_here(command: Sequence[str], plan: Plan, *, follow_all: bool = False) -> Ended:
    """Run ranks as `run_ranks` does, and restore this process's state.

    Args:
        command: the command of each rank: a file, or `-m` and a module, and arguments.
        plan: the number of processes, and the machines of the run.
        follow_all: as in `run_ranks`.
    """
    check_system()
    from accelfn.launching.agent import run_ranks  # noqa: PLC0415  as above

    if plan.machines.rank is None:
        say(f"{_describe_trust(plan.machines)}.")
    variables = _variables(plan)
    for name, (value, why) in variables.items():
        is_usual = f"{name}={value}" == "OMP_NUM_THREADS=1"
        if why not in (_ALONE, _ASKED, _MAY_GO) and not is_usual:
            say(f"{name}={value} ({why}).")
    values = {name: value for name, (value, _) in variables.items()}
    with (
        tempfile.TemporaryDirectory(prefix="accelfn-launch-") as log_dir,
        _environment(values),
        _signal_handlers_kept(),
        _torch_log_muted(),
    ):
        return run_ranks(
            [_WORKER, str(os.getpid()), *command],
            plan,
            log_dir=log_dir,
            follow_all=follow_all,
            say=say,
        )


def _check(script: str, *, module: bool) -> None:
    if module or arguments.is_file(Path(script)):
        return
    if arguments.is_directory(Path(script)):
        msg = f"{script!r} is a directory; name a script in it, or a module after -m."
    else:
        msg = (
            f"there is no file {script!r} in {Path.cwd()}; "
            "name a Python script, or a module after -m."
        )
    raise LaunchError(msg)


def _variables(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return the ranks' variables in addition to torchrun's, with values and reasons."""
    return {
        **({} if plan.axes is None else {axes.VARIABLE: (plan.axes, _ASKED)}),
        **({} if plan.least is None else {Words.VARIABLE: ("0", _MAY_GO)}),
        **_shared_threads(plan.nproc),
        **_gloo_interface(plan.machines),
        **_own_stores(plan.machines),
    }


def _shared_threads(nproc: int) -> dict[str, tuple[str, str]]:
    """Divide the cores among the workers, unless the user has set the number of threads.

    By default, each worker would start a thread for every core. torchrun sets 1.
    """
    if nproc == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    num_cores = system.num_cores()
    num_threads = max(1, num_cores // nproc)
    return {
        "OMP_NUM_THREADS": (str(num_threads), f"{num_cores} cores, {nproc} workers")
    }


def _gloo_interface(machines: Machines) -> dict[str, tuple[str, str]]:
    """Let Gloo use the interface towards the other machines, unless the user has set it.

    By default, Gloo takes the interface that the machine's name resolves to, which other
    machines often cannot reach. The ranks of a single machine do not need this.
    """
    name, interface = "GLOO_SOCKET_IFNAME", machines.interface
    if name in os.environ:
        return {}
    if machines.most == 1 and ip_address(machines.address).is_loopback:
        loopback = interface_of("127.0.0.1")
        return {} if loopback is None else {name: (loopback, _ALONE)}
    if interface is None:
        return {}
    why = f"which has {machines.address}, towards {machines.endpoint}"
    return {name: (interface, why)}


def _own_stores(machines: Machines) -> dict[str, tuple[str, str]]:
    """Let torch's rendezvous open a store for each attempt; see `machines`."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if machines.rank is not None or name in os.environ:
        return {}
    return {name: ("1", "ranks that start again need a store of their own")}


def describe_plan(plan: Plan) -> list[str]:
    """Describe a launch in lines, for a dry run."""
    machines = plan.machines
    processes = "1 process" if plan.nproc == 1 else f"{plan.nproc} processes"
    lines = [f"starts {processes} on this machine"]
    if machines.rank is not None and machines.endpoint != Machines().endpoint:
        lines.append(
            f"meets as {machines.rank} of {machines.most} at {machines.endpoint}"
        )
    elif machines.most > 1:
        counts = f"{machines.fewest} to {machines.most}"
        lines.append(f"meets {counts} machines at {machines.endpoint}")
    if machines.rank is None:
        lines.append(_describe_trust(machines))
    if plan.least is not None:
        lines.append(
            f"goes on where ranks are killed, as long as {plan.least} are left"
        )
    variables = _variables(plan)
    return lines + [
        f"sets {name}={value} ({why})" for name, (value, why) in variables.items()
    ]


def _describe_trust(machines: Machines) -> str:
    """Describe who can run code in a launch with a dynamic rendezvous."""
    return (
        f"machines unpickle records at {machines.endpoint}: whoever can reach that port runs"
        " code as you; --machine-rank and --main-address need no pickle"
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables for the ranks to inherit, and restore them afterwards."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signal_handlers_kept() -> Generator[None]:
    """Restore the signal handlers that torch's launcher replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _torch_log_muted() -> Generator[None]:
    """Mute torch's log of failures, because accelfn writes its own report."""
    log = logging.getLogger("torch.distributed.elastic")
    nowhere, propagate = logging.NullHandler(), log.propagate
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate


def say(text: str) -> None:
    """Print a message of the launcher."""
    sys.stdout.flush()  # what the ranks wrote comes first
    sys.stderr.write(f"accelfn launch: {text}\n")
    sys.stderr.flush()


# `Watch`: find the ranks of this machine that failed, and the state of the other ranks.


_GRACE_SECONDS = 1.0
"""Time for ranks to report a lost rank before the launcher ends them."""
_ANSWER_SECONDS = 0.5


class Watch:
    """The processes of one attempt, by local rank.

    Attributes:
        pids: the process numbers.
        failed_at: the times at which ranks failed by themselves, in seconds since the epoch.
        stopped: ranks that a signal stopped without ending them.
        stacks: the stacks of ranks that neither failed nor were stopped, most recent call
            first.
    """

    def __init__(self, pids: Mapping[int, int], error_files: Mapping[int, str]) -> None:
        """Take the processes, and the file for the error of each."""
        self.pids, self._error_files = dict(pids), dict(error_files)
        self.failed_at: dict[int, float] = {}
        self.stopped: set[int] = set()
        self.stacks: dict[int, str] = {}

    def may_end(self) -> bool:
        """Check for failed ranks; return whether torch's agent may now end the other ranks.

        True after a failure and a short wait for further failures, or if no rank is left.
        """
        running = self._running()
        for local in self.pids.keys() - running:
            if _status(self.pids[local]):
                self.failed_at.setdefault(local, time.time())
        if not running:
            return True
        first = min(self.failed_at.values(), default=math.inf)
        return time.time() - first > _GRACE_SECONDS

    def question(self) -> None:
        """Ask running ranks for their stacks after another rank has failed.

        Ends stopped ranks by SIGTERM and SIGCONT: a stopped process handles no signal until it
        continues.
        """
        running = self._running() if self.failed_at else set[int]()
        self.stopped = {local for local in running if _is_stopped(self.pids[local])}
        for local in self.stopped:
            os.kill(self.pids[local], signal.SIGTERM)
            os.kill(self.pids[local], signal.SIGCONT)
        files = {
            local: Path(where_file(self._error_files[local]))
            for local in running - self.stopped
        }
        # the signal would kill a rank that has not made its file: it has no handler yet
        ready = {local: file for local, file in files.items() if arguments.exists(file)}
        for local in ready:
            os.kill(self.pids[local], ASKS_WHERE)
        self.stacks = self._answers(ready)

    def _answers(self, files: Mapping[int, Path]) -> dict[int, str]:
        until = time.monotonic() + _ANSWER_SECONDS
        answers: dict[int, str] = {}
        while len(answers) < len(files) and time.monotonic() < until:
            time.sleep(0.02)
            texts = {local: _read_text(file) for local, file in files.items()}
            answers = {local: text for local, text in texts.items() if _is_whole(text)}
        return {local: _users(text) for local, text in answers.items()}

    def _running(self) -> set[int]:
        return {local for local, pid in self.pids.items() if _status(pid) is None}


def _status(pid: int) -> int | None:
    """Return how a child process ended, without reaping the process; None while it runs."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        status = os.waitid(os.P_PID, pid, options)
    except ChildProcessError:  # it was waited for, and had not failed
        return 0
    return None if status is None else status.si_status


def _is_stopped(pid: int) -> bool:
    try:
        status = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_whole(stack: str) -> bool:
    """Return whether a stack is written completely; Python truncates deep stacks."""
    return stack.endswith(("in <module>\n", "  ...\n"))


def _users(stack: str) -> str:
    """Return a stack without the frames that lead to the user's script."""
    _, *frames = stack.splitlines()
    leads = tuple(f'  File "{lead}' for lead in (*LEADS, "<frozen "))
    return "\n".join(frame for frame in frames if not frame.startswith(leads))


# How the ranks of a run ended, the one that failed first before its consequences.


# What an error says when it was another rank that went away: ours, Gloo's, NCCL's.
_LOST_PEER = (
    "PeerFailed",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "ncclRemoteError",
)
_ABORTED = (
    "its stack is in the output above, after 'Fatal Python error'. Gloo aborts a process"
    " that receives more than it expects: where its name is above, ranks were in different"
    " collectives. Call every collective on all ranks, not behind `if world.is_main`."
    " accelfn.testing.simulate(2, train) names both calls, those of wrap_ddp and wrap_fsdp"
    " too. World.from_env(checked=True) names calls such as af.mean alone."
)


@frozen(kw_only=True)
class Failure:
    """The failure of a rank."""

    rank: int
    pid: int
    status: int  # as of `subprocess.Popen.returncode`: a signal is negative
    at: float  # seconds since the epoch
    error: str  # `ValueError: …`; empty, like the next, where the rank left no record
    traceback: str
    ended_by_us: bool = False  # because others had failed
    was_stopped: bool = False  # by a signal that halts a process and does not end it
    did_not_arrive: bool = False  # where all others say that they lost one
    stack: str = ""  # where it was when it was ended, most recent call first

    @classmethod
    def from_torch(cls, rank: int, failure: ProcessFailure, watch: Watch) -> Failure:
        """Combine the records of torch, of the watch and of the rank."""
        message: Any = failure.error_file_data["message"]
        if isinstance(message, str):  # the rank recorded nothing
            message = {"message": "", "extraInfo": {}}
        details = message["extraInfo"]
        local = failure.local_rank
        was_stopped = local in watch.stopped
        status = details.get("status", failure.exitcode)
        return cls(
            rank=rank,
            pid=failure.pid,
            status=-signal.SIGSTOP if was_stopped else status,
            at=details.get("time", watch.failed_at.get(local, time.time())),
            error=message["message"],
            traceback=details.get("py_callstack", ""),
            ended_by_us=local not in watch.failed_at,
            was_stopped=was_stopped,
            stack=watch.stacks.get(local, ""),
        )

    @property
    def lost_peer(self) -> bool:
        """Return whether the rank's error reports a lost rank."""
        return any(sign in self.traceback for sign in _LOST_PEER)

    @property
    def places(self) -> tuple[str, ...]:
        """The lines of code in the rank's traceback."""
        lines = self.traceback.splitlines()
        return tuple(line for line in lines if line.startswith("  File "))

    @property
    def was_told_to_end(self) -> bool:
        """Return whether the rank ended like ranks that the launcher ends."""
        return not self.error and self.status == -signal.SIGTERM

    @property
    def left_on_signal(self) -> bool:
        """Return whether the rank's exit code names a signal, as after `af.stopping`."""
        named = self.error == f"SystemExit: {self.status}"
        return named and self.status - 128 in (signal.SIGTERM, signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would show."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def ending(self) -> str:
        """The end of the rank, in words."""
        if self.status > 0:
            return f"exit code {self.status}"
        if self.did_not_arrive and not self.was_stopped:
            return "the others waited for it"
        how = "stopped" if self.was_stopped else "killed"
        return f"{how} by {signal.Signals(-self.status).name}"


def by_cause(failures: Mapping[int, ProcessFailure], watch: Watch) -> list[Failure]:
    """Order failures by time, causes before consequences.

    A rank that raised before any rank ended failed by itself, even if the launcher ended it.
    Ranks that were stopped or did not arrive raised nothing: they come after ranks that raised,
    and before ranks that waited for them.
    """
    rows = [Failure.from_torch(r, failure, watch) for r, failure in failures.items()]
    first = min((f.at for f in rows if not f.ended_by_us), default=0.0)
    rows = [
        evolve(f, ended_by_us=f.ended_by_us and not (f.error and f.at < first))
        for f in rows
    ]
    if all(f.lost_peer for f in rows if not f.ended_by_us):
        rows = [evolve(f, did_not_arrive=f.ended_by_us and not f.error) for f in rows]

    def key(failure: Failure) -> tuple[bool, bool, bool, float]:
        is_blamed = failure.was_stopped or failure.did_not_arrive
        ended_by_us = failure.ended_by_us and not is_blamed
        return ended_by_us, failure.lost_peer, is_blamed, failure.at

    return sorted(rows, key=key)


def all_left_on_signal(failures: Sequence[Failure]) -> bool:
    """Return whether all failed ranks exited because of a signal."""
    return failures[0].left_on_signal and all(
        failure.left_on_signal or failure.was_told_to_end for failure in failures
    )


def report(failures: Sequence[Failure], *, ranks: Collection[int], start: float) -> str:
    """Return the report of a failed run, which begins with the cause.

    Args:
        failures: failures in the order of `by_cause`.
        ranks: the ranks of this machine.
        start: the start of the run, in seconds since the epoch.
    """
    first, *rest = failures
    if all_left_on_signal(failures):
        name = signal.Signals(first.exit_code - 128).name
        return f"all ranks left on {name}, first rank {first.rank}."
    lines = [
        (
            f"rank {first.rank} failed first ({first.ending}, pid {first.pid}) "
            f"after {first.at - start:.1f} s"
        ),
        first.traceback.rstrip() or _why_no_traceback(first),
    ]
    places = {first.places, ()}
    for failure in sorted(rest, key=lambda f: f.rank):
        lines.append(_one_line(failure))
        # where all lost one another, each waited somewhere, and that is the question
        is_cause = first.lost_peer or not failure.lost_peer
        if is_cause and failure.places not in places:
            lines.append(failure.traceback.rstrip())
            places.add(failure.places)
    healthy = set(ranks) - {failure.rank for failure in failures}
    lines += [f"rank {rank} had finished without an error" for rank in sorted(healthy)]
    return "\n".join(lines)


def _one_line(failure: Failure) -> str:
    if failure.error:
        kind, _, text = failure.error.partition(": ")
        return f"rank {failure.rank} followed: {connection.name_error(kind, text)}"
    if failure.was_told_to_end:
        return f"rank {failure.rank} was ended by SIGTERM"
    return f"rank {failure.rank} followed: {failure.ending}"


def _why_no_traceback(failure: Failure) -> str:
    if failure.did_not_arrive and not failure.was_stopped:
        where = f" It was here, most recent call first:\n{failure.stack}"
        return (
            f"It had not failed; the launcher ended it.{where if failure.stack else ''}"
        )
    if failure.was_stopped:
        why = "someone, or a debugger, stopped this process and did not continue it."
    elif failure.status == -signal.SIGKILL:
        why = "the system kills so when memory runs out; see its log (dmesg)."
    elif failure.status == -signal.SIGTERM:
        why = "someone, or a scheduler, ended this one process."
    elif failure.status == -signal.SIGABRT:
        why = _ABORTED
    elif failure.status < 0:
        why = "its stack is in the output above, after 'Fatal Python error'."
    else:
        why = "the process ended itself without an exception (os._exit, C code)."
    return f"It left no traceback: {why}"


# Output of ranks in whole lines, so that no line mixes two ranks.
#
# torch's launcher follows the ranks' files and shows new text at once, even a part of a line.
# Parts of several ranks would share a line.


PREFIX = "[rank ${rank}] "
_PREFIXED = re.compile(r"\[rank \d+\] ")


class WholeLines:
    """A stream that buffers each rank's output until the line ends."""

    def __init__(self, stream: TextIO) -> None:
        """Take the stream for complete lines."""
        self._stream = stream
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Add a piece of a rank's line after its prefix; pass on text without a prefix."""
        match = _PREFIXED.match(text)
        if match is None:
            return self._stream.write(text)
        prefix = match.group()
        line = self._begun.pop(prefix, prefix) + text[match.end() :]
        if line.endswith("\n"):
            self._stream.write(line)
        else:
            self._begun[prefix] = line
        return len(text)

    def flush(self) -> None:
        """Flush complete lines."""
        self._stream.flush()

    def end(self) -> None:
        """Show incomplete lines of ranks that have ended."""
        while self._begun:
            self._stream.write(f"{self._begun.popitem()[1]}\n")
