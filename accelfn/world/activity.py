# SPDX-License-Identifier: Apache-2.0
"""`Activity`: what a rank is doing, for errors, crash bundles and the logs of simulations."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


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
        samples: of the loss that the rank computes now, an `engine.read_loss.Samples`.
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
        """Begin with nothing done."""
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
