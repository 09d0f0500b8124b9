# SPDX-License-Identifier: Apache-2.0
"""However a rank goes, all others of real ranks end, and say which it was."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.internals import RankProcess
from tests.ports import free_port
from tests.ranks.programs_of_faults import CALLS, Fault, live
from tests.waiting import HANGS

GONE = "failed, left or did not arrive"
HOW = {
    "raise": "rank {} raised ValueError: boom",
    "leave": "rank {} left",
    "kill": f"rank {{}} {GONE}",
    "stop": f"rank {{}} {GONE}",
    "hang": f"rank {{}} {GONE}",
}


def outcomes(size: int, calls: list[str], fault: Fault, opens: str) -> list[str]:
    """Return how each rank but the one that goes ends, in a world of new processes."""
    port = free_port()
    ranks = [
        RankProcess.start(
            live, rank, size, port, calls, fault, opens, name=f"rank {rank}"
        )
        for rank in range(size)
    ]
    try:
        others = [each for i, each in enumerate(ranks) if i != fault.rank]
        return [r.pipe.recv() if r.pipe.poll(HANGS) else "hangs" for r in others]
    finally:
        for each in ranks:
            each.end()


@pytest.mark.ranks(4)
@settings(
    max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # each costs processes, and a timeout of two seconds
@given(
    size=st.integers(2, 4),
    calls=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=4),
    how=st.sampled_from(sorted(HOW)),
    opens=st.sampled_from(["accelfn", "torch"]),
    data=st.data(),
)
def test_a_rank_that_goes_is_named_by_all(
    size: int, calls: list[str], how: str, opens: str, data: st.DataObject
) -> None:
    """Any program, any rank, any call of it, any way to go: nothing hangs, nobody is misled.

    So it is where the process group was opened by somebody else.
    """
    fault = Fault(
        rank=data.draw(st.integers(0, size - 1), label="rank"),
        at=data.draw(st.integers(0, len(calls) - 1), label="call"),
        how=how,
    )
    # a rank that only sends needs nobody: at the end all do
    said = outcomes(size, [*calls, "barrier"], fault, opens)
    names = {HOW[how].format(fault.rank)}
    if opens == "torch" and how == "leave":  # such a world is not closed by its block
        names = {f"rank {fault.rank} {GONE}"}
    if fault.rank == 0:  # it keeps the store by which others are heard
        names |= {f"rank 0 or another rank {GONE}", f"rank 0 {GONE}"}
    for text in said:
        assert text.startswith("PeerFailedError: Rank ")
        assert any(f", but {name}" in text for name in names), text
