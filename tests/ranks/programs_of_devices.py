# SPDX-License-Identifier: Apache-2.0
"""What a process of its own runs on a device, joined by the device's own backend."""

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accelfn as af
from tests.strategies import differences, tensors

ADAMW = partial(torch.optim.AdamW, lr=0.05, eps=1e-3, fused=True)
UPDATES = 4
SETUPS: Mapping[str, tuple[Any, ...]] = {
    "plain": (),
    "plain, micro-batches": (af.accumulate(num_micro_batches=2),),
    "ddp": (af.wrap_ddp(),),
    "ddp, unused looked for": (af.wrap_ddp(find_unused_parameters=True),),
    "ddp, sent in bf16": (af.wrap_ddp(), af.compress_grads("bf16")),
    "ddp, updates in backward": (af.wrap_ddp(), af.optimizer_in_backward()),
    "ddp, statistics of all": (af.wrap_ddp(), af.sync_batchnorm()),
    "ddp, micro-batches": (af.wrap_ddp(), af.accumulate(num_micro_batches=2)),
    "ddp, fp16": (af.wrap_ddp(), af.autocast("fp16"), af.clip_grad_norm(1e6)),
    "fsdp": (af.wrap_fsdp(),),
    "fsdp, gathered in bf16": (af.wrap_fsdp(gather_dtype=torch.bfloat16),),
    "local_sgd": (af.local_sgd(sync_every=2),),
    "diloco": (af.diloco(sync_every=2),),
    "diloco, in flight": (af.diloco(sync_every=2, delay=1),),
}
ZERO: Mapping[str, tuple[Any, ...]] = {
    "plain": (),
    **{f"stage {stage}": (af.wrap_deepspeed(stage),) for stage in (1, 2, 3)},
}
OF_MICRO_BATCHES = "plain, micro-batches", "ddp, micro-batches"
"""Whose statistics are those of micro-batches."""
COARSE = "ddp, sent in bf16", "ddp, fp16", "fsdp, gathered in bf16"
"""Those that compute or send in 16 bits."""
OUTER = "diloco", "diloco, in flight"
"""Those whose outer step is not the inner one's; of one rank, too."""


class Net(nn.Module):
    """Layers that attend, with batch statistics; rows are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 24), nn.BatchNorm1d(24)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


def data() -> af.Data:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 7, 6, generator=draw)
    return af.Data(
        (rows, torch.randint(5, (48,), generator=draw)), global_batch_size=16
    )


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    rows, classes = batch
    return nn.functional.cross_entropy(model(rows), classes)


def create(world: af.World, *setup: Any) -> af.TrainState:
    return af.TrainState.create(
        model=Net,
        optimizer=ADAMW,
        data=data(),
        setup=af.chain(af.shard_data(), *setup),
        world=world,
    )


def trained(world: af.World, setups: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return, by name, what each setup trains, and the metrics after the last update."""
    found: dict[str, Any] = {}
    for name, setup in setups.items():
        state, step = create(world, *setup), af.make_step(loss_fn)
        batches = iter(af.batches(state, until_epoch=None))
        for _ in range(UPDATES):
            state, metrics = step(state, next(batches))
        state = af.finalize(state)
        scores = af.evaluate(state, data(), loss_fn)
        whole = af.full_params(state, at="train")
        found[name] = {
            "params": {n: p.detach().cpu() for n, p in whole.items()},
            "loss": metrics.all_reduce_mean(world)["loss"],
            "scores": scores,
        }
        af.release_engine(state)
    return found


def on_the_device(world: af.World) -> dict[str, Any]:
    """Train each setup; say by what the ranks are joined."""
    assert world.device.type != "cpu"
    backends = str(dist.get_backend_config(world.group))
    return {"backends": backends, **trained(world, SETUPS)}


def of_zero(world: af.World) -> dict[str, Any]:
    return trained(world, ZERO)


def saved_and_gone_on(world: af.World) -> dict[str, list[str]]:
    """Return of each setup in what a run from a save is not bitwise the run that went on."""
    found: dict[str, list[str]] = {}
    for name, setup in SETUPS.items():
        state, step = create(world, *setup), af.make_step(loss_fn)
        batches = iter(af.batches(state, until_epoch=None))
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                state, _ = step(state, next(batches))
            with af.CheckpointStore(folder, async_=True) as store:
                at = store.save(state)
                for _ in range(2):
                    state, _ = step(state, next(batches))
            again = af.load(create(world, *setup), at)
        batches = iter(af.batches(again, until_epoch=None))
        for _ in range(2):
            again, _ = step(again, next(batches))
        found[name] = differences(tensors(state), tensors(again))
    return found


def searched(world: af.World, fraction: float) -> tuple[int, int]:
    """Return the batch size that a part of the device's memory has room for, and the tries."""
    torch.cuda.set_per_process_memory_fraction(fraction)
    tries: list[int] = []

    def fits(size: int, tried: af.World) -> int:
        tries.append(size)
        state = af.TrainState.create(
            model=partial(nn.Linear, 256, 256),
            optimizer=ADAMW,
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            world=tried,
        )
        batch = torch.ones(size, 256, 256, device=tried.device)
        step = af.make_step(lambda model, rows: model(rows).square().mean())
        state, _ = step(state, batch)
        return size

    return af.find_batch_size(fits, 1 << 16, world), len(tries)
