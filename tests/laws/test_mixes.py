# SPDX-License-Identifier: Apache-2.0
"""Several datasets in one order, by share."""

from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import tree
from tests.laws.reading import REMAINDERS, read
from tests.laws.test_orders import SEEDS, order_of


@given(
    lengths=st.lists(st.integers(40, 200), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([1, 2, 0.3, 7.5]), min_size=4, max_size=4),
    shuffle=st.booleans(),
    seed=SEEDS,
)
def test_mixes_have_their_shares_in_every_block(lengths, weights, shuffle, seed):
    """Behind every 64 positions each dataset has had its share, to within one sample."""
    shares = np.array(weights[: len(lengths)]) / sum(weights[: len(lengths)])
    ends = np.cumsum(lengths)
    data = af.Data.mix(
        [torch.arange(n) for n in lengths],
        weights=weights[: len(lengths)],
        shuffle=shuffle,
        global_batch_size=3,
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
        global_batch_size=3,
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
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 4),
    size=st.integers(1, 3),
)
def test_they_are_evaluated_in_their_own_order(lengths, shuffle, batch_size, size):
    """A mix is evaluated on one dataset after the other, however it is trained."""
    data = af.Data.mix(
        [torch.arange(n) for n in lengths],
        weights=[1.0] * len(lengths),
        global_batch_size=batch_size,
        shuffle=shuffle,
    )
    expected = [i for n in lengths for i in range(n)]

    def evaluated(world: af.World) -> tuple[list[int], float]:
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1), optimizer=torch.optim.SGD, world=world
        )
        found = [int(each) for each in af.predict(state, data, lambda _, batch: batch)]
        return found, af.evaluate(state, data, mean_of)["mean_of"]

    def mean_of(_: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.double().mean()

    for found, mean in simulate(size, evaluated):
        assert found == expected
        assert abs(mean - sum(expected) / len(expected)) < 1e-9


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
def test_options_of_a_mix_are_those_of_data(
    n, batch_size, remainder, collate, timeout, num_workers, size
):
    """A mix of one dataset is that dataset, with any options."""
    assume(remainder != "drop" or batch_size <= n)
    options: dict[str, Any] = {
        "global_batch_size": batch_size,
        "remainder": remainder,
        "collate": collate,
        "timeout": timeout,
        "num_workers": num_workers,
    }
    rows = torch.arange(n)
    whole = af.Data({"a": rows}, **options)
    mix = af.Data.mix([{"a": rows}], **options)

    def rank(world: af.World, data: af.Data) -> list[Any]:
        data = attrs.evolve(data, num_workers=0)
        batches = read(world, data)
        values = [
            [tree.tree_map(torch.Tensor.tolist, each) for each in batch.micro_batches]
            for batch in batches
        ]
        told = [(b.weights, b.filler.tolist(), b.start, b.cursor) for b in batches]
        return [values, told]

    told = [(each.num_workers, each.timeout) for each in (whole, mix)]
    assert told[0] == told[1]
    assert list(simulate(size, partial(rank, data=whole))) == list(
        simulate(size, partial(rank, data=mix))
    )
