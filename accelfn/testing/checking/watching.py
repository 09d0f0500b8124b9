# SPDX-License-Identifier: Apache-2.0
"""A transform watched at work: which of its inputs its methods change."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.data import Batch
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Seen: TypeAlias = Callable[[str], None]
"""Is told of each input that was changed."""

_IN_PLACE = frozenset({"after_update", "finalize"})
"""Methods that are given the state's tensors, to be changed in place."""


_NEW = "Return new tensors instead."


def watched(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells of inputs it changes and must not.

    A method may change in place its own slot and the gradients it is given, and after an
    update the tensors of the state; never the state before it, other slots, or a batch.
    """

    def watch(field: str, own: str, function: Any, *given: Any, **named: Any) -> Any:
        keep = _kept(given, own=own, field=field)
        returned = function(*given, **named)
        for name in keep():
            seen(f"{transform!r}.{field} changed {name} in place. {_NEW}")
        return returned

    def call(field: str, method: Any, self: Any, *given: Any) -> Any:
        return watch(field, self.name, partial(method, self), *given)

    def wrap(field: str, method: Any, self: Any, inner: Callable[..., Any]) -> Any:
        return wraps(inner)(partial(watch, field, "", method(self, inner)))

    return intercepted(intercepted(transform, _METHODS, call), _WRAPPERS, wrap)


def subclassed(transform: Any, methods: Mapping[str, Any]) -> Any:
    """Return a transform of the same options and name, with other methods, or facts."""
    kind = type(transform)
    body = {"__slots__": (), "__module__": kind.__module__, **methods}
    made = object.__new__(type(kind.__name__, (kind,), body))
    for field in attrs.fields(kind):
        object.__setattr__(made, field.name, getattr(transform, field.name))
    return made


def intercepted(transform: Any, fields: Iterable[str], call: Callable[..., Any]) -> Any:
    """Return an equal transform, for whose methods `call(field, method, self, ...)` is called."""
    kind = type(transform)

    def method_of(field: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(self: Any, *given: Any) -> Any:
            return call(field, method, self, *given)

        return called

    methods = {field: getattr(kind, field, None) for field in fields}
    found = {field: method_of(field, m) for field, m in methods.items() if callable(m)}
    return subclassed(transform, found)


_METHODS = (
    *("init", "grads", "loss_scale", "hyper", "after_update"),
    *("observe", "reduce", "eval_params", "finalize"),
)
_WRAPPERS = ("loss", "value_and_grad")


def _kept(given: Iterable[Any], *, own: str, field: str) -> Callable[[], list[str]]:
    """Copy what must not change; return what says, later, what did."""
    tensors: dict[str, torch.Tensor] = {}
    for each in given:
        tensors.update(_guarded(each, own=own, field=field))
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def changed() -> list[str]:
        return [
            name
            for name, copy in copies.items()
            if not _same(copy, tensors[name].detach())
        ]

    return changed


def _guarded(value: Any, *, own: str, field: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one argument that the method must leave alone, by name."""
    if isinstance(value, TrainState):
        return _of_state(value, own=own, all_but_slots=field not in _IN_PLACE)
    if isinstance(value, Update):
        if field in _IN_PLACE:  # the state before has given its tensors away
            return _of_slots(value.slots, own)
        state = value.state
        return _of_state(state, own=own, all_but_slots=True)
    if isinstance(value, nn.Module):
        return {f"parameter {n!r}": p for n, p in value.named_parameters()}
    if isinstance(value, Grads) or field in _METHODS:
        return {}
    if isinstance(value, Batch):
        value = value.micro_batches
    leaves = tree.tensor_leaves(value)
    return {f"tensor {i} of the batch": leaf for i, leaf in enumerate(leaves)}


def _of_state(
    state: TrainState, *, own: str, all_but_slots: bool
) -> dict[str, torch.Tensor]:
    parts: dict[str, Any] = {}
    if all_but_slots:
        parts |= {f"params[{name!r}]": param for name, param in state.params.items()}
        parts |= {f"buffers[{name!r}]": each for name, each in state.buffers.items()}
        entries = state.opt_state.items()
        parts |= {f"opt_state[{name!r}]": dict(entry) for name, entry in entries}
    return _of_slots(state.slots, own) | _tensors(parts)


def _of_slots(slots: Mapping[str, Any], own: str) -> dict[str, torch.Tensor]:
    return _tensors({f"slots[{n!r}]": slot for n, slot in slots.items() if n != own})


def _tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        leaves = tree.tensor_leaves(part)
        found |= {f"{name} ({i})" if i else name: t for i, t in enumerate(leaves)}
    return found


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.equal(
        one.nan_to_num() if one.is_floating_point() else one,
        two.nan_to_num() if two.is_floating_point() else two,
    )
