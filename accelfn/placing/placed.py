# SPDX-License-Identifier: Apache-2.0
"""`placed`: a model whose forward works, though its parts are in different places."""

import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from accelfn.base.arguments import as_path
from accelfn.base.calling import called
from accelfn.base.tree import tensor_leaves, to_device
from accelfn.checkpoint import files
from accelfn.errors import ArgumentError, CheckpointError, ModelError
from accelfn.placing.ahead import Ahead
from accelfn.placing.guests import Guest
from accelfn.placing.hooks import let_in
from accelfn.placing.plan import DISK, DeviceMap
from accelfn.placing.units import Part, calls_of, units_of
from accelfn.structure.placed import PLACED, refuse_placed
from accelfn.weights.mapped import Mapped, mapped
from accelfn.weights.shards import shards_at

M = TypeVar("M", bound=nn.Module)


@called
@contextmanager
def placed(
    model: M, plan: DeviceMap, *, weights: str | os.PathLike[str] | None = None
) -> Generator[M]:
    """Lend a model whose units are where a plan says, for its forward, without gradients.

    A unit on a device is there until the end. One that is offloaded comes to the plan's first
    device for its forward, and goes after it, or each of its modules does that is called by
    itself: from the host's memory where there is an accelerator, or from files on the disk,
    which are mapped and not copied. Buffers are where their unit computes. Inputs follow from
    device to device, and what the model returns is on the device of its inputs.

    At the end the model is as it was: the same parameters, with their values where they were,
    and no hooks. Buffers have the values that its forward gave them, or `weights`.

    Args:
        model: with values, which what goes to the disk is written from; or without, as
            `empty_weights` builds it, and `weights` has them.
        plan: that `af.place` made for this model, or one moved.
        weights: a safetensors file, a folder with some, or their index, for parameters
            without values; mapped as they are. Buffers that belong to them are read.

    Law: outputs are bitwise those of the model where it was, on the same kind of device.

    Cost: what is offloaded is read at each forward. From pinned memory of the host, the unit
        that followed in the pass before is copied while one computes, on a stream of the
        device's, if the budget has room for both. A model with values is written to the disk,
        as far as it goes there, and read back at the end.

    Raises:
        ModelError: the model is placed already, or has parameters that share memory without
            being one; in a forward, gradients are on.
        ArgumentError: the plan is not of this model, and what it leaves out is named; or the
            model has values, and `weights` are given.
        CheckpointError: a parameter without values, or a buffer that belongs to them, is not
            in `weights`, or otherwise there.
    """
    if not isinstance(model, nn.Module):
        msg = f"af.placed(model={model!r}, plan): expected a torch.nn.Module."
        raise ModelError(msg)
    refuse_placed(model)
    units = units_of(model)
    _check_plan(plan, units)
    with ExitStack() as stack, torch.no_grad():
        named = {
            n: t for unit in units for part in unit for n, t in part.tensors.items()
        }
        values = _values(model, named, weights)
        there = stack.enter_context(_given(model, values))
        units = units_of(model)  # with the parameters that have values now
        _settle(stack, model, plan, units, there)
        for param in model.parameters():
            PLACED[param] = True
            stack.callback(PLACED.pop, param)
        if {*plan.budgets} - {"cpu", DISK}:
            _follow(stack, model, plan, units)
        yield model


def _check_plan(plan: DeviceMap, units: list[list[Part]]) -> None:
    if not isinstance(plan, DeviceMap):
        msg = f"af.placed(model, plan={plan!r}): expected what af.place(model, budgets) gives."
        raise ArgumentError(msg)
    asked = {part.name for unit in units for part in unit}
    there = [name for unit in plan.units for name in unit.names]
    left = [name or "the model's own tensors" for name in asked - {*there}]
    if left:
        msg = (
            f"af.placed(model, plan): the plan leaves out {', '.join(sorted(left)[:10])}. Make"
            " it for this model: af.place(model, budgets)."
        )
        raise ArgumentError(msg)
    strange = sorted({*there} - asked)
    if strange or len(there) != len({*there}):
        twice = sorted({name for name in there if there.count(name) > 1})
        msg = (
            f"af.placed(model, plan): the plan has {', '.join([*strange, *twice][:10])}, which"
            " the model does not have, or once only."
        )
        raise ArgumentError(msg)
    whole = [{part.name for part in unit} for unit in units]
    for unit in plan.units:
        if {*unit.names} not in whole or unit.device not in plan.budgets:
            msg = (
                f"af.placed(model, plan): {unit.shown} on {unit.device!r} is no unit of this"
                " model, or on no device of the plan's budgets."
            )
            raise ArgumentError(msg)


