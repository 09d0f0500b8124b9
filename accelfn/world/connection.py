# SPDX-License-Identifier: Apache-2.0
"""The connection of a world's ranks: process groups, activity, roll call and store."""

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

# `Activity`: a rank's present operation, for errors, crash bundles and logs of simulations.


@define(eq=False)
class Activity:
    """The present operation of one rank, in all of its worlds.

    Errors read it. A collective reaches it through its world. Only `samples` changes results: a
    collective in a loss leaves out the stand-ins of empty shares.

    Attributes:
        label: the label of the collective that the rank is in; None outside.
        structure: the structure of the collective's tree, for simulated ranks.
        step: the update that the rank takes, or took last.
        is_between: whether that update is over.
        num_updates: the number of updates that the rank has ended.
        samples: the samples of the present loss, an `engine.runner.Samples`.
        has_coupled: whether a collective of this loss saw samples of several ranks.
        stand_ins: values of the latest empty shares, which count as samples outside of their batch.
        trail: the latest collectives, each with its update.
        on_update: called with the number of each update that begins, for example to inject a
            simulated fault.
        before_call: called with a label and a world before each collective of a loss.
        on_close: functions by names of states, called when the user closes the world, or the
            program ends without an error.
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


# The roll call: ranks exchange their status after a failure.
#
# A backend reports only that a connection broke. Through the store of the rendezvous the ranks
# exchange which rank raised an error, and which ranks are silent. It costs nothing until a
# rank fails.


_LEFT = "left"
"""The status of a rank that has closed its world without an error."""
_NAME = "accelfn roll call"
_JOINED, _KNOWS = "joined", "knows that all are joined"
_ASKS_EVERY = 0.01
_ANSWERS_WITHIN = 0.5
"""Seconds; a store without a host may block its caller forever."""
_LINGERS = 2.0
"""Seconds; other ranks reach their timeouts later, on a busy machine much later."""


@frozen(kw_only=True)
class Standing:
    """The last status of a rank.

    Attributes:
        how: the status, such as `raised ValueError: boom`, `left` or `waited in 'mean'`.
        step: the rank's update; None before the first.
        when: "at" that update, or "after" it.
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
    """Return an error's kind and its first line, or those of the cause in a data worker.

    torch wraps an error of a data worker in a text that begins "Caught ValueError in
    DataLoader worker process 0." and has the worker's traceback.
    """
    first, _, rest = text.partition("\n")
    if first.startswith("Caught ") and rest.startswith("Original "):
        last = rest.rpartition("Traceback (most recent call last):\n")[2]
        causes = [line for line in last.splitlines() if not line.startswith(" ")]
        if causes:
            return f"{causes[0]} (in {first.rstrip('.').partition(' in ')[2]})"
    return f"{kind}: {first}" if first else kind


def list_unjoined(store: dist.Store, size: int) -> list[int]:
    """Return the ranks that are not joined according to the store."""
    substore = dist.PrefixStore(_NAME, store)
    return [rank for rank in range(size) if not substore.check([f"{_JOINED} {rank}"])]


