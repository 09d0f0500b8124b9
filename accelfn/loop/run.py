# SPDX-License-Identifier: Apache-2.0
"""`run`: a complete training loop. `stopping`: end all ranks of a run after a signal."""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import torch

from accelfn.base.arguments import explain_call_errors, integer, is_integer, qualname
from accelfn.collectives.failures import check_world
from accelfn.collectives.trees import all_reduce
from accelfn.errors import ArgumentError
from accelfn.loop.batches import batches
from accelfn.state.results import Metrics
from accelfn.state.state import TrainState, check_state
from accelfn.step.step import Step
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.checkpoint.store import CheckpointStore
    from accelfn.data import Batch

# `stopping`: after a signal, stop all ranks of a run after the same step.


class Stop:
    """Whether a signal asked this run to stop; see `af.stopping`."""

    def __init__(self, world: World) -> None:
        """Start without a stop request."""
        self._world, self._agreed = world, 0
        self.received = 0  # the signal that this rank received; 0: none

    def requested(self) -> bool:
        """Return whether any rank received a signal; call this on all ranks.

        The result is equal on all ranks. After the first True it is always True.

        Cost: an all-reduce of one integer; none after the first True.
        """
        if not self._agreed:
            flag = torch.tensor(self.received, device=self._world.device)
            self._agreed = int(all_reduce(flag, self._world, "max", label="stopping"))
        return bool(self._agreed)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that stops the run, equal on all ranks; None without a stop request."""
        return signal.Signals(self._agreed) if self._agreed else None


_current = threading.local()
"""Each thread's `Stop`: simulated ranks are threads."""


