# SPDX-License-Identifier: Apache-2.0
"""`run_processes`: run a distributed program on real processes that communicate by Gloo.

The import of torch takes seconds, so a fork server imports torch once. The processes of a
world stay alive, so the next program on equally many ranks starts in milliseconds. If a
program fails, its processes end, and the next call starts new processes.
"""

import atexit
import dataclasses
import math
import multiprocessing
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple, cast

import attrs
import numpy as np
import torch

from accelfn import Metrics, Pending, TrainState, World
from accelfn.errors import ArgumentError, Error, LawError
from accelfn.plug import arguments
from accelfn.plug import axes as arithmetic
from accelfn.testing.comparing import (
    SAVED,
    Comparison,
    children,
    describe_value,
    format_differences,
)
from accelfn.testing.rank import Answer, Surroundings, pack, serve
from accelfn.testing.simulation.plan import Plan, check_program
from accelfn.testing.simulation.ranks import seed_rank

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", __name__]
_GRACE_SECONDS = 0.2
"""How long to collect other ranks' errors after a failure, to find the first failure."""
_REAPED_SECONDS = 5.0
"""How long to wait at most until the fork server reports how a process ended."""


class RankError(Error, RuntimeError):
    """A program failed on a rank. The message has the traceback of the rank that failed first."""


def run_processes(
    size: int,
    fn: Callable[[World, *Ts], T],
    *args: *Ts,
    timeout: float = 60.0,
    axes: Mapping[str, int] | None = None,
) -> list[T]:
    """Run `fn(world, *args)` on every rank of a world of real processes that use Gloo.

    Each rank has the caller's current directory, import path, environment (with torchrun's
    variables), number of torch threads, default dtype and torch modes. Modules stay imported
    between programs, with all changes that a program makes in them.

    Args:
        size: the number of ranks.
        fn: the function that each rank runs: a function of a module that ranks can import, or
            a callable record or `functools.partial` of such a function. Its first argument is
            the rank's `World`, on the CPU.
        args: more arguments of `fn`. Arguments and results are sent by pickle.
        timeout: the seconds after which ranks that have not returned are killed.
        axes: the axes of the world, as for `World.from_env`.

    Returns:
        The results, by rank.

    Raises:
        ArgumentError: `fn` or an argument cannot be sent to another process.
        RankError: a rank raised an error, ended, or did not return in time.

    Law: `run_processes` returns or raises soon after `timeout` seconds, whatever ranks do. No
    rank runs longer than the caller's process.

    Cost: 2.5 s for the first world of a process, 0.4 s for another size or after a failure,
    otherwise 0.5 ms, plus the time of the program.

    `simulate` runs the same program with ranks in one process. It is faster, and it raises an
    error where Gloo waits, aborts or returns wrong numbers.
    """
    check_program("run_processes", size, fn)
    arguments.check_seconds("run_processes", "timeout", timeout)
    sizes = {} if axes is None else arithmetic.resolve_axes("run_processes", axes, size)
    program = pack((fn, args, sizes))
    with _LOCK:
        try:
            return _pool(size).run(program, timeout)
        except BaseException:
            _end(size)
            raise


