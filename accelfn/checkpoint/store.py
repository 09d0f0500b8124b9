# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: a run's checkpoints, one after the other, in one directory."""

import os
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import attrs

from accelfn.arguments import is_integer
from accelfn.calling import called
from accelfn.checkpoint import commit, disk
from accelfn.checkpoint import keep as keeping
from accelfn.checkpoint.background import Buffers, Writing, talk_directory
from accelfn.checkpoint.load import load
from accelfn.checkpoint.lock import Lock
from accelfn.checkpoint.save import check_frozen, contents_of, save_of
from accelfn.collectives import broadcast_object, gather_text
from accelfn.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointWriteError,
    DirectoryInUseError,
)
from accelfn.state import TrainState, check_state

if TYPE_CHECKING:
    from accelfn.checkpoint.commit import Contents
    from accelfn.world import World

Period: TypeAlias = int | timedelta


@called
class CheckpointStore:
    """The checkpoints of a run: `step-00000100`, `step-00000200`, ... in a directory.

    Call `save`, `restore`, `due`, `wait` and `close` on all ranks. As a context manager it
    waits at the end for the save that is under way.

    Args:
        directory: of this run alone, on a disk that all ranks see; it is made.
        keep: how many of the newest to keep, beside the one being written; None: all.
        keep_best: keep that one too which was best by this metric, of those still there. A
            line on stderr says where no checkpoint has it, and some are removed.
        best_is: whether the "min" or the "max" of that metric is best.
        frozen: as of `af.save`: "hash" does not write parameters that are not trained.
        every: when a checkpoint is `due`: after so many updates, or a `timedelta`. None:
            what is saved is what you `save` unasked, and `due` is an error.
        async_: write behind the training's back: `save` returns when the tensors are copied
            to host memory, and what goes wrong later is raised by the next `save`, `wait` or
            `close`. One save at a time is under way.

    Law: after a crash at any moment, `latest` is the last checkpoint that `save` or `wait`
    has said to be there, or a later one; it is whole. No other is removed before a newer one
    was read back and verified.

    Cost: a save pauses training for one copy of the tensors to host memory, kept for the
    next; without `async_`, for the whole of writing it.

    Raises:
        ArgumentError: an option is of another kind.
        CheckpointWriteError: the directory cannot be made, or written to.

    Example:
        >>> from tempfile import mkdtemp
        >>> store = CheckpointStore(mkdtemp(), keep=2, every=100)
        >>> store.latest is None
        True
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_best: str | None = None,
        best_is: str = "min",
        frozen: str = "write",
        every: Period | None = None,
        async_: bool = True,
    ) -> None:
        """See that the directory can be written to."""
        _check_options(keep, keep_best, best_is, every)
        check_frozen(frozen)
        self.directory = Path(directory).absolute()
        self.keep, self.keep_best, self.best_is = keep, keep_best, best_is
        self.frozen, self.every, self.async_ = frozen, every, async_
        self._buffers = Buffers()
        self._writing: Writing | None = None
        self._world: World | None = None
        self._lock: Lock | None = None
        self._unlock: Callable[[], object] | None = None
        self._last_saved = time.monotonic()
        self._said_no_best = False
        _check_writable(self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are there, in rising order."""
        return keeping.steps_in(self.directory)

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps
        return self.directory / keeping.name_of(steps[-1]) if steps else None

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `keep_best`.

        Raises:
            ArgumentError: the store was made without it.
        """
        if self.keep_best is None:
            msg = "CheckpointStore.best: say by which metric, with keep_best=."
            raise ArgumentError(msg)
        found = keeping.best_of(self.directory, self.keep_best, self.best_is)
        return self.directory / keeping.name_of(found[0]) if found else None

    def due(self, state: TrainState) -> bool:
        """Return whether to save now, the same on all ranks.

        Cost: none where `every` counts updates; a broadcast from rank 0, whose clock decides,
        where it is a time.

        Raises:
            ArgumentError: the store was made without `every`.
        """
        check_state("store.due(state)", state)
        if self.every is None:
            msg = "CheckpointStore.due: say how often, with every=; or save without asking."
            raise ArgumentError(msg)
        if state.step == 0:
            return False
        if isinstance(self.every, int):
            return state.step % self.every == 0
        over = time.monotonic() - self._last_saved >= self.every.total_seconds()
        return bool(broadcast_object(over, state.world, label="store: due"))

    def save(
        self, state: TrainState, *, metrics: Mapping[str, float] | None = None
    ) -> Path:
        """Save a state under its step, and return where.

        Args:
            state: not donated; with `async_` it may be given to the next step at once.
            metrics: numbers to keep with it, the same on all ranks.

        Raises:
            CheckpointWriteError: this save, or with `async_` the one before, went wrong on
                some rank; the newest checkpoint that there is, is named.
            DirectoryInUseError: another job writes to this directory.
        """
        check_state("store.save(state)", state)
        numbers = _numbers(metrics)
        self.wait()
        self._world = state.world
        job = save_of(state, self.directory / keeping.name_of(state.step))
        contents: list[Contents] = []

        def begin() -> None:
            contents.append(contents_of(state, self.frozen, metrics=numbers))
            if state.world.is_main:
                self._take_lock()
                self._remove_leftovers()
            commit.begin(job)
            if self.async_ and state.world.is_main:
                self._open_talk(job)

        def exchange(what: str, text: str) -> list[str]:
            return gather_text(text, state.world, label=f"save: {what}")

        try:
            job.agreed(exchange, "begin", begin)
            if self.async_:
                copies = self._buffers.copies_of(contents[0].tensors)
                held = attrs.evolve(contents[0], tensors=copies)
                self._writing = Writing(job, held, lambda: self._retain(job.step))
            else:
                commit.write(job, contents[0], exchange)
                job.agreed(exchange, "read it back", lambda: self._retain(job.step))
        except CheckpointWriteError as error:
            if state.world.is_main and self._lock is not None:
                self._close_talk(job)
            raise self._with_newest(error) from error
        self._last_saved = time.monotonic()
        return job.final

    def wait(self) -> None:
        """Wait until the save that is under way is done.

        Raises:
            CheckpointWriteError: it went wrong on some rank.
        """
        writing = self._writing
        if writing is None or self._world is None:
            return
        # all have begun theirs: in a simulated world ranks take turns
        gather_text("", self._world, label="store: wait")
        error = writing.join()
        texts = gather_text(
            "" if error is None else str(error), self._world, label="store: outcome"
        )
        self._writing = None  # not before: an interrupt may have ended the waiting
        if self._world.is_main:
            self._close_talk(writing.save)
        for rank, text in enumerate(texts):
            if text:
                msg = f"The save of step {writing.save.step} failed on rank {rank}: {text}"
                raise self._with_newest(CheckpointWriteError(msg)) from error

    def restore(
        self,
        state: TrainState,
        *,
        step: int | None = None,
        allow: Sequence[str] = (),
    ) -> TrainState:
        """Return the newest state, or that of a step; the given one where there is none.

        Raises:
            CheckpointError: it cannot be loaded, or there is none of that step; the newest
                that is whole is named.
        """
        check_state("store.restore(state)", state)
        self.wait()
        found = list(self.steps) if state.world.is_main else None
        steps = broadcast_object(found, state.world, label="store: restore")
        if step is not None and step not in steps:
            msg = f"{self.directory} has no checkpoint of step {step}; it has {steps}."
            raise CheckpointError(msg)
        if not steps:
            return state
        chosen = steps[-1] if step is None else step
        try:
            return load(state, self.directory / keeping.name_of(chosen), allow=allow)
        except CheckpointError as error:
            others = [each for each in steps if each < chosen]
            if others:
                error.add_note(f"An older one is that of step {others[-1]}.")
            raise

    def close(self) -> None:
        """Wait for what is under way, and let other jobs write to the directory."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error this rank's part is finished without asking the others."""
        if kind is None:
            self.close()
            return
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.join()) is not None:
            sys.stderr.write(f"accelfn: {error}\n")
        self._release()

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = Lock.of(self.directory)
            self._unlock = weakref.finalize(self, self._lock.release)
        try:
            self._lock.take()
        except DirectoryInUseError:
            self._release()
            raise

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._lock = self._unlock = None

    def _remove_leftovers(self) -> None:
        """Remove what interrupted saves have left; the lock is held."""
        for path in self.directory.glob(".tmp-*"):
            sys.stderr.write(f"accelfn: removing {path}, left by an interrupted save\n")
            disk.remove(path)

    def _open_talk(self, job: commit.Save) -> None:
        try:
            disk.create(talk_directory(job.final))
        except OSError:
            disk.remove(job.partial)
            raise

    def _close_talk(self, job: commit.Save) -> None:
        with suppress(OSError):  # the next save removes it
            disk.remove(talk_directory(job.final))

    def _retain(self, step: int) -> None:
        """On rank 0, verify the new checkpoint, and then remove what is not kept.

        Raises:
            CheckpointError: it is not what was written; it has its name no longer.
        """
        if self._world is None or not self._world.is_main or self.keep is None:
            return
        try:
            keeping.verify(self.directory / keeping.name_of(step))
        except CheckpointError:
            keeping.discard(self.directory, step)
            raise
        kept = [step, *self.steps[-self.keep :]]
        if self.keep_best is not None:
            best = keeping.best_of(self.directory, self.keep_best, self.best_is)
            kept += best[:1]
            self._say_no_best(set(self.steps) - set(kept))
        try:
            keeping.remove_others(self.directory, kept)
        except OSError as error:  # the next save tries it again
            sys.stderr.write(f"accelfn: older checkpoints are still there: {error}\n")

    def _say_no_best(self, removed: set[int]) -> None:
        """Say, once, that some are removed though none has the metric of `keep_best`."""
        if self._said_no_best or not removed:
            return
        names = keeping.metrics_in(self.directory)
        if self.keep_best not in names:
            self._said_no_best = True
            sys.stderr.write(
                f"accelfn: keep_best={self.keep_best!r} keeps none: no checkpoint in"
                f" {self.directory} has that metric. Metrics that were given to save:"
                f" {', '.join(sorted(names)) or 'none'}.\n"
            )

    def _with_newest(self, error: CheckpointWriteError) -> CheckpointWriteError:
        newest = self.latest
        what = "There is none yet" if newest is None else f"The newest is {newest}"
        return type(error)(f"{error} {what}.")


