# SPDX-License-Identifier: Apache-2.0
"""Run a program on simulated ranks: threads that take turns."""

import gc
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import attrs
import numpy as np
import torch
from numpy.random import mtrand
from torch import overrides
from torch.distributed import distributed_c10d
from torch.utils import _device

from accelfn import World
from accelfn.plug import axes, background, devices, draws
from accelfn.plug import connection as connections
from accelfn.testing.simulation import group
from accelfn.testing.simulation.calls import Crashed, Members
from accelfn.testing.simulation.exchange import Exchange, SimulatedWork
from accelfn.testing.simulation.group import (
    Registry,
    SimulatedGroup,
    explain_meta_error,
    known_to_torch,
)
from accelfn.testing.simulation.plan import Plan, Run
from accelfn.testing.simulation.turns import Turns

# pyright: reportPrivateUsage=false

# Global values of the process, with a separate copy for each simulated rank.
#
# The values are the random generators of torch, NumPy and Python, the default dtype, torch's
# process groups, and module attributes that `with` blocks set. When the turn passes, the values of
# the next rank are set. torch modes (gradients, inference, autocast, the default device) belong
# to a thread: each rank enters the caller's modes. torch and NumPy have no public names for some
# of these values.

_GROUPS = (distributed_c10d, "_world")
_FILTERS = (warnings, "filters")
_TURN = (draws, "_turn")
_ATTRIBUTES: tuple[tuple[ModuleType, str], ...] = (
    *(_GROUPS, _FILTERS, _TURN, *group.ASKED),
    *((warnings, "showwarning"), (warnings, "_showwarnmsg_impl")),
    *((sys, "stdout"), (sys, "stderr")),
    (_device, "CURRENT_DEVICE"),
)


def _keep(device: torch.device) -> Callable[[], None]:
    """Return a function that sets the process's global values to their values of now."""
    generators = [(rng, rng.get_state()) for rng in draws.generators(device)]
    python, dtype = random.getstate(), torch.get_default_dtype()
    bits, normal = mtrand.get_bit_generator(), draws.normal_of_numpy()
    attributes = [(*place, getattr(*place)) for place in _ATTRIBUTES]

    def put_back() -> None:
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(python)
        mtrand.set_bit_generator(bits)
        draws.put_back_normal_of_numpy(normal)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        for attribute in attributes:
            setattr(*attribute)

    return put_back


class Ambient:
    """Sets each rank's copy of the process's global values during its turn."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Initialize with the seed of the run and the device."""
        self._seed = seed
        self._device = device
        self._put_back_callers = _keep(device)
        self._put_back: dict[int, Callable[[], None]] = {}

    def enter(self, rank: int) -> None:
        """Set the process's global values to this rank's copy, if the rank has started."""
        self._put_back.get(rank, self._put_back_callers)()

    def start(self, rank: int, registry: Registry) -> None:
        """Set the process's global values for a rank that starts, or starts again."""
        self._put_back_callers()
        mtrand.set_bit_generator(np.random.MT19937(0))
        seed_rank(self._seed, rank, self._device)
        setattr(*_FILTERS, list(warnings.filters))
        setattr(*_GROUPS, registry)
        setattr(*_TURN, draws.Turn())
        group.tell_rank()

    def leave(self, rank: int) -> None:
        """Store the process's global values as this rank's copy."""
        self._put_back[rank] = _keep(self._device)


def seed_rank(seed: int, rank: int, device: torch.device) -> None:
    """Seed the process's random generators for the start of a rank."""
    number = draws.key(seed, "rank", rank)
    for generator in draws.generators(device):
        generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - users' code draws from this generator


@contextmanager
def process_kept(device: torch.device) -> Generator[None]:
    """On exit from the `with` block, restore the process's global values and environment."""
    put_back = _keep(device)
    deterministic = torch.get_deterministic_debug_mode()
    environment = dict(os.environ)
    try:
        yield
    finally:
        put_back()
        if torch.get_deterministic_debug_mode() != deterministic:
            # only if needed, because the setter imports a compiler
            is_on, warns = deterministic > 0, deterministic == 1
            torch.use_deterministic_algorithms(is_on, warn_only=warns)
        if dict(os.environ) != environment:
            for name in set(os.environ) - set(environment):
                del os.environ[name]
            os.environ.update(environment)


def casts_of(*kinds: str) -> dict[str, torch.dtype]:
    """Return the dtype of this thread's autocast for each type of device that has one."""
    casts = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in casts}


