# SPDX-License-Identifier: Apache-2.0
"""`Data` by index: arrays, tables, datasets of other libraries, mixes; what it refuses."""

import math
import re
import tracemalloc
from collections import Counter
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import accelfn as af
from accelfn.errors import ArgumentError, DataError
from accelfn.testing import simulate
from tests.states import linear_state, read

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)
TEXTS = [str(index) for index in range(10)]
ROWS = {"x": list(range(10)), "text": TEXTS}
HF_ROWS = datasets.Dataset.from_dict(ROWS)
TABLE = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}, index=[7, 8, 9])


def data_of(dataset, **options):
    return af.Data(dataset, **{"global_batch_size": 4, **options})


def values(dataset, **options):
    """Return the values of an epoch."""
    return [batch.value for batch in read(data_of(dataset, **options))]


# Arrays and tensors.


class Halved(TensorDataset):
    """Changes rows, as an augmentation does."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] / 2


@pytest.mark.parametrize(
    ("wrap", "workers"), [(lambda array: array, 1), (lambda a: {"x": {"y": a}}, 0)]
)
def test_memory_mapped_array(wrap, workers, tmp_path):
    """An array on disk is read by row, shuffled too, in any container."""
    X.numpy().tofile(tmp_path / "x")
    array = np.memmap(tmp_path / "x", dtype=np.float32, mode="r", shape=(10, 2))
    for batch in read(data_of(wrap(array), shuffle=True, num_workers=workers)):
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
    "datasets": (HF_ROWS, lambda i: {"x": i, "text": str(i)}),
    "datasets of torch": (
        HF_ROWS.with_format("torch"),
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
    """However it is stored, sample i is sample i, shuffled and in other processes too."""
    (dataset, sample), seen = KINDS[kind], []
    workers = 2 if kind in ("datasets", "table", "concatenated") and shuffle else 0
    for batch in read(data_of(dataset, shuffle=shuffle, num_workers=workers)):
        assert is_same(batch.value, [sample(i) for i in batch.indices.tolist()])
        assert not getattr(batch.value, "requires_grad", False)
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(10))


class Noisy(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.rand(1)


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Fewer(Noisy):
    def __getitems__(self, wanted):
        return [self[index] for index in wanted[1:]]


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class OfLength(Endless):
    """A dataset that says any length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class OnlyLength:
    def __len__(self):
        return 10


LONG_DOUBLES = np.arange(3, dtype=np.longdouble)
REFUSED = [
    ([], "empty"),
    (torch.empty(0, 2), "empty"),
    ((), "empty"),
    ({}, "empty"),
    (Subset(TensorDataset(X), []), "empty"),
    (datasets.Dataset.from_dict({"x": []}), r"\(Dataset\) is empty"),
    (pa.table({"x": []}), r"\(Table\) is empty"),
    ((i for i in range(3)), "generator can be read only once"),
    (Endless(), "Endless.*no length.*__len__"),
    (OfLength(-1), "OfLength has a __len__ that gives no length: .* >= 0"),
    (OfLength(2**70), "OfLength has a __len__ that gives no length"),
    (OnlyLength(), "OnlyLength.*index"),
    (3, "int.*index"),
    (None, "NoneType.*index"),
    ((X, Y[:3]), r"\(10, 2\), \(3,\).*rows"),
    ({"x": X, "y": Y[:3]}, "rows"),
    (torch.tensor(1.0), "rows"),
    ({"x": [1, 2, 3]}, "dict"),
    (LONG_DOUBLES, r"dtype '.*', which torch does not have. Pass array.astype"),
    (np.arange(3, dtype=">f4"), r"array of dtype '>f4'.*astype"),
    (np.ma.masked_array([1.0], [0]), r"no masked array.* Pass .*filled"),
    (Subset(X, [3, 30]), "has the index 30, but its dataset has 10 samples"),
    (Subset(X, [-11]), "has the index -11, but its dataset has 10 samples"),
    (datasets.DatasetDict(train=HF_ROWS), "DatasetDict cannot be read by index"),
    ({1, 2}, r"set has no order. Pass sorted\(dataset\)"),
    (af.Data(X, global_batch_size=2), "the dataset is itself an af.Data"),
    (TABLE, r"pandas indexes a table by names.*to_numpy"),
    (TABLE["x"], r"pandas indexes a table by names.*to_numpy"),
]


