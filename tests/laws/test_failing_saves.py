# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a save, all ranks are told whose fault it was, and the next is tried.

Saves that are ended in the middle, by a signal or an interrupt, leave no more than is kept.
"""

import errno
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import CheckpointCorruptError, CheckpointWriteError, Error
from accelfn.testing import simulate
from tests.internals import background, commit, files, gather_text, manifest, store
from tests.laws.disks import lent
from tests.laws.states import base, is_of, state_of, to_save

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError: boom": lambda: ValueError("boom"),
    "MemoryError": MemoryError,
    "KeyError: 'a'": lambda: KeyError("a"),
    "OSError": OSError,
    "SystemExit: 3": lambda: SystemExit(3),
    "bad": lambda: CheckpointCorruptError("bad"),
}
PLACES: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "begin": (store, "contents_of", lambda state, *_: state.world.rank),
    "describe its contents": (commit, "_describe_states", lambda job, *_: job.rank),
    "write its file": (files, "write_tensors", lambda path, *_: int(path.name[5:10])),
    "write the manifest": (files, "rename", lambda *_: 0),
    "finish": (manifest, "verify", lambda *_: 0),
    "divide": (commit, "divide_writes", lambda _contents, _ranks, rank: rank),
}


def causes(error: BaseException | None) -> list[BaseException]:
    """Return what an error is said to come of."""
    return [] if error is None else [error, *causes(error.__cause__)]


@given(
    size=st.integers(1, 3),
    rank=st.integers(0, 2),
    what=st.sampled_from(sorted(PLACES)),
    error=st.sampled_from(sorted(ERRORS)),
    async_=st.booleans(),
    joint=st.booleans(),
)
@example(
    size=1, rank=0, what="write its file", error="OSError", async_=False, joint=False
)
@example(size=2, rank=0, what="finish", error="bad", async_=True, joint=False)
@example(size=2, rank=0, what="finish", error="SystemExit: 3", async_=True, joint=False)
@example(
    size=2, rank=1, what="divide", error="ValueError: boom", async_=True, joint=False
)
def test_a_save_names_whose_error_it_was(size, rank, what, error, async_, joint):
    """B2: any error on a rank is told to all with its kind, and that rank has it as cause.

    Nothing is left of the save, nor of what is not what was written; a checkpoint that could
    not be read for another reason is there, and said to be.
    """
    if (not async_ or what == "begin") and error.startswith("SystemExit"):
        return  # such an error is that rank's own, and its end the others'
    if not async_ and what == "divide":
        return
    stopped = what == "divide" or error.startswith("SystemExit")
    of_rank_0 = what in ("write the manifest", "finish")
    is_there = what == "finish" and error != "bad"
    rank = 0 if of_rank_0 else rank % size
    owner, name, rank_of = PLACES[what]
    raised, act, told = ERRORS[error](), getattr(owner, name), list[str]()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if rank_of(*args) == rank:
            raise raised
        return act(*args, **kwargs)

    def train(world: af.World) -> None:
        with af.CheckpointStore(root, async_=async_) as saved:
            with pytest.raises(CheckpointWriteError) as caught:  # noqa: PT012 - either
                saved.save(to_save(1, world, joint=joint))
                saved.wait()
            told.append(str(caught.value))
            assert (raised in causes(caught.value)) == (world.rank == rank)
            gather_text("", world, label="failed")
            assert list(root.glob(".tmp-*")) == []
            assert saved.steps == ((1,) if is_there else ())
            gather_text("", world, label="told")
            if world.is_main:
                patches.close()
            gather_text("", world, label="mended")
            saved.save(to_save(2, world, joint=joint))
        assert saved.steps[-1] == 2

    with lent() as root, ExitStack() as patches:
        patches.enter_context(mock.patch.object(owner, name, fails))
        simulate(size, train)
    assert len(told) == size
    assert len(set(told)) == 1
    how = "failed" if stopped or is_there else f"could not {what}"
    saved = "saved, but the work after the save failed" if is_there else "not saved"
    assert f"step 1 was {saved}: rank {rank} {how}: {error}. " in told[0]


@contextmanager
def first_fails(number: int) -> Iterator[None]:
    """Have files of step 1 fail to be written, with an error of the system's, and no others."""
    write = files.write_tensors

    def full(path: Path, *args: Any) -> Any:
        if "step-00000001" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return write(path, *args)

    with mock.patch.object(files, "write_tensors", full):
        yield


