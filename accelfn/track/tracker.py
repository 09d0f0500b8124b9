# SPDX-License-Identifier: Apache-2.0
"""`Tracker`: what a run says of itself, to any number of backends, on rank 0 alone.

A call is checked on every rank alike, so that all of them refuse it or none does; on rank 0
the numbers are then read from the device and handed to each backend. One that fails, for the
disk is full or the network gone, is named in a warning, and the training goes on.
"""

import math
import resource
import sys
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

from accelfn.base import devices, words
from accelfn.base.arguments import explain_call_errors, is_integer
from accelfn.base.words import hint_attributes
from accelfn.errors import ArgumentError, TrackingError, TrackingWarning
from accelfn.state.metrics import Metrics
from accelfn.world import World

# What a run gives to its trackers, as the plain values that every backend takes.


Number: TypeAlias = float | torch.Tensor | np.generic
"""One number, wherever it is: its conversion waits for the device."""
Pixels: TypeAlias = NDArray[np.uint8]
"""(height, width, channels), with 1, 3 or 4 channels."""
"""One axis."""
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MOST_STEPS = 2**63
"""What no backend's number of updates reaches."""

_NUMBERS = (int, float, np.number, np.bool_)
_NO_REAL_NUMBERS = (np.complexfloating, np.timedelta64)  # though numpy's class says so


def check_step(step: object) -> None:
    """Refuse what is no count of updates."""
    if not is_integer(step, 0) or step >= MOST_STEPS:
        msg = f"step={step!r}: expected the number of updates so far, state.step."
        raise ArgumentError(msg)


def check_names(what: str, values: object) -> None:
    """Refuse what is no mapping by name.

    Raises:
        ArgumentError: it is none, or a name is empty, no text that can be written, or
            `step`.
    """
    if not isinstance(values, Mapping):
        msg = f"{what}: expected a mapping by name, got {type(values).__name__}."
        raise ArgumentError(msg)
    for name in cast("Mapping[Any, Any]", values):
        if not isinstance(name, str) or not name or not _is_whole(name):
            msg = f"{what}: the name {name!r} is no text; give {what} by name."
            raise ArgumentError(msg)
        if name == "step":
            msg = f"{what}: 'step' is the tracker's second argument; take another name."
            raise ArgumentError(msg)


def _is_whole(text: str) -> bool:
    """Return whether a text has no half of a letter, which no file of text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_metrics(metrics: object, worlds: tuple[World, ...]) -> None:
    """Refuse what are no numbers by name; nothing is read from a device.

    Raises:
        ArgumentError: a value is not one number; or the metrics are this rank's alone.
    """
    check_names("metrics", metrics)
    if isinstance(metrics, Metrics) and any(world.loss.size > 1 for world in worlds):
        msg = (
            "These Metrics are what this rank alone saw: track af.mean(metrics, world),"
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
    """Return numbers on the host: the one wait for the device, however many there are."""
    away = {
        name: value.detach().reshape(()).to(torch.float64)
        for name, value in metrics.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    read = torch.stack(list(away.values())).tolist() if away else []
    fetched = dict(zip(away, read, strict=True))
    return {
        name: fetched[name] if name in fetched else _float(value)
        for name, value in metrics.items()
    }


def _float(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return float(value.item() if isinstance(value, np.ndarray) else value)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, and on a device that keeps values."""
    return tensor.layout == torch.strided and not tensor.is_meta


def check_image(name: str, image: object) -> None:
    """Refuse what is no image.

    Raises:
        ArgumentError: it is no tensor (channels, height, width) of uint8, or of numbers.
    """
    if (
        not isinstance(image, torch.Tensor)
        or image.ndim != 3
        or image.shape[0] not in (1, 3, 4)
        or not image.numel()
        or not has_values(image)
        or not (image.dtype == torch.uint8 or image.is_floating_point())
    ):
        is_tensor = isinstance(image, torch.Tensor)
        shown = _describe_value(image) if is_tensor else type(image).__name__
        msg = (
            f"images: {name!r} is {shown}; expected a tensor (channels, height, width)"
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


def settings(given: object) -> dict[str, Plain]:
    """Return hyperparameters as plain data: nested, by name.

    Raises:
        ArgumentError: it is no mapping, it has itself in it, or two names in it are one.
    """
    if not isinstance(given, Mapping):
        msg = (
            f"hyperparameters: expected a mapping by name, got {type(given).__name__}."
        )
        raise ArgumentError(msg)
    try:
        told = _plain_mapping(cast("Mapping[Any, Any]", given))
        flat(told)
    except RecursionError:
        msg = "hyperparameters: they are nested too deeply, or have themselves in them."
        raise ArgumentError(msg) from None
    return told


def _plain_mapping(given: Mapping[Any, Any]) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for name, value in given.items():
        if str(name) in found:
            raise _twice(str(name))
        found[str(name)] = plain(value)
    return found


def _twice(name: str) -> ArgumentError:
    return ArgumentError(
        f"hyperparameters: two of them are named {name!r}, of which one would be lost;"
        " rename one. Backends write nested names with dots, and numbers as text."
    )


def plain(value: object) -> Plain:
    """Return a setting as plain data: what is no number, text or container as its repr."""
    value = _in_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(cast("Mapping[Any, Any]", value))
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in cast("list[Any]", value)]
    return repr(value)


