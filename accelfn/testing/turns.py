# SPDX-License-Identifier: Apache-2.0
"""Turns: one thread a rank, of which one runs at a time.

The turn passes where a rank waits and nowhere else, to the rank that a list of choices
names. So a run is a function of its program and its choices: no sleep, no clock.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TypeAlias

_LIBC = ctypes.CDLL(None)
Ready: TypeAlias = Callable[[], bool]


class Turns:
    """Passes the turn among ranks."""

    def __init__(
        self,
        size: int,
        choices: Iterable[int],
        *,
        on_stuck: Callable[[], None],
        on_leave: Callable[[int], None],
        on_enter: Callable[[int], None],
    ) -> None:
        """Take the choices, each an index into the ranks that can go on; 0 when they end.

        `on_stuck` is called when no rank can go on, and must make one able to. `on_leave`
        and `on_enter` are called in a rank's thread as it gives up the turn and has it.
        """
        self._gates = [threading.Lock() for _ in range(size)]
        self._waiting: dict[int, Ready] = dict.fromkeys(range(size), _at_once)
        self._choices = iter(choices)
        self._core = _this_core()
        self._on_stuck = on_stuck
        self._on_leave = on_leave
        self._on_enter = on_enter

    def run(self, body: Callable[[int], None]) -> None:
        """Run `body(rank)` for every rank, and return when all have ended.

        `body` must not raise. An interrupt of the caller is handed on when all have ended.
        """
        for gate in self._gates:
            gate.acquire()
        threads = [
            threading.Thread(
                target=copy_context().run,
                args=(self._live, rank, body),
                name=f"simulated rank {rank}",
                daemon=True,
            )
            for rank in range(len(self._gates))
        ]
        for thread in threads:
            thread.start()
        self._hand_over(after=0)
        for thread in threads:
            thread.join()

    def wait(self, rank: int, ready: Ready) -> None:
        """Let other ranks run, at least until `ready()`."""
        self._waiting[rank] = ready
        chosen = self._choose(after=rank)
        if chosen != rank:
            self._on_leave(rank)
            self._gates[chosen].release()
            self._gates[rank].acquire()
            self._on_enter(rank)

    def _live(self, rank: int, body: Callable[[int], None]) -> None:
        _share_a_core(self._core)
        self._gates[rank].acquire()
        self._on_enter(rank)
        body(rank)
        del self._waiting[rank]
        self._on_leave(rank)
        self._hand_over(after=rank)

    def _hand_over(self, *, after: int) -> None:
        if self._waiting:
            self._gates[self._choose(after=after)].release()

    def _choose(self, *, after: int) -> int:
        """Return the rank whose turn it is, out of those that can go on."""
        able = self._able(after)
        if not able:
            self._on_stuck()
            able = self._able(after)
        return able[next(self._choices, 0) % len(able)]

    def _able(self, after: int) -> list[int]:
        size = len(self._gates)
        ring = ((after + i) % size for i in range(size))
        return [rank for rank in ring if self._waiting.get(rank, _never)()]


def _this_core() -> int | None:
    """Return the core that the caller runs on, where that can be told."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = _LIBC.sched_getcpu() if hasattr(_LIBC, "sched_getcpu") else -1
    return core if core in os.sched_getaffinity(0) else None


def _share_a_core(core: int | None) -> None:
    """Keep this thread on one core: waking a thread on another costs 20 µs, here 4."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def _at_once() -> bool:
    return True


def _never() -> bool:
    return False
