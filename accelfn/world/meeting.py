# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run meet: each of them once, and all at one store."""

import json
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from accelfn.errors import WorldError
from accelfn.world.connection import Connection
from accelfn.world.listening import open_store
from accelfn.world.place import Place
from accelfn.world.roll_call import RollCall, list_unjoined

_SAYS_AFTER = 10.0
"""Seconds until a rank says for whom it waits."""
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
        late = [each for each, count in enumerate(_counts(store, size)) if not count]
        late = [each for each in late or list_unjoined(store, size) if each != rank]
        return f"rank {', '.join(map(str, late))}"


def check_backend(backend: str | None) -> None:
    """Refuse a backend that torch was not built with."""
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
    opened(
        store,
        place.rank,
        place.size,
        backend=backend,
        device=device,
        timeout=meeting.seconds_to_open,
    )
    return _connection(place, dist.group.WORLD, store), True


def opened(
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
    known = dist.Backend.default_device_backend_map
    if device.type not in known:
        msg = (
            f"torch.distributed has no backend for devices of type {device.type!r}; it has"
            f" {', '.join(known)}. Import the package that registers one, or name it:"
            f' World.from_env(backend="cpu:gloo,{device.type}:...").'
        )
        raise WorldError(msg)
    return f"cpu:gloo,{device.type}:{known[device.type]}"


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
            " own, and each run a MASTER_PORT of its own."
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
