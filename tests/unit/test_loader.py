# SPDX-License-Identifier: Apache-2.0
"""`Data.from_loader`: what a torch DataLoader says is kept, or said to be lost."""

from functools import partial
from itertools import count, cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import accelfn as af
from accelfn.testing import simulate
from tests.internals import order_of_sampler, read_sampler
from tests.states import linear_state, read

X = torch.arange(10.0).reshape(10, 1)
of, in_batches = af.Data.from_loader, partial(BatchSampler, drop_last=False)


class Stream(IterableDataset):
    """Seven samples from front to back."""

    def __iter__(self):
        return iter(torch.arange(7.0))


class Given(Sampler):
    """Says ten indices, and gives a function of how often it was told an epoch and asked."""

    def __init__(self, give):
        self.give, self.epoch, self.times = give, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __iter__(self):
        self.times += 1
        return iter(self.give(self.epoch, self.times))


def turned(by):
    return [(i + by) % 10 for i in range(10)]


def indices(loader, epochs=1):
    """Return the dataset indices of a loader's data, a list a batch."""
    batches = read(of(loader), epochs=epochs)
    return [batch.indices.tolist() for batch in batches]


def values(loader, world=None, **options):
    """Return the values of a loader's data, a list a batch, without filler."""
    data = of(loader, **options)
    return [batch.value[~batch.filler].tolist() for batch in read(data, world=world)]


# What is kept.


def test_options_that_are_kept():
    """Sizes, remainder, workers, timeout and collate function are the loader's."""
    loader = DataLoader(
        X, batch_size=3, drop_last=True, num_workers=1, timeout=7, collate_fn=len
    )
    data = of(loader)
    found = data.global_batch_size, data.remainder, data.num_workers, data.timeout
    assert (*found, data.collate) == (3, "drop", 1, 7, len)
    assert of(DataLoader(X)).timeout == 300


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
def test_plain_loaders_are_functions(make):
    """In order or shuffled, it needs no sampler; what only costs time is no loss."""
    assert of(make(X)).ordering.name == "in order"
    assert of(make(X, shuffle=True)).shuffle is True
    fast = make(X, num_workers=1, persistent_workers=True, prefetch_factor=4)
    assert of(fast).num_workers == 1


def test_set_epoch_is_called_within_a_batch_sampler():
    """A sampler hears of the epoch, also one inside a batch sampler."""
    loader = DataLoader(
        X,
        batch_sampler=in_batches(Given(lambda epoch, _: turned(epoch)), 5),
    )
    assert indices(loader, epochs=2)[::2] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


# Streams.


@pytest.mark.parametrize("drop", [False, True])
def test_loader_of_a_stream(drop):
    """A stream's loader says batch size and remainder."""
    loader = DataLoader(Stream(), batch_size=3, drop_last=drop)
    assert [[0, 1, 2], [3, 4, 5], [6]][: 3 - drop] == values(loader)
    data = of(loader, num_ranks=2, num_micro_batches=5)
    assert data.global_batch_size == 30


def test_loader_of_a_stream_of_batches():
    """A stream that batches itself gives each rank a batch an update, converted."""
    loader = DataLoader(Stream(), batch_size=None, collate_fn=lambda x: (x + 100)[None])
    assert [[float(100 + i)] for i in range(7)] == values(loader)
    first, second = simulate(2, lambda world: values(loader, world, num_ranks=2))
    assert first == [[100], [102], [104], [106]]
    assert second == [[101], [103], [105], []]


# What is not kept is said, or refused.


LOST = {
    "worker_init_fn": ({"worker_init_fn": print}, "seed in the dataset"),
    "generator": ({"generator": torch.Generator()}, "the state's seed"),
    "multiprocessing_context": (
        {"multiprocessing_context": "spawn", "num_workers": 1},
        "set_start_method decides",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_said(name):
    """An option that is not kept is named in a warning, with what is done instead."""
    options, words = LOST[name]
    with pytest.warns(UserWarning, match=f"ignores the loader's {name}: .*{words}"):
        of(DataLoader(X, **options))


class Unending:
    """A sampler without a length."""

    def __iter__(self):
        return count()


OF_RANK = DistributedSampler(X, 2, 0)
REFUSED = [
    (lambda: of(X), "expected a torch DataLoader, got Tensor"),
    (
        lambda: of(DataLoader(X, batch_size=None)),
        r"batch_size=None.*Write af\.Data\(dataset, global_batch_size=",
    ),
    (
        lambda: of(DataLoader(X, sampler=OF_RANK)),
        r"DistributedSampler already splits the samples.*shuffle=True",
    ),
    (
        lambda: of(DataLoader(X, batch_sampler=in_batches(OF_RANK, 2))),
        "DistributedSampler already splits the samples",
    ),
    (
        lambda: of(DataLoader(X, batch_sampler=[[0]]), num_ranks=2),
        "num_ranks=2.*over all ranks and micro-batches. Leave out num_ranks=",
    ),
    (
        lambda: of(DataLoader(X, batch_sampler=[[0]]), num_micro_batches=2),
        "Leave out num_micro_batches=",
    ),
    (
        lambda: of(DataLoader(X), num_micro_batches=0),
        "num_micro_batches=0.*micro_batches",
    ),
    (
        lambda: of(DataLoader(X, batch_size=11, drop_last=True)),
        'global_batch_size=11, remainder="drop".*10 samples',
    ),
    (
        lambda: of(DataLoader(X, sampler=Unending())),
        "Unending has no length.* a method __len__",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused_loaders(call, words):
    """What would train on other samples than meant is refused, with what to write."""
    with pytest.raises(af.errors.Error, match=words):
        call()


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("give", "words"),
    [
        (
            lambda _, times: turned(times),
            "different indices when epoch 0 was read twice.*set_epoch",
        ),
        (lambda *_: range(8), "has the length .*, but yielded .* in epoch 0"),
        (
            lambda *_: cycle(range(10)),
            "has the length .*, but yielded more indices in epoch 0",
        ),
    ],
)
def test_samplers_that_cannot_be_resumed(give, words, within):
    """A sampler with a state of its own, or a wrong length, is refused as it is read."""
    options = {"batch_size": 2, "sampler": Given(give)}
    if within:
        options = {"batch_sampler": in_batches(Given(give), 2)}
    with pytest.raises(af.errors.DataError, match=words):
        indices(DataLoader(X, **options))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "yielded no indices for update 0"),
        ([[0], []], "yielded no indices for update 1"),
        ([0, 1], "yielded 0; expected a list of indices"),
        ([[0.5]], r"indices \[0.5\]; expected integers from 0 to 9"),
        ([[3, 10]], r"indices \[10\]; expected integers from 0 to 9"),
        ([[-1]], r"indices \[-1\]; expected integers from 0 to 9"),
    ],
)
def test_batches_that_are_none(batches, words):
    """A batch sampler that gives something else than indices is refused."""
    with pytest.raises(af.errors.DataError, match=rf"batch_sampler \(list\) .*{words}"):
        read(af.Data(X, batch_sampler=batches))


