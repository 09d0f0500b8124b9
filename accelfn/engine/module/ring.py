# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence of which each rank has a part: keys and values go round a ring.

Each rank keeps its queries, and passes keys and values on to the next, until all have met.
In the backward pass keys and values go round once more, and their gradients behind them.

Under a causal mask early positions see little and late ones much, so each rank has a piece
from the front and one as far from the end: at each meeting but that with itself a rank then
computes half a block, whoever it meets (the order of "zigzag" ring attention).
"""

from typing import Any, cast

import attrs
import torch
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable

from accelfn.base.contexts import NOTHING
from accelfn.collectives.around import Homewards, around, owners
from accelfn.engine.module.attention import HEADS, POSITIONS, Attention
from accelfn.engine.module.blocks import Block, finite, join, wide
from accelfn.errors import LossError
from accelfn.world import World

_LABEL = "context_parallel: keys and values round a ring"
_ALL = slice(None)


class Ring:
    """The way by a ring: each rank attends with its positions, of all heads, to everybody's.

    Attributes:
        num_pieces: into how many pieces a sequence is cut.
        pieces: which of them this rank has, in this order.
    """

    def __init__(self, ranks: World) -> None:
        """Take the ranks that have the parts of a sequence, in order."""
        self._ranks = ranks
        self.num_pieces, self.pieces = 2 * ranks.size, _pieces(ranks.rank, ranks.size)

    def attend(self, given: Attention) -> torch.Tensor:
        """Return what this rank's positions see.

        Raises:
            LossError: heads or samples differ, a mask is not for all positions, or something
                is to be dropped.
        """
        _check(given)
        three = [_as_autocast(each) for each in given.three.values()]
        scale = three[0].shape[-1] ** -0.5 if given.scale is None else given.scale
        meetings = _Meetings(self._ranks, is_causal=given.is_causal, scale=scale)
        masks = self._masks(given, three[0].dtype)
        return cast("Any", _Attention).apply(meetings, *three, *masks)

    def _masks(self, given: Attention, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return what is added to products at each meeting."""
        size = self._ranks.size
        lengths = [each.shape[POSITIONS] * size for each in (given.query, given.key)]
        given.check_mask(*lengths)
        mask = given.attn_mask
        if mask is None:
            return [None] * size
        if mask.dtype is torch.bool:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = zeros.masked_fill(~mask, -torch.inf)
        mask = _as_autocast(mask)[(None,) * (4 - mask.ndim)]
        rows = _of_pieces(mask, -2, self.num_pieces, self.pieces)
        # of a row that hides all by a large number, the logarithm of a sum would be that number
        if rows.shape[-1]:
            rows = rows - finite(rows.detach().amax(-1, keepdim=True))
        return [
            _of_pieces(rows, -1, self.num_pieces, _pieces(owner, size))
            for owner in owners(self._ranks)
        ]


def _pieces(rank: int, size: int) -> tuple[int, int]:
    """Return which of twice as many pieces as ranks are a rank's."""
    return rank, 2 * size - 1 - rank


