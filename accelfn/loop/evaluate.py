# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`: use each held-out sample exactly once, on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import torch

from accelfn.base import codec, draws, tree
from accelfn.base.arguments import (
    advise,
    call_mismatch,
    explain_call_errors,
    is_number,
)
from accelfn.base.draws import own_modes
from accelfn.base.tree import local
from accelfn.collectives.failures import check_world
from accelfn.collectives.packed import all_gather_list, broadcast_, gather_bytes
from accelfn.collectives.replicas import check_rows
from accelfn.collectives.trees import join_rows
from accelfn.data import Batch, Data, Plan
from accelfn.data.consistency import LeftOut, check_same_data
from accelfn.data.plan import even_part
from accelfn.data.reading import Reading
from accelfn.engine.engine import engine_of
from accelfn.engine.runner import Samples, lend_module
from accelfn.errors import ArgumentError, BatchError, LossError, StateError
from accelfn.state.results import (
    Loss,
    Metrics,
    Number,
    WeightedSum,
    check_whole,
    is_scalar,
)
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_readonly
from accelfn.state.views import eval_params
from accelfn.step.value_and_grad import FUNCTION, takes_weight, weight_as_extra
from accelfn.world import World

EvaluateFunction: TypeAlias = Callable[..., Any]
_NO_GRADIENTS = (
    "af.evaluate and af.predict call their function without gradients: leave out backward(),"
    " or compute gradients, for example of the inputs, in `with torch.enable_grad():`."
)


