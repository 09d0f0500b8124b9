# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a compiled step for three models, on one process, with batches in memory."""

from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator
from device import IS_CPU, alone, there, wait
from figures import Figure
from loops import by_accelerate, by_accelfn, by_hand
from models import MODELS, adamw
from rounds import Loop, compared, timed
from torch import nn

import accelfn as af


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step of each model, compared with a plain PyTorch loop."""
    found: list[Figure] = []
    for name, (model, batches, steps) in MODELS.items():
        loops = contestants(model, batches)
        named = {f"{name}: {who}": loop for who, loop in loops.items()}
        found += compared(timed(named, rounds=rounds, steps=steps, fence=wait))
    return found


def contestants(
    model: Callable[[], nn.Module], batches: Callable
) -> Mapping[str, Loop]:
    """Return the loops to compare, by name."""
    eager = af.TrainState.create(model=model, optimizer=adamw, world=alone())
    compiled = eager.with_setup(af.compile()).copy()
    in_cpp = compiled.with_setup(af.compile(options={"cpp_wrapper": True})).copy()
    accelerator = Accelerator(cpu=IS_CPU, dynamo_backend="inductor")
    return {
        "by hand": by_hand(there(model), batches),
        "accelfn": by_accelfn(eager, batches),
        "accelfn, compile()": by_accelfn(compiled, batches),
        "accelfn, compile(), cpp_wrapper": by_accelfn(in_cpp, batches),
        "torch.compile by hand": by_hand(torch.compile(there(model)), batches),
        "Accelerate, inductor": by_accelerate(accelerator, batches, model),
    }
