# SPDX-License-Identifier: Apache-2.0
"""The units of a model: modules that are in one place whole, in the order of the model.

A block is a member of an `nn.ModuleList` that lies in no other, or a module of a class that
the model names in `_no_split_modules`, as those of Transformers do. A block is a unit, and so
is each largest module that has no block in it; the tensors that a module around them has itself
are one, too, with those of lists of parameters, which nobody calls. Units with a tensor in common
are one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn


@attrs.frozen(eq=False)
class Part:
    """A module of a unit, and which tensors come for its forward, by their names in the model."""

    name: str
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class Call:
    """A module that may be called by itself, and which tensors it needs then."""

    module: nn.Module
    tensors: tuple[torch.Tensor, ...]


def calls_of(part: Part) -> list[Call]:
    """Return what may be called of a part: itself, or modules in it one by one.

    A container's members may be called in a loop, and those of a module by another method than
    its forward.
    """
    inside = [each for each in part.module.modules() if each is not part.module]
    calls = [Call(each, tuple(_own("", each).values())) for each in inside]
    itself = Call(part.module, tuple(part.tensors.values()))
    whole = {id(tensor) for tensor in itself.tensors}
    return [
        itself,
        *(c for c in calls if c.tensors and {*map(id, c.tensors)} <= whole),
    ]


def units_of(model: nn.Module) -> list[list[Part]]:
    """Return the units of a model, each with its modules."""
    units: list[list[Part]] = []
    owners: dict[Any, list[Part]] = {}
    for part in _parts(model):
        if not part.tensors:
            continue
        keys = [_key(tensor) for tensor in part.tensors.values()]
        unit = [part]
        met = {id(owners[key]): owners[key] for key in keys if key in owners}
        if met:
            unit, *others = sorted(met.values(), key=units.index)
            for other in others:
                unit += other
                units.remove(other)
            unit.append(part)
        else:
            units.append(unit)
        for each in unit:
            owners |= {_key(tensor): unit for tensor in each.tensors.values()}
    return units


def _key(tensor: torch.Tensor) -> Any:
    """Return what is equal for tensors that share their memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()


def _parts(model: nn.Module) -> Iterator[Part]:
    blocks = _blocks(model)
    seen = set[int]()

    def walk(name: str, module: nn.Module) -> Iterator[Part]:
        if id(module) in seen:
            return
        seen.add(id(module))
        inside = [each for each in module.modules() if each is not module]
        whole = name and not any(id(each) in blocks for each in inside)
        if not inside and not _has_forward(module):
            return  # its tensors are those of the module around it
        if id(module) in blocks or whole or not inside:
            yield Part(name, module, _named(name, module, recurse=True))
            return
        if _has_forward(module) or not name:
            yield Part(name, module, _own(name, module))
        for child, each in module.named_children():
            yield from walk(f"{name}.{child}" if name else child, each)

    yield from walk("", model)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _own(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module has itself, or in lists that have no forward."""
    found = _named(name, module, recurse=False)
    for child, each in module.named_children():
        if not _has_forward(each):
            found |= _own(f"{name}.{child}" if name else child, each)
    return found


def _named(name: str, module: nn.Module, *, recurse: bool) -> dict[str, torch.Tensor]:
    prefix = f"{name}." if name else ""
    params = module.named_parameters(recurse=recurse, remove_duplicate=False)
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    return {
        prefix + each: tensor for some in (params, buffers) for each, tensor in some
    }


def _blocks(model: nn.Module) -> set[int]:
    """Return which modules are blocks, outermost ones only."""
    kinds: Any = [getattr(each, "_no_split_modules", None) for each in model.modules()]
    names = {name for some in kinds for name in some or ()}
    found = set[int]()

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) or type(child).__name__ in names:
                found.add(id(child))
            else:
                walk(child)

    walk(model)
    return found
