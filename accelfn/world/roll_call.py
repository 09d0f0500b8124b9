# SPDX-License-Identifier: Apache-2.0
"""The roll call: ranks that fail tell each other what became of them.

A backend says that some connection broke. Which rank raised what, and which are silent, they
tell each other through the store that they met at. It costs nothing until a rank fails.
"""

import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
from attrs import asdict, frozen

_LOOKS_EVERY = 0.01
_ANSWERS_WITHIN = 0.5
"""Seconds: a store at which nobody is at home may keep its caller for ever."""


@frozen(kw_only=True)
class Standing:
    """What became of a rank.

    Attributes:
        how: `raised ValueError: boom`, `left`, `waited in 'mean'`.
        step: the update that it was at, if any was.
        is_waiting: whether it waited for others, and is not what they waited for.
    """

    how: str
    step: int | None = None
    is_waiting: bool = False

    def __str__(self) -> str:
        """Say it in words."""
        return self.how if self.step is None else f"{self.how} at update {self.step}"


class RollCall:
    """What one rank tells the others of a world at its end, and hears from them.

    Attributes:
        rank_0_keeps_it: whether the store ends with rank 0, and not with a launcher.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, rank_0_keeps_it: bool
    ) -> None:
        """Take the store at which they met."""
        self._store = dist.PrefixStore("accelfn roll call", store)
        self._rank, self._size = rank, size
        self.rank_0_keeps_it = rank_0_keeps_it
        self._has_told = False

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self._size) if rank != self._rank]

    def tell(self, standing: Standing) -> None:
        """Tell the others, if the store can still be reached; the first time counts."""
        if self._has_told:
            return
        self._has_told = True
        with suppress(RuntimeError):  # its host has gone
            self._store.set(str(self._rank), json.dumps(asdict(standing)))

    def hear(self) -> dict[int, Standing] | None:
        """Return what others tell, by rank; None where the store does not answer.

        It returns once all have spoken, or one whose fault it is, and after half a second
        without those that are silent.
        """
        heard: dict[int, Standing] = {}
        has_answered = threading.Event()
        until = time.monotonic() + _ANSWERS_WITHIN
        listening = threading.Thread(
            target=self._listen, args=(heard, has_answered, until), daemon=True
        )
        listening.start()
        # a store whose host was stopped, or cut off, never answers
        listening.join(2 * _ANSWERS_WITHIN)
        return dict(heard) if has_answered.is_set() else None

    def _listen(
        self, heard: dict[int, Standing], has_answered: threading.Event, until: float
    ) -> None:
        with suppress(RuntimeError):  # its host has gone
            while True:
                heard.update(
                    self._spoken(rank for rank in self.others if rank not in heard)
                )
                has_answered.set()
                is_known = any(not each.is_waiting for each in heard.values())
                # of two, the one that this rank waited for is the one that speaks, or not
                has_all = len(heard) == self._size - 1 or self._size == 2
                if is_known or has_all or time.monotonic() > until:
                    return
                time.sleep(_LOOKS_EVERY)

    def _spoken(self, ranks: Iterable[int]) -> dict[int, Standing]:
        told = {rank: str(rank) for rank in ranks if self._store.check([str(rank)])}
        return {
            rank: Standing(**json.loads(self._store.get(name)))
            for rank, name in told.items()
        }
