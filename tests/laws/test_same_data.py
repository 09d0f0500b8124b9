# SPDX-License-Identifier: Apache-2.0
"""Ranks that share data hold the same samples at the same indices, or are told before."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    Subset,
    SubsetRandomSampler,
    random_split,
)

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.laws.reading import Counting
from tests.states import linear_state

SETUPS = {
    "ddp": af.chain(af.shard_data(), af.wrap_ddp()),
    "local_sgd": af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
}


class Files(Dataset[Any]):
    """Samples that are read one by one, as files in the order of a folder are."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.numbers[index])])


class Drawing(Files):
    """What is read has noise of torch's generator, and noise of the dataset's own."""

    def __init__(self, numbers: Sequence[int], seed: int, coins: float) -> None:
        super().__init__(numbers)
        self.own, self.coins = np.random.default_rng(seed), coins

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(1) + (self.own.random() < self.coins)
        return {"noise": noise, "number": super().__getitem__(index)}


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": lambda order: torch.tensor(order).float()[:, None],
    "files": Files,
    "subset of a tensor": lambda order: Subset(
        torch.arange(len(order)).float()[:, None], order
    ),
    "subset of files": lambda order: Subset(Files(range(len(order))), order),
    "subset of a subset": lambda order: Subset(
        Subset(Files(range(len(order))), order), range(len(order))
    ),
}


MADE: dict[str, Callable[..., af.Data]] = {
    "alone": af.Data,
    "mixed": lambda dataset, **options: af.Data.mix(
        [torch.arange(3.0)[:, None], dataset], **options
    ),
}


def told(
    size: int,
    dataset_of: Callable[[int], Any],
    by: str,
    made: str = "alone",
    **options: Any,
) -> set[str]:
    """Return what ranks are told, each of whom has a dataset of its own."""

    def rank(world: af.World) -> str:
        data = MADE[made](dataset_of(world.rank), global_batch_size=5, **options)
        state = linear_state(
            data=data if by in SETUPS else None,
            setup=SETUPS.get(by, SETUPS["ddp"]),
            world=world,
        )
        meet = {
            "evaluate": lambda: af.evaluate(state, data, lambda _, b: _first(b).mean()),
            "predict": lambda: list(af.predict(state, data, lambda _, b: _first(b))),
        }
        return _raised(meet.get(by, lambda: af.prepare_engine(state)))

    return set(simulate(size, rank).results)


def built(data: af.Data, world: af.World) -> str:
    """Build a state over data; return what a rank is told if it is refused."""
    state = linear_state(data=data, setup=SETUPS["ddp"], world=world)
    return _raised(lambda: af.prepare_engine(state))


def _raised(fn: Callable[[], object]) -> str:
    try:
        fn()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def _first(batch: Any) -> torch.Tensor:
    return batch["number"] if isinstance(batch, dict) else batch


@st.composite
def swapped(draw: st.DrawFn, order: list[int]) -> list[int]:
    """Draw the same numbers, two of which changed places."""
    places = st.integers(0, len(order) - 1)
    one, other = draw(st.lists(places, min_size=2, max_size=2, unique=True))
    found = list(order)
    found[one], found[other] = order[other], order[one]
    return found


WAYS = st.sampled_from([*SETUPS, "evaluate", "predict"])


@given(
    kind=st.sampled_from(list(KINDS)),
    n=st.integers(2, 8) | st.integers(9, 40),
    size=st.integers(2, 3),
    by=WAYS,
    options=st.sampled_from([{}, {"shuffle": True}, {"remainder": "pad"}]),
    data=st.data(),
)
def test_ranks_with_another_order_are_told(
    kind: str, n: int, size: int, by: str, options: dict[str, Any], data: st.DataObject
) -> None:
    """A3: with the same samples in another order on one rank, all ranks say so; else none."""
    order = data.draw(st.permutations(range(n)))
    other = data.draw(swapped(order) if n <= 8 else st.permutations(order))
    assume(n <= 8 or sum(a != b for a, b in zip(order, other, strict=True)) > n - 8)
    odd = data.draw(st.integers(0, size - 1))
    make = KINDS[kind]
    assert told(size, lambda _: make(order), by, **options) == {""}
    mine = lambda rank: make(other if rank == odd else order)  # noqa: E731 - short
    (said,) = told(size, mine, by, **options)
    assert said.startswith("The ranks have data that differ")
    assert all(f"\n  rank {rank}: " in said for rank in range(size))


@given(
    other=swapped(list(range(5000))),
    kind=st.sampled_from(["tensor", "subset of a tensor", "subset of files"]),
    by=WAYS,
    made=st.sampled_from(sorted(MADE)),
)
def test_two_samples_that_changed_places_are_seen(
    other: list[int], kind: str, by: str, made: str
) -> None:
    """A3: where reading is cheap, all places are compared, not a few; of each of several."""
    order = list(range(5000))
    (said,) = told(2, lambda rank: KINDS[kind](other if rank else order), by, made)
    assert said
    assert made == "alone" or "dataset " in said


