# SPDX-License-Identifier: Apache-2.0
"""Turns: each simulated rank is a thread, and only one of the threads runs at a time.

Another rank gets the turn only when the running rank waits. A list of choices selects the next
rank. So a run depends only on its program and the choices, not on sleeps or clocks.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TypeAlias

import torch

from accelfn.errors import SimulationError
from accelfn.plug import system
from accelfn.testing.simulation.calls import Left, Members

Ready: TypeAlias = Callable[[], bool]
_GLANCE = 0.1
"""The longest time in seconds until a nested run notices an interrupt."""
_SHARE = 0.7
"""If ranks get a smaller fraction of their core's time, they move to another core."""


class Turns:
    """Runs one thread per rank, and lets only the rank with the turn run."""

    def __init__(
        self,
        size: int,
        choices: Iterable[int],
        *,
        on_stuck: Callable[[], None],
        on_leave: Callable[[int], None],
        on_enter: Callable[[int], None],
    ) -> None:
        """Initialize with the choices, each an index into the ranks that can continue.

        After the last choice, the index is 0. `on_stuck` runs when no rank can continue, and
        must make a rank able to continue. `on_leave` runs in a rank's thread before the rank
        loses the turn, and `on_enter` after the rank gets the turn.
        """
        self._gates = [threading.Lock() for _ in range(size)]
        self._waiting: dict[int, Ready] = dict.fromkeys(range(size), lambda: True)
        self._choices = iter(choices)
        self._core = _this_core()
        self._on_stuck = on_stuck
        self._on_leave = on_leave
        self._on_enter = on_enter
        self._running = 0, 0
        self._end = threading.Lock()
        self._has_ended = False
        self._error: BaseException | None = None

    def run(self, body: Callable[[int], None]) -> None:
        """Run `body(rank)` for every rank, and return when all have ended.

        `body` must not raise. If the calling thread is interrupted, the interrupt is raised in
        the running rank, and again here when all ranks have ended. A second interrupt is raised
        at once, and the ranks' threads continue.
        """
        for lock in (*self._gates, self._end):
            lock.acquire()
        threads = [
            threading.Thread(
                target=copy_context().run,
                args=(self._live, rank, body),
                name=f"simulated rank {rank}",
                daemon=True,
            )
            for rank in range(len(self._gates))
        ]
        self._start(threads)
        self._hand_over(after=0)
        self._await_end(threads)
        if self._error is not None:
            raise self._error

    def has_turn(self, rank: int) -> bool:
        """Whether the calling thread is the thread of `rank` and has the turn."""
        return (threading.get_ident(), rank) == self._running

    def wait(self, rank: int, ready: Ready) -> None:
        """Let other ranks run until `ready()` is true and this rank gets the turn."""
        self._waiting[rank] = ready
        chosen = self._choose(after=rank)
        if chosen != rank:
            self._on_leave(rank)
            self._gates[chosen].release()
            self._gates[rank].acquire()
            self._enter(rank)

    def _enter(self, rank: int) -> None:
        self._running = threading.get_ident(), rank
        if not self._has_ended:
            self._on_enter(rank)

    def _live(self, rank: int, body: Callable[[int], None]) -> None:
        """Run the rank's body when it gets the turn. Pass the turn on, also after an error."""
        _share_a_core(self._core)
        self._gates[rank].acquire()
        if self._has_ended:
            return
        try:
            self._enter(rank)
            body(rank)
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._error = self._error or error
        finally:
            del self._waiting[rank]
            self._on_leave(rank)
            self._hand_over(after=rank)

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start all threads. If a thread fails to start, end the threads that have started."""
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # a thread could not start, or Ctrl-C
            self._has_ended = True
            for gate, thread in zip(self._gates, threads, strict=True):
                gate.release()
                if thread.ident is not None:
                    thread.join()
            raise

    def _await_end(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until the last rank has ended, then join all threads.

        After an interrupted join, it is unknown whether the thread has ended. So the joins come
        after the wait.
        """
        interrupt: BaseException | None = None
        clocks = _clocks()
        while not self._has_ended:
            try:
                self._end.acquire(timeout=_GLANCE)
                clocks = self._make_room(threads, clocks)
            except BaseException as error:
                if interrupt is not None:
                    self._has_ended = True
                    raise
                interrupt = error
                _raise_in(self._running[0], KeyboardInterrupt)
        for thread in threads:
            thread.join()
        if interrupt is not None:
            raise interrupt

    def _make_room(
        self, threads: Sequence[threading.Thread], before: tuple[float, float]
    ) -> tuple[float, float]:
        """Move all ranks to the core of this thread, if other programs use the ranks' core.

        The operating system runs this thread on a free core. On a busy core, ranks would wait
        for other programs each time the turn passes.
        """
        wall, cpu = now = _clocks()
        if self._core is not None and cpu - before[1] < _SHARE * (wall - before[0]):
            core = _this_core()
            if core not in (None, self._core):
                self._core = core
                for thread in threads:
                    _share_a_core(core, thread)
        return now

    def _hand_over(self, *, after: int) -> None:
        if self._waiting:
            self._gates[self._choose(after=after)].release()
        else:
            self._has_ended = True
            self._end.release()

    def _choose(self, *, after: int) -> int:
        """Select the next rank, by the next choice, among the ranks that can continue."""
        able = self._able(after)
        first = next(able, None)
        if first is None:
            self._on_stuck()
            able = self._able(after)
            first = next(able)
        choice = next(self._choices, 0)
        if not choice:  # no need to check which other ranks can continue
            return first
        ranks = [first, *able]
        return ranks[choice % len(ranks)]

    def _able(self, after: int) -> Iterator[int]:
        size = len(self._gates)
        ring = ((after + i) % size for i in range(size))
        waiting = self._waiting
        return (rank for rank in ring if rank in waiting and waiting[rank]())


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in another thread, between two bytecode instructions."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error)
    )


