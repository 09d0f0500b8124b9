# SPDX-License-Identifier: Apache-2.0
"""What of a state is saved, and a state with what was saved."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch

from accelfn.base.codec import Held, Table, decode, encode, has_state
from accelfn.base.pending import Pending
from accelfn.checkpoint.slices import Slice, slice_of
from accelfn.data.cursor import Cursor
from accelfn.errors import CheckpointError
from accelfn.state.lease import Lease
from accelfn.state.state import TrainState
from accelfn.structure.counts import beside

FIELDS = (
    "params",
    "buffers",
    "opt_state",
    "step",
    "cursor",
    "seed",
    "num_skipped",
    "slots",
)


def fields_of(state: TrainState) -> dict[str, Any]:
    """Return what is saved of a state, as a tree of tensors and plain data."""
    return {
        "params": dict(state.params),
        "buffers": dict(state.buffers),
        "opt_state": {name: dict(entry) for name, entry in state.opt_state.items()},
        "step": state.step,
        "cursor": state.cursor.to_plain(),
        "seed": state.seed,
        "num_skipped": state.num_skipped,
        "slots": dict(state.slots),
    }


def with_fields(state: TrainState, saved: Mapping[str, Any]) -> TrainState:
    """Return the state that was saved, with the definition of this one.

    Raises:
        CheckpointError: an object in a slot was saved, and there is none in this state.
    """
    slots = {
        name: _with_objects(value, state.slots.get(name), f"slots.{name}")
        for name, value in saved["slots"].items()
    }
    params = {name: saved["params"][name] for name in state.params}
    optimizer, module = state.definition.optimizer, state.definition.skeleton.module
    return attrs.evolve(
        state,
        params=params,
        buffers={name: saved["buffers"][name] for name in state.buffers},
        opt_state=beside(saved["opt_state"], params, optimizer, module),
        step=saved["step"],
        cursor=Cursor(*saved["cursor"]),
        seed=saved["seed"],
        num_skipped=saved["num_skipped"],
        slots=slots,
        lease=Lease(is_loaded=True),
    )


def _with_objects(saved: Any, current: Any, path: str) -> Any:
    """Return a slot with objects of the current one's kinds in place of what they said."""
    if isinstance(saved, Held):
        if not has_state(current):
            msg = (
                f"{path} was saved of an object with a state_dict(), and the state that it"
                f" is loaded into has {type(current).__name__} there. Give it such an"
                f" object first, with state.with_slot."
            )
            raise CheckpointError(msg)
        fresh: Any = copy.deepcopy(current)
        fresh.load_state_dict(saved.state)
        return fresh
    if isinstance(saved, Pending):
        inside = current.wait() if isinstance(current, Pending) else None
        return Pending.of(_with_objects(saved.wait(), inside, path))
    if isinstance(saved, dict):
        items = cast("dict[Any, Any]", saved).items()
        inside = current if isinstance(current, Mapping) else {}
        return {k: _with_objects(v, inside.get(k), f"{path}.{k}") for k, v in items}
    if type(saved) in (list, tuple):
        sequence = cast("list[Any]", saved)
        inside = list(current) if isinstance(current, (list, tuple)) else []
        inside += [None] * (len(sequence) - len(inside))
        return type(saved)(
            _with_objects(v, inside[i], f"{path}[{i}]") for i, v in enumerate(sequence)
        )
    if isinstance(saved, torch.Tensor) and isinstance(current, torch.Tensor):
        return saved.to(current.device)  # the caller's may be on the host
    return saved


class Tensors(Table):
    """A state's tensors by name; of a DTensor this rank's slice.

    Attributes:
        slices: which slice that is, by name.
        sharded: the DTensor itself, by name.
    """

    def __init__(self) -> None:
        """Begin without any."""
        super().__init__(objects=True)
        self.slices: dict[str, Slice] = {}
        self.sharded: dict[str, torch.Tensor] = {}
        self._locals: dict[int, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, path: str) -> str:
        """Return a tensor's name; one that stands in two places has one."""
        place = slice_of(tensor, path)
        if place is None:
            return super().put(tensor, path)
        local = self._locals.setdefault(id(tensor), cast("Any", tensor).to_local())
        name = super().put(local, path)
        self.slices[name], self.sharded[name] = place, tensor
        return name


def encoded(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return fields by unit, each slot one of its own, as plain data beside their tensors."""
    tensors = Tensors()
    units = {name: value for name, value in fields.items() if name != "slots"}
    units |= {f"slots.{name}": value for name, value in fields["slots"].items()}
    return {name: encode(v, tensors, path=name) for name, v in units.items()}, tensors


def decoded(
    units: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the fields that were encoded."""
    values = {name: decode(coded, tensors) for name, coded in units.items()}
    slots = {
        name.removeprefix("slots."): value
        for name, value in values.items()
        if name.startswith("slots.")
    }
    fields = {n: value for n, value in values.items() if not n.startswith("slots.")}
    return {**fields, "slots": slots}
