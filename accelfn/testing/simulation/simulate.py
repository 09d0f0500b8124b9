# SPDX-License-Identifier: Apache-2.0
"""`simulate`: a distributed program on N ranks in one process, the same every time."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import (
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

import attrs

from accelfn.errors import ArgumentError
from accelfn.testing.simulation.ambient import Ambient, callers_modes, process_kept
from accelfn.testing.simulation.exchange import Entry, Exchange
from accelfn.testing.simulation.faults import Fault
from accelfn.testing.simulation.group import SimulatedGroup
from accelfn.testing.simulation.registry import Registry
from accelfn.testing.simulation.sayings import Sayings
from accelfn.testing.simulation.sums import Sums
from accelfn.testing.simulation.turns import Turns
from accelfn.testing.simulation.work import SimulatedWork
from accelfn.world import World

T = TypeVar("T")
Ended: TypeAlias = tuple[int | None, BaseException]
"""A rank and its error; no rank, where none was told of what went wrong."""

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
        missed: the faults that were planned and found no place to happen.
    """

    results: tuple[T, ...]
    log: tuple[Entry, ...] = attrs.field(repr=False)
    clock: float = 0.0
    missed: tuple[Fault, ...] = ()

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
    sums: Sums = "ranks",
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
            `Terminate`. Those that found no place to happen are in `Run.missed`.
        sums: in which order what is reduced is added up, on which the last bits of a float
            depend: "ranks", from the first to the last; "ring", each piece of a buffer from
            another rank on, as Gloo and NCCL do; "tree", by pairs. On 2 ranks all are one.
        seed: of the ranks' random generators; each rank draws its own.
        also: "processes" runs the same on real processes joined by Gloo, and compares the
            results bit by bit. `fn` must then be importable.

    Raises:
        CollectiveMismatchError: ranks met in different collectives; a table says which.
        DeadlockError: ranks wait for what no rank will do.
        RankCrashedError: a rank crashed, as was planned.
        Exception: what a rank raised first, with a note on how to repeat the run.

    Law: the results and the log depend on the arguments alone. The results do not depend on
    `schedule` if ranks share no memory, receive from no "any rank" and do not ask whether
    an asynchronous call is completed.

    Cost: on two cores, 0.1 ms a collective on 2 ranks, and no sockets; see the benchmarks.
    That is where torch computes in one thread: ranks then share a core, and so do processes
    that they start, of which a DataLoader warns. In several threads it is twice that.

    Limits: no real network, no streams of a device, no two ranks at once, no sub-groups.
    The future of a collective is done when it is asked for. A thread that a rank starts is
    none of its world. A rank that loops without a collective is stopped by an interrupt only.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> simulate(2, lambda world: world.rank).results
        (0, 1)
    """
    plan = Plan(size, fn, schedule, faults, sums, seed)
    if also not in (None, "processes"):
        msg = f'simulate(also={also!r}): expected "processes" or None.'
        raise ArgumentError(msg)
    return _simulated(plan) if also is None else _compared(plan)


@attrs.frozen
class Plan:
    """The arguments of a run, checked, so that an error can say how to repeat it."""

    size: int
    fn: Callable[[World], Any]
    schedule: tuple[int, ...] = attrs.field(
        default=(), converter=lambda choices: tuple(choices or ())
    )
    faults: tuple[Fault, ...] = attrs.field(default=(), converter=tuple)
    sums: Sums = "ranks"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse what no world can be."""
        size = self.size
        if not _is_integer(size) or size < 1:
            msg = f"simulate({size!r}, ...): expected a number of ranks, 1 or more."
            raise ArgumentError(msg)
        if not callable(self.fn):
            msg = f"simulate({size}, {self.fn!r}): expected a function of a World."
            raise ArgumentError(msg)
        if not all(_is_integer(each) and each >= 0 for each in self.schedule):
            msg = f"simulate(schedule={self.schedule}): expected integers, 0 or more."
            raise ArgumentError(msg)
        if not _is_integer(self.seed):
            msg = f"simulate(seed={self.seed!r}): expected an integer."
            raise ArgumentError(msg)
        if self.sums not in get_args(Sums):
            known = ", ".join(map(repr, get_args(Sums)))
            msg = f"simulate(sums={self.sums!r}): expected one of {known}."
            raise ArgumentError(msg)
        for fault in self.faults:
            if not isinstance(fault, get_args(Fault)):
                msg = f"simulate(faults=[{fault!r}]): expected such as Raise(rank=1)."
                raise ArgumentError(msg)
            if fault.rank >= size:
                msg = f"simulate({size}, faults=[{fault!r}]): no such rank."
                raise ArgumentError(msg)

    def __str__(self) -> str:
        """Return the call that repeats the run."""
        name = getattr(self.fn, "__qualname__", None) or repr(self.fn)
        parts = [str(self.size), name]
        if self.schedule:
            parts.append(f"schedule={list(self.schedule)}")
        if self.faults:
            parts.append(f"faults={list(self.faults)}")
        if self.sums != "ranks":
            parts.append(f"sums={self.sums!r}")
        if self.seed:
            parts.append(f"seed={self.seed}")
        return f"accelfn.testing.simulate({', '.join(parts)})"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def _floor() -> Generator[None]:
    """Hold the floor, unless this is a rank of a simulation that holds it."""
    if getattr(_inside, "rank", False):
        yield
        return
    with _FLOOR:
        yield


