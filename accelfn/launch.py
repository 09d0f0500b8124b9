# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of one run on this machine, and say which of them failed first.

The processes, their rendezvous and their environment are torchrun's, by way of
`torch.distributed.launcher`. Added is what a person at a terminal needs: rank 0 owns
the terminal, the other ranks' lines say whose they are, and a run that fails ends with
one report that begins with its cause.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accelfn.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

# What an error says when it was another rank that went away: ours, Gloo's, NCCL's.
_LOST_PEER = (
    "PeerFailed",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "ncclRemoteError",
)


def launch_script(
    script: str, args: Sequence[str], *, nproc: int, module: bool = False
) -> int:
    """Run a script in several processes on this machine, one rank each.

    Each process runs it as `python script args…` would, with the environment that
    torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …).
    When one fails, the others are ended, and a report on standard error begins with
    the rank that failed first.

    Args:
        script: the path of a Python file, or the name of a module.
        args: what the script finds in `sys.argv[1:]`.
        nproc: how many processes; at least 1.
        module: whether `script` is a module's name, as after `python -m`.

    Returns:
        The exit code for the command: 0; that of the rank that failed first; or
        128 + n, where signal n ended that rank or this process.

    Raises:
        LaunchError: `nproc` or `script` cannot be; no process was started.
    """
    _check(script, nproc=nproc, module=module)
    # Here, not above: torch takes a second to import, and help and mistakes need none.
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415
        ChildFailedError,
    )
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    command = [_worker_file(), *(["-m"] if module else []), script, *args]
    started = time.time()
    with (
        tempfile.TemporaryDirectory(prefix="accelfn-launch-") as log_dir,
        _threads_shared(nproc),
        _signal_handlers_kept(),
        _torch_log_muted(),
    ):
        config = _config(nproc, log_dir)
        try:
            elastic_launch(config, sys.executable)(*map(_as_template, command))
        except ChildFailedError as error:
            failures = _by_cause(error.failures)
        except SignalException as error:
            _say(f"ended by {error.sigval.name}, and its workers with it.")
            return 128 + error.sigval
        else:
            return 0
    first = failures[0]
    if first.left_on_signal and all(
        each.left_on_signal or each.was_told_to_end for each in failures
    ):
        name = signal.Signals(first.exit_code - 128).name
        _say(f"all ranks left on {name}, first rank {first.rank}.")
    else:
        _say(_report(failures, nproc=nproc, started=started))
    return first.exit_code


def _check(script: str, *, nproc: int, module: bool) -> None:
    if nproc < 1:
        msg = f"--nproc is {nproc}; give the number of processes to start, 1 or more."
        raise LaunchError(msg)
    if module or Path(script).is_file():
        return
    if Path(script).is_dir():
        msg = f"{script!r} is a directory; name a script in it, or a module after -m."
    else:
        msg = (
            f"there is no file {script!r} in {Path.cwd()}; "
            "name a Python script, or a module after -m."
        )
    raise LaunchError(msg)


def _worker_file() -> str:
    return str(Path(__file__).with_name("worker.py"))


def _as_template(arg: str) -> str:
    """Protect an argument from torch's launcher, which fills in `${local_rank}`."""
    return arg.replace("$", "$$")


def _config(nproc: int, log_dir: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415
        DefaultLogsSpecs,
        Std,
    )
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415

    # Rank 0 writes to the terminal itself, so that progress bars see one. What the
    # others write is followed line by line, and this process must not hold it back.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=Path(log_dir).name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # 0: a free port
        local_addr="127.0.0.1",  # a machine's own name does not always resolve
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=log_dir, tee=dict.fromkeys(range(1, nproc), Std.ALL)
        ),
        log_line_prefix_template="[rank ${rank}] ",
    )


@contextmanager
def _threads_shared(nproc: int) -> Generator[None]:
    """Divide the cores among the workers, where the user has not done so.

    Left alone, each worker would start a thread for every core. torchrun says 1.
    """
    if nproc == 1 or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, num_cores // nproc)
    if num_threads > 1:
        _say(f"OMP_NUM_THREADS={num_threads} ({num_cores} cores, {nproc} workers).")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextmanager
