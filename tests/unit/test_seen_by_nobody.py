# SPDX-License-Identifier: Apache-2.0
"""Corners in which bugs that strangers planted were found by no test."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import accelfn as af
from accelfn.testing import assert_states_equal, simulate
from tests.internals import few_bits, place
from tests.states import linear_state


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0.0)])
def test_a_mean_of_no_weight_is_the_plain_one(weight):
    """Whether the weight is a number or a tensor: nobody divides by 0."""

    def fn(world):
        values = torch.tensor([1.0, 3.0]) + world.rank
        return af.reduce(values, world, "mean", weight=weight).tolist()

    assert list(simulate(2, fn)) == [[1.5, 3.5]] * 2


def test_rows_of_a_mix_stand_where_their_indices_say():
    """Of tensor datasets, too, which are read in one piece each."""
    first, second = torch.arange(30.0), torch.arange(100.0, 120.0)
    rows = torch.cat([first, second])
    data = af.Data.mix(
        [TensorDataset(first), TensorDataset(second)], batch_size=7, shuffle=True
    )
    state = linear_state(data=data)
    for batch in af.batches(state, epochs=1):
        (value,) = batch.value
        there = ~batch.filler
        assert torch.equal(value[there], rows[batch.indices][there])


@pytest.mark.parametrize("options", [{}, {"rtol": 0.1}, {"atol": 1.0}])
def test_nan_is_equal_to_nan_alone(options):
    """Whatever is tolerated."""
    state = linear_state()
    nan = {name: torch.full_like(p, torch.nan) for name, p in state.params.items()}
    broken = state.copy().with_params(nan)
    assert_states_equal(broken, broken.copy(), **options)
    with pytest.raises(AssertionError, match="weight"):
        assert_states_equal(state, broken, **options)


def test_steps_of_one_job_meet_at_ports_of_their_own():
    """Two at a time on one machine would be joined, or in one another's way."""
    ports = {
        place._port_of_job({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)})
        for step in range(20)
    }
    assert len(ports) == 20


def test_views_of_gradients_are_used_up_with_them():
    """An update works in their memory."""
    state = linear_state(2, 2)
    compute = af.value_and_grad(lambda model, batch: model(batch).square().mean())
    _, grads = compute(state, torch.ones(3, 2))
    views = grads.map(lambda each: each.view_as(each))
    af.apply_grads(state.copy(), grads)
    with pytest.raises(af.Error):
        af.apply_grads(state, views)


def test_an_overflow_in_one_rank_s_part_skips_the_update_of_all():
    """Under fp16 each rank sees its own rows of gradients."""

    def loss_fn(model, batch):
        return (model(batch) * torch.tensor([1.0, 3e38, 1.0, 1.0]) ** 2).sum()

    def fn(world):
        state = af.TrainState.create(
            model=lambda: nn.Linear(2, 4),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            setup=af.chain(
                af.shard_data(), af.wrap_fsdp(), af.autocast("fp16", init_scale=2.0)
            ),
            data=af.Data(torch.ones(4, 2), batch_size=4),
            world=world,
        )
        batch = next(iter(af.batches(state)))
        state, _ = af.make_step(loss_fn)(state, batch)
        return state.step, state.num_skipped

    assert list(simulate(2, fn)) == [(0, 1)] * 2


class Keeps(nn.Module):
    """Has what it was given last in a buffer, and writes to it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("last", torch.zeros(4, 3))

    def forward(self, rows):
        self.last.mul_(2.0)
        self.last = rows
        return self.linear(rows)


def test_a_batch_that_a_model_keeps_is_not_written_to():
    """A buffer that was assigned in a pass is no memory of the caller's in the next."""
    state = af.TrainState.create(
        model=Keeps, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    step, first = af.make_step(lambda net, rows: net(rows).mean()), torch.ones(4, 3)
    for rows in (first, torch.zeros(4, 3), torch.zeros(4, 3)):
        state, _ = step(state, rows)
    assert torch.equal(first, torch.ones(4, 3))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_numbers_beyond_the_exponents_of_a_byte_are_the_nearest_that_there_are(bits):
    """As float64 has them: what is too small is 0, and what is too large the largest."""
    tiny, huge = torch.tensor([[1e-60], [-1e300]], dtype=torch.float64)
    blocks = torch.stack([each.expand(few_bits.BLOCK) for each in (tiny, huge)])
    found = few_bits.dequantize(few_bits.quantize(blocks, bits), bits, torch.float64)
    largest = (2 ** (bits - 1) - 1) * 2.0**127
    assert found.unique(dim=1).flatten().tolist() == [0.0, -largest]
