# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward pass writes (BatchNorm's statistics), kept pure.

The forward pass writes into scratch tensors; the state's own are written only when the
update is applied. Large buffers that the first pass does not write (masks, tables) are
bound to the state's own tensors from then on, so that they are not copied at each step;
should a later pass write one after all, its version tells, and a spare copy puts it back.
"""

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from accelfn import foreach


@attrs.frozen(eq=False)
class _Buffer:
    """Where a buffer stands in the module, and the tensor object that stays there."""

    name: str
    table: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor


_LARGE = 65_536  # elements; below that a copy costs less than the wish to save it


class Buffers:
    """The buffers of an engine's module."""

    def __init__(self, module: nn.Module) -> None:
        """Find them; a shared buffer counts once."""
        found: dict[int, _Buffer] = {}
        for path, owner in module.named_modules():
            table = owner._buffers  # pyright: ignore[reportPrivateUsage]
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    found.setdefault(id(tensor), _Buffer(name, table, key, tensor))
        self._found = list(found.values())
        self._home: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}
        self._idle: list[_Buffer] | None = None
        self._versions: list[int] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's buffers."""
        self._home = dict(home)
        self._scratch = {each.name: home[each.name].clone() for each in self._found}
        for each in self._found:
            idle = self._idle is not None and each in self._idle
            each.tensor.data = (home if idle else self._scratch)[each.name]

    def begin(self, written: Mapping[str, torch.Tensor]) -> None:
        """Put values in place for a forward pass: the state's, or what was `written` since."""
        idle = {each.name for each in self._idle or []}
        sources = {n: written.get(n, t) for n, t in self._home.items() if n not in idle}
        stale = [n for n, source in sources.items() if source is not self._scratch[n]]
        foreach.copy_([self._scratch[n] for n in stale], [sources[n] for n in stale])
        self._versions = [each.tensor._version for each in self._idle or []]

    def end(self) -> dict[str, torch.Tensor]:
        """Return the buffers after forward passes, by name; the next pass reuses them."""
        for each in self._found:
            current = each.table[each.key]
            if (
                current is not None and current is not each.tensor
            ):  # assigned, not written
                each.table[each.key] = each.tensor
                self._scratch[each.name] = current.detach().clone()
                each.tensor.data = self._scratch[each.name]
        if self._idle is None:
            self._idle = [each for each in self._found if self._seems_constant(each)]
            for each in self._idle:
                each.tensor.data = self._home[each.name]
        else:
            self._guard_written()
        idle = {each.name for each in self._idle}
        return {name: t for name, t in self._scratch.items() if name not in idle}

    def abandon(self) -> None:
        """Forget a forward pass that raised."""
        for each in self._found:
            each.table[each.key] = each.tensor
        self._guard_written()

    def commit(self, written: Mapping[str, torch.Tensor]) -> None:
        """Write the values into the state's own buffers."""
        for name, value in written.items():
            if self._home[name].shape != value.shape:
                self._home[name].data = value.clone()
        names = list(written)
        foreach.copy_([self._home[n] for n in names], [written[n] for n in names])

    def _seems_constant(self, each: _Buffer) -> bool:
        home = self._home[each.name]
        return home.numel() > _LARGE and torch.equal(each.tensor, home)

    def _guard_written(self) -> None:
        """Take what a pass wrote into an idle buffer for scratch, and put the state's back."""
        for each, version in zip(list(self._idle or []), self._versions, strict=True):
            if each.tensor._version != version and self._idle is not None:
                home, spare = self._home[each.name], self._scratch[each.name]
                self._scratch[each.name] = home.clone()
                home.copy_(spare)
                each.tensor.data = self._scratch[each.name]
                self._idle.remove(each)
        self._versions = []
