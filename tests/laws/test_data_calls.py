# SPDX-License-Identifier: Apache-2.0
"""A call of `Data`, all its options drawn together, read as one would cut a plain list."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import REMAINDERS, on_one_core
from tests.states import linear_state

pytestmark = on_one_core


class Items(Dataset[Any]):
    """Samples one by one."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return 10 * index


class Lists(Items):
    """Samples by lists of indices."""

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [10 * index for index in indices]


FORMS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: 10 * torch.arange(n),
    "array": lambda n: 10 * np.arange(n),
    "pair": lambda n: (10 * torch.arange(n), torch.arange(n) + 0.5),
    "dict": lambda n: {"x": 10 * torch.arange(n), "y": torch.arange(n) + 0.5},
    "nested": lambda n: (10 * torch.arange(n), {"y": torch.arange(n) + 0.5}),
    "list": lambda n: [10 * i for i in range(n)],
    "subset": lambda n: Subset(
        TensorDataset(5 * torch.arange(2 * n)), list(range(0, 2 * n, 2))
    ),
    "items": Items,
    "lists": Lists,
}
"""Datasets whose sample at index i is 10 i, some with i + 0.5 beside it."""


class Turned:
    """A sampler: each index once, turned by the epoch; or lists of up to three of them."""

    def __init__(self, n: int, by: int = 0) -> None:
        self.n, self.by, self.epoch = n, by, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def all(self) -> list[Any]:
        indices = turned(0, self.epoch, self.n)
        if not self.by:
            return indices
        return [indices[i : i + self.by] for i in range(0, self.n, self.by)]

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all())


def turned(seed: int, epoch: int, n: int) -> list[int]:
    """Return each index once, turned by the seed and the epoch."""
    return [(i + seed + epoch) % n for i in range(n)]


def counted(samples: list[Any]) -> torch.Tensor:
    """Collate samples with how many there are."""
    return torch.tensor([*samples, -len(samples)])