def deliver(number: int, _frame: FrameType | None = None) -> bool:
    """Record a signal in this thread's `Stop`; return False if the thread has no `Stop`.

    This signal handler only sets a number, because it can run between any two instructions. A
    second Ctrl-C raises KeyboardInterrupt, because the first may take long to have an effect.
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
    world: World, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> Generator[Stop]:
    """Catch termination signals, and stop all ranks after the same step.

    Inside the `with` block, a signal is only recorded. Call `requested()` after each step, on
    all ranks. If it returns True, save the state and leave the block. The process then exits
    with code 128 plus the signal's number (143 after SIGTERM), so that a scheduler knows that
    the run is not finished.

    If no signal was recorded, the process continues after the block. A signal that arrived after
    the last `requested()` is sent again at the end of the block. If an error ends the block, the
    signal is not sent again, because its default action would hide the error. It is sent again
    if the program had its own handler for the signal, and the signal did not cause the error.

    A rank that waits in a collective records a signal only after the collective. If another
    rank may hang, pass a `World.from_env(timeout=...)` that is shorter than the scheduler's time
    between its signal and SIGKILL (30 s for torchrun and `accelfn launch`). Then you see an
    error that names the hanging rank.

    Args:
        world: the ranks that stop together.
        signals: the signals to catch.

    Law: all ranks leave the block after the same update, no matter which rank receives the
    signal, or when.

    Raises:
        ArgumentError: an entry of `signals` is not a signal, or cannot be caught.

    Example:
        >>> with stopping(World.single()) as stop:
        ...     stop.requested()
        False
    """
    check_world("af.stopping", world)
    if not isinstance(signals, Sequence):
        msg = f"af.stopping(signals={signals!r}): expected a list, such as [signal.SIGTERM]."
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
        _current.stop = before  # last, so that signals are recorded until here
        if again and stop.signal is None and stop.received in handlers:
            signal.raise_signal(stop.received)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _is_caused_by(number: int, error: BaseException) -> bool:
    """Return whether an exception is the exit or Ctrl-C that a signal raised."""
    if isinstance(error, SystemExit):
        return error.code == 128 + number
    return isinstance(error, KeyboardInterrupt) and number == signal.SIGINT


def _install(number: signal.Signals) -> Any:
    """Install `deliver` as the handler of a signal; return the previous handler."""
    try:
        return signal.signal(number, deliver)
    except (ValueError, OSError, TypeError) as error:
        msg = f"af.stopping(signals=...): {number!r} cannot be caught: {error}."
        raise ArgumentError(msg) from error


@explain_call_errors
@attrs.frozen
class epochs:
    """A number of epochs, for arguments that read a plain integer as a number of updates.

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
    """Train a state on its data until the end, with logging, checkpoints and actions.

    The loop runs over `af.batches`, with a checkpoint store, `af.stopping` and a tracker. If you
    need another loop, write one with these functions.

    Args:
        state: a state with data. If `store` has a checkpoint, training resumes from it.
        step: the result of `make_step`, or any `(state, batch) -> (state, metrics)`.
        until: the total number of updates, or `af.epochs(n)`. Or a function that returns whether
            a state is the last; its result must be equal on all ranks.
        actions: an action, or a list of actions, for each period. A period is a number of
            updates, or `af.epochs(n)`. All ranks call `action(state, metrics)`, with the sum of
            this rank's metrics since the last call. An action may return a dict of numbers that
            are equal on all ranks, such as `metrics.all_reduce_mean(state.world)` or the result
            of `af.evaluate`. Actions that run at the same update must return different names.
        track: a tracker from `af.track`, or a function, called as `track(numbers, update)` on
            all ranks with the numbers that actions returned.
        store: a checkpoint store. It saves when `store.due(state)` is true, at the end, and on a
            termination signal. The numbers of that update are saved with the checkpoint.

    Returns: the last state. `af.run` does not call `af.finalize`.

    Law: if a run is interrupted at any update, and called again with the same store, the final
    state is bitwise the same. The final state depends only on `step`, the state and `until`.

    Cost: that of the loop. In a world of several ranks, each update needs an all-reduce of one
    integer, to agree on the end. Sums of metrics stay on the device.

    Raises:
        ArgumentError: an argument is invalid, the step or an action returns a wrong type, two
            actions return the same name at an update, or there is a `track` but no action.
        SystemExit: after SIGTERM or Ctrl-C, all ranks save and exit after the same update, with
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
            "af.run(track=...): without actions, a tracker would receive nothing. Pass an action,"
            " such as actions={100: lambda state, metrics: metrics.all_reduce_mean(state.world)}."
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
    """Return whether to save now; a store with `every=None` saves only at the end."""
    return getattr(store, "every", True) is not None and store.due(state)


class _Actions:
    """The actions by period, and the metrics summed since each period's last call."""

    def __init__(self, actions: object) -> None:
        if not isinstance(actions, Mapping):
            msg = f"af.run(actions={actions!r}): expected a dict, such as {{100: action}}."
            raise ArgumentError(msg)
        self._actions: dict[Period, tuple[Action, ...]] = {}
        for period, value in cast("Mapping[Any, Any]", actions).items():
            sequence = tuple(value) if isinstance(value, (list, tuple)) else (value,)
            if not (isinstance(period, epochs) or is_integer(period, 1)):
                msg = (
                    f"af.run(actions={{{period!r}: ...}}): expected each key to be a number of"
                    " updates or af.epochs(n). Write actions={100: fn, af.epochs(1): other_fn}."
                )
                raise ArgumentError(msg)
            if not all(callable(action) for action in sequence):
                msg = (
                    f"af.run(actions={{{period!r}: {value!r}}}): expected a function"
                    " (state, metrics) -> numbers or None, or a list of such functions."
                )
                raise ArgumentError(msg)
            self._actions[period] = sequence
        self._since = {period: Metrics({}) for period in self._actions}

    def __bool__(self) -> bool:
        """Return whether there is at least one action."""
        return any(self._actions.values())

    def take(
        self, state: TrainState, batch: "Batch", metrics: Metrics, *, updated: bool
    ) -> dict[str, float]:
        """Run the actions that are due after a batch; return all their numbers by name."""
        result, givers = dict[str, float](), dict[str, str]()
        for period, actions in self._actions.items():
            self._since[period] += metrics
            if isinstance(period, epochs):
                due = batch.ends_epoch and (batch.epoch + 1) % period.count == 0
            else:  # a skipped update repeats a step number whose actions already ran
                due = updated and state.step % period == 0
            if due:
                total, self._since[period] = self._since[period], Metrics({})
                for action in actions:
                    numbers = _numbers(action, action(state, total), state.world)
                    giver = f"{qualname(action)} (every {period})"
                    for name in numbers:
                        if name in givers:
                            msg = (
                                f"af.run: {givers[name]} and {giver} both returned {name!r} at"
                                f" update {state.step}. Rename it in one of the two actions."
                            )
                            raise ArgumentError(msg)
                        givers[name] = giver
                    result.update(numbers)
        return result


