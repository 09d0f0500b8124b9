# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: the checkpoints of a run in one directory, saved in the background."""

import json
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import attrs
import torch

from accelfn.base import arguments
from accelfn.base.arguments import explain_call_errors, question
from accelfn.base.devices import host_memory
from accelfn.base.hints import hint_attributes
from accelfn.checkpoint import commit, disk, manifest
from accelfn.checkpoint.commit import Contents, Lock, Save
from accelfn.checkpoint.load import load
from accelfn.checkpoint.save import (
    Given,
    Period,
    States,
    check_frozen,
    check_numbers,
    check_options,
    check_path,
    check_writable,
    contents_of,
    exchange_of,
    numbers_of,
    save_of,
    states_of,
)
from accelfn.collectives import broadcast_object, gather_text
from accelfn.collectives.failures import named
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    DirectoryInUseError,
    PeerFailedError,
)
from accelfn.state.state import TrainState

if TYPE_CHECKING:
    from accelfn.world import World

# Background saves: a copy of the tensors in host memory, and a thread that writes it.
#
# Only the training thread may call collectives. So the writing threads communicate by small
# files in a directory next to the checkpoint, on the disk that all ranks share.


_PATIENCE = 600.0
"""Seconds to wait for a rank in a world without a timeout."""
_GRACE = 5.0
"""Seconds to wait for writing ranks after another rank has failed."""


class Buffers:
    """Host memory for copies of tensors, reused by each save."""

    def __init__(self) -> None:
        """Start without memory."""
        self._held: dict[str, torch.Tensor] = {}

    def copies_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in host memory, which the next call overwrites."""
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
    """Exchanges texts between ranks by files in a shared directory.

    Attributes:
        save: the save that ranks work on.
        patience: seconds to wait for a rank's text.
        turn: the number of exchanges so far.
        hurried_at: the time at which a rank was known to have failed; None if no rank has.
    """

    save: Save
    patience: float
    turn: int = 0
    hurried_at: float | None = None

    def __call__(self, what: str, text: str) -> list[str]:
        """Publish this rank's text, wait for all ranks, and return their texts.

        Raises:
            CheckpointWriteError: a rank's writer has ended with an error.
            PeerFailedError: a rank's process has ended, or its text did not arrive in time.
        """
        self.turn += 1
        disk.tell(self._file(self.turn, self.save.rank), text)
        pause, begun = 0.001, time.monotonic()
        while absent := self._absent():
            gone = [r for r in absent if disk.is_let_go(self._file(_HELD, r))]
            absent = self._absent()  # a rank may have published before it ended
            self._check_ended(absent)
            gone = [rank for rank in gone if rank in absent]
            if absent and (gone or self._is_over(begun)):
                raise PeerFailedError(self._given_up(gone, absent, what, begun))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [_read_text(self._file(self.turn, rank)) for rank in self._ranks()]

    def begin(self) -> BinaryIO | None:
        """Return an open lock file that shows other ranks that this process lives."""
        mine = self._file(_HELD, self.save.rank)
        return disk.hold(mine) if self.save.size > 1 else None

    def end(self, text: str) -> None:
        """Tell other ranks that this rank has stopped, and why."""
        if self.save.size > 1:
            disk.tell(self._file(_ENDED, self.save.rank), text)

    def _ranks(self) -> range:
        return range(self.save.size)

    def _file(self, turn: int | str, rank: int) -> Path:
        return talk_directory(self.save.final) / f"{turn}-{rank}"

    def _absent(self) -> list[int]:
        return [
            r for r in self._ranks() if not arguments.exists(self._file(self.turn, r))
        ]

    def _check_ended(self, absent: list[int]) -> None:
        for rank in absent:
            ended = self._file(_ENDED, rank)
            if arguments.exists(ended):
                nothing = f"{self.save.not_saved}: rank {rank} failed, and had no room to say why"
                raise CheckpointWriteError(_read_text(ended) or nothing)

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


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def talk_directory(final: Path) -> Path:
    """Return the directory in which ranks exchange texts about a checkpoint."""
    return final.parent / f".tmp-{final.name}.talk"


def open_talk(save: Save) -> None:
    """Make the directory for exchanges; if that fails, remove the unfinished checkpoint."""
    try:
        disk.create(talk_directory(save.final))
    except OSError:
        disk.remove(save.partial)
        raise


def close_talk(save: Save) -> None:
    """Remove the directory for exchanges, if possible."""
    with suppress(OSError):  # the next save removes it
        disk.remove(talk_directory(save.final))


class _Mine(threading.local):
    """The saves that the current thread has started."""

    def __init__(self) -> None:
        self.writings: weakref.WeakSet[Writing] = weakref.WeakSet()


_mine = _Mine()


def give_up() -> bool:
    """Stop the saves that this thread has started, as the end of its process would.

    Returns: whether there were any saves.
    """
    begun = list(_mine.writings)
    for writing in begun:
        writing.give_up()
    return bool(begun)


class Writing:
    """A save that a background thread writes."""

    def __init__(
        self,
        save: Save,
        contents: Mapping[str, Contents],
        then: Callable[[], None],
        *,
        patience: float | None,
    ) -> None:
        """Take the contents to write; their tensors must not change before `join`."""
        self.save = save
        self._contents, self._then = contents, then
        self._talk = Talk(save=save, patience=patience or _PATIENCE)
        self._begun, self._done = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        _mine.writings.add(self)

    def start(self) -> None:
        """Start the writing thread; if that fails, `join` returns the error."""
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
        """Wait for the end of the save, and return its error.

        Starts the save if an interrupt prevented its start: other ranks wait for it.
        """
        if not self._begun.locked():
            self.start()
        self._done.wait()
        return self._error

    def hurry(self) -> None:
        """Shorten the wait for other ranks, because one of them has failed."""
        self._talk.hurried_at = time.monotonic()

    def give_up(self) -> None:
        """Stop waiting for other ranks, and wait for the end of the save."""
        self._talk.patience = 0.0
        if self._begun.locked():
            self._done.wait()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # an interrupted `start` had started a thread already
        held: BinaryIO | None = None
        try:
            held = self._talk.begin()
            commit.write(self.save, self._contents, self._talk)
            # the checkpoint exists: rank 0 verifies it without an exchange of files
            self.save.run_on_all(lambda _, text: [text], commit.READ_BACK, self._then)
        except CheckpointWriteError as error:
            self._error = error  # all ranks have it
        except PeerFailedError as error:
            self._error = error  # the other ranks have this error too
        except BaseException as error:  # noqa: BLE001 - raised in the training's thread
            self._error = self._alone(error)
            with suppress(BaseException):  # this disk may be what has failed
                self._talk.end(str(self._error))
        finally:
            if held is not None:
                held.close()
            self._done.set()

    def _alone(self, error: BaseException) -> CheckpointWriteError:
        """Return this rank's own error as an error of the save."""
        rank = self.save.rank
        is_there = disk.is_there(self.save.final)
        begins = self.save.not_verified if is_there else self.save.not_saved
        known = CheckpointWriteError(
            f"{begins}: rank {rank} failed: {commit.format_error(error)}"
        )
        known.__cause__ = error
        return known


