# SPDX-License-Identifier: Apache-2.0
"""What samples are read from: arrays, tables, datasets of other libraries; never wrong."""

import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import attrs
import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

import accelfn as af
from accelfn.testing import simulate
from tests.internals import tree_map
from tests.states import bits, linear_state

X = torch.arange(20.0).reshape(10, 2)
TEXTS = [str(index) for index in range(10)]
ROWS = {"x": list(range(10)), "text": TEXTS}


def make(data, world=None, cursor=None):
    """Return a small state over data, at a cursor."""
    state = linear_state(data=data, world=world, setup=af.shard_data())
    return state if cursor is None else attrs.evolve(state, cursor=cursor)


def read(dataset, **options):
    """Return the batches of an epoch."""
    data = af.Data(dataset, **{"global_batch_size": 4, **options})
    return list(af.batches(make(data), until_epoch=1))


def values(dataset, **options):
    """Return the values of an epoch."""
    return [batch.value for batch in read(dataset, **options)]


# Arrays and tensors.


def mapped(folder):
    """Return an array on disk."""
    array = np.memmap(folder / "x", dtype=np.float32, mode="w+", shape=(10, 2))
    array[:] = X.numpy()
    array.flush()
    return np.memmap(folder / "x", dtype=np.float32, mode="r", shape=(10, 2))


class Halved(TensorDataset):
    """Changes rows, as an augmentation does."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] / 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda array: array, lambda a: {"x": {"y": a}}])
def test_memory_mapped_array(wrap, workers, tmp_path):
    """An array on disk is read by row, shuffled too, in any container."""
    for batch in read(wrap(mapped(tmp_path)), shuffle=True, num_workers=workers):
        value = batch.value if torch.is_tensor(batch.value) else batch.value["x"]["y"]
        assert torch.equal(X[batch.indices], value)


class Doubled(Subset):
    """Changes items, as a transform on a part of a dataset does."""

    def __getitem__(self, index):
        return 2 * super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Many:
    """Has all its items at once."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index]

    def __getitems__(self, indices):
        return list(X[indices])


class OneByOne(Many):
    """Changes items of such a one, and says nothing of many."""

    def __getitem__(self, index):
        return 2 * super().__getitem__(index)


