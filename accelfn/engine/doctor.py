# SPDX-License-Identifier: Apache-2.0
"""Find mistakes: differing ranks, hidden counters, untracked parameters, wrong losses."""

import math
import re
from collections.abc import Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias, cast
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accelfn.base import devices, draws, tree
from accelfn.base.arguments import advise
from accelfn.base.devices import on_host
from accelfn.base.tree import cut_axes, local
from accelfn.collectives import all_reduce_
from accelfn.data.consistency import (
    are_alike,
    check_alike,
    check_definition_rows,
    order_told,
    readers_told,
)
from accelfn.data.epoch import form_of
from accelfn.engine.loss import Samples
from accelfn.errors import BatchError, Error, LossError, UnusedParametersError
from accelfn.model.optimizer import kind_of
from accelfn.schedules.factors import Rates
from accelfn.state.state import TrainState
from accelfn.state.views import was_lent
from accelfn.world import World

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FAR = 1e-2
"""The relative tolerance of gradients, for the order of sums."""
_ASKED = 0, 1, 10, 100, 1000
"""Updates at which schedules are compared by their values: functions cannot be compared."""


def check_definitions(state: TrainState) -> None:
    """Raise unless setup, optimizer, schedule, seed and data are equal on all ranks.

    Data must be equal if ranks share it (`shard_data`); otherwise each rank may have its own.

    Cost: a small all-reduce, once per state, and another for data (see `check_alike`).

    Raises:
        ReplicaMismatchError: names the first difference, with one row per rank.
    """
    check_definition_rows(_rows(state), state.world)
    data, definition = state.data, state.definition
    if data is None:
        return
    if definition.plan.num_shares > 1:
        check_alike(data, data.looks, state.world)
    else:
        same = are_alike(data, data.looks, state.world)
        definition.cache.has_same_data = same


def check_gradients(
    trained: Iterable[str], gradients: Mapping[str, torch.Tensor], ranks: World
) -> None:
    """Raise unless ranks along "tp" have equal gradients of unsplit parameters.

    Cost: one sum of these gradients over the ranks, once per engine.

    Raises:
        LossError: a gradient was computed from a rank's own features only.
    """
    alike = {
        name: local(gradients[name]).detach().double()
        for name in trained
        if name in gradients and "tp" not in cut_axes(gradients[name])
    }
    totals = {name: each.clone() for name, each in alike.items()}
    lengths = torch.zeros(len(alike), dtype=torch.float64, device=ranks.device)
    for i, each in enumerate(alike.values()):
        lengths[i] = each.norm()
    all_reduce_([*totals.values(), lengths], ranks, label="compare gradients")
    for (name, mine), length in zip(
        alike.items(), on_host(lengths).tolist(), strict=True
    ):
        far = (totals[name] - ranks.size * mine).norm()
        if float(on_host(far)) > _FAR * length:
            module = name.rpartition(".")[0]
            msg = (
                f"af.tensor_parallel: ranks have other gradients of {name!r}, which all of"
                " them hold: each computes with it for the features that it has, between a"
                " column and a row layer, or for the positions. If it stands there rightly, as"
                f' a norm does, add {{{module!r}: "replicated"}} to the plan in the first case,'
                ' and "sequence" in the second, and its gradients are summed.'
            )
            raise LossError(msg)


def _rows(state: TrainState) -> dict[str, str]:
    definition = state.definition
    names = {id(p): n for n, p in definition.skeleton.module.named_parameters()}
    rows = readers_told(definition.data)  # first: ranks that read together report it
    rows |= {"seed": str(state.seed)}
    for i, each in enumerate(definition.setup):
        rows[f"transform {i}"] = _format_transform(each)
    rows["optimizer"] = kind_of(definition.optimizer, names)
    for i, group in enumerate(definition.optimizer.param_groups):
        for name, value in sorted(group.items()):
            if name != "params":
                rows[f"{name} of parameter group {i}"] = str(_plain(value))
    if definition.rates is not None:
        rows["schedule"] = _sample_schedule(definition.rates, definition.schedule)
    if definition.data is not None and definition.plan.num_shares > 1:
        rows |= {f"data, {k}": str(v) for k, v in form_of(definition.data).items()}
        rows |= order_told(definition.data, state.seed)
        cursor = state.cursor
        rows["cursor"] = f"epoch {cursor.epoch}, sample {cursor.samples}"
    return rows


