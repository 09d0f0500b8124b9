# SPDX-License-Identifier: Apache-2.0
"""What a module, or an optimizer, counts on or writes into for itself, which no state has."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base.advice import advise

_PASSES = 4
"""Forward passes that are looked at: three times the same change is a count, or a decay.

What a pass notes of its batch, as the length of its sequences, changes otherwise.
"""
_Numbers: TypeAlias = dict[tuple[str, str], float]


class Counters:
    """Looks at what objects keep beside a state, in the first passes or updates.

    torch's own keep nothing there, and are not looked at.
    """

    def __init__(self, owners: Iterable[tuple[str, object]], said: str) -> None:
        """Begin before the first of these, with names of the objects, and what is said at last."""
        self._owners = [
            (path or type(owner).__name__, owner)
            for path, owner in owners
            if not type(owner).__module__.startswith("torch.")
        ]
        self._said, self._seen = said, list[_Numbers]()

    @classmethod
    def of_modules(cls, module: nn.Module) -> "Counters":
        """Return what looks at a module's parts, behind each forward pass."""
        return cls(module.named_modules(), _OF_MODULES)

    @classmethod
    def of_optimizers(cls, optimizers: Iterable[Optimizer]) -> "Counters":
        """Return what looks at optimizers, behind each update."""
        return cls((("", each) for each in optimizers), _OF_OPTIMIZERS)

    def look(self) -> bool:
        """Look behind a pass, and say at last if one counts; return whether to look again."""
        self._seen.append(
            {
                (path, name): value
                for path, owner in self._owners
                for name, value in _numbers(vars(owner))
            }
        )
        if len(self._seen) < _PASSES:
            return True
        first, *later = self._seen
        told = {
            f"{path}.{name}": values
            for (path, name), value in first.items()
            if _counts(values := [value, *(each.get((path, name)) for each in later)])
        }
        if told:
            advise(self._said.format(_shown(told)))
        return False


def _numbers(kept: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what are numbers, those that a dict has, and how long lists are, by name.

    Of a tensor it is how often it was written into: one that is new in each pass never was more.
    """
    for name, value in kept.items():
        if type(value) in (int, float):
            yield name, value
        elif type(value) is torch.Tensor:
            yield from _of_tensor(name, value)
        elif type(value) is list:
            yield f"{name}'s length", len(value)
        elif type(value) is dict and not name.startswith("_"):
            found = cast("dict[Any, Any]", value).items()
            yield from (
                (f"{name}[{key!r}]", each)
                for key, each in found
                if type(each) in (int, float)
            )


def _of_tensor(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, float]]:
    if not tensor.is_inference():  # which has no version
        yield f"{name}'s number of writes", tensor._version
    is_number = tensor.dtype != torch.bool and not tensor.is_complex()
    if tensor.numel() == 1 and is_number and not tensor.is_meta:
        yield name, tensor.item()


def _counts(values: list[Any]) -> bool:
    """Whether numbers change, and each time by the same, or in the same ratio."""
    if None in values or values[0] == values[1] or not all(map(math.isfinite, values)):
        return False
    pairs = list(pairwise(values))
    if all(math.isclose(b - a, values[1] - values[0]) for a, b in pairs):
        return True
    return all(values[:-1]) and all(
        math.isclose(b / a, values[1] / values[0]) for a, b in pairs
    )


def _shown(told: dict[str, list[Any]]) -> str:
    return "; ".join(
        f"{name} was {', then '.join(map(repr, values))}"
        for name, values in list(told.items())[:3]
    )


_OF_MODULES = (
    "As the loss function ran, {}. What a module keeps for itself is no part of a"
    " state: it is not saved, a run that is resumed begins it again, and copies of the state"
    " share it. Make it a buffer, register_buffer('name', torch.tensor(0)). If nothing is"
    " computed from it, all is well."
)
_OF_OPTIMIZERS = (
    "As the optimizer stepped, {}. What an optimizer keeps for itself is no part of a"
    " state: it is not saved, and a run that is resumed begins it again. Keep it in a parameter"
    " group, group['name'], or in self.state[param], which are. If nothing is computed from it,"
    " all is well."
)
