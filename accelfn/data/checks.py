# SPDX-License-Identifier: Apache-2.0
"""What `Data` refuses, as it is made."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from accelfn.base.advice import advise
from accelfn.base.arguments import integer, is_integer, is_number
from accelfn.data.budget import budget
from accelfn.data.cursor import Cursor
from accelfn.data.cut import REMAINDERS, Cut
from accelfn.data.length import promised_length
from accelfn.data.orders.samplers import refuse_distributed
from accelfn.data.stream import stateless
from accelfn.errors import ArgumentError, BatchError, DataError

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_STREAMS_ONLY = ("sharded", "dispatch", "replay")
_FEW = 4
"""Samples in a list; fewer than rows that columns have."""
_MOST_WORKERS = 4096
"""More cores than a machine has."""


def is_batch_size(_owner: object, _field: object, value: object) -> None:
    """Refuse what is no number of samples, budget or None; attrs validators, all of these."""
    if value is None or isinstance(value, budget):
        return
    if not is_integer(value, 1):
        msg = (
            f"af.Data(batch_size={value!r}): expected an integer of at least 1, or"
            " af.budget(costs, limit=...)."
        )
        raise ArgumentError(msg)


def is_num_workers(owner: object, field: Any, value: object) -> None:
    """Refuse what is no number of processes, and more than there can be."""
    integer(0, "a number of processes")(owner, field, value)
    if is_integer(value, _MOST_WORKERS + 1):
        msg = (
            f"af.Data(num_workers={value}): expected {_MOST_WORKERS} processes at most, and"
            " no more than this one may use cores."
        )
        raise ArgumentError(msg)


def is_remainder(_owner: object, _field: object, value: object) -> None:
    """Refuse any other word."""
    if value not in REMAINDERS:
        msg = (
            f"af.Data(remainder={value!r}): expected one of"
            f" {', '.join(map(repr, REMAINDERS))}."
        )
        raise ArgumentError(msg)


def is_duration(_owner: object, _field: object, value: object) -> None:
    """Refuse what is no time to wait."""
    if not is_number(value) or not 0 < value < float("inf"):
        msg = (
            f"af.Data(timeout={value!r}): expected a finite number of seconds above 0."
        )
        raise ArgumentError(msg)


def is_text(_owner: object, field: Any, value: object) -> None:
    """Refuse anything but text and None."""
    if value is not None and not isinstance(value, str):
        msg = f"af.Data({field.name}={value!r}): expected a string, or None."
        raise ArgumentError(msg)


def is_order(value: Any) -> bool:
    """Whether it is an order, and not a function that says one."""
    return hasattr(value, "of_epoch") and hasattr(value, "num_samples")


def check_options(data: "Data") -> None:
    """Refuse options that cannot be together, whatever the dataset."""
    if data.collate is not None and not callable(data.collate):
        msg = f"af.Data(collate={data.collate!r}): expected a function."
        raise ArgumentError(msg)
    if isinstance(data.dataset, type(data)):
        msg = f"af.Data: a {type(data).__name__} cannot be read by index; give its dataset."
        raise DataError(msg)
    _check_loader(data.dataset)
    _check_order(data)
    _check_batching(data)


def check_indexed(data: "Data") -> None:
    """Refuse what does not go with a dataset that is read by index."""
    given = [name for name in _STREAMS_ONLY if getattr(data, name)]
    if given:
        msg = (
            f"af.Data({given[0]}=True): {type(data.dataset).__name__} is read by index,"
            " not a stream; leave it out."
        )
        raise ArgumentError(msg)
    if len(data.source) == 0:
        msg = f"af.Data: the dataset ({type(data.dataset).__name__}) is empty."
        raise DataError(msg)
    _warn_of_columns(data.dataset)
    n = len(data)
    if isinstance(data.batch_size, budget):
        data.batch_size.check(len(data.source))
    if isinstance(data.batch_size, int) and not data.updates_per_epoch:
        msg = (
            f'af.Data(batch_size={data.batch_size}, remainder="drop"): the dataset'
            f" has {n} samples, so every batch would be dropped."
            " Take a smaller batch_size."
        )
        raise DataError(msg)


def _warn_of_columns(dataset: Any) -> None:
    """Say if a list of samples looks like one of columns, as inputs and targets."""
    if not isinstance(dataset, list):
        return
    rows = cast("list[Any]", dataset)
    are_tensors = all(isinstance(each, torch.Tensor) and each.ndim for each in rows)
    if not 2 <= len(rows) <= _FEW or not are_tensors:
        return
    lengths = {each.shape[0] for each in rows}
    if len(lengths) == 1 and (length := lengths.pop()) > _FEW:
        advise(
            f"af.Data([...]): a list is one of samples, and this one has {len(rows)}, tensors"
            f" of {length} rows each. If these are columns, as inputs and targets, give a"
            " tuple, af.Data((inputs, targets)); if they are samples, torch.stack(samples)."
        )


def _check_loader(dataset: Any) -> None:
    """Refuse a DataLoader whose batches would be taken for samples."""
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        kind = type(cast("Any", dataset)).__name__
        msg = (
            f"af.Data: a {kind} gives batches, and samples are expected. Give"
            " af.Data.from_loader(loader), or TrainState.create(data=loader); as a stream"
            f" of samples, make the {kind} with batch_size=None."
        )
        raise ArgumentError(msg)


def _check_order(data: "Data") -> None:
    order: Any = data.order
    is_uncalled = isinstance(order, type) and is_order(order)  # orders.weighted
    if order is None or ((callable(order) or is_order(order)) and not is_uncalled):
        return
    msg = (
        f"af.Data(order={order!r}): expected a function (seed, epoch, n) -> indices, or"
        " what one of af.orders returns. Give a torch sampler to a DataLoader, and that"
        " to af.Data.from_loader."
    )
    raise ArgumentError(msg)


def _check_batching(data: "Data") -> None:
    if (data.batch_size is None) == (data.batch_sampler is None):
        neither = data.batch_size is None
        given = (
            "neither batch_size= nor batch_sampler="
            if neither
            else "both batch_size= and batch_sampler="
        )
        msg = f"af.Data: got {given}; give one of the two."
        raise ArgumentError(msg)
    if data.order is not None and data.shuffle:
        msg = (
            "af.Data(shuffle=True, order=...): an order of your own is not shuffled"
            " again. Give one of the two."
        )
        raise ArgumentError(msg)
    if data.batch_sampler is not None:
        kind = type(data.batch_sampler).__name__
        if not all(hasattr(data.batch_sampler, m) for m in ("__iter__", "__len__")):
            msg = (
                f"af.Data(batch_sampler=...): {kind} is not iterable, or has no length;"
                " expected lists of indices, or an object with __iter__ and __len__"
                " that yields them."
            )
            raise ArgumentError(msg)
        refuse_distributed(data.batch_sampler)
        if data.order is not None or data.shuffle or data.remainder != "short":
            msg = (
                "af.Data(batch_sampler=...): it says which samples come in which batch;"
                " leave out order=, shuffle= and remainder=."
            )
            raise ArgumentError(msg)
    if isinstance(data.batch_size, budget) and data.remainder != "short":
        msg = (
            f"af.Data(batch_size=af.budget(...), remainder={data.remainder!r}): a batch"
            " is as large as it is; leave remainder out."
        )
        raise ArgumentError(msg)


def check_stream(data: "Data") -> None:
    """Refuse what does not go with a stream."""
    kind = type(data.dataset).__name__
    if isinstance(data.dataset, (set, frozenset)):
        msg = f"af.Data: a {kind} has no order; give it as a sorted list."
        raise DataError(msg)
    if isinstance(data.dataset, Iterator):
        msg = (
            f"af.Data: a {kind} can be read once only; expected an object whose __iter__"
            " begins anew, as an IterableDataset's."
        )
        raise DataError(msg)
    ordered = data.shuffle or data.order is not None
    if ordered or not isinstance(data.batch_size, int):
        msg = (
            f"af.Data: {kind} is a stream, which comes in an order of its own. Give an"
            " integer batch_size, and no shuffle=, order= or batch_sampler=; shuffle in"
            " the stream itself."
        )
        raise ArgumentError(msg)
    if data.sharded and (data.dispatch or data.remainder != "short"):
        msg = (
            "af.Data(sharded=True): each rank reads samples of its own, of which the"
            " last batches are short; leave out dispatch= and remainder=."
        )
        raise ArgumentError(msg)
    if data.num_workers and (data.dispatch or isinstance(data.dataset, DataLoader)):
        msg = (
            f"af.Data(num_workers={data.num_workers}): one process reads this stream;"
            " leave it out, or let the stream itself have workers."
        )
        raise ArgumentError(msg)
    if promised_length(data.dataset) == 0:
        msg = f"af.Data: the dataset ({kind}) is empty."
        raise DataError(msg)


def check_sample(start: Cursor, cut: Cut) -> None:
    """Refuse a cursor from which no batch of its epoch is left."""
    if not cut.num_batches(start.samples):
        msg = (
            f"The cursor stands at sample {start.samples} of epoch {start.epoch}, but an"
            f" epoch of this data has {cut.end(0)} in its batches, and none is left. Was the"
            " dataset or its batch size changed?"
        )
        raise BatchError(msg)


def check_stream_start(data: "Data", start: Cursor) -> None:
    """Refuse a cursor at which a stream cannot be put."""
    if start.samples == 0 or start.memory is not None:
        return
    if data.sharded:
        msg = (
            f"af.Data(sharded=True): the cursor at sample {start.samples} of epoch"
            f" {start.epoch} does not say where each rank's stream"
            f" ({type(data.dataset).__name__}) stands. Take the cursor of a batch or of"
            " af.load; af.seek knows none."
        )
        raise DataError(msg)
    if not data.replay:
        raise DataError(stateless(data.dataset, start))
