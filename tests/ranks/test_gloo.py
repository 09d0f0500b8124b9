# SPDX-License-Identifier: Apache-2.0
"""What Gloo does on wrong programs, and what a simulated world says of them.

The table is the test's data and, as `docs/simulation-and-gloo.md`, a page. A torch that
does otherwise fails here; `python -m tests.ranks.test_gloo` writes the page anew.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    CollectiveMismatchError,
    DeadlockError,
    DefaultGroupError,
    RankCrashedError,
)
from accelfn.testing import Crash, Fault, simulate
from tests.ranks import programs_of_mistakes as mistakes
from tests.ranks.fresh_processes import Outcome, outcomes
from tests.ranks.programs_of_mistakes import Differ, Meet, Reduce, Split

pytestmark = pytest.mark.ranks(4)

PAGE = Path(__file__).parents[2] / "docs/simulation-and-gloo.md"
TORCH = "2.13"
F32, F64, I16, I64 = torch.float32, torch.float64, torch.int16, torch.int64
NAN = float("nan")


@attrs.frozen
class Gives:
    """The rank returns what the program means."""

    value: Any

    def fits(self, outcome: Outcome) -> bool:
        return (outcome.how, repr(outcome.what)) == ("returned", repr(self.value))

    def __str__(self) -> str:
        return f"returns `{self.value}`"


@attrs.frozen
class Wrong(Gives):
    """The rank returns what nobody means, without a word."""

    def __str__(self) -> str:
        return f"**wrongly returns `{self.value}`**"


@attrs.frozen
class Raises:
    """The rank raises an error of which these words are a part."""

    words: str

    def fits(self, outcome: Outcome) -> bool:
        return outcome.how == "raised" and self.words in outcome.what

    def __str__(self) -> str:
        return f"raises `{self.words}`"


@attrs.frozen
class Waits:
    """The rank waits for the timeout, its own or that of the other rank.

    Which of them Gloo speaks of depends on whose clock, or which thread, comes first.
    """

    SIGNS = (
        "Timed out waiting|Application timeout caused pair closure"
        "|Connection (closed|reset) by peer|Broken pipe"
    )

    def fits(self, outcome: Outcome) -> bool:
        return outcome.how == "raised" and bool(re.search(self.SIGNS, outcome.what))

    def __str__(self) -> str:
        return "waits until the timeout"


@attrs.frozen
class LosesPeer(Waits):
    """The rank learns at once that the other is gone."""

    def __str__(self) -> str:
        return "raises `Connection closed by peer`"


@attrs.frozen
class Aborts:
    """Gloo ends the process, with some last words and no traceback."""

    def fits(self, outcome: Outcome) -> bool:
        words = "Received data size doesn't match expected size"
        return (
            outcome.how == "ended"
            and outcome.what[0] == -6
            and words in outcome.what[1]
        )

    def __str__(self) -> str:
        return "**aborts the process**"


@attrs.frozen
class Ends:
    """The process ends with an exit code, as the program means it."""

    code: int

    def fits(self, outcome: Outcome) -> bool:
        return outcome == Outcome("ended", (self.code, ""))

    def __str__(self) -> str:
        return f"ends with exit code {self.code}"


@attrs.frozen
class Anything:
    """What happens depends on who is faster, or on what was in memory."""

    def fits(self, outcome: Outcome) -> bool:
        return outcome.how != "hung"

    def __str__(self) -> str:
        return "raises, or returns any value"


@attrs.frozen
class Refuses:
    """A simulated world raises an error, in which these words stand."""

    error: type[Exception]
    words: str

    def __str__(self) -> str:
        return f"`{self.error.__name__}`: {self.words}"


@attrs.frozen
class Row:
    """A wrong program, what each rank does on Gloo, and what a simulated world does."""

    about: str
    program: Callable[[af.World], Any]
    gloo: tuple[Any, ...]
    simulated: Refuses | tuple[Gives, ...]
    faults: tuple[Fault, ...] = ()
    axes: Mapping[str, int] = attrs.field(factory=dict[str, int])


def mismatch(words: str) -> Refuses:
    return Refuses(CollectiveMismatchError, f"do not match in {words}")


MEANT = Gives([[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]])
SENT = Gives([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
SQUARE = {"dp_replicate": 2, "dp_shard": 2}
BITS_OF_ONE = 4607182418800017408

ROWS = [
    Row(
        "Rank 1 skips an `all_reduce`",
        mistakes.skips,
        (Waits(), Gives([2.0])),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "Rank 1 skips the first of two `all_reduce` calls",
        mistakes.skips_one_of_two,
        (Waits(), Wrong([[2.0], [21.0]])),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "The ranks call two `all_reduce` of equal shape in different orders",
        mistakes.swaps,
        (Wrong([[21.0], [12.0]]), Wrong([[12.0], [21.0]])),
        (Wrong([[21.0], [12.0]]), Wrong([[12.0], [21.0]])),
    ),
    Row(
        "The same with accelfn's `all_reduce` and labels",
        mistakes.swaps_labelled,
        (Wrong([[21.0], [12.0]]), Wrong([[12.0], [21.0]])),
        mismatch("label"),
    ),
    Row(
        "Rank 0 calls `all_reduce`, rank 1 `broadcast`",
        Meet(("all_reduce", "broadcast")),
        (Waits(), Waits()),
        mismatch("kind"),
    ),
    Row(
        "Rank 0 calls `all_reduce`, rank 1 `all_gather`",
        Meet(("all_reduce", "all_gather")),
        (Waits(), Waits()),
        mismatch("kind"),
    ),
    Row(
        "Rank 0 calls `all_reduce`, rank 1 `barrier`",
        Meet(("all_reduce", "barrier")),
        (Waits(), Waits()),
        mismatch("kind"),
    ),
    Row(
        "`all_reduce` of 3 elements on rank 0, of 2 on rank 1",
        Differ("all_reduce", (3, 2)),
        (Waits(), Wrong([1.0, 3.0])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`all_reduce` of 2 elements on rank 0, of 3 on rank 1",
        Differ("all_reduce", (2, 3)),
        (Wrong([3.0, 3.0]), Waits()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`reduce` of 3 elements on the root, of 2 on the other rank",
        Differ("reduce", (3, 2)),
        (Waits(), Gives([2.0, 2.0])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`reduce` of 2 elements on the root, of 3 on the other rank",
        Differ("reduce", (2, 3)),
        (Wrong([3.0, 3.0]), Waits()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`broadcast` of 3 elements into a tensor of 2",
        Differ("broadcast", (3, 2)),
        (Gives([1.0, 1.0, 1.0]), Aborts()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`broadcast` of 2 elements into a tensor of 3",
        Differ("broadcast", (2, 3)),
        (Gives([1.0, 1.0]), Wrong([1.0, 1.0, 2.0])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`scatter` of 3 elements into a tensor of 2",
        Differ("scatter", (3, 2)),
        (Gives([1.0, 1.0, 1.0]), Aborts()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`gather` of 3 elements from rank 1 into a tensor of 2",
        Differ("gather", (2, 3)),
        (Aborts(), Gives(None)),
        mismatch("shape or dtype"),
    ),
    Row(
        "`gather` of 2 elements from rank 1 into a tensor of 3",
        Differ("gather", (3, 2)),
        (Wrong([[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]]), Gives(None)),
        mismatch("shape or dtype"),
    ),
    Row(
        "`all_gather` of 2 elements on rank 0, of 3 on rank 1",
        Differ("all_gather", (2, 3)),
        (Aborts(), Anything()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`reduce_scatter` of 2 by 2 elements on rank 0, of 2 by 3 on rank 1",
        Differ("reduce_scatter", (2, 3)),
        (Wrong([3.0, 3.0]), Waits()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`send` of 3 elements to a `recv` of 2",
        Differ("send", (3, 2)),
        (Gives([1.0, 1.0, 1.0]), Aborts()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`send` of 2 elements to a `recv` of 3",
        Differ("send", (2, 3)),
        (Gives([1.0, 1.0]), Wrong([1.0, 1.0, 2.0])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`all_reduce` of float64 on rank 0, of float32 on rank 1",
        Differ("all_reduce", dtypes=(F64, F32)),
        (Anything(), Aborts()),
        mismatch("shape or dtype"),
    ),
    Row(
        "`all_reduce` of float64 on rank 0, of int64 on rank 1",
        Differ("all_reduce", dtypes=(F64, I64)),
        (Wrong([1.0, 1.0]), Wrong([BITS_OF_ONE, BITS_OF_ONE])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`broadcast` of float32 into float64",
        Differ("broadcast", dtypes=(F32, F64)),
        (Gives([1.0, 1.0]), Wrong([0.007812501848093234, 2.0])),
        mismatch("shape or dtype"),
    ),
    Row(
        "`all_reduce` with `SUM` on rank 0, with `MAX` on rank 1",
        mistakes.different_reductions,
        (Wrong([5.0, 10.0]), Wrong([5.0, 10.0])),
        mismatch("reduction"),
    ),
    Row(
        "Each rank calls `broadcast` with itself as the root",
        mistakes.own_root,
        (Waits(), Waits()),
        mismatch("root"),
    ),
    Row(
        "`broadcast` with root 0 on ranks 0 and 1, with root 1 on rank 2",
        mistakes.last_names_another_root,
        (Waits(), Gives([1.0]), Waits()),
        mismatch("root"),
    ),
    Row(
        "Each rank calls `reduce` with itself as the root",
        mistakes.reduces_to_itself,
        (Wrong([3.0]), Waits()),
        mismatch("root"),
    ),
    Row(
        "`all_reduce` of a tensor that is transposed on all ranks",
        mistakes.reduces_all_transposed,
        (MEANT, MEANT),
        (MEANT, MEANT),
    ),
    Row(
        "`all_reduce` of a tensor that is transposed on rank 0",
        mistakes.reduces_one_transposed,
        (
            Wrong([[0.0, 4.0], [3.0, 7.0], [6.0, 10.0]]),
            Wrong([[0.0, 3.0], [6.0, 4.0], [7.0, 10.0]]),
        ),
        (MEANT, MEANT),
    ),
    Row(
        "`all_reduce` of every second element, `x[::2]`",
        mistakes.reduces_with_gaps,
        (Wrong([0.0, 4.0, 4.0]), Wrong([0.0, 4.0, 4.0])),
        (Gives([0.0, 4.0, 8.0]), Gives([0.0, 4.0, 8.0])),
    ),
    Row(
        "`all_reduce` of one element that is expanded to three",
        mistakes.reduces_expanded,
        (Gives([2.0, 2.0, 2.0]), Gives([2.0, 2.0, 2.0])),
        Refuses(RuntimeError, "a single memory location"),
    ),
    Row(
        "`broadcast` of a tensor that is transposed on the root",
        mistakes.broadcasts_transposed,
        (SENT, Wrong([[0.0, 2.0], [4.0, 1.0], [3.0, 5.0]])),
        (SENT, SENT),
    ),
    Row(
        "`send` of a transposed tensor",
        mistakes.sends_transposed,
        (Raises("input tensor has to be contiguous"), Waits()),
        (SENT, SENT),
    ),
    Row(
        "Rank 1 raises an exception",
        mistakes.raises,
        (Waits(), Raises("KeyError: 'boom'")),
        Refuses(KeyError, "boom"),
    ),
    Row(
        "Rank 1 ends its process",
        mistakes.ends,
        (LosesPeer(), Ends(7)),
        Refuses(RankCrashedError, "Rank 1 of 2 crashed"),
        faults=(Crash(1),),
    ),
    Row(
        "Rank 0 reads the result of an `all_reduce` before it waits",
        mistakes.reads_before_waiting,
        (Wrong([1.0]), Gives([3.0])),
        (Gives([NAN]), Gives([3.0])),
    ),
    Row(
        "No rank waits for its asynchronous `all_reduce`",
        mistakes.never_waits,
        (Gives([3.0]), Gives([3.0])),
        (Gives([NAN]), Gives([NAN])),
    ),
    Row(
        "`all_to_all_single` of 4 rows: rank 0 splits them as `[1, 2]`",
        Split(((1, 2), (2, 2))),
        (Raises("Split sizes doesn't match total dim 0 size"), Waits()),
        Refuses(RuntimeError, "to sum exactly to 4"),
    ),
    Row(
        "`all_to_all_single`: rank 0 sends 3 rows, and rank 1 expects 2",
        Split(((1, 3), (2, 2))),
        (Raises("inLengthPerRank[myRank] == outLengthPerRank[myRank]"), Waits()),
        mismatch("splits"),
    ),
    Row(
        "`all_to_all`: rank 0 sends 2 elements, and rank 1 expects 1",
        mistakes.uneven_all_to_all,
        (Raises("invalid tensor size at index 1 (expected (1), got (2))"), Waits()),
        mismatch("splits"),
    ),
    Row(
        "Both ranks call `recv` before `send`",
        mistakes.both_receive,
        (Waits(), Waits()),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "Both ranks call `send` before `recv`",
        mistakes.both_send_first,
        (Waits(), Waits()),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "Rank 0 sends, and rank 1 does not receive",
        mistakes.sends_to_nobody,
        (Waits(), Gives([2.0])),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "`send` and `recv` with different tags",
        mistakes.different_tags,
        (Waits(), Waits()),
        Refuses(DeadlockError, "no rank can continue"),
    ),
    Row(
        "`all_gather` into a list of one tensor",
        mistakes.gathers_into_too_few,
        (Raises("expected length 2, got 1"), Raises("expected length 2, got 1")),
        Refuses(ArgumentError, "Expected 2 tensors"),
    ),
    Row(
        "`all_gather` of float64 into float32",
        mistakes.gathers_into_another_dtype,
        (Raises("tensors with different dtypes"),) * 2,
        Refuses(ValueError, "tensors with different dtypes"),
    ),
    Row(
        "`all_reduce` with `MIN` of 1 and NaN",
        Reduce("MIN", (1.0, NAN), F64),
        (Wrong([1.0]), Wrong([1.0])),
        (Gives([NAN]), Gives([NAN])),
    ),
    Row(
        "The same with `af.all_reduce`",
        mistakes.least,
        (Gives([NAN]), Gives([NAN])),
        (Gives([NAN]), Gives([NAN])),
    ),
    Row(
        "`all_reduce` with `AVG` of integers",
        Reduce("AVG", (1, 2), I64),
        (Raises("result type Float can't be cast"),) * 2,
        Refuses(af.errors.ArgumentError, "Gloo does not support AVG"),
    ),
    Row(
        "`all_reduce` with `BAND` of floats",
        Reduce("BAND", (1, 2), F64),
        (Raises("Cannot use ReduceOp.BAND with non-integral dtype"),) * 2,
        Refuses(af.errors.ArgumentError, "Gloo does not support BAND"),
    ),
    Row(
        "`all_reduce` of int16",
        Reduce("SUM", (1, 2), I16),
        (Raises("Invalid scalar type"),) * 2,
        Refuses(af.errors.ArgumentError, "Gloo does not support SUM"),
    ),
    Row(
        "`all_reduce` without `group=`",
        mistakes.calls_the_default_group,
        (Gives([3.0]), Gives([3.0])),
        Refuses(DefaultGroupError, "Pass group=world.group"),
    ),
    Row(
        "Rows (0, 1) and (2, 3) along `dp_shard`: rank 3 skips its row's `all_reduce`",
        mistakes.skips_in_its_row,
        (Gives([3.0]), Gives([3.0]), Waits(), Gives([4.0])),
        Refuses(DeadlockError, "no rank can continue"),
        axes=SQUARE,
    ),
    Row(
        "The same rows: rank 3 calls `all_reduce` along `dp_replicate` instead",
        mistakes.takes_the_other_axis,
        (Gives([3.0]), Gives([3.0]), Waits(), Waits()),
        Refuses(DeadlockError, "no rank can continue"),
        axes=SQUARE,
    ),
    Row(
        "All ranks sum along `dp_shard`, then `dp_replicate`; rank 3 in the other order",
        mistakes.takes_axes_in_another_order,
        (Wrong([13.0]), Wrong([7.0]), Wrong([13.0]), Gives([10.0])),
        (Wrong([13.0]), Wrong([7.0]), Wrong([13.0]), Gives([10.0])),
        axes=SQUARE,
    ),
]


ABOUT = """\
# Simulated ranks and real Gloo processes

