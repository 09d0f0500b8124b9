# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: a loss as a function of a state, differentiated; nothing changes."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, Protocol, TypeAlias
from weakref import ref

import attrs
import torch

from accelfn.base.arguments import (
    call_mismatch,
    explain_call_errors,
    is_number,
    qualname,
    signature,
)
from accelfn.base.draws import own_modes, span
from accelfn.collectives import sum_named
from accelfn.data import Batch
from accelfn.data.plan import Cursor
from accelfn.definition.transform import chain, check_returned, facts_of
from accelfn.engine.engine import (
    check_first_batch,
    check_loaded,
    engine_of,
    warn_of_values,
)
from accelfn.engine.loss import LossFunction, Samples
from accelfn.engine.optimizer import LiveUpdate
from accelfn.errors import ArgumentError, BatchError, GradsError, LossError
from accelfn.state.grads import Grads
from accelfn.state.metrics import Loss, Metrics, Number
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, looked
from accelfn.world import World

# What an update is over, counted before its forward passes.
#
# A loss with several denominators (tokens of a text, boxes of an image) is no total over
# one weight. If the loss function is told how many of each the whole update has, on all
# ranks and in all micro-batches, it can divide by them itself: what it returns is its part
# of the update's loss, and parts add.


Count: TypeAlias = Callable[[Any], Number | Mapping[str, Number]]

_ALONE = ""


@attrs.frozen
class Counts:
    """What was counted of an update.

    Attributes:
        told: the number, or numbers by name, for the loss function; 1 in place of 0.
        whole: the sum of all.
    """

    told: Number | dict[str, Number]
    whole: float


def counted(count: Count, parts: Sequence[Any], ranks: World) -> Counts:
    """Return the counts of an update's micro-batches, over all ranks.

    Cost: on several ranks one all-reduce of a few numbers, and the host waits for it.

    Raises:
        LossError: `count` gave something that is no count, or other names than before.
        CollectiveMismatchError: ranks counted as much, but under other names.
    """
    totals: dict[str, float] | None = None
    for part in parts:
        found = _of_part(count, part)
        if found is None:
            continue
        if totals is not None and totals.keys() != found.keys():
            msg = (
                f"{qualname(count)} counted {sorted(totals)}, and then {sorted(found)}."
            )
            raise LossError(msg)
        totals = {n: (totals or {}).get(n, 0) + each for n, each in found.items()}
    if totals is None:  # an empty share: its stand-in says what there is to count
        stand_in = _checked(count, count(parts[0].value))
        totals = dict.fromkeys(stand_in, 0)
    if ranks.size > 1:
        named = {name: (each,) for name, each in totals.items()}
        label = "count the update"
        sums = sum_named(named, ranks, kind="count", label=label, what="counts")
        totals = {name: each for name, (each,) in sums.items()}
    # what is divided by a count of 0 is 0, and stays that
    told: dict[str, Number] = {name: each or 1 for name, each in totals.items()}
    return Counts(told.get(_ALONE, told), sum(totals.values()))


