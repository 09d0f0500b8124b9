# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: the processes of a run meet at one store and open process groups."""

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
"""Numbers the worlds that this process opens; every rank opens the same ones."""


class Meeting:
    """How long ranks may take until their world is up, and for whom this rank waits.

    All parts share one deadline: the store, the other ranks, their process groups. In a
    `with` block this rank says after some seconds for whom it waits.

    Attributes:
        place: this rank's.
        timeout: seconds from the start of the meeting to its deadline.
        store: the ranks meet here, once this rank has reached it.
        opens_in_time: whether the deadline holds for process groups too. Else they open
            with their own timeout, because torch could not change it afterwards.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        """Begin now."""
        self.place, self.timeout = place, timeout
        self.store: dist.Store | None = None
        self.opens_in_time = False
        self._until = time.monotonic() + timeout
        self._timer = threading.Timer(_SAYS_AFTER, self._say)
        self._timer.daemon = True

    @property
    def seconds_left(self) -> float:
        """How many seconds there are until the deadline; a moment, after it."""
        return max(self._until - time.monotonic(), 0.1)

    @property
    def seconds_to_open(self) -> float:
        """How many seconds a process group may take to open."""
        return self.seconds_left if self.opens_in_time else self.timeout

    def __enter__(self) -> Self:
        """Wait from now on."""
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait no more."""
        self._timer.cancel()

    def _say(self) -> None:
        place = self.place
        with suppress(
            RuntimeError
        ):  # the store is gone, and the waiting thread says so
            sys.stderr.write(
                f"accelfn: rank {place.rank} of {place.size} waits for {self._name_awaited()} at"
                f" {place.address}:{place.port}, for {self.seconds_left:.0f} s more.\n"
            )

    def _name_awaited(self) -> str:
        if self.store is None:
            return "the launcher" if self.place.has_store else "rank 0"
        # the waiting thread has the other connection
        store = cast("Any", self.store).clone()
        rank, size = self.place.rank, self.place.size
        late = [r for r, count in enumerate(_counts(store, size)) if not count]
        late = [
            member for member in late or list_unjoined(store, size) if member != rank
        ]
        return f"rank {', '.join(map(str, late))}"


def check_backend(backend: str | None) -> None:
    """Raise unless torch was built with a backend."""
    for part in [] if backend is None else backend.split(","):
        name = part.split(":")[-1]
        if not dist.is_backend_available(name):
            msg = (
                f"Backend {backend!r}: this torch has no {name!r}. Expected gloo, nccl or"
                ' one a device, such as "cpu:gloo,cuda:nccl".'
            )
            raise WorldError(msg)


def refuse_open_group() -> None:
    """Raise where several ranks have met, and the environment does not say so."""
    if dist.is_initialized() and (size := dist.get_world_size()) > 1:
        msg = (
            f"The environment has no RANK, but torch's process group has {size} ranks:"
            " this is not a world of 1. Pass on the World that you were given (a"
            " simulated rank gets its own), or make one with World(rank=, size=, group=)."
        )
        raise WorldError(msg)


def join(
    meeting: Meeting, *, backend: str | None, device: torch.device
) -> tuple[Connection, bool]:
    """Return what joins all ranks, and whether it was opened here."""
    place = meeting.place
    if dist.is_initialized():
        group = dist.group.WORLD
        if group is not None and (group.rank(), group.size()) == (
            place.rank,
            place.size,
        ):
            return _connection(place, group, group.get_group_store()), False
        msg = (
            f"A process group is open in which this is rank {dist.get_rank()} of"
            f" {dist.get_world_size()}, but the environment says RANK={place.rank}"
            f" of WORLD_SIZE={place.size}. Close it with"
            " torch.distributed.destroy_process_group()."
        )
        raise WorldError(msg)
    backend = _backend(device) if backend is None else backend
    names = {part.split(":")[-1] for part in backend.split(",")}
    meeting.opens_in_time = names <= _CAN_CHANGE_TIMEOUT
    with explain_opening(place.rank, place.size, backend):
        store = _meet(meeting)
    open_default_group(
        store,
        place.rank,
        place.size,
        backend=backend,
        device=device,
        timeout=meeting.seconds_to_open,
    )
    return _connection(place, dist.group.WORLD, store), True