def _check_options(
    keep: object, keep_best: object, best_is: object, every: object
) -> None:
    if keep is not None and not is_integer(keep, 1):
        msg = f"CheckpointStore(keep={keep!r}): expected at least 1, or None for all."
    elif not (keep_best is None or isinstance(keep_best, str)):
        msg = f"CheckpointStore(keep_best={keep_best!r}): expected a metric's name."
    elif best_is not in ("min", "max"):
        msg = f'CheckpointStore(best_is={best_is!r}): expected "min" or "max".'
    elif not (
        every is None
        or is_integer(every, 1)
        or (isinstance(every, timedelta) and every > timedelta())
    ):
        msg = (
            f"CheckpointStore(every={every!r}): expected a number of updates, a timedelta,"
            " or None."
        )
    else:
        return
    raise ArgumentError(msg)


def _check_writable(directory: Path) -> None:
    """Make the directory, and a file in it, before anything is trained."""
    try:
        disk.make(directory)
        probe = directory / f".tmp-probe-{uuid.uuid4().hex}"  # other ranks make theirs
        disk.create(probe)
        disk.remove(probe)
    except OSError as error:
        nearest = next(
            each for each in (directory, *directory.parents) if each.exists()
        )
        mode = oct(nearest.stat().st_mode & 0o7777)
        msg = (
            f"CheckpointStore({str(directory)!r}) cannot be written to: {error};"
            f" {nearest} has mode {mode}, and this is user {os.getuid()}."
        )
        raise CheckpointWriteError(msg) from error


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        msg = (
            f"CheckpointStore.save(metrics={metrics!r}): expected numbers by name, as"
            " af.mean(metrics, world) gives."
        )
        raise ArgumentError(msg) from error