def _format_transform(transform: Any) -> str:
    """Format a transform: accelfn's own in full, others by name."""
    own = type(transform).__module__.partition(".")[0] == __name__.partition(".")[0]
    return _ADDRESS.sub("", repr(transform)) if own else transform.name


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else tuple(value.shape)
    plain = isinstance(value, (int, float, str, tuple, type(None)))
    return value if plain else type(value).__name__


def _sample_schedule(rates: Rates, schedule: object) -> str:
    found: list[object] = []
    try:
        for update in _ASKED:
            found += [_plain(value) for value in rates(update).values()]
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        Error,
    ):  # the schedule ends earlier
        found.append(getattr(schedule, "__qualname__", type(schedule).__name__))
    return str(found)


# Counters in modules and optimizers outside the state.


_PASSES = 4
"""The number of passes to compare: three equal changes mean a count or a decay.

Values that depend on the batch, such as a sequence length, change irregularly.
"""
_Numbers: TypeAlias = dict[tuple[str, str], float]


class Counters:
    """Finds counters that objects keep outside the state, in the first passes or updates.

    torch's own classes keep none, and are not checked.
    """

    def __init__(self, owners: Iterable[tuple[str, object]], said: str) -> None:
        """Take the objects with their names, and the text of the warning."""
        self._owners = [
            (path or type(owner).__name__, owner)
            for path, owner in owners
            if not type(owner).__module__.startswith("torch.")
        ]
        self._said, self._seen = said, list[_Numbers]()

    @classmethod
    def of_modules(cls, module: nn.Module) -> "Counters":
        """Return a check of a module's submodules, after each forward pass."""
        return cls(module.named_modules(), _OF_MODULES)

    @classmethod
    def of_optimizers(cls, optimizers: Iterable[Optimizer]) -> "Counters":
        """Return a check of optimizers, after each update."""
        return cls((("", each) for each in optimizers), _OF_OPTIMIZERS)

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
        told = {
            f"{path}.{name}": values
            for (path, name), value in first.items()
            if _counts(values := [value, *(each.get((path, name)) for each in later)])
        }
        if told:
            advise(self._said.format(_format_counts(told)))
        return False


