# SPDX-License-Identifier: Apache-2.0
"""A gather that is differentiated: its backward pass is a collective, and has one of its own."""

from typing import Any, cast

import torch

from accelfn.collectives.agreed import agreed
from accelfn.collectives.packed import all_gather
from accelfn.collectives.reductions import reduced
from accelfn.world import World


def gather_with_grad(
    mine: torch.Tensor, ready: World, world: World, label: str
) -> torch.Tensor:
    """Return all ranks' rows; the gradient of a rank's is the sum of what all have for it.

    Args:
        mine: this rank's rows, as many as all others'.
        ready: the world in which to gather them.
        world: the world in which to pass gradients, whenever that is.
        label: what the ranks are doing.
    """
    return cast("Any", _Gather).apply(mine, ready, world, label)


class _Gather(torch.autograd.Function):
    """An all-gather whose backward pass sums, over the ranks, the gradients of a part."""

    @staticmethod
    def forward(
        ctx: Any, mine: torch.Tensor, ready: World, world: World, label: str
    ) -> torch.Tensor:
        ctx.rows, ctx.world, ctx.label = len(mine), world, label
        return torch.cat(all_gather(mine, ready, label=label))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        label = f"{ctx.label}: gradient"
        mine = cast("Any", _SumOfMine).apply(gradient, ctx.rows, ctx.world, label)
        return mine, None, None, None


class _SumOfMine(torch.autograd.Function):
    """This rank's rows of the sum over the ranks; what an all-gather is the transpose of."""

    @staticmethod
    def forward(
        ctx: Any, everyone: torch.Tensor, rows: int, world: World, label: str
    ) -> torch.Tensor:
        ctx.world, ctx.label = world, label
        ready = agreed(world, "gather(grad=True).backward", label, everyone)
        (total,) = reduced([everyone], ready, "sum", label)
        return total[world.rank * rows :][:rows].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        ready = agreed(ctx.world, "gather(grad=True).backward", ctx.label, gradient)
        mine = gradient.resolve_conj().resolve_neg()
        everyone = gather_with_grad(mine, ready, ctx.world, ctx.label)
        return everyone, None, None, None