def _signal_handlers_kept() -> Generator[None]:
    """Put back the handlers that torch's launcher replaces and leaves replaced."""
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
    """Leave what torch's launcher logs about a failure to our one report."""
    log = logging.getLogger("torch.distributed.elastic")
    nowhere, propagate = logging.NullHandler(), log.propagate
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate


@frozen(kw_only=True)
class _Failure:
    """How one rank ended."""

    rank: int
    pid: int
    status: int  # as of `subprocess.Popen.returncode`: a signal is negative
    at: float  # seconds since the epoch
    error: str  # `ValueError: …`; empty, like the next, where the rank left no record
    traceback: str

    @classmethod
    def from_torch(cls, rank: int, failure: ProcessFailure) -> _Failure:
        message: Any = failure.error_file_data["message"]
        if isinstance(message, str):  # the rank recorded nothing
            message = {"message": "", "extraInfo": {}}
        details = message["extraInfo"]
        # torch knows only the second. Its end, so that an error of known time comes
        # before a death that may have followed from it.
        second_ends = min(failure.timestamp + 1.0, time.time())
        return cls(
            rank=rank,
            pid=failure.pid,
            status=details.get("status", failure.exitcode),
            at=details.get("time", second_ends),
            error=message["message"],
            traceback=details.get("py_callstack", ""),
        )

    @property
    def lost_peer(self) -> bool:
        """Whether the rank says that another one went away before it."""
        return any(sign in self.traceback for sign in _LOST_PEER)

    @property
    def was_told_to_end(self) -> bool:
        return not self.error and self.status == -signal.SIGTERM

    @property
    def left_on_signal(self) -> bool:
        """Whether it left `af.stopping`, or so: by an exit that says which signal came."""
        named = self.error == f"SystemExit: {self.status}"
        return named and self.status - 128 in (signal.SIGTERM, signal.SIGINT)

    @property
    def exit_code(self) -> int:
        return self.status if self.status > 0 else 128 - self.status

    @property
    def ending(self) -> str:
        if self.status > 0:
            return f"exit code {self.status}"
        return f"killed by {signal.Signals(-self.status).name}"


def _by_cause(failures: Mapping[int, ProcessFailure]) -> list[_Failure]:
    """Order failures, given in the order noticed, by time, the consequences last."""
    noticed = [_Failure.from_torch(rank, found) for rank, found in failures.items()]

    def key(failure: _Failure) -> tuple[bool, bool, float]:
        # The launcher sends SIGTERM only after it has noticed a failure.
        ended_by_us = failure.was_told_to_end and failure is not noticed[0]
        return ended_by_us, failure.lost_peer, failure.at

    return sorted(noticed, key=key)


def _report(failures: Sequence[_Failure], *, nproc: int, started: float) -> str:
    first, *others = failures
    lines = [
        (
            f"rank {first.rank} failed first ({first.ending}, pid {first.pid}) "
            f"after {first.at - started:.1f} s"
        ),
        first.traceback.rstrip() or _why_no_traceback(first),
    ]
    lines += [_one_line(failure) for failure in sorted(others, key=lambda f: f.rank)]
    finished = set(range(nproc)) - {failure.rank for failure in failures}
    lines += [f"rank {rank} had finished without an error" for rank in sorted(finished)]
    return "\n".join(lines)


def _one_line(failure: _Failure) -> str:
    if failure.error:
        return f"rank {failure.rank} followed: {failure.error.splitlines()[0]}"
    if failure.was_told_to_end:
        return f"rank {failure.rank} was ended by SIGTERM"
    return f"rank {failure.rank} followed: {failure.ending}"


def _why_no_traceback(failure: _Failure) -> str:
    if failure.status == -signal.SIGKILL:
        why = "the system kills so when memory runs out; see its log (dmesg)."
    elif failure.status == -signal.SIGTERM:
        why = "someone, or a scheduler, ended this one process."
    elif failure.status < 0:
        why = "its stack is in the output above, after 'Fatal Python error'."
    else:
        why = "the process ended itself without an exception (os._exit, C code)."
    return f"It left no traceback: {why}"


def _say(text: str) -> None:
    sys.stdout.flush()  # what the ranks wrote comes first
    sys.stderr.write(f"accelfn launch: {text}\n")
    sys.stderr.flush()