class RollCall:
    """The exchange of the ranks' last status.

    Attributes:
        rank_0_keeps_it: whether the store ends with rank 0, not with a launcher.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, rank_0_keeps_it: bool
    ) -> None:
        """Take the store of the rendezvous."""
        self._met, self._store = store, dist.PrefixStore(_NAME, store)
        self._rank, self._size = rank, size
        with suppress(
            RuntimeError
        ):  # what it told as an earlier world of the same group
            self._store.delete_key(str(rank))
        self.rank_0_keeps_it = rank_0_keeps_it
        self._told: Standing | None = None

    def begin(self, timeout: float) -> None:
        """Wait until all ranks are joined, because an earlier end would break the joining.

        The rank that keeps the store continues last, so that no rank waits at a closed store.

        Raises:
            PeerFailedError: a rank was not joined within the timeout, or ended before.
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
                f" not within {round(timeout, 1):g} s, or ended meanwhile. Look at its output"
                " for the cause."
            )
            raise PeerFailedError(msg) from error

    def _say(self, word: str) -> None:
        self._store.set(f"{word} {self._rank}", "")

    def _await_all(self, word: str, timeout: float) -> None:
        """Wait until all ranks have set a word."""
        words = [f"{word} {rank}" for rank in range(self._size)]
        self._store.wait(words, timedelta(seconds=timeout))

    def _absent(self) -> str:
        """Return a text with the ranks that are not joined according to the store."""
        try:
            late = list_unjoined(self._met, self._size)
        except RuntimeError:
            late = [0] if self.rank_0_keeps_it else []
        named = " and ".join(map(str, late))
        return f"rank {named}" if named else "another rank"

    def tell(self, how: str, activity: Activity, *, is_waiting: bool) -> None:
        """Report a status to the other ranks, if the store still answers; the first counts."""
        if self._told is not None:
            return
        when = "after" if activity.is_between and not is_waiting else "at"
        self._told = standing = Standing(
            how=how, step=activity.step, when=when, is_waiting=is_waiting
        )
        with suppress(RuntimeError):  # its host has gone
            self._store.set(str(self._rank), json.dumps(asdict(standing)))

    def hear(self) -> dict[int, Standing] | None:
        """Return the status of other ranks, by rank; None if the store does not answer.

        It returns after all ranks or a failed rank have reported, or after half a second
        without the silent ranks.
        """
        # with two ranks, the other rank is the one that this rank waited for
        return self._heard(
            lambda heard: (
                self._size == 2 or any(not h.is_waiting for h in heard.values())
            ),
            within=_ANSWERS_WITHIN,
        )

    def linger(self) -> None:
        """Keep the store of a failed rank 0 until the other ranks have reported."""
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
            except RuntimeError:  # the others may have spoken to nobody
                has_gone.set()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        # a store whose host was stopped, or cut off, never answers
        listening.join(within + _ANSWERS_WITHIN)
        is_known = has_answered.is_set() and not has_gone.is_set()
        return dict(heard) if is_known else None

    def _spoken(self, heard: dict[int, Standing]) -> dict[int, Standing]:
        """Return the status of ranks that reported since the last look."""
        silent = [r for r in range(self._size) if r != self._rank and r not in heard]
        speakers = [rank for rank in silent if self._store.check([str(rank)])]
        return {r: Standing(**json.loads(self._store.get(str(r)))) for r in speakers}


_SETTLES = 0.05
"""Seconds until each thread has run once on a busy machine."""