@explain_call_errors
def evaluate(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> dict[str, float]:
    """Return exact means of `fn`'s results over a dataset, on all ranks.

    With any setup, the samples are split over the ranks of the state's world, each sample is
    seen once, and totals and weights are reduced in one collective at the end.

    Args:
        state: evaluated at its `eval_params`; it does not change.
        data: read in the dataset's order; `shuffle` and `remainder` are ignored,
            because they have no effect on a mean over all samples.
        fn: `(model, batch, *extras)` returns a scalar mean over the batch, a dict of such means
            by name, or `af.Loss(total, weight, name=total)`. It runs in evaluation mode,
            without gradients, under the setup's precision. A lone mean has the function's
            name, for example `accuracy`; "loss" if the name ends in loss or loss_fn, and
            "value" if the function has no name.
        extras: passed to `fn`.

    Law:
        The result is that of one process, up to rounding, for any number of ranks and any
        batch size. The state and every generator are bitwise as before.

    Cost:
        One pass; one all-reduce, a broadcast of rank 0's buffers, and an all-gather of 8
        bytes to compare the ranks' data.

    Raises:
        ReplicaMismatchError: the ranks have different samples, or another order.
        StateError: `fn` wrote into the parameters.
        LossError: `fn` returned something else, or no scalar. accelfn warns of an integer
            tensor, because it is a count and not a mean, and of a mean over a batch from which
            the data's `collate` left out samples.
    """
    check_state("af.evaluate(state, data, fn)", state)
    total, evaluation = Metrics({}), _Evaluation(state, fn, extras)
    left_out = None if getattr(data, "collate", None) is None else LeftOut()
    for batch in _held_out(state, data):
        result = evaluation.run(batch)
        if left_out is not None and not isinstance(result, Loss):
            left_out.look(batch.value, batch.weights[0], "What is measured")
        weight = batch.weights[0] or 0
        sums = _sums(result, weight, fn)
        if not weight:  # a stand-in, and even its infinity must not count
            sums = Metrics(dict.fromkeys(sums, (0.0, 0.0)))
        total = total + sums
    return total.all_reduce_mean(state.world)


@explain_call_errors
def predict(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> Iterator[Any]:
    """Yield `fn`'s result for every sample, in dataset order, on all ranks.

    Args:
        state: used at its `eval_params`; it does not change.
        data: read in the dataset's order.
        fn: `(model, batch, *extras)` returns a tree of tensors with the batch along dim 0.
        extras: passed to `fn`.

    Yields:
        A tree for each sample, its tensors without dim 0; `torch.stack(list(...))` for tensors.

    Law:
        Each sample has its one result, for any number of ranks.

    Cost:
        One gather for each batch and dtype, and one of 8 bytes for the data. Results are
        streamed: memory has one batch at a time.

    Raises:
        ReplicaMismatchError: the ranks have different samples, or another order.
        BatchError: dim 0 of a result is not the batch's.
        StateError: `fn` wrote into the parameters.
    """
    check_state("af.predict(state, data, fn)", state)
    if isinstance(data, Data) and data.sharded:
        msg = (
            "af.predict: samples of data with sharded=True have no common order; predict on"
            " data that all ranks can read."
        )
        raise StateError(msg)
    ranks, evaluation = state.world.batch, _Evaluation(state, fn, extras)
    plan = Plan(num_shares=ranks.size)
    for batch in _held_out(state, data):
        result = evaluation.run(batch)
        counts = [count for (count,) in plan.counts(batch.num_samples)]
        _check_rows(result, max(batch.weights[0] or 0, 1), fn)
        rows = join_rows(result, counts, ranks, label="predict")
        for i in range(batch.num_samples):
            yield tree.tree_map(lambda leaf, i=i: leaf[i], rows)


class _Evaluation:
    """A function on a module at the evaluation parameters, with copies of the buffers."""

    def __init__(
        self, state: TrainState, fn: EvaluateFunction, extras: tuple[Any, ...]
    ) -> None:
        _check_function(fn, extras)
        self._state, self._extras, self._calls = state, extras, 0
        self._takes_weight = takes_weight(fn)
        update = Update(state=state, slots=state.slots)
        self._fn = apply_readonly("loss", weight_as_extra(fn), update, FUNCTION)
        key = draws.key(state.seed, state.name, "evaluate", state.world.loss.rank)
        self._key, definition = key, state.definition
        with own_modes(state.world.device):  # the function may write to the buffers
            buffers = tree.clone(dict(state.buffers))
            if buffers:  # statistics differ by rank; rank 0's count
                tensors = list(buffers.values())
                broadcast_(tensors, state.world, label="buffers of rank 0")
            params = eval_params(state)
            if definition.layout is None:
                self._call = lend_module(definition, params, buffers)
            else:
                self._call = engine_of(state).binding.lend(params, buffers)
        self._params = {name: local(param) for name, param in params.items()}

    def run(self, batch: Batch) -> Any:
        """Return the function's result for a batch, without gradients.

        The caller's modes, such as autocast and inference mode, do not apply. Random numbers
        depend on the state and the number of the call.
        """
        world, device = self._state.world, self._state.world.device
        self._state.lease.check()
        seed = draws.fold(self._key, self._calls)
        self._calls += 1
        flags = False, False, True, True, self._takes_weight
        samples = Samples(batch.value, self._extras, batch.weights[0], *flags, batch)
        if samples.is_weighed:
            samples = samples.with_weight(device)
        versions = [param._version for param in self._params.values()]
        activity = world.connection.activity
        outer, activity.samples = activity.samples, samples
        try:
            with own_modes(device), torch.no_grad(), draws.seeded(seed, device):
                result = self._call(self._fn, samples.value, *samples.extras)
        except RuntimeError as error:
            if "does not require grad" in str(error):  # of torch's backward pass
                error.add_note(_NO_GRADIENTS)
            raise
        finally:
            activity.samples = outer
        self._check_unwritten(versions)
        return result

    def _check_unwritten(self, versions: list[int]) -> None:
        """Raise if the function wrote into parameters, which belong to the state.

        Raises:
            StateError: it did.
        """
        for (name, param), version in zip(self._params.items(), versions, strict=True):
            if param._version != version:
                msg = (
                    f"The evaluated function wrote into {name!r}, which belongs to the state:"
                    " its values are lost, so load a checkpoint. Let the function change its"
                    " own model: model = af.snapshot_model(state)."
                )
                raise StateError(msg)


def _check_function(fn: object, extras: tuple[Any, ...]) -> None:
    if not callable(fn):
        msg = f"Expected a function (model, batch, *extras) to evaluate, got {fn!r}."
        raise LossError(msg)
    keywords = {"sample_weight": None} if takes_weight(fn) else {}
    error = call_mismatch(fn, None, None, *extras, **keywords)
    if error is not None:
        msg = f"{fn!r} is evaluated as fn(model, batch, *extras): {error}."
        raise LossError(msg) from error


def _held_out(state: TrainState, data: Data) -> Iterator[Batch]:
    """Yield this rank's shares of a dataset in its own order."""
    if not isinstance(data, Data):
        is_loader = isinstance(data, torch.utils.data.DataLoader)
        hint = " af.Data.from_loader(loader) makes one." if is_loader else ""
        msg = (
            "Expected af.Data(dataset, global_batch_size=...) to evaluate on, got"
            f" {type(data).__name__}.{hint}"
        )
        raise StateError(msg)
    world, ranks = state.world, state.world.batch
    plan = Plan(world_rank=ranks.rank, world_size=ranks.size).sharded()
    reading = Reading(plan=plan, epochs=1, seed=state.seed, world=world)
    in_order = data.in_order()
    check_same_data(in_order, data.looks, world)
    yield from in_order.read(reading)


def _sums(result: Any, weight: int, fn: EvaluateFunction) -> Metrics:
    """Return the function's result as weighted sums."""
    if isinstance(result, Loss):
        if not is_scalar(result.total):
            msg = (
                f"{_shape_hint(fn, result.total)} as a total; expected one real number."
            )
            raise LossError(msg)
        sums: dict[str, tuple[Number, Number]] = {}
        sums["loss"] = (result.total, result.weight)
        for entry in (sums["loss"], *result.aux.values()):
            check_whole(entry, _metric_name(fn))
        for name, entry in result.aux.items():
            sums[name] = entry if isinstance(entry, tuple) else (entry, result.weight)
        return Metrics(sums)
    is_mapping = isinstance(result, Mapping)
    means: Any = result if is_mapping else {_measure_of(fn): result}
    for name, value in means.items():
        check_whole(value, _metric_name(fn))
        if isinstance(value, torch.Tensor):
            is_mean = value.ndim == 0 and not value.is_complex()
        else:
            is_mean = isinstance(value, (int, float))
        if not is_mean:
            msg = (
                f"{_shape_hint(fn, value)} for {name!r}; expected a scalar mean over the batch,"
                " a dict of them, or af.Loss."
            )
            raise LossError(msg)
        if weight > 1 and _is_count(value):
            advise(
                f"{_metric_name(fn)} returned an integer tensor for {name!r}, a count or a sum,"
                " and evaluate averages it like a mean over each batch. Return that mean,"
                " such as (found == targets).float().mean(), or totals with their weight:"
                f" af.Loss(total, len(targets), {name}=count)."
            )
    return Metrics(
        {name: WeightedSum(value * weight, weight) for name, value in means.items()}
    )


def _is_count(value: Any) -> bool:
    """Return whether a scalar is an integer tensor, which cannot be a mean of samples."""
    is_exact = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return is_exact and not value.is_complex() and value.dtype is not torch.bool


def _measure_of(fn: EvaluateFunction) -> str:
    """Return the name of a lone mean: the function's name, or "loss" for a loss."""
    function: Any = fn
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    name = str(getattr(function, "__name__", type(function).__name__))
    stem = name.lower().removesuffix("_fn").removesuffix("_function")
    if stem.endswith("loss"):
        return "loss"
    return "value" if name == "<lambda>" else name


def _check_rows(result: Any, rows: int, fn: EvaluateFunction) -> None:
    for leaf in tree.tree_leaves(result):
        check_whole(leaf, _metric_name(fn))
        is_array = isinstance(leaf, torch.Tensor) and leaf.ndim > 0
        if not is_array or leaf.shape[0] != rows:
            msg = (
                f"{_shape_hint(fn, leaf)}; expected tensors whose dim 0 is the batch's"
                f" {rows} samples."
            )
            raise BatchError(msg)


def _shape_hint(fn: EvaluateFunction, result: Any) -> str:
    """Describe the shape of a function's result for an error message."""
    is_tensor = isinstance(result, torch.Tensor)
    shape = tuple(result.shape) if is_tensor else type(result).__name__
    if is_tensor and result.is_complex():
        shape = f"complex numbers of shape {shape}"
    return f"{_metric_name(fn)} returned {shape}"


def _metric_name(fn: EvaluateFunction) -> str:
    return getattr(fn, "__qualname__", repr(fn))


# `report_metric`: give the result of an evaluation to transforms.


def report_metric(state: TrainState, value: float | torch.Tensor) -> TrainState:
    """Give the result of an evaluation to the state's transforms: `(state, value) -> state`.

    Only the slots of the new state differ; it shares the tensors of the given state. Call it
    on all ranks, with a value that is the same on all ranks, such as a result of `af.evaluate`.

    The value is appended to the entry `reported` of each slot that has one. The transform's
    `hyper` finds it there in the next update.

    Args:
        state: a state with a transform that takes reports, such as `af.reduce_lr_on_plateau`.
        value: a number, such as `af.evaluate(state, held_out, loss_fn)["loss"]`.

    Law: two states that were given the same values are equal; only slots change.

    Cost: if ranks train together, a small all-reduce to compare values.

    Raises:
        ArgumentError: `value` is not a number.
        StateError: no transform takes reports.
        ReplicaMismatchError: ranks that train together report different values, such as a
            loss of each rank's own batches.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> import accelfn as af
        >>> state = af.TrainState.create(
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     optimizer=partial(torch.optim.SGD, lr=0.5),
        ...     setup=af.reduce_lr_on_plateau(patience=0),
        ... )
        >>> state = af.report_metric(af.report_metric(state, 0.25), 0.25)  # no better than before
        >>> state.lrs
        (0.05,)
    """
    check_state("af.report_metric(state, value)", state)
    state.lease.check()
    setup, world = state.definition.setup, state.definition.world
    old_slots = slots_with_reports(state)
    if not old_slots:
        msg = (
            "af.report_metric(state, value): no transform of the setup takes reports. Add one to"
            " the setup, such as af.reduce_lr_on_plateau(patience=2)."
        )
        raise StateError(msg)
    number = _number(value)
    if setup.owners["engine"] or setup.owners["reduce"]:
        check_rows(
            {"reported value": repr(number)},
            world,
            label="compare reported values",
            advice="Report a value that is the same on all ranks, such as a result of af.evaluate.",
        )
    new_slots = {
        name: {**slot, "reported": (*slot["reported"], number)}
        for name, slot in old_slots.items()
    }
    return attrs.evolve(state, slots={**state.slots, **new_slots})


def slots_with_reports(state: TrainState) -> dict[str, Mapping[str, Any]]:
    """Return the slots of transforms that take reports, by name."""
    slots = {t.name: state.slots.get(t.name) for t in state.definition.setup}
    return {
        name: cast("Mapping[str, Any]", slot)
        for name, slot in slots.items()
        if isinstance(slot, Mapping) and "reported" in slot
    }


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        return float(value)
    hint = ""
    if hasattr(value, "keys"):
        hint = ' Choose one by its name: af.evaluate(...)["loss"].'
    msg = f"af.report_metric(state, {value!r}): expected a number.{hint}"
    raise ArgumentError(msg)


# `all_gather_valid`: gather the ranks' results for an update's samples, each sample once.


def all_gather_valid(
    values: Any, batch: Batch, world: World, *, label: str = "all_gather_valid"
) -> Any:
    """Return the values of all ranks' samples, without filler, in the order of the batch.

    Args:
        values: the values of this rank's samples: a tree of tensors with the samples along
            dim 0 (all micro-batches, one after the other), or a list with an entry for each
            sample: tensors of any shapes, strings, numbers, and dicts, lists and tuples of them.
        batch: the batch of `af.batches` with those samples.
        world: the ranks that took part.
        label: the name of this gather, for errors.

    Returns: a tree of tensors, or a list, with an entry for each sample of the update, the
    same on all ranks. If every rank has the full batch, it comes once.

    Law: the result on any number of ranks is that of one process.

    Cost: a gather for each dtype; lists travel as bytes, without pickle; and one gather of two
    integers.

    Raises:
        BatchError: the number of values is not the number of samples.
        PlainDataError: a list has other entries.
    """
    if not isinstance(batch, Batch):
        msg = (
            f"af.all_gather_valid(values, batch, world): got {type(batch).__name__}; expected a"
            " batch of af.batches. af.all_gather(values, world) takes any values."
        )
        raise BatchError(msg)
    check_world("af.all_gather_valid", world)
    ranks = world.batch
    _check_same_rows(values, len(batch.filler))
    places = (~batch.filler).nonzero().reshape(-1)
    weight = sum(weight or 0 for weight in batch.weights)
    own_counts = torch.tensor([len(places), weight], device=ranks.device)
    rows = [t.tolist() for t in all_gather_list(own_counts, ranks, label=label)]
    counts = [int(row[0]) for row in rows]
    # if nothing shards the data, every rank has the full batch
    is_full = ranks.size == 1 or sum(row[1] for row in rows) > batch.num_samples
    if isinstance(values, list):
        valid = [values[place] for place in places.tolist()]
        data = codec.to_bytes(valid, path="values")
        parts = [data] if is_full else gather_bytes(data, ranks, label=label)
        return [entry for part in parts for entry in codec.from_bytes(part)]
    valid = tree.tree_map(lambda leaf: leaf[places.to(leaf.device)], values)
    return valid if is_full else join_rows(valid, counts, ranks, label=label)


def _check_same_rows(values: Any, rows: int) -> None:
    if isinstance(values, list):
        counts: list[int | None] = [len(values)]
    else:
        counts = [
            leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None
            for leaf in tree.tree_leaves(values)
        ]
    if set(counts) != {rows}:
        msg = (
            f"af.all_gather_valid: this rank's batch has {rows} samples (filler included), and"
            f" the values have {counts}; expected tensors whose dim 0 is the samples, or a list"
            " with an entry for each."
        )
        raise BatchError(msg)


# `split`: each rank's part of a list, a tensor, or a dict of them.


T = TypeVar("T")


def split_over_ranks(values: T, world: World, *, pad: bool = False) -> T:
    """Return this rank's part of values that all ranks have: prompts, files, rows.

    Parts are contiguous, in rank order, and their lengths differ by at most one, longer
    parts first; a part may be empty. It communicates nothing, and does not change the values.

    Args:
        values: a list, tuple, string, bytes, range, tensor or array, or a dict of them with
            one length. A tensor's part is a view.
        world: the ranks that split; if its ranks share their samples ("cp", "tp"), pass
            `world.batch`.
        pad: make all parts as long as the first, by repeating a part's last value, or the
            last of all values if a part is empty. Padded parts of a range are lists.

    Raises:
        ArgumentError: ranks of the world share samples, a dict's values differ in length, there
            is nothing to repeat, or the values cannot be sliced, as a namedtuple.

    Law: without `pad`, the parts of all ranks in rank order are the values; a world of 1 gets
    the same object.

    Example:
        >>> split_over_ranks(["a", "b", "c"], World.single())
        ['a', 'b', 'c']
    """
    _check_world(world)
    length = _length(values)
    if world.size == 1:
        return values
    start, stop = even_part((0, length), world.rank, world.size)
    longest = -(-length // world.size)
    if pad and length == 0:
        msg = (
            "af.split_over_ranks(pad=True): there is nothing to repeat in empty values."
        )
        raise ArgumentError(msg)
    places = list(range(start, stop))
    if pad:
        places += [max(stop, 1) - 1] * (longest - len(places))

    def take(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {name: take(inner) for name, inner in items}
        if pad and isinstance(value, range):  # a range cannot repeat its last value
            return [value[place] for place in places]
        if len(places) == stop - start:
            return value[start:stop]
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return value[places]
        return _as_kind(value, [value[place] for place in places])

    return take(values)


def _check_world(world: World) -> None:
    """Reject other objects, and a world with ranks that share samples."""
    check_world("af.split_over_ranks", world)
    if world.whole is world and world.batch is not world:
        sharers = [n for n in ("cp", "tp") if world.axes.get(n, 1) > 1]
        msg = (
            f"af.split_over_ranks: the ranks along {' and '.join(sharers)} share their samples, but"
            " would get different parts. Give world.batch; or the axes that you mean, such as"
            f" world.along({sharers[0]!r})."
        )
        raise ArgumentError(msg)


def _as_kind(values: Any, items: list[Any]) -> Any:
    """Return items in a sequence of the same kind as a slice of the values."""
    if isinstance(values, str):
        return "".join(items)
    kind = {bytes: bytes, bytearray: bytearray, tuple: tuple}.get(
        type(values[:0]), list
    )
    return kind(items)


def _length(values: Any) -> int:
    """Return how many values there are to split."""
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        lengths = {name: _length(value) for name, value in items}
        if len(set(lengths.values())) > 1:
            msg = f"af.split_over_ranks: the values of this dict differ in length: {lengths}."
            raise ArgumentError(msg)
        return next(iter(lengths.values()), 0)
    is_array = isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim > 0
    if not is_array and not _can_slice(values):
        msg = (
            "af.split_over_ranks: expected a sequence that can be sliced, a tensor with a dim 0, or"
            f" a dict of them, got {type(values).__name__}."
        )
        raise ArgumentError(msg)
    return len(cast("Sequence[Any]", values))


def _can_slice(values: Any) -> bool:
    """Return whether values are a sequence with slices, unlike a deque or a record."""
    if not isinstance(values, Sequence) or hasattr(values, "_fields"):
        return False
    with suppress(TypeError):
        cast("Sequence[Any]", values)[0:0]
        return True
    return False