def open_default_group(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> None:
    """Open torch's default group of ranks that have met at a store.

    Raises:
        WorldError: torch cannot.
    """
    backend = _backend(device) if backend is None else backend
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
    """Raise a WorldError that says which rank could not open a process group."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        msg = f"Rank {rank} of {size} cannot open a {backend!r} process group: {error}"
        if isinstance(error, dist.DistError):
            msg += ". If another rank ended, or cannot be reached, its output says why."
        raise WorldError(msg) from error


def _backend(device: torch.device) -> str:
    """Return what torch joins such devices by, beside what joins processors."""
    if device.type == "cpu":
        return "gloo"
    backends = dist.Backend.default_device_backend_map
    if device.type not in backends:
        msg = (
            f"torch.distributed has no backend for devices of type {device.type!r}; it has"
            f" {', '.join(backends)}. Import the package that registers one, or name it:"
            f' World.from_env(backend="cpu:gloo,{device.type}:...").'
        )
        raise WorldError(msg)
    return f"cpu:gloo,{device.type}:{backends[device.type]}"


def _connection(
    place: Place, group: dist.ProcessGroup | None, store: dist.Store
) -> Connection:
    """Return what joins the ranks, which tell each other at a store how they end."""
    roll_call = RollCall(
        store, place.rank, place.size, rank_0_keeps_it=not place.has_store
    )
    return Connection(group, roll_call=roll_call)


def _meet(meeting: Meeting) -> dist.Store:
    """Wait until all ranks are there; return the store at which they are.

    The last one to come sees whether each rank came once, and tells all.
    """
    place = meeting.place
    # a launcher's store outlives a world: the next one must not find its addresses
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
        msg = f"within {meeting.timeout:g} s none came as rank {late}"
        raise WorldError(msg) from error
    counts = enumerate(json.loads(store.get("counts")))
    wrong = [f"{n or 'none'} as rank {rank}" for rank, n in counts if n != 1]
    if wrong:
        msg = (
            f"{place.size} processes came, {' and '.join(wrong)}. Give each a RANK of its"
            " own, and each run its own MASTER_PORT."
        )
        raise WorldError(msg)
    return store


def _counts(store: dist.Store, size: int) -> list[int]:
    """Return how many processes have come as each rank."""
    return [store.add(str(rank), 0) for rank in range(size)]


def store_of(place: Place, timeout: float) -> dist.Store:
    """Return the store of a run, which rank 0 opens, if no launcher has."""
    address, port = place.address, place.port
    assert address is not None  # noqa: S101 - a place without one is alone
    assert port is not None  # noqa: S101
    keeps_it = place.rank == 0 and not place.has_store
    if keeps_it:
        # a launcher in this process may have one there
        is_local = place.local_size == place.size
        return open_store(
            address,
            port,
            timedelta(seconds=timeout),
            is_local=is_local,
            is_shared=True,
        )
    _await(address, port, timeout)
    return dist.TCPStore(
        address, port, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


def _await(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there; torch would take twice the time, and log each try."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout).close()
        except OSError as error:
            if time.monotonic() > until:
                msg = f"none listens at {address}:{port} within {round(timeout, 1):g} s ({error})"
                raise WorldError(msg) from error
        else:
            return
        time.sleep(_LOOKS_EVERY)


# Regrouping: processes of an elastic launch form a new world.
#
# The launcher knows which processes live, and its store outlives them all. So it is the one
# who says who makes the next world: it waits until every rank of this one that lives has
# come, and adds the newcomers that wait. What each side writes and reads at the store is in
# `Words`. A program opens one world, and `af.regroup` makes the others.


_ASKS_EVERY = 0.02
_NOTICES_WITHIN = 5.0
"""Seconds: a launcher looks after its processes many times a second."""


@frozen
class Words:
    """The keys at the store by which processes and their launcher understand each other.

    A process is called by its place on the machine and how often one was started there: "1.0".
    An elastic launcher sets `VARIABLE` to how often it has started one in this one's place.
    """

    VARIABLE: ClassVar = "ACCELFN_ELASTIC"
    store: dist.Store

    @classmethod
    def at(cls, store: dist.Store) -> Words:
        """Return the words at a launcher's store."""
        return cls(dist.PrefixStore("accelfn elastic", store))

    def come(self, number: int, name: str) -> None:
        """Say that a process of the world before waits for world `number`."""
        self.store.set(f"came {number} {name}", "")

    def has_come(self, number: int, name: str) -> bool:
        """Return whether a process waits for world `number`."""
        return self.store.check([f"came {number} {name}"])

    def ask_in(self, name: str) -> None:
        """Say that a newcomer waits for whatever world is next."""
        self.store.set(f"waits {name}", "")
        self.store.add("waiting", 1)

    def waits(self, name: str) -> bool:
        """Return whether a newcomer waits."""
        return self.store.check([f"waits {name}"])

    def take_in(self, name: str, number: int | None) -> None:
        """Tell a newcomer in which world it is; None: in none, for it is gone."""
        self.store.add("waiting", -1)
        if number is not None:
            self.store.set(f"taken {name}", str(number))

    def taken(self, name: str) -> int | None:
        """Return in which world a newcomer was taken."""
        key = f"taken {name}"
        return int(self.store.get(key)) if self.store.check([key]) else None

    def num_waiting(self) -> int:
        """Return how many newcomers wait."""
        return self.store.add("waiting", 0)

    def call(self, number: int, names: list[str]) -> None:
        """Say who makes world `number`, in the order of its ranks."""
        self.store.set(f"world {number}", json.dumps(names))

    def called(self, number: int) -> list[str] | None:
        """Return who makes a world, once the launcher has said so."""
        key = f"world {number}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def lose(self, name: str) -> None:
        """Say that a process is gone."""
        self.store.set(f"gone {name}", "")

    def is_gone(self, name: str) -> bool:
        """Return whether a process is gone."""
        return self.store.check([f"gone {name}"])

    def arrive(self, number: int, name: str) -> None:
        """Say that a process knows who makes a world with it."""
        self.store.set(f"here {number} {name}", "")

    def is_here(self, number: int, name: str) -> bool:
        """Return whether a process knows who makes a world with it."""
        return self.store.check([f"here {number} {name}"])


def is_newcomer(env: Environment) -> bool:
    """Return whether this process was started in the place of one that is gone."""
    return Words.VARIABLE in env and integer(env, Words.VARIABLE) > 0


def regrouping_of(
    env: Environment,
    place: Place,
    *,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> Launched | None:
    """Return how a process makes another world with others; None where it cannot."""
    if Words.VARIABLE not in env:
        return None
    return Launched(
        store_of(place, timeout),
        f"{place.local_rank}.{integer(env, Words.VARIABLE)}",
        [f"{rank}.0" for rank in range(place.size)],
        backend=backend,
        device=device,
        timeout=timeout,
        is_newcomer=is_newcomer(env),
    )


@define(eq=False)
class Launched:
    """A process of an elastic launch, and how it makes another world with the others.

    Attributes:
        store: the launcher's store.
        name: this process, as the store names it.
        names: the processes of its world, in the order of their ranks.
        backend: as a world's; None for the default.
        device: the device of its tensors.
        timeout: seconds that a collective, or a wait for the others, may take.
        is_newcomer: whether it is in no world with others yet.
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
        """Return whether a newcomer waits to join."""
        return self._words.num_waiting() > 0

    def meet(self, world: Any) -> Any:
        """Close a world; wait for all ranks of it that live, and return the next.

        Raises:
            PeerFailedError: one that lives did not come in time; it is named.
            WorldError: torch cannot join those that came.
        """
        # they refer to what refers to the group, as a DistributedDataParallel does
        clear_frames(sys.exc_info()[1])
        world.connection.end()
        world.connection.close()
        activity = Activity() if self.is_newcomer else world.connection.activity
        names = self._next()
        while (connection := self._join_ranks(names, activity)) is None:
            names = self._next()
        return world.followed(names.index(self.name), len(names), connection)

    def _next(self) -> list[str]:
        """Return the members of the next world from the launcher."""
        if self.is_newcomer and self.number == 0:
            self._words.ask_in(self.name)
            # for as long as others train: the launcher, which knows when they end, ends this too
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
                self.number -= 1  # whoever asks again waits for the same world
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
        return (
            f"Rank {self.names.index(self.name)} of {len(self.names)} waited"
            f" {self.timeout:g} s in af.regroup(state), and rank"
            f" {' and '.join(late) or 'none'}, which is alive, did not come. Call it on all"
            " ranks of a world."
        )

    def _all_arrive(self, names: list[str]) -> bool:
        """Wait until all who make a world know of it; return False where one is gone before."""
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
        """Return what joins those who make a world; None where one is gone meanwhile."""
        store = dist.PrefixStore(f"accelfn world {self.number}", self.store)
        if not (self._all_arrive(names) and self._open_group(names, store)):
            return None
        self.is_newcomer = False
        if len(names) == 1:
            return Connection(None, activity=activity, regrouping=self)
        rank = names.index(self.name)
        return Connection(
            dist.group.WORLD,
            activity=activity,
            roll_call=RollCall(store, rank, len(names), rank_0_keeps_it=False),
            regrouping=self,
        )

    def _open_group(self, names: list[str], store: dist.Store) -> bool:
        """Let torch join those who have arrived; return whether all of them lived so long.

        Raises:
            WorldError: all of them live, and torch cannot join them.
        """
        if len(names) == 1:
            return True
        try:
            open_default_group(
                self._watch_store(store, names),
                names.index(self.name),
                len(names),
                backend=self.backend,
                device=self.device,
                timeout=self.timeout,
            )
        except WorldError:
            if not self._loses_one(names):
                raise
            return False
        return True

    def _watch_store(self, store: dist.Store, names: list[str]) -> dist.Store:
        """Return a store at which nobody waits for one of these who is gone.

        Where a device is no processor, its backend goes on to use a store in threads of its
        own, which had better not wait for Python: then a timeout ends what is waited for.
        """
        if self.device.type != "cpu":
            return store
        is_gone = self._words.is_gone
        return WatchedStore(store, lambda: any(map(is_gone, names)), self.timeout)

    def _loses_one(self, names: list[str]) -> bool:
        """Return whether one of these is gone, of whom the launcher may not know yet."""
        until = time.monotonic() + min(self.timeout, _NOTICES_WITHIN)
        while not any(map(self._words.is_gone, names)):
            if time.monotonic() > until:
                return False
            time.sleep(_ASKS_EVERY)
        return True
