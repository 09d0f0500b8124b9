# SPDX-License-Identifier: Apache-2.0
"""Training on real ranks: branches of a model, and metrics of other names."""

from functools import partial
from math import prod

import attrs
import pytest
import torch

import accelfn as af
from tests.laws.test_branches import HSDP, Branching
from tests.processes import RankError, run_ranks
from tests.ranks.programs import train
from tests.strategies import Run, differences

pytestmark = pytest.mark.ranks(2)


def test_unused_parameters_are_told():
    """Parameters that DDP would not reduce are named, with the option for them."""
    ddp = af.chain(af.shard_data(), af.wrap_ddp())
    run = Run(kind="unused", setup=ddp, dyadic=False)
    said = "(?s)UnusedParametersError.*unused.*find_unused"
    with pytest.raises(RankError, match=said):
        run_ranks(2, partial(train, run=run))


# branches

OPTIONS = {"find_unused_parameters": True, "reshard_after_forward": True}
PARTS = Branching(
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
COPIES = attrs.evolve(PARTS, axes=HSDP, units="nested")


def branched(world: af.World, run: Branching) -> list[dict[str, torch.Tensor]]:
    """Train in a world whose ranks compare their calls, and in one whose ranks do not."""
    asking = attrs.evolve(world, group=world.connection, checked=True)
    return [run(world, []), run(asking, [])]


@pytest.mark.parametrize("run", [PARTS, COPIES], ids=["parts", "copies of parts"])
def test_processes_run_other_units(run):
    """A training and an evaluation by Gloo, whose parts of unequal units would not fit."""
    alone = run(af.World.single(device="cpu"), [])
    for worlds in run_ranks(prod(run.axes.values()), branched, run, axes=run.axes):
        for found in worlds:
            assert differences(alone, found, within=1e-12) == []


def means(world: af.World, names: list[list[str]]) -> str:
    """Return what a rank is told of the means of its own names, each of which is 1."""
    metrics = af.Metrics(dict.fromkeys(names[world.rank], (2.0, 2.0)))
    try:
        return repr(metrics.all_reduce_mean(world))
    except af.errors.CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize("more", [1, 4, 5, 9])
def test_metrics_of_fewer_names_are_told(more):
    """Gloo would abort the rank that gets more than it expects; as many names are added up."""
    many = [f"class {number}" for number in range(1 + more)]
    for text in run_ranks(2, means, [many[:1], many]):
        assert "the ranks have metrics with different names" in text
        assert '\n  rank 0: ["class 0"]\n  rank 1: ["class 0", "class 1"' in text
    assert run_ranks(2, means, [many, many]) == [repr(dict.fromkeys(many, 1.0))] * 2
