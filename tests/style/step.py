# SPDX-License-Identifier: Apache-2.0
"""Count the files and functions of accelfn that a steady step enters, and moves between files."""

import gc
import sys
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch.nn.functional import cross_entropy

import accelfn as af


def entered_by_a_step() -> tuple[int, int, int]:
    """Return how many files and functions of accelfn a steady step of the front page enters.

    The third number is how often control passes from one file to another, counting returns.
    """
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
    codes, batch, moves = set(), next(batches), 0
    package = str(Path(af.__file__).parent)

    def own_file(frame: FrameType | None) -> str:
        """Return the file of the nearest frame of accelfn, from one outwards."""
        while frame is not None and not frame.f_code.co_filename.startswith(package):
            frame = frame.f_back
        return frame.f_code.co_filename if frame is not None else ""

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal moves
        codes.add(frame.f_code)
        own, caller = frame.f_code.co_filename, own_file(frame.f_back)
        is_move = own.startswith(package) and caller not in ("", own)
        moves += 2 * (event == "call" and is_move)

    before = sys.getprofile()
    gc.collect()  # here, for what it frees may call functions of accelfn
    sys.setprofile(see)
    try:
        step(state, batch)
    finally:
        sys.setprofile(before)
    own = [code for code in codes if code.co_filename.startswith(package)]
    return len({code.co_filename for code in own}), len(own), moves


if __name__ == "__main__":
    print(*entered_by_a_step())  # noqa: T201
