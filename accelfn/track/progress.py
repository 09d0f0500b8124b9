# SPDX-License-Identifier: Apache-2.0
"""`progress`: a bar for long work, where somebody is looking."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

from rich import progress as bars
from rich.console import Console

from accelfn.base.calling import called
from accelfn.errors import ArgumentError
from accelfn.world import World

T = TypeVar("T")
_TIMES = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
_EVERY = 0.1
"""Seconds between two looks of a bar in a notebook, as rich has them on a terminal."""


@called
def progress(work: Iterable[T], *, world: World, label: str = "") -> Iterator[T]:
    """Yield what `work` yields, with a bar on rank 0's terminal, or in a notebook's cell.

    It goes to standard error, with what is printed meanwhile above it; in a notebook it is one
    output of the cell, drawn anew in its place. Where there is neither (a file, a pipe, a
    scheduler's log), and on other ranks, nothing is written. How long the work is, is its
    `len`; where it has none, the bar shows what was done alone.

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
    if not (console.is_terminal or console.is_jupyter):
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
    if console.is_jupyter:
        yield from _in_cell(work, bars.Progress(*columns, disable=True), total, label)
        return
    with bars.Progress(*columns, console=console) as shown:
        # its iterator, for rich asks anything else for a length
        yield from shown.track(iter(work), total=total, description=label)


def _in_cell(
    work: Iterable[T], shown: bars.Progress, total: int | None, label: str
) -> Iterator[T]:
    """Show a bar as an output of the cell, which rich alone can with widgets' package only."""
    task = shown.add_task(label, total=total)
    drawn, done = time.monotonic(), 0
    output = import_module("IPython.display").display(shown, display_id=True)
    try:
        for each in work:
            yield each
            done += 1
            if time.monotonic() - drawn >= _EVERY:
                drawn = time.monotonic()
                shown.update(task, completed=done)
                output.update(shown)
    finally:
        shown.update(task, completed=done)
        output.update(shown)


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
