# SPDX-License-Identifier: Apache-2.0
"""By what a checkpoint's bytes are digested, in each format of its manifest.

BLAKE3 is as hard to forge as SHA-256, and takes a fifth of its time, so that a save waits for
the disk and not for its digests. What the first format wrote is read by SHA-256.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import attrs
from blake3 import blake3


class Hashing(Protocol):
    """A digest under way."""

    def update(self, data: Any, /) -> object:
        """Take what comes next."""
        ...

    def hexdigest(self) -> str:
        """Return the digest of what came so far; more may come."""
        ...


@attrs.frozen
class Algorithm:
    """A digest's algorithm.

    Attributes:
        name: as messages have it.
        word: as manifests have it.
        begin: begins a digest with some bytes.
    """

    name: str
    word: str
    begin: Callable[[Any], Hashing]

    def of(self, data: bytes) -> str:
        """Return the digest of all bytes."""
        return self.begin(data).hexdigest()


SHA256 = Algorithm("SHA-256", "sha256", hashlib.sha256)
BLAKE3 = Algorithm("BLAKE3", "blake3", blake3)
FORMATS = {1: SHA256, 2: BLAKE3}
"""By the number of a manifest's format."""
FORMAT = 2
WRITTEN = FORMATS[FORMAT]
"""By what new ones are digested."""
