# SPDX-License-Identifier: Apache-2.0
"""`Lease`: whether tensors still are what the records that hold them say."""

from accelfn.errors import Error


class Lease:
    """Shared by all records of the same tensors; ended once, for good."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        """Begin valid."""
        self._ended: Error | None = None

    def check(self) -> None:
        """Raise if the tensors were given away.

        Raises:
            Error: they were; the one that ended the lease.
        """
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)

    @property
    def is_over(self) -> bool:
        """Whether the tensors were given away."""
        return self._ended is not None

    def end(self, error: Error) -> None:
        """End it; whoever uses the tensors through an old record gets this error."""
        self._ended = error
