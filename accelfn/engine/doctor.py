# SPDX-License-Identifier: Apache-2.0
"""Find likely mistakes in the first updates of an engine: no steady step enters this file.

A `Doctor` looks at the first passes and updates, and gives advice. Functions named `reject_`
explain a step that failed.
"""

import math
import re
from collections.abc import Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from operator import is_
from typing import Any, NoReturn, TypeAlias, cast
from weakref import ref

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accelfn.base import devices, draws, tree
from accelfn.base.arguments import advise
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
from accelfn.data.plan import form_of
from accelfn.engine.runner import ReadLoss, Samples
from accelfn.errors import BatchError, Error, LossError, UnusedParametersError
from accelfn.model.optimizer import kind_of
from accelfn.schedules.factors import Rates
from accelfn.state.state import TrainState
from accelfn.state.views import was_lent

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FAR = 1e-2
"""The relative tolerance of gradients, for the order of sums."""
_ASKED = 0, 1, 10, 100, 1000
"""Updates at which schedules are compared by their values: functions cannot be compared."""
_IGNORED = -100
"""The label that Transformers leaves out of a loss."""
_MANY = 4
"""A usual number of features in a batch: inputs, targets, a mask, weights."""
_PASSES = 4
"""The number of passes to look at: three equal changes mean a count or a decay.

Values that depend on the batch, such as a sequence length, change irregularly.
"""


