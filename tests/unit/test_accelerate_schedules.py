# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example scripts that have a scheduler, ported, take the same rates."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import accelfn as af
from accelfn.testing import quantities
from tests.states import linear_state
from tests.unit.accelerate_schedulers import SCRIPTS
from tests.waiting import HANGS


@pytest.fixture(scope="module")
def accelerates() -> dict[str, Any]:
    """Return what Accelerate itself sets at each update, by script."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.accelerate_schedulers"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow(together=True)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ported_script_takes_the_same_rates(script, accelerates):
    """A1, A2: on one process its scheduler is ported as it is: rates and betas, bitwise."""
    optimizer, scheduler, _ = SCRIPTS[script]
    state = linear_state(
        2, optimizer=optimizer, schedule=af.schedules.from_torch(scheduler)
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for groups in accelerates[script]:
        shown = quantities(state)
        betas = [list(each) for each in shown["hyper"]["betas"]]
        assert groups == [list(each) for each in zip(shown["lr"], betas, strict=True)]
        state, _ = step(state, torch.ones(4, 2))


def test_several_processes_divide_their_steps():
    """On W processes Accelerate steps W times an update; steps divided by W are that line."""
    _, whole, _ = SCRIPTS["by_feature/fsdp_with_peak_mem_tracking"]

    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=2e-5)
    scheduler, expected = whole(optimizer), []
    for _ in range(15):
        expected.append(optimizer.param_groups[0]["lr"])
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    divided = {name: number // 2 for name, number in whole.keywords.items()}
    state = linear_state(
        2,
        optimizer=partial(torch.optim.AdamW, lr=2e-5),
        schedule=af.schedules.from_torch(partial(whole.func, **divided)),
    )
    ported = [attrs.evolve(state, step=update).lrs[0] for update in range(15)]
    assert expected == pytest.approx(ported, rel=1e-12)
