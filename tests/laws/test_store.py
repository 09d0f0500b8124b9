# SPDX-License-Identifier: Apache-2.0
"""A store's saves are agreed by all ranks, and are one job's at a time."""

import atexit
import errno
import gc
import json
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from threading import Event
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Terminate, simulate
from tests.internals import Lock, Writing, files, gather_text
from tests.laws.disks import Disk, lent, watched
from tests.laws.states import base, is_of, state_of, to_save
from tests.strategies import differences, runs, tensors

REASONS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO]


HOW = "once", "from then on", "in whatever is asked"


def failing(disk: Disk, number: int, how: str) -> Callable[[str], None]:
    """Return what lets an act fail, all writes from then on, or all that is asked of a disk."""

    def fails(act: str) -> None:
        kind, _, path = act.partition(" ")
        if how == "from then on":
            disk.full = lambda: OSError(number, os.strerror(number))
        disk.broken = how == "in whatever is asked"
        if how == "once" or (kind == "write" and not disk.broken):
            name = () if kind in ("write", "flush") else (str(disk.root / path),)
            raise OSError(number, os.strerror(number), *name)

    return fails


@given(
    size=st.integers(1, 3),
    at=st.integers(0, 50),
    number=st.sampled_from(REASONS),
    how=st.sampled_from(HOW),
    async_=st.booleans(),
    joint=st.booleans(),
)
def test_a_save_that_fails_fails_on_all_ranks(size, at, number, how, async_, joint):
    """A full or broken disk: all are told why, what was there stays, training goes on.

    A disk may break behind the save: it is there then, and said to be.
    """
    said: list[str] = []
    breaks = how == "in whatever is asked"
    number = errno.EIO if breaks else number

    def train(world: af.World) -> None:
        with af.CheckpointStore(disk.root, keep=2, async_=async_) as store:
            store.save(to_save(1, world, joint=joint))
            store.wait()
            if world.is_main:
                happens = failing(disk, number, how)
                disk.happens[len(disk.acts) + at] = happens
            gather_text("", world, label="planned")
            try:
                store.save(to_save(2, world, joint=joint))
                store.wait()
            except (af.errors.CheckpointWriteError, OSError) as error:
                assert isinstance(error, af.errors.CheckpointWriteError)  # noqa: PT017 - not all raise
                said.append(str(error))
            gather_text("", world, label="tried")
            if world.is_main:
                disk.happens.clear()
                disk.full, disk.broken = None, False
                if said and not breaks:
                    assert store.steps == (1,)
                    left = {p.name for p in disk.root.glob(".tmp-*step*")}
                    assert how != "once" or left == set()
            gather_text("", world, label="looked")
            store.save(to_save(3, world, joint=joint))
            store.wait()
            if world.is_main:
                assert store.steps == ((1, 3) if said else (2, 3)) or breaks
                assert is_of(store.latest, 3, joint=joint)

    base()  # which no simulated rank could make
    with lent() as root:
        disk = Disk(root)
        with watched(disk), redirect_stderr(StringIO()):
            simulate(size, train)
    assert len(said) in (0, size)
    for each in said:
        assert "step 2" in each
        if breaks:
            assert os.strerror(number) in each
            behind = "saved, but the work after the save failed"
            assert any(
                f"step 2 was {what}: rank" in each for what in (behind, "not saved")
            )
            continue
        assert any(f"rank {rank} could not" in each for rank in range(size))
        reason = os.strerror(number) in each and str(disk.root / ".") in each
        assert reason or "too full to write the error" in each
        assert "The newest checkpoint is" in each
        assert "step-00000001" in each


def lock_of(**other: object) -> str:
    """Return the text of another process's lock, that lives unless told otherwise."""
    with lent() as root:
        return json.dumps(json.loads(Lock.of(root).text) | other)