class Doctor:
    """Looks at the passes and updates of a new engine, and gives advice.

    The engine drops the doctor when there is nothing left to see. Data with a `collate`
    function keep it, because any of their batches may lack samples.
    """

    def __init__(
        self, state: TrainState, module: nn.Module, optimizers: Iterable[Optimizer]
    ) -> None:
        """Take the first state, the engine's module, and the parts of its optimizer."""
        data = state.data
        self._modules = Counters.of(module.named_modules(), _OF_MODULES)
        named = (("", optimizer) for optimizer in optimizers)
        self._optimizers = Counters.of(named, _OF_OPTIMIZERS)
        self._left_out = None if data is None or data.collate is None else LeftOut()
        self._last_value: list[Any] | None = None if data is None else []
        ranks = state.world.along("tp")
        self._layer_ranks = None if ranks.size == 1 else ranks
        kinds = {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
        self._has_own_loss = "PreTrainedModel" in kinds
        self._num_passes = 0

    def examine_loss(self, state: TrainState, samples: Samples, read: ReadLoss) -> None:
        """Look at a loss and its samples, before the backward pass."""
        self._num_passes += 1
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
        """Compare the first gradients of unsplit parameters over the ranks along "tp".

        Cost: one sum of these gradients over the ranks, once per engine.

        Raises:
            LossError: a gradient was computed from a rank's own features only.
        """
        ranks = self._layer_ranks
        if ranks is None:
            return
        own_grads = {
            name: local(gradients[name]).detach().double()
            for name in trainable
            if name in gradients and "tp" not in cut_axes(gradients[name])
        }
        totals = [grad.clone() for grad in own_grads.values()]
        lengths = torch.zeros(len(totals), dtype=torch.float64, device=ranks.device)
        for i, total in enumerate(totals):
            lengths[i] = total.norm()
        all_reduce_([*totals, lengths], ranks, label="compare gradients")
        for name, total, length in zip(
            own_grads, totals, on_host(lengths).tolist(), strict=True
        ):
            far = (total - ranks.size * own_grads[name]).norm()
            if float(on_host(far)) > _FAR * length:
                raise LossError(_GRADIENTS_DIFFER.format(name, name.rpartition(".")[0]))
        self._layer_ranks = None

    def examine_update(self) -> bool:
        """Look at the optimizer after an update; return whether there is more to see."""
        if self._optimizers is not None and not self._optimizers.look():
            self._optimizers = None
        checks = self._modules, self._optimizers, self._left_out, self._last_value
        is_waiting = self._has_own_loss and self._num_passes < _PASSES
        return is_waiting or any(check is not None for check in checks)

    def _examine_value(self, state: TrainState, samples: Samples) -> None:
        """Warn at the second update on plain values: the state's data do not advance.

        Values between batches (a replay of samples) and one repeated value (overfitting) do
        not warn.
        """
        before, cursor = self._last_value, state.cursor
        if samples.batch is not None or cursor.epoch or cursor.samples:
            self._last_value = None
        elif samples.begins:
            self._last_value = leaves = tree.tensor_leaves(samples.value)
            if state.num_tried and before and not all(map(is_, before, leaves)):
                self._last_value = None
                if state.world.is_main:
                    advise(_OF_VALUES)


def _advise_row_count(samples: Samples) -> None:
    """Warn about a list of samples that looks like a list of features."""
    value: Any = samples.value
    if samples.known is not None or not isinstance(value, list):
        return
    sizes = {leaf.size(0) for leaf in tree.tensor_leaves(value) if leaf.ndim}
    if len(sizes) != 1:  # a loss alone needs no number of samples
        return
    length, rows = len(cast("list[Any]", value)), sizes.pop()
    if length > max(rows, _MANY):
        advise(
            f"This batch is a list of {length} values of {rows} rows each,"
            f" and counts as {rows} samples next to other batches. If it is a list of samples,"
            " stack them: torch.stack(samples), or torch.utils.data.default_collate(samples);"
            " or return af.Loss(total, weight) from the loss function."
        )


def _advise_token_weights(batch: Any) -> None:
    """Warn about ignored labels in a Transformers model's own mean over tokens."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and bool((labels == _IGNORED).any()):
        advise(
            "A Transformers model's own loss is a mean over the labels that are not -100, and"
            " counts here for the number of samples, so training depends on how ranks and"
            " micro-batches share them. Return kept = (batch['labels'][:, 1:] != -100).sum();"
            " af.Loss(model(**batch).loss * kept, kept), without [:, 1:] where labels are not"
            " shifted."
        )


_OF_VALUES = (
    "step(state, batch) gets values that are no batches of af.batches(state), so the"
    " state stays at the beginning of its data, and a resumed run reads them again;"
    " nor does af.shard_data() cut them. Write `for batch in af.batches(state,"
    " until_epoch=...):` and step(state, batch, noise) with the batch itself and anything"
    " else behind it. If a loader of your own is meant, leave out data=."
)


# The first call of a loss function: a dropped load, and batches that are not cut.
#
# Replicas that all train on the same samples stay equal, so only a check of the batch shows
# that each rank does all the work.


def examine_call(state: TrainState, batch: Any) -> None:
    """Look at the first call of a loss function, after ranks compared their definitions.

    Cost: at the first batch of a definition, an all-gather of 8 bytes if the batch is a plain
    value under `shard_data` and the state has no data; otherwise none.
    """
    definition = state.definition
    is_main, cache = definition.world.is_main, definition.cache
    if cache.loaded is not None and is_main:
        template_ref, result_ref = cache.loaded
        if template_ref() is state.lease and result_ref() is None:
            advise(
                "af.load and CheckpointStore.restore return the saved state, and nothing keeps"
                " what the last one returned; this step takes the state that it was given,"
                f" which stands at update {state.step}. Write state = af.load(state,"
                " directory). If this state is meant, all is well."
            )
    if definition.world.batch.size == 1 or cache.saw_a_batch:
        return
    cache.saw_a_batch = True
    advice = _advise_of_batch(state, batch)
    if advice is not None and is_main:
        advise(advice)


def _advise_of_batch(state: TrainState, batch: Any) -> str | None:
    """Return advice about work that each rank does in full, or None."""
    definition, size = state.definition, state.world.batch.size
    is_sharded = definition.plan.num_shares > 1
    if not isinstance(batch, Batch):
        # a doctor warns of a value if the state has data
        is_asked = is_sharded and state.data is None
        return _SAME.format(size) if is_asked and _is_alike(batch, state) else None
    has_all = sum(weight or 0 for weight in batch.weights) == batch.num_samples > 1
    is_own = state.data is not None and state.data.sharded  # each rank's own stream
    if batch.start is None or not has_all or is_own:
        return None
    if is_sharded:
        return _UNCUT.format(batch.num_samples, size)
    return _UNSHARDED.format(size) if definition.cache.has_same_data else None


_SAME = (
    "step(state, batch) got the same value on all {0} ranks: af.shard_data() cuts batches of"
    " af.batches alone, so each rank trains on all samples, which is {0} times the work for the"
    " result of one rank. Give the dataset to the state, TrainState.create(data=af.Data(dataset,"
    " global_batch_size=...)), and write `for batch in af.batches(state, until_epoch=...):`; or"
    " give each rank its part, af.split_over_ranks(value, world)."
)
_UNCUT = (
    "This batch is not cut: its {} samples are all on this rank, one of {} that af.shard_data()"
    " gives a part each. It is of another state, or was begun before this setup was given: write"
    " `for batch in af.batches(state):` with the state that is trained, made with world= and its"
    " setup."
)
_UNSHARDED = (
    "Nothing in the setup gives ranks their part: each of the {0} ranks trains on all samples of"
    " every batch, which is {0} times the work for the result of one. Write af.shard_data() into"
    " the setup, as in af.chain(af.shard_data(), af.wrap_ddp())."
)


def _is_alike(value: Any, state: TrainState) -> bool:
    """Whether the value's tensors are equal on all ranks."""
    batch = state.world.batch
    sums = [
        checksum(tensor)
        for tensor in tree.tensor_leaves(value)
        if tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel() > 1
    ]
    # without tensors to compare, use the rank, so that ranks differ
    own_sum = checksum(torch.stack(sums)) if sums else torch.tensor(batch.rank)
    all_sums = all_gather_list(own_sum.to(batch.device), batch, label="first batch")
    return len({int(value) for value in all_sums}) == 1


# Ranks that train one model have equal definitions and parameters.


def is_one_training(state: TrainState) -> bool:
    """Whether the setup reduces gradients over ranks, or splits the model."""
    owners = state.setup.owners
    reduces = owners["engine"] or owners["reduce"]
    return bool(reduces) or state.definition.layout is not None


def compare_ranks(state: TrainState) -> None:
    """Raise unless ranks have the same definition and parameters; once per definition.

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
        copy = definition.copy  # whose ranks agree at any time
        check_replicas(full_params, copy, label="compare replicas", values=True)
    cache.is_compared = True


def check_definitions(state: TrainState) -> None:
    """Raise unless setup, optimizer, schedule, seed and data are equal on all ranks.

    Data must be equal if ranks share it (`shard_data`); otherwise each rank may have its own.

    Cost: a small all-reduce, once per state, and another for data (see `check_same_data`).

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
    "af.tensor_parallel: ranks have other gradients of {!r}, which all of them hold: each"
    " computes with it for the features that it has, between a column and a row layer, or for"
    ' the positions. If it stands there rightly, as a norm does, add {{{!r}: "replicated"}} to'
    ' the plan in the first case, and "sequence" in the second, and its gradients are summed.'
)