def test_indices_in_tensors_and_arrays():
    """A batch of indices may be a tensor or an array."""
    batches = [torch.tensor([3, 1]), torch.tensor([4]).numpy(), (5, 6)]
    read_batches = read(af.Data(X, batch_sampler=batches))
    assert [batch.indices.tolist() for batch in read_batches] == [[3, 1], [4], [5, 6]]


class Limited(DataLoader):
    """Ends after two batches."""

    def __iter__(self):
        return islice(super().__iter__(), 2)


class Halved(DataLoader):
    """Says that it is half as long."""

    def __len__(self):
        return super().__len__() // 2


class Further(Limited):
    """Inherits its own way."""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Limited, "Limited has its own __iter__"),
        (Halved, "Halved has its own __len__"),
        (Further, "Limited has its own __iter__"),
    ],
)
def test_a_loader_that_iterates_in_its_own_way(kind, said):
    """A subclass with its own __iter__ or __len__ is refused, and never read past."""
    for make in (of, read):
        with pytest.raises(af.errors.DataError, match=rf"{said}(.|\n)*af\.join_uneven"):
            make(kind(X, batch_size=2))


class Collating(DataLoader):
    """Changes nothing of which batches come, but what they are made of."""

    def __init__(self, dataset, **options):
        super().__init__(dataset, collate_fn=self.doubled, **options)

    def doubled(self, samples):
        return 2 * torch.stack(samples)


def test_a_loader_that_collates_in_its_own_way():
    """A subclass that only makes other batches of the samples is obeyed."""
    first, *_ = values(Collating(X, batch_size=3))
    assert first == [[0.0], [2.0], [4.0]]


def test_batch_size_of_a_rank_or_a_micro_batch():
    """With num_ranks, and num_micro_batches, the loader's batch size is one of these parts'."""
    loader = DataLoader(X, batch_size=4)
    assert of(loader, num_ranks=3).global_batch_size == 12
    data = of(loader, num_ranks=3, num_micro_batches=2)
    assert data.global_batch_size == 24


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_loader_that_is_split_is_told(size, parts):
    """D: a bare loader's batch size is told where ranks or micro-batches share it, once."""
    setup = af.chain(af.shard_data(), af.accumulate(num_micro_batches=parts))

    def create(data):
        def size_of(world):
            state = linear_state(data=data, world=world, setup=setup)
            return state.data.global_batch_size

        assert set(simulate(size, size_of).results) == {4}

    loader = DataLoader(X, batch_size=4)
    create(of(loader))
    if size * parts == 1:
        create(loader)
        return
    words = (
        rf"4, as(.|\n)*{size} ranks and {parts} micro(.|\n)*num_micro_batches={parts}\)"
    )
    with pytest.warns(af.errors.AccelfnWarning, match=words) as told:
        create(loader)
    assert len(told) == 1


@given(
    n=st.integers(1, 12),
    num=st.integers(1, 12),
    replacement=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_random_sampler_draws_what_it_is_told_to(n, num, replacement, seed):
    """With replacement, or of another number than there are, it is drawn from, not shuffled."""
    sampler = RandomSampler(range(n), replacement=replacement, num_samples=num)
    found = order_of_sampler(sampler, n).of_epoch(n, seed=seed, epoch=0)
    if num == n and not replacement:
        assert sorted(found(np.arange(n))) == list(range(n))
        return
    drawn = read_sampler(sampler, seed=seed, epoch=0)
    assert found(np.arange(num)).tolist() == drawn


def test_a_warning_is_of_the_users_line(tmp_path):
    """Wherever the user's code lies, beside the package under a name like its own too."""
    script = "def make(data, loader): return data.from_loader(loader)\n"
    beside = Path(af.__file__).parent
    for place in (
        tmp_path / "train.py",
        beside.with_name(f"{beside.name}_runs") / "x.py",
    ):
        found = {}
        exec(compile(script, str(place), "exec"), found)  # noqa: S102 - it is its place
        with pytest.warns(af.errors.AccelfnWarning, match="worker_init_fn") as told:
            found["make"](af.Data, DataLoader(X, worker_init_fn=print))
        assert [Path(each.filename) for each in told] == [place]
