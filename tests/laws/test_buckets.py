# SPDX-License-Identifier: Apache-2.0
"""Batches of like samples: buckets by length, and budgets that batches keep to."""

from collections import Counter
from itertools import pairwise, permutations

import attrs
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from tests.laws.reading import own, read
from tests.laws.test_orders import SEEDS, chi_square, flat, numbers, order_of
from tests.laws.worlds import single

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@example(lengths=[*range(12, 0, -1)], window=5, size=4, seed=0, epoch=0)
@given(
    lengths=LENGTHS,
    window=st.integers(1, 40),
    size=st.integers(1, 9),
    seed=SEEDS,
    epoch=st.integers(0, 3),
)
def test_buckets_are_sorted_windows(lengths, window, size, seed, epoch):
    """Each sample comes once; a window's batches, by length, are sorted; a short one is last."""
    n = len(lengths)
    order = af.orders.bucketed(lengths, window=window)
    found = order_of(numbers(n, order, global_batch_size=size), seed, epoch)
    assert sorted(found) == list(range(n))
    whole = -(-window // size) * size  # windows are of whole batches
    for start in range(0, n, whole):
        of_window = [lengths[i] for i in found[start : start + whole]]
        batches = [of_window[i : i + size] for i in range(0, len(of_window), size)]
        short = [batch for batch in batches if len(batch) < size]
        by_length = sorted(batch for batch in batches if len(batch) == size)
        assert flat([*by_length, *short]) == sorted(of_window)
        assert short in ([], batches[-1:])


def test_batches_of_a_window_come_in_any_order():
    """Every order of a window's batches comes about equally often; samples move between."""
    data = numbers(6, af.orders.bucketed([1, 1, 5, 5, 9, 9]), global_batch_size=2)
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
def test_budgets_are_kept_and_used(costs, more, padded, shuffle, seed):
    """Every sample comes once, no batch exceeds the limit, none could take the next too.

    And there are as many as are counted beforehand.
    """
    limit = max(costs) + more

    def cost(batch):
        each = [costs[i] for i in batch]
        return max(each) * len(each) if padded else sum(each)

    budget = af.token_budget(costs, limit=limit, padded=padded)
    data = numbers(len(costs), None, global_batch_size=budget, shuffle=shuffle)
    found = [own([batch]) for batch in read(single(), data, epochs=1, seed=seed)]
    assert flat(found) == order_of(data, seed)
    assert data.num_updates(2, seed=seed) == len(read(single(), data, seed=seed))
    assert sorted(flat(found)) == list(range(len(costs)))
    assert all(cost(batch) <= limit for batch in found)
    assert all(cost([*one, two[0]]) > limit for one, two in pairwise(found))
    bucketed = attrs.evolve(
        data, shuffle=False, order=af.orders.bucketed(costs, window=16)
    )
    found = [own([batch]) for batch in read(single(), bucketed, epochs=1, seed=seed)]
    assert sorted(flat(found)) == list(range(len(costs)))
    assert all(cost(batch) <= limit for batch in found)


def test_batches_of_a_budget_come_in_any_order():
    """In each epoch another order of batches is drawn, but for the last one's place."""
    costs = [5, 6, 7, 8]
    order, budget = af.orders.bucketed(costs), af.token_budget(costs, limit=8)
    data = numbers(4, order, global_batch_size=budget)
    turns = Counter(tuple(order_of(data, seed=0, epoch=e)) for e in range(1200))
    expected = {(*three, 3): 1 / 6 for three in permutations(range(3))}
    assert chi_square(turns, expected) < 25.7  # 5 degrees of freedom: P is 1e-4


@given(costs=LENGTHS, more=st.integers(0, 60), seed=SEEDS)
def test_budgets_of_buckets_are_of_like_samples(costs, more, seed):
    """In one window, no sample is in a batch of shorter ones while they are in longer ones'."""
    order = af.orders.bucketed(costs, window=len(costs))
    budget = af.token_budget(costs, limit=max(costs) + more)
    data = numbers(len(costs), order, global_batch_size=budget)
    found = [own([batch]) for batch in read(single(), data, epochs=1, seed=seed)]
    spans = sorted(
        (min(each), max(each)) for each in ([costs[i] for i in b] for b in found)
    )
    assert all(one[1] <= two[0] for one, two in pairwise(spans))
