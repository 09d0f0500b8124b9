# SPDX-License-Identifier: Apache-2.0
"""Torch's learning-rate schedulers as values."""

from array import array
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NoReturn, cast

import attrs
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.base.arguments import is_number
from accelfn.base.calling import called
from accelfn.base.signatures import signature
from accelfn.errors import ArgumentError
from accelfn.structure.prototype import STRUCTURE, Assignments, scratch_of

_PLATEAU = (
    "What follows a metric is no function of the update number: put"
    " af.plateau(...) into the setup, and give it the metric by"
    " state = af.observe(state, value)."
)

_BY_COUNT = (
    "It is not an LRScheduler of torch's, like all schedulers of timm. Use"
    " af.schedules.warmup_cosine(num_warmup, num_updates) or another of af.schedules, or"
    " let the factory return an LRScheduler of yours, whose get_lr calls"
    " step_update(self.last_epoch) of this one and returns the groups' lr."
)


def _is_factory(_owner: object, _field: object, factory: Any) -> None:
    """Refuse what can be known before there are groups."""
    if not callable(factory):
        msg = (
            f"schedules.from_torch({factory!r}): expected a function that takes an"
            " optimizer and returns a scheduler, such as functools.partial("
            "torch.optim.lr_scheduler.StepLR, step_size=10)."
        )
        raise ArgumentError(msg)
    while isinstance(factory, partial):
        factory = cast("Any", factory).func
    if isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau):
        msg = f"schedules.from_torch({factory.__name__}): {_PLATEAU}"
        raise ArgumentError(msg)


@called
@attrs.frozen
class from_torch:
    """Take the learning rates of a torch scheduler, and the momenta that it cycles.

    When a state is created, the factory's scheduler is run ahead on an optimizer of its own
    that has the state's parameter groups, rates and other options, and its numbers are kept
    by update. So nothing of it is in a checkpoint, several states can have one
    `from_torch`, and any update can be asked for at any time.

    Its numbers are learning rates, and whatever else it sets in the groups (OneCycleLR and
    CyclicLR: momentum, or the first of betas). They are no factors, so it stands alone: in
    place of `join`, join torch's schedulers in the factory, by SequentialLR.

    Args:
        factory: takes a torch optimizer and returns a scheduler on it: a class with its
            options, as `partial(OneCycleLR, max_lr=0.1, total_steps=500)`, or Transformers'
            functions.

    Law:
        Bitwise the numbers of the scheduler that is stepped after each update of a real
        optimizer, and so the same parameters; for every scheduler that torch and
        Transformers ship and that is stepped without a metric.

    Cost:
        Some microseconds of the scheduler's own an update, once; 8 bytes an update and
        parameter group, and 100 for a momentum.

    Raises:
        ArgumentError: the factory is none, or, when the state is created, fails on the
            state's groups, or gives no LRScheduler, one on another optimizer, or one that
            reads a metric (ReduceLROnPlateau; `af.plateau` does) or the optimizer's state;
            at an update for which the scheduler has no rate.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import StepLR
        >>> halve = from_torch(partial(StepLR, step_size=10, gamma=0.5))
    """

    factory: Callable[[Optimizer], LRScheduler] = attrs.field(validator=_is_factory)

    def __call__(self, step: int, /) -> NoReturn:
        """Refuse: without an optimizer's groups there are no rates.

        Raises:
            ArgumentError: always.
        """
        msg = (
            f"schedules.from_torch(...)({step!r}): its learning rates are those of an"
            " optimizer's groups, and no factors. Give it to TrainState.create(schedule=),"
            " and read state.lrs; what is to be computed of several schedulers, compute in"
            " the factory, by torch.optim.lr_scheduler.SequentialLR or LambdaLR."
        )
        raise ArgumentError(msg)

    def on(self, optimizer: Optimizer) -> "TorchRates":
        """Return its numbers on the groups of an optimizer, which stays as it is."""
        return TorchRates(self.factory, optimizer)


