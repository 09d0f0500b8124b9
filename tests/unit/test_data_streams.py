# SPDX-License-Identifier: Apache-2.0
"""Streams as data: empty, too short, without state, resumed, sharded; what is said of each."""

import logging
from functools import partial

import attrs
import pytest
import torch
import torchdata.nodes
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import accelfn as af
from accelfn.testing import simulate
from tests.internals import reading
from tests.laws.reading import Remembering
from tests.states import linear_state, read


class Plain(IterableDataset):
    """So many samples, and no state."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter([torch.tensor([float(i)]) for i in range(self.n)])


def of(stream, size=4, **options):
    return af.Data(stream, global_batch_size=size, **options)


def refused(words):
    return pytest.raises(af.errors.DataError, match=words)


class Promising(Plain):
    """Says one length and has another."""

    def __init__(self, n, says):
        super().__init__(n)
        self.says = says

    def __len__(self):
        return self.says


class Stateful(Plain):
    """Knows where it stands."""

    def __init__(self, n):
        super().__init__(n)
        self.place = 0

    def __iter__(self):
        while self.place < self.n:
            self.place += 1
            yield torch.tensor([float(self.place - 1)])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def flat(batches):
    """Return the values of batches, a list a batch."""
    return [batch.value.reshape(-1).tolist() for batch in batches]


WAYS = {
    "here": {},
    "workers": {"num_workers": 2},
    "dispatched": {"dispatch": True},
    "sharded": {"sharded": True},
    "sharded workers": {"sharded": True, "num_workers": 1},
}
UNSHARDED = [name for name in WAYS if not name.startswith("sharded")]


# Lengths.


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_stream(way):
    """A stream without samples is refused as it is made or read, whoever reads it."""
    with refused("no sample in epoch 0"):
        read(of(Plain(0), **WAYS[way]))
    with refused(r"the dataset \(Promising\) is empty"):
        of(Promising(0, 0), **WAYS[way])


def test_an_iterator_in_disguise():
    """One that ends for good is refused in its second epoch, and told apart if it can be."""

    class Once:
        samples = iter([1, 2])

        def __iter__(self):
            return self.samples

    with refused(r"no sample in epoch 1.*at each call of __iter__"):
        read(of(Once()), epochs=2)


def test_a_rank_without_samples():
    """Of ranks with streams of their own, one without is named, with all their counts."""
    with refused(r"rank 0 of 2 has no sample in epoch 0.*: \[0, 1\]"):
        simulate(2, lambda w: read(of(Plain(3 * w.rank), 2, sharded=True), world=w))


@pytest.mark.parametrize("dispatch", [False, True])
def test_fewer_samples_than_ranks(dispatch):
    """Ranks beyond the samples take part with weight 0, or with repeats if it is padded."""

    def run(remainder):
        data = of(Plain(2), remainder=remainder, dispatch=dispatch)
        return simulate(
            4,
            lambda world: [
                (b.value.item(), b.weights, b.filler.tolist())
                for b in read(data, world=world)
            ],
        ).results

    counts = [[(0.0, (1,), [False])], [(1.0, (1,), [False])]]
    assert run("short") == (*counts, *[[(1.0, (0,), [True])]] * 2)
    assert run("pad") == (*counts, [(0.0, (1,), [True])], [(1.0, (1,), [True])])
    with refused("2 samples, so every batch would be dropped"):
        run("drop")


@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
@pytest.mark.parametrize("way", UNSHARDED)
@pytest.mark.parametrize(
    ("n", "says", "words"),
    [
        (3, 5, "has the length 5, but yielded only 3"),
        (4, 8, "has the length 8, but yielded only 4"),
        (7, 5, r"has the length 5, but yielded at least [67]"),
        (4, 2, r"has the length 2, but yielded at least [34]"),
    ],
)
def test_a_length_that_is_not_kept(n, says, words, way, remainder):
    """A stream shorter or longer than its `__len__` is refused with both numbers."""
    data = of(Promising(n, says), 2, remainder=remainder, **WAYS[way])
    with refused(rf"Promising {words} samples in epoch 0.*__len__"):
        read(data)


@pytest.mark.parametrize("n", [3, 7])
def test_a_length_that_a_rank_does_not_keep(n):
    """So is a rank's own stream, on the rank that reads it."""
    with refused("Promising has the length 5"):
        read(of(Promising(n, 5), 2, sharded=True))
    assert read(of(Promising(5, 5), 2, sharded=True))


@pytest.mark.parametrize("way", UNSHARDED)
def test_a_length_that_is_kept(way):
    """`len` is what is read."""
    data = of(Promising(7, 7), 2, **WAYS[way])
    state = linear_state(data=data)
    assert len(data) == 7
    assert len(af.batches(state, until_epoch=2)) == len(read(data, epochs=2)) == 8
    later = attrs.evolve(state, cursor=af.typing.Cursor(0, 4))
    assert len(af.batches(later, until_epoch=1)) == 2


