# SPDX-License-Identifier: Apache-2.0
"""`on_devices`: run a model with modules on several devices, in host memory and on disk."""

import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import nn

from accelfn.errors import ArgumentError, CheckpointError, ModelError
from accelfn.plug import arguments, devices, files, tree
from accelfn.plug import model as models
from accelfn.weights import importing
from accelfn.weights.device_map import (
    DISK,
    DeviceMap,
    Part,
    calls_of,
    offloads,
    units_of,
)

# Offloaded parameters, which are copied to the device while their module computes.


@attrs.define(eq=False)
class Guest:
    """An offloaded parameter, and how many running modules use it now."""

    param: torch.Tensor
    home: torch.Tensor
    file: importing.Mapped | None
    device: torch.device
    ahead: torch.Tensor | None = None
    uses: int = 0

    def come(self) -> None:
        """Count one more module that uses the parameter. For the first, copy it there."""
        self.uses += 1
        if self.uses == 1:
            away = self.home.device != self.device
            if self.ahead is not None:
                self.param.data, self.ahead = self.ahead, None
            elif away:
                self.param.data = self.home.to(self.device)
            elif not files.is_aligned(self.home):
                self.param.data = self.home.clone()

    def go(self) -> None:
        """Count one module less that uses the parameter. After the last, release the copy."""
        self.uses -= 1
        if not self.uses:
            self.param.data = self.home
            if self.file is not None:
                self.file.drop()


# Prefetching: copy the next module's parameters on a stream, while a module computes.


@attrs.define(eq=False)
class Ahead:
    """Prefetches the parameters of the next module, while a module computes.

    Predicts the module that followed the last time that the same two modules were called.

    Attributes:
        device: the computing device.
        room: the maximum bytes of offloaded parameters on the device at the same time.
        side: the device stream for copies.
    """

    device: torch.device
    room: int
    side: Any
    _all: set[Guest] = attrs.field(factory=set, init=False)
    _sent: tuple[Guest, ...] = attrs.field(default=(), init=False)
    _last: tuple[tuple[Guest, ...], ...] = attrs.field(default=(), init=False)
    _next: dict[Any, tuple[Guest, ...]] = attrs.field(factory=dict, init=False)
    _runs: bool = attrs.field(default=False, init=False)

    @classmethod
    def on(cls, device: torch.device, room: int) -> "Ahead | None":
        """Create a prefetcher, or return None if the device cannot copy from pinned memory."""
        if not devices.can_pin(device):
            return None
        module: Any = torch.get_device_module(device)
        return cls(device, room, module.Stream(device))

    def within(self, stack: ExitStack, model: nn.Module) -> None:
        """Enable prefetching only in forward passes, because values may change between them."""
        stack.callback(self._turn, runs=False)
        add_hooks(
            stack,
            model,
            lambda *_: self._turn(runs=True),
            lambda *_: self._turn(runs=False),
        )

    def receive(self, guests: tuple[Guest, ...]) -> None:
        """Record a module's call. Wait for its parameters, and drop wrongly predicted copies."""
        if not self._runs:
            return
        self._all.update(guests)
        self._next[self._last] = guests
        self._last = (*self._last[-1:], guests)
        self._wait(guests)

    def send(self) -> None:
        """Prefetch the predicted parameters, if the device has room for them."""
        if not self._runs:
            return
        some = tuple(g for g in self._next.get(self._last, ()) if _can_be_sent(g))
        num_bytes = sum(guest.home.nbytes for guest in self._all if guest.uses)
        if not some or num_bytes + sum(g.home.nbytes for g in some) > self.room:
            return
        module: Any = torch.get_device_module(self.device)
        self._sent = some
        # allocate on the computing stream, because modules on that stream use and free the
        # memory
        targets = [torch.empty_like(g.home, device=self.device) for g in some]
        self.side.wait_stream(module.current_stream(self.device))
        with module.stream(self.side):
            for guest, target in zip(some, targets, strict=True):
                guest.ahead = target.copy_(guest.home, non_blocking=True)

    def _wait(self, guests: tuple[Guest, ...] = ()) -> None:
        """Let the computing stream wait for the copies. Drop all copies except for `guests`."""
        if not self._sent:
            return
        module: Any = torch.get_device_module(self.device)
        module.current_stream(self.device).wait_stream(self.side)
        for guest in self._sent:
            if guest not in guests:
                guest.ahead = None
        self._sent = ()

    def _turn(self, *, runs: bool) -> None:
        self._wait()
        self._runs, self._last = runs, ()


def _can_be_sent(guest: Guest) -> bool:
    away = guest.home.device != guest.device
    return away and not guest.uses and guest.home.is_pinned()


