# SPDX-License-Identifier: Apache-2.0
"""The units of a model: modules whose parameters are gathered together.

A parameter is of the unit that is nearest above it; what lies in none is of the root.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from accelfn.engine.module.regions import Regions, chosen, has_forward
from accelfn.errors import ModelError

ROOT = "the rest of the model"
_TABLES = nn.Embedding, nn.EmbeddingBag


def units_of(module: nn.Module, regions: Regions | None, whose: str) -> list[nn.Module]:
    """Return the modules that are units; by default the members of lists of modules.

    Raises:
        ModelError: no module is one of `regions`; the classes that there are are named.
    """
    if regions is not None:
        return chosen(module, regions, whose)
    members = [
        member
        for each in _outermost_lists(module)
        for member in _callable_members(each)
        if next(member.parameters(), None) is not None
    ]
    return list({id(member): member for member in members}.values())


def _callable_members(container: nn.Module) -> Iterator[nn.Module]:
    """Yield members that have a forward, also those of containers inside this one."""
    for member in container.children():
        if has_forward(member):
            yield member
        else:
            yield from _callable_members(member)


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of modules that lie in no other: of blocks, not of what blocks have."""
    if isinstance(module, nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in _outermost_lists(child)]


def check_units(module: nn.Module, units: list[nn.Module], whose: str) -> None:
    """Refuse units that torch cannot gather, or would gather twice.

    Args:
        module: the whole.
        units: parts of it.
        whose: who asks.

    Raises:
        ModelError: a parameter is in two units, a unit has parameters of two dtypes, or a
            layer has sparse gradients.
    """
    _refuse_sparse(module, whose)
    names = {id(unit): name for name, unit in module.named_modules()}
    members: dict[str, dict[str, nn.Parameter]] = {}
    owner: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, module, {id(each) for each in units}, names)
        if owner.setdefault(id(param), unit) != unit:
            msg = (
                f"{whose}: {name!r} is tied to a parameter of another unit: of"
                f" {owner[id(param)]}, and of {unit}. Each would gather it for itself. Give"
                " units= that have both in one, or in none."
            )
            raise ModelError(msg)
        members.setdefault(unit, {})[name] = param
    for unit, params in members.items():
        _check_dtypes(unit, params, whose)


def _unit_of(
    name: str, module: nn.Module, units: set[int], names: Mapping[int, str]
) -> str:
    """Return what the unit of a parameter is called."""
    path = name.split(".")[:-1]
    for length in range(len(path), 0, -1):
        each = module.get_submodule(".".join(path[:length]))
        if id(each) in units:
            return f"unit {names[id(each)]!r}"
    return ROOT


def _refuse_sparse(module: nn.Module, whose: str) -> None:
    """Refuse layers whose gradients name rows, of which torch reduces no parts."""
    for name, each in module.named_modules():
        if isinstance(each, _TABLES) and each.sparse and each.weight.requires_grad:
            msg = (
                f"{whose}: the gradient of {f'{name}.weight'.lstrip('.')!r} is sparse, and"
                " torch reduces parts of dense ones alone. Make that layer with sparse=False,"
                " or train it by af.wrap_ddp()."
            )
            raise ModelError(msg)


def _check_dtypes(unit: str, params: Mapping[str, nn.Parameter], whose: str) -> None:
    """Refuse two dtypes, for a unit is gathered as one tensor; and complex numbers."""
    first: dict[torch.dtype, str] = {}
    for name, param in params.items():
        if param.ndim:  # a lone number is not split
            first.setdefault(param.dtype, name)
    if any(dtype.is_complex for dtype in first):
        name = next(name for dtype, name in first.items() if dtype.is_complex)
        msg = (
            f"{whose}: {name!r} is complex, and torch gathers real numbers alone. Hold its"
            " real view (torch.view_as_real) as the parameter."
        )
        raise ModelError(msg)
    if len(first) > 1:
        listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
        msg = (
            f"{whose}: {unit} has parameters of several dtypes, but is gathered as one"
            f" tensor: {listed}. Make them of one dtype, or give units= that have one each."
        )
        raise ModelError(msg)
