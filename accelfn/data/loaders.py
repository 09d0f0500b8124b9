# SPDX-License-Identifier: Apache-2.0
"""Readers: turn dataset indices into batches, here or in DataLoader workers."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pickle import PicklingError
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch.utils.data._utils import signal_handling

from accelfn.base import draws, tree
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
            return self.source.batch(task.indices, nothing)
        with draws.seeded() as drawing:

            def begin(place: int) -> None:
                drawing.begin(draws.fold(task.key, task.first + place))

            if self.collate is None:
                return self.source.batch(task.indices, begin)
            samples = self.source.samples(task.indices, begin)
            return collate_samples(self.collate, samples, task.indices)


def nothing(_place: int) -> None:
    """Set no generator: nothing draws."""


# Worker processes of torch's loaders: what they raise, and what is said when one fails.
#
# torch raises the end of a worker wherever the main process happens to be, in the middle of
# a step, say. Here it is raised where a batch is asked for, with what was being read. This
# and ending the workers needs attributes of torch's iterators that are not public.


_torch: Any = signal_handling
_starting = threading.local()
"""Whether a thread starts workers."""


@attrs.frozen
class Place:
    """Where reading happens, for errors: a rank, and the update that the first batch is for."""

    rank: int
    size: int
    update: int


def say_too_many(num_workers: int) -> None:
    """Warn of more processes than this one may use cores."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    # of the process: threads, as simulated ranks are, may be kept to fewer
    num_cores = len(affinity(os.getpid())) if affinity else os.cpu_count() or 1
    if num_workers > num_cores:
        advise(
            f"af.Data(num_workers={num_workers}): this process may use {num_cores} cores, so"
            " its workers wait for one another, and training for them. Write"
            f" num_workers={num_cores} or fewer."
        )


@contextmanager
def nothing_said() -> Generator[None]:
    """Let torch say nothing of the number of workers, as it does of a new loader, and later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def start_method(num_workers: int) -> str | None:
    """Return how workers are started: a fork on Linux, on any Python, if nobody said otherwise.

    From 3.14 on Python would have a server start them. They would not be children of this
    process, so it would hear of the end of one when the timeout is over, and not at once.
    """
    is_said = multiprocessing.get_start_method(allow_none=True) is not None
    return "fork" if num_workers and not is_said and sys.platform == "linux" else None


def watch_workers(
    loader: Any, *, timeout: float, place: Place, due: Callable[[], tuple[int, str]]
) -> Iterator[Any]:
    """Yield the results of a loader's workers, and end the workers.

    Args:
        loader: of torch or torchdata, with workers.
        timeout: that the loader has, in seconds.
        place: where this is.
        due: says how many updates have been read, and what is being read.

    Raises:
        DataError: a worker could not be started, was killed or did not answer. What a
            dataset raises is raised as it is.
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
                said = _failure(error, timeout)
                if said is None:
                    raise
                if "timed out" in str(error):
                    _terminate(values)
                num_read, being_read = due()
                msg = (
                    f"A data worker of rank {place.rank} of {place.size} failed while the"
                    f" batch of update {place.update + num_read} was due: {said}\n{being_read}"
                )
                raise DataError(msg) from error
            yield value
    finally:
        # left to the garbage collector, it waits 5 s for each worker
        values._shutdown_workers()


def _start_iterator(loader: Any, place: Place) -> Any:
    """Create a loader's iterator, which starts the workers."""
    try:
        with nothing_said(), _leaving_garbage():
            # torch says in a warning what the error below says
            warnings.filterwarnings("ignore", "Got pickle error")
            return iter(loader)
    except (PicklingError, AttributeError, TypeError, OSError, EOFError) as error:
        how = multiprocessing.get_start_method(allow_none=True)
        if how in (None, "fork"):  # which sends nothing
            raise
        msg = (
            f"A data worker of rank {place.rank} of {place.size} could not be started for"
            f" update {place.update}: {error!r}. It is started by {how!r}, as the program or"
            " a package of it says, so what the dataset holds is pickled for it: define"
            " functions and classes in a module, not within a function; or call"
            ' multiprocessing.set_start_method("fork") when the program begins.'
        )
        raise DataError(msg) from error