@attrs.frozen
class RankProcess:
    """The process of one rank, and the pipe to this process."""

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
        """Return the rank's answer, or how its process ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_REAPED_SECONDS)
            # the time is -inf, because errors of the other ranks are consequences of this end
            return Answer(failure=_how_it_ended(self.process.exitcode), at=-math.inf)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"The process ended with exit code {code}."
    name = signal.Signals(-code).name
    gloo = (
        " Gloo aborts a process that receives more bytes than it expects. Run the program with"
        " simulate: its error names the collectives that do not match."
    )
    return f"The process was ended by {name}.{gloo if name == 'SIGABRT' else ''}"


class Pool:
    """The processes of one world, which wait for programs."""

    def __init__(self, size: int) -> None:
        """Start one process per rank."""
        self._folder = tempfile.TemporaryDirectory(prefix="accelfn-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(size):
                name = f"rank {rank} of {size}"
                self._ranks += [RankProcess.start(serve, rank, size, store, name=name)]
        except BaseException:
            self.close()
            raise

    def is_idle(self) -> bool:
        """Whether every rank waits for a program. The pipe of an ended rank is readable."""
        return not wait([rank.pipe for rank in self._ranks], timeout=0)

    def run(self, program: bytes, timeout: float) -> list[Any]:
        """Run a pickled program on every rank, and return the results."""
        message = pickle.dumps((Surroundings(), program))
        for rank in self._ranks:
            with suppress(OSError):  # the answer of an ended rank reports its end
                rank.pipe.send_bytes(message)
        size, answers = len(self._ranks), self._answers(timeout)
        failures = {r: a for r, a in answers.items() if a.failure is not None}
        if failures:
            raise RankError(_report(failures, size))
        late = [rank for rank in range(size) if rank not in answers]
        if late:
            msg = (
                f"run_processes: rank {', '.join(map(str, late))} of {size} did not return within"
                f" {timeout:g} s. Run the program with simulate: if ranks wait for each other,"
                " its error shows the call of each rank."
            )
            raise RankError(msg)
        return [pickle.loads(answers[rank].result) for rank in range(size)]  # noqa: S301

    def _answers(self, timeout: float) -> dict[int, Answer]:
        """Return the answers that arrive in time. A failure shortens the time to wait."""
        ends_at = time.monotonic() + timeout
        answers: dict[int, Answer] = {}
        pending: dict[object, int] = {r.pipe: i for i, r in enumerate(self._ranks)}
        while pending and (seconds := ends_at - time.monotonic()) > 0:
            for pipe in wait([self._ranks[i].pipe for i in pending.values()], seconds):
                rank = pending.pop(pipe)
                answers[rank] = self._ranks[rank].answer()
                if answers[rank].failure is not None:
                    ends_at = min(ends_at, time.monotonic() + _GRACE_SECONDS)
        return answers

    def close(self) -> None:
        """Kill the processes of all ranks."""
        for rank in self._ranks:
            rank.process.kill()  # kill all ranks before waiting for the first to end
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


def _report(failures: Mapping[int, Answer], size: int) -> str:
    first, *rest = sorted(failures, key=lambda rank: failures[rank].at)
    lines = [f"Rank {first} of {size} failed first:\n{failures[first].failure}".strip()]
    for rank in rest:  # the last line of a traceback has the message
        last_line = str(failures[rank].failure).strip().rpartition("\n")[2]
        lines.append(f"Rank {rank} of {size} failed later: {last_line}")
    return "\n".join(lines)


_STARTING = threading.Lock()
"""Held while the caller's main module is replaced."""
_POOLS: dict[int, Pool] = {}
_LOCK = threading.Lock()
"""Held while a program runs, because all programs of a pool share its pipes."""


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
    """Prevent multiprocessing from running the caller's script again in every rank.

    multiprocessing runs the script so that ranks find its functions. `run_processes` rejects
    functions of a script. Without this context, a script without `if __name__ == "__main__"`
    would start ranks without end.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


# `simulate(also="processes")`: real processes must give the simulated results, bit by bit.


_SECONDS = 600.0
_SIDES = "the simulated world", "the world of processes"
_BITWISE = Comparison(bitwise=True, sides=_SIDES)
_KEYS = frozenset({bool, int, str, bytes, type(None)})
_PLAIN = _KEYS | {float, complex, torch.dtype, torch.device}


def check_comparable(plan: Plan) -> None:
    """Reject a run that real processes cannot repeat, before the simulation starts.

    A schedule is allowed: results must not depend on the schedule, so the order of real
    processes may differ.

    Raises:
        ArgumentError: the plan has faults or a device other than the CPU, or the function
            cannot be sent to a process.
    """
    if plan.faults:
        msg = (
            f'simulate(also="processes", faults={list(plan.faults)}): real processes cannot'
            " have planned faults. Leave out also= or faults=."
        )
        raise ArgumentError(msg)
    if plan.device.type != "cpu":
        msg = (
            f'simulate(also="processes", device={str(plan.device)!r}): real processes use Gloo'
            " and run on the CPU. Leave out also= or device=."
        )
        raise ArgumentError(msg)
    try:
        pack(plan.fn)
    except ArgumentError as error:
        msg = f'simulate(also="processes"): {error}'
        raise ArgumentError(msg) from error


def compare_with_processes(plan: Plan, results: Sequence[Mapping[str, Any]]) -> None:
    """Run the same program on real processes with Gloo, and compare each rank's result.

    `results` has the leaves of each simulated rank's result.

    Results may be trees of dicts, lists, tuples, sets, attrs records and dataclasses. The
    comparison covers the types and keys of containers, the dtype, shape and bits of tensors
    and NumPy arrays, the type and bits of numbers, and text. For a `TrainState`, it covers the
    fields that a checkpoint saves. Other types raise an error. The comparison ignores the order
    of keys, memory layouts, `requires_grad`, and which entries share memory.

    Raises:
        LawError: a result differs, or the real processes failed.
        ArgumentError: a result contains a value that cannot be compared.
    """
    try:
        args = plan.fn, plan.seed
        axes = plan.axes or None
        real = run_processes(
            plan.size, _run_on_rank, *args, timeout=_SECONDS, axes=axes
        )
    except RankError as error:
        msg = (
            "The program succeeded in a simulated world, but failed on real processes with"
            f" Gloo. {error}\nThe run: {plan}"
        )
        raise LawError(msg) from error
    for rank, (ours, theirs) in enumerate(zip(results, real, strict=True)):
        diffs = _BITWISE.by_name(ours, theirs)
        if diffs:
            msg = (
                f"Rank {rank} of {plan.size} returned different results in a simulated world and"
                " on real processes with Gloo (simulated value and real value):"
                f"{format_differences(diffs)}\nThe run: {plan}"
            )
            raise LawError(msg)


def _run_on_rank(world: World, fn: Callable[[World], Any], seed: int) -> dict[str, Any]:
    """Run a program with the seed of a simulated rank, and return the leaves of its result."""
    seed_rank(seed, world.rank, world.device)
    return leaves_by_path(fn(world))


@attrs.frozen(repr=False)
class _Kind:
    """The name of the type at a path: a container with its length, or a member of an enum."""

    name: str

    def __repr__(self) -> str:
        return self.name


def leaves_by_path(result: Any) -> dict[str, Any]:
    """Return the leaves of a rank's result, by path; see `compare_with_processes`."""
    return dict(_leaves("result", result))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths: tensors, plain data, container types."""
    kind = type(value)
    if kind in _PLAIN:
        yield path, value
    elif kind in (torch.Tensor, torch.nn.Parameter):
        yield path, _values(path, value)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield path, _Kind(f"numpy {kind.__name__}")
        yield f"{path}[...]", _array(path, value)
    elif isinstance(value, Enum):
        yield path, _Kind(f"{kind.__name__} {value.value!r}")
    else:
        entries = _entries(path, value)
        yield path, _Kind(f"{kind.__name__} of {len(entries)}")
        for place, inside in entries.items():
            yield from _leaves(f"{path}{place}", inside)


def _entries(path: str, tree: Any) -> dict[str, Any]:
    """Return the entries of a container or record, by the code that accesses each entry."""
    names: Iterable[str]
    if isinstance(tree, (Mapping, set, frozenset)) and not isinstance(tree, Metrics):
        for key in cast("set[Any]", tree):
            parts = cast("Any", key) if type(key) is tuple else (key,)
            if not all(type(part) in _KEYS for part in parts):
                place = f"a key of {path}"
                raise _incomparable(place, key)
    if isinstance(tree, TrainState):
        names = SAVED
    elif isinstance(tree, Metrics):
        names = ["sums"]
    elif isinstance(tree, (set, frozenset)):
        return _entries(path, sorted(cast("set[Any]", tree), key=repr))
    elif isinstance(tree, (Mapping, list, tuple, Pending)):
        return dict((children("", tree) or {}).values())
    elif attrs.has(type(tree)):
        names = [field.name for field in attrs.fields(type(tree))]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
    else:
        raise _incomparable(path, tree)
    return {f".{name}": getattr(tree, name) for name in names}


def _values(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor's elements."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    if not plain or tensor.is_quantized or tensor.is_meta:
        raise _incomparable(path, tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    return tensor.clone(memory_format=torch.contiguous_format)


def _array(path: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise _incomparable(path, array) from None


def _incomparable(path: str, value: Any) -> ArgumentError:
    msg = (
        f'simulate(also="processes"): {path} is a {type(value).__qualname__}'
        f" ({describe_value(value)}), and accelfn cannot compare it between processes. Return a"
        " TrainState, or dense tensors, NumPy arrays and plain data in containers or records."
    )
    return ArgumentError(msg)