@given(
    n=st.integers(1, 30),
    seeds=st.lists(st.integers(0, 99), min_size=2, max_size=3),
    coins=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    by=WAYS,
    differ=st.booleans(),
)
def test_draws_of_a_dataset_are_no_difference(
    n: int, seeds: list[int], coins: float, by: str, *, differ: bool
) -> None:
    """A3: noise, be it of a generator that each rank has for itself, is not taken for other data.

    What stands beside it in a sample is compared all the same.
    """
    n = max(n, 8)  # a coin that falls alike each time would be a difference
    orders = [list(range(n)) for _ in seeds]
    if differ:
        orders[-1].reverse()
    (said,) = told(
        len(seeds), lambda rank: Drawing(orders[rank], seeds[rank], coins), by
    )
    assert bool(said) == differ


@given(by=WAYS, seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2, unique=True))
def test_splits_and_samplers_of_each_rank_are_seen(by: str, seeds: list[int]) -> None:
    """A3: random_split and SubsetRandomSampler by each rank's own draws are told."""

    def split(rank: int) -> Any:
        own = torch.Generator().manual_seed(seeds[rank])
        return random_split(Files(range(60)), [40, 20], generator=own)[0]

    (said,) = told(2, split, by)
    assert "indices of the Subset" in said or "sample" in said


@given(seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2))
def test_orders_of_each_rank_are_seen(seeds: list[int]) -> None:
    """A3: ranks whose sampler takes other samples of the same dataset are told at build."""
    picked = [
        torch.randperm(30, generator=torch.Generator().manual_seed(s))[:20]
        for s in seeds
    ]
    files = Files(range(30))

    def rank(world: af.World) -> str:
        sampler = SubsetRandomSampler(picked[world.rank].tolist())
        loader = torch.utils.data.DataLoader(files, batch_size=4, sampler=sampler)
        return built(af.Data.from_loader(loader), world)

    said = set(simulate(2, rank).results)
    if seeds[0] == seeds[1]:
        assert said == {""}
    else:
        assert "order of the first epoch" in said.pop()


