# SPDX-License-Identifier: Apache-2.0
"""How torch's FSDP gathers a unit and reduces its gradients where Gloo joins the ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from accelfn.collectives import by_gloo

_gather, _reduce_scatter = DefaultAllGather(), DefaultReduceScatter()


class Gather(DefaultAllGather):
    """Gathers the parts of a unit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - as torch calls it
    ) -> dist.Work | None:
        """Fill `output_tensor`; who asked for it early has its work from torch."""
        if async_op:
            return _gather(output_tensor, input_tensor, group, async_op)
        by_gloo.gather_(output_tensor, input_tensor, group)
        return None


class ReduceScatter(DefaultReduceScatter):
    """Sums the gradients of a unit, of which each rank keeps its part."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - as torch calls it
    ) -> Any:
        """Fill `output_tensor` with this rank's part of the sum, or of the mean."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return _reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        by_gloo.reduce_scatter_(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
