# SPDX-License-Identifier: Apache-2.0
"""Benchmark of an epoch on one process; each library loads its own data."""

from accelerate import Accelerator
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelerate, by_fabric, by_hand
from models import adamw, loss_fn, mlp, rows
from rounds import Loop, compared, timed
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

STEPS = 500


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step, including reading its batch."""
    dataset = TensorDataset(*rows(32 * STEPS))
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    accelerator = Accelerator(cpu=True)
    fabric = Fabric(accelerator="cpu", devices=1)
    prepared = accelerator.prepare(loader)
    set_up = fabric.setup_dataloaders(loader)
    loops = {
        "by hand": by_hand(mlp(), lambda _: loader),
        "accelfn": epochs_of_accelfn(dataset),
        "Accelerate": by_accelerate(accelerator, lambda _: prepared),
        "Lightning Fabric": by_fabric(fabric, lambda _: set_up),
    }
    return compared(timed(loops, rounds=rounds, steps=STEPS))


def epochs_of_accelfn(dataset: TensorDataset) -> Loop:
    """Return a loop that trains for the next epoch at each call."""
    data = af.Data(dataset, global_batch_size=32, shuffle=True)
    state = af.TrainState.create(model=mlp, optimizer=adamw, data=data)
    step = af.make_step(loss_fn)

    def loop(_: int) -> None:
        nonlocal state
        for batch in af.batches(state, until_epoch=state.cursor.epoch + 1):
            state, _ = step(state, batch)

    return loop
