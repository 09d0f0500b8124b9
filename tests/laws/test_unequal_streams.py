# SPDX-License-Identifier: Apache-2.0
"""Streams of which each rank has its own, of unequal lengths."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import Remembering, in_legs, joined, on_one_core, read, some
from tests.laws.test_streams import STATEFUL, Case
from tests.laws.worlds import single

pytestmark = on_one_core

OF_RANKS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def of_rank(counts: list[int], kind: Callable[..., Any], case: Case) -> Any:
    """Return a function that gives a rank's own data: so many samples from 100 times it."""

    def make(world: af.World) -> af.Data:
        dataset = kind(counts[world.rank], 100 * world.rank)
        return af.Data(
            dataset,
            global_batch_size=case.batch_size,
            num_workers=case.workers,
            sharded=True,
        )

    return make


def numbers_of(batch: af.Batch) -> list[int]:
    """Return the samples that count."""
    return [
        int(x)
        for part, weight in zip(batch.micro_batches, batch.weights, strict=True)
        for x in part[:weight, 0].tolist()
    ]


def check_sharded(ranks: list[list[af.Batch]], counts: list[int], case: Case) -> None:
    """Check that each rank's samples come once an epoch, and ranks agree on all else."""
    places = [
        [(b.start, b.cursor, b.num_samples, b.ends_epoch) for b in batches]
        for batches in ranks
    ]
    assert all(each == places[0] for each in places)
    for rank, batches in enumerate(ranks):
        mine = [100 * rank + i for i in range(counts[rank])]
        for epoch in (0, 1):
            of_epoch = [b for b in batches if b.epoch == epoch]
            seen = [x for batch in of_epoch for x in numbers_of(batch)]
            assert (seen if case.workers < 2 else sorted(seen)) == mine
            ends = [batch.ends_epoch for batch in of_epoch]
            assert ends == [False] * (len(ends) - 1) + [True]
    for update in zip(*ranks, strict=True):
        start = update[0].start.samples
        assert joined([[b] for b in update]) == [
            [*range(start, start + update[0].num_samples)]
        ]
        weights = [sum(batch.weights) for batch in update]
        assert sum(weights) == update[0].num_samples <= max(case.batch_size, len(ranks))
        assert weights == [int((~batch.filler).sum()) for batch in update]
        assert any(weights)
        for batch in update:
            rows = sum(map(len, batch.micro_batches))
            assert rows == len(batch.indices) == len(batch.filler)


def check_resumed(found: list[af.Batch], expected: list[af.Batch]) -> None:
    """Check that a rank's batches are those of an uninterrupted run, but for stand-ins."""
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one.weights == two.weights
        assert (one.start, one.cursor) == (two.start, two.cursor)
        assert (one.num_samples, one.ends_epoch) == (two.num_samples, two.ends_epoch)
        rows = [
            [part[:weight].tolist() for part, weight in zip(*both, strict=True)]
            for both in ((b.micro_batches, b.weights) for b in (one, two))
        ]
        assert rows[0] == rows[1]


@given(counts=OF_RANKS, batch_size=st.integers(1, 12), parts=st.integers(1, 3))
def test_ranks_with_unequal_streams_see_each_sample_once(
    counts: list[int], batch_size: int, parts: int
) -> None:
    """With sharded=True ranks end together; what counts is each rank's samples, once."""
    case = Case(0, batch_size)
    make = of_rank(counts, Remembering, case)
    ranks = simulate(len(counts), lambda world: read(world, make(world), parts=parts))
    check_sharded(list(ranks), counts, case)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=2), data=st.data())
@some
def test_workers_of_unequal_streams_see_each_sample_once(
    workers: int, counts: list[int], data: st.DataObject
) -> None:
    """With workers too, whether whole or cut and resumed, in which their state is kept."""
    case = Case(0, data.draw(st.integers(1, 6)), workers=workers)
    make = of_rank(counts, Remembering, case)
    whole = simulate(len(counts), lambda world: read(world, make(world)))
    check_sharded(list(whole), counts, case)
    stop = data.draw(st.integers(1, len(whole[0])))
    legs = in_legs([(len(counts), stop)], make, len(counts))
    for rank, expected in enumerate(whole):
        check_resumed([batch for leg in legs for batch in leg[rank]], expected)


@given(
    counts=OF_RANKS,
    batch_size=st.integers(1, 12),
    parts=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 5), max_size=3),
    kind=st.sampled_from(sorted(STATEFUL)),
)
def test_unequal_streams_go_on_where_they_were_cut(
    counts: list[int], batch_size: int, parts: int, cuts: list[int], kind: str
) -> None:
    """Cut at any updates, behind a rank's end too, every rank has the very rest."""
    make = of_rank(counts, STATEFUL[kind], Case(0, batch_size))
    whole = simulate(len(counts), lambda world: read(world, make(world), parts=parts))
    size = len(counts)
    legs = in_legs([(size, cut) for cut in cuts], make, size, parts=parts)
    for rank, expected in enumerate(whole):
        check_resumed([batch for leg in legs for batch in leg[rank]], expected)


@given(n=st.integers(2, 9), batch_size=st.integers(1, 6), seed=st.integers(0, 2**40))
@some
def test_workers_of_unequal_streams_draw_apart(n, batch_size, seed):
    """What torch, numpy and Python draw differs by worker, place and epoch."""
    make = of_rank([n], Remembering, Case(0, batch_size, workers=2))
    world = single()
    rows = [
        row
        for batch in read(world, make(world), seed=seed)
        for row in batch.value[:, 1:].tolist()
    ]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == 2 * n
