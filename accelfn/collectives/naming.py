# SPDX-License-Identifier: Apache-2.0
"""`naming`: a backend's failure says what the ranks were doing."""

import re

from accelfn.errors import Error, PeerFailedError
from accelfn.world import World

_PEER_SIGNS = (
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "remote process",
    "NCCL",
)
_WHERE_IN_SOURCE = re.compile(r"^\[[^\]]*\.(cc|cpp)[^\]]*\]\s*")


class naming:
    """Turn a backend's failure inside a `with` block into `PeerFailedError`.

    Raises:
        PeerFailedError: another rank closed the connection or did not arrive in time.
    """

    __slots__ = ("_begins", "_label", "_outer", "_world")

    def __init__(self, label: str, world: World, *, begins: bool = True) -> None:
        """Take what the ranks are doing, in which world, and whether they begin it here."""
        self._label, self._begins = label, begins
        self._world = world
        self._outer: str | None = None

    def __enter__(self) -> None:
        """Let it be known what this rank does."""
        connection = self._world.connection
        if connection.is_lent:
            connection.check_not_lent()
        activity = connection.activity
        self._outer, activity.label = activity.label, self._label
        if self._begins:
            activity.trail.append((self._label, activity.step))

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Name the failure, if it is one of the connection."""
        activity = self._world.connection.activity
        activity.label, activity.structure = self._outer, None
        if isinstance(error, PeerFailedError):
            self._world.whole.connection.is_broken = True
        if not isinstance(error, RuntimeError) or isinstance(error, Error):
            return
        if any(sign in str(error) for sign in _PEER_SIGNS):
            whole = self._world.whole
            whole.connection.is_broken = True
            from accelfn.collectives.missing import missing  # noqa: PLC0415 - rarely needed

            msg = (
                f"Rank {whole.rank} of {whole.size} waited in {self._label!r}"
                f"{self._when()}, but {missing(self._world, self._label)}"
                f" ({_in_short(str(error))})"
            )
            # the backend's own traceback says nothing more; it stays as the context
            raise PeerFailedError(msg) from None

    def _when(self) -> str:
        step = self._world.connection.activity.step
        return "" if step is None else f" at update {step}"


def _in_short(words: str) -> str:
    """Return what a backend says, without where in its source it says so and what it guesses."""
    first = _WHERE_IN_SOURCE.sub("", words.splitlines()[0])
    return first.partition(". ")[0]
