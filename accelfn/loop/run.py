# SPDX-License-Identifier: Apache-2.0
"""`run`: a ready training loop; `stopping`: end a run on signals."""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import torch

from accelfn.base.arguments import (
    explain_call_errors,
    integer,
    is_integer,
    qualname,
)
from accelfn.collectives.failures import check_world
from accelfn.collectives.trees import all_reduce
from accelfn.errors import ArgumentError
from accelfn.loop.batches import batches
from accelfn.state.results import Metrics
from accelfn.state.state import TrainState, check_state
from accelfn.step.step import Step
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.checkpoint import CheckpointStore
    from accelfn.data import Batch

# Stop a run on a signal: after the same step on all ranks.


class Stop:
    """A stop request for this run; see `af.stopping`."""

    def __init__(self, world: World) -> None:
        """Create without a request."""
        self._world, self._agreed = world, 0
        self.received = 0  # the signal of this rank alone

    def requested(self) -> bool:
        """Return whether any rank received a signal; call it on all ranks.

        The result is the same on all ranks. Once true it stays true, without further cost.

        Cost: an all-reduce of one integer.
        """
        if not self._agreed:
            flag = torch.tensor(self.received, device=self._world.device)
            self._agreed = int(all_reduce(flag, self._world, "max", label="stopping"))
        return bool(self._agreed)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that all ranks have agreed on."""
        return signal.Signals(self._agreed) if self._agreed else None


_current = threading.local()
"""Each thread's `Stop`: simulated ranks are threads."""


def deliver(number: int, _frame: FrameType | None = None) -> bool:
    """Record a signal for this thread's `Stop`; return whether there is one.

    It does nothing else, because it runs between any two instructions. A second Ctrl-C raises
    KeyboardInterrupt, because the first may take long.
    """
    stop: Stop | None = getattr(_current, "stop", None)
    if stop is None:
        return False
    if number == signal.SIGINT and stop.received:
        raise KeyboardInterrupt
    stop.received = int(number)
    return True


