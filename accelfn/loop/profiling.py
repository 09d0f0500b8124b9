# SPDX-License-Identifier: Apache-2.0
"""`profile`: what a few steps spend their time on, a trace a rank."""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler as torch_profiler

from accelfn.base import accelerator
from accelfn.base.arguments import as_path, check_integer
from accelfn.base.calling import called
from accelfn.base.contexts import is_profiled
from accelfn.collectives.agreed import check_world
from accelfn.errors import ArgumentError, WorldError
from accelfn.world import World

_ONE_A_PROCESS = threading.Lock()
"""torch has one profiler a process, and crashes where two threads start it."""


class Profiler:
    """What `af.profile` gives: tell it where a step ends.

    Attributes:
        path: the file of this rank's trace.
        num_steps: how many steps have ended.
        is_written: whether the trace is there.
    """

    def __init__(
        self, path: Path, schedule: Callable[[int], Any], **recorded: Any
    ) -> None:
        """Take the file to write, what becomes of each step, and what is recorded of it."""
        self.path = path
        self._has_shapes = recorded["record_shapes"] or recorded["with_flops"]
        self.num_steps = 0
        self.is_written = False
        known = torch_profiler.ProfilerActivity
        # which has no entry for a make of device that it cannot look into
        device: Any = getattr(known, accelerator.kind().upper(), known.CPU)
        if device is known.CPU and accelerator.count():
            device = known.PrivateUse1
        activities = list(dict.fromkeys([known.CPU, device]))
        self._torch = torch_profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._write,
            **recorded,
        )

    def step(self) -> None:
        """Let it be known that a step has ended."""
        self.num_steps += 1
        self._torch.step()

    def key_averages(self, *, group_by_input_shape: bool = False) -> Any:
        """Return torch's sums over the steps that were written, an entry an operation.

        Args:
            group_by_input_shape: an entry for each operation and the shapes it was given.

        Returns: torch's `EventList`, whose `table(sort_by=, row_limit=)` is text.

        Raises:
            ArgumentError: no step is written yet, or shapes were not recorded.
        """
        if not self.is_written:
            msg = (
                "profiler.key_averages(): no step is written yet; call it when the `with`"
                " block is over."
            )
            raise ArgumentError(msg)
        if group_by_input_shape and not self._has_shapes:
            msg = (
                "profiler.key_averages(group_by_input_shape=True): no shapes were recorded;"
                " write af.profile(record_shapes=True)."
            )
            raise ArgumentError(msg)
        return self._torch.key_averages(group_by_input_shape=group_by_input_shape)

    def start(self) -> None:
        """Begin to count steps."""
        self._torch.start()

    def stop(self) -> None:
        """End, and write what was recorded and is not written yet."""
        self._torch.stop()

    def _write(self, found: torch_profiler.profile) -> None:
        found.export_chrome_trace(str(self.path))
        self.is_written = True


@called
@contextmanager
def profile(
    directory: str | os.PathLike[str],
    world: World,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_flops: bool = False,
) -> Generator[Profiler]:
    """Record some steps with torch's profiler, and write `directory/rank-N.json`.

    Call `profiler.step()` after each step. The first `wait` pass unrecorded, `warmup` are
    recorded and dropped, `active` are written, as soon as they are over; what comes after
    runs at full speed. Spans named "accelfn value_and_grad" and "accelfn apply_grads" show the
    halves of a step, torch's own the forward of DistributedDataParallel and the optimizer.
    chrome://tracing and https://ui.perfetto.dev show the file.

    Args:
        directory: made if it is not there; an older trace of the same rank is replaced.
        world: tells the rank in the file's name.
        wait: steps to pass over, 0 or more: the first builds the engine.
        warmup: steps to record and drop, 1 or more, for the first are distorted.
        active: steps to write, 1 or more.
        record_shapes: whether to record the shapes that operations are given.
        profile_memory: whether to record what is allocated and freed.
        with_flops: whether to count the floating-point operations of products of matrices and
            convolutions, and record shapes for that.

    Yields:
        A record with `step()`, with `path`, the file that this rank writes, and with
        `key_averages()`, torch's sums an operation, once that is written.

    Law: the steps compute what they compute without it, bitwise.

    Cost: while steps are recorded, several microseconds an operation, and more with shapes,
    memory or counts; else nothing.

    Raises:
        ArgumentError: a number of steps that can have no meaning; or the block ended before
            a step was recorded, so that nothing was written.
        OSError: the directory cannot be made.
        WorldError: a profiler runs in this process already, an outer one or that of another
            simulated rank.

    Example:
        ```python
        with af.profile("traces", world) as profiler:
            for batch in af.batches(state, epochs=1):
                state, metrics = step(state, batch)
                profiler.step()
        af.print_in_order(world, profiler.path)
        ```
    """
    for name, value, least in (
        ("wait", wait, 0),
        ("warmup", warmup, 1),
        ("active", active, 1),
    ):
        check_integer("af.profile", name, value, least, "a number of steps")
    recorded = {
        "record_shapes": record_shapes,
        "profile_memory": profile_memory,
        "with_flops": with_flops,
    }
    for name, value in recorded.items():
        if not isinstance(value, bool):
            msg = f"af.profile({name}={value!r}): expected True or False."
            raise ArgumentError(msg)
    check_world("af.profile(directory, world)", world)
    folder = as_path("af.profile(directory)", directory, "a directory")
    path = folder / f"rank-{world.rank}.json"
    if is_profiled() or not _ONE_A_PROCESS.acquire(blocking=False):
        msg = (
            f"af.profile({str(directory)!r}) on rank {world.rank}: torch has one profiler a"
            " process, and it runs already. End the other first; of a simulated world,"
            " profile one rank, or run it on real processes with `accelfn launch`."
        )
        raise WorldError(msg)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule = torch_profiler.schedule(
            wait=wait, warmup=warmup, active=active, repeat=1
        )
        profiler = Profiler(path, schedule, **recorded)
        profiler.start()
        try:
            yield profiler
        finally:
            profiler.stop()
    finally:
        _ONE_A_PROCESS.release()
    if not profiler.is_written:
        msg = (
            f"af.profile: the block ended after {profiler.num_steps} steps, and {wait} to"
            f" wait and {warmup} to warm up come before the first that is written. Take"
            " more steps, and call profiler.step() after each."
        )
        raise ArgumentError(msg)
