# SPDX-License-Identifier: Apache-2.0
"""How torch's FSDP gathers a unit and reduces its gradients where Gloo joins the ranks.

The arguments are torch's. Whoever asks for a result early has its work from torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from accelfn.collectives import by_gloo

gather, reduce_scatter = DefaultAllGather(), DefaultReduceScatter()


def gather_by_gloo(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
) -> Any:
    """Fill `output_tensor` with the parts of a unit."""
    if how.get("async_op"):
        return gather(output_tensor, input_tensor, group, **how)
    return by_gloo.gather_(output_tensor, input_tensor, group)


def reduce_scatter_by_gloo(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
) -> Any:
    """Fill `output_tensor` with this rank's part of the sum, or of the mean."""
    op = how["op"]
    if how.get("async_op") or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return reduce_scatter(output_tensor, input_tensor, group, **how)
    by_gloo.reduce_scatter_(output_tensor, input_tensor, group)
    if op == dist.ReduceOp.AVG:
        output_tensor.div_(group.size())
    return None
