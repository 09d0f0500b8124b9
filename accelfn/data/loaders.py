# SPDX-License-Identifier: Apache-2.0
"""Readers: turn dataset indices into batches, here or in DataLoader workers."""

import gc
import multiprocessing
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch.utils.data._utils import signal_handling

from accelfn.base import draws, system, tree
from accelfn.base.arguments import advise
from accelfn.base.devices import pin
from accelfn.data.order import Indices
from accelfn.data.sources import Source, collate_samples
from accelfn.errors import DataError

Collate: TypeAlias = Callable[[list[Any]], Any]


@attrs.frozen
class Task:
    """A reading task: the indices of a micro-batch.

    Attributes:
        key: the key of the epoch's random numbers.
        first: the epoch position of the first sample.
        indices: the dataset indices of the samples.
    """

    key: int
    first: int
    indices: Indices


@attrs.frozen
class Fetch:
    """Read and collate samples, also in worker processes.

    Random numbers of a dataset (augmentation) from the default generators of torch, numpy or
    Python are a function of (seed, epoch, position). So they do not depend on workers, ranks
    or micro-batches, and joined datasets have different ones. A dataset's `__getitems__`
    draws for all samples at once, from the first position.
    """

    source: Source
    collate: Collate | None

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's, so that nothing is drawn."""
        return self.collate is None and self.source.is_pure

    def __call__(self, task: Task) -> Any:
        """Return the collated samples."""
        if self.is_pure:
            return self.source.batch(task.indices, skip_seeding)
        with draws.seeded() as drawing:

            def begin(place: int) -> None:
                drawing.begin(draws.fold(task.key, task.first + place))

            if self.collate is None:
                return self.source.batch(task.indices, begin)
            samples = self.source.samples(task.indices, begin)
            return collate_samples(self.collate, samples, task.indices)


def skip_seeding(_place: int) -> None:
    """Seed no generator, because reading draws no random numbers."""


# Worker processes of torch's loaders, and the errors when a worker fails.
#
# torch raises the end of a worker at any point of the main process, for example in the
# middle of a step. accelfn raises it at the next batch, and names the samples. For this, and to
# end the workers, it needs private attributes of torch's iterators.


_torch: Any = signal_handling
_starting = threading.local()
"""Whether this thread starts workers."""


@attrs.frozen
class Place:
    """A reader's rank, and the update of its first batch, for errors."""

    rank: int
    size: int
    update: int


def advise_of_workers(num_workers: int) -> None:
    """Warn of more worker processes than usable cores."""
    num_cores = system.num_cores()
    if num_workers > num_cores:
        advise(
            f"af.Data(num_workers={num_workers}): this process may use {num_cores} cores, so"
            " its workers wait for one another, and training for them. Write"
            f" num_workers={num_cores} or fewer."
        )


@contextmanager
def mute_worker_warnings() -> Generator[None]:
    """Hide torch's warnings of the number of workers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def start_method(num_workers: int) -> str | None:
    """Return how to start workers: by a fork on Linux, unless the program has chosen.

    From 3.14 on Python would let a server start them. Then they are not children of this
    process, which would notice the end of a worker only after the timeout.
    """
    is_chosen = multiprocessing.get_start_method(allow_none=True) is not None
    return "fork" if num_workers and not is_chosen and sys.platform == "linux" else None


def watch_workers(
    loader: Any, *, timeout: float, place: Place, due: Callable[[], tuple[int, str]]
) -> Iterator[Any]:
    """Yield the results of a loader's workers, and end the workers.

    Args:
        loader: a loader of torch or torchdata with workers.
        timeout: the loader's timeout in seconds.
        place: the rank and the update of the first batch.
        due: returns the number of updates read, and a sentence about the samples being read.

    Raises:
        DataError: a worker could not be started, was killed or did not answer. Errors of a
            dataset are raised unchanged.
    """
    values = _start_iterator(loader, place)
    try:
        while True:
            try:
                with _listening(values):
                    value = next(values)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                reason = _explain_failure(error, timeout)
                if reason is None:
                    raise
                if "timed out" in str(error):
                    for (
                        worker
                    ) in values._workers:  # or it would wait for one that hangs
                        worker.terminate()
                num_read, being_read = due()
                msg = (
                    f"A data worker of rank {place.rank} of {place.size} failed while the"
                    f" batch of update {place.update + num_read} was due: {reason}\n{being_read}"
                )
                raise DataError(msg) from error
            yield value
    finally:
        # left to the garbage collector, it waits 5 s for each worker
        values._shutdown_workers()


def _start_iterator(loader: Any, place: Place) -> Any:
    """Create a loader's iterator, which starts the workers."""
    try:
        with mute_worker_warnings(), _without_garbage():
            # torch warns of the error below
            warnings.filterwarnings("ignore", "Got pickle error")
            return iter(loader)
    except (PicklingError, AttributeError, TypeError, OSError, EOFError) as error:
        how = multiprocessing.get_start_method(allow_none=True)
        if how in (None, "fork"):  # a fork pickles nothing
            raise
        msg = (
            f"A data worker of rank {place.rank} of {place.size} could not be started for"
            f" update {place.update}: {error!r}. It is started by {how!r}, as the program or"
            " a package of it says, so the dataset is pickled for it. Define functions and"
            " classes in a module, not within a function; or call"
            ' multiprocessing.set_start_method("fork") when the program begins.'
        )
        raise DataError(msg) from error


