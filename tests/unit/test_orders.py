# SPDX-License-Identifier: Apache-2.0
"""Orders, budgets, mixes and zips: their arguments, and what says that they are wrong."""

import re
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, RandomSampler

import accelfn as af
from accelfn.errors import ArgumentError, DataError
from tests.internals import Plan, plan
from tests.states import read

X = torch.arange(10)
ONES = [1] * 10
EITHER = (ArgumentError, DataError)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def order_of(dataset, size, order=None, **options):
    """Return the dataset indices of an epoch, a list a batch."""
    data = af.Data(dataset, global_batch_size=size, order=order, **options)
    return [batch.indices.tolist() for batch in read(data)]


# What is refused.

NO_COUNTS = {
    "[-1]": [-1],
    "[1.5]": [1.5],
    "'ab'": "ab",
    "[[1], [1, 2]]": [[1], [1, 2]],
    "None": None,
    "[nan]": [np.nan],
}
NO_WEIGHTS = {**NO_COUNTS, "[0, 0]": [0, 0], "[]": [], "[inf]": [np.inf]}
del NO_WEIGHTS["[1.5]"]
COUNT, WEIGHT = "an integer >= 0 for each", "finite number of 0 or more"


@pytest.mark.parametrize(
    ("call", "name", "given", "words"),
    [
        *(
            (partial(af.token_budget, limit=2), "token_budget(costs)", w, COUNT)
            for w in NO_COUNTS
        ),
        *(
            (af.orders.bucketed, "orders.bucketed(lengths)", w, COUNT)
            for w in NO_COUNTS
        ),
        *(
            (af.orders.weighted, "orders.weighted(weights)", w, WEIGHT)
            for w in NO_WEIGHTS
        ),
    ],
)
def test_numbers_that_are_none(call, name, given, words):
    """What is no number a sample, of the kind that is due, is refused with its first values."""
    with pytest.raises(ArgumentError, match=words) as error:
        call(NO_WEIGHTS.get(given, NO_COUNTS.get(given)))
    assert f"af.{name}: got {given};" in str(error.value)


def test_tensors_arrays_and_lists_are_alike():
    """Costs, lengths and weights may be any of the three."""
    array = np.array([1, 2, 3, 4])
    for make_order in (af.orders.weighted, af.orders.bucketed):
        one, *others = (
            order_of(range(4), af.token_budget(each, limit=4), make_order(each))
            for each in (array.tolist(), array, torch.tensor(array))
        )
        assert others == [one, one]


def test_weights_of_any_size_are_shares():
    """Those whose sum no float holds draw as smaller ones do."""
    large, small = (
        af.orders.weighted(np.array([1.0, 3.0, 0.0, 4.0]) * scale, num_samples=100)
        for scale in (4e307, 1.0)
    )
    assert order_of(range(4), 100, large) == order_of(range(4), 100, small)


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_of_any_size_is_kept(padded):
    """Costs whose sum or product no integer of 64 bits holds do not fit together."""
    for limit in (2**62, 2**63 - 1, 2**70):
        costs = af.token_budget([2**62] * 6, limit=limit, padded=padded)
        stops = costs.cut(np.arange(6)).stops
        assert stops.tolist() == [1, 2, 3, 4, 5, 6]


def test_weights_are_copied():
    """An array that is changed later changes no order."""
    weights = np.array([1.0, 0.0])
    order = af.orders.weighted(weights)
    weights[:] = [0.0, 1.0]
    assert order_of(range(2), 2, order) == [[0, 0]]


ONE, LISTS = {"global_batch_size": 2}, {"batch_sampler": [[1]]}
BUDGET = af.token_budget(ONES, limit=1)
REFUSED = [
    (lambda: af.token_budget([1], limit=1, padded="no"), r"\(padded='no'\)"),
    (
        lambda: af.orders.weighted([1, 0], num_samples=2, replacement=False),
        r"\(num_samples=2, replacement=False\)",
    ),
    (lambda: af.orders.weighted([1], replacement=2), r"\(replacement=2\)"),
    (
        lambda: af.Data(X, **ONE, order=af.orders.weighted([1])),
        "1 weights for 10 samples",
    ),
    (
        lambda: af.Data(X, **ONE, order=af.orders.bucketed([1])),
        "1 lengths for 10 samples",
    ),
    (
        lambda: af.Data(X, global_batch_size=af.token_budget([1], limit=1)),
        "1 costs for 10 samples",
    ),
    (
        lambda: af.token_budget([1, 5, 6], limit=4),
        r"limit=4\): sample 1 costs 5.*2 of 3",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_contradicts_is_refused(call, words):
    """Options, numbers of samples, and a sample beyond the budget, with their values."""
    with pytest.raises(
        ArgumentError if "=" in words[:20] and "limit" not in words else DataError,
        match=words,
    ):
        call()


@pytest.mark.parametrize(
    "order", [[1, 2], RandomSampler(X), af.orders.weighted, "shuffled"]
)
def test_orders_that_are_none(order):
    """A list, a sampler or an order that was not called is refused with what to give."""
    with pytest.raises(ArgumentError, match=r"\(seed, epoch, n\) -> .*from_loader"):
        af.Data(X, global_batch_size=2, order=order)


PLACES = "expected integers from 0 to 9"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "a NoneType; expected a sequence of 10"),
        (iter(range(10)), "a range_iterator; expected a sequence of 10"),
        (range(9), "9 indices; expected 10"),
        (range(11), "11 indices; expected 10"),
        (X > 1, PLACES),
        ([True] * 10, PLACES),
        (np.arange(10.0), PLACES),
        (range(-1, 9), PLACES),
        (range(1, 11), PLACES),
    ],
)
def test_own_orders_that_give_no_indices(given, words):
    """A function that returns no sequence of so many places is told what it returned."""
    with pytest.raises(DataError, match=rf"n=10\) returned .*{words}"):
        order_of(X, 2, lambda *_: given)


