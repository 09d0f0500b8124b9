# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run on this machine, and report the rank that failed first.

`agent` runs the processes. This file prepares their environment and writes to the terminal. Rank
0 uses the terminal directly, output of other ranks has a prefix, and a failed run ends with a
report that starts with the cause.
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

_WORKER = str(Path(__file__).with_name("worker.py"))
_ALONE = "ranks on one machine communicate over the loopback interface"
_ASKED = "the requested axes"
_MAY_GO = "the run continues if ranks are killed, and replaces them"


def launch_script(
    script: str, args: Sequence[str], plan: Plan, *, module: bool = False
) -> int:
    """Run a script in several processes on this machine, one process per rank.

    Each process runs `python script args…`, with the environment variables that torchrun sets
    (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …). If a rank fails, the launcher ends the
    other ranks. It then writes a report to standard error, which starts with the rank that failed
    first.

    Args:
        script: the path of a Python file, or the name of a module.
        args: the script's `sys.argv[1:]`.
        plan: the number of processes, and the machines of the run.
        module: whether `script` is a module's name, as in `python -m`.

    Returns:
        The exit code of the command. It is 0 after success, or the exit code of the rank that
        failed first, or 128 + n if signal n ended that rank or this process.

    Raises:
        LaunchError: `script` does not exist, or the machines did not connect. No process was
            started.
    """
    if not module and not arguments.is_file(Path(script)):
        msg = (
            f"there is no file {script!r} in {Path.cwd()}; name a Python script without"
            " `python` before it, or a module after -m."
        )
        if arguments.is_directory(Path(script)):
            msg = (
                f"{script!r} is a directory; pass a Python script, or -m and a module."
            )
        raise LaunchError(msg)
    # Rank 0 writes to the terminal directly, so that progress bars work. This process
    # copies the lines of the other ranks, and must not buffer them.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    command = [*(["-m"] if module else []), script, *args]
    result = run_here(command, plan)
    if isinstance(result, signal.Signals):
        say(f"received {result.name}, and ended all ranks.")
        return 128 + result
    if result.failures:
        say(result.report)
    return result.exit_code


def run_here(
    command: Sequence[str], plan: Plan, *, follow_all: bool = False
) -> Ended | signal.Signals:
    """Run ranks with `run_ranks`; restore environment and signal handlers afterwards.

    Returns the outcome of the ranks, or the signal to end that this process received.

    Args:
        command: the command of each rank: a file, or `-m` and a module, then its arguments.
        plan: the number of processes, and the machines of the run.
        follow_all: whether this process also shows rank 0's output.

    Raises:
        LaunchError: the system is Windows, or macOS with Python 3.12 or earlier. Or the machines
            did not connect.
    """
    # waitid says how a child process ended without reaping it
    if not hasattr(os, "waitid"):
        msg = (
            "af.launch and `accelfn launch` need Linux, or macOS with Python 3.13 or later. Start"
            " the script with torchrun, or simulate ranks: accelfn.testing.simulate(2, fn)."
        )
        raise LaunchError(msg)
    # imported here because `--help` and errors do not need torch's launcher
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415

    from accelfn.launching.agent import run_ranks  # noqa: PLC0415

    if plan.machines.rank is None:
        say(f"{_describe_trust(plan.machines)}.")
    variables = _variables(plan)
    for name, (value, why) in variables.items():
        is_usual = f"{name}={value}" == "OMP_NUM_THREADS=1"
        if why not in (_ALONE, _ASKED, _MAY_GO) and not is_usual:
            say(f"{name}={value} ({why}).")
    values = {name: value for name, (value, _) in variables.items()}
    command = [_WORKER, str(os.getpid()), *command]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="accelfn-launch-") as log_dir,
            _process_restored(values),
        ):
            return run_ranks(command, plan, log_dir=log_dir, follow_all=follow_all)
    except SignalException as error:
        return error.sigval


