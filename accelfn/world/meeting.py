# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: the processes of a run connect to one store, and open process groups."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from attrs import define, frozen

from accelfn.errors import PeerFailedError, WorldError
from accelfn.world.connection import (
    Activity,
    Connection,
    RollCall,
    WatchedStore,
    clear_frames,
    list_unjoined,
    open_store,
)
from accelfn.world.place import Environment, Place, integer

if TYPE_CHECKING:
    from collections.abc import Generator

_SAYS_AFTER = 10.0
"""Seconds until a rank prints the ranks that it waits for."""
_CAN_CHANGE_TIMEOUT = {"gloo", "nccl"}
_LOOKS_EVERY = 0.05
_worlds = count()
"""Counts the worlds that this process opens; every rank opens the same number of worlds."""


class Meeting:
    """The deadline for opening a world, and a message that names the ranks still missing.

    All phases share the deadline: to reach the store, to wait for the other ranks, and to open
    process groups. If a `with` block of this class takes longer than 10 s, it prints for which
    ranks this rank waits.

    Attributes:
        place: this rank's place in the run.
        timeout: seconds from the start to the deadline.
        store: the store at which the ranks meet; None until this rank has reached it.
        opens_in_time: whether process groups open with the time that is left. Otherwise they
            open with the full timeout, because torch cannot change their timeout later.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        """Start the deadline now."""
        self.place, self.timeout = place, timeout
        self.store: dist.Store | None = None
        self.opens_in_time = False
        self._until = time.monotonic() + timeout
        self._timer = threading.Timer(_SAYS_AFTER, self._say)
        self._timer.daemon = True

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0.1."""
        return max(self._until - time.monotonic(), 0.1)

    @property
    def seconds_to_open(self) -> float:
        """Seconds that a process group may take to open."""
        return self.seconds_left if self.opens_in_time else self.timeout

    def __enter__(self) -> Self:
        """Start the timer for the message."""
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the timer for the message."""
        self._timer.cancel()

    def _say(self) -> None:
        place = self.place
        with suppress(RuntimeError):  # the store is closed: the main thread raises
            sys.stderr.write(
                f"accelfn: rank {place.rank} of {place.size} waits for {self._name_awaited()} at"
                f" {place.address}:{place.port}, for {self.seconds_left:.0f} s more.\n"
            )

    def _name_awaited(self) -> str:
        if self.store is None:
            return "the launcher" if self.place.has_store else "rank 0"
        # a second connection, because the main thread uses the first while it waits
        store = cast("Any", self.store).clone()
        rank, size = self.place.rank, self.place.size
        late = [r for r, count in enumerate(_counts(store, size)) if not count]
        late = [r for r in late or list_unjoined(store, size) if r != rank]
        return f"rank {', '.join(map(str, late))}"


def check_backend(backend: str | None) -> None:
    """Raise unless this torch build has the backend, or each backend of a list."""
    for name in () if backend is None else sorted(_names_of(backend)):
        if not dist.is_backend_available(name):
            msg = (
                f"World.from_env(backend={backend!r}): this torch build has no backend {name!r}."
                ' Use gloo, nccl, or one for each device type, such as "cpu:gloo,cuda:nccl".'
            )
            raise WorldError(msg)


def refuse_open_group() -> None:
    """Raise if torch's process group has several ranks, but the environment has no rank."""
    if dist.is_initialized() and (size := dist.get_world_size()) > 1:
        msg = (
            f"torch's process group has {size} ranks, but the environment has no RANK, so accelfn"
            " would create a world of one process. Use the World that you already have (a simulated"
            " rank gets its World as an argument), or write World(rank=..., size=..., group=...)."
        )
        raise WorldError(msg)


def join(meeting: Meeting, *, backend: str | None, device: torch.device) -> Connection:
    """Return the connection of all ranks; open the process group if it is not open yet."""
    place = meeting.place
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) == (place.rank, place.size):
            return _connection(place, cast("Any", dist.group.WORLD).get_group_store())
        msg = (
            f"This process is rank {dist.get_rank()} of {dist.get_world_size()} in torch's open"
            f" process group, but the environment says RANK={place.rank} of"
            f" WORLD_SIZE={place.size}. Close the group first, with"
            " torch.distributed.destroy_process_group()."
        )
        raise WorldError(msg)
    backend = _backend(device) if backend is None else backend
    meeting.opens_in_time = _names_of(backend) <= _CAN_CHANGE_TIMEOUT
    rank, size = place.rank, place.size
    with explain_opening(rank, size, backend):
        store = _meet(meeting)
    open_default_group(store, rank, size, backend, timeout=meeting.seconds_to_open)
    connection = _connection(place, store)
    connection.own()
    return connection


