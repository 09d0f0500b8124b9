# SPDX-License-Identifier: Apache-2.0
"""The connection between a world's ranks: process groups, rank status, failures, the store."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen

from accelfn.errors import ArgumentError, PeerFailedError, WorldError
from accelfn.world.axes import neighbor_runs, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

# pyright: reportIncompatibleMethodOverride=false

# `Activity`: a rank's current operation, for errors, crash bundles and logs of simulations.


@define(eq=False)
class Activity:
    """The current operation of one rank, shared by all of its worlds.

    Error messages show the operation. Only `samples` changes results: a collective in a loss
    ignores the filler samples of empty shares.

    Attributes:
        label: the label of the running collective; None outside of collectives.
        structure: the structure of the collective's tree, for simulated ranks.
        step: the number of the current or latest update.
        is_between: whether the update `step` is finished.
        num_updates: the number of updates that the rank has finished.
        samples: the samples of the running loss, an `engine.runner.Samples`.
        has_coupled: whether a collective in the running loss combined samples of several ranks.
        stand_ins: the filler samples of the latest empty shares. Outside of their batch, these
            fillers would count as samples.
        trail: the latest collectives, each with its update.
        on_update: a function that is called with the number of each update at its start, for
            example to simulate a failure.
        before_call: a function that is called with a label and a world before each collective
            of a loss.
        on_close: functions by names of states. They are called when the user closes the world,
            or the program ends without an error.
    """

    label: str | None = None
    structure: str | None = None
    step: int | None = None
    samples: Any = None
    has_coupled: bool = False
    is_between: bool = False
    num_updates: int = 0
    stand_ins: deque[Any] = field(factory=partial(deque, maxlen=4))
    trail: deque[tuple[str, int | None]] = field(factory=partial(deque, maxlen=20))
    on_update: Callable[[int], None] | None = None
    before_call: Callable[[str, Any], None] | None = None
    on_close: dict[str, Callable[[], None]] = field(factory=dict)

    def close(self) -> None:
        """Call the functions of `on_close`, once."""
        waiting, self.on_close = self.on_close, {}
        for callback in waiting.values():
            callback()


# The roll call: after a failure, ranks exchange their status through the store.
#
# A backend reports only that a connection broke. So each rank writes its status into the store
# of the rendezvous. There the other ranks read which rank raised an error, and which ranks
# wrote nothing. This costs nothing until a rank fails.


_LEFT = "left"
"""The status of a rank that has closed its world without an error."""
_NAME = "accelfn roll call"
_JOINED, _KNOWS = "joined", "knows that all are joined"
_ASKS_EVERY = 0.01
_ANSWERS_WITHIN = 0.5
"""Seconds to wait for the store; if its process has ended, the store may never answer."""
_LINGERS = 2.0
"""Seconds that a failed rank 0 keeps the store, because other ranks notice the failure later."""


@frozen(kw_only=True)
class Standing:
    """The last reported status of a rank.

    Attributes:
        how: the status, such as `raised ValueError: boom`, `left` or `waited in 'mean'`.
        step: the number of the rank's update; None before the first update.
        when: "at" or "after" this update.
        is_waiting: whether the rank waited for other ranks.
    """

    how: str
    step: int | None = None
    when: str = "at"
    is_waiting: bool = False

    def __str__(self) -> str:
        """Return the status as text."""
        if self.step is None:
            return self.how
        return f"{self.how} {self.when} update {self.step}"


def name_error(kind: str, text: str) -> str:
    """Return an error's class and first line; for a data worker's error, those of its cause.

    torch wraps an error of a data worker in a message that begins "Caught ValueError in
    DataLoader worker process 0." and contains the worker's traceback.
    """
    first, _, rest = text.partition("\n")
    if first.startswith("Caught ") and rest.startswith("Original "):
        last = rest.rpartition("Traceback (most recent call last):\n")[2]
        causes = [line for line in last.splitlines() if not line.startswith(" ")]
        if causes:
            return f"{causes[0]} (in {first.rstrip('.').partition(' in ')[2]})"
    return f"{kind}: {first}" if first else kind


def list_unjoined(store: dist.Store, size: int) -> list[int]:
    """Return the ranks that have not joined, according to the store."""
    substore = dist.PrefixStore(_NAME, store)
    return [rank for rank in range(size) if not substore.check([f"{_JOINED} {rank}"])]


class RollCall:
    """The exchange of the ranks' last status through the store.

    Attributes:
        rank_0_keeps_it: whether the process of rank 0 hosts the store, not a launcher.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, rank_0_keeps_it: bool
    ) -> None:
        """Store the rendezvous store, and delete this rank's status from an earlier world."""
        self._met, self._store = store, dist.PrefixStore(_NAME, store)
        self._rank, self._size = rank, size
        with suppress(RuntimeError):
            self._store.delete_key(str(rank))
        self.rank_0_keeps_it = rank_0_keeps_it
        self._told: Standing | None = None

    def begin(self, timeout: float) -> None:
        """Wait until all ranks have joined. If a rank ended before, the others could not join.

        Rank 0, which may host the store, continues last, so that no rank waits for a closed store.

        Raises:
            PeerFailedError: a rank did not join within the timeout, or ended before.
        """
        until = time.monotonic() + timeout
        try:
            self._say(_JOINED)
            self._await_all(_JOINED, timeout)
            self._say(_KNOWS)
            if self._rank == 0:
                self._await_all(_KNOWS, max(until - time.monotonic(), 0.1))
        except RuntimeError as error:
            msg = (
                f"Rank {self._rank} of {self._size} opened its world, but {self._absent()} did"
                f" not open its world within {round(timeout, 1):g} s, or ended. Look at its output."
            )
            raise PeerFailedError(msg) from error

    def _say(self, word: str) -> None:
        self._store.set(f"{word} {self._rank}", "")

    def _await_all(self, word: str, timeout: float) -> None:
        """Wait until all ranks have written this word into the store."""
        words = [f"{word} {rank}" for rank in range(self._size)]
        self._store.wait(words, timedelta(seconds=timeout))

    def _absent(self) -> str:
        """Return a text that names the ranks that have not joined, according to the store."""
        try:
            late = list_unjoined(self._met, self._size)
        except RuntimeError:
            late = [0] if self.rank_0_keeps_it else []
        named = " and ".join(map(str, late))
        return f"rank {named}" if named else "another rank"

    def tell(self, how: str, activity: Activity, *, is_waiting: bool) -> None:
        """Report this rank's status to the other ranks; only the first report counts."""
        if self._told is not None:
            return
        when = "after" if activity.is_between and not is_waiting else "at"
        self._told = standing = Standing(
            how=how, step=activity.step, when=when, is_waiting=is_waiting
        )
        with suppress(RuntimeError):  # the process that hosts the store has ended
            self._store.set(str(self._rank), json.dumps(asdict(standing)))

    def hear(self) -> dict[int, Standing] | None:
        """Return the status of other ranks, by rank; None if the store does not answer.

        Wait until a failed rank, or all ranks, have reported, but at most half a second. Ranks
        without a report are left out.
        """

        def is_enough(heard: dict[int, Standing]) -> bool:
            # with two ranks only the other rank can have failed: do not wait for its report
            return self._size == 2 or any(not h.is_waiting for h in heard.values())

        return self._heard(is_enough, within=_ANSWERS_WITHIN)

    def linger(self) -> None:
        """If rank 0 failed and hosts the store, wait until the other ranks have reported."""
        has_failed = self._told is not None and self._told.how != _LEFT
        if has_failed and self._rank == 0 and self.rank_0_keeps_it:
            self._heard(lambda _: False, within=_LINGERS)

    def _heard(
        self, is_enough: Callable[[dict[int, Standing]], bool], *, within: float
    ) -> dict[int, Standing] | None:
        heard: dict[int, Standing] = {}
        has_answered, has_gone = threading.Event(), threading.Event()
        until = time.monotonic() + within

        def listen() -> None:
            try:
                while True:
                    heard.update(self._spoken(heard))
                    has_answered.set()
                    is_whole = len(heard) == self._size - 1
                    if is_whole or is_enough(heard) or time.monotonic() > until:
                        return
                    time.sleep(_ASKS_EVERY)
            except RuntimeError:  # the store is closed, so reports may be lost
                has_gone.set()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        # a store whose process was stopped, or lost its network, never answers
        listening.join(within + _ANSWERS_WITHIN)
        is_known = has_answered.is_set() and not has_gone.is_set()
        return dict(heard) if is_known else None

    def _spoken(self, heard: dict[int, Standing]) -> dict[int, Standing]:
        """Return the status of the ranks that reported since the last call."""
        silent = [r for r in range(self._size) if r != self._rank and r not in heard]
        speakers = [rank for rank in silent if self._store.check([str(rank)])]
        return {r: Standing(**json.loads(self._store.get(str(r)))) for r in speakers}


