# SPDX-License-Identifier: Apache-2.0
"""How the processes of an elastic launch make another world of those that are there.

The launcher knows which processes live, and its store outlives them all. So it is the one who
says who makes the next world: it waits until every rank of this one that lives has come, and
adds the newcomers that wait. What each side writes and reads at the store is in `Words`.
A program opens one world, and `af.regroup` makes the others.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import frozen

from accelfn.errors import PeerFailedError, WorldError
from accelfn.world.activity import Activity
from accelfn.world.connection import Connection
from accelfn.world.meeting import opened, store_of
from accelfn.world.place import Environment, Place, integer
from accelfn.world.roll_call import RollCall
from accelfn.world.watched import WatchedStore

if TYPE_CHECKING:
    import torch

VARIABLE = "ACCELFN_ELASTIC"
"""Set by an elastic launcher: how often it has started a process in this one's place."""
_LOOKS_EVERY = 0.02
_NOTICES_WITHIN = 5.0
"""Seconds: a launcher looks after its processes many times a second."""


@frozen
class Words:
    """The keys at the store by which processes and their launcher understand each other.

    A process is called by its place on the machine and how often one was started there: "1.0".
    """

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
    return VARIABLE in env and integer(env, VARIABLE) > 0


def regrouping_of(
    env: Environment,
    place: Place,
    *,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> Launched | None:
    """Return how a process makes another world with others; None where it cannot."""
    if VARIABLE not in env:
        return None
    return Launched(
        store_of(place, timeout),
        f"{place.local_rank}.{integer(env, VARIABLE)}",
        [f"{rank}.0" for rank in range(place.size)],
        backend=backend,
        device=device,
        timeout=timeout,
        is_newcomer=is_newcomer(env),
    )


class Launched:
    """A process of an elastic launch, and how it makes another world with the others.

    Attributes:
        is_newcomer: whether it is in no world with others yet.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        names: list[str],
        *,
        backend: str | None,
        device: torch.device,
        timeout: float,
        is_newcomer: bool,
    ) -> None:
        """Take the launcher's store, who makes the first world, and how one is opened."""
        self._store, self._words, self._name = store, Words.at(store), name
        self._backend, self._device, self._timeout = backend, device, timeout
        self._number = 0
        self._names = names
        self.is_newcomer = is_newcomer

    def is_awaited(self) -> bool:
        """Whether a newcomer waits to come in."""
        return self._words.num_waiting() > 0

    def meet(self, world: Any) -> Any:
        """Close a world; wait for all ranks of it that live, and return the next.

        Raises:
            PeerFailedError: one that lives did not come in time; it is named.
            WorldError: torch cannot join those that came.
        """
        _forget_frames()  # they refer to what refers to the group
        world.connection.end()
        world.connection.close()
        activity = Activity() if self.is_newcomer else world.connection.activity
        names = self._next()
        while (joined := self._joined(names, activity)) is None:
            names = self._next()
        return world.followed(names.index(self._name), len(names), joined)

    def _next(self) -> list[str]:
        """Return who makes the next world, as the launcher says."""
        if self.is_newcomer and self._number == 0:
            self._words.ask_in(self._name)
            # for as long as others train: the launcher, which knows when they end, ends this too
            while (number := self._words.taken(self._name)) is None:
                time.sleep(_LOOKS_EVERY)
            self._number = number
        else:
            self._number += 1
            self._words.come(self._number, self._name)
        until = time.monotonic() + self._timeout
        while (names := self._words.called(self._number)) is None:
            if time.monotonic() > until:
                missing = self._missing()
                self._number -= 1  # whoever asks again waits for the same world
                raise PeerFailedError(missing)
            time.sleep(_LOOKS_EVERY)
        self._names = names
        return names

    def _missing(self) -> str:
        late = [
            str(rank)
            for rank, name in enumerate(self._names)
            if not self._words.has_come(self._number, name)
            and not self._words.is_gone(name)
        ]
        return (
            f"Rank {self._names.index(self._name)} of {len(self._names)} waited"
            f" {self._timeout:g} s in af.regroup(state), and rank"
            f" {' and '.join(late) or 'none'}, which is alive, did not come. Call it on all"
            " ranks of a world."
        )

    def _all_arrive(self, names: list[str]) -> bool:
        """Wait until all who make a world know of it; return False where one is gone before."""
        self._words.arrive(self._number, self._name)
        until = time.monotonic() + self._timeout
        left = list(names)
        while left and time.monotonic() < until:
            left = [
                each for each in left if not self._words.is_here(self._number, each)
            ]
            if any(map(self._words.is_gone, left)):
                return False
            time.sleep(_LOOKS_EVERY if left else 0)
        return True

    def _joined(self, names: list[str], activity: Activity) -> Connection | None:
        """Return what joins those who make a world; None where one is gone meanwhile."""
        store = dist.PrefixStore(f"accelfn world {self._number}", self._store)
        if not (self._all_arrive(names) and self._opened(names, store)):
            return None
        self.is_newcomer = False
        if len(names) == 1:
            return Connection(None, activity=activity, regrouping=self)
        rank = names.index(self._name)
        return Connection(
            dist.group.WORLD,
            activity=activity,
            roll_call=RollCall(store, rank, len(names), rank_0_keeps_it=False),
            regrouping=self,
        )

    def _opened(self, names: list[str], store: dist.Store) -> bool:
        """Let torch join those who have arrived; return whether all of them lived so long.

        Raises:
            WorldError: all of them live, and torch cannot join them.
        """
        if len(names) == 1:
            return True
        try:
            opened(
                self._watched(store, names),
                names.index(self._name),
                len(names),
                backend=self._backend,
                device=self._device,
                timeout=self._timeout,
            )
        except WorldError:
            if not self._loses_one(names):
                raise
            return False
        return True

    def _watched(self, store: dist.Store, names: list[str]) -> dist.Store:
        """Return a store at which nobody waits for one of these who is gone.

        Where a device is no processor, its backend goes on to use a store in threads of its
        own, which had better not wait for Python: then a timeout ends what is waited for.
        """
        if self._device.type != "cpu":
            return store
        is_gone = self._words.is_gone
        return WatchedStore(store, lambda: any(map(is_gone, names)), self._timeout)

    def _loses_one(self, names: list[str]) -> bool:
        """Return whether one of these is gone, of whom the launcher may not know yet."""
        until = time.monotonic() + min(self._timeout, _NOTICES_WITHIN)
        while not any(map(self._words.is_gone, names)):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOKS_EVERY)
        return True


def _forget_frames() -> None:
    """Let go of what the frames hold that led to the error which is being handled.

    A DistributedDataParallel is among it, which must be gone before its group is.
    """
    error = sys.exc_info()[1]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
