# SPDX-License-Identifier: Apache-2.0
"""Orders, budgets, mixes and zips: their arguments, and what says that they are wrong."""

from itertools import chain

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, RandomSampler

import accelfn as af
from tests.internals import Plan, plan
from tests.states import linear_state

X = torch.arange(10)
ONES = [1] * 10


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def make(data):
    """Return a small state over data."""
    return linear_state(data=data)


def read(data, epochs=1):
    """Return the batches of some epochs."""
    return list(af.batches(make(data), until_epoch=epochs))


# What is refused.

WORDS = ["[-1]", "[1.5]", "'ab'", "[[1], [1, 2]]", "None", "[nan]"]
NO_COUNTS = dict(
    zip(WORDS, [[-1], [1.5], "ab", [[1], [1, 2]], None, [np.nan]], strict=True)
)
NO_WEIGHTS = {k: v for k, v in NO_COUNTS.items() if k != "[1.5]"} | {
    "[0, 0]": [0, 0],
    "[]": [],
    "[inf]": [np.inf],
}


@pytest.mark.parametrize("given", NO_COUNTS)
@pytest.mark.parametrize(
    ("make_it", "name"),
    [
        (lambda values: af.token_budget(values, limit=2), r"af.token_budget(costs)"),
        (af.orders.bucketed, r"af.orders.bucketed(lengths)"),
    ],
)
def test_counts_that_are_none(make_it, name, given):
    """What is no integer a sample is refused with its first values."""
    with pytest.raises(
        af.errors.ArgumentError, match="an integer >= 0 for each"
    ) as error:
        make_it(NO_COUNTS[given])
    assert f"{name}: got {given};" in str(error.value)


@pytest.mark.parametrize("given", NO_WEIGHTS)
def test_weights_that_are_none(given):
    """What is no finite number of 0 or more a sample is refused with its first values."""
    with pytest.raises(
        af.errors.ArgumentError, match="finite number of 0 or more"
    ) as error:
        af.orders.weighted(NO_WEIGHTS[given])
    assert f"af.orders.weighted(weights): got {given};" in str(error.value)


def test_tensors_arrays_and_lists_are_alike():
    """Costs, lengths and weights may be any of the three."""
    array = np.array([1, 2, 3, 4])
    for make_order in (af.orders.weighted, af.orders.bucketed):
        orders = [
            [
                b.indices.tolist()
                for b in read(af.Data(range(4), global_batch_size=size, order=order))
            ]
            for values in (array.tolist(), array, torch.tensor(array))
            for size, order in [(af.token_budget(values, limit=4), make_order(values))]
        ]
        assert orders[0] == orders[1] == orders[2]


def test_weights_of_any_size_are_shares():
    """Those whose sum no float holds draw as smaller ones do."""
    large, small = (
        af.orders.weighted(np.array([1.0, 3.0, 0.0, 4.0]) * scale)
        for scale in (4e307, 1.0)
    )
    found = [
        read(
            af.Data(
                range(4),
                global_batch_size=100,
                order=attrs.evolve(each, num_samples=100),
            )
        )
        for each in (large, small)
    ]
    assert found[0][0].indices.tolist() == found[1][0].indices.tolist()


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
    assert [
        b.indices.tolist()
        for b in read(af.Data(range(2), global_batch_size=2, order=order))
    ] == [[0, 0]]


ARGUMENTS = {
    "padded='no'": lambda: af.token_budget([1], limit=1, padded="no"),
    "num_samples=2, replacement=False": lambda: af.orders.weighted(
        [1, 0], num_samples=2, replacement=False
    ),
    "replacement=2": lambda: af.orders.weighted([1], replacement=2),
}


@pytest.mark.parametrize("given", ARGUMENTS)
def test_arguments_are_named_with_their_values(given):
    """An option that contradicts others, or a flag that is none, is refused with its value."""
    with pytest.raises(af.errors.ArgumentError) as error:
        ARGUMENTS[given]()
    assert f"({given})" in str(error.value)


