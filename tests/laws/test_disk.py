# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the disk, the process or the machine, nothing that was saved is lost."""

import errno
import math
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import accelfn as af
from tests.laws.disks import (
    Disk,
    PowerCut,
    Tree,
    after_restart,
    every_left,
    laid_out,
    lent,
    watched,
)
from tests.laws.kills import killing
from tests.laws.states import is_of, state_of, to_save

WAYS = {"sync": (False, False), "async": (True, False), "joint": (False, True)}
by_way = pytest.mark.parametrize(("async_", "joint"), WAYS.values(), ids=WAYS)


def saved_until(disk: Disk, cut_at: int, *, async_: bool, joint: bool) -> list[int]:
    """Save steps 1, 2 and 3 until the power fails; return those said to be saved."""
    said: list[int] = []
    disk.happens[cut_at] = disk.cut
    with watched(disk):
        try:
            store = af.CheckpointStore(disk.root / "run", keep=1, async_=async_)
            for step in (1, 2, 3):
                store.save(to_save(step, joint=joint))
                store.wait()
                said.append(step)
            store.close()
        except (PowerCut, af.errors.CheckpointWriteError):
            assert disk.off
    return said


def failing(_: str) -> None:
    """Fail as a disk does."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def failed_in(store: af.CheckpointStore, step: int, *, joint: bool) -> bool:
    """Save a step; return whether it failed."""
    try:
        store.save(to_save(step, joint=joint))
        store.wait()
    except af.errors.CheckpointWriteError:
        return True
    return False


def checkpoints(tree: Tree) -> dict[int, Tree]:
    """Return what has a checkpoint's name."""
    run = tree.get("run", {})
    return {int(n[5:]): inside for n, inside in run.items() if n.startswith("step-")}


def flushed_twice(acts: list[str]) -> list[str]:
    """Return the files that were flushed again after a flush of theirs, which may have failed."""
    flushed, twice = set[str](), list[str]()
    for act in acts:
        kind, _, path = act.partition(" ")
        if kind == "create":
            flushed.discard(path)
        elif kind == "flush" and path.endswith((".safetensors", ".json")):
            twice += [path] if path in flushed else []
            flushed.add(path)
    return twice


class Loader:
    """Loads what may be left, and each state of the disk once."""

    def __init__(self, root: Path, *, joint: bool) -> None:
        self.root, self.joint, self.known = root, joint, dict[Any, bool]()

    def loads(self, step: int, tree: Tree) -> bool:
        key = (step, repr(tree))
        if key not in self.known:
            folder = self.root / str(len(self.known))
            laid_out(tree, folder)
            self.known[key] = is_of(folder, step, joint=self.joint)
        return self.known[key]


@by_way
def test_every_crash_leaves_what_was_saved(async_: bool, joint: bool) -> None:
    """At each act, whatever part of what was not flushed is lost, the last save is there."""
    crashes = states = 0
    with lent() as real:
        loader, ended = Loader(real, joint=joint), False
        while not ended:
            root = real / f"disk {crashes}"
            root.mkdir()
            disk = Disk(root)
            said = saved_until(disk, crashes, async_=async_, joint=joint)
            ended, crashes = not disk.off, crashes + 1
            for tree in every_left(disk):
                states += 1
                there = checkpoints(tree)
                assert max(there, default=0) >= max(said, default=0)
                assert all(loader.loads(step, each) for step, each in there.items())
                after_restart(tree)
    assert crashes > 60
    assert states > 2000


@by_way
def test_every_error_is_told_or_harmless(async_: bool, joint: bool) -> None:
    """An error at any act leaves the save whole, or absent and said to fail; it can be repeated."""
    told = 0
    with lent() as real:
        for at in range(200):
            root = real / f"disk {at}"
            root.mkdir()
            disk = Disk(root)
            with watched(disk):
                store = af.CheckpointStore(disk.root / "run", keep=9, async_=async_)
                store.save(to_save(1, joint=joint))
                store.wait()
                planned = len(disk.acts) + at
                disk.happens[planned] = failing
                failed = failed_in(store, 2, joint=joint)
                if len(disk.acts) <= planned:  # there are no more acts
                    assert not failed
                    break
                told += failed
                assert store.steps == ((1,) if failed else (1, 2))
                # where ranks agreed is removed by the next save, if it could not be
                left = store.directory.glob(".tmp-step*")
                assert all(path.suffix == ".talk" for path in left)
                if failed:
                    assert not failed_in(store, 2, joint=joint)
                store.close()
            assert not flushed_twice(disk.acts[planned - at :])
            for step in store.steps:
                folder = store.directory / f"step-{step:08d}"
                assert is_of(folder, step, joint=joint)
    assert at > 10
    assert told > 5


