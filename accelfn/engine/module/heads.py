# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence of which each rank has a part: heads are exchanged for positions.

Before attention each rank gives its positions of most heads away, and gets all positions of
its own heads; after it, back. Whatever else a model does goes position by position.
"""

from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from accelfn.collectives import naming
from accelfn.engine.module.attention import HEADS, POSITIONS, Attention
from accelfn.errors import LossError
from accelfn.world import World

_LABEL = "context_parallel: heads for positions"


class Heads:
    """The way by heads: each rank attends to all positions with a share of the heads.

    Attributes:
        num_pieces: into how many pieces a sequence is cut.
        pieces: which of them this rank has, in this order.
    """

    def __init__(self, ranks: World) -> None:
        """Take the ranks that have the parts of a sequence, in order."""
        self._ranks = ranks
        self.num_pieces, self.pieces = ranks.size, (ranks.rank,)

    def attend(self, given: Attention) -> torch.Tensor:
        """Return what this rank's positions see.

        Raises:
            LossError: heads cannot be shared out, or a mask is not for all positions.
        """
        ranks = self._ranks
        _check(given, ranks)
        query, key, value = exchanged(
            (given.query, given.key, given.value), ranks, (HEADS, POSITIONS)
        )
        given.check_mask(query.shape[POSITIONS], key.shape[POSITIONS])
        mask = _of_heads(given.attn_mask, ranks)
        options = attrs.asdict(given, recurse=False)
        options |= {"query": query, "key": key, "value": value, "attn_mask": mask}
        attended = F.scaled_dot_product_attention(**options)
        return exchanged((attended,), ranks, (POSITIONS, HEADS))[0]


def _check(given: Attention, ranks: World) -> None:
    """Refuse heads that are not as many as the ranks or a multiple of them."""
    given.check_dims()
    for name, tensor in given.three.items():
        if tensor.shape[HEADS] % ranks.size:
            msg = (
                f"af.context_parallel: {tensor.shape[HEADS]} heads of the {name}, of shape"
                f" {tuple(tensor.shape)}, cannot be shared out over {ranks.size} ranks along"
                ' "cp". Take a number of ranks that divides them, or'
                " af.context_parallel(ring=True), which shares no heads out."
            )
            raise LossError(msg)


def _of_heads(mask: torch.Tensor | None, ranks: World) -> torch.Tensor | None:
    """Return what of a mask is for this rank's heads."""
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        return mask.chunk(ranks.size, -3)[ranks.rank]
    return mask


def exchanged(
    tensors: Sequence[torch.Tensor], ranks: World, dims: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """Return tensors of which this rank has all of the second dim, and a part of the first.

    Before, it had all of the first and a part of the second. Its gradient is the way back.
    """
    return cast("Any", _Exchange).apply(ranks, dims, *tensors)


class _Exchange(torch.autograd.Function):
    """An all-to-all, in one call for several tensors of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, ranks: World, dims: tuple[int, int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.dims = ranks, dims
        given, taken = dims
        num = ranks.size
        rows = [torch.stack(tensor.chunk(num, given)) for tensor in tensors]
        sent = torch.cat([each.reshape(num, -1) for each in rows], dim=1)
        got = torch.empty_like(sent)
        with naming(_LABEL, ranks):
            dist.all_to_all_single(got, sent, group=ranks.group)
        parts = got.split([each[0].numel() for each in rows], dim=1)
        return tuple(
            torch.cat([*part.reshape(each.shape)], dim=taken)
            for part, each in zip(parts, rows, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given, taken = ctx.dims
        back = exchanged(gradients, ctx.ranks, (taken, given))
        return None, None, *back
