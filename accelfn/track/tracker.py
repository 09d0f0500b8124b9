# SPDX-License-Identifier: Apache-2.0
"""`Tracker`: send a run's metrics to any number of backends, from rank 0.

Every rank checks a call in the same way, so that all ranks reject it or none does. Rank 0 then
reads the numbers from the device and passes them to each backend. If a backend fails (full disk,
lost network), a warning names it and the training continues.
"""

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from itertools import chain, count
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from rich import progress as bars
from rich.console import Console

from accelfn import Metrics, World
from accelfn.errors import (
    ArgumentError,
    TrackingError,
    TrackingWarning,
    WorldError,
)
from accelfn.plug import arguments, devices, system

# Checks of tracked values, and their conversion to plain data for backends.


Number: TypeAlias = float | torch.Tensor | np.generic
"""A number on any device; converting it waits for the device."""
Pixels: TypeAlias = NDArray[np.uint8]
"""(height, width, channels), with 1, 3 or 4 channels."""
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MOST_STEPS = 2**63
"""Exclusive bound of step numbers, the limit of the backends."""

_NUMBERS = (int, float, np.number, np.bool_)
_NO_REAL_NUMBERS = (np.complexfloating, np.timedelta64)  # though numpy's class says so


def check_step(step: object) -> None:
    """Reject steps that are not a count of updates."""
    if not arguments.is_integer(step, 0) or step >= MOST_STEPS:
        msg = f"step={step!r}: expected the number of updates so far, state.step."
        raise ArgumentError(msg)


def check_names(subject: str, values: object) -> None:
    """Reject values that are not a mapping by name.

    Raises:
        ArgumentError: the values are not a mapping, or a name is empty, `step`, or not a text
            that can be written.
    """
    if not isinstance(values, Mapping):
        msg = f"{subject}: expected a mapping by name, got {type(values).__name__}."
        raise ArgumentError(msg)
    for name in cast("Mapping[Any, Any]", values):
        if not arguments.is_word(name):
            msg = f"{subject}: the name {name!r} is not a text; give {subject} by name."
            raise ArgumentError(msg)
        if name == "step":
            msg = f"{subject}: 'step' is the tracker's second argument; take another name."
            raise ArgumentError(msg)


def check_metrics(metrics: object, worlds: tuple[World, ...]) -> None:
    """Reject values that are not numbers by name, without reading from a device.

    Raises:
        ArgumentError: a value is not a number, or the metrics are not averaged over ranks.
    """
    check_names("metrics", metrics)
    if isinstance(metrics, Metrics) and any(world.loss.size > 1 for world in worlds):
        msg = (
            "These Metrics are what this rank alone saw: track metrics.all_reduce_mean(world),"
            " or dict(metrics) if rank 0's part is what you want."
        )
        raise ArgumentError(msg)
    for name, value in cast("Mapping[str, Any]", metrics).items():
        if not _is_one_number(value):
            msg = f"metrics: {name!r} is {_describe_value(value)}; expected one real number."
            raise ArgumentError(msg)


def _describe_value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        where = " on meta" if value.is_meta else ""
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{where}"
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return f"an array of shape {array.shape}, {array.dtype}"
    if isinstance(value, int):  # one that no float holds, and Python may not spell
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _is_one_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return array.size == 1 and np.can_cast(array.dtype, np.float64, "same_kind")
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            return False
    return isinstance(value, _NUMBERS) and not isinstance(value, _NO_REAL_NUMBERS)


