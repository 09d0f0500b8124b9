# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: keep the checkpoints of a run in one directory; save in the background."""

import json
import math
import os
import sys
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import attrs

from accelfn.base import arguments
from accelfn.base.arguments import advise, as_path, explain_call_errors, hint_attributes
from accelfn.checkpoint import commit, files, manifest
from accelfn.checkpoint.background import (
    Buffers,
    PendingSave,
    Writing,
    close_talk,
    talk_directory,
)
from accelfn.checkpoint.commit import Contents, Lock, Phase, Save
from accelfn.checkpoint.load import load
from accelfn.checkpoint.mirror import Mirror
from accelfn.checkpoint.save import (
    Given,
    States,
    check_frozen,
    contents_of,
    exchange_of,
    save_of,
    states_of,
)
from accelfn.collectives.packed import gather_text
from accelfn.collectives.trees import broadcast_object
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    DirectoryInUseError,
    PeerFailedError,
)
from accelfn.world import World

# Check the arguments of a store, before anything is written.


def check_options(
    *, keep: object, keep_best: object, best_is: object, every: object, mirror: object
) -> None:
    """Raise `ArgumentError` for invalid options of a store."""
    is_period = isinstance(every, timedelta) and every > timedelta()
    if not (keep is None or arguments.is_integer(keep, 1)):
        text = f"{keep=!r}): expected an integer of at least 1, or None to keep all."
    elif not (keep_best is None or isinstance(keep_best, str)):
        text = f"keep_best={keep_best!r}): expected the name of a metric."
    elif best_is not in ("min", "max"):
        text = f'best_is={best_is!r}): expected "min" or "max".'
    elif keep_best is None and best_is != "min":
        text = (
            f"best_is={best_is!r}): has no effect without keep_best=, the name of a metric"
            " that you pass to save. Pass keep_best= too, or leave out best_is=."
        )
    elif not (every is None or arguments.is_integer(every, 1) or is_period):
        text = f"every={every!r}): expected a number of updates, a timedelta, or None."
    elif not (mirror is None or isinstance(mirror, str)):
        text = (
            f'mirror={mirror!r}): expected a URL, such as "s3://bucket/run", or None.'
        )
    else:
        return
    msg = f"af.CheckpointStore({text}"
    raise ArgumentError(msg)


def check_writable(directory: Path) -> None:
    """Create the directory and a test directory in it, so that errors appear before training."""
    try:
        files.make(directory)
        probe = directory / f".tmp-probe-{uuid.uuid4().hex}"  # unique among ranks
        files.create(probe)
        files.remove(probe)
    except OSError as error:
        msg = f"af.CheckpointStore({str(directory)!r}): cannot write to the directory: {error}."
        raise CheckpointWriteError(msg) from error


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats; raise `ArgumentError` for strings, booleans and other types."""
    table: Any = metrics or {}
    if isinstance(table, Mapping) and all(
        isinstance(name, str) and not isinstance(value, (str, bool))
        for name, value in table.items()
    ):
        with suppress(TypeError, ValueError):
            return {name: float(value) for name, value in table.items()}
    msg = (
        f"af.CheckpointStore.save(metrics={metrics!r}): expected a dict from names to numbers,"
        " such as metrics.all_reduce_mean(world)."
    )
    raise ArgumentError(msg)


def check_numbers(texts: Sequence[str]) -> None:
    """Warn if a rank passed other metrics than rank 0: the store keeps rank 0's."""
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0]:
            advise(
                f"af.CheckpointStore.save(metrics=...): rank 0 passed {first}, but rank {rank}"
                f" passed {json.loads(text)}. The store keeps only the metrics of rank 0, also"
                " for keep_best=. Pass equal values: metrics=metrics.all_reduce_mean(world)."
            )
            return


# Find and remove checkpoints in the directory of a store.


def metrics_of(directory: Path) -> dict[int, Mapping[str, float]]:
    """Return the metrics of each checkpoint, by step."""
    metrics: dict[int, Mapping[str, float]] = {}
    for step in manifest.steps_in(directory):
        with suppress(CheckpointError):  # a damaged checkpoint raises when it is loaded
            states = manifest.read_manifests(directory / manifest.name_of(step))
            metrics[step] = next(iter(states.values())).metrics
    return metrics


def best_of(directory: Path, metric: str, mode: str) -> list[int]:
    """Return the steps of the checkpoints that have a metric, best first."""
    sign = -1 if mode == "max" else 1
    ranking = [
        (sign * metrics[metric], step)
        for step, metrics in metrics_of(directory).items()
        if not math.isnan(metrics.get(metric, math.nan))
    ]
    return [step for _, step in sorted(ranking)]


