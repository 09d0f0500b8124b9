# SPDX-License-Identifier: Apache-2.0
"""`Tracker`: send a run's metrics from rank 0 to one or several backends.

Every rank checks the arguments of a call, so that either all ranks raise an error or no rank does.
Rank 0 then reads the numbers from the device and passes them to each backend. If a backend fails
(full disk, lost network), accelfn warns and training continues.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import chain, count
from typing import Any, Protocol, Self, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from accelfn import Metrics, World
from accelfn.errors import ArgumentError, TrackingError, TrackingWarning, WorldError
from accelfn.plug import arguments, devices, system

# Check tracked values, and convert them to plain data for backends.


Number: TypeAlias = float | torch.Tensor | np.generic
"""A number on any device. Reading a number from an accelerator waits for the accelerator."""
Pixels: TypeAlias = NDArray[np.uint8]
"""An image of shape (height, width, channels), with 1, 3 or 4 channels."""
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MOST_STEPS = 2**63
"""Step numbers must be smaller, because backends store them in 64 bits."""

_NUMBERS = (int, float, np.number, np.bool_)
_NO_REAL_NUMBERS = (np.complexfloating, np.timedelta64)  # subclasses of np.number


def check_step(step: object) -> None:
    """Raise `ArgumentError` if a step is not an integer from 0 to 2**63 - 1."""
    if not arguments.is_integer(step, 0) or step >= MOST_STEPS:
        msg = f"step={step!r}: expected the number of updates so far, state.step."
        raise ArgumentError(msg)


def _as_mapping(subject: str, values: object) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        msg = f"{subject}: expected a dict by name, got {type(values).__name__}."
        raise ArgumentError(msg)
    return cast("Mapping[Any, Any]", values)


def check_names(subject: str, values: object) -> None:
    """Check that values are a mapping with valid names.

    Raises:
        ArgumentError: the values are not a mapping, or a name is empty, is `step`, or is not a
            string that can be encoded.
    """
    for name in _as_mapping(subject, values):
        if not arguments.is_word(name):
            msg = f"{subject}: expected a non-empty str as each name, got {name!r}."
            raise ArgumentError(msg)
        if name == "step":
            msg = f"{subject}: the name 'step' is reserved for the step; use another name."
            raise ArgumentError(msg)


def check_metrics(metrics: object, worlds: tuple[World, ...]) -> None:
    """Check that metrics are numbers by name, without reading from a device.

    Raises:
        ArgumentError: a value is not one real number, or the metrics are not averaged over ranks.
    """
    check_names("metrics", metrics)
    if isinstance(metrics, Metrics) and any(world.loss.size > 1 for world in worlds):
        msg = (
            "tracker(metrics, step): these Metrics have the values of this rank only. Pass"
            " metrics.all_reduce_mean(world), or dict(metrics) for the values of rank 0 only."
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
    if isinstance(value, int):  # too large for a float, and perhaps for Python's repr
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _is_one_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return array.size == 1 and np.can_cast(array.dtype, np.float64, "same_kind")
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, _NUMBERS) and not isinstance(value, _NO_REAL_NUMBERS)


def floats(metrics: Mapping[str, Number]) -> dict[str, float]:
    """Convert numbers to Python floats; wait for the device only once."""
    away = {
        name: value.detach().reshape(()).to(torch.float64)
        for name, value in metrics.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    read = torch.stack(list(away.values())).tolist() if away else []
    items = {**metrics, **dict(zip(away, read, strict=True))}.items()
    kinds = torch.Tensor, np.ndarray
    return {n: float(v.item() if isinstance(v, kinds) else v) for n, v in items}


def check_image(name: str, image: object) -> None:
    """Check that a value is an image.

    Raises:
        ArgumentError: the value is not a uint8 or floating-point tensor of shape (channels,
            height, width).
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
    """Convert an image to a uint8 array of shape (height, width, channels).

    Raises:
        ArgumentError: a floating-point image has values below 0 or above 1.
    """
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.double()
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):
            msg = (
                f"images: {name!r} has values from {low:.6g} to {high:.6g}; floating-point"
                " images need values from 0 (black) to 1."
            )
            raise ArgumentError(msg)
        image = (image * 255).round().to(torch.uint8)
    return image.permute(1, 2, 0).contiguous().numpy()


