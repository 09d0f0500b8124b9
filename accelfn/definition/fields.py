# SPDX-License-Identifier: Apache-2.0
"""The fields of a transform: what it can have a say in, and what its methods are called with.

All that act in an update, and those around it, have one shape, `(value, slot, update) -> (value,
slot)`: the value flows through the chain, left to right, `slot` is the transform's own entry, and
`update` is the read-only `accelfn.state.update.Update`.

| method | type | its value, or what it does |
| --- | --- | --- |
| `init` | `state -> slot` | the transform's own entry in `state.slots`; None is none |
| `data` | `Plan -> Plan` | who takes which samples |
| `loss` | `loss_fn -> loss_fn` | wraps `(model, batch, *extras) -> loss` |
| `value_and_grad` | `fn -> fn` | wraps `(state, batch, *extras) -> (metrics, grads)` |
| `reduce` | one shape, or None | gradients of this rank's totals, which become those of all |
| `loss_scale` | one shape | what losses are multiplied by before the backward pass |
| `grads` | one shape | the true, reduced gradients |
| `hyper` | one shape | hyperparameters of the update; what it returns is laid over them |
| `after_update` | one shape | the state after the optimizer |
| `observe` | one shape | what an evaluation gave |
| `eval_params` | one shape | the parameters that are evaluated and exported |
| `finalize` | one shape | the state, with what is owed at the end |
| `merge` | `(slots, world) -> (weights, slot)` | how ranks that differ become one, to load them |
| `layout` | `(name, meta, axes) -> cuts` | the dim at which a parameter is cut, by axis |
| `engine` | `state -> engine` | how the model lies over the ranks |
| `module` | `(module, state) -> module` | the engine's own module, which runs the loss |
| `runner` | `make -> make` | wraps `module -> runner`, which runs the loss forward and backward |
"""

import difflib
import inspect
from typing import Any, cast

from accelfn.base.signatures import signature
from accelfn.errors import ArgumentError

_ARGUMENTS = {
    "init": ("state",),
    "data": ("plan",),
    "loss": ("loss_fn",),
    "value_and_grad": ("inner",),
    "reduce": ("grads", "slot", "update"),
    "loss_scale": ("scale", "slot", "update"),
    "grads": ("grads", "slot", "update"),
    "hyper": ("hyper", "slot", "update"),
    "after_update": ("state", "slot", "update"),
    "observe": ("value", "slot", "update"),
    "eval_params": ("params", "slot", "update"),
    "finalize": ("state", "slot", "update"),
    "merge": ("slots", "world"),
    "layout": ("name", "meta", "axes"),
    "engine": ("state",),
    "module": ("module", "state"),
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

    One whose options leave it without some of its fields names these in `without`.
    """
    if not hasattr(type(value), field):
        return False
    # asked of the class, for a property that raises must not be taken for none
    return (
        not hasattr(type(value), "without") or field not in cast("Any", value).without
    )


def pair(
    owner: object, field: str, returned: Any, kind: type | tuple[type, ...]
) -> tuple[Any, Any]:
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
            signature(method).bind("self", *arguments)
        except TypeError as error:
            msg = (
                f"{cls.__name__}.{field} is called as {field}(self,"
                f" {', '.join(arguments)}), which it does not take: {error}."
            )
            raise ArgumentError(msg) from error
