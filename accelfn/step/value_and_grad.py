# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: compute a loss's metrics and gradients without changing the state."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn, Protocol, TypeAlias
from weakref import ref

import attrs
import torch
from torch.autograd import profiler

from accelfn.base import tree
from accelfn.base.arguments import (
    call_mismatch,
    explain_call_errors,
    is_number,
    qualname,
    signature,
)
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.collectives.packed import sum_named
from accelfn.data import Batch, Data
from accelfn.data.plan import Cursor
from accelfn.definition.definition import Definition
from accelfn.definition.transform import facts_of
from accelfn.engine.doctor import examine_call
from accelfn.engine.engine import engine_of
from accelfn.engine.optimizer import LiveUpdate
from accelfn.engine.runner import LossFunction, Samples
from accelfn.errors import ArgumentError, BatchError, GradsError, LossError
from accelfn.state.results import Grads, Loss, Metrics, Number
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_readonly
from accelfn.world import World

# Counts of a whole update, computed before its forward passes.
#
# A loss with several denominators (tokens of a text, boxes of an image) is not a total with one
# weight. Its loss function gets the counts of the whole update, over all ranks and
# micro-batches, and divides by them. It returns its part of the update's loss, and these parts
# are summed.


Count: TypeAlias = Callable[[Any], Number | Mapping[str, Number]]

_ALONE = ""


@attrs.frozen
class Counts:
    """The counts of one update, over all micro-batches and ranks.

    Attributes:
        divisors: the number, or numbers by name, that the loss function gets; a 0 becomes 1.
        whole: the sum of all counts.
    """

    divisors: Number | dict[str, Number]
    whole: float


def count_update(count: Count, parts: Sequence[Any], ranks: World) -> Counts:
    """Return the counts of an update's micro-batches, over all ranks.

    Cost: with several ranks, one all-reduce of a few numbers; the host waits for it.

    Raises:
        LossError: `count` did not return a count, or returned other names than before.
        CollectiveMismatchError: `count` returned equally many names on the ranks, but different
        names.
    """
    totals: dict[str, float] | None = None
    for part in parts:
        if isinstance(part, Batch) and part.weights[0] == 0:
            continue  # the filler of an empty share
        counts = _call(count, part.value if isinstance(part, Batch) else part)
        if totals is not None and totals.keys() != counts.keys():
            msg = (
                f"count={qualname(count)} must return the same names for all micro-batches, but"
                f" it returned {sorted(totals)} and then {sorted(counts)}."
            )
            raise LossError(msg)
        totals = {n: (totals or {}).get(n, 0) + total for n, total in counts.items()}
    if totals is None:  # for an empty share, count the filler to get the names
        totals = dict.fromkeys(_call(count, parts[0].value), 0)
    if ranks.size > 1:
        named = {name: (total,) for name, total in totals.items()}
        label = "count the update"
        sums = sum_named(named, ranks, kind="count", label=label, noun="counts")
        totals = {name: total for name, (total,) in sums.items()}
    # if a count is 0, the part of the loss is 0, and dividing by 1 does not change it
    divisors: dict[str, Number] = {name: total or 1 for name, total in totals.items()}
    return Counts(divisors.get(_ALONE, divisors), sum(totals.values()))


