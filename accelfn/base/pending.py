# SPDX-License-Identifier: Apache-2.0
"""`Pending`: values that ranks are still sending each other."""

from collections.abc import Callable
from typing import Any, Self

from accelfn.base.calling import called


@called
class Pending:
    """Values on their way: what `af.start_reduce` returns, and a slot may keep.

    In trees, slots among them, it is a container of its values: whoever copies, saves, compares
    or lays out a state waits for them, and what they get is one that has arrived. Waiting
    early changes no bit.

    Example:
        >>> Pending.of(3).wait()
        3
    """

    __slots__ = ("_finish", "_values")

    def __init__(self, finish: Callable[[], Any]) -> None:
        """Take what waits for the values, and returns them; it is called once."""
        self._finish: Callable[[], Any] | None = finish
        self._values: Any = None

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return one that has arrived."""
        made = cls(lambda: values)
        made.wait()
        return made

    @property
    def has_arrived(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._finish is None

    def wait(self) -> Any:
        """Return the values; the first to ask waits for them.

        Raises:
            PeerFailedError: a rank left, failed or did not come in time.
        """
        if self._finish is not None:
            self._values = self._finish()
            self._finish = None
        return self._values

    def then(self, change: Callable[[Any], Any]) -> "Pending":
        """Return what a function makes of the values, once somebody waits for it."""
        return Pending(lambda: change(self.wait()))

    def __repr__(self) -> str:
        """Say whether it has arrived."""
        return f"<Pending, {'arrived' if self.has_arrived else 'in flight'}>"
