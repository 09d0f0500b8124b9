# SPDX-License-Identifier: Apache-2.0
"""Train from the last checkpoint on; the last rank fails once, in mid-run."""

import sys
from pathlib import Path

import torch

import accelfn as af

failed = Path(sys.argv[1], "failed")
torch.set_num_threads(1)
with af.World.from_env(device="cpu", timeout=60) as world:
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(2, 1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        data=af.Data(torch.linspace(-1, 1, 64).reshape(32, 2), global_batch_size=8),
        world=world,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    with af.CheckpointStore(sys.argv[1], every=2) as store:
        state = store.restore(state)
        sys.stdout.write(f"rank {world.rank} from {state.step}\n")
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
            if store.due(state):
                store.save(state)
                store.wait()
            if state.step == 5 and world.rank == world.size - 1 and not failed.exists():
                failed.touch()
                raise ValueError("out of luck")
    sys.stdout.write(f"done {state.step}\n")
