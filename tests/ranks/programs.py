# SPDX-License-Identifier: Apache-2.0
"""Programs that the rank processes of the tests run; each takes a world and plain data."""

from typing import Any

import attrs
import torch

import accelfn as af
from tests.strategies import LOSSES, Run, tensors

Found = dict[str, torch.Tensor]


def train(world: af.World, run: Run) -> tuple[list[Found], list[dict[str, float]]]:
    """Train; return the states after every update, and the metrics' means over ranks."""
    state = run.state(world)
    states, means = [], []
    for _ in range(run.updates):
        state, metrics = run.train(state, 1)
        states.append(tensors(state))
        means.append(metrics[0].all_reduce_mean(world))
    return states, means


def instance_by_rank(world: af.World) -> None:
    """Build a model that differs by rank, as an unseeded instance does."""
    torch.manual_seed(world.rank)
    net = torch.nn.Linear(2, 2)
    state = af.TrainState.create(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        setup=af.wrap_ddp(),
        world=world,
    )
    af.prepare_engine(state)


def shape_by_rank(world: af.World) -> None:
    """Build a model whose shape differs by rank."""
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(2, 2 + world.rank),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        setup=af.wrap_ddp(),
        world=world,
    )
    af.prepare_engine(state)


def unreduced(world: af.World, run: Run) -> None:
    """Take a step in a setup that reduces nothing."""
    run.train(attrs.evolve(run, setup=af.chain(af.shard_data())).state(world), 1)


def add_to_reduced(world: af.World, run: Run) -> None:
    """Add to gradients that are reduced already."""
    state = run.state(world)
    compute = af.value_and_grad(LOSSES[run.loss])
    (batch,) = [b for b, _ in zip(af.batches(state), range(1), strict=False)]
    _, grads = compute(state, batch)
    compute(state, batch, into=grads)


def fail_in_forward(world: af.World, run: Run) -> tuple[str, Found, Found]:
    """Raise in the loss on all ranks; return the state before, and after a good step."""
    state = run.state(world)
    before = tensors(state)
    armed = [True]

    def loss(net: torch.nn.Module, batch: Any) -> Any:
        value = LOSSES[run.loss](net, batch)
        if armed[0]:
            raise KeyError("boom")
        return value

    step = af.make_step(loss)
    (batch,) = [b for b, _ in zip(af.batches(state), range(1), strict=False)]
    try:
        step(state, batch)
    except KeyError as error:
        said = str(error)
    same = tensors(state)
    assert before.keys() == same.keys()
    assert all(torch.equal(before[k], same[k]) for k in before)
    armed[0] = False
    state, _ = step(state, batch)
    return said, before, tensors(state)


def under_a_profiler(world: af.World, run: Run) -> tuple[list[str], Any, Any]:
    """Return what a profiler sees of a run, and the run's tensors without one and with it."""
    plain, _ = run.train(run.state(world))
    with torch.profiler.profile() as profile:
        watched, _ = run.train(run.state(world))
    seen = [event.name for event in profile.events()]
    return seen, tensors(plain), tensors(watched)
