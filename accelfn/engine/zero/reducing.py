# SPDX-License-Identifier: Apache-2.0
"""Gradients that cross to the ranks that hold their parts, where Gloo joins the ranks.

DeepSpeed's stages 1 and 2 sum a bucket on all ranks, of which each keeps its own parts alone.
"""

from collections.abc import Sequence
from typing import Any

import torch

from accelfn.collectives import by_gloo
from accelfn.world import World


def reduce_by_gloo(zero: Any, ranks: World) -> None:
    """Have DeepSpeed's optimizer of stage 1 or 2 send each rank what it keeps, and no more.

    Args:
        zero: the optimizer.
        ranks: the ranks.
    """
    everywhere = zero.allreduce_and_copy_with_multiple_ranks

    def reduce(
        bucket: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        bucket_ranks: Sequence[frozenset[int]],
        output_bucket: Sequence[torch.Tensor | None],
        divide: bool,
        **more: Any,
    ) -> None:
        several = any(len(each) > 1 for each in bucket_ranks)
        summed_apart = any(each is not None for each in output_bucket)
        converted = any(each.dtype != dtype for each in bucket)
        if several or summed_apart or converted or divide:
            named = {"bucket_ranks": bucket_ranks, "output_bucket": output_bucket}
            everywhere(bucket, dtype, divide=divide, **named, **more)
            return
        holders = [min(each) for each in bucket_ranks]
        by_gloo.reduce_to_holders_(bucket, holders, ranks.group)

    zero.allreduce_and_copy_with_multiple_ranks = reduce
