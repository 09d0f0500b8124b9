# SPDX-License-Identifier: Apache-2.0
"""What the laws of models that are split over ranks train, and how it lies over them."""

import math
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import accelfn as af

IN, WIDTH, OUT = 3, 5, 2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A layer, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Net(nn.Module):
    """Blocks between two layers, a lone number, and the mean of what was seen.

    Rows are 5, 2 and 1: they divide among no number of ranks.
    """

    def __init__(self, dtype: torch.dtype, *, in_list: bool) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        blocks = [Block(), Block()]
        self.blocks = nn.ModuleList(blocks) if in_list else nn.Sequential(*blocks)
        self.last = nn.Linear(WIDTH, OUT)
        self.in_list, self.scale = in_list, nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.ones(1))
        self.first.bias.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros(IN))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0).to(self.seen), 0.5)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale + self.bias


def mean_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error."""
    x, y, _ = batch
    return (net(x) - y).square().mean()


def weighted_loss(net: nn.Module, batch: Batch) -> af.Loss:
    """Return a total over tokens, of which samples have 0 to 2."""
    x, y, tokens = batch
    return af.Loss(((net(x) - y).square().sum(1) * tokens).sum(), tokens.sum())


LOSSES = {"mean": mean_loss, "weighted": weighted_loss}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.5, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
}
BEHIND = (
    *(af.clip_grad_norm(0.3, norm_type=power) for power in (2.0, 3.0, math.inf)),
    *(af.clip_grad_value(0.1), af.ema(0.5), af.checkpoint_activations(Block)),
)
beside = st.lists(st.sampled_from(BEHIND), unique_by=lambda each: each.name)


@attrs.frozen
class Run:
    """A training of a few updates."""

    n: int
    batch_size: int
    loss: str
    optimizer: str
    in_list: bool
    micro: int
    behind: tuple[object, ...] = ()
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def data(self) -> af.Data:
        """Return inputs, targets and tokens; the first batch may have no token."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        tokens = torch.randint(0, 3, (self.n,), generator=generator)
        values = draw(self.n, IN), draw(self.n, OUT), tokens
        return af.Data(
            tuple(value.to(self.dtype) for value in values),
            global_batch_size=self.batch_size,
        )

    def state(self, world: af.World, *engine: object) -> af.TrainState:
        """Return the state before the first update."""
        return self.fed(world, af.shard_data(), *engine, data=self.data())

    def fed(
        self, world: af.World, *outer: object, data: af.Data | None = None
    ) -> af.TrainState:
        """Return it with such data, or to be given what each rank reads for itself."""
        return af.TrainState.create(
            model=partial(Net, self.dtype, in_list=self.in_list),
            optimizer=OPTIMIZERS[self.optimizer],
            data=data,
            setup=af.chain(
                *outer, af.accumulate(num_micro_batches=self.micro), *self.behind
            ),
            world=world,
            seed=self.seed,
        )

    def batches(self, state: af.TrainState, count: int) -> list[af.Batch]:
        """Return the next batches of a state."""
        batches = iter(af.batches(state))
        return [next(batches) for _ in range(count)]


AXES = [
    *({"dp_shard": size} for size in (2, 2, 3, 4, 5, 8)),
    *({"dp_replicate": 2, "dp_shard": size} for size in (2, 3, 4)),
    {"dp_replicate": 3, "dp_shard": 2},
]


@st.composite
def runs(draw: st.DrawFn, **fixed: Any) -> Run:
    """Draw a run."""
    drawn = {
        "n": draw(st.integers(1, 12)),
        "batch_size": draw(st.integers(1, 9)),
        "loss": draw(st.sampled_from(sorted(LOSSES))),
        "optimizer": draw(st.sampled_from(["adagrad", "adamw", "momentum"])),
        "in_list": draw(st.booleans()),
        "micro": draw(st.integers(1, 5)),
        "behind": tuple(draw(beside)),
        "seed": draw(st.integers(0, 9)),
    }
    return Run(**{**drawn, **fixed})


wraps = st.builds(
    af.wrap_fsdp,
    st.sampled_from([None, Block, nn.Linear, (Block, nn.Linear)]),
    reshard_after_forward=st.booleans(),
    keep_grads=st.sampled_from(["whole", "sharded"]),
    find_unused_parameters=st.booleans(),
)
lowered = st.builds(
    af.wrap_fsdp,
    gather_dtype=st.sampled_from([None, torch.float32]),
    reduce_dtype=st.sampled_from([None, torch.float32]),
)
