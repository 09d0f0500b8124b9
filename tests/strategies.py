# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies of the property tests: exact data, small models, chains and runs.

Exact ("dyadic") data are small integers in float64. Sums, products and divisions by powers of two
have no rounding, so tests can compare sums bit by bit.
"""

import functools
from collections.abc import Callable

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing.strategies import Program
from tests.internals import gather_full, is_shard

IN, OUT = 3, 2


class Net(nn.Module):
    """A linear model, perhaps with a hidden layer, tied, frozen or unused parts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(IN, IN, bias=kind != "tied")
        self.head = nn.Linear(IN, OUT)
        if kind == "tied":
            self.second = nn.Linear(IN, IN, bias=False)
            self.second.weight = self.first.weight
        if kind == "unused":
            self.unused = nn.Parameter(torch.ones(2))
        if kind == "norm":
            self.norm = nn.BatchNorm1d(IN)
        if kind == "dropout":
            self.drop = nn.Dropout(0.5)
        self.double()
        if kind == "dyadic":
            for i, param in enumerate(self.parameters()):
                ramp = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
                param.data = (ramp + i) % 3 - 1
        if kind == "frozen":
            self.first.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "tied":
            x = self.second(x)
        if self.kind == "norm":
            x = self.norm(x)
        if self.kind == "dropout":
            x = self.drop(x)
        return self.head(x)


def model(kind: str) -> Callable[[], nn.Module]:
    """Return a factory."""
    return functools.partial(Net, kind)


def mean_loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a plain mean over samples; linear in the outputs, so exact on dyadic data."""
    x, y = batch
    return (net(x) * y).sum(1).mean()


def weighted_loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> af.Loss:
    """Return a sum over samples with uneven weights, some of them 0."""
    x, y = batch
    weights = y[:, 0].abs()
    total = ((net(x) * y).sum(1) * weights).sum()
    return af.Loss(total, weights.sum(), size=(x.sum(), float(len(x))))


def squared_loss(
    net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return a mean squared error, which normal data learn from."""
    x, y = batch
    return (net(x) - y).square().mean()


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.5),
    "momentum": functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
    "decay": functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.5),
}
LOSSES = {"mean": mean_loss, "weighted": weighted_loss, "squared": squared_loss}


@attrs.frozen
class Run:
    """A training run, small enough to draw and to send to other processes."""

    n: int = 8
    batch_size: int = 8
    updates: int = 2
    kind: str = "plain"
    loss: str = "mean"
    optimizer: str = "sgd"
    setup: object = attrs.field(factory=af.chain)
    seed: int = 0
    dyadic: bool = True
    shuffle: bool = True
    remainder: str = "short"
    schedule: bool = False

    def dataset(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets: small integers, or normal numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.dyadic:
            draw = functools.partial(torch.randint, -3, 4, generator=generator)
            return draw((self.n, IN)).double(), draw((self.n, OUT)).double()
        draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
        return draw(self.n, IN), draw(self.n, OUT)

    def program(self) -> Program:
        """Return the run as the kit's users would write it."""
        return Program(
            self.dataset(),
            model("dyadic" if self.kind == "plain" and self.dyadic else self.kind),
            loss=LOSSES[self.loss],
            optimizer=OPTIMIZERS[self.optimizer],
            setup=self.setup,
            schedule=af.schedules.linear(16) if self.schedule else None,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            remainder=self.remainder,
            seed=self.seed,
            updates=self.updates,
        )

    def state(self, world: af.World | None = None) -> af.TrainState:
        """Return the state before the first update."""
        return self.program().state(world)

    def train(
        self, state: af.TrainState, updates: int | None = None
    ) -> tuple[af.TrainState, list[af.Metrics]]:
        """Return the state after some updates, and their metrics."""
        return self.program().train(state, updates)


@st.composite
def runs(draw: st.DrawFn, **fixed: object) -> Run:
    """Draw a run; keyword arguments fix fields of it."""
    n = draw(st.integers(1, 12))
    drawn: dict[str, object] = {
        "n": n,
        "batch_size": draw(st.integers(1, 8)),
        "updates": draw(st.integers(1, 3)),
        "kind": draw(st.sampled_from(["plain", "tied", "frozen"])),
        "loss": draw(st.sampled_from(sorted(LOSSES))),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "seed": draw(st.integers(0, 3)),
        "dyadic": draw(st.booleans()),
        "remainder": draw(st.sampled_from(["short", "pad"])),
        "schedule": draw(st.booleans()),
    }
    return Run(**{**drawn, **fixed})


def tensors(state: af.TrainState) -> dict[str, torch.Tensor]:
    """Return every tensor of a state by a path, copied; of what is split, the whole."""
    found: dict[str, torch.Tensor] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach() if is_shard(value) else value.detach().clone()
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[path] = torch.tensor(float(value), dtype=torch.float64)
        elif hasattr(value, "items"):
            for key, inside in value.items():
                walk(f"{path}.{key}", inside)

    for field in ("params", "buffers", "opt_state", "slots"):
        walk(field, getattr(state, field))
    walk("step", state.step)
    walk("num_skipped", state.num_skipped)
    walk("cursor", {"epoch": state.cursor.epoch, "samples": state.cursor.samples})
    has_parts = any(map(is_shard, found.values()))
    return gather_full(found, state.world, label="compare") if has_parts else found


def differences(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], *, within: float = 0.0
) -> list[str]:
    """Return the paths at which two states differ, bitwise or by more than a tolerance."""
    paths = sorted(one.keys() ^ two.keys())
    for path in one.keys() & two.keys():
        a, b = one[path], two[path]
        same = torch.equal(a, b) or bool(((a != a) & (b != b) | (a == b)).all())  # noqa: PLR0124
        if not same and within:
            scale = max(1.0, float(a.abs().max()), float(b.abs().max()))
            same = float((a - b).abs().max()) <= within * scale
        if not same:
            paths.append(path)
    return sorted(paths)