MISFITS = {
    "weights": {"global_batch_size": 2, "order": af.orders.weighted([1])},
    "lengths": {"global_batch_size": 2, "order": af.orders.bucketed([1])},
    "costs": {"global_batch_size": af.token_budget([1], limit=1)},
}


@pytest.mark.parametrize("what", MISFITS)
def test_not_one_each(what):
    """Another number of weights, lengths or costs than samples is refused with both."""
    with pytest.raises(af.errors.DataError, match=f"1 {what} for 10 samples"):
        af.Data(X, **MISFITS[what])


def test_a_sample_that_fits_no_budget():
    """It is named with its cost, and how many there are of its kind."""
    with pytest.raises(
        af.errors.DataError, match=r"limit=4\): sample 1 costs 5.*2 of 3"
    ):
        af.token_budget([1, 5, 6], limit=4)


@pytest.mark.parametrize(
    "order", [[1, 2], RandomSampler(X), af.orders.weighted, "shuffled"]
)
def test_orders_that_are_none(order):
    """A list, a sampler or an order that was not called is refused with what to give."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"\(seed, epoch, n\) -> .*from_loader"
    ):
        af.Data(X, global_batch_size=2, order=order)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "a NoneType; expected a sequence of 10"),
        (iter(range(10)), "a range_iterator; expected a sequence of 10"),
        (range(9), "9 indices; expected 10"),
        (range(11), "11 indices; expected 10"),
    ],
)
def test_own_orders_that_give_no_indices(given, words):
    """A function that returns no sequence of so many is refused with what it returned."""
    data = af.Data(X, global_batch_size=2, order=lambda *_: given)
    with pytest.raises(af.errors.DataError, match=rf"n=10\) returned {words}"):
        read(data)


@pytest.mark.parametrize(
    "given", [X > 1, [True] * 10, np.arange(10.0), range(-1, 9), range(1, 11)]
)
def test_own_orders_that_give_no_places(given):
    """A mask, fractions and places that are not there are refused with what was given."""
    data = af.Data(X, global_batch_size=2, order=lambda *_: given)
    with pytest.raises(af.errors.DataError, match=r"expected integers from 0 to 9"):
        read(data)


class Backwards:
    """A lazy order: a class whose instances are sequences."""

    def __init__(self, seed, epoch, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, place):
        return self.n - 1 - place


@pytest.mark.parametrize("order", [Backwards, lambda *_: torch.arange(9, -1, -1)])
def test_own_orders_may_be_lazy_or_tensors(order):
    """A class or a tensor does as well as a list."""
    (batch,) = read(af.Data(X, global_batch_size=10, order=order))
    assert batch.indices.tolist() == list(range(9, -1, -1))


EXCLUDED = {
    "got neither global_batch_size= nor batch_sampler=. Pass": {},
    "got both global_batch_size= and batch_sampler=. Pass": {
        "global_batch_size": 1,
        "batch_sampler": [[1]],
    },
    "Leave out order=": {"batch_sampler": [[1]], "shuffle": True},
    "Leave out order=, shuffle= and": {"batch_sampler": [[1]], "remainder": "pad"},
    "Leave out order=, shuffle=": {"batch_sampler": [[1]], "order": lambda *_: X},
    "pass only one of them": {
        "global_batch_size": 1,
        "shuffle": True,
        "order": lambda *_: X,
    },
    "Leave out remainder=": {
        "global_batch_size": af.token_budget(ONES, limit=1),
        "remainder": "drop",
    },
    "int is not iterable": {"batch_sampler": 3},
    "generator is not iterable, or has no length": {
        "batch_sampler": (i for i in [[1]])
    },
}


@pytest.mark.parametrize("words", EXCLUDED)
def test_options_that_exclude_each_other(words):
    """Options that contradict each other are refused with what to leave out."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.Data(X, **EXCLUDED[words])


