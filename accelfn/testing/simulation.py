# SPDX-License-Identifier: Apache-2.0
"""`simulate`: a distributed program on N ranks in one process, the same every time."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar, overload

import attrs
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accelfn.errors import ArgumentError, RankCrashedError
from accelfn.testing.ambient import Ambient, callers_modes, process_kept
from accelfn.testing.exchange import Entry, Exchange
from accelfn.testing.faults import Crashed, Fault, Left
from accelfn.testing.group import DefaultGroup, SimulatedGroup
from accelfn.testing.turns import Turns
from accelfn.world import World

T = TypeVar("T")

_FLOOR = threading.Lock()
"""Held by the outermost simulation: what a process has once can be swapped for one only."""
_inside = threading.local()


@attrs.frozen
class Run(Sequence[T], Generic[T]):
    """What a simulated run gave: a sequence of each rank's result.

    Attributes:
        results: what each rank's function returned; None of a rank that left early.
        log: every collective in the order in which they were completed.
        clock: the virtual seconds that passed; only stalls take time.
    """

    results: tuple[T, ...]
    log: tuple[Entry, ...] = attrs.field(repr=False)
    clock: float = 0.0

    @overload
    def __getitem__(self, rank: int) -> T: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[T, ...]: ...
    def __getitem__(self, rank: int | slice) -> T | tuple[T, ...]:
        """Return a rank's result."""
        return self.results[rank]

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.results)


def simulate(
    size: int,
    fn: Callable[[World], T],
    *,
    schedule: Iterable[int] | None = None,
    faults: Iterable[Fault] = (),
    seed: int = 0,
    also: Literal["processes"] | None = None,
) -> Run[T]:
    """Run `fn(world)` on every rank of a simulated world, in this process.

    Each rank is a thread, of which one runs at a time; the turn passes only where a rank
    waits in a collective. Collectives are carried out in memory, under torch's own
    DistributedDataParallel and all else that takes a process group explicitly. Each rank
    has torch, numpy and Python random generators of its own; the process has its own back
    afterwards. Worlds nest; those of several threads take turns.

    Args:
        size: the number of ranks.
        fn: what each rank does; it gets its `World`.
        schedule: which of the ranks that can go on does, each time one waits: indices,
            counted from the rank whose turn it was. When they end, and by default, the
            first.
        faults: what goes wrong, and where: `Raise`, `Leave`, `Crash`, `Stall`, `Corrupt`,
            `Terminate`.
        seed: of the ranks' random generators; each rank draws its own.
        also: "processes" runs the same on real processes joined by Gloo, and compares the
            results bit by bit. `fn` must then be importable.

    Raises:
        CollectiveMismatchError: ranks met in different collectives; a table says which.
        DeadlockError: ranks wait for what no rank will do.
        RankCrashedError: a rank crashed, as was planned.
        Exception: what a rank raised first, with a note on how to repeat the run.

    Law: the results and the log depend on the arguments alone, and for a program whose
    ranks share no memory the results do not depend on `schedule`.

    Cost: on two cores, 0.1 ms a collective on 2 ranks, and no sockets; see the benchmarks.

    Limits: no real network, no streams of a device, no two ranks at once, no sub-groups;
    a rank that loops without a collective is not stopped.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> simulate(2, lambda world: world.rank).results
        (0, 1)
    """
    plan = _checked(size, fn, schedule, faults, seed, also)
    with _floor(), process_kept():
        run = _run(plan)
    if also is not None:
        from accelfn.testing.differential import compare_with_processes

        compare_with_processes(plan, run)
    return run


@attrs.frozen
class Plan:
    """The arguments of a run, so that an error can say how to repeat it."""

    size: int
    fn: Callable[[World], Any]
    schedule: tuple[int, ...]
    faults: tuple[Fault, ...]
    seed: int

    def __str__(self) -> str:
        """Return the call that repeats the run."""
        name = getattr(self.fn, "__qualname__", None) or repr(self.fn)
        parts = [str(self.size), name]
        if self.schedule:
            parts.append(f"schedule={list(self.schedule)}")
        if self.faults:
            parts.append(f"faults={list(self.faults)}")
        if self.seed:
            parts.append(f"seed={self.seed}")
        return f"accelfn.testing.simulate({', '.join(parts)})"


