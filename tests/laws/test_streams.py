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
)
from tests.laws.worlds import single

pytestmark = on_one_core
STATEFUL = {
    "of the dataset": Remembering,
    "of its iterators": Placed,
    "of where they begin": Put,
}
READ = {"each": {}, "by rank 0": {"dispatch": True}}
"""Who reads a stream."""
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


@given(case=cases(), size=sizes, kind=st.sampled_from([Counting, Remembering, Placed]))
def test_a_stream_is_read_as_if_by_index(
    case: Case, size: int, kind: Callable[[int], Any]
) -> None:
    """Values, draws, weights, filler and ends are those of a map-style dataset, on any ranks."""
    is_the_map(case, size, kind)


@given(case=cases(), size=sizes, kind=st.sampled_from([Counting, Remembering, Placed]))
def test_dispatched_is_as_if_each_read(
    case: Case, size: int, kind: Callable[[int], Any]
) -> None:
    """With dispatch=True every rank has, bitwise, what it would have read itself."""
    is_the_map(case, size, kind, dispatch=True)


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


@given(case=cases(), size=sizes)
def test_a_stream_comes_once(case: Case, size: int) -> None:
    """Every epoch has each sample once; drop leaves out, and pad repeats, as many as it says."""
    ranks = list(simulate(size, lambda world: read(world, case.data(Counting(case.n)))))
    seen = [i for update in joined(ranks) for i in update]
    used = case.n
    if case.remainder == "drop":
        used -= case.n % case.batch_size
    assert seen == [*range(used), *range(used)]
    last = [batches[-1] for batches in ranks]
    repeats = [i for b in last for i in b.indices[b.filler].tolist()]
    weight = sum(sum(batch.weights) for batch in last)
    short = case.n % case.batch_size
    expected = short if case.remainder == "short" and short else case.batch_size
    assert weight == expected == last[0].num_samples
    values = [x for b in last for part in b.micro_batches for x in part[:, 0].tolist()]
    if case.remainder == "pad" and short and size == 1 and case.parts == 1:
        assert len(repeats) == case.batch_size - short
        head = [i % case.n for i in range(case.batch_size - short)]
        assert values[short:] == head


# resuming


@given(
    case=cases(),
    legs=st.lists(st.tuples(sizes, st.integers(0, 6)), max_size=3),
    kind=st.sampled_from(sorted(STATEFUL)),
    how=st.sampled_from(sorted(READ)),
)
def test_a_stream_goes_on_where_it_was_cut(
    case: Case, legs: list[tuple[int, int]], kind: str, how: str
) -> None:
    """Cut at any updates, on other ranks each time, a stateful stream gives the very rest."""

    def make(_world: af.World) -> af.Data:
        return case.data(STATEFUL[kind](case.n), **READ[how])

    found = in_legs(legs, make, parts=case.parts, seed=case.seed)
    updates = [update for ranks in found for update in zip(*ranks, strict=True)]
    expected = case.alone()
    assert len(updates) == len(expected)
    for update, whole in zip(updates, expected, strict=True):
        for batch in update:
            places = batch.start, batch.cursor, batch.num_samples, batch.ends_epoch
            assert places == (
                whole.start,
                whole.cursor,
                whole.num_samples,
                whole.ends_epoch,
            )
        rows = [
            row
            for batch in update
            for part, weight in zip(batch.micro_batches, batch.weights, strict=True)
            for row in part[:weight].tolist()
        ]
        once = zip(whole.micro_batches, whole.weights, strict=True)
        assert rows == [row for part, weight in once for row in part[:weight].tolist()]


@pytest.mark.parametrize("workers", [1, 2])
@given(
    data=st.data(),
    legs=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3)), max_size=2),
    kind=st.sampled_from(sorted(STATEFUL)),
)
@few
def test_workers_that_read_ahead_are_resumed(
    workers: int, data: st.DataObject, legs: list[tuple[int, int]], kind: str
) -> None:
    """What workers had read ahead of a cut comes again, and nothing else does."""
    case = attrs.evolve(data.draw(cases(workers)), parts=1)
    found = in_legs(legs, lambda _: case.data(STATEFUL[kind](case.n)), seed=case.seed)
    updates = [update for ranks in found for update in joined(ranks)]
    assert updates == [own([batch]) for batch in case.alone()]