def _of_pieces(
    mask: torch.Tensor, dim: int, num: int, pieces: tuple[int, int]
) -> torch.Tensor:
    if mask.shape[dim] == 1:
        return mask
    cut = mask.chunk(num, dim)
    return torch.cat([cut[piece] for piece in pieces], dim)


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which autocast would have attention computed."""
    kind = tensor.device.type
    if tensor.dtype is torch.float64 or not is_autocast_available(kind):
        return tensor
    enabled = torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if enabled else tensor


def _check(given: Attention) -> None:
    given.check_dims()
    query, key, value = given.three.values()
    if given.dropout_p:
        msg = (
            f"af.context_parallel(ring=True): attention is to drop a share of"
            f" {given.dropout_p:g} of what it sees, and each meeting of the ring would draw"
            " anew. Set dropout_p=0, or leave out ring."
        )
        raise LossError(msg)
    if given.is_causal and given.attn_mask is not None:
        msg = (
            "af.context_parallel(ring=True): attention is called with an attn_mask and with"
            " is_causal=True. Give one of the two: let the mask hide what is to come."
        )
        raise LossError(msg)
    shared_by, rest = divmod(query.shape[HEADS], max(key.shape[HEADS], 1))
    is_fit = rest == 0 and (shared_by == 1 or given.enable_gqa)
    is_fit = is_fit and key.shape[: POSITIONS + 1] == value.shape[: POSITIONS + 1]
    if not is_fit or query.shape[0] != key.shape[0]:
        msg = (
            f"af.context_parallel(ring=True): a query of shape {tuple(query.shape)} cannot"
            f" attend to a key of {tuple(key.shape)} with a value of {tuple(value.shape)}. Give"
            " tensors of as many samples and heads, and a value for each key; or, with"
            " enable_gqa=True, a query of a multiple of the heads."
        )
        raise LossError(msg)
    num_queries, num_keys = query.shape[POSITIONS], key.shape[POSITIONS]
    has_places = given.is_causal or given.attn_mask is not None
    is_odd = has_places and (num_queries % 2 or num_keys % 2)
    if is_odd or (given.is_causal and num_queries != num_keys):
        msg = (
            f"af.context_parallel(ring=True): this rank's part has {num_queries} queries and"
            f" {num_keys} keys. Under a mask a part is two pieces of one length, and"
            " is_causal=True wants a key for each query: attend with one of each for every"
            " position of the part."
        )
        raise LossError(msg)


@attrs.frozen
class _Meetings:
    """What is computed where a rank's queries meet each rank's keys."""

    ranks: World
    is_causal: bool = attrs.field(kw_only=True)
    scale: float = attrs.field(kw_only=True)

    def places(self, owner: int, length: int) -> tuple[slice, slice]:
        """Return which of so many queries see which keys of a rank.

        Under a causal mask a rank's first piece sees the first pieces of ranks before it, and
        no second one; its second piece sees all first pieces, and the second ones of ranks
        behind it, which are before it in the sequence. With its own keys all is in order.
        """
        half = length // 2
        if not self.is_causal or owner == self.ranks.rank:
            return _ALL, _ALL
        if owner < self.ranks.rank:
            return _ALL, slice(half)
        return slice(half, None), _ALL

    def block(
        self,
        owner: int,
        query: torch.Tensor,
        pair: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
    ) -> Block:
        """Return the block that is computed."""
        rows, columns = self.places(owner, query.shape[POSITIONS])
        key, value = (each[:, :, columns] for each in pair)
        is_causal = self.is_causal and owner == self.ranks.rank
        return Block(
            query[:, :, rows], key, value, mask, is_causal=is_causal, scale=self.scale
        )


class _Attention(torch.autograd.Function):
    """Attention to the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, meetings: _Meetings, *given: torch.Tensor | None
    ) -> torch.Tensor:
        query, key, value, *masks = cast("tuple[torch.Tensor, ...]", given)
        ranks, length = meetings.ranks, query.shape[POSITIONS]
        held = zip(
            owners(ranks), around((key, value), ranks, label=_LABEL), strict=True
        )
        with _plainly(query):
            owner, pair = next(held)  # its own keys, which all queries meet
            seen, lse = map(
                wide, meetings.block(owner, query, pair, masks[0]).attended()
            )
            for (owner, pair), mask in zip(held, masks[1:], strict=True):
                found = meetings.block(owner, query, pair, mask).attended()
                rows, _ = meetings.places(owner, length)
                join(seen[:, :, rows], lse[:, :, rows], *map(wide, found))
        seen = seen.to(query.dtype)
        ctx.meetings = meetings
        ctx.save_for_backward(query, key, value, seen, lse, *masks)
        return seen

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: torch.Tensor
    ) -> Any:
        query, key, value, seen, lse, *masks = ctx.saved_tensors
        meetings: _Meetings = ctx.meetings
        ranks, length = meetings.ranks, query.shape[POSITIONS]
        of_query = torch.zeros_like(wide(query))
        home = Homewards((wide(key), wide(value)), ranks, label=_LABEL)
        of_masks: list[torch.Tensor | None] = []
        learned = ctx.needs_input_grad[-ranks.size :]
        held = zip(
            owners(ranks), around((key, value), ranks, label=_LABEL), strict=True
        )
        with _plainly(query):
            for hop, (owner, pair) in enumerate(held):
                block = meetings.block(owner, query, pair, masks[hop])
                rows, columns = meetings.places(owner, length)
                given = (each[:, :, rows] for each in (upstream, seen, lse))
                if learned[hop]:
                    *three, of_products = block.gradients_with_mask(*given)
                    of_masks.append(of_products.sum_to_size(masks[hop].shape))
                else:
                    three = block.gradients(*given)
                    of_masks.append(None)
                of_query[:, :, rows] += three[0]
                home.add(three[1:], columns)
        of_three = (of_query, *home.arrived())
        asked = zip(
            of_three + tuple(of_masks), (query, key, value, *masks), strict=True
        )
        return None, *(g if g is None else g.to(like.dtype) for g, like in asked)


def _plainly(tensor: torch.Tensor) -> Any:
    """Return a block without autocast, whose work is done."""
    kind = tensor.device.type  # on meta there is none
    return (
        torch.autocast(kind, enabled=False) if is_autocast_available(kind) else NOTHING
    )
