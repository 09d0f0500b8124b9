# SPDX-License-Identifier: Apache-2.0
"""`profile`: what a few steps spend their time on, a trace a rank."""

import os
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler as torch_profiler

from accelfn.base import devices
from accelfn.base.arguments import as_path, check_integer, explain_call_errors
from accelfn.base.draws import is_profiled
from accelfn.collectives.failures import check_world
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
        self,
        path: Path,
        schedule: Callable[[int], Any],
        activities: list[torch_profiler.ProfilerActivity],
        **recorded: Any,
    ) -> None:
        """Take the file to write, what becomes of each step, and what is recorded of it."""
        self.path = path
        self._has_shapes = recorded["record_shapes"] or recorded["with_flops"]
        self._has_stacks = recorded["with_stack"]
        self.num_steps = 0
        self.is_written = False
        # without it torch records stacks for the trace alone, and its sums have none
        verbose = torch_profiler._ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        config = verbose(verbose=recorded["with_stack"])
        self._torch = torch_profiler.profile(
            activities=activities,
            schedule=schedule,
            experimental_config=config,
            on_trace_ready=self._write,
            **recorded,
        )

    def step(self) -> None:
        """Let it be known that a step has ended."""
        self.num_steps += 1
        self._torch.step()

    def key_averages(
        self, *, group_by_input_shape: bool = False, group_by_stack_n: int = 0
    ) -> Any:
        """Return torch's sums over the steps that were written, an entry an operation.

        Args:
            group_by_input_shape: an entry for each operation and the shapes it was given.
            group_by_stack_n: an entry for each operation and its innermost lines of code, as
                many as this.

        Returns: torch's `EventList`, whose `table(sort_by=, row_limit=)` is text.

        Raises:
            ArgumentError: no step is written yet, or shapes or stacks were not recorded.
        """
        self._check_written("key_averages()")
        if group_by_input_shape and not self._has_shapes:
            msg = (
                "profiler.key_averages(group_by_input_shape=True): no shapes were recorded;"
                " write af.profile(record_shapes=True)."
            )
            raise ArgumentError(msg)
        if group_by_stack_n and not self._has_stacks:
            msg = (
                f"profiler.key_averages(group_by_stack_n={group_by_stack_n}): no stacks were"
                " recorded; write af.profile(with_stack=True)."
            )
            raise ArgumentError(msg)
        return self._torch.key_averages(group_by_input_shape, group_by_stack_n)

    def _check_written(self, call: str) -> None:
        if not self.is_written:
            msg = (
                f"profiler.{call}: no step is written yet; call it when the `with` block is"
                " over."
            )
            raise ArgumentError(msg)

    def start(self) -> None:
        """Begin to count steps."""
        self._torch.start()

    def stop(self) -> None:
        """End, and write what was recorded and is not written yet."""
        self._torch.stop()

    def _write(self, found: torch_profiler.profile) -> None:
        found.export_chrome_trace(str(self.path))
        self.is_written = True


@explain_call_errors
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
    with_stack: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
    activities: Iterable[torch_profiler.ProfilerActivity] | None = None,
) -> Generator[Profiler]:
    """Record some steps with torch's profiler, and write `directory/rank-N.json`.

    Call `profiler.step()` after each step. The first `wait` pass unrecorded, `warmup` are
    recorded and dropped, `active` are written, as soon as they are over; what comes after
    runs at full speed. Spans named "accelfn value_and_grad" and "accelfn apply_grads" show the
    halves of a step, those inside them, "accelfn forward" say, its parts, and torch's own the
    forward of DistributedDataParallel and the optimizer.
    chrome://tracing and https://ui.perfetto.dev show the file.

    Args:
        directory: made if it is not there; an older trace of the same rank is replaced.
        world: tells the rank in the file's name.
        wait: steps to pass over, 0 or more: the first builds the engine.
        warmup: steps to record and drop, 1 or more, for the first are distorted.
        active: steps to write, 1 or more.
        record_shapes: whether to record the shapes that operations are given.
        profile_memory: whether to record what is allocated and freed.
        with_stack: whether to record the lines of code from which operations are called.
        with_flops: whether to count the floating-point operations of products of matrices and
            convolutions, and record shapes for that.
        with_modules: whether to record the modules of a TorchScript model.
        activities: what torch is to look at, `torch.profiler.ProfilerActivity.CPU` say; by
            default the host and its accelerator.

    Yields:
        A record with `step()` and with `path`, the file that this rank writes. Once that is
        written, `key_averages()` has torch's sums for each operation and each span of accelfn.

    Law: the steps compute what they compute without it, bitwise.

    Cost: while steps are recorded, several microseconds an operation, and more with shapes,
    memory, stacks or counts; else nothing.

    Raises:
        ArgumentError: a number of steps that can have no meaning; an activity that this torch
            cannot look at; or the block ended before a step was recorded, so that nothing was
            written.
        OSError: the directory cannot be made.
        WorldError: a profiler runs in this process already, an outer one or that of another
            simulated rank.

    Example:
        ```python
        with af.profile("traces", world) as profiler:
            for batch in af.batches(state, epochs=1):
                state, metrics = step(state, batch)
                profiler.step()
        af.print_once(world, profiler.key_averages().table(sort_by="cpu_time_total"))
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
        "with_stack": with_stack,
        "with_flops": with_flops,
        "with_modules": with_modules,
    }
    for name, value in recorded.items():
        if not isinstance(value, bool):
            msg = f"af.profile({name}={value!r}): expected True or False."
            raise ArgumentError(msg)
    seen = _usual_activities() if activities is None else _check_activities(activities)
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
        profiler = Profiler(path, schedule, seen, **recorded)
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


def _usual_activities() -> list[torch_profiler.ProfilerActivity]:
    """Return those of the host and its accelerator."""
    known = torch_profiler.ProfilerActivity
    # which has no entry for a make of device that it cannot look into
    device: Any = getattr(known, devices.kind().upper(), known.CPU)
    if device is known.CPU and devices.count():
        device = known.PrivateUse1
    return list(dict.fromkeys([known.CPU, device]))


def _check_activities(activities: Any) -> list[torch_profiler.ProfilerActivity]:
    """Return activities as a list, if torch has a look at each here; it would drop others."""
    possible = torch_profiler.supported_activities()
    shown = ", ".join(sorted(f"ProfilerActivity.{each.name}" for each in possible))
    given = list(activities) if isinstance(activities, Iterable) else []
    if not given or not all(each in possible for each in given):
        msg = (
            f"af.profile(activities={activities!r}): expected a list of what torch can look"
            f" at here, of torch.profiler: {shown}."
        )
        raise ArgumentError(msg)
    return given