def floats(metrics: Mapping[str, Number]) -> dict[str, float]:
    """Return numbers on the host, with one wait for the device."""
    away = {
        name: value.detach().reshape(()).to(torch.float64)
        for name, value in metrics.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    read = torch.stack(list(away.values())).tolist() if away else []
    numbers = dict(zip(away, read, strict=True))
    return {
        name: numbers[name] if name in numbers else _float(value)
        for name, value in metrics.items()
    }


def _float(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return float(value.item() if isinstance(value, np.ndarray) else value)


def check_image(name: str, image: object) -> None:
    """Reject values that are not images.

    Raises:
        ArgumentError: the value is not a uint8 or floating-point tensor (channels, height,
            width).
    """
    if (
        not isinstance(image, torch.Tensor)
        or image.ndim != 3
        or image.shape[0] not in (1, 3, 4)
        or not image.numel()
        or image.layout != torch.strided
        or image.is_meta
        or not (image.dtype == torch.uint8 or image.is_floating_point())
    ):
        is_tensor = isinstance(image, torch.Tensor)
        kind = _describe_value(image) if is_tensor else type(image).__name__
        msg = (
            f"images: {name!r} is {kind}; expected a tensor (channels, height, width)"
            " with 1, 3 or 4 channels, uint8 or floating-point from 0 to 1."
        )
        raise ArgumentError(msg)


def pixels(name: str, image: torch.Tensor) -> Pixels:
    """Return an image as bytes.

    Raises:
        ArgumentError: a floating-point image is not from 0 to 1.
    """
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.double()
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):
            msg = (
                f"images: {name!r} is from {low:.6g} to {high:.6g}; floating-point images"
                " are from 0, black, to 1."
            )
            raise ArgumentError(msg)
        image = (image * 255).round().to(torch.uint8)
    return image.permute(1, 2, 0).contiguous().numpy()


def settings(values: object) -> dict[str, Plain]:
    """Return hyperparameters as plain data: nested, by name.

    Raises:
        ArgumentError: the value is not a mapping, contains itself, or has equal names.
    """
    if not isinstance(values, Mapping):
        msg = (
            f"hyperparameters: expected a mapping by name, got {type(values).__name__}."
        )
        raise ArgumentError(msg)
    try:
        table = _plain_mapping(cast("Mapping[Any, Any]", values))
        flat(table)
    except RecursionError:
        msg = "hyperparameters: they are nested too deeply, or have themselves in them."
        raise ArgumentError(msg) from None
    return table


def _plain_mapping(values: Mapping[Any, Any]) -> dict[str, Plain]:
    table: dict[str, Plain] = {}
    for name, value in values.items():
        if str(name) in table:
            raise _twice(str(name))
        table[str(name)] = plain(value)
    return table


def _twice(name: str) -> ArgumentError:
    return ArgumentError(
        f"hyperparameters: two of them are named {name!r}, and one would be lost;"
        " rename one. Backends write nested names with dots, and numbers as text."
    )


def plain(value: object) -> Plain:
    """Return a setting as plain data; other objects than numbers, texts, containers as repr."""
    value = _in_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(cast("Mapping[Any, Any]", value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("list[Any]", value)]
    return repr(value)


def _in_python(value: Any) -> Any:
    """Convert a number of numpy, or a tensor without dimensions, to a Python number."""
    kinds = (np.generic, np.ndarray, torch.Tensor)
    if not isinstance(value, kinds) or value.ndim or not _is_one_number(value):
        return value
    number = value.item()
    return float(number) if isinstance(number, np.floating) else number


def flat(values: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Flatten nested settings to dotted names; lists become text.

    Raises:
        ArgumentError: two settings would have the same name.
    """
    table: dict[str, Plain] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            rows = flat(value, f"{prefix}{name}.")
        else:
            is_text = value is None or isinstance(value, (list, dict))
            rows = {prefix + name: str(value) if is_text else value}
        twice = table.keys() & rows.keys()
        if twice:
            raise _twice(min(twice))
        table |= rows
    return table


def spelt(value: Plain) -> Any:
    """Return plain data for JSON, with "NaN", "Infinity" and "-Infinity" as texts."""
    if isinstance(value, dict):
        return {name: spelt(item) for name, item in value.items()}
    if isinstance(value, list):
        return [spelt(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


T = TypeVar("T")

IMAGES = "images"


class Sink(Protocol):
    """The methods of a backend; `af.track.custom` makes a tracker from such an object.

    `backend` is the backend's own object, for its other features. `images` is called if the
    tracker was made with `accepts=("images",)`. A method may keep and change its arguments.
    """

    @property
    def backend(self) -> Any:
        """The backend's own object."""
        ...

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step."""
        ...

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        """Take the run's hyperparameters, nested."""
        ...

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        """Take images (height, width, channels) of uint8."""
        ...

    def close(self, *, failed: bool) -> None:
        """Store all values durably; `failed` means that the run ended with an exception."""
        ...


class Outlet:
    """A backend of a tracker; without a sink on ranks other than 0."""

    def __init__(
        self, name: str, sink: Sink | None, world: World, accepts: frozenset[str]
    ) -> None:
        """Take an open backend."""
        self.name, self.sink, self.world, self.accepts = name, sink, world, accepts
        self.is_closed = False
        self._tried = self._lost = 0
        self._first = ""

    def attempt(self, topic: str, act: Callable[[Sink], None]) -> Iterator[str]:
        """Call the backend; yield a warning text on the first failure."""
        if self.sink is None:
            return
        self._tried += 1
        try:
            act(self.sink)
        except Exception as error:  # noqa: BLE001 - the training continues after any error
            self._lost += 1
            if self._lost == 1:
                self._first = f"{topic}: {type(error).__name__}: {error}"
                yield (
                    f"{self.name} did not take {self._first}. The training goes on, and"
                    " so do the attempts; what is lost in all is said at the end."
                )

    def close(self, *, failed: bool) -> Iterator[str]:
        """Close the backend once; yield a warning text after failures."""
        if self.is_closed:
            return
        self.is_closed = True
        num_lost, num_tried, first = self._lost, self._tried, self._first
        if num_lost:
            yield f"{self.name} did not take {num_lost} of {num_tried} records, first {first}."
        if self.sink is not None:
            try:
                self.sink.close(failed=failed)
            except Exception as error:  # noqa: BLE001 - an error must not lose the training
                yield f"{self.name} did not close: {type(error).__name__}: {error}."


@arguments.hint_attributes()
class Tracker:
    """Sends metrics to backends: `tracker(metrics, step)`.

    Create a tracker with the functions of `af.track`. As a context manager, it closes its
    backends at the end of the block, also after an error. Call it on every rank: ranks other
    than 0 only check the arguments.

    A failing backend does not end the training: an `af.errors.TrackingWarning` names it once, and
    closing the tracker reports the total loss. `warnings.simplefilter("error",
    af.errors.TrackingWarning)` turns that into an error. Invalid arguments always raise an error.
    """

    def __init__(self, outlets: tuple[Outlet, ...]) -> None:
        """Take backends; use the functions of `af.track` instead."""
        self.outlets = outlets

    def __call__(self, metrics: Mapping[str, Number], step: int) -> None:
        """Track the numbers of a step: `tracker(metrics.all_reduce_mean(world), state.step)`.

        Args:
            metrics: numbers by name, in Python, numpy or tensors; `af.Metrics` in a world of 1.
            step: `state.step`, the number of updates so far.

        Cost: on rank 0 one wait for the device if tensors are on it, and what the backends do.

        Raises:
            ArgumentError: a value is not a number, or the metrics are not averaged over ranks.
        """
        check_step(step)
        check_metrics(metrics, tuple(outlet.world for outlet in self.outlets))
        if self._goes_on():
            read = floats(metrics)
            topic = f"the metrics of step {step}"
            self._tell(topic, read, lambda sink, x: sink.metrics(x, step))

    def hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Track hyperparameters: numbers, texts, and mappings and lists of them.

        numpy scalars and tensors without dimensions are numbers. Other objects are tracked as
        their repr; for a setup, this is the code that makes the setup.

        Raises:
            ArgumentError: the value is not a mapping by name, or two names would be equal: `1`
                and `"1"`, or `{"a": {"b": ...}}` and `"a.b"`.
        """
        values = settings(hyperparameters)
        if self._goes_on():
            topic = "the hyperparameters"
            self._tell(topic, values, lambda sink, x: sink.hyperparameters(x))

    def images(self, images: Mapping[str, torch.Tensor], step: int) -> None:
        """Track images by name: (channels, height, width), uint8 or floating from 0 to 1.

        A floating-point image that is not from 0 to 1 is not tracked, and a warning says so.

        Raises:
            ArgumentError: a value is not such a tensor, or no backend takes images.
        """
        check_step(step)
        check_names(IMAGES, images)
        for name, image in images.items():
            check_image(name, image)
        if self._goes_on(IMAGES):
            read, texts = _read_tensors(pixels, images, step)
            topic = f"the images of step {step}"
            self._tell(topic, read, lambda sink, x: sink.images(x, step), IMAGES, texts)

    @property
    def backends(self) -> dict[str, Any]:
        """The backends' own objects, by name; empty on ranks other than 0.

        The second of a kind has the name `"jsonl 2"`, in the order of `together`.
        """
        table: dict[str, Any] = {}
        for outlet in self.outlets:
            if outlet.sink is not None:
                names = chain([outlet.name], (f"{outlet.name} {i}" for i in count(2)))
                table[next(n for n in names if n not in table)] = outlet.sink.backend
        return table

    def close(self, *, failed: bool = False) -> None:
        """Close the backends, after they have stored all tracked values.

        Args:
            failed: whether the run ended with an exception; some backends show this.
        """
        _warn([text for outlet in self.outlets for text in outlet.close(failed=failed)])

    def __enter__(self) -> Self:
        """Return the tracker."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the tracker."""
        self.close(failed=kind is not None)

    def _goes_on(self, kind: str | None = None) -> bool:
        """Return whether this rank has a backend; raise if no backend takes this kind."""
        outlets = [outlet.name for outlet in self.outlets if outlet.is_closed]
        if outlets:
            msg = f"{outlets[0]} is closed; track inside the tracker's `with` block."
            raise TrackingError(msg)
        takers = [
            outlet for outlet in self.outlets if kind is None or kind in outlet.accepts
        ]
        if self.outlets and not takers:
            names = ", ".join(outlet.name for outlet in self.outlets)
            have = "tensorboard, wandb, comet" + (", mlflow" if kind == IMAGES else "")
            msg = f"{names} cannot hold {kind}; add one that can ({have})."
            raise ArgumentError(msg)
        return any(taker.sink is not None for taker in takers)

    def _tell(
        self,
        topic: str,
        read: T,
        act: Callable[[Sink, T], None],
        kind: str | None = None,
        texts: list[str] | None = None,
    ) -> None:
        """Call all backends of a kind, and warn about failures after all calls.

        Each backend gets its own copy, which shares no memory with the caller's tensors.
        """
        lines = [*(texts or ())]
        for outlet in self.outlets:
            if kind is None or kind in outlet.accepts:
                lines += outlet.attempt(topic, lambda sink: act(sink, deepcopy(read)))
        _warn(lines)


def _read_tensors(
    convert: Callable[[str, torch.Tensor], T],
    tensors: Mapping[str, torch.Tensor],
    step: int,
) -> tuple[dict[str, T], list[str]]:
    """Convert tensors, and return a warning text for each tensor with invalid values.

    Runs on rank 0 only, in the middle of a training, so it must not raise.
    """
    read, texts = dict[str, T](), list[str]()
    for name, tensor in tensors.items():
        try:
            read[name] = convert(name, tensor)
        except ArgumentError as error:
            texts.append(f"It is not tracked at step {step}: {error}")
    return read, texts


def _warn(texts: list[str]) -> None:
    if texts:
        warnings.warn("\n".join(texts), TrackingWarning, stacklevel=4)


def together(*trackers: Tracker | None) -> Tracker:
    """Combine trackers into one tracker; closing it closes all of them.

    Numbers are read from the device once. Images go to the trackers that take images, and
    raise an error if there is no such tracker. `None` is skipped, so you can create a tracker
    on a condition; without trackers, calls do nothing. `backends` numbers trackers of one kind:
    "jsonl" and "jsonl 2".

    Raises:
        ArgumentError: an argument is not a tracker, or appears twice.

    Example:
        >>> world = World.single()
        >>> from accelfn.track import in_memory
        >>> with together(in_memory(world=world), None) as tracker:
        ...     tracker({"loss": 0.5}, 1)
        ...     tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    for tracker in trackers:
        if tracker is not None and not isinstance(tracker, Tracker):
            msg = (
                f"af.track.together: expected trackers, got {tracker!r}; af.track.custom makes"
                " one of your own."
            )
            raise ArgumentError(msg)
    outlets = tuple(o for tracker in trackers if tracker for o in tracker.outlets)
    for i, outlet in enumerate(outlets):
        if outlet in outlets[:i]:
            msg = f"af.track.together: {outlet.name} is given twice; give each tracker once."
            raise ArgumentError(msg)
    return Tracker(outlets)


def custom(
    open_sink: Callable[[], Sink],
    *,
    name: str,
    world: World,
    accepts: tuple[str, ...] = (),
) -> Tracker:
    """Return a tracker for your own backend, which is opened on rank 0 only.

    Args:
        open_sink: called on rank 0; returns an object with the methods of `af.track.Sink`.
        name: the backend's name in warnings.
        world: the run's world.
        accepts: `("images",)` if the backend takes images.

    Raises:
        TrackingError: the backend could not be opened; the training has not begun.
    """
    if not isinstance(world, World):
        msg = f"af.track.{name}(world={world!r}): expected the af.World of the run."
        raise ArgumentError(msg)
    wrong = set(accepts) - {IMAGES}
    if wrong:
        msg = f"accepts={accepts!r}: expected ('{IMAGES}',) or ()."
        raise ArgumentError(msg)
    sink = None
    if world.is_main:
        try:
            sink = open_sink()
        except TrackingError:
            raise
        except Exception as error:
            msg = f"af.track.{name} could not begin: {type(error).__name__}: {error}"
            raise TrackingError(msg) from error
    return Tracker((Outlet(name, sink, world, frozenset(accepts)),))


# Memory of a process.


def peak_memory_bytes(world: World) -> int:
    """Return this rank's peak memory: of its device, or of the process.

    On an accelerator, torch's peak of allocated memory; on the CPU, the largest resident set.

    Raises:
        WorldError: torch does not count the memory of such a device.

    Example:
        >>> peak_memory_bytes(World.single()) > 1_000_000
        True
    """
    if world.device.type != "cpu":
        return devices.peak_memory(world.device)
    largest = system.peak_resident_bytes()
    if largest is None:
        msg = (
            "af.peak_memory_bytes(world): Windows does not report the memory of a process that"
            " computes on the CPU."
        )
        raise WorldError(msg)
    return largest


# The packages behind the backends, imported when one is used.


def package(module: str, *, extra: str) -> Any:
    """Import a module of an optional extra.

    Raises:
        TrackingError: the module is missing; the error names the package to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        msg = (
            f"af.track: {module} is not to be had ({error}). Install it:"
            f' python -m pip install "accelfn[{extra}]".'
        )
        raise TrackingError(msg) from error


def picture(image: Pixels, *, extra: str) -> Any:
    """Convert an image to Pillow's, which needs a single channel without its axis.

    Raises:
        TrackingError: Pillow is missing; the error names the package to install.
    """
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return package("PIL.Image", extra=extra).fromarray(pixels)


# `in_memory`: tracked values as dicts, for notebooks and tests.


@attrs.define
class Kept:
    """Tracked values by name, then by step."""

    metrics: dict[str, dict[int, float]] = attrs.field(factory=dict)
    hyperparameters: dict[str, Plain] = attrs.field(factory=dict)
    images: dict[str, dict[int, Pixels]] = attrs.field(factory=dict)


class _InMemory:
    def __init__(self) -> None:
        self.backend = Kept()

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        _keep(self.backend.metrics, metrics, step)

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        self.backend.hyperparameters.update(hyperparameters)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        _keep(self.backend.images, images, step)

    def close(self, *, failed: bool) -> None:
        """Keep all."""


def _keep(log: dict[str, dict[int, Any]], values: Mapping[str, Any], step: int) -> None:
    for name, value in values.items():
        log.setdefault(name, {})[step] = value


def in_memory(*, world: World) -> Tracker:
    """Return a tracker that keeps values in memory, by name and step.

    Example:
        >>> tracker = in_memory(world=World.single())
        >>> tracker({"loss": 0.5}, 1)
        >>> tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    return custom(_InMemory, name="in_memory", world=world, accepts=(IMAGES,))


# `progress`: a progress bar for a terminal or a notebook.


_TIMES = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
_EVERY = 0.1
"""Seconds between two updates of a bar in a notebook, as in rich on a terminal."""


def progress(work: Iterable[T], *, world: World, label: str = "") -> Iterator[T]:
    """Yield the items of `work`, with a bar on rank 0's terminal or in a notebook's cell.

    The bar goes to standard error, below other output; in a notebook it is one output of the
    cell, which is updated in place. Nothing is written to a file, a pipe or a scheduler's log,
    or on other ranks. The total is the `len` of the work; without a `len`, the bar shows only
    the progress.

    Args:
        work: an iterable, such as `af.batches(state, until_epoch=3)`.
        world: the run's world.
        label: a text before the bar.

    Example:
        >>> list(progress(range(3), world=World.single(), label="training"))
        [0, 1, 2]
    """
    if not isinstance(work, Iterable):
        msg = f"af.track.progress({work!r}): expected something to iterate over."
        raise ArgumentError(msg)
    return _with_a_bar(work, label) if world.is_main else iter(work)


def _with_a_bar(work: Iterable[T], label: str) -> Iterator[T]:
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
    with bars.Progress(*columns, console=console) as bar:
        # its iterator, for rich asks anything else for a length
        yield from bar.track(iter(work), total=total, description=label)


def _in_cell(
    work: Iterable[T], bar: bars.Progress, total: int | None, label: str
) -> Iterator[T]:
    """Show a bar as an output of the cell, without the widgets package that rich needs."""
    task = bar.add_task(label, total=total)
    last, num_done = time.monotonic(), 0
    output = import_module("IPython.display").display(bar, display_id=True)
    try:
        for item in work:
            yield item
            num_done += 1
            if time.monotonic() - last >= _EVERY:
                last = time.monotonic()
                bar.update(task, completed=num_done)
                output.update(bar)
    finally:
        bar.update(task, completed=num_done)
        output.update(bar)


@contextmanager
def bar_of_bytes(label: str, total: int) -> Generator[Callable[[int], object]]:
    """Show a bar of bytes; the block calls the yielded function with each number done."""
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
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
