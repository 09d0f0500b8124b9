# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`: use each held-out sample exactly once, on any number of ranks."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from accelfn.collectives import (
    all_gather,
    broadcast_,
    check_rows,
    gather_bytes,
    join_rows,
)
from accelfn.collectives.failures import check_world
from accelfn.data import Batch, Data, Plan
from accelfn.data.consistency import LeftOut, check_same_data
from accelfn.data.plan import even_part
from accelfn.data.reading import Reading
from accelfn.definition.transform import check_copied
from accelfn.engine.binding import lend_module
from accelfn.engine.engine import engine_of
from accelfn.engine.loss import Samples
from accelfn.errors import ArgumentError, BatchError, LossError, StateError
from accelfn.state.metrics import (
    Loss,
    Metrics,
    Number,
    WeightedSum,
    check_whole,
    is_scalar,
    mean,
)
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_transforms
from accelfn.state.views import eval_params
from accelfn.step.value_and_grad import takes_weight, wrap_loss
from accelfn.world import World

EvaluateFunction: TypeAlias = Callable[..., Any]
_NO_GRADIENTS = (
    "af.evaluate and af.predict call their function without gradients: leave out backward(),"
    " or compute what needs a gradient, of the inputs say, in `with torch.enable_grad():`."
)


@explain_call_errors
def evaluate(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> dict[str, float]:
    """Return exact means of what `fn` measures over a dataset, on all ranks.

    The samples are split over the ranks of the state's world whatever the setup says,
    each is seen once, and totals and weights are reduced in one collective at the end.

    Args:
        state: evaluated at its `eval_params`; not changed in any way.
        data: its order is that of the dataset; `shuffle` and `remainder` are ignored,
            for they have no effect on a mean over all samples.
        fn: `(model, batch, *extras)` gives a scalar mean over the batch, a dict of such means
            by name, or `af.Loss(total, weight, name=total)`. It runs in evaluation mode,
            without gradients, under the setup's precision. A lone mean has the function's
            name, `accuracy` say; "loss" if that ends in loss or loss_fn, and "value" if it
            has none.
        extras: handed to `fn`.

    Law:
        The result is that of one process, up to rounding, for any number of ranks and any
        batch size. The state is bitwise as before, and so is every generator.

    Cost:
        One pass; one all-reduce, a broadcast of rank 0's buffers, and an all-gather of 8
        bytes by which ranks find out whether their data differ.

    Raises:
        ReplicaMismatchError: the ranks hold other samples, or the same in another order.
        StateError: `fn` wrote into the parameters.
        LossError: `fn` returned something else, or no scalar. An integer tensor, which is a
            count and no mean, is warned of; so is a mean of a batch out of which the data's
            `collate` has left samples.
    """
    check_state("af.evaluate(state, data, fn)", state)
    _check_function(fn, extras)
    total = Metrics({})
    lent = _Lent(state)
    measure = wrap_loss(fn, state.setup)
    left_out = None if getattr(data, "collate", None) is None else LeftOut()
    for batch in _held_out(state, data):
        returned = lent.run(measure, batch, extras, weighed=takes_weight(fn))
        if left_out is not None and not isinstance(returned, Loss):
            left_out.look(batch.value, batch.weights[0], "What is measured")
        total = total + _as_sums(returned, batch.weights[0] or 0, fn)
    return mean(total, state.world)


@explain_call_errors
def predict(
    state: TrainState, data: Data, fn: EvaluateFunction, *extras: Any
) -> Iterator[Any]:
    """Yield `fn`'s result for every sample, in dataset order, on all ranks.

    Args:
        state: predicted at its `eval_params`; not changed in any way.
        data: its order is that of the dataset.
        fn: `(model, batch, *extras)` gives a tree of tensors whose dim 0 is the batch.
        extras: handed to `fn`.

    Yields:
        One tree a sample, its tensors without dim 0; `torch.stack(list(...))` for tensors.

    Law:
        As many results as samples, each the one of its sample, for any number of ranks.

    Cost:
        One gather a batch and dtype, and one of 8 bytes for the data. Results are streamed:
        one batch is held at a time.

    Raises:
        ReplicaMismatchError: the ranks hold other samples, or the same in another order.
        BatchError: dim 0 of a result is not the batch's.
        StateError: `fn` wrote into the parameters.
    """
    check_state("af.predict(state, data, fn)", state)
    _check_function(fn, extras)
    if isinstance(data, Data) and data.sharded:
        msg = (
            "af.predict: samples of data with sharded=True have no common order; predict on"
            " data that all ranks can read."
        )
        raise StateError(msg)
    batch_ranks, lent = state.world.batch, _Lent(state)
    call = wrap_loss(fn, state.setup)
    for batch in _held_out(state, data):
        returned = lent.run(call, batch, extras, weighed=takes_weight(fn))
        shares = [
            even_part((0, batch.num_samples), rank, batch_ranks.size)
            for rank in range(batch_ranks.size)
        ]
        counts = [stop - start for start, stop in shares]
        _check_rows(returned, max(batch.weights[0] or 0, 1), fn)
        gathered = join_rows(returned, counts, batch_ranks, label="predict")
        for i in range(batch.num_samples):
            yield tree.tree_map(lambda leaf, i=i: leaf[i], gathered)


class _Lent:
    """A module at the evaluation parameters, in evaluation mode, with buffers of its own."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        key = draws.key(state.seed, state.name, "evaluate", state.world.loss.rank)
        self._key, self._calls = key, 0
        with own_modes(state.world.device):  # the buffers may be written to
            buffers = tree.clone(dict(state.buffers))
            if buffers:  # statistics differ by rank; rank 0's count
                found = list(buffers.values())
                broadcast_(found, state.world, label="buffers of rank 0")
            params = eval_params(state)
            self.call = self._lent(params, buffers)
        self._params = {name: local(each) for name, each in params.items()}

    def _lent(
        self, params: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls functions of the model; of one that is split, by the engine."""
        definition = self._state.definition
        if definition.layout is not None:
            return engine_of(self._state).lend(params, buffers)
        return lend_module(definition, params, buffers)

    def run(self, fn: Any, batch: Batch, extras: Any, *, weighed: bool) -> Any:
        """Return what a function gives of a batch, quietly."""
        known, world = batch.weights[0], self._state.world
        flags = False, False, True, True, weighed
        samples = Samples(batch.value, extras, known, *flags, batch)
        if samples.is_weighed:
            samples = samples.with_weight(world.device)
        activity = world.connection.activity
        outer, activity.samples = activity.samples, samples
        try:
            with self._quietly():
                return self.call(fn, samples.value, *samples.extras)
        finally:
            activity.samples = outer

    @contextmanager
    def _quietly(self) -> Generator[None]:
        """Let nothing be differentiated, and draws be a function of the state, inside.

        The caller's modes stay outside: his autocast, and inference mode.
        """
        self._state.lease.check()
        seed = draws.fold(self._key, self._calls)
        self._calls += 1
        device = self._state.world.device
        before = self._versions()
        with own_modes(device), torch.no_grad(), draws.seeded(seed, device):
            try:
                yield
            except RuntimeError as error:
                if "does not require grad" in str(error):  # of torch's backward pass
                    error.add_note(_NO_GRADIENTS)
                raise
        self._check_unwritten(before)

    def _versions(self) -> list[int]:
        return [each._version for each in self._params.values()]

    def _check_unwritten(self, before: list[int]) -> None:
        """Refuse a function that wrote into parameters, which are the state's own.

        Raises:
            StateError: it did.
        """
        after = self._versions()
        if after != before:
            at = [old == new for old, new in zip(before, after, strict=True)].index(
                False
            )
            msg = (
                f"The function that is evaluated wrote into {[*self._params][at]!r}, which"
                " belongs to the state: what was there is gone, so load a checkpoint. Let it"
                " change a model of its own: model = af.frozen(state)."
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
        loader = isinstance(data, torch.utils.data.DataLoader)
        hint = " af.Data.from_loader(loader) makes one." if loader else ""
        msg = (
            "Expected af.Data(dataset, batch_size=...) to evaluate on, got"
            f" {type(data).__name__}.{hint}"
        )
        raise StateError(msg)
    world = state.world
    ranks = world.batch
    plan = Plan(world_rank=ranks.rank, world_size=ranks.size).sharded()
    reading = Reading(plan=plan, epochs=1, seed=state.seed, world=world)
    held = data.in_order()
    check_same_data(held, data.looks, world)
    batches = held.read(reading)
    while True:
        with own_modes(world.device):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _as_sums(returned: Any, weight: int, fn: EvaluateFunction) -> Metrics:
    """Return what `fn` returned as weighted sums; of an empty share, nothing over 0.

    There it saw a stand-in, of which even an infinity must not count.
    """
    measured = _sums(returned, weight, fn)
    return measured if weight else Metrics(dict.fromkeys(measured, (0.0, 0.0)))


def _sums(returned: Any, weight: int, fn: EvaluateFunction) -> Metrics:
    if isinstance(returned, Loss):
        if not is_scalar(returned.total):
            msg = f"{_shape_hint(fn, returned.total)} as a total; expected one real number."
            raise LossError(msg)
        sums: dict[str, tuple[Number, Number]] = {}
        sums["loss"] = (returned.total, returned.weight)
        for entry in (sums["loss"], *returned.aux.values()):
            check_whole(entry, _metric_name(fn))
        for name, entry in returned.aux.items():
            sums[name] = entry if isinstance(entry, tuple) else (entry, returned.weight)
        return Metrics(sums)
    means = cast(
        "Mapping[str, Any]",
        returned if isinstance(returned, Mapping) else {_measure_of(fn): returned},
    )
    for name, value in means.items():
        check_whole(value, _metric_name(fn))
        scalar = (
            value.ndim == 0 and not value.is_complex()
            if isinstance(value, torch.Tensor)
            else isinstance(value, (int, float))
        )
        if not scalar:
            msg = (
                f"{_shape_hint(fn, value)} for {name!r}; expected a scalar mean over the batch,"
                " a dict of them, or af.Loss."
            )
            raise LossError(msg)
        if weight > 1 and _is_count(value):
            advise(
                f"{_metric_name(fn)} returned an integer tensor for"
                f" {name!r}, a count or a sum, of which evaluate takes the mean as if it"
                " were one over each batch. Return that mean,"
                " (found == targets).float().mean() say, or totals with their weight:"
                f" af.Loss(total, len(targets), {name}=count)."
            )
    return Metrics(
        {name: WeightedSum(value * weight, weight) for name, value in means.items()}
    )


def _is_count(value: Any) -> bool:
    """Whether a scalar is an integer tensor, which no mean of several is."""
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return whole and not value.is_complex() and value.dtype is not torch.bool


def _measure_of(fn: EvaluateFunction) -> str:
    """Return what a lone mean is called: as the function, and a loss as a step calls it."""
    inner: Any = fn
    while isinstance(inner, partial):
        inner = cast("partial[Any]", inner).func
    name = str(getattr(inner, "__name__", type(inner).__name__))
    stem = name.lower().removesuffix("_fn").removesuffix("_function")
    if stem.endswith("loss"):
        return "loss"
    return "value" if name == "<lambda>" else name


def _check_rows(returned: Any, rows: int, fn: EvaluateFunction) -> None:
    for leaf in tree.tree_leaves(returned):
        check_whole(leaf, _metric_name(fn))
        if (
            not isinstance(leaf, torch.Tensor)
            or leaf.ndim == 0
            or leaf.shape[0] != rows
        ):
            msg = (
                f"{_shape_hint(fn, leaf)}; expected tensors whose dim 0 is the batch's"
                f" {rows} samples."
            )
            raise BatchError(msg)


def _shape_hint(fn: EvaluateFunction, returned: Any) -> str:
    """Return what to say of a function that returned something of another shape."""
    tensor = isinstance(returned, torch.Tensor)
    shown = tuple(returned.shape) if tensor else type(returned).__name__
    if tensor and returned.is_complex():
        shown = f"complex numbers of shape {shown}"
    return f"{_metric_name(fn)} returned {shown}"


def _metric_name(fn: EvaluateFunction) -> str:
    return getattr(fn, "__qualname__", repr(fn))


# `observe`: what an evaluation gave, told to the transforms that go by it.


def observe(state: TrainState, value: float | torch.Tensor) -> TrainState:
    """Return the state whose transforms know what an evaluation gave: `(state, value) -> state`.

    Its slots alone are other than the given state's, whose tensors it shares. To be called
    by all ranks, as `af.evaluate` is, whose numbers are the same on all of them.

    Args:
        state: with transforms in its setup that observe, as `af.plateau` does.
        value: a number, such as `af.evaluate(state, held_out, loss_fn)["loss"]`.

    Law: two states that observed the same are equal; nothing but slots is changed.

    Cost: over ranks that train together, a small all-reduce, by which they compare values.

    Raises:
        ArgumentError: it is no number.
        StateError: no transform observes.
        ReplicaMismatchError: ranks that train together observed other values than one
            another, a loss of their own batches say.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> import accelfn as af
        >>> state = af.TrainState.create(
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     optimizer=partial(torch.optim.SGD, lr=0.5),
        ...     setup=af.plateau(patience=0),
        ... )
        >>> state = af.observe(af.observe(state, 0.25), 0.25)  # no better than before
        >>> state.lrs
        (0.05,)
    """
    check_state("af.observe(state, value)", state)
    state.lease.check()
    setup, world = state.definition.setup, state.definition.world
    if not setup.owners["observe"]:
        msg = (
            "af.observe(state, value): no transform of the setup goes by what is observed."
            " Put one into it, such as af.plateau(patience=2)."
        )
        raise StateError(msg)
    number = _number(value)
    if setup.owners["engine"] or setup.owners["reduce"]:
        check_rows(
            {"observed value": repr(number)},
            world,
            label="compare observed values",
            advice="Observe what is the same on all ranks, as what af.evaluate and af.mean give.",
        )
    before = Update(state=state, slots=state.slots)
    _, after = apply_transforms("observe", number, before, (int, float))
    for owner in setup.owners["observe"]:
        check_copied(owner, after.slots.get(owner.name), state)
    return attrs.evolve(state, slots=dict(after.slots))


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        return float(value)
    hint = ""
    if hasattr(value, "keys"):
        hint = ' Choose one by its name: af.evaluate(...)["loss"].'
    msg = f"af.observe(state, {value!r}): expected a number.{hint}"
    raise ArgumentError(msg)


# `gather_valid`: what ranks computed of an update's samples, each sample once.


def gather_valid(
    values: Any, batch: Batch, world: World, *, label: str = "gather_valid"
) -> Any:
    """Return the values of all ranks' samples, without filler, in the order of the batch.

    Args:
        values: of this rank's samples: a tree of tensors whose dim 0 is the samples (those of
            all its micro-batches, one after the other), or a list with one entry a sample:
            tensors of any shapes, strings, numbers, and dicts, lists and tuples of those.
        batch: from `af.batches`, in which those samples were.
        world: whose ranks took part.
        label: what the ranks are doing, for errors.

    Returns: a tree of tensors, or a list, with an entry for each sample of the update, the
    same on all ranks. Ranks that all took the whole batch give it once.

    Law: on any number of ranks, what one process has.

    Cost: a gather a dtype; lists travel as bytes, with no pickle. And one gather of two integers.

    Raises:
        BatchError: there are not as many values as samples.
        PlainDataError: a list has something else in it.
    """
    if not isinstance(batch, Batch):
        msg = (
            f"af.gather_valid(values, batch, world): got {type(batch).__name__}; expected a"
            " batch of af.batches. af.gather(values, world) takes any values."
        )
        raise BatchError(msg)
    check_world("af.gather_valid", world)
    ranks = world.batch
    kept = (~batch.filler).nonzero().reshape(-1)
    rows = len(batch.filler)
    _check_same_rows(values, rows)
    held = sum(weight or 0 for weight in batch.weights)
    mine = torch.tensor([len(kept), held], device=ranks.device)
    told = [each.tolist() for each in all_gather(mine, ranks, label=label)]
    counts = [int(row[0]) for row in told]
    # where nothing shards the data, every rank holds the whole batch
    alone = ranks.size == 1 or sum(row[1] for row in told) > batch.num_samples
    if isinstance(values, list):
        valid = [values[place] for place in kept.tolist()]
        data = codec.to_bytes(valid, path="values")
        parts = [data] if alone else gather_bytes(data, ranks, label=label)
        return [each for part in parts for each in codec.from_bytes(part)]
    valid = tree.tree_map(lambda leaf: leaf[kept.to(leaf.device)], values)
    return valid if alone else join_rows(valid, counts, ranks, label=label)


def _check_same_rows(values: Any, rows: int) -> None:
    if isinstance(values, list):
        found = [len(values)]
    else:
        leaves = tree.tree_leaves(values)
        found = [
            leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None
            for leaf in leaves
        ]
    if not found or any(count != rows for count in found):
        msg = (
            f"af.gather_valid: this rank's batch has {rows} samples (filler included), and"
            f" the values have {found}; expected tensors whose dim 0 is the samples, or a list"
            " with an entry for each."
        )
        raise BatchError(msg)


# `split`: each rank's part of a list, a tensor, or a dict of them.


T = TypeVar("T")


def split(values: T, world: World, *, pad: bool = False) -> T:
    """Return this rank's part of values that all ranks hold: prompts, files, rows.

    Parts are contiguous, in rank order, and their lengths differ by at most one, longer
    ones first; a part may be empty. Nothing is communicated and nothing given is changed.

    Args:
        values: a list, tuple, string, bytes, range, tensor or array, or a dict of such of one
            length. A tensor's part is a view.
        world: says which rank this is; of a world with ranks that share their samples ("cp",
            "tp"), `world.batch`.
        pad: make all parts as long as the first, by repeating a part's last value, or the
            last of all where a part is empty. Those of a range are lists then.

    Raises:
        ArgumentError: ranks of the world share samples, a dict's values differ in length, there
            is nothing to repeat, or something is no sequence that can be sliced; a namedtuple
            is a record.

    Law: without `pad`, the parts of all ranks in rank order are the values; in a world of 1
    they are the very object.

    Example:
        >>> split(["a", "b", "c"], World.single())
        ['a', 'b', 'c']
    """
    _check_world(world)
    length = _length(values)
    if world.size == 1:
        return values
    start, stop = even_part((0, length), world.rank, world.size)
    longest = -(-length // world.size)
    if pad and length == 0:
        msg = "af.split(pad=True): there is nothing to repeat in empty values."
        raise ArgumentError(msg)
    places = list(range(start, stop))
    if pad:
        places += [max(stop, 1) - 1] * (longest - len(places))

    def part(each: Any) -> Any:
        if isinstance(each, Mapping):
            items = cast("Mapping[Any, Any]", each).items()
            return {name: part(inner) for name, inner in items}
        if pad and isinstance(each, range):  # a range cannot repeat its last value
            return [each[place] for place in places]
        if len(places) == stop - start:
            return each[start:stop]
        if isinstance(each, (torch.Tensor, np.ndarray)):
            return each[places]
        return _like(each[start:stop], [each[place] for place in places])

    return part(values)


def _check_world(world: object) -> None:
    """Refuse what is no world, and one of which not every rank has samples of its own."""
    if not isinstance(world, World):
        msg = f"af.split: expected an af.World, got {world!r}."
        raise ArgumentError(msg)
    if world.whole is world and world.batch is not world:
        sharers = [n for n in ("cp", "tp") if world.axes.get(n, 1) > 1]
        msg = (
            f"af.split: the ranks along {' and '.join(sharers)} share their samples, so they"
            " would be given parts of one another's. Give world.batch; or the axes that are"
            f" meant, such as world.along({sharers[0]!r})."
        )
        raise ArgumentError(msg)


def _like(part: Any, picked: list[Any]) -> Any:
    """Return the values that were picked as what a part of theirs is."""
    if isinstance(part, str):
        return "".join(picked)
    kind = {bytes: bytes, bytearray: bytearray, tuple: tuple}.get(type(part), list)
    return kind(picked)


def _length(values: Any) -> int:
    """Return how many values there are to split."""
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        lengths = {name: _length(each) for name, each in items}
        if len(set(lengths.values())) > 1:
            msg = f"af.split: the values of this dict differ in length: {lengths}."
            raise ArgumentError(msg)
        return next(iter(lengths.values()), 0)
    shaped = isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim > 0
    if not shaped and not _is_cut(values):
        msg = (
            f"af.split: expected a sequence that can be sliced, a tensor with a dim 0, or a"
            f" dict of them, got {type(values).__name__}."
        )
        raise ArgumentError(msg)
    return len(cast("Sequence[Any]", values))


def _is_cut(values: Any) -> bool:
    """Whether it is a sequence with parts: a deque has none, and a record's fields are none."""
    if not isinstance(values, Sequence) or hasattr(values, "_fields"):
        return False
    with suppress(TypeError):
        cast("Sequence[Any]", values)[0:0]
        return True
    return False
