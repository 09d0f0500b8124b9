# SPDX-License-Identifier: Apache-2.0
"""Benchmark of DiLoCo that sends fragments while ranks compute, over a slow link."""

from functools import partial

import torch.distributed as dist
from figures import Figure
from loops import by_accelfn
from models import Transformer, adamw, in_turn
from rounds import compared, timed

import accelfn as af

SYNC_EVERY = 100
"""The value of Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"."""
SETUPS = {
    "without communication": af.local_sgd(sync_every=10**6),
    "diloco": af.diloco(sync_every=SYNC_EVERY, bits=8),
    "diloco in fragments": af.diloco(sync_every=SYNC_EVERY, bits=8, fragments=4),
    "diloco in fragments, with delay": af.diloco(
        sync_every=SYNC_EVERY, bits=8, fragments=4, delay=20
    ),
}


def measure(rounds: int) -> list[Figure]:
    """Measure the time of an update; both ranks run the same blocks in the same order."""
    with af.World.from_env() as world:
        batches = in_turn(seed=world.rank)
        create = partial(
            af.TrainState.create, model=Transformer, optimizer=adamw, world=world
        )
        loops = {
            name: by_accelfn(create(setup=setup), batches)
            for name, setup in SETUPS.items()
        }
        # long blocks: an exchange that is still running delays the barrier after a block
        steps = 4 * SYNC_EVERY
        taken = timed(loops, rounds=rounds, steps=steps, fence=dist.barrier)
        return compared(taken)
