# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: a run's checkpoints, one after the other, in one directory."""

import json
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from accelfn.base import paths, words
from accelfn.base.calling import called
from accelfn.base.question import question
from accelfn.base.words import foreign
from accelfn.checkpoint import commit, disk
from accelfn.checkpoint import keep as keeping
from accelfn.checkpoint.background import Buffers, Writing, close_talk, open_talk
from accelfn.checkpoint.load import load
from accelfn.checkpoint.lock import Lock
from accelfn.checkpoint.options import (
    Given,
    Period,
    States,
    check_frozen,
    check_numbers,
    check_options,
    check_path,
    check_writable,
    numbers_of,
    states_of,
)
from accelfn.checkpoint.retention import Retention
from accelfn.checkpoint.save import contents_of, exchange_of, save_of
from accelfn.checkpoint.under_way import UnderWay
from accelfn.collectives import broadcast_object, gather_text
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
    from accelfn.checkpoint.commit import Contents
    from accelfn.world import World


@called
@foreign(words.STORE)
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
        self._under_way = UnderWay()
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
        if not paths.is_directory(self.directory):
            msg = (
                f"{self.directory} was deleted since the CheckpointStore was made, with the"
                " checkpoints in it. Make the store anew to begin again."
            )
            raise CheckpointError(msg)
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

    @question
    @called
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

    @called
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
        under_way = self._under_way
        before = under_way.world
        earlier = self._ended(state.world)
        under_way.world = state.world
        is_first = before is None or before.connection is not state.world.connection
        job = save_of(state, self.directory / keeping.name_of(state.step))
        exchange = exchange_of(state, "save")
        contents: dict[str, Contents] = {}

        def begin() -> str:
            contents.update(self._begun(job, states, numbers))
            return json.dumps(numbers)

        retain = partial(self._retain, job.step)
        try:
            given = job.agreed(exchange, "begin", begin)
            if self.async_ and is_first:  # ranks agree by files from now on
                job.agreed(exchange, "look for it", partial(commit.check_seen, job))
            if self.async_:
                patience = state.world.connection.timeout(state.world.device)
                under_way.writing = Writing(job, contents, retain, patience=patience)
                # not before it is remembered: an interrupt between would let the next save
                # copy into what is being written
                under_way.writing.start()
            else:
                commit.write(job, contents, exchange)
                job.agreed(exchange, commit.READ_BACK, retain)
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

    @called
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
                outcome.add_note(self._way_on(older))
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
        under_way = self._under_way
        writing, under_way.writing = under_way.writing, None
        if writing is not None:
            if isinstance(error, PeerFailedError):
                writing.hurry()
            if (failed := writing.join()) is not None:
                sys.stderr.write(f"accelfn: {failed}\n")
        self._release()

    def _begun(
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
            if paths.exists(job.final):
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
        error = self._ended(world)
        if error is not None:
            raise self._with_newest(error) from error.__cause__

    def _ended(self, now: "World | None" = None) -> CheckpointWriteError | None:
        """Wait for the save that is under way, and return its error, the same on all ranks.

        Args:
            now: of the state at hand; another than before where ranks have met anew.

        Raises:
            PeerFailedError: a rank is gone.
        """
        if now is None or not self._under_way.is_of_others(now):
            return self._under_way.ended()
        error = self._under_way.left()
        if not now.is_main:  # rank 0 is another now, and takes the lock
            self._release()
        return self._under_way.goes_on_in(now, error)

    def _steps_on_all(self, world: "World", step: int | None) -> list[int]:
        """Return the steps that rank 0 sees; a collective.

        Raises:
            CheckpointError: it can't see them, or the wanted one is missing.
        """
        found = self._listed(step) if world.is_main else None
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
        folder = self.directory / keeping.name_of(step)
        outcome: States | CheckpointError
        try:
            outcome = load(state, folder, allow=allow)
        except CheckpointError as error:
            outcome = error
        is_gone = isinstance(outcome, CheckpointError) and not disk.is_there(folder)
        texts = gather_text("gone" if is_gone else "", world, label="store: restored")
        return outcome, any(texts)

    def _listed(self, step: int | None) -> list[int] | str:
        """Return the steps that are there, or why none can be restored.

        Args:
            step: that is wanted; None is the newest.
        """
        try:
            steps = list(self.steps)
            newest = steps[-1] if steps else -1
            broken = keeping.broken_after(self.directory, newest)
        except (OSError, CheckpointError) as error:
            return commit.told(error)
        if broken is None or step is not None:
            return steps
        link = f"{broken} is a broken link to {broken.readlink()}"
        return f"{link}, and is newer than all others. {self._way_on(steps)}"

    def _way_on(self, steps: Sequence[int]) -> str:
        """Return how to continue from the newest whole checkpoint of these."""
        whole = keeping.newest_whole(self.directory, steps)
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
        world = self._under_way.world
        if world is not None and world.is_main:
            self._retention.after(step)

    def _with_newest(
        self, error: CheckpointWriteError, more: str = ""
    ) -> CheckpointWriteError:
        """Return an error that says which checkpoint is the newest, as far as it is known."""
        try:
            newest = self.latest
        except (OSError, CheckpointError) as failed:
            what = f"Which checkpoints there are cannot be told ({commit.told(failed)})"
        else:
            what = "There is none yet" if newest is None else f"The newest is {newest}"
        parts = (part.removesuffix(".") for part in (str(error), more, what) if part)
        return type(error)(" ".join(f"{part}." for part in parts))
