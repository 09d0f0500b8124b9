# SPDX-License-Identifier: Apache-2.0
"""Read batches of samples by index, in this process or in the workers of a DataLoader."""

import gc
import multiprocessing
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from accelfn.base import draws, system, tree
from accelfn.base.arguments import advise
from accelfn.base.devices import pin
from accelfn.data.order import Indices
from accelfn.data.plan import Cursor, Pair, Plan, Portion, portions
from accelfn.data.sources import Source, collate_samples, format_indices
from accelfn.errors import DataError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

Collate: TypeAlias = Callable[[list[Any]], Any]
Task: TypeAlias = tuple[int, int, Indices]
"""A micro-batch to read: the key of the epoch's random numbers, the position of the first sample
in the epoch's order, and the dataset indices of the samples."""


@attrs.frozen(kw_only=True)
class Reading:
    """Which batches to read, and who reads them.

    Attributes:
        plan: which samples of an update this rank reads.
        start: the cursor of the first sample to read.
        epochs: reading ends before the epoch with this number; None: it does not end.
        seed: the seed of the order and of random numbers.
        world: the ranks that read.
        update: the state's number of updates before the first batch, for errors.
    """

    plan: Plan
    start: Cursor = attrs.field(factory=Cursor)
    epochs: int | None
    seed: int
    world: World
    update: int = 0


@attrs.frozen
class Fetch:
    """Reads and collates the samples of a task, in this process or in a worker.

    For torch's DataLoader, it is a dataset: an index is a task, and a sample is a micro-batch.

    A dataset may use the default random generators of torch, numpy or Python, for example for
    augmentation. accelfn seeds them for each sample from (seed, epoch, position), so the random
    numbers do not depend on workers, ranks or micro-batches. For a dataset with `__getitems__`,
    which reads several samples at once, the position of the first sample counts.
    """

    source: Source
    collate: Collate | None

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no user code, and so uses no random numbers."""
        return self.collate is None and self.source.is_pure

    def __call__(self, task: Task) -> Any:
        """Return the collated samples of a task."""
        key, first, indices = task
        if self.is_pure:
            return self.source.batch(indices, skip_seeding)
        with draws.seeded() as drawing:

            def begin(place: int) -> None:
                drawing.begin(draws.fold(key, first + place))

            if self.collate is None:
                return self.source.batch(indices, begin)
            samples = self.source.samples(indices, begin)
            return collate_samples(self.collate, samples, indices)

    def __getitem__(self, task: Task) -> Any:
        """Return the collated samples of a task, for a DataLoader."""
        try:
            return self(task)
        # a DataLoader would treat it as the end of the data
        except StopIteration as error:
            msg = "A dataset or collate function raised StopIteration."
            raise RuntimeError(msg) from error


def skip_seeding(_place: int) -> None:
    """Do nothing instead of seeding generators, because reading uses no random numbers."""


# Start the worker processes of a torch DataLoader, and raise clear errors if a worker fails.
#
# If a worker ends, torch raises an error in the main process at once, for example in the middle
# of a step. accelfn raises the error when the next batch is read, and names the samples. For
# this, and to end the workers, accelfn uses private attributes of torch's iterators.


_torch: Any = signal_handling
_starting = threading.local()
"""Its attribute `here` is true while the current thread starts workers."""


def advise_of_workers(num_workers: int) -> None:
    """Warn if there are more worker processes than cores that this process can use."""
    num_cores = system.num_cores()
    if num_workers > num_cores:
        advise(
            f"af.Data(num_workers={num_workers}): this process can use only {num_cores} cores,"
            " so its workers slow each other and the training down. Write"
            f" num_workers={num_cores} or fewer."
        )


@contextmanager
def mute_worker_warnings() -> Generator[None]:
    """Hide torch's warnings about the number of workers in a `with` block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def worker_options(data: "Data") -> dict[str, Any]:
    """Return a DataLoader's options for workers: they are forked on Linux by default.

    Since Python 3.14, the default is that a server process starts the workers. Then they are not
    children of this process, and it would notice the end of a worker only after the timeout.
    """
    is_chosen = multiprocessing.get_start_method(allow_none=True) is not None
    forks = data.num_workers and not is_chosen and sys.platform == "linux"
    return {
        "num_workers": data.num_workers,
        "timeout": data.timeout if data.num_workers else 0,
        "multiprocessing_context": "fork" if forks else None,
    }


def watch_workers(
    loader: Any, reading: Reading, due: Callable[[], tuple[int, str]]
) -> Iterator[Any]:
    """Yield the results of a loader's workers; end the workers afterwards.

    Args:
        loader: a DataLoader of torch or torchdata with workers.
        reading: the rank, and the update of the first batch, for errors.
        due: returns the number of updates that were read, and a sentence about the samples that
            the workers are reading.

    Raises:
        DataError: a worker could not be started, was killed or did not answer. Errors of the
            dataset itself are raised unchanged.
    """
    values = _start_iterator(loader, reading)
    try:
        while True:
            try:
                with _listening(values):
                    value = next(values)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                reason = _explain_failure(error, loader.timeout)
                if reason is None:
                    raise
                if "timed out" in str(error):
                    # otherwise, the main process would wait for a worker that hangs
                    for worker in values._workers:
                        worker.terminate()
                num_read, being_read = due()
                update = reading.update + num_read
                place = f"before the batch of update {update} was complete"
                msg = f"{_worker_of(reading)} failed {place}: {reason}\n{being_read}"
                raise DataError(msg) from error
            yield value
    finally:
        # otherwise, the garbage collector would end the workers later, and wait 5 s for each
        values._shutdown_workers()