def unburied() -> dict[str, object]:
    """Return what a lock says of a child that has ended, for which nobody has waited."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    begun = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]
    atexit.register(os.waitpid, child, 0)
    return {"pid": child, "begun": begun}


HOLDERS = {
    "alive": (lock_of, "process [0-9]+ on .* since 2"),
    "dead": (lambda: lock_of(begun="0"), None),
    "gone": (lambda: lock_of(pid=2**22 + 1), None),
    "not waited for": (lambda: lock_of(**unburied()), None),
    "another host's": (
        lambda: lock_of(host="elsewhere", begun="0"),
        "on elsewhere has written",
    ),
    "cut off": (lambda: lock_of()[:20], "on an unknown host.*remove .*lock"),
    "deep": (lambda: "[" * 100_000, "on an unknown host"),
    "long": (lambda: lock_of(begun="0") + " " * 100_000, "on an unknown host"),
    "an endless number": (lambda: lock_of(pid=float("inf")), "unknown host"),
}


@pytest.mark.parametrize("who", HOLDERS)
def test_one_job_saves_to_a_directory(who):
    """Only of a process that is certainly dead is a lock taken over, and that is said."""
    make, refused = HOLDERS[who]
    with lent() as root:
        (root / ".lock").write_text(make())
        (root / ".tmp-step-00000001").mkdir()
        store = af.CheckpointStore(root, async_=False)
        if refused is None:
            with redirect_stderr(StringIO()) as said:
                store.save(state_of(1))
            assert "taking over" in said.getvalue()
            store.close()
            assert not (root / ".lock").exists()
        else:
            with pytest.raises(af.errors.DirectoryInUseError, match=refused):
                store.save(state_of(1))
            left = sorted(path.name for path in root.iterdir())
            assert left == [".lock", ".tmp-step-00000001"]


@given(st.one_of(st.binary(), st.binary().map(lambda raw: b'{"host": "' + raw)))
def test_a_lock_of_any_bytes_is_somebodys(raw: bytes) -> None:
    """C: whatever a lock's file says, it is read in a moment, and taken for a job's."""
    with lent() as root:
        (root / ".lock").write_bytes(raw)
        with pytest.raises(af.errors.DirectoryInUseError, match=r"remove .*\.lock"):
            af.CheckpointStore(root, async_=False).save(state_of(1))
        assert (root / ".lock").read_bytes() == raw


def test_a_forked_process_holds_no_lock():
    """A child that closes the store that it has from its parent takes nothing from it."""
    with lent() as root:
        first = af.CheckpointStore(root, async_=False)
        first.save(state_of(1))
        child = os.fork()
        if child == 0:
            try:
                first.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(af.errors.DirectoryInUseError, match="is in use"):
            af.CheckpointStore(root, async_=False).save(state_of(2))
        first.close()


@pytest.mark.parametrize("ends", ["close", "collect", "error"])
def test_one_store_saves_to_a_directory(ends):
    """A second store of the same process waits for the first one's end."""
    with lent() as root:
        first = af.CheckpointStore(root, async_=False)
        second = af.CheckpointStore(root, async_=False)
        first.save(state_of(1))
        with pytest.raises(af.errors.DirectoryInUseError, match="is in use"):
            second.save(state_of(2))
        assert second.steps == (1,)
        if ends == "close":
            first.close()
        elif ends == "error":
            with pytest.raises(KeyError), first:
                raise KeyError
        else:
            del first
            gc.collect()
        second.save(state_of(2))
        second.close()
        assert second.steps == (1, 2)
        assert list(root.glob(".*")) == []


@given(at=st.integers(0, 40), async_=st.booleans())
def test_an_interrupted_save_can_be_made_again(at: int, async_: bool) -> None:
    """Ctrl-C at any act of a save harms neither what is there nor the state."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with lent() as root:
        disk = Disk(root)
        with watched(disk):
            store = af.CheckpointStore(root, keep=1, async_=async_)
            store.save(state_of(1))
            store.wait()
            state = state_of(2)
            disk.happens[len(disk.acts) + at] = interrupt
            with suppress(KeyboardInterrupt, af.errors.CheckpointWriteError):
                store.save(state)
                store.wait()
            disk.happens.clear()
            assert differences(tensors(state_of(2)), tensors(state)) == []
            assert is_of(store.latest, store.steps[-1])
            store.save(state_of(3))
            store.close()
            assert store.steps == (3,)
            assert is_of(store.latest, 3)
            assert [path.name for path in root.iterdir()] == ["step-00000003"]


@given(interrupts=st.integers(1, 3))
def test_an_interrupted_wait_can_be_made_again(interrupts: int) -> None:
    """Ctrl-C while a save is waited for leaves it under way: its copies stay as they are."""
    left, go = [interrupts], Event()
    join = Writing.join

    def joined(writing: Writing) -> object:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        go.set()
        return join(writing)

    def slow(*args: object, **kwargs: object) -> object:
        go.wait(60)
        return write(*args, **kwargs)

    write = files.write_tensors
    with (
        lent() as root,
        mock.patch.object(Writing, "join", joined),
        mock.patch.object(files, "write_tensors", slow),
        af.CheckpointStore(root) as store,
    ):
        store.save(state_of(1))
        for _ in range(interrupts):
            with pytest.raises(KeyboardInterrupt):
                store.save(state_of(2))
        assert (root / ".lock").exists()
        store.save(state_of(2))
        store.wait()
        assert all(is_of(root / f"step-{step:08d}", step) for step in (1, 2))


SETUP = af.chain(af.shard_data(), af.local_sgd(sync_every=2), af.ema(0.5))


@given(
    run=runs(),
    size=st.integers(1, 3),
    rank=st.integers(0, 2),
    at=st.integers(0, 40),
    async_=st.booleans(),
)
def test_all_ranks_leave_after_the_same_update(run, size, rank, at, async_):
    """SIGTERM at any collective of any rank: all save the same update, and go on from it."""
    run = attrs.evolve(run, n=24, batch_size=6, updates=4, dyadic=False, setup=SETUP)
    left: dict[int, tuple[int, object]] = {}

    def train(world: af.World, directory: Path) -> dict[str, torch.Tensor]:
        state = run.state(world)
        try:
            with (
                af.stopping(world) as stop,
                af.CheckpointStore(directory, async_=async_) as store,
            ):
                state = store.restore(state)
                while state.step < run.updates:
                    state, _ = run.train(state, 1)
                    if stop.requested():
                        store.save(state)
                        break
        except SystemExit as ended:
            left[world.rank] = (state.step, ended.code)
        return tensors(state)

    with lent() as root:
        whole = simulate(size, lambda world: train(world, root / "whole"))
        assert left == {}
        faults = [Terminate(rank % size, at % len(whole.log))] if whole.log else []
        simulate(size, lambda world: train(world, root / "cut"), faults=faults)
        assert len(left) in (0, size)
        assert {code for _, code in left.values()} <= {143}
        assert len(set(left.values())) <= 1
        saved = af.CheckpointStore(root / "cut").steps
        assert saved == tuple({step for step, _ in left.values()})
        for one, two in zip(
            whole, simulate(size, lambda world: train(world, root / "cut")), strict=True
        ):
            assert differences(one, two) == []
