# SPDX-License-Identifier: Apache-2.0
"""A training loop in plain torch with any options of optimizers, and any who sets their rates.

Nothing here is accelfn's. Its optimizers have no fused or grouped kernel.
"""

import math
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

Params = dict[str, torch.Tensor]
Clip = tuple[str, float, float]
Setter = tuple[str, Any, float]

KINDS: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "SGD": (
        partial(torch.optim.SGD, lr=0.05),
        {"momentum": [0, 0.5], "nesterov": [False, True], "dampening": [0, 0.25]},
    ),
    "Adam": (
        partial(torch.optim.Adam, lr=0.05, eps=1e-3),
        {
            "amsgrad": [False, False, True],
            "decoupled_weight_decay": [False, True],
            "tensor rate": [False, False, True],
        },
    ),
    "AdamW": (
        partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
        {"amsgrad": [False, False, True], "tensor rate": [False, False, True]},
    ),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.05, eps=1e-3), {"lr_decay": [0, 1]}),
    "NAdam": (
        partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
        {"decoupled_weight_decay": [False, True]},
    ),
}
OFTEN = ["SGD", "Adam", "Adam", "AdamW", "AdamW", "Adagrad", "NAdam"]
"""Those with a fast path of ours more often than others."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@attrs.frozen
class Part:
    """An optimizer of torch, its options, and the kernel that it asks for."""

    kind: str
    options: tuple[tuple[str, Any], ...]
    kernel: str | None = None
    grouped: bool = False

    def make(self, named: Any, *, plain: bool = False) -> torch.optim.Optimizer:
        """Return it, over named parameters; as a plain loop has it without its kernel."""
        make, _ = KINDS[self.kind]
        options = dict(self.options)
        if options.pop("tensor rate", False):
            rate = make.keywords["lr"]
            options["lr"] = torch.tensor(rate, dtype=torch.float64)
        if plain:
            options["foreach"] = False
        elif self.kernel is not None:
            options[self.kernel] = True
        named = list(named)
        if not self.grouped:
            return make(named, **options)
        biases = [pair for pair in named if "bias" in pair[0]]
        others = [pair for pair in named if "bias" not in pair[0]]
        own = {"lr": 0.02, "weight_decay": 0.25, "maximize": True, "name": "biases"}
        groups = [{"params": others, "name": "others"}, {"params": biases, **own}]
        return make(groups, **options)


@attrs.frozen
class Recipe:
    """An optimizer in one or two parts, what sets its rates, and on what it trains.

    Attributes:
        parts: the first is of the head, if there are two.
        is_complex: whether the first layer is.
        setters: what sets hyperparameters behind the schedule, in order.
        schedule: whether there is one.
        clips: of gradients, in order.
        decays: of averages of the parameters.
        n: samples there are.
        batch_size: of an update.
        seed: of samples and weights.
        updates: how many.
        broken: the sample that is not a number; updates that see it are skipped.
    """

    parts: tuple[Part, ...]
    is_complex: bool
    setters: tuple[Setter, ...]
    schedule: bool
    clips: tuple[Clip, ...]
    decays: tuple[float, ...]
    n: int
    batch_size: int
    seed: int
    updates: int
    broken: int | None

    def samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets; a third of the samples are without weight, or more."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        x, y = draw(self.n, 3), draw(self.n, 2)
        y[self.seed % 3 :: 3, 0] = 0
        y[: self.seed % 4, 0] = 0  # perhaps a whole batch
        if self.broken is not None:
            x[self.broken] = math.nan
        return x, y

    def rows(self) -> list[list[int]]:
        """Return the samples of each batch, in their own order."""
        epoch = [
            list(range(i, min(i + self.batch_size, self.n)))
            for i in range(0, self.n, self.batch_size)
        ]
        return (epoch * self.updates)[: self.updates]

    def optimizers(self, net: nn.Module) -> list[torch.optim.Optimizer]:
        """Return an optimizer for each part."""
        named = list(net.named_parameters())
        heads = [pair for pair in named if pair[0].startswith("head")]
        rest = [pair for pair in named if not pair[0].startswith("head")]
        of_parts = [named] if len(self.parts) == 1 else [heads, rest]
        pairs = zip(self.parts, of_parts, strict=True)
        return [part.make(own, plain=True) for part, own in pairs]


class Net(nn.Module):
    """Two layers, in float64, the first of which may be complex."""

    def __init__(self, seed: int, *, is_complex: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.complex128 if is_complex else torch.float64
        self.first = nn.Linear(3, 3, dtype=dtype)
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        for param in self.parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.data = drawn / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(self.first.weight.dtype))
        # of a complex number both halves count
        return self.head(torch.tanh(hidden.real + (hidden * 1j).real / 2))


def factor(step: int) -> float:
    return 1 / (1 + step)


def planned(key: Any, value: float, step: int) -> dict[Any, float]:
    """Return what is set in an update, if anything is."""
    return {} if step % 2 else {key: value / (1 + step)}


def total_and_weight(net: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch
    weights = y[:, 0].abs()
    return ((net(x) - y).square().sum(1) * weights).sum(), weights.sum()


@attrs.frozen
class Moment:
    """What there is behind an update."""

    params: Params
    averages: tuple[Params, ...]
    rates: tuple[float, ...]
    skipped: int


def train(recipe: Recipe) -> list[Moment]:
    """Train in plain torch."""
    net = Net(recipe.seed, is_complex=recipe.is_complex)
    optimizers = recipe.optimizers(net)
    groups = [group for each in optimizers for group in each.param_groups]
    base = [dict(group) for group in groups]
    averages = tuple(copied(net) for _ in recipe.decays)
    x, y = recipe.samples()
    step, moments = 0, list[Moment]()
    _set_rates_(recipe, groups, base, step, 0)
    for i, rows in enumerate(recipe.rows()):
        total, weight = total_and_weight(net, (x[rows], y[rows]))
        for param in net.parameters():
            param.grad = None
        (total / (weight or 1.0)).backward()
        if all(bool(p.grad.isfinite().all()) for p in net.parameters()):
            for clip in recipe.clips:
                _clip_(clip, groups)
            for each in optimizers:
                each.step()
            step += 1
            for decay, average in zip(recipe.decays, averages, strict=True):
                for name, param in copied(net).items():
                    average[name].mul_(decay).add_((1 - decay) * param)
        _set_rates_(recipe, groups, base, step, i + 1)
        rates = tuple(float(group["lr"]) for group in groups)
        kept = tuple({n: p.clone() for n, p in each.items()} for each in averages)
        moments.append(Moment(copied(net), kept, rates, i + 1 - step))
    return moments


def _set_rates_(
    recipe: Recipe, groups: list[Any], base: list[Any], step: int, observed: int
) -> None:
    """Set what the next update has: the schedule's, and then each setter's, in order."""
    for group, own in zip(groups, base, strict=True):
        for key in ("lr", "weight_decay"):
            group[key] = own[key]
        if recipe.schedule:
            group["lr"] = own["lr"] * factor(step)
    for kind, key, value in recipe.setters:
        for i, group in enumerate(groups):
            if (
                kind == "plateau"
            ):  # the first is the best, then each second is one too many
                group["lr"] = group["lr"] * value ** (max(observed - 1, 0) // 2)
                continue
            where = key if isinstance(key, tuple) else (i, key)
            if where[0] in (i, group.get("name")):
                for each in planned(key, value, step).values():
                    group[where[1]] = each


def _clip_(clip: Clip, groups: list[Any]) -> None:
    kind, bound, p = clip
    lists = [[param.grad for param in group["params"]] for group in groups]
    if kind == "norm":
        lists = [[grad for each in lists for grad in each]]
    for grads in lists:
        flat = torch.cat([grad.abs().flatten() for grad in grads])
        norm = float(torch.linalg.vector_norm(flat, p))
        for grad in grads:
            if kind == "value":
                grad.clamp_(-bound, bound)
            elif norm > bound:
                grad.mul_(bound / norm)


def copied(net: nn.Module) -> Params:
    return {name: param.detach().clone() for name, param in net.named_parameters()}
