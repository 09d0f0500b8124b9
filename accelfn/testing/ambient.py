# SPDX-License-Identifier: Apache-2.0
"""What a process has once and every simulated rank has of its own.

The random generators of torch, numpy and Python and torch's default process group belong
to a process, so they are swapped when the turn passes; the environment is put back at the
end. Modes (gradients, inference, autocast) belong to a thread: ranks enter the caller's.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accelfn import streams


@attrs.define
class _Kept:
    """One rank's share of the process."""

    torch: torch.Tensor
    python: Any
    numpy: Any
    group: dist.ProcessGroup | None

    @classmethod
    def of_process(cls) -> "_Kept":
        numpy = sys.modules.get("numpy")
        return cls(
            torch=torch.default_generator.get_state(),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_bit_generator(),
            group=distributed_c10d._world.default_pg,
        )

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self.numpy)
        distributed_c10d._world.default_pg = self.group


class Ambient:
    """Each rank's share of the process, swapped in and out with its turn."""

    def __init__(self, seed: int, groups: Sequence[dist.ProcessGroup]) -> None:
        """Take the seed of all ranks, and what the default group is for each."""
        self._seed = seed
        self._groups = groups
        self._kept: dict[int, _Kept] = {}

    def enter(self, rank: int) -> None:
        """Make the process this rank's."""
        kept = self._kept.get(rank)
        if kept is not None:
            kept.put_back()
            return
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_bit_generator(numpy.random.MT19937())
        seed_rank(self._seed, rank)
        distributed_c10d._world.default_pg = self._groups[rank]

    def leave(self, rank: int) -> None:
        """Keep what this rank made of it."""
        self._kept[rank] = _Kept.of_process()


def seed_rank(seed: int, rank: int) -> None:
    """Seed the process's generators as this rank's are at its start."""
    number = streams.key(seed, "rank", rank)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def process_kept() -> Iterator[None]:
    """Put the process back as it was, whatever ranks do to it."""
    kept = _Kept.of_process()
    environment = dict(os.environ)
    try:
        yield
    finally:
        kept.put_back()
        if environment != dict(os.environ):
            os.environ.clear()
            os.environ.update(environment)


def callers_modes() -> Callable[[], ExitStack]:
    """Return what enters, in another thread, the modes that are on in this one."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    cache = torch.is_autocast_cache_enabled()
    casts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def enter() -> ExitStack:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(mode=inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casts:
            cast = torch.autocast(kind, dtype=dtype, cache_enabled=cache)
            stack.enter_context(cast)
        return stack

    return enter
