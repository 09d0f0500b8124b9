# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward pass writes (BatchNorm's statistics), kept pure.

The forward pass writes into scratch tensors; the state's own are written only when the
update is applied. Buffers that no forward pass has written stay bound to the state's
tensors, so large constant ones (masks, tables) are never copied.
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
        self._scratch: dict[str, torch.Tensor] | None = None
        self._versions: list[int] = []
        self._learning = True

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's buffers."""
        self._home = dict(home)
        if self._scratch is not None:
            self._scratch = {n: torch.empty_like(home[n]) for n in self._scratch}
        self._point()

    def begin(self, written: Mapping[str, torch.Tensor]) -> None:
        """Put values in place for a forward pass: the state's, or what was `written` since."""
        if self._scratch is None:  # the first pass shows which are written: guard all
            self._scratch = {n: torch.empty_like(t) for n, t in self._home.items()}
            self._point()
        sources = {n: written.get(n, self._home[n]) for n in self._scratch}
        stale = [n for n, source in sources.items() if source is not self._scratch[n]]
        foreach.copy_([self._scratch[n] for n in stale], [sources[n] for n in stale])
        self._versions = [each.tensor._version for each in self._found]

    def end(self) -> dict[str, torch.Tensor]:
        """Return what forward passes write, by name; the tensors are reused by the next."""
        scratch = {} if self._scratch is None else self._scratch
        for each, version in zip(self._found, self._versions, strict=True):
            current = each.table[each.key]
            assigned = current is not None and current is not each.tensor
            if assigned and current is not None:
                each.table[each.key] = each.tensor
                self._keep(each, current)
            elif self._learning and self._is_untouched(each, version):
                del scratch[each.name]
                each.tensor.data = self._home[each.name]
            elif each.tensor._version != version and each.name not in scratch:
                # written for the first time, in the state's own tensor: guarded from now on
                self._keep(each, self._home[each.name])
        self._learning = False
        return dict(scratch)

    def abandon(self) -> None:
        """Forget a forward pass that raised."""
        for each in self._found:
            each.table[each.key] = each.tensor

    def commit(self, written: Mapping[str, torch.Tensor]) -> None:
        """Write the values into the state's own buffers."""
        for name, value in written.items():
            if self._home[name].shape != value.shape:
                self._home[name].data = value.clone()
        names = list(written)
        foreach.copy_([self._home[n] for n in names], [written[n] for n in names])

    def _is_untouched(self, each: _Buffer, version: int) -> bool:
        """Return whether a pass left a buffer alone; batch norm writes unseen by versions."""
        same = torch.equal(each.tensor, self._home[each.name])
        return same and each.tensor._version == version

    def _keep(self, each: _Buffer, value: torch.Tensor) -> None:
        """Guard a buffer with a scratch tensor that has this value."""
        if self._scratch is not None:
            self._scratch[each.name] = each.tensor.data = value.detach().clone()

    def _point(self) -> None:
        scratch = self._scratch or {}
        for each in self._found:
            each.tensor.data = scratch.get(each.name, self._home[each.name])
