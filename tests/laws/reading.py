# SPDX-License-Identifier: Apache-2.0
"""What ranks read, as plain values, and datasets of whole numbers to read."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import accelfn as af
from accelfn.testing import simulate
from tests.internals import codec
from tests.states import linear_state

REMAINDERS = st.sampled_from(["short", "pad", "drop"])
few = settings(max_examples=max(5, settings().max_examples // 20))
"""For laws whose examples start worker processes, at some 30 ms each."""
some = settings(max_examples=max(15, settings().max_examples // 20))
"""For those of them whose bugs are rarer."""
on_one_core = pytest.mark.filterwarnings("ignore::accelfn.errors.AccelfnWarning")
"""Of worker processes: a machine may have fewer cores than a law asks for."""


def read(
    world: af.World,
    data: af.Data,
    *,
    parts: int = 1,
    epochs: int = 2,
    start: af.typing.Cursor | None = None,
    stop: int | None = None,
    seed: int = 0,
) -> list[af.Batch]:
    """Return a rank's batches, from a cursor on, at most `stop` of them."""
    setup = af.chain(af.shard_data(), af.accumulate(num_micro_batches=parts))
    state = linear_state(data=data, setup=setup, seed=seed, world=world)
    state = attrs.evolve(state, cursor=start or af.typing.Cursor())
    return list(islice(af.batches(state, until_epoch=epochs), stop))


def plain(batches: Iterable[af.Batch]) -> list[Any]:
    """Return all that batches say, to be compared."""
    return [
        (
            [values.tolist() for values in batch.micro_batches],
            batch.weights,
            batch.indices.tolist(),
            batch.filler.tolist(),
            batch.num_samples,
            batch.start,
            batch.cursor,
            batch.ends_epoch,
        )
        for batch in batches
    ]


def own(batches: Iterable[af.Batch]) -> list[int]:
    """Return the indices of a rank's samples, without filler."""
    return [i for batch in batches for i in batch.indices[~batch.filler].tolist()]


def joined(ranks: Iterable[list[af.Batch]]) -> list[list[int]]:
    """Return the samples of each update, in rank order and without filler."""
    return [
        [i for batch in update for i in own([batch])]
        for update in zip(*ranks, strict=True)
    ]


def saved(cursor: af.typing.Cursor) -> af.typing.Cursor:
    """Return the cursor as a checkpoint brings it back."""
    return af.typing.Cursor(*codec.from_bytes(codec.to_bytes(cursor.to_plain())))


def in_legs(
    legs: list[tuple[int, int]],
    make: Callable[[af.World], af.Data],
    last: int = 1,
    **options: Any,
) -> list[list[list[af.Batch]]]:
    """Return the ranks' batches, leg by leg, of a run that is cut and resumed.

    A leg is a number of ranks and of updates. After those given, `last` ranks go to the end.
    Every leg begins with new data, and a saved cursor.
    """
    found, cursors = [], []
    for size, stop in [*legs, (last, None)]:
        starts = cursors if len(cursors) == size else cursors[:1] * size

        def leg(world: af.World, starts: Any = starts, stop: Any = stop) -> Any:
            start = saved(starts[world.rank]) if starts else None
            return read(world, make(world), start=start, stop=stop, **options)

        ranks = list(simulate(size, leg))
        found.append(ranks)
        if ranks[0]:
            cursors = [batches[-1].cursor for batches in ranks]
    return found


def drawn(i: int) -> torch.Tensor:
    """Return a sample: its number, and what three default generators give."""
    legacy = np.random.rand()  # noqa: NPY002 - datasets draw from it
    others = [torch.rand(()).item(), legacy, random.random()]  # noqa: S311 - the same
    return torch.tensor([float(i), *others], dtype=torch.float64)


class Drawing(Dataset[torch.Tensor]):
    """Samples that are augmented."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return drawn(index)


class Counting(IterableDataset[torch.Tensor]):
    """The numbers from `first` on, augmented; without a state."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (drawn(self.first + i) for i in range(self.n))


def worker() -> tuple[int, int]:
    """Return which of how many workers reads."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Dividing(Counting):
    """That gives each worker which it sees samples of its own, as torch's guide says."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        number, count = worker()
        return (drawn(self.first + i) for i in range(number, self.n, count))


class Remembering(Counting):
    """That has a state: one dict, which it hands out and goes on changing."""

    def __init__(self, n: int, first: int = 0) -> None:
        super().__init__(n, first)
        self.state = {"given": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        number, count = worker()
        while (at := number + self.state["given"] * count) < self.n:
            self.state["given"] += 1
            yield drawn(self.first + at)
        self.state["given"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Put(Counting):
    """Whose iterators all begin where it was put last, as those of the package datasets do."""

    def __init__(self, n: int, first: int = 0) -> None:
        super().__init__(n, first)
        self.begin = self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        number, count = worker()
        self.given = self.begin
        while (at := number + self.given * count) < self.n:
            self.given += 1
            yield drawn(self.first + at)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.given = state["given"]


class _Place:
    """An iterator that has a state."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n, self.at = first, n, 0

    def __iter__(self) -> "_Place":
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return drawn(self.first + self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Placed(Counting):
    """Whose iterators have a state each, and so can be read side by side."""

    def __iter__(self) -> _Place:
        return _Place(self.first, self.n)
