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
from torch.overrides import TorchFunctionMode

from accelfn.collectives import naming
from accelfn.errors import LossError
from accelfn.world import World

_HEADS, _POSITIONS = 1, 2
_LABEL = "context_parallel: heads for positions"


class Exchanging(TorchFunctionMode):
    """Inside it, `F.scaled_dot_product_attention` sees all positions of this rank's heads."""

    def __init__(self, ranks: World) -> None:
        """Take the ranks that have the parts of a sequence, in order."""
        super().__init__()
        self._ranks = ranks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or attention as it is here."""
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(Attention(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            msg = (
                "af.context_parallel: nn.MultiheadAttention would attend to the positions of"
                " this rank alone. Compute query, key and value by layers of your own, and"
                " call F.scaled_dot_product_attention."
            )
            raise LossError(msg)
        return func(*args, **kwargs)

    def _attend(self, given: "Attention") -> torch.Tensor:
        ranks = self._ranks
        given.check(ranks)
        three = (given.query, given.key, given.value)
        query, key, value = exchanged(three, ranks, (_HEADS, _POSITIONS))
        mask = given.mask_of(query, key, ranks)
        options = attrs.asdict(given, recurse=False)
        options |= {"query": query, "key": key, "value": value, "attn_mask": mask}
        attended = F.scaled_dot_product_attention(**options)
        return exchanged((attended,), ranks, (_POSITIONS, _HEADS))[0]


@attrs.frozen
class Attention:
    """What `F.scaled_dot_product_attention` is called with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def check(self, ranks: World) -> None:
        """Refuse heads that cannot be shared out.

        Raises:
            LossError: they are no dim, or not as many as the ranks or a multiple of them.
        """
        for name in ("query", "key", "value"):
            shape = tuple(getattr(self, name).shape)
            if len(shape) != 4:
                msg = (
                    f"af.context_parallel: attention was called with a {name} of shape"
                    f" {shape}; expected (samples, heads, positions, features), of which heads"
                    " are shared out over the ranks."
                )
                raise LossError(msg)
            if shape[_HEADS] % ranks.size:
                msg = (
                    f"af.context_parallel: {shape[_HEADS]} heads of the {name}, of shape"
                    f' {shape}, cannot be shared out over {ranks.size} ranks along "cp". Take'
                    " a number of ranks that divides them."
                )
                raise LossError(msg)

    def mask_of(
        self, query: torch.Tensor, key: torch.Tensor, ranks: World
    ) -> torch.Tensor | None:
        """Return what of the mask is for this rank's heads.

        Raises:
            LossError: it is not for all positions.
        """
        mask = self.attn_mask
        if mask is None:
            return None
        whole = (query.shape[_POSITIONS], key.shape[_POSITIONS])
        if any(a not in (1, b) for a, b in zip(mask.shape[-2:], whole, strict=True)):
            msg = (
                f"af.context_parallel: attn_mask has the shape {tuple(mask.shape)}, and"
                f" attention goes over {whole[0]} x {whole[1]} positions, of which this rank"
                " has a part. Give is_causal=True, or a mask for all positions, such as a"
                " buffer of the model or one of fewer dims than seq_dim names."
            )
            raise LossError(msg)
        if mask.ndim > 2 and mask.shape[-3] > 1:
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
