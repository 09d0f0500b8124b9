# SPDX-License-Identifier: Apache-2.0
"""Streams are read as if by index: one order, each sample once, and resumed anywhere."""

import random
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import (
    REMAINDERS,
    Counting,
    Dividing,
    Drawing,
    Placed,
    Put,
    Remembering,
    few,
    in_legs,
    joined,
    on_one_core,
    own,
    plain,
    read,
    some,
)
from tests.laws.worlds import single
from tests.states import linear_state

pytestmark = on_one_core
STATEFUL = Remembering, Placed, Put
READ = [{}, {"dispatch": True}]
"""Who reads a stream."""
HOW = st.sampled_from(READ)
KIND = st.sampled_from(STATEFUL)
sizes = st.integers(1, 8)
lengths = st.one_of(st.integers(1, 12), st.integers(13, 200))


@attrs.frozen
class Case:
    """A stream of n numbers, and how it is read."""

    n: int
    batch_size: int
    remainder: str = "short"
    workers: int = 0
    parts: int = 1
    seed: int = 0

    def data(self, dataset: object, **options: Any) -> af.Data:
        """Return the data."""
        sized = {"global_batch_size": self.batch_size, "remainder": self.remainder}
        return af.Data(dataset, num_workers=self.workers, **{**sized, **options})

    def alone(self) -> list[af.Batch]:
        """Return what one process reads, without workers."""
        data = attrs.evolve(self, workers=0).data(Counting(self.n))
        return read(single(), data, parts=self.parts, seed=self.seed)


@st.composite
def cases(draw: st.DrawFn, workers: int = 0) -> Case:
    """Draw a case that has a batch."""
    n = draw(lengths)
    remainder = draw(REMAINDERS)
    largest = min(n, 12) if remainder == "drop" else 12
    return Case(
        n,
        draw(st.integers(max(1, min(largest, n // 15)), largest)),
        remainder,
        workers,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
    )


def told(batches: list[af.Batch]) -> list[Any]:
    """Return all that batches say but what filler drew, which is another reading's."""
    found = []
    for values, *rest, filler, size, start, stop, ends in plain(batches):
        rows = [row for part in values for row in part]
        kept = [row[:1] if no else row for row, no in zip(rows, filler, strict=True)]
        found.append(
            (list(map(len, values)), kept, *rest, filler, size, start, stop, ends)
        )
    return found


def is_the_map(
    case: Case, size: int, dataset: Callable[[int], Any], **how: Any
) -> None:
    """Check that every rank reads of the stream what it reads by index."""
    by_index = attrs.evolve(case, workers=0)

    def one(world: af.World) -> None:
        options = {"parts": case.parts, "seed": case.seed}
        expected = read(world, by_index.data(Drawing(case.n)), **options)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
        found = read(world, case.data(dataset(case.n), **how), **options)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
        assert told(found) == told(expected)
        assert sum(batch.ends_epoch for batch in found) == 2
        assert found[-1].ends_epoch
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]
        assert before[2].tolist() == after[2].tolist()

    simulate(size, one)


@given(
    case=cases(),
    size=sizes,
    kind=st.sampled_from([Counting, Remembering, Placed]),
    how=HOW,
)
def test_a_stream_is_read_as_if_by_index(case, size, kind, how):
    """Values, draws, weights, filler and ends are those of a map-style dataset, on any ranks.

    With dispatch=True every rank has, bitwise, what it would have read itself.
    """
    is_the_map(case, size, kind, **how)


@pytest.mark.parametrize("workers", [1, 2])
@given(
    data=st.data(), size=st.integers(1, 3), kind=st.sampled_from([Counting, Dividing])
)
@few
def test_workers_read_as_one(workers, data, size, kind):
    """Workers change nothing, and a stream that divides itself among them loses nothing."""
    is_the_map(data.draw(cases(workers)), size, kind)


@given(case=cases(), place=st.integers(0, 40))
def test_a_stream_goes_on_from_any_sample(case: Case, place: int) -> None:
    """Batches are cut from there, as those of a map, though no batch of the epoch ended there."""
    least = case.batch_size if case.remainder == "drop" else 1  # that are left
    start = af.typing.Cursor(0, min(place, case.n - least))
    how: dict[str, Any] = {"parts": case.parts, "seed": case.seed, "start": start}
    expected = read(single(), case.data(Drawing(case.n)), **how)
    for kind in (Counting, Remembering):
        data = case.data(kind(case.n), replay=True)
        assert told(read(single(), data, **how)) == told(expected)


# resuming


def place_of(batch: af.Batch) -> tuple[Any, ...]:
    return batch.start, batch.cursor, batch.num_samples, batch.ends_epoch


def rows_of(batch: af.Batch) -> list[list[float]]:
    """Return the samples that count."""
    parts = zip(batch.micro_batches, batch.weights, strict=True)
    return [row for part, weight in parts for row in part[:weight].tolist()]


@given(
    case=cases(),
    legs=st.lists(st.tuples(sizes, st.integers(0, 6)), max_size=3),
    kind=KIND,
    reader=HOW,
)
def test_a_stream_goes_on_where_it_was_cut(case, legs, kind, reader):
    """Cut at any updates, on other ranks each time, a stateful stream gives the very rest."""

    how = {"parts": case.parts, "seed": case.seed}
    found = in_legs(legs, lambda _: case.data(kind(case.n), **reader), **how)
    updates = [update for ranks in found for update in zip(*ranks, strict=True)]
    for update, whole in zip(updates, case.alone(), strict=True):
        assert {place_of(batch) for batch in update} == {place_of(whole)}
        assert [row for batch in update for row in rows_of(batch)] == rows_of(whole)


@pytest.mark.parametrize("workers", [1, 2])
@given(
    data=st.data(),
    legs=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3)), max_size=2),
    kind=KIND,
)
@few
def test_workers_that_read_ahead_are_resumed(workers, data, legs, kind):
    """What workers had read ahead of a cut comes again, and nothing else does."""
    case = attrs.evolve(data.draw(cases(workers)), parts=1)
    found = in_legs(legs, lambda _: case.data(kind(case.n)), seed=case.seed)
    updates = [update for ranks in found for update in joined(ranks)]
    assert updates == [own([batch]) for batch in case.alone()]