@attrs.frozen
class Call:
    """A call of `Data`, and of what reads it."""

    form: str
    n: int
    batch_size: int
    remainder: str
    order: str
    loader: bool
    collates: bool
    workers: int
    parts: int | None
    part_size: int | None
    seed: int

    def data(self) -> af.Data:
        """Return the data."""
        dataset, n, size = FORMS[self.form](self.n), self.n, self.batch_size
        options: dict[str, Any] = {"num_workers": self.workers, "timeout": 60}
        if self.workers == 0:
            options.pop("timeout")  # which a DataLoader refuses
        collate = counted if self.collates else None
        if self.loader:
            if collate is not None:
                options["collate_fn"] = collate
            if self.order == "batches":
                options["batch_sampler"] = Turned(n, size)
            else:
                options |= {"batch_size": size, "drop_last": self.remainder == "drop"}
                if self.order == "sampler":
                    options["sampler"] = Turned(n)
                options["shuffle"] = None if self.order == "sampler" else self.shuffles
            rows = TensorDataset(dataset) if self.form == "tensor" else dataset
            return af.Data.from_loader(DataLoader(rows, **options))
        if self.order == "batches":
            options["batch_sampler"] = Turned(n, size)
        else:
            options |= {"global_batch_size": size, "remainder": self.remainder}
            options |= {"shuffle": self.shuffles}
            options["order"] = turned if self.order == "own" else None
        return af.Data(dataset, collate=collate, **options)

    @property
    def shuffles(self) -> bool:
        return self.order == "shuffle"

    def state(self, world: af.World) -> af.TrainState:
        parts = {"num_micro_batches": self.parts, "micro_batch_size": self.part_size}
        parts = {name: value for name, value in parts.items() if value}
        setup = af.chain(af.shard_data(), af.accumulate(**parts))
        return linear_state(data=self.data(), setup=setup, seed=self.seed, world=world)

    # what a plain list gives

    def indices(self, epoch: int) -> list[int]:
        """Return an epoch's order."""
        if self.order in ("own", "sampler", "batches"):
            seed = self.seed if self.order == "own" else 0
            return turned(seed, epoch, self.n)
        if self.order == "shuffle":
            order = self.data().epoch(seed=self.seed, number=epoch).order
            return order(np.arange(self.n)).tolist()
        return list(range(self.n))

    def updates(self, epoch: int, start: int) -> list[tuple[int, int]]:
        """Return where the updates of an epoch begin and end, from a sample on."""
        size, n = self.batch_size, self.n
        if self.order == "batches":
            stops = [s for s in range(size, n + size, size) if s > start]
            return list(zip([start, *stops], [min(s, n) for s in stops], strict=False))
        cuts = [(at, at + size) for at in range(start, n, size)]
        if self.remainder == "pad":
            return cuts
        if self.remainder == "drop":
            return [each for each in cuts if each[1] <= n]
        return [(low, min(high, n)) for low, high in cuts]

    def shares(self, low: int, high: int, rank: int, size: int) -> list[list[int]]:
        """Return the positions of a rank's micro-batches."""
        places = list(range(low, high))
        share = np.array_split(places, size)[rank]
        parts = self.parts
        if self.part_size is not None:
            parts = -(-len(np.array_split(places, size)[0]) // self.part_size)
        return [each.tolist() for each in np.array_split(share, parts)]

    def value(self, indices: list[int]) -> Any:
        """Return the values of a micro-batch."""
        first, second = [10 * i for i in indices], [i + 0.5 for i in indices]
        if self.collates:
            return [*first, -len(indices)]
        if self.form in ("pair", "dict"):
            return [first, second]
        if self.form == "nested":
            return [first, [second]]
        wrapped = self.form == "subset" or (self.form == "tensor" and self.loader)
        return [first] if wrapped else first

    def expected(
        self, start: tuple[int, int], epochs: int, rank: int, size: int
    ) -> list[Any]:
        """Return all that a rank's batches say."""
        said = []
        for epoch in range(start[0], epochs):
            order = self.indices(epoch)
            cuts = self.updates(epoch, start[1] if epoch == start[0] else 0)
            for low, high in cuts:
                shares = self.shares(low, high, rank, size)
                weights = tuple(map(len, shares))
                # an empty part has one sample beside it, which does not count
                read = [places or None for places in shares]
                filler = [
                    [True] if places is None else [p >= self.n for p in places]
                    for places in read
                ]
                values = [
                    None if p is None else self.value([order[i % self.n] for i in p])
                    for p in read
                ]
                last = (low, high) == cuts[-1]
                after = (epoch + 1, 0) if last else (epoch, high)
                total = high - low
                begun = (epoch, low)
                said.append((values, weights, filler, total, begun, after, last))
        return said


def plainly(value: Any) -> Any:
    """Return a micro-batch as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plainly(v) for v in (value.values() if isinstance(value, dict) else value)]


def said_of(call: Call, batch: af.Batch) -> Any:
    """Return all that a batch says, but the values of stand-ins."""
    values, filler, at = [], [], 0
    for value, weight in zip(batch.micro_batches, batch.weights, strict=True):
        found = plainly(value)
        count = max(1, weight)
        indices = batch.indices.tolist()[at : at + count]
        assert found == call.value(indices)
        assert set(indices) <= set(range(call.n))
        values.append(found if weight else None)
        filler.append(batch.filler.tolist()[at : at + count])
        at += count
    assert at == len(batch.indices) == len(batch.filler)
    start, cursor = batch.start, batch.cursor
    assert start is not None
    assert cursor is not None
    places = (start.epoch, start.samples), (cursor.epoch, cursor.samples)
    return (values, batch.weights, filler, batch.num_samples, *places, batch.ends_epoch)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call that `Data` takes."""
    loader = draw(st.booleans())
    order = draw(
        st.sampled_from(
            ["none", "shuffle", "batches", "sampler" if loader else "own"],
        )
    )
    remainder = draw(REMAINDERS.filter(lambda each: not loader or each != "pad"))
    n = draw(st.integers(1, 14) | st.integers(15, 90))
    form = draw(st.sampled_from(sorted(FORMS)))
    collates = draw(st.booleans()) and form in ("list", "items", "lists")
    if loader and form in ("pair", "dict", "nested", "array"):
        form = "list"  # a DataLoader takes such for datasets of two samples
    by_size = draw(st.booleans())
    return Call(
        form=form,
        n=n,
        batch_size=draw(st.integers(1, n if remainder == "drop" else n + 3)),
        remainder="short" if order == "batches" else remainder,
        order=order,
        loader=loader,
        collates=collates,
        workers=draw(st.sampled_from([0] * 30 + [1])),  # some 30 ms each
        parts=None if by_size else draw(st.integers(1, 3)),
        part_size=draw(st.integers(1, 4)) if by_size else None,
        seed=draw(st.integers(0, 5)),
    )


@given(
    call=calls(),
    size=st.integers(1, 5),
    samples=st.integers(0, 89),
    begin=st.integers(0, 1),
    more=st.integers(1, 2),
)
def test_any_data_are_read_as_a_list_is_cut(
    call: Call, size: int, samples: int, begin: int, more: int
) -> None:
    """Values, weights, filler and places of every batch, from any sample, over any epochs."""
    start, epochs = (begin, samples % call.n), begin + more
    is_left = start[1] == 0 or bool(call.updates(*start))

    def rank(world: af.World) -> list[Any] | None:
        state = call.state(world)
        try:
            state = af.seek(state, start[1], epoch=start[0])
        except af.errors.BatchError:
            return None
        batches = af.batches(state, until_epoch=epochs)
        found = [said_of(call, batch) for batch in batches]
        assert len(batches) == len(found)
        counts = [
            call.data().num_updates_of(
                epoch, seed=call.seed, start=start[1] if epoch == begin else 0
            )
            for epoch in range(begin, epochs)
        ]
        assert sum(counts) == len(found)
        assert [said_of(call, batch) for batch in batches] == found  # read again
        return found

    for number, found in enumerate(simulate(size, rank)):
        if not is_left:
            assert found is None
            continue
        assert found == call.expected(start, epochs, number, size)
