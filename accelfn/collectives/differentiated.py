# SPDX-License-Identifier: Apache-2.0
"""A gather that is differentiated: its backward pass is a collective, and has one of its own."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from accelfn.collectives.agreed import agreed
from accelfn.collectives.packed import all_gather_rows
from accelfn.collectives.reductions import reduced
from accelfn.world import World


def gather_with_grad(
    mine: torch.Tensor, counts: Sequence[int], worlds: tuple[World, World], label: str
) -> torch.Tensor:
    """Return all ranks' rows; the gradient of a rank's is the sum of what all have for it.

    Args:
        mine: this rank's rows.
        counts: how many each rank has.
        worlds: in which to gather them, and in which to pass gradients, whenever that is.
        label: what the ranks are doing.
    """
    return cast("Any", _Gather).apply(mine, counts, worlds, label)


class _Gather(torch.autograd.Function):
    """An all-gather whose backward pass sums, over the ranks, the gradients of a part."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, *told: Any) -> torch.Tensor:
        ctx.counts, (ready, ctx.world), ctx.label = told
        return all_gather_rows([mine], [ctx.counts], ready, label=ctx.label)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        label = f"{ctx.label}: gradient"
        mine = cast("Any", _SumOfMine).apply(gradient, ctx.counts, ctx.world, label)
        return mine, None, None, None


class _SumOfMine(torch.autograd.Function):
    """This rank's rows of the sum over the ranks; what an all-gather is the transpose of."""

    @staticmethod
    def forward(ctx: Any, everyone: torch.Tensor, *told: Any) -> torch.Tensor:
        counts, world, label = ctx.counts, ctx.world, ctx.label = told
        ready = agreed(world, "gather(grad=True).backward", label, everyone)
        (total,) = reduced([everyone], ready, "sum", label)
        return total.split(list(counts))[world.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        ready = agreed(
            ctx.world, "gather(grad=True).backward", ctx.label, gradient, free=0
        )
        counts, mine = ctx.counts, gradient.resolve_conj().resolve_neg()
        everyone = gather_with_grad(mine, counts, (ready, ctx.world), ctx.label)
        return everyone, None, None, None
