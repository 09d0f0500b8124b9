# SPDX-License-Identifier: Apache-2.0
"""Several datasets in one order: mixes by share, and zips."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import read
from tests.laws.test_orders import SEEDS, order_of


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
