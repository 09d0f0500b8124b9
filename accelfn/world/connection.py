# SPDX-License-Identifier: Apache-2.0
"""`Connection`: what joins the ranks of a world."""

from __future__ import annotations

import atexit
import gc
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from accelfn.errors import ArgumentError, WorldError
from accelfn.world.activity import Activity
from accelfn.world.roll_call import name_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelfn.world.roll_call import RollCall

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
            `world.regrouping.Launched`, or of simulated ranks what they can do besides.
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
