# SPDX-License-Identifier: Apache-2.0
"""Whether ranks share the work: looked at once, at the first batch of a definition.

Replicas that all see the same samples agree, and nothing else shows that each does the work
of all.
"""

from operator import is_
from typing import Any

import torch

from accelfn.base import tree
from accelfn.base.advice import advise
from accelfn.base.contexts import own_modes
from accelfn.collectives import all_gather, checksum
from accelfn.data import Batch
from accelfn.engine.building import engine_of
from accelfn.state.state import TrainState


def check_loaded(state: TrainState) -> None:
    """Say if a state was loaded into this one, which stayed as it was, and nobody kept it."""
    loaded = state.definition.cache.loaded
    if loaded is None or not state.world.is_main:
        return
    given, made = loaded
    if given() is state.lease and made() is None:
        advise(
            "af.load and CheckpointStore.restore return the saved state, and nothing keeps"
            " what the last one returned; this step takes the state that it was given, which"
            f" stands at update {state.step}. Write state = af.load(state, directory). If this"
            " state is meant, all is well."
        )


def check_first_batch(state: TrainState, batch: Any) -> None:
    """Say if every rank is about to train on all samples; in a world of 1, nothing.

    Cost: none but at the first batch of a definition. If that is a plain value under
    `shard_data`, of a state without data, an all-gather of 8 bytes.
    """
    definition = state.definition
    if definition.world.batch.size == 1 or definition.cache.saw_a_batch:
        return
    with own_modes(definition.world.device):
        engine_of(state)
    definition.cache.saw_a_batch = True
    is_sharded = definition.plan.num_shares > 1
    if not isinstance(batch, Batch):
        said = _of_value(state, batch) if is_sharded else None
    elif batch.start is None or not _is_whole(batch) or _has_own_stream(state):
        said = None
    elif is_sharded:
        said = _uncut(state, batch)
    else:
        said = _unshared(state)
    if said is not None and definition.world.is_main:
        advise(said)


def warn_of_values(state: TrainState, value: Any) -> None:
    """Warn of a second update of plain values: a loop that does not move the state's data.

    Values between batches are let be, as a replay of samples, and so is one value that is
    learned by heart.
    """
    cache, cursor = state.definition.cache, state.cursor
    if cache.saw_values or cursor.epoch or cursor.samples:
        return
    before, cache.last_value = cache.last_value, tree.tensor_leaves(value)
    if not (state.num_tried and before) or all(map(is_, before, cache.last_value)):
        return
    cache.last_value = []
    cache.saw_values = True
    if state.world.is_main:
        advise(
            "step(state, batch) gets values that are no batches of af.batches(state), so the"
            " state stays at the beginning of its data, and a resumed run reads them again;"
            " nor does af.shard_data() cut them. Write `for batch in af.batches(state,"
            " epochs=...):` and step(state, batch, noise) with the batch itself and anything"
            " else behind it. If a loader of your own is meant, leave out data=."
        )


def _is_whole(batch: Batch) -> bool:
    """Whether this rank has all samples of an update, of which others could have had some."""
    counted = sum(weight or 0 for weight in batch.weights)
    return counted == batch.num_samples > 1


def _has_own_stream(state: TrainState) -> bool:
    """Whether each rank reads a stream of its own, of which some may have ended."""
    return state.data is not None and state.data.sharded


def _of_value(state: TrainState, value: Any) -> str | None:
    """Return what is wrong with a plain value where batches are to be cut."""
    size = state.world.batch.size
    if state.data is not None or not _is_alike(value, state):
        return None  # `warn_of_values` warns of a value where the state has data
    return (
        f"step(state, batch) got the same value on all {size} ranks: af.shard_data() cuts"
        " batches of af.batches alone, so each rank trains on all samples, which is"
        f" {size} times the work for the result of one rank. Give the dataset to the state,"
        " TrainState.create(data=af.Data(dataset, batch_size=...)), and write `for batch in"
        " af.batches(state, epochs=...):`; or give each rank its part, af.split(value,"
        " world)."
    )


def _is_alike(value: Any, state: TrainState) -> bool:
    """Whether all ranks have a value of the same tensors."""
    batch = state.world.batch
    sums = [checksum(t) for t in tree.tensor_leaves(value) if _has_words(t)]
    # without any there is nothing to tell by: a number that no other rank has
    mine = checksum(torch.stack(sums)) if sums else torch.tensor(batch.rank)
    told = all_gather(mine.to(batch.device), batch, label="first batch")
    return len({int(each) for each in told}) == 1


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether ranks can be told apart by it: sparse and nested ones are several tensors."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.numel() > 1


def _uncut(state: TrainState, batch: Batch) -> str:
    size = state.world.batch.size
    return (
        f"This batch is not cut: its {batch.num_samples} samples are all on this rank, one"
        f" of {size} that af.shard_data() gives a part each. It is of another state, or was"
        " begun before this setup was given: write `for batch in af.batches(state):` with"
        " the state that is trained, made with world= and its setup."
    )


def _unshared(state: TrainState) -> str | None:
    """Return what is wrong with ranks that have the same data, and take all of it."""
    if not state.definition.cache.has_same_data:
        return None
    size = state.world.batch.size
    return (
        f"Nothing in the setup gives ranks their part: each of the {size} ranks trains on all"
        f" samples of every batch, which is {size} times the work for the result of one."
        " Write af.shard_data() into the setup, as in af.chain(af.shard_data(),"
        " af.wrap_ddp())."
    )