def with_count(loss_fn: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Return a loss function of totals, from a function that returns parts of the loss.

    The new function gets the update's `Counts` as its last extra, and `loss_fn` gets their
    `divisors`.
    """

    @wraps(loss_fn)
    def loss_of_share(
        model: torch.nn.Module, batch: Any, *extras: Any, **weight: Any
    ) -> Loss:
        *loss_extras, counts = extras
        result = loss_fn(model, batch, *loss_extras, counts.divisors, **weight)
        share = result if isinstance(result, Loss) else Loss(result, 1)
        if not isinstance(share.weight, (int, float)) or share.weight != 1:
            msg = (
                f"{qualname(loss_fn)} returned af.Loss(..., weight={share.weight!r}), but with"
                " count= the weight must be 1: the loss function divides by the counts itself."
                " Return the divided loss, or af.Loss(loss, 1, name=(total, weight)) for a metric."
            )
            raise LossError(msg)
        count_sum = sum(_call(count, batch).values())
        factor, aux = counts.whole, dict(share.aux)
        for name, entry in share.aux.items():
            if not isinstance(entry, tuple):
                aux[name] = (entry * factor, count_sum)
        return Loss(share.total * factor, count_sum, **aux)

    loss_of_share.__qualname__ = qualname(loss_fn)
    return loss_of_share


def _call(count: Count, value: Any) -> dict[str, float]:
    """Call `count` on a micro-batch's value, and return the counts by name."""
    result = count(value)
    values = result if isinstance(result, Mapping) else {_ALONE: result}
    counts: dict[str, float] = {}
    for name, item in values.items():
        scalar = isinstance(item, torch.Tensor) and item.numel() == 1
        if not (scalar or is_number(item)) or not 0 <= float(item) < math.inf:
            msg = (
                f"count={qualname(count)} returned {result!r}; expected a number of 0 or more,"
                " or a dict from names to such numbers."
            )
            raise LossError(msg)
        counts[name] = item.item() if isinstance(item, torch.Tensor) else item
    return counts


_WEIGHT = "sample_weight"
FUNCTION: Any = Callable
"""The type that the `loss` and `value_and_grad` methods of a transform return."""
_EXTRAS = range(8)
"""How many arguments a loss function may have besides a model and a batch."""


class ValueAndGrad(Protocol):
    """A function that `value_and_grad` returns, and that transforms wrap."""

    def __call__(
        self,
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        """Return metrics and gradients, without changing the state."""
        ...


@explain_call_errors
def value_and_grad(
    loss_fn: LossFunction, *, count: Count | None = None
) -> ValueAndGrad:
    """Create a function that computes a loss's metrics and gradients, and changes no state.

    Call it as `compute(state, batch, *extras)`, and pass the gradients to `apply_grads`. With
    `into=grads` the call adds to earlier gradients, and takes ownership of these gradients.
    With `sync=False` gradients are not reduced over ranks, so that several backward passes need
    only one reduction.

    `count` is a function that gets a batch's value and returns a number, or a dict of
    numbers by name. The numbers are summed over all micro-batches and ranks before the first
    forward pass. The loss function gets the sums as its last argument, divides by them, and
    returns its part of the update's loss. Use it for a loss with several denominators. A sum
    of 0 is passed as 1.

    Acts on: nothing. In each call, the `loss` and `value_and_grad` methods of the setup's
    transforms wrap the function.

    Raises:
        GradsError: `into` is already reduced over ranks, and adding to it would make the
        replicas differ. Or `into` is used with `count`, which counts whole updates.
        LossError, NonFiniteLossError, BatchError, StateDonatedError: as in `make_step`.
    """
    compute = gradients_of(loss_fn, count)

    def compute_checked(
        state: TrainState, batch: Any, /, *extras: Any, **how: Any
    ) -> tuple[Metrics, Grads]:
        check_state("value_and_grad(loss_fn)(state, batch)", state)
        with own_modes(state.definition.world.device):
            result = compute(state, batch, *extras, **how)
            engine_of(state).hand_out()
            return result

    return compute_checked


def gradients_of(loss_fn: LossFunction, count: Count | None) -> ValueAndGrad:
    """Create the function of `value_and_grad`, without its checks and torch's modes.

    Raises:
        ArgumentError: `loss_fn` is not a function, or does not accept a model and a batch.
    """
    if not callable(loss_fn):
        msg = (
            f"loss_fn={loss_fn!r}: expected a function (model, batch, *extras) -> loss."
        )
        raise ArgumentError(msg)
    if _is_torchs(loss_fn):
        msg = (
            f"loss_fn={qualname(loss_fn)}: this is a loss function of torch, which gets outputs and"
            " targets. Write a function of a model and a batch that calls it: def loss_fn(model,"
            " batch): inputs, targets = batch; return F.cross_entropy(model(inputs), targets)."
        )
        raise ArgumentError(msg)
    keywords = {_WEIGHT: None} if takes_weight(loss_fn) else {}
    mismatch = partial(call_mismatch, loss_fn, None, None, **keywords)
    if all(mismatch(*(None,) * number) for number in _EXTRAS):
        raise ArgumentError(_wrong_parameters(loss_fn, mismatch())) from mismatch()
    if count is not None and not callable(count):
        msg = f"count={count!r}: expected a function that counts a batch, or None."
        raise ArgumentError(msg)
    origin = loss_fn if count is None else with_count(loss_fn, count)
    innermost = partial(_innermost, origin, takes_weight(origin))
    plain_loss = weight_as_extra(origin)

    def compute(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        state.lease.check()
        setup, cache = state.definition.setup, state.definition.cache
        if ref(compute) not in cache.examined:
            engine_of(state)
            own_extras = (*extras, None) if count is not None else extras
            error = mismatch(*own_extras)
            if error and not (setup.owners["loss"] or setup.owners["value_and_grad"]):
                raise LossError(_wrong_parameters(loss_fn, error, own_extras))
            examine_call(state, batch)
            cache.add_examined(compute)
        if count is not None:
            extras = (*extras, _count(count, state, batch, into))
        if not (setup.owners["loss"] or setup.owners["value_and_grad"]):
            return innermost(plain_loss, state, batch, *extras, into=into, sync=sync)
        slots = state._slots  # pyright: ignore[reportPrivateUsage]
        update = Update(state=state, slots=slots)
        inner = partial(innermost, apply_readonly("loss", plain_loss, update, FUNCTION))
        outer = apply_readonly("value_and_grad", inner, update, FUNCTION)
        return outer(state, batch, *extras, into=into, sync=sync)

    return compute


def _wrong_parameters(
    loss_fn: LossFunction, error: TypeError | None, extras: Sequence[Any] = ()
) -> str:
    advice = (
        "Write `def loss_fn(model, batch):`, and use this model. Unpack the batch inside, as in"
        " `inputs, targets = batch`."
    )
    if next(iter(signature(loss_fn).parameters), None) == "self":
        method = getattr(loss_fn, "__name__", "method")
        advice = f"Write `def loss_fn(model, batch):`, and call model.{method}(batch, ...) in it."
    arguments = "a model and a batch"
    if extras:
        arguments = f"a model, a batch and {len(extras)} extras"
        advice = "Accept the extras as parameters, or call step(state, batch) without extras."
    return (
        f"loss_fn={qualname(loss_fn)}: accelfn calls it with {arguments}, but its parameters are"
        f" {signature(loss_fn)} ({error}). {advice}"
    )


def _is_torchs(loss_fn: object) -> bool:
    """Return whether a loss is torch's own function or module, which gets no model."""
    kind = loss_fn if isinstance(loss_fn, (FunctionType, type)) else type(loss_fn)
    return kind.__module__ in ("torch.nn.functional", "torch.nn.modules.loss")


def _count(count: Count, state: TrainState, batch: Any, into: Grads | None) -> Counts:
    """Return the counts of the whole update that starts with this batch."""
    if into is not None:
        msg = (
            "af.value_and_grad(loss_fn, count=...): into= cannot be used with count, which counts"
            " all micro-batches first. Pass them in one call, with af.accumulate in the setup."
        )
        raise GradsError(msg)
    parts: list[Any] = [batch]
    cuts = state.definition.setup.facts.get("micro_batches", ())
    for parts_of in cuts:  # the first transform is the outermost
        parts = [piece for part in parts for piece in parts_of(part)]
    if not cuts and isinstance(batch, Batch):
        parts = [*batch.parts()]
    return count_update(count, parts, state.definition.world.batch)


def weight_as_extra(loss_fn: LossFunction) -> LossFunction:
    """Return a loss function whose last extra is the `sample_weight` that `loss_fn` declares.

    If `loss_fn` does not declare it, return `loss_fn`. Transforms pass on extras, so they do
    not need to know this keyword.
    """
    if not takes_weight(loss_fn):
        return loss_fn

    @wraps(loss_fn)
    def with_weight(model: torch.nn.Module, batch: Any, *extras: Any) -> Any:
        *loss_extras, weight = extras
        return loss_fn(model, batch, *loss_extras, **{_WEIGHT: weight})

    return with_weight


def takes_weight(loss_fn: LossFunction) -> bool:
    """Return whether a function declares `sample_weight`, which no `partial` has set."""
    if isinstance(loss_fn, partial) and _WEIGHT in loss_fn.keywords:
        return False
    try:
        parameter = signature(loss_fn).parameters.get(_WEIGHT)
    except (TypeError, ValueError):  # `loss_fn` is written in C
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


_REDUCED = (
    "value_and_grad(into=grads): these gradients are already reduced over the ranks, so new"
    " unreduced gradients cannot be added. Compute the earlier gradients with sync=False."
)


def _innermost(
    origin: LossFunction,
    has_weight: bool,  # noqa: FBT001 - whether `origin` declares `sample_weight`
    loss_fn: LossFunction,
    state: TrainState,
    batch: Any,
    /,
    *extras: Any,
    into: Grads | None = None,
    sync: bool = True,
) -> tuple[Metrics, Grads]:
    """Compute metrics and gradients of `loss_fn` in the engine.

    `loss_fn` is `origin`, wrapped by the `loss` methods of transforms.
    """
    definition = state.definition
    setup, world = definition.setup, definition.world
    scale = _loss_scale(state) if "loss_scale" in setup.facts else None
    if into is not None:
        check_update(state, into)
        if scale is not None and into.taken.trained is None:  # a user created `into`
            info = attrs.evolve(into.taken, loss_scale=scale)
            into = attrs.evolve(into, taken=info)
        if into.reduced and world.loss.size > 1 and definition.copy.size > 1:
            raise GradsError(_REDUCED)
    value, weight, source = batch, None, None
    cursor = None if into is None else into.taken.cursor
    if isinstance(batch, Batch):
        value, weight, source = batch.value, batch.weights[0], batch
        cursor = _cursor_after(state, batch, into)
    elif world.connection.activity.stand_ins:
        _reject_stand_in(batch, world.connection.activity.stand_ins)
    is_whole = into is None and sync
    lone, is_judged = is_whole and _is_lone(definition), "judges_finite" in setup.facts
    flags = lone, is_judged, is_whole, has_weight
    samples = Samples(
        *(value, extras, weight, *flags), into, cursor, scale, source, origin
    )
    if has_weight:
        samples = samples.with_weight(world.device)
    is_profiling = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    with span("accelfn value_and_grad") if is_profiling else NOTHING:
        engine = engine_of(state)
        if engine.live_update is not None:
            _check_planned(engine.live_update, state, into, sync=sync)
        sync = sync and not setup.reduces
        return engine.value_and_grad(state, loss_fn, samples, sync=sync)


def _reject_stand_in(value: Any, stand_ins: Iterable[Any]) -> None:
    """Raise if a value has tensors of a filler, which would count as a real sample here.

    Raises:
        BatchError: the value has such tensors.
    """
    ids = {id(leaf) for stand_in in stand_ins for leaf in tree.tensor_leaves(stand_in)}
    if any(id(leaf) in ids for leaf in tree.tensor_leaves(value)):
        msg = (
            "step(state, batch.value): this rank's share of the batch is empty, and batch.value is"
            " a filler that would count as a sample. Pass the batch, whose weight is 0, to this or"
            " another state: step(state, batch), or step(state, batch.zip(extra))."
        )
        raise BatchError(msg)


def _is_lone(definition: Definition) -> bool:
    """Return whether no other rank's loss is combined with this rank's loss."""
    setup = definition.setup
    if setup.reduces:
        return False
    if definition.world.loss.size == 1:
        return True
    stays = "stays" in setup.facts
    return stays and (not setup.owners["engine"] or definition.copy.size == 1)


def _check_planned(
    live: LiveUpdate, state: TrainState, into: Grads | None, *, sync: bool
) -> None:
    """Raise if the setup frees each gradient during the backward pass."""
    if live.is_planned and into is None and sync:
        return
    setup = state.definition.setup
    owner = next(e for e in setup if "steps_in_backward" in facts_of(e))
    msg = (
        f"af.value_and_grad: {owner!r} frees each gradient during the backward pass, so none is"
        " left to return. Use af.make_step(loss_fn), or remove this transform from the setup."
    )
    raise GradsError(msg)


def _loss_scale(state: TrainState) -> torch.Tensor:
    """Return the factor of the loss, as a scalar on the device."""
    factors = state.definition.setup.facts["loss_scale"]
    with torch.no_grad():
        scale = math.prod(factor(state) for factor in factors)
    return torch.as_tensor(scale, device=state.definition.world.device)


def _cursor_after(state: TrainState, batch: Batch, into: Grads | None) -> Cursor | None:
    """Return the cursor after a batch; using a batch twice does not move the cursor twice.

    Raises:
        BatchError: the batch starts neither at the state's cursor nor at the gradients' cursor,
        and is not the batch that was added last.
    """
    start, after = batch.start, batch.cursor
    before = None if into is None else into.taken.cursor
    if start is None or after is None:
        return before
    is_next = start == (state.cursor if before is None else before)
    # else `into` must have gradients of this batch, or of another micro-batch of it
    if not is_next and start != state.cursor and after != before:
        return _reject_batch(state, start)
    data = state.definition.data
    if data is not None and data.global_batch_size != batch.num_samples:
        _check_size(data, batch)
    return after if is_next else before


def _check_size(data: Data, batch: Batch) -> None:
    """Raise if a batch does not have the batch size of the state's data, as after `with_data`.

    Raises:
        BatchError: the sizes differ.
    """
    size = data.global_batch_size
    if not isinstance(size, int) or data.is_stream:
        return
    if batch.num_samples > size or not batch.ends_epoch:
        msg = (
            f"This batch has {batch.num_samples} samples, but the batch size of the state's data is"
            f" {size}. After state.with_data(...), start a new loop over af.batches(state)."
        )
        raise BatchError(msg)


def _reject_batch(state: TrainState, start: Cursor) -> NoReturn:
    """Raise an error about a batch that does not start at the state's cursor."""
    is_old = (start.epoch, start.samples) < (state.cursor.epoch, state.cursor.samples)
    why = _TAKEN if is_old else _LOST
    msg = (
        f"This batch begins at epoch {start.epoch}, sample {start.samples}, but the state is at"
        f" epoch {state.cursor.epoch}, sample {state.cursor.samples}. {why} Start a new loop"
        " over af.batches(state) from this state."
    )
    raise BatchError(msg)


_TAKEN = (
    "A step already used this batch, or it is from an older state's af.batches. To train on one"
    " batch again and again, pass step(state, batch.value)."
)
_LOST = (
    "The loop skipped a batch, or did not keep the state of the last update. Write state,"
    " metrics = step(state, batch), or state = af.apply_grads(state, grads)."
)


def check_update(state: TrainState, grads: Grads) -> None:
    """Raise unless gradients belong to this state's update, and can still be used.

    Raises:
        GradsError: the gradients belong to another update, or were used before.
        BatchError: a user created the gradients from a batch that does not start at the state's
        cursor.
    """
    if not isinstance(grads, Grads):
        msg = f"Expected the Grads that af.value_and_grad returned, got {type(grads).__name__}."
        raise GradsError(msg)
    grads.taken.lease.check()
    if grads.taken.update not in (None, state.num_tried):
        msg = (
            f"These gradients were computed at update {grads.taken.update}, but the state is at"
            f" update {state.num_tried}. Compute gradients again, from this state."
        )
        raise GradsError(msg)
    start = grads.taken.start
    if start not in (None, state.cursor):
        _reject_batch(state, start)
    trainable = state.definition.skeleton.trainable
    if grads.taken.trained not in (None, trainable):
        differ = sorted({*grads.taken.trained} ^ {*trainable})
        msg = (
            "These gradients were computed with other trainable parameters, which differ in"
            f" {', '.join(differ[:5])}. Compute them again after state.with_trainable(...)."
        )
        raise GradsError(msg)
