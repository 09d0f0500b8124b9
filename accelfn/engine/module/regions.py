# SPDX-License-Identifier: Apache-2.0
"""Parts of a model by class or by predicate, for what is done to some of its modules."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

from torch import nn

from accelfn.errors import ArgumentError, ModelError

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Regions: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...] | Predicate


def are_regions(call: str, value: object) -> None:
    """Refuse what is no module class, several, or a predicate.

    Raises:
        ArgumentError: `value` is something else; `call` is where it was given.
    """
    several = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
    classes = [isinstance(each, type) for each in several]
    fit = all(
        isinstance(each, type) and issubclass(each, nn.Module) for each in several
    )
    predicate = callable(value) and not isinstance(value, nn.Module) and not classes[0]
    if value is not None and not (several and fit) and not predicate:
        msg = (
            f"{call}: expected a class of modules, a tuple of them, or a function (name,"
            " module) -> bool."
        )
        raise ArgumentError(msg)


def chosen(module: nn.Module, regions: Regions | None, whose: str) -> list[nn.Module]:
    """Return the modules that are meant, without those that lie inside another of them.

    None means the model's own children; of a container without a forward, its members.

    Raises:
        ModelError: there is none, and the error names the classes that exist; or a module
            has no forward, so nothing ever calls it.
    """
    is_meant: Predicate
    if isinstance(regions, (type, tuple)):
        is_meant = partial(_is_of, cast("Any", regions))
    elif regions is None:
        is_meant = _is_child
    else:
        is_meant = regions
    found = _outermost(module, "", is_meant)
    if not found:
        names = sorted({type(each).__qualname__ for each in module.modules()})
        msg = (
            f"{whose}: no module of {type(module).__qualname__} is meant. There are modules"
            f" of the classes {', '.join(names)}."
        )
        raise ModelError(msg)
    unique = {id(each): each for each in found}
    for each in unique.values():
        _check_forward(each, module, whose)
    return list(unique.values())


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, as `nn.ModuleList` cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _check_forward(region: nn.Module, module: nn.Module, whose: str) -> None:
    if has_forward(region):
        return
    name = next(name for name, each in module.named_modules() if each is region)
    kinds = sorted({type(each).__qualname__ for each in region.children()})
    way = f"its members, by their class: {', '.join(kinds)}"
    msg = (
        f"{whose}: {name!r} is a {type(region).__qualname__}, which has no forward and is"
        " never called, so nothing can happen around its call. Choose"
        f" {way if kinds else 'the module that uses it'}."
    )
    raise ModelError(msg)


def _is_of(classes: Any, _: str, module: nn.Module) -> bool:
    return isinstance(module, classes)


def _is_child(name: str, module: nn.Module) -> bool:
    return bool(name) and has_forward(module)


def _outermost(module: nn.Module, name: str, is_meant: Predicate) -> list[nn.Module]:
    if is_meant(name, module):
        return [module]
    return [
        found
        for key, child in module.named_children()
        for found in _outermost(child, f"{name}.{key}" if name else key, is_meant)
    ]