# Hooks that copy offloaded parameters before a module's forward, and release them after it.


def add_hooks(
    stack: ExitStack,
    module: nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
) -> None:
    """Add hooks before and after a module's forward, until the end of the block.

    The hook after a forward is also called if the forward raises an error.
    """
    hook = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    stack.callback(hook.remove)
    if after is not None:
        stack.callback(module.register_forward_hook(after, always_call=True).remove)


def let_in(
    stack: ExitStack, module: nn.Module, guests: tuple[Guest, ...], loader: Ahead | None
) -> None:
    """Add hooks that copy offloaded parameters before a module's forward, then release them.

    The parameters (guests) are also released if the forward raises an error.
    """

    def before(*_: Any) -> None:
        current = None if all(guest.uses for guest in guests) else loader
        if current is not None:
            current.receive(guests)
        for guest in guests:
            guest.come()
        if current is not None:
            current.send()
        if torch.is_grad_enabled():
            msg = (
                "af.on_devices: gradients are enabled in a forward pass, but offloaded parameters"
                " are released before a backward pass could use them. Remove torch.enable_grad()."
                " To train a model over several devices, use af.wrap_fsdp()."
            )
            raise ModelError(msg)

    def after(*_: Any) -> None:
        for guest in guests:
            guest.go()

    add_hooks(stack, module, before, after)


M = TypeVar("M", bound=nn.Module)


@contextmanager
def on_devices(
    model: M, plan: DeviceMap, *, weights: str | os.PathLike[str] | None = None
) -> Generator[M]:
    """In a `with` block: place a model's units as planned, for forward passes without gradients.

    Units on a device stay there until the end of the block. Offloaded units are copied to the
    plan's first device before their forward, and released after it. If the modules of a unit are
    called separately, each module is copied and released separately. Offloaded units are in host
    memory, or in memory-mapped files on the disk. Buffers are on the device where their unit
    computes. Inputs move from device to device, and the output returns to the device of the inputs.

    After the block, the model has no hooks, and its parameters have the same values on the same
    devices as before. Buffers keep the values that the forward passes or `weights` set.

    Args:
        model: a model with values, or a model that was created under `empty_weights`, with its
            values in `weights`. Values of units on "disk" are written to the disk.
        plan: a plan of `af.plan_devices` for this model, or a result of the plan's `moved`.
        weights: a safetensors file, a folder of such files, or an index file, with the values of
            parameters without values. The files are memory-mapped. Persistent buffers are read.

    Law: outputs are bitwise equal to those of the model on one device of the same kind.

    Cost: each forward reads the offloaded units. While a unit computes, the next unit (in the
        order of the previous pass) is copied from pinned host memory on a device stream, if the
        budget has room for both. Units on "disk" of a model with values are written to the
        disk, and read back at the end.

    Raises:
        ModelError: the model is already placed, different parameters share memory, or gradients
            are enabled in a forward.
        ArgumentError: the plan is for another model (the message names missing modules), or the
            model has values and you pass `weights`.
        CheckpointError: a parameter without values, or its buffer, is missing in `weights` or
            has another shape.
    """
    if not isinstance(model, nn.Module):
        msg = f"af.on_devices(model={model!r}, plan): expected a torch.nn.Module."
        raise ModelError(msg)
    units = units_of(model)
    _check_plan(plan, units)
    with ExitStack() as stack, torch.no_grad():
        named = {
            n: t for unit in units for part in unit for n, t in part.tensors.items()
        }
        values = _values(model, named, weights)
        sources = stack.enter_context(_fill_parameters(model, values))
        stack.enter_context(models.mark_placed(model))
        where = {name: unit.device for unit in plan.units for name in unit.names}
        # list the units again, after parameters were replaced
        unit_places = [(unit, where[unit[0].name]) for unit in units_of(model)]
        _settle(stack, model, plan, unit_places, sources)
        if plan.computes != "cpu":
            _follow(stack, model, plan, unit_places)
        yield model


def _runs_on(plan: DeviceMap, place: str) -> torch.device:
    """Return the device where the units at a place of a plan compute."""
    return torch.device(plan.computes if offloads(plan, place) else place)


def _check_plan(plan: DeviceMap, units: list[list[Part]]) -> None:
    if not isinstance(plan, DeviceMap):
        msg = (
            f"af.on_devices(model, plan={plan!r}): expected the result of af.plan_devices(model,"
            " budgets)."
        )
        raise ArgumentError(msg)
    for problem in _plan_problems(plan, units):
        msg = (
            f"af.on_devices(model, plan): the plan {problem}. Make a plan for this model:"
            " af.plan_devices(model, budgets)."
        )
        raise ArgumentError(msg)


