# SPDX-License-Identifier: Apache-2.0
"""`Connection`: what joins the ranks of a world, and what is known of what they do."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from accelfn.errors import ArgumentError, WorldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelfn.world.roll_call import RollCall


class Connection:
    """What joins the ranks, until the world is closed.

    torch aborts a process in which a Gloo group is still referred to at its end, so a world
    must be able to let go of it, and tell those who hold it too.

    `label` and `step` say what this rank is doing, `is_between` whether that update is over,
    and `trail` what it did before, for errors and the logs of simulations, which compare the
    `structure` of trees too, where the connection `tells_structure`; what a rank says there
    is compared with what others `say` of the same, without a collective. While `is_lent`, a branch
    of this world is in use, and the world itself must not be; `make_branch` makes one of a world
    where torch cannot, and what closes it. By `roll_call`, which a world of `from_env` has,
    ranks tell each other how they ended.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take a process group, or None in a world of 1."""
        if group is not None and not isinstance(group, dist.ProcessGroup):
            msg = f"World(group={group!r}): expected a torch ProcessGroup or None."
            raise ArgumentError(msg)
        self.group = group
        self.is_closed = False
        self.is_lent = False
        self.make_branch: Callable[[Any], tuple[Any, Callable[[], None]]] | None
        self.make_branch = None
        self.roll_call: RollCall | None = None
        self.label: str | None = None
        self.tells_structure = False
        self.structure: str | None = None
        self.say: Callable[[str, list[str]], tuple[int, list[str]] | None] | None = None
        self.step: int | None = None
        self.is_between = False
        self.trail: deque[tuple[str, int | None]] = deque(maxlen=20)
        self._holders: list[weakref.WeakMethod[Callable[[], None]]] = []

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

    def timeout(self, device: torch.device) -> float | None:
        """Return after how many seconds a collective fails; None where nobody can tell."""
        try:
            backend: Any = cast("Any", self.group)._get_backend(device)
            return backend.options._timeout.total_seconds()
        except (AttributeError, RuntimeError):  # a simulated one, or none
            return None

    def close(self) -> None:
        """Let go of the group everywhere."""
        for holder in self._holders:
            let_go = holder()
            if let_go is not None:
                let_go()
        self._holders.clear()
        self.group, self.make_branch, self.is_closed = None, None, True
        self.roll_call = None

    def leave(self) -> None:
        """Let other ranks know that this one has left, and nothing was wrong."""
        if self.roll_call is not None:
            self.roll_call.leave(self.step, is_between=self.is_between)

    def tell(self, how: str, *, is_waiting: bool = False) -> None:
        """Let other ranks know what becomes of this one."""
        if self.roll_call is not None:
            self.roll_call.tell(
                how, self.step, is_between=self.is_between, is_waiting=is_waiting
            )
