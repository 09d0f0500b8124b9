# SPDX-License-Identifier: Apache-2.0
"""`Lease`: whether tensors still are what the records that hold them say."""

import weakref
from typing import Any, Protocol

from accelfn.errors import Error


class Leased(Protocol):
    """A record of tensors."""

    @property
    def lease(self) -> "Lease":
        """Whether they still are what it says."""
        ...


class Lease:
    """Shared by all records of the same tensors; once they have changed, it is over for good."""

    __slots__ = ("__weakref__", "_ended", "_heirs", "_line", "is_loaded", "is_mean")

    def __init__(self, *, is_loaded: bool = False) -> None:
        """Begin valid; `is_loaded` of tensors that came from a checkpoint, as they are."""
        self._ended: tuple[type[Error], str, int] | None = None
        self.is_loaded = is_loaded
        self.is_mean = False  # of gradients: whether they were divided by their weight
        self._heirs: _Line | None = None
        self._line: weakref.ref[_Line] | None = None

    def check(self) -> None:
        """Raise if the tensors were given away.

        Raises:
            Error: they were; of the kind and with the message that ended the lease.
        """
        if self._ended is not None:
            kind, message, update = self._ended
            raise kind(message.format(update=update))

    @property
    def is_over(self) -> bool:
        """Whether the tensors were given away."""
        return self._ended is not None

    @property
    def heir(self) -> Any:
        """The newest record that came of those of this lease, if they were handed over."""
        return None if self._heirs is None else self._heirs.newest

    def end(self, kind: type[Error], message: str, *, update: int) -> None:
        """End it; whoever uses the tensors through an old record gets this error.

        Every step ends a lease, so the message is made when somebody asks.
        """
        self._ended = (kind, message, update)

    def hand_over(
        self, heir: Leased, kind: type[Error], message: str, *, update: int
    ) -> None:
        """End it, for the tensors are another record's, which old ones remember.

        All that were handed over one after another know the newest, and no other: an old
        record keeps one more alive, not all that came between. The newest itself does not
        know them, so it lives no longer than somebody has it, or one of them.
        """
        line = None if self._line is None else self._line()
        if line is None:
            line = _Line()
        line.newest = heir
        heir.lease._line = weakref.ref(line)
        self._heirs = line
        self.end(kind, message, update=update)

    def restore(self) -> None:
        """Make it valid again: what it was ended for has changed nothing."""
        self._ended = None


class _Line:
    """Leases that were handed over one to the next."""

    __slots__ = ("__weakref__", "newest")
    newest: Leased
