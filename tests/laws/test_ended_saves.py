# SPDX-License-Identifier: Apache-2.0
"""Saves that are ended in the middle, by a signal or an interrupt, leave no more than is kept."""

import linecache
import sys
import threading
import time
from contextlib import redirect_stderr, suppress
from io import StringIO
from types import FrameType
from typing import Any, Self
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.internals import background, commit, store
from tests.laws.disks import lent
from tests.laws.states import is_of, state_of


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
            suppress(Killed, af.errors.CheckpointWriteError),
        ):
            saved.save(state_of(runs + 1))
            saved.wait()
        saved.close()
        if rotten:
            assert saved.steps == tuple(range(1, runs + 1))
            words = (
                "no old checkpoint was removed",
                f"because {newest} is damaged: {newest}",
            )
            assert all(each in said.getvalue() for each in words) == (runs > kept)
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
    if (
        not linecache.getline(frame.f_code.co_filename, line)
        .lstrip()
        .startswith("with ")
    ):
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
    with (
        lent() as root,
        af.CheckpointStore(root) as saved,
        InterruptedAt(None) as lines,
    ):
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
