# SPDX-License-Identifier: Apache-2.0
"""One idea more: curvature. A gradient is divided by the Fisher matrix of the whole batch.

For a linear layer this is nearly a product of two small matrices (K-FAC, Martens and Grosse
2015), covariances over the samples of all ranks. The state keeps their running averages.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

import accelfn as af

NUM_SAMPLES, BATCH = 451, 64  # the last batch of an epoch has 3
RATE, DECAY, DAMPING = 0.1, 0.9, 1e-3
SCALES = torch.logspace(0, -2, 6)  # sizes of inputs that are slow to learn from
Stepped: TypeAlias = tuple[af.TrainState, af.Metrics]


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs, some of them large and some small, and their targets."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, len(SCALES), generator=draw)
    return inputs * SCALES, inputs.sin().sum(1, keepdim=True)


def net() -> nn.Module:
    """Return two linear layers with a bend between them."""
    return nn.Sequential(nn.Linear(len(SCALES), 32), nn.Tanh(), nn.Linear(32, 1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return half of the mean squared error."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean() / 2


gradient, sgd_step = af.value_and_grad(loss_fn), af.make_step(loss_fn)


def factors(state: af.TrainState, batch: af.Batch) -> list[Tensor]:
    """Return covariances of inputs and of slopes at the outputs of each linear layer."""
    with af.borrow_model(state) as (first, bend, second):
        outputs = first(inputs := batch.value[0])
        last = second(hidden := bend(outputs))
        # a Fisher matrix of squared errors is one of the slopes of the model itself
        slopes = torch.autograd.grad(last.sum(), [outputs, last])
    one_more = partial(nn.functional.pad, pad=(0, 1), value=1)  # its weight is the bias
    rows = one_more(inputs), slopes[0], one_more(hidden.detach()), slopes[1]
    mine = [each.T @ each / len(each) for each in rows]
    return af.all_reduce(mine, state.world, "mean", weight=batch.weights[0])


def kfac_step(state: af.TrainState, batch: af.Batch) -> Stepped:
    """Take one update, with gradients divided by the average of both matrices."""
    metrics, grads = gradient(state, batch)
    new = factors(state, batch)
    old = state.slots.get("kfac", new)
    average = [a.lerp(b, 1 - DECAY) for a, b in zip(old, new, strict=True)]
    tensors = dict(grads.tensors)
    for name, inputs, slopes in ("0", *average[:2]), ("2", *average[2:]):
        ratio = (inputs.diagonal().mean() / slopes.diagonal().mean()).sqrt()
        left = slopes + DAMPING**0.5 / ratio * torch.eye(len(slopes))
        right = inputs + DAMPING**0.5 * ratio * torch.eye(len(inputs))
        weight, bias = f"{name}.weight", f"{name}.bias"
        grad = torch.cat([tensors[weight], tensors[bias][:, None]], 1)
        grad = torch.linalg.solve(right, torch.linalg.solve(left, grad), left=False)
        tensors[weight], tensors[bias] = grad[:, :-1], grad[:, -1]
    grads = grads.with_tensors(tensors)
    return af.apply_grads(state.with_slot("kfac", average), grads), metrics


def train(
    world: af.World, epochs: int = 20, step: Callable[..., Stepped] = kfac_step
) -> dict[str, Tensor]:
    """Return the parameters after some epochs."""
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        data=af.Data(samples(NUM_SAMPLES), global_batch_size=BATCH, shuffle=True),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    for batch in af.batches(state, until_epoch=epochs):
        state, _ = step(state, batch)
    return af.full_params(state)


if __name__ == "__main__":
    model, held_out = net(), samples(512, seed=1)
    with af.World.from_env(device="cpu") as world:
        for name, step in ("SGD", sgd_step), ("K-FAC", kfac_step):
            model.load_state_dict(train(world, step=step))
            loss = loss_fn(model, held_out)
            af.print_once(world, f"{name}: held-out loss {loss:.3f}")
