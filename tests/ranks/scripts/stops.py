# SPDX-License-Identifier: Apache-2.0
"""Train until all is done or a signal comes; save, and print what there is."""

import hashlib
import os
import sys
import time

import torch
from torch import nn

import accelfn as af

directory, updates = sys.argv[1], int(sys.argv[2])
with af.World.from_env(device="cpu") as world:
    data = af.Data(torch.linspace(-1, 1, 64).reshape(32, 2), global_batch_size=8)
    state = af.TrainState.create(
        model=lambda: nn.Linear(2, 1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        data=data,
        world=world,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    with af.stopping(world) as stop, af.CheckpointStore(directory, every=5) as store:
        state = store.restore(state)
        sys.stdout.write(f"process {os.getpid()} from {state.step}\n")
        for batch in af.batches(state, until_epoch=10**6):
            state, _ = step(state, batch)
            asked = stop.requested()
            if asked or store.due(state):
                store.save(state)
            if asked or state.step == updates:
                break
            time.sleep(0.002)
    digest = hashlib.sha256(b"".join(p.detach().numpy() for p in state.params.values()))
    sys.stdout.write(f"done {state.step} {digest.hexdigest()}\n")
