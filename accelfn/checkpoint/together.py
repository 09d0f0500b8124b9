# SPDX-License-Identifier: Apache-2.0
"""`together`: ranks that have parts of one model read a checkpoint all, or none of them does."""

import json
from collections.abc import Callable
from typing import TypeVar

from accelfn.checkpoint.commit import told
from accelfn.collectives import gather_text
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.state.state import TrainState

T = TypeVar("T")


def together(state: TrainState, read: Callable[[], T]) -> T:
    """Return what this rank reads; of a split model, once all ranks have read theirs.

    What comes next gathers parts, and a rank that could not read its file would let the others
    wait for it.

    Args:
        state: says whether the model is split.
        read: talks to no other rank.

    Cost: two small gathers where the model is split, else none.

    Raises:
        CheckpointCorruptError: another rank's file is missing, or has changed.
        CheckpointError: another rank could not read for another reason.
        Exception: what `read` raised on this rank.
    """
    if state.definition.layout is None:
        return read()
    outcome: T | Exception
    try:
        outcome, text = read(), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks are told
        is_corrupt = isinstance(error, CheckpointCorruptError)
        outcome, text = error, json.dumps([is_corrupt, told(error)])
    texts = gather_text(text, state.world, label="load: read files")
    if isinstance(outcome, Exception):
        raise outcome
    for rank, failed in enumerate(texts):
        if failed:
            is_corrupt, why = json.loads(failed)
            kind = CheckpointCorruptError if is_corrupt else CheckpointError
            msg = f"Rank {rank} could not read its part, so no rank loads: {why}"
            raise kind(msg)
    return outcome
