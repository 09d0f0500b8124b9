# SPDX-License-Identifier: Apache-2.0
"""Background saves: copy the tensors to host memory, and write the copy in a thread.

Only the training thread may call collectives. So the writing threads of the ranks communicate
by small files, in a directory next to the checkpoint, on the disk that all ranks share.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import attrs
import torch

from accelfn.base import arguments
from accelfn.base.devices import host_memory
from accelfn.checkpoint import commit, files
from accelfn.checkpoint.commit import Save
from accelfn.collectives.failures import named
from accelfn.collectives.packed import gather_text
from accelfn.errors import CheckpointWriteError, PeerFailedError
from accelfn.world import World

_PATIENCE = 600.0
"""Seconds to wait for another rank if the world has no timeout."""
_GRACE = 5.0
"""Seconds to wait for the remaining ranks after a rank has failed."""


class Buffers:
    """Host memory for copies of tensors, which later saves reuse."""

    def __init__(self) -> None:
        """Start without memory."""
        self._held: dict[str, torch.Tensor] = {}

    def copies_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to host memory; the next call overwrites the copies."""
        copies: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            copy = self._held.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = host_memory(tensor.shape, tensor.dtype, tensor.device)
            copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
            if not tensor.is_cpu:
                devices.add(tensor.device)
        for device in devices:
            event = torch.Event(device)
            event.record()
            event.synchronize()
        self._held = copies
        return copies


@attrs.define(kw_only=True)
class Talk:
    """Exchanges texts between the ranks of a save, by files in a shared directory.

    Attributes:
        save: the save.
        patience: how many seconds to wait for another rank's text.
        turn: the number of exchanges so far.
        hurried_at: the time when this rank learned that a rank has failed; None before.
    """

    save: Save
    patience: float
    turn: int = 0
    hurried_at: float | None = None

    def __call__(self, label: str, text: str) -> list[str]:
        """Write this rank's text, wait for all ranks' texts, and return them in rank order.

        Raises:
            CheckpointWriteError: the writing thread of a rank has ended with an error.
            PeerFailedError: the process of a rank has ended, or its text did not arrive in time.
        """
        self.turn += 1
        files.tell(self._file(self.turn, self.save.rank), text)
        pause, start = 0.001, time.monotonic()
        while absent := self._absent():
            dead_ranks = [r for r in absent if files.is_let_go(self._file(_HELD, r))]
            absent = self._absent()  # again: a rank may write its text and then end
            self._check_ended(absent)
            dead_ranks = [rank for rank in dead_ranks if rank in absent]
            if absent and (dead_ranks or self._is_over(start)):
                raise PeerFailedError(self._given_up(dead_ranks, absent, label, start))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        paths = (self._file(self.turn, rank) for rank in range(self.save.size))
        return [path.read_text(encoding="utf-8") for path in paths]

    def begin(self) -> BinaryIO | None:
        """Return an open, locked file, which shows other ranks that this process is running."""
        path = self._file(_HELD, self.save.rank)
        return files.hold(path) if self.save.size > 1 else None

    def end(self, text: str) -> None:
        """Write a file that tells other ranks why this rank has stopped."""
        if self.save.size > 1:
            files.tell(self._file(_ENDED, self.save.rank), text)

    def _file(self, turn: int | str, rank: int) -> Path:
        return talk_directory(self.save.final) / f"{turn}-{rank}"

    def _absent(self) -> list[int]:
        ranks = range(self.save.size)
        return [r for r in ranks if not arguments.exists(self._file(self.turn, r))]

    def _check_ended(self, absent: list[int]) -> None:
        for rank in absent:
            path = self._file(_ENDED, rank)
            if arguments.exists(path):
                nothing = f"{self.save.not_saved}: rank {rank} failed, and its disk was too full"
                raise CheckpointWriteError(path.read_text(encoding="utf-8") or nothing)

    def _is_over(self, start: float) -> bool:
        now, hurried_at = time.monotonic(), self.hurried_at
        return now > start + self.patience or (
            hurried_at is not None and now > max(start, hurried_at) + _GRACE
        )

    def _given_up(
        self, dead_ranks: list[int], absent: list[int], label: str, start: float
    ) -> str:
        if dead_ranks:
            how = f"the process of {named(dead_ranks)} has ended"
        else:
            seconds = f"{time.monotonic() - start:.3g} s"
            how = f"{named(absent)} failed, left or did not arrive within {seconds}"
        return (
            f"It is unknown whether the state of step {self.save.step} was saved: rank"
            f" {self.save.rank} of {self.save.size} waited in 'save: {label}', but {how}."
            f" Look at the output of {named(dead_ranks or absent)} for the cause."
        )


_ENDED, _HELD = "ended", "held"


def talk_directory(final: Path) -> Path:
    """Return the directory for the texts that ranks exchange while they write a checkpoint."""
    return final.parent / f".tmp-{final.name}.talk"


def close_talk(save: Save) -> None:
    """Remove the directory for the texts that ranks exchanged, if possible."""
    with suppress(OSError):  # if this fails, the next save removes it
        files.remove(talk_directory(save.final))


class _ThreadSaves(threading.local):
    """The background saves that the current thread has started."""

    def __init__(self) -> None:
        self.writings: weakref.WeakSet[Writing] = weakref.WeakSet()


_thread_saves = _ThreadSaves()


def give_up() -> bool:
    """Stop the background saves that this thread has started, as if its process had ended.

    Returns: whether there was such a save.
    """
    writings = list(_thread_saves.writings)
    for writing in writings:
        writing.give_up()
    return bool(writings)


