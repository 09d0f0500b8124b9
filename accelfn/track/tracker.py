# SPDX-License-Identifier: Apache-2.0
"""`Tracker`: what a run says of itself, to any number of backends, on rank 0 alone.

A call is checked on every rank alike, so that all of them refuse it or none does; on rank 0
the numbers are then read from the device and handed to each backend. One that fails, for the
disk is full or the network gone, is named in a warning, and the training goes on.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import chain, count
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch

from accelfn.base import words
from accelfn.base.calling import called
from accelfn.base.words import foreign
from accelfn.errors import ArgumentError, TrackingError, TrackingWarning
from accelfn.track import values
from accelfn.world import World

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

    def hyperparameters(self, hyperparameters: Mapping[str, values.Plain]) -> None:
        """Take what the run was made with, nested."""
        ...

    def images(self, images: Mapping[str, values.Pixels], step: int) -> None:
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


@foreign(words.TRACKER)
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

    def __call__(self, metrics: Mapping[str, values.Number], step: int) -> None:
        """Track the numbers of a step: `tracker(af.mean(metrics, world), state.step)`.

        Args:
            metrics: numbers by name, in Python, numpy or tensors; `af.Metrics` in a world of 1.
            step: `state.step`, the number of updates so far.

        Cost: on rank 0 one wait for the device if tensors are on it, and what the backends do.

        Raises:
            ArgumentError: a value is no number, or these are the metrics of this rank alone.
        """
        values.check_step(step)
        values.check_metrics(metrics, tuple(each.world for each in self.outlets))
        if self._goes_on():
            read = values.floats(metrics)
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
        told = values.settings(hyperparameters)
        if self._goes_on():
            what = "the hyperparameters"
            self._tell(what, told, lambda sink, own: sink.hyperparameters(own))

    def images(self, images: Mapping[str, torch.Tensor], step: int) -> None:
        """Track images by name: (channels, height, width), uint8 or floating from 0 to 1.

        A floating-point image that is not from 0 to 1 is not tracked, and a warning says so.

        Raises:
            ArgumentError: one is no such tensor; or no backend has images.
        """
        values.check_step(step)
        values.check_names(IMAGES, images)
        for name, image in images.items():
            values.check_image(name, image)
        if self._goes_on(IMAGES):
            read, said = _read(values.pixels, images, step)
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


def _read(
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


@called
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
