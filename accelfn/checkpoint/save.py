# SPDX-License-Identifier: Apache-2.0
"""`save`: write a state to a directory of safetensors and JSON files."""

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
import torch

from accelfn.base.arguments import as_path, explain_call_errors
from accelfn.base.codec import ObjectState, Table, decode, encode, has_state
from accelfn.base.tree import Pending, is_shard
from accelfn.checkpoint import commit, files
from accelfn.checkpoint.commit import Contents, Phase, Save
from accelfn.checkpoint.manifest import MEMBER, UNITS
from accelfn.checkpoint.slices import Slice, slice_of
from accelfn.collectives.packed import gather_text
from accelfn.collectives.replicas import by_calls
from accelfn.data.plan import Cursor
from accelfn.definition.transform import has_field
from accelfn.errors import ArgumentError, CheckpointError, WorldError
from accelfn.model.optimizer import kind_of, place_opt_state
from accelfn.state.results import Lease
from accelfn.state.state import TrainState, check_state
from accelfn.world import World

# The fields of a state that are saved, and their encoding as plain data and tensors.


FIELDS = (*UNITS, "slots")


def fields_of(state: TrainState) -> dict[str, Any]:
    """Return the fields of a state that are saved, as a tree of tensors and plain data."""
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
    """Return a state with the saved fields, and with the definition of the given state.

    Raises:
        CheckpointError: a slot was saved from an object with `state_dict()`, and the given
            state has no such object in that slot.
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
        opt_state=place_opt_state(saved["opt_state"], params, optimizer, module),
        step=saved["step"],
        cursor=Cursor(*saved["cursor"]),
        seed=saved["seed"],
        num_skipped=saved["num_skipped"],
        slots=slots,
        lease=Lease(is_loaded=True),
    )


def _with_objects(value: Any, current: Any, path: str) -> Any:
    """Return a slot's value with its objects restored from their saved `state_dict()`.

    Args:
        value: the saved value. An `ObjectState` inside the value is the saved state of an
            object.
        current: the value in the state to load into. Its objects are copied.
        path: the name of the value in errors.
    """
    if isinstance(value, ObjectState):
        if not has_state(current):
            msg = (
                f"{path} was saved from an object with state_dict(), but this state has"
                f" {type(current).__name__} there. Write state = state.with_slot(name, object)."
            )
            raise CheckpointError(msg)
        fresh: Any = copy.deepcopy(current)
        fresh.load_state_dict(value.state)
        return fresh
    if isinstance(value, Pending):
        inside = current.wait() if isinstance(current, Pending) else None
        return Pending.of(_with_objects(value.wait(), inside, path))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        inside = current if isinstance(current, Mapping) else {}
        return {k: _with_objects(v, inside.get(k), f"{path}.{k}") for k, v in items}
    if type(value) in (list, tuple):
        inside = dict(enumerate(current if isinstance(current, (list, tuple)) else ()))
        return type(value)(
            _with_objects(v, inside.get(i), f"{path}[{i}]")
            for i, v in enumerate(cast("list[Any]", value))
        )
    if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
        return value.to(current.device)  # a slot of the user may be on the CPU
    return value


class Tensors(Table):
    """A table of a state's tensors by name; for a DTensor, it has this rank's local tensor.

    Attributes:
        slices: which slice of each DTensor this rank has, by name.
        sharded: the DTensors, by name.
    """

    def __init__(self) -> None:
        """Create an empty table."""
        super().__init__(objects=True)
        self.slices: dict[str, Slice] = {}
        self.sharded: dict[str, torch.Tensor] = {}
        self._locals: dict[int, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, path: str) -> str:
        """Add a tensor, and return its name; a tensor at two paths has only one name."""
        place = slice_of(tensor, path)
        if place is None:
            return super().put(tensor, path)
        local = self._locals.setdefault(id(tensor), cast("Any", tensor).to_local())
        name = super().put(local, path)
        self.slices[name], self.sharded[name] = place, tensor
        return name


def encode_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return the fields as plain data by unit, and a table of their tensors.

    A unit is a field such as `params`, or one slot such as `slots.ema`.
    """
    tensors = Tensors()
    units = {name: value for name, value in fields.items() if name != "slots"}
    units |= {f"slots.{name}": value for name, value in fields["slots"].items()}
    return {name: encode(v, tensors, path=name) for name, v in units.items()}, tensors