def open_default_group(
    store: dist.Store, rank: int, size: int, backend: str, *, timeout: float
) -> None:
    """Open torch's default process group, through a store that all ranks have reached.

    Raises:
        WorldError: torch cannot open the group.
    """
    with explain_opening(rank, size, backend):
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )


@contextmanager
def explain_opening(rank: int, size: int, backend: str | None) -> Generator[None]:
    """Turn an error inside a `with` block into a WorldError that names rank and backend."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        msg = f"Rank {rank} of {size} cannot open a {backend!r} process group: {error}"
        if isinstance(error, dist.DistError):
            msg += ". Look at the output of the other ranks: one may have failed."
        raise WorldError(msg) from error


def _names_of(backend: str) -> set[str]:
    """Return the names of the backends in text such as "cpu:gloo,cuda:nccl"."""
    return {part.split(":")[-1] for part in backend.split(",")}


def _backend(device: torch.device) -> str:
    """Return the backend for devices of this type, together with gloo for the CPU."""
    if device.type == "cpu":
        return "gloo"
    backends = dist.Backend.default_device_backend_map
    if device.type not in backends:
        msg = (
            f"torch.distributed has no default backend for devices of type {device.type!r}, only"
            f" for {', '.join(backends)}. Import the package that registers a backend, or write"
            f' World.from_env(backend="cpu:gloo,{device.type}:...").'
        )
        raise WorldError(msg)
    return f"cpu:gloo,{device.type}:{backends[device.type]}"


def _connection(place: Place, store: dist.Store) -> Connection:
    """Return the default group's connection; ranks report their status through the store."""
    keeps_it = not place.has_store
    roll_call = RollCall(store, place.rank, place.size, rank_0_keeps_it=keeps_it)
    return Connection(dist.group.WORLD, roll_call=roll_call)


def _meet(meeting: Meeting) -> dist.Store:
    """Wait until all ranks have connected to the store, and return the store.

    The last process to connect checks that there is one process per rank, and writes the counts
    for all processes.
    """
    place = meeting.place
    # each world has its own key prefix, because a launcher's store still exists after a world
    # ends, and the next world must not read the addresses of the old world
    name = f"accelfn attempt {place.attempt} world {next(_worlds)}"
    store = dist.PrefixStore(name, store_of(place, meeting.seconds_left))
    meeting.store = store
    store.add(str(place.rank), 1)
    if store.add("all", 1) == place.size:
        store.set("counts", json.dumps(_counts(store, place.size)))
    try:
        store.wait(["counts"], timedelta(seconds=meeting.seconds_left))
    except dist.DistError as error:
        came = enumerate(_counts(store, place.size))
        late = ", ".join(str(rank) for rank, count in came if count == 0)
        msg = f"no process connected as rank {late} within {meeting.timeout:g} s"
        raise WorldError(msg) from error
    counts = enumerate(json.loads(store.get("counts")))
    wrong = [f"{n or 'none'} with rank {rank}" for rank, n in counts if n != 1]
    if wrong:
        msg = (
            f"{place.size} processes connected, but {' and '.join(wrong)}. Set a different RANK"
            " for each process. If several jobs run, also set a different MASTER_PORT for each."
        )
        raise WorldError(msg)
    return store


def _counts(store: dist.Store, size: int) -> list[int]:
    """Return the number of connected processes for each rank."""
    return [store.add(str(rank), 0) for rank in range(size)]


def store_of(place: Place, timeout: float) -> dist.Store:
    """Return the store of a run; rank 0 opens the store if no launcher did."""
    address, port = cast("Any", (place.address, place.port))
    limit = timedelta(seconds=timeout)
    if place.rank == 0 and not place.has_store:
        # a launcher inside this process may already have a store at this port
        is_local = place.local_size == place.size
        return open_store(address, port, limit, is_local=is_local, is_shared=True)
    _await(address, port, timeout)
    return dist.TCPStore(address, port, timeout=limit, wait_for_workers=False)


