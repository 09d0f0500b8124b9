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
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from attrs import asdict, frozen

from accelfn.errors import ArgumentError, PeerFailedError, WorldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# pyright: reportIncompatibleMethodOverride=false

# `Activity`: what a rank is doing, for errors, crash bundles and the logs of simulations.


class Activity:
    """What one rank is doing, in whatever worlds it is.

    It is written in passing, and read when something went wrong. A collective is given a world
    and nothing else, so this is reached from one. Only `samples` decides anything: a collective
    in a loss leaves out the stand-ins of empty shares. Who must come
    between two updates, a simulated fault or the refusal of a newcomer to train alone, is
    called by `on_update`.

    Attributes:
        label: of the collective that the rank is in, if it is in one.
        structure: of the tree that the collective is about, where ranks are simulated.
        step: the update that it takes, or took last.
        is_between: whether that update is over.
        num_updates: how many it has ended.
        samples: of the loss that the rank computes now, an `engine.loss.Samples`.
        has_coupled: whether a collective of this loss saw samples of several ranks.
        trail: the latest collectives, each with its update.
        on_update: called with the update that begins, if anybody must be.
        before_call: called with a label and a world before each collective of a loss, if
            something must come first.
        on_close: called when the world was closed by its user, or with a program that ended
            well; by the names of states.
    """

    __slots__ = (
        *(
            "before_call",
            "has_coupled",
            "is_between",
            "label",
            "num_updates",
            "on_close",
        ),
        *("on_update", "samples", "step", "structure", "trail"),
    )

    def __init__(self) -> None:
        """Create an empty activity."""
        self.label: str | None = None
        self.structure: str | None = None
        self.step: int | None = None
        self.samples: Any = None
        self.has_coupled = False
        self.is_between = False
        self.num_updates = 0
        self.trail: deque[tuple[str, int | None]] = deque(maxlen=20)
        self.on_update: Callable[[int], None] | None = None
        self.before_call: Callable[[str, Any], None] | None = None
        self.on_close: dict[str, Callable[[], None]] = {}

    def close(self) -> None:
        """Call who waits for the world's end, once."""
        waiting, self.on_close = self.on_close, {}
        for each in waiting.values():
            each()


# The roll call: ranks exchange their status after a failure.
#
# A backend reports only that a connection broke. Through the store of the rendezvous the ranks
# exchange which rank raised an error, and which ranks are silent. It costs nothing until a
# rank fails.


_LEFT = "left"
"""What becomes of a rank whose world is closed, and nothing was wrong."""
_NAME = "accelfn roll call"
_JOINED, _KNOWS = "joined", "knows that all are joined"
_ASKS_EVERY = 0.01
_ANSWERS_WITHIN = 0.5
"""Seconds: a store at which nobody is at home may keep its caller for ever."""
_LINGERS = 2.0
"""Seconds: other ranks come to their timeouts later, on a busy machine much later."""


@frozen(kw_only=True)
class Standing:
    """What became of a rank.

    Attributes:
        how: `raised ValueError: boom`, `left`, `waited in 'mean'`.
        step: the update that it was at, if any was.
        when: "at" that update, or "after" it.
        is_waiting: whether it waited for others, and is not what they waited for.
    """

    how: str
    step: int | None = None
    when: str = "at"
    is_waiting: bool = False

    def __str__(self) -> str:
        """Say it in words."""
        if self.step is None:
            return self.how
        return f"{self.how} {self.when} update {self.step}"


def name_error(kind: str, text: str) -> str:
    """Return an error's kind and its first line; of what torch wraps, those of the cause.

    torch raises what a data worker has raised anew, with a text that begins "Caught ValueError
    in DataLoader worker process 0." and has the worker's traceback.
    """
    first, _, rest = text.partition("\n")
    if first.startswith("Caught ") and rest.startswith("Original "):
        last = rest.rpartition("Traceback (most recent call last):\n")[2]
        causes = [line for line in last.splitlines() if not line.startswith(" ")]
        if causes:
            return f"{causes[0]} (in {first.rstrip('.').partition(' in ')[2]})"
    return f"{kind}: {first}" if first else kind


def list_unjoined(store: dist.Store, size: int) -> list[int]:
    """Return the ranks that are not joined, as far as the store of their world tells."""
    said = dist.PrefixStore(_NAME, store)
    return [rank for rank in range(size) if not said.check([f"{_JOINED} {rank}"])]


