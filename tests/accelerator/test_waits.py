# SPDX-License-Identifier: Apache-2.0
"""Where the host waits for the device: in no steady step, and else where it is said."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator import tested_device
from tests.catalog import CATALOG

pytestmark = pytest.mark.gpu
INPUTS = torch.linspace(-1, 1, 256).view(64, 4)
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)
ASKS = {
    "plateau": "told of an evaluation",
    "compile": "compilers know no such device",
    "schedule_free": "needs an optimizer of its own",
}
"""Rows of the catalogue that are not trained here, and why."""
ROWS = [each.transform for each in CATALOG if each.name not in ASKS]
FP16 = (af.autocast("fp16", init_scale=4.0),)
SETUPS = [
    *((row,) for row in ROWS),
    FP16,
    (af.autocast("fp16", init_scale=4.0), af.skip_nonfinite()),
    (af.autocast("bf16"), af.skip_nonfinite(), af.clip_grad_norm(1.0)),
]


def net() -> nn.Module:
    """Return a model with statistics, which a skipped update must not change."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def create(*setup: Any, world: af.World | None = None) -> af.TrainState:
    return af.TrainState.create(
        model=net,
        optimizer=ADAMW,
        data=af.Data(INPUTS, global_batch_size=16),
        setup=af.chain(*setup),
        world=world or af.World.single(),
    )


@pytest.mark.parametrize("setup", SETUPS, ids=repr)
def test_no_steady_step_waits(setup):
    """Twenty steps on batches of `af.batches`, under each transform, with batch statistics."""
    try:
        state, step = create(*setup), af.make_step(mean_square)
    except (af.errors.CompositionError, af.errors.ArgumentError) as error:
        pytest.skip(str(error).partition("\n")[0])
    batches = iter(af.batches(state, until_epoch=None))
    for _ in range(3):
        state, _ = step(state, next(batches))
    with tested_device.waits() as found:
        for _ in range(20):
            state, _ = step(state, next(batches))
    assert found == []
    assert state.num_tried == 23


@pytest.mark.skipif(not tested_device.IS_FAKE, reason="hardware tells of no copies")
def test_ranks_of_an_evaluation_send_without_waiting():
    """The host's numbers go to the device in one copy; what all have is waited for once."""

    def run(world: af.World) -> tuple[list[str], float]:
        state = create(af.shard_data(), af.wrap_ddp(), world=world)
        af.evaluate(state, state.data, mean_square)
        with tested_device.waits() as found:
            mean = af.evaluate(state, state.data, mean_square)
        return found, mean["mean_square"]

    for found, mean in simulate(2, run, device=tested_device.NAME):
        assert not [each for each in found if "from cpu to" in each]
        assert mean > 0


@pytest.mark.filterwarnings("ignore:step.state, batch. gets values")
def test_what_is_too_much_in_a_row_is_found_without_waiting_for_it():
    """The device counts, and is asked every 100 updates; none of them changed anything."""
    state, step = (
        create(af.skip_nonfinite(max_consecutive=3)),
        af.make_step(mean_square),
    )
    good = INPUTS[:16].to(state.world.device)
    for _ in range(2):
        state, _ = step(state, good)
    before = {name: param.clone() for name, param in state.params.items()}
    buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
    with tested_device.waits() as found:
        for _ in range(97):
            state, metrics = step(state, good * torch.inf)
    assert found == []
    assert float(metrics["skipped"]) == 1.0
    state, _ = step(state, good * torch.inf)
    assert (state.step, state.num_skipped) == (2, 98)
    with pytest.raises(af.errors.NonFiniteGradsError, match="4 updates in a row"):
        step(state, good)
    assert all(torch.equal(before[name], p) for name, p in state.params.items())
    assert all(torch.equal(buffers[name], b) for name, b in state.buffers.items())


def test_an_asynchronous_save_waits_once_a_device(tmp_path):
    """Tensors are copied behind one another; then their arrival is waited for."""
    state = create()
    with (
        tested_device.waits() as found,
        af.CheckpointStore(tmp_path, async_=True) as store,
    ):
        store.save(state)
    assert not [each for each in found if "store.py" in each], found


def test_what_waits_is_named_with_its_place():
    """The file and line of accelfn, or that it was outside."""
    there = torch.ones(2, device=af.World.single().device)
    with tested_device.waits() as found:
        there.sum().item()
        there.cpu()
    assert [each.partition(":")[0] for each in found] == ["outside", "outside"]
    with tested_device.waits() as found:
        af.evaluate(create(), af.Data(INPUTS, global_batch_size=32), mean_square)
    assert all(":" in each for each in found)
    assert any(each.startswith("collectives/packed.py:") for each in found)
