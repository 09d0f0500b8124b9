# SPDX-License-Identifier: Apache-2.0
"""`plan_devices`: assign the units of a model to devices, host memory and disk."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.errors import ArgumentError, ModelError
from accelfn.plug import arguments

# The units of a model, in the order of the model. A unit is placed as a whole.
#
# A block is a member of an outermost `nn.ModuleList`, or a module of a class that the model
# names in `_no_split_modules`, as in Transformers. Each block is a unit. Each largest module
# without blocks is a unit. The direct tensors of a module that contains blocks form a unit, with
# the tensors of its parameter lists, which are never called. Units that share a tensor are merged.


@attrs.frozen(eq=False)
class Part:
    """A module of a unit, with the tensors that its forward needs, by their names in the model."""

    name: str
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]


def calls_of(part: Part) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Return the modules of a part that may be called separately, with their tensors.

    For example, a loop may call the members of a container, and a method other than `forward`
    may call the submodules of a module.
    """
    calls = [(part.module, [*part.tensors.values()])]
    ids = {*map(id, part.tensors.values())}
    for module in part.module.modules():
        tensors = [*_direct_tensors("", module).values()]
        if module is not part.module and tensors and {*map(id, tensors)} <= ids:
            calls.append((module, tensors))
    return calls


def units_of(model: nn.Module) -> list[list[Part]]:
    """Return the units of a model, each as a list of its modules."""
    units: list[list[Part]] = []
    owners: dict[Any, list[Part]] = {}
    for part in _parts(model):
        if not part.tensors:
            continue
        keys = [_key(tensor) for tensor in part.tensors.values()]
        peers = {id(owners[key]): owners[key] for key in keys if key in owners}
        unit, *rest = sorted(peers.values(), key=units.index) or [list[Part]()]
        for other in rest:
            unit += other
            units.remove(other)
        if not unit:
            units.append(unit)
        unit.append(part)
        for member in unit:
            owners |= {_key(tensor): unit for tensor in member.tensors.values()}
    return units


def _key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that share their memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()


def _parts(model: nn.Module) -> Iterator[Part]:
    blocks = _blocks(model)
    ids = set[int]()

    def walk(name: str, module: nn.Module) -> Iterator[Part]:
        if id(module) in ids:
            return
        ids.add(id(module))
        inside = [m for m in module.modules() if m is not module]
        lacks_blocks = name and not any(id(item) in blocks for item in inside)
        if not inside and not _has_forward(module):
            return  # its tensors belong to the enclosing module
        if id(module) in blocks or lacks_blocks or not inside:
            yield Part(name, module, named_tensors(name, module, recurse=True))
            return
        if _has_forward(module) or not name:
            yield Part(name, module, _direct_tensors(name, module))
        for child, submodule in module.named_children():
            yield from walk(f"{name}.{child}" if name else child, submodule)

    yield from walk("", model)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _direct_tensors(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the direct tensors of a module, and of its containers without a forward."""
    tensors = named_tensors(name, module, recurse=False)
    for child, submodule in module.named_children():
        if not _has_forward(submodule):
            tensors |= _direct_tensors(f"{name}.{child}" if name else child, submodule)
    return tensors


def named_tensors(
    name: str, module: nn.Module, *, recurse: bool
) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers, under all their names in the model."""
    prefix = f"{name}." if name else ""
    params = module.named_parameters(recurse=recurse, remove_duplicate=False)
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    return {prefix + key: tensor for some in (params, buffers) for key, tensor in some}


def _blocks(model: nn.Module) -> set[int]:
    """Return the ids of the outermost modules that must be on one device."""
    kinds: Any = [getattr(m, "_no_split_modules", None) for m in model.modules()]
    names = {name for some in kinds for name in some or ()}
    ids = set[int]()

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) or type(child).__name__ in names:
                ids.add(id(child))
            else:
                walk(child)

    walk(model)
    return ids


DISK = "disk"


@attrs.frozen
class Unit:
    """Modules that are placed together.

    Attributes:
        names: the names of the modules. Modules that share tensors are in one unit.
        num_bytes: the bytes of parameters and buffers. Shared tensors count once.
        buffer_bytes: the bytes of buffers, which are on the device where the unit computes.
        device: where the unit is: a device, or "disk".
    """

    names: tuple[str, ...]
    num_bytes: int = attrs.field(kw_only=True)
    buffer_bytes: int = attrs.field(kw_only=True)
    device: str = attrs.field(kw_only=True)

    @property
    def shown(self) -> str:
        """The unit's name in a table."""
        return " + ".join(name or "(the model's own)" for name in self.names)


