# SPDX-License-Identifier: Apache-2.0
"""`run`: the loop that most trainings write, for those who would rather not write it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from accelfn.batches import batches
from accelfn.errors import ArgumentError
from accelfn.loss import Metrics
from accelfn.state import TrainState
from accelfn.step import Step
from accelfn.stopping import stopping

if TYPE_CHECKING:
    from accelfn.checkpoint import CheckpointStore
    from accelfn.data import Batch


def _is_count(_owner: object, _field: object, value: object) -> None:
    if not _counts(value):
        msg = f"af.epochs({value!r}): expected a number of epochs, at least 1."
        raise ArgumentError(msg)


@attrs.frozen
class epochs:
    """A number of epochs, where a plain number would be one of updates.

    Example:
        >>> epochs(3)
        epochs(count=3)
    """

    count: int = attrs.field(validator=_is_count)


Period: TypeAlias = int | epochs
Numbers: TypeAlias = Mapping[str, float]
Action: TypeAlias = Callable[[TrainState, Metrics], Numbers | None]
Tracker: TypeAlias = Callable[[Numbers, int], object]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def run(
    step: Step,
    state: TrainState,
    *,
    until: Period | Callable[[TrainState], bool],
    every: Mapping[Period, Action | Sequence[Action]] = _NOTHING,
    track: Tracker | None = None,
    store: "CheckpointStore | None" = None,
) -> TrainState:
    """Train on the state's data until the end, and do what is due on the way.

    It is the loop over `af.batches`, with a checkpoint store, `af.stopping` and a tracker
    around it; write that loop where this one does not fit.

    Args:
        step: of `make_step`, or any `(state, batch) -> (state, metrics)`.
        state: with data. Where `store` has a checkpoint, training goes on from there.
        until: a number of updates in all, `af.epochs(n)`, or a function of the state that says
            whether it is the last, the same on all ranks.
        every: what to do after so many updates, or `af.epochs(n)`: an action or several. One
            is called on all ranks, as `action(state, metrics)`, with the sum of the metrics
            since it was last called, of this rank. It may return numbers by name, the same
            on all ranks: `lambda state, metrics: af.mean(metrics, state.world)` logs, one that
            calls `af.evaluate` evaluates.
        track: gets them: `track(numbers, update)`, on all ranks; any of `af.track`.
        store: saved to when it is `due`, at the end, and when the system asks to end.
            The numbers of that very update are kept with the checkpoint.

    Returns: the last state; `af.finalize` is the caller's.

    Law: cut at any update and called again with the same store, it ends with the same bits.
    What is trained depends on `step`, the state and `until` alone.

    Cost: that of the loop; and in a world of several an all-reduce of one integer an update, to
    agree on ending. Sums of metrics stay on the device.

    Raises:
        ArgumentError: `until` or `every` says something else.
        SystemExit: SIGTERM or Ctrl-C came; all ranks leave after the same update, with code
            128 plus the signal's number, when the state is saved.

    Example:
        >>> import torch, accelfn as af
        >>> data = af.Data(torch.ones(8, 2), batch_size=4)
        >>> sgd = lambda named: torch.optim.SGD(named, lr=0.5)
        >>> state = af.TrainState.create(model=torch.nn.Linear(2, 1), optimizer=sgd, data=data)
        >>> step = af.make_step(lambda model, batch: model(batch).square().mean())
        >>> log = lambda state, metrics: {"updates": state.step}
        >>> state = run(step, state, until=epochs(2), every={2: log}, track=print)
        {'updates': 2} 2
        {'updates': 4} 4
    """
    actions = _Actions(every)
    is_last, num_epochs = _end(until)
    if store is not None:
        state = store.restore(state)
    saved, told = state.step, dict[str, float]()
    with stopping(state.world) as stop:
        for batch in () if is_last(state) else batches(state, epochs=num_epochs):
            before = state.step
            state, metrics = step(state, batch)
            updated = state.step > before
            told = actions.take(state, batch, metrics, updated=updated)
            if told and track is not None:
                track(told, state.step)
            if stop.requested() or is_last(state):
                break
            if store is not None and updated and store.due(state):
                store.save(state, metrics=told)
                saved = state.step
        if store is not None:
            if state.step > saved:
                store.save(state, metrics=told)
            store.wait()
    return state


class _Actions:
    """What is due when, and the metrics since it was last done."""

    def __init__(self, every: object) -> None:
        self._actions = _actions(every)
        self._since = {period: Metrics({}) for period in self._actions}

    def take(
        self, state: TrainState, batch: "Batch", metrics: Metrics, *, updated: bool
    ) -> dict[str, float]:
        """Do what is due after a batch; return the numbers that it gave."""
        told: dict[str, float] = {}
        for period, actions in self._actions.items():
            self._since[period] += metrics
            if isinstance(period, epochs):
                due = batch.ends_epoch and (batch.epoch + 1) % period.count == 0
            else:  # where an update was skipped, it was done at this number
                due = updated and state.step % period == 0
            if due:
                seen, self._since[period] = self._since[period], Metrics({})
                for action in actions:
                    told.update(_numbers(action, action(state, seen)))
        return told


def _end(until: object) -> tuple[Callable[[TrainState], bool], int | None]:
    """Return whether a state is the last, and the number of epochs where it decides."""
    if isinstance(until, epochs):
        return lambda _: False, until.count
    if _counts(until):
        return lambda state: state.step >= cast("int", until), None
    if callable(until):
        return cast("Callable[[TrainState], bool]", until), None
    msg = (
        f"af.run(until={until!r}): expected a number of updates, af.epochs(n), or a function"
        " of the state."
    )
    raise ArgumentError(msg)


def _actions(every: object) -> dict[Period, tuple[Action, ...]]:
    found: dict[Period, tuple[Action, ...]] = {}
    if not isinstance(every, Mapping):
        msg = f"af.run(every={every!r}): expected a mapping of periods to actions."
        raise ArgumentError(msg)
    for period, value in cast("Mapping[Any, Any]", every).items():
        each = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not (isinstance(period, epochs) or _counts(period)):
            msg = (
                f"af.run(every={{{period!r}: ...}}): expected a number of updates or"
                " af.epochs(n)."
            )
            raise ArgumentError(msg)
        if not all(callable(action) for action in each):
            msg = (
                f"af.run(every={{{period!r}: {value!r}}}): expected an action"
                " (state, metrics) -> numbers or None, or a list of them."
            )
            raise ArgumentError(msg)
        found[period] = each
    return found


def _numbers(action: Action, returned: object) -> Numbers:
    if returned is None:
        return {}
    if isinstance(returned, Mapping):
        return cast("Numbers", returned)
    label = getattr(action, "__qualname__", repr(action))
    msg = f"af.run: {label} returned {returned!r}; expected numbers by name, or None."
    raise ArgumentError(msg)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
