# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`: run a model once on every sample of a dataset, on any ranks."""

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
    qualname,
)
from accelfn.base.draws import own_modes
from accelfn.base.tree import local
from accelfn.collectives.failures import check_world
from accelfn.collectives.packed import all_gather_list, broadcast_, gather_bytes
from accelfn.collectives.replicas import check_rows
from accelfn.collectives.trees import join_rows
from accelfn.data import Batch, Data, Plan
from accelfn.data.consistency import LeftOut, check_same_data
from accelfn.data.loaders import Reading
from accelfn.data.plan import even_part
from accelfn.data.reading import read_batches
from accelfn.engine.engine import engine_of
from accelfn.engine.runner import Samples, lend_module
from accelfn.errors import ArgumentError, BatchError, LossError, StateError
from accelfn.state.results import Loss, Metrics, WeightedSum, check_whole, is_scalar
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_readonly
from accelfn.state.views import eval_params
from accelfn.step.value_and_grad import FUNCTION, takes_weight, weight_as_extra
from accelfn.world import World

EvaluateFunction: TypeAlias = Callable[..., Any]
_NO_GRADIENTS = (
    "af.evaluate and af.predict call your function under torch.no_grad(). Remove backward()."
    " To compute gradients, for example of the inputs, use `with torch.enable_grad():`."
)


