# SPDX-License-Identifier: Apache-2.0
# pyright: strict
"""A typed user's program, in which mypy --strict and pyright find nothing."""

from functools import partial

import torch
from torch import Tensor, nn

import accelfn as af


@af.transform
class scale_grads:
    """Multiply gradients, and count the updates in the slot."""

    factor: float = 1.0

    def init(self, state: af.TrainState) -> Tensor:
        """Return the first slot."""
        return torch.zeros((), device=state.world.device)

    def grads(
        self, grads: af.Grads, slot: Tensor, _: af.Update
    ) -> tuple[af.Grads, Tensor]:
        """Return scaled gradients."""
        return grads.map(lambda g: self.factor * g), slot + 1


def net() -> nn.Module:
    """Return a model."""
    return nn.Linear(2, 1)


def loss_fn(model: nn.Module, batch: Tensor) -> af.Loss:
    """Return a loss with its weight."""
    return af.Loss(model(batch).square().sum(), len(batch))


def train(world: af.World) -> af.TrainState:
    """Train, save and restore."""
    data = af.Data(torch.ones(8, 2), global_batch_size=4, remainder="drop")
    setup = af.chain(
        af.shard_data(),
        af.wrap_ddp(bucket_cap_mb=5),
        af.autocast("bf16"),
        scale_grads(factor=2.0),
        af.ema(0.9),
    )
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        schedule=af.schedules.warmup_cosine(2, 10, end=0.1),
        data=data,
        setup=setup,
        world=world,
        init="whole",
    )
    store = af.CheckpointStore("runs", best_is="min", frozen="hash", every=2)
    state = store.restore(state)
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=2):
        state, metrics = step(state, batch)
        if batch.ends_epoch:
            af.print_once(world, metrics.all_reduce_mean(world))
        store.save(state)
    with af.borrow_model(state, at="eval") as model:
        total = af.all_reduce(model(torch.ones(1, 2)), world, "mean")
    af.print_once(world, total.item())
    return af.finalize(state)


def read(directory: str, state: af.TrainState) -> af.TrainState:
    """Load a checkpoint, or parts of it, and log a number."""
    try:
        state = af.load(state, directory)
    except af.errors.CheckpointError:
        state = af.load_part(state, directory, ["params"], missing="init").state
    with af.track.jsonl("runs/log.jsonl", world=state.world) as track:
        track({"loss": 1.0}, state.step)
    return state