@attrs.frozen
class Modes:
    """The torch modes of a thread, and the number of threads; by default, those of now."""

    casts: dict[str, torch.dtype] = attrs.field(factory=lambda: casts_of("cpu"))
    has_cache: bool = attrs.field(factory=torch.is_autocast_cache_enabled)
    has_grad: bool = attrs.field(factory=torch.is_grad_enabled)
    has_inference: bool = attrs.field(factory=torch.is_inference_mode_enabled)
    num_threads: int = attrs.field(factory=torch.get_num_threads)

    def enter(self) -> ExitStack:
        """Set these modes in this thread. They end with the returned stack."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        torch.set_autocast_cache_enabled(self.has_cache)
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(mode=self.has_inference))
        stack.enter_context(torch.set_grad_enabled(self.has_grad))
        for kind, dtype in self.casts.items():
            cast = torch.autocast(kind, dtype=dtype, cache_enabled=self.has_cache)
            stack.enter_context(cast)
        return stack


def callers_modes(
    device: torch.device,
) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that enters this thread's torch modes in another thread.

    The function also makes the backward pass run in the rank's thread. Otherwise torch runs the
    backward pass of an accelerator in a thread of the device, which does not belong to a rank.
    """
    modes = Modes(casts_of("cpu", devices.kind()))
    function_modes = overrides._get_current_function_mode_stack()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    def enter() -> ExitStack:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default
        stack = modes.enter()
        if device.type not in ("cpu", "meta"):
            torch.accelerator.set_device_index(device)
            one_thread = torch.autograd.set_multithreading_enabled(mode=False)
            stack.enter_context(one_thread)
        stack.callback(_leave_function_modes)
        for mode in function_modes:
            overrides._push_mode(mode)
        return stack

    return enter


def _leave_function_modes() -> None:
    """Leave all function modes of this thread before the thread ends."""
    while overrides._get_current_function_mode_stack():
        overrides._pop_mode()


Ended: TypeAlias = tuple[int | None, BaseException]
"""A rank and its error. The rank is None for an error that no rank raised."""

_FLOOR = threading.Lock()
"""Held by the outermost simulation, because only one may set the process's global values."""
_inside = threading.local()


def run_simulation(plan: Plan) -> Run[Any]:
    """Run the program of a plan on simulated ranks, and return the results."""
    # a rank of the simulation that holds the lock may run another simulation
    floor = draws.NOTHING if getattr(_inside, "rank", False) else _FLOOR
    with floor, process_kept(plan.device), known_to_torch(plan.device):
        return _run(plan)


def _run(plan: Plan) -> Run[Any]:
    exchange = Exchange(plan.size, plan.faults, plan.sums, plan.elastic)
    post = partial(SimulatedWork, exchange)
    everyone = Members("", tuple(range(plan.size)))
    activities = [exchange.activity(rank) for rank in range(plan.size)]
    registries: list[Registry] = []
    ambient = Ambient(plan.seed, plan.device)
    exchange.turns = Turns(
        plan.size,
        plan.schedule,
        on_stuck=exchange.stuck,
        on_leave=ambient.leave,
        on_enter=ambient.enter,
    )
    enter_modes = callers_modes(plan.device)
    results: list[Any] = [None] * plan.size
    errors: list[Ended] = []

    def live(rank: int, group: SimulatedGroup, *, is_newcomer: bool = False) -> None:
        registry = Registry().begin(group)
        registries.append(registry)
        ambient.start(rank, registry)
        world = _world(plan, _Room(exchange, group, registry, is_newcomer))
        error: BaseException | None = None
        try:
            with enter_modes():
                results[rank] = plan.fn(world)
        except BaseException as raised:  # noqa: BLE001 - raised again by simulate
            error = raised
        _let_go(error)
        error = exchange.end_rank(rank, error)
        if error is not None:
            errors.append((rank, error))
        world.connection.close()
        del error  # its traceback refers to this frame: avoid a reference cycle

    def body(rank: int) -> None:
        _inside.rank = True
        activity = activities[rank]
        live(rank, SimulatedGroup(rank, everyone, post, exchange.log, activity))
        while exchange.await_return(rank):
            alone = exchange.regroup.alone(rank)
            group = SimulatedGroup(rank, alone, post, exchange.log)
            live(rank, group, is_newcomer=True)

    try:
        exchange.turns.run(body)
        errors[:] = _origin(errors, exchange.has_raised)
    finally:
        late_error = exchange.close()
        for registry in registries:
            registry.close()
    if late_error is not None and not errors:
        errors.append((None, late_error))
    if errors:
        _raise(plan, errors)
    exchange.check_reached()
    clock = max(exchange.clocks)
    updates = max(activity.num_updates for activity in activities)
    log, faults = tuple(exchange.log), tuple(exchange.faults)
    return Run(tuple(results), log, clock, faults, updates)