@given(
    case=cases(),
    kind=KIND,
    how=HOW,
    saves=st.sets(st.integers(0, 30), max_size=2),
    peeks=st.sets(st.integers(0, 30), max_size=3),
    size=st.integers(1, 3),
)
def test_saving_and_peeking_change_nothing(case, kind, how, saves, peeks, size):
    """A stream whose state is saved, or read on from in another loop, comes as if it was not."""

    def make() -> af.Data:
        return case.data(kind(case.n), **how)

    def one(world: af.World) -> None:
        expected = plain(read(world, make()))
        found = []
        step = af.make_step(lambda net, batch: net(batch[:, :1].float()).mean())
        setup = af.chain(af.shard_data(), af.wrap_ddp() if world.size > 1 else None)
        state = linear_state(data=make(), setup=setup, world=world)
        for i, batch in enumerate(af.batches(state, until_epoch=2)):
            found.append(batch)
            state, _ = step(state, batch)
            if i in saves:
                af.save(state, Path(folder) / str(i))
            if i in peeks:
                rest = read(world, make(), start=state.cursor, stop=2)
                assert plain(rest) == expected[i + 1 : i + 3]
        assert plain(found) == expected

    with tempfile.TemporaryDirectory() as folder:
        simulate(size, one)


@given(
    case=cases(),
    kind=KIND,
    how=st.sampled_from([*READ, {"sharded": True}]),
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_each_reading_begins_at_the_beginning(case, kind, how, stops):
    """Of a stream that keeps what it is given, however far others of it have come."""
    case = attrs.evolve(case, remainder="short")
    expected = plain(read(single(), case.data(kind(case.n), **how)))
    data = case.data(kind(case.n), **how)
    for stop in [*stops, None]:
        assert plain(read(single(), data, stop=stop)) == expected[:stop]


OPERATIONS = {
    "map": lambda stream: stream.map(lambda row: {"x": row["x"]}),
    "filter": lambda stream: stream.filter(lambda row: row["x"] % 5 != 3),
    "skip": lambda stream: stream.skip(2),
    "take": lambda stream: stream.take(23),
}


@given(
    operations=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=2),
    num_looks=st.integers(0, 40),
    cut=st.integers(1, 6),
)
def test_a_stream_of_datasets_that_was_looked_at_comes_whole(
    operations, num_looks, cut
):
    """Every epoch, on a resume too, is what `iter` gives of a stream that nobody has read."""

    def made() -> Any:
        table = datasets.Dataset.from_dict({"x": list(range(30))})
        stream = table.to_iterable_dataset(num_shards=3)
        for each in operations:
            stream = OPERATIONS[each](stream)
        return stream

    def values(batches: list[af.Batch]) -> list[Any]:
        return [x for batch in batches for x in batch.value["x"].tolist()]

    def data(stream: Any) -> af.Data:
        return af.Data(stream, global_batch_size=3)

    expected = [row["x"] for row in made()] * 2
    looked = made()
    list(islice(looked, num_looks))
    first = read(single(), data(looked), stop=cut)
    assert values(read(single(), data(looked))) == expected
    list(islice(looked, num_looks))
    rest = read(single(), data(looked), start=first[-1].cursor)
    assert values([*first, *rest]) == expected


