# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward pass writes (BatchNorm's statistics), kept pure.

The forward pass writes into scratch tensors; the state's own are written only when the
update is applied. Buffers that no forward pass has written stay bound to the state's
tensors, so large constant ones (masks, tables) are never copied.
"""

from collections.abc import Mapping

import torch
from torch import nn


class Buffers:
    """The buffers of an engine's module."""

    def __init__(self, module: nn.Module) -> None:
        """Find them; a shared buffer counts once."""
        self._found: list[tuple[str, nn.Module, str, torch.Tensor]] = []
        seen: set[int] = set()
        for path, owner in module.named_modules():
            for key, buffer in owner.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{path}.{key}" if path else key
                    self._found.append((name, owner, key, buffer))
        self._home: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's buffers."""
        self._home = dict(home)
        if self._scratch is not None:  # what a pass writes may differ for this state
            self._scratch = {n: torch.empty_like(home[n]) for n in self._scratch}
        self._point()

    def begin(self, written: Mapping[str, torch.Tensor]) -> None:
        """Put values in place before a forward pass: the state's, or those `written` since."""
        if self._scratch is None:  # the first pass shows which are written; guard all
            self._scratch = {n: torch.empty_like(t) for n, t in self._home.items()}
            self._point()
        scratch = self._scratch
        sources = [written.get(name, self._home[name]) for name in scratch]
        pairs = [
            (target, source)
            for target, source in zip(scratch.values(), sources, strict=True)
            if target is not source
        ]
        if pairs:
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])  # pyright: ignore[reportPrivateUsage]
        self._versions = [buffer._version for *_, buffer in self._found]  # pyright: ignore[reportPrivateUsage]

    def end(self) -> dict[str, torch.Tensor]:
        """Return what the forward pass wrote, by name; the tensors are reused by the next."""
        assert self._scratch is not None  # noqa: S101 - begin() made it
        for (name, owner, key, buffer), version in zip(
            self._found, self._versions, strict=True
        ):
            current = owner._buffers[key]  # pyright: ignore[reportPrivateUsage]
            if (
                current is not buffer and current is not None
            ):  # assigned, not written in place
                owner._buffers[key] = buffer  # pyright: ignore[reportPrivateUsage]
                self._scratch[name] = current.detach().clone()
                buffer.data = self._scratch[name]
            elif buffer._version == version and name in self._scratch:  # pyright: ignore[reportPrivateUsage]
                del self._scratch[name]
                buffer.data = self._home[name]
            elif buffer._version != version and name not in self._scratch:  # pyright: ignore[reportPrivateUsage]
                # first written now, in the state's own tensor: keep the value, and guard from here on
                self._scratch[name] = torch.empty_like(self._home[name])
                self._scratch[name].copy_(self._home[name])
                buffer.data = self._scratch[name]
        return dict(self._scratch)

    def abandon(self) -> None:
        """Forget a forward pass that raised."""
        for _, owner, key, buffer in self._found:
            owner._buffers[key] = buffer  # pyright: ignore[reportPrivateUsage]

    def commit(self, written: Mapping[str, torch.Tensor]) -> None:
        """Write the values into the state's own buffers."""
        for name, value in written.items():
            home = self._home[name]
            if home.shape != value.shape:
                home.data = value.clone()
            else:
                home.copy_(value)

    def _point(self) -> None:
        scratch = self._scratch or {}
        for name, _, _, buffer in self._found:
            buffer.data = scratch.get(name, self._home[name])