def _in_python(value: Any) -> Any:
    """Return a number of numpy's, or of a tensor without a dimension, as Python's own."""
    kinds = (np.generic, np.ndarray, torch.Tensor)
    if not isinstance(value, kinds) or value.ndim or not _is_one_number(value):
        return value
    number = value.item()
    return float(number) if isinstance(number, np.floating) else number


def flat(values: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Return settings by names with dots, for backends without nested ones; lists as text.

    Raises:
        ArgumentError: two would have one name.
    """
    found: dict[str, Plain] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            added = flat(value, f"{prefix}{name}.")
        else:
            is_text = value is None or isinstance(value, (list, dict))
            added = {prefix + name: str(value) if is_text else value}
        twice = found.keys() & added.keys()
        if twice:
            raise _twice(min(twice))
        found |= added
    return found


def spelt(value: Plain) -> Any:
    """Return plain data as JSON has it: "NaN", "Infinity" and "-Infinity" are texts there."""
    if isinstance(value, dict):
        return {name: spelt(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelt(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


T = TypeVar("T")

IMAGES = "images"


class Sink(Protocol):
    """What a backend does with plain values; `af.track.custom` makes a tracker of one.

    `backend` is the backend's own object, for what is its alone. `images` is
    called if the tracker was made with `accepts=("images",)`. What a method is given is its
    own, to keep and to change.
    """

    @property
    def backend(self) -> Any:
        """The backend's own object."""
        ...

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step."""
        ...

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        """Take what the run was made with, nested."""
        ...

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        """Take images (height, width, channels) of uint8."""
        ...

    def close(self, *, failed: bool) -> None:
        """Let all that was taken last; `failed` says that the run ended with an exception."""
        ...


class Outlet:
    """One backend of a tracker; on other ranks than 0 there is none behind it."""

    def __init__(
        self, name: str, sink: Sink | None, world: World, accepts: frozenset[str]
    ) -> None:
        """Take a backend that is open."""
        self.name, self.sink, self.world, self.accepts = name, sink, world, accepts
        self.is_closed = False
        self._tried = self._lost = 0
        self._first = ""

    def attempt(self, what: str, act: Callable[[Sink], None]) -> Iterator[str]:
        """Do something to the backend; yield what is to be said of a first failure."""
        if self.sink is None:
            return
        self._tried += 1
        try:
            act(self.sink)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._lost += 1
            if self._lost == 1:
                self._first = f"{what}: {type(error).__name__}: {error}"
                yield (
                    f"{self.name} did not take {self._first}. The training goes on, and"
                    " so do the attempts; what is lost in all is said at the end."
                )

    def close(self, *, failed: bool) -> Iterator[str]:
        """Close the backend, once; yield what is to be said of it."""
        if self.is_closed:
            return
        self.is_closed = True
        lost, tried, first = self._lost, self._tried, self._first
        if lost:
            yield f"{self.name} did not take {lost} of {tried} records, first {first}."
        if self.sink is not None:
            try:
                self.sink.close(failed=failed)
            except Exception as error:  # noqa: BLE001 - what was trained must not be lost by it
                yield f"{self.name} did not close: {type(error).__name__}: {error}."


@hint_attributes(words.TRACKER)
class Tracker:
    """Tells backends what a run says of itself: `tracker(metrics, step)`.

    Made by the functions of `af.track`; a context manager, which closes its backends however
    its block ends. Call it on every rank: on others than rank 0 it checks, and does nothing
    else.

    A backend that fails does not end the training: an `af.TrackingWarning` names it, once,
    and what is lost in all is said when it is closed. `warnings.simplefilter("error",
    af.TrackingWarning)` makes that an error. A mistake in the call is always one.
    """

    def __init__(self, outlets: tuple[Outlet, ...]) -> None:
        """Take backends; the functions of `af.track` do it."""
        self.outlets = outlets

    def __call__(self, metrics: Mapping[str, Number], step: int) -> None:
        """Track the numbers of a step: `tracker(af.mean(metrics, world), state.step)`.

        Args:
            metrics: numbers by name, in Python, numpy or tensors; `af.Metrics` in a world of 1.
            step: `state.step`, the number of updates so far.

        Cost: on rank 0 one wait for the device if tensors are on it, and what the backends do.

        Raises:
            ArgumentError: a value is no number, or these are the metrics of this rank alone.
        """
        check_step(step)
        check_metrics(metrics, tuple(each.world for each in self.outlets))
        if self._goes_on():
            read = floats(metrics)
            what = f"the metrics of step {step}"
            self._tell(what, read, lambda sink, own: sink.metrics(own, step))

    def hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Track what the run is made with: numbers, texts, and mappings and lists of them.

        numpy's scalars and tensors without a dimension are numbers, too. Anything else is its
        repr: of a setup that is the code that makes it.

        Raises:
            ArgumentError: it is no mapping by name, or two names in it would be one: `1` and
                `"1"`, or `{"a": {"b": ...}}` and `"a.b"`.
        """
        told = settings(hyperparameters)
        if self._goes_on():
            what = "the hyperparameters"
            self._tell(what, told, lambda sink, own: sink.hyperparameters(own))

    def images(self, images: Mapping[str, torch.Tensor], step: int) -> None:
        """Track images by name: (channels, height, width), uint8 or floating from 0 to 1.

        A floating-point image that is not from 0 to 1 is not tracked, and a warning says so.

        Raises:
            ArgumentError: one is no such tensor; or no backend has images.
        """
        check_step(step)
        check_names(IMAGES, images)
        for name, image in images.items():
            check_image(name, image)
        if self._goes_on(IMAGES):
            read, said = _read_tensors(pixels, images, step)
            what = f"the images of step {step}"
            self._tell(what, read, lambda sink, x: sink.images(x, step), IMAGES, said)

    @property
    def backends(self) -> dict[str, Any]:
        """The backends' own objects, by name; of other ranks than 0, none.

        Of several of a kind the second is `"jsonl 2"`, in the order of `together`.
        """
        found: dict[str, Any] = {}
        for each in self.outlets:
            if each.sink is not None:
                names = chain([each.name], (f"{each.name} {i}" for i in count(2)))
                found[next(n for n in names if n not in found)] = each.sink.backend
        return found

    def close(self, *, failed: bool = False) -> None:
        """Close the backends: what was tracked is then where it belongs.

        Args:
            failed: the run ended with an exception, which backends that can will show.
        """
        _warn([said for each in self.outlets for said in each.close(failed=failed)])

    def __enter__(self) -> Self:
        """Return the tracker."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close(failed=kind is not None)

    def _goes_on(self, kind: str | None = None) -> bool:
        """Return whether there is a backend here; refuse what none would take on rank 0."""
        closed = [each.name for each in self.outlets if each.is_closed]
        if closed:
            msg = f"{closed[0]} is closed; track inside the tracker's `with` block."
            raise TrackingError(msg)
        takers = [each for each in self.outlets if kind is None or kind in each.accepts]
        if self.outlets and not takers:
            names = ", ".join(each.name for each in self.outlets)
            have = "tensorboard, wandb, comet" + (", mlflow" if kind == IMAGES else "")
            msg = f"{names} cannot hold {kind}; add one that can ({have})."
            raise ArgumentError(msg)
        return any(each.sink is not None for each in takers)

    def _tell(
        self,
        what: str,
        read: T,
        act: Callable[[Sink, T], None],
        kind: str | None = None,
        said: list[str] | None = None,
    ) -> None:
        """Tell all that take it, and then warn: no backend waits for another's failure.

        Each has a copy of its own, which shares no memory with the caller's tensors either.
        """
        told = [*(said or ())]
        for each in self.outlets:
            if kind is None or kind in each.accepts:
                told += each.attempt(what, lambda sink: act(sink, deepcopy(read)))
        _warn(told)


def _read_tensors(
    convert: Callable[[str, torch.Tensor], T],
    tensors: Mapping[str, torch.Tensor],
    step: int,
) -> tuple[dict[str, T], list[str]]:
    """Return what tensors hold, and what is to be said of those that hold something else.

    It is read on rank 0 alone, in the middle of a training: that goes on.
    """
    read, said = dict[str, T](), list[str]()
    for name, each in tensors.items():
        try:
            read[name] = convert(name, each)
        except ArgumentError as error:
            said.append(f"It is not tracked at step {step}: {error}")
    return read, said


def _warn(told: list[str]) -> None:
    if told:
        warnings.warn("\n".join(told), TrackingWarning, stacklevel=4)


@explain_call_errors
def together(*trackers: Tracker | None) -> Tracker:
    """Return one tracker that tells all of these; closing it closes them.

    Numbers are read from the device once for all. Images go to those that have
    them, and are refused if none has. `None` is left out, so a tracker can be made on a
    condition; without any it does nothing. `backends` numbers those of one kind: "jsonl" and
    "jsonl 2".

    Raises:
        ArgumentError: one is not a tracker, or is given twice.

    Example:
        >>> world = World.single()
        >>> from accelfn.track import in_memory
        >>> with together(in_memory(world=world), None) as tracker:
        ...     tracker({"loss": 0.5}, 1)
        ...     tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    for each in trackers:
        if each is not None and not isinstance(each, Tracker):
            msg = (
                f"af.track.together: expected trackers, got {each!r}; af.track.custom makes"
                " one of your own."
            )
            raise ArgumentError(msg)
    outlets = tuple(o for each in trackers if each for o in each.outlets)
    for i, each in enumerate(outlets):
        if each in outlets[:i]:
            msg = f"af.track.together: {each.name} is given twice; give each tracker once."
            raise ArgumentError(msg)
    return Tracker(outlets)


def open_tracker(
    name: str,
    open_sink: Callable[[], Sink],
    *,
    world: World,
    accepts: tuple[str, ...] = (),
) -> Tracker:
    """Open a backend on rank 0, and nothing on others.

    Raises:
        TrackingError: it could not be opened; the training has not begun.
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


# What a process can say of itself beside what its step reports.


@explain_call_errors
def peak_memory_bytes(world: World) -> int:
    """Return the most memory this rank has used: of its device's, or the process's own.

    On an accelerator it is what torch has allocated at most, on the CPU the largest resident set.

    Raises:
        WorldError: torch does not count the memory of such a device.

    Example:
        >>> peak_memory_bytes(World.single()) > 1_000_000
        True
    """
    if world.device.type != "cpu":
        return devices.peak_memory(world.device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


# `custom`: a tracker of one's own, with the rules of all.


@explain_call_errors
def custom(
    open_sink: Callable[[], Sink],
    *,
    name: str,
    world: World,
    accepts: tuple[str, ...] = (),
) -> Tracker:
    """Return a tracker for a backend of your own.

    Args:
        open_sink: called on rank 0; gives an object with the methods of `af.track.Sink`.
        name: what warnings call it.
        world: that of the run.
        accepts: `("images",)` if it takes images too.

    Raises:
        TrackingError: it could not be opened.
    """
    return open_tracker(name, open_sink, world=world, accepts=accepts)


# The packages behind the backends, imported when one is used.


def package(module: str, *, extra: str) -> Any:
    """Import a module that an optional extra brings.

    Raises:
        TrackingError: it is missing; the text says what to install.
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
    """Return an image as one of Pillow's, which takes a lone channel without its axis.

    Raises:
        TrackingError: Pillow is missing; the text says what to install.
    """
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return package("PIL.Image", extra=extra).fromarray(pixels)


# `in_memory`: what was tracked, as dicts, for notebooks and tests.


@attrs.define
class Kept:
    """What was tracked: by name, then by step."""

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


def _keep(kept: dict[str, dict[int, Any]], given: Mapping[str, Any], step: int) -> None:
    for name, value in given.items():
        kept.setdefault(name, {})[step] = value


@explain_call_errors
def in_memory(*, world: World) -> Tracker:
    """Return a tracker that keeps what it is told: name, step, value.

    Example:
        >>> tracker = in_memory(world=World.single())
        >>> tracker({"loss": 0.5}, 1)
        >>> tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    accepts = (IMAGES,)
    return open_tracker("in_memory", _InMemory, world=world, accepts=accepts)


# `progress`: a bar for long work, where somebody is looking.


_TIMES = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
_EVERY = 0.1
"""Seconds between two looks of a bar in a notebook, as rich has them on a terminal."""


@explain_call_errors
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
