# SPDX-License-Identifier: Apache-2.0
"""Orders are functions of (seed, epoch, position), and give what their names say."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import REMAINDERS, joined, own, plain, read
from tests.laws.worlds import single
from tests.states import linear_state

SEEDS = st.integers(0, 2**40)
WEIGHTS = st.lists(st.sampled_from([0, 0.5, 1, 3, 1e-9]), min_size=1, max_size=40)


def order_of(data: af.Data, seed: int, epoch: int = 0) -> list[int]:
    """Return the indices of an epoch."""
    epoch_of = data.epoch(seed=seed, number=epoch)
    return epoch_of.order(np.arange(epoch_of.num_samples)).tolist()


def numbers(n: int, order: object, **options: Any) -> af.Data:
    """Return data that are their own indices, in an order."""
    return af.Data(torch.arange(n), order=order, **{"global_batch_size": 3, **options})


def by(n: int, size: Any, order: object = None, **options: Any) -> af.Data:
    """Return data that are their own indices, in batches of a size."""
    return numbers(n, order, global_batch_size=size, **options)


def chi_square(found: Counter[Any], expected: dict[Any, float]) -> float:
    """Return how far counts are from probabilities; none may be where none is expected."""
    assert found.keys() <= expected.keys()
    draws = found.total()
    return sum(
        (found[each] - draws * p) ** 2 / (draws * p) for each, p in expected.items()
    )


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """Return one list of all."""
    return list(chain.from_iterable(lists))


# every kind of order


class Listed:
    """A sampler that yields a list, turned by the epoch."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self.indices, self.epoch = indices, 0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Any:
        turn = self.epoch % len(self.indices)
        return iter([*self.indices[turn:], *self.indices[:turn]])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def sampled(n: int, size: int, sampler: object) -> af.Data:
    """Return the data of a torch DataLoader with a sampler."""
    dataset = torch.arange(n)
    return af.Data.from_loader(DataLoader(dataset, batch_size=size, sampler=sampler))


def a_loop(seed: int, epoch: int, n: int) -> list[int]:
    """Return an order of one's own."""
    return [(i * (2 * seed + 1) + epoch) % n for i in range(n)]


KINDS: dict[str, Callable[[int, int, list[int]], af.Data]] = {
    "in order": lambda n, size, _: by(n, size),
    "shuffled": lambda n, size, _: by(n, size, shuffle=True),
    "own": lambda n, size, _: by(n, size, a_loop),
    "weighted": lambda n, size, costs: by(n, size, af.orders.weighted(costs)),
    "without replacement": lambda n, size, costs: by(
        n, size, af.orders.weighted(costs, replacement=False)
    ),
    "bucketed": lambda n, size, costs: by(n, size, af.orders.bucketed(costs, window=7)),
    "budget": lambda n, size, costs: by(
        n, af.token_budget(costs, limit=9 * size), shuffle=True
    ),
    "bucketed budget": lambda n, size, costs: by(
        n,
        af.token_budget(costs, limit=9 * size, padded=False),
        af.orders.bucketed(costs, window=7),
    ),
    "sampler": lambda n, size, _: sampled(n, size, Listed([*range(n), 0, n - 1])),
    "random sampler": lambda n, size, _: sampled(
        n, size, RandomSampler(range(n), replacement=True, num_samples=n + 2)
    ),
    "batch sampler": lambda n, _, costs: af.Data(
        torch.arange(n), batch_sampler=Listed([[i % n] * costs[i] for i in range(n)])
    ),
    "mix": lambda n, size, _: af.Data.mix(
        [torch.arange(n), torch.arange(n, n + 5)],
        weights=[3, 1],
        shuffle=True,
        global_batch_size=size,
    ),
}