class Writing:
    """A save that a background thread writes."""

    def __init__(
        self,
        save: Save,
        write: Callable[[commit.Exchange], None],
        *,
        patience: float | None,
    ) -> None:
        """Initialize the save; the tensors to write must not change before `join`.

        Args:
            save: the save.
            write: a function that writes the checkpoint. Its argument is a function that
                exchanges texts between ranks.
            patience: how many seconds to wait for another rank; None: 10 minutes.
        """
        self.save, self._write = save, write
        self._talk = Talk(save=save, patience=patience or _PATIENCE)
        self._begun, self._done = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        _thread_saves.writings.add(self)

    def start(self) -> None:
        """Start the writing thread; if it cannot be started, `join` returns the error."""
        try:
            threading.Thread(target=self._run, name="accelfn-save").start()
        except RuntimeError as error:
            if "can't start new thread" not in str(error):
                raise  # an interrupt inside of the module threading
            self._begun.acquire(blocking=False)
            msg = (
                f"no thread could be started to write the checkpoint ({error}). Pass"
                " async_=False to the store, or raise the limit of threads (ulimit -u)."
            )
            self._fail_alone(CheckpointWriteError(msg))
            self._done.set()

    def join(self) -> BaseException | None:
        """Wait for the end of the save, and return its error, if any.

        If an interrupt has prevented the start of the save, start it now, because other ranks
        wait for this rank.
        """
        if not self._begun.locked():
            self.start()
        self._done.wait()
        return self._error

    def hurry(self) -> None:
        """Wait for other ranks only a short time from now on, because one of them has failed."""
        self._talk.hurried_at = time.monotonic()

    def give_up(self) -> None:
        """End the save without waiting for other ranks any longer."""
        self._talk.patience = 0.0
        if self._begun.locked():
            self._done.wait()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # an interrupted call of `start` has already started a thread
        lock: BinaryIO | None = None
        try:
            lock = self._talk.begin()
            self._write(self._talk)
        except (CheckpointWriteError, PeerFailedError) as error:
            self._error = error  # all ranks that still run get this error
        except BaseException as error:  # noqa: BLE001 - `join` returns this error
            self._fail_alone(error)
        finally:
            if lock is not None:
                lock.close()
            self._done.set()

    def _fail_alone(self, error: BaseException) -> None:
        """Let `join` return an error that only this rank has, and tell it to the other ranks.

        The message of the error says whether the state was saved.
        """
        rank = self.save.rank
        is_there = files.is_there(self.save.final)
        begins = self.save.not_finished if is_there else self.save.not_saved
        self._error = CheckpointWriteError(
            f"{begins}: rank {rank} failed: {commit.format_error(error)}"
        )
        self._error.__cause__ = error
        with suppress(BaseException):  # this text may fail for the same reason
            self._talk.end(str(self._error))


# The pending save of a store, and how ranks exchange its outcome.


class PendingSave:
    """The background save of a store that ranks have started and not yet joined, if any.

    Attributes:
        writing: the background save; None if no save is pending.
        world: the world of the state that was saved last; None before the first save.
    """

    def __init__(self) -> None:
        """Initialize without a pending save."""
        self.writing: Writing | None = None
        self.world: World | None = None

    def is_of_others(self, now: World) -> bool:
        """Return whether ranks have regrouped since the last save, and now form this world."""
        if now.connection.regrouping is None:
            return False
        return self.world is None or self.world.connection is not now.connection

    def finish(self) -> CheckpointWriteError | None:
        """Wait for the end of the save, and return its error, which is the same on all ranks.

        If the save failed, its files are removed.

        Raises:
            PeerFailedError: a rank has failed.
        """
        writing, world = self.writing, self.world
        if world is not None and world.connection.successor is not None:
            return self.abandon()
        if writing is None or world is None:
            return None
        step = writing.save.step
        # all ranks must have started the save before a rank waits in `join`, because simulated
        # ranks run one at a time
        gather_text("", world, label=f"store: wait for step {step}")
        error = writing.join()
        if isinstance(error, PeerFailedError):
            self.writing = None
            world.connection.tell("waited in a save", is_waiting=True)
            raise error
        failure = _agree(error, world, f"store: outcome of step {step}")
        self.writing = None  # only after the wait, which an interrupt may end
        if world.is_main:
            close_talk(writing.save)
            if failure is not None:  # all ranks have stopped writing to the directory
                with suppress(OSError):  # if this fails, the next save does it
                    files.remove(writing.save.partial)
        if failure is not None:
            failure.__cause__ = None if error is None else error.__cause__
        return failure

    def abandon(self, *, hurry: bool = True) -> CheckpointWriteError | None:
        """Wait for the end of the save, without the other ranks; return its error.

        If another rank has failed, either the checkpoint is complete, or it does not exist and
        a line on stderr says so.

        Args:
            hurry: whether another rank has failed.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        if hurry:
            writing.hurry()
        error = writing.join()
        if isinstance(error, CheckpointWriteError):
            return error
        if error is not None and not files.is_there(writing.save.final):
            sys.stderr.write(f"accelfn: {error}\n")
        return None

    def rejoin(
        self, world: World, error: CheckpointWriteError | None
    ) -> CheckpointWriteError | None:
        """Continue in a new world; return the first error that the ranks of that world pass."""
        failure = _agree(error, world, "store: exchange errors")
        self.world = world
        return failure


def _agree(
    error: BaseException | None, world: World, label: str
) -> CheckpointWriteError | None:
    """Return the error of the first rank that has one, on all ranks; None if no rank has one."""
    texts = gather_text("" if error is None else str(error), world, label=label)
    return next((CheckpointWriteError(text) for text in texts if text), None)
