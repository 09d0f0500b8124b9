# SPDX-License-Identifier: Apache-2.0
"""States of split models do not meet, whatever is done to them in whatever order."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.laws.histories import Acts, Broken, BrokenError, Training, acts, check_apart
from tests.laws.parallel_layers import (
    LYING,
    PLAN,
    SEQUENCE,
    Lying,
    Speech,
    loss_of_tokens,
    speeches,
)
from tests.laws.split_models import AXES, LOSSES, Run, lowered, runs, wraps


def broken_forward(net: nn.Module, batch: Any) -> torch.Tensor:
    """Raise when the model has been called."""
    net(batch[0])
    raise BrokenError


def broken_backward(net: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss whose gradients cannot be computed, but for the last layer's."""
    blocks, x = net.blocks, batch[0].to(net.first.weight.dtype)
    x = blocks[1](Broken.apply(blocks[0](net.first(x))))
    return (net.last(x) * net.scale + net.bias).square().mean()


AFTER_A_LOOK: Acts = [
    ("look apart", 0),
    ("step", 1),
    ("step", 0),
    ("raise in backward", 0),
    ("step", 0),
]


@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=2),
    wrap=af.wrap_fsdp(),
    axes=AXES[0],
    acts=AFTER_A_LOOK,
)
@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=2),
    wrap=af.wrap_fsdp(reduce_dtype=torch.float32),
    axes=AXES[0],
    acts=AFTER_A_LOOK,
)
@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=2),
    wrap=af.wrap_ddp(),
    axes=AXES[0],
    acts=[("look apart", 0), ("look", 0), ("step", 0), ("look apart", 0), ("step", 0)],
)
@example(  # a state is bound behind one that has gone on
    run=Run(4, 2, "mean", "momentum", in_list=False, micro=4),
    wrap=af.wrap_fsdp(nn.Linear),
    axes={"dp_replicate": 2, "dp_shard": 2},
    acts=[("step", 1), ("step", 2), ("keep", 2)],
)
@given(
    run=runs(),
    wrap=wraps | lowered | st.just(af.wrap_ddp()),
    axes=st.sampled_from([AXES[0], AXES[2], AXES[6]]),
    acts=acts,
)
def test_states_do_not_meet(
    run: Run, wrap: object, axes: dict[str, int], acts: Acts
) -> None:
    """Each has, bitwise, what one alone has that was stepped on the same batches."""
    of = Training(
        fresh=lambda world: run.state(world, wrap),
        data=run.data,
        loss=LOSSES[run.loss],
        raising={"raise": broken_forward, "raise in backward": broken_backward},
    )
    check_apart(of, axes, acts)


def broken_at(place: str) -> Any:
    """Return a loss that raises as a module of a block is called, and one on the way back."""

    def fail(*_: Any) -> None:
        raise BrokenError

    def broken(_module: nn.Module, _: Any, made: torch.Tensor) -> Any:
        return Broken.apply(made)

    def on_the_way(net: Any, batch: Any) -> Any:
        hook = getattr(net.blocks[0], place).register_forward_pre_hook(fail)
        try:
            return loss_of_tokens(net, batch)
        finally:
            hook.remove()

    def on_the_way_back(net: Any, batch: Any) -> Any:
        hook = net.blocks[0].inside.register_forward_hook(broken)
        try:
            return loss_of_tokens(net, batch)
        finally:
            hook.remove()

    return {"raise": on_the_way, "raise in backward": on_the_way_back}


@example(
    speech=Speech(4, 4, PLAN, micro=2),
    lying=LYING[0],
    place="inside",
    acts=[("copy", 0), ("step", 0), ("step", 2), ("raise", 0), ("step", 0)],
)
@example(
    speech=Speech(4, 4, SEQUENCE, frozen=()),
    lying=LYING[0],
    place="of_heads",
    acts=[("step", 0), ("raise", 0), ("step", 0)],
)
@given(
    speech=speeches(dropout=0.5) | speeches(),
    lying=st.sampled_from([LYING[0], LYING[0], LYING[2], LYING[3], LYING[4]]),
    place=st.sampled_from(["inside", "of_heads", "norm", "query", "down"]),
    acts=acts,
)
def test_states_of_split_layers_do_not_meet(
    speech: Speech, lying: Lying, place: str, acts: Acts
) -> None:
    """The same where layers are split, and a loss raises in the midst of them."""
    of = Training(
        fresh=lambda world: speech.state(world, *lying.setup(speech.plan)),
        data=speech.data,
        loss=loss_of_tokens,
        raising=broken_at(place),
    )
    check_apart(of, lying.axes, acts)
