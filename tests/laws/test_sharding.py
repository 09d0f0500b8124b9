# SPDX-License-Identifier: Apache-2.0
"""Shares are disjoint, cover all, differ by at most one, and keep one global order."""

import attrs
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.internals import EvenCut, key, shuffle_positions

REMAINDERS = st.sampled_from(["short", "pad", "drop"])


def state_of(data: af.Data, *, seed: int, setup: object) -> af.TrainState:
    """Return a state that reads these data in a world of one."""
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
        data=data,
        setup=setup,
        seed=seed,
        world=af.World.single(device="cpu"),
    )


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    remainder=REMAINDERS,
    size=st.integers(1, 8),
    k=st.integers(1, 4),
)
def test_parts_partition_every_batch(n, batch_size, remainder, size, k):
    """Concatenated in rank order the parts are the batch; sizes differ by at most one."""
    plans = [
        af.typing.Plan(rank=r, num_shares=size, num_micro_batches=k)
        for r in range(size)
    ]
    cut = EvenCut(n, batch_size, remainder)
    batches = list(cut.spans(0))
    assert len(batches) == cut.num_batches(0)
    seen: list[int] = []
    for batch in batches:
        parts = [part for plan in plans for part in plan.parts(batch)]
        positions = [i for low, high in parts for i in range(low, high)]
        assert positions == list(range(*batch))
        sizes = [high - low for low, high in parts]
        assert max(sizes) - min(sizes) <= 1
        seen += positions
    used = {"short": n, "drop": n // batch_size * batch_size}.get(remainder, len(seen))
    assert seen == list(range(used))
    if remainder == "pad":
        assert len(seen) == len(batches) * batch_size >= n


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    remainder=REMAINDERS,
    micro=st.integers(1, 5),
    size=st.integers(1, 8),
)
def test_micro_batch_size_bounds_parts(n, batch_size, remainder, micro, size):
    """With micro_batch_size no part is larger, and every rank has as many parts."""
    made = []
    for rank in range(size):
        plan = af.typing.Plan(rank=rank, num_shares=size, micro_batch_size=micro)
        for batch in EvenCut(n, batch_size, remainder).spans(0):
            parts = plan.parts(batch)
            assert all(high - low <= micro for low, high in parts)
            made.append((batch, len(parts)))
    assert len(dict(made)) == len(set(made))


@given(
    n=st.one_of(st.integers(1, 300), st.integers(2, 13).map(lambda k: 2**k + 1)),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    """Every index comes once, and one computed alone is the one computed in sequence."""
    order = shuffle_positions(np.arange(n), n=n, key=key(seed, "order", epoch))
    assert sorted(order.tolist()) == list(range(n))
    for i in {0, n // 2, n - 1}:
        one = shuffle_positions(np.array([i]), n=n, key=key(seed, "order", epoch))
        assert one.tolist() == [order[i]]


@given(seed=st.integers(0, 1000))
def test_order_changes_with_epoch_and_seed(seed: int) -> None:
    """Two epochs, and two seeds, have different orders."""
    data = af.Data(list(range(50)), global_batch_size=50, shuffle=True)
    orders = set()
    for each in (seed, seed + 1, seed + 2**32):
        state = state_of(data, seed=each, setup=None)
        for epoch in (0, 1, 2**32):
            at = attrs.evolve(state, cursor=af.typing.Cursor(epoch))
            orders.add(tuple(next(iter(af.batches(at))).indices.tolist()))
    assert len(orders) == 9


def test_shuffle_is_even():
    """Over many keys each index comes to each position about equally often (chi-square)."""
    n, draws = 6, 3000
    table = np.zeros((n, n))
    for seed in range(draws):
        table[np.arange(n), shuffle_positions(np.arange(n), n=n, key=key(seed))] += 1
    expected = draws / n
    chi_square = ((table - expected) ** 2 / expected).sum()
    assert chi_square < 60  # 25 degrees of freedom: P(> 60) is 1e-4, and keys are fixed


def test_order_needs_no_memory_of_the_length_of_the_data():
    """An index near the end of 10**12 samples is computed alone."""
    n = 10**12
    found = shuffle_positions(np.arange(n - 1000, n), n=n, key=key(1))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < n


def read_all(
    data: af.Data, *, seed: int, setup: object, cut: int | None = None
) -> list[int]:
    """Return every sample in order, in one process, perhaps cut and resumed."""
    state = state_of(data, seed=seed, setup=setup)
    seen: list[int] = []
    for i, batch in enumerate(af.batches(state, until_epoch=2)):
        if i == cut:
            break
        seen += batch.indices[~batch.filler].tolist()
        cursor = batch.cursor
    if cut is None or cut == 0:
        return seen
    resumed = attrs.evolve(state, cursor=cursor)
    assert len(af.batches(resumed, until_epoch=2)) + cut == len(
        af.batches(state, until_epoch=2)
    )
    for batch in af.batches(resumed, until_epoch=2):
        seen += batch.indices[~batch.filler].tolist()
    return seen


@given(
    n=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    remainder=REMAINDERS,
    cut=st.integers(1, 8),
    parts=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_resuming_at_any_batch_gives_the_very_rest(
    n, batch_size, remainder, cut, parts, seed
):
    """A cut and resumed run sees the samples of an uninterrupted one, in order."""
    if remainder == "drop":
        n = max(n, batch_size)
    data = af.Data(
        list(range(n)), global_batch_size=batch_size, shuffle=True, remainder=remainder
    )
    setup = af.accumulate(num_micro_batches=parts)
    whole = read_all(data, seed=seed, setup=setup)
    updates = 2 * data.updates_per_epoch
    cut_and_resumed = read_all(data, seed=seed, setup=setup, cut=min(cut, updates))
    assert whole == cut_and_resumed
    used = n if remainder != "drop" else n // batch_size * batch_size
    if remainder != "drop":
        assert sorted(whole) == sorted([*range(n)] * 2)
    assert len(whole) == 2 * used