_SETTLES = 0.05
"""Seconds after which every thread has run at least once, also on a busy machine."""


@define(eq=False, slots=False)
class Connection:
    """The process group of a world's ranks, until the world is closed.

    torch aborts a process that still has a reference to a Gloo group at its end. So when the
    world is closed, all objects must drop their references to the group.

    Attributes:
        group: torch's process group; None after the world is closed.
        activity: this rank's current operation.
        roll_call: exchanges the ranks' last status after a failure, in a world of `from_env`.
        simulated: the services of simulated ranks (`testing.simulation.ranks`); None otherwise.
        regrouping: creates the next world in an elastic run: a `world.meeting.Launched`, or the
            services of simulated ranks.
        parts: connections along the world's axes, by the names of the axes, and connections of
            the parts of the world, by the call of `split`.
        mesh: torch's DeviceMesh of the axes, created at its first use.
        successor: the next world after a regrouping.
        is_broken: whether a collective failed because of another rank.
        is_ours: whether accelfn opened the group, and must close it.
        is_closed: whether the world is closed.
        is_lent: whether a branch (see `is_branch`) is in use. Then do not use this connection.
        is_branch: whether this is a branch: the same processes with another process group.
    """

    group: dist.ProcessGroup | None
    activity: Activity = field(factory=Activity)
    roll_call: RollCall | None = None
    simulated: Any = None
    regrouping: Any = None
    parts: dict[tuple[str, ...], Connection] = field(factory=dict)
    mesh: Any = None
    successor: Any = None
    is_broken: bool = False
    is_ours: bool = False
    is_closed: bool = False
    is_lent: bool = False
    is_branch: bool = False
    _holders: list[weakref.WeakMethod[Callable[[], None]]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Check the group; make an update raise if a replacing process has not regrouped."""
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            msg = f"World(group={self.group!r}): expected a torch ProcessGroup or None."
            raise ArgumentError(msg)
        if self.regrouping is not None and self.regrouping.is_newcomer:
            self.activity.on_update = _refuse_alone

    def add_part(
        self,
        names: tuple[str, ...],
        group: dist.ProcessGroup | None,
        simulated: Any = None,
    ) -> Connection:
        """Add the connection along some of the world's axes; it shares the dict `parts`."""
        part = Connection(group, self.activity, simulated=simulated, parts=self.parts)
        self.parts[names] = part
        return part

    def hold(self, let_go: Callable[[], None]) -> None:
        """Register a bound method that drops references when the world is closed."""
        self._holders.append(weakref.WeakMethod(let_go))

    def check_not_lent(self) -> None:
        """Raise if the ranks currently use a branch of this world.

        Raises:
            WorldError: a branch is in use.
        """
        if self.is_lent:
            msg = (
                "You cannot use this world while af.find_batch_size tries a batch size. Use the"
                " world that af.find_batch_size passes to your function fn(batch_size, world),"
                " and create the states inside fn."
            )
            raise WorldError(msg)

    def joins(self, device: torch.device) -> bool:
        """Return whether the group has a backend for tensors of a device."""
        try:
            cast("Any", self.group)._get_backend(device)
        except RuntimeError:
            return False
        return True

    def backend(self, device: torch.device) -> str | None:
        """Return the name of the backend for tensors of a device; None for simulated ranks."""
        if self.simulated is not None:
            return None
        return cast("Any", self.group)._get_backend(device).name()

    def timeout(self, device: torch.device) -> float | None:
        """Return the timeout of collectives in seconds; None if it is unknown."""
        try:
            backend: Any = cast("Any", self.group)._get_backend(device)
            return backend.options._timeout.total_seconds()
        except (AttributeError, RuntimeError):  # a simulated group, or no such backend
            return None

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives, of this group and the groups of its parts."""
        for connection in (self, *self.parts.values()):
            group = cast("Any", connection.group)
            for device in group._device_types:
                backend = group._get_backend(device)
                backend._set_default_timeout(timedelta(seconds=seconds))

    def own(self) -> None:
        """Let `end` close the process group, at the latest when the interpreter exits."""
        self.is_ours = True
        # torch may abort a process with an open group
        atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Close the process group if accelfn opened it; a second call does nothing."""
        if self.successor is not None:
            self.successor.close()
        if not self.is_ours or self.is_closed:
            return
        atexit.unregister(self._end_at_exit)
        self.tell(_LEFT)
        roll_call = self.roll_call
        is_default = dist.is_initialized() and dist.group.WORLD is self.group
        self.close()
        # DistributedDataParallel is in a reference cycle, and must be freed before the group.
        # Otherwise its reducer would free the group while it holds the GIL, and Gloo's threads
        # may wait for the GIL
        gc.collect()
        if is_default:
            dist.destroy_process_group()
        # DistributedDataParallel leaves Gloo threads running (torch 2.13). A thread that has not
        # yet freed its last result needs the GIL, and aborts if the interpreter is gone
        time.sleep(_SETTLES)
        if roll_call is not None:
            roll_call.linger()

    def _end_at_exit(self) -> None:
        """Close the group, and drop the last traceback, whose frames have references to it."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.fail(error)
        else:
            self.activity.close()
        for name in ("last_exc", "last_value", "last_traceback"):
            if hasattr(sys, name):
                setattr(sys, name, None)
        self.end()

    def close(self) -> None:
        """Drop all references to the group, here, in the parts and in registered objects."""
        for holder in self._holders:
            let_go = holder()
            if let_go is not None:
                let_go()
        self._holders.clear()
        self.group, self.roll_call, self.simulated, self.mesh = None, None, None, None
        self.is_closed = True
        for part in self.parts.values():
            if not part.is_closed:
                part.close()
        if self.successor is not None:
            self.successor.connection.close()

    def fail(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks."""
        if self.successor is not None:
            self.successor.connection.fail(error)
            return
        self.tell(f"raised {name_error(type(error).__name__, str(error))}")

    def tell(self, how: str, *, is_waiting: bool = False) -> None:
        """Report this rank's status to the other ranks."""
        if self.roll_call is not None:
            self.roll_call.tell(how, self.activity, is_waiting=is_waiting)


def _refuse_alone(update: int) -> None:
    msg = (
        "This process replaces a rank that ended, and has not joined the other ranks: it would"
        f" train alone from update {update}. Call state = af.regroup(state) before the first step."
    )
    raise WorldError(msg)


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error and its causes."""
    ids: set[int] = set()
    pending = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in ids:
            ids.add(id(link))
            traceback.clear_frames(link.__traceback__)
            pending += [link.__cause__, link.__context__]


# A store that stops waiting if a process has ended.

_LOOKS_EVERY = 0.02


class WatchedStore(dist.Store):
    """A store that stops waiting if a rank has ended.

    torch's Gloo opens a group through a store. It needs only `set`, `get`, `add`, `check` and
    `wait`.
    """

    def __init__(
        self, store: dist.Store, is_one_gone: Callable[[], bool], timeout: float
    ) -> None:
        """Wrap a store; `is_one_gone` returns whether a rank has ended; timeout in seconds."""
        super().__init__()
        self._store, self._is_one_gone, self._timeout = store, is_one_gone, timeout

    def set(self, key: str, value: Any) -> None:
        """Store a value under a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return the value."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under a key, and return the sum."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            dist.DistStoreError: a rank has ended, or the timeout is over.
        """
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self._store.check(list(keys)):
            if self._is_one_gone():
                msg = f"a rank ended before {', '.join(keys)} was written"
                raise dist.DistStoreError(msg)
            if time.monotonic() > until:
                msg = f"{', '.join(keys)} was not written within {seconds:g} s"
                raise dist.DistStoreError(msg)
            time.sleep(_LOOKS_EVERY)

    def has_extended_api(self) -> bool:
        """Return False, because this store cannot append values or read several keys at once."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout."""
        self._timeout = timeout.total_seconds()


# The store of a run's rendezvous, and the machines that can reach it.
#
# torch's store has no authentication, and listens on all network interfaces. If all ranks are on
# this machine, accelfn makes the store listen only on the loopback interface.


def open_store(
    host: str,
    port: int,
    timeout: timedelta,
    *,
    size: int | None = None,
    is_local: bool = True,
    is_shared: bool = False,
) -> dist.TCPStore:
    """Open a store in this process, and return it; `port=0` chooses a free port.

    Other machines cannot reach a store on the loopback interface.

    Args:
        host: the address at which the other processes reach this machine.
        port: the port to listen at.
        timeout: the timeout of the store.
        size: the number of processes to wait for; None means not to wait.
        is_local: whether all processes are on this machine. Then a host name that resolves to
            the loopback here is safe; on another machine it may resolve to another address.
        is_shared: whether this process may already have a store at this port, and use it.
    """
    # these addresses are the loopback on every machine
    is_loopback = host == "localhost" or host.startswith(("127.", "::1", "[::1]"))
    listener = _bound_to_loopback(host, port) if is_local or is_loopback else None
    if listener is not None:
        port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        multi_tenant=is_shared,
        # detached, because the store closes it
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _bound_to_loopback(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the loopback.

    Return None if the host is not on the loopback, or the port is in use.
    """
    with suppress(socket.gaierror):  # later, torch raises a clear error for this host
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = addresses[0]
        if ip_address(where[0]).is_loopback:
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(where)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                return None
            return listener
    return None


# The process groups of axes.


def open_rows(
    run: Sequence[tuple[int, ...]], rank: int, seconds: float | None, name: str
) -> Any:
    """Open a group for each row with several ranks; return the group that contains `rank`.

    All ranks must open all groups in the same order.
    """
    timeout = None if seconds is None else timedelta(seconds=seconds)
    own_group = None
    for row in run:
        if len(row) > 1:
            group = dist.new_group(row, timeout, group_desc=name)
            own_group = group if rank in row else own_group
    return own_group


Groups: TypeAlias = dict[tuple[str, ...], dist.ProcessGroup]


def open_groups(axes: Mapping[str, int], rank: int, timeout: float) -> Groups:
    """Open the groups of all runs of neighboring axes, and return the groups of this rank.

    All ranks must open all groups in the same order.
    """
    return {
        names: open_rows(rows(axes, names), rank, timeout, " x ".join(names))
        for names in neighbor_runs(axes)
    }