@pytest.mark.parametrize("data", [Plain(3), Promising(3, 3)])
def test_streams_that_have_no_length(data):
    """One without `__len__`, or a rank's own, has none to ask for; `list` does without."""
    data = of(data, 2, sharded=isinstance(data, Promising))
    for ask in (len, lambda each: each.updates_per_epoch, lambda e: e.num_updates(2)):
        with pytest.raises(af.errors.LengthError, match="has no known length") as error:
            ask(data)
        assert isinstance(error.value, (TypeError, ValueError))
    with pytest.raises(af.errors.LengthError):
        len(af.batches(linear_state(data=data), until_epoch=1))
    assert flat(read(data)) == [[0, 1], [2]]


# Going on.


@pytest.mark.parametrize("way", WAYS)
def test_without_state_a_stream_is_read_again(way, caplog):
    """Or refused: with replay=True the rest is the very one, and one line says the cost."""
    stream, whole = Plain(10), read(of(Plain(10), **WAYS[way]))
    words = r"Plain is a stream without a state.*sample 4 of epoch 0.*state_dict\(\).*"
    with refused(words + r"replay=True\), which reads 4 samples"):
        read(of(stream, **WAYS[way]), cursor=whole[0].cursor)
    with caplog.at_level(logging.WARNING, "accelfn"):
        rest = read(of(stream, replay=True, **WAYS[way]), cursor=whole[0].cursor)
    assert flat(rest) == flat(whole[1:]) == [[4, 5, 6, 7], [8, 9]]
    if way != "sharded workers":  # there, the worker says it
        (line,) = [r.getMessage() for r in caplog.records if r.name == "accelfn"]
        assert line == "Reading the first 4 samples of Plain again, to resume."


@pytest.mark.parametrize("half", ["state_dict", "load_state_dict"])
def test_half_a_state_is_none(half):
    """A stream that can only say where it stands, or only be put there, goes on nowhere."""
    stream = Plain(10)
    setattr(stream, half, lambda *_: {})
    cursor = read(of(stream))[0].cursor
    with refused("is a stream without a state"):
        read(of(stream), cursor=cursor)


def test_reading_again_on_ranks(caplog):
    """One line for all ranks, not one each."""
    data, cursor = of(Plain(10), replay=True), af.typing.Cursor(0, 4)
    with caplog.at_level(logging.WARNING, "accelfn"):
        simulate(3, lambda world: read(data, world=world, cursor=cursor))
    assert sum(r.name == "accelfn" for r in caplog.records) == 1


def test_seeking_in_a_stream():
    """A place that no state was taken at is refused, or read up to; not within a rank's own."""
    cursor = af.typing.Cursor(0, 3)
    with refused(r"has no state of the stream Stateful.*af\.seek.*replay=True"):
        read(of(Stateful(10)), cursor=cursor)
    rest = flat(read(of(Stateful(10), replay=True), cursor=cursor))
    assert rest == [[3, 4, 5, 6], [7, 8, 9]]
    for replay in (False, True):
        with refused("has no state of the ranks' streams"):
            read(of(Stateful(10), sharded=True, replay=replay), cursor=cursor)


@pytest.mark.parametrize("way", UNSHARDED)
def test_going_on_behind_the_end(way):
    """A cursor that the stream does not reach is refused."""
    data = of(Stateful(10), replay=True, **WAYS[way])
    with refused("has no more samples at sample 40"):
        read(data, cursor=af.typing.Cursor(0, 40))


def test_another_number_of_workers():
    """Workers with parts of their own cannot be resumed by another number of them."""
    data = of(Stateful(10), 2, sharded=True, num_workers=1)
    cursor = read(data)[0].cursor
    with refused(r"1 workers per rank read.*resume with 0"):
        read(attrs.evolve(data, num_workers=0), cursor=cursor)


items = partial(StatefulDataLoader, batch_size=None)
nodes = torchdata.nodes
STREAMS = {
    "own": lambda: of(Stateful(10)),
    "own, sharded": lambda: of(Stateful(10), sharded=True),
    "own, workers": lambda: of(Stateful(10), num_workers=2),
    "own, dispatched": lambda: of(Stateful(10), dispatch=True),
    "StatefulDataLoader": lambda: of(items(Stateful(10))),
    "StatefulDataLoader, items": lambda: of(items(torch.arange(10.0))),
    "StatefulDataLoader, shuffled": lambda: of(items(torch.arange(10.0), shuffle=True)),
    "StatefulDataLoader, workers": lambda: of(items(Stateful(10), num_workers=1)),
    "nodes": lambda: of(nodes.Loader(nodes.IterableWrapper(range(10)))),
    "nodes, threads": lambda: of(
        nodes.Loader(
            nodes.ParallelMapper(nodes.IterableWrapper(range(10)), abs, num_workers=1)
        )
    ),
}
SHARDS = af.shard_data()
STEP = af.make_step(lambda model, x: model(x.reshape(-1, 1).float()).square().mean())


