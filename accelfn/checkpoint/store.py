# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: a run's checkpoints, one after the other, in one directory."""

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

from accelfn.base import arguments, words
from accelfn.base.arguments import explain_call_errors, question
from accelfn.base.devices import host_memory
from accelfn.base.words import hint_attributes
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

# Saving behind the training's back: a copy in host memory, and a thread that writes it.
#
# Collectives belong to the training's thread. So ranks agree by small files in a directory
# beside the checkpoint, which they all see, for they write the checkpoint itself to it.


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
        return [_read_text(self._file(self.turn, rank)) for rank in self._ranks()]

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
            self.save.run_on_all(lambda _, text: [text], commit.READ_BACK, self._then)
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
        begins = self.save.not_verified if is_there else self.save.not_saved
        known = CheckpointWriteError(
            f"{begins}: rank {rank} failed: {commit.format_error(error)}"
        )
        known.__cause__ = error
        return known


# Retention: what is removed from a store, and never before a newer one was read back.


@attrs.define(kw_only=True)
class Retention:
    """What a store keeps.

    Attributes:
        directory: of the store.
        keep: how many of the newest; None: all.
        best: keep that one too which is best by this metric, if any.
        best_is: "min" or "max".
        has_said_no_best: whether it was said that none has that metric.
    """

    directory: Path
    keep: int | None
    best: str | None
    best_is: str
    has_said_no_best: bool = False

    def after(self, step: int) -> None:
        """Verify a new checkpoint, and then remove what is not kept.

        Raises:
            CheckpointError: it is not what was written; it has its name no longer.
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
        """Remove what runs that ended behind a save, and before this, have left.

        Cost: where they have, the newest is read.
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
        """Return the steps that are kept, of those that are there."""
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
            except OSError as error:  # the next save tries it again
                sys.stderr.write(
                    f"accelfn: {self.directory / manifest.name_of(step)} is to be removed,"
                    f" and is still there: {error}\n"
                )

    def _say_no_best(self) -> None:
        """Say, once, that some are removed though none has the metric that is best."""
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


# The save that a store's thread writes, and how all ranks hear of its end.


class PendingSave:
    """A save that was begun and not waited for, if there is one.

    Attributes:
        writing: what its thread does.
        world: of the state that was saved last.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.writing: Writing | None = None
        self.world: World | None = None

    def is_of_others(self, now: "World | None") -> bool:
        """Return whether ranks have met anew since, in the world of the state at hand."""
        if now is None or now.connection.regrouping is None:
            return False
        return self.world is None or self.world.connection is not now.connection

    def finish(self) -> CheckpointWriteError | None:
        """Wait for its end, and return its error, the same on all ranks.

        Of one that failed nothing is left.

        Raises:
            PeerFailedError: a rank is gone.
        """
        writing, world = self.writing, self.world
        if world is not None and world.connection.successor is not None:
            return self.abandon()
        if writing is None or world is None:
            return None
        step = writing.save.step
        # all have begun theirs: in a simulated world ranks take turns
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
            if told is not None:  # by now nobody writes to it
                with suppress(OSError):  # the next save removes it
                    disk.remove(writing.save.partial)
        if told is not None:
            told.__cause__ = None if error is None else error.__cause__
        return told

    def abandon(self) -> CheckpointWriteError | None:
        """End a save of ranks of which one is gone, and return another error than that.

        It is there as a whole, or nothing of it: then a line on stderr says so.
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
        """Begin in another world, and return the error that a rank of it brings along."""
        text = "" if error is None else str(error)
        told = _first(gather_text(text, world, label="store: ranks have met anew"))
        self.world = world
        return told


def _first(texts: list[str]) -> CheckpointWriteError | None:
    """Return the first error of what ranks have said, if there is one."""
    failed = [CheckpointWriteError(text) for text in texts if text]
    return failed[0] if failed else None


