# SPDX-License-Identifier: Apache-2.0
"""What may be done to states, in whatever order, without any of them noticing another."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import tensors

Acts = list[tuple[str, int]]
"""What is done, to which state."""


class BrokenError(Exception):
    """What a loss raises."""


class Broken(torch.autograd.Function):
    """Lets a backward pass raise where it comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx, gradients
        raise BrokenError


ACTS = [
    *("step", "step", "step", "copy", "keep", "look", "look apart"),
    *("raise", "raise in backward", "release", "load", "evaluate", "again"),
]
acts = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 2)), min_size=2, max_size=9
)


@attrs.frozen
class Training:
    """What is trained."""

    fresh: Callable[[af.World], af.TrainState]
    data: Callable[[], af.Data]
    loss: Callable[..., Any]
    raising: Mapping[str, Callable[..., Any]]


@attrs.define
class Kin:
    """A state, and how many updates it is from the beginning."""

    state: af.TrainState
    updates: int = 0


@attrs.define
class History:
    of: Training
    world: af.World
    folder: str
    batches: list[af.Batch]
    num_saved: int = 0

    def do(self, act: str, kin: list[Kin], i: int) -> None:
        """Do one thing to a state, which is given by its number."""
        each, loss = kin[i], self.of.loss
        batch = self.batches[each.updates]
        step = af.make_step(loss)
        match act:
            case "step":
                each.state, _ = step(each.state, batch)
                each.updates += 1
            case "copy":
                kin.append(Kin(each.state.copy(), each.updates))
            case "keep":
                forked, _ = step(each.state, batch, donate=False)
                kin.append(Kin(forked, each.updates + 1))
            case "look" | "look apart":
                sync = act == "look"
                af.value_and_grad(loss)(each.state, batch, sync=sync)
            case "raise" | "raise in backward":
                with contextlib.suppress(BrokenError):
                    af.value_and_grad(self.of.raising[act])(each.state, batch)
            case "release":
                af.release_engine(each.state)
            case "load":
                folder = f"{self.folder}/{self.num_saved}"
                self.num_saved += 1
                af.save(each.state, folder)
                loaded = af.load(self.of.fresh(self.world), folder)
                kin.append(Kin(loaded, each.updates))
            case "evaluate":
                af.evaluate(each.state, self.of.data(), loss)
            case _:
                kin[i] = Kin(self.of.fresh(self.world))

    def alone(self, updates: int) -> dict[str, torch.Tensor]:
        """Return what a state of its own has after as many updates."""
        state, step = self.of.fresh(self.world), af.make_step(self.of.loss)
        for batch in self.batches[:updates]:
            state, _ = step(state, batch)
        return tensors(state)


def check_apart(of: Training, axes: dict[str, int], acts: Acts) -> None:
    """Each state has, bitwise, what one alone has that was stepped on the same batches."""
    with tempfile.TemporaryDirectory() as folder:

        def fn(world):
            check_apart_on(world, of, acts, folder)

        simulate(prod(axes.values()), fn, axes=axes)


def check_apart_on(world: af.World, of: Training, acts: Acts, folder: str) -> None:
    """Check it on one rank; all have the folder."""
    state = of.fresh(world)
    batches = iter(af.batches(state))
    history = History(of, world, folder, [next(batches) for _ in acts])
    kin = [Kin(state), Kin(of.fresh(world))]
    for act, i in acts:
        history.do(act, kin, i % len(kin))
    for each in kin:
        alone, found = history.alone(each.updates), tensors(each.state)
        assert alone.keys() == found.keys()
        for name, value in alone.items():
            assert value.device == found[name].device, name
            assert torch.equal(value, found[name]), name
