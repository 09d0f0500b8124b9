# SPDX-License-Identifier: Apache-2.0
"""The work of a collective: its result is written when it is waited for, and not before.

Until then the tensors hold what cannot pass for a result, so that a forgotten wait shows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from accelfn.base import accelerator
from accelfn.testing.simulation.calls import Call
from accelfn.testing.simulation.exchange import Exchange


class SimulatedWork(Work):
    """What torch's collectives return or wait for."""

    def __init__(
        self,
        exchange: Exchange,
        calls: Sequence[Call],
        returned: Sequence[torch.Tensor],
    ) -> None:
        """Post calls. `returned` is what a future of this work holds."""
        super().__init__()
        self._exchange = exchange
        self._posted = [(call, exchange.post(call)) for call in calls]
        self._num_written = 0
        self._returned = list(returned)
        for call in calls:
            for target in call.fills:
                _write(target, _poison)

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until the result is there, and write it."""
        del timeout  # the world's, in virtual time
        while self._num_written < len(self._posted):
            call, meeting = self._posted[self._num_written]
            parts = self._exchange.wait(call, meeting)
            for target, part in zip(call.fills, parts, strict=True):
                _write(target, lambda plain, part=part: plain.copy_(part))
            # what it was copied from is let go when all have it, to another's stream
            accelerator.wait_for_all(call.fills)
            self._exchange.receive(call)
            self._num_written += 1
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Let other ranks run, and say whether the result is there; then it is written."""
        left = self._posted[self._num_written :]
        return all(self._exchange.is_done(*each) for each in left) and self.wait()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that is done: C++ waits for it where no turn could pass."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._returned)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        self.wait()
        return self._returned

    def _source_rank(self) -> int:
        """Return who sent what a `recv` received."""
        self.wait()
        call, meeting = self._posted[0]
        return call.group.place_of(meeting.calls[0].rank)


def _write(target: torch.Tensor, how: Callable[[torch.Tensor], object]) -> None:
    """Write a tensor where autograd does not see it, and inference mode allows it."""
    if target.is_inference():
        with torch.inference_mode():
            how(target)
    elif target.layout is not torch.strided:  # what is detached has indices of its own
        with torch.no_grad():
            how(target)
    else:
        how(target.detach())


def _poison(target: torch.Tensor) -> None:
    """Fill with NaN, the extreme integer, what booleans were not, or nothing at all."""
    if target.layout is not torch.strided:
        target.zero_()
    elif target.dtype.is_floating_point or target.dtype.is_complex:
        target.fill_(math.nan)
    elif target.dtype is torch.bool:
        target.logical_not_()
    else:
        limits = torch.iinfo(target.dtype)
        target.fill_(limits.min or limits.max)