def _variables(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return environment variables to set besides torchrun's, each with a value and a reason."""
    machines, nproc = plan.machines, plan.nproc
    defaults: dict[str, tuple[str, str]] = {}  # unless the user has set these variables
    if nproc > 1:
        # The ranks share the cores equally. Without this, each rank would start a thread for
        # every core. torchrun sets 1 thread.
        cores = system.num_cores()
        threads = max(1, cores // nproc)
        defaults["OMP_NUM_THREADS"] = f"{threads}", f"{cores} cores, {nproc} ranks"
    # The interface that reaches the other machines; on a single machine, the loopback interface.
    # Gloo's default is the interface that the machine's name resolves to, which other machines
    # often cannot reach.
    why = f"its address {machines.address} reaches {machines.endpoint}"
    interface = machines.interface
    if machines.most == 1 and ip_address(machines.address).is_loopback:
        interface, why = interface_of("127.0.0.1"), _ALONE
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface, why
    if machines.rank is None:  # a new store for each restart; see `machines`
        why = "restarted ranks need a new store"
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1", why
    return {
        **({} if plan.axes is None else {axes.VARIABLE: (plan.axes, _ASKED)}),
        **({} if plan.least is None else {Words.VARIABLE: ("0", _MAY_GO)}),
        **{name: row for name, row in defaults.items() if name not in os.environ},
    }


def describe_plan(plan: Plan) -> list[str]:
    """Return lines that describe a launch, for a dry run."""
    machines = plan.machines
    processes = "1 process" if plan.nproc == 1 else f"{plan.nproc} processes"
    lines = [f"starts {processes} on this machine"]
    if machines.rank is not None and machines.endpoint != Machines().endpoint:
        number = f"machine {machines.rank} of {machines.most}"
        lines.append(f"connects as {number} at {machines.endpoint}")
    elif machines.most > 1:
        counts = f"{machines.fewest} to {machines.most}"
        lines.append(f"waits for {counts} machines at {machines.endpoint}")
    if machines.rank is None:
        lines.append(_describe_trust(machines))
    if plan.least is not None:
        lines.append(f"continues if ranks are killed, as long as {plan.least} are left")
    variables = _variables(plan).items()
    return lines + [f"sets {name}={value} ({why})" for name, (value, why) in variables]


def _describe_trust(machines: Machines) -> str:
    """Return a warning that torch's dynamic rendezvous unpickles data from its port."""
    return (
        f"machines unpickle data from {machines.endpoint}: anyone who can reach that port can"
        " run code as you; --machine-rank and --main-address avoid pickle"
    )


@contextmanager
def _process_restored(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables for the ranks to inherit, and mute torch's log; restore both afterwards.

    The log is about failed ranks, for which accelfn writes its own report. Signal handlers are
    also restored, because torch's launcher replaces them.
    """
    before = {name: os.environ[name] for name in variables if name in os.environ}
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {n: signal.getsignal(n) for n in (signals if is_main else ())}
    log = logging.getLogger("torch.distributed.elastic")
    nowhere, propagate = logging.NullHandler(), log.propagate
    os.environ.update(variables)
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Print a message of the launcher to standard error."""
    sys.stdout.flush()  # show the output of the ranks first
    sys.stderr.write(f"accelfn launch: {text}\n")
    sys.stderr.flush()


# `Watch`: find the ranks of this machine that failed, and the state of the other ranks.


_GRACE_SECONDS = 1.0
"""Time for ranks to report a lost rank before the launcher ends them."""
_ANSWER_SECONDS = 0.5


class Watch:
    """Watches the processes of one attempt (the start, or a restart), by local rank.

    Attributes:
        pids: the process ids.
        failed_at: when ranks failed by themselves, in seconds since 1970.
        stopped: the ranks that a signal such as SIGSTOP stopped without ending them.
        stacks: the stacks of ranks that neither failed nor were stopped, most recent call
            first.
    """

    def __init__(self, pids: Mapping[int, int], error_files: Mapping[int, str]) -> None:
        """Watch processes; each has a file where it records its error."""
        self.pids, self._error_files = dict(pids), dict(error_files)
        self.failed_at: dict[int, float] = {}
        self.stopped: set[int] = set()
        self.stacks: dict[int, str] = {}

    def may_end(self) -> bool:
        """Look for failed ranks; return whether torch's agent may now end the other ranks.

        Returns True if no rank is running, or one second after the first failure, so that other
        ranks can report their errors.
        """
        running = self._running()
        for local in self.pids.keys() - running:
            if returncode(self.pids[local]):
                self.failed_at.setdefault(local, time.time())
        if not running:
            return True
        first = min(self.failed_at.values(), default=math.inf)
        return time.time() - first > _GRACE_SECONDS

    def question(self) -> None:
        """After a failure, ask the running ranks for their stacks, and end stopped ranks.

        A stopped rank gets SIGTERM and then SIGCONT, because a stopped process handles no signal
        until it continues.
        """
        running = self._running() if self.failed_at else set[int]()
        self.stopped = {local for local in running if _is_stopped(self.pids[local])}
        for local in self.stopped:
            os.kill(self.pids[local], signal.SIGTERM)
            os.kill(self.pids[local], signal.SIGCONT)
        targets = running - self.stopped
        files = {local: Path(where_file(self._error_files[local])) for local in targets}
        # a rank without its file has no handler yet, and the signal would kill it
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
        return {local for local, pid in self.pids.items() if returncode(pid) is None}


def returncode(pid: int) -> int | None:
    """Return a child process's exit code or negative signal; None while it is running.

    The process is not reaped: torch's agent waits for it later.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch's agent has already reaped it, without a failure
        return 0
    if status is None:
        return None
    return status.si_status * (1 if status.si_code == os.CLD_EXITED else -1)


def _is_stopped(pid: int) -> bool:
    status = _read_text(Path("/proc", str(pid), "stat"))
    return status.rpartition(")")[2].split()[:1] == ["T"]


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_whole(stack: str) -> bool:
    """Return whether a stack was written to its end; Python ends a deep stack with "..."."""
    return stack.endswith(("in <module>\n", "  ...\n"))


def _users(stack: str) -> str:
    """Return a stack without the launcher's frames below the user's script."""
    _, *frames = stack.splitlines()
    leads = tuple(f'  File "{lead}' for lead in (*LEADS, "<frozen "))
    return "\n".join(frame for frame in frames if not frame.startswith(leads))


# `Failure` and `Ended`: how the ranks of a run ended, in order from cause to consequence.


# Words in an error that another rank caused: accelfn's, Gloo's and NCCL's errors.
_LOST_PEER = (
    *("PeerFailed", "Connection closed by peer", "Connection reset by peer"),
    *("Broken pipe", "failed to recv, got 0 bytes", "ncclRemoteError"),
)
_CRASHED = "its stack is in the output above, after 'Fatal Python error'"
_WHY_SIGNALED: Mapping[str, str] = {
    "SIGSTOP": "a person or a debugger stopped this process and did not continue it.",
    "SIGKILL": "the system does this when memory runs out; see its log (dmesg).",
    "SIGTERM": "a person or a scheduler ended this process, and no other.",
    "SIGABRT": (
        f"{_CRASHED}. If the output names Gloo, ranks were in different collectives: Gloo"
        " aborts a process that receives more data than it expects. Call every collective on"
        " all ranks, not inside `if world.is_main`. To find both calls, also those of wrap_ddp"
        " and wrap_fsdp, run accelfn.testing.simulate(2, train)."
        " World.from_env(checked=True) only finds calls such as af.all_reduce."
    ),
}


@frozen(kw_only=True)
class Failure:
    """How one rank failed, or was ended because of another rank's failure."""

    rank: int
    pid: int
    status: int  # like `subprocess.Popen.returncode`: the negative number of a signal
    at: float  # seconds since 1970
    error: str  # such as `ValueError: …`; empty if the rank recorded no error
    traceback: str  # empty if the rank recorded no error
    ended_by_us: bool = False  # the launcher ended the rank, because others had failed
    was_stopped: bool = False  # a signal such as SIGSTOP had stopped the process
    did_not_arrive: bool = False  # all other ranks reported that they lost a rank
    # the stack before the launcher ended the rank, most recent call first
    stack: str = ""

    @classmethod
    def from_torch(cls, rank: int, failure: ProcessFailure, watch: Watch) -> Failure:
        """Create a failure from torch's record, the watch and the rank's error file."""
        message: Any = failure.error_file_data["message"]
        if isinstance(message, str):  # the rank recorded no error
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
        """Whether the rank's error is that it lost the connection to another rank."""
        return any(sign in self.traceback for sign in _LOST_PEER)

    @property
    def places(self) -> tuple[str, ...]:
        """The `File ...` lines of the rank's traceback."""
        lines = self.traceback.splitlines()
        return tuple(line for line in lines if line.startswith("  File "))

    @property
    def was_told_to_end(self) -> bool:
        """Whether the rank ended by SIGTERM without an error, as if the launcher ended it."""
        return not self.error and self.status == -signal.SIGTERM

    @property
    def left_on_signal(self) -> bool:
        """Whether the rank exited with code 128 + signal, as `af.stopping` does."""
        named = self.error == f"SystemExit: {self.status}"
        return named and self.status - 128 in (signal.SIGTERM, signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would show: 128 + n after signal n."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def ending(self) -> str:
        """A phrase for the report, such as "exit code 1" or "killed by SIGKILL"."""
        if self.status > 0:
            return f"exit code {self.status}"
        if self.did_not_arrive and not self.was_stopped:
            return "the other ranks waited for it"
        how = "stopped" if self.was_stopped else "killed"
        return f"{how} by {signal.Signals(-self.status).name}"


def by_cause(failures: Mapping[int, ProcessFailure], watch: Watch) -> list[Failure]:
    """Sort the failures of ranks by time, causes before consequences.

    If a rank raised an error before any rank exited, the rank failed by itself, even if the
    launcher ended its process. Ranks that were stopped or did not arrive raised no error. They
    follow ranks that raised an error, and precede ranks that only lost another rank.
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


@frozen
class Ended:
    """The outcome of this machine's ranks.

    Attributes:
        failures: the failures, in the order of `by_cause`; empty after success.
        ranks: the ranks of this machine.
        started: when the run started, in seconds since 1970.
        has_other_machines: whether other machines have ranks of the run.
    """

    failures: Sequence[Failure]
    ranks: Collection[int]
    started: float
    has_other_machines: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that failed first; 0 after success."""
        return self.failures[0].exit_code if self.failures else 0

    @property
    def left_on_signal(self) -> bool:
        """Whether all ranks that failed exited because of a signal to the run."""
        return self.failures[0].left_on_signal and all(
            failure.left_on_signal or failure.was_told_to_end
            for failure in self.failures
        )

    @property
    def report(self) -> str:
        """The report about the failures, as text; it starts with the cause."""
        first, *rest = self.failures
        if self.left_on_signal:
            name = signal.Signals(first.exit_code - 128).name
            return f"all ranks exited because of {name}, rank {first.rank} first."
        how, seconds = f"{first.ending}, pid {first.pid}", first.at - self.started
        lines = [
            f"rank {first.rank} failed first ({how}) after {seconds:.1f} s",
            first.traceback.rstrip() or _why_no_traceback(first),
        ]
        places = {first.places, ()}
        for failure in sorted(rest, key=lambda f: f.rank):
            lines.append(_one_line(failure))
            # if all ranks only lost other ranks, show the place where each of them waited
            is_cause = first.lost_peer or not failure.lost_peer
            if is_cause and failure.places not in places:
                lines.append(failure.traceback.rstrip())
                places.add(failure.places)
        healthy = set(self.ranks) - {failure.rank for failure in self.failures}
        lines += [f"rank {r} had finished without an error" for r in sorted(healthy)]
        if self.has_other_machines and all(f.lost_peer for f in self.failures):
            lines.append(
                "Every rank of this machine lost its connection to another rank. The cause"
                " is on another machine (see the report there), or in the network."
            )
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
        where = f" Its stack, most recent call first:\n{failure.stack}"
        where = where if failure.stack else ""
        return f"It had not raised an error; the launcher ended it.{where}"
    if failure.status >= 0:
        why = "the process ended itself without an exception (os._exit, C code)."
    else:
        why = _WHY_SIGNALED.get(signal.Signals(-failure.status).name, f"{_CRASHED}.")
    return f"It left no traceback: {why}"


# `WholeLines`: show the output of ranks in complete lines.
#
# torch's launcher copies new output of the ranks at once, even if a line is not complete. Then a
# line could contain output of several ranks.


PREFIX = "[rank ${rank}] "
_PREFIXED = re.compile(r"\[rank \d+\] ")


class WholeLines:
    """A stream that buffers each rank's output until the line ends."""

    def __init__(self, stream: TextIO) -> None:
        """Write complete lines to `stream`."""
        self._stream = stream
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Write a rank's line when it is complete; write text without a prefix at once."""
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
        """Flush the complete lines."""
        self._stream.flush()

    def end(self) -> None:
        """Write the incomplete lines of ranks that have ended."""
        while self._begun:
            self._stream.write(f"{self._begun.popitem()[1]}\n")
