# SPDX-License-Identifier: Apache-2.0
"""A training loop in plain torch, in float64 and on one process: what a setup must come to.

Nothing here is accelfn's. The order of samples, which is its own, is given.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import lr_scheduler

IN, OUT = 3, 2
Params = dict[str, torch.Tensor]


@attrs.frozen
class Recipe:
    """What is trained, on what, and by which arithmetic."""

    n: int = 8
    seed: int = 0
    net: str = "plain"
    loss: str = "mean"
    optimizer: str = "sgd"
    groups: bool = False
    schedule: str | None = None
    clip_norm: tuple[float, float] | None = None
    clip_value: float | None = None
    decay: float | None = None
    broken: int | None = None

    def samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        x, y = draw(self.n, IN), draw(self.n, OUT)
        y[::3, 0] = 0  # samples without weight
        if self.broken is not None:
            x[self.broken] = math.nan
        return x, y


class Net(nn.Module):
    """Linear, or with a hidden layer; tied, frozen or unused parts."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.kind = recipe.net
        if self.kind != "linear":
            self.first = nn.Linear(IN, IN)
        if self.kind == "tied":
            self.second = nn.Linear(IN, IN, bias=False)
            self.second.weight = self.first.weight
        if self.kind == "unused":
            self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(IN, OUT)
        self.double()
        generator = torch.Generator().manual_seed(recipe.seed + 1)
        for param in self.parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.data = drawn / 2
        if self.kind == "frozen":
            self.first.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind != "linear":
            x = torch.tanh(self.first(x))
        if self.kind == "tied":
            x = self.second(x)
        return self.head(x)


def errors(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net(x) - y).square().sum(1)


def weights(loss: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the weight of each sample, some of them 0."""
    if loss == "weighted":
        return y[:, 0].abs()
    if loss == "counted":
        return (y[:, 1] > 0).double()
    return torch.ones(len(x), dtype=torch.float64)


_GROUPS = {"lr": 0.02, "weight_decay": 0.25}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.5),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05, eps=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
    "amsgrad": partial(torch.optim.AdamW, lr=0.05, eps=1e-3, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-3),
}
OPTIMIZERS = sorted(_OPTIMIZERS)


def make_optimizer(kind, *, groups, named):
    """Return an optimizer, perhaps with biases in a group of their own."""
    listed = list(named)
    if not groups:
        return _OPTIMIZERS[kind](listed)
    biases = [each for each in listed if "bias" in each[0]]
    others = [each for each in listed if "bias" not in each[0]]
    return _OPTIMIZERS[kind]([{"params": others}, {"params": biases, **_GROUPS}])


FACTORS: dict[str, Callable[[int], float]] = {
    "inverse": lambda step: 1 / (1 + step),
    "cosine": lambda step: 0.5 + 0.5 * math.cos(step / 4),
    "warm-up": lambda step: min(1.0, (step + 1) / 3),
}
SCHEDULERS: dict[str, Callable[..., lr_scheduler.LRScheduler]] = {
    "steps": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.75),
    "linear": partial(lr_scheduler.LinearLR, start_factor=0.25, total_iters=3),
}
SCHEDULES = sorted([*FACTORS, *SCHEDULERS])


@attrs.frozen
class Trained:
    """What the loop held after each batch."""

    params: list[Params]
    losses: list[float]
    skipped: list[bool]
    averaged: Params | None


def train(recipe: Recipe, order: Sequence[Sequence[int]]) -> Trained:
    net = Net(recipe)
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(recipe.optimizer, groups=recipe.groups, named=named)
    scheduler = _scheduler(recipe.schedule, optimizer)
    x, y = recipe.samples()
    average = _copied(net) if recipe.decay is not None else None
    found = Trained([], [], [], average)
    for rows in order:
        inputs, targets = x[list(rows)], y[list(rows)]
        counted = weights(recipe.loss, inputs, targets)
        total = (errors(net, inputs, targets) * counted).sum()
        loss = total / (counted.sum() or 1.0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [p.grad for _, p in named if p.grad is not None]
        skip = not all(bool(g.isfinite().all()) for g in gradients)
        if not skip:
            _clip_(recipe, gradients)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                for name, param in net.named_parameters(remove_duplicate=False):
                    moved = (1 - recipe.decay) * param.detach()
                    average[name].mul_(recipe.decay).add_(moved)
        found.params.append(_copied(net))
        # without any weight there is no mean, whatever the total is
        found.losses.append(loss.item() if counted.sum() else 0.0)
        found.skipped.append(skip)
    return found


def _scheduler(kind: str | None, optimizer: torch.optim.Optimizer) -> Any:
    if kind is None:
        return None
    if kind in SCHEDULERS:
        return SCHEDULERS[kind](optimizer)
    return lr_scheduler.LambdaLR(optimizer, FACTORS[kind])


def _clip_(recipe: Recipe, gradients: list[torch.Tensor]) -> None:
    if recipe.clip_norm is not None:
        bound, kind = recipe.clip_norm
        flat = torch.cat([g.reshape(-1) for g in gradients])
        norm = flat.abs().max() if math.isinf(kind) else flat.norm(kind)
        if norm > bound:
            for each in gradients:
                each.mul_(bound / norm)
    if recipe.clip_value is not None:
        for each in gradients:
            each.clamp_(-recipe.clip_value, recipe.clip_value)


def _copied(net: nn.Module) -> Params:
    named = net.named_parameters(remove_duplicate=False)
    return {name: param.detach().clone() for name, param in named}