def discard(directory: Path, step: int) -> None:
    """Remove a checkpoint: rename its directory first, then delete the files.

    So a crash leaves a temporary directory, and never a damaged checkpoint.
    """
    trash = directory / f".tmp-{manifest.name_of(step)}.gone"
    files.remove(trash)
    files.rename(directory / manifest.name_of(step), trash)
    # if this fails, the next save removes the temporary directory
    with suppress(OSError):
        files.remove(trash)


# Retention: remove old checkpoints, but only after a newer checkpoint was verified.


@attrs.define(kw_only=True)
class Retention:
    """Decides which checkpoints a store keeps, and removes the others.

    Attributes:
        directory: the store's directory.
        keep: the number of newest checkpoints to keep; None keeps all.
        best: a metric; the best checkpoint by this metric is also kept. None: no metric.
        best_is: whether the "min" or the "max" of the metric is best.
        has_said_no_best: whether a line on stderr has said that no checkpoint has the metric.
    """

    directory: Path
    keep: int | None
    best: str | None
    best_is: str
    has_said_no_best: bool = False

    def after(self, step: int) -> None:
        """Verify a new checkpoint, then remove old checkpoints.

        Raises:
            CheckpointError: the new checkpoint is damaged; it was removed.
        """
        if self.keep is None:
            return
        try:
            manifest.verify(self.directory / manifest.name_of(step))
        except CheckpointError:
            discard(self.directory, step)
            raise
        self._remove(self._steps_to_remove(step))

    def before(self) -> None:
        """Remove old checkpoints before the first save of this run.

        There are such checkpoints if an earlier run was killed between a save and the removal.

        Cost: reads the newest checkpoint if there is a checkpoint to remove.
        """
        to_remove = self._steps_to_remove()
        if not to_remove:
            return
        newest_step = manifest.steps_in(self.directory)[-1]
        newest = self.directory / manifest.name_of(newest_step)
        try:
            manifest.verify(newest)
        except CheckpointError as error:
            sys.stderr.write(
                f"accelfn: no old checkpoint was removed, because {newest} is damaged: {error}\n"
            )
        else:
            self._remove(to_remove)

    def _steps_to_remove(self, *new: int) -> list[int]:
        """Return the steps of the checkpoints to remove; keep those of `new` too."""
        steps = manifest.steps_in(self.directory)
        to_keep = {*new, *(steps if self.keep is None else steps[-self.keep :])}
        if self.best is not None:
            to_keep.update(best_of(self.directory, self.best, self.best_is)[:1])
        return [step for step in steps if step not in to_keep]

    def _remove(self, to_remove: Sequence[int]) -> None:
        if to_remove:
            self._say_no_best()
        for step in to_remove:
            try:
                discard(self.directory, step)
            except OSError as error:  # the next save tries again
                sys.stderr.write(
                    f"accelfn: {self.directory / manifest.name_of(step)} could not be removed;"
                    f" the next save tries again: {error}\n"
                )

    def _say_no_best(self) -> None:
        """Write once to stderr that no checkpoint has the metric of `keep_best`."""
        if self.best is None or self.has_said_no_best:
            return
        names = set[str]().union(*metrics_of(self.directory).values())
        if self.best not in names:
            self.has_said_no_best = True
            sys.stderr.write(
                f"accelfn: keep_best={self.best!r} keeps no checkpoint, because none in"
                f" {self.directory} has this metric. Metrics that were passed to save:"
                f" {', '.join(sorted(names)) or 'none'}.\n"
            )


