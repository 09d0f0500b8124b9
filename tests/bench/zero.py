# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step with DeepSpeed's ZeRO, on two processes."""

import os
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm.torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from device import DEVICE, computing
from figures import Figure
from fsdp import Decoder, adamw, together
from models import Source, in_turn, loss_fn
from rounds import Loop, compared, timed
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af

STAGES = 1, 2, 3


def settings(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's settings, without clipping."""
    # Without this, DeepSpeed compiles C++ code. By sys.modules, because the attribute
    # `deepspeed.comm.torch` is the package torch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.utils.logger.setLevel("ERROR")
    return {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": sys.maxsize,
    }


def by_hand(stage: int, make: Callable[[], nn.Module], batches: Source) -> Loop:
    """Return a loop as in DeepSpeed's tutorial."""
    model, config = make(), settings(stage)
    optimizer = adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            loss = cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()

    return loop


def by_accelerate(stage: int, make: Callable[[], nn.Module], batches: Source) -> Loop:
    """Return a loop as in Accelerate's tutorial for DeepSpeed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator, model = Accelerator(deepspeed_plugin=plugin), make()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def by_accelfn(
    stage: int, make: Callable[[], nn.Module], batches: Source, world: af.World
) -> Loop:
    """Return a loop that trains with accelfn."""
    state = af.TrainState.create(
        model=make, optimizer=adamw, setup=af.wrap_deepspeed(stage), world=world
    )
    step = af.make_step(loss_fn)

    def loop(steps: int) -> None:
        nonlocal state
        for batch in batches(steps):
            state, _ = step(state, batch)

    return loop


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step at each stage; ranks run the same blocks in the same order."""
    with af.World.from_env(device=DEVICE) as world:
        batches, found = in_turn(count=8, seed=world.rank), list[Figure]()
        for stage in STAGES:
            loops = {
                f"stage {stage}, by hand": by_hand(stage, Decoder, batches),
                f"stage {stage}, Accelerate": by_accelerate(stage, Decoder, batches),
                f"stage {stage}, accelfn": by_accelfn(stage, Decoder, batches, world),
            }
            clock = computing()
            taken = timed(loops, rounds=rounds, steps=10, fence=together, clock=clock)
            found += compared(taken)
        return found
