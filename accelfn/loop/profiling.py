# SPDX-License-Identifier: Apache-2.0
"""`profile`: record the time of a few steps, in a trace for each rank."""

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
"""torch has one profiler per process, and crashes if two threads start it."""


class Profiler:
    """The result of `af.profile`; call `step` after each step.

    Attributes:
        path: the file of this rank's trace.
        num_steps: how many steps have ended.
        is_written: whether the trace is written.
    """

    def __init__(
        self,
        path: Path,
        schedule: Callable[[int], Any],
        activities: list[torch_profiler.ProfilerActivity],
        **options: Any,
    ) -> None:
        """Take the file to write, the schedule of steps, and torch's options."""
        self.path = path
        self._has_shapes = options["record_shapes"] or options["with_flops"]
        self._has_stacks = options["with_stack"]
        self.num_steps = 0
        self.is_written = False
        # without it torch records stacks only for the trace, and not for its sums
        verbose = torch_profiler._ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        config = verbose(verbose=options["with_stack"])
        self._torch = torch_profiler.profile(
            activities=activities,
            schedule=schedule,
            experimental_config=config,
            on_trace_ready=self._write,
            **options,
        )

    def step(self) -> None:
        """Record the end of a step."""
        self.num_steps += 1
        self._torch.step()

    def key_averages(
        self, *, group_by_input_shape: bool = False, group_by_stack_n: int = 0
    ) -> Any:
        """Return torch's sums over the written steps, with an entry for each operation.

        Args:
            group_by_input_shape: whether to have an entry for each shape of inputs.
            group_by_stack_n: how many innermost lines of code to have an entry for.

        Returns: torch's `EventList`, whose `table(sort_by=, row_limit=)` is text.

        Raises:
            ArgumentError: no step is written yet, or shapes or stacks were not recorded.
        """
        if not self.is_written:
            msg = "profiler.key_averages(): no step is written yet; call it after the block."
            raise ArgumentError(msg)
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

    def start(self) -> None:
        """Start torch's profiler."""
        self._torch.start()

    def stop(self) -> None:
        """Stop torch's profiler, which writes the rest of the recorded steps."""
        self._torch.stop()

    def _write(self, trace: torch_profiler.profile) -> None:
        trace.export_chrome_trace(str(self.path))
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

    Call `profiler.step()` after each step. The first `wait` steps are not recorded, the next
    `warmup` steps are recorded and dropped, and the next `active` steps are written as soon as
    they end. Later steps run at full speed. Spans named "accelfn value_and_grad" and
    "accelfn apply_grads" show the halves of a step. Spans inside, such as "accelfn forward",
    show its parts. torch's spans show the forward pass of DistributedDataParallel and the
    optimizer. chrome://tracing and https://ui.perfetto.dev show the file.

    Args:
        directory: created if it does not exist; an older trace of the same rank is replaced.
        world: gives the rank in the file's name.
        wait: steps to skip, 0 or more: the first step builds the engine.
        warmup: steps to record and drop, 1 or more, because the first steps are distorted.
        active: steps to write, 1 or more.
        record_shapes: whether to record the shapes of inputs of operations.
        profile_memory: whether to record allocations.
        with_stack: whether to record the lines of code that call operations.
        with_flops: whether to count the floating-point operations of products of matrices and
            convolutions, and record shapes for that.
        with_modules: whether to record the modules of a TorchScript model.
        activities: torch's activities to record, such as `torch.profiler.ProfilerActivity.CPU`;
            default the host and its accelerator.

    Yields:
        A record with `step()` and with `path`, the file that this rank writes. After that,
        `key_averages()` has torch's sums for each operation and each span of accelfn.

    Law: the steps compute the same results, bitwise.

    Cost: while steps are recorded, several microseconds for each operation, and more with
    shapes, memory, stacks or counts; else none.

    Raises:
        ArgumentError: an invalid number of steps; an activity that this torch cannot record;
            or the block ended before a step was written.
        OSError: the directory cannot be created.
        WorldError: a profiler already runs in this process, an outer profiler or that of
            another simulated rank.

    Example:
        ```python
        with af.profile("traces", world) as profiler:
            for batch in af.batches(state, until_epoch=1):
                state, metrics = step(state, batch)
                profiler.step()
        af.print_once(world, profiler.key_averages().table(sort_by="cpu_time_total"))
        ```
    """
    counts = {"wait": wait, "warmup": warmup, "active": active}
    for name, value in counts.items():
        least = 0 if name == "wait" else 1
        check_integer("af.profile", name, value, least, "a number of steps")
    options = {
        "record_shapes": record_shapes,
        "profile_memory": profile_memory,
        "with_stack": with_stack,
        "with_flops": with_flops,
        "with_modules": with_modules,
    }
    for name, value in options.items():
        if not isinstance(value, bool):
            msg = f"af.profile({name}={value!r}): expected True or False."
            raise ArgumentError(msg)
    chosen = (
        _usual_activities() if activities is None else _check_activities(activities)
    )
    check_world("af.profile(directory, world)", world)
    folder = as_path("af.profile(directory)", directory, "a directory")
    path = folder / f"rank-{world.rank}.json"
    if is_profiled() or not _ONE_A_PROCESS.acquire(blocking=False):
        msg = (
            f"af.profile({str(directory)!r}) on rank {world.rank}: torch has one profiler a"
            " process, and it runs already. End it first. In a simulated world, profile one"
            " rank, or use real processes with `accelfn launch`."
        )
        raise WorldError(msg)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule = torch_profiler.schedule(**counts, repeat=1)
        profiler = Profiler(path, schedule, chosen, **options)
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
    """Return the activities of the host and its accelerator."""
    kinds = torch_profiler.ProfilerActivity
    # it has no entry for devices that it cannot record
    device: Any = getattr(kinds, devices.kind().upper(), kinds.CPU)
    if device is kinds.CPU and devices.count():
        device = kinds.PrivateUse1
    return list(dict.fromkeys([kinds.CPU, device]))


def _check_activities(activities: Any) -> list[torch_profiler.ProfilerActivity]:
    """Return activities as a list, if torch can record them; it would drop the others."""
    possible = torch_profiler.supported_activities()
    chosen = list(activities) if isinstance(activities, Iterable) else []
    if not chosen or not all(activity in possible for activity in chosen):
        names = ", ".join(sorted(f"ProfilerActivity.{kind.name}" for kind in possible))
        msg = (
            f"af.profile(activities={activities!r}): expected a list of activities that torch"
            f" can record here, of torch.profiler: {names}."
        )
        raise ArgumentError(msg)
    return chosen
