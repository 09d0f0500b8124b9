# SPDX-License-Identifier: Apache-2.0
"""The data of ranks: one global order for every world, and honest lengths."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import (
    REMAINDERS,
    Drawing,
    few,
    in_legs,
    joined,
    on_one_core,
    plain,
    read,
)
from tests.laws.worlds import single

pytestmark = on_one_core
lengths = st.one_of(st.integers(1, 20), st.integers(21, 200))


@st.composite
def drawing(draw: st.DrawFn, num_workers: int = 0) -> af.Data:
    """Draw shuffled data whose samples are augmented, with a batch in them."""
    n = draw(lengths)
    remainder = draw(REMAINDERS)
    largest = min(n, 24) if remainder == "drop" else 24
    return af.Data(
        Drawing(n),
        global_batch_size=draw(st.integers(min(largest, max(1, n // 15)), largest)),
        shuffle=True,
        remainder=remainder,
        num_workers=num_workers,
    )


LEGS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=4)


@given(data=drawing(), legs=LEGS, last=st.integers(1, 8), parts=st.integers(1, 3))
def test_a_run_goes_on_with_other_numbers_of_ranks(
    data: af.Data, legs: list[tuple[int, int]], last: int, parts: int
) -> None:
    """Cut again and again, on other ranks each time, a run has the batches of one process."""
    found = in_legs(legs, lambda _world: data, last, parts=parts)
    assert [update for ranks in found for update in joined(ranks)] == joined(
        [read(single(), data)]
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
@given(
    data=st.data(),
    size=st.integers(1, 2),
    parts=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@few
def test_workers_change_nothing(workers, data, size, parts, seed):
    """Values and draws are those read without workers, whole or cut with batches read ahead."""
    given = data.draw(drawing(workers))
    here = attrs.evolve(given, num_workers=0)
    stop = data.draw(st.integers(1, 5))

    def one(world: af.World) -> None:
        expected = plain(read(world, here, parts=parts, seed=seed))
        first = read(world, given, parts=parts, seed=seed, stop=stop)
        cursor = first[-1].cursor
        rest = read(world, given, parts=parts, seed=seed, start=cursor)
        assert plain([*first, *rest]) == expected

    simulate(size, one)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    plainly=st.booleans(),
    size=st.integers(1, 3),
    ambient=st.integers(0, 3),
)
def test_draws_of_a_mix(lengths, plainly, size, ambient):
    """No two samples of a mix share a draw, beside tensors too, on any number of ranks."""
    parts = [Drawing(n) for n in lengths]
    if plainly:
        parts[1] = torch.ones(lengths[1], 4).double()
    data = af.Data.mix(parts, global_batch_size=4, shuffle=True)

    def rows(world: af.World) -> list[Any]:
        torch.manual_seed(ambient)
        before = torch.get_rng_state()
        found = [(b.micro_batches[0][~b.filler]).tolist() for b in read(world, data)]
        assert torch.equal(before, torch.get_rng_state())
        return found

    torch.manual_seed(7)
    expected = rows(single())
    updates = zip(*simulate(size, rows), strict=True)
    assert [[row for part in parts for row in part] for parts in updates] == expected
    drawn = [row[1] for update in expected for row in update if row[1] != 1]
    assert len(set(drawn)) == len(drawn)
