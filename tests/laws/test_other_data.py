# SPDX-License-Identifier: Apache-2.0
"""States with other data, another seed or another name."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.states import linear_state

N = 12
X = torch.arange(float(N)).reshape(N, 1)
SLOW = partial(torch.optim.SGD, lr=1e-4)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss that draws."""
    return (model(rows) * torch.rand(1)).square().mean()


def create(world: af.World | None = None, seed: int = 0) -> af.TrainState:
    """Return a state with shuffled data."""
    data = af.Data(X, global_batch_size=2, shuffle=True)
    return linear_state(data=data, setup=DDP, optimizer=SLOW, world=world, seed=seed)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), ranks=st.integers(1, 3)
)
def test_each_sample_is_read_once_while_batch_sizes_change(sizes, ranks):
    """A batch size that changes in mid-epoch leaves out no sample, and repeats none."""

    def train(world: af.World) -> list[float]:
        state, seen = create(world), list[float]()
        step = af.make_step(loss_of)
        for size in [*sizes, N]:
            if state.cursor.epoch:
                break
            data = attrs.evolve(state.data, global_batch_size=size)
            state = state.with_data(data)
            for batch in af.batches(state, until_epoch=1):
                rows = af.all_gather_valid(batch.value, batch, world)
                seen += rows.flatten().tolist()
                state, _ = step(state, batch)
                break
        return seen

    for seen in simulate(ranks, train):
        assert sorted(seen) == X.flatten().tolist()


def test_other_data_of_another_length_begin_the_epoch_anew():
    """The epoch stays, and the place in it is the beginning."""
    state = af.seek(create(), 4, epoch=3)
    shorter = state.with_data(af.Data(X[:6], global_batch_size=2))
    assert (shorter.cursor.epoch, shorter.cursor.samples) == (3, 0)
    assert state.with_data(None).data is None


@given(seed=st.integers(0, 100))
def test_a_copy_with_another_seed_draws_as_a_state_of_that_seed(seed: int) -> None:
    """From the same tensors on, it is bitwise the state that had the seed from the beginning."""
    member = create().copy().with_seed(seed)
    other = create(seed=seed).with_params(member.params)
    step = af.make_step(loss_of)
    for ours, theirs in zip(
        af.batches(member, until_epoch=1), af.batches(other, until_epoch=1), strict=True
    ):
        assert torch.equal(ours.value, theirs.value)
        member, _ = step(member, ours)
        other, _ = step(other, theirs)
    assert torch.equal(member.params["weight"], other.params["weight"])


def test_a_copy_with_another_name_draws_other_numbers():
    """Two states with one seed differ by their names."""
    state = create()
    with af.fork_rng(state, "noise"):
        first = torch.rand(3)
    with af.fork_rng(state.with_name("member-1"), "noise"):
        second = torch.rand(3)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda state: state.with_seed(1.5), r"state\.with_seed\(seed=1.5\)"),
        (lambda state: state.with_name(3), r"name=3"),
        (lambda state: state.with_data([1]), r"data=list.*af\.Data"),
    ],
    ids=["seed", "name", "data"],
)
def test_what_is_no_seed_name_or_data_is_rejected(call, words):
    """The error names the argument."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        call(create())


def test_a_batch_of_another_size_is_rejected():
    """With other data in the midst of a loop, the loop's batches are the old ones."""
    state, compute = create(), af.value_and_grad(loss_of)
    batches = iter(af.batches(state))
    _, grads = compute(state, next(batches))
    state = af.apply_grads(state, grads)
    state = state.with_data(attrs.evolve(state.data, global_batch_size=4))
    _, grads = compute(state, next(iter(af.batches(state))))
    old = next(batches)
    for into in (None, grads):
        with pytest.raises(
            af.errors.BatchError, match=r"loop over af\.batches\(state\)"
        ):
            compute(state, old, into=into)
