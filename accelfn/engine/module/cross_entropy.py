# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of scores, of which each rank along "tp" has those of some words.

As in Megatron-LM: of each token ranks exchange the largest score, the sum of exponentials, and
the score of the word that is due.
"""

from typing import Literal

import torch
import torch.distributed as dist

from accelfn.collectives import naming
from accelfn.engine.module import crossing
from accelfn.world import World


def cross_entropy(
    part: torch.Tensor,
    target: torch.Tensor,
    ranks: World,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return what `F.cross_entropy` does of all scores.

    Args:
        part: the scores of this rank's words, in the last dim.
        target: the number of the word that is due, for each row.
        ranks: those that have the words, in order.
        weight: of each word of the vocabulary.
        ignore_index: in the target, of a row that does not count.
        reduction: as torch's.
        label_smoothing: as torch's.
    """
    dtype, counts = part.dtype, target != ignore_index
    number, word = part.shape[-1] * ranks.size, target.masked_fill(~counts, 0)
    if part.element_size() < 4:  # as torch does inside
        part = part.float()
    part = part - _largest(part, ranks).unsqueeze(-1)
    told = [part.exp().sum(-1), _due(part, word, ranks)]
    if label_smoothing:
        own = None if weight is None else weight.chunk(ranks.size)[ranks.rank]
        told.append(part.sum(-1) if own is None else part @ own.to(part.dtype))
    total, due, *spread = crossing.summed(torch.stack(told), ranks)
    log, weights = total.log(), counts.to(part.dtype)
    if weight is not None:
        weights = weight[word].to(part.dtype) * weights
    each = (log - due) * weights
    for every in spread:
        of_words = number if weight is None else weight.sum()
        smooth = (of_words * log - every) / number
        each = (1 - label_smoothing) * each + label_smoothing * smooth
    each = each.masked_fill(~counts, 0)
    if reduction == "mean":
        each = each.sum() / weights.sum()
    elif reduction == "sum":
        each = each.sum()
    casts = not part.is_meta and torch.is_autocast_enabled(part.device.type)
    return each if casts else each.to(dtype)


def _largest(part: torch.Tensor, ranks: World) -> torch.Tensor:
    largest = part.detach().amax(-1)
    with naming("tensor_parallel", ranks):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.group)
    return largest


def _due(part: torch.Tensor, word: torch.Tensor, ranks: World) -> torch.Tensor:
    """Return the scores of the words that are due, on the rank that has them; 0 on others."""
    count = part.shape[-1]
    own = word - ranks.rank * count
    here = (own >= 0) & (own < count)
    is_word = (word >= 0) & (word < count * ranks.size)
    # what is no word stays out of bounds, where torch refuses it
    index = own.masked_fill(is_word & ~here, 0).unsqueeze(-1)
    return part.gather(-1, index).squeeze(-1).masked_fill(~here, 0)