@pytest.mark.parametrize("done", [2, 4])
@pytest.mark.parametrize("name", STREAMS)
def test_resumed_from_a_checkpoint(name, done, tmp_path):
    """A fresh stream put where the saved one stood gives the very rest, in later epochs too."""
    whole = flat(read(STREAMS[name](), epochs=2))
    state = linear_state(data=STREAMS[name]())
    for batch, _ in zip(af.batches(state, until_epoch=2), range(done), strict=False):
        state, _ = STEP(state, batch)
    af.save(state, tmp_path / "saved")
    later = af.load(linear_state(data=STREAMS[name]()), tmp_path / "saved")
    assert len(whole) == 6
    assert flat(af.batches(later, until_epoch=2)) == whole[done:]


def test_a_state_that_is_no_plain_data(tmp_path):
    """What a stream's state holds beyond plain data is named as it is saved."""

    class Objects(Stateful):
        def state_dict(self):
            return {"place": self.place, "seen": {1, 2}}

    state = linear_state(data=of(Objects(10)))
    state, _ = STEP(state, next(iter(af.batches(state))))
    with pytest.raises(af.errors.Error, match=r"seen is a set, but only tensors"):
        af.save(state, tmp_path / "saved")


# What excludes each other.

LISTS = {"global_batch_size": None, "batch_sampler": [[0]]}
REFUSED = [
    ({"shuffle": True}, "its own order.*Shuffle inside the stream"),
    ({"order": lambda *_: []}, "its own order"),
    (
        {"global_batch_size": af.token_budget([1], limit=1)},
        "integer global_batch_size",
    ),
    (LISTS, "integer global_batch_size"),
    ({"sharded": True, "dispatch": True}, "Leave out dispatch="),
    ({"sharded": True, "remainder": "pad"}, "Leave out .*remainder="),
    ({"dispatch": True, "num_workers": 2}, "num_workers=2.*one process reads"),
    ({"sharded": "yes"}, "sharded='yes'.*True or False"),
    (
        {"dataset": DataLoader(Plain(3), batch_size=None), "num_workers": 1},
        "use workers inside the stream",
    ),
    *(
        ({"dataset": [1, 2], name: True}, rf"{name}=True.*read by index.*Leave it out")
        for name in ("sharded", "dispatch", "replay")
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_exclude_each_other(options, words):
    """Options that a stream, or that only a stream can have, are refused with what to do."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.Data(**{"dataset": Plain(3), "global_batch_size": 2, **options})


@pytest.mark.parametrize("kind", [KeyError, af.errors.DataError, MemoryError])
def test_a_dispatched_stream_that_raises(kind):
    """Its error is rank 0's; the others are told of it, and wait for nothing."""

    class Breaks(Plain):
        def __iter__(self):
            yield from list(super().__iter__())[:5]
            raise kind("shard 7")

    def rank(world):
        data = of(Breaks(9), dispatch=True)
        batches = iter(af.batches(linear_state(data=data, world=world, setup=SHARDS)))
        next(batches)
        with pytest.raises(kind if world.is_main else af.errors.DataError) as caught:
            next(batches)
        return str(caught.value)

    own, *told = simulate(3, rank)
    assert "shard 7" in own
    for each in told:
        said = f"Rank 0, which reads the data for all ranks, failed: {kind.__name__}"
        assert each.startswith(said)
        assert "shard 7" in each


class Keeps(Stateful):
    """Goes on in the very dict that it is given, as some datasets do."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.given = state

    def __iter__(self):
        for sample in super().__iter__():
            if hasattr(self, "given"):
                for name in self.given:
                    self.given[name] = -1
            yield sample


def test_a_stream_does_not_change_a_cursor():
    """Whatever it does to the dict that it is given, a state can be read again from there."""
    data = of(Keeps(10), 2)
    cursor = read(data)[1].cursor
    rest = flat(read(data, cursor=cursor))
    assert rest == flat(read(data, cursor=cursor)) == [[4, 5], [6, 7], [8, 9]]


class Turning(Plain):
    """Begins elsewhere in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = [(i + 2 * self.epoch) % self.n for i in range(self.n)]
        return iter([torch.tensor([float(i)]) for i in numbers])


def test_a_resumed_epoch_is_filled_from_its_own_beginning():
    """Padding repeats the samples with which this epoch began, not those of another."""
    data = of(Turning(7), 3, remainder="pad", replay=True)
    whole = flat(read(data, epochs=3))
    assert whole[5] == [1.0, 2.0, 3.0]
    for epoch in range(3):
        rest = flat(read(data, cursor=af.typing.Cursor(epoch, 3), epochs=3))
        assert rest == whole[3 * epoch + 1 :]


def test_a_worker_that_had_ended_reads_nothing_after_a_resume():
    """Not even a dataset that begins anew behind its end."""
    data = of(Remembering(4), 2)
    ended, resumed = (reading.Counted(data, 0, 0) for _ in range(2))
    assert len(list(ended)) == 4
    resumed.load_state_dict(ended.state_dict())
    assert list(resumed) == []
