# SPDX-License-Identifier: Apache-2.0
"""Find likely mistakes in an engine's first updates. No step in the steady loop runs this code.

A `Doctor` examines the first passes and updates, and warns. Functions named `reject_` explain
why a step failed.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import is_
from typing import Any, NoReturn, cast
from weakref import ref

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base import tree
from accelfn.base.arguments import advise, list_names, read_hints
from accelfn.base.devices import on_host
from accelfn.base.tree import cut_axes, is_shard, local
from accelfn.collectives.packed import all_gather_list, all_reduce_
from accelfn.collectives.replicas import check_replicas, checksum
from accelfn.data import Batch
from accelfn.data.consistency import (
    LeftOut,
    check_definition_rows,
    check_same_data,
    have_same_data,
    order_rows,
    reader_rows,
)
from accelfn.engine.runner import ReadLoss, Samples
from accelfn.errors import BatchError, Error, LossError, UnusedParametersError
from accelfn.model.optimizer import kind_of
from accelfn.schedules.factors import Rates
from accelfn.state.state import TrainState
from accelfn.state.views import was_lent

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FAR = 1e-2
"""The relative tolerance when gradients are compared, because the order of sums differs."""
_ASKED = 0, 1, 10, 100, 1000
"""Updates at which the factors of schedules are compared: functions cannot be compared."""
_IGNORED = -100
"""The label that Transformers leaves out of a loss."""
_MEAN, _SUM = 1, 2
"""torch's numbers of `reduction="mean"` and `reduction="sum"`, in `ATen/core/Reduction.h`."""
_MANY = 4
"""A list of at most this length may be a batch of features: inputs, targets, weights."""
_PASSES = 4
"""The number of passes to examine: three equal changes mean a count or a decay."""


