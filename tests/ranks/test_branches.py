# SPDX-License-Identifier: Apache-2.0
"""Units that real processes run in other orders, or not: nothing hangs, and numbers are right."""

from math import prod

import attrs
import pytest
import torch

import accelfn as af
from tests.laws.branching_models import HSDP, Branching
from tests.processes import run_ranks
from tests.strategies import differences

pytestmark = pytest.mark.ranks(2)

OPTIONS = {"find_unused_parameters": True, "reshard_after_forward": True}
RUN = Branching(
    stages=(("experts", (1, 3, 2)), ("tower", (2,)), ("experts", (2, 2))),
    n=12,
    batch_size=8,
    wrap="wrap_fsdp",
    options={**OPTIONS, "keep_grads": "whole"},
    units="lists",
    axes={"dp_shard": 2},
    micro=2,
    recomputes=True,
    asks=True,
    seed=3,
)
COPIES = attrs.evolve(RUN, axes=HSDP, units="nested")


def trained(world: af.World, run: Branching) -> list[dict[str, torch.Tensor]]:
    """Train in a world whose ranks compare their calls, and in one whose ranks do not."""
    asking = attrs.evolve(world, group=world.connection, checked=True)
    return [run(world, []), run(asking, [])]


@pytest.mark.parametrize("run", [RUN, COPIES], ids=["parts", "copies of parts"])
def test_processes_run_other_units(run):
    """A training and an evaluation by Gloo, whose parts of unequal units would not fit."""
    alone = run(af.World.single(device="cpu"), [])
    for worlds in run_ranks(prod(run.axes.values()), trained, run, axes=run.axes):
        for found in worlds:
            assert differences(alone, found, within=1e-12) == []
