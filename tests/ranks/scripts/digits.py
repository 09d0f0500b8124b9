# SPDX-License-Identifier: Apache-2.0
"""Train on the digits from the last checkpoint on, and print a digest of what there is.

digits.py DIRECTORY UPDATES TIMEOUT: stops after so many updates. With UNTIL as a fourth, waits
after its checkpoint of update 5 until that file is there, so that a test can do things then.
"""

import hashlib
import sys
import time
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af

directory, updates, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
until = Path(sys.argv[4]) if len(sys.argv) > 4 else None


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


torch.set_num_threads(1)
images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
with af.World.from_env(device="cpu", timeout=60) as world:
    world.connection.set_timeout(timeout)  # from here on, once all have met
    data = af.Data(((images / 16).float(), labels), global_batch_size=64, shuffle=True)
    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        data=data,
        world=world,
    )
    step = af.make_step(loss_fn)
    with af.CheckpointStore(directory, every=5) as store:
        state = store.restore(state)
        sys.stdout.write(f"rank {world.rank} of {world.size} from {state.step}\n")
        for batch in af.batches(state, until_epoch=100):
            state, _ = step(state, batch)
            if store.due(state):
                store.save(state)
            if state.step == updates:
                break
            if until is not None and state.step == 6:
                store.wait()
                sys.stdout.write(f"rank {world.rank} waits\n")
                while not until.exists():
                    time.sleep(0.05)
    whole = b"".join(p.detach().numpy().tobytes() for p in state.params.values())
    digest = hashlib.sha256(whole).hexdigest()
    sys.stdout.write(f"done {state.step} {digest}\n")