def _rows(state: TrainState) -> dict[str, str]:
    definition = state.definition
    names = {id(p): n for n, p in definition.skeleton.module.named_parameters()}
    rows = reader_rows(definition.data)  # first: ranks that read together report it
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
        rows |= {f"data, {k}": str(v) for k, v in form_of(definition.data).items()}
        rows |= order_rows(definition.data, state.seed)
        cursor = state.cursor
        rows["cursor"] = f"epoch {cursor.epoch}, sample {cursor.samples}"
    return rows


def _plain_options(transform: Any) -> dict[str, object]:
    """Return the options of a user's transform that are numbers or text, and compared."""
    read = object.__getattribute__  # a test of whether options are used does not see it
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
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        Error,
    ):  # the schedule ends earlier
        samples.append(getattr(schedule, "__qualname__", type(schedule).__name__))
    return str(samples)


# Counters in modules and optimizers outside the state.


_Numbers: TypeAlias = dict[tuple[str, str], float]


class Counters:
    """Finds counters that objects keep outside the state, in the first passes or updates.

    torch's own classes keep none, and are not checked.
    """

    def __init__(self, owners: list[tuple[str, object]], advice: str) -> None:
        """Take the objects with their names, and the text of the warning."""
        self._owners, self._advice = owners, advice
        self._seen = list[_Numbers]()

    @classmethod
    def of(cls, owners: Iterable[tuple[str, object]], advice: str) -> "Counters | None":
        """Return a check of objects by name, or None if all are torch's own."""
        user_objects = [
            (path or type(owner).__name__, owner)
            for path, owner in owners
            if not type(owner).__module__.startswith("torch.")
        ]
        return cls(user_objects, advice) if user_objects else None

    def look(self) -> bool:
        """Record values after a pass, and finally warn; return whether to continue."""
        self._seen.append(
            {
                (path, name): value
                for path, owner in self._owners
                for name, value in _numbers(vars(owner))
            }
        )
        if len(self._seen) < _PASSES:
            return True
        first, *later = self._seen
        counts = {
            f"{path}.{name}": values
            for (path, name), value in first.items()
            if _counts(values := [value, *(row.get((path, name)) for row in later)])
        }
        if counts:
            advise(self._advice.format(_format_counts(counts)))
        return False


