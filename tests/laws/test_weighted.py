# SPDX-License-Identifier: Apache-2.0
"""Orders that draw by weight: what is drawn how often, with replacement and without."""

from collections import Counter
from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.laws.test_orders import SEEDS, WEIGHTS, chi_square, numbers, order_of


@given(weights=WEIGHTS.filter(any), seed=SEEDS, epoch=st.integers(0, 5))
def test_a_weight_of_zero_is_never_drawn(weights, seed, epoch):
    """With replacement an epoch has as many samples as asked for, all of positive weight."""
    order = af.orders.weighted(weights, num_samples=200)
    found = order_of(numbers(len(weights), order), seed, epoch)
    assert len(found) == 200
    assert all(weights[i] > 0 for i in found)


@given(weights=WEIGHTS.filter(any), seed=SEEDS, epoch=st.integers(0, 5), draw=st.data())
def test_without_replacement_nothing_comes_twice(weights, seed, epoch, draw):
    """Without replacement all of positive weight come once; fewer are the first of them."""
    possible = [i for i, weight in enumerate(weights) if weight > 0]
    order = af.orders.weighted(weights, replacement=False)
    found = order_of(numbers(len(weights), order), seed, epoch)
    assert sorted(found) == possible
    count = draw.draw(st.integers(1, len(possible)))
    fewer = af.orders.weighted(weights, replacement=False, num_samples=count)
    assert order_of(numbers(len(weights), fewer), seed, epoch) == found[:count]


def test_weights_are_frequencies():
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


def test_without_replacement_as_one_draws_after_another():
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