def _checked(
    size: int,
    fn: Callable[[World], Any],
    schedule: Iterable[int] | None,
    faults: Iterable[Fault],
    seed: int,
    also: str | None,
) -> Plan:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        msg = f"simulate({size!r}, ...): expected a number of ranks, 1 or more."
        raise ArgumentError(msg)
    if not callable(fn):
        msg = f"simulate({size}, {fn!r}): expected a function of a World."
        raise ArgumentError(msg)
    if also not in (None, "processes"):
        msg = f'simulate(also={also!r}): expected "processes" or None.'
        raise ArgumentError(msg)
    choices = tuple(schedule or ())
    if not all(isinstance(each, int) and each >= 0 for each in choices):
        msg = f"simulate(schedule={choices}): expected integers, 0 or more."
        raise ArgumentError(msg)
    planned = tuple(faults)
    for fault in planned:
        if not isinstance(fault, Fault):
            msg = (
                f"simulate(faults=[{fault!r}]): expected faults, such as Raise(rank=1)."
            )
            raise ArgumentError(msg)
        if fault.rank >= size:
            msg = f"simulate({size}, ..., faults=[{fault!r}]): there is no rank {fault.rank}."
            raise ArgumentError(msg)
    return Plan(size, fn, choices, planned, seed)


@contextmanager
def _floor() -> Iterator[None]:
    """Hold the floor, unless this is a rank of a simulation that holds it."""
    if getattr(_inside, "rank", False):
        yield
        return
    with _FLOOR:
        yield


def _run(plan: Plan) -> Run[Any]:
    exchange = Exchange(plan.size, plan.faults)
    groups = [SimulatedGroup(rank, exchange) for rank in range(plan.size)]
    defaults = [DefaultGroup(rank, plan.size) for rank in range(plan.size)]
    ambient = Ambient(plan.seed, defaults)
    turns = exchange.turns = Turns(
        plan.size,
        plan.schedule,
        on_stuck=exchange.stuck,
        on_leave=ambient.leave,
        on_enter=ambient.enter,
    )
    enter_modes = callers_modes()
    results: list[Any] = [None] * plan.size
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        _inside.rank = True
        error: BaseException | None = None
        world = _world(rank, groups)
        try:
            with enter_modes():
                results[rank] = plan.fn(world)
        except Left as left:
            error = left
        except BaseException as raised:  # noqa: BLE001 - raised again by simulate
            error = raised
            errors.append((rank, raised))
        exchange.ended(rank, error)
        world.connection.close()

    with _known(plan.size, [*groups, *defaults]):
        turns.run(body)
    if errors:
        _raise(plan, *errors[0])
    return Run(tuple(results), tuple(exchange.log), max(exchange.clocks))


def _world(rank: int, groups: Sequence[SimulatedGroup]) -> World:
    size = len(groups)
    world = World(
        rank=rank, size=size, local_rank=rank, local_size=size, group=groups[rank]
    )
    groups[rank].connection = world.connection
    return world


@contextmanager
def _known(size: int, groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Let torch translate `src=` and `dst=`, and name the backend in its errors.

    It keeps both by group, in tables that no other world's groups touch.
    """
    known = distributed_c10d._world.pg_group_ranks
    backends: dict[Any, Any] = distributed_c10d._world.pg_map
    for group in groups:
        known[group] = {rank: rank for rank in range(size)}
        backends[group] = ("simulated", None)
    try:
        yield
    finally:
        for group in groups:
            del known[group], backends[group]


def _raise(plan: Plan, rank: int, error: BaseException) -> None:
    """Raise a rank's error, with how to repeat the run."""
    note = f"In rank {rank} of a simulated world. To repeat the run: {plan}"
    if isinstance(error, Crashed):
        crash = RankCrashedError(f"Rank {rank} of {plan.size} {error.how}.")
        crash.add_note(note)
        raise crash
    error.add_note(note)
    raise error
