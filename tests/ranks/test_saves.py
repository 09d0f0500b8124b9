# SPDX-License-Identifier: Apache-2.0
"""However ranks go in the middle of a save, no checkpoint is lost, and the others say who."""

import re
import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.internals import RankProcess
from tests.laws.states import is_of, state_of
from tests.ports import free_port
from tests.ranks.programs_of_saves import SLOW, WAYS, Moment, live

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
    args = (free_port(), folder, case.moment, case.async_, case.timeout)
    ranks = [
        RankProcess.start(live, rank, case.size, *args, name=f"rank {rank}")
        for rank in range(case.size)
    ]
    try:
        for rank in case.moment.ranks:
            received(ranks[rank])
        left = {*range(case.size)} - {*case.moment.ranks}
        return [received(ranks[rank]) for rank in left]
    finally:
        for each in ranks:
            each.end()


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
