# SPDX-License-Identifier: Apache-2.0
"""Several datasets in one order: mixes by share, and zips."""

from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import accelfn as af
from accelfn.base import tree
from accelfn.testing import simulate
from tests.laws.reading import REMAINDERS, Drawing, read
from tests.laws.test_orders import SEEDS, order_of
from tests.laws.worlds import single


@given(
    lengths=st.lists(st.integers(40, 200), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([1, 2, 0.3, 7.5]), min_size=4, max_size=4),
    shuffle=st.booleans(),
    seed=SEEDS,
)
def test_mixes_have_their_shares_in_every_block(
    lengths: list[int], weights: list[float], shuffle: bool, seed: int
) -> None:
    """Behind every 64 positions each dataset has had its share, to within one sample."""
    shares = np.array(weights[: len(lengths)]) / sum(weights[: len(lengths)])
    ends = np.cumsum(lengths)
    data = af.Data.mix(
        [torch.arange(n) for n in lengths],
        weights=weights[: len(lengths)],
        shuffle=shuffle,
        batch_size=3,
    )
    block = data.ordering.block  # 64 positions, or four to the least share
    epochs = range(3 * block // len(data) + 1)
    through = np.array([i for e in epochs for i in order_of(data, seed, e)])
    whose = np.searchsorted(ends, through, side="right")
    for stop in range(block, len(through) + 1, block):
        counts = np.bincount(whose[:stop], minlength=len(lengths))
        assert (np.abs(counts - shares * stop) < 1 + 1e-6).all()
        counts = np.bincount(whose[stop - block : stop], minlength=len(lengths))
        assert (np.abs(counts - shares * block) < 2 + 1e-6).all()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([1, 2, 0.3, 7.5]), min_size=4, max_size=4),
    shuffle=st.booleans(),
    seed=SEEDS,
)
def test_mixes_go_through_each_dataset(
    lengths: list[int], weights: list[float], shuffle: bool, seed: int
) -> None:
    """No sample of a dataset comes again before all of it have come, over all epochs."""
    data = af.Data.mix(
        [torch.arange(n) for n in lengths],
        weights=weights[: len(lengths)],
        shuffle=shuffle,
        batch_size=3,
    )
    through = [i for epoch in range(4) for i in order_of(data, seed, epoch)]
    first = 0
    for n in lengths:
        its = [i - first for i in through if first <= i < first + n]
        passes = [its[i : i + n] for i in range(0, len(its), n)]
        assert all(sorted(each) == list(range(n)) for each in passes if len(each) == n)
        assert all(len(set(each)) == len(each) for each in passes)
        if not shuffle:
            assert its == [i % n for i in range(len(its))]
        first += n


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    shuffle=st.booleans(),
    size=st.integers(1, 4),
    seed=SEEDS,
)
def test_zips_go_through_each_dataset(
    lengths: list[int], shuffle: bool, size: int, seed: int
) -> None:
    """Each named dataset comes in an order of its own, again and again; values fit indices."""
    sets = {f"d{which}": torch.arange(n) for which, n in enumerate(lengths)}
    data = af.Data.zip(**sets, batch_size=4, shuffle=shuffle)
    assert len(data) == max(lengths)

    def rows(world: af.World) -> list[dict[str, list[int]]]:
        batches = read(world, data, epochs=3, seed=seed)
        found = []
        for batch in batches:
            columns = {name: batch.value[name].tolist() for name in sets}
            assert torch.stack(list(batch.value.values()), 1).equal(batch.indices)
            kept = (~batch.filler).nonzero().reshape(-1).tolist()
            found.append({name: [c[i] for i in kept] for name, c in columns.items()})
        return found

    ranks = list(simulate(size, rows))
    for name, values in sets.items():
        n = len(values)
        its = [
            i
            for update in zip(*ranks, strict=True)
            for part in update
            for i in part[name]
        ]
        assert len(its) == 3 * len(data)
        passes = [its[i : i + n] for i in range(0, len(its) - n + 1, n)]
        assert all(sorted(each) == list(range(n)) for each in passes)
        if not shuffle:
            assert its == [i % n for i in range(len(its))]


