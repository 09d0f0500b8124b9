# SPDX-License-Identifier: Apache-2.0
"""However ranks go in the middle of a save, no checkpoint is lost, and the others say who."""

import re
import socket
import tempfile
import time
from pathlib import Path

import attrs
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.internals import RankProcess
from tests.laws.states import is_of, state_of
from tests.ranks.programs_of_saves import SLOW, WAYS, Moment, live

TIMEOUT = 8.0
"""Seconds, of the worlds."""
PATIENCE = 60.0
"""Seconds after which a rank counts as hanging, on however busy a machine."""


@attrs.frozen
class Case:
    """A moment of a world."""

    size: int
    async_: bool
    moment: Moment
    timeout: float = TIMEOUT


@st.composite
def cases(draw: st.DrawFn, ways: tuple[str, ...] = tuple(WAYS)) -> Case:
    """Draw a moment at which one rank goes, or, of three, two."""
    size = draw(st.integers(2, 3))
    count = draw(st.integers(1, size - 1))
    going = draw(st.permutations(range(size)))[:count]
    how = draw(st.sampled_from(ways))
    at, late = draw(st.integers(0, 120)), draw(st.booleans())
    return Case(size, draw(st.booleans()), Moment(how, tuple(sorted(going)), at, late))


@attrs.frozen
class Outcome:
    """What became of a case.

    Attributes:
        survivors: how each rank that did not go ended, by rank; "hangs".
        seconds: from the first that went to the last survivor's end.
        lost: the steps that were said to be saved, and are not there, nor any later one.
    """

    survivors: dict[int, str]
    seconds: float
    lost: list[int]


def outcome(case: Case) -> Outcome:
    """Let ranks go, and see what the others say and what is left."""
    with tempfile.TemporaryDirectory() as folder:
        ends, began = _ends(case, folder)
        last = max(at for _, at in ends.values())
        survivors = {rank: text for rank, (text, _) in ends.items()}
        return Outcome(survivors, last - began, _lost(Path(folder)))


def _ends(case: Case, folder: str) -> tuple[dict[int, tuple[str, float]], float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = (folder, case.moment, case.async_, case.timeout)
    ranks = [
        RankProcess.start(live, rank, case.size, port, *args, name=f"rank {rank}")
        for rank in range(case.size)
    ]
    try:
        went = [_received(ranks[rank]) for rank in case.moment.ranks]
        began = min(at for _, at in went)
        others = [r for r in range(case.size) if r not in case.moment.ranks]
        return {rank: _received(ranks[rank]) for rank in others}, began
    finally:
        for each in ranks:
            each.end()


def _received(rank: RankProcess) -> tuple[str, float]:
    if not rank.pipe.poll(PATIENCE):
        return "hangs", time.monotonic()
    try:
        return rank.pipe.recv()
    except (EOFError, OSError):
        return "ended without a word", time.monotonic()


def _lost(folder: Path) -> list[int]:
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


def names_who_went(case: Case, text: str) -> bool:
    """Whether a survivor's error says which rank it was."""
    who = "|".join(map(str, case.moment.ranks))
    one = rf"(but|process of|not saved:) rank(s .*)? ?({who})\b"
    return re.match("(PeerFailed|CheckpointWrite)Error", text) is not None and (
        re.search(one, text) is not None
    )


def check(case: Case, found: Outcome) -> None:
    """All survivors are out, and say who went; nothing is lost."""
    assert found.lost == []
    assert len(found.survivors) == case.size - len(case.moment.ranks)
    for text in found.survivors.values():
        assert text != "hangs"
        assert names_who_went(case, text), text


@pytest.mark.ranks(3)
@settings(
    max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # each costs processes
@given(case=cases(tuple(way for way in WAYS if way not in SLOW)))
@example(
    Case(2, async_=True, moment=Moment("SIGSTOP", (1,), 30, late=False), timeout=3)
)
def test_ranks_that_go_in_a_save_lose_nothing(case: Case) -> None:
    """B1, B2: whoever goes, however, at whichever act: others end, name it, and all is there."""
    check(case, outcome(case))
