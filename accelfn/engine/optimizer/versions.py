# SPDX-License-Identifier: Apache-2.0
"""Versions of what an optimizer holds: whether an update that raised had changed anything.

torch counts the operations that change a tensor, so nothing need be copied to know. It does
not count what its kernels on lists of tensors do, nor what is written through `param.data` or
by a kernel of one's own; therefore only torch's own optimizers are believed, and only where
they go from tensor to tensor.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.structure.partition import is_torchs, parts_of

_version = attrgetter("_version")


class Versions:
    """Those of the parameters of an optimizer, and of the state that it has now."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Take the optimizer; of one that is not believed, nothing is looked at."""
        is_known = all(map(_is_known, parts_of(optimizer)))
        states = list(cast("Any", optimizer.state).values()) if is_known else []
        self._tensors = _tensors_of(states, optimizer.param_groups) if is_known else []
        self._is_sure = is_known and all(map(_counts, self._tensors))
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]]
        self._entries = [(entry, dict(entry)) for entry in states]
        self._counting = [
            i for i, (entry, _) in enumerate(self._entries) if _has_numbers(entry)
        ]
        self._count = -1

    def begin(self) -> None:
        """Note how all is before an update."""
        if not self._is_sure:
            return
        self._count = sum(map(_version, self._tensors))
        for i in self._counting:
            entry, _ = self._entries[i]
            self._entries[i] = (entry, dict(entry))

    @property
    def is_untouched(self) -> bool:
        """Whether all is, for sure, as it was before the update."""
        if not self._is_sure or self._count != sum(map(_version, self._tensors)):
            return False
        return all(_is_same(entry, kept) for entry, kept in self._entries)


def _tensors_of(
    states: Iterable[dict[str, Any]], groups: Iterable[dict[str, Any]]
) -> list[torch.Tensor]:
    params = [param for group in groups for param in group["params"]]
    held = [each for entry in (*states, *groups) for each in entry.values()]
    return params + [each for each in held if isinstance(each, torch.Tensor)]


def _counts(tensor: torch.Tensor) -> bool:
    """Whether torch counts what changes a tensor."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_inference()


def _is_known(optimizer: Optimizer) -> bool:
    """Whether its step is torch's alone, and goes from tensor to tensor."""
    goes_by_lists = any(map(_goes_by_lists, optimizer.param_groups))
    return is_torchs(optimizer) and not goes_by_lists


def _goes_by_lists(group: dict[str, Any]) -> bool:
    """Whether torch updates a group by kernels on lists, which on the CPU is no default."""
    if group.get("foreach") or group.get("fused"):
        return True
    is_open = group.get("foreach", False) is None
    return is_open and any(param.device.type != "cpu" for param in group["params"])


def _has_numbers(entry: dict[str, Any]) -> bool:
    return not all(isinstance(each, torch.Tensor) for each in entry.values())


def _is_same(entry: dict[str, Any], kept: dict[str, Any]) -> bool:
    same = entry.keys() == kept.keys()
    return same and all(entry[key] is each for key, each in kept.items())
