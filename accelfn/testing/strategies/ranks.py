# SPDX-License-Identifier: Apache-2.0
"""What a simulated world is drawn from: its size, the orders of turns and sums, and a fault."""

from collections.abc import Sequence
from typing import get_args

from hypothesis import strategies as st

from accelfn.testing.simulation.faults import (
    Corrupt,
    Crash,
    Fault,
    Leave,
    Raise,
    Stall,
    Terminate,
)
from accelfn.testing.simulation.sums import Sums


def worlds(sizes: Sequence[int] = (1, 2, 4)) -> st.SearchStrategy[int]:
    """Draw the size of a world, the first ones first.

    Powers of two, by which dyadic sums divide exactly; give others where that is no matter.
    """
    return st.sampled_from(tuple(sizes))


def schedules(size: int = 4, *, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Draw the order in which ranks go on, for `simulate(..., schedule=)`.

    Args:
        size: the number of ranks.
        max_size: after how many choices, at most, the turn goes round.

    Law: the simplest is the empty list, by which ranks take turns.
    """
    return st.lists(st.integers(0, max(size - 1, 0)), max_size=max_size)


def sums() -> st.SearchStrategy[Sums]:
    """Draw the order in which ranks' tensors are added up, for `simulate(..., sums=)`.

    What is claimed bit by bit must hold in all of them; that of the ranks is the simplest.
    """
    return st.sampled_from(get_args(Sums))


KINDS: tuple[type[Fault], ...] = (Raise, Leave, Crash, Stall, Corrupt, Terminate)


def faults(
    size: int,
    *,
    kinds: Sequence[type[Fault]] = KINDS,
    at: st.SearchStrategy[int | str] | None = None,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Draw no fault or one, for `simulate(..., faults=)`.

    Args:
        size: the number of ranks.
        kinds: which faults, the simplest first.
        at: draws where: a rank's collective by its index, by default one of the first 8,
            or by its label.
    """
    where = st.integers(0, 7) if at is None else at
    some = [st.builds(kind, rank=st.integers(0, size - 1), at=where) for kind in kinds]
    return st.just(()) | st.one_of(some).map(lambda fault: (fault,))