@explain_call_errors
def evaluate(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> dict[str, float]:
    """Return the exact means of `fn`'s results over a dataset, by name, on all ranks.

    The samples are split over the ranks of the state's world, even if the setup does not split
    data. Each sample is used once. One collective at the end reduces totals and weights.

    Args:
        state: the state to evaluate, with its `eval_params`; it does not change.
        data: read in the order of the dataset. `shuffle` and `remainder` are ignored,
            because they have no effect on a mean over all samples.
        fn: a function `(model, batch, *extras)` that returns a scalar mean over the batch, a
            dict of such means by name, or an `af.Loss`. The model is in
            evaluation mode, without gradients, with the precision of the setup. If `fn` returns
            one mean, its name in the result is the name of `fn`, such as `accuracy`. It is
            "loss" if that name ends in loss or loss_fn, and "value" for a lambda.
        extras: further arguments for `fn`.

    Law:
        The result equals that of one process, up to rounding, for any number of ranks and any
        batch size. The state and all random generators are bitwise unchanged.

    Cost:
        One pass over the data, one all-reduce, a broadcast of rank 0's buffers, and an
        all-gather of 8 bytes to compare the ranks' data.

    Raises:
        ReplicaMismatchError: ranks have different samples, or a different order of samples.
        StateError: `fn` changed parameters in place.
        LossError: `fn` returned a value that is not a scalar, a dict or `af.Loss`.

    Warns:
        `fn` returned an integer tensor, which is probably a count and not a mean. Or it returned
        a mean over a batch, and the data's `collate` dropped samples of the batch.
    """
    check_state("af.evaluate(state, data, fn)", state)
    total, evaluation = Metrics({}), _Evaluation(state, fn, extras)
    left_out = None if getattr(data, "collate", None) is None else LeftOut()
    for batch in _held_out(state, data):
        result = evaluation.run(batch)
        if left_out is not None and not isinstance(result, Loss):
            left_out.look(batch.value, batch.weights[0], "The result of your function")
        weight = batch.weights[0] or 0
        sums = _sums(result, weight, fn)
        if not weight:  # a filler batch: even an infinite result must not count
            sums = Metrics(dict.fromkeys(sums, (0.0, 0.0)))
        total = total + sums
    return total.all_reduce_mean(state.world)


@explain_call_errors
def predict(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> Iterator[Any]:
    """Yield `fn`'s result for every sample, in the order of the dataset, on all ranks.

    Args:
        state: the state to use, with its `eval_params`; it does not change.
        data: read in the order of the dataset.
        fn: a function `(model, batch, *extras)` that returns a tree of tensors with the samples
            of the batch along dim 0.
        extras: further arguments for `fn`.

    Yields:
        A tree for each sample, its tensors without dim 0. If `fn` returns one tensor,
        `torch.stack(list(af.predict(...)))` has all results.

    Law:
        There is exactly one result for each sample, on any number of ranks.

    Cost:
        One gather for each batch and dtype, and one gather of 8 bytes to compare the ranks'
        data. Only the results of one batch are in memory at a time.

    Raises:
        ReplicaMismatchError: ranks have different samples, or a different order of samples.
        BatchError: dim 0 of a result does not have the size of the batch.
        StateError: `fn` changed parameters in place.
    """
    check_state("af.predict(state, data, fn)", state)
    if isinstance(data, Data) and data.sharded:
        msg = (
            "af.predict: with af.Data(..., sharded=True) each rank has other samples, and they"
            " have no common order. Use data that every rank can read completely."
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
    """Runs a user's function on a model with the evaluation parameters and copied buffers."""

    def __init__(
        self, state: TrainState, fn: EvaluateFunction, extras: tuple[Any, ...]
    ) -> None:
        _check_function(fn, extras)
        self._state, self._extras, self._calls = state, extras, 0
        self._takes_weight = takes_weight(fn)
        update = Update(state=state, slots=state.slots)
        self._fn = apply_readonly("loss", weight_as_extra(fn), update, FUNCTION)
        rank, definition = state.world.loss.rank, state.definition
        self._key = draws.key(state.seed, state.name, "evaluate", rank)
        with own_modes(state.world.device):  # the function may write to the buffers
            buffers = tree.clone(dict(state.buffers))
            if buffers:  # BatchNorm statistics differ by rank; all ranks use rank 0's
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

        The caller's modes, such as autocast and inference mode, have no effect. Random numbers
        depend only on the state and on how many batches were evaluated before.

        Raises:
            StateError: the function changed a parameter, which belongs to the state.
        """
        world, device = self._state.world, self._state.world.device
        self._state.lease.check()
        seed = draws.fold(self._key, self._calls)
        self._calls += 1
        arguments = batch.value, self._extras, batch.weights[0]
        is_weighed = self._takes_weight
        samples = Samples(*arguments, lone=False, is_weighed=is_weighed, batch=batch)
        if is_weighed:
            samples = samples.with_weight(device)
        versions = [param._version for param in self._params.values()]
        activity = world.connection.activity
        outer, activity.samples = activity.samples, samples
        try:
            with own_modes(device), torch.no_grad(), draws.seeded(seed, device):
                result = self._call(self._fn, samples.value, *samples.extras)
        except RuntimeError as error:
            if "does not require grad" in str(error):  # raised by torch's backward pass
                error.add_note(_NO_GRADIENTS)
            raise
        finally:
            activity.samples = outer
        for (name, param), version in zip(self._params.items(), versions, strict=True):
            if param._version != version:
                msg = (
                    f"af.evaluate and af.predict: your function changed the parameter {name!r}"
                    " in place. It belongs to the state, and its old values are lost: load a"
                    " checkpoint. To change weights, let the function use a copy that you make"
                    " before the call: model = af.snapshot_model(state)."
                )
                raise StateError(msg)
        return result


def _check_function(fn: object, extras: tuple[Any, ...]) -> None:
    if not callable(fn):
        msg = f"af.evaluate and af.predict need a function (model, batch), got {fn!r}."
        raise LossError(msg)
    keywords = {"sample_weight": None} if takes_weight(fn) else {}
    error = call_mismatch(fn, None, None, *extras, **keywords)
    if error is not None:
        msg = (
            f"af.evaluate and af.predict call fn(model, batch, *extras), which {fn!r} does not"
            f" accept: {error}."
        )
        raise LossError(msg) from error


def _held_out(state: TrainState, data: Data) -> Iterator[Batch]:
    """Yield this rank's shares of a dataset's batches, in the order of the dataset."""
    if not isinstance(data, Data):
        is_loader = isinstance(data, torch.utils.data.DataLoader)
        hint = " Convert it: af.Data.from_loader(loader)." if is_loader else ""
        msg = (
            "af.evaluate and af.predict need af.Data(dataset, global_batch_size=...), got"
            f" {type(data).__name__}.{hint}"
        )
        raise StateError(msg)
    world, ranks = state.world, state.world.batch
    plan = Plan(world_rank=ranks.rank, world_size=ranks.size).sharded()
    reading = Reading(plan=plan, epochs=1, seed=state.seed, world=world)
    in_order = data.in_order()
    check_same_data(in_order, data.looks, world)
    yield from read_batches(in_order, reading)


def _sums(result: Any, weight: int, fn: EvaluateFunction) -> Metrics:
    """Convert the function's result for a batch to weighted sums by name."""
    if isinstance(result, Loss):
        if not is_scalar(result.total):
            hint = _shape_hint(fn, result.total)
            msg = f"{hint} as the total of af.Loss; expected one real number."
            raise LossError(msg)
        entries: dict[str, Any] = {"loss": result.total, **result.aux}
        for entry in (result.weight, *entries.values()):
            check_whole(entry, qualname(fn))
        return Metrics(
            {
                name: entry if isinstance(entry, tuple) else (entry, result.weight)
                for name, entry in entries.items()
            }
        )
    is_mapping = isinstance(result, Mapping)
    means: Any = result if is_mapping else {_measure_of(fn): result}
    for name, value in means.items():
        check_whole(value, qualname(fn))
        is_tensor = isinstance(value, torch.Tensor)
        is_real = is_tensor and value.ndim == 0 and not value.is_complex()
        is_exact = is_tensor and not value.is_floating_point()
        is_count = is_exact and value.dtype is not torch.bool
        if not is_real and not isinstance(value, (int, float)):
            msg = (
                f"{_shape_hint(fn, value)} for {name!r}; expected a scalar (the mean over the"
                " batch), a dict of such scalars, or af.Loss."
            )
            raise LossError(msg)
        if weight > 1 and is_count:
            advise(
                f"{qualname(fn)} returned an integer tensor for {name!r}. It is probably a"
                " count or a sum, but af.evaluate uses it as the mean over the batch. Return the"
                " mean, such as (predicted == targets).float().mean(), or a total with its"
                f" weight: af.Loss(total, len(targets), {name}=count)."
            )
    return Metrics(
        {name: WeightedSum(value * weight, weight) for name, value in means.items()}
    )


def _measure_of(fn: EvaluateFunction) -> str:
    """Return the name of a function's only mean: the function's name, "loss" or "value"."""
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
        check_whole(leaf, qualname(fn))
        if _num_rows(leaf) != rows:
            msg = f"{_shape_hint(fn, leaf)}; af.predict expects {rows} samples along dim 0."
            raise BatchError(msg)


def _num_rows(leaf: object) -> int | None:
    """Return the size of a tensor's dim 0; None for other leaves."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None


def _shape_hint(fn: EvaluateFunction, result: Any) -> str:
    """Return the first words of an error: the function and the shape that it returned."""
    shape = type(result).__name__
    if isinstance(result, torch.Tensor):
        kind = "a complex tensor" if result.is_complex() else "a tensor"
        shape = f"{kind} of shape {tuple(result.shape)}"
    return f"{qualname(fn)} returned {shape}"


# `report_metric`: pass the result of an evaluation to transforms such as `reduce_lr_on_plateau`.


def report_metric(state: TrainState, value: float | torch.Tensor) -> TrainState:
    """Pass the result of an evaluation to the state's transforms, and return the new state.

    Call this on all ranks, with a value that is equal on all ranks, such as a result of
    `af.evaluate`. The new state differs only in its slots, and shares the tensors of the state
    that you pass.

    The value is appended to the entry `reported` of each slot that has this entry. The
    transform's `hyper` reads the entry in the next update.

    Args:
        state: a state with a transform that uses reports, such as `af.reduce_lr_on_plateau`.
        value: a number, such as `af.evaluate(state, held_out, loss_fn)["loss"]`.

    Law: equal reports to equal states return equal states. Only slots change.

    Cost: if ranks train together, a small all-reduce to compare the values of the ranks.

    Raises:
        ArgumentError: `value` is not a number.
        StateError: no transform of the setup uses reports.
        ReplicaMismatchError: ranks that train together report different values, such as the
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
        >>> state = af.report_metric(af.report_metric(state, 0.25), 0.25)  # no improvement
        >>> state.lrs
        (0.05,)
    """
    check_state("af.report_metric(state, value)", state)
    state.lease.check()
    setup, world = state.definition.setup, state.definition.world
    slots: Mapping[str, Any] = state.slots
    names = [n for n, s in slots.items() if isinstance(s, Mapping) and "reported" in s]
    if not names:
        msg = (
            "af.report_metric(state, value): no transform of the setup uses reported values. Add"
            " one to the setup, such as af.reduce_lr_on_plateau(patience=2)."
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
        name: {**slots[name], "reported": (*slots[name]["reported"], number)}
        for name in names
    }
    return attrs.evolve(state, slots={**slots, **new_slots})


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        return float(value)
    is_dict = hasattr(value, "keys")
    hint = ' Pass one value of the dict: af.evaluate(...)["loss"].' if is_dict else ""
    msg = f"af.report_metric(state, {value!r}): expected a number.{hint}"
    raise ArgumentError(msg)


# `all_gather_valid`: gather results for the samples of a batch over all ranks, without filler.


def all_gather_valid(
    values: Any, batch: Batch, world: World, *, label: str = "all_gather_valid"
) -> Any:
    """Gather one value for each sample of a batch from all ranks, without filler.

    Args:
        values: the values of this rank's samples. Either a tree of tensors with the samples along
            dim 0, all micro-batches one after the other. Or a list with one entry for each
            sample: a tensor of any shape, a string, a number, or a dict, list or tuple of such
            values.
        batch: the batch from `af.batches` that has these samples.
        world: the ranks that share the batch.
        label: the name of this gather in error messages.

    Returns: a tree of tensors, or a list, with one entry for each sample of the update, in the
    order of the batch; equal on all ranks. If every rank has the full batch, the result still
    has each sample only once.

    Law: the result is the same for any number of ranks.

    Cost: one gather for each dtype, and one gather of two integers. Lists are sent as bytes,
    without pickle.

    Raises:
        BatchError: the number of values differs from the number of samples.
        PlainDataError: an entry of a list has a type that is not listed above.
    """
    if not isinstance(batch, Batch):
        msg = (
            "af.all_gather_valid(values, batch, world): expected a batch from af.batches, got"
            f" {type(batch).__name__}. Without a batch, call af.all_gather(values, world)."
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
    # without a transform that splits the data, every rank has the full batch
    is_full = ranks.size == 1 or sum(row[1] for row in rows) > batch.num_samples
    if isinstance(values, list):
        valid = [values[place] for place in places.tolist()]
        data = codec.to_bytes(valid, path="values")
        parts = [data] if is_full else gather_bytes(data, ranks, label=label)
        return [entry for part in parts for entry in codec.from_bytes(part)]
    valid = tree.tree_map(lambda leaf: leaf[places.to(leaf.device)], values)
    return valid if is_full else join_rows(valid, counts, ranks, label=label)


def _check_same_rows(values: Any, rows: int) -> None:
    is_list = isinstance(values, list)
    counts = [len(values)] if is_list else [*map(_num_rows, tree.tree_leaves(values))]
    if set(counts) != {rows}:
        msg = (
            f"af.all_gather_valid: this rank's batch has {rows} samples (including filler), but"
            f" the values have lengths {counts}. Pass tensors with the samples along dim 0, or a"
            " list with one entry for each sample."
        )
        raise BatchError(msg)


# `split_over_ranks`: split a list, a tensor, or a dict of lists and tensors over the ranks.


T = TypeVar("T")


def split_over_ranks(values: T, world: World, *, pad: bool = False) -> T:
    """Return this rank's part of values that all ranks have, such as prompts, files or rows.

    Each part is a contiguous slice, in rank order. Lengths differ by at most one, and longer
    parts come first; a part may be empty. Ranks do not communicate, and the values do not change.

    Args:
        values: a list, tuple, string, bytes, range, tensor or array; or a dict of such values,
            all of the same length. The part of a tensor is a view.
        world: the ranks that split the values. If its ranks share their samples ("cp", "tp"),
            pass `world.batch`.
        pad: make all parts as long as the first. A shorter part repeats its last value, and an
            empty part repeats the last of all values. A padded part of a range is a list.

    Raises:
        ArgumentError: ranks of the world share samples, the values of a dict differ in length,
            there is no value to repeat, or the values cannot be sliced (for example, a
            namedtuple).

    Law: without `pad`, the parts of all ranks, concatenated in rank order, equal the values. In a
    world of 1, the result is the object that you passed.

    Example:
        >>> split_over_ranks(["a", "b", "c"], World.single())
        ['a', 'b', 'c']
    """
    _check_world(world)
    length = _length(values)
    if world.size == 1:
        return values
    start, stop = even_part((0, length), world.rank, world.size)
    if pad and length == 0:
        msg = "af.split_over_ranks(pad=True): values is empty, so no value can be repeated."
        raise ArgumentError(msg)
    # the lengths of parts differ by at most one
    is_short = pad and (stop - start) * world.size < length
    last = max(stop, 1) - 1

    def take(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {name: take(inner) for name, inner in items}
        part, again = value[start:stop], value[last : last + 1]
        if pad and isinstance(value, range):  # a range cannot repeat its last value
            return [*part, *again] if is_short else [*part]
        if not is_short:
            return part
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return value[[*range(start, stop), last]]
        can_add = type(part) in (str, bytes, bytearray, tuple)
        return part + again if can_add else [*part, *again]

    return take(values)


def _check_world(world: World) -> None:
    """Raise if `world` is not a `World`, or if its ranks share samples."""
    check_world("af.split_over_ranks", world)
    if world.whole is world and world.batch is not world:
        sharers = [n for n in ("cp", "tp") if world.axes.get(n, 1) > 1]
        msg = (
            f"af.split_over_ranks: ranks along {' and '.join(sharers)} process the same samples,"
            " but would get different parts of the values. Pass world.batch instead of the world."
            f" To split over one axis on purpose, pass world.along({sharers[0]!r})."
        )
        raise ArgumentError(msg)


def _length(values: Any) -> int:
    """Return the number of values to split; raise if they cannot be split."""
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        lengths = {name: _length(value) for name, value in items}
        if len(set(lengths.values())) > 1:
            msg = f"af.split_over_ranks: the values of this dict differ in length: {lengths}."
            raise ArgumentError(msg)
        return next(iter(lengths.values()), 0)
    can_slice = False
    if isinstance(values, (Sequence, torch.Tensor, np.ndarray)):
        with suppress(TypeError, IndexError):  # a deque, or a tensor without dims
            cast("Any", values)[0:0]
            can_slice = not hasattr(values, "_fields")
    if not can_slice:
        msg = (
            "af.split_over_ranks: expected a sequence that can be sliced, a tensor with a dim 0, or"
            f" a dict of such values, got {type(values).__name__}."
        )
        raise ArgumentError(msg)
    return len(cast("Sequence[Any]", values))