def _world(plan: Plan, room: "_Room") -> World:
    """Return the first world of a rank: of all ranks, or after a crash of this rank alone."""
    connection, rank, size = room.connection(), room.group.rank(), room.group.size()
    for names in axes.neighbor_runs(plan.axes):
        ranks = axes.row(plan.axes, names, rank)
        part = room.among(Members(" x ".join(names), ranks))
        connection.add_part(names, part.group, simulated=part)
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        device=plan.device,
        axes=plan.axes,
        group=connection,
    )


@attrs.frozen
class _Room:
    """One rank's view of a group, with the operations that a `Connection` needs in simulation."""

    _exchange: Exchange
    group: SimulatedGroup
    _registry: Registry
    is_newcomer: bool = False
    _num_branches: "count[int]" = attrs.field(factory=lambda: count(1))

    def connection(self) -> connections.Connection:
        """Create the connection of this rank to the group."""
        # a part or a branch of the world, which has a name, cannot regroup
        is_whole = not self.group.members.name
        return connections.Connection(
            self.group,
            activity=self.group.activity,
            simulated=self,
            regrouping=self if self._exchange.is_elastic and is_whole else None,
        )

    def is_awaited(self) -> bool:
        """Let returning ranks arrive. Return whether a rank waits to join."""
        regroup = self._exchange.regroup
        self._exchange.let_others(self.group.rank_of_run, lambda: regroup.is_quiet)
        return regroup.is_awaited

    def meet(self, world: World) -> World:
        """Return the next world, with the remaining ranks and the waiting ranks."""
        exchange, rank = self._exchange, self.group.rank_of_run
        exchange.regroup.come(rank)
        exchange.let_others(rank, lambda: exchange.regroup.is_due(rank))
        activity = exchange.activity(rank) if self.is_newcomer else None
        room = self.among(exchange.regroup.form_world(rank), activity)
        self._registry.begin(room.group)
        world.connection.close()
        joins = attrs.evolve(room, is_newcomer=False).connection()
        return world.followed(room.group.rank(), room.group.size(), joins)

    def among(
        self, members: Members, activity: connections.Activity | None = None
    ) -> "_Room":
        """Return this rank's view of another group, and register the group with torch."""
        group = self.group.among(members, activity or self.group.activity)
        self._registry.add(group)
        return attrs.evolve(self, group=group)

    def compare(self, label: str, rows: list[str]) -> tuple[int, list[str]] | None:
        """Return the first rank and its rows if they differ from this rank's rows, else None."""
        rank, members = self.group.rank(), self.group.members
        return self._exchange.shared.compare(members, rank, label, rows)

    def part(self, name: str, ranks: tuple[int, ...]) -> tuple[SimulatedGroup, "_Room"]:
        """Return the group of some of these ranks, including this rank, and its view."""
        within = f"{self.group.members.name} {name}".strip()
        members = attrs.evolve(self.group.members, name=within, ranks=ranks)
        room = self.among(members)
        return room.group, room

    def branch(self, world: World) -> tuple[World, Callable[[], None]]:
        """Return a world of the same ranks with a new group, and a function to close the group."""
        name = f"branch {next(self._num_branches)}"
        members = attrs.evolve(self.group.members, name=name)
        room = self.among(members, connections.Activity())
        connection = room.connection()
        inner = attrs.evolve(world, group=connection)

        def give_up() -> None:
            self._exchange.give_up(self.group.rank_of_run, members)
            connection.close()
            self._registry.remove(room.group)

        return inner, give_up


def _let_go(error: BaseException | None) -> None:
    """After a crash, release the rank's saves and objects, as the end of a process does."""
    if isinstance(error, Crashed):
        had_saves = background.give_up()
        traceback.clear_frames(error.__traceback__)
        if had_saves:  # free the errors of these saves, which are in cycles
            gc.collect()


def _raise(plan: Plan, errors: list[Ended]) -> NoReturn:
    """Raise the last error, with a note on how to repeat the run."""
    rank, error = errors.pop()
    if plan.device.type == "meta":
        error = explain_meta_error(error)
    with suppress(Exception):  # some classes of errors do not accept notes
        where = "" if rank is None else f" rank {rank} of"
        note = f"In{where} a simulated world. To repeat the run: {plan}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    try:
        raise error
    finally:
        del error  # avoid a reference cycle with this frame


def _origin(
    errors: Sequence[Ended], is_raised_by_world: Callable[[BaseException], bool]
) -> Sequence[Ended]:
    """Return the first error, or the error that caused it, as a list with at most one item.

    After an error, a rank's clean-up code may call a collective that does not match the other
    ranks' calls. Then the rank's error is the context of the mismatch error that all ranks raise.
    """
    if errors and is_raised_by_world(errors[0][1]):
        for rank, error in errors:
            contexts = _with_contexts(error)
            if is_raised_by_world(error) and not all(map(is_raised_by_world, contexts)):
                return [(rank, error)]
    return errors[:1]


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    within: BaseException | None = error
    while within is not None:
        yield within
        within = within.__context__
