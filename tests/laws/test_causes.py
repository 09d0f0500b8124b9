# SPDX-License-Identifier: Apache-2.0
"""Which rank's failure is told first, however all of them ended."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.internals import Ended, by_cause
from tests.laws.disks import lent


@attrs.frozen
class End:
    """How a rank ended.

    Attributes:
        how: "finished", "raised", "lost" a peer, "killed", "exited", "stopped", or "went on"
            until it was ended; "raised late" is one that had raised and not left when it was.
        at: when, in seconds.
        place: which line raised.
    """

    how: str
    at: float
    place: int

    @property
    def by_itself(self) -> bool:
        return self.how in ("raised", "lost", "killed", "exited")

    @property
    def error(self) -> str:
        errors = {"lost": "PeerFailedError: gone", "raised": "ValueError: boom"}
        return errors.get(self.how.removesuffix(" late"), "")

    @property
    def traceback(self) -> str:
        if not self.error:
            return ""
        return f'Traceback:\n  File "train.py", line {self.place}\n{self.error}'

    @property
    def status(self) -> int:
        """As of a process: a signal is negative."""
        killed = {"killed": -signal.SIGKILL, "stopped": -signal.SIGTERM}
        ended = {"went on": -signal.SIGTERM, "exited": 7}
        return {**killed, **ended}.get(self.how, 1)

    def failure(self, local: int, root: Path) -> ProcessFailure:
        """Return what torch notices of it."""
        file = root / f"error-{local}.json"
        if self.error:
            details = {"py_callstack": self.traceback, "time": self.at, "status": 1}
            details["timestamp"] = int(self.at)  # which torch reads
            said = {"message": {"message": self.error, "extraInfo": details}}
            file.write_text(json.dumps(said), encoding="utf-8")
        return ProcessFailure(local, 100 + local, self.status, str(file))


ENDS = st.builds(
    End,
    how=st.sampled_from(
        [
            *("finished", "raised", "raised late", "lost", "lost"),
            *("killed", "exited", "stopped", "went on"),
        ]
    ),
    at=st.integers(1, 9).map(float),
    place=st.integers(1, 2),
)


def order_of(ends: Mapping[int, End]) -> list[list[int]]:
    """Return ranks that did not finish: causes, waited for, who lost a peer, others."""
    failed = {rank: end for rank, end in ends.items() if end.how != "finished"}
    first = min(end.at for end in failed.values() if end.by_itself)
    late = [r for r, e in failed.items() if e.how == "raised late"]
    causes = [r for r, e in failed.items() if e.by_itself and e.how != "lost"]
    causes += [rank for rank in late if failed[rank].at < first]
    # if nobody failed for a reason of its own, those are blamed that went on
    waited = ["stopped"] if causes else ["stopped", "went on"]
    return [
        sorted(causes, key=lambda rank: failed[rank].at),
        [r for r, e in failed.items() if e.how in waited],
        sorted(
            (r for r, e in failed.items() if e.how == "lost"),
            key=lambda rank: failed[rank].at,
        ),
        [r for r, e in failed.items() if e.how == "went on" and causes]
        + [rank for rank in late if rank not in causes],
    ]


@given(
    ends=st.dictionaries(st.integers(0, 5), ENDS, min_size=1, max_size=5),
    others=st.booleans(),
)
def test_the_cause_of_a_failure_comes_first(ends: dict[int, End], others: bool) -> None:
    """Whoever failed first for a reason of its own; each rank is told once, with its end."""
    local = {rank: number for number, rank in enumerate(ends)}
    failed = {rank: end for rank, end in ends.items() if end.how != "finished"}
    if not any(end.by_itself for end in failed.values()):
        return  # then the launcher ends nobody
    watch = SimpleNamespace(
        failed_at={local[r]: e.at for r, e in failed.items() if e.by_itself},
        stopped={local[r] for r, e in failed.items() if e.how == "stopped"},
        stacks={local[r]: f"at {r}" for r, e in failed.items() if e.how == "went on"},
    )
    with lent() as root:
        torchs = {rank: end.failure(local[rank], root) for rank, end in failed.items()}
        found = by_cause(torchs, cast("Any", watch))
    groups, left = order_of(ends), [each.rank for each in found]
    for group in groups:
        mine, left = left[: len(group)], left[len(group) :]
        assert set(mine) == set(group)
        times = [ends[rank].at for rank in mine if ends[rank].by_itself]
        assert times == sorted(times)
    assert left == []
    first = found[0]
    text = Ended(found, [*ends], 0.0).report
    assert text.startswith(f"rank {first.rank} failed first (")
    end = ends[first.rank]
    said = {
        "raised": "exit code 1",
        "raised late": "exit code 1",
        "lost": "exit code 1",
        "exited": "exit code 7",
        "killed": "killed by SIGKILL",
        "stopped": "stopped by SIGSTOP",
        "went on": "the other ranks waited for it",
    }
    assert said[end.how] in text.partition(",")[0]
    assert end.how != "went on" or f"at {first.rank}" in text
    if end.by_itself:
        assert f"after {end.at:.1f} s" in text
    lines = text.splitlines()
    for rank, each in ends.items():
        named = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert len(named) == 1
        if each.how == "finished":
            assert named == [f"rank {rank} had finished without an error"]
    shown = [e for e in failed.values() if e.error]
    if end.how == "lost":  # where all lost one another, each place is a question
        places = {e.place for e in shown}
    else:
        places = {e.place for e in shown if e.how.startswith("raised")}
    for place in (1, 2):
        line = f'  File "train.py", line {place}'
        assert lines.count(line) == (place in places)
    ended = Ended(found, [*ends], 0.0, others)
    codes = {"killed": 137, "stopped": 128 + signal.SIGSTOP, "exited": 7}
    assert ended.exit_code == {**codes, "went on": 143}.get(end.how, 1)
    elsewhere = others and all(e.how == "lost" for e in failed.values())
    assert ("on another machine" in ended.report.replace("\n", " ")) == elsewhere
