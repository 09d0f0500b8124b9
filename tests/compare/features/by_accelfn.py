# SPDX-License-Identifier: Apache-2.0
"""The counterparts of Accelerate's examples by feature: the losses of each, on any world."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import schedulefree
import torch
from sklearn.model_selection import KFold
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import Subset

import accelfn as af
from tests.compare.features.task import (
    BATCH,
    CLASSES,
    EPOCHS,
    FITS,
    IN,
    NUM,
    PAD,
    RATE,
    UNEVEN,
    in_float32,
    language_model,
    mean_loss,
    net,
    samples,
    texts,
    total_loss,
)

REPLICAS = af.shard_data(), af.wrap_ddp()
HELD_OUT = samples(45, seed=2)


def begun(
    world: af.World,
    *setup: Any,
    dataset: Any = None,
    batch_size: int = BATCH,
    model: Callable[[], nn.Module] = net,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    schedule: Any = None,
) -> af.TrainState:
    """Return a state before its first update."""
    dataset = samples() if dataset is None else dataset
    return af.TrainState.create(
        model=model,
        optimizer=partial(optimizer, lr=RATE),
        schedule=schedule,
        data=af.Data(dataset, global_batch_size=batch_size, shuffle=False),
        setup=af.chain(*(setup or REPLICAS)),
        world=world,
    )


def trained(
    state: af.TrainState, loss: Any = mean_loss, *, most: int | None = None
) -> tuple[af.TrainState, list[float]]:
    """Train all epochs, or so many updates; return the state and the loss of each update."""
    step, found = af.make_step(loss), list[float]()
    for batch in af.batches(state, until_epoch=EPOCHS):
        state, metrics = step(state, batch)
        found.append(metrics.all_reduce_mean(state.world)["loss"])
        if len(found) == most:
            break
    return state, found


def gradient_accumulation(world: af.World) -> list[float]:
    """Micro-batches of a quarter."""
    return trained(begun(world, *REPLICAS, af.accumulate(num_micro_batches=4)))[1]


def short_window(world: af.World, *, as_accelerate: bool = True) -> list[float]:
    """The last update of an epoch has half as many samples.

    Accelerate divides its gradient by a whole update's number of micro-batches, which is half
    the rate.
    """
    per_epoch = -(-UNEVEN // BATCH)

    def halved(update: int) -> float:
        return 0.5 if update % per_epoch == per_epoch - 1 else 1.0

    state = begun(
        world,
        *REPLICAS,
        af.accumulate(num_micro_batches=4),
        dataset=samples(UNEVEN),
        schedule=halved if as_accelerate else None,
    )
    return trained(state)[1]


def mean_over_words(model: nn.Module, batch: list[Tensor]) -> af.Loss:
    """Return the sum over all words, and their number."""
    return af.Loss(total_loss(model, batch), (batch[1] != PAD).sum())


def gradient_accumulation_for_autoregressive_models(world: af.World) -> list[float]:
    """A total and a weight; nothing is gathered, nothing multiplied."""
    setup = *REPLICAS, af.accumulate(num_micro_batches=4)
    state = begun(world, *setup, dataset=texts(), model=language_model)
    return trained(state, mean_over_words)[1]


def automatic_gradient_accumulation(world: af.World) -> list[float]:
    """The micro-batch is halved until it fits; an update stays what it is."""

    def train(size: int, world: af.World) -> list[float]:
        if size > FITS:
            raise torch.OutOfMemoryError
        return trained(begun(world, *REPLICAS, af.accumulate(micro_batch_size=size)))[1]

    return af.find_batch_size(train, BATCH, world)


def memory(world: af.World) -> list[float]:
    """The update itself is made smaller, as Accelerate's example does."""

    def train(size: int, world: af.World) -> list[float]:
        if size > FITS:
            raise torch.OutOfMemoryError
        return trained(begun(world, batch_size=size))[1]

    return af.find_batch_size(train, 2 * BATCH, world)


def checkpointing(world: af.World) -> list[float]:
    """Save after 5 updates, and go on in the midst of an epoch with a state made anew."""
    with tempfile.TemporaryDirectory() as folder:
        state, before = trained(begun(world), most=5)
        saved = Path(folder) / "saved"
        af.save(state, saved)
        return before + trained(af.load(begun(world), saved))[1]


def cross_validation(world: af.World) -> list[float]:
    """Each fold is a state; what they say of what is held out is averaged."""
    found, votes = list[float](), list[Tensor]()
    for chosen, _ in KFold(2).split(range(NUM)):
        state = begun(world, dataset=Subset(samples(), chosen.tolist()))
        state, losses = trained(state)
        found += losses
        held_out = af.Data(samples(18, seed=2), global_batch_size=4)
        said = af.predict(state, held_out, lambda model, batch: model(batch[0]))
        votes.append(torch.stack(list(said)))
    return found + torch.stack(votes).mean(0).flatten().tolist()


