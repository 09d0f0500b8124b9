# SPDX-License-Identifier: Apache-2.0
"""A regroup that is broken off on a rank, wherever it calls others' code, is told to all."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.laws.broken_off import KINDS, Breaking, around, causes, left_behind, threads
from tests.laws.elastic import Training
from tests.laws.test_broken_off import PARTS, Meeting, lent
from tests.states import values

SIZE = 3
"""How many begin; the last crashes."""


def regroup(setup, hit, breaking, ended) -> list[Any]:
    """Let two of three ranks go on without the third, which is broken off on one of them."""
    training = Training(setup=setup, every=1, updates=3, optimizer="momentum")

    def on_rank(world: af.World) -> Any:
        state = training.train(training.state(world), 1)
        with pytest.raises(af.errors.PeerFailedError):
            training.train(state.copy(), 2)
        before = values(state)
        try:
            with breaking if world.rank == hit else nullcontext():
                state = af.regroup(state)
        except BaseException as error:
            raised = breaking.raised
            ended[world.rank] = "broken off" if raised in causes(error) else str(error)
            if not state.lease.is_over:
                assert values(state) == before
            raise
        ended[world.rank] = "done"
        return values(training.train(state, 1))

    with torch.random.fork_rng():
        return list(
            simulate(SIZE, on_rank, faults=[Crash(SIZE - 1, step=1)], elastic=2)
        )


@functools.cache
def regrouped(setup: str, hit: int) -> Meeting:
    """Return the places of the call on a rank, and what the ranks that are left come to."""
    regroup(GO_ON[setup], hit, Breaking(), {})  # what is made once is there
    counted = Breaking(but="testing")
    return counted.counts, regroup(GO_ON[setup], hit, counted, {})


GO_ON = {"ddp": af.wrap_ddp(), "apart": af.local_sgd(sync_every=1)}


@given(
    setup=st.sampled_from(sorted(GO_ON)),
    hit=st.integers(0, 1),
    kind=st.sampled_from(sorted(KINDS)),
    file=PARTS,
    line=PARTS,
    which=PARTS,
)
def test_ranks_that_go_on_are_told_who_does_not(setup, hit, kind, file, line, which):
    """Where a regroup is broken off on one, the other has gone on, or hears of that rank."""
    with lent():
        counts, expected = regrouped(setup, hit)
        files = sorted({each[0] for each in counts})
        lines = [each for each in counts if each[0] == files[int(file * len(files))]]
        at = lines[int(line * len(lines))]
        breaking = Breaking(at, int(which * counts[at]), KINDS[kind], but="testing")
        ended, error = dict[int, str](), None
        there, was = threads(), around()
        try:
            regroup(GO_ON[setup], hit, breaking, ended)
        except BaseException as caught:  # noqa: BLE001 - it is judged
            error = caught
        notes = "\n".join(getattr(error, "__notes__", []))
        assert f"rank {hit}" in f"{error} {notes}".lower()
        assert ended[hit] == "broken off"
        other = ended.get(1 - hit, "done")
        assert other == "done" or f"rank {hit}" in other.lower()
        error = breaking.raised = None
        assert left_behind(was, there) == []
        assert regroup(GO_ON[setup], hit, Breaking(), {}) == expected
