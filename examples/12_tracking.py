# SPDX-License-Identifier: Apache-2.0
"""One idea more: a run is tracked in a file, which af.track.read reads."""

import time
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import accelfn as af

images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
images, labels = images.float() / 16, labels.long()
setup = af.chain(af.shard_data(), af.wrap_ddp(), af.clip_grad_norm(1.0))


def net() -> nn.Module:
    """Return a small net for images of 8 x 8."""
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(world: af.World, *, epochs: int = 5, every: int = 5) -> None:
    """Track the mean over all ranks, and its throughput and memory, every so many updates."""
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data((images, labels), global_batch_size=64, shuffle=True),
        setup=setup,
        world=world,
    )
    step, work = af.make_step(loss_fn), af.batches(state, until_epoch=epochs)
    began = time.perf_counter()
    with af.track.jsonl("digits.jsonl", world=world, step=state.step) as tracker:
        tracker.hyperparameters({"setup": setup, "epochs": epochs})
        for batch in af.track.progress(work, world=world, label="training"):
            state, metrics = step(state, batch)
            if state.step % every == 0:
                seconds, began = time.perf_counter() - began, time.perf_counter()
                told = {
                    **metrics.all_reduce_mean(world),
                    "updates_per_second": every / seconds,
                    "memory_bytes": af.track.peak_memory_bytes(world),
                }
                tracker(told, state.step)
    if world.is_main:
        loss = af.track.read("digits.jsonl").metrics["loss"]
        print(
            f"loss {next(iter(loss.values())):.3f}, then {loss[state.step // 5 * 5]:.3f}"
        )


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
