# SPDX-License-Identifier: Apache-2.0
"""Test how often a step calls or returns from one file of the package to another.

If a step crosses fewer files, its code is easier to read. Calls and returns both count.
"""

import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af

HOUSE = str(Path(af.__file__).parent)
STEADY = 4
FRONT_PAGE = af.chain(
    af.shard_data(),
    af.wrap_ddp(),
    af.autocast("bf16"),
    af.accumulate(num_micro_batches=2),
    af.clip_grad_norm(1.0),
)


def _inside(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the package, from one outwards."""
    while frame is not None and not frame.f_code.co_filename.startswith(HOUSE):
        frame = frame.f_back
    return frame


def moves(setup: Any) -> int:
    """Return how often a step that has nothing to build any more goes from file to file."""
    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data(torch.randn(64, 4), global_batch_size=8),
        setup=setup,
        world=af.World.single(device="cpu"),
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            caller = _inside(frame.f_back)
            if caller and caller.f_code.co_filename != frame.f_code.co_filename:
                count += 2

    for number, batch in enumerate(af.batches(state)):
        if number < STEADY:
            state, _ = step(state, batch)
            continue
        before = sys.getprofile()
        sys.setprofile(see)
        try:
            step(state, batch)
        finally:
            sys.setprofile(before)
        return count
    pytest.fail("the data ended before the step was steady")


@pytest.mark.parametrize(
    ("setup", "most"),
    [(af.chain(), 80), (FRONT_PAGE, 170)],
    ids=["plain", "front page"],
)
def test_a_steady_step_is_a_short_road(setup, most):
    assert moves(setup) <= most


def test_a_detour_is_counted():
    """The count would see a longer road: a transform of the package's own adds to it."""
    assert moves(af.ema(0.5)) > moves(af.chain()) + 4
