# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives along "tp", which form pairs.

The backward pass of one collective of a pair runs the other. The pairs are copy and all-reduce;
all-gather and scatter; and, for split sequences, reduce-scatter and all-gather.
"""

from typing import Any

import torch
import torch.distributed as dist

from accelfn import World
from accelfn.plug import collectives, system

LABEL = "tensor_parallel"
"""The label of these collectives in errors and traces."""


def copy_to_ranks(inputs: torch.Tensor, ranks: World) -> torch.Tensor:
    """Return the input on each rank; the backward pass all-reduces the gradient."""
    return _differentiable(inputs, 0, ranks, _same, _sum)


def reduce_from_ranks(part: torch.Tensor, ranks: World) -> torch.Tensor:
    """All-reduce a tensor; the backward pass copies the gradient to each rank."""
    return _differentiable(part, 0, ranks, _sum, _same)


def gather_from_ranks(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """All-gather along a dim; in the backward pass each rank gets its part's gradient."""
    return _differentiable(part, dim, ranks, all_parts, _own_part)


def scatter_to_ranks(tensor: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Return this rank's part along a dim; the backward pass all-gathers the gradient."""
    return _differentiable(tensor, dim, ranks, _own_part, all_parts)


def gather_and_copy(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """All-gather along a dim; the backward pass reduce-scatters the gradient."""
    return _differentiable(part, dim, ranks, all_parts, _sum_of_part)


def reduce_scatter(tensor: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """Reduce-scatter along a dim; the backward pass all-gathers the gradient."""
    return _differentiable(tensor, dim, ranks, _sum_of_part, all_parts)


class _Collective(torch.autograd.Function):
    """Runs the collective `run`. The backward pass of `run` is `back`, and vice versa."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = dim, ranks, run, _ = how
        return run(tensor, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dim, ranks, run, back = ctx.how
        gradient = _differentiable(gradients[0], dim, ranks, back, run)
        return gradient, None, None, None, None


_differentiable: Any = _Collective.apply


def _same(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(part: torch.Tensor, _: int, ranks: World) -> torch.Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    with collectives.naming(LABEL, ranks):
        dist.all_reduce(total, group=ranks.group)
    return total


def all_parts(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    """All-gather along a dim; autograd does not record it."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(ranks.size)]
    with collectives.naming(LABEL, ranks):
        dist.all_gather(parts, part, group=ranks.group)
    return torch.cat(parts, dim)


def _own_part(tensor: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    return tensor.chunk(ranks.size, dim)[ranks.rank].contiguous()


def _sum_of_part(tensor: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    parts = tensor.chunk(ranks.size, dim)
    total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    rows = torch.cat(parts).contiguous()
    with collectives.naming(LABEL, ranks):
        if collectives.carries(ranks.group, total.device):
            collectives.reduce_scatter_(total, rows, ranks.group)
        else:
            system.reduce_scatter_single(total, rows, group=ranks.group)
    return total
