# SPDX-License-Identifier: Apache-2.0
"""The fields of a transform: what it can have a say in, and what its methods are called with.

| method | type | what it changes |
| --- | --- | --- |
| `init` | `state -> slot` | the transform's own entry in `state.slots` |
| `data` | `Plan -> Plan` | who takes which samples |
| `loss` | `loss_fn -> loss_fn` | wraps `(model, batch, *extras) -> loss` |
| `value_and_grad` | `fn -> fn` | wraps `(state, batch, *extras) -> (metrics, grads)` |
| `reduce` | `(grads, slot, world) -> (grads, slot)`, or None | how totals cross ranks |
| `loss_scale` | `(state, slot) -> scale` | what losses are multiplied by before the backward pass |
| `grads` | `(grads, slot, state) -> (grads, slot)` | the true, reduced gradients |
| `hyper` | `(state, slot) -> {"lr": ...}` | hyperparameters of the next update |
| `after_update` | `(state, slot) -> (state, slot)` | the state after the optimizer |
| `after_skip` | `(grads, slot, state) -> slot` | its slot after an update that was skipped |
| `observe` | `(state, slot, value) -> slot` | its slot, told what an evaluation gave |
| `eval_params` | `(state, slot) -> params` | what is evaluated and exported |
| `finalize` | `(state, slot) -> (state, slot)` | what is owed at the end |
| `merge` | `slots -> (weights, slot)` | how ranks that differ become one, to load them |
| `engine` | `-> engine` | how the model lies over the ranks |
| `runner` | `make -> make` | wraps `module -> runner`, which runs the loss forward and backward |
"""

import difflib
import inspect
from typing import Any, cast

from accelfn.errors import ArgumentError

_ARGUMENTS = {
    "init": ("state",),
    "data": ("plan",),
    "loss": ("loss_fn",),
    "value_and_grad": ("inner",),
    "reduce": ("grads", "slot", "world"),
    "loss_scale": ("state", "slot"),
    "grads": ("grads", "slot", "state"),
    "hyper": ("state", "slot"),
    "after_update": ("state", "slot"),
    "after_skip": ("grads", "slot", "state"),
    "observe": ("state", "slot", "value"),
    "eval_params": ("state", "slot"),
    "finalize": ("state", "slot"),
    "merge": ("slots",),
    "engine": ("state",),
    "runner": ("make", "state"),
}
FIELDS = tuple(_ARGUMENTS)


def check_fields(cls: type) -> None:
    """Raise unless the public methods of a class are fields of a transform.

    Raises:
        ArgumentError: one is none, or does not take what it is called with.
    """
    _check_methods(cls)
    _check_arguments(cls)


def has_field(value: object, field: str) -> bool:
    """Return whether a transform has a say in `field`.

    One whose options leave it without some of its fields names these in `_without`.
    """
    return hasattr(type(value), field) and field not in getattr(value, "_without", ())


def pair(owner: object, field: str, returned: Any, kind: type) -> tuple[Any, Any]:
    """Return what a method gave, if it is a value of a kind and a slot.

    Raises:
        ArgumentError: it is not; the transform is named.
    """
    shown = type(returned).__name__
    if isinstance(returned, tuple) and len(cast("tuple[Any, ...]", returned)) == 2:
        value, slot = cast("tuple[Any, Any]", returned)
        if isinstance(value, kind):
            return value, slot
        shown = f"({type(value).__name__}, {type(slot).__name__})"
    first = _ARGUMENTS[field][0]
    msg = f"{owner!r}.{field} returned {shown}; expected ({first}, slot)."
    raise ArgumentError(msg)


def check_returned(
    owner: object, field: str, *, ok: bool, returned: object, expected: str
) -> None:
    """Raise where a method gave something else than its field is for.

    Raises:
        ArgumentError: it did; the transform is named.
    """
    if not ok:
        shown = type(returned).__name__
        msg = f"{owner!r}.{field} returned {shown}; expected {expected}."
        raise ArgumentError(msg)


def _check_methods(cls: type) -> None:
    for name, value in vars(cls).items():
        public = not name.startswith("_") and inspect.isfunction(value)
        if public and name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            msg = (
                f"{cls.__name__}.{name} is no field of a transform"
                f" ({', '.join(FIELDS)}).{hint} Start the names of helper methods with"
                " an underscore."
            )
            raise ArgumentError(msg)


def _check_arguments(cls: type) -> None:
    for field, arguments in _ARGUMENTS.items():
        method = vars(cls).get(field)
        if not inspect.isfunction(method):
            continue
        try:
            inspect.signature(method).bind("self", *arguments)
        except TypeError as error:
            msg = (
                f"{cls.__name__}.{field} is called as {field}(self,"
                f" {', '.join(arguments)}), which it does not take: {error}."
            )
            raise ArgumentError(msg) from error
