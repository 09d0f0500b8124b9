# SPDX-License-Identifier: Apache-2.0
"""Read the batches of a rank: by index or as a stream, in this process or in workers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.base.draws import is_plain, own_modes, span
from accelfn.data.loaders import (
    Fetch,
    Reading,
    Task,
    advise_of_workers,
    mute_worker_warnings,
    on_device,
    skip_seeding,
    watch_workers,
    worker_options,
)
from accelfn.data.plan import (
    Batch,
    Cursor,
    Filler,
    Pair,
    Plan,
    Portion,
    portions,
)
from accelfn.data.sources import format_indices
from accelfn.data.stream import Stream, log_replay, read_dispatched, read_sharded

if TYPE_CHECKING:
    from accelfn.data.dataset import Data


def read_batches(data: "Data", reading: Reading) -> Iterator[Batch]:
    """Yield the batches of this rank on its device.

    Torch modes of the caller, such as inference mode, do not apply while the dataset is read.
    """
    device = reading.world.device
    batches = _assemble_batches(
        on_device(_pairs_of(data, reading), device), reading.plan
    )
    while True:
        if is_plain():
            batch = next(batches, None)
        else:  # a step cannot use a tensor that was created in inference mode
            with own_modes(device), span("accelfn data"):
                batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _pairs_of(data: "Data", reading: Reading) -> Iterator[Pair]:
    """Yield this rank's portion of each update, with its values on the CPU."""
    if reading.world.is_main:
        advise_of_workers(data.num_workers)
    if data.is_stream:
        return _stream_pairs(data, reading)
    parts, fetch = _portions(data, reading), Fetch(data.source, data.collate)
    if not data.num_workers:
        return _read_here(parts, fetch)
    return _read_in_workers(parts, fetch, data, reading)


def _portions(data: "Data", reading: Reading) -> Iterator[Portion]:
    start, epochs = reading.start, reading.epochs
    while epochs is None or start.epoch < epochs:
        epoch = data.epoch(seed=reading.seed, number=start.epoch)
        yield from portions(epoch, reading.plan, start)
        start = Cursor(start.epoch + 1)


def _tasks_of(portion: Portion) -> list[Task]:
    """Return a reading task for each micro-batch."""
    # an empty share reads a sample of the same batch, as filler
    last = portion.start.samples + portion.num_samples - 1
    return [
        (portion.key, min(begin, last), indices)
        for (begin, _), indices in zip(portion.spans, portion.indices, strict=True)
    ]


def _read_here(parts: Iterable[Portion], fetch: Fetch) -> Iterator[Pair]:
    """Read in this process, when the caller needs the next batch."""
    if fetch.is_pure:
        gather = fetch.source.batch
        for portion in parts:
            yield portion, [gather(rows, skip_seeding) for rows in portion.indices]
        return
    for portion in parts:
        yield portion, [fetch(task) for task in _tasks_of(portion)]


def _read_in_workers(
    parts: Iterator[Portion], fetch: Fetch, data: "Data", reading: Reading
) -> Iterator[Pair]:
    """Read in the workers of a torch DataLoader; each task is a micro-batch.

    Raises:
        DataError: a worker was killed or did not answer. The message names its samples.
    """
    pending: deque[Portion] = deque()
    num_read, values = 0, list[Any]()

    def send_tasks() -> Iterator[Task]:
        for portion in parts:
            pending.append(portion)
            yield from _tasks_of(portion)

    def due() -> tuple[int, str]:
        rows = [indices for portion in pending for indices in portion.indices]
        lines = "\n".join(f"  {format_indices(row)}" for row in rows[:8])
        return (
            num_read,
            f"The workers were reading the samples at these dataset indices:\n{lines}",
        )

    for value in _watch(fetch, data, reading, due, send_tasks()):
        values.append(value)
        if len(values) == len(pending[0].spans):
            num_read += 1
            yield pending.popleft(), values
            values = []


def _stream_pairs(data: "Data", reading: Reading) -> Iterator[Pair]:
    if data.sharded:
        return read_sharded(data, reading)
    start = reading.start
    stream = Stream(data, reading.seed, reading.plan, start, reading.epochs)
    if start.samples and start.memory is None and reading.world.is_main:
        log_replay(data.dataset, start.samples)
    if data.dispatch:
        return read_dispatched(stream, reading.world)
    return (
        _read_stream_in_workers(stream, reading) if data.num_workers else iter(stream)
    )


def _read_stream_in_workers(stream: Stream, reading: Reading) -> Iterator[Pair]:
    """Read a stream in worker processes, which take turns: each reads every n-th update.

    Raises:
        DataError: a worker was killed or did not answer.
    """
    num_read, after = 0, reading.start

    def due() -> tuple[int, str]:
        place = f"sample {after.samples} of epoch {after.epoch}"
        return num_read, f"The workers were reading the stream from {place} on."

    for portion, values in _watch(stream, stream.data, reading, due):
        num_read, after = num_read + 1, portion.after
        yield portion, values


def _watch(
    dataset: Any,
    data: "Data",
    reading: Reading,
    due: Callable[[], tuple[int, str]],
    sampler: Any = None,
) -> Iterator[Any]:
    """Yield the items of a dataset that workers read."""
    with mute_worker_warnings():
        loader: Any = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_is,
            # without a generator, DataLoader would use the global random generator for a seed
            generator=torch.Generator().manual_seed(0),
            **worker_options(data),
        )
    return watch_workers(loader, reading, due)


def _as_is(value: Any) -> Any:
    return value


def _assemble_batches(pairs: Iterable[Pair], plan: Plan) -> Iterator[Batch]:
    """Yield a `Batch` for each portion; samples that do not count are marked as filler."""
    for portion, values in pairs:
        start, after, num_samples, spans, indices, num_own, _, shares = portion
        weights = tuple([high - low for low, high in spans])
        # positions after the end of the epoch repeat samples of the epoch's start
        filler: list[Filler] = [
            low == high or (high > num_own and np.arange(low, high) >= num_own)
            for low, high in spans
        ]
        yield Batch(
            micro_batches=tuple(values),
            weights=weights,
            start=start,
            cursor=after,
            num_samples=num_samples,
            parts_indices=indices,
            parts_filler=tuple(filler),
            shares=partial(plan.counts, num_samples)
            if shares is None
            else partial(list, shares),
        )
