# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the start of training on two processes; `first_update.py NAME FILE` is one start.

A start creates the six transformer layers of `fsdp.py` and makes one update. It writes the
milliseconds from the end of its imports to the end of this update.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure
from program import in_new_processes
from rounds import compared


def measure(rounds: int) -> list[Figure]:
    """Measure all starts in turn; every other round runs in reverse order."""
    taken: dict[str, list[float]] = {name: [] for name in STARTS}
    for turn in range(rounds):
        for name in list(STARTS)[:: -1 if turn % 2 else 1]:
            taken[name].append(in_new_processes(__file__, name)[0])
    pairs = list(taken.items())
    return compared(dict(pairs[:2])) + compared(dict(pairs[2:]))


def ddp_by_hand() -> None:
    """Make an update in torch's DistributedDataParallel."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    update(model, torch.optim.AdamW(model.parameters()))


def fsdp_by_hand() -> None:
    """Make an update of a model that torch's fully_shard shards, as in torch's tutorial."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = split()
    update(model, torch.optim.AdamW(model.parameters()))


def update(model: "nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    """Make one update by hand."""
    inputs, targets = BATCH
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_accelfn(wrap: "Callable[[], af.Transform]") -> None:
    """Make an update with accelfn."""
    with af.World.from_env() as world:
        state = af.TrainState.create(
            model=Decoder, optimizer=torch.optim.AdamW, setup=wrap(), world=world
        )
        af.make_step(loss_fn)(state, BATCH)


STARTS: dict[str, Callable[[], None]] = {
    "DDP: by hand": ddp_by_hand,
    "DDP: accelfn": lambda: by_accelfn(af.wrap_ddp),
    "FSDP: by hand": fsdp_by_hand,
    "FSDP: accelfn": lambda: by_accelfn(af.wrap_fsdp),
}

if __name__ == "__main__":
    import torch
    import torch.distributed as dist
    from fsdp import Decoder, split
    from models import loss_fn
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import accelfn as af

    torch.set_num_threads(1)
    name, file = sys.argv[1:]
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    BATCH = torch.rand(8, 64, generator=generator), torch.arange(8)
    start = time.perf_counter()
    STARTS[name]()
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps([(time.perf_counter() - start) * 1000]))
    if dist.is_initialized():  # after the start, which frees its model
        dist.destroy_process_group()