def _worker_of(reading: Reading) -> str:
    return f"A data worker of rank {reading.world.rank} of {reading.world.size}"


def _start_iterator(loader: Any, reading: Reading) -> Any:
    """Create a loader's iterator, which starts the workers."""
    _starting.here = True
    try:
        with mute_worker_warnings():
            # torch also warns about the error that is handled below
            warnings.filterwarnings("ignore", "Got pickle error")
            return iter(loader)
    except (PicklingError, AttributeError, TypeError, OSError, EOFError) as error:
        how = multiprocessing.get_start_method(allow_none=True)
        if how in (None, "fork"):  # a fork pickles nothing
            raise
        msg = (
            f"{_worker_of(reading)} could not be started for update {reading.update}: {error!r}."
            f" The program, or a package that it imports, has chosen the start method {how!r}, so"
            " the dataset must be pickled. Define its functions and classes at the top level of a"
            ' module, or call multiprocessing.set_start_method("fork") at the start of the program.'
        )
        raise DataError(msg) from error
    finally:
        _starting.here = False


def _leave_garbage() -> None:
    """In workers that are forked here, do not collect garbage of this process.

    Only this process can finalize its objects. For example, a Gloo process group joins its
    threads. A forked process does not have these threads, so it would crash or hang.
    """
    if getattr(_starting, "here", False):
        gc.freeze()


system.call_after_fork(_leave_garbage)


def _explain_failure(error: Exception, timeout: float) -> str | None:
    """Return a text that says why a worker failed; None if the dataset raised the error."""
    text = str(error)
    if "DataLoader timed out" in text:
        return (
            f"it sent nothing for {timeout:g} s (timeout=). It hangs, or its samples cannot be"
            " sent to another process. In the second case, its output shows the error."
        )
    if "DataLoader worker (pid" in text:
        return text
    if isinstance(error, (OSError, EOFError)) and "DataLoader worker" not in text:
        return f"it ended before this process received its samples ({error!r})."
    return None


@contextmanager
def _listening(values: Any) -> Generator[None]:
    """Only inside of the `with` block, let torch raise an error for a worker that has ended."""
    if not values._worker_pids_set:
        pids = tuple([worker.pid for worker in values._workers])
        _torch._set_worker_pids(id(values), pids)
        values._worker_pids_set = True
    try:
        for worker, is_expected in zip(
            values._workers, values._workers_status, strict=True
        ):
            if is_expected and worker.exitcode is not None:
                code = worker.exitcode
                how = f"exited unexpectedly with exit code {code}"
                if code < 0:
                    how = f"is killed by signal: {signal.Signals(-code).name}"
                msg = f"DataLoader worker (pid {worker.pid}) {how}."
                raise RuntimeError(msg)
        yield
    finally:
        if values._worker_pids_set:
            _torch._remove_worker_pids(id(values))
            values._worker_pids_set = False


# Read by index.


def read_by_index(data: "Data", reading: Reading) -> Iterator[Pair]:
    """Yield this rank's portion of each update, with its values."""
    parts, fetch = _portions(data, reading), Fetch(data.source, data.collate)
    if data.num_workers:
        return _read_in_workers(parts, fetch, data, reading)
    return _read_here(parts, fetch)


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
        text = "The workers were reading the samples at these dataset indices"
        return num_read, f"{text}:\n{lines}"

    for value in watch(fetch, data, reading, due, send_tasks()):
        values.append(value)
        if len(values) == len(pending[0].spans):
            num_read += 1
            yield pending.popleft(), values
            values = []


def watch(
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


# Copy batches to the device: the next batch is copied while the device computes on the current.


T = TypeVar("T")


def on_device(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    """Yield the pairs with their values moved to a device.

    For a GPU, the next pair is copied from pinned memory on another CUDA stream while the caller
    computes on the current pair. The caller's stream then waits for the copy.
    """
    if device.type == "cpu":
        return pairs
    # mps has only one stream, and shares the host's memory; meta has no memory
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

    def copy_pairs() -> Iterator[tuple[T, list[Any]]]:
        for portion, values in pairs:
            with side:
                pages = [tree.tree_map(pin_leaf, value) for value in values]
                copies = [tree.to_device(v, device, opaque=False) for v in pages]
            yield portion, copies

    source = copy_pairs()
    pair = next(source, None)
    while pair is not None:
        portion, values = pair
        current = torch.accelerator.current_stream(device)
        current.wait_stream(side)
        for leaf in tree.tensor_leaves(values):
            if not leaf.is_cpu:  # the lengths of a packed sequence stay on the CPU
                # the caller's stream uses memory that the other stream has allocated
                leaf.record_stream(current)
        pair = next(source, None)
        # tensors in objects of unknown classes are moved only now, on the caller's stream
        yield portion, _move(values, device)