OWN = {"order": lambda *_: X}
EXCLUDED = {
    "got neither global_batch_size= nor batch_sampler=. Pass": {},
    "got both global_batch_size= and batch_sampler=. Pass": {**ONE, **LISTS},
    "Leave out order=": {**LISTS, "shuffle": True},
    "Leave out order=, shuffle= and": {**LISTS, "remainder": "pad"},
    "Leave out order=, shuffle=": {**LISTS, **OWN},
    "pass only one of them": {**ONE, **OWN, "shuffle": True},
    "Leave out remainder=": {"global_batch_size": BUDGET, "remainder": "drop"},
    "int is not iterable": {"batch_sampler": 3},
    "generator is not iterable, or has no length": {
        "batch_sampler": (i for i in [[1]])
    },
}


@pytest.mark.parametrize("words", EXCLUDED)
def test_options_that_exclude_each_other(words):
    """Options that contradict each other are refused with what to leave out."""
    with pytest.raises(ArgumentError, match=words):
        af.Data(X, **EXCLUDED[words])


TWO = [X, X]
MIXES = {
    "got lengths ()": ([], {}),
    "got lengths (10, 0)": ([X, []], {}),
    "expected a list of datasets": (3, {}),
    "weights=[1]): expected 2 finite": (TWO, {"weights": [1]}),
    "weights=[1, 0]): expected 2 finite": (TWO, {"weights": [1, 0]}),
    "weights=[True, 2])": (TWO, {"weights": [True, 2]}),
    "weights=[1, 1e-09]): the dataset with the smallest": (TWO, {"weights": [1, 1e-9]}),
    "weights=[1e+300, 1e-300]): the dataset with": (TWO, {"weights": [1e300, 1e-300]}),
    "weights=[1, nan])": (TWO, {"weights": [1, np.nan]}),
    "weights='ab')": (TWO, {"weights": "ab"}),
    "weights=3)": (TWO, {"weights": 3}),
    "mix(order=...)": (TWO, OWN),
    "mix(batch_sampler=...)": (TWO, LISTS),
    "Stream cannot be read by index": ([X, Stream()], {}),
    "Joined is not a stream": (TWO, {"sharded": True}),
}


@pytest.mark.parametrize("words", MIXES)
def test_mixes_that_cannot_be(words):
    """What cannot be mixed is refused with what was given."""
    parts, options = MIXES[words]
    with pytest.raises(EITHER, match=re.escape(words)):
        af.Data.mix(parts, global_batch_size=2, **options)


@pytest.mark.parametrize(
    "weights", [(1, 3), np.array([1, 3]), torch.tensor([1.0, 3.0])]
)
def test_weights_of_a_mix(weights):
    """They may be any sequence of numbers."""
    data = af.Data.mix([X, X + 100], weights=weights, global_batch_size=4)
    assert "mixed 1:3" in repr(data)


def test_a_budget_has_no_one_number_of_updates():
    """It may differ from epoch to epoch; the refusal names the question that has an answer."""
    budget = af.token_budget(range(1, 11), limit=20)
    data = af.Data(X, global_batch_size=budget, shuffle=True)
    words = r"Call data\.num_updates\(epochs, seed="
    with pytest.raises(DataError, match=words):
        _ = data.updates_per_epoch
    assert data.num_updates(2, seed=0) == len(read(data, epochs=2))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_of_a_budget_comes_last(seed):
    """Batches of buckets come in any order, but the last, which may be short."""
    budget, order = af.token_budget(ONES, limit=4), af.orders.bucketed(ONES, window=10)
    data = af.Data(X, global_batch_size=budget, order=order)
    spans = list(data.epoch(seed=seed).cut.spans(0))
    assert [stop - start for start, stop in spans] == [4, 4, 2]


def asked_of_order(num_ranks, share, updates, *, order=None):
    """Return how many samples a rank asks an order for, at each time."""
    batch = num_ranks * share
    data = af.Data(range(batch * updates), global_batch_size=batch, order=order)
    whole, asked = data.epoch(seed=0), []

    def noted(positions):
        asked.append(len(positions))
        return positions

    ranks_plan = Plan(num_shares=num_ranks, rank=3, world_rank=3, world_size=num_ranks)
    of_rank = attrs.evolve(whole, order=noted)
    assert len(list(plan.portions(of_rank, ranks_plan, af.typing.Cursor()))) == updates
    return asked


@given(share=st.integers(1, 2000), updates=st.integers(1, 300))
def test_an_order_costs_a_rank_as_much_on_any_number(share, updates):
    """It is asked for many updates at once, however many samples the others have."""
    few, many = (asked_of_order(n, share, updates) for n in (4, 4096))
    assert few == many
    assert len(few) <= 2 + sum(few) // 4096 + updates // 256


def test_an_order_that_sorts_is_asked_for_less_at_once(monkeypatch):
    """All positions in between are sorted, so that a rank would wait long for many."""
    ranks, share, updates = 1024, 4, 8
    monkeypatch.setattr(plan, "_MOST_SORTED", ranks * share)
    order = af.orders.bucketed([1] * ranks * share * updates)
    assert asked_of_order(ranks, share, updates, order=order) == [share] * updates
    assert asked_of_order(ranks, share, updates) == [share * updates]
