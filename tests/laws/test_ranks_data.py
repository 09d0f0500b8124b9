# SPDX-License-Identifier: Apache-2.0
"""The data of ranks: one global order for every world, and honest lengths."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
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
from tests.strategies import Run, runs

pytestmark = on_one_core
sizes = st.integers(1, 5)


def dropping(run: Run) -> Run:
    """Return the run with short batches dropped, and at least one that is not."""
    return attrs.evolve(run, remainder="drop", n=max(run.n, run.batch_size))


reads = st.one_of(runs(), runs().map(dropping))


def batches_of(run: Run, setup: object, size: int, epochs: int) -> list[list[af.Batch]]:
    """Return each rank's batches."""
    run = attrs.evolve(run, setup=af.chain(af.shard_data(), setup))

    def read(world: af.World) -> list[af.Batch]:
        batches = af.batches(run.state(world), epochs=epochs)
        found = list(batches)
        assert len(found) == len(batches)
        return found

    return list(simulate(size, read))


def own(batch: af.Batch) -> list[int]:
    """Return the indices of a rank's samples, without filler."""
    return batch.indices[~batch.filler].tolist()


@given(
    run=reads,
    size=sizes,
    parts=st.integers(1, 3),
)
def test_global_order_does_not_depend_on_the_world(
    run: Run, size: int, parts: int
) -> None:
    """Batch by batch, the ranks' samples in rank order are those of one process."""
    alone = list(af.batches(run.state(single()), epochs=2))
    setup = af.accumulate(num_micro_batches=parts)
    split = batches_of(run, setup, size, epochs=2)
    for number, batch in enumerate(alone):
        found = [i for rank in split for i in own(rank[number])]
        assert found == own(batch)
    assert {len(batches) for batches in split} == {len(alone)}


@given(
    run=reads,
    size=sizes,
    parts=st.integers(1, 3),
)
def test_filler_is_what_is_marked(run: Run, size: int, parts: int) -> None:
    """What is not filler is the epoch, each sample once; weights count it, repeats beside."""
    split = batches_of(run, af.accumulate(num_micro_batches=parts), size, epochs=1)
    seen = [i for rank in split for batch in rank for i in own(batch)]
    used = run.n if run.remainder != "drop" else len(split[0]) * run.batch_size
    assert len(seen) == len(set(seen)) == used
    for number in range(len(split[0])):
        batches = [rank[number] for rank in split]
        weights = [sum(batch.weights) for batch in batches]
        assert sum(weights) == batches[0].num_samples
        assert max(weights) - min(weights) <= 1
        if run.remainder == "pad":
            assert sum(weights) == run.batch_size
        for batch in batches:  # as many values as indices, and none without a sample
            rows = [len(x) for x, _ in batch.micro_batches]
            assert rows == [max(1, weight) for weight in batch.weights]
            assert sum(rows) == len(batch.indices) == len(batch.filler)


@given(
    run=reads,
    size=sizes,
    data=st.data(),
)
def test_len_is_honest_from_any_cursor(
    run: Run, size: int, data: st.DataObject
) -> None:
    """len says how many batches come, on every rank, from every cursor, over any epochs."""
    run = attrs.evolve(run, setup=af.shard_data())
    starts = [batch.start for batch in af.batches(run.state(single()), epochs=2)]
    start = data.draw(st.sampled_from(starts))
    epochs = data.draw(st.integers(1, 3))

    def count(world: af.World) -> int:
        state = attrs.evolve(run.state(world), cursor=start)
        batches = af.batches(state, epochs=epochs)
        assert len(list(batches)) == len(batches)
        return len(batches)

    per_epoch = run.state(single()).data.updates_per_epoch
    expected = max(0, epochs * per_epoch - starts.index(start))
    assert simulate(size, count).results == (expected,) * size


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
            data=af.Data(Augmented(n), batch_size=batch_size, shuffle=True),
            setup=setup,
            world=world,
            seed=seed,
        )
        found: dict[tuple[int, int], torch.Tensor] = {}
        for batch in af.batches(state, epochs=2):
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
        batch_size=draw(st.integers(min(largest, max(1, n // 15)), largest)),
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


@given(data=drawing(), cuts=st.tuples(st.integers(0, 15), st.integers(0, 15)))
@example(
    data=af.Data(Drawing(222), batch_size=22, shuffle=True, remainder="drop"),
    cuts=(10, 4),
)
def test_elastic_runs_see_each_sample_once(
    data: af.Data, cuts: tuple[int, int]
) -> None:
    """On 4 ranks, then 2, then 3, every epoch has each sample once, but those dropped."""
    found = in_legs([(4, cuts[0]), (2, cuts[1])], lambda _world: data, 3)
    seen = [i for ranks in found for update in joined(ranks) for i in update]
    used = len(data)
    if data.remainder == "drop":
        used -= used % data.batch_size
    assert len(seen) == 2 * used
    for epoch in (seen[:used], seen[used:]):
        assert len(set(epoch)) == used
        assert set(epoch) <= set(range(len(data)))


@given(data=drawing(), size=st.integers(1, 8), draw=st.data())
def test_a_run_goes_on_at_any_sample(
    data: af.Data, size: int, draw: st.DataObject
) -> None:
    """From any sample of an epoch on, a batch's or not, the rest of the order comes.

    With "drop" as much of it as whole batches have.
    """
    all_kept = attrs.evolve(data, remainder="short")
    whole = [i for batch in read(single(), all_kept) for i in own(batch)]
    n, least = len(whole) // 2, data.batch_size if data.remainder == "drop" else 1
    at = draw.draw(st.integers(0, n - least))
    epoch = draw.draw(st.integers(0, 1))
    start = af.Cursor(epoch, at)
    ranks = list(simulate(size, lambda world: read(world, data, start=start)))
    found = joined(ranks)
    expected: list[int] = []
    for begin in [epoch * n + at, *([n] if epoch == 0 else [])]:
        end = (begin // n + 1) * n
        left = (end - begin) % data.batch_size if least > 1 else 0
        expected += whole[begin : end - left]
    assert [i for update in found for i in update] == expected
    if data.remainder == "drop":
        assert {len(update) for update in found} == {data.batch_size}


@pytest.mark.parametrize("workers", [0, 1, 2])
@given(
    data=st.data(),
    size=st.integers(1, 2),
    parts=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@few
def test_workers_change_nothing(
    workers: int, data: st.DataObject, size: int, parts: int, seed: int
) -> None:
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
def test_draws_beside_data_that_draw_nothing(
    lengths: tuple[int, int], size: int, ambient: int
) -> None:
    """In a mix with tensors, augmentation draws from a place's key alone."""
    drawn, plainly = Drawing(lengths[0]), torch.ones(lengths[1], 4).double()
    data = af.Data.mix([drawn, plainly], batch_size=4, shuffle=True)

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