@contextmanager
def stopping(
    world: World,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Generator[Stop]:
    """Catch termination signals, and stop all ranks after the same step.

    Inside the block a signal is only recorded. Call `requested()` after each step, on all
    ranks. When it returns True, save and leave the block. Leaving ends the process with exit
    code 128 plus the signal's number (143 after SIGTERM), so that a scheduler knows that the
    run is not finished. Without a request, leaving the block ends nothing; a signal that came
    after the last `requested()` is sent again. If an error ends the block, the signal is sent
    again to its handler, if it has one, unless the signal has caused the error. The default
    action of the signal is not taken, because it would hide the error.

    A rank that waits in a collective records the signal only after it. If another rank may
    hang, pass `World.from_env(timeout=...)` less than the scheduler's time between its signal
    and SIGKILL, 30 s for torchrun and `accelfn launch`. Then the error comes in time, and
    names the rank.

    Args:
        world: the ranks that stop together.
        signals: the signals to catch.

    Law: all ranks leave after the same update, for any rank and time of the signal.

    Raises:
        ArgumentError: a signal is not valid, or cannot be caught.

    Example:
        >>> with stopping(World.single()) as stop:
        ...     stop.requested()
        False
    """
    check_world("af.stopping", world)
    if not isinstance(signals, Sequence):
        msg = f"af.stopping(signals={signals!r}): expected a list of signals."
        raise ArgumentError(msg)
    stop, before = Stop(world), getattr(_current, "stop", None)
    handlers: dict[int, Any] = {}
    again = True
    try:
        _current.stop = stop
        if threading.current_thread() is threading.main_thread():
            for number in dict.fromkeys(signals):
                handlers[number] = _install(number)
        yield stop
    except BaseException as error:
        is_handled = callable(handlers.get(stop.received))
        again = is_handled and not _is_caused_by(stop.received, error)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _current.stop = before  # last, to record signals until here
        if again and stop.signal is None and stop.received in handlers:
            signal.raise_signal(stop.received)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _is_caused_by(number: int, error: BaseException) -> bool:
    """Return whether a signal has raised an exception to end the process."""
    if isinstance(error, SystemExit):
        return error.code == 128 + number
    return isinstance(error, KeyboardInterrupt) and number == signal.SIGINT


def _install(number: signal.Signals) -> Any:
    """Handle a signal by `deliver`; return the handler before."""
    try:
        return signal.signal(number, deliver)
    except (ValueError, OSError, TypeError) as error:
        msg = f"af.stopping(signals=...): {number!r} cannot be taken: {error}."
        raise ArgumentError(msg) from error


@explain_call_errors
@attrs.frozen
class epochs:
    """A number of epochs, where a plain number would be one of updates.

    Example:
        >>> epochs(3)
        epochs(count=3)
    """

    count: int = attrs.field(validator=integer(1, "a number of epochs"))


Period: TypeAlias = int | epochs
Numbers: TypeAlias = Mapping[str, float]
Action: TypeAlias = Callable[[TrainState, Metrics], Numbers | None]
Tracker: TypeAlias = Callable[[Numbers, int], object]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@explain_call_errors
def run(
    state: TrainState,
    step: Step,
    *,
    until: Period | Callable[[TrainState], bool],
    actions: Mapping[Period, Action | Sequence[Action]] = _NOTHING,
    track: Tracker | None = None,
    store: "CheckpointStore | None" = None,
) -> TrainState:
    """Train on the state's data until the end, with logging, checkpoints and actions.

    It loops over `af.batches`, with a checkpoint store, `af.stopping` and a tracker. If it
    does not fit your training, write that loop yourself.

    Args:
        state: a state with data. If `store` has a checkpoint, training resumes from it.
        step: the result of `make_step`, or any `(state, batch) -> (state, metrics)`.
        until: a total number of updates, `af.epochs(n)`, or a function of the state that
            returns whether it is the last, the same on all ranks.
        actions: an action or several, by their period: a number of updates, or
            `af.epochs(n)`. All ranks call `action(state, metrics)`, with the sum of this rank's
            metrics since its last call. An action may return numbers by name, the same on all
            ranks: `lambda state, metrics: metrics.all_reduce_mean(state.world)` logs, and an action
            that calls `af.evaluate` evaluates. All numbers of an update need different names.
        track: a tracker, called as `track(numbers, update)` on all ranks; any of `af.track`.
        store: saves when it is `due`, at the end, and on a termination signal. The numbers
            of that update are saved with the checkpoint.

    Returns: the last state; call `af.finalize` yourself.

    Law: a run that is interrupted at any update, and called again with the same store, ends
    with the same bits. The trained state depends on `step`, the state and `until` alone.

    Cost: that of the loop. In a world of several ranks, each update takes an all-reduce of one
    integer to agree on the end. Sums of metrics stay on the device.

    Raises:
        ArgumentError: an argument is invalid, the step or an action returns something else, two
            actions give numbers of one name at an update, or there is a `track` but no action.
        SystemExit: after SIGTERM or Ctrl-C all ranks save and leave after the same update, with
            code 128 plus the signal's number.

    Example:
        >>> import torch, accelfn as af
        >>> data = af.Data(torch.ones(8, 2), global_batch_size=4)
        >>> sgd = lambda named: torch.optim.SGD(named, lr=0.5)
        >>> state = af.TrainState.create(model=torch.nn.Linear(2, 1), optimizer=sgd, data=data)
        >>> step = af.make_step(lambda model, batch: model(batch).square().mean())
        >>> log = lambda state, metrics: {"updates": state.step}
        >>> state = run(state, step, until=epochs(2), actions={2: log}, track=print)
        {'updates': 2} 2
        {'updates': 4} 4
    """
    _check(state, step, track, store)
    due_actions = _Actions(actions)
    if track is not None and not due_actions:
        msg = (
            "af.run(track=...): nothing would be tracked; give actions= one that"
            " returns numbers, such as {100: lambda state, metrics: metrics.all_reduce_mean("
            " state.world)}."
        )
        raise ArgumentError(msg)
    is_last, num_epochs = _end(until)
    if store is not None:
        state = store.restore(state)
    last_saved, numbers = state.step, dict[str, float]()
    with stopping(state.world) as stop:
        is_over = num_epochs is not None and state.cursor.epoch >= num_epochs
        is_over = is_over or is_last(state)
        for batch in () if is_over else batches(state, until_epoch=num_epochs):
            before = state.step
            state, metrics = _check_step_result(step(state, batch))
            has_updated = state.step > before
            numbers = due_actions.take(state, batch, metrics, updated=has_updated)
            if numbers and track is not None:
                track(numbers, state.step)
            if stop.requested() or is_last(state):
                break
            if store is not None and has_updated and _is_due(store, state):
                store.save(state, metrics=numbers)
                last_saved = state.step
        if store is not None:
            if state.step > last_saved:
                store.save(state, metrics=numbers)
            store.wait()
    return state


def _is_due(store: "CheckpointStore", state: TrainState) -> bool:
    """Return whether to save during the run; a store without `every` saves at the end."""
    return getattr(store, "every", True) is not None and store.due(state)


class _Actions:
    """The actions by period, and the sum of metrics since each period's last actions."""

    def __init__(self, actions: object) -> None:
        self._actions = _by_period(actions)
        self._since = {period: Metrics({}) for period in self._actions}

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return any(self._actions.values())

    def take(
        self, state: TrainState, batch: "Batch", metrics: Metrics, *, updated: bool
    ) -> dict[str, float]:
        """Run the actions that are due after a batch; return their numbers."""
        result, givers = dict[str, float](), dict[str, str]()
        for period, actions in self._actions.items():
            self._since[period] += metrics
            if isinstance(period, epochs):
                due = batch.ends_epoch and (batch.epoch + 1) % period.count == 0
            else:  # after a skipped update, the actions of this number were done
                due = updated and state.step % period == 0
            if due:
                total, self._since[period] = self._since[period], Metrics({})
                for action in actions:
                    numbers = _numbers(action, action(state, total), state.world)
                    giver = f"{qualname(action)} (every {period})"
                    for name in numbers:
                        if name in givers:
                            msg = (
                                f"af.run: {givers[name]} and {giver} both gave {name!r} at"
                                f" update {state.step}, and one would be lost. Rename one."
                            )
                            raise ArgumentError(msg)
                        givers[name] = giver
                    result.update(numbers)
        return result


def _check(state: object, step: object, track: object, store: object) -> None:
    """Raise for invalid arguments of `run`."""
    if isinstance(step, TrainState):
        msg = (
            "af.run(step, state): the state comes first, as everywhere; write"
            " af.run(state, step, until=...)."
        )
        raise ArgumentError(msg)
    if not callable(step):
        msg = (
            f"af.run(step={step!r}): expected a step of af.make_step, or any function"
            " (state, batch) -> (state, metrics)."
        )
        raise ArgumentError(msg)
    if not isinstance(state, TrainState):
        msg = f"af.run(state={state!r}): expected a state of af.TrainState.create."
        raise ArgumentError(msg)
    if track is not None and not callable(track):
        path = track if isinstance(track, str) else "run.jsonl"
        msg = (
            f"af.run(track={track!r}): expected a tracker, such as"
            f" af.track.jsonl({path!r}, world=state.world), or any function"
            " (numbers, update)."
        )
        raise ArgumentError(msg)
    methods = [getattr(store, n, None) for n in ("restore", "due", "save", "wait")]
    if store is not None and not all(map(callable, methods)):
        path = store if isinstance(store, str) else "checkpoints"
        msg = (
            f"af.run(store={store!r}): expected a store, af.CheckpointStore({path!r})."
        )
        raise ArgumentError(msg)


def _check_step_result(result: Any) -> tuple[TrainState, Metrics]:
    """Return the state and metrics that a step returned."""
    if isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2:
        state, metrics = cast("tuple[Any, Any]", result)
        if isinstance(state, TrainState) and isinstance(metrics, Metrics):
            return state, metrics
    msg = (
        f"af.run: step returned {type(result).__name__}; expected (state, metrics), as a"
        " step of af.make_step(loss_fn) returns."
    )
    raise ArgumentError(msg)


def _end(until: object) -> tuple[Callable[[TrainState], bool], int | None]:
    """Return a function that tells the last state, and the number of epochs, if given."""
    if isinstance(until, epochs):
        return lambda _: False, until.count
    if is_integer(until, 1):
        return lambda state: state.step >= until, None
    if callable(until):
        return cast("Callable[[TrainState], bool]", until), None
    msg = (
        f"af.run(until={until!r}): expected a number of updates, af.epochs(n), or a function"
        " of the state."
    )
    raise ArgumentError(msg)


def _by_period(actions: object) -> dict[Period, tuple[Action, ...]]:
    by_period: dict[Period, tuple[Action, ...]] = {}
    if not isinstance(actions, Mapping):
        msg = f"af.run(actions={actions!r}): expected a mapping of periods to actions."
        raise ArgumentError(msg)
    for period, value in cast("Mapping[Any, Any]", actions).items():
        sequence = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not (isinstance(period, epochs) or is_integer(period, 1)):
            msg = (
                f"af.run(actions={{{period!r}: ...}}): expected a number of updates or"
                " af.epochs(n)."
            )
            raise ArgumentError(msg)
        if not all(callable(action) for action in sequence):
            msg = (
                f"af.run(actions={{{period!r}: {value!r}}}): expected an action"
                " (state, metrics) -> numbers or None, or a list of them."
            )
            raise ArgumentError(msg)
        by_period[period] = sequence
    return by_period


def _numbers(action: Action, result: object, world: World) -> Numbers:
    """Return an action's result, if it has numbers of all ranks."""
    if result is None:
        return {}
    if isinstance(result, Metrics) and world.loss.size > 1:
        msg = (
            f"af.run: {qualname(action)} returned Metrics, which are only of this rank: return"
            " metrics.all_reduce_mean(state.world)."
        )
        raise ArgumentError(msg)
    if isinstance(result, Mapping):
        return cast("Numbers", result)
    msg = f"af.run: {qualname(action)} returned {result!r}; expected numbers by name, or None."
    raise ArgumentError(msg)


# `salvage`: the newest state of a training, from an old state.


def salvage(state: TrainState) -> TrainState:
    """Return the newest state of a training, from any older state of it.

    An exception or an interrupt may keep you from the state that a step returned, for example
    in a loop inside a function. The state that was given to the step knows the newest state.
    So does each older state, as long as you have it. A `copy()`, or a step with
    `donate=False`, begins another training.

    Ctrl-C in the main thread loses no state even without this: it waits until the caller has
    the step's result.

    Args:
        state: any state of the training; the newest state is returned unchanged.

    Law: the result is the state that the last update returned, bitwise.

    Cost: none; an old state keeps the newest state alive, but no state between them.

    Raises:
        StateDonatedError: an exception of the optimizer or of a debugger ended the last update
            early; its tensors are partly updated.

    Example:
        >>> state = af.salvage(state)  # doctest: +SKIP
    """
    check_state("af.salvage(state)", state)
    newest: TrainState = state.lease.heir or state
    newest.lease.check()
    return newest
