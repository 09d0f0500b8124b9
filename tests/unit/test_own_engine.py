# SPDX-License-Identifier: Apache-2.0
"""The engine of the page on writing engines, of public names, trains as one process does."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import run_processes, simulate

PAGE = Path(__file__).parents[2] / "docs/how-to/write-an-engine.md"
(CODE,) = re.findall(
    r"```python\n(from accelfn\.plug.*?)```", PAGE.read_text(), re.DOTALL
)
WRITTEN = {"__name__": __name__, "af": af, "partial": partial, "torch": torch}
exec(CODE, WRITTEN)  # noqa: S102 - as a user would write it
INPUTS = torch.linspace(-1, 1, 28).reshape(14, 2)


def loss_fn(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def train(world):
    accumulate = af.accumulate(num_micro_batches=2)
    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        data=af.Data((INPUTS, INPUTS.sin()), global_batch_size=5, shuffle=True),
        setup=af.chain(af.shard_data(), WRITTEN["wrap_flat"](), accumulate),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=2):
        state, _ = step(state, batch)
    return af.full_params(state)


@pytest.mark.parametrize("run", [simulate, run_processes])
def test_ranks_train_as_one_process_does(run):
    """Simulated ranks and real processes, with shares and micro-batches of any sizes."""
    alone = train(af.World.single(device="cpu"))
    for size in (2, 3) if run is simulate else (2,):
        for params in run(size, train):
            torch.testing.assert_close(params, alone, rtol=1e-5, atol=1e-6)