class Histories(RuleBasedStateMachine):
    """Saves, crashes, errors, rot and restarts, in any order; a dict is what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.lent, self.watching = ExitStack(), ExitStack()
        self.real = self.lent.enter_context(lent())
        self.there: dict[int, float | None] = {}  # the metric by step
        self.rotten: set[int] = set()
        self.unrated: set[int] = set()  # whose manifest is rotten
        self.known: dict[int, dict[str, bytes]] = {}  # what was looked at, by step
        self.step = self.committed = 0
        self.least = 3
        self.running: int | None = None

    def teardown(self) -> None:
        self.watching.close()
        with self.lent, suppress(af.errors.Error):
            if hasattr(self, "store"):
                self.store.close()

    @initialize()
    def first(self) -> None:
        self.on_disk({})
        self.with_store(keep=2, best=None, async_=False)

    def on_disk(self, tree: Tree) -> None:
        """Go on with what a crash has left."""
        self.watching.close()
        root = Path(self.real / f"disk {len(list(self.real.iterdir()))}")
        laid_out(tree, root)
        self.disk = Disk(root)
        self.watching = ExitStack()
        self.watching.enter_context(watched(self.disk))

    def with_store(self, *, keep: int, best: str | None, async_: bool) -> None:
        before = set((self.disk.root / "run").glob(".tmp-*"))
        self.store = af.CheckpointStore(
            self.disk.root / "run", keep=keep, keep_best=best, async_=async_
        )
        self.least = min(self.least, keep)
        assert before == self.leftovers()

    def retained(self) -> dict[int, float | None]:
        """Return what is kept of what is there: the newest, and the best of all."""
        steps = sorted(self.there)
        kept = set(steps[-self.store.keep :])
        if self.store.keep_best:
            rated = {
                s: self.there[s]
                for s in steps
                if self.there[s] is not None and s not in self.unrated
            }
            kept |= set(sorted(rated, key=lambda s: (rated[s], s))[:1])
        return {s: self.there[s] for s in steps if s in kept}

    def landed(self) -> None:
        """Wait for the save that is under way; it is there, and so is all that is kept."""
        self.store.wait()
        if self.running is not None:
            self.there = self.retained()
            self.committed += 1
            self.running = None
            assert self.leftovers() == set()

    def leftovers(self) -> set[Path]:
        return set(self.store.directory.glob(".tmp-*"))

    def begins(self, metric: float | None) -> dict[str, float] | None:
        if self.running is not None:
            self.landed()
        self.step += 1
        self.metric = None if metric is None or math.isnan(metric) else metric
        return None if metric is None else {"loss": metric}

    @rule(metric=st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0, math.nan])))
    def save(self, metric: float | None) -> None:
        """Nothing happens to it."""
        metrics = self.begins(metric)
        self.store.save(state_of(self.step), metrics=metrics)
        self.there[self.step], self.running = self.metric, self.step
        if not self.store.async_:
            self.landed()

    @rule(
        at=st.integers(0, 40),
        kept=st.integers(0, 2**32),
        keep=st.integers(1, 3),
        best=st.sampled_from([None, "loss"]),
        async_=st.booleans(),
    )
    def save_and_crash(self, at, kept, keep, best, async_) -> None:
        """The power fails at an act, or behind the last; another process goes on."""
        metrics, said = self.begins(1.0), False
        self.disk.happens[len(self.disk.acts) + at] = self.disk.cut
        try:
            self.store.save(state_of(self.step), metrics=metrics)
            self.store.wait()
            said = True
        except (PowerCut, af.errors.CheckpointWriteError):
            assert self.disk.off
        self.disk.off = True
        before, tidied = dict(self.there), self.retained()
        self.there[self.step] = self.metric
        after = self.retained()
        choose = Random(kept).randrange if kept else (lambda _: 0)  # noqa: S311 - drawn
        self.on_disk(after_restart(self.disk.left(choose)))
        self.with_store(keep=keep, best=best, async_=async_)
        left = set(self.store.steps)
        if self.step in left:
            assert set(after) <= left <= set(before) | {self.step}
            self.committed += 1
        else:
            assert not said
            assert set(tidied) <= left <= set(before)
        self.there = {step: self.there[step] for step in left}

    @rule(at=st.integers(0, 40), number=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def save_and_fail(self, at: int, number: int) -> None:
        """An act fails, once; the same step can be saved again."""
        metrics = self.begins(1.0)

        def fails(_: str) -> None:
            raise OSError(number, os.strerror(number))

        before, planned = self.leftovers(), len(self.disk.acts) + at
        self.disk.happens[planned] = fails
        try:
            self.store.save(state_of(self.step), metrics=metrics)
            self.store.wait()
        except af.errors.CheckpointWriteError as error:
            assert f"step {self.step}" in str(error)  # noqa: PT017 - it may fail
            assert "rank 0" in str(error)  # noqa: PT017 - it may fail
            assert os.strerror(number) in str(error)  # noqa: PT017 - it may fail
            latest = self.store.latest
            assert str(latest or "No checkpoint exists") in str(error)  # noqa: PT017 - it may fail
            assert set(self.retained()) <= set(self.store.steps) <= set(self.there)
            self.there = {step: self.there[step] for step in self.store.steps}
            left = {path for path in self.leftovers() - before if "step" in path.name}
            assert left == set()
            self.step -= 1
        else:
            self.there[self.step] = self.metric
            kept = self.retained()
            assert set(kept) <= set(self.store.steps) <= set(self.there)
            self.there = {step: self.there[step] for step in self.store.steps}
            self.committed += 1
        finally:
            self.disk.happens.pop(planned)

    @rule(
        keep=st.integers(1, 3),
        best=st.sampled_from([None, "loss"]),
        async_=st.booleans(),
    )
    def restart(self, keep: int, best: str | None, async_: bool) -> None:
        """Close, and let another store go on."""
        self.landed()
        self.store.close()
        self.with_store(keep=keep, best=best, async_=async_)

    @precondition(lambda self: set(self.there) - self.rotten)
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A bit of a checkpoint changes."""
        self.landed()
        assert self.store.steps == tuple(sorted(self.there))
        step = data.draw(st.sampled_from(sorted(set(self.there) - self.rotten)))
        folder = self.store.directory / f"step-{step:08d}"
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        at = data.draw(st.integers(0, path.stat().st_size - 1))
        self.disk.rot(path, at)
        self.rotten.add(step)
        if path.name == "manifest.json":
            self.unrated.add(step)

    @rule()
    def restore(self) -> None:
        """The newest is what is restored, or what is wrong with it is said."""
        self.landed()
        if not self.there:
            assert self.store.restore(state_of(0)).step == 0
        elif max(self.there) in self.rotten:
            with pytest.raises(af.errors.CheckpointCorruptError):
                self.store.restore(state_of(0))
        else:
            assert max(self.there) == self.store.restore(state_of(0)).step

    @invariant()
    def nothing_is_lost(self) -> None:
        """All that must be there is there, and can be loaded if it did not rot."""
        if not hasattr(self, "store") or self.running is not None:
            return
        assert self.store.steps == tuple(sorted(self.there))
        assert len(self.there) >= min(self.least, self.committed)
        for step in self.there:
            folder = self.store.directory / f"step-{step:08d}"
            content = {each.name: each.read_bytes() for each in folder.iterdir()}
            if self.known.get(step) == content:
                continue
            if step in self.rotten:
                with pytest.raises(af.errors.CheckpointCorruptError):
                    is_of(folder, step)
            else:
                assert is_of(folder, step)
            self.known[step] = content


