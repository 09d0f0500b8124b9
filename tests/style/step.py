# SPDX-License-Identifier: Apache-2.0
"""Count the files and functions of accelfn that a steady step enters."""

import gc
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import accelfn as af


def entered_by_a_step() -> tuple[int, int]:
    """Return how many files and functions of accelfn a steady step of the front page enters."""
    inputs, targets = torch.randn(320, 8), torch.randint(0, 3, (320,))
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(8, 3),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data((inputs, targets), global_batch_size=16, shuffle=True),
        setup=af.chain(
            *(af.shard_data(), af.wrap_ddp(), af.autocast("bf16")),
            *(af.accumulate(num_micro_batches=2), af.clip_grad_norm(1.0)),
        ),
        seed=0,
    )
    step = af.make_step(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    batches = iter(af.batches(state))
    for _ in range(6):
        state, _ = step(state, next(batches))
    codes, batch = set(), next(batches)
    package = str(Path(af.__file__).parent)
    before = sys.getprofile()
    gc.collect()  # here, for what it frees may call functions of accelfn
    sys.setprofile(lambda frame, *_: codes.add(frame.f_code))
    try:
        step(state, batch)
    finally:
        sys.setprofile(before)
    own = [code for code in codes if code.co_filename.startswith(package)]
    return len({code.co_filename for code in own}), len(own)


if __name__ == "__main__":
    files, functions = entered_by_a_step()
    sys.stdout.write(f"{files} {functions}\n")
