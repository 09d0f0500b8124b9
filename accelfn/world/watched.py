# SPDX-License-Identifier: Apache-2.0
"""A store at which nobody waits for what a process would write that is gone."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# torch's stubs name the same parameter differently from method to method
# pyright: reportIncompatibleMethodOverride=false

_LOOKS_EVERY = 0.02


class WatchedStore(dist.Store):
    """Another store, whose waits end where one of those is gone that are waited for.

    torch's Gloo opens a group by what its ranks write and read at a store. It asks for no more
    than `set`, `get`, `add`, `check` and `wait`.
    """

    def __init__(
        self, store: dist.Store, is_one_gone: Callable[[], bool], timeout: float
    ) -> None:
        """Take a store, what says that somebody is gone, and how many seconds to wait."""
        super().__init__()
        self._store, self._is_one_gone, self._timeout = store, is_one_gone, timeout

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            dist.DistStoreError: one that might write them is gone, or it takes too long.
        """
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self._store.check(list(keys)):
            if self._is_one_gone():
                msg = f"one of the ranks is gone, before {', '.join(keys)} was written"
                raise dist.DistStoreError(msg)
            if time.monotonic() > until:
                msg = f"{', '.join(keys)} was not written within {seconds:g} s"
                raise dist.DistStoreError(msg)
            time.sleep(_LOOKS_EVERY)

    def has_extended_api(self) -> bool:
        """Whether it appends, and reads several at once: it does not."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for so long."""
        self._timeout = timeout.total_seconds()