MIXES = {
    "got lengths ()": (af.errors.DataError, [], {}),
    "got lengths (10, 0)": (af.errors.DataError, [X, []], {}),
    "expected a list of datasets": (af.errors.ArgumentError, 3, {}),
    "weights=[1]): expected 2 finite": (
        af.errors.ArgumentError,
        [X, X],
        {"weights": [1]},
    ),
    "weights=[1, 0]): expected 2 finite": (
        af.errors.ArgumentError,
        [X, X],
        {"weights": [1, 0]},
    ),
    "weights=[True, 2])": (af.errors.ArgumentError, [X, X], {"weights": [True, 2]}),
    "weights=[1, 1e-09]): the dataset with the smallest": (
        af.errors.ArgumentError,
        [X, X],
        {"weights": [1, 1e-9]},
    ),
    "weights=[1e+300, 1e-300]): the dataset with": (
        af.errors.ArgumentError,
        [X, X],
        {"weights": [1e300, 1e-300]},
    ),
    "weights=[1, nan])": (af.errors.ArgumentError, [X, X], {"weights": [1, np.nan]}),
    "weights='ab')": (af.errors.ArgumentError, [X, X], {"weights": "ab"}),
    "weights=3)": (af.errors.ArgumentError, [X, X], {"weights": 3}),
    "mix(order=...)": (af.errors.ArgumentError, [X, X], {"order": lambda *_: X}),
    "mix(batch_sampler=...)": (
        af.errors.ArgumentError,
        [X, X],
        {"batch_sampler": [[1]]},
    ),
    "Stream cannot be read by index": (af.errors.DataError, [X, Stream()], {}),
    "Joined is not a stream": (af.errors.ArgumentError, [X, X], {"sharded": True}),
}


@pytest.mark.parametrize("words", MIXES)
def test_mixes_that_cannot_be(words):
    """What cannot be mixed is refused with what was given."""
    kind, parts, options = MIXES[words]
    with pytest.raises(kind) as error:
        af.Data.mix(parts, global_batch_size=2, **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "weights", [(1, 3), np.array([1, 3]), torch.tensor([1.0, 3.0])]
)
def test_weights_of_a_mix(weights):
    """They may be any sequence of numbers."""
    data = af.Data.mix([X, X + 100], weights=weights, global_batch_size=4)
    assert "mixed 1:3" in repr(data)


def test_a_budget_has_no_one_number_of_updates():
    """It may differ from epoch to epoch; the refusal names the question that has an answer."""
    data = af.Data(
        X, global_batch_size=af.token_budget(range(1, 11), limit=20), shuffle=True
    )
    with pytest.raises(
        af.errors.DataError, match=r"Call data\.num_updates\(epochs, seed="
    ):
        _ = data.updates_per_epoch
    assert data.num_updates(2, seed=0) == len(read(data, epochs=2))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_of_a_budget_comes_last(seed):
    """Batches of buckets come in any order, but the last, which may be short."""
    costs = [1] * 10
    data = af.Data(
        torch.arange(10),
        global_batch_size=af.token_budget(costs, limit=4),
        order=af.orders.bucketed(costs, window=10),
    )
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


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    batch_size=st.integers(1, 6),
    window=st.integers(1, 30),
    seed=st.integers(0, 9),
)
@example(lengths=[9, 1, 8, 2, 7, 3, 6], batch_size=3, window=7, seed=0)
def test_batches_of_a_window_are_neighbours_in_length(
    lengths, batch_size, window, seed
):
    """Put in order, the batches of a window are its sorted lengths, cut evenly."""
    data = af.Data(
        torch.arange(len(lengths)),
        global_batch_size=batch_size,
        order=af.orders.bucketed(lengths, window=window),
    )
    state = linear_state(data=data, seed=seed)
    batches = [
        sorted(lengths[i] for i in batch.indices.tolist())
        for batch in af.batches(state, until_epoch=1)
    ]
    assert sorted(chain(*batches)) == sorted(lengths)
    in_window = -(-window // batch_size)
    for start in range(0, len(batches), in_window):
        found = batches[start : start + in_window]
        assert {len(each) for each in found[:-1]} <= {batch_size}
        whole = [each for each in found if len(each) == batch_size]
        rest = [each for each in found if len(each) < batch_size]
        flat = [*chain(*sorted(whole), *rest)]
        assert flat == sorted(flat)