# Retention: remove old checkpoints, only after a newer checkpoint was verified.


@attrs.define(kw_only=True)
class Retention:
    """The rule that decides which checkpoints a store keeps.

    Attributes:
        directory: the store's directory.
        keep: the number of newest checkpoints to keep; None: all.
        best: the metric whose best checkpoint is kept in addition, if any.
        best_is: "min" or "max".
        has_said_no_best: whether a line on stderr has reported that the metric is missing.
    """

    directory: Path
    keep: int | None
    best: str | None
    best_is: str
    has_said_no_best: bool = False

    def after(self, step: int) -> None:
        """Verify a new checkpoint, and then remove old ones.

        Raises:
            CheckpointError: the new checkpoint is damaged; it was removed.
        """
        if self.keep is None:
            return
        try:
            manifest.verify(self.directory / manifest.name_of(step))
        except CheckpointError:
            manifest.discard(self.directory, step)
            raise
        self._remove({step, *self._steps_to_keep()})

    def before(self) -> None:
        """Remove old checkpoints of runs that ended between a save and the removal.

        Cost: reads the newest checkpoint if there are any to remove.
        """
        kept = self._steps_to_keep()
        if not self._steps_to_remove(kept):
            return
        newest = self.directory / manifest.name_of(max(kept))
        try:
            manifest.verify(newest)
        except CheckpointError as error:
            sys.stderr.write(
                f"accelfn: older checkpoints than {newest} are kept: {error}\n"
            )
        else:
            self._remove(kept)

    def _steps_to_keep(self) -> set[int]:
        """Return the steps to keep."""
        steps = manifest.steps_in(self.directory)
        kept = set(steps if self.keep is None else steps[-self.keep :])
        if self.best is not None:
            kept.update(manifest.best_of(self.directory, self.best, self.best_is)[:1])
        return kept

    def _steps_to_remove(self, kept: set[int]) -> list[int]:
        return [s for s in manifest.steps_in(self.directory) if s not in kept]

    def _remove(self, kept: set[int]) -> None:
        others = self._steps_to_remove(kept)
        if others:
            self._say_no_best()
        for step in others:
            try:
                manifest.discard(self.directory, step)
            except OSError as error:  # the next save tries again
                sys.stderr.write(
                    f"accelfn: {self.directory / manifest.name_of(step)} is to be removed,"
                    f" and is still there: {error}\n"
                )

    def _say_no_best(self) -> None:
        """Report once that no checkpoint has the metric of `keep_best`."""
        if self.best is None or self.has_said_no_best:
            return
        names = manifest.metrics_in(self.directory)
        if self.best not in names:
            self.has_said_no_best = True
            sys.stderr.write(
                f"accelfn: keep_best={self.best!r} keeps none: no checkpoint in"
                f" {self.directory} has that metric. Metrics that were given to save:"
                f" {', '.join(sorted(names)) or 'none'}.\n"
            )


