# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads that take turns, in a world of their own."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import (
    Any,
    NoReturn,
    TypeAlias,
)

import attrs

from accelfn.testing.simulation.ambient import Ambient, callers_modes, process_kept
from accelfn.testing.simulation.exchange import Exchange
from accelfn.testing.simulation.group import SimulatedGroup
from accelfn.testing.simulation.plan import Plan, Run
from accelfn.testing.simulation.registry import Registry
from accelfn.testing.simulation.sayings import Sayings
from accelfn.testing.simulation.turns import Turns
from accelfn.testing.simulation.work import SimulatedWork
from accelfn.world import World

Ended: TypeAlias = tuple[int | None, BaseException]
"""A rank and its error; no rank, where none was told of what went wrong."""

_FLOOR = threading.Lock()
"""Held by the outermost simulation: what a process has once can be swapped for one only."""
_inside = threading.local()


@contextmanager
def _floor() -> Generator[None]:
    """Hold the floor, unless this is a rank of a simulation that holds it."""
    if getattr(_inside, "rank", False):
        yield
        return
    with _FLOOR:
        yield


def simulated(plan: Plan) -> Run[Any]:
    """Run a program on simulated ranks."""
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
