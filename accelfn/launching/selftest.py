# SPDX-License-Identifier: Apache-2.0
"""The tests that `accelfn test` runs on every rank: world, collectives, step, checkpoint."""

import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import accelfn as af
from accelfn.errors import LawError
from accelfn.plug import devices

_TIMEOUT = 30.0
_LONGEST = 110
"""Seconds after which the operating system ends a rank, even if it waits."""


def main(num_ranks: int) -> None:
    """Test this machine, and print one line per successful test."""
    signal.alarm(_LONGEST)
    start = time.monotonic()
    # use the CPU if there are fewer devices than ranks, because ranks cannot share a device
    device = "cpu" if devices.count() < num_ranks else None
    with af.World.from_env(timeout=_TIMEOUT, device=device) as world:
        _show("world", f"{world.size} ranks on {world.device.type}", world, start)
        for test in (_collectives, _training, _checkpoint):
            start = time.monotonic()
            _show(test.__name__.removeprefix("_"), test(world), world, start)


def _show(name: str, result: str, world: af.World, start: float) -> None:
    seconds = time.monotonic() - start
    af.print_once(world, f"{name:12}{result} ({seconds:.1f} s)")


def _check(holds: bool, message: str) -> None:  # noqa: FBT001 - like an assert statement
    if not holds:
        raise LawError(message)


def _collectives(world: af.World) -> str:
    ranks = torch.arange(world.size, device=world.device)
    total = int(af.all_reduce(ranks[world.rank], world, "sum"))
    _check(total == int(ranks.sum()), "all_reduce does not return the ranks' sum.")
    objects = af.all_gather_objects({"rank": world.rank}, world)
    _check(
        objects == [{"rank": int(rank)} for rank in ranks],
        "all_gather_objects does not return the ranks' objects in rank order.",
    )
    return "all_reduce, all_gather_objects and barrier work"


def _state(world: af.World) -> af.TrainState:
    rows = torch.linspace(-1, 1, 64).reshape(32, 2)
    return af.TrainState.create(
        model=partial(nn.Linear, 2, 1),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        data=af.Data(rows, global_batch_size=8, shuffle=True),
        world=world,
    )


def _loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def _training(world: af.World) -> str:
    state = _state(world)
    before = {name: value.clone() for name, value in state.params.items()}
    batch = next(iter(af.batches(state)))
    state, _ = af.make_step(_loss_fn)(state, batch)
    af.assert_replicas_agree(state)
    trains = any(not torch.equal(state.params[n], before[n]) for n in before)
    _check(trains, "a step with DistributedDataParallel changed no parameter.")
    return "after a step with DistributedDataParallel, all ranks have the same state"


def _checkpoint(world: af.World) -> str:
    state = _state(world)
    step = af.make_step(_loss_fn)
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
    with tempfile.TemporaryDirectory(prefix="accelfn-test-") as path:
        folder = Path(af.broadcast_object(path, world), "checkpoint")
        af.save(state, folder)
        copy = af.load(_state(world), folder)
        same = all(torch.equal(copy.params[n], p) for n, p in state.params.items())
        _check(
            af.all_ranks(same and copy.step == state.step, world),
            "the loaded state differs from the saved state.",
        )
        af.barrier(world)  # wait for all ranks before rank 0 deletes the folder
    return "the loaded state is bitwise equal to the saved state"


if __name__ == "__main__":
    main(int(sys.argv[1]))
