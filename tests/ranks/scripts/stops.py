# SPDX-License-Identifier: Apache-2.0
"""Train from the last checkpoint until all is done or a signal comes; save, print what there is.

Samples are shuffled and dropped out, in each process as in any other.

stops.py DIRECTORY UPDATES [TIMEOUT] [UNTIL]: stops after so many updates. With UNTIL, waits after
update 6 until that file is there, so that a test can do things then; if UNTIL is "fails", the last
rank fails there, once.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import accelfn as af

directory, updates, timeout, until = *sys.argv[1:], *("60", "")[len(sys.argv) - 3 :]
failed = Path(directory, "failed")
torch.set_num_threads(1)
with af.World.from_env(device="cpu", timeout=60) as world:
    world.connection.set_timeout(float(timeout))  # from here on, once all have met
    rows = torch.linspace(-1, 1, 64).reshape(32, 2)
    state = af.TrainState.create(
        model=lambda: nn.Sequential(
            nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)
        ),
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.autocast("fp16")),
        data=af.Data(rows, global_batch_size=8, shuffle=True),
        world=world,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    with af.stopping(world) as stop, af.CheckpointStore(directory, every=5) as store:
        state = store.restore(state)
        place = f"process {os.getpid()} rank {world.rank} of {world.size}"
        sys.stdout.write(f"{place} from {state.step}\n")
        for batch in af.batches(state, until_epoch=10**6):
            state, _ = step(state, batch)
            asked = stop.requested()
            if asked or store.due(state):
                store.save(state)
            if asked or state.step == int(updates):
                break
            if until == "fails" and state.step == 6:
                store.wait()
                if world.rank == world.size - 1 and not failed.exists():
                    failed.touch()
                    raise ValueError("out of luck")
            elif until and state.step == 6:
                store.wait()
                sys.stdout.write(f"rank {world.rank} waits\n")
                while not Path(until).exists():
                    time.sleep(0.05)
            time.sleep(0.002)
    digest = hashlib.sha256(b"".join(p.detach().numpy() for p in state.params.values()))
    sys.stdout.write(f"done {state.step} {digest.hexdigest()}\n")
