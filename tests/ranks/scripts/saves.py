# SPDX-License-Identifier: Apache-2.0
"""Save after every update, or load each in a fresh process and go on.

`saves.py DIR save` and `saves.py DIR resume`; some updates are skipped. Writes, on each
rank, a digest of all that is saved of the last state.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import accelfn as af
from tests.internals import digests, encode_fields, fields_of

UPDATES = 7


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
    )


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def create(world: af.World, seed: int) -> af.TrainState:
    return af.TrainState.create(
        model=network,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=af.schedules.linear(UPDATES),
        data=af.Data(
            torch.linspace(-1, 1, 108).reshape(36, 3), global_batch_size=8, shuffle=True
        ),
        setup=af.chain(
            af.shard_data(),
            af.local_sgd(sync_every=3),
            af.autocast("fp16", init_scale=2.0**12, growth_interval=2),
            af.ema(0.9),
        ),
        world=world,
        seed=seed,
    )


def digest(state: af.TrainState) -> str:
    units, tensors = encode_fields(fields_of(state))
    text = json.dumps([units, digests(tensors)])
    return hashlib.sha256(text.encode()).hexdigest()


def go_on(state: af.TrainState, folder: Path | None = None) -> str:
    step = af.make_step(loss_fn)
    for batch in af.batches(state):
        if state.num_tried == UPDATES:
            skipped = state.num_skipped
            assert 0 < skipped < UPDATES - 3, skipped
            return digest(state)
        state, _ = step(state, batch)
        if folder is not None:
            af.save(state, folder / str(state.num_tried))
    raise AssertionError


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    with af.World.from_env(device="cpu") as world:
        if what == "save":
            found = [go_on(create(world, seed=5), folder)]
        else:
            states = (
                af.load(create(world, seed=0), folder / str(k)) for k in range(1, 8)
            )
            found = [go_on(state) for state in states]
        (folder / f"{what}-{world.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
