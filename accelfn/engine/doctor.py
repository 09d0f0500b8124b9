# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run must say alike of their states, before they train together."""

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
"""How much of their length gradients may differ by, as the order of sums decides."""
_ASKED = 0, 1, 10, 100, 1000
"""Updates at which a schedule is asked: of two functions, only what they return compares."""


def check_definitions(state: TrainState) -> None:
    """Raise unless all ranks have one setup, optimizer, schedule and seed, and one data.

    Data is compared where ranks share it, by `shard_data`: elsewhere each may have its own.

    Cost: a small all-reduce, once a state, and another for data (see `check_alike`).

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
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
    """Raise unless ranks along "tp" have the same gradients of what all of them hold.

    Cost: one sum of these gradients over the ranks, once an engine.

    Raises:
        LossError: one was computed for the features alone that a rank has.
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
    rows = readers_told(definition.data)  # first, as ranks say it that read together
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
    """Return a transform of ours as it is written; of another's the name alone."""
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
    except (ArithmeticError, LookupError, ValueError, Error):  # it ends before
        found.append(getattr(schedule, "__qualname__", type(schedule).__name__))
    return str(found)


# What a module, or an optimizer, counts on or writes into for itself, which no state has.


_PASSES = 4
"""Forward passes that are looked at: three times the same change is a count, or a decay.

What a pass notes of its batch, as the length of its sequences, changes otherwise.
"""
_Numbers: TypeAlias = dict[tuple[str, str], float]


class Counters:
    """Looks at what objects keep beside a state, in the first passes or updates.

    torch's own keep nothing there, and are not looked at.
    """

    def __init__(self, owners: Iterable[tuple[str, object]], said: str) -> None:
        """Begin before the first of these, with names of the objects, and what is said at last."""
        self._owners = [
            (path or type(owner).__name__, owner)
            for path, owner in owners
            if not type(owner).__module__.startswith("torch.")
        ]
        self._said, self._seen = said, list[_Numbers]()

    @classmethod
    def of_modules(cls, module: nn.Module) -> "Counters":
        """Return what looks at a module's parts, behind each forward pass."""
        return cls(module.named_modules(), _OF_MODULES)

    @classmethod
    def of_optimizers(cls, optimizers: Iterable[Optimizer]) -> "Counters":
        """Return what looks at optimizers, behind each update."""
        return cls((("", each) for each in optimizers), _OF_OPTIMIZERS)

    def look(self) -> bool:
        """Look behind a pass, and say at last if one counts; return whether to look again."""
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
    """Yield what are numbers, those that a dict has, and how long lists are, by name.

    Of a tensor it is how often it was written into: one that is new in each pass never was more.
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
    if not tensor.is_inference():  # which has no version
        yield f"{name}'s number of writes", tensor._version
    is_number = tensor.dtype != torch.bool and not tensor.is_complex()
    if tensor.numel() == 1 and is_number and not tensor.is_meta:
        yield name, tensor.item()


def _counts(values: list[Any]) -> bool:
    """Whether numbers change, and each time by the same, or in the same ratio."""
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


# Leaves of a loss's graph that nobody trains: a criterion's parameters, or those given
# away.


class UntrackedLeaves:
    """The leaves of a loss function's first graph that are none of the state's.

    No pass adds to their `grad`, or a step would depend on the steps before it.
    """

    def __init__(self, loss: torch.Tensor, known: Container[int]) -> None:
        """Warn if some are parameters.

        Args:
            loss: whose graph is looked through.
            known: ids of the parameters that the model has as it runs.

        Raises:
            LossError: some are of a module that was lent, and is empty by now.
        """
        found = [each for each in _leaves_of(loss) if id(each) not in known]
        _warn_of([each for each in found if isinstance(each, nn.Parameter)])
        self.leaves = [ref(each) for each in found]

    def set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Let those that still live have no gradient; return them with what they had."""
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
    """Return the tensors at the ends of a graph."""
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


# Which parameters have a gradient: none before a backward pass, all after one that reduces.


def reject_own_backward() -> NoReturn:
    """Refuse a loss function that has run a backward pass of its own.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss function has left gradients behind. It returns a loss, and the step"
        " runs the backward pass: leave loss.backward() out of it."
    )
    raise LossError(msg)


def reject_frozen(trained: Mapping[str, torch.Tensor], found: Container[str]) -> None:
    """Refuse a loss function that froze parameters, once they are trained again.

    Args:
        trained: what is to have a gradient, by name.
        found: what has one.

    Raises:
        LossError: it froze some, which are named.
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
    """Refuse a loss of which no trained parameter has a gradient.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss depends on no trainable parameter of the model, only on other"
        " tensors that require a gradient."
    )
    raise LossError(msg)


def reject_unused(unused: Iterable[str], *, are_held: bool) -> NoReturn:
    """Refuse parameters for whose gradients the ranks would wait.

    Args:
        unused: their names.
        are_held: whether gradients are DeepSpeed's, which knows no option for it.

    Raises:
        UnusedParametersError: always; they are named.
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
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# A loss that failed because its batch is on another device than the state.


def reject_device_mismatch(
    samples: Samples, device: torch.device, error: BaseException
) -> None:
    """Say so if tensors of a loss's arguments are elsewhere; the loss could have moved them.

    Raises:
        BatchError: some are.
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


# A first look at a loss: it is computed twice on one sample, before anything is trained.


class Coarsest(TorchFunctionMode):
    """Notes the precision in which torch computes inside: the largest `eps`."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.eps = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and look at what it returns."""
        del types
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            is_float32 = found.dtype is torch.float32
            eps = devices.eps() if is_float32 else torch.finfo(found.dtype).eps
            self.eps = max(self.eps, eps)
        return found


@contextmanager
def preserve_model(model: nn.Module, device: torch.device) -> Generator[Any]:
    """Let a model be evaluated, and leave it and the default generators as they are.

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
    """Return the first sample of a batch, or all where some tensor goes by no sample."""
    try:
        tree.num_rows(batch)
    except BatchError:
        return batch

    def first(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return tree.tree_map(first, batch)
