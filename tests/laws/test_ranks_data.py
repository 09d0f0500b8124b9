# SPDX-License-Identifier: Apache-2.0
"""The data of ranks: one global order for every world, and honest lengths."""

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import single
from tests.strategies import Run, runs

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