@attrs.frozen
class DeviceMap:
    """The device of each unit of a model. `print` shows a table.

    Attributes:
        units: the units, in the order of the model.
        budgets: the bytes for each device, and a folder for "disk".
    """

    units: tuple[Unit, ...]
    budgets: Mapping[str, int | Path] = attrs.field(
        kw_only=True, converter=copy.deepcopy
    )

    def __attrs_post_init__(self) -> None:
        """Raise an error if the units on a device need more bytes than its budget."""
        for device, budget in self.budgets.items():
            need = self.needed(device)
            if isinstance(budget, int) and need > budget:
                guests = _at_once(self._offloaded_units())
                guests = guests if device == self.computes else []
                coming = (
                    f", of which {arguments.format_bytes(_coming(guests))} are for offloaded"
                    f" units while they compute ({', '.join(unit.shown for unit in guests)})"
                    if guests
                    else ""
                )
                msg = (
                    f"af.plan_devices(budgets={{{device!r}: ...}}):"
                    f" a budget of {arguments.format_bytes(budget)} is too small. The device"
                    f" needs {arguments.format_bytes(need)}{coming}. Increase the budget: accelfn"
                    " never splits a unit."
                )
                raise ArgumentError(msg)

    @property
    def computes(self) -> str:
        """The device where offloaded units compute: the first accelerator, or the CPU."""
        devices = [budget for budget in self.budgets if budget not in {"cpu", DISK}]
        return devices[0] if devices else "cpu"

    def needed(self, device: str) -> int:
        """Return the peak bytes that a device needs while the model computes.

        While an inner module computes, the offloaded tensors of its enclosing modules are also
        on the device, so they count.
        """
        away = self._offloaded_units() if device == self.computes else []
        return _num_bytes(self.units, device) + _visiting(away)

    @property
    def room(self) -> int:
        """The bytes on the computing device that offloaded parameters may use."""
        budget = self.budgets.get(self.computes)
        free = budget - self.needed(self.computes) if isinstance(budget, int) else 0
        return free + _coming(_at_once(self._offloaded_units()))

    def moved(self, name: str, device: str) -> "DeviceMap":
        """Return a map with one unit moved to another device.

        Args:
            name: the name of a module of the unit.
            device: a device with a budget, or "disk".

        Raises:
            ArgumentError: the name or the device is unknown, or a budget is too small.
        """
        if device not in self.budgets:
            places = ", ".join(map(repr, self.budgets))
            msg = f"plan.moved({name!r}, {device!r}): the plan has budgets only for {places}."
            raise ArgumentError(msg)
        if not any(name in unit.names for unit in self.units):
            names = [name for unit in self.units for name in unit.names]
            some = ", ".join(map(repr, names[:20]))
            msg = f"plan.moved({name!r}, ...): no unit has this name. The units are {some}."
            raise ArgumentError(msg)
        units = [
            attrs.evolve(unit, device=device) if name in unit.names else unit
            for unit in self.units
        ]
        return attrs.evolve(self, units=tuple(units))

    _repr_html_ = arguments.text_as_html

    def __str__(self) -> str:
        """Return a table of units, sizes and devices."""
        rows = [("unit", "size", "where")]
        for unit in self.units:
            size = arguments.format_bytes(unit.num_bytes)
            rows.append((unit.shown, size, unit.device))
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(
            f"{n:<{first}}  {size:>{second}}  {at}" for n, size, at in rows
        )

    def _offloaded_units(self) -> list[Unit]:
        return [unit for unit in self.units if offloads(self, unit.device)]


def offloads(plan: DeviceMap, device: str) -> bool:
    """Return whether the units that a plan places on a device compute on another device."""
    return device in {"cpu", DISK} - {plan.computes}


