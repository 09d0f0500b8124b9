# SPDX-License-Identifier: Apache-2.0
"""However ranks go in the middle of a save, no checkpoint is lost, and the others say who."""

import ctypes
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.internals import RankProcess
from tests.laws.states import is_of, state_of
from tests.ports import free_port
from tests.processes import ranks_alone


def _raise(error: BaseException) -> NoReturn:
    raise error


WAYS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "segfault": lambda: ctypes.string_at(0),
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "MemoryError": lambda: _raise(MemoryError()),
    "ValueError": lambda: _raise(ValueError("boom")),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(600),
}
SLOW = ("SIGSTOP", "hang")
"""What no other rank sees before its timeout."""


@attrs.frozen
class Moment:
    """When ranks go, and how: each at one of its own acts.

    Attributes:
        how: they go.
        ranks: that do.
        at: how many acts each has done before, of its disk and its collectives.
        late: whether it goes behind that act.
    """

    how: str
    ranks: tuple[int, ...]
    at: int
    late: bool


@contextmanager
def going(moment: Moment, tell: Callable[[], object]) -> Iterator[None]:
    """Go at an act, in whichever thread does it."""
    acts, turn = count(), threading.Lock()

    def watched(act: Any) -> Any:
        def acts_(*args: Any, **kwargs: Any) -> Any:
            with turn:
                is_it = next(acts) == moment.at
            if is_it and not moment.late:
                tell()
                WAYS[moment.how]()
            found = act(*args, **kwargs)
            if is_it and moment.late:
                tell()
                WAYS[moment.how]()
            return found

        return acts_

    names = ("open", "rename", "mkdir", "unlink", "touch", "rmdir")
    changed = [(Path, name) for name in names]
    with ExitStack() as stack:
        for owner, name in [*changed, (os, "fsync"), (dist, "all_gather")]:
            new = watched(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def live(rank, size, port, folder, moment, async_, seconds, pipe) -> None:
    """Save step after step; send when this rank goes, and how it ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.dup2(os.open(f"{folder}/said-by-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    goes = rank in moment.ranks
    ended, world = "returned", None
    with ExitStack() as stack:
        try:
            world = af.World.from_env(device="cpu", timeout=60)
            world.connection.set_timeout(seconds)  # from here on, once all have met
            if goes:
                tell = lambda: pipe.send("goes")  # noqa: E731
                stack.enter_context(going(moment, tell))
            with world, af.CheckpointStore(f"{folder}/run", keep=2, async_=async_) as s:
                _save_on(s, world, Path(folder, f"saved-by-{rank}"))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            ended = f"{type(error).__name__}: {error}"
        pipe.send(ended)
    if world is not None:
        world.close()  # as the interpreter's end would


def _save_on(store: af.CheckpointStore, world: af.World, saved: Path) -> None:
    """Save until a rank goes, and keep a list of the steps that were said to be saved."""
    saved.touch()
    for step in range(1, 100):
        store.save(state_of(step, world))
        if step % 3:  # else training goes on, and the next save waits
            store.wait()
            with open(saved, "a", encoding="utf-8") as file:  # noqa: PTH123 - no act
                file.write(f"{step}\n")


PATIENCE = 60.0
"""Seconds after which a rank counts as hanging, on however busy a machine."""


@attrs.frozen
class Case:
    """A moment of a world, whose collectives end after some seconds."""

    size: int
    async_: bool
    moment: Moment
    timeout: float = 8.0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a moment at which one rank goes, or, of three, two."""
    size = draw(st.integers(2, 3))
    count = draw(st.integers(1, size - 1))
    going = draw(st.permutations(range(size)))[:count]
    how = draw(st.sampled_from([way for way in WAYS if way not in SLOW]))
    at, late = draw(st.integers(0, 120)), draw(st.booleans())
    return Case(size, draw(st.booleans()), Moment(how, tuple(sorted(going)), at, late))


def ends(case: Case, folder: str) -> list[str]:
    """Let ranks go; return how each of the others ended."""
    args = case.size, free_port(), folder, case.moment, case.async_, case.timeout
    with ranks_alone(case.size, live, *args) as ranks:
        for rank in case.moment.ranks:
            received(ranks[rank])
        left = {*range(case.size)} - {*case.moment.ranks}
        return [received(ranks[rank]) for rank in left]


def received(rank: RankProcess) -> str:
    """Return what a rank says when it goes, or of its end."""
    if not rank.pipe.poll(PATIENCE):
        return "hangs"
    try:
        return rank.pipe.recv()
    except (EOFError, OSError):
        return "ended without a word"


def lost(folder: Path) -> list[int]:
    """Return what is lost of what ranks were told is saved; the next run goes on."""
    told = [p.read_text().split() for p in folder.glob("saved-by-*")]
    store = af.CheckpointStore(folder / "run", keep=2)
    assert all(is_of(store.directory / f"step-{s:08d}", s) for s in store.steps)
    there = max(store.steps, default=0)
    with store:
        store.save(state_of(there + 1))
    assert store.steps[-1] == there + 1
    assert list(store.directory.glob(".*")) == []
    return sorted({int(step) for each in told for step in each if int(step) > there})


@pytest.mark.ranks(3)
@settings(
    max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # each costs processes
@given(case=cases())
@example(
    Case(2, async_=True, moment=Moment("SIGSTOP", (1,), 30, late=False), timeout=3)
)
def test_ranks_that_go_in_a_save_lose_nothing(case: Case) -> None:
    """B1, B2: whoever goes, however, at whichever act: others end, name it, and all is there."""
    who = "|".join(map(str, case.moment.ranks))
    one = rf"(but|process of|saved:|save failed:) rank(s .*)? ?({who})\b"
    with tempfile.TemporaryDirectory() as folder:
        told = ends(case, folder)
        assert lost(Path(folder)) == []
    assert len(told) == case.size - len(case.moment.ranks)
    for text in told:
        assert re.match("(PeerFailed|CheckpointWrite)Error", text), text
        assert re.search(one, text), text