@given(case=cases(), cuts=st.lists(st.integers(0, 40), min_size=2, max_size=2))
def test_elastic_streams_come_once(case: Case, cuts: list[int]) -> None:
    """On 4 ranks, then 2, then 3, each epoch has each sample once, in the stream's order."""
    legs = [(4, cuts[0]), (2, cuts[1])]
    found = in_legs(legs, lambda _: case.data(Remembering(case.n)), 3, parts=case.parts)
    seen = [i for ranks in found for update in joined(ranks) for i in update]
    used = case.n - (case.n % case.batch_size if case.remainder == "drop" else 0)
    assert seen == [*range(used), *range(used)]


@given(case=cases(), at=st.integers(0, 20))
def test_a_stream_is_read_again(case: Case, at: int) -> None:
    """Without a state it goes on at a cut only with replay=True, and then gives the rest."""
    given = case.data(Counting(case.n))
    whole = read(single(), given)
    cursor = whole[min(at, len(whole) - 1)].cursor
    rest = whole[min(at, len(whole) - 1) + 1 :]
    if cursor.samples:
        with pytest.raises(af.errors.DataError, match="stream without a state"):
            read(single(), given, start=cursor)
    again = read(single(), case.data(Counting(case.n), replay=True), start=cursor)
    assert plain(again) == plain(rest)


@given(
    case=cases(),
    kind=st.sampled_from(sorted(STATEFUL)),
    how=st.sampled_from(sorted(READ)),
    saves=st.sets(st.integers(0, 30), max_size=2),
    peeks=st.sets(st.integers(0, 30), max_size=3),
    size=st.integers(1, 3),
)
def test_saving_and_peeking_change_nothing(
    case: Case, kind: str, how: str, saves: set[int], peeks: set[int], size: int
) -> None:
    """A stream whose state is saved, or read on from in another loop, comes as if it was not."""

    def make() -> af.Data:
        return case.data(STATEFUL[kind](case.n), **READ[how])

    def one(world: af.World) -> None:
        expected = plain(read(world, make()))
        found = []
        step = af.make_step(lambda net, batch: net(batch[:, :1].float()).mean())
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
            data=make(),
            setup=af.shard_data() if world.size == 1 else SHARDED,
            world=world,
        )
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


SHARDED = af.chain(af.shard_data(), af.wrap_ddp())


@given(
    case=cases(),
    kind=st.sampled_from(sorted(STATEFUL)),
    how=st.sampled_from([*READ.values(), {"sharded": True}]),
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_each_reading_begins_at_the_beginning(
    case: Case, kind: str, how: dict[str, bool], stops: list[int]
) -> None:
    """Of a stream that keeps what it is given, however far others of it have come."""
    case = attrs.evolve(case, remainder="short")
    expected = plain(read(single(), case.data(STATEFUL[kind](case.n), **how)))
    data = case.data(STATEFUL[kind](case.n), **how)
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
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            data=af.Data(stream, global_batch_size=2),
            setup=af.shard_data(),
            world=world,
        )
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


# draws


@given(
    n=st.integers(2, 20),
    batch_size=st.integers(1, 6),
    how=st.sampled_from(sorted(READ)),
    seed=st.integers(0, 2**40),
)
def test_a_stream_draws_anew_at_every_place(n, batch_size, how, seed):
    """What torch, numpy and Python draw differs between positions, epochs and seeds."""
    rows = []
    for each in (seed, seed + 2**32):
        data = af.Data(Counting(n), global_batch_size=batch_size, **READ[how])
        for batch in read(single(), data, seed=each):
            rows += batch.value[:, 1:].tolist()
    for column in zip(*rows, strict=True):
        assert len(set(column)) == 4 * n


@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    remainder=REMAINDERS,
    size=st.integers(1, 4),
    kind=st.sampled_from([Counting, Remembering, Placed]),
    how=st.sampled_from([*READ]),
)
def test_a_stream_is_evaluated_on_each_sample_once(
    n, batch_size, remainder, size, kind, how
):
    """Whatever becomes of a short batch in training, and wherever another evaluation was left."""

    def rank(world: af.World) -> None:
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            world=world,
        )
        data = af.Data(
            kind(n), global_batch_size=batch_size, remainder=remainder, **READ[how]
        )
        for _ in range(2):
            seen = af.predict(state, data, lambda _, batch: batch[:, 0])
            assert list(range(n)) == [int(each) for each in seen]
            left = af.predict(state, data, lambda _, batch: batch[:, 0])
            assert int(next(left)) == 0  # and it is read no further
            found = af.evaluate(state, data, lambda _, batch: batch[:, 0].mean())
            assert found["value"] == pytest.approx((n - 1) / 2)

    simulate(size, rank)
