# SPDX-License-Identifier: Apache-2.0
"""Saving behind the training's back: a copy in host memory, and a thread that writes it.

Collectives belong to the training's thread. So ranks agree by small files in a directory
beside the checkpoint, which they all see, for they write the checkpoint itself to it.
"""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import attrs
import torch

from accelfn.base import paths
from accelfn.base.accelerator import host_memory
from accelfn.checkpoint import commit, disk
from accelfn.checkpoint.commit import Contents, Save
from accelfn.collectives.missing import named
from accelfn.errors import CheckpointWriteError, PeerFailedError

_PATIENCE = 600.0
"""Seconds; of a world that has no timeout of its own."""
_GRACE = 5.0
"""Seconds for ranks that still write their part, when another is known to be gone."""


class Buffers:
    """Host memory into which tensors are copied, the same at each save."""

    def __init__(self) -> None:
        """Begin without any."""
        self._held: dict[str, torch.Tensor] = {}

    def copies_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors' values in host memory, which the next call overwrites."""
        copies: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            held = self._held.get(name)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                held = host_memory(tensor.shape, tensor.dtype, tensor.device)
            copies[name] = held.copy_(tensor.detach(), non_blocking=True)
            if not tensor.is_cpu:
                devices.add(tensor.device)
        for device in devices:
            arrived = torch.Event(device)
            arrived.record()
            arrived.synchronize()
        self._held = copies
        return copies


@attrs.define(kw_only=True)
class Talk:
    """How ranks agree by files in a directory that all see.

    Attributes:
        save: about which.
        patience: seconds after which a rank that has not said its part is given up.
        turn: how many times they have agreed.
        hurried_at: when a rank was known to be gone, if one is.
    """

    save: Save
    patience: float
    turn: int = 0
    hurried_at: float | None = None

    def __call__(self, what: str, text: str) -> list[str]:
        """Say this rank's text, and return that of all ranks, when all have said theirs.

        Raises:
            CheckpointWriteError: a rank's writer has ended with an error.
            PeerFailedError: a rank's process has ended, or it said nothing in time.
        """
        self.turn += 1
        disk.tell(self._file(self.turn, self.save.rank), text)
        pause, begun = 0.001, time.monotonic()
        while absent := self._absent():
            gone = [r for r in absent if disk.is_let_go(self._file(_HELD, r))]
            absent = self._absent()  # one that was gone may have spoken before
            self._check_ended(absent)
            gone = [rank for rank in gone if rank in absent]
            if absent and (gone or self._is_over(begun)):
                raise PeerFailedError(self._given_up(gone, absent, what, begun))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [_read(self._file(self.turn, rank)) for rank in self._ranks()]

    def begin(self) -> BinaryIO | None:
        """Let the others see whether this process lives, until what is returned is closed."""
        mine = self._file(_HELD, self.save.rank)
        return disk.hold(mine) if self.save.size > 1 else None

    def end(self, text: str) -> None:
        """Let the others know that this rank will say nothing more, and why."""
        if self.save.size > 1:
            disk.tell(self._file(_ENDED, self.save.rank), text)

    def _ranks(self) -> range:
        return range(self.save.size)

    def _file(self, turn: int | str, rank: int) -> Path:
        return talk_directory(self.save.final) / f"{turn}-{rank}"

    def _absent(self) -> list[int]:
        return [r for r in self._ranks() if not paths.exists(self._file(self.turn, r))]

    def _check_ended(self, absent: list[int]) -> None:
        for rank in absent:
            ended = self._file(_ENDED, rank)
            if paths.exists(ended):
                nothing = f"{self.save.unsaved}: rank {rank} failed, and had no room to say why"
                raise CheckpointWriteError(_read(ended) or nothing)

    def _is_over(self, begun: float) -> bool:
        now, hurried = time.monotonic(), self.hurried_at
        return now > begun + self.patience or (
            hurried is not None and now > max(begun, hurried) + _GRACE
        )

    def _given_up(
        self, gone: list[int], absent: list[int], what: str, begun: float
    ) -> str:
        if gone:
            how = f"the process of {named(gone)} has ended"
        else:
            waited = time.monotonic() - begun
            how = (
                f"{named(absent)} failed, left or did not arrive within {waited:.3g} s"
            )
        return (
            f"The save of step {self.save.step} was not seen to its end: rank"
            f" {self.save.rank} of {self.save.size} waited in 'save: {what}', but {how}."
            " Look at its output for the cause."
        )