@define(eq=False, slots=False)
class Connection:
    """The process group of a world's ranks, until the world is closed.

    torch aborts a process that still refers to a Gloo group at its end. So a world must drop
    the group, and so must all other holders.

    Attributes:
        group: torch's process group, until then.
        activity: this rank's present operation.
        roll_call: the exchange of the ranks' last status, in a world of `from_env`.
        simulated: the services of simulated ranks (`testing.simulation.ranks`); else None.
        regrouping: makes the next world in an elastic run: a `world.meeting.Launched`, or the
            services of simulated ranks.
        parts: connections along the world's axes, by the names of the axes, and connections of
            its parts, by the call of `split`.
        mesh: torch's DeviceMesh of the axes, after its first use.
        successor: the next world after a regrouping.
        is_broken: whether a collective failed because of another rank.
        is_ours: whether accelfn opened the group, and closes it.
        is_closed: whether the world is closed.
        is_lent: whether a branch is in use, so that this connection must not be used.
        is_branch: whether it is a branch: it joins the same processes by its own process group.
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
        """Check the group, and let no newcomer train alone."""
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
    ) -> None:
        """Add the connection along some of the world's axes, which has the same parts."""
        self.parts[names] = Connection(
            group, self.activity, simulated=simulated, parts=self.parts
        )

    def hold(self, let_go: Callable[[], None]) -> None:
        """Register a bound method to call when the world is closed."""
        self._holders.append(weakref.WeakMethod(let_go))

    def check_not_lent(self) -> None:
        """Raise while the ranks use a branch of the world.

        Raises:
            WorldError: a branch is in use.
        """
        if self.is_lent:
            msg = (
                "This world waits while af.find_batch_size tries a batch size: a rank that"
                " runs out of memory could not tell the others. Use the world that the"
                " function is given, fn(batch_size, world), and create states in there."
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
        """Return the name of what carries what lies on such a device; None of simulated ranks."""
        if self.simulated is not None:
            return None
        return cast("Any", self.group)._get_backend(device).name()

    def timeout(self, device: torch.device) -> float | None:
        """Return after how many seconds a collective fails; None where nobody can tell."""
        try:
            backend: Any = cast("Any", self.group)._get_backend(device)
            return backend.options._timeout.total_seconds()
        except (AttributeError, RuntimeError):  # a simulated one, or none
            return None

    def set_timeout(self, seconds: float) -> None:
        """Have collectives of the group and of its parts fail after so many seconds."""
        for connection in (self, *self.parts.values()):
            group = cast("Any", connection.group)
            for device in group._device_types:
                backend = group._get_backend(device)
                backend._set_default_timeout(timedelta(seconds=seconds))

    def own(self) -> None:
        """Have the process group closed by `end`, at the latest with the interpreter."""
        self.is_ours = True
        atexit.register(self._end_at_exit)  # torch may abort a process that leaves it

    def end(self) -> None:
        """Close the process group, if it is ours; twice is once."""
        if self.successor is not None:
            self.successor.close()
        if not self.is_ours or self.is_closed:
            return
        atexit.unregister(self._end_at_exit)
        self.tell(_LEFT)
        roll_call = self.roll_call
        is_default = dist.is_initialized() and dist.group.WORLD is self.group
        self.close()
        # DistributedDataParallel refers to itself. It must be gone before the group is: its
        # reducer would free the group holding the interpreter's lock, which Gloo may want
        gc.collect()
        if is_default:
            dist.destroy_process_group()
        # DistributedDataParallel leaves Gloo's threads behind (torch 2.13). One that has not yet
        # freed the last sum would want the interpreter's lock when there is none, and abort
        time.sleep(_SETTLES)
        if roll_call is not None:
            roll_call.linger()

    def _end_at_exit(self) -> None:
        """End, and drop the printed traceback, because its frames hold the group."""
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
        """Drop the group everywhere."""
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
        "This rank replaces one that is gone, and would train alone, from"
        f" update {update}. Let it come in before the first step: state = af.regroup(state)."
    )
    raise WorldError(msg)


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of all functions that an error and its causes went through."""
    ids: set[int] = set()
    pending = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in ids:
            ids.add(id(link))
            traceback.clear_frames(link.__traceback__)
            pending += [link.__cause__, link.__context__]


# A store that stops waiting for values of a process that has ended.


# torch's stubs name the same parameter differently from method to method

_LOOKS_EVERY = 0.02


class WatchedStore(dist.Store):
    """A store that stops waiting if a rank has ended.

    torch's Gloo opens a group through a store. It needs only `set`, `get`, `add`, `check` and
    `wait`.
    """

    def __init__(
        self, store: dist.Store, is_one_gone: Callable[[], bool], timeout: float
    ) -> None:
        """Take a store, a function that tells if a rank has ended, and a timeout in seconds."""
        super().__init__()
        self._store, self._is_one_gone, self._timeout = store, is_one_gone, timeout

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            dist.DistStoreError: a rank has ended, or the time is over.
        """
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self._store.check(list(keys)):
            if self._is_one_gone():
                msg = f"one of the ranks is gone, before {', '.join(keys)} was written"
                raise dist.DistStoreError(msg)
            if time.monotonic() > until:
                msg = f"{', '.join(keys)} was not written within {seconds:g} s"
                raise dist.DistStoreError(msg)
            time.sleep(_LOOKS_EVERY)

    def has_extended_api(self) -> bool:
        """Return False: the store cannot append, or read several keys at once."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout."""
        self._timeout = timeout.total_seconds()


# The store of a run's rendezvous, and who can reach it.
#
# torch's store has no authentication, and listens on all interfaces of its machine. If the ranks
# meet on the loopback, accelfn lets it listen there only.


def open_store(
    host: str,
    port: int,
    timeout: timedelta,
    *,
    size: int | None = None,
    is_local: bool = True,
    is_shared: bool = False,
) -> dist.TCPStore:
    """Return a store of this process; `port=0` takes a free port.

    No other machine can reach a store on the loopback.

    Args:
        host: the address of this machine for the other processes.
        port: the port to listen at.
        timeout: the timeout of the store.
        size: the number of processes to wait for; default none.
        is_local: whether all processes are on this machine. On other machines a name of the
            loopback may be another address.
        is_shared: whether the store may be this process's own store at that port.
    """
    # addresses that are the loopback on every machine
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
    """Return a socket for the store; None off the loopback, or if the port is in use."""
    with suppress(socket.gaierror):  # torch raises a clear error
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
    """Open the group of each row of several ranks, in one order; return that of a rank."""
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

    All ranks open all groups, in one order.
    """
    return {
        names: open_rows(rows(axes, names), rank, timeout, " x ".join(names))
        for names in neighbor_runs(axes)
    }
