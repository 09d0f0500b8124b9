# SPDX-License-Identifier: Apache-2.0
"""Small training problems that checks bring themselves."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.data import Data
from accelfn.loop.batches import batches
from accelfn.loop.observe import observe
from accelfn.state.metrics import Loss, Metrics
from accelfn.state.state import TrainState
from accelfn.step.make_step import make_step
from accelfn.world import World

_IN, _OUT, _ROWS = 3, 2, 17


class _Centred(nn.Module):
    """Takes a running mean off its input: batch statistics that one row is enough for."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(_IN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean), 0.25)
        return x - self.mean


class _Net(nn.Module):
    """Two layers with what transforms stumble over: a tied weight, a frozen one, a buffer."""

    def __init__(self, *, norm: bool, drop: bool) -> None:
        super().__init__()
        self.first = nn.Linear(_IN, _IN)
        self.tied = nn.Linear(_IN, _IN, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(_IN), requires_grad=False)
        self.norm = _Centred() if norm else nn.Identity()
        self.drop = nn.Dropout(0.5) if drop else nn.Identity()
        self.head = nn.Linear(_IN, _OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tied(torch.tanh(self.first(x)) * self.frozen)
        return self.head(self.drop(self.norm(hidden)))


_OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}


def _in_groups(make: Callable[[Any], Any], named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two parameter groups with unlike learning rates."""
    *first, last = named
    return make([{"params": first}, {"params": [last], "lr": 0.02}])


def _warmup(update: int) -> float:
    return min(1.0, (update + 1) / 4)


@attrs.frozen
class Problem:
    """A model, its data and its optimizer; seventeen samples, seven an update.

    Shares are uneven on two ranks, and on four one is empty at the end of an epoch.

    Attributes:
        optimizer: "momentum" or "adamw".
        weighted: whether the loss is a weighted total, an `af.Loss`.
        norm: whether the model has batch statistics.
        drop: whether it draws random numbers.
        grouped: whether a schedule sets the rates of two parameter groups.
        seed: of its parameters, and of the order of its samples.
    """

    optimizer: str = "momentum"
    weighted: bool = False
    norm: bool = False
    drop: bool = False
    grouped: bool = False
    seed: int = 1

    def state(self, world: World, setup: Callable[[Any], Any] | None) -> TrainState:
        """Return the state before the first update."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(_ROWS, _IN, generator=generator)
        targets = torch.randn(_ROWS, _OUT, generator=generator)
        make = _OPTIMIZERS[self.optimizer]
        return TrainState.create(
            model=lambda: _Net(norm=self.norm, drop=self.drop),
            optimizer=partial(_in_groups, make) if self.grouped else make,
            schedule=_warmup if self.grouped else None,
            data=Data((inputs, targets), batch_size=7, shuffle=True),
            setup=setup,
            world=world,
            seed=self.seed,
        )

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Return the loss of a batch."""
        inputs, targets = batch
        errors = (model(inputs) - targets).square().sum(1)
        if not self.weighted:
            return errors.mean()
        weights = inputs[:, 0].abs()
        return Loss((errors * weights).sum(), weights.sum(), size=inputs.abs().sum())

    def updates(
        self, state: TrainState, number: int
    ) -> Iterator[tuple[TrainState, Metrics]]:
        """Yield the state and metrics of each of the next updates."""
        step = make_step(self.loss)
        last = state.step + number
        if number:
            for batch in batches(state):
                state, metrics = step(state, batch)
                if state.setup.owners["observe"]:
                    state = observe(state, 1.0)  # it gets no better
                yield state, metrics
                if state.step >= last:
                    return


PROBLEMS = (
    Problem(),
    Problem("adamw", weighted=True, grouped=True),
    Problem("adamw", norm=True, drop=True),
)
