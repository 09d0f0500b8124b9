# SPDX-License-Identifier: Apache-2.0
"""Where what a model computes crosses the ranks along "tp", forth and back.

Four pairs, each the other's gradient: what all have is handed to parts, whose gradients are
summed; parts are put together, and each has its part of the gradient; and where sequences are
split between layers, a sum of parts goes on in parts, and the other way round.
"""

from typing import Any, cast

import torch
import torch.distributed as dist

from accelfn.collectives import by_gloo, naming
from accelfn.world import World

_LABEL = "tensor_parallel"


def handed(given: torch.Tensor, ranks: World) -> torch.Tensor:
    """Return what all ranks have, for each to compute its part with; gradients are summed."""
    return cast("Any", _Hand).apply(given, ranks)


def summed(part: torch.Tensor, ranks: World) -> torch.Tensor:
    """Return the sum of what ranks made, of which each has the whole gradient."""
    return cast("Any", _Sum).apply(part, ranks)


def gathered(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return the parts of all ranks along a dim; each has the gradient of its own."""
    return cast("Any", _Gather).apply(part, dim, ranks)


def taken(whole: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return this rank's part of what all have; the gradient is put together again."""
    return cast("Any", _Take).apply(whole, dim, ranks)


def gathered_and_handed(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return the parts of all ranks, for each to compute with; gradients are summed."""
    return cast("Any", _GatherAndHand).apply(part, dim, ranks)


def summed_and_taken(whole: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return this rank's part of the sum of what ranks made."""
    return cast("Any", _SumAndTake).apply(whole, dim, ranks)


class _Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return summed(gradients[0], ctx.ranks), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        total = part.clone(memory_format=torch.contiguous_format)
        with naming(_LABEL, ranks):
            dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return handed(gradients[0], ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return all_parts(part, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return taken(gradients[0], ctx.dim, ctx.ranks), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return whole.chunk(ranks.size, dim)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gathered(gradients[0], ctx.dim, ctx.ranks), None, None


class _GatherAndHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return all_parts(part, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return summed_and_taken(gradients[0], ctx.dim, ctx.ranks), None, None


class _SumAndTake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        rows = torch.cat(whole.chunk(ranks.size, dim)).contiguous()
        shape = list(whole.shape)
        shape[dim] //= ranks.size
        total = whole.new_empty(shape)
        with naming(_LABEL, ranks):
            if by_gloo.carries(ranks.group, total.device):
                by_gloo.reduce_scatter_(total, rows, ranks.group)
            else:
                dist.reduce_scatter_single(total, rows, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gathered_and_handed(gradients[0], ctx.dim, ctx.ranks), None, None


def all_parts(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return the parts of all ranks along a dim; without a gradient."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(ranks.size)]
    with naming(_LABEL, ranks):
        dist.all_gather(parts, part, group=ranks.group)
    return torch.cat(parts, dim)
