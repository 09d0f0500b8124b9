# SPDX-License-Identifier: Apache-2.0
"""`run_processes`: a distributed program on real processes that Gloo joins, kept warm.

A process costs seconds to import torch. That is paid once, in a fork server that has it
imported already; the ranks of a world of one size stay open between programs, so that the
next program costs milliseconds. A program that fails ends its world, and the next call
opens a new one.
"""

import atexit
import math
import multiprocessing
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple

import attrs

from accelfn.base.arguments import check_seconds, is_integer
from accelfn.base.calling import called
from accelfn.errors import ArgumentError, Error
from accelfn.testing.processes.rank import Answer, Surroundings, packed, serve
from accelfn.world import World
from accelfn.world.axes import resolved

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", __name__]
_GRACE_SECONDS = 0.2
"""How long after a failure other ranks are heard, to tell which failed first."""
_REAPED_SECONDS = 5.0
"""How long at most until the fork server knows how a process ended."""


class RankError(Error, RuntimeError):
    """A program failed on a rank; the text has the traceback of the first that failed."""


@called
def run_processes(
    size: int,
    fn: Callable[[World, *Ts], T],
    *args: *Ts,
    timeout: float = 60.0,
    axes: Mapping[str, int] | None = None,
) -> list[T]:
    """Run `fn(world, *args)` on every rank of a world of real processes joined by Gloo.

    Ranks find what the caller has: current directory, import path, environment (and in it
    what torchrun sets), torch's threads, default dtype and modes. Modules stay imported
    between programs, and so does all that a program changes in them.

    Args:
        size: the number of ranks.
        fn: what each rank does: a function of a module that ranks can import, or a record
            or `functools.partial` of such. It gets its `World`, on the CPU.
        args: what it gets beside it; they travel by pickle, as does what it returns.
        timeout: seconds until ranks that have not returned are ended.
        axes: the axes of the world, as `World.from_env` takes them.

    Returns:
        What each rank returned, by rank.

    Raises:
        ArgumentError: `fn` or an argument cannot be sent to another process.
        RankError: a rank raised, ended or did not return in time.

    Law: it returns or raises soon after `timeout` seconds, whatever ranks do, and no rank
    outlives the caller's process.

    Cost: 2.5 s for the first world of a process, 0.4 s for another size or after a failure;
    else 0.5 ms, and what the program costs.

    `simulate` does the same with ranks in one process. It is faster, and names what Gloo
    answers by waiting, aborting or wrong numbers.
    """
    _check(size, fn, timeout)
    sizes = {} if axes is None else resolved("run_processes", axes, size)
    program = packed((fn, args, sizes))
    with _LOCK:
        try:
            return _pool(size).run(program, timeout)
        except BaseException:
            _end(size)
            raise


def _check(size: int, fn: object, timeout: float) -> None:
    if not is_integer(size, 1):
        msg = f"run_processes({size!r}, ...): expected a number of ranks, 1 or more."
        raise ArgumentError(msg)
    if not callable(fn):
        msg = f"run_processes({size}, {fn!r}): expected a function of a World."
        raise ArgumentError(msg)
    check_seconds("run_processes", "timeout", timeout)


@attrs.frozen
class RankProcess:
    """One process, and the pipe to it."""

    process: "BaseProcess"
    pipe: Pipe

    @classmethod
    def start(cls, target: Callable[..., None], *args: object, name: str) -> Self:
        """Start `target(*args, pipe)` in a process that has torch imported already."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*args, theirs), name=name)
        with _nameless_main():
            process.start()
        theirs.close()
        return cls(process, ours)

    def answer(self) -> Answer:
        """Return what the rank says, or how it ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_REAPED_SECONDS)
            # what the other ranks say came after it: it is how they noticed
            return Answer(failure=_how_it_ended(self.process.exitcode), at=-math.inf)

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"The process ended with exit code {code}."
    name = signal.Signals(-code).name
    gloo = (
        " Gloo aborts a process that receives more than it expects; in a simulated world"
        " the program would say which collectives do not match."
    )
    return f"The process was ended by {name}.{gloo if name == 'SIGABRT' else ''}"


class Pool:
    """The processes of one world, which wait for programs."""

    def __init__(self, size: int) -> None:
        """Start them."""
        self._folder = tempfile.TemporaryDirectory(prefix="accelfn-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(size):
                name = f"rank {rank} of {size}"
                started = RankProcess.start(serve, rank, size, store, name=name)
                self._ranks.append(started)
        except BaseException:
            self.close()
            raise

    def is_idle(self) -> bool:
        """Whether every rank waits for a program; the pipe of one that ended says so."""
        return not wait([rank.pipe for rank in self._ranks], timeout=0)

    def run(self, program: bytes, timeout: float) -> list[Any]:
        """Run a packed program on every rank, and return the results."""
        message = pickle.dumps((Surroundings.of_process(), program))
        for rank in self._ranks:
            with suppress(OSError):  # a rank that is gone says so in its answer
                rank.pipe.send_bytes(message)
        size, answers = len(self._ranks), self._answers(timeout)
        failed = {r: each for r, each in answers.items() if each.failure is not None}
        if failed:
            raise RankError(_report(failed, size))
        late = [rank for rank in range(size) if rank not in answers]
        if late:
            msg = (
                f"Of {size} ranks, {late} did not return within {timeout:g} s. In a"
                " simulated world the program would say where each stands."
            )
            raise RankError(msg)
        return [pickle.loads(answers[rank].result) for rank in range(size)]  # noqa: S301

    def _answers(self, timeout: float) -> dict[int, Answer]:
        """Return what ranks answer in time; soon after a failure, time is over."""
        ends_at = time.monotonic() + timeout
        answers: dict[int, Answer] = {}
        awaited: dict[object, int] = {r.pipe: i for i, r in enumerate(self._ranks)}
        while awaited and (left := ends_at - time.monotonic()) > 0:
            for pipe in wait([self._ranks[i].pipe for i in awaited.values()], left):
                rank = awaited.pop(pipe)
                answers[rank] = self._ranks[rank].answer()
                if answers[rank].failure is not None:
                    ends_at = min(ends_at, time.monotonic() + _GRACE_SECONDS)
        return answers

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for rank in self._ranks:
            rank.process.kill()  # all before any is waited for
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


def _report(failed: Mapping[int, Answer], size: int) -> str:
    first, *others = sorted(failed, key=lambda rank: failed[rank].at)
    lines = [f"Rank {first} of {size} failed first:\n{failed[first].failure}".strip()]
    lines += [f"Rank {r} of {size}, after it: {failed[r].last_line}" for r in others]
    return "\n".join(lines)


_STARTING = threading.Lock()
"""Held while the caller's main module is out of sight."""
_POOLS: dict[int, Pool] = {}
_LOCK = threading.Lock()
"""Held while a program runs: a pool has one set of pipes."""


def _pool(size: int) -> Pool:
    pool = _POOLS.get(size)
    if pool is None or not pool.is_idle():
        _end(size)
        pool = _POOLS[size] = Pool(size)
    return pool


def _end(size: int) -> None:
    pool = _POOLS.pop(size, None)
    if pool is not None:
        pool.close()


@atexit.register
def _end_all() -> None:
    for size in list(_POOLS):
        _end(size)


@contextmanager
def _nameless_main() -> Generator[None]:
    """Keep multiprocessing from running the caller's script again in every rank.

    It does so for ranks to find what the script defines; that is refused here, and every
    script would need a guard against starting ranks without end.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