many = settings(max_examples=max(20, settings().max_examples // 10))


@pytest.mark.slow
def test_a_killed_process_loses_nothing():
    """Killed at any act, before it or behind, a run finds all that was said to be saved."""

    @many
    @given(
        kills=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1),
        async_=st.booleans(),
    )
    def finds_all(kills: list[tuple[int, bool]], async_: bool) -> None:
        with lent() as real:
            root, said = real / "run", real / "said"
            root.mkdir()
            said.touch()
            for at, late in kills[:3]:
                assert kill(root, said, at, late, async_) == signal.SIGKILL
            store = af.CheckpointStore(root, keep=1)
            told = [0, *map(int, said.read_text().split())]
            assert max(store.steps, default=0) >= max(told)
            assert all(is_of(root / f"step-{step:08d}", step) for step in store.steps)
            step = max(store.steps, default=0) + 1
            store.save(state_of(step))  # the lock of the dead is taken over
            store.close()
            assert [path.name for path in root.iterdir()] == [f"step-{step:08d}"]

    with killing() as kill:
        finds_all()


some = settings(stateful_step_count=20)


def test_no_history_loses_a_checkpoint():
    """After any saves, crashes, errors, rot and restarts, what retention keeps is there."""
    run_state_machine_as_test(Histories, settings=some)
