# SPDX-License-Identifier: Apache-2.0
"""How many updates were skipped, where a device has decided it and nobody has asked yet."""

import attrs
import torch

from accelfn.base.accelerator import host_memory

LOOK_EVERY = 100
"""Updates after which a device is asked for what it counts, where nobody else asks."""


@attrs.define(eq=False)
class Skips:
    """A count on a device, under way to the host; whoever reads it waits for it alone.

    Attributes:
        tried: how many updates there were, skipped or not.
        count: how many of them were skipped, a scalar on the device.
    """

    tried: int
    count: torch.Tensor
    _host: torch.Tensor
    _arrived: torch.Event | None
    _known: int | None = None

    @classmethod
    def sent(cls, tried: int, count: torch.Tensor) -> "Skips":
        """Return a count that is on its way from now on."""
        if count.is_cpu:
            return cls(tried, count, count, None)
        host = host_memory(count.shape, count.dtype, count.device)
        host.copy_(count, non_blocking=True)
        arrived = torch.Event(count.device)
        arrived.record()
        return cls(tried, count, host, arrived)

    def read(self) -> int:
        """Return the count; work that was given to the device since is not waited for."""
        if self._known is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._known = int(self._host)
        return self._known