class RollCall:
    """What one rank tells the others of a world at its end, and hears from them.

    Attributes:
        rank_0_keeps_it: whether the store ends with rank 0, and not with a launcher.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, rank_0_keeps_it: bool
    ) -> None:
        """Take the store at which they met."""
        self._met, self._store = store, dist.PrefixStore(_NAME, store)
        self._rank, self._size = rank, size
        with suppress(
            RuntimeError
        ):  # what it told as an earlier world of the same group
            self._store.delete_key(str(rank))
        self.rank_0_keeps_it = rank_0_keeps_it
        self._told: Standing | None = None

    def begin(self, timeout: float) -> None:
        """Wait until all ranks are joined: one that went before would break what joins others.

        Whoever keeps the store goes on last, so that nobody waits at a store that is gone.

        Raises:
            PeerFailedError: a rank was not joined within so many seconds, or ended before.
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
        """Wait until all have said a word."""
        words = [f"{word} {rank}" for rank in range(self._size)]
        self._store.wait(words, timedelta(seconds=timeout))

    def _absent(self) -> str:
        """Return in words who is not joined, as far as the store tells."""
        try:
            late = list_unjoined(self._met, self._size)
        except RuntimeError:
            late = [0] if self.rank_0_keeps_it else []
        named = " and ".join(map(str, late))
        return f"rank {named}" if named else "another rank"

    def leave(self, activity: Activity) -> None:
        """Tell the others that this rank's world is closed, and nothing was wrong."""
        self.tell(_LEFT, activity, is_waiting=False)

    def tell(self, how: str, activity: Activity, *, is_waiting: bool) -> None:
        """Tell the others, if the store can still be reached; the first time counts."""
        if self._told is not None:
            return
        when = "after" if activity.is_between and not is_waiting else "at"
        self._told = standing = Standing(
            how=how, step=activity.step, when=when, is_waiting=is_waiting
        )
        with suppress(RuntimeError):  # its host has gone
            self._store.set(str(self._rank), json.dumps(asdict(standing)))

    def hear(self) -> dict[int, Standing] | None:
        """Return what others tell, by rank; None where the store does not answer, or goes.

        It returns once all have spoken, or one whose fault it is, and after half a second
        without those that are silent.
        """
        # of two, the one that this rank waited for is the one that speaks, or not
        return self._heard(
            lambda heard: (
                self._size == 2 or any(not h.is_waiting for h in heard.values())
            ),
            within=_ANSWERS_WITHIN,
        )

    def linger(self) -> None:
        """Keep the store, where this rank has failed that does, until others have spoken."""
        failed = self._told is not None and self._told.how != _LEFT
        if failed and self._rank == 0 and self.rank_0_keeps_it:
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
        """Return what those have told that were not heard yet."""
        others = [r for r in range(self._size) if r != self._rank and r not in heard]
        told = [rank for rank in others if self._store.check([str(rank)])]
        return {
            rank: Standing(**json.loads(self._store.get(str(rank)))) for rank in told
        }


_SETTLES = 0.05
"""Seconds: on a busy machine, until each thread has had its turn."""