def _plan_problems(plan: DeviceMap, units: list[list[Part]]) -> Iterator[str]:
    name_sets = [{part.name for part in unit} for unit in units]
    part_names = set[str]().union(*name_sets)
    plan_names = [name for unit in plan.units for name in unit.names]
    gaps = [name or "the model's own tensors" for name in part_names - {*plan_names}]
    if gaps:
        yield f"does not have {', '.join(sorted(gaps)[:10])} of this model"
    unknown = sorted({*plan_names} - part_names)
    twice = sorted({name for name in plan_names if plan_names.count(name) > 1})
    if unknown or twice:
        yield (
            "has modules that this model does not have, or has a module twice:"
            f" {', '.join([*unknown, *twice][:10])}"
        )
    for unit in plan.units:
        if {*unit.names} not in name_sets:
            yield f"places {unit.shown} as one unit, but this model has other units"
        if unit.device not in plan.budgets:
            yield f"has no budget for the device {unit.device!r} of {unit.shown}"


def _values(
    model: nn.Module,
    named: Mapping[str, torch.Tensor],
    weights: str | os.PathLike[str] | None,
) -> dict[int, importing.Mapped]:
    """Return memory-mapped values for parameters on meta, by the parameter's id."""
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    if not empty:
        if weights is None:
            return {}
        msg = (
            f"af.on_devices(weights={str(weights)!r}): the model {type(model).__name__} already"
            " has values. Leave out weights=, or create the model under af.empty_weights()."
        )
        raise ArgumentError(msg)
    if weights is None:
        msg = (
            f"af.on_devices: parameters of {type(model).__name__} have no values:"
            f" {', '.join(empty[:5])}. Pass the files with their values:"
            " af.on_devices(model, plan, weights=folder)."
        )
        raise ModelError(msg)
    sources = importing.map_weights(
        arguments.as_path("af.on_devices(weights=...)", weights, "a folder")
    )
    values = {id(named[name]): sources[name] for name in empty if name in sources}
    for name in empty:
        old = named[name]
        value = values.get(id(old))
        if value is None or not isinstance(old, nn.Parameter):
            problem = (
                "parameter {} is on the meta device, and no file has a tensor of this name. Pass"
                " the folder with this model's weights"
                if isinstance(old, nn.Parameter)
                else "buffer {} is on the meta device, and the files can fill only parameters"
                " there. Create the model under af.empty_weights(), which gives buffers values"
            )
            msg = (
                f"af.on_devices(weights={str(weights)!r}): the {problem.format(name)}."
            )
            raise CheckpointError(msg)
        new = value.tensor
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            msg = (
                f"{weights}: {name} is a {new.dtype} tensor of shape {tuple(new.shape)} in the"
                f" file, and {old.dtype} of shape {tuple(old.shape)} in the model. Create the"
                " model in the dtype of the file: memory-mapped values are not converted."
            )
            raise CheckpointError(msg)
    _fill_buffers(model, sources, weights)
    return values


def _fill_buffers(
    model: nn.Module,
    sources: Mapping[str, importing.Mapped],
    weights: str | os.PathLike[str],
) -> None:
    """Copy persistent buffers, such as running statistics, from the weights to the model.

    Raises:
        CheckpointError: a buffer is missing in the weights, or has another shape.
    """
    state = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state and not buffer.is_meta:
            names_of.setdefault(id(buffer), []).append(name)
    for names in names_of.values():  # a file has a shared buffer under one name
        name = next((name for name in names if name in sources), names[0])
        buffer = state[name]
        if name not in sources or sources[name].tensor.shape != buffer.shape:
            has = sources[name].tensor.shape if name in sources else None
            msg = (
                f"af.on_devices(weights={str(weights)!r}): the buffer {name} needs values of shape"
                f" {tuple(buffer.shape)}, but the files have"
                f" {'none' if has is None else f'shape {tuple(has)}'}. Pass the folder with this"
                " model's weights."
            )
            raise CheckpointError(msg)
        buffer.copy_(sources[name].tensor)


@contextmanager
def _fill_parameters(
    model: nn.Module, values: Mapping[int, importing.Mapped]
) -> Generator[dict[int, importing.Mapped]]:
    """In a `with` block: replace parameters on meta by parameters with memory-mapped values."""
    old = {id(p): p for p in model.parameters() if id(p) in values}
    new = {key: models.parameter_like(p, values[key].tensor) for key, p in old.items()}
    places = importing.places_of(model)

    def set_params(params: Mapping[int, nn.Parameter]) -> None:
        for key, param in params.items():
            for module, name in places[key]:
                setattr(module, name, param)

    try:
        set_params(new)
        yield {id(param): values[key] for key, param in new.items()}
    finally:
        set_params(old)


