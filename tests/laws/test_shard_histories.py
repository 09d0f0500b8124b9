# SPDX-License-Identifier: Apache-2.0
"""States of split models do not meet, whatever is done to them in whatever order."""

import contextlib
import tempfile
from math import prod
from typing import Any

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.split_models import AXES, LOSSES, Run, lowered, runs, wraps
from tests.strategies import tensors


class BrokenError(Exception):
    """What a loss raises."""


class _Broken(torch.autograd.Function):
    """Lets a backward pass raise where it comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx, gradients
        raise BrokenError


def broken_forward(net: nn.Module, batch: Any) -> torch.Tensor:
    """Raise when the model has been called."""
    net(batch[0])
    raise BrokenError


def broken_backward(net: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss whose gradients cannot be computed, but for the last layer's."""
    blocks, x = net.blocks, batch[0].to(net.first.weight.dtype)
    x = blocks[1](_Broken.apply(blocks[0](net.first(x))))
    return (net.last(x) * net.scale + net.bias).square().mean()


@attrs.define
class Kin:
    """A state, and how many updates it is from the beginning."""

    state: af.TrainState
    updates: int = 0


ACTS = [
    *(
        "step",
        "step",
        "step",
        "copy",
        "keep",
        "look",
        "look apart",
        "raise",
        "raise in backward",
    ),
    *("release", "load", "evaluate", "again"),
]


@attrs.define
class History:
    """Does things to states."""

    run: Run
    engine: object
    world: af.World
    folder: str
    batches: list[af.Batch]
    num_saved: int = 0

    def do(self, act: str, kin: list[Kin], i: int) -> None:
        """Do one thing to a state, which is given by its number."""
        each, loss = kin[i], LOSSES[self.run.loss]
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
                raising = broken_forward if act == "raise" else broken_backward
                with contextlib.suppress(BrokenError):
                    af.value_and_grad(raising)(each.state, batch)
            case "release":
                af.release(each.state)
            case "load":
                folder = f"{self.folder}/{self.num_saved}"
                self.num_saved += 1
                af.save(each.state, folder)
                loaded = af.load(self.fresh(), folder)
                kin.append(Kin(loaded, each.updates))
            case "evaluate":
                af.evaluate(each.state, self.run.data(), loss)
            case _:
                kin[i] = Kin(self.fresh())

    def fresh(self) -> af.TrainState:
        """Return the state at the beginning."""
        return self.run.state(self.world, self.engine)

    def alone(self, updates: int) -> dict[str, torch.Tensor]:
        """Return what a state of its own has after as many updates."""
        state, step = self.fresh(), af.make_step(LOSSES[self.run.loss])
        for batch in self.batches[:updates]:
            state, _ = step(state, batch)
        return tensors(state)


@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=2),
    wrap=af.wrap_fsdp(),
    axes=AXES[0],
    acts=[
        ("look apart", 0),
        ("step", 1),
        ("step", 0),
        ("raise in backward", 0),
        ("step", 0),
    ],
)
@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=2),
    wrap=af.wrap_fsdp(reduce_dtype=torch.float32),
    axes=AXES[0],
    acts=[
        ("look apart", 0),
        ("step", 1),
        ("step", 0),
        ("raise in backward", 0),
        ("step", 0),
    ],
)
@given(
    run=runs(),
    wrap=wraps | lowered | st.just(af.wrap_ddp()),
    axes=st.sampled_from([AXES[0], AXES[2], AXES[6]]),
    acts=st.lists(
        st.tuples(st.sampled_from(ACTS), st.integers(0, 2)), min_size=2, max_size=9
    ),
)
def test_states_do_not_meet(
    run: Run, wrap: object, axes: dict[str, int], acts: list[tuple[str, int]]
) -> None:
    """Each has, bitwise, what one alone has that was stepped on the same batches."""
    with tempfile.TemporaryDirectory() as folder:

        def fn(world: af.World) -> None:
            state = run.state(world, wrap)
            batches = run.batches(state, len(acts))
            history = History(run, wrap, world, folder, batches)
            kin = [Kin(state), Kin(history.fresh())]
            for act, i in acts:
                history.do(act, kin, i % len(kin))
            for each in kin:
                alone, found = history.alone(each.updates), tensors(each.state)
                assert alone.keys() == found.keys()
                for name, value in alone.items():
                    assert torch.equal(value, found[name]), name

        simulate(prod(axes.values()), fn, axes=axes)