@explain_call_errors
@hint_attributes(words.STORE)
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
            to host memory, and what goes wrong later is raised by the next `save`, which is
            made all the same, by `wait` or `close`. One save at a time is under way, and
            each rank must have written its part within the world's timeout.

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
        """The steps that are there, in rising order.

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
            ArgumentError: the store was made without it.
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

        Cost: none where `every` counts updates; a broadcast from rank 0, whose clock decides,
        where it is a time.

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
        """Save a state under its step, and return where.

        Args:
            state: not donated; with `async_` it may be given to the next step at once. Or
                several states by name, as of `af.save`; the first one's step names them.
            metrics: numbers to keep with it, the same on all ranks; where they differ, those
                of rank 0 are kept, and an `af.Warning` names another rank's.

        Cost: as said of the store. Where runs that were killed have left more than is kept, the
        first save of the next reads the newest, and removes the rest.

        Raises:
            CheckpointWriteError: this save, or with `async_` the one before, went wrong on
                some rank, which is named with its error, as is the newest checkpoint that
                there is. If it was the one before, this one has begun all the same.
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
            if self.async_ and is_first:  # ranks agree by files from now on
                job.run_on_all(exchange, "look for it", partial(commit.check_seen, job))
            if self.async_:
                patience = state.world.connection.timeout(state.world.device)
                pending.writing = Writing(job, contents, retain, patience=patience)
                # not before it is remembered: an interrupt between would let the next save
                # copy into what is being written
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
        """Wait until the save that is under way is done.

        Raises:
            CheckpointWriteError: it went wrong on some rank.
            PeerFailedError: a rank has failed, left or did not arrive in time.
        """
        self._wait(None)

    @explain_call_errors
    def restore(
        self, state: States, *, step: int | None = None, allow: Sequence[str] = ()
    ) -> States:
        """Return the newest state, or that of a step; the given one where there is none.

        Give several states by name, as to `save`, to have all of them.

        Raises:
            CheckpointError: it cannot be loaded, or there is none of that step; the newest
                that is whole is named.
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
        """Wait for what is under way, and let other jobs write to the directory."""
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
        """Close; after an error this rank's part is finished without asking the others."""
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
        """Return what is to be written, once there is a place for it."""
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
        """Wait for the save that is under way, and return its error, the same on all ranks.

        Args:
            now: of the state at hand; another than before where ranks have met anew.

        Raises:
            PeerFailedError: a rank is gone.
        """
        if now is None or not self._pending.is_of_others(now):
            return self._pending.finish()
        error = self._pending.abandon()
        if not now.is_main:  # rank 0 is another now, and takes the lock
            self._release()
        return self._pending.rejoin(now, error)

    def _steps_on_all(self, world: "World", step: int | None) -> list[int]:
        """Return the steps that rank 0 sees; a collective.

        Raises:
            CheckpointError: it can't see them, or the wanted one is missing.
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
        """Return a loaded state or an error, and whether a rank found nothing; a collective."""
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
        """Return the steps that are there, or why none can be restored.

        Args:
            step: that is wanted; None is the newest.
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
        """Return how to continue from the newest whole checkpoint of these."""
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
        """Remove what interrupted saves have left; the lock is held."""
        for path in self.directory.glob(".tmp-*"):
            sys.stderr.write(f"accelfn: removing {path}, left by an interrupted save\n")
            disk.remove(path)

    def _retain(self, step: int) -> None:
        """On rank 0, verify the new checkpoint, and then remove what is not kept."""
        world = self._pending.world
        if world is not None and world.is_main:
            self._retention.after(step)

    def _with_newest(
        self, error: CheckpointWriteError, more: str = ""
    ) -> CheckpointWriteError:
        """Return an error that says which checkpoint is the newest, as far as it is known."""
        try:
            newest = self.latest
        except (OSError, CheckpointError) as failed:
            what = f"Which checkpoints there are cannot be told ({commit.format_error(failed)})"
        else:
            what = "There is none yet" if newest is None else f"The newest is {newest}"
        parts = (part.removesuffix(".") for part in (str(error), more, what) if part)
        return type(error)(" ".join(f"{part}." for part in parts))
