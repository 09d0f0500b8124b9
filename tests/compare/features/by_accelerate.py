# SPDX-License-Identifier: Apache-2.0
"""Loops of Accelerate's `examples/by_feature`, on a small task; prints the losses of each.

A loss is that of an update: a mean over its micro-batches and ranks. Accelerate keeps state
for the whole process, so it has processes of its own: this module, run alone, shows what one
process shows, and started twice by a launcher, what two show.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import schedulefree
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ProfileKwargs,
    find_executable_batch_size,
    is_megatron_lm_available,
)
from sklearn.model_selection import KFold
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.compare.features.task import (
    BATCH,
    EPOCHS,
    FITS,
    NUM,
    PAD,
    RATE,
    UNEVEN,
    ZERO,
    in_float32,
    language_model,
    mean_loss,
    net,
    samples,
    texts,
    total_loss,
)

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Made = tuple[Accelerator, nn.Module, Any, DataLoader]


def made(
    micro_batch: int = BATCH // SIZE,
    *,
    dataset: Any = None,
    model: nn.Module | None = None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> Made:
    """Return what an example prepares, in a process in which nothing was before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    model = net() if model is None else model
    loader = DataLoader(samples() if dataset is None else dataset, micro_batch)
    steps = optimizer(model.parameters(), lr=RATE)
    return accelerator, *accelerator.prepare(model, steps, loader)


def seen(accelerator: Accelerator, loss: Tensor) -> float:
    """Return the mean of a loss over ranks that have as many samples."""
    return accelerator.gather(loss.detach().reshape(1)).mean().item()


def epoch(prepared: Made, *, skip: int = 0) -> Iterator[float]:
    """Train an epoch; yield the loss of each micro-batch."""
    accelerator, model, optimizer, loader = prepared
    for batch in skip_first_batches(loader, skip) if skip else loader:
        with accelerator.accumulate(model):
            loss = mean_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield seen(accelerator, loss)


def epochs(prepared: Made) -> list[float]:
    """Train all epochs; return the losses of micro-batches."""
    return [loss for _ in range(EPOCHS) for loss in epoch(prepared)]


def by_update(losses: list[float], num: int) -> list[float]:
    """Return means over so many micro-batches each."""
    return [sum(losses[i : i + num]) / num for i in range(0, len(losses), num)]