def _values(
    model: nn.Module,
    named: Mapping[str, torch.Tensor],
    weights: str | os.PathLike[str] | None,
) -> dict[int, Mapped]:
    """Return, by identity, the values of what has none in the model."""
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    if not empty and weights is not None:
        msg = (
            f"af.placed(weights={str(weights)!r}): {type(model).__name__} has values of its"
            " own, which are placed. Leave out weights=, or build it under"
            " af.empty_weights()."
        )
        raise ArgumentError(msg)
    if not empty:
        return {}
    if weights is None:
        msg = (
            f"af.placed: {', '.join(empty[:5])} of {type(model).__name__} have no values. Say"
            " where they are: af.placed(model, plan, weights=folder)."
        )
        raise ModelError(msg)
    found = mapped(shards_at(as_path("af.placed(weights=...)", weights, "a folder")))
    values = {id(named[name]): found[name] for name in empty if name in found}
    for name in empty:
        old = named[name]
        value = values.get(id(old))
        if value is None or not isinstance(old, nn.Parameter):
            msg = f"{weights}: no values for {name}, which has none in the model."
            raise CheckpointError(msg)
        there = value.tensor
        if (there.shape, there.dtype) != (old.shape, old.dtype):
            msg = (
                f"{weights}: {name} is {there.dtype} of {tuple(there.shape)}, and"
                f" {old.dtype} of {tuple(old.shape)} in the model. Build it in that dtype, for"
                " what is mapped is not converted."
            )
            raise CheckpointError(msg)
    _fill_buffers(model, found, weights)
    return values


def _fill_buffers(
    model: nn.Module, found: Mapping[str, Mapped], weights: str | os.PathLike[str]
) -> None:
    """Read what belongs to the weights beside parameters, as running statistics.

    Raises:
        CheckpointError: it is not there, or of another shape.
    """
    saved = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved and not buffer.is_meta:
            names_of.setdefault(id(buffer), []).append(name)
    for names in names_of.values():  # files have one that is shared under one name
        name = next((each for each in names if each in found), names[0])
        buffer = saved[name]
        if name not in found or found[name].tensor.shape != buffer.shape:
            has = found[name].tensor.shape if name in found else None
            msg = (
                f"{weights}: no values for the buffer {name} of {tuple(buffer.shape)}, which"
                f" belongs to the weights; it has {'none' if has is None else tuple(has)}."
            )
            raise CheckpointError(msg)
        buffer.copy_(found[name].tensor)


@contextmanager
def _given(
    model: nn.Module, values: Mapping[int, Mapped]
) -> Generator[dict[int, Mapped]]:
    """Let parameters with values stand in the places of those without; give their files."""
    made: dict[int, nn.Parameter] = {}
    places = [
        (module, name, param)
        for module in model.modules()
        for name, param in module.named_parameters(
            recurse=False, remove_duplicate=False
        )
        if id(param) in values
    ]
    for _, _, param in places:
        if id(param) not in made:
            new = nn.Parameter(
                values[id(param)].tensor, requires_grad=param.requires_grad
            )
            vars(new).update(vars(param))
            made[id(param)] = new
    try:
        for module, name, param in places:
            setattr(module, name, made[id(param)])
        yield {id(made[key]): value for key, value in values.items()}
    finally:
        for module, name, param in places:
            setattr(module, name, param)


def _settle(
    stack: ExitStack,
    model: nn.Module,
    plan: DeviceMap,
    units: list[list[Part]],
    there: Mapping[int, Mapped],
) -> None:
    """Put each unit where it is to be, and let guests come with hooks."""
    where = {name: unit.device for unit in plan.units for name in unit.names}
    away = {DISK} if plan.computes == "cpu" else {"cpu", DISK}
    ahead = Ahead.on(torch.device(plan.computes), plan.room)
    for unit in units:
        place = where[unit[0].name]
        runs = torch.device(plan.computes if place in away else place)
        tensors = {id(t): (n, t) for part in unit for n, t in part.tensors.items()}
        params = {n: t for n, t in tensors.values() if isinstance(t, nn.Parameter)}
        for name, tensor in tensors.values():
            if name not in params and tensor.device != runs:
                _move(stack, tensor, runs, keep=True)
        if place not in away:
            for param in params.values():
                if param.device != runs or id(param) in there:
                    _move(stack, param, runs, copy=id(param) in there)
            continue
        homes = _homes(stack, params, place, plan, there)
        guests = {
            id(param): Guest(param, home, runs, file)
            for param, (home, file) in zip(params.values(), homes, strict=True)
        }
        _invite(stack, unit, guests, ahead)
    if ahead is not None:
        ahead.within(stack, model)