@given(
    n=st.integers(4, 20),
    by=st.sampled_from(["budget", "batches"]),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_batches_of_each_rank_are_seen(n, by, data, *, shuffle):
    """A3: ranks that cut the same samples into other batches are told; alike, they are not."""
    costs = data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    other = data.draw(st.sampled_from([costs, costs[::-1]]))
    cuts: list[list[list[int]]] = []

    def rank(world: af.World) -> str:
        own, options = (costs, other)[world.rank], {}
        if by == "budget":
            budget = af.token_budget(own, limit=8)
            options = {"global_batch_size": budget, "shuffle": shuffle}
        else:
            ends = np.cumsum(own).clip(max=n)
            parts = np.split(np.arange(n), ends[ends < n])
            options = {"batch_sampler": [p.tolist() for p in parts if len(p)]}
        made = af.Data(torch.arange(float(n))[:, None], **options)
        cuts.append([list(span) for span in made.epoch(seed=0).cut.spans(0)])
        return built(made, world)

    (said,) = set(simulate(2, rank).results)
    assert bool(said) == (cuts[0] != cuts[1])


READERS = {
    "each": {"sharded": False, "dispatch": False},
    "its own": {"sharded": True, "dispatch": False},
    "one for all": {"sharded": False, "dispatch": True},
}
READING_SETUPS = [*SETUPS.values(), af.chain(af.wrap_ddp())]


@given(
    readers=st.lists(st.sampled_from(sorted(READERS)), min_size=2, max_size=3),
    setup=st.sampled_from(READING_SETUPS),
    by=st.sampled_from(["loop", "loop", "build", "evaluate"]),
    epochs=st.integers(1, 2),
)
def test_ranks_that_read_otherwise_are_told(readers, setup, by, epochs):
    """Before a sample is read: of which option they differ; by whichever call they meet first."""

    def rank(world: af.World) -> str:
        data = af.Data(Counting(9), global_batch_size=4, **READERS[readers[world.rank]])
        of_state = None if by == "evaluate" else data
        state = linear_state(data=of_state, setup=setup, world=world)

        def train() -> None:
            step, trained = (
                af.make_step(lambda model, x: model(x[:, :1].float()).mean()),
                state,
            )
            for batch in af.batches(trained, until_epoch=epochs):
                trained, _ = step(trained, batch)

        ways = {
            "loop": train,
            "build": lambda: af.prepare_engine(state),
            "evaluate": lambda: af.evaluate(state, data, lambda _, x: x.mean()),
        }
        return _raised(ways[by])

    (said,) = set(simulate(len(readers), rank).results)
    differing = [
        option
        for option in ("sharded", "dispatch")
        if len({READERS[each][option] for each in readers}) > 1
    ]
    assert bool(said) == bool(differing)
    for rank_, each in enumerate(readers if differing else []):
        told = f"rank {rank_}: data, {differing[0]}: {READERS[each][differing[0]]}"
        assert told in said


def test_data_that_name_themselves_are_compared_by_name():
    """A3: samples that differ on purpose pass under one name, and not under two."""
    paths = [Files([0, 1]), Files([2, 3])]
    for by in (*SETUPS, "evaluate", "predict"):
        assert told(2, lambda rank: paths[rank], by, fingerprint="one") == {""}

    def named(world: af.World) -> str:
        data = af.Data(paths[0], global_batch_size=2, fingerprint=f"{world.rank}")
        state = linear_state(world=world)
        return _raised(lambda: af.evaluate(state, data, lambda _, batch: batch.mean()))

    assert all("data, fingerprint: 0" in said for said in simulate(2, named))


class Unreadable(Files):
    """One sample cannot be read, each time or on the first try of one rank."""

    def __init__(self, numbers: Sequence[int], failures: float) -> None:
        super().__init__(numbers)
        self.failures = failures

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0 and self.failures > 0:
            self.failures -= 1
            msg = "no such file"
            raise OSError(msg)
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_no_difference_by_itself():
    """A3: a failure that passes is none; a sample that one rank never reads is named on all."""
    numbers = list(range(6))
    assert told(2, lambda rank: Unreadable(numbers, 1 - rank), "ddp") == {""}
    (said,) = told(2, lambda rank: Unreadable(numbers, rank * 99), "ddp")
    assert "rank 1: sample 0: cannot be read: OSError" in said
    others = [numbers, [0, 5, 4, 3, 2, 1]]
    (said,) = told(2, lambda rank: Unreadable(others[rank], 1 - rank), "ddp")
    assert "rank 1: sample 1: " in said


HELD = (
    st.integers(),
    st.text(),
    st.binary(),
    st.floats(allow_nan=False),
    st.lists(st.integers(), min_size=1),
)


@st.composite
def held(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Draw two lists of as many objects of one kind."""
    kind, n = draw(st.sampled_from(HELD)), draw(st.integers(1, 4))
    rows = st.lists(kind, min_size=n, max_size=n)
    return draw(rows), draw(rows)


def objects_of(values: list[Any]) -> Any:
    """Return an array of objects, each of which lies where no other array has it."""
    array = np.empty(len(values), object)
    array[:] = [None] * len(values)
    for i, each in enumerate(values):
        array[i] = pickle.loads(pickle.dumps(each))  # noqa: S301 - it was just made
    return array


def fields_of(values: list[Any]) -> Any:
    """Return a structured array with a field of objects."""
    array = np.zeros(len(values), [("number", np.int64), ("held", object)])
    array["held"] = objects_of(values)
    return array


SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "array": objects_of,
    "matrix": lambda values: objects_of(values)[:, None],
    "array in an array": lambda values: objects_of([objects_of(values)]),
    "fields": fields_of,
    "a row of fields": lambda values: list(fields_of(values)),
}


@given(rows=held(), shape=st.sampled_from(list(SHAPES)), by=st.sampled_from([*SETUPS]))
def test_objects_are_known_by_what_they_hold(
    rows: tuple[list[Any], list[Any]], shape: str, by: str
) -> None:
    """Arrays of objects that were made anew are the same data, and of others are other data."""
    one, other = rows
    make = SHAPES[shape]
    prints = [
        af.Data([make(each)], global_batch_size=1).facts["fingerprint"]
        for each in (one, one, other)
    ]
    assert prints[0] == prints[1]
    assert (prints[0] == prints[2]) == (repr(one) == repr(other))
    assert told(2, lambda _: [make(one)], by) == {""}
    (said,) = told(2, lambda rank: [make(rows[rank])], by)
    assert bool(said) == (repr(one) != repr(other))


@given(
    digits=st.text("123456789", min_size=3, max_size=6),
    cuts=st.lists(st.integers(1, 5), min_size=2, max_size=2),
)
def test_digits_that_are_cut_elsewhere_are_other_data(digits, cuts):
    """To a checkpoint a sample of 1 and 23 is another one than a sample of 12 and 3."""
    cuts = [min(cut, len(digits) - 1) for cut in cuts]
    samples = [(int(digits[:cut]), int(digits[cut:])) for cut in cuts]
    one, other = (
        af.Data([each], global_batch_size=1).facts["fingerprint"] for each in samples
    )
    assert (one == other) == (samples[0] == samples[1])
