# SPDX-License-Identifier: Apache-2.0
"""Run a test's function on real Gloo ranks, or start processes that open a world themselves."""

import resource
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from accelfn.testing import RankError, run_processes
from tests.internals import RankProcess
from tests.waiting import HANGS

__all__ = ["RankError", "limit_files", "ranks_alone", "run_ranks"]

run_ranks = partial(run_processes, timeout=HANGS)
"""`run_processes` with the time limit of the tests."""


@contextmanager
def ranks_alone(
    size: int, live: Callable[..., None], *args: object
) -> Generator[list[RankProcess]]:
    """Start `live(rank, *args, pipe)` for each rank, and kill what is left at the end."""
    ranks = [
        RankProcess.start(live, rank, *args, name=f"rank {rank}")
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.end()


@contextmanager
def limit_files(size: int) -> Generator[None]:
    """Let this process write no file larger than this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
