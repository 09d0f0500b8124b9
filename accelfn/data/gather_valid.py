# SPDX-License-Identifier: Apache-2.0
"""`gather_valid`: what ranks computed of an update's samples, each sample once."""

from typing import Any

import torch

from accelfn.base import codec, tree
from accelfn.base.calling import called
from accelfn.collectives import all_gather, gather_bytes, join_rows
from accelfn.collectives.agreed import check_world
from accelfn.data import Batch
from accelfn.errors import BatchError
from accelfn.world import World


@called
def gather_valid(
    values: Any, batch: Batch, world: World, *, label: str = "gather_valid"
) -> Any:
    """Return the values of all ranks' samples, without filler, in the order of the batch.

    Args:
        values: of this rank's samples: a tree of tensors whose dim 0 is the samples (those of
            all its micro-batches, one after the other), or a list with one entry a sample:
            tensors of any shapes, strings, numbers, and dicts, lists and tuples of those.
        batch: from `af.batches`, in which those samples were.
        world: whose ranks took part.
        label: what the ranks are doing, for errors.

    Returns: a tree of tensors, or a list, with an entry for each sample of the update, the
    same on all ranks. Ranks that all took the whole batch give it once.

    Law: on any number of ranks, what one process has.

    Cost: a gather a dtype; lists travel as bytes, with no pickle. And one gather of two integers.

    Raises:
        BatchError: there are not as many values as samples.
        PlainDataError: a list has something else in it.
    """
    if not isinstance(batch, Batch):
        msg = (
            f"af.gather_valid(values, batch, world): got {type(batch).__name__}; expected a"
            " batch of af.batches. af.gather(values, world) takes any values."
        )
        raise BatchError(msg)
    check_world("af.gather_valid", world)
    ranks = world.batch
    kept = (~batch.filler).nonzero().reshape(-1)
    rows = len(batch.filler)
    _check_rows(values, rows)
    held = sum(weight or 0 for weight in batch.weights)
    mine = torch.tensor([len(kept), held], device=ranks.device)
    told = [each.tolist() for each in all_gather(mine, ranks, label=label)]
    counts = [int(row[0]) for row in told]
    # where nothing shards the data, every rank holds the whole batch
    alone = ranks.size == 1 or sum(row[1] for row in told) > batch.num_samples
    if isinstance(values, list):
        valid = [values[place] for place in kept.tolist()]
        data = codec.to_bytes(valid, path="values")
        parts = [data] if alone else gather_bytes(data, ranks, label=label)
        return [each for part in parts for each in codec.from_bytes(part)]
    valid = tree.tree_map(lambda leaf: leaf[kept.to(leaf.device)], values)
    return valid if alone else join_rows(valid, counts, ranks, label=label)


def _check_rows(values: Any, rows: int) -> None:
    if isinstance(values, list):
        found = [len(values)]
    else:
        leaves = tree.tree_leaves(values)
        found = [
            leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None
            for leaf in leaves
        ]
    if not found or any(count != rows for count in found):
        msg = (
            f"af.gather_valid: this rank's batch has {rows} samples (filler included), and"
            f" the values have {found}; expected tensors whose dim 0 is the samples, or a list"
            " with an entry for each."
        )
        raise BatchError(msg)