def _invite(
    stack: ExitStack, unit: list[Part], guests: Mapping[int, Guest], ahead: Ahead | None
) -> None:
    """Let parameters come for whatever of their unit is called, and be at home in the end."""
    for guest in guests.values():  # Ctrl-C may have left one away from home
        stack.callback(setattr, guest.param, "data", guest.home)
    for call in [each for part in unit for each in calls_of(part)]:
        some = {id(t): guests[id(t)] for t in call.tensors if id(t) in guests}
        let_in(stack, call.module, tuple(some.values()), ahead)


def _move(
    stack: ExitStack,
    tensor: torch.Tensor,
    device: torch.device,
    *,
    keep: bool = False,
    copy: bool = False,
) -> None:
    """Move a tensor until the end; `keep` what is written into it meanwhile."""
    home = tensor.data
    tensor.data = home.to(device, copy=copy)

    def back() -> None:
        if keep:
            home.copy_(tensor.data)
        tensor.data = home

    stack.callback(back)


def _homes(
    stack: ExitStack,
    params: Mapping[str, torch.Tensor],
    place: str,
    plan: DeviceMap,
    files_of: Mapping[int, Mapped],
) -> list[tuple[torch.Tensor, Mapped | None]]:
    """Return where parameters are between forwards, and put them there."""
    there = {n: files_of.get(id(p)) for n, p in params.items()}
    write = {n: p for n, p in params.items() if place == DISK and there[n] is None}
    if write:
        _check_unshared(write)
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                dir=str(plan.budgets[DISK]), prefix="af-placed-"
            )
        )
        path = Path(folder) / "unit.safetensors"
        files.write(path, {n: p.data for n, p in write.items()}, {"format": "pt"})
        there |= mapped(shards_at(path))
    for name, param in params.items():
        file = there[name]
        if name in write and file is not None:
            before = param.device
            param.data = file.tensor
            stack.callback(_read_back, param, file.tensor, before)
        elif place == "cpu" and param.device.type != "cpu":
            _move(stack, param, torch.device("cpu"))
    return [(param.data, there[name]) for name, param in params.items()]


def _read_back(param: torch.Tensor, held: torch.Tensor, device: torch.device) -> None:
    param.data = held.clone().to(device)


def _check_unshared(params: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters whose memory others have too, which would not have it after."""
    owners: dict[int, str] = {}
    for name, param in params.items():
        whole = param.untyped_storage()
        other = owners.setdefault(whole.data_ptr(), name) if param.numel() else name
        if other != name or whole.nbytes() != param.numel() * param.itemsize:
            msg = (
                f"af.placed: {name} shares its memory with {other if other != name else 'more'}"
                " and cannot go to the disk alone. Make them one nn.Parameter, or clone it."
            )
            raise ModelError(msg)


def _follow(
    stack: ExitStack, model: nn.Module, plan: DeviceMap, units: list[list[Part]]
) -> None:
    """Let inputs go to the device of each unit, and outputs back to that of the inputs."""
    where = {name: unit.device for unit in plan.units for name in unit.names}
    came: list[torch.device | None] = []

    def moving(device: torch.device) -> Any:
        def move(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(to_device([args, kwargs], device, opaque=False))

        return move

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensor_leaves([args, kwargs])
        came.append(given[0].device if given else None)

    def end(_module: nn.Module, _args: Any, output: Any) -> Any:
        device = came.pop()
        return output if device is None else to_device(output, device, opaque=False)

    for unit in units:
        place = where[unit[0].name]
        device = torch.device(plan.computes if place in {"cpu", DISK} else place)
        for module in [call.module for part in unit for call in calls_of(part)]:
            stack.callback(
                module.register_forward_pre_hook(
                    moving(device), prepend=True, with_kwargs=True
                ).remove
            )
    stack.callback(
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove
    )
    stack.callback(model.register_forward_hook(end, always_call=True).remove)