def _numbers(attributes: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield an object's numbers by name: values, dict values, and lengths of lists.

    For a tensor it is the number of writes; a tensor that is new in each pass has a constant
    number.
    """
    for name, value in attributes.items():
        if type(value) in (int, float):
            yield name, value
        elif type(value) is torch.Tensor:
            yield from _of_tensor(name, value)
        elif type(value) is list:
            yield f"{name}'s length", len(value)
        elif type(value) is dict and not name.startswith("_"):
            items = cast("dict[Any, Any]", value).items()
            yield from (
                (f"{name}[{key!r}]", number)
                for key, number in items
                if type(number) in (int, float)
            )


def _of_tensor(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, float]]:
    if not tensor.is_inference():  # inference tensors have no version
        yield f"{name}'s number of writes", tensor._version
    is_number = tensor.dtype != torch.bool and not tensor.is_complex()
    if tensor.numel() == 1 and is_number and not tensor.is_meta:
        yield name, tensor.item()


def _counts(values: list[Any]) -> bool:
    """Whether values change by a constant difference or ratio."""
    if None in values or values[0] == values[1] or not all(map(math.isfinite, values)):
        return False
    pairs = list(pairwise(values))
    if all(math.isclose(b - a, values[1] - values[0]) for a, b in pairs):
        return True
    return all(values[:-1]) and all(
        math.isclose(b / a, values[1] / values[0]) for a, b in pairs
    )


def _format_counts(counts: dict[str, list[Any]]) -> str:
    return "; ".join(
        f"{name} was {', then '.join(map(repr, values))}"
        for name, values in list(counts.items())[:3]
    )


_OF_MODULES = (
    "As the loss function ran, {}. What a module keeps for itself is no part of a"
    " state: it is not saved, a run that is resumed begins it again, and copies of the state"
    " share it. Make it a buffer, register_buffer('name', torch.tensor(0))."
)
_OF_OPTIMIZERS = (
    "As the optimizer stepped, {}. What an optimizer keeps for itself is no part of a"
    " state: it is not saved, and a run that is resumed begins it again. Keep it in a parameter"
    " group, group['name'], or in self.state[param], which are."
)


# Untracked leaves of a loss's graph, such as a criterion's parameters.


def untracked_leaves(
    loss: torch.Tensor, param_ids: Container[int]
) -> "list[ref[torch.Tensor]]":
    """Return the leaves of a loss's graph that do not belong to the state.

    No pass may add to their `grad`, or a step would depend on earlier steps.

    Args:
        loss: the loss; its graph is searched.
        param_ids: ids of the running model's parameters.

    Raises:
        LossError: a leaf belongs to a module of `af.borrow_model` whose with block has ended.
    """
    leaves = [leaf for leaf in _leaves_of(loss) if id(leaf) not in param_ids]
    _warn_of_untrained([leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
    return [ref(leaf) for leaf in leaves]


def _warn_of_untrained(params: list[nn.Parameter]) -> None:
    if any(map(was_lent, params)):
        msg = (
            "The loss depends on a module that af.borrow_model lent for a with block, which has"
            " ended before the backward pass: it is empty. A model that judges is"
            " af.snapshot_model(other), made in the loss function, or before:"
            " step(state, batch, af.snapshot_model(other))."
        )
        raise LossError(msg)
    shapes = [tuple(param.shape) for param in params]
    if shapes:
        advise(
            "The loss depends on parameters that are not those of the model that the loss"
            f" function is given, of shapes {shapes[:5]}, and no step trains them. A criterion with"
            " parameters belongs into the model; of a model that was given away take the"
            " parameters in the loss function, model.parameters(); one that only judges is"
            " af.snapshot_model(state), or has requires_grad_(False)."
        )


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


# Missing and unexpected gradients.


OWN_BACKWARD = (
    "The loss function has left gradients behind. It returns a loss, and the step runs the"
    " backward pass: leave loss.backward() out of it."
)
DISCONNECTED = (
    "The loss depends on no trainable parameter of the model, only on other tensors that require"
    " a gradient."
)


def reject_frozen(
    params: Mapping[str, torch.Tensor], gradients: Container[str]
) -> None:
    """Reject a loss function that froze parameters, and unfreeze them.

    Args:
        params: the trained parameters, by name.
        gradients: the names of parameters with a gradient.

    Raises:
        LossError: names the frozen parameters.
    """
    frozen = [
        n for n, p in params.items() if n not in gradients and not p.requires_grad
    ]
    for name in frozen:
        params[name].requires_grad_()
    if frozen:
        msg = (
            f"The loss function froze {len(frozen)} parameters that are trained:"
            f" {_list_names(frozen)}. Which ones are trained belongs to the state: call"
            " requires_grad_(False) in the model's factory, or write state ="
            " state.with_trainable(lambda name, param: ...)."
        )
        raise LossError(msg)


def reject_unused(names: Iterable[str], *, are_held: bool) -> NoReturn:
    """Reject unused parameters, whose gradients other ranks would wait for.

    Args:
        names: the names of the unused parameters.
        are_held: whether DeepSpeed holds the gradients, which has no option for them.

    Raises:
        UnusedParametersError: always; names the parameters.
    """
    names = list(names)
    options = (
        "take af.wrap_fsdp(find_unused_parameters=True), use them by 0, as in"
        " `+ 0 * net.head.weight.sum()`,"
        if are_held
        else "give af.wrap_ddp or af.wrap_fsdp find_unused_parameters=True,"
    )
    msg = (
        f"{len(names)} parameters took no part in the loss: {_list_names(names)}."
        f" Ranks wait for the gradients of all: {options} or freeze them with"
        " requires_grad_(False)."
    )
    raise UnusedParametersError(msg)


def _list_names(names: list[str]) -> str:
    """Format the first names and the number of others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# Batches on another device than the state.


def reject_device_mismatch(
    samples: Samples, device: torch.device, error: BaseException
) -> None:
    """Explain a failed loss if its arguments are on another device.

    Raises:
        BatchError: some tensors are.
    """
    tensors = tree.tensor_leaves((samples.value, samples.extras))
    other_devices = {
        str(tensor.device) for tensor in tensors if tensor.device.type != device.type
    }
    if not other_devices:
        return
    msg = (
        f"The loss function failed ({str(error).partition(chr(10))[0]}). It was given tensors"
        f" on {', '.join(sorted(other_devices))}, and the state is on {device}. Batches of"
        " af.batches(state) are there already; move another one: batch ="
        " batch.to(state.world.device)."
    )
    raise BatchError(msg) from error


# Comparing a loss with itself on one sample, before training.


class Coarsest(TorchFunctionMode):
    """A mode that records the lowest precision of torch's results: the largest `eps`."""

    def __init__(self) -> None:
        """Start without results."""
        super().__init__()
        self.eps = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and record the precision of its result."""
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            is_float32 = result.dtype is torch.float32
            eps = devices.eps() if is_float32 else torch.finfo(result.dtype).eps
            self.eps = max(self.eps, eps)
        return result


@contextmanager
def preserve_model(model: nn.Module, device: torch.device) -> Generator[Any]:
    """Evaluate a model, then restore the model and the default generators.

    Yields: a function that says whether random numbers were drawn.
    """
    modules = [*model.modules()]
    training = [module.training for module in modules]
    tables = [(m._buffers, dict(m._buffers)) for m in modules]  # pyright: ignore[reportPrivateUsage]
    try:
        with torch.no_grad(), draws.seeded(0, device):
            before = draws.generator_states(device)
            for table, buffers in tables:
                table.update(
                    {n: b if b is None else b.clone() for n, b in buffers.items()}
                )
            model.eval()
            yield lambda: draws.generator_states(device) != before
    finally:
        for module, was in zip(modules, training, strict=True):
            module.training = was
        for table, buffers in tables:
            table.clear()
            table.update(buffers)


def first_of(batch: Any) -> Any:
    """Return a batch's first sample, or the whole batch if tensors have different rows."""
    try:
        tree.num_rows(batch)
    except BatchError:
        return batch

    def first(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return tree.tree_map(first, batch)
