# SPDX-License-Identifier: Apache-2.0
"""`progress`: a bar for long work, where somebody is looking."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich import progress as bars
from rich.console import Console

from accelfn.base.calling import called
from accelfn.errors import ArgumentError
from accelfn.world import World

T = TypeVar("T")
_TIMES = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()


@called
def progress(work: Iterable[T], *, world: World, label: str = "") -> Iterator[T]:
    """Yield what `work` yields, with a bar on rank 0's terminal.

    It goes to standard error, with what is printed meanwhile above it. Where that is no
    terminal (a file, a pipe, a scheduler's log), and on other ranks, nothing is written. How
    long the work is, is its `len`; where it has none, the bar shows what was done alone.

    Args:
        work: such as `af.batches(state, epochs=3)`.
        world: that of the run.
        label: stands before the bar.

    Example:
        >>> list(progress(range(3), world=World.single(), label="training"))
        [0, 1, 2]
    """
    if not isinstance(work, Iterable):
        msg = f"af.track.progress({work!r}): expected something to iterate over."
        raise ArgumentError(msg)
    return _shown(work, label) if world.is_main else iter(work)


def _shown(work: Iterable[T], label: str) -> Iterator[T]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from work
        return
    try:
        total = len(work) if isinstance(work, Sized) else None
    except (ArgumentError, TypeError):  # batches without an end, a loader of a stream
        total = None
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        *_TIMES,
    )
    with bars.Progress(*columns, console=console) as shown:
        # its iterator, for rich asks anything else for a length
        yield from shown.track(iter(work), total=total, description=label)


@contextmanager
def bar_of_bytes(label: str, total: int) -> Generator[Callable[[int], object]]:
    """Show a bar of so many bytes; the block calls what it gets with how many more are done."""
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        *_TIMES,
    )
    console = Console(stderr=True)
    # what has ended leaves its result, and no bar
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(label, total=total)
        yield lambda count: shown.advance(task, count)