class TorchRates:
    """The numbers that a torch scheduler sets in an optimizer's groups, by update.

    They are found once, in order, and by one thread at a time. A scheduler that fails has ended,
    and each later call says why; one that is interrupted is made again.
    """

    def __init__(
        self, factory: Callable[[Optimizer], LRScheduler], optimizer: Optimizer
    ) -> None:
        """Make the scheduler on a copy of the optimizer, of which nothing is trained."""
        self._lock = Lock()
        self._factory, self._prototype = factory, optimizer
        self._optimizer: Any = scratch_of(optimizer)
        groups = self._optimizer.param_groups
        self._given = [
            {k: _said(v) for k, v in group.items() if k not in STRUCTURE}
            for group in groups
        ]
        self._scheduler = self._made()
        self._is_whole = True
        self._ended: Exception | None = None
        self._rates = [array("d") for _ in groups]
        self._others: dict[tuple[int, str], list[Any]] = {}
        self._num_known = 0
        self._note()

    def __call__(self, update: int) -> Assignments:
        """Return what the groups have at an update.

        Raises:
            ArgumentError: the scheduler has nothing for it.
        """
        if update >= self._num_known:
            with self._lock:
                while update >= self._num_known:
                    self._advance()
        found: Assignments = {
            (i, "lr"): known[update] for i, known in enumerate(self._rates)
        }
        for at, known in self._others.items():
            found[at] = known[update]
        return found

    def _made(self) -> Any:
        """Return the factory's scheduler on this optimizer."""
        try:
            scheduler: Any = self._factory(self._optimizer)
        except Exception as error:
            num_groups = len(self._optimizer.param_groups)
            msg = (
                f"schedules.from_torch: the factory failed on {type(self._prototype).__name__}"
                f" with {num_groups} parameter groups: {error}"
            )
            raise ArgumentError(msg) from error
        _check(scheduler, self._optimizer)
        self._optimizer._opt_called = True  # torch warns of a scheduler that goes first
        return scheduler

    def _advance(self) -> None:
        """Step the scheduler, and note what it set."""
        if self._ended is None:
            try:
                if not self._is_whole:
                    self._make_again()
                self._is_whole = False  # if interrupted, what it has done is not known
                self._scheduler.step()
                self._note()
            except Exception as error:  # noqa: BLE001 - it is told, now and later
                self._ended = error
            else:
                self._is_whole = True
        if self._ended is not None:
            msg = (
                f"schedules.from_torch: {type(self._scheduler).__name__} has no rate for"
                f" update {self._num_known}: {self._ended}"
            )
            raise ArgumentError(msg) from self._ended

    def _make_again(self) -> None:
        """Replace a scheduler that was interrupted by one that has come as far."""
        for known in (*self._rates, *self._others.values()):
            del known[self._num_known :]
        self._optimizer = scratch_of(self._prototype)
        self._scheduler = self._made()
        for _ in range(self._num_known - 1):
            self._scheduler.step()

    def _note(self) -> None:
        for i, group in enumerate(self._optimizer.param_groups):
            for key, given in self._given[i].items():
                now = _said(group[key])
                if (
                    key != "lr"
                    and (i, key) not in self._others
                    and _differs(now, given)
                ):
                    self._others[i, key] = [given] * self._num_known
        for (i, key), known in self._others.items():
            known.append(_said(self._optimizer.param_groups[i][key]))
        for known, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            known.append(float(group["lr"]))
        self._num_known += 1


def _said(value: Any) -> Any:
    """Return an option as a value that nothing changes; a tensor of a number as that."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value


def _differs(now: object, given: object) -> bool:
    return now != given if is_number(now) else now is not given


def _check(scheduler: Any, optimizer: Optimizer) -> None:
    """Refuse what is no scheduler of this optimizer, or wants more than to be stepped."""
    kind = type(scheduler).__name__
    step = getattr(scheduler, "step", None)
    taken = signature(step).parameters.values() if callable(step) else ()
    needed = [
        each.name
        for each in taken
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    why = ""
    if needed:
        follows_metric = needed[0] != "epoch" or "plateau" in kind.lower()
        advice = _PLATEAU if follows_metric else _BY_COUNT
        why = f"whose step needs {', '.join(needed)}. {advice}"
    elif not isinstance(scheduler, LRScheduler):
        why = "expected an LRScheduler of torch's."
    elif scheduler.optimizer is not optimizer:
        why = (
            "which is on another optimizer than it was given: that one's rates would never"
            " move. Make the scheduler in the factory: lambda optimizer: StepLR(optimizer,"
            " 10)."
        )
    if why:
        msg = f"schedules.from_torch: the factory gave {kind}, {why}"
        raise ArgumentError(msg)