def _settle(
    stack: ExitStack,
    model: nn.Module,
    plan: DeviceMap,
    unit_places: list[tuple[list[Part], str]],
    sources: Mapping[int, importing.Mapped],
) -> None:
    """Move each unit to its device, and add hooks for offloaded units."""
    loader = Ahead.on(torch.device(plan.computes), plan.room)
    for unit, place in unit_places:
        runs = _runs_on(plan, place)
        tensors = {id(t): (n, t) for part in unit for n, t in part.tensors.items()}
        params = {n: t for n, t in tensors.values() if isinstance(t, nn.Parameter)}
        for name, tensor in tensors.values():
            if name not in params and tensor.device != runs:
                _move(stack, tensor, runs, keep=True)
        if not offloads(plan, place):
            for param in params.values():
                if param.device != runs or id(param) in sources:
                    _move(stack, param, runs, copy=id(param) in sources)
            continue
        homes = _homes(stack, params, place, plan, sources)
        guests = {id(g.param): g for g in (Guest(*home, runs) for home in homes)}
        for guest in guests.values():  # after Ctrl-C, some may still be on the device
            stack.callback(setattr, guest.param, "data", guest.home)
        for module, some in (call for part in unit for call in calls_of(part)):
            ids = dict.fromkeys(id(t) for t in some if id(t) in guests)
            let_in(stack, module, tuple(guests[key] for key in ids), loader)
    if loader is not None:
        loader.within(stack, model)


def _move(
    stack: ExitStack,
    tensor: torch.Tensor,
    device: torch.device,
    *,
    keep: bool = False,
    copy: bool = False,
) -> None:
    """Move a tensor until the end of the block. With `keep`, copy its values back then."""
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
    files_of: Mapping[int, importing.Mapped],
) -> list[tuple[torch.Tensor, torch.Tensor, importing.Mapped | None]]:
    """Move parameters to host memory or disk. Return them, their values and their files."""
    sources = {n: files_of.get(id(p)) for n, p in params.items()}
    write = {n: p for n, p in params.items() if place == DISK and sources[n] is None}
    if write:
        _check_unshared(write)
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                dir=str(plan.budgets[DISK]), prefix="af-placed-"
            )
        )
        path = Path(folder) / "unit.safetensors"
        files.write_tensors(
            path, {n: p.data for n, p in write.items()}, {"format": "pt"}
        )
        sources |= importing.map_weights(path)
    for name, param in params.items():
        file = sources[name]
        if name in write and file is not None:
            before = param.device
            param.data = file.tensor
            stack.callback(_read_back, param, file.tensor, before)
        elif place == "cpu" and param.device.type != "cpu":
            _move(stack, param, torch.device("cpu"))
    return [(param, param.data, sources[name]) for name, param in params.items()]


def _read_back(param: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    param.data = source.clone().to(device)


def _check_unshared(params: Mapping[str, torch.Tensor]) -> None:
    """Reject different parameters that share memory, because the disk would separate them."""
    owners: dict[int, str] = {}
    for name, param in params.items():
        storage = param.untyped_storage()
        other = owners.setdefault(storage.data_ptr(), name) if param.numel() else name
        if other != name or storage.nbytes() != param.numel() * param.itemsize:
            msg = (
                f"af.on_devices: {name} shares its memory with"
                f" {other if other != name else 'another tensor'}, so it cannot be moved to the"
                " disk separately. Use one nn.Parameter for both, or clone one of them."
            )
            raise ModelError(msg)


def _follow(
    stack: ExitStack,
    model: nn.Module,
    plan: DeviceMap,
    unit_places: list[tuple[list[Part], str]],
) -> None:
    """Add hooks that move inputs to each unit's device, and outputs to the inputs' device."""
    came: list[torch.device | None] = []

    def move(device: torch.device, _module: nn.Module, *inputs: Any) -> Any:
        return tuple(tree.to_device([*inputs], device, opaque=False))

    def begin(_module: nn.Module, *inputs: Any) -> None:
        tensors = tree.tensor_leaves([*inputs])
        came.append(tensors[0].device if tensors else None)

    def end(_module: nn.Module, _args: Any, output: Any) -> Any:
        device = came.pop()
        if device is None:
            return output
        return tree.to_device(output, device, opaque=False)

    for unit, place in unit_places:
        for module, _ in (call for part in unit for call in calls_of(part)):
            add_hooks(stack, module, partial(move, _runs_on(plan, place)))
    add_hooks(stack, model, begin, end)
