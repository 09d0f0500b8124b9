# SPDX-License-Identifier: Apache-2.0
"""What ranks run whose world changes: real processes and simulated ones."""

from collections.abc import Callable
from pathlib import Path

import accelfn as af
from tests.internals import Restore
from tests.laws.elastic import Training
from tests.strategies import Run, differences, tensors

DIES, COMES_IN = 5, 8
"""The update at which a rank is gone, and the one after which another comes in."""
SETUPS = {
    "ddp": af.wrap_ddp(),
    "local sgd": af.local_sgd(sync_every=2),
    "diloco": af.diloco(sync_every=2, bits=8),
    "fsdp": af.wrap_fsdp(),
}


def training(setup: str) -> Training:
    """Return a training that averages every second update."""
    return Training(setup=SETUPS[setup], every=2, updates=12)


def checkpoints(setup: str, folder: Path) -> tuple[Callable[..., object], Restore]:
    """Return what saves a state, and what restores one; where each rank has all, neither does."""
    store = af.CheckpointStore(folder, async_=False)
    return (store.save if setup == "fsdp" else lambda _: None), store.restore


def moved(world, setup, givers, size, folder) -> list[list[str]]:
    """Return where a state that is moved to some ranks differs from a loaded one."""
    run = Run(
        n=24,
        batch_size=12,
        optimizer="adamw",
        dyadic=False,
        setup=af.chain(af.shard_data(), SETUPS[setup]),
    )
    old, new = world.split(size=givers), world.split(size=size)
    gives = world.rank < givers
    state = run.state(old)
    if gives:
        state, _ = run.train(state, 3)
        af.save(state, f"{folder}/saved")
    af.barrier(world)
    loaded = af.load(run.state(new), f"{folder}/saved")
    among = None if size == world.size else world
    moved = af.with_world(state, new, among=among, newcomer=not gives)
    same = differences(tensors(loaded), tensors(moved))
    ends = [tensors(run.train(each, 2)[0]) for each in (loaded, moved)]
    return [same, differences(*ends)]