class Doctor:
    """Examines the first passes and updates of a new engine, and warns about likely mistakes.

    The engine drops the doctor when there is nothing more to examine. If the data have a
    `collate` function, the doctor stays, because any batch may lack samples.
    """

    def __init__(
        self, state: TrainState, module: nn.Module, optimizers: Iterable[Optimizer]
    ) -> None:
        """Initialize with the first state, the engine's module and its torch optimizers."""
        data = state.data
        named = (("", optimizer) for optimizer in optimizers)
        self._modules = Counters(module.named_modules(), "counting-modules")
        self._optimizers = Counters(named, "counting-optimizers")
        self._left_out = None if data is None or data.collate is None else LeftOut()
        self._last_value: list[Any] | None = None if data is None else []
        ranks = state.world.along("tp")
        self._layer_ranks = None if ranks.size == 1 else ranks
        kinds = {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
        self._has_own_loss = "PreTrainedModel" in kinds
        self._num_passes = 0

    def examine_loss(self, state: TrainState, samples: Samples, read: ReadLoss) -> None:
        """Examine a loss and its samples, before the backward pass."""
        self._num_passes += 1
        if self._num_passes == 1:
            dtypes = {state.params[name].dtype for name in state.trainable}
            if state.world.is_main and torch.float16 in dtypes:
                advise(_advice_of("float16"))
            # a filler's loss does not count, and tensors on meta have no values
            if samples.known != 0 and not read.scalar.is_meta:
                _advise_reduction(samples, read)
        if self._last_value is not None:
            self._examine_value(state, samples)
        if read.is_mean:
            _advise_row_count(samples)
        if read.is_mean and not samples.lone:
            if self._left_out is not None:
                self._left_out.look(samples.value, samples.known, "The loss")
            if self._has_own_loss and self._num_passes <= _PASSES:
                _advise_token_weights(samples.value)
        if self._modules is not None and not self._modules.look():
            self._modules = None

    def examine_gradients(
        self, trainable: Iterable[str], gradients: Mapping[str, torch.Tensor]
    ) -> None:
        """Compare the first gradients of unsplit parameters between the ranks along "tp".

        Cost: one sum of these gradients over the ranks, once per engine.

        Raises:
            LossError: ranks have different gradients, because each rank used only its own
            features or positions.
        """
        ranks = self._layer_ranks
        if ranks is None:
            return
        own_grads = {
            name: local(gradients[name]).detach().double()
            for name in trainable
            if name in gradients and "tp" not in cut_axes(gradients[name])
        }
        totals = {name: grad.clone() for name, grad in own_grads.items()}
        lengths = {name: grad.norm() for name, grad in own_grads.items()}
        sums = [*totals.values(), *lengths.values()]
        all_reduce_(sums, ranks, label="compare gradients")
        for name, total in totals.items():
            far = (total - ranks.size * own_grads[name]).norm()
            if float(on_host(far)) > _FAR * float(on_host(lengths[name])):
                raise LossError(_GRADIENTS_DIFFER.format(name, name.rpartition(".")[0]))
        self._layer_ranks = None

    def examine_update(self) -> bool:
        """Examine the optimizer after an update; return whether there is more to examine."""
        if self._optimizers is not None and not self._optimizers.look():
            self._optimizers = None
        checks = self._modules, self._optimizers, self._left_out, self._last_value
        is_waiting = self._has_own_loss and self._num_passes < _PASSES
        return is_waiting or any(check is not None for check in checks)

    def _examine_value(self, state: TrainState, samples: Samples) -> None:
        """Warn at the second update with values that are not from `af.batches`.

        Then the position in the state's data does not advance. Two cases do not warn: some
        batches came from `af.batches` (a replay of samples), or all values are the same
        (overfitting).
        """
        before, cursor = self._last_value, state.cursor
        if samples.batch is not None or cursor.epoch or cursor.samples:
            self._last_value = None
        elif samples.into is None:
            self._last_value = leaves = tree.tensor_leaves(samples.value)
            if state.num_tried and before and not all(map(is_, before, leaves)):
                self._last_value = None
                if state.world.is_main:
                    advise(_advice_of("values"))


def _advice_of(key: str) -> str:
    """Return the text of a warning in `hints.toml`."""
    return read_hints()["first updates"][key]


def _advise_row_count(samples: Samples) -> None:
    """Warn about a list of samples that accelfn counts as a list of features."""
    value: Any = samples.value
    if samples.known is not None or not isinstance(value, list):
        return
    length = len(cast("list[Any]", value))
    sizes = {leaf.size(0) for leaf in tree.tensor_leaves(value) if leaf.ndim}
    # rows of different sizes are not counted
    if len(sizes) == 1 and length > max(rows := sizes.pop(), _MANY):
        advise(
            f"This batch is a list of {length} tensors with {rows} rows each, so accelfn counts"
            f" {rows} samples. If the list has one entry per sample, stack it:"
            " torch.stack(samples). Or return af.Loss(total, weight) from the loss function."
        )


def _advise_reduction(samples: Samples, read: ReadLoss) -> None:
    """Warn about a loss function of torch whose `reduction` does not fit the returned value."""
    node: Any = read.scalar.grad_fn
    reduction = getattr(node, "_saved_reduction", None)
    if not read.is_mean:
        if reduction == _MEAN and read.weight not in (0, 1):
            advise(_advice_of("mean-total"))
    elif reduction == _SUM:
        advise(_advice_of("sum"))
    elif reduction == _MEAN and not samples.lone and _ignores_unevenly(node, samples):
        advise(_advice_of("ignored"))


def _ignores_unevenly(node: Any, samples: Samples) -> bool:
    """Return whether a cross entropy ignored more targets of some samples than of others.

    Args:
        node: the node of the loss in the graph.
        samples: the batch, whose samples are assumed to be the first dim of the targets.
    """
    num_samples = samples.count() if samples.known is None else samples.known
    target = getattr(node, "_saved_target", None)
    if target is None or not hasattr(node, "_saved_ignore_index"):
        return False
    if not num_samples or target.numel() % num_samples:
        return False
    index = node._saved_ignore_index
    if index >= 2**63:  # the node has a negative index as an unsigned number
        index -= 2**64
    is_kept = target.reshape(num_samples, -1) != index
    num_kept = is_kept.sum(1)
    return bool((num_kept != num_kept[0]).any())


def _advise_token_weights(batch: Any) -> None:
    """Warn if some labels are ignored, and a Transformers model itself computes the mean."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and bool((labels == _IGNORED).any()):
        advise(_advice_of("transformers-loss"))


# Checks at the first call of a loss function: a loaded state that was dropped, and batches that
# are not split.
#
# Replicas that all train on the same samples stay equal. So only a comparison of their batches
# shows that each rank does all the work.


def examine_call(state: TrainState, batch: Any) -> None:
    """Examine the first call of a loss function, after ranks have compared their definitions.

    Cost: an all-gather of 8 bytes at the first batch of a definition. It runs only if the setup
    has `shard_data`, the state has no data, and the batch is not from `af.batches`.
    """
    definition = state.definition
    is_main, cache = definition.world.is_main, definition.cache
    if cache.loaded is not None and is_main:
        template_ref, result_ref = cache.loaded
        if template_ref() is state.lease and result_ref() is None:
            advise(
                "af.load and CheckpointStore.restore return the loaded state, but your script"
                " did not keep the last result. This step got the state that was passed to"
                f" that call, at update {state.step}. Write state = af.load(state, directory),"
                " or ignore this warning if you want to use the old state."
            )
    if definition.world.batch.size == 1 or cache.saw_a_batch:
        return
    cache.saw_a_batch = True
    advice = _advise_of_batch(state, batch)
    if advice is not None and is_main:
        advise(advice)


def _advise_of_batch(state: TrainState, batch: Any) -> str | None:
    """Return a warning if each rank does the work of all ranks, or None."""
    definition, size = state.definition, state.world.batch.size
    is_sharded = definition.plan.num_shares > 1
    if not isinstance(batch, Batch):
        # if the state has data, the doctor warns about values
        is_asked = is_sharded and state.data is None
        is_alike = is_asked and _is_alike(batch, state)
        return _advice_of("same").format(size) if is_alike else None
    has_all = sum(weight or 0 for weight in batch.weights) == batch.num_samples > 1
    # each rank has its own stream
    is_own = state.data is not None and state.data.sharded
    if batch.start is None or not has_all or is_own:
        return None
    if is_sharded:
        return _advice_of("uncut").format(batch.num_samples, size)
    is_same = definition.cache.has_same_data
    return _advice_of("unsharded").format(size) if is_same else None


def _is_alike(value: Any, state: TrainState) -> bool:
    """Return whether the value's tensors are equal on all ranks."""
    batch = state.world.batch
    dense = [t for t in tree.tensor_leaves(value) if t.layout is torch.strided]
    sums = [checksum(t) for t in dense if not t.is_nested and t.numel() > 1]
    # without tensors to compare, use the rank's number, so that ranks differ
    own_sum = checksum(torch.stack(sums)) if sums else torch.tensor(batch.rank)
    all_sums = all_gather_list(own_sum.to(batch.device), batch, label="first batch")
    return len({int(value) for value in all_sums}) == 1


# Check that ranks that train one model have equal definitions and parameters.


def is_one_training(state: TrainState) -> bool:
    """Return whether the setup reduces gradients over ranks, or splits the model."""
    owners = state.setup.owners
    reduces = owners["engine"] or owners["reduce"]
    return bool(reduces) or state.definition.layout is not None


def compare_ranks(state: TrainState) -> None:
    """Raise unless ranks have equal definitions and parameters; checks once per definition.

    Ranks that train independently may hold different parameters after the first update.

    Cost: some small all-reduces (see `check_definitions` and `check_replicas`), once.

    Raises:
        ReplicaMismatchError: definitions or parameters differ between ranks.
    """
    definition, setup, world = state.definition, state.setup, state.world
    cache = definition.cache
    if world.size == 1 or (cache.is_compared and not cache.is_to_compare):
        return
    check_definitions(state)
    is_apart = "apart" in setup.facts or not is_one_training(state)
    values = not is_apart or state.step == 0
    full_params = {n: p for n, p in state.params.items() if not is_shard(p)}
    has_copies = world.axes.get("dp_replicate", 1) > 1
    check_replicas(
        state.params if has_copies else full_params,
        world,
        label="compare replicas",
        values=values,
        trainable=set(definition.skeleton.trainable),
    )
    if not values and definition.trains_apart:
        copy = definition.copy  # ranks of one copy are always equal
        check_replicas(full_params, copy, label="compare replicas", values=True)
    cache.is_compared = True


def check_definitions(state: TrainState) -> None:
    """Raise unless setup, optimizer, schedule, seed and data are equal on all ranks.

    Data must be equal if ranks share them (`shard_data`). Otherwise each rank may have its own
    data.

    Cost: a small all-reduce, once per state, and another all-reduce for data (`check_same_data`).

    Raises:
        ReplicaMismatchError: names the first difference, with one row per rank.
    """
    check_definition_rows(_rows(state), state.world)
    data, definition = state.data, state.definition
    if data is None:
        return
    if definition.plan.num_shares > 1:
        check_same_data(data, data.looks, state.world)
    else:
        same = have_same_data(data, data.looks, state.world)
        definition.cache.has_same_data = same


_GRADIENTS_DIFFER = (
    "af.tensor_parallel: all ranks have the parameter {!r}, but compute different gradients:"
    ' each rank uses it for its own features (between a "column" and a "row" layer) or its own'
    " positions. If this is intended, as for a norm, let accelfn sum the gradients: add to the"
    ' plan {{{!r}: "replicated"}} for own features, or the word "sequence" for own positions.'
)


def _rows(state: TrainState) -> dict[str, str]:
    definition = state.definition
    names = {id(p): n for n, p in definition.skeleton.module.named_parameters()}
    # these rows are first, so that the error shows a difference of the data readers first
    rows = reader_rows(definition.data)
    rows |= {"seed": str(state.seed)}
    for i, transform in enumerate(definition.setup):
        text = f"{transform.name}{_plain_options(transform)}"
        if type(transform).__module__.startswith("accelfn."):
            text = repr(transform)
        rows[f"transform {i}"] = _ADDRESS.sub("", text)
    rows["optimizer"] = kind_of(definition.optimizer, names)
    for i, group in enumerate(definition.optimizer.param_groups):
        for name, value in sorted(group.items()):
            if name != "params":
                rows[f"{name} of parameter group {i}"] = str(_plain(value))
    if definition.rates is not None:
        rows["schedule"] = _sample_schedule(definition.rates, definition.schedule)
    if definition.data is not None and definition.plan.num_shares > 1:
        rows |= {f"data, {k}": str(v) for k, v in definition.data.form.items()}
        rows |= order_rows(definition.data, state.seed)
        cursor = state.cursor
        rows["cursor"] = f"epoch {cursor.epoch}, sample {cursor.samples}"
    return rows


def _plain_options(transform: Any) -> dict[str, object]:
    """Return the options of a user's transform that are numbers or text, to compare them."""
    # hides this read from a test that records used options
    read = object.__getattribute__
    names = [field.name for field in attrs.fields(type(transform)) if field.eq]
    options = {name: read(transform, name) for name in names}
    return {n: v for n, v in options.items() if isinstance(v, (int, float, str))}


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else tuple(value.shape)
    plain = isinstance(value, (int, float, str, tuple, type(None)))
    return value if plain else type(value).__name__


def _sample_schedule(rates: Rates, schedule: object) -> str:
    samples: list[object] = []
    try:
        for update in _ASKED:
            samples += [_plain(value) for value in rates(update).values()]
    # the schedule ends earlier
    except (ArithmeticError, LookupError, ValueError, Error):
        samples.append(getattr(schedule, "__qualname__", type(schedule).__name__))
    return str(samples)


# Find counters that modules and optimizers keep outside the state.


class Counters:
    """Finds counters that objects keep outside the state, in the first passes or updates.

    torch's own classes keep no such counters, and are not checked.
    """

    def __init__(self, owners: Iterable[tuple[str, object]], advice: str) -> None:
        """Initialize with pairs (name, object), and the key of the warning's text."""
        self._owners = [
            (path or type(owner).__name__, owner)
            for path, owner in owners
            if not type(owner).__module__.startswith("torch.")
        ]
        self._advice, self._seen = advice, list[dict[str, float]]()

    def look(self) -> bool:
        """Record the objects' numbers after a pass; return whether to check further passes.

        After the last checked pass, warn about numbers that count the passes.
        """
        numbers = {
            f"{path}.{name}": value
            for path, owner in self._owners
            for name, value in _numbers(vars(owner))
        }
        self._seen.append(numbers)
        if len(self._seen) < _PASSES:
            return bool(self._owners)
        counts = {
            name: values
            for name in self._seen[0]
            if _counts(values := [row.get(name) for row in self._seen])
        }
        if counts:
            advise(_advice_of(self._advice).format(_format_counts(counts)))
        return False


def _numbers(attributes: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in an object's attributes, each with its name.

    They are plain numbers, numbers in dicts, lengths of lists, and for a tensor its number of
    in-place writes. If each pass creates the tensor again, its number of writes is constant.
    """
    for name, value in attributes.items():
        if type(value) in (int, float):
            yield name, value
        elif type(value) is torch.Tensor:
            yield from _of_tensor(name, value)
        elif type(value) is list:
            yield f"{name}'s length", len(value)
        elif type(value) is dict and not name.startswith("_"):
            for key, number in cast("dict[Any, Any]", value).items():
                if type(number) in (int, float):
                    yield f"{name}[{key!r}]", number


def _of_tensor(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, float]]:
    if not tensor.is_inference():  # inference tensors have no version
        yield f"{name}'s number of writes", tensor._version
    is_number = tensor.dtype != torch.bool and not tensor.is_complex()
    if tensor.numel() == 1 and is_number and not tensor.is_meta:
        yield name, tensor.item()


def _counts(values: list[Any]) -> bool:
    """Return whether values change by a constant difference or a constant ratio."""
    if None in values or values[0] == values[1] or not all(map(math.isfinite, values)):
        return False
    pairs = list(pairwise(values))
    if all(math.isclose(b - a, values[1] - values[0]) for a, b in pairs):
        return True
    return all(values[:-1]) and all(
        math.isclose(b / a, values[1] / values[0]) for a, b in pairs
    )


def _format_counts(counts: dict[str, list[Any]]) -> str:
    # leave out a tensor's number of writes if its value is there
    writes = {f"{name}'s number of writes" for name in counts}
    rows = [(n, map(repr, row)) for n, row in counts.items() if n not in writes]
    return "; ".join(f"{name} was {', then '.join(row)}" for name, row in rows[:3])


# Find leaves of a loss's graph that do not belong to the state, such as a criterion's
# parameters.


def untracked_leaves(
    loss: torch.Tensor, param_ids: Container[int]
) -> "list[ref[torch.Tensor]]":
    """Return the leaves of a loss's graph that do not belong to the state.

    A pass must not add to their `grad`, because a step would then depend on earlier steps.

    Args:
        loss: the loss; its graph is searched.
        param_ids: the ids of the parameters of the engine's model.

    Raises:
        LossError: a leaf belongs to a model of `af.borrow_model`, and the `with` block of that
        call has ended.
    """
    leaves = [leaf for leaf in _leaves_of(loss) if id(leaf) not in param_ids]
    params = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    if any(map(was_lent, params)):
        msg = (
            "The loss uses a model of af.borrow_model, but the `with` block of that call ended"
            " before the backward pass, so the model has no parameters any more. Use a copy"
            " instead: step(state, batch, af.snapshot_model(other))."
        )
        raise LossError(msg)
    shapes = [tuple(param.shape) for param in params]
    if shapes:
        advise(_advice_of("untrained").format(shapes[:5]))
    return [ref(leaf) for leaf in leaves]


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaf tensors of a graph."""
    leaves: list[torch.Tensor] = []
    seen_nodes, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen_nodes:
            continue
        seen_nodes.add(node)
        if (end := getattr(node, "variable", None)) is not None:
            leaves.append(end)
        waiting += [after for after, _ in node.next_functions]
    return leaves


# Reject missing and unexpected gradients.


OWN_BACKWARD = (
    "The loss function must not run a backward pass, but it left gradients behind. Remove"
    " loss.backward() and return the loss: the step runs the backward pass."
)
DISCONNECTED = (
    "The loss does not depend on a trainable parameter of the model, but only on other tensors"
    " that require a gradient. Compute it with the model that the loss function gets."
)


def reject_frozen(
    params: Mapping[str, torch.Tensor], gradients: Container[str]
) -> None:
    """Raise if a loss function froze parameters, and unfreeze them.

    Args:
        params: the trained parameters, by name.
        gradients: the names of the parameters that have a gradient.

    Raises:
        LossError: parameters were frozen; the error names them.
    """
    missing = {name: p for name, p in params.items() if name not in gradients}
    frozen = [name for name, param in missing.items() if not param.requires_grad]
    for name in frozen:
        params[name].requires_grad_()
    if frozen:
        msg = (
            "The loss function set requires_grad=False on parameters that the state trains:"
            f" {list_names(frozen)}. Freeze them outside the loss function: call"
            " requires_grad_(False) in the function that makes the model, or write state ="
            " state.with_trainable(f), with f(name, param) True for each parameter to train."
        )
        raise LossError(msg)


def reject_unused(names: Iterable[str], *, are_held: bool) -> NoReturn:
    """Raise an error about unused parameters: other ranks would wait for their gradients.

    Args:
        names: the names of the unused parameters.
        are_held: whether DeepSpeed holds the gradients; it has no option to allow unused
        parameters.

    Raises:
        UnusedParametersError: always; the error names the parameters.
    """
    names = list(names)
    options = (
        "DeepSpeed has no option for this. Use af.wrap_fsdp(find_unused_parameters=True) instead"
        " of DeepSpeed, use them with factor 0, as in `loss + 0 * net.head.weight.sum()`,"
        if are_held
        else "Pass find_unused_parameters=True to af.wrap_ddp or af.wrap_fsdp,"
    )
    msg = (
        f"Parameters took no part in the loss: {list_names(names)}. Other ranks would wait for"
        f" their gradients. {options} or freeze them with requires_grad_(False)."
    )
    raise UnusedParametersError(msg)


# Explain an error if a batch is on another device than the state.


def reject_device_mismatch(
    samples: Samples, device: torch.device, error: BaseException
) -> None:
    """Raise a clear error for a failed loss, if its arguments are on another device.

    Raises:
        BatchError: some tensors are on another device.
    """
    tensors = tree.tensor_leaves((samples.value, samples.extras))
    other_devices = {str(t.device) for t in tensors if t.device.type != device.type}
    if not other_devices:
        return
    msg = (
        f"The loss function failed ({str(error).partition(chr(10))[0]}). Its arguments have"
        f" tensors on {', '.join(sorted(other_devices))}, but the state is on {device}. Use"
        " af.batches(state), or move your own batches: batch = batch.to(state.world.device)."
    )
    raise BatchError(msg) from error
