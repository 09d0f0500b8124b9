# SPDX-License-Identifier: Apache-2.0
"""Dispatch: rank 0 reads a stream for all, and sends each rank its share.

For streams that only one process can read: a socket, a queue, a database's cursor. Tensors and
plain data travel; nothing is pickled.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from accelfn.base import codec
from accelfn.collectives import scatter_bytes
from accelfn.data.cursor import Cursor
from accelfn.data.epoch import Portion
from accelfn.data.plan import Plan
from accelfn.data.stream import Stream
from accelfn.errors import DataError
from accelfn.world import World

_LABEL = "dispatch of data"


def read_dispatched(
    stream: Stream, plan: Plan, start: Cursor, epochs: int | None, world: World
) -> Iterator[tuple[Portion, list[Any]]]:
    """Yield this rank's portions, read by rank 0 for all.

    Ranks that share a batch, along "cp" and "tp", are told by the first of them.

    Raises:
        DataError: on every rank, if rank 0 could not read.
    """
    ranks, sharers = world.batch, world.along("cp", "tp")
    updates = None
    if world.is_main:
        plans = [_of_rank(plan, rank) for rank in range(ranks.size)]
        updates = stream.portions(plans, start, epochs)
    while epochs is None or start.epoch < epochs:
        failure, payloads = None, None
        if updates is not None:
            try:
                cut, samples = next(updates)
                payloads = [
                    codec.to_bytes(_told(each, stream.values(each, samples)))
                    for each in cut
                ]
            except Exception as error:  # noqa: BLE001 - the others wait to be told
                failure = error
                payloads = [
                    codec.to_bytes({"failed": f"{type(error).__name__}: {error}"})
                ]
                payloads *= ranks.size
        copies = None
        if sharers.is_main:
            copies = [scatter_bytes(payloads, ranks, label=_LABEL)] * sharers.size
        received = codec.from_bytes(scatter_bytes(copies, sharers, label=_LABEL))
        if failure is not None:
            raise failure
        if "failed" in received:
            msg = f"Rank 0, which reads for all, could not: {received['failed']}"
            raise DataError(msg)
        portion = _heard(received)
        yield portion, received["values"]
        start = portion.after


def _of_rank(plan: Plan, rank: int) -> Plan:
    return attrs.evolve(
        plan, world_rank=rank, rank=rank if plan.num_shares > 1 else plan.rank
    )


def _told(portion: Portion, values: list[Any]) -> dict[str, Any]:
    return {
        "start": portion.start.to_plain(),
        "after": portion.after.to_plain(),
        "num_samples": portion.num_samples,
        "spans": [list(span) for span in portion.spans],
        "indices": [indices.tolist() for indices in portion.indices],
        "own": portion.own,
        "values": values,
    }


def _heard(told: dict[str, Any]) -> Portion:
    return Portion(
        start=Cursor(*told["start"]),
        after=Cursor(*told["after"]),
        num_samples=told["num_samples"],
        spans=tuple((begin, stop) for begin, stop in told["spans"]),
        indices=tuple(np.array(each, np.int64) for each in told["indices"]),
        own=told["own"],
        key=0,
    )
