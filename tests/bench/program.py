# SPDX-License-Identifier: Apache-2.0
"""Benchmark of whole programs on two processes; `program.py NAME FILE` is one of them.

A program trains the README's network for three epochs on the digits. It writes the milliseconds
from the end of its imports to the end of the first update, and of the last one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from figures import Figure
from rounds import compared

EPOCHS, ROWS, PARTS = 3, 100, 4


def measure(rounds: int) -> list[Figure]:
    """Measure all programs in turn; every other round runs in reverse order."""
    first = {f"first update: {name}": [] for name in PROGRAMS}
    whole = {f"three epochs: {name}": [] for name in PROGRAMS}
    for turn in range(rounds):
        for name in list(PROGRAMS)[:: -1 if turn % 2 else 1]:
            taken = in_new_processes(__file__, name)
            first[f"first update: {name}"].append(taken[0])
            whole[f"three epochs: {name}"].append(taken[1])
    return compared(first) + compared(whole)


def in_new_processes(script: str, name: str) -> list[float]:
    """Run `script name file` on two new processes, and return the numbers in the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "taken.json")
        launch = [sys.executable, "-m", "accelfn", "launch", "--nproc", "2"]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        command = [*launch, script, name, str(file)]
        subprocess.run(command, check=True, env=env)
        return json.loads(file.read_text())


def by_hand() -> Iterator[None]:
    """Train by a plain PyTorch loop; yield after each update."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = TensorDataset(*DATA)
    sampler = DistributedSampler(data, 2, rank)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, ROWS // 2, sampler=sampler):
            optimizer.zero_grad()
            parts = [*zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)]
            for part, target in parts:
                with nullcontext() if part is parts[-1][0] else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = F.cross_entropy(model(part), target) / len(parts)
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield


def by_accelfn() -> Iterator[None]:
    """Train with accelfn; yield after each update."""
    with af.World.from_env() as world:
        state = af.TrainState.create(
            model=net,
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            data=af.Data(DATA, global_batch_size=ROWS, shuffle=True),
            setup=SETUP,
            world=world,
        )
        step = af.make_step(lambda model, b: F.cross_entropy(model(b[0]), b[1]))
        for batch in af.batches(state, until_epoch=EPOCHS):
            state, _ = step(state, batch)
            yield


def by_fabric() -> Iterator[None]:
    """Train with Lightning Fabric; yield after each update."""
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed"
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = net()
    model, optimizer = fabric.setup(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    loader = DataLoader(TensorDataset(*DATA), ROWS // 2, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            parts = [*zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)]
            for part, target in parts:
                is_last = part is parts[-1][0]
                with fabric.no_backward_sync(model, enabled=not is_last):
                    loss = F.cross_entropy(model(part), target) / len(parts)
                    fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            yield


PROGRAMS: dict[str, Callable[[], Iterator[None]]] = {
    "by hand": by_hand,
    "accelfn": by_accelfn,
    "Lightning Fabric": by_fabric,
}

if __name__ == "__main__":
    from functools import partial

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812 - as everybody calls it
    from front_page import SETUP, net
    from lightning_fabric import Fabric
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import accelfn as af

    images, labels = load_digits(return_X_y=True)
    DATA = torch.tensor(images / 16).float(), torch.tensor(labels)
    torch.set_num_threads(1)
    name, file = sys.argv[1:]
    start = time.perf_counter()
    ends = [(time.perf_counter() - start) * 1000 for _ in PROGRAMS[name]()]
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps([ends[0], ends[-1]]))
    if dist.is_initialized():  # after the end of a program, which frees DDP
        dist.destroy_process_group()