def early_stopping(world: af.World) -> list[float]:
    """Each rank judges by its own loss, and all are asked."""
    state, step = begun(world), af.make_step(mean_loss)
    found, best, bad = list[float](), float("inf"), 0
    for batch in af.batches(state, until_epoch=9):
        state, metrics = step(state, batch)
        found.append(metrics.all_reduce_mean(world)["loss"])
        loss = float(metrics["loss"])
        best, bad = (loss, bad) if loss < best else (best, bad + 1)
        if af.any_rank(bad == 2, world):
            break
    return found


def local_sgd(world: af.World) -> list[float]:
    """Ranks train apart, and are averaged after every second update."""
    return trained(begun(world, af.shard_data(), af.local_sgd(sync_every=2)))[1]


def multi_process_metrics(world: af.World) -> list[float]:
    """Each sample counts once; nothing is cut off."""

    def judge(model: nn.Module, batch: list[Tensor]) -> af.Loss:
        inputs, targets = batch
        right = (model(inputs).argmax(1) == targets).sum()
        return af.Loss(
            mean_loss(model, batch) * len(targets), len(targets), right=right
        )

    def guess(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).argmax(1)

    state, found = trained(begun(world))
    held_out = af.Data(HELD_OUT, global_batch_size=8)
    accuracy = af.evaluate(state, held_out, judge)["right"]
    guesses = torch.stack(list(af.predict(state, held_out, guess)))
    return [*found, accuracy, float(len(guesses)), float(guesses.sum())]


def schedule_free(world: af.World) -> list[float]:
    """Nobody calls train() and eval() of the optimizer."""
    optimizer = schedulefree.AdamWScheduleFree
    state = begun(world, *REPLICAS, af.schedule_free(), optimizer=optimizer)
    state, found = trained(state)
    held_out = af.Data(HELD_OUT, global_batch_size=45)
    return [*found, af.evaluate(state, held_out, mean_loss)["loss"]]


def tracking(world: af.World) -> list[float]:
    """What TensorBoard was told, read from its files."""
    with tempfile.TemporaryDirectory() as folder:
        with af.track.tensorboard(folder, world=world) as tracker:
            tracker.hyperparameters({"rate": RATE})
            for update, loss in enumerate(trained(begun(world))[1]):
                tracker({"loss": loss}, update)
        events = EventAccumulator(folder)
        events.Reload()
        return [event.value for event in events.Scalars("loss")]


def profiler(world: af.World) -> list[float]:
    """The losses under a profiler, and how many products of matrices it saw in 2 updates."""
    state, step, found = begun(world), af.make_step(mean_loss), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        with af.profile(folder, world, active=2) as seen_by:
            for batch in af.batches(state, until_epoch=1):
                state, metrics = step(state, batch)
                found.append(float(metrics["loss"]))
                seen_by.step()
        products = [e.count for e in seen_by.key_averages() if e.key == "aten::addmm"]
    return [*found, float(sum(products))]


def ddp_comm_hook(world: af.World) -> list[float]:
    """Gradients cross in 16 bits."""
    return trained(begun(world, *REPLICAS, af.compress_grads("fp16")))[1]


def fsdp_with_peak_mem_tracking(world: af.World) -> list[float]:
    """Each rank holds a part of the model."""
    return trained(begun(world, af.shard_data(), af.wrap_fsdp()))[1]


def deepspeed_with_config_support(world: af.World) -> list[float]:
    """DeepSpeed's ZeRO, stage 2, on real processes."""
    model, dataset = in_float32()
    setup = af.shard_data(), af.wrap_deepspeed(2)
    return trained(begun(world, *setup, dataset=dataset, model=lambda: model))[1]


class Split(nn.Module):
    """The network of Megatron-core's layers, with the weights that torch's have."""

    def __init__(self, layers: af.megatron.Layers) -> None:
        """Make its layers."""
        super().__init__()
        self.up, self.down = layers.column(IN, 8), layers.row(8, CLASSES)
        self.double()
        with torch.no_grad():
            for mine, drawn in zip(self.parameters(), net().parameters(), strict=True):
                mine.copy_(drawn)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of classes."""
        return self.down(self.up(x)[0].tanh())[0]


def megatron_lm_gpt_pretraining(world: af.World) -> list[float]:
    """Half of each layer on each of two ranks along "tp"."""
    layers = af.megatron.layers(world)
    setup = af.shard_data(), af.tensor_parallel()
    return trained(begun(world, *setup, model=lambda: Split(layers)))[1]