def _this_core() -> int | None:
    """Return the caller's core if torch computes in one thread, so that ranks can share it.

    Threads that torch starts stay on the core of the thread that started them. With several
    torch threads, they would wait for each other on that core.
    """
    if not hasattr(os, "sched_setaffinity") or torch.get_num_threads() > 1:
        return None
    core = system.libc.sched_getcpu() if hasattr(system.libc, "sched_getcpu") else -1
    return core if core in os.sched_getaffinity(0) else None


def _share_a_core(core: int | None, thread: threading.Thread | None = None) -> None:
    """Pin a thread to one core: waking a thread costs 4 µs there, and 20 µs on another core."""
    if core is None or (thread is not None and not thread.is_alive()):
        return
    with suppress(ProcessLookupError):  # the thread has just ended
        os.sched_setaffinity((thread and thread.native_id) or 0, {core})


def _clocks() -> tuple[float, float]:
    """Return wall-clock seconds, and seconds of computing in this process."""
    return time.monotonic(), time.process_time()


class Regroup:
    """The ranks of an elastic run: the members, the lost ranks, and the ranks that wait to join.

    A world lasts until a rank crashes or waits to join. Then the remaining ranks and the
    waiting ranks form the next world.

    Attributes:
        lost: for each crashed rank, the number of its last world, and how the rank ended.
        reached: the largest update that any rank has begun.
    """

    def __init__(self, size: int, least: int | None) -> None:
        """Initialize with all ranks. With `least=None`, the world cannot lose a rank."""
        self._least = size if least is None else least
        self._members = set(range(size))
        self._came: set[int] = set()
        self._formed: dict[int, Members] = {}
        self._generation = 0
        self._coming: dict[int, int] = {}
        self._late: set[int] = set()
        self.lost: dict[int, tuple[int, str]] = {}
        self.reached = -1

    @property
    def is_awaited(self) -> bool:
        """Whether a rank that is not a member waits to join the world."""
        return bool(self._came - self._members)

    @property
    def is_quiet(self) -> bool:
        """Whether no lost rank may come back now."""
        return all(self.reached < update for update in self._coming.values())

    def lose(self, rank: int, how: str) -> bool:
        """Record that a rank crashed. Return whether the other ranks may continue without it."""
        if rank in self._members and len(self._members) - 1 < self._least:
            return False
        self.leave(rank)
        self.lost[rank] = self._generation, how
        return True

    def leave(self, rank: int) -> None:
        """Record that a rank ended without an error."""
        self._members.discard(rank)
        self._came.discard(rank)
        self._coming.pop(rank, None)

    def lost_of(self, group: Members) -> tuple[int, str] | None:
        """Return a rank that crashed as a member of this group, and how it ended; or None."""
        for rank in group.ranks if self.lost else ():
            last, how = self.lost.get(rank, (-1, ""))
            if group.generation <= last:
                return rank, how
        return None

    def expect(self, rank: int, update: int) -> None:
        """Record that a lost rank comes back when another rank has begun this update."""
        self._coming[rank] = update

    def returns(self, rank: int) -> bool | None:
        """Whether a rank comes back: True if another rank has begun the update of its return.

        False if all ranks have ended, and None if it is still unknown.
        """
        if not self._members:
            return False
        return self.reached >= self._coming[rank] or None

    def check_returned(self) -> None:
        """Raise an error if a rank did not return as planned, or was not joined after its return.

        Raises:
            SimulationError: a rank did not return or was not joined. The message names the
                first.
        """
        for rank, update in self._coming.items():
            msg = (
                f"Rank {rank} did not return, because no other rank began update {update}. In"
                " Crash(returns=), name an update that the other ranks make."
            )
            raise SimulationError(msg)
        for rank in self._late:
            msg = (
                f"Rank {rank} came back after its crash, but the other ranks ended without it. Let"
                " them call af.regroup(state) after the update that Crash(returns=) names."
            )
            raise SimulationError(msg)

    def alone(self, rank: int) -> Members:
        """Return the group of only this rank, which has come back."""
        self._generation += 1
        return Members("", (rank,), self._generation)

    def come(self, rank: int) -> None:
        """Record that a rank waits to join the next world."""
        self._came.add(rank)
        self._coming.pop(rank, None)

    def is_due(self, rank: int) -> bool:
        """Whether the next world can form: all remaining ranks wait for it."""
        return rank in self._formed or (self._members <= self._came and self.is_quiet)

    def form_world(self, rank: int) -> Members:
        """Return the group of the next world, with all waiting ranks. The first call creates it.

        Raises:
            Left: all other ranks have ended.
        """
        if rank not in self._formed:
            if not self._members:
                how = "returned when the other ranks had ended,"
                self._late.add(rank)
                raise Left(how)
            self._generation += 1
            members = Members("", tuple(sorted(self._came)), self._generation)
            self._formed |= dict.fromkeys(members.ranks, members)
            self._members, self._came = set(members.ranks), set()
        return self._formed.pop(rank)
