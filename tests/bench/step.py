# SPDX-License-Identifier: Apache-2.0
"""A step on batches that are there already, on one process."""

from accelerate import Accelerator
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelerate, by_accelfn, by_fabric, by_hand
from models import adamw, in_turn, mlp
from rounds import compared, timed

import accelfn as af


def measure(rounds: int) -> list[Figure]:
    """Return what a step costs."""
    batches = in_turn()
    state = af.TrainState.create(model=mlp, optimizer=adamw)
    fabric = Fabric(accelerator="cpu", devices=1)
    loops = {
        "by hand": by_hand(mlp(), batches),
        "accelfn": by_accelfn(state, batches),
        "Accelerate": by_accelerate(Accelerator(cpu=True), batches),
        "Lightning Fabric": by_fabric(fabric, batches),
    }
    return compared(timed(loops, rounds=rounds, steps=100))