Read this page if a distributed program hangs or computes wrong values.
The table shows what mistakes in a program cause with Gloo (torch {}) and on simulated ranks.
With Gloo, ranks often wait until the timeout (30 minutes), or silently return wrong values.
A [simulated world](how-to/test-distributed-code.md) usually raises an error at once.

A simulated world cannot detect one mistake: calls with equal shapes in different orders.
It detects this mistake only if the calls have different labels.
accelfn labels its own collectives. In your code, pass `label=` to `af.all_reduce` and others.
On real ranks, `af.World.from_env(checked=True)` compares accelfn's collectives before each call."""


def page() -> str:
    """Return the table as a page of the documentation."""
    columns = ["| program | on Gloo | in a simulated world |", "| --- | --- | --- |"]
    lines = [*ABOUT.format(TORCH).splitlines(), "", *columns]
    for row in ROWS:
        said = row.simulated
        simulated = str(said) if isinstance(said, Refuses) else by_rank(said)
        lines.append(f"| {row.about} | {by_rank(row.gloo)} | {simulated} |")
    return "\n".join([*lines, ""])


def by_rank(expected: tuple[Any, ...]) -> str:
    """Return what ranks do in words, once where all do the same."""
    words = [str(each) for each in expected]
    if len(set(words)) == 1:
        return f"every rank {words[0]}"
    return "<br>".join(f"rank {rank} {each}" for rank, each in enumerate(words))


