# SPDX-License-Identifier: Apache-2.0
"""Draws for tensors that ranks have parts of: each rank's part of what one would draw."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import shards
from accelfn.errors import ArgumentError

_DRAWS = torch.Tag.nondeterministic_seeded
"""By which torch knows its random operators."""


class WholeDraws(TorchDispatchMode):
    """Draws the whole where a tensor is split, and keeps this rank's part.

    torch draws the part, from generators that are alike on all ranks, so that the rows of one
    rank would have the noise of another's.

    Cost: while a tensor is drawn, its whole.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator of torch's, and another in the place of one that draws.

        Raises:
            ArgumentError: it draws by the values of a tensor that is split.
        """
        kwargs = kwargs or {}
        if _DRAWS not in func.tags or not any(map(_is_split, args)):
            return func(*args, **kwargs)
        like, *others = args
        name = func._schema.name.removeprefix("aten::")
        fills = name.endswith("_")
        if not (fills or name.endswith("_like")) or any(map(_is_split, others)):
            msg = (
                f"torch's {name} draws by the values of a tensor that is split over the ranks,"
                " and each has a part of them. Draw numbers and compare them, as in"
                " torch.rand_like(tensor) < probability."
            )
            raise ArgumentError(msg)
        part = shards.local(like)
        whole = torch.empty(like.shape, dtype=like.dtype, device=part.device)
        drawn = _part(func(whole, *others, **kwargs), like)
        if fills:
            part.copy_(drawn)
            return like
        return shards.with_local(like, shards.padded(drawn, shards.room(part)))


def _is_split(tensor: Any) -> bool:
    """Whether it is a DTensor, and no sum of which each rank has a part."""
    placements = tensor.placements if shards.is_shard(tensor) else ()
    return bool(placements) and not any(each.is_partial() for each in placements)


def _part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return what a rank has of a whole that lies as another tensor does."""
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - it is loaded by now
        compute_local_shape_and_global_offset,
    )

    size, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, min(begin, whole.shape[dim]), length)
    return whole