def test_zipped_shuffles_differ() -> None:
    """Shuffled datasets of one length that are zipped have different orders."""
    data = af.Data.zip(a=range(40), b=range(40), batch_size=4, shuffle=True)
    rows = order_of(data, seed=0)
    assert [a for a, _ in rows] != [b for _, b in rows]


@given(n=st.integers(1, 6), batch_size=st.integers(1, 4), seed=st.integers(0, 9))
def test_zipped_datasets_draw_apart(n: int, batch_size: int, seed: int) -> None:
    """No two samples side by side have one draw, and a collate that is torch's changes none."""

    def batches(collate: Any) -> list[dict[str, Any]]:
        sets = {"a": Drawing(n), "b": Drawing(n)}
        data = af.Data.zip(**sets, batch_size=batch_size, collate=collate)
        read_ = read(single(), data, epochs=1, seed=seed)
        return [{k: v.tolist() for k, v in b.value.items()} for b in read_]

    found = batches(None)
    assert found == batches(default_collate)
    for batch in found:
        for one, other in zip(batch["a"], batch["b"], strict=True):
            assert one[0] == other[0]
            assert one[1:] != other[1:]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    is_mix=st.booleans(),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 4),
    size=st.integers(1, 3),
)
def test_they_are_evaluated_in_their_own_order(
    lengths: list[int], is_mix: bool, shuffle: bool, batch_size: int, size: int
) -> None:
    """A zip goes side by side through its datasets, a mix through one after the other."""
    sets = {f"d{which}": torch.arange(n) for which, n in enumerate(lengths)}
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle}
    if is_mix:
        weights = [1.0] * len(sets)
        data = af.Data.mix([*sets.values()], weights=weights, **options)
        expected = [[i] for n in lengths for i in range(n)]
    else:
        data = af.Data.zip(**sets, **options)
        expected = [[i % n for n in lengths] for i in range(max(lengths))]

    def columns(_: Any, batch: Any) -> torch.Tensor:
        return torch.stack([*batch.values()] if isinstance(batch, dict) else [batch], 1)

    def first(net: Any, batch: Any) -> torch.Tensor:
        return columns(net, batch)[:, 0].double().mean()

    def evaluated(world: af.World) -> tuple[list[list[int]], float]:
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1), optimizer=torch.optim.SGD, world=world
        )
        found = [each.tolist() for each in af.predict(state, data, columns)]
        return found, af.evaluate(state, data, first)["first"]

    for found, mean in simulate(size, evaluated):
        assert found == expected
        assert abs(mean - sum(row[0] for row in expected) / len(expected)) < 1e-9


def as_lists(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate otherwise than torch does."""
    return {"b": torch.stack([each["a"] + 1 for each in samples])}


@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    remainder=REMAINDERS,
    collate=st.sampled_from([None, as_lists]),
    timeout=st.sampled_from([300.0, 7.0]),
    num_workers=st.integers(0, 2),
    size=st.integers(1, 3),
)
def test_options_of_zips_and_mixes_are_those_of_data(
    n: int,
    batch_size: int,
    remainder: str,
    collate: Any,
    timeout: float,
    num_workers: int,
    size: int,
) -> None:
    """A zip, or a mix, of one dataset is that dataset, whatever it is told."""
    assume(remainder != "drop" or batch_size <= n)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "remainder": remainder,
        "collate": collate,
        "timeout": timeout,
        "num_workers": num_workers,
    }
    rows = torch.arange(n)
    whole = af.Data({"a": rows}, **options)
    made = [
        af.Data.zip(a=rows, **options),
        af.Data.mix([{"a": rows}], **options),
    ]

    def rank(world: af.World, data: af.Data) -> list[Any]:
        data = attrs.evolve(data, num_workers=0)
        batches = read(world, data)
        values = [
            [tree.tree_map(torch.Tensor.tolist, each) for each in batch.micro_batches]
            for batch in batches
        ]
        told = [(b.weights, b.filler.tolist(), b.start, b.cursor) for b in batches]
        return [values, told]

    for data in made:
        told = [(each.num_workers, each.timeout) for each in (whole, data)]
        assert told[0] == told[1]
        assert list(simulate(size, partial(rank, data=whole))) == list(
            simulate(size, partial(rank, data=data))
        )