@pytest.fixture(scope="module")
def on_gloo() -> dict[str, list[Outcome]]:
    """Every row's outcomes, several worlds side by side: most of them wait."""
    with ThreadPoolExecutor(8) as side_by_side:
        found = side_by_side.map(
            lambda r: outcomes(len(r.gloo), r.program, r.axes), ROWS
        )
        return dict(zip([row.about for row in ROWS], found, strict=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.about)
def test_gloo_does_what_the_table_says(row, on_gloo):
    """Each rank returns, raises, waits or ends as its row says."""
    found = on_gloo[row.about]
    if not all(e.fits(o) for e, o in zip(row.gloo, found, strict=True)):
        # alone: the machine may be busy
        found = outcomes(len(row.gloo), row.program, row.axes)
    for rank, (expected, outcome) in enumerate(zip(row.gloo, found, strict=True)):
        assert expected.fits(outcome), f"rank {rank} {expected}? {outcome}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.about)
def test_a_simulated_world_does_what_the_table_says(row):
    """It raises the error of the row, or gives each rank what stands there."""
    size, expected = len(row.gloo), row.simulated
    if isinstance(expected, Refuses):
        with pytest.raises(expected.error, match=re.escape(expected.words)):
            simulate(size, row.program, faults=row.faults, axes=row.axes)
        return
    run = simulate(size, row.program, axes=row.axes)
    for result, rank in zip(run, expected, strict=True):
        assert rank.fits(Outcome("returned", result))


def test_the_page_is_the_table():
    """The documentation shows these rows and no others."""
    assert page() == PAGE.read_text(), "python -m tests.ranks.test_gloo writes it anew"


if __name__ == "__main__":
    PAGE.write_text(page())