def decode_fields(
    units: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the fields that `encode_fields` has encoded."""
    fields: dict[str, Any] = {"slots": {}}
    for unit, tree in units.items():
        field, dot, slot = unit.partition(".")
        table, name = (fields["slots"], slot) if dot else (fields, field)
        table[name] = decode(tree, tensors)
    return fields


# Check the arguments of `save`, `load` and stores, before anything is written.


Given: TypeAlias = TrainState | Mapping[str, TrainState]
"""A state, or a dict of several states that are saved and loaded together."""
States = TypeVar("States", TrainState, dict[str, TrainState])


def states_of(call: str, value: object) -> tuple[TrainState, dict[str, TrainState]]:
    """Return the first state of an argument, and all states by name.

    A single state, not in a dict, has the name "".

    Raises:
        ArgumentError: a value is not a state, or a name has other characters than letters,
            digits, - and _.
        StateDonatedError: a state was donated to a step.
        WorldError: the states are in different worlds.
    """
    states: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"": value}
    for name in states or [""]:
        if isinstance(value, Mapping) and not (
            isinstance(name, str) and MEMBER.fullmatch(name)
        ):
            valid = 'Use only letters, digits, - and _, as in "generator".'
            msg = f"{call}: {name!r} is not a valid name for a state. {valid}"
            raise ArgumentError(msg)
    for state in states.values():
        check_state(call, state)
        state.lease.check()
    worlds = [state.world for state in states.values()]
    if len({(w.rank, w.size, w.size > 1 and id(w.connection)) for w in worlds}) != 1:
        msg = (
            f"{call}: the states {', '.join(states)} are in different worlds. Create all of"
            " them with the same world: TrainState.create(..., world=world)."
        )
        raise WorldError(msg)
    return next(iter(states.values())), states


def check_frozen(frozen: str) -> None:
    """Raise an error unless `frozen` is "write" or "hash"."""
    if frozen not in ("write", "hash"):
        msg = f'af.save(frozen={frozen!r}): expected "write" or "hash".'
        raise ArgumentError(msg)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN = 1000
"""The number of characters of a transform's options that a manifest keeps."""


@explain_call_errors
def save(
    state: Given,
    directory: str | os.PathLike[str],
    *,
    frozen: Literal["write", "hash"] = "write",
) -> None:
    """Write every field of a state to a new directory; call it on all ranks.

    The directory has `manifest.json` and a safetensors file for each rank. `save` writes to a
    temporary directory, and renames it when all files are on the disk. If all ranks have the
    same value of a tensor, one rank writes it, and it can be loaded on any number of ranks. If
    the values differ, as under `local_sgd`, each rank writes its own.

    Args:
        state: the state, which is not donated and not changed. Its slots may contain objects
            with `state_dict()` and `load_state_dict()`. You can also pass a dict of several
            states of one world, such as `{"generator": g, "critic": c}`. `save` writes all of
            them as one checkpoint, or none, and you load them together.
        directory: a path that does not exist yet.
        frozen: how to save parameters that were never trained. "write" saves them like all
            others. "hash" saves only their hashes. Then you must load into a state that has
            the same frozen parameters. Parameters that were trained before `with_trainable`
            froze them are always written.

    Law: `load(save(s))` is bitwise equal to `s`, and so is the result of a step on it. Saving a
    state twice writes the same bytes.

    Cost: reads all tensors once, to write them and to compute BLAKE3 digests. Tensors on a GPU
    are copied to the host one at a time. On several ranks, each rank hashes all of its tensors
    and writes its share. With "hash", sharded frozen parameters are gathered, 32 MiB at a time.

    Raises:
        CheckpointWriteError: on every rank, if any rank failed to write. The message gives the
            reason, and no directory of this name is left.
    """
    first, states = states_of("af.save(state, directory)", state)
    check_frozen(frozen)
    folder = as_path("af.save(state, directory)", directory, "a directory")
    job, exchange = save_of(first, folder), exchange_of(first, "save")
    contents: dict[str, Contents] = {}

    def begin() -> None:
        for name, member in states.items():
            contents[name] = contents_of(member, frozen)
        commit.begin(job)

    job.run_on_all(exchange, Phase.BEGIN, begin)
    commit.write(job, contents, exchange)


def exchange_of(state: TrainState, doing: str) -> commit.Exchange:
    """Return a function that gathers a text of each rank, such as the outcome of a phase.

    Args:
        state: a state in the world of these ranks.
        doing: the first word of the collectives' labels, such as "save".
    """
    return lambda task, text: gather_text(text, state.world, label=f"{doing}: {task}")


def save_of(state: TrainState, directory: Path) -> Save:
    """Return the description of a save of this state to a directory."""
    world = state.world
    return Save(
        final=directory.absolute(), step=state.step, rank=world.rank, size=world.size
    )


def contents_of(
    state: TrainState, frozen: str, *, metrics: Mapping[str, float] | None = None
) -> Contents:
    """Return the data to write for a state; its tensors are the state's, not copies."""
    # after this save, the run can end without losing work: cancel the warning about lost work
    state.world.connection.activity.on_close.pop(state.name, None)
    fields, digests = fields_of(state), dict[str, str]()
    if frozen == "hash":
        names = state.definition.skeleton.once_trained
        params = {n: p for n, p in fields["params"].items() if n not in names}
        digests = digests_of(params, state.world)
        fields["params"] = {n: p for n, p in state.params.items() if n not in digests}
    units, tensors = encode_fields(fields)
    copies = state.definition.copy_of_each
    return Contents(
        units=units,
        tensors=tensors,
        slices=tensors.slices,
        copy=copies[state.world.rank] if copies else None,
        facts={
            "optimizer": optimizer_name(state),
            "transforms": tuple(transform.name for transform in state.setup),
            "data": None if state.data is None else state.data.facts,
            "kept": digests,
            "persistent": tuple(sorted(state.definition.skeleton.persistent)),
            "metrics": dict(metrics or {}),
            "definition": definition_of(state),
        },
    )


def digests_of(params: Mapping[str, torch.Tensor], world: World) -> dict[str, str]:
    """Return the digests of full (unsharded) parameters by name.

    The call is a collective if any of the parameters is sharded.
    """
    digests = files.digests({n: p for n, p in params.items() if not is_shard(p)})
    for some in by_calls(params, world, label="hash frozen parameters"):
        digests |= files.digests(some)
    return digests


def definition_of(state: TrainState) -> dict[str, str]:
    """Return the parts of a state's definition that affect the next update, as texts by name.

    The parts are the names of frozen parameters, options of transforms, and the state's name.
    """
    frozen = state.params.keys() - {*state.trainable}
    acting = ("grads", "hyper", "after_update", "merge")
    options = {
        f"setup.{transform.name}": _ADDRESS.sub("", repr(transform))[:_SHOWN]
        for transform in state.setup
        if any(has_field(transform, field) for field in acting)
        and not has_field(transform, "layout")
    }
    frozen_params = {f"params.{name}": "frozen" for name in sorted(frozen)}
    return {**frozen_params, **options, "name": state.name}


def optimizer_name(state: TrainState) -> str:
    """Return the name of the optimizer's class, and of the classes in a combination."""
    metas = state.definition.skeleton.module.named_parameters()
    names = {id(param): name for name, param in metas}
    return kind_of(state.definition.optimizer, names)
