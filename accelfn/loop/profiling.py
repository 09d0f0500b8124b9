# SPDX-License-Identifier: Apache-2.0
"""`profile`: record a few steps with torch's profiler, and write a trace for each rank."""

import os
import threading
from collections.abc import Generator, Iterable
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
"""Lock of the process: torch crashes if two threads start its profiler."""


class Profiler:
    """The object that `af.profile` yields; call `profiler.step()` after each training step.

    Attributes:
        path: the file of this rank's trace.
        num_steps: the number of calls of `step()` so far.
        is_written: whether the trace was written.
    """

    def __init__(self, path: Path, recorder: torch_profiler.profile) -> None:
        """Let torch's profiler write its trace to a file."""
        self.path, self._torch = path, recorder
        self.num_steps, self.is_written = 0, False
        recorder.on_trace_ready = self._write

    def step(self) -> None:
        """Mark the end of a training step."""
        self.num_steps += 1
        self._torch.step()

    def key_averages(
        self, *, group_by_input_shape: bool = False, group_by_stack_n: int = 0
    ) -> Any:
        """Return torch's statistics of the recorded steps, with an entry for each operation.

        Args:
            group_by_input_shape: whether to make a separate entry for each shape of inputs.
            group_by_stack_n: the number of innermost stack frames that distinguish entries;
                0 ignores stacks.

        Returns: torch's `EventList`; its `table(sort_by=, row_limit=)` returns text.

        Raises:
            ArgumentError: no step is recorded yet, or shapes or stacks were not recorded.
        """
        if not self.is_written:
            msg = "profiler.key_averages(): no step is recorded yet; call this after the block."
            raise ArgumentError(msg)
        has_shapes = self._torch.record_shapes or self._torch.with_flops
        missing = None
        if group_by_input_shape and not has_shapes:
            missing = "group_by_input_shape=True", "shapes", "record_shapes"
        elif group_by_stack_n and not self._torch.with_stack:
            missing = f"group_by_stack_n={group_by_stack_n}", "stacks", "with_stack"
        if missing:
            usage, values, option = missing
            call = f"profiler.key_averages({usage})"
            msg = (
                f"{call}: {values} were not recorded. Pass {option}=True to af.profile."
            )
            raise ArgumentError(msg)
        return self._torch.key_averages(group_by_input_shape, group_by_stack_n)

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

    Call `profiler.step()` after each training step. The first `wait` steps are not recorded. The
    next `warmup` steps are recorded and discarded. The next `active` steps are written to the
    file. Later steps run without profiling. Open the file in chrome://tracing or
    https://ui.perfetto.dev. The spans "accelfn value_and_grad" and "accelfn apply_grads" are the
    two halves of a step, and spans inside them, such as "accelfn forward", are its parts.
    torch's own spans show the optimizer, and DistributedDataParallel's forward pass.

    Args:
        directory: created if it does not exist; an older trace of the same rank is replaced.
        world: the world that has the rank in the file's name.
        wait: the number of steps to skip, 0 or more. The first step builds the engine.
        warmup: the number of steps to record and discard, 1 or more. The first recorded steps
            have distorted times.
        active: the number of steps to write, 1 or more.
        record_shapes: whether to record the shapes of the inputs of operations.
        profile_memory: whether to record memory allocations.
        with_stack: whether to record the lines of code that call operations.
        with_flops: whether to count the floating-point operations of matrix products and
            convolutions; this also records shapes.
        with_modules: whether to record the modules of a TorchScript model.
        activities: torch's activities to record, such as `torch.profiler.ProfilerActivity.CPU`;
            default: the CPU and the accelerator.

    Yields:
        A `Profiler` with `step()` and `path`, the file that this rank writes. After the block,
        its `key_averages()` returns torch's statistics of operations and of accelfn's spans.

    Law: profiling does not change any result of a step, bitwise.

    Cost: several microseconds for each operation of a recorded step, and more with shapes,
    memory, stacks or counts. Other steps have no cost.

    Raises:
        ArgumentError: a number of steps is invalid, torch cannot record an activity, or the
            block ended before a step was written.
        OSError: the directory cannot be created.
        WorldError: a profiler is already running in this process, for example that of another
            simulated rank.

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
    options: dict[str, Any] = {
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
    chosen = _choose_activities(activities)
    check_world("af.profile(directory, world)", world)
    folder = as_path("af.profile(directory)", directory, "a directory")
    path = folder / f"rank-{world.rank}.json"
    if is_profiled() or not _ONE_A_PROCESS.acquire(blocking=False):
        msg = (
            f"af.profile({str(directory)!r}) on rank {world.rank}: torch can run one profiler in"
            " a process, and one is already running. Stop that profiler first. In a simulated"
            " world, profile only one rank, or start real processes with `accelfn launch`."
        )
        raise WorldError(msg)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # without verbose=True, torch has stacks in the trace, but not in key_averages()
        verbose = torch_profiler._ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        recorder = torch_profiler.profile(
            activities=chosen,
            schedule=torch_profiler.schedule(**counts, repeat=1),
            experimental_config=verbose(verbose=with_stack),
            **options,
        )
        profiler = Profiler(path, recorder)
        with recorder:
            yield profiler
    finally:
        _ONE_A_PROCESS.release()
    if not profiler.is_written:
        msg = (
            f"af.profile: the block ended after {profiler.num_steps} calls of profiler.step(),"
            f" before any step was written: wait={wait} and warmup={warmup} skip the first steps."
            " Run more steps, and call profiler.step() after each of them."
        )
        raise ArgumentError(msg)


def _choose_activities(activities: Any) -> list[torch_profiler.ProfilerActivity]:
    """Return activities as a list; by default those of this machine's CPU and accelerator.

    Raises:
        ArgumentError: torch would silently ignore an activity.
    """
    if activities is None:
        kinds = torch_profiler.ProfilerActivity
        # ProfilerActivity has no member for a device that torch cannot record
        device: Any = getattr(kinds, devices.kind().upper(), kinds.CPU)
        if device is kinds.CPU and devices.count():
            device = kinds.PrivateUse1
        return list(dict.fromkeys([kinds.CPU, device]))
    possible = torch_profiler.supported_activities()
    chosen = list(activities) if isinstance(activities, Iterable) else []
    if not chosen or not all(activity in possible for activity in chosen):
        names = ", ".join(sorted(f"ProfilerActivity.{kind.name}" for kind in possible))
        msg = (
            f"af.profile(activities={activities!r}): expected a list. Here torch can record"
            f" {names}, from torch.profiler."
        )
        raise ArgumentError(msg)
    return chosen