@contextmanager
def _leaving_garbage() -> Generator[None]:
    """Let workers that are forked here leave alone what is garbage in this process.

    It is this process's to finalize. A process group of Gloo's, say, joins its threads, and
    none of them is in a fork: collected there it ends the worker, or waits for ever. What is
    left alone is not copied, either.
    """
    _starting.here = True
    try:
        yield
    finally:
        _starting.here = False


def _leave_garbage() -> None:
    if getattr(_starting, "here", False):
        gc.freeze()


os.register_at_fork(after_in_child=_leave_garbage)


def _failure(error: Exception, timeout: float) -> str | None:
    """Return what an error says of a worker's end; None if a dataset raised it."""
    said = str(error)
    if "DataLoader timed out" in said:
        return (
            f"it gave nothing for {timeout:g} s, its timeout. It hangs, or what it read"
            " cannot be sent to another process; then its own output says so."
        )
    if "DataLoader worker (pid" in said:
        return said
    if isinstance(error, (OSError, EOFError)) and "DataLoader worker" not in said:
        return f"it ended before what it had read was taken over ({error!r})."
    return None


def _terminate(values: Any) -> None:
    """End workers of which one hangs, so that nothing waits for it."""
    for worker in values._workers:
        worker.terminate()


class _listening(AbstractContextManager[None]):
    """Let torch's signal handler raise the end of a worker, inside a `with` block only."""

    __slots__ = ("_values",)

    def __init__(self, values: Any) -> None:
        """Take a loader's iterator; outside of the block, its workers are not its own."""
        self._values = values

    def __enter__(self) -> None:
        """Listen, and look whether a worker has ended since."""
        values = self._values
        if not values._worker_pids_set:
            pids = tuple([worker.pid for worker in values._workers])
            _torch._set_worker_pids(id(values), pids)
            values._worker_pids_set = True
        for worker, expected in zip(
            values._workers, values._workers_status, strict=True
        ):
            if expected and worker.exitcode is not None:
                self._forget()
                msg = f"DataLoader worker (pid {worker.pid}) {_ending(worker.exitcode)}"
                raise RuntimeError(msg)

    def __exit__(self, *error: object) -> None:
        """Listen no more."""
        self._forget()

    def _forget(self) -> None:
        if self._values._worker_pids_set:
            _torch._remove_worker_pids(id(self._values))
            self._values._worker_pids_set = False


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited unexpectedly with exit code {exitcode}."
    return f"is killed by signal: {signal.Signals(-exitcode).name}."


# Batches onto the device, the next one while this one is computed on.


T = TypeVar("T")


def on_device(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    """Yield the pairs with their values on a device.

    To an accelerator the next pair is copied from pinned memory on a stream of its own, while
    the caller computes on the one before; the copy is waited for where the values are used.
    """
    if device.type == "cpu":
        return pairs
    # mps has one stream, and the host's memory; meta has neither
    if device.type in ("mps", "meta"):
        return _move_pairs(pairs, device)
    return _prefetch(pairs, device)


def _move_pairs(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    for what, values in pairs:
        yield what, [tree.to_device(value, device) for value in values]


def _prefetch(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    side = torch.Stream(device)

    def staged_leaf(leaf: Any) -> Any:
        return pin(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    def copied() -> tuple[T, list[Any]] | None:
        pair = next(pairs, None)
        if pair is None:
            return None
        what, values = pair
        with side:
            ready = [tree.tree_map(staged_leaf, value) for value in values]
            return what, [tree.to_device(each, device, opaque=False) for each in ready]

    ahead = copied()
    while ahead is not None:
        what, values = ahead
        current = torch.accelerator.current_stream(device)
        current.wait_stream(side)
        for leaf in tree.tensor_leaves(values):
            if not leaf.is_cpu:  # as the lengths of a packed sequence
                # the caller's stream uses memory that the side stream allocated
                leaf.record_stream(current)
        ahead = copied()
        # what is in an object nobody sees: it is moved on the caller's stream
        yield what, [tree.to_device(value, device) for value in values]