def _await(address: str, port: int, timeout: float) -> None:
    """Wait until a process listens at an address.

    torch would wait twice as long as the timeout, and log each attempt.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout).close()
        except OSError as error:
            if time.monotonic() > until:
                place = f"{address}:{port} after {round(timeout, 1):g} s"
                msg = f"no process listens at {place} ({error})"
                raise WorldError(msg) from error
        else:
            return
        time.sleep(_LOOKS_EVERY)


# Regrouping: processes of an elastic launch form a new world.
#
# The launcher knows which processes are alive, and its store exists longer than any process. So
# the launcher decides which processes form the next world. It waits until every living process
# of the current world has called `af.regroup`, and adds the new processes that wait. `Words`
# defines the keys that processes and launcher write and read. A program opens its first world
# itself, and `af.regroup` creates the next worlds.


_ASKS_EVERY = 0.02
_NOTICES_WITHIN = 5.0
"""Seconds within which the launcher notices that a process ended."""


@frozen
class Words:
    """The store keys for messages between processes and their elastic launcher.

    The name of a process is its local rank and the number of its restarts, such as "1.0". The
    launcher sets the environment variable `VARIABLE` to the number of restarts.
    """

    VARIABLE: ClassVar = "ACCELFN_ELASTIC"
    store: dist.Store

    @classmethod
    def at(cls, store: dist.Store) -> Words:
        """Return the `Words` of a launcher's store."""
        return cls(dist.PrefixStore("accelfn elastic", store))

    def come(self, number: int, name: str) -> None:
        """Write that a process of the world before waits for world `number` to open."""
        self.store.set(f"came {number} {name}", "")

    def has_come(self, number: int, name: str) -> bool:
        """Return whether a process of the world before waits for world `number` to open."""
        return self.store.check([f"came {number} {name}"])

    def ask_in(self, name: str) -> None:
        """Write that a new process waits to join the next world."""
        self.store.set(f"waits {name}", "")
        self.store.add("waiting", 1)

    def waits(self, name: str) -> bool:
        """Return whether a new process waits to join."""
        return self.store.check([f"waits {name}"])

    def take_in(self, name: str, number: int | None) -> None:
        """Write which world a new process joins; None if the process has ended."""
        self.store.add("waiting", -1)
        if number is not None:
            self.store.set(f"taken {name}", str(number))

    def taken(self, name: str) -> int | None:
        """Return the number of the world that a new process joins; None if not decided."""
        key = f"taken {name}"
        return int(self.store.get(key)) if self.store.check([key]) else None

    def num_waiting(self) -> int:
        """Return how many new processes wait to join."""
        return self.store.add("waiting", 0)

    def call(self, number: int, names: list[str]) -> None:
        """Write which processes form world `number`, in the order of their ranks."""
        self.store.set(f"world {number}", json.dumps(names))

    def called(self, number: int) -> list[str] | None:
        """Return the processes that form a world; None if the launcher has not decided."""
        key = f"world {number}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def lose(self, name: str) -> None:
        """Write that a process has ended."""
        self.store.set(f"gone {name}", "")

    def is_gone(self, name: str) -> bool:
        """Return whether a process has ended."""
        return self.store.check([f"gone {name}"])

    def arrive(self, number: int, name: str) -> None:
        """Write that a process knows the members of its next world."""
        self.store.set(f"here {number} {name}", "")

    def is_here(self, number: int, name: str) -> bool:
        """Return whether a process knows the members of its next world."""
        return self.store.check([f"here {number} {name}"])


