# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward pass writes (BatchNorm's statistics), kept pure.

A forward pass has copies; the state's own are written only when the update is applied. Large
ones (masks, tables) are copied too, twice an update: whether a pass wrote one shows in its
values alone, for neither BatchNorm nor a write to `.data` counts as a version, and comparing
two tensors takes as long as copying one (64 MiB on a CPU: 10 ms by bits, 40 by numbers).
"""

from collections.abc import Mapping
from typing import TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import lists
from accelfn.base.valueless import is_set_to
from accelfn.errors import ModelError

Table: TypeAlias = dict[str, torch.Tensor | None]


@attrs.frozen(eq=False)
class _Buffer:
    """Where a buffer stands in the module, and the tensor object that stays there."""

    name: str
    table: Table
    key: str
    tensor: torch.Tensor


class Buffers:
    """The buffers of an engine's module."""

    def __init__(self, module: nn.Module) -> None:
        """Find them; a shared buffer counts once."""
        self._tables: list[tuple[str, Table, Table]] = []
        found: dict[int, _Buffer] = {}
        self._fixed: list[tuple[str, Table, str, torch.Tensor | None]] = []
        for path, owner in module.named_modules():
            table = owner._buffers  # pyright: ignore[reportPrivateUsage]
            self._tables.append((path, table, dict(table)))
            for key, tensor in table.items():
                name = _named(path, key)
                if tensor is None or id(tensor) in found:
                    self._fixed.append((name, table, key, tensor))
                else:
                    found[id(tensor)] = _Buffer(name, table, key, tensor)
        self._found = list(found.values())
        self._num_keys = [len(before) for _, _, before in self._tables]
        self._assigned: dict[str, _Buffer] = {}
        self._home: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's buffers."""
        self._home = dict(home)
        for each in self._found:
            self._place(each, home[each.name].clone())

    def begin(self, written: Mapping[str, torch.Tensor]) -> None:
        """Put values in place for a forward pass: the state's, or what was `written` since."""
        sources = {name: written.get(name, own) for name, own in self._home.items()}
        for name, each in self._assigned.items():
            if self._scratch[name].shape != sources[name].shape:
                self._place(each, sources[name].clone())
        stale = [n for n, source in sources.items() if source is not self._scratch[n]]
        if stale:
            lists.copy_([self._scratch[n] for n in stale], [sources[n] for n in stale])

    def end(self) -> dict[str, torch.Tensor]:
        """Return the buffers after forward passes, by name; unless left, the next reuses them.

        Raises:
            ModelError: a pass made or removed one, or gave one another dtype or device.
        """
        self._check_places()
        for each in self._found:
            current, own = each.table.get(each.key), each.tensor
            if current is not own or not is_set_to(own, self._scratch[each.name]):
                self._take(each, current)
        return dict(self._scratch)

    def leave(self) -> None:
        """Leave what the last pass wrote to who holds it; the next one writes elsewhere."""
        for each in self._found:
            self._place(each, torch.empty_like(self._scratch[each.name]))

    def abandon(self) -> None:
        """Forget a forward pass that raised."""
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
        for each in self._found:
            self._place(each, self._scratch[each.name])

    def commit(
        self, written: Mapping[str, torch.Tensor], skip: torch.Tensor | None = None
    ) -> None:
        """Write the values into the state's own buffers; where `skip` is 1, nothing."""
        for name, value in written.items():
            if self._home[name].shape != value.shape:
                self._home[name].data = value.clone()
        own = [self._home[name] for name in written]
        new = [*written.values()]
        if skip is not None:
            pairs = zip(own, new, strict=True)
            new = [torch.where(skip != 0, old, value) for old, value in pairs]
        lists.copy_(own, new)

    def keep_shapes(self, written: Mapping[str, torch.Tensor]) -> bool:
        """Whether the values fit into the state's own buffers, so that a device can decide."""
        return all(self._home[n].shape == value.shape for n, value in written.items())

    def _place(self, each: _Buffer, values: torch.Tensor) -> None:
        """Let the module's buffer have these values, as its memory."""
        self._scratch[each.name] = values
        each.tensor.data = values

    def _take(self, each: _Buffer, current: torch.Tensor | None) -> None:
        """Take the values of a buffer that was assigned, not written."""
        if current is None:
            raise ModelError(_refused(each.name, "was set to None"))
        home = self._home[each.name]
        for what in ("dtype", "device"):
            old, new = getattr(home, what), getattr(current, what)
            if old != new:
                changed = f"had the {what} {old}, and was given {new}"
                raise ModelError(_refused(each.name, changed))
        each.table[each.key] = each.tensor
        self._assigned[each.name] = each
        self._place(each, current.detach().clone())

    def _check_places(self) -> None:
        """Refuse buffers that the state would not have."""
        if [len(table) for _, table, _ in self._tables] != self._num_keys:
            for path, table, before in self._tables:
                for key in table.keys() ^ before.keys():
                    what = "removed" if key in before else "registered"
                    raise ModelError(_refused(_named(path, key), f"was {what}"))
        for name, table, key, tensor in self._fixed:
            if table.get(key) is not tensor:
                shared = "is shared, and was assigned under one of its names"
                what = "was None, and was set" if tensor is None else shared
                raise ModelError(_refused(name, what))


def _named(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _refused(name: str, what: str) -> str:
    return (
        f"The buffer {name!r} {what} in the forward pass. A state has the buffers that its"
        " model was made with, in their dtypes and on their devices: register it with a"
        " tensor of the dtype that it is to have, and write into that one."
    )