@contextmanager
def _without_garbage() -> Generator[None]:
    """Keep workers that are forked in the block from collecting this process's garbage.

    Only this process can finalize it. For example, a process group of Gloo joins its threads,
    and a fork does not have them: to collect the group there ends the worker, or hangs.
    """
    _starting.here = True
    try:
        yield
    finally:
        _starting.here = False


def _leave_garbage() -> None:
    if getattr(_starting, "here", False):
        gc.freeze()


system.call_after_fork(_leave_garbage)


def _explain_failure(error: Exception, timeout: float) -> str | None:
    """Return why a worker ended; None if a dataset raised the error."""
    text = str(error)
    if "DataLoader timed out" in text:
        return (
            f"it gave nothing for {timeout:g} s, its timeout. It hangs, or its samples cannot"
            " be sent to another process; then its own output says so."
        )
    if "DataLoader worker (pid" in text:
        return text
    if isinstance(error, (OSError, EOFError)) and "DataLoader worker" not in text:
        return f"it ended before its samples were received ({error!r})."
    return None


@contextmanager
def _listening(values: Any) -> Generator[None]:
    """Let torch's signal handler raise the end of a worker, inside a `with` block only."""
    if not values._worker_pids_set:
        pids = tuple([worker.pid for worker in values._workers])
        _torch._set_worker_pids(id(values), pids)
        values._worker_pids_set = True
    try:
        for worker, is_expected in zip(
            values._workers, values._workers_status, strict=True
        ):
            if is_expected and worker.exitcode is not None:
                msg = f"DataLoader worker (pid {worker.pid}) {_ending(worker.exitcode)}"
                raise RuntimeError(msg)
        yield
    finally:
        if values._worker_pids_set:
            _torch._remove_worker_pids(id(values))
            values._worker_pids_set = False


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited unexpectedly with exit code {exitcode}."
    return f"is killed by signal: {signal.Signals(-exitcode).name}."


# Copy batches to the device, the next batch while this one is computed on.


T = TypeVar("T")


def on_device(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    """Yield the pairs with their values on a device.

    To an accelerator the next pair is copied from pinned memory on a side stream, while the
    caller computes on this one; the caller's stream waits for the copy.
    """
    if device.type == "cpu":
        return pairs
    # mps has one stream, and the host's memory; meta has neither
    if device.type in ("mps", "meta"):
        return ((portion, _move(values, device)) for portion, values in pairs)
    return _prefetch(pairs, device)


def _move(values: list[Any], device: torch.device) -> list[Any]:
    return [tree.to_device(value, device) for value in values]


def _prefetch(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    side = torch.Stream(device)

    def pin_leaf(leaf: Any) -> Any:
        return pin(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    def copy_next() -> tuple[T, list[Any]] | None:
        pair = next(pairs, None)
        if pair is None:
            return None
        portion, values = pair
        with side:
            pinned_values = [tree.tree_map(pin_leaf, value) for value in values]
            return portion, [
                tree.to_device(v, device, opaque=False) for v in pinned_values
            ]

    pair = copy_next()
    while pair is not None:
        portion, values = pair
        current = torch.accelerator.current_stream(device)
        current.wait_stream(side)
        for leaf in tree.tensor_leaves(values):
            if not leaf.is_cpu:  # the lengths of a packed sequence are
                # the caller's stream uses memory that the side stream allocated
                leaf.record_stream(current)
        pair = copy_next()
        # tensors inside unknown objects are moved on the caller's stream
        yield portion, _move(values, device)