def _check(state: object, step: object, track: object, store: object) -> None:
    """Raise for invalid arguments of `run`."""
    if isinstance(step, TrainState):
        msg = "af.run: the state comes first. Write af.run(state, step, until=...)."
        raise ArgumentError(msg)
    if not callable(step):
        msg = f"af.run(step={step!r}): expected a step, such as af.make_step(loss_fn)."
        raise ArgumentError(msg)
    check_state("af.run(state, step)", state)
    if track is not None and not callable(track):
        path = track if isinstance(track, str) else "run.jsonl"
        msg = (
            f"af.run(track={track!r}): expected a tracker, such as af.track.jsonl({path!r},"
            " world=state.world), or a function (numbers, update)."
        )
        raise ArgumentError(msg)
    methods = [getattr(store, n, None) for n in ("restore", "due", "save", "wait")]
    if store is not None and not all(map(callable, methods)):
        path = store if isinstance(store, str) else "checkpoints"
        msg = f"af.run(store={store!r}): expected af.CheckpointStore({path!r})."
        raise ArgumentError(msg)


def _check_step_result(result: Any) -> tuple[TrainState, Metrics]:
    """Check that a step returned `(state, metrics)`, and return this pair."""
    if isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2:
        state, metrics = cast("tuple[Any, Any]", result)
        if isinstance(state, TrainState) and isinstance(metrics, Metrics):
            return state, metrics
    msg = f"af.run: step returned {type(result).__name__}; expected (state, metrics)."
    raise ArgumentError(msg)


def _end(until: object) -> tuple[Callable[[TrainState], bool], int | None]:
    """Convert `until` to a function (is this state the last?) and a number of epochs."""
    if isinstance(until, epochs):
        return lambda _: False, until.count
    if is_integer(until, 1):
        return lambda state: state.step >= until, None
    if callable(until):
        return cast("Callable[[TrainState], bool]", until), None
    msg = f"af.run(until={until!r}): expected a number of updates, af.epochs(n) or (state) -> bool."
    raise ArgumentError(msg)


def _numbers(action: Action, result: object, world: World) -> Numbers:
    """Return the numbers that an action returned; raise for Metrics of one rank."""
    if result is None:
        return {}
    if isinstance(result, Metrics) and world.loss.size > 1:
        msg = (
            f"af.run: {qualname(action)} returned Metrics with the values of this rank only."
            " Return metrics.all_reduce_mean(state.world)."
        )
        raise ArgumentError(msg)
    if isinstance(result, Mapping):
        return cast("Numbers", result)
    msg = f"af.run: {qualname(action)} returned {result!r}; expected a dict of numbers or None."
    raise ArgumentError(msg)


# `salvage`: find the newest state of a training run from an older state of the run.


def salvage(state: TrainState) -> TrainState:
    """Return the newest state of a training run, given any older state of the run.

    An exception can prevent your program from receiving the state that a step returned, for
    example in a loop inside a function. Every older state that you still have refers to the
    newest state. A `copy()`, or a step with `donate=False`, starts a separate run.

    Ctrl-C in the main thread does not lose a state: accelfn delays the interrupt until your
    program has the result of the step.

    Args:
        state: any state of the run; if this is the newest state, it is returned unchanged.

    Law: the result is bitwise the state that the last update returned.

    Cost: none. An old state keeps the newest state in memory, but no states between the two.

    Raises:
        StateDonatedError: an exception, for example in the optimizer or from a debugger, ended
            the last update early, so the tensors are only partly updated.

    Example:
        >>> state = af.salvage(state)  # doctest: +SKIP
    """
    check_state("af.salvage(state)", state)
    newest: TrainState = state.lease.heir or state
    newest.lease.check()
    return newest