def settings(values: object) -> dict[str, Plain]:
    """Convert hyperparameters to nested dicts of plain data.

    Raises:
        ArgumentError: the value is not a mapping, contains itself, or has the same name twice.
    """
    try:
        table = _plain_mapping(_as_mapping("hyperparameters", values))
        flat(table)
    except RecursionError:
        msg = "hyperparameters: they are nested too deeply, or contain themselves."
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
        f"hyperparameters: two have the same name {name!r}. Rename one of them. Backends join"
        " nested names with dots, and write a number as a name as text."
    )


def plain(value: object) -> Plain:
    """Convert a value to plain data; replace an object of another type by its repr."""
    value = _in_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(cast("Mapping[Any, Any]", value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("list[Any]", value)]
    return repr(value)


def _in_python(value: Any) -> Any:
    """Convert a NumPy number, or a tensor without dims, to a Python number."""
    kinds = (np.generic, np.ndarray, torch.Tensor)
    if not isinstance(value, kinds) or value.ndim or not _is_one_number(value):
        return value
    number = value.item()
    return float(number) if isinstance(number, np.floating) else number


def flat(values: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Flatten nested hyperparameters to names with dots; convert lists to text.

    Raises:
        ArgumentError: two hyperparameters would have the same name.
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
    """Convert plain data for JSON: NaN and infinities become strings such as "NaN"."""
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
    """The methods that your own backend needs; pass such an object to `af.track.custom`.

    `images` is called only if you passed `accepts=("images",)` to `af.track.custom`. Methods may
    store and change their arguments, because the arguments are copies.
    """

    @property
    def backend(self) -> Any:
        """The object that users get from `tracker.backends`, such as a writer or a run."""
        ...

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step."""
        ...

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        """Record the run's hyperparameters; they can be nested."""
        ...

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        """Record images: uint8 arrays of shape (height, width, channels)."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write all values to storage; `failed` means that the run ended with an exception."""
        ...


class Outlet:
    """One backend of a tracker, with the count of lost records."""

    def __init__(
        self, name: str, sink: Sink | None, world: World, *, has_images: bool
    ) -> None:
        """Wrap an open backend; `sink` is None on ranks other than 0."""
        self.name, self.sink, self.world = name, sink, world
        self.has_images, self.is_closed = has_images, False
        self._tried = self._lost = 0
        self._first = ""

    def attempt(self, topic: str, act: Callable[[Sink], None]) -> Iterator[str]:
        """Call the backend; yield a warning text if this is its first failure."""
        if self.sink is None:
            return
        self._tried += 1
        try:
            act(self.sink)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            self._lost += 1
            if self._lost == 1:
                self._first = f"{topic}: {type(error).__name__}: {error}"
                yield (
                    f"{self.name} failed to record {self._first}. Training continues, and"
                    " accelfn still sends later records. At the end it warns how many were lost."
                )

    def close(self, *, failed: bool) -> Iterator[str]:
        """Close the backend, only at the first call; yield warning texts about failures."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._lost:
            summary = f"{self._lost} of {self._tried} records"
            yield f"{self.name} failed to record {summary}; the first failure: {self._first}."
        if self.sink is not None:
            try:
                self.sink.close(failed=failed)
            except Exception as error:  # noqa: BLE001 - the run must not fail at its end
                yield f"{self.name} failed to close: {type(error).__name__}: {error}."


@arguments.hint_attributes()
class Tracker:
    """Sends metrics to one or several backends: `tracker(metrics, step)`.

    Create a tracker with the functions of `af.track`. Use `with tracker:` to close its backends
    at the end of the block, also after an error. Call the tracker on every rank: ranks other than
    0 only check the arguments.

    If a backend fails, training continues. accelfn warns with `af.errors.TrackingWarning` at the
    first failure of a backend, and again with the number of lost records when you close the
    tracker. `warnings.simplefilter("error", af.errors.TrackingWarning)` turns these warnings into
    errors. Invalid arguments always raise an error.
    """

    def __init__(self, outlets: tuple[Outlet, ...]) -> None:
        """Combine backends; in your code, call a function of `af.track` instead."""
        self.outlets = outlets

    def __call__(self, metrics: Mapping[str, Number], step: int) -> None:
        """Track the numbers of a step: `tracker(metrics.all_reduce_mean(world), state.step)`.

        Args:
            metrics: numbers by name: Python numbers, NumPy numbers, or tensors with one element.
                In a world of 1 also `af.Metrics`.
            step: `state.step`, the number of updates so far.

        Cost: on rank 0 the work of the backends, and one wait for the device if a number is on it.

        Raises:
            ArgumentError: a value is not one real number, or the metrics are not averaged over
                ranks.
        """
        check_step(step)
        check_metrics(metrics, tuple(outlet.world for outlet in self.outlets))
        if self._has_backend(self.outlets):
            read = floats(metrics)
            topic = f"the metrics of step {step}"
            _tell(self.outlets, topic, read, lambda sink, x: sink.metrics(x, step))

    def hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Track hyperparameters: a dict of numbers, strings, and nested dicts and lists.

        NumPy scalars and tensors without dims count as numbers. Any other object is tracked as
        its repr. The repr of a setup is the code that creates the setup.

        Raises:
            ArgumentError: the value is not a dict, or two names would be equal, such as `1` and
                `"1"`, or `{"a": {"b": ...}}` and `"a.b"`.
        """
        values = settings(hyperparameters)
        if self._has_backend(self.outlets):
            topic = "the hyperparameters"
            _tell(self.outlets, topic, values, lambda sink, x: sink.hyperparameters(x))

    def images(self, images: Mapping[str, torch.Tensor], step: int) -> None:
        """Track images: a dict from names to tensors of shape (channels, height, width).

        Images are uint8, or floating-point with values from 0 to 1. If a floating-point image has
        other values, accelfn does not track the image and warns.

        Raises:
            ArgumentError: a value is not such a tensor, or no backend stores images.
        """
        check_step(step)
        check_names(IMAGES, images)
        for name, image in images.items():
            check_image(name, image)
        takers = [outlet for outlet in self.outlets if outlet.has_images]
        is_read = self._has_backend(takers)
        if self.outlets and not takers:
            names = ", ".join(outlet.name for outlet in self.outlets)
            have = "tensorboard, wandb, comet, mlflow"
            msg = f"{names} cannot store images. Add a tracker that can: {have}."
            raise ArgumentError(msg)
        if not is_read:
            return
        read, texts = dict[str, Pixels](), list[str]()
        for name, image in images.items():
            try:
                read[name] = pixels(name, image)
            except ArgumentError as error:  # an error on rank 0 alone would end the run
                texts.append(f"An image was not tracked at step {step}: {error}")
        topic = f"the images of step {step}"
        _tell(takers, topic, read, lambda sink, x: sink.images(x, step), texts)

    @property
    def backends(self) -> dict[str, Any]:
        """The backends' own objects, such as a `SummaryWriter`, by name; empty on other ranks.

        Only rank 0 has backends. The second backend of a kind, in the order of `together`, has
        the number 2 in its name: "jsonl 2".
        """
        table: dict[str, Any] = {}
        for outlet in self.outlets:
            if outlet.sink is not None:
                names = chain([outlet.name], (f"{outlet.name} {i}" for i in count(2)))
                table[next(n for n in names if n not in table)] = outlet.sink.backend
        return table

    def close(self, *, failed: bool = False) -> None:
        """Close the backends after they have written all tracked values.

        Args:
            failed: whether the run ended with an exception. Some backends show this.
        """
        _warn([text for outlet in self.outlets for text in outlet.close(failed=failed)])

    def __enter__(self) -> Self:
        """Return the tracker."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the tracker."""
        self.close(failed=kind is not None)

    def _has_backend(self, takers: Iterable[Outlet]) -> bool:
        """Return whether this rank has one of these backends.

        Raises:
            TrackingError: a backend of the tracker is closed.
        """
        for outlet in self.outlets:
            if outlet.is_closed:
                msg = f"{outlet.name} is closed; call the tracker inside its `with` block."
                raise TrackingError(msg)
        return any(taker.sink is not None for taker in takers)


def _tell(
    outlets: Iterable[Outlet],
    topic: str,
    read: T,
    act: Callable[[Sink, T], None],
    texts: Iterable[str] = (),
) -> None:
    """Call backends, then warn about their failures.

    Each backend gets a copy of the values, which shares no memory with the caller's tensors.
    """
    lines = [*texts]
    for outlet in outlets:
        lines += outlet.attempt(topic, lambda sink: act(sink, deepcopy(read)))
    _warn(lines)


def _warn(texts: list[str]) -> None:
    if texts:
        warnings.warn("\n".join(texts), TrackingWarning, stacklevel=4)


def together(*trackers: Tracker | None) -> Tracker:
    """Combine trackers into one tracker, which also closes all of them.

    Numbers are read from the device only once. Images are sent to the trackers that store images;
    without such a tracker, they raise an error. You can pass `None` instead of a tracker, for
    example from a condition. Without any tracker, calls do nothing. In `backends`, two trackers of
    the same kind have the names "jsonl" and "jsonl 2".

    Raises:
        ArgumentError: an argument is not a tracker, or is passed twice.

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
                f"af.track.together: expected trackers, got {tracker!r}. For your own backend,"
                " create a tracker with af.track.custom."
            )
            raise ArgumentError(msg)
    outlets = tuple(o for tracker in trackers if tracker for o in tracker.outlets)
    for i, outlet in enumerate(outlets):
        if outlet in outlets[:i]:
            msg = f"af.track.together: {outlet.name} is passed twice; pass each tracker once."
            raise ArgumentError(msg)
    return Tracker(outlets)


def custom(
    open_sink: Callable[[], Sink],
    *,
    name: str,
    world: World,
    accepts: tuple[str, ...] = (),
) -> Tracker:
    """Create a tracker for your own backend; only rank 0 opens the backend.

    Args:
        open_sink: a function without arguments, called on rank 0. It returns an object with the
            methods of `af.track.Sink`.
        name: the backend's name in warnings.
        world: the run's world.
        accepts: `("images",)` if the backend stores images.

    Raises:
        TrackingError: `open_sink` failed.
    """
    if not isinstance(world, World):
        msg = f"af.track.{name}(world={world!r}): expected the af.World of the run."
        raise ArgumentError(msg)
    if set(accepts) - {IMAGES}:
        msg = f"af.track.custom(accepts={accepts!r}): expected ('{IMAGES}',) or ()."
        raise ArgumentError(msg)
    sink = None
    if world.is_main:
        try:
            sink = open_sink()
        except TrackingError:
            raise
        except Exception as error:
            msg = f"af.track.{name} could not start: {type(error).__name__}: {error}"
            raise TrackingError(msg) from error
    return Tracker((Outlet(name, sink, world, has_images=bool(accepts)),))


# `peak_memory_bytes`: the peak memory of a rank.


def peak_memory_bytes(world: World) -> int:
    """Return this rank's peak memory in bytes.

    On an accelerator, this is torch's peak of allocated device memory. On the CPU, this is the
    largest resident set size of the process.

    Raises:
        WorldError: torch does not count the memory of devices of this type.

    Example:
        >>> peak_memory_bytes(World.single()) > 1_000_000
        True
    """
    if world.device.type != "cpu":
        return devices.peak_memory(world.device)
    largest = system.peak_resident_bytes()
    if largest is None:
        msg = "af.peak_memory_bytes(world): on the CPU, Windows does not report the memory."
        raise WorldError(msg)
    return largest


# Import the packages of backends when a tracker needs them.


package = partial(arguments.package, call="af.track", error=TrackingError)
"""Imports a module that an optional extra of accelfn installs."""


def picture(image: Pixels, *, extra: str) -> Any:
    """Convert an image to a Pillow image.

    Raises:
        TrackingError: Pillow cannot be imported; the message says what to install.
    """
    # Pillow expects an image with one channel as (height, width)
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return package("PIL.Image", extra=extra).fromarray(pixels)


# `in_memory`: keep tracked values in dicts, for notebooks and tests.


@attrs.define
class Kept:
    """The values that `in_memory` keeps: for each name, a dict from step to value."""

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
        """Do nothing: the values stay in memory."""


def _keep(log: dict[str, dict[int, Any]], values: Mapping[str, Any], step: int) -> None:
    for name, value in values.items():
        log.setdefault(name, {})[step] = value


@arguments.explain_call_errors
def in_memory(*, world: World) -> Tracker:
    """Create a tracker that keeps values in memory, by name and step.

    Example:
        >>> tracker = in_memory(world=World.single())
        >>> tracker({"loss": 0.5}, 1)
        >>> tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    return custom(_InMemory, name="in_memory", world=world, accepts=(IMAGES,))


# `progress`: a progress bar for a terminal or a notebook.


_EVERY = 0.1
"""Seconds between two updates of a bar in a notebook; rich uses the same on a terminal."""


def progress(work: Iterable[T], *, world: World, label: str = "") -> Iterator[T]:
    """Yield the items of `work`, and show a progress bar on rank 0.

    On a terminal, the bar is written to standard error, below other output. In a notebook, the
    bar is an output of the cell. It shows the items per second. Nothing is shown if standard
    error is a file, a pipe or a scheduler's log, or on other ranks. The bar's total is
    `len(work)`. Without a `len`, the bar only counts items.

    Args:
        work: an iterable, such as `af.batches(state, until_epoch=3)`.
        world: the run's world.
        label: the text before the bar.

    Raises:
        TrackingError: the package rich is not installed; it belongs to the extra `interactive`.

    Example:
        >>> list(progress(range(3), world=World.single(), label="training"))
        [0, 1, 2]
    """
    if not isinstance(work, Iterable):
        msg = f"af.track.progress({work!r}): expected an iterable."
        raise ArgumentError(msg)
    bars = package("rich.progress", extra="interactive")
    return _with_a_bar(work, label, bars) if world.is_main else iter(work)


def _with_a_bar(work: Iterable[T], label: str, bars: Any) -> Iterator[T]:
    console = bars.Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield from work
        return
    try:
        total = len(work) if isinstance(work, Sized) else None
    except (ArgumentError, TypeError):  # endless batches, or a DataLoader of a stream
        total = None

    class Speed(bars.ProgressColumn):
        def render(self, task: Any) -> Any:
            return bars.Text(f"{task.finished_speed or task.speed or 0:.3g} it/s")

    columns = (
        *(bars.TextColumn("{task.description}"), bars.BarColumn()),
        *(bars.MofNCompleteColumn(), Speed(), bars.TimeElapsedColumn()),
        bars.TimeRemainingColumn(),
    )
    if console.is_jupyter:
        yield from _in_cell(work, bars.Progress(*columns, disable=True), total, label)
        return
    with bars.Progress(*columns, console=console) as bar:
        # pass an iterator, because rich calls len() on other objects
        yield from bar.track(iter(work), total=total, description=label)


def _in_cell(work: Iterable[T], bar: Any, total: int | None, label: str) -> Iterator[T]:
    """Yield items with a bar in a notebook's cell; rich's own bar needs ipywidgets."""
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
    """Show a progress bar in bytes; call the yielded function with the bytes just done.

    Without the package rich, no bar is shown.
    """
    try:
        bars = import_module("rich.progress")
    except ImportError:
        yield lambda _: None
        return
    columns = (
        *(bars.TextColumn("{task.description}"), bars.BarColumn()),
        *(bars.DownloadColumn(), bars.TimeElapsedColumn()),
        bars.TimeRemainingColumn(),
    )
    console = bars.Console(stderr=True)
    # transient: remove the bar at the end, because the program prints its result
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
