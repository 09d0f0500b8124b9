# SPDX-License-Identifier: Apache-2.0
"""`Data`: any map-style dataset, in an order that is a function."""

import itertools
import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


def make(data, **options):
    """Return a small state over data."""
    return linear_state(2, data=data, **options)


def read(data, epochs=1, **options):
    """Return the batches of some epochs."""
    return list(af.batches(make(data, **options), until_epoch=epochs))


def indices(data, **options):
    """Return the dataset indices of an epoch, a list a batch."""
    return [batch.indices.tolist() for batch in read(data, **options)]


class Items(Dataset):
    """Samples one by one."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Noisy(Items):
    """Samples with noise drawn from torch's generator."""

    def __getitem__(self, index):
        return X[index] + torch.rand(2), int(Y[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class OnlyLength:
    def __len__(self):
        return 10


# What a dataset may be.


@pytest.mark.parametrize("dataset", [(X, Y), TensorDataset(X, Y), Items()])
def test_collate_gets_samples(dataset):
    """A collate function of one's own gets a list of samples, of any dataset."""
    collate = lambda samples: [int(y) for _, y in samples]  # noqa: E731
    data = af.Data(dataset, global_batch_size=4, collate=collate)
    assert [b.value for b in read(data)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# What it may not be.


class OfLength:
    """A dataset that says any length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


REFUSED = {
    "empty list": ([], "empty"),
    "empty tensor": (torch.empty(0, 2), "empty"),
    "empty tuple": ((), "empty"),
    "empty dict": ({}, "empty"),
    "empty Subset": (Subset(TensorDataset(X), []), "empty"),
    "generator": ((i for i in range(3)), "generator can be read only once"),
    "no length": (Endless(), "Endless.*no length.*__len__"),
    "negative": (OfLength(-1), "OfLength has a __len__ that gives no length: .* >= 0"),
    "huge": (OfLength(2**70), "OfLength has a __len__ that gives no length"),
    "no index": (OnlyLength(), "OnlyLength.*index"),
    "number": (3, "int.*index"),
    "none": (None, "NoneType.*index"),
    "uneven tensors": ((X, Y[:3]), r"\(10, 2\), \(3,\).*rows"),
    "uneven dict": ({"x": X, "y": Y[:3]}, "rows"),
    "scalar": (torch.tensor(1.0), "rows"),
    "dict of lists": ({"x": [1, 2, 3]}, "dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_datasets(case):
    """A dataset that cannot be used is refused when `Data` is made, with its kind."""
    dataset, words = REFUSED[case]
    with pytest.raises(af.errors.DataError, match=words) as caught:
        af.Data(dataset, global_batch_size=1)
    assert isinstance(caught.value, ValueError)


def test_array_of_text():
    """An array that no tensor can hold is read item by item, or refused by its kind."""
    try:
        data = af.Data(np.array(["a", "b", "c"]), global_batch_size=2, collate=list)
    except af.errors.DataError as error:
        assert "str" in str(error)  # noqa: PT017 - either of two ways is right
        return
    assert [batch.value for batch in read(data)] == [["a", "b"], ["c"]]


ARGUMENTS = {
    "remainder wrap": {"remainder": "wrap"},
    "remainder None": {"remainder": None},
    "collate 42": {"collate": 42},
    "order 42": {"order": 42},
    "order half": {"order": SimpleNamespace(of_epoch=None)},
    "shuffle yes": {"shuffle": "yes"},
    "shuffle 1": {"shuffle": 1},
    "timeout 0": {"timeout": 0},
    "timeout None": {"timeout": None},
    "timeout nan": {"timeout": math.nan},
    "timeout inf": {"timeout": math.inf},
    "timeout True": {"timeout": True},
    "fingerprint 3": {"fingerprint": 3},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments(case):
    """A count that is none, or an option that is unknown, is refused with its value."""
    name = case.split(maxsplit=1)[0]
    with pytest.raises(af.errors.ArgumentError, match=rf"af\.Data\({name}=") as caught:
        af.Data(X, **{"global_batch_size": 4, **ARGUMENTS[case]})
    assert isinstance(caught.value, ValueError)


def test_drop_that_leaves_nothing():
    """remainder="drop" with more samples a batch than there are is refused."""
    with pytest.raises(
        af.errors.DataError, match=r"global_batch_size=11.*drop.*10 samples.*smaller"
    ):
        af.Data(X, global_batch_size=11, remainder="drop")


# Order.


def test_shuffle_moves_samples_far():
    """A shuffled order keeps next to no neighbours together."""
    data = af.Data(range(1000), global_batch_size=1000, shuffle=True, collate=len)
    (drawn,) = indices(data)
    kept = sum(b - a == 1 for a, b in itertools.pairwise(drawn))
    assert kept < 10


# Workers.


def test_augmentation_leaves_the_generator():
    """Reading draws nothing from the process's own generator."""
    random = torch.get_rng_state()
    legacy = np.random
    legacy.seed(3)
    pair = legacy.randn(2)
    legacy.seed(3)
    legacy.randn()  # numpy keeps the second number of the pair
    read(af.Data(Noisy(), global_batch_size=4, shuffle=True))
    assert legacy.randn() == pair[1]
    assert torch.equal(random, torch.get_rng_state())


# From a DataLoader.


@pytest.mark.parametrize("options", [{}, {"global_batch_size": 2}])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_batches_of_a_loader_are_no_samples(kind, options):
    """A loader in place of a dataset is refused with the ways to give it."""
    for loader in (kind(Items(), batch_size=5), kind(Items(), batch_sampler=[[1]])):
        with pytest.raises(
            af.errors.ArgumentError, match=rf"a {kind.__name__} returns batches"
        ) as e:
            af.Data(loader, **options)
        assert "af.Data.from_loader(loader) or TrainState.create(data=loader)" in str(
            e.value
        )


class Drawn(Dataset):
    """Samples that are drawn at random, each after its dataset's number and its own."""

    def __init__(self, which, length):
        self.which, self.length = which, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.which, index, float(torch.rand((), dtype=torch.float64))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    size=st.integers(1, 3),
    batch_size=st.integers(1, 6),
)
def test_what_samples_of_a_mix_draw(lengths, size, batch_size):
    """No two samples of a mix share a draw, and ranks draw what one process does."""
    parts = [Drawn(which, length) for which, length in enumerate(lengths)]
    data = af.Data.mix(parts, global_batch_size=batch_size)

    def epoch(world):
        state = make(data, world=world, setup=af.shard_data())
        return [
            sample
            for batch in af.batches(state, until_epoch=1)
            for sample in af.all_gather_valid(
                torch.stack([each.double() for each in batch.value], 1), batch, world
            ).tolist()
        ]

    (expected,) = simulate(1, epoch)
    assert len({draw for *_, draw in expected}) == sum(lengths)
    for found in simulate(size, epoch):
        assert found == expected


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
        data = af.Data(dataset, global_batch_size=4)
        af.evaluate(make(None, world=world), data, lambda *_: 1.0)
        return dataset.reads

    first, second = simulate(2, each_rank)
    measured = Counter(range(12))
    assert first + second - measured == Counter(
        dict.fromkeys(set(first) & set(second), 2)
    )


class Ragged(Dataset):
    """Samples of one leaf or two, as a generator of its own says."""

    def __init__(self, seed):
        self.own = np.random.default_rng(seed)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return [float(index)] * (1 + (self.own.random() < 0.2))


def test_samples_of_as_many_parts_as_chance_has_it_are_no_difference():
    """They differ on one rank as well; what differs beside them is told none the less."""

    def told(make_data):
        def each_rank(world):
            try:
                af.evaluate(
                    make(None, world=world), make_data(world.rank), lambda *_: 1.0
                )
            except af.errors.ReplicaMismatchError as error:
                return str(error)
            return ""

        return set(simulate(2, each_rank).results)

    options = {
        "global_batch_size": 2,
        "collate": lambda samples: torch.zeros(len(samples)),
    }
    assert told(lambda rank: af.Data(Ragged(rank), **options)) == {""}
    (said,) = told(
        lambda rank: af.Data.mix([Ragged(rank), [float(rank), 1.0]], **options)
    )
    assert "dataset 1, sample 0" in said
    assert "dataset 0" not in said


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


class Unending:
    """A sampler without a length."""

    def __iter__(self):
        return itertools.count()


def test_a_sampler_has_a_length():
    """One of a loader that says none is refused as its data are made, by its class."""
    loader = DataLoader(X, sampler=Unending(), batch_size=2)
    with pytest.raises(
        af.errors.DataError, match="Unending has no length.* a method __len__"
    ):
        _ = af.Data.from_loader(loader).updates_per_epoch


@pytest.mark.parametrize("num_shares", [1, 3])
def test_a_plan_has_one_of_its_shares(num_shares):
    """The last is one less than there are; the next is refused with which there are."""
    last = af.typing.Plan(rank=num_shares - 1, num_shares=num_shares)
    assert last.parts((0, 12))[-1][1] == 12
    words = rf"rank={num_shares}, num_shares={num_shares}.*0 to {num_shares - 1}\."
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.typing.Plan(rank=num_shares, num_shares=num_shares)


PRINTED = {
    "<Data of a stream (Stream), batches of 4>": lambda: af.Data(
        Stream(), global_batch_size=4
    ),
    "<Data of 10 samples (Tensor), batches by list>": lambda: af.Data(
        X, batch_sampler=[[0, 1], [2]]
    ),
    "<Data of 10 samples (Tensor), shuffled, batches of 4>": lambda: af.Data(
        X, global_batch_size=4, shuffle=True
    ),
    "<Data of 10 samples (Tensor), own order backwards, batches of 4>": lambda: af.Data(
        X, global_batch_size=4, order=backwards
    ),
    "<Data of 10 samples (Tensor), own order, batches of 4>": lambda: af.Data(
        X, global_batch_size=4, order=partial(backwards)
    ),
}


def backwards(*_, n=10):
    return range(n - 1, -1, -1)


@pytest.mark.parametrize("text", PRINTED)
def test_data_are_printed_by_what_they_are(text):
    """Of any kind: how many samples, of which dataset, in which order and batches."""
    assert repr(PRINTED[text]()) == text