def _compared(plan: Plan) -> Run[Any]:
    """Run, and compare with real processes."""
    # here, since few runs ask for it, and it brings all that starting processes needs
    from accelfn.testing.processes import differential  # noqa: PLC0415

    differential.check_comparable(plan)
    run = _simulated(plan)
    differential.compare_with_processes(plan, run)
    return run


def _simulated(plan: Plan) -> Run[Any]:
    with _floor(), process_kept():
        return _run(plan)


def _run(plan: Plan) -> Run[Any]:
    exchange = Exchange(plan.size, plan.faults, plan.sums)
    post = partial(SimulatedWork, exchange)
    groups = [
        SimulatedGroup(rank, plan.size, post, exchange.log) for rank in range(plan.size)
    ]
    sayings = Sayings(plan.size)
    registries = [Registry.of(group) for group in groups]
    ambient = Ambient(plan.seed, registries)
    exchange.turns = Turns(
        plan.size,
        plan.schedule,
        on_stuck=exchange.stuck,
        on_leave=ambient.leave,
        on_enter=ambient.enter,
    )
    enter_modes = callers_modes()
    results: list[Any] = [None] * plan.size
    errors: list[Ended] = []

    def body(rank: int) -> None:
        _inside.rank = True
        error: BaseException | None = None
        world = _world(rank, groups)
        world.connection.say = partial(sayings.say, rank)
        world.connection.make_branch = partial(
            _branch, exchange, groups[rank], registries[rank]
        )
        try:
            with enter_modes():
                results[rank] = plan.fn(world)
        except BaseException as raised:  # noqa: BLE001 - raised again by simulate
            error = raised
        error = exchange.ended(rank, error)
        if error is not None:
            errors.append((rank, error))
        world.connection.close()
        del error  # its traceback refers to this frame: a cycle would keep all alive

    try:
        exchange.turns.run(body)
        errors[:] = _origin(errors, exchange.has_told)
    finally:
        unnoticed = exchange.close()
    if unnoticed is not None and not errors:
        errors.append((None, unnoticed))
    if errors:
        _raise(plan, errors)
    clock = max(exchange.clocks)
    return Run(tuple(results), tuple(exchange.log), clock, tuple(exchange.faults))


def _world(rank: int, groups: Sequence[SimulatedGroup]) -> World:
    size = len(groups)
    world = World(
        rank=rank, size=size, local_rank=rank, local_size=size, group=groups[rank]
    )
    groups[rank].connection = world.connection
    world.connection.tells_structure = True
    return world


def _branch(
    exchange: Exchange, group: SimulatedGroup, registry: Registry, world: World
) -> tuple[World, Callable[[], None]]:
    """Return a world of the same ranks with a group of its own, and what gives it up."""
    made = group.branched()
    registry.add(made)
    inner = attrs.evolve(world, group=made, owns_group=False)
    made.connection = inner.connection
    inner.connection.tells_structure = True
    inner.connection.say = world.connection.say

    def give_up() -> None:
        exchange.give_up(world.rank, made.branch)
        inner.connection.close()
        registry.remove(made)

    return inner, give_up


def _raise(plan: Plan, errors: list[Ended]) -> NoReturn:
    """Raise the one error, with how to repeat the run."""
    rank, error = errors.pop()
    with suppress(Exception):  # a class of errors may take no notes
        where = "" if rank is None else f" rank {rank} of"
        note = f"In{where} a simulated world. To repeat the run: {plan}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    try:
        raise error
    finally:
        del error  # see _run's body


def _origin(
    errors: Sequence[Ended], is_told: Callable[[BaseException], bool]
) -> Sequence[Ended]:
    """Return the first error, or the one behind it.

    A rank may meet the others in a wrong collective because it cleans up after an error of
    its own. Then that error is the context of what the rank is told, as all are.
    """
    if errors and is_told(errors[0][1]):
        for each in errors:
            if is_told(each[1]) and not all(map(is_told, _with_contexts(each[1]))):
                return [each]
    return errors[:1]


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    within: BaseException | None = error
    while within is not None:
        yield within
        within = within.__context__
