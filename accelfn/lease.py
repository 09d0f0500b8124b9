# SPDX-License-Identifier: Apache-2.0
"""`Lease`: whether tensors still are what the records that hold them say."""

from accelfn.errors import Error


class Lease:
    """Shared by all records of the same tensors; once they have changed, it is over for good."""

    __slots__ = ("_ended", "is_loaded")

    def __init__(self, *, is_loaded: bool = False) -> None:
        """Begin valid; `is_loaded` of tensors that came from a checkpoint, as they are."""
        self._ended: tuple[type[Error], str, int] | None = None
        self.is_loaded = is_loaded

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

    def end(self, kind: type[Error], message: str, *, update: int) -> None:
        """End it; whoever uses the tensors through an old record gets this error.

        Every step ends a lease, so the message is made when somebody asks.
        """
        self._ended = (kind, message, update)

    def restore(self) -> None:
        """Make it valid again: what it was ended for has changed nothing."""
        self._ended = None