def of_shares(loss_fn: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Return a loss function of totals, for one that returns its part of the update's loss.

    The last extra is the `Counts` of the update, of which it is given what is `told`.
    """

    @wraps(loss_fn)
    def loss_of_share(
        model: torch.nn.Module, batch: Any, *extras: Any, **weight: Any
    ) -> Loss:
        *others, counts = extras
        returned = loss_fn(model, batch, *others, counts.told, **weight)
        share = returned if isinstance(returned, Loss) else Loss(returned, 1)
        if not isinstance(share.weight, (int, float)) or share.weight != 1:
            msg = (
                f"{qualname(loss_fn)} returned af.Loss(weight={share.weight!r}) beside count=,"
                " by which it has divided already. Return its part of the update's loss, or"
                " af.Loss(part, 1, name=(total, weight))."
            )
            raise LossError(msg)
        whole = sum(_checked(count, count(batch)).values())
        aux = {
            name: entry if isinstance(entry, tuple) else (entry * counts.whole, whole)
            for name, entry in share.aux.items()
        }
        return Loss(share.total * counts.whole, whole, **aux)

    loss_of_share.__qualname__ = qualname(loss_fn)
    return loss_of_share


def _of_part(count: Count, part: Any) -> dict[str, float] | None:
    """Return the counts of a micro-batch; None for an empty share's stand-in."""
    if not isinstance(part, Batch):
        return _checked(count, count(part))
    is_stand_in = part.weights[0] == 0
    return None if is_stand_in else _checked(count, count(part.value))


def _checked(count: Count, returned: Any) -> dict[str, float]:
    named = returned if isinstance(returned, Mapping) else {_ALONE: returned}
    found: dict[str, float] = {}
    for name, value in named.items():
        scalar = isinstance(value, torch.Tensor) and value.numel() == 1
        if not (scalar or is_number(value)) or not 0 <= float(value) < math.inf:
            msg = (
                f"{qualname(count)} returned {returned!r}; expected a count, 0 or more, or"
                " several by name."
            )
            raise LossError(msg)
        found[name] = value.item() if isinstance(value, torch.Tensor) else value
    return found


_WEIGHT = "sample_weight"
_ARGUMENTS = range(2, 10)
"""How many a loss function may have: a model, a batch, and extras."""


class ValueAndGrad(Protocol):
    """What `value_and_grad` returns, and transforms of that name wrap."""

    def __call__(
        self,
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        """Return metrics and gradients; the state stays as it was."""
        ...


@explain_call_errors
def value_and_grad(
    loss_fn: LossFunction, *, count: Count | None = None
) -> ValueAndGrad:
    """Return a function that gives a loss's metrics and gradients, and changes nothing.

    With `into=grads` it adds to gradients taken before (which are given away), with
    `sync=False` it leaves them on this rank: so several backward passes cost one
    reduction. What it returns goes to `apply_grads`.

    With `count`, a function of a batch's value that returns a number or several by name,
    these are added over all micro-batches and ranks before the first forward pass, and the
    loss function gets the sums as its last argument. It divides by them, as a loss with
    several denominators must, and returns its part of the update's loss. A sum of 0 is given
    as 1.

    Acts on: nothing; `loss` and `value_and_grad` of the setup's transforms wrap it.

    Raises:
        GradsError: `into` is reduced over ranks already; adding to it would make the
            replicas drift. Or it is given beside `count`, which counts whole updates.
        LossError, NonFiniteLossError, BatchError, StateDonatedError: as `make_step`.
    """
    compute = gradients_of(loss_fn, count)

    def checked(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        check_state("value_and_grad(loss_fn)(state, batch)", state)
        with own_modes(state.definition.world.device):
            found = compute(state, batch, *extras, into=into, sync=sync)
            engine_of(state).hand_out()
            return found

    return checked


def gradients_of(loss_fn: LossFunction, count: Count | None) -> ValueAndGrad:
    """Return what `value_and_grad` does, without a look at the call and torch's modes.

    Raises:
        ArgumentError: what is given is no function, or does not take a model and a batch.
    """
    if not callable(loss_fn):
        msg = (
            f"value_and_grad({loss_fn!r}): expected a function (model, batch, *extras)"
            " -> loss."
        )
        raise ArgumentError(msg)
    if _is_torchs(loss_fn):
        msg = (
            f"value_and_grad({qualname(loss_fn)}): it is a loss of torch, of outputs and targets."
            " Write one of a model and a batch that calls it: def loss_fn(model, batch):"
            " inputs, targets = batch; return F.cross_entropy(model(inputs), targets)."
        )
        raise ArgumentError(msg)
    keywords = {_WEIGHT: None} if is_weighed(loss_fn) else {}
    if all(
        call_mismatch(loss_fn, *(None,) * number, **keywords) for number in _ARGUMENTS
    ):
        error = call_mismatch(loss_fn, None, None, **keywords)
        msg = (
            f"value_and_grad({loss_fn!r}): it is called as loss_fn(model, batch, *extras):"
            f" {error}."
        )
        raise ArgumentError(msg) from error
    if count is not None and not callable(count):
        msg = f"count={count!r}: expected a function of a batch, or None."
        raise ArgumentError(msg)
    differentiated = loss_fn if count is None else of_shares(loss_fn, count)

    def compute(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        state.lease.check()
        cache = state.definition.cache
        composed = cache.composed.get(ref(compute))
        if composed is None:
            check_loaded(state)
            check_first_batch(state, batch)
            composed = _compose(differentiated, state.definition.setup)
            cache.compose(compute, composed)
        if state.definition.data is not None and not isinstance(batch, Batch):
            warn_of_values(state, batch)
        if count is not None:
            extras = (*extras, _count(count, state, batch, into))
        return composed(state, batch, *extras, into=into, sync=sync)

    return compute


def _is_torchs(loss_fn: object) -> bool:
    """Return whether a loss is torch's own, which knows no model."""
    kind = loss_fn if isinstance(loss_fn, (FunctionType, type)) else type(loss_fn)
    return kind.__module__ in ("torch.nn.functional", "torch.nn.modules.loss")


def _count(count: Count, state: TrainState, batch: Any, into: Grads | None) -> Counts:
    """Return the counts of the whole update that begins with this batch."""
    if into is not None:
        msg = (
            "value_and_grad(count=): into= adds to an update whose counts were told before."
            " Give all micro-batches at once, under af.accumulate."
        )
        raise GradsError(msg)
    parts: list[Any] = [batch]
    cuts = state.definition.setup.facts.get("micro_batches", ())
    for parts_of in cuts:  # the first is outermost
        parts = [each for part in parts for each in parts_of(part)]
    if not cuts and isinstance(batch, Batch):
        parts = [*batch.parts()]
    return counted(count, parts, state.definition.world.batch)


def _compose(loss_fn: LossFunction, setup: chain) -> ValueAndGrad:
    """Return the gradient function as the setup's transforms wrap it."""
    weighed = is_weighed(loss_fn)
    composed = _innermost(wrap_loss(loss_fn, setup), setup, weighed=weighed)
    for each in reversed(setup.owners["value_and_grad"]):
        composed = each.value_and_grad(composed)
        _check_function(each, "value_and_grad", composed)
    return composed


def wrap_loss(loss_fn: LossFunction, setup: chain) -> LossFunction:
    """Return a function of (model, batch, ...) as the setup's transforms wrap losses.

    One that declares `sample_weight` is given it as its last extra: what wraps it passes
    extras on, and need not know the keyword.
    """
    own = loss_fn
    if is_weighed(own):

        @wraps(own)
        def weighed(model: torch.nn.Module, batch: Any, *extras: Any) -> Any:
            *others, weight = extras
            return own(model, batch, *others, **{_WEIGHT: weight})

        loss_fn = weighed
    for each in reversed(setup.owners["loss"]):
        loss_fn = each.loss(loss_fn)
        _check_function(each, "loss", loss_fn)
    return loss_fn


def is_weighed(loss_fn: LossFunction) -> bool:
    """Whether a function declares the keyword `sample_weight`, and nobody has given it."""
    if isinstance(loss_fn, partial) and _WEIGHT in loss_fn.keywords:
        return False
    try:
        declared = signature(loss_fn).parameters.get(_WEIGHT)
    except (TypeError, ValueError):  # written in C
        return False
    return declared is not None and declared.kind is declared.KEYWORD_ONLY


def _check_function(owner: object, field: str, returned: object) -> None:
    is_function = callable(returned)
    check_returned(
        owner, field, ok=is_function, returned=returned, expected="a function"
    )


def _innermost(loss_fn: LossFunction, setup: chain, *, weighed: bool) -> ValueAndGrad:
    stays_local, has_engine = "stays" in setup.facts, bool(setup.owners["engine"])
    is_scaled = bool(setup.owners["loss_scale"])
    is_wrapped = bool(setup.owners["value_and_grad"])
    judged = "judges_finite" in setup.facts

    def compute(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        world = state.definition.world
        if into is not None:
            _check_into(state, into)
        is_lone = not setup.reduces and (
            world.loss.size == 1
            or (stays_local and (not has_engine or state.definition.copy.size == 1))
        )
        lone = into is None and sync and is_lone
        value, known, given, begins = batch, None, None, into is None
        cursor = None if into is None else into.taken.cursor
        if isinstance(batch, Batch):
            value, known, given = batch.value, batch.weights[0], batch
            cursor = _cursor_after(state, batch, into)
        flags = lone, judged, begins, begins and sync, weighed
        samples = Samples(value, extras, known, *flags, given)
        if weighed:
            samples = samples.with_weight(world.device)
        with span("accelfn value_and_grad"):
            engine = engine_of(state)
            if engine.live_update is not None:
                _check_planned(engine.live_update, state, into, sync=sync)
            return engine.value_and_grad(
                state,
                loss_fn,
                samples,
                into=into,
                sync=sync and not setup.reduces,
                cursor=cursor,
                loss_scale=_loss_scale(state) if is_scaled else None,
                may_be_kept=is_wrapped,  # by what takes others, too
            )

    return compute


def _check_into(state: TrainState, into: Grads) -> None:
    """Raise unless gradients can be added to these."""
    check_update(state, into)
    definition = state.definition
    if into.reduced and definition.world.loss.size > 1 and definition.copy.size > 1:
        msg = (
            "value_and_grad(into=grads): these gradients are reduced over the ranks"
            " already, so what is added now would not be. Take them with sync=False."
        )
        raise GradsError(msg)


def _check_planned(
    live: LiveUpdate, state: TrainState, into: Grads | None, *, sync: bool
) -> None:
    """Refuse gradients by themselves where they are freed one by one."""
    if live.is_planned and into is None and sync:
        return
    setup = state.definition.setup
    owner = next(e for e in setup if "steps_in_backward" in facts_of(e))
    msg = (
        f"{owner!r} updates each parameter, and frees its gradient, in the backward"
        " pass: there are no gradients to return. Step with af.make_step(loss_fn), or take"
        " gradients of state.with_setup(...) without it."
    )
    raise GradsError(msg)


def _loss_scale(state: TrainState) -> torch.Tensor:
    """Return what losses are multiplied by, as a scalar on the device."""
    scale = torch.ones((), device=state.definition.world.device)
    update = Update(state=state, slots=state.slots)
    kinds = (int, float, torch.Tensor)
    found = looked("loss_scale", scale, update, kinds)
    return found if isinstance(found, torch.Tensor) else scale * found


def _cursor_after(state: TrainState, batch: Batch, into: Grads | None) -> Cursor | None:
    """Return where the data stand after a batch; one that is taken twice moves them once.

    Raises:
        BatchError: it begins neither where the state stands nor where the gradients do, and
            is not the one that was added last.
    """
    start, after = batch.start, batch.cursor
    before = None if into is None else into.taken.cursor
    if start is None or after is None:
        return before
    if start == before or (start == state.cursor and before is None):
        return after
    # or another part of the last one
    if before is not None and (start == state.cursor or after == before):
        return max(before, after, key=lambda each: (each.epoch, each.samples))
    msg = (
        f"This batch begins at epoch {start.epoch} sample {start.samples}, but the"
        f" state stands at epoch {state.cursor.epoch} sample {state.cursor.samples}."
        f" {_why(start, state.cursor)} Start af.batches(state) again from this state."
    )
    raise BatchError(msg)


def _why(start: Cursor, stands: Cursor) -> str:
    """Return how a loop came to a batch that begins elsewhere than its state."""
    if (start.epoch, start.samples) < (stands.epoch, stands.samples):
        return "Its update was taken before, or it is of an older state's af.batches."
    return (
        "The loop left out a batch, or lost the state that an update returned: write state,"
        " metrics = step(state, batch), or state = af.apply_grads(state, grads)."
    )


def check_update(state: TrainState, grads: Grads) -> None:
    """Raise unless these gradients are of this state's update, and not given away.

    Raises:
        GradsError: they are not.
    """
    if not isinstance(grads, Grads):
        msg = f"Expected the Grads that value_and_grad returned, got {type(grads).__name__}."
        raise GradsError(msg)
    grads.taken.lease.check()
    if grads.taken.update != state.num_tried:
        msg = (
            f"These gradients were taken at update {grads.taken.update}, but the state is at"
            f" update {state.num_tried}."
        )
        raise GradsError(msg)
    trained = state.definition.skeleton.trainable
    if grads.taken.trained not in (None, trained):
        differ = sorted({*grads.taken.trained} ^ {*trained})
        msg = (
            "These gradients were taken when other parameters were trained;"
            f" {', '.join(differ[:5])} were trained either then or now. Take gradients"
            " again after with_trainable."
        )
        raise GradsError(msg)