@st.composite
def ordered(draw: st.DrawFn) -> af.Data:
    """Draw data in one of the orders."""
    n = draw(st.one_of(st.integers(1, 20), st.integers(21, 200)))
    size = draw(st.integers(max(1, n // 20), max(8, n // 4)))
    costs = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    return KINDS[draw(st.sampled_from(sorted(KINDS)))](n, size, costs)


@given(data=ordered(), seed=SEEDS, epoch=st.integers(0, 3), draw=st.data())
def test_an_index_alone_is_the_one_in_sequence(
    data: af.Data, seed: int, epoch: int, draw: st.DataObject
) -> None:
    """Any positions of any order, computed alone and in any order, are those of the whole."""
    of_epoch = data.epoch(seed=seed, number=epoch)
    whole = of_epoch.order(np.arange(of_epoch.num_samples))
    places = st.integers(0, of_epoch.num_samples - 1)
    some = np.array(draw.draw(st.lists(places, min_size=1, max_size=9)))
    assert of_epoch.order(some).tolist() == whole[some].tolist()
    assert [of_epoch.order(some[i : i + 1])[0].tolist() for i in range(len(some))] == (
        whole[some].tolist()
    )


@given(data=ordered(), size=st.integers(1, 8), parts=st.integers(1, 3), draw=st.data())
def test_every_order_is_that_of_one_process(
    data: af.Data, size: int, parts: int, draw: st.DataObject
) -> None:
    """On any ranks, cut anywhere, every order gives the batches of one process; len is true."""
    alone = read(single(), data)
    counted = data.num_updates(2, seed=0)
    assert len(alone) == counted
    assert [batch.ends_epoch for batch in alone] == [
        batch.cursor.samples == 0 for batch in alone
    ]
    ranks = list(simulate(size, lambda world: read(world, data, parts=parts)))
    assert joined(ranks) == joined([alone])
    for batches in ranks:
        for batch in batches:  # values are those of the indices
            values = torch.cat(batch.micro_batches).reshape(-1).tolist()
            assert values == batch.indices.reshape(len(values), -1)[:, 0].tolist()
    at = draw.draw(st.integers(0, len(alone) - 1))
    rest = read(single(), data, start=alone[at].cursor)
    assert plain(rest) == plain(alone[at + 1 :])


@given(data=ordered(), size=st.integers(1, 4))
def test_every_order_is_evaluated_on_each_sample_once(data: af.Data, size: int) -> None:
    """Whatever is drawn, left out or repeated in training: held out, each sample counts once."""

    def rank(world: af.World) -> tuple[list[int], float]:
        state = linear_state(setup=af.shard_data(), world=world)
        seen = af.predict(state, data, lambda _, batch: batch)
        counted = af.evaluate(
            state, data, lambda _, batch: af.Loss(batch.double().sum(), len(batch))
        )
        return [int(each) for each in seen], float(counted["loss"])

    n = len(data.source)
    for seen, mean in simulate(size, rank):
        assert mean == pytest.approx(sum(seen) / len(data.source))
        assert seen[:n] == list(range(n))
        # of datasets side by side, a shorter one begins again when all of it was seen
        repeats = Counter(seen)
        assert max(repeats.values()) - min(repeats.values()) <= 1
        assert len(seen) == len(data.source)


@given(
    n=st.integers(4000, 30_000),
    batch_size=st.integers(700, 9000),
    size=st.integers(1, 3),
    start=st.integers(0, 3999),
    shuffle=st.booleans(),
)
def test_no_sample_is_lost_between_blocks(n, batch_size, size, start, *, shuffle):
    """However batches lie across the blocks in which a long order is computed."""
    data = by(n, batch_size, shuffle=shuffle)
    at = af.typing.Cursor(0, start)
    ranks = simulate(size, lambda world: read(world, data, epochs=1, start=at))
    assert flat(joined(ranks)) == order_of(data, 0)[start:]


class Asked:
    """An order as the dataset's own, that notes which positions it was asked for."""

    def __init__(self, n: int) -> None:
        self.n, self.positions = n, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        self.positions.append(position)
        return position


@given(
    n=st.integers(40, 900),
    batch_size=st.integers(1, 40),
    size=st.integers(1, 8),
    parts=st.integers(1, 3),
    remainder=REMAINDERS,
)
def test_a_rank_asks_for_no_position_but_its_own(n, batch_size, size, parts, remainder):
    """On any number of ranks an order is asked once for what is read, and no more."""

    def rank(world: af.World) -> None:
        asked = Asked(n)
        data = by(n, batch_size, lambda *_: asked, remainder=remainder)
        batches = read(world, data, parts=parts, epochs=1)
        indices = flat([batch.indices.tolist() for batch in batches])
        assert indices == asked.positions

    simulate(size, rank)


# shuffled

NEAR_POWERS = st.builds(
    lambda k, more: 2**k + more, st.integers(2, 41), st.sampled_from([-1, 0, 1])
)


@given(
    n=st.one_of(st.integers(1, 10), NEAR_POWERS, st.sampled_from([10**6, 10**12])),
    seed=SEEDS,
    epoch=st.integers(0, 2**40),
    start=st.integers(0, 2**41),
    away=st.sampled_from([8, 16, 31, 32, 33]),
    at=st.integers(0, 99),
)
@example(n=10**12, seed=0, epoch=0, start=0, away=33, at=50)
def test_a_shuffle_of_any_length_is_looked_into(n, seed, epoch, start, away, at):
    """Positions near and far have indices of their own, each the one computed alone."""
    order = af.Data(range(n), global_batch_size=1, shuffle=True)
    order = order.epoch(seed=seed, number=epoch).order
    start = min(start, max(0, n - 50))
    block = np.arange(start, min(start + 50, n))
    far = block + 2**away
    block = np.concatenate([block, far[far < n]])
    found = order(block)
    assert len(np.unique(found)) == len(block)
    assert found.min() >= 0
    assert found.max() < n
    at %= len(block)
    assert order(block[at : at + 1])[0] == found[at]


@pytest.mark.parametrize("n", [1, 2, 2**20 - 1, 2**20, 2**20 + 1, 10**6])
def test_a_long_shuffle_has_each_index_once(n):
    """Computed in blocks, an epoch of a million samples is a permutation."""
    order = af.Data(range(n), global_batch_size=1, shuffle=True).epoch(seed=1).order
    times = np.zeros(n, np.int64)
    for start in range(0, n, 65_536):
        times[order(np.arange(start, min(start + 65_536, n)))] += 1
    assert (times == 1).all()


def test_shuffle_is_even():
    """Over many seeds each index comes to each position about equally often."""
    n, draws = 6, 3000
    data = af.Data(range(n), global_batch_size=n, shuffle=True)
    found = [enumerate(order_of(data, seed)) for seed in range(draws)]
    places = Counter(chain.from_iterable(found))
    even = {(place, index): 1 / n**2 for place in range(n) for index in range(n)}
    assert chi_square(places, even) < 60  # 25 degrees of freedom: P(> 60) is 1e-4


# samplers


@given(seed=SEEDS, size=st.integers(1, 8), batch_size=st.integers(1, 5))
def test_random_samplers_are_functions_of_the_epoch(seed, size, batch_size):
    """Samplers that draw give all ranks one epoch, again the same; others and seeds differ."""
    samplers = [
        SubsetRandomSampler(range(2, 20)),
        WeightedRandomSampler([0.0, 1.0, 1.0, 2.0] * 5, 18),
        RandomSampler(range(18), generator=torch.Generator()),
    ]
    for sampler in samplers:
        data = sampled(20, batch_size, sampler)
        ranks = list(simulate(size, partial(read, data=data, seed=seed)))
        drawn = flat(joined(ranks))
        assert drawn == own(read(single(), data, seed=seed))
        first, second = drawn[:18], drawn[18:]
        assert first != second
        assert drawn != own(read(single(), data, seed=seed + 1))
        if isinstance(sampler, WeightedRandomSampler):
            assert all(i % 4 for i in drawn)
        else:
            kept = getattr(sampler, "indices", range(18))
            assert sorted(first) == sorted(second) == list(kept)


# mixes


@st.composite
def mixes(draw: st.DrawFn, least: int, most: int) -> tuple[Any, ...]:
    """Draw lengths, weights, whether to shuffle, and a mix of datasets of these."""
    lengths = draw(st.lists(st.integers(least, most), min_size=1, max_size=4))
    weights = [draw(st.sampled_from([1, 2, 0.3, 7.5])) for _ in lengths]
    datasets, shuffle = [torch.arange(n) for n in lengths], draw(st.booleans())
    data = af.Data.mix(datasets, weights=weights, shuffle=shuffle, global_batch_size=3)
    return lengths, weights, shuffle, data


@given(mix=mixes(40, 200), seed=SEEDS)
def test_mixes_have_their_shares_in_every_block(mix, seed):
    """Behind every 64 positions each dataset has had its share, to within one sample."""
    lengths, weights, _, data = mix
    shares = np.array(weights) / sum(weights)
    block = data.ordering.block  # 64 positions, or four to the least share
    epochs = range(3 * block // len(data) + 1)
    through = np.array([i for e in epochs for i in order_of(data, seed, e)])
    whose = np.searchsorted(np.cumsum(lengths), through, side="right")
    for stop in range(block, len(through) + 1, block):
        counts = np.bincount(whose[:stop], minlength=len(lengths))
        assert (np.abs(counts - shares * stop) < 1 + 1e-6).all()
        counts = np.bincount(whose[stop - block : stop], minlength=len(lengths))
        assert (np.abs(counts - shares * block) < 2 + 1e-6).all()


@given(mix=mixes(1, 40), seed=SEEDS)
def test_mixes_go_through_each_dataset(mix, seed):
    """No sample of a dataset comes again before all of it have come, over all epochs."""
    lengths, _, shuffle, data = mix
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


def as_lists(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate otherwise than torch does."""
    return torch.stack([each + 1 for each in samples])


@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {
            "remainder": REMAINDERS,
            "collate": st.sampled_from([None, as_lists]),
            "timeout": st.sampled_from([300.0, 7.0]),
            "num_workers": st.integers(0, 2),
        }
    ),
    size=st.integers(1, 3),
)
def test_options_of_a_mix_are_those_of_data(n, batch_size, options, size):
    """A mix of one dataset is that dataset, with any options."""
    assume(options["remainder"] != "drop" or batch_size <= n)
    rows = torch.arange(n)
    whole = af.Data(rows, global_batch_size=batch_size, **options)
    mix = af.Data.mix([rows], global_batch_size=batch_size, **options)
    assert (whole.num_workers, whole.timeout) == (mix.num_workers, mix.timeout)
    one, other = (attrs.evolve(each, num_workers=0) for each in (whole, mix))
    for found, expected in zip(
        simulate(size, lambda world: read(world, other)),
        simulate(size, lambda world: read(world, one)),
        strict=True,
    ):
        assert plain(found) == plain(expected)