def regrouping_of(
    env: Environment,
    place: Place,
    *,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> Launched | None:
    """Return the object that can create the next world; None without an elastic launcher."""
    if Words.VARIABLE not in env:
        return None
    num_restarts = integer(env, Words.VARIABLE)
    return Launched(
        store_of(place, timeout),
        f"{place.local_rank}.{num_restarts}",
        [f"{rank}.0" for rank in range(place.size)],
        backend=backend,
        device=device,
        timeout=timeout,
        is_newcomer=num_restarts > 0,  # it replaces a process that ended
    )


@define(eq=False)
class Launched:
    """A process of an elastic launch, which can form the next world with other processes.

    Attributes:
        store: the launcher's store.
        name: the name of this process in the store.
        names: the names of the processes of its world, in the order of their ranks.
        backend: torch's backend for the process group; None for the default.
        device: the device of this process's tensors.
        timeout: seconds that a collective, or a wait for other processes, may take.
        is_newcomer: whether this process has not joined a world with others.
        number: the number of its world.
    """

    store: dist.Store
    name: str
    names: list[str]
    backend: str | None
    device: torch.device
    timeout: float
    is_newcomer: bool
    number: int = 0

    @property
    def _words(self) -> Words:
        return Words.at(self.store)

    def is_awaited(self) -> bool:
        """Return whether a new process waits to join."""
        return self._words.num_waiting() > 0

    def meet(self, world: Any) -> Any:
        """Close a world, wait for its living ranks, and return the next world.

        Raises:
            PeerFailedError: a living rank did not call `af.regroup` in time; the message names it.
            WorldError: torch cannot open a process group for the next world.
        """
        # local variables in tracebacks may have references to the group, for example a
        # DistributedDataParallel
        clear_frames(sys.exc_info()[1])
        world.connection.end()
        world.connection.close()
        activity = Activity() if self.is_newcomer else world.connection.activity
        names = self._next()
        while (connection := self._join_ranks(names, activity)) is None:
            names = self._next()
        return world.followed(names.index(self.name), len(names), connection)

    def _next(self) -> list[str]:
        """Ask the launcher for the members of the next world, and return them."""
        if self.is_newcomer and self.number == 0:
            self._words.ask_in(self.name)
            # without a timeout: the launcher ends this process when the others end
            while (number := self._words.taken(self.name)) is None:
                time.sleep(_ASKS_EVERY)
            self.number = number
        else:
            self.number += 1
            self._words.come(self.number, self.name)
        until = time.monotonic() + self.timeout
        while (names := self._words.called(self.number)) is None:
            if time.monotonic() > until:
                missing = self._missing()
                self.number -= 1  # a later call waits for the same world again
                raise PeerFailedError(missing)
            time.sleep(_ASKS_EVERY)
        self.names = names
        return names

    def _missing(self) -> str:
        late = [
            str(rank)
            for rank, name in enumerate(self.names)
            if not self._words.has_come(self.number, name)
            and not self._words.is_gone(name)
        ]
        late_rank = f"rank {' and '.join(late)}" if late else "another rank"
        return (
            f"Rank {self.names.index(self.name)} of {len(self.names)} waited"
            f" {self.timeout:g} s in af.regroup(state), but {late_rank}, which is alive, did not"
            " call it. Call af.regroup on all ranks of the world."
        )

    def _all_arrive(self, names: list[str]) -> bool:
        """Wait until all members know of the next world; return False if a member has ended."""
        self._words.arrive(self.number, self.name)
        until = time.monotonic() + self.timeout
        absent = list(names)
        while absent and time.monotonic() < until:
            absent = [n for n in absent if not self._words.is_here(self.number, n)]
            if any(map(self._words.is_gone, absent)):
                return False
            time.sleep(_ASKS_EVERY if absent else 0)
        return True

    def _join_ranks(self, names: list[str], activity: Activity) -> Connection | None:
        """Return the connection of a world's members; None if a member ended meanwhile."""
        if not self._all_arrive(names):
            return None
        group = roll_call = None
        rank, size = names.index(self.name), len(names)
        if size > 1:
            store = dist.PrefixStore(f"accelfn world {self.number}", self.store)
            backend = self.backend or _backend(self.device)
            watcher = self._watch_store(store, names)
            try:
                open_default_group(watcher, rank, size, backend, timeout=self.timeout)
            except WorldError:
                if not self._loses_one(names):
                    raise  # all processes are alive, but torch cannot open the group
                return None
            group = dist.group.WORLD
            roll_call = RollCall(store, rank, size, rank_0_keeps_it=False)
        self.is_newcomer = False
        return Connection(group, activity, roll_call, regrouping=self)

    def _watch_store(self, store: dist.Store, names: list[str]) -> dist.Store:
        """Return a store that stops waiting if one of these processes has ended.

        Backends of accelerators use the store in their own threads, and these must not wait
        for Python code. So they get the original store, and wait until the timeout.
        """
        if self.device.type != "cpu":
            return store
        is_gone = self._words.is_gone
        return WatchedStore(store, lambda: any(map(is_gone, names)), self.timeout)

    def _loses_one(self, names: list[str]) -> bool:
        """Return whether one of these processes has ended; wait until the launcher noticed."""
        until = time.monotonic() + min(self.timeout, _NOTICES_WITHIN)
        while not any(map(self._words.is_gone, names)):
            if time.monotonic() > until:
                return False
            time.sleep(_ASKS_EVERY)
        return True
