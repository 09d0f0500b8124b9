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
sizes = st.integers(1, 5)


class Augmented(torch.utils.data.Dataset):
    """Draws noise for each sample, as augmentations do."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.randn(2)])


@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 8),
    size=sizes,
    parts=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_augmentation_does_not_depend_on_the_world(
    n: int, batch_size: int, size: int, parts: int, seed: int
) -> None:
    """What a dataset draws is a function of seed, epoch and sample, not of who reads it."""

    def read(world: af.World, setup: object) -> dict[tuple[int, int], torch.Tensor]:
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(3, 1),
            optimizer=torch.optim.SGD,
            data=af.Data(Augmented(n), global_batch_size=batch_size, shuffle=True),
            setup=setup,
            world=world,
            seed=seed,
        )
        found: dict[tuple[int, int], torch.Tensor] = {}
        for batch in af.batches(state, until_epoch=2):
            rows = torch.cat(batch.micro_batches)
            for i, row in zip(batch.indices.tolist(), rows, strict=True):
                assert row[0] == i
                found[batch.epoch, i] = row
        return found

    expected = read(single(), af.chain())
    assert len({tuple(row.tolist()) for row in expected.values()}) == 2 * n
    setup = af.chain(af.shard_data(), af.accumulate(num_micro_batches=parts))
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for part in simulate(size, lambda world: read(world, setup)):
        seen |= part
        assert all(torch.equal(row, expected[where]) for where, row in part.items())
    assert seen.keys() == expected.keys()


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


@given(data=drawing(), size=st.integers(1, 8), parts=st.integers(1, 3))
def test_draws_are_of_a_place(data: af.Data, size: int, parts: int) -> None:
    """What torch, numpy and Python draw is a place's on any ranks, and no other place's."""

    def rows(world: af.World, seed: int) -> dict[tuple[int, int], list[float]]:
        found = {}
        for batch in read(world, data, parts=parts, seed=seed):
            values = torch.cat(batch.micro_batches)[~batch.filler].tolist()
            found |= {(batch.epoch, int(row[0])): row[1:] for row in values}
        return found

    expected = rows(single(), 0)
    found: dict[tuple[int, int], list[float]] = {}
    for part in simulate(size, lambda world: rows(world, 0)):
        found |= part
    assert found == expected
    other = rows(single(), 2**32)
    for column in zip(*expected.values(), *other.values(), strict=True):
        assert len(set(column)) == len(expected) + len(other)


@given(
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.integers(1, 3),
    ambient=st.integers(0, 3),
)
def test_draws_beside_data_that_draw_nothing(lengths, size, ambient):
    """In a mix with tensors, augmentation draws from a place's key alone."""
    drawn, plainly = Drawing(lengths[0]), torch.ones(lengths[1], 4).double()
    data = af.Data.mix([drawn, plainly], global_batch_size=4, shuffle=True)

    def rows(world: af.World) -> list[Any]:
        torch.manual_seed(ambient)
        before = torch.get_rng_state()
        found = [(b.micro_batches[0][~b.filler]).tolist() for b in read(world, data)]
        assert torch.equal(before, torch.get_rng_state())
        return found

    torch.manual_seed(7)
    expected = rows(single())
    ranks = list(simulate(size, rows))
    updates = zip(*ranks, strict=True)
    assert [[row for part in parts for row in part] for parts in updates] == expected