def plan_devices(
    model: nn.Module, budgets: Mapping[str, int | str | os.PathLike[str]]
) -> DeviceMap:
    """Assign each unit of a model to a device, within the budgets of the devices.

    Units fill the devices in order. A block is a member of an `nn.ModuleList`, or a module of a
    class in the model's `_no_split_modules`. Each block is a unit, each largest module without
    blocks is a unit, and the direct tensors of a module that contains blocks are a unit. Units
    that share a tensor are merged. Units are never split. Units on the CPU or the disk are
    offloaded: they compute on the first accelerator of the budgets, or otherwise on the CPU. The
    budget of this device must also have room for the largest offloaded unit and the direct
    tensors of its enclosing modules.

    Args:
        model: the model, which is not changed. It may be created under `empty_weights`.
        budgets: for each device, such as "cuda:0" and "cpu", a number of bytes or a text such as
            "20GiB". For "disk", an existing folder.

    Cost: only reads the sizes of tensors.

    Raises:
        ArgumentError: a budget is too small for a unit, invalid, or for an unknown device.
        ModelError: the model is not a module.
    """
    if not isinstance(model, nn.Module):
        msg = f"af.plan_devices(model={model!r}): expected a torch.nn.Module."
        raise ModelError(msg)
    limits = _limits(budgets)
    units = [_unit(parts) for parts in units_of(model)]
    empty = DeviceMap((), budgets=limits)
    order = sorted(limits, key=lambda device: device == DISK)
    plan, at = list[Unit](), 0
    for number, unit in enumerate(units):
        while True:
            if at == len(order):
                raise ArgumentError(_too_small(unit, limits))
            device, limit = order[at], limits[order[at]]
            trial = attrs.evolve(unit, device=device)
            takes_guests = device == empty.computes and device != order[-1]
            rest = units[number + 1 :] if takes_guests else []
            if not isinstance(limit, int) or _fits([*plan, trial], rest, device, limit):
                plan.append(trial)
                break
            at += 1
    return DeviceMap(tuple(plan), budgets=limits)


def _fits(plan: list[Unit], rest: list[Unit], device: str, limit: int) -> bool:
    """Return whether a device has room for its units and for `rest`, placed or offloaded."""
    all_there = sum(unit.num_bytes for unit in rest)
    return _num_bytes(plan, device) + min(all_there, _visiting(rest)) <= limit


def _num_bytes(units: Iterable[Unit], device: str) -> int:
    return sum(unit.num_bytes for unit in units if unit.device == device)


def _visiting(away: list[Unit]) -> int:
    """Return the peak bytes that offloaded units need on the computing device."""
    return _coming(_at_once(away)) + sum(unit.buffer_bytes for unit in away)


def _coming(guests: list[Unit]) -> int:
    return sum(unit.num_bytes - unit.buffer_bytes for unit in guests)


def _at_once(away: list[Unit]) -> list[Unit]:
    """Return the offloaded units that are on the device at the same time, at the peak."""
    groups = [
        [unit for unit in away if any(is_within(name, key) for key in unit.names)]
        for name in dict.fromkeys(name for unit in away for name in unit.names)
    ]
    return max(groups, key=_coming, default=[])


def is_within(name: str, module: str) -> bool:
    """Return whether the module `name` is `module`, or inside `module`."""
    return module in ("", name) or name.startswith(f"{module}.")


def _too_small(unit: Unit, limits: Mapping[str, int | Path]) -> str:
    memory = {n: b for n, b in limits.items() if isinstance(b, int)}
    sizes = ", ".join(f"{n!r}: {arguments.format_bytes(b)}" for n, b in memory.items())
    return (
        f"af.plan_devices(budgets={{{sizes}}}): after the units before it, no device has room for"
        f" the unit {unit.shown!r} of {arguments.format_bytes(unit.num_bytes)}. Units are never"
        ' split. Increase a budget, or add "disk": folder.'
    )


def _unit(parts: Iterable[Part]) -> Unit:
    tensors = {id(t): t for part in parts for t in part.tensors.values()}
    buffers = [t for t in tensors.values() if not isinstance(t, nn.Parameter)]
    return Unit(
        tuple(part.name for part in parts),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        device="",
    )


def _limits(budgets: object) -> dict[str, int | Path]:
    if not isinstance(budgets, Mapping) or not budgets or {*budgets} == {DISK}:
        msg = (
            f"af.plan_devices(budgets={budgets!r}): expected bytes by device, such as"
            ' {"cuda:0": "20GiB", "cpu": "60GiB", "disk": folder}, with at least one device'
            " other than the disk."
        )
        raise ArgumentError(msg)
    limits: dict[str, int | Path] = {}
    for name, budget in budgets.items():
        where = f"af.plan_devices(budgets={{{name!r}: {budget!r}}})"
        if name == DISK:
            limits[DISK] = folder = arguments.as_path(where, budget, "a folder")
            if not arguments.is_directory(folder):
                msg = f"{where}: the folder does not exist."
                raise ArgumentError(msg)
            continue
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
            msg = f"{where}: this machine has no device {name!r}: {error}"
            raise ArgumentError(msg) from error
        if device.type == "meta":
            msg = f"{where}: tensors on the meta device have no values. Name a real device."
            raise ArgumentError(msg)
        limits[str(device)] = arguments.parse_bytes(where, budget)
    return limits