class Connection:
    """What joins the ranks, until the world is closed.

    torch aborts a process in which a Gloo group is still referred to at its end, so a world
    must be able to let go of it, and tell those who hold it too.

    Attributes:
        group: torch's process group, until then.
        activity: what this rank is doing.
        roll_call: by which ranks that fail tell each other how, in a world of `from_env`.
        simulated: what simulated ranks can do besides (`testing.simulation.ranks`); else None.
        regrouping: how the ranks make another world, in an elastic run: a
            `world.meeting.Launched`, or of simulated ranks what they can do besides.
        parts: what joins the ranks along some of the world's axes, by their names, and those
            of parts that it was split into, by how.
        mesh: torch's record of the axes, once it was asked for.
        successor: the world that its ranks made when they met anew, if they did.
        is_broken: whether a collective failed in it because of another rank.
        is_ours: whether its group was opened by accelfn, which closes it.
        is_closed: whether the world is.
        is_lent: whether a branch of it is in use, and it must not be.
        is_branch: whether it is a branch of another: it joins the same processes, by a process
            group of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        activity: Activity | None = None,
        roll_call: RollCall | None = None,
        simulated: Any = None,
        regrouping: Any = None,
    ) -> None:
        """Take a process group, or None in a world of 1."""
        if group is not None and not isinstance(group, dist.ProcessGroup):
            msg = f"World(group={group!r}): expected a torch ProcessGroup or None."
            raise ArgumentError(msg)
        self.group = group
        self.activity = Activity() if activity is None else activity
        self.roll_call = roll_call
        self.simulated = simulated
        self.regrouping = regrouping
        if regrouping is not None and regrouping.is_newcomer:
            self.activity.on_update = _refuse_alone
        self.successor: Any = None
        self.is_broken = False
        self.parts: dict[tuple[str, ...], Connection] = {}
        self.mesh: Any = None
        self.is_ours = self.is_closed = False
        self.is_lent = self.is_branch = False
        self._holders: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add_part(
        self,
        names: tuple[str, ...],
        group: dist.ProcessGroup | None,
        simulated: Any = None,
    ) -> None:
        """Let the world have what joins the ranks along some of its axes."""
        part = Connection(group, activity=self.activity, simulated=simulated)
        part.parts = self.parts
        self.parts[names] = part

    def hold(self, let_go: Callable[[], None]) -> None:
        """Have a bound method called when the world is closed."""
        self._holders.append(weakref.WeakMethod(let_go))

    def check_not_lent(self) -> None:
        """Raise while the ranks talk through a branch of the world.

        Raises:
            WorldError: they do.
        """
        if self.is_lent:
            msg = (
                "This world waits while af.find_batch_size tries a batch size: a rank that"
                " runs out of memory could not tell the others. Use the world that the"
                " function is given, fn(batch_size, world), and create states in there."
            )
            raise WorldError(msg)

    def joins(self, device: torch.device) -> bool:
        """Whether ranks can talk of what lies on such a device."""
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
        for each in (self, *self.parts.values()):
            group = cast("Any", each.group)
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
        self.leave()
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
        """End, and drop the traceback that was printed: its frames hold the group."""
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
        """Let go of the group everywhere."""
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

    def leave(self) -> None:
        """Let other ranks know that this one has left, and nothing was wrong."""
        if self.roll_call is not None:
            self.roll_call.leave(self.activity)

    def fail(self, error: BaseException) -> None:
        """Let other ranks know what this one has raised."""
        if self.successor is not None:
            self.successor.connection.fail(error)
            return
        self.tell(f"raised {name_error(type(error).__name__, str(error))}")

    def tell(self, how: str, *, is_waiting: bool = False) -> None:
        """Let other ranks know what becomes of this one."""
        if self.roll_call is not None:
            self.roll_call.tell(how, self.activity, is_waiting=is_waiting)


def _refuse_alone(update: int) -> None:
    msg = (
        "This rank was started in the place of one that is gone, and would train alone, from"
        f" update {update}. Let it come in before the first step: state = af.regroup(state)."
    )
    raise WorldError(msg)


# A store at which nobody waits for what a process would write that is gone.


# torch's stubs name the same parameter differently from method to method

_LOOKS_EVERY = 0.02


class WatchedStore(dist.Store):
    """Another store, whose waits end where one of those is gone that are waited for.

    torch's Gloo opens a group by what its ranks write and read at a store. It asks for no more
    than `set`, `get`, `add`, `check` and `wait`.
    """

    def __init__(
        self, store: dist.Store, is_one_gone: Callable[[], bool], timeout: float
    ) -> None:
        """Take a store, what says that somebody is gone, and how many seconds to wait."""
        super().__init__()
        self._store, self._is_one_gone, self._timeout = store, is_one_gone, timeout

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
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
            dist.DistStoreError: one that might write them is gone, or it takes too long.
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
        """Whether it appends, and reads several at once: it does not."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for so long."""
        self._timeout = timeout.total_seconds()


# The store at which the processes of a run meet, and who can reach it.
#
# torch's store asks nobody who they are, and listens on all interfaces of its machine,
# whatever address it is given. Where the ranks meet on the loopback it listens there alone.


def open_store(
    host: str,
    port: int,
    timeout: timedelta,
    *,
    size: int | None = None,
    is_local: bool = True,
    is_shared: bool = False,
) -> dist.TCPStore:
    """Return a store of this process, at a free port where `port` is 0.

    On an address of the loopback no other machine reaches it.

    Args:
        host: the address of this machine for the others.
        port: where it listens.
        timeout: of the store.
        size: how many processes to wait for; default none.
        is_local: whether all who meet there are on this machine. Elsewhere a name that is
            an address of the loopback here may be another address.
        is_shared: whether the store may be one that this process has at that port already.
    """
    # what is the loopback on every machine, and no name that it has on this one
    is_loopback = host == "localhost" or host.startswith(("127.", "::1", "[::1]"))
    bound = _bound_to_loopback(host, port) if is_local or is_loopback else None
    if bound is not None:
        port = bound.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        multi_tenant=is_shared,
        # a number from here on, which the store closes
        master_listen_fd=None if bound is None else bound.detach(),
    )


def _bound_to_loopback(host: str, port: int) -> socket.socket | None:
    """Return a socket for the store; None off the loopback, or where one listens there."""
    with suppress(socket.gaierror):  # torch has the words for it
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        if ip_address(where[0]).is_loopback:
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(where)
            except OSError as error:
                bound.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                return None
            return bound
    return None