class HandsOn:
    """Changes items of a dataset, and has all else of it."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return -self.dataset[index]

    def __getattr__(self, name):
        return getattr(self.dataset, name)


KINDS = {
    "list": (list(range(10, 20)), lambda i: 10 + i),
    "range": (range(10, 20), lambda i: 10 + i),
    "float16": (X.numpy().astype(np.float16), lambda i: X[i].half()),
    "uint16": (X.to(torch.uint16), lambda i: X[i].to(torch.uint16)),
    "backward": (X.flip(0).numpy()[::-1], lambda i: X[i]),
    "broadcast": (np.broadcast_to(np.float32(1), (10, 2)), lambda _: torch.ones(2)),
    "parameter": (nn.Parameter(X.clone()), lambda i: X[i]),
    "sparse": (X.to_sparse(), lambda i: X[i]),
    "concatenated": (ConcatDataset([list(X[:3]), list(X[3:])]), lambda i: X[i]),
    "Subset of Subset": (
        Subset(Subset(list(X), range(9, -1, -1)), range(9, -1, -1)),
        lambda i: X[i],
    ),
    "Subset of Subset of rows": (
        Subset(Subset(X, range(9, -1, -1)), range(9, -1, -1)),
        lambda i: X[i],
    ),
    "Subset with items of its own": (Doubled(X, range(10)), lambda i: 2 * X[i]),
    "tensors with items of their own": (Halved(X), lambda i: X[i] / 2),
    "many at once": (Many(), lambda i: X[i]),
    "items of its own, of one that has many at once": (OneByOne(), lambda i: 2 * X[i]),
    "Subset of such a one": (
        Subset(Doubled(list(X), range(9, -1, -1)), range(9, -1, -1)),
        lambda i: 2 * X[i],
    ),
    "items of its own around a Subset": (
        HandsOn(Subset(list(X), range(10))),
        lambda i: -X[i],
    ),
    "Subset from the end": (Subset(X, range(-10, 0)), lambda i: X[i]),
    "Subset by array": (Subset(X.numpy(), np.arange(10)), lambda i: X[i]),
    "table": (pa.table({"x": X[:, 0].numpy()}), lambda i: {"x": X[i, 0]}),
    "chunked table": (
        pa.concat_tables([pa.table({"x": [i, i + 1]}) for i in range(0, 10, 2)]),
        lambda i: {"x": torch.tensor(i)},
    ),
    "record batch": (
        pa.RecordBatch.from_pydict({"x": list(range(10))}),
        lambda i: {"x": torch.tensor(i)},
    ),
    "datasets": (datasets.Dataset.from_dict(ROWS), lambda i: {"x": i, "text": str(i)}),
    "datasets of torch": (
        datasets.Dataset.from_dict(ROWS).with_format("torch"),
        lambda i: {"x": torch.tensor(i), "text": str(i)},
    ),
    "datasets of numpy": (
        datasets.Dataset.from_dict({"x": list(range(10))}).with_format("numpy"),
        lambda i: {"x": torch.tensor(i)},
    ),
}


def is_same(batch, expected):
    """Whether a collated value has these samples."""
    if isinstance(batch, dict):
        return all(is_same(batch[k], [e[k] for e in expected]) for k in expected[0])
    if isinstance(batch, list):
        return batch == expected
    rows = torch.stack([torch.as_tensor(each) for each in expected])
    return torch.equal(batch.to_dense().reshape(rows.shape), rows)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_read_at_its_index(kind, shuffle):
    """However it is stored, sample i is sample i, in order and shuffled."""
    dataset, sample = KINDS[kind]
    seen = []
    for batch in read(dataset, shuffle=shuffle):
        assert is_same(batch.value, [sample(i) for i in batch.indices.tolist()])
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("kind", ["datasets", "table", "concatenated"])
def test_workers_read_the_same(kind):
    """Two processes read what one does."""
    dataset, sample = KINDS[kind]
    for batch in read(dataset, num_workers=2):
        assert is_same(batch.value, [sample(i) for i in batch.indices.tolist()])


def test_parts_of_a_split_dataset():
    """torch's random_split gives datasets like any other."""
    parts = random_split(TensorDataset(X), [7, 3])
    seen = torch.cat([value[0] for part in parts for value in values(part)])
    assert torch.equal(X, seen[seen[:, 0].argsort()])


def test_batches_of_a_parameter_have_no_graph():
    """Data that were given with requires_grad take no part in the backward pass."""
    (batch,) = read(nn.Parameter(X.clone()), global_batch_size=10)
    assert not batch.value.requires_grad