@pytest.mark.parametrize(("dataset", "words"), REFUSED)
def test_refused_when_data_is_made(dataset, words):
    """What would be read wrongly is refused at once, with what to give instead."""
    with pytest.raises(DataError, match=words) as caught:
        af.Data(dataset, global_batch_size=1)
    assert isinstance(caught.value, ValueError)


OPTIONS = [
    ("remainder", "wrap"),
    ("remainder", None),
    ("collate", 42),
    ("order", 42),
    ("order", SimpleNamespace(of_epoch=None)),
    ("shuffle", "yes"),
    ("shuffle", 1),
    ("timeout", 0),
    ("timeout", None),
    ("timeout", math.nan),
    ("timeout", math.inf),
    ("timeout", True),
    ("fingerprint", 3),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_bad_options(name, value):
    """A count that is none, or an option that is unknown, is refused with its value."""
    with pytest.raises(ArgumentError, match=rf"af\.Data\({name}=") as caught:
        data_of(X, **{name: value})
    assert isinstance(caught.value, ValueError)


def test_drop_that_leaves_nothing():
    """remainder="drop" with more samples a batch than there are is refused."""
    words = r"global_batch_size=11.*drop.*10 samples.*smaller"
    with pytest.raises(DataError, match=words):
        data_of(X, global_batch_size=11, remainder="drop")


FAILING = {
    "null": (
        pa.table({"x": [1, None]}),
        DataError,
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
        DataError,
        r"Fewer.__getitems__\(\[0, 1, 2, 3\]\) returned 3",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_refused_when_read(case):
    """What cannot become a batch is named: a column, or the samples."""
    dataset, kind, words = FAILING[case]
    with pytest.raises(kind) as error:
        values(dataset)
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert re.search(words, said)


# Streams of datasets.


def streamed():
    return HF_ROWS.to_iterable_dataset(num_shards=4)


def numbers(samples):
    return [sample["x"] for sample in samples]


def stream_data(stream, **options):
    return af.Data(stream, **{"global_batch_size": 3, "collate": numbers, **options})


def test_a_shuffle_buffer_is_not_resumed_from_its_state():
    """datasets does not save its buffer: that is refused, or the stream is read again."""

    def shuffled():
        return streamed().shuffle(seed=1, buffer_size=3)

    whole = read(stream_data(shuffled()))
    cursor = whole[1].cursor
    with pytest.raises(DataError, match=r"shuffle buffer.*replay=True.*6 samples"):
        read(stream_data(shuffled()), cursor=cursor)
    rest = read(stream_data(shuffled(), replay=True), cursor=cursor)
    assert [b.value for b in rest] == [b.value for b in whole[2:]]


# Size.


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_number_of_samples_needs_no_memory(shuffle):
    """An epoch over 10**12 samples starts, and resumes at 9 * 10**11, in 20 MB."""
    state = linear_state(data=data_of(range(10**12), shuffle=shuffle))
    tracemalloc.start()
    first = next(iter(af.batches(state, until_epoch=1)))
    later = af.seek(state, 9 * 10**11)
    resumed = next(iter(af.batches(later, until_epoch=1)))
    left = len(af.batches(later, until_epoch=1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
    assert left == 10**11 // 4
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


@given(
    picked=st.lists(st.permutations(range(6)), max_size=3),
    bad=st.integers(0, 5),
    batch_size=st.integers(1, 6),
    mixed=st.booleans(),
    collate=st.sampled_from([None, torch.utils.data.default_collate]),
)
def test_a_sample_that_cannot_be_read_is_named(picked, bad, batch_size, mixed, collate):
    """By its index in the data, and by that in what has it, in subsets and beside others."""
    dataset, place = Gap(bad), bad
    for indices in picked:
        dataset, place = Subset(dataset, indices), indices.index(place)
    options = {"global_batch_size": batch_size, "collate": collate}
    data = (
        af.Data.mix([Gap(), dataset], **options)
        if mixed
        else af.Data(dataset, **options)
    )
    with pytest.raises(KeyError) as error:
        read(data, epochs=2)
    assert [note for note in error.value.__notes__ if "simulated" not in note] == [
        f"Gap[{bad}] raised this error. It is the sample at dataset index {place}.",
        *["The sample is in dataset 1 of the mix."] * mixed,
    ]


# Order and loaders.


def test_shuffle_moves_samples_far():
    """A shuffled order keeps next to no neighbours together."""
    (batch,) = read(data_of(range(1000), global_batch_size=1000, shuffle=True))
    assert (batch.indices.diff() == 1).sum() < 10


@pytest.mark.parametrize("options", [{}, {"global_batch_size": 2}])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_batches_of_a_loader_are_no_samples(kind, options):
    """A loader in place of a dataset is refused with the ways to give it."""
    words = rf"a {kind.__name__} returns batches(.|\n)*af.Data.from_loader\(loader\) or TrainSt"
    for loader in (kind(X, batch_size=5), kind(X, batch_sampler=[[1]])):
        with pytest.raises(ArgumentError, match=words):
            af.Data(loader, **options)


class Counted(Dataset):
    """Knows how often each of its samples was read."""

    def __init__(self):
        self.reads = Counter()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.reads[index] += 1
        return float(index)


def test_ranks_look_once_at_what_is_alike():
    """Eight samples are read once more than they are measured, and no other."""

    def each_rank(world):
        dataset = Counted()
        af.evaluate(linear_state(world=world), data_of(dataset), lambda *_: 1.0)
        return dataset.reads

    first, second = simulate(2, each_rank)
    measured = Counter(range(12))
    assert first + second - measured == Counter(
        dict.fromkeys(set(first) & set(second), 2)
    )


TWO_LEAVES = {
    "float32": lambda number: torch.tensor([number, 1.0]),
    "bfloat16": lambda number: torch.tensor([number, 1.0]).bfloat16(),
    "requires grad": lambda number: torch.tensor([number, 1.0], requires_grad=True),
    "computed": lambda number: 2 * torch.tensor([number], requires_grad=True),
    "every other row": lambda number: (
        torch.tensor([1.0, number, 1.0, number])[::2] * number
    ),
    "one of a column": lambda number: torch.tensor([[number, 1.0], [2.0, 3.0]])[:1, 0],
    "none": lambda number: torch.ones(0, int(number)),
    "turned": lambda number: torch.tensor([[number, 1.0], [2.0, 3.0]]).T,
    "conjugate": lambda number: torch.tensor([number + 1j]).conj(),
    "negative": lambda number: torch.tensor([number * 1j]).conj().imag,
    "complex": lambda number: torch.tensor([1 + number * 1j]),
    "boolean": lambda number: torch.tensor(number > 1),
    "array": lambda number: np.array([number, 1.0]),
    "scalar of numpy": np.float64,
    "row with fields": lambda number: np.array([(number, 1)], "f4,i4")[0],
    "text": str,
}


@pytest.mark.parametrize("kind", TWO_LEAVES)
def test_data_are_known_by_the_numbers_of_any_tensor(kind):
    """The same numbers made anew are the same data, others are other data."""
    one, again, other = (
        af.Data([TWO_LEAVES[kind](number)], global_batch_size=1).facts["fingerprint"]
        for number in (1.0, 1.0, 2.0)
    )
    assert one == again != other


@pytest.mark.parametrize("num_shares", [1, 3])
def test_a_plan_has_one_of_its_shares(num_shares):
    """The last is one less than there are; the next is refused with which there are."""
    last = af.typing.Plan(rank=num_shares - 1, num_shares=num_shares)
    assert last.parts((0, 12))[-1][1] == 12
    words = rf"rank={num_shares}, num_shares={num_shares}.*0 to {num_shares - 1}\."
    with pytest.raises(ArgumentError, match=words):
        af.typing.Plan(rank=num_shares, num_shares=num_shares)


def backwards(*_, n=10):
    return range(n - 1, -1, -1)


PRINTED = {
    "a stream (Stream), batches of 4": (Stream(), {}),
    "10 samples (Tensor), batches by list": (
        X,
        {"batch_sampler": [[0, 1], [2]], "global_batch_size": None},
    ),
    "10 samples (Tensor), shuffled, batches of 4": (X, {"shuffle": True}),
    "10 samples (Tensor), own order backwards, batches of 4": (X, {"order": backwards}),
    "10 samples (Tensor), own order, batches of 4": (X, {"order": partial(backwards)}),
}


@pytest.mark.parametrize("text", PRINTED)
def test_data_are_printed_by_what_they_are(text):
    """Of any kind: how many samples, of which dataset, in which order and batches."""
    dataset, options = PRINTED[text]
    assert repr(data_of(dataset, **options)) == f"<Data of {text}>"