_ENDED, _HELD = "ended", "held"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def talk_directory(final: Path) -> Path:
    """Return where ranks agree about a checkpoint."""
    return final.parent / f".tmp-{final.name}.talk"


def open_talk(save: Save) -> None:
    """Make the place where ranks agree about a checkpoint, or leave nothing of it."""
    try:
        disk.create(talk_directory(save.final))
    except OSError:
        disk.remove(save.partial)
        raise


def close_talk(save: Save) -> None:
    """Remove the place where ranks have agreed, if the disk lets it be removed."""
    with suppress(OSError):  # the next save removes it
        disk.remove(talk_directory(save.final))


class _Mine(threading.local):
    """The saves that a thread has begun."""

    def __init__(self) -> None:
        self.writings: weakref.WeakSet[Writing] = weakref.WeakSet()


_mine = _Mine()


def give_up() -> bool:
    """End the saves that this thread has begun, as the end of its process would.

    Returns: whether there were any.
    """
    begun = list(_mine.writings)
    for writing in begun:
        writing.give_up()
    return bool(begun)


class Writing:
    """A save that a thread writes, once it is started."""

    def __init__(
        self,
        save: Save,
        contents: Mapping[str, Contents],
        then: Callable[[], None],
        *,
        patience: float | None,
    ) -> None:
        """Take what to write; the contents' tensors must not change before `join`."""
        self.save = save
        self._contents, self._then = contents, then
        self._talk = Talk(save=save, patience=patience or _PATIENCE)
        self._begun, self._done = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        _mine.writings.add(self)

    def start(self) -> None:
        """Begin to write; without a thread, `join` returns the error."""
        try:
            threading.Thread(target=self._run, name="accelfn-save").start()
        except RuntimeError as error:
            if "can't start new thread" not in str(error):
                raise  # an interrupt while threading took its locks
            self._begun.acquire(blocking=False)
            why = CheckpointWriteError(
                f"no thread can be started to write it ({error}). Give the store async_=False,"
                " or raise the limit of threads (ulimit -u)."
            )
            self._error = self._alone(why)
            self._talk.end(str(self._error))
            self._done.set()

    def join(self) -> BaseException | None:
        """Wait for the end, and return the error with which it ended.

        One whose start was interrupted is started here: other ranks count on it.
        """
        if not self._begun.locked():
            self.start()
        self._done.wait()
        return self._error

    def hurry(self) -> None:
        """Wait for other ranks no longer than a moment: one of them is gone."""
        self._talk.hurried_at = time.monotonic()

    def give_up(self) -> None:
        """Wait for no other rank any more, and then for the end."""
        self._talk.patience = 0.0
        if self._begun.locked():
            self._done.wait()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # another thread was started, and that was not known
        held: BinaryIO | None = None
        try:
            held = self._talk.begin()
            commit.write(self.save, self._contents, self._talk)
            # there it is: what is said now is said by rank 0, and asks for no other's file
            self.save.agreed(lambda _, text: [text], commit.READ_BACK, self._then)
        except CheckpointWriteError as error:
            self._error = error  # all ranks have it
        except PeerFailedError as error:
            self._error = error  # the others see it, too
        except BaseException as error:  # noqa: BLE001 - raised in the training's thread
            self._error = self._alone(error)
            with suppress(BaseException):  # this disk may be what has failed
                self._talk.end(str(self._error))
        finally:
            if held is not None:
                held.close()
            self._done.set()

    def _alone(self, error: BaseException) -> CheckpointWriteError:
        """Return what ends this rank's part, and no other's, as an error of the save."""
        rank = self.save.rank
        is_there = disk.is_there(self.save.final)
        begins = self.save.unread if is_there else self.save.unsaved
        known = CheckpointWriteError(
            f"{begins}: rank {rank} failed: {commit.told(error)}"
        )
        known.__cause__ = error
        return known