def _numbers(kept: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield an object's numbers by name: values, dict values, and lengths of lists.

    For a tensor it is the number of writes; a tensor that is new in each pass has a constant
    number.
    """
    for name, value in kept.items():
        if type(value) in (int, float):
            yield name, value
        elif type(value) is torch.Tensor:
            yield from _of_tensor(name, value)
        elif type(value) is list:
            yield f"{name}'s length", len(value)
        elif type(value) is dict and not name.startswith("_"):
            found = cast("dict[Any, Any]", value).items()
            yield from (
                (f"{name}[{key!r}]", each)
                for key, each in found
                if type(each) in (int, float)
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


def _format_counts(told: dict[str, list[Any]]) -> str:
    return "; ".join(
        f"{name} was {', then '.join(map(repr, values))}"
        for name, values in list(told.items())[:3]
    )


_OF_MODULES = (
    "As the loss function ran, {}. What a module keeps for itself is no part of a"
    " state: it is not saved, a run that is resumed begins it again, and copies of the state"
    " share it. Make it a buffer, register_buffer('name', torch.tensor(0)). If nothing is"
    " computed from it, all is well."
)
_OF_OPTIMIZERS = (
    "As the optimizer stepped, {}. What an optimizer keeps for itself is no part of a"
    " state: it is not saved, and a run that is resumed begins it again. Keep it in a parameter"
    " group, group['name'], or in self.state[param], which are. If nothing is computed from it,"
    " all is well."
)


# Untracked leaves of a loss's graph, such as a criterion's parameters.


class UntrackedLeaves:
    """The leaves of a loss function's first graph that do not belong to the state.

    No pass may add to their `grad`, or a step would depend on earlier steps.
    """

    def __init__(self, loss: torch.Tensor, known: Container[int]) -> None:
        """Warn if some leaves are parameters.

        Args:
            loss: the loss; its graph is searched.
            known: ids of the running model's parameters.

        Raises:
            LossError: a leaf belongs to a module of `af.bind` whose with block has ended.
        """
        found = [each for each in _leaves_of(loss) if id(each) not in known]
        _warn_of([each for each in found if isinstance(each, nn.Parameter)])
        self.leaves = [ref(each) for each in found]

    def set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Clear gradients of the leaves that still exist; return leaves and old gradients."""
        aside = [
            (each, each.grad) for one in self.leaves if (each := one()) is not None
        ]
        for each, _ in aside:
            each.grad = None
        return aside


def _warn_of(strangers: list[nn.Parameter]) -> None:
    if any(map(was_lent, strangers)):
        msg = (
            "The loss depends on a module that af.bind lent for a with block, which has ended"
            " before the backward pass: it is empty. A model that judges is af.frozen(other),"
            " made in the loss function, or before: step(state, batch, af.frozen(other))."
        )
        raise LossError(msg)
    shapes = [tuple(each.shape) for each in strangers]
    if shapes:
        advise(
            "The loss depends on parameters that are not those of the model that the loss"
            f" function is given, of shapes {shapes[:5]}. No step trains them, or adds to"
            " their grad. A criterion with parameters belongs"
            " into the model; of a model that was given away take the parameters in the loss"
            " function, model.parameters(); one that only judges is af.frozen(state), or has"
            " requires_grad_(False)."
        )


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaf tensors of a graph."""
    found: list[torch.Tensor] = []
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (end := getattr(node, "variable", None)) is not None:
            found.append(end)
        left += [after for after, _ in node.next_functions]
    return found


# Missing and unexpected gradients.


def reject_own_backward() -> NoReturn:
    """Reject a loss function that ran a backward pass itself.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss function has left gradients behind. It returns a loss, and the step"
        " runs the backward pass: leave loss.backward() out of it."
    )
    raise LossError(msg)


def reject_frozen(trained: Mapping[str, torch.Tensor], found: Container[str]) -> None:
    """Reject a loss function that froze parameters, and unfreeze them.

    Args:
        trained: the trained parameters, by name.
        found: the names of parameters with a gradient.

    Raises:
        LossError: names the frozen parameters.
    """
    frozen = [n for n, p in trained.items() if n not in found and not p.requires_grad]
    for name in frozen:
        trained[name].requires_grad_()
    if frozen:
        msg = (
            f"The loss function froze {len(frozen)} parameters that are trained:"
            f" {_list_names(frozen)}. Which ones are trained belongs to the state: call"
            " requires_grad_(False) in the model's factory, or write state ="
            " state.with_trainable(lambda name, param: ...)."
        )
        raise LossError(msg)


def reject_disconnected() -> NoReturn:
    """Reject a loss that does not depend on any trained parameter.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss depends on no trainable parameter of the model, only on other"
        " tensors that require a gradient."
    )
    raise LossError(msg)


def reject_unused(unused: Iterable[str], *, are_held: bool) -> NoReturn:
    """Reject unused parameters, whose gradients other ranks would wait for.

    Args:
        unused: the names of the unused parameters.
        are_held: whether DeepSpeed holds the gradients, which has no option for them.

    Raises:
        UnusedParametersError: always; names the parameters.
    """
    names = list(unused)
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
    given = tree.tensor_leaves((samples.value, samples.extras))
    strange = {str(each.device) for each in given if each.device.type != device.type}
    if not strange:
        return
    msg = (
        f"The loss function failed ({str(error).partition(chr(10))[0]}). It was given tensors"
        f" on {', '.join(sorted(strange))}, and the state is on {device}. Batches of"
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
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            is_float32 = found.dtype is torch.float32
            eps = devices.eps() if is_float32 else torch.finfo(found.dtype).eps
            self.eps = max(self.eps, eps)
        return found


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