@explain_call_errors
@hint_attributes()
class CheckpointStore:
    """Keep the checkpoints of a run in a directory, as `step-00000100`, `step-00000200`, ...

    Call `save`, `restore`, `due`, `wait` and `close` on all ranks. If you use the store in a
    `with` block, it waits for the pending save at the end of the block.

    Args:
        directory: a directory only for this run, on a disk that all ranks share. The store
            creates it.
        keep: the number of newest checkpoints to keep, not counting a pending save. None keeps
            all.
        keep_best: the name of a metric. The store also keeps the best of its checkpoints by
            this metric. If no checkpoint has the metric when the store removes checkpoints, a
            line on stderr says so.
        best_is: whether the "min" or the "max" of that metric is best.
        frozen: "write" or "hash", as in `af.save`. "hash" does not write parameters that were
            never trained.
        every: how often a checkpoint is `due`: a number of updates, or a `timedelta`. With
            None, you decide when to call `save`, and `due` raises an error.
        async_: whether to write in the background. Then `save` returns after it has copied the
            tensors to host memory. If the write fails, `wait`, `close` or the next `save`
            raises the error; that `save` still starts its own save. Only one save is pending at
            a time, and each rank must write its part within the world's timeout.
        mirror: a URL of fsspec, such as "s3://bucket/run" (extra `accelfn[remote]`). After each
            commit, rank 0 copies the new checkpoint there, and removes what the store has
            removed. `restore` first copies the newest checkpoint, or that of `step`, from there
            if the directory does not have it.

    Law: after a crash at any moment, `latest` is complete. It is the last checkpoint that
    `save` or `wait` confirmed, or a newer one. The store removes no checkpoint before it has
    read and verified a newer one.

    Cost: with `async_`, a save pauses training while the tensors are copied to host memory. The
    next save reuses this memory. Without `async_`, training pauses until the files are written.

    Raises:
        ArgumentError: an option has an invalid value.
        CheckpointWriteError: the directory cannot be created or written to.

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
        best_is: Literal["min", "max"] = "min",
        frozen: Literal["write", "hash"] = "write",
        every: int | timedelta | None = None,
        async_: bool = True,
        mirror: str | None = None,
    ) -> None:
        """Create the directory, and check that this process can write to it."""
        check_options(
            keep=keep, keep_best=keep_best, best_is=best_is, every=every, mirror=mirror
        )
        check_frozen(frozen)
        path = as_path("af.CheckpointStore(directory)", directory, "a directory")
        self.directory = path.absolute()
        self.keep, self.keep_best, self.best_is = keep, keep_best, best_is
        self.frozen, self.every, self.async_ = frozen, every, async_
        self._mirror = None if mirror is None else Mirror(mirror)
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
            CheckpointError: the directory was deleted after the store was created.
        """
        if not arguments.is_directory(self.directory):
            msg = (
                f"{self.directory} and its checkpoints were deleted after the CheckpointStore"
                " was created. To start again, create the store again."
            )
            raise CheckpointError(msg)
        return manifest.steps_in(self.directory)

    @property
    def latest(self) -> Path | None:
        """The path of the newest checkpoint; None if the store is empty."""
        steps = self.steps
        return self.directory / manifest.name_of(steps[-1]) if steps else None

    @property
    def best(self) -> Path | None:
        """The path of the best checkpoint by `keep_best`; None if no checkpoint has the metric.

        Raises:
            ArgumentError: the store was created without `keep_best`.
        """
        if self.keep_best is None:
            msg = "af.CheckpointStore.best: the store has no metric. Create it with keep_best=."
            raise ArgumentError(msg)
        steps = best_of(self.directory, self.keep_best, self.best_is)
        return self.directory / manifest.name_of(steps[0]) if steps else None

    def due(self, state: Given) -> bool:
        """Return whether to save now; the result is the same on all ranks.

        If you pass a dict of several states, the step of the first state counts.

        Cost: none if `every` is a number of updates. If `every` is a time, a broadcast, because
        the clock of rank 0 decides.

        Raises:
            ArgumentError: the store was created without `every`.
        """
        state, _ = states_of("store.due(state)", state)
        if self.every is None:
            msg = "af.CheckpointStore.due: the store has no period. Create it with every=."
            raise ArgumentError(msg)
        if state.step == 0:
            return False
        if isinstance(self.every, int):
            return state.step % self.every == 0
        over = time.monotonic() - self._last_saved >= self.every.total_seconds()
        return bool(broadcast_object(over, state.world, label="store: due"))

    @explain_call_errors
    def save(self, state: Given, *, metrics: Mapping[str, float] | None = None) -> Path:
        """Save a state as the checkpoint of its step, and return the checkpoint's path.

        Args:
            state: the state, which is not donated. With `async_`, you can pass it to the next
                step at once. You can also pass a dict of several states, as to `af.save`. Then
                the checkpoint has the step of the first state.
            metrics: numbers to save with the checkpoint, equal on all ranks. If they differ,
                the store saves those of rank 0, and an `AccelfnWarning` shows the difference.

        Cost: see the store. If runs that were killed have left too many checkpoints, the first
        save of the next run reads the newest checkpoint and removes the older ones.

        Raises:
            CheckpointWriteError: this save failed on some rank; or, with `async_`, the
                previous save failed, and this save has started nevertheless. The message names
                the rank, its error and the newest checkpoint.
            PeerFailedError: a rank failed, left or did not arrive in time.
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
            for name, member in states.items():
                content = contents_of(member, self.frozen, metrics=numbers)
                if self.async_:
                    copies = self._buffers[name].copies_of(content.tensors)
                    content = attrs.evolve(content, tensors=copies)
                contents[name] = content
            self._begin(job)
            return json.dumps(numbers)

        write = partial(self._write, job, contents)
        try:
            texts = job.run_on_all(exchange, Phase.BEGIN, begin)
            # ranks will communicate by files in the directory
            if self.async_ and is_first:
                job.run_on_all(exchange, Phase.FIND, partial(commit.check_seen, job))
            if self.async_:
                patience = state.world.connection.timeout(state.world.device)
                pending.writing = Writing(job, write, patience=patience)
                # start only after the assignment of `pending.writing`. Otherwise, after an
                # interrupt in between, the next save would overwrite buffers that are being
                # written
                pending.writing.start()
            else:
                write(exchange)
        except CheckpointWriteError as error:
            if job.rank == 0 and self._lock is not None:
                close_talk(job)
            too = "" if earlier is None else str(earlier)
            raise self._with_newest(error, too) from error.__cause__
        self._last_saved = time.monotonic()
        if job.rank == 0:
            check_numbers(texts)
        if earlier is not None:
            message = f"The save of step {job.step} was started nevertheless"
            raise self._with_newest(earlier, message) from earlier.__cause__
        return job.final

    def wait(self) -> None:
        """Wait until the pending save is complete.

        Raises:
            CheckpointWriteError: the save failed on some rank.
            PeerFailedError: a rank failed, left or did not arrive in time.
        """
        self._wait(None)

    @explain_call_errors
    def restore(
        self, state: States, *, step: int | None = None, allow: Sequence[str] = ()
    ) -> States:
        """Load the newest checkpoint, or the checkpoint of a step; call it on all ranks.

        If the store has no checkpoint, this returns the given state.

        Args:
            state: the state to load into, as in `af.load`. For states that were saved together,
                pass a dict of all of them.
            step: the step of the checkpoint; None for the newest checkpoint.
            allow: the differences to accept, as in `af.load`.

        Raises:
            CheckpointError: the checkpoint cannot be loaded, or the step has no checkpoint. If
                the checkpoint is damaged, the message names the newest undamaged one.
        """
        world = states_of("store.restore(state)", state)[0].world
        self._wait(world)
        steps = self._steps_on_all(world, step)
        while steps:
            chosen = steps[-1] if step is None else step
            folder = self.directory / manifest.name_of(chosen)
            result: States | None = None
            failure, text = CheckpointError(), ""
            try:
                result = load(state, folder, allow=allow)
            except CheckpointError as error:
                failure, text = error, "" if files.is_there(folder) else "gone"
            texts = gather_text(text, world, label="store: restored")
            if any(texts) and step is None:
                steps = self._steps_on_all(world, step)
                if steps and steps[-1] != chosen:
                    continue  # a running job has saved a newer checkpoint in the meantime
            if result is not None:
                return result
            older = [step for step in steps if step < chosen]
            if older and isinstance(failure, CheckpointCorruptError):
                failure.add_note(self._how_to_continue(older))
            raise failure
        return state

    def close(self) -> None:
        """Wait for the pending save, and unlock the directory for other jobs."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        """Close the store; after an error in the block, do not wait for other ranks."""
        if kind is None:
            self.close()
            return
        hurry = isinstance(error, PeerFailedError)
        if (failure := self._pending.abandon(hurry=hurry)) is not None:
            sys.stderr.write(f"accelfn: {failure}\n")
        self._release()

    def _begin(self, job: Save) -> None:
        """On rank 0, lock and clean the store's directory, and create those for the files."""
        if job.rank == 0:
            is_first = self._lock is None
            self._take_lock()
            for path in self.directory.glob(".tmp-*"):
                message = f"accelfn: removing {path}, left by an interrupted save\n"
                sys.stderr.write(message)
                files.remove(path)
            if is_first:
                self._retention.before()
            if arguments.exists(job.final):
                msg = (
                    f"{job.final} already exists: the store has a checkpoint of this step. Save"
                    " after the next update, or use a store in another directory."
                )
                raise CheckpointError(msg)
            if self.async_:
                files.create(talk_directory(job.final))
        commit.begin(job)

    def _write(
        self, job: Save, contents: Mapping[str, Contents], exchange: commit.Exchange
    ) -> None:
        """Write and commit a checkpoint; every save of this store calls this on all ranks.

        Without `async_`, `save` calls this method. With `async_`, a background thread calls it,
        and `wait`, `close` or the next `save` raises its error on all ranks.
        """
        act = partial(self._after_commit, job)
        try:
            commit.write(job, contents, exchange)
        except BaseException as error:  # a rank failed, perhaps after the commit
            if job.rank == 0 and files.is_there(job.final):
                try:
                    act()
                except Exception as own:  # noqa: BLE001 - `error` is raised instead
                    error.add_note(f"{job.not_finished}: {commit.format_error(own)}")
            raise
        job.run_on_all(None if self.async_ else exchange, Phase.FINISH, act)

    def _after_commit(self, job: Save) -> None:
        """On rank 0, verify the new checkpoint and remove old checkpoints.

        All ranks call this after each commit. If another rank fails after the commit, only rank
        0 calls it, so it must not call collectives. If it raises an error, the save raises
        `CheckpointWriteError`, and the checkpoint is kept unless it is damaged.
        """
        if job.rank == 0:
            self._retention.after(job.step)
            if self._mirror is not None:
                self._mirror.copy(self.directory)

    def _wait(self, world: World | None) -> None:
        error = self._join_pending(world)
        if error is not None:
            raise self._with_newest(error) from error.__cause__

    def _join_pending(self, now: World | None = None) -> CheckpointWriteError | None:
        """Wait for the pending save, and return its error, which is the same on all ranks.

        Args:
            now: the world of the current state. It is a new world after ranks have regrouped.

        Raises:
            PeerFailedError: a rank has failed.
        """
        if now is None or not self._pending.is_of_others(now):
            return self._pending.finish()
        error = self._pending.abandon()
        if not now.is_main:  # another process is rank 0, and will lock the directory
            self._release()
        return self._pending.rejoin(now, error)

    def _steps_on_all(self, world: World, step: int | None) -> list[int]:
        """Return the steps that rank 0 finds in the directory; this is a collective.

        Raises:
            CheckpointError: rank 0 cannot list the steps, or the requested step is missing.
        """
        answer: list[int] | str | None = None
        cause: Exception | None = None
        if world.is_main:
            try:
                answer = self._list_steps(step)
            except Exception as error:  # noqa: BLE001 - other ranks wait in the broadcast
                answer, cause = commit.format_error(error), error
        steps = broadcast_object(answer, world, label="store: restore")
        if isinstance(steps, str):
            msg = f"{self.directory}: cannot find the newest checkpoint: {steps}"
            raise CheckpointError(msg) from cause
        if step is not None and step not in steps:
            msg = f"{self.directory} has no checkpoint of step {step}, only of: {steps or 'none'}."
            raise CheckpointError(msg)
        return steps

    def _list_steps(self, step: int | None) -> list[int] | str:
        """Return the steps of the store, or a text that says why the newest cannot be found.

        Args:
            step: the requested step; None for the newest.
        """
        if self._mirror is not None:
            self._mirror.fetch(self.directory, step)
        steps = list(self.steps)
        newest = steps[-1] if steps else -1
        links = {
            link_step: path
            for path in self.directory.iterdir()
            if (link_step := manifest.step_of(path)) is not None
            and link_step > newest
            and path.is_symlink()
            and not arguments.exists(path)
        }
        if not links or step is not None:
            return steps
        broken = links[max(links)]
        link = f"{broken} is a broken link to {broken.readlink()}"
        return f"{link}, newer than all checkpoints. {self._how_to_continue(steps)}"

    def _how_to_continue(self, steps: Sequence[int]) -> str:
        """Return a sentence that says how to continue from the newest undamaged checkpoint.

        Cost: reads that checkpoint, and the damaged checkpoints of newer steps.
        """
        for step in reversed(steps):
            with suppress(CheckpointError):
                manifest.verify(self.directory / manifest.name_of(step))
                return (
                    f"The newest intact checkpoint is that of step {step}. Continue from it with"
                    f" store.restore(state, step={step})."
                )
        return "No older checkpoint is intact. Remove this one to start training again."

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

    def _with_newest(
        self, error: CheckpointWriteError, more: str = ""
    ) -> CheckpointWriteError:
        """Return the error with sentences about the newest checkpoint added to its message."""
        try:
            newest = self.latest
        except (OSError, CheckpointError) as failed:
            note = f"The checkpoints cannot be listed ({commit.format_error(failed)})"
        else:
            note = f"The newest checkpoint is {newest}"
            note = note if newest else "No checkpoint exists"
        parts = (part.removesuffix(".") for part in (str(error), more, note) if part)
        return type(error)(" ".join(f"{part}." for part in parts))
