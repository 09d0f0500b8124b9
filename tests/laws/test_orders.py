# SPDX-License-Identifier: Apache-2.0
"""Orders are functions of (seed, epoch, position), and give what their names say."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise, permutations
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import accelfn as af
from accelfn.data.zipped import Zipped
from accelfn.testing import simulate
from tests.laws.reading import REMAINDERS, in_legs, joined, own, plain, read
from tests.laws.worlds import single

SEEDS = st.integers(0, 2**40)
WEIGHTS = st.lists(st.sampled_from([0, 0.5, 1, 3, 1e-9]), min_size=1, max_size=40)


def order_of(data: af.Data, seed: int, epoch: int = 0) -> list[int]:
    """Return the indices of an epoch."""
    epoch_of = data.epoch(seed=seed, number=epoch)
    return epoch_of.order(np.arange(epoch_of.num_samples)).tolist()


def numbers(n: int, order: object, **options: Any) -> af.Data:
    """Return data that are their own indices, in an order."""
    return af.Data(torch.arange(n), order=order, **{"batch_size": 3, **options})


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
    "in order": lambda n, size, _: numbers(n, None, batch_size=size),
    "shuffled": lambda n, size, _: numbers(n, None, batch_size=size, shuffle=True),
    "own": lambda n, size, _: numbers(n, a_loop, batch_size=size),
    "weighted": lambda n, size, costs: numbers(
        n, af.orders.weighted(costs), batch_size=size
    ),
    "without replacement": lambda n, size, costs: numbers(
        n, af.orders.weighted(costs, replacement=False), batch_size=size
    ),
    "bucketed": lambda n, size, costs: numbers(
        n, af.orders.bucketed(costs, window=7), batch_size=size
    ),
    "budget": lambda n, size, costs: numbers(
        n, None, shuffle=True, batch_size=af.budget(costs, limit=9 * size)
    ),
    "bucketed budget": lambda n, size, costs: numbers(
        n,
        af.orders.bucketed(costs, window=7),
        batch_size=af.budget(costs, limit=9 * size, padded=False),
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
        batch_size=size,
    ),
    "zip": lambda n, size, _: af.Data.zip(
        a=torch.arange(n),
        b=torch.arange(5),
        batch_size=size,
        shuffle=True,
        collate=lambda rows: torch.tensor([[int(row["a"])] for row in rows]),
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
        state = af.TrainState.create(
            model=partial(torch.nn.Linear, 1, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            setup=af.shard_data(),
            world=world,
        )
        seen = af.predict(state, data, lambda _, batch: batch)
        counted = af.evaluate(
            state, data, lambda _, batch: af.Loss(batch.double().sum(), len(batch))
        )
        return [int(each) for each in seen], float(counted["loss"])

    shown = data.source.parts["a"] if isinstance(data.source, Zipped) else data.source
    n = len(shown)
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
def test_no_sample_is_lost_between_blocks(
    n: int, batch_size: int, size: int, start: int, *, shuffle: bool
) -> None:
    """However batches lie across the blocks in which a long order is computed."""
    data, at = af.Data(torch.arange(n), batch_size=batch_size, shuffle=shuffle), start

    def rank(world: af.World) -> list[af.Batch]:
        return read(world, data, epochs=1, start=af.Cursor(0, at))

    found = joined(simulate(size, rank))
    assert flat(found) == order_of(data, 0)[start:]


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
def test_a_rank_asks_for_no_position_but_its_own(
    n: int, batch_size: int, size: int, parts: int, remainder: Any
) -> None:
    """On any number of ranks an order is asked once for what is read, and no more."""

    def rank(world: af.World) -> None:
        asked = Asked(n)
        order = lambda _seed, _epoch, _n: asked  # noqa: E731 - of this rank
        data = numbers(n, order, batch_size=batch_size, remainder=remainder)
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
    draw=st.data(),
)
def test_a_shuffle_of_any_length_is_looked_into(
    n: int, seed: int, epoch: int, draw: st.DataObject
) -> None:
    """Positions near and far have indices of their own, each the one computed alone."""
    order = af.Data(range(n), batch_size=1, shuffle=True)
    order = order.epoch(seed=seed, number=epoch).order
    start = draw.draw(st.integers(0, max(0, n - 50)))
    block = np.arange(start, min(start + 50, n))
    far = block + 2 ** draw.draw(st.sampled_from([8, 16, 31, 32, 33]))
    block = np.concatenate([block, far[far < n]])
    found = order(block)
    assert len(np.unique(found)) == len(block)
    assert found.min() >= 0
    assert found.max() < n
    at = draw.draw(st.integers(0, len(block) - 1))
    assert order(block[at : at + 1])[0] == found[at]


@pytest.mark.parametrize("n", [1, 2, 2**20 - 1, 2**20, 2**20 + 1, 10**6])
def test_a_long_shuffle_has_each_index_once(n: int) -> None:
    """Computed in blocks, an epoch of a million samples is a permutation."""
    order = af.Data(range(n), batch_size=1, shuffle=True).epoch(seed=1).order
    times = np.zeros(n, np.int64)
    for start in range(0, n, 65_536):
        times[order(np.arange(start, min(start + 65_536, n)))] += 1
    assert (times == 1).all()


# weighted


@given(weights=WEIGHTS.filter(any), seed=SEEDS, epoch=st.integers(0, 5))
def test_a_weight_of_zero_is_never_drawn(
    weights: list[float], seed: int, epoch: int
) -> None:
    """With replacement an epoch has as many samples as asked for, all of positive weight."""
    order = af.orders.weighted(weights, num_samples=200)
    found = order_of(numbers(len(weights), order), seed, epoch)
    assert len(found) == 200
    assert all(weights[i] > 0 for i in found)


@given(weights=WEIGHTS.filter(any), seed=SEEDS, epoch=st.integers(0, 5), draw=st.data())
def test_without_replacement_nothing_comes_twice(
    weights: list[float], seed: int, epoch: int, draw: st.DataObject
) -> None:
    """Without replacement all of positive weight come once; fewer are the first of them."""
    possible = [i for i, weight in enumerate(weights) if weight > 0]
    order = af.orders.weighted(weights, replacement=False)
    found = order_of(numbers(len(weights), order), seed, epoch)
    assert sorted(found) == possible
    count = draw.draw(st.integers(1, len(possible)))
    fewer = af.orders.weighted(weights, replacement=False, num_samples=count)
    assert order_of(numbers(len(weights), fewer), seed, epoch) == found[:count]


def test_weights_are_frequencies() -> None:
    """Draws with replacement, and pairs of neighbours, are as frequent as weights say."""
    weights = [1, 2, 0, 5]
    p = {i: weight / 8 for i, weight in enumerate(weights) if weight}
    order = af.orders.weighted(weights, num_samples=20_000)
    found = order_of(numbers(4, order), seed=3)
    assert chi_square(Counter(found), p) < 18.4  # 2 degrees of freedom: P is 1e-4
    pairs = {(i, j): p[i] * p[j] for i in p for j in p}
    neighbours = Counter(list(pairwise(found))[::2])
    assert chi_square(neighbours, pairs) < 31.8  # 8 degrees of freedom: P is 1e-4
    epochs = [order_of(numbers(4, order), seed=3, epoch=e)[0] for e in range(2000)]
    assert chi_square(Counter(epochs), p) < 18.4


def test_without_replacement_as_one_draws_after_another() -> None:
    """Without replacement each whole epoch is as frequent as drawing one by one gives."""
    weights = {0: 1.0, 1: 2.0, 3: 5.0}

    def chance(epoch: tuple[int, ...]) -> float:
        left, p = sum(weights.values()), 1.0
        for i in epoch:
            p, left = p * weights[i] / left, left - weights[i]
        return p

    order = af.orders.weighted([1, 2, 0, 5], replacement=False)
    data = numbers(4, order)
    found = Counter(tuple(order_of(data, seed=5, epoch=e)) for e in range(3000))
    expected = {epoch: chance(epoch) for epoch in permutations(weights)}
    assert chi_square(found, expected) < 25.7  # 5 degrees of freedom: P is 1e-4


# bucketed, and budgets

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(
    lengths=LENGTHS,
    window=st.integers(1, 40),
    size=st.integers(1, 9),
    seed=SEEDS,
    epoch=st.integers(0, 3),
)
def test_buckets_are_sorted_windows(
    lengths: list[int], window: int, size: int, seed: int, epoch: int
) -> None:
    """Each sample comes once; a window's batches, by length, are sorted; a short one is last."""
    n = len(lengths)
    order = af.orders.bucketed(lengths, window=window)
    found = order_of(numbers(n, order, batch_size=size), seed, epoch)
    assert sorted(found) == list(range(n))
    whole = -(-window // size) * size  # windows are of whole batches
    for start in range(0, n, whole):
        of_window = [lengths[i] for i in found[start : start + whole]]
        batches = [of_window[i : i + size] for i in range(0, len(of_window), size)]
        short = [batch for batch in batches if len(batch) < size]
        by_length = sorted(batch for batch in batches if len(batch) == size)
        assert flat([*by_length, *short]) == sorted(of_window)
        assert short in ([], batches[-1:])


def test_batches_of_a_window_come_in_any_order() -> None:
    """Every order of a window's batches comes about equally often; samples move between."""
    data = numbers(6, af.orders.bucketed([1, 1, 5, 5, 9, 9]), batch_size=2)
    lengths = [0, 0, 1, 1, 2, 2]
    epochs = [order_of(data, seed=0, epoch=e) for e in range(1200)]
    turns = Counter(tuple(lengths[i] for i in epoch[::2]) for epoch in epochs)
    expected = dict.fromkeys(permutations(range(3)), 1 / 6)
    assert chi_square(turns, expected) < 25.7  # 5 degrees of freedom: P is 1e-4
    assert {epoch[0] for epoch in epochs} == set(range(6))


@given(
    costs=LENGTHS | LENGTHS.map(lambda few: few * 9),
    more=st.integers(0, 60) | st.sampled_from([900, 9000]),
    padded=st.booleans(),
    shuffle=st.booleans(),
    seed=SEEDS,
)
def test_budgets_are_kept_and_used(
    costs: list[int], more: int, padded: bool, shuffle: bool, seed: int
) -> None:
    """Every sample comes once, no batch exceeds the limit, none could take the next too."""
    limit = max(costs) + more

    def cost(batch: list[int]) -> int:
        each = [costs[i] for i in batch]
        return max(each) * len(each) if padded else sum(each)

    budget = af.budget(costs, limit=limit, padded=padded)
    data = numbers(len(costs), None, batch_size=budget, shuffle=shuffle)
    found = [own([batch]) for batch in read(single(), data, epochs=1, seed=seed)]
    assert flat(found) == order_of(data, seed)
    assert sorted(flat(found)) == list(range(len(costs)))
    assert all(cost(batch) <= limit for batch in found)
    assert all(cost([*one, two[0]]) > limit for one, two in pairwise(found))
    bucketed = attrs.evolve(
        data, shuffle=False, order=af.orders.bucketed(costs, window=16)
    )
    found = [own([batch]) for batch in read(single(), bucketed, epochs=1, seed=seed)]
    assert sorted(flat(found)) == list(range(len(costs)))
    assert all(cost(batch) <= limit for batch in found)


@given(costs=LENGTHS, more=st.integers(0, 60), seed=SEEDS)
def test_budgets_of_buckets_are_of_like_samples(
    costs: list[int], more: int, seed: int
) -> None:
    """In one window, no sample is in a batch of shorter ones while they are in longer ones'."""
    order = af.orders.bucketed(costs, window=len(costs))
    budget = af.budget(costs, limit=max(costs) + more)
    data = numbers(len(costs), order, batch_size=budget)
    found = [own([batch]) for batch in read(single(), data, epochs=1, seed=seed)]
    spans = sorted(
        (min(each), max(each)) for each in ([costs[i] for i in b] for b in found)
    )
    assert all(one[1] <= two[0] for one, two in pairwise(spans))


# samplers


@given(
    indices=st.lists(st.integers(0, 11), min_size=1, max_size=30),
    batch_size=st.integers(1, 8),
    size=st.integers(1, 8),
)
def test_samplers_are_kept(indices: list[int], batch_size: int, size: int) -> None:
    """A sampler's own indices come, in its order, epoch after epoch, dealt by position."""
    data = sampled(12, batch_size, Listed(indices))
    ranks = list(simulate(size, lambda world: read(world, data)))
    turned = [*indices[1:], *indices[:1]]
    assert flat(joined(ranks)) == [*indices, *turned]


@given(seed=SEEDS, size=st.integers(1, 8), batch_size=st.integers(1, 5))
def test_random_samplers_are_functions_of_the_epoch(
    seed: int, size: int, batch_size: int
) -> None:
    """Samplers that draw give one epoch to all ranks, again the same, and then another."""
    samplers = {
        "subset": SubsetRandomSampler(range(2, 20)),
        "weighted": WeightedRandomSampler([0.0, 1.0, 1.0, 2.0] * 5, 18),
        "generator": RandomSampler(range(18), generator=torch.Generator()),
    }
    for name, sampler in samplers.items():
        data = sampled(20, batch_size, sampler)
        ranks = list(simulate(size, partial(read, data=data, seed=seed)))
        drawn = flat(joined(ranks))
        assert drawn == own(read(single(), data, seed=seed))
        first, second = drawn[:18], drawn[18:]
        assert first != second
        if name == "weighted":
            assert all(i % 4 for i in drawn)
        else:
            kept = range(2, 20) if name == "subset" else range(18)
            assert sorted(first) == sorted(second) == list(kept)


@given(
    batches=st.lists(
        st.lists(st.integers(0, 11), min_size=1, max_size=6), min_size=1, max_size=9
    ),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), max_size=3),
)
def test_batch_samplers_are_kept(
    batches: list[list[int]], legs: list[tuple[int, int]]
) -> None:
    """A batch sampler's lists are the updates, on any ranks, cut and resumed on others."""
    data = af.Data(torch.arange(12), batch_sampler=Listed(batches))
    found = in_legs(legs, lambda _world: data)
    turned = [*batches[1:], *batches[:1]]
    assert flat(map(joined, found)) == [*batches, *turned]


# mixes and zips


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


# one's own


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    size=st.integers(1, 8),
    seed=SEEDS,
)
def test_an_order_of_ones_own_is_followed(
    n: int, batch_size: int, size: int, seed: int
) -> None:
    """A function (seed, epoch, n) says the order of each epoch, on any ranks."""
    data = numbers(n, a_loop, batch_size=batch_size)
    ranks = list(simulate(size, lambda world: read(world, data, seed=seed)))
    assert flat(joined(ranks)) == [*a_loop(seed, 0, n), *a_loop(seed, 1, n)]
