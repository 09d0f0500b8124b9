# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step for three models, on one process, with batches in memory."""

from accelerate import Accelerator
from device import DEVICE, IS_CPU, alone, there, wait
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelerate, by_accelfn, by_fabric, by_hand
from models import MODELS, adamw
from rounds import compared, timed

import accelfn as af


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step of each model, compared with a plain PyTorch loop."""
    found: list[Figure] = []
    fabric = Fabric(accelerator=DEVICE.type, devices=1)
    for name, (model, batches, steps) in MODELS.items():
        state = af.TrainState.create(model=model, optimizer=adamw, world=alone())
        loops = {
            "by hand": by_hand(there(model), batches),
            "accelfn": by_accelfn(state, batches),
            "Accelerate": by_accelerate(Accelerator(cpu=IS_CPU), batches, model),
            "Lightning Fabric": by_fabric(fabric, batches, model),
        }
        named = {f"{name}: {who}": loop for who, loop in loops.items()}
        found += compared(timed(named, rounds=rounds, steps=steps, fence=wait))
    return found