@given(
    kind=st.sampled_from([Counting, Remembering, Put, Placed]),
    by=st.sampled_from(["states", "ranks"]),
)
def test_a_stream_with_one_state_is_read_by_one_loop(kind: Any, by: str) -> None:
    """Two loops at once each read all of it, or the one that came first is refused by name."""
    stream = kind(8)

    def loop(world: af.World) -> Any:
        data = af.Data(stream, global_batch_size=2)
        state = linear_state(data=data, setup=af.shard_data(), world=world)
        return af.batches(state, until_epoch=2)

    def one(world: af.World) -> list[int]:
        rows = [
            af.all_gather(batch.value[:, 0], world).tolist() for batch in loop(world)
        ]
        return [int(x) for row in rows for x in row]

    def two(world: af.World) -> list[list[int]]:
        pairs = zip(loop(world), loop(world), strict=True)
        rows = [[both.value[:, 0].tolist() for both in pair] for pair in pairs]
        return [[int(x) for row in rows for x in row[i]] for i in range(2)]

    def run() -> list[Any]:
        return list(simulate(2, one)) if by == "ranks" else two(single())

    if kind in (Remembering, Put):
        with pytest.raises(af.errors.DataError, match=f"{kind.__name__}.*another loop"):
            run()
    else:
        assert run() == [[*range(8)] * 2] * 2


@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    remainder=REMAINDERS,
    size=st.integers(1, 4),
    kind=st.sampled_from([Counting, Remembering, Placed]),
    how=HOW,
)
def test_a_stream_is_evaluated_on_each_sample_once(
    n, batch_size, remainder, size, kind, how
):
    """Whatever becomes of a short batch in training, and wherever another evaluation was left."""

    def rank(world: af.World) -> None:
        state = linear_state(world=world)
        data = af.Data(
            kind(n), global_batch_size=batch_size, remainder=remainder, **how
        )
        for _ in range(2):
            seen = af.predict(state, data, lambda _, batch: batch[:, 0])
            assert list(range(n)) == [int(each) for each in seen]
            left = af.predict(state, data, lambda _, batch: batch[:, 0])
            assert int(next(left)) == 0  # and it is read no further
            found = af.evaluate(state, data, lambda _, batch: batch[:, 0].mean())
            assert found["value"] == pytest.approx((n - 1) / 2)

    simulate(size, rank)


# streams of unequal lengths, one for each rank

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


def check_sharded(ranks: list[list[af.Batch]], counts: list[int], case: Case) -> None:
    """Check that each rank's samples come once an epoch, and ranks agree on all else."""
    assert all(
        len({*map(place_of, update)}) == 1 for update in zip(*ranks, strict=True)
    )
    for rank, batches in enumerate(ranks):
        mine = [100 * rank + i for i in range(counts[rank])]
        for epoch in (0, 1):
            of_epoch = [b for b in batches if b.epoch == epoch]
            seen = [int(row[0]) for batch in of_epoch for row in rows_of(batch)]
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
    for one, two in zip(found, expected, strict=True):
        assert one.weights == two.weights
        assert place_of(one) == place_of(two)
        assert rows_of(one) == rows_of(two)


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
    kind=KIND,
)
def test_unequal_streams_go_on_where_they_were_cut(
    counts, batch_size, parts, cuts, kind
):
    """With sharded=True ranks end together, and each has its own samples, once.

    Cut at any updates, behind a rank's end too, every rank has the very rest.
    """
    case, size = Case(0, batch_size), len(counts)
    make = of_rank(counts, kind, case)
    whole = list(simulate(size, lambda world: read(world, make(world), parts=parts)))
    check_sharded(whole, counts, case)
    legs = in_legs([(size, cut) for cut in cuts], make, size, parts=parts)
    for rank, expected in enumerate(whole):
        check_resumed([batch for leg in legs for batch in leg[rank]], expected)


@given(n=st.integers(2, 9), batch_size=st.integers(1, 6), seed=st.integers(0, 2**40))
@some
def test_workers_of_unequal_streams_draw_apart(n, batch_size, seed):
    """What torch, numpy and Python draw differs by worker, place and epoch."""
    make = of_rank([n], Remembering, Case(0, batch_size, workers=2))
    rows = [
        row
        for batch in read(single(), make(single()), seed=seed)
        for row in batch.value[:, 1:].tolist()
    ]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == 2 * n
