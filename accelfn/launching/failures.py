# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run ended, the one that failed first before its consequences."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from accelfn.world.roll_call import name_error

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from accelfn.launching.watch import Watch

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
    """How one rank ended."""

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
        """Read what torch and the watch noticed, and what the rank itself has recorded."""
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
        """Whether the rank says that another one went away before it."""
        return any(sign in self.traceback for sign in _LOST_PEER)

    @property
    def places(self) -> tuple[str, ...]:
        """The lines of code that its traceback names."""
        lines = self.traceback.splitlines()
        return tuple(line for line in lines if line.startswith("  File "))

    @property
    def was_told_to_end(self) -> bool:
        """Whether it ended as ranks do that the launcher ends."""
        return not self.error and self.status == -signal.SIGTERM

    @property
    def left_on_signal(self) -> bool:
        """Whether it left `af.stopping`, or so: by an exit that says which signal came."""
        named = self.error == f"SystemExit: {self.status}"
        return named and self.status - 128 in (signal.SIGTERM, signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would show."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.status > 0:
            return f"exit code {self.status}"
        if self.did_not_arrive and not self.was_stopped:
            return "the others waited for it"
        how = "stopped" if self.was_stopped else "killed"
        return f"{how} by {signal.Signals(-self.status).name}"


def by_cause(failures: Mapping[int, ProcessFailure], watch: Watch) -> list[Failure]:
    """Order failures, given by rank, by time, the consequences last.

    A rank that has raised before any had ended, and takes its time to leave, failed by
    itself though the launcher ended it. One that was stopped, or for which others waited in
    vain, raised nothing: it comes after those that did, and before those that waited.
    """
    noticed = [Failure.from_torch(r, each, watch) for r, each in failures.items()]
    first = min((each.at for each in noticed if not each.ended_by_us), default=0.0)
    noticed = [
        evolve(
            each, ended_by_us=each.ended_by_us and not (each.error and each.at < first)
        )
        for each in noticed
    ]
    if all(each.lost_peer for each in noticed if not each.ended_by_us):
        noticed = [
            evolve(each, did_not_arrive=each.ended_by_us and not each.error)
            for each in noticed
        ]

    def key(failure: Failure) -> tuple[bool, bool, bool, float]:
        is_blamed = failure.was_stopped or failure.did_not_arrive
        ended_by_us = failure.ended_by_us and not is_blamed
        return ended_by_us, failure.lost_peer, is_blamed, failure.at

    return sorted(noticed, key=key)


def all_left_on_signal(failures: Sequence[Failure]) -> bool:
    """Whether ranks left because a signal asked them to, and none for another reason."""
    return failures[0].left_on_signal and all(
        each.left_on_signal or each.was_told_to_end for each in failures
    )


def report(
    failures: Sequence[Failure], *, ranks: Collection[int], started: float
) -> str:
    """Return the one report of a run that failed; it begins with its cause.

    Args:
        failures: in the order of `by_cause`.
        ranks: those of this machine.
        started: when the run was, in seconds since the epoch.
    """
    first, *others = failures
    if all_left_on_signal(failures):
        name = signal.Signals(first.exit_code - 128).name
        return f"all ranks left on {name}, first rank {first.rank}."
    lines = [
        (
            f"rank {first.rank} failed first ({first.ending}, pid {first.pid}) "
            f"after {first.at - started:.1f} s"
        ),
        first.traceback.rstrip() or _why_no_traceback(first),
    ]
    told = {first.places, ()}
    for failure in sorted(others, key=lambda f: f.rank):
        lines.append(_one_line(failure))
        # where all lost one another, each waited somewhere, and that is the question
        is_cause = first.lost_peer or not failure.lost_peer
        if is_cause and failure.places not in told:
            lines.append(failure.traceback.rstrip())
            told.add(failure.places)
    finished = set(ranks) - {failure.rank for failure in failures}
    lines += [f"rank {rank} had finished without an error" for rank in sorted(finished)]
    return "\n".join(lines)


def _one_line(failure: Failure) -> str:
    if failure.error:
        kind, _, text = failure.error.partition(": ")
        return f"rank {failure.rank} followed: {name_error(kind, text)}"
    if failure.was_told_to_end:
        return f"rank {failure.rank} was ended by SIGTERM"
    return f"rank {failure.rank} followed: {failure.ending}"


def _why_no_traceback(failure: Failure) -> str:
    if failure.did_not_arrive and not failure.was_stopped:
        where = f" It was here, most recent call first:\n{failure.stack}"
        return f"It had not failed, and was ended.{where if failure.stack else ''}"
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