@given(size=st.integers(1, 3), number=st.sampled_from([errno.ENOSPC, errno.EIO]))
def test_a_failed_save_does_not_cost_the_next(size, number):
    """B6: the disk is full, then free: the next save is made, and says what went before.

    If it is the last, to close the store tells of it, and another store may write there.
    """
    reason = os.strerror(number)
    words = rf"step 1 was not saved: .*{reason}.* of step 2 was started"

    def train(world: af.World) -> None:
        saved = af.CheckpointStore(root)
        saved.save(state_of(1, world))
        with pytest.raises(CheckpointWriteError, match=words):
            saved.save(state_of(2, world))
        saved.save(state_of(1, world))
        with pytest.raises(CheckpointWriteError, match=reason):
            saved.close()
        with af.CheckpointStore(root) as other:
            other.save(state_of(3, world))

    base()
    with lent() as root, first_fails(number):
        simulate(size, train)
        assert af.CheckpointStore(root).steps == (2, 3)
        assert all(is_of(root / f"step-0000000{step}", step) for step in (2, 3))


def test_two_failed_saves_are_both_told():
    """B6: so that neither is lost in the other."""

    def full(path: Path, *_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with lent() as root, af.CheckpointStore(root) as saved:
        with mock.patch.object(files, "write_tensors", full):
            saved.save(state_of(1))
            refuse = mock.patch.object(files, "create", full)
            with refuse, pytest.raises(CheckpointWriteError) as caught:
                saved.save(state_of(2))
        assert "step 2 was not saved: rank 0 could not begin" in str(caught.value)
        assert "step 1 was not saved: rank 0 could not write" in str(caught.value)
        saved.save(state_of(3))


ODD = "step-٠٠٠٠٠٠٣٤", "step--0000034", "step-00000034.bak", "Step-00000034", "step-"
FOREIGN = st.one_of(
    st.from_regex(r"step-[0-9]{1,7}", fullmatch=True),
    st.from_regex(r"step-0[0-9]{8,12}", fullmatch=True),
    st.sampled_from(ODD),
)


@given(
    names=st.sets(FOREIGN, min_size=1, max_size=4),
    hollow=st.sets(st.sampled_from(["step-00000000", "step-00000009"])),
    async_=st.booleans(),
)
def test_what_a_store_did_not_write_is_not_its_own(names, hollow, async_):
    """B5: directories of other names, or without a manifest, are none of its checkpoints."""
    with lent() as root:
        for name in names | hollow:
            (root / name).mkdir()
        for name in names:
            (root / name / "manifest.json").write_text("{}")
        with af.CheckpointStore(root, keep=1, async_=async_) as saved:
            assert saved.restore(base()).step == 0
            for step in (1, 2, 3):
                saved.save(state_of(step))
            assert saved.restore(base()).step == 3
        assert saved.steps == (3,)
        left = {path.name for path in root.iterdir()}
        assert left == {*names, *hollow, "step-00000003"}


@given(stuck=st.sets(st.integers(1, 4), min_size=1), keep=st.integers(1, 2))
def test_what_cannot_be_removed_keeps_nothing_else(stuck: set[int], keep: int) -> None:
    """B5: one checkpoint that cannot be removed is named, and all others are."""
    rename, said = files.rename, StringIO()

    def sticks(path: Path, new: Path) -> None:
        if path.name.startswith("step-") and int(path.name[5:]) in stuck:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rename(path, new)

    with lent() as root, af.CheckpointStore(root, keep=keep, async_=False) as saved:
        with mock.patch.object(files, "rename", sticks), redirect_stderr(said):
            for step in range(1, 7):
                saved.save(state_of(step))
            newest = {*range(7 - keep, 7)}
            assert saved.steps == tuple(sorted({*stuck, *newest}))
        words = "could not be removed; the next save tries again"
        assert all(f"step-{step:08d} {words}" in said.getvalue() for step in stuck)
        saved.save(state_of(7))
        assert saved.steps == tuple(range(8 - keep, 8))


@given(
    phase=st.sampled_from(commit.Phase), keep=st.integers(1, 2), async_=st.booleans()
)
@example(phase=commit.Phase.COMMIT, keep=1, async_=True)
def test_a_store_keeps_no_more_when_another_rank_ends(phase, keep, async_):
    """B2: if rank 1 ends anywhere in a save, the store keeps as many as ever, all complete."""
    run = commit.Save.run_on_all

    def end(job: commit.Save, exchange: Any, at: commit.Phase, *args: Any) -> Any:
        if at is phase and job.rank == 1:
            raise SystemExit(3)
        return run(job, exchange, at, *args)

    def train(world: af.World) -> None:
        with af.CheckpointStore(root, keep=keep, async_=async_) as saves:
            saves.save(state_of(3, world))

    with lent() as root:
        with af.CheckpointStore(root, keep=keep) as saved:
            for step in (1, 2):
                saved.save(state_of(step))
        with (
            redirect_stderr(StringIO()),
            mock.patch.object(commit.Save, "run_on_all", end),
            suppress(Error, SystemExit),
        ):
            simulate(2, train)
        assert len(saved.steps) == keep
        assert saved.steps[-1] in {2, 3}
        assert all(is_of(root / f"step-{step:08d}", step) for step in saved.steps)


class Killed(BaseException):
    """The process is gone."""


@given(
    keep=st.integers(1, 3),
    runs=st.integers(1, 6),
    best=st.booleans(),
    rotten=st.booleans(),
    async_=st.booleans(),
)
def test_runs_that_are_killed_leave_no_more_than_is_kept(
    keep, runs, best, rotten, async_
):
    """B7: each killed behind its rename: the next tidies up, if the newest is whole."""

    kept, name = keep + best, "loss" if best else None
    with lent() as root:
        with af.CheckpointStore(root, keep=None) as saved:
            for step in range(1, runs + 1):
                saved.save(state_of(step), metrics={"loss": float(step)})
        newest = root / f"step-{runs:08d}"
        if rotten:
            file = next(newest.glob("*.safetensors"))
            file.write_bytes(file.read_bytes()[:-1])
        saved = af.CheckpointStore(root, keep=keep, keep_best=name, async_=async_)
        with (
            redirect_stderr(StringIO()) as said,
            mock.patch.object(commit, "write", mock.Mock(side_effect=Killed)),
            suppress(Killed, CheckpointWriteError),
        ):
            saved.save(state_of(runs + 1))
            saved.wait()
        saved.close()
        if rotten:
            assert saved.steps == tuple(range(1, runs + 1))
            told, why = said.getvalue(), f"because {newest} is damaged: {newest}"
            is_told = "no old checkpoint was removed" in told and why in told
            assert is_told == (runs > kept)
        else:
            first = {1} if best else set[int]()
            assert saved.steps == tuple(sorted({*range(1, runs + 1)[-keep:], *first}))
            assert all(is_of(root / f"step-{step:08d}", step) for step in saved.steps)


def leaves_a_block(frame: FrameType, entered: set[int]) -> bool:
    """Whether a `with` is about to call its `__exit__`, before which no signal is looked for.

    A tracer that raised there would leave threading's own lock taken, and no thread of this
    process would ever start again.
    """
    line = frame.f_lineno
    text = linecache.getline(frame.f_code.co_filename, line)
    if not text.lstrip().startswith("with "):
        return False
    leaves = line in entered
    entered.add(line)
    return leaves


class InterruptedAt:
    """Raises KeyboardInterrupt at a line of a store, or of a thread's start, as Ctrl-C may."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0
        self.files = {background.__file__, store.__file__, threading.__file__}

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        # what a tracer raises among its `except`s stays the thread's context for good
        handles = code.co_qualname == "Condition.__init__"
        if code.co_filename not in self.files or handles:
            return None
        entered = set[int]()

        def lines(frame: FrameType, event: str, _: object) -> Any:
            if event == "line" and not leaves_a_block(frame, entered):
                self.count += 1
                if self.count - 1 == self.at:
                    raise KeyboardInterrupt
            return lines

        return lines

    def __enter__(self) -> Self:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def lines_of_a_save() -> int:
    with lent() as root, af.CheckpointStore(root) as saved:
        with InterruptedAt(None) as lines:
            saved.save(state_of(1))
        return lines.count


@given(part=st.floats(0, 1, exclude_max=True))
def test_no_interrupt_lets_saves_write_over_each_other(part: float) -> None:
    """B9: Ctrl-C at any line of a save: the next waits for what is being written."""
    write, copies_of = commit.write, background.Buffers.copies_of
    at, written, over = int(part * lines_of_a_save()), list[int](), list[int]()

    def slow(job: commit.Save, *args: Any) -> None:
        written.append(job.step)
        try:
            time.sleep(0.02)
            write(job, *args)
        finally:
            written.remove(job.step)

    def copies(*args: Any) -> Any:
        over.extend(written)
        return copies_of(*args)

    with (
        lent() as root,
        mock.patch.object(commit, "write", slow),
        mock.patch.object(background.Buffers, "copies_of", copies),
    ):
        saved = af.CheckpointStore(root)
        saved.save(state_of(1))
        saved.wait()
        # RuntimeError is what threading's own conditions make of it at some lines
        with suppress(KeyboardInterrupt, RuntimeError), InterruptedAt(at):
            saved.save(state_of(2))
        time.sleep(0.005)  # for a thread to begin
        with redirect_stderr(StringIO()):
            saved.save(state_of(3))
        saved.close()
        assert over == []
        assert {1, 3} <= set(saved.steps)
        assert all(is_of(root / f"step-{step:08d}", step) for step in saved.steps)
        assert list(root.glob(".*")) == []
