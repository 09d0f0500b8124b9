# SPDX-License-Identifier: Apache-2.0
"""Hashing what is read of a file, while more of it is read."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from accelfn.errors import CheckpointCorruptError

_TOGETHER = 1 << 20
"""Bytes that are handed over to be hashed, at least: a small tensor's hash takes less time."""
_AHEAD = 2
"""As often; what waits to be hashed."""


class Hashing:
    """Hashes what was read of a file in another thread, many small tensors at once."""

    def __init__(self, pool: ThreadPoolExecutor, path: Path) -> None:
        """Take the thread and the file's path."""
        self._pool, self._path, self._digest = pool, path, blake3()
        self._read: list[tuple[memoryview, str, str | None]] = []
        self._num_bytes = 0
        self._under_way: deque[Future[str | None]] = deque()

    def add(self, values: memoryview, what: str, expected: str | None) -> None:
        """Take the next bytes, and the digest up to their end if it is known."""
        self._read.append((values, what, expected))
        self._num_bytes += len(values)
        if self._num_bytes >= _TOGETHER:
            self._hand_over()
            while len(self._under_way) > _AHEAD:
                self._compare()

    def finish(self) -> None:
        """Return once all is known to be what was saved.

        Raises:
            CheckpointCorruptError: it is not; what differs first is named.
        """
        self._hand_over()
        while self._under_way:
            self._compare()

    def _hand_over(self) -> None:
        self._under_way.append(self._pool.submit(self._differing, self._read))
        self._read, self._num_bytes = [], 0

    def _differing(self, read: list[tuple[memoryview, str, str | None]]) -> str | None:
        for values, what, expected in read:
            self._digest.update(values)
            if expected is not None and self._digest.hexdigest() != expected:
                return what
        return None

    def _compare(self) -> None:
        what = self._under_way.popleft().result()
        if what is not None:
            msg = (
                f"{self._path} is not what was saved: {what} differs in its BLAKE3."
                " Load another checkpoint."
            )
            raise CheckpointCorruptError(msg)