# The pending save of a store, and the exchange of its outcome.


class PendingSave:
    """The save that was started and not yet joined, if any.

    Attributes:
        writing: the save's writing thread; None if no save is pending.
        world: the world of the state that was saved last.
    """

    def __init__(self) -> None:
        """Start without a save."""
        self.writing: Writing | None = None
        self.world: World | None = None

    def is_of_others(self, now: "World | None") -> bool:
        """Return whether ranks have regrouped since the save, into the given world."""
        if now is None or now.connection.regrouping is None:
            return False
        return self.world is None or self.world.connection is not now.connection

    def finish(self) -> CheckpointWriteError | None:
        """Wait for the end of the save, and return its error, the same on all ranks.

        A failed save leaves no files.

        Raises:
            PeerFailedError: a rank has failed.
        """
        writing, world = self.writing, self.world
        if world is not None and world.connection.successor is not None:
            return self.abandon()
        if writing is None or world is None:
            return None
        step = writing.save.step
        # wait until all ranks have started: in a simulated world ranks take turns
        gather_text("", world, label=f"store: wait for step {step}")
        error = writing.join()
        if isinstance(error, PeerFailedError):
            self.writing = None
            world.connection.tell("waited in a save", is_waiting=True)
            raise error
        text = "" if error is None else str(error)
        told = _first(gather_text(text, world, label=f"store: outcome of step {step}"))
        self.writing = None  # not before: an interrupt may have ended the waiting
        if world.is_main:
            close_talk(writing.save)
            if told is not None:  # no rank writes to the directory any more
                with suppress(OSError):  # the next save removes it
                    disk.remove(writing.save.partial)
        if told is not None:
            told.__cause__ = None if error is None else error.__cause__
        return told

    def abandon(self) -> CheckpointWriteError | None:
        """Finish a save after a rank has failed; return an error other than that failure.

        The checkpoint is complete, or it does not exist and a line on stderr says so.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        writing.hurry()
        error = writing.join()
        if isinstance(error, CheckpointWriteError):
            return error
        if error is not None and not disk.is_there(writing.save.final):
            sys.stderr.write(f"accelfn: {error}\n")
        return None

    def rejoin(
        self, world: "World", error: CheckpointWriteError | None
    ) -> CheckpointWriteError | None:
        """Continue in a new world, and return the first error that any of its ranks has."""
        text = "" if error is None else str(error)
        told = _first(gather_text(text, world, label="store: ranks have met anew"))
        self.world = world
        return told


def _first(texts: list[str]) -> CheckpointWriteError | None:
    """Return the first nonempty text as an error, if any."""
    failed = [CheckpointWriteError(text) for text in texts if text]
    return failed[0] if failed else None


@explain_call_errors
@hint_attributes()
class CheckpointStore:
    """The checkpoints of a run: `step-00000100`, `step-00000200`, ... in a directory.

    Call `save`, `restore`, `due`, `wait` and `close` on all ranks. As a context manager, the
    store waits at the end for the pending save.

    Args:
        directory: a directory for this run alone, on a disk that all ranks see; the store
            makes it.
        keep: the number of newest checkpoints to keep, in addition to a pending one; None: all.
        keep_best: a metric; the store also keeps the best checkpoint by this metric among those
            it has. A line on stderr reports if checkpoints are removed and none has the metric.
        best_is: whether the "min" or the "max" of that metric is best.
        frozen: as in `af.save`: "hash" does not write parameters that are not trained.
        every: when a checkpoint is `due`: a number of updates, or a `timedelta`. None: you
            decide when to `save`, and `due` raises an error.
        async_: write in the background: `save` returns when the tensors are copied to host
            memory. Later errors are raised by `wait`, by `close`, or by the next `save`, which
            saves nevertheless. One save is pending at a time, and each rank must write its
            part within the world's timeout.

    Law: after a crash at any moment, `latest` is the last checkpoint that `save` or `wait`
    confirmed, or a later one, and is complete. No checkpoint is removed before a newer one was
    read back and verified.

    Cost: a save pauses training for one copy of the tensors to host memory, which the next
    save reuses; without `async_`, for the whole write.

    Raises:
        ArgumentError: an option has an invalid value.
        CheckpointWriteError: the directory cannot be made or written to.

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
        """Check that the directory can be written to."""
        check_options(keep, keep_best, best_is, every)
        check_frozen(frozen)
        check_path("af.CheckpointStore", directory)
        self.directory = Path(directory).absolute()
        self.keep, self.keep_best, self.best_is = keep, keep_best, best_is
        self.frozen, self.every, self.async_ = frozen, every, async_
        self._buffers: dict[str, Buffers] = defaultdict(Buffers)
        self._pending = PendingSave()
        self._lock: Lock | None = None
        self._unlock: Callable[[], object] | None = None
        self._last_saved = time.monotonic()
        self._retention = Retention(
            directory=self.directory, keep=keep, best=keep_best, best_is=best_is
        )
        check_writable(self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the store's checkpoints, in rising order.

        Raises:
            CheckpointError: the directory was deleted since the store was made.
        """
        if not arguments.is_directory(self.directory):
            msg = (
                f"{self.directory} was deleted since the CheckpointStore was made, with the"
                " checkpoints in it. Make the store anew to begin again."
            )
            raise CheckpointError(msg)
        return manifest.steps_in(self.directory)

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps
        return self.directory / manifest.name_of(steps[-1]) if steps else None

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `keep_best`.

        Raises:
            ArgumentError: the store was made without `keep_best`.
        """
        if self.keep_best is None:
            msg = "CheckpointStore.best: say by which metric, with keep_best=."
            raise ArgumentError(msg)
        found = manifest.best_of(self.directory, self.keep_best, self.best_is)
        return self.directory / manifest.name_of(found[0]) if found else None

    @question
    @explain_call_errors
    def due(self, state: Given) -> bool:
        """Return whether to save now, the same on all ranks; of several states, the first's.

        Cost: free if `every` counts updates. If `every` is a time, a broadcast from rank 0,
        because its clock decides.

        Raises:
            ArgumentError: the store was made without `every`.
        """
        state, _ = states_of("store.due(state)", state)
        if self.every is None:
            msg = "CheckpointStore.due: say how often, with every=; or save without asking."
            raise ArgumentError(msg)
        if state.step == 0:
            return False
        if isinstance(self.every, int):
            return state.step % self.every == 0
        over = time.monotonic() - self._last_saved >= self.every.total_seconds()
        return bool(broadcast_object(over, state.world, label="store: due"))

    @explain_call_errors
    def save(self, state: Given, *, metrics: Mapping[str, float] | None = None) -> Path:
        """Save a state under its step, and return the path.

        Args:
            state: not donated; with `async_` you can pass it to the next step at once. Or
                several states by name, as for `af.save`; the first state's step is used.
            metrics: numbers to keep with the checkpoint, equal on all ranks. If they differ,
                the store keeps rank 0's, and an `af.Warning` names another rank's.

        Cost: as documented for the store. If killed runs have left too many checkpoints, the
        first save of the next run reads the newest and removes the rest.

        Raises:
            CheckpointWriteError: this save failed on some rank, or with `async_` the save
                before. The error names the rank, its error and the newest checkpoint. If the
                save before failed, this save has begun nevertheless.
            PeerFailedError: a rank has failed, left or did not arrive in time.
            DirectoryInUseError: another job writes to this directory.
        """
        state, states = states_of("store.save(state)", state)
        numbers = numbers_of(metrics)
        pending = self._pending
        before = pending.world
        earlier = self._join_pending(state.world)
        pending.world = state.world
        is_first = before is None or before.connection is not state.world.connection
        job = save_of(state, self.directory / manifest.name_of(state.step))
        exchange = exchange_of(state, "save")
        contents: dict[str, Contents] = {}

        def begin() -> str:
            contents.update(self._collect_contents(job, states, numbers))
            return json.dumps(numbers)

        retain = partial(self._retain, job.step)
        try:
            given = job.run_on_all(exchange, "begin", begin)
            if self.async_ and is_first:  # ranks exchange files from now on
                job.run_on_all(exchange, "look for it", partial(commit.check_seen, job))
            if self.async_:
                patience = state.world.connection.timeout(state.world.device)
                pending.writing = Writing(job, contents, retain, patience=patience)
                # start after the assignment: an interrupt in between would let the next save
                # overwrite buffers that are being written
                pending.writing.start()
            else:
                commit.write(job, contents, exchange)
                job.run_on_all(exchange, commit.READ_BACK, retain)
        except CheckpointWriteError as error:
            if state.world.is_main and self._lock is not None:
                close_talk(job)
            too = "" if earlier is None else str(earlier)
            raise self._with_newest(error, too) from error.__cause__
        self._last_saved = time.monotonic()
        if state.world.is_main:
            check_numbers(given)
        if earlier is not None:
            begun = f"The save of step {job.step} has begun all the same"
            raise self._with_newest(earlier, begun) from earlier.__cause__
        return job.final

    def wait(self) -> None:
        """Wait until the pending save is done.

        Raises:
            CheckpointWriteError: the save failed on some rank.
            PeerFailedError: a rank has failed, left or did not arrive in time.
        """
        self._wait(None)

    @explain_call_errors
    def restore(
        self, state: States, *, step: int | None = None, allow: Sequence[str] = ()
    ) -> States:
        """Load the newest state, or a step's; return the given state from an empty store.

        Pass several states by name, as to `save`, to load all of them.

        Raises:
            CheckpointError: the checkpoint cannot be loaded, or the step has no checkpoint.
                The error names the newest undamaged checkpoint.
        """
        world = states_of("store.restore(state)", state)[0].world
        self._wait(world)
        steps = self._steps_on_all(world, step)
        while steps:
            chosen = steps[-1] if step is None else step
            outcome, is_gone = self._load(state, world, chosen, allow)
            if is_gone and step is None:
                steps = self._steps_on_all(world, step)
                if steps and steps[-1] != chosen:
                    continue  # the run of the store has saved a newer one
            if not isinstance(outcome, CheckpointError):
                return outcome
            older = [each for each in steps if each < chosen]
            if older and isinstance(outcome, CheckpointCorruptError):
                outcome.add_note(self._how_to_continue(older))
            raise outcome
        return state

    def close(self) -> None:
        """Wait for the pending save, and release the directory to other jobs."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Close; after an error, finish this rank's part without waiting for other ranks."""
        if kind is None:
            self.close()
            return
        pending = self._pending
        writing, pending.writing = pending.writing, None
        if writing is not None:
            if isinstance(error, PeerFailedError):
                writing.hurry()
            if (failed := writing.join()) is not None:
                sys.stderr.write(f"accelfn: {failed}\n")
        self._release()

    def _collect_contents(
        self,
        job: commit.Save,
        states: Mapping[str, TrainState],
        metrics: Mapping[str, float],
    ) -> "dict[str, Contents]":
        """Collect the contents to write, and make the directory for them."""
        contents: dict[str, Contents] = {}
        for name, state in states.items():
            each = contents_of(state, self.frozen, metrics=metrics)
            if self.async_:
                copies = self._buffers[name].copies_of(each.tensors)
                each = attrs.evolve(each, tensors=copies)
            contents[name] = each
        if job.rank == 0:
            is_first = self._lock is None
            self._take_lock()
            self._remove_leftovers()
            if is_first:
                self._retention.before()
            if arguments.exists(job.final):
                msg = (
                    f"{job.final} exists already: the store has this step. Save after the next"
                    " update; the same once more goes to a store of another directory."
                )
                raise CheckpointError(msg)
        commit.begin(job)
        if self.async_ and job.rank == 0:
            open_talk(job)
        return contents

    def _wait(self, world: "World | None") -> None:
        error = self._join_pending(world)
        if error is not None:
            raise self._with_newest(error) from error.__cause__

    def _join_pending(self, now: "World | None" = None) -> CheckpointWriteError | None:
        """Wait for the pending save, and return its error, the same on all ranks.

        Args:
            now: the world of the current state; a new world after ranks have regrouped.

        Raises:
            PeerFailedError: a rank has failed.
        """
        if now is None or not self._pending.is_of_others(now):
            return self._pending.finish()
        error = self._pending.abandon()
        if not now.is_main:  # another process is rank 0 now, and takes the lock
            self._release()
        return self._pending.rejoin(now, error)

    def _steps_on_all(self, world: "World", step: int | None) -> list[int]:
        """Return the steps that rank 0 sees; a collective.

        Raises:
            CheckpointError: rank 0 cannot list them, or the wanted step is missing.
        """
        found = self._list_steps(step) if world.is_main else None
        steps = broadcast_object(found, world, label="store: restore")
        if isinstance(steps, str):
            msg = f"{self.directory} cannot be looked through: {steps}"
            raise CheckpointError(msg)
        if step is not None and step not in steps:
            msg = f"{self.directory} has no checkpoint of step {step}; it has {steps}."
            raise CheckpointError(msg)
        return steps

    def _load(
        self, state: States, world: "World", step: int, allow: Sequence[str]
    ) -> tuple[States | CheckpointError, bool]:
        """Load a state or return the error, and whether a rank missed it; a collective."""
        folder = self.directory / manifest.name_of(step)
        outcome: States | CheckpointError
        try:
            outcome = load(state, folder, allow=allow)
        except CheckpointError as error:
            outcome = error
        is_gone = isinstance(outcome, CheckpointError) and not disk.is_there(folder)
        texts = gather_text("gone" if is_gone else "", world, label="store: restored")
        return outcome, any(texts)

    def _list_steps(self, step: int | None) -> list[int] | str:
        """Return the steps of the store, or a text that says why the newest cannot be restored.

        Args:
            step: the wanted step; None for the newest.
        """
        try:
            steps = list(self.steps)
            newest = steps[-1] if steps else -1
            broken = manifest.broken_after(self.directory, newest)
        except (OSError, CheckpointError) as error:
            return commit.format_error(error)
        if broken is None or step is not None:
            return steps
        link = f"{broken} is a broken link to {broken.readlink()}"
        return f"{link}, and is newer than all others. {self._how_to_continue(steps)}"

    def _how_to_continue(self, steps: Sequence[int]) -> str:
        """Return a sentence on how to continue from the newest undamaged checkpoint."""
        whole = manifest.newest_whole(self.directory, steps)
        if whole is None:
            return "No older checkpoint is whole: remove it to begin again."
        return (
            f"The newest whole checkpoint is that of step {whole}: continue from it with"
            f" store.restore(state, step={whole})."
        )

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
        """Remove leftovers of interrupted saves; needs the lock."""
        for path in self.directory.glob(".tmp-*"):
            sys.stderr.write(f"accelfn: removing {path}, left by an interrupted save\n")
            disk.remove(path)

    def _retain(self, step: int) -> None:
        """On rank 0, verify the new checkpoint and then remove old ones."""
        world = self._pending.world
        if world is not None and world.is_main:
            self._retention.after(step)

    def _with_newest(
        self, error: CheckpointWriteError, more: str = ""
    ) -> CheckpointWriteError:
        """Return the error with the newest checkpoint added to its text, if known."""
        try:
            newest = self.latest
        except (OSError, CheckpointError) as failed:
            what = f"The checkpoints cannot be listed ({commit.format_error(failed)})"
        else:
            what = "There is none yet" if newest is None else f"The newest is {newest}"
        parts = (part.removesuffix(".") for part in (str(error), more, what) if part)
        return type(error)(" ".join(f"{part}." for part in parts))