class Noisy(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.rand(1)


def test_stacked_datasets_draw_by_sample():
    """A StackDataset's noise does not depend on the batch size."""
    seen = [
        torch.cat(
            [
                value["a"]
                for value in values(StackDataset(a=Noisy()), global_batch_size=n)
            ]
        )
        for n in (3, 10)
    ]
    assert torch.equal(*seen)


def test_columns_of_a_table():
    """Numbers and booleans become tensors, text and lists what torch's collate makes."""
    rows = {"f": [0.5, 1.5], "b": [True, False], "t": ["a", "b"], "l": [[1, 2], [3, 4]]}
    (value,) = values(pa.table(rows))
    assert value["f"].tolist() == rows["f"]
    assert value["b"].tolist() == rows["b"]
    assert value["t"] == rows["t"]
    assert torch.stack(value["l"]).T.tolist() == rows["l"]
    assert values(pa.table(rows), collate=list)[0][1] == {
        k: v[1] for k, v in rows.items()
    }


def test_rows_made_by_a_transform():
    """A transform of datasets is called, and draws what (seed, epoch) says."""

    def noisy(rows):
        return {"y": [torch.rand(1) for _ in rows["x"]]}

    rows = datasets.Dataset.from_dict(ROWS).with_transform(noisy)
    first, again = (torch.cat([v["y"] for v in values(rows)]) for _ in range(2))
    assert torch.equal(first, again)
    assert len(first.unique()) == 10


class Fewer(Noisy):
    def __getitems__(self, wanted):
        return [self[index] for index in wanted[1:]]


REFUSED = {
    "no such dtype": (
        np.arange(3, dtype=np.longdouble),
        r"array of dtype '.*', which torch does not have. Pass array.astype",
    ),
    "other byte order": (np.arange(3, dtype=">f4"), r"array of dtype '>f4'.*astype"),
    "masked": (
        np.ma.masked_array([1.0, 2.0], [0, 1]),
        r"no masked array.* Pass .*filled",
    ),
    "Subset beyond": (
        Subset(X, [3, 30]),
        "has the index 30, but its dataset has 10 samples",
    ),
    "Subset before": (
        Subset(X, [-11]),
        "has the index -11, but its dataset has 10 samples",
    ),
    "datasets, empty": (datasets.Dataset.from_dict({"x": []}), r"\(Dataset\) is empty"),
    "table, empty": (pa.table({"x": []}), r"\(Table\) is empty"),
    "several splits": (
        datasets.DatasetDict(train=datasets.Dataset.from_dict(ROWS)),
        "DatasetDict cannot be read by index",
    ),
    "set": ({1, 2}, r"set has no order. Pass sorted\(dataset\)"),
    "data": (af.Data(X, global_batch_size=2), "the dataset is itself an af.Data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_data_is_made(case):
    """What would be read wrongly is refused at once, with what to give instead."""
    dataset, words = REFUSED[case]
    with pytest.raises(af.errors.DataError, match=words):
        af.Data(dataset, global_batch_size=2)


FAILING = {
    "null": (
        pa.table({"x": [1, None]}),
        af.errors.DataError,
        "Column 'x'.*null.*collate=",
    ),
    "no collate": (
        pa.table({"x": pa.array([1, 2], pa.timestamp("s"))}),
        TypeError,
        "the column 'x'",
    ),
    "objects": ([object()], TypeError, r"dataset indices \[0\]"),
    "fewer": (
        Fewer(),
        af.errors.DataError,
        r"Fewer.__getitems__\(\[0, 1, 2, 3\]\) returned 3",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_refused_when_read(case):
    """What cannot become a batch is named: a column, or the samples."""
    dataset, kind, words = FAILING[case]
    with pytest.raises(kind) as error:
        read(dataset)
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert re.search(words, said)


# Streams of datasets.


def streamed():
    return datasets.Dataset.from_dict(ROWS).to_iterable_dataset(num_shards=4)


def numbers(samples):
    return [sample["x"] for sample in samples]


def stream_data(stream, **options):
    return af.Data(stream, **{"global_batch_size": 3, "collate": numbers, **options})


def listed(data, **options):
    return list(af.batches(make(data, **options), until_epoch=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_datasets_resumes_at_every_batch(workers):
    """Its own state, made plain, puts a fresh one at the very next sample."""
    whole = listed(stream_data(streamed()))
    assert [b.value for b in whole] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    for done, batch in enumerate(whole[:-1], 1):
        data = stream_data(streamed(), num_workers=workers)
        rest = listed(data, cursor=batch.cursor)
        assert [b.value for b in rest] == [b.value for b in whole[done:]]


def test_a_shuffle_buffer_is_not_resumed_from_its_state():
    """datasets does not save its buffer: that is refused, or the stream is read again."""

    def shuffled():
        return streamed().shuffle(seed=1, buffer_size=3)

    whole = listed(stream_data(shuffled()))
    cursor = whole[1].cursor
    with pytest.raises(
        af.errors.DataError, match=r"shuffle buffer.*replay=True.*6 samples"
    ):
        listed(stream_data(shuffled()), cursor=cursor)
    rest = listed(stream_data(shuffled(), replay=True), cursor=cursor)
    assert [b.value for b in rest] == [b.value for b in whole[2:]]


def test_epochs_of_a_shuffled_stream_differ():
    """set_epoch of datasets is called, so that each epoch has its own order."""
    data = stream_data(streamed().shuffle(seed=1, buffer_size=10), global_batch_size=10)
    first, second = (b.value for b in af.batches(make(data), until_epoch=2))
    assert sorted(first) == sorted(second) == ROWS["x"]
    assert first != second


@pytest.mark.parametrize(
    "part",
    [
        lambda stream, world: stream.shard(world.size, world.rank),
        lambda stream, world: split_dataset_by_node(stream, world.rank, world.size),
    ],
)
def test_streams_sharded_by_datasets(part):
    """Each rank reads its own part, and resumes in it; together they have each sample once."""

    def run(world, cursors=None):
        data = stream_data(part(streamed(), world), global_batch_size=4, sharded=True)
        read_batches = listed(data, world=world, cursor=cursors and cursors[world.rank])
        kept = [
            value
            for b in read_batches
            for value, filler in zip(b.value, b.filler.tolist(), strict=True)
            if not filler
        ]
        return kept, [b.value for b in read_batches], read_batches[0].cursor

    whole = simulate(2, run).results
    assert sorted(whole[0][0] + whole[1][0]) == ROWS["x"]
    rest = simulate(2, lambda world: run(world, [each[2] for each in whole])).results
    assert [each[1][1:] for each in whole] == [each[1] for each in rest]


# Size.


class Huge(Dataset):
    def __len__(self):
        return 10**12

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_number_of_samples_needs_no_memory(shuffle):
    """An epoch over 10**12 samples starts, and resumes at 9 * 10**11, in 20 MB."""
    state = make(af.Data(Huge(), global_batch_size=8, shuffle=shuffle))
    tracemalloc.start()
    first = next(iter(af.batches(state, until_epoch=1)))
    later = af.seek(state, 9 * 10**11)
    resumed = next(iter(af.batches(later, until_epoch=1)))
    left = len(af.batches(later, until_epoch=1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
    assert left == 10**11 // 8
    for batch in (first, resumed):
        assert batch.value.tolist() == batch.indices.tolist()
        assert 0 <= batch.indices.min() <= batch.indices.max() < 10**12
    if not shuffle:
        assert resumed.indices[0] == 9 * 10**11


class Gap:
    """A dataset in which one sample cannot be read, if any."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {i: i for i in range(6) if i != self.bad}[index]


COLLATES = [None, torch.utils.data.default_collate]


@given(
    picked=st.lists(st.permutations(range(6)), max_size=3),
    bad=st.integers(0, 5),
    batch_size=st.integers(1, 6),
    beside=st.sampled_from(["nothing", "mix"]),
    collate=st.sampled_from(COLLATES),
)
def test_a_sample_that_cannot_be_read_is_named(
    picked, bad, batch_size, beside, collate
):
    """By its index in the data, and by that in what has it, in subsets and beside others."""
    dataset, place = Gap(bad), bad
    for indices in picked:
        dataset, place = Subset(dataset, indices), indices.index(place)
    options = {"global_batch_size": batch_size, "collate": collate}
    data = {
        "nothing": lambda: af.Data(dataset, **options),
        "mix": lambda: af.Data.mix([Gap(), dataset], **options),
    }[beside]()
    with pytest.raises(KeyError) as error:
        list(af.batches(make(data), until_epoch=2))
    assert [note for note in error.value.__notes__ if "simulated" not in note] == [
        f"Gap[{bad}] raised this error. It is the sample at dataset index {place}.",
        *(["The sample is in dataset 1 of the mix."] if beside == "mix" else []),
    ]


@pytest.mark.parametrize("part", [slice(None), "x"])
def test_a_pandas_table_is_given_as_columns(part):
    """Rows are not what [3] gives of it; its columns are read as tensors."""
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}, index=[7, 8, 9])
    with pytest.raises(
        af.errors.DataError, match=r"pandas indexes a table by names.*to_numpy"
    ):
        next(
            iter(
                af.batches(linear_state(data=af.Data(table[part], global_batch_size=2)))
            )
        )
    columns = {name: torch.tensor(table[name].to_numpy()) for name in table}
    assert len(af.Data(columns, global_batch_size=2).source) == 3


# Datasets made of tensors.

ROWS_OF_TENSORS = {
    "a tensor": X,
    "a tuple": (X, X[:, 0].double()),
    "a dict": {"x": X, "y": X[:, 1].bfloat16()},
    "a tensor beside a dict": (X, {"y": X[:, 1], "z": [X[:, 0].long()]}),
    "a dict beside a tensor": ({"y": X[:, 1]}, X),
    "TensorDataset": TensorDataset(X, X[:, 0]),
}


@pytest.mark.parametrize("kind", ROWS_OF_TENSORS)
@pytest.mark.parametrize(
    "made",
    [
        lambda rows: af.Data(rows, global_batch_size=4, shuffle=True),
        lambda rows: af.Data(
            Subset(rows, range(10)), global_batch_size=4, shuffle=True
        ),
        lambda rows: af.Data.mix(
            [Subset(rows, range(3)), Subset(rows, range(3, 10))],
            global_batch_size=4,
            shuffle=True,
        ),
    ],
    ids=["whole", "Subset", "mix"],
)
def test_a_batch_of_tensors_has_the_containers_of_the_dataset(kind, made):
    """Of tensors in any containers, each has its rows, where it stood, in its dtype."""
    rows = ROWS_OF_TENSORS[kind]
    given = rows.tensors if isinstance(rows, TensorDataset) else rows
    for batch in af.batches(make(made(rows)), until_epoch=1):
        expected = tree_map(lambda leaf, b=batch: leaf[b.indices], given)
        assert bits(batch.value) == bits(expected)


DRAWING = {
    "tensors": (lambda: af.Data(X, global_batch_size=4), False),
    "table": (
        lambda: af.Data(pa.table({"x": X[:, 0].numpy()}), global_batch_size=4),
        False,
    ),
    "mix of tensors": (lambda: af.Data.mix([X, X], global_batch_size=4), False),
    "items": (lambda: af.Data(Noisy(), global_batch_size=4), True),
    "mix, first items": (
        lambda: af.Data.mix([Noisy(), X[:, :1]], global_batch_size=4),
        True,
    ),
    "mix, then items": (
        lambda: af.Data.mix([X[:, :1], Noisy()], global_batch_size=4),
        True,
    ),
    "collate": (lambda: af.Data(X, global_batch_size=4, collate=len), True),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_what_draws_waits_for_a_thread_that_draws(kind):
    """What runs code of the user's may draw, and is refused meanwhile; tensors are read."""
    make_data, may_draw = DRAWING[kind]
    state = make(make_data())

    def rows_read():
        return [batch.num_samples for batch in af.batches(state, until_epoch=1)]

    expected = rows_read()
    with ThreadPoolExecutor(1) as other:
        with af.fork_rng(state, "noise"):
            with af.fork_rng(state, "more"):  # a block in a block of the same thread
                error = other.submit(rows_read).exception()
            drawn = torch.rand(2)
        after = other.submit(rows_read).result()
        with af.fork_rng(state, "noise"):
            assert torch.equal(drawn, torch.rand(2))
    if may_draw:
        assert isinstance(error, af.errors.WorldError)
        assert "while another thread of this process uses" in str(error)
    else:
        assert error is None
    assert after == expected


def test_a_block_that_has_ended_keeps_nobody_waiting():
    """Another thread may draw then, though somebody still has what the block was made of."""
    state = make(af.Data(Noisy(), global_batch_size=4))
    block = af.fork_rng(state, "noise")
    with block:
        expected = torch.rand(2)
    with ThreadPoolExecutor(1) as other:
        found = other.submit(lambda: list(af.batches(state, until_epoch=1))).result()
    assert len(found) == 3
    with block:
        assert torch.equal(expected, torch.rand(2))