def gradient_accumulation() -> list[float]:
    """Micro-batches of a quarter."""
    options = {"gradient_accumulation_steps": 4}
    return by_update(epochs(made(BATCH // 4 // SIZE, **options)), 4)


def short_window() -> list[float]:
    """The same where the last window of an epoch has 2 micro-batches of 4."""
    options = {"gradient_accumulation_steps": 4}
    prepared = made(BATCH // 4, dataset=samples(UNEVEN), **options)
    found: list[float] = []
    for _ in range(EPOCHS):
        losses = list(epoch(prepared))
        found += [*by_update(losses[:16], 4), sum(losses[16:]) / 2]
    return found


def gradient_accumulation_for_autoregressive_models() -> list[float]:
    """Sums over words, divided by the number of words of an update on all ranks."""
    steps, found = 4, list[float]()
    accelerator, model, optimizer, loader = made(
        BATCH // steps // SIZE,
        dataset=texts(),
        model=language_model(),
        gradient_accumulation_steps=steps,
    )
    for _ in range(EPOCHS):
        batches = iter(loader)
        for _ in range(NUM // BATCH):
            taken = [next(batches) for _ in range(steps)]
            here = sum((targets != PAD).sum() for _, targets in taken)
            num_items = accelerator.gather(here.reshape(1)).sum().item()
            total = 0.0
            for i, batch in enumerate(taken):
                last = i == steps - 1
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = total_loss(model, batch) / num_items
                    # backward divides by the steps, DistributedDataParallel by the ranks
                    accelerator.backward(loss * steps * SIZE)
                total += accelerator.gather(loss.detach().reshape(1)).sum().item()
            optimizer.step()
            optimizer.zero_grad()
            found.append(total)
    return found


def automatic_gradient_accumulation() -> list[float]:
    """Half as many samples until they fit, and as many micro-batches more."""

    @find_executable_batch_size(
        starting_batch_size=BATCH, reduce_batch_size_fn=iter((FITS,)).__next__
    )
    def train(batch_size: int) -> list[float]:
        if batch_size > FITS:
            raise RuntimeError("CUDA out of memory.")
        steps = BATCH // batch_size
        prepared = made(batch_size, gradient_accumulation_steps=steps)
        return by_update(epochs(prepared), steps)

    return train()


def memory() -> list[float]:
    """Fewer samples until they fit; an update has fewer, too."""
    sizes = iter((BATCH, FITS))

    @find_executable_batch_size(
        starting_batch_size=2 * BATCH, reduce_batch_size_fn=lambda: next(sizes)
    )
    def train(batch_size: int) -> list[float]:
        if batch_size > FITS:
            raise RuntimeError("CUDA out of memory.")
        return epochs(made(batch_size))

    return train()


def checkpointing() -> list[float]:
    """Save after 5 updates; go on in the midst of an epoch with objects made anew."""
    first = made()
    losses = [*epoch(first)]
    with tempfile.TemporaryDirectory() as folder:
        again = epoch(first)
        losses.append(next(again))
        first[0].save_state(folder)
        second = made()
        second[0].load_state(folder)
    return losses + list(epoch(second, skip=1))


def cross_validation() -> list[float]:
    """Each fold trains a model; what they say of what is held out is averaged."""
    found, votes = list[float](), list[Tensor]()
    held_out = samples(18, seed=2)
    for chosen, _ in KFold(2).split(range(NUM)):
        prepared = made(dataset=Subset(samples(), chosen.tolist()))
        found += epochs(prepared)
        accelerator, model, *_ = prepared
        loader, said = accelerator.prepare(DataLoader(held_out, 4)), list[Tensor]()
        for inputs, _ in loader:
            with torch.no_grad():
                said.append(accelerator.gather_for_metrics(model(inputs)))
        votes.append(torch.cat(said))
    return found + torch.stack(votes).mean(0).flatten().tolist()


def early_stopping() -> list[float]:
    """Stop on all ranks where the loss of one has stalled for the second time."""
    accelerator, model, optimizer, loader = made()
    found, best, bad = list[float](), float("inf"), 0
    for batch in (batch for _ in range(9) for batch in loader):
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen(accelerator, loss))
        best, bad = (loss.item(), bad) if loss < best else (best, bad + 1)
        if bad == 2:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return found


def local_sgd() -> list[float]:
    """Average after every second update."""
    accelerator, model, optimizer, loader = made()
    found, options = list[float](), {"local_sgd_steps": 2, "enabled": True}
    for _ in range(EPOCHS):
        with LocalSGD(accelerator=accelerator, model=model, **options) as averaging:
            for batch in loader:
                loss = mean_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
                found.append(seen(accelerator, loss))
    return found


def multi_process_metrics() -> list[float]:
    """Accuracy of a number of samples that no number of ranks divides, and their sum."""
    prepared = made()
    found = epochs(prepared)
    accelerator, model, *_ = prepared
    loader = accelerator.prepare(DataLoader(samples(45, seed=2), 8))
    said = list[Tensor]()
    for inputs, targets in loader:
        with torch.no_grad():
            guesses = model(inputs).argmax(1)
        both = accelerator.gather_for_metrics((guesses, targets))
        said.append(torch.stack(both))
    guesses, targets = torch.cat(said, 1)
    right = (guesses == targets).double()
    return [*found, right.mean().item(), float(len(right)), float(guesses.sum())]


def schedule_free() -> list[float]:
    """The optimizer says which parameters are trained, and which are evaluated."""
    prepared = made(optimizer=schedulefree.AdamWScheduleFree)
    _, model, optimizer, _ = prepared
    optimizer.train()
    found = epochs(prepared)
    optimizer.eval()
    with torch.no_grad():
        found.append(mean_loss(model, list(samples(45, seed=2).tensors)).item())
    return found


def tracking() -> list[float]:
    """What a tracker was told, read from its files."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = made(log_with="tensorboard", project_dir=folder)
        accelerator = prepared[0]
        accelerator.init_trackers("run", config={"rate": RATE})
        for step, loss in enumerate(epochs(prepared)):
            accelerator.log({"loss": loss}, step=step)
        accelerator.end_training()
        events = EventAccumulator(str(next(Path(folder).glob("run"))))
        events.Reload()
        return [event.value for event in events.Scalars("loss")]


def profiler() -> list[float]:
    """The losses under a profiler, and how many products of matrices it saw in 2 updates."""
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    handler = ProfileKwargs(activities=["cpu"], schedule_option=options)
    prepared, found = made(kwargs_handlers=[handler]), list[float]()
    with prepared[0].profile() as seen_by:
        for loss in epoch(prepared):
            found.append(loss)
            seen_by.step()
    products = [e.count for e in seen_by.key_averages() if e.key == "aten::addmm"]
    return [*found, float(sum(products))]


def ddp_comm_hook() -> list[float]:
    """Gradients cross in 16 bits."""
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return epochs(made(kwargs_handlers=[hook]))


def fsdp_with_peak_mem_tracking() -> list[float]:
    """FSDP2 is asked for; on a CPU Accelerate trains under DistributedDataParallel."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    try:
        return epochs(made(fsdp_plugin=plugin))
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]


def deepspeed_with_config_support() -> list[float]:
    """DeepSpeed's ZeRO, stage 2."""
    from deepspeed import logger

    # it would compile C++; the package's own name for the submodule is torch's
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    logger.setLevel("ERROR")
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))
    model, dataset = in_float32()
    # on a CPU Accelerate takes itself for one process then, and gives each rank all samples
    assert accelerator.num_processes == 1
    half, rank = BATCH // SIZE, dist.get_rank()
    ours = [i for i in range(NUM) if i // half % SIZE == rank]
    loader = DataLoader(Subset(dataset, ours), half)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = list[float]()
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        found.append(total.item() / SIZE)
    return found


def megatron_lm_gpt_pretraining() -> list[float]:
    """A model of torch's layers: what Accelerate asks for is not in `megatron-core`."""
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    try:
        assert not is_megatron_lm_available()
    finally:
        del os.environ["ACCELERATE_USE_MEGATRON_LM"]
    return epochs(made())


ON_ONE = (
    *(gradient_accumulation, short_window),
    gradient_accumulation_for_autoregressive_models,
    *(automatic_gradient_accumulation, memory, checkpointing, cross_validation),
    *(schedule_free, tracking, profiler, megatron_lm_gpt_pretraining),
)
ON_TWO = (
    *(gradient_accumulation, gradient_accumulation_for_autoregressive_models),
    *(early_stopping, local_sgd, multi_process_metrics, ddp_comm_hook),
    *(fsdp_with_peak_mem_tracking, deepspeed_with_config_support),
)


def main(file: str) -> None:
    """Write the losses of all that this number of processes shows."""
    torch.set_num_threads(1)
    found = {each.__name__: each() for each in (ON_ONE if SIZE == 1 else ON_TWO)}
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        # DeepSpeed holds groups all the same, whose threads abort a process that ends
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
